"""Ours against linear-attention-transformer 0.19.1.

Its `linear_attn` is efficient attention times D^-½. Its `causal_linear_attn` is another
mechanism: the softmax over positions is replaced by one normaliser for all features, which is
our ``linear(map=exp)``. Further tests pin down where it departs from the sums it is meant to
compute, so that nobody takes it for the truth.
"""

import contextlib
import io

import pytest
import torch

import subquad as sq

pytestmark = pytest.mark.peers

with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    peer = pytest.importorskip(
        "linear_attention_transformer.linear_attention_transformer",
        reason="linear-attention-transformer is not installed: pip install 'subquad[peers]'",
        exc_type=ImportError,
    )

F64 = torch.float64
B, H, L, D = 2, 3, 132, 7  # it takes values as wide as keys; L has to be a multiple of its bucket


def case(name, dtype=F64, size=1.0):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, H, L, D, generator=generator, dtype=F64) for _ in range(3))
    leaves = [t.to(dtype).requires_grad_() for t in (size * q, size * k, v)]
    return sq.build(name, head_dim=D, num_heads=H, dtype=dtype), leaves


def theirs(function, q, k, v, mask=None, **options):
    """Copies: it fills k and v in place where they are masked."""
    mask = None if mask is None else mask.clone()
    return function(q.clone(), k.clone(), v.clone(), kv_mask=mask, **options)


def close(found, wanted, tolerance=1e-12):
    """float64: sums of ≤ 132·7 terms and exponents ≤ 10, below 1e-13."""
    error = (found - wanted).abs().max().item()
    assert error <= tolerance * wanted.abs().max().item(), f"{error:.3e}"


def same(found, wanted, leaves, tolerance=1e-12):
    close(found, wanted, tolerance)
    generator = torch.Generator().manual_seed(1)
    bar = torch.randn(wanted.shape, generator=generator, dtype=F64).to(wanted.dtype)
    grads = (torch.autograd.grad(x, leaves, bar, retain_graph=True) for x in (found, wanted))
    for a, b in zip(*grads, strict=True):
        close(a, b, tolerance)


def padding():
    """Open keys: all of the first row, 101 of the second."""
    return torch.arange(L) < torch.tensor([L, 101])[:, None]


@pytest.mark.parametrize("masked", [False, True])
def test_bidirectional_is_efficient_attention_times_a_constant(masked):
    mech, (q, k, v) = case("efficient")
    mask = padding() if masked else None
    found = mech(q, k, v, key_mask=mask) * D**-0.5
    same(found, theirs(peer.linear_attn, q, k, v, mask), (q, k, v))


def test_its_rows_do_not_sum_to_one():
    """The paper's do: values that are all 1 come out as D^-½."""
    mech, (q, k, v) = case("efficient")
    ones = torch.ones_like(v)
    out = theirs(peer.linear_attn, q, k, ones)
    close(out, torch.full_like(out, D**-0.5))
    close(mech(q, k, ones), ones)


@pytest.mark.parametrize("masked", [False, True])
def test_causal_is_linear_attention_with_exponential_features(masked):
    """With buckets of one token; its floor of 1e-3 on normalisers does not bind here."""
    mech, (q, k, v) = case("linear(map=exp)")
    mask = padding() if masked else None
    found = mech(q, k, v, causal=True, key_mask=mask)
    same(found, theirs(peer.causal_linear_attn, q, k, v, mask, bucket_size=1), (q, k, v))


def test_its_causal_form_does_not_end_in_its_bidirectional_one():
    """The last token reads all keys in both. Theirs differ by more than the factor of D^-½; ours
    agree.
    """
    mech, (q, k, v) = case("efficient")
    bidirectional = theirs(peer.linear_attn, q, k, v)[:, :, -1] * D**0.5
    causal = theirs(peer.causal_linear_attn, q, k, v, bucket_size=1)[:, :, -1]
    # By hand, feature by feature: a normaliser for each, against one for all.
    weights, features = k.exp(), q[:, :, -1].softmax(-1)
    sums = torch.einsum("bhjm,bhjv->bhmv", weights, v)
    z = weights.sum(2)
    close(bidirectional, torch.einsum("bhm,bhmv->bhv", features / z, sums))
    shared = torch.einsum("bhm,bhmv->bhv", features, sums) / (features * z).sum(-1, keepdim=True)
    close(causal, shared)
    assert (bidirectional - causal).abs().max() > 0.01
    close(mech(q, k, v, causal=True)[:, :, -1], mech(q, k, v)[:, :, -1])


@pytest.mark.parametrize("bucket", [4, 11])
def test_its_buckets_blind_a_token_to_itself(bucket):
    """A query reads the keys of earlier buckets alone: not those before it in its own, not its
    own; the first bucket gives zeros.
    """
    _, (q, k, v) = case("linear(map=exp)")
    out = theirs(peer.causal_linear_attn, q, k, v, bucket_size=bucket)
    position = torch.arange(L) // bucket
    weights = (q.softmax(-1) @ k.exp().mT) * (position[None] < position[:, None])
    total = weights.sum(-1, keepdim=True)
    close(out, weights @ v / torch.where(total == 0, 1.0, total))
    assert not out[:, :, :bucket].any()


def test_its_default_bucket_refuses_other_lengths():
    mech, (q, k, v) = case("efficient")
    with pytest.raises(AssertionError, match="must be divisible"):
        theirs(peer.causal_linear_attn, q, k, v)  # 132 is no multiple of 64
    assert mech(q, k, v, causal=True).shape == q.shape


def test_its_floor_changes_small_normalisers():
    """Normalisers are sums of exp(k): keys near −12 bring them below its 1e-3."""
    mech, (q, k, v) = case("linear(map=exp)")
    low = k - 12.0  # a shift of all features cancels
    wanted = mech(q, k, v, causal=True)
    close(mech(q, low, v, causal=True), wanted, 1e-11)  # 12 of 10^16: one digit less
    out = theirs(peer.causal_linear_attn, q, low, v, bucket_size=1)
    assert (out - wanted).abs().max() > 0.1 * wanted.abs().max()


def test_its_exponentials_overflow():
    """float32: e^89 is infinite. Ours carry a maximum for each feature."""
    mech, (q, k, v) = case("linear(map=exp)", torch.float32)
    high = k + 90.0
    assert not theirs(peer.causal_linear_attn, q, high, v, bucket_size=1).isfinite().all()
    # A shift by 90 rounds k to 2^-18 (exponents of 2^6): 3.8e-6 in each of its two roles.
    close(mech(q, high, v, causal=True), mech(q, k, v, causal=True), 1e-5)


def test_it_writes_into_its_arguments():
    _, (q, k, v) = case("efficient")
    before = [t.detach().clone() for t in (k, v)]
    after = [t.clone() for t in before]
    peer.linear_attn(q.detach(), *after, kv_mask=padding())
    for old, new in zip(before, after, strict=True):
        assert not torch.equal(old, new)
