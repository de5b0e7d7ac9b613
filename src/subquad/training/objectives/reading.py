"""What a decoder reads in a batch, and what it is to predict: of translation and of text alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from subquad.errors import OptionError

__all__ = ["Cut", "Kind", "Reading", "Seen", "Steps", "end_tokens", "kind_of", "uniform"]

Kind = str
""" "seq2seq", "causal", "parallel" (a non-autoregressive decoder) or "other" (no decoder)."""

SOURCES = ("input_ids", "attention_mask", "inputs_embeds", "input_features", "source_ids")
"""Names of a batch that an encoder is given."""


def kind_of(model: Any) -> Kind:
    """What a model is, by what it can do."""
    if not hasattr(model, "hidden") or not hasattr(model, "head"):
        return "other"
    if not getattr(model, "autoregressive", True):
        return "parallel"
    return "seq2seq" if hasattr(model, "encode") else "causal"


def end_tokens(model: Any) -> list[int]:
    """The model's ends of sequence."""
    end = model.config.eos_token_id
    return list(end) if isinstance(end, list | tuple) else [] if end is None else [end]


def uniform(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draws from U[0, 1) in the shape and on the device of `like`, in float32."""
    device = like.device if generator is None else generator.device
    return torch.rand(like.shape, generator=generator, device=device).to(like.device)


@dataclass(frozen=True)
class Seen:
    """What a decoder has made of what it read.

    Args:
        hidden: (B, L, C).
        vectors: (B, L, C), read.
        alignments: (B, H, L, S), of each cross-attention, where asked for.
    """

    hidden: Tensor
    vectors: Tensor
    alignments: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Reading:
    """A batch as a decoder sees it: at each place it reads a token, and predicts the next one.

    Args:
        model: a `Seq2SeqTransformer` or a `CausalTransformer`.
        inputs: (B, L) tokens that are read.
        labels: (B, L) tokens that are to be predicted, −100 = nothing.
        mask: (B, L), 1 = attend; None without padding that matters.
        encoded: the source, read; None without one.
        disturb: noise, added while training to the vectors that the decoder reads.
    """

    model: Any
    inputs: Tensor
    labels: Tensor
    mask: Tensor | None = None
    encoded: Any = None
    disturb: Callable[[Tensor], Tensor] | None = None

    @classmethod
    def of(cls, model: Any, batch: Mapping[str, Tensor]) -> Reading:
        """A batch's reading; the source is read on the way.

        Args:
            model: that reads it.
            batch: by the names of the model's `forward`.

        Raises:
            OptionError: the batch has no labels.
        """
        if "labels" not in batch:
            raise OptionError(f"the batch has no labels, it has {', '.join(batch)}")
        labels, mask = batch["labels"], batch.get("attention_mask")
        if kind_of(model) == "causal":
            mask = None if mask is None else mask[:, :-1]
            return cls(model, batch["input_ids"][:, :-1], labels[:, 1:], mask)
        inputs = batch.get("decoder_input_ids")
        if inputs is None:
            inputs = model.prepare_decoder_input_ids_from_labels(labels)
        encoded = model.encode(**{name: batch[name] for name in SOURCES if name in batch})
        return cls(model, inputs, labels, batch.get("decoder_attention_mask"), encoded)

    @property
    def free(self) -> Tensor:
        """(B, L): which of the tokens read were to be predicted a place before."""
        known = self.labels != -100
        return torch.cat([torch.zeros_like(known[:, :1]), known[:, :-1]], 1)

    def reads(self, inputs: Tensor) -> Reading:
        """The same with other tokens to be read."""
        return replace(self, inputs=inputs)

    def vectors(self, tokens: Tensor) -> Tensor:
        """The vectors (B, L, C) of tokens (B, L)."""
        found: Tensor = self.model.embedded(tokens, self.model.embed)
        return found

    def see(
        self,
        vectors: Tensor | None = None,
        mask: Tensor | None = None,
        *,
        align: bool = False,
        cache: Any = None,
    ) -> Seen:
        """What the decoder makes of `inputs`, or of vectors in their place.

        Args:
            vectors: (B, L, C).
            mask: (B, L) of all tokens so far, with vectors.
            align: with the weights of the cross-attentions.
            cache: a `StackCache` of the tokens before, which moves on.
        """
        if vectors is None:
            vectors, mask = self.vectors(self.inputs), self.mask
        if self.disturb is not None and self.model.training:
            vectors = self.disturb(vectors)
        if self.encoded is None:
            hidden = self.model.hidden(
                inputs_embeds=vectors, attention_mask=mask, past_key_values=cache
            )
            return Seen(hidden, vectors)
        record: list[Tensor] | None = [] if align else None
        hidden = self.model.hidden(
            self.encoded,
            decoder_inputs_embeds=vectors,
            decoder_attention_mask=mask,
            past_key_values=cache,
            record=record,
        )
        return Seen(hidden, vectors, tuple(record or ()))

    def logits(self, seen: Seen, places: Tensor) -> Tensor:
        """Logits (N, V) of the next tokens at places (B, L) bool; with copies log-probabilities."""
        if self.copies:
            every: Tensor = self.model.logits(
                seen.hidden, self.encoded, decoder_inputs_embeds=seen.vectors
            )
            return every[places]
        found: Tensor = self.model.head(seen.hidden[places])
        return found

    def ends(self, tokens: Tensor) -> Tensor:
        """Which tokens are an end of sequence."""
        return torch.isin(tokens, tokens.new_tensor(end_tokens(self.model)))

    @property
    def copies(self) -> bool:
        """Whether the model copies words of the source."""
        return getattr(self.model, "pointer", None) is not None


class Cut:
    """Tensors with a graph, and leaves in their place."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.leaves: list[Tensor] = []

    def __call__(self, tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        self.tensors.append(tensor)
        self.leaves.append(tensor.detach().requires_grad_())
        return self.leaves[-1]


class Steps:
    """A decoder that is fed a token at a time.

    From a state where all mechanisms have one; else the whole prefix is computed anew for each
    token.
    """

    def __init__(self, reading: Reading) -> None:
        from subquad.models.base import can_stream
        from subquad.models.cache import StackCache

        self.reading = reading
        self.cache = StackCache() if can_stream(reading.model.decoder) else None
        self.count = 0
        self.prefix: Tensor | None = None

    def __call__(self, tokens: Tensor) -> Seen:
        """What the decoder, fed with tokens (B,), has at their place."""
        reading = self.reading
        vectors = reading.vectors(tokens[:, None])
        self.count += 1
        mask = None if reading.mask is None else reading.mask[:, : self.count]
        if self.cache is not None:
            return reading.see(vectors, mask, cache=self.cache)
        self.prefix = vectors if self.prefix is None else torch.cat([self.prefix, vectors], 1)
        seen = reading.see(self.prefix, mask)
        return Seen(seen.hidden[:, -1:], seen.vectors[:, -1:])

    def forget(self, memory: Cut | None = None) -> None:
        """Drops the graph of what the state holds of earlier tokens.

        Args:
            memory: at the first token, cuts off what it holds of the source, too, which then
                stays.
        """
        if self.cache is None or self.cache.state is None:
            raise OptionError("the decoder has no state")
        state, parts = self.cache.state, []
        crossing = {
            block.place
            for block in self.reading.model.decoder.blocks
            if getattr(block, "letter", "") == "c"
        }
        for place, one in enumerate(state.attentions):
            if place not in crossing:
                one = one.detach()
            elif memory is not None:
                one = one.map(memory)
            parts.append(one)
        self.cache.state = replace(state, attentions=tuple(parts))
