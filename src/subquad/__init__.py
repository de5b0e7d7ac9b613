"""Sub-quadratic attention for PyTorch: swap it in, measure what it costs, train it, stream it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from subquad.attention.base import Mechanism, State
from subquad.attention.functional import attention
from subquad.attention.masks import Mask
from subquad.attention.multihead import MultiheadAttention
from subquad.attention.partial import Partial, merge
from subquad.convert import compare, convert, revert
from subquad.errors import (
    CalibrationError,
    DeviceError,
    DtypeError,
    OptionError,
    ShapeError,
    SubquadError,
    UnknownNameError,
    UnsupportedError,
)
from subquad.registry import build, describe, mechanisms

if TYPE_CHECKING:
    from subquad import features, kernels
    from subquad.attention.exact.additive import AdditiveConfig
    from subquad.attention.exact.softmax import SoftmaxConfig
    from subquad.attention.kernel.gaussian import GaussianConfig
    from subquad.attention.kernel.performer import PerformerConfig
    from subquad.attention.sparse.local import LocalConfig

__version__ = "0.1.0"

__all__ = [
    "AdditiveConfig",
    "CalibrationError",
    "DeviceError",
    "DtypeError",
    "GaussianConfig",
    "LocalConfig",
    "Mask",
    "Mechanism",
    "MultiheadAttention",
    "OptionError",
    "Partial",
    "PerformerConfig",
    "ShapeError",
    "SoftmaxConfig",
    "State",
    "SubquadError",
    "UnknownNameError",
    "UnsupportedError",
    "__version__",
    "attention",
    "build",
    "compare",
    "convert",
    "describe",
    "features",
    "kernels",
    "mechanisms",
    "merge",
    "revert",
]

_CONFIGS = {
    "AdditiveConfig": "subquad.attention.exact.additive",
    "GaussianConfig": "subquad.attention.kernel.gaussian",
    "LocalConfig": "subquad.attention.sparse.local",
    "PerformerConfig": "subquad.attention.kernel.performer",
    "SoftmaxConfig": "subquad.attention.exact.softmax",
}
_MODULES = ("features", "kernels")


def __getattr__(name: str) -> Any:
    # Mechanisms and their configs load when first used: the registry stays lazy.
    if name in _MODULES:
        value: Any = importlib.import_module(f"subquad.{name}")
    elif name in _CONFIGS:
        value = getattr(importlib.import_module(_CONFIGS[name]), name)
    else:
        raise AttributeError(f"module 'subquad' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
