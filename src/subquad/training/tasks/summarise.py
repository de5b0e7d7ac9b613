"""Summaries: pairs of a text and its summary, an encoder and a decoder, ROUGE."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path

from subquad.training.metrics import rouge_l, rouge_n
from subquad.training.recipe import Recipe
from subquad.training.tasks import translation
from subquad.training.tasks.base import Prepared, Say, Task
from subquad.training.tasks.heads import no_preset

__all__ = ["TASK"]


class Validation(translation.Validation):
    """Cross entropy of the validation summaries, and ROUGE of what the model writes."""

    def scores(self, found: list[str], wanted: list[str]) -> dict[str, float]:
        """``rouge1``, ``rouge2`` and ``rougeL``, means over summaries."""
        metrics: dict[str, Callable[[str, str], float]] = {
            "rouge1": functools.partial(rouge_n, n=1),
            "rouge2": functools.partial(rouge_n, n=2),
            "rougeL": rouge_l,
        }
        return {
            name: sum(map(metric, found, wanted)) / len(wanted) for name, metric in metrics.items()
        }


def prepare(recipe: Recipe, folder: Path, say: Say) -> Prepared:
    """As for translation, with one vocabulary for texts and summaries."""
    return translation.prepare(recipe, folder, say, Validation)


def problems(recipe: Recipe) -> Iterable[str]:
    """What is wrong with a recipe for summaries."""
    yield from no_preset(recipe)
    if recipe.evaluation.best != "loss" and not recipe.evaluation.decode:
        yield f"evaluation.best={recipe.evaluation.best!r} needs evaluation.decode > 0"


TASK = Task(
    name="summarise",
    recipe="summarise",
    config="subquad.models.configuration:Seq2SeqTransformerConfig",
    objective="subquad.training.objectives:Objective",
    metrics={"loss": "min", "rouge1": "max", "rouge2": "max", "rougeL": "max"},
    prepare=prepare,
    problems=problems,
)
