"""``subquad list``: the registered mechanisms, or the models that can be converted."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from subquad import registry
from subquad.cli.common import Json, consoles, write_json
from subquad.errors import OptionError

__all__ = ["add"]

_MARK = {True: "✓", False: "·"}
_STATES = ("constant", "growing", "yes", "no")


def add(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command("list", epilog="Example: [bold]subquad list --causal --state constant[/bold]")(
        _list
    )


def _list(
    causal: Annotated[
        bool | None, typer.Option("--causal/--no-causal", help="Takes causal masks, or not.")
    ] = None,
    cross: Annotated[
        bool | None, typer.Option("--cross/--no-cross", help="Takes L ≠ S, or not.")
    ] = None,
    gqa: Annotated[
        bool | None, typer.Option("--gqa/--no-gqa", help="Takes grouped queries, or not.")
    ] = None,
    key_mask: Annotated[
        bool | None, typer.Option("--key-mask/--no-key-mask", help="Takes padding masks, or not.")
    ] = None,
    state: Annotated[
        str | None,
        typer.Option(help="Memory while decoding: constant, growing, yes (either) or no."),
    ] = None,
    approximates: Annotated[
        str | None, typer.Option(help="What it approximates, such as softmax.")
    ] = None,
    models: Annotated[
        bool, typer.Option("--models", help="The architectures of transformers, and how reached.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List the registered mechanisms and what they can do, or with --models what they convert."""
    if models:
        asked = (causal, cross, gqa, key_mask, state, approximates)
        if any(value is not None for value in asked):
            raise OptionError("--models lists architectures: it takes no filter of mechanisms")
        _models(as_json)
        return
    if state is not None and state not in _STATES:
        raise OptionError(f"--state {state}: choose one of {', '.join(_STATES)}")
    wanted: bool | str | None = {"yes": True, "no": False}.get(state or "", state)
    names = registry.mechanisms(
        causal=causal,
        cross=cross,
        gqa=gqa,
        key_mask=key_mask,
        state=wanted,
        approximates=approximates,
    )
    found = [registry.describe(name) for name in names]
    if as_json:
        write_json([one.to_dict() for one in found])
        return
    table = Table()
    for column in ("name", "causal", "cross", "gqa", "state"):
        table.add_column(column, no_wrap=True)
    table.add_column("what it is, and its cost", overflow="fold")
    for one in found:
        have = one.capabilities
        table.add_row(
            f"[bold]{one.name}[/bold]",
            *(_MARK[bool(value)] for value in (have.causal, have.cross, have.gqa)),
            str(have.state) if have.state else _MARK[False],
            f"{one.info.summary}; [dim]{one.cost.formula}[/dim]",
        )
    console = consoles(False)
    console.print(table)
    if not found:
        console.print("no registered mechanism has all of that")


def _models(as_json: bool) -> None:
    from subquad.convert import coverage

    found = coverage()
    if as_json:
        write_json([one.to_dict() for one in found])
        return
    table = Table()
    for column in ("model", "reached"):
        table.add_column(column, no_wrap=True)
    for column in ("what it has", "attention classes"):
        table.add_column(column, overflow="fold")
    for one in found:
        missed = f"[dim]not: {', '.join(one.missed)}[/dim]" if one.missed else ""
        table.add_row(
            f"[bold]{one.name}[/bold]",
            one.reached,
            ", ".join(one.features),
            "; ".join(filter(None, (", ".join(one.classes), missed, one.reason))),
        )
    console = consoles(False)
    console.print(table)
    ways = [one.reached for one in found]
    counts = ", ".join(f"{ways.count(way)} {way}" for way in dict.fromkeys(ways))
    console.print(f"{len(found)} architectures with attention: {counts}")
