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

__all__ = ["machine", "machine_line", "peak_of", "resident"]


def machine(threads: int) -> dict[str, Any]:
    """CPU, versions and date of a measurement, and a file name for the kind of machine."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
        cpu = found[1].strip() if found else cpu
    cores = os.cpu_count() or 1
    slug = re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", "", cpu.lower())).strip("-")
    return {
        "cpu": cpu,
        "cores": cores,
        "threads": threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "slug": f"{slug}-{cores}core-cpu",
    }


def machine_line(where: dict[str, Any]) -> str:
    """One line for the foot of a table or a picture."""
    return (
        f"{where['cpu']}, {where['threads']} of {where['cores']} cores, "
        f"torch {where['torch']}, {where['date']}"
    )


def resident(field_name: str = "VmRSS") -> int:
    """Bytes of this process that /proc/self/status calls `field_name`; "VmHWM" is the peak."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    found = re.search(rf"^{field_name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def peak_of(function: Callable[[], Any]) -> int:
    """Bytes by which a call raises this process's resident set at its peak."""
    gc.collect()
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
