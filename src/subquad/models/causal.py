"""`CausalTransformer`: a language model with any attention.

This file subclasses transformers' classes: import it through `subquad.models`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from subquad.attention.stack import TransformerEncoder
from subquad.errors import OptionError
from subquad.models.base import (
    StreamingModel,
    can_stream,
    keep_mask,
    mean_cross_entropy,
    recent,
    refuse,
    streamed_positions,
)
from subquad.models.cache import StackCache
from subquad.models.configuration import CausalTransformerConfig

__all__ = ["CausalTransformer"]


class CausalTransformer(StreamingModel, GenerationMixin):
    """A decoder without a source: each token from those before it.

        p(x_t | x_<t) = softmax(W · Stack(√C·E[x_<t] + PE)_t−1),   W = E where tied

    Any causal mechanism in each attention. `generate` works from a state as in
    `Seq2SeqTransformer`, padded texts of a batch on the left or on the right; where a mechanism
    has no state, it computes the whole prefix anew for each token.

    transformers' `Trainer` trains it, also where it accumulates gradients; leave its
    `label_smoothing_factor` at 0, which shifts the labels of transformers' own classes alone
    (``subquad train lm`` has label smoothing).

    Cost: O(L·num_layers·C·(C + dim_feedforward)), the mechanisms', and L·C·vocab_size.

    Papers: Vaswani et al. 2017, arXiv 1706.03762, the decoder without its cross-attention; Radford
    et al. 2018 (GPT).

    Args:
        config: a `CausalTransformerConfig`.

    Raises:
        OptionError, UnsupportedError: if options do not fit each other.

    Example:
        >>> import torch, subquad as sq
        >>> config = sq.models.CausalTransformerConfig(vocab_size=50, d_model=32, num_layers=2)
        >>> model = sq.models.CausalTransformer(config).eval()
        >>> text = torch.randint(5, 50, (2, 9))
        >>> model(text, labels=text).logits.shape
        torch.Size([2, 9, 50])
        >>> model.generate(text, max_new_tokens=4, min_new_tokens=4, do_sample=True).shape
        torch.Size([2, 13])
    """

    config_class = CausalTransformerConfig
    accepts_loss_kwargs = True
    decoder: TransformerEncoder

    def __init__(self, config: CausalTransformerConfig) -> None:
        super().__init__(config)
        self.loss_type = "ForCausalLM"  # `Trainer` then counts labels behind the first
        self.decoder = TransformerEncoder(
            config.d_model,
            config.num_heads,
            config.num_layers,
            pattern=config.pattern,
            mechanism=config.mechanism,
            seed=config.seed,
            **config.stack_options(),
        )
        self.embed = nn.Embedding(config.vocab_size, config.d_model, config.pad_token_id)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self._tied_weights_keys = {"head.weight": "embed.weight"}
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The table of the tokens' vectors."""
        return self.embed

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Puts another table in the place."""
        self.embed = value  # type: ignore[assignment]  # an embedding

    def get_output_embeddings(self) -> nn.Module:
        """The map to the vocabulary."""
        return self.head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Puts another map in the place."""
        self.head = new_embeddings  # type: ignore[assignment]  # a linear map

    def hidden(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        past_key_values: StackCache | None = None,
    ) -> Tensor:
        """The stack's vectors (B, L, C), which `head` maps to the vocabulary; see `forward`."""
        if (input_ids is None) == (inputs_embeds is None):
            raise OptionError("give either input_ids or inputs_embeds")
        if input_ids is not None:
            x = self.embedded(input_ids, self.embed)
        else:
            assert inputs_embeds is not None
            x = inputs_embeds
        length = x.shape[1]
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        keep = keep_mask(
            "attention_mask", recent("attention_mask", attention_mask, length, past), x
        )
        if past_key_values is None:
            ids = None
            if keep is not None:  # without padding positions count from 0 by themselves
                ids = streamed_positions(attention_mask, length, self.decoder)
            return self.decoder(x, causal=True, key_mask=keep, position_ids=ids)
        out, past_key_values.state = self.decoder.prefill(
            x,
            state=past_key_values.state,
            key_mask=keep,
            position_ids=streamed_positions(attention_mask, length, self.decoder),
        )
        return out

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        past_key_values: StackCache | None = None,
        use_cache: bool | None = None,
        inputs_embeds: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits (B, L, V) of the next tokens, and the loss of `labels`.

        Args:
            input_ids: (B, L) tokens.
            attention_mask: (B, L), 1 = attend; with a cache (B, past + L).
            labels: (B, L), usually `input_ids`, compared with the prediction from the tokens
                before; −100 = nothing.
            past_key_values: a `StackCache` of the tokens before.
            use_cache: begin one; done where all mechanisms have a state.
            inputs_embeds: (B, L, C) in the tokens' place, scaled already.
            num_items_in_batch: what the sum of the loss is divided by, as `Trainer` gives it where
                it accumulates gradients; default: the labels that are compared.
            return_dict: False for a tuple.

        Raises:
            OptionError, ShapeError, DtypeError: if arguments do not fit.
            UnsupportedError: if a mechanism cannot do what is asked for.
        """
        refuse(self, kwargs)
        cache = past_key_values
        if use_cache and cache is None and labels is None:
            cache = StackCache()
        if cache is not None and not can_stream(self.decoder):
            cache = None
        out = self.hidden(
            input_ids, attention_mask, inputs_embeds=inputs_embeds, past_key_values=cache
        )
        logits = self.head(out)
        loss = None
        if labels is not None:
            loss = mean_cross_entropy(logits[:, :-1], labels[:, 1:], num_items_in_batch)
        result = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)
        if return_dict is None:
            return_dict = self.config.return_dict
        return result if return_dict else result.to_tuple()
