"""The grouped engine: softmax of listed queries over listed keys, group by group.

    out_gi = Σ_{j ∈ K_g} w_ij v_j / Σ_{j ∈ K_g} w_ij,   w_ij = exp(scale·q_i·k_j + b_ij),   i ∈ Q_g

Hashing, clustering and sorting put tokens into groups; a group is two lists of positions, of its
queries and of its keys. Queries, keys and values are gathered for a few groups at a time, so that
their scores stay within `SCORE_BYTES`: memory beyond inputs and outputs is O(1), forward and
backward, whatever the groups are. The backward pass gathers and computes the scores again from
the log-sum-exp; its formulas are those of `subquad.kernels.block`. A token may be in any number
of groups: its gradients add. Scores are kept in units of ln 2: 2^x is quick also where it
vanishes, e^x is not on a CPU.

Cost: 2·C·R·(D+V) FLOPs a group of C queries and R keys forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec

import torch
from torch import Tensor

from subquad.kernels.block import EMPTY, SCORE_BYTES
from subquad.kernels.linear import LOG2E
from subquad.kernels.precision import own_precision
from subquad.kernels.transforms import transformed

__all__ = ["PairBias", "PairClosed", "grouped_softmax", "joint_softmax", "of_tokens"]

P = ParamSpec("P")

CLOSED = -1e30
"""What one unit of closedness adds to a score: finite, for 0·∞ is none."""

PairBias = Callable[[Tensor, Tensor, Tensor], Tensor | None]
"""(groups (g,), queries (g, C), keys (g, R)) → b, broadcastable to (g, C, R), or None.

Groups count through all batch rows and heads: group g of G belongs to row g // (H·G), head
g // G % H. −∞ closes a pair. No gradient flows into b.
"""

PairClosed = Callable[[Tensor, Tensor, Tensor, torch.dtype], Tensor | None]
"""(groups, queries, keys, dtype) → (g, C, R) of that dtype, or None: ≥ ½ closes a pair, 0 does not.

Numbers instead of bools: arithmetic in place is several times faster than comparisons. Finite.
"""


class _Problem:
    """One call with batch rows and heads flat: q (B·H·L, D), k (B·Hkv·S, D), groups (B·H·G, ·)."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor,
        key: Tensor | None, causal: bool, bias: PairBias | None, scale: float,
        closed: PairClosed | None = None,
    ) -> None:  # fmt: skip
        self.dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        batch, self.heads, self.length = q.shape[:3]
        self.kv, self.keys_length = k.shape[1:3]
        self.each = queries.shape[2]
        self.q, self.k, self.v = (
            t.to(self.dtype).reshape(batch * t.shape[1] * t.shape[2], t.shape[3]) for t in (q, k, v)
        )
        self.queries, self.keys = queries.flatten(0, 2), keys.flatten(0, 2)
        self.key, self.causal, self.bias, self.closed, self.scale = key, causal, bias, closed, scale
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

    def bound(self, groups: Tensor) -> tuple[Tensor, float] | None:
        """(b, β): β·b (g, 1 or C, R) is added to the scores; None: nothing."""
        here = slice(int(groups[0]), int(groups[-1]) + 1)
        queries, keys = self.queries[here], self.keys[here]
        closed = None if self.closed is None else self.closed(groups, queries, keys, self.dtype)
        if self.causal:
            places = (queries + self.offset).to(self.dtype)  # exact below 2²⁴ tokens
            later = (keys.to(self.dtype)[:, None] - places[..., None]).clamp_min_(0)
            closed = later if closed is None else closed.add_(later)
        if self.holes or self.key is not None:
            shut = keys < 0
            if self.key is not None:
                row = groups // (self.each * self.heads)
                shut = shut | ~self.key[row[:, None], keys.clamp_min(0)]
            columns = shut.to(self.dtype)[:, None]
            closed = columns if closed is None else closed.add_(columns)
        bias = None if self.bias is None else self.bias(groups, queries, keys)
        if bias is None:
            return None if closed is None else (closed, CLOSED)
        bias = bias.to(self.dtype) * LOG2E
        return bias if closed is None else bias + closed * CLOSED, 1.0

    def gather(self, t: Tensor, at: Tensor, groups: Tensor) -> Tensor:
        """(g, C or R, ·)."""
        return t.index_select(0, at).view(len(groups), -1, t.shape[-1])

    def scores(self, q: Tensor, k: Tensor, bound: tuple[Tensor, float] | None) -> Tensor:
        """(scale·q kᵀ + b) / ln 2 (g, C, R)."""
        if bound is None:
            return torch.bmm(q * (self.scale * LOG2E), k.mT)
        return torch.baddbmm(bound[0], q, k.mT, beta=bound[1], alpha=self.scale * LOG2E)


def _without_autocast(
    run: Callable[Concatenate[_Problem, P], tuple[Tensor, ...]],
) -> Callable[Concatenate[_Problem, P], tuple[Tensor, ...]]:
    """Sums stay in their dtype: backward() may run inside autocast."""

    @functools.wraps(run)
    def wrapped(p: _Problem, /, *rest: P.args, **named: P.kwargs) -> tuple[Tensor, ...]:
        with own_precision(p.q):
            return run(p, *rest, **named)

    return wrapped


@_without_autocast
def forward(p: _Problem) -> tuple[Tensor, ...]:
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
            empty = top < CLOSED / 4  # ½ a unit closes; −∞ of a bias does too
            if p.gaps:
                empty = empty | (p.queries[here] < 0)[..., None]
            if not bool(empty.any()):
                empty = None
        if empty is not None:
            top = top.masked_fill(empty, 0.0)
        weights = s.sub_(top).exp2_()
        total = weights.sum(-1, keepdim=True)
        if empty is not None:
            total = total.masked_fill(empty, 1.0)
        v = p.gather(p.v, k_at, groups)
        o = torch.bmm(weights, v).div_(total)
        found = (top + total.log2()).squeeze(-1).div_(LOG2E)
        if empty is not None:
            o.masked_fill_(empty, 0.0)
            found.masked_fill_(empty.squeeze(-1), EMPTY)
        out[here], lse[here] = o, found
    return out, lse


@_without_autocast
def differentiable(p: _Problem) -> tuple[Tensor, ...]:
    """`forward` by differentiable operations alone: all scores are held where gradients are."""
    found = []
    for groups in p.chunks():
        here = slice(int(groups[0]), int(groups[-1]) + 1)
        q_at, k_at = p.places(groups)
        q, k, v = (p.gather(t, at, groups) for t, at in ((p.q, q_at), (p.k, k_at), (p.v, k_at)))
        s = p.scores(q, k, p.bound(groups))
        top = s.detach().amax(-1, keepdim=True)
        empty = (top < CLOSED / 4) | (p.queries[here] < 0)[..., None]
        top = top.masked_fill(empty, 0.0)
        weights = torch.exp2(s - top).masked_fill(empty, 0.0)
        total = weights.sum(-1, keepdim=True).masked_fill(empty, 1.0)
        lse = ((top + total.log2()) / LOG2E).masked_fill(empty, EMPTY)
        found.append((torch.bmm(weights, v) / total, lse.squeeze(-1)))
    out, lse = (torch.cat(parts) for parts in zip(*found, strict=True))
    return out, lse


@_without_autocast
def backward(p: _Problem, lse: Tensor, out_bar: Tensor, delta: Tensor) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, flat as in `_Problem`; δ = Σ ō∘o − l̄ of each query."""
    q_bar, k_bar, v_bar = (t.new_zeros(t.shape) for t in (p.q, p.k, p.v))
    for groups in p.chunks():
        here = slice(int(groups[0]), int(groups[-1]) + 1)
        q_at, k_at = p.places(groups)
        q, k, v = (p.gather(t, at, groups) for t, at in ((p.q, q_at), (p.k, k_at), (p.v, k_at)))
        g, shift = out_bar[here], lse[here, :, None]
        absent = shift == EMPTY
        shift = shift.masked_fill(absent, 0.0) * LOG2E
        w = p.scores(q, k, p.bound(groups)).sub_(shift).exp2_()
        if bool(absent.any()):
            w = w.masked_fill(absent, 0.0)  # not in place: this too is differentiated
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
        out_bar, delta = _delta(out, *bars)
        found = backward(p, *(t.flatten(0, 2) for t in (lse, out_bar, delta)))
        return (*_like(found, (q, k, v)), *([None] * 6))


def _delta(out: Tensor, out_bar: Tensor | None, lse_bar: Tensor | None) -> tuple[Tensor, Tensor]:
    """ō, and δ = Σ ō∘o − l̄."""
    if out_bar is None:
        out_bar = torch.zeros_like(out)
    delta = (out_bar * out).sum(-1)
    return out_bar, delta if lse_bar is None else delta - lse_bar


def _like(found: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    return [bar.view(t.shape).to(t.dtype) for bar, t in zip(found, tensors, strict=True)]


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
    if transformed():
        p = _Problem(q, k, v, queries, keys, key, causal, bias, scale)
        out, lse = (t.unflatten(0, queries.shape[:3]) for t in differentiable(p))
        return out, lse
    found: tuple[Tensor, Tensor] = _Grouped.apply(  # type: ignore[no-untyped-call]  # torch's
        q, k, v, queries, keys, key, causal, bias, scale
    )
    return found


# ---- one softmax over several rounds of groups --------------------------------------------------


def of_tokens(x: Tensor, queries: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """What groups found, token by token.

    Args:
        x: (B, H, G, C, ·).
        queries: (B, H, G, C) positions, each at most once in a row, −1 = none.
        length: L.

    Returns:
        (B, H, L, ·), and bool (B, H, L): whether a token is in a group (else its row is that
        of some other token).
    """
    batch, heads = queries.shape[:2]
    places = _places(queries, length)
    rows = torch.arange(batch * heads, device=places.device)[:, None] * queries[0, 0].numel()
    at = (places.clamp_min(0) + rows).flatten()
    found = x.reshape(-1, x.shape[-1]).index_select(0, at)
    return found.view(batch, heads, length, -1), (places >= 0).view(batch, heads, length)


def _places(queries: Tensor, length: int) -> Tensor:
    """(B·H, L): where a row's groups list each token, −1 = nowhere."""
    flat = queries.flatten(0, 1).flatten(1)
    places = torch.full((len(flat), length + 1), -1, device=flat.device)
    numbers = torch.arange(flat.shape[1], device=flat.device).expand_as(flat)
    return places.scatter_(1, flat + 1, numbers)[:, 1:]


def _jointly(
    q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, key: Tensor | None,
    causal: bool, closed: Sequence[PairClosed | None], scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`joint_softmax` by differentiable operations alone."""
    outs, sums = [], []
    for mine, theirs, shut in zip(queries, keys, closed, strict=True):
        p = _Problem(q, k, v, mine, theirs, key, causal, None, scale, shut)
        both = [t.view(*mine.shape, -1) for t in differentiable(p)]
        (found, there), (own, _) = (of_tokens(t, mine, q.shape[2]) for t in both)
        outs.append(found.masked_fill(~there[..., None], 0.0))
        sums.append(own.masked_fill(~there[..., None], EMPTY))
    logits = torch.stack(sums)
    weights = torch.softmax(logits, 0)
    lse = logits.logsumexp(0).squeeze(-1)
    none = (logits.detach() == EMPTY).all(0).squeeze(-1)
    return (weights * torch.stack(outs)).sum(0), lse.masked_fill(none, EMPTY)


class _Joint(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor,
        key: Tensor | None, causal: bool, closed: Sequence[PairClosed | None], scale: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out = lse = None
        for number, shut in enumerate(closed):
            mine = queries[number]
            p = _Problem(q, k, v, mine, keys[number], key, causal, None, scale, shut)
            shape = mine.shape
            both = [t.view(*shape, -1) for t in forward(p)]
            (found, there), (own, _) = (of_tokens(t, mine, q.shape[2]) for t in both)
            if not bool(there.all()):
                found.masked_fill_(~there[..., None], 0.0)
                own.masked_fill_(~there[..., None], EMPTY)
            if out is None or lse is None:
                out, lse = found, own
                continue
            top = torch.maximum(lse, own)
            old, new = (lse - top).exp_(), (own - top).exp_()
            total = old + new
            out.mul_(old.div_(total)).addcmul_(found, new.div_(total))
            lse = torch.where(top == EMPTY, top, top + total.log_())
        assert out is not None and lse is not None
        lse = lse.squeeze(-1)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, queries, keys, key, out, lse)
        ctx.options = causal, closed, scale
        return out, lse

    @staticmethod
    def backward(ctx: Any, *bars: Tensor | None) -> tuple[Any, ...]:
        q, k, v, queries, keys, key, out, lse = ctx.saved_tensors
        causal, closed, scale = ctx.options
        out_bar, delta = _delta(out, *bars)
        out_bar, delta, lse = out_bar.flatten(0, 2), delta.flatten(), lse.flatten()
        total: list[Tensor] | None = None
        for number, shut in enumerate(closed):
            p = _Problem(q, k, v, queries[number], keys[number], key, causal, None, scale, shut)
            rows = torch.arange(len(p.queries), device=lse.device)[:, None] // p.each * p.length
            at = (p.queries.clamp_min(0) + rows).flatten()
            mine = lse.index_select(0, at).view(p.queries.shape)
            mine = mine.masked_fill_(p.queries < 0, EMPTY)
            ours = out_bar.index_select(0, at).view(*p.queries.shape, -1)
            found = backward(p, mine, ours, delta.index_select(0, at).view(p.queries.shape))
            if total is None:
                total = list(found)
            else:
                total = [bar.add_(more) for bar, more in zip(total, found, strict=True)]
        assert total is not None
        return (*_like(total, (q, k, v)), *([None] * 6))


def joint_softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Tensor,
    keys: Tensor,
    *,
    scale: float,
    key: Tensor | None = None,
    causal: bool = False,
    closed: Sequence[PairClosed | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Each query's softmax over the keys of all its groups, of several rounds of groups.

    The rounds' sums are merged by their log-sum-exp; a key that several rounds list counts as
    often. Beside inputs and outputs one round's results are held.

    Args:
        q, k, v, scale, key, causal: as in `grouped_softmax`.
        queries: (R, B, H, G, C) positions, −1 = none; within a round a query is listed once.
        keys: (R, B, H, G, ·) positions of the groups' keys, −1 = none.
        closed: for each round which pairs are closed, see `PairClosed`; groups count within
            the round.

    Returns:
        out (B, H, L, V) and lse (B, H, L) in float32, float64 for float64 inputs: zero and
        `EMPTY` where a query reads no key. Gradients flow through both.
    """
    if closed is None:
        closed = [None] * len(queries)
    if transformed():
        return _jointly(q, k, v, queries, keys, key, causal, closed, scale)
    found: tuple[Tensor, Tensor] = _Joint.apply(  # type: ignore[no-untyped-call]  # torch's
        q, k, v, queries, keys, key, causal, closed, scale
    )
    return found
