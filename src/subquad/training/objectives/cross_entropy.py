"""Cross entropy with label smoothing, of the places that have a label."""

from __future__ import annotations

from torch import Tensor

from subquad.models.entropy import token_cross_entropy
from subquad.training.objectives.reading import Reading, Seen

__all__ = ["cross_entropy", "losses"]


def cross_entropy(reading: Reading, seen: Seen, label_smoothing: float = 0.0) -> Tensor:
    """The mean over labels of −Σ_v q_v log p_v, a scalar; 0 without a label.

        q_v = (1 − ε)·[v = label] + ε/V,   p = softmax(W·hidden)

    Vectors without a label are not mapped to the vocabulary: of a batch that is padded by a half
    that is half of the work and of the memory, O(labels·C·V). Where the model copies words of
    the source, p is `subquad.models.copy.PointerGenerator`'s, and ε is shared by the words that
    a row has.

    Papers: Szegedy et al. 2016, arXiv 1512.00567, section 7; in Vaswani et al. 2017, arXiv
    1706.03762, section 5.4, ε = 0.1.

    Args:
        reading: a batch.
        seen: what the decoder has made of it.
        label_smoothing: ε.
    """
    found = losses(reading, seen, reading.labels, label_smoothing)
    return found.sum() / (reading.labels != -100).sum().clamp_min(1)


def losses(reading: Reading, seen: Seen, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """The cross entropies (N,) of the N labels that are not −100, in their order.

    Args:
        reading: that was seen.
        seen: (B, L) places.
        labels: (B, L).
        label_smoothing: ε.
    """
    places = labels != -100
    logits = reading.logits(seen, places)
    if reading.copies:
        from subquad.models.copy import token_losses

        return token_losses(logits, labels[places], label_smoothing)
    return token_cross_entropy(logits, labels[places], label_smoothing)
