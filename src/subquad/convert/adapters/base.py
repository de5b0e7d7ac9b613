"""`Adapter`: what every adapter supplies."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from torch import nn

from subquad.convert import routing
from subquad.options import Config

__all__ = ["Adapter", "dropout_of"]


class Adapter:
    """Reaches the mechanism of attention modules that do not route; stateless.

    While installed, an attribute of the instance shadows one method of the module's class, so
    that parameters, submodules and ``state_dict`` keys stay as they are and removing it leaves
    no trace. The shadow runs the class's own method whenever the exact path is asked for.
    """

    method: ClassVar[str] = "forward"
    """The method that is shadowed."""

    interface: ClassVar[bool] = True
    """Masks come from transformers' mask interface, by the implementation's name in the config
    around the module, and no code of the module reads that name."""

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs in place of `method`; calls `subquad.convert.routing.attend`."""
        raise NotImplementedError

    def sizes(self, module: Any) -> tuple[int, int, int] | None:
        """(head_dim, heads, kv_heads) where attributes of usual names do not tell."""
        return None

    def use(self, name: str, module: Any, parent: nn.Module | None) -> str | None:
        """``"encoder"``, ``"causal"`` or ``"cross"``, where names and flags do not tell."""
        return None

    def check(self, name: str, module: Any, config: Config) -> None:
        """Raises UnsupportedError for a module that cannot be converted as it is."""

    def install(self, module: nn.Module) -> None:
        """Puts the shadow in place."""
        module.__dict__[self.method] = partial(_run, self, module)

    def remove(self, module: nn.Module) -> None:
        """Takes it away again."""
        del module.__dict__[self.method]


def _run(adapter: Adapter, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if routing.is_exact(module):
        return getattr(type(module), adapter.method)(module, *args, **kwargs)
    return adapter.forward(module, *args, **kwargs)


def dropout_of(module: Any, name: str = "dropout") -> float:
    """Attention dropout that the module would apply now."""
    return float(getattr(module, name).p) if module.training else 0.0
