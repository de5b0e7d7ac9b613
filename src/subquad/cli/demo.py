"""``subquad demo``: a real model's attention swapped, in numbers and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from subquad.cli.common import Json, consoles, write_json

__all__ = ["add"]


def add(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command("demo", epilog="Example: [bold]subquad demo --quick --out out[/bold]")(_demo)


def _demo(
    quick: Annotated[
        bool, typer.Option("--quick", help="Shorter passages and lengths: half a minute.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for demo.html and the pictures.")] = Path("out"),
    as_json: Json = False,
) -> None:
    """Swap a real sentence encoder's attention; write demo.html (under three minutes)."""
    from subquad.arena import demo

    result = demo.run(out, quick, console=consoles(as_json))
    if as_json:
        write_json(result)
