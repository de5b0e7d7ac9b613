"""Speech recognition from scratch on 20 minutes of speech: what guided attention changes.

The prompts of one speaker, 546 clips with transcripts, are far too few to learn to read speech:
what is measured is how soon cross-attention finds the diagonal, and how much of what was seen,
and of what was not, a small model then writes down.
"""

from __future__ import annotations

import contextlib
import json as json_module
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from subquad.arena import corpora
from subquad.arena.conversion import section
from subquad.arena.conversion.speech import normalised
from subquad.arena.machine import machine
from subquad.arena.zoo import Zoo

__all__ = ["run"]

MECHANISMS = ("softmax", "performer")
GUIDED = {"loss": "diagonal", "weight": 100.0}
"""A mean over all pairs falls with 1/keys; clips have 60 keys on average."""

TEST, VALID = 60, 40
STEPS, EVERY = 1500, 100
SHOWN = (100, 200, 400, 800, 1500)
"""Steps at which the table shows diagonality."""


def run(
    out: Path,
    quick: bool,
    json: bool,
    echo: Callable[[str], None],
    texts: Path | None = None,
    work: Path | None = None,
) -> dict[str, Any]:
    """Trains each mechanism with and without guidance; writes ``asr.json`` and ``asr.md``.

    Args:
        out: folder for the results.
        quick: a few steps on a few clips, to see whether it runs.
        json: whether the caller wants nothing but the result.
        echo: shows progress.
        texts: where the prompts lie, see `Zoo.default`.
        work: folder for the runs; those that it holds are continued or taken as they are.

    Raises:
        OptionError, ImportError: the prompts, or a package, are missing; says how to get them.
    """
    zoo, start = Zoo.default(texts=texts), time.perf_counter()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _folder(work) as folder:
            counts = _manifests(zoo, folder, quick)
            rows = [
                _measured(folder, mechanism, guided, quick, echo)
                for mechanism in MECHANISMS
                for guided in (False, True)
            ]
    finally:
        torch.set_num_threads(before)
    result = {
        "title": "Speech recognition from scratch, with and without guided attention",
        "command": "subquad bench asr" + " --quick" * quick,
        "quick": quick,
        "seconds": time.perf_counter() - start,
        "machine": machine(threads=1),
        "settings": {
            "clips": "{train} to train on, {valid} to choose the checkpoint by, {test} to test, "
            "all of one speaker; no test text is trained on".format(**counts),
            "recipe": "`asr`, letters; the same seed, batches and steps in all rows",
        },
        "rows": rows,
        "notes": NOTES,
    }
    out.mkdir(parents=True, exist_ok=True)
    text = json_module.dumps(result, indent=1, ensure_ascii=False) + "\n"
    (out / "asr.json").write_text(text, encoding="utf-8")
    page = "\n".join([f"# {result['title']}", "", *section(result, _table(rows)), ""])
    (out / "asr.md").write_text(page, encoding="utf-8")
    if not json:
        echo(page)
    return result


NOTES = [
    "*diagonality* is the share of cross-attention within a tenth of the diagonal, on the "
    "validation clips, mean over layers and heads, after so many steps (uniform attention: 0.19). "
    "*WER, CER*: errors per word and per letter, five beams. *CER, other text*: the same outputs "
    "against the text of another clip: where it is no higher than CER, the sound was not used.",
    "A single seed, and one speaker: differences of a few hundredths mean nothing.",
]


@contextlib.contextmanager
def _folder(work: Path | None) -> Iterator[Path]:
    if work is None:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
    else:
        work.mkdir(parents=True, exist_ok=True)
        yield work


def _manifests(zoo: Zoo, folder: Path, quick: bool) -> dict[str, int]:
    """Writes train.tsv, valid.tsv and test.tsv; returns how many clips each has."""
    sounds = zoo.text("speech").resolve()
    lines = [
        (f"{sounds / clip.name}.wav", " ".join(normalised(clip.text)))
        for clip in corpora.speech(zoo, words=1, rate=8000)
    ]
    lines = [(path, text) for path, text in lines if text]
    order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(0)).tolist()
    mixed = [lines[index] for index in order]
    said = [text for _, text in lines]
    alone = [line for line in mixed if said.count(line[1]) == 1]
    parts = {"test": alone[:TEST], "valid": alone[TEST : TEST + VALID]}
    apart = {*parts["test"], *parts["valid"]}
    parts["train"] = [line for line in mixed if line not in apart]
    for name, part in parts.items():
        chosen = part[:12] if quick else part
        text = "".join(f"{path}\t{what}\n" for path, what in chosen)
        (folder / f"{name}.tsv").write_text(text, encoding="utf-8")
        parts[name] = chosen
    return {name: len(part) for name, part in parts.items()}


def _measured(
    folder: Path, mechanism: str, guided: bool, quick: bool, echo: Callable[[str], None]
) -> dict[str, Any]:
    """Trains one model, and says what it writes of clips that it has, and has not, seen."""
    from subquad.training.recipe import Recipe
    from subquad.training.run import line, train

    recipe = Recipe.load(
        "asr",
        {
            "model.mechanism": mechanism,
            "objective.guided": GUIDED if guided else None,
            "data.train": str(folder / "train.tsv"),
            "data.valid": str(folder / "valid.tsv"),
            "training.steps": 20 if quick else STEPS,
            "training.epochs": None,
            "training.threads": 1,
            "evaluation.every": 10 if quick else EVERY,
            "evaluation.decode": 0,
        },
    )
    place = folder / f"{mechanism}-{'guided' if guided else 'free'}"
    curve: list[dict[str, Any]] = []
    begun = time.process_time()
    report = train(recipe, place, progress=lambda point: echo(f"{place.name}: {line(point)}"))
    seconds = None if report.resumed else time.process_time() - begun
    for text in (place / "log.jsonl").read_text(encoding="utf-8").splitlines():
        point = json_module.loads(text)
        if point["kind"] == "valid":
            curve.append({name: point[name] for name in ("step", "loss", "diagonality")})
    row: dict[str, Any] = {
        "mechanism": mechanism,
        "guided": guided,
        "parameters": report.parameters,
        "steps": report.steps,
        "cpu_seconds": seconds,
        "best": report.best,
        "curve": curve,
    }
    for name in ("test", "train"):
        row[name] = _answers(recipe, place, folder / f"{name}.tsv")
        echo(f"{place.name}, {name}: WER {row[name]['wer']:.3f}, CER {row[name]['cer']:.3f}")
    return row


def _answers(recipe: Any, place: Path, manifest: Path) -> dict[str, Any]:
    """Error rates of the best checkpoint on a manifest's first clips, and a few transcripts."""
    from transformers import AutoTokenizer

    from subquad.data.audio import Speech
    from subquad.data.edits import error_rate
    from subquad.generation import Translator, transcribe
    from subquad.models import Seq2SeqTransformer
    from subquad.training.tasks.translation import decoding_options
    from subquad.training.trainer import quiet

    with quiet():
        model = Seq2SeqTransformer.from_pretrained(place / "best").eval()
    tokenizer = AutoTokenizer.from_pretrained(place / "best")
    translator = Translator(model, tokenizer, **decoding_options(recipe))
    clips = Speech(manifest)[:TEST]
    found = [one.text for one in transcribe(translator, [path for path, _ in clips])]
    wanted = [text for _, text in clips]
    others = [*wanted[1:], wanted[0]]
    return {
        "clips": len(clips),
        "wer": error_rate(_words(wanted), _words(found)),
        "cer": error_rate(wanted, found),
        "cer_other": error_rate(others, found),
        "examples": [list(pair) for pair in zip(wanted, found, strict=True)][:5],
    }


def _words(texts: Sequence[str]) -> list[list[str]]:
    return [text.split() for text in texts]


def _table(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows for Markdown."""
    table = []
    for row in rows:
        at = {point["step"]: point["diagonality"] for point in row["curve"]}
        seconds = row["cpu_seconds"]
        table.append({
            "mechanism": row["mechanism"],
            "guided": "yes" if row["guided"] else "no",
            **{f"diagonality, step {step}": at.get(step) for step in SHOWN},
            "best validation loss": row["best"]["loss"],
            "test WER": row["test"]["wer"],
            "test CER": row["test"]["cer"],
            "test CER, other text": row["test"]["cer_other"],
            "training clips CER": row["train"]["cer"],
            "CPU minutes": None if seconds is None else seconds / 60,
        })  # fmt: skip
    return table
