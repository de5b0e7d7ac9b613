"""Question answering: where in a text the answer stands, exact match and F1 of its words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from subquad.data.labelled import Question, Questions
from subquad.data.pairs import Problems
from subquad.errors import OptionError
from subquad.training.metrics import answer_f1, exact_match
from subquad.training.recipe import Recipe
from subquad.training.tasks.base import Batch, Prepared, Say, Task
from subquad.training.tasks.heads import (
    CONFIG,
    OBJECTIVE,
    Rows,
    corpora,
    fit_length,
    predictions,
)
from subquad.training.tasks.parts import build_model, notes_of, tokenizer_of

__all__ = ["TASK"]

OVERLAP = 4
"""Windows of a long text share a part of `data.max_length`: one of this many."""

LONGEST_ANSWER = 30
"""Tokens; Devlin et al.'s code has the same."""


def prepare(recipe: Recipe, folder: Path, say: Say) -> Prepared:
    """Reads questions, trains a tokenizer on them and their texts, and builds the model."""
    from subquad.models import EncoderForQuestionAnswering

    data = recipe.data
    train, valid, notes = corpora(recipe, lambda path: Questions.open(path, on_bad=data.on_bad))
    tokenizer = tokenizer_of(recipe, folder, lambda: _texts(train), say)
    segments = recipe.model["segments"]
    examples, left_out = windows(train, tokenizer, data.max_length, segments)
    notes += notes_of("training questions", left_out)
    tests, left_out = windows(valid, tokenizer, data.max_length, segments)
    notes += notes_of("validation questions", left_out)
    say(
        f"{len(train)} training questions ({len(examples)} windows), "
        f"{len(valid)} validation questions ({len(tests)} windows)"
    )
    return Prepared(
        model=build_model(TASK, EncoderForQuestionAnswering, recipe, tokenizer),
        tokenizer=tokenizer,
        lengths=examples.lengths,
        batch=examples.batch,
        objective=TASK.build_objective(recipe),
        evaluate=_Validation(tests, valid, recipe.training.tokens),
        size=_questions,
        fingerprint={"train": train.fingerprint, "valid": valid.fingerprint},
        notes=notes,
    )


def _texts(questions: Iterable[Question]) -> Iterator[str]:
    """Each text once, where it stands beside several questions in a row."""
    before = None
    for question in questions:
        yield question.question
        if question.context != before:
            yield question.context
        before = question.context


def _questions(batch: Batch) -> int:
    return len(batch["start_positions"])


class Windows(Rows):
    """Rows of a question and a part of its text.

    Args:
        rows, pad: see `Rows`.
        origins: of each row, its question's number, and for each token the characters of the
            text that it stands for; None for tokens that are not of the text.
    """

    def __init__(
        self,
        rows: Sequence[dict[str, Any]],
        pad: int,
        origins: Sequence[tuple[int, list[tuple[int, int] | None]]],
    ) -> None:
        super().__init__(rows, pad)
        self.origins = origins


def windows(
    questions: Any, tokenizer: Any, most: int, segments: int = 2
) -> tuple[Windows, Problems]:
    """Questions with their texts as rows of at most `most` tokens, and what was left out.

    A text that is too long is cut into windows that overlap by a quarter of `most`. The answer
    to a window without the whole answer is the first special token: nothing. Devlin et al. 2019,
    arXiv 1810.04805, sections 4.2 and 4.3.

    Args:
        questions: `Questions`, or some of them.
        tokenizer: a fast one.
        most: tokens of a row.
        segments: of the model; with two, text and question are told apart.

    Raises:
        OptionError: no question is left.
    """
    problems = Problems()
    rows: list[dict[str, Any]] = []
    origins: list[tuple[int, list[tuple[int, int] | None]]] = []
    stride = most // OVERLAP
    for place, asked in enumerate(questions):
        room = most - len(tokenizer(asked.question, asked.question[:1])["input_ids"])
        if room < 2 * stride:
            problems.add(
                f"question longer than {most - 2 * stride} tokens", _line(questions, place)
            )
            continue
        found = tokenizer(
            asked.question,
            asked.context,
            truncation="only_second",
            max_length=most,
            stride=stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        for window, ids in enumerate(found["input_ids"]):
            sides, offsets = found.sequence_ids(window), found["offset_mapping"][window]
            own = [
                tuple(offset) if side == 1 and offset[0] < offset[1] else None
                for side, offset in zip(sides, offsets, strict=True)
            ]
            first, last = _span(own, asked.start, asked.start + len(asked.answers[0]))
            if first is None or last is None:
                first = last = sides.index(None)
            row = {"input_ids": ids, "start_positions": first, "end_positions": last}
            if segments > 1:
                begin = sides.index(1)
                row["token_type_ids"] = [int(index >= begin) for index in range(len(ids))]
            rows.append(row)
            origins.append((place, own))
    if not rows:
        raise OptionError(f"no question is left\n{problems}")
    return Windows(rows, tokenizer.pad_token_id, origins), problems


def _line(questions: Any, place: int) -> int:
    return int(questions.line_number(place))


def _span(
    own: Sequence[tuple[int, int] | None], start: int, end: int
) -> tuple[int | None, int | None]:
    """(first, last) token of these characters; None for one that this window lacks."""
    first = last = None
    for place, offset in enumerate(own):
        if offset is not None and offset[0] <= start < offset[1] and first is None:
            first = place
        if offset is not None and offset[0] < end <= offset[1]:
            last = place
    return first, last


def best_span(
    start: Tensor, end: Tensor, inside: Tensor, longest: int = LONGEST_ANSWER
) -> tuple[float, int, int]:
    """(score, first, last) of the best answer of a window: max of start_i + end_j.

    Over tokens i ≤ j < i + longest of the text. O(L·longest).

    Args:
        start, end: (L,) log-probabilities.
        inside: (L,) bool, True = a token of the text, one at least.
        longest: tokens of an answer.
    """
    lowest = float("-inf")
    start, end = start.masked_fill(~inside, lowest), end.masked_fill(~inside, lowest)
    padded = torch.nn.functional.pad(end, (0, longest - 1), value=lowest)
    scores = start[:, None] + padded.unfold(0, longest, 1)
    best = int(scores.argmax())
    first, more = divmod(best, longest)
    return float(scores[first, more]), first, first + more


@dataclass(frozen=True)
class _Validation:
    examples: Windows
    questions: Any
    tokens: int

    def __call__(self, model: Any) -> dict[str, float]:
        """``loss``, in nats a window and end, ``exact`` match and ``f1`` of the answers' words.

        Of the windows of a text the one with the most probable answer counts. A question that was
        left out is answered with nothing.
        """
        total = 0.0
        answers: dict[int, tuple[float, str]] = {}
        rows = self.examples
        for indices, _, out in predictions(model, rows, rows.batch, self.tokens):
            total += float(out.loss) * len(indices)
            starts = out.start_logits.float().log_softmax(-1).cpu()
            ends = out.end_logits.float().log_softmax(-1).cpu()
            for row, index in enumerate(indices):
                place, own = rows.origins[index]
                inside = torch.tensor([offset is not None for offset in own])
                if not inside.any():
                    continue
                size = len(own)
                score, first, last = best_span(starts[row, :size], ends[row, :size], inside)
                if place not in answers or score > answers[place][0]:
                    begin, end = own[first], own[last]
                    assert begin is not None and end is not None, "tokens of the text"
                    text = self.questions[place].context[begin[0] : end[1]]
                    answers[place] = (score, text)
        found = [answers.get(place, (0.0, ""))[1] for place in range(len(self.questions))]
        return {
            "loss": total / len(rows),
            "exact": self.mean(exact_match, found),
            "f1": self.mean(answer_f1, found),
        }

    def mean(self, metric: Any, found: Sequence[str]) -> float:
        pairs = zip(found, self.questions, strict=True)
        return sum(metric(text, asked.answers) for text, asked in pairs) / len(found)


TASK = Task(
    name="qa",
    recipe="qa",
    config=CONFIG,
    objective=OBJECTIVE,
    metrics={"loss": "min", "exact": "max", "f1": "max"},
    prepare=prepare,
    problems=fit_length,
)
