"""What tasks share: the tokenizer, examples to hold out, texts as tokens, the model."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from subquad.errors import OptionError
from subquad.training.recipe import Recipe
from subquad.training.tasks.base import Say, Task

__all__ = ["Part", "build_model", "corpus_paths", "held_out", "notes_of", "tokenizer_of"]

SPECIAL = tuple(f"{name}_token_id" for name in ("pad", "bos", "eos", "unk", "mask"))
"""Arguments of configurations that name special tokens."""


def tokenizer_of(recipe: Recipe, folder: Path, texts: Callable[[], Iterable[str]], say: Say) -> Any:
    """The run's tokenizer: of an earlier call, the recipe's own, that of the model to start from,
    or one trained on the texts.

    Args:
        recipe: its section `tokenizer`, and `training.start`.
        folder: of the run, which keeps the tokenizer.
        texts: gives those to train on.
        say: is told that one is trained.

    Raises:
        OptionError: no tokenizer at `tokenizer.path` or `training.start`, or one without the
            special tokens.
    """
    from transformers import AutoTokenizer

    from subquad.data.tokens import train_tokenizer
    from subquad.training.run import new_folder

    own, options = folder / "tokenizer", recipe.tokenizer
    name = "tokenizer.path" if options.path is not None else "training.start"
    path = options.path if options.path is not None else recipe.training.start
    tokenizer: Any
    if not own.is_dir():
        if path is None:
            say(f"training a tokenizer ({options.kind}, {options.vocab_size} tokens at most)")
            tokenizer = train_tokenizer(
                texts(),
                kind=options.kind,
                vocab_size=options.vocab_size,
                lowercase=options.lowercase,
            )
        else:
            try:
                tokenizer = AutoTokenizer.from_pretrained(path)
            except (OSError, ValueError) as error:
                raise OptionError(f"{name}={path!r}: {error}") from None
        with new_folder(own) as part:
            tokenizer.save_pretrained(part)
    tokenizer = AutoTokenizer.from_pretrained(own)
    missing = [n for n in ("pad", "bos", "eos") if getattr(tokenizer, f"{n}_token_id") is None]
    if missing:
        raise OptionError(f"{name}={path!r} has no {', '.join(missing)} token")
    return tokenizer


class Part(Sequence[Any]):
    """Some records of a corpus, in its order.

    Args:
        records: a `Records` of `subquad.data`.
        chosen: their indices.
    """

    def __init__(self, records: Any, chosen: Sequence[int]) -> None:
        self.records, self.chosen = records, chosen
        told = hashlib.blake2b(repr((records.fingerprint, chosen)).encode(), digest_size=16)
        self.fingerprint = told.hexdigest()

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self.records[one] for one in self.chosen[index]]
        return self.records[self.chosen[index]]

    def line_number(self, index: int) -> int:
        """In the file."""
        return int(self.records.line_number(self.chosen[index]))


def held_out(records: Any, most: int, seed: int) -> tuple[Part, Part]:
    """(for training, held out): chosen by the seed; at most a tenth is held out.

    Raises:
        OptionError: fewer than two records.
    """
    count = len(records)
    if count < 2:
        raise OptionError(f"data.train has {count} example: nothing is left to hold out")
    take = min(most, max(1, count // 10))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    return Part(records, sorted(order[take:])), Part(records, sorted(order[:take]))


def notes_of(name: Any, problems: Any) -> list[str]:
    """A report of `subquad.data` as notes."""
    return [f"{name}: {text}" for text in str(problems).splitlines()]


def build_model(task: Task, model: Any, recipe: Recipe, tokenizer: Any, **more: Any) -> Any:
    """A model with initial values by the recipe's seed, or of `training.start`.

    Args:
        task: whose configuration it is.
        model: class of the model.
        recipe: its section `model`.
        tokenizer: for the vocabulary and the special tokens.
        more: further arguments of the configuration.

    Raises:
        OptionError: the model to start from has other weights, in more than its attention.
    """
    kind = task.config_class()
    own = {one.name for one in dataclasses.fields(kind)}
    found = {name: getattr(tokenizer, name) for name in SPECIAL if name in own}
    special = {name: number for name, number in found.items() if number is not None}
    config = kind(vocab_size=len(tokenizer), **{**special, **recipe.model, **more})
    torch.manual_seed(recipe.training.seed)
    made = model(config)
    if recipe.training.start is not None:
        _take_weights(made, recipe.training.start)
    return made


def _take_weights(model: Any, path: str) -> None:
    """Those of the model in a folder; what belongs to a mechanism alone need not be the same."""
    from transformers import AutoConfig

    name = f"training.start={path!r}"
    try:
        kind = AutoConfig.from_pretrained(path).model_type
    except (OSError, ValueError) as error:
        raise OptionError(f"{name}: {error}") from None
    if kind != model.config.model_type:
        raise OptionError(f"{name} is a {kind!r}, the recipe's model a {model.config.model_type!r}")
    own, theirs = model.state_dict(), type(model).from_pretrained(path).state_dict()
    problems = []
    for key in dict.fromkeys((*own, *theirs)):
        here, there = (list(t[key].shape) if key in t else None for t in (own, theirs))
        if here == there:
            own[key].copy_(theirs[key])
        elif ".mechanism." not in key:
            problems.append(f"{key}: {there} there, {here} in the recipe's model")
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems[:5])
        raise OptionError(f"{name}: {len(problems)} weights do not fit{listed}")


def corpus_paths(section: str, given: Any) -> Any:
    """A file, or two, from a recipe's value.

    Raises:
        OptionError: it is neither.
    """
    if isinstance(given, str | Path):
        return given
    if isinstance(given, Sequence) and all(isinstance(one, str | Path) for one in given):
        if len(given) == 1:
            return given[0]
        if len(given) == 2:
            return tuple(given)
    raise OptionError(f"{section}={given!r} must be a file, or [source file, target file]")
