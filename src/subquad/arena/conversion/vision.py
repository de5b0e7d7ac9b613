"""DINOv2 ViT-S/14 on handwritten digits: a linear probe on its features, before and after.

MNIST's digits are enlarged to 224 × 224 pixels: 256 patches and CLS. The probe is ridge
regression to the ten classes on the final CLS vector, fitted once on the original model's
features of the training images; "refitted" fits it on the converted model's own features.
Cosines are between a converted model's final hidden states and the original's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from subquad.arena import corpora
from subquad.arena.conversion.stages import MINUTES, Recover, sq_recover, stages
from subquad.arena.zoo import Zoo, load_dinov2

__all__ = ["measure", "table"]

TRAIN, TEST, RECOVERY = 300, 200, 200
SEEDS = (0, 1, 2)
# ImageNet's moments, with which DINOv2 was trained.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
RIDGE = 1e-2
"""Penalty, relative to the mean variance of a feature."""


def measure(
    zoo: Zoo,
    *,
    quick: bool,
    echo: Callable[[str], None],
    recover: Recover | None = sq_recover,
) -> dict[str, Any]:
    """Probe accuracy and cosines of the original, the converted and the recovered model."""
    model: Any = load_dinov2(zoo).model
    train, test = (20, 20) if quick else (TRAIN, TEST)
    pixels, labels = corpora.mnist(zoo)
    images = _images(pixels[: train + test])
    fit, held = slice(0, train), slice(train, train + test)
    original: list[Tensor] = []

    def score(scored: nn.Module) -> dict[str, Any]:
        states = _states(scored, images)
        if not original:
            original.append(states)
        cls, first = states[:, 0], original[0][:, 0]
        probe = _probe(first[fit], labels[fit])
        own = _probe(cls[fit], labels[fit])
        cosine = torch.cosine_similarity(states[held], original[0][held], dim=-1)
        return {
            "accuracy": _accuracy(probe, cls[held], labels[held]),
            "refitted": _accuracy(own, cls[held], labels[held]),
            "cosine of CLS": float(cosine[:, 0].mean()),
            "its 5th percentile": float(cosine[:, 0].quantile(0.05)),
            "cosine of patches": float(cosine[:, 1:].mean()),
        }

    more = pixels[train + test : train + test + RECOVERY]
    examples = [{"pixel_values": image} for image in _images(more)]
    rows = stages(
        model,
        score,
        {"near_far": None},
        seeds=SEEDS[:1] if quick else SEEDS,
        examples=examples,
        recover=None if quick else recover,
        echo=echo,
    )
    return {
        "settings": {
            "images": f"{train} to fit the probe, {test} to test it",
            "tokens": 257,
            "recovery": f"{MINUTES:g} minutes on {len(examples)} other images",
        },
        "rows": rows,
    }


def table(result: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each model and seed."""
    rows: list[dict[str, Any]] = result["rows"]
    return rows


def _images(pixels: Tensor) -> Tensor:
    """(N, 3, 224, 224), as DINOv2 wants them."""
    large = nn.functional.interpolate(pixels[:, None], (224, 224), mode="bicubic").clamp(0, 1)
    mean, std = (torch.tensor(value).view(1, 3, 1, 1) for value in (MEAN, STD))
    return (large - mean) / std


def _states(model: nn.Module, images: Tensor, size: int = 8) -> Tensor:
    """Final hidden states (N, 257, C)."""
    with torch.no_grad():
        found = [model(pixel_values=part).last_hidden_state for part in images.split(size)]
    return torch.cat(found)


def _probe(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Ridge regression to one-hot classes: (mean of x, weights with a row for the intercept)."""
    y = nn.functional.one_hot(labels, 10).double()
    mean, x = x.double().mean(0), x.double()
    x = x - mean
    gram = x.mT @ x
    penalty = RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.double)
    weights = torch.linalg.solve(gram + penalty, x.mT @ (y - y.mean(0)))
    return mean, torch.cat([weights, y.mean(0)[None]])


def _accuracy(probe: tuple[Tensor, Tensor], x: Tensor, labels: Tensor) -> float:
    mean, weights = probe
    scores = (x.double() - mean) @ weights[:-1] + weights[-1]
    return float((scores.argmax(-1) == labels).double().mean())
