"""The linear engine: kernel attention for any pair of feature maps.

    out_i = φ_q(q_i)·(Σ_j φ_k(k_j) v_jᵀ) / φ_q(q_i)·(Σ_j φ_k(k_j))

A kernel mechanism says which feature maps a call uses (`KernelMechanism._features`); the
engine gives bidirectional, causal and prefix attention, partial sums, prefill and step. The
algorithm, its stabilisation and its cost are documented in `subquad.kernels.linear`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from subquad.attention.base import Mechanism, State
from subquad.attention.masks import Mask
from subquad.attention.partial import Partial
from subquad.errors import OptionError, ShapeError
from subquad.kernels.linear import LN2
from subquad.kernels.ops import linear_attention, linear_attention_functions

__all__ = ["FunctionFeatures", "KernelMechanism", "LinearFeatures", "LinearState"]


@dataclass(frozen=True, eq=False)
class LinearFeatures:
    """φ = activation(xW + b), fused and differentiable in W and b.

    Args:
        wq, wk: (Hkv, D, R), or (B, Hkv, D, R) with an own map for each batch row.
        bq, bk: (Hkv, R) or (B, Hkv, R), or None.
        activation: "exp" (log features, stabilised), or a name of
            `subquad.kernels.linear.ACTIVATIONS`.
        quad: adds −quad·|k|² to every key's log-weight.
        key_bias: (B, Hkv, S) natural-log weight of each key.
        query_log: gives the (B, H, L) natural log of the row factors that φ_q leaves out
            because they cancel in attention; partial sums need them.
        clip: 0, or for signed maps with |φ_q·φ_k| ≤ 1: the least normaliser in units of the
            keys' total weight.
    """

    wq: Tensor
    wk: Tensor
    bq: Tensor | None = None
    bk: Tensor | None = None
    activation: str = "exp"
    quad: float = 0.0
    key_bias: Tensor | None = None
    query_log: Callable[[], Tensor] | None = None
    clip: float = 0.0


@dataclass(frozen=True, eq=False)
class FunctionFeatures:
    """φ, or ln φ with ``log=True``, as torch functions of (B, Hkv, n, D) → (B, Hkv, n, M).

    Recomputed chunk by chunk; gradients reach `parameters`. Plain functions must not be
    negative.
    """

    query: Callable[[Tensor], Tensor]
    key: Callable[[Tensor], Tensor]
    features: int
    log: bool = False
    parameters: tuple[Tensor, ...] = ()
    key_bias: Tensor | None = None
    query_log: Callable[[], Tensor] | None = None
    clip: float = 0.0


FeatureMaps = LinearFeatures | FunctionFeatures


@dataclass(frozen=True, eq=False)
class LinearState(State):
    """Σ φ_k vᵀ and Σ φ_k of all past keys, each feature m divided by 2^(c_m); constant size.

    Args:
        s: (B, Hkv, M, V) sums in float32 (float64 for float64 inputs).
        z: (B, Hkv, M, 1) normaliser sums.
        c: (B, Hkv, 1, M or 1) log2 scale: a running maximum.
        mass: (B, Hkv, 1, 1) total key weight, used by signed maps.
        length: tokens seen, masked ones included.
    """

    s: Tensor
    z: Tensor
    c: Tensor
    mass: Tensor
    length: int = 0


Flat = tuple[Tensor, Tensor, Tensor, Tensor]


def _flat(state: LinearState | None, value_dim: int | None) -> Flat | None:
    if state is None:
        return None
    if value_dim is not None and state.s.shape[-1] != value_dim:
        raise ShapeError(
            f"the state holds values of width V={state.s.shape[-1]}, v has width {value_dim}"
        )
    s, z, c, mass = (t.flatten(0, 1) for t in (state.s, state.z, state.c, state.mass))
    return s, z, c, mass


def _call(
    maps: FeatureMaps, q: Tensor, k: Tensor, v: Tensor, absorb: int, key_mask: Tensor | None,
    state: Flat | None,
) -> tuple[Tensor, Tensor, Tensor, Flat]:  # fmt: skip
    if isinstance(maps, LinearFeatures):
        return linear_attention(
            q, k, v, maps.wq, maps.bq, maps.wk, maps.bk,
            activation=maps.activation, quad=maps.quad, clip=maps.clip, absorb=absorb,
            key_bias=maps.key_bias, key_mask=key_mask, state=state,
        )  # fmt: skip
    return linear_attention_functions(
        q, k, v, _checked(maps.query, maps), _checked(maps.key, maps), log=maps.log,
        features=maps.features, parameters=maps.parameters, clip=maps.clip, absorb=absorb,
        key_bias=maps.key_bias, key_mask=key_mask, state=state,
    )  # fmt: skip


def _checked(
    function: Callable[[Tensor], Tensor], maps: FunctionFeatures
) -> Callable[[Tensor], Tensor]:
    def features(x: Tensor) -> Tensor:
        value = function(x)
        wanted = (*x.shape[:-1], maps.features)
        found = tuple(value.shape)
        if found != wanted:
            raise ShapeError(
                f"the feature function must map {tuple(x.shape)} to {wanted}, it gave {found}"
            )
        if not maps.log and not maps.clip and bool((value < 0).any()):
            raise OptionError(
                "the feature function gave negative features: attention weights would change "
                "sign and normalisers vanish; use a non-negative function"
            )
        return value

    return features


class KernelMechanism(Mechanism):
    """Base of mechanisms that only choose feature maps."""

    state_type = LinearState

    @abstractmethod
    def _features(
        self, q: Tensor, k: Tensor | None, mask: Mask | None, scale: float
    ) -> FeatureMaps:
        """The maps of one call; `k` and `mask` are None when a state is read."""

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
        return self._sums(q, k, v, mask, scale)[0]

    def _sums(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, clipped: bool = True
    ) -> tuple[Tensor, Tensor, Tensor, FeatureMaps]:
        maps = self._features(q, k, mask, scale)
        if maps.clip and not clipped:  # a part's normaliser may well be negative: sums add
            maps = replace(maps, clip=0.0)
        queries, keys = q.shape[2], k.shape[2]
        if isinstance(mask.prefix, Tensor):
            return self._ragged_prefix(maps, q, k, v, mask, mask.prefix)
        absorb = keys
        if mask.causal:
            absorb = min(keys, max(mask.prefix or 0, keys - queries, 0))
        out, den, log_scale, _ = _call(maps, q, k, v, absorb, mask.key, None)
        return out, den, log_scale, maps

    def _ragged_prefix(
        self, maps: FeatureMaps, q: Tensor, k: Tensor, v: Tensor, mask: Mask, prefix: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, FeatureMaps]:
        # A query inside its row's prefix sees exactly the prefix; one behind it, a causal row.
        queries, keys = q.shape[2], k.shape[2]
        inside = torch.arange(keys, device=k.device) < prefix[:, None]
        opened = inside if mask.key is None else inside & mask.key
        first = _call(maps, q, k, v, keys, opened, None)[:3]
        then = _call(maps, q, k, v, max(keys - queries, 0), mask.key, None)[:3]
        position = torch.arange(queries, device=q.device) + (keys - queries)
        early = (position < prefix[:, None])[:, None]
        out, den, log_scale = (
            torch.where(early[..., None] if a.dim() == 4 else early, a, b)
            for a, b in zip(first, then, strict=True)
        )
        return out, den, log_scale, maps

    def _partial(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Partial:
        if q.dtype not in (torch.float32, torch.float64):
            q, k, v = q.float(), k.float(), v.float()
        out, den, log_scale, maps = self._sums(q, k, v, mask, scale, clipped=False)
        log_scale = log_scale * LN2
        if maps.query_log is not None:
            log_scale = log_scale + maps.query_log()
        return Partial(out * den[..., None], den, log_scale)

    def _prefill(
        self, q: Tensor, k: Tensor, v: Tensor, state: LinearState | None,
        key_mask: Tensor | None, scale: float,
    ) -> tuple[Tensor, State]:  # fmt: skip
        mask = Mask(causal=True, key=key_mask)
        maps = self._features(q, k, mask, scale)
        if state is not None:
            self._check_sums(state)
        queries, keys = q.shape[2], k.shape[2]
        if queries > keys:
            raise ShapeError(
                f"prefill needs L ≤ S, given L={queries} queries for S={keys} new keys"
            )
        out, _, _, sums = _call(maps, q, k, v, keys - queries, key_mask, _flat(state, v.shape[-1]))
        shape = (k.shape[0], k.shape[1])
        s, z, c, mass = (t.unflatten(0, shape) for t in sums)
        seen = 0 if state is None else state.length
        return out, LinearState(s, z, c, mass, seen + keys)

    def _check_sums(self, state: LinearState) -> None:
        wanted = (self.num_kv_heads, self.config.features)  # type: ignore[attr-defined]  # all have it
        if tuple(state.s.shape[1:3]) != wanted:
            raise ShapeError(
                f"{self.name}: the state must hold (B, Hkv, M, V) sums with (Hkv, M) = {wanted}, "
                f"given {tuple(state.s.shape)}"
            )

    def _read(self, q: Tensor, state: LinearState, scale: float) -> Tensor:
        self._check_sums(state)
        maps = self._features(q, None, None, scale)
        kv = state.s.shape[1]
        k = q.new_empty(q.shape[0], kv, 0, q.shape[-1])
        v = q.new_empty(q.shape[0], kv, 0, state.s.shape[-1])
        return _call(maps, q, k, v, 0, None, _flat(state, None))[0]
