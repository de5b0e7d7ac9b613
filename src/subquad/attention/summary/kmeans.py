"""Lloyd's k-means for many heads at once: sums by cluster, nearest centres, iterations.

Everything is held fixed in the backward pass but `sums`, which passes gradients to its rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.kernels.native import clusters as native

__all__ = ["coded", "lloyd", "nearest", "sums"]

SCORE_BYTES = 2 * 2**20
"""Bytes of the scores of one chunk of rows against all centres."""


def sums(x: Tensor, cluster: Tensor, count: int, weight: Tensor | None = None) -> Tensor:
    """Σ of the rows of x (B, h, N, D), times weights (B, h, N), by cluster, (B, h, count, D)."""
    if native.takes(x) if weight is None else native.takes(x, weight):
        return native.sums(x, cluster, count, weight)
    if weight is not None:
        x = weight[..., None] * x
    batch, heads, _, dim = x.shape
    first = torch.arange(batch * heads, device=x.device).view(batch, heads, 1) * count
    total = x.new_zeros(batch * heads * count, dim)
    total = total.index_add(0, (first + cluster).flatten(), x.flatten(0, 2))
    return total.view(batch, heads, count, dim)


def coded(x: Tensor, *, over: bool = False) -> tuple[Tensor, int]:
    """Integers ordered as the entries of x ≥ 0 (…, n), and the bits that hold their index.

    The bits of positive floats are ordered as the numbers are. With the index in place of the
    last ones, the largest integer is value and index at once, and ``amax`` runs on vector units
    where ``argmax`` and ``topk`` do not; entries that differ in these bits alone count as equal.
    They take the place of x if `over`.
    """
    total = x.shape[-1]
    last = (1 << (total - 1).bit_length()) - 1
    bits = x.view(torch.int64 if x.dtype == torch.float64 else torch.int32)
    index = torch.arange(total, device=x.device, dtype=bits.dtype)
    bits = bits.bitwise_and_(~last) if over else bits & ~last
    return bits.bitwise_or_(index), last


def nearest(x: Tensor, centres: Tensor, usable: Tensor | None = None) -> Tensor:
    """The nearest (usable) centre of each row, (B, h, N): of equally near ones the first.

    Near to within rounding of |x|² and the last bits of ½|x − c|², see `coded`.

    Cost 2·N·C·D FLOPs a head; scores exist for 2 MiB of rows at a time.

    Args:
        x: (B, h, N, D), float32 or float64.
        centres: (B, h, C, D).
        usable: (B, h, C) bool, or None for all.
    """
    half = 0.5 * centres.square().sum(-1, keepdim=True)
    if usable is not None:
        half = half.masked_fill(~usable[..., None], float("inf"))
    if native.takes(x, centres):
        return native.nearest(x, centres, half[..., 0])
    # ½|x − c|² in one product, [x | 1 | ½|x|²] [−c | ½|c|² | 1]ᵀ: not negative but by rounding.
    columns = torch.cat([-centres, half, torch.ones_like(half)], -1).mT
    rows = F.pad(x, (0, 2), value=1.0)
    rows[..., -1] = 0.5 * x.square().sum(-1)
    found = []
    for part in rows.split(max(1, SCORE_BYTES // (half.numel() * x.element_size())), 2):
        code, last = coded(part @ columns, over=True)
        found.append((code.amin(-1) & last).long())
    return torch.cat(found, 2)


def lloyd(
    x: Tensor,
    weight: Tensor,
    centres: Tensor,
    iterations: int,
    *,
    usable: Tensor | None = None,
    signs: bool = False,
) -> Tensor:
    """Centres (B, h, C, D) after some iterations of assignment and weighted means.

    A centre whose rows weigh nothing keeps its place.

    Args:
        x: (B, h, N, D), finite also where a row weighs nothing.
        weight: (B, h, N), of each row in the means.
        centres: (B, h, C, D), first ones.
        iterations: how many.
        usable: (B, h, C) bool, centres that rows are assigned to; None: all.
        signs: centres are the signs of sums, for the Hamming distance.
    """
    count = centres.shape[2]
    counted = F.pad(x, (0, 1), value=1.0)
    for _ in range(iterations):
        total = sums(counted, nearest(x, centres, usable), count, weight)
        found, held = total[..., :-1], total[..., -1:]
        if signs:
            mean = (found >= 0).to(x.dtype) * 2 - 1
        else:
            mean = found / torch.where(held > 0, held, torch.ones_like(held))
        centres = torch.where(held > 0, mean, centres)
    return centres
