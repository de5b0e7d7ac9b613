"""Tokenizers, trained with the `tokenizers` library, that give back the text they were given."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from subquad.errors import OptionError
from subquad.options import choice_problem, flag_problem, integer_problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["LEAST", "SPECIAL_TOKENS", "both_sides", "train_tokenizer"]

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>", "<mask>")
"""Ids 0 to 4 of every tokenizer that is trained here."""

_PAD, _BOS, _EOS, _UNKNOWN, _MASK = SPECIAL_TOKENS
LEAST = {"bpe": 261, "unigram": 261, "word": 6, "char": 6}
"""Fewest tokens that a vocabulary of each kind can have: over bytes these, and the special ones."""

_SPACE = "▁"
_LETTER = r"\p{L}\p{M}_"
_WORDS = "|".join(
    (
        rf"{_SPACE}?[{_LETTER}]+",  # a word,
        rf"{_SPACE}?\p{{N}}+",  # the digits of a number,
        rf"{_SPACE}?[^\s{_SPACE}{_LETTER}\p{{N}}]",  # or another sign, with the space before it;
        rf"{_SPACE}|\s",  # other white space
    )
)


def train_tokenizer(
    texts: Iterable[str],
    *,
    kind: str = "bpe",
    vocab_size: int = 8000,
    lowercase: bool = False,
    min_frequency: int = 2,
    max_length: int | None = None,
) -> PreTrainedTokenizerFast:
    """A tokenizer for `texts`, the same for the same texts in the same order.

    ==========  ===========================================================  ==============
    kind        tokens                                                       unknown tokens
    ==========  ===========================================================  ==============
    "bpe"       byte pairs merged by frequency (Sennrich et al. 2016,        none
                arXiv 1508.07909), over bytes
    "unigram"   pieces of a unigram language model (Kudo 2018, arXiv         none
                1804.10959), over bytes
    "word"      words, runs of digits, single signs                          rare words
    "char"      single characters                                            unseen ones
    ==========  ===========================================================  ==============

    Every kind is lossless where it has no unknown token: ``decode(ids,
    skip_special_tokens=True)`` is the text again, white space included, so that a score such
    as BLEU is of raw text. A space belongs to the token behind it, and one is put before the
    text and taken away again, so that a word is one token at the start and inside. Exceptions:
    `lowercase`; for "word" the sign ▁ (U+2581) comes back as a space; the five special
    tokens' own names are read as these tokens.

    Ids: ``<pad>`` 0, ``<s>`` 1 (bos), ``</s>`` 2 (eos), ``<unk>`` 3, ``<mask>`` 4. A text is
    encoded as ids + eos, a pair of texts as ids + eos + ids + eos.

    Args:
        texts: read once, one by one; `both_sides` gives those of pairs.
        kind: see above.
        vocab_size: most tokens, the special ones included; over bytes at least 261. Fewer
            where the texts do not give more.
        lowercase: texts are lower-cased.
        min_frequency: tokens of "bpe" and "word" are seen at least as often.
        max_length: what the tokenizer says a model takes (``model_max_length``).

    Raises:
        OptionError: wrong arguments (all are named); no texts; an element that is no text.
        ImportError: the extra ``hf`` is missing.

    Example:
        >>> tokenizer = train_tokenizer(["to be or not to be"] * 9, vocab_size=270)
        >>> ids = tokenizer("to be,  not?").input_ids
        >>> ids[-1] == tokenizer.eos_token_id
        True
        >>> tokenizer.decode(ids, skip_special_tokens=True)
        'to be,  not?'
    """
    problems = [
        *choice_problem("kind", kind, tuple(LEAST)),
        *integer_problem("vocab_size", vocab_size, LEAST.get(kind, 6)),
        *flag_problem("lowercase", lowercase),
        *integer_problem("min_frequency", min_frequency, 1),
    ]
    if max_length is not None:
        problems += integer_problem("max_length", max_length, 2)
    if isinstance(texts, str):
        problems.append("texts must be several texts, given one str")
    if problems:
        raise OptionError("; ".join(problems))
    try:
        from tokenizers import AddedToken, processors
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise ImportError("tokenizers need pip install 'subquad[hf]'") from error
    tokenizer, trainer = _parts(kind, vocab_size, lowercase, min_frequency)
    tokenizer.train_from_iterator(_checked(texts), trainer)
    if kind == "unigram":
        tokenizer.model = _in_order(tokenizer)
    names = [AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS]
    tokenizer.add_special_tokens(names)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {_EOS}",
        pair=f"$A {_EOS} $B:1 {_EOS}:1",
        special_tokens=[(_EOS, SPECIAL_TOKENS.index(_EOS))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=_PAD,
        bos_token=_BOS,
        eos_token=_EOS,
        unk_token=_UNKNOWN,
        mask_token=_MASK,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **({} if max_length is None else {"model_max_length": max_length}),
    )


def _parts(kind: str, vocab_size: int, lowercase: bool, min_frequency: int) -> tuple[Any, Any]:
    """The tokenizer's rules, untrained, and its trainer."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    common: dict[str, Any] = {
        "vocab_size": vocab_size,
        "special_tokens": list(SPECIAL_TOKENS),
        "show_progress": False,
    }
    lower = [normalizers.Lowercase()] if lowercase else []
    if kind in ("bpe", "unigram"):
        tokenizer = Tokenizer(models.BPE() if kind == "bpe" else models.Unigram())
        tokenizer.normalizer = normalizers.Sequence([*lower, normalizers.Prepend(" ")])
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
        common["initial_alphabet"] = sorted(pre_tokenizers.ByteLevel.alphabet())
        if kind == "bpe":
            return tokenizer, trainers.BpeTrainer(min_frequency=min_frequency, **common)
        return tokenizer, trainers.UnigramTrainer(unk_token=_UNKNOWN, **common)
    tokenizer = Tokenizer(models.WordLevel(unk_token=_UNKNOWN))
    if kind == "word":
        marked = [normalizers.Replace(" ", _SPACE), normalizers.Prepend(_SPACE)]
        tokenizer.normalizer = normalizers.Sequence([*lower, *marked])
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_WORDS), "isolated")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace(_SPACE, " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        tokenizer.normalizer = normalizers.Sequence(lower)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
        min_frequency = 1
    return tokenizer, trainers.WordLevelTrainer(min_frequency=min_frequency, **common)


def _in_order(tokenizer: Any) -> Any:
    """A unigram model with the same pieces, the same in each training on the same texts.

    The library runs through hash maps in random order. It gives bytes that are part of no
    sentence's best split the lowest score + 0, 1e-4, 2e-4, … in that order, sums in it
    (rounding), and orders equal scores by it. Here those bytes have the lowest score, scores
    have six decimals, and pieces are sorted.
    """
    from tokenizers import models

    first = len(SPECIAL_TOKENS)
    vocabulary = json.loads(tokenizer.to_str())["model"]["vocab"]
    low = min(score for _, score in vocabulary[first:])
    pieces = [
        (piece, round(low if len(piece) == 1 and score < low + 256e-4 else score, 6))
        for piece, score in vocabulary[first:]
    ]
    pieces.sort(key=lambda item: (-item[1], item[0]))
    special = [(name, 0.0) for name in SPECIAL_TOKENS]
    return models.Unigram([*special, *pieces], unk_id=SPECIAL_TOKENS.index(_UNKNOWN))


def _checked(texts: Iterable[str]) -> Iterator[str]:
    empty = True
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            raise OptionError(f"texts[{place}] must be a text, given {type(text).__name__}")
        empty = False
        yield text
    if empty:
        raise OptionError("texts is empty: there is nothing to train on")


def both_sides(pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Sources and targets in turn, for a vocabulary that both languages share.

    >>> list(both_sides([("sí", "yes"), ("no", "no")]))
    ['sí', 'yes', 'no', 'no']
    """
    for source, target in pairs:
        yield source
        yield target
