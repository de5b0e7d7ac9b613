"""The verb ``suggest`` on a small local model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from subquad.cli.app import app


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["suggest", *arguments], env={"COLUMNS": "120", "NO_COLOR": "1"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import BertConfig, BertModel, BertTokenizer

    path = tmp_path_factory.mktemp("model")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "two", "three"]
    (path / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    BertTokenizer(vocab=str(path / "vocab.txt")).save_pretrained(path)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=8,
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=40,
        max_position_embeddings=32,
    )
    BertModel(config, add_pooling_layer=False).save_pretrained(path)
    (path / "text.txt").write_text("one two three two one\n" * 40, encoding="utf-8")
    return path


def test_it_measures_a_local_model(folder: Path) -> None:
    arguments = [
        str(folder),
        "--text",
        str(folder / "text.txt"),
        "--tokens",
        "24",
        "--length",
        "64",
    ]
    arguments += ["-m", "performer(features=16)", "-m", "local(window=4)", "--repeats", "1"]
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["length"] == 64 and found["tokens"] == 22 and found["model"] == folder.name
    names = {one["mechanism"] for one in found["candidates"]}
    assert {"performer(features=8)", "performer(features=32)", "local(window=8)"} < names
    shown = run(*arguments).stdout
    assert "1 attention layers, one call at 64 tokens on cpu" in shown
    assert found["reason"].split()[0] in ("Use", "Keep")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-m", "performr"), "did you mean 'performer'"),
        (("--text", "nowhere.txt"), "--text nowhere.txt: no such file"),
        (("nowhere",), "no model at 'nowhere'"),
    ],
)
def test_wrong_arguments_are_one_message(arguments: tuple[str, ...], words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr and "Traceback" not in result.output
