"""Sums over the keys outside of a window around each query, as causal calls.

The query at position p_i = i + S − L leaves the keys |p_i − j| ≤ w to others. What remains are

    earlier keys  j ≤ p_i − (w + 1):   a causal call that is w + 1 tokens late,
    later keys    j ≥ p_i + (w + 1):   the same with the order of the tokens reversed.

Each is a sum of its own over keys that no other part reads: nothing is subtracted, and every
mechanism with causal partial sums in linear time has these in linear time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.attention.masks import Mask
from subquad.attention.partial import EMPTY_LOG_SCALE, Partial

__all__ = ["Side", "by_calls", "outside", "sides"]


@dataclass(frozen=True)
class Side:
    """One call: a range of queries that read a range of keys, causally or all of it.

    Args:
        queries, keys: [first, end).
        causal: aligned to the end, with no more queries than keys.
        reverse: the order of queries and keys is reversed first.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    causal: bool
    reverse: bool

    def of_queries(self, t: Tensor, dim: int = 2) -> Tensor:
        """This side's queries of a tensor."""
        return self._take(t, self.queries, dim)

    def of_keys(self, t: Tensor, dim: int = 2) -> Tensor:
        """This side's keys of a tensor."""
        return self._take(t, self.keys, dim)

    def _take(self, t: Tensor, span: tuple[int, int], dim: int) -> Tensor:
        part = t.narrow(dim, span[0], span[1] - span[0])
        return part.flip(dim) if self.reverse else part

    def place(self, part: Partial, queries: int) -> Partial:
        """The part's sums at their places among all queries, empty elsewhere."""
        num, den, log_scale = part.num, part.den, part.log_scale
        if self.reverse:
            num, den, log_scale = (t.flip(2) for t in (num, den, log_scale))
        before, after = self.queries[0], queries - self.queries[1]
        if before or after:
            num = F.pad(num, (0, 0, before, after))
            den = F.pad(den, (before, after))
            log_scale = F.pad(log_scale, (before, after), value=EMPTY_LOG_SCALE)
        return Partial(num, den, log_scale)


def sides(queries: int, keys: int, window: int, causal: bool) -> list[Side]:
    """The calls that cover all keys with |p_i − j| > `window` once; a causal mask ends at p_i.

    A window of −1 leaves nothing out.
    """
    if window < 0 and not causal:
        return [Side((0, queries), (0, keys), False, False)]
    found, late = [], window + 1
    if keys > late:
        count = min(queries, keys - late)
        found.append(Side((queries - count, queries), (0, keys - late), True, False))
    if not causal and queries > late:
        last = queries - late  # these have later keys
        count = min(keys, last)
        found.append(Side((last - count, last), (keys - count, keys), True, True))
        if last > count:  # these precede all keys by more than the window
            found.append(Side((0, last - count), (0, keys), False, False))
    return found


def outside(
    run: Callable[[Side], Partial], queries: int, keys: int, window: int, causal: bool
) -> list[Partial]:
    """`run` on every side, each placed among all queries."""
    return [side.place(run(side), queries) for side in sides(queries, keys, window, causal)]


def by_calls(
    partial: Callable[[Tensor, Tensor, Tensor, Mask, Any], Partial],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: Any,
    window: int,
    closed: Tensor | None,
) -> list[Partial]:
    """`Mechanism._outside` from a mechanism's own `_partial`, one or two calls.

    Where `closed` differs between key/value heads, there are so many calls for each of them.
    """
    heads = k.shape[1]

    def one(side: Side, key: Tensor | None) -> Partial:
        own = Mask(causal=side.causal, key=None if key is None else side.of_keys(key, 1))
        return partial(side.of_queries(q), side.of_keys(k), side.of_keys(v), own, scale)

    def run(side: Side) -> Partial:
        if closed is None:
            return one(side, mask.key)
        keys = [~closed[:, h] if mask.key is None else mask.key & ~closed[:, h]
                for h in range(closed.shape[1])]  # fmt: skip
        if len(keys) == 1:
            return one(side, keys[0])
        found = []
        for head, key in enumerate(keys):
            part = one(side, key)
            sums = (part.num, part.den, part.log_scale)
            found.append([t.unflatten(1, (heads, -1))[:, head] for t in sums])
        return Partial(*(torch.cat(tensors, 1) for tensors in zip(*found, strict=True)))

    return outside(run, q.shape[2], k.shape[2], window, mask.causal)
