"""Our FNet against transformers' `FNetFourierTransform` and `FNetLayer`, same weights."""

import pytest
import torch
from torch import nn

import subquad as sq

pytestmark = pytest.mark.peers

peer = pytest.importorskip(
    "transformers.models.fnet.modeling_fnet",
    reason="transformers is not installed: pip install 'subquad[hf]'",
)

F64 = torch.float64
B, L, C, HIDDEN = 2, 53, 22, 37


def close(found, wanted, tolerance=1e-12):
    """float64: transforms of 53·22 terms, a norm, two products of ≤ 37 terms: 200 roundings of
    1.1e-16, and as many in the gradient, with a margin of ten.
    """
    assert found.shape == wanted.shape
    error = (found - wanted).abs().max().item()
    assert error <= tolerance * wanted.abs().max().item(), f"{error:.3e}"


def layer(**options):
    torch.manual_seed(0)
    config = peer.FNetConfig(
        hidden_size=C, intermediate_size=HIDDEN, hidden_act="gelu", hidden_dropout_prob=0.0,
        **options,
    )  # fmt: skip
    theirs = peer.FNetLayer(config).to(F64).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return theirs


def tokens():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(B, L, C, generator=generator, dtype=F64).requires_grad_()


def test_transform():
    theirs, ours = layer().fourier.self, sq.build("fnet", embed_dim=C)
    x = tokens()
    (wanted,) = theirs(x)
    out = ours(x)
    close(out, wanted)
    cotangent = torch.randn(B, L, C, dtype=F64)
    close(*(torch.autograd.grad(one, x, cotangent)[0] for one in (out, wanted)))


def test_layer():
    """Their layer is an encoder layer with post-norm whose self-attention is the transform."""
    theirs = layer()
    ours = sq.TransformerEncoderLayer(
        C, 2, HIDDEN, 0.0, "gelu", 1e-12, batch_first=True, dtype=F64, mechanism="fnet"
    )
    assert isinstance(ours.self_attn, sq.TokenMixing)
    pairs = {
        "norm1": theirs.fourier.output.LayerNorm,
        "linear1": theirs.intermediate.dense,
        "linear2": theirs.output.dense,
        "norm2": theirs.output.LayerNorm,
    }
    for name, module in pairs.items():
        ours.get_submodule(name).load_state_dict(module.state_dict())
    assert len(list(ours.parameters())) == len(list(theirs.parameters())) == 8
    x = tokens()
    out, (wanted,) = ours(x), theirs(x)
    close(out, wanted)
    cotangent = torch.randn(B, L, C, dtype=F64)
    mine = [p for name in pairs for p in ours.get_submodule(name).parameters()]
    other = [p for module in pairs.values() for p in module.parameters()]
    found = torch.autograd.grad(out, [x, *mine], cotangent)
    truth = torch.autograd.grad(wanted, [x, *other], cotangent)
    for a, b in zip(found, truth, strict=True):
        close(a, b)


def test_padding_is_mixed_in_by_theirs():
    """Theirs has no mask: what padding holds changes its tokens, and the length its frequencies."""
    theirs, ours = layer().fourier.self, sq.build("fnet", embed_dim=C)
    x = tokens().detach()
    padded = nn.functional.pad(x, (0, 0, 0, 6))
    mask = (torch.arange(L + 6) < L).expand(B, -1)
    close(ours(padded, key_mask=mask)[:, :L], theirs(x)[0])
    assert (theirs(padded)[0][:, :L] - theirs(x)[0]).abs().max() > 1.0
