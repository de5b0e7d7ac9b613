"""SmolLM2-135M with a constant state: perplexity on unseen text, copying, finding a number.

Three measures, all teacher-forced:

    perplexity  exp of the mean loss over texts of 1,024 tokens, as a ratio to the exact model
    copy        accuracy on the second copy of 40 random tokens, 300 of prose after the first
    needle      digits right of a 5-digit number told 300 tokens of prose before the question

Prose needs little of what lies far back, the other two need nothing else: a state that is good
at prose and forgets shows only there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad.arena import corpora
from subquad.arena.encoders import packaged_text
from subquad.arena.zoo import Zoo, load_smollm2
from subquad.convert import Budget, convert, revert
from subquad.convert.recall import CopyTest, Recall, recall_layers
from subquad.convert.swap import converted_layers

__all__ = ["measure", "perplexities", "state_tokens", "table", "texts"]

LENGTH = 1024
"""Tokens of a text."""

EXACT_LAYERS = 4
"""Layers that stay exact where some may."""

BATCH = 4
"""Texts that the model reads at a time."""

STATE = 131
"""Tokens whose keys and values take the bytes of the default's state."""


@dataclass(frozen=True)
class Setting:
    """A conversion that is measured.

    Args:
        name: in the table.
        mechanism: spec, or None for the exact model.
        kept: whether the layers of recall stay exact.
        calibrated: whether sizes are chosen head by head, to the bytes of the default's state,
            on texts of a corpus that is not measured.
    """

    name: str
    mechanism: str | None
    kept: bool = False
    calibrated: bool = False


SETTINGS = (
    Setting("exact", None),
    Setting("window of equal bytes", "near_far(window=126, heavy=0, far=none)"),
    Setting("near_far", "near_far"),
    Setting("window of equal bytes", "near_far(window=126, heavy=0, far=none)", kept=True),
    Setting("near_far", "near_far", kept=True),
    Setting("near_far, calibrated to these bytes", "near_far", calibrated=True),
    Setting("near_far, calibrated to these bytes", "near_far", kept=True, calibrated=True),
    Setting("near_far + untrained far field", "near_far(heavy=62, far=performer(features=64))"),
)
"""The last one shows why the far field is left out: without it, it is the third."""


def texts(tokenizer: Any, zoo: Zoo, count: int) -> dict[str, Tensor]:
    """(count, LENGTH) token ids from each corpus, from documents in equal distances.

    Each document begins with the text's first token, as the model was trained.
    """
    sources: dict[str, Callable[[Zoo], dict[str, str]]] = {
        "Brown": corpora.brown, "help": corpora.help_pages, "e-mails": corpora.mails,
    }  # fmt: skip
    found = {}
    for name, read in sources.items():
        # Four characters a token at most, by far: only these can be long enough.
        long = [text for _, text in sorted(read(zoo).items()) if len(text) > 4 * LENGTH]
        rows: list[list[int]] = []
        for text in long[:: max(1, len(long) // (2 * count))]:
            ids = tokenizer(text)["input_ids"][:LENGTH]
            if len(ids) == LENGTH and len(rows) < count:
                rows.append(ids)
        found[name] = torch.tensor(rows)
    return found


@torch.no_grad()
def perplexities(model: Any, ids: Tensor) -> Tensor:
    """Mean loss (rows,) in nats a token; the vocabulary's logits of one row at a time."""
    losses = []
    for rows in ids.split(BATCH):
        hidden = model.model(input_ids=rows, use_cache=False).last_hidden_state
        for row, states in zip(rows, hidden, strict=True):
            losses.append(F.cross_entropy(model.lm_head(states[:-1]), row[1:]))
    return torch.stack(losses)


def copying(model: nn.Module, prose: Tensor, start: int, seeds: int, rows: int) -> list[float]:
    """Copy accuracy of each seed, over a gap of prose (R, ≥ 300)."""
    tests = [
        CopyTest(rows=rows, seed=seed, start=start, between=prose[seed % len(prose)].tolist())
        for seed in range(seeds)
    ]
    return [test.run(model)[1] for test in tests]


@torch.no_grad()
def needle(model: Any, tokenizer: Any, prose: Tensor, seed: int) -> float:
    """Share of the digits of a number that the model finds again in rows of prose (R, n)."""
    draw = random.Random(seed)
    right = total = 0
    for row in prose:
        number = "".join(draw.choices("0123456789", k=5))
        before = tokenizer(f"The secret number of the day is {number}. Remember it.\n")["input_ids"]
        asked = tokenizer("\nThe secret number of the day is")["input_ids"]
        answer = tokenizer(f" {number}")["input_ids"]
        ids = torch.tensor([[*before, *row.tolist(), *asked, *answer]])
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(answer) + 1).logits
        hit = logits[0, :-1].argmax(-1) == torch.tensor(answer)
        digits = torch.tensor([tokenizer.decode([token]).strip().isdigit() for token in answer])
        right, total = right + int((hit & digits).sum()), total + int(digits.sum())
    return right / total


def state_tokens(model: nn.Module, length: int = 512) -> float | None:
    """Bytes of a converted layer's state in tokens of its keys and values, the mean over layers.

    None where nothing is converted.
    """
    found = []
    for _, layer in converted_layers(model):
        mech: Any = layer._modules["subquad"]
        sizes = (mech.num_heads, mech.num_kv_heads, mech.num_kv_heads)
        q, k, v = (torch.zeros(1, heads, length, mech.head_dim) for heads in sizes)
        state = mech.prefill(q, k, v)[1]
        found.append(state.nbytes / (k[:, :, :1].nbytes + v[:, :, :1].nbytes))
    return sum(found) / len(found) if found else None


def measure(
    zoo: Zoo,
    *,
    quick: bool,
    echo: Callable[[str], None],
    settings: Sequence[Setting] = SETTINGS,
) -> dict[str, Any]:
    """Perplexity ratios, copying and needles of every setting."""
    count, seeds, rows = (1, 1, 1) if quick else (8, 3, 4)
    _, model, tokenizer = load_smollm2(zoo)
    corpus = texts(tokenizer, zoo, count)
    start = int(tokenizer("<|endoftext|>")["input_ids"][0])
    recall = recall_layers(model, EXACT_LAYERS, test=CopyTest(rows=1 if quick else 4))
    echo(str(recall))
    base = {name: perplexities(model, ids) for name, ids in corpus.items()}
    results = []
    ids = tokenizer(packaged_text())["input_ids"]
    seen = torch.tensor(ids[: 2 * LENGTH]).view(2, LENGTH)
    for setting in settings:
        if setting.mechanism is not None:
            given: dict[str, Any] = {}
            if setting.calibrated:
                share = STATE / LENGTH
                given = {"calibrate": [{"input_ids": seen}], "budget": Budget(bytes=share)}
            kept = recall.layers if setting.kept else ()
            convert(model, setting.mechanism, keep_exact=kept, **given)
        ratios = {
            name: (perplexities(model, ids) - base[name]).exp().tolist()
            if setting.mechanism is not None
            else [1.0] * len(ids)
            for name, ids in corpus.items()
        }
        prose = corpus["Brown"][:, -300:]
        results.append(
            {
                "name": setting.name,
                "mechanism": setting.mechanism,
                "exact_layers": EXACT_LAYERS if setting.kept else 0,
                "state_tokens": state_tokens(model),
                "ratios": ratios,
                "copy": copying(model, prose, start, seeds, rows),
                "needle": [needle(model, tokenizer, prose, seed) for seed in range(seeds)],
            }
        )
        revert(model)
        echo(f"  {setting.name}: {_ratio(ratios):.3f}")
    return {
        "settings": {
            "texts of each corpus": count,
            "tokens of a text": LENGTH,
            "perplexity of the exact model": ", ".join(
                f"{name} {float(losses.mean().exp()):.1f}" for name, losses in base.items()
            ),
        },
        "exact": {name: losses.exp().tolist() for name, losses in base.items()},
        "recall": _recall(recall),
        "results": results,
        "notes": [
            "Perplexity: ratio to the exact model, with the least and the largest of single "
            "texts. State: bytes of a converted layer, in tokens of keys and values.",
            "Calibrated on the first 2 × 1,024 tokens of the packaged narratives, which are no "
            "part of what is measured.",
            f"Kept exact: {', '.join(recall.layers)}, found by the copy test alone.",
        ],
    }


def _recall(found: Recall) -> dict[str, Any]:
    return {"layers": list(found.layers), "losses": found.losses, "exact": found.exact}


def _ratio(ratios: Mapping[str, Sequence[float]]) -> float:
    """Geometric mean over all texts."""
    every = torch.tensor([ratio for rows in ratios.values() for ratio in rows])
    return float(every.log().mean().exp())


def table(result: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each setting."""
    return list(_rows(result))


def _rows(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for row in result["results"]:
        ratios = row["ratios"]
        yield {
            "attention": row["name"],
            "exact layers": row["exact_layers"] if row["mechanism"] else "all",
            "state, tokens": row["state_tokens"],
            "perplexity": _ratio(ratios),
            **{
                name: f"{_ratio({name: own}):.3f} ({min(own):.3f}–{max(own):.3f})"
                for name, own in ratios.items()
            },
            "copy": sum(row["copy"]) / len(row["copy"]),
            "needle": sum(row["needle"]) / len(row["needle"]),
        }
