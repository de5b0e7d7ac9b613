"""`coverage`: which architectures of the installed transformers `convert` reaches, and how."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from subquad.convert import adapters, routing

__all__ = ["Architecture", "coverage"]


@dataclass(frozen=True)
class Architecture:
    """How `subquad.convert` reaches the attention of one folder of ``transformers.models``.

    Args:
        name: of the folder, mostly the config's ``model_type``.
        reached: ``"routes"`` (through the attention interface), ``"adapter"``, ``"partly"``
            (some classes are not reached), ``"parts"`` (it is made of other architectures), or
            ``"no"``.
        classes: attention classes that are converted.
        missed: attention classes that are not.
        causal: has causal self-attention.
        cross: has cross-attention, keys from elsewhere.
        window: has layers with a sliding window: mechanisms with ``window`` masks take them.
        prescaled: queries arrive multiplied by D^-½, which converted layers undo.
        position_bias: adds L×S terms to the logits: mechanisms with explicit masks only.
        other: logit transforms that no mechanism takes: soft caps, learned sinks.
        reason: why not, where it is known.
    """

    name: str
    reached: str
    classes: tuple[str, ...] = ()
    missed: tuple[str, ...] = ()
    causal: bool = False
    cross: bool = False
    window: bool = False
    prescaled: bool = False
    position_bias: bool = False
    other: tuple[str, ...] = ()
    reason: str = ""

    @property
    def features(self) -> tuple[str, ...]:
        """What its attention has beyond bidirectional self-attention, in words."""
        flags = {
            "causal": self.causal,
            "cross": self.cross,
            "sliding window": self.window,
            "pre-scaled queries": self.prescaled,
            "position bias": self.position_bias,
        }
        return (*(words for words, flag in flags.items() if flag), *self.other)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


_CLASS = re.compile(r"^class (\w+)\b", re.MULTILINE)
_END = re.compile(r"^(?:def |@|[A-Z_]{3,} *[=:])", re.MULTILINE)
_ATTENDS = re.compile(r"softmax\(|scaled_dot_product_attention\(")
_CAUSAL = re.compile(r"self\.is_causal\s*=\s*(?!\s|False\b)")
_CROSS = re.compile(r"encoder_hidden_states|key_value_states|is_cross_attention")
_OTHER = {"softcap": "soft-capped logits", "s_aux": "learned sinks"}


def coverage() -> tuple[Architecture, ...]:
    """Every architecture of the installed transformers that has attention, by name.

    Reads the library's modelling files as text: nothing is imported, no model is made; about a
    second. Architectures of convolutions or recurrences alone are left out.

    Raises:
        ImportError: transformers is not installed.

    Example:
        >>> from subquad.convert import coverage
        >>> found = {one.name: one for one in coverage()}
        >>> found["bert"].reached, found["gptj"].reached, found["deberta"].reached
        ('routes', 'adapter', 'no')
        >>> found["bert"].classes
        ('BertCrossAttention', 'BertSelfAttention')
    """
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("listing models needs transformers: pip install 'subquad[hf]'")
    root = Path(next(iter(spec.submodule_search_locations))) / "models"
    found = (_architecture(folder) for folder in sorted(root.iterdir()) if folder.is_dir())
    return tuple(one for one in found if one is not None)


def _architecture(folder: Path) -> Architecture | None:
    reached: dict[str, str] = {}
    missed: list[str] = []
    adapted, parts, reason = False, False, ""
    for path in sorted(folder.glob("modeling_*.py")):
        text = path.read_text(encoding="utf-8")
        parts = parts or "AutoModel.from_config" in text
        for name, body in _classes(text):
            full = f"transformers.models.{folder.name}.{path.stem}.{name}"
            adapter = full in adapters.ADAPTERS
            if routing.ROUTE.search(body) or adapter:
                reached[name] = body
                adapted = adapted or adapter
            elif re.search("Attention|Attn", name) and _ATTENDS.search(body):
                missed.append(name)
                reason = adapters.REFUSED.get(full, reason)
        if "nn.MultiheadAttention(" in text:
            reached["torch.nn.MultiheadAttention"], adapted = "", True
    if not reached and not missed:
        return Architecture(folder.name, "parts") if parts else None
    how = "partly" if reached and missed else "no" if missed else "adapter"
    if reached and not missed and any(map(routing.ROUTE.search, reached.values())):
        how = "routes"
    bodies = "\n".join(reached.values())
    return Architecture(
        folder.name,
        how,
        tuple(sorted(reached)),
        tuple(sorted(missed)),
        causal=bool(_CAUSAL.search(bodies)),
        cross=bool(_CROSS.search(bodies)),
        window="sliding_window" in bodies,
        prescaled=any(map(routing.says_prescaled, reached.values())),
        position_bias="position_bias" in bodies or "alibi" in bodies,
        other=tuple(words for word, words in _OTHER.items() if word in bodies),
        reason=reason,
    )


def _classes(text: str) -> Iterator[tuple[str, str]]:
    """(name, source) of the top-level classes."""
    starts = [*_CLASS.finditer(text)]
    for match, following in zip(starts, [*starts[1:], None], strict=True):
        body = text[match.start() : len(text) if following is None else following.start()]
        end = _END.search(body)
        yield match.group(1), body if end is None else body[: end.start()]
