"""The Triton backend: its cases in a process of their own, and that its kernels compile.

Triton decides when it is imported whether kernels run as Python (``TRITON_INTERPRET=1``), so
that `triton_cases.py` runs in a child, and nothing else here is affected.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from subquad.kernels import triton as backend

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed here"
)


def child(*arguments, interpret, **more):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON")}
    environment |= {"OMP_NUM_THREADS": "1", **more}
    if interpret:
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    return done.stdout


def cases(marks, *, interpret):
    arguments = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks)
    return child(*arguments, str(HERE / "triton_cases.py"), interpret=interpret)


@needs_triton
def test_under_the_interpreter():
    assert " passed" in cases("not slow", interpret=True)


@needs_triton
@pytest.mark.slow
def test_the_wider_matrix_under_the_interpreter():
    assert " passed" in cases("slow", interpret=True)


@needs_triton
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("marks", ["not slow", "slow"])
def test_compiled_on_a_gpu(marks):
    assert " passed" in cases(marks, interpret=False)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_kernels_compile_to_machine_code(dtype, architecture, tmp_path):
    """Triton's compiler and ptxas need no GPU: each kernel with its least blocks, all arguments
    present, and all absent; within the 99 KiB of shared memory that the smallest GPUs have.
    """
    script = str(HERE / "triton_compile.py")
    arguments = (script, dtype, str(architecture), "64", "128", "64")
    found = child(*arguments, interpret=False, TRITON_CACHE_DIR=str(tmp_path))
    lines = dict(line.rsplit(" ", 1) for line in found.splitlines())
    assert len(lines) == 14 * 2
    assert max(map(int, lines.values())) <= 99 * 1024


# ---- what is refused -----------------------------------------------------------------------


F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


def test_refused_without_a_gpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert backend.refusal("cpu", F32, F32, "exp") == "it is for NVIDIA GPUs, this is cpu"


@needs_triton
@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ((F64, F64, "exp"), "computes in float32, the dtype is torch.float64"),
        ((BF16, F32, "exp"), "values of the queries' dtype, torch.bfloat16, not torch.float32"),
        ((F32, F32, "relu"), "its maps are exp, this one is relu"),
        ((F32, F32, "function"), "its maps are exp, this one is function"),
        ((F32, F32, "trig", True), "its maps are exp, this one is trig"),
        ((F32, F32, "exp"), None),
        ((BF16, BF16, "exp"), None),
    ],
)
def test_refused(call, reason, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = backend.refusal("cpu", *call)
    assert found is None if reason is None else reason in found


def test_the_kernels_are_imported_at_the_first_call():
    """torch may import triton; ours import it only when they run, so that it may be missing."""
    code = (
        "import sys, subquad.kernels.triton as t; assert t.__name__ + '.engine' not in sys.modules"
    )
    child("-c", code, interpret=False)
