"""`subquad bench translation`: one recipe, one line changed, and what each attention translates.

Every model is trained by the same shipped recipe on the same pairs, 4 + 4 layers, 128 wide; only
the attention differs. The numbers are sacrebleu's on the test set, for greedy search and beams, the
time of training, and the time of decoding, in which models take turns. Training is by
`subquad train` into a folder of runs, which a stopped study continues from.

Multi30k (Elliott et al. 2016) is not part of the package: give a folder with train.en, train.de,
val.en, val.de, test_2016_flickr.en and test_2016_flickr.de, or with other languages and tests by
`pair` and `test`.
"""

from __future__ import annotations

import json as json_module
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from subquad.arena.machine import machine, machine_line
from subquad.errors import OptionError

__all__ = ["ENTRIES", "Entry", "measure", "measure_files", "run", "table"]

RECIPE = "multi30k"
BEAMS = 5
TIMED = 200
"""Test sentences that decoding is timed on."""

TEACHER = "softmax"
"""Whose translations the non-autoregressive model is trained on."""

PERFORMER = "performer(features=128, estimator=relu)"
"""Trained from scratch, its kernel is worth more than an estimate of softmax with as many."""

ESTIMATE = "performer(features=256)"


@dataclass(frozen=True)
class Entry:
    """One row.

    Args:
        name: of the row and of its run's folder.
        settings: what differs from the recipe, by dotted keys.
        note: what to know about it.
        distilled: whether it is trained on the teacher's translations.
        recovered: whether it starts from the teacher's weights.
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    distilled: bool = False
    recovered: bool = False


ENTRIES = (
    Entry("softmax", note="exact attention everywhere"),
    Entry("performer", {"model.mechanism": PERFORMER}, PERFORMER),
    Entry(
        "recovered",
        {
            "model.mechanism": ESTIMATE,
            "optimiser.rate": 1.5e-3,
            "optimiser.warm_up": 200,
            "training.epochs": 12,
        },
        f"{ESTIMATE} in the trained softmax model, 12 more epochs",
        recovered=True,
    ),
    Entry("linear", {"model.mechanism": "linear"}),
    Entry(
        "linformer",
        {
            "model.mechanism": "linformer(k=64)",
            "model.decoder_mechanism": "softmax",
        },
        "has no causal form: the decoder's self-attention is exact",
    ),
    Entry(
        "near_far",
        {
            "model.mechanism": "near_far(window=4, heavy=4, far=key_clusters(clusters=8))",
            "model.decoder_mechanism": "near_far(window=4, heavy=4)",
            "model.cross_mechanism": PERFORMER,
        },
        "4 keys on each side, 4 heavy ones and 8 clusters; the decoder reads 12 keys it holds; its "
        f"cross-attention would see later queries: {PERFORMER} there",
    ),
    Entry(
        "nat",
        {
            "task": "nat",
            "model.dropout": 0.25,
            "optimiser.rate": 4e-3,
            "optimiser.schedule": "cosine",
            "optimiser.warm_up": 1000,
            "training.epochs": 64,
            "training.precision": "bfloat16",
            "evaluation.patience": None,
            "evaluation.average": 5,
        },
        "non-autoregressive, 4 passes of mask-predict, trained on the translations of softmax",
        distilled=True,
    ),
)


def run(
    out: Path,
    data: Path,
    runs: Path,
    *,
    only: Iterable[str] = (),
    pair: str = "en-de",
    test: str = "test_2016_flickr",
    settings: dict[str, Any] | None = None,
    quick: bool = False,
    json: bool = False,
    echo: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Trains what is not trained yet, measures it, and writes translation.{json,md} into `out`.

    Args:
        out: folder for the results.
        data: folder of the corpus.
        runs: folder of the training runs, one for each entry.
        only: names of entries; default: all.
        pair: suffixes of source and target files.
        test: name of the test files.
        settings: more settings of the recipe, for all entries.
        quick: a few steps and sentences, to see that everything works.
        json: whether the caller wants nothing but the result.
        echo: shows progress.

    Raises:
        OptionError: unknown entries, or missing files.
    """
    chosen = _chosen(only)
    files = _files(data, pair, test)
    settings = dict(settings or {})
    if quick:
        settings |= {"training.steps": 4, "evaluation.decode": 8, "evaluation.average": 1}
    out.mkdir(parents=True, exist_ok=True)
    path = out / "translation.json"
    held = json_module.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    rows = {row["name"]: row for row in held.get("rows", [])}
    for entry in chosen:
        report = _trained(entry, files, runs, settings, echo)
        rows[entry.name] = measure(entry, runs / entry.name, report, files["test"], quick=quick)
        echo(_line(rows[entry.name]))
        ordered = [rows[one.name] for one in ENTRIES if one.name in rows]
        result = {
            "machine": machine(threads=1),
            "corpus": {"name": data.name, "pair": pair, "test": test},
            "recipe": RECIPE,
            "settings": settings,
            "rows": ordered,
        }
        text = json_module.dumps(result, indent=1, ensure_ascii=False) + "\n"
        path.write_text(text, encoding="utf-8")
        (out / "translation.md").write_text(table(result), encoding="utf-8")
    if not json:
        echo(f"written: {out / 'translation.md'}")
    return result


def _chosen(only: Iterable[str]) -> list[Entry]:
    names = [entry.name for entry in ENTRIES]
    unknown = [name for name in only if name not in names]
    if unknown:
        raise OptionError(f"unknown: {', '.join(unknown)}; there are {', '.join(names)}")
    return [entry for entry in ENTRIES if not only or entry.name in only]


def _files(data: Path, pair: str, test: str) -> dict[str, tuple[Path, Path]]:
    source, sign, target = pair.partition("-")
    if not sign:
        raise OptionError(f"pair={pair!r} must be two suffixes, such as en-de")
    found = {
        split: (data / f"{name}.{source}", data / f"{name}.{target}")
        for split, name in (("train", "train"), ("valid", "val"), ("test", test))
    }
    missing = [str(path) for paths in found.values() for path in paths if not path.is_file()]
    if missing:
        raise OptionError(f"no such files: {', '.join(missing)}")
    return found


def _trained(
    entry: Entry,
    files: dict[str, tuple[Path, Path]],
    runs: Path,
    settings: dict[str, Any],
    echo: Callable[[str], None],
) -> dict[str, Any]:
    """The report of the entry's run, which is begun, continued, or there already."""
    from subquad.training.recipe import Recipe
    from subquad.training.run import line, train

    train_files: Any = [str(path) for path in files["train"]]
    own = dict(entry.settings)
    if entry.distilled:
        train_files = str(_distilled(runs, files["train"][0], echo))
        own["tokenizer.path"] = str(runs / TEACHER / "tokenizer")
    if entry.recovered:
        own["training.start"] = str(_teacher(runs))
    recipe = Recipe.load(
        RECIPE if own.get("task") is None else str(own.pop("task")),
        {
            "data.train": train_files,
            "data.valid": [str(path) for path in files["valid"]],
            **own,
            **settings,
        },
    )
    echo(f"{entry.name}: {runs / entry.name}")
    return train(
        recipe, runs / entry.name, progress=lambda point: echo(line(point)), say=echo
    ).to_dict()


def _distilled(runs: Path, sources: Path, echo: Callable[[str], None]) -> Path:
    from subquad.generation import distil

    path, teacher = runs / "distilled.tsv", _teacher(runs)
    model, tokenizer = _loaded(runs / TEACHER)
    echo(f"translating {sources.name} by {teacher}")
    texts = sources.read_text(encoding="utf-8").splitlines()
    distil(model, tokenizer, texts, path, beams=BEAMS)
    return path


def _teacher(runs: Path) -> Path:
    """Its best model."""
    teacher = runs / TEACHER / "best"
    if not teacher.is_dir():
        raise OptionError(f"{teacher}: the teacher is not trained yet; run {TEACHER} first")
    return teacher


def _loaded(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    from subquad import models

    models.register()
    model = AutoModelForSeq2SeqLM.from_pretrained(folder / "best").eval()
    return model, AutoTokenizer.from_pretrained(folder / "best")


def measure(
    entry: Entry,
    folder: Path,
    report: dict[str, Any],
    test: tuple[Path, Path],
    *,
    quick: bool = False,
) -> dict[str, Any]:
    """A row of the table: `measure_files` of an entry's trained model, and how it was trained.

    Args:
        entry: of the table.
        folder: of its run.
        report: of its training.
        test: source and reference.
        quick: few sentences.
    """
    sources, references = (path.read_text(encoding="utf-8").splitlines() for path in test)
    if quick:
        sources, references = sources[:8], references[:8]
    return {
        "name": entry.name,
        "note": entry.note,
        "settings": entry.settings,
        "parameters": report["parameters"],
        "cpu_seconds": report["cpu_seconds"],
        "epochs": report["epochs"],
        "steps": report["steps"],
        **measure_files(folder, sources, references),
    }


def measure_files(
    folder: Path, sources: list[str], references: list[str], timed: int = TIMED
) -> dict[str, Any]:
    """BLEU, chrF and CPU seconds a text of a run's best model, greedy and with beams.

    Args:
        folder: of the run.
        sources, references: texts.
        timed: the first of them, on which decoding is timed, median of three; 0: the one
            translation of all is timed, where more would take long.
    """
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    from subquad.generation import Translator

    model, tokenizer = _loaded(folder)
    found: dict[str, Any] = {}
    for name, beams in (("greedy", 1), ("beam", BEAMS)):
        translator = Translator(model, tokenizer, beams=beams)
        start = time.process_time()
        texts = [one.text for one in translator.translate(sources)]
        once = (time.process_time() - start) / len(sources)
        bleu, chrf = BLEU(), CHRF()
        found[name] = {
            "beams": beams,
            "bleu": float(bleu.corpus_score(texts, [references]).score),
            "chrf": float(chrf.corpus_score(texts, [references]).score),
            "signature": str(bleu.get_signature()),
            "seconds_a_sentence": _seconds(translator, sources[:timed]) if timed else once,
        }
    return found


def _seconds(translator: Any, sources: list[str]) -> float:
    """CPU seconds a sentence, in batches as usual; median of three."""
    times = []
    for _ in range(3):
        start = time.process_time()
        translator.translate(sources)
        times.append((time.process_time() - start) / len(sources))
    return statistics.median(times)


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['name']:10} greedy {row['greedy']['bleu']:.1f}  beam {row['beam']['bleu']:.1f}  "
        f"{row['cpu_seconds'] / 60:.0f} minutes"
    )


def table(result: dict[str, Any]) -> str:
    """The result as a Markdown page."""
    corpus, rows = result["corpus"], result["rows"]
    first = next((row for row in rows if row["name"] == TEACHER), None)
    lines = [
        "# Translation",
        "",
        f"{corpus['name']}, {corpus['pair']}, BLEU and chrF by sacrebleu on {corpus['test']}, by "
        f"the shipped recipe `{result['recipe']}`: only the attention differs from row to row. "
        "Times are CPU time of one thread: of a whole training, evaluations included, and of "
        "decoding in batches, median of three.",
        "",
        "| attention | BLEU greedy | BLEU beam | less than exact | chrF beam | parameters "
        "| minutes of training | ms a sentence greedy | beam |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        greedy, beam = row["greedy"], row["beam"]
        behind = "" if first is None else f"{first['beam']['bleu'] - beam['bleu']:+.1f}"
        lines.append(
            f"| {row['name']} | {greedy['bleu']:.1f} | {beam['bleu']:.1f} | {behind} "
            f"| {beam['chrf']:.1f} | {row['parameters'] / 1e6:.1f}M "
            f"| {row['cpu_seconds'] / 60:.0f} "
            f"| {1e3 * greedy['seconds_a_sentence']:.1f} | {1e3 * beam['seconds_a_sentence']:.1f} |"
        )
    lines += ["", "Beams: " + ", ".join(str(row["beam"]["beams"]) for row in rows[:1]) + "."]
    lines += [f"- {row['name']}: {row['note']}." for row in rows if row["note"]]
    lines += [f"- {remark}" for remark in result.get("remarks", ())]
    if rows:
        lines += ["", f"BLEU signature: `{rows[0]['beam']['signature']}`."]
    lines += ["", f"{machine_line(result['machine'])}. Again: `subquad bench translation`.", ""]
    return "\n".join(lines)
