"""CONTRIBUTING.md, followed to the letter in a copy of the project: three edits are enough.

The page's file, its registry line and its reference go where it says, and nothing else is
touched. Laws, docs, command line and benchmarks of the copy then have to know the mechanism.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NAME = "sigmoid"
COPIED = ("src", "tests", "docs/generate.py", "CONTRIBUTING.md", "pyproject.toml")
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
IGNORED = shutil.ignore_patterns("__pycache__", ".*", "*.egg-info")


def blocks(text, language):
    """Fenced blocks of a language, without the indentation of the list that they stand in."""
    return [
        re.sub(f"^{indent}", "", code, flags=re.MULTILINE)
        for indent, found, code in BLOCK.findall(text)
        if found == language
    ]


def edit(path, change):
    before = path.read_text(encoding="utf-8")
    after = change(before)
    assert after != before
    path.write_text(after, encoding="utf-8")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """The copy, with the three edits."""
    copy = tmp_path_factory.mktemp("project")
    for name in COPIED:
        source, target = ROOT / name, copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=IGNORED)
        else:
            shutil.copy(source, target)
    page = (copy / "CONTRIBUTING.md").read_text(encoding="utf-8")
    page = page.partition("\n## Add a mechanism")[2]
    steps = re.split(r"^\d\. ", page, flags=re.MULTILINE)
    (mechanism,), (line,), (reference,) = (
        blocks(steps[step], language)
        for step, language in ((1, "python"), (2, "text"), (3, "python"))
    )
    places = [re.search(r"`((?:src|tests)/\S+\.py)`", step)[1] for step in steps[1:4]]
    assert places[1:] == ["src/subquad/registry.py", "tests/references.py"]
    new, registry, references = (copy / place for place in places)
    assert not new.exists() and new.parent.is_dir()
    new.write_text(mechanism, encoding="utf-8")
    table = re.compile(r"(^MECHANISMS\b.*?\{\n.*?)(^\}$)", re.MULTILINE | re.DOTALL)
    edit(registry, lambda text: table.sub(rf"\1    {line.strip()}\n\2", text, count=1))
    edit(references, lambda text: f"{text}\n\n{reference}")
    return copy


def run(project, code):
    """What the code says in JSON, run in the copy against the copy's package."""
    environment = {**os.environ, "PYTHONPATH": str(project / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", f"OUT = 'found.json'\n{code}"],
        cwd=project, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = json.loads((project / "found.json").read_text(encoding="utf-8"))
    assert Path(found.pop("package")).is_relative_to(project)
    return found


LAWS = """
import json
import pytest


class Record:
    everything, outcomes = [], {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items):  # before any is deselected
        self.everything = [item.nodeid for item in items if not item.get_closest_marker("slow")]

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            passed = report.outcome == "passed"
            self.outcomes[report.nodeid] = "passed" if passed else report.longreprtext[-2000:]


record = Record()
tests = [f"tests/test_{name}.py" for name in ("laws", "doctests", "imports")]
code = pytest.main(
    ["-q", "-p", "no:cacheprovider", "-k", "sigmoid", "-m", "not slow", *tests], plugins=[record]
)
import subquad

found = {"code": int(code), "all": record.everything, "outcomes": record.outcomes}
with open(OUT, "w", encoding="utf-8") as file:
    json.dump({**found, "package": subquad.__file__}, file)
"""


def test_the_laws_run_for_it_and_hold(project):
    found = run(project, LAWS)
    outcomes = found["outcomes"]
    failed = {name: why for name, why in outcomes.items() if why != "passed"}
    assert found["code"] == 0 and not failed, failed

    def laws_of(spec, names):
        pattern = re.compile(rf"test_laws\.py::(\w+)\[{re.escape(spec)}(.*)\]$")
        return {match.groups() for name in names if (match := pattern.search(name))}

    # It declares what `gaussian` does, except to compile: the same laws, case by case.
    like = laws_of("gaussian(features=11)", found["all"])
    wanted = {law for law in like if law[0] not in ("test_compiled", "test_exported")}
    assert len(wanted) == len(like) - 2 > 20
    assert laws_of(NAME, outcomes) == wanted
    others = [name for name in outcomes if "test_laws.py" not in name]
    module = f"subquad.attention.kernel.{NAME}"
    assert {name.partition("::")[2] for name in others} >= {
        f"test_examples_run[{module}]",
        f"test_imports_point_one_way[{module}]",
    }


OTHERS = """
import dataclasses
import io
import json
import os
import runpy
import subprocess
import sys
import warnings

import subquad

runpy.run_path("docs/generate.py", run_name="__main__")

from typer.testing import CliRunner

from subquad.cli.app import app


def cli(*arguments):
    done = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert done.exit_code == 0, done.output
    return done.stdout


from subquad.arena import scaling, speed

sizes = speed.Sizes(heads=2, head_dim=16, features=32)
(ours,) = [one for one in speed.contenders(sizes, peer=False)[0] if one.name == "sigmoid"]
cases = [
    speed.Case("sigmoid", mode, causal)
    for mode, causal in (
        ("forward", False), ("forward", True), ("training step", False), ("training step", True),
        ("prefill", True), ("decode step", True),
    )
]
checks = [speed.check(ours, sizes, case) for case in cases]
wrong = dataclasses.replace(ours, call=lambda *call: 1.001 * ours.call(*call))
times, left_out = speed.measure_times([ours], sizes, (64, 128), checks, rounds=1, least=1)
found = {
    "list": cli("list"),
    "names": [one["name"] for one in json.loads(cli("list", "--state", "constant", "--json"))],
    "describe": cli("describe", "sigmoid(steepness=2)"),
    "against": ours.against,
    "checks": [one.to_dict() for one in checks],
    "wrong": speed.check(wrong, sizes, cases[0]).to_dict(),
    "timed": [
        [case.name, case.mode, case.causal, case.length, min(seconds)]
        for case, seconds in times.items()
    ],
    "left_out": left_out,
    "scaling": scaling.candidates(),
}
with open(OUT, "w", encoding="utf-8") as file:
    json.dump({**found, "package": subquad.__file__}, file)
"""


def test_docs_command_line_and_benchmarks_know_it(project):
    found = run(project, OTHERS)
    table = (project / "docs" / "mechanisms" / "index.md").read_text(encoding="utf-8")
    (row,) = [line for line in table.splitlines() if line.startswith(f"| [{NAME}]({NAME}.md)")]
    assert "| kernel | O(L·D·V) |" in row and "constant" in row
    page = (project / "docs" / "mechanisms" / f"{NAME}.md").read_text(encoding="utf-8")
    for part in (
        f"# {NAME}",
        "φ(x) = sigmoid(β·√scale·x)",
        "| `steepness` | `1.0` | β |",
        "features sum over all keys; a window is sparse attention",
        f".. autoclass:: subquad.attention.kernel.{NAME}.Sigmoid",
    ):
        assert part in page
    assert NAME in found["names"] and "linear attention with sigmoid features" in found["list"]
    assert "steepness=2: β" in found["describe"] and "2006.16236" in found["describe"]
    assert NAME in found["scaling"]
    assert "its own float64 run; formula checked by the tests" in found["against"]
    assert len(found["checks"]) == 6 and all(one["ok"] for one in found["checks"])
    assert not found["wrong"]["ok"]
    assert not found["left_out"]
    assert {tuple(timed[:4]) for timed in found["timed"]} == {
        (NAME, mode, causal, length)
        for mode in ("forward", "training step", "prefill", "decode step")
        for causal in (False, True)
        for length in (64, 128)
        if causal or mode in ("forward", "training step")
    }
    assert min(timed[4] for timed in found["timed"]) > 0
