"""Output distillation: the converted model learns its exact self's outputs.

    hidden    mean over layers of Σ ‖h − h*‖² / Σ ‖h*‖²
    logits    mean over positions of KL(softmax(z*) ‖ softmax(z))
    task      the model's own loss, from the labels among the inputs; needs no teacher

h* and z* are those of the original weights under exact attention; only unmasked positions count.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad.convert.inputs import encoder_decoder, position_mask
from subquad.convert.paths import exactly
from subquad.convert.swap import converted_layers, revert, use_of
from subquad.errors import OptionError

__all__ = ["LOSSES", "Distillation", "HeldOut", "Outputs", "call", "frozen_copy"]

LOSSES = ("auto", "hidden", "logits", "task")

Teacher = Callable[[dict[str, Tensor]], "Outputs"]


@dataclass(frozen=True, eq=False)
class Outputs:
    """What a model said.

    Args:
        hidden: hidden states (B, L, C) behind each layer, the embeddings left out.
        logits: (B, L, V) or (B, V), or None for a body without a head.
        loss: of the task, where the inputs have labels.
        encoder: how many of `hidden` are those of an encoder beside a decoder; None without a
            decoder.
    """

    hidden: tuple[Tensor, ...]
    logits: Tensor | None = None
    loss: Tensor | None = None
    encoder: int | None = None

    def mask(self, inputs: dict[str, Tensor], of: Tensor, index: int = -1) -> Tensor | None:
        """(B, L) bool, positions of a state or of the logits that count; None: all."""
        if of.dim() < 3:
            return None
        place = index if index >= 0 else len(self.hidden)
        decoder = self.encoder is not None and place >= self.encoder
        return position_mask(inputs, of.shape[0], of.shape[1], decoder=decoder)


def call(model: nn.Module, inputs: dict[str, Tensor]) -> Outputs:
    """Runs the model and collects its hidden states; a cache is neither used nor made."""
    arguments: dict[str, Any] = dict(inputs)
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "is_encoder_decoder"):
        arguments["output_hidden_states"] = True
        if hasattr(config, "use_cache"):
            arguments["use_cache"] = False
    found = model(**arguments)
    if isinstance(found, Tensor):
        return Outputs((found,))
    encoder = (getattr(found, "encoder_hidden_states", None) or ())[1:]
    states = list(encoder)
    for name in ("decoder_hidden_states", "hidden_states"):
        states += (getattr(found, name, None) or ())[1:]
    if not states and isinstance(last := getattr(found, "last_hidden_state", None), Tensor):
        states = [last]
    if not states and isinstance(first := _first(found), Tensor):
        states = [first]
    return Outputs(
        tuple(states),
        getattr(found, "logits", None),
        getattr(found, "loss", None),
        len(encoder) if encoder else None,
    )


def _first(found: Any) -> Any:
    if isinstance(found, dict):
        return next(iter(found.values()), None)
    return found[0] if isinstance(found, tuple | list) and found else None


def frozen_copy(model: nn.Module) -> nn.Module:
    """The exact model with its present weights, without gradients: memory for them once more."""
    own = copy.deepcopy(model)
    revert(own)
    return own.eval().requires_grad_(False)


class Distillation:
    """The objective of output distillation.

    Args:
        model: the student.
        teacher: gives the exact outputs for the same inputs; None for ``loss="task"``.
        loss: ``"hidden"``, ``"logits"`` or ``"task"``.
    """

    def __init__(self, model: nn.Module, teacher: Teacher | None, loss: str) -> None:
        self.model, self.teacher, self.loss = model, teacher, loss

    def step(self, inputs: dict[str, Tensor], share: float = 1.0) -> Tensor:
        """Adds `share` times the loss's gradients to the parameters; returns the loss."""
        loss = self(inputs)
        (share * loss).backward()
        return loss.detach()

    def __call__(self, inputs: dict[str, Tensor]) -> Tensor:
        """The loss, with its graph."""
        if self.teacher is None:
            loss = call(self.model, inputs).loss
            if loss is None:
                raise OptionError("loss='task' needs examples with labels that the model takes")
            return loss
        with torch.no_grad():
            wanted = self.teacher(inputs)
        found = call(self.model, inputs)
        if self.loss == "hidden":
            return hidden_error(found, wanted, inputs)
        if found.logits is None or wanted.logits is None:
            raise OptionError("loss='logits' needs a model with logits; use loss='hidden'")
        return divergence(found.logits, wanted.logits, found.mask(inputs, found.logits))


def hidden_error(found: Outputs, wanted: Outputs, inputs: dict[str, Tensor]) -> Tensor:
    """Mean over layers of Σ ‖h − h*‖² / Σ ‖h*‖² over unmasked positions, in float32."""
    return torch.stack([
        relative_error(one.float(), other.float(), found.mask(inputs, one, index))
        for index, (one, other) in enumerate(zip(found.hidden, wanted.hidden, strict=True))
    ]).mean()  # fmt: skip


def relative_error(found: Tensor, wanted: Tensor, keep: Tensor | None) -> Tensor:
    """Σ ‖found − wanted‖² / Σ ‖wanted‖² over kept positions of (B, L, ...)."""
    if keep is not None:
        closed = ~keep.reshape(*keep.shape, *(1,) * (found.dim() - 2))
        found, wanted = found.masked_fill(closed, 0.0), wanted.masked_fill(closed, 0.0)
    return (found - wanted).square().sum() / wanted.square().sum().clamp_min(1e-12)


def divergence(found: Tensor, wanted: Tensor, keep: Tensor | None) -> Tensor:
    """Mean over kept positions of KL(softmax(wanted) ‖ softmax(found)), in nats."""
    if keep is not None:
        found, wanted = found[keep], wanted[keep]
    found, wanted = (t.float().flatten(0, -2).log_softmax(-1) for t in (found, wanted))
    return F.kl_div(found, wanted, reduction="batchmean", log_target=True)


class HeldOut:
    """Examples that training never sees, and what the exact model says about them.

    Args:
        model: converted, with its original weights: its exact self is run once.
        batches: of held-out examples.
    """

    def __init__(self, model: nn.Module, batches: Sequence[dict[str, Tensor]]) -> None:
        self.batches = batches
        self.next_token = not encoder_decoder(model) and any(
            use_of(name, layer) == "causal" for name, layer in converted_layers(model)
        )
        self.wanted: list[tuple[Tensor, ...]] = []
        with torch.no_grad(), exactly(model):
            for batch in batches:
                self.wanted.append(self._summary(call(model, batch), batch))

    def measure(self, model: nn.Module) -> dict[str, float]:
        """The model's agreement with what the exact one said.

        Without logits: ``cosine`` of mean-pooled hidden states, its 5th percentile ``cosine_p5``.
        With logits: ``agreement``, the share of positions with the same first choice, and
        ``kl`` in nats; of decoders ``perplexity_ratio``, their perplexity over the exact one's.
        """
        values: list[tuple[Tensor, ...]] = []
        with torch.no_grad():
            for batch, wanted in zip(self.batches, self.wanted, strict=True):
                values.append(self._against(call(model, batch), batch, wanted))
        first = torch.cat([value[0] for value in values]).double()
        if len(values[0]) == 1:
            low = float(torch.quantile(first, 0.05))
            return {"cosine": float(first.mean()), "cosine_p5": low}
        found = {"agreement": float(first.mean())}
        if len(values[0]) == 3:
            tokens = sum(int(value[2]) for value in values)
            if not tokens:
                raise OptionError("held-out examples need 2 tokens or more: the next is predicted")
            gap = sum(float(value[1]) for value in values) / tokens
            found["perplexity_ratio"] = math.exp(gap)
        else:
            found["kl"] = float(torch.cat([value[1] for value in values]).mean())
        return found

    def _summary(self, found: Outputs, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """What is kept of the exact outputs: little memory, whatever the vocabulary."""
        if found.logits is None:
            return (pooled(found.hidden[-1], found.mask(batch, found.hidden[-1])),)
        choices = found.logits.argmax(-1)
        if self._predicts(found, batch):
            return choices, next_token_loss(found.logits, batch)[0]
        return choices, found.logits

    def _against(
        self, found: Outputs, batch: dict[str, Tensor], wanted: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        if found.logits is None:
            mine = pooled(found.hidden[-1], found.mask(batch, found.hidden[-1]))
            return (F.cosine_similarity(mine.double(), wanted[0].double(), dim=-1),)
        same = found.logits.argmax(-1) == wanted[0]
        keep = found.mask(batch, found.logits)
        if keep is not None:
            same = same[keep]
        if self._predicts(found, batch):
            loss, count = next_token_loss(found.logits, batch)
            return same.flatten(), loss - wanted[1], count
        return same.flatten(), divergence(found.logits, wanted[1], keep)[None]

    def _predicts(self, found: Outputs, batch: dict[str, Tensor]) -> bool:
        ids = batch.get("input_ids")
        return (
            self.next_token
            and ids is not None
            and found.logits is not None
            and found.logits.shape[:2] == ids.shape
        )


def pooled(hidden: Tensor, keep: Tensor | None) -> Tensor:
    """Mean over kept positions, (B, C)."""
    if hidden.dim() < 3:
        return hidden
    if keep is None:
        return hidden.flatten(1, -2).mean(1)
    weight = keep[..., None].to(hidden.dtype)
    return (hidden * weight).sum(1) / weight.sum(1).clamp_min(1.0)


def next_token_loss(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Sum of −ln p(next token) in float64 and the number of tokens that have been predicted."""
    targets = batch["input_ids"][:, 1:]
    keep = position_mask(batch, *batch["input_ids"].shape, decoder=False)
    opened = torch.ones_like(targets, dtype=torch.bool) if keep is None else keep[:, 1:]
    losses = F.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), targets.flatten(), reduction="none"
    )
    return (losses.double() * opened.flatten()).sum(), opened.sum()
