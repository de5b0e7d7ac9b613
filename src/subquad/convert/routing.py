"""How a converted model reaches its mechanisms: names, masks and the attention function.

A transformers model that routes through ``AttentionInterface`` looks up two functions by the
name in ``config._attn_implementation``: one makes the mask, once per forward call, the other
attends, once per layer. `register` adds three names for each original implementation X:

==================  ===================================  =====================================
name                mask                                 attention
==================  ===================================  =====================================
``subquad_X``       (B, S), no L×S memory                the layer's mechanism
``subquad_X_mixed`` X's own, the (B, S) mask attached    the layer's mechanism, else X's own
``subquad_X_probe`` as mixed                             X's own; shows each call to `probing`
==================  ===================================  =====================================

A layer is converted when it has a submodule named `SLOT`. The name alone says what was there
before, so reverting needs no record. Modules that do not route follow the same names, in the
config around them or in a `Switch`, and come in by `attend`: see `subquad.convert.adapters`.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from subquad.attention.base import Absent, Mechanism
from subquad.attention.masks import Mask, recognised
from subquad.errors import ShapeError, UnsupportedError
from subquad.registry import build, capable

__all__ = [
    "ORIGINALS",
    "SLOT",
    "Deferred",
    "Switch",
    "attend",
    "is_exact",
    "original_name",
    "probing",
    "register",
    "routes",
]

SLOT = "subquad"
"""Name of the submodule that holds a converted layer's mechanism."""

ORIGINALS = ("sdpa", "eager")
"""Implementations that can be converted from."""

ROUTE = re.compile(
    r"ALL_ATTENTION_FUNCTIONS\s*\.get_interface\(\s*"
    r"(?:self\.)?config\._attn_implementation\s*,\s*(?P<eager>\w+)"
)
# Whisper's and ESM's kind: the query is multiplied by D^-½ before the call, which gets scaling=1.
_PRESCALED = re.compile(
    r"quer\w*\s*=[^=\n]*\*\s*\(?\s*self\.(?:scal(?:e|ing)\b|attention_head_size\s*\*\*)"
)


@cache
def _source_of(cls: Hashable) -> str:
    """Source of the class, or of the first base class that routes."""
    for base in cast(type, cls).__mro__:
        if not issubclass(base, nn.Module) or base is nn.Module:
            break
        try:
            text = inspect.getsource(base)
        except (OSError, TypeError):
            continue
        if ROUTE.search(text):
            return text
    return ""


def _source(module: nn.Module) -> str:
    return _source_of(cast(Hashable, type(module)))


def routes(module: nn.Module) -> bool:
    """True when this very module calls transformers' attention interface."""
    return bool(_source(module)) and getattr(module, "config", None) is not None


def prescaled(module: nn.Module) -> bool:
    """True when the module multiplies its queries by D^-½ itself and then asks for scaling=1."""
    return says_prescaled(_source(module), getattr(module, "scaling", None))


def says_prescaled(source: str, scaling: float | None = None) -> bool:
    """`prescaled` of a class by its source, and a module's ``scaling`` where there is one."""
    # The call says scaling=1.0, or passes self.scaling that was set to 1.0.
    unit = scaling == 1.0 or "scaling=1.0" in source or "self.scaling = 1.0" in source
    return unit and _PRESCALED.search(source) is not None


def attends_once(module: nn.Module) -> bool:
    """True when the keys that a routing module caches serve one attention in each call.

    DiffLlama attends twice, Gemma 3n and Gemma 4 hand keys on to later layers.
    """
    source = _source(module)
    return len(re.findall(r"attention_interface\(", source)) == 1 and "kv_shared" not in source


def original_name(implementation: str | None) -> str | None:
    """The implementation that a registered name stands for; None for any other name."""
    match = re.fullmatch(r"subquad_(\w+?)(?:_mixed|_probe)?", implementation or "")
    return match.group(1) if match and match.group(1) in ORIGINALS else None


def register() -> None:
    """Registers the attention and mask functions with transformers; again is harmless."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for original in ORIGINALS:
        for name, attend, mask in (
            (f"subquad_{original}", _attend, _flat_mask),
            (f"subquad_{original}_mixed", _attend, _mixed_mask),
            (f"subquad_{original}_probe", _probe, _mixed_mask),
        ):
            AttentionInterface.register(name, partial(attend, original))
            AttentionMaskInterface.register(name, partial(mask, original))


# ---- masks -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Carried:
    """What a mask tensor says, attached to it; a converted layer reads this, not the tensor.

    Args:
        causal: no query reads a later key.
        key: (B, S) bool, or None when no key is masked.
        window: keys to the left and right, or None where all keys are within.
        segments: numbers of packed sequences or chunks, (B, L) and (B, S).
        other: what else was asked for and no `Mask` can say, in words.
        stop: number of leading keys that exist; the rest of a static cache is empty.
        make: makes the original implementation's own mask, where the tensor is not that.
    """

    causal: bool
    key: Tensor | None = None
    window: tuple[int, int] | None = None
    segments: tuple[Tensor, Tensor] | None = None
    other: str | None = None
    stop: int | None = None
    make: Callable[[], Tensor | None] | None = None

    @property
    def plain(self) -> bool:
        """True where the key mask and the direction say it all."""
        return self.window is None and self.segments is None and self.other is None


def _carried(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any,
    kv_offset: int,
    mask_function: Any,
    attention_mask: Tensor | None,
) -> _Carried:
    key = attention_mask
    if key is not None:
        missing = kv_length + kv_offset - key.shape[-1]
        if missing > 0:
            key = nn.functional.pad(key, (0, missing))
        key = key[:, kv_offset : kv_offset + kv_length].bool()
        if not torch.compiler.is_compiling() and bool(key.all()):
            key = None
    found = _said(mask_function)
    if isinstance(found, str):
        return _Carried(False, key, other=found)
    causal = found.get("causal", False)
    stop = int(q_offset) + q_length - kv_offset if causal else kv_length
    window: tuple[int, int] | None = found.get("window")
    if window is not None and max(q_length, kv_length) <= window[0] + 1:
        window = None  # every key is within
    segments: Tensor | tuple[Tensor, Tensor] | None = found.get("packed")
    if "chunks" in found:
        size, padding = found["chunks"]
        starts = [int(q_offset), kv_offset]
        lengths = [q_length, kv_length]
        segments = cast(
            "tuple[Tensor, Tensor]",
            tuple(
                torch.arange(start, start + length, device=padding.device)
                .sub(padding[:, None])
                .div(size, rounding_mode="floor")
                .expand(batch_size, -1)
                for start, length in zip(starts, lengths, strict=True)
            ),
        )
    elif isinstance(segments, Tensor):  # as many queries as keys: there is no cache then
        segments = (segments.expand(batch_size, -1),) * 2
    return _Carried(
        causal, key, window, segments, stop=stop if causal and stop < kv_length else None
    )


def _said(mask_function: Any) -> dict[str, Any] | str:
    """The parts of a transformers mask function, or what it is in words.

    Parts are ``causal``, ``window`` (left, right), ``packed`` (B, S) and ``chunks`` (size, left
    padding). Functions are told by name: the library builds them as closures, and what they
    close over is all they say. Within a packed sequence positions count up by one, so that
    remapping positions changes neither the causal part nor a window.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if mask_function is bidirectional_mask_function:
        return {}
    if mask_function is causal_mask_function:
        return {"causal": True}
    if torch.compiler.is_compiling():  # which cannot read what a function closes over
        return (
            "a mask other than causal or bidirectional under torch.compile (transformers "
            "guesses packed sequences there unless attention_mask= is passed)"
        )
    name = str(getattr(mask_function, "__qualname__", mask_function)).partition(".")[0]
    cells = getattr(mask_function, "__closure__", None) or ()
    values = [cell.cell_contents for cell in cells]
    held = dict(zip(mask_function.__code__.co_freevars, values, strict=True)) if cells else {}
    if getattr(mask_function, "__module__", "") != "transformers.masking_utils":
        return f"the model's own mask function {name}"
    match name:
        case "and_masks":
            found: dict[str, Any] = {}
            for part in held["mask_functions"]:
                said = _said(part)
                if isinstance(said, str):
                    return said
                if said.keys() & found.keys() - {"causal"}:
                    return "two windows or packings at once"
                found |= said
            return found
        case "sliding_window_overlay":  # comes with a causal part, which closes the right side
            return {"window": (held["sliding_window"] - 1, 0)}
        case "sliding_window_bidirectional_overlay":
            return {"window": (held["sliding_window"],) * 2}
        case "packed_sequence_mask_function":
            return {"packed": held["packed_sequence_mask"].long()}
        case "remap_positions_for_packed_sequence":
            return _said(held["mask_function"])
        case "chunked_overlay":
            return {"chunks": (held["chunk_size"], held["left_padding"])}
        case "blockwise_overlay" | "or_masks":
            return "a mask that opens blocks of later keys"
    return f"the mask function {name}"


def _flat_mask(
    original: str,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor | None:
    """The (B, S) mask, or None where that means the same; O(B·S) memory."""
    _refuse_record(options.get("config"), "the model")
    arguments = (batch_size, q_length, kv_length, q_offset, kv_offset, mask_function)
    carried = _carried(*arguments, attention_mask)
    direction = "causal" if carried.causal else "bidirectional"
    skip = options.get(f"allow_is_{direction}_skip", True)
    if carried.other is not None or not skip:  # the model may go on to use the L×S mask itself
        return _mixed_mask(original, *arguments, attention_mask, **options)
    mask = carried.key
    if mask is None:
        if carried.plain and not carried.causal:
            return None
        mask = torch.ones(1, 1, dtype=torch.bool, device=options.get("device", "cpu"))
        mask = mask.expand(batch_size, kv_length)
    make = partial(_mixed_mask, original, *arguments, attention_mask, **options)
    mask._subquad = replace(carried, make=make)  # type: ignore[attr-defined]  # travels with it
    return mask


def _mixed_mask(
    original: str,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor | None:
    """The original implementation's mask, with what converted layers need attached."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    mask: Tensor | None = ALL_MASK_ATTENTION_FUNCTIONS[original](
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **options,
    )
    if mask is not None:
        mask._subquad = _carried(  # type: ignore[attr-defined]  # travels with the tensor
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask
        )
    return mask


def _refuse_record(config: Any, kind: str) -> None:
    """Raises where a config says that its model is converted, and the model is not.

    ``from_config`` does not read the record that `subquad.convert.saving` writes.
    """
    held = getattr(config, "quantization_config", None)
    if isinstance(held, dict) and held.get("quant_method") == SLOT:
        raise UnsupportedError(
            kind,
            "attention by a converted model's config alone",
            "the mechanisms come with from_pretrained; for new weights call subquad.convert on "
            "this model",
        )


def _original_mask(mask: Tensor | Mask | None) -> Tensor | Mask | None:
    """The original implementation's mask, for a layer that is exact where others are not.

    `convert` sees the model that it is given: layers outside of it that follow the same config
    (another stack, another model) meet a (B, S) mask. All of them share what is made here.
    """
    carried: _Carried | None = getattr(mask, "_subquad", None)
    if carried is None or carried.make is None:
        return mask
    made = carried.make()
    mask._subquad = replace(carried, make=lambda: made)  # type: ignore[union-attr]  # a tensor
    return made


class _Reading(NamedTuple):
    """A mask as a mechanism takes it, and the number of keys that exist."""

    mask: Mask
    stop: int | None


def _read_mask(
    original: str,
    name: str,
    module: nn.Module,
    tensor: Tensor | Mask | None,
    is_causal: bool | None,
    queries: int,
    keys: int,
) -> _Reading:
    """What the mask argument of an attention call means for a converted layer."""
    if isinstance(tensor, Mask):  # adapters may have read it themselves
        return _Reading(tensor, None)
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    if tensor is None:
        # Eager attention then sees all keys. sdpa goes by is_causal: one query sees all keys,
        # several are aligned with the first keys (the rest of a static cache is empty).
        causal = is_causal and queries > 1 and original != "eager"
        return _Reading(Mask(causal=causal), queries if causal and queries < keys else None)
    carried: _Carried | None = getattr(tensor, "_subquad", None)
    if carried is not None:
        if carried.other is not None:
            raise UnsupportedError(
                name,
                f"{carried.other} in {type(module).__name__}",
                "no subquad.Mask can say it; leave such layers out with where= or keep_exact=",
            )
        key, segments = carried.key, carried.segments
        if carried.stop is not None:
            key = key if key is None else key[:, : carried.stop]
            segments = segments and (segments[0], segments[1][:, : carried.stop])
        mask = Mask(causal=carried.causal, key=key, window=carried.window, segments=segments)
        return _Reading(mask, carried.stop)
    if tensor.dim() == 2:
        return _Reading(Mask(causal=is_causal, key=tensor[:, -keys:].bool()), None)
    if tensor.dim() != 4:
        raise ShapeError(
            f"attention_mask must be (B, S) or (B, 1, L, S), given {tuple(tensor.shape)}"
        )
    return _Reading(recognised(tensor[..., :keys].expand(-1, -1, queries, -1)), None)


# ---- states ------------------------------------------------------------------------------


def mark(tensor: Tensor, place: Any) -> Tensor:
    """Attaches the place in a cache that keys or values came through; returns the tensor."""
    tensor._subquad_place = place  # type: ignore[attr-defined]  # travels with the tensor
    return tensor


def _place_of(*tensors: Tensor) -> Any:
    """The `StateLayer` that keys or values came through; None where they are all there is."""
    # Some modules normalise the keys after the cache: the values still say it.
    return next((p for t in tensors if (p := getattr(t, "_subquad_place", None)) is not None), None)


# ---- attention ---------------------------------------------------------------------------

_STRUCTURED = {
    "window": "the sliding window",
    "segments": "packed sequences or chunks",
}
_FOREIGN = {
    "softcap": "soft-capped logits",
    "s_aux": "attention sinks (s_aux)",
    "cache": "a paged cache",
}


@dataclass(eq=False)
class Shared:
    """What all layers of one conversion share."""

    warned: bool = False


@dataclass(eq=False)
class Layer:
    """What a converted layer knows beside its mechanism.

    Args:
        name: the module's name inside the model.
        prescaled: queries arrive multiplied by D^-½, with scaling=1.
        shared: see `Shared`.
        config: the object whose ``_attn_implementation`` says which way the layer takes: the
            transformers config of the model around it, or a `Switch`.
        adapter: what reaches the mechanism where the module does not route by itself.
        caches: ``"causal"`` or ``"cross"`` where a generation cache holds the mechanism's state
            in place of keys and values; else empty.
        hook: handle of the hook that puts the state there.
    """

    name: str
    prescaled: bool
    shared: Shared
    config: Any = None
    adapter: Any = None
    caches: str = ""
    hook: Any = None

    def __post_init__(self) -> None:
        _LAYERS.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:  # of copies and pickles
        self.__dict__.update(state)
        _LAYERS.add(self)

    def forget(self) -> None:
        """The layer is exact again."""
        _LAYERS.discard(self)


_LAYERS: weakref.WeakSet[Layer] = weakref.WeakSet()


def followers(config: Any) -> list[Layer]:
    """Converted layers, of any model, that go by this config."""
    return [layer for layer in _LAYERS if layer.config is config]


@dataclass(eq=False)
class Switch:
    """Holds the implementation's name for modules that follow no transformers config."""

    _attn_implementation_internal: str = "sdpa"

    @property
    def _attn_implementation(self) -> str:
        return self._attn_implementation_internal


class Deferred(nn.Module):
    """Holds a mechanism's place until the first call shows the sizes of the heads.

    Args:
        spec: name, spec or config of the mechanism.
        seed: determines its random draws.
        options: the mechanism's options.
        max_length: for mechanisms that need it.
    """

    def __init__(
        self, spec: Any, seed: int, options: dict[str, Any], max_length: int | None
    ) -> None:
        super().__init__()
        self.spec, self.seed, self.options, self.max_length = spec, seed, options, max_length

    def build(self, q: Tensor, k: Tensor, v: Tensor) -> Mechanism:
        """The mechanism for these heads, on their device."""
        return build(
            self.spec,
            head_dim=q.shape[-1],
            num_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            value_dim=v.shape[-1],
            embed_dim=q.shape[1] * q.shape[-1],
            max_length=self.max_length,
            seed=self.seed,
            device=q.device,
            dtype=q.dtype if q.dtype in (torch.float32, torch.float64) else torch.float32,
            **self.options,
        ).train(self.training)


def exact_attention(original: str, module: nn.Module) -> Callable[..., Any]:
    """The attention function that the module had before; for an adapted one, plain softmax.

    Raises:
        UnsupportedError: if the module's own eager function cannot be found.
    """
    info = module.__dict__.get("_subquad")
    if isinstance(info, Layer) and info.adapter is not None:
        return partial(_softmax, original)
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if original != "eager":
        found: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[original]
        return found
    match = ROUTE.search(_source(module))
    for base in type(module).__mro__:
        eager = getattr(sys.modules.get(base.__module__), match["eager"] if match else "", None)
        if eager is not None:
            return eager
    raise UnsupportedError(
        type(module).__name__,
        "conversion from eager attention",
        "its eager function was not found; call model.set_attn_implementation('sdpa') first",
    )


def _softmax(
    original: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    **kw: Any,
) -> tuple[Tensor, None]:
    """Exact attention with the mechanisms' reading of masks."""
    heads = {"head_dim": query.shape[-1], "num_heads": query.shape[1], "num_kv_heads": key.shape[1]}
    kw.pop("dropout", None)
    exact = build("softmax", **heads)
    out = mechanism_attention(original, module, exact, query, key, value, *args, **kw)
    return out.transpose(1, 2), None


def attend(
    layer: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | Mask | None = None,
    **options: Any,
) -> Tensor:
    """What adapters call: the output (B, H, L, V) of an adapted layer's mechanism.

    While `probing` under a ``_probe`` name it is the exact output, and is shown to watchers.
    `mask` and `options` (``scaling``, ``dropout``, ``is_causal``, ``position_bias``) mean what
    they mean in transformers' attention functions; a `Mask` is taken as it is.
    """
    name = implementation(layer)
    function = _probe if name.endswith("_probe") else _attend
    out, _ = function(original_name(name) or "sdpa", layer, q, k, v, mask, **options)
    return out.transpose(1, 2)


def implementation(layer: nn.Module) -> str:
    """The present implementation's name of a converted layer; without prefix: exact."""
    return str(layer.__dict__["_subquad"].config._attn_implementation)


def is_exact(layer: nn.Module) -> bool:
    """True while an adapted layer is to run its own attention."""
    return original_name(implementation(layer)) is None


def mechanism_attention(
    original: str,
    layer: nn.Module,
    mechanism: Mechanism,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | Mask | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **extra: Any,
) -> Tensor:
    """A converted layer's output (B, H, L, V), from the arguments of an attention call.

    Raises:
        UnsupportedError: for masks, biases and logit transforms that the mechanism cannot take.
    """
    name = mechanism.name
    for argument, words in _FOREIGN.items():
        if extra.get(argument) is not None:
            raise UnsupportedError(
                name,
                f"{words} in {type(layer).__name__}",
                "leave such layers out with where= or keep_exact=",
            )
    place = _place_of(k, v)
    mask, stop = _read_mask(
        original, name, layer, attention_mask, is_causal, q.shape[2], k.shape[2]
    )
    if stop is not None:
        k, v = k[:, :, :stop], v[:, :, :stop]
    if mask.dense is not None and not mechanism.capabilities.dense:
        raise UnsupportedError(
            name,
            f"an explicit (B, 1, L, S) mask in {type(layer).__name__}",
            "it is neither causal nor bidirectional with padded keys",
            capable("dense"),
        )
    for kind, words in _STRUCTURED.items():
        support = getattr(mechanism.capabilities, kind)
        if kind in mask.kinds() and isinstance(support, Absent):
            raise UnsupportedError(
                name,
                f"{words} in {type(layer).__name__}",
                f"{support.reason}; leave such layers out with where= or keep_exact=",
                capable(kind),
            )
    bias = extra.get("position_bias")
    if bias is not None and bool(bias.any()):
        mask = _with_bias(name, mechanism, layer, mask, bias[..., : k.shape[2]])
    if q.shape[0] != k.shape[0]:  # learned queries with batch 1
        q = q.expand(max(q.shape[0], k.shape[0]), -1, -1, -1)
        k, v = (t.expand(q.shape[0], -1, -1, -1) for t in (k, v))
    info = layer.__dict__.get("_subquad")
    if scaling == 1.0 and isinstance(info, Layer) and info.prescaled:
        # Gives q its D^½ back: features see q and k each scaled by D^-¼, not q by D^-½ and k by 1.
        q, scaling = q * q.shape[-1] ** 0.5, q.shape[-1] ** -0.5
    if place is not None:
        out: Tensor = place.attend(mechanism, q, k, v, mask, scaling)
        return out
    return mechanism(q, k, v, mask=mask, scale=scaling)


def _with_bias(name: str, mechanism: Mechanism, layer: nn.Module, mask: Mask, bias: Tensor) -> Mask:
    if not mechanism.capabilities.dense:
        cross = " (cross-attention has no bias: where=lambda name, module: 'EncDec' in name)"
        hint = cross if "T5" in type(layer).__name__ else ""
        raise UnsupportedError(
            name,
            f"the L×S position bias of {type(layer).__name__}",
            "it is a function of positions, the mechanism's sums are of q and k; leave such layers "
            f"out with where= or keep_exact={hint}",
            capable("dense"),
        )
    dense = bias
    if mask.dense is not None:
        opened = mask.dense if mask.dense.dtype == torch.bool else mask.dense > float("-inf")
        dense = bias.masked_fill(~opened, float("-inf"))
    return replace(mask, dense=dense)


def _attend(
    original: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Mask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **extra: Any,
) -> tuple[Tensor, Tensor | None]:
    mechanism = module._modules.get(SLOT)
    if mechanism is None:
        _refuse_record(getattr(module, "config", None), type(module).__name__)
        if (place := _place_of(key, value)) is not None:
            raise UnsupportedError(
                type(module).__name__,
                f"the keys of {place.name}",
                "that layer keeps a state in their place; convert neither or pass use_cache=False",
            )
        exact: tuple[Tensor, Tensor | None] = exact_attention(original, module)(
            module,
            query,
            key,
            value,
            _original_mask(attention_mask),
            dropout=dropout,
            scaling=scaling,
            **_given(is_causal),
            **extra,
        )
        return exact
    if isinstance(mechanism, Deferred):
        mechanism = mechanism.build(query, key, value)
        module._modules[SLOT] = mechanism
    assert isinstance(mechanism, Mechanism)
    if dropout > 0.0:
        _warn_dropout(module, mechanism, dropout)
    out = mechanism_attention(
        original, module, mechanism, query, key, value, attention_mask, scaling, is_causal, **extra
    )
    return out.transpose(1, 2).contiguous(), None


def _given(is_causal: bool | None) -> dict[str, bool]:
    # Eager functions take no is_causal of their own: pass it on only where the model did.
    return {} if is_causal is None else {"is_causal": is_causal}


def _warn_dropout(module: nn.Module, mechanism: Mechanism, dropout: float) -> None:
    info = module.__dict__.get("_subquad")
    if isinstance(info, Layer) and not info.shared.warned:
        info.shared.warned = True
        why = "there are no attention weights to drop"
        if hasattr(mechanism.config, "dropout"):
            why = f"it drops by its own option, dropout={dropout:g}"
        warnings.warn(
            f"attention dropout {dropout:g} is not applied in layers converted to "
            f"{mechanism.name!r}: {why}. Other dropout is unchanged. (Said once per conversion.)",
            UserWarning,
            stacklevel=2,
        )


# ---- probing -----------------------------------------------------------------------------

_Watcher = Callable[[nn.Module, Callable[[], Tensor], Tensor, Tensor, Mask, "int | None"], None]
_watchers: list[_Watcher] = []


@contextlib.contextmanager
def probing(watch: _Watcher) -> Iterator[None]:
    """While active, every converted layer's call under a ``_probe`` name is shown to `watch`.

    `watch` gets the layer, a function that computes the mechanism's output (B, H, L, V) on
    the exact run's q, k, v, the exact output of that shape, the values (B, Hkv, S, V), the
    mask and the number of keys that exist (None: all).
    """
    _watchers.append(watch)
    try:
        yield
    finally:
        _watchers.remove(watch)


def _probe(
    original: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Mask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **extra: Any,
) -> tuple[Tensor, Tensor | None]:
    exact: tuple[Tensor, Tensor | None] = exact_attention(original, module)(
        module,
        query,
        key,
        value,
        attention_mask,
        dropout=dropout,
        scaling=scaling,
        **_given(is_causal),
        **extra,
    )
    mechanism = module._modules.get(SLOT)
    if mechanism is not None and _watchers:
        if isinstance(mechanism, Deferred):
            mechanism = mechanism.build(query, key, value)
            module._modules[SLOT] = mechanism
        built = mechanism
        mask, stop = _read_mask(
            original,
            str(built.name),
            module,
            attention_mask,
            is_causal,
            query.shape[2],
            key.shape[2],
        )

        def run() -> Tensor:
            assert isinstance(built, Mechanism)
            return mechanism_attention(
                original,
                module,
                built,
                query,
                key,
                value,
                attention_mask,
                scaling,
                is_causal,
                **extra,
            )

        for watch in tuple(_watchers):
            watch(module, run, exact[0].transpose(1, 2), value, mask, stop)
    return exact
