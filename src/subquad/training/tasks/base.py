"""What a task is: how a recipe becomes a model, batches, an objective and an evaluation.

A task is one file in this folder with one `Task` named ``TASK``, and one line in
`subquad.training.tasks.TASKS`::

    TASK = Task(
        name="classify",
        recipe="classify",  # shipped recipe, used without --config
        config="subquad.models.configuration:EncoderTransformerConfig",
        objective="subquad.training.objectives:Objective",  # its arguments are the section's keys
        metrics={"loss": "min", "accuracy": "max"},  # what `evaluate` gives; for `best`
        prepare=prepare,  # (recipe, folder, say) -> Prepared
    )

`prepare` reads the data, makes or loads the tokenizer (`tokenizer_of`) and the model, and returns
a `Prepared`. All else, the loop, batches by token count, logs, checkpoints, the best one,
stopping and resuming, is the same for every task (`subquad.training.run`).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from subquad import registry
from subquad.errors import OptionError

if TYPE_CHECKING:
    from subquad.training.recipe import Recipe

__all__ = ["Batch", "Loss", "Prepared", "Say", "Task"]

Batch = dict[str, Tensor]
"""What a model's forward takes, by name."""

Say = Callable[[str], None]
"""Is told what is going on, one line each."""

Loss = Callable[[Any, Batch, float, torch.Generator], Any]
"""``objective(model, batch, progress, generator)``: `subquad.training.objectives.Losses`, with
``total``, the mean over what `Prepared.size` counts; its ``terms`` and ``notes`` go to the log."""

OURS = frozenset(
    {"vocab_size", "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id",
     "mask_token_id", "unk_token_id", "use_cache", "is_decoder", "is_encoder_decoder",
     "source_vocab_size"}
)  # fmt: skip
"""Arguments of model configurations that the tokenizer and the task decide, not a recipe."""


def labelled(batch: Batch) -> int:
    """How many labels of a batch count."""
    return int((batch["labels"] != -100).sum())


@dataclass
class Prepared:
    """Everything that the loop needs of a task.

    Args:
        model: a transformers model, on the CPU, with its initial weights.
        tokenizer: or a processor: what is saved beside the model.
        lengths: of each training example in tokens, (N,), or (N, 2) of source and target. Batches
            are made from them.
        batch: indices of training examples → a batch on the CPU.
        objective: what is minimised, see `Loss`.
        evaluate: model → metrics by the names that `Task.metrics` has, on validation examples.
            Called in eval mode, without gradients, with a random state of its own.
        size: of a batch: what its loss is a mean over. Weighs the batches of a step that is
            accumulated, and is counted for tokens/s.
        fingerprint: plain values that a continued run must find unchanged, such as digests of
            the data.
        notes: what to know, one sentence each, such as lines that were left out.
    """

    model: Any
    tokenizer: Any
    lengths: Tensor | Sequence[int]
    batch: Callable[[Sequence[int]], Batch]
    objective: Loss
    evaluate: Callable[[Any], dict[str, float]]
    size: Callable[[Batch], int] = labelled
    fingerprint: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Task:
    """One kind of training; see the top of this file.

    Args:
        name: as in recipes and on the command line.
        recipe: the shipped recipe that is used without another.
        config: "module:Class" of the model's configuration; its fields are the keys of a recipe's
            section `model`.
        objective: "module:Class"; its arguments are the keys of the section `objective`.
        metrics: names that `Prepared.evaluate` gives → "min" or "max", what is better.
        prepare: makes a `Prepared` of a recipe, in a run's folder.
        problems: what a recipe's values have against each other, or against this task.
    """

    name: str
    recipe: str
    config: str
    objective: str
    metrics: Mapping[str, str]
    prepare: Callable[[Recipe, Path, Say], Prepared]
    problems: Callable[[Recipe], Iterable[str]] = lambda recipe: ()

    def config_class(self) -> Any:
        """The model's configuration."""
        return _load(self.config)

    def model_options(self) -> dict[str, Any]:
        """Keys of the section `model`, with their defaults."""
        kind = self.config_class()
        own = {
            name
            for one in kind.__mro__
            if one.__module__.startswith("subquad.")
            for name in inspect.get_annotations(one)
        }
        return {
            one.name: one.default
            for one in dataclasses.fields(kind)
            if one.name in own - OURS and one.default is not dataclasses.MISSING
        }

    def objective_options(self) -> dict[str, Any]:
        """Keys of the section `objective`, with their defaults."""
        parameters = inspect.signature(_load(self.objective)).parameters.values()
        return {
            one.name: one.default
            for one in parameters
            if one.default is not inspect.Parameter.empty
        }

    def model_problems(self, options: Mapping[str, Any]) -> Iterator[str]:
        """What the configuration has to say against these options."""
        kind = self.config_class()
        yield from _refusals("model", kind, options)
        for name in kind._mechanism_options():
            for one in _each(options.get(name)):
                try:
                    registry.resolve(one)
                except OptionError as error:
                    yield f"model.{name}: {error}"

    def objective_problems(self, options: Mapping[str, Any]) -> Iterator[str]:
        """What the objective has to say against these options."""
        yield from _refusals("objective", _load(self.objective), options)

    def build_objective(self, recipe: Recipe) -> Any:
        """The objective of a recipe."""
        return _load(self.objective)(**recipe.objective)


def _refusals(section: str, kind: Any, options: Mapping[str, Any]) -> Iterator[str]:
    try:
        kind(**options)
    except OptionError as error:
        text = str(error).removeprefix(f"{kind.__name__}: ")
        yield from (f"{section}.{one}" for one in text.split("; "))


def _each(given: Any) -> Iterable[Any]:
    """The mechanisms that an option names."""
    if isinstance(given, Mapping):
        return given.values()
    if given is None:
        return ()
    return given if isinstance(given, list | tuple) else (given,)


@functools.cache
def _load(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
