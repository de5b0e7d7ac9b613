"""Classification of long documents: what each mechanism's accuracy costs, from scratch.

The Brown corpus, 500 texts of some 2,000 words, in four kinds: press, prose, learned and fiction.
A row without attention, and one that reads the beginning alone, tell what attention to a long
text is worth here.
"""

from __future__ import annotations

import json as json_module
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from subquad.arena import corpora
from subquad.arena.conversion import section
from subquad.arena.machine import machine
from subquad.arena.zoo import Zoo

__all__ = ["run"]

KINDS = {"press": "abc", "prose": "defgh", "learned": "j", "fiction": "klmnpr"}
TEST = 100
EPOCHS = 5
ROWS: Sequence[dict[str, Any]] = (
    {"mechanism": "softmax", "tokens": 2048},
    {"mechanism": "performer", "tokens": 2048},
    {"mechanism": "near_far", "tokens": 2048},
    {"mechanism": "softmax", "tokens": 256},
    {"mechanism": "none", "tokens": 2048},
)
SIZES = {
    "model.d_model": 64,
    "model.num_heads": 2,
    "model.num_layers": 2,
    "model.dim_feedforward": 256,
    "model.attention_dropout": 0.0,  # most mechanisms have none
}


def run(
    out: Path,
    quick: bool,
    json: bool,
    echo: Callable[[str], None],
    texts: Path | None = None,
) -> dict[str, Any]:
    """Trains an encoder for each row; writes ``classification.json`` and ``classification.md``.

    Args:
        out: folder for the results.
        quick: a few steps on a few texts, to see whether it runs.
        json: whether the caller wants nothing but the result.
        echo: shows progress.
        texts: where the corpus lies, see `Zoo.default`.

    Raises:
        OptionError, ImportError: the corpus, or a package, is missing; says how to get them.
    """
    zoo, start = Zoo.default(texts=texts), time.perf_counter()
    before = torch.get_num_threads()
    try:
        with tempfile.TemporaryDirectory() as folder:
            counts = _files(zoo, Path(folder), quick)
            rows = [_measured(Path(folder), row, quick, echo) for row in ROWS]
    finally:
        torch.set_num_threads(before)
    result = {
        "title": "Classification of long documents, from scratch",
        "command": "subquad bench classification" + " --quick" * quick,
        "quick": quick,
        "seconds": time.perf_counter() - start,
        "machine": machine(threads=1),
        "settings": {
            "texts": "{train} of the Brown corpus to train on, {test} others to test; {share:.0%} "
            "of these are of the most frequent kind".format(**counts),
            "recipe": f"`classify`, 2 layers, 64 wide, {EPOCHS} epochs, seed 0",
        },
        "rows": rows,
        "notes": NOTES,
    }
    out.mkdir(parents=True, exist_ok=True)
    text = json_module.dumps(result, indent=1, ensure_ascii=False) + "\n"
    (out / "classification.json").write_text(text, encoding="utf-8")
    page = "\n".join([f"# {result['title']}", "", *section(result, _table(rows)), ""])
    (out / "classification.md").write_text(page, encoding="utf-8")
    if not json:
        echo(page)
    return result


NOTES = [
    "*accuracy* and *macro F1*: of the test texts after the last epoch; no checkpoint is chosen by "
    "them. *CPU ms a step*: time of the process for a step of 8,192 tokens, forward, backward and "
    "the optimiser's, with all else that a run does. The mechanism *none* has feed-forward blocks "
    "alone, whose vectors are averaged: it knows which words occur, and where.",
    "One split and one seed: the accuracy of 100 texts is uncertain by 0.04 (one deviation).",
]


def _files(zoo: Zoo, folder: Path, quick: bool) -> dict[str, Any]:
    """Writes train.jsonl and test.jsonl; how many texts each has."""
    kinds = {letter: kind for kind, letters in KINDS.items() for letter in letters}
    rows = [
        {"text": text, "label": kinds[name[1]]} for name, text in sorted(corpora.brown(zoo).items())
    ]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    mixed = [rows[index] for index in order]
    parts = {"test": mixed[:TEST], "train": mixed[TEST:]}
    for name, part in parts.items():
        parts[name] = part[:12] if quick else part
        text = "".join(json_module.dumps(row) + "\n" for row in parts[name])
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    labels = [row["label"] for row in parts["test"]]
    most = max(map(labels.count, labels)) / len(labels)
    return {**{name: len(part) for name, part in parts.items()}, "share": most}


def _measured(
    folder: Path, row: dict[str, Any], quick: bool, echo: Callable[[str], None]
) -> dict[str, Any]:
    """Trains one model and tests it."""
    from subquad.training.recipe import Recipe
    from subquad.training.run import line, train

    attends = row["mechanism"] != "none"
    recipe = Recipe.load(
        "classify",
        {
            **SIZES,
            "model.mechanism": row["mechanism"] if attends else "softmax",
            "model.pattern": None if attends else "f",
            "data.train": str(folder / "train.jsonl"),
            "data.valid": str(folder / "test.jsonl"),
            "data.max_length": row["tokens"],
            "training.steps": 4 if quick else None,
            "training.epochs": EPOCHS,
            "training.threads": 1,
            "evaluation.every": 10**6,  # at the end alone
            "evaluation.patience": None,
        },
    )
    place = folder / f"{row['mechanism']}-{row['tokens']}"
    begun = time.process_time()
    report = train(recipe, place, progress=lambda point: echo(f"{place.name}: {line(point)}"))
    seconds = time.process_time() - begun
    return {
        **row,
        "parameters": report.parameters,
        "steps": report.steps,
        "cpu_seconds": seconds,
        "test": {name: report.last[name] for name in ("loss", "accuracy", "f1")},
    }


def _table(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows for Markdown."""
    return [
        {
            "mechanism": row["mechanism"],
            "tokens of a text": row["tokens"],
            "accuracy": row["test"]["accuracy"],
            "macro F1": row["test"]["f1"],
            "loss": row["test"]["loss"],
            "CPU ms a step": round(1000 * row["cpu_seconds"] / row["steps"]),
            "CPU minutes": row["cpu_seconds"] / 60,
        }
        for row in rows
    ]
