"""Swap attention inside a trained model, measure what it costs, and put it back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from subquad.convert.calibrate import Budget, Calibration
from subquad.convert.compare import (
    AttentionPicture,
    Comparison,
    LayerComparison,
    LengthCost,
    OutputComparison,
    PartComparison,
    compare,
)
from subquad.convert.coverage import Architecture, coverage
from subquad.convert.recall import CopyTest, Recall, recall_layers
from subquad.convert.saving import announce
from subquad.convert.sdpa import swap_sdpa
from subquad.convert.suggest import Suggestion, suggest
from subquad.convert.swap import ConversionReport, ConvertedLayer, convert, revert

if TYPE_CHECKING:
    from subquad.convert.cache import StateCache

__all__ = [
    "Architecture",
    "AttentionPicture",
    "Budget",
    "Calibration",
    "Comparison",
    "ConversionReport",
    "ConvertedLayer",
    "CopyTest",
    "LayerComparison",
    "LengthCost",
    "OutputComparison",
    "PartComparison",
    "Recall",
    "StateCache",
    "Suggestion",
    "compare",
    "convert",
    "coverage",
    "recall_layers",
    "revert",
    "suggest",
    "swap_sdpa",
]


announce()  # transformers learns to load converted models, once it is imported


def __getattr__(name: str) -> Any:
    if name == "StateCache":  # a subclass of transformers' cache: that is imported when asked for
        from subquad.convert.swap import need_transformers

        need_transformers()
        from subquad.convert.cache import StateCache

        return StateCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
