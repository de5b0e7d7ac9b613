"""Where a model's embeddings and its map to the vocabulary are, as transformers asks for them."""

import pytest
import torch
from torch import nn

import subquad as sq

V, C = 19, 8
SMALL = {"vocab_size": V, "d_model": C, "num_heads": 2, "dim_feedforward": 8}
LAYERS = {"encoder_layers": 1, "decoder_layers": 1}
WRITERS = ("CausalTransformer", "Seq2SeqTransformer", "NonAutoregressiveTransformer")
READERS = (
    "EncoderTransformer", "EncoderForSequenceClassification", "EncoderForTokenClassification",
    "EncoderForQuestionAnswering",
)  # fmt: skip


def model(name, **options):
    layers = LAYERS if name in WRITERS[1:] else {"num_layers": 1}
    made = getattr(sq.models, name)
    return made(made.config_class(**SMALL, **layers, **options)).eval()


@pytest.mark.parametrize("name", [*WRITERS, "EncoderForMaskedLM"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_map_to_the_vocabulary_is_the_embedding_where_it_should_be(name, tied):
    made = model(name, tie_embeddings=tied)
    table, head = made.get_input_embeddings(), made.get_output_embeddings()
    assert table.weight.shape == head.weight.shape == (V, C)
    assert (table.weight is head.weight) == tied
    assert (head.bias is not None) == (name == "EncoderForMaskedLM")
    other = nn.Linear(C, V + 1, bias=False)
    made.set_output_embeddings(other)
    assert made.get_output_embeddings() is made.head is other


@pytest.mark.parametrize("name", [*WRITERS, *READERS, "EncoderForMaskedLM"])
def test_another_table_is_read_from(name):
    made = model(name)
    other = nn.Embedding(V + 5, C)
    made.set_input_embeddings(other)
    assert made.get_input_embeddings() is other
    ids = torch.full((1, 4), V + 3)  # which the first table does not have
    more = {} if name in (*READERS, *WRITERS[:1], "EncoderForMaskedLM") else {"labels": ids * 0 + 6}
    assert made(ids, **more)[0].isfinite().all()


@pytest.mark.parametrize("name", READERS)
def test_a_model_that_writes_nothing_has_no_such_map(name):
    made = model(name)
    assert made.get_output_embeddings() is None
    with pytest.raises(NotImplementedError, match=f"{name} has no map to the vocabulary"):
        made.set_output_embeddings(nn.Linear(C, V))
