"""Language models: texts put end to end and cut into blocks; each token from those before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.nn import functional as F

from subquad.data.batches import TokenBatches, pad_rows
from subquad.data.encoded import EncodedLines
from subquad.data.packing import PackedLines
from subquad.data.pairs import Lines
from subquad.errors import OptionError
from subquad.training.recipe import Recipe
from subquad.training.tasks.base import Batch, Prepared, Say, Task
from subquad.training.tasks.parts import build_model, held_out, notes_of, tokenizer_of

__all__ = ["TASK"]


def prepare(recipe: Recipe, folder: Path, say: Say) -> Prepared:
    """Reads the texts, trains a tokenizer on them, and builds the model.

    Each line is a text, with the end-of-text token behind it. Blocks have `data.max_length`
    tokens and no padding; only the last one is shorter.
    """
    from subquad.models import CausalTransformer

    data = recipe.data
    texts: Any = _open(recipe, "data.train", data.train)
    notes = notes_of(data.train, texts.problems)
    if data.valid is not None:
        valid: Any = _open(recipe, "data.valid", data.valid)
        notes += notes_of(data.valid, valid.problems)
    else:
        texts, valid = held_out(texts, data.held_out, recipe.training.seed)
        notes.append(f"data.valid is not given: {len(valid)} lines of data.train are held out")
    tokenizer = tokenizer_of(recipe, folder, lambda: texts, say)
    train, tests = (
        PackedLines(EncodedLines(lines, tokenizer, folder=folder / "data"), data.max_length)
        for lines in (texts, valid)
    )
    say(f"{len(train)} training blocks, {len(tests)} validation blocks, {len(tokenizer)} tokens")

    def batch(rows: Sequence[int], blocks: PackedLines = train) -> Batch:
        return pad_rows([blocks[row] for row in rows], pad=tokenizer.pad_token_id)

    def evaluate(model: Any) -> dict[str, float]:
        total, count = 0.0, 0
        for rows in TokenBatches(tests.lengths, tokens=recipe.training.tokens, shuffle=False):
            found = {name: value.to(model.device) for name, value in batch(rows, tests).items()}
            count += predicted(found)
            labels = found.pop("labels")[:, 1:].flatten()
            logits = model(**found).logits[:, :-1].float().flatten(0, 1)
            total += float(F.cross_entropy(logits, labels, reduction="sum"))
        loss = total / max(1, count)
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}

    return Prepared(
        model=build_model(TASK, CausalTransformer, recipe, tokenizer),
        tokenizer=tokenizer,
        lengths=train.lengths,
        batch=batch,
        objective=TASK.build_objective(recipe),
        evaluate=evaluate,
        size=predicted,
        fingerprint={"train": texts.fingerprint, "valid": valid.fingerprint},
        notes=notes,
    )


def predicted(batch: Batch) -> int:
    """Tokens that are predicted: each but the first of a block."""
    return int((batch["labels"][:, 1:] != -100).sum())


def _open(recipe: Recipe, section: str, given: Any) -> Lines:
    if given is None:
        raise OptionError(f"{section}: give a text file, one text a line (--data)")
    if not isinstance(given, str | Path):
        raise OptionError(f"{section}={given!r} must be a text file, one text a line")
    return Lines.open(given, on_bad=recipe.data.on_bad)


TASK = Task(
    name="lm",
    recipe="lm",
    config="subquad.models.configuration:CausalTransformerConfig",
    objective="subquad.training.objectives:Objective",
    metrics={"loss": "min", "perplexity": "min"},
    prepare=prepare,
)
