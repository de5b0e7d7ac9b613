"""Our gMLP against g-mlp-pytorch 0.1.5's `gMLPBlock` with the same weights."""

import pytest
import torch

import subquad as sq

pytestmark = pytest.mark.peers

peer = pytest.importorskip(
    "g_mlp_pytorch.g_mlp_pytorch",
    reason="g-mlp-pytorch is not installed: pip install 'subquad[peers]'",
)

F64 = torch.float64
B, C, HIDDEN, N = 2, 13, 30, 41


def close(found, wanted, tolerance=1e-12):
    """float64: products of 13, 41 and 15 terms, a norm and a softmax over 41 in a row, by
    Fourier transforms in part: 200 roundings of 1.1e-16, and as many in the gradient, with a
    margin of ten.
    """
    assert found.shape == wanted.shape
    error = (found - wanted).abs().max().item()
    assert error <= tolerance * wanted.abs().max().item(), f"{error:.3e}"


def pair(causal, heads, attention, circulant):
    torch.manual_seed(0)
    theirs = peer.gMLPBlock(
        dim=C, dim_ff=HIDDEN, seq_len=N, heads=heads, attn_dim=attention, causal=causal,
        circulant_matrix=circulant,
    ).to(F64)  # fmt: skip
    unit = theirs.sgu
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "circulant_pos" not in name:  # factors of the rows and columns that we do not have
                parameter.add_(0.2 * torch.randn_like(parameter))
    ours = sq.build(
        "gmlp", embed_dim=C, max_length=N, dtype=F64, hidden=HIDDEN, heads=heads,
        attention=attention, weights="toeplitz" if circulant else "full",
    )  # fmt: skip
    with torch.no_grad():
        shared = {
            "in_weight": theirs.proj_in[0].weight,
            "in_bias": theirs.proj_in[0].bias,
            "norm_weight": unit.norm.weight,
            "norm_bias": unit.norm.bias,
            "spatial_weight": unit.weight,
            "spatial_bias": unit.bias,
            "out_weight": theirs.proj_out.weight,
            "out_bias": theirs.proj_out.bias,
        }
        if attention is not None:
            shared["attention_in"] = theirs.attn.to_qkv.weight
            shared["attention_out"] = theirs.attn.to_out.weight
            shared["attention_bias"] = theirs.attn.to_out.bias
        for name, parameter in shared.items():
            own = getattr(ours, name)
            if circulant and name == "spatial_weight":
                own.zero_()
                own[:, N - 1 :] = parameter.flip(-1)  # theirs: lags N−1 … 0
            else:
                own.copy_(parameter)
    assert set(shared) == set(dict(ours.named_parameters()))
    return theirs, ours, shared


CASES = [(False, 1, None, False), (False, 3, 4, False), (True, 5, None, False), (True, 1, 7, False)]


@pytest.mark.parametrize(
    ("causal", "heads", "attention", "circulant"), [*CASES, (True, 3, None, True)]
)
def test_block(causal, heads, attention, circulant):
    """Their circulant matrix is lower triangular as it is built: a causal Toeplitz matrix."""
    theirs, ours, shared = pair(causal, heads, attention, circulant)
    lengths = (N, 17) if causal and not circulant else (N,)  # theirs has one length if not causal
    for length in lengths:
        generator = torch.Generator().manual_seed(length)
        x = torch.randn(B, length, C, generator=generator, dtype=F64).requires_grad_()
        out, wanted = ours(x, causal=causal), theirs(x)
        close(out, wanted)
        cotangent = torch.randn(B, length, C, generator=generator, dtype=F64)
        own = [getattr(ours, name) for name in shared]
        found = torch.autograd.grad(out, [x, *own], cotangent)
        truth = torch.autograd.grad(wanted, [x, *shared.values()], cotangent)
        for name, a, b in zip(("x", *shared), found, truth, strict=True):
            if circulant and name == "spatial_weight":
                a = a[:, N - 1 :].flip(-1)
            close(a, b)


def test_their_circulant_matrix_ignores_the_future_even_if_not_causal():
    theirs, ours, _ = pair(False, 3, None, True)
    x = torch.randn(B, N, C, dtype=F64)
    close(ours(x, causal=True), theirs(x))
