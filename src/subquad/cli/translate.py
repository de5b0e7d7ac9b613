"""``subquad translate``: texts through a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from subquad.cli.common import Json, consoles, write_json
from subquad.cli.sampling import Sample, Seed, Temperature, TopK, TopP, sampling_of
from subquad.cli.saved import Device, load_model, read_lines, recipe_of
from subquad.errors import OptionError

__all__ = ["add"]


def add(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command(
        "translate",
        epilog="Example: [bold]subquad translate run new.tsv --column 1 --out new.txt[/bold]",
    )(_translate)


def _translate(
    model: Annotated[Path, typer.Argument(help="Folder of a run, or of a saved model.")],
    file: Annotated[
        Path,
        typer.Argument(
            help="A text a line; of a speech model WAV files; '-': standard input.",
            allow_dash=True,
        ),
    ] = Path("-"),
    column: Annotated[
        int | None, typer.Option(min=1, help="Column of tab-separated lines; default: the line.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File for the translations.")] = None,
    beams: Annotated[int | None, typer.Option(min=1, help="Beam width; 1: greedy.")] = None,
    length_penalty: Annotated[
        float | None, typer.Option(help="Scores are divided by length to this power.")
    ] = None,
    n_best: Annotated[int, typer.Option(min=1, help="Translations of each text.")] = 1,
    alignment: Annotated[
        bool, typer.Option("--alignment", help="Source-target pairs of tokens, as 0-0 1-2.")
    ] = False,
    sample: Sample = False,
    temperature: Temperature = 1.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    iterations: Annotated[
        int | None,
        typer.Option(min=1, help="Passes of a model that writes all tokens at once."),
    ] = None,
    batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="Source tokens that are translated at once.")
    ] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Translate texts, one a line, with the best model of a run.

    What is not given has the value of the run's recipe. With --n-best lines are number, score
    and text; with --alignment the pairs of tokens follow behind a tab. --sample draws in place
    of searching. A speech model takes a WAV file, or a list of them, one a line: the first
    column of a manifest, relative to it.
    """
    if out is not None and as_json:
        raise OptionError("--out takes the plain translations: leave one of --out, --json out")
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise OptionError(f"--out {out} must be a file in a folder that there is")
    drawn = sampling_of(sample, beams, temperature, top_k, top_p, seed)
    loaded, tokenizer = load_model(model, "AutoModelForSeq2SeqLM", device)
    if iterations is not None and getattr(loaded, "autoregressive", True):
        raise OptionError("--iterations is for models that write all tokens at once (task nat)")
    sound = getattr(loaded, "front_end", None) is not None
    if sound and file.suffix.lower() == ".wav":
        texts = [file.name]
    else:
        texts = list(read_lines(file, column or (1 if sound else None)))
    from subquad.generation import Translator, transcribe
    from subquad.training.tasks.translation import decoding_options

    recipe = recipe_of(model)
    options: dict[str, Any] = {} if recipe is None else decoding_options(recipe)
    given = {
        "beams": beams,
        "length_penalty": length_penalty,
        "batch_tokens": batch_tokens,
        "sampling": drawn,
        "iterations": iterations,
    }
    options |= {name: value for name, value in given.items() if value is not None}
    if not sample and n_best > options.get("beams", n_best):
        raise OptionError(f"--n-best {n_best} needs --beams {n_best} or more")
    translator = Translator(loaded, tokenizer, n_best=n_best, alignment=alignment, **options)
    console = consoles(as_json=True)  # standard output is for translations
    with console.status("translating") as status:

        def tell(done: int, count: int) -> None:
            status.update(f"translated {done} of {count}")

        if sound:
            found = transcribe(translator, [file.parent / name for name in texts], tell)
        else:
            found = translator.translate(texts, tell)
    for kind, lines in translator.report(found).items():
        shown = ", ".join(map(str, lines[:10])) + (", …" if len(lines) > 10 else "")
        console.print(f"note: {kind}: line {shown}", markup=False, highlight=False)
    if as_json:
        write_json([
            {"source": text, "translations": [_plain(one) for one in best.n_best]}
            for text, best in zip(texts, found, strict=True)
        ])  # fmt: skip
        return
    written = []
    for number, best in enumerate(found, 1):
        for one in best.n_best:
            line = one.text if n_best == 1 else f"{number}\t{one.score:.4f}\t{one.text}"
            written.append(line + (f"\t{_pairs(one)}" if alignment else "") + "\n")
    if out is None:
        typer.echo("".join(written), nl=False)
    else:
        out.write_text("".join(written), encoding="utf-8")


def _pairs(one: Any) -> str:
    return " ".join(f"{i}-{j}" for i, j in one.alignment.pairs()) if one.alignment else ""


def _plain(one: Any) -> dict[str, Any]:
    found = {"text": one.text, "score": one.score, "tokens": one.tokens, "notes": one.notes}
    if one.alignment is not None:
        found["alignment"] = one.alignment.pairs()
    return found
