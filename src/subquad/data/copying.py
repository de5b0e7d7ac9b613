"""Texts as tokens that can be copied: words that the vocabulary lacks get numbers behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from subquad.errors import OptionError

__all__ = ["Extended", "ExtendedTokenizer", "decode_extended", "extend_with_source"]

_SPACE = "▁"


@dataclass(frozen=True)
class Extended:
    """Tokens of a source and its target, in the vocabulary and the source's own words.

    Args:
        input_ids: of the source; V + i is its i-th word that the vocabulary of V lacks.
        labels: of the target, likewise; a word that the source lacks, too, is ``<unk>``. None
            without a target.
        words: the source's words from V on, as they are written there.
    """

    input_ids: list[int]
    labels: list[int] | None
    words: tuple[str, ...]


def extend_with_source(
    source: str,
    tokenizer: Any,
    target: str | None = None,
    *,
    vocab_size: int | None = None,
    max_source: int | None = None,
    max_target: int | None = None,
) -> Extended:
    """The tokens of a pair, where unknown words of the source are numbered from V on.

    Meant for tokenizers by words, whose rare words are unknown; a tokenizer over bytes has no
    unknown words, and its tokens stay as they are. Two words are one if the tokenizer's
    normaliser (lower-casing) makes them one. Rows of `input_ids` and `labels` are batched with
    `subquad.data.batches.pad_batch`, and are what a model with ``copy=True`` takes.

    See et al. 2017, arXiv 1704.04368, section 2.2: the extended vocabulary.

    Args:
        source: text.
        tokenizer: a fast one of transformers, with an unknown token, for both texts.
        target: text.
        vocab_size: V of the model; default: of the tokenizer.
        max_source, max_target: most tokens of a text, the one at its end included; longer
            texts are cut.

    Raises:
        OptionError: the tokenizer is not fast.

    Example:
        >>> from subquad.data.tokens import train_tokenizer
        >>> tokenizer = train_tokenizer(["I saw you .", "you saw I ."] * 2, kind="word")
        >>> pair = extend_with_source("I saw Ada .", tokenizer, "Ada saw Bob .")
        >>> pair.words, len(tokenizer), tokenizer.unk_token_id
        (('Ada',), 9, 3)
        >>> pair.labels  # Ada is copied, Bob is unknown
        [9, 7, 3, 5, 2]
        >>> decode_extended(pair.labels, tokenizer, pair.words)
        'Ada saw <unk> .'
    """
    if not getattr(tokenizer, "is_fast", False):
        raise OptionError(
            "tokenizer must be a fast one of transformers, which tells where in a text its tokens "
            f"are, given {type(tokenizer).__name__}"
        )
    size = len(tokenizer) if vocab_size is None else vocab_size
    numbers: dict[str, int] = {}
    words: list[str] = []
    input_ids = []
    for token, word in _tokens(source, tokenizer, max_source):
        if word is not None:
            key = _normal(word, tokenizer)
            if key not in numbers:
                numbers[key] = size + len(words)
                words.append(word)
            token = numbers[key]
        input_ids.append(token)
    labels = None
    if target is not None:
        labels = [
            token if word is None else numbers.get(_normal(word, tokenizer), token)
            for token, word in _tokens(target, tokenizer, max_target)
        ]
    return Extended(input_ids, labels, tuple(words))


class ExtendedTokenizer:
    """A tokenizer that also knows the words of one source, from V on; for output alone.

    Args:
        tokenizer: as for `extend_with_source`, which all else comes from.
        words: of the source, by `extend_with_source`.
        vocab_size: V of the model; default: of the tokenizer.

    Example:
        >>> from subquad.data.tokens import train_tokenizer
        >>> tokenizer = train_tokenizer(["I saw you ."] * 2, kind="word")
        >>> ExtendedTokenizer(tokenizer, ["Ada"]).decode([len(tokenizer), 3, 2])
        'Ada <unk></s>'
    """

    def __init__(
        self, tokenizer: Any, words: Sequence[str], *, vocab_size: int | None = None
    ) -> None:
        self.tokenizer, self.words = tokenizer, tuple(words)
        self.size = len(tokenizer) if vocab_size is None else vocab_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """The vocabulary's tokens, and the source's words as they are written there.

        Raises:
            OptionError: a token is none of these.
        """
        return [self._token(int(token)) for token in ids]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of tokens; `skip_special_tokens` leaves out all but the unknown one."""
        signs = set(self.tokenizer.all_special_ids) if skip_special_tokens else set()
        signs -= {self.tokenizer.unk_token_id}
        kept = [int(token) for token in ids if int(token) not in signs]
        pieces = [
            _piece(text, self.tokenizer)
            if token >= self.size or token == self.tokenizer.unk_token_id
            else text
            for token, text in zip(kept, self.convert_ids_to_tokens(kept), strict=True)
        ]
        return str(self.tokenizer.convert_tokens_to_string(pieces))

    def _token(self, token: int) -> str:
        if token < self.size:
            return str(self.tokenizer.convert_ids_to_tokens(token))
        if token - self.size < len(self.words):
            return self.words[token - self.size]
        raise OptionError(
            f"token {token} is none of the vocabulary's {self.size} and none of the source's "
            f"{len(self.words)} words"
        )


def decode_extended(
    ids: Sequence[int], tokenizer: Any, words: Sequence[str], *, vocab_size: int | None = None
) -> str:
    """The text of tokens that a model has written, copied words included, without signs.

    `ExtendedTokenizer` says what the arguments are, and what is raised.
    """
    extended = ExtendedTokenizer(tokenizer, words, vocab_size=vocab_size)
    return extended.decode(ids, skip_special_tokens=True)


def _tokens(text: str, tokenizer: Any, most: int | None) -> list[tuple[int, str | None]]:
    """Tokens of a text, those that are unknown with how they are written."""
    found = tokenizer(
        text, truncation=most is not None, max_length=most, return_offsets_mapping=True
    )
    unknown = tokenizer.unk_token_id
    return [
        (token, text[start:end].strip() or text[start:end] if token == unknown else None)
        for token, (start, end) in zip(found["input_ids"], found["offset_mapping"], strict=True)
    ]


def _normal(word: str, tokenizer: Any) -> str:
    """What tells words apart."""
    rules = tokenizer.backend_tokenizer.normalizer
    return word if rules is None else str(rules.normalize_str(word))


def _piece(word: str, tokenizer: Any) -> str:
    """A word as the tokenizer's decoder takes it: with a space before it, where it has marks."""
    text, rules = _normal(word, tokenizer), tokenizer.backend_tokenizer.pre_tokenizer
    if rules is not None:
        text = rules.pre_tokenize_str(text)[0][0]
    return _SPACE + word if text.startswith(_SPACE) and not word.startswith(_SPACE) else word
