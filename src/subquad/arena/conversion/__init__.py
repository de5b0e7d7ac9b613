"""`subquad bench conversion`: what trained models keep when their attention is swapped.

One module for each model, looked up in `STUDIES` and imported when it is run. A module has

    measure(zoo, *, quick, echo) -> dict     # JSON values; zoo finds models and texts
    table(result) -> list of dicts           # rows; keys are columns, values text or numbers

Rows that follow each other with the same columns make one Markdown table. Two keys of a result
have a meaning here: ``"settings"`` (name → value) is printed above the tables, ``"notes"``
(sentences) below them. `run` adds title, command, machine, seconds and whether it was quick,
writes ``conversion-NAME.json``, and renders ``conversion.md`` from all such files in the
folder: one study can be measured again without the others.
"""

from __future__ import annotations

import importlib
import itertools
import json as json_module
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from subquad.arena.machine import machine, machine_line
from subquad.arena.zoo import Zoo
from subquad.errors import UnknownNameError, nearest

__all__ = ["STUDIES", "Study", "page", "run", "section", "study"]


class Study(NamedTuple):
    """A model's entry: heading in the page, module that measures it."""

    title: str
    module: str


STUDIES = {
    "minilm": Study("MiniLM, sentence embeddings", "minilm"),
    "recovery": Study("MiniLM after minutes of recovery training", "recovery"),
    "smollm2": Study("SmolLM2-135M, perplexity and recall", "smollm2"),
    "smollm2-recovery": Study(
        "SmolLM2-135M after recovery training, four layers exact", "recovery_lm"
    ),
    "generation": Study("SmolLM2-135M, constant-memory generation", "generation"),
    "dinov2": Study("DINOv2 ViT-S/14, linear probe", "vision"),
    "whisper": Study("Whisper tiny.en, speech recognition", "speech"),
    "flan-t5": Study("flan-t5-small, translation and summary", "translation"),
    "antiberty": Study("AntiBERTy, masked residues", "protein"),
}


def study(name: str) -> Any:
    """The module of a study.

    Raises:
        UnknownNameError: there is no study of that name.
    """
    if name not in STUDIES:
        raise UnknownNameError(
            f"no conversion study {name!r}{nearest(name, STUDIES)}; there are {', '.join(STUDIES)}"
        )
    return importlib.import_module(f"{__name__}.{STUDIES[name].module}")


def run(
    out: Path,
    names: Sequence[str] = (),
    zoo: Zoo | None = None,
    *,
    quick: bool,
    json: bool,
    threads: int = 1,
    echo: Callable[[str], None],
) -> dict[str, Any]:
    """Measures studies one after the other and writes their results into `out`.

    Args:
        out: folder for the results.
        names: of `STUDIES`; none means all.
        zoo: where models and texts are; default: installed, or where the environment says.
        quick: fewer samples.
        json: whether the caller wants nothing but the result.
        threads: of torch, while measuring.
        echo: shows progress.

    Returns:
        The results by name.

    Raises:
        UnknownNameError: before anything is measured.
        OptionError, ImportError: a model or text is missing; says how to get it.
    """
    names = names or tuple(STUDIES)
    modules = {name: study(name) for name in names}
    results = {}
    out.mkdir(parents=True, exist_ok=True)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for name, module in modules.items():
            echo(f"{STUDIES[name].title} …")
            start = time.perf_counter()
            found = module.measure(zoo or Zoo.default(), quick=quick, echo=echo)
            results[name] = {
                "study": name,
                "title": STUDIES[name].title,
                "command": f"subquad bench conversion {name}" + " --quick" * quick,
                "quick": quick,
                "seconds": time.perf_counter() - start,
                "machine": machine(threads=threads),
                **found,
            }
            text = json_module.dumps(results[name], indent=1, ensure_ascii=False) + "\n"
            (out / f"conversion-{name}.json").write_text(text, encoding="utf-8")
            (out / "conversion.md").write_text(page(out), encoding="utf-8")
            if not json:
                echo("\n".join([*_tables(module.table(results[name])), ""]))
    finally:
        torch.set_num_threads(before)
    if not json:
        echo(f"written: {out / 'conversion.md'}")
    return results


def page(folder: Path) -> str:
    """The Markdown page of all ``conversion-NAME.json`` in a folder, in the order of `STUDIES`."""
    lines = [
        "# Converted models",
        "",
        "What trained models keep when `sq.convert` swaps their attention; each section says how "
        "it was measured.",
    ]
    for name, entry in STUDIES.items():
        path = folder / f"conversion-{name}.json"
        if path.is_file():
            result = json_module.loads(path.read_text(encoding="utf-8"))
            lines += ["", f"## {entry.title}", "", *section(result, study(name).table(result))]
    return "\n".join([*lines, ""])


def section(result: dict[str, Any], rows: list[dict[str, Any]]) -> Iterator[str]:
    """Lines of Markdown: settings, tables, notes, and where and how it was measured."""
    if result["quick"]:
        yield from ("**A quick run: too few samples to conclude from.**", "")
    if settings := result.get("settings"):
        yield "; ".join(f"{name} {_cell(value)}" for name, value in settings.items()) + "."
        yield ""
    yield from _tables(rows)
    for note in result.get("notes", ()):
        yield from ("", note)
    yield ""
    where = machine_line(result["machine"])
    yield f"{where}; {result['seconds'] / 60:.1f} minutes. Again: `{result['command']}`."


def _tables(rows: list[dict[str, Any]]) -> Iterator[str]:
    for index, (columns, group) in enumerate(itertools.groupby(rows, key=tuple)):
        if index:
            yield ""
        yield f"| {' | '.join(columns)} |"
        yield "|" + "---|" * len(columns)
        for row in group:
            yield f"| {' | '.join(map(_cell, row.values()))} |"


def _cell(value: Any) -> str:
    """Four digits of a float; None is a dash; a pipe would end the cell."""
    text = "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|")
