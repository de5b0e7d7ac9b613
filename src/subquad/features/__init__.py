"""Random draws and feature maps: what a kernel mechanism is made of. Imports torch alone."""

from __future__ import annotations

from subquad.features.draws import chi_quantile, draw_projection
from subquad.features.gauges import GAUGES, Gauge, Moments, make_gauge, moments
from subquad.features.landmarks import (
    kmeans_anchors,
    landmark_features,
    log_landmark_features,
    sample_anchors,
)
from subquad.features.spectral import SpectralMap, spectral

__all__ = [
    "GAUGES",
    "Gauge",
    "Moments",
    "SpectralMap",
    "chi_quantile",
    "draw_projection",
    "kmeans_anchors",
    "landmark_features",
    "log_landmark_features",
    "make_gauge",
    "moments",
    "sample_anchors",
    "spectral",
]
