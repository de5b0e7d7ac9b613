"""`convert` and `revert`: another attention inside a model, in place, and back again."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from subquad.attention.base import Absent, Mechanism
from subquad.attention.multihead import MultiheadAttention
from subquad.convert import adapters, routing, saving
from subquad.convert.routing import SLOT, Deferred, Layer, Shared, Switch
from subquad.errors import OptionError, UnknownNameError, UnsupportedError, nearest
from subquad.options import Config, Spec
from subquad.registry import build, capable, resolve

if TYPE_CHECKING:
    from subquad.convert.calibrate import Budget, Calibration

__all__ = ["ConversionReport", "ConvertedLayer", "convert", "revert"]

_ROUTING_MODELS = "BERT, GPT-2, Llama, BART, Marian, T5, ViT, DINOv2, Whisper and ESM"


@dataclass(frozen=True)
class ConvertedLayer:
    """One converted attention module.

    Args:
        name: its name in ``model.named_modules()``.
        kind: name of its class.
        heads, kv_heads, head_dim: sizes; None if the first call will show them.
        causal: what the module declares.
        prescaled: its queries arrive multiplied by D^-½; converted layers undo that, so that
            queries and keys share the factor.
        dropout: attention dropout in training, which converted layers do not apply.
        seed: of the mechanism's random draws.
        mechanism: the layer's mechanism with its options, in the option grammar.
        use: ``"encoder"``, ``"causal"`` or ``"cross"``, see `subquad.options.Config.for_use`.
        cache: what generation keeps of past tokens: ``"constant state"``, ``"growing state"``,
            ``"keys and values"`` (for mechanisms without a state, and for exact ones), or empty
            for layers that need no cache.
    """

    name: str
    kind: str
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    causal: bool
    prescaled: bool
    dropout: float
    seed: int
    mechanism: str = ""
    use: str = "encoder"
    cache: str = ""


@dataclass(frozen=True)
class ConversionReport:
    """What `convert` did; `print` it, or read its fields.

    Args:
        mechanism: the mechanism with its options, in the option grammar; several are joined
            by " | ", each layer names its own.
        converted: the layers that now use it.
        kept: names of attention modules that keep their exact attention.
        replaced: the model had been converted before, and that conversion is gone.
        notes: what to know about this model, one sentence each.
        calibration: what ``calibrate=`` has seen and chosen.
    """

    mechanism: str
    converted: tuple[ConvertedLayer, ...]
    kept: tuple[str, ...] = ()
    replaced: bool = False
    notes: tuple[str, ...] = ()
    calibration: Calibration | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "mechanism": self.mechanism,
            "converted": [asdict(layer) for layer in self.converted],
            "kept": list(self.kept),
            "replaced": self.replaced,
            "notes": list(self.notes),
            "calibration": None if self.calibration is None else self.calibration.to_dict(),
        }

    def __str__(self) -> str:
        total = len(self.converted) + len(self.kept)
        # A calibrated layer's own choice stands with its expected error, below.
        name = self.mechanism if self.calibration is None else self.calibration.mechanism
        lines = [f"{name}: {len(self.converted)} of {total} attention layers converted"]
        width = max((len(layer.name) for layer in self.converted), default=0)
        for layer in self.converted:
            if layer.heads is None:
                sizes = "sizes at the first call"
            else:
                shared = f" on {layer.kv_heads}" if layer.kv_heads != layer.heads else ""
                sizes = f"{layer.heads}{shared} heads × {layer.head_dim}"
            flags = (", causal" if layer.causal else "") + (
                ", queries pre-scaled" if layer.prescaled else ""
            )
            flags += f", caches a {layer.cache}" if layer.cache.endswith("state") else ""
            lines.append(f"  {layer.name:<{width}}  {layer.kind}, {sizes}{flags}")
        if self.kept:
            lines.append(f"  kept exact: {', '.join(self.kept)}")
        lines += [f"  note: {note}" for note in self.notes]
        if self.calibration is not None:
            lines += [f"  {line}" for line in self.calibration.lines()]
        return "\n".join(lines)


def convert(
    model: nn.Module,
    mechanism: str | Spec | Config | Mapping[str, str | Spec | Config] = "near_far",
    *,
    where: Callable[[str, nn.Module], bool] | None = None,
    keep_exact: int | str | Sequence[str] = (),
    seed: int | Mapping[str, int] = 0,
    calibrate: Any = None,
    tokenizer: Any = None,
    target_error: float | None = None,
    budget: Budget | str | None = None,
    **options: Any,
) -> ConversionReport:
    """Swaps the attention inside a model for another mechanism, in place.

    Works on models that route through transformers' ``AttentionInterface``, whole or inside
    another module: BERT, GPT-2, Llama, BART, Marian, T5 (cross-attention), ViT, DINOv2,
    Whisper, ESM and some 340 more (`subquad.convert.coverage` lists them); by adapters on
    BLOOM, GPT-J, CodeGen, Falcon, MPNet, RoFormer, RemBERT, Megatron-BERT, TAPAS, FLAVA,
    VisualBERT and timm's ViT; and on every `torch.nn.MultiheadAttention`, in torch's own layers
    too. Each converted attention
    module gets a submodule ``subquad``, the mechanism, built with seed ``seed + index of the
    layer``; its buffers join the model's ``state_dict``. Weights are not touched. Layers left
    out by `where` keep their exact mask and output, bit for bit. A second call replaces the
    first.

    Padding masks, caches, grouped key/value heads and cross-attention work as before, as far
    as the mechanism declares them; so do sliding windows, packed sequences and chunks, where
    it takes them. Memory: with all layers converted no L×S mask is built. A converted
    `torch.nn.MultiheadAttention` returns no weights unless ``need_weights=True`` is passed.

    Attention dropout (in training) is not applied in converted layers: there are no weights to
    drop. It warns once; `ConversionReport.notes` says so beforehand.

    Args:
        model: a module that contains attention modules as above.
        mechanism: a name, a string with options or a config object; or a mapping from names of
            attention modules to these, which converts the named ones. Options left open are
            filled in for each layer's use (encoder, causal, cross-attention).
        where: ``where(name, module)`` picks attention modules by their name in
            ``model.named_modules()``; default all.
        keep_exact: names of attention modules that keep their exact attention; or how many, of
            a causal language model: those that it copies with, as `recall_layers` finds them.
        seed: determines all random draws; a mapping gives each converted layer its own.
        calibrate: inputs of the model that mechanisms take their statistics from, without
            training: an iterable of batches (mappings, tensors or tuples), or of texts. The
            model runs on them exactly, twice; padding does not count. The report then says
            which error to expect of each layer. The same seed and inputs give the same model.
        tokenizer: for texts.
        target_error: with `calibrate`, relative error of each layer's attention output. Sizes
            are chosen head by head, from a quarter to four times those given: the cheapest
            that meet the target. Heads of one layer may differ, see `Mixed`.
        budget: instead, what all layers together may cost; the best that it pays for. A
            `Budget`, or text: ``"flops:0.25"`` of exact attention's FLOPs at the length of the
            inputs, ``"bytes:0.1"`` of the bytes of its keys and values.
        options: options of the mechanism, as in `subquad.build`.

    Returns:
        What was converted, what was kept, and what to know about it.

    Raises:
        UnsupportedError: there is no attention that can be converted, the present
            implementation is neither ``sdpa`` nor ``eager``, or the mechanism cannot do what
            a picked layer needs. Nothing is changed then. A mask that only a call shows
            (sliding window, packed sequences, explicit L×S) raises in that call.
        UnknownNameError, OptionError: unknown mechanism, wrong options, nothing picked; a budget
            below the cheapest sizes. A calibration that fails leaves the model exact.
        ImportError: transformers is not installed, and the model needs it.

    Example:
        >>> import torch, subquad as sq
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
        >>> model = BertModel(config).eval()
        >>> print(sq.convert(model, "performer(features=64)", where=lambda name, m: ".1." in name))
        performer(features=64): 1 of 2 attention layers converted
          encoder.layer.1.attention.self  BertSelfAttention, 2 heads × 16
          kept exact: encoder.layer.0.attention.self
          note: attention dropout 0.1 is not applied in converted layers during training
        >>> sq.revert(model)
        1
    """
    if isinstance(keep_exact, int | float):
        from subquad.convert.recall import recall_layers

        before = revert(model) > 0
        recall = recall_layers(model, keep_exact, mechanism, where=where, seed=seed, **options)
        report = convert(
            model, mechanism, where=where, keep_exact=recall.layers, seed=seed,
            calibrate=calibrate, tokenizer=tokenizer, target_error=target_error, budget=budget,
            **options,
        )  # fmt: skip
        notes = (*report.notes, recall.note)
        return replace(report, replaced=before, notes=notes)
    if calibrate is not None:
        from subquad.convert.calibrate import convert_calibrated

        return convert_calibrated(
            model, mechanism, calibrate, tokenizer=tokenizer, target_error=target_error,
            budget=budget, seed=seed, where=where, keep_exact=keep_exact, **options,
        )  # fmt: skip
    if target_error is not None or budget is not None:
        raise OptionError("target_error and budget need calibrate=, inputs to measure errors on")
    layers = _attention_modules(model)
    picked = _picked(model, layers, mechanism, options, where, keep_exact)
    switch = _switch(model)
    _check(model, layers, picked, switch)

    # Everything is built before anything is changed: an error leaves the model as it was.
    if not isinstance(seed, Mapping):
        seed = {name: seed + position for position, (name, _) in enumerate(layers)}
    built: list[tuple[nn.Module, Mechanism | Deferred, ConvertedLayer]] = []
    shared = Shared()
    for name, layer, config in picked:
        new = _build(model, name, layer, config, seed[name])
        built.append((layer, new, _row(model, name, layer, new, config, seed[name])))
    replaced = revert(model) > 0
    for layer, new, row in built:
        layer.add_module(SLOT, new)
        adapter = adapters.find(layer)
        config = _own_configs(model, row.name, layer, switch)[0]
        layer.__dict__["_subquad"] = Layer(
            row.name, row.prescaled, shared, config=config, adapter=adapter
        )
        if adapter is not None:
            adapter.install(layer)
    if streamed := {layer: row.use for layer, _, row in built if row.cache.endswith("state")}:
        from subquad.convert import cache

        cache.attach(model, streamed)
    chosen = {row.name for _, _, row in built}
    kept = [(name, layer) for name, layer in layers if name not in chosen]
    _set_names(model, [(name, layer) for name, layer, _ in picked], kept, switch)
    saving.attach(model)
    rows = tuple(row for _, _, row in built)
    return ConversionReport(
        " | ".join(dict.fromkeys(row.mechanism for row in rows)),
        rows,
        tuple(name for name, _ in kept),
        replaced,
        tuple(_notes(rows, strict=not any(use_of(*layer, model) == "causal" for layer in kept))),
    )


def _picked(
    model: nn.Module,
    layers: list[tuple[str, nn.Module]],
    mechanism: str | Spec | Config | Mapping[str, str | Spec | Config],
    options: dict[str, Any],
    where: Callable[[str, nn.Module], bool] | None,
    keep_exact: Sequence[str],
) -> list[tuple[str, nn.Module, Config]]:
    """(name, module, config for its use) of the layers that are to be converted.

    Raises:
        UnknownNameError, OptionError: as `convert`.
    """
    known = {name for name, _ in layers}
    if isinstance(keep_exact, str):
        keep_exact = (keep_exact,)
    asked = [*keep_exact, *(mechanism if isinstance(mechanism, Mapping) else ())]
    if strange := [name for name in asked if name not in known]:
        hints = "; ".join(f"{name!r}{nearest(name, known)}" for name in strange)
        raise UnknownNameError(f"the model has no attention module {hints}")
    found: list[tuple[str, nn.Module, Config]] = []
    if isinstance(mechanism, Mapping):
        if options:
            raise OptionError("options go into each entry's spec when mechanism is a mapping")
        configs = {name: resolve(spec)[1] for name, spec in mechanism.items()}
    else:
        configs = dict.fromkeys(known, resolve(mechanism, options)[1])
    for name, layer in layers:
        if name not in configs or name in keep_exact:
            continue
        if where is None or where(name, layer):
            found.append((name, layer, configs[name].for_use(use_of(name, layer, model))))
    if not found:
        names = ", ".join(name for name, _ in layers)
        raise OptionError(
            f"where=, keep_exact= and the mapping leave none of the {len(layers)} attention "
            f"modules to convert: {names}"
        )
    return found


def revert(model: nn.Module) -> int:
    """Undoes `convert`, bit for bit: submodules, implementation names and masks.

    Converted layers outside of `model`, such as its decoder's, stay converted.

    Returns:
        The number of layers that were converted; 0 if the model was not.
    """
    count = 0
    saving.detach(model)
    if "transformers" in sys.modules:
        from subquad.convert import cache

        cache.detach(model)
    followed, adapted = list(configs(model)), False
    for module in model.modules():
        info = module.__dict__.pop("_subquad", None)
        if info is not None:
            if info.adapter is not None:
                info.adapter.remove(module)
                adapted = True
            del module._modules[SLOT]
            info.forget()
            count += 1
    for config in followed:
        original = routing.original_name(config._attn_implementation)
        if original is not None and not routing.followers(config):
            config._attn_implementation_internal = original
        elif original is not None and adapted:  # layers outside of the model go on
            config._attn_implementation_internal = f"subquad_{original}_mixed"
    return count


# ---- what the model is -------------------------------------------------------------------


def need_transformers() -> None:
    """Imports transformers and registers our names with it.

    Raises:
        ImportError: if it is not installed, naming the extra that brings it.
    """
    try:
        import transformers  # noqa: F401  # only to see whether it is there
    except ImportError as error:
        raise ImportError(
            "converting models needs transformers: pip install 'subquad[hf]'"
        ) from error
    routing.register()


def converted_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, attention module) of every converted layer."""
    return [
        (name, module) for name, module in model.named_modules() if "_subquad" in module.__dict__
    ]


def attention_names(model: nn.Module) -> list[str]:
    """Names of the modules that `convert` can convert, in the order of the model."""
    return [name for name, _ in _attention_modules(model)]


def _attention_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, module) of every module that calls the attention interface itself or has an adapter.

    Raises:
        OptionError: if `model` is no module.
        UnsupportedError: if there is none; says why.
        ImportError: if transformers is needed, or might be, and is not installed.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(f"model must be a torch.nn.Module, given {type(model).__name__}")
    found = [
        (name, module)
        for name, module in model.named_modules()
        if routing.routes(module) or adapters.find(module) is not None
    ]
    by = [adapters.find(module) for _, module in found]
    if not found or any(adapter is None or adapter.interface for adapter in by):
        need_transformers()
    if found:
        return found
    if "transformers" in sys.modules and _pretrained(model):
        reason = (
            "its attention does not go through transformers' AttentionInterface (BigBird, "
            "DeBERTa, LED and some 80 more do not) and has no adapter, so nothing can be "
            f"put in its place; {_ROUTING_MODELS} and some 340 more do: `subquad list --models`"
        )
        if any(isinstance(module, MultiheadAttention) for module in model.modules()):
            reason = (
                "its attentions are subquad's own and have their mechanisms from its config: "
                "build another model with another `mechanism` in the config, and load the weights"
            )
        reason = adapters.refusal(model) or reason
    else:
        reason = (
            "it contains no transformers model and no torch.nn.MultiheadAttention; convert "
            "works on these and on models whose attention goes through transformers' "
            f"AttentionInterface, such as {_ROUTING_MODELS}; for your own modules use "
            "subquad.MultiheadAttention, subquad.attention or subquad.swap_sdpa"
        )
    raise UnsupportedError(type(model).__name__, "conversion", reason)


def _pretrained(model: nn.Module) -> list[tuple[str, Any]]:
    if "transformers" not in sys.modules:  # nothing can be a model of it then
        return []
    from transformers import PreTrainedModel

    return [(n, m) for n, m in model.named_modules() if isinstance(m, PreTrainedModel)]


def _owner_config(model: nn.Module, name: str) -> Any:
    """The config of the innermost transformers model around a module: its masks follow it."""
    owners = dict(_pretrained(model))
    parts = name.split(".")
    for end in range(len(parts), -1, -1):
        owner = owners.get(".".join(parts[:end]))
        if owner is not None:
            return owner.config
    return None


def configs(model: nn.Module) -> Iterator[Any]:
    """Every distinct config that modules of this model hold, and the switches of others."""
    seen = set()
    for module in model.modules():
        own = (module.__dict__.get("config"), getattr(module.__dict__.get("_subquad"), "config", 0))
        for config in own:
            if hasattr(config, "_attn_implementation_internal") and id(config) not in seen:
                seen.add(id(config))
                yield config


def _switch(model: nn.Module) -> Switch:
    """What layers without a config follow: one of their own, or that of a present conversion."""
    return next((config for config in configs(model) if isinstance(config, Switch)), Switch())


def _set_names(
    model: nn.Module,
    picked: list[tuple[str, nn.Module]],
    kept: list[tuple[str, nn.Module]],
    switch: Switch,
) -> None:
    """Renames the implementation in every config that a converted layer, or its masks, follow."""
    exact = {
        id(config) for name, layer in kept for config in _own_configs(model, name, layer, switch)
    }
    for name, layer in picked:
        configs = _own_configs(model, name, layer, switch)
        mixed = any(id(config) in exact for config in configs)
        # Neighbours outside of a part that is given alone read the mask themselves.
        mixed = mixed or (adapters.find(layer) is not None and _owner_config(model, name) is None)
        for config in configs:
            now = config._attn_implementation
            original = routing.original_name(now) or now
            suffix = "_mixed" if mixed or str(now).endswith("_mixed") else ""
            config._attn_implementation_internal = f"subquad_{original}{suffix}"


def _own_configs(model: nn.Module, name: str, layer: nn.Module, switch: Switch) -> list[Any]:
    """The objects whose implementation's name this layer, or its masks, follow."""
    adapter = adapters.find(layer)
    if adapter is not None and not adapter.interface:
        return [switch]
    owner, config = _owner_config(model, name), getattr(layer, "config", None)
    if config is None or config is owner:
        return [switch if owner is None else owner]
    return [config] if owner is None else [config, owner]


_CROSS = re.compile(r"(?:^|[._])(?:encoder_attn|encdecattention|cross_?att\w*)$", re.IGNORECASE)


def use_of(name: str, layer: nn.Module, model: nn.Module | None = None) -> str:
    """``"cross"``, ``"causal"`` or ``"encoder"``: what an attention module is for.

    Args:
        name: of the module inside the model.
        layer: the module.
        model: around it; torch's decoder layers use one class for two purposes.
    """
    parent = name.rpartition(".")[0]
    adapter = adapters.find(layer)
    if adapter is not None:
        around = None if model is None else model.get_submodule(parent)
        if (use := adapter.use(name, layer, around)) is not None:
            return use
    if getattr(layer, "is_cross_attention", False) or any(map(_CROSS.search, (name, parent))):
        return "cross"
    return "causal" if bool(getattr(layer, "is_causal", False)) else "encoder"


def _check(
    model: nn.Module,
    layers: list[tuple[str, nn.Module]],
    picked: list[tuple[str, nn.Module, Config]],
    switch: Switch,
) -> None:
    chosen = {name: config for name, _, config in picked}
    for name, layer in layers:
        kind = type(layer).__name__
        now = _own_configs(model, name, layer, switch)[0]._attn_implementation
        original = routing.original_name(now) or now
        if name not in chosen:
            if original == "eager" and getattr(layer, "reorder_and_upcast_attn", False):
                raise UnsupportedError(
                    kind,
                    f"conversion without {name}",
                    "reorder_and_upcast_attn is tied to the implementation's name: convert all "
                    "layers, or call model.set_attn_implementation('sdpa') first",
                )
            continue
        found, own = resolve(chosen[name])
        have = found.capabilities_for(own)
        if not have.qkv:
            raise UnsupportedError(
                found.name,
                "taking the place of attention",
                "it mixes tokens without q, k and v",
                capable("qkv"),
            )
        if original not in routing.ORIGINALS:
            raise UnsupportedError(
                kind,
                f"conversion with attn_implementation={now!r}",
                "masks are exchanged with 'sdpa' and 'eager' only; call "
                "model.set_attn_implementation('sdpa') first",
            )
        adapter = adapters.find(layer)
        if adapter is not None:
            adapter.check(name, layer, own)
        causal = bool(getattr(layer, "is_causal", False))
        if adapter is not None and adapter.interface:  # torch's own are causal if a call says so
            causal = causal or use_of(name, layer, model) == "causal"
        if causal and isinstance(have.causal, Absent):
            raise UnsupportedError(
                found.name, f"causal attention in {name}", have.causal.reason, capable("causal")
            )
        sliding = isinstance(getattr(layer, "sliding_window", None), int)
        if sliding and isinstance(have.window, Absent):
            raise UnsupportedError(
                found.name,
                f"the sliding window of {name}",
                f"{have.window.reason}; leave such layers out with where= or keep_exact=, here "
                "where=lambda name, module: not getattr(module, 'sliding_window', None)",
                capable("window"),
            )


# ---- one layer ---------------------------------------------------------------------------

_HEAD_DIM = ("qk_head_dim", "head_dim", "attention_head_size", "key_value_proj_dim", "head_size")
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "num_attn_heads")
_QUERY, _KEY = ("q_proj", "query", "q", "wq"), ("k_proj", "key", "k", "wk")


def _integer(module: Any, names: tuple[str, ...]) -> int | None:
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _width(module: nn.Module, names: tuple[str, ...]) -> int | None:
    for name in names:
        width = getattr(getattr(module, name, None), "out_features", None)
        if isinstance(width, int):
            return width
    return None


def head_sizes(layer: nn.Module) -> tuple[int, int, int] | None:
    """(head_dim, heads, kv_heads) as the module's attributes tell; None if they do not.

    Projection widths come first, since attribute names mean different things in different
    architectures (``num_heads`` is not always there, ``config.num_key_value_heads`` neither).
    """
    adapter = adapters.find(layer)
    if adapter is not None and (sizes := adapter.sizes(layer)) is not None:
        return sizes
    head_dim = _integer(layer, _HEAD_DIM)
    if head_dim is None:
        return None
    width = _width(layer, _QUERY)
    heads = width // head_dim if width and width % head_dim == 0 else _integer(layer, _HEADS)
    heads = heads or _integer(getattr(layer, "config", None), ("num_attention_heads",))
    if heads is None:
        return None
    width = _width(layer, _KEY)
    if width and width % head_dim == 0:
        kv_heads = width // head_dim
    elif groups := _integer(layer, ("num_key_value_groups",)):
        kv_heads = heads // groups
    else:
        kv_heads = _integer(layer, ("num_key_value_heads",)) or heads
    return (head_dim, heads, kv_heads) if heads % kv_heads == 0 else None


def _build(
    model: nn.Module, name: str, layer: nn.Module, config: Config, seed: int
) -> Mechanism | Deferred:
    around = getattr(layer, "config", None) or _owner_config(model, name)
    length = _integer(around, ("max_position_embeddings", "n_positions", "max_length"))
    sizes = head_sizes(layer)
    if sizes is None:
        return Deferred(config, seed, {}, length).train(layer.training)
    head_dim, heads, kv_heads = sizes
    weight = next(layer.parameters(), None)
    dtype = weight.dtype if weight is not None else torch.float32
    return build(
        config,
        head_dim=head_dim,
        num_heads=heads,
        num_kv_heads=kv_heads,
        embed_dim=heads * head_dim,
        max_length=length,
        seed=seed,
        device=weight.device if weight is not None else None,
        # Projections in half precision would only lose digits: sums are float32 anyway.
        dtype=dtype if dtype in (torch.float32, torch.float64) else torch.float32,
    ).train(layer.training)


def _row(
    model: nn.Module,
    name: str,
    layer: nn.Module,
    new: Mechanism | Deferred,
    config: Config,
    seed: int,
) -> ConvertedLayer:
    use = use_of(name, layer, model)
    return ConvertedLayer(
        name=name,
        kind=type(layer).__name__,
        heads=new.num_heads if isinstance(new, Mechanism) else None,
        kv_heads=new.num_kv_heads if isinstance(new, Mechanism) else None,
        head_dim=new.head_dim if isinstance(new, Mechanism) else None,
        causal=use == "causal" or bool(getattr(layer, "is_causal", False)),
        prescaled=routing.prescaled(layer),
        dropout=_dropout(layer),
        seed=seed,
        mechanism=str(config),
        use=use,
        cache=_cached(config, layer, use),
    )


def _cached(config: Config, layer: nn.Module, use: str) -> str:
    """What generation keeps of past tokens, see `ConvertedLayer`."""
    if use == "encoder" or not isinstance(getattr(layer, "layer_idx", None), int):
        return ""
    found, own = resolve(config)
    have = found.capabilities_for(own)
    adapter = adapters.find(layer)
    # Modules that split heads after the cache do not pass on what it says of its place, and a
    # state serves one attention.
    through = routing.attends_once(layer) if adapter is None else adapter.interface
    # Exact mechanisms' states are keys and values, and these take position biases, too.
    if (
        not through
        or _is_windowed(layer)
        or not have.state
        or have.dense
        or (use == "cross" and not (have.read and have.cross))
    ):
        return "keys and values"
    return f"{have.state} state"


def _is_windowed(layer: nn.Module) -> bool:
    """True where transformers keeps the keys and values of a window or chunk only."""
    config = getattr(layer, "config", None)
    types = getattr(config, "layer_types", None)
    if types is not None and int(layer.layer_idx) < len(types):  # type: ignore[arg-type]  # as `_cached` found
        return types[layer.layer_idx] in ("sliding_attention", "chunked_attention")
    own = getattr(layer, "sliding_window", None)
    return own is not None or getattr(config, "sliding_window", None) is not None


def _dropout(layer: nn.Module) -> float:
    for name in ("attn_dropout", "attention_dropout", "dropout", "dropout_prob"):
        value = getattr(layer, name, None)
        value = getattr(value, "p", value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return 0.0


def _notes(rows: tuple[ConvertedLayer, ...], strict: bool) -> Iterator[str]:
    dropout = max(row.dropout for row in rows)
    if dropout:
        yield f"attention dropout {dropout:g} is not applied in converted layers during training"
    keeping = [row for row in rows if row.cache == "keys and values"]
    if keeping:
        names = ", ".join(dict.fromkeys(row.mechanism for row in keeping))
        yield (
            f"generation caches keys and values in {len(keeping)} converted layers: {names} has "
            "no smaller state to continue from there"
        )
    for spec in dict.fromkeys(row.mechanism for row in rows if row.use == "cross"):
        found, config = resolve(spec)
        alone = found.answers_alone_for(config)
        if isinstance(alone, Absent):
            yield (
                f"cross-attention by {spec}: its answer to a query depends on the other queries of "
                "the call or on their number, so that a decoder reads otherwise when it is fed a "
                f"whole sequence than when it generates ({alone.reason})"
            )
    forgets = any(row.use == "causal" and row.cache == "constant state" for row in rows)
    if strict and forgets:
        yield (
            "all layers keep a constant state: what has left it cannot be copied word for word; "
            "keep_exact=4 leaves the layers exact that copying needs most"
        )
    if any(row.heads is None for row in rows):
        yield "some mechanisms are built at the first call, which shows the sizes of their heads"
