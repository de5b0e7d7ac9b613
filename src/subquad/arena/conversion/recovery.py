"""MiniLM after minutes of recovery training: embeddings of texts that training never saw.

    cosine      of the converted model's embedding and the exact model's, of one text
    neighbours  share of texts whose nearest other text, by cosine, is the exact model's too
    margin      where it is another one: by how much the exact model prefers its own, in cosine

Trained on 400 texts of the Brown corpus, towards the model's own exact output, without labels;
measured at 512 tokens on the other 100, and on texts of two corpora that training knows nothing
of: the packaged narratives and LibreOffice's help. A text is its first 512 tokens.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from subquad import convert, recover, revert
from subquad.arena.corpora import brown, help_pairs
from subquad.arena.encoders import Encoder, embed, packaged_text
from subquad.arena.zoo import Zoo, load_minilm

__all__ = ["RECIPES", "Recipe", "cosines", "lost_margins", "measure", "neighbours_kept", "table"]

LENGTH = 512
HELD_OUT = 100
OTHERS = 24
"""Texts of each other corpus."""


@dataclass(frozen=True)
class Recipe:
    """A mechanism and how it is trained.

    Args:
        what: for people.
        mechanism: in the option grammar.
        method: of `subquad.recover`.
        rate: learning rate; None for the method's.
        batch: passages a step.
        minutes: limit of the training.
        seeds: of mechanism and training.
    """

    what: str
    mechanism: str
    method: str
    rate: float | None = None
    batch: int = 4
    minutes: float = 4.0
    seeds: tuple[int, ...] = (0,)


LARGER = "near_far(window=20, heavy=80, far=key_clusters(clusters=192, refine=4, members=4))"
"""137 keys exactly and 192 features, where the default has 96 and 128."""

TWICE = "near_far(window=27, heavy=121, far=key_clusters(clusters=256, refine=4, members=4))"
"""192 keys exactly and 256 features."""

RECIPES = (
    Recipe("near and far", "near_far", "full", seeds=(0, 1, 2)),
    Recipe("near and far, 1.5 times the size", LARGER, "full", seeds=(0, 1, 2)),
    Recipe("near and far, twice the size", TWICE, "full"),
    Recipe("pure, signed", "kernel_nystrom(features=256)", "full"),
    Recipe("pure, learned map", "hedgehog(features=256)", "auto"),
    Recipe(
        "pure, data-aware",
        "performer(features=256, estimator=derf, gauge=balance, learned=true)",
        "auto",
    ),
    Recipe("pure, random, as published", "performer(features=256)", "full"),
)
"""The default hybrid, and attention without any exact part at 256 features."""


def measure(
    zoo: Zoo,
    *,
    quick: bool,
    echo: Callable[[str], None],
    recipes: Sequence[Recipe] = RECIPES,
) -> dict[str, Any]:
    """Converts, measures, trains and measures again; the weights are put back in between.

    Args:
        zoo: where the model and the texts are.
        quick: one recipe, a few seconds.
        echo: shows progress.
        recipes: what to train.
    """
    encoder = load_minilm(zoo)
    train, tests = texts(zoo, quick)
    weights = {name: tensor.clone() for name, tensor in encoder.model.state_dict().items()}
    exact = {name: _embedded(encoder, rows) for name, rows in tests.items()}
    runs = []
    for recipe in recipes[: 1 if quick else None]:
        for seed in recipe.seeds[: 1 if quick else None]:
            echo(f"{recipe.mechanism}, seed {seed}")
            convert(encoder.model, recipe.mechanism, seed=seed)
            before = {n: _against(encoder, rows, exact[n]) for n, rows in tests.items()}
            start = time.process_time()
            report = recover(
                encoder.model, train, encoder.tokenizer, method=recipe.method, rate=recipe.rate,
                batch=recipe.batch, minutes=0.5 if quick else recipe.minutes, length=LENGTH,
                held_out=tests["brown"][:8], seed=seed, progress=echo,
            )  # fmt: skip
            processor = time.process_time() - start
            after = {n: _against(encoder, rows, exact[n]) for n, rows in tests.items()}
            runs.append({
                "what": recipe.what, "mechanism": recipe.mechanism, "method": report.method,
                "seed": seed, "steps": report.steps, "minutes": report.seconds / 60,
                "processor_minutes": processor / 60, "trained": report.trained,
                "before": before, "after": after, "curve": list(report.curve),
            })  # fmt: skip
            echo(f"  {before['brown']['cosine']:.5f} → {after['brown']['cosine']:.5f}")
            revert(encoder.model)
            encoder.model.load_state_dict(weights)
    return {
        "settings": {
            "texts": ", ".join(f"{len(rows)} of {name}" for name, rows in tests.items()),
            "tokens": LENGTH,
            "trained on": f"{len(train)} texts of brown",
            "limit": "30 s" if quick else f"{recipes[0].minutes:g} minutes",
        },
        "runs": runs,
        "notes": [
            "Nearest neighbours are kept where a text's nearest other text of its corpus is that "
            "of the exact model. Minutes are wall-clock time with all measuring in between; "
            "processor minutes say what the machine really gave."
        ],
    }


def texts(zoo: Zoo, quick: bool) -> tuple[list[str], dict[str, list[str]]]:
    """Texts to train on, and held-out ones by corpus."""
    found = list(brown(zoo).values())
    random.Random(0).shuffle(found)
    count = 12 if quick else HELD_OUT
    other = 4 if quick else OTHERS
    verses = packaged_text().split()
    help_text = " ".join(english for english, _ in help_pairs(zoo)).split()
    return found[count:], {
        "brown": found[:count],
        "narratives": _stretches(verses, other),
        "help": _stretches(help_text, other),
    }


def _stretches(words: list[str], count: int) -> list[str]:
    """`count` pieces in equal distances, each of more than enough words."""
    size = min(LENGTH, len(words) // count)
    step = (len(words) - size) // max(1, count - 1)
    return [" ".join(words[index * step : index * step + size]) for index in range(count)]


def _embedded(encoder: Encoder, rows: list[str]) -> Tensor:
    ids = encoder.tokenizer(rows, truncation=True, max_length=LENGTH)["input_ids"]
    return embed(encoder.model, ids, int(encoder.tokenizer.pad_token_id or 0), size=4)


def _against(encoder: Encoder, rows: list[str], exact: Tensor) -> dict[str, Any]:
    found = _embedded(encoder, rows)
    same = cosines(found, exact)
    return {
        "cosine": float(same.mean()),
        "cosine_p5": float(torch.quantile(same, 0.05)),
        "neighbours": neighbours_kept(found, exact),
        "lost_margins": lost_margins(found, exact),
    }


def cosines(found: Tensor, exact: Tensor) -> Tensor:
    """Cosines of unit vectors (N, C), row by row."""
    return (found * exact).sum(-1)


def neighbours_kept(found: Tensor, exact: Tensor) -> float:
    """Share of rows whose nearest other row is the same in both sets of unit vectors (N, C)."""
    return float((_similar(found).argmax(-1) == _similar(exact).argmax(-1)).double().mean())


def lost_margins(found: Tensor, exact: Tensor) -> list[float]:
    """For each row whose nearest other row changed: cosine of the old one less the new one's.

    Both cosines are the exact model's. Where they are smaller than what the cosines moved by,
    the exact model itself hardly preferred one to the other.
    """
    similar = _similar(exact)
    best, place = similar.max(-1)
    chosen = _similar(found).argmax(-1)
    margin = best - similar.gather(-1, chosen[:, None]).squeeze(-1)
    return [float(value) for value in margin[chosen != place]]


def _similar(rows: Tensor) -> Tensor:
    """Cosines of unit vectors (N, C) with the others, −∞ with themselves."""
    return (rows @ rows.T).fill_diagonal_(-torch.inf)


def table(result: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each recipe: means over seeds, with their standard deviation."""
    rows = []
    runs: list[dict[str, Any]] = result["runs"]
    for mechanism in dict.fromkeys(run["mechanism"] for run in runs):
        group = [run for run in runs if run["mechanism"] == mechanism]
        row: dict[str, Any] = {
            "mechanism": f"`{mechanism}`",
            "trained": group[0]["method"],
            "steps": _mean(run["steps"] for run in group),
            "processor minutes": _mean(run["processor_minutes"] for run in group),
        }
        for name in group[0]["before"]:
            for moment in ("before", "after"):
                row[f"{name}, {moment}"] = _spread([run[moment][name]["cosine"] for run in group])
        for moment in ("before", "after"):
            row[f"5th percentile, {moment}"] = _spread(
                [run[moment]["brown"]["cosine_p5"] for run in group]
            )
            row[f"neighbours kept, {moment}"] = _spread(
                [run[moment]["brown"]["neighbours"] for run in group], 3
            )
        lost = [gap for run in group for gap in run["after"]["brown"]["lost_margins"]]
        row["largest margin lost, after"] = max(lost, default=0.0)
        rows.append(row)
    return rows


def _mean(values: Any) -> float:
    return statistics.fmean(values)


def _spread(values: list[float], digits: int = 5) -> str:
    text = f"{statistics.fmean(values):.{digits}f}"
    return text if len(values) < 2 else f"{text} ± {statistics.stdev(values):.{digits}f}"
