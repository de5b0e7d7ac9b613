"""`subquad doctor`: what this machine runs attention with, and whether it computes it right.

Four parts: versions; extras, with the packages that are missing; backends, with why one is not
used; and checks. A check runs one mechanism on the machine's device, forward and backward, causal
and by steps, and compares it with the same mechanism in float64 by torch operations on the CPU.
So a compiler, a driver or a build of PyTorch that computes wrongly shows, by name, before a model
is trained with it.
"""

from __future__ import annotations

import copy
import importlib.metadata as metadata
import math
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from subquad import registry
from subquad.arena.machine import machine
from subquad.attention import tuning
from subquad.attention.base import Mechanism
from subquad.kernels import explain, use
from subquad.kernels.native import library

__all__ = ["LIMIT", "Check", "backends", "check", "examine", "extras", "settings"]

HEADS, DIM, TOKENS, STEPS = 4, 32, 200, 5

LIMIT = 1e-4
"""Largest difference, relative to the largest value, that float32 explains.

A result is a ratio of sums over up to 200 keys × 256 features, with exponents of up to 20 that
are sums over 32 products: rounding is below eps·(√(200·256) + 20·√32) = 6e-8 · 340 = 2e-5 of its
scale, and a gradient passes through two such sums. With a margin of 2.5; measured on CPUs are 3e-6
and less. A wrong kernel is off by parts of the result.
"""

INSTEAD = {
    "auto": "auto(crossover=0)",
    "mixed": "mixed(local(window=16), performer)",
}
"""Settings of mechanisms that measure first or have no default."""

CALLS = (
    ("performer, float32", torch.float32, "exp"),
    ("performer, bfloat16", torch.bfloat16, "exp"),
    ("linear, float32", torch.float32, "elu"),
    ("performer, float64", torch.float64, "exp"),
)
"""Kinds of call of the linear engine whose backend is told: name, dtype, activation."""


@dataclass(frozen=True)
class Check:
    """One mechanism's way of computing, beside float64.

    Args:
        mechanism: name with options.
        way: "forward", "gradient", "causal", "causal gradient" or "steps".
        error: largest difference over the largest value; infinite where something is not finite.
        problem: what it raised.
    """

    mechanism: str
    way: str
    error: float
    problem: str = ""

    @property
    def passed(self) -> bool:
        """Whether float32 explains the difference."""
        return not self.problem and self.error <= LIMIT


def examine(
    device: torch.device, names: list[str] | None = None, say: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """All parts as one document.

    Args:
        device: where mechanisms are checked.
        names: mechanisms to be checked, with options if wanted; default: all that are registered.
            An empty list checks none.
        say: hears the name of each before it is checked.

    Returns:
        ``machine``, ``settings``, ``extras``, ``backends`` and ``checks``.

    Raises:
        UnknownNameError: unknown mechanism or option.
    """
    names = list(registry.MECHANISMS) if names is None else names
    specs = [INSTEAD.get(name, name) for name in names]
    for spec in specs:  # before anything is computed
        registry.resolve(spec)
    found = []
    for spec in specs:
        if say is not None:
            say(spec)
        found += [{**asdict(one), "passed": one.passed} for one in check(spec, device)]
    return {
        "machine": machine(torch.get_num_threads(), device.type),
        "settings": settings(),
        "extras": extras(),
        "backends": backends(device),
        "checks": found,
    }


def settings() -> dict[str, Any]:
    """Environment variables that this package reads, its cache, and what is kept there."""
    kept = tuning.folder()
    return {
        "subquad": metadata.version("subquad"),
        "python": sys.version.split()[0],
        "executable": sys.executable,
        "system": f"{platform.system()} {platform.machine()}",
        "capability": library.capability(),
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith("SUBQUAD_")
        },
        "cache": str(library.cache_folder()),
        "tunings": len(list(kept.glob("*.json"))) if kept.is_dir() else 0,
    }


def extras() -> dict[str, dict[str, Any]]:
    """Packages of each extra: ``installed`` with versions, ``missing`` ones, those ``unfit``.

    Nested extras are followed; a package that this platform does not need is left out.
    """
    from packaging.requirements import Requirement

    requirements = [Requirement(text) for text in metadata.requires("subquad") or ()]
    found: dict[str, dict[str, Any]] = {}
    for extra in metadata.metadata("subquad").get_all("Provides-Extra") or ():
        installed, missing, unfit = {}, [], {}
        for one in requirements:
            if one.marker is None or not one.marker.evaluate({"extra": extra}):
                continue
            if one.name == "subquad":
                continue  # its own extras, whose packages are listed for this one, too
            try:
                version = installed[one.name] = metadata.version(one.name)
            except metadata.PackageNotFoundError:
                missing.append(str(one.name) + str(one.specifier))
                continue
            if not one.specifier.contains(version, prereleases=True):
                unfit[one.name] = f"{version} is not {one.specifier}"
        found[extra] = {"installed": installed, "missing": missing, "unfit": unfit}
    return found


def backends(device: torch.device) -> list[dict[str, Any]]:
    """What runs calls of the linear engine, and why not what would be preferred."""
    rows = []
    for name, dtype, activation in CALLS:
        if dtype == torch.float64 and device.type == "mps":
            continue
        q = torch.empty(1, 1, 1, DIM, dtype=dtype, device=device)
        choice = explain(q, q, q, activation=activation)
        rows.append(
            {
                "call": name,
                "backend": choice.backend,
                "reason": choice.reason,
                "refused": dict(choice.refused),
            }
        )
    return rows


def check(spec: str, device: torch.device) -> Iterator[Check]:
    """A mechanism on a device in float32 beside itself in float64 by torch operations.

    Ways that it does not declare are left out. The draws are the same on both sides, and inputs
    are numbers that float32 holds.

    Args:
        spec: name, with options if wanted.
        device: of one side.

    Raises:
        UnknownNameError: unknown mechanism or option.
    """
    mechanism = registry.build(
        spec, head_dim=DIM, num_heads=HEADS, embed_dim=HEADS * DIM, max_length=TOKENS
    ).eval()  # fmt: skip
    truth = copy.deepcopy(mechanism).double()
    mechanism = mechanism.to(device)
    have = mechanism.capabilities
    ways = [("forward", "gradient", False)]
    if have.causal:
        ways.append(("causal", "causal gradient", True))
    for forward, gradient, causal in ways:
        found, problem = _tried(partial(_call, mechanism, device, torch.float32, causal))
        if found is None:
            yield Check(spec, forward, math.inf, problem)
            continue
        with use("torch"):
            wanted = _call(truth, torch.device("cpu"), torch.float64, causal)
        yield Check(spec, forward, _difference(found[:1], wanted[:1]))
        yield Check(spec, gradient, _difference(found[1:], wanted[1:]))
    if have.state and have.qkv:
        steps, problem = _tried(partial(_steps, mechanism, device))
        if steps is None:
            yield Check(spec, "steps", math.inf, problem)
            return
        q, k, v = _inputs(truth, torch.device("cpu"), torch.float64)
        with use("torch"), torch.no_grad():
            yield Check(spec, "steps", _difference([steps], [truth(q, k, v, causal=True)]))


T = TypeVar("T")


def _tried(run: Callable[[], T]) -> tuple[T | None, str]:
    """What it gives, or None and what it raised: the finding, whatever a driver may throw."""
    try:
        return run(), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _inputs(mechanism: Mechanism, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    shape: tuple[int, ...] = (2, HEADS, TOKENS, DIM)
    count = 3
    if not mechanism.capabilities.qkv:
        shape, count = (2, TOKENS, HEADS * DIM), 1
    drawn = [torch.randn(shape, generator=generator) for _ in range(count)]
    return [one.to(device, dtype) for one in drawn]


def _call(
    mechanism: Mechanism, device: torch.device, dtype: torch.dtype, causal: bool
) -> list[Tensor]:
    """The output, and gradients of its sum weighted by noise with respect to all inputs."""
    given = [one.requires_grad_() for one in _inputs(mechanism, device, dtype)]
    out = mechanism(*given, causal=True) if causal else mechanism(*given)
    noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(6))
    found = torch.autograd.grad(out, given, noise.to(device, dtype), allow_unused=True)
    zeros = (
        torch.zeros_like(x) if one is None else one for x, one in zip(given, found, strict=True)
    )
    return [out.detach(), *zeros]


@torch.no_grad()
def _steps(mechanism: Mechanism, device: torch.device) -> Tensor:
    """Outputs of a prefill and of single tokens after it."""
    q, k, v = _inputs(mechanism, device, torch.float32)
    first = TOKENS - STEPS
    out, state = mechanism.prefill(q[:, :, :first], k[:, :, :first], v[:, :, :first])
    parts = [out]
    for t in range(first, TOKENS):
        new = slice(t, t + 1)
        out, state = mechanism.step(q[:, :, new], k[:, :, new], v[:, :, new], state)
        parts.append(out)
    return torch.cat(parts, -2)


def _difference(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest of them all, relative to the largest value of each tensor."""
    worst = 0.0
    for one, other in zip(found, wanted, strict=True):
        one = one.cpu().double()  # in this order: not every device has float64
        if not torch.isfinite(one).all():
            return math.inf
        scale = max(float(other.abs().max()), torch.finfo(torch.float32).tiny)
        worst = max(worst, float((one - other).abs().max()) / scale)
    return worst
