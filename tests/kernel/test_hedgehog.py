"""Hedgehog: its start, its gradients, what it refuses, and that it can learn spiky attention."""

from __future__ import annotations

import pytest
import torch

import subquad as sq
from references import ref_hedgehog
from subquad.errors import OptionError


def build(**options):
    return sq.build("hedgehog", head_dim=4, num_heads=2, dtype=torch.float64, **options)


def inputs(length=11, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(1, 2, length, 4, generator=generator, dtype=torch.float64) for _ in range(3)
    )


def test_it_starts_as_the_identity_and_its_rotations():
    eye = torch.eye(4, dtype=torch.float64).expand(2, -1, -1)
    assert torch.equal(build().weight_q.detach(), eye)
    assert torch.equal(build(features=4).weight_k.detach(), eye[:, :2])
    wide = build(features=24, seed=3).weight_q.detach()
    assert torch.equal(wide[:, :4], eye)
    for rows in (wide[:, 4:8], wide[:, 8:]):  # Haar matrices: float64's 2^-53 times D² terms
        assert torch.allclose(rows @ rows.mT, eye, atol=1e-12)
    assert not torch.equal(wide, build(features=24, seed=4).weight_q.detach())
    assert build(map="exp").bias_q is not None and build().bias_q is None


@pytest.mark.parametrize("options", [{}, {"map": "exp"}, {"features": 6}])
def test_gradients_reach_the_maps(options):
    mech = build(**options)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in mech.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    q, k, v = inputs()
    goal = torch.randn(1, 2, 11, 4, generator=generator, dtype=torch.float64)
    own = torch.autograd.grad((mech(q, k, v, causal=True) * goal).sum(), list(mech.parameters()))
    allowed = torch.ones(11, 11).tril().bool()[None, None]
    naive = ref_hedgehog(mech, q, k, v, allowed=allowed, scale=4**-0.5)
    wanted = torch.autograd.grad((naive * goal).sum(), list(mech.parameters()))
    for one, other in zip(own, wanted, strict=True):
        # Two orders of the same float64 sums of some hundred terms.
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-10)
        assert other.abs().max() > 1e-3


def test_a_column_of_q_and_k_can_be_told_apart_after_training():
    # Each key answers to its own query alone, s_ii = 12: softmax puts 0.98 or more there, the
    # untrained map nearly as much everywhere. Trained on other draws it has to find them.
    torch.manual_seed(0)
    mech = sq.build("hedgehog(features=32)", head_dim=8, num_heads=1)

    def batch():
        keys = torch.nn.functional.normalize(torch.randn(16, 1, 9, 8), dim=-1)
        keys = torch.linalg.qr(keys[..., :8, :].mT).Q.mT
        return 6.0 * keys, 6.0 * keys, torch.randn(16, 1, 8, 8)

    def error():
        q, k, v = batch()
        exact = sq.attention(q, k, v, "softmax")
        return (mech(q, k, v) - exact).square().sum() / exact.square().sum()

    with torch.no_grad():
        before = float(error())
    optimiser = torch.optim.Adam(mech.parameters(), lr=0.05)
    for _ in range(150):
        optimiser.zero_grad()
        loss = error()
        loss.backward()
        optimiser.step()
    with torch.no_grad():
        after = float(error())
    # Uniform attention over 8 keys leaves 1 − 1/8 of the squared norm.
    assert before > 0.3 and after < 0.5 * before


def test_wrong_options_and_places():
    with pytest.raises(OptionError, match="features=7 must be even"):
        build(features=7)
    with pytest.raises(OptionError, match="map='relu' is none of softmax, exp"):
        build(map="relu")
    with pytest.raises(OptionError, match="far=hedgehog cannot be the far field"):
        sq.build("near_far(far=hedgehog)", head_dim=4, num_heads=2)
    q, k, v = inputs()
    with pytest.raises(OptionError, match="scale=-1.0 must be > 0"):
        build()(q, k, v, scale=-1.0)
