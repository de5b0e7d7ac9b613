"""SmolLM2-135M after recovery: perplexity and copying, four layers exact, the others constant.

The bytes of the states are first given to layers and heads by calibration, as in `smollm2`.
Then low-rank updates of q, k, v and output projections learn the exact model's next-token
distributions (Kullback–Leibler divergence) on documents of the Brown corpus into which random
strings are put twice, so that what the state should hold is asked for. Measured as in
`smollm2`, on documents that training does not see and on two other corpora. The last row shows
what the held keys are worth: the trained weights with a plain window of equal bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from subquad import convert, recover, revert
from subquad.arena import corpora
from subquad.arena.conversion import smollm2
from subquad.arena.encoders import packaged_text
from subquad.arena.zoo import Zoo, load_smollm2
from subquad.convert import Budget

__all__ = ["EXACT", "measure", "rows_with_copies", "table"]

EXACT = tuple(f"model.layers.{index}.self_attn" for index in (8, 17, 18, 23))
"""Where copying sits, as `subquad.convert.recall_layers` finds."""

LENGTH = 640
"""Tokens of a training row: room for a gap of some hundreds; measured at 1,024."""

MINUTES = 25.0
"""Of wall-clock time; `threads` of the run say on how many cores."""

RATE = 1e-4
HELD_OUT = 8
"""Documents that say how the training goes; neither trained on nor measured."""

WINDOW = "near_far(window=126, heavy=0, far=none)"
STRING = (24, 49)
"""Least and, not included, largest number of tokens of a random string."""


def rows_with_copies(
    documents: list[list[int]], length: int, vocabulary: int, seed: int
) -> list[dict[str, Tensor]]:
    """Rows of `length` tokens of documents; each has a random string in it, and again later.

    Args:
        documents: token ids.
        length: of a row; what is left of a document is not used.
        vocabulary: ids are drawn below this.
        seed: of strings, their lengths and places.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    rows = []
    for document in documents:
        for start in range(0, len(document) - length + 1, length):
            row = torch.tensor(document[start : start + length])
            size = draw(*STRING)
            gap = draw(length // 10, length - 2 * size)
            first = draw(0, length - 2 * size - gap + 1)
            string = torch.randint(vocabulary, (size,), generator=generator)
            for place in (first, first + size + gap):
                row[place : place + size] = string
            rows.append({"input_ids": row})
    return rows


def measure(zoo: Zoo, *, quick: bool, echo: Callable[[str], None]) -> dict[str, Any]:
    """Before and after recovery, and the trained weights with a window instead.

    Args:
        zoo: where the model and the texts are.
        quick: a minute of training, few texts.
        echo: shows progress.
    """
    _, model, tokenizer = load_smollm2(zoo)
    count, seeds, copies = (1, 1, 1) if quick else (8, 3, 4)
    tests = smollm2.texts(tokenizer, zoo, count)
    start = int(tokenizer("<|endoftext|>")["input_ids"][0])
    prose = tests["Brown"][:, -300:]
    seen = {tuple(row[:64].tolist()) for row in tests["Brown"]}
    documents = [
        ids
        for text in corpora.brown(zoo).values()
        if tuple((ids := tokenizer(text)["input_ids"])[:64]) not in seen
    ]
    train = rows_with_copies(documents[HELD_OUT:], LENGTH, len(tokenizer), seed=0)
    # These decide whether the training is kept, so they ask for copies too.
    held_out = rows_with_copies(documents[:HELD_OUT], LENGTH, len(tokenizer), seed=1)[:8]
    seen = tokenizer(packaged_text(), return_tensors="pt")["input_ids"][0, : 2 * smollm2.LENGTH]
    base = {name: smollm2.perplexities(model, ids) for name, ids in tests.items()}

    def state(name: str) -> dict[str, Any]:
        ratios = {
            key: (smollm2.perplexities(model, ids) - base[key]).exp().tolist()
            for key, ids in tests.items()
        }
        echo(f"{name}: perplexity ratios {_means(ratios)}")
        copied = smollm2.copying(model, prose, start, seeds, copies)
        return {"name": name, "ratios": ratios, "copy": copied}

    results = [state("exact")]
    report = convert(
        model, "near_far", keep_exact=EXACT,
        calibrate=[{"input_ids": seen.view(2, smollm2.LENGTH)}],
        budget=Budget(bytes=smollm2.STATE / smollm2.LENGTH),
    )  # fmt: skip
    results.append(state("near_far, calibrated"))
    clock = time.process_time()
    found = recover(
        model, train, method="lora", rate=RATE, batch=1, minutes=1.0 if quick else MINUTES,
        length=LENGTH, held_out=held_out,
        where=lambda name, parameter: "self_attn" in name, progress=echo,
    )  # fmt: skip
    processor = (time.process_time() - clock) / 60
    results.append(state("near_far, recovered"))
    revert(model)
    convert(model, WINDOW, keep_exact=EXACT)
    results.append(state("window of equal bytes, same weights"))
    revert(model)
    return {
        "settings": {
            "texts of each corpus": count,
            "tokens": smollm2.LENGTH,
            "exact layers": len(report.kept),
            "steps": found.steps,
            "minutes": found.seconds / 60,
            "processor minutes": processor,
            "trained parameters": found.trained,
        },
        "curve": list(found.curve),
        "results": results,
        "notes": list(found.notes),
    }


def _means(ratios: Mapping[str, list[float]]) -> str:
    means = ((name, sum(own) / len(own)) for name, own in ratios.items())
    return ", ".join(f"{name} {mean:.4f}" for name, mean in means)


def table(result: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each state of the model."""
    rows = []
    for row in result["results"]:
        every = torch.tensor([ratio for own in row["ratios"].values() for ratio in own])
        rows.append({
            "attention": row["name"],
            "perplexity": float(every.log().mean().exp()),
            **{
                name: f"{sum(own) / len(own):.4f} ({min(own):.3f}–{max(own):.3f})"
                for name, own in row["ratios"].items()
            },
            "copy": sum(row["copy"]) / len(row["copy"]),
        })  # fmt: skip
    return rows
