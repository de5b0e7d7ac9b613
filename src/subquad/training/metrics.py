"""Metrics of labels, tags, answers and summaries, by their published definitions.

All are shares from 0 to 1. Of translations, `subquad score` gives BLEU and chrF.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

from subquad.errors import ShapeError

__all__ = [
    "accuracy",
    "answer_f1",
    "exact_match",
    "macro_f1",
    "rouge_l",
    "rouge_n",
    "span_f1",
    "spans",
]

Token = TypeVar("Token", bound=Hashable)

# ---- labels ------------------------------------------------------------------------------


def accuracy(predicted: Sequence[Hashable], wanted: Sequence[Hashable]) -> float:
    """The share of predictions that are right.

    >>> accuracy(["a", "b", "b", "a"], ["a", "b", "a", "a"])
    0.75

    Raises:
        ShapeError: nothing, or not as many of both; so do all metrics of this file.
    """
    _same_length(predicted, wanted)
    return sum(map(_equal, predicted, wanted)) / len(wanted)


def macro_f1(predicted: Sequence[Hashable], wanted: Sequence[Hashable]) -> float:
    """The mean of F1 over labels, each counted once however rare it is.

        F1(label) = 2·TP / (2·TP + FP + FN)

    Labels are those that occur, predicted or wanted; scikit-learn's `f1_score` with
    ``average="macro"``. Opitz and Burst 2019, arXiv 1911.03347, equation 2 ("averaged F1").

    >>> macro_f1(["a", "b", "b", "a"], ["a", "b", "a", "a"])  # (4/5 + 2/3) / 2
    0.7333333333333334
    """
    _same_length(predicted, wanted)
    right = Counter(one for one, other in zip(predicted, wanted, strict=True) if one == other)
    seen = Counter(predicted) + Counter(wanted)  # 2·TP + FP + FN
    return sum(2 * right[label] / count for label, count in seen.items()) / len(seen)


# ---- tags ----------------------------------------------------------------------------------

Span = tuple[str, int, int]
"""(kind, first word, word behind the last)."""

_ALONE, _ENDS = ("S", "U"), ("E", "L")


def spans(tags: Sequence[str]) -> list[Span]:
    """The spans that tags such as "B-PER", "I-PER", "O" mean, in their order.

    A span begins at B, and at I where none of its kind is open: the rule of conlleval, the script
    of the shared tasks CoNLL-2000 and 2003, under which IOB1, IOB2 and BIOES (also BILOU) are read
    alike. Tags without a dash, but O, are one span a word.

    >>> spans(["B-PER", "I-PER", "O", "I-LOC", "B-LOC"])
    [('PER', 0, 2), ('LOC', 3, 4), ('LOC', 4, 5)]
    """
    found: list[Span] = []
    open_kind: str | None = None  # of the last span, if the next word can continue it
    for place, tag in enumerate(tags):
        if tag == "O":
            open_kind = None
            continue
        mark, dash, kind = tag.partition("-")
        if not dash:
            mark, kind = "S", tag
        if mark not in ("B", *_ALONE) and open_kind == kind:
            _, first, _ = found.pop()
        else:
            first = place
        found.append((kind, first, place + 1))
        open_kind = None if mark in (*_ALONE, *_ENDS) else kind
    return found


def span_f1(predicted: Iterable[Sequence[str]], wanted: Iterable[Sequence[str]]) -> float:
    """F1 of spans over all sentences: 2·|P ∩ W| / (|P| + |W|); both ends and the kind must agree.

    1 where neither has a span. Tjong Kim Sang and De Meulder 2003, arXiv cs/0306050, section 2.4.

    >>> span_f1([["B-PER", "I-PER", "O", "B-LOC"]], [["B-PER", "O", "O", "B-LOC"]])
    0.5
    """
    right = count = 0
    for mine, theirs in zip(predicted, wanted, strict=True):
        _same_length(mine, theirs)
        one, other = set(spans(mine)), set(spans(theirs))
        right += len(one & other)
        count += len(one) + len(other)
    return 2 * right / count if count else 1.0


# ---- answers ---------------------------------------------------------------------------------

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def _answer_words(text: str) -> list[str]:
    """Words of an answer as SQuAD compares them: lower case, no punctuation, no articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def exact_match(predicted: str, answers: Sequence[str]) -> float:
    """1 if the prediction is one of the answers, but for case, punctuation and a, an, the; else 0.

    Rajpurkar et al. 2016, arXiv 1606.05250, section 6.1.

    >>> exact_match("the Eiffel Tower.", ["Eiffel tower", "tower"])
    1.0
    """
    _some(answers)
    words = _answer_words(predicted)
    return float(any(words == _answer_words(answer) for answer in answers))


def answer_f1(predicted: str, answers: Sequence[str]) -> float:
    """The best F1 of the prediction's words with those of an answer.

        F1 = 2·|P ∩ W| / (|P| + |W|)      of bags of words; 1 where both are empty

    Rajpurkar et al. 2016, arXiv 1606.05250, section 6.1.

    >>> answer_f1("in Paris, France", ["Paris"])
    0.5
    """
    if exact_match(predicted, answers):  # two empty bags, too
        return 1.0
    words = Counter(_answer_words(predicted))
    return max(_overlap(words, Counter(_answer_words(answer))) for answer in answers)


# ---- summaries -------------------------------------------------------------------------------

_WORD = re.compile(r"\w+")


def _summary_words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def rouge_n(predicted: str, wanted: str, n: int) -> float:
    """ROUGE-N: F1 of the n-grams of words, as bags.

        F1 = 2·Σ_g min(P(g), W(g)) / (Σ_g P(g) + Σ_g W(g)),   0 without any n-gram

    Words are runs of letters and digits of any script, in lower case, not stemmed. Lin 2004
    ("ROUGE", ACL W04-1013), section 2 (deviation: F1, as has become usual, for recall).

    >>> rouge_n("the cat sat", "the cat sat down", 2)  # 2 of 2, and 2 of 3
    0.8
    """
    one, other = (Counter(_grams(_summary_words(text), n)) for text in (predicted, wanted))
    return _overlap(one, other)


def rouge_l(predicted: str, wanted: str) -> float:
    """ROUGE-L: 2·|longest common subsequence| / (|P| + |W|), in words of the whole text.

    O(|P|·|W|). Lin 2004, section 3.1, with β = 1; words as in `rouge_n`.

    >>> rouge_l("police kill the gunman", "police killed the gunman")
    0.75
    """
    one, other = _summary_words(predicted), _summary_words(wanted)
    if not one or not other:
        return 0.0
    row = [0] * (len(other) + 1)
    for word in one:
        above = row
        row = [0]
        for place, opposite in enumerate(other):
            row.append(above[place] + 1 if word == opposite else max(above[place + 1], row[-1]))
    return 2 * row[-1] / (len(one) + len(other))


# ---- what they share -----------------------------------------------------------------------


def _grams(words: Sequence[str], n: int) -> Iterable[tuple[str, ...]]:
    return zip(*(words[start:] for start in range(n)), strict=False)


def _overlap(one: Counter[Token], other: Counter[Token]) -> float:
    """F1 of two bags; 0 where both are empty."""
    count = one.total() + other.total()
    return 2 * (one & other).total() / count if count else 0.0


def _equal(one: Hashable, other: Hashable) -> bool:
    return one == other


def _same_length(predicted: Sequence[object], wanted: Sequence[object]) -> None:
    if len(predicted) != len(wanted) or not wanted:
        raise ShapeError(
            f"predicted and wanted must be as many, one at least, given {len(predicted)} and "
            f"{len(wanted)}"
        )


def _some(answers: Sequence[str]) -> None:
    if isinstance(answers, str) or not answers:
        raise ShapeError("answers must be a sequence of texts, one at least")
