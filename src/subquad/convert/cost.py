"""What a model's forward call costs at each length: time and peak memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["LengthCost", "peak_memory"]

MIB = 2**20

_PATIENCE = 900.0
"""Seconds after which a forked process is given up."""


@dataclass(frozen=True)
class LengthCost:
    """A forward call of one row, exact and converted.

    Args:
        length: tokens.
        seconds_exact, seconds: medians of interleaved calls; None where left out.
        mib_exact, mib: peak MiB that a call adds: on a CPU to the resident set of a forked
            process with one thread, on a CUDA device to what is allocated there; else None.
        note: why something is left out.
    """

    length: int
    seconds_exact: float | None = None
    seconds: float | None = None
    mib_exact: float | None = None
    mib: float | None = None
    note: str = ""

    @property
    def speedup(self) -> float | None:
        """`seconds_exact` / `seconds`."""
        if self.seconds_exact is None or not self.seconds:
            return None
        return self.seconds_exact / self.seconds


def peak(warm_up: Callable[[], Any], run: Callable[[], Any], device: torch.device) -> float | None:
    """Peak MiB that `run` adds on `device`; None where that cannot be told.

    `warm_up` is a small call that first loads what any call needs: code and mapped weights.
    """
    if device.type == "cpu":
        return peak_memory(warm_up, run)
    if device.type != "cuda":
        return None
    warm_up()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    return (torch.cuda.max_memory_allocated(device) - before) / MIB


def peak_memory(warm_up: Callable[[], Any], run: Callable[[], Any]) -> float | None:
    """Peak MiB that `run` adds in a forked process with one thread; None where none can fork.

    A fork holds the same weights and inputs, so nothing has to be built again, and what it
    allocates does not stay. `warm_up` is a small call that first loads what any call needs.
    """
    if not hasattr(os, "fork"):
        return None
    import resource

    gc.collect()
    _trim()
    read, write = os.pipe()
    with warnings.catch_warnings():
        # Other threads are not copied; the child uses none of theirs, as with data loaders.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        os.close(read)
        added = -1
        try:
            gc.disable()  # a collection would copy every page of the parent's that it visits
            torch.set_num_threads(1)
            warm_up()
            _trim()
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            run()
            added = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        finally:
            os.write(write, str(added).encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        if not select.select([pipe], [], [], _PATIENCE)[0]:
            os.kill(pid, signal.SIGKILL)
        text = pipe.read()
    os.waitpid(pid, 0)
    found = int(text or -1)
    if found < 0:
        return None
    return found / MIB if sys.platform == "darwin" else found / 1024


def _trim() -> None:
    """Gives freed memory back to the system: a call would reuse it unseen."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
