"""``subquad score``: BLEU, chrF and TER of translations, by sacrebleu."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from subquad.cli.common import Json, consoles, write_json
from subquad.cli.saved import read_lines
from subquad.errors import OptionError

__all__ = ["add"]


def add(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command("score", epilog="Example: [bold]subquad score hypotheses.txt reference.txt[/bold]")(
        _score
    )


def _score(
    files: Annotated[
        list[Path],
        typer.Argument(help="Translations, one a line; of several systems; last the reference."),
    ],
    ter: Annotated[bool, typer.Option("--ter", help="Translation edit rate too.")] = False,
    confidence: Annotated[
        bool,
        typer.Option("--confidence", help="95% intervals; of several systems, p-values."),
    ] = False,
    samples: Annotated[int, typer.Option(min=2, help="Bootstrap samples.")] = 1000,
    lowercase: Annotated[bool, typer.Option("--lowercase", help="Ignore case.")] = False,
    tokenize: Annotated[
        str, typer.Option(help="sacrebleu's tokenizer for BLEU; zh, ja-mecab and ko-mecab too.")
    ] = "13a",
    as_json: Json = False,
) -> None:
    """Score translations against a reference: BLEU and chrF with their signatures.

    Intervals come from bootstrap resampling of sentences (Koehn 2004). With several systems and
    --confidence each is compared with the first by paired bootstrap resampling.
    """
    if len(files) < 2:
        raise OptionError("give two files or more: translations, and last the reference")
    *systems, path = files
    reference = list(read_lines(path))
    found: dict[str, list[str]] = {}
    for system in systems:
        lines = found[str(system)] = list(read_lines(system))
        if len(lines) != len(reference):
            raise OptionError(f"{system} has {len(lines)} lines, {path} has {len(reference)}")
    if not reference:
        raise OptionError(f"{path} is empty")
    rows = scores(
        found, reference, ter=ter, samples=samples if confidence else 0,
        lowercase=lowercase, tokenize=tokenize,
    )  # fmt: skip
    if as_json:
        write_json({"reference": str(path), "lines": len(reference), "systems": rows})
        return
    console = consoles(as_json)
    table = Table("system", *(row["metric"] for row in rows[0]["scores"]), box=None)
    for row in rows:
        table.add_row(row["system"], *(_shown(one) for one in row["scores"]))
    console.print(table)
    for one in rows[0]["scores"]:
        console.print(
            f"{one['metric']}: {one['signature']}", markup=False, highlight=False, soft_wrap=True
        )


def _shown(one: dict[str, Any]) -> str:
    text = f"{one['score']:.2f}"
    if "low" in one:
        text += f" [{one['low']:.2f}, {one['high']:.2f}]"
    return text + (f", p = {one['p']:.4f}" if "p" in one else "")


def scores(
    systems: dict[str, list[str]],
    reference: list[str],
    *,
    ter: bool,
    samples: int,
    lowercase: bool,
    tokenize: str,
) -> list[dict[str, Any]]:
    """For each system its name, and its scores by each metric.

    Args:
        systems: lines of each by name.
        reference: its lines.
        ter: with the edit rate.
        samples: of the bootstrap; 0 for none.
        lowercase: ignore case.
        tokenize: sacrebleu's name.

    Raises:
        ImportError: sacrebleu is missing.
        OptionError: no such tokenizer.
    """
    try:
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF
        from sacrebleu.metrics.ter import TER
        from sacrebleu.significance import PairedTest
    except ImportError as error:
        raise ImportError("scores need pip install 'subquad[train]'") from error
    known = BLEU.TOKENIZERS
    if tokenize not in known:
        raise OptionError(f"--tokenize {tokenize!r} is none of {', '.join(known)}")

    def metrics() -> dict[str, Any]:
        made = {
            "BLEU": BLEU(lowercase=lowercase, tokenize=tokenize),
            "chrF": CHRF(lowercase=lowercase),
        }
        return {**made, "TER": TER(case_sensitive=not lowercase)} if ter else made

    rows: list[dict[str, Any]] = []
    for name, lines in systems.items():
        row: list[dict[str, Any]] = []
        for title, metric in metrics().items():
            score = metric.corpus_score(lines, [reference], n_bootstrap=samples or 1)
            one: dict[str, Any] = {
                "metric": title, "score": score.score, "signature": str(metric.get_signature()),
            }  # fmt: skip
            if samples:
                one |= {"low": score._mean - score._ci, "high": score._mean + score._ci}
            row.append(one)
        rows.append({"system": name, "scores": row})
    if samples and len(systems) > 1:
        test = PairedTest(
            list(systems.items()), metrics(), [reference], test_type="bs", n_samples=samples
        )
        results: dict[str, Any] = test()[1]
        for title in results.keys() - {"System"}:
            for system, result in zip(rows[1:], results[title][1:], strict=True):
                mine = next(one for one in system["scores"] if title.startswith(one["metric"]))
                mine["p"] = result.p_value
    return rows
