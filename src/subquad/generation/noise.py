"""Noise at decoding: on logits, on their temperature, on the source. All of it by seed.

This file subclasses transformers' classes: import it through `subquad.generation`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor

from subquad.errors import OptionError
from subquad.options import choice_problem, integer_problem, number_problem

__all__ = ["LogitsNoise", "TemperatureAnneal", "WordDropout"]

KINDS = ("gaussian", "gumbel")


def _checked(name: str, *problems: str) -> None:
    if problems:
        raise OptionError(f"{name}: " + "; ".join(problems))


def _generator(device: torch.device, *parts: int) -> torch.Generator:
    """A generator whose stream belongs to these numbers alone."""
    seed = 0
    for part in parts:  # an odd factor loses no bit, and keeps (1, 2) from (2, 1)
        seed = (seed * 6_364_136_223_846_793_005 + part + 1_442_695_040_888_963_407) % 2**63
    return torch.Generator(device).manual_seed(seed)


class LogitsNoise(LogitsProcessor):
    """Independent noise on every logit of every step, for `generate(logits_processor=[…])`.

        s ← s + scale·ε,   ε ~ N(0, 1)  or  ε ~ Gumbel(0, 1) = −log(−log U)

    Gumbel noise of scale 1 and greedy search draw exactly from softmax(s) (the Gumbel-max
    trick, Gumbel 1954); of scale T from softmax(s/T). Gaussian noise has no such meaning: it
    perturbs the search. In beam search noise is drawn anew at each step: that is not the
    stochastic beam search of Kool et al. 2019, whose noise belongs to whole sequences.

    A step's draw depends on `seed`, the step, and the row's place in the batch, and on nothing
    that was drawn before. O(B·V) a step.

    Args:
        scale: standard deviation of Gaussian noise, or the temperature of Gumbel noise.
        kind: "gaussian" or "gumbel".
        seed: of the draws.

    Raises:
        OptionError: naming every wrong argument.

    Example:
        >>> noise = LogitsNoise(0.5, seed=3)
        >>> ids, logits = torch.ones(2, 4, dtype=torch.long), torch.zeros(2, 9)
        >>> bool((noise(ids, logits) == noise(ids, logits)).all())
        True
    """

    def __init__(self, scale: float = 1.0, kind: str = "gaussian", seed: int = 0) -> None:
        _checked(
            "LogitsNoise",
            *number_problem("scale", scale, 0.0),
            *choice_problem("kind", kind, KINDS),
            *integer_problem("seed", seed, 0),
        )
        self.scale, self.kind, self.seed = scale, kind, seed

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores (B, V) with noise; −inf stays −inf."""
        generator = _generator(scores.device, self.seed, input_ids.shape[1])
        noise = torch.empty_like(scores)
        if self.kind == "gaussian":
            noise.normal_(generator=generator)
        else:
            noise.exponential_(generator=generator).log_().neg_()  # −log U is exponential
        return scores + self.scale * noise


class TemperatureAnneal(LogitsProcessor):
    """A temperature that falls, or rises, along the output.

        s_t ← s_t / τ_t,   τ_t = end + (start − end) · max(0, 1 − t/steps),   t = 0, 1, …

    High first: varied openings that end soberly.

    Args:
        start: temperature of the first token.
        end: from token `steps` on.
        steps: tokens in between.
        begin: length of what is given to the decoder: 1 for encoder–decoders, that of the
            prompt for language models.

    Raises:
        OptionError: naming every wrong argument.

    Example:
        >>> anneal = TemperatureAnneal(start=2.0, end=0.5, steps=10)
        >>> anneal(torch.ones(1, 1, dtype=torch.long), torch.ones(1, 3)).tolist()
        [[0.5, 0.5, 0.5]]
    """

    def __init__(
        self, start: float = 1.5, end: float = 0.5, steps: int = 20, begin: int = 1
    ) -> None:
        _checked(
            "TemperatureAnneal",
            *number_problem("start", start, 0.0, open_low=True),
            *number_problem("end", end, 0.0, open_low=True),
            *integer_problem("steps", steps, 1),
            *integer_problem("begin", begin, 0),
        )
        self.start, self.end, self.steps, self.begin = start, end, steps, begin

    def temperature(self, token: int) -> float:
        """τ of the token with this number, from 0."""
        return self.end + (self.start - self.end) * max(0.0, 1.0 - token / self.steps)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores (B, V) by their step's temperature."""
        return scores / self.temperature(max(0, input_ids.shape[1] - self.begin))


class WordDropout:
    """Input noise: each source token is dropped, or replaced, with a probability.

    Dropping: Iyyer et al. 2015 ("word dropout"); replacing by <unk> or <mask>: Gal and Ghahramani
    2016, Bowman et al. 2016, arXiv 1511.06349. Draws belong to (seed, number of the text): they
    do not depend on what else is in its batch. At least one token stays.

    Args:
        probability: of each token.
        replacement: an id that takes the token's place; None: nothing does.
        seed: of the draws.

    Raises:
        OptionError: naming every wrong argument.

    Example:
        >>> noise = WordDropout(0.5, seed=1)
        >>> noise([7, 8, 9, 10, 11, 2], index=0, keep={2}) == noise(
        ...     [7, 8, 9, 10, 11, 2], index=0, keep={2}
        ... )
        True
    """

    def __init__(
        self, probability: float = 0.1, replacement: int | None = None, seed: int = 0
    ) -> None:
        _checked(
            "WordDropout",
            *number_problem("probability", probability, 0.0, 1.0),
            *([] if replacement is None else integer_problem("replacement", replacement, 0)),
            *integer_problem("seed", seed, 0),
        )
        self.probability, self.replacement, self.seed = probability, replacement, seed

    def __call__(self, ids: Sequence[int], index: int = 0, keep: Collection[int] = ()) -> list[int]:
        """The tokens that are left, or what took their place.

        Args:
            ids: of one text.
            index: its number.
            keep: ids that are never touched: special tokens.
        """
        draws = torch.rand(len(ids), generator=_generator(torch.device("cpu"), self.seed, index))
        hit = [
            draw < self.probability and token not in keep
            for token, draw in zip(ids, draws.tolist(), strict=True)
        ]
        words = [place for place, token in enumerate(ids) if token not in keep]
        if words and self.replacement is None and all(hit[place] for place in words):
            hit[max(words, key=lambda place: float(draws[place]))] = False
        if self.replacement is not None:
            return [self.replacement if h else token for token, h in zip(ids, hit, strict=True)]
        return [token for token, h in zip(ids, hit, strict=True) if not h]
