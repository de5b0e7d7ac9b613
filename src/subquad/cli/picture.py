"""``subquad picture``: what a mechanism's attention looks like."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["add"]


def add(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command(
        "picture", epilog="Example: [bold]subquad picture 'local(window=5)' --out local.png[/bold]"
    )(_picture)


def _picture(
    name: Annotated[
        str, typer.Argument(help="A mechanism; small windows and blocks are seen best.")
    ],
    out: Annotated[Path | None, typer.Option(help="File: .png, .svg or .pdf.")] = None,
    length: Annotated[int, typer.Option(min=8, max=512, help="Tokens.")] = 48,
) -> None:
    """Draw the attention matrix that a mechanism implies, beside softmax."""
    from subquad import registry
    from subquad.arena.pictures import save

    out = out or Path(f"{registry.describe(name).name}.png")
    save(name, out, length)
    typer.echo(f"written: {out}")
