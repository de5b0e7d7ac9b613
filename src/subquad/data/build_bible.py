"""Builds ``corpora/bible-es-en.tsv.xz`` from two Debian packages.

::

    apt-get download sword-text-kjv sword-text-sparv
    for file in sword-text-*.deb; do dpkg -x "$file" unpacked; done
    python -m subquad.data.build_bible unpacked

The same packages give the same bytes. Each line of the result is
``Spanish TAB English TAB reference TAB split``, such as ``Gen.1.1`` and ``train``. Each book
ends with its share of ``valid``, then of ``test``; a verse before them that repeats one of
theirs, in either language, is a ``repeat``, which is no training data.

A SWORD module of the kind zText has, for each testament, ``.bzz`` (blocks compressed by
zlib), ``.bzs`` (where each block lies: offset, size, size unpacked, three uint32) and ``.bzv``
(where each entry lies: block, offset, size; two uint32 and a uint16). Entries stand in the
order of the versification: introductions, then for each chapter its heading and its verses.
"""

from __future__ import annotations

import lzma
import re
import struct
import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from subquad.data.corpora import PACKAGED
from subquad.errors import OptionError

__all__ = ["Entry", "agreement", "build", "held_out", "module", "plain", "shifted"]

ENGLISH, SPANISH = "engKJV2006eb", "spaRV1909eb"
_LICENCE = "DistributionLicense=Public Domain"
_CHAPTER = re.compile(r'<chapter\b[^>]*\bosisID="([^"]+)"')
_LEFT_OUT = re.compile(r"<note\b.*?</note>|<title level=.*?</title>|[\u05d0-\u05ea¶]", re.DOTALL)
_MARKUP = re.compile(r"<[^>]+>|\\\+?nd\*?")
_STRONG = re.compile(r"[GH]\d{4}")


class Entry(NamedTuple):
    """An entry of a module: which testament, its place there, and its markup."""

    testament: str
    place: int
    markup: str


def module(folder: str | Path, name: str) -> Iterator[Entry]:
    """Entries of a SWORD module, in order; empty ones are left out.

    Args:
        folder: with ``usr/share/sword``, as ``dpkg -x`` makes it.
        name: of the module.

    Raises:
        OptionError: the module is not there, or does not say that it is in the public domain.
    """
    sword = Path(folder) / "usr/share/sword"
    conf = sword / "mods.d" / f"{name}.conf"
    if not conf.is_file():
        raise OptionError(f"{folder} holds no module {name}: expected {conf}")
    if _LICENCE not in conf.read_text(encoding="utf-8").splitlines():
        raise OptionError(f"{conf} lacks the line {_LICENCE!r}")
    texts = sword / "modules/texts/ztext" / name
    for testament in ("ot", "nt"):
        packed, blocks, verses = (
            (texts / f"{testament}.{suffix}").read_bytes() for suffix in ("bzz", "bzs", "bzv")
        )
        unpacked = [
            zlib.decompress(packed[start : start + size]) if size else b""
            for start, size, _ in struct.iter_unpack("<III", blocks)
        ]
        for place, (block, start, size) in enumerate(struct.iter_unpack("<IIH", verses)):
            if size:
                markup = unpacked[block][start : start + size].decode("utf-8")
                yield Entry(testament, place, markup)


def plain(markup: str) -> str:
    """A verse without notes, books' titles, markup and signs; white space made single.

    Titles of psalms and the notes below epistles stay: both editions have them.

    >>> plain('¶ And <w lemma="strong:H0430">God</w> said,<note>or, spoke</note> Let  there be ')
    'And God said, Let there be'
    """
    return " ".join(_MARKUP.sub("", _LEFT_OUT.sub("", markup)).split())


def references(entries: Sequence[Entry]) -> dict[tuple[str, int], str]:
    """``Gen.1.1`` by (testament, place): the chapters' headings say where each one starts."""
    found, chapter, start = {}, "", 0
    for testament, place, markup in entries:
        headings = _CHAPTER.findall(markup)
        if headings:
            chapter, start = headings[-1], place
        elif chapter and plain(markup):
            found[testament, place] = f"{chapter}.{place - start}"
    return found


def agreement(first: str, second: str) -> float:
    """Share of the dictionary (Strong's) numbers of the verse with fewer that both have."""
    one, other = (Counter(_STRONG.findall(markup)) for markup in (first, second))
    return (one & other).total() / max(1, min(one.total(), other.total()))


def shifted(aligned: Mapping[str, tuple[str, str]]) -> set[str]:
    """Chapters that the editions number differently.

    Both mark words by numbers of the Hebrew and Greek dictionary, so that a translation is
    known by them. In a chapter named here more than a tenth of the verses have less than
    0.4 in common with the verse of the same number.
    """
    verses, strange = Counter[str](), Counter[str]()
    for reference, (spanish, english) in aligned.items():
        chapter = reference.rpartition(".")[0]
        verses[chapter] += 1
        strange[chapter] += agreement(spanish, english) < 0.4
    return {chapter for chapter, count in strange.items() if count > verses[chapter] / 10}


def held_out(sizes: Sequence[int], count: int) -> list[int]:
    """How many verses of each book make `count`, in proportion to its size.

    Shares are rounded down, and the largest remainders rounded up; earlier books win ties.

    >>> held_out([50, 30, 20], 7)
    [4, 2, 1]
    """
    shares = [count * size / sum(sizes) for size in sizes]
    counts = [int(share) for share in shares]
    order = sorted(range(len(sizes)), key=lambda book: (counts[book] - shares[book], book))
    for book in order[: count - sum(counts)]:
        counts[book] += 1
    return counts


def splits(books: Sequence[str], count: int) -> list[str]:
    """For each verse its split: each book ends with its share of valid, then of test.

    Two runs a book: a verse held out has a neighbour in training at one end of its run only.
    """
    sizes = Counter(books)
    shares = held_out(list(sizes.values()), count)
    found = []
    for size, share in zip(sizes.values(), shares, strict=True):
        found += ["train"] * (size - 2 * share) + ["valid"] * share + ["test"] * share
    return found


def build(folder: str | Path, out: str | Path = PACKAGED / "bible-es-en.tsv.xz") -> int:
    """Writes the corpus and returns its number of verses; see the module.

    Raises:
        OptionError: as in `module`.
    """
    english, spanish = (list(module(folder, name)) for name in (ENGLISH, SPANISH))
    translations = {entry[:2]: entry.markup for entry in spanish if plain(entry.markup)}
    named = references(english)
    aligned = {
        named[key]: (translations[key], markup)
        for key, markup in ((entry[:2], entry.markup) for entry in english)
        if key in named and key in translations
    }
    strange = shifted(aligned)
    kept = {
        reference: [plain(markup) for markup in pair]
        for reference, pair in aligned.items()
        if reference.rpartition(".")[0] not in strange
    }
    parts = splits([reference.partition(".")[0] for reference in kept], 1000)
    reserved = {
        text
        for pair, part in zip(kept.values(), parts, strict=True)
        for text in pair
        if part != "train"
    }
    lines = []
    for (reference, pair), part in zip(kept.items(), parts, strict=True):
        repeats = part == "train" and not reserved.isdisjoint(pair)
        lines.append("\t".join((*pair, reference, "repeat" if repeats else part)))
    data = "".join(line + "\n" for line in lines).encode("utf-8")
    Path(out).write_bytes(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))
    return len(lines)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m subquad.data.build_bible FOLDER")
    sys.stdout.write(f"{build(sys.argv[1])} verses\n")
