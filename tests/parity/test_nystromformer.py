"""Our Nyström attention against transformers' NystromformerSelfAttention, same weights.

Further tests pin down where it departs from the formula, so that nobody takes it for the truth.
"""

import pytest
import torch

import subquad as sq

pytestmark = pytest.mark.peers

peer = pytest.importorskip(
    "transformers.models.nystromformer.modeling_nystromformer",
    reason="transformers is not installed: pip install 'subquad[hf]'",
    exc_type=ImportError,
)

F64 = torch.float64
H, D, M, L = 3, 5, 7, 35
EQUAL = 1e-11
"""Six steps of the inverse, four products each: |Z| grows by at most 13/4 a step, 10^3 in all,
so that rounding of 1.1e-16 is amplified to 10^-13 an operation; a hundred of them."""


def modules(*, conv=None, length=L, exact_start=True):
    """(peer, ours, attention through ours with the peer's projections), float64.

    `exact_start` selects the norm of each matrix by the attribute: the option that should do
    it raises, see below.
    """
    torch.manual_seed(0)
    config = peer.NystromformerConfig(
        hidden_size=H * D, num_attention_heads=H, num_landmarks=M, segment_means_seq_len=length,
        conv_kernel_size=conv or 1, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    theirs = peer.NystromformerSelfAttention(config).double().eval()
    if conv is None:  # its attention can do without; its configuration insists on an integer
        theirs.conv_kernel_size = None
    if exact_start:
        theirs.init_option = "exact"
    with torch.no_grad():
        for linear in (theirs.query, theirs.key):
            linear.weight.mul_(3.0)  # its initial logits are all but zero
    ours = sq.build("nystrom", head_dim=D, num_heads=H, landmarks=M, conv_kernel=conv, dtype=F64)
    if conv:
        with torch.no_grad():
            ours.conv_weight.copy_(theirs.conv.weight[:, 0, :, 0])

    def attend(x, mask=None):
        q, k, v = (
            linear(x).unflatten(-1, (H, D)).transpose(1, 2)
            for linear in (theirs.query, theirs.key, theirs.value)
        )
        return ours(q, k, v, key_mask=mask).transpose(1, 2).flatten(2)

    return theirs, ours, attend


def tokens(batch, length, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, H * D, generator=generator, dtype=F64)


def additive(mask):
    """The extended mask (B, 1, 1, S) that its model hands to every layer."""
    return (~mask)[:, None, None].double() * torch.finfo(F64).min


def close(found, wanted, tolerance=EQUAL):
    error = (found - wanted).abs().max().item()
    assert error <= tolerance * wanted.abs().max().item(), f"{error:.3e}"


@pytest.mark.parametrize("conv", [None, 33])
def test_same_weights_same_output_and_gradients(conv):
    theirs, ours, attend = modules(conv=conv)
    x = tokens(2, L).requires_grad_()
    wanted, found = theirs(x)[0], attend(x)
    close(found, wanted)
    own, truth = [x], [x]
    for linear in (theirs.query, theirs.key, theirs.value):
        own, truth = [*own, linear.weight], [*truth, linear.weight]
    if conv:
        own, truth = [*own, ours.conv_weight], [*truth, theirs.conv.weight]
    cotangent = tokens(2, L, seed=2)
    for a, b in zip(
        torch.autograd.grad(found, own, cotangent),
        torch.autograd.grad(wanted, truth, cotangent),
        strict=True,
    ):
        close(a, b.reshape(a.shape))


def test_as_many_landmarks_as_tokens():
    """It switches to softmax there; ours gets there by the exact inverse."""
    theirs, _, _ = modules(length=M)
    ours = sq.build("nystrom(inverse=exact)", head_dim=D, num_heads=H, landmarks=M, dtype=F64)
    x = tokens(2, M)
    q, k, v = (
        linear(x).unflatten(-1, (H, D)).transpose(1, 2)
        for linear in (theirs.query, theirs.key, theirs.value)
    )
    close(ours(q, k, v).transpose(1, 2).flatten(2), theirs(x)[0])


# ---- where it is wrong --------------------------------------------------------------------


def test_peer_rows_depend_on_their_batch():
    """By default one maximum over batch and heads starts the inverse."""
    theirs, _, attend = modules(exact_start=False)
    x = tokens(2, L)
    x[1] *= 6.0
    alone, both = theirs(x[:1])[0], theirs(x)[0][:1]
    assert (alone - both).abs().max() > 1e-2 * alone.abs().max()
    close(attend(x)[:1], attend(x[:1]))


def test_peer_option_for_the_norm_of_each_matrix_raises():
    config = peer.NystromformerConfig(
        hidden_size=H * D, num_attention_heads=H, inv_coeff_init_option=True
    )
    with pytest.raises(TypeError, match="not subscriptable"):
        peer.NystromformerSelfAttention(config)


def test_peer_masked_tokens_are_part_of_landmarks():
    """Its mask closes keys of the third factor alone: landmarks average padding with the rest,
    so that what padding contains changes the output. Ours equals the unpadded call.
    """
    theirs, _, attend = modules()
    mask = (torch.arange(L) < 23).expand(2, L)
    x = tokens(2, L)
    other = torch.where(mask[..., None], x, 3.0 * x)
    first, second = (theirs(t, additive(mask))[0][:, :23] for t in (x, other))
    assert (first - second).abs().max() > 1e-2 * first.abs().max()
    wanted = attend(x[:, :23])
    close(attend(x, mask)[:, :23], wanted)
    close(attend(other, mask)[:, :23], wanted)
    assert (first - wanted).abs().max() > 1e-2 * wanted.abs().max()


def test_peer_takes_one_length_alone():
    """A row of twice `segment_means_seq_len` is read as two rows of landmarks: a batch of one
    comes back as two, without a word. Other lengths fail inside a reshape.
    """
    theirs, _, attend = modules()
    x = tokens(1, 2 * L)
    assert theirs(x)[0].shape[0] == 2
    assert attend(x).shape == x.shape
    for length in (L - 3, L + M):
        with pytest.raises(RuntimeError, match="shape"):
            theirs(tokens(1, length))
        assert attend(tokens(1, length)).shape == (1, length, H * D)
