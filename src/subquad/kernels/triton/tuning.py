"""Block sizes of the kernels: candidates on a GPU, tuned once for each D, M, V and dtype.

The length is no key: a kernel does the same work on each block whatever their number, and
decoding would tune again at every step. A process tunes a kernel at its first call of a kind;
Triton keeps the choice on disk where it can (`cache_results`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import triton

from subquad.kernels.triton.tiles import INTERPRETED

__all__ = ["kernel"]

# BLOCK_M features × BLOCK_N tokens, warps, stages of the loads' pipeline. All are powers of two;
# the last of each fits any size of head, number of features and GPU.
CANDIDATES: dict[str, tuple[tuple[int, int, int, int], ...]] = {
    "absorb": (
        (64, 64, 4, 3),
        (128, 64, 8, 3),
        (64, 128, 4, 2),
        (128, 32, 4, 3),
        (64, 32, 4, 2),
        (32, 32, 4, 1),
    ),
    "read": (
        (64, 128, 8, 3),
        (64, 64, 4, 3),
        (128, 64, 8, 2),
        (32, 128, 8, 3),
        (32, 64, 4, 2),
        (32, 32, 4, 1),
    ),
    "causal": ((64, 64, 4, 2), (64, 64, 8, 2), (32, 64, 4, 3), (64, 128, 8, 2), (32, 32, 4, 1)),
    "read_backward": ((64, 64, 4, 2), (64, 128, 8, 2), (32, 64, 4, 2), (32, 32, 4, 1)),
    "cotangent": ((64, 64, 4, 3), (128, 64, 8, 2), (64, 32, 4, 2), (32, 32, 4, 1)),
    "absorb_backward": ((64, 64, 4, 2), (64, 128, 8, 2), (32, 64, 4, 2), (32, 32, 4, 1)),
    "causal_query": ((64, 64, 4, 2), (64, 64, 8, 2), (32, 64, 4, 2), (32, 32, 4, 1)),
    "causal_key": ((64, 64, 4, 2), (64, 64, 8, 2), (32, 64, 4, 2), (32, 32, 4, 1)),
}
# The interpreter's cost is per operation: few, large blocks, yet more than one in the tests.
INTERPRETER = (32, 32, 1, 1)


def _prune(configs: list[Any], arguments: dict[str, Any], **more: Any) -> list[Any]:
    """Leaves out blocks of features that would be mostly padding, and those that do not divide a
    causal chunk, which would be wrong.
    """
    given = {**arguments, **more}
    most = given.get("CHUNK", math.inf)
    return [
        c for c in configs
        if c.kwargs["BLOCK_M"] < 2 * max(given["M"], 32) and c.kwargs["BLOCK_N"] <= most
    ]  # fmt: skip


# Triton compiles again for an integer that is 1 or a multiple of 16: not for each length.
LENGTHS = frozenset({"queries", "keys", "first", "shift", "end", "tokens", "count", "segment"})


def kernel(name: str | None = None) -> Callable[[Any], Any]:
    """A Triton kernel; with a name, autotuned over its candidates by D, M, V and dtype."""

    def compiled(function: Any) -> Any:
        lengths = [p for p in inspect.signature(function).parameters if p in LENGTHS]
        jitted = triton.jit(function, do_not_specialize=lengths)
        return jitted if name is None else _tuned(name, jitted)

    return compiled


def _tuned(name: str, jitted: Any) -> Any:
    sizes = (INTERPRETER,) if INTERPRETED else CANDIDATES[name]
    configs = [
        triton.Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=warps, num_stages=stages)
        for m, n, warps, stages in sizes
    ]
    options: dict[str, Any] = {"key": ["D", "M", "V", "DOT"]}
    if "cache_results" in inspect.signature(triton.autotune).parameters:
        options["cache_results"] = True
    return triton.autotune(configs, prune_configs_by={"early_config_prune": _prune}, **options)(
        jitted
    )
