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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from subquad.attention.partial import EMPTY_LOG_SCALE, Partial
from subquad.attention.summary.kmeans import coded

__all__ = ["ABSENT", "SPREAD", "Tables", "Window", "read"]

ABSENT = -1e30
"""Logit of what is not there: finite, and no other logit lifts it into reach."""

SPREAD = 4.0
"""Largest h: what the spread of a cluster's keys may add to its weight."""

BLOCK = 32
"""Queries that share one span of keys around them."""

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
    batch, heads, queries, dim = q.shape
    count = len(tables.keys)  # N
    groups, blocks = batch * heads // count, -(-queries // BLOCK)
    pad = blocks * BLOCK - queries
    rows = F.pad(q, (0, 1, 0, pad))
    rows.mul_(scale)[..., -1] = 1.0
    rows = rows.view(count, groups, blocks, BLOCK, dim + 1).transpose(1, 2)
    rows = rows.reshape(count, blocks, groups * BLOCK, dim + 1)
    tensors = [rows, tables.keys, tables.values, tables.spread]
    cluster = reach = widths = None
    wide = tables.keys.shape[1] + 2 * tables.spread.shape[1]
    if window is not None:
        span = BLOCK + 2 * window.width
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
        tables.whiten, tables.place, cluster, reach, widths, tables.refine,
        tables.spread.shape[1], groups, offset, window is not None and window.exact,
        max(1, CHUNK_BYTES // (wide * q.element_size())),
    )  # fmt: skip
    out, top = _Read.apply(fixed, *tensors)  # type: ignore[no-untyped-call]  # torch's own

    def back(t: Tensor) -> Tensor:
        t = t.unflatten(2, (groups, BLOCK)).transpose(1, 2)
        return t.reshape(batch, heads, blocks * BLOCK, *t.shape[4:])[:, :, :queries]

    out, top = back(out), back(top)
    den = out[..., -1]
    return Partial(out[..., :-1], den, top.masked_fill(den == 0, EMPTY_LOG_SCALE))


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


class _Read(torch.autograd.Function):
    """`_rows` on every chunk, computed again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, fixed: _Fixed, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        rows, values = tensors[0], tensors[2]
        out = rows.new_empty(*rows.shape[:3], values.shape[-1])
        top = rows.new_empty(rows.shape[:3])
        for heads, blocks in _chunks(fixed, rows):
            parts = [t[at] for t, at in zip(tensors, _pieces(fixed, heads, blocks, tensors),
                                            strict=True)]  # fmt: skip
            out[heads, blocks], top[heads, blocks] = _rows(
                fixed.heads(heads), heads, blocks, *parts
            )
        ctx.save_for_backward(*tensors)
        ctx.fixed = fixed
        ctx.mark_non_differentiable(top)
        return out, top

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_bar: Tensor, _: Tensor) -> tuple[Any, ...]:
        tensors, fixed = ctx.saved_tensors, ctx.fixed
        needed = ctx.needs_input_grad[1:]
        bars = [torch.zeros_like(t) if need else None
                for t, need in zip(tensors, needed, strict=True)]  # fmt: skip
        for heads, blocks in _chunks(fixed, tensors[0]):
            pieces = _pieces(fixed, heads, blocks, tensors)
            parts = [
                t[at].detach().requires_grad_(need)
                for t, at, need in zip(tensors, pieces, needed, strict=True)
            ]
            wanted = [index for index, need in enumerate(needed) if need]
            # backward() may run inside autocast
            with torch.enable_grad(), torch.autocast(out_bar.device.type, enabled=False):
                out, _ = _rows(fixed.heads(heads), heads, blocks, *parts)
                found = torch.autograd.grad(
                    out, [parts[n] for n in wanted], out_bar[heads, blocks], allow_unused=True
                )
            for index, bar in zip(wanted, found, strict=True):
                total = bars[index]
                if bar is not None and total is not None:
                    total[pieces[index]].add_(bar)
        return None, *bars


def _rows(
    fixed: _Fixed,
    heads: slice,
    blocks: slice,
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
    spread: Tensor,
    *rest: Tensor,
) -> tuple[Tensor, Tensor]:
    """[num | den] (n, b, R, V + 1) of n heads and b blocks of R rows, and log_scale (n, b, R)."""
    count, many, size, _ = rows.shape
    clusters = fixed.clusters
    flat = rows.flatten(1, 2)  # (n, b·R, D + 1)
    phi, most = _estimates(flat, keys[:, :clusters], spread, fixed.whiten)
    tops = [most]
    near = near_v = weight = listed = refined = None
    if fixed.cluster is not None:
        near_k, near_v, weight, *rest = rest  # type: ignore[assignment]
        if fixed.exact:
            near = _near_scores(fixed, rows, near_k)  # (n, b, R, span)
            tops.append(near.detach().amax(-1).flatten(1)[..., None])
    if keys.shape[1] > clusters:
        listed = flat @ keys[:, clusters:].transpose(-1, -2)
        tops.append(listed.detach().amax(-1, keepdim=True))
    if rest:
        chosen = _largest(phi.detach(), fixed.refine)  # (n, b·R, r)
        refined, member_t = _member_scores(fixed, blocks, flat, rest[0], chosen)
        tops.append(refined.detach().amax(-1, keepdim=True))
    top = functools.reduce(torch.maximum, tops).clamp_min(0.1 * ABSENT)

    phi = _times(phi, _exp(most - top))
    out = phi @ values[:, :clusters]
    if listed is not None:
        out = out + _exp(_less(listed, top)) @ values[:, clusters:]
    if refined is not None:
        each = member_t.shape[-1] // chosen.shape[-1]
        own = phi.gather(-1, chosen)[..., None] * member_t.unflatten(-1, (-1, each))
        there = refined > 0.5 * ABSENT
        change = _times(_less(_exp(refined - top), own.flatten(-2)), there)
        out = out + _member_sums(change, rest[1], chosen)
    if near_v is not None:
        assert weight is not None and fixed.cluster is not None and fixed.reach is not None
        span = fixed.reach.shape[-1]
        where = fixed.cluster[:, blocks.start * BLOCK : blocks.stop * BLOCK + span - BLOCK]
        where = where.unfold(1, span, BLOCK)[:, :, None].expand(-1, -1, size, -1)
        held = weight.unfold(1, span, BLOCK)[:, :, None] * fixed.reach
        change = _times(phi.view(count, many, size, -1).gather(-1, where), held)
        if near is not None:
            change = _less(_exp(_less(near, top.view(count, many, size, 1))), change)
        else:
            change = -change
        found = change @ near_v.unfold(1, span, BLOCK).transpose(-1, -2)
        out = out + found.flatten(1, 2)
    return out.view(count, many, size, -1), top.view(count, many, size)


def _less(x: Tensor, y: Tensor) -> Tensor:
    """x − y, in place of x where no gradient is wanted."""
    return x - y if torch.is_grad_enabled() else x.sub_(y)


def _times(x: Tensor, y: Tensor) -> Tensor:
    """x·y, in place of x where no gradient is wanted."""
    return x * y if torch.is_grad_enabled() else x.mul_(y)


def _exp(x: Tensor) -> Tensor:
    """exp(x), no smaller than e^-80 (e^-700): subnormal results take a hundred times longer.

    What is not there has that weight then, beside sums of at least 1, and values of zero.
    """
    least = -700.0 if x.dtype == torch.float64 else -80.0
    return torch.exp(x.clamp_min(least)) if torch.is_grad_enabled() else x.clamp_min_(least).exp_()


def _estimates(rows: Tensor, keys: Tensor, spread: Tensor, whiten: Tensor) -> tuple[Tensor, Tensor]:
    """φ·exp(−most) (n, rows, M) of all clusters, and the largest logit `most` (n, rows, 1)."""
    logits = rows @ keys.transpose(-1, -2)
    most = logits.detach().amax(-1, keepdim=True)
    half = (rows @ whiten).square() * 0.5
    one = half.new_ones(1, 1, 1).expand(*half.shape[:2], spread.shape[1])
    more = torch.baddbmm(one, half, spread.transpose(-1, -2))
    more = more.clamp_max(1.0 + SPREAD) if more.requires_grad else more.clamp_max_(1.0 + SPREAD)
    return _times(_exp(_less(logits, most)), more), most


def _near_scores(fixed: _Fixed, rows: Tensor, keys: Tensor) -> Tensor:
    """Logits (n, b, R, span) of the keys around each block, `ABSENT` beyond the window."""
    assert fixed.reach is not None
    scores = rows @ keys.unfold(1, fixed.reach.shape[-1], BLOCK)
    beyond = (~fixed.reach).to(scores.dtype) * ABSENT
    return scores + beyond if torch.is_grad_enabled() else scores.add_(beyond)


def _member_scores(
    fixed: _Fixed, blocks: slice, rows: Tensor, members: Tensor, chosen: Tensor
) -> tuple[Tensor, Tensor]:
    """Logits (n, rows, r·e) of the members of the chosen clusters, and their weights t.

    Members within the window are `ABSENT`.
    """
    flat = _of_all(chosen, members).flatten()
    found = members.flatten(2).flatten(0, 1).index_select(0, flat)
    found = found.view(*rows.shape[:2], -1, members.shape[-1])  # (n, rows, r·e, D + 2)
    scores = (rows[..., None, :] @ found[..., :-1].transpose(-1, -2))[..., 0, :]
    if fixed.widths is not None and fixed.place is not None:
        place = fixed.place.flatten(0, 1).index_select(0, flat).view(scores.shape)
        start = fixed.first + blocks.start * BLOCK
        at = torch.arange(start, start + (blocks.stop - blocks.start) * BLOCK, device=rows.device)
        at = at.view(-1, 1, BLOCK).expand(-1, fixed.groups, -1).reshape(-1, 1)
        within = (place - at).abs() <= fixed.widths[:, None, None]
        scores = scores.masked_fill(within, ABSENT)
    return scores, found[..., -1]


def _member_sums(weight: Tensor, values: Tensor, chosen: Tensor) -> Tensor:
    """Σ weight·[v | 1] (n, rows, V + 1) over the members of the chosen clusters."""
    flat = _of_all(chosen, values)
    if torch.is_grad_enabled():
        found = values.flatten(2).flatten(0, 1).index_select(0, flat.flatten())
        found = found.view(*weight.shape, values.shape[-1])
        return (weight[..., None, :] @ found)[..., 0, :]
    # The same without a copy of the values.
    each = values.shape[2]
    member = flat[..., None] * each + torch.arange(each, device=values.device)
    found = F.embedding_bag(
        member.view(-1, weight.shape[-1]), values.flatten(0, 2), mode="sum",
        per_sample_weights=weight.flatten(0, 1),
    )  # fmt: skip
    return found.view(*weight.shape[:2], -1)


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
