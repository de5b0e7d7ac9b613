"""Decoding of non-autoregressive models, as a function."""

from __future__ import annotations

from subquad.models.nat import mask_predict

__all__ = ["mask_predict"]
