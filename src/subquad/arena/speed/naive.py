"""Attention by its definition, the whole matrix in float64: contenders are checked against it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subquad.attention.base import Mechanism

__all__ = ["NAIVE", "OWN", "Call", "features", "mix", "own_float64", "softmax", "windowed"]

Call = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
"""(q, k, v, causal) → output."""


def mix(weights: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Normalised positive weights (..., L, S) times values."""
    weights = weights.tril() if causal else weights
    return weights / weights.sum(-1, keepdim=True) @ v


def softmax(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Softmax attention."""
    logits = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return mix((logits - logits.amax(-1, keepdim=True).detach()).exp(), v, causal)


def features(log_q: Tensor, log_k: Tensor) -> tuple[Tensor, Tensor]:
    """φ from its logarithms; maxima of a row of q and of all k cancel."""
    return (
        (log_q - log_q.amax(-1, keepdim=True).detach()).exp(),
        (log_k - log_k.amax((-1, -2), keepdim=True).detach()).exp(),
    )


def performer_logs(q: Tensor, k: Tensor, projection: Tensor) -> tuple[Tensor, Tensor]:
    """ln φ of positive random features; `projection` is (H, M, D)."""
    omega = projection.to(q.dtype).transpose(-1, -2)
    x, y = (t * q.shape[-1] ** -0.25 for t in (q, k))
    log_q, log_k = (t @ omega - 0.5 * t.square().sum(-1, keepdim=True) for t in (x, y))
    return log_q, log_k


def _linear(log_q: Tensor, log_k: Tensor, v: Tensor, causal: bool) -> Tensor:
    phi_q, phi_k = features(log_q, log_k)
    return mix(phi_q @ phi_k.transpose(-1, -2), v, causal)


def _performer(mechanism: Any) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return _linear(*performer_logs(q, k, mechanism.projection), v, causal)

    return call


def _gaussian(mechanism: Any) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        anchors = mechanism.anchors.double()[:, None]
        precision = 0.5 * mechanism.config.sigma**-2
        log_q, log_k = (-(t.unsqueeze(-2) - anchors).square().sum(-1) * precision for t in (q, k))
        return _linear(log_q, log_k, v, causal)

    return call


def _additive(mechanism: Any) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        w_q, w_k, bias, w = (
            parameter.detach().double()
            for parameter in (
                mechanism.query_weight,
                mechanism.key_weight,
                mechanism.bias,
                mechanism.score_weight,
            )
        )
        left = q @ w_q.transpose(-1, -2) + bias[:, None]
        right = k @ w_k.transpose(-1, -2)
        units = (left[..., :, None, :] + right[..., None, :, :]).tanh()
        return mix((units @ w[:, None, :, None])[..., 0].exp(), v, causal)

    return call


def own_float64(mechanism: Mechanism) -> Call:
    """The mechanism itself with float64 parameters."""
    wide = copy.deepcopy(mechanism).double()

    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return wide(q, k, v, causal=causal)

    return call


def windowed(window: int | tuple[int, int], dilation: int = 1) -> Call:
    """Softmax over `window` keys on each side."""
    left, right = (window, window) if isinstance(window, int) else window

    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        i, j = (torch.arange(t.shape[-2], device=t.device) for t in (q, k))
        i = i[:, None]
        near = (j >= i - left * dilation) & (j <= i + (0 if causal else right) * dilation)
        near = near & ((i - j) % dilation == 0)
        logits = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        return torch.softmax(logits.masked_fill(~near, -math.inf), -1) @ v

    return call


def _auto(mechanism: Any) -> Call:
    linear = own_float64(mechanism.linear)

    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        """The side that the checked call took: a run in float64 would choose for itself."""
        return (linear if mechanism.last.linear else softmax)(q, k, v, causal)

    return call


NAIVE: dict[str, tuple[Callable[[Any], Call], str, int]] = {
    "softmax": (lambda _: softmax, "naive softmax, float64", 601),
    "additive": (_additive, "naive additive scores, float64", 83),
    "performer": (_performer, "materialised φ with the same ω, float64", 601),
    "gaussian": (_gaussian, "materialised φ, float64", 211),
    "auto": (_auto, "float64 run of the side that it chose", 601),
    "local": (
        lambda mechanism: windowed(mechanism.config.window, mechanism.config.dilation),
        "naive windowed softmax, float64",
        601,
    ),
}
"""Naive computation of a registered mechanism, what it is, and the length it is made at."""
OWN = (own_float64, "its own float64 run; formula checked by the tests", 601)
"""Of a mechanism that has no line in `NAIVE`: the table says so; the laws in the tests check it.

Both runs choose their own keys. With these inputs the margins of the choices are far above
float32's rounding, so that the choices are the same; one that differed would show as an error
above the bound.
"""
