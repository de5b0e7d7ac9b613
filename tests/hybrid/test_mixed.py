"""Different mechanisms in different heads: heads, key/value heads, scales, states, errors."""

import pytest
import torch

import subquad as sq
from subquad import registry
from subquad.attention.base import Absent
from subquad.options import Part, Spec, parse_spec

H, HKV, L, S, D, V = 6, 3, 23, 29, 5, 7
F64 = torch.float64


def build(spec, heads=H, kv=HKV, **arguments):
    sizes = {"head_dim": D, "num_heads": heads, "num_kv_heads": kv, "dtype": F64}
    return sq.build(spec, **{**sizes, **arguments}).eval()


def inputs(heads=H, kv=HKV, queries=L, keys=L, seed=1):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, heads, queries, D), (2, kv, keys, D), (2, kv, keys, V))
    return [torch.randn(shape, generator=generator, dtype=F64) for shape in shapes]


def counts(mech):
    return [part.num_heads for part in mech.parts]


# ---- which heads, and what they are given --------------------------------------------------


def test_every_head_is_its_parts_own_attention():
    # the same operations on the same numbers: equal to the bit
    mech = build("mixed(softmax*2, performer(features=11)*4)", seed=5)
    q, k, v = inputs(queries=17)
    exact = build("softmax", 2, 1)
    random = build("performer(features=11)", 4, 2, seed=6)
    wanted = [exact(q[:, :2], k[:, :1], v[:, :1]), random(q[:, 2:], k[:, 1:], v[:, 1:])]
    assert torch.equal(mech(q, k, v), torch.cat(wanted, 1))


def test_equal_parts_draw_differently():
    mech = build("mixed(performer(features=11)*2, performer(features=11)*2, softmax)", seed=5)
    first, second = mech.parts[0].projection, mech.parts[1].projection
    assert first.shape == second.shape and not torch.equal(first, second)
    assert torch.equal(first, build("performer(features=11)", 2, 1, seed=5).projection)


@pytest.mark.parametrize("scale", [None, 0.3])
def test_each_part_has_its_own_default_scale(scale):
    mech = build("mixed(gaussian(features=7)*2, softmax)")
    q, k, v = inputs()
    gauss, exact = build("gaussian(features=7)", 2, 1), build("softmax", 4, 2)
    own = (1.0, D**-0.5) if scale is None else (scale, scale)
    wanted = [
        gauss(q[:, :2], k[:, :1], v[:, :1], scale=own[0]),
        exact(q[:, 2:], k[:, 1:], v[:, 1:], scale=own[1]),
    ]
    assert torch.equal(mech(q, k, v, scale=scale), torch.cat(wanted, 1))


@pytest.mark.parametrize("causal", [False, True])
def test_heads_can_be_assigned_to_parts(causal):
    """In any order, with all the query heads of each key/value head."""
    mech = build("mixed(local(window=3), performer(features=11), kv_heads=[[2, 0], [1]])", seed=5)
    q, k, v = inputs(queries=L)
    near, random = build("local(window=3)", 4, 2), build("performer(features=11)", 2, 1, seed=6)
    wanted = torch.empty(2, H, L, V, dtype=F64)
    wanted[:, [4, 5, 0, 1]] = near(q[:, [4, 5, 0, 1]], k[:, [2, 0]], v[:, [2, 0]], causal=causal)
    wanted[:, [2, 3]] = random(q[:, [2, 3]], k[:, [1]], v[:, [1]], causal=causal)
    assert torch.equal(mech(q, k, v, causal=causal), wanted)
    assert counts(mech) == [4, 2] and "kv_heads=[[2, 0], [1]]" in repr(mech)


def test_assigned_heads_keep_their_places_in_states_and_calibration():
    """The same parts with the heads of the call permuted are the consecutive mix."""
    order, queries = [1, 2, 0], [2, 3, 4, 5, 0, 1]
    own = "performer(features=11, gauge=centre, statistics=calibrated)"
    mixes = [
        build(f"mixed(softmax, {own}, kv_heads=[[1], [2, 0]])"), build(f"mixed(softmax*2, {own}*4)")
    ]  # fmt: skip
    q, k, v = inputs()
    calls = [(q, k, v), (q[:, queries], k[:, order], v[:, order])]
    found = []
    for mech, call in zip(mixes, calls, strict=True):
        mech.calibrate(*call[:2])
        out, state = mech.prefill(*(t[:, :, :17] for t in call))
        rest, state = mech.step(*(t[:, :, 17:] for t in call), state)
        read, _ = mech.step(call[0], None, None, state)
        found.append(torch.cat([out, rest, read], 2))
    assert torch.equal(found[0][:, queries], found[1])


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("mixed(softmax, local, kv_heads=[0, 1])", "kv_heads=(0, 1) must be a list of indices for"),
        ("mixed(softmax, local, kv_heads=[[0, 1], []])", "must be a list of indices for each part"),
        ("mixed(softmax, local, kv_heads=[[0, 1, 2]])", "[[0, 1, 2]] has 1 lists for 2 parts"),
        (
            "mixed(softmax, local, kv_heads=[[0, 1], [1]])",
            "must name each of the heads 0 to 2 once",
        ),
        ("mixed(softmax, local, kv_heads=[[0], [1]])", "2 key/value heads, num_kv_heads is 3"),
        ("mixed(softmax*4, local, kv_heads=[[0], [1, 2]])", "softmax*4 has 2 query heads by"),
    ],
)
def test_assignments_that_do_not_fit_say_why(spec, words):
    with pytest.raises(sq.OptionError) as caught:
        build(spec)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "heads", "kv", "wanted"),
    [
        ("mixed", 6, 6, [3, 3]),
        ("mixed", 7, 7, [4, 3]),
        ("mixed", 2, 2, [1, 1]),
        ("mixed", 6, 3, [4, 2]),
        ("mixed(softmax, performer*2)", 6, 3, [4, 2]),
        ("mixed(softmax*2, performer*2, gaussian)", 11, 11, [2, 2, 7]),
        ("mixed(softmax, performer, gaussian, local*1)", 9, 9, [3, 3, 2, 1]),
        ("mixed(softmax)", 6, 2, [6]),
    ],
)
def test_parts_without_a_count_share_what_is_left(spec, heads, kv, wanted):
    mech = build(spec, heads, kv)
    assert counts(mech) == wanted
    assert [part.count for part in mech.config.parts] == wanted
    assert sum(part.num_kv_heads for part in mech.parts) == kv
    q, k, v = inputs(heads, kv)
    assert mech(q, k, v, causal=True).shape == (2, heads, L, V)


@pytest.mark.parametrize(
    ("spec", "kv", "words"),
    [
        ("mixed(softmax*2, performer*3)", 6, "softmax*2, performer*3 have 5 heads, num_heads is 6"),
        ("mixed(softmax*2, performer*5)", 6, "softmax*2, performer*5 have 7 heads, num_heads is 6"),
        ("mixed(softmax*7, performer)", 6, "softmax*7, performer have 7 heads, num_heads is 6"),
        ("mixed(softmax*6, performer)", 6, "0 key/value heads are left for 1 parts without a"),
        ("mixed(softmax, performer)", 1, "1 key/value heads are left for 2 parts without a count"),
        ("mixed(softmax*3, performer*3)", 3, "softmax*3, performer*3: the number of heads must be"),
        ("mixed(softmax*3, performer)", 3, "a multiple of 2: 6 query heads share 3 key/value"),
    ],
)
def test_counts_that_do_not_fit_name_both_numbers(spec, kv, words):
    with pytest.raises(sq.OptionError) as caught:
        build(spec, kv=kv)
    assert words in str(caught.value)


def test_sizes_are_handed_to_the_parts():
    mech = build("mixed(softmax, additive)", value_dim=V, embed_dim=30, max_length=37)
    assert [(p.value_dim, p.embed_dim, p.max_length) for p in mech.parts] == [(V, 30, 37)] * 2
    assert next(name for name, _ in mech.named_parameters()) == "parts.1.query_weight"


def test_dropout_of_a_part_follows_the_mode():
    mech = build("mixed(softmax(dropout=0.5)*4, performer(features=11))").train()
    q, k, v = inputs()
    one, other = mech(q, k, v), mech(q, k, v)
    assert not torch.equal(one[:, :4], other[:, :4]) and torch.equal(one[:, 4:], other[:, 4:])
    mech.eval()
    assert torch.equal(mech(q, k, v), mech(q, k, v))


# ---- options -------------------------------------------------------------------------------


def test_many_ways_of_writing_one_config():
    wanted = parse_spec("mixed(performer(features=64)*4, softmax)")
    ways = [
        "mixed:performer(features=64)*4,softmax",
        "mixed(parts=['performer(features=64)*4', softmax()])",
        sq.MixedConfig(parts=("performer(features=64)*4", "softmax")),
        sq.MixedConfig(parts=[(sq.PerformerConfig(features=64), 4), sq.SoftmaxConfig()]),
        sq.MixedConfig(parts=(Part(Spec("performer", {"features": 64}), 4), Spec("softmax"))),
        Spec("mixed", parts=(Part(Spec("performer", {"features": 64}), 4), Part(Spec("softmax")))),
    ]
    for way in [wanted, *ways]:
        config = sq.describe(way).config
        assert str(config) == str(wanted) == "mixed(performer(features=64)*4, softmax)"
        assert config == sq.describe(wanted).config
        assert hash(config) == hash(sq.describe(wanted).config)
    # options that equal their defaults are no difference
    assert sq.describe("mixed(performer(features=256), local())").config == sq.MixedConfig(
        parts=("performer", "local")
    )
    keyword = sq.build("mixed", head_dim=D, num_heads=5, parts=("performer*4", "softmax"))
    assert counts(keyword) == [4, 1]


def test_mixes_nest():
    spec = "mixed(mixed(softmax, gaussian(features=7))*4, performer(features=11)*2)"
    assert str(sq.describe(spec).config) == spec
    mech = build(spec)
    q, k, v = inputs()
    inner = build("mixed(softmax, gaussian(features=7))", 4, 2)
    assert torch.equal(mech(q, k, v)[:, :4], inner(q[:, :4], k[:, :2], v[:, :2]))
    out, state = mech.prefill(q, k, v)
    assert {name.split(".k")[0] for name in state.tensors() if name.endswith(".k")} == {
        "parts.0.parts.0"
    }
    # float sums in another order, see laws.EXACT
    assert torch.allclose(out, mech(q, k, v, causal=True), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("mixed(sofmax)", "mixed: part 1: unknown mechanism 'sofmax' (did you mean 'softmax'?)"),
        ("mixed(softmax, performer(featurs=3))", "part 2: performer: unknown option 'featurs'"),
        (
            "mixed(performer(features=0), gaussian(sigma=0))",
            "part 1: performer: features=0 must be an integer ≥ 1; part 2: gaussian: sigma=0 must",
        ),
        ("mixed(parts=[])", "parts must name at least one mechanism"),
        ("mixed(parts=['softmax, performer'])", "must be one mechanism, with an optional *count"),
        ("mixed(parts=[3])", "part 1: a mechanism is a name, a string such as"),
        ("mixed(parts=[[softmax, 0]])", "the number of heads must be an integer ≥ 1, given 0"),
        ("mixed(parts=[['softmax*2', 2]])", "the number of heads is given twice: softmax*2 and 2"),
        (
            "mixed(softmax, compressed(query_stride=2))",
            "part 2: compressed: query_stride > 1 keeps only some queries",
        ),
        ("mixed(softmax, parts=[softmax])", "parts is given twice: as positional parts softmax"),
        ("mixed(softmax, heads=3)", "unknown option 'heads'"),
        ("performer(iid)", "performer: takes no positional parts, given iid; options are written"),
    ],
)
def test_wrong_parts_are_named(spec, words):
    with pytest.raises(sq.OptionError) as caught:
        sq.describe(spec)
    assert words in str(caught.value)


def test_unknown_names_keep_their_kind():
    with pytest.raises(sq.UnknownNameError):
        sq.describe("mixed(sofmax, performer)")


# ---- capabilities --------------------------------------------------------------------------


def test_it_can_what_all_parts_can_and_says_who_cannot():
    have = sq.describe("mixed(softmax, local, performer)").capabilities
    parts = {name: sq.describe(name).capabilities for name in ("softmax", "local", "performer")}
    for kind in ("causal", "key", "segments", "window", "dense", "compact", "read", "prefix"):
        lacking = [name for name, own in parts.items() if not getattr(own, kind)]
        found = getattr(have, kind)
        assert bool(found) == (not lacking)
        if lacking:
            reasons = [f"{name}: {getattr(parts[name], kind).reason}" for name in lacking]
            assert found == Absent("; ".join(reasons))
    with pytest.raises(sq.UnsupportedError, match="'mixed' does not support window: performer: "):
        build("mixed(softmax, performer)")(*inputs(), mask=sq.Mask(window=3))


@pytest.mark.parametrize(
    ("spec", "state", "approximates"),
    [
        ("mixed(performer, local)", "constant", "softmax"),
        ("mixed(performer, softmax)", "growing", "softmax"),
        ("mixed(softmax, softmax)", "growing", None),
        ("mixed(performer, gaussian)", "constant", None),
    ],
)
def test_state_and_aim(spec, state, approximates):
    have = sq.describe(spec).capabilities
    assert (have.state, have.approximates) == (state, approximates)
    names = sq.mechanisms(state="constant")
    assert "mixed" in names  # with its default parts
    assert "state: constant" in str(sq.describe("mixed"))


def test_statistics_of_the_call_refuse_a_causal_mask_by_name():
    have = sq.describe("mixed(softmax, performer(gauge=centre))").capabilities
    assert have.causal.reason.startswith("performer: statistics of the call")
    assert not have.state and not have.exact_gradient


def test_learned_parts_have_no_functional_form():
    with pytest.raises(sq.UnsupportedError, match="additive: its scoring network is learned"):
        sq.attention(*inputs(), "mixed(softmax, additive)")
    out = sq.attention(*inputs(), "mixed(softmax*2, performer(features=11))", seed=3)
    assert torch.equal(out, build("mixed(softmax*2, performer(features=11))", seed=3)(*inputs()))


def test_reach_is_the_union():
    mech = build("mixed(local(window=2), local(window=[3, 0], dilation=2))", kv=6)
    assert list(mech.reached(5, 40)) == [6, 7, 9, 11]
    reach = sq.describe("mixed(local(window=2), performer)").capabilities.reach
    assert reach == "local: the last left·dilation tokens; performer: all past tokens"


def test_an_explicit_mask_is_cut_by_heads():
    mech = build("mixed(softmax*2, additive*4)")
    q, k, v = inputs(queries=17, keys=S)
    dense = torch.rand(2, H, 17, S, generator=torch.Generator().manual_seed(3)) > 0.4
    exact = build("softmax", 2, 1)
    wanted = exact(q[:, :2], k[:, :1], v[:, :1], mask=sq.Mask(dense=dense[:, :2]))
    assert torch.equal(mech(q, k, v, mask=sq.Mask(dense=dense))[:, :2], wanted)
    common = sq.Mask(dense=dense[0, 0])
    assert torch.equal(
        mech(q, k, v, mask=common)[:, :2], exact(q[:, :2], k[:, :1], v[:, :1], mask=common)
    )


# ---- cost ----------------------------------------------------------------------------------


def test_cost_is_the_mean_weighted_by_heads():
    exact, random = sq.describe("softmax"), sq.describe("performer")
    for spec, share in (("softmax*1, performer*3", 0.25), ("softmax, performer", 0.5)):
        found = sq.describe(f"mixed({spec})")
        for kind in ("flops", "memory"):
            parts = getattr(exact, kind)(1024), getattr(random, kind)(1024)
            wanted = share * parts[0] + (1 - share) * parts[1]
            assert getattr(found, kind)(1024) == pytest.approx(wanted, rel=1e-12)
    built = build("mixed(softmax*1, performer)", kv=6)  # once built, shares are exact
    wanted = exact.flops(1024) / 6 + random.flops(1024) * 5 / 6
    assert sq.describe(built.config).flops(1024) == pytest.approx(wanted, rel=1e-12)


# ---- states and calibration ----------------------------------------------------------------


def test_states_of_another_mix_are_refused():
    q, k, v = inputs()
    mech = build("mixed(softmax*2, performer(features=11)*4)")
    other = build("mixed(performer(features=11)*2, softmax*4)").prefill(q, k, v)[1]
    with pytest.raises(sq.ShapeError, match="state must be a KeyValueState, given LinearState"):
        mech.step(q, k, v, other)
    three = build("mixed(softmax, softmax, softmax)").prefill(q, k, v)[1]
    with pytest.raises(sq.ShapeError, match="state must be that of 2 parts, given 3"):
        mech.step(q, k, v, three)


def test_calibration_reaches_the_parts_that_need_it():
    spec = "performer(features=11, gauge=centre, statistics=calibrated)"
    mech = build(f"mixed(softmax*2, {spec}*4)")
    q, k, v = inputs()
    with pytest.raises(sq.CalibrationError):
        mech(q, k, v)
    mask = torch.arange(L) < torch.tensor([[L], [11]])
    mech.calibrate(q, k, key_mask=mask)
    alone = build(spec, 4, 2, seed=1)
    alone.calibrate(q[:, 2:], k[:, 1:], key_mask=mask)
    assert torch.equal(mech(q, k, v)[:, 2:], alone(q[:, 2:], k[:, 1:], v[:, 1:]))
    with pytest.raises(sq.ShapeError, match=r"q must be \(\.\.\., H=6"):
        mech.calibrate(torch.cat([q, q], 1), k)
    with pytest.raises(sq.OptionError, match=r"calibrated: softmax\*4, performer\*2 take nothing"):
        build("mixed(softmax, performer)").calibrate(q, k)


def test_it_says_what_it_is_made_of():
    text = repr(build("mixed(softmax*2, performer(features=11))"))
    assert "parts=[softmax*2, performer(features=11)*4]" in text
    assert "parts=[local, performer]: mechanisms in the order of their heads" in str(
        sq.describe("mixed")
    )


def test_inside_multihead_attention():
    attn = sq.MultiheadAttention(30, H, batch_first=True, mechanism="mixed(local*2, performer)")
    x = torch.randn(2, L, 30)
    out, weights = attn(x, x, x, is_causal=True, need_weights=True, average_attn_weights=False)
    assert out.shape == (2, L, 30) and weights.shape == (2, H, L, L)
    assert [name for name in attn.state_dict() if "mechanism" in name] == [
        "mechanism.parts.1.projection",
        "mechanism.parts.1.draw_index",
    ]


@pytest.mark.parametrize("spec", ["mixed", "mixed(softmax*3, mixed)", "mixed(mixed(local)*2)"])
def test_the_fewest_heads_are_enough(spec):
    found, config = registry.resolve(spec)
    least = found.least_heads(config)
    assert sum(counts(build(spec, least, least))) == least
    with pytest.raises(sq.OptionError, match="head"):
        build(spec, least - 1, least - 1)


def test_a_mix_is_a_far_field_where_all_parts_are():
    far = "mixed(performer(features=11)*2, performer(features=7)*4)"
    mech = build(f"near_far(window=3, sinks=0, far={far})", seed=5)
    q, k, v = inputs()
    first = build("near_far(window=3, sinks=0, far=performer(features=11))", 2, 1, seed=5)
    wanted = first(q[:, :2], k[:, :1], v[:, :1], causal=True)
    # sums of the same numbers in chunks of other sizes, see laws.EXACT
    assert torch.allclose(mech(q, k, v, causal=True)[:, :2], wanted, rtol=1e-10, atol=1e-12)
    with pytest.raises(sq.OptionError, match="cannot be the far field: gaussian: its weights do"):
        sq.describe("near_far(far=mixed(performer, gaussian))")


@pytest.mark.parametrize("near", ["window=3, sinks=2", "window=3, heavy=5"])
def test_each_part_of_a_far_field_sums_in_its_own_way(near):
    # Landmarks and statistics are those of all open keys, negative weights are limited over both
    # sides of the window, heavy keys are each key/value head's.
    parts = ["kernel_nystrom(features=12)", "performer(features=11, estimator=derf)", "softmax"]
    mech = build(f"near_far({near}, far=mixed({', '.join(f'{part}*2' for part in parts)}))", seed=5)
    q, k, v = inputs()
    key = torch.arange(L) % 5 != 3
    out = mech(q, k, v, key_mask=key)
    for index, far in enumerate(parts):
        heads, kv = slice(2 * index, 2 * index + 2), slice(index, index + 1)
        alone = build(f"near_far({near}, far={far})", 2, 1, seed=5 + index)
        wanted = alone(q[:, heads], k[:, kv], v[:, kv], key_mask=key)
        # sums of the same numbers in chunks of other sizes, see laws.EXACT
        assert torch.allclose(out[:, heads], wanted, rtol=1e-10, atol=1e-12), far


def test_looking_at_a_mix_redraws_no_part():
    redrawn = "mixed(performer(features=11, redraw=1)*4, softmax)"
    q, k, v = inputs()
    mech = build(redrawn).train()
    mech(q, k, v)
    mech.weights(q, k)
    assert int(mech.parts[0].draw_index) == 0
    far = build(f"near_far(window=3, far={redrawn})").train()
    far(q, k, v)
    far.weights(q, k)
    far.shares(q, k)
    first = far.far.parts[0]
    assert int(first.draw_index) == 0 and first.training
    far(q, k, v)  # a training call does
    assert int(first.draw_index) == 1
