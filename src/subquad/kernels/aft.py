"""Averages with one set of weights a channel: the sums of the Attention Free Transformer.

    y_ic = Σ_j exp(k_jc + w_ij) v_jc / Σ_j exp(k_jc + w_ij)

w is 0 outside of a band around the diagonal, or a full matrix. Queries come in chunks. The keys
that a chunk's band touches are summed by products with exp(w); all keys before and after them
have w = 0 and are carried along as one `Rest` on each side: sums of positive terms only, where
the paper's global sum plus Σ exp(k)(exp(w) − 1) cancels digits for negative w.

Everything is relative to the chunk's largest key of a channel, which cancels in the ratio, and
never to a later key of a causal row alone: a row whose sum falls under `THIN` for that reason is
computed again, key by key. Saved for the backward pass: inputs and output.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.kernels.linear import EMPTY
from subquad.kernels.transforms import again, differentiated, transformed

__all__ = ["Rest", "channel_average"]

CHUNK = 128
"""Queries a chunk."""

THIN = 1e-13
"""Least normaliser of the fast path. exp(k − top) and exp(w − max) are lost below 2^-126 in
float32, so a row above has lost less than 1e-25 of its sum for each key."""


@dataclass(frozen=True)
class Rest:
    """Keys summed into one: weight exp(top)·mass and value mean, each (B, H, 1, D).

    `top` is where the masses are measured from, EMPTY while no key is in. Gradients flow
    through all three.
    """

    top: Tensor
    mass: Tensor
    mean: Tensor

    @classmethod
    def empty(cls, like: Tensor) -> Rest:
        """No key yet, for keys or values such as `like` (B, H, S, D)."""
        top = like.new_full((*like.shape[:2], 1, like.shape[-1]), EMPTY)
        return cls(top, torch.ones_like(top), torch.zeros_like(top))

    def add(self, k: Tensor, v: Tensor) -> Rest:
        """With the keys k and values v (B, H, S, D) as well; S may be 0."""
        if k.shape[2] == 0:
            return self
        top = torch.maximum(self.top, k.amax(2, keepdim=True)).detach()
        old, new = self.mass * (self.top - top).exp(), (k - top).exp()
        mass = old + new.sum(2, keepdim=True)
        return Rest(top, mass, (old * self.mean + (new * v).sum(2, keepdim=True)) / mass)


def channel_average(
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    queries: int,
    *,
    past: Rest | None = None,
    band: tuple[int, int] | None = None,
    causal: bool = False,
) -> Tensor:
    """y_ic for `queries` rows aligned to the end of the S keys: (B, H, L, D).

    Cost O(L·(band + 128)·D), or O(L·S·D) for a full matrix, time; memory O((L+S)·D).

    Args:
        k, v: (B, H, S, D), float32 or float64; k = `EMPTY` and v = 0 for what is left out.
        w: (H, L or 1, left + 1 + right), column c for the key at i + S − L + c − left; or
            (H, L, S) without `band`; None: zero.
        past: keys before these, with w = 0; not with a full matrix.
        band: (left, right); None where `w` is full.
        causal: no query reads a later key; needs L ≤ S.

    Returns:
        Zero where no key is read. Differentiable in k, v, w and past.

    Example:
        >>> k, v = torch.zeros(1, 1, 4, 1), torch.arange(4.0).view(1, 1, 4, 1)
        >>> channel_average(k, v, None, 4, band=(0, 0), causal=True).flatten()
        tensor([0.0000, 0.5000, 1.0000, 1.5000])
    """
    past = Rest.empty(k) if past is None else past
    left, right = (-1, -1) if band is None else band
    if transformed():
        given = k, v, w, past.top, past.mass, past.mean
        return _differentiable(*given, _Plan(queries, k.shape[2], left, right, causal))
    result: Tensor = _channel_average(
        k, v, w, past.top, past.mass, past.mean, queries, left, right, causal
    )
    return result


@dataclass(frozen=True)
class _Plan:
    """Which keys the queries of a chunk meet with a weight: positions only."""

    queries: int
    keys: int
    left: int
    right: int
    causal: bool

    @property
    def full(self) -> bool:
        return self.left < 0

    def chunks(self) -> Iterator[tuple[int, int, int, int]]:
        """(start, stop) of queries and (first, last) of keys; both ends of the keys ascend."""
        shift = self.keys - self.queries
        for start in range(0, self.queries, CHUNK):
            stop = min(self.queries, start + CHUNK)
            first, last = 0, self.keys
            if not self.full:
                first = min(max(0, start + shift - self.left), self.keys)
                last = max(first, min(self.keys, stop + shift + self.right))
            yield start, stop, first, min(last, stop + shift) if self.causal else last

    def columns(self, chunk: tuple[int, int, int, int], device: torch.device) -> Tensor:
        """(l, s): the column of a band's w that each query of the chunk has for each key."""
        start, stop, first, last = chunk
        i = torch.arange(start, stop, device=device)[:, None] + (self.keys - self.queries)
        return torch.arange(first, last, device=device) - i + max(self.left, 0)

    def bias(self, w: Tensor | None, k: Tensor, chunk: tuple[int, int, int, int]) -> Tensor:
        """w of a chunk, (H or 1, l, s): −inf where causality closes."""
        start, stop, first, last = chunk
        column = self.columns(chunk, k.device)
        if w is None:
            bias = k.new_zeros(1, *column.shape)
        elif self.full:
            bias = w[:, start:stop, first:last]
        else:
            rows = (w if w.shape[1] == 1 else w[:, start:stop]).expand(-1, len(column), -1)
            inside = (column >= 0) & (column < w.shape[2])
            index = column.clamp(0, w.shape[2] - 1).expand(len(w), -1, -1)
            bias = rows.gather(2, index) * inside
        later = column > max(self.left, 0)
        return bias.masked_fill(later, -torch.inf) if self.causal else bias

    def unbias(self, w_bar: Tensor, bar: Tensor, chunk: tuple[int, int, int, int]) -> None:
        """Adds the gradient of a chunk's `bias` (H, l, s) to that of w."""
        start, stop, first, last = chunk
        if self.full:
            w_bar[:, start:stop, first:last] += bar
            return
        column = self.columns(chunk, bar.device)
        inside = (column >= 0) & (column < w_bar.shape[2])
        index = column.clamp(0, w_bar.shape[2] - 1).expand(len(bar), -1, -1)
        rows = bar.new_zeros(*bar.shape[:2], w_bar.shape[2]).scatter_add_(2, index, bar * inside)
        if w_bar.shape[1] == 1:
            w_bar += rows.sum(1, keepdim=True)
        else:
            w_bar[:, start:stop] += rows

    def rests(
        self, k: Tensor, v: Tensor, past: Rest, chunks: list[tuple[int, int, int, int]]
    ) -> tuple[list[Rest], list[Rest]]:
        """Of every chunk the keys before and after those that it meets."""
        before, after, at = [past], [Rest.empty(k)], 0
        for _, _, first, _ in chunks:
            before.append(before[-1].add(k[:, :, at:first], v[:, :, at:first]))
            at = first
        if self.causal:
            return before[1:], after * len(chunks)
        at = self.keys
        for *_, last in reversed(chunks):
            after.append(after[-1].add(k[:, :, last:at], v[:, :, last:at]))
            at = last
        return before[1:], after[:0:-1]


@dataclass(frozen=True)
class _Part:
    """A chunk's keys with both rests, relative to the largest of them in each channel.

    `e` (B, H, s, D) = exp(k − top), `a` (H, l, s) = exp(w − its row's largest), `fade` (H, l, 1)
    the same for w = 0; `shares` of the rests; `den` (B, H, l, D).
    """

    e: Tensor
    a: Tensor
    fade: Tensor
    shares: tuple[Tensor, Tensor]
    den: Tensor

    @classmethod
    def of(cls, k: Tensor, bias: Tensor, rests: tuple[Rest, Rest], full: bool) -> _Part:
        top = torch.maximum(rests[0].top, rests[1].top)
        if k.shape[2]:
            top = torch.maximum(top, k.amax(2, keepdim=True))
        largest = (bias if full else F.pad(bias, (0, 1))).amax(-1, keepdim=True)
        e, a, fade = (k - top).exp(), (bias - largest).exp(), (-largest).exp()
        left, right = (rest.mass * (rest.top - top).exp() for rest in rests)
        den = a @ e if full else torch.addcmul(a @ e, fade, left + right)
        return cls(e, a, fade, (left, right), den)

    @property
    def thin(self) -> bool:
        """Whether a row's terms may have vanished beside a key that it does not read."""
        return not bool((self.den > THIN).all())


def _whole(
    k: Tensor, v: Tensor, bias: Tensor, rests: tuple[Rest, Rest]
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Row by row: its number, weights p (B, H, s + 2, D) relative to its own sum, values."""
    before, after = rests
    keys = torch.cat([before.top + before.mass.log(), k, after.top + after.mass.log()], 2)
    values = torch.cat([before.mean, v, after.mean], 2)
    bias = F.pad(bias, (1, 1))
    for row in range(bias.shape[1]):
        yield row, torch.softmax(keys + bias[:, row, :, None], 2), values


def _differentiable(
    k: Tensor, v: Tensor, w: Tensor | None, top: Tensor, mass: Tensor, mean: Tensor, plan: _Plan
) -> Tensor:
    """All rows key by key, by differentiable operations alone: O(L·(band + 128)·D) memory."""
    chunks = list(plan.chunks())
    rows = []
    for chunk, *both in zip(chunks, *plan.rests(k, v, Rest(top, mass, mean), chunks), strict=True):
        *_, first, last = chunk
        own = k[:, :, first:last], v[:, :, first:last], plan.bias(w, k, chunk)
        rows += [(p * values).sum(2) for _, p, values in _whole(*own, (both[0], both[1]))]
    return torch.stack(rows, 2)


@torch.library.custom_op("subquad::channel_average", mutates_args=())
def _channel_average(
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    top: Tensor,
    mass: Tensor,
    mean: Tensor,
    queries: int,
    left: int,
    right: int,
    causal: bool,
) -> Tensor:
    plan = _Plan(queries, k.shape[2], left, right, causal)
    chunks = list(plan.chunks())
    out = k.new_empty(*k.shape[:2], queries, k.shape[3])
    sides = plan.rests(k, v, Rest(top, mass, mean), chunks)
    for chunk, *both in zip(chunks, *sides, strict=True):
        start, stop, first, last = chunk
        rests, to = (both[0], both[1]), out[:, :, start:stop]
        keys, values = k[:, :, first:last], v[:, :, first:last]
        bias = plan.bias(w, k, chunk)
        part = _Part.of(keys, bias, rests, plan.full)
        if part.thin:
            for row, p, own in _whole(keys, values, bias, rests):
                to[:, :, row] = (p * own).sum(2)
            continue
        num = part.a @ (part.e * values)
        if not plan.full:
            more = sum(share * rest.mean for share, rest in zip(part.shares, rests, strict=True))
            num.addcmul_(part.fade, torch.as_tensor(more))
        torch.div(num, part.den, out=to)
    return out


@_channel_average.register_fake
def _shape(
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    top: Tensor,
    mass: Tensor,
    mean: Tensor,
    queries: int,
    left: int,
    right: int,
    causal: bool,
) -> Tensor:
    return k.new_empty(*k.shape[:2], queries, k.shape[3])


@torch.library.custom_op("subquad::channel_average_backward", mutates_args=())
def _average_backward(
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    top: Tensor,
    mass: Tensor,
    mean: Tensor,
    out: Tensor,
    out_bar: Tensor,
    left: int,
    right: int,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """With p_ij the weights of row i: v̄_j = Σ_i p_ij ȳ_i, k̄_j = Σ_i p_ij (v_j − y_i) ȳ_i, and

    w̄_ij the same product summed over channels. A rest is a key like any other; its gradients
    (of the mean, of the log of its mass) pass on to the keys that it is made of.
    """
    plan = _Plan(out.shape[2], k.shape[2], left, right, causal)
    chunks = list(plan.chunks())
    k_bar = torch.zeros_like(k, memory_format=torch.contiguous_format)
    v_bar = torch.zeros_like(v, memory_format=torch.contiguous_format)
    w_bar = k.new_zeros(0) if w is None else torch.zeros_like(w)
    sides = plan.rests(k, v, Rest(top, mass, mean), chunks)
    bars: tuple[list[tuple[Tensor, Tensor]], ...] = ([], [])
    for chunk, *both in zip(chunks, *sides, strict=True):
        start, stop, first, last = chunk
        rests, y, y_bar = (both[0], both[1]), out[:, :, start:stop], out_bar[:, :, start:stop]
        keys, values = k[:, :, first:last], v[:, :, first:last]
        bias = plan.bias(w, k, chunk)
        part = _Part.of(keys, bias, rests, plan.full)
        if part.thin:
            k_more = k.new_zeros(*k.shape[:2], last - first + 2, k.shape[3])
            v_more, rows = torch.zeros_like(k_more), []
            for row, p, own in _whole(keys, values, bias, rests):
                bar = y_bar[:, :, row, None]
                v_more.addcmul_(p, bar)
                each = p * (own - y[:, :, row, None]) * bar
                k_more += each
                rows.append(each[:, :, 1:-1].sum((0, 3)))
            bias_bar = torch.stack(rows, 1)
            ends = [(v_more[:, :, at, None], k_more[:, :, at, None]) for at in (0, -1)]
            v_more, k_more = v_more[:, :, 1:-1], k_more[:, :, 1:-1]
        else:
            g = y_bar / part.den
            h = g * y
            back = part.a.mT
            from_g, from_h = back @ g, back @ h
            v_more = part.e * from_g
            k_more = part.e * (values * from_g - from_h)
            if w is not None:
                met = part.e * values
                bias_bar = ((g @ met.mT - h @ part.e.mT) * part.a).sum(0)
            g, h = ((part.fade * t).sum(2, keepdim=True) for t in (g, h))
            ends = [
                (share * g, share * (rest.mean * g - h))
                for share, rest in zip(part.shares, rests, strict=True)
            ]
        v_bar[:, :, first:last] += v_more
        k_bar[:, :, first:last] += k_more
        if w is not None:
            plan.unbias(w_bar, bias_bar, chunk)
        for side, end in zip(bars, ends, strict=True):
            side.append(end)
    past = Rest(top, mass, mean)
    if plan.full:
        nothing = torch.zeros_like(top)
        return k_bar, v_bar, w_bar, nothing, nothing.clone(), nothing.clone()
    edges = [0, *(first for _, _, first, _ in chunks)]
    mean_bar, log_bar = _unfold(k, v, k_bar, v_bar, [past, *sides[0]], bars[0], edges)
    if not causal:
        edges = [k.shape[2], *(last for *_, last in reversed(chunks))]
        after = [Rest.empty(k), *reversed(sides[1])]
        _unfold(k, v, k_bar, v_bar, after, bars[1][::-1], edges)
    return k_bar, v_bar, w_bar, log_bar, log_bar / mass, mean_bar


def _unfold(
    k: Tensor,
    v: Tensor,
    k_bar: Tensor,
    v_bar: Tensor,
    rests: list[Rest],
    bars: list[tuple[Tensor, Tensor]],
    edges: list[int],
) -> tuple[Tensor, Tensor]:
    """Back through `Rest.add`, from the last to the first: gradients of mean and log mass."""
    mean_bar = log_bar = torch.zeros_like(rests[0].top)
    for at in reversed(range(len(bars))):
        mean_bar, log_bar = mean_bar + bars[at][0], log_bar + bars[at][1]
        old, new = rests[at], rests[at + 1]
        first, last = sorted(edges[at : at + 2])
        if first == last:
            continue
        p = (k[:, :, first:last] - new.top).exp() / new.mass
        v_bar[:, :, first:last].addcmul_(p, mean_bar)
        k_bar[:, :, first:last] += p * (log_bar + (v[:, :, first:last] - new.mean) * mean_bar)
        p = old.mass * (old.top - new.top).exp() / new.mass
        log_bar = p * (log_bar + (old.mean - new.mean) * mean_bar)
        mean_bar = p * mean_bar
    return mean_bar, log_bar


@_average_backward.register_fake
def _shapes_backward(
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    top: Tensor,
    mass: Tensor,
    mean: Tensor,
    out: Tensor,
    out_bar: Tensor,
    left: int,
    right: int,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    bars = [t.new_empty(t.shape) for t in (k, v, top, mass, mean)]
    w_bar = k.new_empty(0) if w is None else w.new_empty(w.shape)
    return bars[0], bars[1], w_bar, bars[2], bars[3], bars[4]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, _, left, right, causal = inputs
    ctx.save_for_backward(*tensors, output)
    ctx.how = left, right, causal


def _backward(ctx: Any, out_bar: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: checkpointing computes them when they are asked for
    if differentiated():
        plan = _Plan(saved[-1].shape[2], saved[0].shape[2], *ctx.how)

        def run(
            k: Tensor, v: Tensor, w: Tensor | None, top: Tensor, mass: Tensor, mean: Tensor
        ) -> tuple[Tensor]:
            return (_differentiable(k, v, w, top, mass, mean, plan),)

        return (*again(run, saved[:6], ctx.needs_input_grad[:6], (out_bar,)), *([None] * 4))
    found = list(_average_backward(*saved, out_bar, *ctx.how))
    if saved[2] is None:
        found[2] = None
    return (*found, None, None, None, None)


torch.library.register_autograd("subquad::channel_average", _backward, setup_context=_setup)
