"""What all verbs share: consoles, JSON, and errors as one message with exit code 2."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from subquad.errors import SubquadError

__all__ = ["ErrorGroup", "Json", "consoles", "echo_to_stderr", "flowing_help", "write_json"]

Json = Annotated[bool, typer.Option("--json", help="Write JSON to standard output instead.")]


class ErrorGroup(TyperGroup):
    """Turns our own errors into one message on standard error and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command."""
        try:
            return super().invoke(ctx)
        except SubquadError as error:
            message = str(error)
        except ImportError as error:
            # Missing extras say how to install them; anything else is a bug: show it whole.
            if "pip install 'subquad[" not in str(error):
                raise
            message = str(error)
        except OSError as error:
            if error.filename is None:  # else of a file that the user may not read or write
                raise
            message = f"{error.filename}: {error.strerror}"
        typer.echo(f"error: {message}", err=True)
        raise typer.Exit(2)


def flowing_help(app: typer.Typer) -> None:
    """Lets paragraphs of help flow: rich would break lines where docstrings do, at any width."""
    for command in app.registered_commands:
        paragraphs = inspect.cleandoc(command.help or command.callback.__doc__ or "").split("\n\n")
        command.help = "\n\n".join(
            part if "\n " in part else " ".join(part.split()) for part in paragraphs
        )


def consoles(as_json: bool) -> Console:
    """Where people read: standard output, or standard error while JSON goes to the former."""
    return Console(stderr=as_json)


def echo_to_stderr(text: str) -> None:
    """Shows progress of long work without touching standard output."""
    typer.echo(text, err=True)


def write_json(value: Any) -> None:
    """Writes one JSON document to standard output."""
    sys.stdout.write(json.dumps(value, indent=1, ensure_ascii=False, default=str) + "\n")


Echo = Callable[[str], None]
