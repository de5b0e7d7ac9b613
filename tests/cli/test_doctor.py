"""The verb ``doctor``."""

import json

import pytest
from typer.testing import CliRunner

from subquad.arena import doctor
from subquad.cli.app import app


def run(*arguments):
    return CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": "120", "NO_COLOR": "1"})


def test_it_shows_what_is_here_and_that_it_is_right():
    result = run("performer", "local")
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "this machine" in lines and "extras" in lines
    assert "cli there" in lines
    assert any(line.startswith("performer, float32 ") for line in lines)
    assert "2 mechanisms, 10 checks against float64, 0 failed" in result.stdout


def test_json_and_without_checks():
    found = json.loads(run("linear", "--json", "--device", "cpu").stdout)
    assert found["checks"][0]["way"] == "forward"
    assert all(row["passed"] for row in found["checks"])
    result = run("--no-checks")
    assert result.exit_code == 0 and "float64, 0 failed" not in result.stdout
    assert json.loads(run("--no-checks", "--json").stdout)["checks"] == []


def test_a_wrong_result_is_named_and_fails_the_command(monkeypatch: pytest.MonkeyPatch):
    bad = doctor.Check("linear", "gradient", 0.3), doctor.Check("linear", "causal", 9.0, "E: why")
    monkeypatch.setattr(doctor, "check", lambda spec, device: iter(bad))
    result = run("linear")
    assert result.exit_code == 1
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "WRONG on this machine" in lines
    assert "linear, gradient off by 3.0e-01" in lines and "linear, causal E: why" in lines
    assert "2 failed" in result.stdout
    assert run("linear", "--json").exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("perfomer",), "did you mean 'performer'?"),
        (("--device", "gpu0"), "--device='gpu0' is not there"),
    ],
)
def test_bad_arguments(arguments, words):
    result = run(*arguments)
    assert result.exit_code == 2 and words in result.stderr
