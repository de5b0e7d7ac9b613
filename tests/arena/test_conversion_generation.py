"""Time and bytes of a token: what is counted, on a model small enough to check by hand."""

from __future__ import annotations

import pytest
import torch
import transformers as tf

import subquad as sq
from subquad.arena.conversion import generation

SPEC = "local(window=8)"


@pytest.fixture(scope="module")
def model() -> tf.LlamaForCausalLM:
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=53, hidden_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=40,
    )  # fmt: skip
    return tf.LlamaForCausalLM(config).eval()


def test_rows_are_those_of_every_length_and_cache(model: tf.LlamaForCausalLM) -> None:
    ids, said = torch.randint(3, 53, (1, 60)), []
    before = set(vars(model))
    lengths = (20, 60)
    rows = generation.step_times(model, [SPEC], ids, lengths, tokens=5, echo=said.append)
    assert [(row["length"], row["mechanism"]) for row in rows] == [
        (length, name) for length in lengths for name in (generation.EXACT, SPEC)
    ]
    # k and v of 2 layers, 2 heads of 6, float32
    assert [row["nbytes"] for row in rows[::2]] == [2 * 2 * 2 * 6 * 4 * n for n in lengths]
    assert rows[1]["nbytes"] == rows[3]["nbytes"]
    for row in rows:
        first, third = row["spread"]
        assert 0 < first <= row["milliseconds"] <= third
        assert row["prefill_seconds"] > 0
    assert len(said) == 4
    assert set(vars(model)) == before  # converted copies, not the model
    shown = generation.table({"rows": rows})
    assert shown[0]["× exact"] == 1
    assert shown[3]["% of exact"] == 100 * rows[3]["nbytes"] / rows[2]["nbytes"]


@pytest.mark.parametrize("lengths", [(), (20, 25), (20, 61), (4,)])
def test_lengths_have_to_ascend_within_the_text(
    lengths: tuple[int, ...], model: tf.LlamaForCausalLM
) -> None:
    with pytest.raises(sq.OptionError, match="lengths must ascend by more than tokens=5, to 60"):
        generation.step_times(model, [SPEC], torch.zeros(1, 60).long(), lengths, tokens=5)
