from __future__ import annotations

import json
import math

import pytest
import torch
import transformers as tf
from torch import nn

import subquad as sq
from subquad.attention.masks import Mask
from subquad.convert.compare import uniform_attention


def bert() -> nn.Module:
    torch.manual_seed(0)
    config = tf.BertConfig(
        vocab_size=53,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=40,
    )
    model = tf.BertModel(config, add_pooling_layer=False).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.15)
    return model


def padded() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(5, 53, (3, 11))
    mask = torch.ones_like(ids)
    mask[0, -4:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def test_exact_against_exact() -> None:
    model = bert()
    sq.convert(model, "softmax")
    found = sq.compare(model, padded(), repeats=1)
    assert found.error < 1e-5
    assert 0.05 < found.uniform_error < 1.5
    assert found.max_abs < 1e-4
    assert found.cosine == pytest.approx(1.0, abs=1e-6)
    assert (found.rows, found.length) == (3, 11)
    assert [layer.name for layer in found.layers] == [
        "encoder.layer.0.attention.self",
        "encoder.layer.1.attention.self",
    ]


def test_the_error_is_that_of_the_definition() -> None:
    """Against the layer's own output, recomputed by hand from the exact run's q, k and v."""
    model, given = bert(), padded()
    sq.convert(model, "performer(features=32)")
    layer = model.encoder.layer[1].attention.self
    mechanism = layer.subquad
    sq.revert(model)
    seen = {}
    layer.register_forward_hook(lambda m, args, out: seen.update(x=args[0], o=out[0]))
    with torch.no_grad():
        model(**given)
        q, k, v = (
            project(seen["x"]).view(3, 11, 4, 6).transpose(1, 2)
            for project in (layer.query, layer.key, layer.value)
        )
        keep = given["attention_mask"].bool()
        approximate = mechanism(q, k, v, key_mask=keep).transpose(1, 2).reshape(3, 11, 24)
        mean = torch.stack([v[b][:, keep[b]].mean(1) for b in range(3)]).reshape(3, 1, 24)
    exact = seen["o"][keep]
    error = (approximate[keep] - exact).norm() / exact.norm()
    uniform = (mean.expand(3, 11, 24)[keep] - exact).norm() / exact.norm()
    sq.convert(model, "performer(features=32)")
    found = sq.compare(model, given, repeats=1).layers[1]
    assert found.error == pytest.approx(float(error), rel=1e-4)
    assert found.uniform_error == pytest.approx(float(uniform), rel=1e-4)


def test_padded_positions_do_not_count() -> None:
    model, given = bert(), padded()
    sq.convert(model, "performer(features=32)")
    before = sq.compare(model, given, repeats=1)
    given["input_ids"] = given["input_ids"].masked_fill(given["attention_mask"] == 0, 7)
    after = sq.compare(model, given, repeats=1)
    assert after.error == pytest.approx(before.error, rel=1e-5)
    assert after.cosines == pytest.approx(before.cosines, rel=1e-6)
    assert after.max_abs == pytest.approx(before.max_abs, rel=1e-5)


def test_the_model_is_left_as_it_was() -> None:
    model, given = bert(), padded()
    model.train()
    model.encoder.layer[0].eval()
    sq.convert(model, "performer(features=32)")
    modes = {name: module.training for name, module in model.named_modules()}
    sq.compare(model, given, repeats=1)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert model.config._attn_implementation == "subquad_sdpa"
    assert all(parameter.grad is None for parameter in model.parameters())


def test_mixed_models_list_converted_layers_only() -> None:
    model = bert()
    sq.convert(model, "softmax", where=lambda name, module: ".1." in name)
    found = sq.compare(model, padded(), repeats=1)
    assert [layer.name for layer in found.layers] == ["encoder.layer.1.attention.self"]


def test_causal_uniform_attention_is_a_running_mean() -> None:
    v = torch.randn(2, 2, 7, 3, dtype=torch.float64)
    key = torch.ones(2, 7, dtype=torch.bool)
    key[0, :2] = False
    mask = Mask(causal=True, key=key)
    weights = mask.to_dense(5, 7).double()[:, None]
    wanted = weights @ v.repeat_interleave(2, 1) / weights.sum(-1, keepdim=True).clamp(min=1)
    torch.testing.assert_close(uniform_attention(v, (2, 4, 5, 3), mask), wanted)
    dense = Mask(dense=mask.to_dense(5, 7)[:, None])
    torch.testing.assert_close(uniform_attention(v, (2, 4, 5, 3), dense), wanted)


def test_two_objects() -> None:
    a, b = nn.Linear(5, 3), nn.Linear(5, 3)
    x = torch.randn(2, 4, 5)
    found = sq.compare(a, b, x)
    assert found.mechanism is None
    assert found.layers == ()
    assert math.isnan(found.error)
    largest = (a(x) - b(x)).detach().abs().max().item()
    assert found.max_abs == pytest.approx(largest, rel=1e-5)
    assert sq.compare(a, a, x).cosine == pytest.approx(1.0)
    assert "b against a" in str(found)
    assert found.to_dict()["error"] is None
    model = bert()
    assert sq.compare(model, model, padded()).max_abs == 0.0


def test_encoder_decoder_and_heads() -> None:
    config = tf.BartConfig(
        vocab_size=53,
        d_model=24,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=40,
        decoder_ffn_dim=40,
    )
    model = tf.BartForConditionalGeneration(config).eval()
    sq.convert(model, "softmax")
    given = {**padded(), "decoder_input_ids": torch.randint(5, 53, (3, 11))}
    found = sq.compare(model, given, repeats=1)
    assert len(found.layers) == 3
    assert found.length == 11
    assert found.error < 1e-5


def test_it_prints_and_is_json() -> None:
    model = bert()
    sq.convert(model, "performer(features=32)")
    found = sq.compare(model, padded(), repeats=2)
    text = str(found)
    for part in (
        "performer(features=32) against exact, 3 × 11 tokens",
        "uniform attention",
        "encoder.layer.1.attention.self",
        "cosine",
    ):
        assert part in text
    values = json.loads(json.dumps(found.to_dict()))
    assert values["layers"][0]["name"] == "encoder.layer.0.attention.self"
    assert values["cosine"] == pytest.approx(found.cosine)


def test_errors() -> None:
    with pytest.raises(sq.OptionError, match="not converted"):
        sq.compare(bert(), padded())
    with pytest.raises(sq.OptionError, match="converted torch.nn.Module"):
        sq.compare(lambda x: x, torch.ones(2))
    with pytest.raises(sq.OptionError, match="two models or callables"):
        sq.compare(bert(), 3, padded())
    with pytest.raises(sq.OptionError, match="repeats=0"):
        sq.compare(bert(), padded(), repeats=0)
    with pytest.raises(sq.ShapeError, match="differ in shape"):
        sq.compare(nn.Linear(5, 3), nn.Linear(5, 2), torch.ones(2, 5))
    with pytest.raises(sq.OptionError, match="hidden states or logits, given dict"):
        sq.compare(lambda x: {"y": x}, lambda x: {"y": x}, torch.ones(2, 5))
