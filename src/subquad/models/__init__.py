"""Whole Transformers with any attention, as transformers' models.

    Seq2SeqTransformer          an encoder, and a decoder that reads it
    CausalTransformer           a language model
    NonAutoregressiveTransformer    a decoder that writes all tokens at once
    EncoderTransformer          an encoder alone, and with heads: EncoderForSequenceClassification,
                                …TokenClassification, …MaskedLM, …QuestionAnswering

with their configs, and `StackCache`, what they generate from. They train with transformers'
`Trainer`, decode with its `generate`, and save with `save_pretrained`; after
``import subquad.models`` the Auto classes know them. Needs ``pip install 'subquad[hf]'``.
"""

from __future__ import annotations

import importlib
from typing import Any

_PLACES = {
    "CausalTransformer": "causal",
    "CausalTransformerConfig": "configuration",
    "EncoderForMaskedLM": "encoder",
    "EncoderForQuestionAnswering": "encoder",
    "EncoderForSequenceClassification": "encoder",
    "EncoderForTokenClassification": "encoder",
    "EncoderOutput": "seq2seq",
    "EncoderTransformer": "encoder",
    "EncoderTransformerConfig": "configuration",
    "NonAutoregressiveTransformer": "nat",
    "NonAutoregressiveTransformerConfig": "nat",
    "Seq2SeqTransformer": "seq2seq",
    "Seq2SeqTransformerConfig": "configuration",
    "StackCache": "cache",
    "TransformerConfig": "configuration",
}

_AUTO = {
    "AutoModelForSeq2SeqLM": ("Seq2SeqTransformer", "NonAutoregressiveTransformer"),
    "AutoModelForCausalLM": ("CausalTransformer",),
    "AutoModel": ("EncoderTransformer",),
    "AutoModelForSequenceClassification": ("EncoderForSequenceClassification",),
    "AutoModelForTokenClassification": ("EncoderForTokenClassification",),
    "AutoModelForMaskedLM": ("EncoderForMaskedLM",),
    "AutoModelForQuestionAnswering": ("EncoderForQuestionAnswering",),
}
"""Which Auto class makes which models."""

__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    register()
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return __all__


def register() -> None:
    """Makes transformers' Auto classes know the models; asking for any of them does so too."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError("models need pip install 'subquad[hf]'") from error
    registered = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    for auto, models in _AUTO.items():
        for name in models:
            place = importlib.import_module(f"{__name__}.{_PLACES[name]}")
            model = getattr(place, name)
            config = model.config_class
            if config.model_type not in registered:
                transformers.AutoConfig.register(config.model_type, config)
            getattr(transformers, auto).register(config, model, exist_ok=True)
