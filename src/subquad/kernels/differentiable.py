"""Linear attention by differentiable operations alone: for transforms and second derivatives.

The formulas are those of `subquad.kernels.linear`; autograd, `torch.func` and forward
differentiation go through every one of them. Maxima are constants: what is measured from them does
not depend on them. Within a causal chunk every pair of tokens is measured from its row's own
maximum, so that no row underflows.

Cost O((L+S)·M·(D+V)) as ever, causal + O(L·C·M) exponentials for chunks of C tokens. Memory is
O(L·M), causal O(L·C·M), where gradients are wanted: this is not how to train long sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from subquad.kernels.linear import ACTIVATIONS, EMPTY, LOG2E

__all__ = ["linear", "linear_map"]

CHUNK = 16
"""Tokens of a causal chunk: pairs of tokens are held for every feature."""

State = tuple[Tensor, Tensor, Tensor, Tensor]
Map = Callable[[Tensor], Tensor]


def linear_map(weight: Tensor, bias: Tensor | None, activation: str, batch: int) -> Map:
    """x (N, n, D) → log2 φ(x) of "exp", else φ(x), (N, n, M); see `linear.LinearMap`."""

    def rows(t: Tensor) -> Tensor:
        return t.expand(batch, *t.shape[-3:]).reshape(-1, *t.shape[-2:])

    def function(x: Tensor) -> Tensor:
        u = x @ rows(weight.to(x.dtype))
        if bias is not None:
            u = u + rows(bias.to(x.dtype).unsqueeze(-2))
        return u * LOG2E if activation == "exp" else ACTIVATIONS[activation].plain(u)

    return function


def linear(
    q: Tensor, k: Tensor, v: Tensor, query: Map, key: Map, *, log: bool, features: int,
    key_bias: Tensor | None, key_mask: Tensor | None, state: State | None, quad: float,
    clip: float, absorb: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """One call; arguments as in `linear.Problem`, maps of (N, n, D) with N = B·Kv.

    Returns:
        out (B, H, L, V), den and its log2 scale (B, H, L), and the new state's four tensors.
        Gradients flow through all but the scales, the levels c and the masses.
    """
    batch, heads, queries, _ = q.shape
    kv, keys = k.shape[1:3]
    groups, rows = heads // kv, batch * kv
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    x, y, weight = _keys(k.to(dtype), v.to(dtype), key_bias, key_mask, quad)
    grouped = q.to(dtype).reshape(rows, groups, queries, -1)
    if state is None:
        level = EMPTY if log or weight is not None else 0.0
        s = x.new_zeros(rows, features, y.shape[-1])
        z = x.new_zeros(rows, features, 1)
        c = x.new_full((rows, 1, features if log else 1), level)
        mass = x.new_zeros(rows, 1, 1)
    else:
        s, z, c, mass = (t.to(dtype) for t in state)
    state = s, z, c.detach(), mass.detach()

    def part(i: int, j: int) -> tuple[Tensor, Tensor, Tensor | None]:
        return x[:, i:j], y[:, i:j], None if weight is None else weight[:, i:j]

    if absorb:
        state = _absorb(*part(0, absorb), key, log, state)
    answered = absorb - (keys - queries)  # queries that see those keys and no others
    found: list[tuple[Tensor, ...]] = []
    if answered > 0:
        found.append(_read(grouped[:, :, :answered].flatten(1, 2), query, log, clip, state, groups))
    for i in range(absorb, keys, CHUNK):
        j = min(i + CHUNK, keys)
        a = i + answered - absorb
        own = grouped[:, :, a : a + j - i].flatten(1, 2)
        chunk = part(i, j)
        causal = _causal_log if log else _causal_plain
        found.append(causal(own, *chunk, query, key, clip, state, groups))
        state = _absorb(*chunk, key, log, state)
    if not found:  # no queries
        found.append(tuple(q.new_zeros(rows, 0, n, dtype=dtype) for n in (v.shape[-1], 1, 1)))
    parts = (
        torch.cat([t.unflatten(1, (groups, -1)) for t in p], 2) for p in zip(*found, strict=True)
    )
    num, den, scale = (t.reshape(batch, heads, queries, -1) for t in parts)
    out = num / den.masked_fill(den == 0, 1.0)
    return out.to(v.dtype), den[..., 0], scale[..., 0], *state


def _keys(
    k: Tensor, v: Tensor, key_bias: Tensor | None, key_mask: Tensor | None, quad: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values (N, S, ·), zero where closed, and log2-weights (N, S, 1), −inf there."""
    closed = None if key_mask is None else ~key_mask[:, None, :, None].expand(-1, k.shape[1], -1, 1)
    if closed is not None:
        k, v = k.masked_fill(closed, 0.0), v.masked_fill(closed, 0.0)
    weight = None
    if quad != 0.0:
        weight = k.square().sum(-1, keepdim=True) * (-quad * LOG2E)
    if key_bias is not None:
        bias = key_bias.to(k.dtype)[..., None] * LOG2E
        weight = bias if weight is None else weight + bias
    if closed is not None:
        weight = k.new_zeros(*k.shape[:-1], 1) if weight is None else weight
        weight = weight.masked_fill(closed, -math.inf)
    return k.flatten(0, 1), v.flatten(0, 1), None if weight is None else weight.flatten(0, 1)


def _absorb(
    x: Tensor, y: Tensor, weight: Tensor | None, key: Map, log: bool, state: State
) -> State:
    s, z, c, mass = state
    u = key(x)
    if log or weight is not None:
        weighted = weight if not log else u if weight is None else u + weight
        assert weighted is not None
        new = torch.maximum(c, weighted.detach().amax(1, keepdim=True))
        decay = torch.exp2(c - new)
        # φ itself where it is exponential, else the weight beside it.
        factor = torch.exp2(weighted - new)
        phi = factor if log else u * factor
        mass = mass if log else mass * decay + factor.detach().sum(1, keepdim=True)
        s, z, c = s * decay.mT, z * decay.mT, new
    else:
        phi, mass = u, mass + x.shape[1]
    return s + phi.mT @ y, z + phi.sum(1).unsqueeze(-1), c, mass


def _clipped(den: Tensor, clip: float, mass: Tensor) -> Tensor:
    """A normaliser of signed maps, no less than `clip`·mass, and flat there."""
    return torch.where(den < clip * mass, clip * mass, den) if clip else den


def _read(
    q: Tensor, query: Map, log: bool, clip: float, state: State, groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """num, den, log2 scale of queries (N, G·n, D) that read the state alone."""
    s, z, c, mass = state
    u = query(q)
    if log:
        u = u + c
        top = u.detach().amax(-1, keepdim=True).clamp_min(2.0 * EMPTY)
        phi = torch.exp2(u - top)
    else:
        phi, top = u, c.expand(-1, u.shape[1], -1)
    return phi @ s, _clipped(phi @ z, clip, mass), top


def _later(n: int, groups: int, device: torch.device) -> Tensor:
    """bool (G·n, n): keys behind a row's own place."""
    at = torch.arange(n, device=device)
    return (at > at[:, None]).repeat(groups, 1)


def _causal_log(
    q: Tensor, x: Tensor, y: Tensor, weight: Tensor | None, query: Map, key: Map, clip: float,
    state: State, groups: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """A chunk of an exponential map: queries (N, G·n, D), n keys, the state before them."""
    s, z, c, _ = state
    u_q, u_k = query(q), key(x)
    if weight is not None:
        u_k = u_k + weight
    later = _later(x.shape[1], groups, x.device)[..., None]
    pairs = (u_q[:, :, None] + u_k[:, None]).masked_fill(later, -math.inf)  # (N, G·n, n, M)
    past = u_q + c
    top = torch.maximum(pairs.detach().amax((2, 3)), past.detach().amax(-1))[..., None]
    top = top.clamp_min(2.0 * EMPTY)
    inner, past = torch.exp2(pairs - top[..., None]).sum(-1), torch.exp2(past - top)
    return inner @ y + past @ s, inner.sum(-1, keepdim=True) + past @ z, top


def _causal_plain(
    q: Tensor, x: Tensor, y: Tensor, weight: Tensor | None, query: Map, key: Map, clip: float,
    state: State, groups: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The same of a plain map."""
    s, z, c, mass = state
    phi_q, phi_k = query(q), key(x)
    later = _later(x.shape[1], groups, x.device)
    inner = (phi_q @ phi_k.mT).masked_fill(later, 0.0)
    if weight is None:
        top, fade = c.expand(-1, inner.shape[1], -1), torch.ones_like(c)
        mass = mass + (~later).sum(-1, keepdim=True)
    else:
        top = torch.maximum(c, weight.detach().cummax(1).values).repeat(1, groups, 1)
        pair = torch.exp2((weight.mT - top).masked_fill(later, -math.inf))
        inner, fade = inner * pair, torch.exp2(c - top)
        mass = mass * fade + pair.detach().sum(-1, keepdim=True)
    den = inner.sum(-1, keepdim=True) + phi_q @ z * fade
    return inner @ y + phi_q @ s * fade, _clipped(den, clip, mass), top
