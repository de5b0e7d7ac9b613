"""What is timed: head layouts, and one call named by mechanism, mode, mask and length."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from subquad import kernels

__all__ = [
    "DECODE",
    "FORWARD",
    "KINDS",
    "PREFILL",
    "TRAINING",
    "Case",
    "Sizes",
    "mask_name",
    "setting",
    "thousands",
]

FORWARD, TRAINING, PREFILL, DECODE = "forward", "training step", "prefill", "decode step"

KINDS = (
    (FORWARD, False),
    (TRAINING, False),
    (FORWARD, True),
    (TRAINING, True),
    (PREFILL, True),
    (DECODE, True),
)
"""(mode, causal) of everything that is timed."""


@dataclass(frozen=True)
class Sizes:
    """One head layout for every contender: B=1, H heads, D = V, M features.

    Args:
        heads, head_dim, features: H, D, M.
        device: "cpu" or "cuda".
        dtype: of q, k and v.
    """

    heads: int = 8
    head_dim: int = 64
    features: int = 128
    device: str = "cpu"
    dtype: str = "float32"

    def inputs(self, length: int, seed: int = 0, dtype: str = "") -> list[Tensor]:
        """q, k, v and the output's gradient, (1, H, L, D) of N(0, 1), rounded to the dtype."""
        generator = torch.Generator().manual_seed(seed)
        shape = (1, self.heads, length, self.head_dim)
        kind: torch.dtype = getattr(torch, dtype or self.dtype)
        drawn = (torch.randn(shape, generator=generator) for _ in range(4))
        return [t.to(self.device, kind) for t in drawn]


@dataclass(frozen=True)
class Case:
    """One call that can be timed.

    Args:
        name: of the contender.
        mode: one of forward, training step, prefill and decode step.
        causal: whether the future is masked out; prefill and decode step always are.
        length: tokens; of a decode step those that the state has seen.
        dtype: of the inputs where it is not the run's.
        threads: of torch.
        backend: that `subquad.kernels.use` forces; empty: the one that a user gets.
    """

    name: str
    mode: str = FORWARD
    causal: bool = False
    length: int = 4096
    dtype: str = ""
    threads: int = 1
    backend: str = ""

    def at(self, length: int) -> Case:
        """The same at another length."""
        return dataclasses.replace(self, length=length)

    @property
    def kind(self) -> Case:
        """The same at any length."""
        return self.at(0)

    @property
    def checked_by(self) -> Case:
        """The kind whose check covers this one: a training step's, or a decode step's."""
        mode = DECODE if self.mode in (PREFILL, DECODE) else TRAINING
        return dataclasses.replace(self.kind, mode=mode)

    @property
    def text(self) -> str:
        """Mask and mode in words; prefill and decode step are causal."""
        return (
            self.mode if self.mode in (PREFILL, DECODE) else f"{mask_name(self.causal)} {self.mode}"
        )


@contextlib.contextmanager
def setting(case: Case) -> Iterator[None]:
    """The threads and the backend of a case, for a while."""
    threads = torch.get_num_threads()
    force = kernels.use(case.backend) if case.backend else contextlib.nullcontext()
    if threads != case.threads:
        torch.set_num_threads(case.threads)
    try:
        with force:
            yield
    finally:
        if threads != case.threads:
            torch.set_num_threads(threads)


def mask_name(causal: bool) -> str:
    """The mask in a word."""
    return "causal" if causal else "bidirectional"


def thousands(length: int) -> str:
    """4096 as 4k."""
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else str(length)
