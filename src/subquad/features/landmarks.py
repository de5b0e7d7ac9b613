r"""Gaussian landmark features: similarity to a few anchors taken from the data.

The kernel view of linear attention with a feature map one can read: coordinate i of φ(x) says how
close x lies to the anchor a_i,

    φ_i(x) = exp(−|x − a_i|² / 2σ²),        out_l = Σ_s φ(q_l)·φ(k_s) v_s / Σ_s φ(q_l)·φ(k_s).

The implied kernel φ(q)·φ(k) = Σ_i exp(−(|q − a_i|² + |k − a_i|²) / 2σ²) is positive, and is *not*
an estimate of the softmax kernel: q and k attend to each other where they are near a common anchor.

**First worked example**: five tokens of dimension 3. The features are often written for it as
(0.01, 0.04, 0.09) for (0.1, 0.2, 0.3) and so on; that squares each entry and is no Gaussian
similarity, there being no anchor. With the first, third and fifth token as anchors, and σ = 0.5:

    >>> import torch
    >>> x = torch.arange(1, 16, dtype=torch.float64).reshape(5, 3) / 10  # The quick brown fox jumps
    >>> phi = landmark_features(x, x[[0, 2, 4]], sigma=0.5)
    >>> for row in phi.tolist():
    ...     print(*(f"{value:.5f}" for value in row))
    1.00000 0.11533 0.00018
    0.58275 0.58275 0.00775
    0.11533 1.00000 0.11533
    0.00775 0.58275 0.58275
    0.00018 0.11533 1.00000

and the attention output is a mean of the values, hence divided by the sum of the weights, in a
number of operations linear in the length (q = k = v = x; φᵀv and Σφ are formed once):

    >>> out = (phi @ (phi.T @ x)) / (phi @ phi.sum(0)).unsqueeze(-1)
    >>> for row in out.tolist():
    ...     print(*(f"{value:.5f}" for value in row))
    0.31049 0.41049 0.51049
    0.51524 0.61524 0.71524
    0.70000 0.80000 0.90000
    0.88476 0.98476 1.08476
    1.08951 1.18951 1.28951

The middle token lies symmetrically and keeps its place; without the division the rows would be
multiplied by their total weight.

**Second worked example**: x = (0.1, 0.2, 0.3), three anchors, σ = 0.5. |x − a|² is 0.03, 0.27 and
1.08, hence φ = exp(−0.06), exp(−0.54), exp(−2.16); the last is 0.11533 (0.11505 is a slip):

    >>> anchors = torch.tensor([[0.0, 0.1, 0.2], [0.4, 0.5, 0.6], [0.7, 0.8, 0.9]])
    >>> phi = landmark_features(torch.tensor([0.1, 0.2, 0.3]), anchors, sigma=0.5)
    >>> print(*(f"{value:.5f}" for value in phi.tolist()))
    0.94176 0.58275 0.11533
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from subquad.errors import DeviceError, DtypeError, OptionError, ShapeError

__all__ = ["kmeans_anchors", "landmark_features", "log_landmark_features", "sample_anchors"]


def landmark_features(x: Tensor, anchors: Tensor, sigma: float) -> Tensor:
    r"""Gaussian similarity of each row to each anchor, φ_i(x) = exp(−|x − a_i|² / 2σ²).

    Features lie in [0, 1]. A row farther than about 14σ (float32) from every anchor has features
    that all underflow to zero; `log_landmark_features` keeps them.

    Args:
        x: rows (…, D), for instance (B, H, L, D).
        anchors: a (…, M, D); its leading dimensions broadcast against those of ``x`` before the
            row dimension, so (M, D) serves any ``x`` and (H, M, D) serves (B, H, L, D).
        sigma: σ, the width of the Gaussian, positive and finite.

    Returns:
        φ (…, M), in the dtype ``x`` and ``anchors`` promote to (the exponent is computed in
        float32 at least).

    Raises:
        ShapeError: ``anchors`` has no (M, D) dimensions, or D differs.
        OptionError: ``sigma`` is not positive and finite.

    Example:
        >>> a = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
        >>> landmark_features(torch.tensor([0.0, 0.0]), a, sigma=5.0)  # exp(0), exp(−25/50)
        tensor([1.0000, 0.6065])
    """
    phi = log_landmark_features(x, anchors, sigma).exp()
    return phi.to(torch.promote_types(x.dtype, anchors.dtype))


def log_landmark_features(x: Tensor, anchors: Tensor, sigma: float) -> Tensor:
    r"""The logarithm of `landmark_features`, log φ_i(x) = −|x − a_i|² / 2σ², free of underflow.

    |x − a|² is expanded to a matrix product after the anchors' mean is subtracted from both, which
    leaves it unchanged and avoids the cancellation that a common offset would cause.

    Args:
        x: rows (…, D).
        anchors: a (…, M, D), see `landmark_features`.
        sigma: σ, positive and finite.

    Returns:
        log φ (…, M), each ≤ 0, in float32 at least: a half-precision exponent is too coarse.

    Raises:
        ShapeError, OptionError: as `landmark_features`.

    Example:
        >>> a = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
        >>> log_landmark_features(torch.tensor([0.0, 0.0]), a, sigma=0.1)[1].item()
        -1250.0
    """
    if anchors.ndim < 2 or x.ndim < 1 or anchors.shape[-1] != x.shape[-1]:
        raise ShapeError(
            f"anchors must be (..., M, D) with the D of x (..., D), given anchors "
            f"{tuple(anchors.shape)} and x {tuple(x.shape)}"
        )
    if not (sigma > 0 and math.isfinite(sigma)):
        raise OptionError(f"sigma must be positive and finite, given {sigma}")
    dtype = torch.promote_types(torch.promote_types(x.dtype, anchors.dtype), torch.float32)
    single = x.ndim == 1
    rows, a = x.to(dtype), anchors.to(dtype)
    rows = rows.unsqueeze(0) if single else rows
    centre = a.mean(dim=-2, keepdim=True)
    rows, a = rows - centre, a - centre
    square = rows.square().sum(-1, keepdim=True) + a.square().sum(-1).unsqueeze(-2)
    # a distance is not negative; at x = a, where rounding may make it so, the gradient is 0 too
    square = (square - 2 * rows @ a.transpose(-1, -2)).clamp_min(0)
    result = square * (-0.5 / sigma**2)
    return result.squeeze(-2) if single else result


def sample_anchors(x: Tensor, m: int, generator: torch.Generator | None = None) -> Tensor:
    """Takes m rows of x as anchors, uniformly and without replacement.

    Args:
        x: rows (…, N, D); each leading index, for instance a head, has a sample of its own.
        m: M, the number of anchors, 1 ≤ M ≤ N.
        generator: a CPU generator; one seeded with 0 if not given.

    Returns:
        anchors (…, M, D), detached, on the device and in the dtype of ``x``.

    Raises:
        ShapeError: ``x`` has no (N, D) dimensions.
        OptionError: ``m`` is not a positive integer, ``x`` has fewer rows than m, or holds a NaN
            or an infinity.
        DtypeError, DeviceError: ``x`` is not floating; ``generator`` is not a CPU generator.

    Example:
        >>> x = torch.arange(14.0).reshape(7, 2)
        >>> anchors = sample_anchors(x, 3, torch.Generator().manual_seed(1))
        >>> sorted(anchors[:, 1].tolist()) == sorted(set(anchors[:, 1].tolist()))  # no row twice
        True
    """
    flat, source = _rows(x, m, generator)
    picked = [
        rows[torch.randperm(len(rows), generator=source, device="cpu")[:m].to(rows.device)]
        for rows in flat
    ]
    return torch.stack(picked).reshape(*x.shape[:-2], m, x.shape[-1])


def kmeans_anchors(
    x: Tensor, m: int, iterations: int = 8, generator: torch.Generator | None = None
) -> Tensor:
    """Takes the centres of k-means clusters of x as anchors.

    Centres start by k-means++ (each next one a row drawn with probability proportional to its
    squared distance from the nearest centre so far; where all rows coincide with a centre, the
    next row not taken yet). Each of Lloyd's iterations then assigns every row to its nearest centre
    (ties: the first) and moves each centre to the mean of its rows. An **empty cluster** is moved
    to the row farthest from its own centre, several of them to distinct rows, farthest first. None
    of these steps increases Σ_n min_i |x_n − a_i|². Cost: O(N·M·D) per iteration.

    Args:
        x: rows (…, N, D); each leading index is clustered on its own.
        m: M, the number of anchors, 1 ≤ M ≤ N.
        iterations: Lloyd's iterations, ≥ 0; stops earlier once no row changes its cluster.
        generator: a CPU generator; one seeded with 0 if not given.

    Returns:
        anchors (…, M, D), detached, on the device and in the dtype of ``x``; computed in float32,
        or in float64 where ``x`` is.

    Raises:
        ShapeError, OptionError, DtypeError, DeviceError: as `sample_anchors`; OptionError too where
            ``iterations`` is not an integer ≥ 0.

    Example:
        >>> x = torch.tensor([[0.0], [0.2], [5.0], [5.2], [5.4]])
        >>> centres = kmeans_anchors(x, 2, generator=torch.Generator().manual_seed(0))
        >>> [round(centre, 4) for centre in sorted(centres[:, 0].tolist())]
        [0.1, 5.2]
    """
    if not isinstance(iterations, int) or isinstance(iterations, bool) or iterations < 0:
        raise OptionError(f"iterations must be an integer of at least 0, given {iterations!r}")
    flat, source = _rows(x, m, generator)
    flat = flat.to(torch.promote_types(x.dtype, torch.float32))
    centres = [_lloyd(rows, _plus_plus(rows, m, source), iterations) for rows in flat]
    return torch.stack(centres).to(x.dtype).reshape(*x.shape[:-2], m, x.shape[-1])


def _plus_plus(rows: Tensor, m: int, source: torch.Generator) -> Tensor:
    """k-means++ centres (M, D), distinct rows of ``rows`` (N, D)."""
    total = len(rows)
    first = int(torch.randint(total, (), generator=source, device="cpu").item())
    taken = torch.zeros(total, dtype=torch.bool, device=rows.device)
    taken[first] = True
    picked = [first]
    distance = (rows - rows[first]).square().sum(-1).double()
    for _ in range(m - 1):
        mass = distance.masked_fill(taken, 0).cumsum(0)
        u = torch.rand((), generator=source, dtype=torch.float64, device="cpu").item()
        end = float(mass[-1].item())
        # the first row whose cumulative mass exceeds u·end has a positive distance of its own
        if end > 0:
            row = int(torch.searchsorted(mass, mass.new_tensor(u * end), right=True).item())
        else:
            row = int((~taken).int().argmax().item())
        taken[row] = True
        picked.append(row)
        distance = torch.minimum(distance, (rows - rows[row]).square().sum(-1).double())
    return rows[torch.tensor(picked, device=rows.device)]


def _lloyd(rows: Tensor, centres: Tensor, iterations: int) -> Tensor:
    """Lloyd's iterations on rows (N, D) from centres (M, D)."""
    assigned: Tensor | None = None
    for _ in range(iterations):
        log_phi = log_landmark_features(rows, centres, sigma=1.0)  # −½|x − a|²
        nearest_log, now = log_phi.max(dim=-1)
        if assigned is not None and torch.equal(assigned, now):
            break
        assigned = now
        count = torch.bincount(now, minlength=len(centres))
        sums = torch.zeros_like(centres).index_add_(0, now, rows)
        centres = torch.where(
            count.unsqueeze(-1) > 0, sums / count.clamp_min(1).unsqueeze(-1), centres
        )
        empty = (count == 0).nonzero().squeeze(-1)
        if len(empty) > 0:
            centres[empty] = rows[nearest_log.argsort(stable=True)[: len(empty)]]
    return centres


def _rows(x: Tensor, m: int, generator: torch.Generator | None) -> tuple[Tensor, torch.Generator]:
    """Validates; returns x as (number of leading indices, N, D), detached, and a generator."""
    if x.ndim < 2:
        raise ShapeError(f"x must be (..., N, D), given {tuple(x.shape)}")
    if not x.is_floating_point():
        raise DtypeError(f"x must be floating, given {x.dtype}")
    if not isinstance(m, int) or isinstance(m, bool) or m < 1:
        raise OptionError(f"m must be an integer of at least 1, given {m!r}")
    if m > x.shape[-2]:
        raise OptionError(f"{m} anchors cannot be taken from {x.shape[-2]} rows; lower m")
    if not bool(x.isfinite().all()):
        raise OptionError("x holds a NaN or an infinity; leave padded rows out before")
    if generator is None:
        generator = torch.Generator(device="cpu").manual_seed(0)
    elif generator.device.type != "cpu":
        raise DeviceError(f"generator must be a CPU generator, given one on {generator.device}")
    return x.detach().reshape(-1, *x.shape[-2:]), generator
