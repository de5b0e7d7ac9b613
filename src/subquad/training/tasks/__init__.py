"""Tasks: what can be trained. One file each; `base` says what one has to provide."""

from __future__ import annotations

import importlib
from typing import Any

from subquad.errors import UnknownNameError, nearest

__all__ = ["TASKS", "task_of"]

TASKS = {
    "translation": "subquad.training.tasks.translation",
    "nat": "subquad.training.tasks.translation:PARALLEL",
    "lm": "subquad.training.tasks.lm",
    "classify": "subquad.training.tasks.classify",
    "tag": "subquad.training.tasks.tag",
    "qa": "subquad.training.tasks.qa",
    "summarise": "subquad.training.tasks.summarise",
    "asr": "subquad.training.tasks.asr",
}
"""Modules by the names of their tasks; each has its `Task` as ``TASK``, or behind a colon."""


def task_of(name: str) -> Any:
    """The task of this name.

    Raises:
        UnknownNameError: there is none; the nearest is suggested.
    """
    if name not in TASKS:
        raise UnknownNameError(f"task {name!r} is none of {', '.join(TASKS)}{nearest(name, TASKS)}")
    module, _, attribute = TASKS[name].partition(":")
    return getattr(importlib.import_module(module), attribute or "TASK")
