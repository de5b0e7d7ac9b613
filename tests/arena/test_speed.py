import dataclasses
import json
import math

import pytest
import torch

from subquad import registry
from subquad.arena import speed
from subquad.arena.machine import machine, machine_line, peak_of
from subquad.arena.speed import Contender, Sizes

SIZES = Sizes(heads=2, head_dim=16, features=32)
MIB = 2**20


@pytest.fixture(scope="module")
def found():
    return {contender.name: contender for contender in speed.contenders(SIZES)[0]}


def test_every_registered_mechanism_takes_part_or_is_left_out_with_a_reason():
    found, left_out = speed.contenders(SIZES)
    names = {contender.name for contender in found}
    assert speed.SDPA in names
    for name in (*registry.MECHANISMS, *speed.PEERS):
        assert name in names or any(line.startswith(f"{name}:") for line in left_out), name


@pytest.mark.parametrize("name", ["SDPA", "softmax", "additive", "performer", "gaussian", "local"])
@pytest.mark.parametrize("causal", [False, True])
def test_right_mechanisms_pass_the_check(found, name, causal):
    contender = dataclasses.replace(found[name], check_length=37)
    result = speed.check(contender, SIZES, causal)
    assert result.ok, result
    assert 0 < result.forward < speed.BOUND


@pytest.mark.peers
@pytest.mark.parametrize("causal", [False, True])
def test_the_peer_passes_against_its_own_formula(found, causal):
    pytest.importorskip("performer_pytorch")
    pytest.importorskip("local_attention")
    result = speed.check(dataclasses.replace(found[speed.PEER], check_length=37), SIZES, causal)
    assert result.ok, result
    result = speed.check(found[speed.LOCAL_PEER], SIZES, causal)  # longer than its window
    assert result.ok, result


def _broken(right: Contender, call, name: str) -> Contender:
    return dataclasses.replace(right, call=call, name=name, check_length=37)


@pytest.mark.parametrize("causal", [False, True])
def test_every_mechanism_can_be_checked(found, causal):
    for contender in found.values():
        if contender.name in speed.PEERS or (causal and contender.causal):
            continue
        result = speed.check(dataclasses.replace(contender, check_length=41), SIZES, causal)
        assert result.ok, f"{contender.name}: {result}"


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
    checks = [speed.check(c, SIZES, causal) for c in everyone for causal in (False, True)]
    times, left_out = speed.measure_times(everyone, SIZES, (16, 32), checks, rounds=1, least=1)
    timed = {(name, causal) for name, causal, _, _ in times}
    assert timed == {("performer", False), ("performer", True), ("leaks_the_future", False)}
    for call in wrong:
        assert f"{call.__name__}, bidirectional: failed correctness" in left_out
    assert "leaks_the_future, causal: failed correctness" in left_out
    result = {c.name: c for c in checks}
    assert result["wrong_gradient"].forward < speed.BOUND < result["wrong_gradient"].gradient
    assert "no kernel for this" in result["raises"].problem
    for one in checks:
        json.dumps(one.to_dict(), allow_nan=False)


def test_an_unchecked_mechanism_is_not_timed(found):
    assert speed.measure_times([found["performer"]], SIZES, (16,), []) == ({}, [])


def test_a_mechanism_without_a_naive_line_is_checked_against_its_own_float64(monkeypatch):
    monkeypatch.delitem(speed.NAIVE, "performer")
    performer = speed.contenders(SIZES, ["performer"])[0][-1]
    assert "its own float64" in performer.against
    assert speed.check(dataclasses.replace(performer, check_length=37), SIZES, True).ok


def test_calls_that_would_take_too_long_are_left_out_and_said(found):
    slow = dataclasses.replace(found["softmax"], limit=0.0, check_length=37)
    checks = [speed.check(slow, SIZES, False)]
    times, left_out = speed.measure_times([slow], SIZES, (16, 32, 64), checks, rounds=1, least=1)
    assert [key[3] for key in times if not key[2]] == [16]
    assert any("forward, from 32 tokens: a call would take about" in line for line in left_out)
    capped = dataclasses.replace(slow, limit=9.0, longest={(False, False): (16, "memory")})
    times, left_out = speed.measure_times([capped], SIZES, (16, 32), checks, rounds=1, least=1)
    assert [key[3] for key in times if not key[2]] == [16]
    assert "softmax, bidirectional forward, from 32 tokens: memory" in left_out


def test_a_missing_peer_is_a_stated_skip(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(speed.importlib, "import_module", missing)
    for peer in (speed._peer, speed._local_peer):
        reason = peer(SIZES)
        assert isinstance(reason, str)
        assert "pip install 'subquad[peers]'" in reason


def test_floors():
    peer = speed.PEER
    seconds = {"SDPA": 11.0, peer: 3.0, speed.LOCAL_PEER: 3.5}

    def fresh(floor):
        return None if floor.length == 2048 else [[1.0] * 3, [seconds[floor.rival]] * 3]

    memory = [{"name": "performer", "causal": False, "length": 65536, "units": 4.2}]
    rows = speed._floors(fresh, memory)
    assert len(rows) == len(speed.FLOORS)
    found = {row["floor"]: (row["measured"], row["ok"]) for row in rows}
    assert found["bidirectional forward, 4k: at least 10× faster than SDPA"] == (11.0, True)
    assert found[f"bidirectional forward, 4k: at least 2× faster than {peer}"] == (3.0, True)
    assert found[f"bidirectional forward, 16k: at least 3.5× faster than {peer}"] == (3.0, False)
    assert found["bidirectional training step, 64k: at most 4.5 × |q| beyond inputs"] == (4.2, True)
    assert found[f"causal forward, 2k: at least 15× faster than {peer}"] == (None, None)
    local = f"local(window=256) causal forward, 8k: at least 3× faster than {speed.LOCAL_PEER}"
    assert found[local] == (3.5, True)
    for name in ("reformer", "routing"):
        assert found[f"{name} causal forward, 16k: at least 3× faster than SDPA"] == (11.0, True)
    causal = found["causal training step, 64k: at most 5.5 × |q| beyond inputs"]
    assert causal == (None, None)


def test_ratios_are_taken_round_by_round():
    # a disturbance that slows one round of both by ten does not move the ratio
    assert speed._ratio([2.0, 20.0, 2.2], [1.0, 10.0, 1.0]) == 2.0
    assert speed._ratio(None, [1.0]) is None


def test_crossover_is_interpolated():
    times = {("SDPA", False, False, n): [float(n * n)] for n in (256, 512, 1024)}
    times |= {("performer", False, False, n): [512.0 * n * 2**0.5] for n in (256, 512, 1024)}
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
    floor = speed.Floor(True, False, 512, 1.0, speed.SDPA)
    ours, theirs = speed.fresh_times("performer", floor, SIZES, 3)
    assert len(ours) == len(theirs) == 3
    assert min(ours + theirs) > 0


def test_machine_is_named():
    where = machine(threads=1)
    assert where["torch"] == torch.__version__
    assert where["slug"].endswith("core-cpu")
    assert set(where["slug"]) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert where["cpu"] in machine_line(where)


def test_a_small_run_from_check_to_picture(tmp_path):
    result = speed.measure(
        SIZES,
        (64, 128),
        names=["softmax", "performer"],
        timing={"rounds": 2, "least": 1},
        memory_of=(),
    )
    result = json.loads(json.dumps(result, allow_nan=False))
    assert result["settings"]["seed"] == 0
    assert result["machine"]["cpu"]
    assert {row["name"] for row in result["times"]} >= {"SDPA", "softmax", "performer"}
    assert all(0 < row["ms_min"] <= row["ms"] <= row["ms_max"] for row in result["times"])
    text = speed.table(result)
    assert "| performer | causal | materialised φ with the same ω, float64 |" in text
    assert result["machine"]["cpu"] in text
    pytest.importorskip("matplotlib")
    speed.draw(result, tmp_path / "speed.png")
    assert (tmp_path / "speed.png").stat().st_size > 10_000


def test_run_writes_files_and_restores_threads(tmp_path, monkeypatch):
    real = speed.measure

    def small(sizes, *, say, **plan):
        assert torch.get_num_threads() == 1
        return real(SIZES, (32,), names=["performer"], memory_of=(), say=say)

    monkeypatch.setattr(speed, "measure", small)
    before = torch.get_num_threads()
    lines: list[str] = []
    result = speed.run(tmp_path / "new", True, True, lines.append)
    assert torch.get_num_threads() == before
    assert not any("|---" in line for line in lines)  # json: progress, no tables
    assert json.loads((tmp_path / "new" / "speed.json").read_text()) == json.loads(
        json.dumps(result, allow_nan=False)
    )
    assert result["quick"] is True
    assert "## Floors" in (tmp_path / "new" / "speed.md").read_text()
