"""`Seq2SeqTransformer`: an encoder, a decoder that reads it, any attention in each.

This file subclasses transformers' classes: import it through `subquad.models`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_outputs import Seq2SeqLMOutput
from transformers.utils.generic import ModelOutput

from subquad.attention.norms import normalise
from subquad.attention.stack import (
    CrossAttentionBlock,
    TransformerDecoder,
    TransformerEncoder,
)
from subquad.errors import OptionError, ShapeError
from subquad.models.base import (
    StreamingModel,
    mean_cross_entropy,
    moved,
    padding,
    refuse,
    returns_tuples,
    shifted,
)
from subquad.models.cache import StackCache
from subquad.models.configuration import Seq2SeqTransformerConfig
from subquad.models.copy import PointerGenerator, token_losses
from subquad.models.speech import SpeechFrontEnd
from subquad.positions import Learned, Sinusoidal, position_ids

__all__ = ["EncoderOutput", "Seq2SeqTransformer"]


@dataclass
class EncoderOutput(ModelOutput):
    """What a decoder is given of the source.

    Args:
        last_hidden_state: (B, S, C), behind the last block.
        memories: (B, R, S, C), one for each of R cross-attentions, where these read different
            layers.
        mask: (B, S) bool, True = attend; None without padding.
        source_ids: (B, S), the source's tokens as they are copied, where the model does.
    """

    last_hidden_state: Tensor | None = None
    memories: Tensor | None = None
    mask: Tensor | None = None
    source_ids: Tensor | None = None


class _EncoderView:
    """The model's encoder as `generate` calls it, without parameters of its own."""

    def __init__(self, model: Seq2SeqTransformer) -> None:
        self.model = model

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        input_features: Tensor | None = None,
        source_ids: Tensor | None = None,
        return_dict: bool = True,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> EncoderOutput:
        return self.model.encode(
            input_ids,
            attention_mask,
            inputs_embeds=inputs_embeds,
            input_features=input_features,
            source_ids=source_ids,
        )

    __call__ = forward


class Seq2SeqTransformer(StreamingModel, GenerationMixin):
    """The Transformer: an encoder reads the source, a decoder writes the target.

        h = Encoder(√C·E[x] + PE)
        p(y_t | y_<t, x) = softmax(W · Decoder(√C·E[y_<t] + PE, h)_t),   W = E where tied

    Any mechanism in each attention (`config.mechanism`, `decoder_mechanism`, `cross_mechanism`);
    one line of a config changes them. With softmax, `final_norm` and torch's weights it is
    `torch.nn.Transformer`. `generate` (greedy, beams, sampling) works from a state, in constant
    memory where the decoder's mechanisms have a constant one (`StackCache`); where one has no
    state, it computes the whole prefix anew for each token. `Trainer`, `save_pretrained` and the
    Auto classes work as for transformers' own models.

    Cost: O((S·encoder_layers + L·decoder_layers)·C·(C + dim_feedforward)), the mechanisms', and
    L·C·vocab_size for the output.

    Papers: Vaswani et al. 2017, arXiv 1706.03762, section 3; deviations: none with the default
    norms, sinusoidal positions and softmax attention. Memories of other layers: "same_depth" He et
    al. 2018 (Layer-wise coordination), "weighted" Bapna et al. 2018, arXiv 1808.07561.

    Args:
        config: a `Seq2SeqTransformerConfig`.

    Raises:
        OptionError, UnsupportedError: if options do not fit each other.

    Example:
        >>> import torch, subquad as sq
        >>> config = sq.models.Seq2SeqTransformerConfig(
        ...     vocab_size=50, d_model=32, encoder_layers=2, decoder_layers=2, mechanism="performer"
        ... )
        >>> model = sq.models.Seq2SeqTransformer(config).eval()
        >>> source = torch.randint(5, 50, (2, 9))
        >>> model(source, labels=torch.randint(5, 50, (2, 7))).logits.shape
        torch.Size([2, 7, 50])
        >>> model.generate(source, max_new_tokens=4, min_new_tokens=4, num_beams=2).shape
        torch.Size([2, 5])
    """

    config_class = Seq2SeqTransformerConfig
    accepts_loss_kwargs = True
    decoder: TransformerDecoder
    main_input_name = "input_ids"

    def __init__(self, config: Seq2SeqTransformerConfig) -> None:
        super().__init__(config)
        options = config.stack_options()
        size = (config.d_model, config.num_heads)
        self.encoder = TransformerEncoder(
            *size,
            config.encoder_layers,
            pattern=config.encoder_pattern,
            mechanism=config.mechanism,
            seed=config.seed,
            **options,
        )
        self.encoder.main_input_name = self.main_input_name  # type: ignore[assignment]  # asked for
        self.decoder = TransformerDecoder(
            *size,
            config.decoder_layers,
            pattern=config.decoder_pattern,
            mechanism=_or(config.decoder_mechanism, config.mechanism),
            cross_mechanism=_or(config.cross_mechanism, config.mechanism),
            seed=config.seed + DECODER_SEED,
            **options,
        )
        self.embed = nn.Embedding(config.vocab_size, config.d_model, config.pad_token_id)
        self.embed_source = None
        if config.source_vocab_size is not None:
            self.embed_source = nn.Embedding(
                config.source_vocab_size, config.d_model, config.pad_token_id
            )
        self.head = self.map_to_tokens()
        self.pointer = PointerGenerator(config.d_model) if config.copy else None
        self.front_end = None
        if config.front_end is not None:
            self.front_end = SpeechFrontEnd(config.d_model, **config.front_end)
            self.main_input_name = self.encoder.main_input_name = "input_features"  # type: ignore[assignment]  # of generate
        self.reads = self._reads()
        self.mix: Any = None
        if config.memory == "weighted":
            from subquad.attention.memory import LayerMix

            self.mix = LayerMix(self._depth(), self.decoder.pattern.count("c"))
        self.post_init()

    # ---- the source ----------------------------------------------------------------------

    def _depth(self) -> int:
        """Layers of the encoder: repetitions of its pattern."""
        return int(self.config.encoder_layers)

    def _reads(self) -> list[int] | None:
        """The encoder layer that each cross-attention reads; None for all the last one."""
        memory, depth = self.config.memory, self._depth()
        count = self.decoder.pattern.count("c")
        if memory in ("last", "weighted"):
            return None
        if memory == "same_depth":
            if count > depth:
                raise OptionError(
                    f'memory="same_depth": the decoder has {count} cross-attentions, the encoder '
                    f"{depth} layers"
                )
            return list(range(count))
        if len(memory) != count or any(not -depth <= at < depth for at in memory):
            raise OptionError(
                f"memory={memory} must hold one layer from {-depth} to {depth - 1} for each of "
                f"the decoder's {count} cross-attentions"
            )
        return [at % depth for at in memory]

    def get_encoder(self, modality: str | None = None) -> Any:
        """What turns a source into an `EncoderOutput`."""
        return _EncoderView(self)

    def embedded(self, ids: Tensor, table: nn.Embedding) -> Tensor:
        """The vectors (B, L, C) of tokens (B, L); words that only a source has are unknown."""
        if self.pointer is not None and table is not self.embed_source:
            ids = ids.masked_fill(ids >= table.num_embeddings, self.config.unk_token_id)
        return super().embedded(ids, table)

    def encode(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        input_features: Tensor | None = None,
        source_ids: Tensor | None = None,
    ) -> EncoderOutput:
        """The source, read.

        Args:
            input_ids: (B, S) tokens.
            attention_mask: (B, S), 1 = attend.
            inputs_embeds: (B, S, C) in the tokens' place, scaled already.
            input_features: (B, T, mels) of sound in their place; `attention_mask` is (B, T).
            source_ids: (B, S) what is copied where ``copy=True``, by the target's tokens;
                default `input_ids`. Tokens ≥ vocab_size are words that no embedding has.

        Raises:
            OptionError: unless exactly one source is given, and one that can be copied if need be.
            ShapeError, DtypeError: if an argument does not fit.
        """
        given = [input_ids is not None, inputs_embeds is not None, input_features is not None]
        if sum(given) != 1:
            raise OptionError("encode takes one of input_ids, inputs_embeds, input_features")
        if input_ids is not None:
            table = self.embed if self.embed_source is None else self.embed_source
            x = self.embedded(input_ids, table)
        elif inputs_embeds is not None:
            x = inputs_embeds
        elif self.front_end is None:
            raise OptionError("input_features are given to a model without a front end")
        else:
            assert input_features is not None, "one of them is given"
            x, attention_mask = self.front_end(input_features, attention_mask)
        source_ids = self._copied(source_ids, input_ids, x)
        padded = padding("attention_mask", attention_mask, x, self.encoder)
        keep = padded["key_mask"]
        if self.reads is None and self.mix is None:
            last = self.encoder(x, **padded)
            return EncoderOutput(last, mask=keep, source_ids=source_ids)
        *seen, last = self.encoder.hidden_states(x, **padded)
        size = len(self.encoder.pattern) // self._depth()
        layers = [*seen[size - 1 : -1 : size], last][-self._depth() :]
        if self.encoder.norm is not None:  # what is read has been normed, whatever its depth
            norm = self.encoder.norm
            layers = [*(normalise(norm, layer, keep) for layer in layers[:-1]), last]
        if self.mix is not None:
            memories = self.mix(layers)
        else:
            assert self.reads is not None
            memories = [layers[at] for at in self.reads]
        memories = torch.stack(memories, 1)
        return EncoderOutput(last, memories=memories, mask=keep, source_ids=source_ids)

    def _copied(
        self, source_ids: Tensor | None, input_ids: Tensor | None, x: Tensor
    ) -> Tensor | None:
        """The tokens (B, S) that the decoder may copy."""
        if self.pointer is None:
            if source_ids is not None:
                raise OptionError("source_ids are given to a model without copy=True")
            return None
        if source_ids is None:
            if input_ids is None or self.embed_source is not None:
                raise OptionError(
                    "copy=True needs source_ids, the source by the target's tokens, where "
                    "the source is vectors, or has a vocabulary of its own"
                )
            return input_ids
        if source_ids.shape != x.shape[:2]:
            raise ShapeError(
                f"source_ids must be (B, S) = {tuple(x.shape[:2])}, given {tuple(source_ids.shape)}"
            )
        return source_ids

    # ---- the target ----------------------------------------------------------------------

    def _memory_positions(self, encoded: EncoderOutput) -> Tensor | None:
        """Positions (B, S) of a padded source, where they are added to its keys."""
        if encoded.mask is None or self.config.positions_at != "attention":
            return None
        additive = isinstance(self.decoder.positions, Sinusoidal | Learned)
        return position_ids(encoded.mask) if additive else None

    def _constant(self) -> list[int]:
        """Numbers of the cross-attentions whose state stays what the source has made it."""
        return [
            block.place
            for block in self.decoder.blocks
            if isinstance(block, CrossAttentionBlock)
            and not (told := block.attention.mechanism).follows_for(told.config)
        ]

    def hidden(
        self,
        encoded: EncoderOutput,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        *,
        decoder_inputs_embeds: Tensor | None = None,
        past_key_values: StackCache | None = None,
        causal: bool = True,
        record: list[Tensor] | None = None,
    ) -> Tensor:
        """The decoder's vectors (B, L, C), of which `logits` are made.

        Args:
            encoded: by `encode`.
            decoder_input_ids: (B, L) tokens.
            decoder_attention_mask: (B, L), or with a cache (B, past + L); 1 = attend.
            decoder_inputs_embeds: (B, L, C) in the tokens' place, scaled already.
            past_key_values: a cache, which moves on.
            causal: False for decoders that write all tokens at once.
            record: receives the weights (B, H, L, S) of each cross-attention.
        """
        x = self.vectors(decoder_input_ids, decoder_inputs_embeds, "decoder_")
        memory: Any = encoded.last_hidden_state
        if encoded.memories is not None:
            memory = list(encoded.memories.unbind(1))
        cache, mask = past_key_values, decoder_attention_mask
        padded = padding("decoder_attention_mask", mask, x, self.decoder, cache)
        if cache is not None and not cache.is_empty:
            return moved(cache, self.decoder, x, padded, record)
        options: dict[str, Any] = {**padded, "record": record}
        options["memory_key_mask"] = encoded.mask
        options["memory_position_ids"] = self._memory_positions(encoded)
        if cache is None:
            return self.decoder(x, memory, causal=causal, **options)
        out = cache.move(lambda *_: self.decoder.prefill(x, memory, **options))
        cache.know_sources(
            (encoded.last_hidden_state, encoded.memories, encoded.mask), self._constant()
        )
        return out

    def logits(
        self,
        hidden: Tensor,
        encoded: EncoderOutput,
        decoder_input_ids: Tensor | None = None,
        *,
        decoder_inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """The next tokens' logits (B, L, V); with ``copy=True`` log-probabilities (B, L, V + N).

        Args:
            hidden: (B, L, C) by `hidden`.
            encoded, decoder_input_ids, decoder_inputs_embeds: what `hidden` was given.
        """
        logits: Tensor = self.head(hidden)
        if self.pointer is None:
            return logits
        if encoded.source_ids is None or encoded.last_hidden_state is None:
            raise OptionError("copy=True needs encoder_outputs of `encode`, with source_ids")
        out: Tensor = self.pointer(
            logits,
            hidden,
            self.vectors(decoder_input_ids, decoder_inputs_embeds, "decoder_"),
            encoded.last_hidden_state,
            encoded.source_ids,
            encoded.mask,
        )
        return out

    def token_losses(
        self,
        hidden: Tensor,
        labels: Tensor,
        encoded: EncoderOutput,
        decoder_input_ids: Tensor | None = None,
        *,
        decoder_inputs_embeds: Tensor | None = None,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """The cross entropy (B, L) of each label, with or without copies; 0 where it is −100.

        Args:
            hidden, encoded, decoder_input_ids, decoder_inputs_embeds: as in `logits`.
            labels: (B, L) what is to be predicted.
            label_smoothing: see `subquad.models.copy.token_losses`.
        """
        logits = self.logits(
            hidden, encoded, decoder_input_ids, decoder_inputs_embeds=decoder_inputs_embeds
        )
        return token_losses(logits, labels, label_smoothing)

    @returns_tuples
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        encoder_outputs: EncoderOutput | None = None,
        past_key_values: StackCache | None = None,
        use_cache: bool | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        input_features: Tensor | None = None,
        source_ids: Tensor | None = None,
        output_attentions: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """Logits (B, L, V) of the next tokens, and the loss of `labels`; see `logits`.

        Args:
            input_ids: (B, S) source tokens.
            attention_mask: (B, S), 1 = attend.
            decoder_input_ids: (B, L) target tokens so far; default: `labels`, one later.
            decoder_attention_mask: (B, L), 1 = attend; with a cache (B, past + L).
            labels: (B, L) what is to be predicted, −100 = nothing.
            encoder_outputs: by `encode`, in place of the source.
            past_key_values: a `StackCache` of the tokens before.
            use_cache: begin one; done where all mechanisms of the decoder have a state.
            inputs_embeds, decoder_inputs_embeds: vectors in place of tokens.
            input_features: (B, T, mels) of sound in place of source tokens.
            source_ids: (B, S) what is copied, see `encode`.
            output_attentions: also `cross_attentions`, the weights (B, H, L, S) of each, O(L·S).
            num_items_in_batch: what the sum of the loss is divided by, as `Trainer` gives it where
                it accumulates gradients; default: the labels that are not −100.

        Raises:
            OptionError, ShapeError, DtypeError: if arguments do not fit.
            UnsupportedError: if a mechanism cannot do what is asked for.
        """
        refuse(self, kwargs)
        if encoder_outputs is None:
            encoder_outputs = self.encode(
                input_ids,
                attention_mask,
                inputs_embeds=inputs_embeds,
                input_features=input_features,
                source_ids=source_ids,
            )
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            if labels is None:
                raise OptionError("give decoder_input_ids, decoder_inputs_embeds or labels")
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        cache = self.cache_of(past_key_values, bool(use_cache) and labels is None)
        record: list[Tensor] | None = [] if output_attentions else None
        out = self.hidden(
            encoder_outputs,
            decoder_input_ids,
            decoder_attention_mask,
            decoder_inputs_embeds=decoder_inputs_embeds,
            past_key_values=cache,
            record=record,
        )
        logits = self.logits(
            out, encoder_outputs, decoder_input_ids, decoder_inputs_embeds=decoder_inputs_embeds
        )
        loss = None
        if labels is not None:
            loss = mean_cross_entropy(logits, labels, num_items_in_batch)
        return Seq2SeqLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=cache,  # type: ignore[arg-type]  # a Cache
            cross_attentions=None if record is None else tuple(record),
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
        )

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """What the decoder reads to predict `labels`."""
        return shifted(labels, self.config.decoder_start_token_id, self.config.pad_token_id)


DECODER_SEED = 1_000_003
"""Between the seeds of both stacks, further than any number of attentions reaches."""


def _or(given: Any, other: Any) -> Any:
    return other if given is None else given
