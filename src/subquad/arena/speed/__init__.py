"""`subquad bench speed`: time and memory of attention, next to SDPA and other libraries.

Every registered mechanism that runs without data is timed, on one thread, in one process,
turn by turn with its rivals. Times are CPU times of the process, all its threads together: on
an idle machine what the clock shows, on a busy one without the waiting (CUDA events on a GPU;
the wall clock where threads are compared). No time is shown before the same call was checked,
in the same run, against a naive computation in float64. Mechanisms are in evaluation mode.

    forward         one call under `torch.no_grad`
    training step   forward and backward, gradients to q, k and v
    prefill         a causal call that also returns the state
    decode step     one token more, given the state of so many
    memory          of a training step in a process of its own: peak resident set less that
                    at the start, q, k, v and the output's gradient being there already

Shares of the GEMM peak count useful arithmetic: the mechanism's declared FLOPs of a
bidirectional forward call, three times that in a training step (the features once more, two
products for each one forward; 3.5 times for softmax), half of it under a causal mask where
the cost is quadratic. Shares of the copy bandwidth count q, k, v read and the output written
once, in a training step the four gradients too, in a prefill the state, in a decode step the
state that is read.

**Bound of the check.** ε = 2^-24 is float32's rounding. A feature or weight is exp of a
D-term dot product; its error in the exponent is about √D·ε·|x||ω|, √64·6e-8·2.8·8·1.44 ≈ 1.6e-5
at D = 64 with N(0, 1) inputs, a relative error of exp. Positive sums keep it, and the two
sides have independent errors, so outputs are within 1e-4, four standard deviations. Gradients
subtract the row mean from each value's contribution: the difference is as large as its terms
where values are N(0, 1), so the same bound is asked of them. Errors are ‖a − b‖ / ‖b‖.
"""

from __future__ import annotations

import dataclasses
import itertools
import json as json_module
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from subquad import kernels
from subquad.arena.machine import machine
from subquad.arena.speed.cases import (
    DECODE,
    FORWARD,
    PREFILL,
    TRAINING,
    Case,
    Sizes,
    mask_name,
)
from subquad.arena.speed.checks import BOUND, Check, check
from subquad.arena.speed.children import fresh, peak_memory
from subquad.arena.speed.contenders import SDPA, Contender, Decoding, contenders
from subquad.arena.speed.floors import FLOORS, MEASURES, Floor
from subquad.arena.speed.naive import NAIVE
from subquad.arena.speed.peers import LINFORMER, LOCAL, PERFORMER
from subquad.arena.speed.pictures import draw
from subquad.arena.speed.reach import REACH, REACH_CUDA
from subquad.arena.speed.tables import table
from subquad.arena.speed.timing import (
    Times,
    copy_bandwidth,
    gemm_peak,
    measure_times,
    ratio,
)
from subquad.errors import OptionError

__all__ = [
    "BOUND",
    "FLOORS",
    "NAIVE",
    "PARTS",
    "REACH",
    "REACH_CUDA",
    "SDPA",
    "Case",
    "Check",
    "Contender",
    "Floor",
    "Sizes",
    "check",
    "contenders",
    "draw",
    "fresh",
    "machine",
    "measure",
    "measure_times",
    "peak_memory",
    "promises",
    "run",
    "table",
]

PARTS = ("floors", "reach", "mechanisms")
FORMAT = 2
"""Of speed.json; parts of another one are not kept."""

Say = Callable[[str], None]


def run(
    out: Path,
    quick: bool,
    json: bool,
    echo: Say,
    *,
    only: Sequence[str] = (),
    device: str = "cpu",
) -> dict[str, Any]:
    """Runs the benchmark and writes ``speed.json``, ``speed.md`` and ``speed.png`` to `out`.

    Args:
        out: folder, made if missing.
        quick: few rounds, and only a few short lengths.
        json: the caller shows the result as JSON: echo progress, but no tables.
        echo: takes progress and tables, line by line.
        only: some of `PARTS`; the others are kept from an earlier run.
        device: "cpu", or "cuda": bfloat16, without the floors.

    Returns:
        Everything that was measured, and what was kept, JSON-able.

    Raises:
        OptionError: an unknown part or device.
        DeviceError: there is no GPU.
    """
    wrong = [part for part in only if part not in PARTS]
    if wrong:
        raise OptionError(f"only must name parts among {', '.join(PARTS)}, given {wrong[0]!r}")
    machine(threads=1, device=device)  # says what is wrong with a device
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    sizes = Sizes() if device == "cpu" else Sizes(device=device, dtype="bfloat16")
    parts = only or (PARTS if device == "cpu" else PARTS[1:])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = measure(sizes, parts=parts, say=echo, **_plan(quick, device))
    finally:
        torch.set_num_threads(threads)
    for part in parts:
        found[part]["quick"] = quick
    result = {**(_kept(out / "speed.json") if only else {}), **found}
    text = table(result)
    (out / "speed.json").write_text(json_module.dumps(result, indent=1) + "\n", encoding="utf-8")
    (out / "speed.md").write_text(text, encoding="utf-8")
    if "mechanisms" in parts:
        try:
            draw(result, out / "speed.png")
        except ImportError as error:
            echo(f"no speed.png: {error}; pip install 'subquad[arena]'")
    if not json:
        echo(text if not only else table(found))
    return result


def _kept(path: Path) -> dict[str, Any]:
    """What an earlier run wrote."""
    if not path.exists():
        return {}
    found: dict[str, Any] = json_module.loads(path.read_text(encoding="utf-8"))
    return found if found.get("format") == FORMAT else {}


def _plan(quick: bool, device: str) -> dict[str, Any]:
    """Arguments of `measure` beyond the sizes and parts."""
    if not quick:
        longest = 16 if device == "cuda" else 15
        return {
            "lengths": tuple(2**n for n in range(8, longest + 1)),
            # states are made by a prefill: every other length, from 256 on
            "timing": {"rounds": 9, "wanted": lambda case: _whole(case) or _every_other(case)},
            "floor_again": 0 if device == "cuda" else 2,  # by its own clock, and in ten minutes
        }
    slow = ("additive", "location", PERFORMER, LOCAL, LINFORMER)
    return {
        "lengths": (512, 16384),
        "timing": {
            "rounds": 3, "least": 2, "budget": 1.0,
            "wanted": lambda case: case.length == 512 and case.name not in slow,
        },
        "memory_of": ("performer",),
        "floor_rounds": 3,
        "floor_again": 0,
        "floor_length": 4096,
        "left_out": ("quick run: everything but 512 tokens",),
    }  # fmt: skip


def _whole(case: Case) -> bool:
    return case.mode in (FORWARD, TRAINING)


def _every_other(case: Case) -> bool:
    return case.length.bit_length() % 2 == 1


def measure(
    sizes: Sizes,
    lengths: Sequence[int],
    *,
    parts: Sequence[str] = PARTS,
    names: Iterable[str] | None = None,
    peer: bool = True,
    timing: Mapping[str, Any] | None = None,
    memory_length: int = 2**16,
    memory_of: Sequence[str] | None = None,
    floor_rounds: int = 9,
    floor_again: int = 2,
    floor_length: int = 2**16,
    left_out: Sequence[str] = (),
    say: Say = lambda text: None,
) -> dict[str, Any]:
    """The parts of the benchmark, JSON-able: {"format", part: {...}, ...}.

    Args:
        sizes: the head layout.
        lengths: ascending.
        parts: some of `PARTS`.
        names: registered mechanisms; all by default.
        peer: whether other libraries take part among all mechanisms.
        timing: further arguments of `measure_times`.
        memory_length: tokens of the training step whose memory is measured.
        memory_of: contenders whose memory is measured; all by default.
        floor_rounds: turns of each comparison of the floors and the reach.
        floor_again: how often one that is missed is measured again; even.
        floor_length: longest case of these that is measured.
        left_out: lines for the list of what was left out.
        say: progress.
    """
    reach = REACH_CUDA if sizes.device == "cuda" else REACH
    found: dict[str, Any] = {"benchmark": "speed", "format": FORMAT}
    for part in parts:
        started, worked = time.perf_counter(), _cpu_seconds()
        peaks = [gemm_peak(sizes)]
        bandwidth = copy_bandwidth(sizes)
        if part == "mechanisms":
            body = _everyone(
                sizes, lengths, names, peer, timing or {}, memory_length, memory_of, left_out, say
            )
        else:
            goals = FLOORS if part == "floors" else reach
            body = promises(
                goals, sizes, floor_rounds, longest=floor_length, again=floor_again, say=say
            )
        peaks.append(gemm_peak(sizes))
        found[part] = {
            "machine": machine(threads=1, device=sizes.device),
            "settings": {"batch": 1, **dataclasses.asdict(sizes), "seed": 0},
            "gemm_gflops": max(peaks) / 1e9,
            "copy_gbs": bandwidth / 1e9,
            "backends": _backends(sizes),
            **body,
            "seconds": time.perf_counter() - started,
            "cpu_seconds": _cpu_seconds() - worked,
        }
        if part == "mechanisms":
            found[part]["times"] = _shares(found[part], max(peaks), bandwidth)
    return found


def _cpu_seconds() -> float:
    """CPU time of this process and of its children that have ended."""
    return sum(os.times()[:4])


def _backends(sizes: Sizes) -> dict[str, str]:
    q, k, v, _ = sizes.inputs(1024)
    choice = kernels.explain(q, k, v, features=sizes.features)
    return {"linear": str(choice).replace("\n ", ";")}


# ---- floors and reach ----------------------------------------------------------------------


def promises(
    goals: Sequence[Floor],
    sizes: Sizes,
    rounds: int,
    *,
    longest: int = 2**16,
    again: int = 2,
    measured: Callable[..., list[dict[str, Any]]] = fresh,
    say: Say = lambda text: None,
) -> dict[str, Any]:
    """Checks of all cases that the goals name, and a row for each goal.

    A goal whose case failed its check, or whose rival is missing, is not measured. One that is
    missed is measured again at the end, by when what disturbed the machine may be over: the
    median of all its measurements counts, and the detail tells them.

    Args:
        goals: floors.
        sizes: the head layout.
        rounds: turns of each comparison.
        longest: greatest length that is measured.
        again: how often a goal that is missed is measured again; even.
        measured: (goals, sizes, rounds) → what was found, in a process of its own.
        say: progress.
    """
    kinds = dict.fromkeys(case.checked_by for goal in goals for case in goal.cases())
    everyone, missing = contenders(sizes, _ours(kinds))
    found = {contender.name: contender for contender in everyone}
    checks: dict[Case, Check] = {}
    for kind in kinds:
        if kind.name in found:
            say(f"checking {kind.name}, {kind.text} {kind.dtype} {kind.backend}".rstrip())
            checks[kind] = check(found[kind.name], sizes, kind)

    def obstacle(goal: Floor) -> str:
        for case in goal.cases():
            if case.name not in found:
                return "; ".join(line for line in missing if line.startswith(case.name))
            if not checks[case.checked_by].ok:
                return f"{case.name} failed correctness"
            if case.length > longest:
                return "quick run"
        return ""

    obstacles = {goal: obstacle(goal) for goal in goals}

    def measure(goals: Sequence[Floor]) -> dict[Floor, dict[str, Any]]:
        answers: dict[Floor, dict[str, Any]] = {}
        for group in _groups(goals):
            for goal in group:
                say(goal.text)
            answers |= zip(group, measured(group, sizes, rounds), strict=True)
        return answers

    answers = measure([goal for goal, reason in obstacles.items() if not reason])
    missed = [
        goal
        for goal, answer in answers.items()
        if answer["value"] is None or not goal.kept(answer["value"])
    ]
    turns = [measure(missed) for _ in range(again)]
    for goal in missed:
        answers[goal] = _median([answers[goal], *(turn[goal] for turn in turns)], goal)
    rows = []
    for goal in goals:
        answer = answers.get(goal, {"value": None, "detail": obstacles[goal], "backend": ""})
        value = answer["value"]
        rows.append(
            {
                "floor": goal.text, "measure": goal.measure, "wanted": goal.value,
                "measured": value, "detail": answer["detail"], "backend": answer["backend"],
                # a search that ended without a crossover has an answer too
                "ok": (False if goal in answers else None) if value is None else goal.kept(value),
            }
        )  # fmt: skip
    return {"checks": [one.to_dict() for one in checks.values()], "rows": rows}


def _median(answers: Sequence[dict[str, Any]], goal: Floor) -> dict[str, Any]:
    """The middle one of several answers to a goal, which tells the others."""
    if len(answers) == 1:
        return answers[0]
    cell = MEASURES[goal.measure].cell
    told = ", ".join("–" if a["value"] is None else cell.format(a["value"]) for a in answers)
    worst = -math.inf if MEASURES[goal.measure].least else math.inf
    ordered = sorted(answers, key=lambda a: worst if a["value"] is None else a["value"])
    middle = ordered[len(ordered) // 2]
    return {**middle, "detail": f"{middle['detail']}; the middle one of {told}"}


def _ours(kinds: Iterable[Case]) -> list[str]:
    """Names that the registry knows, of those that cases name."""
    from subquad.registry import MECHANISMS

    return [n for n in dict.fromkeys(kind.name for kind in kinds) if n.split("(")[0] in MECHANISMS]


def _groups(goals: Sequence[Floor]) -> Iterable[list[Floor]]:
    """Goals that share a process: one each where memory counts, others by what is measured."""
    shared: dict[str, list[Floor]] = {}
    for goal in goals:
        if MEASURES[goal.measure].alone:
            yield [goal]
        else:
            shared.setdefault(goal.measure, []).append(goal)
    yield from shared.values()


# ---- every mechanism -----------------------------------------------------------------------


def _everyone(
    sizes: Sizes,
    lengths: Sequence[int],
    names: Iterable[str] | None,
    peer: bool,
    timing: Mapping[str, Any],
    memory_length: int,
    memory_of: Sequence[str] | None,
    left_out: Sequence[str],
    say: Say,
) -> dict[str, Any]:
    """Checks, times and memory of all contenders."""
    longest = max(1024, 2 * max(lengths))  # checks have a length of their own, steps go beyond
    found, skipped = contenders(sizes, names, peer=peer, max_length=longest)
    notes = [*left_out, *skipped]
    checks = []
    for contender in found:
        for mode, causal in ((TRAINING, False), (TRAINING, True), (DECODE, True)):
            case = Case(contender.name, mode, causal)
            reason = contender.lacks(case)
            if reason:
                notes.append(f"{case.name}, {_asked(case)}: {reason}")
                continue
            say(f"checking {case.name}, {_asked(case)}")
            checks.append(check(contender, sizes, case))
    times, skipped = measure_times(found, sizes, lengths, checks, say=say, **timing)
    notes += skipped
    memory = []
    passed = {one.case.kind for one in checks if one.ok}
    for contender in found:
        for causal in (False, True):
            case = Case(contender.name, TRAINING, causal, memory_length)
            if case.kind not in passed or (memory_of is not None and case.name not in memory_of):
                continue
            kind = f"memory of {case.name}, {mask_name(causal)}, {memory_length} tokens"
            reason = _too_heavy(contender, case, times)
            if reason:
                notes.append(f"{kind}: {reason}")
                continue
            say(kind)
            units = peak_memory(case.name, causal, memory_length, sizes)
            memory.append({**_named(case), "units": units})
    return {
        "checks": [one.to_dict() for one in checks],
        "times": _rows(times, found, sizes),
        "crossover": _crossovers(times),
        "memory": memory,
        "left_out": notes,
    }


def _asked(case: Case) -> str:
    """What a check covers, in words."""
    return "prefill and decode step" if case.mode == DECODE else mask_name(case.causal)


def _named(case: Case) -> dict[str, Any]:
    return {"name": case.name, "mode": case.mode, "causal": case.causal, "length": case.length}


def _too_heavy(contender: Contender, case: Case, times: Times) -> str:
    longest = contender.longest.get((TRAINING, case.causal))
    if longest and case.length > longest[0]:
        return longest[1]
    last = max(
        (one for one in times if one.kind == case.kind), key=lambda one: one.length, default=None
    )
    if last is None:
        return ""
    growth = (case.length / last.length) ** (2 if contender.quadratic else 1)
    expected = statistics.median(times[last]) * growth
    return f"a step would take about {expected:.0f} s" if expected > contender.memory_limit else ""


def _rows(times: Times, found: Sequence[Contender], sizes: Sizes) -> list[dict[str, Any]]:
    """Times, ratios, and the FLOPs and bytes that a call has to make and to move."""
    by_name = {c.name: c for c in found}
    rows = []
    for case, seconds in times.items():
        row: dict[str, Any] = {
            **_named(case), "ms": statistics.median(seconds) * 1e3, "ms_min": min(seconds) * 1e3,
            "ms_max": max(seconds) * 1e3, "rounds": len(seconds),
        }  # fmt: skip
        rivals = ((SDPA, "times_faster_than_sdpa"), (PERFORMER, "times_faster_than_peer"))
        for rival, label in rivals:
            row[label] = ratio(times.get(dataclasses.replace(case, name=rival)), seconds)
        contender = by_name[case.name]
        row["flops"] = _flops(contender, case)
        row["bytes"] = _bytes(contender, case, sizes)
        rows.append(row)
    return rows


def _flops(contender: Contender, case: Case) -> float | None:
    if contender.flops is None or case.mode == DECODE:
        return None
    halved = 0.5 if case.causal and contender.quadratic else 1.0
    factor = 1.0
    if case.mode == TRAINING:
        factor = 3.5 if case.name in (SDPA, "softmax") else 3.0
    return contender.flops(case.length) * halved * factor


def _bytes(contender: Contender, case: Case, sizes: Sizes) -> float:
    one = sizes.inputs(1)[0]
    tensor = case.length * one.numel() * one.element_size()
    if case.mode in (FORWARD, TRAINING):
        return tensor * (4.0 if case.mode == FORWARD else 8.0)
    assert isinstance(contender.decoding, Decoding)
    q, k, v, _ = sizes.inputs(case.length)
    with torch.no_grad():
        _, state = contender.decoding.prefill(q, k, v)
    held = float(contender.decoding.nbytes(state))
    return held + 4.0 * tensor if case.mode == PREFILL else held


def _shares(part: Mapping[str, Any], peak: float, bandwidth: float) -> list[dict[str, Any]]:
    """Rows with what their FLOPs and bytes are of the machine's limits in their time."""
    rows = []
    for row in part["times"]:
        seconds = row["ms"] / 1e3
        share = row["flops"] and row["flops"] / (seconds * peak)
        rows.append(
            {**row, "gemm_share": share, "copy_share": row["bytes"] / (seconds * bandwidth)}
        )
    return rows


def _crossovers(times: Times) -> list[dict[str, Any]]:
    """Length from which a contender stays faster than SDPA, interpolated in log-log."""
    rows = []
    for kind in dict.fromkeys(one.kind for one in times if one.name not in (SDPA, "softmax")):
        gaps = []
        for length in sorted({one.length for one in times}):
            ours = times.get(kind.at(length))
            theirs = times.get(dataclasses.replace(kind.at(length), name=SDPA))
            found = ratio(ours, theirs)
            if found is not None:
                gaps.append((math.log(length), math.log(found)))
        at: float | None = None
        note = "not reached"
        if gaps and gaps[-1][1] < 0:
            at, note = math.exp(gaps[0][0]), "at the shortest length already"
            for (x0, y0), (x1, y1) in itertools.pairwise(gaps):
                if y0 >= 0 > y1:
                    at, note = math.exp(x0 + (x1 - x0) * y0 / (y0 - y1)), ""
        rows.append({**_named(kind), "length": at, "note": note})
    return rows
