"""Clusters of keys by the C++ library: what queries read of them, and k-means."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from subquad.kernels.dispatch import forced
from subquad.kernels.memory import has_data
from subquad.kernels.native.arguments import Strided, rows, whole
from subquad.kernels.native.engine import WORTH
from subquad.kernels.native.library import library
from subquad.kernels.transforms import again, differentiated

if TYPE_CHECKING:
    from subquad.attention.summary.refined import Tables, Window

__all__ = ["MOST", "nearest", "read", "sums", "takes"]

MOST = 8
"""Clusters of a query whose members are read, at most."""


VECTOR = 16
"""Numbers to a multiple of which rows of gradients are padded: the widest vector has as many."""


class _ReadCall(ctypes.Structure):
    _fields_ = [
        *((name, Strided) for name in ("q", "k", "v")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "keys", "values", "spread", "whiten", "members", "member_values", "place", "open",
                "weight", "cluster", "widths", "num", "den", "scale", "num_bar", "den_bar",
                "q_bar", "k_bar", "v_bar", "weight_bar", "keys_bar", "values_bar", "spread_bar",
                "members_bar", "member_values_bar",
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


class _NearestCall(ctypes.Structure):
    _fields_ = [
        ("x", Strided),
        *((name, ctypes.c_void_p) for name in ("centres", "half", "found")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "tokens", "width", "count")),
        ("threads", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    ]


class _SumsCall(ctypes.Structure):
    _fields_ = [
        ("x", Strided),
        *((name, ctypes.c_void_p) for name in ("weight", "cluster", "sums")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "tokens", "width", "count")),
        ("threads", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    ]


Plain = Callable[..., tuple[Tensor, Tensor, Tensor]]
"""num, den and log_scale of q and of all tensors of tables and window that have gradients."""


def takes(*given: Tensor, gradients: bool = False) -> bool:
    """Whether the library can run a call with these tensors: in float32, on a CPU.

    Args:
        given: its tensors.
        gradients: whether it gives gradients, if they are asked for.
    """
    return (
        all(t.is_cpu and t.dtype == torch.float32 and t.numel() > 0 for t in given)
        and (gradients or not (torch.is_grad_enabled() and any(t.requires_grad for t in given)))
        and not torch.compiler.is_compiling()
        and forced() in (None, "native")
        and has_data(given[0])
        and library() is not None
    )


def _threads(work: int) -> int:
    return min(torch.get_num_threads(), 1 + work // WORTH)


def nearest(x: Tensor, centres: Tensor, half: Tensor) -> Tensor:
    """The first centre (B, h, N) with the least half − x·c.

    Args:
        x: (B, h, N, D).
        centres: (B, h, C, D).
        half: (B, h, C).
    """
    native = library()
    assert native is not None, "asked before"
    held: list[Tensor] = []
    found = x.new_empty(x.shape[:3], dtype=torch.int64)
    call = _NearestCall(
        rows(held, x), whole(held, centres), whole(held, half), found.data_ptr(), *x.shape,
        centres.shape[2], _threads(2 * x.numel() * centres.shape[2]), 0,
    )  # fmt: skip
    native.subquad_nearest(ctypes.byref(call))
    return found


def sums(x: Tensor, cluster: Tensor, count: int, weight: Tensor | None) -> Tensor:
    """Σ of the rows of x (B, h, N, D), times their weights (B, h, N), by cluster, (B, h, C, D)."""
    native = library()
    assert native is not None, "asked before"
    held: list[Tensor] = []
    total = x.new_empty(*x.shape[:2], count, x.shape[3])
    call = _SumsCall(
        rows(held, x), whole(held, weight), whole(held, cluster, torch.int64),
        total.data_ptr(), *x.shape, count, _threads(2 * x.numel()), 0,
    )  # fmt: skip
    native.subquad_sums(ctypes.byref(call))
    return total


def read(
    q: Tensor, tables: Tables, window: Window | None, scale: float, offset: int, plain: Plain
) -> tuple[Tensor, Tensor, Tensor]:
    """num (B, H, L, V), den and log_scale (B, H, L) in float32.

    Arguments as in `subquad.attention.summary.refined.read`, in float32 on the CPU, with no more
    than `MOST` refined clusters. Differentiable in all that has numbers, but for `whiten`; second
    derivatives are those of `plain`, which computes the same by torch operations.
    """
    around = (None,) * 3 if window is None else (window.keys, window.values, window.weight)
    found: tuple[Tensor, Tensor, Tensor] = _Read.apply(  # type: ignore[no-untyped-call]  # torch's own
        plain, tables, window, scale, offset, q, tables.keys, tables.values, tables.spread,
        tables.members, tables.member_values, *around,
    )  # fmt: skip
    return found


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, plain: Plain, tables: Tables, window: Window | None, scale: float, offset: int,
        *given: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        native = library()
        assert native is not None, "refused before"
        q = given[0]
        held: list[Tensor] = []
        call = _read_call(held, tables, window, scale, offset, *given)
        num = q.new_empty(*q.shape[:3], call.value)
        den, log_scale = q.new_empty(2, *q.shape[:3])
        call.num, call.den, call.scale = num.data_ptr(), den.data_ptr(), log_scale.data_ptr()
        native.subquad_read_clusters(ctypes.byref(call))
        ctx.save_for_backward(log_scale, *given)
        ctx.options, ctx.plain = (tables, window, scale, offset), plain
        ctx.mark_non_differentiable(log_scale)
        return num, den, log_scale

    @staticmethod
    def backward(ctx: Any, num_bar: Tensor, den_bar: Tensor, _: Tensor) -> Any:
        log_scale, *given = ctx.saved_tensors
        if differentiated():

            def run(*given: Tensor) -> tuple[Tensor, Tensor]:
                num, den, own = ctx.plain(*given)
                more = torch.exp(own.detach() - log_scale)
                return num * more[..., None], den * more

            needs = ctx.needs_input_grad[5:]
            return *[None] * 5, *again(run, given, needs, (num_bar, den_bar))
        native = library()
        assert native is not None, "refused before"
        held: list[Tensor] = []
        call = _read_call(held, *ctx.options, *given)
        call.num_bar, call.den_bar = whole(held, num_bar), whole(held, den_bar)
        bars: list[Tensor | None] = []
        for name, t in zip(_BARS, given, strict=True):
            bar = None
            if t is not None:
                wide = -(-t.shape[-1] // VECTOR) * VECTOR if name in ("k_bar", "v_bar") else 0
                bar = t.new_zeros(*t.shape[:-1], wide or t.shape[-1])
                setattr(call, name, bar.data_ptr())
                bar = bar[..., : t.shape[-1]]
            bars.append(bar)
        native.subquad_read_clusters_backward(ctypes.byref(call))
        return *[None] * 5, *bars


_BARS = (
    "q_bar", "keys_bar", "values_bar", "spread_bar", "members_bar", "member_values_bar", "k_bar",
    "v_bar", "weight_bar",
)  # fmt: skip


def _read_call(
    held: list[Tensor], tables: Tables, window: Window | None, scale: float, offset: int,
    q: Tensor, keys: Tensor, values: Tensor, spread: Tensor, members: Tensor | None,
    member_values: Tensor | None, k: Tensor | None, v: Tensor | None, weight: Tensor | None,
) -> _ReadCall:  # fmt: skip
    """A call with these tensors in the place of those that have gradients."""
    batch, heads, queries, width = q.shape
    count, clusters = spread.shape[:2]
    value, kv = values.shape[-1] - 1, count // batch
    given, strided = functools.partial(whole, held), functools.partial(rows, held)
    call = _ReadCall()
    call.q = strided(q)
    call.keys, call.values = given(keys), given(values)
    call.spread, call.whiten = given(spread), given(tables.whiten)
    if members is not None:
        call.members, call.member_values = given(members), given(member_values)
        call.place = given(tables.place, torch.int64)
        call.each, call.refine = members.shape[2], min(tables.refine, clusters)
    span = 0
    if window is not None:
        assert k is not None and v is not None, "of the window"
        call.k, call.v = strided(k), strided(v)
        call.open = given(window.opened, torch.bool)
        call.weight = given(weight)
        call.cluster = given(window.cluster, torch.int64)
        widths = window.widths
        if widths is None:
            widths = torch.full((batch,), window.width, device=q.device)
        call.widths = given(widths, torch.int64)
        call.tokens, call.exact = k.shape[2], window.exact
        span = 2 * window.width
    call.batch, call.kv, call.groups = batch, kv, heads // kv
    call.queries, call.width, call.value = queries, width, value
    call.columns, call.clusters = keys.shape[1], clusters
    call.first, call.factor = offset, scale
    columns = call.columns + span + clusters
    call.threads = _threads(2 * batch * heads * queries * columns * (width + value))
    return call
