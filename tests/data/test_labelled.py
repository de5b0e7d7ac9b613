"""Labelled files: what is read, what is wrong in which line; masks by their shares."""

import json

import pytest
import torch
from transformers import AutoTokenizer

from subquad.data.labelled import Labelled, MaskTokens, Question, Questions, Tagged
from subquad.data.tokens import train_tokenizer
from subquad.errors import OptionError


def file(folder, name, text):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


# ---- labels ----------------------------------------------------------------------------------


def test_a_line_is_a_text_and_its_label(tmp_path):
    path = file(tmp_path, "a.tsv", "one two\tgood\n\nno\n\tbad\nthree\t \na\tb\tc\nfour\tbad \n")
    rows = Labelled.open(path)
    assert rows[:] == [("one two", "good"), ("four", "bad")]
    assert [rows.line_number(i) for i in (0, 1)] == [1, 7]
    assert rows.problems.lines == {
        "empty line": [2],
        "1 columns, expected 2": [3],
        "empty text": [4],
        "empty label": [5],
        "3 columns, expected 2": [6],
    }
    with pytest.raises(OptionError, match="1 left out: empty label .line 5."):
        Labelled.open(path, on_bad="raise")


def test_labels_in_json_may_be_numbers(tmp_path):
    lines = [
        {"text": "a\tb", "label": "x"},
        {"text": "c", "label": 3},
        {"text": "d", "label": True},
        {"text": "e"},
        {"text": 5, "label": "y"},
    ]
    path = file(tmp_path, "a.jsonl", "\n".join(map(json.dumps, lines)) + "\nnonsense\n")
    rows = Labelled.open(path)
    assert rows[:] == [("a\tb", "x"), ("c", "3")]
    assert rows.problems.lines == {
        "'label' is no text": [3],
        "no key 'label'": [4],
        "'text' is no text": [5],
        "not JSON": [6],
    }
    other = file(tmp_path, "b.jsonl", '{"body": "a", "class": "x"}\n')
    assert Labelled.open(other, text="body", label="class")[0] == ("a", "x")


# ---- tags ------------------------------------------------------------------------------------


def test_sentences_are_apart_by_empty_lines(tmp_path):
    text = "-DOCSTART- -X- O\n\nAda NNP B-PER\ncounts VBZ O\n\n\n \nRome NNP B-LOC"
    rows = Tagged.open(file(tmp_path, "a.conll", text))
    assert rows[:] == [(["Ada", "counts"], ["B-PER", "O"]), (["Rome"], ["B-LOC"])]
    assert not rows.problems and [rows.line_number(i) for i in (0, 1)] == [3, 8]
    assert Tagged.open(rows.files[0].path, tag=2)[1] == (["Rome"], ["NNP"])


def test_conll_u_has_comments_and_its_own_columns(tmp_path):
    text = "# sent_id = 1\n# a b c\n1\t#\t_\tSYM\n2\tis a\t_\tAUX\n"
    rows = Tagged.open(file(tmp_path, "a.conllu", text), word=2, tag=4)
    assert rows[:] == [(["#", "is a"], ["SYM", "AUX"])]
    spaces = Tagged.open(file(tmp_path, "b.conll", "# O\nb O\n"))  # a word, without tabs
    assert spaces[:] == [(["#", "b"], ["O", "O"])]


def test_bad_sentences_are_told_by_their_first_line(tmp_path):
    text = "a X\nb\n\nc X Y\nd X\n\ne\tX\n\t X\n\nf\tX\r\n"
    rows = Tagged.open(file(tmp_path, "a.conll", text), tag=2)
    assert rows[:] == [(["f"], ["X"])]
    assert rows.problems.lines == {
        "a line with fewer than 2 columns": [1],
        "lines with different numbers of columns": [4],
        "an empty word or tag": [7],
        "\\r\\n at the end": [10],
    }
    with pytest.raises(OptionError, match="word=0 must be a column.*tag='x' must be a column"):
        Tagged.open(rows.files[0].path, word=0, tag="x")


# ---- questions -------------------------------------------------------------------------------


def test_questions_in_both_forms(tmp_path):
    own = {"context": "Ada counts.", "question": "Who?", "answer": "Ada", "start": 0}
    squad = {
        "context": "in Rome, Italy",
        "question": "Where?",
        "answers": {"text": ["Rome", "Rome, Italy"], "answer_start": [3, 3]},
    }
    rows = Questions.open(file(tmp_path, "a.jsonl", json.dumps(own) + "\n" + json.dumps(squad)))
    assert rows[:] == [
        Question("Who?", "Ada counts.", ("Ada",), 0),
        Question("Where?", "in Rome, Italy", ("Rome", "Rome, Italy"), 3),
    ]


def test_answers_stand_where_they_say(tmp_path):
    good = {"context": "Ada counts.", "question": "Who?", "answer": "Ada", "start": 0}
    wrong = {
        "an answer is not where its start says": {"start": 1},
        "an answer is no text with a start": {"start": None},
        "no key 'context'": {"context": None},
        "empty question": {"question": " "},
        "no answer": {"answers": {"text": [], "answer_start": []}},
        "'answers' has no lists text and answer_start of one length": {"answers": ["Ada"]},
    }
    lines = [good]
    for change in wrong.values():
        lines.append({k: v for k, v in {**good, **change}.items() if v is not None or k == "start"})
    rows = Questions.open(file(tmp_path, "a.jsonl", "\n".join(map(json.dumps, lines))))
    assert len(rows) == 1
    assert rows.problems.lines == {kind: [2 + i] for i, kind in enumerate(wrong)}


# ---- masks -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    words = [f"w{i}" for i in range(95)]
    return train_tokenizer([" ".join(words)] * 2, kind="word", vocab_size=300)


def test_masks_have_berts_shares(tokenizer):
    mask = MaskTokens(tokenizer, share=0.15, seed=3)
    count, most = 40_000, len(tokenizer) - 5
    ids = torch.arange(count).view(100, -1) % most + 5
    read, labels = mask.masked(ids)
    asked = labels != -100
    assert torch.equal(labels[asked], ids[asked]) and torch.equal(read[~asked], ids[~asked])
    masked, same = read == tokenizer.mask_token_id, read == ids
    # A tenth of the changed ones, one in `most`, are drawn as what they were: 0.1 ± 0.1/most.
    found = {
        "asked": (asked.float().mean(), 0.15, count),
        "masked": (masked[asked].float().mean(), 0.8, int(asked.sum())),
        "same": (same[asked].float().mean(), 0.1 + 0.1 / most, int(asked.sum())),
    }
    for name, (share, wanted, size) in found.items():
        # five deviations of a binomial share: exceeded once in 1.7 million seeds
        assert abs(share - wanted) < 5 * (wanted * (1 - wanted) / size) ** 0.5, name
    assert int(read[asked & ~masked].min()) >= 5  # no special token in a token's place


def test_special_tokens_and_padding_are_never_asked_for(tokenizer):
    batch = MaskTokens(tokenizer, share=1.0)([[5, 6, 7, 2], [8, 2]])
    assert batch["labels"].tolist() == [[5, 6, 7, -100], [8, -100, -100, -100]]
    assert batch["input_ids"][:, -1].tolist() == [2, 0]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]


def test_masks_go_on_from_a_state_and_no_batch_is_without_one(tokenizer):
    one, other = MaskTokens(tokenizer, seed=1), MaskTokens(tokenizer, seed=2)
    ids = torch.arange(5, 95).view(3, -1)
    assert not torch.equal(one.masked(ids)[1], other.masked(ids)[1])
    other.generator.set_state(one.generator.get_state())
    assert all(map(torch.equal, one.masked(ids), other.masked(ids)))
    rare = MaskTokens(tokenizer, share=1e-9)
    for _ in range(3):
        assert (rare.masked(ids)[1] != -100).sum() == 1
    nothing = torch.full((2, 3), tokenizer.eos_token_id)
    assert (rare.masked(nothing)[1] == -100).all()


def test_wrong_masks_are_named(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    without = AutoTokenizer.from_pretrained(tmp_path, mask_token=None)
    with pytest.raises(OptionError, match="share=0.0 must be .*; seed=-1 must be .*; .* no mask"):
        MaskTokens(without, share=0.0, seed=-1)
