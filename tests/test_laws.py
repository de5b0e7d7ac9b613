"""Runs the laws over every registered mechanism × declared capability."""

import pytest
import torch

import laws
import subquad as sq
from variants import all_variants, capabilities, inputs, make, with_capability

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


@pytest.mark.parametrize("spec", with_capability("causal"))
def test_causality(spec):
    laws.causality(spec)


@pytest.mark.parametrize("spec", with_capability("state"))
def test_streaming(spec):
    laws.streaming(spec)


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
    with pytest.raises(sq.ShapeError, match="state"):
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
            assert mech(q, k, v, mask=mask).shape == (2, 6, 7, 7)
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
