"""``subquad doctor``: what this machine runs attention with, and whether it computes it right."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from subquad.cli.common import Json, consoles, write_json

__all__ = ["add"]

FOR_DEVELOPERS = ("dev", "docs", "peers")
"""Extras that nobody misses who does not work on this package."""


def add(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command("doctor", epilog="Example: [bold]subquad doctor performer near_far[/bold]")(_doctor)


def _doctor(
    mechanism: Annotated[
        list[str] | None, typer.Argument(help="What is checked; default: every mechanism.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="Such as cpu or cuda; auto: a GPU if there is one.")
    ] = "auto",
    checks: Annotated[
        bool, typer.Option("--checks/--no-checks", help="Compute, or only look around.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Show versions, extras and backends here, and check every mechanism against float64.

    Takes half a minute. The exit code is 1 if a mechanism computes wrongly on this machine.
    """
    from subquad.arena.doctor import LIMIT, examine
    from subquad.training.run import device_of

    place = device_of(device, "--device")
    console = consoles(as_json)
    with console.status("looking around") as status:
        found = examine(
            place,
            mechanism or None if checks else [],
            say=lambda name: status.update(f"checking {name}"),
        )
    wrong = [row for row in found["checks"] if not row["passed"]]
    if as_json:
        write_json(found)
    else:
        _show(console, found, wrong, LIMIT)
    if wrong:
        raise typer.Exit(1)


def _show(
    console: Console, found: dict[str, Any], wrong: list[dict[str, Any]], limit: float
) -> None:
    where, about = found["machine"], found["settings"]
    threads = f"{where['threads']} thread{'s' * (where['threads'] > 1)} of {where['cores']} cores"
    environment = " ".join(f"{name}={value}" for name, value in about["environment"].items())
    _lines(
        console,
        "this machine",
        {
            "subquad": about["subquad"],
            "torch": where["torch"],
            "python": f"{about['python']}, {about['executable']}",
            "system": about["system"],
            "cpu": f"{where['cpu']}, {about['capability']}, {threads}",
            "gpu": where.get("gpu", ""),
            "environment": environment,
            "cache": f"{about['cache']}, {about['tunings']} crossovers of 'auto'",
        },
    )
    _lines(console, "extras", {name: _extra(one) for name, one in _wanted(found["extras"])})
    rows = {row["call"]: f"{row['backend']}: {row['reason']}" for row in found["backends"]}
    _lines(console, "linear attention runs by", rows)
    reasons = {
        f"not {name}": why for row in found["backends"][:1] for name, why in row["refused"].items()
    }
    _lines(console, f"for {found['backends'][0]['call']}", reasons)
    if not found["checks"]:
        return
    names = dict.fromkeys(row["mechanism"] for row in found["checks"])
    worst = max(found["checks"], key=lambda row: row["error"])
    if wrong:
        rows = {
            f"{row['mechanism']}, {row['way']}": row["problem"] or f"off by {row['error']:.1e}"
            for row in wrong
        }
        _lines(console, "WRONG on this machine", rows)
    console.print(
        f"{len(names)} mechanisms, {len(found['checks'])} checks against float64, "
        f"{len(wrong)} failed; the largest difference is {worst['error']:.1e} "
        f"({worst['mechanism']}, {worst['way']}), {limit:.0e} is allowed",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _wanted(extras: dict[str, dict[str, Any]]) -> Iterable[tuple[str, dict[str, Any]]]:
    """Extras for users, and those of developers that are there."""
    for name, one in extras.items():
        if name not in FOR_DEVELOPERS or not one["missing"]:
            yield name, one


def _extra(one: dict[str, Any]) -> str:
    parts = [] if one["missing"] else ["there"]
    if one["missing"]:
        parts.append(f"missing: {', '.join(one['missing'])}")
    parts += [f"{name} {why}" for name, why in one["unfit"].items()]
    return "; ".join(parts)


def _lines(console: Console, title: str, rows: dict[str, str]) -> None:
    """A title, and a line for each row that says something."""
    rows = {name: text for name, text in rows.items() if text}
    if not rows:
        return
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows.items():
        table.add_row(name, text)
    console.print(table, markup=False, highlight=False)
    console.print()
