"""`EncoderTransformer`, which reads texts, and heads on it for what is asked about them.

This file subclasses transformers' classes: import it through `subquad.models`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

from subquad.attention.stack import TransformerEncoder
from subquad.errors import OptionError, ShapeError
from subquad.models.base import (
    TransformerPreTrainedModel,
    mean_cross_entropy,
    padding,
    returns_tuples,
)
from subquad.models.configuration import EncoderTransformerConfig

__all__ = [
    "EncoderForMaskedLM",
    "EncoderForQuestionAnswering",
    "EncoderForSequenceClassification",
    "EncoderForTokenClassification",
    "EncoderTransformer",
]


class EncoderTransformer(TransformerPreTrainedModel):
    """An encoder: each token's vector reads all tokens.

        h = Encoder(√C·(E[x] + G[segment]) + PE),   G where the config has segments

    Any mechanism that reads both ways, and any token mixer, in each attention. The heads of this
    file hold one as ``transformer``, under the same names: weights that one of them was trained
    with, such as those of `EncoderForMaskedLM`, load into every other one. In a batch texts may be
    padded on either side; positions count tokens. Where all mechanisms declare `pad_invariant`, a
    text's vectors do not depend on what pads it at the right.

    Cost: O(L·num_layers·C·(C + dim_feedforward)), and the mechanisms'.

    Papers: Vaswani et al. 2017, arXiv 1706.03762, section 3.1; segments: Devlin et al. 2019, arXiv
    1810.04805, figure 2 (deviation: no norm of the sum of embeddings).

    Args:
        config: an `EncoderTransformerConfig`.

    Raises:
        OptionError, UnsupportedError: if options do not fit each other.

    Example:
        >>> import torch, subquad as sq
        >>> config = sq.models.EncoderTransformerConfig(vocab_size=50, d_model=32, num_layers=2)
        >>> model = sq.models.EncoderTransformer(config).eval()
        >>> model(torch.randint(5, 50, (2, 9))).last_hidden_state.shape
        torch.Size([2, 9, 32])
    """

    config_class = EncoderTransformerConfig
    base_model_prefix = "transformer"

    def __init__(self, config: EncoderTransformerConfig) -> None:
        super().__init__(config)
        self.encoder = TransformerEncoder(
            config.d_model,
            config.num_heads,
            config.num_layers,
            pattern=config.pattern,
            mechanism=config.mechanism,
            seed=config.seed,
            **config.stack_options(),
        )
        self.embed = nn.Embedding(config.vocab_size, config.d_model, config.pad_token_id)
        self.embed_segment = None
        if config.segments:
            self.embed_segment = nn.Embedding(config.segments, config.d_model)
        self.post_init()

    @returns_tuples
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> BaseModelOutput:
        """The tokens' vectors (B, L, C).

        Args:
            input_ids: (B, L) tokens.
            attention_mask: (B, L), 1 = attend.
            token_type_ids: (B, L), the segment of each token; default 0.
            inputs_embeds: (B, L, C) in the tokens' place, scaled already.
            output_hidden_states: also `hidden_states`: the input, and the vectors behind each
                block of the pattern.
            output_attentions: not there; `subquad.Mechanism.weights` gives weights.

        Raises:
            OptionError, ShapeError, DtypeError: if arguments do not fit.
            UnsupportedError: if a mechanism cannot do what is asked for.
        """
        if output_attentions:
            raise OptionError("output_attentions: ask a mechanism for its `weights` instead")
        x = self._with_segments(self.vectors(input_ids, inputs_embeds), token_type_ids)
        padded = padding("attention_mask", attention_mask, x, self.encoder)
        if not output_hidden_states:
            return BaseModelOutput(last_hidden_state=self.encoder(x, **padded))
        *seen, last = self.encoder.hidden_states(x, **padded)
        return BaseModelOutput(last_hidden_state=last, hidden_states=(x, *seen))

    def _with_segments(self, x: Tensor, ids: Tensor | None) -> Tensor:
        if ids is not None and ids.shape != x.shape[:2]:
            raise ShapeError(
                f"token_type_ids must be (B, L) = {tuple(x.shape[:2])}, given {tuple(ids.shape)}"
            )
        if self.embed_segment is None:
            # Tokenizers give zeros unasked.
            if ids is not None and not torch.compiler.is_compiling() and bool(ids.any()):
                raise OptionError("token_type_ids are given to a model whose config has segments=0")
            return x
        if ids is None:
            ids = x.new_zeros(x.shape[:2], dtype=torch.long)
        return x + self.embedded(ids, self.embed_segment)


class _Head(TransformerPreTrainedModel):
    """A model with an `EncoderTransformer` in it."""

    config_class = EncoderTransformerConfig
    base_model_prefix = "transformer"

    def __init__(self, config: EncoderTransformerConfig) -> None:
        super().__init__(config)
        self.transformer = EncoderTransformer(config)
        self.dropout = nn.Dropout(config.head_dropout)


class EncoderForSequenceClassification(_Head):
    """What kind of text is it: one label, several, or numbers.

        p = Σ_i keep_i·h_i / Σ_i keep_i      (pooling="mean"), or the first kept h_i ("first")
        logits = W·p + b,   (B, num_labels)

    The loss is that of transformers' `problem_type`: "single_label_classification", cross entropy
    with labels (B,); "multi_label_classification", binary cross entropy with labels (B,
    num_labels) of 0 and 1; "regression", squared error. Without one, the first kind of labels
    decides, as there.

    Cost: that of `EncoderTransformer`.

    Args:
        config: an `EncoderTransformerConfig` with `num_labels`.

    Raises:
        OptionError, UnsupportedError: if options do not fit each other.

    Example:
        >>> import torch, subquad as sq
        >>> config = sq.models.EncoderTransformerConfig(
        ...     vocab_size=50, d_model=32, num_layers=2, num_labels=3
        ... )
        >>> model = sq.models.EncoderForSequenceClassification(config).eval()
        >>> out = model(torch.randint(5, 50, (2, 9)), labels=torch.tensor([0, 2]))
        >>> out.logits.shape, out.loss.shape
        (torch.Size([2, 3]), torch.Size([]))
    """

    def __init__(self, config: EncoderTransformerConfig) -> None:
        super().__init__(config)
        self.classifier = nn.Linear(config.d_model, labels_of(config))
        self.post_init()

    @returns_tuples
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **options: Any,
    ) -> SequenceClassifierOutput:
        """Logits (B, num_labels), and the loss of `labels`; all else: `EncoderTransformer`."""
        read = self.transformer(input_ids, attention_mask, token_type_ids, **options)
        hidden = read.last_hidden_state
        logits = self.classifier(self.dropout(pooled(hidden, attention_mask, self.config.pooling)))
        loss = None
        if labels is not None:
            if self.config.problem_type in ("regression", "multi_label_classification"):
                labels = labels.to(logits.dtype)
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=read.hidden_states)


class EncoderForTokenClassification(_Head):
    """What kind is each token: parts of speech, names.

        logits_i = W·h_i + b,   (B, L, num_labels);   loss: mean cross entropy of labels ≠ −100

    Cost: that of `EncoderTransformer`, and O(L·C·num_labels).

    Args:
        config: an `EncoderTransformerConfig` with `num_labels`.

    Raises:
        OptionError, UnsupportedError: if options do not fit each other.

    Example:
        >>> import torch, subquad as sq
        >>> config = sq.models.EncoderTransformerConfig(
        ...     vocab_size=50, d_model=32, num_layers=2, mechanism="near_far", num_labels=5
        ... )
        >>> model = sq.models.EncoderForTokenClassification(config).eval()
        >>> model(torch.randint(5, 50, (2, 9))).logits.shape
        torch.Size([2, 9, 5])
    """

    accepts_loss_kwargs = True

    def __init__(self, config: EncoderTransformerConfig) -> None:
        super().__init__(config)
        self.classifier = nn.Linear(config.d_model, labels_of(config))
        self.post_init()

    @returns_tuples
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **options: Any,
    ) -> TokenClassifierOutput:
        """Logits (B, L, num_labels), and the loss of `labels`.

        Args:
            num_items_in_batch: what the sum of the loss is divided by, as `Trainer` gives it where
                it accumulates gradients; default: the labels that are not −100.

        All else: `EncoderTransformer`.
        """
        read = self.transformer(input_ids, attention_mask, token_type_ids, **options)
        logits = self.classifier(self.dropout(read.last_hidden_state))
        loss = None
        if labels is not None:
            loss = mean_cross_entropy(logits, labels, num_items_in_batch)
        return TokenClassifierOutput(loss=loss, logits=logits, hidden_states=read.hidden_states)


class EncoderForMaskedLM(_Head):
    """Which token stood in the place of a mask.

        logits_i = W·norm(gelu(A·h_i + a)) + b,   W = E where tied

    Labels are −100 for tokens that are not asked for; `subquad.data.labelled.MaskTokens` makes
    them.

    Cost: that of `EncoderTransformer`, and O(L·C·vocab_size).

    Papers: Devlin et al. 2019, arXiv 1810.04805, section 3.1; the head is that of their code.

    Args:
        config: an `EncoderTransformerConfig`.

    Raises:
        OptionError, UnsupportedError: if options do not fit each other.

    Example:
        >>> import torch, subquad as sq
        >>> config = sq.models.EncoderTransformerConfig(vocab_size=50, d_model=32, num_layers=2)
        >>> model = sq.models.EncoderForMaskedLM(config).eval()
        >>> text = torch.randint(5, 50, (2, 9))
        >>> model(text, labels=text).logits.shape
        torch.Size([2, 9, 50])
    """

    accepts_loss_kwargs = True

    def __init__(self, config: EncoderTransformerConfig) -> None:
        super().__init__(config)
        self.transform = nn.Linear(config.d_model, config.d_model)
        self.norm = nn.LayerNorm(config.d_model)
        self.head = self.map_to_tokens("transformer.embed.weight", bias=True)
        self.post_init()

    @returns_tuples
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **options: Any,
    ) -> MaskedLMOutput:
        """Logits (B, L, V), and the loss of `labels`.

        All else: `EncoderForTokenClassification`.
        """
        read = self.transformer(input_ids, attention_mask, token_type_ids, **options)
        logits = self.head(self.norm(F.gelu(self.transform(read.last_hidden_state))))
        loss = None
        if labels is not None:
            loss = mean_cross_entropy(logits, labels, num_items_in_batch)
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=read.hidden_states)


class EncoderForQuestionAnswering(_Head):
    """Where in a text the answer to a question begins, and where it ends.

        start_i = a·h_i,   end_i = b·h_i,   loss: mean of both cross entropies over i

    Question and text are one sequence, told apart by `token_type_ids` where the config has
    ``segments=2``. Padding has the lowest logit, so that no answer is looked for there.

    Cost: that of `EncoderTransformer`.

    Papers: Devlin et al. 2019, arXiv 1810.04805, section 4.2.

    Args:
        config: an `EncoderTransformerConfig`.

    Raises:
        OptionError, UnsupportedError: if options do not fit each other.

    Example:
        >>> import torch, subquad as sq
        >>> config = sq.models.EncoderTransformerConfig(
        ...     vocab_size=50, d_model=32, num_layers=2, segments=2
        ... )
        >>> model = sq.models.EncoderForQuestionAnswering(config).eval()
        >>> out = model(
        ...     torch.randint(5, 50, (1, 9)), token_type_ids=torch.tensor([[0] * 3 + [1] * 6])
        ... )
        >>> out.start_logits.shape, out.end_logits.shape
        (torch.Size([1, 9]), torch.Size([1, 9]))
    """

    def __init__(self, config: EncoderTransformerConfig) -> None:
        super().__init__(config)
        self.spans = nn.Linear(config.d_model, 2)
        self.post_init()

    @returns_tuples
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **options: Any,
    ) -> QuestionAnsweringModelOutput:
        """Logits (B, L) of the answer's first and last token, and the loss.

        Args:
            start_positions, end_positions: (B,), both or none; L or more = not in this text,
                which has no loss.

        All else: `EncoderTransformer`.
        """
        if (start_positions is None) != (end_positions is None):
            raise OptionError("give both start_positions and end_positions, or none of them")
        read = self.transformer(input_ids, attention_mask, token_type_ids, **options)
        logits = self.spans(self.dropout(read.last_hidden_state))
        if attention_mask is not None:
            lowest = torch.finfo(logits.dtype).min
            logits = logits.masked_fill(attention_mask[..., None] == 0, lowest)
        start, end = logits.unbind(-1)
        loss = None
        if start_positions is not None:
            loss = self.loss_function(start, end, start_positions, end_positions)
        return QuestionAnsweringModelOutput(
            loss=loss, start_logits=start, end_logits=end, hidden_states=read.hidden_states
        )


def labels_of(config: EncoderTransformerConfig) -> int:
    """How many labels a head has; transformers' default is 2."""
    assert config.num_labels is not None, "set by the config's constructor"
    return config.num_labels


def pooled(hidden: Tensor, mask: Tensor | None, pooling: str) -> Tensor:
    """One vector (B, C) for each row of `hidden` (B, L, C); a row without tokens has zeros.

    Args:
        hidden: (B, L, C).
        mask: (B, L), 1 = a token.
        pooling: "mean" of the tokens, or the "first" one.
    """
    if mask is None:
        return hidden.mean(1) if pooling == "mean" else hidden[:, 0]
    keep = mask != 0
    if pooling == "first":  # padding may stand before it
        keep &= keep.cumsum(1) == 1
    return hidden.masked_fill(~keep[..., None], 0.0).sum(1) / keep.sum(1, True).clamp_min(1)
