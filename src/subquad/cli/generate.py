"""``subquad generate``: a trained language model goes on with a text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from subquad.cli.common import Json, write_json
from subquad.cli.sampling import Sample, Seed, Temperature, TopK, TopP, sampling_of
from subquad.cli.saved import Device, load_model
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
    beams: Annotated[int | None, typer.Option(min=1, help="Beam width; default: greedy.")] = None,
    sample: Sample = False,
    temperature: Temperature = 1.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Continue a text: greedy, by beam search, or by sampling."""
    drawn = sampling_of(sample, beams, temperature, top_k, top_p, seed)
    if not sample and count > (beams or 1):
        raise OptionError(f"--count {count} needs --sample, or --beams {count} or more")
    import torch

    loaded, tokenizer = load_model(model, "AutoModelForCausalLM", device)
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    start = [tokenizer.eos_token_id, *ids]  # where a text begins, the one before has ended
    options: dict[str, Any] = {"num_beams": beams or 1, "num_return_sequences": count}
    if drawn is not None:
        options |= {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        torch.manual_seed(seed)
    with torch.no_grad():
        out = loaded.generate(
            torch.tensor([start], device=loaded.device),
            max_new_tokens=tokens,
            do_sample=sample,
            **options,
        )
    texts = tokenizer.batch_decode(out, skip_special_tokens=True)
    if as_json:
        write_json({"prompt": prompt, "texts": texts})
    else:
        typer.echo("\n\n".join(texts))
