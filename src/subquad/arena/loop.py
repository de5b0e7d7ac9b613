"""`subquad bench loop`: a step of `subquad train` beside one of a loop by hand.

Both train the same sizes on the same batches of the shipped corpus, exact attention, float32, one
thread, in turns; times are CPU seconds of the process from one optimiser step to the next, batches
included. The plain loop is what people write by hand: embeddings, sinusoidal positions,
`torch.nn.Transformer`, cross entropy over all positions, clipping, fused Adam. Ours is a whole run:
recipe, objective, transformers' Trainer, logs and progress.
"""

from __future__ import annotations

import itertools
import json as json_module
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad.arena.machine import machine, machine_line
from subquad.positions import Sinusoidal

__all__ = ["MOST", "PlainTransformer", "run", "table"]

MOST = 1.1
"""Greatest ratio of our time to the plain loop's."""

RECIPE = "translation-tiny"
STEPS = 12
ROUNDS = 4
PAIRS = 4000


class PlainTransformer(nn.Module):
    """`torch.nn.Transformer` with what it lacks to translate: tied embeddings and positions.

    Args:
        vocabulary: tokens.
        sizes: the section `model` of a recipe.
    """

    def __init__(self, vocabulary: int, sizes: dict[str, Any]) -> None:
        super().__init__()
        width = sizes["d_model"]
        self.embed = nn.Embedding(vocabulary, width, 0)
        nn.init.normal_(self.embed.weight, std=width**-0.5)
        with warnings.catch_warnings():  # nested tensors, a matter of inference
            warnings.simplefilter("ignore")
            self.transformer = nn.Transformer(
                width,
                sizes["num_heads"],
                sizes["encoder_layers"],
                sizes["decoder_layers"],
                sizes["dim_feedforward"],
                sizes["dropout"],
                batch_first=True,
            )
        self.dropout = nn.Dropout(sizes["dropout"])
        table = Sinusoidal(width)(torch.arange(512))
        self.register_buffer("table", table)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits (B, L, V)."""
        padding = source == 0
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        hidden = self.transformer(
            self._vectors(source),
            self._vectors(target),
            tgt_mask=mask,
            tgt_is_causal=True,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return F.linear(hidden, self.embed.weight)

    def _vectors(self, ids: Tensor) -> Tensor:
        vectors = self.embed(ids) * self.embed.embedding_dim**0.5
        out: Tensor = self.dropout(vectors + self.get_buffer("table")[: ids.shape[1]])
        return out


def _plain(folder: Path, recipe: Any, steps: int, seed: int) -> list[float]:
    """CPU seconds of each step but the first of a loop by hand."""
    from transformers import AutoTokenizer

    from subquad.data import EncodedPairs, Pairs, TokenBatches, pad_batch

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    pairs = EncodedPairs(
        Pairs.open(folder / "train.tsv"), tokenizer, max_source=256, max_target=256
    )
    torch.manual_seed(seed)
    model = PlainTransformer(len(tokenizer), dict(recipe.model)).train()
    optimiser = torch.optim.Adam(model.parameters(), 1e-4, betas=(0.9, 0.98), fused=True)
    batches = TokenBatches(pairs.lengths, tokens=recipe.training.tokens, seed=seed)
    times = []
    for rows in itertools.islice(batches, steps):
        batch = pad_batch([pairs[row] for row in rows])
        logits = model(batch["input_ids"], batch["decoder_input_ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), label_smoothing=0.1)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        times.append(time.process_time())
    return [after - before for before, after in itertools.pairwise(times)]


def _ours(folder: Path, recipe: Any) -> list[float]:
    """CPU seconds of each step but the first of a run."""
    from subquad.training.run import train

    times: list[float] = []

    def note(point: dict[str, Any]) -> None:
        if point["kind"] == "train":
            times.append(time.process_time())

    train(recipe, folder / "run", fresh=True, progress=note)
    return [after - before for before, after in itertools.pairwise(times)]


def run(out: Path, quick: bool, json: bool, echo: Callable[[str], None]) -> dict[str, Any]:
    """Times both in turns and writes loop.json and loop.md into `out`.

    Args:
        out: folder for the results.
        quick: a few steps of small batches.
        json: whether the caller wants nothing but the result.
        echo: shows progress.
    """
    from subquad.data import preset, train_tokenizer
    from subquad.training.recipe import Recipe

    steps, rounds = (3, 1) if quick else (STEPS, ROUNDS)
    before = torch.get_num_threads()
    times: dict[str, list[float]] = {"plain": [], "ours": []}
    try:
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            verses = preset("bible-es-en").read("train")[: 200 if quick else PAIRS]
            lines = ("\t".join(verse[:2]) + "\n" for verse in verses)
            (folder / "train.tsv").write_text("".join(lines), encoding="utf-8")
            tokenizer = train_tokenizer(
                (text for verse in verses for text in verse[:2]), vocab_size=8000
            )
            tokenizer.save_pretrained(folder / "tokenizer")
            for turn in range(rounds):
                recipe = Recipe.load(
                    RECIPE,
                    {
                        "data.train": str(folder / "train.tsv"),
                        "data.held_out": 10,
                        "tokenizer.path": str(folder / "tokenizer"),
                        "training.steps": steps,
                        "training.epochs": None,
                        "training.seed": turn,
                        "training.threads": 1,
                        "training.device": "cpu",
                        "training.checkpoint_minutes": 1000,
                        "evaluation.every": 10_000,
                        "evaluation.decode": 0,
                        "evaluation.best": "loss",
                        "evaluation.average": 1,
                        "logging.every": 1,
                        **({"training.tokens": 256} if quick else {}),
                    },
                )
                times["plain"] += _plain(folder, recipe, steps, turn)
                times["ours"] += _ours(folder, recipe)
                echo(f"round {turn + 1} of {rounds}")
    finally:
        torch.set_num_threads(before)
    medians = {name: statistics.median(found) for name, found in times.items()}
    result = {
        "machine": machine(threads=1),
        "recipe": RECIPE,
        "steps": len(times["ours"]),
        "seconds": medians,
        "ratio": medians["ours"] / medians["plain"],
        "most": MOST,
    }
    out.mkdir(parents=True, exist_ok=True)
    text = json_module.dumps(result, indent=1, ensure_ascii=False) + "\n"
    (out / "loop.json").write_text(text, encoding="utf-8")
    (out / "loop.md").write_text(table(result), encoding="utf-8")
    if not json:
        echo(table(result))
    return result


def table(result: dict[str, Any]) -> str:
    """The result as a Markdown page."""
    plain, ours = result["seconds"]["plain"], result["seconds"]["ours"]
    met = "yes" if result["ratio"] <= result["most"] else "**no**"
    return "\n".join(
        [
            "# A training step",
            "",
            f"Recipe `{result['recipe']}`, exact attention, float32, pairs of bible-es-en, batches "
            f"of 4,096 tokens; median CPU seconds of {result['steps']} steps each, in turns.",
            "",
            "| loop | seconds | ratio |",
            "|---|---:|---:|",
            f"| by hand around `torch.nn.Transformer` | {plain:.3f} | 1 |",
            f"| `subquad train` | {ours:.3f} | {result['ratio']:.2f} |",
            "",
            f"At most {result['most']:g} times the plain loop: {met}.",
            "",
            f"{machine_line(result['machine'])}. Again: `subquad bench loop`.",
            "",
        ]
    )
