"""Rows of token ids as batches of about the same size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

__all__ = ["batches_by_tokens", "padded"]


def batches_by_tokens(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Numbers of rows, long ones first, at most `tokens` in a batch with its padding.

    A row that is longer than that has a batch of its own.
    """
    batch: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def padded(
    rows: Sequence[Sequence[int]], padding: int, device: torch.device | str
) -> dict[str, Tensor]:
    """``input_ids`` and ``attention_mask`` (B, L), padded at the right."""
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), padding)
    mask = torch.zeros_like(ids)
    for at, row in enumerate(rows):
        ids[at, : len(row)] = torch.as_tensor(row)
        mask[at, : len(row)] = 1
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
