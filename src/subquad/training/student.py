"""Who learns what: a stage's parameters, its objective and its learning rate."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from subquad.convert import routing
from subquad.convert.paths import exactly
from subquad.errors import OptionError
from subquad.training.distill import Distillation, call, frozen_copy
from subquad.training.texts import Example
from subquad.training.trainer import Objective
from subquad.training.transfer import Transfer, mechanism_parameters

__all__ = ["Student", "student"]

_RATES = {"lora": (1e-3, 1e-3), "full": (2e-4, 1e-4)}
"""Learning rate at an untrained loss of 1, and its upper limit; see `_rate`."""

_TRANSFER_RATE = 5e-2
"""Of mechanisms' own parameters, which start far from where they go."""


@dataclass(frozen=True, eq=False)
class Student:
    """A stage's objective and what it trains."""

    model: nn.Module
    objective: Objective
    trained: dict[str, nn.Parameter]
    groups: list[dict[str, Any]]


@contextlib.contextmanager
def student(
    model: nn.Module,
    stage: str,
    rate: float | None,
    rank: int,
    where: Callable[[str, nn.Parameter], bool] | None,
    loss: str,
    seed: int,
    sample: Example,
) -> Iterator[Student]:
    """Makes the stage's parameters trainable; low-rank updates are merged, or on errors dropped."""
    own = {n: p for n, p in mechanism_parameters(model).items() if where is None or where(n, p)}
    model.requires_grad_(False)
    if stage == "transfer":
        objective: Objective = Transfer(model)
        _require(own)
        groups = [{"params": list(own.values()), "lr": rate or _TRANSFER_RATE}]
        yield Student(model, objective, own, groups)
        return
    with contextlib.ExitStack() as scope:
        teacher = None
        if stage == "lora":
            adapted = scope.enter_context(_low_rank(model, rank, where, seed))
            weights = {n: p for n, p in adapted.named_parameters() if ".lora_" in n}
            if loss != "task":
                teacher = partial(_unadapted, adapted, model)
        else:
            weights = _weights(model, where)
            if loss != "task":
                teacher = partial(call, frozen_copy(model))
        trained = {**weights, **own}
        _require(trained)
        objective = Distillation(model, teacher, loss)
        rate = rate or _rate(stage, objective, sample)
        groups = [{"params": list(weights.values()), "lr": rate}]
        if own:
            groups.append({"params": list(own.values()), "lr": 10.0 * rate})
        yield Student(model, objective, trained, groups)


@torch.no_grad()
def _rate(stage: str, objective: Distillation, sample: Example) -> float:
    """A learning rate whose first steps are shorter than the way to go.

    A step of Adam moves every weight by the rate, and hidden states by a multiple of it; their
    distance to the exact ones is √loss. (KL is half a squared distance to first order, and by
    rounding a little below zero where both agree.)
    """
    at_one, most = _RATES[stage]
    loss = 1.0 if objective.teacher is None else max(0.0, float(objective(sample)))
    return max(1e-3 * most, min(most, at_one * math.sqrt(loss)))


def _require(parameters: Mapping[str, nn.Parameter]) -> None:
    if not parameters:
        raise OptionError("where= leaves no parameter to train")
    for parameter in parameters.values():
        parameter.requires_grad_(True)


def _weights(
    model: nn.Module, where: Callable[[str, nn.Parameter], bool] | None
) -> dict[str, nn.Parameter]:
    """The model's own weights, without embeddings and mechanisms."""
    left_out = {id(p) for p in mechanism_parameters(model).values()}
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            left_out |= {id(p) for p in module.parameters()}
    found = {
        name: p
        for name, p in model.named_parameters()
        if id(p) not in left_out and p.is_floating_point() and (where is None or where(name, p))
    }
    if not found:
        raise OptionError("where= leaves no weight to train")
    return found


def _linear_layers(
    model: nn.Module, where: Callable[[str, nn.Parameter], bool] | None
) -> list[str]:
    """Names of the linear layers that low-rank updates go to: no heads, no mechanism's own."""
    from transformers.pytorch_utils import Conv1D

    own: Any = model
    head = own.get_output_embeddings() if hasattr(own, "get_output_embeddings") else None
    found = []
    for name, module in model.named_modules():
        inner = f".{routing.SLOT}." in f".{name}."
        if isinstance(module, nn.Linear | Conv1D) and module is not head and not inner:
            weight: Any = module.weight
            if where is None or where(f"{name}.weight", weight):
                found.append(name)
    if not found:
        raise OptionError("method='lora' finds no linear layer to update; use method='full'")
    return found


@contextlib.contextmanager
def _low_rank(
    model: nn.Module,
    rank: int,
    where: Callable[[str, nn.Parameter], bool] | None,
    seed: int,
) -> Iterator[Any]:
    """The model with peft's updates in it; merged at the end, taken out again on errors."""
    try:
        from peft import LoraConfig, LoraModel
    except ImportError as error:
        raise ImportError("method='lora' needs pip install 'subquad[train]'") from error
    names = _linear_layers(model, where)
    transposed = all(type(model.get_submodule(name)).__name__ == "Conv1D" for name in names)
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=names,
        fan_in_fan_out=transposed,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        adapted: Any = LoraModel(model, {"default": config}, "default")
    try:
        yield adapted
    except BaseException:
        adapted.unload()
        raise
    adapted.merge_and_unload()


def _unadapted(adapted: Any, model: nn.Module, inputs: dict[str, Any]) -> Any:
    adapted.disable_adapter_layers()
    try:
        with exactly(model):
            return call(model, inputs)
    finally:
        adapted.enable_adapter_layers()
