"""`subquad demo`: a real model's attention swapped, in numbers and pictures, in three minutes.

It loads the sentence encoder all-MiniLM-L6-v2, embeds passages of the packaged text with
exact attention and with each registered mechanism, and reports what the swap costs beside
uniform attention, the line to beat. Then it times attention itself, from 512 to 32k tokens.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from subquad import registry
from subquad.arena import encoders
from subquad.arena.demo_measure import embed_rows, measure
from subquad.attention.base import Absent
from subquad.convert.compare import LayerComparison

__all__ = ["Row", "applicable", "run"]

VARIANTS = {
    # of 512 tokens each of these reads about 128 keys a query; their defaults would read most
    "local": ("local(window=64)",),
    "bigbird": ("bigbird(block=16)",),
    "sampled": ("sampled(heavy=32, samples=96)",),
    "performer": (
        "performer",
        "performer(estimator=derf, gauge=balance)",
    ),
    "near_far": (
        "near_far(window=16, heavy=96, far=performer(features=128, estimator=derf, gauge=balance))",
        "near_far(preset=fast)",
        "near_far",
    ),
}
"""Settings that are shown of a mechanism; one with its defaults where none is listed."""

ALONE = {"near_far": "near_far", "performer": "performer(features=128)"}
"""Mechanisms whose attention call is timed by itself, by their labels; the first one leads."""

LABELS = {
    VARIANTS["near_far"][0]: "near_far, DERF",
}
"""Short names of long settings; a line below the table spells them out."""

BRIEF = {
    "global": "it is a part of other patterns: bigbird has it",
    "strided": "its pattern is for data with a period",
    "mixed": "its parts are shown by themselves",
    "auto": "it is exact attention or near_far, which are shown by themselves",
}
"""What is left out to keep the run short, and why it can be."""


@dataclass(frozen=True)
class Row:
    """One line of the table; `cosine` and the others compare with the exact embeddings.

    Args:
        mechanism: spec, or ``"exact"``, ``"uniform"``.
        label: for people.
        cosine, cosine_p5: mean and 5th percentile over passages.
        neighbours: share of passages whose nearest other passage stays the same.
        error: relative error of the attention output, mean over layers, same layer input.
        layers: the error of each layer, beside that of uniform attention.
        seconds: a forward call per passage, one thread, median of interleaved calls.
        ratio: `seconds` over that of exact attention.
        memory: peak MiB of a forward call of a batch, beyond the model and its input.
    """

    mechanism: str
    label: str
    cosine: float
    cosine_p5: float
    neighbours: float
    error: float
    layers: tuple[LayerComparison, ...]
    seconds: float
    ratio: float
    memory: float | None


@dataclass(frozen=True)
class _Sizes:
    passages: int
    tokens: int
    layer_passages: int
    batch: int
    rounds: int
    lengths: tuple[int, ...]
    budget: float


_FULL = _Sizes(24, 512, 2, 2, 3, (512, 1024, 2048, 4096, 8192, 16384, 32768), 36.0)
_QUICK = _Sizes(8, 64, 1, 2, 1, (512, 1024, 2048), 0.7)


_ALONE = 12
"""Passages up to which one process embeds them all."""


def applicable() -> tuple[list[str], list[tuple[str, str]]]:
    """Specs of what can be swapped in untrained, and (name, reason) of what cannot."""
    specs: list[str] = []
    skipped: list[tuple[str, str]] = []
    for name in registry.MECHANISMS:
        for spec in VARIANTS.get(name, (name,)):
            found, config = registry.resolve(spec)
            have = found.capabilities_for(config)
            missing = next(
                (need for need in (have.functional, have.key) if isinstance(need, Absent)), None
            )
            if not have.qkv:
                skipped.append((spec, "mixes tokens without q, k and v"))
            elif missing is not None:
                skipped.append((spec, missing.reason))
            elif found.family != "exact" and have.approximates != "softmax":
                skipped.append((spec, "approximates no softmax: for models trained with it"))
            elif name in BRIEF:
                skipped.append((spec, BRIEF[name]))
            else:
                specs.append(spec)
    return specs, skipped


def run(
    out: Path | str = "out",
    quick: bool = False,
    *,
    model: str | Path = "minilm",
    text: str | None = None,
    console: Any = None,
) -> dict[str, Any]:
    """Runs the demonstration and writes ``demo.html``, ``demo.json`` and PNGs to `out`.

    Args:
        out: folder, made if missing.
        quick: shorter passages and lengths, under half a minute.
        model: ``"minilm"`` or a folder with another encoder and its tokenizer.
        text: in place of the packaged text.
        console: a ``rich.console.Console``; None prints nothing.

    Returns:
        Everything that was measured, JSON-able.

    Raises:
        ImportError: an extra is not installed; says which.
    """
    need_extras()
    from subquad.arena.demo_page import write_page

    started = time.perf_counter()
    sizes = _QUICK if quick else _FULL
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    with _progress(console) as say:
        say("loading the encoder")
        encoder = encoders.load_encoder(model)
        tokens = min(sizes.tokens, encoder.max_length)
        rows_of_ids, total = encoders.passages(
            text or encoders.packaged_text(),
            encoder.tokenizer,
            tokens=tokens,
            count=sizes.passages,
        )
        specs, skipped = applicable()
        labels = ["exact", "uniform", *specs]
        fidelity = _fidelity(encoder, rows_of_ids, labels, sizes, say)
        cost = measure(
            {
                "kind": "model",
                "model": str(encoder.path),
                "rows": labels,
                "batch": sizes.batch,
                "length": tokens,
                "rounds": sizes.rounds,
            },
            say,
        )
        config: Any = encoder.model.config
        heads = int(config.num_attention_heads)
        width = int(config.hidden_size) // heads
        attention = measure(
            {
                "kind": "attention",
                "mechanisms": ALONE,
                "heads": heads,
                "head_dim": width,
                "lengths": sizes.lengths,
                "budget": sizes.budget,
                "rounds": 3 if quick else 5,
            },
            say,
        )
        table = tuple(_row(label, fidelity[label], cost) for label in labels)
        result = {
            "model": encoder.name,
            "passages": len(rows_of_ids),
            "passages_available": total,
            "tokens": tokens,
            "mean_tokens": sum(map(len, rows_of_ids)) / len(rows_of_ids),
            "batch": sizes.batch,
            "rows": [asdict(row) for row in table],
            "skipped": [{"mechanism": name, "reason": reason} for name, reason in skipped],
            "attention": attention,
            "attention_setting": f"B=1, H={heads}, D={width}, float32, one thread",
            "budget": sizes.budget,
            "quick": quick,
            "torch": torch.__version__,
            "processor": _processor(),
            "cores": os.cpu_count(),
        }
        say("drawing")
        result["seconds"] = time.perf_counter() - started
        result["files"] = [str(path) for path in write_page(out, result)]
    (out / "demo.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    if console is not None:
        show(result, console)
    return result


def need_extras() -> None:
    """Raises ImportError with the install line if something the demonstration needs is missing."""
    missing = []
    for name in ("matplotlib", "transformers", "rich"):
        try:
            __import__(name)
        except ImportError:
            missing.append(name)
    if missing:
        raise ImportError(
            f"the demonstration needs {', '.join(missing)}: pip install 'subquad[demo]'"
        )


# ---- fidelity ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Fidelity:
    cosine: float
    cosine_p5: float
    neighbours: float
    layers: tuple[LayerComparison, ...]


def _fidelity(
    encoder: encoders.Encoder,
    ids: list[list[int]],
    labels: list[str],
    sizes: _Sizes,
    say: Callable[[str], None],
) -> dict[str, _Fidelity]:
    """Every row's embeddings against the exact ones; half of the rows in a second process,
    unless there are so few passages that starting it would take longer.

    Two processes with a thread each: two threads would wait for each other at every product.
    """
    pad = int(encoder.tokenizer.pad_token_id or 0)
    job = {
        "kind": "fidelity",
        "model": str(encoder.path),
        "ids": ids,
        "pad": pad,
        "layer_passages": sizes.layer_passages,
        "rows": labels[1::2],
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if len(ids) <= _ALONE:
            found = embed_rows(encoder.model, {**job, "rows": labels}, say)
        else:
            with ThreadPoolExecutor(1) as pool:
                other = pool.submit(measure, job, lambda text: None)
                mine = {**job, "rows": labels[::2]}
                found = {**embed_rows(encoder.model, mine, say), **other.result()}
    finally:
        torch.set_num_threads(threads)
    exact = torch.tensor(found["exact"]["embedding"], dtype=torch.float64)
    result = {}
    for label in labels:
        embedded = torch.tensor(found[label]["embedding"], dtype=torch.float64)
        cosines = (exact * embedded).sum(-1)
        result[label] = _Fidelity(
            cosine=float(cosines.mean()),
            cosine_p5=float(cosines.quantile(0.05)),
            neighbours=float((_nearest(exact) == _nearest(embedded)).double().mean()),
            layers=tuple(LayerComparison(**layer) for layer in found[label]["layers"]),
        )
    return result


def _nearest(embedded: Tensor) -> Tensor:
    similar = embedded @ embedded.T
    return similar.fill_diagonal_(float("-inf")).argmax(-1)


def _row(label: str, fidelity: _Fidelity, cost: dict[str, Any]) -> Row:
    layers = fidelity.layers
    return Row(
        mechanism=label,
        label={"exact": "exact (original)", "uniform": "uniform attention", **LABELS}.get(
            label, label
        ),
        cosine=fidelity.cosine,
        cosine_p5=fidelity.cosine_p5,
        neighbours=fidelity.neighbours,
        error=sum(layer.error for layer in layers) / max(len(layers), 1),
        layers=layers,
        seconds=cost[label]["seconds"],
        ratio=cost[label]["seconds"] / cost["exact"]["seconds"],
        memory=cost[label]["memory"],
    )


# ---- showing -----------------------------------------------------------------------------


class _progress:
    """A spinner with the present step and the time it took so far; silent without a console."""

    def __init__(self, console: Any) -> None:
        self.console = console

    def __enter__(self) -> Callable[[str], None]:
        if self.console is None:
            return lambda text: None
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        self.bar = Progress(*columns, console=self.console, transient=True)
        self.bar.start()
        task = self.bar.add_task("starting", total=None)
        plain = not self.console.is_terminal
        last = ""

        def say(text: str) -> None:
            nonlocal last
            self.bar.update(task, description=text)
            head = text.partition(":")[0]
            if plain and head != last:  # a log file gets one line a step
                self.console.print(f"· {head}", highlight=False, markup=False)
            last = head

        return say

    def __exit__(self, *details: object) -> None:
        if self.console is not None:
            self.bar.stop()


def table_cells(result: dict[str, Any]) -> Iterator[list[str]]:
    """The table's rows as text: for the terminal and the page alike."""
    for row in result["rows"]:
        exact = row["mechanism"] == "exact"
        memory = row["memory"]
        yield [
            row["label"].replace("(", " (", 1) if "=" in row["label"] else row["label"],
            f"{row['cosine']:.3f}",
            f"{row['cosine_p5']:.3f}",
            f"{row['neighbours']:.0%}",
            "0" if exact else f"{row['error']:.2f}",
            f"{row['seconds'] * 1e3:.0f}",
            f"{row['ratio']:.2f} ×",
            "–" if memory is None else f"{memory:.0f}",
        ]


HEADERS = (
    "attention",
    "cosine",
    "5th pct.",
    "same neighbour",
    "attention error",
    "ms / passage",
    "× exact",
    "peak MiB",
)
_NARROW = ("attention", "cos", "p5", "same", "err", "ms", "×", "MiB")


def show(result: dict[str, Any], console: Any) -> None:
    """Prints the tables and where the page is."""
    from rich.table import Table

    title = (
        f"{result['model']}, {result['passages']} passages of up to {result['tokens']} tokens, "
        "no training"
    )
    table = Table(title=title, title_justify="left")
    for number, header in enumerate(_NARROW):
        table.add_column(header, justify="right" if number else "left", no_wrap=number > 0)
    for row, cells in zip(result["rows"], table_cells(result), strict=True):
        style = {"exact": "bold", "uniform": "dim"}.get(row["mechanism"])
        table.add_row(*cells, style=style)
    console.print(table)
    console.print(
        "cos, p5: cosine to the original embedding, mean and 5th percentile · same: nearest "
        "neighbour unchanged · err: relative error of the attention output, mean over layers; "
        "uniform attention is the line to beat · ms: per passage, one thread · ×: of exact · "
        "MiB: peak beyond the model",
        style="dim",
        highlight=False,
    )
    for row in result["rows"]:
        if row["mechanism"] in LABELS:
            console.print(f"{row['label']}: {row['mechanism']}", highlight=False, markup=False)
    for skip in result["skipped"]:
        console.print(f"left out: {skip['mechanism']}: {skip['reason']}", highlight=False)
    attention = result["attention"]
    title = f"attention alone: {result['attention_setting']}"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for header in attention_headers():
        table.add_column(header, justify="right", min_width=max(map(len, header.split())))
    for cells in attention_cells(attention):
        table.add_row(*cells)
    console.print(table)
    for line in attention["left_out"]:
        console.print(f"left out: {line}", highlight=False)
    page = next(path for path in result["files"] if path.endswith(".html"))
    console.print(f"{result['seconds']:.0f} s. Open {page}", highlight=False)


def attention_headers() -> list[str]:
    """Columns of the table of attention alone."""
    timed = [header for label in ALONE for header in (f"{label} ms", "faster by")]
    return ["tokens", "SDPA ms", *timed, "SDPA MiB", *(f"{label} MiB" for label in ALONE)]


def attention_cells(attention: dict[str, Any]) -> Iterator[list[str]]:
    """Rows of the table of attention alone, as text."""
    seconds, memory = attention["seconds"], attention["memory"]
    for length in seconds[next(iter(ALONE))]:
        exact = seconds["sdpa"].get(length)
        cells = [f"{int(length):,}", _milliseconds(exact)]
        for label in ALONE:
            mine = seconds[label].get(length)
            cells.append(_milliseconds(mine))
            cells.append("–" if exact is None or mine is None else f"{exact / mine:.1f} ×")
        peaks = [memory[name].get(length) for name in ("sdpa", *ALONE)]
        yield [*cells, *("–" if peak is None else f"{peak:.0f}" for peak in peaks)]


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds * 1e3:,.1f}" if seconds < 0.1 else f"{seconds * 1e3:,.0f}"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
