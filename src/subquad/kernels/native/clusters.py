"""What queries read of clusters of keys, forward, by the C++ library."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from subquad.kernels.native.engine import WORTH
from subquad.kernels.native.library import library

if TYPE_CHECKING:
    from subquad.attention.summary.refined import Tables, Window

__all__ = ["MOST", "read"]

MOST = 8
"""Clusters of a query whose members are read, at most."""


class _Strided(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("batch", "head", "token")),
    ]


class _ReadCall(ctypes.Structure):
    _fields_ = [
        *((name, _Strided) for name in ("q", "k", "v")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "keys", "values", "spread", "whiten", "members", "member_values", "place", "open",
                "weight", "cluster", "widths", "num", "den", "scale",
            )
        ),
        *(
            (name, ctypes.c_int64)
            for name in (
                "batch", "kv", "groups", "queries", "tokens", "width", "value", "columns",
                "clusters", "each", "refine", "first",
            )
        ),
        ("factor", ctypes.c_float),
        ("exact", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    ]  # fmt: skip


def read(
    q: Tensor, tables: Tables, window: Window | None, scale: float, offset: int
) -> tuple[Tensor, Tensor, Tensor]:
    """num (B, H, L, V), den and log_scale (B, H, L) in float32, without gradients.

    Arguments as in `subquad.attention.summary.refined.read`, in float32 on the CPU, with no more
    than `MOST` refined clusters.
    """
    native = library()
    assert native is not None, "refused before"
    batch, heads, queries, width = q.shape
    count, clusters = tables.spread.shape[:2]
    value, kv = tables.values.shape[-1] - 1, count // batch
    held: list[Tensor] = []

    def whole(t: Tensor | None, dtype: torch.dtype = torch.float32) -> int | None:
        if t is None:
            return None
        held.append(t.detach().to(dtype).contiguous())
        return held[-1].data_ptr()

    def rows(t: Tensor) -> _Strided:
        held.append(t.detach() if t.stride(3) == 1 or t.shape[3] == 1 else t.detach().contiguous())
        return _Strided(held[-1].data_ptr(), *held[-1].stride()[:3])

    call = _ReadCall()
    call.q = rows(q)
    call.keys, call.values = whole(tables.keys), whole(tables.values)
    call.spread, call.whiten = whole(tables.spread), whole(tables.whiten)
    if tables.members is not None:
        call.members, call.member_values = whole(tables.members), whole(tables.member_values)
        call.place = whole(tables.place, torch.int64)
        call.each, call.refine = tables.members.shape[2], min(tables.refine, clusters)
    span = 0
    if window is not None:
        call.k, call.v = rows(window.keys), rows(window.values)
        call.open = whole(window.opened, torch.bool)
        call.weight = whole(window.weight)
        call.cluster = whole(window.cluster, torch.int64)
        widths = window.widths
        if widths is None:
            widths = torch.full((batch,), window.width)
        call.widths = whole(widths, torch.int64)
        call.tokens, call.exact = window.keys.shape[2], window.exact
        span = 2 * window.width
    num = q.new_empty(batch, heads, queries, value)
    den, log_scale = torch.empty(2, batch, heads, queries, dtype=q.dtype)
    call.num, call.den, call.scale = num.data_ptr(), den.data_ptr(), log_scale.data_ptr()
    call.batch, call.kv, call.groups = batch, kv, heads // kv
    call.queries, call.width, call.value = queries, width, value
    call.columns, call.clusters = tables.keys.shape[1], clusters
    call.first, call.factor = offset, scale
    columns = call.columns + span + clusters
    work = 2 * batch * heads * queries * columns * (width + value)
    call.threads = min(torch.get_num_threads(), 1 + work // WORTH)
    native.subquad_read_clusters(ctypes.byref(call))
    return num, den, log_scale
