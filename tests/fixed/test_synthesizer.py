"""`synthesizer`: exact limits, mixtures, positions, states, memory, errors."""

import subprocess
import sys

import pytest
import torch

import subquad as sq
from laws import reference
from references import ref_synthesizer
from subquad.attention.exact import engine
from variants import inputs

B, H, HKV, D, V, N = 2, 6, 3, 5, 7, 71
# Sums of ≤ 71 terms, logits of size ≤ 10: 1.1e-16 × 71 × 10 ≈ 1e-13, with a margin of ten.
BOUND = 1e-12


def build(spec="synthesizer", length=N, **options):
    sizes = {"head_dim": D, "num_heads": H, "num_kv_heads": HKV, "dtype": torch.float64}
    return sq.build(spec, max_length=length, **(sizes | options)).eval()


def close(found, wanted, bound=BOUND):
    assert found.shape == wanted.shape
    error = (found - wanted).abs().max().item()
    assert error <= bound * max(1.0, wanted.abs().max().item()), f"{error:.2e}"


def exact(q, k, v, **options):
    softmax = sq.build("softmax", head_dim=D, num_heads=H, num_kv_heads=HKV)
    return softmax(q, k, v, **options)


# ---- exact limits ------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_dot_alone_is_softmax(causal):
    """Forward and gradients, states and masks, without max_length."""
    mech = build("synthesizer(kinds=dot)", None)
    leaves = inputs(17, N, grad=True)
    out, wanted = mech(*leaves, causal=causal), exact(*leaves, causal=causal)
    close(out, wanted)
    for a, b in zip(
        torch.autograd.grad(out.square().sum(), leaves),
        torch.autograd.grad(wanted.square().sum(), leaves),
        strict=True,
    ):
        close(a, b)
    assert mech.capabilities.compact and mech.capabilities.functional
    assert not list(mech.parameters())


def test_zero_logits_are_uniform():
    mech = build("synthesizer(kinds=random)")
    torch.nn.init.zeros_(mech.random_logits)
    q, k, v = inputs(N, N)
    close(mech(q, k, v), v.mean(2, keepdim=True).repeat_interleave(2, 1).expand(-1, -1, N, -1))


def test_a_mixture_in_which_all_else_is_zero_is_softmax_at_its_share():
    """α·q·k beside logits of zero."""
    mech = build("synthesizer(kinds=[factorised_random, dot])")
    with torch.no_grad():
        mech.random_rows.zero_()
        mech.mixture.copy_(torch.randn(HKV, 2, generator=torch.Generator().manual_seed(3)))
    q, k, v = inputs(17, N)
    share = mech.mixing_weights()[:, 1].repeat_interleave(2)[:, None, None]
    close(mech(q, k, v), exact(q * share, k, v))
    close(mech.mixing_weights().sum(-1), torch.ones(HKV, dtype=torch.float64))


def test_factorised_random_is_random_of_that_product():
    factors = build("synthesizer(kinds=factorised_random, rank=3)")
    whole = build("synthesizer(kinds=random)")
    with torch.no_grad():
        whole.random_logits.copy_(factors.random_rows @ factors.random_columns.mT)
    q, k, v = inputs(N, N)
    close(factors(q, k, v, causal=True), whole(q, k, v, causal=True))


def test_factorised_dense_of_one_row_is_dense():
    """a = 1: A_i is one number; with W_A = 0 and b_A = 1 the logits are those of B alone."""
    dense, factors = build(), build("synthesizer(kinds=factorised_dense)", factors=[1, N])
    with torch.no_grad():
        for part in ("weight", "bias"):
            getattr(factors, f"factor_hidden_{part}").copy_(getattr(dense, f"hidden_{part}"))
            getattr(factors, f"second_{part}").copy_(getattr(dense, f"column_{part}"))
        factors.first_weight.zero_()
        factors.first_bias.fill_(1.0)
    q, k, v = inputs(N, N)
    close(factors(q, k, v), dense(q, k, v))


def test_dense_is_a_network_of_each_query():
    """Row i depends on q_i alone: what is at other positions does not matter; nor does k."""
    mech = build()
    torch.nn.init.normal_(mech.column_bias, generator=torch.Generator().manual_seed(3))
    q, k, v = inputs(N, N)
    w1, b1, w2, b2 = (t[0] for t in mech.parameters())
    logits = torch.relu(q[0, 1, 3] @ w1.mT + b1) @ w2.mT + b2
    close(mech.weights(q, k)[0, 1, 3], torch.softmax(logits, -1))
    close(mech(q, torch.full_like(k, torch.nan), v), mech(q, k, v), 0.0)
    shuffled = torch.randperm(N, generator=torch.Generator().manual_seed(4))
    close(mech(q[:, :, shuffled], k, v), mech(q, k, v)[:, :, shuffled])


def test_fixed_logits_are_no_parameters():
    mech = build("synthesizer(kinds=[random, factorised_random], trainable=false)")
    assert [name for name, _ in mech.named_parameters()] == ["mixture"]
    buffers = {name for name, _ in mech.named_buffers()}
    assert buffers == {"random_logits", "random_rows", "random_columns"}
    assert buffers <= mech.state_dict().keys()


def test_random_logits_start_with_variance_one():
    """n² = 160,000 draws for each of 3 heads, products of rank 8 of N(0, 8^-½) twice: variance 1.

    The variance of the sample variance of R is 2/480,000: ±5 σ = 0.0102. Products share factors:
    400·8·3 = 9,600 independent rows and as many columns, relative ±5·√(2/9600)·√2 = 0.102.
    """
    whole = build("synthesizer(kinds=random)", 400).random_logits
    factors = build("synthesizer(kinds=factorised_random)", 400)
    product = factors.random_rows @ factors.random_columns.mT
    assert abs(whole.var().item() - 1.0) < 0.0102
    assert abs(product.var().item() - 1.0) < 0.102


# ---- positions ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dense", "factorised_dense"])
def test_dense_queries_have_no_position(kind):
    """Cross-attention one query at a time is that of all at once, and of a state."""
    mech = build(f"synthesizer(kinds=[{kind}, dot])")
    q, k, v = inputs(23, 13)
    wanted = mech(q, k, v)
    _, state = mech.prefill(*inputs(13, 13)[:1], k, v)
    for t in range(23):
        close(mech(q[:, :, t : t + 1], k, v), wanted[:, :, t : t + 1])
        close(mech.step(q[:, :, t : t + 1], None, None, state)[0], wanted[:, :, t : t + 1])


def test_random_sequences_end_together():
    """Fewer queries are the last rows; fewer keys are the last columns."""
    mech = build("synthesizer(kinds=random)")
    q, k, v = inputs(N, N)
    weights = mech.weights(q, k)
    logits = mech.random_logits.repeat_interleave(2, 0)
    close(weights[0], torch.softmax(logits, -1))
    close(mech.weights(q[:, :, 60:], k), weights[:, :, 60:])
    found = mech.weights(q, k[:, :, :5])
    close(found[0], torch.softmax(logits[..., 66:], -1))
    with pytest.raises(sq.UnsupportedError, match="the query's position"):
        mech.step(q, None, None, mech.prefill(q, k, v)[1])


@pytest.mark.parametrize("dense", ["bool", "float"])
def test_explicit_masks_and_random_logits(dense):
    """Both are additive parts of one mask."""
    mech = build("synthesizer(kinds=[random, dense])")
    q, k, v = inputs(17, N)
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randn(B, H, 17, N, generator=generator, dtype=torch.float64)
    mask = sq.Mask(dense=drawn > 0.2 if dense == "bool" else drawn)
    bias = None if dense == "bool" else drawn
    found = mech(q, k, v, mask=mask)
    allowed = drawn > 0.2 if dense == "bool" else torch.ones(1, 1, 17, N, dtype=torch.bool)
    wanted = ref_synthesizer(mech, q, k, v, allowed=allowed, scale=D**-0.5, bias=bias)
    close(found, wanted)


# ---- states, chunks ----------------------------------------------------------------------


def test_keys_are_kept_for_the_dot_product_alone():
    q, k, v = inputs(N, N)
    _, without = build("synthesizer(kinds=[dense, random])").prefill(q, k, v)
    _, with_ = build("synthesizer(kinds=[dense, dot])").prefill(q, k, v)
    assert without.k.shape == (B, HKV, N, 0) and without.nbytes == B * HKV * N * V * 8
    assert with_.nbytes == B * HKV * N * (V + D) * 8


@pytest.mark.parametrize("causal", [False, True])
def test_chunks_change_nothing(monkeypatch, causal):
    """One query a chunk, recomputed in the backward pass, against the reference."""
    monkeypatch.setattr(engine, "CHUNK_BYTES", 1)
    mech = build("synthesizer(kinds=[random, factorised_dense, dense, dot])")
    with torch.no_grad():
        mech.mixture.copy_(torch.randn(HKV, 4, generator=torch.Generator().manual_seed(3)))
    leaves = [*inputs(13, 19, grad=True), *mech.parameters()]
    out = mech(*leaves[:3], causal=causal)
    wanted = reference(mech, *leaves[:3], sq.Mask(causal=causal))
    close(out, wanted)
    for a, b in zip(
        torch.autograd.grad(out.square().sum(), leaves),
        torch.autograd.grad(wanted.square().sum(), leaves),
        strict=True,
    ):
        close(a, b, 1e-10)  # sums over 2·6·13 rows besides


def test_dropout_and_noise_keep_the_expectation():
    """Weights as in exact attention: the mean of n = 400 draws of a bounded error.

    Dropping with p = ½ doubles or removes a weight: an output is off by at most
    √(Σ w²)·max|v| ≤ max|v| in standard deviation, its mean by 5/√400 of that at 5 σ.
    """
    mech = build("synthesizer(kinds=[dense, dot], dropout=0.5, weight_noise=0.3)")
    q, k, v = inputs(7, 9)
    wanted = mech(q, k, v)
    close(mech(q, k, v), wanted, 0.0)
    mech.train()
    torch.manual_seed(0)
    draws = torch.stack([mech(q, k, v) for _ in range(400)])
    assert draws.std(0).min() > 0
    spread = (mech.eval().weights(q, k).square().sum(-1, keepdim=True)).sqrt() * v.abs().max()
    assert ((draws.mean(0) - wanted).abs() <= 5 / 20 * 1.2 * spread).all()


MEMORY = """
import resource, sys, torch, subquad as sq
spec, length = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
mech = sq.build(spec, head_dim=16, num_heads=4, max_length=6144)
q, k, v = (torch.randn(1, 4, length, 16, requires_grad=True) for _ in range(3))
mech(q, k, v, causal=True).sum().backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_no_square_matrix_is_kept():
    """At 6,144 tokens and 4 heads one L×S matrix is 604 MB: training takes less than half of it
    more than at 256 tokens. Chunks hold 64 MiB of logits, eight such temporaries at most.
    """
    peaks = [
        int(
            subprocess.run(
                [sys.executable, "-c", MEMORY, "synthesizer(kinds=[dense, dot])", str(length)],
                capture_output=True, text=True, check=True,
            ).stdout
        )
        for length in (256, 6144)
    ]  # fmt: skip
    assert (peaks[1] - peaks[0]) * 1024 < 0.5 * 4 * 6144**2 * 4


# ---- errors ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kinds": ["dense", "fool"]}, "kinds='fool'"),
        ({"kinds": []}, "must name at least one kind, each once"),
        ({"kinds": ["dot", "dot"]}, "must name at least one kind, each once"),
        ({"kinds": 3}, "kinds=3 is none of"),
        ({"kinds": [["dot"]]}, r"kinds=\['dot'\] is none of"),
        ({"kinds": "random", "hidden": 3}, "hidden=3 needs kinds=dense or factorised_dense, given"),
        ({"factors": [9, 9]}, r"factors=\[9, 9\] needs kinds=factorised_dense, given dense"),
        ({"kinds": ["dense", "dot"], "rank": 3}, "rank=3 needs kinds=fact.*, given dense, dot"),
        ({"kinds": "dot", "trainable": False}, "trainable=false needs kinds=random or factorised"),
        ({"hidden": 0}, "hidden"),
        ({"rank": 0}, "rank"),
        ({"factors": [3]}, "must be two integers ≥ 1"),
        ({"factors": 3}, "must be two integers ≥ 1"),
        ({"kinds": "factorised_dense", "factors": [7, 10]}, "give 70 columns, max_length=71"),
        ({"trainable": 1}, "trainable"),
        ({"dropout": 2.0}, "dropout"),
        ({"weight_noise": -0.1}, "weight_noise"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(sq.OptionError, match=message):
        build(**options)


def test_more_tokens_than_columns():
    with pytest.raises(sq.OptionError, match="max_length is needed"):
        build(length=None)
    q, k, v = inputs(73, 73)
    for kinds in ("dense", "random", "factorised_random", "factorised_dense"):
        mech = build(f"synthesizer(kinds={kinds})")
        with pytest.raises(sq.ShapeError, match="73 tokens are more than max_length=71"):
            mech(q[:, :, :9], k, v)
    with pytest.raises(sq.ShapeError, match="73 tokens are more than max_length=71"):
        build("synthesizer(kinds=random)")(q, k[:, :, :9], v[:, :, :9])
    assert build()(q, k[:, :, :9], v[:, :, :9]).shape == (B, H, 73, V)
    _, state = build().prefill(q[:, :, :70], k[:, :, :70], v[:, :, :70])
    with pytest.raises(sq.ShapeError, match="73 tokens are more than max_length=71"):
        build().step(q[:, :, 70:], k[:, :, 70:], v[:, :, 70:], state)
