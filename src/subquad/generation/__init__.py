"""Decoding: texts in, texts out, with any model and any way to search.

    Translator      beams, greedy or sampling, batched by tokens, in the order of the texts
    transcribe      the same for sound
    align           which source token each target token looks at
    mask_predict    a non-autoregressive model's parallel decoding
    distil          a teacher's outputs as training data
    LogitsNoise, TemperatureAnneal, WordDropout     noise at decoding, by seed

Needs ``pip install 'subquad[hf]'``.
"""

from __future__ import annotations

import importlib
from typing import Any

_PLACES = {
    "Alignment": "alignment",
    "Distilled": "distilling",
    "Hypothesis": "translator",
    "LogitsNoise": "noise",
    "Sampling": "translator",
    "TemperatureAnneal": "noise",
    "Translator": "translator",
    "WordDropout": "noise",
    "align": "alignment",
    "distil": "distilling",
    "mask_predict": "parallel",
    "transcribe": "transcribing",
}

__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import transformers  # noqa: F401  # what is missing is said here, not deep inside
    except ImportError as error:
        raise ImportError("decoding needs pip install 'subquad[hf]'") from error
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
