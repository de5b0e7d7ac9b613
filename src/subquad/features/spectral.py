r"""Random Fourier features for any similarity: the general recipe behind linear attention.

Random features are not a coincidence of exp(q·k). For any sim(q, k), choose decays β and γ under
which β(q) γ(k) sim(q, k) has a Fourier transform F(ω_q, ω_k), and invert it:

    sim(q, k) = 1/(β(q) γ(k)) · ∫ F(ω_q, ω_k) exp(i ω_q·q + i ω_k·k) dω_q dω_k.

F need not be positive, nor real. With Z = ∫|F| and θ = arg F, |F|/Z is a density to draw
frequencies from, and θ stays behind as a phase. sim is real, so the real part alone is kept:

    sim(q, k) = Z/(β(q) γ(k)) · E cos(ω_q·q + ω_k·k + θ),

and the mean of M/2 draws estimates it without bias. cos(a + b) = cos a cos b − sin a sin b makes
each draw two features of q and two of k: the sum over keys is linear in the length.

Two prices, against the positive features of exp(q·k): there are two frequencies to draw, which
costs variance, save where sim depends on q − k alone (then ω_k = −ω_q); and the estimate of a
positive sim may be negative.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from subquad.errors import OptionError, ShapeError, UnknownNameError, nearest
from subquad.features.draws import (
    _base_seed,
    _positive_integer,
    _sub_seed,
    chi_quantile,
    draw_projection,
)

__all__ = ["SIMILARITIES", "SpectralMap", "spectral"]

_NAMED_OPTIONS = {
    "gaussian": {"lengthscale", "draw"},
    "laplace": {"lengthscale"},
    "matern": {"lengthscale", "draw", "nu"},
    "softmax": {"draw"},
}
SIMILARITIES = tuple(_NAMED_OPTIONS)

Coordinate = Callable[[Tensor], Tensor]
Similarity = Callable[[Tensor, Tensor], Tensor]
Sampler = Callable[[torch.Generator, int], tuple[Tensor, Tensor, Tensor]]

_TOLERANCE = 1e-3  # of the integrand's peak: at the grid's edge, and midway between grid points
_MAX_POINTS = 2**24


@dataclasses.dataclass(frozen=True)
class _Decay:
    """log β(x) = −rate·|x|²; a class, so that maps can be pickled and copied."""

    rate: float

    def __call__(self, x: Tensor) -> Tensor:
        return -self.rate * x.square().sum(-1)


@dataclasses.dataclass(frozen=True)
class _Product:
    """log β(x) = Σ_i log b(x_i) for a coordinate function b."""

    coordinate: Coordinate

    def __call__(self, x: Tensor) -> Tensor:
        return self.coordinate(x).log().sum(-1)


@dataclasses.dataclass(frozen=True, eq=False)
class SpectralMap:
    r"""Bounded random features of q and k whose product estimates a similarity; see `spectral`.

    query(q)·key(k) is the mean over the M/2 frequencies of cos(ω_q·q + ω_k·k + θ), within [−1, 1],
    and sim(q, k) ≈ Z · query(q)·key(k) / (β(q) γ(k)).

    The estimate is **not positive**, even where sim is: a normaliser Σ_s query(q)·key(k_s)/γ(k_s)
    may come near zero or change sign, and dividing by it then means nothing. An attention engine
    that uses this map clips the normaliser, as it documents (the "clip" such features are known to
    need); the map itself changes nothing. In attention Z and β(q) cancel: 1/γ(k) alone weighs keys.

    Attributes:
        omega_q: ω_q (M/2, D).
        omega_k: ω_k (M/2, D).
        phase: θ (M/2,).
        log_mass: log Z.
        log_beta: log β, (…, D) → (…).
        log_gamma: log γ, (…, D) → (…).
        extent: where not None, the representation is periodic, and holds where every coordinate of
            q and k lies in [−extent, extent].
    """

    omega_q: Tensor
    omega_k: Tensor
    phase: Tensor
    log_mass: float
    log_beta: Coordinate
    log_gamma: Coordinate
    extent: float | None = None

    @property
    def mass(self) -> float:
        """Z = ∫|F|; infinite where it exceeds the range of a float (`log_mass` does not)."""
        return math.exp(self.log_mass) if self.log_mass < 709.0 else math.inf

    @property
    def dim(self) -> int:
        """D, the width of q and k."""
        return self.omega_q.shape[-1]

    @property
    def features(self) -> int:
        """M, two for each frequency."""
        return 2 * self.omega_q.shape[0]

    def query(self, q: Tensor) -> Tensor:
        """Features of queries, [cos(ω_q·q + θ), −sin(ω_q·q + θ)] · √(2/M).

        Args:
            q: queries (…, D).

        Returns:
            (…, M), of norm 1, in the dtype ``q`` and the frequencies promote to.

        Raises:
            ShapeError: the last dimension of ``q`` is not D.
        """
        angle = self._angle(q, self.omega_q, "q")
        angle = angle + self.phase.to(angle)
        return torch.cat((angle.cos(), -angle.sin()), dim=-1) * math.sqrt(2 / self.features)

    def key(self, k: Tensor) -> Tensor:
        """Features of keys, [cos(ω_k·k), sin(ω_k·k)] · √(2/M).

        Args:
            k: keys (…, D).

        Returns:
            (…, M), of norm 1, in the dtype ``k`` and the frequencies promote to.

        Raises:
            ShapeError: the last dimension of ``k`` is not D.
        """
        angle = self._angle(k, self.omega_k, "k")
        return torch.cat((angle.cos(), angle.sin()), dim=-1) * math.sqrt(2 / self.features)

    def kernel(self, q: Tensor, k: Tensor) -> Tensor:
        """The estimate of sim for every pair, Z · query(q)·key(k) / (β(q) γ(k)).

        Args:
            q: queries (…, L, D).
            k: keys (…, S, D).

        Returns:
            (…, L, S); entries may be negative, see the class.

        Raises:
            ShapeError: a last dimension is not D.
        """
        cosine = self.query(q) @ self.key(k).transpose(-1, -2)
        log_beta = self.log_beta(q.to(cosine.dtype)).unsqueeze(-1)
        log_gamma = self.log_gamma(k.to(cosine.dtype)).unsqueeze(-2)
        return cosine * (self.log_mass - log_beta - log_gamma).exp()

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> SpectralMap:
        """The same map with its frequencies and phases on another device, in another dtype."""
        return dataclasses.replace(
            self,
            omega_q=self.omega_q.to(device=device, dtype=dtype),
            omega_k=self.omega_k.to(device=device, dtype=dtype),
            phase=self.phase.to(device=device, dtype=dtype),
        )

    def _angle(self, x: Tensor, omega: Tensor, name: str) -> Tensor:
        if x.ndim < 1 or x.shape[-1] != self.dim:
            raise ShapeError(f"{name} must be (..., {self.dim}), given {tuple(x.shape)}")
        dtype = torch.promote_types(x.dtype, omega.dtype)
        return x.to(dtype) @ omega.to(dtype).transpose(-1, -2)


def spectral(
    sim: str | Similarity | None,
    beta: Coordinate | float | None = None,
    gamma: Coordinate | float | None = None,
    *,
    dim: int,
    features: int,
    lengthscale: float | None = None,
    nu: float | None = None,
    draw: str | None = None,
    separable: bool = False,
    extent: float | None = None,
    grid: int | None = None,
    sampler: Sampler | None = None,
    mass: float | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> SpectralMap:
    r"""Builds random Fourier features of any similarity; the module's text derives them.

    There are four ways to say which one.

    **By name**, a function of q − k, one frequency a draw (ω_k = −ω_q, θ = 0, Z = 1), ℓ the
    lengthscale (random Fourier features, Rahimi and Recht 2007):

    ============ ==================================================== =============================
    name         sim(q, k), r = |q − k|                               law of ω
    ============ ==================================================== =============================
    "gaussian"   exp(−r²/2ℓ²)                                         N(0, I/ℓ²)
    "laplace"    exp(−Σ_i |q_i − k_i|/ℓ)                              Cauchy in each coordinate, /ℓ
    "matern"     2^(1−ν)/Γ(ν) · t^ν K_ν(t), t = √(2ν) r/ℓ             t with 2ν degrees, /ℓ
    "softmax"    exp(q·k), β = γ = exp(−|x|²/2)                       N(0, I)
    ============ ==================================================== =============================

    "softmax" is β(q) γ(k) sim(q, k) = exp(−|q − k|²/2): the decay that leaves a single frequency
    (the trigonometric estimator of Performer, arXiv 2009.14794, Section 2.3).

    **By coordinates**, ``separable=True`` (implied for D = 1): sim(q, k) = Π_i s(q_i, k_i), where
    ``sim`` is s, called elementwise on float64 tensors. β and γ are products over coordinates too.
    The integrand g(x, y) = b(x) c(y) s(x, y) is sampled on a grid over the box [−T, T)² and
    transformed by FFT. Its discrete frequencies are no approximation: on the grid's points, g is
    *exactly* the trigonometric sum of its N² coefficients, between them it differs by the aliasing
    error, and outside the box the sum repeats itself. Hence the frequencies are drawn from the grid
    itself, independently for each coordinate, with phase θ = Σ_i θ_i and Z = z^D. Note how Z grows
    where F is not positive: with D = 64 and z = 1.1 it is 446, and so is the error.

    **By a whole function**, D = 2 only: ``sim`` takes q (…, 2) and k (…, 2) and gives (…); the grid
    is in four dimensions. For a larger D a grid is out of reach.

    **By a sampler**, for a transform known in closed form: ``sampler(generator, n)`` gives ω_q
    (n, D), ω_k (n, D) and θ (n,), drawn from |F|/Z, and ``mass`` is Z. ``sim`` is then None.

    **The decay.** A grid needs β(q) γ(k) sim(q, k) to vanish at its edge; this is checked. A larger
    rate λ in β = γ = exp(−λ|x|²) (written ``beta=λ``) makes it so for many a sim, but the estimate
    is divided by β(q) γ(k): its standard deviation is at most Z/(β(q) γ(k)) · √(2/M). For exp(q·k),
    λ must exceed 1/2.

    Args:
        sim: a name, a function, or None with ``sampler``.
        beta: β: a rate λ ≥ 0 for exp(−λ|x|²); or a positive coordinate function b, β(x) = Π b(x_i);
            None for β = 1.
        gamma: γ, likewise.
        dim: D.
        features: M, even; M/2 frequencies are drawn.
        lengthscale: ℓ > 0 of a named similarity, 1 if not given.
        nu: ν > 0 of "matern", 1.5 if not given.
        draw: how directions are coupled for "gaussian", "matern" and "softmax", as in
            `draw_projection`; "orthogonal" if not given.
        separable: ``sim`` is a coordinate function.
        extent: T, half the box; 6 if not given.
        grid: N, an even number of points a dimension; if not given 256, or 32 for a whole function
            with D = 2.
        sampler: see above.
        mass: Z > 0, with ``sampler``.
        seed: any integer; 0 if neither it nor ``generator`` is given.
        generator: a CPU generator to take the seed from instead; it advances by one number.
        dtype: of the frequencies and phases; they are drawn in float64.
        device: where they go; they are drawn on the CPU.

    Returns:
        the `SpectralMap`.

    Raises:
        UnknownNameError: no similarity, or no draw, has this name; suggests the nearest.
        OptionError: an option is out of range or does not apply; the integrand has not decayed at
            the grid's edge; the grid is too coarse for it; a whole function with D > 2.
        ShapeError: ``sim``, a coordinate function or ``sampler`` gives a wrong shape.

    Example:
        >>> q = torch.tensor([[0.3, -0.2]])
        >>> k = torch.tensor([[0.1, 0.5], [0.4, 0.0]])
        >>> softmax = spectral(
        ...     lambda x, y: (x * y).exp(), 1.0, 1.0, dim=2, features=2**16, separable=True
        ... )
        >>> (softmax.kernel(q, k) - (q @ k.T).exp()).abs().max().item() < 0.05
        True
        >>> named = spectral("softmax", dim=2, features=2**16)
        >>> (named.kernel(q, k) - (q @ k.T).exp()).abs().max().item() < 0.05
        True
    """
    _positive_integer("dim", dim)
    _positive_integer("features", features)
    if features % 2:
        raise OptionError(f"features must be even (a cosine and a sine each), given {features}")
    number = features // 2
    base = _base_seed(seed, generator)
    # stream 0 is the one `draw_projection` takes for a first head
    source = torch.Generator(device="cpu").manual_seed(_sub_seed(base, 1))
    options: dict[str, object] = {
        "beta": beta,
        "gamma": gamma,
        "lengthscale": lengthscale,
        "nu": nu,
        "draw": draw,
        "separable": separable or None,
        "extent": extent,
        "grid": grid,
        "sampler": sampler,
        "mass": mass,
    }
    box: float | None = None
    if isinstance(sim, str):
        if sim not in SIMILARITIES:
            raise UnknownNameError(
                f"no similarity is named {sim!r}{nearest(sim, SIMILARITIES)}; "
                f"names: {', '.join(SIMILARITIES)}; or give a function"
            )
        _reject(options, _NAMED_OPTIONS[sim], f"the named similarity {sim!r}")
        scale = 1.0 if lengthscale is None else _positive("lengthscale", lengthscale)
        omega_q = _named(sim, number, dim, nu, draw, base, source) / scale
        omega_k, phase, log_mass = -omega_q, torch.zeros_like(omega_q[:, 0]), 0.0
        decay = _Decay(0.5 if sim == "softmax" else 0.0)
        log_beta: Coordinate = decay
        log_gamma: Coordinate = decay
    else:
        log_beta, log_gamma = _decay("beta", beta), _decay("gamma", gamma)
        if sampler is not None:
            _reject(options, {"beta", "gamma", "sampler", "mass"}, "a sampler")
            if sim is not None or mass is None:
                raise OptionError("with sampler=, sim must be None and mass= (Z) must be given")
            log_mass = math.log(_positive("mass", mass))
            omega_q, omega_k, phase = _sampled(sampler, source, number, dim)
        elif sim is None:
            raise OptionError("sim=None needs sampler= and mass=")
        else:
            _reject(
                options, {"beta", "gamma", "separable", "extent", "grid"}, "a similarity function"
            )
            separable = separable or dim == 1
            if not separable and dim > 2:
                raise OptionError(
                    f"a grid over q and k of dimension {dim} has {2 * dim} dimensions, which is "
                    "out of reach. Give a coordinate function with separable=True where "
                    "sim(q, k) = Π_i s(q_i, k_i), or sampler= and mass= where the Fourier "
                    "transform is known"
                )
            box = 6.0 if extent is None else _positive("extent", extent)
            size = (256 if separable else 32) if grid is None else grid
            _positive_integer("grid", size)
            axes = 1 if separable else 2  # coordinates of q, and of k, that share a grid
            if size % 2 or size < 4 or size ** (2 * axes) > _MAX_POINTS:
                raise OptionError(
                    f"grid must be even, at least 4, and have at most {_MAX_POINTS} points in "
                    f"{2 * axes} dimensions, given {size}"
                )
            coefficients = _grid_coefficients(sim, log_beta, log_gamma, axes, box, size)
            omega_q, omega_k, phase, log_mass = _draw_from_grid(
                coefficients, box, number, dim, source
            )
    return SpectralMap(
        omega_q=omega_q.to(device=device, dtype=dtype),
        omega_k=omega_k.to(device=device, dtype=dtype),
        phase=phase.to(device=device, dtype=dtype),
        log_mass=log_mass,
        log_beta=log_beta,
        log_gamma=log_gamma,
        extent=box,
    )


def _named(
    sim: str,
    number: int,
    dim: int,
    nu: float | None,
    draw: str | None,
    base: int,
    source: torch.Generator,
) -> Tensor:
    """Frequencies (number, D) of a named similarity with lengthscale 1."""
    if sim == "laplace":
        u = torch.rand((number, dim), generator=source, dtype=torch.float64, device="cpu")
        cauchy: Tensor = (math.pi * (u - 0.5)).tan()
        return cauchy
    omega = draw_projection(
        number, dim, draw=draw or "orthogonal", seed=base, dtype=torch.float64
    ).squeeze(0)
    if sim == "matern":
        # a multivariate t is N(0, I)·√(2ν/χ²_2ν), one χ² for all coordinates of a frequency
        dof = 2 * (1.5 if nu is None else _positive("nu", nu))
        u = torch.rand(number, generator=source, dtype=torch.float64, device="cpu")
        chi = chi_quantile(u, dof).clamp_min(torch.finfo(torch.float64).tiny)
        omega = omega * (math.sqrt(dof) / chi).unsqueeze(-1)
    return omega


def _sampled(
    sampler: Sampler, source: torch.Generator, number: int, dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    given = sampler(source, number)
    expected = ((number, dim), (number, dim), (number,))
    shapes = tuple(tuple(part.shape) for part in given)
    if shapes != expected:
        raise ShapeError(
            f"sampler must return omega_q, omega_k, phase of shapes {expected}, given {shapes}"
        )
    return given


def _grid_coefficients(
    sim: Similarity,
    log_beta: Coordinate,
    log_gamma: Coordinate,
    axes: int,
    extent: float,
    size: int,
) -> Tensor:
    """Fourier coefficients (N,)*2·axes of β γ sim on a box; checks both ends of the resolution.

    With h = 2T/N, x_a = (a − N/2) h and ω_j = π j/T, in FFT order,
    g(x) = Σ_j c_j exp(i ω_j·x) holds exactly for every grid point x.
    """
    every = tuple(range(2 * axes))
    values = _integrand(sim, log_beta, log_gamma, axes, extent, size, shift=0.0)
    peak = float(values.abs().max().item())
    if peak == 0:
        raise OptionError("β(q) γ(k) sim(q, k) is zero on the whole grid; lower the decay")
    faces = [values.select(axis, end) for axis in every for end in (0, size - 1)]
    edge = max(float(face.abs().max().item()) for face in faces) / peak
    if edge > _TOLERANCE:
        raise OptionError(
            f"β(q) γ(k) sim(q, k) has not decayed at the grid's edge: at ±{extent:g} it is still "
            f"{edge:.2g} of its peak (limit {_TOLERANCE:g}). Use a larger decay in beta and gamma "
            f"(for instance a larger rate λ), or a larger extent="
        )
    coefficients: Tensor = torch.fft.fftn(torch.fft.ifftshift(values, dim=every), dim=every)
    coefficients = coefficients / values.numel()
    # the same sum midway between the points, against the integrand there: the aliasing error
    frequency = _frequencies(extent, size)
    turn = torch.polar(torch.ones_like(frequency), frequency * (extent / size))
    moved = coefficients
    for axis in every:
        moved = moved * turn.reshape([-1 if axis == other else 1 for other in every])
    midway = torch.fft.fftshift(torch.fft.ifftn(moved, dim=every), dim=every).real * values.numel()
    truth = _integrand(sim, log_beta, log_gamma, axes, extent, size, shift=0.5)
    error = float((midway - truth).abs().max().item()) / peak
    if error > _TOLERANCE:
        raise OptionError(
            f"the grid is too coarse: between its points β(q) γ(k) sim(q, k) is off by {error:.2g} "
            f"of its peak (limit {_TOLERANCE:g}). Use a larger grid= (given {size}), or a smaller "
            "extent= or decay; kinks and jumps in sim need many points"
        )
    return coefficients


def _integrand(
    sim: Similarity,
    log_beta: Coordinate,
    log_gamma: Coordinate,
    axes: int,
    extent: float,
    size: int,
    shift: float,
) -> Tensor:
    """β γ sim on the grid, (N,)*2·axes in float64; ``shift`` moves the points by a fraction."""
    index = torch.arange(size, dtype=torch.float64, device="cpu") - size // 2 + shift
    axis = index * (2 * extent / size)
    points = torch.stack(torch.meshgrid(*[axis] * (2 * axes), indexing="ij"), dim=-1)
    x, y = points[..., :axes], points[..., axes:]
    value = sim(x.squeeze(-1), y.squeeze(-1)) if axes == 1 else sim(x, y)
    log_b, log_c = log_beta(x), log_gamma(y)
    for name, part in (("sim", value), ("beta", log_b), ("gamma", log_c)):
        if tuple(part.shape) != tuple(points.shape[:-1]):
            raise ShapeError(
                f"{name} must give {tuple(points.shape[:-1])} for arguments of shape "
                f"{tuple(x.shape[:-1] if axes == 1 else x.shape)}, gave {tuple(part.shape)}"
            )
    # in logarithms where sim's own size would overflow against a decay that underflows
    size_log = value.abs().log() + log_b + log_c
    result = value.sign() * size_log.exp()
    if not bool(result.isfinite().all()):
        raise OptionError(
            "β(q) γ(k) sim(q, k) is not finite on the grid: check that beta and gamma are positive "
            "and that sim does not overflow there, or use a smaller extent="
        )
    return result


def _frequencies(extent: float, size: int) -> Tensor:
    """ω_j = π j/T in FFT order, (N,)."""
    step = 2 * extent / size
    cycles: Tensor = torch.fft.fftfreq(size, step, dtype=torch.float64, device="cpu")
    return 2 * math.pi * cycles


def _draw_from_grid(
    coefficients: Tensor, extent: float, number: int, dim: int, source: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Draws ω_q, ω_k (number, D) and θ (number,) from |c|/Σ|c|; and log Z."""
    axes = coefficients.ndim // 2
    flat = coefficients.flatten()
    cumulative = flat.abs().cumsum(0)
    total = float(cumulative[-1].item())
    draws = dim // axes  # independent draws a frequency: one for each coordinate, or a single one
    u = torch.rand((number, draws), generator=source, dtype=torch.float64, device="cpu") * total
    # right=True: the first entry whose cumulative mass exceeds u, hence of positive mass
    chosen = torch.searchsorted(cumulative, u, right=True)
    phase = flat.angle()[chosen].sum(-1).remainder(2 * math.pi)
    frequency = _frequencies(extent, coefficients.shape[0])
    parts = [frequency[index] for index in torch.unravel_index(chosen, coefficients.shape)]
    omega_q = torch.stack(parts[:axes], dim=-1).reshape(number, dim)
    omega_k = torch.stack(parts[axes:], dim=-1).reshape(number, dim)
    return omega_q, omega_k, phase, draws * math.log(total)


def _decay(name: str, given: Coordinate | float | None) -> Coordinate:
    if given is None:
        return _Decay(0.0)
    if callable(given):
        return _Product(given)
    if isinstance(given, bool) or not (given >= 0 and math.isfinite(given)):
        raise OptionError(
            f"{name} must be a rate λ ≥ 0, meaning exp(−λ|x|²), or a coordinate function, "
            f"given {given!r}"
        )
    return _Decay(float(given))


def _positive(name: str, value: float) -> float:
    if not (value > 0 and math.isfinite(value)):
        raise OptionError(f"{name} must be positive and finite, given {value!r}")
    return float(value)


def _reject(options: dict[str, object], allowed: set[str], what: str) -> None:
    """Options that are given and would be ignored are errors, all named at once."""
    wrong = sorted(name for name in options.keys() - allowed if options[name] is not None)
    if wrong:
        raise OptionError(
            f"{', '.join(wrong)} cannot be used with {what}; it takes "
            f"{', '.join(sorted(allowed)) or 'no options'}"
        )
