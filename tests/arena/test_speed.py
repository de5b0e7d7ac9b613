import dataclasses
import importlib
import importlib.util
import json
import math
import time

import pytest
import torch

from subquad import registry
from subquad.arena import speed
from subquad.arena.machine import machine, machine_line, peak_of
from subquad.arena.speed import (
    Case,
    Contender,
    Floor,
    Sizes,
    checks,
    floors,
    naive,
    peers,
    timing,
)
from subquad.arena.speed.cases import DECODE, FORWARD, PREFILL, TRAINING, setting
from subquad.arena.speed.contenders import FLASH, FLEX, _fused
from subquad.errors import DeviceError, OptionError, UnknownNameError

SIZES = Sizes(heads=2, head_dim=16, features=32)
MIB = 2**20


@pytest.fixture(scope="module")
def everyone():
    return speed.contenders(SIZES, max_length=1024)


@pytest.fixture(scope="module")
def found(everyone):
    return {contender.name: contender for contender in everyone[0]}


def check(contender, mode=TRAINING, causal=False, **rest):
    """`speed.check` of a contender by the parts of its case."""
    return speed.check(contender, SIZES, Case(contender.name, mode, causal, **rest))


def kinds(contender):
    """The cases that a contender is checked for."""
    cases = [Case(contender.name, *kind) for kind in
             ((TRAINING, False), (TRAINING, True), (DECODE, True))]  # fmt: skip
    return [case for case in cases if not contender.lacks(case)]


def test_every_registered_mechanism_takes_part_or_is_left_out_with_a_reason(everyone):
    names, left_out = {contender.name for contender in everyone[0]}, everyone[1]
    assert speed.SDPA in names
    for name in (*registry.MECHANISMS, peers.PERFORMER, peers.LOCAL, peers.LINFORMER, peers.FLA):
        assert name in names or any(line.startswith(f"{name}:") for line in left_out), name


@pytest.mark.parametrize("name", ["SDPA", "softmax", "additive", "performer", "gaussian", "local"])
@pytest.mark.parametrize("causal", [False, True])
def test_right_mechanisms_pass_the_check(found, name, causal):
    result = check(dataclasses.replace(found[name], check_length=37), causal=causal)
    assert result.ok, result
    assert 0 < result.forward < speed.BOUND
    assert 0 < result.gradient < speed.BOUND


@pytest.mark.peers
@pytest.mark.parametrize("name", [peers.PERFORMER, peers.LOCAL, peers.LINFORMER, peers.FLA])
def test_peers_pass_against_their_own_formulas(found, name):
    package = {peers.FLA: "fla", peers.LINFORMER: "linformer"}.get(name, name.replace("-", "_"))
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    assert kinds(found[name])
    for case in kinds(found[name]):  # at their lengths: whole windows, whole chunks
        result = speed.check(found[name], SIZES, case)
        assert result.ok, result


def _broken(right: Contender, call, name: str) -> Contender:
    return dataclasses.replace(right, call=call, name=name, check_length=37)


def test_every_mechanism_can_be_checked(found):
    for contender in found.values():
        if contender.name in peers.NAMES:
            continue
        for case in kinds(contender):
            result = speed.check(dataclasses.replace(contender, check_length=41), SIZES, case)
            assert result.ok, f"{contender.name}: {result}"


@pytest.mark.parametrize("name", ["sinkhorn", "routing", "reformer"])
def test_choices_do_not_hang_on_the_precision(found, name):
    # several blocks, clusters and buckets, so that there is something to choose; noise of
    # training would choose otherwise in float64
    for case in kinds(found[name]):
        result = speed.check(dataclasses.replace(found[name], check_length=257), SIZES, case)
        assert result.ok, result


def test_auto_is_checked_on_the_side_that_it_takes():
    for crossover in (0, 1000):
        (auto,) = (
            one for one in speed.contenders(
                SIZES, [f"auto(linear=performer(features=32), crossover={crossover})"], peer=False
            )[0] if one.name != speed.SDPA
        )  # fmt: skip
        assert check(dataclasses.replace(auto, check_length=37)).ok


def test_settings_of_a_case_are_checked(found):
    performer = dataclasses.replace(found["performer"], check_length=37)
    before = torch.get_num_threads()
    with setting(Case("performer", threads=2)):
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == before
    for rest in ({"backend": "torch"}, {"threads": 2}, {"dtype": "bfloat16"}, {"dtype": "float16"}):
        result = check(performer, causal=True, **rest)
        assert result.ok, result
    # half precision shows: its rounding is larger than what float32 is allowed
    assert speed.BOUND < check(performer, dtype="bfloat16").forward < checks.bound(torch.bfloat16)
    with pytest.raises(UnknownNameError, match="gpu9"):
        check(performer, backend="gpu9")


def test_a_wrong_step_shows_no_speed_of_decoding(found):
    right = dataclasses.replace(found["performer"], check_length=37)
    forgetful = dataclasses.replace(
        right.decoding, step=lambda q, k, v, *_: right.decoding.step(q, k, v, None, False)
    )
    wrong = dataclasses.replace(right, name="forgetful", decoding=forgetful)
    results = [speed.check(wrong, SIZES, case) for case in kinds(wrong)]
    assert [one.ok for one in results] == [True, True, False]
    times, left_out = speed.measure_times([wrong], SIZES, (16,), results, rounds=1, least=1)
    assert {case.mode for case in times} == {FORWARD, TRAINING}
    assert "forgetful, decode step: failed correctness" in left_out


@pytest.mark.parametrize("causal", [False, True])
def test_the_flash_kernel_passes_where_a_cpu_has_it(causal):
    with torch._dynamo.config.patch(recompile_limit=8):  # puts back what is raised
        flash, flex = _fused(SIZES)
    assert (flash.name, flex.name) == (FLASH, FLEX)
    assert check(flash, causal=causal).ok


def test_every_mode_is_timed_where_the_mechanism_has_it(found):
    everyone = [dataclasses.replace(found[n], check_length=37) for n in ("SDPA", "linformer")]
    results = [speed.check(one, SIZES, case) for one in everyone for case in kinds(one)]
    times, _ = speed.measure_times(everyone, SIZES, (16,), results, rounds=2, least=2)
    modes = {name: {c.mode for c in times if c.name == name} for name in ("SDPA", "linformer")}
    assert modes == {
        "SDPA": {FORWARD, TRAINING, PREFILL, DECODE}, "linformer": {FORWARD, TRAINING},
    }  # fmt: skip
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in times.values())


def test_the_rival_of_decoding_reads_its_whole_cache(found):
    decoding = found["SDPA"].decoding
    q, k, v, _ = SIZES.inputs(200)  # longer than the room that a short prefill leaves
    _, state = decoding.prefill(q[:, :, :100], k[:, :, :100], v[:, :, :100])
    for token in range(100, 160):
        row = slice(token, token + 1)
        out, state = decoding.step(q[:, :, row], k[:, :, row], v[:, :, row], state, True)
    exact = naive.softmax(q[:, :, 159:160], k[:, :, :160], v[:, :, :160], False)
    assert (out - exact).abs().max() < 1e-5  # a convex sum of 160 numbers ≤ 4: 4·√160·6e-8 ≈ 3e-6
    assert decoding.nbytes(state) == 2 * 160 * 2 * 16 * 4


def test_a_wrong_mechanism_shows_no_speed(found):
    right = dataclasses.replace(found["performer"], check_length=37)

    def slightly_off(q, k, v, causal):
        return right.call(q, k, v, causal) * 1.001

    def wrong_gradient(q, k, v, causal):
        return right.call(q, k.detach(), v, causal) + 0.0 * k.sum()

    def not_finite(q, k, v, causal):
        return right.call(q, k, v, causal) * math.nan

    def leaks_the_future(q, k, v, causal):
        return right.call(q, k, v, False)

    def raises(q, k, v, causal):
        raise RuntimeError("no kernel for this")

    wrong = [slightly_off, wrong_gradient, not_finite, raises]
    everyone = [right, *(_broken(right, call, call.__name__) for call in wrong)]
    everyone.append(_broken(right, leaks_the_future, "leaks_the_future"))
    results = [check(c, causal=causal) for c in everyone for causal in (False, True)]
    times, left_out = speed.measure_times(everyone, SIZES, (16, 32), results, rounds=1, least=1)
    timed = {(case.name, case.causal) for case in times}
    assert timed == {("performer", False), ("performer", True), ("leaks_the_future", False)}
    for call in wrong:
        assert f"{call.__name__}, bidirectional training step: failed correctness" in left_out
    assert "leaks_the_future, causal training step: failed correctness" in left_out
    result = {one.case.name: one for one in results}
    assert result["wrong_gradient"].forward < speed.BOUND < result["wrong_gradient"].gradient
    assert "no kernel for this" in result["raises"].problem
    for one in results:
        json.dumps(one.to_dict(), allow_nan=False)


def test_an_unchecked_mechanism_is_not_timed(found):
    assert speed.measure_times([found["performer"]], SIZES, (16,), []) == ({}, [])


def test_a_mechanism_without_a_naive_line_is_checked_against_its_own_float64(monkeypatch):
    monkeypatch.delitem(speed.NAIVE, "performer")
    performer = speed.contenders(SIZES, ["performer"])[0][-1]
    assert "its own float64" in performer.against
    assert check(dataclasses.replace(performer, check_length=37), causal=True).ok


def test_calls_that_would_take_too_long_are_left_out_and_said(found):
    slow = dataclasses.replace(found["softmax"], limit=0.0, check_length=37)
    results = [check(slow), check(slow, DECODE, True)]
    times, left_out = speed.measure_times([slow], SIZES, (16, 32, 64), results, rounds=1, least=1)
    assert [case.length for case in times if case.mode == FORWARD] == [16]
    assert any("forward, from 32 tokens: a call would take about" in line for line in left_out)
    assert not any(case.mode == DECODE and case.length > 16 for case in times)
    capped = dataclasses.replace(slow, limit=9.0, longest={(FORWARD, False): (16, "memory")})
    times, left_out = speed.measure_times([capped], SIZES, (16, 32), results, rounds=1, least=1)
    assert [case.length for case in times if case.mode == FORWARD] == [16]
    assert "softmax, bidirectional forward, from 32 tokens: memory" in left_out


def test_a_missing_peer_is_a_stated_skip(monkeypatch):
    real = importlib.import_module

    def missing(name):
        if name.startswith("subquad."):
            return real(name)
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(peers.importlib, "import_module", missing)
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    found, left_out = speed.contenders(SIZES, [])
    assert [one.name for one in found] == [speed.SDPA]
    assert len(left_out) == len(peers.BUILDERS)
    assert all("not installed" in line for line in left_out)
    assert all(line.endswith("pip install 'subquad[peers]'") for line in left_out)
    goal = floors.than(peers.PERFORMER, 2.0, Case("performer"))
    (row,) = speed.promises([goal], SIZES, 1)["rows"]
    assert (row["measured"], row["ok"]) == (None, None)
    assert "not installed" in row["detail"]


def test_promises_in_words():
    all_texts = []
    for floors_of_one in (speed.FLOORS, speed.REACH, speed.REACH_CUDA):
        texts = [floor.text for floor in floors_of_one]
        assert len(texts) == len(set(texts))
        all_texts += texts
    peer = peers.PERFORMER
    assert {
        "bidirectional forward, 4k: at least 10× faster than SDPA",
        f"bidirectional training step, 16k: at least 3.5× faster than {peer}",
        "causal training step, 64k: at most 5.5 × |q| beyond inputs",
        f"local(window=256) causal forward, 8k: at least 3× faster than {peers.LOCAL}",
        "performer(features=256) causal forward, 4k: at least 72% of the GEMM peak",
        "performer(features=64) bidirectional forward: faster than SDPA from at most 150 tokens",
        "decode step: faster than SDPA from at most 200 tokens",
        "decode step: at most 40 µs",
        "causal training step, 4k, 2 threads: at least 1.7× faster than one thread",
        "causal forward, 4k, float16: at most 1.3× the time of float32",
        f"causal forward, 2k, backend torch: at least 15× faster than {peer}",
        "causal forward, 64k: at least 20× faster than SDPA, flash kernel",
    } <= set(all_texts)


def test_promises_are_judged_by_what_was_measured(monkeypatch):
    monkeypatch.setattr(
        speed, "check", lambda one, sizes, case: checks.Check(
            case, "nothing", 1.0 if (one.name, case.causal) == ("performer", True) else 1e-6
        ),
    )  # fmt: skip
    ours = Case("performer")
    goals = [
        floors.than(speed.SDPA, 10.0, ours),
        floors.than(speed.SDPA, 11.5, ours.at(8192)),
        floors.than(speed.SDPA, 1.0, dataclasses.replace(ours, causal=True)),
        floors.than(speed.SDPA, 1.0, ours.at(2**17)),
        Floor("crossover", 150.0, ours, Case(speed.SDPA)),
        Floor("memory", 4.5, dataclasses.replace(ours, mode=TRAINING)),
    ]
    values = {"faster": 11.0, "crossover": None, "memory": 4.2}
    groups = []

    def measured(group, sizes, rounds):
        groups.append([goal.measure for goal in group])
        return [{"value": values[g.measure], "detail": "so", "backend": "torch"} for g in group]

    found = speed.promises(goals, SIZES, 3, measured=measured)
    assert [row["ok"] for row in found["rows"]] == [True, False, None, None, False, True]
    assert found["rows"][2]["detail"] == "performer failed correctness"
    assert found["rows"][3]["detail"] == "quick run"
    # Those that were missed are measured twice more.
    missed = [["faster"], ["crossover"]]
    assert groups == [["faster"], ["faster"], ["memory"], ["crossover"], *missed, *missed]


def test_the_middle_one_counts_of_a_goal_that_was_missed(monkeypatch):
    monkeypatch.setattr(
        speed, "check", lambda contender, sizes, case: checks.Check(case, "nothing", 1e-6)
    )
    goals = [floors.than(speed.SDPA, wanted, Case("performer")) for wanted in (10.0, 11.0, 12.0)]
    values = {10.0: iter([9.0, 12.0, 10.5]), 11.0: iter([9.0, 12.0, 10.0]), 12.0: iter([12.5])}

    def measured(group, sizes, rounds):
        return [{"value": next(values[g.value]), "detail": "so", "backend": "torch"} for g in group]

    rows = speed.promises(goals, SIZES, 3, measured=measured)["rows"]
    assert [(row["measured"], row["ok"]) for row in rows] == [
        (10.5, True), (10.0, False), (12.5, True),
    ]  # fmt: skip
    assert rows[0]["detail"] == "so; the middle one of 9.00×, 12.00×, 10.50×"
    assert rows[2]["detail"] == "so"


def test_useful_flops_are_those_of_the_docstring():
    sizes = Sizes()
    wide = "performer(features=256)"
    flops = floors.useful_flops
    assert flops(Case("performer", length=10), sizes) == 8 * 10 * 8 * 64 * 128
    assert flops(Case(wide, TRAINING, length=10), sizes) == 3 * 8 * 10 * 8 * 64 * 256
    causal = 8 * 10 * (8 * 64 * 128 + 2 * 64 * (128 + 64))
    assert flops(Case("performer", FORWARD, True, 10), sizes) == causal
    assert flops(Case("performer", FORWARD, True, 10), sizes, 0) == 8 * 10 * 8 * 64 * 128


def test_a_crossover_is_found_between_its_bracket(monkeypatch):
    def rounds(floor, sizes, count, length):  # softmax at n², ours at 300·n
        return [[300.0 * length] * 3, [float(length**2)] * 3]

    monkeypatch.setattr(floors, "_rounds", rounds)
    goal = Floor("crossover", 540.0, Case("performer"), Case(speed.SDPA))
    value, detail = floors.MEASURES["crossover"].find(goal, SIZES, 3)
    assert abs(value - 300) <= 1  # straight in log-log: exact but for the rounding
    low, high = (float(part.split("× at ")[0]) for part in detail.split(", "))
    assert low <= 1 <= high <= 1.05
    monkeypatch.setattr(floors, "_rounds", lambda f, s, c, n: [[2.0 * n] * 3, [1.0 * n] * 3])
    value, detail = floors.MEASURES["crossover"].find(goal, SIZES, 3)
    assert math.isnan(value) and detail == "0.50× at 65536"


def test_threads_are_compared_by_the_least_times(monkeypatch):
    rounds = [[2.0, 1.0, 9.0], [3.0, 4.0, 3.0]]  # ours and one thread's
    monkeypatch.setattr(floors, "_rounds", lambda floor, sizes, count: rounds)
    ours = Case("performer", threads=2)
    alone = dataclasses.replace(ours, threads=1)
    find = floors.MEASURES["faster"].find
    assert find(Floor("faster", 1.7, ours, alone), SIZES, 3) == (
        3.0, "1000.0 ms against 3000.0 ms, the least",
    )  # fmt: skip
    assert find(Floor("faster", 1.7, alone, Case(speed.SDPA)), SIZES, 3)[0] == 1.5


def test_ratios_are_taken_round_by_round():
    # a disturbance that slows one round of both by ten does not move the ratio
    assert timing.ratio([2.0, 20.0, 2.2], [1.0, 10.0, 1.0]) == 2.0
    assert timing.ratio(None, [1.0]) is None


def test_short_calls_are_repeated_within_a_sample():
    counts = dict.fromkeys(("short", "long"), 0)

    def short():
        counts["short"] += 1

    def long():
        counts["long"] += 1
        end = time.process_time() + 2 * timing.SHORT
        while time.process_time() < end:
            pass

    times = timing.interleave({Case("short"): short, Case("long"): long}, 3, 60.0)
    repeats = (counts.pop("short") - 1) / 2  # in two of three rounds; the first call was timed
    # An empty call takes no sixteenth of the least sample, however busy the machine is.
    assert 16 < repeats <= timing.MOST_REPEATS and counts == {"long": 3}
    assert max(times[Case("short")]) < timing.SHORT <= min(times[Case("long")])


def test_crossover_is_interpolated():
    lengths = (256, 512, 1024)
    times = {Case("SDPA", FORWARD, False, n): [float(n * n)] for n in lengths}
    times |= {Case("performer", FORWARD, False, n): [512.0 * n * 2**0.5] for n in lengths}
    (row,) = speed._crossovers(times)
    assert row["length"] == pytest.approx(512 * 2**0.5)


def test_peak_of_a_call():
    def call():
        first = torch.ones(48 * MIB // 4)
        del first  # the peak is before this, not at the end
        return torch.ones(16 * MIB // 4)

    # page tables, the interpreter and rounding of huge pages (2 MiB a tensor) come on top
    assert 47.5 <= peak_of(call) / MIB <= 56


def test_memory_of_a_training_step_in_a_child_process():
    # output and three gradients cannot be avoided; a causal call keeps a state every 128 tokens
    units = speed.peak_memory("performer", True, 2**14, SIZES)
    assert 3.9 <= units <= 12


def test_a_floor_is_timed_in_a_process_of_its_own():
    ours = Case("performer", FORWARD, True, 512, backend="torch")
    goals = [
        floors.than(speed.SDPA, 1.0, ours),
        Floor("slower", 9.0, dataclasses.replace(ours, dtype="bfloat16"), ours),
        Floor("share", 0.5, ours),
        Floor("bound", 0.5, ours),
        Floor("microseconds", 40.0, dataclasses.replace(ours, mode=DECODE)),
        Floor("faster", 1.0, dataclasses.replace(ours, threads=2), ours),
    ]
    found = speed.fresh(goals, SIZES, 3)
    assert [row["backend"] for row in found] == ["torch"] * len(goals)
    assert all(row["value"] > 0 and row["detail"] for row in found)
    assert found[2]["value"] < 1 and found[3]["value"] < 1


def test_a_floor_survives_the_way_to_its_process():
    for floor in (*speed.FLOORS, *speed.REACH, *speed.REACH_CUDA):
        assert Floor.from_dict(json.loads(json.dumps(dataclasses.asdict(floor)))) == floor


@pytest.mark.slow
def test_a_failing_child_says_what_it_wrote():
    with pytest.raises(RuntimeError, match="nobody"):
        speed.fresh([Floor("memory", 1.0, Case("nobody", TRAINING))], SIZES, 1)


def test_machine_is_named():
    where = machine(threads=1)
    assert where["torch"] == torch.__version__
    assert where["slug"].endswith("core-cpu")
    assert set(where["slug"]) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert where["cpu"] in machine_line(where)
    with pytest.raises(DeviceError, match="'tpu'"):
        machine(threads=1, device="tpu")
    assert machine_line({**where, "gpu": "NVIDIA H200"}).startswith("NVIDIA H200; ")


def test_a_small_run_from_check_to_picture(tmp_path):
    result = speed.measure(
        SIZES,
        (64, 128),
        parts=("mechanisms",),
        names=["softmax", "performer"],
        peer=False,
        timing={"rounds": 2, "least": 1},
        memory_of=(),
    )
    result = json.loads(json.dumps(result, allow_nan=False))
    found = result["mechanisms"]
    assert found["settings"]["seed"] == 0
    assert found["machine"]["cpu"]
    assert {row["name"] for row in found["times"]} >= {"SDPA", "softmax", "performer"}
    assert {row["mode"] for row in found["times"]} == {FORWARD, TRAINING, PREFILL, DECODE}
    assert all(0 < row["ms_min"] <= row["ms"] <= row["ms_max"] for row in found["times"])
    for row in found["times"]:
        assert row["copy_share"] > 0
        assert (row["gemm_share"] is None) == (row["mode"] == DECODE), row
    text = speed.table(result)
    assert "| performer | causal training step | materialised φ with the same ω, float64 |" in text
    assert "### Decode step" in text and "### Prefill" in text
    assert found["machine"]["cpu"] in text
    pytest.importorskip("matplotlib")
    speed.draw(result, tmp_path / "speed.png")
    assert (tmp_path / "speed.png").stat().st_size > 10_000


def test_run_writes_files_keeps_other_parts_and_restores_threads(tmp_path, monkeypatch):
    real = speed.measure

    def small(sizes, *, parts, say, **plan):
        assert torch.get_num_threads() == 1
        return real(
            SIZES, (32,), parts=parts, names=["performer"], peer=False, memory_of=(), say=say,
            timing={"rounds": 1, "least": 1},
        )  # fmt: skip

    def fresh(goals, sizes, rounds):
        return [{"value": 1.0, "detail": "|", "backend": ""} for _ in goals]

    monkeypatch.setattr(speed, "measure", small)
    monkeypatch.setattr(speed.promises, "__kwdefaults__",
                        {**speed.promises.__kwdefaults__, "measured": fresh})  # fmt: skip
    monkeypatch.setattr(speed, "FLOORS", speed.FLOORS[:1])
    monkeypatch.setattr(speed, "REACH", speed.REACH[:1])
    before, out = torch.get_num_threads(), tmp_path / "new"
    lines: list[str] = []
    result = speed.run(out, True, True, lines.append)
    assert torch.get_num_threads() == before
    assert not any("|---" in line for line in lines)  # json: progress, no tables
    written = json.loads((out / "speed.json").read_text())
    assert written == json.loads(json.dumps(result, allow_nan=False))
    assert set(speed.PARTS) <= set(result)
    text = (out / "speed.md").read_text()
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## Floors", "## Reach", "## Every mechanism",
    ]  # fmt: skip
    again = speed.run(out, False, False, lines.append, only=("reach",))
    assert (again["floors"], again["mechanisms"]) == (written["floors"], written["mechanisms"])
    assert (again["reach"]["quick"], written["reach"]["quick"]) == (False, True)
    assert "## Reach" in lines[-1] and "## Floors" not in lines[-1]
    with pytest.raises(OptionError, match="'tables'"):
        speed.run(out, True, True, lines.append, only=("tables",))
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="no"):
            speed.run(out, True, True, lines.append, device="cuda")
