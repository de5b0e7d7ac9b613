"""``subquad train``: a task, data, a recipe, and a folder for the run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from subquad.cli.common import Json, consoles, write_json
from subquad.errors import OptionError

__all__ = ["add"]


def add(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command(
        "train",
        epilog="Example: [bold]subquad train translation --data train.tsv --valid valid.tsv"
        " --out run --set model.mechanism=performer[/bold]",
    )(_train)


def _train(
    task: Annotated[str, typer.Argument(help="What is trained: translation, lm, ...")],
    out: Annotated[Path, typer.Option(help="Folder for the run.")],
    data: Annotated[
        list[str] | None,
        typer.Option(help="Training file; given twice: source and target files."),
    ] = None,
    valid: Annotated[
        list[str] | None,
        typer.Option(help="Validation file(s); without it a part of the data is held out."),
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="A corpus inside the package, such as bible-es-en.")
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="A recipe: a YAML file, or the name of a shipped one.")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="key=value over the recipe, may be given again."),
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="Longest time to train.")] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume/--fresh", help="Continue a run found in --out, or delete it."),
    ] = True,
    as_json: Json = False,
) -> None:
    """Train a model by a recipe; the same command continues a run that was stopped.

    Recipes are YAML files; 'annotated' among the shipped ones explains every key. The trained
    model is in the folder 'best' of the run.
    """
    from subquad.training.recipe import Recipe, read_setting, shipped_recipes
    from subquad.training.tasks import task_of

    kind = task_of(task)
    overrides: dict[str, Any] = {}
    for name, given in (("data.train", data), ("data.valid", valid)):
        if given:
            overrides[name] = given[0] if len(given) == 1 else given
    if preset is not None:
        overrides["data.preset"] = preset
    if minutes is not None:
        overrides["training.minutes"] = minutes
    overrides |= dict(read_setting(text) for text in changes or [])
    held = out / "recipe.yaml"
    if config is None and preset in shipped_recipes():
        config = preset
    if config is None and not data and preset is None and resume and held.is_file():
        config = str(held)
    recipe = Recipe.load(config or kind.recipe, overrides)
    if recipe.task != task:
        raise OptionError(f"--config {config} is a recipe for {recipe.task}, not for {task}")
    from subquad.training.run import train

    console = consoles(as_json)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    try:
        with _shown(console, recipe.logging.every) as tell:
            report = train(recipe, out, fresh=not resume, progress=tell, say=say)
    except KeyboardInterrupt:
        say("stopped; without --fresh the same command goes on from the last checkpoint")
        raise typer.Exit(130) from None
    if as_json:
        write_json(report.to_dict())
    else:
        say(str(report))


@contextlib.contextmanager
def _shown(console: Console, every: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """What shows the points of the log: a bar on a terminal, lines elsewhere.

    Args:
        console: to write to.
        every: steps between two of them.
    """
    from subquad.training.run import line

    def echo(point: dict[str, Any]) -> None:
        console.print(line(point), markup=False, highlight=False, soft_wrap=True)

    if not console.is_terminal:
        yield echo
        return
    columns = (BarColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        shown = bar.add_task(f"the first numbers come after {every} steps", total=1.0)

        def update(point: dict[str, Any]) -> None:
            if point["kind"] == "train":
                bar.update(shown, completed=point["progress"], description=line(point))
            else:
                echo(point)

        yield update
