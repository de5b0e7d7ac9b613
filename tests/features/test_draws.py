"""Random projections: geometry, length laws, kernel means and variances, determinism, errors.

Notation: z = q + k, and X = exp(ω·z − (|q|² + |k|²)/2) is one row's contribution to the estimate of
exp(q·k) = SM; an estimate is the mean of X over the M rows of a head; heads are independent.
Seeds are fixed, so every outcome is; "false alarm" is over the choice of the seed.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from subquad.errors import DtypeError, OptionError, UnknownNameError
from subquad.features import chi_quantile, draw_projection
from subquad.features.draws import DRAWS, NORMS, _sub_seed

F64 = torch.float64
EPS = torch.finfo(F64).eps


def pair(dim: int, inner: float, length: float = 1.0) -> tuple[Tensor, Tensor]:
    """q and k in general position with |q| = |k| = length and q·k = inner·length²."""
    basis = torch.linalg.qr(torch.arange(dim * 2, dtype=F64).reshape(dim, 2).sin() + 0.1)[0]
    q = basis[:, 0]
    k = inner * basis[:, 0] + math.sqrt(1 - inner**2) * basis[:, 1]
    return length * q, length * k


def estimates(omega: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The estimate of every head, (H,)."""
    return (omega @ (q + k) - (q @ q + k @ k) / 2).exp().mean(-1)


def sphere_mean(dim: int, t: float) -> float:
    """Λ_D(t) = E exp(t·u·e) over the unit sphere, by its series Σ (t²/4)^n / (n! (D/2)_n)."""
    term = total = 1.0
    for n in range(200):
        term *= t * t / 4 / ((n + 1) * (dim / 2 + n))
        total += term
    return total


def pair_moment(dim: int, square: float, cosine: float) -> float:
    """E exp((ω₁ + ω₂)·z) for χ lengths and a fixed angle between ω₁ and ω₂, |z|² = square.

    The sum's direction is uniform, hence E Λ_D(|ω₁ + ω₂||z|). With r₁ = ρ cos φ, r₂ = ρ sin φ:
    |ω₁ + ω₂|² = ρ² (1 + cosine·sin 2φ), ρ² ~ χ²_{2D}, E ρ^{2n} = 2^n (D)_n, and φ in (0, π/2) has
    density ∝ (sin φ cos φ)^{D−1}, independent of ρ. So the moment is
    Σ_n (|z|²/2)^n (D)_n / (n! (D/2)_n) · E (1 + cosine·sin 2φ)^n.
    """
    # midpoint rule: the integrand and its first D−2 derivatives vanish at both ends
    phi = (torch.arange(2000, dtype=F64) + 0.5) * (math.pi / 4000)
    weight = (phi.sin() * phi.cos()) ** (dim - 1)
    weight = weight / weight.sum()
    factor = 1 + cosine * (2 * phi).sin()
    total, term = 0.0, 1.0
    for n in range(100):
        total += term * float((weight * factor**n).sum())
        term *= square / 2 * (dim + n) / ((n + 1) * (dim / 2 + n))
    return total


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("norms", NORMS)
@pytest.mark.parametrize(("features", "dim"), [(3, 7), (7, 7), (17, 5), (5, 1), (1, 1), (2, 2)])
def test_shape_and_finite(draw: str, norms: str, features: int, dim: int) -> None:
    omega = draw_projection(features, dim, heads=3, draw=draw, norms=norms, seed=1)
    assert omega.shape == (3, features, dim)
    assert omega.dtype == torch.float32
    assert omega.isfinite().all()
    assert (omega.norm(dim=-1) > 0).all()


@pytest.mark.parametrize(("features", "dim"), [(3, 7), (7, 7), (17, 5), (11, 2)])
@pytest.mark.parametrize("draw", ["orthogonal", "simplex"])
def test_blocks_have_the_stated_angles(draw: str, features: int, dim: int) -> None:
    omega = draw_projection(features, dim, heads=2, draw=draw, seed=5, dtype=F64)
    unit = omega / omega.norm(dim=-1, keepdim=True)
    expected = -1 / (dim - 1) if draw == "simplex" else 0.0
    for start in range(0, features, dim):
        block = unit[:, start : start + dim]
        inner = block @ block.transpose(-1, -2)
        rows = block.shape[1]
        target = torch.full((rows, rows), expected, dtype=F64).fill_diagonal_(1.0)
        # Householder QR is orthogonal to a small multiple of D·eps; the simplex product adds D·eps
        assert (inner - target).abs().max() < 16 * dim * EPS


@pytest.mark.parametrize("draw", ["orthogonal", "simplex"])
def test_rotation_is_haar(draw: str) -> None:
    # Under Haar each entry of a row is symmetric about 0. LAPACK's Q without the sign correction
    # has Q_11 of one sign: |mean| = E|u_1|, 0.37 in 5 dimensions (and of that order elsewhere).
    heads, dim = 2003, 5
    omega = draw_projection(dim, dim, heads=heads, draw=draw, norms="sqrt_d", seed=2, dtype=F64)
    entries = omega / math.sqrt(dim)  # in [−1, 1]
    # Hoeffding over heads, D² entries at once: false alarm 1e-9
    bound = math.sqrt(2 * math.log(2 * dim * dim / 1e-9) / heads)
    assert bound < 0.2
    assert entries.mean(0).abs().max() < bound


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize(("features", "dim"), [(19, 7), (5, 11)])
def test_kernel_is_unbiased(draw: str, features: int, dim: int) -> None:
    q, k = pair(dim, 0.3, length=0.7)
    heads = 20011 // features
    estimate = estimates(
        draw_projection(features, dim, heads=heads, draw=draw, seed=3, dtype=F64), q, k
    )
    truth = float((q @ k).exp())
    # Var ≤ (e^{|z|²} − 1) SM² / M for iid and, since coupling within blocks only lowers it (see
    # the test of the closed forms below), for all draws. |z|² = 1.27: the skewness of the mean of
    # 20000 lognormals is (e^1.27 + 2)√(e^1.27 − 1)/√20000 = 0.06, so the normal tail at 5
    # deviations, 6e-7, is off by e^{0.06·5³/6} = 3.5 at most: false alarm below 1e-5.
    square = float((q + k) @ (q + k))
    deviation = truth * math.sqrt((math.exp(square) - 1) / (features * heads))
    assert deviation < 0.02 * truth  # so that the bound has teeth
    assert abs(float(estimate.mean()) - truth) < 5 * deviation


@pytest.mark.parametrize("features", [5, 11, 23])
def test_variance_is_the_closed_form_and_falls_as_one_over_m(features: int) -> None:
    # E X² = e^{2|z|² − |q|² − |k|²} = e^{|z|² + 2q·k}, from E e^{ω·2z} = e^{2|z|²}; hence
    # Var = (1/M)(e^{|z|²} e^{2q·k} − e^{2q·k}) for independent rows.
    dim, heads = 7, 4001
    q, k = pair(dim, -0.8)  # |q| = |k| = 1, |z|² = 0.4
    estimate = estimates(
        draw_projection(features, dim, heads=heads, draw="iid", seed=4, dtype=F64), q, k
    )
    square, inner = float((q + k) @ (q + k)), float(q @ k)
    truth = (math.exp(square) - 1) * math.exp(2 * inner) / features
    # X is lognormal with kurtosis κ = e^{4s} + 2e^{3s} + 3e^{2s} − 3, s = |z|²; the mean of M has
    # 3 + (κ−3)/M; the sample variance of n heads deviates by a factor √((kurtosis − 1)/n), 3.6%,
    # 3.0% and 2.6% here. 5 deviations, with the skewness of a variance (its χ²-like law has skew
    # √(8/n) = 0.04, times 4 at most for these tails): false alarm below 1e-4. 1/√M or 1/M² instead
    # of 1/M would be off by a factor of 2 and more.
    kurtosis = math.exp(4 * square) + 2 * math.exp(3 * square) + 3 * math.exp(2 * square) - 3
    relative = math.sqrt((2 + (kurtosis - 3) / features) / heads)
    assert relative < 0.04
    assert abs(float(estimate.var()) / truth - 1) < 5 * relative


def test_mean_squared_errors_are_the_closed_forms_and_ordered() -> None:
    # Var of a block's mean = (1/M)(Var X + (M−1)(P − SM²)) with P = E X₁X₂ from `pair_moment` at
    # the draw's fixed angle. P < SM² for orthogonal rows because (D)_n/(D/2)_n ≤ 2^n termwise, and
    # smaller still for the simplex, whose factor 1 − sin(2φ)/(D−1) is below 1.
    dim, heads = 29, 4001
    q, k = pair(dim, -0.65)  # |q| = |k| = 1, |z|² = 0.7
    square, inner = float((q + k) @ (q + k)), float(q @ k)
    kernel = math.exp(inner)
    single = (math.exp(square) - 1) * kernel**2
    scale = math.exp(-2.0)  # e^{−|q|²−|k|²}, of a product of two rows
    cosines = {"orthogonal": 0.0, "simplex": -1 / (dim - 1)}
    truth = {"iid": single / dim}
    for draw, cosine in cosines.items():
        cross = scale * pair_moment(dim, square, cosine) - kernel**2
        truth[draw] = (single + (dim - 1) * cross) / dim
    assert truth["simplex"] < truth["orthogonal"] < 0.8 * truth["iid"]

    measured, error = {}, {}
    for draw in DRAWS:
        omega = draw_projection(dim, dim, heads=heads, draw=draw, seed=6, dtype=F64)
        loss = (estimates(omega, q, k) - kernel).square()
        measured[draw] = float(loss.mean())
        error[draw] = float(loss.std()) / math.sqrt(heads)
        # 5 standard errors, estimated from the sample; the squared errors' skewness s (up to 30:
        # lognormals squared) over √n is up to 0.5, so the normal tail, 6e-7, may be off by
        # e^{0.5·5³/6} = 3e4 at worst: the false alarm is below 2% a draw, and 0 for this seed
        assert error[draw] < 0.07 * truth[draw]
        assert abs(measured[draw] - truth[draw]) < 5 * error[draw]
    # the closed forms differ by more than 5 standard errors of the difference
    gap = 5 * math.hypot(error["iid"], error["orthogonal"])
    assert truth["iid"] - truth["orthogonal"] > gap
    assert measured["orthogonal"] < measured["iid"]
    assert measured["simplex"] < measured["orthogonal"]  # 5-fold at M = D and a small |z|


def test_pair_moment_of_independent_directions() -> None:
    # a check of the helper: for D = 1 and cosine 1 the rows are r₁ + r₂ along one random sign,
    # E cosh((r₁ + r₂)|z|) with r = |N(0,1)|; integrated here on a grid instead
    r = (torch.arange(4000, dtype=F64) + 0.5) * (10 / 4000)  # the tail beyond 10 is e^{−50}
    density = (-(r**2) / 2).exp()
    density = density / density.sum()
    s = 0.6
    c, h = (
        float((density * f(r * math.sqrt(s))).sum()) for f in (torch.cosh, torch.sinh)
    )  # cosh(a + b) = cosh a cosh b + sinh a sinh b
    # D = 1 makes the density of φ flat, where the midpoint rule is second order: (π/4000)²/24·O(10)
    assert abs(pair_moment(1, s, 1.0) - (c * c + h * h)) < 1e-5


@pytest.mark.parametrize("draw", DRAWS)
def test_sqrt_d_has_exact_lengths_and_the_bessel_kernel(draw: str) -> None:
    dim, features, heads = 3, 11, 2003
    omega = draw_projection(
        features, dim, heads=heads, draw=draw, norms="sqrt_d", seed=8, dtype=F64
    )
    # normalising and rescaling round three times each, in a sum of D squares
    assert (omega.square().sum(-1) - dim).abs().max() < 16 * dim * EPS
    q, k = pair(dim, -0.3)
    length = float((q + k).norm())
    t = math.sqrt(dim) * length
    # Γ(D/2)(2/t)^{D/2−1} I_{D/2−1}(t) is sinh(t)/t in three dimensions
    assert math.isclose(sphere_mean(dim, t), math.sinh(t) / t, rel_tol=1e-14)
    truth = math.exp(-1.0) * sphere_mean(dim, t)
    value = estimates(omega, q, k)
    # X is bounded (by e^{t}), n = 2003 heads of 11 rows: the mean is normal to a skewness below
    # 0.05; 5 standard errors, false alarm below 1e-5
    error = float(value.std()) / math.sqrt(heads)
    assert abs(float(value.mean()) - truth) < 5 * error
    assert float(value.mean()) + 5 * error < float((q @ k).exp())  # below, not merely different


@pytest.mark.parametrize("draw", DRAWS)
def test_quantile_lengths_invert_the_chi_law(draw: str) -> None:
    dim, features = 7, 23
    omega = draw_projection(features, dim, heads=2, draw=draw, norms="quantile", seed=9, dtype=F64)
    lengths = omega.norm(dim=-1)
    ordered = lengths.sort(-1).values
    probability = torch.arange(1, features + 1, dtype=F64) / (features + 1)
    back = torch.special.gammainc(torch.tensor(dim / 2, dtype=F64), ordered.square() / 2)
    # the bracket is closed to 1 ulp of R and R·density(R) ≤ √D; normalising adds D·eps, gammainc
    # itself a few eps
    assert (back - probability).abs().max() < 32 * dim * EPS
    # each head has a permutation of its own; equal ones have probability 1/23!
    assert not torch.equal(lengths[0].argsort(), lengths[1].argsort())
    assert not torch.equal(lengths[0].argsort(), torch.arange(features))


@pytest.mark.parametrize("draw", DRAWS)
def test_quantile_kernel_mean_is_the_closed_form_and_below(draw: str) -> None:
    dim, features, heads = 3, 11, 2003
    q, k = pair(dim, -0.3)
    length = float((q + k).norm())
    radii = chi_quantile(torch.arange(1, features + 1) / (features + 1), dim).tolist()
    means = [sphere_mean(dim, radius * length) for radius in radii]
    truth = math.exp(-1.0) * sum(means) / features
    omega = draw_projection(
        features, dim, heads=heads, draw=draw, norms="quantile", seed=10, dtype=F64
    )
    value = estimates(omega, q, k)
    error = float(value.std()) / math.sqrt(heads)  # bounded X: as for sqrt_d
    assert abs(float(value.mean()) - truth) < 5 * error
    assert float(value.mean()) + 5 * error < float((q @ k).exp())


def test_quantile_bias_vanishes_with_more_features() -> None:
    dim, length = 5, 1.2
    truth = math.exp(length**2 / 2)
    bias = []
    for features in (7, 61, 521):
        radii = chi_quantile(torch.arange(1, features + 1) / (features + 1), dim).tolist()
        bias.append(truth - sum(sphere_mean(dim, r * length) for r in radii) / features)
    # Λ(R) is increasing: the missing tail, 1/(M+1) of the mass, makes every bias positive. Λ grows
    # like e^{R|z|} against a density like e^{−R²/2}: the tail is M^{−1+o(1)} of E Λ.
    # A step is 8.6-fold in M: ask for a factor of 2
    assert 0 < bias[2] < bias[1] / 2 < bias[0] / 4


def test_chi_quantile_in_two_dimensions() -> None:
    p = torch.tensor([0.0, 1e-6, 0.03, 0.5, 0.97, 1 - 1e-6], dtype=F64)
    r = chi_quantile(p, 2)
    exact = (-2 * torch.log1p(-p)).sqrt()
    # gammainc is good to some eps of p, and dR = dp/(R e^{−R²/2}); R itself is good to an ulp
    density = (exact * (1 - p)).clamp_min(EPS)
    tolerance = 32 * EPS * (p / density + exact) + 1e-300
    assert ((r - exact).abs() <= tolerance).all()


@pytest.mark.parametrize("dof", [1, 3, 7.4, 64, 512])
def test_chi_quantile_against_scipy(dof: float) -> None:
    stats = pytest.importorskip("scipy.stats")
    p = torch.arange(1, 102, dtype=F64) / 102
    expected = torch.from_numpy(stats.chi.ppf(p.numpy(), dof))
    # torch.special.gammainc (2.13) is off by up to 4e-10 for dof/2 > 20, where it turns to an
    # asymptotic series (3.3e-10 at dof 64 against 30-digit arithmetic; scipy 1e-15). dR is that
    # over the density, which is ≥ 0.03 for p in [1/102, 101/102] (χ is near a normal of variance
    # 1/2, and these are 2.3 deviations out), and R > 5 there: 4e-10/0.03/5 < 3e-9 relative. Below,
    # there is rounding alone: some eps over p·density-like factors of 1/102.
    rtol = 3e-9 if dof > 40 else 1e-12
    torch.testing.assert_close(chi_quantile(p, dof), expected, rtol=rtol, atol=0)


@pytest.mark.parametrize("bad", [-0.1, 1.0, math.nan])
def test_chi_quantile_rejects_other_probabilities(bad: float) -> None:
    with pytest.raises(OptionError, match=r"\[0, 1\)"):
        chi_quantile(torch.tensor([0.5, bad]), 3)
    with pytest.raises(OptionError, match="dof"):
        chi_quantile(torch.tensor([0.5]), bad if bad < 0 else 0.0)


@pytest.mark.parametrize("draw", DRAWS)
def test_one_dimension(draw: str) -> None:
    omega = draw_projection(2, 1, heads=61, draw=draw, norms="sqrt_d", seed=11, dtype=F64)
    assert set(omega.flatten().tolist()) == {-1.0, 1.0}  # one sign alone: 2^−121
    if draw == "simplex":
        other = draw_projection(2, 1, heads=61, draw="orthogonal", norms="sqrt_d", seed=11)
        assert torch.equal(omega.float(), other)  # the documented fall-back


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("norms", NORMS)
def test_a_heads_draw_does_not_depend_on_the_number_of_heads(draw: str, norms: str) -> None:
    few = draw_projection(11, 5, heads=3, draw=draw, norms=norms, seed=12)
    many = draw_projection(11, 5, heads=7, draw=draw, norms=norms, seed=12)
    assert torch.equal(few, many[:3])
    assert not torch.equal(many[0], many[1])
    assert torch.equal(few, draw_projection(11, 5, heads=3, draw=draw, norms=norms, seed=12))
    assert not torch.equal(few, draw_projection(11, 5, heads=3, draw=draw, norms=norms, seed=13))


def test_seeds_use_all_their_bits() -> None:
    # torch.Generator keeps 32 bits of a seed; two seeds that agree in those must differ here
    assert not torch.equal(draw_projection(3, 5, seed=5), draw_projection(3, 5, seed=5 + 2**32))
    assert torch.equal(draw_projection(3, 5, seed=-1), draw_projection(3, 5, seed=2**64 - 1))
    assert torch.equal(draw_projection(3, 5), draw_projection(3, 5, seed=0))
    assert len({_sub_seed(12345, head) for head in range(10007)}) == 10007
    assert all(0 <= _sub_seed(2**64 - 1, head) < 2**32 for head in range(101))


def test_generator_is_advanced_by_one_number_whatever_the_heads() -> None:
    one, two = torch.Generator().manual_seed(14), torch.Generator().manual_seed(14)
    few = draw_projection(5, 3, heads=1, generator=one)
    many = draw_projection(5, 3, heads=11, generator=two)
    assert torch.equal(few[0], many[0])
    assert torch.equal(one.get_state(), two.get_state())
    assert not torch.equal(draw_projection(5, 3, generator=one), few)


def test_global_state_is_neither_read_nor_written() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = draw_projection(5, 3, norms="quantile", seed=15)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(draw_projection(5, 3, norms="quantile", seed=15), first)


@pytest.mark.parametrize("norms", NORMS)
@pytest.mark.parametrize("draw", DRAWS)
def test_the_dtype_and_the_default_device_do_not_change_the_draw(draw: str, norms: str) -> None:
    double = draw_projection(7, 5, draw=draw, norms=norms, seed=16, dtype=F64)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(
            draw_projection(7, 5, draw=draw, norms=norms, seed=16, dtype=dtype), double.to(dtype)
        )
    with torch.device("meta"):  # where models are built before their weights are loaded
        there = draw_projection(7, 5, draw=draw, norms=norms, seed=16, dtype=F64)
    assert torch.equal(there, double)
    assert draw_projection(7, 5, draw=draw, norms=norms, device="meta").device.type == "meta"


@pytest.mark.parametrize("name", ["num_features", "dim", "heads"])
@pytest.mark.parametrize("value", [0, -3, 2.0, True])
def test_bad_sizes(name: str, value: object) -> None:
    sizes = {"num_features": 5, "dim": 3, "heads": 2} | {name: value}
    with pytest.raises(OptionError, match=f"{name} must be an integer of at least 1"):
        draw_projection(**sizes)


def test_bad_options() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'orthogonal'"):
        draw_projection(5, 3, draw="ortogonal")
    with pytest.raises(UnknownNameError, match="did you mean 'quantile'"):
        draw_projection(5, 3, norms="quantiles")
    with pytest.raises(UnknownNameError, match="choices: iid, orthogonal, simplex"):
        draw_projection(5, 3, draw="zzz")
    with pytest.raises(DtypeError, match="int64"):
        draw_projection(5, 3, dtype=torch.int64)
    with pytest.raises(OptionError, match="seed or generator, not both"):
        draw_projection(5, 3, seed=0, generator=torch.Generator())
    with pytest.raises(OptionError, match="seed must be an integer"):
        draw_projection(5, 3, seed=1.5)  # type: ignore[arg-type]
