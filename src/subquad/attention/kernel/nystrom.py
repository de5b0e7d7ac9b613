r"""Kernel Nyström: softmax attention by features at landmarks among the queries and keys.

With x, y the queries and keys in the coordinates of a gauge, λ_j the gauge's log-weight of a
key (`subquad.features.gauges`) and g(a, b) = exp(−|a − b|²/2), softmax weights are

    exp(scale·q_i·k_j) ∝ exp(x_i·y_j + λ_j) = e^{|x_i|²/2} · g(x_i, y_j) · e^{|y_j|²/2 + λ_j}

and the positive definite kernel g is interpolated between M landmarks Z,

    g(x, y) ≈ g(x, Z) (K + ε I)^-1 g(Z, y),      K = g(Z, Z)

(Williams & Seeger 2001; both sides of one kernel as in Chen et al. 2021, arXiv 2111.00035).
Half of the landmarks are tokens x, half tokens y. It is linear attention with positive features
of the keys, φ_m(k_j) = exp(z_m·y_j − |z_m|²/2 + λ_j), and signed weights of the queries,
α(q_i) = g(x_i, Z) (K + ε I)^-1. Where a query's own softmax is badly interpolated, weights of
both signs can add up to nothing; `SignedFeatures` limits the negative ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from subquad.attention.base import Absent, Capabilities, Cost, Info, Support
from subquad.attention.kernel.engine import KernelMechanism, SignedFeatures, limited, signs
from subquad.attention.masks import Mask
from subquad.attention.outside import sides
from subquad.attention.partial import Partial, combine
from subquad.errors import CalibrationError, OptionError
from subquad.features.gauges import (
    GAUGES,
    Gauge,
    Moments,
    make_gauge,
    merge_moments,
    moments,
    pool_moments,
)
from subquad.kernels.precision import own_precision
from subquad.kernels.transforms import transformed
from subquad.options import Config, choice_problem, integer_problem, number_problem

__all__ = ["KernelNystrom", "KernelNystromConfig"]

LANDMARKS = ("call", "calibrated", "learned")
"""Where landmarks come from."""

CALIBRATED = ("tokens", "mean_q", "mean_k", "cov_q", "cov_k", "marks_q", "marks_k")
"""What `KernelNystrom.calibrate` fills."""

POSITION_BITS = 30
"""Places of landmarks are fractions of a row, kept as integers: a cast to half spares them."""

CHUNK_ELEMENTS = 1 << 22
"""Size of a temporary where row maxima are looked up."""


@dataclass(frozen=True)
class KernelNystromConfig(Config):
    """Options of `KernelNystrom`.

    Args:
        features: M, number of landmarks, ≥ 2: ⌊M/2⌋ queries and the rest keys.
        landmarks: "call" (each call's own queries and keys; bidirectional only), "calibrated"
            (`KernelNystrom.calibrate`), or "learned": parameters, which `calibrate` sets and
            training moves. The gauge's moments come from there too and are not trained.
        gauge: none, centre_keys, centre, balance: see `subquad.features.gauges`.
        ridge: ε, added to the diagonal of K.
        clip: τ, least normaliser as a share of its positive part: a row's negative weights are
            scaled down to keep it.
    """

    mechanism: ClassVar[str] = "kernel_nystrom"
    sizes: ClassVar[tuple[str, ...]] = ("features",)

    features: int = 128
    landmarks: str = "call"
    gauge: str = "balance"
    ridge: float = 1e-2
    clip: float = 0.1

    def problems(self) -> Iterator[str]:
        yield from integer_problem("features", self.features, 2)
        yield from choice_problem("landmarks", self.landmarks, LANDMARKS)
        yield from choice_problem("gauge", self.gauge, GAUGES)
        yield from number_problem("ridge", self.ridge, 0.0, open_low=True)
        yield from number_problem("clip", self.clip, 0.0, 1.0, open_low=True)
        if self.clip == 1.0:
            yield f"clip={self.clip!r} must be < 1: negative weights would have no share left"


def _flops(length: int, head_dim: int, value_dim: int, config: KernelNystromConfig) -> float:
    # Maps of q and k 2·2·L·M·D, weights 2·L·M², state 2·L·M·V, both signs read 2·2·L·M·V; K^-1.
    m = config.features
    return 2.0 * length * m * (2 * head_dim + m + 3 * value_dim) + 2.0 * m**3


def _memory(length: int, head_dim: int, value_dim: int, config: KernelNystromConfig) -> float:
    # Queries and outputs twice, the state, the maps of one chunk of ≤ 1024 tokens, K and K^-1.
    m = config.features
    twice = 2.0 * length * (head_dim + value_dim)
    return 4.0 * (twice + m * (value_dim + 1 + 3 * min(length, 1024)) + 4.0 * m**2)


class KernelNystrom(KernelMechanism):
    """Softmax attention by kernel Nyström features; options in `KernelNystromConfig`.

        out_i = Σ_m α'_im S_m / Σ_m α'_im N_m,   S_m = Σ_j φ_m(k_j) v_j,   N_m = Σ_j φ_m(k_j)

        φ_m(k_j) = exp(z_m·y_j − |z_m|²/2 + λ_j),   α_i = exp(x_i·Z − |Z|²/2) (K + ε I)^-1

        α'_i = α₊ − s α₋,   s = min(1, (1 − τ) α₊·N / α₋·N)

    s limits the negative weights so that the normaliser keeps at least the share τ of its
    positive part: linear in the length, and under a causal mask it looks at the keys seen so
    far. Rows whose normaliser is healthy have s = 1 and are not touched.

    Deterministic given the landmarks: there is no variance, the error is one of interpolation
    and depends on how the tokens of a head lie. Landmarks of a call are spread evenly over the
    open tokens of each row, one at a random place of each stretch, so that padding moves none
    of them; with grouped heads all queries of a group share theirs. Where L = S queries at
    masked positions are never landmarks. Landmarks and moments carry no gradient, unless
    landmarks are learned: these are parameters, to which the limiter passes gradients too.

    In float32 g underflows where |x − z|² > 174. A query so far from every landmark (logits
    beyond a hundred or so) gets weights of rounding's size: finite, but no longer softmax's.

    Cost O((L+S)·M·(D+V) + L·M² + M³) time, O(M·V) state.

    Raises:
        OptionError: wrong options; all problems at once.
        UnsupportedError: a causal mask or a state with landmarks of the call.
        CalibrationError: calibrated or learned landmarks before `calibrate`.

    Example:
        >>> import torch, subquad as sq
        >>> q, k, v = (torch.randn(1, 2, 20, 4, dtype=torch.float64) for _ in range(3))
        >>> mech = sq.build("kernel_nystrom(features=40, ridge=1e-6)", head_dim=4, num_heads=2)
        >>> exact = sq.attention(q, k, v, "softmax")  # every token is a landmark
        >>> torch.allclose(mech(q, k, v), exact)
        True
        >>> mech = sq.build("kernel_nystrom(landmarks=calibrated)", head_dim=4, num_heads=2)
        >>> mech.calibrate(q.float(), k.float())
        >>> out, state = mech.prefill(q.float(), k.float(), v.float())
        >>> torch.allclose(out, mech(q.float(), k.float(), v.float(), causal=True), atol=1e-4)
        True
    """

    name = "kernel_nystrom"
    family = "kernel"
    Config = KernelNystromConfig
    config: KernelNystromConfig
    places_q: Tensor
    places_k: Tensor
    tokens: Tensor
    mean_q: Tensor
    mean_k: Tensor
    cov_q: Tensor
    cov_k: Tensor
    marks_q: Tensor
    marks_k: Tensor

    info = Info(
        summary="softmax attention by a Nyström approximation of its Gaussian kernel",
        formula="out_i = α'_i·Σ_j φ(k_j) v_jᵀ / α'_i·Σ_j φ(k_j),  "
        "φ_m(k) = exp(z_m·y − |z_m|²/2 + λ),  α = exp(x·Z − |Z|²/2) (K + ε I)^-1,  "
        "α' = α₊ − min(1, (1 − τ) D₊/D₋) α₋",
        cost=Cost("O(L·M·(D+V) + L·M² + M³)", _flops, _memory),
        paper="Williams & Seeger 2001, Using the Nyström Method to Speed Up Kernel Machines; for "
        "softmax attention as a Gaussian kernel of queries and keys together: Chen et al. 2021, "
        "Skyformer, arXiv 2111.00035",
        limit="softmax as ridge → 0 once every query and every key is a landmark",
        options={
            "features": "M, number of landmarks, half queries and half keys",
            "landmarks": "call (bidirectional only), calibrated, or learned from there; the "
            "gauge's moments alike",
            "gauge": "change of variables that leaves softmax unchanged: none, centre_keys, "
            "centre, balance",
            "ridge": "ε, added to the diagonal of the landmarks' kernel matrix",
            "clip": "τ, least normaliser as a share of its positive part",
        },
        deviations="ours: the gauge, landmarks from both sides at random places of even stretches, "
        "a softmax normaliser, and the limit on negative weights (Skyformer has no normaliser)",
        sample="kernel_nystrom(features=24)",
        use="a trained softmax model made linear without retraining: at equal features it is "
        "closer to softmax than any random feature. Its weights may be negative, its query "
        "side costs M² more.",
    )

    def __init__(
        self,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **sizes: Any,
    ) -> None:
        super().__init__(device=device, dtype=dtype, **sizes)
        kv, dim = self.num_kv_heads, self.head_dim
        dtype = dtype or torch.get_default_dtype()
        counts = {"q": self.config.features // 2}
        counts["k"] = self.config.features - counts["q"]
        for side, count in counts.items():
            places = torch.zeros(kv, count, dtype=torch.long, device=device)
            self.register_buffer(f"places_{side}", places)
        if self.calibrates_for(self.config):
            self.register_buffer("tokens", torch.zeros(2, dtype=torch.long, device=device))
            for side, count in counts.items():
                for name, shape in (("mean", ()), ("cov", (dim,)), ("marks", (count,))):
                    zeros = torch.zeros(kv, *shape, dim, device=device, dtype=dtype)
                    if name == "marks" and self.config.landmarks == "learned":
                        self.register_parameter(f"marks_{side}", nn.Parameter(zeros))
                    else:
                        self.register_buffer(f"{name}_{side}", zeros)
        self._cache: tuple[Any, Any] = (None, None)
        self.reset_parameters()

    @classmethod
    def capabilities_for(cls, config: KernelNystromConfig) -> Capabilities:
        own: Support = True
        merges: Support = True
        gradient: Support = True
        state: Any = "constant"
        if config.landmarks == "call":
            own = Absent(
                "landmarks from the call's own queries and keys would leak the future; use "
                "landmarks=calibrated (or learned) and calibrate()"
            )
            state = own
            merges = Absent("each call has landmarks among its own tokens")
            gradient = Absent("the call's landmarks and statistics are held fixed")
        return Capabilities(
            causal=own,
            prefix=own,
            state=state,
            partial=True,
            merges=merges,
            exact_gradient=gradient,
            compile=Absent("signed weights of the queries run as Python, chunk by chunk"),
            functional=Absent("landmarks are learned parameters")
            if config.landmarks == "learned"
            else True,
            segments=Absent("one state serves one sequence; call once for each segment"),
            window=Absent("features sum over all keys; a window is sparse attention"),
            approximates="softmax",
        )

    @classmethod
    def outside_merges_for(cls, config: KernelNystromConfig) -> Support:
        return Absent("as a far field its negative weights are limited over the keys of a call")

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the landmarks' places by the seed and forgets what was calibrated."""
        if self.places_q.is_meta:
            return
        generator = torch.Generator().manual_seed(self.seed)
        for places in (self.places_q, self.places_k):
            heads, count = places.shape
            # One in each of `count` equal stretches, a little off their ends: with as many
            # tokens as landmarks each is taken once.
            inside = 0.999 * torch.rand(heads, count, generator=generator, dtype=torch.float64)
            start = torch.arange(count, dtype=torch.float64)
            places.copy_(((start + inside) / count * 2**POSITION_BITS).ceil().long())
        if "tokens" in self._buffers:
            for name in CALIBRATED:
                getattr(self, name).zero_()

    # ---- landmarks -----------------------------------------------------------------------

    @classmethod
    def calibrates_for(cls, config: KernelNystromConfig) -> bool:
        return config.landmarks != "call"

    @torch.no_grad()
    def calibrate(
        self,
        q: Tensor,
        k: Tensor,
        *,
        key_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> None:
        """Takes landmarks and moments from queries (..., H, L, D) and keys (..., Hkv, S, D).

        Call it for as many batches as you like: each landmark is replaced by one of the new
        batch with the probability that gives all tokens of all batches an equal chance. Masked
        keys do not count, nor the queries at their positions where L = S. `scale` plays no
        part: landmarks are unscaled tokens. Learned landmarks begin here and forget what they
        had learned.

        Raises:
            OptionError: if the landmarks come from each call.
        """
        if "tokens" not in self._buffers:
            raise OptionError("kernel_nystrom: calibrate needs landmarks=calibrated or learned")
        mask = Mask.of(key_mask=key_mask)
        q, k, _, mask, _ = self._check(q, k, k.new_zeros(*k.shape[:-1], self.value_dim or 1), mask)
        found, tokens = pool_moments(q, k, mask.key)
        old = Moments(self.mean_q, self.mean_k, self.cov_q, self.cov_k)
        merged, total = merge_moments(old, self.tokens, found, tokens)
        for name in ("mean_q", "mean_k", "cov_q", "cov_k"):
            getattr(self, name).copy_(getattr(merged, name))
        # All rows as one: (1, Hkv, tokens, D), the open ones among them.
        grouped = q.unflatten(1, (self.num_kv_heads, -1)).transpose(0, 1).flatten(1, 3)[None]
        pooled = k.transpose(0, 1).flatten(1, 2)[None]
        opened = opened_q = None
        if mask.key is not None:
            opened = mask.key.reshape(1, -1)
            if q.shape[2] == k.shape[2]:
                each = mask.key[:, None].expand(-1, self.num_heads // self.num_kv_heads, -1)
                opened_q = each.reshape(1, -1)
        generator = torch.Generator().manual_seed(self.seed + int(self.tokens.sum()))
        for index, (side, x, key) in enumerate((("q", grouped, opened_q), ("k", pooled, opened))):
            marks, places = getattr(self, f"marks_{side}"), getattr(self, f"places_{side}")
            new = tokens_at(x, places, key)[0].to(marks.dtype)
            chance = float(tokens[index]) / max(1.0, float(total[index]))
            drawn = torch.rand(marks.shape[:2], generator=generator).to(marks.device) < chance
            marks.copy_(torch.where(drawn[..., None], new, marks))
        self.tokens.copy_(total)

    def _gauge(
        self, q: Tensor, k: Tensor | None, mask: Mask | None, root: float
    ) -> tuple[Gauge, Tensor, Tensor]:
        """The gauge and landmarks (..., Hkv, ·, D) among the raw queries and among the keys."""
        if self.calibrates_for(self.config):
            if not bool((self.tokens > 0).all()):
                raise CalibrationError(
                    f"kernel_nystrom: landmarks={self.config.landmarks} needs calibrate(q, k) "
                    "before the first call"
                )
            stats = Moments(self.mean_q, self.mean_k, self.cov_q, self.cov_k)
            return make_gauge(self.config.gauge, stats, root), self.marks_q, self.marks_k
        assert k is not None  # reading a state is refused by the capabilities
        key = None if mask is None else mask.key
        stats = moments(q, k, key)
        grouped = q.detach().unflatten(1, (self.num_kv_heads, -1))
        key_q = None
        if key is not None and q.shape[2] == k.shape[2]:
            key_q = key[:, None].expand(-1, grouped.shape[2], -1).flatten(1)
        marks_q = tokens_at(grouped.flatten(2, 3), self.places_q, key_q)
        marks_k = tokens_at(k.detach(), self.places_k, key)
        return make_gauge(self.config.gauge, stats, root), marks_q, marks_k

    def limited_partial(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        key_mask: Tensor | None = None,
        mask: Mask | None = None,
        scale: float | None = None,
    ) -> Partial:
        """As `partial`, negative weights limited among these keys: den > 0 where one is read.

        What an exact part merges with safely, as far field beside a window for instance. Sums
        of `partial` add exactly and may have a normaliser of any sign; limited ones belong to
        their own set of keys.
        """
        joined = Mask.of(causal=causal, key_mask=key_mask, mask=mask)
        q, k, v, joined, lead = self._check(q, k, v, joined)
        with own_precision(q):
            part = self._partial(q, k, v, joined, self._scale(scale), clipped=True)
        return Partial(
            *(t.reshape(*lead, *t.shape[1:]) for t in (part.num, part.den, part.log_scale))
        )

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
        # As in the engine, but negative weights are limited once, over earlier and later keys.
        maps = self._features(q, k, mask, scale)
        if closed is not None:
            bias = torch.zeros(k.shape[:-1], dtype=q.dtype, device=k.device)
            maps = replace(maps, key_bias=bias.masked_fill(closed, -math.inf))
        assert maps.query_log is not None
        log = maps.query_log()
        above, below = [], []
        for side in sides(q.shape[2], k.shape[2], window, mask.causal):
            own = maps
            if maps.key_bias is not None:
                own = replace(maps, key_bias=side.of_keys(maps.key_bias))
            x, y, values = side.of_queries(q), side.of_keys(k), side.of_keys(v)
            key = None if mask.key is None else side.of_keys(mask.key, 1)
            absorb = y.shape[2] - x.shape[2] if side.causal else y.shape[2]
            first, second, _ = signs(own, x, y, values, absorb, key, None)
            above.append(side.place(first, q.shape[2]))
            below.append(side.place(second, q.shape[2]))
        if not above:
            return []
        part = limited(combine(above), combine(below), maps.clip)
        return [Partial(part.num, part.den, part.log_scale + log)]

    # ---- features ------------------------------------------------------------------------

    def _maps(
        self, gauge: Gauge, marks_q: Tensor, marks_k: Tensor, root: float, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """(W_q, b_q, W_k, b_k, (K + ε I)^-1): logarithms at landmarks are x W + b."""
        z = torch.cat(
            [gauge.queries(marks_q.to(dtype), root), gauge.keys(marks_k.to(dtype), root)[0]], -2
        )
        wide = z.double()
        squares = wide.square().sum(-1)
        # Not by cdist: its gradient has no gradient.
        apart = squares[..., None] + squares[..., None, :] - 2.0 * wide @ wide.mT
        kernel = torch.exp(-0.5 * apart.clamp_min(0.0))
        eye = torch.eye(z.shape[-2], dtype=torch.float64, device=z.device)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(kernel + self.config.ridge * eye))
        columns = z.transpose(-1, -2)
        left = columns if gauge.transform is None else gauge.transform.to(dtype) @ columns
        right = columns if gauge.inverse is None else gauge.inverse.to(dtype) @ columns
        shift_q, shift_k = gauge.shift_q.to(dtype), gauge.shift_k.to(dtype)
        right = right + shift_q[..., None]  # λ = μ_q·(root·k − μ_k)
        size = 0.5 * z.square().sum(-1)
        bq = -(shift_q[..., None, :] @ left)[..., 0, :] - size
        bk = -(shift_k[..., None, :] @ right)[..., 0, :] - size
        return root * left, bq[..., None, :], root * right, bk[..., None, :], inverse.to(dtype)

    def _calibrated_maps(self, root: float, dtype: torch.dtype, q: Tensor) -> Any:
        """The gauge and `_maps` of calibrated landmarks, kept until a buffer changes."""
        buffers = [getattr(self, name) for name in CALIBRATED]
        graph = torch.is_grad_enabled() and any(buffer.requires_grad for buffer in buffers)
        if graph or transformed():
            found = self._gauge(q, None, None, root)  # each call has its own graph
            return found[0], self._maps(*found, root, dtype)
        if any(buffer.is_inference() for buffer in buffers):  # these count no versions
            found = self._gauge(q, None, None, root)
            return found[0], self._maps(*found, root, dtype)
        key = [root, dtype, *((id(buffer), buffer._version) for buffer in buffers)]
        if self._cache[0] != key or any(
            a is not b for a, b in zip(self._cache[1][0], buffers, strict=True)
        ):
            with torch.inference_mode(False), torch.no_grad():  # training may follow
                found = self._gauge(q, None, None, root)
                self._cache = (key, (buffers, found[0], self._maps(*found, root, dtype)))
        return self._cache[1][1:]

    def _features(
        self, q: Tensor, k: Tensor | None, mask: Mask | None, scale: float
    ) -> SignedFeatures:
        if scale <= 0:
            raise OptionError(
                f"kernel_nystrom: scale={scale} must be > 0: it is split between q and k"
            )
        root = math.sqrt(scale)
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        if self.calibrates_for(self.config):
            gauge, maps = self._calibrated_maps(root, dtype, q)
        else:
            found = self._gauge(q, k, mask, root)
            gauge, maps = found[0], self._maps(*found, root, dtype)
        wq, bq, wk, bk, inverse = maps

        def query(x: Tensor) -> Tensor:
            log = x @ wq + bq
            # The row's largest similarity is a factor of all its weights: it cancels.
            return torch.exp(log - log.detach().amax(-1, keepdim=True)) @ inverse

        def key(x: Tensor) -> Tensor:
            return x @ wk + bk

        def query_log() -> Tensor:
            x = q.detach().to(dtype).unflatten(1, (self.num_kv_heads, -1)).flatten(2, 3)
            step = max(1, CHUNK_ELEMENTS // (x.shape[0] * x.shape[1] * self.config.features))
            with torch.no_grad():
                tops = [(part @ wq.detach() + bq.detach()).amax(-1) for part in x.split(step, 2)]
            offset = gauge.queries_offset(q.to(dtype), self.num_kv_heads, root)
            return (torch.cat(tops, -1) + offset).reshape(q.shape[:-1])

        learned = tuple(t for t in maps if t.requires_grad)
        return SignedFeatures(
            query, key, self.config.features, query_log=query_log, clip=self.config.clip,
            parameters=learned,
        )  # fmt: skip


def tokens_at(x: Tensor, places: Tensor, key: Tensor | None) -> Tensor:
    """Open tokens of x (B, Hkv, n, D) at `places` (Hkv, m), fractions · 2^30 of a row's open ones.

    `key` is (B, n) bool, True = open, or None. Returns (B, Hkv, m, D), zeros for a row without
    any open token. Cost O(B·n·log n + B·Hkv·m·D).
    """
    batch, heads, length, dim = x.shape
    if key is None:
        chosen = ((places * length) >> POSITION_BITS).expand(batch, -1, -1)
        empty = None
    else:
        total = key.sum(-1)[:, None, None]
        order = torch.argsort((~key).to(torch.uint8), dim=-1, stable=True)  # open ones first
        rank = (places * total) >> POSITION_BITS
        chosen = order[:, None].expand(-1, heads, -1).gather(2, rank)
        empty = total[..., None] == 0
    found = x.gather(2, chosen[..., None].expand(-1, -1, -1, dim))
    return found if empty is None else found.masked_fill(empty, 0.0)
