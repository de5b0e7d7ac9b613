"""Correctness, before anything is timed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from subquad.arena.speed.cases import DECODE, TRAINING, Case, Sizes, setting
from subquad.arena.speed.contenders import Contender, Decoding

__all__ = ["BOUND", "Check", "bound", "check"]

BOUND = 1e-4
"""Largest relative error of float32 outputs and gradients; derived in the package's docstring."""
STEPS = 4
"""Tokens at the end that the check of a decode step makes one by one."""


def bound(dtype: torch.dtype) -> float:
    """Largest relative error with inputs of a dtype.

    Sums are float32 at least. Half precision rounds the output, and the gradients once more,
    which read the rounded output: two half ulps, eps together.
    """
    half = dtype in (torch.float16, torch.bfloat16)
    return BOUND + (torch.finfo(dtype).eps if half else 0.0)


@dataclass(frozen=True)
class Check:
    """Errors of a contender against its naive computation; no time is shown unless `ok`.

    Args:
        case: what was run: a training step, or a prefill and steps behind it.
        against: the naive computation, for people.
        forward, gradient: relative errors; no gradient is taken of decode steps.
        bound: of both.
        problem: what was raised.
    """

    case: Case
    against: str
    forward: float
    gradient: float = 0.0
    bound: float = BOUND
    problem: str = ""

    @property
    def ok(self) -> bool:
        """Whether both errors are within the bound (NaN is not)."""
        return not self.problem and self.forward <= self.bound and self.gradient <= self.bound

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, which has no NaN."""
        errors = {
            part: value if math.isfinite(value) else None
            for part, value in (("forward", self.forward), ("gradient", self.gradient))
        }
        rest = dataclasses.asdict(self)
        return {**rest.pop("case"), **rest, **errors, "ok": self.ok}


def relative(a: Tensor, b: Tensor) -> float:
    """‖a − b‖ / ‖b‖."""
    size = b.norm()
    return float((a.double() - b).norm() / (size if size > 0 else 1.0))


def gradients(out: Tensor, leaves: Sequence[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    """With respect to q, k and v; zero where a mechanism does not read one of them."""
    return torch.autograd.grad(out, leaves, grad, allow_unused=True, materialize_grads=True)


def check(contender: Contender, sizes: Sizes, case: Case) -> Check:
    """Compares with the naive computation, in the setting of the case.

    A training step: the output with and without a graph, and the gradients. A decode step:
    the output of a prefill and of `STEPS` further tokens one by one.

    Args:
        contender: the case's.
        sizes: the head layout.
        case: its mode, mask, dtype, threads and backend are checked; its length is not read.
    """
    case = case.checked_by.at(contender.check_length)
    inputs = sizes.inputs(case.length, seed=1, dtype=case.dtype)
    run = _steps if case.mode == DECODE else _training
    try:
        with setting(case):
            ours = run(contender, inputs, case)
        theirs = _by_definition(contender, inputs, case)
    except RuntimeError as error:  # a mechanism that raises here has failed its check
        return Check(case, contender.against, math.nan, math.nan, problem=str(error))
    errors = {part: [relative(a, b) for a, b in zip(ours[part], theirs[part], strict=True)]
              for part in ours}  # fmt: skip
    worst = {part: max(e) if all(map(math.isfinite, e)) else math.nan for part, e in errors.items()}
    return Check(
        case,
        contender.against,
        worst["forward"],
        worst.get("gradient", 0.0),
        bound(inputs[0].dtype),
    )


Parts = dict[str, list[Tensor]]


def _leaves(inputs: Sequence[Tensor]) -> list[Tensor]:
    return [t.detach().requires_grad_() for t in inputs]


def _training(contender: Contender, inputs: list[Tensor], case: Case) -> Parts:
    *qkv, grad = inputs
    leaves = _leaves(qkv)
    out = contender.call(*contender.prepare(*leaves), case.causal)
    found = gradients(out, leaves, grad)
    with torch.no_grad():
        alone = contender.call(*contender.prepare(*qkv), case.causal)
    return {"forward": [out.detach(), alone], "gradient": list(found)}


def _steps(contender: Contender, inputs: list[Tensor], case: Case) -> Parts:
    decoding = contender.decoding
    assert isinstance(decoding, Decoding)
    start = case.length - STEPS
    with torch.no_grad():
        q, k, v = (t[:, :, :start] for t in inputs[:3])
        out, state = decoding.prefill(q, k, v)
        outs = [out]
        for token in range(start, case.length):
            q, k, v = (t[:, :, token : token + 1] for t in inputs[:3])
            out, state = decoding.step(q, k, v, state, True)
            outs.append(out)
    # apart: four rows among hundreds would hide in one norm
    return {"forward": [outs[0], torch.cat(outs[1:], 2)]}


def _by_definition(contender: Contender, inputs: list[Tensor], case: Case) -> Parts:
    *qkv, grad = (t.double() for t in inputs)
    naive: Callable[..., Tensor] = contender.naive
    if case.mode == TRAINING:
        leaves = _leaves(qkv)
        out = naive(*leaves, case.causal)
        found = gradients(out, leaves, grad)
        return {"forward": [out.detach()] * 2, "gradient": list(found)}
    with torch.no_grad():
        out = naive(*qkv, True)
    return {"forward": [out[:, :, :-STEPS], out[:, :, -STEPS:]]}
