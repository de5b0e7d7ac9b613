"""Converted decoders generate with states: tokens as without a cache, in constant bytes."""

from __future__ import annotations

import copy
import gc
import importlib.util
import pickle
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import subquad as sq
from subquad.convert import StateCache, cache, routing
from subquad.convert.cache import CrossStateLayer, StateLayer
from subquad.kernels.native import library
from subquad.kernels.native.step import Step

# Other folders may have a `models`, too: this one is loaded by its place.
_spec = importlib.util.spec_from_file_location(
    "convert_models", Path(__file__).with_name("models.py")
)
assert _spec is not None and _spec.loader is not None
models = importlib.util.module_from_spec(_spec)
sys.modules["convert_models"] = models
_spec.loader.exec_module(models)
tiny, inputs, hidden = models.tiny, models.inputs, models.hidden

# float32 through three layers with values of a few units: 1e-5 is some 100 roundings.
CLOSE = {"rtol": 1e-4, "atol": 2e-5}
SPECS = (
    "performer(features=32)",
    "linear",
    "local(window=4)",
    "near_far(window=4, heavy=0, sinks=2, far=performer(features=16))",
)
LINEAR, WINDOW = SPECS[0], SPECS[2]


def decoder(kind: str = "llama", spec: str = LINEAR, **options: Any) -> nn.Module:
    """A converted decoder that does not stop by itself."""
    model = tiny(kind, options.pop("implementation", "sdpa"))
    model.generation_config.eos_token_id = None
    sq.convert(model, spec, **options)
    return model


def prompt(kind: str, padding: str = "left") -> dict[str, torch.Tensor]:
    """What is given to ``generate``; two rows, the first with five padded positions."""
    given = inputs(kind, padding)
    return {name: value for name, value in given.items() if "decoder" not in name}


def ids(length: int, rows: int = 1, seed: int = 2) -> torch.Tensor:
    return torch.randint(
        5, models.VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed)
    )


def both(model: nn.Module, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens with the model's own cache, and without a cache; the same random draws."""
    found = []
    for use_cache in (True, False):
        torch.manual_seed(5)
        if not use_cache:
            options.pop("past_key_values", None)
        found.append(model.generate(**{"max_new_tokens": 9, **options, "use_cache": use_cache}))
    return found[0], found[1]


def filled(model: nn.Module, tokens: torch.Tensor, past: Any = None) -> Any:
    with torch.no_grad():
        return model(tokens, past_key_values=past, use_cache=True).past_key_values


def kinds(past: Any) -> list[str]:
    return [row.kind for row in cache.cache_rows(past)]


# ---- the same tokens as without a cache --------------------------------------------------


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_greedy_beams_and_samples_equal_uncached(kind: str, spec: str) -> None:
    """Batches with padding on the left, for mechanisms with states of every kind."""
    model, given = decoder(kind, spec), prompt(kind)
    for options in (
        {"do_sample": False},
        {"do_sample": False, "num_beams": 3},
        {"do_sample": True, "num_return_sequences": 2},
    ):
        cached, uncached = both(model, **given, **options)
        assert torch.equal(cached, uncached), options
    out = model.generate(**given, max_new_tokens=3, return_dict_in_generate=True)
    assert kinds(out.past_key_values) == ["state"] * 3


def test_the_default_conversion_generates_what_it_does_without_a_cache() -> None:
    """A context that is longer than the window, the listed keys and the first tokens together."""
    model, tokens = decoder("llama", "near_far"), ids(180, rows=2)
    mask = torch.ones_like(tokens)
    mask[0, :7] = 0
    options = {"do_sample": False, "max_new_tokens": 12}
    cached, uncached = both(model, input_ids=tokens, attention_mask=mask, **options)
    assert torch.equal(cached, uncached)
    assert kinds(filled(model, tokens)) == ["state"] * 3


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("kind", ["bart", "marian"])
def test_encoder_decoders_equal_uncached(kind: str, spec: str) -> None:
    """Cross-attention reads a state where the mechanism can, else keys and values."""
    reads = spec in ("linear", LINEAR)
    model = decoder(kind, spec, where=lambda name, m: reads or "encoder_attn" not in name)
    given = prompt(kind, "right")
    for beams in (1, 3):
        cached, uncached = both(model, **given, do_sample=False, num_beams=beams)
        assert torch.equal(cached, uncached)
    past = model.generate(**given, max_new_tokens=3, return_dict_in_generate=True).past_key_values
    assert kinds(past.self_attention_cache) == ["state"] * 2
    cross = past.cross_attention_cache
    assert kinds(cross) == ["state" if reads else "keys and values"] * 2
    assert all(isinstance(layer, CrossStateLayer) == reads for layer in cross.layers)


def test_t5_keeps_its_biased_layers_and_reads_a_state_of_the_encoder() -> None:
    model = decoder("t5", where=lambda name, module: "EncDec" in name)
    given = prompt("t5", "right")
    cached, uncached = both(model, **given, do_sample=False, num_beams=2)
    assert torch.equal(cached, uncached)
    past = model.generate(**given, max_new_tokens=3, return_dict_in_generate=True).past_key_values
    assert kinds(past.self_attention_cache) == ["keys and values"] * 2
    assert kinds(past.cross_attention_cache) == ["state"] * 2


def test_whisper_equals_uncached_and_returns_its_outputs() -> None:
    model = decoder("whisper", where=lambda name, module: "encoder.layers" not in name)
    given = prompt("whisper")
    cached, uncached = both(model, **given, do_sample=False)
    assert torch.equal(cached, uncached)
    # Its generate splits the cache's keys row by row, where a state has none.
    out = model.generate(**given, max_new_tokens=9, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(out.sequences[:, 1:], cached)  # with the start token


@pytest.mark.parametrize("spec", [LINEAR, "linear"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_left_padded_rows_equal_unpadded_ones(kind: str, spec: str) -> None:
    """Compact mechanisms skip masked tokens, wherever they are."""
    model, given = decoder(kind, spec), prompt(kind)
    batch = model.generate(**given, max_new_tokens=9, do_sample=False)
    alone = model.generate(given["input_ids"][:1, 5:], max_new_tokens=9, do_sample=False)
    assert torch.equal(batch[:1, 5:], alone)


@pytest.mark.parametrize("kept", ["first", "last"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_layers_kept_exact_keep_keys_and_values(implementation: str, kept: str) -> None:
    """The masks have the exact layers' size then, and converted ones read their end."""
    names = [f"transformer.h.{i}.attn" for i in range(3)]
    exact = names[0] if kept == "first" else names[2]
    model = decoder("gpt2", LINEAR, keep_exact=[exact], implementation=implementation)
    for options in ({}, {"num_beams": 3}):
        cached, uncached = both(model, **prompt("gpt2"), do_sample=False, **options)
        assert torch.equal(cached, uncached)
    out = model.generate(**prompt("gpt2"), max_new_tokens=3, return_dict_in_generate=True)
    expected = ["keys and values" if name == exact else "state" for name in names]
    assert kinds(out.past_key_values) == expected


def test_sliding_windows_kept_exact_keep_their_own_places() -> None:
    config = tf.Qwen2Config(
        **models._SIZES, **models._TOKENS, num_key_value_heads=2, use_sliding_window=True,
        sliding_window=4, max_window_layers=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = tf.Qwen2ForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    windowed = [n for n, m in model.named_modules() if getattr(m, "sliding_window", None)]
    assert len(windowed) == 1
    sq.convert(model, WINDOW, keep_exact=windowed)
    for tokens in ({"input_ids": ids(11)}, prompt("llama")):
        cached, uncached = both(model, **tokens, do_sample=False)
        assert torch.equal(cached, uncached)
    layers = filled(model, ids(11)).layers
    assert [type(layer).__name__ for layer in layers] == [
        "StateLayer", "StateLayer", "DynamicSlidingWindowLayer",
    ]  # fmt: skip


def test_converted_windows_keep_the_keys_in_their_window() -> None:
    config = tf.MistralConfig(
        **models._SIZES, **models._TOKENS, num_key_value_heads=2, sliding_window=4
    )
    torch.manual_seed(0)
    model = tf.MistralForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    report = sq.convert(model, "local(window=8)")
    assert {layer.cache for layer in report.converted} == {"keys and values"}
    for past in (None, tf.DynamicCache()):
        cached, uncached = both(model, input_ids=ids(9), do_sample=False, past_key_values=past)
        assert torch.equal(cached, uncached)


def test_mechanisms_may_differ_by_layer() -> None:
    names = [f"model.layers.{i}.self_attn" for i in range(3)]
    model = tiny("llama")
    report = sq.convert(model, dict(zip(names, ["softmax", "linear", WINDOW], strict=True)))
    cached, uncached = both(model, **prompt("llama"), do_sample=False)
    assert torch.equal(cached, uncached)
    assert kinds(filled(model, ids(7))) == ["keys and values", "state", "state"]
    held = [layer.cache for layer in report.converted]
    assert held == ["keys and values", "constant state", "constant state"]
    assert "generation caches keys and values in 1 converted layers: softmax" in str(report)
    assert str(report).count("caches a constant state") == 2
    assert sq.convert(tiny("bert"), "linear").converted[0].cache == ""


def test_chunked_prefill_and_a_second_turn() -> None:
    model = decoder("llama", SPECS[3])
    first = ids(14)
    whole = model.generate(first, max_new_tokens=9, do_sample=False)
    options = {"max_new_tokens": 9, "do_sample": False, "prefill_chunk_size": 5}
    assert torch.equal(model.generate(first, **options), whole)
    past = StateCache()
    turn = model.generate(first, max_new_tokens=9, do_sample=False, past_key_values=past)
    longer = torch.cat([turn, ids(6, seed=3)], 1)
    mask = torch.ones_like(longer)
    again = model.generate(
        longer, attention_mask=mask, max_new_tokens=9, do_sample=False, past_key_values=past
    )
    fresh = model.generate(longer, max_new_tokens=9, do_sample=False, use_cache=False)
    assert torch.equal(again, fresh)
    assert past.get_seq_length() == fresh.shape[1] - 1


# ---- taking tokens back ------------------------------------------------------------------


@pytest.fixture
def nearby() -> nn.Module:
    """An assistant that is right now and then: the decoder with a little noise."""
    model = decoder("llama", SPECS[3])
    generator = torch.Generator().manual_seed(4)
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.mark.parametrize("spec", [LINEAR, SPECS[3]])
def test_assisted_decoding_equals_greedy(spec: str, nearby: nn.Module) -> None:
    """Rollbacks in the model, in a converted assistant, in an exact one, and by prompt lookup."""
    model, tokens = decoder("llama", spec), ids(20)
    options = {"max_new_tokens": 16, "do_sample": False}
    expected = model.generate(tokens, **options, use_cache=False)
    exact = copy.deepcopy(nearby)
    sq.revert(exact)
    for assistant in (nearby, exact, copy.deepcopy(model)):
        found = model.generate(tokens, **options, assistant_model=assistant)
        assert torch.equal(found, expected)
    assert torch.equal(model.generate(tokens, **options, prompt_lookup_num_tokens=4), expected)
    found = exact.generate(tokens, **options, assistant_model=model)
    assert torch.equal(found, exact.generate(tokens, **options))


def test_assisted_decoding_of_an_encoder_decoder() -> None:
    model, given = decoder("bart"), {"input_ids": ids(11)}
    expected = model.generate(**given, max_new_tokens=12, do_sample=False, use_cache=False)
    found = model.generate(
        **given, max_new_tokens=12, do_sample=False, assistant_model=copy.deepcopy(model)
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("keep_exact", [(), ("model.layers.1.self_attn",)])
@pytest.mark.parametrize("rollback", [3, 256])
def test_cropping_is_never_having_read(
    rollback: int, keep_exact: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With many tokens recorded, and with so few that the snapshot moves on in between."""
    monkeypatch.setattr(cache, "ROLLBACK", rollback)
    model, tokens = decoder("llama", SPECS[3], keep_exact=keep_exact), ids(30, rows=2)
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    past = StateCache()
    past.activate_past_recording()

    def read(start: int, stop: int) -> torch.Tensor:
        given = {"attention_mask": mask[:, :stop], "past_key_values": past, "use_cache": True}
        return hidden(model, input_ids=tokens[:, start:stop], **given)

    for start, stop in ((0, 12), (12, 13), (13, 14), (14, 18), (18, 19)):
        read(start, stop)
    past.crop(-2)
    past.crop(-1)  # twice in a row
    assert past.get_seq_length() == 16
    past.crop(0)
    after = torch.cat([read(16, 17), read(17, 30)], 1)
    whole = hidden(model, input_ids=tokens, attention_mask=mask, use_cache=False)
    torch.testing.assert_close(after, whole[:, 16:], **CLOSE)
    past.crop(0)  # the snapshot is here now: nothing to go back to
    with pytest.raises(sq.UnsupportedError, match=r"crop\(-1\): 0 tokens are recorded"):
        past.crop(-1)
    with pytest.raises(ValueError, match="minus the number of tokens"):
        past.crop(1)


def test_a_record_is_bounded() -> None:
    """Snapshot, state and at most 2·ROLLBACK tokens of q, k and v, whatever was read."""
    model = decoder("gpt2")
    past = StateCache()
    past.activate_past_recording()
    state = filled(model, ids(9)).nbytes
    token = (models.HEADS + 2 * models.HEADS) * 6 * 4 * 3  # q, k, v of 3 layers, float32
    for length in (40, 8, 8, 40, 1, 1):
        positions = torch.zeros(1, length, dtype=torch.long)  # GPT-2 has 64 of them only
        with torch.no_grad():
            model(ids(length), past_key_values=past, position_ids=positions, use_cache=True)
        assert past.nbytes <= 2 * state + 2 * cache.ROLLBACK * token
    with torch.no_grad():
        positions = torch.zeros(1, 2000, dtype=torch.long)
        model(ids(2000), past_key_values=past, position_ids=positions, use_cache=True)
    assert past.nbytes == 2 * state + cache.ROLLBACK * token


def test_without_a_record_nothing_can_be_taken_back_but_copies_branch() -> None:
    model = decoder("llama", SPECS[3])
    past = filled(model, ids(9))
    assert not past.is_croppable
    with pytest.raises(sq.UnsupportedError, match="activate_past_recording.*deepcopy"):
        past.crop(-1)
    branch = copy.deepcopy(past)
    filled(model, ids(5, seed=8), past)
    given = {"input_ids": ids(4, seed=9), "use_cache": True}
    found = hidden(model, **given, past_key_values=branch)
    whole = hidden(model, input_ids=torch.cat([ids(9), ids(4, seed=9)], 1), use_cache=False)
    torch.testing.assert_close(found, whole[:, 9:], **CLOSE)
    saved = pickle.loads(pickle.dumps(past))
    assert torch.equal(
        hidden(model, **given, past_key_values=saved), hidden(model, **given, past_key_values=past)
    )


def test_rows_are_repeated_and_selected_with_their_record() -> None:
    model, tokens = decoder("llama", SPECS[3]), ids(12, rows=2)
    past = StateCache()
    past.activate_past_recording()
    filled(model, tokens[:, :8], past)
    past.batch_repeat_interleave(2)
    past.crop(-2)
    past.reorder_cache(torch.tensor([3, 0]))
    past.batch_select_indices(torch.tensor([True, False]))
    found = hidden(model, input_ids=tokens[1:, 6:], past_key_values=past, use_cache=True)
    whole = hidden(model, input_ids=tokens[1:], use_cache=False)
    torch.testing.assert_close(found, whole[:, 6:], **CLOSE)
    past.reset()
    assert past.get_seq_length() == 0
    assert past.nbytes == 0
    found = hidden(model, input_ids=tokens, past_key_values=past, use_cache=True)
    torch.testing.assert_close(found, hidden(model, input_ids=tokens, use_cache=False), **CLOSE)


# ---- bytes -------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS)
def test_bytes_do_not_grow_with_tokens(spec: str) -> None:
    model = decoder("llama", spec)
    past, sizes = StateCache(), set()
    for length in (40, 1, 1, 200, 300):
        filled(model, ids(length), past)
        sizes.add(past.nbytes)
    assert len(sizes) == 1
    assert [row.tokens for row in past.rows()] == [542] * 3
    assert past.nbytes == sum(layer.nbytes for layer in past.layers)
    assert str(past) == f"StateCache: 3 × state, {past.nbytes:,} bytes"


def test_bytes_of_a_mixed_cache_are_those_of_its_tensors() -> None:
    model = decoder("llama", "linear", keep_exact=["model.layers.2.self_attn"])
    past = filled(model, ids(10, rows=2))
    # k and v, 2 rows, 2 heads of 6, 10 tokens, float32
    assert past.rows()[2] == (2, "keys and values", 10, 2 * 2 * 2 * 6 * 10 * 4)
    assert past.nbytes == 2 * past.rows()[0].nbytes + past.rows()[2].nbytes
    assert str(StateCache()) == "StateCache: empty"


class _Largest(TorchDispatchMode):
    """The most elements that any operation has returned."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, torch.Tensor):
                self.numel = max(self.numel, value.untyped_storage().nbytes() // 4)
        return out


@pytest.mark.parametrize("spec", [LINEAR, WINDOW])
def test_prefill_builds_nothing_of_the_size_of_a_mask(spec: str) -> None:
    """At L = 1024 the largest tensors are L·H·M of features and L·vocabulary, not L·L."""
    model, length = decoder("llama", spec), 1024
    with _Largest() as largest, torch.no_grad():
        model(ids(length), attention_mask=torch.ones(1, length), use_cache=True)
    assert 0 < largest.numel <= length * models.HEADS * 64 < length * length


# ---- whose cache -------------------------------------------------------------------------


@pytest.mark.parametrize("make", [tf.DynamicCache, StateCache])
def test_an_empty_cache_of_the_user_holds_the_states(make: Any) -> None:
    model, tokens = decoder("llama", SPECS[3]), ids(20)
    expected = model.generate(tokens, max_new_tokens=9, do_sample=False, use_cache=False)
    for given in (make(), make(config=model.config)):
        options = {"max_new_tokens": 9, "do_sample": False, "past_key_values": given}
        assert torch.equal(model.generate(tokens, **options), expected)
        assert type(given) is StateCache
        assert kinds(given) == ["state"] * 3
    given = make()
    options = {"max_new_tokens": 9, "do_sample": False, "past_key_values": given}
    found = model.generate(tokens, **options, prompt_lookup_num_tokens=3)
    assert torch.equal(found, expected)


def test_other_caches_of_the_user_keep_keys_and_values() -> None:
    """A static one, one filled before the conversion, and a subclass with ways of its own."""
    model, tokens = tiny("llama"), ids(12)

    class Own(tf.DynamicCache):
        pass

    before = filled(model, tokens[:, :5])
    sq.convert(model, LINEAR)
    whole = hidden(model, input_ids=tokens, use_cache=False)
    for past in (tf.StaticCache(config=model.config, max_cache_len=20), Own()):
        filled(model, tokens[:, :5], past)
        found = hidden(model, input_ids=tokens[:, 5:], past_key_values=past)
        torch.testing.assert_close(found, whole[:, 5:], **CLOSE)
        assert not any(isinstance(layer, StateLayer) for layer in past.layers)
    assert hidden(model, input_ids=tokens[:, 5:], past_key_values=before).isfinite().all()
    assert kinds(before) == ["keys and values"] * 3
    options = {"max_new_tokens": 5, "do_sample": False}
    static = model.generate(tokens, **options, cache_implementation="static")
    assert torch.equal(static, model.generate(tokens, **options))


def test_a_cache_of_states_needs_the_layers_that_filled_it() -> None:
    model = decoder("llama")
    past = filled(model, ids(5))
    other = decoder("gpt2")
    with pytest.raises(sq.UnsupportedError, match="filled by another layer or model"):
        filled(other, ids(1), past)
    sq.revert(model)
    with pytest.raises(sq.UnsupportedError, match="holds a state of that layer.*new cache"):
        filled(model, ids(1), past)


def test_modules_that_lose_the_state_on_the_way_are_told() -> None:
    model = decoder("gpt2")
    attention = routing.mark

    def lost(tensor: torch.Tensor, place: Any) -> torch.Tensor:
        return tensor

    routing.mark = lost
    try:
        past = filled(model, ids(5))
        with pytest.raises(sq.UnsupportedError, match="changes keys and values between"):
            filled(model, ids(1), past)
    finally:
        routing.mark = attention
    layer = filled(model, ids(5)).layers[0]
    mechanism = model.transformer.h[0].attn.subquad
    q = torch.randn(1, 4, 1, 6)
    with pytest.raises(sq.UnsupportedError, match="attends twice in one call"):
        layer.attend(mechanism, q, q, q, sq.Mask(causal=True), None)


def test_modules_that_attend_twice_keep_keys_and_values() -> None:
    config = tf.DiffLlamaConfig(**models._SIZES, **models._TOKENS, num_key_value_heads=2)
    torch.manual_seed(0)
    model = tf.DiffLlamaForCausalLM(config).eval()
    report = sq.convert(model, "linear")
    assert {layer.cache for layer in report.converted} == {"keys and values"}
    cached, uncached = both(model, input_ids=ids(7), do_sample=False)
    assert torch.equal(cached, uncached)


def test_explicit_masks_keep_keys_and_values_or_are_refused() -> None:
    model, tokens = decoder("gpt2"), ids(6)
    plain = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    with torch.no_grad():
        past = model(tokens, attention_mask=plain, use_cache=True).past_key_values
    assert kinds(past) == ["keys and values"] * 3
    past = filled(model, tokens)
    with pytest.raises(sq.UnsupportedError, match=r"explicit \(B, 1, L, S\) mask over a state"):
        model(ids(1), attention_mask=torch.ones(1, 1, 1, 7).bool(), past_key_values=past)


def test_bidirectional_calls_over_a_state_are_refused() -> None:
    model = decoder("llama")
    layer = filled(model, ids(5)).layers[0]
    layer.open(layer.name)
    q, k = torch.randn(1, 4, 2, 6), torch.randn(1, 2, 2, 6)
    mechanism = model.model.layers[0].self_attn.subquad
    with pytest.raises(sq.UnsupportedError, match="bidirectional masks over the state"):
        layer.attend(mechanism, q, k, k, sq.Mask(), None)


def test_training_calls_make_no_states_and_gradients_of_states_are_the_same() -> None:
    model, tokens = decoder("llama"), ids(9)
    model.train()
    assert kinds(model(tokens, use_cache=True).past_key_values) == ["keys and values"] * 3
    assert kinds(filled(model, tokens)) == ["state"] * 3  # without gradients, as in sampling
    model.eval()
    gradients = []
    for use_cache in (True, False):
        model.zero_grad()
        model(tokens, labels=tokens, use_cache=use_cache).loss.backward()
        gradients.append(model.model.layers[0].self_attn.k_proj.weight.grad.clone())
    torch.testing.assert_close(*gradients, **CLOSE)


# ---- models ------------------------------------------------------------------------------


def test_revert_leaves_no_trace() -> None:
    model = tiny("bart")
    before = (set(vars(model)), copy.deepcopy(model.config).to_dict())
    sq.convert(model, LINEAR)
    sq.convert(model, LINEAR)  # a second time replaces the first
    layers = [m for m in model.modules() if routing.SLOT in m._modules]
    assert {len(m._forward_pre_hooks) for m in layers if m.is_decoder} == {1}
    assert sq.revert(model) == 6
    assert (set(vars(model)), model.config.to_dict()) == before
    for module in model.modules():
        assert not module._forward_pre_hooks and not module._forward_pre_hooks_with_kwargs
    assert type(filled(tiny("gpt2"), ids(3))) is tf.DynamicCache
    generated = model.generate(ids(4), max_new_tokens=3, return_dict_in_generate=True)
    assert type(generated.past_key_values.self_attention_cache) is tf.DynamicCache


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_are_their_own(how: str, tmp_path: Path) -> None:
    model, tokens = decoder("llama", SPECS[3]), ids(10)
    options = {"max_new_tokens": 9, "do_sample": False, "prompt_lookup_num_tokens": 3}
    expected = model.generate(tokens, **options)
    twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert torch.equal(twin.generate(tokens, **options), expected)
    assert sq.revert(model) == 3
    assert torch.equal(twin.generate(tokens, **options), expected)
    assert kinds(filled(twin, tokens)) == ["state"] * 3
    twin.save_pretrained(tmp_path)
    config = tf.AutoConfig.from_pretrained(tmp_path)
    assert config.architectures == ["LlamaForCausalLM"]
    sq.revert(twin)
    assert not any(m._forward_pre_hooks for m in twin.modules())


@pytest.mark.skipif(library.compiler() is None, reason="steps are prepared by the C++ backend")
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_tokens_are_written_by_prepared_steps(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, run = decoder(kind, "performer(features=16)"), Step.__call__
    ran: list[Step] = []
    monkeypatch.setattr(Step, "__call__", lambda step, *args: ran.append(step) or run(step, *args))
    tokens = ids(12, rows=2)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    found, whole = both(
        model, input_ids=tokens, attention_mask=mask, do_sample=False, min_new_tokens=9
    )
    assert torch.equal(found, whole)
    # Of 9 tokens the first is the prompt's, and the second's step prepares, in every layer.
    assert len(ran) == 7 * model.config.num_hidden_layers


def test_the_model_holds_what_prepares_its_caches_not_the_other_way_round() -> None:
    model = tiny("gpt2")
    prepare = cache.PrepareCache(model)
    del model
    gc.collect()  # the library's own circles, if any
    assert prepare.model() is None


@pytest.fixture
def started() -> Iterator[list[threading.Thread]]:
    threads: list[threading.Thread] = []
    yield threads
    for thread in threads:
        thread.join()


def test_models_and_threads_do_not_meet(started: list[threading.Thread]) -> None:
    one, two = decoder("llama", SPECS[3]), decoder("llama", WINDOW)
    jobs = [(one, ids(9)), (one, ids(17, seed=3)), (two, ids(9)), (one, ids(30, rows=2))]
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = [model.generate(tokens, **options, use_cache=False) for model, tokens in jobs]
    found: dict[int, torch.Tensor] = {}

    def work(index: int) -> None:
        model, tokens = jobs[index]
        found[index] = model.generate(tokens, **options)

    for index in range(len(jobs)):
        started.append(threading.Thread(target=work, args=(index,)))
        started[-1].start()
    for thread in started:
        thread.join()
    for index, tokens in enumerate(expected):
        assert torch.equal(found[index], tokens)


def test_a_module_around_a_model_generates_with_states() -> None:
    """convert was given the body alone: the head's generate finds the states all the same."""
    model = tiny("gpt2")
    model.generation_config.eos_token_id = None
    sq.convert(model.transformer, LINEAR)
    out = model.generate(ids(6), max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    assert kinds(out.past_key_values) == ["state"] * 3


def test_mechanisms_built_at_the_first_call_have_states_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules["subquad.convert.swap"], "head_sizes", lambda layer: None)
    model = decoder("llama", LINEAR)
    cached, uncached = both(model, **prompt("llama"), do_sample=False)
    assert torch.equal(cached, uncached)


@pytest.mark.slow
def test_states_go_through_a_compiled_forward() -> None:
    model, tokens = decoder("llama", LINEAR), ids(9)
    compiled = torch.compile(model.forward, backend="eager")
    pasts = [StateCache(), StateCache()]
    for start, stop in ((0, 7), (7, 8), (8, 9)):
        with torch.no_grad():
            a, b = (
                run(tokens[:, start:stop], past_key_values=past, use_cache=True).logits
                for run, past in zip((model, compiled), pasts, strict=True)
            )
        torch.testing.assert_close(b, a, **CLOSE)
    assert kinds(pasts[1]) == ["state"] * 3
