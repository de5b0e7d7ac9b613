"""AntiBERTy on antibody sequences: masked residues, before and after.

Human heavy chains are put together from germline genes: a V gene, a D gene and a J gene,
translated. In each, 15% of the residues are masked, by the seed of the study and not of the
mechanism; "recovered" is the share that the model ranks first. Chains have some 120 residues,
of which near_far reads many exactly; UniProt proteins of up to 510 residues, which the model
never saw, show the far field: there the original's own answers are the measure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from subquad.arena import corpora
from subquad.arena.conversion.stages import MINUTES, Recover, sq_recover, stages
from subquad.arena.zoo import Zoo, load_antiberty

__all__ = ["measure", "table"]

COUNT, RECOVERY = 200, 400
SEEDS = (0, 1, 2)
SHARE = 0.15


def measure(
    zoo: Zoo,
    *,
    quick: bool,
    echo: Callable[[str], None],
    recover: Recover | None = sq_recover,
) -> dict[str, Any]:
    """Recovered residues and agreement of the original, the converted and the recovered model."""
    found = load_antiberty(zoo)
    model, tokenizer = found.model, found.tokenizer
    count = 8 if quick else COUNT
    chains = corpora.heavy_chains(zoo, count + RECOVERY)
    long = [x for _, x in corpora.proteins(zoo) if 400 <= len(x) <= 510 and set(x) <= RESIDUES]
    samples = {
        "chains": [_masked(tokenizer, x, i) for i, x in enumerate(chains[:count])],
        "proteins": [_masked(tokenizer, x, i) for i, x in enumerate(long[: count // 2])],
    }
    originals: dict[str, list[Tensor]] = {}

    def score(scored: nn.Module) -> dict[str, Any]:
        row: dict[str, Any] = {}
        for kind, sample in samples.items():
            logits = [_logits(scored, ids)[hidden] for ids, hidden, _ in sample]
            first = originals.setdefault(kind, logits)
            best = torch.cat([x.argmax(-1) for x in logits])
            if kind == "chains":
                wanted = torch.cat([target for _, _, target in sample])
                row["recovered"] = float((best == wanted).double().mean())
            agree = best == torch.cat([x.argmax(-1) for x in first])
            row[f"agreement, {kind}"] = float(agree.double().mean())
            p, q = (torch.cat(x).double().log_softmax(-1) for x in (first, logits))
            row[f"KL, {kind}"] = float((p.exp() * (p - q)).sum(-1).mean())
        return row

    rows = stages(
        model,
        score,
        {"near_far": None},
        seeds=SEEDS[:1] if quick else SEEDS,
        examples=[{"input_ids": _masked(tokenizer, x, i)[0]} for i, x in enumerate(chains[count:])],
        recover=None if quick else recover,
        echo=echo,
    )
    return {
        "settings": {
            f"{kind}": f"{len(sample)} of {sum(len(x[0]) for x in sample) / len(sample):.0f} tokens"
            for kind, sample in samples.items()
        }
        | {"masked": f"{SHARE:.0%}", "recovery": f"{MINUTES:g} minutes on {RECOVERY} other chains"},
        "rows": rows,
    }


def table(result: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each model and seed."""
    rows: list[dict[str, Any]] = result["rows"]
    return rows


RESIDUES = set("ACDEFGHIKLMNPQRSTVWY")


def _masked(tokenizer: Any, residues: str, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(ids with masks, where they are, what they hide)."""
    ids = torch.tensor(tokenizer(" ".join(residues))["input_ids"])
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.rand(len(ids), generator=generator) < SHARE
    hidden[0] = hidden[-1] = False
    hidden[1 + seed % (len(ids) - 2)] = True  # at least one
    return ids.masked_fill(hidden, tokenizer.mask_token_id), hidden, ids[hidden]


def _logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids[None]).logits[0]
