"""Routing attention: exact limits, who reads whom, centroids in training, the state."""

import copy
import itertools
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import subquad as sq
from references import ref_softmax
from subquad.attention.base import looking
from subquad.attention.masks import Mask

F64 = torch.float64
D, H, KV, V = 5, 6, 3, 7


def randn(*shape, seed=0, dtype=F64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def inputs(L=41, S=41, heads=H, kv=KV, batch=2, seed=1):
    shapes = (batch, heads, L, D), (batch, kv, S, D), (batch, kv, S, V)
    return [randn(*shape, seed=seed + n) for n, shape in enumerate(shapes)]


def build(heads=H, kv=KV, dim=D, dtype=F64, seed=0, **options):
    return sq.build(
        "routing", head_dim=dim, num_heads=heads, num_kv_heads=kv, dtype=dtype, seed=seed, **options
    ).eval()


def close(found, wanted, tolerance=1e-11):
    """Sums of ≤ 100 float64 terms, exponents ≤ 100 that amplify their rounding: below 1e-12."""
    error = (found.detach() - wanted.detach()).abs().max().item()
    assert error <= tolerance * wanted.detach().abs().max().item(), error


def layer_norm(x):
    """Of length √D, by torch; its eps is far below the rounding of these inputs' variances."""
    return torch.nn.functional.layer_norm(x, x.shape[-1:], eps=1e-30)


def softmax(q, k, v, key=None, causal=False):
    allowed = torch.ones(len(q), 1, q.shape[2], k.shape[2], dtype=torch.bool)
    if causal:
        allowed = allowed.tril(k.shape[2] - q.shape[2])
    if key is not None:
        allowed = allowed & key[:, None, None]
    return ref_softmax(None, q, k, v, allowed=allowed, scale=D**-0.5)


# ---- exact limits -------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "options", [{"clusters": 1, "window": 41}, {"clusters": 1, "window": 64}], ids=str
)
def test_one_cluster_that_holds_all_tokens_is_softmax(options, causal):
    q, k, v = inputs()
    key = randn(2, 41, seed=9) > -0.5
    key[:, 0] = True
    for mask in (None, key):
        plain = build(normalise="none", **options)(q, k, v, causal=causal, key_mask=mask)
        close(plain, softmax(q, k, v, mask, causal))
        normal = build(**options)(q, k, v, causal=causal, key_mask=mask)
        close(normal, softmax(layer_norm(q), layer_norm(k), v, mask, causal))


@pytest.mark.parametrize("merge", ["lse", "mean"])
@pytest.mark.parametrize("length", [17, 41])
def test_window_of_all_tokens_is_softmax_with_any_clusters(length, merge):
    q, k, v = inputs(length)
    mech = build(clusters=7, window=41, membership="balanced", merge=merge, normalise="none")
    close(mech(q, k, v), softmax(q, k, v))


def test_shared_one_cluster_is_softmax_of_queries_that_read_themselves_last():
    q, k, v = inputs(kv=H)
    mech = build(kv=H, clusters=1, window=41, shared=True)
    x = layer_norm(q)
    apart = ~torch.eye(41, dtype=torch.bool)
    for causal in (False, True):
        allowed = apart.tril() if causal else apart.clone()
        allowed[0, 0] = causal  # the first token has none but itself
        wanted = ref_softmax(None, x, x, v, allowed=allowed[None, None], scale=D**-0.5)
        close(mech(q, k, v, causal=causal), wanted)
        assert torch.equal(mech(q, torch.full_like(k, torch.nan), v, causal=causal),
                           mech(q, k, v, causal=causal))  # fmt: skip
    reads = build(kv=H, clusters=1, window=41, shared=True, own="read")
    close(reads(q, k, v, causal=True), softmax(x, x, v, causal=True))


def test_the_mean_weighs_clusters_alike_and_one_normaliser_by_what_they_hold():
    """All in two identical centroids' clusters, of a window that both fill with the same keys."""
    q, k, v = inputs()
    for merge in ("lse", "mean"):
        mech = build(clusters=2, window=9, membership="balanced", rest="zeros", merge=merge)
        mech.centroids[:, 1] = mech.centroids[:, 0]
        one = build(clusters=1, window=9, membership="balanced", rest="zeros")
        one.centroids.copy_(mech.centroids[:, :1])
        close(mech(q, k, v), one(q, k, v))


# ---- who reads whom -----------------------------------------------------------------------


def test_balanced_clusters_take_their_nearest_tokens_and_others_read_the_nearest_cluster():
    q, k, _ = inputs(53, 37)
    mech = build(clusters=4, window=6, membership="balanced")
    weights = mech.weights(q, k)
    unit = {n: layer_norm(t) / D**0.5 for n, t in (("q", q), ("k", k))}
    for b, h in itertools.product(range(2), range(H)):
        centroids = mech.centroids[h // 2]
        like_q, like_k = unit["q"][b, h] @ centroids.T, unit["k"][b, h // 2] @ centroids.T
        taken = like_q.topk(6, 0).indices.T.tolist()
        keys = like_k.topk(6, 0).indices.T.tolist()
        for i in range(53):
            mine = [c for c in range(4) if i in taken[c]] or [int(like_q[i].argmax())]
            read = sorted(set().union(*(keys[c] for c in mine)))
            assert weights[b, h, i].nonzero().flatten().tolist() == read
    zeros = build(clusters=4, window=6, membership="balanced", rest="zeros").weights(q, k)
    some = (zeros > 0).any(-1)
    assert 0 < some.sum() < some.numel()
    close(zeros[some], weights[some])


def test_nearest_reads_the_last_tokens_of_its_cluster():
    q, k, _ = inputs(89, 89)
    mech = build(clusters=3, window=4, neighbours=2)
    of_q, of_k = mech.assign(q, k, Mask())
    assert len(of_q.unique()) == len(of_k.unique()) == 3
    weights = mech.weights(q, k, causal=True)
    read_counts = set()
    for b, h, i in itertools.product(range(2), range(H), range(89)):
        read = weights[b, h, i].nonzero().flatten()
        line = (of_k[b, h // 2, : i + 1] == of_q[b, h, i]).nonzero().flatten()
        assert read.tolist() == line[len(line) - len(read) :].tolist()
        if len(line) >= 12:
            assert 9 <= len(read) <= 12  # neighbours·w + 1 … (neighbours + 1)·w
            read_counts.add(len(read))
        else:
            assert len(read) == len(line)
    assert read_counts == {9, 10, 11, 12}


def test_auto_is_balanced_unless_causal():
    q, k, v = inputs()
    auto, balanced, nearest = (
        build(clusters=4, window=5, membership=m) for m in ("auto", "balanced", "nearest")
    )
    assert torch.equal(auto(q, k, v), balanced(q, k, v))
    assert torch.equal(auto(q, k, v, causal=True), nearest(q, k, v, causal=True))
    with pytest.raises(sq.UnsupportedError, match="leaks the future; use membership=nearest"):
        balanced(q, k, v, causal=True)
    with pytest.raises(sq.UnsupportedError, match="leaks the future"):
        balanced.prefill(q, k, v)


def test_shared_takes_keys_of_its_own_queries_alone():
    q, k, v = inputs(kv=H)
    mech = build(kv=H, clusters=3, window=5, shared=True)
    with pytest.raises(sq.UnsupportedError, match="keys are the queries"):
        mech(q[:, :, :7], k, v)
    with pytest.raises(sq.OptionError, match="every query head brings its own keys"):
        build(shared=True)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    grads = torch.autograd.grad(mech(*leaves).sum(), leaves)
    assert not grads[1].any() and grads[0].any()


# ---- states -------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
def test_state_is_the_last_keys_of_each_cluster(shared):
    kv = H if shared else KV
    mech = build(kv=kv, clusters=3, window=4, neighbours=1, shared=shared)
    q, k, v = inputs(97, 97, kv=kv)
    whole = mech(q, k, v, causal=True)
    out, state = mech.prefill(*(t[:, :, :60] for t in (q, k, v)))
    assert state.k.shape == (2, kv, 3, 8, D) and state.v.shape == (2, kv, 3, 8, V)
    size, parts = state.nbytes, [out]
    for at in range(60, 97):  # one token at a time takes a way of its own
        out, state = mech.step(*(t[:, :, at : at + 1] for t in (q, k, v)), state)
        parts.append(out)
    assert state.nbytes == size
    close(torch.cat(parts, 2), whole)
    if not shared:
        with pytest.raises(sq.ShapeError, match="key for every query, given 3 queries and 2 keys"):
            mech.step(q[:, :, :3], k[:, :, :2], v[:, :, :2], state)


# ---- centroids in training ----------------------------------------------------------------


def moved(mech, q, k, key=None):
    """One step of the moving average, token by token."""
    total = torch.zeros_like(mech.centroids)
    per = mech.num_heads // mech.num_kv_heads
    for x, of in ((q, per), (k, 1)):
        x = layer_norm(x) / D**0.5
        for b, h, i in itertools.product(*map(range, x.shape[:3])):
            if key is None or key[b, i]:
                c = (mech.centroids[h // of] @ x[b, h, i]).argmax()
                total[h // of, c] += x[b, h, i]
    norm = total.norm(dim=-1, keepdim=True)
    mean = torch.where(norm > 0, total / norm, mech.centroids)
    new = mech.config.decay * mech.centroids + (1 - mech.config.decay) * mean
    return new / new.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("membership", ["balanced", "nearest"])
@pytest.mark.parametrize("masked", [False, True])
def test_training_moves_centroids_by_open_tokens(membership, masked):
    q, k, v = inputs(23, 23)
    key = (randn(2, 23, seed=9) > -0.3) if masked else None
    mech = build(clusters=4, window=5, membership=membership, decay=0.9)
    before = mech.centroids.clone()
    mech(q, k, v, key_mask=key)
    mech.update()
    assert torch.equal(mech.centroids, before), "evaluation changed the centroids"
    wanted = moved(mech, q, k, key)
    mech.train()
    with looking(mech):
        mech(q, k, v, key_mask=key)
    mech.weights(q, k, key_mask=key)
    assert not mech.pending.any(), "looking counted"
    if masked:  # what is masked never matters
        k, v = (t.masked_fill(~key[:, None, :, None], torch.nan) for t in (k, v))
    first = mech(q, k, v, key_mask=key)
    assert torch.equal(mech.centroids, before), "the call's own centroids moved"
    assert torch.equal(first, mech.eval()(q, k, v, key_mask=key))
    mech.train().update()
    close(mech.centroids, wanted)
    close(mech.centroids.norm(dim=-1), torch.ones(KV, 4).double())
    # The next call starts with an update, by itself.
    again = build(clusters=4, window=5, membership=membership, decay=0.9).train()
    again(q, k, v, key_mask=key)
    again(q, k, v, key_mask=key)
    assert torch.equal(again.centroids, mech.centroids)


def test_clusters_without_tokens_and_decay_of_one_hold_still():
    q, k, v = inputs(3, 3, batch=1)
    mech = build(clusters=40, window=2).train()
    before = mech.centroids.clone()
    mech(q, k, v)
    mech.update()
    held = (mech.centroids == before).all(-1)
    assert held.sum() >= 3 * (40 - 9)  # 6 queries and 3 keys … of three heads: ≤ 9 tokens each
    assert not held.all()
    still = build(clusters=4, window=2, decay=1.0).train()
    before = still.centroids.clone()
    still(q, k, v)
    still.update()
    close(still.centroids, before, 1e-15)  # put back on the sphere: an ulp


@pytest.mark.parametrize(("reentrant", "commitment"), [(False, 0.0), (False, 0.5), (True, 0.0)])
def test_checkpointing_counts_once_and_computes_the_same_again(reentrant, commitment):
    options = {"clusters": 5, "window": 4, "decay": 0.3, "commitment": commitment}
    plain, again = (build(**options).train() for _ in range(2))
    for step in range(3):
        grads = []
        for checkpointed in (False, True):
            q, k, v = (t.requires_grad_() for t in inputs(seed=10 * step))
            if checkpointed:
                out = checkpoint(again, q, k, v, use_reentrant=reentrant)
            else:
                out = plain(q, k, v)
            out.square().sum().backward()
            grads.append((q.grad, k.grad, v.grad))
        for found, wanted in zip(*grads, strict=True):
            assert torch.equal(found, wanted)
        assert torch.equal(plain.centroids, again.centroids)
        assert torch.equal(plain.pending, again.pending)
    assert not torch.equal(plain.centroids, build(**options).centroids)


def test_a_loss_that_checkpointing_would_leave_without_gradient_is_refused():
    plain, mech = (build(clusters=5, window=4, commitment=0.5).train() for _ in range(2))
    q, k, v = (t.requires_grad_() for t in inputs())
    plain(q, k, v)
    (wanted,) = torch.autograd.grad(plain.penalty(), q)
    checkpoint(mech, q, k, v, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(mech.penalty(), q)[0], wanted)
    out = checkpoint(mech, q, k, v, use_reentrant=True)
    assert not mech.penalty().requires_grad
    with pytest.raises(sq.UnsupportedError, match="pass use_reentrant=False"):
        out.sum().backward()


def test_what_is_not_finite_never_reaches_the_centroids():
    """Queries of padding are counted nowhere; a cluster with a broken token waits."""
    q, k, v = inputs(23, 23)
    key = torch.arange(23) < torch.tensor([[23], [11]])
    clean, padded = (build(clusters=4, window=5, commitment=0.5).train() for _ in range(2))
    clean(q, k, v, key_mask=key)
    for fill in (torch.nan, torch.inf):
        junk = [t.masked_fill(~key[:, None, :, None], fill) for t in (q, k, v)]
        padded.pending.zero_()
        padded(*junk, key_mask=key)
        assert torch.equal(padded.pending, clean.pending)
        assert torch.equal(padded.penalty(), clean.penalty())
    clean.update()
    before = clean.centroids.clone()
    k[0, 1, 3] = torch.nan
    clean(q, k, v)
    clean.update()
    assert clean.centroids.isfinite().all()
    assert not torch.equal(clean.centroids[1], before[1])  # the other clusters of the head
    assert (clean.centroids[1] == before[1]).all(-1).sum() == 1


def test_calls_before_one_backward_pass_wait_for_it():
    """A module that serves two layers: both are computed again with the centroids of the step."""
    mech = build(clusters=5, window=4, decay=0.3).train()
    q, k, v = (t.requires_grad_() for t in inputs())
    before = mech.centroids.clone()

    def two_layers(layer):
        first = layer(q, k, v)
        return layer(first[..., :D] + q, k, v).square().sum()

    wanted = torch.autograd.grad(two_layers(copy.deepcopy(mech)), q)[0]
    loss = two_layers(lambda *a: checkpoint(mech, *a, use_reentrant=False))
    assert torch.equal(torch.autograd.grad(loss, q)[0], wanted)
    assert torch.equal(mech.centroids, before)
    assert mech.pending.any()
    mech(q, k, v)
    assert not torch.equal(mech.centroids, before)


def test_a_graph_that_is_dropped_is_not_waited_for():
    mech = build(clusters=5, window=4, decay=0.3).train()
    before = mech.centroids.clone()
    q, k, v = (t.requires_grad_() for t in inputs())
    mech(q, k, v)
    mech(q, k, v)
    assert not torch.equal(mech.centroids, before)


def test_statistics_keep_their_precision_and_survive_saving():
    mech = build(clusters=5, window=4, dtype=torch.bfloat16).train()
    assert mech.centroids.dtype == torch.float32
    q, k, v = inputs()
    low = [t.bfloat16() for t in (q, k, v)]
    mech(*low)
    before = mech.centroids.clone()
    mech.bfloat16()
    assert mech.centroids.dtype == mech.pending.dtype == torch.float32
    assert torch.equal(mech.centroids, before)
    twin = build(clusters=5, window=4, dtype=torch.float32, seed=3)
    twin.load_state_dict(mech.state_dict())
    for other in (twin, copy.deepcopy(mech), pickle.loads(pickle.dumps(mech))):  # our own bytes
        assert torch.equal(other.centroids, before) and torch.equal(other.pending, mech.pending)
        other.update()
        assert not torch.equal(other.centroids, before)


# ---- centroids from data, and the loss ----------------------------------------------------


def test_centroids_from_data_are_k_means_of_open_directions():
    """Four tight bundles: every centroid is the direction of one."""
    bundles = torch.linalg.qr(randn(D, D, seed=4))[0][:4]
    bundles = bundles - bundles.mean(-1, keepdim=True)
    pick = torch.randint(4, (2, KV, 41), generator=torch.Generator().manual_seed(1))
    pick[0, :, :4] = torch.arange(4)
    k = bundles[pick] * (1.5 + randn(2, KV, 41, 1, seed=5).tanh())
    q = k.repeat_interleave(2, 1)
    key = torch.ones(2, 41, dtype=torch.bool)
    key[:, 30:] = False
    k[:, :, 30:], q[:, :, 30:] = randn(2, KV, 11, D, seed=6), randn(2, H, 11, D, seed=7)
    mech = build(clusters=4, window=5, start="data")
    with pytest.raises(sq.CalibrationError, match=r"calibrate\(q, k\), or a first call in train"):
        mech(q, k, k)
    mech.calibrate(q, k, key_mask=key)
    unit = bundles / bundles.norm(dim=-1, keepdim=True)
    best = (mech.centroids @ unit.T).amax(1)
    close(best, torch.ones(KV, 4).double())
    first = build(clusters=4, window=5, start="data").train()
    first(q, k, k, key_mask=key)
    assert torch.equal(first.centroids, mech.centroids)
    with pytest.raises(sq.OptionError, match="at least clusters=40 open tokens, given 3"):
        build(clusters=40, start="data").calibrate(q[:1, :, :1], k[:1, :, :1])
    with pytest.raises(sq.OptionError, match="calibrate needs start=data"):
        build().calibrate(q, k)


def test_penalty_is_the_distance_from_the_centroids():
    q, k, v = (t.requires_grad_() for t in inputs(19, 19))
    key = torch.arange(19) < torch.tensor([[19], [11]])
    mech = build(clusters=4, window=5, commitment=0.25)
    assert mech.penalty() == 0.0
    mech(q, k, v, key_mask=key)
    assert mech.penalty() == 0.0, "evaluation has no loss"
    mech.train()(q, k, v, key_mask=key)
    x = (layer_norm(q) / D**0.5).unflatten(1, (KV, 2)).flatten(2, 3)
    x = torch.cat([x, layer_norm(k) / D**0.5], 2)
    opened = key[:, None].repeat(1, KV, 3)
    near = (x[..., None, :] - mech.centroids[:, None]).square().sum(-1).amin(-1)
    wanted = 0.25 * near[opened].mean() / D
    close(mech.penalty(), wanted)
    assert sq.penalties(torch.nn.Sequential(mech, mech)) == mech.penalty()
    for a, b in zip(
        torch.autograd.grad(mech.penalty(), (q, k)),
        torch.autograd.grad(wanted, (q, k)),
        strict=True,
    ):
        close(a, b)


# ---- options ------------------------------------------------------------------------------


def test_wrong_options_are_told_together():
    with pytest.raises(sq.OptionError) as caught:
        build(clusters=0, window=0, membership="balancd", decay=1.5, commitment=-1.0)
    for part in ("clusters=0", "window=0", "balanced", "decay=1.5", "commitment=-1.0"):
        assert part in str(caught.value)
    with pytest.raises(sq.OptionError, match="merge=mean has no meaning with membership=nearest"):
        build(membership="nearest", merge="mean")
    with pytest.raises(sq.OptionError, match="neighbours=2 has no meaning with membership=balance"):
        build(membership="balanced", neighbours=2)
    with pytest.raises(sq.OptionError, match="norm=layer leaves nothing of head_dim=1; use norm=r"):
        build(dim=1)
    assert build(dim=1, norm="rms").head_dim == 1
