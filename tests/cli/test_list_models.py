from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from subquad.cli.app import app
from subquad.convert import coverage


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "160", "NO_COLOR": "1"})


def test_the_table_has_every_architecture() -> None:
    result = run("list", "--models")
    assert result.exit_code == 0
    found = coverage()
    rows = [line.split("│")[1].strip() for line in result.stdout.splitlines() if "│" in line]
    assert [row for row in rows if row] == [one.name for one in found]
    assert f"{len(found)} architectures with attention" in result.stdout


def test_json_has_the_same() -> None:
    values = json.loads(run("list", "--models", "--json").stdout)
    assert values == json.loads(json.dumps([one.to_dict() for one in coverage()]))


def test_filters_of_mechanisms_do_not_go_with_it() -> None:
    result = run("list", "--models", "--causal")
    assert result.exit_code == 2
    assert "--models lists architectures" in result.stderr
