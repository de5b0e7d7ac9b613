"""Time and memory of one attention sublayer of any mechanism, beside exact softmax.

A sublayer is what a layer adds to its input: for attention the projections of q, k and v, the
mechanism and the output's projection; for a token mixer the mixer, which has no other
projections. This is the one place where all mechanisms do the same job, so that they can
stand in one picture, as in figure 3 of Long Range Arena (arXiv 2011.04006).
"""

from __future__ import annotations

import dataclasses
import json as json_module
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from subquad.arena.machine import peak_of
from subquad.attention.layers import TransformerEncoderLayer

__all__ = ["Sublayer"]

LEAST_ROUNDS, MOST_ROUNDS = 3, 9


@dataclass(frozen=True)
class Sublayer:
    """One batch row, float32, bidirectional, one thread.

    Args:
        length: tokens.
        heads, head_dim: C = heads · head_dim.
        budget: seconds after which no further round of times begins; there are 3 to 9, and
            one where a round takes longer than this.
    """

    length: int = 4096
    heads: int = 8
    head_dim: int = 64
    budget: float = 8.0

    def measure(self, spec: str) -> dict[str, Any]:
        """Times and memory of a mechanism, in a process of its own.

        Times are CPU times of forward calls without gradients, taken in turns with exact
        softmax. Memory is the peak of a training step (forward, gradients of the input and all
        parameters) beyond the input and the parameters, which are there before.

        Returns:
            seconds and softmax_seconds (medians), times_faster (median of the rounds' ratios),
            tokens_per_second, peak_bytes, rounds, spec.

        Raises:
            RuntimeError: if the process fails, with what it wrote.
        """
        job = {"spec": spec, "sublayer": dataclasses.asdict(self)}
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        command = [sys.executable, "-W", "ignore", "-m", "subquad.arena.sublayer"]
        done = subprocess.run(
            command, input=json_module.dumps(job), capture_output=True, text=True, env=environment
        )
        if done.returncode:
            raise RuntimeError(f"measuring {spec} failed in the child process:\n{done.stderr}")
        found: dict[str, Any] = json_module.loads(done.stdout)
        return found

    def build(self, spec: str) -> nn.Module:
        """The sublayer, called like `torch.nn.MultiheadAttention`; parameters from seed 0."""
        torch.manual_seed(0)
        width = self.heads * self.head_dim
        layer = TransformerEncoderLayer(
            width, self.heads, 1, 0.0, batch_first=True, mechanism=spec, max_length=self.length
        )
        return layer.self_attn.eval()


def _forward(sublayer: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = sublayer(x, x, x, need_weights=False)[0]
    return out


def _step(sublayer: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    leaf = x.detach().requires_grad_()
    out = _forward(sublayer, leaf)
    leaves = [leaf, *(p for p in sublayer.parameters() if p.requires_grad)]
    return out, *torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True)


@torch.no_grad()
def _times(sublayers: Sequence[nn.Module], x: Tensor, budget: float) -> list[list[float]]:
    """CPU seconds of each, in turns; see `Sublayer` for the number of rounds."""
    times: list[list[float]] = [[] for _ in sublayers]
    began = time.perf_counter()
    least = MOST_ROUNDS
    while len(times[0]) < least:
        for one, found in zip(sublayers, times, strict=True):
            start = time.process_time()
            _forward(one, x)
            found.append(time.process_time() - start)
        if time.perf_counter() - began > budget:
            least = LEAST_ROUNDS if sum(map(min, times)) < budget else 1
    return times


def _child() -> None:
    job = json_module.loads(sys.stdin.read())
    torch.set_num_threads(1)
    spec, setting = job["spec"], Sublayer(**job["sublayer"])
    own = setting.build(spec)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, setting.length, setting.heads * setting.head_dim, generator=generator)
    _step(own, x[:, :256])
    peak = peak_of(lambda: _step(own, x))
    exact = setting.build("softmax")
    with torch.no_grad():
        _forward(exact, x)  # maps memory that later calls reuse, as the step before did
    mine, theirs = _times((own, exact), x, setting.budget)
    seconds = statistics.median(mine)
    found = {
        "spec": spec,
        "seconds": seconds,
        "softmax_seconds": statistics.median(theirs),
        "times_faster": statistics.median(b / a for a, b in zip(mine, theirs, strict=True)),
        "tokens_per_second": setting.length / seconds,
        "peak_bytes": peak,
        "rounds": len(mine),
    }
    sys.stdout.write(json_module.dumps(found))


if __name__ == "__main__":
    _child()
