from __future__ import annotations

import copy
import importlib.util
import pickle
import sys
import warnings
from pathlib import Path

import pytest
import torch
import transformers as tf
from torch import nn

import subquad as sq
from subquad.convert import routing
from subquad.convert.swap import head_sizes

# Other folders may have a `models`, too: this one is loaded by its place.
_spec = importlib.util.spec_from_file_location(
    "convert_models", Path(__file__).with_name("models.py")
)
assert _spec is not None and _spec.loader is not None
models = importlib.util.module_from_spec(_spec)
sys.modules["convert_models"] = models
_spec.loader.exec_module(models)
tiny, inputs, hidden = models.tiny, models.inputs, models.hidden

# float32 through up to three layers with values of a few units: 1e-5 is some 100 roundings.
CLOSE = {"rtol": 1e-4, "atol": 2e-5}
IMPLEMENTATIONS = ("sdpa", "eager")


def kept(given: dict[str, torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """Outputs at unmasked positions: what padded positions hold means nothing."""
    mask = given.get("attention_mask")
    if mask is None or mask.shape != out.shape[:2] or "decoder_input_ids" in given:
        return out
    return out[mask.bool()]


# ---- softmax in place of softmax changes nothing -----------------------------------------


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", models.MODELS)
def test_softmax_equals_the_original(kind: str, implementation: str, padding: str) -> None:
    model, given = tiny(kind, implementation), inputs(kind, padding)
    exact = hidden(model, **given)
    report = sq.convert(model, "softmax")
    assert len(report.converted) >= 2
    torch.testing.assert_close(kept(given, hidden(model, **given)), kept(given, exact), **CLOSE)
    sq.revert(model)
    assert torch.equal(hidden(model, **given), exact)


@pytest.mark.parametrize("kind", ["bart", "llama", "whisper"])
def test_sizes_and_flags_are_read_off_the_modules(kind: str) -> None:
    report = sq.convert(tiny(kind), "softmax")
    for layer in report.converted:
        assert (layer.heads, layer.head_dim) == (4, 6)
        assert layer.kv_heads == (2 if kind == "llama" else 4)
        assert layer.prescaled == (kind == "whisper")
        assert layer.causal == ("encoder" not in layer.name)
    assert len({layer.seed for layer in report.converted}) == len(report.converted)


def test_modules_with_strange_names_are_measured_at_the_first_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, given = tiny("llama"), inputs("llama")
    exact = hidden(model, **given)
    monkeypatch.setattr(sys.modules["subquad.convert.swap"], "head_sizes", lambda layer: None)
    report = sq.convert(model, "softmax")
    assert report.converted[0].heads is None
    assert any("first call" in note for note in report.notes)
    assert "sizes at the first call" in str(report)
    torch.testing.assert_close(kept(given, hidden(model, **given)), kept(given, exact), **CLOSE)
    mechanism = model.model.layers[0].self_attn.subquad
    assert (mechanism.num_heads, mechanism.num_kv_heads, mechanism.head_dim) == (4, 2, 6)


def test_head_sizes_are_unknown_without_attributes() -> None:
    assert head_sizes(nn.Linear(2, 2)) is None


# ---- what is left out stays as it was ----------------------------------------------------


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama", "bart", "t5", "whisper"])
def test_layers_left_out_are_bit_equal(kind: str, implementation: str, padding: str) -> None:
    """Each kept layer gets the same mask and, for the same input, gives the same bits."""
    model, given = tiny(kind, implementation), inputs(kind, padding)
    modules = [(n, m) for n, m in model.named_modules() if routing.routes(m)]
    exact = _record(model, modules, given)
    spec = "softmax" if kind == "t5" else "performer(features=16)"
    last = modules[-1][0]
    sq.convert(model, spec, where=lambda name, module: name == last)
    mixed = _record(model, modules, given)
    for name, _ in modules:
        if name == last:
            continue
        # Everything before the converted layer has the same input, hence the same bits.
        assert torch.equal(mixed[name][1], exact[name][1]), name
        for now, before in zip(mixed[name][0], exact[name][0], strict=True):
            assert torch.equal(now, before), name
    assert spec == "softmax" or not torch.equal(mixed[last][1], exact[last][1])


def _record(
    model: nn.Module, modules: list[tuple[str, nn.Module]], given: dict[str, torch.Tensor]
) -> dict[str, tuple[list[torch.Tensor], torch.Tensor]]:
    """(4-D masks seen, output) of every attention module."""
    seen: dict[str, tuple[list[torch.Tensor], torch.Tensor]] = {}
    handles = []
    for name, module in modules:

        def hook(
            module: nn.Module, args: tuple, kwargs: dict, output: object, name: str = name
        ) -> None:
            masks = [
                value.clone()
                for value in (*args, *kwargs.values())
                if isinstance(value, torch.Tensor) and value.dim() == 4
            ]
            first = output[0] if isinstance(output, tuple) else output
            assert isinstance(first, torch.Tensor)
            seen[name] = (masks, first.clone())

        handles.append(module.register_forward_hook(hook, with_kwargs=True))
    hidden(model, **given)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_kept_layers_after_a_converted_one_still_use_their_exact_mask(implementation: str) -> None:
    model, given = tiny("gpt2", implementation), inputs("gpt2", "left")
    modules = [(n, m) for n, m in model.named_modules() if routing.routes(m)]
    exact = _record(model, modules, given)
    first = modules[0][0]
    sq.convert(model, "performer(features=16)", where=lambda name, module: name == first)
    mixed = _record(model, modules, given)
    for name, _ in modules[1:]:
        assert len(exact[name][0]) == 1
        assert torch.equal(mixed[name][0][0], exact[name][0][0])


def test_all_layers_converted_build_no_dense_mask() -> None:
    model, given = tiny("gpt2", "eager"), inputs("gpt2", "left")
    sq.convert(model, "softmax")
    modules = [(n, m) for n, m in model.named_modules() if routing.routes(m)]
    for masks, _ in _record(model, modules, given).values():
        assert masks == []


def test_a_composite_model_keeps_the_encoder_unmixed() -> None:
    """Sub-models with configs of their own do not pay for each other's exact layers."""
    model = tiny("t5")
    sq.convert(model, "softmax", where=lambda name, module: name.startswith("encoder"))
    assert model.encoder.config._attn_implementation == "subquad_sdpa"
    assert model.decoder.config._attn_implementation == "sdpa"


# ---- there and back ----------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", ["bert", "bart", "t5"])
def test_revert_restores_everything(kind: str, implementation: str) -> None:
    model, given = tiny(kind, implementation), inputs(kind)
    exact = hidden(model, **given)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = [name for name, _ in model.named_modules()]
    count = len(sq.convert(model, "softmax").converted)
    assert sq.revert(model) == count
    assert sq.revert(model) == 0
    assert [name for name, _ in model.named_modules()] == names
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert model.config._attn_implementation == implementation
    assert not any("_subquad" in module.__dict__ for module in model.modules())
    assert torch.equal(hidden(model, **given), exact)


def test_converting_twice_replaces() -> None:
    model, given = tiny("bert"), inputs("bert")
    exact = hidden(model, **given)
    assert not sq.convert(model, "performer(features=16)").replaced
    report = sq.convert(model, "softmax", where=lambda name, module: ".1." in name)
    assert report.replaced
    assert len(report.converted) == 1
    assert len(report.kept) == 2
    torch.testing.assert_close(kept(given, hidden(model, **given)), kept(given, exact), **CLOSE)
    assert sq.revert(model) == 1
    assert torch.equal(hidden(model, **given), exact)


def test_a_failed_conversion_changes_nothing() -> None:
    model, given = tiny("bert"), inputs("bert")
    exact = hidden(model, **given)
    sq.convert(model, "softmax")
    now = hidden(model, **given)
    with pytest.raises(sq.OptionError):
        sq.convert(model, "performer", features=0)
    assert torch.equal(hidden(model, **given), now)
    sq.revert(model)
    assert torch.equal(hidden(model, **given), exact)


def test_copies_and_pickles_carry_the_conversion() -> None:
    model, given = tiny("bert"), inputs("bert")
    exact = hidden(model, **given)
    sq.convert(model, "performer(features=16)")
    swapped = hidden(model, **given)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(hidden(twin, **given), swapped)
        assert sq.revert(twin) == 3
        assert torch.equal(hidden(twin, **given), exact)
    assert torch.equal(hidden(model, **given), swapped)


def test_seeds_determine_the_draws_layer_by_layer() -> None:
    model, given = tiny("bert"), inputs("bert")
    outputs = []
    for seed in (0, 0, 1):
        sq.convert(model, "performer(features=16)", seed=seed)
        outputs.append(hidden(model, **given))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    # A layer's draw does not depend on which others are converted.
    whole = {
        name: t for name, t in model.state_dict().items() if ".1." in name and "subquad" in name
    }
    sq.convert(model, "performer(features=16)", seed=1, where=lambda name, module: ".1." in name)
    one = {name: t for name, t in model.state_dict().items() if "subquad" in name}
    assert whole
    assert one.keys() == whole.keys()
    assert all(torch.equal(one[name], whole[name]) for name in one)


def test_a_module_around_a_model_is_converted_through() -> None:
    inner = tiny("bert")
    given = inputs("bert")
    outer = nn.ModuleDict({"body": inner})
    report = sq.convert(outer, "softmax")
    assert all(layer.name.startswith("body.") for layer in report.converted)
    exact = hidden(inner, **given)
    sq.revert(outer)
    torch.testing.assert_close(kept(given, hidden(inner, **given)), kept(given, exact), **CLOSE)


# ---- performer ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama", "bart"])
def test_performer_does_not_see_right_padding(kind: str) -> None:
    model, given = tiny(kind), inputs(kind, "right")
    sq.convert(model, "performer(features=32)")
    padded = hidden(model, **given)
    alone = {name: value[:1] for name, value in given.items()}
    for name in ("input_ids", "attention_mask"):
        alone[name] = alone[name][:, :-5]
    short = hidden(model, **alone)
    torch.testing.assert_close(padded[:1, : short.shape[1]], short, **CLOSE)
    # Nor what is written there.
    changed = {name: value.clone() for name, value in given.items()}
    changed["input_ids"][0, -5:] = 7
    again = hidden(model, **changed)
    torch.testing.assert_close(
        again[:, : short.shape[1]], padded[:, : short.shape[1]], rtol=0, atol=0
    )


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama", "bart", "vit", "whisper", "esm"])
def test_performer_with_many_features_is_close(kind: str) -> None:
    # Small weights keep |q|, |k| ≤ 1, where the variance of a kernel estimate is O(1/M):
    # at M = 4096 the relative error of a weight is a few hundredths of its spread.
    model, given = tiny(kind, spread=0.08), inputs(kind)
    sq.convert(model, "performer(features=4096)")
    found = sq.compare(model, given, repeats=1)
    assert found.error < 0.05
    assert found.error < found.uniform_error or found.uniform_error < 0.02
    assert min(found.cosines) > 0.995


@pytest.mark.parametrize("kind", ["whisper", "esm"])
def test_prescaled_queries_get_their_factor_back(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """q·D^-½ against k is given to features as q·D^-¼ against k·D^-¼, the usual balance."""
    model, given = tiny(kind), inputs(kind)
    report = sq.convert(model, "softmax")
    assert all(layer.prescaled for layer in report.converted)
    scales = []
    original = sq.Mechanism.forward

    def spy(self: sq.Mechanism, q: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        scales.append(kwargs["scale"])
        return original(self, q, *args, **kwargs)

    monkeypatch.setattr(sq.Mechanism, "forward", spy)
    hidden(model, **given)
    assert scales == [6**-0.5] * len(scales)
    assert scales


def test_cross_attention_that_reads_queries_together_is_said() -> None:
    """Fed whole, a row would read otherwise than generated alone: by queries' number or content."""
    model = tiny("bart")

    def notes(spec: str) -> list[str]:
        found = sq.convert(model, spec).notes
        return [note for note in found if note.startswith("cross-attention by")]

    (note,) = notes("aft(kind=conv, window=3)")
    assert "depends on the other queries" in note and "biases go by positions" in note
    for spec in ("performer", "aft", "synthesizer", "conv"):
        assert not notes(spec), spec


def test_training_reaches_the_weights_and_says_that_dropout_is_gone() -> None:
    model, given = tiny("bert"), inputs("bert")
    report = sq.convert(model, "performer(features=16)")
    assert report.notes == (
        "attention dropout 0.1 is not applied in converted layers during training",
    )
    model.train()
    with pytest.warns(UserWarning, match="attention dropout 0.1 is not applied.*performer"):
        model(**given).last_hidden_state.square().mean().backward()
    assert model.encoder.layer[0].attention.self.query.weight.grad.abs().max() > 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once per conversion
        model(**given)
    sq.convert(model, "softmax")
    with pytest.warns(UserWarning, match=r"to 'softmax': it drops by its own option, dropout=0\.1"):
        model(**given)


# ---- caches ------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_cached_generation_equals_uncached(kind: str, implementation: str) -> None:
    model, given = tiny(kind, implementation), inputs(kind, "left")
    model.generation_config.eos_token_id = None
    for spec in ("softmax", "performer(features=32)"):
        sq.convert(model, spec)
        options = {**given, "max_new_tokens": 9, "do_sample": False}
        cached = model.generate(**options)
        assert torch.equal(cached, model.generate(**options, use_cache=False))
        if spec == "softmax":
            sq.revert(model)
            assert torch.equal(cached, model.generate(**options))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_chunked_prefill_and_static_caches(kind: str) -> None:
    model, given = tiny(kind), inputs(kind, "left")
    ids, mask = given["input_ids"], given["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    exact = hidden(model, **given, position_ids=positions)
    sq.convert(model, "softmax")
    for cache in (
        tf.DynamicCache(config=model.config),
        tf.StaticCache(config=model.config, max_cache_len=31),
    ):
        parts = []
        for start, end in ((0, 5), (5, 11), (11, 12), (12, 13)):
            parts.append(
                hidden(
                    model,
                    input_ids=ids[:, start:end],
                    attention_mask=mask[:, :end],
                    position_ids=positions[:, start:end],
                    past_key_values=cache,
                )
            )
        together = torch.cat(parts, 1)
        torch.testing.assert_close(together[mask.bool()], exact[mask.bool()], **CLOSE)


def test_cached_encoder_decoder_generation() -> None:
    model, given = tiny("bart"), inputs("bart", "right")
    del given["decoder_input_ids"]
    options = {**given, "max_new_tokens": 6, "do_sample": False, "num_beams": 2}
    exact = model.generate(**options)
    sq.convert(model, "softmax")
    assert torch.equal(model.generate(**options), exact)
    sq.convert(model, "performer(features=32)")
    assert torch.equal(model.generate(**options), model.generate(**options, use_cache=False))


# ---- masks -------------------------------------------------------------------------------


def test_explicit_masks_that_are_plain_are_read_as_such() -> None:
    model, given = tiny("gpt2"), inputs("gpt2", "left")
    sq.convert(model, "performer(features=16)")
    usual = hidden(model, **given)
    opened = (
        torch.ones(13, 13, dtype=torch.bool).tril() & given["attention_mask"].bool()[:, None, None]
    )
    floats = torch.zeros(opened.shape).masked_fill(~opened, torch.finfo(torch.float32).min)
    for explicit in (opened, floats):
        out = hidden(model, input_ids=given["input_ids"], attention_mask=explicit)
        torch.testing.assert_close(kept(given, out), kept(given, usual), **CLOSE)


def test_other_explicit_masks_need_a_mechanism_that_takes_them() -> None:
    model, given = tiny("gpt2"), inputs("gpt2")
    odd = torch.ones(2, 1, 13, 13, dtype=torch.bool).tril()
    odd[:, :, 9, 4] = False
    exact = hidden(model, input_ids=given["input_ids"], attention_mask=odd)
    sq.convert(model, "softmax")
    out = hidden(model, input_ids=given["input_ids"], attention_mask=odd)
    torch.testing.assert_close(out, exact, **CLOSE)
    sq.convert(model, "performer(features=16)")
    with pytest.raises(sq.UnsupportedError, match="explicit .* mask in GPT2Attention.*softmax"):
        hidden(model, input_ids=given["input_ids"], attention_mask=odd)


def test_an_attention_mask_of_another_shape_is_refused() -> None:
    layer = nn.Identity()
    with pytest.raises(sq.ShapeError, match=r"attention_mask must be \(B, S\)"):
        routing._read_mask("sdpa", "softmax", layer, torch.ones(2, 3, 3), True, 3, 3)


def test_two_dimensional_masks_follow_the_module() -> None:
    layer = nn.Identity()
    for causal in (True, False):
        layer.is_causal = causal
        key = torch.tensor([[1, 1, 0]])
        found = routing._read_mask("sdpa", "softmax", layer, key, None, 3, 3).mask
        assert found.causal is causal
        assert found.key is not None
        assert found.key.tolist() == [[True, True, False]]


def test_position_biases_need_a_mechanism_that_takes_them() -> None:
    model, given = tiny("t5"), inputs("t5")
    sq.convert(model, "performer(features=16)")
    with pytest.raises(sq.UnsupportedError, match="position bias of T5Attention.*EncDec.*softmax"):
        hidden(model, **given)
    # T5's cross-attention has none.
    sq.convert(model, "performer(features=4096)", where=lambda name, module: "EncDec" in name)
    assert torch.isfinite(hidden(model, **given)).all()


# ---- errors ------------------------------------------------------------------------------


def test_models_that_do_not_route_say_why() -> None:
    canine = tf.CanineModel(tf.CanineConfig(**models._SIZES))
    with pytest.raises(
        sq.UnsupportedError, match="CanineModel.*does not go through.*no adapter.*BERT, GPT-2"
    ):
        sq.convert(canine)
    with pytest.raises(sq.UnsupportedError, match="contains no transformers model"):
        sq.convert(nn.Linear(2, 2))
    with pytest.raises(sq.OptionError, match="must be a torch.nn.Module"):
        sq.convert("bert")


def test_other_implementations_are_refused() -> None:
    model = tiny("bert", "flex_attention")
    with pytest.raises(sq.UnsupportedError, match="flex_attention.*set_attn_implementation"):
        sq.convert(model)


def test_nothing_picked_lists_what_there_was() -> None:
    with pytest.raises(sq.OptionError, match=r"none of the 3 .*encoder.layer.0.attention.self"):
        sq.convert(tiny("bert"), where=lambda name, module: False)


def test_unknown_mechanisms_and_options_are_named() -> None:
    model = tiny("bert")
    with pytest.raises(sq.UnknownNameError, match="did you mean 'performer'"):
        sq.convert(model, "perfomer")
    with pytest.raises(sq.UnknownNameError, match="unknown option 'feature'"):
        sq.convert(model, "performer", feature=3)


def test_mechanisms_that_cannot_are_refused_before_anything_changes() -> None:
    model = tiny("gpt2")
    with pytest.raises(sq.UnsupportedError, match="causal attention in transformer.h.0.attn"):
        sq.convert(model, "performer(gauge=balance)")
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_models_that_share_a_config_do_not_meet(kind: str, implementation: str) -> None:
    """One row is what a (B, S) mask would pass for an L×S one without an error."""
    one = tiny(kind, implementation)
    other = type(one)(one.config).eval()
    other.load_state_dict(one.state_dict(), strict=False)
    given = {name: value[:1] for name, value in inputs(kind).items()}
    assert other.config is one.config
    exact, exact_other = hidden(one, **given), hidden(other, **given)
    sq.convert(one, "linear")
    assert torch.equal(hidden(other, **given), exact_other)
    converted = hidden(one, **given)
    sq.convert(other, "linear")
    assert sq.revert(other) == 3
    assert torch.equal(hidden(one, **given), converted)
    assert torch.equal(hidden(other, **given), exact_other)
    sq.revert(one)
    assert torch.equal(hidden(one, **given), exact)
    assert one.config._attn_implementation == implementation


PARTS = {
    "llama": "model.layers.1",
    "bart": "model.decoder",
    "gptj": "transformer.h.1",
    "bloom": "transformer.h.1",
}


@pytest.mark.parametrize("kind", PARTS)
def test_parts_are_converted_and_reverted_alone(kind: str) -> None:
    """Layers outside of the part follow the same config; they stay what they are."""
    model, given = tiny(kind), {name: value[:1] for name, value in inputs(kind, "left").items()}
    part, exact = model.get_submodule(PARTS[kind]), hidden(model, **given)
    sq.convert(part, "softmax")
    torch.testing.assert_close(kept(given, hidden(model, **given)), kept(given, exact), **CLOSE)
    sq.revert(part)
    assert torch.equal(hidden(model, **given), exact)

    outside = sq.convert(model, "linear", where=lambda name, m: PARTS[kind] not in name)
    expected = hidden(model, **given)
    sq.convert(model, "linear")
    assert not torch.equal(hidden(model, **given), expected)
    assert sq.revert(part) == len(outside.kept)
    torch.testing.assert_close(kept(given, hidden(model, **given)), kept(given, expected), **CLOSE)
    assert sq.revert(model) == len(outside.converted)
    assert torch.equal(hidden(model, **given), exact)


def test_stacks_that_were_converted_one_by_one_are_reverted_one_by_one() -> None:
    model, given = tiny("bart"), inputs("bart")
    sq.convert(model.model.encoder, "linear")
    expected = hidden(model, **given)
    sq.convert(model.model.decoder, "linear")
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    for each in (model, twin):
        sq.revert(each.model.decoder)
        assert torch.equal(hidden(each, **given), expected)


def test_missing_transformers_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'subquad\[hf\]'"):
        sq.convert(nn.Linear(2, 2))


def test_eager_upcasting_of_gpt2_is_not_half_kept() -> None:
    config = tf.GPT2Config(
        vocab_size=53, n_embd=24, n_layer=2, n_head=4, reorder_and_upcast_attn=True
    )
    config._attn_implementation = "eager"
    model = tf.GPT2LMHeadModel(config)
    with pytest.raises(sq.UnsupportedError, match="reorder_and_upcast_attn"):
        sq.convert(model, "softmax", where=lambda name, module: ".0." in name)


def test_the_report_prints_and_is_json() -> None:
    report = sq.convert(tiny("llama"), "performer", features=16, where=lambda n, m: ".0." in n)
    text = str(report)
    assert "performer(features=16): 1 of 3 attention layers converted" in text
    assert "4 on 2 heads × 6, causal" in text
    assert "kept exact: model.layers.1.self_attn, model.layers.2.self_attn" in text
    assert report.to_dict()["converted"][0]["kv_heads"] == 2


def test_a_converted_model_compiles_as_one_graph() -> None:
    model, given = tiny("llama"), inputs("llama", "left")
    sq.convert(model, "performer(features=16)")
    expected = hidden(model, **given)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(hidden(compiled, **given, use_cache=False), expected, **CLOSE)
