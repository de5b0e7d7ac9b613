"""The linear engine: kernel attention for any pair of feature maps.

    out_i = φ_q(q_i)·(Σ_j φ_k(k_j) v_jᵀ) / φ_q(q_i)·(Σ_j φ_k(k_j))

A kernel mechanism says which feature maps a call uses (`KernelMechanism._features`); the
engine gives bidirectional, causal and prefix attention, partial sums, prefill and step. The
algorithm, its stabilisation and its cost are documented in `subquad.kernels.linear`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar
from weakref import ref

import torch
from torch import Tensor

from subquad.attention.base import Mechanism, State
from subquad.attention.masks import Mask
from subquad.attention.outside import Side, outside
from subquad.attention.partial import Partial, combine
from subquad.attention.prepared import (
    TOKENS,
    Known,
    Prepared,
    held_tensors,
    may_be_prepared,
    written,
)
from subquad.errors import OptionError, ShapeError
from subquad.kernels.dispatch import choose
from subquad.kernels.linear import ACTIVATIONS, LN2
from subquad.kernels.memory import has_data
from subquad.kernels.native.engine import DTYPES
from subquad.kernels.native.step import Step, Sums
from subquad.kernels.ops import linear_attention, linear_attention_functions
from subquad.kernels.transforms import mapped

__all__ = [
    "FunctionFeatures",
    "KernelMechanism",
    "LinearFeatures",
    "LinearState",
    "SignedFeatures",
]


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


@dataclass(frozen=True, eq=False)
class SignedFeatures:
    """Weights of either sign for positive features: w_ij = Σ_m α_m(q_i)·exp(u_m(k_j)).

    Positive and negative part of α = α₊ − α₋ are two positive maps, read side by side from one
    state: sums N₊, D₊ and N₋, D₋ and outputs o = N/D. A normaliser D₊ − D₋ can vanish, so the
    negative part is limited to a share of the positive one, row by row and, under a causal mask,
    by the keys seen so far:

        out = (N₊ − s·N₋)/(D₊ − s·D₋) = (o₊ − r·o₋)/(1 − r),   r = s·D₋/D₊ = min(D₋/D₊, 1 − clip)

    Args:
        query: α of (B, Hkv, n, D) → (B, Hkv, n, M); no row may be without positive entry.
        key: u of (B, Hkv, n, D) → (B, Hkv, n, M).
        features: M.
        key_bias, query_log: as in `LinearFeatures`.
        clip: least normaliser as a share of its positive part; 0 does not limit.
        parameters: tensors inside the functions that gradients shall reach.
    """

    query: Callable[[Tensor], Tensor]
    key: Callable[[Tensor], Tensor]
    features: int
    query_log: Callable[[], Tensor] | None = None
    clip: float = 0.0
    key_bias: Tensor | None = None
    parameters: tuple[Tensor, ...] = ()

    def logarithms(self, x: Tensor) -> Tensor:
        """ln α₊ and ln α₋ of (B, Hkv, 2n, D), whose second half repeats the first."""
        alpha = self.query(x[:, :, : x.shape[2] // 2])
        # Weights below √tiny are left out: the derivative of their logarithm would overflow.
        least = torch.finfo(alpha.dtype).tiny ** 0.5
        log = torch.log(alpha.abs().clamp_min(least))
        above = log.masked_fill(alpha <= least, -torch.inf)
        below = log.masked_fill(alpha >= -least, -torch.inf)
        # A row without negative weight gets its positive ones times 2^-100, below rounding:
        # an empty row would be mistaken for one that underflowed.
        none = alpha.detach().amin(-1, keepdim=True) >= -least
        if mapped() or bool(none.any()):
            below = torch.where(none, above - 100.0 * LN2, below)
        return torch.cat([above, below], 2)


FeatureMaps = LinearFeatures | FunctionFeatures | SignedFeatures


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

    owns: ClassVar[bool] = True

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
    state: Flat | None, new_state: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Flat]:  # fmt: skip
    if isinstance(maps, LinearFeatures):
        return linear_attention(
            q, k, v, maps.wq, maps.bq, maps.wk, maps.bk,
            activation=maps.activation, quad=maps.quad, clip=maps.clip, absorb=absorb,
            key_bias=maps.key_bias, key_mask=key_mask, state=state, new_state=new_state,
        )  # fmt: skip
    if isinstance(maps, SignedFeatures):
        return _signed(maps, q, k, v, absorb, key_mask, state)
    return linear_attention_functions(
        q, k, v, _checked(maps.query, maps), _checked(maps.key, maps), log=maps.log,
        features=maps.features, parameters=maps.parameters, clip=maps.clip, absorb=absorb,
        key_bias=maps.key_bias, key_mask=key_mask, state=state,
    )  # fmt: skip


def _signed(
    maps: SignedFeatures, q: Tensor, k: Tensor, v: Tensor, absorb: int,
    key_mask: Tensor | None, state: Flat | None,
) -> tuple[Tensor, Tensor, Tensor, Flat]:  # fmt: skip
    above, below, new = signs(maps, q, k, v, absorb, key_mask, state)
    part = limited(above, below, maps.clip)
    return part.output().to(v.dtype), part.den, part.log_scale / LN2, new


def signs(
    maps: SignedFeatures, q: Tensor, k: Tensor, v: Tensor, absorb: int,
    key_mask: Tensor | None, state: Flat | None,
) -> tuple[Partial, Partial, Flat]:  # fmt: skip
    """Sums under α₊ and under α₋, without the factors of `query_log`, and the new state."""
    if v.dtype not in (torch.float32, torch.float64):  # the two may cancel
        v = v.float()
    grouped = q.unflatten(1, (k.shape[1], -1))
    twice = torch.cat([grouped, grouped], 2).flatten(1, 2)
    *found, new = linear_attention_functions(
        twice, k, v, maps.logarithms, maps.key, log=True, features=maps.features,
        parameters=maps.parameters, absorb=absorb, key_bias=maps.key_bias, key_mask=key_mask,
        state=state,
    )  # fmt: skip
    split = [t.unflatten(1, (k.shape[1], 2, -1)).unbind(2) for t in found]
    above, below = (
        _absolute(out.flatten(1, 2), den.flatten(1, 2), log_scale.flatten(1, 2), None)
        for out, den, log_scale in zip(*split, strict=True)
    )
    return above, below, new


def limited(above: Partial, below: Partial, clip: float) -> Partial:
    """N₊ − s·N₋ and D₊ − s·D₋, s = min(1, (1 − clip)·D₊/D₋), from sums under α₊ and α₋.

    With clip = 0 nothing is limited: s = 1.
    """
    if not clip:
        return combine([above, Partial(-below.num, -below.den, below.log_scale)])
    first, second = (
        torch.log(part.den.masked_fill(part.den == 0, 1.0)) + part.log_scale
        for part in (above, below)
    )
    share = torch.exp((second - first).clamp_max(math.log1p(-clip)))
    share = share.masked_fill((above.den == 0) | (below.den == 0), 0.0)
    num = above.num - (share * above.den)[..., None] * below.output()
    return Partial(num, above.den * (1.0 - share), above.log_scale)


def _width(maps: FeatureMaps) -> int:
    """M, the number of features that the maps give."""
    if not isinstance(maps, LinearFeatures):
        return maps.features
    per_column = 1 if maps.activation == "exp" else ACTIVATIONS[maps.activation].expand
    return per_column * maps.wk.shape[-1]


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
        asked = not maps.log and not maps.clip and not mapped()
        if asked and bool((value < 0).any()):
            raise OptionError(
                "the feature function gave negative features: attention weights would change "
                "sign and normalisers vanish; use a non-negative function"
            )
        return value

    return features


def _absolute(out: Tensor, den: Tensor, log_scale: Tensor, query_log: Tensor | None) -> Partial:
    """A call's results as sums; `query_log` is what its φ_q leave out."""
    log_scale = log_scale * LN2
    if query_log is not None:
        log_scale = log_scale + query_log
    return Partial(out * den[..., None], den, log_scale)


_steps: Known[Step] = Known()
_looks: Known[Step] = Known()


def _prepared(
    mechanism: KernelMechanism, q: Tensor, k: Tensor, v: Tensor, scale: float | None
) -> Prepared[Step] | None:
    """Steps like this one, prepared where that is possible."""
    readable = all(t.dtype in DTYPES and t.is_cpu and has_data(t) for t in (q, k, v))
    if not (readable and mechanism._fixed() and may_be_prepared()):
        return None
    held = held_tensors(mechanism)
    if held is None:
        return None
    maps = mechanism._features(q, None, None, mechanism._scale(scale))
    assert isinstance(maps, LinearFeatures), "fixed maps are linear"
    weighted = maps.quad != 0.0
    choice = choose(
        "cpu", q.dtype, v.dtype, maps.activation, maps.wk.shape[-1], maps.clip, weighted
    )
    if choice.backend != "native" or maps.bq is not None or maps.bk is not None:
        return None
    return Prepared(Step(q, k, v, maps.wq, maps.wk, maps.activation, maps.quad), scale, held)


def _sums_of(prepared: Prepared[Step], state: LinearState) -> Sums | None:
    """The state's tensors, or None if the step could not read them."""
    sums = state.s, state.z, state.c, state.mass
    return sums if prepared.knows(state) or prepared.step.takes_sums(sums) else None


class KernelMechanism(Mechanism):
    """Base of mechanisms that only choose feature maps.

    On a CPU, steps of decoding that are like the one before are prepared once: `prefill` of a
    few tokens into a state, and `step`.
    """

    state_type = LinearState

    def _fixed(self) -> bool:
        """Whether the maps of a call depend on its scale alone, and on no input."""
        return False

    def prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        state: State | None = None,
        key_mask: Tensor | None = None,
        scale: float | None = None,
        donate: bool = False,
    ) -> tuple[Tensor, State]:
        """As `Mechanism.prefill`; a donated state is written over by steps of one token."""
        if (
            not isinstance(state, LinearState)
            or q.dim() != 4
            or k.dim() != 4
            or not 0 < q.shape[2] == k.shape[2] <= TOKENS
            or torch.compiler.is_compiling()
        ):
            return super().prefill(q, k, v, state=state, key_mask=key_mask, scale=scale)
        prepared = _steps.get(self, q)
        if (
            prepared is not None
            and self._fixed()
            and prepared.fits(self, q, scale)
            and prepared.step.takes_keys(k, v, key_mask)
            and (sums := _sums_of(prepared, state)) is not None
        ):
            # What is part of a graph is needed as it is when gradients go back through it.
            donate = donate and prepared.step.in_place and not sums[0].requires_grad
            out, (s, z, c, mass) = prepared.step(q, k, v, key_mask, sums, donate)
            if donate:
                written(*sums)
            if out is not None or donate:
                new = LinearState(s, z, c, mass, state.length + k.shape[2])
                prepared.last = ref(new)
                return (super().step(q, None, None, new)[0] if out is None else out), new
        found = super().prefill(q, k, v, state=state, key_mask=key_mask, scale=scale)
        _steps.remember(self, q, _prepared(self, q, k, v, scale))
        return found

    def step(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        state: State | None,
        *,
        key_mask: Tensor | None = None,
        scale: float | None = None,
        donate: bool = False,
    ) -> tuple[Tensor, State]:
        """As `Mechanism.step`; a donated state is written over by steps of one token."""
        if (
            not isinstance(state, LinearState)
            or not (k is None and v is None and key_mask is None)
            or q.dim() != 4
            or not 0 < q.shape[2] <= TOKENS
            or torch.compiler.is_compiling()
        ):
            return super().step(q, k, v, state, key_mask=key_mask, scale=scale, donate=donate)
        prepared = _looks.get(self, q)
        if (
            prepared is not None
            and self._fixed()
            and prepared.fits(self, q, scale)
            and (sums := _sums_of(prepared, state)) is not None
        ):
            prepared.last = ref(state)
            return prepared.step.look(q, sums), state
        found = super().step(q, None, None, state, scale=scale)
        _looks.remember(self, q, _prepared(self, q, *self._no_keys(q, state), scale))
        return found

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

    def _partial(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, clipped: bool = False
    ) -> Partial:
        if q.dtype not in (torch.float32, torch.float64):
            q, k, v = q.float(), k.float(), v.float()
        out, den, log_scale, maps = self._sums(q, k, v, mask, scale, clipped)
        log = None if maps.query_log is None else maps.query_log()
        return _absolute(out, den, log_scale, log)

    def _outside(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        scale: float,
        window: int,
        closed: Tensor | None = None,
    ) -> list[Partial]:
        # One choice of maps for both sides: their statistics are those of all open keys.
        maps = self._features(q, k, mask, scale)
        if closed is not None:
            bias = maps.key_bias
            if bias is None:
                bias = torch.zeros(k.shape[:-1], dtype=q.dtype, device=k.device)
            maps = replace(maps, key_bias=bias.masked_fill(closed, -math.inf))
        log = None if maps.query_log is None else maps.query_log()

        def run(side: Side) -> Partial:
            own = maps
            if maps.key_bias is not None:
                own = replace(maps, key_bias=side.of_keys(maps.key_bias))
            x, y, values = side.of_queries(q), side.of_keys(k), side.of_keys(v)
            key = None if mask.key is None else side.of_keys(mask.key, 1)
            absorb = y.shape[2] - x.shape[2] if side.causal else y.shape[2]
            out, den, log_scale, _ = _call(own, x, y, values, absorb, key, None)
            return _absolute(out, den, log_scale, None if log is None else side.of_queries(log))

        return outside(run, q.shape[2], k.shape[2], window, mask.causal)

    def _prefill(
        self, q: Tensor, k: Tensor, v: Tensor, state: LinearState | None,
        key_mask: Tensor | None, scale: float,
    ) -> tuple[Tensor, State]:  # fmt: skip
        out, _, _, _, new = self._continue(q, k, v, state, key_mask, scale)
        return out, new

    def _prefill_partial(
        self, q: Tensor, k: Tensor, v: Tensor, state: LinearState | None,
        key_mask: Tensor | None, scale: float,
    ) -> tuple[Partial, State]:  # fmt: skip
        out, den, log_scale, maps, new = self._continue(q, k, v, state, key_mask, scale)
        log = None if maps.query_log is None else maps.query_log()
        return _absolute(out, den, log_scale, log), new

    def _continue(
        self, q: Tensor, k: Tensor, v: Tensor, state: LinearState | None,
        key_mask: Tensor | None, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor, FeatureMaps, State]:  # fmt: skip
        mask = Mask(causal=True, key=key_mask)
        maps = self._features(q, k, mask, scale)
        if state is not None:
            self._check_sums(state, maps)
        queries, keys = q.shape[2], k.shape[2]
        if queries > keys:
            raise ShapeError(
                f"prefill needs L ≤ S, given L={queries} queries for S={keys} new keys"
            )
        before = _flat(state, v.shape[-1])
        out, den, log_scale, sums = _call(
            maps, q, k, v, keys - queries, key_mask, before, new_state=True
        )
        shape = (k.shape[0], k.shape[1])
        s, z, c, mass = (t.unflatten(0, shape) for t in sums)
        seen = 0 if state is None else state.length
        return out, den, log_scale, maps, LinearState(s, z, c, mass, seen + keys)

    def _check_sums(self, state: LinearState, maps: FeatureMaps) -> None:
        wanted = (self.num_kv_heads, _width(maps))
        if tuple(state.s.shape[1:3]) != wanted:
            raise ShapeError(
                f"{self.name}: the state must hold (B, Hkv, M, V) sums with (Hkv, M) = {wanted}, "
                f"given {tuple(state.s.shape)}"
            )

    def _read(self, q: Tensor, state: LinearState, scale: float) -> Tensor:
        maps = self._features(q, None, None, scale)
        self._check_sums(state, maps)
        return _call(maps, q, *self._no_keys(q, state), 0, None, _flat(state, None))[0]

    @staticmethod
    def _no_keys(q: Tensor, state: LinearState) -> tuple[Tensor, Tensor]:
        rows, kv, _, value = state.s.shape
        return q.new_empty(rows, kv, 0, q.shape[-1]), q.new_empty(rows, kv, 0, value)
