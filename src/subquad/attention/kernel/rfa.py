"""Random feature attention (RFA): random Fourier features of normalised q and k, and a gate.

With x = √scale·q/|q|, y = √scale·k/|k| and ω ~ N(0, I),

    E φ(x)·φ(y) = exp(−|x − y|²/2) = e^{−scale}·exp(scale·cos(q, k)),
    φ(x) = R^-½ [cos ω_1·x, …, cos ω_R·x, sin ω_1·x, …, sin ω_R·x]

(Rahimi & Recht 2007), so that attention with these features estimates softmax attention of
cosine similarities, from sums over keys in a state of constant size. The gate forgets:

    g_t = sigmoid(w·k_t + b)
    S_t = g_t S_{t−1} + (1 − g_t) φ(k_t) v_tᵀ,   z_t = g_t z_{t−1} + (1 − g_t) φ(k_t)
    out_t = φ(q_t)·S_t / φ(q_t)·z_t

Unrolled, key j has the weight (1 − g_j) Π_{j < s ≤ t} g_s at time t. The product is e^{A_t − A_j}
with A_t = Σ_{s ≤ t} ln g_s, and e^{A_t} cancels in the ratio. So the gated form is linear
attention with a log-weight ln(1 − g_j) − A_j for each key, and no recurrence is left; A is
taken relative to the end of a segment of `SEGMENT` tokens, so that it never grows large, and
the state decays from segment to segment. Peng et al. 2021, arXiv 2103.02143, sections 3.1, 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad.attention.base import Absent, Capabilities, Cost, Info, State, Support
from subquad.attention.kernel.engine import (
    FeatureMaps,
    Flat,
    KernelMechanism,
    LinearFeatures,
    LinearState,
    _call,
    _flat,
)
from subquad.attention.masks import Mask
from subquad.errors import OptionError
from subquad.features.draws import DRAWS, draw_projection
from subquad.features.sphere import unit
from subquad.kernels.linear import EMPTY, LN2, LOG2E
from subquad.kernels.transforms import transformed
from subquad.options import Config, choice_problem, flag_problem, integer_problem, number_problem

__all__ = ["RFA", "RFAConfig"]

SEGMENT = 512
"""Tokens over which ln g is summed. In float32 a sum A of n terms of size δ is off by n·δ·2^-24,
and so is the weight e^{A_t − A_j} of a key d tokens ago, relative to itself; as keys' weights
fall like e^{−δd}, a normalised output is off by at most n·2^-24·δe^{−δ}/(1 − e^{−δ}) ≤ 3e-5."""


@dataclass(frozen=True)
class RFAConfig(Config):
    """Options of random feature attention.

    Args:
        features: M, number of features: M/2 frequencies ω, a cosine and a sine each.
        gate: forget the past by a learned gate of each key.
        gate_bias: b at the start; the memory of a gate is about e^b tokens.
        learned: the standard deviation of ω is a parameter for each head and dimension, 1 at
            the start.
        draw: directions of ω: iid (as in the paper), orthogonal, simplex.
        clip: least normaliser, as a share of the keys' total weight; such a row's output
            shrinks instead of exploding.
    """

    mechanism: ClassVar[str] = "rfa"
    sizes: ClassVar[tuple[str, ...]] = ("features",)

    features: int = 128
    gate: bool = False
    gate_bias: float = 4.0
    learned: bool = False
    draw: str = "iid"
    clip: float = 0.1

    def problems(self) -> Iterator[str]:
        yield from integer_problem("features", self.features, 2)
        if isinstance(self.features, int) and self.features % 2:
            yield f"features={self.features} must be even: a cosine and a sine of each frequency"
        yield from flag_problem("gate", self.gate)
        yield from number_problem("gate_bias", self.gate_bias, -math.inf)
        if self.gate is False and self.gate_bias != type(self).gate_bias:
            yield "gate_bias is an option of gate=true"
        yield from flag_problem("learned", self.learned)
        yield from choice_problem("draw", self.draw, DRAWS)
        yield from number_problem("clip", self.clip, 0.0, 1.0, open_low=True)


def _flops(length: int, head_dim: int, value_dim: int, config: RFAConfig) -> float:
    # ω·x for q and k 2·2·L·(M/2)·D, state and read 2·2·L·M·V.
    return 4.0 * length * config.features * (0.5 * head_dim + value_dim)


def _memory(length: int, head_dim: int, value_dim: int, config: RFAConfig) -> float:
    # The state, φ of one chunk, and normalised q and k.
    return 4.0 * (config.features * (value_dim + 1 + min(length, 1024)) + 2 * length * head_dim)


class RFA(KernelMechanism):
    """Random feature attention; options in `RFAConfig`.

        out_i = φ(x_i)·Σ_j g_ij φ(y_j) v_jᵀ / max(φ(x_i)·Σ_j g_ij φ(y_j), clip·Σ_j g_ij)

    with x = √scale·q/|q|, y = √scale·k/|k| and g_ij = 1, or with ``gate=true`` the decay
    (1 − g_j) Π_{j < s ≤ i} g_s. The default scale is 1.

    The kernel estimate is unbiased, with variance (1 − e^{−r²})²/M for r = |x − y| and iid ω.
    It is signed, so that a normaliser can come near zero: `clip` bounds it below. At scale 1 the
    kernel is ≥ e^-2 = 0.135 everywhere, above the default clip of 0.1, so that the guard acts on
    errors of estimation only; at scale s choose clip < e^{−2s}. With a gate the bound is the
    same share of the *decayed* weights. Partial sums are not clipped.

    With a gate a masked key neither writes nor decays. Where a query may read keys up to some
    position (its own under a causal mask, a prefix, all keys without a causal mask), it reads the
    state after that position: without a causal mask the last keys weigh most, for every query.

    Gradients are exact within a call. From call to call they pass through the sums of a state, but
    not through its total weight, which rows at the floor divide by.

    A vector of zeros stays zero, with the features cos 0 = 1, sin 0 = 0.

    Cost O((L+S)·M·(D+V)) time, O(M·V) state.

    Deviations from the paper: the gate reads the key k_t, one weight vector a key/value head,
    since attention does not see the layer's input x_t; its bias starts at 4 (a memory of 55
    tokens) instead of zero (of 2); signed normalisers are clipped; an own draw for each
    key/value head.

    Raises:
        OptionError: wrong options; all problems at once.

    Example:
        >>> import torch, subquad as sq
        >>> mech = sq.build("rfa(gate=true)", head_dim=8, num_heads=2)
        >>> q, k, v = (torch.randn(1, 2, 50, 8) for _ in range(3))
        >>> out, state = mech.prefill(q[:, :, :40], k[:, :, :40], v[:, :, :40])
        >>> rest, state = mech.step(q[:, :, 40:], k[:, :, 40:], v[:, :, 40:], state)
        >>> whole = mech(q, k, v, causal=True)
        >>> torch.allclose(torch.cat([out, rest], 2), whole, atol=1e-5)
        True
    """

    name = "rfa"
    family = "kernel"
    Config = RFAConfig
    config: RFAConfig
    projection: Tensor

    info = Info(
        summary="random Fourier features of normalised q and k, with an optional forget gate",
        formula="out_i = φ(x_i)·Σ_j φ(y_j) v_jᵀ / φ(x_i)·Σ_j φ(y_j),  x = √scale·q/|q|, "
        "y = √scale·k/|k|,  φ(x) = (M/2)^-½ [cos ω_m·x, sin ω_m·x], ω_m ~ N(0, I)",
        cost=Cost("O(L·M·(D+V))", _flops, _memory),
        paper="Peng et al. 2021, Random Feature Attention, arXiv 2103.02143, sections 3.1 and 3.2 "
        "(gate)",
        limit="softmax of scale·cos(q, k) as M → ∞ (error ∝ M^-½); with a gate that attention "
        "with every key's weight decayed",
        options={
            "features": "M, number of features, even",
            "gate": "forget the past by a learned gate of each key",
            "gate_bias": "the gate's bias at the start: a memory of about e^b tokens",
            "learned": "standard deviations of ω are parameters",
            "draw": "directions of ω: iid, orthogonal, simplex",
            "clip": "least normaliser, as a share of the keys' (decayed) weight",
        },
        scale="1",
        deviations="the gate reads the key instead of the layer's input, and starts with bias 4; "
        "signed normalisers are clipped; own draw per key/value head",
        sample="rfa(features=64)",
        use="models trained with it; with gate=true where recent tokens matter more, as in "
        "language models.",
    )

    def __init__(
        self,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **sizes: Any,
    ) -> None:
        super().__init__(device=device, dtype=dtype, **sizes)
        config, kv, dim = self.config, self.num_kv_heads, self.head_dim
        dtype = dtype or torch.get_default_dtype()

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, device=device, dtype=dtype)

        self.register_buffer("projection", zeros(kv, config.features // 2, dim))
        if config.learned:
            self.deviation = nn.Parameter(zeros(kv, dim))
        if config.gate:
            self.gate_weight = nn.Parameter(zeros(kv, dim))
            self.gate_bias = nn.Parameter(zeros(kv))
        self.reset_parameters()

    @classmethod
    def capabilities_for(cls, config: RFAConfig) -> Capabilities:
        learned = [name for name, on in (("gate", config.gate), ("ω", config.learned)) if on]
        partial: Support = True
        compiled: Support = True
        if config.gate:
            partial = Absent(
                "a key's weight depends on the gates of later keys, which another part does not "
                "know"
            )
            compiled = Absent("gates are summed segment by segment, in Python")
        return Capabilities(
            prefix=True,
            state="constant",
            partial=partial,
            segments=Absent("one state serves one sequence; call once for each segment"),
            window=Absent("features sum over all keys; a window is sparse attention"),
            compile=compiled,
            functional=Absent(f"learned parameters of its {' and '.join(learned)}")
            if learned
            else True,
            reach="all past tokens, decayed by the gate" if config.gate else "all past tokens",
        )

    def _scale(self, scale: float | None) -> float:
        return 1.0 if scale is None else float(scale)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws ω, and the gate's weights from N(0, 1/D), by the seed."""
        if self.projection.is_meta:
            return
        kv, rows, dim = self.projection.shape
        self.projection.copy_(
            draw_projection(
                rows, dim, heads=kv, draw=self.config.draw, seed=self.seed, dtype=torch.float64
            )
        )
        if self.config.learned:
            self.deviation.fill_(1.0)
        if self.config.gate:
            drawn = draw_projection(
                1, dim, heads=kv, draw="iid", seed=self.seed + 1_000_003, dtype=torch.float64
            )
            self.gate_weight.copy_(drawn[:, 0] * dim**-0.5)
            self.gate_bias.fill_(self.config.gate_bias)

    # ---- features ------------------------------------------------------------------------

    def _features(
        self, q: Tensor, k: Tensor | None, mask: Mask | None, scale: float
    ) -> LinearFeatures:
        """Maps of normalised vectors."""
        if scale <= 0:
            raise OptionError(f"rfa: scale={scale} must be > 0: it is split between q and k")
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        weight = self.projection.to(dtype).mT * math.sqrt(scale)
        if self.config.learned:
            weight = weight * self.deviation.to(dtype)[..., None]

        def query_log() -> Tensor:  # the kernel is e^{−scale} exp(scale·cos)
            return q.new_full(q.shape[:-1], scale, dtype=dtype)

        return LinearFeatures(
            weight, weight, activation="trig", query_log=query_log, clip=self.config.clip
        )

    # ---- sums ----------------------------------------------------------------------------

    def _sums(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, clipped: bool = True
    ) -> tuple[Tensor, Tensor, Tensor, FeatureMaps]:
        return super()._sums(_unit(q), _unit(_cleared(k, mask.key)), v, mask, scale, clipped)

    def _continue(
        self, q: Tensor, k: Tensor, v: Tensor, state: LinearState | None,
        key_mask: Tensor | None, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor, FeatureMaps, State]:  # fmt: skip
        return super()._continue(_unit(q), _unit(_cleared(k, key_mask)), v, state, key_mask, scale)

    def _read(self, q: Tensor, state: LinearState, scale: float) -> Tensor:
        return super()._read(_unit(q), state, scale).to(q.dtype)

    # ---- the gate ------------------------------------------------------------------------

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
        if not self.config.gate:
            return super()._attend(q, k, v, mask, scale)
        queries, keys = q.shape[2], k.shape[2]
        if not mask.causal:
            return self._gated(q, k, v, keys, mask.key, scale)[0]
        absorb = max(keys - queries, 0)
        if not isinstance(mask.prefix, Tensor):
            absorb = min(keys, max(mask.prefix or 0, absorb))
            return self._gated(q, k, v, absorb, mask.key, scale)[0]
        # A query inside its row's prefix sees exactly the prefix; one behind it, a causal row.
        inside = torch.arange(keys, device=k.device) < mask.prefix[:, None]
        opened = inside if mask.key is None else inside & mask.key
        position = torch.arange(queries, device=q.device) + (keys - queries)
        early = (position < mask.prefix[:, None])[:, None, :, None]
        first = self._gated(q, k, v, keys, opened, scale)[0]
        then = self._gated(q, k, v, absorb, mask.key, scale)[0]
        return torch.where(early, first, then)

    def _prefill(
        self, q: Tensor, k: Tensor, v: Tensor, state: LinearState | None,
        key_mask: Tensor | None, scale: float,
    ) -> tuple[Tensor, State]:  # fmt: skip
        queries, keys = q.shape[2], k.shape[2]
        if not self.config.gate or queries > keys:  # the latter is refused there
            return super()._prefill(q, k, v, state, key_mask, scale)
        if state is not None:
            self._check_sums(state, self._features(q, k, None, scale))
        before = _flat(state, v.shape[-1])
        out, sums = self._gated(q, k, v, keys - queries, key_mask, scale, before)
        s, z, c, mass = (t.unflatten(0, k.shape[:2]) for t in sums)
        return out, LinearState(s, z, c, mass, keys + (0 if state is None else state.length))

    def _gated(
        self, q: Tensor, k: Tensor, v: Tensor, absorb: int, key_mask: Tensor | None,
        scale: float, state: Flat | None = None,
    ) -> tuple[Tensor, Flat]:  # fmt: skip
        """One call of the engine for each segment; the state decays in between.

        The first segment is what is absorbed, however long it is: its queries read the state
        after it, and a sum relative to the end is large only for keys that have no weight left.
        """
        k = _cleared(k, key_mask)
        log_gate, log_write = self._log_gates(k, key_mask)
        x, y = _unit(q), _unit(k)
        maps = self._features(x, y, None, scale)
        keys, shift = k.shape[2], q.shape[2] - k.shape[2]
        sizes = [absorb] if absorb else []
        sizes += [min(SEGMENT, keys - start) for start in range(absorb, keys, SEGMENT)]
        own = [sizes[0] + shift, *sizes[1:]]  # the first segment has the surplus of queries
        masks = [None] * len(sizes) if key_mask is None else key_mask.split(sizes, 1)
        parts = (log_gate.split(sizes, 2), log_write.split(sizes, 2), masks,
                 x.split(own, 2), y.split(sizes, 2), v.split(sizes, 2))  # fmt: skip
        outs, seen = [], _log_mass(state, log_gate)
        for t, (gate, write, open_, queries, ks, values) in enumerate(zip(*parts, strict=True)):
            past = gate.cumsum(-1)
            total = past[:, :, -1:]
            bias = total - past + write
            if state is not None:
                state = _decay(state, total.flatten(0, 1)[..., None])
            first = absorb if t == 0 else 0
            out, den, log_scale, state = _call(
                replace(maps, key_bias=bias.to(x.dtype)), queries, ks, values, first, open_, state,
                new_state=True,
            )  # fmt: skip
            if transformed() or (out.requires_grad and bias.requires_grad):
                if open_ is not None:
                    bias = bias.masked_fill(~open_[:, None], EMPTY)
                seen = torch.cat([(seen + total).clamp_min(EMPTY), bias], -1).logcumsumexp(-1)
                factor = self._floor(seen, out.shape[2], first > 0, den, log_scale)
                out = out * factor[..., None].to(out.dtype)
                seen = seen[:, :, -1:]
            outs.append(out)
        assert state is not None  # there is at least one key
        return (outs[0] if len(outs) == 1 else torch.cat(outs, 2)), state

    def _floor(
        self, seen: Tensor, queries: int, whole: bool, den: Tensor, log_scale: Tensor
    ) -> Tensor:
        """A factor of 1 (B, H, L) that gives rows at the floor the gradient of their floor.

        There the output is a sum over keys divided by clip·W_i, W_i = Σ_j w_ij. The engine
        takes W_i as a constant, which it is not: it depends on the gates, and unless both have
        their gradients, what they are relative to does not cancel.

        Args:
            seen: (B, Hkv, 1 + S) running ln Σ w, the first before any of the S keys.
            whole: whether queries read all keys, or causally up to their own.
            den, log_scale: normalisers (B, H, L) and log2 of what they were divided by.
        """
        last = seen.shape[-1] - 1
        if whole:
            log_w = seen[:, :, -1:].expand(-1, -1, queries)
        else:
            row = torch.arange(queries, device=seen.device) + (1 + last - queries)
            log_w = seen[:, :, row.clamp_min(0)]
        groups = den.shape[1] // seen.shape[1]
        log_w = log_w.repeat_interleave(groups, 1)
        least = torch.finfo(den.dtype).tiny
        log_den = den.detach().clamp_min(least).log().double() + LN2 * log_scale
        # What rounding leaves undecided counts as at the floor: there both gradients are right.
        close = 1e-9 if den.dtype == torch.float64 else 1e-3
        level = math.log(self.config.clip) + close
        at_floor = (log_w > 0.5 * EMPTY) & (den > 0) & (log_den <= log_w.detach() + level)
        factor = torch.exp(log_w.detach() - log_w)
        return torch.where(at_floor, factor, 1.0)

    def _log_gates(self, k: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """ln g and ln(1 − g) (B, Hkv, S) in float64; masked keys do not decay."""
        dtype = torch.float64 if k.dtype == torch.float64 else torch.float32
        weight, bias = self.gate_weight.to(dtype), self.gate_bias.to(dtype)
        logit = ((k.to(dtype) @ weight[..., None])[..., 0] + bias[:, None]).double()
        log_gate, log_write = F.logsigmoid(logit), F.logsigmoid(-logit)
        if key_mask is not None:
            log_gate = log_gate.masked_fill(~key_mask[:, None], 0.0)
        return log_gate, log_write


def _cleared(k: Tensor, key_mask: Tensor | None) -> Tensor:
    return k if key_mask is None else k.masked_fill(~key_mask[:, None, :, None], 0.0)


def _unit(x: Tensor) -> Tensor:
    """x/|x| in float32 or float64; zero stays zero."""
    return unit(x.to(torch.float64 if x.dtype == torch.float64 else torch.float32))


def _log_mass(state: Flat | None, like: Tensor) -> Tensor:
    """ln of the state's total weight (B, Hkv, 1), `EMPTY` where there is none."""
    if state is None:
        return like.new_full((*like.shape[:2], 1), EMPTY)
    c, mass = (t.detach().to(like.dtype).view(*like.shape[:2], 1) for t in state[2:])
    none = mass == 0
    return (mass.masked_fill(none, 1.0).log() + LN2 * c).masked_fill(none, EMPTY)


def _decay(state: Flat, total: Tensor) -> Flat:
    """The state times e^total: its scale moves, and gradients pass through a factor of 1."""
    s, z, c, mass = state
    if total.requires_grad or transformed():
        one = torch.exp(total - total.detach()).to(s.dtype)
        s, z = s * one, z * one
    return s, z, c + (LOG2E * total.detach()).to(c.dtype), mass
