"""Efficient attention: one softmax over the features of a query, one over the positions of keys.

    out_i = Σ_m ρ_q(q_i)_m · Σ_j ρ_k(k)_jm v_j
    ρ_q(q_i)_m = exp(q_im) / Σ_n exp(q_in),    ρ_k(k)_jm = exp(k_jm) / Σ_t exp(k_tm)

Each feature m has a normaliser of its own over the positions that a query may read, z_im =
Σ_t exp(k_tm); a kernel's normaliser, Σ_m exp(q_im) z_im, is shared by all features. The two
agree with the query's features divided by z: in

    out_i = Σ_j Σ_m (e^{q_im}/z_im) e^{k_jm} v_j / Σ_j Σ_m (e^{q_im}/z_im) e^{k_jm}

the denominator is Σ_m e^{q_im}. So this is linear attention with exponential features of k and
of q − ln z, and the engine's stabilisation serves it. Under a causal mask z is the running sum
over the positions so far. Shen et al. 2021, arXiv 1812.01243, section 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from subquad.attention.base import Absent, Capabilities, Cost, Info, State
from subquad.attention.kernel.engine import (
    FeatureMaps,
    KernelMechanism,
    LinearFeatures,
    LinearState,
)
from subquad.attention.masks import Mask
from subquad.errors import OptionError
from subquad.kernels.linear import EMPTY, LN2
from subquad.kernels.running import running_logsumexp
from subquad.options import Config

__all__ = ["Efficient", "EfficientConfig"]


@dataclass(frozen=True)
class EfficientConfig(Config):
    """Efficient attention has no options."""

    mechanism: ClassVar[str] = "efficient"


def _flops(length: int, head_dim: int, value_dim: int, config: EfficientConfig) -> float:
    # Maps are matrix products with √scale·I, 2·2·L·D·D; state and read 2·2·L·D·V.
    return 4.0 * length * head_dim * (head_dim + value_dim)


def _memory(length: int, head_dim: int, value_dim: int, config: EfficientConfig) -> float:
    # Under a causal mask: logarithms of z, and q − ln z, for each position.
    return 4.0 * head_dim * (value_dim + 1 + min(length, 1024) + 2 * length)


class Efficient(KernelMechanism):
    """Efficient attention: softmax over features for q, over positions for k.

        out_i = Σ_m softmax_m(√scale·q_i) · Σ_j softmax_j(√scale·k)_jm v_j

    The paper has no temperature: `scale` is 1 by default, and multiplies q and k by its root.
    Masked keys leave the softmax over positions. Under a causal mask (not in the paper) it
    runs over the positions up to the query's own: out_i = Σ_m softmax(q_i)_m S_im/z_im, with
    S_im = Σ_{j ≤ i} e^{k_jm} v_j and z_im = Σ_{j ≤ i} e^{k_jm}: the last row of a causal call
    is that of a bidirectional one, and the state is (S, z) and a running maximum.

    Weights of a row sum to 1: Σ_j w_ij = Σ_m softmax(q_i)_m = 1.

    Cost O((L+S)·D·(D+V)) time, O(D·V) state; a causal call holds two tensors of q's size.

    Example:
        >>> import torch, subquad as sq
        >>> q, k, v = (torch.randn(1, 2, 50, 8) for _ in range(3))
        >>> out = sq.attention(q, k, v, "efficient")
        >>> torch.allclose(out, q.softmax(-1) @ (k.softmax(-2).mT @ v), atol=1e-5)
        True
    """

    name = "efficient"
    family = "kernel"
    Config = EfficientConfig
    config: EfficientConfig

    info = Info(
        summary="softmax over features for q and over positions for k",
        formula="out_i = Σ_m softmax(q_i)_m Σ_j e^{k_jm} v_j / Σ_j e^{k_jm},  q and k times √scale",
        cost=Cost("O(L·D·(D+V))", _flops, _memory),
        paper="Shen et al. 2021, Efficient Attention: Attention with Linear Complexities, "
        "arXiv 1812.01243, section 3",
        limit="ρ_q(q)·(ρ_k(k)ᵀ v) exactly; approximates nothing. Uniform attention as scale → 0",
        scale="1",
        deviations="the paper is bidirectional; under a causal mask the softmax over positions "
        "takes the positions so far",
        use="vision and other encoders trained with it. Every feature averages values over all "
        "positions by itself.",
    )

    @classmethod
    def capabilities_for(cls, config: EfficientConfig) -> Capabilities:
        return Capabilities(
            prefix=True,
            state="constant",
            partial=Absent(
                "each feature is normalised over all positions by itself: there is no one "
                "normaliser of a part that could be added to another's"
            ),
            segments=Absent("one state serves one sequence; call once for each segment"),
            window=Absent("features sum over all keys; a window is sparse attention"),
        )

    def _scale(self, scale: float | None) -> float:
        return 1.0 if scale is None else float(scale)

    def _features(
        self, q: Tensor, k: Tensor | None, mask: Mask | None, scale: float
    ) -> FeatureMaps:
        """Maps for queries that are already scaled and divided by z."""
        eye = torch.eye(self.head_dim, dtype=q.dtype, device=q.device)
        eye = eye.expand(self.num_kv_heads, -1, -1)
        return LinearFeatures(eye, math.sqrt(scale) * eye)

    def _logits(self, x: Tensor, scale: float, key_mask: Tensor | None = None) -> Tensor:
        """√scale·x in float32 or float64, −inf at masked positions."""
        if scale <= 0:
            raise OptionError(f"efficient: scale={scale} must be > 0: it is split between q and k")
        y = math.sqrt(scale) * x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
        return y if key_mask is None else y.masked_fill(~key_mask[:, None, :, None], -math.inf)

    def _divided(self, q: Tensor, log_z: Tensor, scale: float) -> Tensor:
        """√scale·q − ln z; `log_z` is (B, Hkv, L or 1, D), whatever it is where z = 0."""
        log_z = log_z.masked_fill(log_z < 0.5 * EMPTY, 0.0)
        grouped = self._logits(q, scale).unflatten(1, (log_z.shape[1], -1))
        return (grouped - log_z[:, :, None]).flatten(1, 2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
        y = self._logits(k, scale, mask.key)
        if not mask.causal:
            # −inf − (−inf) would be NaN in the gradient of a row without keys.
            log_z = y.clamp_min(EMPTY).logsumexp(2, keepdim=True)
        else:
            log_z = running_logsumexp(y.flatten(0, 1)).view_as(y)
            queries, keys = q.shape[2], k.shape[2]
            last = torch.arange(queries, device=q.device) + (keys - queries)
            if mask.prefix is not None:
                prefix = torch.as_tensor(mask.prefix, device=q.device)
                last = torch.maximum(last, prefix.clamp_max(keys)[..., None] - 1)
            if mask.prefix is not None or queries != keys:
                # Queries before the first key read nothing: any z does.
                last = last.clamp_min(0).view(-1, 1, queries, 1)
                log_z = log_z.gather(2, last.expand(*log_z.shape[:2], -1, log_z.shape[-1]))
        return super()._attend(self._divided(q, log_z, scale), k, v, mask, scale)

    def _prefill(
        self, q: Tensor, k: Tensor, v: Tensor, state: LinearState | None,
        key_mask: Tensor | None, scale: float,
    ) -> tuple[Tensor, State]:  # fmt: skip
        if q.shape[2] > k.shape[2]:  # refused there
            return super()._prefill(q, k, v, state, key_mask, scale)
        y = self._logits(k, scale, key_mask)
        start = None
        if state is not None:
            self._check_sums(state, self._features(y, None, None, scale))
            start = _log_z(state).to(y.dtype).flatten(0, 1)
        log_z = running_logsumexp(y.flatten(0, 1), start).view_as(y)[:, :, -q.shape[2] :]
        return super()._prefill(self._divided(q, log_z, scale), k, v, state, key_mask, scale)

    def _read(self, q: Tensor, state: LinearState, scale: float) -> Tensor:
        self._check_sums(state, self._features(self._logits(q, scale), None, None, scale))
        out = super()._read(self._divided(q, _log_z(state), scale), state, scale)
        return out.to(q.dtype)


def _log_z(state: LinearState) -> Tensor:
    """ln z (B, Hkv, 1, M) of the state's sums, `EMPTY` where there is none."""
    z = state.z.mT
    none = (z == 0) | (state.c < 0.5 * EMPTY)
    return (torch.log(z.masked_fill(none, 1.0)) + LN2 * state.c).masked_fill(none, EMPTY)
