"""The linear engine as `torch.library` operators.

A compiled graph sees one opaque node for a whole call: `torch.compile(fullgraph=True)`
neither unrolls the chunk loop nor recompiles for another length, and `torch.export` works.
Maps that are arbitrary functions cannot be operators; they run as an `autograd.Function`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subquad.kernels.linear import (
    ACTIVATIONS,
    FunctionMap,
    Gradients,
    LinearMap,
    Problem,
    Result,
    backward,
    forward,
)

__all__ = ["linear_attention", "linear_attention_functions"]

State = tuple[Tensor, Tensor, Tensor, Tensor]


def _maps(
    q: Tensor, wq: Tensor, bq: Tensor | None, wk: Tensor, bk: Tensor | None, activation: str
) -> tuple[LinearMap, LinearMap]:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    batch = q.shape[0]
    return (
        LinearMap(wq, bq, activation, batch, dtype),
        LinearMap(wk, bk, activation, batch, dtype),
    )


@torch.library.custom_op("subquad::linear_attention", mutates_args=())
def _linear_attention(
    q: Tensor, k: Tensor, v: Tensor, wq: Tensor, bq: Tensor | None, wk: Tensor,
    bk: Tensor | None, key_bias: Tensor | None, key_mask: Tensor | None, s: Tensor | None,
    z: Tensor | None, c: Tensor | None, mass: Tensor | None, activation: str, quad: float,
    clip: float, absorb: int, save: bool,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:  # fmt: skip
    r = _run(
        q, k, v, wq, bq, wk, bk, key_bias, key_mask, _state(s, z, c, mass), activation, quad,
        clip, absorb, save,
    )  # fmt: skip
    return (r.out, r.den, r.scale, *r.state, *r.history, r.flags)


def _run(
    q: Tensor, k: Tensor, v: Tensor, wq: Tensor, bq: Tensor | None, wk: Tensor,
    bk: Tensor | None, key_bias: Tensor | None, key_mask: Tensor | None, state: State | None,
    activation: str, quad: float, clip: float, absorb: int, save: bool,
) -> Result:  # fmt: skip
    with torch.autocast(q.device.type, enabled=False):  # sums stay in float32
        maps = _maps(q, wq, bq, wk, bk, activation)
        return forward(Problem(q, k, v, *maps, key_bias, key_mask, state, quad, clip, absorb), save)


def _state(s: Tensor | None, z: Tensor | None, c: Tensor | None, mass: Tensor | None) -> State | None:
    if s is None or z is None or c is None or mass is None:
        return None
    return s, z, c, mass


@_linear_attention.register_fake
def _(q, k, v, wq, bq, wk, bk, key_bias, key_mask, s, z, c, mass, activation, quad, clip, absorb, save):  # type: ignore[no-untyped-def]  # mirrors the operator above
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    batch, heads, queries, _ = q.shape
    kv, keys, value = v.shape[1:]
    rows, expand = batch * kv, 1 if activation == "exp" else ACTIVATIONS[activation].expand
    features = wk.shape[-1] * expand
    width = features if activation == "exp" else 1
    step = 64 if features <= 64 else 128
    kept = (keys - absorb + step - 1) // step if save else 0

    def new(*shape, dtype=dtype):  # type: ignore[no-untyped-def]
        return q.new_empty(shape, dtype=dtype)

    return (
        new(batch, heads, queries, value, dtype=v.dtype),
        new(batch, heads, queries),
        new(batch, heads, queries),
        new(rows, features, value),
        new(rows, features, 1),
        new(rows, 1, width),
        new(rows, 1, 1),
        new(kept, rows, features, value),
        new(kept, rows, features, 1),
        new(kept, rows, 1, width),
        new(rows, heads // kv, queries if save else 0, dtype=torch.bool),
    )


@torch.library.custom_op("subquad::linear_attention_backward", mutates_args=())
def _linear_attention_backward(
    q: Tensor, k: Tensor, v: Tensor, wq: Tensor, bq: Tensor | None, wk: Tensor,
    bk: Tensor | None, key_bias: Tensor | None, key_mask: Tensor | None, c0: Tensor | None,
    activation: str, quad: float, clip: float, absorb: int, out: Tensor, den: Tensor,
    s: Tensor, z: Tensor, c: Tensor, mass: Tensor, hs: Tensor, hz: Tensor, hc: Tensor,
    flags: Tensor, out_bar: Tensor, den_bar: Tensor | None, s_bar: Tensor | None,
    z_bar: Tensor | None, need: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    query_map, key_map = _maps(q, wq, bq, wk, bk, activation)
    query_map.track(need[0], need[1])
    key_map.track(need[2], need[3])
    # Only the scale c0 of an incoming state matters here: it turns S̄ into that of S0.
    state = None if c0 is None else (s, z, c0, mass)
    p = Problem(q, k, v, query_map, key_map, key_bias, key_mask, state, quad, clip, absorb)
    result = Result(out, den, den, (s, z, c, mass), (hs, hz, hc), flags)
    with torch.autocast(q.device.type, enabled=False):
        g = backward(p, result, out_bar, den_bar, s_bar, z_bar, need[4])
    empty = [q.new_empty(0) for _ in range(5)]
    wq_bar, bq_bar = query_map.collect()
    wk_bar, bk_bar = key_map.collect()
    optional = [wq_bar, bq_bar, wk_bar, bk_bar, g.key_bias]
    filled = [e if t is None else t for t, e in zip(optional, empty, strict=True)]
    return (g.q, g.k, g.v, *filled, g.s, g.z)  # type: ignore[return-value]  # ten tensors


@_linear_attention_backward.register_fake
def _(q, k, v, wq, bq, wk, bk, key_bias, key_mask, c0, activation, quad, clip, absorb, out, den, s, z, c, mass, hs, hz, hc, flags, out_bar, den_bar, s_bar, z_bar, need):  # type: ignore[no-untyped-def]  # mirrors the operator above
    def like(tensor, wanted, dtype=None):  # type: ignore[no-untyped-def]
        if not wanted:
            return q.new_empty(0)
        return tensor.new_empty(tensor.shape, dtype=dtype or tensor.dtype)

    return (
        like(q, True),
        like(k, True),
        like(v, True),
        like(wq, need[0], s.dtype),
        like(bq, need[1], s.dtype),
        like(wk, need[2], s.dtype),
        like(bk, need[3], s.dtype),
        like(key_bias, need[4], s.dtype),
        like(s, True),
        like(z, True),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    (q, k, v, wq, bq, wk, bk, key_bias, key_mask, s0, _, c0, _, *options) = inputs
    out, den, _, *rest = output
    if not options[-1]:
        raise RuntimeError("linear attention was called without save=True but needs gradients")
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, wq, bq, wk, bk, key_bias, key_mask, c0, out, den, *rest)
    ctx.options = options[:-1]
    ctx.has_state = s0 is not None


def _backward(ctx: Any, *bars: Tensor | None) -> tuple[Tensor | None, ...]:
    inputs, saved = ctx.saved_tensors[:10], ctx.saved_tensors[10:]
    out_bar, den_bar, _, s_bar, z_bar, *_ = bars
    if out_bar is None:
        out_bar = torch.zeros_like(saved[0])
    needs = ctx.needs_input_grad
    need = [bool(needs[i]) for i in (3, 4, 5, 6, 7)]
    found = _linear_attention_backward(
        *inputs, *ctx.options, *saved, out_bar, den_bar, s_bar, z_bar, need
    )
    q, k, v, wq, bq, wk, bk, key_bias, s, z = found
    weights = [
        bar.to(t.dtype) if wanted else None
        for bar, t, wanted in zip((wq, bq, wk, bk, key_bias), inputs[3:8], need, strict=True)
    ]
    states = (s, z) if ctx.has_state else (None, None)
    return (q, k, v, *weights, None, *states, *([None] * 7))


torch.library.register_autograd(
    "subquad::linear_attention", _backward, setup_context=_setup
)


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, wq: Tensor, bq: Tensor | None, wk: Tensor,
    bk: Tensor | None, *, activation: str = "exp", quad: float = 0.0, clip: float = 0.0,
    absorb: int, key_bias: Tensor | None = None, key_mask: Tensor | None = None,
    state: State | None = None,
) -> tuple[Tensor, Tensor, Tensor, State]:  # fmt: skip
    """Linear attention with φ = activation(xW + b); see `subquad.kernels.linear.Problem`.

    Returns:
        out (B, H, L, V), den (B, H, L), log2 scale of den (B, H, L), new state. Gradients
        flow through all but the scales.
    """
    s, z, c, mass = state if state is not None else (None, None, None, None)
    tensors = (q, k, v, wq, bq, wk, bk, key_bias, s, z)
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if not save and not torch.compiler.is_compiling():  # the operator's overhead for nothing
        r = _run(
            q, k, v, wq, bq, wk, bk, key_bias, key_mask, state, activation, quad, clip, absorb,
            False,
        )  # fmt: skip
        return r.out, r.den, r.scale, r.state
    out, den, scale, s, z, c, mass, *_ = _linear_attention(
        q, k, v, wq, bq, wk, bk, key_bias, key_mask, s, z, c, mass, activation, quad, clip,
        absorb, save,
    )  # fmt: skip
    return out, den, scale.detach(), (s, z, c.detach(), mass.detach())


class _Functions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, make: Any, q: Tensor, k: Tensor, v: Tensor, key_bias: Tensor | None,
                s: Tensor | None, z: Tensor | None, *parameters: Tensor) -> Any:  # fmt: skip
        p = make(q, k, v, key_bias, s, z)
        r = forward(p, save=any(ctx.needs_input_grad))
        ctx.set_materialize_grads(False)
        ctx.make, ctx.has_state, ctx.count = make, s is not None, len(parameters)
        ctx.save_for_backward(q, k, v, key_bias, s, z, r.out, r.den, *r.state, *r.history, r.flags)
        ctx.mark_non_differentiable(r.scale, r.state[2], r.state[3])
        return r.out, r.den, r.scale, *r.state

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, out_bar: Tensor | None, den_bar: Tensor | None, _: Any,
                 s_bar: Tensor | None, z_bar: Tensor | None, *rest: Any) -> Any:  # fmt: skip
        q, k, v, key_bias, s0, z0, out, den, s, z, c, mass, hs, hz, hc, flags = ctx.saved_tensors
        p = ctx.make(q, k, v, key_bias, s0, z0)
        result = Result(out, den, den, (s, z, c, mass), (hs, hz, hc), flags)
        if out_bar is None:
            out_bar = torch.zeros_like(out)
        g: Gradients = backward(p, result, out_bar, den_bar, s_bar, z_bar, ctx.needs_input_grad[4])
        states = (g.s, g.z) if ctx.has_state else (None, None)
        totals = [_add(a, b) for a, b in zip(p.query_map.gradients, p.key_map.gradients, strict=True)]
        return None, g.q, g.k, g.v, g.key_bias, *states, *totals


def _add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def linear_attention_functions(
    q: Tensor, k: Tensor, v: Tensor, query: Callable[[Tensor], Tensor],
    key: Callable[[Tensor], Tensor], *, log: bool, features: int,
    parameters: tuple[Tensor, ...] = (), clip: float = 0.0, absorb: int,
    key_bias: Tensor | None = None, key_mask: Tensor | None = None, state: State | None = None,
) -> tuple[Tensor, Tensor, Tensor, State]:  # fmt: skip
    """Linear attention for any functions φ, or ln φ with ``log=True``, of (B, Kv, n, D).

    `parameters` are the tensors inside the functions that gradients shall reach.
    Returns as `linear_attention`.
    """
    heads = k.shape[1]
    scales = None if state is None else state[2:]

    def make(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, s: Any, z: Any) -> Problem:
        maps = (FunctionMap(f, parameters, log, heads, features) for f in (query, key))
        full = None if scales is None else (s, z, *scales)
        return Problem(q, k, v, *maps, bias, key_mask, full, 0.0, clip, absorb)

    s, z = (None, None) if state is None else state[:2]
    out, den, scale, s, z, c, mass = _Functions.apply(make, q, k, v, key_bias, s, z, *parameters)
    return out, den, scale, (s, z, c, mass)
