"""Cross entropy over a vocabulary without the copies that it usually costs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.kernels.transforms import refuse_graph, transformed

__all__ = ["token_cross_entropy"]

CHUNK = 1 << 19
"""Elements of the logits that are read at once: as float32 they fit in a core's cache."""


def token_cross_entropy(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """−Σ_v q_v log p_v of each row, in float32 or better, as `torch.nn.functional.cross_entropy`.

        p = softmax(logits),   q_v = (1 − ε)·[v = label] + ε/V,   ∂/∂logits = p − q

    On a CPU the rows are read in parts that stay in the cache, and the gradient is made on the
    way, in the dtype of the logits: O(N·V) time, one matrix of memory. torch's own writes
    log-probabilities, their gradient and, below float32, copies of logits and gradient: five.
    Elsewhere, and where torch traces or transforms, torch's own is called.

    Paper of the smoothing: Szegedy et al. 2016, arXiv 1512.00567, section 7.

    Args:
        logits: (N, V).
        labels: (N,) int64, from 0 to V − 1, or −100 for rows that do not count.
        label_smoothing: ε.

    Returns:
        (N,), 0 where the label is −100.

    Raises:
        IndexError: a label outside of the vocabulary.
        RuntimeError: at ``create_graph=True``; the gradient has no gradient, for which the logits
            would have to be kept as well.

    Example:
        >>> logits = torch.randn(3, 7, requires_grad=True)
        >>> token_cross_entropy(logits, torch.tensor([6, -100, 0]), 0.1).shape
        torch.Size([3])
    """
    if logits.device.type != "cpu" or torch.compiler.is_compiling() or transformed():
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(wide, labels, label_smoothing=label_smoothing, reduction="none")
    out: Tensor = _CrossEntropy.apply(logits, labels, label_smoothing)  # type: ignore[no-untyped-call]
    return out


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        rows, words = logits.shape
        kept = labels != -100
        places = labels.where(kept, 0).unsqueeze(1)
        if rows and not 0 <= int(places.min()) <= int(places.max()) < words:
            raise IndexError(
                f"labels are from {int(places.min())} to {int(places.max())}; logits have "
                f"{words} words, and only -100 stands for none"
            )
        dtype = torch.promote_types(logits.dtype, torch.float32)
        losses = logits.new_empty(rows, dtype=dtype)
        wanted = ctx.needs_input_grad[0]
        gradient = torch.empty_like(logits) if wanted else None
        count = max(1, CHUNK // max(1, words))
        for start in range(0, rows, count):
            part = slice(start, start + count)
            own = logits[part].to(dtype)
            top = own.amax(1, keepdim=True)
            shifted = own - top
            of_label = shifted.gather(1, places[part])
            of_all = shifted.sum(1, keepdim=True) if smoothing else 0.0
            total = shifted.exp_().sum(1, keepdim=True)
            loss = total.log() - (1.0 - smoothing) * of_label - smoothing / words * of_all
            losses[part] = loss.squeeze(1)
            if gradient is not None:
                shifted.div_(total)
                shifted.scatter_add_(
                    1, places[part], shifted.new_full((1, 1), smoothing - 1.0).expand_as(of_label)
                )
                gradient[part] = shifted.sub_(smoothing / words) if smoothing else shifted
        if gradient is not None and not bool(kept.all()):
            gradient.masked_fill_(~kept.unsqueeze(1), 0.0)  # whatever stands there, even NaN
        ctx.save_for_backward(gradient, kept)
        return losses.where(kept, 0.0)

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None, None]:
        refuse_graph("token_cross_entropy", "torch.nn.functional.cross_entropy has one")
        gradient, kept = ctx.saved_tensors
        factors = outer.where(kept, 0.0).unsqueeze(1).to(gradient.dtype)
        return gradient * factors, None, None
