"""A step of decoding by the C++ library, prepared once: what changes from step to step is pointers.

A step's arithmetic takes tens of microseconds, as long as the checks of a call and the making of
its feature maps. Where nothing but tensors of the same shapes changes, both need to be done once.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from subquad.kernels.linear import LOG2E
from subquad.kernels.memory import has_data
from subquad.kernels.native.arguments import Alike
from subquad.kernels.native.engine import (
    ACTIVATIONS,
    CAUSAL_CHUNK,
    CHUNK,
    DTYPES,
    WORTH,
    _Call,
    _Side,
    _Tensor,
)
from subquad.kernels.native.library import library

__all__ = ["Step", "Sums"]

WIDEST = 16
"""Numbers in the widest vector that the library is compiled for."""

Sums = tuple[Tensor, Tensor, Tensor, Tensor]
"""S, z, c and mass of a state, as in `subquad.attention.kernel.engine.LinearState`."""


class Step(Alike):
    """T new tokens and their queries into a state, or T queries of a state that stays.

    Args:
        q (B, H, T, D), k (B, Kv, T, D), v (B, Kv, T, V): of one step; all others are alike.
            Keys and values of no token (T = 0) where a state is only read.
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
        super().__init__(q, k, v)
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
        self.out_shape, self.out_dtype = (batch, heads, tokens, value), v.dtype
        # One token's sums can be written where they are read. More tokens go another way, which
        # gives up a row that underflows before its sums are whole; so do odd widths.
        self.in_place = k.shape[2] == tokens == 1 and value % WIDEST == 0
        self.den, self.scale = torch.empty(
            2, batch * heads * tokens, dtype=torch.float32, device="cpu"
        )
        call = self.call = _Call()
        for name, w in zip(("query", "key"), self.weights, strict=True):
            strides = w.stride() if w.dim() == 4 else (0, *w.stride())
            setattr(call, name, _Side(w.data_ptr(), 0, 0, 0, *strides, 0, 0, 0, 1.0, 0))
        plain = torch.empty(self.out_shape, dtype=v.dtype, device="meta")
        call.q, call.k, call.v, call.out = (
            _Tensor(0, *t.stride(), DTYPES[t.dtype], 0) for t in (q, k, v, plain)
        )
        call.den, call.scale = self.den.data_ptr(), self.scale.data_ptr()
        call.batch, call.kv, call.groups = batch, kv, heads // kv
        call.queries, call.keys = tokens, k.shape[2]
        call.answered = 0 if k.shape[2] else tokens
        call.features, call.q_width, call.value = features, width, value
        call.chunk, call.causal_chunk = CHUNK, CAUSAL_CHUNK
        call.quad, call.threads, call.activation = quad, 1, ACTIVATIONS[activation]
        work = 2 * batch * (heads * tokens + kv * k.shape[2]) * features * (width + value)
        self.worth = 1 + work // WORTH
        # Parts of the struct are views of it, made once.
        self.q, self.k, self.v, self.out = call.q, call.k, call.v, call.out
        self.pointer = ctypes.byref(call)

    def takes_sums(self, sums: Sums) -> bool:
        """Whether a state's tensors are such as a step makes."""
        return all(
            t.shape == shape
            and t.dtype == torch.float32
            and t.is_cpu
            and t.is_contiguous()
            and has_data(t)
            for t, shape in zip(sums, self.shapes, strict=True)
        )

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        sums: Sums,
        donate: bool,
    ) -> tuple[Tensor | None, Sums]:
        """Output and new sums; no output where a row underflows and has to be read otherwise.

        Args:
            q, k, v, key_mask, sums: what `takes_queries`, `takes_keys` and `takes_sums` take.
            donate: whether the new sums may be written where the given ones are.
        """
        call = self.call
        out = torch.empty(self.out_shape, dtype=self.out_dtype, device="cpu")
        self.q.data, self.k.data, self.v.data = q.data_ptr(), k.data_ptr(), v.data_ptr()
        opened = None if key_mask is None else key_mask.contiguous()
        call.open = None if opened is None else opened.data_ptr()
        self.out.data = out.data_ptr()
        call.s_in, call.z_in, call.c_in, call.mass_in = (
            sums[0].data_ptr(), sums[1].data_ptr(), sums[2].data_ptr(), sums[3].data_ptr(),
        )  # fmt: skip
        if donate and self.in_place:
            call.s, call.z, call.c, call.mass = call.s_in, call.z_in, call.c_in, call.mass_in
        else:
            s, z, c, mass = sums = self._new_sums()
            call.s, call.z = s.data_ptr(), z.data_ptr()
            call.c, call.mass = c.data_ptr(), mass.data_ptr()
        return None if self._run() else out, sums

    def _run(self) -> int:
        if self.worth > 1:
            self.call.threads = min(torch.get_num_threads(), self.worth)
        bad: int = self.run(self.pointer)
        return bad

    def _new_sums(self) -> Sums:
        s, z, c, mass = (
            torch.empty(shape, dtype=torch.float32, device="cpu") for shape in self.shapes
        )
        return s, z, c, mass

    def look(self, q: Tensor, sums: Sums) -> Tensor:
        """Output of queries that read a state, which stays as it is."""
        call = self.call
        out = torch.empty(self.out_shape, dtype=self.out_dtype, device="cpu")
        self.q.data, self.out.data = q.data_ptr(), out.data_ptr()
        call.s_in, call.z_in, call.c_in, call.mass_in = (t.data_ptr() for t in sums)
        self._run()
        return out
