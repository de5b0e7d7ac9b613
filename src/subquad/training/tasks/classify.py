"""Classification: texts with a label each, an encoder with a head, accuracy and macro F1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.data.batches import pad_rows
from subquad.data.encoded import EncodedLines
from subquad.data.labelled import Labelled
from subquad.training.metrics import accuracy, macro_f1
from subquad.training.recipe import Recipe
from subquad.training.tasks.base import Batch, Prepared, Say, Task
from subquad.training.tasks.heads import (
    CONFIG,
    OBJECTIVE,
    corpora,
    fit_length,
    label_names,
    label_options,
    predictions,
)
from subquad.training.tasks.parts import build_model, notes_of, tokenizer_of

__all__ = ["TASK"]


def prepare(recipe: Recipe, folder: Path, say: Say) -> Prepared:
    """Reads texts and labels, trains a tokenizer on the texts, and builds the model."""
    from subquad.models import EncoderForSequenceClassification

    data = recipe.data
    keys = {
        "text": "text" if data.source == "source" else str(data.source),
        "label": "label" if data.target == "target" else str(data.target),
    }
    train, valid, notes = corpora(
        recipe, lambda path: Labelled.open(path, on_bad=data.on_bad, **keys)
    )
    tokenizer = tokenizer_of(recipe, folder, lambda: (text for text, _ in train), say)
    names = label_names((row[1] for row in train), (row[1] for row in valid), notes)
    parts = []
    for records, on_long in ((train, data.on_long), (valid, "truncate")):
        texts = EncodedLines(
            _Texts(records),
            tokenizer,
            max_length=data.max_length,
            on_long=on_long,
            folder=folder / "data",
        )
        notes += notes_of("texts", texts.problems)
        parts.append(_Examples(texts, records, names, tokenizer.pad_token_id))
    examples, tests = parts
    say(f"{len(examples)} training texts, {len(tests)} validation texts, {len(names)} labels")
    return Prepared(
        model=build_model(
            TASK,
            EncoderForSequenceClassification,
            recipe,
            tokenizer,
            problem_type="single_label_classification",
            **label_options(names),
        ),
        tokenizer=tokenizer,
        lengths=examples.lengths,
        batch=examples.batch,
        objective=TASK.build_objective(recipe),
        evaluate=_Validation(tests, recipe.training.tokens),
        fingerprint={"train": train.fingerprint, "valid": valid.fingerprint},
        notes=notes,
    )


class _Texts(Sequence[str]):
    """The texts of labelled records."""

    def __init__(self, records: Any) -> None:
        self.records = records
        self.fingerprint, self.line_number = records.fingerprint, records.line_number

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [text for text, _ in self.records[index]]
        return self.records[index][0]


class _Examples:
    """Encoded texts with their labels."""

    def __init__(self, texts: EncodedLines, records: Any, names: list[str], pad: int) -> None:
        number = {name: index for index, name in enumerate(names)}
        every = torch.tensor([number[label] for _, label in records])
        self.texts, self.labels, self.pad = texts, every[texts.indices], pad
        self.lengths: Tensor = texts.lengths

    def __len__(self) -> int:
        return len(self.texts)

    def batch(self, indices: Sequence[int]) -> Batch:
        rows = [{**self.texts[index], "labels": self.labels[index]} for index in indices]
        return pad_rows(rows, pad=self.pad)


@dataclass(frozen=True)
class _Validation:
    examples: _Examples
    tokens: int

    def __call__(self, model: Any) -> dict[str, float]:
        """``loss``, in nats a text, ``accuracy``, and ``f1``: the mean over labels."""
        total, found, wanted = 0.0, [], []
        for _, batch, out in predictions(model, self.examples, self.examples.batch, self.tokens):
            total += float(F.cross_entropy(out.logits.float(), batch["labels"], reduction="sum"))
            found += out.logits.argmax(-1).tolist()
            wanted += batch["labels"].tolist()
        return {
            "loss": total / len(wanted),
            "accuracy": accuracy(found, wanted),
            "f1": macro_f1(found, wanted),
        }


TASK = Task(
    name="classify",
    recipe="classify",
    config=CONFIG,
    objective=OBJECTIVE,
    metrics={"loss": "min", "accuracy": "max", "f1": "max"},
    prepare=prepare,
    problems=fit_length,
)
