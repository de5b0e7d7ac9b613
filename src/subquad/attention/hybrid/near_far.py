"""Near and far: exact attention where it matters, any cheap mechanism for the rest.

    out_i = Σ_p N_p,i / Σ_p D_p,i    over three disjoint sets of keys p:

    near    the window |p_i − j| ≤ w:    N = Σ e^{s_ij} v_j,  D = Σ e^{s_ij},  s_ij = scale·q_i·k_j
    heavy   a few keys outside of it:    the same
    far     all others:                  N, D of the far mechanism, in the same units

One normaliser for all of them: each key is counted once, and weights compare across parts.
Heavy keys leave the far field by zeroing their features; the window leaves it by summing
earlier and later keys apart (`subquad.attention.outside`), never by subtraction.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

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
    CHUNK_BYTES,
    KeyValueState,
    as_partial,
    explicit,
    over_queries,
)
from subquad.attention.masks import Mask
from subquad.attention.partial import Partial, combine
from subquad.attention.sparse.engine import Pattern, computed_keys, partial
from subquad.errors import OptionError, ShapeError
from subquad.options import Config, Spec, integer_problem
from subquad.shapes import KeyMask, Keys, Queries

__all__ = ["NearFar", "NearFarConfig", "NearFarState", "heavy_keys"]

LANDMARKS = 64
"""Queries, in equal distances, whose attention decides which keys are heavy."""


@dataclass(frozen=True)
class NearFarConfig(Config):
    """Options of `NearFar`.

    Args:
        window: keys on each side beside the query's own position that are read exactly, to the
            token; 0 reads none exactly, not even the own one. A causal call has no right side.
        heavy: keys for each key/value head, besides the sinks, that all queries read exactly:
            those that get most attention of landmark queries; the last key, and without sinks
            the first one, take places among them. Bidirectional only.
        sinks: how many of the first open tokens all queries read exactly.
        far: the mechanism that reads all other keys: a name, a spec such as
            ``performer(features=128)``, or a config object.
    """

    mechanism: ClassVar[str] = "near_far"

    window: int = 64
    heavy: int = 0
    sinks: int = 4
    far: str | Spec | Config = Spec("performer")  # noqa: RUF009  # a Spec is immutable

    def __post_init__(self) -> None:
        super().__post_init__()
        # One form for all ways to write it: specs compare, hash and print.
        object.__setattr__(self, "far", self.resolved()[1].spec())

    def problems(self) -> Iterator[str]:
        yield from integer_problem("window", self.window, 0)
        yield from integer_problem("heavy", self.heavy, 0)
        yield from integer_problem("sinks", self.sinks, 0)
        try:
            found, config = self.resolved()
        except OptionError as error:
            yield f"far: {error}"
            return
        support = found.outside_for(config)
        if isinstance(support, Absent):
            yield f"far={config} cannot be the far field: {support.reason}"

    def resolved(self) -> tuple[type[Mechanism], Any]:
        """Class and config of the far mechanism."""
        return registry.resolve(self.far)

    @property
    def listed(self) -> int:
        """Keys that every query reads beside its window."""
        return self.heavy + self.sinks

    @property
    def reach(self) -> int:
        """w, with −1 for no window at all."""
        return self.window or -1


def _flops(length: int, head_dim: int, value_dim: int, config: NearFarConfig) -> float:
    near = computed_keys(config.window, config.window) if config.window else 0.0
    exact = 2.0 * length * (near + config.listed) * (head_dim + value_dim)
    if config.heavy:
        exact += 2.0 * LANDMARKS * length * head_dim
    found, own = config.resolved()
    return exact + 2.0 * found.info.cost.flops(length, head_dim, value_dim, own)


def _memory(length: int, head_dim: int, value_dim: int, config: NearFarConfig) -> float:
    # Numerators of window, heavy keys, both sides of the far field, and their sum; reversed q, v;
    # reversed k.
    found, own = config.resolved()
    copies = 4.0 * length * (6 * value_dim + 2 * head_dim)
    return copies + 2.0 * found.info.cost.memory(length, head_dim, value_dim, own)


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

    Cost O(L·(window + heavy + sinks)·(D+V)) and twice the far field's.

    Papers: exact near field + linear far field under one normaliser: Zhang et al. 2024 (LoLCATs),
    arXiv 2410.10254; sparse + low rank: Chen et al. 2021 (Scatterbrain), arXiv 2110.15343;
    sinks: Xiao et al. 2023, arXiv 2309.17453.

    Args:
        window, heavy, sinks, far: see `NearFarConfig`.

    See `Mechanism` for sizes, shapes and what is raised; `shares` for what each part contributes.

    Raises:
        OptionError: a far mechanism whose sums cannot be merged with exact ones, with the reason.

    Example:
        >>> import torch, subquad as sq
        >>> q, k, v = (torch.randn(1, 2, 300, 8, dtype=torch.float64) for _ in range(3))
        >>> mech = sq.build(
        ...     "near_far(window=16, far=performer(features=32))",
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
    state_type = NearFarState
    Config = NearFarConfig
    config: NearFarConfig
    far: Mechanism
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
            "attention; bidirectional only",
            "sinks": "first open tokens that all queries read exactly",
            "far": "the mechanism that reads all other keys",
        },
        deviations="exact keys never enter the far field, where Scatterbrain subtracts its "
        "estimates of them; LoLCATs is causal with learned features; heavy keys are ours",
        sample="near_far(window=3)",
        use="a trained softmax model that is to become linear and keep its output: what is near "
        "or heavy is exact, the rest is approximated.",
    )

    def __init__(self, *, device: Any = None, dtype: Any = None, **arguments: Any) -> None:
        super().__init__(device=device, dtype=dtype, **arguments)
        self.far = registry.build(
            self.config.far,
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
        found, own = config.resolved()
        have = found.capabilities_for(own)
        causal: Support = _of(found, have.causal)
        state: Any = _of(found, have.state)
        if state != "constant" and state:
            state = Absent(f"{found.name}: its state grows")
        elif state and found._prefill_partial is Mechanism._prefill_partial:
            state = Absent(f"{found.name}: its state gives no sums to merge with exact ones")
        gradient = _of(found, have.exact_gradient)
        if config.heavy:
            causal = Absent("heavy keys are chosen by looking at all queries; use sinks")
            state, gradient = causal, Absent("the choice of heavy keys is held fixed")
        one_choice: Support = Absent("which keys are heavy or sinks depends on all keys")
        compact: Support = Absent("masked tokens keep their place in the window")
        return Capabilities(
            causal=causal,
            key=_of(found, have.key),
            prefix=Absent("a prefix would be read from beyond the window"),
            segments=Absent("the far field's sums serve one sequence; call once for each segment"),
            window=Absent("the far field reads beyond every window; use local"),
            cross=_of(found, have.cross),
            gqa=_of(found, have.gqa),
            state=state,
            read=Absent("the window of a query moves with it, the state holds the last one's"),
            partial=True,
            merges=one_choice if config.listed else _of(found, found.outside_merges_for(own)),
            approximates="softmax",
            trainable=_of(found, have.trainable),
            compile=Absent(
                "how many sums a call has depends on its length: graphs would branch on it"
            ),
            deterministic=_of(found, have.deterministic),
            max_length=have.max_length,
            functional=_of(found, have.functional),
            pad_invariant=_of(found, have.pad_invariant),
            compact=compact if config.window else _of(found, have.compact),
            exact_gradient=gradient,
            full_length=_of(found, have.full_length),
            reach=have.reach if have.reach == "all past tokens" else f"the window; {have.reach}",
        )

    def reset_parameters(self) -> None:
        """Draws the far mechanism's parameters and random buffers again."""
        self.far.reset_parameters()

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
        q, k, v = (t if t.dtype == torch.float64 else t.float() for t in (q, k, v))
        reach = self.config.reach
        parts: dict[str, list[Partial]] = {"near": [], "heavy": [], "far": []}
        if reach >= 0:
            parts["near"].append(partial(q, k, v, mask, Pattern(reach, reach), scale))
        closed = None
        if self.config.listed:
            at, found = self._listed(q, k, mask, scale)
            closed = torch.zeros(*at.shape[:2], k.shape[2], dtype=torch.bool, device=k.device)
            closed = closed.scatter(2, at, found)
            where = at.expand(-1, k.shape[1], -1)
            keys, values = (
                t.gather(2, where[..., None].expand(-1, -1, -1, t.shape[-1])) for t in (k, v)
            )
            apart = _Apart(at, found, reach, mask.causal, k.shape[2] - q.shape[2])
            parts["heavy"].append(_exact(q, keys, values, apart, scale))
        own = self.far._scale(scale)
        parts["far"] += self.far._outside(q, k, v, mask, own, reach, closed)
        return parts

    def _listed(self, q: Tensor, k: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
        """Positions (B, 1 or Hkv, g) of heavy keys and sinks, and which of them exist."""
        sinks, keys = self.config.sinks, k.shape[2]
        if self.config.heavy:
            count = min(self.config.listed, keys)
            return heavy_keys(
                q, k, mask.key, count=count, first=max(1, sinks), window=self.config.reach,
                scale=scale,
            )  # fmt: skip
        opened = mask.key
        if opened is None:
            opened = torch.ones(len(k), keys, dtype=torch.bool, device=k.device)
        at, found = _first_open(opened, min(sinks, keys))
        return at[:, None], found[:, None]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
        return self._partial(q, k, v, mask, scale).output().to(v.dtype)

    def _partial(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Partial:
        parts = self._parts(q, k, v, mask, scale)
        return combine([part for group in parts.values() for part in group])

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

    def _prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: NearFarState | None,
        key_mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, State]:
        queries, new = q.shape[2], k.shape[2]
        if queries > new:
            raise ShapeError(f"prefill needs L ≤ S, given L={queries} queries for S={new} new keys")
        dtype = v.dtype
        q, k, v = (t if t.dtype == torch.float64 else t.float() for t in (q, k, v))
        config, reach = self.config, self.config.reach
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
        if config.sinks:
            at = sink_at[:, None]
            apart = _Apart(at, at >= 0, reach, True, state.length + new - queries)
            parts.append(_exact(q, sink_k, sink_v, apart, scale))

        # The keys that leave the ring now are those that the far field has yet to read.
        to_far = torch.cat([state.to_far, opened & ~taken], 1)
        far, far_state = self.far._prefill_partial(
            q, both.k[:, :, :new], both.v[:, :, :new], state.far, to_far[:, :new],
            self.far._scale(scale),
        )  # fmt: skip
        out = combine([*parts, far]).output().to(dtype)
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
        known, count = state.sink_at >= 0, self.config.sinks
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
        batch, heads, size, sinks = *k.shape[:2], self.config.reach + 1, self.config.sinks
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

    def extra_repr(self) -> str:
        shown = super().extra_repr()
        return shown if "far=" in shown else f"{shown}, far={self.config.far}"


def _of(found: type[Mechanism], support: Any) -> Any:
    """The far field's capability, or its reason with its name."""
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


def _first_open(opened: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Indices (B, count) of each row's first open tokens of (B, n), and which of them exist."""
    length = opened.shape[1]
    order = torch.arange(length, 0, -1, device=opened.device)
    top = (order * opened).topk(min(count, length), 1)
    pad = (0, count - top.indices.shape[1])
    return F.pad(top.indices, pad), F.pad(top.values > 0, pad)


@torch.no_grad()
def heavy_keys(
    q: Tensor,
    k: Tensor,
    key: Tensor | None,
    *,
    count: int,
    first: int,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The keys that get most exact attention of landmark queries from beyond their windows.

        mass_j = Σ_{i ∈ landmarks, |p_i − j| > window} softmax_j(scale·q_i·k_j)

    Landmarks stand in the middle of `LANDMARKS` equal stretches of the open tokens (of all
    queries where L ≠ S); the query heads of a group are summed. Cost O(LANDMARKS·H·S·D).

    Args:
        q: (B, H, L, D).
        k: (B, Hkv, S, D).
        key: (B, S) bool, True = open, or None.
        count: how many keys.
        first: so many first open keys, and the last one, are always chosen.
        window: w, −1 for none.
        scale: factor of the logits.

    Returns:
        Positions (B, Hkv, count), and which of them exist: rows may have fewer open keys.
    """
    (batch, heads, queries, _), (kv, keys) = q.shape, k.shape[1:3]
    opened = key
    if opened is None:
        opened = torch.ones(batch, keys, dtype=torch.bool, device=k.device)
    total = torch.full((batch, 1), queries, device=q.device)
    if queries == keys:  # self-attention: queries at closed keys are padding
        total = opened.sum(1, keepdim=True)
    marks = torch.arange(min(LANDMARKS, queries), device=q.device)
    count_q = total.clamp_max(LANDMARKS)
    at = (2 * marks + 1) * total // (2 * count_q).clamp_min(1)
    unused = marks >= count_q  # (B, marks)
    at = at.masked_fill(unused, 0)
    if queries == keys and key is not None:
        at = torch.argsort((~opened).to(torch.uint8), dim=1, stable=True).gather(1, at)
    x = q.gather(2, at[:, None, :, None].expand(-1, heads, -1, q.shape[-1]))
    x = x.unflatten(1, (kv, -1)).flatten(2, 3) * scale  # (B, Hkv, G·marks, D)
    place = (at + (keys - queries)).repeat(1, heads // kv)
    position = torch.arange(keys, device=k.device)
    mass = k.new_zeros(batch, kv, keys)
    size = x.shape[2] * keys * x.element_size()
    step = max(1, CHUNK_BYTES // size)
    for row in range(batch):
        near = (place[row, :, None] - position).abs() <= window
        near = near | unused[row].repeat(heads // kv)[:, None]
        for head in range(0, kv, step):
            scores = x[row, head : head + step] @ k[row, head : head + step].mT
            weights = scores.masked_fill(~opened[row], float("-inf")).softmax(-1)
            mass[row, head : head + step] = weights.masked_fill_(near, 0.0).sum(1)
    rank = opened.cumsum(1)
    forced = opened & ((rank <= first) | (rank == rank[:, -1:]))
    mass = mass.masked_fill(forced[:, None], float("inf")).masked_fill(~opened[:, None], -1.0)
    top = mass.topk(count, -1)
    return top.indices, top.values >= 0.0
