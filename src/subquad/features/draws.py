r"""Random projections: the directions and lengths of the frequencies ω behind random features.

Positive and trigonometric features both rest on ω ~ N(0, I_D). Such an ω is a direction, uniform on
the sphere, times an independent length |ω| ~ χ_D. The two can be made more even separately:

- ``draw`` couples *directions*: independent, orthogonal within blocks of D, or a simplex;
- ``norms`` sets *lengths*: χ_D (every ω stays exactly N(0, I_D)), or a fixed or stratified law,
  which biases the kernel.

Two properties are relied on elsewhere. A draw is made on the CPU from 64-bit floats, so that it
depends on the seed and on neither the device nor the dtype asked for. And every head has a seed of
its own, so that the draw of head h does not depend on how many heads there are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from subquad.errors import DeviceError, DtypeError, OptionError, UnknownNameError, nearest

__all__ = ["DRAWS", "NORMS", "chi_quantile", "draw_projection"]

DRAWS = ("iid", "orthogonal", "simplex")
NORMS = ("chi", "sqrt_d", "quantile")


def draw_projection(
    num_features: int,
    dim: int,
    *,
    heads: int = 1,
    draw: str = "orthogonal",
    norms: str = "chi",
    seed: int | None = None,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    r"""Draws the projection ω of random features, independently for each head.

    With z = q + k and ω ~ N(0, I_D), the softmax kernel is an expectation (Performer, arXiv
    2009.14794, Lemma 1; scale absorbed into q and k)::

        exp(q·k) = E_ω [ exp(ω·q − |q|²/2) · exp(ω·k − |k|²/2) ] = exp(q·k − |z|²/2) · E_ω exp(ω·z)

    and the mean over the M rows returned here estimates it. For independent rows its variance is
    (exp(|z|²) − 1) exp(2 q·k) / M (Lemma 2).

    **Directions** (``draw``). Rows come in blocks of D; blocks are independent and the last one is
    cut to length, so M may be smaller than D or no multiple of it.

    - ``"iid"``: independent.
    - ``"orthogonal"``: a block is the rows of a Haar matrix: Q of a QR decomposition of a Gaussian
      matrix, in float64, its columns multiplied by the signs of R's diagonal (without which Q is
      not Haar). Unbiased, and of no larger variance than ``"iid"``, in any dimension (Performer,
      Theorem 2, for M ≤ D; orthogonal random features, arXiv 1610.09072).
    - ``"simplex"``: a block is a regular simplex, D unit vectors with pairwise inner product
      −1/(D−1), times a Haar matrix (arXiv 2301.13856, SimRFs; here the simplex is the centred
      standard basis, equal to the paper's up to a rotation, which the Haar matrix absorbs).
      For D = 1 no such simplex exists and the draw is that of ``"orthogonal"``, a random sign.

    **Lengths** (``norms``). A uniform direction u gives E exp(R u·z) = Λ_D(R|z|), with
    Λ_D(t) = Γ(D/2) (2/t)^(D/2−1) I_(D/2−1)(t) = Σ_n (t²/4)^n / (n! (D/2)_n).

    - ``"chi"``: independent, |ω| ~ χ_D: each row is marginally N(0, I_D), the estimate *unbiased*.
    - ``"sqrt_d"``: |ω| = √D exactly, hence E|ω|² = D. *Biased*: the kernel becomes
      exp(q·k − |z|²/2) Λ_D(√D|z|), below exp(q·k) for z ≠ 0, since (D/2)^n ≤ (D/2)_n turns every
      term of Λ_D(√D|z|) into at most (|z|²/2)^n / n!.
    - ``"quantile"``: the lengths R_i solve P_D(r ≤ R_i) = i/(M+1), i = 1…M, for the law of χ_D, and
      are dealt to the rows by a random permutation per head. *Biased*: the kernel becomes
      exp(q·k − |z|²/2) · mean_i Λ_D(R_i|z|): the tail beyond the last quantile is missing, which
      is what most of exp(ω·z) lives on; the bias vanishes as M → ∞.

    Args:
        num_features: M, the number of rows, ≥ 1.
        dim: D, the width of a head, ≥ 1.
        heads: H, the number of independent draws, ≥ 1.
        draw: ``"iid"``, ``"orthogonal"`` or ``"simplex"``.
        norms: ``"chi"``, ``"sqrt_d"`` or ``"quantile"``.
        seed: any integer, taken modulo 2^64; 0 if neither it nor ``generator`` is given.
        generator: a CPU generator to take the seed from instead; it advances by one number, however
            many heads there are.
        dtype: a floating dtype; the draw is made in float64 and cast.
        device: where the result goes; the draw is made on the CPU.

    Returns:
        ω (H, M, D).

    Raises:
        UnknownNameError: ``draw`` or ``norms`` does not exist; suggests the nearest.
        OptionError: a size is not a positive integer, or both ``seed`` and ``generator`` are given.
        DtypeError: ``dtype`` is not a real floating dtype.
        DeviceError: ``generator`` is not a CPU generator.

    Example:
        >>> omega = draw_projection(5, 3, heads=2, norms="sqrt_d", seed=7, dtype=torch.float64)
        >>> omega.shape
        torch.Size([2, 5, 3])
        >>> block = omega[0, :3]  # the first block of D = 3 rows: orthogonal, of length √3
        >>> torch.allclose(block @ block.T, 3 * torch.eye(3, dtype=torch.float64))
        True
        >>> one = draw_projection(5, 3, heads=1, norms="sqrt_d", seed=7, dtype=torch.float64)
        >>> torch.equal(one[0], omega[0])  # a head's draw does not depend on the number of heads
        True
    """
    for name, size in (("num_features", num_features), ("dim", dim), ("heads", heads)):
        _positive_integer(name, size)
    for name, choice, choices in (("draw", draw, DRAWS), ("norms", norms, NORMS)):
        if choice not in choices:
            raise UnknownNameError(
                f"{name}={choice!r} does not exist{nearest(str(choice), choices)}; "
                f"choices: {', '.join(choices)}"
            )
    if not dtype.is_floating_point:
        raise DtypeError(f"dtype must be a real floating dtype, given {dtype}")
    base = _base_seed(seed, generator)
    fixed = _fixed_lengths(num_features, dim, norms)
    rows = []
    for head in range(heads):
        source = torch.Generator(device="cpu").manual_seed(_sub_seed(base, head))
        direction = _directions(num_features, dim, draw, source)
        if draw == "iid" and norms == "chi":
            rows.append(direction)
            continue
        if fixed is None:  # a χ_D length is the length of another Gaussian vector
            lengths = _normal((num_features, dim), source).norm(dim=-1)
        else:
            lengths = fixed[torch.randperm(num_features, generator=source, device="cpu")]
        direction = direction / direction.norm(dim=-1, keepdim=True)
        rows.append(direction * lengths.unsqueeze(-1))
    return torch.stack(rows).to(device=device, dtype=dtype)


def chi_quantile(probability: Tensor, dof: float) -> Tensor:
    r"""Inverts the distribution function of the χ law, P(r ≤ R) = p, in float64.

    The law of the length of a standard normal vector in ``dof`` dimensions, density ∝
    r^(dof−1) exp(−r²/2); substituting s = r²/2 gives P(r ≤ R) = gammainc(dof/2, R²/2), the
    regularised lower incomplete gamma function. The root is bracketed by doubling and bisected
    until the bracket can shrink no more, so the result is as exact as `torch.special.gammainc`:
    a few units in the last place up to dof = 40, about 1e-10 relative above.

    Args:
        probability: p (…), each in [0, 1).
        dof: degrees of freedom, > 0; need not be an integer.

    Returns:
        R (…), float64, on the CPU.

    Raises:
        OptionError: a probability lies outside [0, 1), or ``dof`` is not positive and finite.

    Example:
        In two dimensions P(r ≤ R) = 1 − exp(−R²/2), hence R = √(−2 log(1 − p)):

        >>> r = chi_quantile(torch.tensor([0.25, 0.5]), 2)
        >>> [round(x, 6) for x in r.tolist()]
        [0.758528, 1.17741]
    """
    if not (dof > 0 and math.isfinite(dof)):
        raise OptionError(f"dof must be positive and finite, given {dof}")
    p = probability.detach().to(device="cpu", dtype=torch.float64)
    if not bool(((p >= 0) & (p < 1)).all()):
        raise OptionError("probabilities must lie in [0, 1)")
    shape = torch.tensor(dof / 2, dtype=torch.float64, device="cpu")
    low = torch.zeros_like(p)
    high = torch.full_like(p, math.sqrt(dof) + 1.0)
    while bool((short := torch.special.gammainc(shape, high.square() / 2) < p).any()):
        high = torch.where(short, 2 * high, high)
    while True:
        middle = (low + high) / 2
        if bool(((middle <= low) | (middle >= high)).all()):
            return middle
        below = torch.special.gammainc(shape, middle.square() / 2) < p
        low = torch.where(below, middle, low)
        high = torch.where(below, high, middle)


def _directions(num_features: int, dim: int, draw: str, source: torch.Generator) -> Tensor:
    """Directions (M, D) in float64; not normalised where ``draw`` is iid."""
    if draw == "iid":
        return _normal((num_features, dim), source)
    blocks = -(-num_features // dim)
    q: Tensor
    q, r = torch.linalg.qr(_normal((blocks, dim, dim), source))
    diagonal = r.diagonal(dim1=-2, dim2=-1)
    # not torch.sign: a zero, however unlikely, must not erase a column
    q = q * torch.where(diagonal < 0, -1.0, 1.0).to(q.dtype).unsqueeze(-2)
    if draw == "simplex" and dim > 1:
        vertex = torch.eye(dim, dtype=q.dtype, device="cpu") - 1.0 / dim
        q = (vertex / vertex.norm(dim=-1, keepdim=True)) @ q
    return q.reshape(blocks * dim, dim)[:num_features]


def _fixed_lengths(num_features: int, dim: int, norms: str) -> Tensor | None:
    """Lengths (M,) in float64 that every head deals to its rows; None where they are random."""
    if norms == "sqrt_d":
        return torch.full((num_features,), math.sqrt(dim), dtype=torch.float64, device="cpu")
    if norms == "quantile":
        rank = torch.arange(1, num_features + 1, dtype=torch.float64, device="cpu")
        return chi_quantile(rank / (num_features + 1), dim)
    return None


def _normal(shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=source, dtype=torch.float64, device="cpu")


def _positive_integer(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise OptionError(f"{name} must be an integer of at least 1, given {value!r}")


def _base_seed(seed: int | None, generator: torch.Generator | None) -> int:
    """The one number a draw depends on, in [0, 2^64)."""
    if generator is None:
        if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
            raise OptionError(f"seed must be an integer, given {seed!r}")
        return (seed or 0) % 2**64
    if seed is not None:
        raise OptionError(f"give seed or generator, not both (seed={seed}, and a generator)")
    if generator.device.type != "cpu":
        raise DeviceError(
            f"generator must be a CPU generator, given one on {generator.device}: draws are made "
            "on the CPU, so that they do not depend on the device"
        )
    return int(torch.randint(2**63 - 1, (), generator=generator, device="cpu").item())


def _sub_seed(base: int, index: int) -> int:
    """The seed of one head: for a given base, distinct for distinct indices below 2^32.

    `torch.Generator` keeps the low 32 bits of its seed alone, so the base is hashed to 32 bits
    (splitmix64), combined with the index and mixed by murmur3's finaliser, which is a bijection.
    """
    x = (base + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    x = ((x ^ (x >> 31)) ^ index) % 2**32
    x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
    x = (x ^ (x >> 13)) * 0xC2B2AE35 % 2**32
    return x ^ (x >> 16)
