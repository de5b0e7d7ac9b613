"""Chooses the backend of a call to the linear or the block engine, and can explain the choice.

The only place that does so. Backends are tried in order; each answers whether it can run
the call and why not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from subquad.kernels.block import Layout
from subquad.kernels.flex import refusal

__all__ = ["BACKENDS", "BLOCK_BACKENDS", "Choice", "explain", "explain_block"]

BACKENDS = ("torch",)
"""Backends in order of preference: "torch" is chunked torch operations on any device."""


BLOCK_BACKENDS = ("flex", "torch")
"""The block engine's: FlexAttention on GPUs, and a loop of torch operations on any device."""


@dataclass(frozen=True)
class Choice:
    """The backend that runs a call, and why."""

    backend: str
    reason: str

    def __str__(self) -> str:
        return f"{self.backend}: {self.reason}"


def explain(q: Tensor, k: Tensor, v: Tensor) -> Choice:
    """Says which backend runs a call with these tensors, and why.

    >>> import torch, subquad as sq
    >>> q = torch.zeros(1, 2, 8, 4)
    >>> sq.kernels.explain(q, q, q).backend
    'torch'
    """
    sums = "float64" if q.dtype == torch.float64 else "float32"
    return Choice("torch", f"chunked torch operations on {q.device.type}, sums in {sums}")


def explain_block(q: Tensor, v: Tensor, layout: Layout) -> Choice:
    """Says which backend runs a call of the block engine, and why."""
    reason = refusal(q, v, layout)
    if reason is None:
        return Choice("flex", f"FlexAttention runs this pattern fused on {q.device.type}")
    return Choice("torch", f"a loop over blocks of queries: {reason}")
