"""Translation: pairs of texts, an encoder and a decoder, cross entropy and BLEU."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from subquad.data.batches import TokenBatches, pad_batch
from subquad.data.corpora import preset, presets
from subquad.data.encoded import EncodedPairs
from subquad.data.pairs import Pairs
from subquad.data.tokens import both_sides
from subquad.errors import OptionError
from subquad.options import choice_problem
from subquad.training.recipe import Recipe
from subquad.training.tasks.base import Batch, Prepared, Say, Task
from subquad.training.tasks.parts import (
    build_model,
    corpus_paths,
    held_out,
    notes_of,
    tokenizer_of,
)

__all__ = ["PARALLEL", "TASK"]


def prepare(
    recipe: Recipe, folder: Path, say: Say, validation: type[Validation] | None = None
) -> Prepared:
    """Reads the pairs, trains a tokenizer on them, and builds the model.

    `validation` is what measures, in the place of `Validation`.
    """
    from subquad import models

    nat = recipe.task == PARALLEL.name
    task, kind = (
        (PARALLEL, models.NonAutoregressiveTransformer)
        if nat
        else (TASK, models.Seq2SeqTransformer)
    )
    pairs, valid, notes = corpora(recipe, folder / "data")
    tokenizer = tokenizer_of(recipe, folder, lambda: both_sides(pairs), say)
    data = recipe.data
    limits: dict[str, Any] = {
        "max_source": data.max_length,
        "max_target": data.max_target or data.max_length,
        "copy": bool(recipe.model.get("copy", False)),
    }
    files = folder / "data"
    train = EncodedPairs(pairs, tokenizer, on_long=data.on_long, folder=files, **limits)
    tests = EncodedPairs(valid, tokenizer, on_long="truncate", folder=files, **limits)
    notes += notes_of("training pairs", train.problems)
    notes += notes_of("validation pairs", tests.problems)
    say(f"{len(train)} training pairs, {len(tests)} validation pairs, {len(tokenizer)} tokens")
    batch = functools.partial(batch_of, train, tokenizer)
    return Prepared(
        model=build_model(task, kind, recipe, tokenizer),
        tokenizer=tokenizer,
        lengths=train.lengths,
        batch=batch,
        objective=task.build_objective(recipe),
        evaluate=(validation or Validation)(recipe, tokenizer, valid, tests),
        fingerprint={"train": pairs.fingerprint, "valid": valid.fingerprint},
        notes=notes,
    )


def corpora(recipe: Recipe, folder: Path) -> tuple[Any, Any, list[str]]:
    """(training pairs, validation pairs, notes): of the recipe's files, or of its preset.

    Args:
        recipe: its section `data`.
        folder: where a preset's files are written.

    Raises:
        OptionError: there is no such file, or none is named.
    """
    data = recipe.data
    if data.preset is not None:
        files = preset(data.preset).extract(folder)
        return Pairs.open(files["train"]), Pairs.open(files["valid"]), []
    if data.train is None:
        raise OptionError("data.train: give a file of pairs (--data), or data.preset (--preset)")
    train = _open(recipe, "data.train", data.train)
    notes = notes_of(data.train, train.problems)
    if data.valid is not None:
        valid = _open(recipe, "data.valid", data.valid)
        return train, valid, notes + notes_of(data.valid, valid.problems)
    kept, apart = held_out(train, data.held_out, recipe.training.seed)
    notes.append(f"data.valid is not given: {len(apart)} pairs of data.train are held out")
    return kept, apart, notes


def _open(recipe: Recipe, section: str, given: Any) -> Pairs:
    data, path = recipe.data, corpus_paths(section, given)
    options: dict[str, Any] = {}
    if not isinstance(path, tuple):
        options = {"source": data.source, "target": data.target, "header": data.header}
    return Pairs.open(path, on_bad=data.on_bad, **options)


def batch_of(pairs: EncodedPairs, tokenizer: Any, rows: Sequence[int]) -> Batch:
    """The pairs of these indices."""
    return pad_batch(
        [pairs[row] for row in rows], pad=tokenizer.pad_token_id, bos=tokenizer.bos_token_id
    )


# ---- evaluation --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Validation:
    """Cross entropy of the validation targets, in nats a token, and BLEU of translations.

    Args:
        recipe: its sections `evaluation` and `decoding`.
        tokenizer: of the model.
        pairs: the texts.
        encoded: their tokens.
    """

    recipe: Recipe
    tokenizer: Any
    pairs: Any
    encoded: EncodedPairs

    def __call__(self, model: Any) -> dict[str, float]:
        """``loss``, and ``bleu`` where the recipe wants it."""
        found = {"loss": self.loss(model)}
        if self.recipe.evaluation.decode:
            found |= self.scores(*self.outputs(model))
        return found

    def batches(self, lengths: Any) -> TokenBatches:
        """Batches of the training's size, without chance."""
        return TokenBatches(lengths, tokens=self.recipe.training.tokens, shuffle=False)

    def loss(self, model: Any) -> float:
        """Mean of −ln p(token), without label smoothing."""
        total, count = 0.0, 0
        for rows in self.batches(self.encoded.lengths):
            batch = batch_of(self.encoded, self.tokenizer, rows)
            batch = {name: value.to(model.device) for name, value in batch.items()}
            size = int((batch["labels"] != -100).sum())
            total += self.mean_loss(model, batch) * size
            count += size
        return total / count

    def mean_loss(self, model: Any, batch: Batch) -> float:
        """Of one batch; of a model that writes all tokens at once its own, with fixed masks."""
        if not getattr(model, "autoregressive", True):
            masks = torch.Generator(model.device).manual_seed(0)
            return float(sum(model.loss(batch, masks).values()))
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits = model(**inputs).logits.float().flatten(0, 1)
        return float(F.cross_entropy(logits, batch["labels"].flatten()))

    def outputs(self, model: Any) -> tuple[list[str], list[str]]:
        """(what the model writes, references) of the first `evaluation.decode` examples."""
        from subquad.generation import Translator

        options = self.recipe.evaluation
        pairs = [self.pairs[i] for i in range(min(options.decode, len(self.pairs)))]
        translator = Translator(
            model, self.tokenizer, **{**decoding_options(self.recipe), "beams": options.beams}
        )
        found = [one.text for one in translator.translate([source for source, _ in pairs])]
        return found, [target for _, target in pairs]

    def scores(self, found: list[str], wanted: list[str]) -> dict[str, float]:
        """``bleu``: sacrebleu's."""
        from sacrebleu.metrics.bleu import BLEU

        metric = BLEU(lowercase=self.recipe.tokenizer.lowercase, force=True)
        return {"bleu": float(metric.corpus_score(found, [wanted]).score)}


def decoding_options(recipe: Recipe) -> dict[str, Any]:
    """Arguments of a `Translator`."""
    return dataclasses.asdict(recipe.decoding)


def problems(recipe: Recipe) -> Iterable[str]:
    """What is wrong with a recipe for translation."""
    if recipe.data.preset is not None:
        yield from choice_problem("data.preset", recipe.data.preset, tuple(presets()))
        if recipe.data.train is not None or recipe.data.valid is not None:
            yield "data.preset stands in the place of data.train and data.valid: leave these out"
    if recipe.evaluation.best == "bleu" and not recipe.evaluation.decode:
        yield "evaluation.best='bleu' needs evaluation.decode > 0"


TASK = Task(
    name="translation",
    recipe="translation-tiny",
    config="subquad.models.configuration:Seq2SeqTransformerConfig",
    objective="subquad.training.objectives:Objective",
    metrics={"loss": "min", "bleu": "max"},
    prepare=prepare,
    problems=problems,
)

PARALLEL = dataclasses.replace(
    TASK,
    name="nat",
    recipe="nat",
    config="subquad.models.nat:NonAutoregressiveTransformerConfig",
)
"""Translation without order: `NonAutoregressiveTransformer` on the same pairs."""
