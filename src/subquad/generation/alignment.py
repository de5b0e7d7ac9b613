"""Which source tokens each target token looks at: cross-attention weights as alignments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from subquad.errors import OptionError, ShapeError, UnsupportedError
from subquad.generation.batches import batches_by_tokens, padded

__all__ = ["Alignment", "align"]


@dataclass(frozen=True, eq=False)
class Alignment:
    """How a target's tokens look at its source; `str` writes Pharaoh's ``0-0 1-2``.

    Args:
        source: S tokens, without special ones.
        target: T tokens, without special ones.
        weights: (T, S) float32: the mean over heads and chosen layers. What a row lacks to 1
            is on special tokens.
    """

    source: tuple[str, ...]
    target: tuple[str, ...]
    weights: Tensor

    def pairs(self, threshold: float | None = None) -> list[tuple[int, int]]:
        """(source, target) numbers, from 0: each target token's heaviest source token.

        Args:
            threshold: all source tokens of at least this weight, in the place of the heaviest.
        """
        if threshold is not None:
            found = (self.weights >= threshold).nonzero().tolist()
            return [(source, target) for target, source in found]
        if not self.weights.numel():
            return []
        return [(source, target) for target, source in enumerate(self.weights.argmax(1).tolist())]

    def __str__(self) -> str:
        return " ".join(f"{source}-{target}" for source, target in sorted(self.pairs()))


def align(
    model: Any,
    tokenizer: Any,
    sources: Sequence[str],
    targets: Sequence[str],
    *,
    target_tokenizer: Any = None,
    layer: int | None = None,
    batch_tokens: int = 4096,
) -> list[Alignment]:
    """The alignment of each source with its given target, from one teacher-forced pass.

        A_ts = 1/(|layers|·H) Σ_layers Σ_h w_h(t, s),   w: cross-attention where y_t is predicted

    The mechanism's implied weights (`Mechanism.weights`), O(T·S) memory for each head: exact
    attention is not needed. Bahdanau et al. 2015, arXiv 1409.0473, section 3.1; that layers
    differ, and one below the last aligns best: Garg et al. 2019, arXiv 1909.02074.

    Args:
        model: `Seq2SeqTransformer`, `NonAutoregressiveTransformer`, or transformers' own.
        tokenizer: its tokenizer.
        sources, targets: texts, one target for each source.
        target_tokenizer: of the targets, where they have tokens of their own.
        layer: which cross-attention, −1 is the last; None: the mean of all.
        batch_tokens: most tokens of a batch, padding included.

    Raises:
        OptionError: if numbers of texts differ, or there is no such layer.
        UnsupportedError: if a cross-attention has no weights.

    Example:
        >>> import subquad as sq
        >>> from subquad.data.tokens import train_tokenizer
        >>> from subquad.generation import align
        >>> texts = ["the cat sat", "a dog ran"]
        >>> tokenizer = train_tokenizer(texts, kind="word", min_frequency=1)
        >>> config = sq.models.Seq2SeqTransformerConfig(
        ...     vocab_size=len(tokenizer), d_model=32, encoder_layers=1, decoder_layers=1
        ... )
        >>> model = sq.models.Seq2SeqTransformer(config).eval()  # not trained
        >>> (one,) = align(model, tokenizer, ["the cat sat"], ["a dog"])
        >>> tuple(one.weights.shape), len(one.pairs())
        ((2, 3), 2)
    """
    if isinstance(sources, str) or isinstance(targets, str):
        raise OptionError("align takes lists of texts, one target for each source")
    if len(sources) != len(targets):
        raise OptionError(f"align: {len(sources)} sources, {len(targets)} targets")
    target_tokenizer = tokenizer if target_tokenizer is None else target_tokenizer
    read = [list(map(int, tokenizer(text)["input_ids"])) for text in sources]
    said = [list(map(int, target_tokenizer(text_target=text)["input_ids"])) for text in targets]
    found: dict[int, Alignment] = {}
    lengths = [max(len(a), len(b)) for a, b in zip(read, said, strict=True)]
    for rows in batches_by_tokens(lengths, batch_tokens):
        inputs = padded([read[row] for row in rows], tokenizer.pad_token_id, model.device)
        labels = padded([said[row] for row in rows], -100, model.device)["input_ids"]
        weights = forced(model, inputs, labels, layer=layer, want_weights=True)[1]
        assert weights is not None
        for at, row in enumerate(rows):
            found[row] = alignment_of(
                weights[at], read[row], said[row], tokenizer, target_tokenizer
            )
    return [found[row] for row in range(len(sources))]


@torch.no_grad()
def forced(
    model: Any,
    inputs: dict[str, Tensor],
    labels: Tensor,
    *,
    layer: int | None = None,
    want_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log p (B, T) of given outputs, 0 where −100, and weights (B, T, S) if wanted.

    Args:
        model: in eval mode while it runs.
        inputs: of the source: ``input_ids`` or ``input_features``, ``attention_mask``.
        labels: (B, T) tokens, −100 = nothing.
        layer: see `align`.
        want_weights: whether to look.
    """
    given = dict(inputs)
    if getattr(model, "autoregressive", True):
        given["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)
    else:
        given |= model.observed(labels)
    with _evaluating(model):
        if want_weights:
            with _eager(model):
                out = model(**given, output_attentions=True, use_cache=False)
        else:
            out = model(**given, use_cache=False)
    wrong = labels == -100
    logits = out.logits[:, : labels.shape[1]]
    chosen = logits.gather(2, labels.masked_fill(wrong, 0)[..., None])[..., 0].float()
    scores = (chosen - logits.float().logsumexp(2)).masked_fill(wrong, 0.0)
    return scores, _chosen(model, out.cross_attentions, layer) if want_weights else None


def alignment_of(
    weights: Tensor,
    source: Sequence[int],
    target: Sequence[int],
    tokenizer: Any,
    target_tokenizer: Any,
) -> Alignment:
    """The rows and columns (T, S) of tokens that are words, not signs."""
    rows, columns = words(target, target_tokenizer), words(source, tokenizer)
    if len(source) > weights.shape[1] or len(target) > weights.shape[0]:
        raise ShapeError(
            f"weights must be (T, S) ≥ ({len(target)}, {len(source)}), given {tuple(weights.shape)}"
        )
    place = weights.float().cpu()
    return Alignment(
        tuple(tokenizer.convert_ids_to_tokens([source[at] for at in columns])),
        tuple(target_tokenizer.convert_ids_to_tokens([target[at] for at in rows])),
        place[rows][:, columns],
    )


def words(ids: Sequence[int], tokenizer: Any) -> list[int]:
    """Places of tokens that stand for text; unknown ones do."""
    signs = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    return [place for place, token in enumerate(ids) if token not in signs]


def _chosen(model: Any, each: Sequence[Tensor] | None, layer: int | None) -> Tensor:
    """One layer's weights (B, T, S), or the mean of all; over heads always."""
    if not each or any(one is None for one in each):
        raise UnsupportedError(
            type(model).__name__, "alignment", "its forward returns no cross_attentions"
        )
    if layer is None:
        return torch.stack([one.mean(1) for one in each]).mean(0)
    if type(layer) is not int or not -len(each) <= layer < len(each):
        raise OptionError(
            f"layer={layer!r} must be a number from {-len(each)} to {len(each) - 1}: the model "
            f"has {len(each)} cross-attentions"
        )
    return each[layer].mean(1)


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@contextmanager
def _eager(model: Any) -> Iterator[None]:
    """transformers' fused attention gives no weights: its plain one does, for a while."""
    before = getattr(model.config, "_attn_implementation", None)
    switch = before not in (None, "eager") and not _is_ours(model)
    if switch:
        model.set_attn_implementation("eager")
    try:
        yield
    finally:
        if switch:
            model.set_attn_implementation(before)


def _is_ours(model: Any) -> bool:
    from subquad.models.configuration import TransformerConfig

    return isinstance(model.config, TransformerConfig)
