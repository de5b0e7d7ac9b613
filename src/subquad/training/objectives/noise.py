"""Noise on what a model reads while it trains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from subquad.options import Config, integer_problem, number_problem
from subquad.training.objectives.reading import Reading, end_tokens, uniform

__all__ = ["Noise"]


@dataclass(frozen=True)
class Noise(Config):
    """Options of noise, each for the source and for the target that the decoder reads.

    Tokens of padding, start and end stay what they are, and labels do. Only in training mode,
    as dropout.

    Args:
        source_drop, target_drop: probability with which a token becomes `drop_to` (word dropout:
            Bowman et al. 2016, arXiv 1511.06349, section 3.1, for the target).
        source_replace, target_replace: probability with which it becomes any other one,
            uniformly (the replacements of Wang et al. 2018, arXiv 1808.07512, with a probability
            for each token in place of their distribution of counts).
        source_vectors, target_vectors: σ of N(0, σ²) that is added to embeddings, which have
            about unit variance where `scale_embeddings` is on.
        drop_to: the token of a dropped one; 3 is ``<unk>`` of this package's tokenizers.
    """

    mechanism = "noise"

    source_drop: float = 0.0
    source_replace: float = 0.0
    source_vectors: float = 0.0
    target_drop: float = 0.0
    target_replace: float = 0.0
    target_vectors: float = 0.0
    drop_to: int = 3

    def problems(self) -> Iterator[str]:
        yield from integer_problem("drop_to", self.drop_to, 0)
        for side in ("source", "target"):
            chances = [f"{side}_drop", f"{side}_replace"]
            found = [
                one for name in chances for one in number_problem(name, getattr(self, name), 0, 1)
            ]
            yield from found
            if not found and sum(getattr(self, name) for name in chances) > 1:
                yield f"{chances[0]} + {chances[1]} must be ≤ 1: they exclude each other"
            yield from number_problem(f"{side}_vectors", getattr(self, f"{side}_vectors"), 0)

    @property
    def of_source(self) -> bool:
        """Whether it does anything to the source."""
        return bool(self.source_drop or self.source_replace or self.source_vectors)

    @property
    def of_target(self) -> bool:
        """Whether it does anything to what a decoder reads."""
        return bool(self.target_drop or self.target_replace or self.target_vectors)

    def on_source(
        self, model: Any, batch: Mapping[str, Tensor], generator: torch.Generator | None
    ) -> Mapping[str, Tensor]:
        """The batch with noise on its source tokens, or with their vectors and noise on these."""
        if not (model.training and self.of_source):
            return batch
        table = model.embed if model.embed_source is None else model.embed_source
        tokens = batch["input_ids"]
        if self.source_drop or self.source_replace:
            chances = (self.source_drop, self.source_replace)
            tokens = self._disturbed(tokens, None, *chances, model, table, generator)
        if getattr(model, "pointer", None) is not None:  # what is copied stays what it is
            batch = {"source_ids": batch["input_ids"], **batch}
        batch = {**batch, "input_ids": tokens}
        if self.source_vectors:
            vectors = model.embedded(batch.pop("input_ids"), table)
            batch["inputs_embeds"] = _noisy(vectors, self.source_vectors, generator)
        return batch

    def on_target(self, reading: Reading, generator: torch.Generator | None) -> Reading:
        """The reading with noise on the tokens that the decoder reads."""
        model = reading.model
        if not model.training:
            return reading
        if self.target_drop or self.target_replace:
            chances = (self.target_drop, self.target_replace)
            reading = reading.reads(
                self._disturbed(
                    reading.inputs, reading.free, *chances, model, model.embed, generator
                )
            )
        if self.target_vectors:
            scale = self.target_vectors
            reading = replace(reading, disturb=lambda vectors: _noisy(vectors, scale, generator))
        return reading

    def _disturbed(
        self,
        tokens: Tensor,
        among: Tensor | None,
        drop: float,
        swap: float,
        model: Any,
        table: nn.Embedding,
        generator: torch.Generator | None,
    ) -> Tensor:
        config = model.config
        ids = {config.pad_token_id, config.bos_token_id, *end_tokens(model)} - {None}
        special = sorted(ids)
        coins = uniform(tokens, generator)
        open_ = ~torch.isin(tokens, tokens.new_tensor(special))
        open_ = open_ if among is None else open_ & among
        count = table.num_embeddings - len(special)
        others = (uniform(tokens, generator) * count).long().clamp_max(count - 1)
        for one in special:  # upwards: numbers of ordinary tokens
            others = others + (others >= one).long()
        found = torch.where(open_ & (coins < drop), self.drop_to, tokens)
        return torch.where(open_ & (coins >= drop) & (coins < drop + swap), others, found)


def _noisy(vectors: Tensor, scale: float, generator: torch.Generator | None) -> Tensor:
    device = vectors.device if generator is None else generator.device
    noise = torch.randn(vectors.shape, generator=generator, device=device)
    return vectors + scale * noise.to(vectors)
