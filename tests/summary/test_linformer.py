"""`linformer`: exact limits, sharing, windows, errors."""

import copy
import math

import pytest
import torch

import subquad as sq
from laws import reference
from subquad.attention.summary.linformer import Linformer, share_layers
from variants import inputs

B, H, HKV, D, V, N = 2, 6, 3, 5, 7, 71

# Sums of n = 71 keys, then softmax over ≤ 71 summaries: 1.1e-16 × 10^4, see laws.EXACT.
BOUND = 1e-10


def build(spec="linformer", length=N, **options):
    sizes = {"head_dim": D, "num_heads": H, "num_kv_heads": HKV, "dtype": torch.float64}
    return sq.build(spec, max_length=length, **sizes, **options).eval()


def close(found, wanted, bound=BOUND):
    assert found.shape == wanted.shape
    error = (found - wanted).abs().max().item()
    assert error <= bound * max(1.0, wanted.abs().max().item()), f"{error:.2e}"


def exact(q, k, v, **options):
    softmax = sq.build("softmax", head_dim=D, num_heads=H, num_kv_heads=HKV)
    return softmax(q, k, v, **options)


# ---- exact limits ------------------------------------------------------------------------


@pytest.mark.parametrize("sharing", [None, "headwise", "kv", "layerwise"])
@pytest.mark.parametrize("queries", [17, N])
def test_the_identity_is_softmax(queries, sharing):
    """k = n and E = F = I: forward and gradients of softmax attention."""
    mech = build(k=N, sharing=sharing)
    with torch.no_grad():
        for parameter in mech.parameters():
            parameter.copy_(torch.eye(N, dtype=torch.float64).expand_as(parameter))
    tensors = inputs(queries, N, grad=True)
    out, wanted = mech(*tensors), exact(*tensors)
    close(out, wanted)
    for a, b in zip(
        torch.autograd.grad(out.square().sum(), tensors),
        torch.autograd.grad(wanted.square().sum(), tensors),
        strict=True,
    ):
        close(a, b)


@pytest.mark.parametrize("projection", ["mean", "conv"])
def test_windows_of_one_key_are_softmax(projection):
    """k = max_length: every window is one key; masked ones are left out, so (c) holds here."""
    mech, tensors = build(k=N, projection=projection), inputs(17, 43)
    mask = torch.rand(B, 43, generator=torch.Generator().manual_seed(3)) > 0.4
    close(mech(*tensors), exact(*tensors))
    close(mech(*tensors, key_mask=mask), exact(*tensors, key_mask=mask))


def test_windows_are_means_of_open_keys():
    """max_length = 71, k = 10: windows of 8 keys; 43 keys make 6, the last of 3 keys."""
    mech, (q, k, v) = build(k=10, projection="mean"), inputs(17, 43)
    mask = torch.rand(B, 43, generator=torch.Generator().manual_seed(3)) > 0.4
    mask[0, 8:16] = False  # this window is not there
    weights = mech.summary_weights(q, k, key_mask=mask)
    assert weights.shape == (B, H, 17, 6)
    assert not weights[0, ..., 1].any() and (weights[1] > 0).all()
    close(weights.sum(-1), torch.ones(B, H, 17, dtype=torch.float64))
    kept = [at for at in range(6) if at != 1]
    means = [
        torch.stack(
            [t[0, :, 8 * m : 8 * m + 8][:, mask[0, 8 * m : 8 * m + 8]].mean(1) for m in kept], 1
        )[None]
        for t in (k, v)
    ]
    close(mech(q, k, v, key_mask=mask)[:1], exact(q[:1], *means))


def test_a_kernel_starts_as_the_mean_of_full_windows():
    conv, mean = build(k=10, projection="conv"), build(k=10, projection="mean")
    tensors = inputs(17, 40)  # 5 windows of 8
    close(conv(*tensors), mean(*tensors))
    assert [tuple(p.shape) for p in conv.parameters()] == [(1, 8), (1, 8)]
    assert not list(mean.parameters())


# ---- sharing -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sharing", "shapes"),
    [
        ("none", [(HKV, 11, N), (HKV, 11, N)]),
        ("headwise", [(1, 11, N), (1, 11, N)]),
        ("kv", [(1, 11, N)]),
        ("layerwise", [(1, 11, N)]),
    ],
)
def test_sharing_sets_the_parameters(sharing, shapes):
    mech = build(k=11, sharing=sharing)
    assert [tuple(parameter.shape) for parameter in mech.parameters()] == shapes
    tensors = inputs(17, N)
    close(mech(*tensors), reference(mech, *tensors, sq.Mask()))


def test_none_reads_the_same_as_text_and_as_an_option():
    assert sq.LinformerConfig(sharing="none") == sq.LinformerConfig(sharing=None)
    config = build("linformer(k=11, sharing=none)").config
    assert config.sharing is None and str(config) == "linformer(k=11, sharing=none)"


def test_sharing_heads_is_repeating_one_projection():
    alone, shared = build(k=11, sharing="none"), build(k=11)
    with torch.no_grad():
        for mine, theirs in zip(alone.parameters(), shared.parameters(), strict=True):
            mine.copy_(theirs.expand_as(mine))
    tensors = inputs(17, N)
    close(alone(*tensors), shared(*tensors))


def test_layers_share_one_projection_and_its_gradient():
    layers = torch.nn.ModuleList(
        build("linformer(k=11, sharing=layerwise)", seed=seed) for seed in range(3)
    )
    assert not torch.equal(layers[0].key_projection, layers[1].key_projection)
    assert share_layers(layers) == 3
    assert len(list(layers.parameters())) == 1
    q, k, v = inputs(N, N)
    found = torch.autograd.grad(
        sum(layer(q, k, v).square().sum() for layer in layers), layers[0].key_projection
    )[0]
    one = torch.autograd.grad(layers[0](q, k, v).square().sum(), layers[0].key_projection)[0]
    close(found, 3 * one)
    twins = copy.deepcopy(layers)  # stays shared
    assert twins[0].key_projection is twins[2].key_projection
    assert twins[0].key_projection is not layers[0].key_projection
    other = torch.nn.ModuleList(
        build("linformer(k=11, sharing=layerwise)", seed=9) for _ in range(3)
    )
    share_layers(other)
    other.load_state_dict(layers.state_dict())
    close(other[2](q, k, v), layers[0](q, k, v), 0.0)


def test_only_layerwise_projections_are_shared_by_layers():
    layers = torch.nn.ModuleList([build(k=11), build(k=11)])
    assert share_layers(layers) == 0
    layers[1].share(layers[0])  # by name, any pair may
    assert layers[1].value_projection is layers[0].value_projection


def test_sharing_needs_equal_sizes():
    mech = build(k=11)
    for other, message in (
        (build(k=13), "k is 11 here, 13 there"),
        (build(k=11, sharing="kv"), "sharing is headwise here, kv there"),
        (build(k=11, length=73), "max_length is 71 here, 73 there"),
    ):
        with pytest.raises(sq.OptionError, match=message):
            mech.share(other)
    wide = sq.build("linformer(sharing=none)", head_dim=D, num_heads=H, max_length=N)
    with pytest.raises(sq.OptionError, match="num_kv_heads is 3 here, 6 there"):
        build(sharing=None).share(wide)


# ---- the rest ----------------------------------------------------------------------------


def test_entries_have_variance_one_over_k():
    """N(0, 1/k): with 64·1024 draws the variance is within 5·√(2/65536) = 2.8% of 1/k."""
    mech = sq.build("linformer(k=64)", head_dim=D, num_heads=1, max_length=1024)
    for parameter in mech.parameters():
        assert abs(parameter.var().item() * 64 - 1) < 0.028
        assert abs(parameter.mean().item()) < 5 / math.sqrt(64 * 65536)
    assert not torch.equal(mech.key_projection, mech.value_projection)


def test_summary_weights_times_summary_values_are_the_output():
    mech, tensors = build(k=11), inputs(17, N)
    mask = torch.rand(B, N, generator=torch.Generator().manual_seed(3)) > 0.4
    mask[1] = False
    weights, values = mech.summary_weights_and_values(*tensors, key_mask=mask)
    close(weights @ values, mech(*tensors, key_mask=mask))
    close(weights.sum(-1)[0], torch.ones(H, 17, dtype=torch.float64))
    assert not weights[1].any()


def test_summary_weights_keep_their_precision_under_autocast():
    """As a call: autocast casts the inputs, sums stay in float32."""
    mech = sq.build("linformer(k=7)", head_dim=D, num_heads=H, num_kv_heads=HKV, max_length=71)
    q, k, _ = (t.float() for t in inputs(71, 71))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weights = mech.summary_weights(q, k)
    assert weights.dtype == torch.float32
    assert torch.equal(weights, mech.summary_weights(q.bfloat16(), k.bfloat16()))


@pytest.mark.parametrize("spec", ["linformer(k=7)", "nystrom(conv_kernel=3)"])
def test_any_integer_is_a_seed(spec):
    sizes = {"head_dim": D, "num_heads": H, "max_length": 71}
    first, again, other = (
        next(sq.build(spec, seed=seed, **sizes).parameters()) for seed in (2**70 + 1, 1, -1)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_left_padding_is_another_input():
    """Why `compact` is absent: the same tokens at other positions meet other columns of E."""
    mech, (q, k, v) = build(k=11), inputs(N, N)
    mask = (torch.arange(N) >= 29).expand(B, N)
    out = mech(q, k, v, key_mask=mask)[:, :, 29:]
    alone = mech(*(t[:, :, 29:] for t in (q, k, v)))
    assert (out - alone).abs().max() > 0.1
    assert not mech.capabilities.compact


def test_too_long_a_sequence_names_both_lengths():
    mech = build()
    with pytest.raises(sq.ShapeError, match="length S=72, longer than max_length=71"):
        mech(*inputs(17, 72))
    assert mech(*inputs(97, 71)).shape == (B, H, 97, V)  # queries may be more


def test_options_are_checked():
    with pytest.raises(sq.OptionError, match="max_length is needed"):
        sq.build("linformer", head_dim=4, num_heads=1)
    with pytest.raises(sq.OptionError) as caught:
        build(k=0, sharing="head", projection="max", dropout=2.0)
    for part in ("k=0", "did you mean 'headwise'", "projection='max'", "dropout=2.0"):
        assert part in str(caught.value)


def test_dropout_is_exact():
    """Weights of 1/(1 − p) or nothing, while training only: the mean over draws is the output.

    Over 4000 draws of a convex sum of k = 11 values of size ≤ 4·√(71/11)·4, p = 0.25: standard
    error of the mean ≤ √(p/(1−p)/4000)·max|ṽ| = 0.0091·max|ṽ|; five of them.
    """
    mech, tensors = build(k=11, dropout=0.25), inputs(3, N)
    wanted = mech(*tensors)
    mech.train()
    torch.manual_seed(0)
    many = mech(*(t.repeat(4000, 1, 1, 1) for t in tensors))
    mean = many.unflatten(0, (4000, B)).mean(0)
    size = mech.summary_weights_and_values(*tensors)[1].abs().max()
    assert not torch.equal(mech(*tensors), mech(*tensors))
    assert (mean - wanted).abs().max() < 5 * 0.0091 * size
    assert isinstance(mech, Linformer) and not mech.capabilities.deterministic
