"""A pointer-generator: each token is generated, or copied from the source."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad.errors import OptionError, ShapeError
from subquad.options import integer_problem

__all__ = ["PointerGenerator", "token_losses"]


class PointerGenerator(nn.Module):
    """The distribution of a token that may be copied from the source.

        a_t = softmax_j((W s_t + c)·h_j / √C)                              where to copy from
        p_t = σ(w_h·Σ_j a_tj h_j + w_s·s_t + w_x·x_t + b)                  generate, or copy
        P_t(w) = p_t·softmax(z_t)_w + (1 − p_t)·Σ_{j: source_j = w} a_tj

    s decoder state, x decoder input, h encoder output, z logits of the vocabulary of V tokens. A
    source token V + i is the i-th word of its row that the vocabulary lacks; it can be copied
    alone. `subquad.data.copying.extend_with_source` makes such tokens of texts.

    Computed from logarithms of both parts, in float32: no probability is rounded to 0 before it
    is added, and no gradient is NaN, however sure p is. Words that a row does not have are −∞.

    Cost O(L·S·C) time, O(L·S + L·V) memory: the pointer is exact attention with one head,
    whatever mechanisms the model has. Implied weights of a linear mechanism take as long, may
    be negative, and are spread too wide to point with.

    Papers: See et al. 2017, arXiv 1704.04368, equations 8 and 9; pointers: Vinyals et al. 2015,
    arXiv 1506.03134. Deviations: a is a head of its own, there the model's only attention; its
    scores are bilinear, not additive; h and s come from a Transformer. No coverage loss.

    Args:
        d_model: C.

    Raises:
        OptionError: if it is no integer ≥ 1.

    Example:
        >>> import torch
        >>> from subquad.models.copy import PointerGenerator
        >>> pointer = PointerGenerator(32)
        >>> state, inputs, memory = torch.randn(3, 2, 7, 32).unbind()
        >>> source = torch.tensor([[5, 50, 8, 51, 50, 2, 0], [9, 5, 50, 2, 0, 0, 0]])
        >>> logits = pointer(torch.randn(2, 7, 50), state, inputs, memory, source, source > 0)
        >>> logits.shape  # 50 words, and two more that the first source has
        torch.Size([2, 7, 52])
        >>> bool(torch.allclose(logits.exp().sum(-1), torch.ones(2, 7)))
        True
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        problems = [*integer_problem("d_model", d_model, 1)]
        if problems:
            raise OptionError("PointerGenerator: " + "; ".join(problems))
        self.query = nn.Linear(d_model, d_model)
        self.gate = nn.Linear(3 * d_model, 1)

    def forward(
        self,
        logits: Tensor,
        state: Tensor,
        inputs: Tensor,
        memory: Tensor,
        source: Tensor,
        mask: Tensor | None = None,
    ) -> Tensor:
        """log P (B, L, V + N), float32; N = words that V lacks, in the row that has most.

        Args:
            logits: (B, L, V) of the vocabulary, z.
            state: (B, L, C) of the decoder, s.
            inputs: (B, L, C) of the decoder, x.
            memory: (B, S, C), h.
            source: (B, S) tokens, ≥ V for words that the vocabulary lacks.
            mask: (B, S) bool, True = may be copied.

        Raises:
            ShapeError: if `source` or `mask` are not (B, S).
        """
        source = source.long()  # scatter takes no other
        for name, one in (("source", source), ("mask", mask)):
            if one is not None and one.shape != memory.shape[:2]:
                raise ShapeError(
                    f"{name} must be (B, S) = {tuple(memory.shape[:2])}, given {tuple(one.shape)}"
                )
        if mask is not None:
            memory = memory.masked_fill(~mask[..., None], 0)  # 0·NaN = NaN
        weights = self.weights(state, memory, mask)
        context = weights.to(memory.dtype) @ memory
        gate = self.gate(torch.cat([context, state, inputs.to(state.dtype)], -1)).float()
        logits = logits.float()
        # log p + log softmax(z), with one tensor of this size instead of two
        generated = logits + (F.logsigmoid(gate) - logits.logsumexp(-1, keepdim=True))
        extra = max(0, int(source.max()) + 1 - logits.shape[-1])
        generated = F.pad(generated, (0, extra), value=-math.inf)
        slots, words, used = _words(source)
        shape = weights.shape
        copied = torch.zeros_like(weights).scatter_add(-1, slots[:, None].expand(shape), weights)
        # The floor keeps log finite for words of weight 0; their gradient is 0 there.
        copied = copied.clamp_min(torch.finfo(copied.dtype).tiny).log() + F.logsigmoid(-gate)
        words = words[:, None].expand(shape)
        both = torch.logaddexp(generated.gather(-1, words), copied)
        # Places without a word repeat the first one's value, and get no gradient.
        both = torch.where(used[:, None], both, both[..., :1].detach())
        return generated.scatter(-1, words, both)

    def weights(self, state: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        """Where to copy from, a (B, L, S), float32; 0 where the mask is False.

        A row without a token to attend is 0 everywhere.
        """
        scores = (self.query(state) @ memory.mT).float() * memory.shape[-1] ** -0.5
        if mask is None:
            return scores.softmax(-1)
        closed = ~mask[:, None]
        floor = torch.finfo(scores.dtype).min  # −∞ in a whole row would give NaN
        return scores.masked_fill(closed, floor).softmax(-1).masked_fill(closed, 0.0)


def _words(source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The different tokens of each row, in ascending order.

    Returns:
        slots (B, S), the number of each token's word; words (B, S), by number; used (B, S),
        whether there is a word of that number: where not, the first one stands in its place.
    """
    ordered, order = source.sort(-1)
    fresh = torch.ones_like(ordered, dtype=torch.bool)
    fresh[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    numbers = fresh.cumsum(-1) - 1
    slots = torch.empty_like(source).scatter(-1, order, numbers)
    words = ordered[:, :1].expand_as(source).scatter(-1, numbers, ordered)
    used = torch.arange(source.shape[-1], device=source.device) <= numbers[:, -1:]
    return slots, words, used


def token_losses(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Cross entropy (B, L) of each label, 0 where it is −100, float32.

        loss = −(1 − ε)·log P(label) − ε/n·Σ_w log P(w)         over the n words that there are

    Words whose logit is −∞ do not exist: they are left out of the smoothing, where
    `torch.nn.functional.cross_entropy` gives ∞. Cost O(B·L·V).

    Paper: Szegedy et al. 2016, arXiv 1512.00567, section 7.

    Args:
        logits: (B, L, V), also V + N of a `PointerGenerator`.
        labels: (B, L) integers.
        smoothing: ε, 0 ≤ ε < 1.

    Raises:
        ShapeError: if the labels do not fit.

    Example:
        >>> import torch
        >>> from subquad.models.copy import token_losses
        >>> logits = torch.tensor([[[0.0, 1.0, -torch.inf], [2.0, 0.0, 0.0]]])
        >>> token_losses(logits, torch.tensor([[1, -100]]), smoothing=0.1)
        tensor([[0.3633, 0.0000]])
    """
    if labels.shape != logits.shape[:-1]:
        raise ShapeError(
            f"labels must be (B, L) = {tuple(logits.shape[:-1])}, given {tuple(labels.shape)}"
        )
    flat = logits.flatten(0, -2).float()
    losses = F.cross_entropy(flat, labels.flatten().long(), reduction="none")
    if smoothing:
        there = flat > -math.inf
        total = flat.logsumexp(-1) - flat.masked_fill(~there, 0.0).sum(-1) / there.sum(-1)
        losses = (1 - smoothing) * losses + smoothing * total.masked_fill(labels.flatten() < 0, 0)
    return losses.view(labels.shape)
