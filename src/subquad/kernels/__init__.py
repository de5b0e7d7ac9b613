"""Kernels of the linear engine: algorithms in chunks, operators, choice of backend."""

from subquad.kernels.dispatch import BACKENDS, Choice, explain

__all__ = ["BACKENDS", "Choice", "explain"]
