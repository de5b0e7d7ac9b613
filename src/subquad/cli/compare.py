"""``subquad compare``: what a swap costs a given model on a given text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from subquad import registry
from subquad.cli.common import Json, consoles, write_json
from subquad.errors import OptionError
from subquad.options import parse_spec

__all__ = ["add"]


def add(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command(
        "compare",
        epilog="Example: [bold]subquad compare minilm --mechanism 'performer(features=512)'"
        " --mechanism softmax --text notes.txt[/bold]",
    )(_compare)


def _names_mechanism(text: str) -> bool:
    try:
        return parse_spec(text).name in registry.MECHANISMS
    except OptionError:
        return False


def _compare(
    model: Annotated[
        str, typer.Argument(help="'minilm' (packaged), or a folder with a transformers model.")
    ] = "minilm",
    mechanism: Annotated[
        list[str] | None,
        typer.Option("--mechanism", "-m", help="What to swap in; may be given again."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="A text file, one paragraph a line; default: packaged.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=8, help="Longest passage, in tokens.")] = 256,
    passages: Annotated[int, typer.Option(min=1, help="Number of passages.")] = 4,
    seed: Annotated[int, typer.Option(help="Of all random draws.")] = 0,
    as_json: Json = False,
) -> None:
    """Compare a model with its swapped self: per-layer errors, cosine, time."""
    specs = mechanism or ["performer"]
    for spec in specs:  # names and options are checked before anything is loaded
        registry.resolve(spec)
    if model != "minilm" and not Path(model).is_dir() and _names_mechanism(model):
        raise OptionError(
            f"{model!r} is a mechanism, not a model: give it as --mechanism {model!r}"
        )
    if text is not None and not text.is_file():
        raise OptionError(f"--text {text}: no such file")
    from subquad.arena import encoders
    from subquad.convert import compare, convert, revert

    console = consoles(as_json)
    with console.status("loading the model") as status:
        encoder = encoders.load_encoder(model)
        content = text.read_text(encoding="utf-8") if text else encoders.packaged_text()
        size = min(tokens, encoder.max_length)
        ids, _ = encoders.passages(content, encoder.tokenizer, tokens=size, count=passages)
        inputs = encoders.batch(ids, int(encoder.tokenizer.pad_token_id or 0))
        if getattr(encoder.model.config, "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = inputs["input_ids"]
        results = []
        for spec in specs:
            status.update(f"comparing {spec}")
            convert(encoder.model, spec, seed=seed)
            results.append(compare(encoder.model, inputs))
            revert(encoder.model)
    if as_json:
        write_json({"model": encoder.name, "comparisons": [one.to_dict() for one in results]})
        return
    for one in results:
        console.print(f"\n{encoder.name}: {one}", markup=False, highlight=False, soft_wrap=True)
