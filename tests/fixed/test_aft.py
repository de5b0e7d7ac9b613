"""`aft`: exact limits, stability, states, parameters, errors."""

import pytest
import torch

import subquad as sq
from laws import reference
from references import aft_bias
from variants import inputs

B, H, HKV, D, N = 2, 6, 3, 5, 71
KINDS = [
    "aft",
    "aft(kind=conv, window=[7, 2], normalise=false)",
    "aft(kind=conv, window=3)",
    "aft(kind=local, window=5)",
    "aft(kind=local, window=[3, 1], rank=3)",
    "aft(kind=full)",
    "aft(kind=full, rank=2)",
]
# Sums of 71 positive terms, exponents of size ≤ 10: 1.1e-16 × 71 × 10 ≈ 1e-13, twice for a ratio,
# with a margin of five.
BOUND = 1e-12


def build(spec="aft", dtype=torch.float64, length=N, perturbed=True, **options):
    """With parameters of size one: at their start biases hardly matter."""
    mech = sq.build(
        spec, head_dim=D, num_heads=H, num_kv_heads=HKV, max_length=length, dtype=dtype, **options
    )
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in mech.parameters() if perturbed else ():
            parameter += torch.randn(parameter.shape, generator=generator, dtype=dtype)
    return mech.eval()


def tensors(queries=N, keys=N, **options):
    return inputs(queries, keys, value=D, **options)


def close(found, wanted, bound=BOUND):
    assert found.shape == wanted.shape
    error = (found - wanted).abs().max().item()
    assert error <= bound * max(1.0, wanted.abs().max().item()), f"{error:.2e}"


# ---- parameters and exact limits ---------------------------------------------------------


@pytest.mark.parametrize("spec", KINDS)
@pytest.mark.parametrize(("queries", "keys"), [(N, N), (13, N), (N, 13)])
@pytest.mark.parametrize("causal", [False, True])
def test_all_kinds_with_biases_that_matter(spec, queries, keys, causal):
    """The laws run at the start of training, where w is small, and zero for a normalised filter."""
    mech = build(spec)
    leaves = [*tensors(queries, keys, grad=True), *mech.parameters()]
    out = mech(*leaves[:3], causal=causal)
    wanted = reference(mech, *leaves[:3], sq.Mask(causal=causal))
    close(out, wanted)
    for a, b in zip(
        torch.autograd.grad(out.square().sum(), leaves, allow_unused=True),
        torch.autograd.grad(wanted.square().sum(), leaves, allow_unused=True),
        strict=True,
    ):
        assert (a is None) == (b is None)
        if a is not None:  # sums over 2·6·71 rows of terms of size ≤ 10
            close(a, b, 1e-10)


@pytest.mark.parametrize("causal", [False, True])
def test_zero_biases_are_simple(causal):
    q, k, v = tensors()
    wanted = build()(q, k, v, causal=causal)
    for spec in KINDS[1:]:
        mech = build(spec)
        filter_ = mech.weight if mech.config.kind == "conv" and mech.config.normalise else None
        with torch.no_grad():
            for parameter in mech.parameters():
                if parameter is not filter_:  # γ and β of a normalised filter are zero instead
                    parameter.zero_()
        close(mech(q, k, v, causal=causal), wanted)


def test_simple_averages_each_channel_for_itself():
    """One softmax over keys a channel, the same for all queries, behind the gate."""
    q, k, v = tensors()
    average = (torch.softmax(k, 2) * v).sum(2, keepdim=True).repeat_interleave(H // HKV, 1)
    close(build()(q, k, v), torch.sigmoid(q) * average)


@pytest.mark.parametrize("causal", [False, True])
def test_local_and_conv_with_a_wide_window_are_full(causal):
    """Windows of n − 1 keys hold every key: w of full is spread from their parameters."""
    q, k, v = tensors()
    full = build("aft(kind=full)")
    for spec in ("aft(kind=local, window=70)", "aft(kind=conv, window=70, normalise=false)"):
        mech = build(spec)
        with torch.no_grad():
            full.weight.copy_(aft_bias(mech, N))
        close(mech(q, k, v, causal=causal), full(q, k, v, causal=causal))


def test_factorised_biases_are_products():
    factors, full = build("aft(kind=full, rank=2)"), build("aft(kind=full)")
    with torch.no_grad():
        full.weight.copy_(factors.rows @ factors.columns.mT)
    q, k, v = tensors()
    close(factors(q, k, v, causal=True), full(q, k, v, causal=True))


def test_equal_keys_leave_a_random_synthesizer():
    """With k = 0 all channels share softmax(w), what a random synthesizer has, behind the gate."""
    q, k, v = tensors()
    mech = build("aft(kind=full)")
    other = sq.build(
        "synthesizer(kinds=random)", head_dim=D, num_heads=H, num_kv_heads=HKV, max_length=N,
        dtype=torch.float64,
    )  # fmt: skip
    other.load_state_dict({"random_logits": mech.weight})
    found = mech(q, torch.zeros_like(k), v, causal=True)
    close(found, torch.sigmoid(q) * other(q, k, v, causal=True))


def test_a_normalised_filter_has_mean_and_size_of_its_own():
    """w = γ·(w − mean)/std + β; at the start γ = β = 0."""
    mech = build("aft(kind=conv, window=3)", perturbed=False)
    assert not mech.gain.any() and not mech.shift.any() and not mech.biases(1, 1).any()
    with torch.no_grad():
        mech.gain.fill_(2.0)
        mech.shift.fill_(0.5)
    w = mech.biases(1, 1)
    close(w.mean(-1), torch.full((HKV, 1), 0.5, dtype=torch.float64))
    close(w.std(-1, correction=0), torch.full((HKV, 1), 2.0, dtype=torch.float64))


@pytest.mark.parametrize("spec", KINDS)
@pytest.mark.parametrize(("queries", "keys"), [(23, 23), (5, 23), (23, 5)])
def test_channel_weights_give_the_output(spec, queries, keys):
    """What stands in for an attention matrix: one matrix for each channel, behind the gate."""
    mech, (q, k, v) = build(spec), tensors(queries, keys)
    open_ = torch.rand(B, keys, generator=torch.Generator().manual_seed(3)) > 0.3
    mask = sq.Mask(causal=True, key=open_)
    weights = mech.channel_weights(q, k, mask=mask)
    read = mask.to_dense(queries, keys)[:, None, :, :, None]
    assert not weights.masked_select(~read).any()
    close(weights.sum(3), read.any(3).double().expand(-1, HKV, -1, D))
    average = torch.einsum("bhijc,bhjc->bhic", weights, v).repeat_interleave(2, 1)
    close(torch.sigmoid(q) * average, mech(q, k, v, mask=mask))


def test_scale_multiplies_keys():
    q, k, v = tensors()
    mech = build("aft(kind=local, window=5)")
    close(mech(q, k, v, scale=0.3), mech(q, 0.3 * k, v))
    close(mech(q, k, v, scale=1.0), mech(q, k, v))


# ---- stability ---------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", KINDS)
def test_keys_of_ten_thousand(spec, causal):
    """float32 beside float64 on the same numbers. k + w of size 3e4 is rounded to 1e-3 (half an
    ulp), a relative 1e-3 of a weight; where no two keys tie within 10 the output is that of one.
    """
    mech, exact = build(spec, torch.float32, 300), build(spec, length=300)
    exact.load_state_dict(mech.state_dict())
    q, k, v = tensors(300, 300, dtype=torch.float32)
    leaves = [t.requires_grad_() for t in (q, k * 1e4, v)]
    out = mech(*leaves, causal=causal)
    wanted = exact(*(t.double() for t in leaves), causal=causal)
    close(out.double(), wanted, 2e-3)
    for grad in torch.autograd.grad(out.sum(), leaves):
        assert torch.isfinite(grad).all()


def test_a_later_key_moves_no_earlier_row():
    """A key of 1e4 enters at 150: rows before keep their digits, in whole chunks and in part.

    float32: sums of ≤ 150 terms beside themselves in another order, 150 · 6e-8 ≈ 1e-5.
    """
    for spec in KINDS:
        mech = build(spec, torch.float32, 300)
        q, k, v = tensors(300, 300, dtype=torch.float32)
        base = mech(q, k, v, causal=True)
        k[:, :, 150] = 1e4
        found = mech(q, k, v, causal=True)
        close(found[:, :, :150], base[:, :, :150], 1e-5)
        assert (found[:, :, 150:] - base[:, :, 150:]).abs().amax() > 0.1


# ---- states ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "window"),
    [("aft", 0), ("aft(kind=conv, window=[7, 2])", 7), ("aft(kind=local, window=5)", 5)],
)
def test_state_size(spec, window):
    """Three sums and 2·window numbers for each channel, whatever has been read, in float32."""
    mech = build(spec, torch.float32, 4096)
    q, k, v = tensors(300, 300, dtype=torch.float32)
    sizes = {mech.prefill(q[:, :, :n], k[:, :, :n], v[:, :, :n])[1].nbytes for n in (1, 3, 300)}
    assert sizes == {B * HKV * D * (3 + 2 * window) * 4}


@pytest.mark.parametrize("spec", KINDS)
def test_gradients_flow_through_a_state(spec):
    """Those of prefill and steps are those of one causal call."""
    mech, leaves = build(spec), tensors(grad=True)
    wanted = mech(*leaves, causal=True)
    first, state = mech.prefill(*(t[:, :, :40] for t in leaves))
    second, state = mech.step(*(t[:, :, 40:43] for t in leaves), state)
    third, _ = mech.step(*(t[:, :, 43:] for t in leaves), state)
    found = torch.cat([first, second, third], 2)
    every = [*leaves, *mech.parameters()]
    for a, b in zip(
        torch.autograd.grad(found.square().sum(), every, allow_unused=True),
        torch.autograd.grad(wanted.square().sum(), every, allow_unused=True),
        strict=True,
    ):
        if b is not None:
            close(a, b, 1e-10)


def test_long_decoding_forgets_nothing():
    """1,000 steps in float32 beside one mean in float64: mass and mean are each rounded once a
    step, independently: √1000 · 6e-8 = 2e-6 relative, with a margin of five.
    """
    mech = sq.build("aft", head_dim=2, num_heads=1)
    k, v = tensors(1000, 1000, dtype=torch.float32, batch=1, heads=1, kv=1, dim=2)[1:]
    v = v[..., :2]
    k, q, state = k + 50.0, torch.full_like(k, 1e9), None  # an offset in all keys cancels
    for t in range(1000):
        out, state = mech.step(*(x[:, :, t : t + 1] for x in (q, k, v)), state)
    wanted = (torch.softmax(k.double(), 2) * v.double()).sum(2, keepdim=True)
    assert (out - wanted).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("spec", "other", "message"),
    [
        ("aft(kind=full)", "aft", "the last 20 of 20 keys for kind=full, given 0"),
        ("aft", "aft(kind=full)", "the last 0 of 20 keys for kind=simple, given 20"),
        ("aft(kind=conv, window=5)", "aft(kind=conv, window=3)", "the last 5 of 20 .* given 3"),
    ],
)
def test_states_of_other_windows_are_refused(spec, other, message):
    """Keys that a bias is due to are summed in them already, or would be counted twice."""
    mech, (q, k, v) = build(spec), tensors(20, 20)
    _, state = build(other).prefill(q, k, v)
    with pytest.raises(sq.ShapeError, match=message):
        mech.step(q[:, :, :1], k[:, :, :1], v[:, :, :1], state)


# ---- errors ------------------------------------------------------------------------------


def test_values_have_the_width_of_queries():
    with pytest.raises(sq.OptionError, match="value_dim=7 must be head_dim=5"):
        sq.build("aft", head_dim=5, num_heads=2, value_dim=7)
    mech = sq.build("aft", head_dim=5, num_heads=6, num_kv_heads=3)
    with pytest.raises(
        sq.ShapeError, match=r"v must be \(2, Hkv=3, S, V=5\), given \(2, 3, 9, 7\)"
    ):
        mech(*inputs(9, 9))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "fool"}, "kind='fool'"),
        ({"kind": "local", "window": -1}, "window=-1 must be an integer ≥ 0"),
        ({"window": [1, 2, 3]}, "window=.*must be an integer ≥ 0, or"),
        ({"kind": "conv", "window": 0}, "leaves nothing to normalise"),
        ({"kind": "conv", "rank": 3}, "rank=3 needs kind=local or full, given conv"),
        ({"window": 5}, "window=5 needs kind=conv or local, given simple"),
        ({"kind": "local", "normalise": False}, "normalise=false needs kind=conv, given local"),
        ({"kind": "full", "rank": 0}, "rank"),
        ({"normalise": 2}, "normalise"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(sq.OptionError, match=message):
        sq.build("aft", head_dim=5, num_heads=2, max_length=9, **options)


@pytest.mark.parametrize("kind", ["local", "full"])
def test_more_tokens_than_biases(kind):
    with pytest.raises(sq.OptionError, match="max_length is needed"):
        sq.build("aft", head_dim=5, num_heads=2, kind=kind)
    mech = build(f"aft(kind={kind})")
    with pytest.raises(sq.ShapeError, match="72 tokens are more than max_length=71"):
        mech(*tensors(72, 72))
    with pytest.raises(sq.ShapeError, match="72 tokens are more than max_length=71"):
        mech(*tensors(72, 5))
    _, state = mech.prefill(*tensors(70, 70))
    with pytest.raises(sq.ShapeError, match="72 tokens are more than max_length=71"):
        mech.step(*tensors(2, 2), state)


def test_what_it_has_not():
    q, k, v = tensors(9, 9)
    mech = build("aft(kind=conv, window=3)")
    with pytest.raises(sq.UnsupportedError, match="each channel has weights of its own"):
        mech.weights(q, k)
    with pytest.raises(sq.UnsupportedError, match="a normaliser of its own"):
        mech.partial(q, k, v)
    _, state = mech.prefill(q, k, v)
    with pytest.raises(sq.UnsupportedError, match="biases go by positions"):
        mech.step(q, None, None, state)
    with pytest.raises(sq.UnsupportedError, match="learned parameters"):
        sq.attention(q, k, v, "aft(kind=conv)")
    assert sq.attention(q, k, v, "aft").shape == q.shape
