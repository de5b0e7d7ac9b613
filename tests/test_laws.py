"""Runs the laws over every registered mechanism × declared capability."""

import pytest
import torch

import laws
import subquad as sq
from variants import (
    all_variants,
    answers_alone,
    capabilities,
    inputs,
    make,
    make_mixer,
    mixer_variants,
    tokens,
    with_capability,
)

PARITY = [
    (spec, kind, queries, keys)
    for spec in all_variants()
    for kind in laws.MASKS
    for queries, keys in laws.LENGTHS
    if laws.takes(spec, laws.MASKS[kind](queries, keys), queries, keys)
]
COVERING = [case for case in PARITY if case[2:] in ((71, 71), (17, 71))]


@pytest.mark.parametrize(("spec", "kind", "queries", "keys"), COVERING)
def test_parity(spec, kind, queries, keys):
    laws.parity(spec, kind, queries, keys)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "kind", "queries", "keys"), [case for case in PARITY if case not in COVERING]
)
def test_parity_other_lengths(spec, kind, queries, keys):
    laws.parity(spec, kind, queries, keys)


@pytest.mark.parametrize("spec", with_capability("exact_gradient"))
def test_gradients(spec):
    laws.gradients(spec)


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (spec, kind)
        for spec in all_variants()
        for kind in ("key", "causal+key", "prefix", "segments")
        if laws.takes(spec, laws.MASKS[kind](23, 23), 23, 23)
    ],
)
def test_derivatives(spec, kind):
    laws.derivatives(spec, kind)


@pytest.mark.parametrize(
    ("spec", "causal"),
    [
        (spec, kind == "causal+key")
        for spec in all_variants()
        for kind in ("key", "causal+key")
        if laws.takes(spec, laws.MASKS[kind](23, 23), 23, 23)
    ],
)
def test_derivatives_without_keys(spec, causal):
    laws.derivatives_without_keys(spec, causal)


@pytest.mark.parametrize("spec", all_variants())
def test_second_derivatives(spec):
    laws.second_derivatives(spec)


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (spec, kind)
        for spec in all_variants()
        for kind in ("none", "causal", "key")
        if laws.takes(spec, laws.MASKS[kind](23, 23), 23, 23)
    ],
)
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's, of its operations
@pytest.mark.filterwarnings("ignore:torch.searchsorted")
def test_vmap(spec, kind):
    if spec.split("(")[0] in ("reformer", "routing"):
        with pytest.raises(sq.UnsupportedError, match="vmap"):
            laws.vmapped(spec, kind)
    else:
        laws.vmapped(spec, kind)


@pytest.mark.parametrize("spec", with_capability("causal"))
def test_causality(spec):
    laws.causality(spec)


@pytest.mark.parametrize("spec", with_capability("state"))
def test_streaming(spec):
    laws.streaming(spec)


@pytest.mark.parametrize(
    "spec",
    [spec for spec in with_capability("state", "read", "cross") if answers_alone(spec)],
)
def test_reading(spec):
    laws.reading(spec)


@pytest.mark.parametrize("spec", with_capability("state"))
def test_state_operations(spec):
    laws.state_operations(spec)


@pytest.mark.parametrize("spec", with_capability("state"))
def test_wrong_states(spec):
    mech = make(spec)
    q, k, v = inputs(7, 7, spec=spec)
    state = mech.prefill(q, k, v)[1]
    stranger = make("softmax" if capabilities(spec).state == "constant" else "performer")
    wrong = stranger.prefill(*inputs(7, 7))[1]
    calls = [lambda: mech.step(q, k, v, wrong)]
    if capabilities(spec).read:
        calls.append(lambda: mech.step(q, None, None, wrong))
    else:
        with pytest.raises(sq.UnsupportedError, match="step without new keys"):
            mech.step(q, None, None, state)
    for call in calls:
        with pytest.raises(sq.ShapeError, match="state must be"):
            call()
    with pytest.raises(sq.ShapeError, match="holds 2 batch rows, q has 1"):
        mech.step(q[:1], k[:1], v[:1], state)
    with pytest.raises(sq.DeviceError, match="state is on meta"):
        mech.step(q, k, v, state.to("meta"))
    with pytest.raises(sq.ShapeError, match="both be given, or both be None"):
        mech.step(q, k, None, state)
    if capabilities(spec).read:
        with pytest.raises(sq.ShapeError, match="needs a state"):
            mech.step(q, None, None, None)
    with pytest.raises(sq.ShapeError, match="state" if mech.value_dim is None else "v must be"):
        mech.step(q, k, v[..., :3], state)


@pytest.mark.parametrize("spec", with_capability("key"))
def test_junk_under_the_mask(spec):
    laws.junk(spec)


@pytest.mark.parametrize("spec", with_capability("key", "pad_invariant"))
def test_right_padding(spec):
    laws.right_padding(spec)


@pytest.mark.parametrize("spec", with_capability("key", "compact"))
def test_other_padding(spec):
    laws.other_padding(spec)


@pytest.mark.parametrize("spec", with_capability("key"))
def test_no_key(spec):
    laws.no_key(spec)


@pytest.mark.parametrize("spec", with_capability("partial", "merges"))
def test_partials(spec):
    laws.partials(spec)


@pytest.mark.parametrize("spec", with_capability("weights"))
def test_weights(spec):
    laws.implied_weights(spec)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", all_variants())
def test_dtypes(spec, dtype):
    laws.dtypes(spec, dtype)


@pytest.mark.parametrize("spec", all_variants())
def test_huge_logits(spec):
    laws.huge_logits(spec)


@pytest.mark.parametrize("spec", all_variants())
def test_citizenship(spec):
    laws.citizenship(spec)


@pytest.mark.parametrize("spec", all_variants())
def test_checkpointed(spec):
    laws.checkpointed(spec)


@pytest.mark.parametrize("spec", all_variants())
def test_same_seed(spec):
    laws.same_seed(spec)


@pytest.mark.parametrize("spec", all_variants())
def test_autocast(spec):
    laws.autocast(spec)


@pytest.mark.parametrize("spec", with_capability("compile"))
def test_compiled(spec):
    laws.compiled(spec)


@pytest.mark.parametrize("spec", with_capability("compile"))
def test_exported(spec):
    laws.exported(spec)


# ---- error inputs (law 9) -----------------------------------------------------------------


@pytest.mark.parametrize("spec", all_variants())
def test_wrong_inputs(spec):
    mech = make(spec)
    q, k, v = inputs(7, 7, spec=spec)
    with pytest.raises(
        sq.ShapeError, match=r"q must be \(\.\.\., H=6, L, D=5\), given \(2, 6, 7, 3\)"
    ):
        mech(q[..., :3], k, v)
    with pytest.raises(sq.ShapeError, match=r"k must be \(2, Hkv=\d, S, D=5\), given"):
        mech(q, k[:, :1], v)
    with pytest.raises(sq.ShapeError, match="v must be"):
        mech(q, k, v[0])
    with pytest.raises(sq.ShapeError, match="one length S"):
        mech(q, k, v[:, :, :3])
    with pytest.raises(sq.DtypeError, match="q must be one of"):
        mech(q.long(), k, v)
    with pytest.raises(sq.DtypeError, match="k must have q's dtype"):
        mech(q, k.float(), v)
    with pytest.raises(sq.DeviceError, match="k is on meta, q is on cpu"):
        mech(q, k.to("meta"), v)
    with pytest.raises(sq.OptionError, match=r"mask must be a subquad\.Mask"):
        mech(q, k, v, mask=torch.ones(7, 7))
    if capabilities(spec).key:
        with pytest.raises(sq.ShapeError, match=r"key_mask must broadcast to \(2, 7\)"):
            mech(q, k, v, key_mask=torch.ones(2, 5, dtype=torch.bool))
        with pytest.raises(sq.DtypeError, match=r"key_mask must be torch\.bool"):
            mech(q, k, v, key_mask=torch.ones(2, 7))


@pytest.mark.parametrize("spec", all_variants())
def test_what_is_not_declared_is_refused_with_a_reason(spec):
    mech = make(spec)
    q, k, v = inputs(7, 7, spec=spec)
    have = capabilities(spec)
    masks = {
        "causal": sq.Mask(causal=True),
        "key": sq.Mask(key=torch.ones(2, 7, dtype=torch.bool)),
        "prefix": sq.Mask(causal=True, prefix=2),
        "segments": sq.Mask(segments=torch.zeros(2, 7, dtype=torch.long)),
        "window": sq.Mask(window=2),
        "dense": sq.Mask(dense=torch.ones(7, 7, dtype=torch.bool)),
    }
    for kind, mask in masks.items():
        support = getattr(have, kind)
        if support:
            assert mech(q, k, v, mask=mask).shape == (2, 6, 7, v.shape[-1])
            continue
        with pytest.raises(sq.UnsupportedError) as caught:
            mech(q, k, v, mask=mask)
        assert support.reason in str(caught.value) or kind == "prefix"
        assert caught.value.mechanism == mech.name
        assert caught.value.alternatives
    if not have.state:
        with pytest.raises(sq.UnsupportedError, match="prefill"):
            mech.prefill(q, k, v)


@pytest.mark.parametrize("spec", all_variants())
def test_description_is_complete(spec):
    found = sq.describe(spec)
    assert found.info.summary and found.info.formula and found.info.paper and found.info.limit
    assert set(found.info.options) == set(found.config.option_names())
    assert found.flops(2048) > found.flops(1024) > 0
    assert found.memory(1024) > 0
    assert found.name in str(found) and found.to_dict()["name"] == found.name


# ---- token mixers ---------------------------------------------------------------------------

FIRST_MIXERS = list(
    {spec.partition("(")[0]: spec for spec in mixer_variants("compile")[::-1]}.values()
)
"""One variant of each."""


@pytest.mark.parametrize("spec", mixer_variants())
def test_mixer_parity(spec):
    laws.mixer_parity(spec)


@pytest.mark.parametrize("spec", mixer_variants("exact_gradient"))
def test_mixer_gradients(spec):
    laws.mixer_gradients(spec)


@pytest.mark.parametrize("spec", mixer_variants("causal"))
def test_mixer_causality(spec):
    laws.mixer_causality(spec)


@pytest.mark.parametrize("spec", mixer_variants("state"))
def test_mixer_streaming(spec):
    laws.mixer_streaming(spec)


@pytest.mark.parametrize("spec", mixer_variants("state"))
def test_mixer_state_operations(spec):
    laws.mixer_state_operations(spec)


@pytest.mark.parametrize("spec", mixer_variants("state"))
def test_mixer_wrong_states(spec):
    mixer, x = make_mixer(spec), tokens(7)
    _, state = mixer.prefill(x)
    wrong = make("softmax").prefill(*inputs(7, 7))[1]
    with pytest.raises(sq.ShapeError, match="state must be"):
        mixer.step(x, state=wrong)
    with pytest.raises(sq.ShapeError, match="holds 2 batch rows, q has 1"):
        mixer.step(x[:1], state=state)
    with pytest.raises(sq.DeviceError, match="state is on meta"):
        mixer.step(x, state=state.to("meta"))
    _, state = mixer.prefill(tokens(80))
    with pytest.raises(sq.ShapeError, match="length L=7 after 80 in the state, longer than max"):
        mixer.step(x, state=state)


@pytest.mark.parametrize("spec", mixer_variants("key"))
def test_mixer_junk_under_the_mask(spec):
    laws.mixer_junk(spec)


@pytest.mark.parametrize("spec", mixer_variants("key", "pad_invariant"))
def test_mixer_right_padding(spec):
    laws.mixer_right_padding(spec)


@pytest.mark.parametrize("spec", mixer_variants("key", "compact"))
def test_mixer_other_padding(spec):
    laws.mixer_other_padding(spec)


@pytest.mark.parametrize("spec", mixer_variants("key"))
def test_mixer_no_token(spec):
    laws.mixer_no_token(spec)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", mixer_variants())
def test_mixer_dtypes(spec, dtype):
    laws.mixer_dtypes(spec, dtype)


@pytest.mark.parametrize("spec", mixer_variants())
def test_mixer_huge(spec):
    laws.mixer_huge(spec)


@pytest.mark.parametrize("spec", mixer_variants())
def test_mixer_citizenship(spec):
    laws.mixer_citizenship(spec)


@pytest.mark.parametrize("spec", mixer_variants())
def test_mixer_checkpointed(spec):
    laws.mixer_checkpointed(spec)


@pytest.mark.parametrize("spec", mixer_variants())
def test_mixer_autocast(spec):
    laws.mixer_autocast(spec)


@pytest.mark.parametrize("spec", FIRST_MIXERS)
def test_mixer_compiled(spec):
    laws.mixer_compiled(spec)


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", [spec for spec in mixer_variants("compile") if spec not in FIRST_MIXERS]
)
def test_other_mixers_compiled(spec):
    laws.mixer_compiled(spec)


@pytest.mark.parametrize("spec", mixer_variants("compile"))
def test_mixer_exported(spec):
    laws.mixer_exported(spec)


@pytest.mark.parametrize("spec", mixer_variants())
def test_mixer_wrong_inputs(spec):
    mixer, x = make_mixer(spec), tokens(7)
    q, k, v = inputs(7, 7)
    with pytest.raises(sq.ShapeError, match=r"x must be \(\.\.\., L, C=11\), given \(2, 7, 3\)"):
        mixer(x[..., :3])
    with pytest.raises(sq.ShapeError, match="at least one token"):
        mixer(x[:, :0])
    with pytest.raises(sq.DtypeError, match="x must be one of"):
        mixer(x.long())
    if capabilities(spec).max_length:
        with pytest.raises(sq.ShapeError, match="L=84, longer than max_length=83"):
            mixer(tokens(84))
        with pytest.raises(sq.OptionError, match="max_length is needed"):
            sq.build(spec, embed_dim=11)
        with pytest.raises(sq.DeviceError, match="x is on meta"):
            mixer(x.to("meta"))
    with pytest.raises(sq.OptionError, match=r"mask must be a subquad\.Mask"):
        mixer(x, mask=torch.ones(7, 7))
    with pytest.raises(sq.ShapeError, match=r"key_mask must broadcast to \(2, 7\)"):
        mixer(x, key_mask=torch.ones(2, 5, dtype=torch.bool))
    with pytest.raises(sq.DtypeError, match=r"key_mask must be torch\.bool"):
        mixer(x, key_mask=torch.ones(2, 7))
    with pytest.raises(sq.OptionError, match="embed_dim is needed"):
        sq.build(spec, num_heads=3, max_length=83)
    with pytest.raises(sq.OptionError, match=r"embed_dim=11 must be head_dim·num_heads = 15"):
        sq.build(spec, embed_dim=11, head_dim=5, num_heads=3, max_length=83)
    with pytest.raises(sq.OptionError, match="embed_dim=0 must be an integer ≥ 1"):
        sq.build(spec, embed_dim=0, max_length=83)
    with pytest.raises(sq.OptionError, match="num_kv_heads must equal num_heads: it has no"):
        sq.build(spec, embed_dim=12, num_heads=4, num_kv_heads=2, max_length=83)
    calls = [
        lambda: mixer(q, k, v),
        lambda: mixer(x, scale=1.0),
        lambda: mixer.partials(q, k, v),
        lambda: mixer.prefill(q, k, v),
        lambda: mixer.step(q, k, v, None),
    ]
    for call in calls:
        with pytest.raises(sq.UnsupportedError, match=r"call mixer\(x\)") as caught:
            call()
        assert "softmax" in caught.value.alternatives
        assert mixer.name not in caught.value.alternatives


@pytest.mark.parametrize("spec", mixer_variants())
def test_mixer_refuses_with_a_reason_what_it_does_not_declare(spec):
    mixer, x, have = make_mixer(spec), tokens(7), capabilities(spec)
    masks = {
        "causal": sq.Mask(causal=True),
        "prefix": sq.Mask(causal=True, prefix=2),
        "segments": sq.Mask(segments=torch.zeros(2, 7, dtype=torch.long)),
        "window": sq.Mask(window=2),
        "dense": sq.Mask(dense=torch.ones(7, 7, dtype=torch.bool)),
    }
    for kind, mask in masks.items():
        support = getattr(have, kind)
        if support:
            assert mixer(x, mask=mask).shape == x.shape
            continue
        with pytest.raises(sq.UnsupportedError) as caught:
            mixer(x, mask=mask)
        assert support.reason in str(caught.value) or kind == "prefix"
        assert caught.value.alternatives
    if not have.state:
        with pytest.raises(sq.UnsupportedError, match="prefill"):
            mixer.prefill(x)
    q, k, v = inputs(7, 7)
    for call in (lambda: mixer.weights(q, k), lambda: mixer.partial(q, k, v)):
        with pytest.raises(sq.UnsupportedError, match="it has no"):
            call()
    with pytest.raises(sq.UnsupportedError, match=r"reads no q, k, v: build it") as caught:
        sq.attention(q, k, v, spec)
    assert "performer" in caught.value.alternatives


@pytest.mark.parametrize("spec", mixer_variants())
def test_mixer_description_is_complete(spec):
    test_description_is_complete(spec)
