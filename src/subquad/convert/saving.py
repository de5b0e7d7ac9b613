"""Converted models on disk: `save_pretrained` writes them, `from_pretrained` reads them again.

`convert` gives each transformers model in which it converts a layer its own
``save_pretrained``. Beside transformers' files, all weights in safetensors, that writes

- ``config.json``: an entry ``quantization_config`` with the record of the conversion, a plain
  table {layer: mechanism}. transformers looks a loader up by its ``quant_method``, "subquad":
  `Loader` puts the mechanisms into the empty model, and transformers then fills their buffers
  and parameters from the file like any other. An entry ``attn_implementation`` makes a process
  that does not know subquad stop with an error (*attn_implementation="subquad_sdpa" is not
  supported*) where it would otherwise run exact attention. To read only the weights, pass
  ``attn_implementation="sdpa"`` there.
- ``README.md``: a section between two marks, kept up to date; the rest of the file is yours.

``import subquad`` is all that a loading process needs, before transformers or after: where
transformers is not imported yet, `announce` waits for the module that holds its loaders.

Other modules, such as a converted ``torch.nn.TransformerEncoder``, have no ``save_pretrained``.
For them convert a fresh module in the same way and load the ``state_dict``: the mechanisms'
buffers are in it.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from subquad.attention.base import Mechanism
from subquad.convert import routing
from subquad.convert.routing import SLOT, Deferred
from subquad.errors import OptionError, SubquadError, UnsupportedError
from subquad.options import format_value
from subquad.registry import describe

if TYPE_CHECKING:
    from subquad.convert.swap import ConversionReport

__all__ = [
    "COMPARISON",
    "METHOD",
    "RECIPE",
    "SavePretrained",
    "announce",
    "card",
    "fingerprint",
    "record",
    "remember",
]

METHOD = "subquad"
"""Name of the loader in config.json."""
COMPARISON = "_subquad_comparison"
"""Attribute of a converted model: `Comparison.summary` of the latest comparison."""
MEASURED = "_subquad_measured"
"""Attribute of a converted model: `fingerprint` of the weights that were compared."""
RECIPE = "_subquad_recipe"
"""Attribute of a converted model: how it was trained since, {what: plain value}."""

_LOADERS = "transformers.quantizers.auto"
_MARKS = ("<!-- subquad: this section is written by save_pretrained -->", "<!-- /subquad -->")


# ---- saving --------------------------------------------------------------------------------


class SavePretrained:
    """``model.save_pretrained`` of a converted model; takes the same arguments.

    Example:
        >>> import tempfile, torch, subquad as sq
        >>> from transformers import AutoModel, BertConfig, BertModel
        >>> config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
        >>> model = BertModel(config).eval()
        >>> _ = sq.convert(model, "performer(features=64)")
        >>> ids = torch.arange(12)[None]
        >>> with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        ...     model.save_pretrained(folder)
        ...     again = AutoModel.from_pretrained(folder)
        ...     torch.equal(again(ids).last_hidden_state, model(ids).last_hidden_state)
        True
    """

    # An object, not a closure: copies and pickles of the model get one that saves the copy.
    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(
        self, save_directory: Any, is_main_process: bool = True, *args: Any, **options: Any
    ) -> None:
        """Saves weights, configuration with the conversion's record, and the model card.

        Raises:
            UnsupportedError: the model's weights are quantised: there is room for one record.
        """
        model, config = self.model, self.model.config
        if not _converted(model):  # its parts were reverted one by one
            type(model).save_pretrained(model, save_directory, is_main_process, *args, **options)
            return
        held = config.__dict__.get("quantization_config")
        if held is not None:
            held = held if isinstance(held, dict) else held.to_dict()
            method = held.get("quant_method")
            raise UnsupportedError(
                type(model).__name__,
                f"saving a conversion with weights quantised by {getattr(method, 'value', method)}",
                "config.json has room for one of both; move the weights into a plain model "
                "first: config.quantization_config removed, type(model)(config), "
                "load_state_dict, convert",
            )
        now = config._attn_implementation
        own = {
            "quantization_config": record(model),
            # Also where converted layers follow a config inside of this one, or none.
            "attn_implementation": f"subquad_{routing.original_name(now) or now}",
        }
        config.__dict__.update(own)
        try:
            type(model).save_pretrained(model, save_directory, is_main_process, *args, **options)
        finally:
            for name in own:
                del config.__dict__[name]
        folder = Path(save_directory)
        # Adapters of peft are saved alone, without their model's configuration.
        if is_main_process and not getattr(model, "_hf_peft_config_loaded", False):
            _write_card(folder / "README.md", card(model))


def attach(model: nn.Module) -> None:
    """Gives every transformers model with a converted layer inside its `SavePretrained`."""
    if "transformers" in sys.modules:
        _see_wholes()
    for module in _pretrained(model):
        if any("_subquad" in inner.__dict__ for inner in module.modules()):
            module.__dict__["save_pretrained"] = SavePretrained(module)
            # The record of an earlier conversion, in a model made from its config alone.
            held = module.config.__dict__.get("quantization_config")
            if isinstance(held, dict) and held.get("quant_method") == METHOD:
                del module.config.quantization_config


@functools.cache
def _see_wholes() -> None:
    """Lets models around a part that was converted alone save it too: `convert` never saw them."""
    from transformers import PreTrainedModel

    original = PreTrainedModel.save_pretrained

    @functools.wraps(original)
    def save_pretrained(self: Any, *args: Any, **options: Any) -> None:
        if "save_pretrained" not in self.__dict__ and _converted(self):
            attach(self)
            self.save_pretrained(*args, **options)
            return
        original(self, *args, **options)

    PreTrainedModel.save_pretrained = save_pretrained  # type: ignore[method-assign]


def detach(model: nn.Module) -> None:
    """Undoes `attach` and forgets what was measured."""
    for module in model.modules():
        for name in ("save_pretrained", COMPARISON, MEASURED, RECIPE):
            module.__dict__.pop(name, None)


def remember(model: nn.Module, summary: dict[str, Any]) -> None:
    """Keeps a comparison for the model card, and which weights it is of."""
    model.__dict__[COMPARISON] = summary
    model.__dict__[MEASURED] = fingerprint(model)


def fingerprint(model: nn.Module) -> int:
    """A number that changes when the model is trained: a sum over the bits of all its tensors.

    Integers add in any order, so that neither threads nor devices matter.
    """
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    total = 0
    for index, tensor in enumerate((*model.parameters(), *model.buffers()), 1):
        if tensor.numel() and not tensor.is_meta and tensor.element_size() in kinds:
            bits = tensor.detach().contiguous().view(kinds[tensor.element_size()])
            total += index * int(bits.sum(dtype=torch.int64))
    return total % 2**53  # exact in JSON


def _pretrained(model: nn.Module) -> Iterator[Any]:
    if "transformers" in sys.modules:
        from transformers import PreTrainedModel

        yield from (module for module in model.modules() if isinstance(module, PreTrainedModel))


def _converted(model: nn.Module) -> list[tuple[str, Mechanism | Deferred]]:
    found: list[tuple[str, Any]] = [
        (name, module._modules[SLOT])
        for name, module in model.named_modules()
        if "_subquad" in module.__dict__
    ]
    return found


def record(model: nn.Module) -> dict[str, Any]:
    """What `config.json` says of a converted model, plain values.

    ``layers`` names each converted module's mechanism, in the option grammar; ``seeds`` its
    seed. ``options`` spells out what these leave open, defaults and all, so that a version with
    other defaults is found out. ``sizes`` has (head_dim, heads, kv_heads, value_dim) of
    mechanisms that are built, ``dtypes`` the precision of those that were cast to half.
    ``comparison`` and ``recipe`` are what was measured and how it was trained, if it was;
    ``measured`` is the `fingerprint` of the weights that were measured.
    """
    # Names are those inside `model`, which may be a part of the model that was converted.
    found = _converted(model)
    sizes = {
        name: [mech.head_dim, mech.num_heads, mech.num_kv_heads, mech.value_dim]
        for name, mech in found
        if isinstance(mech, Mechanism)
    }
    dtypes = {name: _precision(mech) for name, mech in found}
    options: dict[str, list[Any]] = {}
    for _, mech in found:
        if isinstance(mech, Mechanism):
            same = options.setdefault(str(mech.config), [])
            if (tree := _options(mech)) not in same:
                same.append(tree)
    about: dict[str, Any] = {
        "quant_method": METHOD,
        "version": sys.modules["subquad"].__dict__["__version__"],
        "layers": {
            name: str(mech.config if isinstance(mech, Mechanism) else mech.spec)
            for name, mech in found
        },
        "seeds": {name: mech.seed for name, mech in found},
        "options": options,
        "sizes": sizes,
        "dtypes": {k: v for k, v in dtypes.items() if v in ("float16", "bfloat16")},
    }
    if (summary := model.__dict__.get(COMPARISON)) is not None:
        about["comparison"] = summary
        about["measured"] = model.__dict__.get(MEASURED)
    if (recipe := model.__dict__.get(RECIPE)) is not None:
        about["recipe"] = [[what, value] for what, value in recipe.items()]  # keeps the order
    return about


def _options(mechanism: Mechanism) -> dict[str, dict[str, str]]:
    """All options of a mechanism and of those inside it, by the path of the submodule."""
    return {
        path: {
            name: format_value(getattr(module.config, name))
            for name in module.config.option_names()
        }
        for path, module in mechanism.named_modules()
        if isinstance(module, Mechanism)
    }


def _precision(module: nn.Module) -> str:
    tensors = (*module.parameters(), *module.buffers())
    dtype = next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)
    return str(dtype).removeprefix("torch.")


# ---- the model card ------------------------------------------------------------------------


def card(model: nn.Module) -> str:
    """The section of the model card, in Markdown."""
    found = _converted(model)
    about = record(model)
    groups: dict[str, list[str]] = {}
    for name, spec in about["layers"].items():
        groups.setdefault(spec, []).append(name)
    config = getattr(model, "config", None)
    length = int(getattr(config, "max_position_embeddings", None) or 2048)
    lines = [
        "## Attention",
        "",
        f"{len(found)} attention layers of this {type(model).__name__} were converted with "
        f"subquad {about['version']}; their cost grows "
        "as the table says, not with the square of the length. FLOPs are those of one layer "
        f"at {length:,} tokens, beside exact attention's.",
        "",
        f"| layers | mechanism | cost | FLOPs at {length:,} |",
        "|---|---|---|---|",
    ]
    widths = {name: mech.head_dim for name, mech in found if isinstance(mech, Mechanism)}
    for spec, names in groups.items():
        width = widths.get(names[0], 64)
        known = describe(spec)
        exact = describe("softmax").flops(length, width, width)
        share = known.flops(length, width, width) / exact
        cost = known.cost.formula.replace("|", "\\|")
        lines.append(f"| {', '.join(_ranges(names))} | `{spec}` | {cost} | {share:.0%} |")
    fresh = about.get("measured") == fingerprint(model)
    lines += _measured(about.get("comparison"), fresh)
    if recipe := about.get("recipe"):
        lines += ["", "Trained after the conversion:", ""]
        lines += [f"- {what}: {value}" for what, value in recipe]
    lines += [
        "",
        "Importing subquad lets transformers load it; nothing else changes:",
        "",
        "```python",
        "import subquad  # pip install 'subquad[hf]'",
        f"from transformers import {type(model).__name__}",
        "",
        f"model = {type(model).__name__}.from_pretrained(FOLDER)",
        "```",
        "",
        "`subquad.revert(model)` gives back exact attention with the present weights. Without "
        "subquad, transformers stops and says that the attention implementation is not "
        "supported.",
    ]
    return "\n".join(lines)


def _measured(summary: dict[str, Any] | None, fresh: bool) -> Iterator[str]:
    if summary is None:
        yield from (
            "",
            "The error was not measured; `subquad.compare(model, inputs)` before saving does.",
        )
        return
    yield from (
        "",
        f"Measured on {summary['rows']} inputs of up to {summary['length']} tokens, against the "
        f"same weights with exact attention{'' if fresh else ', **before they last changed**'}; "
        "uniform attention is the line to beat:",
        "",
        "| | converted | uniform attention |",
        "|---|---|---|",
    )
    for metric, value, uniform in summary["lines"]:
        yield f"| {metric} | {_number(value)} | {_number(uniform)} |"
    for part in summary.get("parts", ()):
        yield from ("", f"{part}")


def _number(value: Any) -> str:
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _ranges(names: Sequence[str]) -> list[str]:
    """Names that differ in one number only are one entry: ``encoder.layer.{0–5}.attention``."""
    groups: dict[tuple[str, str], list[int]] = {}
    single: list[str] = []
    for name in names:
        match = re.fullmatch(r"(.*?\.)(\d+)(\..*|)", name)
        if match is None:
            single.append(f"`{name}`")
        else:
            groups.setdefault((match[1], match[3]), []).append(int(match[2]))
    found = []
    for (before, after), numbers in groups.items():
        spans: list[list[int]] = []
        for number in sorted(numbers):
            if spans and spans[-1][-1] == number - 1:
                spans[-1].append(number)
            else:
                spans.append([number])
        words = ", ".join(f"{s[0]}–{s[-1]}" if len(s) > 1 else f"{s[0]}" for s in spans)
        found.append(f"`{before}{words if words.isdigit() else '{' + words + '}'}{after}`")
    return found + single


def _write_card(path: Path, section: str) -> None:
    """Puts the section in place of the former one, or at the end; makes the file if need be."""
    begin, end = _MARKS
    marked = f"{begin}\n\n{section}\n\n{end}\n"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if not text:
        text = "---\nlibrary_name: transformers\ntags:\n- subquad\n---\n\n" + marked
    elif begin in text and end in text.partition(begin)[2]:
        before, _, rest = text.partition(begin)
        text = before + marked + rest.partition(end)[2].lstrip("\n")
    else:
        text = f"{text.rstrip()}\n\n{marked}"
    path.write_text(text, encoding="utf-8")


# ---- loading -------------------------------------------------------------------------------


def restore(model: nn.Module, about: dict[str, Any]) -> ConversionReport:
    """Converts a model as a record says; its buffers and parameters are to be loaded then.

    Layers are found by name, also where the model was saved with another head: a prefix of the
    base model is added or taken off.

    Raises:
        OptionError: the record does not fit the model or this version.
    """
    from subquad.convert.swap import attention_names, convert

    known = set(attention_names(model))
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    here: dict[str, str] = {}
    for name in about["layers"]:
        options = (name, prefix + name, name.removeprefix(prefix))
        if (place := next((option for option in options if option in known), None)) is not None:
            here[name] = place
    if missing := [name for name in about["layers"] if name not in here]:
        _complain(model, missing, bool(here))
    try:
        report = convert(
            model,
            {place: about["layers"][name] for name, place in here.items()},
            seed={place: about["seeds"][name] for name, place in here.items()},
        )
    except SubquadError as error:
        raise OptionError(
            f"the folder's conversion, saved by subquad {about['version']}, cannot be repeated: "
            f"{error}"
        ) from error
    for name, place in here.items():
        layer = model.get_submodule(place)
        mechanism = layer._modules[SLOT]
        weight = next(layer.parameters(), torch.empty(0))
        if isinstance(mechanism, Deferred) and name in about["sizes"]:
            head_dim, heads, kv_heads, value_dim = about["sizes"][name]
            shapes = ((heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim or head_dim))
            q, k, v = (weight.new_empty(1, rows, 1, width) for rows, width in shapes)
            mechanism = layer._modules[SLOT] = mechanism.build(q, k, v)
        dtype = getattr(torch, about["dtypes"].get(name, "float32"))
        if dtype != torch.float32 and dtype == weight.dtype and mechanism is not None:
            mechanism.to(dtype)
        if isinstance(mechanism, Mechanism):
            _same_options(place, mechanism, about)
    return report


def _same_options(name: str, mechanism: Mechanism, about: dict[str, Any]) -> None:
    """Raises where a version with other defaults would build another mechanism."""
    now, saved = _options(mechanism), about["options"].get(str(mechanism.config), [])
    if now in saved:
        return
    before = saved[0] if saved else {}
    changes = [
        f"{path}{'.' * bool(path)}{option} was {before.get(path, {}).get(option)}, is {value}"
        for path, options in now.items()
        for option, value in options.items()
        if before.get(path, {}).get(option) != value
    ]
    raise OptionError(
        f"{name}: defaults of {mechanism.config} changed since subquad {about['version']}: "
        f"{'; '.join(changes) or 'it has fewer parts now'}. Install that version to load it"
    )


def _complain(model: nn.Module, missing: list[str], some: bool) -> None:
    kind = type(model).__name__
    saved = getattr(getattr(model, "config", None), "architectures", None) or []
    text = f"converted in the saved {saved[0] if saved else 'model'}, are not in this {kind}"
    text = f"{', '.join(missing[:4])}{' …' if len(missing) > 4 else ''}: {text}"
    if kind in saved or not some:
        raise OptionError(f"{text}; load it with the version of transformers that saved it")
    warnings.warn(f"{text} and stay out", UserWarning, stacklevel=2)


def _unfilled(model: nn.Module) -> list[str]:
    """Tensors of mechanisms that the file did not hold (offloaded ones cannot be told)."""
    return [
        f"{name}.{SLOT}.{key}"
        for name, mech in _converted(model)
        for key, tensor in mech.state_dict(keep_vars=True).items()
        if not tensor.is_meta and not getattr(tensor, "_is_hf_initialized", False)
    ]


def announce() -> None:
    """Makes transformers know the loader: now if its loaders are imported, else once they are."""
    module = sys.modules.get(_LOADERS)
    if module is None:
        sys.meta_path.insert(0, _AfterImport(_LOADERS, _register))
    else:
        _register(module)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls `action` with a module once it has been imported; finds nothing itself."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self.name, self.action = name, action

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec that the next finder has, with `action` after its execution."""
        if fullname != self.name:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        loader: Any = spec.loader if spec is not None else None
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self.action(module)

            loader.exec_module = exec_module
        return spec


def _register(module: ModuleType) -> None:
    """Adds the record's class and the loader to transformers' tables; again is harmless."""
    if METHOD in module.__dict__["AUTO_QUANTIZER_MAPPING"]:
        return
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    class Record(QuantizationConfigMixin):
        """The entry ``quantization_config`` of config.json, see `record`."""

        def __init__(self, **about: Any) -> None:
            self.__dict__.update(about)

    class Loader(HfQuantizer):
        """Puts mechanisms into an empty model before its weights are read; see the module."""

        quantization_config: Any

        def is_serializable(self) -> bool:
            return True

        @property
        def is_trainable(self) -> bool:
            return True

        def update_attn_implementation(self, config: Any) -> Any:
            # The name that stops other processes; what was given to from_pretrained comes first.
            original = routing.original_name(config._attn_implementation)
            if original is not None:
                config._attn_implementation = original
            config.__dict__.pop("attn_implementation", None)
            return config

        def _process_model_before_weight_loading(self, model: Any, **options: Any) -> None:
            # Built on the layers' device, meta: what a mechanism makes beside its buffers must
            # be real, and in float32 whatever the model's dtype is.
            dtype = torch.get_default_dtype()
            torch.set_default_dtype(torch.float32)
            try:
                with torch.device("cpu"):
                    restore(model, self.quantization_config.to_dict())
            finally:
                torch.set_default_dtype(dtype)

        def _process_model_after_weight_loading(self, model: Any, **options: Any) -> None:
            # From here on it is a converted model like any other: weights are not quantised.
            about = self.quantization_config.to_dict()
            remove: Any = self.remove_quantization_config
            remove(model)
            for module in _pretrained(model):
                module.config.__dict__.pop("_is_quantized", None)
            if missing := _unfilled(model):
                raise OptionError(
                    f"the folder lacks {', '.join(missing[:4])}{' …' if missing[4:] else ''}: "
                    f"it was saved by subquad {about['version']}, or without save_pretrained"
                )
            if "comparison" in about:
                model.__dict__[COMPARISON] = about["comparison"]
                model.__dict__[MEASURED] = about["measured"]
            if "recipe" in about:
                model.__dict__[RECIPE] = dict(about["recipe"])

    module.__dict__["register_quantization_config"](METHOD)(Record)
    module.__dict__["register_quantizer"](METHOD)(Loader)
