"""Compiles every Triton kernel to machine code, with no GPU: `DTYPE ARCHITECTURE D M V`.

Prints for each launch of a call "kernel variant: shared memory in bytes". The engine runs with
launchers that record their arguments; the compiler gets the types that Triton would infer.
"""

import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from subquad.kernels.linear import LinearMap, Problem
from subquad.kernels.triton import backward_kernels, engine, forward_kernels

POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
POINTERS[torch.uint8] = "*u8"


class Recorder:
    """Stands for a kernel; keeps the arguments of launches."""

    def __init__(self, name, kernel, calls):
        self.name, self.kernel, self.calls = name, kernel, calls

    def __getitem__(self, grid):
        def launch(*arguments, **named):
            names = self.jitted.arg_names
            self.calls[self.name] = self, {**dict(zip(names, arguments, strict=False)), **named}

        return launch

    @property
    def jitted(self):
        return getattr(self.kernel, "fn", self.kernel) if self.tuned else self.kernel

    @property
    def tuned(self):
        return hasattr(self.kernel, "configs")


def signature(jitted, given):
    """Types, constants and attributes as Triton's launcher specialises them."""
    types, constants, attributes = {}, {}, {}
    for i, p in enumerate(jitted.params):
        value, free = given[p.name], p.do_not_specialize
        aligned = isinstance(value, torch.Tensor) or (
            isinstance(value, int) and not free and value % 16 == 0
        )
        if p.is_constexpr or value is None or (isinstance(value, int) and value == 1 and not free):
            types[p.name], constants[p.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            types[p.name] = POINTERS[value.dtype]
        else:
            types[p.name] = "i32" if isinstance(value, int) else "fp32"
        if aligned and types[p.name] != "constexpr":
            attributes[(i,)] = [["tt.divisibility", 16]]
    return types, constants, attributes


def launches(dtype, D, M, V, full, calls):
    """A causal, a bidirectional and a decoding call, forward and backward, with all options."""
    kv, groups = 2, 3 if full else 1
    w, b = torch.zeros(kv, D, M), torch.zeros(kv, M) if full else None
    state = tuple(torch.zeros(kv, *s) for s in ((M, V), (M, 1), (1, M), (1, 1))) if full else None
    for length, absorb in ((256, 0), (256, 256), (8, 0)):
        q = torch.zeros(1, kv * groups, length, D, dtype=dtype)
        k, v = (torch.zeros(1, kv, length, n, dtype=dtype) for n in (D, V))
        bias = torch.zeros(1, kv, length) if full else None
        mask = torch.ones(1, length, dtype=torch.bool) if full else None
        maps = (LinearMap(w, b, "exp", 1, torch.float32) for _ in range(2))
        p = Problem(q, k, v, *maps, bias, mask, state, 0.5 if full else 0.0, 0.0, absorb)
        r = engine.forward(p, p.chunk(True))
        bars = (r.den, *r.state[:2]) if full else (None, None, None)
        engine.backward(p, r, r.out, *bars, full, p.chunk(True))


def main(dtype, architecture, *sizes):
    dtype = getattr(torch, dtype)
    target = GPUTarget("cuda", int(architecture), 32)
    engine.Call.split = lambda self, tokens, lanes: (2, triton.cdiv(tokens, 2))
    calls = {}
    for module in (forward_kernels, backward_kernels):
        for name, kernel in list(vars(module).items()):
            if name.endswith("_kernel"):
                setattr(module, name, Recorder(name, kernel, calls))
    for full in (False, True):
        calls.clear()
        launches(dtype, *map(int, sizes), full, calls)
        for name, (recorder, given) in calls.items():
            options = {"num_warps": 4, "num_stages": given.pop("num_stages", 3)}
            options["enable_fp_fusion"] = given.pop("enable_fp_fusion")
            if recorder.tuned:
                config = recorder.kernel.configs[-1]
                options |= {"num_warps": config.num_warps, "num_stages": config.num_stages}
                given = {**given, **config.kwargs}
            jitted = recorder.jitted
            assert set(given) == set(jitted.arg_names), set(given) ^ set(jitted.arg_names)
            source = ASTSource(jitted, *signature(jitted, given))
            found = triton.compile(source, target=target, options=options)
            assert found.asm["cubin"]
            print(name, "full:" if full else "bare:", found.metadata.shared, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
