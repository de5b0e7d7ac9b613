"""Guided attention as a term of an objective: of which alignments, how much, and how long."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from subquad.errors import OptionError
from subquad.options import Config, choice_problem, number_problem
from subquad.training.objectives.guided import diagonal_loss, monotonic_loss
from subquad.training.objectives.reading import Reading, Seen

__all__ = ["GuidedAttention"]

LOSSES = ("diagonal", "monotonic")


@dataclass(frozen=True)
class GuidedAttention(Config):
    """Options of guided attention; see `subquad.training.objectives.guided`.

    Args:
        loss: "diagonal" or "monotonic".
        weight: λ at the beginning.
        until: share of training after which there is none: λ falls to 0 on a line; None: it
            stays.
        layers: numbers of the cross-attentions that are guided, −1 the last; None: all.
        heads: of each; None: all.
        width: g of "diagonal".
    """

    mechanism = "guided"

    loss: str = "diagonal"
    weight: float = 1.0
    until: float | None = None
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    width: float = 0.2

    def problems(self) -> Iterator[str]:
        yield from choice_problem("loss", self.loss, LOSSES)
        yield from number_problem("weight", self.weight, 0.0, open_low=True)
        yield from number_problem("width", self.width, 0.0, open_low=True)
        if self.until is not None:
            yield from number_problem("until", self.until, 0.0, 1.0, open_low=True)
        for name in ("layers", "heads"):
            given = getattr(self, name)
            whole = isinstance(given, list | tuple) and all(type(one) is int for one in given)
            if given is not None and not (whole and given):
                yield f"{name}={given!r} must be a list of numbers"
        if self.loss == "monotonic" and self.width != 0.2:
            yield f"width={self.width} needs loss=diagonal, given monotonic"

    def weight_at(self, progress: float) -> float:
        """λ at a share of training."""
        if self.until is None:
            return self.weight
        return self.weight * max(0.0, 1.0 - progress / self.until)

    def __call__(self, reading: Reading, seen: Seen) -> Tensor:
        """The mean loss of the alignments that are guided, without λ.

        Raises:
            OptionError: if there is no such layer or head.
        """
        queries, keys = reading.labels != -100, reading.encoded.mask
        found = []
        for alignment in _chosen("layers", self.layers, seen.alignments):
            if self.heads is not None:
                alignment = torch.stack(_chosen("heads", self.heads, tuple(alignment.unbind(1))), 1)
            if self.loss == "diagonal":
                found.append(diagonal_loss(alignment, queries, keys, width=self.width))
            else:
                found.append(monotonic_loss(alignment, queries, keys))
        return torch.stack(found).mean()


def _chosen(name: str, numbers: tuple[int, ...] | None, given: tuple[Tensor, ...]) -> list[Tensor]:
    if numbers is None:
        return list(given)
    count = len(given)
    wrong = [one for one in numbers if not -count <= one < count]
    if wrong:
        raise OptionError(f"guided.{name}={list(numbers)}: the model has {count}, no {wrong}")
    return [given[one] for one in numbers]
