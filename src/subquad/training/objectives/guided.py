"""Guided attention: losses that ask an alignment to run along the diagonal, or never back.

Alignments are the weights of cross-attentions, (B, H, L, S) for L queries and S keys, as
`TransformerDecoder` records them (``record=``). Speech and text, a text and its transliteration
or its summary in order: where both sides are told in the same order, these losses say so to a
model that would need many examples to find it out. Between languages of different word order
the diagonal one is wrong in detail; use it with a wide band, or for the first steps alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.errors import DtypeError, OptionError, ShapeError

__all__ = ["diagonal_loss", "diagonality", "monotonic_loss", "monotonicity"]


def diagonal_loss(
    alignment: Tensor,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    *,
    width: float = 0.2,
) -> Tensor:
    """Mean weight off the diagonal, a scalar ≥ 0 for weights ≥ 0.

        loss = E_nt[A_nt · W_nt],   W_nt = 1 − exp(−(n/N − t/T)² / 2g²)

    with n = 1 … N of a row's kept keys and t = 1 … T of its kept queries, so that padding on
    either side of either sequence neither counts nor moves the diagonal. The mean is over the
    N·T pairs of each row as in the paper, then over heads and rows. As a query's weights sum to
    1, it falls with 1/N: for a penalty that is the same at all lengths multiply by N.

    Cost O(B·H·L·S).

    Paper: Tachibana, Uenoyama, Aihara 2017, arXiv 1710.08969 (DC-TTS), section 4.1. Deviation:
    none; heads and batches are ours.

    Args:
        alignment: (B, H, L, S) weights, differentiable.
        query_mask: (B, L) bool, True = kept; default all.
        key_mask: (B, S) bool, True = kept; default all.
        width: g, of the valley along the diagonal, as a share of the whole.

    Raises:
        ShapeError, DtypeError: if an argument does not fit.
        OptionError: if `width` is not > 0.

    Example:
        >>> import torch
        >>> from subquad.training.objectives.guided import diagonal_loss
        >>> straight, uniform = torch.eye(50)[None, None], torch.full((1, 1, 50, 50), 1 / 50)
        >>> diagonal_loss(straight).item()
        0.0
        >>> round(50 * diagonal_loss(uniform).item(), 3)
        0.579
    """
    if not isinstance(width, int | float) or not width > 0:
        raise OptionError(f"width={width!r} must be a number > 0")
    weights, queries, keys = _checked(alignment, query_mask, key_mask)
    t, n = _places(queries, weights), _places(keys, weights)
    far = -torch.expm1(-(t[:, :, None] - n[:, None, :]).square() / (2 * width**2))
    far = far * (queries[:, :, None] & keys[:, None, :])
    pairs = (queries.sum(1) * keys.sum(1)).clamp_min(1)
    return ((weights * far[:, None]).sum((2, 3)) / pairs[:, None]).mean()


def monotonic_loss(
    alignment: Tensor, query_mask: Tensor | None = None, key_mask: Tensor | None = None
) -> Tensor:
    """How far the attended place moves backwards, in lengths of the source: a scalar ≥ 0.

        loss = Σ_t max(0, E_{t−1} − E_t),   E_t = Σ_n A_nt · n/N

    E_t is the expected place of query t among a row's kept keys. The sum is over pairs of
    neighbouring kept queries, the mean over heads and rows. Zero for every alignment whose
    expected place never goes back, straight or not, and for one that does not move at all: it
    does not make attention sharp, and alone it is content with none. Add it to a loss that
    needs the source.

    Cost O(B·H·L·S).

    Ours: papers on monotonic attention (Raffel et al. 2017, arXiv 1704.00784) change the
    attention instead; this is the penalty that says the least.

    Args:
        alignment: (B, H, L, S) weights that sum to 1 over keys, differentiable.
        query_mask: (B, L) bool, True = kept; default all.
        key_mask: (B, S) bool, True = kept; default all.

    Raises:
        ShapeError, DtypeError: if an argument does not fit.

    Example:
        >>> import torch
        >>> from subquad.training.objectives.guided import monotonic_loss
        >>> straight = torch.eye(4)[None, None]
        >>> monotonic_loss(straight).item(), monotonic_loss(straight.flip(-1)).item()
        (0.0, 0.75)
    """
    return _moves(alignment, query_mask, key_mask).neg().relu().sum(-1).mean()


def diagonality(
    alignment: Tensor,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    *,
    band: float = 0.1,
) -> Tensor:
    """Share of the weight within a band along the diagonal, (B, H), from 0 to 1.

        Σ_nt A_nt · [|n/N − t/T| ≤ band] / T

    Uniform attention has about 2·band − band². A number for looking, without gradient; the
    definition is ours. Arguments and errors as in `diagonal_loss`.

    Example:
        >>> import torch
        >>> from subquad.training.objectives.guided import diagonality
        >>> diagonality(torch.eye(50)[None, None]).item()
        1.0
    """
    if not isinstance(band, int | float) or not band >= 0:
        raise OptionError(f"band={band!r} must be a number ≥ 0")
    weights, queries, keys = _checked(alignment.detach(), query_mask, key_mask)
    t, n = _places(queries, weights), _places(keys, weights)
    rounding = 4 * torch.finfo(t.dtype).eps  # of the places, so that the edge belongs to the band
    near = (t[:, :, None] - n[:, None, :]).abs() <= band + rounding
    near = near & queries[:, :, None] & keys[:, None, :]
    total = (weights * near[:, None]).sum((2, 3))
    return total / queries.sum(1).clamp_min(1)[:, None]


def monotonicity(
    alignment: Tensor, query_mask: Tensor | None = None, key_mask: Tensor | None = None
) -> Tensor:
    """Share of the attended place's moves that go forwards, (B, H), from 0 to 1.

        1 − Σ_t max(0, E_{t−1} − E_t) / Σ_t |E_t − E_{t−1}|

    with E_t as in `monotonic_loss`: 1 if it never goes back (or never moves), 0 if it always
    does, about ½ if it wanders. Without gradient; the definition is ours. Arguments and errors
    as there.

    Example:
        >>> import torch
        >>> from subquad.training.objectives.guided import monotonicity
        >>> monotonicity(torch.eye(4)[None, None].flip(-1)).item()
        0.0
    """
    moves = _moves(alignment.detach(), query_mask, key_mask)
    path = moves.abs().sum(-1)
    back = moves.neg().relu().sum(-1)
    return torch.where(path > 0, 1 - back / path.masked_fill(path == 0, 1), 1.0)


def _moves(alignment: Tensor, query_mask: Tensor | None, key_mask: Tensor | None) -> Tensor:
    """E_t − E_{t−1} (B, H, L−1), zero where one of both queries is not kept."""
    weights, queries, keys = _checked(alignment, query_mask, key_mask)
    expected = weights @ _places(keys, weights)[:, None, :, None]
    both = queries[:, 1:] & queries[:, :-1]
    return expected.squeeze(-1).diff(dim=-1).masked_fill(~both[:, None], 0)


def _places(kept: Tensor, like: Tensor) -> Tensor:
    """1/N … N/N of each row's N kept tokens (B, length); zero where a token is not kept."""
    rank = kept.cumsum(1).to(like.dtype)
    return (rank / kept.sum(1, keepdim=True).clamp_min(1)).masked_fill(~kept, 0)


def _checked(
    alignment: Tensor, query_mask: Tensor | None, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights in float32 or float64, zero outside of the masks, and both masks."""
    if alignment.dim() != 4:
        raise ShapeError(f"alignment must be (B, H, L, S), given {tuple(alignment.shape)}")
    if not alignment.is_floating_point():
        raise DtypeError(f"alignment must be floats, given {alignment.dtype}")
    masks = []
    pairs = (("query_mask", query_mask, "L", 2), ("key_mask", key_mask, "S", 3))
    for name, mask, letter, dimension in pairs:
        wanted = (alignment.shape[0], alignment.shape[dimension])
        if mask is None:
            mask = torch.ones(wanted, dtype=torch.bool, device=alignment.device)
        if tuple(mask.shape) != wanted:
            raise ShapeError(f"{name} must be (B, {letter}) = {wanted}, given {tuple(mask.shape)}")
        if mask.dtype != torch.bool:
            raise DtypeError(f"{name} must be torch.bool, True = kept, given {mask.dtype}")
        masks.append(mask)
    queries, keys = masks
    weights = alignment.to(torch.promote_types(alignment.dtype, torch.float32))
    # zeros, not a product with the mask: what padding holds never matters, 0·NaN = NaN
    closed = ~(queries[:, None, :, None] & keys[:, None, None, :])
    return weights.masked_fill(closed, 0), queries, keys
