"""What a decoder is fed while it trains: the truth, or tokens that it has chosen itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from subquad.attention.base import looking
from subquad.kernels.transforms import refuse_graph
from subquad.training.objectives.cross_entropy import losses
from subquad.training.objectives.reading import Cut, Reading, Steps

__all__ = ["Choice", "Own", "fed", "stepwise_cross_entropy"]

Choice = Callable[[Tensor, Tensor], Tensor]
"""Logits (N, V) and draws (N,) from U[0, 1) → tokens (N,)."""


@dataclass(frozen=True)
class Own:
    """How a model's own token follows from its logits.

        argmax    the likeliest
        sample    by p = softmax(logits / temperature), of all or of the `top_k` likeliest

    A sampled token is the first whose cumulative probability exceeds the draw u: it depends on
    the logits and u alone, so that a place that is computed again keeps its token.
    """

    token: str = "sample"
    temperature: float = 1.0
    top_k: int | None = None

    def __call__(self, logits: Tensor, draws: Tensor) -> Tensor:
        if self.token == "argmax":
            return logits.argmax(-1)
        below = self.probabilities(logits).cumsum(-1)
        total = below[..., -1:]
        found = (below <= draws[..., None] * total).sum(-1)
        return torch.minimum(found, (below < total).sum(-1))  # draws · total may round up to it

    def probabilities(self, logits: Tensor) -> Tensor:
        """softmax(logits / temperature) over the `top_k` likeliest tokens, (…, V)."""
        logits = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k, -1).values[..., -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        return logits.softmax(-1)


@torch.no_grad()
def fed(
    reading: Reading, kept: Tensor, choice: Choice, draws: Tensor, until_end: bool = False
) -> Tensor:
    """The tokens (B, L) that a decoder reads which writes some of them itself, one by one.

        x_t = truth_t where kept, else choice(logits of x_<t, u_t)

    Without dropout, as it will write later. L steps, from a state where there is one.

    Args:
        reading: with the truth as its inputs.
        kept: (B, L) bool, where the truth stays; the first place always does.
        choice: of a token.
        draws: (B, L) from U[0, 1), u.
        until_end: nothing is needed behind a row's first end of sequence; what is there then
            means nothing.
    """
    inputs = reading.inputs.clone()
    free = ~kept
    last = int(free.any(0).nonzero().amax()) if bool(free.any()) else 0
    ended, every = torch.zeros_like(free[:, 0]), torch.ones_like(free[:, :1])
    with looking(reading.model):
        steps = Steps(reading)
        for place in range(last):
            logits = reading.logits(steps(inputs[:, place]), every)
            own = choice(logits, draws[:, place + 1])
            inputs[:, place + 1] = torch.where(free[:, place + 1], own, inputs[:, place + 1])
            if until_end:
                ended |= free[:, place + 1] & reading.ends(own)
                if bool(ended.all()):
                    break
    return inputs


def stepwise_cross_entropy(
    reading: Reading,
    kept: Tensor,
    choice: Choice,
    draws: Tensor,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross entropy of a decoder that is fed as by `fed`, minimised token by token.

    The gradient of each token's loss is taken as soon as there is one, and what the decoder
    remembers of earlier tokens is a constant in it: Σ_t ∇ℓ_t(θ; state_t fixed). So no graph is
    kept of more than one token: memory does not grow with the length, beyond the state itself,
    where one backward through the sum needs all tokens' activations. What is given up is the
    gradient through self-attention to earlier tokens; that to the source is whole.

    The result is the mean over labels, as that of `cross_entropy`; its backward hands over
    the gradients, which are there by then. The model's own mode says whether there is dropout.

    Args:
        reading, kept, choice, draws: as in `fed`; the decoder's mechanisms have a state.
        label_smoothing: ε.
    """
    model, labels, inputs = reading.model, reading.labels, reading.inputs
    parameters = [one for one in model.parameters() if one.requires_grad]
    learning = torch.is_grad_enabled() and bool(parameters)
    count, every = (labels != -100).sum().clamp_min(1), torch.ones_like(kept[:, :1])
    encoder, memory = Cut(), Cut()
    if learning and reading.encoded is not None:
        parts = {name: encoder(tensor) for name, tensor in reading.encoded.items()}
        reading = dataclasses.replace(reading, encoded=type(reading.encoded)(**parts))
    steps, tokens, total = Steps(reading), inputs[:, 0], torch.zeros((), device=labels.device)
    for place in range(inputs.shape[1]):
        seen = steps(tokens)
        loss = losses(reading, seen, labels[:, place : place + 1], label_smoothing).sum() / count
        total = total + loss.detach()
        if learning and place == 0:
            first = loss
            steps.forget(memory)
            gradients = _Gradients([*parameters, *encoder.leaves, *memory.leaves])
        elif learning:
            gradients.add([loss])
            steps.forget()
        if place + 1 < inputs.shape[1]:
            with torch.no_grad():
                own = choice(reading.logits(seen, every), draws[:, place + 1])
            tokens = torch.where(kept[:, place + 1], inputs[:, place + 1], own)
    if not learning:
        return total
    # Gradients of all tokens, back through the first one's graph, which has read the memory,
    gradients = gradients.through([first, *memory.tensors], [torch.ones_like(first)])
    # and through the encoder's, which has written it and which penalties may stand in.
    gradients = gradients.through(encoder.tensors, keep=True)
    known: Tensor = _Known.apply(total, gradients.sums, *parameters)  # type: ignore[no-untyped-call]
    return known


class _Gradients:
    """Sums of gradients with respect to tensors, the last of which may be leaves of a `Cut`."""

    def __init__(self, tensors: Sequence[Tensor], sums: Sequence[Tensor | None] = ()) -> None:
        self.tensors = list(tensors)
        self.sums: list[Tensor | None] = list(sums) or [None] * len(self.tensors)

    def add(
        self,
        outputs: Sequence[Tensor],
        weights: Sequence[Tensor] | None = None,
        keep: bool = False,
    ) -> None:
        """Adds Σ weight · ∇output; the graph can be used again if it is kept."""
        found = torch.autograd.grad(
            outputs, self.tensors, weights, retain_graph=keep, allow_unused=True
        )
        for index, one in enumerate(found):
            before = self.sums[index]
            if one is not None:
                self.sums[index] = one if before is None else before + one

    def through(
        self, outputs: Sequence[Tensor], weights: Sequence[Tensor] = (), keep: bool = False
    ) -> _Gradients:
        """Without the last leaves: their gradients are handed to what they were cut off from.

        Args:
            outputs: with a graph: what has `weights`, and what the last leaves stand for.
            weights: of the first ones; the others' are the leaves' gradients.
            keep: the graph of the outputs.
        """
        size = len(self.tensors) - (len(outputs) - len(weights))
        pairs = zip(outputs, [*weights, *self.sums[size:]], strict=True)
        known = [(output, weight) for output, weight in pairs if weight is not None]
        rest = _Gradients(self.tensors[:size], self.sums[:size])
        if known:
            rest.add([output for output, _ in known], [weight for _, weight in known], keep)
        return rest


class _Known(torch.autograd.Function):
    """A value whose gradient is known: its backward hands it over."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor | None], *at: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> Any:
        refuse_graph("stepped free running", "it keeps no graph of its gradients")
        factor = above[0]
        return None, None, *(None if one is None else factor * one for one in ctx.gradients)
