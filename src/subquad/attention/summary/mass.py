"""How much attention each key receives, estimated from a few queries in O(S).

    mass_j = mean over landmark queries t of softmax_j(scale·q_t·k_j)

What it serves to choose (heavy keys, proposals, weights within clusters) is held fixed: nothing
here passes gradients. Landmarks are chosen by rank among the open queries, so that padding
changes nothing wherever it stands.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.attention.exact.engine import sums_dtype
from subquad.attention.masks import Mask
from subquad.kernels.transforms import mapped

__all__ = ["column_mass", "of_rank", "open_queries", "open_tokens", "strata", "take"]

CHUNK_BYTES = 16 * 2**20
"""Bytes of the logits and weights of the landmarks that are read at once."""


def open_tokens(key: Tensor | None, batch: int, length: int, device: torch.device) -> Tensor:
    """The key mask (B, length), all True where there is none."""
    if key is None:
        return torch.ones(batch, length, dtype=torch.bool, device=device)
    return key


def open_queries(mask: Mask, q: Tensor, keys: int) -> Tensor:
    """Queries that statistics of a call may look at, (B, L) bool.

    Where L = S the queries at masked positions are left out: in self-attention these are
    padding. Where L ≠ S positions of queries and keys are unrelated and every query counts.
    """
    key = mask.key if q.shape[2] == keys else None
    return open_tokens(key, len(q), q.shape[2], q.device)


def strata(opened: Tensor, count: int, offset: Tensor | None = None) -> Tensor:
    """Ranks ⌊(t + u_t)·n/count⌋, one from each of `count` strata of a row's n open tokens.

    Args:
        opened: (B, N) bool.
        count: T; where n < T some ranks are taken more than once.
        offset: u (Hkv, T) in [0, 1), float64; the middle of each stratum without it.

    Returns:
        (B, Hkv or 1, T) int64; −1 in a row without open tokens.
    """
    total = opened.sum(-1)[:, None, None]
    stratum = torch.arange(count, device=opened.device)
    if offset is None:
        rank = (2 * stratum + 1) * total // (2 * count)
    else:
        rank = ((stratum + offset) * total.double() / count).long()
    return torch.minimum(rank, total - 1)


def of_rank(opened: Tensor, rank: Tensor) -> Tensor:
    """Positions of the open tokens of given ranks, (B, ...) like `rank`; 0 for rank −1.

    Args:
        opened: (B, N) bool.
        rank: (B, ...) int64, −1 or below the row's number of open tokens.
    """
    # Position of rank r: the first one by which r + 1 open tokens have been counted.
    counted, wanted = opened.long().cumsum(-1), (rank + 1).flatten(1)
    return torch.searchsorted(counted, wanted.contiguous()).view_as(rank)


def take(x: Tensor, index: Tensor) -> Tensor:
    """Rows x[b, h, index[b, h, n]] (B, h, n, D) of x (B, h, N, D), h the heads of `index`.

    x has as many heads as `index`, or fewer, each serving a group of them. Cost O(n·D).
    """
    (batch, heads, count), (kv, length) = index.shape, x.shape[1:3]
    row = torch.arange(batch, device=x.device)[:, None] * kv
    head = torch.arange(heads, device=x.device) * kv // heads
    flat = ((row + head) * length)[..., None] + index
    found = x.reshape(batch * kv * length, -1).index_select(0, flat.flatten())
    return found.view(batch, heads, count, x.shape[-1])


def _close(weights: Tensor, place: Tensor, window: int | Tensor, farthest: int) -> None:
    """Zeros in weights (B, h, T, S), in place, where |place − j| ≤ window for place (B, h, T, 1).

    Cost O(T·window), not O(T·S); no |place − j| exceeds `farthest`.
    """
    if isinstance(window, Tensor):
        most = farthest if mapped() else min(farthest, int(window.max()))
    else:
        most = min(farthest, window)
    if most < 0:
        return
    step = torch.arange(-most, most + 1, device=place.device)
    at = (place + step).clamp(0, weights.shape[-1] - 1)
    within = window[:, None, None, None] if isinstance(window, Tensor) else window
    weights.scatter_(-1, at, weights.gather(-1, at) * ((place - at).abs() > within))


@torch.no_grad()
def column_mass(
    q: Tensor,
    k: Tensor,
    mask: Mask,
    scale: float,
    count: int,
    offset: Tensor | None = None,
    window: int | Tensor = -1,
) -> Tensor:
    """Mean attention that each key gets from `count` landmark queries of each query head.

    Cost 2·T·S·D FLOPs a query head, O(S) memory: landmarks are taken 16 MiB at a time.

    Args:
        q: (B, H, L, D).
        k: (B, Hkv, S, D), cleared where masked.
        mask: its key part says which keys are open.
        scale: factor of the logits.
        count: T, landmark queries of each query head, one from each stratum, see `strata`.
        offset: u (Hkv, T).
        window: keys with |i + S − L − j| ≤ window get nothing from the landmark i; a number or
            one for each row (B,), −1 for none.

    Returns:
        (B, Hkv, S), float32 or float64: zero at masked keys; without a window it sums to one
        over the others. The mean over the query heads of a group.
    """
    dtype = sums_dtype(q.dtype)
    batch, kv, keys = k.shape[:3]
    groups = q.shape[1] // kv
    opened = open_queries(mask, q, keys)
    position = of_rank(opened, strata(opened, count, offset)).expand(-1, kv, -1)
    rows = take(q, position.repeat_interleave(groups, 1)).to(dtype) * scale
    rows = rows.unflatten(1, (kv, groups)).flatten(2, 3)  # (B, Hkv, G·T, D)
    columns = k.to(dtype).transpose(-1, -2)
    closed = None if mask.key is None else ~mask.key[:, None, None]
    place = (position + (keys - q.shape[2])).repeat(1, 1, groups)[..., None]
    heads, size = kv, rows.shape[2]  # a single chunk has to compile for any length
    if not torch.compiler.is_compiling():
        chunk = CHUNK_BYTES // (2 * batch * keys * dtype.itemsize)
        size = min(size, max(1, chunk))
        heads = max(1, chunk // size)
    parts = []
    for part in (slice(head, head + heads) for head in range(0, kv, heads)):
        total: Tensor | None = None
        for start in range(0, rows.shape[2], size):
            logits = rows[:, part, start : start + size] @ columns[:, part]
            if closed is not None:  # finite: a row without any open key stays finite too
                logits = logits.masked_fill(closed, torch.finfo(dtype).min)
            weights = logits.softmax(-1)
            if isinstance(window, Tensor) or window >= 0:
                farthest = max(keys, q.shape[2]) - 1
                _close(weights, place[:, part, start : start + size], window, farthest)
            found = weights.sum(2)
            total = found if total is None else total + found
        assert total is not None
        parts.append(total)
    total = torch.cat(parts, 1) / rows.shape[2]
    return total if mask.key is None else total.masked_fill(~mask.key[:, None], 0.0)
