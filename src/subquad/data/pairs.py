"""Text files as sequences of examples: random access by byte offsets, nothing lost in silence.

A file is read once, line by line, for the offset of each good record; texts stay on the disk
and are read through a memory map when asked for, so that files may be larger than memory. What
cannot be used is counted by kind, with line numbers, in `Records.problems`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import logging
import mmap
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, overload

from subquad.errors import OptionError
from subquad.options import choice_problem, integer_problem

__all__ = ["BadRecord", "Lines", "Pairs", "Problems", "Records", "json_object", "json_text"]

T = TypeVar("T")
_Row = tuple[int, tuple[int, ...], tuple[bytes | None, ...]]
"""Line number; for each file the offset and the line, None behind its end."""

_log = logging.getLogger(__name__)

# ---- what is wrong with a file -----------------------------------------------------------------


class BadRecord(ValueError):
    """Raised by `Records.parse`: the record cannot be used. Its text is the kind of problem.

    Kinds are counted, so they name what is wrong and not what stands in the line.
    """


@dataclasses.dataclass
class Problems:
    r"""What was wrong in a file: how often, and in which lines.

    Attributes:
        counts: lines left out, by kind.
        notes: lines read all the same, by kind: a byte order mark, ``\r\n``, truncation.
        lines: the first ten line numbers of each kind; the first line is 1.

    Example:
        >>> problems = Problems()
        >>> problems.add("empty source", 7)
        >>> problems.add("truncated source", 9, note=True)
        >>> print(problems)
        1 left out: empty source (line 7)
        1 changed: truncated source (line 9)
    """

    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    notes: dict[str, int] = dataclasses.field(default_factory=dict)
    lines: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    SHOWN: ClassVar[int] = 10

    @property
    def total(self) -> int:
        """How many records were left out."""
        return sum(self.counts.values())

    def add(self, kind: str, line: int, *, note: bool = False) -> None:
        """Counts one line; `note` where it is used all the same."""
        counts = self.notes if note else self.counts
        counts[kind] = counts.get(kind, 0) + 1
        lines = self.lines.setdefault(kind, [])
        if len(lines) < self.SHOWN:
            lines.append(line)

    def __bool__(self) -> bool:
        return bool(self.counts)

    def __str__(self) -> str:
        told = [("left out", self.counts), ("changed", self.notes)]
        return "\n".join(
            f"{count:,} {verb}: {kind} ({self._where(kind, count)})"
            for verb, counts in told
            for kind, count in sorted(counts.items(), key=lambda item: -item[1])
        )

    def _where(self, kind: str, count: int) -> str:
        numbers = ", ".join(map(str, self.lines[kind]))
        more = ", …" if count > len(self.lines[kind]) else ""
        return f"line{'s' if count > 1 else ''} {numbers}{more}"


# ---- one file ----------------------------------------------------------------------------------

_COMPRESSED = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd", ".zip": "unzip"}
_BOM = b"\xef\xbb\xbf"
_WIDE = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


class _TextFile:
    """Lines of a UTF-8 file: in one pass with offsets, or one by its offset."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise OptionError(f"{self.path} is no file")
        if tool := _COMPRESSED.get(self.path.suffix.lower()):
            raise OptionError(
                f"{self.path} is compressed, and lines are read in any order: unpack it first "
                f"({tool + ' -d' if tool != 'unzip' else tool} {self.path.name})"
            )
        with self.path.open("rb") as file:
            start = file.read(3)
        if start[:2] in _WIDE:
            raise OptionError(
                f"{self.path} is {_WIDE[start[:2]]}, expected UTF-8: "
                f"iconv -f {_WIDE[start[:2]]} -t UTF-8"
            )
        self.bom = start == _BOM
        self.stamp = self._stat()
        self._map: mmap.mmap | None = None

    def _stat(self) -> tuple[int, int]:
        stat = self.path.stat()
        return stat.st_size, stat.st_mtime_ns

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_map": None}  # a worker maps the file itself

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """(offset, line without its end) of every line; memory O(longest line)."""
        with self.path.open("rb") as file:
            offset = file.seek(len(_BOM) if self.bom else 0)
            for line in file:
                yield offset, line
                offset += len(line)

    def line(self, offset: int) -> bytes:
        """The line that starts there, with its end; b"" at the end of the file."""
        if self._map is None:
            if self._stat() != self.stamp:
                raise OptionError(f"{self.path} has changed since it was opened: open it again")
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        end = self._map.find(b"\n", offset)
        return self._map[offset : end + 1 if end >= 0 else len(self._map)]


def _body(line: bytes) -> bytes:
    r"""A line without ``\n`` or ``\r\n``."""
    line = line.removesuffix(b"\n")
    return line.removesuffix(b"\r")


# ---- many records ------------------------------------------------------------------------------


class Records(Sequence[T], Generic[T]):
    r"""Records of one file, or of files whose lines belong together; a map-style data set.

    A subclass says in `parse` what a record is made of. Costs: one pass over the files and
    8 bytes of memory for each record and file, 8 more for its line number. A record is read
    in O(its length). Pickles; workers of a `torch.utils.data.DataLoader` map the files
    themselves. The files must not change while they are in use.

    Args:
        paths: UTF-8 files; ``\r\n`` and a byte order mark are accepted and noted.
        on_bad: "skip" leaves bad records out and logs the report as a warning; "raise" reads
            to the end, then raises with the report.

    Attributes:
        problems: what was left out and why, by line numbers.
        fingerprint: hash of the files' bytes and of how they are read.

    Raises:
        OptionError: a file is missing, compressed or UTF-16, nothing in it can be used, or
            something cannot and `on_bad` is "raise"; later, when a file has changed.
    """

    blocks: ClassVar[bool] = False
    """A record is a run of lines up to an empty one, instead of a line; one file only."""
    skip_blank: ClassVar[bool] = False
    """Empty lines are separators, no bad records."""

    def __init__(self, *paths: str | os.PathLike[str], on_bad: str = "skip") -> None:
        if wrong := list(choice_problem("on_bad", on_bad, ("skip", "raise"))):
            raise OptionError("; ".join(wrong))
        self.files = tuple(_TextFile(path) for path in paths)
        self.problems = Problems()
        self._starts = tuple(array("Q") for _ in self.files)
        self._numbers = array("Q")
        self._index()
        told = f"{self._name()}: {len(self):,} records\n{self.problems}"
        if not len(self) or (self.problems and on_bad == "raise"):
            raise OptionError(told)
        if self.problems:
            _log.warning(told)

    def parse(self, *texts: str) -> T:
        """The record made of these texts, one from each file.

        Raises:
            BadRecord: it cannot be used.
        """
        raise NotImplementedError

    def header(self, text: str) -> bool:
        """Takes the first line; True where it is a header and no record."""
        return False

    def options(self) -> Mapping[str, Any]:
        """What changes the records that the same bytes give; part of the fingerprint."""
        return {}

    def line_number(self, index: int) -> int:
        """The line at which a record starts; 1 is the first."""
        return self._numbers[index]

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        return self.parse(
            *(
                self._read(file, starts[index])
                for file, starts in zip(self.files, self._starts, strict=True)
            )
        )

    def _name(self) -> str:
        return " and ".join(str(file.path) for file in self.files)

    def _read(self, file: _TextFile, start: int) -> str:
        if not self.blocks:
            return _body(file.line(start)).decode("utf-8")
        found = []
        while (line := file.line(start)) and (body := _body(line)).strip():
            found.append(body)
            start += len(line)
        return b"\n".join(found).decode("utf-8")

    def _index(self) -> None:
        for file in self.files:
            if file.bom:
                self.problems.add("byte order mark", 1, note=True)
        digest = hashlib.blake2b(digest_size=16)
        rows = self._lines(digest)
        for number, starts, bodies in self._blocks(rows) if self.blocks else rows:
            try:
                texts = [self._decoded(*pair) for pair in zip(self.files, bodies, strict=True)]
                if number == 1 and self.header(texts[0]):
                    continue
                if not any(text.strip() for text in texts):
                    if self.skip_blank:
                        continue
                    raise BadRecord("empty line")
                self.parse(*texts)
            except BadRecord as bad:
                self.problems.add(str(bad), number)
            else:
                self._numbers.append(number)
                for found, start in zip(self._starts, starts, strict=True):
                    found.append(start)
        digest.update(repr((type(self).__name__, sorted(self.options().items()))).encode())
        self.fingerprint = digest.hexdigest()

    def _lines(self, digest: Any) -> Iterator[_Row]:
        lines = itertools.zip_longest(*(file.lines() for file in self.files), fillvalue=(0, None))
        for number, row in enumerate(lines, 1):
            for _, line in row:
                digest.update(b"\0" if line is None else line)
                if line is not None and line.endswith(b"\r\n"):
                    self.problems.add("\\r\\n at the end", number, note=True)
            starts, found = zip(*row, strict=True)
            yield number, starts, tuple(line if line is None else _body(line) for line in found)

    def _blocks(self, rows: Iterator[_Row]) -> Iterator[_Row]:
        for blank, group in itertools.groupby(rows, key=lambda row: not (row[2][0] or b"").strip()):
            if not blank:
                number, starts, bodies = next(group)
                rest = (found[0] or b"" for _, _, found in group)
                yield number, starts, (b"\n".join([bodies[0] or b"", *rest]),)

    def _decoded(self, file: _TextFile, body: bytes | None) -> str:
        if body is None:
            raise BadRecord(f"{file.path.name} ends before: pairs may be shifted")
        try:
            return body.decode("utf-8")
        except UnicodeDecodeError:
            raise BadRecord("not UTF-8") from None


class Lines(Records[str]):
    r"""Lines of a plain-text file, each one text; empty lines separate and do not count.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "a.txt")
        ...     _ = path.write_text("one\n\ntwo\n", encoding="utf-8")
        ...     Lines.open(path)[:]
        ['one', 'two']
    """

    skip_blank = True

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, on_bad: str = "skip") -> Lines:
        """The file's lines; for `on_bad` and errors see `Records`."""
        return cls(path, on_bad=on_bad)

    def parse(self, *texts: str) -> str:
        return texts[0]


# ---- pairs -------------------------------------------------------------------------------------


class Pairs(Records[tuple[str, str]]):
    """(source, target) of each good line; see `Pairs.open`."""

    @staticmethod
    def open(
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        source: str | int = "source",
        target: str | int = "target",
        header: bool = False,
        format: str | None = None,
        on_bad: str = "skip",
    ) -> Pairs:
        r"""Pairs of texts from a TSV file, a JSONL file, or two files of lines.

        TSV is cut at tabs and nothing else: no quoting. All lines have as many columns as the
        first that has enough. JSONL has an object a line. Of two files, line i of one belongs
        to line i of the other.

        Args:
            path: a file, or (source file, target file).
            source: TSV: the column's number, 1 is the first, or with `header` its name;
                columns 1 and 2 unless given. JSONL: the key; ``"translation.es"`` reaches
                into an object.
            target: as `source`.
            header: the first line of a TSV file names the columns.
            format: "tsv" or "jsonl"; None: by the name's ending.
            on_bad: "skip" or "raise", see `Records`.

        Raises:
            OptionError: as in `Records`; an ending that tells no format; a column or name that
                the header lacks.

        Example:
            >>> import tempfile
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = Path(folder, "a.tsv")
            ...     _ = path.write_text("sí\tyes\nno\tno\n\tlost\n", encoding="utf-8")
            ...     pairs = Pairs.open(path)
            ...     pairs[:]
            [('sí', 'yes'), ('no', 'no')]
            >>> print(pairs.problems)
            1 left out: empty source (line 3)
        """
        if not isinstance(path, str | os.PathLike):
            if len(path) != 2:
                raise OptionError(f"path must be one file or two, given {len(path)}")
            if (source, target, header, format) != ("source", "target", False, None):
                raise OptionError("source, target, header and format are for one file, given two")
            return Pairs(*path, on_bad=on_bad)
        suffix = Path(path).suffix.lower()
        chosen = format or _FORMATS.get(suffix)
        if chosen == "tsv":
            return _TsvPairs(path, source=source, target=target, header=header, on_bad=on_bad)
        if chosen == "jsonl":
            if header:
                raise OptionError("header is for TSV; JSONL names its texts by keys")
            return _JsonPairs(path, source=str(source), target=str(target), on_bad=on_bad)
        if suffix in _COMPRESSED:
            _TextFile(path)  # says how to unpack it
        raise OptionError(
            f"{path}: expected .tsv, .tab, .jsonl, .ndjson, two files of lines, or "
            f"format='tsv' or 'jsonl', given {format or suffix or 'no ending'}"
        )

    def parse(self, *texts: str) -> tuple[str, str]:
        source, target = texts
        if not source.strip():
            raise BadRecord("empty source" if target.strip() else "empty line")
        if not target.strip():
            raise BadRecord("empty target")
        return source, target


_FORMATS = {".tsv": "tsv", ".tab": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl"}


class _TsvPairs(Pairs):
    def __init__(
        self, path: str | os.PathLike[str], *, source: str | int, target: str | int, header: bool,
        on_bad: str,
    ) -> None:  # fmt: skip
        self._named = header
        self._width = 0
        self._columns = {"source": source, "target": target}
        if not header:
            defaults = {"source": 1, "target": 2}
            self._columns = {
                side: defaults[side] if column == side else column
                for side, column in self._columns.items()
            }
            self._check([])
        super().__init__(path, on_bad=on_bad)

    def _check(self, names: Sequence[str]) -> None:
        problems = []
        for side, column in self._columns.items():
            if isinstance(column, str):
                if column in names:
                    self._columns[side] = names.index(column) + 1
                elif self._named:
                    problems.append(f"{side}={column!r} is no column: {', '.join(names)}")
                else:
                    problems.append(f"{side}={column!r}: names need header=True")
            else:
                problems += integer_problem(side, column, 1)
        if problems:
            raise OptionError("; ".join(problems))

    def header(self, text: str) -> bool:
        if self._named:
            self._check(text.split("\t"))
        return self._named

    def options(self) -> Mapping[str, Any]:
        return {**self._columns, "header": self._named}

    def parse(self, *texts: str) -> tuple[str, str]:
        cells = texts[0].split("\t")
        columns = [column for column in self._columns.values() if isinstance(column, int)]
        if len(columns) < 2:
            raise OptionError(f"{self._name()}: the first line, which names the columns, is bad")
        first, second = columns
        if not self._width and len(cells) >= max(first, second):
            self._width = len(cells)
        if len(cells) != self._width:
            expected = self._width or max(first, second)
            raise BadRecord(f"{len(cells)} columns, expected {expected}")
        return super().parse(cells[first - 1], cells[second - 1])


class _JsonPairs(Pairs):
    def __init__(
        self, path: str | os.PathLike[str], *, source: str, target: str, on_bad: str
    ) -> None:
        self._keys = (source, target)
        super().__init__(path, on_bad=on_bad)

    def options(self) -> Mapping[str, Any]:
        return {"keys": self._keys}

    def parse(self, *texts: str) -> tuple[str, str]:
        row = json_object(texts[0])
        source, target = (json_text(row, key) for key in self._keys)
        return super().parse(source, target)


def json_object(text: str) -> Mapping[str, Any]:
    """The object that a line of JSONL holds.

    Raises:
        BadRecord: it is no JSON, or no object.
    """
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):  # also a number of more digits than Python reads
        raise BadRecord("not JSON") from None
    if not isinstance(row, dict):
        raise BadRecord("no JSON object")
    return row


def json_text(row: Mapping[str, Any], key: str) -> str:
    """The text under a key; a dot reaches into an object unless the key itself has it.

    Raises:
        BadRecord: there is none, or it is no text, or none that UTF-8 can express.
    """
    value: Any = row
    for part in [key] if key in row else key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise BadRecord(f"no key {key!r}")
        value = value[part]
    if not isinstance(value, str):
        raise BadRecord(f"{key!r} is no text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRecord(f"{key!r} has half a surrogate pair") from None
    return value
