"""Gaussian landmark features and their anchors: values, gradients, clustering, errors."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from subquad.errors import DtypeError, OptionError, ShapeError
from subquad.features import (
    kmeans_anchors,
    landmark_features,
    log_landmark_features,
    sample_anchors,
)
from subquad.features.landmarks import _lloyd

F64 = torch.float64


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def naive(x: Tensor, anchors: Tensor, sigma: float) -> Tensor:
    difference = x.unsqueeze(-2) - anchors.unsqueeze(-3)
    return (-difference.square().sum(-1) / (2 * sigma**2)).exp()


def inertia(x: Tensor, centres: Tensor) -> float:
    return float((x.unsqueeze(1) - centres).square().sum(-1).min(1).values.sum())


def test_second_worked_example() -> None:
    x = torch.tensor([0.1, 0.2, 0.3], dtype=F64)
    anchors = torch.tensor([[0.0, 0.1, 0.2], [0.4, 0.5, 0.6], [0.7, 0.8, 0.9]], dtype=F64)
    phi = landmark_features(x, anchors, 0.5)
    expected = torch.tensor([math.exp(-0.06), math.exp(-0.54), math.exp(-2.16)], dtype=F64)
    torch.testing.assert_close(phi, expected, rtol=1e-14, atol=0)  # a dozen roundings of 2e-16
    # as printed, to five digits; the last is not 0.11505
    assert [f"{value:.5f}" for value in phi.tolist()] == ["0.94176", "0.58275", "0.11533"]


def test_first_worked_example_is_a_normalised_mean() -> None:
    x = torch.arange(1, 16, dtype=F64).reshape(5, 3) / 10
    phi = landmark_features(x, x[[0, 2, 4]], 0.5)
    out = (phi @ (phi.T @ x)) / (phi @ phi.sum(0)).unsqueeze(-1)
    # token distances are multiples of (0.3, 0.3, 0.3): |·|² = 0.27 n², φ = e^{−0.54 n²}
    steps = torch.tensor([[0, 2, 4], [1, 1, 3], [2, 0, 2], [3, 1, 1], [4, 2, 0]], dtype=F64)
    expected = (-0.54 * steps.square()).exp()
    torch.testing.assert_close(phi, expected, rtol=1e-13, atol=0)
    weights = phi @ phi.T
    weights = weights / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(out, weights @ x, rtol=1e-13, atol=0)
    torch.testing.assert_close(out[2], x[2], rtol=1e-13, atol=0)  # by symmetry


@pytest.mark.parametrize("leading", [(), (3,), (2, 3)])
@pytest.mark.parametrize("per_head", [False, True])
def test_features_equal_the_naive_ones(leading: tuple[int, ...], per_head: bool) -> None:
    if per_head and not leading:
        leading = (3,)
    x = normal(*leading, 5, 7)
    anchors = normal(*((3,) if per_head else ()), 11, 7, seed=1)
    phi = landmark_features(x, anchors, 1.7)
    assert phi.shape == (*leading, 5, 11)
    # |x − a|² < 100 here; the expansion errs by (D + 4)·eps·(|x| + |a|)² < 11·2.2e-16·200, in the
    # exponent over 2σ² = 5.8: relative 1e-13
    torch.testing.assert_close(phi, naive(x, anchors, 1.7), rtol=1e-12, atol=0)
    torch.testing.assert_close(phi, log_landmark_features(x, anchors, 1.7).exp(), rtol=0, atol=0)


def test_single_vector_with_per_head_anchors() -> None:
    x, anchors = normal(7), normal(3, 11, 7, seed=1)
    phi = landmark_features(x, anchors, 1.7)
    assert phi.shape == (3, 11)
    torch.testing.assert_close(phi, naive(x[None], anchors, 1.7)[:, 0], rtol=1e-12, atol=0)


def test_gradients() -> None:
    x = normal(2, 3, 5).requires_grad_()
    anchors = normal(7, 5, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, a: landmark_features(x, a, 1.3), (x, anchors))
    assert torch.autograd.gradcheck(lambda x, a: log_landmark_features(x, a, 1.3), (x, anchors))


def test_at_an_anchor_the_feature_is_one_and_flat() -> None:
    anchors = normal(11, 7).float()
    x = anchors[:5].clone().requires_grad_()
    phi = landmark_features(x, anchors, 0.9)
    # |x − a|² is 0 to (D + 4)·eps·(2|a|)² < 11·1.2e-7·80 = 1e-4 at worst, over 2σ² = 1.6
    diagonal = phi.diagonal()
    assert (diagonal - 1).abs().max() < 1e-4
    assert (phi <= 1).all()
    diagonal.sum().backward()
    assert x.grad is not None
    # the gradient is −(x − a)φ/σ²; x − a is formed by a subtraction of 2·eps·|a| accuracy
    assert x.grad.abs().max() < 1e-5


def test_a_common_offset_changes_nothing() -> None:
    # multiples of 1/64 up to 1024 are exact in float32, so the offset itself costs nothing
    x = (normal(5, 7) * 64).round().float() / 64
    anchors = (normal(11, 7, seed=1) * 64).round().float() / 64
    near = log_landmark_features(x, anchors, 1.0)
    far = log_landmark_features(x + 1000, anchors + 1000, 1.0)
    # centred, coordinates are < 4 again, but the mean of numbers near 1000 is 6e-5 off; subtracted
    # from both, it cancels to rounding: (D + 4)·eps·(|x| + |a|)² = 11·1.2e-7·(8 + 8)² = 3e-4.
    # Uncentred, 11·1.2e-7·(2·2600)² = 36.
    assert (near - far).abs().max() < 3e-4


def test_log_features_do_not_underflow() -> None:
    x, anchors = torch.zeros(1, 3), torch.full((1, 3), 100.0)
    assert landmark_features(x, anchors, 1.0).item() == 0.0
    assert log_landmark_features(x, anchors, 1.0).item() == -15000.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_computes_the_exponent_in_float32(dtype: torch.dtype) -> None:
    x, anchors = (normal(5, 7) * 100).to(dtype), (normal(11, 7, seed=1) * 100).to(dtype)
    log_phi = log_landmark_features(x, anchors, 150.0)  # squares up to 4e5: overflow in float16
    assert log_phi.dtype == torch.float32
    torch.testing.assert_close(
        log_phi, log_landmark_features(x.float(), anchors.float(), 150.0), rtol=0, atol=0
    )
    phi = landmark_features(x, anchors, 150.0)
    assert phi.dtype == dtype
    torch.testing.assert_close(phi, log_phi.exp().to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("sigma", [0.0, -1.0, math.nan, math.inf])
def test_bad_sigma(sigma: float) -> None:
    with pytest.raises(OptionError, match="sigma"):
        landmark_features(torch.zeros(3), torch.zeros(2, 3), sigma)


def test_bad_shapes() -> None:
    with pytest.raises(ShapeError, match=r"\(2, 5\).*\(7, 3\)"):
        landmark_features(torch.zeros(7, 3), torch.zeros(2, 5), 1.0)
    with pytest.raises(ShapeError, match="M, D"):
        landmark_features(torch.zeros(7, 3), torch.zeros(3), 1.0)
    for anchors_of in (sample_anchors, kmeans_anchors):
        with pytest.raises(ShapeError, match="N, D"):
            anchors_of(torch.zeros(3), 1)
        with pytest.raises(OptionError, match="11 anchors cannot be taken from 7 rows"):
            anchors_of(torch.zeros(2, 7, 3), 11)
        with pytest.raises(OptionError, match="m must be"):
            anchors_of(torch.zeros(7, 3), 0)
        with pytest.raises(OptionError, match="NaN"):
            anchors_of(torch.full((7, 3), math.nan), 2)
        with pytest.raises(DtypeError, match="floating"):
            anchors_of(torch.zeros(7, 3, dtype=torch.int64), 2)
    with pytest.raises(OptionError, match="iterations"):
        kmeans_anchors(torch.zeros(7, 3), 2, iterations=-1)


def test_sampled_anchors_are_distinct_rows() -> None:
    x = torch.arange(2 * 13 * 3, dtype=F64).reshape(2, 13, 3).requires_grad_()
    anchors = sample_anchors(x, 5, torch.Generator().manual_seed(3))
    assert anchors.shape == (2, 5, 3)
    assert not anchors.requires_grad
    for rows, picked in zip(x.detach(), anchors, strict=True):
        index = (picked[:, None] == rows[None]).all(-1).nonzero()
        assert index[:, 0].tolist() == list(range(5))  # each anchor is a row
        assert len(set(index[:, 1].tolist())) == 5  # and none twice
    everything = sample_anchors(x[0], 13, torch.Generator().manual_seed(4))
    assert torch.equal(everything.sort(0).values, x[0])


def test_sampling_is_uniform() -> None:
    # a row of 7 is among 3 anchors with probability 3/7; Hoeffding over 2003 draws, 7 rows at once,
    # false alarm 1e-9: 0.076. Sampling the first rows more often than the last would show.
    x, source, n = torch.arange(7.0)[:, None], torch.Generator().manual_seed(5), 2003
    count = torch.zeros(7)
    for _ in range(n):
        count[sample_anchors(x, 3, source)[:, 0].long()] += 1
    bound = math.sqrt(math.log(2 * 7 / 1e-9) / (2 * n))
    assert bound < 0.08
    assert (count / n - 3 / 7).abs().max() < bound


@pytest.mark.parametrize("take", [sample_anchors, kmeans_anchors])
def test_anchors_are_determined_by_the_generator(take: object) -> None:
    assert callable(take)
    x = normal(3, 17, 5)

    def anchors(rows: Tensor, seed: int) -> Tensor:
        result = take(rows, 7, generator=torch.Generator().manual_seed(seed))
        assert isinstance(result, Tensor)
        return result

    state = torch.get_rng_state()
    first = anchors(x, 6)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(anchors(x, 6), first)
    assert not torch.equal(anchors(x, 7), first)
    # leading indices are drawn one after the other: earlier ones do not depend on later ones
    assert torch.equal(anchors(x[:2], 6), first[:2])


def test_kmeans_finds_separated_clusters() -> None:
    # Clusters of radius < 1 at distance ≥ 100: k-means++ misses one with probability below
    # 3·(20·2)/(100²) = 1.2% (mass of rows in taken clusters against one cluster left), and not
    # for this seed; each mean is then a centre
    centres = torch.tensor([[0.0, 0.0], [100.0, 0.0], [0.0, 100.0], [150.0, 150.0]], dtype=F64)
    noise = (normal(4, 5, 2) / 4).clamp(-0.5, 0.5)
    x = (centres[:, None] + noise).reshape(-1, 2)
    found = kmeans_anchors(x, 4, generator=torch.Generator().manual_seed(8))
    means = (centres[:, None] + noise).mean(1)
    distance = (means[:, None] - found).norm(dim=-1).min(1).values
    assert distance.max() < 1e-12  # sums of 5 numbers below 200


def test_kmeans_never_increases_its_objective() -> None:
    x = normal(101, 5)
    values = [
        inertia(x, kmeans_anchors(x, 13, steps, torch.Generator().manual_seed(9)))
        for steps in range(9)
    ]
    # each value is a sum of 101 terms: relative rounding 101·2.2e-16
    assert all(b <= a * (1 + 1e-13) for a, b in itertools.pairwise(values))
    assert values[-1] < 0.95 * values[0]  # and it does something


def test_kmeans_plus_plus_beats_a_uniform_start() -> None:
    # 90 rows at one place, 10 clusters of one row far away: a uniform sample of 11 of the 100
    # rows has a mean of 9.9 rows of the 90 and misses most clusters; ++ takes each cluster once,
    # for the distance to an already taken place is 0
    far = torch.arange(10, dtype=F64)[:, None] * 50 + 100
    x = torch.cat((torch.zeros(90, 1, dtype=F64), far))
    start = kmeans_anchors(x, 11, 0, torch.Generator().manual_seed(10))
    assert inertia(x, start) == 0.0


def test_empty_clusters_move_to_the_farthest_rows() -> None:
    rows = torch.tensor([[0.0], [1.0], [10.0], [11.0]], dtype=F64)
    start = torch.tensor([[5.0], [1000.0]], dtype=F64)
    # all rows belong to 5, whose mean is 5.5; the row farthest from 5 is 11
    assert _lloyd(rows, start, 1)[:, 0].tolist() == [5.5, 11.0]
    assert sorted(_lloyd(rows, start, 9)[:, 0].tolist()) == [0.5, 10.5]
    # several empty clusters: distinct rows, farthest first (11, then 0 or 10, both at 5)
    start = torch.tensor([[5.0], [1000.0], [2000.0]], dtype=F64)
    moved = _lloyd(rows, start, 1)[:, 0].tolist()
    assert moved[:2] == [5.5, 11.0]
    assert moved[2] in (0.0, 10.0)


def test_kmeans_of_equal_rows() -> None:
    x = torch.full((7, 3), 2.5)
    assert torch.equal(kmeans_anchors(x, 5), torch.full((5, 3), 2.5))
    distinct = torch.arange(7.0)[:, None]
    assert torch.equal(kmeans_anchors(distinct, 7).sort(0).values, distinct)


def test_kmeans_keeps_the_dtype_and_is_detached() -> None:
    x = (normal(2, 17, 5) * 200).half().requires_grad_()  # squares overflow in float16
    anchors = kmeans_anchors(x, 3)
    assert anchors.dtype == torch.float16
    assert anchors.isfinite().all()
    assert not anchors.requires_grad
    exact = kmeans_anchors(x.detach().float(), 3)
    torch.testing.assert_close(anchors, exact.half(), rtol=0, atol=0)
