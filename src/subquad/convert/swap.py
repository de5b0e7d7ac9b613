"""`convert` and `revert`: another attention inside a model, in place, and back again."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from subquad.attention.base import Absent, Mechanism
from subquad.convert import routing
from subquad.convert.routing import SLOT, Deferred, Layer, Shared
from subquad.errors import OptionError, UnknownNameError, UnsupportedError, nearest
from subquad.options import Config, Spec
from subquad.registry import build, capable, resolve

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
    """

    mechanism: str
    converted: tuple[ConvertedLayer, ...]
    kept: tuple[str, ...] = ()
    replaced: bool = False
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "mechanism": self.mechanism,
            "converted": [asdict(layer) for layer in self.converted],
            "kept": list(self.kept),
            "replaced": self.replaced,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        total = len(self.converted) + len(self.kept)
        lines = [f"{self.mechanism}: {len(self.converted)} of {total} attention layers converted"]
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
            lines.append(f"  {layer.name:<{width}}  {layer.kind}, {sizes}{flags}")
        if self.kept:
            lines.append(f"  kept exact: {', '.join(self.kept)}")
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def convert(
    model: nn.Module,
    mechanism: str | Spec | Config | Mapping[str, str | Spec | Config] = "near_far",
    *,
    where: Callable[[str, nn.Module], bool] | None = None,
    keep_exact: Sequence[str] = (),
    seed: int = 0,
    **options: Any,
) -> ConversionReport:
    """Swaps the attention of a transformers model for another mechanism, in place.

    Works on models that route through transformers' ``AttentionInterface``, whole or inside
    another module: BERT, GPT-2, Llama, BART, Marian, T5 (cross-attention), ViT, DINOv2,
    Whisper, ESM and some 340 more. Each converted attention module gets a submodule
    ``subquad``, the mechanism, built with seed ``seed + index of the layer``; its buffers
    join the model's ``state_dict``. Weights are not touched. Layers left out by `where` keep
    their exact mask and output, bit for bit. A second call replaces the first.

    Padding masks, caches, grouped key/value heads and cross-attention work as before, as far
    as the mechanism declares them. Memory: with all layers converted no L×S mask is built.

    Attention dropout (in training) is not applied in converted layers: there are no weights to
    drop. It warns once; `ConversionReport.notes` says so beforehand.

    Args:
        model: a transformers model, or a module that contains one.
        mechanism: a name, a string with options or a config object; or a mapping from names of
            attention modules to these, which converts the named ones. Options left open are
            filled in for each layer's use (encoder, causal, cross-attention).
        where: ``where(name, module)`` picks attention modules by their name in
            ``model.named_modules()``; default all.
        keep_exact: names of attention modules that keep their exact attention.
        seed: determines all random draws.
        options: options of the mechanism, as in `subquad.build`.

    Returns:
        What was converted, what was kept, and what to know about it.

    Raises:
        UnsupportedError: the model does not route through the interface, its present
            implementation is neither ``sdpa`` nor ``eager``, or the mechanism cannot do what
            a picked layer needs. Nothing is changed then. A mask that only a call shows
            (sliding window, packed sequences, explicit L×S) raises in that call.
        UnknownNameError, OptionError: unknown mechanism, wrong options, nothing picked.
        ImportError: transformers is not installed.

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
    need_transformers()
    layers = _attention_modules(model)
    picked = _picked(layers, mechanism, options, where, keep_exact)
    _check(layers, picked)

    # Everything is built before anything is changed: an error leaves the model as it was.
    index = {name: position for position, (name, _) in enumerate(layers)}
    built: list[tuple[nn.Module, Mechanism | Deferred, ConvertedLayer]] = []
    shared = Shared()
    for name, layer, config in picked:
        new = _build(layer, config, seed + index[name])
        built.append((layer, new, _row(name, layer, new, config, seed + index[name])))
    replaced = revert(model) > 0
    for layer, new, row in built:
        layer.add_module(SLOT, new)
        layer.__dict__["_subquad"] = Layer(row.name, row.prescaled, shared)
    chosen = {row.name for _, _, row in built}
    kept = [(name, layer) for name, layer in layers if name not in chosen]
    _set_names(model, [(name, layer) for name, layer, _ in picked], kept)
    rows = tuple(row for _, _, row in built)
    return ConversionReport(
        " | ".join(dict.fromkeys(row.mechanism for row in rows)),
        rows,
        tuple(name for name, _ in kept),
        replaced,
        tuple(_notes(rows)),
    )


def _picked(
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
            found.append((name, layer, configs[name].for_use(use_of(name, layer))))
    if not found:
        names = ", ".join(name for name, _ in layers)
        raise OptionError(
            f"where=, keep_exact= and the mapping leave none of the {len(layers)} attention "
            f"modules to convert: {names}"
        )
    return found


def revert(model: nn.Module) -> int:
    """Undoes `convert`, bit for bit: submodules, implementation names and masks.

    Returns:
        The number of layers that were converted; 0 if the model was not.
    """
    count = 0
    for module in model.modules():
        if module.__dict__.pop("_subquad", None) is not None:
            del module._modules[SLOT]
            count += 1
    for config in _configs(model):
        original = routing.original_name(config._attn_implementation)
        if original is not None:
            config._attn_implementation_internal = original
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


def _attention_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, module) of every module that calls the attention interface itself.

    Raises:
        UnsupportedError: if there is none; says why.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(f"model must be a torch.nn.Module, given {type(model).__name__}")
    found = [(name, module) for name, module in model.named_modules() if routing.routes(module)]
    if found:
        return found
    kind = type(model).__name__
    if any(isinstance(module, nn.MultiheadAttention) for module in model.modules()):
        reason = (
            "it uses torch.nn.MultiheadAttention, which convert does not swap yet; build it "
            "with subquad.MultiheadAttention, which loads the same weights"
        )
    elif "transformers" in sys.modules and _pretrained(model):
        reason = (
            "its attention does not go through transformers' AttentionInterface (RoFormer, "
            "DeBERTa, MPNet, Falcon, BLOOM, GPT-J, BigBird, LED and some 90 more do not), so "
            f"nothing can be put in its place; {_ROUTING_MODELS} and some 340 more do"
        )
    else:
        reason = (
            "it contains no transformers model; convert works on models whose attention goes "
            f"through transformers' AttentionInterface, such as {_ROUTING_MODELS}; for "
            "your own modules use subquad.MultiheadAttention or subquad.attention"
        )
    raise UnsupportedError(kind, "conversion", reason)


def _pretrained(model: nn.Module) -> list[tuple[str, Any]]:
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


def _configs(model: nn.Module) -> Iterator[Any]:
    """Every distinct config that modules of this model hold."""
    seen = set()
    for module in model.modules():
        config = module.__dict__.get("config")
        if hasattr(config, "_attn_implementation_internal") and id(config) not in seen:
            seen.add(id(config))
            yield config


def _set_names(
    model: nn.Module, picked: list[tuple[str, nn.Module]], kept: list[tuple[str, nn.Module]]
) -> None:
    """Renames the implementation in every config that a converted layer, or its masks, follow."""
    exact = {id(config) for name, layer in kept for config in _own_configs(model, name, layer)}
    for name, layer in picked:
        configs = _own_configs(model, name, layer)
        mixed = any(id(config) in exact for config in configs)
        for config in configs:
            now = config._attn_implementation
            original = routing.original_name(now) or now
            suffix = "_mixed" if mixed or str(now).endswith("_mixed") else ""
            config._attn_implementation_internal = f"subquad_{original}{suffix}"


def _own_configs(model: nn.Module, name: str, layer: nn.Module) -> list[Any]:
    owner = _owner_config(model, name)
    return [layer.config] if owner is None or owner is layer.config else [layer.config, owner]


_CROSS = re.compile(r"(?:^|[._])(?:encoder_attn|encdecattention|cross_?att\w*)$", re.IGNORECASE)


def use_of(name: str, layer: nn.Module) -> str:
    """``"cross"``, ``"causal"`` or ``"encoder"``: what an attention module is for."""
    parent = name.rpartition(".")[0]
    if getattr(layer, "is_cross_attention", False) or any(map(_CROSS.search, (name, parent))):
        return "cross"
    return "causal" if bool(getattr(layer, "is_causal", False)) else "encoder"


def _check(
    layers: list[tuple[str, nn.Module]], picked: list[tuple[str, nn.Module, Config]]
) -> None:
    chosen = {name: config for name, _, config in picked}
    for name, layer in layers:
        config: Any = layer.config
        now = config._attn_implementation
        original = routing.original_name(now) or now
        if name not in chosen:
            if original == "eager" and getattr(layer, "reorder_and_upcast_attn", False):
                raise UnsupportedError(
                    "convert",
                    f"leaving out {name}",
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
                "convert",
                f"attn_implementation={now!r}",
                "masks are exchanged with 'sdpa' and 'eager' only; call "
                "model.set_attn_implementation('sdpa') first",
            )
        if bool(getattr(layer, "is_causal", False)) and isinstance(have.causal, Absent):
            raise UnsupportedError(
                found.name, f"causal attention in {name}", have.causal.reason, capable("causal")
            )
        if isinstance(getattr(layer, "sliding_window", None), int):
            raise UnsupportedError(
                found.name,
                f"the sliding window of {name}",
                "converted layers take plain causal and bidirectional masks; leave such layers "
                "out with where=",
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
    head_dim = _integer(layer, _HEAD_DIM)
    if head_dim is None:
        return None
    width = _width(layer, _QUERY)
    heads = width // head_dim if width and width % head_dim == 0 else _integer(layer, _HEADS)
    heads = heads or _integer(layer.config, ("num_attention_heads",))
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


def _build(layer: nn.Module, config: Config, seed: int) -> Mechanism | Deferred:
    length = _integer(layer.config, ("max_position_embeddings", "n_positions", "max_length"))
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
    name: str, layer: nn.Module, new: Mechanism | Deferred, config: Config, seed: int
) -> ConvertedLayer:
    return ConvertedLayer(
        name=name,
        kind=type(layer).__name__,
        heads=new.num_heads if isinstance(new, Mechanism) else None,
        kv_heads=new.num_kv_heads if isinstance(new, Mechanism) else None,
        head_dim=new.head_dim if isinstance(new, Mechanism) else None,
        causal=bool(getattr(layer, "is_causal", False)),
        prescaled=routing.prescaled(layer),
        dropout=_dropout(layer),
        seed=seed,
        mechanism=str(config),
        use=use_of(name, layer),
    )


def _dropout(layer: nn.Module) -> float:
    for name in ("attn_dropout", "attention_dropout", "dropout", "dropout_prob"):
        value = getattr(layer, name, None)
        value = getattr(value, "p", value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return 0.0


def _notes(rows: tuple[ConvertedLayer, ...]) -> Iterator[str]:
    dropout = max(row.dropout for row in rows)
    if dropout:
        yield f"attention dropout {dropout:g} is not applied in converted layers during training"
    if any(row.heads is None for row in rows):
        yield "some mechanisms are built at the first call, which shows the sizes of their heads"
