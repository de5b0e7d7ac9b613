"""Measurements in processes of their own.

Large temporaries cost page faults or do not, depending on what the allocator has kept from
earlier calls of the process; a process of its own makes that state the same each time: a new
user's. Memory can be told apart from earlier calls' only there.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch

from subquad.arena.speed.cases import TRAINING, Case, Sizes
from subquad.arena.speed.floors import Floor, measured

__all__ = ["fresh", "main", "peak_memory"]


def peak_memory(name: str, causal: bool, length: int, sizes: Sizes) -> float:
    """Peak memory of one training step beyond its inputs, in units of |q|, in a child process.

    Raises:
        RuntimeError: if the child fails, with what it wrote.
    """
    floor = Floor("memory", 0.0, Case(name, TRAINING, causal, length))
    return float(fresh([floor], sizes, 1)[0]["value"])


def fresh(floors: Sequence[Floor], sizes: Sizes, rounds: int) -> list[dict[str, Any]]:
    """`floors.measured` of each, one after the other in one new process.

    Raises:
        RuntimeError: if the child fails, with what it wrote.
    """
    job = {
        "sizes": dataclasses.asdict(sizes),
        "floors": [dataclasses.asdict(floor) for floor in floors],
        "rounds": rounds,
    }
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-W", "ignore", "-m", "subquad.arena.speed"]
    done = subprocess.run(
        command, input=json.dumps(job), capture_output=True, text=True, env=environment
    )
    if done.returncode:
        raise RuntimeError(f"measuring failed in the child process:\n{done.stderr}")
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Reads a job from standard input, measures, and writes what it found as the last line."""
    job = json.loads(sys.stdin.read())
    torch.set_num_threads(1)
    sizes = Sizes(**job["sizes"])
    floors = [Floor.from_dict(values) for values in job["floors"]]
    found = [measured(floor, sizes, job["rounds"]) for floor in floors]
    sys.stdout.write("\n" + json.dumps(found) + "\n")
