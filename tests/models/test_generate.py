"""Decoding from a state gives the tokens of decoding without one, whatever the method.

In float64: what rounding could flip in float32 is no tie here. Weights are drawn large, so that
outputs are neither constant nor a flat distribution.
"""

import pytest
import torch

import subquad as sq
from subquad import registry
from subquad.attention.kernel.engine import LinearState
from subquad.attention.stack import SharedMemory
from subquad.errors import UnsupportedError
from subquad.kernels.native import library
from variants import VARIANTS

pytest.importorskip("transformers")

from subquad.models.seq2seq import EncoderOutput  # needs transformers

VOCABULARY, SOURCE, STEPS = 23, 11, 9

METHODS = {
    "greedy": {},
    "beam": {"num_beams": 3},
    "n-best": {"num_beams": 4, "length_penalty": 0.6, "num_return_sequences": 3},
    "short": {"num_beams": 3, "length_penalty": -1.0, "early_stopping": True},
    "sampling": {"do_sample": True, "temperature": 1.3, "top_k": 0},
    "top-k": {"do_sample": True, "top_k": 7, "num_return_sequences": 2},
    "top-p": {"do_sample": True, "top_p": 0.8, "top_k": 0},
    "beam sampling": {"do_sample": True, "num_beams": 3, "top_k": 0},
    "processors": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
}


def streaming():
    """Mechanisms whose decoder generates from a state."""
    return sorted(sq.mechanisms(state=True, causal=True))


def stateless():
    """Options with which a mechanism is causal and has no state."""
    return [
        variant
        for variants in VARIANTS.values()
        for variant in variants
        if (have := sq.describe(variant).capabilities).causal and not have.state
    ]


def crosses(name):
    """Whether it can be a causal decoder's cross-attention."""
    found, config = registry.resolve(name)
    config = config.for_use("cross")
    have = found.capabilities_for(config)
    return have.qkv and bool(have.cross) and bool(found.answers_alone_for(config))


def seq2seq(mechanism, cross="softmax", **options):
    config = sq.models.Seq2SeqTransformerConfig(
        vocab_size=VOCABULARY, d_model=24, num_heads=2, dim_feedforward=32, encoder_layers=1,
        decoder_layers=2, mechanism="softmax", decoder_mechanism=mechanism, cross_mechanism=cross,
        max_position_embeddings=64, **options,
    )  # fmt: skip
    return loud(sq.models.Seq2SeqTransformer(config))


def causal(mechanism, **options):
    config = sq.models.CausalTransformerConfig(
        vocab_size=VOCABULARY, d_model=24, num_heads=2, dim_feedforward=32, num_layers=2,
        mechanism=mechanism, max_position_embeddings=64, **options,
    )  # fmt: skip
    return loud(sq.models.CausalTransformer(config))


def loud(model):
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.double().eval()


def batch(left):
    """Three rows of different lengths, padded on the left or on the right."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(5, VOCABULARY, (3, SOURCE), generator=generator)
    mask = torch.ones_like(ids)
    for row, pads in enumerate((0, 3, 6)):
        where = slice(0, pads) if left else slice(SOURCE - pads, SOURCE)
        mask[row, where] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def written(model, inputs, options, use_cache):
    torch.manual_seed(11)
    with torch.no_grad():
        out = model.generate(
            **inputs, max_new_tokens=STEPS, min_new_tokens=3, use_cache=use_cache,
            return_dict_in_generate=True,
            **options,
        )  # fmt: skip
    return out


def same_tokens(model, inputs, options):
    cached = written(model, inputs, options, True)
    again = written(model, inputs, options, False)
    assert again.past_key_values is None
    assert isinstance(cached.past_key_values, sq.models.StackCache)
    assert cached.past_key_values.get_seq_length() >= 2, "it went on from a state"
    torch.testing.assert_close(cached.sequences, again.sequences, rtol=0, atol=0)
    return cached.sequences


# ---- a covering selection: each mechanism with one method, each method with several -----------


def covering(names, shift):
    methods = list(METHODS)
    return [(name, methods[(at + shift) % len(methods)]) for at, name in enumerate(names)]


@pytest.mark.parametrize(("mechanism", "method"), covering(streaming(), 0))
def test_a_state_changes_no_token(mechanism, method):
    cross = mechanism if crosses(mechanism) else "softmax"
    same_tokens(seq2seq(mechanism, cross), batch(left=False), METHODS[method])


@pytest.mark.parametrize(("mechanism", "method"), covering(streaming(), 4))
def test_a_state_changes_no_token_of_a_language_model(mechanism, method):
    same_tokens(causal(mechanism), batch(left=True), METHODS[method])


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mechanism", streaming())
@pytest.mark.parametrize("positions", ["sinusoidal", "rotary", "learned"])
def test_every_mechanism_with_every_method(mechanism, method, positions):
    cross = mechanism if crosses(mechanism) else "softmax"
    options = {"positions": positions, "final_norm": True, "norm_first": True}
    for left in (False, True):
        same_tokens(seq2seq(mechanism, cross, **options), batch(left), METHODS[method])
    same_tokens(causal(mechanism, **options), batch(left=True), METHODS[method])


# ---- what has no state -------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", stateless())
def test_without_a_state_the_prefix_is_computed_anew(mechanism):
    """The tokens are those of calls on the whole prefix."""
    model, inputs = causal(mechanism), batch(left=False)
    assert sq.describe(mechanism).capabilities.state.reason, "it says why"
    ids = inputs["input_ids"][:1]
    out = written(model, {"input_ids": ids}, {}, True)
    assert out.past_key_values is None
    wanted = ids
    with torch.no_grad():
        for _ in range(STEPS):
            token = model(wanted).logits[:, -1].argmax(-1, keepdim=True)
            wanted = torch.cat([wanted, token], 1)
            if token.item() == 2:
                break
    torch.testing.assert_close(out.sequences, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("mechanism", sq.mechanisms(qkv=True, cross=True))
def test_a_cross_attention_is_causal_or_refused(mechanism):
    model, inputs = seq2seq("softmax", mechanism), batch(left=False)
    if crosses(mechanism):
        assert written(model, inputs, {}, True).sequences.shape[0] == 3
    else:
        with pytest.raises(UnsupportedError, match="cross-attention of a causal decoder"):
            written(model, inputs, {}, True)


# ---- the cache itself --------------------------------------------------------------------------


ROUNDED = {"rtol": 1e-9, "atol": 1e-9}
"""The laws' EXACT for one attention in float64 (1e-10, derived there), through the six blocks of
two layers: rows in another place, and the memory of one row for all of its source, may round
otherwise in each."""


def times(n, encoded):
    """What was read of each source n times, as `generate` gives it to beams.

    Reading it n times would not do: a matrix product may round the same row in two ways.
    """
    return type(encoded)(**{name: one.repeat_interleave(n, 0) for name, one in encoded.items()})


@pytest.mark.parametrize("mechanism", ["performer", "softmax", "local", "location"])
def test_beams_of_one_source_share_its_memory(mechanism):
    cross = "softmax" if mechanism == "local" else mechanism
    model, cache = seq2seq(mechanism, cross), sq.models.StackCache()
    encoded = times(2, model.encode(**batch(left=False)))
    for tokens in (torch.ones(6, 1, dtype=torch.long), torch.arange(6, 12)[:, None]):
        with torch.no_grad():  # the second time each beam says something else
            model(encoder_outputs=encoded, decoder_input_ids=tokens, past_key_values=cache)
    before = cache.state
    within, across = torch.tensor([1, 0, 2, 2, 5, 4]), torch.tensor([2, 0, 2, 1, 5, 4])
    for rows in (within, across):
        cache.state = before
        expected = before.select(rows).tensors()
        cache.reorder_cache(rows)
        for name, tensor in cache.state.tensors().items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)
        same = [a is b for a, b in zip(cache.state.attentions, before.attentions, strict=True)]
        # The pattern is acf acf. A location-aware one notes where each beam has looked.
        shared = rows is within and mechanism != "location"
        assert same == [False, shared, False, shared]


def beams_of(mechanism, cross, sources, beams):
    """A model, and what it reads of each source for that many beams."""
    model = seq2seq(mechanism, cross)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, VOCABULARY, (sources, SOURCE), generator=generator)
    return model, times(beams, model.encode(input_ids=ids))


def within_groups(generator, sources, beams):
    """Beams that go on, each of its own source's; some twice or more, some not at all."""
    picked = torch.randint(0, beams, (sources, beams), generator=generator)
    return (picked + torch.arange(sources)[:, None] * beams).flatten()


@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("mechanism", streaming())
@torch.no_grad()
def test_rows_that_stand_elsewhere_are_read_and_written_as_if_in_order(mechanism, record):
    cross = mechanism if crosses(mechanism) else "softmax"
    if record and not sq.describe(cross).capabilities.weights:
        pytest.skip(f"{cross} has no weights")
    sources, beams = 3, 4
    model, encoded = beams_of(mechanism, cross, sources, beams)
    generator = torch.Generator().manual_seed(1)
    cache, plain = sq.models.StackCache(), sq.models.StackCache()
    for step in range(8):
        tokens = torch.randint(5, VOCABULARY, (sources * beams, 1), generator=generator)
        found, wanted = [], []
        out = model.hidden(encoded, tokens, past_key_values=cache, record=found if record else None)
        truth = model.hidden(
            encoded, tokens, past_key_values=plain, record=wanted if record else None
        )
        torch.testing.assert_close(out, truth, **ROUNDED)
        assert len(found) == len(wanted) == 2 * record
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, **ROUNDED)
        rows = within_groups(generator, sources, beams)
        cache.reorder_cache(rows)
        plain.state = plain.state.select(rows)  # taken out and put in: nothing is known of it
        if step == 5:  # taken out, it is in order, and the cache goes on
            kept = cache.state
            for name, tensor in plain.state.tensors().items():
                torch.testing.assert_close(kept.tensors()[name], tensor, **ROUNDED)
            before = {name: tensor.clone() for name, tensor in kept.tensors().items()}
    for name, tensor in kept.tensors().items():
        assert torch.equal(tensor, before[name]), "what was taken out is not written over"


@torch.no_grad()
def test_beams_of_a_source_read_one_memory_and_copy_only_what_is_wanted_twice(monkeypatch):
    sources, beams = 3, 4
    model, encoded = beams_of("performer", "performer", sources, beams)
    cache = sq.models.StackCache()
    tokens = torch.full((sources * beams, 1), 7)
    model.hidden(encoded, tokens, past_key_values=cache)
    held = [one for one in cache.place.state.attentions if isinstance(one, SharedMemory)]
    assert [(one.times, len(one.state.s)) for one in held] == [(beams, sources)] * 2
    copied = []
    real = LinearState.overwritten

    def counted(self, rows, by):
        copied.append((rows.tolist(), by.tolist()))
        return real(self, rows, by)

    monkeypatch.setattr(LinearState, "overwritten", counted)
    places = [one.s.data_ptr() for one in cache.place.state.attentions[::2]]
    cache.reorder_cache(torch.tensor([1, 0, 2, 3, 7, 6, 5, 4, 8, 9, 10, 11]))
    assert copied == []  # they only change places
    cache.reorder_cache(torch.tensor([0, 0, 2, 3, 4, 5, 6, 7, 11, 11, 11, 8]))
    # The second reads 1; of the last four, 9 and 10 have to become 11.
    assert copied == [([0, 10, 9], [1, 11, 11])] * 2
    assert places == [one.s.data_ptr() for one in cache.place.state.attentions[::2]]


@torch.no_grad()
def test_rows_that_leave_their_source_or_their_number_take_the_plain_way():
    sources, beams = 2, 3
    model, encoded = beams_of("performer", "softmax", sources, beams)
    tokens = torch.arange(5, 11)[:, None]
    for rows in ([3, 0, 1, 4, 5, 2], [0, 1, 4], [0, 0, 1, 1, 2, 2, 3, 3]):
        cache, plain = sq.models.StackCache(), sq.models.StackCache()
        for one in (cache, plain):
            model.hidden(encoded, tokens, past_key_values=one)
        cache.reorder_cache(torch.tensor([1, 2, 1, 3, 5, 5]))
        cache.reorder_cache(torch.tensor(rows))
        wanted = plain.state.select([1, 2, 1, 3, 5, 5]).select(rows).tensors()
        for name, tensor in cache.state.tensors().items():
            torch.testing.assert_close(tensor, wanted[name], **ROUNDED)
    chosen = torch.tensor([True, False, True, True, False, True])
    cache = sq.models.StackCache()
    model.hidden(encoded, tokens, past_key_values=cache)
    cache.batch_select_indices(chosen)
    expected = plain.state.select([0, 2, 3, 5]).tensors()
    for name, tensor in cache.state.tensors().items():
        torch.testing.assert_close(tensor, expected[name], **ROUNDED)
    cache = sq.models.StackCache()
    model.hidden(encoded, tokens, past_key_values=cache)
    wanted = sq.models.StackCache()
    model.hidden(encoded, tokens, past_key_values=wanted)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.arange(6))  # as many as there were rows before
    expected = wanted.state.repeat(2).select(range(6)).tensors()
    for name, tensor in cache.state.tensors().items():
        torch.testing.assert_close(tensor, expected[name], **ROUNDED)


def test_gradients_of_equal_sources_stay_their_own():
    model = seq2seq("performer", "softmax")
    one = torch.randn(1, SOURCE, 24, dtype=torch.float64)
    vectors = one.expand(2, -1, -1).clone().requires_grad_()
    cache = sq.models.StackCache()
    encoded = EncoderOutput(last_hidden_state=vectors)
    for token in (5, 6):
        out = model.hidden(encoded, torch.tensor([[token], [token]]), past_key_values=cache)
    (found,) = torch.autograd.grad(out[0, 0, 0], vectors)
    assert found[0].any() and not found[1].any()


@pytest.mark.skipif(library.compiler() is None, reason="only its steps write states over")
@pytest.mark.parametrize("kept", ["state", "copy"])
def test_a_state_that_was_taken_out_of_a_cache_stays_as_it_is(kept):
    config = sq.models.CausalTransformerConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        num_heads=2,
        num_layers=2,
        mechanism="performer(features=16)",
    )
    model, cache = sq.models.CausalTransformer(config).eval(), sq.models.StackCache()

    def read(*tokens):
        with torch.no_grad():
            model(torch.tensor([tokens]), past_key_values=cache)

    def address():
        return cache.place.state.attentions[0].s.data_ptr()

    read(5, 6, 7)
    read(8)
    first = address()
    read(9)
    assert address() == first, "a state that only the cache has is written over"
    taken = cache.state if kept == "state" else cache.to("cpu").state
    before = {name: tensor.clone() for name, tensor in taken.tensors().items()}
    for token in (5, 6):
        read(token)
    for name, tensor in taken.tensors().items():
        assert torch.equal(tensor, before[name]), name
    assert not torch.equal(cache.state.attentions[0].s, taken.attentions[0].s)


def test_tokens_cannot_be_taken_back():
    with pytest.raises(UnsupportedError, match="taking tokens back"):
        sq.models.StackCache().crop(1)
