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
    device = options.get("device", "cpu")
    out = out or Path("benchmarks/results") / machine(threads=1, device=device)["slug"]
    echo = echo_to_stderr if as_json else typer.echo
    result = runner.run(out=out, quick=quick, json=as_json, echo=echo, **options)
    if as_json:
        write_json(result)


@app.command("speed", epilog="Example: [bold]subquad bench speed --quick --json[/bold]")
def speed(
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Measure this part again and keep the others: floors, reach, mechanisms; "
            "repeat for several."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu (one thread), or cuda.")] = "cpu",
    out: _Out = None,
    quick: _Quick = False,
    as_json: Json = False,
) -> None:
    """Time and memory of attention calls beside SDPA and other libraries, interleaved."""
    _run("speed", out, quick, as_json, only=only or (), device=device)


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


@app.command("objectives", epilog="Example: [bold]subquad bench objectives --quick[/bold]")
def objectives(out: _Out = None, quick: _Quick = False, as_json: Json = False) -> None:
    """Exposure bias with and without scheduled sampling, and BLEU with training on it."""
    _run("objectives", out, quick, as_json)


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


@app.command("asr", epilog="Example: [bold]subquad bench asr --quick[/bold]")
def asr(
    texts: Annotated[
        Path | None,
        typer.Option(help="Folder of unpacked texts; default: SUBQUAD_TEXTS, then texts/."),
    ] = None,
    work: Annotated[
        Path | None,
        typer.Option(help="Folder for the runs, which are continued there; default: temporary."),
    ] = None,
    out: _Out = None,
    quick: _Quick = False,
    as_json: Json = False,
) -> None:
    """Speech recognition from scratch, with and without guided attention; see `make texts`."""
    _run("asr", out, quick, as_json, texts=texts, work=work)


@app.command("classification", epilog="Example: [bold]subquad bench classification --quick[/bold]")
def classification(
    texts: Annotated[
        Path | None,
        typer.Option(help="Folder of unpacked texts; default: SUBQUAD_TEXTS, then texts/."),
    ] = None,
    out: _Out = None,
    quick: _Quick = False,
    as_json: Json = False,
) -> None:
    """Long documents classified from scratch with each mechanism; see `make texts`."""
    _run("classification", out, quick, as_json, texts=texts)


@app.command(
    "translation", epilog="Example: [bold]subquad bench translation --data multi30k[/bold]"
)
def translation(
    data: Annotated[
        Path, typer.Option(help="Folder with train.en, train.de, val.en, …, test_2016_flickr.de.")
    ],
    runs: Annotated[Path, typer.Option(help="Folder for the training runs.")] = Path("runs"),
    only: Annotated[
        list[str] | None, typer.Option(help="Train and measure these entries; repeat for several.")
    ] = None,
    pair: Annotated[str, typer.Option(help="Suffixes of source and target files.")] = "en-de",
    test: Annotated[str, typer.Option(help="Name of the test files.")] = "test_2016_flickr",
    out: _Out = None,
    quick: _Quick = False,
    as_json: Json = False,
) -> None:
    """One recipe, and what each attention translates after it; a stopped run goes on."""
    _run(
        "translation", out, quick, as_json,
        data=data, runs=runs, only=only or (), pair=pair, test=test,
    )  # fmt: skip


@app.command("documents", epilog="Example: [bold]subquad bench documents --runs runs[/bold]")
def documents(
    runs: Annotated[
        Path | None,
        typer.Option(help="Folder for training runs, to measure translations instead of costs."),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Train these models; repeat for several.")
    ] = None,
    out: _Out = None,
    quick: _Quick = False,
    as_json: Json = False,
) -> None:
    """Whole documents: what a training step costs against length, or what is translated."""
    _run("documents", out, quick, as_json, runs=runs, only=only or ())


@app.command("loop", epilog="Example: [bold]subquad bench loop --quick[/bold]")
def loop(out: _Out = None, quick: _Quick = False, as_json: Json = False) -> None:
    """A training step of `subquad train` beside a plain loop around torch.nn.Transformer."""
    _run("loop", out, quick, as_json)
