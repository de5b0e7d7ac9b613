"""Sparse Sinkhorn attention: exact limits, the balanced matrix, sorting, state, learning."""

import itertools
import math

import pytest
import torch

import subquad as sq
from subquad.attention.sparse.sinkhorn import SinkhornState, balance, choose

EXACT = 1e-12
"""Rounding of 1.1e-16 in sums of fewer than 10^3 terms, with a margin of ten."""


def problem(length, *, batch=2, heads=6, kv=3, dim=5, value=7, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(batch, h, length, d, generator=generator, dtype=torch.float64).to(dtype)
        for h, d in ((heads, dim), (kv, dim), (kv, value))
    )


def build(spec, *, heads=6, kv=3, dim=5, dtype=torch.float64, **sizes):
    return sq.build(spec, head_dim=dim, num_heads=heads, num_kv_heads=kv, dtype=dtype, **sizes)


# ---- exact limits --------------------------------------------------------------------------


EXACT_SPECS = [
    "sinkhorn(block=67)",
    "sinkhorn(block=53, top=none)",
    "sinkhorn(block=64, top=3, sort=bilinear)",
    "sinkhorn(block=8, top=6, hard=true)",
    "sinkhorn(block=1, top=52, hard=true)",
]


@pytest.mark.parametrize(
    ("spec", "causal"),
    [*itertools.product(EXACT_SPECS, [False, True]), ("sinkhorn(block=53, sortcut=true)", False)],
)
def test_is_softmax_where_every_key_is_read(spec, causal):
    """One block, whose copy leaves the ratio unchanged; or all other blocks as they are."""
    q, k, v = problem(53)
    mech, exact = build(spec).eval(), build("softmax")
    found, wanted = (m(q, k, v, causal=causal) for m in (mech, exact))
    assert (found - wanted).abs().max() < EXACT


def test_one_block_is_softmax_with_masked_keys_too():
    q, k, v = problem(53)
    key = torch.rand(2, 53, generator=torch.Generator().manual_seed(1)) > 0.4
    for causal in (False, True):
        found = build("sinkhorn(block=60)").eval()(q, k, v, key_mask=key, causal=causal)
        wanted = build("softmax")(q, k, v, key_mask=key, causal=causal)
        assert (found - wanted).abs().max() < EXACT


# ---- the balanced matrix -------------------------------------------------------------------


def test_rows_and_columns_sum_to_one():
    """Closed rows and columns stay out: the rest is balanced as if they were not there."""
    logits = torch.randn(1, 2, 9, 9, generator=torch.Generator().manual_seed(0)).double() / 3
    assert logits.abs().max() < 1.5
    opened = torch.ones(1, 1, 9, 9, dtype=torch.bool)
    opened[..., 3, :] = opened[..., :, 6] = False
    # An iteration contracts by tanh²(δ/4), δ = max R_ij + R_kl − R_il − R_kj ≤ 4·1.5:
    # (tanh 1.5)^(2·200) < 1e-17.
    p = balance(logits, opened, 200).exp()
    assert not p[..., 3, :].any() and not p[..., 6].any()
    kept = [i for i in range(9) if i != 3]
    assert (p.sum(-1)[..., kept] - 1).abs().max() < EXACT
    kept = [i for i in range(9) if i != 6]
    assert (p.sum(-2)[..., kept] - 1).abs().max() < EXACT


def test_low_temperature_gives_the_best_permutation():
    logits = torch.randn(1, 1, 4, 4, generator=torch.Generator().manual_seed(2)).double()
    scores = {
        order: sum(logits[0, 0, i, j].item() for i, j in enumerate(order))
        for order in itertools.permutations(range(4))
    }
    best, second = sorted(scores, key=scores.get, reverse=True)[:2]
    gap = scores[best] - scores[second]
    assert gap > 0.1
    # P maximises <P, R> + τ·H(P), and H ≤ N·log N: what is not at the best permutation loses at
    # least `gap` of <P, R>, hence weighs at most τ·N·log N / gap.
    p = balance(logits / (gap / 20), torch.ones(1, 1, 4, 4, dtype=torch.bool), 5000).exp()
    assert p[0, 0].argmax(-1).tolist() == list(best)
    assert (p[0, 0].amax(-1) - 1).abs().max() < 4 * math.log(4) / 20


def test_balancing_below_the_diagonal_leaves_the_previous_block():
    """Why causal rows are normalised alone: whatever the logits, P tends to the shift by one."""
    logits = torch.randn(1, 1, 6, 6, generator=torch.Generator().manual_seed(3)).double()
    opened = torch.ones(6, 6, dtype=torch.bool).tril(-1)[None, None]
    # Without total support convergence is not geometric but as 1/n, up to terms of log(n)/n².
    errors = [
        (balance(logits, opened, n).exp()[0, 0].diagonal(-1) - 1).abs().max() for n in (1000, 2000)
    ]
    assert errors[1] < 0.01
    assert errors[1] / errors[0] == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("iterations", [0, 1, 3])
def test_gradient_of_the_balanced_matrix(iterations):
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(2, 3, 5, 4, generator=generator, dtype=torch.float64).requires_grad_()
    opened = torch.rand(2, 1, 5, 4, generator=generator) > 0.3
    opened[0, 0, 2], opened[0, 0, :, 3] = False, False
    torch.autograd.gradcheck(lambda x: balance(x, opened, iterations).exp(), logits)


def test_choices_are_the_largest_entries_with_their_shares_of_the_rest():
    p = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.7, 0.0, 0.2, 0.1]], dtype=torch.float64)
    opened = p > 0
    log_p = torch.where(opened, p.clamp_min(1e-300).log(), -1e30)[None, None]
    index, weight, live = choose(log_p, opened[None, None], 4)
    assert index[0, 0].tolist()[0] == [1, 2, 3, 0] and index[0, 0].tolist()[1][:3] == [0, 2, 3]
    shares = [[0.4, 0.3 / 0.6, 0.2 / 0.3, 1.0], [0.7, 0.2 / 0.3, 1.0, 0.0]]
    wanted = torch.tensor(shares, dtype=torch.float64)
    assert torch.equal(live[0, 0], wanted > 0)
    assert (weight[0, 0] - wanted)[live[0, 0]].abs().max() < EXACT


# ---- gradients -----------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "options", ["top=2, iterations=3", "top=none, iterations=2, sort=bilinear"]
)
def test_gradients_of_several_blocks(options, causal):
    """The law runs on five tokens: here these are three blocks, and parameters count too."""
    mech = build(f"sinkhorn(block=2, {options})", heads=2, kv=1, dim=2).eval()
    q, k, v = problem(5, batch=1, heads=2, kv=1, dim=2, value=1)
    leaves = [t.requires_grad_() for t in (q, k, v, *mech.parameters())]
    torch.autograd.gradcheck(lambda *x: mech(*x[:3], causal=causal), leaves)


def test_the_sorting_network_gets_a_gradient_through_the_weights():
    """v alone changes nothing about the choice; q̄ and k̄ do, though no such key is read."""
    mech = build("sinkhorn(block=4, top=1, iterations=0)", heads=1, kv=1).eval()
    q, k, v = problem(12, batch=1, heads=1, kv=1)
    k.requires_grad_()
    weights = mech.weights(q, k.detach())[0, 0]
    unread = [w for w in (1, 2) if not weights[:4, 4 * w : 4 * w + 4].any()]
    assert len(unread) >= 1  # one block is sorted to the first one
    grad = torch.autograd.grad(mech(q, k, v)[0, 0, :4].sum(), k)[0][0, 0]
    assert grad[4 * unread[0] : 4 * unread[0] + 4].abs().max() > 1e-6


# ---- what is read --------------------------------------------------------------------------


def test_padding_is_never_sorted_in():
    """All blocks but the first and the fifth hold masked tokens alone: the fifth is chosen."""
    q, k, _ = problem(31)
    key = torch.zeros(2, 31, dtype=torch.bool)
    key[:, :4] = key[:, 17:19] = True
    mech = build("sinkhorn(block=4, hard=true)").eval()
    weights = mech.weights(q, k, key_mask=key)[:, :, :4]
    assert torch.equal(weights > 0, key[:, None, None].expand_as(weights))


def test_causal_blocks_read_complete_earlier_blocks():
    q, k, _ = problem(31)
    read = build("sinkhorn(block=4, top=2, hard=true)").eval().weights(q, k, causal=True) > 0
    for i in range(31):
        u = i // 4
        own = read[:, :, i, 4 * u :].sum(-1)
        assert (own == i % 4 + 1).all()
        earlier = read[:, :, i, : 4 * u].unflatten(-1, (u, 4)) if u else read[:, :, i, :0]
        assert (earlier.sum((-1, -2) if u else -1) == 4 * min(u, 2)).all()
        assert u == 0 or (earlier.all(-1) == earlier.any(-1)).all()


def test_one_query_reads_the_block_that_it_asks_for():
    """L ≠ S: balancing one row against all columns would forget the logits."""
    q, k, _ = problem(40, heads=3)
    q = q[:, :, :1]
    read = build("sinkhorn(block=4, hard=true)", heads=3).eval().weights(q, k)[:, :, 0] > 0
    means = k.unflatten(2, (10, 4)).mean(3)
    best = (means @ q.mT)[..., :9, 0].argmax(-1)  # the own block, the last one, aside
    assert torch.equal(read.unflatten(-1, (10, 4)).all(-1)[..., :9].long().argmax(-1), best)


def test_sortcut_reads_the_same_blocks_everywhere():
    q, k, _ = problem(40)
    read = build("sinkhorn(block=4, top=3, sortcut=true)").eval().weights(q, k) > 0
    read = read.unflatten(-1, (10, 4)).any(-1)  # (B, H, L, blocks)
    own = torch.arange(40)[:, None] // 4 == torch.arange(10)
    assert read.masked_fill(own, False).any(2).sum(-1).le(3).all()
    assert (read | own).sum(-1).ge(3).all() and read[:, :, own].all()
    common = read.masked_fill(own, True).all(2)  # blocks that all queries read
    assert (common.sum(-1) == 3).all()


def test_the_mixture_is_the_soft_permutation():
    """With one token a block and no others read, P itself: Σ_w P_uw v_w beside the own value."""
    q, k, v = (t[:, :3] for t in problem(7))
    mech = build("sinkhorn(block=1, top=none, iterations=5)", heads=3).eval()
    scale = 5**-0.5
    logits = scale * (q @ k.mT) / 0.75
    p = balance(logits, torch.ones(1, 1, 7, 7, dtype=torch.bool), 5).exp()
    pair = torch.stack([(q * k).sum(-1), (q * (p @ k)).sum(-1)], -1)
    share = torch.softmax(scale * pair, -1)
    wanted = share[..., :1] * v + share[..., 1:] * (p @ v)
    assert (mech(q, k, v) - wanted).abs().max() < EXACT


# ---- noise ---------------------------------------------------------------------------------


def test_gumbel_noise_draws_blocks_in_proportion_to_the_matrix():
    """Gumbel-max: argmax(R + ε) falls on w with probability softmax(R)_w. In training only."""
    torch.manual_seed(0)
    q, k, _ = problem(4, batch=1, heads=1, kv=1)
    draws = 4000
    mech = build("sinkhorn(block=1, hard=true, iterations=0)", heads=1, kv=1)
    q, k = (t.expand(draws, -1, -1, -1) for t in (q, k))
    chosen = (mech.weights(q, k) > 0)[:, 0, 0, 1:]
    assert (chosen.sum(-1) == 1).all()
    wanted = torch.softmax(5**-0.5 * k[0, 0, 1:] @ q[0, 0, 0], 0)
    # Standard deviation of a frequency ≤ ½/√draws; four of them.
    assert (chosen.double().mean(0) - wanted).abs().max() < 4 * 0.5 / math.sqrt(draws)
    weights = mech.eval().weights(q, k)
    assert torch.equal(weights, weights[:1].expand_as(weights))


def test_without_noise_training_is_deterministic():
    q, k, v = problem(23)
    mech = build("sinkhorn(block=4, gumbel=false)").train()
    assert torch.equal(mech(q, k, v), mech(q, k, v))
    assert mech.capabilities.deterministic
    noisy = build("sinkhorn(block=4)").train()
    assert not torch.equal(noisy(q, k, v), noisy(q, k, v))
    assert not noisy.capabilities.deterministic


# ---- state ---------------------------------------------------------------------------------


def test_state_grows_by_keys_values_and_summaries():
    q, k, v = problem(41, dtype=torch.float32)
    mech = build("sinkhorn(block=8, top=2)", dtype=torch.float32).eval()
    sizes = {}
    for n in (17, 24, 25, 41):
        state = mech.prefill(*(t[:, :, :n] for t in (q, k, v)))[1]
        assert isinstance(state, SinkhornState)
        blocks = (n - 1) // 8
        assert state.summaries.shape[2] == blocks
        # keys and values; means and a flag of each block
        sizes[n] = state.nbytes - 2 * (n * 4 * 3 * (5 + 7) + blocks * (4 * 3 * 5 + 1))
    assert len(set(sizes.values())) == 1, sizes


@pytest.mark.parametrize("queries", [1, 9, 17])
def test_a_prefill_of_the_last_queries(queries):
    """Its first block is sorted nothing, unless it starts with a query; what follows is whole."""
    q, k, v = problem(41)
    key = torch.rand(2, 41, generator=torch.Generator().manual_seed(3)) > 0.3
    key[:, 25:] = True
    mech = build("sinkhorn(block=8, top=2)").eval()
    whole = mech(q[:, :, 25 - queries :], k, v, key_mask=key, causal=True)
    first = q[:, :, 25 - queries : 25], k[:, :, :25], v[:, :, :25]
    out, state = mech.prefill(*first, key_mask=key[:, :25])
    parts = [out]
    for at in (slice(25, 26), slice(26, 37), slice(37, 41)):
        out, state = mech.step(*(t[:, :, at] for t in (q, k, v)), state)
        parts.append(out)
    assert (torch.cat(parts, 2) - whole).abs().max() < EXACT


def test_a_block_keeps_what_was_sorted_to_it():
    """What is brought to a block is settled by its first token."""
    q, k, v = problem(41)
    mech = build("sinkhorn(block=8, top=2)").eval()
    _, state = mech.prefill(*(t[:, :, :33] for t in (q, k, v)))
    for n in range(33, 40):
        _, new = mech.step(*(t[:, :, n : n + 1] for t in (q, k, v)), state)
        assert torch.equal(new.k, state.k) and torch.equal(new.v, state.v)
        state = new
    _, new = mech.step(*(t[:, :, 40:] for t in (q, k, v)), state)
    assert not torch.equal(new.k, state.k)


# ---- learning ------------------------------------------------------------------------------


def asked_blocks(generator, batch=16, blocks=8, size=4, code=8, value=4):
    """Blocks that tell a random code and ask for another one's; the target is its mean value."""
    tell = torch.randn(batch, blocks, code, generator=generator)
    order = torch.stack([torch.randperm(blocks, generator=generator) for _ in range(batch)])
    ask = tell.gather(1, order[..., None].expand_as(tell))
    x = torch.cat([ask, tell], -1).repeat_interleave(size, 1)
    v = torch.randn(batch, blocks * size, value, generator=generator)
    means = v.unflatten(1, (blocks, size)).mean(2)
    wanted = means.gather(1, order[..., None].expand_as(means)).repeat_interleave(size, 1)
    return x[:, None], v[:, None], wanted[:, None], order


def test_learns_to_sort_the_block_that_is_asked_for():
    """A block asks by content for another, anywhere; random codes leave nothing to remember."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    mech = sq.build("sinkhorn(block=4)", head_dim=8, num_heads=1)
    to_q, to_k = (torch.nn.Linear(16, 8, bias=False) for _ in range(2))
    optimizer = torch.optim.Adam([*to_q.parameters(), *to_k.parameters()], lr=0.03)
    for _ in range(120):
        x, v, wanted, _ = asked_blocks(generator)
        loss = (mech(to_q(x), to_k(x), v) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    mech.eval()
    x, v, wanted, order = asked_blocks(generator, batch=64)
    q, k = to_q(x), to_k(x)
    read = mech.weights(q, k)[:, 0].unflatten(1, (8, 4)).unflatten(3, (8, 4)).sum((2, 4))
    # 1 block in 8 would be right by chance; the mean of all values has an error of 7/8.
    assert (read.argmax(-1) == order).float().mean() > 0.9
    assert (mech(q, k, v) - wanted).square().mean() < 0.2 * wanted.square().mean()


# ---- options and errors --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("block=0", r"block=0 must be an integer ≥ 1"),
        ("top=0", r"top=0 must be an integer ≥ 1"),
        ("sort=lstm", r"sort='lstm' is none of attention, bilinear, linear"),
        ("iterations=-1", r"iterations=-1 must be an integer ≥ 0"),
        ("temperature=0.0", r"temperature=0.0 must be"),
        ("gumbel=1", r"gumbel=1 must be"),
        ("hard=true, top=none", r"hard=true needs a number of sorted blocks"),
        ("sortcut=true, top=none", r"sortcut=true needs a number of sorted blocks"),
        ("hard=true, sortcut=true", r"exclude each other"),
        ("iterations=3, sortcut=true", r"iterations=3 has no meaning with sortcut=true"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(sq.OptionError, match=message):
        build(f"sinkhorn({options})")


def test_linear_sorting_has_a_greatest_length():
    with pytest.raises(sq.OptionError, match="max_length is needed"):
        build("sinkhorn(sort=linear)")
    mech = build("sinkhorn(block=8, sort=linear)", max_length=30).eval()
    assert mech.sort_weight.shape == (6, 4, 5)
    q, k, v = problem(31)
    assert mech(*(t[:, :, :30] for t in (q, k, v))).shape == (2, 6, 30, 7)
    for call in (lambda: mech(q, k, v), lambda: mech.prefill(q, k, v)):
        with pytest.raises(sq.ShapeError, match=r"length S=31, longer than max_length=30"):
            call()
    with pytest.raises(sq.UnsupportedError, match="learned parameters"):
        sq.attention(q, k, v, "sinkhorn(sort=bilinear)")


def test_sortcut_refuses_the_future():
    mech = build("sinkhorn(sortcut=true)").eval()
    with pytest.raises(sq.UnsupportedError, match="leaks the future"):
        mech(*problem(7), causal=True)


def test_bilinear_starts_as_the_attention_sort():
    q, k, v = problem(31)
    plain, learned = (build(f"sinkhorn(block=4{x})").eval() for x in ("", ", sort=bilinear"))
    assert (plain(q, k, v) - learned(q, k, v)).abs().max() < EXACT
    with torch.no_grad():
        learned.sort_weight.neg_()
    assert (plain(q, k, v) - learned(q, k, v)).abs().max() > 1e-3
