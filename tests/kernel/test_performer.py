"""Performer and its family: what its estimators estimate, its gauges, draws, clip and options.

Statistical tests take heads for independent draws (each key/value head has its own) and give
every head the same q and k, so that N heads are N samples of one estimate. The estimate itself is
read off `partial`: with one key, den·exp(log_scale) is the kernel φ_q(q)·φ_k(k).

Closed forms, with x = √scale·q, y = √scale·k, z = x + y and M independent frequencies of
variance t_i along direction i (t = 1 but for oprf and derf), relative to exp(x·y):

    positive, oprf, derf   Var = (e^{−|z|²} ∏ t_i (2t_i − 1)^{−½} e^{2 t_i z_i²/(2t_i − 1)} − 1)/M
    hyperbolic             Var = (1 − e^{−|z|²})(e^{|z|²} − 1)/M
    trig                   Var = e^{|x−y|²}(1 − e^{−|x−y|²})²/M

(arXiv 2009.14794, Lemma 2, for M features in all, of which ± or cos/sin pairs count two.)
"""

import copy
import itertools
import math

import pytest
import torch
from torch import nn

import subquad as sq
from subquad.features.draws import chi_quantile, draw_projection
from subquad.features.gauges import GAUGES, JITTER, make_gauge, moments

F64 = torch.float64
D, M, N = 5, 14, 1009  # N heads = samples; two whole blocks of D and a cut one
ESTIMATORS = ("positive", "hyperbolic", "trig", "oprf", "derf")
SIGMAS = 5.0
"""Standard errors allowed. By the central limit theorem a mean leaves them once in 1.7e6."""


def randn(*shape, seed=0, size=1.0, dtype=F64):
    generator = torch.Generator().manual_seed(seed)
    return (size * torch.randn(shape, generator=generator, dtype=F64)).to(dtype)


def build(heads=1, dim=D, dtype=F64, kv=None, **options):
    mech = sq.build(
        "performer", head_dim=dim, num_heads=heads, num_kv_heads=kv, dtype=dtype, **options
    )
    return mech.eval()


def unit(*shape, seed=0):
    x = randn(*shape, seed=seed)
    return x / x.norm(dim=-1, keepdim=True)


def close(found, wanted, tolerance):
    error = (found.detach().double() - wanted.detach().double()).abs().max().item()
    size = wanted.detach().abs().max().item()
    assert error <= tolerance * size, f"differs by {error:.3e} of {size:.3e}"


# ---- (a) what is estimated ----------------------------------------------------------------


def pairs(norm=1.0):
    """Five x (5, D) against one y (1, D), |x|, |y| ≤ norm: parallel, orthogonal, opposite, …"""
    y = torch.zeros(1, D, dtype=F64)
    y[0, 0] = 1.0
    x = torch.zeros(5, D, dtype=F64)
    x[0, 0], x[1, 1], x[2, 0] = 1.0, 1.0, -0.9
    x[3:] = unit(2, D, seed=1) * torch.tensor([[0.6], [1.0]], dtype=F64)
    return norm * x, norm * y


def kernel_estimates(mech, x, y, scale):
    """(N, L) estimates of exp(x·y), one for each head."""
    heads = mech.num_heads
    q = (x / math.sqrt(scale)).expand(1, heads, *x.shape)
    k = (y / math.sqrt(scale)).expand(1, heads, *y.shape)
    part = mech.partial(q, k, k[..., :1], scale=scale)
    return (part.den * part.log_scale.exp())[0]


def calibrated(mech, seed=2):
    """The same fixed statistics for all heads."""
    if mech.config.uses_moments:
        q = randn(1, 1, 31, D, seed=seed, size=0.7) + 0.2
        k = randn(1, 1, 29, D, seed=seed + 1, size=0.4) - 0.3
        mech.calibrate(q.expand(1, mech.num_heads, -1, -1), k.expand(1, mech.num_heads, -1, -1))
    return mech


def samples(norm=1.0, features=M, heads=N, scale=0.7, **options):
    options.setdefault("statistics", "calibrated")
    mech = calibrated(build(heads, features=features, **options))
    x, y = pairs(norm)
    return mech, x, y, kernel_estimates(mech, x, y, scale) / (x @ y.mT).exp()[:, 0]


def relative_variance(mech, x, y, scale=0.7):
    """The closed form above times M, (L,); in the coordinates of the mechanism's gauge."""
    config, rotate, variance = mech.config, torch.eye(D, dtype=F64), torch.ones(D, dtype=F64)
    if config.uses_moments:
        gauge = mech._gauge(None, None, None, math.sqrt(scale))
        x = gauge.queries((x / math.sqrt(scale)).expand(mech.num_heads, -1, -1), math.sqrt(scale))[
            0
        ]
        y = gauge.keys((y / math.sqrt(scale)).expand(mech.num_heads, -1, -1), math.sqrt(scale))[0][
            0
        ]
        second = gauge.second[0]

        def best(level):  # minimises log of the second moment above, averaged over z² = level
            return ((3 + 2 * level) + ((3 + 2 * level) ** 2 - 8).sqrt()) / 4

        if config.estimator == "oprf":
            variance = best(second.diagonal().mean()).expand(D)
        elif config.estimator == "derf":
            values, rotate = torch.linalg.eigh(second)
            variance = best(values)
    z = x + y
    square = z.square().sum(-1)
    if config.estimator == "hyperbolic":
        return (1 - (-square).exp()) * (square.exp() - 1)
    if config.estimator == "trig":
        apart = (x - y).square().sum(-1)
        return apart.exp() * (1 - (-apart).exp()).square()
    along = (z @ rotate).square()
    a = 2 * variance - 1
    each = variance.log() - 0.5 * a.log() + 2 * variance * along / a
    return (each.sum(-1) - square).exp() - 1


@pytest.mark.parametrize("draw", ["iid", "orthogonal", "simplex"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_kernel_estimates_are_unbiased(estimator, draw):
    """The mean over N draws is exp(scale·q·k), true scale included, within 5 standard errors of
    the iid closed form, which coupled draws do not exceed (orthogonal: Theorem 2; simplex:
    arXiv 2301.13856, Theorem 3.1).
    """
    clip = {"clip": 1e-9} if estimator == "trig" else {}  # a clipped estimate is biased
    for norm in (0.5, 1.0):
        mech, x, y, found = samples(norm, estimator=estimator, draw=draw, **clip)
        if estimator == "trig":
            # den·exp(log_scale) is clipped from below at 1e-9 of the mass even so: keep the
            # pairs whose estimates are never negative.
            kept = found.amin(0) > 0.01
            assert kept.sum() >= 3 - (norm == 1.0)
            x, found = x[kept], found[:, kept]
        error = (relative_variance(mech, x, y) / M / N).sqrt()
        assert (error < 0.07).all()  # the test can see a bias of 35% anywhere, of 5% at norm 0.5
        assert ((found.mean(0) - 1).abs() <= SIGMAS * error + 1e-12).all()


@pytest.mark.parametrize("gauge", GAUGES[1:])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gauges_do_not_bias(estimator, gauge):
    clip = {"clip": 1e-9} if estimator == "trig" else {}
    mech, x, y, found = samples(0.5, estimator=estimator, gauge=gauge, **clip)
    kept = found.amin(0) > 0.01 if estimator == "trig" else torch.ones(5, dtype=torch.bool)
    assert kept.any()
    error = (relative_variance(mech, x[kept], y) / M / N).sqrt()
    assert ((found[:, kept].mean(0) - 1).abs() <= SIGMAS * error + 1e-12).all()


@pytest.mark.parametrize("features", [6, 42])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_variance_is_the_closed_form(estimator, features):
    """Sample variance over N iid draws, at |x|, |y| ≤ 0.35 where fourth moments are moderate.
    Its own standard error is estimated from the sample's fourth moment. At two M: 1/M.
    """
    mech, x, y, found = samples(
        0.35, features=features, heads=4001, estimator=estimator, draw="iid"
    )
    if estimator == "trig":
        assert found.min() > 0.02  # no estimate is clipped here
    squares = (found - found.mean(0)).square()
    error = squares.std(0) / math.sqrt(len(found))
    wanted = relative_variance(mech, x, y) / features
    assert ((squares.mean(0) - wanted).abs() <= SIGMAS * error + 1e-12).all()
    assert (error < 0.2 * wanted + 1e-4).all()


def test_coupled_draws_do_not_vary_more():
    """Orthogonal and simplex draws against the iid closed form, never above it; and at |z| = 0.5,
    where one block of D saves about a tenth, below it beyond doubt.
    """
    for norm, clear in ((0.35, True), (1.0, False)):
        for draw in ("orthogonal", "simplex"):
            mech, x, y, found = samples(
                norm, features=D, heads=8009, estimator="positive", draw=draw
            )
            squares = (found - found.mean(0)).square()
            error = squares.std(0) / math.sqrt(len(found))
            wanted = relative_variance(mech, x, y) / D
            assert (squares.mean(0) <= wanted + SIGMAS * error).all()
            if clear:
                assert squares.mean(0)[1] < wanted[1] - SIGMAS * error[1]


def test_hyperbolic_varies_less_than_positive():
    """Lemma 2 at equal numbers of features: the ratio is 1 − exp(−|z|²), here 0.1–0.4."""
    _, x, y, plain = samples(0.35, heads=4001, estimator="positive", draw="iid")
    _, _, _, paired = samples(0.35, heads=4001, estimator="hyperbolic", draw="iid")
    ratio = paired.var(0) / plain.var(0)
    wanted = 1 - (-(x + y).square().sum(-1)).exp()
    # Each variance has a relative error ≤ 5% here (fourth moments ≤ 11 times the square).
    assert ((ratio / wanted - 1).abs() < SIGMAS * math.sqrt(2) * 0.05).all()
    assert (ratio < 1).all()


def bessel_ratio(t, terms=80):
    """Λ_D(t) = Σ_n (t²/4)^n / (n! (D/2)_n), see `draw_projection`."""
    total = term = torch.ones_like(t)
    for n in range(1, terms):
        term = term * (t.square() / 4) / (n * (D / 2 + n - 1))
        total = total + term
    return total


@pytest.mark.parametrize("norms", ["sqrt_d", "quantile"])
def test_other_norms_are_biased_as_documented(norms):
    """The mean is e^{−|z|²/2}·mean_i Λ_D(R_i|z|), below 1 for z ≠ 0, and measurably so."""
    _, x, y, found = samples(1.0, estimator="positive", norms=norms)
    length = (x + y).norm(dim=-1)
    if norms == "sqrt_d":
        lengths = torch.tensor([math.sqrt(D)], dtype=F64)
    else:
        lengths = chi_quantile(torch.arange(1, M + 1) / (M + 1), D)
    wanted = (-length.square() / 2).exp() * bessel_ratio(length[:, None] * lengths).mean(-1)
    error = found.std(0) / math.sqrt(N)
    assert ((found.mean(0) - wanted).abs() <= SIGMAS * error).all()
    assert (wanted <= 1).all()
    assert found.mean(0)[0] < 1 - SIGMAS * error[0]  # |z| = 2: below, beyond doubt


def test_error_of_the_output_falls_like_the_root_of_features():
    """RMS error to softmax at |x| = |y| = 1/2 over 61 draws and M = 16…1024: slope −1/2.

    Heads are 61 independent draws whose mean squared errors scatter by up to 80% each, so that an
    RMS is known to 0.8/(2·√61) = 5%. A least-squares slope through four points that lie ln 4
    apart then has standard error 0.05/(√5·ln 4) = 0.016. The asymptotic law itself holds up to
    terms of relative size Var/M ≤ (e − 1)/16 = 11% at M = 16, which tilts the slope by at most
    0.11·1.5/(5·ln 4) = 0.024. Allowed: 5·0.016 + 0.024 = 0.104. (At norm 1 the same experiment
    gives −0.37 for positive features: the kernel's relative variance is e⁴ − 1 = 54, and M = 16
    to 1024 is not yet asymptotic.)
    """
    heads, L = 61, 13
    q, k = 0.5 * unit(1, 1, L, D, seed=3), 0.5 * unit(1, 1, 37, D, seed=4)
    v = randn(1, 1, 37, 3, seed=5)
    q, k, v = (t.expand(1, heads, -1, -1) for t in (q, k, v))
    truth = sq.attention(q, k, v, "softmax", scale=1.0)
    uniform = (v.mean(2, keepdim=True) - truth).square().mean().sqrt()
    for estimator in ("positive", "hyperbolic", "trig", "oprf", "derf"):
        sizes, errors = (16, 64, 256, 1024), []
        for features in sizes:
            mech = build(heads, features=features, estimator=estimator)
            errors.append((mech(q, k, v, scale=1.0) - truth).square().mean().sqrt())
        size, error = torch.tensor(sizes, dtype=F64).log(), torch.stack(errors).log()
        size = size - size.mean()
        slope = (size * error).sum() / size.square().sum()
        assert abs(slope + 0.5) < 0.104, f"{estimator}: {slope:.3f}"
        assert errors[-1] < uniform / 3, f"{estimator}: not much better than uniform attention"


@pytest.mark.parametrize("estimator", ["positive", "hyperbolic", "oprf", "derf", "relu"])
def test_rows_of_positive_estimators_sum_to_one(estimator):
    """Also at norms where features are useless, and under masks. Tolerance: a sum of 23 float64."""
    mech = build(2, features=M, estimator=estimator)
    q, k = randn(3, 2, 23, D, seed=6, size=3.0), randn(3, 2, 23, D, seed=7, size=3.0)
    mask = torch.rand(3, 23, generator=torch.Generator().manual_seed(0)) > 0.4
    mask[:, 0], mask[2] = True, False
    weights = mech.weights(q, k, key_mask=mask)
    assert (weights >= 0).all() and not weights[2].any()
    assert not weights.masked_select(~mask[:, None, None]).any()
    torch.testing.assert_close(weights[:2].sum(-1), torch.ones(2, 2, 23, dtype=F64))


# ---- (b) gauges ---------------------------------------------------------------------------


def gauge_data(B=2, H=6, KV=3, L=19, S=23):
    mix = randn(KV, D, D, seed=8)
    q = randn(B, H, L, D, seed=9) @ mix.repeat_interleave(H // KV, 0) + 1.5
    k = randn(B, KV, S, D, seed=10) @ mix.mT - 0.7
    return q, k


@pytest.mark.parametrize("kind", GAUGES)
def test_a_gauge_is_an_identity(kind):
    """x·y + λ + (row constant) = scale·q·k to float64 rounding: amplified by |T|·|T^-1|, which
    is below 1e3 here: 1e3·D·1e-16 < 1e-12.
    """
    q, k = gauge_data()
    scale = 0.37
    root = math.sqrt(scale)
    gauge = make_gauge(kind, moments(q, k), root)
    grouped = q.unflatten(1, (3, 2)).flatten(2, 3)
    x, (y, weight) = gauge.queries(grouped, root), gauge.keys(k, root)
    row = gauge.queries_offset(q, 3, root)
    close(x @ y.mT + weight[:, :, None] + row[..., None], scale * grouped @ k.mT, 1e-12)
    # And it does what its name says.
    centred_q, centred_k = kind in ("centre", "balance"), kind != "none"
    assert bool(x.mean(2).abs().max() < 1e-12) is centred_q
    assert bool(y.mean(2).abs().max() < 1e-12) is centred_k
    second = (x.mT @ x) / x.shape[2] + (y.mT @ y) / y.shape[2]
    cross = x.mean(2)[..., :, None] * y.mean(2)[..., None, :]
    close(gauge.second, second + cross + cross.mT, 1e-12)


def test_balance_makes_both_covariances_one_diagonal():
    """With the jitter in them, T(Σ_q + j_q)Tᵀ = T^-ᵀ(Σ_k + j_k)T^-1 = S exactly; without it, up
    to the jitter's share of the smallest eigenvalue.
    """
    q, k = gauge_data()
    stats = moments(q, k)
    gauge = make_gauge("balance", stats, 1.0)
    found = []
    for cov, turn in ((stats.cov_q, gauge.transform), (stats.cov_k, gauge.inverse)):
        level = JITTER * cov.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
        found.append(turn.mT @ (cov + level * torch.eye(D, dtype=F64)) @ turn)
    diagonal = torch.diag_embed(found[0].diagonal(dim1=-2, dim2=-1))
    close(found[0], diagonal, 1e-11)
    close(found[1], diagonal, 1e-11)
    # S minimises E|x|² + E|y|² over T: twice the nuclear norm of L_kᵀL_q.
    eye = torch.eye(D, dtype=F64)
    lower = [
        torch.linalg.cholesky(
            c + JITTER * c.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None] * eye
        )
        for c in (stats.cov_q, stats.cov_k)
    ]
    nuclear = torch.linalg.svdvals(lower[1].mT @ lower[0]).sum(-1)
    close(diagonal.diagonal(dim1=-2, dim2=-1).sum(-1), nuclear, 1e-11)


@pytest.mark.parametrize("kind", GAUGES)
def test_a_gauge_leaves_softmax_unchanged(kind):
    """At M = 2^15 gauged features give softmax: one draw's error at norm ≤ 1 is below 2%."""
    q, k = unit(1, 1, 7, D, seed=11), 0.5 * unit(1, 1, 11, D, seed=12) + 0.2
    v = randn(1, 1, 11, 3, seed=13)
    mech = build(features=2**15, gauge=kind, statistics="call")
    # Relative variance of a kernel estimate ≤ (e^4 − 1)/M, std 4%, averaged over 11 keys with
    # errors of either sign; the output's error is at most that of the kernel times max|v|.
    bound = SIGMAS * math.sqrt((math.exp(4) - 1) / 2**15) * v.abs().max()
    found, wanted = mech(q, k, v, scale=1.0), sq.attention(q, k, v, "softmax", scale=1.0)
    assert (found - wanted).abs().max() < bound


SPECS = [
    {"gauge": gauge, "estimator": estimator}
    for gauge in GAUGES
    for estimator in ("positive", "trig", "oprf", "derf")
    if not (gauge == "none" and estimator in ("positive", "trig"))
]


@pytest.mark.parametrize("options", SPECS, ids=lambda o: "-".join(o.values()))
def test_degenerate_heads_stay_finite(options):
    """Constant keys, constant queries, both; one token; D = 1; a row without keys; float32."""
    for dim in (1, D):
        mech = build(2, dim=dim, features=6, dtype=torch.float32, **options)
        for L, S in ((1, 1), (1, 7), (7, 1), (7, 7)):
            for flat_q, flat_k in ((True, False), (False, True), (True, True), (False, False)):
                q, k = randn(2, 2, L, dim, seed=14), randn(2, 2, S, dim, seed=15)
                q = q[:, :, :1].expand(-1, -1, L, -1) if flat_q else q
                k = k[:, :, :1].expand(-1, -1, S, -1) if flat_k else k
                q, k = (t.float().clone().requires_grad_() for t in (q, k))
                mask = torch.tensor([[True], [False]]).expand(2, S)
                out = mech(q, k, k, key_mask=mask)
                assert out.isfinite().all() and not out[1].any()
                for grad in torch.autograd.grad(out.sum(), (q, k)):
                    assert grad.isfinite().all()


def test_statistics_of_a_call_leave_padding_out():
    """Moments with a mask are those of the open tokens; where L = S of the queries too."""
    q, k = gauge_data(L=23)
    mask = torch.rand(2, 23, generator=torch.Generator().manual_seed(1)) > 0.4
    junk_q = q.masked_fill(~mask[:, None, :, None], float("nan"))
    junk_k = k.masked_fill(~mask[:, None, :, None], float("inf"))
    found = moments(junk_q, junk_k, mask)
    for row in range(2):
        open_ = mask[row]
        alone = moments(q[row : row + 1, :, open_], k[row : row + 1, :, open_])
        for name in ("mean_q", "mean_k", "cov_q", "cov_k"):
            close(getattr(found, name)[row], getattr(alone, name)[0], 1e-12)
    cross = moments(q[:, :, :7], junk_k, mask)  # L ≠ S: queries are not keys, all count
    close(cross.mean_q, moments(q[:, :, :7], k).mean_q, 1e-12)


@pytest.mark.parametrize("options", SPECS, ids=lambda o: "-".join(o.values()))
def test_batch_rows_do_not_influence_each_other(options):
    q, k = gauge_data()
    v = randn(2, 3, 23, 7, seed=16)
    mech = build(6, kv=3, features=6, **options)
    both = mech(q, k, v)
    for row in range(2):
        close(both[row], mech(q[row], k[row], v[row]), 1e-12)
    other = [t.clone() for t in (q, k, v)]
    for t in other:
        t[1] = 3 * t[1].flip(-1) + 1
    assert torch.equal(mech(*other)[0], both[0])


# ---- (c) calibration ----------------------------------------------------------------------

STATISTICS = ("tokens", "mean_q", "mean_k", "cov_q", "cov_k")


@pytest.mark.parametrize("L", [31, 17])
def test_calibration_in_parts_equals_calibration_at_once(L):
    """Any split along batch or calls gives the moments of all tokens together; masked ones do
    not count. Tolerance: sums of ≤ 200 float64, combined at most 6 times.
    """
    q, k = gauge_data(B=6, L=L, S=31)
    mask = torch.rand(6, 31, generator=torch.Generator().manual_seed(2)) > 0.3
    mask[4] = False  # one batch without any key

    def calibrate(parts, order=1):
        mech = build(6, kv=3, features=6, gauge="balance", statistics="calibrated")
        for part in [slice(a, b) for a, b in itertools.pairwise(parts)][::order]:
            mech.calibrate(q[part], k[part], key_mask=mask[part])
        return mech

    once = calibrate([0, 6])
    keys = int(mask.sum())
    assert once.tokens.tolist() == [2 * (keys if L == 31 else 6 * L), keys]
    opened = k.transpose(1, 2)[mask].transpose(0, 1)
    close(once.mean_k, opened.mean(1), 1e-13)
    close(once.cov_k, torch.stack([torch.cov(h.T, correction=0) for h in opened]), 1e-12)
    for parts, order in (([0, 1, 2, 3, 4, 5, 6], 1), ([0, 4, 5, 6], -1), ([0, 5, 6], 1)):
        split = calibrate(parts, order)
        for name in STATISTICS:
            close(getattr(split, name).double(), getattr(once, name).double(), 1e-12)


def test_calibration_lifecycle():
    options = {"features": 6, "gauge": "balance", "estimator": "derf", "statistics": "calibrated"}
    q, k = gauge_data()
    v = randn(2, 3, 23, 7, seed=16)
    mech = build(6, kv=3, **options)
    for call in (
        lambda: mech(q, k, v),
        lambda: mech(q, k, v, causal=True),
        lambda: mech.prefill(q, k, v),
        lambda: mech.partial(q, k, v),
    ):
        with pytest.raises(
            sq.CalibrationError, match=r"needs calibrate\(q, k\) before the first call"
        ):
            call()
    mech.calibrate(q, k, key_mask=torch.zeros(2, 23, dtype=torch.bool))
    with pytest.raises(sq.CalibrationError):  # no key has been seen
        mech(q, k, v)
    mech.calibrate(q, k)
    wanted = mech(q, k, v, causal=True)
    assert wanted.isfinite().all()
    twin = build(6, kv=3, **options)
    twin.load_state_dict(mech.state_dict())
    assert torch.equal(twin(q, k, v, causal=True), wanted)
    fresh = build(6, kv=3, **options).state_dict()
    twin.load_state_dict(fresh)  # back to nothing calibrated: not silently the identity
    with pytest.raises(sq.CalibrationError):
        twin(q, k, v)
    copy.deepcopy(mech).reset_parameters()
    assert torch.equal(mech(q, k, v, causal=True), wanted)
    mech.reset_parameters()
    with pytest.raises(sq.CalibrationError):
        mech(q, k, v)
    with pytest.raises(sq.OptionError, match="calibrate needs statistics=calibrated and a gauge"):
        build(6, kv=3, features=6).calibrate(q, k)


def test_compiled_right_after_loading():
    q, k = gauge_data(S=19)
    mech = build(6, kv=3, features=6, gauge="centre", statistics="calibrated")
    mech.calibrate(q, k)
    twin = build(6, kv=3, features=6, gauge="centre", statistics="calibrated")
    twin.load_state_dict(mech.state_dict())
    compiled = torch.compile(twin, backend="eager", fullgraph=True)
    close(compiled(q, k, k, causal=True), mech(q, k, k, causal=True), 1e-12)
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_module_in_half_precision_counts_and_balances_exactly(dtype):
    """Counts stay integers beyond 65504, and T·T^-1 = 1 to float32 rounding: 2^-24·D·cond(T),
    cond(T) < 1e3 here.
    """
    mech = build(1, features=6, dtype=torch.float32, gauge="balance", statistics="calibrated")
    mech = mech.to(dtype)
    q = randn(1, 1, 70001, D, seed=17, dtype=dtype)
    mech.calibrate(q, q)
    mech.calibrate(q, q)
    assert mech.tokens.tolist() == [140002, 140002]
    gauge = mech._gauge(q, q, None, 1.0)
    product = gauge.transform.float() @ gauge.inverse.float().mT
    assert (product - torch.eye(D)).abs().max() < 2**-24 * D * 1e3
    out = mech(q[:, :, :7], q[:, :, :7], q[:, :, :7], causal=True)
    assert out.dtype == dtype and out.isfinite().all()


def test_statistics_of_the_call_are_refused_where_they_would_leak():
    q = randn(1, 2, 7, D)
    for options in ({"gauge": "centre"}, {"estimator": "oprf"}, {"estimator": "derf"}):
        mech = build(2, features=6, statistics="call", **options)
        for request, call in (
            ("causal", lambda: mech(q, q, q, causal=True)),  # noqa: B023  # called at once
            ("prefill", lambda: mech.prefill(q, q, q)),  # noqa: B023
            ("step", lambda: mech.step(q, q, q, None)),  # noqa: B023
        ):
            with pytest.raises(
                sq.UnsupportedError, match="leak the future; use statistics=calibrated"
            ) as caught:
                call()
            assert "softmax" in caught.value.alternatives or request != "causal"
            assert caught.value.alternatives and "These do:" in str(caught.value)
            assert caught.value.mechanism == "performer"


# ---- (d) redraw ---------------------------------------------------------------------------


def test_redraw():
    q = randn(1, 2, 7, D)
    mech = build(2, features=6, redraw=3)
    other = build(2, features=6, redraw=3)  # another rank
    first, address = mech.projection.clone(), mech.projection.data_ptr()
    mech.eval()
    for _ in range(5):
        mech(q, q, q)
    assert torch.equal(mech.projection, first)
    mech.train()
    other.train()
    draws = []
    for _ in range(9):
        for each in (mech, other):
            each(q, q, q)
        mech.weights(q, q)  # looking is no training call
        assert torch.equal(mech.projection, other.projection)
        draws.append(mech.projection.clone())
    same = [torch.equal(a, b) for a, b in itertools.pairwise(draws)]
    assert torch.equal(draws[0], first)
    assert same == [True, True, False, True, True, False, True, True]  # three calls a draw
    assert mech.projection.data_ptr() == address
    assert int(mech.draw_index) == 2
    # A second draw is a valid one: blocks orthogonal.
    block = draws[3][0, :D]
    gram = block @ block.T
    close(gram, torch.diag(gram.diagonal()), 1e-12)
    twin = build(2, features=6, redraw=3, seed=5)
    twin.load_state_dict(mech.state_dict())
    assert torch.equal(twin.projection, mech.projection)
    assert torch.equal(twin(q, q, q), mech.eval()(q, q, q))
    mech.redraw()
    twin.redraw()
    assert not torch.equal(twin.projection, mech.projection)  # seeds differ: so does what follows
    other.redraw()
    assert torch.equal(other.projection, mech.projection)
    mech.reset_parameters()
    assert torch.equal(mech.projection, first)


def test_redraw_between_forward_and_backward_does_not_change_gradients():
    for options in ({}, {"estimator": "relu"}, {"estimator": torch.relu}, {"gauge": "centre"}):
        grads = []
        for again in (False, True):
            mech = build(2, features=6, **options)
            q = randn(1, 2, 7, D).requires_grad_()
            out = mech(q, q, q)
            if again:
                mech.redraw()
            grads.append(torch.autograd.grad(out.square().sum(), q)[0])
        assert torch.equal(*grads)


def test_every_head_has_its_own_draw_and_the_seed_decides():
    omega = build(3, features=6, seed=11).projection
    assert not torch.equal(omega[0], omega[1])
    assert torch.equal(omega, build(3, features=6, seed=11).projection)
    assert not torch.equal(omega, build(3, features=6, seed=12).projection)
    assert torch.equal(omega, draw_projection(6, D, heads=3, seed=11, dtype=F64))


# ---- (e) clip -----------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("clip", [0.01, 0.3])
def test_clipped_rows_stay_within_their_bound(causal, clip):
    """|cos| ≤ 1, so that |Σ_j w_j cos_ij v_j| ≤ max|v|·Σ_j w_j, and the normaliser is at least
    clip·Σ_j w_j: |out| ≤ max|v|/clip, for any input. float32 rounding of ≤ 131·12 terms adds
    1e-4 of it. The inputs are large, and some rows do leave the hull of v (the clip is needed).
    """
    q, k = (randn(2, 3, 131, D, seed=n, size=4.0, dtype=torch.float32) for n in (18, 19))
    v = randn(2, 3, 131, 7, seed=20, dtype=torch.float32)
    for options in ({"estimator": "trig"}, {"estimator": "trig", "gauge": "balance"}):
        if causal and "gauge" in options:
            continue
        mech = build(3, features=12, dtype=torch.float32, clip=clip, **options)
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out = mech(*leaves, causal=causal)
        assert out.isfinite().all()
        assert out.abs().max() <= v.abs().max() / clip * (1 + 1e-4)
        if clip == 0.01:
            assert out.abs().max() > 2 * v.abs().max()
        for grad in torch.autograd.grad(out.sum(), leaves):
            assert grad.isfinite().all()
    weights = build(3, features=12, dtype=torch.float32, clip=clip, estimator="trig").weights(q, k)
    # A clipped row shrinks: its weights sum to less than one, to at most one elsewhere.
    sums = weights.sum(-1)
    assert (sums < 1 + 1e-3 / clip * 0.1).all() and (sums < 0.9).any()


# ---- (f) spectral maps --------------------------------------------------------------------


def distance(q, k):
    return q[..., :, None, :] - k[..., None, :, :]


SIMILARITIES = {
    "softmax": ({}, lambda d, q, k: (q @ k.mT).exp()),
    "gaussian": ({"lengthscale": 0.8}, lambda d, q, k: (-d.square().sum(-1) / (2 * 0.64)).exp()),
    "laplace": ({"lengthscale": 1.3}, lambda d, q, k: (-d.abs().sum(-1) / 1.3).exp()),
    "matern": (
        {"nu": 1.5, "lengthscale": 1.1},
        lambda d, q, k: (1 + (t := 3**0.5 * d.norm(dim=-1) / 1.1)) * (-t).exp(),
    ),
}


def spectral_case(spectral, exact, dim, scale=0.49, weigh=None):
    """Attention by the map against attention by the exact kernel, bound derived below.

    The map estimates κ_ij = β_i γ_j K_ij/Z by a mean of n cosines: by Hoeffding within
    ε = √(2 ln(2·pairs/1e-9)/n) for all pairs at once. out = Σ w κ̂ v/Σ w κ̂ with w = 1/γ, so that
    |out − exact| ≤ 2 ε Σ_j w_j max|v| / (Σ_j w_j κ_ij − ε Σ_j w_j).
    """
    q, k = (0.8 * unit(1, 2, n, dim, seed=s) / math.sqrt(scale) for n, s in ((7, 21), (11, 22)))
    v = randn(1, 2, 11, 3, seed=23)
    x, y = q * math.sqrt(scale), k * math.sqrt(scale)
    mech = build(2, dim=dim, features=spectral.features, estimator=spectral, clip=0.01)
    kernel = exact(distance(x, y), x, y)
    wanted = kernel @ v / kernel.sum(-1, keepdim=True)
    w = (-spectral.log_gamma(y)).exp()
    decay = spectral.log_beta(x)[..., None] + spectral.log_gamma(y)[..., None, :]
    kappa = kernel * (decay - spectral.log_mass).exp()
    epsilon = math.sqrt(2 * math.log(2 * 77 / 1e-9) / (spectral.features // 2))
    room = (w[..., None, :] * kappa).sum(-1) - epsilon * w.sum(-1, keepdim=True)
    seen = w.sum(-1, keepdim=True)
    bound = 2 * epsilon * seen * v.abs().max() / room
    for causal in (False, True):
        if causal:
            kernel, v, y = kernel[..., :7].tril(), v[:, :, :7], y[:, :, :7]
            wanted = kernel @ v / kernel.sum(-1, keepdim=True)
            w, kappa = w[..., :7], kappa[..., :7]
            seen = (w[..., None, :] * torch.ones(7, 7, dtype=F64).tril()).sum(-1)
            room = (w[..., None, :] * kappa).tril().sum(-1) - epsilon * seen
            bound = 2 * epsilon * seen * v.abs().max() / room
        out = mech(q, k[:, :, : v.shape[2]], v, scale=scale, causal=causal)
        sure = room > 2 * mech.config.clip * seen  # elsewhere the clip might bind: no bound
        assert sure.all() or causal
        assert sure.double().mean() > 0.3
        assert ((out - wanted).abs().amax(-1) <= bound + 1e-12)[sure].all()
        uniform = (v.mean(2, keepdim=True) - wanted).abs().max()
        assert (out - wanted).abs().max() < uniform / 3 or causal
    part = mech.partial(q, k, randn(1, 2, 11, 3), scale=scale)
    found = part.den * part.log_scale.exp()  # the true sum of the kernel, Z and β included
    truth = exact(distance(x, k * math.sqrt(scale)), x, k * math.sqrt(scale)).sum(-1)
    slack = epsilon * ((-spectral.log_gamma(k * math.sqrt(scale))).exp().sum(-1, keepdim=True))
    slack = slack * (spectral.log_mass - spectral.log_beta(x)).exp()
    assert ((found - truth).abs() <= slack).all()


@pytest.mark.parametrize("name", SIMILARITIES)
def test_spectral_estimators_converge_to_their_kernel(name):
    options, exact = SIMILARITIES[name]
    spectral = sq.features.spectral(name, dim=3, features=2**16, dtype=F64, seed=1, **options)
    spectral_case(spectral, exact, 3)


@pytest.mark.parametrize(
    ("sim", "exact"),
    [
        (lambda x, y: (x * y).exp(), lambda d, q, k: (q @ k.mT).exp()),
        # Attends to what lies 0.7 further on: F is complex, phases and Z matter.
        (
            lambda x, y: (-(x - y + 0.7).square() / 2).exp(),
            lambda d, q, k: (-(d + 0.7).square().sum(-1) / 2).exp(),
        ),
    ],
    ids=["softmax", "shifted"],
)
def test_a_similarity_that_is_no_function_of_the_distance(sim, exact):
    """The general recipe: two frequencies, a phase, decays β and γ, Z."""
    spectral = sq.features.spectral(sim, 1.0, 1.0, dim=2, features=2**18, separable=True, dtype=F64)
    assert not torch.equal(spectral.omega_q, -spectral.omega_k)
    spectral_case(spectral, exact, 2)


def test_spectral_options():
    spectral = sq.features.spectral("gaussian", dim=3, features=12)
    with pytest.raises(sq.OptionError, match="dim=3, head_dim=5"):
        build(features=12, estimator=spectral)
    with pytest.raises(sq.OptionError, match="must equal the SpectralMap's 12"):
        build(dim=3, features=14, estimator=spectral)
    with pytest.raises(sq.OptionError, match="norms and learned do not apply"):
        build(dim=3, features=12, estimator=spectral, redraw=2)
    with pytest.raises(sq.OptionError, match="norms and learned do not apply"):
        build(dim=3, features=12, estimator=spectral, draw="iid")


# ---- (g) options --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": 0}, "features=0 must be an integer ≥ 1"),
        ({"features": 2.5}, "features=2.5 must be"),
        ({"estimator": "positiv"}, "did you mean 'positive'"),
        ({"estimator": 3}, "estimator=3 is none of positive, hyperbolic, .* or a function"),
        ({"draw": "ortogonal"}, "did you mean 'orthogonal'"),
        ({"norms": "sqrt"}, "did you mean 'sqrt_d'"),
        ({"gauge": "center"}, "did you mean 'centre'"),
        ({"statistics": "calls"}, "did you mean 'call'"),
        ({"redraw": 0}, "redraw=0 must be"),
        ({"spread": -1.0, "estimator": "derf"}, "spread=-1.0 must be"),
        ({"spread": 2.0}, "spread is an option of estimator=derf"),
        ({"clip": 0.0}, "clip=0.0 must be"),
        ({"clip": 1.5}, "clip=1.5 must be"),
        ({"features": 7, "estimator": "trig"}, "features=7 must be even: trig takes them in pairs"),
        ({"features": 7, "estimator": "hyperbolic"}, "features=7 must be even: hyperbolic"),
        ({"gauge": "balance", "estimator": "relu"}, "gauge='balance' changes this kernel"),
        ({"gauge": "centre", "estimator": torch.relu}, "gauge='centre' changes this kernel"),
        ({"feature": 8}, r"unknown option 'feature' \(did you mean 'features'"),
    ],
)  # fmt: skip
def test_wrong_options(options, message):
    with pytest.raises(sq.OptionError, match=message):
        build(**options)


def test_all_problems_are_reported_at_once():
    with pytest.raises(sq.OptionError) as caught:
        wrong = {"draw": "none", "norms": "l2", "clip": 2.0, "redraw": -1, "spread": 1.0}
        build(features=7, estimator="trig", **wrong)
    for text in ("must be even", "draw", "norms", "clip=2.0", "redraw=-1", "spread is an option"):
        assert text in str(caught.value)


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_a_scale_that_cannot_be_split_is_refused(scale):
    q = randn(1, 1, 3, D)
    with pytest.raises(sq.OptionError, match="must be > 0: it is split between q and k"):
        build(features=6)(q, q, q, scale=scale)


def test_spread_of_the_proposal():
    """derf's variance along eigenvectors of the second moment is 1 + spread·λ; unbiased still."""
    mech, _, _, found = samples(0.5, estimator="derf", spread=2.0, draw="iid")
    gauge = mech._gauge(None, None, None, math.sqrt(0.7))
    omega, _ = mech._proposal(mech.projection, gauge)
    drawn = omega.flatten(0, 1)
    covariance = drawn.mT @ drawn / len(drawn)
    wanted = torch.eye(D, dtype=F64) + 2.0 * gauge.second[0]
    # A sample covariance of 14126 Gaussian vectors: entries within 5·√2·max var/√n = 6%.
    assert (covariance - wanted).abs().max() < SIGMAS * math.sqrt(2 / len(drawn)) * wanted.max()
    error = found.std(0) / math.sqrt(N)
    assert ((found.mean(0) - 1).abs() <= SIGMAS * error).all()


# ---- functions as estimators --------------------------------------------------------------


def test_a_learned_module_is_an_estimator():
    """Its parameters are the mechanism's, get gradients, move and load with it; and a module in
    half precision is called in its own dtype.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 6, dtype=F64), nn.Softplus())
    mech = build(2, features=6, estimator=net)
    assert {name for name, _ in mech.named_parameters()} == {"kernel.0.weight", "kernel.0.bias"}
    q = randn(1, 2, 7, D)
    mech(q, q, q).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in mech.parameters())
    assert not mech.capabilities.functional
    with pytest.raises(sq.UnsupportedError, match="learned parameters"):
        sq.attention(q, q, q, sq.PerformerConfig(features=6, estimator=net))
    twin = copy.deepcopy(mech)
    with torch.no_grad():
        net[0].weight.mul_(2.0)
    assert not torch.equal(twin(q, q, q), mech(q, q, q))
    half = copy.deepcopy(mech).bfloat16()
    assert half(q.bfloat16(), q.bfloat16(), q.bfloat16()).dtype == torch.bfloat16


# ---- learned frequencies --------------------------------------------------------------------

LEARNED = {
    "positive": {},
    "hyperbolic": {"estimator": "hyperbolic"},
    "trig": {"estimator": "trig"},
    "oprf": {"estimator": "oprf", "statistics": "calibrated"},
    "derf": {"estimator": "derf", "gauge": "balance", "statistics": "calibrated"},
    "relu": {"estimator": "relu"},
    "function": {"estimator": torch.nn.functional.softplus},
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("options", LEARNED.values(), ids=LEARNED)
def test_gradients_reach_learned_frequencies(options, causal):
    mech = build(2, kv=1, dim=3, features=4, learned=True, **options)
    q, k, v = (randn(1, heads, 5, 3, seed=i, size=0.5) for i, heads in enumerate((2, 1, 1)))
    if mech.calibrates_for(mech.config):
        mech.calibrate(q, k)
    mech.requires_grad_(True)

    def call(omega):
        return torch.func.functional_call(
            mech, {"projection": omega}, (q, k, v), {"causal": causal}
        )

    assert torch.autograd.gradcheck(call, mech.projection)


def test_learned_frequencies_start_as_drawn_ones_and_share_their_checkpoints():
    q = randn(1, 2, 7, D)
    drawn, learned = build(2, features=6), build(2, features=6, learned=True)
    assert torch.equal(drawn(q, q, q), learned(q, q, q))
    assert [name for name, _ in learned.named_parameters()] == ["projection"]
    optimiser = torch.optim.SGD(learned.parameters(), lr=0.1)
    learned(q, q, q).square().sum().backward()
    optimiser.step()
    assert not torch.equal(drawn(q, q, q), learned(q, q, q))
    drawn.load_state_dict(learned.state_dict())
    assert torch.equal(drawn(q, q, q), learned(q, q, q))
    learned.reset_parameters()
    learned.load_state_dict(drawn.state_dict())
    assert torch.equal(drawn(q, q, q), learned(q, q, q))


def test_what_learned_frequencies_refuse():
    with pytest.raises(sq.OptionError, match="redraw=3 would throw away what learned=true"):
        build(features=6, learned=True, redraw=3)
    with pytest.raises(sq.OptionError, match="learned='yes' must be true or false"):
        build(features=6, learned="yes")
    q = randn(1, 2, 7, D)
    with pytest.raises(sq.UnsupportedError, match="ω are learned parameters"):
        sq.attention(q, q, q, "performer(learned=true)")


# ---- (h) merging trig ---------------------------------------------------------------------


@pytest.mark.parametrize("gauge", ["none", "centre"])
def test_partials_of_trig_merge_where_the_clip_does_not_bind(gauge):
    """Small norms: every part's normaliser is near its mass. Gradients too."""
    options = {"gauge": gauge, "statistics": "calibrated"} if gauge != "none" else {}
    mech = build(6, kv=3, features=64, estimator="trig", **options)
    q, k = (t * 0.1 for t in gauge_data())
    v = randn(2, 3, 23, 7, seed=16)
    if gauge != "none":
        mech.calibrate(q, k)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    mask = torch.rand(2, 23, generator=torch.Generator().manual_seed(3)) > 0.3
    mask[0, :11] = False
    whole = mech(*leaves, key_mask=mask)
    cuts = (slice(0, 11), slice(11, 12), slice(12, 23))

    def partial(mech, c):
        return mech.partial(leaves[0], leaves[1][:, :, c], leaves[2][:, :, c], key_mask=mask[:, c])

    parts = [partial(mech, c) for c in cuts]
    free = build(6, kv=3, features=64, estimator="trig", clip=1e-9, **options)
    free.load_state_dict(mech.state_dict())
    for c, part in zip(cuts, parts, strict=True):  # the clip does not bind
        assert torch.equal(part.den, partial(free, c).den)
    merged = sq.merge(parts)
    close(merged, whole, 1e-9)  # normalisers ≥ 0.3 of the mass: rounding 1e-14, amplified by 3
    cotangent = randn(*whole.shape, seed=24)
    for a, b in zip(
        torch.autograd.grad(merged, leaves, cotangent),
        torch.autograd.grad(whole, leaves, cotangent),
        strict=True,
    ):
        close(a, b, 1e-9)
