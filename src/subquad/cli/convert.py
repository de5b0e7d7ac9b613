"""``subquad convert``: a model made linear, calibrated, recovered, measured and saved."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from subquad import registry
from subquad.cli.common import Json, consoles, echo_to_stderr, write_json
from subquad.errors import OptionError

__all__ = ["add"]

CALIBRATED = 32
"""Most passages that statistics are taken from."""

RUN = "recovery"
"""Folder of the training run, and of its curve, below --out."""


def add(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command(
        "convert",
        epilog="Example: [bold]subquad convert minilm --recover notes.txt --minutes 10"
        " --out minilm-linear[/bold]",
    )(_convert)


def _convert(
    out: Annotated[Path, typer.Option(help="Folder for the converted model and its report.")],
    model: Annotated[
        str, typer.Argument(help="'minilm' (packaged), or a folder with a transformers model.")
    ] = "minilm",
    mechanism: Annotated[
        str, typer.Option("--mechanism", "-m", help="What to swap in.")
    ] = "near_far",
    keep_exact: Annotated[
        list[str] | None,
        typer.Option(
            help="An attention module that stays exact, by name, may be given again; or how many "
            "of those that copying needs most."
        ),
    ] = None,
    calibrate: Annotated[
        Path | None, typer.Option(help="A text file that mechanisms take their statistics from.")
    ] = None,
    recover: Annotated[
        Path | None, typer.Option(help="A text file to train on, one paragraph a line.")
    ] = None,
    minutes: Annotated[float, typer.Option(help="Longest time to train.")] = 10.0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps; default: what fits in the minutes.")
    ] = None,
    method: Annotated[str, typer.Option(help="auto, transfer, lora or full.")] = "auto",
    length: Annotated[int, typer.Option(min=8, help="Longest passage, in tokens.")] = 512,
    batch: Annotated[int, typer.Option(min=1, help="Passages in a training step.")] = 8,
    accumulate: Annotated[
        int, typer.Option(min=1, help="Parts in which a step is computed, to save memory.")
    ] = 1,
    rate: Annotated[
        float | None, typer.Option(help="Learning rate; default: the method's.")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume/--fresh", help="Continue a run found in --out, or delete it."),
    ] = True,
    seed: Annotated[int, typer.Option(help="Of all random draws.")] = 0,
    as_json: Json = False,
) -> None:
    """Convert a model, calibrate it, recover it by training, and save it.

    A run that was stopped, whatever the reason, goes on when the same command is given again.
    """
    registry.resolve(mechanism)  # names and options are checked before anything is loaded
    for option, path in (("--calibrate", calibrate), ("--recover", recover)):
        if path is not None and not path.is_file():
            raise OptionError(f"{option} {path}: no such file")
    if out.is_file():
        raise OptionError(f"--out {out} is a file; give a folder")
    if out.is_dir() and Path(model).is_dir() and out.samefile(model):
        raise OptionError(f"--out {out} is the model's own folder, which would be overwritten")
    from subquad import compare, convert
    from subquad import recover as train
    from subquad.arena.encoders import batch as batch_of
    from subquad.arena.encoders import load_encoder, packaged_text, passages

    console = consoles(as_json)
    run, report, comparison = out / RUN, None, None
    with console.status("loading the model") as status:
        encoder = load_encoder(model, head=model != "minilm")
        size = min(length, encoder.max_length)
        options: dict[str, Any] = {}
        if calibrate is not None:
            options = {"calibrate": _batches(calibrate, encoder, size)}
        status.update("converting")
        conversion = convert(
            encoder.model, mechanism, keep_exact=_kept(keep_exact or []), seed=seed, **options
        )
        if not as_json:
            console.print(str(conversion), markup=False, highlight=False, soft_wrap=True)
        if recover is not None:
            if not resume and (run / "recovery.json").is_file():
                shutil.rmtree(run)
            held = (run / "recovery.json").is_file()
            status.update("recovering" + (f", continuing {run}" if held else ""))
            report = train(
                encoder.model,
                list(_texts(recover, size)),
                encoder.tokenizer,
                method=method,
                minutes=minutes,
                steps=steps,
                length=size,
                batch=batch,
                accumulate=accumulate,
                rate=rate,
                seed=seed,
                out=run,
                resume_from=run if held else None,
                progress=echo_to_stderr,
            )
            report.picture(run / "curve.png")
        else:  # recovery reports its own measurements, against the original weights
            status.update("comparing")
            content = calibrate.read_text(encoding="utf-8") if calibrate else packaged_text()
            rows, _ = passages(content, encoder.tokenizer, tokens=min(size, 256), count=4)
            comparison = compare(
                encoder.model, batch_of(rows, int(encoder.tokenizer.pad_token_id or 0)), repeats=1
            )
        status.update("saving")
        saving: Any = encoder.model
        saving.save_pretrained(out)
        encoder.tokenizer.save_pretrained(out)
    result = {
        "model": encoder.name,
        "out": str(out),
        "conversion": conversion.to_dict(),
        "recovery": None if report is None else report.to_dict(),
        "comparison": None if comparison is None else comparison.to_dict(),
    }
    if as_json:
        write_json(result)
        return
    if comparison is not None:
        console.print(f"\n{comparison}", markup=False, highlight=False, soft_wrap=True)
    if report is not None:
        console.print(f"\n{report}", markup=False, highlight=False, soft_wrap=True)
        console.print(f"  picture: {run / 'curve.png'}", markup=False, highlight=False)
    console.print(f"\nsaved: {out}", markup=False, highlight=False, soft_wrap=True)


def _batches(path: Path, encoder: Any, length: int) -> list[Any]:
    """Some batches of passages, spread evenly over the text."""
    from subquad.training.texts import collator, examples_of

    rows = examples_of(list(_texts(path, length)), encoder.tokenizer, length, "--calibrate")
    rows = rows[:: -(-len(rows) // CALIBRATED)]
    stack = collator(encoder.model, encoder.tokenizer)
    return [stack(rows[start : start + 8]) for start in range(0, len(rows), 8)]


def _kept(names: list[str]) -> int | tuple[str, ...]:
    return int(names[0]) if len(names) == 1 and names[0].isdigit() else tuple(names)


def _texts(path: Path, length: int) -> Iterator[str]:
    """Texts of about `length` tokens: lines joined until there are six characters for each."""
    room, held, size = 6 * length, [], 0
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip():
            held.append(line.strip())
            size += len(held[-1])
        if size >= room:
            yield " ".join(held)
            held, size = [], 0
    if held:
        yield " ".join(held)
