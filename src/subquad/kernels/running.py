"""The running log-sum-exp along a sequence, in chunks.

    r_i = ln Σ_{j ≤ i} exp(y_j)      for every feature, continued from an earlier r

Within a chunk everything is relative to the running maximum m: a cumulative sum of exp(y − m)
and one logarithm. Where a row lies so far below its chunk's maximum that the sum underflows,
the chunk is done again by `torch.logcumsumexp`, which is exact and ten times slower.
Cost O(S·M); saved for the backward pass: y and r.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subquad.kernels.linear import EMPTY, TINY
from subquad.kernels.transforms import again, differentiated, transformed

__all__ = ["running_logsumexp"]

CHUNK = 128
"""Tokens a chunk: small enough to stay in the cache."""

PAIRS = 16
"""Tokens a chunk where pairs of them are held."""


def running_logsumexp(y: Tensor, start: Tensor | None = None) -> Tensor:
    """ln(exp(start) + Σ_{j ≤ i} exp(y_j)) for i = 1..S.

    Args:
        y: (N, S, M), float32 or float64; −inf for what is left out.
        start: (N, 1, M) result of what came before, −inf or `EMPTY` for nothing.

    Returns:
        (N, S, M); below `EMPTY`/2 where nothing has come yet.

    Example:
        >>> running_logsumexp(torch.zeros(1, 4, 1)).exp().flatten()
        tensor([1., 2., 3., 4.])
    """
    if start is None:
        start = torch.full_like(y[:, :1], EMPTY)
    if transformed():
        return _differentiable(y, start)
    result: Tensor = _running_logsumexp(y, start)
    return result


@torch.library.custom_op("subquad::running_logsumexp", mutates_args=())
def _running_logsumexp(y: Tensor, start: Tensor) -> Tensor:
    out = torch.empty_like(y, memory_format=torch.contiguous_format)
    top = start.clamp_min(EMPTY)
    total = (start - top).exp() * (start > 0.5 * EMPTY)
    for i in range(0, y.shape[1], CHUNK):
        part, to = y[:, i : i + CHUNK], out[:, i : i + CHUNK]
        new = torch.maximum(top, part.amax(1, keepdim=True))
        total = total * (top - new).exp()
        sums = (part - new).exp_().cumsum(1).add_(total)
        torch.log(sums, out=to).add_(new)
        if bool((sums[:, 0] < TINY).any()):  # sums grow: the first row is the least
            before = out[:, i - 1 : i] if i else start
            to.copy_(_whole(before, part))
        total, top = sums[:, -1:], new
    return out


def _differentiable(y: Tensor, start: Tensor) -> Tensor:
    """All rows pair by pair in short chunks, whose derivatives are those of a softmax.

    Not by `logcumsumexp`: its gradient takes the logarithm of what comes in, so that the
    gradient's own is NaN where that is zero.
    """
    y, start = (torch.where(t < 0.5 * EMPTY, EMPTY, t) for t in (y, start))
    found = []
    for part in y.split(PAIRS, 1):
        place = torch.arange(part.shape[1] + 1, device=y.device)
        later = place > place[1:, None]
        pairs = torch.cat([start, part], 1)[:, None].masked_fill(later[..., None], -torch.inf)
        found.append(pairs.logsumexp(2))
        start = found[-1][:, -1:]
    return torch.cat(found, 1) if found else y


def _whole(before: Tensor, part: Tensor) -> Tensor:
    return torch.logcumsumexp(torch.cat([before, part], 1).clamp_min(EMPTY), 1)[:, 1:]


@_running_logsumexp.register_fake
def _shape(y: Tensor, start: Tensor) -> Tensor:
    return y.new_empty(y.shape)


@torch.library.custom_op("subquad::running_logsumexp_backward", mutates_args=())
def _running_backward(
    y: Tensor, start: Tensor, out: Tensor, out_bar: Tensor
) -> tuple[Tensor, Tensor]:
    """ȳ_j = Σ_{i ≥ j} r̄_i exp(y_j − r_i): each chunk hands on r̄ of the chunk before it."""
    y_bar = torch.empty_like(y, memory_format=torch.contiguous_format)
    later = torch.zeros_like(start)
    for i in reversed(range(0, y.shape[1], CHUNK)):
        part, r = y[:, i : i + CHUNK], out[:, i : i + CHUNK]
        before = out[:, i - 1 : i] if i else start
        bar = out_bar[:, i : i + CHUNK].clone()
        bar[:, -1:] += later
        level = r[:, -1:]
        lift = level - r[:, :1]
        if bool((lift > 44.0).any() | (level < 0.5 * EMPTY).any()):  # e^44 ≈ 1/TINY
            found = _whole_backward(torch.cat([before, part], 1), r, bar)
            later, y_bar[:, i : i + CHUNK] = found[:, :1], found[:, 1:]
            continue
        bar.mul_((level - r).exp_())
        sums = bar.flip(1).cumsum(1).flip(1)
        later = sums[:, :1] * (before - level).exp()
        torch.mul(sums, (part - level).exp_(), out=y_bar[:, i : i + CHUNK])
    return y_bar, later


def _whole_backward(y: Tensor, r: Tensor, bar: Tensor) -> Tensor:
    """The same by logarithms, positive and negative r̄ apart; y has one row more than r."""
    total = torch.zeros_like(y)
    for sign in (1.0, -1.0):
        log = (sign * bar).clamp_min_(0.0).log_().sub_(r)
        sums = torch.logcumsumexp(log.flip(1), 1).flip(1)
        total.add_((torch.cat([sums[:, :1], sums], 1) + y).exp_(), alpha=sign)
    # What is left out stands at −inf or EMPTY; where nothing else has come, r is EMPTY too.
    return total.masked_fill_(y < 0.5 * EMPTY, 0.0)


@_running_backward.register_fake
def _shapes_backward(
    y: Tensor, start: Tensor, out: Tensor, out_bar: Tensor
) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), start.new_empty(start.shape)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs, output)


def _backward(ctx: Any, out_bar: Tensor) -> tuple[Tensor | None, ...]:
    y, start, out = ctx.saved_tensors
    if differentiated():

        def run(y: Tensor, start: Tensor) -> tuple[Tensor]:
            return (_differentiable(y, start),)

        return again(run, (y, start), ctx.needs_input_grad, (out_bar,))
    found: tuple[Tensor, Tensor] = _running_backward(y, start, out, out_bar)
    return found


torch.library.register_autograd("subquad::running_logsumexp", _backward, setup_context=_setup)
