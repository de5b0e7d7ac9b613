"""`subquad bench documents`: translating whole documents, where linear attention is for.

Two questions, one table each.

- **What a training step costs** against the number of source tokens, the target being as long: CPU
  seconds, tokens a second, and peak memory, in a process of its own that may not take more than 4
  GB beyond what it had before the model. Exact attention takes part twice: with dropout of
  attention weights as in the paper, which forms L×L weights, and without, where torch's fused
  kernel needs memory for one block.
- **What is translated** after equal training: the shipped corpus bible-es-en, verses of a book
  joined until the source has 512 tokens. Documents of so small a corpus do not teach a model to
  translate: all rows start from one with exact attention that was trained on single verses, and
  go on with documents, each with its own attention.
"""

from __future__ import annotations

import json as json_module
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from subquad.arena.figures import COLOURS, figure, label_ends
from subquad.arena.machine import machine, machine_line, peak_of, resident

__all__ = ["COSTS", "MODELS", "cost", "run", "table"]

LENGTHS = (512, 1024, 2048, 4096, 8192)
LIMIT = 4e9
"""Bytes that a training step may take."""

VOCABULARY = 8000
SIZES: dict[str, Any] = {
    "d_model": 128,
    "num_heads": 4,
    "dim_feedforward": 512,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "dropout": 0.1,
    "vocab_size": VOCABULARY,
}

FAR = "performer(features=64)"
COSTS: dict[str, dict[str, Any]] = {
    "exact, dropout of weights": {"mechanism": "softmax"},
    "exact, fused": {"mechanism": "softmax", "attention_dropout": 0.0},
    "performer": {"mechanism": FAR},
    "near_far": {
        "mechanism": f"near_far(window=32, heavy=32, far={FAR})",
        "cross_mechanism": FAR,
    },
}
"""Options of the model by the name of the row."""

MODELS = {"exact": "exact, fused", "performer": "performer", "near_far": "near_far"}
"""Rows of the translations, and whose options they have."""

TOKENS = 512
"""Source tokens from which a joined document is closed."""

VERSES = "verses"
"""The run that all rows start from, and its settings; then those of the rows."""

FIRST: dict[str, Any] = {"training.epochs": 12, "evaluation.patience": None}
THEN: dict[str, Any] = {
    "training.epochs": 3,
    "optimiser.rate": 1.5e-3,
    "optimiser.warm_up": 100,
    "evaluation.patience": None,
}


# ---- the cost of a step ----------------------------------------------------------------------


def cost(options: dict[str, Any], length: int, *, rounds: int = 2) -> dict[str, Any]:
    """CPU seconds and peak bytes of a training step, one document, in a process of its own.

    Args:
        options: of the model's configuration.
        length: tokens of the source, and of the target.
        rounds: steps that are timed, after one that is not.

    Returns:
        ``seconds`` and ``bytes``; both None where the step needs more than `LIMIT`.

    Raises:
        RuntimeError: if the process fails for another reason, with what it wrote.
    """
    job = {"options": options, "length": length, "rounds": rounds}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "subquad.arena.documents"],
        input=json_module.dumps(job),
        capture_output=True,
        text=True,
        env=environment,
    )
    if done.returncode:
        raise RuntimeError(f"measuring {options} failed in the child process:\n{done.stderr}")
    found: dict[str, Any] = json_module.loads(done.stdout.splitlines()[-1])
    return found


def _child() -> None:
    from subquad.models import Seq2SeqTransformer, Seq2SeqTransformerConfig

    job = json_module.loads(sys.stdin.read())
    torch.set_num_threads(1)
    torch.manual_seed(0)
    length = job["length"]
    config = Seq2SeqTransformerConfig(
        **{**SIZES, **job["options"]}, max_position_embeddings=max(length, 512)
    )
    model = Seq2SeqTransformer(config).train()
    optimiser = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(5, VOCABULARY, (2, 1, length))

    def step(source: torch.Tensor, target: torch.Tensor) -> None:
        logits = model(source, decoder_input_ids=target).logits
        F.cross_entropy(logits.flatten(0, 1), target.flatten()).backward()
        optimiser.step()
        optimiser.zero_grad()

    step(*tokens[..., :64])
    held = resident("VmData")
    resource.setrlimit(resource.RLIMIT_DATA, (int(held + LIMIT), resource.RLIM_INFINITY))
    try:
        peak = peak_of(lambda: step(*tokens))
        times = []
        for _ in range(job["rounds"]):
            start = time.process_time()
            step(*tokens)
            times.append(time.process_time() - start)
    except (RuntimeError, MemoryError) as error:
        if "memory" not in str(error).lower() and not isinstance(error, MemoryError):
            raise
        sys.stdout.write(json_module.dumps({"seconds": None, "bytes": None}))
        return
    sys.stdout.write(json_module.dumps({"seconds": statistics.median(times), "bytes": peak}))


# ---- translations ----------------------------------------------------------------------------


def corpus(folder: Path) -> dict[str, Path]:
    """Files of joined documents: train, valid, test; and of verses: verses-train, verses-valid.

    Args:
        folder: where they are written, if they are not there.
    """
    from subquad.data import joined, preset, train_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    verses = preset("bible-es-en")
    tokenizer = train_tokenizer(
        (text for verse in verses.read("train") for text in verse[:2]), vocab_size=VOCABULARY
    )
    tokenizer.save_pretrained(folder / "tokenizer")
    paths = {}
    for split in ("train", "valid", "test"):
        paths[split] = folder / f"{split}.tsv"
        verse = paths[f"{VERSES}-{split}"] = folder / f"{VERSES}-{split}.tsv"
        if not verse.is_file():
            lines = ("\t".join(pair[:2]) + "\n" for pair in verses.read(split))
            verse.write_text("".join(lines), encoding="utf-8")
        if not paths[split].is_file():
            pairs = joined(
                verses.read(split),
                TOKENS,
                measure=lambda text: len(tokenizer.tokenize(text)),
                short=split == "train",
            )
            lines = ("\t".join(pair) + "\n" for pair in pairs)
            paths[split].write_text("".join(lines), encoding="utf-8")
    return paths


def translated(
    name: str, runs: Path, files: dict[str, Path], settings: dict[str, Any], echo: Any
) -> dict[str, Any]:
    """A model trained on joined documents, and BLEU of its translations of the test's.

    Args:
        name: of `MODELS`, or `VERSES`.
        runs: folder of the runs.
        files: by `corpus`.
        settings: of the recipe, by dotted keys.
        echo: shows progress.
    """
    from subquad.arena.translation import measure_files
    from subquad.training.recipe import Recipe
    from subquad.training.run import line, train

    first = name == VERSES
    options = COSTS[MODELS["exact" if first else name]]
    before = f"{VERSES}-" if first else ""
    own = FIRST if first else {**THEN, "training.start": str(runs / VERSES / "best")}
    recipe = Recipe.load(
        "documents",
        {
            "data.train": str(files[f"{before}train"]),
            "data.valid": str(files[f"{before}valid"]),
            "tokenizer.path": str(files["train"].parent / "tokenizer"),
            **{f"model.{key}": value for key, value in options.items()},
            **own,
            **settings,
        },
    )
    report = train(recipe, runs / name, progress=lambda point: echo(line(point)), say=echo)
    pairs = [text.split("\t") for text in files["test"].read_text(encoding="utf-8").splitlines()]
    sources, references = zip(*pairs, strict=True)
    scores = measure_files(runs / name, list(sources), list(references), timed=0)
    trained = report.to_dict()
    del trained["folder"]  # of this machine
    return {"name": name, "documents": len(pairs), **trained, **scores}


# ---- a run -----------------------------------------------------------------------------------


def run(
    out: Path,
    quick: bool,
    json: bool,
    echo: Callable[[str], None],
    *,
    runs: Path | None = None,
    only: Iterable[str] = (),
    settings: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Measures the cost, with `runs` the translations too; writes documents.{json,md,png}.

    Args:
        out: folder for the results.
        quick: two short lengths.
        json: whether the caller wants nothing but the result.
        echo: shows progress.
        runs: folder of training runs; None: only the cost is measured.
        only: models to be trained; default: all.
        settings: of the recipe, by dotted keys.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = out / "documents.json"
    held = json_module.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    result: dict[str, Any] = {
        "machine": machine(threads=1),
        "limit": LIMIT,
        "costs": held.get("costs", []),
        "translations": held.get("translations", []),
    }
    if runs is None:
        result["costs"] = []
        for name, options in COSTS.items():
            for length in (64, 128) if quick else LENGTHS:
                echo(f"{name}, {length} tokens")
                found = cost(options, length, rounds=1 if quick else 2)
                result["costs"].append({"name": name, "length": length, **found})
    else:
        files = corpus(runs / "data")
        rows = {row["name"]: row for row in result["translations"]}
        for name in only or (VERSES, *MODELS):
            rows[name] = translated(name, runs, files, settings or {}, echo)
            result["translations"] = [rows[one] for one in (VERSES, *MODELS) if one in rows]
    text = json_module.dumps(result, indent=1, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")
    (out / "documents.md").write_text(table(result), encoding="utf-8")
    if result["costs"]:
        picture(result).savefig(out / "documents.png")
    if not json:
        echo(table(result))
    return result


def table(result: dict[str, Any]) -> str:
    """The result as a Markdown page."""
    limit = result["limit"] / 1e9
    lines = ["# Documents", ""]
    if result["costs"]:
        lengths = sorted({row["length"] for row in result["costs"]})
        lines += [
            "One training step on one document, 4 + 4 layers, 128 wide, 4 heads, dropout 0.1, "
            f"vocabulary {VOCABULARY:,}, float32, the target as long as the source; each cell in a "
            f"process of its own that may take {limit:g} GB. CPU seconds (source tokens a second, "
            "peak GB).",
            "",
            "| attention | " + " | ".join(f"{length:,}" for length in lengths) + " |",
            "|---|" + "---:|" * len(lengths),
        ]
        for name in dict.fromkeys(row["name"] for row in result["costs"]):
            cells = [_cell(row, limit) for row in result["costs"] if row["name"] == name]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        lines.append("")
    if result["translations"]:
        lines += [
            f"bible-es-en, verses joined to at least {TOKENS} source tokens, recipe `documents`; "
            f"BLEU and chrF by sacrebleu. `{VERSES}` is exact attention trained on single verses "
            f"for {FIRST['training.epochs']} epochs: it ends after a few of them. The others go on "
            f"from it with documents for {THEN['training.epochs']}, with their attention in all "
            f"layers; `performer`, and in the cross-attention near_far, is {FAR}. CPU minutes are "
            "those of training.",
            "",
            "| attention | BLEU greedy | BLEU beam | chrF beam | documents | CPU minutes |",
            "|---|---:|---:|---:|---:|---:|",
        ]
        for row in result["translations"]:
            minutes = row["cpu_seconds"] / 60
            lines.append(
                f"| {row['name']} | {row['greedy']['bleu']:.1f} | {row['beam']['bleu']:.1f} "
                f"| {row['beam']['chrf']:.1f} | {row['documents']} | {minutes:.0f} |"
            )
        lines.append("")
    lines += [f"{machine_line(result['machine'])}. Again: `subquad bench documents`.", ""]
    return "\n".join(lines)


def _cell(row: dict[str, Any], limit: float) -> str:
    if row["seconds"] is None:
        return f"more than {limit:g} GB"
    rate = row["length"] / row["seconds"]
    return f"{row['seconds']:.2f} ({rate:,.0f}, {row['bytes'] / 1e9:.2f})"


def picture(result: dict[str, Any]) -> Any:
    """Memory and tokens a second against length."""
    page, axes = figure(9.6, 4.2, 1, 2)
    colours = dict(zip(COSTS, ("grey", "black", "blue", "vermilion"), strict=True))
    panels: tuple[tuple[str, Callable[[dict[str, Any]], float]], ...] = (
        ("peak memory of a training step, GB", lambda row: row["bytes"] / 1e9),
        ("source tokens a second", lambda row: row["length"] / row["seconds"]),
    )
    for axis, (title, value) in zip(axes[0], panels, strict=True):
        ends = []
        for name, colour in colours.items():
            rows = [r for r in result["costs"] if r["name"] == name and r["seconds"] is not None]
            if not rows:
                continue
            xs, ys = [row["length"] for row in rows], [value(row) for row in rows]
            axis.plot(xs, ys, marker="o", color=COLOURS[colour])
            ends.append((xs[-1], ys[-1], name, COLOURS[colour]))
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("tokens of the source, and of the target")
        axis.set_title(title, loc="left", fontsize=10)
        if "memory" in title:
            axis.axhline(result["limit"] / 1e9, color=COLOURS["grey"], linestyle="--")
        lengths = sorted({row["length"] for row in result["costs"]})
        axis.set_xlim(lengths[0] / 1.2, lengths[-1] * 4)  # room for the names
        axis.set_xticks(lengths, [f"{length:,}" for length in lengths], fontsize=8)
        label_ends(axis, ends)
    return page


if __name__ == "__main__":
    _child()
