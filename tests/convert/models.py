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
# ---- more architectures, for coverage ----------------------------------------------------

_DECODER: dict[str, Any] = {**_SIZES, **_TOKENS, "num_key_value_heads": 2}
_WINDOW: dict[str, Any] = {**_DECODER, "sliding_window": 4}
_BLOCKS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": WIDTH,
    "n_layer": 3,
    "n_head": HEADS,
    "n_positions": 64,
    "n_ctx": 64,
    "rotary_dim": 4,
    **_TOKENS,
}
_FALCON: dict[str, Any] = {k: v for k, v in _SIZES.items() if k != "intermediate_size"}


def _falcon(**options: Any) -> nn.Module:
    return tf.FalconForCausalLM(tf.FalconConfig(**_FALCON, **_TOKENS, **options))


def _speech() -> nn.Module:
    config = tf.Wav2Vec2Config(
        **_SIZES,
        conv_dim=(8, 8),
        conv_stride=(5, 4),
        conv_kernel=(10, 4),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
    )
    return tf.Wav2Vec2Model(config)


def _clip_text() -> nn.Module:
    return tf.CLIPTextModel(tf.CLIPTextConfig(**_SIZES, max_position_embeddings=32))


def _modernbert() -> nn.Module:
    # every third layer reads all keys, the others two on each side
    options = {"global_attn_every_n_layers": 3, "local_attention": 4, "attention_dropout": 0.0}
    special = {"pad_token_id": 1, "cls_token_id": 0, "sep_token_id": 2}
    return tf.ModernBertModel(tf.ModernBertConfig(**_SIZES, **special, **options))


def _gemma3() -> nn.Module:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    config = tf.Gemma3TextConfig(**_WINDOW, head_dim=6, layer_types=kinds)
    return tf.Gemma3ForCausalLM(config)


def _qwen2_window() -> nn.Module:
    config = tf.Qwen2Config(**_WINDOW, use_sliding_window=True, max_window_layers=1)
    return tf.Qwen2ForCausalLM(config)


ROUTING: dict[str, Callable[[], nn.Module]] = {
    "albert": lambda: tf.AlbertModel(
        tf.AlbertConfig(**_SIZES, embedding_size=8), add_pooling_layer=False
    ),
    "biogpt": lambda: tf.BioGptForCausalLM(tf.BioGptConfig(**_SIZES, **_TOKENS)),
    "clip_text": _clip_text,
    "clip_vision": lambda: tf.CLIPVisionModel(tf.CLIPVisionConfig(**_IMAGES, intermediate_size=40)),
    "deit": lambda: tf.DeiTModel(
        tf.DeiTConfig(**_IMAGES, intermediate_size=40), add_pooling_layer=False
    ),
    "distilbert": lambda: tf.DistilBertModel(
        tf.DistilBertConfig(vocab_size=VOCAB, dim=WIDTH, n_layers=2, n_heads=HEADS, hidden_dim=40)
    ),
    "electra": lambda: tf.ElectraModel(tf.ElectraConfig(**_SIZES, embedding_size=8)),
    "gemma": lambda: tf.GemmaForCausalLM(tf.GemmaConfig(**_DECODER, head_dim=6)),
    "gpt_neox": lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**_SIZES, **_TOKENS)),
    "mbart": lambda: tf.MBartForConditionalGeneration(
        tf.MBartConfig(**_PAIR, forced_eos_token_id=None)
    ),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**_DECODER, sliding_window=None)),
    "olmo2": lambda: tf.Olmo2ForCausalLM(tf.Olmo2Config(**_DECODER)),
    "opt": lambda: tf.OPTForCausalLM(
        tf.OPTConfig(
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            word_embed_proj_dim=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            ffn_dim=40,
            max_position_embeddings=64,
            **_TOKENS,
        )
    ),
    "phi": lambda: tf.PhiForCausalLM(tf.PhiConfig(**{**_DECODER, "hidden_size": 32})),
    "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**_DECODER)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**_DECODER, head_dim=6)),
    "roberta": lambda: tf.RobertaModel(
        tf.RobertaConfig(**_SIZES, pad_token_id=1), add_pooling_layer=False
    ),
    "siglip_vision": lambda: tf.SiglipVisionModel(
        tf.SiglipVisionConfig(**_IMAGES, intermediate_size=40)
    ),
    "wav2vec2": _speech,
    "xlm_roberta": lambda: tf.XLMRobertaModel(
        tf.XLMRobertaConfig(**_SIZES, pad_token_id=1), add_pooling_layer=False
    ),
}
"""Beside `MODELS`: all route."""


def _llama4() -> nn.Module:
    # three layers attend within chunks of four tokens, the last to all
    experts = {"num_local_experts": 2, "intermediate_size_mlp": 40}
    chunks = {"attention_chunk_size": 4, "no_rope_layer_interval": 4, "num_hidden_layers": 4}
    config = tf.Llama4TextConfig(**{**_DECODER, **experts, **chunks}, head_dim=6)
    return tf.Llama4ForCausalLM(config)


WINDOWED: dict[str, Callable[[], nn.Module]] = {
    "mistral_window": lambda: tf.MistralForCausalLM(tf.MistralConfig(**_WINDOW)),
    "qwen2_window": _qwen2_window,
    "gemma3": _gemma3,
    "modernbert": _modernbert,
    "llama4": _llama4,
}
"""Layers that read a few keys on each side, or on the left, or in their chunk."""
ADAPTED: dict[str, Callable[[], nn.Module]] = {
    "bloom": lambda: tf.BloomForCausalLM(
        tf.BloomConfig(vocab_size=VOCAB, hidden_size=WIDTH, n_layer=3, n_head=HEADS, **_TOKENS)
    ),
    "codegen": lambda: tf.CodeGenForCausalLM(tf.CodeGenConfig(**{**_BLOCKS, "n_embd": 32})),
    "falcon": lambda: _falcon(alibi=False, new_decoder_architecture=True, num_kv_heads=2),
    "falcon_one_key_head": lambda: _falcon(alibi=False, multi_query=True),
    "gptj": lambda: tf.GPTJForCausalLM(tf.GPTJConfig(**_BLOCKS)),
    "megatron_bert": lambda: tf.MegatronBertModel(
        tf.MegatronBertConfig(**_SIZES), add_pooling_layer=False
    ),
    "mpnet": lambda: tf.MPNetModel(tf.MPNetConfig(**_SIZES), add_pooling_layer=False),
    "rembert": lambda: tf.RemBertModel(tf.RemBertConfig(**_SIZES), add_pooling_layer=False),
    "flava": lambda: tf.FlavaTextModel(tf.FlavaTextConfig(**_SIZES), add_pooling_layer=False),
    "tapas": lambda: tf.TapasModel(tf.TapasConfig(**_SIZES), add_pooling_layer=False),
    "visual_bert": lambda: tf.VisualBertModel(
        tf.VisualBertConfig(**_SIZES), add_pooling_layer=False
    ),
    "roformer": lambda: tf.RoFormerModel(tf.RoFormerConfig(**_SIZES)),
    "roformer_decoder": lambda: tf.RoFormerForCausalLM(
        tf.RoFormerConfig(**_SIZES, **_TOKENS, is_decoder=True)
    ),
}
"""Reached by `subquad.convert.adapters`."""
ALL = {**MODELS, **ROUTING, **WINDOWED, **ADAPTED}

TEXT = ("bert", "gpt2", "llama", "esm")
PAIRS = ("bart", "marian", "mbart", "t5")


def tiny(kind: str, implementation: str = "sdpa", spread: float = 0.15) -> nn.Module:
    """A model in eval mode whose attention is far from uniform."""
    torch.manual_seed(0)
    model = ALL[kind]().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, spread)
    if kind in ADAPTED:  # most of them know but one
        implementation = "sdpa" if kind.startswith("falcon") else "eager"
    model.set_attn_implementation(implementation)
    return model


def inputs(kind: str, padding: str = "right", length: int = 13) -> dict[str, torch.Tensor]:
    """Two rows; the first has five padded positions, left or right."""
    torch.manual_seed(1)
    if kind in ("vit", "dinov2", "deit", "clip_vision", "siglip_vision"):
        return {"pixel_values": torch.randn(2, 3, 20, 20)}
    ids = torch.randint(5, VOCAB, (2, length))
    mask = torch.ones_like(ids)
    mask[0, : 5 if padding == "left" else 0] = 0
    if padding == "right":
        mask[0, -5:] = 0
    if kind == "wav2vec2":
        return {"input_values": torch.randn(2, 300)}
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
