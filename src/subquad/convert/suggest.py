"""`suggest`: which mechanism, of which size, for this model on this device, by measurement."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from subquad.attention.base import Mechanism
from subquad.attention.masks import Mask
from subquad.convert import routing, swap
from subquad.convert.calibrate import Attended, Layers, ladder, relative_flops
from subquad.convert.inputs import batches, evaluating
from subquad.errors import OptionError, SubquadError
from subquad.kernels.timing import Race, crossing, in_turn
from subquad.options import Config, Spec
from subquad.registry import resolve

__all__ = ["CANDIDATES", "Candidate", "Suggestion", "suggest"]

CANDIDATES = (
    "near_far",
    "key_clusters",
    "sampled",
    "kernel_nystrom",
    "kernel_nystrom(landmarks=calibrated)",
    "performer",
    "performer(estimator=derf, gauge=balance)",
    "performer(estimator=derf, gauge=balance, statistics=calibrated)",
    "local",
)
"""Mechanisms that are tried by default, as far as the model's layers take them."""

FACTORS = (0.5, 1.0, 2.0)
"""Sizes that are tried, relative to those of a candidate."""

UNSEEN = 1e-3
"""An error below this share of uniform attention's says that all was read exactly."""

SHORTEST, LONGEST = 64, 65536
"""Tokens between which the length of equal speed is looked for."""

PATIENCE = 10.0
"""Seconds of one exact call, beyond which times are extrapolated."""


@dataclass(frozen=True)
class Candidate:
    """One mechanism with its sizes, measured.

    Args:
        mechanism: in the option grammar; `convert` takes it. Options that depend on a layer's
            use are still open, where they were.
        error: relative error of the attention output, mean over layers, on the given inputs.
        worst: the largest of a layer.
        seconds: of one attention call at the length asked for, one row; median.
        speedup: exact attention's seconds divided by these.
        flops: FLOPs at that length, relative to exact attention.
        calibrated: whether it needs ``convert(..., calibrate=)``.
        judged: False where the inputs are shorter than the length asked for and all but within
            its exact reach: what it does to far tokens has not been seen.
    """

    mechanism: str
    error: float
    worst: float
    seconds: float
    speedup: float
    flops: float
    calibrated: bool = False
    judged: bool = True


@dataclass(frozen=True)
class Suggestion:
    """What `suggest` measured and recommends; `print` it, or read its fields.

    Args:
        candidates: judged ones within the error first, faster ones before slower ones; then the
            others, by error.
        recommended: the mechanism to convert to, or None: keep exact attention.
        reason: why, in a sentence.
        crossover: tokens from which on the fastest candidate within the error is faster than
            exact attention, measured around that length; 64 to 65,536, or None where that is
            longer or no candidate is within the error.
        seconds_exact: of one exact attention call at `length`.
        uniform_error: uniform attention's error, mean over layers: the line to beat.
        length, error: as asked for.
        tokens: the longest given input; errors hold for inputs of such length.
        layers: attention modules measured.
        left_out: candidates that some layer cannot take, with the reason.
        device, threads: what it was measured on.
    """

    candidates: tuple[Candidate, ...]
    recommended: str | None
    reason: str
    crossover: int | None
    seconds_exact: float
    uniform_error: float
    length: int
    error: float
    tokens: int
    layers: int
    left_out: Mapping[str, str]
    device: str
    threads: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        width = max((len(one.mechanism) for one in self.candidates), default=9)
        lines = [
            f"{self.layers} attention layers, one call at {self.length} tokens on {self.device} "
            f"({self.threads} threads); errors on inputs of up to {self.tokens} tokens",
            f"  {'mechanism':<{width}}   error   worst   seconds   × exact's speed",
            f"  {'exact attention':<{width}}   0.000   0.000   {self.seconds_exact:7.4f}    1.00",
        ]
        lines += [
            f"  {one.mechanism:<{width}}   {one.error:5.3f}   {one.worst:5.3f}   "
            f"{one.seconds:7.4f}   {one.speedup:5.2f}"
            + " calibrated" * one.calibrated
            + " (inputs too short to judge)" * (not one.judged)
            for one in self.candidates
        ]
        lines.append(f"  {'uniform attention':<{width}}   {self.uniform_error:5.3f}")
        lines += [f"  left out: {name}: {why}" for name, why in self.left_out.items()]
        lines.append(self.reason)
        if self.length > self.tokens:
            lines.append(
                f"Errors at {self.length} tokens are larger: give inputs of that length, if the "
                "model takes them."
            )
        return "\n".join(lines)


def suggest(
    model: nn.Module,
    inputs: Any,
    *,
    length: int | None = None,
    error: float = 0.05,
    mechanisms: Sequence[str | Spec | Config] | None = None,
    where: Callable[[str, nn.Module], bool] | None = None,
    keep_exact: Sequence[str] = (),
    tokenizer: Any = None,
    repeats: int = 3,
    seed: int = 0,
) -> Suggestion:
    """Measures mechanisms × sizes on a model's own attention, and recommends one or none.

    Every candidate's error is that of each layer's attention output on the exact run's q, k and
    v; its time is that of one attention call at `length` on the device of the model, on a
    layer's tokens repeated to that length, in turn with exact attention. The model is left as
    it was, exact.

    Args:
        model: as for `convert`.
        inputs: a batch (mapping, tensor or tuple), an iterable of batches, or texts.
        length: tokens for which to choose; default the longest of the inputs.
        error: largest mean relative error of the attention output; never more than that of
            uniform attention, whatever is asked for.
        mechanisms: candidates, each tried at half, once and twice its sizes; default
            `CANDIDATES` as far as the layers can take them.
        where, keep_exact: which layers, as for `convert`.
        tokenizer: for texts.
        repeats: timed calls of each candidate.
        seed: of all random draws.

    Raises:
        OptionError: wrong arguments, or no candidate that every layer can take.
        UnsupportedError, ImportError: as `convert`.

    Example:
        >>> import torch, subquad as sq
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
        >>> model = BertModel(config).eval()
        >>> ids = {"input_ids": torch.arange(40)[None]}
        >>> found = sq.suggest(model, ids, length=256, error=0.5, mechanisms=["performer"])
        >>> found.recommended is None or "performer" in found.recommended
        True
        >>> len(found.candidates)
        3
    """
    if not isinstance(error, int | float) or isinstance(error, bool) or not 0.0 < error < math.inf:
        raise OptionError(f"error={error!r} must be a number > 0")
    for name, number in (("length", length), ("repeats", repeats)):
        if number is not None and (not isinstance(number, int) or number < 1):
            raise OptionError(f"{name}={number!r} must be an integer ≥ 1")
    held = list(batches(inputs, tokenizer))
    convert = functools.partial(swap.convert, model, where=where, keep_exact=keep_exact, seed=seed)
    layers = Layers(model, convert("softmax"))
    layers.observe(held)
    asked = CANDIDATES if mechanisms is None else tuple(mechanisms)
    causal = all(row.use == "causal" for row in layers.rows.values())
    settings, left_out = _settings(convert, asked, None if causal else layers.longest)
    swap.revert(model)
    if not settings:
        reasons = "; ".join(f"{name}: {why}" for name, why in left_out.items())
        raise OptionError(f"no candidate that every layer can take: {reasons}")
    layers.measure(held, {name: [one[name] for one in settings.values()] for name in layers.found})
    return _rank(layers, settings, length, error, repeats, left_out)


def _settings(
    convert: Callable[..., swap.ConversionReport], asked: Sequence[Any], longest: int | None
) -> tuple[dict[str, dict[str, Config]], dict[str, str]]:
    """Settings that every layer takes, with their config in each, and why others are left out.

    Sizes that depend on the length are those at `longest`; None: causal layers have no such ones.
    """
    found: dict[str, dict[str, Config]] = {}
    left_out: dict[str, str] = {}
    for one in asked:
        config = resolve(one)[1]
        base = config.for_use("causal") if longest is None else config
        refused: dict[str, str] = {}
        sizes = [config if size == base else size for size in ladder(base, FACTORS, longest)]
        for size in sizes:
            try:
                report = convert(size)
            except SubquadError as problem:
                # The list of who could take it is long, and the table answers that.
                refused[str(size)] = str(problem).partition(" These do: ")[0]
                continue
            configs = {row.name: resolve(row.mechanism)[1] for row in report.converted}
            found.setdefault(str(size), configs)
        if len(refused) == len(sizes):  # one line for all
            refused = {str(config): next(iter(refused.values()))}
        left_out |= refused
    return found, left_out


class _Clock:
    """Times attention calls of one layer at any length, in turn with exact attention."""

    def __init__(self, call: Attended, max_length: int | None) -> None:
        self.causal, self.scale = call.mask.causal, call.scale
        opened, queries = call.open_keys[0], call.open_queries[0]
        self.q = call.q[:1, :, queries]
        self.k, self.v = (t[:1, :, opened] for t in (call.k, call.v))
        deferred = routing.Deferred("softmax", 0, {}, max_length)
        self.exact = deferred.build(self.q, self.k, self.v).eval()

    def call(self, mechanism: Mechanism, length: int) -> Callable[[], Tensor]:
        """One call on the layer's tokens, repeated to `length`."""
        q, k, v = (_tiled(t, length) for t in (self.q, self.k, self.v))
        mask = Mask(causal=self.causal)
        return lambda: mechanism(q, k, v, mask=mask, scale=self.scale)

    def race(
        self, mechanisms: Sequence[Mechanism], length: int, repeats: int
    ) -> tuple[float, list[float]]:
        """Median seconds of exact attention and of each mechanism, all in turn."""
        runs = [self.call(one, length) for one in (self.exact, *mechanisms)]
        for run in runs[1:]:
            run()  # what a first call prepares
        first, *rest = in_turn(runs, self.q.device, rounds=repeats)
        return first, rest


def _tiled(t: Tensor, length: int) -> Tensor:
    count = -(-length // t.shape[2])
    return t.repeat(1, 1, count, 1)[:, :, :length].contiguous()


def _rank(
    layers: Layers,
    settings: Mapping[str, Mapping[str, Config]],
    length: int | None,
    error: float,
    repeats: int,
    left_out: dict[str, str],
) -> Suggestion:
    name, trial = next(iter(layers.trials.items()))
    tokens = layers.longest
    length = tokens if length is None else length
    clock = _Clock(layers.first[name], layers.max_lengths[name])
    # (settings, layers)
    errors = torch.stack([one.shares().sum(1).sqrt() for one in layers.trials.values()], 1)
    uniform = statistics.fmean(one.uniform_error for one in layers.trials.values())
    with evaluating(*trial.mechanisms):
        exact, seconds = clock.race(trial.mechanisms, length, repeats)
        found = []
        for index, (spec, configs) in enumerate(settings.items()):
            mechanism, worst = trial.mechanisms[index], float(errors[index].max())
            candidate = Candidate(
                mechanism=spec,
                error=float(errors[index].mean()),
                worst=worst,
                seconds=seconds[index],
                speedup=exact / seconds[index],
                flops=relative_flops(mechanism, length),
                calibrated=any(resolve(c)[0].calibrates_for(c) for c in configs.values()),
                judged=length <= tokens or worst > UNSEEN * uniform,
            )
            found.append((candidate, mechanism))
        limit = min(error, uniform)  # what is no better than a mean of all values is no choice
        found.sort(key=lambda pair: _order(pair[0], limit))
        best, mechanism = found[0]
        crossover = None
        if _fits(best, limit):

            def race(length: int) -> tuple[float, float]:
                both, (own,) = clock.race([mechanism], length, repeats)
                return both, own

            found_at = crossing(
                race,
                Race(length, exact, best.seconds),
                shortest=SHORTEST,
                longest=LONGEST,
                patience=PATIENCE,
            )
            crossover = found_at.length
    recommended, reason = _advice(best, limit, length, crossover)
    return Suggestion(
        candidates=tuple(candidate for candidate, _ in found),
        recommended=recommended,
        reason=reason,
        crossover=crossover,
        seconds_exact=exact,
        uniform_error=uniform,
        length=length,
        error=error,
        tokens=tokens,
        layers=len(layers.trials),
        left_out=left_out,
        device=str(clock.q.device),
        threads=torch.get_num_threads(),
    )


def _fits(one: Candidate, error: float) -> bool:
    return one.judged and one.error <= error


def _order(one: Candidate, error: float) -> tuple[int, float]:
    if _fits(one, error):
        return 0, one.seconds
    return (1, one.error) if one.judged else (2, one.seconds)


def _advice(
    best: Candidate, error: float, length: int, crossover: int | None
) -> tuple[str | None, str]:
    how = f"convert(model, {best.mechanism!r}" + (", calibrate=inputs)" if best.calibrated else ")")
    if not best.judged:
        return None, (
            "Keep exact attention: the inputs are too short to judge any candidate; give longer "
            "ones."
        )
    if best.error > error:
        return None, (
            f"Keep exact attention: no candidate has an error of at most {error:.3g}; the closest "
            f"is {best.mechanism} with {best.error:.3f}."
        )
    if best.speedup <= 1.0:
        below = f"below ~{LONGEST if crossover is None else crossover} tokens"
        return None, (
            f"Keep exact attention: it is faster {below}. Beyond, {best.mechanism} with an error "
            f"of {best.error:.3f}: {how}."
        )
    since = "" if crossover is None else f" (exact attention is faster below ~{crossover})"
    return best.mechanism, (
        f"Use {best.mechanism}: error {best.error:.3f}, {best.speedup:.2f} × exact attention's "
        f"speed at {length} tokens{since}: {how}."
    )
