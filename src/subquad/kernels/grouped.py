"""The grouped engine: softmax of listed queries over listed keys, group by group.

    out_gi = Σ_{j ∈ K_g} w_ij v_j / Σ_{j ∈ K_g} w_ij,   w_ij = exp(scale·q_i·k_j + b_ij),   i ∈ Q_g

Hashing, clustering and sorting put tokens into groups; a group is two lists of positions, of its
queries and of its keys. Queries, keys and values are gathered for a few groups at a time, so that
their scores stay within `SCORE_BYTES`: memory beyond inputs and outputs is O(1), forward and
backward, whatever the groups are. The backward pass gathers and computes the scores again from
the log-sum-exp; its formulas are those of `subquad.kernels.block`. A token may be in any number
of groups: its gradients add.

Cost: 2·C·R·(D+V) FLOPs a group of C queries and R keys forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from subquad.kernels.block import EMPTY, SCORE_BYTES

__all__ = ["PairBias", "grouped_softmax"]

PairBias = Callable[[Tensor, Tensor, Tensor], Tensor | None]
"""(groups (g,), queries (g, C), keys (g, R)) → b, broadcastable to (g, C, R), or None.

Groups count through all batch rows and heads: group g of G belongs to row g // (H·G), head
g // G % H. −∞ closes a pair. No gradient flows into b.
"""


class _Problem:
    """One call with batch rows and heads flat: q (B·H·L, D), k (B·Hkv·S, D), groups (B·H·G, ·)."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor,
        key: Tensor | None, causal: bool, bias: PairBias | None, scale: float,
    ) -> None:  # fmt: skip
        self.dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        batch, self.heads, self.length = q.shape[:3]
        self.kv, self.keys_length = k.shape[1:3]
        self.each = queries.shape[2]
        self.q, self.k, self.v = (
            t.to(self.dtype).reshape(batch * t.shape[1] * t.shape[2], t.shape[3]) for t in (q, k, v)
        )
        self.queries, self.keys = queries.flatten(0, 2), keys.flatten(0, 2)
        self.key, self.causal, self.bias, self.scale = key, causal, bias, scale
        self.offset = self.keys_length - self.length
        self.holes = bool((self.keys < 0).any())
        self.gaps = bool((self.queries < 0).any())

    def chunks(self) -> Iterator[Tensor]:
        """Numbers of groups whose scores are computed together."""
        size = self.queries.shape[1] * self.keys.shape[1] * self.dtype.itemsize
        numbers = torch.arange(len(self.queries), device=self.queries.device)
        return iter(numbers.split(max(1, SCORE_BYTES // max(size, 1))))

    def places(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of q and of k that the groups list, flat; a hole is the row's first token."""
        here = slice(int(groups[0]), int(groups[-1]) + 1)
        row = groups // self.each  # batch · H + head
        kv_row = row // self.heads * self.kv + row % self.heads // (self.heads // self.kv)
        q_at = self.queries[here].clamp_min(0) + row[:, None] * self.length
        k_at = self.keys[here].clamp_min(0) + kv_row[:, None] * self.keys_length
        return q_at.flatten(), k_at.flatten()

    def bound(self, groups: Tensor) -> Tensor | None:
        """What is added to the scores (g, 1 or C, R); None: nothing."""
        here = slice(int(groups[0]), int(groups[-1]) + 1)
        queries, keys = self.queries[here], self.keys[here]
        closed: Tensor | None = None
        if self.holes:
            closed = (keys < 0)[:, None]
        if self.key is not None:
            row = groups // (self.each * self.heads)
            shut = ~self.key[row[:, None], keys.clamp_min(0)][:, None]
            closed = shut if closed is None else closed | shut
        if self.causal:
            later = keys.int()[:, None] > (queries.int() + self.offset)[..., None]
            closed = later if closed is None else closed | later
        bias = None if self.bias is None else self.bias(groups, queries, keys)
        if bias is not None:
            bias = bias.to(self.dtype)
            return bias if closed is None else bias.masked_fill(closed, float("-inf"))
        if closed is None:
            return None
        bias = torch.zeros(closed.shape, dtype=self.dtype, device=closed.device)
        return bias.masked_fill_(closed, float("-inf"))

    def gather(self, t: Tensor, at: Tensor, groups: Tensor) -> Tensor:
        """(g, C or R, ·)."""
        return t.index_select(0, at).view(len(groups), -1, t.shape[-1])

    def scores(self, q: Tensor, k: Tensor, bound: Tensor | None) -> Tensor:
        """scale·q kᵀ + b (g, C, R)."""
        if bound is None:
            return torch.bmm(q * self.scale, k.mT)
        return torch.baddbmm(bound, q, k.mT, alpha=self.scale)


def forward(p: _Problem) -> tuple[Tensor, Tensor]:
    """out (B·H·G, C, V) and lse (B·H·G, C) in the dtype of the sums."""
    count, members = p.queries.shape
    out = p.q.new_empty(count, members, p.v.shape[-1])
    lse = p.q.new_empty(count, members)
    for groups in p.chunks():
        here = slice(int(groups[0]), int(groups[-1]) + 1)
        q_at, k_at = p.places(groups)
        q, k = p.gather(p.q, q_at, groups), p.gather(p.k, k_at, groups)
        bound = p.bound(groups)
        s = p.scores(q, k, bound)
        top = s.amax(-1, keepdim=True)
        empty = None
        if bound is not None or p.gaps:
            empty = top == float("-inf")
            if p.gaps:
                empty = empty | (p.queries[here] < 0)[..., None]
            if not bool(empty.any()):
                empty = None
        if empty is not None:
            top = top.masked_fill(empty, 0.0)
        weights = s.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        if empty is not None:
            total = total.masked_fill(empty, 1.0)
        v = p.gather(p.v, k_at, groups)
        o = torch.bmm(weights, v).div_(total)
        found = (top + total.log()).squeeze(-1)
        if empty is not None:
            o.masked_fill_(empty, 0.0)
            found.masked_fill_(empty.squeeze(-1), EMPTY)
        out[here], lse[here] = o, found
    return out, lse


def backward(
    p: _Problem, out: Tensor, lse: Tensor, out_bar: Tensor, lse_bar: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, flat as in `_Problem`."""
    q_bar, k_bar, v_bar = (t.new_zeros(t.shape) for t in (p.q, p.k, p.v))
    delta = (out_bar * out).sum(-1)
    if lse_bar is not None:
        delta = delta - lse_bar
    for groups in p.chunks():
        here = slice(int(groups[0]), int(groups[-1]) + 1)
        q_at, k_at = p.places(groups)
        q, k, v = (p.gather(t, at, groups) for t, at in ((p.q, q_at), (p.k, k_at), (p.v, k_at)))
        g, shift = out_bar[here], lse[here, :, None]
        absent = shift == EMPTY
        w = p.scores(q, k, p.bound(groups)).sub_(shift.masked_fill(absent, 0.0)).exp_()
        if bool(absent.any()):
            w.masked_fill_(absent, 0.0)
        s_bar = torch.bmm(g, v.mT).sub_(delta[here, :, None]).mul_(w)
        for bar, at, found in (
            (q_bar, q_at, torch.bmm(s_bar, k).mul_(p.scale)),
            (k_bar, k_at, torch.bmm(s_bar.mT, q).mul_(p.scale)),
            (v_bar, k_at, torch.bmm(w.mT, g)),
        ):
            bar.index_add_(0, at, found.flatten(0, 1))
    return q_bar, k_bar, v_bar


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor,
        key: Tensor | None, causal: bool, bias: PairBias | None, scale: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        p = _Problem(q, k, v, queries, keys, key, causal, bias, scale)
        out, lse = (t.unflatten(0, queries.shape[:3]) for t in forward(p))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, queries, keys, key, out, lse)
        ctx.options = causal, bias, scale
        return out, lse

    @staticmethod
    def backward(ctx: Any, *bars: Tensor | None) -> tuple[Any, ...]:
        q, k, v, queries, keys, key, out, lse = ctx.saved_tensors
        p = _Problem(q, k, v, queries, keys, key, *ctx.options)
        out_bar, lse_bar = (None if bar is None else bar.flatten(0, 2) for bar in bars)
        if out_bar is None:
            out_bar = torch.zeros_like(out).flatten(0, 2)
        found = backward(p, out.flatten(0, 2), lse.flatten(0, 2), out_bar, lse_bar)
        like = zip(found, (q, k, v), strict=True)
        return (*(bar.view(t.shape).to(t.dtype) for bar, t in like), *([None] * 6))


def grouped_softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Tensor,
    keys: Tensor,
    *,
    scale: float,
    key: Tensor | None = None,
    causal: bool = False,
    bias: PairBias | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of each group's queries over the group's keys.

    Args:
        q: (B, H, L, D).
        k: (B, Hkv, S, D), finite also where masked.
        v: (B, Hkv, S, V), likewise.
        queries: (B, H, G, C) positions of each group's queries in 0 … L − 1, −1 = none.
        keys: (B, H, G, R) positions of its keys in 0 … S − 1, −1 = none.
        scale: factor of the logits.
        key: (B, S) bool, True = attend.
        causal: query i reads keys j ≤ i + S − L only.
        bias: adds to the logits, see `PairBias`; called again in the backward pass.

    Returns:
        out (B, H, G, C, V) and lse (B, H, G, C) in float32, float64 for float64 inputs: zero and
        `EMPTY` where a query reads no key. Gradients flow through both.
    """
    found: tuple[Tensor, Tensor] = _Grouped.apply(  # type: ignore[no-untyped-call]  # torch's
        q, k, v, queries, keys, key, causal, bias, scale
    )
    return found
