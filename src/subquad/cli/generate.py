"""``subquad generate``: a trained language model goes on with a text."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from subquad.cli.common import Json, write_json
from subquad.cli.saved import load_model
from subquad.errors import OptionError

__all__ = ["add"]


def add(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command(
        "generate",
        epilog="Example: [bold]subquad generate run 'In the beginning' --sample --top-p 0.9[/bold]",
    )(_generate)


def _generate(
    model: Annotated[Path, typer.Argument(help="Folder of a run, or of a saved model.")],
    prompt: Annotated[str, typer.Argument(help="The text to go on with.")] = "",
    tokens: Annotated[int, typer.Option(min=1, help="New tokens at most.")] = 100,
    count: Annotated[int, typer.Option(min=1, help="Continuations.")] = 1,
    beams: Annotated[int, typer.Option(min=1, help="Beam width; 1: greedy or sampling.")] = 1,
    sample: Annotated[bool, typer.Option("--sample", help="Draw tokens at random.")] = False,
    temperature: Annotated[float, typer.Option(help="Of sampling; below 1: safer.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Draw from the k likeliest; 0: all.")] = 0,
    top_p: Annotated[
        float, typer.Option(help="Draw from the likeliest that together have this probability.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
    as_json: Json = False,
) -> None:
    """Continue a text: greedy, by beam search, or by sampling."""
    drawn = (temperature, top_k, top_p) != (1.0, 0, 1.0)
    if drawn and not sample:
        raise OptionError("--temperature, --top-k and --top-p need --sample")
    if not (0.0 < temperature < math.inf and 0.0 < top_p <= 1.0):
        raise OptionError("--temperature must be > 0 and finite, and --top-p > 0 and ≤ 1")
    if count > 1 and not sample and count > beams:
        raise OptionError(f"--count {count} needs --sample, or --beams {count} or more")
    import torch

    loaded, tokenizer = load_model(model, "AutoModelForCausalLM")
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    start = [tokenizer.eos_token_id, *ids]  # where a text begins, the one before has ended
    options: dict[str, Any] = {"num_beams": beams, "num_return_sequences": count}
    if sample:
        options |= {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    torch.manual_seed(seed)
    with torch.no_grad():
        out = loaded.generate(
            torch.tensor([start]), max_new_tokens=tokens, do_sample=sample, **options
        )
    texts = tokenizer.batch_decode(out, skip_special_tokens=True)
    if as_json:
        write_json({"prompt": prompt, "texts": texts})
    else:
        typer.echo("\n\n".join(texts))
