"""Encoded texts: what the tokenizer gives, from memory or from the disk, with a report."""

import itertools
import pickle

import pytest
import torch

from subquad.data import EncodedLines, EncodedPairs, PackedLines, Pairs, packed, train_tokenizer
from subquad.errors import OptionError

pytest.importorskip("transformers")

PAIRS = [("uno dos tres", "one two"), ("cuatro", "four five six seven"), ("ocho", "eight")] * 401


@pytest.fixture(scope="module")
def tokenizer():
    texts = [text for pair in PAIRS[:3] for text in pair]
    return train_tokenizer(texts, kind="word", min_frequency=1)


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text("bad\n" + "".join(f"{s}\t{t}\n" for s, t in PAIRS), encoding="utf-8")
    return Pairs.open(path)


@pytest.mark.parametrize("on_disk", [False, True])
def test_rows_are_what_the_tokenizer_gives(pairs, tokenizer, tmp_path, on_disk):
    steps = []
    encoded = EncodedPairs(
        pairs,
        tokenizer,
        folder=tmp_path / "cache" if on_disk else None,
        progress=lambda *step: steps.append(step),
    )
    assert len(encoded) == len(PAIRS) == 1203 and steps == [(1000, 1203), (1203, 1203)]
    for i in (0, 1, 2, 999, 1000, 1202, -1):
        source, target = PAIRS[i]
        row = encoded[i]
        assert row["input_ids"].tolist() == tokenizer(source).input_ids
        assert row["labels"].tolist() == tokenizer(target).input_ids
        assert row["labels"].dtype == torch.int64
    expected = [[len(tokenizer(text).input_ids) for text in pair] for pair in PAIRS[:3]]
    assert encoded.lengths.tolist() == expected * 401
    assert encoded.indices.tolist() == list(range(1203))
    with pytest.raises(IndexError):
        encoded[1203]


def test_files_are_found_again(pairs, tokenizer, tmp_path):
    class Counting:
        def __init__(self):
            self.calls = 0

        def __call__(self, *args, **kwargs):
            self.calls += 1
            return tokenizer(*args, **kwargs)

        def __getattr__(self, name):
            return getattr(tokenizer, name)

    counting, folder = Counting(), tmp_path / "cache"
    first = EncodedPairs(pairs, counting, folder=folder, max_source=3)
    calls = counting.calls
    tokenizer("x", truncation=True, max_length=2)  # changes the backend's own settings
    again = EncodedPairs(pairs, counting, folder=folder, max_source=3)
    assert counting.calls == calls and again.problems == first.problems and first.problems.notes
    assert torch.equal(again.lengths, first.lengths)
    # Anything that changes the ids makes other files.
    EncodedPairs(pairs, counting, folder=folder, max_source=4)
    other = train_tokenizer(["uno"], kind="char", vocab_size=9)
    EncodedPairs(pairs, other, folder=folder, max_source=3)
    EncodedPairs(PAIRS, counting, folder=folder, max_source=3)
    EncodedPairs(PAIRS[:-1], counting, folder=folder, max_source=3)
    assert len(list(folder.glob("*.json"))) == 5 and not list(folder.glob("*.partial"))


def test_pickles_by_name_of_the_file(pairs, tokenizer, tmp_path):
    encoded = EncodedPairs(pairs, tokenizer, folder=tmp_path)
    data = pickle.dumps(encoded)
    # 1203 rows would take 4 bytes a token at least.
    assert len(data) < 4 * encoded.total
    assert pickle.loads(data)[1202]["labels"].tolist() == encoded[1202]["labels"].tolist()


def test_long_texts(pairs, tokenizer):
    cut = EncodedPairs(pairs, tokenizer, max_source=3, max_target=4)
    assert cut[0]["input_ids"].tolist() == [*tokenizer("uno dos").input_ids[:2], 2]
    assert cut[1]["labels"].tolist() == [*tokenizer("four five six").input_ids[:3], 2]
    assert cut.problems.notes == {
        "source longer than 3 tokens": 401,
        "target longer than 4 tokens": 401,
    }
    assert cut.problems.lines["source longer than 3 tokens"][:3] == [2, 5, 8], "lines of the file"
    assert len(cut) == 1203 and not cut.problems

    dropped = EncodedPairs(pairs, tokenizer, max_source=3, max_target=4, on_long="drop")
    assert len(dropped) == 401 and dropped.indices.tolist() == list(range(2, 1203, 3))
    assert dropped[0]["labels"].tolist() == tokenizer("eight").input_ids
    assert dropped.problems.total == 802

    with pytest.raises(OptionError, match="401 left out: source longer than 3 tokens"):
        EncodedPairs(pairs, tokenizer, max_source=3, on_long="raise")
    with pytest.raises(OptionError, match="no text is left"):
        EncodedPairs(PAIRS[:1], tokenizer, max_source=2, on_long="drop")


def test_unknown_tokens_are_noted(tokenizer):
    encoded = EncodedPairs([("uno", "one"), ("xyz", "one")], tokenizer)
    assert encoded.problems.lines == {"source with unknown tokens": [2]}


def test_two_tokenizers(tokenizer):
    other = train_tokenizer(["one"], kind="char")
    encoded = EncodedPairs([("uno", "one")], tokenizer, target_tokenizer=other)
    assert encoded[0]["labels"].tolist() == other("one").input_ids


def test_a_failed_pass_leaves_no_file(tokenizer, tmp_path):
    def fail(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        EncodedPairs(PAIRS, tokenizer, folder=tmp_path, progress=fail)
    assert not list(tmp_path.iterdir())


def test_wrong_arguments(tokenizer, tmp_path):
    with pytest.raises(OptionError, match="on_long='cut'.*; max_source=1 must be an integer ≥ 2"):
        EncodedPairs(PAIRS, tokenizer, max_source=1, on_long="cut")
    with pytest.raises(OptionError, match="no text to encode"):
        EncodedPairs([], tokenizer)
    with pytest.raises(OptionError, match="needs a fast tokenizer"):
        EncodedPairs(PAIRS, object(), folder=tmp_path)


# ---- packing -------------------------------------------------------------------------------------

DOCUMENTS = [[5, 6, 7], [8], [], [9, 10, 11, 12, 13, 14, 15, 16], [17, 2]]


@pytest.mark.parametrize("length", [1, 2, 3, 5, 7, 100])
@pytest.mark.parametrize("eos", [None, 2])
def test_packing_loses_no_token(length, eos):
    blocks = [block["input_ids"].tolist() for block in packed(DOCUMENTS, length, eos=eos)]
    ended = [row if eos is None or row[-1:] == [eos] else [*row, eos] for row in DOCUMENTS]
    assert [*itertools.chain(*blocks)] == [*itertools.chain(*ended)]
    assert all(len(block) == length for block in blocks[:-1]) and 0 < len(blocks[-1]) <= length


def test_boundaries_of_documents():
    blocks = list(packed([[5, 6], [7, 7, 7, 7, 7], [8]], 4, eos=2, boundaries=True))
    assert [block["segment_ids"].tolist() for block in blocks] == [
        [0, 0, 0, 1],
        [0, 0, 0, 0],
        [0, 1, 1],
    ]
    assert [block["position_ids"].tolist() for block in blocks] == [
        [0, 1, 2, 0],
        [0, 1, 2, 3],
        [0, 0, 1],
    ]
    assert torch.equal(blocks[0]["labels"], blocks[0]["input_ids"])
    with pytest.raises(OptionError, match="length=0"):
        packed([[1]], 0)


@pytest.mark.parametrize("length", [1, 3, 4, 11, 10_000])
@pytest.mark.parametrize("on_disk", [False, True])
def test_packed_lines_are_what_packed_gives(tokenizer, tmp_path, length, on_disk):
    texts = [source for source, _ in PAIRS[:100]]
    lines = EncodedLines(texts, tokenizer, folder=tmp_path if on_disk else None)
    blocks = PackedLines(lines, length, boundaries=True)
    expected = list(packed((tokenizer(text).input_ids for text in texts), length, boundaries=True))
    assert len(blocks) == len(expected)
    assert blocks.lengths.tolist() == [len(block["input_ids"]) for block in expected]
    for i in reversed(range(len(expected))):
        assert blocks[i].keys() == expected[i].keys()
        assert all(torch.equal(blocks[i][name], expected[i][name]) for name in expected[i])
    assert lines.lengths.tolist() == [len(tokenizer(text).input_ids) for text in texts]
    assert lines[1]["input_ids"].tolist() == tokenizer(texts[1]).input_ids
