"""Configs of whole models: what they take, what they refuse, and their way through JSON."""

import pytest
import transformers

import subquad as sq
from subquad.attention.base import Mechanism
from subquad.errors import OptionError, UnknownNameError

Seq2Seq = sq.models.Seq2SeqTransformerConfig
Causal = sq.models.CausalTransformerConfig
KINDS = [Seq2Seq, Causal, sq.models.EncoderTransformerConfig]


def round_trip(config, folder):
    config.save_pretrained(folder)
    return type(config).from_pretrained(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_come_back_from_json(kind, tmp_path):
    config = kind()
    assert round_trip(config, tmp_path).to_dict() == config.to_dict()
    assert type(transformers.AutoConfig.from_pretrained(tmp_path)) is kind


def test_every_form_of_a_mechanism_comes_back_from_json(tmp_path):
    config = Seq2Seq(
        encoder_layers=3,
        decoder_layers=2,
        mechanism=[sq.PerformerConfig(features=8), "softmax", "mixed(softmax*2, linear*2)"],
        decoder_mechanism={"default": sq.PerformerConfig(features=16), -1: "softmax"},
        cross_mechanism=sq.LinearConfig(),
        memory=(0, -1),
    )
    assert config.mechanism == ["performer(features=8)", "softmax", "mixed(softmax*2, linear*2)"]
    assert config.decoder_mechanism == {"default": "performer(features=16)", "-1": "softmax"}
    assert config.cross_mechanism == "linear"
    assert config.memory == [0, -1]
    again = round_trip(config, tmp_path)
    assert again.to_dict() == config.to_dict()
    made = [sq.models.Seq2SeqTransformer(one) for one in (config, again)]
    first, second = (
        [part.name for part in model.modules() if isinstance(part, Mechanism)] for model in made
    )
    assert first == second and {"performer", "softmax", "mixed", "linear"} <= set(first)


def test_what_transformers_asks_a_config_for():
    config = Seq2Seq(d_model=24, num_heads=3, encoder_layers=5, bos_token_id=7, eos_token_id=[2, 4])
    assert config.hidden_size == 24 and config.num_attention_heads == 3
    assert config.num_hidden_layers == 5 and config.tie_word_embeddings
    assert config.decoder_start_token_id == 7 and config.is_encoder_decoder
    config.hidden_size = 48
    assert config.d_model == 48
    assert Seq2Seq(bos_token_id=7, decoder_start_token_id=3).decoder_start_token_id == 3
    assert Causal(hidden_size=36, num_heads=3).d_model == 36


def test_all_wrong_values_are_in_one_error():
    wrong = {
        "vocab_size": 0,
        "d_model": 25,
        "dim_feedforward": 2.5,
        "activation": "rellu",
        "feed_forward": "cnn",
        "dropout": 1.5,
        "attention_noise": -1.0,
        "norm": "group",
        "norm_first": 1,
        "final_norm": "yes",
        "positions_at": "output",
        "max_position_embeddings": 0,
        "seed": 0.5,
        "encoder_layers": 0,
        "decoder_layers": True,
        "source_vocab_size": -3,
        "copy": "yes",
        "memory": "first",
    }
    with pytest.raises(OptionError) as caught:
        Seq2Seq(**wrong)
    text = str(caught.value)
    assert text.startswith("Seq2SeqTransformerConfig: ")
    for name, value in wrong.items():
        shown = "num_heads=4 must divide d_model=25" if name == "d_model" else f"{name}={value!r}"
        assert shown in text, name
    assert "'relu'" in text  # the nearest name


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_options_are_refused_with_the_nearest_name(kind):
    with pytest.raises(UnknownNameError, match=r"unknown option 'dropuot'.*dropout"):
        kind(dropuot=0.2)
    with pytest.raises(UnknownNameError, match="unknown option 'n_layer'"):
        kind(n_layer=2)


def test_what_does_not_go_together_is_refused():
    with pytest.raises(
        OptionError, match=r"decoder_mechanism is needed.*cross_mechanism is needed"
    ):
        Seq2Seq(encoder_layers=2, mechanism=["linear", "softmax"])
    with pytest.raises(OptionError, match="front_end is of sound"):
        Seq2Seq(front_end={"mels": 40}, source_vocab_size=50)
    with pytest.raises(OptionError, match="front_end is of sound"):
        Seq2Seq(front_end={"mels": 40}, copy=True)
    with pytest.raises(OptionError, match="memory=.* must be one of last"):
        Seq2Seq(memory=[0.5])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mechanism": "performmer"}, "performer"),
        ({"mechanism": "performer(feature=8)"}, "features"),
        ({"positions": "sinus"}, "sinusoidal"),
        ({"encoder_pattern": "ax"}, "'x'"),
        ({"memory": [0, 1, 7, 0, 0, 0]}, "memory="),
        ({"memory": "same_depth", "encoder_layers": 2}, "6 cross-attentions"),
        ({"positions": "learned", "max_position_embeddings": 5, "activation": "gelu",
          "cross_mechanism": "local"}, ""),
    ],
)  # fmt: skip
def test_what_a_stack_refuses_names_the_reason(options, message):
    if not message:
        sq.models.Seq2SeqTransformer(Seq2Seq(d_model=16, **options))
        return
    with pytest.raises(OptionError, match=message):
        sq.models.Seq2SeqTransformer(Seq2Seq(d_model=16, **options))


@pytest.mark.parametrize(
    ("kind", "options", "told"),
    [
        (Causal, {"pad_token_id": 50}, "pad_token_id=50 must be < vocab_size=50"),
        (Causal, {"pad_token_id": -1}, "pad_token_id=-1 must be"),  # torch: the last row is zero
        (Seq2Seq, {"pad_token_id": 9, "source_vocab_size": 9}, "must be < source_vocab_size=9"),
        (Seq2Seq, {"pad_token_id": None}, "pad_token_id is needed"),
        (Seq2Seq, {"bos_token_id": None}, "decoder_start_token_id is needed"),
        (sq.models.NonAutoregressiveTransformerConfig, {"eos_token_id": None}, "eos_token_id is"),
    ],
)
def test_special_tokens_that_a_model_cannot_do_without(kind, options, told):
    with pytest.raises(OptionError, match=told):
        kind(vocab_size=50, **options)


def test_special_tokens_that_a_model_can_do_without():
    assert Causal(pad_token_id=None, bos_token_id=None, eos_token_id=None).pad_token_id is None
    assert Seq2Seq(bos_token_id=None, decoder_start_token_id=0).decoder_start_token_id == 0
