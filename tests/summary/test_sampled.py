"""Sampled attention: which keys are read, unbiased sums, exact limits, options."""

import copy
import math

import pytest
import torch

import subquad as sq
from references import ref_softmax
from subquad.arena.uniform import Uniform
from subquad.attention.masks import Mask
from subquad.attention.partial import combine

F64 = torch.float64
D, H, KV, V = 5, 6, 3, 7


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def build(heads=H, kv=KV, dim=D, dtype=F64, **options):
    return sq.build(
        "sampled", head_dim=dim, num_heads=heads, num_kv_heads=kv, dtype=dtype, **options
    ).eval()


def inputs(L=41, S=41, seed=1):
    shapes = (2, H, L, D), (2, KV, S, D), (2, KV, S, V)
    return [randn(*shape, seed=seed + n) for n, shape in enumerate(shapes)]


def close(found, wanted, tolerance=1e-11):
    """Sums of ≤ 53 float64 terms, exponents ≤ 100 that amplify their rounding: below 1e-12."""
    error = (found.detach() - wanted.detach()).abs().max().item()
    assert error <= tolerance * wanted.detach().abs().max().item(), error


def softmax(q, k, v, key=None, scale=D**-0.5):
    if key is None:
        key = torch.ones(len(q), k.shape[2], dtype=torch.bool)
    return ref_softmax(None, q, k, v, allowed=key[:, None, None], scale=scale)


# ---- exact limits -------------------------------------------------------------------------


@pytest.mark.parametrize("heavy", [41, 42, 100])
def test_all_keys_heavy_is_softmax(heavy):
    q, k, v = inputs()
    close(build(heavy=heavy)(q, k, v), softmax(q, k, v))
    close(build(heavy=heavy)(q[:, :, :17], k, v), softmax(q[:, :, :17], k, v))


def test_rows_with_no_more_open_keys_than_heavy_ones_are_exact():
    q, k, v = inputs()
    mech = build(heavy=7, samples=11)
    key = torch.arange(41) < torch.tensor([[7], [1]])
    close(mech(q, k, v, key_mask=key), softmax(q, k, v, key))
    assert not mech(q, k, v, key_mask=key & False).any()


def test_equal_logits_and_uniform_proposal_give_weights_that_sum_to_the_number_of_keys():
    """q = 0: every weight is 1, |R|/n for each sample: the normaliser has no error at all."""
    _, k, v = inputs()
    mech = build(heavy=5, samples=13, uniform=1.0)
    part = mech.partial(torch.zeros(2, H, 3, D, dtype=F64), k, v)
    close(part.lse, torch.full((2, H, 3), math.log(41), dtype=F64))


# ---- the selection, from its definition ---------------------------------------------------


def naive_mass(mech, q, k, key, scale):
    """(B, Hkv, S), from the module's docstring; landmarks by the mechanism's own numbers."""
    mass = torch.zeros(k.shape[:3], dtype=F64)
    count, groups = mech.config.landmarks, q.shape[1] // k.shape[1]
    for b, head in torch.cartesian_prod(torch.arange(len(q)), torch.arange(k.shape[1])):
        rows = key[b].nonzero().flatten() if q.shape[2] == k.shape[2] else torch.arange(q.shape[2])
        for t in range(count):
            u = (mech.offsets[head, t].item() + 0.5) / 2**31
            i = rows[int((t + u) * len(rows) / count)]
            for h in range(head * groups, (head + 1) * groups):
                logits = (scale * k[b, head] @ q[b, h, i]).masked_fill(~key[b], -torch.inf)
                mass[b, head] += logits.softmax(0) / (count * groups)
    return mass


@pytest.mark.parametrize("queries", [41, 17])
def test_heavy_keys_proposal_and_weights_follow_their_definition(queries):
    q, k, _ = inputs(queries)
    mech = build(heavy=9, samples=13, first=2, last=1, landmarks=5, uniform=0.3)
    key = torch.rand(2, 41, generator=torch.Generator().manual_seed(3)) > 0.4
    mass = naive_mass(mech, q, k, key, 0.6)
    heavy, present, p = mech.proposal(q, k, Mask(key=key), 0.6)
    chosen = mech.select(q, k, Mask(key=key), 0.6)
    assert present.all()
    for b, h in torch.cartesian_prod(torch.arange(2), torch.arange(KV)):
        own, rows = set(heavy[b, h].tolist()), key[b].nonzero().flatten().tolist()
        ends = {*rows[:2], rows[-1]}
        others = sorted(set(rows) - ends, key=lambda j: -mass[b, h, j])
        assert own == ends | set(others[:6])
        rest = sorted(set(rows) - own)
        wanted = torch.zeros(41, dtype=F64)
        wanted[rest] = 0.7 * mass[b, h, rest] / mass[b, h, rest].sum() + 0.3 / len(rest)
        close(p[b, h], wanted)
        index, weight = chosen.index[b, h], chosen.log_weight[b, h]
        assert index[:9].tolist() == heavy[b, h].tolist() and not weight[:9].any()
        assert set(index[9:].tolist()) <= set(rest)
        close(weight[9:], -(13 * wanted[index[9:]]).log())
        assert weight.exp().max() <= len(rest) / (13 * 0.3) * (1 + 1e-12)  # the bound |R|/(n·u)


def test_stratified_draws_take_one_key_from_each_share_of_the_proposal():
    q, k, _ = inputs()
    mech = build(heavy=3, samples=11)
    _, _, p = mech.proposal(q, k, Mask(), 0.5)
    drawn = mech.select(q, k, Mask(), 0.5).index[..., 3:]
    after = p.cumsum(-1).gather(-1, drawn)
    before = after - p.gather(-1, drawn)
    u = (mech.draws.double() + 0.5) / 2**31
    at = (torch.arange(11) + u) / 11
    assert ((before <= at + 1e-12) & (at <= after + 1e-12)).all()


def test_a_row_with_fewer_open_keys_than_heavy_and_samples():
    q, k, v = inputs()
    mech = build(heavy=7, samples=31)
    key = torch.arange(41) < torch.tensor([[9], [4]])
    chosen = mech.select(q, k, Mask(key=key), 0.5)
    read = chosen.log_weight > -torch.inf
    assert (chosen.index[0][read[0]] < 9).all() and (chosen.index[1][read[1]] < 4).all()
    assert read[0].all() and read[1].sum() == KV * 4
    close(mech(q, k, v, key_mask=key)[1:], softmax(q, k, v, key)[1:])


def test_rows_share_numbers_heads_do_not():
    q, k, v = inputs()
    mech = build(heavy=3, samples=11)
    assert not torch.equal(mech.draws[0], mech.draws[1])
    both = mech(q, k, v)
    close(mech(q[1:], k[1:], v[1:]), both[1:])
    close(mech(q.flip(0), k.flip(0), v.flip(0)), both.flip(0))
    same = [t[:, :1].expand(-1, n, -1, -1) for t, n in ((q, H), (k, KV), (v, KV))]
    out = mech(*same)
    close(out[:, 0], out[:, 1])  # a group reads one selection
    assert not torch.allclose(out[:, 1], out[:, 2])
    # Head h draws the same, whatever the number of heads.
    assert torch.equal(build(2, 2, samples=11).draws, build(5, 5, samples=11).draws[:2])


def test_draws_follow_the_seed_and_survive_casts():
    mech = build(samples=11, seed=3)
    assert torch.equal(mech.draws, build(samples=11, seed=3).draws)
    assert not torch.equal(mech.draws, build(samples=11, seed=4).draws)
    assert torch.equal(copy.deepcopy(mech).half().draws, mech.draws)
    assert mech.draws.min() >= 0 and mech.draws.max() < 2**31


# ---- the estimator ------------------------------------------------------------------------

COPIES = 600
"""Independent estimates: key/value heads of one call with equal contents."""


def estimates(draw, uniform=0.4):
    """Σ e^s, Σ e^s v and ∂Σ e^s/∂q of one query in COPIES independent draws; with the truth
    and the variance of each by independent draws, (Σ f²/p − (Σ f)²)/n over the keys not heavy.
    """
    scale, n = 0.8, 13
    q, k, v = randn(1, 1, 29, 3, seed=1), randn(1, 1, 29, 3, seed=2), randn(1, 1, 29, 2, seed=3)
    mech = build(COPIES, COPIES, 3, heavy=4, samples=n, uniform=uniform, draw=draw, landmarks=6)
    many = [t.repeat(1, COPIES, 1, 1) for t in (q, k, v)]
    _, _, p = mech.proposal(*many[:2], Mask(), scale)
    leaf = many[0].requires_grad_()
    part = mech.partial(leaf, *many[1:], scale=scale)
    total = part.den * part.log_scale.exp()
    (slope,) = torch.autograd.grad(total[:, :, 7].sum(), leaf)
    num = part.num * part.log_scale.exp()[..., None]
    found = torch.stack([total[0, :, 7], num[0, :, 7, 0], num[0, :, 7, 1], slope[0, :, 7, 2]])
    weight = (scale * k[0, 0] @ q[0, 0, 7]).exp()
    columns = [1.0, v[0, 0, :, 0], v[0, 0, :, 1], scale * k[0, 0, :, 2]]
    terms = torch.stack([weight * column for column in columns])  # (4, S)
    rest = p[0] > 0  # (COPIES, S)
    squares = (terms[:, None].square() * rest / torch.where(rest, p[0], 1.0)).sum(-1)
    variance = (squares - (terms[:, None] * rest).sum(-1).square()) / n
    return found.detach(), terms.sum(-1), variance


@pytest.mark.parametrize("uniform", [0.4, 1.0])
@pytest.mark.parametrize("draw", ["stratified", "iid"])
def test_numerator_normaliser_and_their_gradients_are_unbiased(draw, uniform):
    """The mean of 600 estimates lies within five standard errors of the sum over all keys; a
    true one does so but for 6e-7 of the seeds. Variances are known, not estimated, and those
    of stratified draws are at most these.
    """
    found, truth, variance = estimates(draw, uniform)
    z = (found - truth[:, None]).sum(1) / variance.sum(1).sqrt()
    assert z.abs().max() < 5, z
    # Not by being constant: estimates differ, the error of each is of the size of its variance.
    ratio = (found - truth[:, None]).square().sum(1) / variance.sum(1)
    if draw == "iid":
        # A mean of 600 squares of errors with kurtosis ≤ 9: within 5·√(8/600) = 0.58 of 1.
        assert ((ratio - 1).abs() < 0.58).all(), ratio
    else:
        assert (ratio < 0.9).all() and (ratio > 0.02).all(), ratio  # stratification helps


def test_the_squared_error_falls_as_one_over_samples():
    """Small logits, uniform independent draws: the error of the ratio is that of its leading
    order, ∝ 1/n, up to O(1/n²). 16 → 256 samples: a factor of 16. A head's squared error, a
    mean over 3 correlated columns of 23 correlated queries, has a relative deviation below
    √2/√3 = 0.8: that of the quotient of two means over 300 heads is below 0.8·√(2/300) = 6.7%,
    five times which is 33%; the next order is of size 1/16 = 6%.
    """
    q, k, v = 0.3 * randn(1, 300, 23, 4, seed=1), randn(1, 300, 211, 4, seed=2), randn(
        1, 300, 211, 3, seed=3
    )  # fmt: skip
    truth = softmax(q, k, v, scale=0.5)
    errors = []
    for samples in (16, 256):
        mech = build(
            300, 300, 4, heavy=0, first=0, last=0, samples=samples, uniform=1.0, draw="iid"
        )
        errors.append((mech(q, k, v) - truth).square().mean().item())
    assert 16 / 1.4 < errors[0] / errors[1] < 16 * 1.4, errors


def test_heavy_keys_and_a_proposal_by_mass_beat_uniform_sampling_and_uniform_attention():
    """Keys of very different importance (an additive term of the logits, σ = 2): the error
    beside that of uniform attention, 0.98: both 0.16, proposal alone 0.30, heavy keys alone
    0.41, uniform sampling 1.27. Orders, not numbers, are claimed: unbiased sums alone are worth
    nothing here.
    """
    L = 331
    q, k, v = randn(1, 4, L, 8, seed=1), randn(1, 4, L, 8, seed=2), randn(1, 4, L, 8, seed=3)
    q[..., 0], k[..., 0] = 1.0, 2.0 * 8**0.5 * k[..., 0]
    truth = softmax(q, k, v, scale=8**-0.5)

    def error(mech):
        return ((mech(q, k, v) - truth).norm() / truth.norm()).item()

    full = error(build(4, 4, 8, heavy=32, samples=64))
    no_heavy = error(build(4, 4, 8, heavy=0, first=0, last=0, samples=96))
    plain = error(build(4, 4, 8, heavy=0, first=0, last=0, samples=96, uniform=1.0))
    none = error(build(4, 4, 8, heavy=32, samples=0))
    uniform = error(Uniform(head_dim=8, num_heads=4))
    assert full < no_heavy < none < uniform < plain, (
        full, no_heavy, none, plain, uniform,
    )  # fmt: skip


# ---- partial sums, options ----------------------------------------------------------------


def test_partial_sums_merge_with_exact_ones_over_other_keys():
    q, k, v = inputs(17)
    mech, exact = build(heavy=5, samples=9), sq.build("softmax", head_dim=D, num_heads=H,
                                                      num_kv_heads=KV)  # fmt: skip
    near = torch.arange(41).expand(2, 41) < 11
    far = mech.partial(q, k, v, key_mask=~near)
    close(far.output(), mech(q, k, v, key_mask=~near))
    whole = combine([exact.partial(q, k, v, key_mask=near), far])
    chosen = mech.select(q, k, Mask(key=~near), D**-0.5)
    total = near[:, None].double().expand(2, KV, 41).clone()
    total.scatter_add_(-1, chosen.index, chosen.log_weight.exp())
    wanted = ref_softmax(
        None, q, k, v, allowed=(total > 0).repeat_interleave(2, 1)[:, :, None],
        scale=D**-0.5, bias=total.log().repeat_interleave(2, 1)[:, :, None],
    )  # fmt: skip
    close(whole.output(), wanted)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heavy": -1}, "heavy=-1 must be an integer ≥ 0"),
        ({"samples": 2.5}, "samples=2.5 must be an integer ≥ 0"),
        ({"landmarks": 0}, "landmarks=0 must be an integer ≥ 1"),
        ({"uniform": 0.0}, "uniform=0.0 must be a number > 0 and ≤ 1"),
        ({"uniform": 1.5}, "uniform=1.5 must be a number > 0 and ≤ 1"),
        ({"draw": "idd"}, "draw='idd' is none of stratified, iid"),
        ({"heavy": 0, "samples": 0, "first": 0, "last": 0}, "leave no key to read"),
        ({"heavy": 2, "first": 2}, "first=2 and last=1 .* need heavy ≥ 3, given heavy=2"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(sq.OptionError, match=message):
        build(**options)


def test_causal_is_refused_with_the_reason():
    q, k, v = inputs()
    with pytest.raises(sq.UnsupportedError, match="leak the future"):
        build()(q, k, v, causal=True)
