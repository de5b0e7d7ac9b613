"""Steps of decoding that are prepared once, for as long as nothing but numbers changes.

A step takes tens of microseconds, as long as the checks of a call. A step like the last one, of
tensors of the same shapes and strides, needs no second look.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from subquad.attention.base import State
from subquad.kernels.dispatch import forced
from subquad.kernels.memory import has_data

__all__ = ["TOKENS", "Fitting", "Known", "Prepared", "held_tensors", "may_be_prepared", "written"]

TOKENS = 8
"""Most tokens of a step that is worth preparing."""


SHAPES = 4
"""Shapes of queries that a mechanism's steps are kept for: batches and drafts come in turns."""


class Fitting(Protocol):
    """A step that takes tensors like those it was made for."""

    def takes_queries(self, q: Tensor) -> bool:
        """Whether queries are."""
        ...


Step = TypeVar("Step", bound=Fitting)


@dataclass(eq=False)
class Prepared(Generic[Step]):
    """A step that was prepared for a mechanism, as long as its tensors are what they were.

    Args:
        step: what runs.
        scale: that of the calls, a number.
        held: the mechanism's parameters and buffers with the versions that they had.
        last: the state that the step made last, which needs no check.
    """

    step: Step
    scale: float | None
    held: list[tuple[Tensor, int]]
    last: ref[State] | None = None

    def __post_init__(self) -> None:
        if self.scale is not None:  # a tensor could be changed
            self.scale = float(self.scale)

    def fits(self, mechanism: nn.Module, q: Tensor, scale: float | None) -> bool:
        """Whether a call with these queries may be one of its steps."""
        return (
            self.scale == scale
            and self.step.takes_queries(q)
            and may_be_prepared()
            and has_data(q)
            and self._unchanged(mechanism)
        )

    def knows(self, state: State) -> bool:
        """Whether it made this state itself."""
        return self.last is not None and self.last() is state

    def _unchanged(self, mechanism: nn.Module) -> bool:
        at, held = 0, self.held
        for tensors in (mechanism._parameters, mechanism._buffers):
            for t in tensors.values():
                if t is not None:
                    if at == len(held) or t is not held[at][0] or t._version != held[at][1]:
                        return False
                    at += 1
        return at == len(held)


class Known(threading.local, Generic[Step]):
    """Prepared steps of the mechanisms that a thread decodes with."""

    def __init__(self) -> None:
        self.steps: WeakKeyDictionary[nn.Module, dict[torch.Size, Prepared[Step]]] = (
            WeakKeyDictionary()
        )

    def get(self, mechanism: nn.Module, q: Tensor) -> Prepared[Step] | None:
        """The mechanism's for queries of this shape, if there is one."""
        known = self.steps.get(mechanism)
        return None if known is None else known.get(q.shape)

    def remember(self, mechanism: nn.Module, q: Tensor, found: Prepared[Step] | None) -> None:
        """In the place of what was known of this shape; None: nothing can be prepared."""
        known = self.steps.setdefault(mechanism, {})
        known.pop(q.shape, None)
        if found is not None:
            known[q.shape] = found
        if len(known) > SHAPES:
            del known[next(iter(known))]


def may_be_prepared() -> bool:
    """Whether the library may run a step here and now: no gradient, no autocast."""
    return (
        not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and forced() in (None, "native")
    )


def written(*tensors: Tensor) -> None:
    """Says that the library wrote over tensors: a graph that kept them for its gradients refuses
    to go on, as with every operation in place.
    """
    for tensor in tensors:
        torch.autograd.graph.increment_version(tensor)


def held_tensors(mechanism: nn.Module) -> list[tuple[Tensor, int]] | None:
    """A mechanism's own tensors and their versions; None where their changes are not counted."""
    tensors = (*mechanism._parameters.values(), *mechanism._buffers.values())
    found = [t for t in tensors if t is not None]
    if any(t.is_inference() for t in found):
        return None
    return [(t, t._version) for t in found]
