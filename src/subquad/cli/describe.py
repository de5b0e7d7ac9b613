"""``subquad describe``: everything that is known of a mechanism."""

from __future__ import annotations

from typing import Annotated

import typer

from subquad import registry
from subquad.cli.common import Json, consoles, write_json

__all__ = ["add"]


def add(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command(
        "describe", epilog="Example: [bold]subquad describe 'performer(gauge=centre)'[/bold]"
    )(_describe)


def _describe(
    name: Annotated[
        str, typer.Argument(help="A mechanism, with options if they change what it can do.")
    ],
    as_json: Json = False,
) -> None:
    """Describe a mechanism: formula, cost, options, capabilities with reasons, paper."""
    found = registry.describe(name)
    if as_json:
        write_json(found.to_dict())
    else:
        consoles(False).print(str(found), markup=False, highlight=False, soft_wrap=True)
