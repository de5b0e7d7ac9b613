"""A converted model's two paths: for a while, its own exact attention in place of mechanisms."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from torch import nn

from subquad.convert import routing
from subquad.convert.swap import configs

__all__ = ["exactly", "probed"]


@contextlib.contextmanager
def exactly(model: nn.Module) -> Iterator[None]:
    """Within, the model runs with the exact attention that it had before."""
    with _named(model, "{}"):
        yield


@contextlib.contextmanager
def probed(model: nn.Module, watch: Callable[..., None]) -> Iterator[None]:
    """Within, the model runs exactly and shows every converted layer's call to `watch`.

    `watch` is called as `subquad.convert.routing.probing` says.
    """
    with _named(model, "subquad_{}_probe"), routing.probing(watch):
        yield


@contextlib.contextmanager
def _named(model: nn.Module, pattern: str) -> Iterator[None]:
    """Within, all converted configs use the original implementation's name in `pattern`."""
    before = []
    for config in configs(model):
        original = routing.original_name(config._attn_implementation)
        if original is not None:
            before.append((config, config._attn_implementation))
            config._attn_implementation_internal = pattern.format(original)
    try:
        yield
    finally:
        for config, name in before:
            config._attn_implementation_internal = name
