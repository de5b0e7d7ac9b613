"""``subquad convert``: from a folder to a folder, stopped and continued."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

import subquad
from subquad.cli.app import app

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny BERT with a tokenizer of letters, and a text."""
    path = tmp_path_factory.mktemp("model")
    words = {word: index for index, word in enumerate(["[PAD]", "[UNK]", *LETTERS])}
    raw = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]")
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = tf.BertConfig(
        vocab_size=len(words), hidden_size=24, num_hidden_layers=2, num_attention_heads=3,
        intermediate_size=40, initializer_range=0.4, max_position_embeddings=64,
    )  # fmt: skip
    tf.BertModel(config).save_pretrained(path)
    generator = torch.Generator().manual_seed(1)
    lines = [
        " ".join(LETTERS[i] for i in torch.randint(26, (40,), generator=generator).tolist())
        for _ in range(60)
    ]
    (path / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    return path


def arguments(folder, out, *more):
    return [
        "convert", str(folder), "--mechanism", "hedgehog", "--recover", str(folder / "text.txt"),
        "--length", "32", "--out", str(out), "--json", *more,
    ]  # fmt: skip


def run(*arguments):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120", "NO_COLOR": "1"})


def test_it_converts_recovers_and_saves(folder, tmp_path):
    out = tmp_path / "out"
    result = run(*arguments(folder, out, "--method", "auto", "--steps", "20"))
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    recovery = found["recovery"]
    assert recovery["method"] == "transfer + full" and recovery["steps"] == 20
    assert recovery["after"]["cosine"] > recovery["before"]["cosine"]
    assert [layer["mechanism"] for layer in found["conversion"]["converted"]] == ["hedgehog"] * 2
    assert (out / "recovery" / "curve.png").stat().st_size > 1000
    assert "step 8/8" in result.stderr and "step 12/12" in result.stderr
    # The saved model is the trained one: mechanisms with their parameters, and trained weights.
    saved = tf.AutoModel.from_pretrained(out).state_dict()
    assert any(".subquad.weight_q" in name for name in saved)
    first = tf.AutoModel.from_pretrained(folder).state_dict()
    name = "encoder.layer.0.attention.self.query.weight"
    assert not torch.equal(saved[name], first[name])
    # The same command again is the same result, without training.
    again = json.loads(run(*arguments(folder, out, "--method", "auto", "--steps", "20")).stdout)
    assert again["recovery"]["resumed"] and again["recovery"]["curve"] == recovery["curve"]
    assert all(
        torch.equal(saved[key], value)
        for key, value in tf.AutoModel.from_pretrained(out).state_dict().items()
    )


def test_people_read_a_report(folder, tmp_path):
    options = arguments(folder, tmp_path, "--method", "transfer", "--steps", "2")
    options.remove("--json")
    result = run(*options)
    assert result.exit_code == 0, result.output
    for part in ("hedgehog: 2 of 2 attention layers converted", "recovered by transfer in 2 steps",
                 "curve:", "saved:"):  # fmt: skip
        assert part in result.stdout


def test_without_training_it_compares(folder, tmp_path):
    result = run(
        "convert", str(folder), "-m", "softmax", "--calibrate", str(folder / "text.txt"),
        "--keep-exact", "encoder.layer.0.attention.self", "--length", "32", "--out",
        str(tmp_path), "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["recovery"] is None
    assert found["conversion"]["kept"] == ["encoder.layer.0.attention.self"]
    # The same attention twice: float32's 2^-24 times a hundred terms.
    assert found["comparison"]["layers"][0]["error"] < 1e-5
    assert (tmp_path / "config.json").is_file()


def test_another_run_in_the_folder_is_not_overwritten(folder, tmp_path):
    options = ("--method", "transfer", "--steps")
    assert run(*arguments(folder, tmp_path, *options, "1")).exit_code == 0
    other = run(*arguments(folder, tmp_path, *options, "2"))
    assert other.exit_code == 2 and "holds another run: steps: 1 there, 2 now" in other.stderr
    assert run(*arguments(folder, tmp_path, *options, "2", "--fresh")).exit_code == 0


@pytest.mark.parametrize(
    "options, words",
    [
        (("--mechanism", "hedgehogg"), "did you mean 'hedgehog'"),
        (("--recover", "nowhere.txt"), "--recover nowhere.txt: no such file"),
        (("--calibrate", "nowhere.txt"), "--calibrate nowhere.txt: no such file"),
        (("--method", "best"), "method='best' is none of"),
    ],
)
def test_errors_are_one_message(folder, tmp_path, options, words):
    result = run(*arguments(folder, tmp_path / "out", *options))
    assert result.exit_code == 2
    assert words in result.stderr and "Traceback" not in result.output


def test_the_models_own_folder_is_not_overwritten(folder):
    before = sorted(path.name for path in folder.iterdir())
    result = run(*arguments(folder, folder))
    assert result.exit_code == 2 and "would be overwritten" in result.stderr
    assert sorted(path.name for path in folder.iterdir()) == before


@pytest.mark.slow
def test_a_killed_run_goes_on_when_the_command_is_given_again(folder, tmp_path):
    options = ("--method", "lora", "--steps", "200", "--batch", "4")
    whole = run(*arguments(folder, tmp_path / "whole", *options))
    assert whole.exit_code == 0, whole.output
    out = tmp_path / "killed"
    command = [
        sys.executable, "-c", "from subquad.cli import main; main()",
        *arguments(folder, out, *options),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step 60/"):  # checkpoints are written right after this line
            break
    time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stderr.close()
    assert not (out / "config.json").exists()
    again = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found, wanted = json.loads(again.stdout)["recovery"], json.loads(whole.stdout)["recovery"]
    assert found["resumed"] and found["after"] == wanted["after"]
    one, other = (
        tf.AutoModel.from_pretrained(path).state_dict() for path in (out, tmp_path / "whole")
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_package_offers_it():
    assert "recover" in subquad.__all__
