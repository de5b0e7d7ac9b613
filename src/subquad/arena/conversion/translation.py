"""flan-t5-small, tuned to write titles: translations and titles, before and after.

T5's self-attention adds a learned position bias to its logits. Only mechanisms that take an
explicit bias can stand there, all of them quadratic, so that cross-attention alone is
converted. Sentences are short, so that near_far reads most of their tokens exactly; titles of
long passages show what the far field does.

- *translation*: 100 paragraphs of LibreOffice's help, "translate English to German: …"; chrF
  against the published German.
- *title*: 100 passages of the Brown corpus of some 480 tokens, "summarize: …".

Agreement is the share of tokens of the original's output that a model ranks first after the
same tokens before; "same" the share of outputs of which all tokens are. The others are
generated again for chrF. Generating is slow with a converted cross-attention, which is computed
anew in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from subquad.arena import corpora
from subquad.arena.conversion.stages import MINUTES, Recover, sq_recover, stages
from subquad.arena.zoo import Zoo, load_flan_t5

__all__ = ["measure", "table"]

COUNT, RECOVERY = 100, 200
SEEDS = (0, 1, 2)
LONGEST, PASSAGE = 48, 480


def measure(
    zoo: Zoo,
    *,
    quick: bool,
    echo: Callable[[str], None],
    recover: Recover | None = sq_recover,
) -> dict[str, Any]:
    """chrF, agreement and identical outputs of the original, converted and recovered model."""
    try:
        from sacrebleu.metrics.chrf import CHRF
    except ImportError as error:
        raise ImportError("chrF needs sacrebleu: pip install 'subquad[zoo]'") from error
    found = load_flan_t5(zoo)
    model, tokenizer = found.model, found.tokenizer
    count = 6 if quick else COUNT
    pairs = [pair for pair in corpora.help_pairs(zoo, words=8) if len(pair[0]) < 200]
    pairs = pairs[:: len(pairs) // COUNT][:count]
    passages = _passages(zoo, tokenizer)
    titled, others = passages[: 2 * count : 2], passages[1 : 2 * RECOVERY : 2]
    tasks = {
        "translation": [_ids(tokenizer, f"translate English to German: {a}") for a, _ in pairs],
        "title": [_ids(tokenizer, f"summarize: {text}") for text in titled],
    }
    originals: dict[str, list[Tensor]] = {}

    def score(scored: Any) -> dict[str, Any]:
        row: dict[str, Any] = {}
        for task, sources in tasks.items():
            if task not in originals:
                originals[task] = [_generate(scored, source) for source in sources]
            right = _agreement(scored, sources, originals[task])
            row[f"{task}: agreement"] = float(torch.cat(right).double().mean())
            row[f"{task}: same"] = sum(bool(one.all()) for one in right) / len(right)
            if task == "translation":
                said = [
                    ids if bool(one.all()) else _generate(scored, source)
                    for ids, one, source in zip(originals[task], right, sources, strict=True)
                ]
                texts = [tokenizer.decode(ids.tolist()) for ids in said]
                row["chrF"] = CHRF().corpus_score(texts, [[german for _, german in pairs]]).score
        return row

    examples = [
        {"input_ids": source, "decoder_input_ids": _generate(model, source)[:-1]}
        for source in (_ids(tokenizer, f"summarize: {text}") for text in others)
    ] if recover is not None and not quick else []  # fmt: skip
    rows = stages(
        model,
        score,
        {"near_far in cross-attention": lambda name, module: "EncDecAttention" in name},
        seeds=SEEDS[:1] if quick else SEEDS,
        examples=examples,
        recover=None if quick else recover,
        echo=echo,
    )
    return {
        "settings": {
            f"tokens of a source ({task})": f"{_mean(sources):.0f}"
            for task, sources in tasks.items()
        }
        | {
            "outputs": f"{count} of each task, greedy, at most {LONGEST} tokens",
            "recovery": f"{MINUTES:g} minutes on {len(others)} other passages",
        },
        "rows": rows,
        "notes": [
            "A call with at most 64 queries, fewer than there are keys, reads all keys: choosing "
            "would cost more. So the converted cross-attention says what the exact one says. The "
            "self-attention of T5 adds a bias for each pair of positions and stays exact."
        ],
    }


def table(result: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each model and seed."""
    rows: list[dict[str, Any]] = result["rows"]
    return rows


def _mean(rows: Sequence[Tensor]) -> float:
    return sum(map(len, rows)) / len(rows)


def _passages(zoo: Zoo, tokenizer: Any) -> list[str]:
    """The beginnings of Brown's texts, whole paragraphs of at most `PASSAGE` tokens."""
    found = []
    for text in corpora.brown(zoo).values():
        kept = ""
        for line in text.split("\n"):
            if len(tokenizer.encode(f"{kept} {line}").ids) > PASSAGE:
                break
            kept = f"{kept} {line}".strip()
        if kept:
            found.append(kept)
    return found


def _ids(tokenizer: Any, text: str) -> Tensor:
    return torch.tensor(tokenizer.encode(text).ids)


def _generate(model: nn.Module, source: Tensor) -> Tensor:
    """Greedy output, from the start token to the end token."""
    generate: Any = model.generate
    with torch.no_grad():
        return generate(source[None], max_new_tokens=LONGEST, do_sample=False)[0]


def _agreement(model: Any, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
    """Which of each target's tokens come first after those before."""
    right = []
    for source, target in zip(sources, targets, strict=True):
        with torch.no_grad():
            logits = model(input_ids=source[None], decoder_input_ids=target[None, :-1]).logits[0]
        right.append(logits.argmax(-1) == target[1:])
    return right
