"""BigBird and its Longformer preset: limits, draws, global tokens, options."""

import itertools
import math

import pytest
import torch

import subquad as sq
from variants import inputs

F64 = torch.float64

# Weighted means of N(0, 1) values over ≤ 257 keys in two orders of summing: 257 × 1.1e-16 × 4;
# exponents of size ≤ 8 amplify their rounding by as much: 9e-13 at worst.
CLOSE = {"rtol": 0.0, "atol": 1e-12}
"""Sums of ≤ 300 weighted values below 5 in size: 300·1.1e-16·5 = 1.7e-13 at worst."""


def build(spec, heads=4, kv=2, dim=5, seed=0, **options):
    return sq.build(
        spec, head_dim=dim, num_heads=heads, num_kv_heads=kv, seed=seed, dtype=F64, **options
    )


def qkv(queries, keys=None, **how):
    return inputs(queries, keys or queries, heads=4, kv=2, **how)


# ---- exact limits -------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 63, 64, 65, 223, 255, 256])
def test_short_sequences_are_softmax(length, causal):
    """Up to window + random + global = 8 blocks of 32 every key is read, and read once."""
    mech, exact = build("bigbird(block=32)"), build("softmax")
    q, k, v = qkv(length, grad=True)
    out, wanted = mech(q, k, v, causal=causal), exact(q, k, v, causal=causal)
    if causal and length > 6 * 32:  # own, left, first and three random blocks
        assert (out - wanted)[:, :, 6 * 32 :].abs().amax() > 1e-3
        out, wanted = out[:, :, : 6 * 32], wanted[:, :, : 6 * 32]
    elif not causal and length > 7 * 32:  # a border block's window is cut: 1 + 1 + 3 + 1 + …
        read = mech.weights(q, k) > 0
        assert not read.all()
        full = read.all(-1)
        assert full[:, :, :32].all()  # global queries
        out, wanted = out[full], wanted[full]
    torch.testing.assert_close(out, wanted, **CLOSE)
    for a, b in zip(
        torch.autograd.grad(out.square().sum(), (q, k, v)),
        torch.autograd.grad(wanted.square().sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0.0, atol=1e-11)  # squares: tenfold


@pytest.mark.parametrize(
    "spec",
    [
        "bigbird(block=8, window=23)",
        "bigbird(block=8, window=1, random=99)",
        "bigbird(block=128)",
        "bigbird(block=8, window=1, random=0, global_blocks=[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10])",
        "bigbird(preset=longformer, window=82)",
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_every_way_to_read_all_keys_is_softmax(spec, causal):
    q, k, v = qkv(83)
    mask = torch.arange(83).expand(2, -1) % 7 > torch.tensor([[0], [2]])
    found, wanted = (build(s)(q, k, v, causal=causal, key_mask=mask) for s in (spec, "softmax"))
    torch.testing.assert_close(found, wanted, **CLOSE)


def test_without_global_and_random_blocks_it_is_local_attention():
    q, k, v = qkv(83, 97)
    found = build("bigbird(preset=longformer, window=[7, 2], dilation=3, global_tokens=[])")
    wanted = build("local(window=[7, 2], dilation=3)")
    for causal in (False, True):
        torch.testing.assert_close(
            found(q, k, v, causal=causal), wanted(q, k, v, causal=causal), **CLOSE
        )


def test_a_causal_call_has_no_last_block():
    """Nor a table then: gradients of its empty rows are none."""
    results = []
    for spec in ("bigbird(block=8, random=0, global_blocks=[-1])", "bigbird(block=8, window=3, "
                 "random=0, global_blocks=[])"):  # fmt: skip
        q, k, v = qkv(43, grad=True)
        out = build(spec)(q, k, v, causal=True)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, **CLOSE)


@pytest.mark.parametrize("length", [127, 128, 129, 1021])
def test_it_never_reads_more_than_it_says(length):
    """No length at which another computation takes over: keys read by a query that is not
    global stay ≤ C·(window + random + global blocks), whatever came before.
    """
    mech = build("bigbird(block=16, window=3, random=2)")
    for size in (16, length, 3, length):
        q, k, _ = qkv(size, batch=1)
        counts = (mech.weights(q, k) > 0).sum(-1)
        inner = counts[:, :, 16 : (size - 1) // 16 * 16]
        assert counts[:, :, :16].eq(size).all() and counts[:, :, -1].eq(size).all()
        if inner.numel():
            assert inner.max() <= 16 * (3 + 2 + 2)
            assert size < 9 * 16 or inner.max() < size


# ---- random blocks ------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_random_blocks_are_uniform_over_what_is_left(causal):
    """Every admissible pair of blocks is drawn as often as any other: χ² over 3,000 seeds.

    Block 9 of 14 with a window of 3 and 0, 13 global: 9 free blocks (1–7, 11, 12), causal the
    7 past ones; 36 and 21 pairs. χ² of n − 1 degrees of freedom exceeds n + 5√(2n) with
    probability < 1e-5.
    """
    mech = build("bigbird(random=2)", heads=1, kv=1)
    own, count = torch.tensor([9]), torch.tensor([14])
    free = [1, 2, 3, 4, 5, 6, 7] + ([] if causal else [11, 12])
    seen = dict.fromkeys(itertools.combinations(free, 2), 0)
    for seed in range(3000):
        mech.random_seed.fill_(seed)
        pair = mech.random_blocks(own, count, causal=causal)[0, 0, 0].tolist()
        seen[tuple(sorted(pair))] += 1
    expected = 3000 / len(seen)
    chi2 = sum((n - expected) ** 2 / expected for n in seen.values())
    assert chi2 < len(seen) + 5 * math.sqrt(2 * len(seen)), chi2


def test_draws_differ_by_head_block_and_seed():
    own, count = torch.arange(60), torch.tensor([60])
    first, other = (build("bigbird", seed=s).random_blocks(own, count)[0] for s in (0, 1))
    assert first.shape == (2, 60, 3)
    same = [(first[0] == first[1]), (first == other), (first[:, 1:] == first[:, :-1])]
    for hits in same:  # chance: 1/55 of each entry; 5 standard deviations of 180 entries is 9
        assert hits.float().mean() < 1 / 55 + 9 / 180


@pytest.mark.parametrize("count", [1, 2, 4, 5, 7, 12, 40])
@pytest.mark.parametrize("causal", [False, True])
def test_draws_are_distinct_and_outside_of_window_and_global_blocks(count, causal):
    mech = build("bigbird(window=[2, 1], random=3, global_blocks=[0, 3, -2])")
    drawn = mech.random_blocks(torch.arange(count), torch.tensor([count]), causal=causal)[0]
    for head, own in itertools.product(range(2), range(count)):
        marked = {0, 3} if causal else {0, 3, count - 2}
        last = own - 2 if causal else count
        free = set(range(last)) - set(range(own - 2, own + 2)) - marked
        row = drawn[head, own].tolist()
        found = [n for n in row if n >= 0]
        assert len(set(found)) == len(found) == min(3, len(free))
        assert set(found) <= free and row[len(found) :] == [-1] * (3 - len(found))


def test_a_causal_draw_does_not_depend_on_the_length():
    mech = build("bigbird")
    long = mech.random_blocks(torch.arange(90), torch.tensor([90]), causal=True)
    short = mech.random_blocks(torch.arange(17, 31), torch.tensor([31]), causal=True)
    assert torch.equal(long[:, :, 17:31], short)


def test_rows_of_a_batch_draw_for_their_own_length():
    mech = build("bigbird")
    own = torch.arange(40)
    both = mech.random_blocks(own, torch.tensor([40, 23]))
    for row, count in enumerate((40, 23)):
        assert torch.equal(both[row], mech.random_blocks(own, torch.tensor([count]))[0])
    assert both[1].max() < 23


def test_a_seed_is_part_of_the_state_dict():
    mech, other = build("bigbird(block=4)", seed=5), build("bigbird(block=4)", seed=2**63 + 5)
    assert torch.equal(mech.random_seed, other.random_seed)
    third = build("bigbird(block=4)", seed=6)
    q, k, v = qkv(97)
    assert not torch.equal(third(q, k, v), mech(q, k, v))
    third.load_state_dict(mech.state_dict())
    assert torch.equal(third(q, k, v), mech(q, k, v))


def test_random_blocks_can_be_brought():
    mech = build("bigbird(block=8, random=1)")
    mech.random_blocks = lambda own, count, causal=False: torch.full((1, 2, len(own), 1), 7)
    q, k, _ = qkv(83)
    read = mech.weights(q, k)[0, 0, 17] > 0
    blocks = set((read.nonzero().flatten() // 8).tolist())
    assert blocks == {0, 1, 2, 3, 7, 10}


# ---- global tokens and blocks -------------------------------------------------------------


def test_global_tokens_read_and_are_read_by_all():
    mech = build("bigbird(preset=longformer, window=2, global_tokens=[5, -1, 30])")
    q, k, _ = qkv(61)
    read = mech.weights(q, k) > 0
    for n in (5, 30, 60):
        assert read[:, :, n].all() and read[:, :, :, n].all()
    assert not read[:, :, 40, 10].any()
    causal = mech.weights(q, k, causal=True) > 0
    for n in (5, 30):
        assert causal[:, :, n, : n + 1].all() and causal[:, :, n:, n].all()
        assert not causal[:, :, :n, n].any()
    assert causal[:, :, 60].sum(-1).eq(3 + 2).all()  # the last one is not global when causal


@pytest.mark.parametrize("lengths", [(83, 83), (41, 82), (1, 9)])
def test_the_last_global_block_is_a_rows_own(lengths):
    """Padding on the right, of any length, changes no output of the row: also not what is
    global at its end, or drawn for it.
    """
    mech = build("bigbird(block=8, random=1, global_tokens=[-2])")
    q, k, v = qkv(83)
    mask = torch.arange(83) < torch.tensor(lengths)[:, None]
    out = mech(q, k, v, key_mask=mask)
    for row, n in enumerate(lengths):
        alone = mech(*(t[row : row + 1, :, :n] for t in (q, k, v)))
        torch.testing.assert_close(out[row : row + 1, :, :n], alone, **CLOSE)


def test_a_dilation_for_each_head():
    mech = build("bigbird(preset=longformer, window=2, dilation=[3, 1], global_tokens=[])")
    q, k, _ = qkv(31)
    read = mech.weights(q, k)[0, :, 15] > 0
    assert [r.nonzero().flatten().tolist() for r in read] == [
        *[[9, 12, 15, 18, 21]] * 2,
        *[[13, 14, 15, 16, 17]] * 2,
    ]


def test_a_step_reads_what_the_whole_reads():
    """A token at a time, in a long sequence: also where later blocks are drawn from."""
    mech = build("bigbird(block=4, random=2, global_tokens=[6])")
    q, k, v = qkv(67)
    whole = mech(q, k, v, causal=True)
    state = None
    for n in range(67):
        out, state = mech.prefill(*(t[:, :, n : n + 1] for t in (q, k, v)), state=state)
        torch.testing.assert_close(out, whole[:, :, n : n + 1], **CLOSE)


# ---- options ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("bigbird(preset=longfromer)", "did you mean 'longformer'"),
        ("bigbird(window=4)", "window=4 must be an odd number of blocks"),
        ("bigbird(window=[1, -1])", r"window=\(1, -1\) must be an integer ≥ 0, or a pair"),
        ("bigbird(block=0, random=-1)", "block=0 must be .* random=-1 must be"),
        ("bigbird(dilation=2)", "dilation=2 needs a window of tokens: preset=longformer"),
        ("bigbird(global_blocks=[0, 0])", r"global_blocks=\(0, 0\) names one twice"),
        ("bigbird(global_tokens=3)", "global_tokens=3 must be a list of integers"),
        ("bigbird(preset=longformer, random=2)", "random=2 does not go with preset=longformer"),
        ("bigbird(preset=longformer, block=32)", "block=32 does not go with preset=longformer"),
        ("bigbird(preset=longformer, dilation=[2, 0])", "dilation=0 must be an integer ≥ 1"),
        ("bigbird(preset=longformer, dilation=[])", r"dilation=\[\] must be"),
        ("bigbird(preset=longformer, dilation=[1, 2, 3])", "one for each of num_kv_heads=2"),
    ],
)
def test_wrong_options_are_named(spec, words):
    with pytest.raises(sq.OptionError, match=words):
        build(spec)


def test_options_survive_writing():
    for text in (
        "bigbird(preset=longformer, window=[5, 3], dilation=[1, 2], global_tokens=[0, -1])",
        "bigbird(block=16, window=5, random=0, global_blocks=[])",
    ):
        _, config = sq.registry.resolve(text)
        assert str(config) == text


def test_partial_sums_are_refused_where_the_end_of_a_row_matters():
    q, k, v = qkv(13)
    for spec in ("bigbird", "bigbird(random=0)", "bigbird(random=1, global_blocks=[0])"):
        with pytest.raises(sq.UnsupportedError, match="depend on where the keys end"):
            build(spec).partial(q, k, v)
    assert build("bigbird(random=0, global_blocks=[0])").partial(q, k, v).den.shape == (2, 4, 13)
