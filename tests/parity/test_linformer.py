"""Our Linformer against linformer 0.2.3's `LinformerSelfAttention` with the same weights.

Further tests pin down where it departs from the paper or from what it accepts.
"""

import pytest
import torch

import subquad as sq

pytestmark = pytest.mark.peers

peer = pytest.importorskip(
    "linformer", reason="linformer is not installed: pip install 'subquad[peers]'"
)

F64 = torch.float64
B, L, C, H, D, K, N = 2, 53, 24, 4, 5, 11, 71


def close(found, wanted, tolerance=1e-12):
    """float64: sums of ≤ 71 terms, a softmax over 11: 100·1.1e-16·10 (size of the logits),
    1e-13, with a margin of ten.
    """
    assert found.shape == wanted.shape
    error = (found - wanted).abs().max().item()
    assert error <= tolerance * wanted.abs().max().item(), f"{error:.3e}"


def case(**options):
    torch.manual_seed(0)
    theirs = peer.LinformerSelfAttention(C, N, k=K, heads=H, dim_head=D, **options).to(F64)
    kv = 1 if options.get("one_kv_head") else H
    sharing = "kv" if options.get("share_kv") else "headwise"
    mech = sq.build(
        "linformer", head_dim=D, num_heads=H, num_kv_heads=kv, max_length=N, k=K, sharing=sharing,
        dtype=F64,
    )  # fmt: skip
    with torch.no_grad():
        mech.key_projection.copy_(theirs.proj_k.T[None])
        if mech.value_projection is not None:
            mech.value_projection.copy_(theirs.proj_v.T[None])
    return theirs, mech


def draw(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, length, C, generator=generator, dtype=F64).requires_grad_()


def ours(theirs, mech, x, context=None, **masks):
    """Its linear layers around our mechanism."""
    source = x if context is None else context
    to_v = theirs.to_k if theirs.share_kv else theirs.to_v
    q, k, v = (
        t.unflatten(-1, (-1, D)).transpose(1, 2)
        for t in (theirs.to_q(x), theirs.to_k(source), to_v(source))
    )
    return theirs.to_out(mech(q, k, v, **masks).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("options", [{}, {"one_kv_head": True}, {"share_kv": True}], ids=str)
@pytest.mark.parametrize("length", [L, N])
@pytest.mark.parametrize("cross", [False, True])
def test_same_weights_same_output_and_gradients(length, cross, options):
    theirs, mech = case(**options)
    x, context = draw(length), draw(37, seed=1) if cross else None
    wanted, found = theirs(x, context=context), ours(theirs, mech, x, context)
    close(found, wanted)
    cotangent = draw(length, seed=2).detach()
    leaves = [x, theirs.to_q.weight, theirs.to_k.weight, *([context] if cross else [])]
    projections = [theirs.proj_k, *([] if theirs.share_kv else [theirs.proj_v])]
    for a, b in zip(
        torch.autograd.grad(found, [*leaves, *mech.parameters()], cotangent),
        torch.autograd.grad(wanted, [*leaves, *projections], cotangent),
        strict=True,
    ):
        close(a if a.shape == b.shape else a[0].T, b)


# ---- where it is wrong --------------------------------------------------------------------


def test_peer_takes_a_padding_mask_and_ignores_it():
    """forward(x, **kwargs): a mask is accepted and has no effect; padded tokens are read."""
    theirs, mech = case()
    x = draw(L)
    mask = (torch.arange(L) < 29).expand(B, L)
    wanted = ours(theirs, mech, x[:, :29])
    close(ours(theirs, mech, x, key_mask=mask)[:, :29], wanted)
    assert torch.equal(theirs(x, mask=mask, input_mask=mask), theirs(x))
    assert (theirs(x, mask=mask)[:, :29] - wanted).abs().max() > 0.1 * wanted.abs().max()


def test_zeroing_padded_inputs_is_no_mask():
    """Zeroing padded *inputs* is a work-around for this class alone, whose projections have no
    bias; NaN there reaches every row.
    """
    theirs, mech = case()
    x = draw(L).detach()
    mask = (torch.arange(L) < 29).expand(B, L)
    zeroed = x.masked_fill(~mask[..., None], 0.0)
    close(theirs(zeroed)[:, :29], ours(theirs, mech, x[:, :29]))
    junk = x.masked_fill(~mask[..., None], float("nan"))
    assert theirs(junk).isnan().all()
    assert ours(theirs, mech, junk, key_mask=mask)[:, :29].isfinite().all()


def test_peer_shares_more_than_the_papers_key_value_sharing():
    """The paper's key-value sharing is E = F; `share_kv` makes the values the keys themselves."""
    theirs, mech = case(share_kv=True)
    assert not hasattr(theirs, "to_v")
    x = draw(L)
    k = theirs.to_k(x).unflatten(-1, (-1, D)).transpose(1, 2)
    q = theirs.to_q(x).unflatten(-1, (-1, D)).transpose(1, 2)
    close(theirs(x), theirs.to_out(mech(q, k, k).transpose(1, 2).flatten(2)))
    assert mech.value_projection is None  # ours: one E, values of their own
    v = torch.randn(k.shape, generator=torch.Generator().manual_seed(3), dtype=F64)
    assert (mech(q, k, v) - mech(q, k, k)).abs().max() > 0.1


def test_peer_length_check_is_an_assertion():
    """Gone under ``python -O``; the message calls the longest length the required one."""
    theirs, mech = case()
    with pytest.raises(AssertionError, match="must be 71 - 73 given"):
        theirs(draw(73))
    with pytest.raises(sq.ShapeError, match="length S=73, longer than max_length=71"):
        ours(theirs, mech, draw(73))
