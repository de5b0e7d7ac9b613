"""Texts as token ids, encoded once and kept in a compact file, however large the corpus is."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from subquad.data.copying import extend_with_source
from subquad.data.pairs import Problems
from subquad.errors import OptionError
from subquad.options import choice_problem, integer_problem

__all__ = ["EncodedLines", "EncodedPairs"]

Progress = Callable[[int, int], None]
"""Called with (texts done, texts in all) now and then."""

_CHUNK = 1000
"""Rows that are tokenised in one call."""

_VERSION = 1
"""Of the files; another number makes new ones."""


@dataclasses.dataclass(frozen=True)
class _Side:
    """One of the texts of a row: its name, its tokenizer, its most tokens."""

    name: str
    tokenizer: Any
    most: int | None


class _Encoded:
    """Rows of one or more texts as ids: `tokens` end to end, and where each text begins.

    On the disk: ``KEY.tokens`` (int32), ``KEY.index`` (int64: the texts' bounds, then each
    row's index in what was encoded) and ``KEY.json``, written last, with the report. The key
    is a hash of the texts, the tokenizers and the limits.
    """

    def __init__(
        self,
        rows: Sequence[Any],
        sides: Sequence[_Side],
        on_long: str,
        folder: str | os.PathLike[str] | None,
        progress: Progress | None,
        copy: bool = False,
    ) -> None:
        problems = list(choice_problem("on_long", on_long, ("truncate", "drop", "raise")))
        for side in sides:
            if side.most is not None:
                problems += integer_problem(f"max_{side.name}", side.most, 2)
        if not len(rows):
            problems.append("there is no text to encode")
        if problems:
            raise OptionError("; ".join(problems))
        self._sides, self._copy = len(sides), copy
        self._stem: Path | None = None
        if folder is None:
            tokens, index = io.BytesIO(), array("q")
            self.problems = _encode(rows, sides, on_long, tokens, index, progress, copy)
            self._open(
                torch.frombuffer(bytearray(tokens.getvalue()), dtype=torch.int32),
                torch.tensor(index, dtype=torch.int64),
            )
            return
        self._stem = Path(folder) / _key(rows, sides, on_long, copy)
        report = self._stem.with_suffix(".json")
        if not report.is_file():
            report.parent.mkdir(parents=True, exist_ok=True)
            self._write(rows, sides, on_long, progress)
        self.problems = Problems(**json.loads(report.read_text(encoding="utf-8")))
        self._map()

    def _write(
        self, rows: Sequence[Any], sides: Sequence[_Side], on_long: str, progress: Progress | None
    ) -> None:
        assert self._stem is not None
        index = array("q")
        with _replacing(self._stem.with_suffix(".tokens")) as file:
            problems = _encode(rows, sides, on_long, file, index, progress, self._copy)
        with _replacing(self._stem.with_suffix(".index")) as file:
            file.write(index.tobytes())
        with _replacing(self._stem.with_suffix(".json")) as file:
            file.write(json.dumps(dataclasses.asdict(problems)).encode())

    def _map(self) -> None:
        assert self._stem is not None
        found = []
        for suffix, dtype in ((".tokens", torch.int32), (".index", torch.int64)):
            path = self._stem.with_suffix(suffix)
            size = path.stat().st_size // dtype.itemsize
            found.append(torch.from_file(str(path), shared=False, size=size, dtype=dtype))
        self._open(*found)

    def _open(self, tokens: Tensor, index: Tensor) -> None:
        count = (len(index) - 1) // (self._sides + 1)
        self._tokens = tokens
        self._bounds, self.indices = index[: count * self._sides + 1], index[-count:]

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        if self._stem is not None:  # a worker maps the files itself
            for name in ("_tokens", "_bounds", "indices"):
                del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._stem is not None:
            self._map()

    @property
    def total(self) -> int:
        """Tokens of all texts."""
        return len(self._tokens)

    def __len__(self) -> int:
        return len(self.indices)

    def _lengths(self) -> Tensor:
        return self._bounds.diff().view(-1, self._sides)

    def _text(self, index: int, side: int) -> Tensor:
        place = range(len(self))[index] * self._sides + side
        start, end = self._bounds[place : place + 2].tolist()
        return self._tokens[start:end].long()


class EncodedPairs(_Encoded):
    """Pairs as rows ``{"input_ids": (S,), "labels": (L,)}``, both with their end-of-text token.

    One pass tokenises the pairs; in `folder` the ids are kept in memory-mapped files, which
    are found again by a hash of texts, tokenizers and limits. Costs 4 bytes a token and 24 a
    pair, on the disk, or in memory without a folder. Pickles.

    Args:
        pairs: (source, target) texts: `Pairs`, or any sequence of tuples that has slices.
        tokenizer: of transformers, for both sides.
        target_tokenizer: for targets, where it is another.
        max_source: most source tokens, special tokens included; None: any.
        max_target: most target tokens, likewise.
        on_long: what becomes of a pair with too many: "truncate" cuts the text, "drop" leaves
            the pair out, "raise" reports all of them.
        copy: unknown words of a source are numbered from the vocabulary's size on, in its target
            too, for models that copy: see `subquad.data.copying.extend_with_source`.
        folder: where the files go; None: memory.
        progress: called with (pairs done, pairs in all).

    Attributes:
        lengths: tokens (N, 2) of source and target, for `TokenBatches`.
        indices: (N,), each row's index in `pairs`.
        problems: truncated and left-out texts, and those with unknown tokens, by line number;
            by position from 1 where `pairs` has no lines.

    Raises:
        OptionError: wrong arguments; nothing is left; too long texts with ``on_long="raise"``.
    """

    def __init__(
        self,
        pairs: Sequence[tuple[str, str]],
        tokenizer: Any,
        *,
        target_tokenizer: Any = None,
        max_source: int | None = None,
        max_target: int | None = None,
        on_long: str = "truncate",
        copy: bool = False,
        folder: str | os.PathLike[str] | None = None,
        progress: Progress | None = None,
    ) -> None:
        if copy and target_tokenizer is not None:
            raise OptionError("copy=True needs one tokenizer for both sides")
        other = tokenizer if target_tokenizer is None else target_tokenizer
        sides = (_Side("source", tokenizer, max_source), _Side("target", other, max_target))
        super().__init__(pairs, sides, on_long, folder, progress, copy)

    @property
    def lengths(self) -> Tensor:
        return self._lengths()

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._text(index, 0), "labels": self._text(index, 1)}


class EncodedLines(_Encoded):
    """Texts as rows ``{"input_ids": (L,)}``, with their end-of-text token; see `EncodedPairs`.

    Args:
        lines: texts: `Lines`, or any sequence of texts.
        tokenizer: of transformers.
        max_length: most tokens of a text; None: any, as `PackedLines` wants it.
        on_long: as in `EncodedPairs`, like the others.
        folder: where the files go; None: memory.
        progress: called with (texts done, texts in all).

    Attributes:
        lengths: tokens (N,) of each text.
        indices: (N,), each row's index in `lines`.
        problems: as in `EncodedPairs`.
    """

    def __init__(
        self,
        lines: Sequence[str],
        tokenizer: Any,
        *,
        max_length: int | None = None,
        on_long: str = "truncate",
        folder: str | os.PathLike[str] | None = None,
        progress: Progress | None = None,
    ) -> None:
        sides = (_Side("length", tokenizer, max_length),)
        super().__init__(lines, sides, on_long, folder, progress)

    @property
    def lengths(self) -> Tensor:
        return self._lengths()[:, 0]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._text(index, 0)}

    def tokens(self, start: int, end: int) -> Tensor:
        """Ids `start` … `end` of all texts put end to end; fewer at the end."""
        return self._tokens[start:end].long()

    def starts(self, start: int, end: int) -> list[int]:
        """Where texts begin among these tokens, counted from `start`; O(log N + found)."""
        first, last = torch.searchsorted(self._bounds, torch.tensor([start, end])).tolist()
        return (self._bounds[first:last] - start).tolist()


# ---- the pass over the texts -------------------------------------------------------------------


def _encode(
    rows: Sequence[Any],
    sides: Sequence[_Side],
    on_long: str,
    tokens: IO[bytes],
    index: array[int],
    progress: Progress | None,
    copy: bool,
) -> Problems:
    problems = Problems()
    kept = array("q")
    index.append(0)
    for start in range(0, len(rows), _CHUNK):
        chunk = _texts(rows[start : start + _CHUNK], len(sides))
        number = getattr(rows, "line_number", lambda place: place + 1)
        lines = [number(start + i) for i in range(len(chunk))]
        texts = zip(sides, zip(*chunk, strict=True), strict=True)
        columns = [_ids(side, column, on_long, lines, problems) for side, column in texts]
        if copy:
            _extend(sides[0].tokenizer, chunk, *columns)
        for place, ids in enumerate(zip(*columns, strict=True), start):
            if any(found is None for found in ids):
                continue
            kept.append(place)
            for found in ids:
                tokens.write(array("i", found).tobytes())
                index.append(index[-1] + len(found))
        if progress is not None:
            progress(start + len(chunk), len(rows))
    if on_long == "raise" and problems:
        raise OptionError(f"texts are too long\n{problems}")
    if not kept:
        raise OptionError(f"no text is left\n{problems}")
    index.extend(kept)
    return problems


def _extend(
    tokenizer: Any, texts: Sequence[tuple[str, ...]], sources: list[Any], targets: list[Any]
) -> None:
    """Numbers the unknown words of sources, there and in their targets."""
    for place, (ids, labels) in enumerate(zip(sources, targets, strict=True)):
        if ids is None or labels is None or tokenizer.unk_token_id not in ids:
            continue
        source, target = texts[place]
        limits = {"max_source": len(ids), "max_target": len(labels)}
        pair = extend_with_source(source, tokenizer, target, **limits)
        sources[place], targets[place] = pair.input_ids, pair.labels


def _texts(rows: Iterable[Any], sides: int) -> list[tuple[str, ...]]:
    return [(row,) if sides == 1 else tuple(row[:sides]) for row in rows]


def _ids(
    side: _Side, texts: Sequence[str], on_long: str, lines: Sequence[int], problems: Problems
) -> list[Any]:
    """Ids of each text; None where it is left out."""
    options: dict[str, Any] = {"return_attention_mask": False, "verbose": False}
    found: list[Any] = side.tokenizer(list(texts), **options)["input_ids"]
    most = side.most
    what = "text" if side.name == "length" else side.name
    long = [i for i, ids in enumerate(found) if most is not None and len(ids) > most]
    for i in long:
        problems.add(f"{what} longer than {most} tokens", lines[i], note=on_long == "truncate")
    if long and on_long == "truncate":
        options |= {"truncation": True, "max_length": most}
        short = side.tokenizer([texts[i] for i in long], **options)["input_ids"]
    else:
        short = [None] * len(long)
    for i, ids in zip(long, short, strict=True):
        found[i] = ids
    unknown = side.tokenizer.unk_token_id
    for line, ids in zip(lines, found, strict=True):
        if ids is not None and unknown is not None and unknown in ids:
            problems.add(f"{what} with unknown tokens", line, note=True)
    return found


# ---- files -------------------------------------------------------------------------------------


def _key(rows: Sequence[Any], sides: Sequence[_Side], on_long: str, copy: bool) -> str:
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{_VERSION} {sys.byteorder} {on_long}{' copy' if copy else ''}".encode())
    fingerprint = getattr(rows, "fingerprint", None)
    if fingerprint is None:
        for row in rows:
            digest.update(repr(row).encode())
    else:
        digest.update(fingerprint.encode())
    for side in sides:
        backend = getattr(side.tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise OptionError(
                "folder= needs a fast tokenizer, whose rules can be hashed, given "
                f"{type(side.tokenizer).__name__}"
            )
        rules = json.loads(backend.to_str())
        # A call changes these two; they are no part of what the tokenizer is.
        rules.pop("truncation", None)
        rules.pop("padding", None)
        digest.update(json.dumps([side.name, side.most, rules], sort_keys=True).encode())
    return digest.hexdigest()


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes its name when it is complete, and leaves nothing when it fails."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
