"""Performer: softmax attention by random features (FAVOR+), and its whole family.

exp(x·y) is an expectation over ω ~ N(0, I) of a product of a function of x and one of y, so
that attention becomes linear in the length. With x = √scale·q, y = √scale·k:

    positive    exp(x·y) = E exp(ω·x − |x|²/2) · exp(ω·y − |y|²/2)
    hyperbolic  the same with ω and −ω in pairs
    trig        exp(x·y) = E exp(|x|²/2) exp(|y|²/2) · cos(ω·(x − y))
    oprf, derf  positive with ω ~ p instead of N(0, I), weighted by √(N(ω)/p(ω)) on each side
    relu        not softmax: φ(x) = max(ω·x, 0) + 1e-3

M features estimate E by a mean. Choromanski et al. 2021, arXiv 2009.14794: Lemma 1 (positive,
hyperbolic), eq. 5–9, section 3 (orthogonality); Likhosherstov et al. 2022, arXiv 2205.15317
(OPRF); Likhosherstov et al. 2023, arXiv 2302.00787 (DERF); Reid et al. 2023, arXiv 2301.13856
(simplex draws).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from subquad.attention.base import Absent, Capabilities, Cost, Info, Support, computed_again
from subquad.attention.kernel.engine import (
    FeatureMaps,
    FunctionFeatures,
    KernelMechanism,
    LinearFeatures,
)
from subquad.attention.masks import Mask
from subquad.attention.partial import Partial
from subquad.errors import CalibrationError, OptionError
from subquad.features.draws import DRAWS, NORMS, draw_projection
from subquad.features.gauges import (
    GAUGES,
    Gauge,
    Moments,
    make_gauge,
    merge_moments,
    moments,
    pool_moments,
)
from subquad.features.spectral import SpectralMap
from subquad.options import (
    Config,
    choice_problem,
    flag_problem,
    integer_problem,
    number_problem,
)

__all__ = ["ESTIMATORS", "Performer", "PerformerConfig"]

ESTIMATORS = ("positive", "hyperbolic", "trig", "oprf", "derf", "relu")
"""Named estimators; a `SpectralMap` or any non-negative function of ω·x is one too."""

_PAIRED = ("hyperbolic", "trig")
_PROPOSALS = ("oprf", "derf")


@dataclass(frozen=True)
class PerformerConfig(Config):
    """Options of the Performer; they combine freely, exceptions are reported.

    Args:
        features: M, number of random features. The error falls like M^-½ once M exceeds the
            kernel's relative variance exp(|x+y|²) − 1.
        estimator: a name in `ESTIMATORS`, a `subquad.features.SpectralMap`, or a function
            f ≥ 0 with φ(x) = f(ω·x), elementwise or a module (generalised attention).
        draw: directions of ω: iid, orthogonal (blocks of D), simplex.
        norms: lengths of ω: chi (unbiased), sqrt_d, quantile (both biased).
        gauge: none, centre_keys, centre, balance: see `subquad.features.gauges`.
        statistics: where gauge, oprf and derf take their moments: "call" (each call's own
            queries and keys; bidirectional only) or "calibrated" (`Performer.calibrate`).
        learned: ω are parameters, drawn as ever and then trained (a softmax model's recovery);
            estimates are no longer unbiased once they have moved.
        redraw: draw ω anew every so many training calls; None never. Never in eval.
            Recomputation by activation checkpointing counts as a call: do not combine them.
        spread: derf's proposal has variance 1 + spread·λ along an eigenvector of
            E[(x+y)(x+y)ᵀ] with eigenvalue λ; None takes the closed form of FAVOR#.
        clip: least normaliser of signed estimators (trig, spectral) as a share of the keys'
            total weight; such a row's output shrinks instead of exploding.
    """

    mechanism: ClassVar[str] = "performer"
    sizes: ClassVar[tuple[str, ...]] = ("features",)

    features: int = 256
    estimator: str | SpectralMap | Callable[[Tensor], Tensor] = "positive"
    draw: str = "orthogonal"
    norms: str = "chi"
    gauge: str = "none"
    statistics: str = "call"
    learned: bool = False
    redraw: int | None = None
    spread: float | None = None
    clip: float = 0.1

    def problems(self) -> Iterator[str]:
        yield from integer_problem("features", self.features, 1)
        given: object = self.estimator
        if isinstance(given, str):
            yield from choice_problem("estimator", given, ESTIMATORS)
        elif not (callable(given) or isinstance(given, SpectralMap)):
            names = ", ".join(ESTIMATORS)
            yield f"estimator={given!r} is none of {names}, a SpectralMap or a function"
        yield from choice_problem("draw", self.draw, DRAWS)
        yield from choice_problem("norms", self.norms, NORMS)
        yield from choice_problem("gauge", self.gauge, GAUGES)
        yield from choice_problem("statistics", self.statistics, ("call", "calibrated"))
        yield from flag_problem("learned", self.learned)
        if self.redraw is not None:
            yield from integer_problem("redraw", self.redraw, 1)
            if self.learned is True:
                yield f"redraw={self.redraw} would throw away what learned=true has learned"
        if self.spread is not None:
            yield from number_problem("spread", self.spread, 0.0)
            if self.estimator != "derf":
                yield "spread is an option of estimator=derf"
        yield from number_problem("clip", self.clip, 0.0, 1.0, open_low=True)
        if self.estimator in _PAIRED and isinstance(self.features, int) and self.features % 2:
            yield f"features={self.features} must be even: {self.estimator} takes them in pairs"
        if self.gauge != "none" and not self.approximates_softmax:
            yield f"gauge={self.gauge!r} changes this kernel: gauges leave only softmax unchanged"
        if isinstance(self.estimator, SpectralMap):
            own = (self.redraw, self.draw, self.norms, self.learned)
            if own != (None, "orthogonal", "chi", False):
                yield (
                    "redraw, draw, norms and learned do not apply to a SpectralMap: its ω are fixed"
                )
            if self.estimator.features != self.features:
                wanted = self.estimator.features
                yield f"features={self.features} must equal the SpectralMap's {wanted}"

    @property
    def approximates_softmax(self) -> bool:
        """Whether the kernel estimates exp(scale·q·k)."""
        return isinstance(self.estimator, str) and self.estimator != "relu"

    @property
    def uses_moments(self) -> bool:
        """Whether moments of queries and keys are needed."""
        return self.gauge != "none" or self.estimator in _PROPOSALS


def _flops(length: int, head_dim: int, value_dim: int, config: PerformerConfig) -> float:
    # q and k projections 2·2·L·M·D, state and read 2·2·L·M·V.
    return 4.0 * length * config.features * (head_dim + value_dim)


def _memory(length: int, head_dim: int, value_dim: int, config: PerformerConfig) -> float:
    # The state, and φ of one chunk of ≤ 1024 tokens.
    return 4.0 * config.features * (value_dim + 1 + min(length, 1024))


class Performer(KernelMechanism):
    """Softmax attention by random features; options in `PerformerConfig`.

    Cost O((L+S)·M·(D+V)) time, O(M·V) state; see `subquad.kernels.linear` for the algorithm.

    Deviations from the paper: no additive epsilon inside the features (a running maximum
    keeps them in range and changes nothing), an own draw for each key/value head, a draw
    that is never renewed in eval.

    Raises:
        OptionError: wrong options; all problems at once.
        UnsupportedError: a causal mask or a state with statistics of the call.
        CalibrationError: calibrated statistics before `calibrate`.

    Example:
        >>> import torch, subquad as sq
        >>> mech = sq.build("performer", head_dim=8, num_heads=2, features=64, draw="iid")
        >>> q, k, v = (torch.randn(1, 2, 50, 8) for _ in range(3))
        >>> out, state = mech.prefill(q[:, :, :40], k[:, :, :40], v[:, :, :40])
        >>> rest, state = mech.step(q[:, :, 40:], k[:, :, 40:], v[:, :, 40:], state)
        >>> whole = mech(q, k, v, causal=True)
        >>> torch.allclose(torch.cat([out, rest], 2), whole, atol=1e-5)
        True
    """

    name = "performer"
    family = "kernel"
    Config = PerformerConfig
    config: PerformerConfig
    projection: Tensor
    projection_k: Tensor
    phase: Tensor
    draw_index: Tensor
    tokens: Tensor
    mean_q: Tensor
    mean_k: Tensor
    cov_q: Tensor
    cov_k: Tensor

    info = Info(
        summary="softmax attention by positive orthogonal random features (FAVOR+) and relatives",
        formula="out_i = φ(q_i)·Σ_j φ(k_j) v_jᵀ / φ(q_i)·Σ_j φ(k_j),  "
        "φ(x) = M^-½ exp(ω_m·x − |x|²/2), m = 1..M,  ω_m ~ N(0, I)",
        cost=Cost("O(L·M·(D+V))", _flops, _memory),
        paper="Choromanski et al. 2021, Rethinking Attention with Performers, arXiv 2009.14794",
        limit="softmax as M → ∞ (error ∝ M^-½); at any M the attention of its own kernel "
        "φ_q·φ_k, exactly",
        options={
            "features": "M, number of random features",
            "estimator": f"{', '.join(ESTIMATORS)}, a SpectralMap, or a function f ≥ 0: φ = f(ω·x)",
            "draw": "directions of ω: iid, orthogonal, simplex",
            "norms": "lengths of ω: chi (unbiased), sqrt_d or quantile (biased)",
            "gauge": "change of variables that leaves softmax unchanged: none, centre_keys (can be "
            "worse than none), centre, balance",
            "statistics": "moments for gauge, oprf, derf: call (bidirectional only) or calibrated",
            "learned": "ω are parameters: drawn, then trained",
            "redraw": "draw ω anew every so many training calls; none never",
            "spread": "derf: proposal variance 1 + spread·λ; none takes the closed form",
            "clip": "least normaliser of signed estimators, as a share of the keys' weight",
        },
        deviations="no epsilon in the features; own draw per key/value head; no redraw in eval",
        use="long sequences at linear cost with a constant state, where nothing is known about "
        "which keys matter; with gauge=balance and estimator=derf for models trained with "
        "softmax.",
    )

    counters = ("_calls",)

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

        def buffer(name: str, *shape: int) -> None:
            self.register_buffer(name, torch.zeros(shape, device=device, dtype=dtype))

        if isinstance(config.estimator, SpectralMap):
            if config.estimator.dim != dim:
                raise OptionError(
                    f"performer: the SpectralMap is for dim={config.estimator.dim}, head_dim={dim}"
                )
            rows = config.estimator.features // 2
            for name in ("projection", "projection_k"):
                buffer(name, kv, rows, dim)
            buffer("phase", rows)
        else:
            rows = config.features // 2 if config.estimator in _PAIRED else config.features
            buffer("projection", kv, rows, dim)
            if config.learned:  # under the same name: a drawn checkpoint loads, and back
                drawn = self.projection
                del self.projection
                self.projection = nn.Parameter(drawn)
        if isinstance(config.estimator, nn.Module):
            self.kernel = config.estimator
        self.register_buffer("draw_index", torch.zeros((), dtype=torch.long, device=device))
        if self.calibrates_for(config):
            # Integers: a module's .half() casts floating buffers, and counts exceed 65504.
            self.register_buffer("tokens", torch.zeros(2, dtype=torch.long, device=device))
            for name in ("mean_q", "mean_k"):
                buffer(name, kv, dim)
            for name in ("cov_q", "cov_k"):
                buffer(name, kv, dim, dim)
        self._calls = 0
        self._calibrated = False
        self.reset_parameters()

    @classmethod
    def capabilities_for(cls, config: PerformerConfig) -> Capabilities:
        own: Support = True
        state: Any = "constant"
        if config.uses_moments and config.statistics == "call":
            own = Absent(
                "statistics of the call's own keys would leak the future; use "
                "statistics=calibrated and calibrate()"
            )
            state = own
        merges: Support = True
        gradient: Support = True
        if config.uses_moments and config.statistics == "call":
            merges = Absent("each call takes the statistics of its own tokens")
            gradient = Absent("the call's statistics are held fixed")
        compiled: Support = True
        if config.redraw is not None:
            compiled = Absent("redraw changes buffers by a Python counter")
        if not isinstance(config.estimator, str):
            compiled = Absent("a kernel function or spectral map runs as Python, chunk by chunk")
        learned: Support = True
        if isinstance(config.estimator, nn.Module) and any(
            p.requires_grad for p in config.estimator.parameters()
        ):
            learned = Absent("the kernel function has learned parameters")
        elif config.learned:
            learned = Absent("ω are learned parameters")
        return Capabilities(
            causal=own,
            prefix=own,
            state=state,
            partial=True,
            merges=merges,
            exact_gradient=gradient,
            compile=compiled,
            segments=Absent("one state serves one sequence; call once for each segment"),
            window=Absent("features sum over all keys; a window is sparse attention"),
            approximates="softmax" if config.approximates_softmax else None,
            functional=learned,
        )

    # ---- draws ---------------------------------------------------------------------------

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws ω from the seed; call it after materialising a module built on "meta"."""
        if self.projection.is_meta:
            return
        self.draw_index.zero_()
        self._calls = 0
        if "tokens" in self._buffers:
            for name in ("tokens", "mean_q", "mean_k", "cov_q", "cov_k"):
                self._buffers[name].zero_()  # type: ignore[union-attr]  # registered above
            self._calibrated = False
        self._draw()

    @torch.no_grad()
    def redraw(self) -> None:
        """Draws ω anew, in place, from the seed and the number of draws so far.

        In place, so that optimisers, DistributedDataParallel and saved references keep the
        buffer; the same on every rank.
        """
        self.draw_index.add_(1)
        self._draw()

    def _draw(self) -> None:
        config = self.config
        if isinstance(config.estimator, SpectralMap):
            self.projection.copy_(config.estimator.omega_q.expand_as(self.projection))
            self.projection_k.copy_(config.estimator.omega_k.expand_as(self.projection))
            self.phase.copy_(config.estimator.phase)
            return
        omega = draw_projection(
            self.projection.shape[1],
            self.head_dim,
            heads=self.num_kv_heads,
            draw=config.draw,
            norms=config.norms,
            seed=self.seed + 1_000_003 * int(self.draw_index),
            dtype=torch.float64,
        )
        self.projection.copy_(omega)

    # ---- statistics ----------------------------------------------------------------------

    @classmethod
    def calibrates_for(cls, config: PerformerConfig) -> bool:
        return config.uses_moments and config.statistics == "calibrated"

    @torch.no_grad()
    def calibrate(
        self,
        q: Tensor,
        k: Tensor,
        *,
        key_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> None:
        """Adds queries (..., H, L, D) and keys (..., Hkv, S, D) to the calibrated moments.

        Call it for as many batches as you like; all tokens count alike. Masked keys do not
        count, nor the queries at their positions where L = S. `scale` plays no part: moments
        are those of the unscaled q and k.

        Raises:
            OptionError: if the options need no calibrated statistics.
        """
        if "tokens" not in self._buffers:
            raise OptionError(
                "performer: calibrate needs statistics=calibrated and a gauge, oprf or derf"
            )
        mask = Mask.of(key_mask=key_mask)
        q, k, _, mask, _ = self._check(q, k, k.new_zeros(*k.shape[:-1], self.value_dim or 1), mask)
        found, tokens = pool_moments(q, k, mask.key)
        old = Moments(self.mean_q, self.mean_k, self.cov_q, self.cov_k)
        merged, total = merge_moments(old, self.tokens, found, tokens)
        for name in ("mean_q", "mean_k", "cov_q", "cov_k"):
            getattr(self, name).copy_(getattr(merged, name))
        self.tokens.copy_(total)
        self._calibrated = bool((total > 0).all())

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        if "tokens" in self._buffers:
            self._calibrated = not self.tokens.is_meta and bool((self.tokens > 0).all())

    def _ready(self) -> bool:
        # A Python flag, so that compiled graphs need not read the buffer; it is looked up
        # here where buffers were filled by other means than `load_state_dict`.
        if not self._calibrated:
            self._calibrated = bool((self.tokens > 0).all())
        return self._calibrated

    def _gauge(self, q: Tensor, k: Tensor | None, mask: Mask | None, root_scale: float) -> Gauge:
        if self.config.statistics == "calibrated":
            if not self._ready():
                raise CalibrationError(
                    "performer: statistics=calibrated needs calibrate(q, k) before the first call"
                )
            stats = Moments(self.mean_q, self.mean_k, self.cov_q, self.cov_k)
        else:
            assert k is not None  # reading a state is refused by the capabilities
            stats = moments(q, k, None if mask is None else mask.key)
        return make_gauge(self.config.gauge, stats, root_scale)

    def _proposal(self, omega: Tensor, gauge: Gauge) -> tuple[Tensor, Tensor]:
        """ω ~ p from ε ~ N(0, I) (Hkv, M, D) and log N(ω)/p(ω) (..., Hkv, M)."""
        second = gauge.second
        assert second is not None
        second, epsilon = second.double(), omega.double()
        if self.config.estimator == "oprf":
            # One variance for all directions, from λ = E|x+y|²/D (arXiv 2205.15317).
            level = second.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None]
            variance = _optimal_variance(level)
            drawn = epsilon * variance[..., None].sqrt()
        else:
            values, vectors = torch.linalg.eigh(second)
            values = values.clamp_min(0.0)
            spread = self.config.spread
            variance = _optimal_variance(values) if spread is None else 1.0 + spread * values
            drawn = (epsilon * variance[..., None, :].sqrt()) @ vectors.transpose(-1, -2)
            level = None
        width = variance.log().sum(-1) * (self.head_dim if level is not None else 1)
        log_weight = (
            0.5 * (epsilon.square().sum(-1) - drawn.square().sum(-1)) + 0.5 * width[..., None]
        )
        return drawn, log_weight

    # ---- features ------------------------------------------------------------------------

    @classmethod
    def outside_for(cls, config: PerformerConfig) -> Support:
        if config.estimator == "trig" or isinstance(config.estimator, SpectralMap):
            return Absent("cosines change sign: the normaliser of some of the keys can vanish")
        return super().outside_for(config)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
        self._count_call()
        return super()._attend(q, k, v, mask, scale)

    def _outside(self, *args: Any, **options: Any) -> list[Partial]:
        self._count_call()
        return super()._outside(*args, **options)

    def _count_call(self) -> None:
        every = self.config.redraw
        if every is not None and self.training and not computed_again():
            if self._calls and self._calls % every == 0:
                self.redraw()
            self._calls += 1

    def weights(self, *args: Any, **options: Any) -> Tensor:
        """As `Mechanism.weights`; looking does not count as a training call."""
        calls = self._calls
        self._calls = 0  # not a multiple of `redraw`, so that this call keeps the draw
        try:
            return super().weights(*args, **options)
        finally:
            self._calls = calls

    def _features(
        self, q: Tensor, k: Tensor | None, mask: Mask | None, scale: float
    ) -> FeatureMaps:
        if scale <= 0:
            raise OptionError(f"performer: scale={scale} must be > 0: it is split between q and k")
        config, root = self.config, math.sqrt(scale)
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        omega = self.projection.to(dtype)
        if isinstance(config.estimator, SpectralMap):
            if k is not None and mask is not None and mask.key is not None:
                k = k.masked_fill(~mask.key[:, None, :, None], 0.0)  # junk must not reach key_bias
            return self._spectral(config.estimator, q, k, omega, root)
        if not isinstance(config.estimator, str):
            return self._function(config.estimator, omega, root)
        if config.estimator == "relu":
            weight = omega.transpose(-1, -2) * root
            return LinearFeatures(weight, weight, activation="relu")
        if not config.uses_moments:
            return self._plain(q, omega, root)
        gauge = self._gauge(q, k, mask, root)
        if k is not None and mask is not None and mask.key is not None:
            k = k.masked_fill(~mask.key[:, None, :, None], 0.0)  # junk must not reach key_bias
        return self._gauged(q, k, omega, gauge, root)

    def _fixed(self) -> bool:
        if self.training and self.config.redraw is not None:
            return False
        plain = self.config.estimator in ("positive", "hyperbolic", "relu")
        return plain and not self.config.uses_moments

    def _plain(self, q: Tensor, omega: Tensor, root: float) -> LinearFeatures:
        """softmax features of x = √scale·q, y = √scale·k."""
        weight = omega.transpose(-1, -2) * root
        if self.config.estimator == "trig":

            def query_log() -> Tensor:
                return 0.5 * (q * root).square().sum(-1)

            return LinearFeatures(
                weight, weight, activation="trig", quad=-0.5 * root**2, query_log=query_log,
                clip=self.config.clip,
            )  # fmt: skip
        if self.config.estimator == "hyperbolic":
            weight = torch.cat([weight, -weight], -1)
        features = weight.shape[-1]

        def log_row() -> Tensor:
            return -0.5 * (q * root).square().sum(-1) - math.log(features)

        return LinearFeatures(weight, weight, quad=0.5 * root**2, query_log=log_row)

    def _gauged(
        self, q: Tensor, k: Tensor | None, omega: Tensor, gauge: Gauge, root: float
    ) -> LinearFeatures:
        """The same in the coordinates of a gauge, and with a proposal for ω."""
        config, dtype = self.config, omega.dtype
        log_weight = None
        if config.estimator in _PROPOSALS:
            drawn, log_weight = self._proposal(omega, gauge)
            omega, log_weight = drawn.to(dtype), log_weight.to(dtype)
        columns = omega.transpose(-1, -2)
        shift_q, shift_k = gauge.shift_q.to(dtype), gauge.shift_k.to(dtype)
        left = columns if gauge.transform is None else gauge.transform.to(dtype) @ columns
        right = columns if gauge.inverse is None else gauge.inverse.to(dtype) @ columns
        if config.estimator == "hyperbolic":
            left, right = torch.cat([left, -left], -1), torch.cat([right, -right], -1)
        bq = -(shift_q[..., None, :] @ left)[..., 0, :]
        bk = -(shift_k[..., None, :] @ right)[..., 0, :]
        trig = config.estimator == "trig"

        def query_log() -> Tensor:
            x = gauge.queries(q.to(dtype).unflatten(1, (self.num_kv_heads, -1)).flatten(2, 3), root)
            row = x.square().sum(-1) * (0.5 if trig else -0.5)
            row = row + (gauge.queries_offset(q.to(dtype), self.num_kv_heads, root))
            row = row.reshape(q.shape[:-1])
            return row if trig else row - math.log(config.features)

        key_bias, quad = None, 0.0
        wq, wk = left * root, right * root
        if k is not None and (trig or gauge.inverse is not None):
            y, weight = gauge.keys(k.to(dtype), root)
            square = 0.5 * y.square().sum(-1)
            key_bias = weight + square if trig else weight - square
        elif not trig:
            # −|y|²/2 + λ with y = root·k − shift_k folds into the map and `quad`.
            both = shift_q + shift_k
            wk = wk + root * both[..., :, None]
            constant = (shift_k * (0.5 * shift_k + shift_q)).sum(-1, keepdim=True)
            bk = bk - constant
            quad = 0.5 * root**2
        if log_weight is not None:
            bq, bk = bq + 0.5 * log_weight, bk + 0.5 * log_weight
        return LinearFeatures(
            wq, wk, bq, bk, activation="trig" if trig else "exp", quad=quad, key_bias=key_bias,
            query_log=query_log, clip=config.clip if trig else 0.0,
        )  # fmt: skip

    def _function(
        self, function: Callable[[Tensor], Tensor], omega: Tensor, root: float
    ) -> FunctionFeatures:
        """Generalised attention φ(x) = f(ω·x) (arXiv 2009.14794, section 4.2)."""
        columns = omega.transpose(-1, -2) * root
        parameters: tuple[Tensor, ...] = ()
        if isinstance(function, nn.Module):
            parameters = tuple(function.parameters())
        own = parameters[0].dtype if parameters else omega.dtype  # a module in half precision
        if columns.requires_grad:
            parameters = (*parameters, columns)

        def features(x: Tensor) -> Tensor:
            return function((x @ columns).to(own)).to(columns.dtype)

        return FunctionFeatures(features, features, self.config.features, parameters=parameters)

    def _spectral(
        self, spectral: SpectralMap, q: Tensor, k: Tensor | None, omega: Tensor, root: float
    ) -> LinearFeatures:
        """cos(ω_q·q + ω_k·k + θ) = cos(−a)cos(b) + sin(−a)sin(b), a = ω_q·q + θ, b = ω_k·k."""
        dtype = omega.dtype
        wq = -omega.transpose(-1, -2) * root
        wk = self.projection_k.to(dtype).transpose(-1, -2) * root
        bq = -self.phase.to(dtype).expand(wq.shape[0], -1)
        key_bias = None if k is None else -spectral.log_gamma(k.to(dtype) * root)

        def query_log() -> Tensor:
            return spectral.log_mass - spectral.log_beta(q.to(dtype) * root)

        return LinearFeatures(
            wq, wk, bq, None, activation="trig", key_bias=key_bias, query_log=query_log,
            clip=self.config.clip,
        )  # fmt: skip


def _optimal_variance(level: Tensor) -> Tensor:
    """Variance of the Gaussian proposal that minimises E log(second moment) over z = x + y.

    With E z² = `level` = λ along a direction: 1 − 4A, A = (1 − 2λ − √((2λ+1)² + 8λ))/16; 1 at
    λ = 0, about λ + 3/2 for large λ. The second moment itself would be dominated by the
    largest z; its mean logarithm is what 2205.15317 (OPRF) and 2302.00787 (DERF) minimise.
    """
    return (3.0 + 2.0 * level + ((2.0 * level + 1.0).square() + 8.0 * level).sqrt()) / 4.0
