"""`convert` on every kind of attention that it says it reaches."""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import pickle
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import subquad as sq
from subquad.convert import Architecture, adapters, coverage, routing
from subquad.convert.swap import configs, converted_layers

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
LINEAR = "performer(features=16)"


def kept(given: dict[str, Tensor], out: Tensor) -> Tensor:
    """Outputs at unmasked positions: what padded positions hold means nothing."""
    mask = given.get("attention_mask")
    if mask is None or mask.shape != out.shape[:2] or "decoder_input_ids" in given:
        return out
    return out[mask.bool()]


def attention_outputs(model: nn.Module, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The output of every attention module, in the order of their calls."""
    seen: dict[str, Tensor] = {}

    def hook(name: str) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            seen[name] = (output[0] if isinstance(output, tuple) else output).clone()

        return keep

    handles = [
        module.register_forward_hook(hook(name))
        for name, module in model.named_modules()
        if routing.routes(module) or adapters.find(module) is not None
    ]
    hidden(model, **given)
    for handle in handles:
        handle.remove()
    return seen


def check_conversion(kind: str) -> None:
    model, given = tiny(kind), inputs(kind)
    exact = hidden(model, **given)
    left = inputs(kind, "left")
    exact_left = hidden(model, **left)
    layers = attention_outputs(model, given)
    keys = list(model.state_dict())
    check_listed(kind, model)

    sq.convert(model, "softmax")
    torch.testing.assert_close(kept(given, hidden(model, **given)), kept(given, exact), **CLOSE)
    torch.testing.assert_close(kept(left, hidden(model, **left)), kept(left, exact_left), **CLOSE)
    assert [key for key in model.state_dict() if ".subquad." not in key] == keys

    # The last layer that is called alone: all before it have the same input, hence the same bits.
    last = next(reversed(layers))
    report = sq.convert(model, LINEAR, where=lambda name, module: name == last)
    assert [row.name for row in report.converted] == [last]
    mixed = attention_outputs(model, given)
    assert all(torch.equal(mixed[name], layers[name]) is (name != last) for name in layers)

    sq.convert(model, LINEAR)
    out = hidden(model, **given)
    assert torch.isfinite(out).all()
    # Sixteen features are a coarse estimate: what equalled the exact output was not converted.
    assert (kept(given, out) - kept(given, exact)).abs().max() > 1e-3

    assert sq.revert(model) == len(report.converted) + len(report.kept)
    assert torch.equal(hidden(model, **given), exact)
    assert list(model.state_dict()) == keys


# Close relatives of others here.
RELATIVES = (
    *("biogpt", "clip_text", "deit", "gemma", "gpt_neox", "mbart", "olmo2", "xlm_roberta"),
    *("falcon_one_key_head", "flava", "megatron_bert", "visual_bert"),
)


def kinds(found: Any, *without: str) -> list[Any]:
    marks = {True: [pytest.mark.slow], False: []}
    return [pytest.param(k, marks=marks[k in RELATIVES]) for k in found if k not in without]


@pytest.mark.parametrize("kind", kinds(models.ROUTING, "albert"))
def test_architectures_that_route(kind: str) -> None:
    check_conversion(kind)


def test_layers_that_are_called_again_and_again() -> None:
    model, given = tiny("albert"), inputs("albert", "left")
    exact = hidden(model, **given)
    assert len(sq.convert(model, "softmax").converted) == 1
    torch.testing.assert_close(kept(given, hidden(model, **given)), kept(given, exact), **CLOSE)
    sq.revert(model)
    assert torch.equal(hidden(model, **given), exact)


@pytest.mark.parametrize("kind", kinds(models.ADAPTED, "mpnet"))
def test_architectures_with_an_adapter(kind: str) -> None:
    check_conversion(kind)


def check_listed(kind: str, model: nn.Module) -> None:
    """Read as text and met as objects, the same classes are reached."""
    listed = architectures()[type(model).__module__.split(".")[2]]
    classes = {
        type(module).__name__
        for module in model.modules()
        if routing.routes(module) or adapters.find(module) is not None
    }
    assert classes
    assert classes - {"MultiheadAttention"} <= set(listed.classes)
    assert listed.reached in (("adapter",) if kind in models.ADAPTED else ("routes", "partly"))


@functools.cache
def architectures() -> dict[str, Architecture]:
    return {one.name: one for one in coverage()}


def test_the_list_of_architectures() -> None:
    found = architectures()
    assert list(found) == sorted(found)
    assert all(found[name].prescaled for name in ("whisper", "esm", "opt"))
    assert found["mistral"].features == ("causal", "sliding window")
    assert found["bert"].features == ("causal", "cross")
    assert found["vit"].features == ()
    assert found["t5"].position_bias
    assert found["mpnet"].position_bias
    assert found["gemma2"].other == ("soft-capped logits",)
    assert found["deberta"].reached == "no"
    assert "position" in found["deberta"].reason
    assert found["llava"].reached == "parts"
    assert "resnet" not in found  # convolutions alone
    assert found["sam"].reached == "partly"
    assert found["sam"].missed == ("SamVisionAttention", "SamVisionSdpaAttention")


@pytest.mark.parametrize("path", [*adapters.ADAPTERS, *adapters.REFUSED])
def test_every_adapted_class_exists(path: str) -> None:
    module, _, name = path.rpartition(".")
    if module.startswith("timm"):
        pytest.skip("timm is no dependency: its attention is mirrored below")
    found = getattr(importlib.import_module(module), name)
    if path in adapters.ADAPTERS:
        adapter = adapters._adapter(adapters.ADAPTERS[path])
        assert callable(getattr(found, adapter.method))


# ---- adapters ----------------------------------------------------------------------------


def test_mpnet_takes_its_position_bias_to_mechanisms_with_explicit_masks() -> None:
    model, given = tiny("mpnet"), inputs("mpnet")
    exact = hidden(model, **given)
    sq.convert(model, "softmax")
    torch.testing.assert_close(kept(given, hidden(model, **given)), kept(given, exact), **CLOSE)
    sq.convert(model, LINEAR)
    with pytest.raises(sq.UnsupportedError, match="position bias of MPNetSelf.*where=.*softmax"):
        hidden(model, **given)
    nn.init.zeros_(model.encoder.relative_attention_bias.weight)
    assert torch.isfinite(hidden(model, **given)).all()


@pytest.mark.parametrize("kind", ["bloom", "gptj", "codegen", "falcon", "roformer_decoder"])
@pytest.mark.parametrize("spec", ["softmax", "performer(features=32)"])
def test_adapted_decoders_generate_with_and_without_a_cache(kind: str, spec: str) -> None:
    model, given = tiny(kind), inputs(kind, "left")
    model.generation_config.eos_token_id = None
    options = {**given, "max_new_tokens": 7, "do_sample": False}
    exact = model.generate(**options)
    sq.convert(model, spec)
    cached = model.generate(**options)
    assert torch.equal(cached, model.generate(**options, use_cache=False))
    if spec == "softmax":
        assert torch.equal(cached, exact)
    sq.revert(model)
    assert torch.equal(model.generate(**options), exact)


@pytest.mark.parametrize("kind", ["gptj", "falcon", "roformer"])
def test_copies_and_pickles_of_adapted_models(kind: str) -> None:
    model, given = tiny(kind), inputs(kind)
    exact = hidden(model, **given)
    sq.convert(model, LINEAR)
    swapped = hidden(model, **given)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(hidden(twin, **given), swapped)
        sq.revert(twin)
        assert torch.equal(hidden(twin, **given), exact)
    assert torch.equal(hidden(model, **given), swapped)


def test_cross_attention_of_adapted_models() -> None:
    config = tf.RoFormerConfig(**models._SIZES, is_decoder=True, add_cross_attention=True)
    model = tf.RoFormerForCausalLM(config).eval()
    given = inputs("roformer_decoder")
    given["encoder_hidden_states"] = torch.randn(2, 9, models.WIDTH)
    given["encoder_attention_mask"] = torch.ones(2, 9).long()
    given["encoder_attention_mask"][1, 6:] = 0
    exact = hidden(model, **given)
    report = sq.convert(model, "softmax")
    assert [row.use for row in report.converted] == ["causal", "cross"] * 3
    torch.testing.assert_close(kept(given, hidden(model, **given)), kept(given, exact), **CLOSE)
    sq.revert(model)
    assert torch.equal(hidden(model, **given), exact)


def test_training_reaches_the_weights_of_adapted_layers() -> None:
    model, given = tiny("roformer"), inputs("roformer")
    sq.convert(model, LINEAR)
    model.train()
    with pytest.warns(UserWarning, match="attention dropout 0.1 is not applied"):
        model(**given).last_hidden_state.square().mean().backward()
    assert model.encoder.layer[0].attention.self.query.weight.grad.abs().max() > 0


def test_falcon_says_what_it_needs() -> None:
    model = models._falcon(alibi=True)
    with pytest.raises(sq.UnsupportedError, match="ALiBi bias of transformer.h.0.*softmax"):
        sq.convert(model, LINEAR)
    given = inputs("falcon", "left")
    model = model.eval()
    exact = hidden(model, **given)
    sq.convert(model, "softmax")
    torch.testing.assert_close(kept(given, hidden(model, **given)), kept(given, exact), **CLOSE)
    with pytest.raises(sq.UnsupportedError, match="did not use scaled_dot_product_attention"):
        model(**given, output_attentions=True)
    config = tf.FalconConfig(**models._FALCON)
    config._attn_implementation = "eager"
    with pytest.raises(sq.UnsupportedError, match="FalconAttention.*'eager'.*'sdpa'"):
        sq.convert(tf.FalconForCausalLM(config), "softmax")


@pytest.mark.parametrize("kind", ["deberta", "mpt"])
def test_logits_with_terms_of_position_say_so(kind: str) -> None:
    if kind == "deberta":
        model: nn.Module = tf.DebertaModel(tf.DebertaConfig(**models._SIZES))
    else:
        config = tf.MptConfig(vocab_size=models.VOCAB, d_model=24, n_heads=4, n_layers=1)
        model = tf.MptModel(config)
    with pytest.raises(sq.UnsupportedError, match=f"{type(model).__name__}.*terms of position"):
        sq.convert(model)


class TimmAttention(nn.Module):
    """The published structure of timm 1.0's ``Attention``: names, shapes, the fused call."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.scale, self.fused_attn = self.head_dim**-0.5, True
        self.qkv = nn.Linear(dim, 3 * dim)
        self.q_norm, self.k_norm = nn.LayerNorm(self.head_dim), nn.LayerNorm(self.head_dim)
        self.attn_drop, self.proj_drop = nn.Dropout(0.1), nn.Dropout(0.0)
        self.norm, self.proj = nn.Identity(), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.fused_attn:
            dropout = self.attn_drop.p if self.training else 0.0
            out = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        else:
            out = (q * self.scale @ k.mT).softmax(-1) @ v
        return self.proj_drop(self.proj(self.norm(out.transpose(1, 2).flatten(2))))


# Found by its full name, like the class that it mirrors.
TimmAttention.__module__, TimmAttention.__qualname__ = "timm.layers.attention", "Attention"


def test_timm_attention() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(TimmAttention(24, 4), nn.GELU(), TimmAttention(24, 4)).eval()
    x = torch.randn(2, 11, 24)
    exact = model(x)
    report = sq.convert(model, "softmax")
    assert [(row.heads, row.head_dim) for row in report.converted] == [(4, 6)] * 2
    torch.testing.assert_close(model(x), exact, **CLOSE)
    sq.convert(model, LINEAR, keep_exact="0")
    assert not torch.equal(model(x), exact)
    model[2].fused_attn = False
    with pytest.raises(sq.UnsupportedError, match="fused_attn=True"):
        model(x)
    model[2].fused_attn = True
    sq.revert(model)
    assert torch.equal(model(x), exact)


# ---- probing -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gptj", "falcon", "roformer", "bert"])
def test_probing_shows_every_converted_layer(kind: str) -> None:
    model, given = tiny(kind), inputs(kind)
    exact = hidden(model, **given)
    sq.convert(model, "softmax")
    seen = []

    def watch(layer: nn.Module, run: Any, out: Tensor, v: Tensor, mask: Any, stop: Any) -> None:
        torch.testing.assert_close(run(), out, **CLOSE)
        seen.append(layer)

    with implementation(model, "subquad_{}_probe"), routing.probing(watch):
        out = hidden(model, **given)
    torch.testing.assert_close(kept(given, out), kept(given, exact), **CLOSE)
    assert seen == [layer for _, layer in converted_layers(model)]
    with implementation(model, "{}"):
        assert torch.equal(hidden(model, **given), exact)


class implementation:
    """Within, all converted configs use the original implementation's name in a pattern."""

    def __init__(self, model: nn.Module, pattern: str) -> None:
        names = [(c, c._attn_implementation) for c in configs(model)]
        self.configs = [(c, name) for c, name in names if routing.original_name(name)]
        self.pattern = pattern

    def __enter__(self) -> None:
        for config, name in self.configs:
            original = routing.original_name(name)
            config._attn_implementation_internal = self.pattern.format(original)

    def __exit__(self, *_: Any) -> None:
        for config, name in self.configs:
            config._attn_implementation_internal = name


# ---- torch.nn.MultiheadAttention ---------------------------------------------------------


@pytest.fixture(autouse=True)
def _quiet_nested_tensors() -> Iterator[None]:
    with warnings.catch_warnings():
        # torch's own, when its encoder packs padded rows
        warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors")
        yield


def encoder(**options: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(24, 4, 40, **{"batch_first": True, **options})
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor="norm_first" not in options).eval()


X = torch.randn(2, 9, 24, generator=torch.Generator().manual_seed(1))
PADDED = torch.arange(9) >= torch.tensor([[6], [9]])


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("call", ["plain", "padded", "causal"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_encoders_of_torch(norm_first: bool, call: str, grad: bool) -> None:
    """Without gradients torch's layers go around self_attn: not while it is converted."""
    model = encoder(**({"norm_first": True} if norm_first else {}))
    triangle = nn.Transformer.generate_square_subsequent_mask(9)
    given: dict[str, Any] = {
        "plain": {},
        "padded": {"src_key_padding_mask": PADDED},
        "causal": {"mask": triangle, "is_causal": True},
    }[call]
    open_rows = ~PADDED if call == "padded" else torch.ones(2, 9, dtype=torch.bool)
    parameters = dict(model.named_parameters())
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    with torch.set_grad_enabled(grad):
        exact = model(X, **given)
        sq.convert(model, "softmax")
        torch.testing.assert_close(model(X, **given)[open_rows], exact[open_rows], **CLOSE)
        report = sq.convert(model, LINEAR)
        assert [row.name for row in report.converted] == [
            "layers.0.self_attn",
            "layers.1.self_attn",
        ]
        out = model(X, **given)
        assert (out - exact)[open_rows].abs().max() > 1e-3
        now = {k: v for k, v in model.named_parameters() if ".subquad." not in k}
        assert all(now[name] is parameter for name, parameter in parameters.items())
        sq.revert(model)
        assert torch.equal(model(X, **given), exact)
    after = {name: dict(module.__dict__) for name, module in model.named_modules()}
    assert after.keys() == before.keys()
    assert all(after[name].keys() == before[name].keys() for name in before)
    assert type(model.layers[0].self_attn) is nn.MultiheadAttention


def test_a_converted_encoder_is_linear_in_the_causal_direction_too() -> None:
    model = encoder()
    triangle = nn.Transformer.generate_square_subsequent_mask(9)
    sq.convert(model, LINEAR)
    changed = X.clone()
    changed[:, 5:] += 1.0
    with torch.no_grad():
        a, b = (model(x, mask=triangle, is_causal=True) for x in (X, changed))
    torch.testing.assert_close(a[:, :5], b[:, :5], **CLOSE)
    assert (a[:, 5:] - b[:, 5:]).abs().max() > 1e-2


def test_a_whole_transformer_of_torch() -> None:
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="enable_nested_tensor"):  # torch's own, at length L first
        model = nn.Transformer(24, 4, 2, 2, 40).eval()
    source, target = X.transpose(0, 1), X.transpose(0, 1)[:5]
    triangle = nn.Transformer.generate_square_subsequent_mask(5)
    given = {"tgt_mask": triangle, "memory_key_padding_mask": PADDED}
    with torch.no_grad():
        exact = model(source, target, **given)
        report = sq.convert(model, "softmax")
        uses = {row.name.split(".", 1)[0]: [] for row in report.converted}
        for row in report.converted:
            uses[row.name.split(".", 1)[0]].append(row.use)
        assert uses == {"encoder": ["encoder"] * 2, "decoder": ["causal", "cross"] * 2}
        torch.testing.assert_close(model(source, target, **given), exact, **CLOSE)
        sq.convert(model, LINEAR, where=lambda name, module: "multihead_attn" in name)
        assert not torch.equal(model(source, target, **given), exact)
        sq.revert(model)
        assert torch.equal(model(source, target, **given), exact)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"kdim": 10, "vdim": 14},
        {"add_bias_kv": True},
        {"add_zero_attn": True},
        {"batch_first": False},
    ],
    ids=str,
)
def test_multihead_attention_by_itself(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    attn = nn.MultiheadAttention(24, 4, **{"batch_first": True, **options}).eval()
    model = nn.ModuleDict({"attn": attn})
    key = torch.randn(2, 7, options.get("kdim", 24))
    value = torch.randn(2, 7, options.get("vdim", 24))
    padded = torch.arange(7) >= torch.tensor([[7], [4]])
    query = X
    if options.get("batch_first") is False:
        query, key, value = (t.transpose(0, 1) for t in (X, key, value))
    exact, weights = attn(query, key, value, key_padding_mask=padded)
    report = sq.convert(model, "softmax")
    assert report.converted[0].use == ("cross" if "kdim" in options else "encoder")
    out, none = attn(query, key, value, key_padding_mask=padded)
    assert none is None
    torch.testing.assert_close(out, exact, **CLOSE)
    out, own = attn(query, key, value, key_padding_mask=padded, need_weights=True)
    torch.testing.assert_close((out, own), (exact, weights), **CLOSE)
    sq.convert(model, LINEAR)
    assert torch.isfinite(attn(query, key, value, key_padding_mask=padded)[0]).all()
    sq.revert(model)
    again = attn(query, key, value, key_padding_mask=padded)
    assert torch.equal(again[0], exact)
    assert torch.equal(again[1], weights)


def test_converted_multihead_attention_loads_torchs_weights() -> None:
    model, other = encoder(), encoder()
    for parameter in other.parameters():
        parameter.data.normal_(0, 0.2)
    sq.convert(model, LINEAR)
    torchs = other.state_dict()
    assert set(torchs) <= set(model.state_dict())
    model.load_state_dict(torchs)
    sq.revert(model)
    with torch.no_grad():
        assert torch.equal(model(X), other(X))


def test_copies_and_pickles_of_converted_encoders() -> None:
    model = encoder()
    with torch.no_grad():
        exact = model(X)
        sq.convert(model, LINEAR)
        swapped = model(X)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(twin(X), swapped)
            sq.revert(twin)
            assert torch.equal(twin(X), exact)
        assert torch.equal(model(X), swapped)


def test_training_a_converted_encoder_says_that_dropout_is_gone() -> None:
    model = encoder(dropout=0.1).train()
    report = sq.convert(model, LINEAR)
    assert report.notes[0].startswith("attention dropout 0.1 is not applied")
    with pytest.warns(UserWarning, match="attention dropout 0.1 is not applied.*performer"):
        model(X).square().mean().backward()
    assert model.layers[0].self_attn.in_proj_weight.grad.abs().max() > 0


def test_models_of_both_kinds_are_converted_at_once() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = tiny("bert"), nn.MultiheadAttention(24, 4, batch_first=True)

        def forward(self, **given: Tensor) -> Tensor:
            x = self.body(**given).last_hidden_state
            mask = given["attention_mask"] == 0
            return self.head(x, x, x, key_padding_mask=mask, need_weights=False)[0]

    model, given = Both().eval(), inputs("bert")
    with torch.no_grad():
        exact = model(**given)
        report = sq.convert(model, "softmax")
        assert [row.kind for row in report.converted] == [
            *["BertSelfAttention"] * 3,
            "MultiheadAttention",
        ]
        torch.testing.assert_close(kept(given, model(**given)), kept(given, exact), **CLOSE)
        sq.convert(model, LINEAR, where=lambda name, module: name == "head")
        assert model.body.config._attn_implementation == "sdpa"
        assert not torch.equal(model(**given), exact)
        assert sq.revert(model) == 1
        assert torch.equal(model(**given), exact)


def test_a_mask_that_the_mechanism_cannot_take_is_refused_by_converted_encoders() -> None:
    model = encoder()
    odd = torch.zeros(9, 9, dtype=torch.bool)
    odd[3, 5] = True
    sq.convert(model, LINEAR)
    with pytest.raises(sq.UnsupportedError, match="this attn_mask"):
        model(X, mask=odd)


# ---- sliding windows, packed sequences, chunks -------------------------------------------


@pytest.mark.parametrize("original", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", models.WINDOWED)
def test_sliding_windows_reach_mechanisms_that_take_them(kind: str, original: str) -> None:
    model, given, left = tiny(kind, original), inputs(kind), inputs(kind, "left")
    exact, exact_left = hidden(model, **given), hidden(model, **left)
    for spec in ("softmax", "local(window=12)"):  # 13 tokens: a window over all of them
        sq.convert(model, spec)
        out, out_left = hidden(model, **given), hidden(model, **left)
        torch.testing.assert_close(kept(given, out), kept(given, exact), **CLOSE)
        torch.testing.assert_close(kept(left, out_left), kept(left, exact_left), **CLOSE)
    # A window of the mechanism that is narrower than the layer's shows that both are applied.
    sq.convert(model, "local(window=1)")
    narrow = hidden(model, **given)
    assert (kept(given, narrow) - kept(given, exact)).abs().max() > 1e-3
    sq.revert(model)
    assert torch.equal(hidden(model, **given), exact)


@pytest.mark.parametrize("kind", ["mistral_window", "qwen2_window", "gemma3"])
def test_sliding_windows_with_caches(kind: str) -> None:
    model, given = tiny(kind), inputs(kind, "left")
    model.generation_config.eos_token_id = None
    options = {**given, "max_new_tokens": 7, "do_sample": False}
    exact = model.generate(**options)
    sq.convert(model, "softmax")
    assert torch.equal(model.generate(**options), exact)
    assert torch.equal(model.generate(**options, use_cache=False), exact)
    assert torch.equal(model.generate(**options, cache_implementation="static"), exact)
    sq.convert(model, "local(window=2)")  # narrower than the layers' own
    options |= {"return_dict_in_generate": True, "output_logits": True}
    cached, whole = (model.generate(**options, use_cache=flag).logits for flag in (True, False))
    torch.testing.assert_close(torch.stack(cached), torch.stack(whole), **CLOSE)


@pytest.mark.parametrize("original", ["sdpa", "eager"])
def test_layers_without_the_window_alone_can_be_converted(original: str) -> None:
    model, given = tiny("gemma3", original), inputs("gemma3", "left")
    exact = attention_outputs(model, given)
    report = sq.convert(model, LINEAR, where=lambda name, module: "layers.2" in name)
    assert len(report.kept) == 2
    mixed = attention_outputs(model, given)
    same = [torch.equal(mixed[name], exact[name]) for name in exact]
    assert same == [True, True, False]


def test_windows_that_a_mechanism_cannot_take_are_refused_by_name() -> None:
    with pytest.raises(
        sq.UnsupportedError,
        match="the sliding window of model.layers.0.*where= or keep_exact=.*softmax.*local",
    ):
        sq.convert(tiny("gemma3"), LINEAR)
    # Where only the config knows of the window, the call says so; within the window all is well.
    model, given = tiny("mistral_window"), inputs("mistral_window")
    sq.convert(model, LINEAR)
    short = {name: value[:, :4] for name, value in given.items()}
    assert torch.isfinite(hidden(model, **short)).all()
    with pytest.raises(
        sq.UnsupportedError, match="sliding window in MistralAttention.*where= or keep_exact="
    ):
        hidden(model, **given)


PACKED = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 0, 1, 2, 3]])


@pytest.mark.parametrize("original", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "mistral_window"])
def test_packed_sequences_are_segments(kind: str, original: str) -> None:
    model, given = tiny(kind, original), inputs(kind)
    call = {"input_ids": given["input_ids"][:1], "position_ids": PACKED, "use_cache": False}
    exact = hidden(model, **call)
    for spec in ("softmax", "local(window=12)"):
        sq.convert(model, spec)
        torch.testing.assert_close(hidden(model, **call), exact, **CLOSE)
    # Each sequence alone gives the same.
    first = hidden(model, input_ids=call["input_ids"][:, :6])
    torch.testing.assert_close(exact[:, :6], first, **CLOSE)
    sq.convert(model, LINEAR)
    with pytest.raises(sq.UnsupportedError, match="(packed|sliding).*where= or keep_exact="):
        hidden(model, **call)


def test_masks_that_no_mask_object_can_say_are_refused() -> None:
    from transformers.masking_utils import create_causal_mask

    model, given = tiny("llama"), inputs("llama")
    sq.convert(model, "softmax")
    found = create_causal_mask(
        config=model.config,
        inputs_embeds=torch.zeros(2, 13, models.WIDTH),
        attention_mask=given["attention_mask"],
        past_key_values=None,
        or_mask_function=lambda b, h, q, kv: kv < 3,
    )
    with pytest.raises(sq.UnsupportedError, match="opens blocks of later keys.*keep_exact="):
        hidden(model, input_ids=given["input_ids"], attention_mask=found)


# ---- round trips, graphs -----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gptj", "falcon", "siglip_vision"])
def test_saved_models_come_back_converted(kind: str, tmp_path: Path) -> None:
    """Adapters and torch's modules too: the same bits, and the same model after reverting."""
    model, given = tiny(kind), inputs(kind)
    sq.convert(model, LINEAR)
    swapped = hidden(model, **given)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(hidden(again, **given), swapped)
    assert sq.revert(again) == sq.revert(model) > 0
    assert torch.equal(hidden(again, **given), hidden(model, **given))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gptj", "roformer", "torch"])
def test_adapted_models_compile_as_one_graph(kind: str) -> None:
    if kind == "torch":
        model: nn.Module = encoder()
        given: dict[str, Any] = {"src": X}
    else:
        model, given = tiny(kind), inputs(kind, "left")
    if kind == "gptj":
        given["use_cache"] = False
    sq.convert(model, LINEAR)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        expected, out = (call(**given) for call in (model, compiled))
    if kind != "torch":
        expected, out = expected[0], out[0]
    torch.testing.assert_close(out, expected, **CLOSE)
