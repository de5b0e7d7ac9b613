"""`CausalTransformer`: a language model with any attention.

This file subclasses transformers' classes: import it through `subquad.models`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from subquad.attention.stack import TransformerEncoder
from subquad.models.base import (
    StreamingModel,
    mean_cross_entropy,
    moved,
    padding,
    refuse,
    returns_tuples,
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
        self.head = self.map_to_tokens()
        self.post_init()

    def hidden(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        past_key_values: StackCache | None = None,
    ) -> Tensor:
        """The stack's vectors (B, L, C), which `head` maps to the vocabulary; see `forward`."""
        cache = past_key_values
        x = self.vectors(input_ids, inputs_embeds)
        padded = padding("attention_mask", attention_mask, x, self.decoder, cache)
        if cache is None:
            return self.decoder(x, causal=True, **padded)
        return moved(cache, self.decoder, x, padded)

    @returns_tuples
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
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
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

        Raises:
            OptionError, ShapeError, DtypeError: if arguments do not fit.
            UnsupportedError: if a mechanism cannot do what is asked for.
        """
        refuse(self, kwargs)
        cache = self.cache_of(past_key_values, bool(use_cache) and labels is None)
        logits = self.head(
            self.hidden(
                input_ids, attention_mask, inputs_embeds=inputs_embeds, past_key_values=cache
            )
        )
        loss = None
        if labels is not None:
            loss = mean_cross_entropy(logits[:, :-1], labels[:, 1:], num_items_in_batch)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)
