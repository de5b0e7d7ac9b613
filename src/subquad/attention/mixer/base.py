"""`Mixer`: mechanisms that mix whole tokens, without queries, keys and values.

A mixer reads x (..., L, C) and gives (..., L, C). It stands where a layer's self-attention
stands, projections included: `subquad.attention.mixer.layer.TokenMixing` is that place.
A subclass supplies `_mix` and, where it has a causal form, `_continue`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NoReturn

import torch
from torch import Tensor

from subquad import registry
from subquad.attention.base import (
    FLOATS,
    Absent,
    Capabilities,
    Mechanism,
    State,
    own_device,
)
from subquad.attention.exact.engine import sums_dtype
from subquad.attention.masks import MASK_KINDS, Mask
from subquad.errors import (
    DeviceError,
    DtypeError,
    OptionError,
    ShapeError,
    UnsupportedError,
)
from subquad.kernels.precision import autocast_dtype, own_precision
from subquad.options import format_value, integer_problem
from subquad.shapes import KeyMask

__all__ = ["Mixer", "followed", "mixer_capabilities"]


def mixer_capabilities(**own: Any) -> Capabilities:
    """Capabilities with what no mixer has filled in: all that is about q, k and v."""
    lacking = {
        "cross": Absent("one sequence is mixed with itself: there are no other keys"),
        "gqa": Absent("it has no key/value heads"),
        "read": Absent("it has no queries that could read a state by themselves"),
        "partial": Absent("it has no sums over keys"),
        "weights": Absent("it has no attention weights; see `Mixer.influence`"),
        "functional": Absent("it mixes tokens x and reads no q, k, v: build it, call mixer(x)"),
        "prefix": Absent("it masks the future whole or not at all"),
        "segments": Absent("it mixes all tokens of a row; call once for each segment"),
        "window": Absent("it mixes all tokens of a row; a window is sparse attention"),
    }
    return Capabilities(qkv=False, **{**lacking, **own})


class Mixer(Mechanism):
    """A mechanism on tokens x (..., L, C) instead of q, k, v.

    Calls that bring q, k and v raise `UnsupportedError`; `forward`, `prefill` and `step` take x
    alone. Tokens under a key mask count as absent: what they contain never matters, and their
    rows of the output are zeros. Sums are float32 for half precision, and the output has x's
    dtype.

    Args:
        embed_dim: C, width of the tokens. Default ``head_dim·num_heads``.
        max_length: longest sequence, for mixers that need it.
        head_dim, num_heads: stand for `embed_dim` where that is not given.
        num_kv_heads, value_dim, seed, device, dtype, options: as in `Mechanism`.

    Raises:
        OptionError: for a wrong size or option, or if C cannot be told.
    """

    family = "mixer"
    embed_dim: int

    def __init__(
        self,
        *,
        embed_dim: int | None = None,
        head_dim: int | None = None,
        num_heads: int | None = None,
        **sizes: Any,
    ) -> None:
        given = {"embed_dim": embed_dim, "head_dim": head_dim, "num_heads": num_heads}
        problems = [
            problem
            for name, size in given.items()
            if size is not None
            for problem in integer_problem(name, size, 1)
        ]
        product = head_dim * num_heads if not problems and head_dim and num_heads else None
        if not problems and embed_dim is None and product is None:
            problems.append(
                "embed_dim is needed, the width C of the tokens; or head_dim and num_heads, "
                "whose product it is"
            )
        if embed_dim is not None and product not in (None, embed_dim):
            problems.append(f"embed_dim={embed_dim} must be head_dim·num_heads = {product}")
        if problems:
            raise OptionError(f"{self.name}: " + "; ".join(problems))
        width = embed_dim or product
        assert width is not None, "checked above"
        super().__init__(
            embed_dim=width, head_dim=head_dim or width, num_heads=num_heads or 1, **sizes
        )

    # ---- what a mixer supplies -----------------------------------------------------------

    @abstractmethod
    def _mix(self, x: Tensor, key: Tensor | None, causal: bool) -> Tensor:
        """(B, L, C) from x (B, L, C) in the sums' dtype, zero where `key` (B, L) is False.

        Rows of the output at masked tokens may hold anything finite: they are cleared after.
        """

    def _continue(self, x: Tensor, state: Any, key: Tensor | None) -> tuple[Tensor, State]:
        """Causal `_mix` of the tokens of `state` followed by x: x's rows, and the new state."""
        raise NotImplementedError(f"{self.name} declares no state")

    # ---- what a user calls ---------------------------------------------------------------

    def forward(
        self,
        x: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        *,
        causal: bool = False,
        key_mask: KeyMask | None = None,
        mask: Mask | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Mixed tokens (..., L, C), in x's dtype.

        Args:
            x: (..., L, C) tokens.
            k, v, scale: not taken: a mixer has none of them.
            causal: no token reads a later one.
            key_mask: (..., L) bool, True = a token, False = padding, whose rows give zeros.
            mask: a `Mask` with those two parts, in their place.

        Raises:
            ShapeError, DtypeError, DeviceError: if an argument does not fit.
            UnsupportedError: for q, k and v, or a mask that the mixer does not declare.
        """
        self._tokens_alone(k, v, scale)
        joined = Mask.of(causal=causal, key_mask=key_mask, mask=mask)
        x, joined, lead = self._checked_tokens(x, joined)
        self._need_length(x.shape[1], 0)
        if x.shape[0] == 0:
            return x.reshape(*lead, *x.shape[1:])
        with own_precision(x):
            tokens = _cleared(x.to(sums_dtype(x.dtype)), joined.key)
            out = _cleared(self._mix(tokens, joined.key, joined.causal), joined.key)
        return out.to(x.dtype).reshape(*lead, *x.shape[1:])

    def prefill(
        self,
        x: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        *,
        state: State | None = None,
        key_mask: KeyMask | None = None,
        scale: float | None = None,
        donate: bool = False,
    ) -> tuple[Tensor, State]:
        """Causal mixing that continues `state`, and the new state; arguments as in `forward`.

        Equals one causal call over all tokens that the state has seen followed by x. `donate` is
        the interface's: mixers write no state over.
        """
        self._tokens_alone(k, v, scale)
        self._need("prefill", self.capabilities.state)
        x, mask, lead = self._checked_tokens(x, Mask.of(causal=True, key_mask=key_mask))
        self._check_state(state, x)
        self._need_length(x.shape[1], 0 if state is None else self._length(state))
        empty, key = x.shape[0] == 0, mask.key
        tokens = x.to(sums_dtype(x.dtype))
        if empty:  # what a row of zeros gives, without that row
            tokens, key = tokens.new_zeros(1, *tokens.shape[1:]), None
            state = None if state is None else state.map(lambda t: t.new_zeros(1, *t.shape[1:]))
        with own_precision(x):
            out, new = self._continue(_cleared(tokens, key), state, key)
            out = _cleared(out, key)
        if empty:
            out, new = out[:0], new.map(lambda t: t[:0])
        return out.to(x.dtype).reshape(*lead, *x.shape[1:]), new

    def step(
        self,
        x: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        state: State | None = None,
        *,
        key_mask: KeyMask | None = None,
        scale: float | None = None,
        donate: bool = False,
    ) -> tuple[Tensor, State]:
        """T ≥ 1 new tokens x (..., T, C) after those of `state`: ``mixer.step(x, state=state)``."""
        return self.prefill(x, k, v, state=state, key_mask=key_mask, scale=scale)

    def influence(
        self, x: Tensor, *, causal: bool = False, key_mask: KeyMask | None = None
    ) -> Tensor:
        """(L, L): Frobenius norms ‖∂out_i/∂x_j‖ of one sequence x (L, C): who reads whom.

        What stands in the place of attention weights, for looking and testing. Rows are
        tokens of the output. O(L²·C²) memory.

        Raises:
            ShapeError: if x is not (L, C).
        """
        if x.dim() != 2:
            raise ShapeError(f"x must be (L, C={self.embed_dim}), given {tuple(x.shape)}")

        def mixed(tokens: Tensor) -> Tensor:
            return self(tokens, causal=causal, key_mask=key_mask)

        whole: Any = torch.autograd.functional.jacobian(mixed, x, vectorize=True)
        return torch.linalg.vector_norm(whole, dim=(1, 3))

    def extra_repr(self) -> str:
        length = "" if self.max_length is None else f", max_length={self.max_length}"
        changed = self.config.changed().items()
        options = "".join(f", {key}={format_value(value)}" for key, value in changed)
        return f"embed_dim={self.embed_dim}{length}{options}"

    # ---- checks --------------------------------------------------------------------------

    def _length(self, state: State) -> int:
        """Tokens that a state holds; every mixer's state has them in dimension 1."""
        tensors = state.tensors()
        return next((t.shape[1] for t in tensors.values()), 0)

    def _tokens_alone(self, k: Tensor | None, v: Tensor | None, scale: float | None) -> None:
        if k is not None or v is not None or scale is not None:
            self._refuse()

    def _refuse(self) -> NoReturn:
        raise UnsupportedError(
            self.name,
            "q, k, v",
            "it mixes tokens: call mixer(x), x (..., L, C), or put it into a layer with "
            "subquad.TokenMixing",
            registry.capable("qkv"),
        )

    def _check(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask
    ) -> tuple[Tensor, Tensor, Tensor, Mask, tuple[int, ...]]:
        self._refuse()

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: Any) -> Tensor:
        self._refuse()

    def _checked_tokens(self, x: Tensor, mask: Mask) -> tuple[Tensor, Mask, tuple[int, ...]]:
        """x (B, L, C), the mask merged likewise, and the leading dimensions."""
        own = own_device(self)
        if own is not None and own != x.device:
            raise DeviceError(
                f"x is on {x.device}, {self.name} is on {own}; move one with .to(...)"
            )
        dtype = autocast_dtype(x)
        if dtype is not None:
            x = x.to(dtype)
        if x.dim() < 2 or x.shape[-1] != self.embed_dim:
            raise ShapeError(f"x must be (..., L, C={self.embed_dim}), given {tuple(x.shape)}")
        if x.dtype not in FLOATS:
            accepted = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
            raise DtypeError(f"x must be one of {accepted}, given {x.dtype}")
        length = x.shape[-2]
        if length == 0:
            raise ShapeError(f"x must have at least one token, given {tuple(x.shape)}")
        for kind in MASK_KINDS:
            if kind in mask.kinds():
                self._need(kind, getattr(self.capabilities, kind))
        lead = tuple(x.shape[:-2])
        mask = mask.flatten(lead, length, length, x.device)
        return x.reshape(-1 if lead else 1, length, x.shape[-1]), mask, lead

    def _need_length(self, length: int, held: int) -> None:
        most = self.max_length if self.capabilities.max_length else None
        if most is not None and held + length > most:
            behind = f" after {held} in the state" if held else ""
            raise ShapeError(
                f"{self.name}: x has length L={length}{behind}, longer than max_length={most}; "
                "build it with a larger max_length"
            )


def followed(old: Tensor, new: Tensor) -> Tensor:
    """What a state holds of past tokens, (B, S, ·), followed by the same of a call's new ones.

    Raises:
        ShapeError: if the widths differ.
        DtypeError: if the dtypes differ.
    """
    if old.shape[2] != new.shape[2]:
        raise ShapeError(
            f"the state holds {old.shape[2]} channels, these tokens have {new.shape[2]}: it must "
            "be of a mixer with the same sizes and options"
        )
    if old.dtype != new.dtype:
        raise DtypeError(f"the state is {old.dtype}, sums for this x are {new.dtype}")
    return torch.cat([old, new], 1)


def _cleared(x: Tensor, key: Tensor | None) -> Tensor:
    """x (B, L, ·) with zeros at masked tokens: what stood there never matters."""
    return x if key is None else x.masked_fill(~key[..., None], 0)
