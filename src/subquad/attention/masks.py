"""`Mask`: which keys a query may read, as an object instead of an L×S tensor.

A query at position i (of L) sits at absolute position ``i + S − L``: causal, prefix and
window masks are aligned to the end, so that a cached decoding step (L=1) reads all keys.
Query i may read key j when every given part allows it:

========== ==================================================================
causal     j ≤ i + S − L
prefix     … or j < prefix (needs ``causal=True``): UniLM (arXiv 1905.03197)
key        key[j] is True
segments   both carry the same segment number (packed sequences)
window     −right ≤ i + S − L − j ≤ left
dense      an explicit (…, L, S) mask: bool, True = attend, or additive floats
========== ==================================================================
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from subquad.errors import DeviceError, DtypeError, OptionError, ShapeError

__all__ = ["MASK_KINDS", "Mask", "recognised"]

MASK_KINDS = ("causal", "key", "prefix", "segments", "window", "dense")
"""The kinds of mask, in the order in which capabilities list them."""


@dataclass(frozen=True, eq=False)
class Mask:
    """Which keys each query may read; see the module's table for the meaning of each part.

    Args:
        causal: no query reads a later key; aligned to the end where L ≠ S.
        key: (..., S) bool, broadcastable over the leading dimensions, True = attend.
        prefix: number of leading keys that every query may read, an int or a tensor of the
            leading dimensions' shape; needs ``causal=True``.
        segments: (..., L) integers when L = S, or a pair (..., L), (..., S).
        window: keys on each side, an int or (left, right).
        dense: (..., L, S) or (..., H, L, S), bool (True = attend) or floats that are added
            to the logits; O(L·S) memory, for exact attention only.

    Raises:
        OptionError: a prefix without ``causal=True``, a negative prefix or window.
        DtypeError: a key mask that is not bool, segments that are not integers.

    Example:
        >>> import subquad as sq
        >>> sq.Mask(causal=True).to_dense(2, 3)
        tensor([[ True,  True, False],
                [ True,  True,  True]])
        >>> sq.Mask(causal=True, prefix=2).to_dense(3, 3)
        tensor([[ True,  True, False],
                [ True,  True, False],
                [ True,  True,  True]])
    """

    causal: bool = False
    key: Tensor | None = None
    prefix: int | Tensor | None = None
    segments: Tensor | tuple[Tensor, Tensor] | None = None
    window: int | tuple[int, int] | None = None
    dense: Tensor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.causal, bool):
            raise OptionError(f"causal={self.causal!r} must be True or False")
        if self.key is not None:
            _need_dtype("key_mask", self.key, torch.bool)
        if self.prefix is not None and not self.causal:
            raise OptionError("prefix needs causal=True: it opens a causal mask's first keys")
        if isinstance(self.prefix, int) and self.prefix < 0:
            raise OptionError(f"prefix={self.prefix} must be ≥ 0")
        if isinstance(self.prefix, Tensor) and self.prefix.is_floating_point():
            raise DtypeError(f"prefix must be integers, given {self.prefix.dtype}")
        for part in self.segments if isinstance(self.segments, tuple) else (self.segments,):
            if part is not None and (part.is_floating_point() or part.dtype == torch.bool):
                raise DtypeError(f"segments must be integers, given {part.dtype}")
        if self.window is not None and min(self.window_sides()) < 0:
            raise OptionError(f"window={self.window} must be ≥ 0 on each side")
        dense = self.dense
        if dense is not None and dense.dtype != torch.bool and not dense.is_floating_point():
            raise DtypeError(f"mask must be bool or floating point, given {dense.dtype}")

    @classmethod
    def of(
        cls, *, causal: bool = False, key_mask: Tensor | None = None, mask: Mask | None = None
    ) -> Mask:
        """Joins the shortcuts ``causal=`` and ``key_mask=`` with a `Mask`.

        Raises:
            OptionError: if `mask` is no `Mask`, or key masks are given twice.
        """
        if mask is None:
            return cls(causal=causal, key=key_mask)
        if not isinstance(mask, cls):
            raise OptionError(
                f"mask must be a subquad.Mask, given {type(mask).__name__}; for an explicit "
                "(..., L, S) tensor use subquad.Mask(dense=tensor)"
            )
        if key_mask is not None and mask.key is not None:
            raise OptionError("key_mask is given twice: as key_mask= and in mask=")
        return replace(
            mask, causal=causal or mask.causal, key=mask.key if key_mask is None else key_mask
        )

    def kinds(self) -> tuple[str, ...]:
        """Names of the parts in use, a subset of `MASK_KINDS`."""
        return tuple(
            kind
            for kind in MASK_KINDS
            if (self.causal if kind == "causal" else getattr(self, kind) is not None)
        )

    def window_sides(self) -> tuple[int, int]:
        """(left, right) of the window; a causal mask closes the right side."""
        assert self.window is not None, "no window is set"
        left, right = (self.window,) * 2 if isinstance(self.window, int) else self.window
        return left, 0 if self.causal else right

    def flatten(self, lead: tuple[int, ...], queries: int, keys: int, device: torch.device) -> Mask:
        """Checks every part against a call's shapes and merges the leading dimensions into B.

        Returns:
            A mask with key (B, S), prefix int or (B,), segments a pair (B, L), (B, S) and
            dense (B or 1, H or 1, L, S).

        Raises:
            ShapeError: if a part does not broadcast to the call's shapes.
            DeviceError: if a part lives elsewhere than the queries.
        """
        if not (
            self.key is not None
            or isinstance(self.prefix, Tensor)
            or self.segments is not None
            or self.dense is not None
        ):
            return self
        changes: dict[str, object] = {}
        if self.key is not None:
            changes["key"] = _flatten("key_mask", self.key, lead, (keys,), device)
        if isinstance(self.prefix, Tensor):
            changes["prefix"] = _flatten("prefix", self.prefix, lead, (), device)
        if self.segments is not None:
            pair = self.segments if isinstance(self.segments, tuple) else (self.segments,) * 2
            changes["segments"] = (
                _flatten("segments", pair[0], lead, (queries,), device),
                _flatten("segments", pair[1], lead, (keys,), device),
            )
        if self.dense is not None:
            changes["dense"] = _flatten_dense(self.dense, lead, queries, keys, device)
        return replace(self, **changes)  # type: ignore[arg-type]  # keys are this class's fields

    def to_dense(self, queries: int, keys: int, device: torch.device | str | None = None) -> Tensor:
        """The bool mask (..., L, S), True = attend: O(L·S), for references and small inputs.

        An additive `dense` part counts as closed where it is −inf.
        """
        return self.rows(0, queries, queries, keys, device=device)

    def rows(
        self,
        start: int,
        stop: int,
        queries: int,
        keys: int,
        *,
        span: tuple[int, int] | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Rows [start, stop) of `to_dense`, cut to the columns in `span`; no more is built.

        Args:
            start, stop: range of queries.
            queries: L, all queries of the call: with `keys` it fixes the alignment.
            keys: S, all keys of the call.
            span: range of keys, default all; see `span` for the range that matters.
            device: where to build the mask; default where its parts live.

        Returns:
            bool (..., stop − start, width of the span), True = attend.
        """
        device = device or self._device()
        first, last = (0, keys) if span is None else span
        i = torch.arange(start, stop, device=device)[:, None] + (keys - queries)
        j = torch.arange(first, last, device=device)[None, :]
        allowed = torch.ones(stop - start, last - first, dtype=torch.bool, device=device)
        if self.causal:
            allowed = j <= i
            if self.prefix is not None:
                prefix = torch.as_tensor(self.prefix, device=device)
                allowed = allowed | (j < prefix[..., None, None])
        if self.window is not None:
            left, right = self.window_sides()
            near = (i - j <= left) & (j - i <= right)
            allowed = allowed & near
        if self.segments is not None:
            pair = self.segments if isinstance(self.segments, tuple) else (self.segments,) * 2
            same = pair[0][..., start:stop, None] == pair[1][..., None, first:last]
            allowed = allowed & same
        if self.key is not None:
            allowed = allowed & self.key[..., None, first:last]
        if self.dense is not None:
            part = self.dense[..., start:stop, first:last]
            opened = part if part.dtype == torch.bool else part > float("-inf")
            if opened.dim() > 3 and allowed.dim() > 2:  # (B, H, L, S) against (B, L, S)
                allowed = allowed.unsqueeze(-3)
            allowed = allowed & opened
        return allowed

    def span(self, start: int, stop: int, queries: int, keys: int) -> tuple[int, int]:
        """The range of keys outside of which queries [start, stop) can read none.

        Known from positions alone (causal, window); (0, 0) where no key can be read.
        """
        first, last = 0, keys
        offset = keys - queries
        if self.causal and not isinstance(self.prefix, Tensor):
            last = min(last, max(stop + offset, self.prefix or 0))
        if self.window is not None:
            left, right = self.window_sides()
            first = max(first, start + offset - left)
            last = min(last, stop + offset + right)
        return (first, last) if first < last else (0, 0)

    def _device(self) -> torch.device:
        pair = self.segments if isinstance(self.segments, tuple) else (self.segments,)
        for part in (self.key, self.prefix, self.dense, *pair):
            if isinstance(part, Tensor):
                return part.device
        return torch.device("cpu")


def recognised(tensor: Tensor) -> Mask:
    """An explicit (B, H or 1, L, S) mask as causal and key parts if it is no more than that.

    Bool with True = attend, or floats added to the logits, of which those below half the
    dtype's least count as closed. Reads the values: O(B·L·S) time.
    """
    opened = tensor
    if tensor.dtype != torch.bool:
        closed = tensor <= torch.finfo(tensor.dtype).min / 2
        if not bool((closed | (tensor == 0)).all()):
            return Mask(dense=tensor)
        opened = ~closed
    if opened.shape[1] == 1:
        key = opened[:, 0, -1]  # the last query sees every key that any query sees
        for causal in (False, True):
            plain = Mask(causal=causal, key=key)
            if torch.equal(plain.to_dense(*opened.shape[2:]).expand_as(opened[:, 0]), opened[:, 0]):
                return plain if not bool(key.all()) else Mask(causal=causal)
    return Mask(dense=opened)


def _need_dtype(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise DtypeError(
            f"{name} must be {dtype} with True = attend, given {tensor.dtype}"
            f"{'; use mask.bool()' if not tensor.is_floating_point() else ''}"
        )


def _flatten(
    name: str, tensor: Tensor, lead: tuple[int, ...], tail: tuple[int, ...], device: torch.device
) -> Tensor:
    if tensor.device != device:
        raise DeviceError(f"{name} is on {tensor.device}, the queries are on {device}")
    try:
        full = tensor.expand(lead + tail)
    except RuntimeError:
        wanted = ", ".join([*map(str, lead), *map(str, tail)])
        raise ShapeError(
            f"{name} must broadcast to ({wanted}), given {tuple(tensor.shape)}"
        ) from None
    return full.reshape(-1, *tail)


def _flatten_dense(
    tensor: Tensor, lead: tuple[int, ...], queries: int, keys: int, device: torch.device
) -> Tensor:
    if tensor.device != device:
        raise DeviceError(f"mask is on {tensor.device}, the queries are on {device}")
    shape = tuple(tensor.shape)
    if shape[-2:] != (queries, keys) or len(shape) > len(lead) + 3:
        raise ShapeError(
            f"dense mask must be (..., L, S) or (..., H, L, S) with L, S = {queries}, {keys}, "
            f"given {shape}"
        )
    if len(shape) == 2:
        return tensor[None, None]
    if len(shape) == len(lead) + 2 and shape[:-2] == lead:
        return tensor.reshape(-1, 1, queries, keys)
    heads = shape[-3]
    try:
        return tensor.expand(*lead, heads, queries, keys).reshape(-1, heads, queries, keys)
    except RuntimeError:
        raise ShapeError(
            f"dense mask must broadcast to ({', '.join(map(str, lead))}, H, {queries}, {keys}), "
            f"given {shape}"
        ) from None
