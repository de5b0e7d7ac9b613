"""``subquad compare``: what a swap costs a given model on a given text."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subquad import pages, registry
from subquad.cli.common import Json, consoles, write_json
from subquad.errors import OptionError
from subquad.options import parse_spec

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["add"]


def add(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command(
        "compare",
        epilog="Example: [bold]subquad compare minilm --mechanism near_far"
        " --mechanism 'performer(features=512)' --text notes.txt --lengths 128,512"
        " --html out/compare.html[/bold]",
    )(_compare)


def _names_mechanism(text: str) -> bool:
    try:
        return parse_spec(text).name in registry.MECHANISMS
    except OptionError:
        return False


def _lengths(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        found = ()
    if text and (not found or min(found) < 1):
        raise OptionError(f"--lengths {text!r} must be integers ≥ 1 with commas, as in 512,2048")
    return found


def _heads(values: list[str]) -> list[tuple[str | int, int]]:
    """``layer:head`` pairs; a layer is an index or a name."""
    pairs: list[tuple[str | int, int]] = []
    for value in values:
        layer, mark, head = value.rpartition(":")
        if not mark or not head.isdigit() or not layer:
            raise OptionError(f"--head {value!r} must be layer:head, as in 0:3")
        pairs.append((int(layer) if layer.isdigit() else layer, int(head)))
    return pairs


def _compare(
    model: Annotated[
        str, typer.Argument(help="'minilm' (packaged), or a folder with a transformers model.")
    ] = "minilm",
    mechanism: Annotated[
        list[str] | None,
        typer.Option(
            "--mechanism",
            "-m",
            help="What to swap in; may be given again. Default: near_far, or what a folder that "
            "was saved converted has.",
        ),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="A text file, one paragraph a line; default: packaged.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=8, help="Longest passage, in tokens.")] = 256,
    passages: Annotated[int, typer.Option(min=1, help="Number of passages.")] = 4,
    batch_size: Annotated[int, typer.Option(min=1, help="Passages in a forward call.")] = 4,
    lengths: Annotated[
        str, typer.Option(help="Also time and memory at these lengths, as in 512,2048.")
    ] = "",
    head: Annotated[
        list[str] | None,
        typer.Option(help="Draw this head's attention, as layer:head; may be given again."),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page that stands alone.")] = None,
    seed: Annotated[int, typer.Option(help="Of all random draws.")] = 0,
    as_json: Json = False,
) -> None:
    """Compare a model with its swapped self: errors of layers and heads, outputs, time."""
    for spec in mechanism or ():  # names and options are checked before anything is loaded
        registry.resolve(spec)
    if model != "minilm" and not Path(model).is_dir() and _names_mechanism(model):
        raise OptionError(
            f"{model!r} is a mechanism, not a model: give it as --mechanism {model!r}"
        )
    if text is not None and not text.is_file():
        raise OptionError(f"--text {text}: no such file")
    sizes, heads = _lengths(lengths), _heads(head or [])
    if html is not None:
        pages.need_matplotlib()
    from subquad.arena import encoders
    from subquad.convert import compare, convert, revert
    from subquad.convert.report import save_html
    from subquad.convert.swap import converted_layers

    console = consoles(as_json)
    with console.status("loading the model") as status:
        encoder = encoders.load_encoder(model, head=model != "minilm")
        content = text.read_text(encoding="utf-8") if text else encoders.packaged_text()
        size = min(tokens, encoder.max_length)
        ids, available = encoders.passages(content, encoder.tokenizer, tokens=size, count=passages)
        groups = [ids[start : start + batch_size] for start in range(0, len(ids), batch_size)]
        batches = [_batch(encoder, group, index) for index, group in enumerate(groups)]
        saved = bool(converted_layers(encoder.model)) and not mechanism
        results = []

        def say(shown: str, step: str) -> None:
            status.update(f"{shown}: {step}")

        for spec in [""] if saved else mechanism or ["near_far"]:
            if spec:
                convert(encoder.model, spec, seed=seed)
            shown = spec or "the saved mechanisms"
            results.append(
                compare(
                    encoder.model,
                    batches,
                    lengths=sizes,
                    pictures=heads or (3 if html else 0),
                    progress=partial(say, shown),
                )
            )
            if spec:
                revert(encoder.model)
        if html is not None:
            status.update("the page")
            read = f"{len(ids)} of {available} passages of at most {size} tokens"
            save_html(results, html, name=encoder.name, text=read)
    if as_json:
        write_json({"model": encoder.name, "comparisons": [one.to_dict() for one in results]})
        return
    for one in results:
        console.print(f"\n{encoder.name}: {one}", markup=False, highlight=False, soft_wrap=True)
    if html is not None:
        console.print(f"\npage: {html}", markup=False, highlight=False, soft_wrap=True)


def _batch(encoder: Any, ids: list[list[int]], seed: int) -> dict[str, Tensor]:
    """Inputs of the model's kind: a decoder's own, or masked tokens to be predicted."""
    from subquad.arena.encoders import batch

    tokenizer, config = encoder.tokenizer, encoder.model.config
    inputs = batch(ids, int(tokenizer.pad_token_id or 0))
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = inputs["input_ids"]
        inputs["decoder_attention_mask"] = inputs["attention_mask"]
    elif "MaskedLM" in type(encoder.model).__name__ and tokenizer.mask_token_id is not None:
        inputs |= _masked(inputs, int(tokenizer.mask_token_id), seed)
    return inputs


def _masked(inputs: dict[str, Tensor], mask_token: int, seed: int) -> dict[str, Tensor]:
    """15% of the tokens masked, and labels that ask for them: BERT's task."""
    import torch

    ids, generator = inputs["input_ids"], torch.Generator().manual_seed(seed)
    picked = (torch.rand(ids.shape, generator=generator) < 0.15) & inputs["attention_mask"].bool()
    return {
        "input_ids": ids.masked_fill(picked, mask_token),
        "labels": ids.masked_fill(~picked, -100),
    }
