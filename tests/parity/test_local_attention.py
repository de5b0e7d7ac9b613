"""Our local attention, and BigBird's window of blocks, against local-attention 1.11.2."""

import pytest
import torch

import subquad as sq

pytestmark = pytest.mark.peers

peer = pytest.importorskip(
    "local_attention",
    reason="local-attention is not installed: pip install 'subquad[peers]'",
    exc_type=ImportError,
)

F64 = torch.float64
B, H, D, V, W = 2, 3, 7, 5, 8

TOLERANCE = 1e-12
"""Relative to the largest value: sums over ≤ 24 keys of values below 5, weights with ≤ 10
roundings of 1.1e-16, in another order."""


def tensors(length, grad=False):
    generator = torch.Generator().manual_seed(0)
    shapes = (B, H, length, D), (B, H, length, D), (B, H, length, V)
    return [torch.randn(s, generator=generator, dtype=F64).requires_grad_(grad) for s in shapes]


def theirs(q, k, v, *, causal, exact, mask=None, **options):
    module = peer.LocalAttention(W, causal=causal, exact_windowsize=exact, **options).eval()
    return module(q, k, v, mask=mask)


def build(exact):
    spec = f"bigbird(block={W}, window=3, random=0, global_blocks=[])"
    return sq.build(f"local(window={W})" if exact else spec, head_dim=D, num_heads=H, dtype=F64)


def close(found, wanted, tolerance=TOLERANCE):
    error = (found - wanted).abs().max().item()
    assert error <= tolerance * wanted.abs().max().item(), f"{error:.3e}"


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_same_windows_same_output_and_gradients(causal, exact, masked):
    """exact_windowsize: `local`; without: whole blocks, its own and the ones beside it."""
    q, k, v = tensors(9 * W, grad=True)
    mask = None
    if masked:  # every query keeps an open key: see below for those that do not
        mask = torch.arange(9 * W).expand(B, -1) % 5 != torch.tensor([[1], [3]])
        mask = mask | (torch.arange(9 * W) == 0)
    wanted = theirs(q, k, v, causal=causal, exact=exact, mask=mask)
    found = build(exact)(q, k, v, causal=causal, key_mask=mask)
    close(found, wanted)
    generator = torch.Generator().manual_seed(1)
    bar = torch.randn(found.shape, generator=generator, dtype=F64)
    for a, b in zip(
        torch.autograd.grad(found, (q, k, v), bar),
        torch.autograd.grad(wanted, (q, k, v), bar),
        strict=True,
    ):
        close(a, b, 1e-11)


def test_causal_padding_is_harmless():
    """With autopad, causal queries do not see what is appended."""
    q, k, v = tensors(61)
    wanted = theirs(q, k, v, causal=True, exact=True, autopad=True)
    close(build(True)(q, k, v, causal=True), wanted)


# ---- where it is wrong --------------------------------------------------------------------


def test_automatic_padding_is_attended_to():
    """With autopad and without a mask, the zeros appended to k and v are keys like others:
    the last queries' weights go to them in part. Ours needs no padding.
    """
    q, k, v = tensors(61)
    found = build(True)(q, k, v)
    wrong = theirs(q, k, v, causal=False, exact=True, autopad=True)
    close(wrong[:, :, : 61 - W], found[:, :, : 61 - W])
    assert (wrong - found)[:, :, 61 - W + 3 :].abs().max() > 0.01
    # Three keys of logit 0 and value 0, for the last query: exactly that.
    keys = slice(61 - W - 1, 61)
    weights = (q[:, :, 60:] @ k[:, :, keys].mT * D**-0.5).exp()
    shrunk = weights @ v[:, :, keys] / (weights.sum(-1, keepdim=True) + 3)
    close(wrong[:, :, 60:], shrunk)
    mask = torch.ones(B, 61, dtype=torch.bool)
    close(theirs(q, k, v, causal=False, exact=True, autopad=True, mask=mask), found)


def test_a_query_without_open_keys_reads_everything_also_the_future():
    """Closed keys get the least finite logit, all of them the same: where all are closed, the
    weights are equal, over masked, future and appended keys (whose values are −1). Ours: zeros.
    """
    q, k, v = tensors(6 * W)
    mask = torch.arange(6 * W).expand(B, -1) >= 3 * W
    options = {"causal": True, "exact": False}
    wrong = theirs(q, k, v, mask=mask, **options)
    row = W + 2  # of the second block: two blocks of keys, all of them closed
    close(wrong[:, :, row], v[:, :, : 2 * W].mean(2))
    first = torch.cat([v[:, :, :W], -torch.ones_like(v[:, :, :W])], 2).mean(2)
    close(wrong[:, :, 0], first)
    later = v.clone()
    later[:, :, row + 1] += 1.0
    moved = theirs(q, k, later, mask=mask, **options)
    assert (moved - wrong)[:, :, row].abs().min() > 0.01
    assert not build(False)(q, k, v, causal=True, key_mask=mask)[:, :, : 3 * W].any()


def test_junk_at_masked_keys_spreads():
    q, k, v = tensors(6 * W)
    mask = torch.arange(6 * W).expand(B, -1) < 5 * W
    junk = v.masked_fill(~mask[:, None, :, None], float("nan"))
    assert theirs(q, k, junk, causal=False, exact=True, mask=mask)[:, :, 4 * W :].isnan().any()
    mech = build(True)
    assert torch.equal(mech(q, k, junk, key_mask=mask), mech(q, k, v, key_mask=mask))


def test_naming_the_width_turns_on_rotary_positions():
    """`dim` describes the heads and is optional; giving it rotates q and k besides."""
    q, k, v = (t.float() for t in tensors(6 * W))
    q, k = q[..., :6], k[..., :6]  # rotary needs an even width
    options = {"causal": True, "exact": True}
    plain = theirs(q, k, v, **options)
    assert (theirs(q, k, v, dim=6, **options) - plain).abs().max() > 0.1
    same = theirs(q, k, v, dim=6, use_rotary_pos_emb=False, **options)
    assert torch.equal(same, plain)


def test_other_lengths_are_refused():
    q, k, v = tensors(61)
    with pytest.raises(AssertionError, match="must be divisible by window size"):
        theirs(q, k, v, causal=False, exact=True)
    with pytest.raises(Exception, match=r"shape|size|match"):
        theirs(q[:, :, :W], k[:, :, :56], v[:, :, :56], causal=False, exact=True)
    assert build(True)(q[:, :, :W], k, v).shape == (B, H, W, V)
