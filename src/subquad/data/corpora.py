"""Corpora that travel with the package, and verses joined into documents."""

from __future__ import annotations

import dataclasses
import lzma
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from subquad.errors import OptionError, UnknownNameError, nearest
from subquad.options import choice_problem, integer_problem

__all__ = ["Preset", "Verse", "joined", "preset", "presets"]

PACKAGED = Path(__file__).parent / "corpora"


class Verse(NamedTuple):
    """A pair of texts and where it stands: ``"Gen.1.1"`` is book, chapter, verse."""

    source: str
    target: str
    reference: str

    @property
    def book(self) -> str:
        """The part of the reference before its first dot."""
        return self.reference.partition(".")[0]


@dataclasses.dataclass(frozen=True)
class Preset:
    """A corpus of aligned texts inside the package.

    Attributes:
        name: by which `preset` finds it.
        source: code of the source language.
        target: code of the target language.
        origin: where the texts come from.
        licence: on what terms.
        splits: names for `read` and `extract`.
    """

    name: str
    source: str
    target: str
    origin: str
    licence: str
    splits: tuple[str, ...] = ("train", "valid", "test")

    def read(self, split: str) -> list[Verse]:
        """The pairs of a split, in the texts' order, from the packed file (about 0.3 s).

        Raises:
            UnknownNameError: no such split.
        """
        if problems := list(choice_problem("split", split, self.splits)):
            raise UnknownNameError("; ".join(problems))
        return [verse for verse, found in self._verses() if found == split]

    def _verses(self) -> Iterator[tuple[Verse, str]]:
        path = PACKAGED / f"{self.name}.tsv.xz"
        with lzma.open(path, "rt", encoding="utf-8", newline="\n") as file:
            for line in file:
                *verse, split = line.rstrip("\n").split("\t")
                yield Verse(*verse), split

    def extract(self, folder: str | os.PathLike[str]) -> dict[str, Path]:
        """Writes each split as ``NAME.SPLIT.tsv``: source, target, reference; returns the paths.

        Files that are there already are left as they are. `Pairs.open` reads them.
        """
        Path(folder).mkdir(parents=True, exist_ok=True)
        paths = {split: Path(folder, f"{self.name}.{split}.tsv") for split in self.splits}
        if all(path.exists() for path in paths.values()):
            return paths
        lines: dict[str, list[str]] = {}
        for verse, split in self._verses():
            lines.setdefault(split, []).append("\t".join(verse) + "\n")
        for split, path in paths.items():
            if not path.exists():
                partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
                partial.write_text("".join(lines[split]), encoding="utf-8", newline="\n")
                partial.replace(path)
        return paths


_PRESETS = {
    "bible-es-en": Preset(
        name="bible-es-en",
        source="es",
        target="en",
        origin=(
            "Reina-Valera 1909 and King James Version (1769 text), aligned by verse; Debian "
            "packages sword-text-sparv 2.60-1 (module spaRV1909eb) and sword-text-kjv 14.3-1 "
            "(module engKJV2006eb), files by eBible.org and the Crosswire Bible Society"
        ),
        licence=(
            "Public domain, as both modules state. In the United Kingdom, printing the King "
            "James Version is subject to Crown letters patent."
        ),
    )
}


def presets() -> list[str]:
    """Names that `preset` knows."""
    return sorted(_PRESETS)


def preset(name: str) -> Preset:
    """A packaged corpus by name.

    ``bible-es-en``: 30,833 verses, Spanish to English; 1,000 verses each for valid and test,
    the last of each book in proportion to its length, and 28,764 for training, which repeat
    none of them in either language (69 that would are left out).

    Raises:
        UnknownNameError: there is none; names the nearest.

    Example:
        >>> bible = preset("bible-es-en")
        >>> bible.read("train")[0].target
        'In the beginning God created the heaven and the earth.'
    """
    if name not in _PRESETS:
        raise UnknownNameError(
            f"preset={name!r} is none of {', '.join(presets())}{nearest(name, _PRESETS)}"
        )
    return _PRESETS[name]


def _words(text: str) -> int:
    return len(text.split())


def joined(
    pairs: Sequence[tuple[str, str] | Verse],
    size: int,
    *,
    documents: Sequence[Hashable] | None = None,
    measure: Callable[[str], int] = _words,
    short: bool = True,
    separator: str = " ",
) -> list[tuple[str, str]]:
    """Consecutive pairs of a document joined into long ones, for document-level translation.

    From a document's start, pairs are joined until their sources measure at least `size`; what
    remains at its end goes with the last of them. No text is lost or joined across documents.
    A document that is shorter as a whole makes one short pair.

    Args:
        pairs: in the documents' order.
        size: least measure of a joined source.
        documents: what each pair belongs to; for verses, their books unless given.
        measure: of a source text: its words, or its tokens,
            ``lambda text: len(tokenizer.tokenize(text))``.
        short: False leaves out documents that are shorter as a whole.
        separator: put between texts.

    Raises:
        OptionError: a size below 1, no documents for pairs that are no verses, or not as many
            as pairs.

    Example:
        >>> pairs = [("a b", "1"), ("c", "2"), ("d e", "3"), ("f", "4"), ("g", "5")]
        >>> joined(pairs, 3, documents=["x", "x", "x", "x", "y"])
        [('a b c', '1 2'), ('d e f', '3 4'), ('g', '5')]
    """
    problems = list(integer_problem("size", size, 1))
    if documents is None:
        if all(isinstance(pair, Verse) for pair in pairs):
            documents = [pair.book for pair in pairs if isinstance(pair, Verse)]
        else:
            documents = []
            problems.append("documents must say what each pair belongs to")
    elif len(documents) != len(pairs):
        problems.append(f"documents has {len(documents)} elements for {len(pairs)} pairs")
    if problems:
        raise OptionError("; ".join(problems))
    found = []
    for rows in _runs(pairs, documents):
        for group, measured in _groups(rows, size, measure):
            if short or measured >= size:
                sources, targets = zip(*(row[:2] for row in group), strict=True)
                found.append((separator.join(sources), separator.join(targets)))
    return found


def _runs(
    pairs: Sequence[tuple[str, ...]], documents: Sequence[Hashable]
) -> Iterator[list[tuple[str, ...]]]:
    """Consecutive pairs of one document."""
    run: list[tuple[str, ...]] = []
    for place, pair in enumerate(pairs):
        if place and documents[place] != documents[place - 1]:
            yield run
            run = []
        run.append(pair)
    if run:
        yield run


def _groups(
    rows: Sequence[tuple[str, ...]], size: int, measure: Callable[[str], int]
) -> list[tuple[list[tuple[str, ...]], int]]:
    """(pairs, measure of their sources) from a document's start; the last takes what remains."""
    found: list[tuple[list[tuple[str, ...]], int]] = []
    group, measured = [], 0
    for row in rows:
        group.append(row)
        measured += measure(row[0])
        if measured >= size:
            found.append((group, measured))
            group, measured = [], 0
    if group and found:
        last, before = found.pop()
        group, measured = last + group, before + measured
    return [*found, (group, measured)] if group else found
