"""`swap_sdpa`: every call of torch's fused attention by a mechanism, for a while."""

from __future__ import annotations

import contextlib
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from subquad.attention.functional import attention
from subquad.attention.masks import Mask, recognised
from subquad.errors import OptionError, ShapeError, UnsupportedError
from subquad.options import Config, Spec
from subquad.registry import resolve

__all__ = ["Redirect", "swap_sdpa"]

_Attend = Callable[[Tensor, Tensor, Tensor, Mask, "float | None", float], Tensor]


class _Inside(threading.local):
    """True while this thread is in an `attend`, whose own calls no redirection may take."""

    attending = False


_inside = _Inside()


class Redirect(TorchFunctionMode):
    """While active, this thread's calls of ``scaled_dot_product_attention`` go to `attend`.

    Works for every caller, however it imported the function, and closes torch's fast paths of
    `nn.MultiheadAttention`, which would go around it. Calls inside `attend` are torch's own.

    Args:
        attend: gets q (B, H, L, D), k, v (B, Hkv, S, ·), a `Mask`, scale and dropout.

    Attributes:
        calls: how many calls were redirected.
    """

    def __init__(self, attend: _Attend) -> None:
        super().__init__()
        self.attend = _alone(attend)
        self.calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs a torch function, or what stands in its place."""
        kwargs = kwargs or {}
        if _inside.attending:
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._sdpa(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            if kwargs.get("need_weights", True):
                raise UnsupportedError(
                    "multi_head_attention_forward",
                    "need_weights=True without scaled_dot_product_attention",
                    "it forms the weights itself; pass need_weights=False, or swap the modules "
                    "with subquad.convert",
                )
            return self._multihead()(*args, **kwargs)
        return func(*args, **kwargs)

    def _multihead(self) -> Callable[..., Any]:
        """``multi_head_attention_forward`` whose inner call leads here.

        The mode is off inside of itself, and on again the function would hand itself over once
        more: so it is the same code with two of the names that it looks up replaced.
        """
        original: Any = F.multi_head_attention_forward
        names = {
            **original.__globals__,
            "has_torch_function": lambda tensors: False,
            "scaled_dot_product_attention": self._sdpa,
        }
        inside = types.FunctionType(original.__code__, names, argdefs=original.__defaults__)
        inside.__kwdefaults__ = original.__kwdefaults__
        return inside

    def _sdpa(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        self.calls += 1
        if is_causal and attn_mask is not None:
            raise OptionError("scaled_dot_product_attention: give attn_mask or is_causal, not both")
        q, k, v, lead = _lifted(query, key, value)
        if k.shape[1] not in (1, q.shape[1]) and not enable_gqa:
            raise ShapeError(
                f"key must have query's {q.shape[1]} heads, or one, without enable_gqa=True, "
                f"given {tuple(key.shape)}"
            )
        queries, keys = q.shape[2], k.shape[2]
        if is_causal and queries != keys:
            out = self._top_left(q, k, v, scale, dropout_p)
        else:
            mask = Mask(causal=is_causal)
            if attn_mask is not None:
                mask = recognised(_explicit(attn_mask, query.dim(), lead, queries, keys))
            out = self.attend(q, k, v, mask, scale, dropout_p)
        out = out.reshape(*lead, *out.shape[1:])
        return out if query.dim() > 3 else out.squeeze(-3)

    def _top_left(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, dropout: float
    ) -> Tensor:
        """torch's causal mask for L ≠ S: query i reads keys up to i; queries from S on read all."""
        both = min(q.shape[2], k.shape[2])
        early = (q[:, :, :both], k[:, :, :both], v[:, :, :both])
        square = self.attend(*early, Mask(causal=True), scale, dropout)
        if q.shape[2] == both:
            return square
        return torch.cat([square, self.attend(q[:, :, both:], k, v, Mask(), scale, dropout)], 2)


def _alone(attend: _Attend) -> _Attend:
    """`attend` whose own calls are torch's, whatever redirections there are around it."""

    def run(*args: Any) -> Tensor:
        _inside.attending = True
        try:
            return attend(*args)
        finally:
            _inside.attending = False

    return run


def _lifted(*tensors: Tensor) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """q, k, v as (B, H, length, ·), and the leading dimensions that became B."""
    dims = tensors[0].dim()
    if dims < 2 or any(x.dim() != dims for x in tensors):
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
        raise ShapeError(
            "query, key and value must be (..., length, width) with one number of dimensions, "
            f"given {shapes}"
        )
    tensors = tuple(x if dims > 3 else x.unsqueeze(-3) for x in tensors)
    try:
        lead = tuple(torch.broadcast_shapes(*(x.shape[:-3] for x in tensors)))
    except RuntimeError:
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
        raise ShapeError(
            f"query, key and value must have leading dimensions that broadcast, given {shapes}"
        ) from None
    q, k, v = (x.expand(*lead, *x.shape[-3:]).reshape(-1, *x.shape[-3:]) for x in tensors)
    return q, k, v, lead


def _explicit(mask: Tensor, dims: int, lead: tuple[int, ...], queries: int, keys: int) -> Tensor:
    """A mask that broadcasts to the weights (..., L, S) as (B or 1, H or 1, L, S)."""
    given = tuple(mask.shape)
    if mask.dim() > 2 and dims < 4:
        mask = mask.unsqueeze(-3)  # there is no dimension of heads
    heads = mask.shape[-3] if mask.dim() > 2 else 1
    try:
        if mask.dim() <= 3:
            return mask.expand(1, heads, queries, keys)
        return mask.expand(*lead, heads, queries, keys).reshape(-1, heads, queries, keys)
    except RuntimeError:
        raise ShapeError(
            f"attn_mask must broadcast to (..., L, S) with L, S = {queries}, {keys}, given {given}"
        ) from None


@contextlib.contextmanager
def swap_sdpa(
    mechanism: str | Spec | Config = "performer", *, seed: int = 0, **options: Any
) -> Iterator[Redirect]:
    """Within, every ``scaled_dot_product_attention`` call of this thread runs a mechanism.

        with sq.swap_sdpa("performer(features=128)") as swapped:
            out = model(x)          # diffusers, timm, your own: whatever calls the function

    For experiments with models that `subquad.convert` does not know. Callers are reached
    however they imported the function, `torch.nn.functional.multi_head_attention_forward`
    too; other threads, compiled graphs and a backward pass that recomputes after the end are
    not. All calls share options and seed; nothing is learned.

    What a call means is torch's: ``is_causal`` is aligned to the first key, masks are True =
    attend or added floats. A mask tensor is read by its values, O(L·S): one that is the causal
    triangle (L = S) or closes whole keys becomes that `Mask`, any other needs a mechanism with
    explicit masks. Dropout is not applied, which warns once. A row without any key to attend
    gives zeros. Cost: the mechanism's, see `subquad.describe`.

    Args:
        mechanism: a name, a string with options or a config object, without learned parameters.
        seed: determines random draws.
        options: options of the mechanism, as in `subquad.build`.

    Yields:
        An object whose ``calls`` counts the redirected calls; none at all warns at the end.

    Raises:
        UnknownNameError, OptionError: unknown mechanism or wrong options.
        UnsupportedError: in a call, for what the mechanism cannot do; for
            ``multi_head_attention_forward`` with ``need_weights=True``, which forms weights itself.

    Example:
        >>> import torch, subquad as sq
        >>> layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True).eval()
        >>> x = torch.randn(1, 50, 32)
        >>> exact = layer(x)
        >>> with sq.swap_sdpa("performer(features=64)") as swapped:
        ...     out = layer(x)
        >>> swapped.calls, torch.equal(out, exact), torch.equal(layer(x), exact)
        (1, False, True)
    """
    found, config = resolve(mechanism, options)
    warned = False

    def attend(
        q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, dropout: float
    ) -> Tensor:
        nonlocal warned
        if dropout > 0.0 and not warned:
            warned = True
            warnings.warn(
                f"attention dropout {dropout:g} is not applied by {found.name!r}: there are no "
                "attention weights to drop. (Said once.)",
                UserWarning,
                stacklevel=2,
            )
        use = "causal" if mask.causal else "encoder" if q.shape[2] == k.shape[2] else "cross"
        return attention(q, k, v, config.for_use(use), mask=mask, scale=scale, seed=seed)

    with Redirect(attend) as redirect:
        yield redirect
    if not redirect.calls:
        warnings.warn(
            "swap_sdpa: nothing called scaled_dot_product_attention; a transformers model has to "
            "use attn_implementation='sdpa'",
            UserWarning,
            stacklevel=3,
        )
