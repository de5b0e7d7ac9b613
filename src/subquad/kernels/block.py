"""The block engine: softmax over the key blocks that a block of queries reads.

    out_i = Σ_{j ∈ N(i)} exp(scale·q_i·k_j) v_j / Σ_{j ∈ N(i)} exp(scale·q_i·k_j)

Queries are cut into blocks of C. A block reads a contiguous span of keys, sliced and never
copied, and may read further key blocks, gathered by a table. Scores exist for one block and
as many heads as fill `SCORE_BYTES`: memory beyond inputs and outputs is O(L) for the
log-sum-exp, forward and backward, whatever is read. The backward pass computes the scores
again from the log-sum-exp.

With p_ij = exp(s_ij − lse_i), δ_i = Σ ō_i∘o_i and l̄_i the gradient of lse_i:

    s̄_ij = p_ij (ō_i·v_j − δ_i + l̄_i),   q̄_i = scale·Σ_j s̄_ij k_j,   k̄_j = scale·Σ_i s̄_ij q_i,
    v̄_j = Σ_i p_ij ō_i

so that parts over disjoint keys merge differentiably (`subquad.attention.partial`).

Cost: 2·L·R·(D+V) FLOPs a head forward, R the keys computed for a query: C + left + right,
plus C for every entry of the table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.kernels.linear import LOG2E
from subquad.kernels.precision import own_precision
from subquad.kernels.transforms import again, differentiated, mapped, transformed

__all__ = ["EMPTY", "UNBOUNDED", "Layout", "block_softmax"]

EMPTY = -1e30
"""Log-sum-exp of a query that reads no key: finite, so that differences are never NaN."""

SCORE_BYTES = 2 * 2**20
"""Bytes of one chunk of scores: within a core's second-level cache."""


SPANS = 16
"""Masks of spans that are kept: more than a window's edges need."""

UNBOUNDED = 2**30
"""A reach that no sequence exceeds."""


@dataclass(frozen=True)
class Layout:
    """Which span of keys a block of queries reads.

    Args:
        block: C, queries of a block.
        left, right: reach of the span. In tokens: query position p reads keys p − left …
            p + right. With `aligned`, in whole blocks of C keys around the query's own.
        aligned: see there; blocks are then cut at positions that C divides.
        span: whether the span is read at all; False leaves the table alone.
        causal: no query reads a later key.
        offset: position of the first query among the keys.
        dilation: d; the query at p reads keys p + d·n only, and reach counts n. Tokens of one
            residue class modulo d are then a sequence of their own with a plain window.
        skip: keys nearer than this are left out of the span: |n| < skip, with `aligned` in
            whole blocks. Another part reads them.
        width: with `aligned` and skip ≥ 1, how many tokens of a key block are read, the last
            ones. None: all.
    """

    block: int
    left: int
    right: int
    aligned: bool
    span: bool
    causal: bool
    offset: int
    dilation: int = 1
    skip: int = 0
    width: int | None = None

    def cuts(self, queries: int) -> Iterator[tuple[int, int, int]]:
        """(first query, end, position of the block's start) of every block."""
        start = 0
        while start < queries:
            position = start + self.offset
            own = position - position % self.block if self.aligned else position
            stop = min(queries, own + self.block - self.offset)
            yield start, stop, own
            start = stop

    def keys(self, start: int, stop: int, own: int, keys: int) -> tuple[int, int]:
        """The span of keys that queries [start, stop) compute; (0, 0) where there is none."""
        if not self.span:
            return 0, 0
        if self.aligned:
            width, block = self.width or self.block, own // self.block
            first, last = (block - self.left) * width, (block + self.right + 1) * width
            end = (block + 1 - self.skip) * width if self.skip else stop + self.offset
        else:
            first, last = start + self.offset - self.left, stop + self.offset + self.right
            end = stop + self.offset - self.skip
        if self.causal:
            last = min(last, end)
        first, last = max(first, 0), min(last, keys)
        return (first, last) if first < last else (0, 0)

    def allowed(
        self, start: int, stop: int, first: int, last: int, device: torch.device
    ) -> Tensor | None:
        """bool (queries, keys) of a span, or None where all of it may be read."""
        low, high = start + self.offset, stop - 1 + self.offset
        if self.aligned and self.skip:  # a causal span ends before the blocks left out
            width, own = self.width or self.block, low // self.block
            away = torch.arange(first, last, device=device) // width - own
            closed = away.abs() < self.skip
            return None if self.causal else (~closed).expand(stop - start, -1)
        closed_left = not self.aligned and high - self.left > first
        closed_right = not self.aligned and low + self.right < last - 1
        closed_causal = self.causal and low < last - 1
        closed_near = self.skip > 0 and first < high + self.skip and low - self.skip < last - 1
        if not (closed_left or closed_right or closed_causal or closed_near):
            return None
        i = torch.arange(low, high + 1, device=device)[:, None]
        j = torch.arange(first, last, device=device)
        right = torch.full_like(i, last) if self.aligned else i + self.right
        right = torch.minimum(right, i) if self.causal else right
        allowed = j <= right
        if self.skip:
            allowed = allowed & ((i - j).abs() >= self.skip)
        return allowed if self.aligned else allowed & (j >= i - self.left)


class _Problem:
    """One call with heads as rows: q (B·Hkv, G, L, D), k (B·Hkv, S, D), v (B·Hkv, S, V)."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, key: Tensor | None,
        segment_q: Tensor | None, segment_k: Tensor | None, layout: Layout, scale: float,
    ) -> None:  # fmt: skip
        self.dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.batch, self.kv = k.shape[:2]
        self.groups = q.shape[1] // self.kv
        self.queries, self.keys = q.shape[2], k.shape[2]
        self.q = self.rows(q).unflatten(0, (-1, self.groups))
        self.k, self.v = self.rows(k), self.rows(v)
        self.layout, self.scale = layout, scale
        self.key, self.segment_q, self.segment_k = key, segment_q, segment_k
        if layout.width is not None:
            self.k, self.v = self.columns(self.k), self.columns(self.v)
            self.key = None if key is None else self.columns(key)
            self.segment_k = None if segment_k is None else self.columns(segment_k)
            self.keys = self.k.shape[1]
        # Closed keys before each position, of any row: spans without one need no mask.
        closed: list[int] = []
        if self.key is not None and mapped():  # each may be closed
            closed = list(range(1, self.keys + 1))
        elif self.key is not None:
            closed = (~self.key).any(0).cumsum(0).tolist()
        self.closed: list[int] = [0, *closed]
        self.table = table if table is not None and table.shape[-1] else None
        # The least and the last key block that a query block gathers, of any row; −1: unknown.
        self.gathered: list[list[int]] = []
        if self.table is not None:
            if mapped():
                self.gathered = [[-1, -1]] * self.table.shape[1]
            else:
                ends = self.table.amin((0, 2)), self.table.amax((0, 2))
                self.gathered = torch.stack(ends, -1).tolist()
            # Contiguous once: else every gathering would copy all keys.
            self.k, self.v = self.k.contiguous(), self.v.contiguous()
        # Tokens that are gathered together: a block, where they cut all keys into blocks.
        self.unit = math.gcd(layout.block, self.keys)
        self.spans: dict[tuple[int, ...], Tensor | None] = {}

    def rows(self, t: Tensor) -> Tensor:
        """(B, heads, n, ·) → (B·heads, n, ·) in the dtype of the sums."""
        return t.to(self.dtype).flatten(0, 1)

    def columns(self, t: Tensor) -> Tensor:
        """(rows, S, …) → (rows, keys, …): the last `width` tokens of every block."""
        at = torch.arange(t.shape[1], device=t.device)
        block, width = self.layout.block, self.layout.width
        return t if width is None else t[:, at % block >= block - width]

    def back(self, bar: Tensor, count: int) -> Tensor:
        """The adjoint of `columns`, (rows, S, ·) for S = `count`."""
        if self.layout.width is None:
            return bar
        whole = bar.new_zeros(len(bar), count, bar.shape[-1])
        at = torch.arange(count, device=bar.device) % self.layout.block
        whole[:, at >= self.layout.block - self.layout.width] = bar
        return whole

    def chunks(self) -> Iterator[tuple[int, int, int, int, int]]:
        """(first row, end row, first query, end, own position): blocks outermost."""
        slots = 0 if self.table is None else self.table.shape[-1]
        for start, stop, own in self.layout.cuts(self.queries):
            first, last = self.layout.keys(start, stop, own, self.keys)
            width = last - first + slots * self.layout.block
            size = (stop - start) * self.groups * max(width, 1) * self.dtype.itemsize
            step = max(1, SCORE_BYTES // size)
            for row in range(0, len(self.k), step):
                yield row, min(row + step, len(self.k)), start, stop, own

    def parts(
        self, rows: slice, start: int, stop: int, own: int
    ) -> Iterator[tuple[slice | Tensor, Tensor, Tensor, Tensor | None]]:
        """(where, k, v, allowed or None) of the span and of the table's blocks.

        `where` is a slice of keys, or the indices of gathered `unit`s of keys, of all rows.
        """
        first, last = self.layout.keys(start, stop, own, self.keys)
        if first < last:
            where = slice(first, last)
            allowed = self._span(start, stop, first, last)
            if self.segment_q is not None or (
                self.key is not None and self.closed[first] < self.closed[last]
            ):
                allowed = self._narrow(allowed, rows, start, stop, where)
            yield where, self.k[rows, where], self.v[rows, where], allowed
        if self.table is not None:
            yield self._gather(self.table, rows, start, stop, own)

    def _span(self, start: int, stop: int, first: int, last: int) -> Tensor | None:
        at = start + self.layout.offset  # interior blocks look alike
        shape = (stop - start, first - at, last - at)
        if shape not in self.spans:
            if len(self.spans) >= SPANS:  # an unbounded reach has a shape of its own each time
                self.spans.clear()
            self.spans[shape] = self.layout.allowed(start, stop, first, last, self.k.device)
        return self.spans[shape]

    def _narrowed(self) -> bool:
        return self.key is not None or self.segment_q is not None

    def _narrow(
        self, allowed: Tensor | None, rows: slice, start: int, stop: int, where: slice | Tensor
    ) -> Tensor:
        """`allowed` (…, queries, keys) joined with the key mask and the segments, per row.

        `where` is a slice of keys, or their indices (rows, keys).
        """
        batch = torch.arange(rows.start, rows.stop, device=self.k.device) // self.kv
        pick: Any = (batch, where) if isinstance(where, slice) else (batch[:, None], where)
        if self.key is not None:
            key = self.key[pick][:, None]
            allowed = key if allowed is None else allowed & key
        if self.segment_q is not None and self.segment_k is not None:
            own = self.segment_q[batch, start:stop, None]
            same = own == self.segment_k[pick][:, None]
            allowed = same if allowed is None else allowed & same
        assert allowed is not None
        return allowed

    def _gather(
        self, table: Tensor, rows: slice, start: int, stop: int, own: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        block, count = self.layout.block, rows.stop - rows.start
        index = (own - self.layout.offset + self.layout.offset % block) // block
        row = torch.arange(rows.start, rows.stop, device=self.k.device)
        entries = table[row % table.shape[0], index]  # (rows, r)
        units, pieces = self.keys // self.unit, block // self.unit
        inner = torch.arange(pieces, device=self.k.device)
        where = (entries.clamp_min(0)[..., None] * pieces + inner).clamp_max(units - 1)
        where = (row[:, None, None] * units + where).flatten()
        k, v = (
            t.view(-1, self.unit, t.shape[-1]).index_select(0, where).view(count, -1, t.shape[-1])
            for t in (self.k, self.v)
        )
        least, last = self.gathered[index]
        end = min(own, self.keys) if self.layout.causal else self.keys
        if least >= 0 and (last + 1) * block <= end and not self._narrowed():
            return where, k, v, None
        inner = torch.arange(block, device=self.k.device)
        tokens = (entries.clamp_min(0)[..., None] * block + inner).flatten(1)  # (rows, r·C)
        allowed = (entries >= 0).repeat_interleave(block, 1) & (tokens < self.keys)
        allowed = allowed[:, None]
        if self.layout.causal:
            i = torch.arange(start, stop, device=self.k.device) + self.layout.offset
            allowed = allowed & (tokens[:, None] <= i[:, None])
        if self._narrowed():
            tokens = tokens.clamp_max(self.keys - 1)
            allowed = self._narrow(allowed, rows, start, stop, tokens)
        return where, k, v, allowed

    def scores(self, q: Tensor, k: Tensor, allowed: Tensor | None, unit: float = 1.0) -> Tensor:
        """scale·q kᵀ in `unit`s of a nat (rows, G, queries, keys), −∞ where not allowed."""
        flat, scale = q.flatten(1, 2), self.scale * unit
        if allowed is None:
            return torch.bmm(flat * scale, k.mT).unflatten(1, (self.groups, -1))
        # Adding −∞ within the product is faster than filling the scores afterwards.
        bias = torch.zeros_like(allowed, dtype=q.dtype).masked_fill_(~allowed, float("-inf"))
        if self.groups > 1 and allowed.shape[-2] > 1:
            bias = bias.repeat(*[1] * (allowed.dim() - 2), self.groups, 1)
        s = torch.baddbmm(bias, flat, k.mT, alpha=scale)
        return s.unflatten(1, (self.groups, -1))


def forward(p: _Problem, need_lse: bool) -> tuple[Tensor, Tensor]:
    """out (B·Hkv, G, L, V) and lse (B·Hkv, G, L), in the dtype of the sums."""
    rows, groups, queries, _ = p.q.shape
    out = p.q.new_empty(rows, groups, queries, p.v.shape[-1])
    lse = p.q.new_empty(rows, groups, queries if need_lse else 0)
    for low, high, start, stop, own in p.chunks():
        here = slice(low, high)
        q = p.q[here, :, start:stop]
        parts = list(p.parts(here, start, stop, own))
        place = out[here, :, start:stop]
        if not parts:
            place.zero_()
            if need_lse:
                lse[here, :, start:stop] = EMPTY
            continue
        s, v = _together(p, q, parts)
        closable = any(allowed is not None for *_, allowed in parts)
        top = s.amax(-1) if need_lse or closable else None
        empty = None if top is None or not closable else top == float("-inf")
        if empty is not None and not bool(empty.any()):
            empty = None
        if empty is not None:
            s.masked_fill_(empty[..., None], 0.0)
        weights = torch.softmax(s, -1)
        o = torch.bmm(weights.flatten(1, 2), v).unflatten(1, (groups, -1))
        if empty is not None:
            o.masked_fill_(empty[..., None], 0.0)
        place.copy_(o)
        if need_lse and top is not None:
            # The largest weight is exp(top − lse).
            sums = top - weights.amax(-1).log_()
            lse[here, :, start:stop] = sums if empty is None else sums.masked_fill_(empty, EMPTY)
    return out, lse


def _together(p: _Problem, q: Tensor, parts: list[Any]) -> tuple[Tensor, Tensor]:
    """Scores and values of all parts, side by side."""
    scores = [p.scores(q, k, allowed) for _, k, _, allowed in parts]
    if len(parts) == 1:
        return scores[0], parts[0][2]
    return torch.cat(scores, -1), torch.cat([part[2] for part in parts], 1)


def differentiable(p: _Problem) -> tuple[Tensor, Tensor]:
    """`forward` with the log-sum-exp by differentiable operations alone: O(L·R) memory."""
    outs: dict[int, list[Tensor]] = {}
    sums: dict[int, list[Tensor]] = {}
    for low, high, start, stop, own in p.chunks():
        here = slice(low, high)
        q = p.q[here, :, start:stop]
        parts = list(p.parts(here, start, stop, own))
        if parts:
            s, v = _together(p, q, parts)
            empty = (s.detach() == float("-inf")).all(-1, keepdim=True)
            s = s.masked_fill(empty, 0.0)
            weights = torch.softmax(s, -1).masked_fill(empty, 0.0)
            out = torch.bmm(weights.flatten(1, 2), v).unflatten(1, (p.groups, -1))
            lse = s.logsumexp(-1).masked_fill(empty[..., 0], EMPTY)
        else:
            out = q.new_zeros(*q.shape[:-1], p.v.shape[-1])
            lse = q.new_full(q.shape[:-1], EMPTY)
        outs.setdefault(start, []).append(out)
        sums.setdefault(start, []).append(lse)
    out, lse = (
        torch.cat([torch.cat(found[start]) for start in sorted(found)], 2) for found in (outs, sums)
    )
    return out, lse


def backward(
    p: _Problem, out: Tensor, lse: Tensor, out_bar: Tensor, lse_bar: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v with heads as rows; see the module's formulas."""
    # Contiguous, whatever the inputs' layout: blocks of keys are added to by their index.
    q_bar, k_bar, v_bar = (t.new_zeros(t.shape) for t in (p.q, p.k, p.v))
    delta = (out_bar * out).sum(-1)
    if lse_bar is not None:
        delta = delta - lse_bar
    for low, high, start, stop, own in p.chunks():
        here = slice(low, high)
        q = p.q[here, :, start:stop]
        g = out_bar[here, :, start:stop].flatten(1, 2)
        flat = q.flatten(1, 2)
        shift = lse[here, :, start:stop, None] * LOG2E
        for where, k, v, allowed in p.parts(here, start, stop, own):
            # A row without keys has scores −∞ only: 2^(−∞ − EMPTY) is 0. Of −∞ the CPU's exp takes
            # some fifty times as long as of other numbers, exp2 no longer.
            w = p.scores(q, k, allowed, LOG2E).sub_(shift).exp2_()
            w = w.flatten(1, 2)
            s_bar = torch.bmm(g, v.mT)
            s_bar.sub_(delta[here, :, start:stop].flatten(1, 2)[..., None]).mul_(w)
            q_bar[here, :, start:stop].add_(
                torch.bmm(s_bar, k).unflatten(1, (p.groups, -1)), alpha=p.scale
            )
            if isinstance(where, slice):
                k_bar[here, where].baddbmm_(s_bar.mT, flat, alpha=p.scale)
                v_bar[here, where].baddbmm_(w.mT, g)
            else:
                for bar, left, right in ((k_bar, s_bar, flat * p.scale), (v_bar, w, g)):
                    found = torch.bmm(left.mT, right).reshape(len(where), -1)
                    bar.view(-1, found.shape[-1]).index_add_(0, where, found)
    return q_bar, k_bar, v_bar


# ---- the operators -----------------------------------------------------------------------


def _problem(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, key: Tensor | None,
    segment_q: Tensor | None, segment_k: Tensor | None, block: int, left: int, right: int,
    aligned: bool, span: bool, causal: bool, offset: int, dilation: int, skip: int,
    width: int | None, scale: float,
) -> _Problem:  # fmt: skip
    layout = Layout(block, left, right, aligned, span, causal, offset, dilation, skip, width)
    if dilation > 1:
        layout, q, k, v, key, segment_q, segment_k = undilated(
            layout, q, k, v, key, segment_q, segment_k
        )
    return _Problem(q, k, v, table, key, segment_q, segment_k, layout, scale)


def undilated(
    layout: Layout, q: Tensor, k: Tensor, v: Tensor, key: Tensor | None,
    segment_q: Tensor | None, segment_k: Tensor | None,
) -> tuple[
    Layout, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None
]:  # fmt: skip
    """A dilated call as a plain one with the residue classes as batch rows, (B·d, …)."""
    steps, keys = layout.dilation, k.shape[2]
    front = layout.offset % steps
    if key is None and keys % steps:
        key = k.new_ones(len(k), keys, dtype=torch.bool)
    key, segment_k = _token_classes(key, steps, 0), _token_classes(segment_k, steps, 0)
    segment_q = _token_classes(segment_q, steps, front)
    q, k, v = (_classes(t, steps, n) for t, n in ((q, front), (k, 0), (v, 0)))
    plain = replace(layout, offset=layout.offset // steps, dilation=1)
    return plain, q, k, v, key, segment_q, segment_k


def _classes(t: Tensor, steps: int, front: int) -> Tensor:
    """(B, H, n, ·) → (B·d, H, ⌈n/d⌉, ·): every d-th token, `front` places left free first."""
    back = -(t.shape[2] + front) % steps
    t = F.pad(t, (0, 0, front, back))
    return t.unflatten(2, (-1, steps)).permute(0, 3, 1, 2, 4).flatten(0, 1)


def _token_classes(t: Tensor | None, steps: int, front: int) -> Tensor | None:
    return None if t is None else _classes(t[:, None, :, None], steps, front)[:, 0, :, 0]


def tokens(t: Tensor, steps: int, front: int, count: int) -> Tensor:
    """The inverse of `_classes`."""
    t = t.unflatten(0, (-1, steps)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    return t[:, :, front : front + count]


@torch.library.custom_op("subquad::block_softmax", mutates_args=())
def _block_softmax(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, key: Tensor | None,
    segment_q: Tensor | None, segment_k: Tensor | None, block: int, left: int, right: int,
    aligned: bool, span: bool, causal: bool, offset: int, dilation: int, skip: int,
    width: int | None, scale: float, need_lse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _run(
        q, k, v, table, key, segment_q, segment_k, block, left, right, aligned, span, causal,
        offset, dilation, skip, width, scale, need_lse,
    )  # fmt: skip


def _run(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, key: Tensor | None,
    segment_q: Tensor | None, segment_k: Tensor | None, block: int, left: int, right: int,
    aligned: bool, span: bool, causal: bool, offset: int, dilation: int, skip: int,
    width: int | None, scale: float, need_lse: bool, plain: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out (B, H, L, V) and lse (B, H, L); `plain`, with the lse, by differentiable operations."""
    p = _problem(
        q, k, v, table, key, segment_q, segment_k, block, left, right, aligned, span, causal,
        offset, dilation, skip, width, scale,
    )  # fmt: skip
    with own_precision(q):
        out, lse = differentiable(p) if plain else forward(p, need_lse)
    heads = (-1, q.shape[1])
    out = out.to(v.dtype).flatten(0, 1).unflatten(0, heads)
    lse = lse.flatten(0, 1).unflatten(0, heads)
    if dilation == 1:
        return out, lse
    front, queries = offset % dilation, q.shape[2]
    out = tokens(out, dilation, front, queries).contiguous()
    if need_lse:
        lse = tokens(lse[..., None], dilation, front, queries)[..., 0].contiguous()
    return out, lse if need_lse else lse.reshape(*q.shape[:2], -1)


@_block_softmax.register_fake
def _shapes(*inputs: Any) -> tuple[Tensor, Tensor]:
    q, _, v, *_, need_lse = inputs
    sums = torch.float64 if q.dtype == torch.float64 else torch.float32
    queries = q.shape[2] if need_lse else 0
    return v.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(*q.shape[:2], queries, dtype=sums)


@torch.library.custom_op("subquad::block_softmax_backward", mutates_args=())
def _block_softmax_backward(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, key: Tensor | None,
    segment_q: Tensor | None, segment_k: Tensor | None, block: int, left: int, right: int,
    aligned: bool, span: bool, causal: bool, offset: int, dilation: int, skip: int,
    width: int | None, scale: float, out: Tensor, lse: Tensor, out_bar: Tensor | None,
    lse_bar: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    p = _problem(
        q, k, v, table, key, segment_q, segment_k, block, left, right, aligned, span, causal,
        offset, dilation, skip, width, scale,
    )  # fmt: skip

    front = offset % dilation

    def rows(t: Tensor, shift: int = front) -> Tensor:
        if dilation > 1:
            t = _classes(t, dilation, shift)
        return p.rows(t).unflatten(0, (-1, p.groups))

    if out_bar is None:
        out_bar = torch.zeros_like(out)
    with own_precision(q):
        bars = backward(
            p,
            rows(out),
            rows(lse[..., None])[..., 0],
            rows(out_bar),
            None if lse_bar is None else rows(lse_bar[..., None])[..., 0],
        )
    found = []
    for bar, t, first in zip(bars, (q, k, v), (front, 0, 0), strict=True):
        bar = p.back(bar, t.shape[2]) if bar.dim() == 3 else bar.flatten(0, 1)
        bar = bar.unflatten(0, (-1, t.shape[1]))
        if dilation > 1:
            bar = tokens(bar, dilation, first, t.shape[2])
        found.append(bar.to(t.dtype).contiguous())
    return tuple(found)  # type: ignore[return-value]  # three tensors


@_block_softmax_backward.register_fake
def _shapes_backward(*inputs: Any) -> tuple[Tensor, ...]:
    return tuple(t.new_empty(t.shape) for t in inputs[:3])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    if not inputs[-1]:
        raise RuntimeError("block softmax was called without need_lse=True but needs gradients")
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:7], *output)
    ctx.options = inputs[7:-1]


def _backward(ctx: Any, out_bar: Tensor | None, lse_bar: Tensor | None) -> tuple[Any, ...]:
    *inputs, out, lse = ctx.saved_tensors
    if differentiated():
        rest = [*inputs[3:], *ctx.options, True, True]

        def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            return _run(q, k, v, *rest)

        needs = ctx.needs_input_grad[:3]
        return (*again(run, inputs[:3], needs, (out_bar, lse_bar)), *([None] * 16))
    bars = _block_softmax_backward(*inputs, *ctx.options, out, lse, out_bar, lse_bar)
    return (*bars, *([None] * 16))


torch.library.register_autograd("subquad::block_softmax", _backward, setup_context=_setup)


def block_softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    *,
    scale: float,
    table: Tensor | None = None,
    key: Tensor | None = None,
    segments: tuple[Tensor, Tensor] | None = None,
    need_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Softmax over a span of keys around each query, and over the key blocks of a table.

    Args:
        q: (B, H, L, D).
        k: (B, Hkv, S, D), finite also where masked.
        v: (B, Hkv, S, V), likewise.
        layout: the span; the table needs an aligned one.
        scale: factor of the logits.
        table: (1 or Hkv, query blocks, r) indices of further key blocks, −1 = none; none of
            them may lie in the span, or twice in a row. Query blocks are counted from the one
            that holds the first query.
        key: (B, S) bool, True = attend.
        segments: (B, L) and (B, S) integers; only equal ones see each other.
        need_lse: whether the log-sum-exp is wanted.

    Returns:
        out (B, H, L, V) in v's dtype, zero where no key is read, and lse (B, H, L), `EMPTY`
        there. Gradients flow through both.
    """
    if q.is_cuda and not transformed():
        from subquad.kernels.dispatch import explain_block  # late: it imports this module
        from subquad.kernels.flex import flex_softmax

        if explain_block(q, v, layout).backend == "flex":
            return flex_softmax(
                q, k, v, layout, scale=scale, table=table, key=key, segments=segments
            )
    tracked = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    first, second = (None, None) if segments is None else segments
    how = (
        layout.block, layout.left, layout.right, layout.aligned, layout.span, layout.causal,
        layout.offset, layout.dilation, layout.skip, layout.width, scale,
    )  # fmt: skip
    if transformed():
        out, lse = _run(q, k, v, table, key, first, second, *how, True, plain=True)
    else:
        out, lse = _block_softmax(q, k, v, table, key, first, second, *how, need_lse or tracked)
    return out, lse if need_lse else None
