"""``subquad suggest``: which mechanism, of which size, for a given model at a given length."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from subquad import registry
from subquad.cli.common import Json, consoles, write_json
from subquad.errors import OptionError

__all__ = ["add"]


def add(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command(
        "suggest",
        epilog="Example: [bold]subquad suggest minilm --length 4096 --error 0.05[/bold]",
    )(_suggest)


def _suggest(
    model: Annotated[
        str, typer.Argument(help="'minilm' (packaged), or a folder with a transformers model.")
    ] = "minilm",
    length: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens to choose for; default: those of the passages."),
    ] = None,
    error: Annotated[
        float, typer.Option(help="Largest relative error of the attention output.")
    ] = 0.05,
    mechanism: Annotated[
        list[str] | None,
        typer.Option("--mechanism", "-m", help="A candidate; may be given again."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="A text file, one paragraph a line; default: packaged.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=8, help="Longest passage, in tokens.")] = 512,
    passages: Annotated[int, typer.Option(min=1, help="Number of passages.")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls of each candidate.")] = 3,
    seed: Annotated[int, typer.Option(help="Of all random draws.")] = 0,
    as_json: Json = False,
) -> None:
    """Measure mechanisms on a model's own attention, on this device, and recommend one."""
    for spec in mechanism or ():  # names and options are checked before anything is loaded
        registry.resolve(spec)
    if text is not None and not text.is_file():
        raise OptionError(f"--text {text}: no such file")
    from subquad.arena import encoders
    from subquad.convert.suggest import suggest

    console = consoles(as_json)
    with console.status("loading the model") as status:
        encoder = encoders.load_encoder(model)
        content = text.read_text(encoding="utf-8") if text else encoders.packaged_text()
        size = min(tokens, encoder.max_length)
        ids, _ = encoders.passages(content, encoder.tokenizer, tokens=size, count=passages)
        inputs = encoders.batch(ids, int(encoder.tokenizer.pad_token_id or 0))
        if getattr(encoder.model.config, "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = inputs["input_ids"]
        status.update("measuring")
        found = suggest(
            encoder.model,
            inputs,
            length=length,
            error=error,
            mechanisms=mechanism,
            repeats=repeats,
            seed=seed,
        )
    if as_json:
        write_json({"model": encoder.name, **found.to_dict()})
        return
    console.print(f"\n{encoder.name}: {found}", markup=False, highlight=False, soft_wrap=True)
