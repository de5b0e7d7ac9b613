"""`NonAutoregressiveTransformer`: a decoder that writes all tokens at once, then revises.

This file subclasses transformers' classes: import it through `subquad.models`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import Seq2SeqLMOutput
from transformers.utils.generic import ModelOutput

from subquad.errors import OptionError, ShapeError, UnsupportedError
from subquad.models.base import mean_cross_entropy, refuse, returns_tuples
from subquad.models.configuration import Seq2SeqTransformerConfig
from subquad.models.entropy import token_cross_entropy
from subquad.models.seq2seq import EncoderOutput, Seq2SeqTransformer
from subquad.options import choice_problem, integer_problem, number_problem

__all__ = [
    "MaskPredictOutput",
    "NonAutoregressiveTransformer",
    "NonAutoregressiveTransformerConfig",
    "mask_predict",
]


class NonAutoregressiveTransformerConfig(Seq2SeqTransformerConfig):
    """Of `NonAutoregressiveTransformer`.

    Args:
        length_prediction: "classifier": a linear map of the mean of the encoder's vectors
            predicts the target's length; "fixed": `fixed_length` tokens are written, and what
            follows the first end of sequence is ignored.
        max_length_offset: K: the classifier knows target lengths from S − K to S + K.
        length_loss_weight: of the classifier's loss.
        fixed_length: N of "fixed", the end included.
        masking: of training targets: "uniform", a number of tokens drawn uniformly from 1 … T
            is masked (conditional masked language model); "full", all are.
        iterations: passes of decoding, where a call names no number.
        mask_token_id: stands for a token that is to be written.

    All other arguments, and what is raised: `Seq2SeqTransformerConfig`.
    """

    model_type = "subquad-nat"

    length_prediction: str = "classifier"
    max_length_offset: int = 64
    length_loss_weight: float = 0.1
    fixed_length: int = 64
    masking: str = "uniform"
    iterations: int = 10
    mask_token_id: int = 4

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        yield from choice_problem("length_prediction", self.length_prediction, LENGTHS)
        yield from integer_problem("max_length_offset", self.max_length_offset, 0)
        yield from number_problem("length_loss_weight", self.length_loss_weight, 0.0)
        yield from integer_problem("fixed_length", self.fixed_length, 1)
        yield from choice_problem("masking", self.masking, ("uniform", "full"))
        yield from integer_problem("iterations", self.iterations, 1)
        yield from integer_problem("mask_token_id", self.mask_token_id, 0)
        sizes = (self.mask_token_id, self.vocab_size)
        if all(type(size) is int for size in sizes) and sizes[0] >= sizes[1]:
            yield f"mask_token_id={self.mask_token_id} must be < vocab_size={self.vocab_size}"
        if self.eos_token_id is None:
            yield "eos_token_id is needed: it ends what is written"
        if self.copy is True:
            yield "copy=True needs a decoder that writes one token after another"


LENGTHS = ("classifier", "fixed")


@dataclass
class MaskPredictOutput(ModelOutput):
    """What `mask_predict` has written.

    Args:
        sequences: (B·n, 1 + L) tokens as `generate` gives them: the decoder's start, the output,
            its end, padding.
        sequences_scores: (B·n,) Σ log p / length^length_penalty.
    """

    sequences: Tensor | None = None
    sequences_scores: Tensor | None = None


class NonAutoregressiveTransformer(Seq2SeqTransformer):
    """A Transformer whose decoder predicts all target tokens in parallel.

        p(y | x) = p(T | x) · Π_t p(y_t | y_observed, x)

    The decoder reads <mask> in the place of each unknown token, and attends in both
    directions: every mechanism works, also those that cannot be causal. Trained as a conditional
    masked language model it fills any subset of a target given the rest; `generate` starts with
    all tokens masked and revises the least certain ones in a constant number of passes
    (`mask_predict`), where an autoregressive decoder needs one pass for each token.

    **Length.** ``length_prediction="classifier"``: softmax(W · mean_s h_s) over the difference
    T − S in −K … K. Ghazvininejad et al. read a LENGTH token instead; fairseq's version of
    their model pools, as here, which leaves the source as the mechanisms see it unchanged.
    ``"fixed"``: the decoder writes `fixed_length` tokens, trained with ends of sequence behind
    the target's own, and everything behind the first end is ignored.

    **Loss.** Cross entropy of masked tokens, plus length_loss_weight · cross entropy of the length.

    Cost: that of `Seq2SeqTransformer` for each pass; decoding takes `iterations` passes.

    Papers: Ghazvininejad et al. 2019, arXiv 1904.09324 (CMLM, mask-predict, section 3); Gu et al.
    2017, arXiv 1711.02281 (NAT; deviations of ``masking="full"``: <mask> as the decoder's input
    where they copy source vectors by predicted fertilities; no positional attention).

    Args:
        config: a `NonAutoregressiveTransformerConfig`.

    Raises:
        OptionError, UnsupportedError: if options do not fit each other.

    Example:
        >>> import torch, subquad as sq
        >>> config = sq.models.NonAutoregressiveTransformerConfig(
        ...     vocab_size=50, d_model=32, encoder_layers=2, decoder_layers=2, mechanism="linear"
        ... )
        >>> model = sq.models.NonAutoregressiveTransformer(config).eval()
        >>> source = torch.randint(5, 50, (2, 9))
        >>> parts = model.loss({"input_ids": source, "labels": torch.randint(5, 50, (2, 7))})
        >>> sorted(parts)
        ['cross_entropy', 'length']
        >>> model.generate(source, iterations=4, num_beams=3).shape[0]
        2
    """

    config_class = NonAutoregressiveTransformerConfig
    accepts_loss_kwargs = False
    autoregressive = False

    def __init__(self, config: NonAutoregressiveTransformerConfig) -> None:
        super().__init__(config)
        self.length_head: nn.Linear | None = None
        if config.length_prediction == "classifier":
            self.length_head = nn.Linear(config.d_model, 2 * config.max_length_offset + 1)
        self.post_init()

    # ---- training ----------------------------------------------------------------------------

    def loss(
        self,
        batch: dict[str, Tensor],
        generator: torch.Generator | None = None,
        label_smoothing: float = 0.0,
    ) -> dict[str, Tensor]:
        """The parts of the training loss, which add up to it.

        Args:
            batch: ``input_ids`` or ``input_features``, ``attention_mask``, and ``labels`` (B, T),
                −100 = nothing.
            generator: of the masks; default: torch's own.
            label_smoothing: ε, of the tokens' cross entropy.

        Raises:
            ShapeError: if a target is longer than `fixed_length`, or no target has a token.
        """
        return self._trained(self._encoded(batch), batch["labels"], generator, label_smoothing)[0]

    def _encoded(self, batch: dict[str, Tensor]) -> EncoderOutput:
        names = ("input_ids", "attention_mask", "inputs_embeds", "input_features")
        return self.encode(**{name: batch[name] for name in names if name in batch})

    def _trained(
        self,
        encoded: EncoderOutput,
        labels: Tensor,
        generator: torch.Generator | None,
        label_smoothing: float,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """The loss's parts, and logits (B, T, V)."""
        config = self.config
        targets, keep, counted = self._targets(labels)
        sizes = counted.sum(1)
        if not bool(sizes.any()) and not torch.compiler.is_compiling():
            raise ShapeError("labels hold no token to be predicted")
        hidden = counted
        if config.masking == "uniform":
            hidden = random_subset(counted, generator)
        if config.length_prediction == "fixed":
            hidden = hidden | (keep & ~counted)  # ends behind the first are never given away
        ids = torch.where(hidden, config.mask_token_id, targets).masked_fill(
            ~keep, config.pad_token_id
        )
        logits = self.head(self._decoded(encoded, ids, keep))
        entropies = token_cross_entropy(
            logits.flatten(0, 1), targets.masked_fill(~hidden, -100).flatten(), label_smoothing
        ).sum()
        # Ends behind the first are easy and many: they add to the sum and not to the number.
        parts = {"cross_entropy": entropies / (hidden & counted).sum()}
        if self.length_head is not None:
            lengths = self._length_logits(encoded)
            offset = (sizes - self._source_sizes(encoded)).clamp(
                -config.max_length_offset, config.max_length_offset
            )
            length = F.cross_entropy(lengths.float(), offset + config.max_length_offset)
            parts["length"] = config.length_loss_weight * length
        return parts, logits

    def _targets(self, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Target tokens, which places there are, and which count as the target's own."""
        config = self.config
        real = labels != -100
        ends = labels == self._end
        if config.length_prediction == "classifier":  # the length says where it ends
            keep = real & ~ends
            return labels.masked_fill(~keep, config.pad_token_id), keep, keep
        size = config.fixed_length
        length = int(real.sum(1).max())
        if length > size:
            raise ShapeError(
                f"labels hold a target of {length} tokens, fixed_length is {size}: leave longer "
                "ones out, or raise it"
            )
        labels = F.pad(labels[:, :size], (0, size - min(size, labels.shape[1])), value=-100)
        real = labels != -100
        return labels.masked_fill(~real, self._end), torch.ones_like(real), real

    def observed(self, labels: Tensor) -> dict[str, Tensor]:
        """Whole targets (B, T) as the decoder reads them: its ids and mask, as in `forward`."""
        targets, keep, _ = self._targets(labels)
        return {"decoder_input_ids": targets, "decoder_attention_mask": keep.long()}

    @property
    def _end(self) -> int:
        end = self.config.eos_token_id
        return int(end[0] if isinstance(end, list) else end)

    def _decoded(
        self,
        encoded: EncoderOutput,
        ids: Tensor,
        keep: Tensor,
        record: list[Tensor] | None = None,
    ) -> Tensor:
        return self.hidden(encoded, ids, keep.long(), causal=False, record=record)

    # ---- length ------------------------------------------------------------------------------

    def _source_sizes(self, encoded: EncoderOutput) -> Tensor:
        """(B,) vectors of each source."""
        hidden = encoded.last_hidden_state
        assert hidden is not None
        if encoded.mask is None:
            return torch.full((len(hidden),), hidden.shape[1], device=hidden.device)
        return encoded.mask.sum(1)

    def _length_logits(self, encoded: EncoderOutput) -> Tensor:
        """(B, 2K + 1) of the differences −K … K between target and source."""
        hidden = encoded.last_hidden_state
        assert hidden is not None and self.length_head is not None
        if encoded.mask is not None:
            hidden = hidden.masked_fill(~encoded.mask[..., None], 0.0)
        mean = hidden.sum(1) / self._source_sizes(encoded)[:, None].clamp(min=1)
        return self.length_head(mean)

    def lengths(self, encoded: EncoderOutput, count: int = 1) -> Tensor:
        """(B, count) likeliest target lengths ≥ 1, best first.

        Raises:
            OptionError: for more lengths than the classifier knows, or without a classifier.
        """
        if self.length_head is None:
            raise OptionError('lengths are predicted with length_prediction="classifier" alone')
        offsets = self.config.max_length_offset
        if count > 2 * offsets + 1:
            raise OptionError(f"{count} lengths asked for, the classifier knows {2 * offsets + 1}")
        logits = self._length_logits(encoded)
        sizes = self._source_sizes(encoded)[:, None]
        every = sizes + torch.arange(-offsets, offsets + 1, device=sizes.device)
        few = logits.masked_fill(every < 1, float("-inf"))
        best = few.topk(count, 1).indices
        return every.gather(1, best).clamp(min=1)

    # ---- calls -------------------------------------------------------------------------------

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
        inputs_embeds: Tensor | None = None,
        input_features: Tensor | None = None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """Logits (B, L, V) of the tokens at their own places, and the loss of `labels`.

        Args:
            input_ids, attention_mask, inputs_embeds, input_features, encoder_outputs: the
                source, as in `Seq2SeqTransformer.forward`.
            decoder_input_ids: (B, L) tokens, <mask> where one is to be predicted.
            decoder_attention_mask: (B, L), 1 = attend.
            labels: (B, L) targets; masked as in `loss`, with torch's own generator, unless
                decoder_input_ids are given.
            output_attentions: also `cross_attentions`, (B, H, L, S) of each.

        Raises:
            OptionError, ShapeError, DtypeError: if arguments do not fit.
        """
        refuse(self, kwargs)
        if encoder_outputs is None:
            encoder_outputs = self.encode(
                input_ids,
                attention_mask,
                inputs_embeds=inputs_embeds,
                input_features=input_features,
            )
        record: list[Tensor] | None = [] if output_attentions else None
        loss = None
        if decoder_input_ids is None:
            if labels is None:
                raise OptionError("give decoder_input_ids or labels")
            if output_attentions:
                raise OptionError("output_attentions needs decoder_input_ids")
            parts, logits = self._trained(encoder_outputs, labels, None, 0.0)
            loss = torch.stack(list(parts.values())).sum()
        else:
            if decoder_attention_mask is None:
                decoder_attention_mask = torch.ones_like(decoder_input_ids)
            keep = decoder_attention_mask != 0
            logits = self.head(self._decoded(encoder_outputs, decoder_input_ids, keep, record))
            if labels is not None:
                loss = mean_cross_entropy(logits, labels)
        return Seq2SeqLMOutput(
            loss=loss,
            logits=logits,
            cross_attentions=None if record is None else tuple(record),
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
        )

    def generate(  # type: ignore[override]  # another kind of search
        self,
        input_ids: Tensor | None = None,
        *,
        num_beams: int = 5,
        num_return_sequences: int = 1,
        iterations: int | None = None,
        length_penalty: float = 1.0,
        max_lengths: Tensor | None = None,
        return_dict_in_generate: bool = False,
        **inputs: Any,
    ) -> Tensor | MaskPredictOutput:
        """`mask_predict` with the arguments and the result of transformers' `generate`.

        Args:
            input_ids: (B, S) source tokens.
            num_beams: lengths that are tried for each source.
            num_return_sequences: n best of these.
            iterations, length_penalty, max_lengths: see `mask_predict`.
            return_dict_in_generate: scores too.
            inputs: `attention_mask`, `input_features`, `inputs_embeds`.

        Raises:
            UnsupportedError: for arguments that only step-by-step decoding has.
        """
        known = ("attention_mask", "input_features", "inputs_embeds")
        wrong = sorted(name for name in inputs if name not in known and inputs[name] is not None)
        if wrong:
            raise UnsupportedError(
                type(self).__name__,
                ", ".join(wrong),
                "it writes all tokens at once; generate takes num_beams, num_return_sequences, "
                "iterations, length_penalty, max_lengths",
            )
        if input_ids is not None:
            inputs["input_ids"] = input_ids
        out = mask_predict(
            self,
            inputs,
            iterations=iterations,
            length_beam=num_beams,
            n_best=num_return_sequences,
            length_penalty=length_penalty,
            max_lengths=max_lengths,
        )
        if return_dict_in_generate:
            return out
        assert out.sequences is not None
        return out.sequences


def random_subset(places: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Of each row's n places (B, T) bool a number drawn uniformly from 1 … n, chosen uniformly."""
    device = places.device if generator is None else generator.device
    scores = torch.rand(places.shape, generator=generator, device=device).to(places.device)
    share = torch.rand((len(places), 1), generator=generator, device=device).to(places.device)
    sizes = places.sum(1, keepdim=True)
    count = (share * sizes).long() + 1  # 1 … n: share < 1
    ranks = scores.masked_fill(~places, float("inf")).argsort(1).argsort(1)
    return places & (ranks < count)


@torch.no_grad()
def mask_predict(
    model: NonAutoregressiveTransformer,
    inputs: dict[str, Tensor] | Tensor,
    *,
    iterations: int | None = None,
    length_beam: int = 5,
    n_best: int = 1,
    length_penalty: float = 1.0,
    max_lengths: Tensor | None = None,
) -> MaskPredictOutput:
    """Outputs of a non-autoregressive model by repeated masking and prediction.

        i = 0:      all T tokens are <mask>;  y_t = argmax p(· | x),  p_t = max p(· | x)
        i = 1 … I−1:  the n = ⌊T·(I − i)/I⌋ tokens of the smallest p_t are masked and predicted
                    again from the others; the others keep their token and their p_t

    The `length_beam` likeliest lengths are written in parallel, and the outputs with the highest
    Σ_t log p_t / T^length_penalty win. With ``length_prediction="fixed"`` there is one output
    of `fixed_length` tokens, cut at its first end of sequence in every pass. Special tokens are
    never written. Not all T outputs are distinct words: few passes repeat tokens (the paper's
    section 4.3 measures it).

    Cost: `iterations` passes over the decoder for B·length_beam rows, one over the encoder.
    Ghazvininejad et al. 2019, arXiv 1904.09324, section 3 and equations 2 to 4.

    Args:
        model: a `NonAutoregressiveTransformer`, in eval mode.
        inputs: source tokens (B, S), or a mapping with ``input_ids`` or ``input_features`` and
            ``attention_mask``.
        iterations: I; default: the config's.
        length_beam: ℓ, how many lengths are tried.
        n_best: outputs of each source, at most `length_beam`.
        length_penalty: 1 is the paper's mean.
        max_lengths: (B,) longest output of each source.

    Raises:
        OptionError: naming every wrong argument.

    Example:
        >>> import torch, subquad as sq
        >>> from subquad.generation import mask_predict
        >>> config = sq.models.NonAutoregressiveTransformerConfig(
        ...     vocab_size=50, d_model=32, encoder_layers=1, decoder_layers=1
        ... )
        >>> model = sq.models.NonAutoregressiveTransformer(config).eval()
        >>> out = mask_predict(model, torch.randint(5, 50, (2, 9)), iterations=4, n_best=3)
        >>> len(out.sequences), len(out.sequences_scores)
        (6, 6)
    """
    config = model.config
    iterations = config.iterations if iterations is None else iterations
    fixed = config.length_prediction == "fixed"
    problems = [
        *integer_problem("iterations", iterations, 1),
        *integer_problem("length_beam", length_beam, 1),
        *integer_problem("n_best", n_best, 1),
        *number_problem("length_penalty", length_penalty, float("-inf")),
    ]
    if not problems and n_best > (1 if fixed else length_beam):
        problems.append(
            f"n_best={n_best} needs as many lengths, "
            + ("a fixed length gives one output" if fixed else f"given length_beam={length_beam}")
        )
    if problems:
        raise OptionError("mask_predict: " + "; ".join(problems))
    if isinstance(inputs, Tensor):
        inputs = {"input_ids": inputs}
    encoded = model._encoded(inputs)
    memory = encoded.last_hidden_state
    assert memory is not None
    rows = len(memory)
    if fixed:
        beam, lengths = 1, memory.new_full((rows, 1), config.fixed_length, dtype=torch.long)
    else:
        beam = min(length_beam, 2 * config.max_length_offset + 1)
        lengths = model.lengths(encoded, beam)
    most = lengths
    if max_lengths is not None:
        most = torch.minimum(lengths, max_lengths[:, None].clamp(min=1))
        lengths = lengths if fixed else most
    for name, given in encoded.items():
        encoded[name] = given.repeat_interleave(beam, 0)
    ids, logs, sizes = _refined(model, encoded, lengths.flatten(), most.flatten(), iterations)
    inside = torch.arange(ids.shape[1], device=ids.device) < sizes[:, None]
    scores = logs.masked_fill(~inside, 0.0).sum(1) / sizes**length_penalty
    best = scores.view(rows, beam).topk(n_best, 1)
    offset = torch.arange(rows, device=ids.device)[:, None] * beam
    chosen = (best.indices + offset).flatten()
    return MaskPredictOutput(_ended(model, ids[chosen], sizes[chosen]), best.values.flatten())


def _refined(
    model: NonAutoregressiveTransformer,
    encoded: EncoderOutput,
    lengths: Tensor,
    most: Tensor,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens (R, N), their log p (R, N), and how many of them are the output (R,).

    Args:
        model, encoded, iterations: as in `mask_predict`.
        lengths: (R,) places that are written.
        most: (R,) tokens before an end, where the model looks for it.
    """
    config = model.config
    fixed = config.length_prediction == "fixed"
    never = [config.pad_token_id, config.bos_token_id, config.mask_token_id]
    never += [] if fixed else [model._end]
    banned = [token for token in never if token is not None]
    places = torch.arange(int(lengths.max()), device=lengths.device)
    keep = places < lengths[:, None]
    ids = torch.full(keep.shape, config.mask_token_id, device=keep.device)
    ids = ids.masked_fill(~keep, config.pad_token_id)
    logs = torch.zeros(keep.shape, device=keep.device)
    hidden, sizes = keep, lengths
    for done in range(iterations):
        if done:
            count = sizes * (iterations - done) // iterations
            inside = places < sizes[:, None]
            ranks = logs.masked_fill(~inside, float("inf")).argsort(1).argsort(1)
            hidden = inside & (ranks < count[:, None])
            ids = ids.masked_fill(hidden, config.mask_token_id)
        logits = model.head(model._decoded(encoded, ids, keep)).float()
        logits[..., banned] = float("-inf")
        best, tokens = logits.log_softmax(2).max(2)
        ids = torch.where(hidden, tokens, ids)
        logs = torch.where(hidden, best, logs)
        if fixed:
            over = (places >= most[:, None]) & (ids != model._end)
            ids = ids.masked_fill(over, model._end)  # not the model's choice: at no cost
            logs = logs.masked_fill(over, 0.0)
            ended = ids == model._end
            first = torch.where(ended.any(1), ended.long().argmax(1) + 1, ids.shape[1])
            behind = places >= first[:, None]
            ids = ids.masked_fill(behind, model._end)
            sizes = first
    return ids, logs, sizes


def _ended(model: NonAutoregressiveTransformer, ids: Tensor, sizes: Tensor) -> Tensor:
    """Outputs (R, N) as `generate` gives them: behind a start, with an end, padded."""
    config = model.config
    places = torch.arange(ids.shape[1] + 1, device=ids.device)
    out = F.pad(ids, (0, 1), value=config.pad_token_id)
    out = out.masked_fill(places >= sizes[:, None], config.pad_token_id)
    if config.length_prediction == "classifier":
        out = out.masked_fill(places == sizes[:, None], model._end)
    start = ids.new_full((len(ids), 1), config.decoder_start_token_id)
    out = torch.cat([start, out], 1)
    used = int(sizes.max()) + (2 if config.length_prediction == "classifier" else 1)
    return out[:, :used]
