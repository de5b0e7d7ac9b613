"""Generation in constant memory: converted layers keep states where others keep keys and values.

A model makes its cache as ever. Before a converted attention module runs, a hook (`take_place`)
puts a `StateLayer` into that module's empty place of the cache. The module then calls
``update``, which hands the new tokens' keys and values on, marked with the place they belong to;
the attention function reads the mark and lets the mechanism continue the place's state. Nothing
is kept outside of the cache, so models, threads, copies and pickles do not meet.

This file subclasses transformers' classes: import it inside functions only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    EncoderDecoderCache,
)

from subquad.attention.base import Mechanism, State
from subquad.attention.masks import Mask
from subquad.convert import routing
from subquad.errors import UnsupportedError

__all__ = ["ROLLBACK", "CacheRow", "CrossStateLayer", "StateCache", "StateLayer", "cache_rows"]

ROLLBACK = 256
"""While the past is recorded, at least so many of the latest tokens can be taken back."""


class CacheRow(NamedTuple):
    """What a cache keeps for one layer.

    Args:
        layer: index in the cache.
        kind: ``"state"``, ``"keys and values"`` or ``"empty"``.
        tokens: how many it has seen.
        nbytes: of all its tensors.
    """

    layer: int
    kind: str
    tokens: int
    nbytes: int


class StateCache(DynamicCache):
    """A transformers cache in which converted layers keep a state, not keys and values.

    ``model.generate(...)`` and ``model(..., use_cache=True)`` of a converted decoder make one by
    themselves, and an empty ``DynamicCache`` that is passed in becomes one. Layers kept exact
    have transformers' own places beside the states; so have mechanisms without a state, and
    exact ones, whose state would be the keys and values. Bytes for B rows: those of the
    mechanisms' states, constant in the number of tokens where these are, plus
    2·B·Hkv·D·tokens numbers for each layer that keeps keys and values.

    Beams, ``num_return_sequences``, chunked prefill and continued conversations work as with
    transformers' caches. Taking tokens back (``crop``, which assisted decoding needs) works for
    tokens that came after ``activate_past_recording()``, the latest `ROLLBACK` at least;
    ``generate`` calls it by itself. A copy (``copy.deepcopy``) is cheap: states are small.

    Example:
        >>> import torch, subquad as sq
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64)
        >>> model = GPT2LMHeadModel(config).eval()
        >>> _ = sq.convert(model, "performer(features=16)")
        >>> sizes = []
        >>> for length in (10, 500):
        ...     ids = torch.arange(length)[None] % 64
        ...     with torch.no_grad():
        ...         cache = model(ids, use_cache=True).past_key_values
        ...     sizes.append(cache.nbytes)
        >>> type(cache).__name__, sizes[0] == sizes[1]
        ('StateCache', True)
        >>> cache.rows()[0]
        CacheRow(layer=0, kind='state', tokens=500, nbytes=2312)
    """

    recording = False

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in all layers."""
        return sum(row.nbytes for row in self.rows())

    def rows(self) -> list[CacheRow]:
        """What each layer keeps."""
        return cache_rows(self)

    def __str__(self) -> str:
        groups: dict[str, list[CacheRow]] = {}
        for row in self.rows():
            groups.setdefault(row.kind, []).append(row)
        parts = [
            f"{len(rows)} × {kind}, {sum(row.nbytes for row in rows):,} bytes"
            for kind, rows in groups.items()
        ]
        return f"{type(self).__name__}: {'; '.join(parts) or 'empty'}"

    @property
    def is_linear(self) -> list[bool]:
        """True for states, too: an exact layer's place tells the size of the masks."""
        return [
            own or isinstance(layer, StateLayer)
            for own, layer in zip(super().is_linear, self.layers, strict=True)
        ]

    def activate_past_recording(self) -> None:
        """From here on, tokens can be taken back with ``crop``."""
        self.recording = True
        super().activate_past_recording()  # type: ignore[no-untyped-call]


def cache_rows(cache: Any) -> list[CacheRow]:
    """What each layer of any transformers cache keeps."""
    return [_row(index, layer) for index, layer in enumerate(cache.layers)]


def _row(index: int, layer: Any) -> CacheRow:
    if isinstance(layer, StateLayer):
        kind = "state" if layer.is_initialized else "empty"
        return CacheRow(index, kind, layer.tokens, layer.nbytes)
    tensors = [t for t in vars(layer).values() if isinstance(t, Tensor) and t.dim() > 1]
    nbytes = sum(t.numel() * t.element_size() for t in tensors)
    tokens = int(layer.get_seq_length())
    return CacheRow(index, "keys and values" if tokens else "empty", tokens, nbytes)


# ---- places ------------------------------------------------------------------------------


class _Call(NamedTuple):
    """The arguments of a prefill."""

    q: Tensor
    k: Tensor
    v: Tensor
    key: Tensor | None
    scale: float | None

    @property
    def length(self) -> int:
        return self.k.shape[2]

    def run(
        self, mechanism: Mechanism, state: State | None, donate: bool = False
    ) -> tuple[Tensor, State]:
        return mechanism.prefill(
            self.q, self.k, self.v, state=state, key_mask=self.key, scale=self.scale, donate=donate
        )

    def part(self, start: int, stop: int | None = None) -> _Call:
        q, k, v = (t[:, :, start:stop] for t in self[:3])
        return _Call(q, k, v, None if self.key is None else self.key[:, start:stop], self.scale)

    def map(self, function: Callable[[Tensor], Tensor]) -> _Call:
        q, k, v = (function(t) for t in self[:3])
        return _Call(q, k, v, None if self.key is None else function(self.key), self.scale)

    def tensors(self) -> Iterator[Tensor]:
        yield from (t for t in (self.q, self.k, self.v, self.key) if t is not None)

    @staticmethod
    def joined(calls: list[_Call]) -> _Call:
        q, k, v = (torch.cat(parts, 2) for parts in zip(*(call[:3] for call in calls), strict=True))
        keys = [call.key for call in calls]
        key = None
        if any(part is not None for part in keys):
            filled = [
                call.k.new_ones(len(call.k), call.length, dtype=torch.bool)
                if part is None
                else part
                for call, part in zip(calls, keys, strict=True)
            ]
            key = torch.cat(filled, 1)
        return _Call(q, k, v, key, calls[0].scale)


@dataclass
class _Past:
    """A snapshot and the calls since then: what going back some tokens needs.

    Args:
        base: the state of the snapshot.
        calls: what came after it.
        cropped: the calls have lost tokens, so that the present state has yet to be computed.
    """

    base: State | None
    calls: list[_Call] = field(default_factory=list)
    cropped: bool = False

    @property
    def length(self) -> int:
        return sum(call.length for call in self.calls)

    def advance(self, mechanism: Mechanism, tokens: int) -> None:
        """Moves the snapshot on by so many tokens."""
        if tokens:
            call = _Call.joined(self.calls)
            _, self.base = call.part(0, tokens).run(mechanism, self.base)
            self.calls = [call.part(tokens)] if tokens < call.length else []

    def keep(self, tokens: int) -> None:
        """Drops the calls' last tokens, down to so many."""
        self.calls = [_Call.joined(self.calls).part(0, tokens)] if tokens else []
        self.cropped = True


class StateLayer(CacheLayerMixin):
    """One converted layer's place in a cache: a state of constant size, see `StateCache`.

    Args:
        name: of the attention module whose state this is.
        recording: whether tokens may have to be taken back.
    """

    is_sliding = False

    # The base class would make empty keys and values.
    def __init__(self, name: str, recording: bool = False) -> None:
        self.name = name
        self.state: State | None = None
        self.tokens = 0
        self.past: _Past | None = None
        self.record_past = False
        self.is_initialized = False
        self.is_open = False
        if recording:
            self.activate_past_recording()

    # ---- one call: open (the hook), update (the module), attend (the attention function) ----

    def open(self, name: str) -> None:
        """Says that the module `name` is about to be called.

        Raises:
            UnsupportedError: if the state is another module's, or the last call did not end.
        """
        if name != self.name:
            raise UnsupportedError(
                name, f"the state of {self.name}", "the cache was filled by another layer or model"
            )
        if self.is_open:
            raise UnsupportedError(
                name,
                "generation with a state",
                "its last call ended before its attention, or changes keys and values between "
                "the cache and the attention; start with a new cache, and if it happens again "
                "leave the layer out with keep_exact=",
            )
        self.is_open = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Notes dtype, device and sizes; the state starts with the first attention."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.sizes = (key_states.shape[1], key_states.shape[-1], value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The new tokens' keys and values as they are, marked for the attention function."""
        if not self.is_open:
            raise UnsupportedError(
                "StateCache",
                f"exact attention in {self.name}",
                "the cache holds a state of that layer, not its keys and values; start with a "
                "new cache",
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.tokens += key_states.shape[-2]
        routing.mark(key_states, self)
        routing.mark(value_states, self)
        return key_states, value_states

    def attend(
        self, mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None
    ) -> Tensor:
        """Attention (B, H, T, V) of the new tokens to themselves and to the state, which moves on.

        Raises:
            UnsupportedError: for masks that a state cannot go with.
        """
        call = _Call(q, k, v, self._key_mask(mechanism, mask, q.shape[2], k.shape[2]), scale)
        if self.past is not None and self.past.cropped:
            self.past.advance(mechanism, self.past.length)
            self.state, self.past = self.past.base, _Past(self.past.base)
        if not self.record_past:
            self.past = None
            # Only the layer has this state; whoever wants to come back to it copies the cache.
            out, self.state = call.run(mechanism, self.state, donate=True)
            return out
        outs = []
        if call.length > ROLLBACK:  # a long prompt is not kept for the sake of its end
            out, self.state = call.part(0, -ROLLBACK).run(mechanism, self.state)
            outs.append(out)
            # Copies: views would keep all of the prompt alive.
            call, self.past = call.part(-ROLLBACK).map(torch.clone), _Past(self.state)
        out, self.state = call.run(mechanism, self.state)
        outs.append(out)
        assert self.past is not None
        self.past.calls.append(call.map(torch.Tensor.detach))
        if self.past.length > 2 * ROLLBACK:
            self.past.advance(mechanism, self.past.length - ROLLBACK)
        return out if len(outs) == 1 else torch.cat(outs, 2)

    def _key_mask(self, mechanism: Mechanism, mask: Mask, queries: int, keys: int) -> Tensor | None:
        if not self.is_open:
            raise UnsupportedError(
                mechanism.name,
                f"generation with a state in {self.name}",
                "it attends twice in one call; leave it out with keep_exact=",
            )
        self.is_open = False
        others = set(mask.kinds()) - {"causal", "key"}
        if others or (queries > 1 and not self._right_way(mask)):
            words = " and ".join(sorted(others)) or ("causal" if mask.causal else "bidirectional")
            raise UnsupportedError(
                mechanism.name,
                f"{words} masks over the state of {self.name}",
                "states take causal masks with padded keys; pass use_cache=False, or a cache "
                "that was filled without conversion",
            )
        return None if mask.key is None else mask.key[:, -keys:]

    @staticmethod
    def _right_way(mask: Mask) -> bool:
        return mask.causal

    # ---- what transformers asks ----------------------------------------------------------

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]  # an attribute in the base class
        """Stands in for keys (B, Hkv, S, D), which there are not: NaN, without memory."""
        return self._stand_in(1)

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]  # an attribute in the base class
        """Stands in for values (B, Hkv, S, V)."""
        return self._stand_in(2)

    def _stand_in(self, width: int) -> Tensor | None:
        held = next(self._tensors(), None)
        if held is None:
            return None
        blank = torch.full((), torch.nan, dtype=self.dtype, device=self.device)
        blank = blank.expand(len(held), self.sizes[0], self.tokens, self.sizes[width])
        return routing.mark(blank, self) if self.is_open else blank

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Masks are for the new tokens: (their number, how many came before)."""
        return query_length, self.tokens

    def get_seq_length(self) -> int:
        """How many tokens the layer has seen."""
        return self.tokens

    def get_max_length(self) -> int:
        """There is no longest sequence: −1."""
        return -1

    @property
    def nbytes(self) -> int:
        """Bytes of the state, and of what is recorded for taking tokens back."""
        held = {id(t): t for t in self._tensors()}
        return sum(t.numel() * t.element_size() for t in held.values())

    def _tensors(self) -> Iterator[Tensor]:
        if self.state is not None:
            yield from self.state.tensors().values()
        if self.past is not None:
            if self.past.base is not None:
                yield from self.past.base.tensors().values()
            for call in self.past.calls:
                yield from call.tensors()

    def _map(self, change: Callable[[State], State], function: Callable[[Tensor], Tensor]) -> None:
        if self.past is not None:
            base = self.past.base and change(self.past.base)
            self.past = _Past(
                base, [call.map(function) for call in self.past.calls], self.past.cropped
            )
        self.state = self.state and change(self.state)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keeps rows `beam_idx`, in that order."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps rows `indices`, numbers or bool, in that order."""
        rows = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
        self._map(lambda state: state.select(rows), lambda t: t.index_select(0, rows.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row so many times, neighbours first."""
        self._map(lambda state: state.repeat(repeats), lambda t: t.repeat_interleave(repeats, 0))

    def reset(self) -> None:
        """Forgets everything."""
        self.state, self.tokens, self.is_open, self.is_initialized = None, 0, False, False
        self.past = _Past(None) if self.record_past else None

    # ---- taking tokens back --------------------------------------------------------------

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]  # as in the library's linear layers
        """Whether ``crop`` can take tokens back now."""
        return self.record_past or self.tokens == 0

    def activate_past_recording(self) -> None:
        """Keeps what ``crop`` needs: a snapshot of the state and the tokens since then."""
        if not self.record_past:
            self.record_past = True
            self.past = _Past(self.state)

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last ``-tokens_to_remove`` tokens; the snapshot moves there.

        Raises:
            ValueError: if positive.
            UnsupportedError: more tokens than are recorded.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes minus the number of tokens to remove, given {tokens_to_remove}"
            )
        recorded = self.past.length if self.past is not None else 0
        if -tokens_to_remove > recorded:
            raise UnsupportedError(
                "StateCache",
                f"crop({tokens_to_remove})",
                f"{recorded} tokens are recorded; call cache.activate_past_recording() before the "
                f"tokens that may have to go ({ROLLBACK} at most), or keep copy.deepcopy(cache)",
            )
        if self.past is None:
            return
        self.tokens += tokens_to_remove
        if tokens_to_remove:
            self.past.keep(recorded + tokens_to_remove)
            self.state = None
        elif not self.past.cropped:
            self.past = _Past(self.state)


class CrossStateLayer(StateLayer):
    """The place of a cross-attention layer: filled by the first call, then read."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Takes the encoder's keys and values, which replace any that were there."""
        self.state, self.tokens = None, 0
        return super().update(key_states, value_states)

    def attend(
        self, mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None
    ) -> Tensor:
        """Attention (B, H, L, V) to the encoder's tokens, by their state."""
        key = self._key_mask(mechanism, mask, q.shape[2], k.shape[2])
        if self.state is None:
            _, self.state = _Call(q[:, :, -1:], k, v, key, scale).run(mechanism, None)
        out, self.state = mechanism.step(q, None, None, self.state, scale=scale)
        return out

    @staticmethod
    def _right_way(mask: Mask) -> bool:
        return not mask.causal

    def activate_past_recording(self) -> None:
        """Nothing: what the encoder said stays."""


_PLACES = {"causal": StateLayer, "cross": CrossStateLayer}


# ---- how places come into a cache --------------------------------------------------------


def take_place(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of a converted attention module: opens its place in the call's cache."""
    for value in (*kwargs.values(), *args):
        if isinstance(value, Cache):
            explicit = (*args, kwargs.get("attention_mask"), kwargs.get("mask"))
            _open(module, value, any(map(_is_explicit, explicit)))
            return


def _is_explicit(value: Any) -> bool:
    """A mask made by the user: the library's carry what they say."""
    return isinstance(value, Tensor) and value.dim() == 4 and not hasattr(value, "_subquad")


def _open(module: nn.Module, cache: Any, explicit: bool) -> None:
    """Opens the module's place, after putting one there if the cache is new."""
    info: routing.Layer = module.__dict__["_subquad"]
    name = routing.implementation(module)
    if routing.original_name(name) is None or name.endswith("_probe"):
        return  # runs exact attention for the moment
    if isinstance(cache, EncoderDecoderCache):
        cross = info.caches == "cross"
        cache = cache.cross_attention_cache if cross else cache.self_attention_cache
    elif info.caches == "cross":
        return
    index = int(module.layer_idx)  # type: ignore[arg-type]  # convert has looked
    place = cache.layers[index] if index < len(cache.layers) else None
    if isinstance(place, StateLayer):
        if explicit:
            raise UnsupportedError(
                info.name,
                "an explicit (B, 1, L, S) mask over a state",
                "a state takes no other mask than its keys came with; pass a (B, S) mask",
            )
        place.open(info.name)
    elif not explicit and not (module.training and torch.is_grad_enabled()):
        _take(cache, index, info)


def _take(cache: Any, index: int, info: routing.Layer) -> None:
    """Puts a state into the cache's place, if that is empty and of the plain growing kind."""
    if type(cache) not in (DynamicCache, StateCache) or cache.offloading:
        return
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layers += [DynamicLayer() for _ in range(len(cache.layers), index + 1)]
    if index >= len(cache.layers):
        return
    there = cache.layers[index]
    if type(there) is not DynamicLayer or there.get_seq_length():
        return
    cache.__class__ = StateCache
    place = _PLACES[info.caches](info.name, cache.recording)
    cache.layers[index] = place
    place.open(info.name)


class PrepareCache:
    """``model._prepare_cache_for_generation`` of a converted model: the cache is a `StateCache`.

    States take their places in the first call, but assisted decoding asks for a record of the
    past before it; the cache has to remember that. Copies and pickles belong to their model.

    Args:
        model: that generates.
    """

    NAME = "_prepare_cache_for_generation"

    def __init__(self, model: nn.Module) -> None:
        self.model = weakref.ref(model)  # the model holds this object: no circle

    def __reduce__(self) -> tuple[Any, ...]:
        return PrepareCache, (self.model(),)

    def __call__(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        model = self.model()
        getattr(type(model), self.NAME)(model, generation_config, model_kwargs, *args, **kwargs)
        made = model_kwargs.get("past_key_values")
        parts: tuple[Any, ...] = (made,)
        if isinstance(made, EncoderDecoderCache):
            parts = (made.self_attention_cache, made.cross_attention_cache)
        for cache in parts:
            if type(cache) is DynamicCache and not cache.offloading:
                cache.__class__ = StateCache
                if generation_config.is_assistant:
                    cache.activate_past_recording()


# ---- convert and revert ------------------------------------------------------------------


def attach(model: nn.Module, layers: dict[nn.Module, str]) -> None:
    """Lets converted layers, used as ``"causal"`` or ``"cross"``, keep states in caches."""
    for layer, use in layers.items():
        info: routing.Layer = layer.__dict__["_subquad"]
        info.caches = use
        info.hook = layer.register_forward_pre_hook(take_place, with_kwargs=True)
    held = set(map(id, layers))
    for module in model.modules():
        if hasattr(type(module), PrepareCache.NAME) and held & set(map(id, module.modules())):
            module.__dict__[PrepareCache.NAME] = PrepareCache(module)


def detach(model: nn.Module) -> None:
    """Undoes `attach`."""
    for module in model.modules():
        if isinstance(module.__dict__.get(PrepareCache.NAME), PrepareCache):
            del module.__dict__[PrepareCache.NAME]
        info = module.__dict__.get("_subquad")
        if isinstance(info, routing.Layer) and info.hook is not None:
            info.hook.remove()
            info.hook = None
