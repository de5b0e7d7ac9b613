"""What sparse mechanisms share: patterns, and attention over the keys that a pattern names.

A `Pattern` says which keys a query reads beyond what a `Mask` closes: a window in tokens,
with dilation, or a window in whole blocks with a table of further blocks. `attend` and
`partial` lower it to the block engine (`subquad.kernels.block`); `allowed` spells it out for
references and pictures.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.attention.base import State
from subquad.attention.exact.engine import KeyValueState, clear
from subquad.attention.masks import Mask
from subquad.attention.partial import Partial
from subquad.kernels.block import EMPTY, Layout, block_softmax

__all__ = ["Pattern", "RingState", "attend", "computed_keys", "partial"]


@dataclass(frozen=True, eq=False)
class Pattern:
    """The keys that a query reads, at positions aligned to the end (see `Mask`).

    Args:
        left, right: reach of the window. In tokens, times `dilation`; with `block` set, in
            whole blocks around the query's own. None: no window, the table alone.
        dilation: d; the query at p reads keys p + d·n only.
        block: None for a window in tokens, or C: positions are cut into blocks of C.
        table: (1 or Hkv, query blocks, r) further key blocks of every query block, −1 = none,
            outside the window and without repetition; query blocks are counted from the one
            that holds the first query. Needs `block`.
        skip: keys nearer than this are left out of the window (|n| < skip, with `block` in
            whole blocks): another part of a merge reads them.
        width: with `block` and skip ≥ 1, how many tokens of every key block are read, the last
            ones; None: all.
    """

    left: int | None
    right: int | None
    dilation: int = 1
    block: int | None = None
    table: Tensor | None = None
    skip: int = 0
    width: int | None = None

    def allowed(self, queries: int, keys: int, device: torch.device | str | None = None) -> Tensor:
        """bool (1 or Hkv, L, S), True = read, without any mask; O(L·S), for looking."""
        offset = keys - queries
        i = torch.arange(queries, device=device)[:, None] + offset
        j = torch.arange(keys, device=device)
        if self.block is None:
            steps = (i - j) // self.dilation
            near = (i - j) % self.dilation == 0
            if self.left is not None and self.right is not None:
                near = near & (steps <= self.left) & (-steps <= self.right)
            near = near & (steps.abs() >= self.skip)
            return near[None]
        own, other = i // self.block, j // self.block
        read = torch.zeros(1, queries, keys, dtype=torch.bool, device=device)
        if self.left is not None and self.right is not None:
            read = ((own - other <= self.left) & (other - own <= self.right))[None]
            read = read & ((own - other).abs() >= self.skip)
            if self.width is not None:
                read = read & (j % self.block >= self.block - self.width)
        if self.table is not None:
            entries = self.table[:, (own - offset // self.block).squeeze(-1)]  # (P, L, r)
            read = read | (entries[..., None] == other).any(-2)
        return read


def computed_keys(left: int, right: int, block: int | None = None, blocks: int = 0) -> float:
    """Keys that the engine computes for a query: the span of a block and the table's blocks."""
    if block is None:
        return left + right + _block(left, right)
    return block * (left + 1 + right + blocks)


def _block(left: int, right: int) -> int:
    # Small blocks compute fewer keys outside the window, large ones multiply faster.
    return 64 if left + right <= 512 else 128


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, pattern: Pattern, scale: float) -> Tensor:
    """Softmax attention over the keys of `pattern` that `mask` allows, (B, H, L, V).

    Cost O(L·R·(D+V)) for R computed keys a query, O(L) memory beyond inputs and output.
    """
    k, v = clear(k, v, mask)
    return _run(q, k, v, mask, pattern, scale, need_lse=False)[0]


def partial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    pattern: Pattern,
    scale: float,
    *,
    cleared: bool = False,
) -> Partial:
    """The same as a `Partial`, to be merged with sums over other keys; differentiable.

    `cleared` says that k and v are finite at masked keys: they are not copied to make them so.
    """
    if q.dtype not in (torch.float32, torch.float64):
        q, k, v = q.float(), k.float(), v.float()
    if not cleared:
        k, v = clear(k, v, mask)
    out, lse = _run(q, k, v, mask, pattern, scale, need_lse=True)
    assert lse is not None
    den = (lse.detach() != EMPTY).to(lse.dtype)  # NaN is a result, not the lack of one
    return Partial(out, den, lse)


def _run(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, pattern: Pattern, scale: float, need_lse: bool
) -> tuple[Tensor, Tensor | None]:
    left, right = pattern.left or 0, pattern.right or 0
    spans = pattern.left is not None
    if mask.window is not None:
        near = mask.window_sides()
        assert pattern.block is None, "a pattern of blocks takes no window mask"
        left, right = (
            min(a, b // pattern.dilation) for a, b in zip((left, right), near, strict=True)
        )
    if mask.causal and pattern.block is None:
        right = 0
    layout = Layout(
        block=pattern.block or _block(left, right),
        left=left,
        right=right,
        aligned=pattern.block is not None,
        span=spans,
        causal=mask.causal,
        offset=k.shape[2] - q.shape[2],
        dilation=pattern.dilation,
        skip=pattern.skip,
        width=pattern.width,
    )
    segments = mask.segments
    assert not isinstance(segments, Tensor), "masks are flattened by now"
    return block_softmax(
        q, k, v, layout, scale=scale, table=pattern.table, key=mask.key, segments=segments,
        need_lse=need_lse,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class RingState(State):
    """The last W keys and values: constant size, whatever has been read.

    Args:
        k: (B, Hkv, W, D), zero where `key` is False.
        v: (B, Hkv, W, V), likewise.
        key: (B, W) bool; False also where fewer than W tokens have been seen.
    """

    k: Tensor
    v: Tensor
    key: Tensor

    @classmethod
    def extend(
        cls, state: RingState | None, k: Tensor, v: Tensor, key: Tensor | None, size: int
    ) -> tuple[KeyValueState, RingState]:
        """What the state and the new keys hold together, and the last `size` of it.

        Raises:
            ShapeError, DtypeError: as `KeyValueState.extend`.
        """
        old = None if state is None else KeyValueState(state.k, state.v, state.key)
        both = KeyValueState.extend(old, k, v, key)
        seen = both.k.shape[2]
        open_ = both.key
        if open_ is None:
            open_ = both.k.new_ones(len(both.k), seen, dtype=torch.bool)
        if seen >= size:
            kept = slice(seen - size, seen)
            # A copy: a view would keep all keys alive.
            return both, cls(
                both.k[:, :, kept].clone(), both.v[:, :, kept].clone(), open_[:, kept].clone()
            )
        pad = size - seen
        return both, cls(
            F.pad(both.k, (0, 0, pad, 0)), F.pad(both.v, (0, 0, pad, 0)), F.pad(open_, (pad, 0))
        )
