"""`compressed`: exact limits, convolutions, blocks, shortened queries, errors."""

import pytest
import torch
from torch.nn import functional as F

import subquad as sq
from laws import reference
from subquad.attention.summary import compressed
from variants import inputs

B, H, HKV, D, V = 2, 6, 3, 5, 7
BOUND = 1e-10  # see laws.EXACT


def build(spec="compressed", **options):
    sizes = {"head_dim": D, "num_heads": H, "num_kv_heads": HKV, "dtype": torch.float64}
    return sq.build(spec, **sizes, **options).eval()


def stir(mech):
    """Weights away from where they start."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in mech.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return mech


def close(found, wanted, bound=BOUND):
    assert found.shape == wanted.shape
    error = (found - wanted).abs().max().item()
    assert error <= bound * max(1.0, wanted.abs().max().item()), f"{error:.2e}"


def same_gradients(found, wanted, leaves):
    cotangent = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(5)).double()
    for a, b in zip(
        torch.autograd.grad(found, leaves, cotangent),
        torch.autograd.grad(wanted, leaves, cotangent),
        strict=True,
    ):
        close(a, b)


# The laws of the registry run conv=shared, which takes values of any width; here the others,
# which need to know it.
@pytest.mark.parametrize("conv", ["full", "depthwise"])
@pytest.mark.parametrize(("stride", "kernel"), [(3, None), (4, 7)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(31, 31), (17, 31), (31, 17), (1, 23), (1, 1)])
def test_equals_the_reference_with_all_gradients(queries, keys, causal, stride, kernel, conv):
    mech = stir(build(conv=conv, stride=stride, kernel=kernel, value_dim=V))
    leaves = (*inputs(queries, keys, grad=True), *mech.parameters())
    key = torch.rand(B, keys, generator=torch.Generator().manual_seed(2)) > 0.3
    key[:, 0] = True
    mask = sq.Mask(causal=causal, key=key)
    out, wanted = mech(*leaves[:3], mask=mask), reference(mech, *leaves[:3], mask)
    close(out, wanted)
    cotangent = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(5)).double()
    found = torch.autograd.grad(out, leaves, cotangent, allow_unused=True)
    truth = torch.autograd.grad(wanted, leaves, cotangent, allow_unused=True)
    for a, b in zip(found, truth, strict=True):
        assert (a is not None and a.any()) or b is None or not b.any()
        if a is not None and b is not None:
            close(a, b)


@pytest.mark.parametrize("conv", ["full", "depthwise"])
@pytest.mark.parametrize("pieces", [[31], [1] * 31, [13, 13, 5], [30, 1]], ids=str)
def test_streaming(pieces, conv):
    mech = stir(build(conv=conv, stride=4, kernel=7, value_dim=V))
    tensors = inputs(31, 31)
    state, parts = None, []
    for part in zip(*(t.split(pieces, 2) for t in tensors), strict=True):
        out, state = mech.step(*part, state)
        parts.append(out)
    close(torch.cat(parts, 2), mech(*tensors, causal=True))
    close(mech.step(tensors[0], None, None, state)[0], mech(*tensors))
    assert state.k.shape[2] == 7 and state.k_tail.shape[2] == 3 + 3 and state.key is None
    _, more = mech.step(*(t[:, :, :2] for t in tensors), state, key_mask=torch.eye(2).bool())
    assert more.key.shape == (B, 6 + 2 - 4) and more.present.shape == (B, 8)


@pytest.mark.parametrize("seen", [2, 4, 6])
def test_a_first_key_mask_may_come_late(seen):
    """Steps without a mask, then one with: all before counts as open, whether or not the step
    completes a block (3 tokens; with 6 seen or 2 it starts or ends one).
    """
    mech = stir(build(stride=3, kernel=5, value_dim=V))
    tensors = inputs(9, 9)
    late = torch.rand(B, 9 - seen, generator=torch.Generator().manual_seed(2)) > 0.5
    late[1, 0] = False  # a masked token that completes no block in one of the cases
    key = torch.cat([torch.ones(B, seen, dtype=torch.bool), late], 1)
    wanted = mech(*tensors, causal=True, key_mask=key)
    for pieces in ([9 - seen], [1] * (9 - seen)):
        _, state = mech.prefill(*(t[:, :, :seen] for t in tensors))
        at = seen
        for count in pieces:
            new = slice(at, at + count)
            out, state = mech.step(*(t[:, :, new] for t in tensors), state, key_mask=key[:, new])
            close(out, wanted[:, :, new])
            at += count
        close(mech.step(tensors[0], None, None, state)[0], mech(*tensors, key_mask=key))


def test_a_state_holds_no_more_than_it_needs():
    """The tokens kept for later blocks are copies, not slices of all that the call read."""
    mech = build(stride=3, kernel=5, value_dim=V)
    state = mech.prefill(*inputs(31, 31), key_mask=torch.ones(B, 31, dtype=torch.bool))[1]
    for tensor in (state.k_tail, state.v_tail, state.key):
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_it_is_torchs_convolution():
    mech = stir(build(stride=3, kernel=5))
    q, k, v = inputs(17, 30, value=D)
    summaries = []
    for x, weight in ((k, mech.key_weight), (v, mech.value_weight)):
        heads = [
            F.conv1d(F.pad(x[:, h].mT, (2, 0)), weight[h].permute(1, 2, 0), stride=3).mT
            for h in range(HKV)
        ]
        summaries.append(torch.stack(heads, 1))
    softmax = sq.build("softmax", head_dim=D, num_heads=H, num_kv_heads=HKV)
    close(mech(q, k, v), softmax(q, *summaries))


@pytest.mark.parametrize("conv", ["full", "depthwise", "shared"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_stride_of_one_is_softmax(causal, conv):
    mech = build(stride=1, conv=conv, value_dim=V)
    tensors = inputs(17, 31, grad=True)
    mask = sq.Mask(causal=causal, key=torch.arange(31).expand(B, 31) != 5)
    softmax = sq.build("softmax", head_dim=D, num_heads=H, num_kv_heads=HKV)
    out, wanted = mech(*tensors, mask=mask), softmax(*tensors, mask=mask)
    close(out, wanted)
    same_gradients(out, wanted, tensors)


def test_untrained_summaries_are_means():
    mech, (q, k, v) = build(stride=4, value_dim=V), inputs(17, 28)
    softmax = sq.build("softmax", head_dim=D, num_heads=H, num_kv_heads=HKV)
    close(mech(q, k, v), softmax(q, *(t.unflatten(2, (7, 4)).mean(3) for t in (k, v))))


def test_current_fills_the_rows_before_a_complete_block():
    tensors = inputs(31, 31)
    softmax = sq.build("softmax", head_dim=D, num_heads=H, num_kv_heads=HKV)
    on = build(stride=6, value_dim=V)(*tensors, causal=True)
    off = build(stride=6, current=False, value_dim=V)(*tensors, causal=True)
    assert not off[:, :, :5].any() and off[:, :, 5:].any(-1).all()
    close(on[:, :, :5], softmax(*tensors, causal=True)[:, :, :5])  # exact before any summary
    ends = slice(5, 31, 6)  # a complete block leaves nothing to read exactly
    close(on[:, :, ends], off[:, :, ends])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(31, 31), (17, 31), (31, 17)])
def test_query_stride_keeps_some_rows(queries, keys, causal):
    spec = "compressed(conv=shared, stride=4, kernel=5)"
    long, short = build(spec), build(spec, query_stride=3)
    tensors = inputs(queries, keys, grad=True)
    out = short(*tensors, causal=causal)
    assert out.shape[2] == -(-queries // 3)
    wanted = long(*tensors, causal=causal)[:, :, ::3]
    close(out, wanted)
    same_gradients(out, wanted, tensors)
    assert long.capabilities.full_length and not short.capabilities.full_length
    assert "⌈L/stride⌉ rows" in short.capabilities.full_length.reason
    with pytest.raises(sq.UnsupportedError, match="keeps only some queries"):
        short.prefill(*tensors)


def test_rows_that_all_precede_every_key_are_zero_with_a_graph():
    """L = 2, S = 1: of two queries the one that is kept stands before the key."""
    tensors = inputs(2, 1, grad=True)
    out = build("compressed(conv=shared, query_stride=2)")(*tensors, causal=True)
    assert out.shape == (B, H, 1, V) and not out.any()
    assert not torch.autograd.grad(out.sum(), tensors[0])[0].any()


@pytest.mark.parametrize("budget", [1, 3000, 20000])
@pytest.mark.parametrize("wide", [False, True])
def test_chunks_change_nothing(budget, wide, monkeypatch):
    mech = stir(build("compressed(conv=shared, stride=4, kernel=7)"))
    tensors = inputs(71, 71, grad=True, value=31 if wide else 7)
    mask = sq.Mask(causal=True, key=torch.arange(71).expand(B, 71) % 5 != 2)
    whole = mech(*tensors, mask=mask)
    monkeypatch.setattr(compressed, "CHUNK_BYTES", budget)
    chunked = mech(*tensors, mask=mask)
    close(chunked, whole)
    same_gradients(chunked, whole, (*tensors, *mech.parameters()))


def test_options_are_checked():
    with pytest.raises(sq.OptionError) as caught:
        build(stride=4, kernel=3, conv="depth", current=1, query_stride=0)
    for part in (
        "kernel=3 must be ≥ stride=4: keys between two windows would never be read",
        "did you mean 'depthwise'",
        "current=1",
        "query_stride=0",
    ):
        assert part in str(caught.value)
    with pytest.raises(sq.OptionError, match="stride='x'"):
        build(stride="x", kernel=3)


def test_states_must_fit():
    mech = build("compressed(conv=shared)")
    q, k, v = inputs(5, 5)
    state = mech.prefill(q, k, v)[1]
    with pytest.raises(sq.ShapeError, match=r"v must continue the state's \(B, Hkv=3, S, 7\)"):
        mech.step(q, k, v[..., :3], state)
    with pytest.raises(sq.DtypeError, match="k must have the state's dtype"):
        mech.step(q.float(), k.float(), v.float(), state)


def test_weights_of_shared_taps_only():
    q, k, v = inputs(23, 23, value=D)
    with pytest.raises(sq.UnsupportedError, match="channels of the values are filtered apart"):
        build().weights(q, k)
    mech = build("compressed(conv=shared)")
    weights = mech.weights(q, k, causal=True)
    close(weights @ v.repeat_interleave(2, 1), mech(q, k, v, causal=True))
    close(weights.sum(-1), torch.ones(B, H, 23, dtype=torch.float64))  # means of open keys
