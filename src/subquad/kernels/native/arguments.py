"""Tensors as the C++ library takes them."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

__all__ = ["Strided", "like", "rows", "takes_mask", "whole"]


class Strided(ctypes.Structure):
    """(B, heads, n, width) with contiguous rows."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("batch", "head", "token")),
    ]


def whole(held: list[Tensor], t: Tensor | None, dtype: torch.dtype = torch.float32) -> int | None:
    """Address of a contiguous tensor, which `held` keeps alive."""
    if t is None:
        return None
    held.append(t.detach().to(dtype).contiguous())
    return held[-1].data_ptr()


def rows(held: list[Tensor], t: Tensor) -> Strided:
    """(B, heads, n, width) as `Strided`, of a copy where its rows are not contiguous."""
    held.append(t.detach() if t.stride(3) == 1 or t.shape[3] == 1 else t.detach().contiguous())
    return Strided(held[-1].data_ptr(), *held[-1].stride()[:3])


def like(t: Tensor) -> tuple[object, ...]:
    """What pointers to two tensors must have in common for one call to serve both."""
    return t.shape, t.stride(), t.dtype, type(t), t.is_neg()


def takes_mask(mask: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether a mask is one of bytes on this processor."""
    return mask.dtype == torch.bool and mask.is_cpu and mask.shape == shape
