"""Time of a token and bytes of the cache, against the length of the context.

The exact model with transformers' ``DynamicCache`` and its converted copies with their own
caches read the same text; at each length the last tokens come one by one, in turn, so that
whatever else the machine does falls on all of them alike. Prefill is timed apart.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from subquad.arena.encoders import packaged_text
from subquad.arena.zoo import Zoo, load_smollm2
from subquad.convert import convert
from subquad.errors import OptionError

__all__ = ["EXACT", "SPECS", "measure", "step_times", "table"]

EXACT = "exact, keys and values"
SPECS = ("near_far", "local(window=128)", "performer(features=64)")
"""What the model is converted to: the default, a window and a linear state."""

CHUNK = 512
"""Tokens of one prefill call."""


def measure(
    zoo: Zoo,
    *,
    quick: bool = False,
    echo: Callable[[str], None] = print,
    specs: Sequence[str] = SPECS,
    lengths: Sequence[int] = (1024, 2048, 4096, 8192),
) -> dict[str, Any]:
    """SmolLM2-135M with each mechanism in all layers; see `step_times`.

    Args:
        zoo: where the model is.
        quick: two lengths, fewer tokens.
        echo: shows progress.
        specs: mechanisms with options.
        lengths: of the context, in tokens, ascending.
    """
    found = load_smollm2(zoo)
    longest = max(lengths)
    ids = found.tokenizer(packaged_text(), return_tensors="pt")["input_ids"]
    ids = ids.repeat(1, longest // ids.shape[1] + 1)[:, :longest]
    tokens = 8 if quick else 32
    rows = step_times(
        found.model, specs, ids, lengths[:2] if quick else lengths, tokens=tokens, echo=echo
    )
    return {
        "settings": {"model": found.name, "batch": 1, "dtype": "float32", "tokens timed": tokens},
        "rows": rows,
        "notes": [
            "Milliseconds are medians over the last tokens of the context, one call each, models "
            "in turn; bytes are those of all tensors in the cache; prefill is the reading of the "
            f"tokens since the length before, {CHUNK} a call."
        ],
    }


def table(result: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each length and cache."""
    exact = {row["length"]: row for row in result["rows"] if row["mechanism"] == EXACT}
    return [
        {
            "context": row["length"],
            "mechanism": row["mechanism"],
            "ms/token": row["milliseconds"],
            "× exact": row["milliseconds"] / exact[row["length"]]["milliseconds"],
            "cache MiB": row["nbytes"] / 2**20,
            "% of exact": 100 * row["nbytes"] / exact[row["length"]]["nbytes"],
            "prefill s": row["prefill_seconds"],
        }
        for row in result["rows"]
    ]


@torch.no_grad()
def step_times(
    model: Any,
    specs: Sequence[str],
    ids: Tensor,
    lengths: Sequence[int],
    *,
    tokens: int = 32,
    echo: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Times single tokens of a decoder and its converted copies at contexts of these lengths.

    Args:
        model: an exact transformers decoder; is not changed.
        specs: one converted copy for each.
        ids: (B, ≥ longest) tokens.
        lengths: ascending; the last `tokens` of each context are timed.
        tokens: number of calls that medians are taken over.
        echo: shows progress.

    Returns:
        For each length and cache: length, mechanism, milliseconds (median), spread (quartiles),
        nbytes of the cache, prefill_seconds.

    Raises:
        OptionError: lengths that do not ascend, exceed `ids` or leave no room for `tokens`.
    """
    steps = [after - before for before, after in zip((0, *lengths), lengths, strict=False)]
    if not lengths or min(steps) <= tokens or max(lengths) > ids.shape[1]:
        raise OptionError(
            f"lengths must ascend by more than tokens={tokens}, to {ids.shape[1]} at most, "
            f"given {tuple(lengths)}"
        )
    readers = {EXACT: _Reader(model)}
    for spec in specs:
        converted = copy.deepcopy(model)
        convert(converted, spec)
        readers[spec] = _Reader(converted)
    rows = []
    for length in lengths:
        start = length - tokens
        prefill = {name: reader.read(ids[:, :start]) for name, reader in readers.items()}
        times: dict[str, list[float]] = {name: [] for name in readers}
        for position in range(start, length):
            for name, reader in readers.items():
                times[name].append(reader.read(ids[:, : position + 1]))
        for name, reader in readers.items():
            first, median, third = statistics.quantiles(times[name], n=4)
            rows.append(
                {
                    "length": length,
                    "mechanism": name,
                    "milliseconds": 1e3 * median,
                    "spread": (1e3 * first, 1e3 * third),
                    "nbytes": reader.nbytes,
                    "prefill_seconds": prefill[name],
                }
            )
            echo(f"{length} tokens, {name}: {1e3 * median:.1f} ms, {reader.nbytes:,} bytes")
    return rows


class _Reader:
    """A model that reads on from where it stopped."""

    def __init__(self, model: Any) -> None:
        from transformers import DynamicCache

        self.model = model
        self.cache = DynamicCache(config=model.config)

    def read(self, ids: Tensor) -> float:
        """Reads the tokens that are new; returns the seconds."""
        start = time.perf_counter()
        for part in ids[:, self.cache.get_seq_length() :].split(CHUNK, 1):
            self.model(part, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        if ids.is_cuda:
            torch.cuda.synchronize(ids.device)
        return time.perf_counter() - start

    @property
    def nbytes(self) -> int:
        from subquad.convert.cache import cache_rows

        return sum(row.nbytes for row in cache_rows(self.cache))
