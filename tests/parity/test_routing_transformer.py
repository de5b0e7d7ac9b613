"""Our routing attention against routing-transformer 1.6.1 with the same means.

Its causal form chooses members among all tokens: ours refuses that, and the test below shows the
leak. `_groups` with a causal softmax is compared all the same.
"""

import pytest
import torch

import subquad as sq
from subquad.attention.masks import Mask
from subquad.attention.sparse.routing import _merged

pytestmark = pytest.mark.peers

peer = pytest.importorskip(
    "routing_transformer.routing_transformer",
    reason="routing-transformer is not installed: pip install 'subquad[peers]'",
    exc_type=ImportError,
)

F64 = torch.float64
B, H, L, S, D, C, W = 2, 3, 53, 47, 6, 5, 7

TOLERANCE = 2e-5
"""The peer divides the sum of a token's outputs by their number + 1e-5: at one cluster a token
that is an error of 1e-5, at more a smaller one; twice that for gradients, which add such terms."""


def close(found, wanted, tolerance=TOLERANCE):
    error = (found - wanted).abs().max().item()
    assert error <= tolerance * wanted.abs().max().item(), error


def draw(length, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, H, length, D, generator=generator, dtype=F64).requires_grad_()


def case(*, shared=False, causal=False, cross=False, **options):
    """The peer, and ours with its means; without the peer's memory, learned keys for all."""
    torch.manual_seed(0)
    theirs = peer.KmeansAttention(
        C, W, H, D, causal=causal, shared_qk=shared, receives_context=cross, commitment=0.5,
        ema_decay=0.9,
    ).to(F64)  # fmt: skip
    theirs.num_mem_kv = 0
    for name in ("mem_key", "mem_value"):
        setattr(theirs, name, torch.nn.Parameter(getattr(theirs, name)[:, :, :0]))
    mech = sq.build(
        "routing", head_dim=D, num_heads=H, clusters=C, window=W, membership="balanced",
        norm="rms", normalise="keys" if shared else "none", merge="mean", rest="zeros",
        shared=shared, commitment=0.5, decay=0.9, dtype=F64, **options,
    )  # fmt: skip
    theirs.kmeans.means.copy_(mech.centroids)
    theirs.kmeans.initted.fill_(True)
    return theirs, mech


def scale(shared):
    """Its shared keys have length 1, ours √D: D^-½ there is D^-1 here."""
    return D**-1.0 if shared else D**-0.5


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_forward_and_gradients(shared, masked):
    theirs, mech = case(shared=shared)
    q, v = draw(L, 0), draw(L, 2)
    k = q if shared else draw(L, 1)
    key = None
    if masked:  # more open tokens than the fullest window; the peer lets masked ones be members
        key = torch.ones(B, L, dtype=torch.bool)
        key[0, -3:] = False
        with torch.no_grad():  # far from every mean, so that no cluster of the peer takes them
            far = -mech.centroids.sum(1)
            far = 1e3 * far / far.norm(dim=-1, keepdim=True)
            for t in (q, k):
                t[0, :, -3:] = far[:, None]
    wanted, _ = theirs(q, k, v, query_mask=key)
    found = mech.eval()(q, k, v, key_mask=key, scale=scale(shared))
    taken = mech.members(q, k, Mask(key=key))[0]
    if masked:
        like = torch.einsum("hcd,hnd->hcn", mech.centroids, peer.F.normalize(q[0], dim=-1))
        assert not torch.isin(like.topk(W).indices, torch.arange(L - 3, L)).any()
    assert len(taken[0, 0].unique()) < C * W, "no token is in two clusters"
    assert len(taken[0, 0].unique()) < L, "every token is in a cluster"
    close(found, wanted)
    cotangent = draw(L, 3).detach()
    leaves = (q, v) if shared else (q, k, v)
    for a, b in zip(
        torch.autograd.grad(found, leaves, cotangent),
        torch.autograd.grad(wanted, leaves, cotangent),
        strict=True,
    ):
        close(a, b)


def test_cross_attention():
    theirs, mech = case(cross=True)
    q, k, v = draw(L, 0), draw(S, 1), draw(S, 2)
    wanted, _ = theirs(q, k, v)
    found = mech.eval()(q, k, v)
    close(found, wanted)
    for a, b in zip(
        torch.autograd.grad(found.square().sum(), (q, k, v)),
        torch.autograd.grad(wanted.square().sum(), (q, k, v)),
        strict=True,
    ):
        close(a, b, 2 * TOLERANCE)  # the cotangent, 2·out, is off by as much


@pytest.mark.parametrize("shared", [False, True])
def test_means_and_loss_in_training(shared):
    theirs, mech = case(shared=shared)
    q, v = draw(L, 0), draw(L, 2)
    k = q if shared else draw(L, 1)
    _, loss = theirs.train()(q, k, v)
    mech.train()(q, k, v)
    close(mech.penalty(), loss, 1e-13)  # a mean of ≤ 2·53·6·6 float64 squares
    for a, b in zip(
        torch.autograd.grad(mech.penalty(), [q] if shared else [q, k]),
        torch.autograd.grad(loss, [q] if shared else [q, k]),
        strict=True,
    ):
        close(a, b, 1e-12)
    theirs.kmeans.update()
    mech.update()
    unit = peer.F.normalize(theirs.kmeans.means, dim=-1)  # ours are put back on the sphere
    close(mech.centroids, unit, 1e-13)
    assert (theirs.kmeans.means.norm(dim=-1) < 0.9999).any()


@pytest.mark.parametrize("shared", [False, True])
def test_its_causal_form_through_our_groups(shared):
    theirs, mech = case(shared=shared, causal=True)
    q, v = draw(L, 0), draw(L, 2)
    k = q if shared else draw(L, 1)
    wanted, _ = theirs(q, k, v)
    x, y = mech._directions(q, k, Mask())
    queries, keys = mech._groups(x.detach(), y.detach(), Mask())
    found, lse = mech._read_groups(q, k, v, x, y, queries, keys, True, scale(shared))
    # A member whose cluster holds nothing earlier: the peer's softmax is uniform over later ones.
    reads = (keys[..., None, :] <= queries[..., None]).any(-1)
    touched = torch.zeros(B, H, L, dtype=torch.bool)
    touched.scatter_(-1, queries.flatten(2), False)
    alone = touched.scatter_reduce(-1, queries.flatten(2), ~reads.flatten(2), "amax")
    assert shared == (not alone.any()), "with keys of its own a token may find none"
    ours = _merged(found, lse, queries, L, True)
    close(ours[~alone], wanted[~alone])


def test_its_causal_form_leaks_the_future():
    """A later token pushes an earlier one out of its cluster: outputs before it change."""
    theirs, mech = case(shared=True, causal=True)
    q, v = draw(L, 0).detach(), draw(L, 2).detach()
    base, _ = theirs(q, q, v)
    changed = q.clone()
    changed[:, :, -1] = mech.centroids[:, 0]
    assert (theirs(changed, changed, v)[0] - base)[:, :, :-1].abs().max() > 0.1
    with pytest.raises(sq.UnsupportedError, match="leaks the future"):
        mech(q, q, v, causal=True)
    auto = sq.build("routing(clusters=5, window=7, shared=true)", head_dim=D, num_heads=H,
                    dtype=F64).eval()  # fmt: skip
    first, second = (auto(t, t, v, causal=True) for t in (q, changed))
    close(second[:, :, :-1], first[:, :, :-1], 1e-12)  # sums over ≤ 14 keys, in other chunks
