"""Files as examples: every line is either an example or in the report."""

import json
import logging
import pickle

import pytest
from torch.utils.data import DataLoader

from subquad.data.pairs import BadRecord, Lines, Pairs, Problems, Records
from subquad.errors import OptionError


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        return path

    return write


def test_tsv_gives_columns_of_each_line(write):
    path = write("a.tsv", "uno\tone\tx\n dos \ttwo\ty\ntrès\tthree\tz")
    pairs = Pairs.open(path)
    assert pairs[:] == [("uno", "one"), (" dos ", "two"), ("très", "three")]
    assert (pairs[-1], pairs[1:2], len(pairs)) == (("très", "three"), [(" dos ", "two")], 3)
    assert not pairs.problems and str(pairs.problems) == ""
    assert Pairs.open(path, source=3, target=1)[0] == ("x", "uno")
    with pytest.raises(IndexError):
        pairs[3]


def test_tsv_columns_by_name(write):
    path = write("a.tab", "id\tde\ten\n1\tja\tyes\n")
    assert Pairs.open(path, source="de", target="en", header=True)[:] == [("ja", "yes")]
    assert Pairs.open(path, source="de", target=1, header=True)[:] == [("ja", "1")]
    with pytest.raises(OptionError, match="source='fr' is no column: id, de, en"):
        Pairs.open(path, source="fr", target="en", header=True)
    with pytest.raises(OptionError, match="source='de': names need header=True; target=0"):
        Pairs.open(path, source="de", target=0)


def test_every_bad_line_of_a_tsv_is_counted(write, caplog):
    lines = [
        b"a\tb",  # 1: sets the width
        b"",  # 2
        b"only one",  # 3
        b"\tno source",  # 4
        b"no target\t ",  # 5
        b"a\tb\tc",  # 6
        b"\xff\tb",  # 7
        b"good\tline\r",  # 8
    ]
    path = write("a.tsv", b"\n".join(lines) + b"\n")
    with caplog.at_level(logging.WARNING):
        pairs = Pairs.open(path)
    assert pairs[:] == [("a", "b"), ("good", "line")]
    assert [pairs.line_number(i) for i in range(2)] == [1, 8]
    problems = pairs.problems
    assert problems.lines == {
        "empty line": [2],
        "1 columns, expected 2": [3],
        "empty source": [4],
        "empty target": [5],
        "3 columns, expected 2": [6],
        "not UTF-8": [7],
        "\\r\\n at the end": [8],
    }
    assert problems.total == 6 and len(pairs) + problems.total == len(lines)
    assert problems.notes == {"\\r\\n at the end": 1}
    assert "1 left out: not UTF-8 (line 7)" in caplog.text
    with pytest.raises(OptionError, match="1 left out: empty target \\(line 5\\)"):
        Pairs.open(path, on_bad="raise")


def test_the_first_line_may_be_the_bad_one(write):
    pairs = Pairs.open(write("a.tsv", "broken\na\tb\nc\td\n"))
    assert pairs[:] == [("a", "b"), ("c", "d")]
    assert pairs.problems.lines == {"1 columns, expected 2": [1]}


def test_two_files_of_unequal_length(write):
    source, target = write("a.es", "uno\ndos\n\n\ncinco\n"), write("a.en", "one\n\nthree\n\n")
    pairs = Pairs.open((source, target))
    assert pairs[:] == [("uno", "one")]
    assert pairs.problems.lines == {
        "empty target": [2],
        "empty source": [3],
        "empty line": [4],
        "a.en ends before: pairs may be shifted": [5],
    }
    with pytest.raises(OptionError, match="are for one file"):
        Pairs.open((source, target), header=True)
    with pytest.raises(OptionError, match="one file or two, given 3"):
        Pairs.open((source, target, target))


def test_jsonl(write):
    rows = [
        json.dumps({"source": "uno", "target": "one", "translation": {"es": "1", "en": "2"}}),
        "{not json",
        "[1]",
        json.dumps({"source": "x"}),
        json.dumps({"source": 3, "target": "x"}),
        '{"source": "\\ud800", "target": "x"}',
        json.dumps({"source": "a\nb\tc", "target": "d"}),
        '{"source": "x", "target": "y", "more": ' + "9" * 5000 + "}",  # Python reads 4300 digits
    ]
    path = write("a.jsonl", "\n".join(rows))
    pairs = Pairs.open(path)
    assert pairs[:] == [("uno", "one"), ("a\nb\tc", "d")]
    assert pairs.problems.lines == {
        "not JSON": [2, 8],
        "no JSON object": [3],
        "no key 'target'": [4],
        "'source' is no text": [5],
        "'source' has half a surrogate pair": [6],
    }
    nested = Pairs.open(path, source="translation.es", target="translation.en")
    assert nested[:] == [("1", "2")]
    assert nested.problems.counts["no key 'translation.es'"] == 4


def test_marks_and_line_ends_are_noted(write):
    pairs = Pairs.open(write("a.tsv", b"\xef\xbb\xbfa\tb\r\nc\td\r\n"), on_bad="raise")
    assert pairs[:] == [("a", "b"), ("c", "d")]
    assert pairs.problems.notes == {"byte order mark": 1, "\\r\\n at the end": 2}


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.tsv", b"\xff\xfea\x00", "is UTF-16, expected UTF-8"),
        ("a.tsv.gz", b"\x1f\x8b", "is compressed"),
        ("a.csv", b"a,b", "given .csv"),
        ("a.tsv", b"", "0 records"),
        ("a.tsv", b"x\ny\n", "2 left out: 1 columns, expected 2 (lines 1, 2)"),
    ],
)
def test_unusable_files_say_why(write, name, content, told):
    with pytest.raises(OptionError) as error:
        Pairs.open(write(name, content))
    assert told in str(error.value)


def test_missing_files_and_wrong_options(tmp_path, write):
    with pytest.raises(OptionError, match="is no file"):
        Pairs.open(tmp_path / "none.tsv")
    with pytest.raises(OptionError, match="on_bad='ignore'"):
        Pairs.open(write("a.tsv", "a\tb\n"), on_bad="ignore")
    with pytest.raises(OptionError, match="header is for TSV"):
        Pairs.open(write("a.jsonl", "{}"), header=True)


def test_lines_of_plain_text(write):
    path = write("a.txt", b"one\n\n\xff\ntwo")
    lines = Lines.open(path)
    assert lines[:] == ["one", "two"] and lines.line_number(1) == 4
    assert lines.problems.lines == {"not UTF-8": [3]}


class Paragraphs(Records[list[str]]):
    blocks = True

    def parse(self, *texts):
        found = texts[0].split("\n")
        if "bad" in found:
            raise BadRecord("a bad one")
        return found


def test_blocks_of_lines(write):
    path = write("a.txt", b"\n\na\nb\r\n\n \nbad\nc\n\n\nd")
    blocks = Paragraphs(path)
    assert blocks[:] == [["a", "b"], ["d"]]
    assert [blocks.line_number(i) for i in range(2)] == [3, 11]
    assert blocks.problems.lines["a bad one"] == [7]


def test_offsets_after_long_and_wide_lines(write):
    texts = [f"{'é' * (i % 97)}{i}" for i in range(1009)]
    lines = Lines.open(write("a.txt", "\n".join(texts)))
    assert [lines[i] for i in reversed(range(1009))] == texts[::-1]


def test_pickles_and_reads_in_workers(write):
    path = write("a.tsv", "".join(f"s{i}\tt{i}\n" for i in range(23)))
    pairs = Pairs.open(path)
    pairs[0]  # the map is open, and stays out of the pickle
    again = pickle.loads(pickle.dumps(pairs))
    assert again[:] == pairs[:] and again.fingerprint == pairs.fingerprint
    loader = DataLoader(pairs, batch_size=4, num_workers=2, collate_fn=list)
    assert [pair for batch in loader for pair in batch] == pairs[:]


def test_a_changed_file_is_refused(write):
    path = write("a.tsv", "a\tb\n")
    pairs = Pairs.open(path)
    write("a.tsv", "longer\tb\n")
    with pytest.raises(OptionError, match="has changed"):
        pairs[0]


def test_fingerprint_is_of_bytes_and_columns(write):
    one = Pairs.open(write("a.tsv", "a\tb\tc\n"))
    assert one.fingerprint == Pairs.open(write("b.tsv", "a\tb\tc\n")).fingerprint
    assert one.fingerprint != Pairs.open(write("a.tsv", "a\tb\tc\n"), target=3).fingerprint
    assert one.fingerprint != Pairs.open(write("c.tsv", "a\tb\td\n")).fingerprint


def test_problems_show_ten_lines_and_the_number_of_all():
    problems = Problems()
    for line in range(1, 1235):
        problems.add("empty source", line)
    assert str(problems) == "1,234 left out: empty source (lines 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, …)"
