"""Clustered attention: assignments, exact limits, the paper's bound, clusters of keys."""

import copy
import itertools

import pytest
import torch

import subquad as sq
from references import ref_clustered, ref_softmax
from subquad.arena.uniform import Uniform
from subquad.attention.masks import Mask
from subquad.attention.partial import combine
from subquad.attention.summary.clustered import _blocks

F64 = torch.float64
D, H, KV, V = 5, 6, 3, 7


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def build(heads=H, kv=KV, dim=D, dtype=F64, **options):
    return sq.build(
        "clustered", head_dim=dim, num_heads=heads, num_kv_heads=kv, dtype=dtype, **options
    ).eval()


def inputs(L=41, S=41, seed=1):
    shapes = (2, H, L, D), (2, KV, S, D), (2, KV, S, V)
    return [randn(*shape, seed=seed + n) for n, shape in enumerate(shapes)]


def close(found, wanted, tolerance=1e-11):
    """Sums of ≤ 331 float64 terms, exponents ≤ 100 that amplify their rounding: below 1e-12."""
    error = (found.detach() - wanted.detach()).abs().max().item()
    assert error <= tolerance * wanted.detach().abs().max().item(), error


def softmax(q, k, v, key=None, scale=D**-0.5):
    if key is None:
        key = torch.ones(len(q), k.shape[2], dtype=torch.bool)
    return ref_softmax(None, q, k, v, allowed=key[:, None, None], scale=scale)


KINDS = [
    {"topk": 0},
    {"topk": 3},
    {"topk": 3, "distance": "euclidean"},
    {"cluster": "keys"},
    {"cluster": "keys", "distance": "hamming"},
    {"cluster": "keys", "weights": "mass"},
]


# ---- exact limits -------------------------------------------------------------------------


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("clusters", [41, 100])
def test_as_many_clusters_as_tokens_is_softmax(options, clusters):
    q, k, v = inputs()
    close(build(clusters=clusters, **options)(q, k, v), softmax(q, k, v))


@pytest.mark.parametrize("options", KINDS)
def test_rows_with_no_more_open_tokens_than_clusters_are_exact(options):
    """The open queries of self-attention; masked ones go with the nearest of these."""
    q, k, v = inputs()
    key = torch.zeros(2, 41, dtype=torch.bool)
    key[0, ::4], key[1, 7] = True, True
    out = build(clusters=11, **options)(q, k, v, key_mask=key)
    wanted = softmax(q, k, v, key)
    for row in range(2):
        close(out[row, :, key[row]], wanted[row, :, key[row]])
    close(out[1], wanted[1])  # with a single key every query gets its value


@pytest.mark.parametrize("clusters", [1, 4])
@pytest.mark.parametrize("topk", [41, 50])
def test_all_keys_on_top_is_softmax(topk, clusters):
    q, k, v = inputs(37)
    close(build(clusters=clusters, topk=topk)(q, k, v), softmax(q, k, v))
    key = torch.arange(41) < torch.tensor([[17], [1]])
    close(build(clusters=clusters, topk=topk)(q, k, v, key_mask=key), softmax(q, k, v, key))


@pytest.mark.parametrize("options", KINDS[:3])
def test_queries_with_few_distinct_values_are_exact(options):
    """Five values in runs: the five first centroids are these. A sixth to eighth cluster stays
    empty, or shares a value.
    """
    _, k, v = inputs()
    values = randn(2, H, 5, D, seed=8)
    q = values.repeat_interleave(8, 2)
    close(build(clusters=5, **options)(q, k, v), softmax(q, k, v))
    close(build(clusters=8, **options)(q, k, v), softmax(q, k, v))
    same = values[:, :, :1].expand(-1, -1, 40, -1)
    close(build(clusters=7, **options)(same, k, v), softmax(same, k, v))


def test_keys_averaged_by_mass_are_exact_where_queries_agree():
    """One query for a group: its mass is in proportion to exp(scale·q·k), Jensen is tight."""
    _, k, v = inputs()
    q = randn(2, KV, 1, D, seed=9).repeat_interleave(2, 1).expand(-1, -1, 29, -1)
    for clusters in (1, 6):
        mech = build(clusters=clusters, cluster="keys", weights="mass")
        close(mech(q, k, v), softmax(q, k, v))
        assert not torch.allclose(
            build(clusters=clusters, cluster="keys")(q, k, v), softmax(q, k, v), rtol=1e-2
        )


def test_equal_keys_are_one_key_that_counts_often():
    q, _, v = inputs()
    k = randn(2, KV, 3, D, seed=8).repeat_interleave(torch.tensor([23, 3, 15]), 2)
    for distance, weights in itertools.product(("euclidean", "hamming"), ("count", "mass")):
        # The first centroids of 20 clusters, every second key, are of all three values.
        mech = build(clusters=20, cluster="keys", distance=distance, weights=weights)
        close(mech(q, k, v), softmax(q, k, v))


# ---- assignments --------------------------------------------------------------------------


def naive_lloyd(points, opened, clusters, iterations, hamming):
    """points (N, F): k-means of the open rows, token by token; ties go to the smaller index."""
    rows = opened.nonzero().flatten().tolist()
    centres = [points[rows[(2 * c + 1) * len(rows) // (2 * clusters)]] for c in range(clusters)]

    def nearest(i):
        distances = [(points[i] - centre).square().sum().item() for centre in centres]
        return distances.index(min(distances))

    for _ in range(iterations):
        members = [[] for _ in range(clusters)]
        for i in rows:
            members[nearest(i)].append(points[i])
        for c, own in enumerate(members):
            if own and hamming:
                centres[c] = torch.where(torch.stack(own).sum(0) >= 0, 1.0, -1.0)
            elif own:
                centres[c] = torch.stack(own).mean(0)
    return {i: nearest(i) for i in rows}


@pytest.mark.parametrize("cluster", ["queries", "keys"])
@pytest.mark.parametrize("centre", [False, True])
@pytest.mark.parametrize("distance", ["hamming", "euclidean"])
def test_assignments_are_lloyds(distance, centre, cluster):
    q, k, _ = inputs()
    q, k = q + 0.5, k - 0.5
    mech = build(
        clusters=7, distance=distance, centre=centre, cluster=cluster, bits=9, iterations=3
    )
    key = torch.rand(2, 41, generator=torch.Generator().manual_seed(3)) > 0.4
    found = mech.assign(q, k, Mask(key=key))
    x = q if cluster == "queries" else k
    groups = x.shape[1] // KV
    for b, h in itertools.product(range(2), range(x.shape[1])):
        points = x[b, h]
        if distance == "hamming":
            shift = points[key[b]].mean(0) if centre else 0.0
            signs = torch.einsum("nd,md->nm", points - shift, mech.planes[h // groups])
            points = torch.where(signs >= 0, 1.0, -1.0)
        wanted = naive_lloyd(points, key[b], 7, 3, distance == "hamming")
        assert {i: found[b, h, i].item() for i in wanted} == wanted


def test_no_iteration_is_the_nearest_of_the_first_centroids():
    q, k, _ = inputs()
    mech = build(clusters=4, distance="euclidean", iterations=0)
    first = q[:, :, [5, 15, 25, 35]]  # ⌊(c + ½)·41/4⌋
    wanted = torch.cdist(q, first).argmin(-1)
    assert torch.equal(mech.assign(q, k, Mask()), wanted)


def test_masked_queries_of_self_attention_follow_but_do_not_lead():
    q, k, v = inputs()
    key = torch.arange(41).expand(2, 41) % 3 > 0
    for options in KINDS[:3]:
        mech = build(clusters=6, **options)
        out = mech(q, k, v, key_mask=key)
        other = q.masked_fill(~key[:, None, :, None], float("nan"))
        moved = mech(other, k, v, key_mask=key)
        for row in range(2):
            assert torch.equal(moved[row, :, key[row]], out[row, :, key[row]])
        twin = q.clone()
        twin[:, :, 0] = q[:, :, 1]  # 0 is masked, 1 is open
        both = mech(twin, k, v, key_mask=key)
        close(both[:, :, 0], both[:, :, 1])


def test_a_masked_query_joins_no_empty_cluster():
    """Open queries all alike leave clusters empty; a masked one unlike them gets their output."""
    _, k, v = inputs()
    q = randn(2, H, 1, D, seed=4).expand(-1, -1, 41, -1).clone()
    q[:, :, 40] = -q[:, :, 0]
    key = torch.arange(41).expand(2, 41) < 40
    for distance in ("hamming", "euclidean"):
        out = build(clusters=5, topk=0, distance=distance)(q, k, v, key_mask=key)
        close(out[:, :, 40], out[:, :, 0])


# ---- improved clustered attention ---------------------------------------------------------


def test_improved_attention_is_closer_to_the_exact_one():
    """Vyas et al. 2020, section 3.3: redistributing the mass of the top keys by exact logits
    brings each query's weights closer to the exact ones in L1; rows sum to one.
    """
    q, k, _ = inputs(L=61)
    eye = torch.eye(41, dtype=F64).expand(2, KV, 41, 41)
    exact = softmax(q, k, eye)
    plain, *improved = (build(clusters=6, topk=topk).weights(q, k) for topk in (0, 1, 5, 23, 40))
    before = (plain - exact).abs().sum(-1)
    for weights in improved:
        close(weights.sum(-1), torch.ones(2, H, 61, dtype=F64))
        assert weights.min() > -1e-15  # Σ − top: 0 up to rounding for the keys on top
        after = (weights - exact).abs().sum(-1)
        assert (after <= before + 1e-12).all()
    assert (improved[2] - exact).abs().sum() < 0.6 * before.sum()


@pytest.mark.parametrize("length", [1, 7, 300])
def test_clusters_of_very_unequal_size(length):
    """One cluster with nearly all queries, and single ones: blocks of all fillings."""
    q, k, v = inputs(length, 41)
    q[:, :, : length - length // 20] = q[:, :, :1] + 0.01 * q[:, :, : length - length // 20]
    mech = build(clusters=9, topk=4)
    every = torch.ones(1, 1, length, 41, dtype=torch.bool)
    close(mech(q, k, v), ref_clustered(mech, q, k, v, allowed=every, scale=D**-0.5))


def test_chunks_change_nothing(monkeypatch):
    from subquad.attention.summary import clustered

    q, k, v = inputs()
    mechs = [build(clusters=6, **options) for options in KINDS]
    whole = [mech(q, k, v) for mech in mechs]
    monkeypatch.setattr(clustered, "CHUNK_BYTES", 1)
    for mech, wanted in zip(mechs, whole, strict=True):
        close(mech(q, k, v), wanted)


@pytest.mark.parametrize("length", [1000, 4000, 16000])
def test_declared_memory_covers_the_largest_tensors(length):
    """Keys and values of the blocks, and the distances of all tokens to all centres."""
    dim = 64
    declared = sq.describe("clustered").memory(length, dim)
    _, block, _ = _blocks(torch.arange(length) % 100 + torch.zeros(1, 1, 1, dtype=int), 100)
    assert declared > 4 * block.numel() * 32 * 2 * dim
    assert sq.describe("clustered(cluster=keys)").memory(length, dim) > 4 * length * 100


# ---- clusters of keys ---------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["count", "mass"])
def test_summaries_never_overestimate_the_normaliser(weights):
    """Jensen: exp(q·k̃_c + ℓ_c) ≤ Σ_{j∈c} exp(q·k_j); ℓ is the entropy of the weights."""
    q, k, v = inputs()
    exact = sq.build("softmax", head_dim=D, num_heads=H, num_kv_heads=KV).partial(q, k, v).lse
    gaps = []
    for clusters in (1, 5, 17, 41):
        part = build(clusters=clusters, cluster="keys", weights=weights).partial(q, k, v)
        assert (part.lse <= exact + 1e-12).all()
        gaps.append((exact - part.lse).mean().item())
    assert gaps == sorted(gaps, reverse=True) and gaps[0] > 0.1 and gaps[-1] < 1e-12


def test_shares_sum_to_one_in_each_cluster():
    q, k, _ = inputs()
    key = torch.rand(2, 41, generator=torch.Generator().manual_seed(3)) > 0.4
    for weights in ("count", "mass"):
        mech = build(clusters=5, cluster="keys", weights=weights)
        cluster = mech.assign(q, k, Mask(key=key))
        share = mech.shares(q, k, Mask(key=key), 0.5, cluster)
        assert not share.masked_select(~key[:, None]).any()
        for b, h, c in itertools.product(range(2), range(KV), range(5)):
            own = share[b, h, (cluster[b, h] == c) & key[b]]
            if len(own):
                assert abs(own.sum().item() - 1) < 1e-12
                if weights == "count":
                    close(own, torch.full_like(own, 1 / len(own)))


# ---- errors fall with clusters, next to uniform attention ---------------------------------


@pytest.mark.parametrize("options", KINDS)
def test_on_clusterable_data_the_error_falls_with_clusters(options):
    """Queries and keys around 12 centres each (σ = 0.1): with 3 clusters something is left to
    do, with 48 all centres are found. Next to uniform attention; orders are claimed, and that
    what is left is a tenth of the uniform one's error.
    """
    L, dim = 331, 8
    kind = torch.randint(12, (2, L), generator=torch.Generator().manual_seed(2))
    q = 2.5 * randn(1, 4, 12, dim, seed=3)[:, :, kind[0]] + 0.1 * randn(1, 4, L, dim, seed=4)
    k = randn(1, 4, 12, dim, seed=5)[:, :, kind[1]] + 0.1 * randn(1, 4, L, dim, seed=6)
    v = randn(1, 4, 12, V, seed=7)[:, :, kind[1]] + 0.1 * randn(1, 4, L, V, seed=8)
    truth = softmax(q, k, v, scale=dim**-0.5)

    def error(mech):
        return ((mech(q, k, v) - truth).norm() / truth.norm()).item()

    errors = [error(build(4, 4, dim, clusters=clusters, **options)) for clusters in (3, 12, 48)]
    uniform = error(Uniform(head_dim=dim, num_heads=4))
    assert errors == sorted(errors, reverse=True), (errors, uniform)
    assert errors[-1] < 0.1 * uniform and errors[0] < uniform, (errors, uniform)


# ---- partial sums, seeds, options ---------------------------------------------------------


@pytest.mark.parametrize("options", [KINDS[0], *KINDS[3:]])
def test_partial_sums(options):
    q, k, v = inputs(17)
    mech = build(clusters=6, **options)
    key = torch.rand(2, 41, generator=torch.Generator().manual_seed(3)) > 0.4
    close(mech.partial(q, k, v, key_mask=key).output(), mech(q, k, v, key_mask=key))
    part = mech.partial(q, k, v, key_mask=torch.zeros_like(key))
    assert not part.den.any() and not part.output().any()
    if mech.config.cluster == "queries":
        # L ≠ S: clusters of queries do not depend on keys, and sums over keys add.
        parts = [mech.partial(q, k, v, key_mask=key & side) for side in _halves(41)]
        close(combine(parts).output(), mech(q, k, v, key_mask=key))


def _halves(length):
    return torch.arange(length) < length // 3, torch.arange(length) >= length // 3


def test_refused_with_the_reason():
    q, k, v = inputs()
    with pytest.raises(sq.UnsupportedError, match="redistributed"):
        build().partial(q, k, v)
    with pytest.raises(sq.UnsupportedError, match="clusters are those of all keys of the call"):
        build(cluster="keys")(q, k, v, causal=True)


def test_hyperplanes_follow_the_seed():
    q, k, v = inputs()
    mech = build(clusters=6, seed=3)
    assert mech.planes.shape == (KV, 63, D)
    assert torch.equal(mech.planes, build(clusters=6, seed=3).planes)
    other = build(clusters=6, seed=4)
    assert not torch.equal(mech.planes, other.planes)
    assert not torch.equal(mech.assign(q, k, Mask()), other.assign(q, k, Mask()))
    other.load_state_dict(copy.deepcopy(mech.state_dict()))
    close(other(q, k, v), mech(q, k, v), 0.0)
    assert not list(build(distance="euclidean").buffers())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cluster": "query"}, "cluster='query' is none of queries, keys"),
        ({"clusters": 0}, "clusters=0 must be an integer ≥ 1"),
        ({"distance": "cosine"}, "distance='cosine' is none of auto, hamming, euclidean"),
        ({"bits": 0}, "bits=0 must be an integer ≥ 1"),
        ({"iterations": -1}, "iterations=-1 must be an integer ≥ 0"),
        ({"centre": 1}, "centre=1 must be true or false"),
        ({"topk": -1}, "topk=-1 must be an integer ≥ 0"),
        ({"topk": 3, "cluster": "keys"}, "topk=3 needs cluster=queries"),
        ({"weights": "sum"}, "weights='sum' is none of count, mass"),
        ({"weights": "mass"}, "weights=mass needs cluster=keys"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(sq.OptionError, match=message):
        build(**options)
