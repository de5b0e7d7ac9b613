"""Function transforms: what runs where an engine's own gradients do not reach.

The engines have a forward and a backward pass of their own, which `torch.func` (grad, vmap, jvp,
hessian) and forward differentiation cannot look into. There a call runs by differentiable
operations alone, and a gradient that shall have a gradient itself is taken from them too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack, peek_interpreter_stack
from torch.autograd import forward_ad

from subquad.kernels.precision import own_precision

__all__ = [
    "again",
    "differentiated",
    "forward_mode",
    "mapped",
    "recomputes",
    "refuse_graph",
    "transformed",
]


def transformed() -> bool:
    """Whether a call runs inside of a transform of `torch.func` or forward differentiation."""
    if torch.compiler.is_compiling():
        return False
    return peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def mapped() -> bool:
    """Whether `torch.vmap` hides numbers: no shape or branch may depend on them."""
    if torch.compiler.is_compiling():
        return False
    stack = get_interpreter_stack() or []
    return any(one.key() == TransformType.Vmap for one in stack)


def forward_mode() -> bool:
    """Whether tangents may be on their way through a call."""
    if torch.compiler.is_compiling():
        return False
    return forward_ad._current_level >= 0


def recomputes() -> bool:
    """Whether a checkpoint is of use: autograd keeps a graph, and no transform is on its way.

    `torch.func` has no saved-tensor hooks, by which checkpoints compute again.
    """
    return torch.is_grad_enabled() and not transformed()


def differentiated() -> bool:
    """Whether a backward pass is to be differentiated itself, or runs inside of a transform."""
    return torch.is_grad_enabled() or transformed()


def refuse_graph(what: str, reason: str) -> None:
    """Raises RuntimeError in a backward pass whose gradients shall have gradients.

    `once_differentiable` is not enough: such a gradient counts as a constant where nothing above
    it has a graph, and its error is left out by ``torch.autograd.grad(…, inputs)``.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(f"the gradient of {what} has no gradient (create_graph=True): {reason}")


def again(
    function: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Any],
    needs: Sequence[bool],
    bars: Sequence[Tensor | None],
    parameters: Sequence[Tensor] = (),
) -> tuple[Tensor | None, ...]:
    """Gradients of a function that have gradients themselves.

    Args:
        function: of all inputs; its first results are what `bars` belong to.
        inputs: its arguments, with the graph that they are part of.
        needs: for each input whether its gradient is wanted.
        bars: gradients of the results, None for zero.
        parameters: tensors that it reads beside its inputs.

    Returns:
        A gradient or None for every input, then for every parameter.
    """
    # backward() may run inside autocast
    with torch.enable_grad(), own_precision(next(t for t in inputs if t is not None)):
        # One tensor may be several inputs: each gets a name of its own.
        own = [t.view_as(t) if need else t for t, need in zip(inputs, needs, strict=True)]
        results = function(*own)
        pairs = [
            (result, bar)
            for result, bar in zip(results, bars, strict=False)
            if bar is not None and result.requires_grad
        ]
        wanted = [t for t, need in zip(own, needs, strict=True) if need]
        wanted += [t for t in parameters if t.requires_grad]
        if not (pairs and wanted):
            return (None,) * (len(inputs) + len(parameters))
        found = iter(
            torch.autograd.grad(
                [result for result, _ in pairs], wanted, [bar for _, bar in pairs],
                create_graph=True, allow_unused=True,
            )
        )  # fmt: skip
    needed = [*needs, *(t.requires_grad for t in parameters)]
    return tuple(next(found) if need else None for need in needed)
