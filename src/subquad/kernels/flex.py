"""The block engine's layouts as FlexAttention block masks, for GPUs.

One specification, two lowerings: `subquad.kernels.block` loops over blocks of queries;
here the same `Layout`, table, key mask and segments become a `BlockMask`, whose key blocks
are skipped by torch's fused kernel and whose `mask_mod` settles single tokens.

FlexAttention trains on GPUs only (on CPUs its backward pass raises), compiles once for each
kind of mask and has no float64, so that `block_softmax` takes it for CUDA tensors alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subquad.kernels.block import EMPTY, Layout, tokens, undilated

__all__ = ["block_mask", "flex_softmax", "refusal"]

BLOCK = 128
"""Tokens of a block of the mask where the layout does not fix one."""


def refusal(q: Tensor, v: Tensor, layout: Layout) -> str | None:
    """Why FlexAttention cannot run a call, or None if it can."""
    if not q.is_cuda:
        return f"FlexAttention has no backward pass on {q.device.type}"
    if q.dtype == torch.float64:
        return "FlexAttention has no float64"
    if min(q.shape[-1], v.shape[-1]) < 16:
        return "FlexAttention needs heads of at least 16"
    if layout.aligned and layout.block % BLOCK:
        return f"FlexAttention's blocks are multiples of {BLOCK}, given {layout.block}"
    if layout.width is not None:
        return "FlexAttention's mask has one block size, these keys have another"
    return None


def block_mask(
    layout: Layout,
    batch: int,
    heads: int,
    groups: int,
    queries: int,
    keys: int,
    *,
    table: Tensor | None = None,
    key: Tensor | None = None,
    segments: tuple[Tensor, Tensor] | None = None,
    device: torch.device | str = "cpu",
) -> Any:
    """A `torch.nn.attention.flex_attention.BlockMask` of what `block_softmax` reads.

    Args:
        layout: without dilation: `flex_softmax` regroups tokens first.
        batch, heads, groups: B, H and query heads per key/value head.
        queries, keys: L and S.
        table, key, segments: as in `block_softmax`.
        device: of the call's tensors.
    """
    from torch.nn.attention.flex_attention import BlockMask

    size = layout.block if layout.aligned else BLOCK
    rows, columns = -(-queries // size), -(-keys // size)
    low = torch.arange(rows, device=device) * size + layout.offset
    high = (low + size - 1).clamp_max(queries - 1 + layout.offset)
    if layout.aligned:
        first = (low // size - layout.left) * size
        last = (high // size + layout.right + 1) * size - 1
    else:
        first, last = low - layout.left, high + layout.right
    if layout.causal:
        last = torch.minimum(last, high)
    block = torch.arange(columns, device=device)
    read = torch.zeros(1, rows, columns, dtype=torch.bool, device=device)
    if layout.span:
        read = ((block >= first[:, None] // size) & (block <= last[:, None] // size))[None]
    if table is not None:
        for at in (low, high):  # a block of queries may straddle two of the layout's
            entries = table[:, at // size - layout.offset // size]  # (P, rows, r)
            read = read | (entries[..., None] == block).any(-2)
        if table.shape[0] > 1:
            read = read.repeat_interleave(groups, 0)
    count = read.sum(-1, dtype=torch.int32)[None]
    order = read.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)[None]
    return BlockMask.from_kv_blocks(
        count.expand(batch, -1, -1),
        order.expand(batch, -1, -1, -1),
        BLOCK_SIZE=size,
        mask_mod=_mask_mod(layout, groups, table, key, segments, device),
        seq_lengths=(queries, keys),
    )


def _mask_mod(
    layout: Layout,
    groups: int,
    table: Tensor | None,
    key: Tensor | None,
    segments: tuple[Tensor, Tensor] | None,
    device: torch.device | str,
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    # A tensor, so that another length does not compile again.
    offset = torch.tensor(layout.offset, device=device)

    def allowed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        position = i + offset
        if layout.aligned:
            own, other = position // layout.block, j // layout.block
            read = (own - other <= layout.left) & (other - own <= layout.right)
            read = read & ((own - other).abs() >= layout.skip)
        else:
            read = (position - j <= layout.left) & (j - position <= layout.right)
            read = read & ((position - j).abs() >= layout.skip)
        if not layout.span:
            read = read & False
        if table is not None:
            kind = h // groups if table.shape[0] > 1 else h * 0
            row = position // layout.block - offset // layout.block
            for slot in range(table.shape[-1]):
                read = read | (table[kind, row, slot] == j // layout.block)
        if layout.causal:
            read = read & (j <= position)
        if key is not None:
            read = read & key[b, j]
        if segments is not None:
            read = read & (segments[0][b, i] == segments[1][b, j])
        return read

    return allowed


@functools.cache
def _function(compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if compiled else flex_attention


def _call(run: Any, *tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; torch renamed the request for the latter in 2.9."""
    from torch.nn.attention import flex_attention as module

    if hasattr(module, "AuxRequest"):
        out, aux = run(*tensors, return_aux=module.AuxRequest(lse=True), **options)
        return out, aux.lse
    out, lse = run(*tensors, return_lse=True, **options)
    return out, lse


def flex_softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    *,
    scale: float,
    table: Tensor | None = None,
    key: Tensor | None = None,
    segments: tuple[Tensor, Tensor] | None = None,
    compiled: bool = True,
) -> tuple[Tensor, Tensor]:
    """The same as `block_softmax` with ``need_lse=True``, by FlexAttention.

    `compiled=False` runs torch's own slow definition, which materialises the scores: for
    comparison on a CPU.
    """
    queries, steps, front = q.shape[2], layout.dilation, layout.offset % layout.dilation
    plain, (first, second) = layout, segments or (None, None)
    if steps > 1:
        plain, q, k, v, key, first, second = undilated(layout, q, k, v, key, first, second)
    segments = None if first is None or second is None else (first, second)
    mask = block_mask(
        plain, q.shape[0], q.shape[1], q.shape[1] // k.shape[1], q.shape[2], k.shape[2],
        table=table, key=key, segments=segments, device=q.device,
    )  # fmt: skip
    out, lse = _call(
        _function(compiled),
        q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    empty = lse == float("-inf")
    out = out.masked_fill(empty[..., None], 0.0)
    lse = lse.masked_fill(empty, EMPTY)
    if steps > 1:
        out = tokens(out, steps, front, queries)
        lse = tokens(lse[..., None], steps, front, queries)[..., 0]
    return out, lse
