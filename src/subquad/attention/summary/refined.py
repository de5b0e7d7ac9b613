"""The engine of clusters of keys: what queries read, a few hundred rows at a time.

With the clusters m of a key/value head, s_ij = scale·q_i·k_j and pairs (i, j) read exactly E,

    N_i = Σ_m φ_im S_m + Σ_{j ∈ E_i} (e^{s_ij} − φ_{i,a_j} t_j) v_j     and D_i: the same with v = 1

    S_m = Σ_{a_j = m} t_j v_j,    φ_im = exp(scale·q_i·k̄_m + b_m)·(1 + h_im)

E_i holds the keys of the window around i and some members of the clusters with the largest φ_im;
t_j = 0 where a key is in no cluster, and further keys that all queries read enter as columns
beside the clusters'. The estimate of an exact pair leaves by subtraction: Σ_m φ_im T_m is at most
(1 + max h) times Σ_j e^{s_ij} by Jensen's inequality, so that rounding is of that order.

Nothing of size L×S or L×M is kept: the chunks are computed again in the backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.attention.partial import EMPTY_LOG_SCALE, Partial
from subquad.attention.summary.kmeans import coded
from subquad.kernels.native import clusters as native
from subquad.kernels.precision import own_precision
from subquad.kernels.transforms import again, differentiated, transformed

__all__ = ["ABSENT", "SPREAD", "Tables", "Window", "read"]

ABSENT = -1e30
"""Logit of what is not there: finite, and no other logit lifts it into reach."""

SPREAD = 4.0
"""Largest h: what the spread of a cluster's keys may add to its weight."""

BLOCK = 32
"""Queries that share one span of keys around them."""

LANES = 16
"""Numbers of keys are padded to multiples of it: what runs along rows is several times faster."""

CHUNK_BYTES = 8 * 2**20
"""Bytes of one chunk's scores and gathered members: they stay in a core's cache."""


@dataclass(frozen=True, eq=False)
class Tables:
    """What a key/value head's queries read beside their windows; N = B·Hkv heads.

    Args:
        keys: (N, M + g, D + 1), [k̄_m | b_m] and [k_j | 0] of g keys that all queries read; the
            last column is `ABSENT` for what is not there.
        values: (N, M + g, V + 1), [S_m] and [v_j | 1], zero for what is not there.
        spread: (N, M, D) variances within the clusters, in the coordinates of `whiten`.
        whiten: (N, D + 1, D) from [scale·q | 1] to the coordinates of `spread`.
        members: (N, M, e, D + 2), [k | 0 or ABSENT | t] of the members that may be read exactly;
            None for none.
        member_values: (N, M, e, V + 1) their [v | 1].
        place: (N, M, e) their positions.
        refine: clusters of each query whose members are read exactly.
    """

    keys: Tensor
    values: Tensor
    spread: Tensor
    whiten: Tensor
    members: Tensor | None
    member_values: Tensor | None
    place: Tensor | None
    refine: int


@dataclass(frozen=True, eq=False)
class Window:
    """The keys around each query.

    Args:
        keys: (B, Hkv, S, D).
        values: (B, Hkv, S, V).
        opened: (B, Hkv, S) bool, keys that are read.
        weight: (B, Hkv, S), t of each key, 0 where it is in no cluster.
        cluster: (B, Hkv, S) int64.
        width: keys on each side, a bound for `widths`.
        widths: (B,) keys on each side in each row, or None where all have `width`.
        exact: whether they are read exactly, or only leave the clusters.
    """

    keys: Tensor
    values: Tensor
    opened: Tensor
    weight: Tensor
    cluster: Tensor
    width: int
    widths: Tensor | None
    exact: bool


@dataclass(frozen=True, eq=False)
class _Fixed:
    """What passes no gradient, and sizes."""

    whiten: Tensor
    place: Tensor | None
    cluster: Tensor | None  # (N, P), padded like the window's keys
    reach: Tensor | None  # (N, 1, C, span) bool, or (1, 1, C, span)
    widths: Tensor | None  # (N,) or (1,)
    refine: int
    clusters: int
    groups: int
    first: int  # position of the first query
    exact: bool
    chunk: int  # rows

    def heads(self, part: slice) -> _Fixed:
        """Of some heads only."""

        def cut(t: Tensor | None) -> Tensor | None:
            return t if t is None or len(t) == 1 else t[part]

        return _Fixed(
            self.whiten[part], None if self.place is None else self.place[part],
            None if self.cluster is None else self.cluster[part], cut(self.reach),
            cut(self.widths), self.refine, self.clusters, self.groups, self.first, self.exact,
            self.chunk,
        )  # fmt: skip


def read(q: Tensor, tables: Tables, window: Window | None, scale: float, offset: int) -> Partial:
    """Sums over all keys of `tables` and `window`.

    Cost 2·L·(M + g + span)·(D + V) FLOPs a head and 2·L·M·D for spreads, with span = 32 + 2·width;
    memory O(L·(D + V)), forward and backward.

    Args:
        q: (B, H, L, D), float32 or float64.
        tables: of all heads.
        window: the keys around each query, or None.
        scale: factor of the logits.
        offset: S − L, the position of the first query.

    Returns:
        num (B, H, L, V), den and log_scale (B, H, L).
    """
    if _by_library(q, tables, window):
        plain = functools.partial(_with, tables, window, scale, offset)
        num, den, top = native.read(q, tables, window, scale, offset, plain)
    else:
        num, den, top = _by_operations(q, tables, window, scale, offset)
    return Partial(num, den, top.masked_fill(den == 0, EMPTY_LOG_SCALE))


def _with(
    tables: Tables, window: Window | None, scale: float, offset: int, q: Tensor, keys: Tensor,
    values: Tensor, spread: Tensor, members: Tensor | None, member_values: Tensor | None,
    k: Tensor | None, v: Tensor | None, weight: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`_by_operations` with these tensors in the place of those that have gradients."""
    tables = replace(
        tables, keys=keys, values=values, spread=spread, members=members,
        member_values=member_values,
    )  # fmt: skip
    if window is not None and k is not None and v is not None and weight is not None:
        window = replace(window, keys=k, values=v, weight=weight)
    return _by_operations(q, tables, window, scale, offset)


def _by_operations(
    q: Tensor, tables: Tables, window: Window | None, scale: float, offset: int
) -> tuple[Tensor, Tensor, Tensor]:
    """num, den and log_scale by torch operations, a chunk at a time."""
    batch, heads, queries, dim = q.shape
    count = len(tables.keys)  # N
    groups, blocks = batch * heads // count, -(-queries // BLOCK)
    pad = blocks * BLOCK - queries
    rows = F.pad(q, (0, 1, 0, pad))
    rows.mul_(scale)[..., -1] = 1.0
    rows = rows.view(count, groups, blocks, BLOCK, dim + 1).transpose(1, 2)
    rows = rows.reshape(count, blocks, groups * BLOCK, dim + 1)
    more = -tables.keys.shape[1] % LANES
    keys, values = (F.pad(t, (0, 0, 0, more)) for t in (tables.keys, tables.values))
    keys[:, keys.shape[1] - more :, -1] = ABSENT
    # h comes out of the product with its one: [x/√2 | 1]² [var | 1]ᵀ.
    whiten = F.pad(tables.whiten * 0.5**0.5, (0, 1))
    whiten[:, -1, -1] = 1.0
    tensors = [rows, keys, values, F.pad(tables.spread, (0, 1), value=1.0)]
    cluster = reach = widths = None
    wide = keys.shape[1] + 2 * tables.spread.shape[1]
    if window is not None:
        span = BLOCK + 2 * window.width
        span += -span % LANES
        # The spans of all blocks, and nothing else: padding is negative where keys are cut off.
        left = window.width - offset
        right = (blocks - 1) * BLOCK + span - left - window.keys.shape[2]
        opened = F.pad(window.opened.flatten(0, 1), (left, right))
        keys, values = (
            F.pad(t.flatten(0, 1), (0, 1, left, right)) for t in (window.keys, window.values)
        )
        keys[..., -1] = ABSENT * (~opened).to(keys.dtype)
        values[..., -1] = opened.to(values.dtype)
        tensors += [keys, values, F.pad(window.weight.flatten(0, 1), (left, right))]
        cluster = F.pad(window.cluster.flatten(0, 1), (left, right))
        gap = torch.arange(span, device=q.device) - window.width
        gap = (gap - torch.arange(BLOCK, device=q.device)[:, None]).abs()
        if window.widths is None:
            reach, widths = (gap <= window.width)[None, None], None
        else:
            widths = window.widths.repeat_interleave(count // batch)
            reach = gap <= widths[:, None, None, None]
        if groups > 1:
            reach = reach.repeat(1, 1, groups, 1)
        if widths is None:
            widths = torch.full((1,), window.width, device=q.device)
        wide += 3 * span
    if tables.members is not None and tables.member_values is not None:
        tensors += [tables.members, tables.member_values]
        wide += min(tables.refine, tables.spread.shape[1]) * tables.members[0, 0].numel()
    fixed = _Fixed(
        whiten, tables.place, cluster, reach, widths, tables.refine, tables.spread.shape[1], groups,
        offset, window is not None and window.exact,
        max(1, CHUNK_BYTES // (wide * q.element_size())),
    )  # fmt: skip
    if transformed():
        out, top = _differentiable(fixed, *tensors)
    else:
        out, top = _Read.apply(fixed, *tensors)  # type: ignore[no-untyped-call]  # torch's own

    def back(t: Tensor) -> Tensor:
        t = t.unflatten(2, (groups, BLOCK)).transpose(1, 2)
        return t.reshape(batch, heads, blocks * BLOCK, *t.shape[4:])[:, :, :queries]

    out, top = back(out), back(top)
    return out[..., :-1], out[..., -1], top


def _by_library(q: Tensor, tables: Tables, window: Window | None) -> bool:
    """Whether the C++ library reads: in float32 on a CPU."""
    given = [q, tables.keys, tables.values, tables.spread]
    if window is not None:
        given += [window.keys, window.values, window.weight]
    few = tables.members is None or tables.refine <= native.MOST
    return few and native.takes(*given, gradients=True)


def _chunks(fixed: _Fixed, rows: Tensor) -> Iterator[tuple[slice, slice]]:
    """(heads, blocks) of every chunk."""
    heads, blocks, size = rows.shape[:3]
    several = max(1, fixed.chunk // (blocks * size))
    step = blocks if several > 1 else max(1, fixed.chunk // size)
    for head in range(0, heads, several):
        for block in range(0, blocks, step):
            yield slice(head, min(heads, head + several)), slice(block, min(blocks, block + step))


def _pieces(
    fixed: _Fixed, heads: slice, blocks: slice, tensors: tuple[Tensor, ...]
) -> list[tuple[Any, ...]]:
    """Where the chunk's part of each tensor is."""
    where: list[tuple[Any, ...]] = [(heads, blocks), (heads,), (heads,), (heads,)]
    if fixed.cluster is not None:
        assert fixed.reach is not None
        width = fixed.reach.shape[-1] - BLOCK
        span = slice(blocks.start * BLOCK, blocks.stop * BLOCK + width)
        where += [(heads, span)] * 3
    return where + [(heads,)] * (len(tensors) - len(where))


def _differentiable(fixed: _Fixed, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of all chunks by differentiable operations alone: O(L·(M + g + span)) memory."""
    found: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for heads, blocks in _chunks(fixed, tensors[0]):
        pieces = _pieces(fixed, heads, blocks, tensors)
        parts = [t[at] for t, at in zip(tensors, pieces, strict=True)]
        chunk = _Chunk(fixed.heads(heads), blocks, *parts)
        found.setdefault(heads.start, []).append(chunk.differentiable_sums())
    rows = [[torch.cat(t, 1) for t in zip(*parts, strict=True)] for parts in found.values()]
    out, top = (torch.cat(t) for t in zip(*rows, strict=True))
    return out, top


class _Read(torch.autograd.Function):
    """`_Chunk` by chunk, computed again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, fixed: _Fixed, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        rows, values = tensors[0], tensors[2]
        out = rows.new_empty(*rows.shape[:3], values.shape[-1])
        top = rows.new_empty(rows.shape[:3])
        for heads, blocks in _chunks(fixed, rows):
            pieces = _pieces(fixed, heads, blocks, tensors)
            parts = [t[at] for t, at in zip(tensors, pieces, strict=True)]
            chunk = _Chunk(fixed.heads(heads), blocks, *parts)
            out[heads, blocks], top[heads, blocks] = chunk.sums()
        ctx.save_for_backward(*tensors)
        ctx.fixed = fixed
        ctx.mark_non_differentiable(top)
        return out, top

    @staticmethod
    def backward(ctx: Any, out_bar: Tensor, _: Tensor) -> tuple[Any, ...]:
        tensors, fixed = ctx.saved_tensors, ctx.fixed
        if differentiated():
            run = functools.partial(_differentiable, fixed)
            return None, *again(run, tensors, ctx.needs_input_grad[1:], (out_bar,))
        bars = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in tensors]
        # backward() may run inside autocast
        with own_precision(out_bar):
            for heads, blocks in _chunks(fixed, tensors[0]):
                pieces = _pieces(fixed, heads, blocks, tensors)
                parts = [t[at] for t, at in zip(tensors, pieces, strict=True)]
                chunk = _Chunk(fixed.heads(heads), blocks, *parts)
                chunk.sums()
                places = [bar[at] for bar, at in zip(bars, pieces, strict=True)]
                chunk.pull_back(out_bar[heads, blocks].flatten(1, 2), *places)
        needed = ctx.needs_input_grad[1:]
        return None, *(bar if need else None for bar, need in zip(bars, needed, strict=True))


class _Chunk:
    """What b blocks of R rows read in each of n heads, and the gradients of that.

    Sums are relative to e^top, top being the largest logit of a row that is read exactly or
    belongs to a cluster; it passes no gradient, for what is made of the sums does not depend on it.
    """

    def __init__(
        self, fixed: _Fixed, blocks: slice, rows: Tensor, keys: Tensor, values: Tensor,
        spread: Tensor, *rest: Tensor,
    ) -> None:  # fmt: skip
        self.fixed, self.blocks = fixed, blocks
        self.blocked, self.rows = rows, rows.flatten(1, 2)  # (n, b, R, D + 1), (n, b·R, D + 1)
        self.keys, self.values, self.spread = keys, values, spread
        self.near: tuple[Tensor, Tensor, Tensor] | None = None
        if fixed.cluster is not None:
            self.near, rest = (rest[0], rest[1], rest[2]), rest[3:]
        self.members = (rest[0], rest[1]) if rest else None

    def sums(self) -> tuple[Tensor, Tensor]:
        """[num | den] (n, b, R, V + 1), and log_scale (n, b, R)."""
        shape, clusters = self.blocked.shape[:3], self.fixed.clusters
        # Weights of clusters and of listed keys, side by side.
        weights = self.rows @ self.keys.mT
        top = weights.amax(-1, keepdim=True)
        near = None
        if self.near is not None and self.fixed.exact:
            near = self._near_scores(self.near[0])
            top = torch.maximum(top, near.amax(-1).flatten(1)[..., None])
        top = top.clamp_min_(0.1 * ABSENT)
        _exp(weights.sub_(top))
        self.phi = weights[..., :clusters]
        self.x = self.rows @ self.fixed.whiten  # its squares are the h of unit variances
        self.more = (self.x.square() @ self.spread.mT).clamp_max_(1.0 + SPREAD)
        self.phi.mul_(self.more)
        self.weights = weights
        out = weights @ self.values
        if self.near is not None:
            out += self._near_sums(near, top)
        if self.members is not None:
            scores = self._member_scores(*self.members)
            highest = torch.maximum(top, scores.amax(-1, keepdim=True))
            self.lift = _exp(top - highest)
            out = out.mul_(self.lift).add_(self._member_sums(scores, highest, self.members[1]))
            top = highest
        return out.view(*shape, -1), top.view(shape)

    def differentiable_sums(self) -> tuple[Tensor, Tensor]:
        """As `sums`, by operations that anything differentiates."""
        fixed, shape = self.fixed, self.blocked.shape[:3]
        least = -300.0 if self.rows.dtype == torch.float64 else -50.0

        def exp(x: Tensor) -> Tensor:
            return x.clamp_min(least).exp()

        logits = self.rows @ self.keys.mT
        top = logits.detach().amax(-1, keepdim=True)
        near = None
        if self.near is not None and fixed.exact and fixed.reach is not None:
            near = self.blocked @ self._spans(self.near[0]).mT
            near = near + (~fixed.reach).to(near.dtype) * ABSENT
            top = torch.maximum(top, near.detach().amax(-1).flatten(1)[..., None])
        top = top.clamp_min(0.1 * ABSENT)
        weights = exp(logits - top)
        spread = (self.rows @ fixed.whiten).square() @ self.spread.mT
        phi = weights[..., : fixed.clusters] * spread.clamp_max(1.0 + SPREAD)
        out = torch.cat([phi, weights[..., fixed.clusters :]], -1) @ self.values
        if self.near is not None:
            where, held = self._near_places()
            change = -phi.unflatten(1, shape[1:]).gather(-1, where) * held
            if near is not None:
                change = change + exp(near - top.view(*shape, 1))
            out = out + (change @ self._spans(self.near[1])).flatten(1, 2)
        if self.members is None:
            return out.view(*shape, -1), top.view(shape)
        keys, values = self.members
        self.phi = phi.detach()
        scores = self._member_scores(keys, values)
        highest = torch.maximum(top, scores.detach().amax(-1, keepdim=True))
        lift = exp(top - highest)
        there = (scores.detach() > 0.5 * ABSENT).to(scores.dtype)
        own = phi.gather(-1, self.chosen) * lift
        own = own.repeat_interleave(keys.shape[2], -1) * self.found[..., -1]
        change = (exp(scores - highest) - own) * there
        found = values.flatten(2).flatten(0, 1).index_select(0, self.flat)
        found = found.view(*scores.shape, -1)
        out = out * lift + (change[..., None, :] @ found)[..., 0, :]
        return out.view(*shape, -1), highest.view(shape)

    def pull_back(
        self, out_bar: Tensor, rows: Tensor, keys: Tensor, values: Tensor, spread: Tensor,
        *rest: Tensor,
    ) -> None:  # fmt: skip
        """Adds to the gradients of all tensors, given that of the sums (n, b·R, V + 1)."""
        row_bar, clusters = torch.zeros_like(self.rows), self.fixed.clusters
        bar = out_bar if self.members is None else out_bar * self.lift
        values.baddbmm_(self.weights.mT, bar)
        bars = bar @ self.values.mT
        if self.near is not None:
            self._pull_back_near(bar, bars, row_bar, *rest[:3])
        if self.members is not None:
            self._pull_back_members(out_bar, bars, row_bar, *rest[-2:])
        bars.mul_(self.weights)  # now of the logits
        row_bar.baddbmm_(bars, self.keys)
        keys.baddbmm_(bars.mT, self.rows)
        # Of 1 + h, which stops growing at 1 + `SPREAD`.
        more = bars[..., :clusters] / self.more
        more.mul_(self.more < 1.0 + SPREAD)
        spread.baddbmm_(more.mT, self.x.square())
        row_bar.baddbmm_((more @ self.spread).mul_(self.x), self.fixed.whiten.mT, alpha=2.0)
        rows.add_(row_bar.view_as(rows))

    # ---- the window ----------------------------------------------------------------------

    def _spans(self, t: Tensor) -> Tensor:
        """(n, b, span, ·) of (n, P, ·), or without the last dimension: the keys around blocks."""
        assert self.fixed.reach is not None
        spans = t.unfold(1, self.fixed.reach.shape[-1], BLOCK)
        return spans if t.dim() == 2 else spans.mT

    def _near_scores(self, keys: Tensor) -> Tensor:
        """Logits (n, b, R, span) of the keys around each block, `ABSENT` beyond the window."""
        assert self.fixed.reach is not None
        scores = _by_heads(self.blocked, self._spans(keys).mT)
        return scores.add_((~self.fixed.reach).to(scores.dtype) * ABSENT)

    def _near_places(self) -> tuple[Tensor, Tensor]:
        """Clusters and weights (n, b, R, span) of the keys around each block."""
        assert self.near is not None and self.fixed.cluster is not None
        assert self.fixed.reach is not None
        span, rows = self.fixed.reach.shape[-1], self.blocked.shape[2]
        first = self.blocks.start * BLOCK
        where = self.fixed.cluster[:, first : first + self.near[0].shape[1]]
        where = where.unfold(1, span, BLOCK)[:, :, None].expand(-1, -1, rows, -1)
        return where, self._spans(self.near[2])[:, :, None] * self.fixed.reach

    def _near_sums(self, scores: Tensor | None, top: Tensor) -> Tensor:
        """What the window adds to the sums of the clusters, (n, b·R, V + 1)."""
        assert self.near is not None
        shape = self.blocked.shape
        self.where, self.held = self._near_places()
        self.estimates = self.phi.unflatten(1, shape[1:3]).gather(-1, self.where)
        self.change = self.estimates * self.held
        self.exact: Tensor | None = None
        if scores is None:
            self.change.neg_()
        else:
            self.exact = _exp(scores.sub_(top.view(*shape[:3], 1)))
            self.change = torch.sub(self.exact, self.change, out=self.change)
        return _by_heads(self.change, self._spans(self.near[1])).flatten(1, 2)

    def _pull_back_near(
        self, bar: Tensor, bars: Tensor, row_bar: Tensor, keys: Tensor, values: Tensor,
        weight: Tensor,
    ) -> None:  # fmt: skip
        assert self.near is not None and self.fixed.reach is not None
        shape = self.blocked.shape
        bar = bar.view(*shape[:3], -1)
        _fold(values, _by_heads(self.change.mT, bar))
        change = _by_heads(bar, self._spans(self.near[1]).mT)
        if self.exact is not None:
            exact = self.exact.mul_(change)
            row_bar.view(shape).add_(_by_heads(exact, self._spans(self.near[0])))
            _fold(keys, _by_heads(exact.mT, self.blocked))
        held = self.estimates.mul_(change).mul_(self.fixed.reach).sum(2).neg_()
        _fold(weight[..., None], held[..., None])
        phi = bars.view(*shape[:3], -1)
        phi.scatter_add_(-1, self.where, change.mul_(self.held).neg_())

    # ---- members of clusters -------------------------------------------------------------

    def _member_scores(self, members: Tensor, _: Tensor) -> Tensor:
        """Logits (n, b·R, r·e) of the members of the chosen clusters; `ABSENT` in the window."""
        fixed = self.fixed
        self.chosen = _largest(self.phi, fixed.refine)  # (n, b·R, r)
        self.flat = _of_all(self.chosen, members).flatten()
        found = members.flatten(2).flatten(0, 1).index_select(0, self.flat)
        self.found = found.view(*self.rows.shape[:2], -1, members.shape[-1])  # (…, r·e, D + 2)
        scores = (self.rows[..., None, :] @ self.found[..., :-1].mT)[..., 0, :]
        if fixed.widths is not None and fixed.place is not None:
            place = fixed.place.flatten(0, 1).index_select(0, self.flat).view(scores.shape)
            start, stop = (fixed.first + block * BLOCK for block in (self.blocks.start,
                                                                     self.blocks.stop))  # fmt: skip
            at = torch.arange(start, stop, device=place.device)
            at = at.view(-1, 1, BLOCK).expand(-1, fixed.groups, -1).reshape(-1, 1)
            within = place.sub_(at).abs_() <= fixed.widths[:, None, None]
            scores.masked_fill_(within, ABSENT)
        return scores

    def _member_sums(self, scores: Tensor, top: Tensor, values: Tensor) -> Tensor:
        """What members add to the sums of the clusters, (n, b·R, V + 1)."""
        each = values.shape[2]
        self.there = (scores > 0.5 * ABSENT).to(scores.dtype)
        # φ of the members' clusters, and φ·t, relative to the new top.
        self.own = (self.phi.gather(-1, self.chosen) * self.lift).repeat_interleave(each, -1)
        self.members_exact = _exp(scores.sub_(top)).mul_(self.there)
        self.member_change = self.members_exact - self.own * self.found[..., -1] * self.there
        # Without a copy of the values.
        member = self.flat[:, None] * each + torch.arange(each, device=values.device)
        found = F.embedding_bag(
            member.view(-1, scores.shape[-1]), values.flatten(0, 2), mode="sum",
            per_sample_weights=self.member_change.flatten(0, 1),
        )  # fmt: skip
        return found.view(*scores.shape[:2], -1)

    def _pull_back_members(
        self, out_bar: Tensor, bars: Tensor, row_bar: Tensor, members: Tensor, values: Tensor
    ) -> None:
        assert self.members is not None
        each = values.shape[2]
        table = self.members[1].flatten(2).flatten(0, 1)
        found = table.index_select(0, self.flat).view(*self.own.shape, -1)
        change = (found @ out_bar[..., None])[..., 0]  # of each weight
        torch.mul(self.member_change[..., None], out_bar[..., None, :], out=found)
        _add_rows(values, self.flat, found)
        exact = self.members_exact.mul_(change)
        row_bar.add_((exact[..., None, :] @ self.found[..., :-1])[..., 0, :])
        change.mul_(self.there)
        tilt = self.own.mul_(change).neg_()
        phi = change.mul_(self.found[..., -1]).unflatten(-1, (-1, each)).sum(-1)
        bars.scatter_add_(-1, self.chosen, phi.mul_(self.lift).neg_())
        torch.mul(exact[..., None], self.rows[..., None, :], out=self.found[..., :-1])
        self.found[..., -1] = tilt
        _add_rows(members, self.flat, self.found)


def _by_heads(x: Tensor, y: Tensor) -> Tensor:
    """x @ y (n, b, ·, ·), head by head: spans of keys overlap, and all heads' would be copied."""
    out = x.new_empty(*x.shape[:3], y.shape[-1])
    for one, other, place in zip(x, y, out, strict=True):
        torch.bmm(one, other, out=place)
    return out


def _fold(bar: Tensor, found: Tensor) -> None:
    """Adds what was found for each block's span (n, b, span, ·) to the keys (n, P, ·)."""
    blocks, span = found.shape[1:3]
    for first in range(0, span, BLOCK):
        part = found[:, :, first : first + BLOCK]
        place = bar[:, first:].unfold(1, part.shape[2], BLOCK)[:, :blocks]
        place.add_(part.mT)


def _add_rows(bar: Tensor, at: Tensor, found: Tensor) -> None:
    """Adds rows of members to the clusters `at` of bar (n, M, e, ·)."""
    bar.flatten(2).flatten(0, 1).index_add_(0, at, found.view(len(at), -1))


def _exp(x: Tensor) -> Tensor:
    """exp(x) in place, no smaller than e^-50 (e^-300).

    Subnormals take a hundred times longer, here and in products with gradients. What is not there
    has that weight then: too little to matter beside sums of at least 1, and its values are zero.
    """
    return x.clamp_min_(-300.0 if x.dtype == torch.float64 else -50.0).exp_()


def _of_all(chosen: Tensor, table: Tensor) -> Tensor:
    """Clusters chosen (n, rows, r) by each head as rows of table.flatten(0, 1)."""
    count, clusters = table.shape[:2]
    return chosen + torch.arange(count, device=table.device)[:, None, None] * clusters


def _largest(phi: Tensor, count: int) -> Tensor:
    """Indices (…, count) of the largest entries of phi ≥ 0, to within the last bits."""
    total = phi.shape[-1]
    count = min(count, total)
    if count == total:
        return torch.arange(total, device=phi.device).expand(phi.shape)
    if count > 8:
        return phi.topk(count, -1).indices
    code, last = coded(phi)
    found = []
    for step in range(count):
        best = (code.amax(-1, keepdim=True) & last).long().clamp_max(total - 1)  # of NaN: any
        found.append(best)
        if step + 1 < count:
            code.scatter_(-1, best, -1)
    return torch.cat(found, -1)
