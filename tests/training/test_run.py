"""The training run: it learns, it logs, it stops, and whatever kills it, it goes on as it was."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import random
import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file

import subquad as sq
from subquad.errors import OptionError, SubquadError
from subquad.training import run as module
from subquad.training.recipe import Optimiser, Recipe
from subquad.training.run import line, rate_factor, train

ENGLISH = ["one", "two", "three", "four", "five", "six", "seven"]
GERMAN = ["eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben"]

TINY = {
    "model.d_model": 16, "model.num_heads": 2, "model.dim_feedforward": 24,
    "model.encoder_layers": 1, "model.decoder_layers": 1, "model.dropout": 0.1,
    "tokenizer.kind": "word", "training.device": "cpu", "training.threads": 1,
    "training.tokens": 64, "training.epochs": None, "training.steps": 12, "logging.every": 1,
    "evaluation.every": 5, "evaluation.best": "loss", "evaluation.decode": 0,
    "evaluation.average": 1, "evaluation.patience": None, "optimiser.warm_up": 10,
}  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Numbers in words, and their translation word by word."""
    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(0)
    for name, count in (("train", 200), ("valid", 17)):
        rows = [[draw.randrange(7) for _ in range(draw.randint(2, 5))] for _ in range(count)]
        texts = [(" ".join(ENGLISH[i] for i in r), " ".join(GERMAN[i] for i in r)) for r in rows]
        path = folder / f"{name}.tsv"
        path.write_text("".join(f"{a}\t{b}\n" for a, b in texts), encoding="utf-8")
    return folder


def recipe(corpus, **changes):
    given = {"data.train": str(corpus / "train.tsv"), "data.valid": str(corpus / "valid.tsv")}
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    return Recipe.load("translation-tiny", {**TINY, **given, **changes})


def log(folder, kind=None):
    """Lines of the log without what a clock has told."""
    timed = ("seconds", "progress", "tokens_per_second")
    rows = [json.loads(text) for text in (folder / "log.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in row.items() if name not in timed}
        for row in rows
        if kind in (None, row["kind"])
    ]


def weights(folder):
    newest = max(folder.glob("checkpoints/checkpoint-*"), key=lambda p: int(p.name[11:]))
    return load_file(newest / "model.safetensors"), load_file(folder / "best/model.safetensors")


def same_run(one, other):
    assert log(one) == log(other)
    for mine, theirs in zip(weights(one), weights(other), strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


# ---- it trains -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def learned(corpus, tmp_path_factory):
    """A run that is long enough to learn the translation of each word."""
    folder = tmp_path_factory.mktemp("runs") / "learned"
    told = []
    changes = {
        "training__steps": 200, "training__tokens": 256, "evaluation__every": 50,
        "evaluation__decode": 17, "evaluation__best": "bleu", "evaluation__average": 2,
        "model__d_model": 32, "model__dim_feedforward": 64, "model__dropout": 0.0,
        "model__norm_first": True, "objective__label_smoothing": 0.0,
        "optimiser__rate": 1e-2, "optimiser__warm_up": 30, "logging__every": 20,
    }  # fmt: skip
    report = train(recipe(corpus, **changes), folder, progress=told.append)
    return folder, report, told


def test_a_word_by_word_translation_is_learned(learned):
    folder, report, told = learned
    losses = [row["loss"] for row in log(folder, "train")]
    # Seven words and an end: a model that knows nothing about the source has ln 8 = 2.08 nats.
    assert log(folder, "valid")[-1]["loss"] < 0.7 < math.log(8) < losses[0]
    assert report.best["bleu"] > 60.0
    assert report.steps == 200 and report.stopped == "steps" and not report.resumed
    assert [point["step"] for point in told if point["kind"] == "train"] == list(range(20, 201, 20))
    assert "left" in line(told[0]) and "tokens_per_second" in line(told[0])
    assert "best" in str(report) and json.loads((folder / "report.json").read_text())


def test_the_best_model_is_ready_to_be_used(learned):
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    from subquad.generation import Translator

    folder, report, _ = learned
    sq.models.Seq2SeqTransformer  # noqa: B018  # registers
    model = AutoModelForSeq2SeqLM.from_pretrained(folder / "best").eval()
    translator = Translator(model, AutoTokenizer.from_pretrained(folder / "best"), beams=2)
    assert translator.translate(["two five"])[0].text == "zwei fünf"
    assert Recipe.load(folder / "best" / "recipe.yaml") == Recipe.load(folder / "recipe.yaml")
    assert json.loads((folder / "best" / "metrics.json").read_text()) == report.best


def test_the_mean_of_checkpoints_is_their_mean(corpus, tmp_path):
    kept = []
    loop = module._Loop
    held = loop.average

    def spy(self):
        kept.extend(load_file(self._weights(point)) for point in self.held.averaged)
        held(self)
        kept.append({name: value.clone() for name, value in self.model.state_dict().items()})

    loop.average = spy
    try:
        train(recipe(corpus, evaluation__average=2), tmp_path)
    finally:
        loop.average = held
    *parts, mean = kept
    assert len(parts) == 2 and [p["kind"] for p in log(tmp_path)][-1] == "average"
    for name in parts[0]:
        # one rounding to float32 of a mean in float64
        wanted = (parts[0][name].double() + parts[1][name].double()) / 2
        assert torch.equal(mean[name], wanted.to(mean[name].dtype)), name
    assert sorted(p.name for p in (tmp_path / "checkpoints").glob("weights*")) == [
        "weights-10.safetensors", "weights-12.safetensors",
    ]  # fmt: skip


def test_a_complete_run_is_reported_not_trained_again(learned):
    folder, report, _ = learned
    before = (folder / "log.jsonl").read_text()
    said = []
    again = train(Recipe.load(folder / "recipe.yaml"), folder, say=said.append)
    assert again == report and "complete" in said[0]
    assert (folder / "log.jsonl").read_text() == before


def test_early_stopping_and_the_best_checkpoint(corpus, tmp_path, monkeypatch):
    values = iter([3.0, 2.0, 2.5, 2.25, 1.0])
    monkeypatch.setattr(module._Loop, "measure", lambda self: {"loss": next(values)})
    changes = {"evaluation__every": 1, "evaluation__patience": 2}
    report = train(recipe(corpus, **changes), tmp_path)
    assert report.stopped == "patience" and report.steps == 4
    assert report.best["step"] == 2 and report.best["loss"] == 2.0
    # The folder holds the model of step 2, which the checkpoint of step 4 is not.
    now, best = weights(tmp_path)
    assert any(not torch.equal(now[name], best[name]) for name in now)


def test_a_run_ends_by_time_and_goes_on_with_more(corpus, tmp_path):
    # every step takes longer than no time, so that the first one is the last
    report = train(recipe(corpus, training__minutes=1e-6), tmp_path / "a")
    assert report.stopped == "minutes" and report.steps == 1
    more = train(recipe(corpus, training__minutes=100.0), tmp_path / "a")
    assert more.stopped == "steps" and more.steps == 12 and more.resumed
    train(recipe(corpus), tmp_path / "b")
    assert log(tmp_path / "a", "train") == log(tmp_path / "b", "train")


def test_accumulated_batches_weigh_by_their_tokens(corpus, tmp_path):
    """Two batches of a step give the gradient of the mean over both batches' labels."""
    options = {"training__steps": 1, "model__dropout": 0.0, "optimiser__clip": None}
    found = {}

    class Spy(module._Loop):
        def step(self, batch, size, share, step):
            found.setdefault("batches", []).append(batch)
            loss = super().step(batch, size, share, step)
            found["gradient"] = self.model.embed.weight.grad.clone()
            found["model"] = found.get("model") or (self.model, self.prepared.objective)
            return loss

    held, module._Loop = module._Loop, Spy
    try:
        train(recipe(corpus, training__accumulate=2, **options), tmp_path)
    finally:
        module._Loop = held
    first, second = found["batches"]
    sizes = [int((batch["labels"] != -100).sum()) for batch in (first, second)]
    assert sizes[0] != sizes[1], "or else the weights would not matter"
    # The same model before its step: built anew, with the same seed.
    again = prepared(corpus, tmp_path, **options)
    again.model.train()
    losses = [
        again.objective(again.model, batch, 0.0, torch.Generator()).total
        for batch in (first, second)
    ]
    (sum(a * b for a, b in zip(sizes, losses, strict=True)) / sum(sizes)).backward()
    # Sums of a few hundred float32 products in another order: 1e-6 of the largest entry is ample.
    wanted = again.model.embed.weight.grad
    assert (found["gradient"] - wanted).abs().max() <= 1e-6 * wanted.abs().max()


@pytest.fixture(scope="module")
def exact(corpus, tmp_path_factory):
    """A trained model with exact attention, in a folder."""
    folder = tmp_path_factory.mktemp("exact") / "run"
    train(recipe(corpus, model__mechanism="softmax"), folder)
    return folder / "best"


def prepared(corpus, folder, **options):
    from subquad.training.tasks.translation import prepare

    return prepare(recipe(corpus, **options), folder, lambda text: None)


def test_a_run_starts_from_another_models_weights_whatever_its_attention(corpus, exact, tmp_path):
    options = {"training__start": str(exact), "model__mechanism": "performer(features=8)"}
    found = prepared(corpus, tmp_path, **options)
    given = load_file(exact / "model.safetensors")
    own = found.model.state_dict()
    new = {key for key in own if ".mechanism." in key}
    assert new and all(torch.equal(own[key], tensor) for key, tensor in given.items())
    alone = prepared(corpus, tmp_path, model__mechanism="performer(features=8)").model.state_dict()
    assert all(torch.equal(own[key], alone[key]) for key in new), "drawn by the recipe's seed"
    assert not torch.equal(own["embed.weight"], alone["embed.weight"])
    words = json.loads((tmp_path / "tokenizer" / "tokenizer.json").read_text())
    assert words == json.loads((exact / "tokenizer.json").read_text())
    # and the other way round: the mechanism's own tensors are left behind
    train(recipe(corpus, **options, training__steps=5), tmp_path / "linear")
    back = str(tmp_path / "linear" / "best")
    again = prepared(corpus, tmp_path / "b", training__start=back, model__mechanism="softmax")
    linear = load_file(tmp_path / "linear" / "best" / "model.safetensors")
    found = again.model.state_dict()
    assert all(torch.equal(found[key], t) for key, t in linear.items() if ".mechanism." not in key)
    assert not any(".mechanism." in key for key in found)


def test_a_start_that_does_not_fit_is_told(corpus, exact, tmp_path):
    def refused(words, **options):
        with pytest.raises(OptionError, match=words):
            prepared(corpus, tmp_path / "run", **options)

    refused("weights do not fit\n  - .*24.* there, .*32", training__start=str(exact),
            model__dim_feedforward=32)  # fmt: skip
    refused("None there", training__start=str(exact), model__encoder_layers=2)
    refused("training.start=", training__start=str(tmp_path / "nothing"))
    (tmp_path / "other").mkdir()
    for file in exact.iterdir():
        (tmp_path / "other" / file.name).write_bytes(file.read_bytes())
    config = json.loads((exact / "config.json").read_text()) | {"model_type": "gpt2"}
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    refused("is a 'gpt2'", training__start=str(tmp_path / "other"))


def test_bfloat16_computes_in_bfloat16_and_keeps_weights_in_float32(corpus, tmp_path):
    seen = set()
    held = torch.nn.functional.linear

    def spy(x, weight, bias=None):
        out = held(x, weight, bias)
        seen.add((weight.dtype, out.dtype))
        return out

    torch.nn.functional.linear = spy
    try:
        changes = {"training__precision": "bfloat16", "training__steps": 2}
        report = train(recipe(corpus, **changes), tmp_path)
    finally:
        torch.nn.functional.linear = held
    assert (torch.float32, torch.bfloat16) in seen
    assert math.isfinite(report.best["loss"])
    assert all(value.dtype == torch.float32 for value in weights(tmp_path)[0].values())


# ---- the learning rate ---------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["inverse_sqrt", "cosine", "linear", "constant"])
def test_schedules(schedule):
    options = Optimiser(schedule=schedule, warm_up=100)
    factors = [rate_factor(options, step, step / 1000) for step in range(1000)]
    assert factors[:100] == pytest.approx([(step + 1) / 100 for step in range(100)])
    assert max(factors) == pytest.approx(1.0, abs=1e-3)
    end = {"inverse_sqrt": math.sqrt(100 / 1000), "cosine": 0.0, "linear": 0.0, "constant": 1.0}
    # The last step is one of 900 behind the warm-up from the end.
    assert factors[-1] == pytest.approx(end[schedule], abs=2 / 900)
    if schedule == "cosine":
        assert factors[550] == pytest.approx(0.5, abs=2 / 900 * math.pi)
    assert factors[100:] == sorted(factors[100:], reverse=True)


def test_the_rate_in_the_log_is_the_schedule_s(corpus, tmp_path):
    one = recipe(corpus, training__steps=3, optimiser__rate=0.5, optimiser__warm_up=4)
    train(one, tmp_path)
    assert [row["rate"] for row in log(tmp_path, "train")] == [0.125, 0.25, 0.375]


# ---- folders -------------------------------------------------------------------------------


def test_a_warm_up_that_is_longer_than_the_run_is_told(corpus, tmp_path):
    said = []
    changes = {"training__steps": 2, "optimiser__warm_up": 8}
    report = train(recipe(corpus, **changes), tmp_path / "short", say=said.append)
    assert "2 steps, within optimiser.warm_up=8: the rate rises to 25%" in report.notes[-1]
    assert f"note: {report.notes[-1]}" in said
    changes = {"training__steps": 2, "optimiser__warm_up": 2}
    assert not train(recipe(corpus, **changes), tmp_path / "enough").notes


def test_minutes_that_are_too_few_for_the_warm_up_are_told_while_it_trains(corpus, tmp_path):
    said = []
    changes = {"training__steps": 10_000, "training__minutes": 0.01, "optimiser__warm_up": 9_000}
    report = train(recipe(corpus, **changes), tmp_path, say=said.append)
    assert report.stopped == "minutes" and report.steps < 9_000
    (note,) = report.notes
    assert "within optimiser.warm_up=9000" in note and f"note: {note}" in said


def test_another_recipe_is_refused_by_its_keys(corpus, tmp_path):
    train(recipe(corpus, training__steps=1), tmp_path)
    with pytest.raises(OptionError) as caught:
        train(recipe(corpus, training__steps=2, optimiser__rate=0.1), tmp_path)
    lines = str(caught.value).splitlines()
    assert "--fresh" in lines[0]
    assert lines[1:] == [
        "  - optimiser.rate: 0.005 there, 0.1 now", "  - training.steps: 1 there, 2 now",
    ]  # fmt: skip
    report = train(recipe(corpus, training__steps=2), tmp_path, fresh=True)
    assert report.steps == 2 and not report.resumed


def test_other_data_is_refused(corpus, tmp_path):
    copy = tmp_path / "train.tsv"
    copy.write_text((corpus / "train.tsv").read_text(encoding="utf-8"), encoding="utf-8")
    one = recipe(corpus, **{"data.train": str(copy), "training__minutes": 1e-6})
    train(one, tmp_path / "run")
    copy.write_text(copy.read_text(encoding="utf-8") + "one\teins\n", encoding="utf-8")
    more = dataclasses.replace(one, training=dataclasses.replace(one.training, minutes=9.0))
    with pytest.raises(OptionError, match="other data \\(train changed\\)"):
        train(more, tmp_path / "run")


def test_a_start_that_failed_leaves_nothing_to_be_continued(corpus, tmp_path):
    with pytest.raises(OptionError, match="nowhere.tsv is no file"):
        train(recipe(corpus, **{"data.train": "nowhere.tsv"}), tmp_path)
    assert train(recipe(corpus, training__steps=1), tmp_path).steps == 1


def test_folders_that_are_something_else(corpus, tmp_path):
    (tmp_path / "file").write_text("")
    for out, message in ((tmp_path / "file", "is a file"), (tmp_path, "holds no run")):
        with pytest.raises(OptionError, match=message):
            train(recipe(corpus), out, fresh=True)
    assert (tmp_path / "file").exists()


def test_a_folder_is_trained_in_by_one_process_at_a_time(corpus, tmp_path):
    out = tmp_path / "run"
    holds = """import sys; from subquad.training.run import _alone
with _alone(__import__("pathlib").Path(sys.argv[1])):
    print("held", flush=True); sys.stdin.read()"""
    other = subprocess.Popen(
        [sys.executable, "-c", holds, str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(OptionError, match="is being trained in"):
            train(recipe(corpus, training__steps=1), out)
    finally:
        other.kill()
        other.communicate()
    assert train(recipe(corpus, training__steps=1), out).steps == 1  # a dead one's lock is nobody's


def test_a_file_system_without_locks_keeps_nobody_out(corpus, tmp_path, monkeypatch):
    def none(file, how):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(module.fcntl, "flock", none)
    assert train(recipe(corpus, training__steps=1), tmp_path / "run").steps == 1


def test_a_folder_that_is_named_like_the_mark_is_none(corpus, tmp_path):
    (tmp_path / ".subquad").mkdir()
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(OptionError, match="holds no run"):
        train(recipe(corpus), tmp_path)
    assert (tmp_path / "thesis.txt").is_file()


@pytest.mark.parametrize("fresh", [False, True])
def test_a_folder_with_a_recipe_of_the_user_is_not_deleted(corpus, tmp_path, fresh):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/mine.tsv").write_text("a\tb\n")
    (tmp_path / "recipe.yaml").write_text("task: translation  # mine\n")
    with pytest.raises(OptionError, match="not empty, and holds no run"):
        train(recipe(corpus), tmp_path, fresh=fresh)
    assert "mine" in (tmp_path / "recipe.yaml").read_text()
    assert (tmp_path / "data/mine.tsv").is_file()


def test_a_run_is_trained_again_from_the_beginning(corpus, tmp_path):
    train(recipe(corpus, training__steps=2), tmp_path)
    report = train(recipe(corpus, training__steps=1), tmp_path, fresh=True)
    assert not report.resumed and report.steps == 1
    assert [row["step"] for row in log(tmp_path, "train")] == [1]


def test_a_loss_that_is_not_finite_ends_the_run(corpus, tmp_path):
    with pytest.raises(SubquadError, match="loss is (nan|inf) at step .*optimiser.rate"):
        train(recipe(corpus, optimiser__rate=1e30, optimiser__warm_up=0), tmp_path)


def test_no_checkpoint_is_made_of_weights_that_have_diverged(corpus, tmp_path):
    # Step 1 moves weights by 1e30, so that step 2 has no finite loss; no line is due before 12.
    changes = {"optimiser__rate": 1e30, "optimiser__warm_up": 0, "logging__every": 100}
    with pytest.raises(SubquadError, match="loss is (nan|inf) at step 5"):
        train(recipe(corpus, **changes), tmp_path)
    assert not list(tmp_path.glob("checkpoints/*")) and not (tmp_path / "best").exists()


def test_the_random_state_of_the_caller_stays(corpus, tmp_path):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    train(recipe(corpus, training__steps=1), tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


def test_tensorboard_names_its_extra(corpus, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install 'subquad\[tensorboard\]'"):
        train(recipe(corpus, logging__tensorboard=True, training__steps=1), tmp_path)


# ---- killed --------------------------------------------------------------------------------

KILLED = """
import json, os, signal, sys
from pathlib import Path
from subquad.training.recipe import Recipe
from subquad.training.run import train
import accelerate, transformers, transformers.trainer, safetensors.torch, torch
import subquad.training.tasks.translation, subquad.models.seq2seq

# Processes are forked before anything is computed: each has its own threads, and no imports.
recipe, out, *moments = sys.argv[1:]
EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir")

def attempt(moment):
    count = 0

    def watch(event, args):
        # Whatever is opened, renamed, made or deleted in the run's folder is a moment to die at.
        nonlocal count
        if event in EVENTS and out in str(args[0]):
            count += 1
            if count == moment:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    train(Recipe.load(recipe), out)

ended = []
for moment in [*map(int, moments), 0]:
    child = os.fork()
    if not child:
        try:
            attempt(moment)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    ended.append(os.waitpid(child, 0)[1])
print(json.dumps(ended))
"""


def killed(path, out, moments):
    """Exit statuses of attempts that are killed at these moments, and of one that is not."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(path), str(out), *map(str, moments)],
        capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize(
    ("mechanism", "moments"),
    [
        # some of the moments of this run: in the tokenizer, data, log, best model, checkpoints
        ("softmax", (3, 9, 14, 21, 29, 38, 47)),
        pytest.param("performer(redraw=2)", tuple(range(1, 60, 2)), marks=pytest.mark.slow),
    ],
)
def test_killed_at_any_moment_it_ends_as_if_it_had_not_been(corpus, tmp_path, mechanism, moments):
    changes = {
        "model__mechanism": mechanism, "evaluation__average": 2, "logging__every": 2,
        "training__accumulate": 2, "objective__feeding": "scheduled", "training__steps": 9,
        "evaluation__every": 4,
    }  # fmt: skip
    one = recipe(corpus, **changes)
    path = tmp_path / "recipe.yaml"
    path.write_text(one.to_yaml(), encoding="utf-8")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train(one, whole)
    ended, errors = killed(path, broken, moments)
    # Each attempt begins where the last one's checkpoint is: late moments may never come.
    assert set(ended) == {9, 0} and ended.count(9) >= min(len(moments), 20), errors
    same_run(whole, broken)
    reports = [json.loads((one / "report.json").read_text()) for one in (whole, broken)]
    timed = ("seconds", "cpu_seconds", "tokens_per_second", "folder", "resumed")
    for report in reports:
        for point in (report, report["best"], report["last"]):
            for name in timed:
                point.pop(name, None)
    assert reports[0] == reports[1]


def test_what_was_left_half_written_is_not_taken_for_a_checkpoint(corpus, tmp_path):
    """The newest checkpoint without its last file, and a log with half a line."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train(recipe(corpus), whole)
    train(recipe(corpus), broken)
    (broken / "report.json").unlink()
    (broken / "checkpoints/checkpoint-12/trainer_state.json").write_text('{"global_step": 1')
    with (broken / "log.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    report = train(recipe(corpus), broken)
    assert report.resumed
    same_run(whole, broken)
