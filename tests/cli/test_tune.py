"""The verb ``tune``, with a clock of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from subquad.attention import tuning
from subquad.attention.tuning import Shape
from subquad.cli.app import app
from subquad.kernels.timing import Crossing, Race


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["tune", *arguments], env={"COLUMNS": "120", "NO_COLOR": "1"})


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    found: list[Shape] = []

    def measure(shape: Shape) -> Crossing:
        found.append(shape)
        length = None if shape.mechanism == "local" else 1234 + shape.training
        return Crossing(length, (Race(1024, 1.0, 2.0),), shape.causal)

    monkeypatch.setattr(tuning, "measure", measure)
    monkeypatch.setattr(tuning, "folder", lambda: tmp_path)
    tuning.forget()
    yield found
    tuning.forget()


def test_it_shows_a_table_and_keeps_what_it_measured(measured: list[Shape], tmp_path: Path) -> None:
    result = run("performer(features=32)", "local", "--heads", "4", "--head-dim", "16")
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "performer(features=32)" in lines and "local" in lines
    assert "bidirectional, forward 1,234 tokens 64 tokens 0.0 s" in lines
    assert "causal, training step 1,235 tokens, extrapolated 128 tokens 0.0 s" in lines
    assert "bidirectional, forward never 320 tokens 0.0 s" in lines
    assert "float32, 4 heads × 16, 1 row" in result.stdout and str(tmp_path) in result.stdout
    assert len(measured) == 8 == len(list(tmp_path.iterdir()))
    assert "0.0 s, before" in run("local", "--heads", "4", "--head-dim", "16").stdout
    assert len(measured) == 8


def test_json(measured: list[Shape]) -> None:
    arguments = ["--heads", "4", "--kv-heads", "2", "--causal", "--forward", "--dtype", "bfloat16"]
    found = json.loads(run(*arguments, "--json").stdout)
    (row,) = found["crossovers"]
    assert (row["mechanism"], row["crossover"], row["kv_heads"]) == ("near_far", 1234, 2)
    assert (row["dtype"], row["causal"], row["training"]) == ("bfloat16", True, False)
    assert row["races"] == [{"length": 1024, "exact": 1.0, "other": 2.0}]
    run(*arguments)
    assert len(measured) == 1
    run(*arguments, "--again")
    assert len(measured) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("performr",), "did you mean 'performer'"),
        (("gaussian",), "linear=gaussian does not approximate softmax"),
        (("--dtype", "int8"), "--dtype int8: must be one of float32, bfloat16, float16"),
        (("--device", "nowhere"), "--device='nowhere' is not there"),
        (("--heads", "4", "--kv-heads", "3"), "num_kv_heads=3 must divide num_heads=4"),
    ],
)
def test_wrong_arguments_are_one_message(arguments: tuple[str, ...], words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr and "Traceback" not in result.output


def test_help_has_an_example() -> None:
    assert "Example: subquad tune" in run("--help").stdout
