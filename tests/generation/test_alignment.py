"""Alignments: the model's own weights, without signs, for its own models and transformers'."""

import pytest
import torch

import subquad as sq
from generation.helpers import loud, small, word_tokenizer
from subquad.errors import OptionError

tf = pytest.importorskip("transformers")

from subquad.generation import Alignment, Translator, align  # noqa: E402

WORDS = [f"w{number}" for number in range(35)]
SOURCES = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9 w10"]
TARGETS = ["w3 w2", "w7 w8 w9", "w1"]


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer(WORDS)


@pytest.mark.parametrize("cross", ["softmax", "performer", "linear", "linformer"])
@pytest.mark.parametrize("layer", [None, 0, -1])
def test_weights_are_the_mechanisms_own(tokenizer, cross, layer):
    model = loud(small(cross_mechanism=cross, decoder_layers=3, max_position_embeddings=32))
    found = align(model, tokenizer, SOURCES, TARGETS, layer=layer)
    for source, target, one in zip(SOURCES, TARGETS, found, strict=True):
        ids = torch.tensor([tokenizer(source)["input_ids"]])
        labels = tokenizer(target)["input_ids"]
        with torch.no_grad():
            seen = model(
                ids, decoder_input_ids=torch.tensor([[1, *labels[:-1]]]), output_attentions=True
            ).cross_attentions
        each = torch.stack([weights.mean(1)[0] for weights in seen])
        wanted = each.mean(0) if layer is None else each[layer]
        # float32 sums in another order, of weights ≤ 1
        torch.testing.assert_close(one.weights, wanted[:-1, :-1], rtol=0, atol=1e-5)
        assert one.source == tuple(source.split())
        assert one.target == tuple(target.split())
        if cross == "softmax":
            rest = 1 - one.weights.sum(1)
            assert bool((rest > 0).all()), "the end of the source has its share"


def test_a_translations_alignment_is_that_of_its_text(tokenizer):
    model = loud(small(decoder_layers=2))
    signs = [0, 1, 4]  # would not come back when the text is read again
    translator = Translator(
        model, tokenizer, beams=3, alignment=True, max_length=7, suppress_tokens=signs
    )
    found = translator.translate(SOURCES)
    again = align(model, tokenizer, SOURCES, [one.text for one in found])
    for one, other in zip(found, again, strict=True):
        torch.testing.assert_close(one.alignment.weights, other.weights, rtol=0, atol=1e-5)
        assert str(one.alignment) == str(other)


def test_models_of_transformers_align_too(tokenizer):
    config = tf.BartConfig(
        vocab_size=40, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, max_position_embeddings=32,
    )  # fmt: skip
    torch.manual_seed(1)
    model = tf.BartForConditionalGeneration(config).eval()
    before = model.config._attn_implementation
    (found,) = align(model, tokenizer, ["w1 w2 w3"], ["w3 w2"])
    assert found.weights.shape == (2, 3)
    assert model.config._attn_implementation == before, "put back"
    assert bool((found.weights.sum(1) < 1).all())


def test_pharaoh():
    weights = torch.tensor([[0.1, 0.7, 0.1], [0.5, 0.1, 0.4]])
    one = Alignment(("a", "b", "c"), ("x", "y"), weights)
    assert str(one) == "0-1 1-0"
    assert one.pairs() == [(1, 0), (0, 1)]
    assert one.pairs(threshold=0.4) == [(1, 0), (0, 1), (2, 1)]
    assert str(Alignment((), ("x",), torch.zeros(1, 0))) == ""


def test_wrong_arguments(tokenizer):
    model = small()
    with pytest.raises(OptionError, match="3 sources, 1 targets"):
        align(model, tokenizer, SOURCES, ["w1"])
    with pytest.raises(OptionError, match="lists of texts"):
        align(model, tokenizer, "w1", "w2")
    with pytest.raises(OptionError, match="layer=1 .*from -1 to 0"):
        align(model, tokenizer, ["w1"], ["w2"], layer=1)
    assert sq.models.Seq2SeqTransformer is type(model)
