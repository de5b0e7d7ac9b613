"""Our `aft` against aft-pytorch 0.2.2 with the same weights: full, simple, local.

Further tests pin down where it departs from the paper or fails.
"""

import pytest
import torch

import subquad as sq

pytestmark = [
    pytest.mark.peers,
    # AFTLocal reads its biases one number at a time, each with a gradient
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad:UserWarning"),
]

peer = pytest.importorskip(
    "aft_pytorch", reason="aft-pytorch is not installed: pip install 'subquad[peers]'"
)

F64 = torch.float64
B, L, C, D, N, S = 2, 31, 24, 7, 37, 5
KINDS = {"full": "AFTFull", "simple": "AFTSimple", "local": "AFTLocal"}


def close(found, wanted, tolerance=1e-12):
    """float64: ratios of sums of ≤ 37 positive terms, exponents of size ≤ 10: 37·10·1.1e-16·2,
    1e-13, with a margin of ten.
    """
    assert found.shape == wanted.shape
    error = (found - wanted).abs().max().item()
    assert error <= tolerance * wanted.abs().max().item(), f"{error:.3e}"


def case(kind, dtype=F64):
    """Its module, and our mechanism for one head as wide as its hidden layer."""
    torch.manual_seed(0)
    local = kind == "local"
    theirs = getattr(peer, KINDS[kind])(N, C, hidden_dim=D, **({"s": S} if local else {})).to(dtype)
    spec = f"aft(kind={kind}, window={S - 1})" if local else f"aft(kind={kind})"
    mech = sq.build(spec, head_dim=D, num_heads=1, max_length=N, dtype=dtype)
    if kind != "simple":
        with torch.no_grad():
            theirs.wbias *= 5.0  # its start hardly differs from w = 0
            mech.weight.copy_(spread(theirs.wbias) if kind == "local" else theirs.wbias)
    return theirs, mech


@pytest.fixture(autouse=True)
def in_float64():
    """AFTLocal makes its biases in torch's default dtype, whatever dtype the module has."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(F64)
    yield
    torch.set_default_dtype(before)


def spread(matrix):
    """The band of an (N, N) matrix, (1, N, 2·S − 1); zeros outside of the matrix."""
    i, j = torch.arange(N)[:, None], torch.arange(N)[:, None] + torch.arange(1 - S, S)
    inside = (j >= 0) & (j < N)
    return (matrix[i, j.clamp(0, N - 1)] * inside)[None]


def draw(length=L, dtype=F64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, length, C, generator=generator, dtype=F64).to(dtype).requires_grad_()


def ours(theirs, mech, x, **masks):
    """Its linear layers around our mechanism."""
    q, k, v = (layer(x)[:, None] for layer in (theirs.to_q, theirs.to_k, theirs.to_v))
    return theirs.project(mech(q, k, v, **masks)[:, 0])


@pytest.mark.parametrize("length", [L, N])
@pytest.mark.parametrize("kind", KINDS)
def test_same_weights_same_output_and_gradients(kind, length):
    theirs, mech = case(kind)
    x = draw(length)
    wanted, found = theirs(x), ours(theirs, mech, x)
    close(found, wanted)
    cotangent = draw(length, seed=2).detach()
    leaves = [x, theirs.to_q.weight, theirs.to_k.weight, theirs.to_v.weight]
    own, their = [*leaves, *mech.parameters()], list(leaves)
    if kind != "simple":
        their.append(theirs.wbias)
    for a, b in zip(
        torch.autograd.grad(found, own, cotangent),
        torch.autograd.grad(wanted, their, cotangent),
        strict=True,
    ):
        if b.shape == (N, N):
            b = spread(b) if kind == "local" else b[None]
        close(a, b)


# ---- where it departs ---------------------------------------------------------------------


def test_peer_replaces_the_local_biases_at_every_call():
    """A forward call of AFTLocal makes a new parameter: an optimiser's own is never trained."""
    theirs, mech = case("local")
    before = theirs.wbias
    theirs(draw()).sum().backward()
    assert theirs.wbias is not before and before.grad is None
    ours(theirs, mech, draw()).sum().backward()
    assert mech.weight.grad is not None


@pytest.mark.parametrize("kind", ["full", "local"])
def test_peer_overflows_at_keys_of_ninety(kind):
    """It takes exp(k) as it is: float32 ends at e^88.7. Ours is relative to the largest key.

    float32: sums of 31 terms, 31·6e-8·2 = 4e-6, and keys of 100 rounded to 4e-6, twice: 1.2e-5.
    """
    torch.set_default_dtype(torch.float32)
    theirs, mech = case(kind, torch.float32)
    x = draw(dtype=torch.float32)
    wanted = theirs(x)
    with torch.no_grad():
        theirs.to_k.bias += 100.0  # the same for all keys: it cancels
    assert theirs(x).isnan().all()
    close(ours(theirs, mech, x), wanted, 2e-5)


def test_peer_has_neither_masks_nor_causality_nor_conv():
    """Causal is ours alone: its rows see all tokens. AFTConv raises NotImplementedError."""
    theirs, mech = case("full")
    x = draw()
    later = x.detach().clone()
    later[:, -1] += 1.0
    assert (theirs(later) - theirs(x))[:, 0].abs().max() > 1e-6
    close(
        ours(theirs, mech, later, causal=True)[:, :-1], ours(theirs, mech, x, causal=True)[:, :-1]
    )
    from aft_pytorch import aft_pytorch

    with pytest.raises(NotImplementedError):
        aft_pytorch.AFTConv()(x)
