"""Efficient attention: the paper's formula, the causal softmax over positions, extreme inputs."""

import math

import pytest
import torch

import subquad as sq
from references import ref_efficient

F64 = torch.float64
D, H, KV, V = 5, 6, 3, 7
EXACT = 1e-11  # sums of ≤ 200·5 float64 terms, exponents ≤ 100: below 1e-12


def randn(*shape, seed=0, dtype=F64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=F64).to(dtype)


def build(heads=H, kv=KV, dtype=F64):
    return sq.build("efficient", head_dim=D, num_heads=heads, num_kv_heads=kv, dtype=dtype)


def inputs(L=19, S=23, seed=1, dtype=F64):
    shapes = (2, H, L, D), (2, KV, S, D), (2, KV, S, V)
    return [randn(*shape, seed=seed + n, dtype=dtype) for n, shape in enumerate(shapes)]


def close(found, wanted, tolerance=EXACT):
    error = (found.detach().double() - wanted.detach().double()).abs().max().item()
    assert error <= tolerance * wanted.detach().abs().max().item(), error


def test_the_papers_formula():
    """E(Q, K, V) = ρ_q(Q) (ρ_k(K)ᵀ V), softmax over the row of Q and over the columns of K."""
    q, k, v = inputs()
    rho_q, rho_k = q.softmax(-1), k.softmax(-2)
    context = (rho_k.mT @ v).repeat_interleave(2, 1)
    close(build()(q, k, v), rho_q @ context)
    close(build().weights(q, k), rho_q @ rho_k.mT.repeat_interleave(2, 1))


def test_it_is_not_a_kernel_with_one_normaliser():
    """One feature dominates k: with a shared normaliser it dominates the output, here it does
    not. Feature 0 of keys lies 20 above the others, and feature 1 alone tells keys apart.
    """
    q, k, v = inputs()
    k = k.clone()
    k[..., 0] = 20.0
    shared = sq.build("linear(map=exp)", head_dim=D, num_heads=H, num_kv_heads=KV, dtype=F64)
    mean = v.mean(2, keepdim=True).repeat_interleave(2, 1)
    # e^20 = 4.9e8 outweighs e^{k+q−q_0} ≤ e^12 by 3e3.
    assert (shared(q, k, v) - mean).abs().max() < 1e-3 * v.abs().max()
    assert (build()(q, k, v) - mean).abs().max() > 0.1


def test_causal_rows_are_softmaxes_over_the_positions_so_far():
    q, k, v = inputs(23, 23)
    out = build()(q, k, v, causal=True)
    for i in range(23):
        alone = build()(q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1])
        close(out[:, :, i : i + 1], alone)
    close(out[:, :, -1], build()(q, k, v)[:, :, -1])


def test_weights_are_positive_and_sum_to_one():
    q, k, _ = inputs(23, 23)
    for causal in (False, True):
        weights = build().weights(q, k, causal=causal)
        assert (weights >= 0).all()
        close(weights.sum(-1), torch.ones(2, H, 23, dtype=F64), 1e-13)


@pytest.mark.parametrize("causal", [False, True])
def test_shifts_of_a_feature_or_a_query_change_nothing(causal):
    """softmax over positions ignores a constant a feature, softmax over features one a query;
    shifts of 64 cost 6 of 52 bits.
    """
    q, k, v = inputs()
    wanted = build()(q, k, v, causal=causal)
    shift = torch.arange(D, dtype=F64) * 16.0 - 32.0
    found = build()(q + 64.0 * randn(2, H, 19, 1, seed=8).sign(), k + shift, v, causal=causal)
    close(found, wanted)


@pytest.mark.parametrize("size", [30.0, 3000.0])
def test_keys_far_below_later_ones_keep_their_weight(size):
    """Rows whose keys lie e^size below later ones of their chunk are redone; float32.

    Exponents of up to 4·size are off by 2^-24 relative: 12000 · 6e-8 · 2 = 1.4e-3 at 3000. A
    random walk of keys that rises puts most rows far below their chunk's last one.
    """
    q, k, v = inputs(191, 191, dtype=torch.float32)
    k = size * (k + 0.1 * torch.arange(191.0)[:, None])
    leaves = [x.requires_grad_() for x in (q, k, v)]
    same = [x.detach().double().requires_grad_() for x in leaves]
    mask = torch.ones(191, 191, dtype=torch.bool).tril()[None, None]
    out = build(dtype=torch.float32)(*leaves, causal=True)
    wanted = ref_efficient(build(), *same, allowed=mask, scale=1.0)
    tolerance = 10 * size * 2**-24 * 4
    close(out, wanted, tolerance)
    bar = randn(*wanted.shape, seed=9)
    found = torch.autograd.grad(out, leaves, bar.float())
    truth = torch.autograd.grad(wanted, same, bar)
    for a, b in zip(found, truth, strict=True):
        close(a, b, 4 * tolerance)  # products of two weights, and sums over them


@pytest.mark.parametrize("scale", [0.37, 4.0])
def test_scale_multiplies_both_sides_by_its_root(scale):
    q, k, v = inputs()
    root = math.sqrt(scale)
    for causal in (False, True):
        found = build()(q, k, v, scale=scale, causal=causal)
        close(found, build()(root * q, root * k, v, causal=causal))
    # At scale s weights are uniform to 2·√s·max|x| relative: 2·1e-6·5.
    uniform = build()(q, k, v, scale=1e-12)
    mean = v.mean(2, keepdim=True).repeat_interleave(2, 1).expand_as(uniform)
    close(uniform, mean, 1e-5 * v.abs().max().item() / mean.abs().max().item())


def test_masked_keys_leave_the_softmax_over_positions():
    q, k, v = inputs()
    mask = torch.rand(2, 23, generator=torch.Generator().manual_seed(0)) > 0.4
    out = build()(q, k, v, key_mask=mask)
    for row in range(2):
        open_ = mask[row]
        rho_k = k[row, :, open_].softmax(-2)
        context = (rho_k.mT @ v[row, :, open_]).repeat_interleave(2, 0)
        close(out[row], q[row].softmax(-1) @ context)


def test_gradients_pass_through_a_state():
    mech = build()
    q, k, v = (x.requires_grad_() for x in inputs(23, 23))
    whole = mech(q, k, v, causal=True)
    first, state = mech.prefill(q[:, :, :9], k[:, :, :9], v[:, :, :9])
    rest, state = mech.step(q[:, :, 9:], k[:, :, 9:], v[:, :, 9:], state)
    bar = randn(*whole.shape, seed=9)
    found = torch.autograd.grad(torch.cat([first, rest], 2), (q, k, v), bar, retain_graph=True)
    for a, b in zip(found, torch.autograd.grad(whole, (q, k, v), bar), strict=True):
        close(a, b)
    read, _ = mech.step(q, None, None, state)
    found, wanted = (torch.autograd.grad(x, (q, k, v), bar) for x in (read, mech(q, k, v)))
    for a, b in zip(found, wanted, strict=True):
        close(a, b)


def test_an_empty_state_is_continued():
    """A prefill whose keys are all masked leaves nothing, in the state and for what follows."""
    mech = build()
    q, k, v = inputs(23, 23)
    nothing, state = mech.prefill(q, k, v, key_mask=torch.zeros(2, 23, dtype=torch.bool))
    assert not nothing.any()
    read, _ = mech.step(q, None, None, state)
    assert not read.any()
    out, _ = mech.step(q, k, v, state)
    close(out, mech(q, k, v, causal=True))


def test_refusals():
    q, k, v = inputs()
    with pytest.raises(sq.UnsupportedError, match="no one normaliser of a part"):
        build().partial(q, k, v)
    with pytest.raises(sq.OptionError, match=r"efficient: scale=-1.0 must be > 0"):
        build()(q, k, v, scale=-1.0)
    with pytest.raises(sq.ShapeError, match="prefill needs L ≤ S"):
        build().prefill(q, k[:, :, :3], v[:, :, :3])
    with pytest.raises(sq.UnknownNameError, match="unknown option 'features'"):
        sq.build("efficient(features=3)", head_dim=D, num_heads=H)
