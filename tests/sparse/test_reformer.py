"""Reformer beyond the laws: exact limits, what the hash finds, groups, states, errors."""

import math

import pytest
import torch

import subquad as sq
from laws import close
from subquad.attention.sparse import reformer
from subquad.kernels import grouped
from subquad.kernels.grouped import joint_softmax
from variants import inputs, make


def normalised(q):
    return q / (q.square().mean(-1, keepdim=True) + 1e-6).sqrt()


# ---- exact limits --------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rounds", [1, 3])
def test_one_bucket_in_one_chunk_is_softmax_of_shared_queries_and_keys(causal, rounds):
    """softmax(scale·q_i·k_j) over j ≠ i, k_j = q_j/rms(q_j); the first causal token reads v_0."""
    mech = make(f"reformer(rounds={rounds}, buckets=1, chunk=71)")
    q, k, v = inputs(71, 71, grad=True)
    out = mech(q, k, v, causal=causal)
    logits = 5**-0.5 * torch.einsum("bhid,bhjd->bhij", q, normalised(q))
    i, j = torch.arange(71)[:, None], torch.arange(71)
    closed = (j > i) | ((j == i) & (i > 0)) if causal else i == j
    weights = logits.masked_fill(closed, -torch.inf).softmax(-1)
    wanted = weights @ v.repeat_interleave(2, 1)
    close(out, wanted)
    bar = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).double()
    for a, b in zip(
        torch.autograd.grad(out, (q, v), bar), torch.autograd.grad(wanted, (q, v), bar), strict=True
    ):
        close(a, b)


@pytest.mark.parametrize("chunks", ["bucket", "sorted"])
def test_reading_oneself_too_is_plain_softmax_of_shared_queries_and_keys(chunks):
    mech = make(f"reformer(buckets=1, chunk=71, own=always, chunks={chunks})")
    q, k, v = inputs(71, 71)
    wanted = make("softmax", kv=6)(q, normalised(q), v.repeat_interleave(2, 1))
    close(mech(q, k, v), wanted)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("queries", [71, 17])
def test_one_bucket_of_other_keys_is_softmax(causal, queries):
    mech = make("reformer(rounds=2, buckets=1, chunk=71, shared=false)")
    q, k, v = inputs(queries, 71)
    mask = torch.arange(71) % 3 != torch.tensor([[1], [2]])
    wanted = make("softmax")(q, k, v, causal=causal, key_mask=mask)
    close(mech(q, k, v, causal=causal, key_mask=mask), wanted)


def test_enough_chunks_before_are_as_good_as_a_long_one():
    q, k, v = inputs(71, 71)
    few = make("reformer(rounds=2, buckets=4, chunk=71, before=0)")
    many = make("reformer(rounds=2, buckets=4, chunk=5, before=14)")
    close(many(q, k, v, causal=True), few(q, k, v, causal=True))


# ---- what is read --------------------------------------------------------------------------


def test_with_shared_keys_k_is_not_read():
    mech = make("reformer(buckets=4)")
    q, k, v = inputs(71, 71)
    assert torch.equal(mech(q, k, v), mech(q, torch.full_like(k, torch.nan), v))


def test_a_token_reads_itself_only_if_it_reads_nothing_else():
    mech = make("reformer(rounds=1, buckets=6, chunk=4)")
    q, k, _ = inputs(71, 71)
    bucket = mech.hash(q)[0]
    weights = mech.weights(q, k, causal=True)
    same = (bucket[..., None] == bucket[..., None, :]) & torch.ones(71, 71).tril(-1).bool()
    own = weights.diagonal(dim1=2, dim2=3)
    first = ~same.any(-1)
    assert torch.equal(own[first], torch.ones_like(own[first])) and first.any()
    assert not own[~first].any()


def test_a_key_that_all_rounds_find_counts_once_or_each_time():
    """All rotations equal: every round finds the same; once = one round."""
    q, k, v = inputs(71, 71)
    several = {name: make(f"reformer(rounds=3, buckets=4, chunk=5, duplicates={name})")
               for name in ("once", "each")}  # fmt: skip
    single = make("reformer(rounds=1, buckets=4, chunk=5)")
    for mech in several.values():
        mech.rotations.copy_(single.rotations.expand_as(mech.rotations))
    wanted = single.partial(q, k, v)
    for name, more in (("once", 0.0), ("each", math.log(3))):
        part = several[name].partial(q, k, v)
        others = mechanism_reads_others(single, q)  # lonely tokens read themselves once
        close(part.num, wanted.num)
        close(part.log_scale[others], (wanted.log_scale + more)[others])


def mechanism_reads_others(mech, q):
    bucket = mech.hash(q)[0]
    return (bucket[..., None] == bucket[..., None, :]).sum(-1) > 1


def test_memory_does_not_change_the_result(monkeypatch):
    mech = make("reformer(rounds=3, buckets=6, chunk=4, shared=false)")
    q, k, v = inputs(71, 71)
    whole = mech(q, k, v, causal=True)
    monkeypatch.setattr(grouped, "SCORE_BYTES", 1)
    monkeypatch.setattr(reformer, "HASH_BYTES", 1)
    close(mech(q, k, v, causal=True), whole)


def test_segments_are_calls_of_their_own():
    mech = make("reformer(rounds=2, buckets=4, chunk=3)")
    q, k, v = inputs(71, 71)
    segments = torch.tensor([7] * 20 + [2] * 51)
    out = mech(q, k, v, causal=True, mask=sq.Mask(segments=segments))
    for cut in (slice(0, 20), slice(20, 71)):
        close(out[:, :, cut], mech(*(t[:, :, cut] for t in (q, k, v)), causal=True))


def test_the_papers_chunks_leak_and_are_bidirectional_only():
    mech = make("reformer(buckets=4, chunk=5, chunks=sorted)")
    q, k, v = inputs(71, 71)
    with pytest.raises(sq.UnsupportedError, match="later tokens push the cuts"):
        mech(q, k, v, causal=True)
    with pytest.raises(sq.UnsupportedError, match="prefill"):
        mech.prefill(q, k, v)


# ---- the hash ------------------------------------------------------------------------------


def test_hash_is_the_papers():
    """argmax [xR, −xR], for each round, and the product of two with a list."""
    mech = make("reformer(rounds=3, buckets=[4, 6])")
    q, _, _ = inputs(71, 71)
    rotations = mech.rotations.repeat_interleave(2, 0)  # (H, rounds, 2 + 3, D)
    rotated = torch.einsum("bhld,hrmd->rbhlm", q, rotations)
    first, second = rotated.split([2, 3], -1)
    both = [torch.cat([t, -t], -1).argmax(-1) for t in (first, second)]
    assert torch.equal(mech.hash(q), both[0] + 4 * both[1])


def test_hash_depends_on_the_direction_and_the_seed_alone():
    q, _, _ = inputs(71, 71)
    mech = make("reformer(rounds=3)")
    assert torch.equal(mech.hash(q), mech.hash(7.0 * q))
    assert torch.equal(mech.hash(q), make("reformer(rounds=3)").hash(q))
    assert not torch.equal(mech.hash(q), make("reformer(rounds=3)", seed=1).hash(q))
    assert not torch.equal(mech.hash(q)[0], mech.hash(q)[1])


@pytest.mark.parametrize("buckets", [2, 16])
def test_near_vectors_share_a_bucket_as_often_as_the_hash_promises(buckets):
    """Two buckets and an angle θ: P = 1 − θ/π; more: by a large sample of (x·r, y·r)."""
    count, angle = 20_000, 0.6
    generator = torch.Generator().manual_seed(0)
    mech = sq.build("reformer", head_dim=8, num_heads=1, rounds=1, buckets=buckets, seed=3)
    pairs = torch.linalg.qr(torch.randn(count, 8, 2, generator=generator)).Q
    x = pairs[..., 0]
    y = math.cos(angle) * x + math.sin(angle) * pairs[..., 1]
    # Each block of vectors has rotations of its own: the mean is over those too.
    hits = []
    for seed in range(40):
        mech.seed = seed
        mech.reset_parameters()
        block = slice(seed * 500, (seed + 1) * 500)
        hits.append((mech.hash(x[None, None, block]) == mech.hash(y[None, None, block])).double())
    share = torch.stack([t.mean() for t in hits])
    if buckets == 2:
        wanted, noise = 1 - angle / math.pi, 0.0
    else:
        rows = torch.randn(200_000, buckets // 2, 2, generator=generator)
        own, other = rows[..., 0], math.cos(angle) * rows[..., 0] + math.sin(angle) * rows[..., 1]
        sides = [torch.cat([t, -t], -1).argmax(-1) for t in (own, other)]
        wanted = (sides[0] == sides[1]).double().mean().item()
        noise = 0.25 / 200_000
    # 40 independent draws of R: five standard errors, measured between the draws.
    error = math.sqrt(share.var().item() / 40 + noise)
    assert abs(share.mean().item() - wanted) <= 5 * error
    assert error < 0.02  # the test can tell 1 − θ/π = 0.81 from its neighbours


def test_buckets_of_a_longest_length_are_the_papers():
    for length, factors in ((1024, (32,)), (4096, (128,)), (65536, (32, 64)), (10, (2,))):
        mech = sq.build("reformer(buckets=none)", head_dim=4, num_heads=1, max_length=length)
        assert mech.factors == factors  # 2·length/64, of two factors beyond 128
    with pytest.raises(sq.OptionError, match="max_length is needed"):
        sq.build("reformer(buckets=none)", head_dim=4, num_heads=1)


# ---- states --------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
def test_state_holds_so_many_keys_of_every_bucket(shared):
    spec = f"reformer(rounds=3, buckets=4, chunk=5, before=2, shared={str(shared).lower()})"
    mech = make(spec, dtype=torch.float32)
    q, k, v = inputs(71, 71, dtype=torch.float32)
    _, state = mech.prefill(q, k, v)
    heads = 6 if shared else 3
    per_bucket = 3 * 5 * ((5 + 7) * 4 + 3 * 8) + 8  # keys, values, chunks of three rounds; count
    assert state.nbytes == 2 * 3 * heads * 4 * per_bucket


def test_a_long_stream_equals_the_whole_call():
    """Every slot is written over many times, in pieces of every kind."""
    for spec in ("reformer(rounds=2, buckets=2, chunk=3)",
                 "reformer(rounds=2, buckets=2, chunk=4, before=2, shared=false)"):  # fmt: skip
        mech = make(spec)
        q, k, v = inputs(211, 211)
        whole, state, at, parts = mech(q, k, v, causal=True), None, 0, []
        for n in (1, 50, 3, 1, 1, 90, 2, 63):
            piece = (t[:, :, at : at + n] for t in (q, k, v))
            out, state = mech.prefill(*piece, state=state)
            parts.append(out)
            at += n
        close(torch.cat(parts, 2), whole)


# ---- errors --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("reformer(buckets=7)", r"buckets=7 must be 1, an even integer"),
        ("reformer(buckets=[4, 3])", r"buckets=\(4, 3\) must be|buckets=\[4, 3\] must be"),
        ("reformer(rounds=0)", "rounds=0 must be an integer ≥ 1"),
        ("reformer(chunk=0, before=-1)", "chunk=0 must be.*before=-1 must be"),
        ("reformer(chunks=block)", "chunks='block'"),
        ("reformer(shared=false, chunks=sorted)", "chunks=sorted needs shared=true"),
        ("reformer(shared=false, own=last)", "own=last needs shared=true"),
        ("reformer(duplicates=twice)", "duplicates='twice'"),
    ],
)
def test_wrong_options(spec, message):
    with pytest.raises(sq.OptionError, match=message):
        sq.build(spec, head_dim=4, num_heads=1)


def test_shared_keys_are_as_many_as_queries():
    q, k, v = inputs(17, 71)
    with pytest.raises(sq.UnsupportedError, match="keys are the queries"):
        make("reformer")(q, k, v)


def test_rounds_that_list_nothing():
    q, _, v = inputs(5, 5, kv=6)
    none = torch.full((2, 2, 6, 1, 4), -1)
    out, lse = joint_softmax(q, q, v, none, none, scale=1.0)
    assert not out.any() and bool((lse == grouped.EMPTY).all())
