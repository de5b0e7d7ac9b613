"""The README and the guides show what is there: the tree, every snippet, every call.

A fenced block ``python`` runs; blocks of one file share their names, in order. After an
expression, ``# → text`` states what it prints, or its repr. A block is left out only by a
comment with a reason on the line before it: ``<!-- not run: why -->``.
"""

import ast
import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
FENCE = re.compile(
    r"(?:^<!-- not run: (?P<reason>.+?) -->\n+)?^```(?P<language>\w+)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
RESULT = re.compile(r"#\s*→\s*(.*)$")
SHOWN = ("src/subquad", "tests", "benchmarks", "docs")


def pages():
    written = tracked_files() or []
    docs = [ROOT / name for name in written if name.startswith("docs/") and name.endswith(".md")]
    return [README, ROOT / "CONTRIBUTING.md", *sorted(path for path in docs if path.exists())]


def tracked_files():
    """Paths of all files that git has or would add; None where there is no git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    with contextlib.suppress(OSError):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout:
            return done.stdout.split("\n")
    return walked_files()


def walked_files():
    skip = {"__pycache__", "_build", "_generated", "generated", "mechanisms"}
    found = []
    for top in SHOWN:
        for folder, inner, names in os.walk(ROOT / top):
            inner[:] = [name for name in inner if name not in skip and not name.startswith(".")]
            found += [(Path(folder) / name).relative_to(ROOT).as_posix() for name in names]
    return found


def blocks(path, language):
    """(line, reason it is not run or None, code) of each fenced block in this language."""
    text = path.read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, match.start("code")) + 1, match["reason"], match["code"])
        for match in FENCE.finditer(text)
        if match["language"] == language
    ]


def run_block(path, line, code, names):
    """Runs one block in `names`; states after an arrow have to hold."""
    padded = "\n" * (line - 1) + code  # a traceback then shows the page's own lines
    lines = padded.split("\n")
    for node in ast.parse(padded, str(path)).body:
        stated = RESULT.search(lines[node.end_lineno - 1])
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            if stated and isinstance(node, ast.Expr):
                value = eval(compile(ast.Expression(node.value), str(path), "eval"), names)
                shown = printed.getvalue().strip() or repr(value)
                assert shown == stated[1].strip(), f"{path.name}, line {node.lineno}: it is {shown}"
            else:
                exec(compile(ast.Module([node], []), str(path), "exec"), names)


def run_page(path):
    names = {"__name__": "page"}
    for line, reason, code in blocks(path, "python"):
        if reason is None:
            run_block(path, line, code, names)
    return names


# ---- the tree ----------------------------------------------------------------------------


def folders_on_disk():
    found = set()
    for name in tracked_files():
        if name.startswith(tuple(f"{top}/" for top in SHOWN)) and (ROOT / name).exists():
            found |= {parent.as_posix() for parent in Path(name).parents}
    return {folder for folder in found if folder not in (".", "src")}


def folders_in_readme():
    """Paths of the tree, which shows depth by indentation: two spaces a level."""
    (tree,) = [code for _, _, code in blocks(README, "text") if code.startswith("src/subquad/")]
    found, above = {}, []
    for line in tree.splitlines():
        entry, _, noun = line.strip().partition("/ ")
        depth = (len(line) - len(line.lstrip())) // 2
        above = [*above[:depth], entry]
        found["/".join(above)] = noun.strip()
    return found


def test_the_tree_equals_the_disk():
    told, there = folders_in_readme(), folders_on_disk()
    assert sorted(told) == sorted(there), (
        f"README lacks {sorted(there - told.keys())}, disk lacks {sorted(told.keys() - there)}"
    )
    assert all(told.values()), "every folder has a line that says what it holds"


def test_without_git_the_same_folders_are_found(monkeypatch):
    with_git = folders_on_disk()
    monkeypatch.setattr(sys.modules[__name__], "tracked_files", walked_files)
    assert with_git <= folders_on_disk()


# ---- the snippets ------------------------------------------------------------------------


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_snippets_run(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    run_page(path)


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_snippet_is_left_out_with_a_reason(path):
    for line, reason, _ in blocks(path, "python"):
        assert reason is None or len(reason.split()) > 2, f"line {line}: say why"


def commands():
    lines = {
        line.strip()
        for path in pages()
        for _, reason, code in blocks(path, "bash")
        if reason is None
        for line in code.splitlines()
    }
    return sorted(line for line in lines if line.startswith("subquad "))


QUICK = ("list", "describe")


@pytest.mark.parametrize("command", commands())
def test_commands_exist(command):
    """Quick commands run; of the others, the verb and every option have to be in its help."""
    words = shlex.split(command.partition("#")[0])
    quick = words[1] in QUICK
    verbs = [word for word in words[1:3] if word.isidentifier()]
    arguments = words[1:] if quick else [*verbs[: 2 if words[1] == "bench" else 1], "--help"]
    done = subprocess.run(
        [sys.executable, "-c", "from subquad.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if not quick:
        for word in words[2:]:
            if word.startswith("-"):
                assert f" {word.partition('=')[0]} " in done.stdout, f"{command}: no option {word}"


# ---- the table for people who come from performer-pytorch --------------------------------


def new_calls():
    """The code spans of the table's second column."""
    rows = [
        line for line in README.read_text(encoding="utf-8").splitlines() if line.startswith("|")
    ]
    start = next(i for i, row in enumerate(rows) if row.startswith("| performer-pytorch |"))
    found = []
    for row in rows[start + 2 :]:
        cells = re.split(r"(?<!\\)\|", row)
        if len(cells) != 4:
            break
        found += [span.replace("\\|", "|") for span in re.findall(r"`([^`]+)`", cells[2])]
    return found


def test_the_new_calls_work():
    calls = new_calls()
    assert len(calls) >= 10
    names = run_page(README)
    for call in calls:
        try:
            exec(call, names)
        except Exception as error:
            pytest.fail(f"{call}: {type(error).__name__}: {error}")
