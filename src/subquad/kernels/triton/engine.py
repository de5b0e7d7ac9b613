"""Launches the kernels of one call; see the package for the phases."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.linear import Gradients, LinearMap, Problem, Result
from subquad.kernels.triton import backward_kernels as back
from subquad.kernels.triton import forward_kernels as fore
from subquad.kernels.triton.tiles import INTERPRETED

__all__ = ["backward", "forward"]

STEP = 16
"""Tokens of a call that one launch can do: the least side of a tile that `tl.dot` takes."""
SCAN = (32, 64)
"""Features × values of a tile in a scan: small, its steps wait for memory."""
REPAIR = {"BLOCK_M": 32, "BLOCK_N": 32, "num_stages": 1}
"""Block sizes where rows are redone, rarely."""
WAVES = 2
"""Programs for each multiprocessor that a split of the keys aims at."""


def _width(n: int) -> int:
    return max(16, triton.next_power_of_2(n))


def _dense(tensor: Tensor) -> Tensor:
    """The tensor, its rows without gaps."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _strides(prefix: str, tensor: Tensor) -> dict[str, int]:
    return {f"{prefix}_{name}": tensor.stride(n) for n, name in enumerate("bhn")}


def _tf32() -> bool:
    """Whether torch may multiply float32 matrices in TF32; its setting has a newer name."""
    matmul = torch.backends.cuda.matmul
    try:
        return bool(matmul.fp32_precision == "tf32")
    except AttributeError:  # before torch 2.9
        return matmul.allow_tf32


NO_BIAS = {"bias_b": 0, "bias_h": 0, "bias_n": 0}
FUSED = {"enable_fp_fusion": True}
"""Multiply-adds round once: Triton's default, which it is about to change."""
States = tuple[Tensor, ...]
"""(S, z, c), each with a leading dimension where there are several."""


class Call:
    """One call's tensors and numbers, named as the kernels name their arguments."""

    def __init__(self, p: Problem) -> None:
        self.p = p
        batch, self.heads = p.q.shape[:2]
        self.chunk = p.chunk(True)
        self.shift = p.queries - p.keys
        self.chunks = triton.cdiv(p.keys - p.absorb, self.chunk)
        q, k, v = _dense(p.q), _dense(p.k), _dense(p.v)
        bias, mask = p.key_bias, p.key_mask
        self.sizes = self._sizes()
        self.query = {"q": q, **_strides("q", q)}
        self.key = {
            "k": k, "v": v, **_strides("k", k), **_strides("v", v),
            "key_bias": bias, **(_strides("bias", bias) if bias is not None else NO_BIAS),
            "key_mask": None if mask is None else mask.view(torch.uint8),
            "mask_b": 0 if mask is None else mask.stride(0),
            "mask_n": 0 if mask is None else mask.stride(1),
            "quad": float(p.quad), "kv": p.kv,
        }  # fmt: skip
        self.wq, self.wk = self._map(p.query_map, ""), self._map(p.key_map, "")
        self.both = {**self._map(p.query_map, "q"), **self._map(p.key_map, "k")}
        self.groups = {"heads": self.heads, "groups": p.groups, "queries": p.queries}
        self.lanes = batch * self.heads

    def _sizes(self) -> dict[str, Any]:
        p, tf32 = self.p, "tf32" if _tf32() else "tf32x3"
        dot, maps, sums = {
            torch.float32: (tl.float32, tf32, tf32),
            torch.float16: (tl.float32, "tf32x3", "tf32"),
            torch.bfloat16: (tl.bfloat16, "tf32", "tf32"),
        }[p.q.dtype]
        d, v = p.q.shape[-1], p.value
        return {
            "D": d, "M": p.features, "V": v, "BLOCK_D": _width(d), "BLOCK_V": _width(v),
            "DOT": dot, "MAP": maps, "SUM": sums, **FUSED,
        }  # fmt: skip

    def _map(self, linear_map: Any, side: str) -> dict[str, Any]:
        assert isinstance(linear_map, LinearMap)
        weight, bias = linear_map.scaled.contiguous(), linear_map.bias
        return {
            f"w{side}": weight,
            f"b{side}": None if bias is None else bias.contiguous(),
            f"w{side}_b": weight.stride(0) if weight.dim() == 4 else 0,
            f"w{side}_h": weight.stride(-3),
        }

    def blocks(self, tokens: int) -> Any:
        return lambda meta: (triton.cdiv(tokens, meta["BLOCK_N"]), self.lanes)

    def key_blocks(self, tokens: int) -> Any:
        return lambda meta: (triton.cdiv(tokens, meta["BLOCK_N"]), self.p.rows)

    def parts(self, count: int, lanes: int) -> Any:
        return lambda meta: (count, triton.cdiv(self.p.features, meta["BLOCK_M"]), lanes)

    def split(self, tokens: int, lanes: int) -> tuple[int, int]:
        """Parts of the tokens that fill the device, and tokens a part."""
        if INTERPRETED:
            wanted = 3
        else:
            found = torch.cuda.get_device_properties(self.p.q.device).multi_processor_count
            wanted = triton.cdiv(WAVES * found, lanes * triton.cdiv(self.p.features, 64))
        size = max(4 * STEP, triton.cdiv(tokens, wanted))
        return triton.cdiv(tokens, size), size

    def states(self, count: int) -> States:
        """Room for the states (S, z, c) of `count` parts, laid out as the history is."""
        p, new = self.p, self.p.q.new_empty
        m, v, n = p.features, p.value, p.rows
        return (
            new(count, n, m, v, dtype=torch.float32),
            new(count, n, m, 1, dtype=torch.float32),
            new(count, n, 1, m, dtype=torch.float32),
        )

    def absorb(self, count: int, tokens: int, first: int, end: int) -> States:
        """States of `count` parts of the keys first..end, each relative to its own maximum."""
        s, z, c = self.states(count)
        fore.absorb_kernel[self.parts(count, self.p.rows)](
            **self.key, **self.wk, s=s, z=z, c=c, rows=self.p.rows, first=first, end=end,
            tokens=tokens, **self.sizes,
        )  # fmt: skip
        return s, z, c

    def state(self) -> States:
        s, z, c = self.states(1)
        return s[0], z[0], c[0]

    @property
    def tile(self) -> dict[str, Any]:
        m, v = SCAN
        return {"M": self.p.features, "V": self.p.value, "BLOCK_M": m, "BLOCK_V": v, **FUSED}

    def tiles(self, lanes: int) -> tuple[int, int, int]:
        return lanes, triton.cdiv(self.p.features, SCAN[0]), triton.cdiv(self.p.value, SCAN[1])

    def scan(
        self, parts: States, start: States | None, segment: int, *,
        before: tuple[Tensor, Tensor] | None = None, end: States | None = None,
    ) -> None:  # fmt: skip
        """Adds up states; see `scan_kernel`."""
        count, rows = parts[0].shape[:2]
        nothing = (None, None, None)
        fore.scan_kernel[self.tiles(triton.cdiv(count, segment) * rows)](
            *parts, *(start or nothing), *(before or nothing[:2]), *(end or nothing), rows,
            count, segment, **self.tile,
        )  # fmt: skip

    def repair(self, before: States, answers: dict[str, Tensor], low: Tensor) -> None:
        """Redoes flagged rows from the states before their chunks; on the device, if there are."""
        p = self.p
        s, z, c = before
        fore.repair_kernel[self.blocks(p.keys - p.absorb)](
            **self.query, **self.key, **self.both, **self.groups, **answers, s=s, z=z, c=c, low=low,
            first=p.absorb, shift=self.shift, end=p.keys, CHUNK=self.chunk, **self.sizes, **REPAIR,
        )  # fmt: skip

    def cotangents(
        self, rows: dict[str, Any], low: Tensor | None, c: Tensor, stride: int, count: int,
        tokens: int, first: int, end: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Σ φ_qᵀ g and Σ φ_qᵀ δ of `count` parts of the queries: (count, N, M, V) and (…, 1)."""
        p, shape = self.p, (count, self.lanes, self.p.features)
        s_bar = p.q.new_empty(*shape, p.value, dtype=torch.float32)
        z_bar = p.q.new_empty(*shape, 1, dtype=torch.float32)
        back.cotangent_kernel[self.parts(count, self.lanes)](
            **self.query, **self.wq, c=c, **rows, low=low, s_bar=s_bar, z_bar=z_bar, c_t=stride,
            **self.groups, first=first, end=end, tokens=tokens, **self.sizes,
        )  # fmt: skip
        if p.groups == 1:
            return s_bar, z_bar
        return tuple(t.unflatten(1, (p.rows, p.groups)).sum(2) for t in (s_bar, z_bar))


def forward(p: Problem, keep: int) -> Result:
    """As `subquad.kernels.linear.forward`."""
    call = Call(p)
    out = p.v.new_empty(*p.q.shape[:-1], p.value)
    den = p.q.new_empty(p.q.shape[:-1], dtype=torch.float32)
    answers = {"out": out, "den": den, "scale": torch.empty_like(den)}
    state: tuple[Tensor, ...] | None = None
    if p.state is not None:
        state = tuple(t.to(torch.float32).contiguous() for t in p.state[:3])
        mass = p.state[3].to(torch.float32, copy=not p.borrow)
    else:
        mass = p.q.new_zeros(p.rows, 1, 1, dtype=torch.float32)
    if p.absorb:
        count, size = call.split(p.absorb, p.rows)
        end = call.state()
        call.scan(call.absorb(count, size, 0, p.absorb), state, count, end=end)
        state = end
    if p.answered:
        s, z, c = p.start()[:3] if state is None else state
        fore.read_kernel[call.blocks(p.answered)](
            **call.query, **call.wq, s=s, z=z, c=c, **answers, **call.groups, end=p.answered,
            **call.sizes,
        )  # fmt: skip
    history = call.states(0)
    flagged = keep or call.chunks
    flags = out.new_zeros(p.rows, p.groups, p.queries if flagged else 0, dtype=torch.bool)
    if call.chunks:
        low = flags.view(torch.uint8)
        if p.keys - p.absorb <= STEP:
            state, history = _step(call, state, answers, low, keep)
        else:
            state, history = _causal(call, state, answers, low, keep)
    assert state is not None  # some keys were absorbed, in either phase
    if not keep:
        flags = flags[:, :, :0].clone()
    s, z, c = state
    hs, hz, hc = history
    return Result(**answers, state=(s, z, c, mass), history=(hs, hz, hc), flags=flags)


def _step(
    call: Call, start: States | None, answers: dict[str, Tensor], low: Tensor, keep: int
) -> tuple[States, States]:
    """A causal phase of few tokens in one launch: (new state, history)."""
    p, new = call.p, call.state()
    s0, z0, c0 = (None, None, None) if start is None else start
    block = 16 if p.value <= 64 else 32
    sizes = {**call.sizes, "BLOCK_V": block, "BLOCK_M": min(32, _width(p.features))}
    fore.step_kernel[(call.lanes, triton.cdiv(p.value, block))](
        **call.query, **call.key, **call.both, **call.groups, s0=s0, z0=z0, c0=c0, s=new[0],
        z=new[1], c=new[2], **answers, low=low, first=p.absorb, shift=call.shift, end=p.keys,
        **sizes, BLOCK_N=STEP, num_stages=1,
    )  # fmt: skip
    if p.keys - p.absorb == 1 and not keep:
        return new, call.states(0)
    first = tuple(t[None].clone() for t in (start or p.start()[:3]))
    if p.keys - p.absorb > 1:  # one token cannot underflow: its own maximum or the state's is met
        call.repair(first, answers, low)
    return new, first if keep else call.states(0)


def _causal(
    call: Call, start: States | None, answers: dict[str, Tensor], low: Tensor, keep: int
) -> tuple[States, States]:
    """Chunk states, their scan, and the answers of all chunks: (new state, history)."""
    p, count = call.p, call.chunks
    s, z, c = call.absorb(count, call.chunk, p.absorb, p.keys)
    before, levels = torch.empty_like(z), c.new_empty(count + 1, *c.shape[1:])
    end = call.state()
    call.scan((s, z, c), start, count, before=(before, levels), end=(*end[:2], levels[count]))
    fore.causal_kernel[call.blocks(p.keys - p.absorb)](
        **call.query, **call.key, **call.both, **call.groups, s=s, z=before, c=levels, **answers,
        low=low, first=p.absorb, shift=call.shift, end=p.keys, CHUNK=call.chunk, **call.sizes,
    )  # fmt: skip
    call.repair((s, before, levels), answers, low)
    state = (*end[:2], levels[count].clone())
    if not keep:
        return state, call.states(0)
    step = keep // call.chunk
    return state, tuple(t[:count:step].contiguous() for t in (s, before, levels))


def backward(
    p: Problem, result: Result, out_bar: Tensor, den_bar: Tensor | None,
    s_bar: Tensor | None, z_bar: Tensor | None, need_bias: bool, keep: int,
) -> Gradients:  # fmt: skip
    """As `subquad.kernels.linear.backward`."""
    call = Call(p)
    new = p.q.new_empty
    q_bar, k_bar, v_bar = (new(t.shape) for t in (p.q, p.k, p.v))
    bias_bar = new(p.k.shape[:-1], dtype=torch.float32) if need_bias else None
    out_bar = _dense(out_bar)
    rows = {
        "den": result.den, "scale": result.scale, "out_bar": out_bar, **_strides("o", out_bar),
        "delta": torch.empty_like(result.den),
    }  # fmt: skip
    outer = {
        "out": result.out, "den_bar": None if den_bar is None else den_bar.contiguous(),
        "q_bar": q_bar,
    }  # fmt: skip
    keys = {"k_bar": k_bar, "v_bar": v_bar, "bias_bar": bias_bar, "keys": p.keys}
    s, z, c = result.state[:3]
    s_bar = None if s_bar is None else s_bar.contiguous()
    z_bar = None if z_bar is None else z_bar.contiguous()
    if call.chunks:
        s_bar, z_bar = _causal_backward(call, result, rows, outer, keys, s_bar, z_bar, keep)
        s, z, c = (h[0] for h in result.history)
    if p.answered:
        back.read_backward_kernel[call.blocks(p.answered)](
            **call.query, **call.wq, s=s, z=z, c=c, **rows, **outer, **call.groups,
            end=p.answered, **call.sizes,
        )  # fmt: skip
        count, size = call.split(p.answered, call.lanes)
        s_more, z_more = (
            t.sum(0) for t in call.cotangents(rows, None, c, 0, count, size, 0, p.answered)
        )
        s_bar = s_more if s_bar is None else s_bar + s_more
        z_bar = z_more if z_bar is None else z_bar + z_more
    assert s_bar is not None and z_bar is not None  # some query was answered, in either phase
    if p.absorb:
        back.absorb_backward_kernel[call.key_blocks(p.absorb)](
            **call.key, **call.wk, c=c, s_bar=s_bar, z_bar=z_bar, **keys, end=p.absorb,
            **call.sizes,
        )  # fmt: skip
    if p.state is not None:
        decay = torch.exp2(p.state[2].to(torch.float32) - c).mT
        s_bar, z_bar = s_bar * decay, z_bar * decay
    return Gradients(q_bar, k_bar, v_bar, bias_bar, s_bar, z_bar)


def _causal_backward(
    call: Call, result: Result, rows: dict[str, Any], outer: dict[str, Any], keys: dict[str, Any],
    s_bar: Tensor | None, z_bar: Tensor | None, keep: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q̄, k̄, v̄ of the causal phase; S̄, z̄ of the state before it."""
    p, count = call.p, call.chunks
    s, z, levels = result.history
    if keep != call.chunk:  # the states between those kept are made again
        parts = call.absorb(count, call.chunk, p.absorb, p.keys)
        z, levels = torch.empty_like(parts[1]), torch.empty_like(parts[2])
        call.scan(parts, result.history, keep // call.chunk, before=(z, levels), end=None)
        s = parts[0]
    levels = torch.cat((levels, result.state[2][None]))
    place = {"first": p.absorb, "shift": call.shift, "end": p.keys, "CHUNK": call.chunk}
    low = result.flags.view(torch.uint8)
    inputs = {**call.query, **call.key, **call.both, **call.sizes, **rows, **place, "low": low}
    tokens = p.keys - p.absorb
    back.causal_query_kernel[call.blocks(tokens)](
        **inputs, **outer, **call.groups, s=s, z=z, c=levels
    )
    if tokens > 1:
        back.repair_query_kernel[call.blocks(tokens)](
            **inputs, **call.groups, q_bar=outer["q_bar"], s=s, z=z, c=levels, **REPAIR
        )
    first = p.absorb + call.shift
    s_after, z_each = call.cotangents(
        rows, low, levels[1:], p.rows * p.features, count, call.chunk, first, p.queries
    )
    z_after, (s_first, z_first, _) = torch.empty_like(z_each), call.state()
    back.reverse_scan_kernel[call.tiles(p.rows)](
        s_after, z_each, z_after, levels, s_bar, z_bar, s_first, z_first, **call.query, **call.wq,
        **rows, low=low, **call.groups, rows=p.rows, first=first, end=p.queries, count=count,
        D=call.sizes["D"], BLOCK_D=call.sizes["BLOCK_D"], CHUNK=call.chunk, **call.tile,
    )  # fmt: skip
    shared = {**inputs, **keys, "groups": p.groups, "queries": p.queries}
    back.causal_key_kernel[call.key_blocks(tokens)](
        **shared, c=levels, s_bar=s_after, z_bar=z_after
    )
    if tokens > 1:
        back.repair_key_kernel[call.key_blocks(tokens)](**shared, **REPAIR)
    return s_first, z_first
