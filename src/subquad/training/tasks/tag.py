"""Tagging: words with a tag each, an encoder with a head, accuracy of words and F1 of spans."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.nn import functional as F

from subquad.data.labelled import Tagged
from subquad.data.pairs import Problems
from subquad.errors import OptionError
from subquad.training.metrics import accuracy, span_f1
from subquad.training.recipe import Recipe
from subquad.training.tasks.base import Prepared, Say, Task
from subquad.training.tasks.heads import (
    CONFIG,
    OBJECTIVE,
    Rows,
    corpora,
    fit_length,
    label_names,
    label_options,
    predictions,
    raise_if_asked,
    too_long,
)
from subquad.training.tasks.parts import build_model, notes_of, tokenizer_of

__all__ = ["TASK"]

OUTSIDE = "O"
SPANS = re.compile(r"O|[BIESLUM]-.+")
"""What all tags look like that mean spans."""


def prepare(recipe: Recipe, folder: Path, say: Say) -> Prepared:
    """Reads sentences, trains a tokenizer on their words, and builds the model."""
    from subquad.models import EncoderForTokenClassification

    data = recipe.data
    columns: dict[str, Any] = {
        "word": 1 if data.source == "source" else data.source,
        "tag": -1 if data.target == "target" else data.target,
    }
    train, valid, notes = corpora(
        recipe, lambda path: Tagged.open(path, on_bad=data.on_bad, **columns)
    )
    tokenizer = tokenizer_of(recipe, folder, lambda: (" ".join(words) for words, _ in train), say)
    names = label_names(
        (tag for _, tags in train for tag in tags),
        (tag for _, tags in valid for tag in tags),
        notes,
    )
    examples, left_out = encoded(train, tokenizer, names, data.max_length, data.on_long)
    notes += notes_of("training sentences", left_out)
    tests, cut = encoded(valid, tokenizer, names, data.max_length, "truncate")
    notes += notes_of("validation sentences", cut)
    say(f"{len(examples)} training sentences, {len(tests)} validation sentences, {len(names)} tags")
    return Prepared(
        model=build_model(
            TASK, EncoderForTokenClassification, recipe, tokenizer, **label_options(names)
        ),
        tokenizer=tokenizer,
        lengths=examples.lengths,
        batch=examples.batch,
        objective=TASK.build_objective(recipe),
        evaluate=_Validation(tests, valid, names, recipe.training.tokens),
        fingerprint={"train": train.fingerprint, "valid": valid.fingerprint},
        notes=notes,
    )


def align(
    tokenizer: Any, words: Sequence[str], most: int | None = None
) -> tuple[list[int], list[int | None]]:
    """(ids, for each the word that it is the first piece of, or None).

    A word is tagged by its first piece (Devlin et al. 2019, arXiv 1810.04805, section 5.3).

    Args:
        tokenizer: a fast one.
        words: of a sentence.
        most: tokens; None: any.
    """
    options = {"truncation": True, "max_length": most} if most is not None else {}
    found = tokenizer(list(words), is_split_into_words=True, verbose=False, **options)
    first: list[int | None] = []
    seen: set[int | None] = {None}
    for word in found.word_ids():
        first.append(None if word in seen else word)
        seen.add(word)
    return found["input_ids"], first


def encoded(
    sentences: Any, tokenizer: Any, names: Sequence[str], most: int, on_long: str
) -> tuple[Sentences, Problems]:
    """Rows with labels at the first piece of each word, and what was too long.

    Raises:
        OptionError: no sentence is left, or one is too long that must not be.
    """
    number = {name: index for index, name in enumerate(names)}
    problems = Problems()
    rows: list[dict[str, Any]] = []
    words_of: list[tuple[int, list[int]]] = []
    for place, (words, tags) in enumerate(sentences):
        ids, first = align(tokenizer, words)
        if len(ids) > most:
            if too_long(problems, sentences.line_number(place), most, on_long):
                continue
            ids, first = align(tokenizer, words, most)
        labels = [-100 if word is None else number[tags[word]] for word in first]
        if max(labels) < 0:
            problems.add("no word has a token", sentences.line_number(place))
            continue
        rows.append({"input_ids": ids, "labels": labels})
        words_of.append((place, [word for word in first if word is not None]))
    raise_if_asked(problems, on_long)
    if not rows:
        raise OptionError(f"no sentence is left\n{problems}")
    return Sentences(rows, tokenizer.pad_token_id, words_of), problems


class Sentences(Rows):
    """Rows of sentences.

    Args:
        rows, pad: see `Rows`.
        words_of: of each row, its sentence's number, and the words that its labels are of.
    """

    def __init__(
        self,
        rows: Sequence[dict[str, Any]],
        pad: int,
        words_of: Sequence[tuple[int, list[int]]],
    ) -> None:
        super().__init__(rows, pad)
        self.words_of = words_of


@dataclass(frozen=True)
class _Validation:
    examples: Sentences
    sentences: Any
    names: Sequence[str]
    tokens: int

    def __call__(self, model: Any) -> dict[str, float]:
        """``loss``, in nats a word, ``accuracy`` of words, and ``f1`` where tags mean spans.

        A word without a label, because it is behind the last token that fits, counts as "O".
        """
        total, count = 0.0, 0
        wanted = [tags for _, tags in self.sentences]
        tagged = [[OUTSIDE] * len(tags) for tags in wanted]
        rows = self.examples
        for indices, batch, out in predictions(model, rows, rows.batch, self.tokens):
            labels, logits = batch["labels"], out.logits.float()
            total += float(F.cross_entropy(logits.mT, labels, reduction="sum"))
            count += int((labels != -100).sum())
            best = logits.argmax(-1)
            for row, index in enumerate(indices):
                place, words = rows.words_of[index]
                picked = best[row, labels[row] != -100].tolist()
                for word, label in zip(words, picked, strict=True):
                    tagged[place][word] = self.names[label]
        flat = [[tag for tags in sentences for tag in tags] for sentences in (tagged, wanted)]
        metrics = {"loss": total / count, "accuracy": accuracy(*flat)}
        if all(SPANS.fullmatch(name) for name in self.names):
            metrics["f1"] = span_f1(tagged, wanted)
        return metrics


TASK = Task(
    name="tag",
    recipe="tag",
    config=CONFIG,
    objective=OBJECTIVE,
    metrics={"loss": "min", "accuracy": "max", "f1": "max"},
    prepare=prepare,
    problems=fit_length,
)
