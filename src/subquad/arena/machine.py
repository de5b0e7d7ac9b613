"""Names the machine that a result was measured on."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

__all__ = ["machine", "machine_line"]


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
