"""Documents packed into blocks of one length, for language models: no token lost, no padding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from subquad.data.encoded import EncodedLines
from subquad.errors import OptionError
from subquad.options import integer_problem

__all__ = ["PackedLines", "packed"]


def packed(
    token_lists: Iterable[Sequence[int]],
    length: int,
    *,
    eos: int | None = None,
    boundaries: bool = False,
) -> Iterator[dict[str, Tensor]]:
    """Blocks of `length` tokens, cut from the documents put end to end; the last is shorter.

    Documents are read one by one: memory O(length + longest document).

    Args:
        token_lists: ids of each document.
        length: tokens of a block.
        eos: put behind each document that does not end in it; None adds nothing.
        boundaries: adds ``segment_ids``, which count the documents in a block from 0, and
            ``position_ids``, which start at 0 in each document of a block, so that a mask
            (``Mask(segments=…)``) and positions can keep documents apart.

    Yields:
        ``input_ids`` and ``labels``, the same ids, as causal models of transformers want them.

    Raises:
        OptionError: `length` is no positive integer.

    Example:
        >>> for block in packed([[5, 6], [7], [8, 9]], 4, eos=2, boundaries=True):
        ...     print(block["input_ids"].tolist(), block["segment_ids"].tolist())
        [5, 6, 2, 7] [0, 0, 0, 1]
        [2, 8, 9, 2] [0, 1, 1, 1]
    """
    _check(length)
    return _packed(token_lists, length, eos, boundaries)


def _packed(
    token_lists: Iterable[Sequence[int]], length: int, eos: int | None, boundaries: bool
) -> Iterator[dict[str, Tensor]]:
    tokens: list[int] = []
    starts: list[int] = []
    for document in token_lists:
        if len(document) or eos is not None:
            starts.append(len(tokens))
        tokens.extend(document)
        if eos is not None and (not len(document) or document[-1] != eos):
            tokens.append(eos)
        while len(tokens) >= length:
            yield _block(torch.tensor(tokens[:length]), starts if boundaries else None)
            del tokens[:length]
            starts = [start - length for start in starts if start >= length]
    if tokens:
        yield _block(torch.tensor(tokens), starts if boundaries else None)


def _block(tokens: Tensor, starts: Sequence[int] | None) -> dict[str, Tensor]:
    block = {"input_ids": tokens, "labels": tokens.clone()}
    if starts is not None:
        begins = torch.zeros_like(tokens)
        begins[[start for start in starts if 0 < start < len(tokens)]] = 1
        places = torch.arange(len(tokens))
        block["segment_ids"] = begins.cumsum(0)
        block["position_ids"] = places - (places * begins).cummax(0).values
    return block


class PackedLines(Sequence[dict[str, Tensor]]):
    """Blocks of encoded lines, in any order and from the disk; block i is tokens i·L … (i+1)·L.

    What `packed` gives, as a map-style data set: a block costs O(length + its documents).

    Args:
        lines: encoded documents, each with its end-of-text token.
        length: tokens of a block; the last block is shorter.
        boundaries: as in `packed`.

    Raises:
        OptionError: `length` is no positive integer.
        IndexError: no such block.
    """

    def __init__(self, lines: EncodedLines, length: int, *, boundaries: bool = False) -> None:
        _check(length)
        self._lines, self._length, self._boundaries = lines, length, boundaries

    @property
    def lengths(self) -> Tensor:
        """Tokens of each block (N,)."""
        found = torch.full((len(self),), self._length)
        found[-1] = self._lines.total - (len(self) - 1) * self._length
        return found

    def __len__(self) -> int:
        return -(-self._lines.total // self._length)

    def __getitem__(self, index: int) -> dict[str, Tensor]:  # type: ignore[override]  # no slices
        place = range(len(self))[index] * self._length
        tokens = self._lines.tokens(place, place + self._length)
        starts = self._lines.starts(place, place + len(tokens)) if self._boundaries else None
        return _block(tokens, starts)


def _check(length: int) -> None:
    if problems := list(integer_problem("length", length, 1)):
        raise OptionError("; ".join(problems))
