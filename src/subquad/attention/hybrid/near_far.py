"""Near and far: exact attention where it matters, any cheap mechanism for the rest.

    out_i = Σ_p N_p,i / Σ_p D_p,i    over three disjoint sets of keys p:

    near    the window |p_i − j| ≤ w:    N = Σ e^{s_ij} v_j,  D = Σ e^{s_ij},  s_ij = scale·q_i·k_j
    heavy   a few keys outside of it:    the same
    far     all others:                  N, D of the far mechanism, in the same units

One normaliser for all of them: each key is counted once, and weights compare across parts.
Heavy keys leave the far field by zeroing their features. The window leaves it by summing earlier
and later keys apart (`subquad.attention.outside`), never by subtraction; clusters of keys, the
default, take out the window's estimates one by one, and their engine reads all three parts at
once (`subquad.attention.summary.refined`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad import registry
from subquad.attention.base import (
    Absent,
    Capabilities,
    Cost,
    Info,
    Mechanism,
    State,
    Support,
    looking,
)
from subquad.attention.exact.engine import (
    KeyValueState,
    as_partial,
    clear,
    explicit,
    over_queries,
)
from subquad.attention.hybrid.stream import DECAY, HeldKeys, Hold, stream
from subquad.attention.masks import Mask
from subquad.attention.partial import EMPTY_LOG_SCALE, Partial, combine
from subquad.attention.prepared import (
    TOKENS,
    Known,
    Prepared,
    held_tensors,
    may_be_prepared,
    written,
)
from subquad.attention.sparse.engine import Pattern, computed_keys, partial
from subquad.attention.summary.key_clusters import Beside, KeyClusters, KeyClustersConfig
from subquad.attention.summary.mass import column_mass, open_tokens
from subquad.errors import OptionError, ShapeError
from subquad.kernels.native.held import Step
from subquad.options import Config, Spec, choice_problem, integer_problem
from subquad.shapes import KeyMask, Keys, Output, Queries, Values

__all__ = ["NearFar", "NearFarConfig", "NearFarState", "heavy_keys"]

HITTERS = 62
"""Keys that a causal call holds for the attention that they get, by default."""

LANDMARKS = 64
"""Queries, in equal distances, whose attention decides which keys are heavy."""

PRESETS = ("default", "fast")

_steps: Known[Step] = Known()

CHOSEN = ", and older tokens while attention comes back to them"


class Sizes(NamedTuple):
    """What a bidirectional query reads in a row of some length.

    Args:
        window: keys on each side of its position, −1 for none.
        heavy: keys that all queries read, sinks among them.
        clusters: of keys, 0 where the far field is another mechanism.
        members: keys of a refined cluster.
    """

    window: int
    heavy: int
    clusters: int
    members: int


class Budget(NamedTuple):
    """What a bidirectional query costs: keys read exactly, and features of the far field."""

    exact: int
    features: int


REFINE = 2
"""Clusters of a query whose members are read exactly, by default."""

SHORT = 32
"""Rows of no more open keys are read exactly."""

SATURATED = 256
"""Open keys from which on sizes stay as they are."""


def _default(keys: int) -> Sizes:
    if keys <= SHORT:
        return Sizes(0, SHORT, 1, 0)
    exact = min(96, max(SHORT, 3 * keys // 8))
    members = min(4, exact // 12)
    window = max(0, (exact // 3 - 1) // 2)
    heavy = exact - _span(window) - REFINE * members
    return Sizes(window, heavy, max(1, min(128, keys // 2)), members)


def _fast(keys: int) -> Sizes:
    if keys <= SHORT:
        return Sizes(0, SHORT, 1, 0)
    exact = min(112, max(SHORT, 7 * keys // 16))
    window = max(0, (exact // 4 - 1) // 2)
    return Sizes(window, exact - _span(window), max(1, min(64, keys // 4)), 0)


def _span(window: int) -> int:
    """Keys of a window; 0 stands for none."""
    return 2 * window + 1 if window else 0


@dataclass(frozen=True)
class NearFarConfig(Config):
    """Options of `NearFar`. Those left open (None, "auto") depend on the use and the length.

    Bidirectional calls by the preset, for n open keys in a row:

    ========= =================== ============= ===================================
    preset    exact keys E        clusters      of E: window, refined, heavy
    ========= =================== ============= ===================================
    default   3n/8 in [32, 96]    min(128, n/2) E/3, 2·min(4, ⌊E/12⌋), the rest
    fast      7n/16 in [32, 112]  min(64, n/4)  E/4, none, the rest
    ========= =================== ============= ===================================

    so that 512 tokens have 96 exact keys + 128 features, 128 tokens 48 + 64; see `budget`. Rows
    of up to 32 open keys are read exactly. So are all keys by a call with at most 64 queries, and
    fewer than keys, as when a decoder reads its encoder token by token: choosing keys costs more.
    With another far field, or none: window 64, sinks 4, heavy 0. Causal calls: window 64,
    sinks 4, and without a far field, which is the default, heavy 62: with what is kept for the
    choice a state of 131 tokens' keys and values. Cross-attention (`for_use`): no window.

    Args:
        window: keys on each side beside the query's own position that are read exactly, to the
            token; 0 reads none exactly, not even the own one. A causal call has no right side.
        heavy: keys for each key/value head, besides the sinks, that all queries read exactly:
            those that get most attention of landmark queries; the last key, and without sinks
            the first one, take places among them. A causal call holds those that have received
            most attention of late, see `subquad.attention.hybrid.stream`.
        sinks: how many of the first open tokens all queries read exactly.
        far: the mechanism that reads all other keys: a name, a spec such as
            ``performer(features=128)``, or a config object; None or "none": nobody does.
        preset: "default" or "fast", of what is left open.
    """

    mechanism: ClassVar[str] = "near_far"
    sizes: ClassVar[tuple[str, ...]] = ("window", "heavy", "far")

    window: int | None = None
    heavy: int | None = None
    sinks: int | None = None
    far: str | Spec | Config | None = "auto"
    preset: str = "default"

    def __post_init__(self) -> None:
        super().__post_init__()
        # One form for all ways to write it: specs compare, hash and print.
        if self.far != "auto":
            found = self.far_field(causal=False)
            object.__setattr__(self, "far", None if found is None else found[1].spec())

    def problems(self) -> Iterator[str]:
        for name in ("window", "heavy", "sinks"):
            value = getattr(self, name)
            if value is not None:
                yield from integer_problem(name, value, 0)
        yield from choice_problem("preset", self.preset, PRESETS)
        try:
            field = self.far_field(causal=False)
        except OptionError as error:
            yield f"far: {error}"
            return
        if field is not None:
            support = field[0].outside_for(field[1])
            if isinstance(support, Absent):
                yield f"far={field[1]} cannot be the far field: {support.reason}"

    def for_use(self, use: str) -> NearFarConfig:
        """The config for a use; bidirectional sizes stay open, they depend on the length."""
        if use == "causal":
            return replace(
                self, window=self.near(causal=True), heavy=self.hitters,
                sinks=self.first(causal=True), far=None if self.far == "auto" else self.far,
            )  # fmt: skip
        if use == "cross" and self.window is None:  # positions of queries and keys are unrelated
            return replace(self, window=0)
        return self

    def for_length(self, length: int) -> NearFarConfig:
        sizes, found = self.of_length(length), self.far_field(causal=False)
        far = None if found is None else found[1]
        if isinstance(far, KeyClustersConfig):
            refine = far.refine if sizes.members else 0
            members = max(1, sizes.members)
            far = replace(far, clusters=sizes.clusters, refine=refine, members=members)
        heavy = sizes.heavy - self.first(causal=False)
        return replace(self, window=max(0, sizes.window), heavy=max(0, heavy), far=far)

    def far_field(self, causal: bool) -> tuple[type[Mechanism], Any] | None:
        """Class and config of the far mechanism of a call, or None."""
        if self.far is None or self.far == "none":
            return None
        if self.far != "auto":
            return registry.resolve(self.far)
        if causal:
            return None
        most = _fast(SATURATED) if self.preset == "fast" else _default(SATURATED)
        refine = REFINE if most.members else 0
        return KeyClusters, KeyClustersConfig(
            clusters=most.clusters, refine=refine, members=max(1, most.members)
        )

    @property
    def clustered(self) -> bool:
        """Whether a bidirectional call's far field is clusters of keys."""
        found = self.far_field(causal=False)
        return found is not None and found[0] is KeyClusters

    def near(self, causal: bool) -> int:
        """The window of a causal call, or of a bidirectional one of any length."""
        return 64 if self.window is None else self.window

    def first(self, causal: bool) -> int:
        """Sinks of a call; clusters come with heavy keys instead, the first among them."""
        if self.sinks is not None:
            return self.sinks
        return 0 if self.clustered and not causal else 4

    @property
    def hitters(self) -> int:
        """Keys that a causal call holds besides window and sinks."""
        if self.heavy is not None:
            return self.heavy
        return HITTERS if self.far_field(causal=True) is None and self.near(causal=True) else 0

    def hold(self) -> Hold | None:
        """Which keys a causal call holds, where it holds more than window and sinks."""
        if not self.hitters or not self.near(causal=True):
            return None
        return Hold(self.near(causal=True), self.hitters, self.first(causal=True))

    def of_length(self, keys: int) -> Sizes:
        """Sizes of a bidirectional call for a row of so many open keys."""
        found = self.far_field(causal=False)
        if self.clustered:
            assert found is not None
            window, heavy, clusters, members = (_fast if self.preset == "fast" else _default)(keys)
            if self.far != "auto":
                clusters, members = found[1].clusters, found[1].members
        else:
            window, clusters, members = self.near(causal=False), 0, 0
            heavy = self.first(causal=False)
        window = window if self.window is None else self.window
        if self.heavy is not None:
            heavy = self.heavy + self.first(causal=False)
        elif self.sinks is not None:
            heavy = max(heavy, self.sinks)
        return Sizes(window or -1, heavy, clusters, members)

    def varies(self) -> bool:
        """Whether bidirectional sizes depend on the length."""
        return self.clustered and (self.window is None or self.heavy is None or self.far == "auto")

    def few(self, queries: int, keys: int) -> bool:
        """Whether a bidirectional call reads all keys: that costs no more than choosing them."""
        return self.varies() and queries <= LANDMARKS and queries < keys

    def budget(self, keys: int) -> Budget:
        """Keys read exactly and features of the far field for n open keys in a row.

        >>> NearFarConfig().budget(512), NearFarConfig().budget(128)
        (Budget(exact=96, features=128), Budget(exact=48, features=64))
        >>> NearFarConfig(preset="fast").budget(512)
        Budget(exact=112, features=64)
        """
        sizes = self.of_length(keys)
        found = self.far_field(causal=False)
        features, refined = 0, 0
        if self.clustered:
            assert found is not None
            features = min(sizes.clusters, keys)
            refined = min(found[1].refine, features) * sizes.members
        elif found is not None:
            features = int(getattr(found[1], "features", keys))
        near = _span(max(0, sizes.window))
        return Budget(min(keys, near + sizes.heavy + refined), features)


def _flops(length: int, head_dim: int, value_dim: int, config: NearFarConfig) -> float:
    sizes = config.of_length(length)
    near = computed_keys(sizes.window, sizes.window) if sizes.window >= 0 else 0.0
    exact = 2.0 * length * (near + sizes.heavy) * (head_dim + value_dim)
    if sizes.heavy:
        exact += 2.0 * LANDMARKS * length * head_dim
    found = config.far_field(causal=False)
    if found is None:
        return exact
    times = 1.0 if config.clustered else 2.0
    return exact + times * found[0].info.cost.flops(length, head_dim, value_dim, found[1])


def _memory(length: int, head_dim: int, value_dim: int, config: NearFarConfig) -> float:
    # Numerators of window, heavy keys, both sides of the far field, and their sum; reversed q, v;
    # reversed k.
    copies = 4.0 * length * (6 * value_dim + 2 * head_dim)
    found = config.far_field(causal=False)
    if found is None:
        return copies
    far = found[0].info.cost.memory(length, head_dim, value_dim, found[1])
    return copies + far if config.clustered else copies + 2.0 * far


@dataclass(frozen=True, eq=False)
class NearFarState(State):
    """The window's keys, the sinks, and the far field's sums over all others; constant size.

    Args:
        k: (B, Hkv, w + 1, D), the last keys, zero where `key` is False.
        v: (B, Hkv, w + 1, V), likewise.
        key: (B, w + 1) bool; False also where fewer tokens have been seen.
        to_far: (B, w + 1) bool: enters the far field after leaving the window.
        sink_k, sink_v: (B, Hkv, sinks, ·).
        sink_at: (B, sinks) their positions, −1 where there is none yet.
        far: sums over the keys that have left the window.
        length: tokens seen, masked ones included.
    """

    k: Tensor
    v: Tensor
    key: Tensor
    to_far: Tensor
    sink_k: Tensor
    sink_v: Tensor
    sink_at: Tensor
    far: State | None
    length: int = 0


class NearFar(Mechanism):
    """Exact attention in a window and to a few heavy keys, any mechanism for all other keys.

        out_i = (Σ_{j ∈ N_i ∪ G} e^{s_ij} v_j + Σ_{j ∉ N_i ∪ G} κ_ij v_j) / (the same with v = 1)

        s_ij = scale·q_i·k_j,   N_i = {j : |p_i − j| ≤ window},   p_i = i + S − L,   κ_ij ≈ e^{s_ij}

    κ are the weights of the far mechanism, G the heavy keys of a key/value head. All parts share
    one normaliser. The far field has to estimate exp(scale·q·k) itself, not up to a factor of
    each query, and its normalisers must not be negative: `Mechanism.outside_for` says which do.

    Windows are exact to the token. Earlier and later far keys are two sums of their own, so that
    nothing large is subtracted: bidirectional, the far field costs two causal calls of its
    mechanism. A causal call costs one; its state keeps the window's keys, the sinks and the far
    field's sums.

    Heavy keys G: the exact attention of 64 landmark queries, in equal distances among the open
    tokens, summed over keys outside of each one's own window; the largest sums win, the first
    key (all `sinks`) and the last are always in. The choice is held fixed in the backward pass.

    Heavy keys of a causal call: of those that leave the window, `heavy` are held while attention
    comes back to them; room is made for up to 8 tokens at a time, so that `window` counts the
    tokens which wait for that (`subquad.attention.hybrid.stream`: definition and cost). What is
    let go enters the far field, if there is one. Masked tokens then take no place in the window:
    padding anywhere equals the compacted row. Exact until window + heavy + sinks keys are held.

    By default the far field of a bidirectional call is `KeyClusters`, and sizes follow each row's
    number of open keys, so that padding changes nothing: see `NearFarConfig`. All parts are then
    read a few hundred queries at a time, by one engine.

    Cost O(L·(window + heavy + sinks)·(D+V)) and twice the far field's, once that of clusters.

    Papers: exact near field + linear far field under one normaliser: Zhang et al. 2024 (LoLCATs),
    arXiv 2410.10254; sparse + low rank: Chen et al. 2021 (Scatterbrain), arXiv 2110.15343;
    sinks: Xiao et al. 2023, arXiv 2309.17453; keys kept by attention received: Zhang et al.
    2023 (H2O), arXiv 2306.14048, whose sums we let decay.

    Args:
        window, heavy, sinks, far: see `NearFarConfig`.

    See `Mechanism` for sizes, shapes and what is raised; `shares` for what each part contributes.

    Raises:
        OptionError: a far mechanism whose sums cannot be merged with exact ones, with the reason.

    Example:
        >>> import torch, subquad as sq
        >>> q, k, v = (torch.randn(1, 2, 300, 8, dtype=torch.float64) for _ in range(3))
        >>> mech = sq.build(
        ...     "near_far(window=16, sinks=4, far=performer(features=32))",
        ...     head_dim=8,
        ...     num_heads=2,
        ...     dtype=torch.float64,
        ... )
        >>> out, state = mech.prefill(q[:, :, :200], k[:, :, :200], v[:, :, :200])
        >>> rest, state = mech.step(q[:, :, 200:], k[:, :, 200:], v[:, :, 200:], state)
        >>> torch.allclose(torch.cat([out, rest], 2), mech(q, k, v, causal=True))
        True
        >>> exact = sq.attention(q, k, v, "softmax")
        >>> torch.allclose(sq.attention(q, k, v, "near_far(window=299)"), exact)
        True
        >>> sorted(mech.shares(q, k))
        ['far', 'heavy', 'near']
    """

    name = "near_far"
    family = "hybrid"
    Config = NearFarConfig
    config: NearFarConfig
    far: Mechanism | None
    info = Info(
        summary="exact attention in a window and to heavy keys, any mechanism for the rest, one "
        "normaliser",
        formula="out_i = (Σ_{j ∈ N_i ∪ G} e^{s_ij} v_j + Σ_{j ∉ N_i ∪ G} κ_ij v_j) / "
        "(Σ_{j ∈ N_i ∪ G} e^{s_ij} + Σ_{j ∉ N_i ∪ G} κ_ij),  s_ij = scale·q_i·k_j,  "
        "N_i = {j : |p_i − j| ≤ window},  G: heavy keys,  κ: weights of `far`",
        cost=Cost("O(L·(window + heavy + sinks)·(D+V)) + 2 × far", _flops, _memory),
        paper="Zhang et al. 2024, LoLCATs, arXiv 2410.10254; Chen et al. 2021, Scatterbrain, "
        "arXiv 2110.15343; attention sinks: Xiao et al. 2023, arXiv 2309.17453",
        limit="softmax if window ≥ L − 1, heavy + sinks ≥ S, or far=softmax",
        options={
            "window": "keys on each side of the query's position that are read exactly; 0: none",
            "heavy": "keys besides the sinks that all queries read exactly, those of most "
            "attention; causal: those that got most so far",
            "sinks": "first open tokens that all queries read exactly",
            "far": "the mechanism that reads all other keys; none; auto: key_clusters, causal none",
            "preset": "default or fast: sizes of what is left open",
        },
        deviations="exact keys never enter the far field, where Scatterbrain subtracts its "
        "estimates of them; LoLCATs is causal with learned features; heavy keys are ours",
        sample="near_far(window=3)",
        use="a trained softmax model that is to become linear and keep its output: what is near "
        "or heavy is exact, the rest is approximated.",
    )

    def __init__(self, *, device: Any = None, dtype: Any = None, **arguments: Any) -> None:
        super().__init__(device=device, dtype=dtype, **arguments)
        self.hold = self.config.hold()
        self.state_type = HeldKeys if self.hold else NearFarState
        field = self.config.far_field(causal=False)
        self._far_causal = self.config.far_field(causal=True) is not None
        self.far = field and registry.build(
            field[1],
            head_dim=self.head_dim,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            value_dim=self.value_dim,
            embed_dim=self.embed_dim,
            max_length=self.max_length,
            seed=self.seed,
            device=device,
            dtype=dtype,
        )

    @classmethod
    def capabilities_for(cls, config: NearFarConfig) -> Capabilities:
        if config.far == "auto":  # its causal side is another one
            both, causal = _capabilities(config, causal=False), _capabilities(config, causal=True)
            return replace(both, causal=causal.causal, state=causal.state, reach=causal.reach)
        return _capabilities(config, causal=False)

    def reset_parameters(self) -> None:
        """Draws the far mechanism's parameters and random buffers again."""
        if self.far is not None:
            self.far.reset_parameters()

    def reached(self, t: int, length: int) -> range:
        """As `Mechanism.reached`: without a far field, the window alone surely reads a key that is
        no sink.
        """
        if self._far_causal or t < self.config.first(causal=True):
            return range(t + 1, length)
        window = self.hold.recent if self.hold else self.config.near(causal=True)
        return range(t + 1, min(length, t + 1 + window))

    @classmethod
    def calibrates_for(cls, config: NearFarConfig) -> bool:
        field = config.far_field(causal=False)
        return field is not None and field[0].calibrates_for(field[1])

    @torch.no_grad()
    def calibrate(self, q: Tensor, k: Tensor, **arguments: Any) -> None:
        """Calibrates the far mechanism; takes what its own `calibrate` takes.

        Raises:
            OptionError: if the far mechanism takes no statistics from data.
        """
        calibrate = getattr(self.far, "calibrate", None)
        if calibrate is None:
            raise OptionError(f"near_far: far={self.config.far} takes nothing from data")
        calibrate(q, k, **arguments)

    # ---- parts ---------------------------------------------------------------------------

    def _parts(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float
    ) -> dict[str, list[Partial]]:
        """Sums over disjoint sets of keys that are all keys together."""
        if mask.causal and self.hold:
            held = self._held(q, k, v, mask.key, None, scale, apart=True)[0]
            return {name: [held[name]] if name in held else [] for name in ("near", "heavy", "far")}
        q, k, v = (t if t.dtype == torch.float64 else t.float() for t in (q, k, v))
        if not mask.causal and self.config.few(q.shape[2], k.shape[2]):
            return {"near": [_all_keys(q, k, v, mask, scale)], "heavy": [], "far": []}
        if mask.key is None or mask.causal or not self.config.varies():
            return self._parts_of_length(q, k, v, mask, scale, k.shape[2])
        rows = []
        for row, opened in enumerate(mask.key.split(1)):
            one = slice(row, row + 1)
            length = int(opened.sum())
            rows.append(
                self._parts_of_length(q[one], k[one], v[one], Mask(key=opened), scale, length)
            )
        return {
            name: [_stack([parts[name] for parts in rows])] if any(p[name] for p in rows) else []
            for name in rows[0]
        }

    def _parts_of_length(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, length: int
    ) -> dict[str, list[Partial]]:
        """`_parts` with the sizes of rows of `length` open keys."""
        config, causal = self.config, mask.causal
        sizes = config.of_length(length)
        reach = (config.near(causal) or -1) if causal else sizes.window
        parts: dict[str, list[Partial]] = {"near": [], "heavy": [], "far": []}
        if reach >= 0:
            parts["near"].append(partial(q, k, v, mask, Pattern(reach, reach), scale))
        mass = None if causal else self._mass(q, k, mask, scale, reach, sizes.heavy)
        at, found = self._listed(k, mask, sizes.heavy, mass)
        closed = None
        if at.shape[-1]:
            closed = _closed(at, found, k.shape[2])
            keys, values = _taken(k, at), _taken(v, at)
            apart = _Apart(at, found, reach, causal, k.shape[2] - q.shape[2])
            parts["heavy"].append(_exact(q, keys, values, apart, scale))
        far = self.far if config.far_field(causal) else None
        if isinstance(far, KeyClusters):
            beside = Beside(
                window=reach, closed=closed, mass=mass, clusters=sizes.clusters,
                members=sizes.members,
            )  # fmt: skip
            parts["far"] += far.outside(q, k, v, mask, scale, beside)
        elif far is not None:
            parts["far"] += far._outside(q, k, v, mask, far._scale(scale), reach, closed)
        return parts

    def _mass(
        self, q: Tensor, k: Tensor, mask: Mask, scale: float, window: int | Tensor, heavy: int
    ) -> Tensor | None:
        """Attention that keys get from landmark queries, where a choice depends on it."""
        if not (self.config.clustered or heavy > self.config.first(causal=False)):
            return None
        q, k = q.detach(), clear(k.detach(), k.detach(), mask)[0]
        return column_mass(q, k, Mask(key=mask.key), scale, LANDMARKS, window=window)

    def _listed(
        self, k: Tensor, mask: Mask, heavy: int, mass: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Positions (B, 1 or Hkv, g) of heavy keys and sinks, and which of them exist."""
        opened = open_tokens(mask.key, len(k), k.shape[2], k.device)
        sinks = self.config.first(mask.causal)
        if mask.causal or heavy <= sinks:
            at, found = _first_open(opened, min(sinks, k.shape[2]))
            return at[:, None], found[:, None]
        assert mass is not None
        return heavy_keys(mass, opened, count=min(heavy, k.shape[2]), first=max(1, sinks))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
        if mask.causal and self.hold:
            parts = self._held(q, k, v, mask.key, None, scale, sums=False)[0]
            return _merged(parts).to(v.dtype)
        part = self._partial(q, k, v, mask, scale)
        if not mask.causal and self.config.clustered:
            # Without any key the sums are zero too; `output` would cost another two passes.
            den = part.den.masked_fill(part.den == 0, 1.0)
            return (part.num / den[..., None]).to(v.dtype)
        return part.output().to(v.dtype)

    def _partial(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Partial:
        if mask.causal and self.hold:
            return combine(self._held(q, k, v, mask.key, None, scale)[0].values())
        if not mask.causal and self.config.clustered:
            return self._joined(q, k, v, mask, scale)
        parts = self._parts(q, k, v, mask, scale)
        return combine([part for group in parts.values() for part in group])

    def _joined(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Partial:
        """All parts at once, by the engine of the clusters."""
        assert isinstance(self.far, KeyClusters)
        q, k, v = (t if t.dtype == torch.float64 else t.float() for t in (q, k, v))
        keys = k.shape[2]
        if self.config.few(q.shape[2], keys):
            return _all_keys(q, k, v, mask, scale)
        sizes, rows = self.config.of_length(keys), None
        if mask.key is not None and self.config.varies():
            lengths = range(min(keys, SATURATED) + 1)
            table = torch.tensor([self.config.of_length(n) for n in lengths], device=k.device)
            rows = table[mask.key.sum(1).clamp_max(SATURATED)]
            sizes = Sizes(*map(max, zip(*map(self.config.of_length, lengths), strict=True)))
        widths = None if rows is None else rows[:, 0]
        mass = self._mass(
            q, k, mask, scale, sizes.window if widths is None else widths, sizes.heavy
        )
        at, found = self._listed(k, mask, sizes.heavy, mass)
        if rows is not None:
            rank = torch.arange(at.shape[-1], device=k.device)
            found = found & (rank < rows[:, 1, None, None])
        at, found = (t.expand(-1, k.shape[1], -1) for t in (at, found))
        beside = Beside(
            window=sizes.window, exact=True, widths=widths, closed=_closed(at, found, keys),
            listed=at, there=found, mass=mass, clusters=sizes.clusters, members=sizes.members,
            row_clusters=None if rows is None else rows[:, 2],
            row_members=None if rows is None else rows[:, 3],
        )  # fmt: skip
        return self.far.joined(q, k, v, mask, scale, beside)

    @torch.no_grad()
    def shares(
        self,
        q: Queries,
        k: Keys,
        *,
        causal: bool = False,
        key_mask: KeyMask | None = None,
        mask: Mask | None = None,
        scale: float | None = None,
    ) -> dict[str, Tensor]:
        """Each part's share of the normaliser, the mean over queries, for each head (H,).

        A far field whose share is next to nothing does nothing, whatever its size: hybrids hide
        that well (arXiv 2510.05901). Shares of "near", "heavy" (with the sinks) and "far" sum to
        one; queries without any key do not count. Arguments as in a call.
        """
        v = k.new_zeros(*k.shape[:-1], self.value_dim or 1)
        q, k, v, joined, _ = self._check(
            q, k, v, Mask.of(causal=causal, key_mask=key_mask, mask=mask)
        )
        with looking(self):
            parts = self._parts(q, k, v, joined, self._scale(scale))
        total = combine([part for group in parts.values() for part in group])
        empty = total.den == 0
        whole = total.den.masked_fill(empty, 1.0)
        count = (~empty).sum((0, 2)).clamp_min(1)
        found = {}
        for name, group in parts.items():
            share = torch.zeros_like(whole)
            for part in group:
                gap = part.log_scale.masked_fill(part.den == 0, float("-inf")) - total.log_scale
                share = share + part.den * gap.exp() / whole
            found[name] = share.sum((0, 2)) / count
        return found

    def weights(self, *args: Any, **options: Any) -> Tensor:
        """As `Mechanism.weights`; looking does not count as a training call."""
        with looking(self):
            return super().weights(*args, **options)

    # ---- streaming -----------------------------------------------------------------------

    def prefill(
        self,
        q: Queries,
        k: Keys,
        v: Values,
        *,
        state: State | None = None,
        key_mask: KeyMask | None = None,
        scale: float | None = None,
        donate: bool = False,
    ) -> tuple[Output, State]:
        """As `Mechanism.prefill`; on a CPU, steps like the one before are prepared once, and write
        over a donated state.
        """
        if (
            not isinstance(state, HeldKeys)
            or state.far is not None
            or q.dim() != 4
            or k.dim() != 4
            or not 0 < q.shape[2] == k.shape[2] <= TOKENS
            or torch.compiler.is_compiling()
        ):
            return super().prefill(q, k, v, state=state, key_mask=key_mask, scale=scale)
        prepared, places = _steps.get(self, q), (state.kv, state.mass, state.held)
        if (
            prepared is not None
            and prepared.fits(self, q, scale)
            and prepared.step.takes_keys(k, v, key_mask)
            and (prepared.knows(state) or prepared.step.takes_places(places))
        ):
            if key_mask is not None and bool(key_mask.all()):
                key_mask = None
            even = None
            if state.even is not None and key_mask is None:
                even = prepared.step.filled(state.even)
            # What is part of a graph is needed as it is when gradients go back through it.
            donate = donate and not state.kv.requires_grad
            out, places = prepared.step(q, k, v, key_mask, places, donate)
            if donate:
                written(state.kv, state.mass)
            new = HeldKeys(*places, None, even)
            prepared.last = ref(new)
            return out, new
        found = super().prefill(q, k, v, state=state, key_mask=key_mask, scale=scale)
        _steps.remember(self, q, self._prepared(q, k, v, scale))
        return found

    def _prepared(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None
    ) -> Prepared[Step] | None:
        """Steps like this one, prepared where that is possible."""
        has_far = self.far is not None and self._far_causal
        if self.hold is None or has_far or not may_be_prepared() or not Step.can(q, k, v):
            return None
        step = Step(q, k, v, self.hold, DECAY**self.hold.block, self._scale(scale))
        held = held_tensors(self)
        return None if held is None else Prepared(step, scale, held)

    def _held(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        opened: Tensor | None,
        state: HeldKeys | None,
        scale: float,
        *,
        apart: bool = False,
        sums: bool = True,
    ) -> tuple[dict[str, Partial], HeldKeys]:
        """`stream` with this mechanism's sizes and far field."""
        assert self.hold is not None
        far = None
        if self.far is not None and self._far_causal:
            far = _Behind(self.far, self.far._scale(scale), k.shape[1], v.shape[3])
        before = max(0, q.shape[2] - k.shape[2])  # queries that stand before the first key
        parts, state = stream(
            q[:, :, before:], k, v, opened, state, self.hold, scale, far, apart=apart, sums=sums
        )
        if before:
            for name, part in parts.items():
                parts[name] = Partial(
                    F.pad(part.num, (0, 0, before, 0)),
                    F.pad(part.den, (before, 0)),
                    F.pad(part.log_scale, (before, 0), value=EMPTY_LOG_SCALE),
                )
        return parts, state

    def _prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: Any,
        key_mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, State]:
        queries, new = q.shape[2], k.shape[2]
        if queries > new:
            raise ShapeError(f"prefill needs L ≤ S, given L={queries} queries for S={new} new keys")
        dtype = v.dtype
        if self.hold:
            found, state = self._held(q, k, v, key_mask, state, scale, sums=False)
            return _merged(found).to(dtype), state
        q, k, v = (t if t.dtype == torch.float64 else t.float() for t in (q, k, v))
        reach, sinks = self.config.near(causal=True) or -1, self.config.first(causal=True)
        if state is None:
            state = self._empty(k, v)
        opened = key_mask
        if opened is None:
            opened = torch.ones(len(k), new, dtype=torch.bool, device=k.device)
        ring = KeyValueState(state.k, state.v, state.key)
        both = KeyValueState.extend(ring, k, v, opened)
        assert both.key is not None
        parts = []
        if reach >= 0:
            mask = Mask(causal=True, key=both.key)
            parts.append(partial(q, both.k, both.v, mask, Pattern(reach, 0), scale))

        sink_k, sink_v, sink_at, taken = self._sinks(state, k, v, opened)
        if sinks:
            at = sink_at[:, None]
            apart = _Apart(at, at >= 0, reach, True, state.length + new - queries)
            parts.append(_exact(q, sink_k, sink_v, apart, scale))

        # The keys that leave the ring now are those that the far field has yet to read.
        to_far = torch.cat([state.to_far, opened & ~taken], 1)
        far_state = None
        if self.far is not None and self._far_causal:
            far, far_state = self.far._prefill_partial(
                q, both.k[:, :, :new], both.v[:, :, :new], state.far, to_far[:, :new],
                self.far._scale(scale),
            )  # fmt: skip
            parts.append(far)
        out = combine(parts).output().to(dtype)
        return out, NearFarState(
            # Copies: views would keep all keys alive.
            both.k[:, :, new:].clone(), both.v[:, :, new:].clone(), both.key[:, new:].clone(),
            to_far[:, new:].clone(), sink_k, sink_v, sink_at, far_state, state.length + new,
        )  # fmt: skip

    def _sinks(
        self, state: NearFarState, k: Tensor, v: Tensor, opened: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keys, values and positions of the sinks, and which new tokens (B, S) are among them.

        They are the first open ones of those known and those that come.
        """
        known, count = state.sink_at >= 0, self.config.first(causal=True)
        if bool(known.all()):  # from then on they stay
            return state.sink_k, state.sink_v, state.sink_at, torch.zeros_like(opened)
        both = KeyValueState.extend(KeyValueState(state.sink_k, state.sink_v, known), k, v, opened)
        assert both.key is not None
        place = torch.arange(state.length, state.length + k.shape[2], device=k.device)
        places = torch.cat([state.sink_at, place.expand(len(k), -1)], 1)
        at, found = _first_open(both.key, count)
        taken = torch.zeros_like(both.key).scatter(1, at, found)[:, count:]
        where = at[:, None, :, None]
        keys, values = (
            t.gather(2, where.expand(-1, t.shape[1], -1, t.shape[-1])) for t in (both.k, both.v)
        )
        return keys, values, places.gather(1, at).masked_fill(~found, -1), taken

    def _empty(self, k: Tensor, v: Tensor) -> NearFarState:
        """The state before any token."""
        batch, heads = k.shape[:2]
        size = (self.config.near(causal=True) or -1) + 1
        sinks = self.config.first(causal=True)
        closed = torch.zeros(batch, size, dtype=torch.bool, device=k.device)
        return NearFarState(
            k.new_zeros(batch, heads, size, k.shape[-1]),
            v.new_zeros(batch, heads, size, v.shape[-1]),
            closed,
            closed,
            k.new_zeros(batch, heads, sinks, k.shape[-1]),
            v.new_zeros(batch, heads, sinks, v.shape[-1]),
            torch.full((batch, sinks), -1, device=k.device),
            None,
        )


def _capabilities(config: NearFarConfig, causal: bool) -> Capabilities:
    """Capabilities of bidirectional or of causal calls."""
    field = config.far_field(causal)
    if field is None:
        found, have = None, Capabilities(state="constant", partial=True)
        merges: Support = True
    else:
        found, have = field[0], field[0].capabilities_for(field[1])
        merges = _of(found, found.outside_merges_for(field[1]))
    state: Any = _of(found, have.state)
    if state != "constant" and state:
        state = Absent(f"{NearFar.name if found is None else found.name}: its state grows")
    elif state and found is not None and found._prefill_partial is Mechanism._prefill_partial:
        state = Absent(f"{found.name}: its state gives no sums to merge with exact ones")
    causal_too, gradient = _of(found, have.causal), _of(found, have.exact_gradient)
    if config.heavy and not config.near(causal=True):
        causal_too = Absent("heavy keys are chosen among those that leave a window: window ≥ 1")
        state = causal_too
    elif config.hold() and field is not None and state != "constant":
        causal_too = state  # keys that are let go go into it
    if config.heavy or config.hold():
        gradient = Absent("the choice of heavy keys is held fixed")
    listed = causal or config.of_length(SATURATED).heavy > 0
    one_choice: Support = Absent("which keys are heavy or sinks depends on all keys")
    window = config.near(causal) if causal else max(0, config.of_length(SATURATED).window)
    reach = have.reach if have.reach == "all past tokens" else f"the window; {have.reach}"
    return Capabilities(
        causal=causal_too,
        key=_of(found, have.key),
        prefix=Absent("a prefix would be read from beyond the window"),
        segments=Absent("the far field's sums serve one sequence; call once for each segment"),
        window=Absent("the far field reads beyond every window; use local"),
        cross=_of(found, have.cross),
        gqa=_of(found, have.gqa),
        state=state,
        read=Absent("the window of a query moves with it, the state holds the last one's"),
        partial=True,
        merges=one_choice if listed else merges,
        approximates="softmax",
        trainable=_of(found, have.trainable),
        compile=Absent("how many sums a call has depends on its length: graphs would branch on it"),
        deterministic=_of(found, have.deterministic),
        max_length=have.max_length,
        functional=_of(found, have.functional),
        pad_invariant=_of(found, have.pad_invariant),
        compact=Absent("masked tokens keep their place in the window")
        if window
        else _of(found, have.compact),
        exact_gradient=gradient,
        full_length=_of(found, have.full_length),
        reach=reach if field else f"the window and the sinks{CHOSEN * bool(config.hold())}",
    )


def _merged(parts: dict[str, Partial]) -> Tensor:
    """The output of `stream`; held keys alone are normalised already."""
    return combine(parts.values()).output() if len(parts) > 1 else parts["held"].num


@dataclass(frozen=True)
class _Behind:
    """A mechanism as the `Far` field of `stream`."""

    mechanism: Mechanism
    scale: Any
    kv_heads: int
    value_dim: int

    def absorb(self, state: State | None, k: Tensor, v: Tensor, opened: Tensor | None) -> State:
        if k.dtype != torch.float64:
            k, v = k.float(), v.float()
        q = k.new_zeros(len(k), self.mechanism.num_heads, 1, k.shape[3])
        return self.mechanism._prefill_partial(q, k, v, state, opened, self.scale)[1]

    def read(self, state: State, q: Tensor) -> Partial:
        batch, _, length, head_dim = q.shape  # a query reads the state and as many masked keys
        k = q.new_zeros(batch, self.kv_heads, length, head_dim)
        v = q.new_zeros(batch, self.kv_heads, length, self.value_dim)
        closed = torch.zeros(batch, length, dtype=torch.bool, device=q.device)
        return self.run(state, q, k, v, closed)[0]

    def run(
        self, state: State | None, q: Tensor, k: Tensor, v: Tensor, opened: Tensor
    ) -> tuple[Partial, State]:
        return self.mechanism._prefill_partial(q, k, v, state, opened, self.scale)


def _stack(rows: list[list[Partial]]) -> Partial:
    """One part of single batch rows as that of the batch; an empty list reads no key."""
    like = next(parts[0].num for parts in rows if parts)[..., 0]
    nothing = Partial(
        like.new_zeros(*like.shape, 1),
        like.new_zeros(like.shape),
        like.new_full(like.shape, EMPTY_LOG_SCALE),
    )
    found = [combine(parts) if parts else nothing for parts in rows]
    width = max(part.num.shape[-1] for part in found)
    return Partial(
        torch.cat([part.num.expand(*part.den.shape, width) for part in found]),
        torch.cat([part.den for part in found]),
        torch.cat([part.log_scale for part in found]),
    )


def _closed(at: Tensor, found: Tensor, keys: int) -> Tensor:
    """(B, h, S) bool, True at the positions (B, h, g) of keys that exist."""
    # Absent entries share positions with others: counted, not assigned.
    count = torch.zeros(*at.shape[:2], keys, dtype=torch.int32, device=at.device)
    return count.scatter_add(2, at, found.to(torch.int32)) > 0


def _taken(t: Tensor, at: Tensor) -> Tensor:
    """Rows (B, Hkv, g, ·) of t (B, Hkv, S, ·) at positions (B, 1 or Hkv, g)."""
    where = at.expand(-1, t.shape[1], -1)[..., None]
    return t.gather(2, where.expand(-1, -1, -1, t.shape[-1]))


def _of(found: type[Mechanism] | None, support: Any) -> Any:
    """The far field's capability, or its reason with its name."""
    if found is None:
        return support
    return Absent(f"{found.name}: {support.reason}") if isinstance(support, Absent) else support


@dataclass(frozen=True, eq=False)
class _Apart:
    """Which queries read a listed key: those whose window does not hold it. A `Reach`.

    Args:
        at, found: (B, 1 or Hkv, g) positions of the keys and which of them exist.
        width: w of the window, −1 for none.
        past: whether only earlier keys are read.
        offset: position of the first query.
    """

    at: Tensor
    found: Tensor
    width: int
    past: bool
    offset: int
    causal: ClassVar[bool] = False  # `Reach` asks by places in the list, not by positions
    window: ClassVar[None] = None
    dense: ClassVar[None] = None

    def span(self, start: int, stop: int, queries: int, keys: int) -> tuple[int, int]:
        return 0, keys

    def rows(
        self,
        start: int,
        stop: int,
        queries: int,
        keys: int,
        *,
        span: tuple[int, int] | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """(B, 1 or Hkv, stop − start, g)."""
        place = torch.arange(start, stop, device=self.at.device) + self.offset
        gap = place[:, None] - self.at[:, :, None]
        return ((gap if self.past else gap.abs()) > self.width) & self.found[:, :, None]


def _exact(q: Tensor, k: Tensor, v: Tensor, apart: _Apart, scale: float) -> Partial:
    """Exact sums over listed keys k (B, Hkv, g, D), a chunk of queries at a time."""
    groups = q.shape[1] // k.shape[1]
    closed = ~apart.found[..., None]  # what stands there must not matter
    k, v = k.masked_fill(closed, 0.0), v.masked_fill(closed, 0.0)
    if apart.at.shape[1] > 1 and groups > 1:
        at, found = (t.repeat_interleave(groups, 1) for t in (apart.at, apart.found))
        apart = _Apart(at, found, apart.width, apart.past, apart.offset)
    size = 8 * q.shape[0] * q.shape[1] * k.shape[2] * q.element_size()
    function = functools.partial(explicit, scale=scale, dtype=q.dtype)
    return as_partial(over_queries(function, q, k, v, apart, size))


def _all_keys(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Partial:
    """Exact sums over all open keys, a chunk of queries at a time."""
    k, v = clear(k, v, mask)
    size = 8 * q.shape[0] * q.shape[1] * k.shape[2] * q.element_size()
    function = functools.partial(explicit, scale=scale, dtype=q.dtype)
    return as_partial(over_queries(function, q, k, v, mask, size))


def _first_open(opened: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Indices (B, count) of each row's first open tokens of (B, n), and which of them exist."""
    length = opened.shape[1]
    order = torch.arange(length, 0, -1, device=opened.device)
    top = (order * opened).topk(min(count, length), 1)
    pad = (0, count - top.indices.shape[1])
    return F.pad(top.indices, pad), F.pad(top.values > 0, pad)


@torch.no_grad()
def heavy_keys(mass: Tensor, opened: Tensor, *, count: int, first: int) -> tuple[Tensor, Tensor]:
    """The keys of largest mass, in decreasing order.

    Args:
        mass: (B, Hkv, S), as `column_mass` gives it outside of the window.
        opened: (B, S) bool.
        count: how many keys.
        first: so many first open keys, and the last one, are always chosen.

    Returns:
        Positions (B, Hkv, count), and which of them exist: rows may have fewer open keys.
    """
    rank = opened.cumsum(1)
    forced = opened & ((rank <= first) | (rank == rank[:, -1:]))
    mass = mass.masked_fill(forced[:, None], float("inf")).masked_fill(~opened[:, None], -1.0)
    top = mass.topk(count, -1)
    return top.indices, top.values >= 0.0
