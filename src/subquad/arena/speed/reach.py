"""What the project reaches for: the machine's limits, on one CPU thread and on a GPU."""

from __future__ import annotations

import dataclasses

from subquad.arena.speed import peers
from subquad.arena.speed.cases import DECODE, FORWARD, TRAINING, Case
from subquad.arena.speed.contenders import FLASH, SDPA
from subquad.arena.speed.floors import FLOORS, OURS, Floor, than

__all__ = ["REACH", "REACH_CUDA"]

MASKS = (False, True)
WIDE = f"{OURS}(features=256)"
CROSSOVERS = {64: (150, 200), 128: (280, 340), 256: (540, 900)}
"""Tokens from which softmax is to be slower, for M features: bidirectional, causal."""


def _shares() -> list[Floor]:
    wanted = {
        (FORWARD, OURS): (0.70, 0.70),
        (FORWARD, WIDE): (0.78, 0.72),
        (TRAINING, OURS): (0.72, 0.65),
        (TRAINING, WIDE): (0.72, 0.65),
    }
    return [
        Floor("share", value, Case(name, mode, causal))
        for (mode, name), values in wanted.items()
        for causal, value in zip(MASKS, values, strict=True)
    ]


def _speeds() -> list[Floor]:
    return [
        than(SDPA, 12.0, Case(OURS, FORWARD, False)),
        than(SDPA, 6.0, Case(OURS, FORWARD, True)),
        than(SDPA, 16.0, Case(OURS, TRAINING, False)),
        than(SDPA, 5.5, Case(OURS, TRAINING, True)),
        than(peers.PERFORMER, 5.0, Case(OURS, FORWARD, False, 16384)),
        than(peers.PERFORMER, 30.0, Case(OURS, FORWARD, True, 2048)),
    ]


def _crossover(name: str, value: float, case: Case) -> Floor:
    ours, rival = (dataclasses.replace(case, name=one) for one in (name, SDPA))
    return Floor("crossover", value, ours, rival)


def _crossovers() -> list[Floor]:
    return [
        *(
            _crossover(f"{OURS}(features={features})", value, Case(OURS, FORWARD, causal))
            for features, values in CROSSOVERS.items()
            for causal, value in zip(MASKS, values, strict=True)
        ),
        _crossover(OURS, 200, Case(OURS, DECODE, True)),
        _crossover("near_far", 2048, Case(OURS, FORWARD, False)),
    ]


def _within_itself() -> list[Floor]:
    """Two threads beside one, and half precision beside float32."""
    cases = [Case(OURS, mode, causal) for mode in (FORWARD, TRAINING) for causal in MASKS]
    two = [Floor("faster", 1.7, dataclasses.replace(case, threads=2), case) for case in cases]
    full = [dataclasses.replace(case, dtype="float32") for case in cases]
    halves = [
        Floor("slower", 1.3, dataclasses.replace(case, dtype=dtype), case)
        for dtype in ("bfloat16", "float16")
        for case in full
    ]
    return [*two, *halves]


def _without_compiler() -> list[Floor]:
    return [
        dataclasses.replace(floor, ours=dataclasses.replace(floor.ours, backend="torch"))
        for floor in FLOORS
        if floor.ours.name == OURS
    ]


REACH = (
    *_shares(),
    *_speeds(),
    *_crossovers(),
    Floor("memory", 4.5, Case(OURS, TRAINING, False, 65536)),
    Floor("memory", 5.0, Case(OURS, TRAINING, True, 65536)),
    Floor("microseconds", 40.0, Case(OURS, DECODE, True, 1024)),
    *_within_itself(),
    *_without_compiler(),
)
"""On a CPU: one thread but for two lines; `performer` has M=128 where nothing else is said."""

REACH_CUDA = (
    than(FLASH, 6.0, Case(OURS, FORWARD, False)),
    than(FLASH, 2.5, Case(OURS, FORWARD, True)),
    *(than(FLASH, 20.0, Case(OURS, FORWARD, causal, 65536)) for causal in MASKS),
    *(
        than(name, 1.5, Case(OURS, FORWARD, True, length))
        for name in (peers.FLA_CHUNK, peers.FLA_FUSED)
        for length in (4096, 65536)
    ),
    *(
        Floor("bound", 0.4, Case(OURS, FORWARD, causal, length))
        for length in (4096, 65536)
        for causal in MASKS
    ),
)
"""On a GPU, in bfloat16."""
