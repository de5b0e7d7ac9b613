"""What the project promises of its speed, and how it is measured.

Shares of the GEMM peak count these FLOPs per token and head, D = V:

    forward         8·D·M: two products for φ of q and k, one into the state, one out of it
    causal          2·C·(M + V) more for the products within chunks of C = 64 tokens, upper
                    triangle and all; shares are read with them, the detail tells them without
    training step   three times a forward call: φ once more, and two products for each one

The product of two 1024³ matrices runs in the same round, right before the call.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from subquad import kernels, registry
from subquad.arena.machine import peak_of
from subquad.arena.speed import peers
from subquad.arena.speed.cases import (
    DECODE,
    FORWARD,
    TRAINING,
    Case,
    Sizes,
    setting,
    thousands,
)
from subquad.arena.speed.contenders import SDPA, find
from subquad.arena.speed.timing import copy, function, gemm, interleave, ratio
from subquad.kernels.timing import Race, crossing

__all__ = ["FLOORS", "MEASURES", "OURS", "Floor", "measured", "than", "useful_flops"]

OURS = "performer"
WINDOWED = f"local(window={peers.WINDOW})"
CHUNK = 64
"""C, tokens of a causal chunk whose products are counted."""
LONGEST = 2**16
"""Where the search for a crossover ends."""
PRECISE = 1.04
"""A crossover lies within this factor."""


@dataclass(frozen=True)
class Floor:
    """A promise about a case.

    Args:
        measure: what is promised: a key of `MEASURES`.
        value: the least or greatest value.
        ours: the case.
        rival: what it is compared with.
    """

    measure: str
    value: float
    ours: Case
    rival: Case | None = None

    @property
    def text(self) -> str:
        """The promise in words."""
        ours, rival = self.ours, self.rival
        words = [] if ours.name == OURS else [ours.name]
        words += [ours.text]
        where = [" ".join(words)]
        if self.measure != "crossover" and ours.mode != DECODE:
            where.append(thousands(ours.length))
        where += [ours.dtype] * bool(ours.dtype)
        where += [f"{ours.threads} threads"] * (ours.threads > 1)
        where += [f"backend {ours.backend}"] * bool(ours.backend)
        than = ""
        if rival is not None:
            than = (
                rival.name
                if rival.name != ours.name
                else ("one thread", rival.dtype)[ours.threads == 1]
            )
        return f"{', '.join(where)}: {MEASURES[self.measure].promise.format(self.value, than=than)}"

    def kept(self, found: float) -> bool:
        """Whether a measured value keeps the promise."""
        return found >= self.value if MEASURES[self.measure].least else found <= self.value

    def cases(self) -> list[Case]:
        """Ours and the rival's."""
        return [self.ours] if self.rival is None else [self.ours, self.rival]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Floor:
        """The inverse of `dataclasses.asdict`."""
        rival = values["rival"]
        return cls(
            values["measure"], values["value"], Case(**values["ours"]), rival and Case(**rival)
        )


Found = tuple[float, str]
"""The value, and a detail for people."""


@dataclass(frozen=True)
class Measure:
    """One kind of promise.

    Args:
        find: (floor, sizes, rounds) → value and detail.
        promise: in words, of the value and `than`.
        cell: how a measured value is shown.
        least: whether the promise is a least value.
        alone: whether each promise is measured in a process of its own.
    """

    find: Callable[[Floor, Sizes, int], Found]
    promise: str
    cell: str
    least: bool
    alone: bool = False


def _rounds(floor: Floor, sizes: Sizes, rounds: int, length: int = 0) -> list[list[float]]:
    """Seconds of ours and the rival's, interleaved; by default at the length of the case."""
    calls = {}
    for case in floor.cases():
        case = case.at(length or case.length)
        with setting(case):
            calls[case] = _ready(case, sizes)
    if _by_the_wall_clock(floor):
        rounds *= 12
    return list(interleave(calls, rounds, 60.0, device=sizes.device).values())


def _ready(case: Case, sizes: Sizes) -> Callable[[], Any]:
    """The function of a case, called once: first calls map memory."""
    contender = find(case, sizes)
    function(contender, sizes.inputs(128, dtype=case.dtype), case)()
    call = function(contender, sizes.inputs(case.length, dtype=case.dtype), case)
    call()
    return call


def _faster(floor: Floor, sizes: Sizes, rounds: int) -> Found:
    ours, theirs = _rounds(floor, sizes, rounds)
    if _by_the_wall_clock(floor):
        ours, theirs = [min(ours)], [min(theirs)]
        detail = f"{_duration(ours)} against {_duration(theirs)}, the least"
        return theirs[0] / ours[0], detail
    found = ratio(theirs, ours)
    assert found is not None
    return found, f"{_duration(ours)} against {_duration(theirs)}"


def _by_the_wall_clock(floor: Floor) -> bool:
    """Whether threads are compared. What else a machine does adds to a wall clock's times, for
    seconds on end, to those of more threads the more: the least of many is what the code takes.
    """
    return any(case.threads > 1 for case in floor.cases())


def _slower(floor: Floor, sizes: Sizes, rounds: int) -> Found:
    found, detail = _faster(floor, sizes, rounds)
    return 1 / found, detail


def _duration(seconds: Sequence[float]) -> str:
    middle = statistics.median(seconds)
    return f"{middle * 1e3:.1f} ms" if middle >= 1e-3 else f"{middle * 1e6:.0f} µs"


def _features(case: Case, sizes: Sizes) -> int:
    """M of a performer: the sizes' where its name gives none."""
    config: Any = registry.describe(case.name).config
    return sizes.features if case.name == OURS else int(config.features)


def useful_flops(case: Case, sizes: Sizes, chunk: int = CHUNK) -> float:
    """FLOPs of a performer's call, as the module's docstring counts them; 0 for no triangle."""
    features = _features(case, sizes)
    a_token = 8.0 * sizes.head_dim * features
    if case.causal:
        a_token += 2.0 * chunk * (features + sizes.head_dim)
    return sizes.heads * case.length * a_token * (3 if case.mode == TRAINING else 1)


def _share(floor: Floor, sizes: Sizes, rounds: int) -> Found:
    product, flops = gemm(sizes)
    case = floor.ours
    with setting(case):
        calls = {Case("GEMM"): product, case: _ready(case, sizes)}
    theirs, ours = interleave(calls, rounds, 60.0, device=sizes.device).values()
    speed = ratio(theirs, ours)
    assert speed is not None
    shares = [speed * useful_flops(case, sizes, chunk) / flops for chunk in (CHUNK, 0)]
    detail = f"{_duration(ours)}; GEMM {flops / statistics.median(theirs) / 1e9:.0f} GFLOP/s"
    return shares[0], detail + (f"; {shares[1]:.1%} without the chunks" if case.causal else "")


def _bound(floor: Floor, sizes: Sizes, rounds: int) -> Found:
    """Share of what bytes or products allow at best: q, k, v read and the output written once."""
    product, flops = gemm(sizes)
    move, size = copy(sizes)
    case = floor.ours
    calls = {Case("GEMM"): product, Case("copy"): move, case: _ready(case, sizes)}
    products, moves, ours = interleave(calls, rounds, 60.0, device=sizes.device).values()
    q = sizes.inputs(1)[0]
    tensors = (8 if case.mode == TRAINING else 4) * case.length * q.numel() * q.element_size()
    limits = [
        (useful_flops(case, sizes, 0) / flops * statistics.median(products), "GEMM"),
        (tensors / size * statistics.median(moves), "bandwidth"),
    ]
    limit, which = max(limits)
    return limit / statistics.median(
        ours
    ), f"{_duration(ours)}; {which} allows {_duration([limit])}"


def _memory(floor: Floor, sizes: Sizes, rounds: int) -> Found:
    """Peak beyond q, k, v and the output's gradient, in units of |q|."""
    case = floor.ours
    contender = find(case, sizes)
    with setting(case):
        function(contender, sizes.inputs(1024), case)()
        inputs = sizes.inputs(case.length)
        peak = peak_of(function(contender, inputs, case), sizes.device)
    return peak / (inputs[0].numel() * inputs[0].element_size()), f"{peak / 2**20:.0f} MiB"


def _microseconds(floor: Floor, sizes: Sizes, rounds: int) -> Found:
    case = floor.ours
    with setting(case):
        calls = {case: _ready(case, sizes)}
    (ours,) = interleave(calls, 4 * rounds, 60.0, device=sizes.device).values()
    return statistics.median(ours) * 1e6, f"least {min(ours) * 1e6:.0f} µs"


def _crossover(floor: Floor, sizes: Sizes, rounds: int) -> Found:
    def race(length: int) -> tuple[float, float]:
        ours, theirs = _rounds(floor, sizes, max(rounds, 15 if length < 2048 else 5), length)
        found = ratio(theirs, ours)
        assert found is not None
        return found, 1.0  # the medians' ratio would not be taken round by round

    start = 2 ** round(math.log2(floor.value))
    found = crossing(
        race, Race(start, *race(start)), shortest=16, longest=LONGEST, patience=math.inf,
        precision=PRECISE,
    )  # fmt: skip
    if found.length is None:
        last = found.races[-1]
        return math.nan, f"{last.speedup:.2f}× at {last.length}"
    at = found.length
    near = sorted(found.races, key=lambda one: abs(math.log(one.length / at)))[:2]
    ends = sorted(near, key=lambda one: one.length)
    return at, ", ".join(f"{one.speedup:.2f}× at {one.length}" for one in ends)


MEASURES = {
    "faster": Measure(_faster, "at least {:g}× faster than {than}", "{:.2f}×", True, True),
    "slower": Measure(_slower, "at most {:g}× the time of {than}", "{:.2f}×", False),
    "memory": Measure(_memory, "at most {:g} × |q| beyond inputs", "{:.2f} × |q|", False, True),
    "share": Measure(_share, "at least {:.0%} of the GEMM peak", "{:.1%}", True),
    "bound": Measure(_bound, "at least {:.0%} of the tighter limit", "{:.1%}", True),
    "crossover": Measure(
        _crossover, "faster than {than} from at most {:g} tokens", "{:.0f} tokens", False
    ),
    "microseconds": Measure(_microseconds, "at most {:g} µs", "{:.1f} µs", False),
}


def measured(floor: Floor, sizes: Sizes, rounds: int) -> dict[str, Any]:
    """The value, a detail, and the backend that ran; here, in this process."""
    value, detail = MEASURES[floor.measure].find(floor, sizes, rounds)
    return {
        "value": value if math.isfinite(value) else None,
        "detail": detail,
        "backend": _backend(floor.ours, sizes),
    }


def _backend(case: Case, sizes: Sizes) -> str:
    """The linear engine's backend for a case; empty where another engine runs."""
    if case.name.partition("(")[0] != OURS:
        return ""
    q, k, v, _ = sizes.inputs(1, dtype=case.dtype)
    with setting(case):
        return kernels.explain(q, k, v, features=_features(case, sizes)).backend


def than(name: str, value: float, ours: Case) -> Floor:
    """At least `value` times faster than another contender in the same case."""
    return Floor("faster", value, ours, dataclasses.replace(ours, name=name, backend=""))


FLOORS = (
    than(SDPA, 10.0, Case(OURS, FORWARD, False, 4096)),
    than(peers.PERFORMER, 2.0, Case(OURS, FORWARD, False, 4096)),
    than(peers.PERFORMER, 3.5, Case(OURS, FORWARD, False, 16384)),
    than(peers.PERFORMER, 3.5, Case(OURS, TRAINING, False, 16384)),
    than(SDPA, 3.5, Case(OURS, FORWARD, True, 4096)),
    # its causal form without a CUDA kernel
    than(peers.PERFORMER, 15.0, Case(OURS, FORWARD, True, 2048)),
    Floor("memory", 4.5, Case(OURS, TRAINING, False, 65536)),
    Floor("memory", 5.5, Case(OURS, TRAINING, True, 65536)),
    than(peers.LOCAL, 3.0, Case(WINDOWED, FORWARD, True, 8192)),
    than(SDPA, 5.0, Case(WINDOWED, FORWARD, True, 8192)),
    than(SDPA, 3.0, Case("reformer", FORWARD, True, 16384)),
    than(SDPA, 3.0, Case("routing", FORWARD, True, 16384)),
)
"""What the project promises on one thread; of `performer` with M=128."""
