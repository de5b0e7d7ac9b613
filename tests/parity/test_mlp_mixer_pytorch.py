"""Our token mixing against mlp-mixer-pytorch 0.3.1's, with the same weights."""

import pytest
import torch

import subquad as sq

pytestmark = pytest.mark.peers

peer = pytest.importorskip(
    "mlp_mixer_pytorch", reason="mlp-mixer-pytorch is not installed: pip install 'subquad[peers]'"
)

F64 = torch.float64
B, C, PATCH, SIDE = 2, 11, 2, 10  # 25 patches of 2 × 2 × 3 numbers


def close(found, wanted, tolerance=1e-12):
    """float64: per layer products of 25, 44, 11 and 5 terms and two norms, two layers: 250
    roundings of 1.1e-16, and as many in the gradient, with a margin of ten.
    """
    assert found.shape == wanted.shape
    error = (found - wanted).abs().max().item()
    assert error <= tolerance * wanted.abs().max().item(), f"{error:.3e}"


def test_mixer():
    """Their mixer is a stack of encoder layers with pre-norm whose self-attention is ours."""
    torch.manual_seed(0)
    theirs = peer.MLPMixer(
        image_size=SIDE, channels=3, patch_size=PATCH, dim=C, depth=2, num_classes=7,
        expansion_factor=4, expansion_factor_token=0.5,
    ).to(F64)  # fmt: skip
    image = torch.randn(B, 3, SIDE, SIDE, dtype=F64)
    x = theirs[1](theirs[0](image)).detach().requires_grad_()
    wanted, out, mine, other = x, x, [], []
    for block in (theirs[2], theirs[3]):
        (token, channel), most = block, x.shape[1]
        layer = sq.TransformerEncoderLayer(
            C, 1, channel.fn[0].out_features, 0.0, "gelu", batch_first=True, norm_first=True,
            dtype=F64, mechanism=f"mlp_mixer(hidden={token.fn[0].out_channels})",
            max_length=most,
        )  # fmt: skip
        pairs = {
            "norm1.weight": token.norm.weight,
            "norm1.bias": token.norm.bias,
            "self_attn.mechanism.in_weight": token.fn[0].weight,
            "self_attn.mechanism.in_bias": token.fn[0].bias,
            "self_attn.mechanism.out_weight": token.fn[3].weight,
            "self_attn.mechanism.out_bias": token.fn[3].bias,
            "norm2.weight": channel.norm.weight,
            "norm2.bias": channel.norm.bias,
            "linear1.weight": channel.fn[0].weight,
            "linear1.bias": channel.fn[0].bias,
            "linear2.weight": channel.fn[3].weight,
            "linear2.bias": channel.fn[3].bias,
        }
        # their products over tokens are convolutions of width one: a last dimension of one
        layer.load_state_dict(
            {k: v.squeeze(-1) if v.dim() == 3 else v for k, v in pairs.items()}, strict=True
        )
        wanted, out = block(wanted), layer(out)
        mine += [layer.get_parameter(name) for name in pairs]
        other += list(pairs.values())
    close(out, wanted)
    cotangent = torch.randn_like(wanted)
    found = torch.autograd.grad(out, [x, *mine], cotangent)
    truth = torch.autograd.grad(wanted, [x, *other], cotangent)
    for a, b in zip(found, truth, strict=True):
        close(a, b.squeeze(-1) if b.dim() == 3 and a.dim() == 2 else b)
