"""MiniLM without training: sentence embeddings after the swap, and what attention costs.

Passages of at most 512 and 128 tokens from three corpora that no calibration saw: narratives
(in the package), the Brown corpus, e-mails. For each setting: the cosine of the mean-pooled
embedding with the exact model's, mean and 5th percentile over passages and seeds, and how often
the nearest other passage of the corpus stays the same. Attention alone is timed at the model's
shape, 12 heads × 32, forward on random inputs, its calls taken in turns with torch's exact kernel.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import subquad as sq
from subquad.arena import corpora, scaling
from subquad.arena.encoders import embed, packaged_text, passages
from subquad.arena.zoo import Zoo, load_minilm

__all__ = ["crossover", "measure", "table"]

COUNT = 40
"""Passages of each corpus."""

SEEDS = (0, 1, 2)
LENGTHS = (512, 128)
HEADS, DIM = 12, 32
TIMED = (1024, 2048, 3072, 4096, 8192, 16_384)


def settings(length: int) -> dict[str, str]:
    """Mechanisms by name; those beside near_far's own get a quarter more.

    128 exact keys and 128 features at 512 tokens, half of both at 128; near_far itself has 96
    and 128 (48 and 64), its fast preset 112 and 64 (56 and 32).
    """
    features = 128 if length > 256 else 64
    near = f"window={features // 8}, heavy={features - features // 4 - 1}, sinks=0"
    return {
        "near_far": "near_far",
        "near_far, fast": "near_far(preset=fast)",
        "positive random features": f"near_far({near}, far=performer(features={features}, "
        "estimator=derf, gauge=balance))",
        "kernel Nyström": f"near_far({near}, far=kernel_nystrom(features={features}))",
        "sampled keys": f"sampled(heavy={features}, samples={features})",
        "no far field": f"near_far({near}, far=none)",
        "uniform": "uniform",
    }


def measure(zoo: Zoo, *, quick: bool, echo: Callable[[str], None]) -> dict[str, Any]:
    """Embeddings of every setting and corpus, times against exact attention, memory."""
    encoder = load_minilm(zoo)
    model = encoder.model
    rows: list[dict[str, Any]] = []
    seeds = SEEDS[:1] if quick else SEEDS
    for length in LENGTHS:
        samples = {
            name: passages(text, encoder.tokenizer, tokens=length, count=4 if quick else COUNT)[0]
            for name, text in _corpora(zoo).items()
        }
        exact = {name: embed(model, ids) for name, ids in samples.items()}
        for name, spec in settings(length).items():
            found: dict[str, list[Tensor]] = {}
            for seed, (corpus, ids) in itertools.product(seeds, samples.items()):
                if spec == "uniform":
                    vectors = _uniform(model, ids)
                else:
                    sq.convert(model, spec, seed=seed)
                    vectors = embed(model, ids)
                    sq.revert(model)
                found.setdefault(corpus, []).append(vectors)
            rows.append(_row(length, name, spec, found, exact))
            echo(f"  {length} {name}: {rows[-1]['cosine']:.4f} ({rows[-1]['5th percentile']:.4f})")
    result: dict[str, Any] = {
        "settings": {
            "passages": f"{sum(map(len, samples.values()))} at each length",
            "corpora": ", ".join(samples),
            "seeds": len(seeds),
        },
        "rows": rows,
        "speed": _speed(TIMED[:2] if quick else TIMED, rounds=3 if quick else 7, echo=echo),
    }
    crossings = {
        name: crossover([(row["tokens"], row[f"{name}, × faster"]) for row in result["speed"]])
        for name in ("near_far", "near_far, fast")
    }
    result["crossover"] = crossings
    if not quick:
        result["memory"] = scaling.measure("near_far", seconds=0.0)
    result["notes"] = [
        "Attention alone is faster than torch's exact kernel from "
        + ", ".join(f"{x:.0f} tokens ({name})" if x else f"beyond {TIMED[-1]} ({name})"
                    for name, x in crossings.items())
        + "."
    ]  # fmt: skip
    if "memory" in result:
        peak = result["memory"]["peak_bytes"] / 1e9
        result["notes"].append(
            f"A training step of near_far at {scaling.LENGTHS[1]:,} tokens, {scaling.HEADS} heads "
            f"of {scaling.DIM}, peaks at {peak:.2f} GB for the whole process."
        )
    return result


def table(result: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each length and setting, then one for each length that was timed."""
    return [*result["rows"], *result["speed"]]


def crossover(ratios: Iterable[tuple[int, float]]) -> float | None:
    """The length from which on ratios (length, × faster) stay above 1, by log-log interpolation.

    None if the last one is below 1.
    """
    points = sorted(ratios)
    if points[-1][1] < 1.0:
        return None
    found = float(points[0][0])
    for (low, below), (high, above) in itertools.pairwise(points):
        if below < 1.0 <= above:
            part = -math.log(below) / (math.log(above) - math.log(below))
            found = low * (high / low) ** part
    return found


def _corpora(zoo: Zoo) -> dict[str, str]:
    """Texts by name: one document after the other, an empty line between two."""

    def joined(documents: Iterable[str]) -> str:
        lines = ("\n".join(filter(str.strip, text.split("\n"))) for text in documents)
        return "\n\n".join(lines)

    return {
        "narratives": packaged_text(),
        "Brown": joined(corpora.brown(zoo).values()),
        "e-mails": joined(corpora.mails(zoo).values()),
    }


def _row(
    length: int,
    name: str,
    spec: str,
    found: dict[str, list[Tensor]],
    exact: dict[str, Tensor],
) -> dict[str, Any]:
    cosines, kept, each = [], [], {}
    for corpus, runs in found.items():
        own = [(vectors * exact[corpus]).sum(-1) for vectors in runs]
        cosines += own
        kept += [_nearest(vectors) == _nearest(exact[corpus]) for vectors in runs]
        each[corpus] = float(torch.cat(own).mean())
    all_ = torch.cat(cosines)
    seeds = zip(*(torch.stack([(x * exact[c]).sum(-1).mean() for x in runs])
                  for c, runs in found.items()), strict=True)  # fmt: skip
    means = [float(torch.stack(means).mean()) for means in seeds]
    return {
        "tokens": length,
        "setting": name,
        "mechanism": spec,
        "cosine": float(all_.mean()),
        "5th percentile": float(all_.quantile(0.05)),
        "over seeds ±": statistics.stdev(means) if len(means) > 1 else 0.0,
        "nearest kept": float(torch.cat(kept).double().mean()),
        **each,
    }


def _nearest(vectors: Tensor) -> Tensor:
    """The most similar other row of each."""
    return (vectors @ vectors.T).fill_diagonal_(-2.0).argmax(-1)


def _uniform(model: Any, rows: list[list[int]]) -> Tensor:
    """Embeddings with attention that averages all values: zero queries."""
    layers = [layer.attention.self.query for layer in model.encoder.layer]
    kept = [(layer.weight.detach().clone(), layer.bias.detach().clone()) for layer in layers]
    with torch.no_grad():
        for layer in layers:
            layer.weight.zero_(), layer.bias.zero_()
        found = embed(model, rows)
        for layer, (weight, bias) in zip(layers, kept, strict=True):
            layer.weight.copy_(weight), layer.bias.copy_(bias)
    return found


def _speed(
    lengths: Iterable[int], rounds: int, echo: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Milliseconds of exact attention, and how many times faster near_far is."""
    specs = {"near_far": "near_far", "near_far, fast": "near_far(preset=fast)"}
    mechanisms = {
        name: sq.build(spec, head_dim=DIM, num_heads=HEADS) for name, spec in specs.items()
    }
    rows = []
    for length in lengths:
        generator = torch.Generator().manual_seed(length)
        q, k, v = (torch.randn(1, HEADS, length, DIM, generator=generator) for _ in range(3))
        calls: dict[str, Callable[..., Tensor]] = {
            "exact": F.scaled_dot_product_attention,
            **mechanisms,
        }
        times: dict[str, list[float]] = {name: [] for name in calls}
        with torch.no_grad():
            for turn in range(rounds + 1):  # the first one warms up
                for name, call in calls.items():
                    start = time.process_time()
                    call(q, k, v)
                    if turn:
                        times[name].append(time.process_time() - start)
        row: dict[str, Any] = {
            "tokens": length,
            "exact, ms": 1e3 * statistics.median(times["exact"]),
        }
        for name in mechanisms:
            ratios = [a / b for a, b in zip(times["exact"], times[name], strict=True)]
            row[f"{name}, ms"] = 1e3 * statistics.median(times[name])
            row[f"{name}, × faster"] = statistics.median(ratios)
        rows.append(row)
        echo(f"  {length} tokens: " + ", ".join(
            f"{name} {row[f'{name}, × faster']:.2f}×" for name in mechanisms))  # fmt: skip
    return rows
