"""`Partial` results over disjoint key sets, and their exact `merge`.

Attention is a ratio of two sums over keys, so sums over disjoint sets of keys add:

    out_i = Σ_p num_p,i·exp(c_p,i) / Σ_p den_p,i·exp(c_p,i)

with c_p = ``log_scale`` of part p. Exact near field + linear far field, prefix + causal
remainder, cache + new tokens, one device's keys + another's are all this operation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from subquad.errors import ShapeError

__all__ = ["EMPTY_LOG_SCALE", "Partial", "combine", "merge"]

EMPTY_LOG_SCALE = -1e30
"""log_scale of a part without any key: finite, so that differences of two are never NaN."""


@dataclass(frozen=True, eq=False)
class Partial:
    """Attention over a part of the keys: true sums are ``num·exp(log_scale)`` and so on.

    Args:
        num: (..., L, V) numerator Σ_j w_ij v_j, divided by exp(log_scale).
        den: (..., L) normaliser Σ_j w_ij, divided by exp(log_scale); may be signed
            (trigonometric features, Nyström). Zero where no key is read.
        log_scale: (..., L) logarithm of what both were divided by.

    Gradients flow through all three.
    """

    num: Tensor
    den: Tensor
    log_scale: Tensor

    def __post_init__(self) -> None:
        if self.den.shape != self.num.shape[:-1] or self.log_scale.shape != self.den.shape:
            raise ShapeError(
                "a partial needs num (..., L, V), den and log_scale (..., L), given "
                f"{tuple(self.num.shape)}, {tuple(self.den.shape)}, {tuple(self.log_scale.shape)}"
            )

    @property
    def lse(self) -> Tensor:
        """log of the true normaliser; −inf where no key is read. Positive parts only."""
        return torch.log(self.den) + self.log_scale

    def output(self) -> Tensor:
        """num / den, zero where no key is read."""
        empty = self.den == 0
        den = torch.where(empty, torch.ones_like(self.den), self.den)
        return torch.where(empty[..., None], torch.zeros_like(self.num), self.num / den[..., None])


def combine(partials: Iterable[Partial]) -> Partial:
    """Adds parts over disjoint key sets into one part, in any order.

    Cost O(P·L·V) for P parts. The common scale is the row's largest one, so that a part
    can only underflow where another outweighs it by more than the dtype's range.

    Raises:
        ShapeError: if there is no part, or the parts' shapes differ.
    """
    parts = list(partials)
    if not parts:
        raise ShapeError("combine needs at least one partial")
    if any(part.num.shape != parts[0].num.shape for part in parts):
        shapes = sorted({tuple(part.num.shape) for part in parts})
        raise ShapeError(f"partials must have one shape, given {shapes}")
    if len(parts) == 1:
        return parts[0]
    scales = [
        part.log_scale.masked_fill(part.den == 0, EMPTY_LOG_SCALE).clamp_min(EMPTY_LOG_SCALE)
        for part in parts
    ]
    top = torch.stack([scale.detach() for scale in scales]).amax(0)
    factors = [torch.exp(scale - top) for scale in scales]
    num = sum(part.num * factor[..., None] for part, factor in zip(parts, factors, strict=True))
    den = sum(part.den * factor for part, factor in zip(parts, factors, strict=True))
    assert isinstance(num, Tensor) and isinstance(den, Tensor)
    return Partial(num, den, top)


def merge(partials: Iterable[Partial]) -> Tensor:
    """Attention over the union of disjoint key sets, (..., L, V); exact.

    Example:
        >>> import torch, subquad as sq
        >>> q, k, v = (torch.randn(1, 2, 5, 8, dtype=torch.float64) for _ in range(3))
        >>> mech = sq.build("softmax", head_dim=8, num_heads=2)
        >>> first = mech.partial(q, k[:, :, :2], v[:, :, :2])
        >>> rest = mech.partial(q, k[:, :, 2:], v[:, :, 2:])
        >>> torch.allclose(sq.merge([first, rest]), mech(q, k, v))
        True
    """
    return combine(partials).output()
