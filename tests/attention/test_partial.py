"""Sums over disjoint keys add: `combine` and `merge` against softmax over the whole."""

import itertools
import math

import pytest
import torch

import subquad as sq
from references import ref_softmax
from subquad.attention.partial import EMPTY_LOG_SCALE, combine

B, H, HKV, L, S, D, V = 2, 6, 3, 7, 11, 5, 13

# (D + S + L·G)·eps·max|logit|·max|v|, see test_softmax.py, and one more rounding a part
BOUND = 2 * 1520 * torch.finfo(torch.float64).eps


def draw(grad=False, logits=1.0):
    generator = torch.Generator().manual_seed(0)
    shapes = (B, H, L, D), (B, HKV, S, D), (B, HKV, S, V)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [t.requires_grad_(grad) for t in (q * logits, k, v)]


def build():
    return sq.build("softmax", head_dim=D, num_heads=H, num_kv_heads=HKV)


def whole(q, k, v, allowed=None):
    allowed = torch.ones(1, 1, L, S, dtype=torch.bool) if allowed is None else allowed
    return ref_softmax(None, q, k, v, allowed=allowed, scale=D**-0.5)


def cut(q, k, v, *edges):
    return [
        build().partial(q, k[:, :, a:b], v[:, :, a:b])
        for a, b in itertools.pairwise((0, *edges, S))
    ]


@pytest.mark.parametrize("edges", [(), (2,), (1, 2), (3, 4, 10), tuple(range(1, S))])
def test_parts_merge_to_the_whole_with_gradients(edges):
    q, k, v = draw(grad=True)
    got, wanted = sq.merge(cut(q, k, v, *edges)), whole(q, k, v)
    assert (got - wanted).abs().max() <= BOUND
    direction = torch.randn_like(got)
    for a, b in zip(
        torch.autograd.grad(got, (q, k, v), direction),
        torch.autograd.grad(wanted, (q, k, v), direction),
        strict=True,
    ):
        assert (a - b).abs().max() <= 2 * BOUND


def test_order_and_grouping_do_not_matter():
    a, b, c = cut(*draw(), 3, 8)
    for merged in (
        sq.merge([c, a, b]),
        sq.merge([a, combine([b, c])]),
        combine([a, b, c]).output(),
    ):
        assert (merged - sq.merge([a, b, c])).abs().max() <= BOUND


def test_combine_is_again_a_partial_of_the_union():
    q, k, v = draw()
    union, direct = combine(cut(q, k, v, 4)), build().partial(q, k, v)
    assert (union.lse - direct.lse).abs().max() <= BOUND
    assert (union.output() - direct.output()).abs().max() <= BOUND


def test_gradient_of_the_joint_normaliser():
    q, k, v = draw(grad=True)
    got = combine(cut(q, k, v, 2, 7)).lse
    logits = D**-0.5 * q @ k.repeat_interleave(H // HKV, 1).transpose(-1, -2)
    for a, b in zip(
        torch.autograd.grad(got.sum(), (q, k)),
        torch.autograd.grad(logits.logsumexp(-1).sum(), (q, k)),
        strict=True,
    ):
        assert (a - b).abs().max() <= BOUND


def test_parts_of_very_different_size_stay_finite():
    q, k, v = draw(grad=True, logits=1e4)  # weights differ by far more than the dtype's range
    got, wanted = sq.merge(cut(q, k, v, 4)), whole(q, k, v)
    assert (got - wanted).abs().max() <= 1e4 * BOUND  # logits, and their error, are 1e4 as large
    assert all(g.isfinite().all() for g in torch.autograd.grad(got.sum(), (q, k, v)))


def test_empty_parts_change_nothing():
    q, k, v = draw(grad=True)
    full = build().partial(q, k, v)
    closed = torch.zeros(B, S, dtype=torch.bool)
    empty = build().partial(q, k, v, key_mask=closed)
    assert (empty.den == 0).all() and (empty.log_scale == EMPTY_LOG_SCALE).all()
    assert (empty.lse == -math.inf).all() and (empty.output() == 0).all()
    got = sq.merge([empty, full, empty])
    assert torch.equal(got, full.output())
    gradients = torch.autograd.grad(got.sum(), (q, k, v), retain_graph=True)
    expected = torch.autograd.grad(full.output().sum(), (q, k, v))
    for a, b in zip(gradients, expected, strict=True):
        assert torch.equal(a, b)


def test_only_empty_parts_give_zeros_and_zero_gradients():
    q, k, v = draw(grad=True)
    closed = torch.zeros(B, S, dtype=torch.bool)
    out = sq.merge([build().partial(q, k, v, key_mask=closed) for _ in range(2)])
    assert (out == 0).all()
    assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), (q, k, v)))


def test_complementary_masks_merge():
    q, k, v = draw()
    near = sq.Mask(window=2)
    far = sq.Mask(dense=~near.to_dense(L, S))
    parts = [build().partial(q, k, v, mask=mask) for mask in (near, far)]
    assert (sq.merge(parts) - whole(q, k, v)).abs().max() <= BOUND


def test_signed_normalisers_add():
    one, half = torch.ones(1, 2, 3), torch.full((1, 2), 0.5)
    parts = [sq.Partial(one, half, 0 * half), sq.Partial(-3 * one, -half / 2, 0 * half)]
    assert torch.equal(sq.merge(parts), -2 * one / 0.25)


def test_what_does_not_fit_is_named():
    with pytest.raises(
        sq.ShapeError, match=r"needs num \(..., L, V\).* given \(2, 3, 5\), \(2, 4\)"
    ):
        sq.Partial(torch.ones(2, 3, 5), torch.ones(2, 4), torch.ones(2, 3))
    part = sq.Partial(torch.ones(2, 3, 5), torch.ones(2, 3), torch.ones(2, 3))
    other = sq.Partial(torch.ones(2, 4, 5), torch.ones(2, 4), torch.ones(2, 4))
    with pytest.raises(sq.ShapeError, match=r"one shape, given .*2, 3, 5.*2, 4, 5"):
        sq.merge([part, other])
    with pytest.raises(sq.ShapeError, match="at least one partial"):
        sq.merge([])
