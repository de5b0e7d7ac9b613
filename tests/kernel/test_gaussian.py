"""Gaussian landmark attention: the source text's examples, anchors, calibration, limits."""

import itertools
import math

import pytest
import torch

import subquad as sq
from references import ref_gaussian

F64 = torch.float64
D, H, KV, V = 5, 6, 3, 7


def randn(*shape, seed=0, dtype=F64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=F64).to(dtype)


def build(heads=H, kv=KV, dim=D, dtype=F64, **options):
    return sq.build(
        "gaussian", head_dim=dim, num_heads=heads, num_kv_heads=kv, dtype=dtype, **options
    ).eval()


def inputs(L=19, S=23, seed=1, dtype=F64):
    shapes = (2, H, L, D), (2, KV, S, D), (2, KV, S, V)
    return [randn(*shape, seed=seed + n, dtype=dtype) for n, shape in enumerate(shapes)]


def close(found, wanted, tolerance=1e-11):
    """Sums of ≤ 23·11 float64 terms and exponents ≤ 100: below 1e-12."""
    error = (found.detach().double() - wanted.detach().double()).abs().max().item()
    assert error <= tolerance * wanted.detach().abs().max().item(), error


def ref(mech, q, k, v, scale=1.0, allowed=None):
    if allowed is None:
        allowed = torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool)
    return ref_gaussian(mech, q, k, v, allowed=allowed, scale=scale)


# ---- the worked examples of source text 003, corrected ------------------------------------


def test_first_worked_example():
    """Five words of dimension 3, anchors the first, third and fifth, σ = 0.5. The text squares
    each entry instead and leaves the normaliser out. Worked by hand: neighbours differ by 0.3 in
    each of 3 coordinates, so that words i and j are |i − j|²·0.27 apart, squared, and
    φ = exp(−0.54·|i − j|²).
    """
    words = torch.arange(1, 16, dtype=F64).view(1, 1, 5, 3) / 10
    mech = build(1, 1, dim=3, features=3, sigma=0.5)
    mech.set_anchors(words[0, 0, [0, 2, 4]])
    steps = (torch.arange(5)[:, None] - torch.tensor([0, 2, 4])).double()
    phi = (-0.54 * steps.square()).exp()
    close(mech.features(words)[0, 0], phi)
    printed = torch.tensor([1.0, 0.58275, 0.11533, 0.00775, 0.00018], dtype=F64)
    torch.testing.assert_close(phi[:, 0], printed, rtol=0, atol=5e-6)  # five decimals
    kernel = phi @ phi.mT
    wanted = kernel @ words[0, 0] / kernel.sum(-1, keepdim=True)
    out = mech(words, words, words)[0, 0]
    close(out, wanted)
    # As documented in `subquad.features.landmarks`: five decimals.
    first = torch.tensor([0.31049, 0.41049, 0.51049], dtype=F64)
    torch.testing.assert_close(out[0], first, rtol=0, atol=5e-6)
    torch.testing.assert_close(out[2], words[0, 0, 2], rtol=0, atol=1e-12)
    squared = words[0, 0].square()  # what the text calls the features
    assert not torch.allclose(squared, phi, atol=0.1)


def test_second_worked_example():
    """x = (.1, .2, .3): |x − a|² = 0.03, 0.27, 1.08, φ = exp(−2|x − a|²). The text prints 0.11505
    for the third.
    """
    mech = build(1, 1, dim=3, features=3, sigma=0.5)
    mech.set_anchors(torch.tensor([[0, 0.1, 0.2], [0.4, 0.5, 0.6], [0.7, 0.8, 0.9]], dtype=F64))
    phi = mech.features(torch.tensor([[[0.1, 0.2, 0.3]]], dtype=F64)).flatten()
    close(phi, torch.tensor([-0.06, -0.54, -2.16], dtype=F64).exp())
    assert [round(x, 5) for x in phi.tolist()] == [0.94176, 0.58275, 0.11533]


# ---- anchors ------------------------------------------------------------------------------


def test_anchors_given_for_all_heads_or_each():
    mech = build(features=11)
    one, each = randn(11, D, seed=4), randn(KV, 11, D, seed=5)
    mech.set_anchors(one)
    assert torch.equal(mech.anchors, one.expand(KV, -1, -1))
    mech.set_anchors(each)
    assert torch.equal(mech.anchors, each)
    q, k, v = inputs()
    close(mech(q, k, v), ref(mech, q, k, v))
    for wrong in ((10, D), (H, 11, D), (11, D + 1), (D,)):
        with pytest.raises(sq.ShapeError, match=r"anchors must be \(Hkv, M, D\) = \(3, 11, 5\) or"):
            mech.set_anchors(torch.zeros(wrong))
    from_data = build(features=11, anchors="sample")
    from_data.set_anchors(each)  # given ones do instead of calibration
    close(from_data(q, k, v), mech(q, k, v), 0.0)


def test_normal_anchors_follow_the_seed():
    first = build(features=11, seed=3).anchors
    assert torch.equal(first, build(features=11, seed=3).anchors)
    assert not torch.equal(first, build(features=11, seed=4).anchors)
    assert not torch.equal(first[0], first[1])
    # 2·3·11·5 = 330 standard normal numbers: mean and variance within 5 standard errors.
    both = torch.cat([first, build(features=11, seed=4).anchors]).flatten()
    assert both.mean().abs() < 5 / math.sqrt(330)
    assert (both.var() - 1).abs() < 5 * math.sqrt(2 / 330)


@pytest.mark.parametrize("L", [23, 19])
@pytest.mark.parametrize("anchors", ["sample", "kmeans"])
def test_calibration_takes_open_tokens_of_the_own_head_only(anchors, L):
    """Closed tokens are junk; heads live far apart: an anchor tells where it came from."""
    mech = build(features=11, anchors=anchors)
    q, k, v = inputs(L)
    with pytest.raises(sq.CalibrationError, match=f"anchors={anchors} needs calibrate"):
        mech(q, k, v)
    home = 100.0 * torch.arange(KV, dtype=F64)[:, None, None]
    k = k + home
    q = q + home.repeat_interleave(H // KV, 0)
    mask = torch.rand(2, 23, generator=torch.Generator().manual_seed(0)) > 0.4
    k = k.masked_fill(~mask[:, None, :, None], float("nan"))
    if L == 23:  # self-attention: queries at closed positions are padding too
        q = q.masked_fill(~mask[:, None, :, None], float("inf"))
    mech.calibrate(q, k, key_mask=mask)
    assert ((mech.anchors - home).abs() < 6).all()
    if anchors == "sample":  # rows of the data, no row twice
        for head in range(KV):
            queries, keys = q[:, 2 * head : 2 * head + 2], k[:, head]
            rows = torch.cat([queries.flatten(0, 2), keys.flatten(0, 1)])
            hits = (mech.anchors[head][:, None] == rows).all(-1)
            assert (hits.sum(1) == 1).all() and (hits.sum(0) <= 1).all()
    again = build(features=11, anchors=anchors)
    again.calibrate(q, k, key_mask=mask)
    assert torch.equal(again.anchors, mech.anchors)  # the seed decides
    twin = build(features=11, anchors=anchors)
    twin.load_state_dict(mech.state_dict())
    q, k, v = inputs()
    close(twin(q, k, v), mech(q, k, v), 0.0)
    twin.load_state_dict(build(features=11, anchors=anchors).state_dict())
    with pytest.raises(sq.CalibrationError):
        twin(q, k, v)
    mech.reset_parameters()
    with pytest.raises(sq.CalibrationError):
        mech(q, k, v)


def test_kmeans_finds_separated_clusters():
    """Three clouds of width 0.01 at distance ≥ 1: centres are within 5·0.01/√rows of the means."""
    centres = torch.tensor([[0.0] * D, [1.0] * D, [-1.0] * D], dtype=F64)
    rows = centres.repeat(20, 1) + 0.01 * randn(60, D, seed=6)
    mech = build(1, 1, features=3, anchors="kmeans")
    mech.calibrate(rows[None, None, :30], rows[None, None, 30:])
    found = mech.anchors[0][mech.anchors[0, :, 0].argsort()]
    assert (found - centres[[2, 0, 1]]).abs().max() < 5 * 0.01 / math.sqrt(20)


def test_calibration_errors():
    q, k, _ = inputs(3, 3)
    with pytest.raises(sq.OptionError, match="calibrate needs anchors=sample or anchors=kmeans"):
        build(features=11).calibrate(q, k)
    with pytest.raises(sq.OptionError, match="19 anchors cannot be taken from 18 rows"):
        build(features=19, anchors="sample").calibrate(q, k)
    mech = build(features=2, anchors="kmeans")
    with pytest.raises(sq.OptionError, match="0 rows"):
        mech.calibrate(q, k, key_mask=torch.zeros(2, 3, dtype=torch.bool))
    with pytest.raises(sq.ShapeError, match="key_mask must broadcast"):
        mech.calibrate(q, k, key_mask=torch.ones(2, 5, dtype=torch.bool))


# ---- learning -----------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_learned_anchors_pass_gradcheck(causal):
    mech = build(2, 1, dim=3, features=2, sigma=0.8, learned=True)
    assert [name for name, _ in mech.named_parameters()] == ["anchors"]
    q, k, v = (randn(1, h, n, d, seed=s).requires_grad_() for h, n, d, s in
               ((2, 3, 3, 0), (1, 5, 3, 1), (1, 5, 2, 2)))  # fmt: skip

    def call(q, k, v, anchors):
        return torch.func.functional_call(mech, {"anchors": anchors}, (q, k, v), {"causal": causal})

    torch.autograd.gradcheck(call, (q, k, v, mech.anchors.detach().clone().requires_grad_()))


def test_learning_reduces_a_loss_and_fixed_anchors_do_not_move():
    q, k, v = inputs()
    target = randn(2, H, 19, V, seed=9)
    mech = build(features=11, learned=True)
    optimiser = torch.optim.SGD(mech.parameters(), lr=1.0)
    losses = []
    for _ in range(5):
        loss = (mech(q, k, v) - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert all(b < a for a, b in itertools.pairwise(losses))
    assert not list(build(features=11).parameters())
    with pytest.raises(sq.UnsupportedError, match="its anchors are learned parameters"):
        sq.attention(q, k, v, "gaussian(learned=true)")
    with pytest.raises(sq.UnsupportedError, match="its anchors come from data"):
        sq.attention(q, k, v, "gaussian(anchors=kmeans)")


# ---- values -------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [None, 1.0, 0.37, 4.0])
@pytest.mark.parametrize("causal", [False, True])
def test_scale_multiplies_both_sides_by_its_root(scale, causal):
    mech = build(features=11, sigma=0.9)
    q, k, v = inputs()
    allowed = None
    if causal:
        allowed = sq.Mask(causal=True).to_dense(19, 23)[None, None]
    wanted = ref(mech, q, k, v, 1.0 if scale is None else scale, allowed)
    close(mech(q, k, v, scale=scale, causal=causal), wanted)


def test_partial_has_the_true_scale():
    """den·exp(log_scale) is Σ_j Σ_m φ_m(q)φ_m(k_j) itself."""
    mech = build(features=11, sigma=0.9)
    q, k, v = inputs()
    part = mech.partial(q, k, v, scale=0.37)
    phi = [mech.features(math.sqrt(0.37) * t) for t in (q.unflatten(1, (KV, 2)).flatten(2, 3), k)]
    wanted = (phi[0] @ phi[1].mT).sum(-1).view(2, H, 19)
    close(part.den * part.log_scale.exp(), wanted)


def test_wide_gaussians_give_uniform_attention():
    """φ = 1 − O(r²/2σ²): at σ = 10^4 and r² ≤ 100 weights are uniform within 4·100/2e8 = 2e-6."""
    mech = build(features=11, sigma=1e4)
    q, k, v = inputs()
    mean = v.mean(2, keepdim=True).repeat_interleave(2, 1).expand(2, H, 19, V)
    assert (mech(q, k, v) - mean).abs().max() < 2e-6 * v.abs().max()
    assert (build(features=11, sigma=math.inf)(q, k, v) - mean).abs().max() < 1e-14
    narrow = build(features=11, sigma=0.5)(q, k, v)
    assert (narrow - mean).abs().max() > 0.1


def test_rows_far_from_every_anchor_do_not_vanish():
    """40σ away φ underflows to zero even in float64 (e^−800); logarithms keep the answer."""
    mech = build(features=11, sigma=0.5, dtype=torch.float32)
    q, k, v = inputs(dtype=torch.float32)
    q, k = q + 20.0, k - 20.0
    assert not mech.features(k).any()
    out = mech(q, k, v)
    # Exponents of size |k|²/2σ² = D·25²·2 = 6250 in float32: 6250·2^-24·4 roundings = 1.5e-3,
    # twice in a ratio.
    close(out, ref(mech.double(), q, k, v), 3e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": 0}, "features=0 must be"),
        ({"sigma": 0.0}, "sigma=0.0 must be"),
        ({"sigma": math.nan}, "sigma=nan must be"),
        ({"anchors": "kmean"}, "did you mean 'kmeans'"),
        ({"learned": 1}, "learned=1 must be"),
        ({"features": -1, "sigma": -1.0, "anchors": "x"}, "features=-1.*sigma=-1.0.*anchors='x'"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(sq.OptionError, match=message):
        build(**options)


def test_wrong_scale():
    q, k, v = inputs()
    with pytest.raises(sq.OptionError, match=r"gaussian: scale=-1.0 must be > 0"):
        build(features=11)(q, k, v, scale=-1.0)
