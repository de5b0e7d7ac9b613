"""Names the machine that a result was measured on, and measures its memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import platform
import re
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from subquad.errors import DeviceError
from subquad.kernels.timing import device_name

__all__ = ["machine", "machine_line", "peak_of", "resident"]


def machine(threads: int, device: str = "cpu") -> dict[str, Any]:
    """CPU or GPU, versions and date of a measurement, and a file name for the kind of machine.

    Raises:
        DeviceError: `device` is neither cpu nor cuda, or there is no GPU that torch can use.
    """
    if device not in ("cpu", "cuda"):
        raise DeviceError(f"device must be cpu or cuda, given {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise DeviceError("device=cuda needs a GPU that torch can use, there is none")
    cpu = device_name(torch.device("cpu"))
    cores = os.cpu_count() or 1
    gpu = device_name(torch.device("cuda")) if device == "cuda" else ""
    name = re.sub(r"\((r|tm)\)", "", (gpu or cpu).lower())
    slug = re.sub(r"[^a-z0-9]+", "-", name).strip("-")
    return {
        **({"gpu": gpu} if gpu else {}),
        "cpu": cpu,
        "cores": cores,
        "threads": threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "slug": f"{slug}-gpu" if gpu else f"{slug}-{cores}core-cpu",
    }


def machine_line(where: dict[str, Any]) -> str:
    """One line for the foot of a table or a picture."""
    gpu = f"{where['gpu']}; " if "gpu" in where else ""
    return (
        f"{gpu}{where['cpu']}, {where['threads']} of {where['cores']} cores, "
        f"torch {where['torch']}, {where['date']}"
    )


def resident(field_name: str = "VmRSS") -> int:
    """Bytes of this process that /proc/self/status calls `field_name`; "VmHWM" is the peak."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    found = re.search(rf"^{field_name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def peak_of(function: Callable[[], Any], device: str = "cpu") -> int:
    """Bytes by which a call raises this process's resident set, or a GPU's memory, at its peak."""
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        result = function()
        peak = torch.cuda.max_memory_allocated() - held
        del result
        return peak
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # freed memory would be reused unseen
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM
        before = resident("VmRSS")
        result = function()
        peak = resident("VmHWM") - before
    except OSError:
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        result = function()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit - before
    del result
    return peak
