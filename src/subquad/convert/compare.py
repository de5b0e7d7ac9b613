"""`compare`: what a swap costs, against the exact model and against uniform attention."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from subquad.convert import routing
from subquad.convert.cost import LengthCost, peak
from subquad.convert.inputs import (
    Call,
    at_length,
    batches,
    encoder_decoder,
    evaluating,
    longest,
)
from subquad.convert.metrics import OutputComparison, Outputs
from subquad.convert.paths import exactly, probed
from subquad.convert.probe import (
    AttentionPicture,
    Errors,
    LayerComparison,
    PartComparison,
    Pictures,
    uniform_attention,
    uniformly,
)
from subquad.convert.saving import remember
from subquad.convert.swap import configs, converted_layers, need_transformers
from subquad.errors import OptionError, UnknownNameError, nearest
from subquad.kernels.timing import in_turn

__all__ = [
    "AttentionPicture",
    "Comparison",
    "LayerComparison",
    "LengthCost",
    "OutputComparison",
    "PartComparison",
    "compare",
    "layer_errors",
    "uniform_attention",
]

_PATIENCE = 60.0
"""Seconds; a length at which a call would take longer is left out of the timing."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """How far a model's outputs are from those of its exact self; `print` it.

    Args:
        mechanism: of the converted layers, several joined by " | "; None when two objects
            were compared.
        model: name of the model's class.
        layers: one entry for each converted layer that was called, in the order of the model.
        output: the outputs, end to end, in the metrics of the model's kind.
        uniform_output: the same with uniform attention in the converted layers: the line to
            beat; None when two objects were compared.
        seconds_exact, seconds: median time of a forward call with the first batch, exact
            (or a), converted (or b), in turn.
        rows: of all batches.
        length: positions of the longest batch.
        costs: time and memory at each of the lengths asked for.
        pictures: exact and implied attention of some heads.
        notes: what to know: layers that were not called, what was left out and why.
    """

    mechanism: str | None
    model: str
    layers: tuple[LayerComparison, ...]
    output: OutputComparison
    seconds_exact: float
    seconds: float
    rows: int
    length: int
    uniform_output: OutputComparison | None = None
    costs: tuple[LengthCost, ...] = ()
    pictures: tuple[AttentionPicture, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def cosines(self) -> tuple[float, ...]:
        """`OutputComparison.cosines`."""
        return self.output.cosines

    @property
    def cosine(self) -> float:
        """Mean of `cosines`."""
        return self.output.cosine

    @property
    def max_abs(self) -> float:
        """`OutputComparison.max_abs`."""
        return self.output.max_abs

    @property
    def error(self) -> float:
        """Mean over layers of `LayerComparison.error`; NaN without layers."""
        return statistics.fmean(x.error for x in self.layers) if self.layers else math.nan

    @property
    def uniform_error(self) -> float:
        """Mean over layers of `LayerComparison.uniform_error`; NaN without layers."""
        return statistics.fmean(x.uniform_error for x in self.layers) if self.layers else math.nan

    @property
    def worse_heads(self) -> tuple[tuple[str, int], ...]:
        """(layer, head) of the heads that are further from exact than uniform attention is."""
        return tuple(
            (layer.name, head)
            for layer in self.layers
            for head, (own, uniform) in enumerate(
                zip(layer.heads, layer.uniform_heads, strict=True)
            )
            if own > uniform
        )

    @property
    def parts(self) -> tuple[PartComparison, ...]:
        """Each part of a hybrid, the mean over the layers that have it."""
        named: dict[str, list[PartComparison]] = {}
        for layer in self.layers:
            for part in layer.parts:
                named.setdefault(part.name, []).append(part)
        return tuple(
            PartComparison(
                name,
                statistics.fmean(part.share for part in found),
                statistics.fmean(part.error for part in found),
                statistics.fmean(part.error_without for part in found),
            )
            for name, found in named.items()
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; pictures by name, without their matrices.

        Numbers that JSON has no form for, infinite ones, are None.
        """
        values = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("layers", "output", "uniform_output", "costs", "pictures")
        }
        values |= {
            "layers": [dataclasses.asdict(layer) for layer in self.layers],
            "output": self.output.to_dict(),
            "uniform_output": self.uniform_output and self.uniform_output.to_dict(),
            "costs": [dataclasses.asdict(cost) for cost in self.costs],
            "parts": [{**dataclasses.asdict(part), "verdict": part.verdict} for part in self.parts],
            "pictures": [
                {"layer": one.layer, "head": one.head, "error": one.error} for one in self.pictures
            ],
            "cosines": list(self.cosines),
            "cosine": self.cosine,
            "max_abs": self.max_abs,
            "error": self.error,
            "uniform_error": self.uniform_error,
        }
        plain: dict[str, Any] = _plain(values)
        return plain

    def summary(self) -> dict[str, Any]:
        """The numbers that a model card quotes, plain values; `compare` leaves them on the model.

        ``lines`` holds (metric, value, uniform attention's value) in words, ``parts`` one
        sentence for each part.
        """
        layers = [
            {"name": x.name, "error": x.error, "uniform_error": x.uniform_error}
            for x in self.layers
        ]
        outputs = [
            {k: v for k, v in one.to_dict().items() if k != "cosines"}
            for one in (self.output, self.uniform_output)
            if one is not None
        ]
        plain: dict[str, Any] = _plain(
            {
                "mechanism": self.mechanism,
                "rows": self.rows,
                "length": self.length,
                "error": self.error,
                "uniform_error": self.uniform_error,
                "output": outputs[0],
                "uniform_output": outputs[-1] if self.uniform_output else None,
                "layers": layers,
                "parts": [str(part) for part in self.parts],
                "lines": [list(line) for line in self.output.lines(self.uniform_output)],
            }
        )
        return plain

    def save_html(self, path: str | Path) -> Path:
        """Writes a page that stands alone: numbers, heat map, parts, pictures, costs.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from subquad.convert.report import save_html

        return save_html([self], path)

    def __str__(self) -> str:
        first, second = ("exact", self.mechanism) if self.mechanism else ("a", "b")
        shown = list(self.output.lines(self.uniform_output))
        ratio = f"{self.seconds / self.seconds_exact:.2f} ×"
        times = f"{self.seconds_exact:.4f} → {self.seconds:.4f} ({ratio})"
        shown.append(("seconds, exact → converted" if self.layers else "seconds, a → b", times, ""))
        width = max(len(name) for name, _, _ in shown)
        lines = [f"{second} against {first}, {self.rows} × {self.length} tokens"]
        for name, value, uniform in shown:
            line = f"  {name:<{width}}  {value}"
            beat = self.uniform_output and uniform
            lines.append(f"{line}; uniform attention {uniform}" if beat else line)
        if self.layers:
            lines += self._layer_lines()
        if self.parts:
            lines.append("  parts, mean over layers:")
            lines += [f"    {part}" for part in self.parts]
        if self.costs:
            lines.append("  one row, exact → converted:")
            lines += [f"    {_cost_line(cost)}" for cost in self.costs]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def _layer_lines(self) -> Iterator[str]:
        width = max(len("mean"), *(len(layer.name) for layer in self.layers))
        yield "  relative error of the attention output, same layer input; the line to beat is"
        yield "  that of uniform attention, which looks at neither q nor k:"
        yield f"    {'layer':<{width}}   error ± rows   uniform   worst head"
        for x in self.layers:
            worst = max(range(len(x.heads)), key=x.heads.__getitem__)
            yield (
                f"    {x.name:<{width}}   {x.error:5.3f} ± {x.spread:5.3f}   {x.uniform_error:5.3f}"
                f"   {x.heads[worst]:7.3f} (head {worst})"
            )
        yield f"    {'mean':<{width}}   {self.error:5.3f}           {self.uniform_error:5.3f}"
        heads = sum(len(layer.heads) for layer in self.layers)
        worse = f"{len(self.worse_heads)} of {heads} heads"
        yield f"    further from exact than uniform attention: {worse}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cost_line(cost: LengthCost) -> str:
    parts = [f"{cost.length} tokens:"]
    if cost.seconds is not None:
        exact = "–" if cost.seconds_exact is None else f"{cost.seconds_exact:.3g}"
        faster = "" if cost.speedup is None else f" ({cost.speedup:.2f} × as fast)"
        parts.append(f"{exact} → {cost.seconds:.3g} s{faster},")
    if cost.mib is not None:
        exact = "–" if cost.mib_exact is None else f"{cost.mib_exact:.1f}"
        parts.append(f"{exact} → {cost.mib:.1f} MiB")
    return " ".join([*parts, *([f"({cost.note})"] if cost.note else [])]).rstrip(",")


def compare(
    first: Callable[..., Any],
    second: Any,
    inputs: Any = None,
    *,
    tokenizer: Any = None,
    batch_size: int = 8,
    repeats: int = 3,
    ablate: bool = True,
    lengths: Sequence[int] = (),
    inputs_at: Callable[[int], Any] | None = None,
    pictures: int | Sequence[tuple[str | int, int]] = 0,
    picture_tokens: int = 128,
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Compares a converted model with its exact self, or two models with each other.

    ``compare(model, inputs)`` runs the model's own exact attention and its mechanisms in
    turn: the weights are the same and the model is left as it was. Each layer's error is
    measured on the exact run's q, k and v, so errors of earlier layers do not mix in; the
    outputs are those of the converted model end to end, in the metrics that its kind calls
    for: see `OutputComparison`. ``compare(a, b, inputs)`` compares the outputs of two models
    or callables.

        error = ‖o − o*‖ / ‖o*‖,  for each layer and head, over all rows and unmasked positions

    beside that of uniform attention, the line to beat. For hybrids such as near_far each part
    is left out in turn: a far field that does nothing is seen, and said.

    Runs without gradients, in eval mode; modes and random generators are put back afterwards.
    Only unmasked positions count. Without labels a causal model predicts the next tokens; a
    masked one needs labels for a perplexity. The numbers stay on the model for its model card.

    Cost: for each batch an exact and two converted forward calls (one with uniform attention in
    place of the mechanisms' outputs), each layer's mechanism once more, and a hybrid's parts.

    Args:
        first: a converted model, or the first of two.
        second: inputs of the converted model, or the second of two.
        inputs: for two objects. A batch is a mapping (keyword arguments), a tensor or a tuple;
            inputs are one, an iterable of them, or texts.
        tokenizer: of transformers, for texts.
        batch_size: texts in a batch.
        repeats: forward calls that are timed on each side, in turn, with the first batch.
        ablate: leave out a hybrid's parts in turn.
        lengths: in tokens; time and peak memory of a forward call of one row, made of the
            first row's tokens, at each.
        inputs_at: a function from a length to inputs, where they are not tokens.
        pictures: exact and implied attention of so many heads, from the least to the largest
            error; or pairs of a layer (name or index) and a head.
        picture_tokens: length of their input, the first row's first tokens.
        progress: is told what is being done.

    Raises:
        OptionError: one model that is not converted, inputs that are none, texts without a
            tokenizer, lengths or pictures that do not exist.
        ShapeError: outputs of different shapes.

    Example:
        >>> import torch, subquad as sq
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
        >>> model = BertModel(config).eval()
        >>> _ = sq.convert(model, "softmax")
        >>> comparison = sq.compare(model, {"input_ids": torch.arange(5)[None]})
        >>> round(comparison.cosine, 4), len(comparison.layers)
        (1.0, 2)
    """
    if repeats < 1:
        raise OptionError(f"repeats={repeats} must be ≥ 1")
    if wrong := [n for n in lengths if not isinstance(n, int) or n < 1]:
        raise OptionError(f"lengths={list(lengths)} must be integers ≥ 1, given {wrong[0]!r}")
    say = progress or (lambda text: None)
    if inputs is not None:
        if not callable(second):
            raise OptionError("compare(a, b, inputs) needs two models or callables")
        if lengths or pictures:
            raise OptionError("lengths= and pictures= are for one converted model, not for two")
        return _two(first, second, batches(inputs, tokenizer, batch_size), repeats, say)
    if not isinstance(first, nn.Module):
        raise OptionError("compare(model, inputs) needs a converted torch.nn.Module")
    _need_converted(first)
    return _with_itself(
        first,
        batches(second, tokenizer, batch_size),
        repeats=repeats,
        ablate=ablate,
        lengths=lengths,
        inputs_at=inputs_at,
        pictures=pictures,
        picture_tokens=picture_tokens,
        say=say,
    )


def layer_errors(
    model: nn.Module, inputs: Any, *, ablate: bool = False
) -> tuple[LayerComparison, ...]:
    """Errors of a converted model's layers during exact forward calls.

    Raises:
        OptionError: if the model is not converted.
    """
    _need_converted(model)
    watch = Errors(model, ablate)
    with evaluating(model), probed(model, watch):
        for batch in batches(inputs):
            watch.inputs = batch
            Call(model, batch)()
    return watch.results()


def _need_converted(model: nn.Module) -> None:
    if not converted_layers(model):
        raise OptionError(
            "the model is not converted: call subquad.convert(model, ...) first, or compare "
            "two models with compare(a, b, inputs)"
        )
    if any(not isinstance(config, routing.Switch) for config in configs(model)):
        need_transformers()


def _with_itself(
    model: nn.Module,
    stream: Iterable[Any],
    *,
    repeats: int,
    ablate: bool,
    lengths: Sequence[int],
    inputs_at: Callable[[int], Any] | None,
    pictures: int | Sequence[tuple[str | int, int]],
    picture_tokens: int,
    say: Callable[[str], None],
) -> Comparison:
    _check_pictures(model, pictures)
    watch, outputs, uniforms = Errors(model, ablate), Outputs(model), Outputs(model)
    device = _device(model)
    some: Any = None
    with evaluating(model):
        for index, batch in enumerate(stream):
            say(f"batch {index + 1}: exact and converted")
            watch.inputs = batch
            call = Call(model, batch)
            with probed(model, watch):
                exact = call()
            outputs.add(batch, exact, call())
            with uniformly(model):
                uniforms.add(batch, exact, call())
            if some is None:
                some = batch
                if lengths and inputs_at is None:  # say now what cannot be done
                    at_length(some, max(lengths), pair=encoder_decoder(model))
        say("time")
        call = Call(model, some)
        before, after = in_turn([_exactly(model, call), call], device, rounds=repeats)
        costs: list[LengthCost] = []
        for length in lengths:
            say(f"time and memory of {length} tokens")
            costs.append(_cost(model, some, length, inputs_at, repeats, device, costs))
        layers = watch.results()
        drawn = _pictures(model, some, layers, pictures, picture_tokens, say)
    notes = [f"{name} was not called" for name in watch.not_called()] + drawn.missing
    output = outputs.result()
    comparison = Comparison(
        mechanism=_mechanism(model),
        model=type(model).__name__,
        layers=layers,
        output=output,
        seconds_exact=before,
        seconds=after,
        rows=output.rows,
        length=outputs.length,
        uniform_output=uniforms.result(),
        costs=tuple(costs),
        pictures=tuple(drawn.found),
        notes=tuple(dict.fromkeys(notes)),
    )
    remember(model, comparison.summary())
    return comparison


def _two(
    a: Callable[..., Any],
    b: Callable[..., Any],
    stream: Iterable[Any],
    repeats: int,
    say: Callable[[str], None],
) -> Comparison:
    outputs = Outputs(a)
    some: Any = None
    with evaluating(a, b):
        for index, batch in enumerate(stream):
            say(f"batch {index + 1}: both")
            outputs.add(batch, Call(a, batch)(), Call(b, batch)())
            some = batch if some is None else some
        say("time")
        before, after = in_turn([Call(a, some), Call(b, some)], _device(a), rounds=repeats)
    output = outputs.result()
    return Comparison(
        mechanism=None,
        model=f"{_name(a)}, {_name(b)}",
        layers=(),
        output=output,
        seconds_exact=before,
        seconds=after,
        rows=output.rows,
        length=outputs.length,
    )


def _name(one: Any) -> str:
    return str(getattr(one, "__name__", type(one).__name__))


def _mechanism(model: nn.Module) -> str:
    found = (layer._modules[routing.SLOT] for _, layer in converted_layers(model))
    specs = (str(getattr(one, "config", None) or getattr(one, "spec", "")) for one in found)
    return " | ".join(dict.fromkeys(specs))


def _device(model: Any) -> torch.device:
    parameters = model.parameters() if isinstance(model, nn.Module) else iter(())
    return next((p.device for p in parameters), torch.device("cpu"))


# ---- the exact path ----------------------------------------------------------------------


def _exactly(model: nn.Module, call: Callable[[], Any]) -> Callable[[], Any]:
    """The call, with the model's own exact attention."""

    def run() -> Any:
        with exactly(model):
            return call()

    return run


# ---- lengths -----------------------------------------------------------------------------


def _cost(
    model: nn.Module,
    some: Any,
    length: int,
    inputs_at: Callable[[int], Any] | None,
    repeats: int,
    device: torch.device,
    before: Sequence[LengthCost],
) -> LengthCost:
    limit = longest(model)
    if limit is not None and length > limit:
        return LengthCost(length, note=f"the model holds positions for {limit} tokens")
    make = inputs_at or (lambda n: at_length(some, n, pair=encoder_decoder(model)))
    calls = {n: Call(model, make(n)) for n in (min(length, 64), length)}
    warm, call = calls[min(length, 64)], calls[length]
    sides: dict[str, tuple[Callable[[], Any], Callable[[], Any]]]
    sides = {"exact": (_exactly(model, warm), _exactly(model, call)), "converted": (warm, call)}
    skipped = []
    for side in list(sides):
        past = [(c.length, c.seconds_exact if side == "exact" else c.seconds) for c in before]
        # Time grows with the square of the length at most.
        ahead = max((s * (length / n) ** 2 for n, s in past if s and n <= length), default=0.0)
        gone = any(n < length and s is None for n, s in past)
        if ahead > _PATIENCE or gone:
            skipped.append(f"{side} left out: a call would take more than {_PATIENCE:g} s")
            del sides[side]
    seconds: dict[str, float] = {}
    mib: dict[str, float | None] = {}
    if len(sides) == 2:
        for run, _ in sides.values():
            run()
        both = [sides["exact"][1], sides["converted"][1]]
        seconds["exact"], seconds["converted"] = in_turn(both, device, rounds=repeats)
    for side, (run, whole) in sides.items():
        if side not in seconds:
            run()
            (seconds[side],) = in_turn([whole], device, rounds=repeats)
        mib[side] = peak(run, whole, device)
    return LengthCost(
        length,
        seconds_exact=seconds.get("exact"),
        seconds=seconds.get("converted"),
        mib_exact=mib.get("exact"),
        mib=mib.get("converted"),
        note="; ".join(skipped),
    )


# ---- pictures ----------------------------------------------------------------------------


def _check_pictures(model: nn.Module, pictures: int | Sequence[tuple[str | int, int]]) -> None:
    if isinstance(pictures, int):
        if pictures < 0:
            raise OptionError(f"pictures={pictures} must be ≥ 0")
        return
    layers = dict(converted_layers(model))
    names = list(layers)
    for layer, head in pictures:
        if isinstance(layer, int) and not -len(names) <= layer < len(names):
            raise OptionError(f"pictures: layer {layer} of {len(names)} converted layers")
        if isinstance(layer, str) and layer not in names:
            raise UnknownNameError(
                f"pictures: {layer!r} is no converted layer{nearest(layer, names)}"
            )
        name = names[layer] if isinstance(layer, int) else layer
        heads = getattr(layers[name]._modules[routing.SLOT], "num_heads", None)
        _check_head(name, head, heads)


def _check_head(name: str, head: int, heads: int | None) -> None:
    """`heads` is None where the first call has yet to show how many there are."""
    if head < 0 or (heads is not None and head >= heads):
        raise OptionError(f"pictures: head {head} of {heads} in {name}")


def _pictures(
    model: nn.Module,
    some: Any,
    layers: Sequence[LayerComparison],
    pictures: int | Sequence[tuple[str | int, int]],
    tokens: int,
    say: Callable[[str], None],
) -> Pictures:
    wanted = list(_wanted(model, layers, pictures))
    watch = Pictures(model, wanted)
    if wanted:
        say("pictures")
        try:
            short = at_length(some, tokens, pair=encoder_decoder(model), repeat=False)
        except OptionError:  # no tokens: images keep their size
            short = some
        with probed(model, watch):
            Call(model, short)()
    return watch


def _wanted(
    model: nn.Module,
    layers: Sequence[LayerComparison],
    pictures: int | Sequence[tuple[str | int, int]],
) -> Iterator[tuple[str, int, float]]:
    """(layer, head, error) of the heads to draw."""
    if isinstance(pictures, int):
        heads = sorted(
            ((x.name, head, error) for x in layers for head, error in enumerate(x.heads)),
            key=lambda one: one[2],
        )
        count = min(pictures, len(heads))
        last = len(heads) - 1
        places = [round(i * last / max(count - 1, 1)) if count > 1 else last for i in range(count)]
        yield from (heads[place] for place in places)
        return
    names = [name for name, _ in converted_layers(model)]
    found = {x.name: x for x in layers}
    for layer, head in pictures:
        name = names[layer] if isinstance(layer, int) else layer
        if name not in found:
            continue  # it was not called: a note says so
        errors = found[name].heads
        _check_head(name, head, len(errors))
        yield name, head, errors[head]
