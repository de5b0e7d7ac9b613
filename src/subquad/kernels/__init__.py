"""Kernels of the linear and the block engine: algorithms, operators, choice of backend."""

from subquad.kernels.dispatch import (
    BACKENDS,
    BLOCK_BACKENDS,
    Choice,
    explain,
    explain_block,
    forget,
    use,
)
from subquad.kernels.native.library import build

__all__ = [
    "BACKENDS",
    "BLOCK_BACKENDS",
    "Choice",
    "build",
    "explain",
    "explain_block",
    "forget",
    "use",
]
