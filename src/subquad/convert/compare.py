"""`compare`: what a swap costs, against the exact model and against uniform attention."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from subquad.attention.masks import Mask
from subquad.convert import routing
from subquad.convert.swap import _configs, converted_layers, need_transformers
from subquad.errors import OptionError, ShapeError

__all__ = ["Comparison", "LayerComparison", "compare"]


@dataclass(frozen=True)
class LayerComparison:
    """Error of one converted layer's attention output, on the exact run's q, k, v.

    Args:
        name: the attention module's name.
        error: ‖o − o*‖ / ‖o*‖ over all rows, heads and unmasked positions; o* is exact.
        uniform_error: the same for uniform attention, the mean of all values that a query may
            read: the line to beat. Above it, a mechanism is worse than not looking at q and k.
    """

    name: str
    error: float
    uniform_error: float


@dataclass(frozen=True)
class Comparison:
    """How far a model's outputs are from those of its exact self; `print` it.

    Args:
        mechanism: of the converted layers, or None when two objects were compared.
        layers: one entry for each converted layer, in the order of the model.
        cosines: for each row, the cosine between both final hidden states, each averaged over
            unmasked positions.
        max_abs: largest absolute difference of the final hidden states, unmasked positions.
        seconds_exact, seconds: median time of a forward call, exact (or a), converted (or b).
        rows, length: shape of what was compared.
    """

    mechanism: str | None
    layers: tuple[LayerComparison, ...]
    cosines: tuple[float, ...]
    max_abs: float
    seconds_exact: float
    seconds: float
    rows: int
    length: int

    @property
    def cosine(self) -> float:
        """Mean of `cosines`."""
        return statistics.fmean(self.cosines)

    @property
    def error(self) -> float:
        """Mean over layers of `LayerComparison.error`; NaN without layers."""
        return statistics.fmean(x.error for x in self.layers) if self.layers else math.nan

    @property
    def uniform_error(self) -> float:
        """Mean over layers of `LayerComparison.uniform_error`; NaN without layers."""
        return statistics.fmean(x.uniform_error for x in self.layers) if self.layers else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        values = dataclasses.asdict(self)
        values["layers"] = [dataclasses.asdict(layer) for layer in self.layers]
        values["cosines"] = list(self.cosines)
        values["cosine"] = self.cosine
        values["error"] = self.error if self.layers else None
        values["uniform_error"] = self.uniform_error if self.layers else None
        return values

    def __str__(self) -> str:
        first, second = ("exact", self.mechanism) if self.mechanism else ("a", "b")
        lines = [
            f"{second} against {first}, {self.rows} × {self.length} tokens",
            f"  cosine of the averaged final hidden states  {self.cosine:.4f}"
            + (f" (lowest {min(self.cosines):.4f})" if len(self.cosines) > 1 else ""),
            f"  largest absolute difference                 {self.max_abs:.3g}",
            f"  seconds, {first} → {second}: {self.seconds_exact:.4f} → {self.seconds:.4f}"
            f" ({self.seconds / self.seconds_exact:.2f} ×)",
        ]
        if self.layers:
            width = max(len("mean"), *(len(layer.name) for layer in self.layers))
            lines += [
                "  relative error of the attention output, same layer input:",
                f"    {'layer':<{width}}   error   uniform attention",
            ]
            rows = [*self.layers, LayerComparison("mean", self.error, self.uniform_error)]
            lines += [
                f"    {x.name:<{width}}   {x.error:5.3f}   {x.uniform_error:5.3f}" for x in rows
            ]
        return "\n".join(lines)


def compare(
    first: Callable[..., Any],
    second: Any,
    inputs: Any = None,
    *,
    repeats: int = 3,
) -> Comparison:
    """Compares a converted model with its exact self, or two models with each other.

    ``compare(model, inputs)`` runs the model's own exact attention and its mechanisms in
    turn: the weights are the same and the model is left as it was. Each layer's error is
    measured on the exact run's q, k and v, so errors of earlier layers do not mix in; the
    hidden states are those of the converted model end to end.
    ``compare(a, b, inputs)`` compares the outputs of two models or callables.

    Runs without gradients, in eval mode, which is put back afterwards. Only unmasked
    positions count.

    Args:
        first: a converted model, or the first of two.
        second: inputs of the converted model, or the second of two.
        inputs: for two objects; a mapping (keyword arguments), a tensor or a tuple.
        repeats: forward calls that are timed on each side, in turn.

    Raises:
        OptionError: one model that is not converted.
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
    if inputs is None:
        if not isinstance(first, nn.Module):
            raise OptionError("compare(model, inputs) needs a converted torch.nn.Module")
        return _with_itself(first, second, repeats)
    if not callable(second):
        raise OptionError("compare(a, b, inputs) needs two models or callables")
    return _two(first, second, inputs, repeats)


def _with_itself(model: nn.Module, inputs: Any, repeats: int) -> Comparison:
    layers = layer_errors(model, inputs)
    with _evaluating(model), torch.no_grad():
        call = _Call(model, inputs)
        call()  # the exact run is warm from `layer_errors`

        def exact() -> Tensor:
            with _implementation(model, "{}"):
                return call()

        a, b, seconds_exact, seconds = _alternate(exact, call, repeats)
    some = next(m._modules[routing.SLOT] for _, m in converted_layers(model))
    mechanism = str(getattr(some, "config", "converted"))
    return _result(mechanism, layers, a, b, seconds_exact, seconds, inputs)


def layer_errors(model: nn.Module, inputs: Any) -> tuple[LayerComparison, ...]:
    """Errors of a converted model's layers during one exact forward call.

    Raises:
        OptionError: if the model is not converted.
    """
    names = [name for name, _ in converted_layers(model)]
    if not names:
        raise OptionError(
            "the model is not converted: call subquad.convert(model, ...) first, or compare "
            "two models with compare(a, b, inputs)"
        )
    need_transformers()
    watch = _Watch(model, inputs)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_evaluating(model))
        stack.enter_context(torch.no_grad())
        stack.enter_context(_implementation(model, "subquad_{}_probe"))
        stack.enter_context(routing.probing(watch))
        _Call(model, inputs)()
    return watch.results(names)


def _two(a: Callable[..., Any], b: Callable[..., Any], inputs: Any, repeats: int) -> Comparison:
    with contextlib.ExitStack() as stack:
        for side in (a, b):
            if isinstance(side, nn.Module):
                stack.enter_context(_evaluating(side))
        stack.enter_context(torch.no_grad())
        first, second = _Call(a, inputs), _Call(b, inputs)
        first(), second()
        x, y, seconds_a, seconds_b = _alternate(first, second, repeats)
    return _result(None, (), x, y, seconds_a, seconds_b, inputs)


def _result(
    mechanism: str | None,
    layers: tuple[LayerComparison, ...],
    a: Tensor,
    b: Tensor,
    seconds_a: float,
    seconds_b: float,
    inputs: Any,
) -> Comparison:
    if a.shape != b.shape:
        raise ShapeError(f"outputs differ in shape: {tuple(a.shape)} and {tuple(b.shape)}")
    a, b = (
        t.double().reshape(t.shape[0], -1, t.shape[-1])
        if t.dim() > 1
        else t.double()[:, None, None]
        for t in (a, b)
    )
    mask = _position_mask(inputs, a.shape[0], a.shape[1], decoder=True)
    keep = torch.ones(a.shape[:2], dtype=torch.bool) if mask is None else mask
    keep = keep.to(a.device)
    cosines = nn.functional.cosine_similarity(_pool(a, keep), _pool(b, keep), dim=-1)
    worst = (a - b).abs().masked_fill(~keep[..., None], 0).max()
    return Comparison(
        mechanism=mechanism,
        layers=layers,
        cosines=tuple(float(x) for x in cosines),
        max_abs=float(worst),
        seconds_exact=seconds_a,
        seconds=seconds_b,
        rows=a.shape[0],
        length=a.shape[1],
    )


def _pool(hidden: Tensor, keep: Tensor) -> Tensor:
    weights = keep[..., None].to(hidden.dtype)
    return (hidden.masked_fill(~keep[..., None], 0)).sum(1) / weights.sum(1).clamp(min=1)


def _alternate(
    first: Callable[[], Tensor], second: Callable[[], Tensor], repeats: int
) -> tuple[Tensor, Tensor, float, float]:
    """Both results, and the median seconds of each, called in turn."""
    times: tuple[list[float], list[float]] = ([], [])
    results: list[Tensor] = []
    for _ in range(repeats):
        results = []
        for side, run in enumerate((first, second)):
            start = time.perf_counter()
            results.append(run())
            if results[-1].is_cuda:
                torch.cuda.synchronize(results[-1].device)
            times[side].append(time.perf_counter() - start)
    return results[0], results[1], statistics.median(times[0]), statistics.median(times[1])


# ---- running a model ---------------------------------------------------------------------


class _Call:
    """Calls a model with the inputs and returns its final hidden states."""

    def __init__(self, model: Callable[..., Any], inputs: Any) -> None:
        self.model = model
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        if isinstance(inputs, Mapping):
            self.kwargs = dict(inputs)
        else:
            self.args = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
        # Heads give logits only; the body below them gives last_hidden_state by itself.
        base = getattr(model, "base_model", model)
        if base is not model and hasattr(model, "config"):
            self.kwargs.setdefault("output_hidden_states", True)

    def __call__(self) -> Tensor:
        return _hidden(self.model(*self.args, **self.kwargs))


def _hidden(output: Any) -> Tensor:
    for name in ("last_hidden_state", "decoder_hidden_states", "hidden_states", "logits"):
        value = getattr(output, name, None)
        if isinstance(value, tuple) and value:
            value = value[-1]
        if isinstance(value, Tensor):
            return value
    if isinstance(output, tuple | list) and output:
        output = output[0]
    if not isinstance(output, Tensor):
        raise OptionError(
            "the model must return a tensor, a tuple that starts with one, or a transformers "
            f"output with hidden states or logits, given {type(output).__name__}"
        )
    return output


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def _implementation(model: nn.Module, pattern: str) -> Iterator[None]:
    """Within, all converted configs use the original implementation's name in `pattern`."""
    before = []
    for config in _configs(model):
        original = routing.original_name(config._attn_implementation)
        if original is not None:
            before.append((config, config._attn_implementation))
            config._attn_implementation_internal = pattern.format(original)
    try:
        yield
    finally:
        for config, name in before:
            config._attn_implementation_internal = name


# ---- errors of layers --------------------------------------------------------------------


def _position_mask(inputs: Any, rows: int, length: int, *, decoder: bool) -> Tensor | None:
    """The (B, L) mask among the inputs that has this shape; decoders look for theirs first."""
    if not isinstance(inputs, Mapping):
        return None
    names = ("decoder_attention_mask", "attention_mask") if decoder else ("attention_mask",)
    if decoder and (
        inputs.get("decoder_input_ids") is not None or inputs.get("labels") is not None
    ):
        is_text = inputs.get("decoder_input_ids", inputs.get("labels"))
        if isinstance(is_text, Tensor) and tuple(is_text.shape) == (rows, length):
            names = ("decoder_attention_mask",)
    for name in names:
        mask = inputs.get(name)
        if isinstance(mask, Tensor) and tuple(mask.shape) == (rows, length):
            return mask.bool()
    return None


class _Watch:
    """Collects squared errors of every converted layer during the exact run."""

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        self.names = {id(module): name for name, module in converted_layers(model)}
        self.encoder_decoder = any(
            bool(getattr(config, "is_encoder_decoder", False)) for config in _configs(model)
        )
        self.inputs = inputs
        self.sums: dict[str, list[float]] = {}

    def __call__(
        self,
        layer: nn.Module,
        run: Callable[[], Tensor],
        exact: Tensor,
        v: Tensor,
        mask: Mask,
        stop: int | None,
    ) -> None:
        name = self.names[id(layer)]
        out = run()
        uniform = uniform_attention(v if stop is None else v[:, :, :stop], exact.shape, mask)
        # Within an encoder–decoder, only modules of the decoder have the decoder's positions.
        decoder = self.encoder_decoder and "decoder" in name.split(".")
        keep = _position_mask(self.inputs, exact.shape[0], exact.shape[2], decoder=decoder)
        if keep is not None:
            closed = ~keep[:, None, :, None]
            exact, out, uniform = (t.masked_fill(closed, 0) for t in (exact, out, uniform))
        sums = self.sums.setdefault(name, [0.0, 0.0, 0.0])
        for place, value in enumerate((exact, out - exact, uniform - exact)):
            sums[place] += float(value.double().square().sum())

    def results(self, names: list[str]) -> tuple[LayerComparison, ...]:
        rows = []
        for name in names:
            if name in self.sums:
                total, error, uniform = self.sums[name]
                total = total or math.nan
                rows.append(
                    LayerComparison(name, math.sqrt(error / total), math.sqrt(uniform / total))
                )
        return tuple(rows)


def uniform_attention(v: Tensor, shape: tuple[int, ...], mask: Mask) -> Tensor:
    """The mean of all values that each query may read, (B, H, L, V); O(S) time and memory.

    For causal, key and explicit masks: the line that every approximation has to beat.
    """
    heads, queries = shape[1], shape[2]
    v = v.float() if v.dtype in (torch.float16, torch.bfloat16) else v
    v = v.repeat_interleave(heads // v.shape[1], 1)
    if mask.dense is not None:
        opened = mask.to_dense(queries, v.shape[2], v.device)
        opened = (opened if opened.dim() == 4 else opened.expand(1, 1, *opened.shape[-2:])).to(
            v.dtype
        )
        return opened @ v / opened.sum(-1, keepdim=True).clamp(min=1)
    keep = v.new_ones(v.shape[0], v.shape[2]) if mask.key is None else mask.key.to(v.dtype)
    keep = keep[:, None, :, None]
    v = v.masked_fill(keep == 0, 0)
    if mask.causal:
        total, count = v.cumsum(2)[:, :, -queries:], keep.cumsum(2)[:, :, -queries:]
    else:
        total, count = v.sum(2, keepdim=True), keep.sum(2, keepdim=True)
    return (total / count.clamp(min=1)).expand(shape[0], heads, queries, -1)
