"""Autocast and what it must not reach."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

__all__ = ["autocast_dtype", "own_precision"]


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast casts tensors on x's device to, None where it is off or there is none."""
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def own_precision(x: Tensor) -> AbstractContextManager[object]:
    """No autocast inside, on x's device: sums stay in the dtype that their code chooses."""
    if autocast_dtype(x) is None:
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)
