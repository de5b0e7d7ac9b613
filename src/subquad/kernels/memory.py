"""The memory behind tensors."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["has_data", "large_pages", "watched"]

LARGE = 1 << 22
"""Bytes from which new memory is asked for in large pages."""

PAGE = 2 << 20


def has_data(tensor: Tensor) -> bool:
    """Whether the numbers behind a tensor may be read past PyTorch's operators.

    Not where there are none, or others than they seem (fake tensors, classes that wrap others,
    lazy negation), nor where somebody watches the operators: a transform, a mode, a trace, forward
    differentiation.
    """
    if (
        isinstance(tensor, FakeTensor)
        or peek_interpreter_stack() is not None
        or watched()
        or forward_ad._current_level >= 0
        or tensor.is_neg()
    ):
        return False
    return not is_traceable_wrapper_subclass(tensor)


def watched() -> bool:
    """Whether a mode or a trace wants to see the operators that run."""
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._get_tracing_state() is not None


def large_pages(*tensors: Tensor) -> None:
    """Tells the system that memory which was just allocated will be written from end to end.

    In pages of 2 MiB it has to give the memory out, and to look it up, five hundred times less
    often. Of large tensors on a CPU; where the system cannot, nothing happens.
    """
    advise = _advise()
    if advise is None:
        return
    for tensor in tensors:
        if tensor.nbytes >= LARGE and tensor.device.type == "cpu" and has_data(tensor):
            start = -(-tensor.data_ptr() // PAGE) * PAGE
            end = (tensor.data_ptr() + tensor.nbytes) // PAGE * PAGE
            if start < end:
                advise(start, end - start, mmap.MADV_HUGEPAGE)


@functools.cache
def _advise() -> Callable[[int, int, int], int] | None:
    """The system's `madvise`."""
    if sys.platform != "linux":
        return None
    function = getattr(ctypes.CDLL(None), "madvise", None)
    if function is None or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    found: Callable[[int, int, int], int] = function
    return found
