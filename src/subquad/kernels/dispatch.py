"""Chooses the backend of a call to the linear or the block engine, and can explain the choice.

The only place that does so. Backends are tried in order; each answers whether it can run
the call and why not.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from subquad.errors import UnknownNameError, UnsupportedError, nearest
from subquad.kernels import triton
from subquad.kernels.block import Layout
from subquad.kernels.flex import refusal
from subquad.kernels.linear import Gradients, Problem, Result, causal_chunk
from subquad.kernels.native.engine import KEEP
from subquad.kernels.native.library import reason, reset

__all__ = [
    "BACKENDS",
    "BLOCK_BACKENDS",
    "Choice",
    "Engine",
    "choose",
    "engine",
    "explain",
    "explain_block",
    "forced",
    "forget",
    "plan",
    "use",
]

BACKENDS = ("triton", "native", "torch")
"""The linear engine's, in order of preference: fused kernels on NVIDIA GPUs, C++ on CPUs, and
chunked torch operations on any device."""

BLOCK_BACKENDS = ("flex", "torch")
"""The block engine's: FlexAttention on GPUs, and a loop of torch operations on any device."""


@dataclass(frozen=True)
class Choice:
    """The backend that runs a call, and why.

    Args:
        backend: its name.
        reason: what it does.
        refused: why each backend that would be preferred cannot run the call.
        keep: tokens from one causal state that it keeps for a backward pass to the next.
    """

    backend: str
    reason: str
    refused: Mapping[str, str] = field(default_factory=dict)
    keep: int = 0

    def __str__(self) -> str:
        lines = [f"{self.backend}: {self.reason}"]
        return "\n".join([*lines, *(f"  not {name}: {why}" for name, why in self.refused.items())])


class Engine(Protocol):
    """A backend: the functions of `subquad.kernels.linear`."""

    def forward(self, p: Problem, keep: int) -> Result:
        """Runs a call."""

    def backward(
        self, p: Problem, result: Result, out_bar: Tensor, den_bar: Tensor | None,
        s_bar: Tensor | None, z_bar: Tensor | None, need_bias: bool, keep: int,
    ) -> Gradients:  # fmt: skip
        """Cotangents of its inputs."""


MODULES = {
    "triton": "subquad.kernels.triton",
    "native": "subquad.kernels.native.engine",
    "torch": "subquad.kernels.linear",
}
"""Loaded when a call is theirs."""


def engine(backend: str) -> Engine:
    """The functions of a backend."""
    found: Any = importlib.import_module(MODULES[backend])
    return found


_forced: ContextVar[str | None] = ContextVar("subquad_backend", default=None)


def forced() -> str | None:
    """The backend that `use` asks for."""
    return _forced.get()


@contextlib.contextmanager
def use(backend: str) -> Iterator[None]:
    """Runs all calls to the linear engine inside by one backend.

    With any but "native", clusters of keys and held keys are read by torch operations, too.

    Raises:
        UnknownNameError: there is none of that name.
        UnsupportedError: at a call that it cannot run, with the reason.

    >>> import torch, subquad as sq
    >>> q = torch.randn(1, 2, 8, 4)
    >>> with sq.kernels.use("torch"):
    ...     out = sq.attention(q, q, q, "performer")
    """
    if backend not in BACKENDS:
        raise UnknownNameError(
            f"unknown backend {backend!r}{nearest(backend, BACKENDS)}; there are "
            f"{', '.join(BACKENDS)}"
        )
    token = _forced.set(backend)
    try:
        yield
    finally:
        _forced.reset(token)


def explain(
    q: Tensor, k: Tensor, v: Tensor, *, activation: str = "exp", features: int = 128,
    clip: float = 0.0, weighted: bool = False,
) -> Choice:  # fmt: skip
    """Says which backend of the linear engine runs a call, and why the others do not.

    Args:
        q, k, v: of the call.
        activation: of both feature maps, "exp" for the performer's positive features; a name of
            `subquad.kernels.linear.ACTIVATIONS`, or "function" for a map that is any function.
        features: columns of the maps.
        clip: least normaliser of signed maps, 0 for others.
        weighted: keys have weights of their own.

    >>> import torch, subquad as sq
    >>> q = torch.zeros(1, 2, 8, 4, dtype=torch.float64)
    >>> print(sq.kernels.explain(q, q, q))
    torch: chunked torch operations on cpu, sums in float64
      not triton: it is for NVIDIA GPUs, this is cpu
      not native: it computes in float32, the dtype is torch.float64
    """
    return choose(q.device.type, q.dtype, v.dtype, activation, features, clip, weighted)


def choose(
    device: str, q: torch.dtype, v: torch.dtype, activation: str, features: int, clip: float,
    weighted: bool,
) -> Choice:  # fmt: skip
    """`explain` by what it depends on; remembered, since a step of decoding asks it too.

    Raises:
        UnsupportedError: the backend that `use` asks for cannot run the call.
    """
    forced = _forced.get()
    call = _Call(device, q, v, activation, features, clip != 0.0, weighted)
    found = _chosen.get((forced, call))
    if found is None:
        found = _chosen[forced, call] = _choose(forced, call)
    return found


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def plan(
    device: str, q: torch.dtype, v: torch.dtype, activation: str, features: int, clip: float,
    weighted: bool,
) -> tuple[str, int]:  # fmt: skip
    """Backend and `Choice.keep` of a call; in a compiled graph, those of its first trace."""
    choice = choose(device, q, v, activation, features, clip, weighted)
    return choice.backend, choice.keep


def _choose(forced: str | None, call: _Call) -> Choice:
    refused: dict[str, str] = {}
    for name in BACKENDS if forced is None else (forced,):
        why = _REFUSALS[name](call)
        if why is None and name == "triton" and forced is None:
            why = _not_asked_for()
        if why is not None:
            refused[name] = why
            continue
        reason, keep = _ABOUT[name](call)
        return Choice(name, reason, refused, keep)
    raise UnsupportedError(f"the backend {forced}", "this call", refused[str(forced)])


class _Call(NamedTuple):
    device: str
    q: torch.dtype
    v: torch.dtype
    activation: str
    features: int
    clipped: bool
    weighted: bool


_chosen: dict[tuple[str | None, _Call], Choice] = {}


def _not_native(call: _Call) -> str | None:
    if call.device != "cpu":
        return f"it is for CPUs, this is {call.device}"
    if torch.float64 in (call.q, call.v):
        return "it computes in float32, the dtype is torch.float64"
    for dtype in (call.q, call.v):
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"it has no {dtype}"
    if call.activation not in ("exp", "relu", "elu"):
        return f"its maps are exp, relu and elu, this one is {call.activation}"
    if call.clipped:
        return "it has no signed maps"
    if call.weighted and call.activation != "exp":
        return "keys have weights, which it takes with exponential maps alone"
    return reason() or None


def _not_triton(call: _Call) -> str | None:
    return triton.refusal(call.device, call.q, call.v, call.activation, call.clipped)


def _not_asked_for() -> str | None:
    if os.environ.get("SUBQUAD_TRITON", "0").lower() in ("1", "on", "yes", "true"):
        return None
    return "it has not been measured on a GPU yet; SUBQUAD_TRITON=1 or kernels.use turns it on"


_REFUSALS: dict[str, Callable[[_Call], str | None]] = {
    "triton": _not_triton,
    "native": _not_native,
    "torch": lambda call: None,
}


def _torch(call: _Call) -> tuple[str, int]:
    sums = "float64" if call.q == torch.float64 else "float32"
    about = f"chunked torch operations on {call.device}, sums in {sums}"
    return about, causal_chunk(call.features)


_ABOUT: dict[str, Callable[[_Call], tuple[str, int]]] = {
    "triton": lambda call: (
        "fused kernels that keep features in registers, sums in float32",
        causal_chunk(call.features),
    ),
    "torch": _torch,
    "native": lambda call: ("C++ compiled for this processor, sums in float32", KEEP),
}


def forget() -> None:
    """Lets the next call find out again what can run here (a compiler may have been installed)."""
    reset()
    _chosen.clear()


def explain_block(q: Tensor, v: Tensor, layout: Layout) -> Choice:
    """Says which backend runs a call of the block engine, and why."""
    reason = refusal(q, v, layout)
    if reason is None:
        return Choice("flex", f"FlexAttention runs this pattern fused on {q.device.type}")
    return Choice("torch", f"a loop over blocks of queries: {reason}")
