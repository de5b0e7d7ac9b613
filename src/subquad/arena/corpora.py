"""Texts, speech, proteins and digits that ship inside registry packages; see `zoo.TEXTS`.

Readers take a `Zoo`, which knows the folders (``make texts``), and return plain values.
"""

from __future__ import annotations

import gzip
import html.parser
import itertools
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from subquad.arena.zoo import Zoo
from subquad.data.audio import read_wav
from subquad.errors import OptionError

__all__ = [
    "Clip",
    "brown",
    "heavy_chains",
    "help_pages",
    "help_pairs",
    "mails",
    "mnist",
    "proteins",
    "speech",
]

# ---- text ----------------------------------------------------------------------------------

_NO_SPACE_BEFORE = re.compile(r" ([.,;:?!)\]]|''|n't\b)")
_NO_SPACE_AFTER = re.compile(r"([(\[]|``) ")


def brown(zoo: Zoo | None = None, *, genres: str = "abcdefghjklmnpr") -> dict[str, str]:
    """The Brown corpus without its tags: 500 American texts of 1961, some 12,000 characters each.

    Args:
        zoo: where the corpus lies.
        genres: letters of the genres wanted: a–c press, d religion, e skills, f lore, g
            belles lettres, h documents, j learned, k–r fiction and humour.

    Returns:
        Text by name (``"ca01"``); paragraphs end in a newline.
    """
    folder = (zoo or Zoo.default()).text("brown")
    found = {}
    for path in sorted(folder.glob("c[a-r][0-9][0-9]")):
        if path.name[1] in genres:
            lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
            found[path.name] = "\n".join(_plain(line) for line in lines if line.strip())
    if not found:
        raise OptionError(f"{folder} holds no text of the genres {genres!r}")
    return found


def _plain(line: str) -> str:
    text = " ".join(word.rpartition("/")[0] for word in line.split())
    text = _NO_SPACE_AFTER.sub(r"\1", _NO_SPACE_BEFORE.sub(r"\1", text))
    return text.replace("``", '"').replace("''", '"')


def help_pairs(zoo: Zoo | None = None, *, words: int = 4) -> list[tuple[str, str]]:
    """English paragraphs of LibreOffice's help with their German translations (MPL-2.0).

    Pairs share file and element; each English paragraph occurs once. Sorted by the English.

    Args:
        zoo: where the help lies.
        words: least number of English words.
    """
    zoo = zoo or Zoo.default()
    english, german = (_paragraphs(zoo.text(f"help-{code}")) for code in ("en", "de"))
    pairs: dict[str, str] = {}
    for key, text in english.items():
        other = german.get(key, text)
        if other != text and len(text.split()) >= words:
            pairs.setdefault(text, other)
    return sorted(pairs.items())


def help_pages(zoo: Zoo | None = None) -> dict[str, str]:
    """English pages of LibreOffice's help (MPL-2.0), headings and paragraphs, by file."""
    found: dict[str, list[str]] = {}
    for (name, _, _), text in _paragraphs((zoo or Zoo.default()).text("help-en")).items():
        found.setdefault(name, []).append(text)
    return {name: "\n".join(parts) for name, parts in found.items()}


class _Paragraphs(html.parser.HTMLParser):
    """Texts of paragraphs and headings that have an id, by (id, how often it came before)."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[tuple[str, int], str] = {}
        self.seen: Counter[str] = Counter()
        self.tag = self.id = ""
        self.parts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        identity = dict(attrs).get("id") or ""
        if re.fullmatch("p|h[1-6]", tag):
            named = identity.startswith(("par_", "hd_"))
            self.tag, self.id, self.parts = tag, identity if named else "", []

    def handle_data(self, data: str) -> None:
        if self.id:
            self.parts.append(data)

    def handle_endtag(self, tag: str) -> None:
        if self.id and tag == self.tag:
            if text := " ".join("".join(self.parts).split()):
                self.found[self.id, self.seen[self.id]] = text
            self.seen[self.id] += 1
            self.id = ""


def _paragraphs(folder: Path) -> dict[tuple[str, str, int], str]:
    found = {}
    for path in sorted(folder.rglob("*.html")):
        reader = _Paragraphs()
        reader.feed(path.read_text(encoding="utf-8"))
        name = str(path.relative_to(folder))
        found.update({(name, *key): text for key, text in reader.found.items()})
    return found


def mails(zoo: Zoo | None = None) -> dict[str, str]:
    """Bodies of e-mails to technical mailing lists of 2002, without headers; plain text only."""
    folder = (zoo or Zoo.default()).text("mails")
    found = {}
    for path in sorted(folder.glob("*.txt")):
        text = path.read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n")
        head, _, body = text.partition("\n\n")
        kind = re.search(r"^content-type:\s*(\S+)", head, re.IGNORECASE | re.MULTILINE)
        if kind is None or kind[1].lower().startswith("text/plain"):
            found[path.stem] = body.strip()
    if not found:
        raise OptionError(f"{folder} holds no e-mail")
    return found


# ---- speech --------------------------------------------------------------------------------


class Clip(NamedTuple):
    """A spoken sentence: samples (N,) float32 in [-1, 1], and what is said."""

    name: str
    samples: Tensor
    text: str


def speech(zoo: Zoo | None = None, *, words: int = 3, rate: int = 16_000) -> list[Clip]:
    """Telephone prompts of one speaker, with transcripts, in order of their names.

    Recorded at 8 kHz. Left out: tones, prompts that are read with variables or symbols, and
    clips over 30 s.

    Args:
        zoo: where sounds and transcripts lie.
        words: least number of words.
        rate: of the samples in Hz, `resample`d.
    """
    zoo = zoo or Zoo.default()
    folder, transcripts = zoo.text("speech"), zoo.text("transcripts")
    found = []
    for line in gzip.decompress(transcripts.read_bytes()).decode("utf-8").split("\n"):
        name, _, text = line.partition(":")
        path = folder / f"{name.strip()}.wav"
        strange = line.startswith(";") or re.search(r"[\[\]<>{}#*&/]", text)
        if not text or strange or len(text.split()) < words or not path.is_file():
            continue
        samples, _ = read_wav(path, rate)
        if len(samples) <= 30 * rate:
            found.append(Clip(name.strip(), samples, text.strip()))
    return sorted(found, key=lambda clip: clip.name)


# ---- sequences and pictures ----------------------------------------------------------------


def proteins(zoo: Zoo | None = None) -> list[tuple[str, str]]:
    """(header, residues) of 20,000 UniProt entries, 453 residues on average."""
    path = (zoo or Zoo.default()).text("proteins")
    entries = gzip.decompress(path.read_bytes()).decode("ascii").split(">")[1:]
    split = (entry.partition("\n") for entry in entries)
    return [(header.strip(), "".join(body.split())) for header, _, body in split]


_CODONS = "FFLLSSSSYY**CC*WLLLLPPPPHHQQRRRRIIIMTTTTNNKKSSRRVVVVAAAADDEEGGGG"


def _translated(bases: str) -> str:
    """Residues of complete codons, by the standard genetic code; ``*`` stops, ``X`` unknown."""
    codons = map("".join, itertools.product("tcag", repeat=3))
    code = dict(zip(codons, _CODONS, strict=True))
    return "".join(code.get(bases[i : i + 3], "X") for i in range(0, len(bases) - 2, 3))


def heavy_chains(zoo: Zoo | None = None, count: int = 200) -> list[str]:
    """Variable regions of human antibodies' heavy chains, put together from germline genes.

    A functional V gene, a D gene in a frame without stop codons and a J gene, all picked by a
    fixed seed and joined without trimming; unlike in real antibodies nothing is mutated. No
    two are the same.
    """
    folder = (zoo or Zoo.default()).text("germline")

    def genes(kind: str) -> list[str]:
        text = (folder / f"imgt_human_IGH{kind}.fasta").read_text("ascii")
        entries = (entry.partition("\n") for entry in text.split(">")[1:])
        return [
            "".join(body.split()).replace(".", "").lower()
            for head, _, body in entries
            if head.split("|")[3].strip("()[]") == "F"
        ]

    def frames(kind: str, starts: Sequence[int]) -> list[str]:
        found = [_translated(gene[start:]) for gene in genes(kind) for start in starts]
        return [residues for residues in found if residues and not set("*X") & set(residues)]

    heads, middles = frames("V", [0]), frames("D", range(3))
    # J genes are read in the frame that has the motif WG.G.
    tails = [residues for residues in frames("J", range(3)) if re.search("WG.G", residues)]
    generator = torch.Generator().manual_seed(0)

    def pick(parts: list[str]) -> str:
        return parts[int(torch.randint(len(parts), (), generator=generator))]

    found: dict[str, None] = {}
    while len(found) < count:
        found[pick(heads) + pick(middles) + pick(tails)] = None
    return list(found)


def mnist(zoo: Zoo | None = None) -> tuple[Tensor, Tensor]:
    """10,000 handwritten digits: pixels (N, 28, 28) float32 in [0, 1], labels (N,).

    Shuffled by a fixed permutation: the files are sorted by digit.
    """
    folder = (zoo or Zoo.default()).text("mnist") / "src" / "digits"
    pixels, labels = [], []
    for digit in range(10):
        data = json.loads((folder / f"{digit}.json").read_text(encoding="ascii"))["data"]
        pixels.append(torch.tensor(data, dtype=torch.float32).view(-1, 28, 28))
        labels.append(torch.full((len(pixels[-1]),), digit))
    order = torch.randperm(sum(map(len, labels)), generator=torch.Generator().manual_seed(0))
    return torch.cat(pixels)[order], torch.cat(labels)[order]
