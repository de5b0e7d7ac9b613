"""``subquad bench``: speed, approximation error, and what converted models keep."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from subquad.cli.common import ErrorGroup, Json, echo_to_stderr, write_json

__all__ = ["app"]

app = typer.Typer(
    cls=ErrorGroup,
    no_args_is_help=True,
    help="Measure speed, memory, approximation error and converted models.",
    epilog="Example: [bold]subquad bench speed --quick[/bold]",
)

_Out = Annotated[
    Path | None,
    typer.Option(help="Folder for the results; default: benchmarks/results/ and the machine."),
]
_Quick = Annotated[bool, typer.Option("--quick", help="Fewer and smaller cases.")]


def _run(module: str, out: Path | None, quick: bool, as_json: bool, **options: Any) -> None:
    from subquad.arena.machine import machine

    runner: Any = importlib.import_module(f"subquad.arena.{module}")
    out = out or Path("benchmarks/results") / machine(threads=1)["slug"]
    echo = echo_to_stderr if as_json else typer.echo
    result = runner.run(out=out, quick=quick, json=as_json, echo=echo, **options)
    if as_json:
        write_json(result)


@app.command("speed", epilog="Example: [bold]subquad bench speed --quick --json[/bold]")
def speed(out: _Out = None, quick: _Quick = False, as_json: Json = False) -> None:
    """Time and memory of attention calls, interleaved, one thread."""
    _run("speed", out, quick, as_json)


@app.command("approximation", epilog="Example: [bold]subquad bench approximation --quick[/bold]")
def approximation(out: _Out = None, quick: _Quick = False, as_json: Json = False) -> None:
    """Error of every estimator against the number of features, beside uniform attention."""
    _run("approximation", out, quick, as_json)


@app.command("scaling", epilog="Example: [bold]subquad bench scaling --quick[/bold]")
def scaling(out: _Out = None, quick: _Quick = False, as_json: Json = False) -> None:
    """Time and memory of a training step at 16k and 64k tokens against the declared cost."""
    _run("scaling", out, quick, as_json)


@app.command("tasks", epilog="Example: [bold]subquad bench tasks --only local --quick[/bold]")
def tasks(
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Measure this mechanism again and keep the other rows; repeat for several."
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Keep the rows that are there, measure what is missing."),
    ] = False,
    out: _Out = None,
    quick: _Quick = False,
    as_json: Json = False,
) -> None:
    """What a small network learns with each mechanism, and the picture of all of them."""
    _run("tasks", out, quick, as_json, only=only or (), resume=resume)


@app.command(
    "conversion", epilog="Example: [bold]subquad bench conversion minilm dinov2 --quick[/bold]"
)
def conversion(
    names: Annotated[
        list[str] | None, typer.Argument(help="Studies to run, by name; default: all.")
    ] = None,
    models: Annotated[
        Path | None,
        typer.Option(help="Folder of unpacked models; default: SUBQUAD_MODELS, then models/."),
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option(help="Folder of unpacked texts; default: SUBQUAD_TEXTS, then texts/."),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 1,
    out: _Out = None,
    quick: _Quick = False,
    as_json: Json = False,
) -> None:
    """What real trained models keep when their attention is swapped; see `make models texts`."""
    from subquad.arena import conversion as studies
    from subquad.arena.machine import machine
    from subquad.arena.zoo import Zoo

    out = out or Path("benchmarks/results") / machine(threads=threads)["slug"]
    result = studies.run(
        out,
        names or (),
        Zoo.default(models, texts),
        quick=quick,
        json=as_json,
        threads=threads,
        echo=echo_to_stderr if as_json else typer.echo,
    )
    if as_json:
        write_json(result)
