"""The packaged corpus is whole, split as it says, and joins into documents."""

import itertools
import lzma
import struct
import zlib
from collections import Counter

import pytest

from subquad.data import Pairs, Verse, joined, preset, presets
from subquad.data.build_bible import agreement, build, held_out, module, plain, shifted, splits
from subquad.data.corpora import PACKAGED
from subquad.errors import OptionError, UnknownNameError


@pytest.fixture(scope="module")
def bible():
    return {split: preset("bible-es-en").read(split) for split in ("train", "valid", "test")}


def test_sizes(bible):
    assert {split: len(rows) for split, rows in bible.items()} == {
        "train": 28764,
        "valid": 1000,
        "test": 1000,
    }
    assert bible["train"][0] == Verse(
        "EN el principio crió Dios los cielos y la tierra.",
        "In the beginning God created the heaven and the earth.",
        "Gen.1.1",
    )
    assert bible["test"][-1].reference == "Rev.22.21"


def test_texts_are_clean(bible):
    for verse in itertools.chain(*bible.values()):
        for text in verse[:2]:
            assert text == " ".join(text.split()) and text
            assert not set(text) & set("<>\\¶\t\ufffd")


def test_training_repeats_nothing_held_out(bible):
    held = [verse for split in ("valid", "test") for verse in bible[split]]
    for side in (0, 1, 2):
        assert not {verse[side] for verse in bible["train"]} & {verse[side] for verse in held}


def test_held_out_verses_are_the_last_of_each_book(bible):
    """One boundary a book between what is trained on and what is held out."""
    order = {"train": 0, "valid": 1, "test": 2}
    places = {}
    for split, rows in bible.items():
        for verse in rows:
            _, chapter, number = verse.reference.split(".")
            places.setdefault(verse.book, []).append(((int(chapter), int(number)), order[split]))
    assert len(places) == 66
    for found in places.values():
        assert [split for _, split in sorted(found)] == sorted(split for _, split in found)
    # In proportion: shares are rounded, so each is within one verse; 69 repeats are missing.
    total = sum(map(len, places.values()))
    for found in places.values():
        count = Counter(split for _, split in found)
        assert count[1] == count[2] and abs(count[2] - 1000 * len(found) / total) < 1.2


def test_extract_writes_what_pairs_read(bible, tmp_path):
    paths = preset("bible-es-en").extract(tmp_path)
    pairs = Pairs.open(paths["valid"], on_bad="raise")
    assert pairs[:] == [verse[:2] for verse in bible["valid"]] and not pairs.problems.notes
    before = paths["valid"].stat().st_mtime_ns
    assert preset("bible-es-en").extract(tmp_path) == paths
    assert paths["valid"].stat().st_mtime_ns == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"bible-es-en.{split}.tsv" for split in ("test", "train", "valid")
    ]


def test_unknown_names():
    assert presets() == ["bible-es-en"]
    with pytest.raises(UnknownNameError, match="did you mean 'bible-es-en'"):
        preset("bible-en-es")
    with pytest.raises(UnknownNameError, match="split='dev' is none of train, valid, test"):
        preset("bible-es-en").read("dev")


def test_the_corpus_says_where_it_is_from():
    told = (PACKAGED / "README.md").read_text(encoding="utf-8")
    bible = preset("bible-es-en")
    for text in ("sword-text-sparv", "2.60-1", "sword-text-kjv", "14.3-1"):
        assert text in told and text in bible.origin
    assert "Public domain" in told and "Public domain" in bible.licence


# ---- joining -------------------------------------------------------------------------------------


def test_joined_verses_keep_all_text_in_order(bible):
    rows = bible["test"]
    found = joined(rows, 200)
    for side in (0, 1):
        assert " ".join(pair[side] for pair in found) == " ".join(verse[side] for verse in rows)
    long = joined(rows, 200, short=False)
    assert all(len(source.split()) >= 200 for source, _ in long)
    # A document ends with the verse that makes 200, and takes at most the remainder below 200.
    longest = max(len(verse.source.split()) for verse in rows)
    assert all(len(source.split()) < 2 * 200 + longest for source, _ in long)
    assert 0 < len(long) < len(found)


def test_joins_never_cross_a_book(bible):
    starts = {}
    for verse in bible["train"]:
        starts.setdefault(verse.book, verse.source)
    found = joined(bible["train"], 4000)
    ends = [source for source, _ in found]
    for start in starts.values():
        assert any(source.startswith(start) for source in ends)
        assert sum(start in source and not source.startswith(start) for source in ends) == 0


def test_joined_measures_and_documents():
    pairs = [("aa", "1"), ("b", "2"), ("ccc", "3")]
    assert joined(pairs, 3, documents=[0, 0, 0], measure=len) == [("aa b", "1 2"), ("ccc", "3")]
    assert joined(pairs, 9, documents=[0, 1, 1], measure=len, short=False) == []
    assert joined(pairs, 1, documents=[0, 0, 0], separator="\n") == pairs
    with pytest.raises(OptionError, match="size=0 .*; documents must say"):
        joined(pairs, 0)
    with pytest.raises(OptionError, match="documents has 1 elements for 3 pairs"):
        joined(pairs, 2, documents=[0])


# ---- the builder ---------------------------------------------------------------------------------


def sword(folder, name, books, licence="DistributionLicense=Public Domain"):
    """A module of two testaments with `books` in the first: {"Gen": [chapter of verses]}."""
    conf = folder / "usr/share/sword/mods.d" / f"{name}.conf"
    texts = folder / "usr/share/sword/modules/texts/ztext" / name
    conf.parent.mkdir(parents=True, exist_ok=True)
    texts.mkdir(parents=True)
    conf.write_text(f"[{name}]\n{licence}\n", encoding="utf-8")
    for testament in ("ot", "nt"):
        packed, blocks, verses = b"", b"", struct.pack("<IIH", 0, 0, 0)
        for number, (book, chapters) in enumerate(books.items() if testament == "ot" else ()):
            entries = [f'<div osisID="{book}" type="book"/>']
            for chapter, rows in enumerate(chapters, 1):
                entries += [f'<chapter n="{chapter}" osisID="{book}.{chapter}"/>', *rows]
            text = b""
            for entry in entries:
                data = entry.encode("utf-8")
                verses += struct.pack("<IIH", number, len(text), len(data))
                text += data
            block = zlib.compress(text)
            blocks += struct.pack("<III", len(packed), len(block), len(text))
            packed += block
        for suffix, data in (("bzz", packed), ("bzs", blocks), ("bzv", verses)):
            (texts / f"{testament}.{suffix}").write_bytes(data)


def test_module_reads_what_the_format_says(tmp_path):
    sword(tmp_path, "x", {"Gen": [["in <b>the</b>", "", "y é"]], "Ex": [["z"]]})
    entries = list(module(tmp_path, "x"))
    assert [entry.place for entry in entries] == [1, 2, 3, 5, 6, 7, 8]
    assert plain(entries[2].markup) == "in the" and entries[-1].markup == "z"
    with pytest.raises(OptionError, match="holds no module none"):
        list(module(tmp_path, "none"))
    sword(tmp_path, "closed", {}, licence="DistributionLicense=Copyrighted")
    with pytest.raises(OptionError, match="lacks the line"):
        list(module(tmp_path, "closed"))


def test_build_aligns_and_leaves_out_what_is_numbered_otherwise(tmp_path, monkeypatch):
    from subquad.data import build_bible

    monkeypatch.setattr(
        build_bible, "splits", lambda books, count: ["train"] * (len(books) - 1) + ["test"]
    )

    def verse(text, *numbers):
        return text + "".join(f'<w lemma="strong:H{number:04}"/>' for number in numbers)

    same = [verse("a", 1, 2), verse("b", 3), verse("z", 9)]
    moved = [verse("c", 4), verse("d", 5), verse("e", 6)]
    english = {"Gen": [same, moved], "Ex": [[verse("f", 7)], [verse("z", 8)]]}
    spanish = {
        "Gen": [[verse("A", 1, 2), "", verse("Z", 9)], [moved[1], moved[2], moved[0]]],
        "Ex": [[verse("F", 7)], [verse("Q", 8)]],
    }
    sword(tmp_path, build_bible.ENGLISH, english)
    sword(tmp_path, build_bible.SPANISH, spanish)
    out = tmp_path / "out.tsv.xz"
    assert build(tmp_path, out) == 4
    assert lzma.decompress(out.read_bytes()).decode().splitlines() == [
        "A\ta\tGen.1.1\ttrain",
        "Z\tz\tGen.1.3\trepeat",
        "F\tf\tEx.1.1\ttrain",
        "Q\tz\tEx.2.1\ttest",
    ]
    first = out.read_bytes()
    build(tmp_path, out)
    assert out.read_bytes() == first


def test_shares_of_books():
    sizes = [1533, 25, 14, 2461]
    shares = held_out(sizes, 130)
    assert sum(shares) == 130
    # Largest remainders: within one of the exact share.
    for share, size in zip(shares, sizes, strict=True):
        assert abs(share - 130 * size / sum(sizes)) < 1
    parts = splits(["a"] * 10 + ["b"] * 10, 4)
    assert parts == (["train"] * 6 + ["valid"] * 2 + ["test"] * 2) * 2


def test_chapters_that_are_numbered_otherwise():
    one, other = 'x<w lemma="strong:H0001 strong:H0002"/>', 'y<w lemma="strong:H0001"/>'
    assert agreement(one, other) == 1.0 and agreement("H0001", "H0002") == 0.0
    aligned = {f"Gen.1.{i}": (one, other) for i in range(10)}
    assert shifted(aligned | {"Gen.1.0": ("H0001", "H0002")}) == set(), "a tenth is no more"
    assert shifted(aligned | {f"Gen.1.{i}": ("H0001", "H0002") for i in (3, 4)}) == {"Gen.1"}
