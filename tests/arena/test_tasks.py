import dataclasses
import json
import math
import re
import time

import pytest
import torch

import subquad as sq
from subquad.arena import sublayer, tasks
from subquad.arena.sublayer import Sublayer
from subquad.arena.tasks import TASKS, UNASKED, Setting
from subquad.errors import OptionError, UnknownNameError

SMALL = Setting(
    pairs=8, values=4, keys=16, width=16, batch=8, steps=6, every=3, rows=16, seeds=(0, 1)
)  # fmt: skip


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


# ---- tasks: answers by loops ---------------------------------------------------------------


def answer(task, keys, values, place, setting):
    """What the question at a place asks for, found the slow way."""
    half = setting.pairs
    if task == "near":
        return values[place - 2]
    if task == "count":
        return max(range(setting.values), key=values[:half].count)
    if task == "copy":
        return values[place - half]
    if task == "fetch":
        return values[keys[place]]
    return values[keys[:half].index(keys[place])]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("setting", [Setting(), SMALL], ids=["full", "small"])
def test_labels_are_the_answers(task, setting):
    batch = TASKS[task](setting, 64, generator())
    asked = (batch.labels != UNASKED).sum(-1).tolist()
    assert set(asked) == {setting.pairs // 2 if task == "count" else setting.pairs}
    for keys, values, labels in zip(*(t.tolist() for t in batch), strict=True):
        for place, label in enumerate(labels):
            if label != UNASKED:
                assert label == answer(task, keys, values, place, setting)


@pytest.mark.parametrize("task", ["count", "copy", "fetch", "recall"])
def test_questions_hold_no_value(task):
    """Else an answer could be read where it is asked for."""
    setting = Setting()
    batch = TASKS[task](setting, 64, generator())
    assert (batch.values[:, setting.pairs :] == setting.values).all()
    assert (batch.labels[:, : setting.pairs] == UNASKED).all()


@pytest.mark.parametrize("setting", [Setting(), SMALL], ids=["full", "small"])
def test_the_most_frequent_value_is_one(setting):
    values = TASKS["count"](setting, 256, generator()).values[:, : setting.pairs]
    counts = torch.nn.functional.one_hot(values, setting.values).sum(1).sort(-1).values
    assert (counts[:, -1] == setting.pairs // 4 + 1).all()
    assert (counts[:, -2] < counts[:, -1]).all()
    assert len(values.unique(dim=0)) > 200  # places and values differ


def test_counting_values_without_selecting_stays_below_partly():
    """The bound's derivation in the module: 0.220, standard deviation 0.037 of a sequence.

    512 sequences: four standard deviations of the mean are 0.037·4/√512 = 0.0065.
    """
    setting = Setting()
    for task in ("copy", "recall"):
        batch = TASKS[task](setting, 512, generator(3))
        labels = batch.labels[:, setting.pairs :]
        right = torch.nn.functional.one_hot(labels, setting.values).sum(1).amax(-1) / setting.pairs
        assert right.mean().item() == pytest.approx(0.220, abs=0.0065)
        assert right.mean().item() < tasks.PARTLY


# ---- training ------------------------------------------------------------------------------


def test_the_seed_determines_the_result_and_leaves_the_global_generator_alone():
    before = torch.random.get_rng_state()
    first, again, other = (
        tasks.train("performer(features=8)", "recall", SMALL, seed, True) for seed in (0, 0, 1)
    )
    assert first == again and first.steps == 6 and len(first.looks) == 2
    assert other.looks != first.looks or other.accuracy != first.accuracy
    assert torch.equal(torch.random.get_rng_state(), before)


def test_training_ends_when_solved_and_when_nothing_comes_any_more():
    setting = Setting(patience=2, solved=0.9)
    for looks, over in [
        ([], False),
        ([0.5, 0.95], True),
        ([0.2, 0.2], False),
        ([0.2, 0.2, 0.21], True),
        ([0.2, 0.2, 0.23], False),
        ([0.2, 0.3, 0.25, 0.25], True),
    ]:
        assert tasks._over(looks, setting) is over, looks


def test_exact_attention_learns_recall_and_uniform_attention_does_not():
    """At least 0.9 of answers that a guess gets right with 0.22 at most, see the module."""
    setting = dataclasses.replace(Setting(), pairs=16, keys=32, steps=200, rows=64)
    exact = tasks.train("softmax", "recall", setting, 0, True)
    assert exact.accuracy >= tasks.LEARNS, exact
    # 16 draws from 8 values: the most frequent one fills 0.264 of them, deviating by 0.055;
    # four standard deviations of a mean over 64 sequences are 0.0275.
    blind = tasks.train("uniform", "recall", dataclasses.replace(setting, steps=100), 0, True)
    assert blind.accuracy <= 0.264 + 0.0275, blind


@pytest.mark.parametrize("causal", [True, False])
def test_a_window_cannot_reach_the_data(causal):
    """Two layers of windows of 8 end 16 tokens back: answers 32 tokens back are independent of
    what they see, hits are binomial; 256 sequences of 32 questions, five standard deviations.
    """
    setting = dataclasses.replace(Setting(), steps=20, every=20)
    found = tasks.train("local(window=8)", "copy", setting, 0, causal)
    assert abs(found.accuracy - 0.125) < 5 * math.sqrt(0.125 * 0.875 / (256 * 32)), found


@pytest.mark.parametrize(
    ("accuracy", "words"), [(1.0, "learns"), (0.9, "learns"), (0.5, "partly"), (0.29, "no")]
)
def test_verdicts(accuracy, words):
    assert tasks.verdict(accuracy) == words


# ---- what takes part -----------------------------------------------------------------------


def test_every_mechanism_takes_part_with_options_that_build():
    everyone = tasks.candidates()
    assert list(everyone) == ["uniform", *sq.mechanisms()]
    for name, specs in everyone.items():
        for spec in specs:
            assert spec.partition("(")[0] == name
            network = tasks.Network(spec, Setting(), tasks._forms(name, spec)[0])
            mixing = network.layers[0].self_attn.mechanism
            assert mixing.name == name


def test_reasons_are_of_tasks_and_candidates():
    specs = {spec for specs in tasks.candidates().values() for spec in specs}
    names = {spec.partition("(")[0] for spec in specs}
    for key, reasons in tasks.REASONS.items():
        assert key in specs | names, key
        assert set(reasons) < set(TASKS), f"{key}: its structure allows one task at least"
    assert tasks.reason("aft", "copy") and not tasks.reason("aft(kind=full)", "copy")
    assert tasks.reason("local(window=3)", "recall") and not tasks.reason("softmax", "recall")


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", [spec for specs in tasks.candidates().values() for spec in specs], ids=str
)
def test_each_learns_a_task_that_its_structure_allows(spec):
    """0.9 of the answers, where what cannot select gets 0.22 and chance is 0.125."""
    causal = tasks._forms(spec.partition("(")[0], spec)[0]
    allowed = [task for task in TASKS if not tasks.reason(spec, task)]
    reached = {}
    for task in sorted(allowed, key=["count", "near", "recall", "copy", "fetch"].index):
        for seed in (0, 1):
            reached[task, seed] = tasks.train(spec, task, Setting(), seed, causal).accuracy
            if reached[task, seed] >= tasks.LEARNS:
                return
    pytest.fail(f"{spec} learned none of {allowed}: {reached}")


# ---- a run ---------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    """Two mechanisms and the baseline, a few steps, no child process."""
    calls = []

    def measure(self, spec):
        calls.append(spec)
        ratio = 1.0 if spec == "softmax" else 3.0
        return {
            "spec": spec, "seconds": 1 / ratio, "softmax_seconds": 1.0, "times_faster": ratio,
            "tokens_per_second": self.length * ratio, "peak_bytes": 1e8 / ratio, "rounds": 3,
        }  # fmt: skip

    everyone = {"uniform": ("uniform",), "softmax": ("softmax",), "fnet": ("fnet",)}
    everyone["local"] = ("local(window=2)", "local(window=[2, 0])")
    monkeypatch.setattr(tasks, "candidates", lambda: everyone)
    monkeypatch.setattr(tasks, "Setting", lambda **_: SMALL)
    monkeypatch.setattr(Sublayer, "measure", measure)
    return calls


def test_report_resume_and_only(tmp_path, small, monkeypatch):
    seen = []
    result = tasks.run(tmp_path, False, False, seen.append)
    assert json.loads((tmp_path / "tasks.json").read_text()) == result
    labels = [(row["spec"], row["causal"]) for row in result["rows"]]
    assert labels == [
        ("uniform", True), ("uniform", False), ("softmax", True), ("softmax", False),
        ("fnet", False), ("local(window=2)", True), ("local(window=[2, 0])", True),
    ]  # fmt: skip
    assert small == ["softmax", "fnet", "local"]
    for row in result["rows"]:
        found = row["tasks"].values()
        assert all(one["verdict"] == tasks.verdict(one["accuracy"]) for one in found)
        assert all(len(one["seeds"]) == len(one["steps"]) == 2 for one in found)
        # chance is 1/4: right answers above it, of those above it that there are
        above = [max(0.0, one["accuracy"] - 0.25) for one in found]
        assert row["score"] == pytest.approx(sum(above) / 5 / 0.75)
    page = (tmp_path / "tasks.md").read_text()
    assert "| fnet, bidirectional |" in page and "3.00×" in page and "two layers of windows" in page
    assert len(re.findall(r"^\| local", page.partition("## ")[0], re.M)) == 2
    for name in ("tasks.png", "tasks-dark.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert any(line.startswith("local(window=2) ") for line in seen)

    # one again: the others stay as they are
    small.clear()
    monkeypatch.setattr(tasks, "_draw_all", lambda *_: None)  # once is enough
    again = tasks.run(tmp_path, False, True, seen.append, only=["fnet"])
    assert small == ["fnet"]
    timeless = [{**row, "seconds": 0} for row in again["rows"]]
    assert timeless == [{**row, "seconds": 0} for row in result["rows"]]

    # what is missing: nothing; then one mechanism
    small.clear()
    assert tasks.run(tmp_path, False, True, seen.append, resume=True) == again
    assert small == []
    kept = [row for row in again["rows"] if row["mechanism"] != "local"]
    (tmp_path / "tasks.json").write_text(json.dumps({**again, "rows": kept}))
    whole = tasks.run(tmp_path, False, True, seen.append, resume=True)
    assert small == ["local"]
    assert [row["spec"] for row in whole["rows"]] == [row["spec"] for row in result["rows"]]


def test_rows_of_other_settings_are_not_mixed(tmp_path, small):
    (tmp_path / "tasks.json").write_text(json.dumps({"settings": {}, "rows": []}))
    with pytest.raises(OptionError, match="other settings"):
        tasks.run(tmp_path, False, True, lambda text: None, only=["fnet"])


def test_unknown_names_are_refused_before_anything_is_measured(tmp_path, small):
    with pytest.raises(UnknownNameError, match="did you mean 'local'"):
        tasks.run(tmp_path, False, True, lambda text: None, only=["lokal"])
    assert small == []


# ---- time and memory of a sublayer ---------------------------------------------------------


def test_time_and_memory_of_a_sublayer():
    """Exact softmax is as fast as itself: a median of ratios within a factor of two of 1.

    A training step holds q, k, v, the output of the mechanism and their gradients: at least 8
    tensors of the size of x, 512·64·4 B = 128 KiB each.
    """
    found = Sublayer(length=512, heads=2, head_dim=32).measure("softmax")
    assert 3 <= found["rounds"] <= 9 and 0.5 < found["times_faster"] < 2
    assert found["tokens_per_second"] == pytest.approx(512 / found["seconds"])
    assert found["peak_bytes"] >= 8 * 512 * 64 * 4


def test_rounds_of_calls_in_turn():
    class Slow(torch.nn.Module):
        calls = 0

        def __init__(self, seconds):
            super().__init__()
            self.seconds = seconds

        def forward(self, x, *_, need_weights):
            self.calls += 1
            end = time.process_time() + self.seconds
            while time.process_time() < end:
                pass
            return (x,)

    for seconds, budget, rounds in [(0.0, 60.0, 9), (0.02, 0.05, 3), (0.02, 0.01, 1)]:
        pair = Slow(seconds), Slow(0.0)
        times = sublayer._times(pair, torch.zeros(1, 2, 2), budget)
        assert [len(found) for found in times] == [rounds, rounds]
        assert [one.calls for one in pair] == [rounds, rounds]


def test_a_failing_sublayer_says_why():
    with pytest.raises(RuntimeError, match="unknown mechanism"):
        Sublayer(length=8).measure("lokal")
