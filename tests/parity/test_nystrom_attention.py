"""Our Nyström attention against nystrom-attention 0.0.14 with the same weights.

Its module projects, attends and projects back; ours attends between the same projections.
Further tests pin down where it departs from the formula, so that nobody takes it for the truth.
"""

import pytest
import torch
from torch.nn import functional as F

import subquad as sq

pytestmark = pytest.mark.peers

peer = pytest.importorskip(
    "nystrom_attention.nystrom_attention",
    reason="nystrom-attention is not installed: pip install 'subquad[peers]'",
    exc_type=ImportError,
)

F64 = torch.float64
D, M = 5, 7
EQUAL = 1e-11
"""Six steps of the inverse, four products each: |Z| grows by at most 13/4 a step, 10^3 in all,
so that rounding of 1.1e-16 is amplified to 10^-13 an operation; a hundred of them."""


def modules(heads, *, conv=None, iterations=6, seed=0):
    """(peer, ours, attention through ours with the peer's projections), float64."""
    torch.manual_seed(seed)
    theirs = peer.NystromAttention(
        dim=11, dim_head=D, heads=heads, num_landmarks=M, pinv_iterations=iterations,
        residual=conv is not None, residual_conv_kernel=conv or 33,
    ).double()  # fmt: skip
    with torch.no_grad():
        theirs.to_qkv.weight.mul_(3.0)  # its initial logits are all but zero
    ours = sq.build(
        "nystrom", head_dim=D, num_heads=heads, landmarks=M, iterations=iterations,
        conv_kernel=conv, dtype=F64,
    )  # fmt: skip
    if conv:
        with torch.no_grad():
            ours.conv_weight.copy_(theirs.res_conv.weight[:, 0, :, 0])

    def attend(x, mask=None):
        q, k, v = (
            t.unflatten(-1, (heads, D)).transpose(1, 2) for t in theirs.to_qkv(x).chunk(3, -1)
        )
        out = ours(q, k, v, key_mask=mask)
        return theirs.to_out(out.transpose(1, 2).flatten(2))

    return theirs, ours, attend


def tokens(batch, length, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, 11, generator=generator, dtype=F64)


def close(found, wanted, tolerance=EQUAL):
    error = (found - wanted).abs().max().item()
    assert error <= tolerance * wanted.abs().max().item(), f"{error:.3e}"


def same(theirs, attend, x, tolerance=EQUAL, extra=()):
    """Outputs, and gradients of x, of the projections and of pairs of parameters in `extra`."""
    x.requires_grad_()
    shared = [x, theirs.to_qkv.weight, *theirs.to_out.parameters()]
    wanted, found = theirs(x), attend(x)
    close(found, wanted, tolerance)
    cotangent = tokens(*found.shape[:2], seed=2)[..., : found.shape[-1]]
    truth = torch.autograd.grad(wanted, [*shared, *(b for _, b in extra)], cotangent)
    own = torch.autograd.grad(found, [*shared, *(a for a, _ in extra)], cotangent)
    for a, b in zip(own, truth, strict=True):
        close(a, b.reshape(a.shape), tolerance)


@pytest.mark.parametrize("conv", [None, 33])
@pytest.mark.parametrize("length", [M, 5 * M, 13 * M])
def test_one_head_same_weights_same_output_and_gradients(length, conv):
    """One row and one head: there its norm over batch and heads is the matrix's own."""
    theirs, ours, attend = modules(1, conv=conv)
    extra = [(ours.conv_weight, theirs.res_conv.weight)] if conv else []
    same(theirs, attend, tokens(1, length), extra=extra)


@pytest.mark.parametrize("conv", [None, 33])
def test_many_heads_same_weights_with_the_norm_of_each_matrix(monkeypatch, conv):
    """Its own inverse, called for each matrix by itself, makes batches and heads agree too."""
    whole = peer.moore_penrose_iter_pinv

    def each(x, iters):
        flat = [whole(matrix[None], iters)[0] for matrix in x.flatten(0, 1)]
        return torch.stack(flat).view(x.shape)

    monkeypatch.setattr(peer, "moore_penrose_iter_pinv", each)
    theirs, ours, attend = modules(3, conv=conv)
    extra = [(ours.conv_weight, theirs.res_conv.weight)] if conv else []
    same(theirs, attend, tokens(2, 5 * M), extra=extra)


# ---- where it is wrong --------------------------------------------------------------------


def test_peer_rows_depend_on_their_batch():
    """One maximum over batch and heads starts the inverse: another row changes this one."""
    theirs, _, attend = modules(3)
    x = tokens(2, 5 * M)
    x[1] *= 6.0
    alone, both = theirs(x[:1]), theirs(x)[:1]
    assert (alone - both).abs().max() > 1e-2 * alone.abs().max()
    close(attend(x)[:1], attend(x[:1]))


def test_peer_pads_lengths_that_do_not_divide_with_tokens_that_count():
    """It puts zero tokens in front. Without a mask they are attended, with logit 0, and enter
    the first landmarks: the result is that of a longer sequence. Ours has unequal segments.
    """
    theirs, _, attend = modules(1)
    x = tokens(1, 4 * M + 3)
    padded = F.pad(x, (0, 0, M - 3, 0))
    close(theirs(x), theirs(padded)[:, M - 3 :])
    close(theirs(x), attend(padded)[:, M - 3 :])  # the zeros are tokens like any other
    wanted = attend(x)
    close(attend(padded, torch.arange(5 * M) >= M - 3)[:, M - 3 :], wanted)
    assert (theirs(x) - wanted).abs().max() > 1e-2 * wanted.abs().max()


def test_peer_padding_under_a_mask_changes_the_result():
    """Segments are cut from the padded row: padding takes whole landmarks away, and what is
    left of the middle matrix gets uniform rows for them. Ours equals the unpadded call.
    """
    theirs, _, attend = modules(1)
    x = tokens(1, 6 * M)
    short = x[:, : 3 * M]
    mask = (torch.arange(6 * M) < 3 * M)[None]
    alone = theirs(short)
    close(attend(short), alone)
    close(attend(x, mask)[:, : 3 * M], alone)
    assert (theirs(x, mask=mask)[:, : 3 * M] - alone).abs().max() > 1e-2 * alone.abs().max()


def test_peer_spreads_junk_of_masked_tokens():
    """It multiplies masked tokens by zero: 0·NaN = NaN reaches every output."""
    theirs, _, attend = modules(1)
    x = tokens(1, 5 * M)
    mask = (torch.arange(5 * M) < 4 * M)[None]
    junk = x.masked_fill(~mask[..., None], torch.nan)
    assert theirs(junk, mask=mask).isnan().all()
    close(attend(junk, mask)[:, : 4 * M], attend(x[:, : 4 * M]))


def test_peer_rows_without_keys_are_not_zero():
    """A row whose mask is closed everywhere gets the mean of zeros only by luck of its zeroed
    values: its attention weights are uniform over masked keys, where ours are zero.
    """
    theirs, ours, _ = modules(1)
    x = tokens(1, 5 * M)
    mask = torch.zeros(1, 5 * M, dtype=torch.bool)
    _, weights = theirs(x, mask=mask, return_attn=True)
    assert weights.abs().max() > 1e-3
    q = tokens(1, 5 * M)[:, None, :, :D]
    assert not ours.weights(q, q, key_mask=mask).any()
