"""``subquad build-native``: compiles the C++ kernels ahead of their first use."""

from __future__ import annotations

from typing import Annotated

import typer

from subquad.cli.common import Json, consoles, write_json

__all__ = ["add"]


def add(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command("build-native", epilog="Example: [bold]subquad build-native --force[/bold]")(_build)


def _build(
    force: Annotated[bool, typer.Option("--force", help="Compile even what is there.")] = False,
    as_json: Json = False,
) -> None:
    """Compile the C++ kernels for this processor: calls on a CPU then start with them."""
    from subquad.kernels import build

    out = consoles(as_json)
    made = build(force=force)
    if as_json:
        write_json(
            {
                "path": str(made.path),
                "compiler": made.compiler,
                "flags": list(made.flags),
                "fresh": made.fresh,
            }
        )
        return
    out.print(f"{'compiled' if made.fresh else 'there already'}: {made.path}", soft_wrap=True)
    out.print(f"{made.compiler} {' '.join(made.flags)}", soft_wrap=True)
