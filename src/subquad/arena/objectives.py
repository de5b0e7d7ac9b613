"""What training objectives do, on two tasks small enough to know the right answer.

**Tracking** (exposure bias). A hidden state z_t, one of `states`, stays with probability `stay`
and else jumps; x_t shows it with probability `clear` and else another one. A causal model reads
x_1 y_1 x_2 y_2 …, and is to write y_t = z_t. With the truth as y_{t−1}, the best guess is y_{t−1}
again, whatever x_t says: stay·(1 − clear)/(states − 1) > (1 − stay)/(states − 1)·clear. A model
that learns this, and then reads its own tokens, repeats its first guess for ever. A model that
has learnt how far to trust its own tokens weighs all x so far. Two rules bound both: `repeater`,
the best one given the true y_{t−1}, run on its own guesses, and `filter`, the best one given
x_≤t, by the forward algorithm.

**Ambiguity** (BLEU). A source is a list of different words, and its translation are their
partners behind a particle, in one of three ways: 0.4 "a" and the words in any order, 0.3 each "b"
and "c" and the words in their order. The likeliest first word is "a", behind which nobody can
know the order. What has the highest BLEU on average begins with "b" or "c". Cross entropy
learns the distribution, and greedy search takes "a": maximum likelihood is the wrong question,
not the wrong answer. Sequence-level training asks for BLEU.

Run by ``subquad bench objectives``.
"""

from __future__ import annotations

import json as json_module
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from subquad.arena.machine import machine, machine_line
from subquad.training.objectives import Objective
from subquad.training.objectives.feeding import Own, fed
from subquad.training.objectives.reading import Reading
from subquad.training.objectives.sequence import sentence_reward

__all__ = ["Ambiguity", "Tracking", "run", "trained"]

Batch = dict[str, Tensor]


def trained(
    model: Any,
    objective: Objective,
    batches: Callable[[torch.Generator], Batch],
    *,
    steps: int,
    rate: float,
    seed: int,
) -> float:
    """Trains with Adam, the rate falling to 0 on a line; seconds.

    Args:
        model: that is trained.
        objective: what is minimised.
        batches: makes one, with a generator.
        steps: of the optimiser.
        rate: of learning, at the beginning.
        seed: of batches and of the objective's draws.
    """
    generator = torch.Generator().manual_seed(seed)
    draws = torch.Generator().manual_seed(seed + 1)
    optimiser = torch.optim.Adam(model.parameters(), rate)
    start = time.perf_counter()
    model.train()
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = rate * (1 - step / steps)
        optimiser.zero_grad()
        objective(model, batches(generator), step / steps, draws).total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    model.eval()
    return time.perf_counter() - start


# ---- exposure bias -----------------------------------------------------------------------


@dataclass(frozen=True)
class Tracking:
    """The tracking task, see the top of this file.

    Args:
        states: of z.
        length: of z.
        stay: probability of no jump.
        clear: probability that x shows z.
        rows: of a batch.
    """

    states: int = 5
    length: int = 16
    stay: float = 0.9
    clear: float = 0.6
    rows: int = 32

    def batch(self, generator: torch.Generator, rows: int | None = None) -> Batch:
        """``input_ids`` x_1 y_1 x_2 …, and ``labels`` of the y."""
        rows = self.rows if rows is None else rows
        size = (rows, self.length)
        jumps = torch.rand(size, generator=generator) >= self.stay
        moves = torch.randint(1, self.states, size, generator=generator)
        moves = moves.masked_fill(~jumps, 0)
        moves[:, 0] = torch.randint(self.states, (rows,), generator=generator)
        hidden = moves.cumsum(1) % self.states
        wrong = torch.rand(size, generator=generator) >= self.clear
        errors = torch.randint(1, self.states, size, generator=generator)
        shown = (hidden + errors.masked_fill(~wrong, 0)) % self.states
        ids = torch.stack([shown + 3, hidden + 3 + self.states], 2).flatten(1)
        labels = ids.clone()
        labels[:, ::2] = -100
        return {"input_ids": ids, "labels": labels}

    def model(self, seed: int, mechanism: str = "softmax") -> Any:
        """A small language model of its tokens."""
        from subquad.models import CausalTransformer, CausalTransformerConfig

        torch.manual_seed(seed)
        return CausalTransformer(
            CausalTransformerConfig(
                vocab_size=3 + 2 * self.states,
                d_model=32,
                num_heads=4,
                num_layers=2,
                dim_feedforward=64,
                dropout=0.0,
                mechanism=mechanism,
                norm_first=True,
                seed=seed,
            )
        )

    @torch.no_grad()
    def accuracy(self, model: Any, batch: Batch, own: bool) -> Tensor:
        """Share of z that a model gets right in each row (rows,).

        Args:
            model: of `model`.
            batch: of `batch`.
            own: it reads its own y, not the truth.
        """
        reading = Reading.of(model, batch)
        if own:
            draws = torch.zeros(reading.inputs.shape)
            reading = reading.reads(fed(reading, ~reading.free, Own("argmax"), draws))
        places = reading.labels != -100
        guesses = reading.logits(reading.see(), places).argmax(-1)
        right = guesses == reading.labels[places]
        return right.view(len(reading.labels), -1).float().mean(1)

    def bounds(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Shares of z that `repeater` and `filter` get right in each row."""
        shown = batch["input_ids"][:, ::2] - 3
        hidden = batch["input_ids"][:, 1::2] - 3 - self.states
        eye = torch.eye(self.states)
        moving = self.stay * eye + (1 - self.stay) / (self.states - 1) * (1 - eye)
        showing = self.clear * eye + (1 - self.clear) / (self.states - 1) * (1 - eye)
        belief = torch.full((len(shown), self.states), 1 / self.states)
        before = belief
        rights: list[list[Tensor]] = [[], []]
        for place in range(self.length):
            seen = showing[:, shown[:, place]].T
            belief = belief @ moving * seen if place else belief * seen
            belief = belief / belief.sum(1, True)
            guess = ((before @ moving if place else before) * seen).argmax(1)
            before = eye[guess]
            for right, own in zip(rights, (guess, belief.argmax(1)), strict=True):
                right.append(own == hidden[:, place])
        repeats, filtered = (torch.stack(right, 1).float().mean(1) for right in rights)
        return repeats, filtered


# ---- BLEU --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ambiguity:
    """The ambiguous translations, see the top of this file.

    Args:
        words: of the source language.
        shortest, longest: of sources, in words.
        rows: of a batch.
    """

    words: int = 12
    shortest: int = 4
    longest: int = 6
    rows: int = 32

    def batch(self, generator: torch.Generator, rows: int | None = None) -> Batch:
        """Sources and one translation of each, with ends."""
        rows = self.rows if rows is None else rows
        sizes = torch.randint(self.shortest, self.longest + 1, (rows,), generator=generator)
        ways = torch.rand(rows, generator=generator)
        ids = torch.zeros(rows, self.longest + 1, dtype=torch.long)
        labels = torch.full((rows, self.longest + 2), -100)
        for row, (size, way) in enumerate(zip(sizes.tolist(), ways.tolist(), strict=True)):
            source = torch.randperm(self.words, generator=generator)[:size]
            target = source
            if way < 0.4:
                target = source[torch.randperm(size, generator=generator)]
            particle = 6 if way < 0.4 else 7 if way < 0.7 else 8
            ids[row, :size], ids[row, size] = source + 9, 2
            labels[row, 0], labels[row, size + 1] = particle, 2
            labels[row, 1 : size + 1] = target + 9 + self.words
        return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}

    def model(self, seed: int, mechanism: str = "softmax") -> Any:
        """A small translator."""
        from subquad.models import Seq2SeqTransformer, Seq2SeqTransformerConfig

        torch.manual_seed(seed)
        return Seq2SeqTransformer(
            Seq2SeqTransformerConfig(
                vocab_size=9 + 2 * self.words,
                d_model=48,
                num_heads=4,
                encoder_layers=2,
                decoder_layers=2,
                dim_feedforward=96,
                dropout=0.0,
                mechanism=mechanism,
                norm_first=True,
                seed=seed,
            )
        )

    @torch.no_grad()
    def outputs(self, model: Any, batch: Batch) -> tuple[list[list[int]], list[list[int]]]:
        """Greedy translations and the references, as tokens without start and end."""
        source = {name: batch[name] for name in ("input_ids", "attention_mask")}
        longest = self.longest + 4
        found = model.generate(**source, max_new_tokens=longest, do_sample=False, num_beams=1)
        return _words(found[:, 1:]), _words(batch["labels"])

    def scores(self, model: Any, batch: Batch) -> tuple[Tensor, float]:
        """BLEU of each greedy translation, 0 to 1, and of the corpus, 0 to 100."""
        import sacrebleu

        outputs, truths = self.outputs(model, batch)
        texts, wanted = ([" ".join(map(str, row)) for row in rows] for rows in (outputs, truths))
        corpus = sacrebleu.BLEU(tokenize="none", force=True).corpus_score(texts, [wanted]).score
        return torch.tensor(sentence_reward("bleu")(outputs, truths)), float(corpus)


def _words(rows: Tensor) -> list[list[int]]:
    """Tokens before each row's end."""
    found = []
    for row in rows.tolist():
        kept = [one for one in row if one not in (-100, 0)]
        found.append(kept[: kept.index(2)] if 2 in kept else kept)
    return found


# ---- the study ---------------------------------------------------------------------------

FED: dict[str, dict[str, Any]] = {
    "teacher forcing": {},
    "two passes": {"feeding": "scheduled", "scheduled": {"variant": "two_pass"}},
    "parallel, 2 passes": {"feeding": "scheduled", "scheduled": {"passes": 2}},
    "parallel, 4 passes": {"feeding": "scheduled", "scheduled": {"passes": 4}},
    "original": {"feeding": "scheduled", "scheduled": {"variant": "original"}},
    "free running": {"feeding": "free"},
    "free running, stepwise": {"feeding": "free", "free_loss": "stepwise"},
}
"""Objectives of the tracking task; scheduled ones get `SCHEDULE`, too."""

SCHEDULE: dict[str, Any] = {"token": "argmax", "k": 1.5}
"""The truth's probability falls to 0 in two thirds of the run."""

SCORED: dict[str, dict[str, Any]] = {
    "cross entropy": {},
    "self-critical": {"sequence": {"loss": "self_critical"}},
    "minimum risk": {"sequence": {"loss": "minimum_risk", "sharpness": 0.05}},
}
"""What a translator that has learnt the ambiguous language is trained on with."""


def track(
    name: str, seed: int, *, steps: int = 250, rows: int = 500, task: Tracking | None = None
) -> dict[str, Any]:
    """Trains a tracker with one of `FED`, and measures it on sequences of their own.

    Returns:
        accuracies ``forced`` (with the truth before each guess), ``free``, and those of the
        rules ``repeater`` and ``filter`` on the same sequences; the standard error ``error`` of
        ``free``; ``seconds`` of training.
    """
    task = task or Tracking()
    options = dict(FED[name])
    if options.get("feeding") == "scheduled":
        options["scheduled"] = {**SCHEDULE, **options["scheduled"]}
    model = task.model(seed)
    objective = Objective(0.0, **options)
    seconds = trained(model, objective, task.batch, steps=steps, rate=5e-3, seed=seed)
    test = task.batch(torch.Generator().manual_seed(10_000 + seed), rows)
    free = task.accuracy(model, test, own=True)
    repeater, filtered = task.bounds(test)
    return {
        "name": name,
        "seed": seed,
        "forced": float(task.accuracy(model, test, own=False).mean()),
        "free": float(free.mean()),
        "error": float(free.std() / len(free) ** 0.5),
        "repeater": float(repeater.mean()),
        "filter": float(filtered.mean()),
        "seconds": seconds,
    }


def translate(
    seed: int, *, steps: int = 300, more: int = 30, rows: int = 300, task: Ambiguity | None = None
) -> list[dict[str, Any]]:
    """Trains a translator with cross entropy, and from there with each of `SCORED`.

    Returns:
        for each of them ``bleu`` of the corpus; ``sentence``, the mean BLEU of sentences, and
        ``gain``, how much higher that is than before, with its standard error ``error``;
        ``seconds`` of the training on.
    """
    task = task or Ambiguity()
    model = task.model(seed)
    trained(model, Objective(0.0), task.batch, steps=steps, rate=3e-3, seed=seed)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    test = task.batch(torch.Generator().manual_seed(10_000 + seed), rows)
    before, corpus = task.scores(model, test)
    found = [_scored("before", seed, before, before, corpus, 0.0)]
    for name, options in SCORED.items():
        model.load_state_dict(start)
        objective = Objective(0.0, **options)
        seconds = trained(model, objective, task.batch, steps=more, rate=1e-3, seed=seed + 1)
        after, corpus = task.scores(model, test)
        found.append(_scored(name, seed, before, after, corpus, seconds))
    return found


def _scored(
    name: str, seed: int, before: Tensor, after: Tensor, corpus: float, seconds: float
) -> dict[str, Any]:
    gains = after - before
    return {
        "name": name,
        "seed": seed,
        "bleu": corpus,
        "sentence": float(after.mean()),
        "gain": float(gains.mean()),
        "error": float(gains.std() / len(gains) ** 0.5),
        "seconds": seconds,
    }


def run(out: Path, quick: bool, json: bool, echo: Callable[[str], None]) -> dict[str, Any]:
    """Trains on both tasks with every objective; writes objectives.json and objectives.md.

    Args:
        out: folder for the results.
        quick: one seed instead of three, and shorter training.
        json: whether the caller wants nothing but the result.
        echo: shows progress.
    """
    tracking, bleu = [], []
    for seed in range(1 if quick else 3):
        for name in FED:
            tracking.append(track(name, seed, steps=50 if quick else 250))
            row = tracking[-1]
            echo(
                f"{name:24} seed {seed}  forced {row['forced']:.3f}  free {row['free']:.3f}"
                f"  (repeater {row['repeater']:.3f}, filter {row['filter']:.3f})"
            )
        steps, more = (50, 5) if quick else (300, 30)
        for row in translate(seed, steps=steps, more=more):
            bleu.append(row)
            echo(f"{row['name']:24} seed {seed}  BLEU {row['bleu']:.1f}")
    result = {"machine": machine(threads=torch.get_num_threads()), "tracking": tracking,
              "bleu": bleu}  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    text = json_module.dumps(result, indent=1, ensure_ascii=False) + "\n"
    (out / "objectives.json").write_text(text, encoding="utf-8")
    (out / "objectives.md").write_text(table(result), encoding="utf-8")
    if not json:
        echo(f"written: {out / 'objectives.md'}")
    return result


def table(result: dict[str, Any]) -> str:
    """The result as a Markdown page."""
    tracking, bleu = result["tracking"], result["bleu"]
    repeater, filtered = (_mean(tracking, key) for key in ("repeater", "filter"))
    lines = [
        "# What training objectives do",
        "",
        "Means over seeds, in parentheses the smallest and the largest.",
        "",
        "## Exposure bias: tracking a hidden state",
        "",
        "Share of states that are right, when the model reads the true states before (forced), "
        "and its own (free). The best rule that trusts the state before, run on its own guesses, "
        f"reaches {repeater:.3f}; the best one that reads the observations alone "
        f"{filtered:.3f}.",
        "",
        "| training | forced | free | seconds |",
        "|---|---|---|---|",
    ]
    for name in dict.fromkeys(row["name"] for row in tracking):
        rows = [row for row in tracking if row["name"] == name]
        lines.append(
            f"| {name} | {_spread(rows, 'forced', 3)} | {_spread(rows, 'free', 3)} "
            f"| {_mean(rows, 'seconds'):.0f} |"
        )
    lines += [
        "",
        "## BLEU: an ambiguous language",
        "",
        "Greedy translations of new sources: by cross entropy, and after a few more steps with "
        "each objective.",
        "",
        "| training | corpus BLEU | sentence BLEU | gain | seconds more |",
        "|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(row["name"] for row in bleu):
        rows = [row for row in bleu if row["name"] == name]
        lines.append(
            f"| {name} | {_spread(rows, 'bleu', 1)} | {_spread(rows, 'sentence', 3)} "
            f"| {_mean(rows, 'gain'):+.3f} | {_mean(rows, 'seconds'):.0f} |"
        )
    lines += ["", f"{machine_line(result['machine'])}. Again: `subquad bench objectives`.", ""]
    return "\n".join(lines)


def _mean(rows: list[dict[str, Any]], key: str) -> float:
    return statistics.fmean(row[key] for row in rows)


def _spread(rows: list[dict[str, Any]], key: str, digits: int) -> str:
    values = [row[key] for row in rows]
    low, high = min(values), max(values)
    return f"{statistics.fmean(values):.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"
