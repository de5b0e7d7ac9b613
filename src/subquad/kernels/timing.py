"""Times calls on a device, and finds the length from which one way is faster than another."""

from __future__ import annotations

import functools
import math
import platform
import re
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

__all__ = ["Crossing", "Race", "crossing", "device_name", "in_turn", "timed"]


@functools.cache
def device_name(device: torch.device) -> str:
    """The model of a CPU or GPU, as its driver or the system says it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return str(device.type)
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def timed(
    run: Callable[[], Any],
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Seconds of one call, the device's work included: by events on CUDA, else by `clock`."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            run()
            stop.record()
            torch.cuda.synchronize()
        return float(start.elapsed_time(stop)) / 1000.0
    _wait(device)
    begun = clock()
    run()
    _wait(device)
    return clock() - begun


def _wait(device: torch.device) -> None:
    if device.type == "mps":
        torch.mps.synchronize()


def in_turn(
    runs: Sequence[Callable[[], Any]],
    device: torch.device,
    *,
    rounds: int,
    least: float = 0.0,
    most: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Median seconds of each, all called in turn.

    Args:
        runs: the calls.
        device: where they work.
        rounds: how often each is called at least.
        least: seconds of all calls together before which rounds go on.
        most: rounds after which they end nevertheless.
        clock: of `timed`.
    """
    times: list[list[float]] = [[] for _ in runs]
    done = 0
    while done < rounds or (done < most and sum(map(sum, times)) < least):
        for own, run in zip(times, runs, strict=True):
            own.append(timed(run, device, clock))
        done += 1
    return [statistics.median(own) for own in times]


class Race(NamedTuple):
    """Seconds of one call of each way at a length."""

    length: int
    exact: float
    other: float

    @property
    def speedup(self) -> float:
        """`exact` / `other`."""
        return self.exact / self.other


class Crossing(NamedTuple):
    """The length from which the other way is faster; None where no tried one is that long.

    Args:
        length: the crossing.
        races: all that was measured for it, in that order.
        extrapolated: whether times beyond the last race were taken to go on with the square of
            the length for the exact way and with the length for the other.
    """

    length: int | None
    races: tuple[Race, ...]
    extrapolated: bool = False


def crossing(
    race: Callable[[int], tuple[float, float]],
    first: Race,
    *,
    shortest: int,
    longest: int,
    patience: float,
    precision: float = 2.0,
) -> Crossing:
    """The length at which both are equally fast, or the shortest one tried; None if too long.

    From the first race down by halves or up by doubles until the faster one changes; then by
    bisection (of logarithms) until the lengths on both sides are within a factor; then
    between them on a straight line of the logarithms of speedup and length. O(log) races.

    Args:
        race: seconds of the exact and of the other way at a length.
        first: a race that was run already: where to start.
        shortest, longest: lengths that are tried.
        patience: seconds of one exact call. Where the next one would take longer, times are
            extrapolated: see `Crossing`.
        precision: the factor, > 1.
    """
    races = [first]
    fast = first.speedup > 1.0
    while True:
        before = races[-1]
        length = before.length // 2 if fast else 2 * before.length
        if length < shortest:
            return Crossing(before.length, tuple(races))
        beyond = not fast and 4.0 * before.exact > patience
        if length > longest or beyond:
            found = round(before.length / before.speedup) if beyond else longest + 1
            return Crossing(found if found <= longest else None, tuple(races), beyond)
        races.append(Race(length, *race(length)))
        if (races[-1].speedup > 1.0) is not fast:
            break
    low, high = sorted((before, races[-1]))
    while high.length > max(precision * low.length, low.length + 1):
        middle = round(math.sqrt(low.length * high.length))
        races.append(Race(middle, *race(middle)))
        low, high = (low, races[-1]) if races[-1].speedup > 1.0 else (races[-1], high)
    share = -math.log(low.speedup) / (math.log(high.speedup) - math.log(low.speedup))
    return Crossing(round(low.length * (high.length / low.length) ** share), tuple(races))
