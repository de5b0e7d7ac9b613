"""A step of decoding by the C++ library, prepared once: what changes from step to step is pointers.

A step's arithmetic takes tens of microseconds, as long as the checks of a call and the making of
its feature maps. Where nothing but tensors of the same shapes changes, both need to be done once.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from subquad.kernels.linear import LOG2E
from subquad.kernels.native.engine import ACTIVATIONS, CAUSAL_CHUNK, CHUNK, _Call, _Side, _Tensor
from subquad.kernels.native.library import library

__all__ = ["Step"]

Sums = tuple[Tensor, Tensor, Tensor, Tensor]


class Step:
    """T new tokens and their queries, float32, into a state.

    Args:
        q (B, H, T, D), k (B, Kv, T, D), v (B, Kv, T, V): of one step; all others are alike.
        wq, wk: (Kv, D, R) or (B, Kv, D, R), as in `subquad.kernels.ops.linear_attention`.
        activation: "exp", "relu" or "elu".
        quad: a key's log-weight is −quad·|k|².
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, wq: Tensor, wk: Tensor, activation: str, quad: float
    ) -> None:
        native = library()
        assert native is not None, "refused before"
        self.run = native.subquad_forward
        self.layout = _layout(q, k, v)
        batch, heads, tokens, width = q.shape
        kv, value, features = k.shape[1], v.shape[3], wk.shape[-1]
        unit = LOG2E if activation == "exp" else 1.0
        query = (wq.to(torch.float32) * unit).contiguous()
        # Where both sides have one map, it is read once: half of what a step reads beside sums.
        key = query if wk is wq else (wk.to(torch.float32) * unit).contiguous()
        self.weights = query, key
        rows, level = (batch, kv), features if activation == "exp" else 1
        self.shapes = (
            (*rows, features, value), (*rows, features, 1), (*rows, 1, level), (*rows, 1, 1),
        )  # fmt: skip
        self.out_shape = (batch, heads, tokens, value)
        self.den, self.scale = torch.empty(2, batch * heads * tokens, dtype=torch.float32)
        call = self.call = _Call()
        for name, w in zip(("query", "key"), self.weights, strict=True):
            strides = w.stride() if w.dim() == 4 else (0, *w.stride())
            setattr(call, name, _Side(w.data_ptr(), 0, 0, 0, *strides, 0, 0, 0, 1.0, 0))
        call.q, call.k, call.v = (_Tensor(0, *t.stride(), 0, 0) for t in (q, k, v))
        call.out = _Tensor(0, *torch.empty(self.out_shape, device="meta").stride(), 0, 0)
        call.den, call.scale = self.den.data_ptr(), self.scale.data_ptr()
        call.batch, call.kv, call.groups = batch, kv, heads // kv
        call.queries = call.keys = tokens
        call.features, call.q_width, call.value = features, width, value
        call.chunk, call.causal_chunk = CHUNK, CAUSAL_CHUNK
        call.quad, call.threads, call.activation = quad, 1, ACTIVATIONS[activation]
        self.pointer = ctypes.byref(call)

    def takes(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether tensors are like those it was made for."""
        return _layout(q, k, v) == self.layout

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sums: Sums) -> tuple[Tensor, Sums] | None:
        """Output and new sums, or None where a row underflows: then the whole engine is needed."""
        call, new = self.call, torch.empty
        dtype = torch.float32
        out = new(self.out_shape, dtype=dtype)
        s, z, c, mass = (new(shape, dtype=dtype) for shape in self.shapes)
        call.q.data, call.k.data, call.v.data = q.data_ptr(), k.data_ptr(), v.data_ptr()
        call.out.data = out.data_ptr()
        s_in, z_in, c_in, mass_in = sums
        call.s_in, call.z_in = s_in.data_ptr(), z_in.data_ptr()
        call.c_in, call.mass_in = c_in.data_ptr(), mass_in.data_ptr()
        call.s, call.z = s.data_ptr(), z.data_ptr()
        call.c, call.mass = c.data_ptr(), mass.data_ptr()
        return None if self.run(self.pointer) else (out, (s, z, c, mass))


def _layout(*tensors: Tensor) -> tuple[object, ...]:
    return tuple((t.shape, t.stride(), t.dtype) for t in tensors)
