from __future__ import annotations

import base64
import dataclasses
import importlib.util
import json
import math
import os
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

import subquad as sq
from subquad import pages
from subquad.arena.demo_measure import swap
from subquad.attention.masks import Mask
from subquad.convert.cost import LengthCost, peak_memory
from subquad.convert.inputs import at_length
from subquad.convert.probe import (
    Errors,
    LayerComparison,
    PartComparison,
    _relative,
    uniform_attention,
)
from subquad.convert.report import save_html
from subquad.convert.routing import SLOT
from subquad.convert.saving import COMPARISON

# Other folders may have a `models`, too: this one is loaded by its place.
_spec = importlib.util.spec_from_file_location(
    "convert_models", Path(__file__).with_name("models.py")
)
assert _spec is not None and _spec.loader is not None
models = importlib.util.module_from_spec(_spec)
sys.modules["convert_models"] = models
_spec.loader.exec_module(models)
tiny, inputs = models.tiny, models.inputs


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


@pytest.mark.parametrize(
    "parts",
    [
        {"window": (3, 1)},
        {"causal": True, "window": (2, 0)},
        {"segments": (torch.arange(600) // 250).expand(2, 600)},
    ],
)
def test_uniform_attention_under_windows_and_segments(parts: dict[str, Any]) -> None:
    """In chunks of queries, against the mask written out; with padded keys."""
    v = torch.randn(2, 1, 600, 3, dtype=torch.float64)
    mask = Mask(key=torch.arange(600) < torch.tensor([[600], [571]]), **parts)
    weights = mask.to_dense(600, 600).double()[:, None]
    wanted = weights @ v / weights.sum(-1, keepdim=True).clamp(min=1)
    torch.testing.assert_close(uniform_attention(v, (2, 1, 600, 3), mask), wanted)


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


# ---- layers and heads --------------------------------------------------------------------


def attention_of(model: nn.Module, given: dict[str, torch.Tensor], layer: int) -> Any:
    """q, k, v (B, H, L, D) and the exact output of a BERT layer, recomputed in float64."""
    module, seen = model.encoder.layer[layer].attention.self, {}
    hook = module.register_forward_hook(lambda m, args, out: seen.update(x=args[0]))
    with torch.no_grad():
        model(**given)
        hook.remove()
        rows, length, width = seen["x"].shape
        q, k, v = (
            project(seen["x"]).view(rows, length, 4, width // 4).transpose(1, 2)
            for project in (module.query, module.key, module.value)
        )
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~given["attention_mask"].bool()[:, None, None], -math.inf)
    return q, k, v, scores.softmax(-1)


def relative(out: torch.Tensor, exact: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Each head's error (H,), over unmasked positions of all rows, naively."""
    gap, size = ((t.transpose(1, 2)[keep]).square().sum((0, 2)) for t in (out - exact, exact))
    return (gap / size).sqrt()


def test_errors_of_heads_are_norms_over_all_tokens() -> None:
    """Against a naive float64 computation; two batches, padded; norms add, ratios do not."""
    model, given = bert().double(), padded()
    first, last = ({k: v[i : i + 2] for k, v in given.items()} for i in (0, 2))
    sq.convert(model, "performer(features=32)")
    found = sq.compare(model, iter([first, last]), repeats=1).layers
    mechanisms = [layer.attention.self.subquad for layer in model.encoder.layer]
    sq.revert(model)
    keep = given["attention_mask"].bool()
    for layer, mechanism in enumerate(mechanisms):
        q, k, v, weights = attention_of(model, given, layer)
        exact, out = weights @ v, mechanism(q, k, v, key_mask=keep).detach()
        opened = keep[:, None, None].double()
        uniform = (opened @ v / opened.sum(-1, keepdim=True)).expand_as(v)
        for own, other in (
            (found[layer].heads, relative(out, exact, keep)),
            (found[layer].uniform_heads, relative(uniform, exact, keep)),
        ):
            assert own == pytest.approx(other.tolist(), rel=1e-9)  # float64 rounding
        shown = exact.transpose(1, 2)[keep]
        whole = (out.transpose(1, 2)[keep] - shown).norm() / shown.norm()
        assert found[layer].error == pytest.approx(float(whole), rel=1e-9)
        rows = [
            float((out - exact)[b][:, keep[b]].norm() / exact[b][:, keep[b]].norm())
            for b in range(3)
        ]
        assert found[layer].spread == pytest.approx(statistics.stdev(rows), rel=1e-9)


def test_a_zero_exact_output_has_no_error_or_an_infinite_one() -> None:
    model = bert()
    value = model.encoder.layer[0].attention.self.value
    value.weight.data[:6], value.bias.data[:6] = 0.0, 0.0  # the first head's values
    sq.convert(model, "performer(features=32)")
    found = sq.compare(model, padded(), repeats=1)
    assert found.layers[0].heads[0] == 0.0
    assert found.layers[0].heads[1] > 0.0
    assert _relative(1.0, 0.0) == math.inf
    infinite = dataclasses.replace(found.layers[0], error=math.inf)
    shown = dataclasses.replace(found, layers=(infinite, found.layers[1]))
    assert json.loads(json.dumps(shown.to_dict(), allow_nan=False))["layers"][0]["error"] is None


def test_layers_that_are_not_called_are_named() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = bert(), bert()

        def forward(self, **given: Any) -> Any:
            return None, self.used(**given).last_hidden_state  # a loss comes first

    model = Two()
    sq.convert(model, "softmax")
    found = sq.compare(model, padded(), repeats=1)
    assert {layer.name.split(".")[0] for layer in found.layers} == {"used"}
    assert "spare.encoder.layer.1.attention.self was not called" in found.notes
    assert found.cosine == pytest.approx(1.0, abs=1e-6)


def test_half_precision() -> None:
    model = bert().half()
    sq.convert(model, "softmax")
    found = sq.compare(model, padded(), repeats=1)
    # Outputs of both are rounded to float16 (2⁻¹¹ relative), and so are q, k, v before, alike.
    assert all(error < 4 * 2**-11 for layer in found.layers for error in layer.heads)


def test_deferred_mechanisms_and_random_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[sq.revert.__module__], "head_sizes", lambda layer: None)
    model = bert().train()
    model.encoder.layer[0].eval()
    sq.convert(model, "performer(features=32)")
    given = padded()
    state = torch.get_rng_state()
    sq.compare(model, given, repeats=1)
    assert torch.equal(torch.get_rng_state(), state)
    built = [layer.attention.self.subquad for layer in model.encoder.layer]
    assert [isinstance(one, sq.Mechanism) for one in built] == [True, True]
    assert [one.training for one in built] == [False, True]


QUICK = ("gpt2", "bart", "t5", "whisper", "mistral_window", "falcon", "mpnet")


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=() if k in QUICK else pytest.mark.slow) for k in models.ALL],
)
def test_every_architecture_compares(kind: str) -> None:
    """With exact attention in every place nothing differs, whatever way a model is reached."""
    model = tiny(kind)
    sq.convert(model, "softmax")
    found = sq.compare(model, inputs(kind), repeats=1)
    # float32: queries that arrive pre-scaled are scaled back, some roundings of 6e-8 each
    assert found.layers
    assert max(max(layer.heads) for layer in found.layers) < 1e-5
    assert found.output.relative_error < 1e-5
    assert found.output.perplexity_ratio in (None, pytest.approx(1.0, abs=1e-5))
    assert found.uniform_error > 1e-3
    assert not found.notes


@pytest.mark.parametrize("batch_first", [True, False])
def test_torch_encoders_with_padding(batch_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(24, 4, 40, 0.0, batch_first=batch_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x, closed = torch.randn(3, 11, 24), torch.arange(11) >= torch.tensor([[7], [11], [11]])
    found = []
    sq.convert(model, "performer(features=8)")
    for value in (0.0, 5.0):  # at padded positions
        x[0, 7:] = value
        given = {"src": x if batch_first else x.transpose(0, 1), "src_key_padding_mask": closed}
        found.append(sq.compare(model, given, repeats=1))
    before, after = found
    assert (before.rows, before.length, before.output.positions) == (3, 11, 29)
    assert after.cosines == pytest.approx(before.cosines, rel=1e-6)
    for one, other in zip(before.layers, after.layers, strict=True):
        assert other.heads == pytest.approx(one.heads, rel=1e-5)
        assert other.uniform_heads == pytest.approx(one.uniform_heads, rel=1e-5)


# ---- parts -------------------------------------------------------------------------------


def test_leaving_a_part_out_is_exact_attention_without_its_keys() -> None:
    """Parts that are exact: without one of them is softmax over the others' keys, naively."""
    model, given = bert().double(), padded()
    sq.convert(model, "near_far(window=2, sinks=1, heavy=0, far=softmax)")
    found = sq.compare(model, given, repeats=1).layers
    sq.revert(model)
    keep, i = given["attention_mask"].bool(), torch.arange(11)
    near = ((i[:, None] - i).abs() <= 2).expand(11, 11)
    sink = (i == 0).expand(11, 11) & ~near
    keys = {"near": near, "heavy": sink, "far": ~near & ~sink}
    for layer in (0, 1):
        _, _, v, weights = attention_of(model, given, layer)
        exact = weights @ v
        parts = {part.name: part for part in found[layer].parts}
        assert parts.keys() == keys.keys()
        shown = exact.transpose(1, 2)[keep]
        for name, where in keys.items():
            share = (weights * where).sum(-1).transpose(1, 2)[keep].mean()
            rest = weights * ~where
            out = rest @ v / rest.sum(-1, keepdim=True)
            error = (out.transpose(1, 2)[keep] - shown).norm() / shown.norm()
            assert parts[name].share == pytest.approx(float(share), rel=1e-9)
            assert parts[name].error_without == pytest.approx(float(error), rel=1e-9)
            assert parts[name].error < 1e-12


def probed(mechanism: sq.Mechanism, q: Any, k: Any, v: Any) -> LayerComparison:
    """A single layer's comparison, with scale 1."""
    layer = nn.Module()
    layer.add_module(SLOT, mechanism)
    layer.__dict__["_subquad"] = True
    watch = Errors(nn.ModuleDict({"layer": layer}))
    exact = (q @ k.mT).softmax(-1) @ v
    watch(layer, lambda: mechanism(q, k, v, scale=1.0), exact, v, Mask(), None)
    return watch.results()[0]


def circle(turn: float, length: float) -> torch.Tensor:
    """(1, 1, 12, 2): points at angles turn·π·i, so that q·k falls with the angle between them."""
    angles = turn * math.pi * torch.arange(12, dtype=torch.float64)
    return length * torch.stack([angles.cos(), angles.sin()], -1)[None, None]


def near_and_far() -> sq.Mechanism:
    spec = "near_far(window=3, heavy=0, sinks=0, far=softmax)"
    return sq.build(spec, head_dim=2, num_heads=1, dtype=torch.float64)


def test_a_dead_far_field_is_seen_and_said() -> None:
    """Four places are 60° apart: far logits lie 120·(1 − cos 60°) = 60 nats below the own one."""
    q = circle(1 / 12, 120**0.5)
    found = probed(near_and_far(), q, q, torch.eye(12, dtype=torch.float64)[None, None])
    far = next(part for part in found.parts if part.name == "far")
    assert far.share < 12 * math.exp(-60)
    assert far.error_without < 12 * math.exp(-60) + 1e-14  # float64 rounding
    assert str(far).startswith("far: share 0.0%, leaving it out changes the error from")
    assert far.verdict == "it does nothing here"
    near = next(part for part in found.parts if part.name == "near")
    assert near.share == pytest.approx(1.0, abs=1e-12)
    assert near.verdict == "it helps"


def test_a_far_field_that_carries_all() -> None:
    """The key of a query's own direction is six places away; near ones are ≥ 90°, 60 nats off."""
    q = circle(1 / 6, 60**0.5)
    found = probed(near_and_far(), q, q.roll(6, 2), torch.eye(12, dtype=torch.float64)[None, None])
    far = next(part for part in found.parts if part.name == "far")
    assert far.share > 1 - 12 * math.exp(-60) - 1e-14
    # Without it the output is a mean of other unit vectors: |mean − e|² = 1 + |mean|² ≥ 1.
    assert far.error < 1e-12
    assert far.error_without >= 1.0
    assert far.verdict == "it helps"


def test_verdicts() -> None:
    assert PartComparison("far", 0.003, 0.12, 0.1205).verdict == "it does nothing here"
    assert PartComparison("far", 0.3, 0.12, 0.4).verdict == "it helps"
    assert "hurts" in str(PartComparison("far", 0.3, 0.4, 0.12))
    assert "share 0.3%, leaving it out changes the error from 0.12 to 0.12" in str(
        PartComparison("far", 0.003, 0.12, 0.12)
    )


def test_a_batch_too_short_for_a_part_counts_as_the_same_without_it() -> None:
    model, given = bert().double(), padded()
    del given["attention_mask"]
    short = {"input_ids": given["input_ids"][:, :3]}  # all within the window: no far field
    sq.convert(model, "near_far(window=2, sinks=0, heavy=0, far=performer)")
    parts = sq.compare(model, [given, short], repeats=1).layers[0].parts
    alone = sq.compare(model, given, repeats=1).layers[0]
    far = {part.name: part for part in parts}["far"]
    only = {part.name: part for part in alone.parts}["far"]
    assert far.share == pytest.approx(only.share * 11 / 14, rel=1e-9)  # of 3 × 14 queries
    assert 0 < far.error_without < only.error_without


def test_parts_of_heads_that_are_mixed() -> None:
    model, given = bert().double(), padded()
    sq.convert(model, "mixed(near_far(window=2, heavy=0, far=performer)*2, local(window=3)*2)")
    parts = {part.name: part for part in sq.compare(model, given, repeats=1).layers[0].parts}
    assert parts.keys() == {"near", "heavy", "far", "local"}
    assert parts["local"].share == pytest.approx(0.5)  # two of four heads
    assert sum(part.share for part in parts.values()) == pytest.approx(1.0)


# ---- outputs -----------------------------------------------------------------------------


def test_uniform_attention_end_to_end_is_the_line_to_beat() -> None:
    model, given = bert(), padded()
    sq.convert(model, "performer(features=32)")
    found = sq.compare(model, given, repeats=1).uniform_output
    other = bert()
    swap(other, "uniform")
    wanted = sq.compare(other, given, repeats=1).output
    assert found is not None
    assert found.cosines == pytest.approx(wanted.cosines, rel=1e-6)
    assert found.relative_error == pytest.approx(wanted.relative_error, rel=1e-6)


def test_causal_models_have_a_perplexity() -> None:
    model = tiny("gpt2").double()
    given = {"input_ids": torch.randint(5, 53, (3, 13)), "attention_mask": torch.ones(3, 13)}
    given["attention_mask"][0, -4:] = 0
    given["attention_mask"] = given["attention_mask"].long()
    labels = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)
    with torch.no_grad():
        exact = model(**given).logits
    sq.convert(model, "performer(features=16)")
    with torch.no_grad():
        converted = model(**given).logits
    loss = nn.functional.cross_entropy
    lost, lost_now = (
        float(loss(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))
        for logits in (exact, converted)
    )
    found = sq.compare(model, given, repeats=1).output
    assert found.kind == "causal LM"
    assert found.perplexity_exact == pytest.approx(math.exp(lost), rel=1e-9)
    assert found.perplexity == pytest.approx(math.exp(lost_now), rel=1e-9)
    keep = given["attention_mask"].bool()
    p, q = (logits[keep].log_softmax(-1) for logits in (exact, converted))
    each = nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    assert found.kl == pytest.approx(float(each.mean()), rel=1e-9)
    assert each.min() <= found.kl_p95 <= each.max()
    assert (each <= found.kl_p95).double().mean() >= 0.95
    assert found.agreement == float((p.argmax(-1) == q.argmax(-1)).double().mean())
    assert found.positions == int(keep.sum())
    labelled = sq.compare(model, {**given, "labels": labels}, repeats=1).output
    assert labelled.perplexity == pytest.approx(found.perplexity, rel=1e-12)
    two = sq.compare(tiny("gpt2").double(), model, given, repeats=1).output
    assert two.perplexity == pytest.approx(found.perplexity, rel=1e-12)


def test_a_cache_in_the_inputs_is_used_and_left_alone() -> None:
    model, ids = tiny("gpt2"), torch.randint(5, 53, (2, 9))
    with torch.no_grad():
        past = model(ids[:, :4], use_cache=True).past_key_values
    sq.convert(model, "softmax")
    given = {"input_ids": ids[:, 4:], "past_key_values": past}
    found = sq.compare(model, given, repeats=2)
    assert past.get_seq_length() == 4
    assert found.error < 1e-5
    assert found.output.relative_error < 1e-5


def test_masked_models_need_labels_for_a_perplexity() -> None:
    torch.manual_seed(0)
    config = tf.BertConfig(
        vocab_size=53, hidden_size=24, num_hidden_layers=1, num_attention_heads=4
    )
    model, given = tf.BertForMaskedLM(config).eval(), padded()
    sq.convert(model, "softmax")
    found = sq.compare(model, given, repeats=1).output
    assert (found.kind, found.perplexity) == ("masked LM", None)
    assert found.kl == pytest.approx(0.0, abs=1e-9)
    labels = given["input_ids"].clone()
    labels[:, ::2] = -100
    found = sq.compare(model, {**given, "labels": labels}, repeats=1).output
    # labels at padded positions are not counted: none are left in the loss below
    labels = labels.masked_fill(given["attention_mask"] == 0, -100)
    with torch.no_grad():
        loss = model(**given, labels=labels).loss
    assert found.perplexity_exact == pytest.approx(math.exp(loss), rel=1e-5)


def test_encoders_and_decoders_count_their_own_positions() -> None:
    model = tiny("bart").double()
    given = inputs("bart")
    given.pop("decoder_input_ids", None)
    labels = torch.randint(5, 53, (2, 6))
    labels[0, 4:] = -100
    with torch.no_grad():
        logits = model(**given, labels=labels).logits
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    sq.convert(model, "softmax")
    found = sq.compare(model, {**given, "labels": labels}, repeats=1).output
    assert (found.kind, found.positions) == ("seq2seq LM", 10)
    assert found.perplexity_exact == pytest.approx(math.exp(loss), rel=1e-9)
    ids = given["input_ids"]
    mask = torch.ones_like(ids)
    mask[:, -3:] = 0
    pair = {**given, "decoder_input_ids": ids, "decoder_attention_mask": mask}
    assert sq.compare(model, pair, repeats=1).output.positions == int(mask.sum())


def test_classifiers_agree_on_labels() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 53, "hidden_size": 24, "num_hidden_layers": 1, "num_labels": 5}
    config = tf.BertConfig(**sizes, num_attention_heads=4)
    for kind, count in (
        (tf.BertForSequenceClassification, 3),
        (tf.BertForTokenClassification, 29),  # unmasked positions
        (tf.BertForQuestionAnswering, 6),  # a start and an end for each row
    ):
        config.num_labels = 2 if kind is tf.BertForQuestionAnswering else 5
        model = kind(config).eval()
        sq.convert(model, "performer(features=8)")
        given = padded()
        found = sq.compare(model, given, repeats=1).output
        assert found.kind == "classifier"
        assert found.kl is not None and found.kl > 0.0
        assert (found.agreement * count) == pytest.approx(round(found.agreement * count))
        given["input_ids"] = given["input_ids"].masked_fill(given["attention_mask"] == 0, 7)
        again = sq.compare(model, given, repeats=1).output
        assert again.kl == pytest.approx(found.kl, rel=1e-4)  # float32 logits near each other


def test_nearest_neighbours_and_percentiles() -> None:
    a = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]])
    b = a.clone()
    b[1] = torch.tensor([0.2, 1.0])  # nearest to the last row now, and the last row to it
    found = sq.compare(lambda x: a, lambda x: b, torch.zeros(4)).output
    assert found.neighbours == 0.5
    assert found.cosine_p5 == pytest.approx(
        float(torch.tensor(found.cosines, dtype=torch.float64).quantile(0.05))
    )


# ---- inputs, lengths, pictures, page -----------------------------------------------------


def tokenizer(folder: Path, *, pad: bool = True) -> Any:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "two", "three"]
    (folder / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    found = tf.BertTokenizer(vocab=str(folder / "vocab.txt"), model_max_length=20)
    if not pad:
        found.pad_token = None
    return found


def test_texts(tmp_path: Path) -> None:
    model, texts = bert(), ["one two", "three two one one", "two " * 30]
    sq.convert(model, "performer(features=32)")
    found = sq.compare(model, texts, tokenizer=tokenizer(tmp_path), batch_size=2, repeats=1)
    assert (found.rows, found.length) == (3, 20)
    alone = sq.compare(model, texts, tokenizer=tokenizer(tmp_path, pad=False), repeats=1)
    assert alone.cosines == pytest.approx(found.cosines, abs=1e-5)
    with pytest.raises(sq.OptionError, match="texts need tokenizer="):
        sq.compare(model, texts)


def test_lengths() -> None:
    model = bert()
    sq.convert(model, "performer(features=8)")
    found = sq.compare(model, padded(), repeats=1, lengths=(16, 64, 5000))
    short, long, beyond = found.costs
    assert (short.length, long.length) == (16, 64)
    for cost in (short, long):
        assert cost.seconds and cost.seconds_exact
        assert cost.speedup == cost.seconds_exact / cost.seconds
        if hasattr(os, "fork"):
            assert cost.mib is not None and cost.mib >= 0.0
    assert beyond.note == "the model holds positions for 512 tokens"
    assert "5000 tokens: (the model holds positions for 512 tokens)" in str(found)
    images = tiny("vit")
    sq.convert(images, "performer(features=8)")
    with pytest.raises(sq.OptionError, match="of token ids only, given pixel_values"):
        sq.compare(images, inputs("vit"), repeats=1, lengths=(16,))
    made = sq.compare(
        images, inputs("vit"), repeats=1, lengths=(16,), inputs_at=lambda n: inputs("vit")
    )
    assert made.costs[0].seconds


def test_other_lengths_repeat_the_first_row_without_its_padding() -> None:
    given = {
        "input_ids": torch.tensor([[0, 0, 7, 8, 9], [1, 2, 3, 4, 5]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]),
        "labels": torch.zeros(2, 5),
    }
    found = at_length(given, 7)
    assert found["input_ids"].tolist() == [[7, 8, 9, 7, 8, 9, 7]]
    assert found.keys() == {"input_ids", "attention_mask"}
    assert at_length(given, 2, repeat=False)["input_ids"].tolist() == [[7, 8]]
    assert at_length(torch.tensor([[3, 4]]), 3).tolist() == [[3, 4, 3]]


def test_pictures_are_the_weights_of_both() -> None:
    model, given = bert(), padded()
    sq.convert(model, "near_far(window=2, sinks=1, heavy=0, far=softmax)")
    found = sq.compare(model, given, repeats=1, pictures=[(1, 3), (0, 2)], picture_tokens=5)
    assert [(one.layer, one.head) for one in found.pictures] == [
        ("encoder.layer.0.attention.self", 2),
        ("encoder.layer.1.attention.self", 3),
    ]
    for one in found.pictures:
        assert one.exact.shape == (5, 5)
        torch.testing.assert_close(one.implied, one.exact)  # its far field is exact
        torch.testing.assert_close(one.exact.sum(-1), torch.ones(5))
    several = sq.compare(model, given, repeats=1, pictures=3).pictures
    errors = sorted(error for layer in found.layers for error in layer.heads)
    assert {errors[0], errors[-1]} <= {one.error for one in several}
    for wrong, match in (
        (-1, "pictures=-1"),
        ([(7, 0)], "layer 7 of 2"),
        ([("encoder.layer.0", 0)], "is no converted layer"),
        ([(0, 4)], "head 4 of 4"),
    ):
        with pytest.raises(sq.OptionError, match=match):
            sq.compare(model, given, repeats=1, pictures=wrong)


def test_a_page_that_stands_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = bert(), padded()
    shown = []
    for spec in ("near_far(window=2, sinks=1, far=performer)", "performer(features=8)"):
        sq.convert(model, spec)
        shown.append(sq.compare(model, given, repeats=1, pictures=1))
    costs = (LengthCost(512, 0.2, 0.3, 10.0, 12.0), LengthCost(2048, 2.0, 0.9, 90.0, 48.0))
    shown[0] = dataclasses.replace(shown[0], costs=(*costs, LengthCost(9, note="too short")))
    page = shown[0].save_html(tmp_path / "new" / "one.html").read_text(encoding="utf-8")
    assert page.count("<picture>") == 7  # layers, heads, parts, shares, time, memory, a head
    for part in (
        "uniform attention, the line to beat",
        '<meta name="viewport"',
        "encoder.layer.1.attention.self",
        "far: share",
        "prefers-color-scheme: dark",
        "2.22 ×",  # as fast
        "too short",
    ):
        assert part in page
    assert not re.search(r"""(src|href)=["'](?!data:)""", page)
    for content in re.findall(r'src="data:image/png;base64,([^"]+)"', page):
        assert base64.b64decode(content).startswith(b"\x89PNG")
    monkeypatch.setattr(pages, "twice", lambda draw, alt: alt)  # figures were seen above
    both = save_html(shown, tmp_path / "both.html", name="<model>").read_text(encoding="utf-8")
    assert "&lt;model&gt;" in both and "<model>" not in both
    assert both.count("performer(features=8)") >= 2
    two = sq.compare(nn.Linear(5, 3), nn.Linear(5, 3), torch.randn(2, 4, 5))
    assert "two models compared" in two.save_html(tmp_path / "two.html").read_text("utf-8")
    with pytest.raises(sq.OptionError, match="at least one comparison"):
        save_html([], tmp_path / "none.html")


def test_the_numbers_stay_on_the_model_until_it_is_reverted() -> None:
    model = bert()
    sq.convert(model, "near_far(window=2, sinks=1, far=performer)")
    found = sq.compare(model, padded(), repeats=1)
    kept = model.__dict__[COMPARISON]
    assert kept == json.loads(json.dumps(found.summary()))
    assert kept["output"]["cosine"] == found.cosine
    assert kept["layers"][0]["error"] == found.layers[0].error
    assert any(line.startswith("far: share") for line in kept["parts"])
    sq.revert(model)
    assert COMPARISON not in model.__dict__


def test_memory_of_a_forked_call() -> None:
    if not hasattr(os, "fork"):
        pytest.skip("no fork here")
    added = peak_memory(lambda: None, lambda: torch.ones(64 * 2**18).sum())  # 64 MiB
    assert added is not None
    assert 63.5 <= added <= 72  # code and buffers that the first call loads


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
