"""What tasks with an encoder share: its loss, the files, predictions batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.attention.base import penalties as penalties_of
from subquad.data.batches import TokenBatches, pad_rows
from subquad.data.pairs import Problems
from subquad.errors import OptionError
from subquad.options import number_problem
from subquad.training.objectives import Losses
from subquad.training.recipe import Recipe
from subquad.training.tasks.base import Batch
from subquad.training.tasks.parts import corpus_paths, held_out, notes_of

__all__ = [
    "HeadLoss",
    "Rows",
    "corpora",
    "fit_length",
    "label_names",
    "label_options",
    "no_preset",
    "predictions",
]

CONFIG = "subquad.models.configuration:EncoderTransformerConfig"
OBJECTIVE = "subquad.training.tasks.heads:HeadLoss"


class HeadLoss:
    """The loss of an encoder's head, and what its mechanisms ask for.

        total = CE(logits, labels) + penalties · Σ penalty(mechanism)

    Args:
        label_smoothing: ε of the cross entropy with labels: (1 − ε) at the label, ε spread over
            all. Answers to questions, which are places, have none.
        penalties: factor of `subquad.penalties`; 0: none.

    Raises:
        OptionError: naming every wrong argument.
    """

    def __init__(self, label_smoothing: float = 0.0, *, penalties: float = 1.0) -> None:
        problems = [
            *number_problem("label_smoothing", label_smoothing, 0.0, 1.0),
            *number_problem("penalties", penalties, 0.0),
        ]
        if problems:
            raise OptionError("HeadLoss: " + "; ".join(problems))
        self.label_smoothing, self.penalties = label_smoothing, penalties

    def __call__(
        self, model: Any, batch: Mapping[str, Tensor], progress: float, generator: Any = None
    ) -> Losses:
        """The loss of a batch with labels; see `subquad.training.tasks.base.Loss`."""
        if self.label_smoothing and "labels" in batch:
            inputs = {name: value for name, value in batch.items() if name != "labels"}
            logits, labels = model(**inputs).logits, batch["labels"]
            own = F.cross_entropy(
                logits.flatten(0, -2).float(),
                labels.flatten(),
                label_smoothing=self.label_smoothing,
            )
        else:
            own = model(**batch).loss
        terms = {"cross_entropy": own}
        if self.penalties:
            terms["penalties"] = self.penalties * penalties_of(model)
        total = torch.stack(list(terms.values())).sum()
        return Losses(total, {name: term.detach() for name, term in terms.items()})


class Rows:
    """Examples in memory, as rows of ids.

    Args:
        rows: with ``input_ids`` and whatever else the model takes.
        pad: id of the padding token.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], pad: int) -> None:
        self.rows, self.pad = rows, pad
        self.lengths = torch.tensor([len(row["input_ids"]) for row in rows])

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: Sequence[int]) -> Batch:
        """These rows, padded."""
        return pad_rows([self.rows[index] for index in indices], pad=self.pad)


def predictions(
    model: Any, rows: Any, batch: Callable[[Sequence[int]], Batch], tokens: int
) -> Iterator[tuple[list[int], Batch, Any]]:
    """(indices, batch, the model's output) for all rows, in batches of similar length.

    Args:
        model: whose device is used.
        rows: have `lengths`.
        batch: indices → a batch.
        tokens: of a batch.
    """
    for indices in TokenBatches(rows.lengths, tokens=tokens, shuffle=False):
        given = {name: value.to(model.device) for name, value in batch(indices).items()}
        yield indices, given, model(**given)


def corpora(recipe: Recipe, read: Callable[[Any], Any]) -> tuple[Any, Any, list[str]]:
    """(training records, validation records, notes) of a recipe's files.

    Args:
        recipe: its section `data`.
        read: a file → its records.

    Raises:
        OptionError: no file, or one that cannot be used.
    """
    data, notes = recipe.data, []
    train = read(_one_file("data.train", data.train))
    notes += notes_of(data.train, train.problems)
    if data.valid is None:
        kept, apart = held_out(train, data.held_out, recipe.training.seed)
        notes.append(f"data.valid is not given: {len(apart)} records of data.train are held out")
        return kept, apart, notes
    valid = read(_one_file("data.valid", data.valid))
    return train, valid, notes + notes_of(data.valid, valid.problems)


def _one_file(section: str, given: Any) -> Any:
    path = corpus_paths(section, given)
    if isinstance(path, tuple):
        raise OptionError(f"{section}={given!r} must be one file")
    return path


def label_names(train: Iterable[str], valid: Iterable[str], notes: list[str]) -> list[str]:
    """All labels in their order; a note tells which of them are never trained.

    Raises:
        OptionError: there are fewer than two.
    """
    seen = set(train)
    unseen = sorted(set(valid) - seen)
    if unseen:
        notes.append(f"labels of data.valid that data.train lacks: {', '.join(unseen)}")
    names = sorted(seen.union(unseen))
    if len(names) < 2:
        raise OptionError(f"data.train has one label, {', '.join(names)}: nothing can be learned")
    return names


def label_options(names: Sequence[str]) -> dict[str, Any]:
    """A model's labels, as its config holds them."""
    return {"id2label": dict(enumerate(names)), "label2id": {n: i for i, n in enumerate(names)}}


def fit_length(recipe: Recipe) -> Iterator[str]:
    """What is wrong with a recipe's lengths, or with a preset."""
    most = recipe.model["max_position_embeddings"]
    if recipe.data.max_length > most:
        yield (
            f"data.max_length={recipe.data.max_length} is longer than "
            f"model.max_position_embeddings={most}"
        )
    yield from no_preset(recipe)


def no_preset(recipe: Recipe) -> Iterator[str]:
    """What is wrong with a preset, for tasks that have none."""
    if recipe.data.preset is not None:
        yield f"data.preset={recipe.data.preset!r}: presets are pairs of texts, for translation"


def too_long(problems: Problems, line: int, most: int, on_long: str) -> bool:
    """Counts a text that is too long; whether it is left out."""
    problems.add(f"longer than {most} tokens", line, note=on_long == "truncate")
    return on_long != "truncate"


def raise_if_asked(problems: Problems, on_long: str) -> None:
    """Ends reading where the recipe wants every text to fit.

    Raises:
        OptionError: one does not.
    """
    if on_long == "raise" and problems:
        raise OptionError(f"texts are too long\n{problems}")
