"""Times of interleaved calls, and what the machine can do at best."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from subquad.arena.speed.cases import (
    DECODE,
    FORWARD,
    KINDS,
    PREFILL,
    TRAINING,
    Case,
    Sizes,
    setting,
)
from subquad.arena.speed.checks import Check, gradients
from subquad.arena.speed.contenders import Contender, Decoding
from subquad.kernels.timing import timed

__all__ = [
    "Times",
    "copy",
    "copy_bandwidth",
    "function",
    "gemm",
    "gemm_peak",
    "interleave",
    "measure_times",
    "ratio",
]

Times = dict[Case, list[float]]
"""Seconds of each round."""
SHORT = 2e-3
"""Seconds that a sample lasts at least: shorter calls are repeated within it."""
MOST_REPEATS = 64


def function(contender: Contender, inputs: Sequence[torch.Tensor], case: Case) -> Callable[[], Any]:
    """The call that a case names, on these inputs; what comes before it is done here."""
    q, k, v, grad = inputs
    decoding = contender.decoding
    if case.mode == PREFILL:
        assert isinstance(decoding, Decoding)
        return _no_grad(lambda: decoding.prefill(q, k, v))
    if case.mode == DECODE:
        assert isinstance(decoding, Decoding)
        with torch.no_grad():
            _, state = decoding.prefill(q, k, v)
            q, k, v = (t[:, :, :1].contiguous() for t in (q, k, v))
            _, new = decoding.step(q, k, v, state, False)
        if decoding.nbytes(new) != decoding.nbytes(state):  # it grows: this length is timed
            return _no_grad(lambda: decoding.step(q, k, v, state, False))

        def go_on() -> Any:
            nonlocal new
            out, new = decoding.step(q, k, v, new, True)
            return out

        return _no_grad(go_on)
    with torch.no_grad():
        given = contender.prepare(q, k, v)
    if case.mode == FORWARD:
        return _no_grad(lambda: contender.call(*given, case.causal))

    def step() -> Any:
        x, y, z = (t.detach().requires_grad_() for t in given)
        out = contender.call(x, y, z, case.causal)
        return out, *gradients(out, (x, y, z), grad)

    return step


def _no_grad(call: Callable[[], Any]) -> Callable[[], Any]:
    def without() -> Any:
        with torch.no_grad():
            return call()

    return without


def _seconds(call: Callable[[], Any], repeats: int, device: str, wall: bool = False) -> float:
    """Seconds of one of so many calls behind each other.

    CUDA events on a GPU; CPU time of the process on one thread, which does not count waiting
    for other programs; the wall clock where threads are compared, behind a call that is not
    timed: it wakes the threads, which in use calls before it have done.
    """

    def several() -> None:
        for _ in range(repeats):
            call()

    if wall:
        call()
    clock = time.perf_counter if wall else time.process_time
    return timed(several, torch.device(device), clock) / repeats


def interleave(
    functions: Mapping[Case, Callable[[], Any]],
    rounds: int,
    budget: float,
    least: int = 3,
    device: str = "cpu",
) -> Times:
    """Seconds of each call, taken in turns; at least `least` rounds, then until `budget`.

    Each runs in the setting of its case. A call that took less than `SHORT` in the first round
    is repeated within the later ones.
    """
    times: Times = {case: [] for case in functions}
    repeats = dict.fromkeys(functions, 1)
    wall = any(case.threads > 1 for case in functions)
    began = time.perf_counter()
    for turn in range(rounds):
        if turn >= least and time.perf_counter() - began > budget:
            break
        for case, call in functions.items():
            with setting(case):
                times[case].append(_seconds(call, repeats[case], device, wall))
        if turn == 0:
            for case, (first,) in times.items():
                repeats[case] = max(1, min(MOST_REPEATS, math.ceil(SHORT / max(first, 1e-9))))
    return times


def ratio(theirs: Sequence[float] | None, ours: Sequence[float] | None) -> float | None:
    """Median over rounds of theirs / ours: the two calls of a round follow each other."""
    if not theirs or not ours:
        return None
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


# ---- the machine's limits ------------------------------------------------------------------


def gemm(sizes: Sizes) -> tuple[Callable[[], Any], float]:
    """A matrix product that runs at the practical peak, and its FLOPs: 1024³ (GPU: 8192³)."""
    size = 8192 if sizes.device == "cuda" else 1024
    kind: torch.dtype = getattr(torch, sizes.dtype)
    a, b = torch.randn(2, size, size).to(sizes.device, kind)
    out = a @ b
    return lambda: torch.mm(a, b, out=out), 2.0 * size**3


def copy(sizes: Sizes) -> tuple[Callable[[], Any], float]:
    """A copy of 256 MiB (GPU: 1 GiB) to another place, and the bytes that it reads and writes."""
    count = 2**30 if sizes.device == "cuda" else 2**28
    source = torch.zeros(count, dtype=torch.uint8, device=sizes.device)
    target = torch.ones_like(source)
    return lambda: target.copy_(source), 2.0 * count


def _best(limit: tuple[Callable[[], Any], float], sizes: Sizes, seconds: float) -> float:
    call, amount = limit
    best, began = math.inf, time.perf_counter()
    while time.perf_counter() - began < seconds or best == math.inf:
        best = min(best, _seconds(call, 1, sizes.device))
    return amount / best


def gemm_peak(sizes: Sizes, seconds: float = 0.5) -> float:
    """The best FLOP/s of a matrix product, the machine's practical peak."""
    return _best(gemm(sizes), sizes, seconds)


def copy_bandwidth(sizes: Sizes, seconds: float = 0.5) -> float:
    """The best bytes/s, read and written, of a copy that no cache holds."""
    return _best(copy(sizes), sizes, seconds)


# ---- everybody at every length -------------------------------------------------------------


def measure_times(
    found: Sequence[Contender],
    sizes: Sizes,
    lengths: Sequence[int],
    checks: Sequence[Check],
    *,
    wanted: Callable[[Case], bool] = lambda case: True,
    rounds: int = 7,
    budget: float = 8.0,
    least: int = 3,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[Times, list[str]]:
    """Interleaved times of every contender whose check was ok, and what was left out, why.

    Args:
        found: contenders.
        sizes: the head layout.
        lengths: ascending.
        checks: of the same contenders; one that failed, or is missing, is not timed.
        wanted: chooses among cases.
        rounds, budget, least: turns of a cell: at most `rounds`, and no further one after
            `budget` seconds, but at least `least`.
        say: progress.
    """
    passed = {c.case.kind for c in checks if c.ok}
    left_out = [f"{c.case.name}, {c.case.text}: failed correctness" for c in checks if not c.ok]
    times: Times = {}
    gone: set[Case] = set()
    for length in lengths:
        inputs = sizes.inputs(length)
        for mode, causal in KINDS:
            cell: dict[Case, Contender] = {}
            for contender in found:
                case = Case(contender.name, mode, causal, length)
                if case.kind in gone or case.checked_by not in passed or not wanted(case):
                    continue
                if length % contender.multiple:
                    why = f"no multiple of {contender.multiple}"
                    left_out.append(f"{case.name}, {case.text}, {length} tokens: {why}")
                    continue
                reason = _too_long(contender, case, times)
                if reason:
                    gone.add(case.kind)
                    where = f"{case.name}, {case.text}, from {length} tokens"
                    left_out.append(f"{where}: {reason}")
                    continue
                cell[case] = contender
            if not cell:
                continue
            say(f"{length} tokens, {next(iter(cell)).text}")
            small = sizes.inputs(128)
            for case, contender in cell.items():  # first calls set things up
                function(contender, small, case)()
            calls = {case: function(contender, inputs, case) for case, contender in cell.items()}
            times |= interleave(calls, rounds, budget, least, sizes.device)
    return times, left_out


def _too_long(contender: Contender, case: Case, times: Times) -> str:
    longest = contender.longest.get((case.mode, case.causal))
    if longest and case.length > longest[0]:
        return longest[1]
    if case.mode == DECODE:  # what takes long is the prefill that makes its state
        case = Case(case.name, PREFILL, True, case.length)
    before = [one for one in times if one.kind == case.kind]
    if before:
        last = max(before, key=lambda one: one.length)
        growth = (case.length / last.length) ** (2 if contender.quadratic else 1)
        expected = statistics.median(times[last]) * growth
    else:
        # a training step costs 3 to 4 forward calls, a prefill about one
        forward = times.get(Case(case.name, FORWARD, case.causal, case.length))
        factor = 3.5 if case.mode == TRAINING else 1.0
        expected = factor * statistics.median(forward) if forward else 0.0
    if expected > contender.limit:
        return f"a call would take about {expected:.1f} s (limit {contender.limit:g} s)"
    return ""
