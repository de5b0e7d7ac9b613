"""`forward` and `backward` of the linear engine by the C++ library."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from subquad.kernels import linear
from subquad.kernels.linear import Gradients, LinearMap, Problem, Result
from subquad.kernels.memory import large_pages
from subquad.kernels.native.library import library

__all__ = ["ACTIVATIONS", "DTYPES", "KEEP", "backward", "forward"]

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ACTIVATIONS = {"exp": 0, "relu": 1, "elu": 2}
CHUNK, CAUSAL_CHUNK = 128, 64
KEEP = 256
"""Tokens from one kept causal state to the next: the states between are made again."""


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("batch", "head", "token", "last")),
        ("type", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    ]


class _Side(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("w", "bias", "w_bar", "bias_bar")),
        *(
            (name, ctypes.c_int64)
            for name in (
                "batch", "head", "width", "feature", "bias_batch", "bias_head", "bias_feature",
            )
        ),
        ("unit", ctypes.c_float),
        ("unused", ctypes.c_int32),
    ]  # fmt: skip


class _Call(ctypes.Structure):
    _fields_ = [
        *((n, _Tensor) for n in ("q", "k", "v", "out", "out_bar", "q_bar", "k_bar", "v_bar")),
        ("query", _Side),
        ("key", _Side),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "den", "scale", "den_bar", "key_bias", "open", "bias_bar",
                "s_in", "z_in", "c_in", "mass_in", "s", "z", "c", "mass",
                "s_history", "z_history", "c_history", "s_bar", "z_bar",
            )
        ),
        *(
            (name, ctypes.c_int64)
            for name in (
                "batch", "kv", "groups", "queries", "keys", "features", "q_width", "value",
                "absorb", "answered", "keep", "chunk", "causal_chunk",
            )
        ),
        ("quad", ctypes.c_float),
        ("activation", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    ]  # fmt: skip


NONE = torch.empty(0, device="cpu")
"""In the place of results that were not asked for."""

WORTH = 20_000_000
"""Operations that a further thread is worth: its start takes as long as a tenth of them."""


def _tensor(tensor: Tensor) -> _Tensor:
    return _Tensor(tensor.data_ptr(), *tensor.stride(), DTYPES[tensor.dtype], 0)


def _side(side: LinearMap) -> _Side:
    """A map's struct; the map keeps alive what it points to."""
    w, bias, (w_bar, bias_bar) = side.plain, side.plain_bias, side.gradients
    return _Side(
        w.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        0 if w_bar is None else w_bar.data_ptr(),
        0 if bias_bar is None else bias_bar.data_ptr(),
        *(w.stride() if w.dim() == 4 else (0, *w.stride())),
        *((0, 0, 0) if bias is None else bias.stride() if bias.dim() == 3 else (0, *bias.stride())),
        side.unit,
        0,
    )


def _call(p: Problem, held: list[Tensor], keep: int) -> _Call:
    query, key = p.query_map, p.key_map
    assert isinstance(query, LinearMap) and isinstance(key, LinearMap), "refused before"
    call = _Call()
    call.q, call.k, call.v = _tensor(p.q), _tensor(p.k), _tensor(p.v)
    call.query, call.key = _side(query), _side(key)
    if p.key_bias is not None:
        bias = p.key_bias.to(torch.float32).contiguous()
        held.append(bias)
        call.key_bias = bias.data_ptr()
    if p.key_mask is not None:
        opened = p.key_mask.contiguous()
        held.append(opened)
        call.open = opened.data_ptr()
    call.batch, call.kv, call.groups = p.q.shape[0], p.kv, p.groups
    call.queries, call.keys, call.features = p.queries, p.keys, p.features
    call.q_width, call.value = p.q.shape[3], p.value
    call.absorb, call.answered, call.keep = p.absorb, p.answered, keep
    call.chunk, call.causal_chunk = CHUNK, CAUSAL_CHUNK
    rows = p.rows * (p.groups * p.queries + p.keys)
    work = 2 * rows * p.features * (call.q_width + p.value)
    call.quad, call.threads = p.quad, min(torch.get_num_threads(), 1 + work // WORTH)
    call.activation = 0 if key.log else ACTIVATIONS[key.name]
    return call


def _weighted(p: Problem) -> bool:
    """Whether the state of a plain map is of keys with weights, which have a scale."""
    return not p.log and p.state is not None and bool(p.state[2].any())


def forward(p: Problem, keep: int) -> Result:
    """See `subquad.kernels.linear.forward`; calls that underflow are its own."""
    native = library()
    assert native is not None, "refused before"
    if _weighted(p):
        return linear.forward(p, keep)
    held: list[Tensor] = []
    call = _call(p, held, keep)
    if p.state is not None:
        before = [t.to(torch.float32).contiguous() for t in p.state]
        held += before
        call.s_in, call.z_in, call.c_in, call.mass_in = (t.data_ptr() for t in before)
    out = p.v.new_empty(*p.q.shape[:-1], p.value)
    den = p.q.new_empty(p.q.shape[:-1], dtype=torch.float32)
    scale = torch.empty_like(den)
    large_pages(out)
    call.out = _tensor(out)
    call.den, call.scale = den.data_ptr(), scale.data_ptr()
    if not p.new_state:
        if native.subquad_forward(ctypes.byref(call)):
            return linear.forward(p, keep)
        return Result(out, den, scale, (NONE,) * 4, (NONE,) * 3, NONE)
    new = p.q.new_empty
    shape, width = (p.rows, p.features), p.features if p.log else 1
    s, z = new(*shape, p.value, dtype=torch.float32), new(*shape, 1, dtype=torch.float32)
    c, mass = new(p.rows, 1, width, dtype=torch.float32), new(p.rows, 1, 1, dtype=torch.float32)
    kept = -(-(p.keys - p.absorb) // keep) if keep else 0
    history = (
        s.new_empty(kept, *s.shape),
        z.new_empty(kept, *z.shape),
        c.new_empty(kept, *c.shape),
    )
    large_pages(*history)
    call.s, call.z, call.c, call.mass = (t.data_ptr() for t in (s, z, c, mass))
    call.s_history, call.z_history, call.c_history = (t.data_ptr() for t in history)
    if native.subquad_forward(ctypes.byref(call)):
        return linear.forward(p, keep)
    flags = p.q.new_zeros(p.rows, p.groups, p.queries if keep else 0, dtype=torch.bool)
    return Result(out, den, scale, (s, z, c, mass), history, flags)


def backward(
    p: Problem, result: Result, out_bar: Tensor, den_bar: Tensor | None,
    s_bar: Tensor | None, z_bar: Tensor | None, need_bias: bool, keep: int,
) -> Gradients:  # fmt: skip
    """See `subquad.kernels.linear.backward`."""
    native = library()
    assert native is not None, "refused before"
    if _weighted(p) or bool(result.flags.any()):
        return linear.backward(p, result, out_bar, den_bar, s_bar, z_bar, need_bias, keep)
    held: list[Tensor] = []
    call = _call(p, held, keep)
    plain = torch.contiguous_format
    q_bar, k_bar, v_bar = (torch.empty_like(t, memory_format=plain) for t in (p.q, p.k, p.v))
    large_pages(q_bar, k_bar, v_bar)
    bias_bar = p.k.new_empty(p.k.shape[:-1], dtype=torch.float32) if need_bias else None
    s, z, c, mass = (t.contiguous() for t in result.state)
    shape = (p.rows, p.features)
    s_bar = s.new_zeros(*shape, p.value) if s_bar is None else s_bar.clone(memory_format=plain)
    z_bar = s.new_zeros(*shape, 1) if z_bar is None else z_bar.clone(memory_format=plain)
    history = [t.contiguous() for t in result.history]
    out_bar = out_bar.to(p.v.dtype)
    call.out, call.out_bar = _tensor(result.out), _tensor(out_bar)
    call.q_bar, call.k_bar, call.v_bar = _tensor(q_bar), _tensor(k_bar), _tensor(v_bar)
    den, scale = result.den.contiguous(), result.scale.contiguous()
    call.den, call.scale = den.data_ptr(), scale.data_ptr()
    if den_bar is not None:
        den_bar = den_bar.contiguous()
        call.den_bar = den_bar.data_ptr()
    if bias_bar is not None:
        call.bias_bar = bias_bar.data_ptr()
    call.s, call.z, call.c, call.mass = (t.data_ptr() for t in (s, z, c, mass))
    call.s_history, call.z_history, call.c_history = (t.data_ptr() for t in history)
    call.s_bar, call.z_bar = s_bar.data_ptr(), z_bar.data_ptr()
    native.subquad_backward(ctypes.byref(call))
    if p.state is not None and p.log:
        decay = torch.exp2(p.state[2].to(torch.float32) - _first(p, result)).transpose(1, 2)
        s_bar.mul_(decay)
        z_bar.mul_(decay)
    return Gradients(q_bar, k_bar, v_bar, bias_bar, s_bar, z_bar)


def _first(p: Problem, result: Result) -> Tensor:
    """Scale of the state behind phase 1."""
    scale: Tensor = result.history[2][0] if p.absorb < p.keys else result.state[2]
    return scale
