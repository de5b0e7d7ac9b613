"""``subquad tune``: from which length on a mechanism is faster than exact attention, here."""

from __future__ import annotations

import itertools
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from subquad import registry
from subquad.attention.tuning import Tuning, tune
from subquad.cli.common import Json, consoles, write_json
from subquad.errors import OptionError

__all__ = ["add"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def add(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command(
        "tune",
        epilog='Example: [bold]subquad tune "performer(features=128)" --heads 12 --training[/bold]',
    )(_tune)


def _tune(
    mechanism: Annotated[
        list[str] | None,
        typer.Argument(help="What 'auto' shall run above the crossover; default: near_far."),
    ] = None,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 8,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, help="Key/value heads; default: as many.")
    ] = None,
    head_dim: Annotated[int, typer.Option(min=1, help="Width of a head.")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Rows of a call.")] = 1,
    causal: Annotated[
        bool | None, typer.Option("--causal/--bidirectional", help="Direction; default: both.")
    ] = None,
    training: Annotated[
        bool | None, typer.Option("--training/--forward", help="What is raced; default: both.")
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "float32",
    device: Annotated[
        str, typer.Option(help="Such as cpu or cuda; auto: a GPU if there is one.")
    ] = "auto",
    again: Annotated[bool, typer.Option("--again", help="Measure what is known, too.")] = False,
    as_json: Json = False,
) -> None:
    """Measure from which length on mechanisms are faster than exact attention, and keep it.

    mechanism="auto" then finds the answer. A shape takes a few seconds, once.
    """
    from subquad.training.run import device_of

    specs = mechanism or ["near_far"]
    for spec in specs:  # names and options are checked before anything is measured
        registry.resolve(spec)
    if dtype not in DTYPES:
        raise OptionError(f"--dtype {dtype}: must be one of {', '.join(DTYPES)}")
    place = device_of(device, "--device")
    console = consoles(as_json)
    found: list[Tuning] = []
    with console.status("measuring") as status:
        for spec in specs:
            one = tune(
                spec,
                head_dim=head_dim,
                num_heads=heads,
                num_kv_heads=kv_heads,
                batch=batch,
                causal=causal,
                training=training,
                dtype=DTYPES[dtype],
                device=place,
                again=again,
                say=lambda text: status.update(f"measuring {text}"),
            )
            found.append(one)
    tuning = Tuning(tuple(row for one in found for row in one.crossovers), found[0].folder)
    if as_json:
        write_json(tuning.to_dict())
        return
    rows = tuning.to_dict()["crossovers"]
    for name, group in itertools.groupby(rows, lambda row: row["mechanism"]):
        console.print(_table(name, list(group)))
    console.print(
        f"{tuning.place}\nkept in {tuning.folder}", markup=False, highlight=False, soft_wrap=True
    )


def _table(mechanism: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=mechanism, title_justify="left", box=None)
    for column in ("", "faster than exact from", "by FLOPs", "measured in"):
        table.add_column(column)
    for row in rows:
        length, flops = (
            "never" if row[name] is None else f"{row[name]:,} tokens"
            for name in ("crossover", "declared")
        )
        table.add_row(
            f"{'causal' if row['causal'] else 'bidirectional'}, "
            f"{'training step' if row['training'] else 'forward'}",
            length + ", extrapolated" * row["extrapolated"],
            flops,
            f"{row['seconds']:.1f} s" + ", before" * (row["source"] == "kept"),
        )
    return table
