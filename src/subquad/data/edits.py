"""How far one sequence is from another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from subquad.errors import OptionError

__all__ = ["edit_distance", "error_rate"]


def edit_distance(wanted: Sequence[Any], given: Sequence[Any]) -> int:
    """Least number of substitutions, insertions and deletions (Levenshtein); O(N·M).

    >>> edit_distance("kitten", "sitting")
    3
    """
    row = list(range(len(given) + 1))
    for i, one in enumerate(wanted, 1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(given, 1):
            best = min(row[j] + 1, row[j - 1] + 1, diagonal + (one != other))
            diagonal, row[j] = row[j], best
    return row[-1]


def error_rate(wanted: Iterable[Sequence[Any]], given: Iterable[Sequence[Any]]) -> float:
    """Σ edit_distance / Σ length wanted: of lists of words WER, of texts CER; may exceed 1.

    >>> error_rate(["press one".split()], ["press two two".split()])
    1.0

    Raises:
        OptionError: there is nothing wanted.
        ValueError: one has more sequences than the other.
    """
    errors = total = 0
    for one, other in zip(wanted, given, strict=True):
        errors += edit_distance(one, other)
        total += len(one)
    if not total:
        raise OptionError("an error rate needs something that is wanted")
    return errors / total
