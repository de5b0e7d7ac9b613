"""Causal attention over held keys by the C++ library, forward and backward."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from subquad.kernels.dispatch import forced
from subquad.kernels.memory import has_data
from subquad.kernels.native.arguments import Alike, Strided, rows, whole
from subquad.kernels.native.engine import DTYPES, WORTH
from subquad.kernels.native.library import library
from subquad.kernels.transforms import again, differentiated

if TYPE_CHECKING:
    from subquad.attention.hybrid.stream import Hold

__all__ = ["Step", "attend", "takes"]


class _HeldCall(ctypes.Structure):
    _fields_ = [
        *((name, Strided) for name in ("q", "k", "v", "num", "num_bar", "q_bar", "k_bar", "v_bar")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "open", "state", "mass_in", "held_in", "lse", "mass", "state_bar", "lse_bar",
                "held", "places", "gone",
            )
        ),
        *(
            (name, ctypes.c_int64)
            for name in (
                "batch", "kv", "groups", "tokens", "early", "width", "value", "size", "sinks",
                "heavy", "block", "most",
            )
        ),
        ("scale", ctypes.c_float),
        ("fading", ctypes.c_float),
        ("threads", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    ]  # fmt: skip


class _HeldStep(ctypes.Structure):
    _fields_ = [
        *((name, Strided) for name in ("q", "k", "v", "out")),
        *((name, ctypes.c_void_p) for name in ("open", "state", "mass", "held_in", "held")),
        *(
            (name, ctypes.c_int64)
            for name in (
                "batch", "kv", "groups", "tokens", "width", "value", "size", "sinks", "heavy",
                "block",
            )
        ),
        ("scale", ctypes.c_float),
        ("fading", ctypes.c_float),
        ("threads", ctypes.c_int32),
        ("type", ctypes.c_int32),
    ]  # fmt: skip


def takes(*given: Tensor) -> bool:
    """Whether the library can run a call with these tensors."""
    return (
        all(t.is_cpu and t.dtype in DTYPES and t.numel() > 0 and not t.is_neg() for t in given)
        and not torch.compiler.is_compiling()
        and forced() in (None, "native")
        and has_data(given[0])
        and library() is not None
    )


def attend(
    q: Tensor, k: Tensor, v: Tensor, opened: Tensor | None, state: Tensor, mass: Tensor,
    held: Tensor, hold: Hold, fading: float, scale: float,
    plain: Callable[..., tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """What queries read of the keys held when they come, and what is held at the end.

    Origins count the N places of the state first, then the tokens. Differentiable in q, k, v and
    the state; second derivatives are those of `plain`.

    Args:
        q: (B, H, L, D), the queries of the last L of S tokens.
        k, v: (B, Hkv, S, D or V), zero where a token is not open.
        opened: (B, S) bool, tokens that count, or None.
        state: (B, Hkv, N, D + V), what is held before, from the front.
        mass: (B, Hkv, N) of its keys.
        held: (B,) int64 how many there are.
        hold: sizes.
        fading: factor of all masses when keys are let go.
        scale: of the logits.
        plain: the first two results by torch operations, of ``(opened, mass, held, q, k, v,
            state)``.

    Returns:
        In float32: outputs (B, H, L, V), the logarithms of their normalisers (B, H, L), which are
        far below all others where no key is held, and the new masses. In int64: the new `held`,
        the origins (B, Hkv, N) of what is held then, and those (B, Hkv, times, block) of the keys
        let go, −1 behind a row's last time.
    """
    if held.is_inference() and not torch.is_inference_mode_enabled():  # cannot be kept for backward
        state, mass, held = state.clone(), mass.clone(), held.clone()
    tensors = [t.to(torch.float32) for t in (q, k, v, state)]
    found: tuple[Tensor, ...] = _Attend.apply(  # type: ignore[no-untyped-call]  # torch's own
        (hold, fading, scale), plain, opened, mass, held, *tensors
    )
    out, lse, mass, held, places, gone = found
    return out, lse, mass, held, places, gone.long()


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, options: tuple[Hold, float, float], plain: Any, opened: Tensor | None,
        mass: Tensor, held: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        hold, native = options[0], library()
        assert native is not None, "asked before"
        kept: list[Tensor] = []
        most = max(0, k.shape[2] + int(held.max()) - hold.size + hold.block) // hold.block
        out = q.new_empty(*q.shape[:3], v.shape[3])
        lse, new_mass = q.new_empty(q.shape[:3]), q.new_empty(mass.shape)
        new_held, places = (q.new_empty(shape, dtype=torch.int64) for shape in (len(q), mass.shape))
        gone = q.new_full((*k.shape[:2], most, hold.block), -1, dtype=torch.int32)
        call = _call(options, opened, held, q, k, v, state, gone, kept)
        call.num, call.lse = rows(kept, out), lse.data_ptr()
        call.mass_in = whole(kept, mass)
        call.mass, call.held, call.places = (t.data_ptr() for t in (new_mass, new_held, places))
        native.subquad_held(ctypes.byref(call))
        ctx.save_for_backward(opened, mass, held, q, k, v, state, out, lse, gone)
        ctx.options, ctx.plain = options, plain
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(new_mass, new_held, places, gone)
        return out, lse, new_mass, new_held, places, gone

    @staticmethod
    def backward(ctx: Any, out_bar: Tensor | None, lse_bar: Tensor | None, *_: Any) -> Any:
        opened, mass, held, q, k, v, state, out, lse, gone = ctx.saved_tensors
        if differentiated():
            run = functools.partial(ctx.plain, opened, mass, held)
            needs = ctx.needs_input_grad[5:]
            found = again(run, (q, k, v, state), needs, (out_bar, lse_bar))
            return *[None] * 5, *found
        native = library()
        assert native is not None, "asked before"
        kept: list[Tensor] = []
        plain = torch.contiguous_format
        q_bar, k_bar, v_bar, state_bar = bars = [
            torch.empty_like(t, memory_format=plain) for t in (q, k, v, state)
        ]
        call = _call(ctx.options, opened, held, q, k, v, state, gone, kept)
        call.num, call.lse = rows(kept, out), lse.data_ptr()
        call.num_bar = rows(kept, torch.zeros_like(out) if out_bar is None else out_bar)
        call.lse_bar = whole(kept, lse_bar)
        call.q_bar, call.k_bar, call.v_bar = (rows(kept, t) for t in (q_bar, k_bar, v_bar))
        call.state_bar = state_bar.data_ptr()
        native.subquad_held_backward(ctypes.byref(call))
        return *[None] * 5, *bars


def _call(
    options: tuple[Hold, float, float], opened: Tensor | None, held: Tensor, q: Tensor, k: Tensor,
    v: Tensor, state: Tensor, gone: Tensor, kept: list[Tensor],
) -> _HeldCall:  # fmt: skip
    hold, fading, scale = options
    call = _HeldCall()
    call.q, call.k, call.v = (rows(kept, t) for t in (q, k, v))
    call.open = whole(kept, opened, torch.bool)
    call.state, call.gone = whole(kept, state), gone.data_ptr()
    call.held_in = whole(kept, held, torch.int64)
    call.batch, call.kv, call.tokens, call.width = k.shape
    call.groups, call.early = q.shape[1] // k.shape[1], k.shape[2] - q.shape[2]
    call.value, call.size, call.most = v.shape[3], hold.size, gone.shape[2]
    call.sinks, call.heavy, call.block = hold.sinks, hold.heavy, hold.block
    call.scale, call.fading = scale, fading
    work = 2 * q.shape[0] * q.shape[1] * q.shape[2] * hold.size * (call.width + call.value)
    call.threads = min(torch.get_num_threads(), 1 + work // WORTH)
    return call


Places = tuple[Tensor, Tensor, Tensor]
"""What is held: keys and values (B, Hkv, N, D + V), masses (B, Hkv, N), how many (B,)."""


class Step(Alike):
    """T new tokens and their queries, prepared once: what changes is pointers.

    Args:
        q (B, H, T, D), k (B, Hkv, T, D), v (B, Hkv, T, V): of one step, of one dtype, with
            contiguous rows; all others are alike.
        hold, fading, scale: as in `attend`.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, hold: Hold, fading: float, scale: float
    ) -> None:
        native = library()
        assert native is not None, "refused before"
        self.run = native.subquad_held_step
        super().__init__(q, k, v)
        batch, heads, tokens, width = q.shape
        kv, value = k.shape[1], v.shape[3]
        self.shapes = (batch, kv, hold.size, width + value), (batch, kv, hold.size), (batch,)
        self.out_shape = batch, heads, tokens, value
        self.dtype, self.tokens = q.dtype, tokens
        self.size, self.block = hold.size, hold.block
        call = self.call = _HeldStep()
        plain = torch.empty(self.out_shape, device="meta")
        call.q, call.k, call.v, call.out = (Strided(0, *t.stride()[:3]) for t in (q, k, v, plain))
        call.batch, call.kv, call.groups, call.tokens = batch, kv, heads // kv, tokens
        call.width, call.value, call.size = width, value, hold.size
        call.sinks, call.heavy, call.block = hold.sinks, hold.heavy, hold.block
        call.scale, call.fading, call.type = scale, fading, DTYPES[q.dtype]
        work = 2 * batch * heads * tokens * hold.size * (width + value)
        self.worth = 1 + work // WORTH
        call.threads = 1
        self.q, self.k, self.v, self.out = call.q, call.k, call.v, call.out
        self.pointer = ctypes.byref(call)

    @staticmethod
    def can(q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether steps of such tensors can be prepared."""
        return takes(q, k, v) and all(
            t.dtype == q.dtype and has_data(t) and (t.stride(3) == 1 or t.shape[3] == 1)
            for t in (q, k, v)
        )

    def takes_places(self, places: Places) -> bool:
        """Whether what a state holds is such as a step makes."""
        dtypes = self.dtype, torch.float32, torch.int64
        return all(
            t.shape == shape and t.dtype == dtype and t.is_cpu and has_data(t)
            for t, shape, dtype in zip(places, self.shapes, dtypes, strict=True)
        ) and bool(((places[2] >= 0) & (places[2] < self.size)).all())

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        places: Places,
        donate: bool,
    ) -> tuple[Tensor, Places]:
        """Output, and what is held then.

        Args:
            q, k, v, key_mask, places: what the methods `takes_…` take.
            donate: whether the new places may be written where the given ones are.
        """
        call, (state, mass, before) = self.call, places
        if not donate:
            state, mass = state.detach().clone(), mass.clone()
        state, mass, before = state.contiguous(), mass.contiguous(), before.contiguous()
        out = torch.empty(self.out_shape, dtype=self.dtype, device="cpu")
        held = torch.empty(self.shapes[2], dtype=torch.int64, device="cpu")
        self.q.data, self.k.data, self.v.data = q.data_ptr(), k.data_ptr(), v.data_ptr()
        opened = None if key_mask is None else key_mask.contiguous()
        call.open = None if opened is None else opened.data_ptr()
        self.out.data, call.held = out.data_ptr(), held.data_ptr()
        call.state, call.mass, call.held_in = state.data_ptr(), mass.data_ptr(), before.data_ptr()
        if self.worth > 1:
            call.threads = min(torch.get_num_threads(), self.worth)
        self.run(self.pointer)
        return out, (state, mass, held)

    def filled(self, even: int) -> int:
        """Places that are filled after a step of tokens that all count, if `even` were before."""
        for _ in range(self.tokens):
            even += 1
            if even == self.size:
                even -= self.block
        return even
