"""`subquad bench scaling`: does the cost of a mechanism grow as it says?

Each mechanism runs forward and backward, with its default options and all gradients, on
16,384 and on 65,536 tokens in a process of its own, on one thread. Reported are the CPU time
of a training step at both lengths, how it grew, how the declared FLOPs
(`describe(name).flops`) grow, and the peak resident set of the whole process: Python, torch,
inputs, gradients and all. A mechanism that fell back to full attention would show 16 times
the time and run out of memory.

The exact mechanisms and the synthesizer are left out: they are quadratic and say so. Of a
mechanism whose published default is quadratic, a setting that is not stands in (`INSTEAD`).
Token mixers mix tokens of the width of all heads together.
"""

from __future__ import annotations

import json as json_module
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from subquad import registry
from subquad.arena.machine import machine, machine_line, resident
from subquad.attention.base import Mechanism

__all__ = ["LENGTHS", "MOST_BYTES", "MOST_GROWTH", "candidates", "measure", "run", "table"]

LENGTHS = (16_384, 65_536)
HEADS, DIM = 8, 64
INSTEAD = {"gmlp": "gmlp(weights=toeplitz)", "conv": "conv(rows=128, columns=128)"}
"""Settings that are measured in place of quadratic defaults."""
QUADRATIC = ("synthesizer",)
"""Beside the exact mechanisms: quadratic in all settings."""
MOST_BYTES = 6e9
"""Peak of the whole process at the larger length that a mechanism may reach."""
MOST_GROWTH = 1.25
"""How much faster than its declared FLOPs the time of a mechanism may grow."""
SECONDS = 12.0
"""Steps at a length are repeated until this much time has passed, at least twice."""


def candidates() -> list[str]:
    """Mechanisms that claim less than the exact ones' cost: names, or settings of `INSTEAD`."""
    return [
        INSTEAD.get(name, name)
        for name in registry.MECHANISMS
        if registry.get(name).family != "exact" and name not in QUADRATIC
    ]


def measure(
    spec: str, lengths: Sequence[int] = LENGTHS, seconds: float = SECONDS
) -> dict[str, Any]:
    """Times and peak memory of one mechanism, in a process of its own.

    Args:
        spec: name, with options if wanted.
        lengths: the smaller and the larger number of tokens.
        seconds: see `SECONDS`.

    Returns:
        seconds (one for each length), growth, declared growth, their ratio and peak bytes.

    Raises:
        RuntimeError: if the process fails, with what it wrote.
    """
    job = {"spec": spec, "lengths": list(lengths), "seconds": seconds}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-W", "ignore", "-m", "subquad.arena.scaling"]
    done = subprocess.run(
        command, input=json_module.dumps(job), capture_output=True, text=True, env=environment
    )
    if done.returncode:
        raise RuntimeError(f"measuring {spec} failed in the child process:\n{done.stderr}")
    found = json_module.loads(done.stdout)
    about = registry.describe(spec)
    times = found["seconds"]
    width = DIM if about.capabilities.qkv else HEADS * DIM
    declared = about.flops(lengths[1], width, width) / about.flops(lengths[0], width, width)
    growth = times[1] / times[0]
    return {
        "mechanism": spec,
        "cost": about.info.cost.formula,
        "lengths": list(lengths),
        "seconds": times,
        "growth": growth,
        "declared": declared,
        "ratio": growth / declared,
        "peak_bytes": found["peak"],
    }


def _child() -> None:
    job = json_module.loads(sys.stdin.read())
    torch.set_num_threads(1)
    mechanism = registry.build(
        job["spec"], head_dim=DIM, num_heads=HEADS, value_dim=DIM, embed_dim=HEADS * DIM,
        max_length=max(job["lengths"]),
    )  # fmt: skip
    _step(mechanism, 256)
    times = [_median(mechanism, length, job["seconds"]) for length in job["lengths"]]
    sys.stdout.write(json_module.dumps({"seconds": times, "peak": resident("VmHWM")}))


def _median(mechanism: Mechanism, length: int, seconds: float) -> float:
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < 2 or (time.perf_counter() - start < seconds and len(times) < 9):
        times.append(_step(mechanism, length))
        if times[-1] > 5 * seconds > 0:  # page faults of a first step are no part of a minute
            break
    # The first step maps memory that later ones reuse.
    return statistics.median(times[1:] if len(times) > 2 else times)


def _step(mechanism: Mechanism, length: int) -> float:
    generator = torch.Generator().manual_seed(length)
    shape: tuple[int, ...] = (1, HEADS, length, DIM)
    count = 3
    if not mechanism.capabilities.qkv:
        shape, count = (1, length, HEADS * DIM), 1
    inputs = [torch.randn(shape, generator=generator).requires_grad_() for _ in range(count)]
    leaves = [*inputs, *(p for p in mechanism.parameters() if p.requires_grad)]
    start = time.process_time()
    out = mechanism(*inputs)
    torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True)
    return time.process_time() - start


def run(out: Path, quick: bool, json: bool, echo: Callable[[str], None]) -> dict[str, Any]:
    """Measures every candidate and writes scaling.json and scaling.md into `out`.

    Args:
        out: folder for the results.
        quick: 2,048 and 8,192 tokens instead, one second each.
        json: whether the caller wants nothing but the result.
        echo: shows progress.
    """
    lengths, seconds = ((2048, 8192), 1.0) if quick else (LENGTHS, SECONDS)
    rows = []
    for name in candidates():
        rows.append(measure(name, lengths, seconds))
        echo(_line(rows[-1]))
    result = {"machine": machine(threads=1), "heads": HEADS, "dim": DIM, "rows": rows}
    out.mkdir(parents=True, exist_ok=True)
    text = json_module.dumps(result, indent=1, ensure_ascii=False) + "\n"
    (out / "scaling.json").write_text(text, encoding="utf-8")
    (out / "scaling.md").write_text(table(result), encoding="utf-8")
    if not json:
        echo(f"written: {out / 'scaling.md'}")
    return result


def _line(row: dict[str, Any]) -> str:
    small, large = row["seconds"]
    return (
        f"{row['mechanism']:16} {small:8.2f} s → {large:8.2f} s  ×{row['growth']:5.2f} "
        f"(declared ×{row['declared']:5.2f})  {row['peak_bytes'] / 1e9:5.2f} GB"
    )


def table(result: dict[str, Any]) -> str:
    """The result as a Markdown page."""
    small, large = result["rows"][0]["lengths"]
    lines = [
        "# Cost against length",
        "",
        f"One training step (forward, backward, all gradients) with default options, B = 1, "
        f"{result['heads']} heads of {result['dim']}, float32, bidirectional, each mechanism in "
        "a process of its own. *Declared* is how its FLOPs grow by `describe(name).flops`; "
        f"*ratio*, measured by declared growth, is to stay below {MOST_GROWTH}. *Peak* is the "
        f"resident set of the whole process at {large:,} tokens, to stay below "
        f"{MOST_BYTES / 1e9:g} GB; inputs, output and their gradients alone take "
        f"{8 * large * result['heads'] * result['dim'] * 4 / 1e9:.2f} GB of it.",
        "",
        f"| mechanism | cost | s at {small:,} | s at {large:,} | grew | declared | ratio "
        "| peak GB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        times = " | ".join(f"{value:.2f}" for value in row["seconds"])
        lines.append(
            f"| {row['mechanism']} | {row['cost']} | {times} | ×{row['growth']:.2f} "
            f"| ×{row['declared']:.2f} | {row['ratio']:.2f} | {row['peak_bytes'] / 1e9:.2f} |"
        )
    lines += ["", f"{machine_line(result['machine'])}. Again: `subquad bench scaling`.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    _child()
