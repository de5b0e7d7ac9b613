"""The running log-sum-exp: its definition, underflow within a chunk, gradients, empty starts."""

import math

import pytest
import torch

from subquad.kernels.linear import EMPTY
from subquad.kernels.running import CHUNK, running_logsumexp

F64 = torch.float64


def randn(*shape, seed, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    return size * torch.randn(shape, generator=generator, dtype=F64)


def naive(y, start):
    """One log-sum-exp for each row."""
    every = torch.cat([start, y], 1)
    return torch.stack([every[:, : i + 2].logsumexp(1) for i in range(y.shape[1])], 1)


@pytest.mark.parametrize("length", [1, CHUNK, CHUNK + 1, 307])
@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("size", [1.0, 30.0, 1000.0])
def test_definition_and_gradients(size, started, length):
    """At sizes 30 and 1000 early rows underflow next to later ones: those chunks are redone.

    Values: 307 additions of relative 1.1e-16 each. Gradients: exponents of up to 4·size, each
    off by 1.1e-16 relative, in sums of 307 terms: 4000 · 1.1e-16 · 307 = 1.4e-10 at worst.
    """
    y = randn(2, length, 3, seed=0, size=size).requires_grad_()
    start = randn(2, 1, 3, seed=1, size=size).requires_grad_() if started else None
    begin = torch.full((2, 1, 3), -torch.inf, dtype=F64) if start is None else start
    found, wanted = running_logsumexp(y, start), naive(y, begin)
    torch.testing.assert_close(found, wanted, rtol=307 * 1.2e-16, atol=307 * 1.2e-16)
    leaves = [y] if start is None else [y, start]
    bar = randn(*wanted.shape, seed=2)
    for a, b in zip(
        torch.autograd.grad(found, leaves, bar), torch.autograd.grad(wanted, leaves, bar),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(a, b, rtol=0, atol=1.4e-10 * bar.abs().max().item())


def test_gradcheck():
    y = randn(1, CHUNK + 3, 1, seed=3, size=20.0).requires_grad_()
    start = randn(1, 1, 1, seed=4).requires_grad_()
    torch.autograd.gradcheck(lambda y, s: running_logsumexp(y, s)[:, ::13], (y, start))


def test_left_out_positions_add_nothing_and_get_no_gradient():
    y = randn(1, 2 * CHUNK + 5, 2, seed=5)
    closed = torch.zeros(2 * CHUNK + 5, dtype=torch.bool)
    closed[: CHUNK + 7] = True
    closed[CHUNK + 20 : CHUNK + 31] = True
    masked = y.masked_fill(closed[:, None], -math.inf).requires_grad_()
    found = running_logsumexp(masked)
    assert (found[:, : CHUNK + 7] < 0.5 * EMPTY).all()
    alone = y[:, ~closed].requires_grad_()
    wanted = running_logsumexp(alone)
    close = {"rtol": 1e-13, "atol": 1e-13}  # ≤ 261 additions of 1.1e-16
    torch.testing.assert_close(found[:, ~closed], wanted, **close)
    found = torch.autograd.grad(found[:, CHUNK + 7 :].sin().sum(), masked)[0]
    assert not found[:, closed].any()
    every = wanted.sin().sum(1)
    every = every + 11 * wanted[:, 12].sin()  # rows 20..30 repeat row 19, the 13th open one
    torch.testing.assert_close(
        found[:, ~closed], torch.autograd.grad(every.sum(), alone)[0], **close
    )


def test_continues_itself():
    y = randn(2, 301, 3, seed=6)
    whole = running_logsumexp(y)
    first = running_logsumexp(y[:, :97])
    rest = running_logsumexp(y[:, 97:], first[:, -1:])
    # 301 additions of relative 1.1e-16, absolute in the logarithm: 3.3e-14
    torch.testing.assert_close(torch.cat([first, rest], 1), whole, rtol=0, atol=1e-13)
