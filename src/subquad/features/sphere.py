"""Vectors on the unit sphere."""

from __future__ import annotations

from torch import Tensor

__all__ = ["unit"]


def unit(x: Tensor) -> Tensor:
    """x/|x| along the last dimension; zero stays zero, and gradients there stay finite.

    Example:
        >>> import torch
        >>> unit(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([[0.6000, 0.8000],
                [0.0000, 0.0000]])
    """
    square = x.square().sum(-1, keepdim=True)
    return x * square.masked_fill(square == 0, 1.0).rsqrt()
