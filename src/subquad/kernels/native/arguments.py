"""Tensors as the C++ library takes them."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

__all__ = ["Alike", "Strided", "rows", "whole"]


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


class Alike:
    """A call that is made again with tensors like those of the first: what changes is pointers.

    Args:
        q (B, H, T, D), k (B, Kv, T, D), v (B, Kv, T, V): of the first.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.likes = _like(q), _like(k), _like(v)
        self.mask_shape = k.shape[0], k.shape[2]

    def takes_queries(self, q: Tensor) -> bool:
        """Whether queries are like those it was made for."""
        return q.is_cpu and _like(q) == self.likes[0]

    def takes_keys(self, k: Tensor, v: Tensor, key_mask: Tensor | None) -> bool:
        """Whether keys, values and their mask are like those it was made for."""
        if not (k.is_cpu and v.is_cpu and (_like(k), _like(v)) == self.likes[1:]):
            return False
        return key_mask is None or (
            key_mask.dtype == torch.bool and key_mask.is_cpu and key_mask.shape == self.mask_shape
        )


def _like(t: Tensor) -> tuple[object, ...]:
    return t.shape, t.stride(), t.dtype, type(t), t.is_neg()
