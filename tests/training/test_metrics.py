"""Metrics by hand."""

import random

import pytest

from subquad.errors import ShapeError
from subquad.training.metrics import (
    accuracy,
    answer_f1,
    exact_match,
    macro_f1,
    rouge_l,
    rouge_n,
    span_f1,
    spans,
)


def test_macro_f1_counts_each_label_once():
    wanted = ["a"] * 8 + ["b", "c"]
    assert accuracy(["a"] * 10, wanted) == 0.8
    assert macro_f1(["a"] * 10, wanted) == pytest.approx((16 / 18 + 0 + 0) / 3)
    assert macro_f1([*"aaaaaaaabd"], wanted) == pytest.approx((1 + 1 + 0 + 0) / 4)


def test_macro_f1_is_precisions_and_recalls_harmonic_mean():
    draw = random.Random(0)
    mine, theirs = ([draw.choice("abcd") for _ in range(300)] for _ in range(2))
    found = []
    for label in "abcd":
        right = sum(a == b == label for a, b in zip(mine, theirs, strict=True))
        precision, recall = right / mine.count(label), right / theirs.count(label)
        found.append(2 * precision * recall / (precision + recall))
    assert macro_f1(mine, theirs) == pytest.approx(sum(found) / 4)


@pytest.mark.parametrize(
    ("tags", "wanted"),
    [
        ("B-A I-A O", [("A", 0, 2)]),
        ("I-A I-A B-A", [("A", 0, 2), ("A", 2, 3)]),  # IOB1
        ("B-A I-B I-B", [("A", 0, 1), ("B", 1, 3)]),  # another kind begins
        ("B-A B-A", [("A", 0, 1), ("A", 1, 2)]),
        ("S-A S-A B-A I-A E-A", [("A", 0, 1), ("A", 1, 2), ("A", 2, 5)]),  # BIOES
        ("B-A L-A U-A I-A", [("A", 0, 2), ("A", 2, 3), ("A", 3, 4)]),  # BILOU
        ("E-A I-A", [("A", 0, 1), ("A", 1, 2)]),  # behind an end another one begins
        ("O O", []),
        ("N V O", [("N", 0, 1), ("V", 1, 2)]),
        ("B-A-B I-A-B", [("A-B", 0, 2)]),
    ],
)
def test_spans_by_hand(tags, wanted):
    assert spans(tags.split()) == wanted


def test_span_f1_by_hand():
    """The example of the shared task's script: both ends and the kind have to agree."""
    wanted = [["B-PER", "I-PER", "O", "B-LOC"], ["O", "B-ORG", "I-ORG"], ["O"]]
    found = [["B-PER", "I-PER", "O", "B-ORG"], ["O", "B-ORG", "O"], ["B-LOC"]]
    # right: PER; found: PER, ORG, ORG, LOC; wanted: PER, LOC, ORG
    assert span_f1(found, wanted) == pytest.approx(2 * 1 / (4 + 3))
    assert span_f1(wanted, wanted) == 1.0
    assert span_f1([["O"]], [["O"]]) == 1.0
    assert span_f1([["B-A"]], [["O"]]) == 0.0


def test_answers_by_squads_definition():
    assert exact_match("The  Cat!", ["a cat"]) == 1.0
    assert exact_match("cats", ["cat", "dog"]) == 0.0
    assert answer_f1("the big cat", ["big cat sat", "dog"]) == pytest.approx(2 * 2 / (2 + 3))
    assert answer_f1("cat cat", ["cat"]) == pytest.approx(2 * 1 / 3)  # bags: counted once
    assert answer_f1("", ["the"]) == 1.0 and answer_f1("x", ["the"]) == 0.0
    with pytest.raises(ShapeError, match="sequence of texts"):
        exact_match("a", "a")


def test_rouge_by_hand():
    """Lin 2004, section 3.1: the two candidates that share a bigram each with the reference."""
    wanted = "police killed the gunman"
    assert rouge_n("police kill the gunman", wanted, 1) == 3 / 4
    assert rouge_n("police kill the gunman", wanted, 2) == pytest.approx(2 * 1 / 6)
    assert rouge_n("the gunman kill police", wanted, 2) == pytest.approx(2 * 1 / 6)
    assert rouge_l("police kill the gunman", wanted) == 3 / 4
    assert rouge_l("the gunman kill police", wanted) == 2 / 4
    assert rouge_n("a a a", "a a", 1) == pytest.approx(2 * 2 / 5)
    assert rouge_l("", "") == 0.0 and rouge_l("a", "") == 0.0 and rouge_n("a", "a", 2) == 0.0


def test_rouge_l_is_the_longest_common_subsequence():
    def longest(a, b):
        if not a or not b:
            return 0
        if a[-1] == b[-1]:
            return 1 + longest(a[:-1], b[:-1])
        return max(longest(a[:-1], b), longest(a, b[:-1]))

    draw = random.Random(1)
    for _ in range(20):
        a, b = ([draw.choice("abc") for _ in range(draw.randint(1, 7))] for _ in range(2))
        wanted = 2 * longest(a, b) / (len(a) + len(b))
        assert rouge_l(" ".join(a), " ".join(b)) == pytest.approx(wanted)


def test_lengths_have_to_agree():
    for metric in (accuracy, macro_f1):
        with pytest.raises(ShapeError, match="given 1 and 2"):
            metric(["a"], ["a", "b"])
        with pytest.raises(ShapeError, match="given 0 and 0"):
            metric([], [])
    with pytest.raises(ShapeError, match="given 1 and 2"):
        span_f1([["O"]], [["O", "O"]])
