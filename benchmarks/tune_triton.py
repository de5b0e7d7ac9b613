"""Tunes the Triton kernels for common heads and writes the block sizes: `tune_triton.py FILE`.

Every candidate is compiled first, one process each, so that tuning itself only measures. Triton
keeps the choices on disk; the file is for people.
"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from triton.runtime.errors import OutOfResources, PTXASError

from subquad.kernels.linear import LinearMap, Problem
from subquad.kernels.triton import backward_kernels, engine, forward_kernels
from subquad.kernels.triton.tuning import CANDIDATES

SHAPES = [(dtype, 64, M) for dtype in ("bfloat16", "float32") for M in (64, 128, 256)]
KERNELS = {
    name: kernel
    for module in (forward_kernels, backward_kernels)
    for name, kernel in vars(module).items()
    if name.endswith("_kernel") and hasattr(kernel, "configs")
}


def call(dtype: str, D: int, M: int, length: int) -> None:
    """A training step's forward and backward, bidirectional and causal."""
    heads = 8
    x = torch.randn(1, heads, length, D, device="cuda", dtype=getattr(torch, dtype))
    w = torch.randn(heads, D, M, device="cuda") * D**-0.25
    for absorb in (length, 0):
        maps = (LinearMap(w, None, "exp", 1, torch.float32) for _ in range(2))
        p = Problem(x, x, x, *maps, None, None, None, 0.5 * D**-0.5, 0.0, absorb)
        result = engine.forward(p, p.chunk(True))
        engine.backward(p, result, x, None, None, None, False, p.chunk(True))
    torch.cuda.synchronize()


def compile_candidate(shape: tuple[str, int, int], index: int) -> None:
    """One candidate of each kernel, into Triton's cache; too large ones fail here and later."""
    for kernel in KERNELS.values():
        kernel.configs = [kernel.configs[min(index, len(kernel.configs) - 1)]]
    try:
        call(*shape, 256)
    except (OutOfResources, PTXASError) as error:  # too large: the tuner leaves it out too
        print(f"{shape}, candidate {index}: {error}", file=sys.stderr)


def main(file: Path) -> None:
    """Compiles, tunes, writes."""
    started = time.monotonic()
    count = max(map(len, CANDIDATES.values()))
    workers = min(12, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for shape in SHAPES:
            for index in range(count):
                pool.submit(compile_candidate, shape, index)
    compiled = time.monotonic()
    for shape in SHAPES:
        call(*shape, 16384)
    chosen = {
        name: {str(key): str(config) for key, config in kernel.cache.items()}
        for name, kernel in KERNELS.items()
    }
    seconds = {"compile": compiled - started, "tune": time.monotonic() - compiled}
    where = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    file.write_text(json.dumps({**where, "seconds": seconds, "blocks": chosen}, indent=1) + "\n")
    print(f"compiled in {seconds['compile']:.0f} s, tuned in {seconds['tune']:.0f} s: {file}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
