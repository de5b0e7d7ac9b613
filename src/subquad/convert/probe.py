"""Errors of converted layers, head by head, on the exact run's q, k and v.

    error = ‖o − o*‖ / ‖o*‖ ,   ‖x‖² = Σ over rows, unmasked positions (and heads) of |x|²

o* is exact attention's output, o the mechanism's on the same q, k and v: a norm over all tokens,
no mean of ratios. Errors of earlier layers do not mix in. Beside it stands uniform attention's
error, the line to beat; and, for hybrids, the error that is left when one part is left out.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from subquad.attention.base import Absent, Mechanism
from subquad.attention.masks import Mask
from subquad.attention.partial import combine, merge
from subquad.convert import routing
from subquad.convert.inputs import encoder_decoder, position_mask
from subquad.convert.swap import converted_layers
from subquad.registry import build

__all__ = ["AttentionPicture", "LayerComparison", "PartComparison", "uniform_attention"]

_CHUNK = 256
"""Queries at a time where a mask is written out."""


@dataclass(frozen=True)
class PartComparison:
    """What one part of a hybrid contributes to a layer, by leaving it out.

    Args:
        name: of the part, such as ``"far"``.
        share: its share of the normaliser, mean over unmasked queries and heads.
        error: the layer's error with all parts.
        error_without: the layer's error when this part is left out and the others are
            normalised among themselves.
    """

    name: str
    share: float
    error: float
    error_without: float

    @property
    def verdict(self) -> str:
        """In words: does the part help, hurt, or do nothing?

        Nothing is a change of at most 1% of the error, or of 1e-4 where the error is tiny.
        """
        change = self.error_without - self.error
        if abs(change) <= max(0.01 * max(self.error, self.error_without), 1e-4):
            return "it does nothing here"
        return "it helps" if change > 0 else "it hurts: without it the error is smaller"

    def __str__(self) -> str:
        change = f"from {self.error:.3g} to {self.error_without:.3g}"
        return (
            f"{self.name}: share {100 * self.share:.1f}%, leaving it out changes the error "
            f"{change}: {self.verdict}"
        )


@dataclass(frozen=True)
class LayerComparison:
    """Error of one converted layer's attention output, on the exact run's q, k, v.

    Args:
        name: the attention module's name.
        error: ‖o − o*‖ / ‖o*‖ over all rows, heads and unmasked positions; o* is exact.
        uniform_error: the same for uniform attention, the mean of all values that a query may
            read: the line to beat. Above it, a mechanism is worse than not looking at q and k.
        heads: the same for each head alone.
        uniform_heads: uniform attention's, for each head alone.
        spread: standard deviation of the layer's error over rows; 0 for a single one.
        parts: a hybrid's parts, by ablation.

    Where the exact output is zero an error is 0 if the other is zero too, else infinite.
    """

    name: str
    error: float
    uniform_error: float
    heads: tuple[float, ...] = ()
    uniform_heads: tuple[float, ...] = ()
    spread: float = 0.0
    parts: tuple[PartComparison, ...] = ()


@dataclass(frozen=True, eq=False)
class AttentionPicture:
    """Exact and implied attention of one head on a short input.

    Args:
        layer: the attention module's name.
        head: its number, from 0.
        error: the head's output error, over all that was compared.
        exact, implied: (L, S) weights; implied ones may be negative.
    """

    layer: str
    head: int
    error: float
    exact: Tensor
    implied: Tensor


def uniform_attention(v: Tensor, shape: tuple[int, ...], mask: Mask) -> Tensor:
    """The mean of all values that each query may read, (B, H, L, V).

    The line that every approximation has to beat. O(S) time and memory for causal and key
    masks; O(L·S) time for windows, segments and explicit masks, in chunks of queries.
    """
    heads, queries, keys = shape[1], shape[2], v.shape[2]
    v = v.float() if v.dtype in (torch.float16, torch.bfloat16) else v
    v = v.repeat_interleave(heads // v.shape[1], 1)
    if set(mask.kinds()) - {"causal", "key"}:
        means = []
        for start in range(0, queries, _CHUNK):
            stop = min(start + _CHUNK, queries)
            opened = mask.rows(start, stop, queries, keys, device=v.device).to(v.dtype)
            opened = opened[:, None] if opened.dim() == 3 else opened
            means.append(opened @ v / opened.sum(-1, keepdim=True).clamp(min=1))
        return torch.cat(means, 2)
    keep = v.new_ones(v.shape[0], keys) if mask.key is None else mask.key.to(v.dtype)
    keep = keep[:, None, :, None]
    v = v.masked_fill(keep == 0, 0)
    if mask.causal:
        total, count = v.cumsum(2)[:, :, -queries:], keep.cumsum(2)[:, :, -queries:]
    else:
        total, count = v.sum(2, keepdim=True), keep.sum(2, keepdim=True)
    return (total / count.clamp(min=1)).expand(shape[0], heads, queries, -1)


@contextlib.contextmanager
def uniformly(model: nn.Module) -> Iterator[None]:
    """Within, every converted layer gives uniform attention's output in place of its own."""

    def replaced(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor
    ) -> Tensor:
        mask = kwargs.get("mask") or Mask()
        q, _, v = args
        return uniform_attention(v, tuple(q.shape), mask).to(out.dtype)

    with contextlib.ExitStack() as stack:
        for _, layer in converted_layers(model):
            mechanism = layer._modules[routing.SLOT]
            assert mechanism is not None
            handle = mechanism.register_forward_hook(replaced, with_kwargs=True)
            stack.callback(handle.remove)
        yield


# ---- watching ----------------------------------------------------------------------------


class _Call(NamedTuple):
    """A mechanism and the arguments of a call of it."""

    mechanism: Mechanism
    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]


@contextlib.contextmanager
def _recorded(layer: nn.Module) -> Iterator[list[_Call]]:
    """Within, the calls of a layer's mechanism, with the mask and scale that reach it."""
    calls: list[_Call] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert isinstance(module, Mechanism)
        q, k, v = args
        calls.append(_Call(module, q, k, v, kwargs))

    mechanism = layer._modules[routing.SLOT]
    assert mechanism is not None
    handle = mechanism.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()


@dataclass
class _Sums:
    """Squared norms (B, H) of one layer, call by call; of errors also without each part."""

    exact: list[Tensor] = field(default_factory=list)
    error: list[Tensor] = field(default_factory=list)
    uniform: list[Tensor] = field(default_factory=list)
    without: list[dict[str, Tensor]] = field(default_factory=list)
    shares: dict[str, float] = field(default_factory=dict)
    queries: int = 0


class Errors:
    """Collects every converted layer's errors over exact runs: a watcher for `probing`.

    Args:
        model: the converted model.
        ablate: also run a hybrid's parts, each left out in turn; about twice the work.
    """

    def __init__(self, model: nn.Module, ablate: bool = True) -> None:
        self.names = {id(module): name for name, module in converted_layers(model)}
        self.pair = encoder_decoder(model)
        self.ablate = ablate
        self.inputs: Any = None
        self.sums: dict[str, _Sums] = {}

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
        with _recorded(layer) as calls:
            out = run()
        uniform = uniform_attention(v if stop is None else v[:, :, :stop], exact.shape, mask)
        # Within an encoder–decoder, only modules of the decoder have the decoder's positions.
        decoder = self.pair and "decoder" in name.split(".")
        keep = position_mask(self.inputs, exact.shape[0], exact.shape[2], decoder=decoder)
        sums = self.sums.setdefault(name, _Sums())
        sums.exact.append(_squares(exact, None, keep))
        sums.error.append(_squares(exact, out, keep))
        sums.uniform.append(_squares(exact, uniform, keep))
        alone = self.ablate and len(calls) == 1
        sums.without.append(_leave_out(sums, calls[0], exact, keep) if alone else {})

    def results(self) -> tuple[LayerComparison, ...]:
        """The layers that were called, in the order of the model."""
        return tuple(
            _summary(name, self.sums[name]) for name in self.names.values() if name in self.sums
        )

    def not_called(self) -> tuple[str, ...]:
        """The converted layers that no run has reached."""
        return tuple(name for name in self.names.values() if name not in self.sums)


def _squares(exact: Tensor, other: Tensor | None, keep: Tensor | None) -> Tensor:
    """Σ |other − exact|² (B, H), float64, of unmasked positions; |exact|² without another."""
    gap = exact.double() if other is None else other.double() - exact.double()
    if keep is not None:
        gap = gap.masked_fill(~keep.to(gap.device)[:, None, :, None], 0.0)
    return gap.square().sum((2, 3)).cpu()


def _leave_out(sums: _Sums, call: _Call, exact: Tensor, keep: Tensor | None) -> dict[str, Tensor]:
    """Squared errors without each part in turn; counts the parts' shares on the way."""
    parts = call.mechanism.partials(call.q, call.k, call.v, **call.options)
    if not parts:
        return {}
    total = combine(parts.values())
    counted = total.den != 0  # queries that read any key
    if keep is not None:
        counted = counted & keep.to(counted.device)[:, None]
    sums.queries += int(counted.sum())
    found = {}
    for name, part in parts.items():
        gap = part.log_scale.masked_fill(part.den == 0, float("-inf")) - total.log_scale
        share = (part.den * gap.exp())[counted] / total.den[counted]
        sums.shares[name] = sums.shares.get(name, 0.0) + float(share.double().sum())
        others = [other for label, other in parts.items() if label != name]
        rest = merge(others) if others else torch.zeros_like(exact)
        found[name] = _squares(exact, rest, keep)
    return found


def _summary(name: str, sums: _Sums) -> LayerComparison:
    exact = torch.cat(sums.exact)

    def layer(squares: Sequence[Tensor]) -> float:
        return _relative(float(torch.cat(tuple(squares)).sum()), float(exact.sum()))

    def heads(squares: Sequence[Tensor]) -> tuple[float, ...]:
        pairs = zip(torch.cat(tuple(squares)).sum(0), exact.sum(0), strict=True)
        return tuple(_relative(float(a), float(b)) for a, b in pairs)

    pairs = zip(torch.cat(sums.error).sum(1), exact.sum(1), strict=True)
    rows = [_relative(float(a), float(b)) for a, b in pairs if b > 0]
    error = layer(sums.error)
    parts = []
    if len(sums.shares) > 1:
        for part, share in sums.shares.items():
            # A call too short to have the part is the same without it.
            calls = zip(sums.without, sums.error, strict=True)
            without = layer([found.get(part, full) for found, full in calls])
            parts.append(PartComparison(part, share / max(sums.queries, 1), error, without))
    return LayerComparison(
        name=name,
        error=error,
        uniform_error=layer(sums.uniform),
        heads=heads(sums.error),
        uniform_heads=heads(sums.uniform),
        spread=statistics.stdev(rows) if len(rows) > 1 else 0.0,
        parts=tuple(parts),
    )


def _relative(error: float, exact: float) -> float:
    if exact == 0.0:
        return 0.0 if error == 0.0 else math.inf
    return math.sqrt(error / exact)


# ---- pictures ----------------------------------------------------------------------------


class Pictures:
    """Records implied and exact attention of chosen heads during one exact run: a watcher.

    Args:
        model: the converted model.
        wanted: (layer name, head, error) of each picture.
    """

    def __init__(self, model: nn.Module, wanted: Iterable[tuple[str, int, float]]) -> None:
        self.names = {id(module): name for name, module in converted_layers(model)}
        self.wanted: dict[str, dict[int, float]] = {}
        for name, head, error in wanted:
            self.wanted.setdefault(name, {})[head] = error
        self.found: list[AttentionPicture] = []
        self.missing: list[str] = []

    def __call__(self, layer: nn.Module, run: Callable[[], Tensor], *_: Any) -> None:
        name = self.names[id(layer)]
        heads = self.wanted.pop(name, {})  # a shared layer is called again: its first call counts
        if not heads:
            return
        with _recorded(layer) as calls:
            run()
        if not calls:
            self.missing.append(f"no picture of {name}: its mechanism was not called")
            return
        mechanism, q, k, options = calls[0].mechanism, calls[0].q, calls[0].k, calls[0].options
        support = mechanism.capabilities.weights
        if isinstance(support, Absent):
            self.missing.append(f"no picture of {name}: {support.reason}")
            return
        exact = build(
            "softmax",
            head_dim=mechanism.head_dim,
            num_heads=mechanism.num_heads,
            num_kv_heads=mechanism.num_kv_heads,
        )
        both = [one.weights(q[:1], k[:1], **_first_row(options))[0] for one in (exact, mechanism)]
        for head, error in heads.items():
            implied = both[1][head].float().cpu()
            self.found.append(
                AttentionPicture(name, head, error, both[0][head].float().cpu(), implied)
            )


def _first_row(options: Mapping[str, Any]) -> dict[str, Any]:
    mask = options.get("mask")
    if not isinstance(mask, Mask):
        return dict(options)
    key, dense = (None if t is None else t[:1] for t in (mask.key, mask.dense))
    return {**options, "mask": replace(mask, key=key, dense=dense)}
