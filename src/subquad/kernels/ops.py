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
from torch._subclasses.fake_tensor import FakeTensor

from subquad.kernels import differentiable
from subquad.kernels.dispatch import engine, plan
from subquad.kernels.linear import (
    ACTIVATIONS,
    LOG2E,
    FunctionMap,
    Gradients,
    LinearMap,
    Problem,
    Result,
    backward,
    causal_chunk,
    forward,
)
from subquad.kernels.memory import has_data, watched
from subquad.kernels.precision import own_precision
from subquad.kernels.transforms import again, differentiated, transformed

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
    clip: float, absorb: int, keep: int, backend: str,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:  # fmt: skip
    r = _run(
        q, k, v, wq, bq, wk, bk, key_bias, key_mask, _state(s, z, c, mass), activation, quad,
        clip, absorb, keep, backend,
    )  # fmt: skip
    return (r.out, r.den, r.scale, *r.state, *r.history, r.flags)


def _run(
    q: Tensor, k: Tensor, v: Tensor, wq: Tensor, bq: Tensor | None, wk: Tensor,
    bk: Tensor | None, key_bias: Tensor | None, key_mask: Tensor | None, state: State | None,
    activation: str, quad: float, clip: float, absorb: int, keep: int, backend: str,
    borrow: bool = False, new_state: bool = True,
) -> Result:  # fmt: skip
    query_map, key_map = _maps(q, wq, bq, wk, bk, activation)
    p = Problem(
        q, k, v, query_map, key_map, key_bias, key_mask, state, quad, clip, absorb, borrow,
        new_state,
    )  # fmt: skip
    with own_precision(q):
        return engine(backend).forward(p, keep)


def _features(wk: Tensor, activation: str) -> int:
    """M of a map of R columns."""
    return wk.shape[-1] * (1 if activation == "exp" else ACTIVATIONS[activation].expand)


def _state(
    s: Tensor | None, z: Tensor | None, c: Tensor | None, mass: Tensor | None
) -> State | None:
    if s is None or z is None or c is None or mass is None:
        return None
    return s, z, c, mass


@_linear_attention.register_fake
def _shapes(*inputs: Any) -> tuple[Tensor, ...]:
    q, _, v, _, _, wk, *_, activation, _, _, absorb, keep, _ = inputs
    batch, heads, queries, _ = q.shape
    kv, keys, value = v.shape[1:]
    rows = batch * kv
    features = _features(wk, activation)
    width = features if activation == "exp" else 1
    kept = (keys - absorb + keep - 1) // keep if keep else 0
    sums = torch.float64 if q.dtype == torch.float64 else torch.float32
    shapes = (
        (batch, heads, queries),
        (batch, heads, queries),
        (rows, features, value),
        (rows, features, 1),
        (rows, 1, width),
        (rows, 1, 1),
        (kept, rows, features, value),
        (kept, rows, features, 1),
        (kept, rows, 1, width),
    )
    flags = q.new_empty((rows, heads // kv, queries if keep else 0), dtype=torch.bool)
    out = v.new_empty((batch, heads, queries, value))
    return (out, *(q.new_empty(shape, dtype=sums) for shape in shapes), flags)


@torch.library.custom_op("subquad::linear_attention_backward", mutates_args=())
def _linear_attention_backward(
    q: Tensor, k: Tensor, v: Tensor, wq: Tensor, bq: Tensor | None, wk: Tensor,
    bk: Tensor | None, key_bias: Tensor | None, key_mask: Tensor | None, c0: Tensor | None,
    activation: str, quad: float, clip: float, absorb: int, out: Tensor, den: Tensor,
    scale: Tensor, s: Tensor, z: Tensor, c: Tensor, mass: Tensor, hs: Tensor, hz: Tensor,
    hc: Tensor, flags: Tensor, out_bar: Tensor, den_bar: Tensor | None, s_bar: Tensor | None,
    z_bar: Tensor | None, need: list[bool], keep: int, backend: str,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:  # fmt: skip
    query_map, key_map = _maps(q, wq, bq, wk, bk, activation)
    query_map.track(need[0], need[1])
    key_map.track(need[2], need[3])
    # Only the scale c0 of an incoming state matters here: it turns S̄ into that of S0.
    state = None if c0 is None else (s, z, c0, mass)
    p = Problem(q, k, v, query_map, key_map, key_bias, key_mask, state, quad, clip, absorb)
    result = Result(out, den, scale, (s, z, c, mass), (hs, hz, hc), flags)
    with own_precision(q):
        g = engine(backend).backward(
            p, result, out_bar, den_bar, s_bar, z_bar, need[4], keep
        )  # fmt: skip
    empty = [q.new_empty(0) for _ in range(5)]
    wq_bar, bq_bar = query_map.collect()
    wk_bar, bk_bar = key_map.collect()
    optional = [wq_bar, bq_bar, wk_bar, bk_bar, g.key_bias]
    filled = [e if t is None else t for t, e in zip(optional, empty, strict=True)]
    return (g.q, g.k, g.v, *filled, g.s, g.z)  # type: ignore[return-value]  # ten tensors


@_linear_attention_backward.register_fake
def _shapes_backward(*inputs: Any) -> tuple[Tensor, ...]:
    q, k, v, wq, bq, wk, bk, key_bias, *_ = inputs
    s, z, need = inputs[17], inputs[18], inputs[-3]
    optional = (
        q.new_empty(tensor.shape if wanted else (0,), dtype=s.dtype if wanted else q.dtype)
        for tensor, wanted in zip((wq, bq, wk, bk, key_bias), need, strict=True)
    )
    return (
        *(t.new_empty(t.shape) for t in (q, k, v)),
        *optional,
        torch.empty_like(s),
        torch.empty_like(z),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *given, keep, backend = inputs
    if not keep:
        raise RuntimeError("linear attention was called with keep=0 but needs gradients")
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*given[:INPUTS], *output)
    ctx.options, ctx.run = given[INPUTS:], (keep, backend)


INPUTS = 13
"""Tensors that the operator takes."""


def _backward(ctx: Any, *bars: Tensor | None) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors  # read once: checkpointing unpacks them by recomputation
    inputs, saved = tensors[:INPUTS], tensors[INPUTS:]
    out_bar, den_bar, _, s_bar, z_bar, *_ = bars
    needs = ctx.needs_input_grad
    if differentiated():

        def run(*given: Any) -> tuple[Tensor, ...]:
            return measured(_differentiable(*given, *ctx.options), saved[2])

        bars = out_bar, den_bar, None, s_bar, z_bar
        return (*again(run, inputs, needs[:INPUTS], bars), *([None] * 6))
    if out_bar is None:
        out_bar = torch.zeros_like(saved[0])
    need = [bool(needs[i]) for i in (3, 4, 5, 6, 7)]
    *given, s0, _, c0, _ = inputs
    found = _linear_attention_backward(
        *given, c0, *ctx.options, *saved, out_bar, den_bar, s_bar, z_bar, need, *ctx.run
    )
    q, k, v, wq, bq, wk, bk, key_bias, s, z = found
    weights = [
        bar.to(t.dtype) if wanted else None
        for bar, t, wanted in zip((wq, bq, wk, bk, key_bias), inputs[3:8], need, strict=True)
    ]
    states = (None, None) if s0 is None else (s, z)
    return (q, k, v, *weights, None, *states, *([None] * 8))


def measured(found: tuple[Tensor, ...], scale: Tensor) -> tuple[Tensor, ...]:
    """Results of `differentiable.linear` with normalisers that are relative to another scale."""
    out, den, own, *state = found
    return out, den * torch.exp2(own.detach() - scale.detach()), scale, *state


def _differentiable(
    q: Tensor, k: Tensor, v: Tensor, wq: Tensor, bq: Tensor | None, wk: Tensor,
    bk: Tensor | None, key_bias: Tensor | None, key_mask: Tensor | None, s: Tensor | None,
    z: Tensor | None, c: Tensor | None, mass: Tensor | None, activation: str, quad: float,
    clip: float, absorb: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The operator's out, den, scale and state by differentiable operations."""
    query, key = (
        differentiable.linear_map(w, b, activation, len(q)) for w, b in ((wq, bq), (wk, bk))
    )
    with own_precision(q):
        return differentiable.linear(
            q, k, v, query, key, log=activation == "exp", features=_features(wk, activation),
            key_bias=key_bias, key_mask=key_mask, state=_state(s, z, c, mass), quad=quad,
            clip=clip, absorb=absorb,
        )  # fmt: skip


torch.library.register_autograd("subquad::linear_attention", _backward, setup_context=_setup)


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, wq: Tensor, bq: Tensor | None, wk: Tensor,
    bk: Tensor | None, *, activation: str = "exp", quad: float = 0.0, clip: float = 0.0,
    absorb: int, key_bias: Tensor | None = None, key_mask: Tensor | None = None,
    state: State | None = None, new_state: bool = True,
) -> tuple[Tensor, Tensor, Tensor, State]:  # fmt: skip
    """Linear attention with φ = activation(xW + b); see `subquad.kernels.linear.Problem`.

    Returns:
        out (B, H, L, V), den (B, H, L), log2 scale of den (B, H, L), new state, for which a
        caller who does not need it says ``new_state=False``. Gradients flow through all but the
        scales.
    """
    s, z, c, mass = state if state is not None else (None, None, None, None)
    if transformed():
        out, den, scale, *rest = _differentiable(
            q, k, v, wq, bq, wk, bk, key_bias, key_mask, s, z, c, mass, activation, quad, clip,
            absorb,
        )  # fmt: skip
        return out, den, scale, (rest[0], rest[1], rest[2], rest[3])
    tensors = (q, k, v, wq, bq, wk, bk, key_bias, s, z)
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    backend, kept = plan(
        q.device.type, q.dtype, v.dtype, activation, _features(wk, activation), clip,
        quad != 0.0 or key_bias is not None,
    )  # fmt: skip
    # Without gradients the operator is overhead for nothing, but tensors without data need it, and
    # who watches operators.
    opaque = torch.compiler.is_compiling() or q.is_meta or watched()
    opaque = opaque or any(isinstance(t, FakeTensor) for t in (q, k, v, s))
    if not save and not opaque:
        readable = has_data(q) and not (k.is_neg() or v.is_neg())
        r = _run(
            q, k, v, wq, bq, wk, bk, key_bias, key_mask, state, activation, quad, clip, absorb,
            0, backend if readable else "torch", borrow=True, new_state=new_state,
        )  # fmt: skip
        return r.out, r.den, r.scale, r.state
    out, den, scale, s, z, c, mass, *_ = _linear_attention(
        q, k, v, wq, bq, wk, bk, key_bias, key_mask, s, z, c, mass, activation, quad, clip,
        absorb, kept if save else 0, backend,
    )  # fmt: skip
    return out, den, scale.detach(), (s, z, c.detach(), mass.detach())


class _Functions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, make: Any, plain: Any, save: bool, q: Tensor, k: Tensor, v: Tensor,
                key_bias: Tensor | None, s: Tensor | None, z: Tensor | None,
                *parameters: Tensor) -> Any:  # fmt: skip
        p = make(q, k, v, key_bias, s, z)
        r = forward(p, causal_chunk(p.features) if save else 0)
        ctx.set_materialize_grads(False)
        ctx.make, ctx.plain, ctx.parameters = make, plain, len(parameters)
        results = (r.out, r.den, r.scale, *r.state, *r.history, r.flags)
        ctx.save_for_backward(*parameters, q, k, v, key_bias, s, z, *results)
        ctx.mark_non_differentiable(r.scale, r.state[2], r.state[3])
        return r.out, r.den, r.scale, *r.state

    @staticmethod
    def backward(ctx: Any, out_bar: Tensor | None, den_bar: Tensor | None, _: Any,
                 s_bar: Tensor | None, z_bar: Tensor | None, *unused: Any) -> Any:  # fmt: skip
        tensors, count = ctx.saved_tensors, ctx.parameters
        parameters, tensors = tensors[:count], tensors[count:]
        if differentiated():
            bars, needs = (out_bar, den_bar, None, s_bar, z_bar), ctx.needs_input_grad[3:9]
            scale = tensors[8]

            def run(*given: Any) -> tuple[Tensor, ...]:
                return measured(ctx.plain(*given), scale)

            return None, None, None, *again(run, tensors[:6], needs, bars, parameters)
        q, k, v, key_bias, s0, z0, out, den, scale, *rest = tensors
        s, z, c, mass, hs, hz, hc, flags = rest
        p = ctx.make(q, k, v, key_bias, s0, z0)
        result = Result(out, den, scale, (s, z, c, mass), (hs, hz, hc), flags)
        if out_bar is None:
            out_bar = torch.zeros_like(out)
        with own_precision(q):  # backward() may run inside autocast
            need = ctx.needs_input_grad[6]
            keep = causal_chunk(p.features)
            g: Gradients = backward(p, result, out_bar, den_bar, s_bar, z_bar, need, keep)
        states = (None, None) if s0 is None else (g.s, g.z)
        totals = [
            _add(a, b) for a, b in zip(p.query_map.gradients, p.key_map.gradients, strict=True)
        ]
        return None, None, None, g.q, g.k, g.v, g.key_bias, *states, *totals


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
        query_map = FunctionMap(query, parameters, log, heads, features)
        key_map = FunctionMap(key, parameters, log, heads, features)
        full = None if scales is None else (s, z, *scales)
        return Problem(q, k, v, query_map, key_map, bias, key_mask, full, 0.0, clip, absorb)

    def plain(
        q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, s: Any, z: Any
    ) -> tuple[Tensor, ...]:
        def rows(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            def map_rows(x: Tensor) -> Tensor:
                value = function(x.unflatten(0, (-1, heads))).flatten(0, 1)
                return value * LOG2E if log else value

            return map_rows

        full = None if scales is None else (s, z, *scales)
        with own_precision(q):
            return differentiable.linear(
                q, k, v, rows(query), rows(key), log=log, features=features, key_bias=bias,
                key_mask=key_mask, state=full, quad=0.0, clip=clip, absorb=absorb,
            )  # fmt: skip

    s, z = (None, None) if state is None else state[:2]
    if transformed():
        out, den, scale, s, z, c, mass = plain(q, k, v, key_bias, s, z)
        return out, den, scale, (s, z, c, mass)
    tensors = (q, k, v, key_bias, s, z, *parameters)
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    run: Callable[..., Any] = _Functions.apply
    out, den, scale, s, z, c, mass = run(make, plain, save, q, k, v, key_bias, s, z, *parameters)
    return out, den, scale, (s, z, c, mass)
