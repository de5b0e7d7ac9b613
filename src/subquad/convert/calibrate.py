"""Calibration without training: statistics, and the cheapest sizes, from a few exact runs.

The model runs exactly on a few batches. From each converted layer's queries and keys,

* a bounded sample of tokens gives mechanisms their statistics: moments, landmarks, anchors;
* every setting of a ladder of sizes is tried on the exact q, k, v, head by head, and each
  key/value head gets a setting of its own.

With e_h(s) the squared output error of head h under setting s, c_h(s) its cost and o* the exact
output, a layer's relative error is √(Σ_h e_h(s_h) / Σ_h |o*_h|²). Heads are chosen by marginal
error per cost along the lower convex hulls of their points (c, e): all start at their cheapest
setting, the step with the largest fall of error per cost is taken next, until the layer's error
is at most `target_error`, or until no step fits into `budget`. This is the optimum of the problem
with fractional settings, and off by at most one step from that with whole ones (Fox 1966,
Discrete optimization via marginal analysis).
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from subquad.attention.base import Absent, Mechanism
from subquad.attention.masks import Mask
from subquad.convert import routing, swap
from subquad.convert.inputs import Call, batches, evaluating
from subquad.convert.probe import uniform_attention
from subquad.errors import OptionError, UnsupportedError
from subquad.options import Config, Part, Spec
from subquad.registry import capable, resolve

__all__ = ["Budget", "Calibration", "LayerCalibration", "ladder"]

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""What the sizes of a mechanism are multiplied by, rung by rung of its ladder."""

SAMPLE = 2048
"""Tokens of a layer that its statistics are taken from."""


@dataclass(frozen=True)
class Budget:
    """What all converted layers together may cost, as a share of exact attention's cost.

    Args:
        flops: share of the FLOPs of exact attention at `length`, all heads of all converted
            layers, by the formulas of `subquad.describe`.
        bytes: share of the bytes of the keys and values of `length` tokens; the mechanism's
            state has to fit into it. For layers with a causal state.
        length: tokens; default the longest sequence of the calibration.

    Written ``"flops:0.25"`` or ``"bytes:0.1"``.

    Raises:
        OptionError: not exactly one of them, or one that is not positive.
    """

    flops: float | None = None
    bytes: float | None = None
    length: int | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.flops, self.bytes) if value is not None]
        if len(given) != 1:
            raise OptionError("a budget has either flops or bytes, as in 'flops:0.25'")
        number = isinstance(given[0], int | float) and not isinstance(given[0], bool)
        if not number or not 0.0 < given[0] < math.inf:
            raise OptionError(
                f"a budget is a positive share of exact attention, given {given[0]!r}"
            )
        if self.length is not None and (not isinstance(self.length, int) or self.length < 1):
            raise OptionError(f"length={self.length!r} must be an integer ≥ 1")

    @classmethod
    def of(cls, given: Budget | str) -> Budget:
        """Reads ``"flops:0.25"``; a budget is returned as it is."""
        if isinstance(given, Budget):
            return given
        if not isinstance(given, str):
            raise OptionError(
                "budget must be a Budget or text such as 'flops:0.25' or 'bytes:0.1', given "
                f"{given!r}"
            )
        kind, _, share = given.replace("=", ":").partition(":")
        kind = kind.strip()
        try:
            number = float(share) if kind in ("flops", "bytes") else math.nan
        except ValueError:
            number = math.nan
        if math.isnan(number):
            raise OptionError(
                f"budget={given!r} must be 'flops:SHARE' or 'bytes:SHARE', as in 'flops:0.25'"
            )
        return cls(flops=number) if kind == "flops" else cls(bytes=number)

    @property
    def share(self) -> float:
        """The number, of whichever kind."""
        return float(self.flops if self.flops is not None else self.bytes or 0.0)

    @property
    def kind(self) -> str:
        """``"flops"`` or ``"bytes"``."""
        return "flops" if self.flops is not None else "bytes"

    def __str__(self) -> str:
        return f"{self.kind}:{self.share:g}"


@dataclass(frozen=True)
class LayerCalibration:
    """What was chosen for a layer, and what error is to be expected of it.

    Errors are relative errors of the attention output on the calibration's own tokens: the
    choice has seen them, new text errs a little more.

    Args:
        name: the attention module's name.
        settings: the mechanism of each key/value head, in the option grammar.
        error: of the layer.
        uniform_error: uniform attention's, the line to beat.
        heads: errors of the key/value heads, each with its query heads.
        cost: FLOPs, or bytes of state for a budget of bytes, relative to exact attention.
        met: whether the error is at most `target_error`; True without one.
    """

    name: str
    settings: tuple[str, ...]
    error: float
    uniform_error: float
    heads: tuple[float, ...]
    cost: float
    met: bool = True

    @property
    def chosen(self) -> str:
        """The settings, each with its number of key/value heads where they differ."""
        counts: dict[str, int] = {}
        for setting in self.settings:
            counts[setting] = counts.get(setting, 0) + 1
        return ", ".join(
            setting if len(counts) == 1 else f"{setting} × {count}"
            for setting, count in counts.items()
        )

    def __str__(self) -> str:
        missed = "" if self.met else ", target missed"
        return (
            f"error {self.error:.3g} (uniform {self.uniform_error:.3g}){missed}, "
            f"cost {self.cost:.3g} of exact"
        )


@dataclass(frozen=True)
class Calibration:
    """What a calibration has seen and chosen.

    Args:
        mechanism: that whose sizes were chosen from, as it was asked for.
        layers: in the order of the model.
        tokens: tokens seen, padding left out.
        length: of the sequences for which costs are counted.
        cost_kind: ``"flops"`` or ``"bytes"``.
        target_error, budget: as they were asked for; budget in its short form.
    """

    mechanism: str
    layers: tuple[LayerCalibration, ...]
    tokens: int
    length: int
    cost_kind: str = "flops"
    target_error: float | None = None
    budget: str | None = None

    @property
    def error(self) -> float:
        """Mean of the layers' errors."""
        return statistics.fmean(layer.error for layer in self.layers)

    @property
    def cost(self) -> float:
        """All layers' cost relative to exact attention; heads weigh alike."""
        counts = [len(layer.settings) for layer in self.layers]
        pairs = zip(self.layers, counts, strict=True)
        return sum(layer.cost * count for layer, count in pairs) / sum(counts)

    @property
    def missed(self) -> tuple[str, ...]:
        """Names of the layers that no setting brought below `target_error`."""
        return tuple(layer.name for layer in self.layers if not layer.met)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "error": self.error, "cost": self.cost, "missed": self.missed}

    def lines(self) -> Iterator[str]:
        """What to print."""
        asked = ""
        if self.target_error is not None:
            asked = f", target error {self.target_error:g}"
        elif self.budget is not None:
            asked = f", budget {self.budget}"
        kind = "FLOPs" if self.cost_kind == "flops" else "bytes of state"
        yield (
            f"calibrated on {self.tokens} tokens{asked}: expected error {self.error:.3g}, "
            f"{kind} {self.cost:.3g} of exact attention's at {self.length} tokens"
        )
        width = max(len(layer.name) for layer in self.layers)
        alike = len({layer.chosen for layer in self.layers}) == 1
        if alike:
            yield f"  all heads: {self.layers[0].chosen}"
        for layer in self.layers:
            yield f"  {layer.name:<{width}}  {layer}" + ("" if alike else f": {layer.chosen}")
        if self.missed:
            yield (
                f"  target missed in {len(self.missed)} layers: start from larger sizes, or keep "
                "them exact with keep_exact="
            )


# ---- ladders of sizes ---------------------------------------------------------------------


def ladder(
    config: Config, factors: Sequence[float] = FACTORS, length: int | None = None
) -> list[Config]:
    """The config with its sizes multiplied by each factor; sizes of its parts along with them.

    Even sizes stay even. Settings that the mechanism refuses are left out. Sizes that depend on
    the length are those at `length`; the config itself, factor 1, leaves them open.

    >>> import subquad as sq
    >>> [str(one) for one in ladder(sq.PerformerConfig(features=64), (0.5, 1, 2))]
    ['performer(features=32)', 'performer(features=64)', 'performer(features=128)']
    """
    found: dict[str, Config] = {}
    for factor in factors:
        one = config
        if factor != 1.0:
            try:
                one = _scaled(config if length is None else config.for_length(length), factor)
            except OptionError:
                continue
        found.setdefault(str(one), one)
    return list(found.values())


def _scaled(config: Config, factor: float) -> Config:
    values = {name: getattr(config, name) for name in config.sizes}
    changed = {name: _size(value, factor) for name, value in values.items()}
    return dataclasses.replace(config, **changed)


def _size(value: Any, factor: float) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        step = 1 if value % 2 else 2
        return max(step, step * round(value * factor / step)) if value else 0
    if isinstance(value, tuple):
        return tuple(_size(one, factor) for one in value)
    if isinstance(value, Spec | Config):
        return _scaled(resolve(value)[1], factor)
    return value


# ---- exact runs ---------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Attended:
    """One exact attention call of one layer.

    Args:
        q, k, v: (B, H, L, D), (B, Hkv, S, D), (B, Hkv, S, V), as a mechanism gets them.
        mask, scale: likewise.
        out: exact attention's output (B, H, L, V).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    scale: float | None
    out: Tensor

    @property
    def open_keys(self) -> Tensor:
        """(B, S) bool, False for padding."""
        if self.mask.key is None:
            return torch.ones(len(self.k), self.k.shape[2], dtype=torch.bool, device=self.k.device)
        return self.mask.key.expand(len(self.k), -1)

    @property
    def open_queries(self) -> Tensor:
        """(B, L) bool; in self-attention padding is no query either."""
        if self.q.shape[2] == self.k.shape[2]:
            return self.open_keys
        return torch.ones(len(self.q), self.q.shape[2], dtype=torch.bool, device=self.q.device)

    def squares(self, other: Tensor | None) -> Tensor:
        """Σ |other − out|² (Hkv,), float64, over open queries; |out|² without another."""
        gap = self.out.double() if other is None else other.double() - self.out.double()
        gap = gap.masked_fill(~self.open_queries[:, None, :, None], 0.0)
        return gap.square().sum((0, 2, 3)).unflatten(0, (self.k.shape[1], -1)).sum(1).cpu()


Watcher = Callable[[str, Attended], None]


@contextmanager
def exact_runs(model: nn.Module, names: Iterable[str]) -> Iterator[Callable[[Any, Watcher], None]]:
    """Within, the model attends exactly through mechanisms that can be watched.

    Yields a function ``run(batch, watch)``: one forward call, of which `watch` is shown every
    call of the named layers. The model is reverted afterwards.
    """
    swap.convert(model, dict.fromkeys(names, "softmax"))
    layers = dict(swap.converted_layers(model))

    def run(batch: Any, watch: Watcher) -> None:
        with ExitStack() as stack:
            stack.enter_context(evaluating(model))
            call = Call(model, _on_device(model, batch))
            if any(isinstance(m._modules[routing.SLOT], routing.Deferred) for m in layers.values()):
                call()  # which builds them
            for name, layer in layers.items():
                mechanism = layer._modules[routing.SLOT]
                assert mechanism is not None

                def note(
                    _: nn.Module, args: Any, kwargs: dict[str, Any], out: Tensor, name: str = name
                ) -> None:
                    q, k, v = args
                    mask = Mask.of(
                        causal=kwargs.get("causal", False),
                        key_mask=kwargs.get("key_mask"),
                        mask=kwargs.get("mask"),
                    )
                    watch(name, Attended(q, k, v, mask, kwargs.get("scale"), out))

                handle = mechanism.register_forward_hook(note, with_kwargs=True)
                stack.callback(handle.remove)
            call()

    try:
        yield run
    finally:
        swap.revert(model)


def _on_device(model: nn.Module, batch: Any) -> Any:
    device = next((t.device for t in model.parameters()), torch.device("cpu"))
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {k: t.to(device) if isinstance(t, Tensor) else t for k, t in batch.items()}
    return tuple(t.to(device) if isinstance(t, Tensor) else t for t in batch)


# ---- statistics ---------------------------------------------------------------------------


class Sample:
    """A uniform sample of at most `size` tokens of a stream, in its order; by the seed.

    Every token draws a number, the smallest ones stay: memory O(size).
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seen = size, 0
        self.generator = torch.Generator().manual_seed(seed % 2**64)
        self.drawn = torch.empty(0, dtype=torch.float64)
        self.place = torch.empty(0, dtype=torch.long)
        self.rows: Tensor | None = None

    def add(self, x: Tensor, opened: Tensor) -> None:
        """Adds the open tokens of x (B, heads, n, D)."""
        rows = x.transpose(1, 2)[opened]  # (tokens, heads, D)
        drawn = torch.rand(len(rows), generator=self.generator, dtype=torch.float64)
        place = torch.arange(self.seen, self.seen + len(rows))
        self.seen += len(rows)
        drawn, place = torch.cat([self.drawn, drawn]), torch.cat([self.place, place])
        keep = drawn.argsort()[: self.size].sort().values
        self.drawn, self.place = drawn[keep], place[keep]
        rows = rows if self.rows is None else torch.cat([self.rows, rows])
        self.rows = rows[keep.to(rows.device)]

    def tokens(self) -> Tensor:
        """(1, heads, tokens, D)."""
        assert self.rows is not None
        return self.rows.transpose(0, 1)[None]


@dataclass(eq=False)
class Statistics:
    """What a layer's mechanisms may know of its data."""

    q: Sample
    k: Sample
    scale: float | None = None
    value_dim: int = 1
    length: int = 0

    def add(self, call: Attended) -> None:
        """Adds one call's tokens."""
        self.q.add(call.q, call.open_queries)
        self.k.add(call.k, call.open_keys)
        self.scale, self.value_dim = call.scale, call.v.shape[-1]
        self.length = max(self.length, call.k.shape[2])

    def give(self, mechanism: Mechanism) -> None:
        """Calibrates a mechanism, where its options ask for it.

        Raises:
            OptionError: there are too few tokens for its options.
        """
        if mechanism.calibrates_for(mechanism.config):
            taking: Any = mechanism
            taking.calibrate(self.q.tokens(), self.k.tokens(), scale=self.scale)

    def build(self, config: Any, seed: int, max_length: int | None) -> Mechanism:
        """The calibrated mechanism for heads of these sizes, in eval mode."""
        mechanism = self.place(routing.Deferred(config, seed, {}, max_length)).eval()
        self.give(mechanism)
        return mechanism

    def place(self, deferred: routing.Deferred) -> Mechanism:
        """The mechanism for heads of these sizes."""
        q, k = self.q.tokens(), self.k.tokens()
        return deferred.build(q, k, k.new_empty(*k.shape[:-1], self.value_dim))


# ---- errors and costs of settings -----------------------------------------------------------


@dataclass(eq=False)
class Trial:
    """A layer's settings with their mechanisms, and squared errors (Hkv,) summed over calls."""

    name: str
    configs: list[Config]
    mechanisms: list[Mechanism]
    errors: list[Tensor] = field(default_factory=list)
    exact: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    uniform: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    length: int = 0

    def add(self, call: Attended) -> None:
        """Tries every setting on one call."""
        found = [
            call.squares(mechanism(call.q, call.k, call.v, mask=call.mask, scale=call.scale))
            for mechanism in self.mechanisms
        ]
        before = self.errors or [torch.zeros_like(found[0])] * len(found)
        self.errors = [a + b for a, b in zip(before, found, strict=True)]
        self.exact = self.exact + call.squares(None)
        mean = uniform_attention(call.v, tuple(call.out.shape), call.mask)
        self.uniform = self.uniform + call.squares(mean)
        self.length = max(self.length, call.k.shape[2])

    def shares(self) -> Tensor:
        """(settings, Hkv): squared errors relative to the layer's exact output."""
        found = torch.stack(self.errors) / self._total
        return found.nan_to_num(nan=math.inf, posinf=math.inf)

    @property
    def uniform_error(self) -> float:
        """Of the layer."""
        return math.sqrt(float(self.uniform.sum()) / self._total)

    @property
    def _total(self) -> float:
        return float(self.exact.sum()) or 1.0  # an output of zeros: errors are absolute then

    def costs(self, kind: str, length: int) -> list[float]:
        """Each setting's cost for one key/value head, 1.0 for exact attention."""
        if kind == "flops":
            return [relative_flops(mechanism, length) for mechanism in self.mechanisms]
        return [_relative_bytes(mechanism, length, self.name) for mechanism in self.mechanisms]

    def result(
        self, settings: Sequence[Config], points: Sequence[Point], target: float | None
    ) -> LayerCalibration:
        """What to expect where each key/value head has its setting."""
        error = math.sqrt(math.fsum(point.error for point in points))
        shares = (self.exact / self._total).tolist()
        return LayerCalibration(
            name=self.name,
            settings=tuple(map(str, settings)),
            error=error,
            uniform_error=self.uniform_error,
            heads=tuple(
                math.sqrt(point.error / share) if share else 0.0
                for point, share in zip(points, shares, strict=True)
            ),
            cost=statistics.fmean(point.cost for point in points),
            met=target is None or error <= target,
        )


def relative_flops(mechanism: Mechanism, length: int) -> float:
    """FLOPs of a call at this length, relative to exact attention, by the cost formulas."""
    value = mechanism.value_dim or mechanism.head_dim
    exact, plain = resolve("softmax")
    own = mechanism.info.cost.flops(length, mechanism.head_dim, value, mechanism.config)
    return own / exact.info.cost.flops(length, mechanism.head_dim, value, plain)


def _relative_bytes(mechanism: Mechanism, length: int, name: str) -> float:
    """Bytes of the state after `length` tokens, relative to their keys and values."""
    state = mechanism.capabilities.state
    if isinstance(state, Absent):
        raise UnsupportedError(
            mechanism.name,
            f"a budget of bytes for {name}",
            f"it counts the state's bytes: {state.reason}",
            capable("state"),
        )
    tensors = (t for t in (*mechanism.parameters(), *mechanism.buffers()) if t.is_floating_point())
    like = next(tensors, torch.zeros(())).new_zeros(1, dtype=torch.float32)
    q = like.new_zeros(1, mechanism.num_heads, length, mechanism.head_dim)
    k = like.new_zeros(1, mechanism.num_kv_heads, length, mechanism.head_dim)
    v = like.new_zeros(*k.shape[:-1], mechanism.value_dim or mechanism.head_dim)
    with torch.no_grad():
        _, held = mechanism.prefill(q, k, v)
    return held.nbytes / (4 * (k.numel() + v.numel()))


# ---- choosing -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """A setting of one head: its index on the ladder, its cost and its squared error."""

    index: int
    cost: float
    error: float


def hull(costs: Sequence[float], errors: Sequence[float]) -> list[Point]:
    """The lower convex hull of a head's settings, cheapest first, errors strictly falling."""
    points = [Point(i, c, e) for i, (c, e) in enumerate(zip(costs, errors, strict=True))]
    found: list[Point] = []
    for point in sorted(points, key=lambda p: (p.cost, p.error)):
        if found and point.error >= found[-1].error:
            continue
        while len(found) > 1 and _slope(found[-2], found[-1]) <= _slope(found[-1], point):
            found.pop()
        found.append(point)
    return found


def _slope(a: Point, b: Point) -> float:
    """Fall of the error per cost."""
    gap = b.cost - a.cost
    return (a.error - b.error) / gap if gap > 0 else math.inf


def choose(
    hulls: Sequence[Sequence[Point]], *, target: float | None = None, budget: float | None = None
) -> list[Point]:
    """A setting for each head, by marginal error per cost.

    Args:
        hulls: of each head, see `hull`.
        target: largest sum of errors; or
        budget: largest sum of costs. The cheapest settings are taken even where these exceed it.
    """
    at = [0] * len(hulls)
    steps: list[tuple[float, int]] = []

    def offer(head: int) -> None:
        if at[head] + 1 < len(hulls[head]):
            slope = _slope(hulls[head][at[head]], hulls[head][at[head] + 1])
            heapq.heappush(steps, (-slope, head))

    for head in range(len(hulls)):
        offer(head)

    def total(kind: str) -> float:
        return math.fsum(getattr(own[i], kind) for own, i in zip(hulls, at, strict=True))

    while steps and (target is None or total("error") > target):
        _, head = heapq.heappop(steps)
        at[head] += 1
        if budget is not None and total("cost") > budget:
            at[head] -= 1  # and none of its later steps: they need this one
            continue
        offer(head)
    if target is not None:  # the last steps may have overshot
        for head in sorted(range(len(hulls)), key=lambda h: -hulls[h][at[h]].cost):
            while at[head] > 0:
                at[head] -= 1
                if total("error") > target:
                    at[head] += 1
                    break
    return [own[i] for own, i in zip(hulls, at, strict=True)]


def _together(settings: Sequence[Config]) -> Config:
    """One config for a layer whose key/value heads have these settings."""
    from subquad.attention.hybrid.mixed import MixedConfig  # mechanisms load when first used

    groups: dict[Config, list[int]] = {}
    for head, setting in enumerate(settings):
        groups.setdefault(setting, []).append(head)
    if len(groups) == 1:
        return settings[0]
    parts = tuple(Part(setting.spec()) for setting in groups)
    return MixedConfig(parts=parts, kv_heads=tuple(map(tuple, groups.values())))


# ---- the layers of a model ------------------------------------------------------------------


class Layers:
    """The layers of a conversion, their statistics and their trials.

    Args:
        model: as `subquad.convert` left it; it is reverted.
        report: of that conversion.
    """

    def __init__(self, model: nn.Module, report: swap.ConversionReport) -> None:
        self.model = model
        self.rows = {row.name: row for row in report.converted}
        self.max_lengths = {
            name: getattr(layer._modules[routing.SLOT], "max_length", None)
            for name, layer in swap.converted_layers(model)
        }
        self.found: dict[str, Statistics] = {}
        self.first: dict[str, Attended] = {}
        self.trials: dict[str, Trial] = {}

    def observe(self, held: Iterable[Any]) -> None:
        """Runs the model exactly and takes statistics of every layer that is reached.

        Raises:
            OptionError: if none is, or one sees masked tokens alone.
        """

        def take(name: str, call: Attended) -> None:
            if name not in self.found:
                seed = 2 * self.rows[name].seed
                self.found[name] = Statistics(Sample(SAMPLE, seed), Sample(SAMPLE, seed + 1))
                self.first[name] = call
            self.found[name].add(call)

        with exact_runs(self.model, self.rows) as run:
            for batch in held:
                run(batch, take)
        if not self.found:
            raise OptionError("the inputs reach no converted layer")
        for name, stats in self.found.items():
            if not (stats.q.seen and stats.k.seen):
                raise OptionError(f"the inputs have no token that {name} may read: all are masked")

    @property
    def longest(self) -> int:
        """Keys of the longest sequence seen."""
        return max(stats.length for stats in self.found.values())

    def settings(self, name: str, *, choosing: bool) -> list[Config]:
        """What a layer can choose from: its own mechanism, or the ladder of its sizes.

        Raises:
            OptionError: there is nothing to choose.
        """
        row = self.rows[name]
        config = resolve(row.mechanism)[1]
        if not choosing:
            return [config]
        length = None if row.use == "causal" else self.found[name].length
        rungs = ladder(config, length=length)
        if len(rungs) == 1:
            raise OptionError(
                f"{config} has no sizes to choose from: target_error and budget need a "
                "mechanism whose options trade cost for error"
            )
        return rungs

    def measure(self, held: Iterable[Any], settings: Mapping[str, list[Config]]) -> None:
        """Runs the model exactly once more and tries every layer's settings."""
        for name, configs in settings.items():
            built = [
                self.found[name].build(one, self.rows[name].seed, self.max_lengths[name])
                for one in configs
            ]
            self.trials[name] = Trial(name, configs, built)
        with exact_runs(self.model, self.rows) as run:
            for batch in held:
                run(batch, lambda name, call: self.trials[name].add(call))

    def fill(self) -> None:
        """Gives the mechanisms of the converted model their statistics."""
        for name, layer in swap.converted_layers(self.model):
            mechanism = layer._modules[routing.SLOT]
            stats = self.found[name]
            if isinstance(mechanism, routing.Deferred):
                mechanism = stats.place(mechanism)
                layer._modules[routing.SLOT] = mechanism
            assert isinstance(mechanism, Mechanism)
            stats.give(mechanism)


# ---- the whole ------------------------------------------------------------------------------


def convert_calibrated(
    model: nn.Module,
    mechanism: Any,
    inputs: Any,
    *,
    tokenizer: Any,
    target_error: float | None,
    budget: Budget | str | None,
    seed: int | Mapping[str, int],
    **arguments: Any,
) -> swap.ConversionReport:
    """`subquad.convert` with ``calibrate=inputs``; see there."""
    asked = None if budget is None else Budget.of(budget)
    if target_error is not None:
        number = isinstance(target_error, int | float) and not isinstance(target_error, bool)
        if not number or not 0.0 < target_error < math.inf:
            raise OptionError(f"target_error={target_error!r} must be a number > 0")
        if asked is not None:
            raise OptionError("give target_error or budget, not both")
    choosing = target_error is not None or asked is not None
    held = list(batches(inputs, tokenizer))
    first = swap.convert(model, mechanism, seed=seed, **arguments)
    try:
        layers = Layers(model, first)
        layers.observe(held)
        rungs = {name: layers.settings(name, choosing=choosing) for name in layers.found}
        layers.measure(held, rungs)
        chosen, calibration = _decide(layers.trials, target_error, asked)
        report = swap.convert(model, chosen, seed=seed)
        layers.fill()
    except BaseException:
        swap.revert(model)
        raise
    notes = [note for note in first.notes if note not in report.notes]
    if unused := [name for name in layers.rows if name not in layers.found]:
        notes.append(f"kept exact, the calibration's inputs do not reach them: {', '.join(unused)}")
    tokens = max(one.k.seen for one in layers.found.values())
    return dataclasses.replace(
        report,
        replaced=first.replaced,
        notes=(*report.notes, *notes),
        calibration=dataclasses.replace(
            calibration, mechanism=first.mechanism, tokens=tokens, target_error=target_error
        ),
    )


def _decide(
    trials: Mapping[str, Trial], target: float | None, budget: Budget | None
) -> tuple[dict[str, Any], Calibration]:
    """What every layer gets, and what to expect of it."""
    length = max(trial.length for trial in trials.values())
    if budget is not None and budget.length is not None:
        length = budget.length
    kind = "flops" if budget is None else budget.kind
    hulls = {}
    for name, trial in trials.items():
        costs = trial.costs(kind, length)
        hulls[name] = [hull(costs, row) for row in trial.shares().T.tolist()]
    if budget is None:
        limit = math.inf if target is None else target**2
        points = {name: choose(heads, target=limit) for name, heads in hulls.items()}
    else:
        every = [own for heads in hulls.values() for own in heads]
        least = math.fsum(own[0].cost for own in every) / len(every)
        if least > budget.share:
            raise OptionError(
                f"budget={budget} is below the cheapest settings, {least:.3g} of exact attention "
                f"at {length} tokens; give more, start from smaller sizes or longer inputs"
            )
        picked = iter(choose(every, budget=budget.share * len(every)))
        points = {name: [next(picked) for _ in heads] for name, heads in hulls.items()}
    chosen, layers = {}, []
    for name, heads in points.items():
        settings = [trials[name].configs[point.index] for point in heads]
        chosen[name] = _together(settings)
        layers.append(trials[name].result(settings, heads, target))
    shown = None if budget is None else str(budget)
    return chosen, Calibration("", tuple(layers), 0, length, kind, target, shown)
