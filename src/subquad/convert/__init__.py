"""Swap attention inside a trained model, measure what it costs, and put it back."""

from subquad.convert.compare import Comparison, LayerComparison, compare
from subquad.convert.swap import ConversionReport, ConvertedLayer, convert, revert

__all__ = [
    "Comparison",
    "ConversionReport",
    "ConvertedLayer",
    "LayerComparison",
    "compare",
    "convert",
    "revert",
]
