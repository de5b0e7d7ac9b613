"""Trained tokenizers: lossless, the same each time, the same after saving."""

import contextlib
import io
import subprocess
import sys

import pytest

from subquad.data.corpora import preset
from subquad.data.tokens import SPECIAL_TOKENS, both_sides, train_tokenizer
from subquad.errors import OptionError

pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

HARD = [
    "",
    " leading",
    "trailing ",
    "two  spaces,\ttab\nline\r\n",
    "don't (a)b [c] 12,345.67 – “q” ¿qué?",
    "naïve e\u0301 日本語 🙂\u200d🙂 \x00",
]


@pytest.fixture(scope="module")
def texts():
    return list(both_sides(verse[:2] for verse in preset("bible-es-en").read("test")[:300]))


@pytest.fixture(scope="module")
def trained(texts):
    return {
        kind: train_tokenizer(texts, kind=kind, vocab_size=600)
        for kind in ("bpe", "unigram", "word", "char")
    }


def back(tokenizer, text):
    return tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_kinds_over_bytes_lose_nothing(trained, texts, kind):
    tokenizer = trained[kind]
    assert [back(tokenizer, text) for text in texts + HARD] == texts + HARD
    assert len(tokenizer) == 600
    encoded = tokenizer(texts + HARD).input_ids
    assert not any(tokenizer.unk_token_id in ids for ids in encoded)


def test_words_and_characters_lose_what_they_do_not_know(texts):
    words = train_tokenizer(texts, kind="word", vocab_size=30000, min_frequency=1)
    assert [back(words, text) for text in texts] == texts
    spaces = train_tokenizer([*texts, "a  b\tc\n"], kind="word", vocab_size=30000, min_frequency=1)
    assert back(spaces, "  the  heaven\t") == "  the  heaven\t"
    assert back(words, "the xylophone") == "the", "an unknown word has no text"
    assert back(words, "a▁heaven") == "a heaven", "the one sign that is not kept"
    characters = train_tokenizer([*texts, *HARD], kind="char", vocab_size=600)
    assert [back(characters, text) for text in texts + HARD] == texts + HARD


def test_words_are_cut_at_punctuation(trained):
    tokenizer = train_tokenizer(["Hello, “world” (it's 12.5)!"], kind="word", min_frequency=1)
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("Hello, “world” (it's 12.5)!").input_ids)
    expected = "▁Hello , ▁“ world ” ▁( it ' s ▁12 . 5 ) ! </s>"
    assert tokens == expected.split(" ")


@pytest.mark.parametrize("kind", ["bpe", "unigram", "word", "char"])
def test_special_tokens(trained, kind):
    tokenizer = trained[kind]
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2, 3, 4]
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert (tokenizer.unk_token_id, tokenizer.mask_token_id) == (3, 4)
    one, other = (tokenizer(text, add_special_tokens=False).input_ids for text in ("the", "and"))
    assert tokenizer("the").input_ids == [*one, 2]
    assert tokenizer("the", "and").input_ids == [*one, 2, *other, 2]
    assert list(tokenizer("the")) == ["input_ids", "attention_mask"]
    cut = tokenizer("the and the and the", truncation=True, max_length=3).input_ids
    assert len(cut) == 3 and cut[-1] == 2
    assert tokenizer("the<mask>").input_ids[-2:] == [4, 2]


@pytest.mark.parametrize("kind", ["bpe", "unigram", "word", "char"])
def test_saved_and_loaded(trained, texts, kind, tmp_path):
    trained[kind].save_pretrained(tmp_path)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    rows = texts[:40] + HARD
    assert loaded(rows).input_ids == trained[kind](rows).input_ids
    assert [back(loaded, text) for text in rows] == [back(trained[kind], text) for text in rows]
    assert loaded.mask_token_id == 4 and list(loaded("a")) == ["input_ids", "attention_mask"]


@pytest.mark.parametrize("kind", ["bpe", "unigram", "word", "char"])
def test_the_same_texts_give_the_same_tokenizer(trained, texts, kind):
    again = train_tokenizer(iter(texts), kind=kind, vocab_size=600)
    assert again.backend_tokenizer.to_str() == trained[kind].backend_tokenizer.to_str()


@pytest.mark.slow
def test_another_process_gives_the_same_tokenizer():
    code = """
import hashlib
from subquad.data import both_sides, preset, train_tokenizer
texts = list(both_sides(verse[:2] for verse in preset("bible-es-en").read("test")[:60]))
for kind in ("bpe", "unigram"):
    tokenizer = train_tokenizer(texts, kind=kind, vocab_size=320)
    print(hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = {}
    with contextlib.redirect_stdout(io.StringIO()) as here:
        exec(code, names)
    assert done.stdout == here.getvalue() and len(done.stdout.split()) == 2


def test_lower_case(texts):
    tokenizer = train_tokenizer(texts, vocab_size=300, lowercase=True)
    assert back(tokenizer, "The HEAVEN, Él") == "the heaven, él"


def test_vocabulary_is_no_larger_than_the_texts_give():
    assert len(train_tokenizer(["ab"], kind="char", vocab_size=600)) == 5 + 2


@pytest.mark.parametrize(
    ("texts", "options", "told"),
    [
        (["a"], {"kind": "bytes"}, "kind='bytes' is none of bpe, unigram, word, char"),
        (["a"], {"vocab_size": 260}, "vocab_size=260 must be an integer ≥ 261"),
        (["a"], {"lowercase": 1, "min_frequency": 0}, "lowercase=1 must be .*; min_frequency=0"),
        ("a", {}, "given one str"),
        ([], {}, "texts is empty"),
        (["a", 3], {}, r"texts\[1\] must be a text, given int"),
    ],
)
def test_wrong_arguments(texts, options, told):
    with pytest.raises(OptionError, match=told):
        train_tokenizer(texts, **options)
