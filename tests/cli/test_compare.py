"""``subquad compare`` on small local models: every kind, the page, lengths, what it refuses."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

import subquad as sq
from subquad.cli.app import app
from subquad.cli.compare import _masked

WORDS = ["[PAD]", "[UNK]", "[MASK]", *(f"w{i}" for i in range(29))]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120", "NO_COLOR": "1"})


def save(model: Any, folder: Path) -> str:
    """A folder with a model, a tokenizer, and beside it a text; the folder's name."""
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = tf.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="[UNK]", pad_token="[PAD]", mask_token="[MASK]"
    )
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    torch.manual_seed(3)
    lines = [" ".join(f"w{int(i)}" for i in torch.randint(29, (14,))) for _ in range(12)]
    folder.with_suffix(".txt").write_text("\n\n".join(lines), encoding="utf-8")
    return str(folder)


def decoder() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = tf.LlamaConfig(
        **sizes, vocab_size=32, num_key_value_heads=2, intermediate_size=40, pad_token_id=0
    )
    return tf.LlamaForCausalLM(config)


def test_a_decoder_with_page_lengths_and_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subquad.pages.twice", lambda draw, alt: alt)  # drawing has its own test
    folder, page = save(decoder(), tmp_path / "model"), tmp_path / "out" / "page.html"
    spec = "near_far(window=2, sinks=1, far=performer)"
    result = run(
        "compare", folder, "-m", spec, "--text", f"{folder}.txt", "--tokens", "16", "--passages",
        "5", "--batch-size", "2", "--lengths", "8,32", "--head", "1:3", "--html", str(page),
        "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)["comparisons"]
    assert (found["model"], found["rows"], found["length"]) == ("LlamaForCausalLM", 5, 14)
    output = found["output"]
    assert output["kind"] == "causal LM"
    # Untrained: about as good as guessing among 32 words.
    assert output["perplexity_exact"] == pytest.approx(32, rel=0.2)
    assert output["perplexity_ratio"] == output["perplexity"] / output["perplexity_exact"]
    assert [cost["length"] for cost in found["costs"]] == [8, 32]
    assert [part["name"] for part in found["parts"]] == ["near", "heavy", "far"]
    assert found["pictures"][0]["head"] == 3
    text = page.read_text(encoding="utf-8")
    assert "model.layers.1.self_attn, head 3" in text
    assert "5 of 12 passages of at most 16 tokens" in text
    shown = run("compare", folder, "-m", "softmax", "--text", f"{folder}.txt", "--tokens", "16")
    assert shown.exit_code == 0, shown.output
    for part in ("softmax against exact", "perplexity", "uniform attention", "worst head"):
        assert part in shown.stdout


def test_a_folder_that_was_saved_converted_is_compared_as_it_is(tmp_path: Path) -> None:
    model = decoder()
    sq.convert(model, "performer(features=8)", keep_exact="model.layers.0.self_attn")
    folder = save(model, tmp_path / "model")
    arguments = ("compare", folder, "--text", f"{folder}.txt", "--tokens", "16", "--json")
    (found,) = json.loads(run(*arguments).stdout)["comparisons"]
    assert found["mechanism"] == "performer(features=8)"
    assert [layer["name"] for layer in found["layers"]] == ["model.layers.1.self_attn"]


def test_a_masked_model_predicts_masked_tokens(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = tf.BertConfig(vocab_size=32, **sizes, intermediate_size=40)
    folder = save(tf.BertForMaskedLM(config), tmp_path / "model")
    arguments = ("-m", "softmax", "--text", f"{folder}.txt", "--tokens", "16", "--json")
    (found,) = json.loads(run("compare", folder, *arguments).stdout)["comparisons"]
    assert found["output"]["kind"] == "masked LM"
    assert found["output"]["perplexity_ratio"] == pytest.approx(1.0, abs=1e-5)
    ids = torch.arange(3, 32).repeat(40, 1)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    given["attention_mask"][:, 20:] = 0
    masked = _masked(given, 2, seed=0)
    picked = masked["labels"] != -100
    assert not picked[:, 20:].any()
    assert torch.equal(masked["labels"][picked], ids[picked])
    assert torch.equal(masked["input_ids"], ids.masked_fill(picked, 2))
    # 800 draws at 15%: five standard deviations
    assert abs(int(picked.sum()) - 120) < 5 * math.sqrt(800 * 0.15 * 0.85)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--lengths", "512,many"), "--lengths '512,many' must be integers ≥ 1 with commas"),
        (("--lengths", "0"), "--lengths '0' must be integers ≥ 1"),
        (("--head", "3"), "--head '3' must be layer:head, as in 0:3"),
        (("-m", "perfomer"), "did you mean 'performer'?"),
    ],
)
def test_mistakes_are_told_before_anything_is_loaded(
    arguments: tuple[str, ...], message: str
) -> None:
    result = run("compare", "/no/such/folder", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_a_page_needs_matplotlib_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("compare", "/no/such/folder", "--html", "page.html")
    assert result.exit_code == 2
    assert "pip install 'subquad[arena]'" in result.output
