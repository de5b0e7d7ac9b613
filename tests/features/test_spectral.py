"""Random Fourier features of any similarity: truths, bounds, the grid's exactness, errors.

The bound used throughout: an estimate is Z/(β(q) γ(k)) times a mean of n independent cosines, each
in [−1, 1]. By Hoeffding it deviates from its mean by more than Z/(β γ)·√(2 log(2/α)/n) with
probability α at most, whatever the law. α = 1e-9 over all entries compared; seeds are fixed.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from subquad.errors import OptionError, ShapeError, UnknownNameError
from subquad.features import SpectralMap, spectral
from subquad.features.spectral import SIMILARITIES, _Decay, _grid_coefficients

F64 = torch.float64
N = 60013  # frequencies


def points(dim: int, radius: float = 1.0) -> tuple[Tensor, Tensor]:
    """q (5, D) and k (7, D), coordinates within ±radius."""
    source = torch.Generator().manual_seed(0)
    q, k = (2 * torch.rand(rows, dim, generator=source, dtype=F64) - 1 for rows in (5, 7))
    return radius * q, radius * k


def hoeffding(independent: int, entries: int = 35) -> float:
    return math.sqrt(2 * math.log(2 * entries / 1e-9) / independent)


def close(found: SpectralMap, q: Tensor, k: Tensor, truth: Tensor, independent: int = N) -> None:
    """Compares β γ/Z times the estimate with the truth, entrywise, within the bound."""
    weight = (found.log_beta(q)[:, None] + found.log_gamma(k) - found.log_mass).exp()
    error = ((found.kernel(q, k) - truth) * weight).abs().max()
    # a grid may be off by 1e-3 of the integrand's peak, which is at most Z; none here is by 1e-6
    assert error < hoeffding(independent, truth.numel()) + 1e-6
    # and the truth is far from what other kernels would give: it varies by more than the bound
    assert (truth * weight).std() > 2 * hoeffding(independent)


def distance(q: Tensor, k: Tensor, order: float = 2.0) -> Tensor:
    return torch.cdist(q, k, p=order)


def dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).exp()


NAMED = {
    "gaussian": ({}, lambda q, k, ell: (-(distance(q, k) ** 2) / (2 * ell**2)).exp()),
    "laplace": ({}, lambda q, k, ell: (-distance(q, k, 1.0) / ell).exp()),
    "matern 1/2": ({"nu": 0.5}, lambda q, k, ell: (-distance(q, k) / ell).exp()),
    "matern": (
        {},  # 3/2 where not given
        lambda q, k, ell: (
            (1 + math.sqrt(3) * distance(q, k) / ell) * (-math.sqrt(3) * distance(q, k) / ell).exp()
        ),
    ),
    "matern 5/2": (
        {"nu": 2.5},
        lambda q, k, ell: (
            (1 + math.sqrt(5) * distance(q, k) / ell + 5 * distance(q, k) ** 2 / (3 * ell**2))
            * (-math.sqrt(5) * distance(q, k) / ell).exp()
        ),
    ),
}


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("ell", [None, 0.6])
def test_named_similarities(name: str, ell: float | None) -> None:
    options, truth = NAMED[name]
    sim = name.split()[0]
    if sim != "laplace":
        options = {**options, "draw": "iid"}  # Hoeffding's bound needs independent frequencies
    q, k = points(3)
    found = spectral(sim, dim=3, features=2 * N, lengthscale=ell, seed=1, dtype=F64, **options)
    assert torch.equal(found.omega_k, -found.omega_q)
    assert found.mass == 1.0
    close(found, q, k, truth(q, k, 1.0 if ell is None else ell))


def test_softmax_by_name_and_its_variance() -> None:
    q, k = points(3)
    found = spectral("softmax", dim=3, features=2 * N, draw="iid", seed=2, dtype=F64)
    close(found, q, k, (q @ k.T).exp())
    # with s² = |q − k|² and ω·(q − k) ~ N(0, s²): E cos = e^{−s²/2}, E cos² = (1 + e^{−2s²})/2, so
    # each cosine has variance ½(1 − e^{−s²})²: squares of deviations lie in [0, 4], Hoeffding
    both = found.query(q[:1]) * found.key(k[:1]) * N
    cosine = both[0, :N] + both[0, N:]
    square = float((q[0] - k[0]).square().sum())
    deviation = (cosine - math.exp(-square / 2)).square().mean()
    truth = 0.5 * (1 - math.exp(-square)) ** 2
    bound = 4 * math.sqrt(math.log(2 / 1e-9) / (2 * N))
    assert truth > 3 * bound
    assert abs(float(deviation) - truth) < bound


@pytest.mark.parametrize("draw", [None, "orthogonal", "simplex"])
def test_coupled_directions_are_unbiased(draw: str | None) -> None:
    q, k = points(3)
    found = spectral("gaussian", dim=3, features=2 * N, draw=draw, seed=3, dtype=F64)
    # blocks of D = 3 are independent, and a block's mean lies in [−1, 1]; the last has one row
    truth = (-(distance(q, k) ** 2) / 2).exp()
    close(found, q, k, truth, independent=N // 3)
    unit = found.omega_q[:3] / found.omega_q[:3].norm(dim=-1, keepdim=True)
    cosine = -0.5 if draw == "simplex" else 0.0
    expected = torch.full((3, 3), cosine, dtype=F64).fill_diagonal_(1.0)
    torch.testing.assert_close(unit @ unit.T, expected, rtol=0, atol=1e-14)  # QR: some D·eps


@pytest.mark.parametrize("rate", [0.8, 1.0, 1.7])
def test_softmax_by_a_grid(rate: float) -> None:
    q, k = points(3)
    found = spectral(dot, rate, rate, dim=3, features=2 * N, separable=True, seed=4, dtype=F64)
    # The transform of this Gaussian is positive, so Z = ∫F is the integrand at the origin, 1. Cut
    # at ±6, where it is at most e^{−36(λ − 1/4λ)} (2e-8 for λ = 0.8), the periodic one has a kink
    # of that size along 4·256 points, which adds no more than its sum; and FFT rounding
    edge = math.exp(-36 * (rate - 1 / (4 * rate)))
    assert abs(found.log_mass) < 1024 * edge + 1e-10
    close(found, q, k, (q @ k.T).exp())


def shifted(x: Tensor, y: Tensor) -> Tensor:
    """Not symmetric, and with a transform that is not real."""
    return (-((x - y - 0.7) ** 2) / 2).exp()


def signed(x: Tensor, y: Tensor) -> Tensor:
    """Zero at x = y, with a transform (1 − ω²) e^{−ω²/2} that changes sign."""
    return (x - y) ** 2 * (-((x - y) ** 2) / 2).exp()


@pytest.mark.parametrize("sim", [shifted, signed])
def test_transforms_that_are_not_positive(sim: Any) -> None:
    q, k = points(2, radius=1.4)
    found = spectral(sim, 0.4, 0.6, dim=2, features=2 * N, separable=True, seed=5, dtype=F64)
    truth = sim(q[:, None], k[None]).prod(-1)
    close(found, q, k, truth)
    if sim is signed:
        # sup|g| ≤ Σ|c| always; a positive transform would make Z = g(0, 0) = 0. Here, where it
        # changes sign, Z exceeds the peak itself, per coordinate by more than a quarter
        x = torch.linspace(-4, 4, 401, dtype=F64)
        g = signed(x[:, None], x) * (-0.4 * x[:, None] ** 2 - 0.6 * x**2).exp()
        assert found.mass > (1.25 * float(g.max())) ** 2


def test_coordinate_functions_equal_rates() -> None:
    def bell(x: Tensor) -> Tensor:
        return (-0.5 * x**2).exp()

    q, k = points(2)
    rate = spectral(shifted, 0.5, 0.5, dim=2, features=22, separable=True, dtype=F64)
    function = spectral(shifted, bell, bell, dim=2, features=22, separable=True, dtype=F64)
    assert torch.equal(rate.omega_q, function.omega_q)
    # −½Σx² against Σ log e^{−½x²}: roundings of numbers below 2
    torch.testing.assert_close(rate.kernel(q, k), function.kernel(q, k), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("axes", "size"), [(1, 64), (2, 32)])
def test_the_grid_is_exact_between_its_points_to_the_aliasing_error(axes: int, size: int) -> None:
    extent = 6.0

    def sim(x: Tensor, y: Tensor) -> Tensor:
        return shifted(x, y) if axes == 1 else shifted(x, y).prod(-1)

    coefficients = _grid_coefficients(sim, _Decay(0.6), _Decay(0.9), axes, extent, size)
    frequency = 2 * math.pi * torch.fft.fftfreq(size, 2 * extent / size, dtype=F64)
    for point in torch.tensor([[0.31, -1.2, 0.77, 0.05], [-2.03, 0.4, 1.9, -0.6]], dtype=F64):
        value = coefficients
        for coordinate in point[: 2 * axes]:  # q first, then k
            value = torch.tensordot(torch.exp(1j * frequency * coordinate), value, dims=1)
        q, k = point[:axes], point[axes : 2 * axes]
        truth = (-0.6 * q.square().sum() - 0.9 * k.square().sum()).exp() * shifted(q, k).prod()
        # A Gaussian whose Hessian has eigenvalues in [1.4, 3.6]: at the edge it is below
        # e^{−1.4·5.6²/2} = 3e-10 (5.6: its centre is moved by less than 0.4), and its transform at
        # the Nyquist frequency πN/12 is below e^{−(πN/12)²/7.2} = 9e-18 for N = 64, 6e-5 for N = 32
        assert abs(complex(value) - complex(truth)) < (1e-9 if size == 64 else 1e-3)
    # on its points the sum is exact, whatever the resolution: FFT rounding alone
    back = torch.fft.fftn(torch.fft.ifftn(coefficients)).sub(coefficients).abs().max()
    assert back < 1e-15
    origin = coefficients.sum()
    truth = math.exp(-0.49 / 2 * axes)
    assert abs(complex(origin) - truth) < 1e-13


def test_a_whole_function_of_two_dimensions() -> None:
    def sim(q: Tensor, k: Tensor) -> Tensor:  # neither separable nor a function of q − k
        return (q * k).sum(-1).exp() / (1 + (q - k).square().sum(-1))

    q, k = points(2)
    found = spectral(sim, 1.0, 1.0, dim=2, features=2 * N, extent=4.0, seed=6, dtype=F64)
    weight = (found.log_beta(q)[:, None] + found.log_gamma(k) - found.log_mass).exp()
    error = ((found.kernel(q, k) - sim(q[:, None], k[None])) * weight).abs().max()
    # Hoeffding, and the aliasing error the build has bounded by 1e-3 of a peak of 1 ≤ Z
    assert error < hoeffding(N) + 1e-3
    assert (sim(q[:, None], k[None]) * weight).std() > 2 * hoeffding(N)


def test_a_whole_and_a_separable_function_agree() -> None:
    def whole(q: Tensor, k: Tensor) -> Tensor:
        return (q * k).sum(-1).exp()

    one = spectral(whole, 1.0, 1.0, dim=2, features=2, grid=32)
    two = spectral(dot, 1.0, 1.0, dim=2, features=2, grid=32, separable=True)
    # Z of a product is the product of the Zs, on equal grids: FFT rounding over 10^6 terms
    assert math.isclose(one.log_mass, two.log_mass, abs_tol=1e-9)


def test_one_dimension_is_a_coordinate_function() -> None:
    q, k = points(1)
    found = spectral(shifted, 1.0, 1.0, dim=1, features=2 * N, seed=7, dtype=F64)
    close(found, q, k, shifted(q, k.T))


def test_a_sampler_with_a_known_transform() -> None:
    # exp(x·y + a·x) with β = γ = e^{−|x|²}: per coordinate a Gaussian of Hessian A = [[2, −1],
    # [−1, 2]], centred at A⁻¹(a, 0) = μ: value e^{½ a μ_x} at the centre, so F ~ N(0, A) with phase
    # −ω·μ and Z = e^{½ a μ_x} in each coordinate
    a, hessian = 0.5, torch.tensor([[2.0, -1.0], [-1.0, 2.0]], dtype=F64)
    centre = torch.linalg.solve(hessian, torch.tensor([a, 0.0], dtype=F64))
    root = torch.linalg.cholesky(hessian)

    def sampler(generator: torch.Generator, n: int) -> tuple[Tensor, Tensor, Tensor]:
        omega = torch.randn(n, 3, 2, generator=generator, dtype=F64) @ root.T
        return omega[..., 0], omega[..., 1], -(omega @ centre).sum(-1)

    mass = math.exp(0.5 * a * float(centre[0])) ** 3
    q, k = points(3)
    found = spectral(
        None, 1.0, 1.0, dim=3, features=2 * N, sampler=sampler, mass=mass, seed=8, dtype=F64
    )
    assert math.isclose(found.mass, mass, rel_tol=1e-14)
    close(found, q, k, (q @ k.T + a * q.sum(-1, keepdim=True)).exp())
    grid = spectral(lambda x, y: (x * y + a * x).exp(), 1.0, 1.0, dim=3, features=2, separable=True)
    # the grid finds the same Z: F has constant modulus under its phase, so Σ|c| is its peak sum
    assert math.isclose(grid.log_mass, math.log(mass), abs_tol=1e-9)


@pytest.mark.parametrize("sim", [*SIMILARITIES, "grid"])
def test_features_are_bounded_and_products_too(sim: str) -> None:
    options: dict[str, Any] = {"dim": 3, "features": 22, "seed": 9, "dtype": F64}
    found = (
        spectral(shifted, 1.0, 1.0, separable=True, **options)
        if sim == "grid"
        else spectral(sim, **options)
    )
    assert (found.dim, found.features) == (3, 22)
    q, k = points(3, radius=50.0)
    query, key = found.query(q), found.key(k)
    assert query.shape == (5, 22)
    assert key.shape == (7, 22)
    # cos² + sin² = 1 for each of 11 frequencies, over 11; a dozen roundings
    for part in (query, key):
        norm = part.square().sum(-1)
        torch.testing.assert_close(norm, torch.ones_like(norm), rtol=0, atol=1e-14)
    product = query @ key.T
    angle = (q @ found.omega_q.T + found.phase)[:, None] + k @ found.omega_k.T
    # angles reach 1e4 (Cauchy tails more): rounding them costs 1e-12·|angle|/1e4 in the cosine
    tolerance = 1e-14 + 8 * torch.finfo(F64).eps * float(angle.abs().max())
    torch.testing.assert_close(product, angle.cos().mean(-1), rtol=0, atol=max(tolerance, 1e-12))
    assert product.abs().max() <= 1 + 1e-14
    assert (product < 0).any()  # the estimate is not positive, as documented


def test_shapes_and_dtypes() -> None:
    found = spectral("gaussian", dim=5, features=14)
    q = torch.zeros(2, 3, 11, 5)
    assert found.query(q).shape == (2, 3, 11, 14)
    assert found.kernel(q, torch.zeros(3, 13, 5)).shape == (2, 3, 11, 13)
    assert found.query(q[0, 0, 0]).shape == (14,)
    for dtype, result in (
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
    ):
        assert found.query(q.to(dtype)).dtype == result
        assert found.kernel(q.to(dtype), q.to(dtype)).dtype == result
    for wrong in (torch.zeros(5, 3), torch.zeros(())):
        with pytest.raises(ShapeError, match=r"q must be \(\.\.\., 5\)"):
            found.query(wrong)
        with pytest.raises(ShapeError, match=r"k must be \(\.\.\., 5\)"):
            found.key(wrong)


def test_gradients() -> None:
    found = spectral(shifted, 0.5, 0.5, dim=2, features=6, separable=True, seed=10, dtype=F64)
    q, k = points(2)
    q.requires_grad_()
    k.requires_grad_()
    assert torch.autograd.gradcheck(found.kernel, (q, k))


def test_determined_by_the_seed() -> None:
    def build(**options: Any) -> SpectralMap:
        return spectral(shifted, 0.5, 0.5, dim=2, features=22, separable=True, **options)

    state = torch.get_rng_state()
    first = build(seed=11)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.omega_q, build(seed=11).omega_q)
    assert not torch.equal(first.omega_q, build(seed=12).omega_q)
    generator = torch.Generator().manual_seed(1)
    one, two = build(generator=generator), build(generator=generator)
    assert not torch.equal(one.omega_q, two.omega_q)
    with torch.device("meta"):
        assert torch.equal(build(seed=11).omega_q, first.omega_q)


def test_a_matern_draws_lengths_and_directions_from_different_streams() -> None:
    n = 10007
    gaussian = spectral("gaussian", dim=3, features=2 * n, draw="iid", seed=13, dtype=F64)
    matern = spectral("matern", dim=3, features=2 * n, draw="iid", seed=13, dtype=F64)
    scale = matern.omega_q.norm(dim=-1) / gaussian.omega_q.norm(dim=-1)
    # A generator that starts anew would use its i-th number for scale i and for the i-th entry of
    # the Gaussian, in the order they are stored. Against those, and against the rows' lengths:
    # the rank correlation of independent series has standard deviation 1/√(n − 1); 5 of them
    for other in (gaussian.omega_q.flatten()[:n].abs(), gaussian.omega_q.norm(dim=-1)):
        ranks = torch.stack((other, scale)).argsort(-1).argsort(-1).to(F64)
        assert abs(float(torch.corrcoef(ranks)[0, 1])) < 5 / math.sqrt(n - 1)


def test_maps_are_frozen_and_can_be_copied_and_moved() -> None:
    found = spectral(dot, 1.0, 1.0, dim=3, features=22, separable=True)
    assert found.extent == 6.0
    assert spectral("gaussian", dim=3, features=22).extent is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.log_mass = 0.0  # type: ignore[misc]
    q, k = (x.float() for x in points(3))
    expected = found.kernel(q, k)
    for other in (pickle.loads(pickle.dumps(found)), copy.deepcopy(found), found.to("cpu")):
        assert torch.equal(other.kernel(q, k), expected)
    assert found.to("cpu", F64).omega_k.dtype == F64
    assert found.to("meta").phase.device.type == "meta"


def test_mass_beyond_a_float_is_kept_as_a_logarithm() -> None:
    def triple(x: Tensor, y: Tensor) -> Tensor:
        return 3 * shifted(x, y)

    found = spectral(triple, 0.4, 0.6, dim=2003, features=2, separable=True)
    assert found.mass == math.inf
    one = spectral(triple, 0.4, 0.6, dim=1, features=2)
    assert math.isclose(found.log_mass, 2003 * one.log_mass, rel_tol=1e-12)


def test_the_integrand_must_decay_at_every_edge() -> None:
    with pytest.raises(OptionError, match="has not decayed.*larger decay in beta and gamma"):
        spectral(dot, 0.5, 0.5, dim=3, features=4, separable=True)
    with pytest.raises(OptionError, match="has not decayed"):
        spectral(shifted, dim=3, features=4, separable=True)  # β = γ = 1
    with pytest.raises(OptionError, match="has not decayed"):  # at the upper end alone
        spectral(shifted, lambda x: (4 * x).sigmoid(), 0.1, dim=1, features=4, extent=4.0)
    with pytest.raises(OptionError, match="has not decayed"):  # at the lower end alone
        spectral(shifted, lambda x: (-4 * x).sigmoid(), 0.1, dim=1, features=4, extent=4.0)
    with pytest.raises(OptionError, match="lower the decay"):
        spectral(lambda x, y: 0 * x * y, 1.0, 1.0, dim=1, features=4)
    with pytest.raises(OptionError, match="not finite"):
        spectral(lambda x, y: (x**4 * y**4).exp(), 1.0, 1.0, dim=1, features=4, extent=9.0)


def test_the_grid_must_resolve_the_integrand() -> None:
    def narrow(x: Tensor, y: Tensor) -> Tensor:
        return (-((x - y) ** 2) * 200).exp()

    with pytest.raises(OptionError, match="too coarse.*larger grid="):
        spectral(narrow, 1.0, 1.0, dim=1, features=4, grid=64)
    spectral(narrow, 1.0, 1.0, dim=1, features=4, grid=512)
    for size in (7, 2, 4098):
        with pytest.raises(OptionError, match="grid must be even"):
            spectral(dot, 1.0, 1.0, dim=1, features=4, grid=size)


def test_a_whole_function_of_more_dimensions_says_what_to_do() -> None:
    with pytest.raises(OptionError, match="separable=True.*sampler="):
        spectral(lambda q, k: (q * k).sum(-1).exp(), 1.0, 1.0, dim=3, features=4)


def test_wrong_shapes_of_user_functions() -> None:
    with pytest.raises(ShapeError, match="sim must give"):
        spectral(lambda x, y: (x * y).sum(), 1.0, 1.0, dim=1, features=4)
    with pytest.raises(ShapeError, match="beta must give"):
        spectral(dot, lambda x: x.square().sum(0).exp(), 1.0, dim=1, features=4)

    def sampler(generator: torch.Generator, n: int) -> tuple[Tensor, Tensor, Tensor]:
        return torch.zeros(n, 3), torch.zeros(n, 3), torch.zeros(n, 1)

    with pytest.raises(ShapeError, match=r"phase of shapes .*\(11,\)\), given .*\(11, 1\)"):
        spectral(None, dim=3, features=22, sampler=sampler, mass=1.0)


@pytest.mark.parametrize(
    ("sim", "options", "message"),
    [
        ("gausian", {}, "did you mean 'gaussian'"),
        ("gaussian", {"features": 7}, "features must be even"),
        ("gaussian", {"dim": 0}, "dim must be an integer"),
        ("gaussian", {"lengthscale": 0.0}, "lengthscale must be positive"),
        ("gaussian", {"nu": 1.5, "grid": 64}, "grid, nu cannot be used with the named similarity"),
        ("gaussian", {"beta": 1.0}, "beta cannot be used"),
        ("laplace", {"draw": "orthogonal"}, "draw cannot be used"),
        ("softmax", {"lengthscale": 2.0}, "lengthscale cannot be used"),
        ("matern", {"nu": -1.0}, "nu must be positive"),
        ("matern", {"draw": "ortogonal"}, "did you mean 'orthogonal'"),
        ("gaussian", {"seed": 1, "generator": torch.Generator()}, "not both"),
        (dot, {"lengthscale": 1.0}, "lengthscale cannot be used with a similarity function"),
        (dot, {"mass": 1.0}, "mass cannot be used"),
        (dot, {"beta": -1.0}, "beta must be a rate"),
        (dot, {"gamma": math.nan}, "gamma must be a rate"),
        (dot, {"separable": True, "extent": math.inf}, "extent must be positive"),
        (None, {}, "needs sampler= and mass="),
        (None, {"sampler": lambda generator, n: None}, "mass= .* must be given"),
        (None, {"sampler": lambda generator, n: None, "mass": -1.0}, "mass must be positive"),
        (dot, {"sampler": lambda generator, n: None, "mass": 1.0}, "sim must be None"),
    ],
)
def test_bad_options(sim: Any, options: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"dim": 3, "features": 4} | options
    with pytest.raises(OptionError, match=message):
        spectral(sim, **arguments)
    if "did you mean" in message:
        with pytest.raises(UnknownNameError):
            spectral(sim, **arguments)
