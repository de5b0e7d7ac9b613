"""Options of drawing tokens at random, as `translate` and `generate` have them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from subquad.errors import OptionError

__all__ = ["Sample", "Seed", "Temperature", "TopK", "TopP", "sampling_of"]

Sample = Annotated[bool, typer.Option("--sample", help="Draw tokens at random.")]
Temperature = Annotated[float, typer.Option(help="Of sampling; below 1: safer.")]
TopK = Annotated[int, typer.Option(min=0, help="Draw from the k likeliest; 0: all.")]
TopP = Annotated[
    float, typer.Option(help="Draw from the likeliest that together have this probability.")
]
Seed = Annotated[int, typer.Option(min=0, help="Of sampling.")]


def sampling_of(
    sample: bool, beams: int | None, temperature: float, top_k: int, top_p: float, seed: int
) -> Any:
    """A `subquad.generation.Sampling`; None where tokens are not drawn.

    Args:
        sample, temperature, top_k, top_p, seed: the options.
        beams: likewise; None where they are not given.

    Raises:
        OptionError: for values that cannot be, and options that would do nothing.
    """
    if not sample:
        if (temperature, top_k, top_p) != (1.0, 0, 1.0):
            raise OptionError("--temperature, --top-k and --top-p need --sample")
        return None
    if beams is not None:
        raise OptionError("--sample draws and --beams searches: leave one of them out")
    from subquad.generation import Sampling

    return Sampling(temperature, top_k, top_p, seed)
