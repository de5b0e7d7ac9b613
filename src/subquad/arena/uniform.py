"""Uniform attention: the line that every approximation has to beat. Not registered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from subquad.attention.base import Capabilities, Cost, Info, Mechanism
from subquad.attention.masks import Mask
from subquad.convert.compare import uniform_attention
from subquad.options import Config

__all__ = ["Uniform"]


@dataclass(frozen=True)
class UniformConfig(Config):
    """No options."""

    mechanism: ClassVar[str] = "uniform"


class Uniform(Mechanism):
    """out_i = mean of all v_j that query i may read: attention that ignores q and k."""

    name = "uniform"
    family = "fixed"
    Config = UniformConfig
    info = Info(
        summary="the mean of all values that a query may read",
        formula="out_i = Σ_j v_j / n_i",
        cost=Cost("O(L·V)", lambda n, d, v, c: 2.0 * n * v, lambda n, d, v, c: 4.0 * v),
        paper="none: a baseline",
        limit="exact where all logits are equal",
    )

    @classmethod
    def capabilities_for(cls, config: Any) -> Capabilities:
        """Takes causal and key masks."""
        return Capabilities()

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
        return uniform_attention(v, tuple(q.shape), mask).to(v.dtype)
