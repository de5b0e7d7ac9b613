"""Scheduled sampling: from the truth to a model's own tokens while it trains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from subquad.attention.base import looking
from subquad.options import (
    Config,
    choice_problem,
    flag_problem,
    integer_problem,
    number_problem,
)
from subquad.training.objectives.feeding import Own
from subquad.training.objectives.reading import Reading, uniform

__all__ = ["Scheduled"]

VARIANTS = ("original", "two_pass", "parallel")
DECAYS = ("linear", "exponential", "inverse_sigmoid")
TOKENS = ("argmax", "sample", "mix", "gumbel")


@dataclass(frozen=True)
class Scheduled(Config):
    """Options of scheduled sampling; see `truth_probability`, `passed` and `averaged`.

    Args:
        variant: "original", token by token; "two_pass", a first pass over the truth gives all
            own tokens; "parallel", several such passes over their own results.
        decay: of the truth's probability: "linear", "exponential", "inverse_sigmoid".
        start: truth's probability at the beginning.
        end: its lower bound.
        k: of the decay; default: linear start − end, exponential 0.01, inverse_sigmoid 100.
        after: share of training before, with the truth alone.
        token: a model's own: "argmax", "sample", or in two passes an embedding in a token's
            place: "mix", the mean of all by their probability, or "gumbel", by
            softmax((logits + Gumbel noise) / temperature).
        temperature: of the probabilities.
        top_k: only the so many likeliest tokens; default all.
        passes: of "parallel"; default 2.
        first_pass_gradient: whether the loss reaches the first of two passes, through a mean.
    """

    mechanism = "scheduled"

    variant: str = "parallel"
    decay: str = "linear"
    start: float = 1.0
    end: float = 0.0
    k: float | None = None
    after: float = 0.0
    token: str = "sample"
    temperature: float = 1.0
    top_k: int | None = None
    passes: int | None = None
    first_pass_gradient: bool = False

    def problems(self) -> Iterator[str]:
        yield from choice_problem("variant", self.variant, VARIANTS)
        yield from choice_problem("decay", self.decay, DECAYS)
        problems = [
            *number_problem("start", self.start, 0.0, 1.0),
            *number_problem("end", self.end, 0.0, 1.0),
        ]
        yield from problems
        if not problems and self.end > self.start:
            yield f"end={self.end} must be ≤ start={self.start}: the probability falls"
        yield from number_problem("after", self.after, 0.0, 1.0)
        yield from choice_problem("token", self.token, TOKENS)
        yield from number_problem("temperature", self.temperature, 0.0, open_low=True)
        yield from flag_problem("first_pass_gradient", self.first_pass_gradient)
        if self.top_k is not None:
            yield from integer_problem("top_k", self.top_k, 1)
        if self.k is not None:
            if self.decay == "exponential":
                yield from number_problem("k", self.k, 0.0, 1.0, open_low=True)
            elif self.decay == "inverse_sigmoid":
                yield from number_problem("k", self.k, 1.0, open_low=True)
            else:
                yield from number_problem("k", self.k, 0.0)
        if self.averages and self.variant in ("original", "parallel"):
            yield (
                f"token={self.token} needs variant=two_pass: later steps and passes of "
                f"{self.variant} read tokens, a mean of embeddings is none"
            )
        if self.first_pass_gradient and not self.averages:
            yield (
                f"first_pass_gradient=True needs token=mix or gumbel: no gradient passes through "
                f"the choice of a token, given {self.token}"
            )
        if self.token == "argmax":
            idle = {"top_k": self.top_k is not None, "temperature": self.temperature != 1}
            for name in (name for name, given in idle.items() if given):
                yield f"{name}={getattr(self, name)} changes nothing with token=argmax"
        if self.passes is not None:
            yield from integer_problem("passes", self.passes, 1)
            if self.variant != "parallel":
                yield f"passes={self.passes} needs variant=parallel, given {self.variant}"

    @property
    def rounds(self) -> int:
        """Passes that own tokens come from."""
        return 1 if self.variant == "two_pass" else self.passes or 2

    @property
    def averages(self) -> bool:
        """Whether the decoder reads means of embeddings in place of tokens."""
        return self.token in ("mix", "gumbel")

    @property
    def own(self) -> Own:
        """The choice of a token."""
        return Own("argmax" if self.token == "argmax" else "sample", self.temperature, self.top_k)

    def truth_probability(self, progress: float) -> float:
        """ε, the probability with which a token that is read is the truth.

            linear             max(end, start − k·p)
            exponential        max(end, start·kᵖ),             0 < k ≤ 1
            inverse_sigmoid    max(end, start·k / (k + exp(i/k))),  i = 2·k·ln(k)·p,  k > 1

        with p the share of training that is done, from 0 at `after` to 1. Bengio et al. 2015,
        arXiv 1506.03099, section 2.4, has them by the number i of batches seen; in i/N of a run
        of N batches the linear slope is k = c·N, the exponential base kᴺ. Its inverse sigmoid
        falls to ½ at i = k·ln k; we put that in the middle of the run: ε = 1/(1 + k²ᵖ⁻¹), from
        k/(k + 1) to 1/(k + 1).
        """
        if progress < self.after:
            return 1.0
        p = min(1.0, (progress - self.after) / max(1.0 - self.after, 1e-12))
        if self.decay == "linear":
            slope = self.start - self.end if self.k is None else self.k
            return max(self.end, self.start - slope * p)
        if self.decay == "exponential":
            return max(self.end, self.start * (0.01 if self.k is None else self.k) ** p)
        k = 100.0 if self.k is None else self.k
        return max(self.end, self.start / (1.0 + k ** (2.0 * p - 1.0)))


def places_kept(reading: Reading, probability: float, generator: torch.Generator | None) -> Tensor:
    """(B, L) bool: where the truth is read, by a coin for each token that is to be predicted."""
    return (uniform(reading.inputs, generator) < probability) | ~reading.free


@torch.no_grad()
def passed(reading: Reading, kept: Tensor, own: Own, draws: Tensor, passes: int) -> Tensor:
    """The tokens (B, L) that a decoder reads which has guessed some of them all at once.

        x⁰ = truth,   xⁱ_t = truth_t where kept, else own(logits of xⁱ⁻¹_<t, u_t)

    Pass by pass the places that equal those of token-by-token sampling (`fed`) grow by one at
    least: x^L is the same. Without dropout. O(passes) decoder passes.

    Duckworth et al. 2019, arXiv 1906.04331; one pass: Mihaylova and Martins 2019, arXiv
    1906.07651. Where we deviate: coins and draws stay from pass to pass, so that a place does not
    change once those before it are settled; they hold it fixed from the pass of its own number on.

    Args:
        reading: with the truth as its inputs.
        kept: (B, L) bool, where the truth stays.
        own: choice of a token.
        draws: (B, L) from U[0, 1), u.
        passes: their number.
    """
    inputs, free = reading.inputs, ~kept
    if not bool(free.any()):
        return inputs
    predicted = free.roll(-1, 1)  # the first token is never free
    with looking(reading.model):
        for _ in range(passes):
            seen = reading.reads(inputs).see()
            tokens = own(reading.logits(seen, predicted), draws[free])
            before, inputs = inputs, inputs.masked_scatter(free, tokens)
            if torch.equal(before, inputs):
                break
    return inputs


def averaged(
    reading: Reading, kept: Tensor, options: Scheduled, generator: torch.Generator | None
) -> Tensor:
    """The vectors (B, L, C) that a decoder reads which mixes its guesses of some tokens.

        x_t = E[truth_t] where kept, else Σ_v p_v·E[v],   p = softmax((s + G) / temperature)

    with s the logits of a first pass over the truth, and G Gumbel noise or 0. Mihaylova and
    Martins 2019, arXiv 1906.07651, section 3.2; temperature is 1/α there.

    Args:
        reading: with the truth as its inputs.
        kept: (B, L) bool, where the truth stays.
        options: temperature, of how many tokens, with noise or without; and whether there is a
            gradient through the first pass, which then has dropout as all training passes.
        generator: of the noise.
    """
    model, free, gradient = reading.model, ~kept, options.first_pass_gradient
    truth = reading.vectors(reading.inputs)
    if not bool(free.any()):
        return truth
    if gradient:
        seen = reading.see()
    else:
        with looking(model), torch.no_grad():
            seen = reading.see()
    with torch.set_grad_enabled(gradient and torch.is_grad_enabled()):
        logits = reading.logits(seen, free.roll(-1, 1))
        if options.token == "gumbel":
            draws = uniform(logits, generator).clamp_min(torch.finfo(torch.float32).tiny)
            logits = logits - (-draws.log()).log().to(logits.dtype)
        chances = options.own.probabilities(logits).to(model.embed.weight.dtype)
    means = chances @ model.embed.weight * model.input_scale
    return truth.masked_scatter(free[..., None], means.to(truth.dtype))
