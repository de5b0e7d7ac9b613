"""Our Performer against performer-pytorch 1.1.4 with the same projection and its epsilons at 0.

Its functions are called directly: `softmax_kernel(..., eps=0)`, `linear_attention` and
`causal_linear_attention_noncuda(..., eps=0)`. Further tests pin down where it departs from the
sums it is meant to compute, so that nobody takes it for the truth.
"""

import contextlib
import io
import math

import pytest
import torch

import subquad as sq

pytestmark = pytest.mark.peers

with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    peer = pytest.importorskip(
        "performer_pytorch.performer_pytorch",
        reason="performer-pytorch is not installed: pip install 'subquad[peers]'",
        exc_type=ImportError,
    )

F64 = torch.float64
B, H, L, D, V, M = 2, 3, 137, 7, 5, 29


def case(dtype, size=1.0):
    generator = torch.Generator().manual_seed(0)
    shapes = (B, H, L, D), (B, H, L, D), (B, H, L, V)
    q, k, v = (torch.randn(s, generator=generator, dtype=F64) for s in shapes)
    leaves = [t.to(dtype).requires_grad_() for t in (size * q, size * k, v)]
    mech = sq.build("performer", head_dim=D, num_heads=H, features=M, dtype=dtype).eval()
    return mech, leaves


def peer_features(mech, q, k, eps=0.0):
    """φ of each head with its own projection; the peer shares one among the heads of a call."""
    sides = []
    for x, is_query in ((q, True), (k, False)):
        heads = [
            peer.softmax_kernel(
                x[:, h : h + 1], projection_matrix=mech.projection[h], is_query=is_query, eps=eps
            )
            for h in range(H)
        ]
        sides.append(torch.cat(heads, 1))
    return sides


def peer_causal(fq, fk, v, **options):
    """Its `chunk_size` is handed to `Tensor.chunk`, as the number of chunks: 1 is the whole."""
    options = {"chunk_size": 1, "eps": 0.0, **options}
    return peer.causal_linear_attention_noncuda(fq, fk, v, **options)


def close(found, wanted, tolerance):
    error = (found - wanted).abs().max().item()
    assert error <= tolerance * wanted.abs().max().item(), f"{error:.3e}"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_same_projection_same_output_and_gradients(dtype, causal):
    """To 1e-5 (issue 2). float32: exponents up to 20, five roundings each, 20·5·2^-24 = 6e-6 of a
    weight at worst; typical errors are far smaller. float64: 1e-5·2^-29, taken as 1e-12.
    """
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    mech, (q, k, v) = case(dtype)
    fq, fk = peer_features(mech, q, k)
    theirs = peer_causal(fq, fk, v) if causal else peer.linear_attention(fq, fk, v)
    ours = mech(q, k, v, causal=causal)
    close(ours, theirs, tolerance)
    generator = torch.Generator().manual_seed(1)
    cotangent = torch.randn(ours.shape, generator=generator, dtype=F64).to(dtype)
    for a, b in zip(
        torch.autograd.grad(ours, (q, k, v), cotangent),
        torch.autograd.grad(theirs, (q, k, v), cotangent),
        strict=True,
    ):
        close(a, b, tolerance)


def test_generalised_kernel():
    """Its ReLU kernel with epsilon 1e-3 is our estimator=relu."""
    mech, (q, k, v) = case(F64)
    mech = sq.build("performer(estimator=relu)", head_dim=D, num_heads=H, features=M, dtype=F64)
    sides = [
        torch.cat(
            [
                peer.generalized_kernel(x[:, h : h + 1], projection_matrix=mech.projection[h])
                for h in range(H)
            ],
            1,
        )
        for x in (q, k)
    ]
    close(mech(q, k, v), peer.linear_attention(*sides, v), 1e-12)
    close(mech(q, k, v, causal=True), peer_causal(*sides, v), 1e-12)


# ---- where it is wrong --------------------------------------------------------------------


def test_peer_masks_values_only():
    """Its attention layer zeroes v at padded keys: they stay in the normaliser, so that outputs
    shrink, by a factor of the padding's share; and NaN in a padded key reaches everything.
    """
    mech, (q, k, v) = case(F64)
    mask = (torch.arange(L) < 53).expand(B, L)
    closed = ~mask[:, None, :, None]
    alone = mech(q, k[:, :, :53], v[:, :, :53])
    fq, fk = peer_features(mech, q, k)
    theirs = peer.linear_attention(fq, fk, v.masked_fill(closed, 0.0))  # as its SelfAttention does
    assert (theirs - alone).abs().max() > 0.2 * alone.abs().max()
    wrong = fq @ fk[:, :, :53].sum(2)[..., None] / (fq @ fk.sum(2)[..., None])
    close(theirs, alone * wrong, 1e-12)  # exactly the share of the open keys too small
    junk = k.masked_fill(closed, float("nan"))
    fq, fk = peer_features(mech, q, junk)
    assert peer.linear_attention(fq, fk, v.masked_fill(closed, 0.0)).isnan().all()
    ours = mech(q, junk, v.masked_fill(closed, float("nan")), key_mask=mask)
    close(ours, alone, 1e-12)


def test_peer_leaks_the_future_through_its_epsilon():
    """Its key maximum is taken over the whole sequence and eps is added relative to it: in
    causal mode a last key of large norm changes all earlier outputs. With eps = 0 it cancels.
    """
    mech, leaves = case(F64)
    q, k, v = (t.detach() for t in leaves)
    other = k.clone()
    other[:, :, -1] *= 8.0
    before = {}
    for eps in (0.0, 1e-4):
        outs = [peer_causal(*peer_features(mech, q, x, eps), v)[:, :, :-1] for x in (k, other)]
        before[eps] = (outs[0] - outs[1]).abs().max().item()
    ours = [mech(q, x, v, causal=True)[:, :, :-1] for x in (k, other)]
    assert (ours[0] - ours[1]).abs().max() < 1e-12  # a common scale may move the last digits
    assert before[1e-4] > 0.01
    assert before[0.0] < 1e-9


def test_peer_epsilon_flattens_attention():
    """At D = 64 and N(0, 1) inputs nearly all key features lie below its default epsilon
    relative to the maximum over the sequence: attention moves toward the mean of the values.
    """
    mech = sq.build("performer", head_dim=64, num_heads=1, features=256, dtype=F64)
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, 1, 257, 64, generator=generator, dtype=F64) for _ in range(3))
    key = {"projection_matrix": mech.projection[0], "is_query": False}
    relative = peer.softmax_kernel(k, eps=0.0, **key) * math.sqrt(256)
    assert (relative < 1e-4).double().mean() > 0.9
    exact = mech(q, k, v)
    fq = peer.softmax_kernel(q, projection_matrix=mech.projection[0], is_query=True)
    theirs = peer.linear_attention(fq, peer.softmax_kernel(k, **key), v)
    mean = v.mean(2, keepdim=True)
    assert (theirs - exact).norm() > 0.5 * (exact - mean).norm()
    assert (theirs - mean).norm() < 0.5 * (exact - mean).norm()


def test_peer_causal_normaliser_has_an_epsilon():
    """eps = 1e-6 is added to Σφ(k) where features themselves may be smaller: a first row, whose
    output is v_0 exactly, shrinks. Its key features are ≤ M^-½ relative to the largest key.
    """
    mech, leaves = case(F64, size=3.0)
    q, k, v = (t.detach() for t in leaves)
    fq, fk = peer_features(mech, q, k)
    theirs = peer_causal(fq, fk, v, eps=1e-6)
    close(peer_causal(fq, fk, v)[:, :, 0], v[:, :, 0], 1e-9)
    close(mech(q, k, v, causal=True)[:, :, 0], v[:, :, 0], 1e-12)
    shrunk = theirs[:, :, 0].norm(dim=-1) / v[:, :, 0].norm(dim=-1)
    assert shrunk.min() < 0.9
    weight = (fq[:, :, 0] * fk[:, :, 0]).sum(-1)
    close(shrunk, weight / (weight + 1e-6 * fq[:, :, 0].sum(-1)), 1e-9)


def test_peer_chunk_size_is_a_chunk_count(monkeypatch):
    """`t.chunk(chunk_size)`: its default of 128 makes up to 128 chunks, here 69 of 2 tokens,
    where 2 chunks of 128 were meant. The result is the same; the memory is not what it says.
    """
    mech, leaves = case(F64)
    q, k, v = (t.detach() for t in leaves)
    fq, fk = peer_features(mech, q, k)
    lengths = []
    cumsum = torch.Tensor.cumsum

    def spy(tensor, dim):
        lengths.append(tensor.shape[-2])
        return cumsum(tensor, dim)

    monkeypatch.setattr(torch.Tensor, "cumsum", spy)
    out = peer_causal(fq, fk, v, chunk_size=128)
    monkeypatch.undo()
    sums = lengths[::2]  # of k; every other one is of the context (…, n, M, V)
    assert len(sums) == 69 and max(sums) == 2
    close(out, peer_causal(fq, fk, v), 1e-11)
