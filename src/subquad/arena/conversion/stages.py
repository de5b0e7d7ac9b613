"""What the task studies share: a model as it is, after the swap, and after minutes of training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

import subquad as sq

__all__ = ["MINUTES", "Recover", "Where", "sq_recover", "stages"]

MINUTES = 10.0
"""Length of a recovery training."""

Where = Callable[[str, nn.Module], bool]
Recover = Callable[[nn.Module, Sequence[Any]], Any]


def sq_recover(model: nn.Module, examples: Sequence[Any]) -> Any:
    """`subquad.recover` for `MINUTES`, one example a step."""
    return sq.recover(model, list(examples), minutes=MINUTES, batch=1)


def stages(
    model: nn.Module,
    score: Callable[[nn.Module], dict[str, Any]],
    parts: dict[str, Where | None],
    *,
    mechanism: str = "near_far",
    seeds: Sequence[int] = (0,),
    examples: Sequence[Any] = (),
    recover: Recover | None = None,
    echo: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Scores a model exactly, with each part of it converted, and recovered.

    Args:
        model: exact; it is exact again afterwards, with its own weights.
        score: metrics of the model, plain values.
        parts: which layers are converted, by the name for the table; None: all.
        mechanism: what they are converted to.
        seeds: each gives a row.
        examples: to recover from, none of which `score` sees.
        recover: trains a converted model in place; None leaves the last row out. It gets a
            copy of the model with the first part converted.
        echo: shows progress.

    Returns:
        Rows: model, seed (None where there is nothing random), layers, and the metrics.
    """
    rows: list[dict[str, Any]] = []

    def add(title: str, seed: int | None, layers: int, scored: nn.Module) -> None:
        rows.append({"model": title, "seed": seed, "layers": layers, **score(scored)})
        echo("  " + ", ".join(f"{key} {value}" for key, value in rows[-1].items()))

    add("original", None, 0, model)
    for title, where in parts.items():
        for seed in seeds:
            report = sq.convert(model, mechanism, where=where, seed=seed)
            try:
                add(title, seed, len(report.converted), model)
            finally:
                sq.revert(model)
    if recover is not None:
        title, where = next(iter(parts.items()))
        trained = copy.deepcopy(model)
        report = sq.convert(trained, mechanism, where=where, seed=seeds[0])
        recover(trained, examples)
        add(f"{title}, recovered", seeds[0], len(report.converted), trained)
    return rows
