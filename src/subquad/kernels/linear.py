"""Linear attention in chunks: forward, backward, states. The torch-ops backend.

    out_i = Σ_j φ_q(q_i)·φ_k(k_j) v_j / Σ_j φ_q(q_i)·φ_k(k_j)

A call is three phases over chunks of tokens; φ exists for one chunk at a time:

1. *absorb*: keys before `absorb` enter the state  S = Σ φ_k vᵀ,  z = Σ φ_k;
2. *read*:   queries that see exactly those keys are answered from the state;
3. *causal*: the other queries and keys walk together; a chunk reads the state and the
   lower triangle of its own φ_q φ_kᵀ, then enters the state.

A bidirectional call is phases 1 and 2, a causal one phase 3, a prefix mask, a longer key
sequence or an incoming state all three.

Exponential maps (φ = exp(u)) never overflow or vanish: keys carry a running maximum *per
feature*, c_m = max_j u_jm, kept in the state, and the query absorbs it,

    φ_k = 2^(u_k − c),   φ_q = 2^(u_q + c − max_m(u_q + c)),

so that a bidirectional normaliser is ≥ 1: there is no epsilon. Everything is in base 2
(2^x is cheaper than e^x). Inside a causal chunk c includes later keys; a row whose
normaliser falls under `TINY` for that reason is recomputed in log space (`_repair`).
Plain maps (ReLU, cos/sin, any function) need no maximum; their keys may carry a scalar
log-weight with a running maximum.

Sums and states are float32 (float64 for float64 inputs), whatever the inputs are.
Cost O((L+S)·M·(D+V)), causal + O(L·C·(M+V)) for chunks of C tokens; saved for the backward
pass: inputs, output, normaliser and scale of each row, and a causal state every `keep` tokens.

Algorithm: Choromanski et al. 2021, arXiv 2009.14794 (eq. 5, 6); Katharopoulos et al. 2020,
arXiv 2006.16236 (eq. 5–12). The per-feature running maximum is ours.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from subquad.kernels.memory import large_pages

__all__ = [
    "ACTIVATIONS",
    "EMPTY",
    "FunctionMap",
    "Gradients",
    "LinearMap",
    "Map",
    "Problem",
    "Result",
    "backward",
    "causal_chunk",
    "forward",
]

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
EMPTY = -1e30
"""Running maximum of a state without keys: finite, so that differences are never NaN."""
TINY = 2.0**-64
"""A causal normaliser below this is recomputed in log space. Each of the ≤ M·C products
lost to float32 underflow is < 2^-126, so that at M·C ≤ 2^30 a row above TINY has lost less
than 2^(30−126+64) = 2^-32 of its normaliser: below float32's rounding."""
REPAIR_ELEMENTS = 1 << 21
"""Size of the largest temporary of `_repair`."""


# ---- feature maps -------------------------------------------------------------------------


class Map(Protocol):
    """One side's feature map on chunks x (N, n, D).

    `log` maps return u = log2 φ + offset, others φ; `pullback` maps a cotangent of ln φ (log) or φ
    to one of x, and adds to `gradients` for the map's own parameters.
    """

    log: bool
    features: int
    gradients: list[Tensor | None]

    def apply(
        self, x: Tensor, work: Workspace, name: str, offset: Tensor | None = None
    ) -> Tensor: ...

    def pullback(
        self, x: Tensor, value: Tensor, cotangent: Tensor, out: Tensor | None = None
    ) -> Tensor: ...


class Workspace:
    """Named scratch buffers that are reused from chunk to chunk (page faults cost more)."""

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self.like, self.dtype = like, dtype
        self.buffers: dict[str, Tensor] = {}

    def get(self, name: str, *shape: int) -> Tensor:
        size = math.prod(shape)
        buffer = self.buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self.like.new_empty(size, dtype=self.dtype)
            self.buffers[name] = buffer
        return buffer[:size].view(shape)


@dataclass(frozen=True)
class Activation:
    """φ = activation(xW + b): its value from xW + b, its derivative from its value.

    `plain` is the same function by differentiable operations, for transforms.
    """

    expand: int
    value: Callable[[Tensor, Tensor], None]
    pullback: Callable[[Tensor, Tensor], Tensor]
    plain: Callable[[Tensor], Tensor]


RELU_EPSILON = 1e-3
"""Added to ReLU features as in the Performer's generalised attention (arXiv 2009.14794,
section 4.2 of its code): part of the kernel, keeps every normaliser positive."""


def _relu(x: Tensor, out: Tensor) -> None:
    torch.clamp_min(x, 0.0, out=out).add_(RELU_EPSILON)


def _trig(x: Tensor, out: Tensor) -> None:
    half = x.shape[-1]
    torch.cos(x, out=out[..., :half]).mul_(half**-0.5)
    torch.sin(x, out=out[..., half:]).mul_(half**-0.5)


def _trig_pullback(value: Tensor, cotangent: Tensor) -> Tensor:
    (cos, sin), (dcos, dsin) = value.chunk(2, -1), cotangent.chunk(2, -1)
    return torch.mul(cos, dsin).addcmul_(sin, dcos, value=-1.0)


def _elu(x: Tensor, out: Tensor) -> None:
    above = x.clamp_min(0.0)
    torch.clamp_max(x, 0.0, out=out).exp_().add_(above)


def _softplus(x: Tensor, out: Tensor) -> None:
    above = x.clamp_min(0.0)
    torch.abs(x, out=out).neg_().exp_().log1p_().add_(above)


def _sigmoid(x: Tensor, out: Tensor) -> None:
    torch.sigmoid(x, out=out)


ACTIVATIONS: dict[str, Activation] = {
    "relu": Activation(
        1,
        _relu,
        lambda y, d: d.masked_fill(y <= RELU_EPSILON, 0.0),
        lambda x: functional.relu(x) + RELU_EPSILON,
    ),
    "elu": Activation(
        1,
        _elu,
        lambda y, d: d * y.clamp_max(1.0),
        lambda x: torch.where(x > 0.0, x + 1.0, x.clamp_max(0.0).exp()),
    ),
    "softplus": Activation(
        1,
        _softplus,
        lambda y, d: torch.expm1(-y).mul_(d).neg_(),
        lambda x: torch.logaddexp(x, x.new_zeros(())),
    ),
    "sigmoid": Activation(1, _sigmoid, lambda y, d: d * y * (1.0 - y), torch.sigmoid),
    "trig": Activation(
        2,
        _trig,
        _trig_pullback,
        lambda x: torch.cat([x.cos(), x.sin()], -1) * x.shape[-1] ** -0.5,
    ),
}
"""Built-in plain maps. "trig" gives [cos, sin]·R^-½, so that |φ_q·φ_k| ≤ 1."""


class LinearMap:
    """φ = exp(xW + b) or activation(xW + b).

    W is (Kv, D, R), or (B, Kv, D, R) where each batch row has its own; b likewise without D.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, activation: str, batch: int, dtype: torch.dtype
    ) -> None:
        self.name = activation
        self.log = activation == "exp"
        self.activation = None if self.log else ACTIVATIONS[activation]
        self.features = weight.shape[-1] * (self.activation.expand if self.activation else 1)
        self.batch = batch
        self.shared = weight.dim() == 3, bias is not None and bias.dim() == 2
        self.unit = LOG2E if self.log else 1.0
        self.plain = weight.to(dtype)
        self.plain_bias = None if bias is None else bias.to(dtype)
        self.gradients: list[Tensor | None] = [None, None]

    @functools.cached_property
    def scaled(self) -> Tensor:
        """W in units of the features' base."""
        return self.plain * self.unit

    @functools.cached_property
    def bias(self) -> Tensor | None:
        """b of each row in those units, (N, 1, R)."""
        bias = self.plain_bias
        return None if bias is None else self._rows(bias.unsqueeze(-2) * self.unit)

    @functools.cached_property
    def weight(self) -> Tensor:
        """W of each row, (N, D, R)."""
        return self._rows(self.scaled)

    @functools.cached_property
    def back(self) -> Tensor:
        """Wᵀ of each row for the backward pass, (N, R, D)."""
        return self._rows(self.plain).transpose(1, 2)

    def _product(self, x: Tensor, u: Tensor) -> None:
        """u = xW; for a few tokens without a copy of the common W for each row, O(N·D·R)."""
        if not self.shared[0] or x.shape[1] >= x.shape[2]:
            torch.bmm(x, self.weight, out=u)
            return
        heads = len(self.scaled)
        each = x.unflatten(0, (-1, heads)).transpose(0, 1)
        value = torch.bmm(each.reshape(heads, -1, x.shape[2]), self.scaled)
        u.unflatten(0, (-1, heads)).copy_(value.view(*each.shape[:3], u.shape[-1]).transpose(0, 1))

    def _rows(self, tensor: Tensor) -> Tensor:
        return tensor.expand(self.batch, *tensor.shape[-3:]).reshape(-1, *tensor.shape[-2:])

    def track(self, weight: bool, bias: bool) -> None:
        if weight:
            rows = self.batch * self.plain.shape[-3]
            self.gradients[0] = self.plain.new_zeros(rows, *self.plain.shape[-2:])
        if bias:
            assert self.bias is not None
            self.gradients[1] = torch.zeros_like(self.bias)

    def apply(self, x: Tensor, work: Workspace, name: str, offset: Tensor | None = None) -> Tensor:
        rows = x.shape[0], x.shape[1]
        u = work.get(name, *rows, self.scaled.shape[-1])
        self._product(x, u)
        for added in (self.bias, offset):
            if added is not None:
                u.add_(added)
        if self.activation is None:
            return u
        if self.activation.expand == 1:
            self.activation.value(u, u)
            return u
        value = work.get(name + "+", *rows, self.features)
        self.activation.value(u, value)
        return value

    def pullback(
        self, x: Tensor, value: Tensor, cotangent: Tensor, out: Tensor | None = None
    ) -> Tensor:
        if self.activation is not None:
            cotangent = self.activation.pullback(value, cotangent)
        if self.gradients[0] is not None:
            self.gradients[0].baddbmm_(x.transpose(1, 2), cotangent)
        if self.gradients[1] is not None:
            self.gradients[1].add_(cotangent.sum(1, keepdim=True))
        return _product(cotangent, self.back, out)

    def collect(self) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of weight and bias in their shapes, summed over the batch if shared."""
        weight, bias = self.gradients
        if weight is not None:
            weight = self._own(weight, self.shared[0])
        if bias is not None:
            bias = self._own(bias, self.shared[1]).squeeze(-2)
        return weight, bias

    def _own(self, gradient: Tensor, shared: bool) -> Tensor:
        gradient = gradient.unflatten(0, (self.batch, -1))
        return gradient.sum(0) if shared else gradient


class FunctionMap:
    """φ, or ln φ with ``log=True``, as any torch function (B, Kv, n, D) → (B, Kv, n, M)."""

    def __init__(
        self, function: Callable[[Tensor], Tensor], parameters: tuple[Tensor, ...], log: bool,
        heads: int, features: int,
    ) -> None:  # fmt: skip
        self.function, self.parameters, self.log = function, parameters, log
        self.heads, self.features = heads, features
        self.gradients: list[Tensor | None] = [None] * len(parameters)

    def apply(self, x: Tensor, work: Workspace, name: str, offset: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            value = self.function(x.unflatten(0, (-1, self.heads))).flatten(0, 1)
        value = value * LOG2E if self.log else value.clone()
        return value if offset is None else value.add_(offset)

    def pullback(
        self, x: Tensor, value: Tensor, cotangent: Tensor, out: Tensor | None = None
    ) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            result = self.function(x.unflatten(0, (-1, self.heads))).flatten(0, 1)
            if not result.requires_grad:  # a step function: flat everywhere
                return torch.zeros_like(x) if out is None else out.zero_()
            inputs = (x, *(p for p in self.parameters if p.requires_grad))
            found = torch.autograd.grad(result, inputs, cotangent, allow_unused=True)
        rest = iter(found[1:])
        for index, parameter in enumerate(self.parameters):
            if parameter.requires_grad:
                gradient, total = next(rest), self.gradients[index]
                if gradient is not None:
                    self.gradients[index] = gradient if total is None else total + gradient
        x_bar = torch.zeros_like(x) if found[0] is None else found[0]
        return x_bar if out is None else out.copy_(x_bar)


# ---- one call -----------------------------------------------------------------------------


def causal_chunk(features: int) -> int:
    """Tokens a causal chunk C: arithmetic grows with C, saved states with M/C."""
    return 64 if features <= 64 else 128


@dataclass
class Problem:
    """One call, shapes checked by the caller.

    Args:
        q (B, H, L, D), k (B, Kv, S, D), v (B, Kv, S, V).
        query_map, key_map: both `log` or both plain, with one number of features M.
        key_bias: (B, Kv, S) natural-log weight of each key, or None.
        key_mask: (B, S) bool, True = attend, or None.
        state: (S (N, M, V), z (N, M, 1), c (N, 1, M or 1), mass (N, 1, 1)) with N = B·Kv.
        quad: a key's log-weight is −quad·|k|² + key_bias.
        clip: 0, or for signed maps the least normaliser in units of the keys' mass.
        absorb: keys that every later query reads (phase 1): S for a bidirectional call.
        borrow: the new state may share tensors that did not change with the old one.
        new_state: whether the state behind the last key, and what `backward` needs, are asked
            for: without, a result may hold empty tensors in their place.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    query_map: Map
    key_map: Map
    key_bias: Tensor | None
    key_mask: Tensor | None
    state: tuple[Tensor, Tensor, Tensor, Tensor] | None
    quad: float
    clip: float
    absorb: int
    borrow: bool = False
    new_state: bool = True
    work: Workspace = field(init=False)

    def __post_init__(self) -> None:
        batch, heads, queries, _ = self.q.shape
        _, kv, keys, value = self.v.shape
        self.groups, self.rows, self.kv = heads // kv, batch * kv, kv
        self.queries, self.keys, self.value = queries, keys, value
        self.features = self.key_map.features
        self.log = self.key_map.log
        self.answered = self.absorb - (keys - queries)  # queries of phase 2
        self.dtype = torch.float64 if self.q.dtype == torch.float64 else torch.float32
        self.work = Workspace(self.q, self.dtype)
        self.grouped = self.q.unflatten(1, (kv, self.groups))
        self.weighted = self.quad != 0.0 or self.key_bias is not None

    # -- pieces of the inputs

    def query(self, i: int, j: int) -> Tensor:
        """Queries i..j as (N, G·n, D)."""
        part = self.grouped[:, :, :, i:j]
        return part.reshape(self.rows, -1, part.shape[-1]).to(self.dtype)

    def split(self, tensor: Tensor) -> Tensor:
        """(N, G·n, X) as (B, Kv, G, n, X)."""
        return tensor.view(
            -1, self.kv, self.groups, tensor.shape[1] // self.groups, tensor.shape[2]
        )

    def key(self, i: int, j: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Keys, values (N, n, ·), log2-weights (N, n, 1) and closed keys (N, n, 1) of i..j."""
        x = self.k[:, :, i:j].reshape(self.rows, j - i, -1).to(self.dtype)
        y = self.v[:, :, i:j].reshape(self.rows, j - i, -1).to(self.dtype)
        closed = None
        if self.key_mask is not None:
            closed = ~self.key_mask[:, None, i:j, None].expand(-1, self.kv, -1, -1)
            closed = closed.reshape(self.rows, j - i, 1)
            x, y = x.masked_fill(closed, 0.0), y.masked_fill(closed, 0.0)
        weight = None
        if self.quad != 0.0:
            norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            weight = norm.square_().mul_(-self.quad * LOG2E)
        if self.key_bias is not None:
            bias = self.key_bias[:, :, i:j].reshape(self.rows, j - i, 1).to(self.dtype) * LOG2E
            weight = bias if weight is None else weight.add_(bias)
        if closed is not None:
            if weight is None:
                weight = x.new_zeros(self.rows, j - i, 1)
            weight = weight.masked_fill(closed, -math.inf)
        return x, y, weight, closed

    def chunk(self, causal: bool) -> int:
        """Tokens a chunk. Causal: cost grows with C, saved states with M/C. Otherwise 2^12
        rows over all heads, so that the chunk's φ stays in the cache.
        """
        if causal:
            return 64 if self.features <= 64 else 128
        return max(128, min(1024, 4096 // max(1, self.rows)))

    # -- features of a chunk

    def key_features(
        self, x: Tensor, weight: Tensor | None, c: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(φ_k, new c, key weights 2^(weight − c) of plain maps)."""
        u = self.key_map.apply(x, self.work, "k", weight if self.log else None)
        if self.log:
            new = torch.maximum(c, u.amax(1, keepdim=True))
            return u.sub_(new).exp2_(), new, None
        if weight is None:
            return u, c, None
        new = torch.maximum(c, weight.amax(1, keepdim=True))
        return u, new, torch.exp2(weight - new)

    def query_features(
        self, x: Tensor, c: Tensor, top: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(φ_q, log2 scale of the row); the backward pass knows the scale, `top`."""
        u = self.query_map.apply(x, self.work, "q", c if self.log else None)
        if not self.log:
            return u, c.expand(u.shape[0], u.shape[1], 1)
        # A row of −∞ (φ_q = 0) stays 0; 2·EMPTY lies below every sum of two finite logarithms.
        if top is None:
            top = u.amax(-1, keepdim=True).clamp_min_(2.0 * EMPTY)
        return u.sub_(top).exp2_(), top

    def lower(self, matrix: Tensor) -> Tensor:
        """Zeroes what a row may not see in (N, G·n, n), in place."""
        matrix.unflatten(1, (self.groups, -1)).tril_()
        return matrix

    def start(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The incoming state, or an empty one; the caller's own, unless borrowed."""
        if self.state is not None:
            copy = self.absorb > 0 or not self.borrow  # absorbed keys are added in place
            s, z, c, mass = (t.to(self.dtype, copy=copy) for t in self.state)
            return s, z, c, mass
        new = self.q.new_zeros
        rows, features, dtype = self.rows, self.features, self.dtype
        width = features if self.log else 1
        level = EMPTY if self.log or self.weighted else 0.0
        return (
            new(rows, features, self.value, dtype=dtype),
            new(rows, features, 1, dtype=dtype),
            torch.full((rows, 1, width), level, dtype=dtype, device=self.q.device),
            new(rows, 1, 1, dtype=dtype),
        )


@dataclass
class Result:
    """out (B, H, L, V), den and log2 scale (B, H, L), the new state, what backward needs."""

    out: Tensor
    den: Tensor
    scale: Tensor
    state: tuple[Tensor, Tensor, Tensor, Tensor]
    history: tuple[Tensor, Tensor, Tensor]
    flags: Tensor  # (N, G, L): rows redone in log space (log) or clipped (plain)


def _product(a: Tensor, b: Tensor, out: Tensor | None) -> Tensor:
    return torch.bmm(a, b) if out is None else torch.bmm(a, b, out=out)


def _window(p: Problem, tensor: Tensor, i: int, j: int) -> Tensor | None:
    """Tokens i..j of a contiguous (B, Kv, n, X) as a writable (N, j − i, X).

    None where a result needs another dtype or a regrouping first: then it is copied.
    """
    if tensor.dtype != p.dtype or tensor.shape[1] != p.kv:
        return None
    return tensor.flatten(0, 1)[:, i:j]


def _dot(p: Problem, a: Tensor, b: Tensor) -> Tensor:
    """Σ_m a_nm b_nm (N, n, 1) of (N, n, M) and (N, n or 1, M).

    Five times faster than `bmm` on a single column, and without a fresh temporary, whose
    page faults would cost more than the arithmetic.
    """
    product = torch.mul(a, b, out=p.work.get("dot", *a.shape))
    return product.sum(-1, keepdim=True)


def _columns_dot(matrix: Tensor, vector: Tensor) -> Tensor:
    """matrixᵀ × vector for matrix (N, n, M), vector (N, n, 1), in the form that is fast."""
    return torch.bmm(vector.transpose(1, 2), matrix).transpose(1, 2)


def _divide(p: Problem, num: Tensor, den: Tensor, out: Tensor) -> None:
    # A row without keys has den = num = 0: it gives zeros, not NaN.
    torch.div(p.split(num), p.split(den.masked_fill(den == 0, 1.0)), out=out)


def _flag(flags: Tensor, i: int, j: int, rows: Tensor) -> None:
    if flags.shape[-1]:
        flags[:, :, i:j] = rows.view(flags.shape[0], flags.shape[1], j - i)


def _absorb(p: Problem, i: int, j: int, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    s, z, c, mass = state
    x, y, weight, _ = p.key(i, j)
    phi, new, key_weight = p.key_features(x, weight, c)
    if p.log or key_weight is not None:
        decay = torch.exp2(c - new)
        s.mul_(decay.transpose(1, 2))
        z.mul_(decay.transpose(1, 2))
    if key_weight is not None:
        mass = mass * decay + key_weight.sum(1, keepdim=True)
        phi = phi.mul_(key_weight)
    elif not p.log:
        mass = mass + (j - i)
    s.baddbmm_(phi.transpose(1, 2), y)
    z.add_(phi.sum(1).unsqueeze(-1))
    return s, z, new, mass


def forward(p: Problem, keep: int) -> Result:
    """Runs a call.

    Args:
        p: the call.
        keep: tokens from one causal state that is kept for `backward` to the next, a multiple of
            the causal chunk; 0 keeps nothing.
    """
    state: tuple[Tensor, ...] = p.start()
    out = p.v.new_empty(*p.q.shape[:-1], p.value)
    den = p.q.new_empty(p.q.shape[:-1], dtype=p.dtype)
    scale = torch.empty_like(den)
    large_pages(out)
    views = [
        t.unflatten(1, (p.kv, p.groups)) for t in (out, den.unsqueeze(-1), scale.unsqueeze(-1))
    ]
    step = p.chunk(False)
    for i in range(0, p.absorb, step):
        state = _absorb(p, i, min(i + step, p.absorb), state)
    s, z, c, mass = state
    flags = torch.zeros(
        (p.rows, p.groups, p.queries if keep else 0), dtype=torch.bool, device=s.device
    )
    step = max(1, step // p.groups)
    sums = torch.cat([s, z], -1) if p.answered > 0 else s  # one product gives both
    for i in range(0, p.answered, step):
        j = min(i + step, p.answered)
        phi, top = p.query_features(p.query(i, j), c)
        both = torch.bmm(phi, sums, out=p.work.get("both", p.rows, phi.shape[1], p.value + 1))
        num, part = both.split([p.value, 1], -1)
        if p.clip:
            _flag(flags, i, j, part < p.clip * mass)
            part = torch.maximum(part, p.clip * mass)
        _divide(p, num, part, views[0][:, :, :, i:j])
        views[1][:, :, :, i:j] = p.split(part)
        views[2][:, :, :, i:j] = p.split(top)
    step = p.chunk(True)
    chunks = -(-(p.keys - p.absorb) // step)
    kept = -(-(p.keys - p.absorb) // keep) if keep else 0
    history = (
        s.new_empty(kept, *s.shape),
        z.new_empty(kept, *z.shape),
        c.new_empty(kept, *c.shape),
    )
    for t in range(chunks):
        i = p.absorb + t * step
        j = min(i + step, p.keys)
        if kept and t * step % keep == 0:
            for store, value in zip(history, state[:3], strict=True):
                store[t * step // keep] = value
        shift = p.answered - p.absorb
        bad, num, part, top, state = _causal(p, i, j, shift, state)
        a, b = i + shift, j + shift
        _divide(p, num, part, views[0][:, :, :, a:b])
        views[1][:, :, :, a:b] = p.split(part)
        views[2][:, :, :, a:b] = p.split(top)
        if bad is not None:
            _flag(flags, a, b, bad)
    s, z, c, mass = state
    return Result(out, den, scale, (s, z, c, mass), history, flags)


def _causal(
    p: Problem, i: int, j: int, shift: int, state: tuple[Tensor, ...]
) -> tuple[Tensor | None, Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """One causal chunk: (flagged rows, num, den, log2 scale, new state)."""
    s, z, c, mass = state
    x, y, weight, closed = p.key(i, j)
    queries = p.query(i + shift, j + shift)
    n, rows = j - i, queries.shape[1]
    phi_k, new, key_weight = p.key_features(x, weight, c)
    inner = p.work.get("inner", p.rows, rows, n)
    if p.log:
        before = s, z, c
        decay = torch.exp2(c - new).transpose(1, 2)
        phi_q, top = p.query_features(queries, new)
        p.lower(torch.bmm(phi_q, phi_k.transpose(1, 2), out=inner))
        faded = z * decay
        den = inner.sum(-1, keepdim=True).add_(_dot(p, phi_q, faded.transpose(1, 2)))
        num = torch.bmm(inner, y, out=p.work.get("out", p.rows, rows, p.value))
        low = den < TINY
        if bool(low.any()):  # needs the state before it is rescaled
            num.baddbmm_(phi_q, s * decay)
            bad = _unseen(p, low, c, closed)
            _repair(p, bad, queries, x, weight, y, before, num, den, top)
            s = s * decay
        else:
            bad = None
            s = s * decay if p.borrow and i == p.absorb else s.mul_(decay)
            num.baddbmm_(phi_q, s)
        s.baddbmm_(phi_k.transpose(1, 2), y)
        return bad, num, den, top, (s, faded + phi_k.sum(1).unsqueeze(-1), new, mass)
    phi_q, top = p.query_features(queries, c)
    torch.bmm(phi_q, phi_k.transpose(1, 2), out=inner)
    weights = _row_weights(p, weight, c)
    if weights is None:
        p.lower(inner)
        fade: Tensor | float = 1.0
        seen = torch.arange(1, n + 1, device=x.device, dtype=p.dtype).repeat(p.groups)[
            None, :, None
        ]
        row_mass = mass + seen
    else:
        pair, fade, top = weights
        inner.mul_(pair)
        row_mass = mass * fade + pair.sum(-1, keepdim=True)
    den = inner.sum(-1, keepdim=True) + _dot(p, phi_q, z.transpose(1, 2)) * fade
    num = torch.bmm(inner, y)
    num.add_(torch.bmm(phi_q, s) * fade)
    bad = None
    if p.clip:
        bad = den < p.clip * row_mass
        den = torch.maximum(den, p.clip * row_mass)
    if key_weight is not None:
        decay = torch.exp2(c - new)
        phi_k = phi_k.mul_(key_weight)
        s, z = s * decay, z * decay
        mass = mass * decay + key_weight.sum(1, keepdim=True)
    else:
        mass = mass + n
    s = s.baddbmm(phi_k.transpose(1, 2), y)
    return bad, num, den, top, (s, z + phi_k.sum(1).unsqueeze(-1), new, mass)


def _row_weights(
    p: Problem, weight: Tensor | None, c: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Weights of plain maps' keys relative to each row's own maximum of what it sees.

    Returns (2^(weight_j − m_i) on the lower triangle (N, G·n, n), 2^(c − m_i), m_i).
    """
    if weight is None:
        return None
    top = torch.maximum(c, weight.cummax(1).values)  # (N, n, 1)
    pair = torch.exp2(weight.transpose(1, 2) - top).tril_()
    repeat = (1, p.groups, 1)
    return pair.repeat(repeat), torch.exp2(c - top).repeat(repeat), top.repeat(repeat)


# ---- rows that underflow ------------------------------------------------------------------


def _unseen(p: Problem, low: Tensor, c: Tensor, closed: Tensor | None) -> Tensor:
    """Of the rows with a tiny normaliser, those that do have a key to read."""
    if closed is None:
        return low
    seen = (~closed).cumsum(1).repeat(1, p.groups, 1) > 0
    return low & (seen | (c.amax(-1, keepdim=True) > 0.5 * EMPTY))


def _bad_rows(
    p: Problem, bad: Tensor, queries: Tensor, x: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(head, row, position, u_q (R, M), all u_k (N, n, M)) of the rows to redo."""
    head, row, _ = bad.nonzero(as_tuple=True)
    u_q = p.query_map.apply(queries, p.work, "q")[head, row]
    u_k = p.key_map.apply(x, Workspace(x, p.dtype), "k")
    if weight is not None:
        u_k = u_k + weight
    return head, row, row % x.shape[1], u_q, u_k


def _log_space(
    p: Problem, u_q: Tensor, u_k: Tensor, position: Tensor, c: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Per-pair features (R, n, M) and state features (R, M), relative to the row's scale."""
    pairs = u_q[:, None] + u_k
    later = torch.arange(u_k.shape[1], device=u_k.device) > position[:, None]
    pairs.masked_fill_(later[..., None], -math.inf)
    past = u_q + c[:, 0]
    top = torch.maximum(pairs.amax((1, 2)), past.amax(1))[:, None].clamp_min_(2.0 * EMPTY)
    return pairs.sub_(top[..., None]).exp2_(), (past - top).exp2_(), top


def _slices(p: Problem, rows: int, n: int) -> list[slice]:
    step = max(1, REPAIR_ELEMENTS // (n * p.features))
    return [slice(i, i + step) for i in range(0, rows, step)]


def _repair(
    p: Problem, bad: Tensor, queries: Tensor, x: Tensor, weight: Tensor | None, y: Tensor,
    before: tuple[Tensor, Tensor, Tensor], num: Tensor, den: Tensor, top: Tensor,
) -> None:  # fmt: skip
    """Redoes rows whose visible keys lie far below the chunk's maximum, in log space."""
    s, z, c = before
    head, row, position, u_q, u_k = _bad_rows(p, bad, queries, x, weight)
    for part in _slices(p, len(head), x.shape[1]):
        h, r = head[part], row[part]
        pairs, past, level = _log_space(p, u_q[part], u_k[h], position[part], c[h])
        inner = pairs.sum(-1)
        den[h, r] = inner.sum(-1, keepdim=True) + (past * z[h, :, 0]).sum(-1, keepdim=True)
        num[h, r] = (inner[:, None] @ y[h] + past[:, None] @ s[h])[:, 0]
        top[h, r] = level


# ---- backward -----------------------------------------------------------------------------


@dataclass
class Gradients:
    """Cotangents of q, k, v, key_bias (B, Kv, S) and of the incoming state's S and z."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_bias: Tensor | None
    s: Tensor
    z: Tensor


def backward(
    p: Problem, result: Result, out_bar: Tensor, den_bar: Tensor | None,
    s_bar: Tensor | None, z_bar: Tensor | None, need_bias: bool, keep: int,
) -> Gradients:  # fmt: skip
    """Cotangents of every input, φ recomputed chunk by chunk.

    With g = ō/den and δ = d̄en − Σ g∘out (zero where clipped):
    φ̄_q = g Sᵀ + δ zᵀ (+ G φ_k), G = tril(g vᵀ + δ); S̄ = Σ φ_qᵀ g, z̄ = Σ φ_qᵀ δ;
    φ̄_k = v S̄ᵀ + z̄ (+ Gᵀ φ_q), v̄ = φ_k S̄ (+ Aᵀ g); then each map's pullback.
    """
    grads = Gradients(
        torch.empty_like(p.q, memory_format=torch.contiguous_format),
        torch.empty_like(p.k, memory_format=torch.contiguous_format),
        torch.empty_like(p.v, memory_format=torch.contiguous_format),
        p.k.new_empty(p.k.shape[:-1], dtype=p.dtype) if need_bias else None,
        p.q.new_zeros(p.rows, p.features, p.value, dtype=p.dtype)
        if s_bar is None
        else s_bar.clone(),
        p.q.new_zeros(p.rows, p.features, 1, dtype=p.dtype) if z_bar is None else z_bar.clone(),
    )
    large_pages(grads.q, grads.k, grads.v)
    outer = _Outer(p, result, out_bar, den_bar)
    s, z, c, _ = result.state
    after = c
    for t in reversed(range(result.history[0].shape[0])):
        begin = p.absorb + t * keep
        for i, j, before in reversed(_states(p, result, t, begin, min(begin + keep, p.keys))):
            causal = _causal_backward if p.log else _plain_causal_backward
            causal(p, outer, grads, i, j, before, after, result)
            after = before[2]
    if p.absorb < p.keys:
        s, z, c = (h[0] for h in result.history)
    step = max(1, p.chunk(False) // p.groups)
    s_t, z_t = s.transpose(1, 2), z.transpose(1, 2)
    for i in range(0, p.answered, step):
        j = min(i + step, p.answered)
        x = p.query(i, j)
        g, delta = outer.rows(i, j)
        phi, _ = p.query_features(x, c, outer.scales(i, j))
        if p.clip:
            delta = delta.masked_fill(result.flags[:, :, i:j].reshape(p.rows, -1, 1), 0.0)
        bar = torch.bmm(g, s_t, out=p.work.get("bar", *phi.shape))
        bar.addcmul_(delta, z_t)
        if p.log:
            bar.mul_(phi)
        grads.s.baddbmm_(phi.transpose(1, 2), g)
        grads.z.add_(_columns_dot(phi, delta))
        _query_pullback(p, grads, i, j, x, phi, bar)
    step = p.chunk(False)
    s_bar_t, z_bar_t = grads.s.transpose(1, 2), grads.z.transpose(1, 2)
    for i in range(0, p.absorb, step):
        j = min(i + step, p.absorb)
        x, y, weight, closed = p.key(i, j)
        phi, key_weight = _key_features_at(p, x, weight, c)
        bar = torch.baddbmm(z_bar_t, y, s_bar_t, out=p.work.get("bar", *phi.shape))
        weighted = phi if key_weight is None else phi * key_weight
        y_bar = _product(weighted, grads.s, _window(p, grads.v, i, j))
        if p.log:
            bar.mul_(phi)
        elif key_weight is not None:
            bar.mul_(key_weight)
        _key_pullback(p, grads, i, j, x, phi, bar, y_bar, closed)
    if p.state is not None:
        decay = torch.exp2(p.state[2].to(p.dtype) - c).transpose(1, 2)
        grads.s.mul_(decay)
        grads.z.mul_(decay)
    return grads


def _states(
    p: Problem, result: Result, t: int, begin: int, end: int
) -> list[tuple[int, int, tuple[Tensor, Tensor, Tensor]]]:
    """Causal chunks (i, j, state before them) of a kept state: those between are made again."""
    state: tuple[Tensor, ...] = (*(h[t] for h in result.history), result.state[3])
    step, found = p.chunk(True), []
    for i in range(begin, end, step):
        j = min(i + step, end)
        found.append((i, j, (state[0], state[1], state[2])))
        if j < end:
            s, z, *rest = state
            state = _absorb(p, i, j, (s.clone(), z.clone(), *rest))
    return found


class _Outer:
    """g = ō/den and δ = d̄en − Σ g∘out of a range of queries, as (N, G·n, ·)."""

    def __init__(self, p: Problem, result: Result, out_bar: Tensor, den_bar: Tensor | None) -> None:
        split = (p.kv, p.groups)
        self.p = p
        self.out = result.out.unflatten(1, split)
        self.den = result.den.unsqueeze(-1).unflatten(1, split)
        self.scale = result.scale.unsqueeze(-1).unflatten(1, split)
        self.out_bar = out_bar.unflatten(1, split)
        self.den_bar = None if den_bar is None else den_bar.unsqueeze(-1).unflatten(1, split)

    def rows(self, i: int, j: int) -> tuple[Tensor, Tensor]:
        den, bar = self._take(self.den, i, j), self._take(self.out_bar, i, j)
        g = self.p.work.get("g", *bar.shape)
        torch.div(bar, den.masked_fill(den == 0, math.inf), out=g)
        delta = _dot(self.p, g, self._take(self.out, i, j)).neg_()
        if self.den_bar is not None:
            delta.add_(self._take(self.den_bar, i, j))
        return g, delta

    def scales(self, i: int, j: int) -> Tensor:
        return self._take(self.scale, i, j)

    def _take(self, tensor: Tensor, i: int, j: int) -> Tensor:
        part = tensor[:, :, :, i:j]
        return part.reshape(self.p.rows, -1, part.shape[-1]).to(self.p.dtype)


def _key_features_at(
    p: Problem, x: Tensor, weight: Tensor | None, c: Tensor
) -> tuple[Tensor, Tensor | None]:
    """φ_k relative to a known maximum c; plain maps: (ψ_k, key weights)."""
    u = p.key_map.apply(x, p.work, "k", weight if p.log else None)
    if not p.log:
        return u, None if weight is None else torch.exp2(weight - c)
    return u.sub_(c).exp2_(), None


def _query_pullback(
    p: Problem, grads: Gradients, i: int, j: int, x: Tensor, phi: Tensor, bar: Tensor
) -> None:
    """Writes q̄ of queries i..j; `bar` is the cotangent of ln φ_q (log) or φ_q."""
    target = _window(p, grads.q, i, j)
    q_bar = p.query_map.pullback(x, phi, bar, target)
    if target is None:
        grads.q.unflatten(1, (p.kv, p.groups))[:, :, :, i:j] = p.split(q_bar)


def _key_pullback(
    p: Problem, grads: Gradients, i: int, j: int, x: Tensor, phi: Tensor, bar: Tensor,
    y_bar: Tensor, closed: Tensor | None,
) -> None:  # fmt: skip
    """Writes k̄, v̄, key_bias̄ of keys i..j; `bar` is the cotangent of ln φ_k (log) or ψ_k.

    A plain map's φ_k is ψ_k times its weight, so that the log-weight's cotangent is ψ̄·ψ.
    """
    target = _window(p, grads.k, i, j)
    x_bar = p.key_map.pullback(x, phi, bar, target)
    if p.weighted:
        weight_bar = (bar if p.log else bar * phi).sum(-1, keepdim=True)
        if closed is not None:
            weight_bar = weight_bar.masked_fill(closed, 0.0)
        if p.quad != 0.0:
            x_bar.addcmul_(weight_bar, x, value=-2.0 * p.quad)
        if grads.key_bias is not None:
            grads.key_bias[:, :, i:j] = weight_bar.view(-1, p.kv, j - i)
    if closed is not None:
        x_bar.masked_fill_(closed, 0.0)
        y_bar.masked_fill_(closed, 0.0)
    if target is None:
        grads.k[:, :, i:j] = x_bar.view(-1, p.kv, j - i, x_bar.shape[-1])
    if _window(p, grads.v, i, j) is None:
        grads.v[:, :, i:j] = y_bar.view(-1, p.kv, j - i, p.value)


def _causal_backward(
    p: Problem, outer: _Outer, grads: Gradients, i: int, j: int,
    before: tuple[Tensor, Tensor, Tensor], after: Tensor, result: Result,
) -> None:  # fmt: skip
    """One causal chunk of an exponential map; `grads.s` arrives at scale `after` and leaves
    at the scale of the state before the chunk.
    """
    s, z, c = before
    a, b = i + p.answered - p.absorb, j + p.answered - p.absorb
    x, y, weight, closed = p.key(i, j)
    queries = p.query(a, b)
    n, rows = j - i, queries.shape[1]
    all_g, all_delta = outer.rows(a, b)
    bad = result.flags[:, :, a:b].reshape(p.rows, rows, 1)
    some = bool(bad.any())
    g = all_g.masked_fill(bad, 0.0) if some else all_g
    delta = all_delta.masked_fill(bad, 0.0) if some else all_delta
    decay = torch.exp2(c - after).transpose(1, 2)
    phi_k, _ = _key_features_at(p, x, weight, after)
    phi_q, _ = p.query_features(queries, after)
    inner = torch.bmm(phi_q, phi_k.transpose(1, 2), out=p.work.get("inner", p.rows, rows, n))
    p.lower(inner)
    pair = torch.bmm(g, y.transpose(1, 2), out=p.work.get("pair", p.rows, rows, n))
    p.lower(pair.add_(delta))
    bar = torch.bmm(pair, phi_k, out=p.work.get("bar", *phi_q.shape))
    bar.baddbmm_(g, (s * decay).transpose(1, 2))
    bar.addcmul_(delta, (z * decay).transpose(1, 2)).mul_(phi_q)
    key_bar = p.work.get("key_bar", *phi_k.shape)
    torch.baddbmm(grads.z.transpose(1, 2), y, grads.s.transpose(1, 2), out=key_bar)
    key_bar.baddbmm_(pair.transpose(1, 2), phi_q).mul_(phi_k)
    y_bar = _product(phi_k, grads.s, _window(p, grads.v, i, j)).baddbmm_(inner.transpose(1, 2), g)
    grads.s.baddbmm_(phi_q.transpose(1, 2), g).mul_(decay)
    grads.z.add_(_columns_dot(phi_q, delta)).mul_(decay)
    if some:
        head, row, position, u_q, u_k = _bad_rows(p, bad, queries, x, weight)
        for part in _slices(p, len(head), n):
            h, r = head[part], row[part]
            g_r, delta_r = all_g[h, r], all_delta[h, r]
            pairs, past, _ = _log_space(p, u_q[part], u_k[h], position[part], c[h])
            values = y[h]
            y_bar.index_add_(0, h, pairs.sum(-1)[..., None] * g_r[:, None])
            pair_r = (values @ g_r[..., None])[..., 0] + delta_r
            past_bar = ((s[h] @ g_r[..., None])[..., 0] + delta_r * z[h, :, 0]).mul_(past)
            grads.s.index_add_(0, h, past[..., None] * g_r[:, None])
            grads.z.index_add_(0, h, (past * delta_r)[..., None])
            pairs.mul_(pair_r[..., None])
            key_bar.index_add_(0, h, pairs)
            bar[h, r] += pairs.sum(1) + past_bar
    _query_pullback(p, grads, a, b, queries, phi_q, bar)
    _key_pullback(p, grads, i, j, x, phi_k, key_bar, y_bar, closed)


def _plain_causal_backward(
    p: Problem, outer: _Outer, grads: Gradients, i: int, j: int,
    before: tuple[Tensor, Tensor, Tensor], after: Tensor, result: Result,
) -> None:  # fmt: skip
    """One causal chunk of a plain map."""
    s, z, c = before
    a, b = i + p.answered - p.absorb, j + p.answered - p.absorb
    x, y, weight, closed = p.key(i, j)
    queries = p.query(a, b)
    g, delta = outer.rows(a, b)
    psi_k, key_weight = _key_features_at(p, x, weight, after)
    psi_q, _ = p.query_features(queries, c)
    weights = _row_weights(p, weight, c)
    inner = torch.bmm(psi_q, psi_k.transpose(1, 2))
    fade: Tensor | float = 1.0
    if weights is None:
        p.lower(inner)
    else:
        inner.mul_(weights[0])
        fade = weights[1]
    if p.clip:
        delta = delta.masked_fill(result.flags[:, :, a:b].reshape(p.rows, -1, 1), 0.0)
    pair = torch.bmm(g, y.transpose(1, 2)).add_(delta)
    pair = p.lower(pair) if weights is None else pair.mul_(weights[0])
    bar = torch.bmm(pair, psi_k)
    bar.add_((torch.bmm(g, s.transpose(1, 2)) + delta * z.transpose(1, 2)) * fade)
    state_bar = torch.bmm(y, grads.s.transpose(1, 2)).add_(grads.z.transpose(1, 2))
    state_y = _product(psi_k, grads.s, _window(p, grads.v, i, j))
    if key_weight is not None:
        state_bar.mul_(key_weight)
        state_y.mul_(key_weight)
    key_bar = state_bar.baddbmm_(pair.transpose(1, 2), psi_q)
    y_bar = state_y.baddbmm_(inner.transpose(1, 2), g)
    if key_weight is not None:
        decay = torch.exp2(c - after)
        grads.s.mul_(decay)
        grads.z.mul_(decay)
    faded = psi_q * fade
    grads.s.baddbmm_(faded.transpose(1, 2), g)
    grads.z.add_(_columns_dot(faded, delta))
    _query_pullback(p, grads, a, b, queries, psi_q, bar)
    _key_pullback(p, grads, i, j, x, psi_k, key_bar, y_bar, closed)
