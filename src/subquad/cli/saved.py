"""Models on the disk, as the verbs that use them take them; and texts from files or pipes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from subquad.cli.common import echo_to_stderr
from subquad.errors import OptionError

__all__ = ["Device", "load_model", "read_lines", "recipe_of"]

Device = Annotated[
    str, typer.Option(help="cpu, cuda, mps; auto: an accelerator where there is one.")
]


KINDS = {
    "AutoModelForSeq2SeqLM": "a model that translates",
    "AutoModelForCausalLM": "a language model",
}
"""transformers' classes, for people."""


def load_model(folder: Path, auto: str, device: str = "auto") -> tuple[Any, Any]:
    """(model in eval mode, tokenizer) of a run's folder or of a saved model's.

    Args:
        folder: of a run, whose ``best`` is taken, or with a config.json.
        auto: transformers' class that knows the kind of model.
        device: where the model is put.

    Raises:
        OptionError: there is no model, or one of another kind, or no such device.
        ImportError: transformers is missing.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError("models need pip install 'subquad[train]'") from error
    from subquad import models

    models.register()
    found = folder / "best" if (folder / "best" / "config.json").is_file() else folder
    if not (found / "config.json").is_file():
        why = "has no evaluation yet" if (folder / "recipe.yaml").is_file() else "holds no model"
        raise OptionError(f"{folder} {why}: give the folder of a run, or of a saved model")
    from subquad.training.run import device_of
    from subquad.training.trainer import quiet

    place = device_of(device, "--device")
    try:
        with quiet():
            model = getattr(transformers, auto).from_pretrained(found)
    except ValueError as error:  # transformers lists all kinds that it knows
        why = str(error).partition("\n")[0]
        raise OptionError(f"{found} does not hold {KINDS[auto]}: {why}") from None
    return model.to(place).eval(), transformers.AutoTokenizer.from_pretrained(found)


def recipe_of(folder: Path) -> Any:
    """The recipe with which the model of this folder was trained; None where it has none."""
    path = next((p for p in (folder / "best", folder) if (p / "recipe.yaml").is_file()), None)
    if path is None:
        return None
    from subquad.training.recipe import Recipe

    return Recipe.load(path / "recipe.yaml")


def read_lines(path: Path, column: int | None = None) -> Iterator[str]:
    """Lines of a file, or of standard input for "-".

    Args:
        path: of the file.
        column: of tab-separated values, from 1.

    Raises:
        OptionError: no such file, or a line that is not UTF-8 or without this column.
    """
    if str(path) == "-":
        lines: Any = sys.stdin.buffer
        if sys.stdin.isatty():
            echo_to_stderr("reading standard input, a text a line")
    elif path.is_file():
        lines = path.open("rb")
    else:
        raise OptionError(f"{path}: no such file")
    with lines:
        for number, line in enumerate(lines, 1):
            try:
                text = line.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError:
                raise OptionError(f"{path}, line {number}: not UTF-8") from None
            if column is not None:
                cells = text.split("\t")
                if len(cells) < column:
                    raise OptionError(
                        f"{path}, line {number}: column {column} of {len(cells)} columns"
                    )
                text = cells[column - 1]
            yield text
