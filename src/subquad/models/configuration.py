"""What a whole Transformer is made of, as transformers' configs: JSON in, JSON out.

This file subclasses transformers' classes: import it through `subquad.models`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig

from subquad.attention.feedforward import ACTIVATIONS, GATES
from subquad.attention.norms import norm_problem
from subquad.errors import OptionError, UnknownNameError, nearest
from subquad.models.speech import front_end_problems
from subquad.options import (
    Config,
    Spec,
    choice_problem,
    flag_problem,
    integer_problem,
    number_problem,
)

__all__ = [
    "MEMORIES",
    "CausalTransformerConfig",
    "EncoderTransformerConfig",
    "Seq2SeqTransformerConfig",
    "TransformerConfig",
]

MEMORIES = ("last", "same_depth", "weighted")
"""What cross-attentions read, by name; a list of encoder layers is the other way to say it."""

MechanismOption = str | list[str] | dict[int | str, str]
"""One mechanism for all attentions, one for each, or by number with a "default"."""

# What transformers itself passes to a config, beside its fields.
_THEIRS = frozenset(
    {
        "_commit_hash",
        "_name_or_path",
        "attn_implementation",
        "experts_implementation",
        "model_type",
        "name_or_path",
        "num_labels",
        "output_attentions",
        "per_layer_config",
        "torch_dtype",
        "transformers_version",
    }
)


class TransformerConfig(PreTrainedConfig):
    """Options that all models share.

    Args:
        vocab_size: tokens that the model knows.
        d_model: C, width.
        num_heads: H; divides C.
        dim_feedforward: units between the two maps of a feed-forward block.
        activation: "relu", "gelu", "silu", or gated: "glu", "reglu", "geglu", "swiglu".
        feed_forward: its two maps as "linear" or as 1×1 convolutions, "conv": the same numbers.
        dropout: probability of dropping an entry while training.
        attention_dropout: of attention weights; None: see `subquad.TransformerEncoderLayer`.
        attention_noise: uniform noise on attention weights while training.
        norm: "layer", "rms" or "batch".
        norm_first: norms before the blocks (pre-norm); the paper has them behind (post-norm).
        final_norm: one more norm at the end of each stack; None: with pre-norm.
        tie_embeddings: the output map is the (target) embedding.
        scale_embeddings: embeddings are multiplied by √C, as in the paper.
        positions: "sinusoidal", "learned" or "rotary", with options in parentheses, or None.
        positions_at: "input" or "attention", see `subquad.TransformerEncoder`.
        max_position_embeddings: longest sequence, for mechanisms and positions that need to know.
        mechanism: of each self-attention: a name, or a string with options; a list with one for
            each; or a mapping from their numbers to mechanisms, with the others' under "default".
        residual_attention: scores of earlier attentions are added (RealFormer): True, or of how
            many.
        num_kv_heads: key/value heads, which groups of heads share; default H.
        seed: of random draws.
        use_cache: generate from states, where all mechanisms of the decoder have one.
        pad_token_id, bos_token_id, eos_token_id: special tokens.

    Raises:
        OptionError: naming everything that is wrong.
        UnknownNameError: if there is no such option.
    """

    keys_to_ignore_at_inference = ("past_key_values",)

    vocab_size: int = 8000
    d_model: int = 256
    num_heads: int = 4
    dim_feedforward: int = 1024
    activation: str = "relu"
    feed_forward: str = "linear"
    dropout: float = 0.1
    attention_dropout: float | None = None
    attention_noise: float = 0.0
    norm: str = "layer"
    norm_first: bool = False
    final_norm: bool | None = None
    tie_embeddings: bool = True
    scale_embeddings: bool = True
    positions: str | None = "sinusoidal"
    positions_at: str = "input"
    max_position_embeddings: int = 512
    mechanism: MechanismOption = "performer"
    residual_attention: bool | int = False
    num_kv_heads: int | None = None
    seed: int = 0
    use_cache: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2

    def __post_init__(self, **kwargs: Any) -> None:
        name = type(self).__name__
        for key in kwargs:
            if key not in _THEIRS and key not in self.attribute_map:
                known = [field for field in self.__dataclass_fields__ if field[0] != "_"]
                raise UnknownNameError(f"{name}: unknown option {key!r}{nearest(key, known)}")
        for other in [key for key in kwargs if key in self.attribute_map]:
            setattr(self, self.attribute_map[other], kwargs.pop(other))
        for option in self._mechanism_options():
            setattr(self, option, _plain(getattr(self, option)))
        problems = list(self._problems())
        if problems:
            raise OptionError(f"{name}: " + "; ".join(problems))
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]  # transformers'

    @classmethod
    def _mechanism_options(cls) -> tuple[str, ...]:
        return ("mechanism",)

    def _problems(self) -> Iterator[str]:
        names = (*ACTIVATIONS, *GATES)
        yield from integer_problem("vocab_size", self.vocab_size, 1)
        yield from integer_problem("d_model", self.d_model, 1)
        yield from integer_problem("num_heads", self.num_heads, 1)
        yield from integer_problem("dim_feedforward", self.dim_feedforward, 1)
        yield from choice_problem("activation", self.activation, names)
        yield from choice_problem("feed_forward", self.feed_forward, ("linear", "conv"))
        yield from number_problem("dropout", self.dropout, 0.0, 1.0)
        if self.attention_dropout is not None:
            yield from number_problem("attention_dropout", self.attention_dropout, 0.0, 1.0)
        yield from number_problem("attention_noise", self.attention_noise, 0.0)
        yield from norm_problem(self.norm)
        for flag in ("norm_first", "tie_embeddings", "scale_embeddings", "use_cache"):
            yield from flag_problem(flag, getattr(self, flag))
        if self.final_norm is not None:
            yield from flag_problem("final_norm", self.final_norm)
        yield from choice_problem("positions_at", self.positions_at, ("input", "attention"))
        yield from integer_problem("max_position_embeddings", self.max_position_embeddings, 1)
        if self.num_kv_heads is not None:
            yield from integer_problem("num_kv_heads", self.num_kv_heads, 1)
        if type(self.seed) is not int:
            yield f"seed={self.seed!r} must be an integer"
        if self.pad_token_id is not None:  # a row of each embedding
            yield from integer_problem("pad_token_id", self.pad_token_id, 0)
            for name in ("vocab_size", "source_vocab_size"):
                size = getattr(self, name, None)
                if (
                    type(size) is int
                    and isinstance(self.pad_token_id, int)
                    and (self.pad_token_id >= size)
                ):
                    yield f"pad_token_id={self.pad_token_id} must be < {name}={size}"
        sizes = (self.d_model, self.num_heads)
        if all(type(size) is int and size > 0 for size in sizes) and sizes[0] % sizes[1]:
            yield f"num_heads={self.num_heads} must divide d_model={self.d_model}"

    def stack_options(self) -> dict[str, Any]:
        """The keyword arguments that every stack of the model is built with."""
        return {
            "dim_feedforward": self.dim_feedforward,
            "dropout": self.dropout,
            "activation": self.activation,
            "feed_forward": self.feed_forward,
            "norm": self.norm,
            "norm_first": self.norm_first,
            "final_norm": self.final_norm,
            "num_kv_heads": self.num_kv_heads,
            "residual_attention": self.residual_attention,
            "positions": self.positions,
            "positions_at": self.positions_at,
            "attention_dropout": self.attention_dropout,
            "attention_noise": self.attention_noise,
            "max_length": self.max_position_embeddings,
        }


class CausalTransformerConfig(TransformerConfig):
    """Of `CausalTransformer`: a stack of causal self-attention and feed-forward blocks.

    Args:
        num_layers: how often the pattern is repeated.
        pattern: letters of the blocks, "a" attention and "f" feed-forward; default "af".

    All other arguments, and what is raised: `TransformerConfig`.
    """

    model_type = "subquad-causal"
    attribute_map = {  # noqa: RUF012  # transformers' own form
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "tie_word_embeddings": "tie_embeddings",
    }

    num_layers: int = 6
    pattern: str | None = None
    is_decoder: bool = True

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        yield from integer_problem("num_layers", self.num_layers, 1)


class EncoderTransformerConfig(TransformerConfig):
    """Of the encoder models: a stack of self-attention and feed-forward blocks with a head.

    Args:
        num_layers: how often the pattern is repeated.
        pattern: letters of the blocks; default "af".
        pooling: what stands for a sequence: "mean" of its tokens, or its "first" one.
        segments: kinds of text within a sequence (`token_type_ids`), each with a vector; 0: none.
        head_dropout: before the head.

    All other arguments, and what is raised: `TransformerConfig`. Labels are transformers'
    `num_labels`, `id2label`, `label2id`, `problem_type`.
    """

    model_type = "subquad-encoder"
    attribute_map = CausalTransformerConfig.attribute_map

    num_layers: int = 6
    pattern: str | None = None
    pooling: str = "mean"
    segments: int = 0
    head_dropout: float = 0.1

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        yield from integer_problem("num_layers", self.num_layers, 1)
        yield from choice_problem("pooling", self.pooling, ("mean", "first"))
        yield from integer_problem("segments", self.segments, 0)
        yield from number_problem("head_dropout", self.head_dropout, 0.0, 1.0)


class Seq2SeqTransformerConfig(TransformerConfig):
    """Of `Seq2SeqTransformer`: an encoder, and a decoder that reads it.

    `mechanism` is that of the encoder's self-attention.

    Args:
        encoder_layers, decoder_layers: how often each pattern is repeated.
        encoder_pattern: letters of the encoder's blocks; default "af".
        decoder_pattern: of the decoder's, with "c" for cross-attention; default "acf".
        decoder_mechanism: of the decoder's self-attention; default `mechanism`, if that is one.
        cross_mechanism: of the cross-attention; default likewise.
        memory: what each cross-attention reads: "last", the encoder's output, as in the paper;
            "same_depth", the encoder layer of its own number; "weighted", a learned mean of all
            layers; or a list with a layer's number for each (−1 is the last).
        source_vocab_size: of the source, where it has tokens of its own; None: one vocabulary
            and one embedding for both sides.
        copy: a pointer-generator, which also copies tokens of the source, see
            `subquad.models.copy.PointerGenerator`.
        unk_token_id: how it reads words that only a source has.
        front_end: a mapping with the arguments of `subquad.models.speech.SpeechFrontEnd`, for
            models that read sound in place of source tokens.
        decoder_start_token_id: what the decoder begins with; default `bos_token_id`; with neither
            an error, as without a `pad_token_id`.

    All other arguments, and what is raised: `TransformerConfig`.
    """

    model_type = "subquad-seq2seq"
    attribute_map = {  # noqa: RUF012  # transformers' own form
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "encoder_layers",
        "tie_word_embeddings": "tie_embeddings",
    }

    encoder_layers: int = 6
    decoder_layers: int = 6
    encoder_pattern: str | None = None
    decoder_pattern: str | None = None
    decoder_mechanism: MechanismOption | None = None
    cross_mechanism: MechanismOption | None = None
    memory: str | list[int] = "last"
    source_vocab_size: int | None = None
    copy: bool = False
    unk_token_id: int = 3
    front_end: dict[str, Any] | None = None
    is_encoder_decoder: bool = True
    decoder_start_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.memory = _plain(self.memory)
        super().__post_init__(**kwargs)
        if self.decoder_start_token_id is None:
            self.decoder_start_token_id = self.bos_token_id

    @classmethod
    def _mechanism_options(cls) -> tuple[str, ...]:
        return ("mechanism", "decoder_mechanism", "cross_mechanism")

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        yield from integer_problem("encoder_layers", self.encoder_layers, 1)
        yield from integer_problem("decoder_layers", self.decoder_layers, 1)
        if self.source_vocab_size is not None:
            yield from integer_problem("source_vocab_size", self.source_vocab_size, 1)
        if self.pad_token_id is None:
            yield "pad_token_id is needed: a decoder reads it where labels are -100"
        if self.decoder_start_token_id is None and self.bos_token_id is None:
            yield "decoder_start_token_id is needed where bos_token_id is None"
        yield from flag_problem("copy", self.copy)
        if self.copy is True:
            yield from integer_problem("unk_token_id", self.unk_token_id, 0)
            sizes = (self.unk_token_id, self.vocab_size)
            if all(type(size) is int for size in sizes) and sizes[0] >= sizes[1]:
                yield f"unk_token_id={self.unk_token_id} must be < vocab_size={self.vocab_size}"
            if self.front_end is not None:
                yield "copy=true copies source tokens, and front_end is of sound"
        if isinstance(self.memory, str):
            yield from choice_problem("memory", self.memory, MEMORIES)
        elif not (isinstance(self.memory, list) and all(type(at) is int for at in self.memory)):
            yield f"memory={self.memory!r} must be one of {', '.join(MEMORIES)}, or integers"
        for option in ("decoder_mechanism", "cross_mechanism"):
            if getattr(self, option) is None and not isinstance(self.mechanism, str):
                yield f"{option} is needed where `mechanism` names one for each attention"
        if self.front_end is not None:
            yield from front_end_problems(self.front_end, self.d_model)
        if self.front_end is not None and self.source_vocab_size is not None:
            yield "source_vocab_size is of source tokens, front_end is of sound: give one of them"


def _plain(given: Any) -> Any:
    """Mechanisms, and tuples, as JSON holds them."""
    if isinstance(given, Config | Spec):
        return str(given)
    if isinstance(given, dict):
        return {str(key): _plain(one) for key, one in given.items()}
    return [_plain(one) for one in given] if isinstance(given, list | tuple) else given
