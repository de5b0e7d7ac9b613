"""Channelwise averages: their definition, underflow within a chunk, gradients, past keys."""

import pytest
import torch

from subquad.kernels import aft
from subquad.kernels.aft import CHUNK, Rest, channel_average
from subquad.kernels.linear import EMPTY

F64 = torch.float64
# Sums of ≤ 400 positive terms with exponents of size ≤ 4000, each off by 1.1e-16 relative:
# 4000 · 1.1e-16 = 4.4e-13 an exponential, and twice that for a ratio.
BOUND = 1e-12


def randn(*shape, seed, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (size * torch.randn(shape, generator=generator, dtype=F64)).requires_grad_()


def naive(k, v, bias, causal, past=None):
    """One softmax for each row and channel; `bias` (H, L, S)."""
    queries, keys = bias.shape[1:]
    later = torch.arange(keys) > torch.arange(queries)[:, None] + keys - queries
    logits = k[:, :, None] + bias[..., None]
    if causal:
        logits = logits.masked_fill(later[:, :, None], -torch.inf)
    if past is not None:
        before = (past.top + past.mass.log())[:, :, None].expand(-1, -1, queries, -1, -1)
        logits, v = torch.cat([before, logits], 3), torch.cat([past.mean, v], 2)
    return (torch.softmax(logits, 3) * v[:, :, None]).sum(3)


def spread_band(w, queries, keys, left):
    """The (H, L, S) matrix of a band."""
    i = torch.arange(queries)[:, None] + keys - queries
    column = torch.arange(keys) - i + left
    inside = (column >= 0) & (column < w.shape[2])
    rows = w.expand(-1, queries, -1).gather(
        2, column.clamp(0, w.shape[2] - 1).expand(len(w), -1, -1)
    )
    return rows * inside


def compare(found, wanted, leaves, seed=9):
    """Outputs, and gradients relative to values and cotangents of size 4 at most."""
    bar = randn(*wanted.shape, seed=seed).detach()
    assert (found - wanted).abs().max() <= 4 * BOUND
    for a, b in zip(
        torch.autograd.grad(found, leaves, bar),
        torch.autograd.grad(wanted, leaves, bar),
        strict=True,
    ):
        assert (a - b).abs().max() <= BOUND * max(16.0, b.abs().max().item())


@pytest.mark.parametrize("size", [1.0, 30.0, 1000.0])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(2 * CHUNK + 5, 2 * CHUNK + 5), (7, CHUNK + 11)])
def test_bands(queries, keys, causal, size):
    """At sizes 30 and 1000 causal rows underflow next to later keys: computed again."""
    k, v, w = (
        randn(1, 2, keys, 3, seed=0, size=size),
        randn(1, 2, keys, 3, seed=1),
        randn(2, queries, 9, seed=2),
    )
    found = channel_average(k, v, w, queries, band=(6, 2), causal=causal)
    wanted = naive(k, v, spread_band(w, queries, keys, 6), causal)
    compare(found, wanted, [k, v, w])


@pytest.mark.parametrize("size", [1.0, 300.0])
@pytest.mark.parametrize("causal", [False, True])
def test_full_matrices(causal, size):
    queries, keys = CHUNK + 3, CHUNK + 37
    k, v = randn(2, 2, keys, 3, seed=0), randn(2, 2, keys, 3, seed=1)
    w = randn(2, queries, keys, seed=2, size=size)
    compare(channel_average(k, v, w, queries, causal=causal), naive(k, v, w, causal), [k, v, w])


@pytest.mark.parametrize("size", [1.0, 1000.0])
def test_a_filter_and_past_keys(size):
    """One row of w for all queries; keys of the past count with w = 0, gradients included."""
    keys = CHUNK + 29
    k, v = randn(2, 2, keys, 3, seed=0, size=size), randn(2, 2, keys, 3, seed=1)
    w, top, mean = randn(2, 1, 5, seed=2), randn(2, 2, 1, 3, seed=3), randn(2, 2, 1, 3, seed=4)
    mass = (1 + randn(2, 2, 1, 3, seed=5).detach().abs()).requires_grad_()
    past = Rest(top, mass, mean)
    found = channel_average(k, v, w, keys, past=past, band=(4, 0), causal=True)
    bias = spread_band(w, keys, keys, 4)
    compare(found, naive(k, v, bias, True, past), [k, v, w, top, mass, mean])


def test_more_queries_than_keys():
    k, v, w = randn(1, 2, 5, 3, seed=0), randn(1, 2, 5, 3, seed=1), randn(2, 2 * CHUNK, 4, seed=2)
    found = channel_average(k, v, w, 2 * CHUNK, band=(1, 2))
    compare(found, naive(k, v, spread_band(w, 2 * CHUNK, 5, 1), False), [k, v, w])


def test_very_negative_biases_do_not_cancel():
    """Where the window's keys outweigh all others by e^40 but for their bias of −60, the paper's
    global sum + Σ exp(k)(exp(w) − 1) has no digit left: 1e17·(1 + (e^-60 − 1)).
    """
    k, v = torch.zeros(1, 1, 64, 1, dtype=F64), randn(1, 1, 64, 1, seed=1)
    k[:, :, 20] = 40.0
    w = torch.full((1, 1, 1), -60.0, dtype=F64)
    found = channel_average(k, v, w, 64, band=(0, 0))
    wanted = naive(k, v, spread_band(w, 64, 64, 0), False)
    assert (found - wanted).abs().max() <= 4 * BOUND


def test_empty_keys_count_for_nothing():
    """Rows that read none give zeros; others equal the rows without."""
    keys, closed = 2 * CHUNK + 9, CHUNK + 40
    k, v, w = randn(1, 2, keys, 3, seed=0), randn(1, 2, keys, 3, seed=1), randn(2, 1, 4, seed=2)
    gone = torch.arange(keys)[:, None] < closed
    found = channel_average(
        k.masked_fill(gone, EMPTY), v.masked_fill(gone, 0), w, keys, band=(3, 0), causal=True
    )
    assert not found[:, :, :closed].any()
    rest = channel_average(
        k[:, :, closed:], v[:, :, closed:], w, keys - closed, band=(3, 0), causal=True
    )
    compare(found[:, :, closed:], rest, [k, v, w])


def test_gradcheck():
    k, v, w = randn(1, 1, 5, 2, seed=0), randn(1, 1, 5, 2, seed=1), randn(1, 5, 3, seed=2)
    torch.autograd.gradcheck(lambda k, v, w: channel_average(k, v, w, 5, band=(1, 1)), (k, v, w))


def test_operator_declares_its_shapes():
    """`opcheck` compares the operator with its fake and its autograd registration."""
    k, v, w = randn(1, 2, 7, 3, seed=0), randn(1, 2, 7, 3, seed=1), randn(2, 1, 3, seed=2)
    past = Rest.empty(k.detach())
    arguments = (k, v, w, past.top, past.mass, past.mean, 7, 1, 1, False)
    torch.library.opcheck(aft._channel_average, arguments)


def test_only_thin_chunks_are_computed_row_by_row(monkeypatch):
    """Plain keys never are; a key e^30 above what earlier rows read is, in its chunk alone."""
    seen = []
    whole = aft._whole
    monkeypatch.setattr(aft, "_whole", lambda *args: seen.append(args[0].shape) or whole(*args))
    k, v = randn(1, 2, 4 * CHUNK, 3, seed=0).detach(), randn(1, 2, 4 * CHUNK, 3, seed=1).detach()
    channel_average(k, v, None, 4 * CHUNK, band=(0, 0), causal=True)
    assert not seen
    k[:, :, 2 * CHUNK + 5] += 60.0
    channel_average(k, v, None, 4 * CHUNK, band=(0, 0), causal=True)
    assert len(seen) == 1
