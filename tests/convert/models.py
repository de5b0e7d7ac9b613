"""Tiny random transformers models, one for each kind of attention module, and inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from torch import nn

VOCAB, WIDTH, HEADS = 53, 24, 4

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "intermediate_size": 40,
}
_TOKENS: dict[str, Any] = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
_PAIR: dict[str, Any] = {
    **_TOKENS,
    "vocab_size": VOCAB,
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    "decoder_start_token_id": 2,
}
_IMAGES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "image_size": 20,
    "patch_size": 4,
}


def _gpt2() -> nn.Module:
    config = tf.GPT2Config(
        vocab_size=VOCAB, n_embd=WIDTH, n_layer=3, n_head=HEADS, n_positions=64, **_TOKENS
    )
    return tf.GPT2LMHeadModel(config)


def _t5() -> nn.Module:
    config = tf.T5Config(
        vocab_size=VOCAB,
        d_model=WIDTH,
        d_kv=7,
        num_heads=3,
        num_layers=2,
        d_ff=40,
        decoder_start_token_id=0,
    )
    return tf.T5ForConditionalGeneration(config)


def _whisper() -> nn.Module:
    config = tf.WhisperConfig(
        **_PAIR, num_mel_bins=8, max_source_positions=20, max_target_positions=32
    )
    return tf.WhisperForConditionalGeneration(config)


def _esm() -> nn.Module:
    sizes = {**_SIZES, "num_hidden_layers": 2}
    config = tf.EsmConfig(
        **sizes, pad_token_id=1, mask_token_id=3, position_embedding_type="rotary"
    )
    return tf.EsmModel(config, add_pooling_layer=False)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "bert": lambda: tf.BertModel(tf.BertConfig(**_SIZES), add_pooling_layer=False),
    "gpt2": _gpt2,
    "llama": lambda: tf.LlamaForCausalLM(
        tf.LlamaConfig(**_SIZES, **_TOKENS, num_key_value_heads=2)
    ),
    "bart": lambda: tf.BartForConditionalGeneration(
        tf.BartConfig(**_PAIR, forced_eos_token_id=None)
    ),
    "marian": lambda: tf.MarianMTModel(tf.MarianConfig(**_PAIR, forced_eos_token_id=None)),
    "t5": _t5,
    "vit": lambda: tf.ViTModel(
        tf.ViTConfig(**_IMAGES, intermediate_size=40), add_pooling_layer=False
    ),
    "dinov2": lambda: tf.Dinov2Model(tf.Dinov2Config(**_IMAGES)),
    "whisper": _whisper,
    "esm": _esm,
}
TEXT = ("bert", "gpt2", "llama", "esm")
PAIRS = ("bart", "marian", "t5")


def tiny(kind: str, implementation: str = "sdpa", spread: float = 0.15) -> nn.Module:
    """A model in eval mode whose attention is far from uniform."""
    torch.manual_seed(0)
    model = MODELS[kind]().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, spread)
    model.set_attn_implementation(implementation)
    return model


def inputs(kind: str, padding: str = "right", length: int = 13) -> dict[str, torch.Tensor]:
    """Two rows; the first has five padded positions, left or right."""
    torch.manual_seed(1)
    if kind in ("vit", "dinov2"):
        return {"pixel_values": torch.randn(2, 3, 20, 20)}
    ids = torch.randint(5, VOCAB, (2, length))
    mask = torch.ones_like(ids)
    mask[0, : 5 if padding == "left" else 0] = 0
    if padding == "right":
        mask[0, -5:] = 0
    if kind == "whisper":
        return {"input_features": torch.randn(2, 8, 40), "decoder_input_ids": ids}
    found = {"input_ids": ids, "attention_mask": mask}
    if kind in PAIRS:
        found["decoder_input_ids"] = torch.randint(5, VOCAB, (2, 7))
    return found


def hidden(model: nn.Module, **kwargs: Any) -> torch.Tensor:
    """Last hidden state or logits, without gradients."""
    with torch.no_grad():
        output = model(**kwargs)
    return getattr(output, "last_hidden_state", None) if "logits" not in output else output.logits
