r"""Gauges: changes of variables that leave softmax attention unchanged.

Softmax weights depend on q and k through ``scale·q·k + (anything of q alone)``. Writing
c = scale^½, every choice of centres μ_q, μ_k and of an invertible T gives the same softmax:

    x = T (c·q − μ_q),   y = T^-ᵀ (c·k − μ_k),   λ_j = μ_q·(c·k_j − μ_k)
    scale·q_i·k_j = x_i·y_j + λ_j + (a constant of row i)

Random features of x and y, with key features multiplied by e^λ, estimate the same softmax
from shorter vectors: the estimator's variance grows like exp(|x + y|²). Centring takes the
means out; balancing (T below) gives both sides one diagonal covariance, which minimises
E|x|² + E|y|² over T.

With Σ_q = L_q L_qᵀ, Σ_k = L_k L_kᵀ and the SVD L_kᵀ L_q = U S Vᵀ:  T = S^½ Vᵀ L_q^-1, so that
Cov(x) = Cov(y) = S.

A gauge computed from a call's own queries and keys looks at all of them: it may not be used
under a causal mask or with a state. Calibrated gauges may.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "GAUGES",
    "Gauge",
    "Moments",
    "make_gauge",
    "merge_moments",
    "moments",
    "pool_moments",
]

GAUGES = ("none", "centre_keys", "centre", "balance")
"""none; μ_k only; both centres; both centres and T."""

JITTER = 1e-3
"""Added to covariances before the Cholesky factor, relative to their mean diagonal."""


@dataclass(frozen=True, eq=False)
class Moments:
    """First and second moments of queries and keys per key/value head, (..., D), (..., D, D).

    Second moments are about the mean. Statistics carry no gradient.
    """

    mean_q: Tensor
    mean_k: Tensor
    cov_q: Tensor
    cov_k: Tensor


def _masked_moments(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean (..., D) and covariance (..., D, D) over the tokens of x (..., n, D)."""
    if mask is None:
        weight = x.new_ones(x.shape[:-1])[..., None]
    else:
        weight = mask.to(x.dtype)[..., None].expand(*x.shape[:-1], 1)
        x = x.masked_fill(weight == 0, 0.0)
    count = weight.sum(-2).clamp_min(1.0)
    mean = (x * weight).sum(-2) / count
    centred = (x - mean[..., None, :]) * weight
    return mean, centred.transpose(-1, -2) @ centred / count[..., None]


@torch.no_grad()
def moments(q: Tensor, k: Tensor, key_mask: Tensor | None = None) -> Moments:
    """Moments of q (B, H, L, D) and k (B, Hkv, S, D) for each batch row and key/value head.

    Masked keys do not count; where L = S neither do the queries at their positions (in
    self-attention those are padding). Sums in float32, or float64 for float64 inputs.
    Cost O((L+S)·D²).
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    grouped = q.detach().to(dtype).unflatten(1, (k.shape[1], -1))
    same = q.shape[2] == k.shape[2]
    query_mask = None
    if key_mask is not None and same:
        query_mask = key_mask[:, None, None].expand(grouped.shape[:-1]).flatten(2, 3)
    mean_q, cov_q = _masked_moments(grouped.flatten(2, 3), query_mask)
    mask = None if key_mask is None else key_mask[:, None].expand(k.shape[:-1])
    mean_k, cov_k = _masked_moments(k.detach().to(dtype), mask)
    return Moments(mean_q, mean_k, cov_q, cov_k)


@torch.no_grad()
def pool_moments(q: Tensor, k: Tensor, key_mask: Tensor | None = None) -> tuple[Moments, Tensor]:
    """Moments per key/value head over the whole batch, and the token counts (queries, keys)."""
    kv = k.shape[1]
    grouped = q.unflatten(1, (kv, -1))
    pooled_q = grouped.transpose(0, 1).flatten(1, 3)[None]
    pooled_k = k.transpose(0, 1).flatten(1, 2)[None]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    mask_q = mask_k = None
    if key_mask is not None:
        mask_k = key_mask.flatten().expand(1, kv, -1)
        if q.shape[2] == k.shape[2]:
            mask_q = key_mask[:, None].expand(-1, grouped.shape[2], -1).flatten().expand(1, kv, -1)
    mean_q, cov_q = _masked_moments(pooled_q.to(dtype), mask_q)
    mean_k, cov_k = _masked_moments(pooled_k.to(dtype), mask_k)
    counts = [
        pooled.shape[2] if mask is None else int(mask[0, 0].sum())
        for pooled, mask in ((pooled_q, mask_q), (pooled_k, mask_k))
    ]
    tokens = torch.tensor(counts, dtype=torch.long, device=q.device)
    return Moments(mean_q[0], mean_k[0], cov_q[0], cov_k[0]), tokens


@torch.no_grad()
def merge_moments(
    old: Moments, seen: Tensor, new: Moments, tokens: Tensor
) -> tuple[Moments, Tensor]:
    """Moments of two batches together, and their token counts (queries, keys).

    Cost O(D²) per head. A batch without any token changes nothing.
    """
    total = seen + tokens
    shares = tokens.double() / total.clamp_min(1)
    merged = {}
    for side, share in zip(("q", "k"), shares, strict=True):
        mean, cov = getattr(old, f"mean_{side}"), getattr(old, f"cov_{side}")
        step = getattr(new, f"mean_{side}") - mean
        spread = step[..., :, None] * step[..., None, :]
        extra = getattr(new, f"cov_{side}")
        merged[f"mean_{side}"] = mean + share * step
        merged[f"cov_{side}"] = (1 - share) * cov + share * extra + share * (1 - share) * spread
    return Moments(**merged), total


@dataclass(frozen=True, eq=False)
class Gauge:
    """x = (c·q − shift_q) A,  y = (c·k − shift_k) A^-ᵀ  with A = Tᵀ; T None means identity.

    Args:
        shift_q, shift_k: (..., D) centres of c·q and c·k.
        transform: A (..., D, D), or None.
        inverse: A^-ᵀ (..., D, D), or None.
        second: E[(x+y)(x+y)ᵀ] (..., D, D), for data-aware proposals; None without moments.
    """

    shift_q: Tensor
    shift_k: Tensor
    transform: Tensor | None
    inverse: Tensor | None
    second: Tensor | None

    def queries(self, q: Tensor, root_scale: float) -> Tensor:
        """x (..., n, D)."""
        x = q * root_scale - self.shift_q[..., None, :]
        return x if self.transform is None else x @ self.transform

    def queries_offset(self, q: Tensor, heads: int, root_scale: float) -> Tensor:
        """The row constant (B, Hkv, G·L) of q (B, H, L, D): c·q·μ_k, which softmax drops."""
        grouped = q.unflatten(1, (heads, -1)).flatten(2, 3)
        return (grouped @ self.shift_k[..., None])[..., 0] * root_scale

    def keys(self, k: Tensor, root_scale: float) -> tuple[Tensor, Tensor]:
        """y (..., n, D) and the key log-weights λ (..., n)."""
        y = k * root_scale - self.shift_k[..., None, :]
        weight = (y @ self.shift_q[..., None])[..., 0]
        return (y if self.inverse is None else y @ self.inverse), weight


def _balance(cov_q: Tensor, cov_k: Tensor) -> tuple[Tensor, Tensor]:
    eye = torch.eye(cov_q.shape[-1], dtype=torch.float64, device=cov_q.device)

    def factor(cov: Tensor) -> Tensor:
        cov = cov.double()
        level = cov.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
        # A head with a constant side has no covariance to balance: any T will do.
        level = torch.where(level > 0, level * JITTER, torch.ones_like(level))
        return torch.linalg.cholesky(cov + level * eye)

    lower_q, lower_k = factor(cov_q), factor(cov_k)
    _, values, right = torch.linalg.svd(lower_k.transpose(-1, -2) @ lower_q)
    root = values.sqrt()
    transform = root[..., None] * torch.linalg.solve_triangular(
        lower_q.transpose(-1, -2), right.transpose(-1, -2), upper=True
    ).transpose(-1, -2)
    # T^-1 = L_q V S^-½, and A^-ᵀ = T^-1 in row form.
    inverse = lower_q @ (right.transpose(-1, -2) / root[..., None, :])
    return transform.transpose(-1, -2), inverse


@torch.no_grad()
def make_gauge(kind: str, stats: Moments, root_scale: float) -> Gauge:
    """The gauge of a kind in `GAUGES` from moments of the unscaled q and k.

    Balancing costs O(D³) per head, in float64.
    """
    c = root_scale
    # Moments may be in half precision (a module's buffers); T and T^-1 must not be rounded
    # to it, each on its own: x·y would no longer be q·k.
    dtype = torch.promote_types(stats.mean_q.dtype, torch.float32)
    mean_q, mean_k = stats.mean_q.to(dtype) * c, stats.mean_k.to(dtype) * c
    cov_q, cov_k = stats.cov_q.to(dtype) * c**2, stats.cov_k.to(dtype) * c**2
    zero = torch.zeros_like(mean_q)
    shift_q = mean_q if kind in ("centre", "balance") else zero
    shift_k = mean_k if kind != "none" else zero
    transform = inverse = None
    if kind == "balance":
        wide, narrow = _balance(cov_q, cov_k)
        cov_q = (wide.transpose(-1, -2) @ cov_q.double() @ wide).to(cov_q.dtype)
        cov_k = (narrow.transpose(-1, -2) @ cov_k.double() @ narrow).to(cov_k.dtype)
        transform, inverse = wide.to(mean_q.dtype), narrow.to(mean_q.dtype)
    rest = (mean_q - shift_q) + (mean_k - shift_k)
    second = cov_q + cov_k + rest[..., :, None] * rest[..., None, :]
    return Gauge(shift_q, shift_k, transform, inverse, second)
