"""Batches of about equal numbers of tokens, made of examples of about equal length."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler

from subquad.errors import OptionError, ShapeError
from subquad.options import flag_problem, integer_problem

__all__ = ["TokenBatches", "pad_batch", "pad_rows"]

# ---- which examples make a batch ---------------------------------------------------------------


class TokenBatches(Sampler[list[int]]):
    """A batch sampler: lists of indices, at most `tokens` padded tokens each.

    A batch of n examples counts n · max(longest source, longest target). Each epoch is a new
    permutation, cut into pools; a pool is sorted by length and cut into batches, and all
    batches are shuffled. Every index occurs once an epoch. The order depends on (seed, epoch)
    alone, so a run goes on at any batch without reading an example. An epoch costs
    O(N log pool) time and O(N) memory; how many batches it has may vary by a few.

    An example longer than `tokens` makes a batch of its own; `oversized` counts them.

    ::

        loader = DataLoader(rows, batch_sampler=batches, collate_fn=pad_batch)

    Args:
        lengths: tokens of each example: (N,), or (N, 2) for source and target.
        tokens: most padded tokens of a batch.
        sentences: most examples of a batch; with ``tokens=None`` the only limit.
        seed: of all permutations.
        pool: examples sorted together; N or more sorts all of them (least padding, least
            random).
        shuffle: False keeps batches in the order of length and the examples of a length in
            the given order, the same in each epoch: for evaluation.

    Attributes:
        oversized: how many examples are longer than `tokens`.
        epoch: whose order is given.

    Raises:
        OptionError: no limit, or a number that is no positive integer; all are named.
        ShapeError: lengths of another shape, none, or one below 1.

    Example:
        >>> batches = TokenBatches([3, 9, 2, 8, 3], tokens=18, shuffle=False)
        >>> list(batches)
        [[2, 0, 4], [3, 1]]
    """

    def __init__(
        self,
        lengths: Tensor | Sequence[int] | Sequence[Sequence[int]],
        *,
        tokens: int | None = 4096,
        sentences: int | None = None,
        seed: int = 0,
        pool: int = 8192,
        shuffle: bool = True,
    ) -> None:
        limits = {"tokens": tokens, "sentences": sentences}
        problems = [
            problem
            for name, value in {**limits, "pool": pool}.items()
            if value is not None
            for problem in integer_problem(name, value, 1)
        ]
        problems += [*integer_problem("seed", seed, 0), *flag_problem("shuffle", shuffle)]
        if tokens is None and sentences is None:
            problems.append("give tokens= or sentences=")
        if problems:
            raise OptionError("; ".join(problems))
        table = torch.as_tensor(lengths)
        if table.ndim == 1:
            table = table[:, None]
        if table.ndim != 2 or not table.numel() or table.is_floating_point():
            raise ShapeError(
                f"lengths must be integers of shape (N,) or (N, sides), N ≥ 1, given "
                f"{table.dtype} of shape {tuple(table.shape)}"
            )
        if int(table.min()) < 1:
            raise ShapeError(f"lengths must be ≥ 1, given {int(table.min())}")
        self._longest = table.amax(1)
        # Among equally long examples the shorter sides lie together too.
        self._key = self._longest.long() * (int(table.max()) + 1) + table.amin(1)
        self._tokens, self._sentences = tokens, sentences
        self._seed, self._pool, self._shuffle = seed, pool, shuffle
        self.oversized = 0 if tokens is None else int((self._longest > tokens).sum())
        self.epoch = self._start = 0
        self._order: tuple[int, list[list[int]]] | None = None

    def set_epoch(self, epoch: int) -> None:
        """The order of this epoch, from its first batch; the epoch under way is left alone.

        Giving the epoch that is set already keeps the batch to go on from.
        """
        if epoch != self.epoch:
            self.start_at(epoch)

    def start_at(self, epoch: int, batch: int = 0) -> None:
        """The next iteration gives batches `batch`, `batch` + 1, … of this epoch, once.

        Raises:
            OptionError: a negative number, or a batch behind the epoch's end.
        """
        problems = [*integer_problem("epoch", epoch, 0), *integer_problem("batch", batch, 0)]
        if problems:
            raise OptionError("; ".join(problems))
        self.epoch = epoch
        if batch > len(self._batches()):
            raise OptionError(f"batch={batch}: epoch {epoch} has {len(self._batches())} batches")
        self._start = batch

    @property
    def state(self) -> dict[str, int]:
        """Epoch and next batch, as given out; set it to go on from there.

        With workers a `DataLoader` asks ahead of what has been trained on: a training loop
        that keeps its own count calls `start_at`.
        """
        return {"epoch": self.epoch, "batch": self._start}

    @state.setter
    def state(self, state: Mapping[str, int]) -> None:
        self.start_at(state["epoch"], state["batch"])

    def state_dict(self) -> dict[str, int]:
        """`state`, by torch's name for it."""
        return self.state

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Sets `state`, by torch's name for it."""
        self.state = dict(state)

    def __len__(self) -> int:
        """Batches of the whole epoch."""
        return len(self._batches())

    def __iter__(self) -> Iterator[list[int]]:
        batches = self._batches()
        while self._start < len(batches):
            self._start += 1
            yield batches[self._start - 1]
        self._start = 0

    @property
    def padding(self) -> float:
        """Share of the epoch's tokens that is padding, counting each example's longer side."""
        places = sum(len(rows) * int(self._longest[rows].max()) for rows in self._batches())
        return 1 - int(self._longest.sum()) / places

    def _batches(self) -> list[list[int]]:
        if self._order is None or self._order[0] != self.epoch:
            self._order = (self.epoch, self._cut())
        return self._order[1]

    def _cut(self) -> list[list[int]]:
        count = len(self._key)
        if not self._shuffle:
            return self._cut_sorted(self._key.argsort(stable=True))
        mixed = (self._seed * 0x9E3779B97F4A7C15 + self.epoch) % 2**63
        draws = torch.Generator().manual_seed(mixed)
        order = torch.randperm(count, generator=draws)
        found = []
        for pool in order.split(self._pool):
            found += self._cut_sorted(pool[self._key[pool].argsort(stable=True)])
        return [found[i] for i in torch.randperm(len(found), generator=draws).tolist()]

    def _cut_sorted(self, order: Tensor) -> list[list[int]]:
        """Batches of examples in ascending order: each as large as the limits allow."""
        rows, sizes = order.tolist(), self._longest[order].tolist()
        found, start = [], 0
        while start < len(rows):
            most = min(self._sentences or len(rows), len(rows) - start)
            if self._tokens is not None:
                # n · sizes[start + n - 1] grows with n: the first n that is too many
                padded = range(1, most + 1)
                most = bisect.bisect_right(
                    padded, self._tokens, key=lambda n: n * sizes[start + n - 1]
                )
            end = start + max(1, most)
            found.append(rows[start:end])
            start = end
        return found


# ---- examples as one batch ---------------------------------------------------------------------

FILL = {"attention_mask": 0, "decoder_attention_mask": 0, "token_type_ids": 0, "labels": -100}
"""What padding holds, by name; `input_ids` take the pad token's id, others 0."""


def pad_rows(
    rows: Sequence[Mapping[str, Any]], *, pad: int = 0, multiple: int = 1
) -> dict[str, Tensor]:
    """Stacks examples, ragged ones padded at the right to the longest, O(rows · longest).

    Adds ``attention_mask`` (1 = attend) where there are ``input_ids`` and no mask.

    Args:
        rows: examples with the same names: tensors, or lists of numbers.
        pad: id of the padding token.
        multiple: padded lengths are rounded up to a multiple of it.

    Raises:
        ShapeError: no rows, or rows whose names differ.

    Example:
        >>> pad_rows([{"input_ids": [5, 2]}, {"input_ids": [7, 8, 2]}])["input_ids"]
        tensor([[5, 2, 0],
                [7, 8, 2]])
    """
    if not rows:
        raise ShapeError("rows is empty: a batch needs an example")
    batch = {}
    for name in rows[0]:
        if any(row.keys() != rows[0].keys() for row in rows):
            raise ShapeError("rows must have the same names in each example of a batch")
        values = [torch.as_tensor(row[name]) for row in rows]
        if values[0].ndim:
            fill = pad if name == "input_ids" else FILL.get(name, 0)
            longest = max(len(value) for value in values)
            short = -(-longest // multiple) * multiple - len(values[0])
            # The first row sets the length where it has to be rounded up.
            values[0] = nn.functional.pad(
                values[0], (*[0, 0] * (values[0].ndim - 1), 0, short), value=fill
            )
            batch[name] = nn.utils.rnn.pad_sequence(values, True, padding_value=fill)
        else:
            batch[name] = torch.stack(values)
    if "input_ids" in batch and "attention_mask" not in batch:
        sizes = torch.tensor([len(row["input_ids"]) for row in rows])
        places = torch.arange(batch["input_ids"].shape[1])
        batch["attention_mask"] = (places < sizes[:, None]).long()
    return batch


def pad_batch(
    rows: Sequence[Mapping[str, Any]],
    *,
    pad: int = 0,
    bos: int = 1,
    multiple: int = 1,
    decoder_mask: bool = False,
) -> dict[str, Tensor]:
    """A batch for an encoder–decoder, with teacher forcing: y₀ = bos, then y₁ … yₙ.

    Rows hold ``input_ids`` and ``labels`` = (y₁, …, yₙ, eos), as `EncodedPairs` gives them;
    the batch has besides ``attention_mask`` and ``decoder_input_ids`` = (bos, y₁, …, yₙ).
    Labels are padded with −100, which torch's cross entropy leaves out.

    Args:
        rows: examples; further names are padded with 0.
        pad: id of the padding token.
        bos: id of the token that starts the decoder.
        multiple: padded lengths are rounded up to a multiple of it.
        decoder_mask: adds ``decoder_attention_mask``. A causal decoder does not need it, as
            padding stands behind all that it could change.

    Raises:
        ShapeError: as in `pad_rows`; rows without labels.

    Example:
        >>> rows = [{"input_ids": [5, 2], "labels": [6, 7, 2]}, {"input_ids": [2], "labels": [2]}]
        >>> batch = pad_batch(rows)
        >>> batch["decoder_input_ids"]
        tensor([[1, 6, 7],
                [1, 0, 0]])
        >>> batch["labels"]
        tensor([[   6,    7,    2],
                [   2, -100, -100]])
    """
    batch = pad_rows(rows, pad=pad, multiple=multiple)
    if "labels" not in batch or batch["labels"].ndim != 2:
        raise ShapeError("rows must have labels of shape (L,), the target's tokens and eos")
    labels = batch["labels"]
    inputs = labels.roll(1, dims=1)
    inputs[:, 0] = bos
    # Behind the last label the shifted row holds eos; it is no input.
    real = labels != FILL["labels"]
    batch["decoder_input_ids"] = inputs.masked_fill(~real, pad)
    if decoder_mask:
        batch["decoder_attention_mask"] = real.long()
    return batch
