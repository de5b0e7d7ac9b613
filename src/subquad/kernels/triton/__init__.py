"""The linear engine's backend for NVIDIA GPUs: kernels in Triton that keep φ in registers.

Forward, bidirectional: partial states over parts of the keys, relative to each part's own
maximum; their merge; a read of the merged state by blocks of queries, online over features.
Causal: states of chunks in parallel; a scan over chunks; outputs of all chunks in parallel
from the state before each and the lower triangle of its own φ_q φ_kᵀ. A few tokens after a
state: one launch. The backward pass makes φ again and scans in reverse.

Sums and states are float32. Products of float32 inputs use three TF32 products each (or one,
where `torch.backends.cuda.matmul.allow_tf32` is set), bfloat16 inputs bfloat16 operands,
float16 inputs TF32 operands, which hold a float16 exactly and have float32's range. Exponents
are never in half precision: W enters as the sum of two operands.

A causal row whose normaliser underflows is flagged and redone by kernels of its own, which find
nothing to do otherwise: no call waits for the device.

Reference: `subquad.kernels.linear`. Partial states merged by their maxima: Dao et al. 2023,
Flash-Decoding; causal in three phases: Yang et al. 2024, arXiv 2312.06635, section 3.
"""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from subquad.kernels import linear
from subquad.kernels.linear import Gradients, Problem, Result

__all__ = ["backward", "forward", "refusal"]

WIDEST = 128
"""Largest D and V: a block of rows of each lies in registers."""
GRID = 65535
"""Most heads × batch rows: CUDA's limit on a grid's second and third side."""


def interpreted() -> bool:
    """Whether Triton runs kernels as Python on the CPU (``TRITON_INTERPRET=1``), for tests."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def refusal(
    device: str, q: torch.dtype, v: torch.dtype, activation: str, clipped: bool = False
) -> str | None:
    """Why the kernels cannot run a kind of call, or None if they can. Imports no Triton.

    A size that they do not hold (D or V above 128, B·H above 65535, no tokens) is left to the
    torch operations, call by call; so is the backward pass of a learned feature map.

    Args:
        device: type of the tensors' device.
        q, v: dtypes of queries and keys, and of values.
        activation: of both maps, as in `subquad.kernels.dispatch.explain`.
        clipped: whether the map is signed and its normaliser clipped.
    """
    if device != "cuda" and not interpreted():
        return f"it is for NVIDIA GPUs, this is {device}"
    if torch.version.hip is not None:
        return "it is for NVIDIA GPUs, this torch is built for ROCm"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 0):
        return "it needs a GPU of compute capability 8.0 or more"
    if q not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it computes in float32, the dtype is {q}"
    if q != v:
        return f"it needs values of the queries' dtype, {q}, not {v}"
    if activation != "exp" or clipped:
        return f"its maps are exp, this one is {activation}"
    return None


def _fits(p: Problem) -> bool:
    """Whether the kernels hold a call of these sizes."""
    return (
        max(p.q.shape[-1], p.value) <= WIDEST
        and 0 < p.q.shape[0] * p.q.shape[1] <= GRID
        and min(p.q.shape[-1], p.value, p.features, p.queries, p.keys) > 0
        and p.k.dtype == p.q.dtype
    )


def forward(p: Problem, keep: int) -> Result:
    """As `subquad.kernels.linear.forward`; `keep` is best the causal chunk itself."""
    if not _fits(p):
        return linear.forward(p, keep)
    from subquad.kernels.triton import engine

    with torch.cuda.device_of(p.q):  # Triton launches on the current device
        return engine.forward(p, keep)


def backward(
    p: Problem, result: Result, out_bar: Tensor, den_bar: Tensor | None,
    s_bar: Tensor | None, z_bar: Tensor | None, need_bias: bool, keep: int,
) -> Gradients:  # fmt: skip
    """As `subquad.kernels.linear.backward`."""
    learned = any(g is not None for m in (p.query_map, p.key_map) for g in m.gradients)
    if learned or not _fits(p):
        return linear.backward(p, result, out_bar, den_bar, s_bar, z_bar, need_bias, keep)
    from subquad.kernels.triton import engine

    with torch.cuda.device_of(p.q):
        return engine.backward(p, result, out_bar, den_bar, s_bar, z_bar, need_bias, keep)
