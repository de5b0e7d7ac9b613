"""The ``subquad`` command and its verbs."""

from __future__ import annotations

from typing import Annotated

import typer

import subquad
from subquad.cli import (
    bench,
    build_native,
    compare,
    convert,
    demo,
    describe,
    doctor,
    generate,
    picture,
    score,
    suggest,
    train,
    translate,
    tune,
)
from subquad.cli import list as list_verb
from subquad.cli.common import ErrorGroup, flowing_help

__all__ = ["app"]

app = typer.Typer(
    name="subquad",
    cls=ErrorGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Sub-quadratic attention: look mechanisms up, swap them in, measure what they cost.",
    epilog="Start with: [bold]subquad demo[/bold]",
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"subquad {subquad.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Options of the command itself."""


VERBS = (
    list_verb,
    describe,
    picture,
    demo,
    convert,
    compare,
    suggest,
    tune,
    build_native,
    doctor,
    train,
    translate,
    generate,
    score,
)
for verb in VERBS:
    verb.add(app)
app.add_typer(bench.app, name="bench")
for one in (app, bench.app):
    flowing_help(one)
