"""Norms of blocks: batch norm beside torch's on the tokens that are no padding."""

import math

import pytest
import torch
from torch import nn

import subquad as sq
from subquad.attention.norms import MaskedBatchNorm

N, L, C = 3, 7, 6
EPS = torch.finfo(torch.float64).eps
KEEP = torch.arange(L) < torch.tensor([[L], [L - 4], [2]])


def filled(module, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(0.5, 1.5, generator=generator)
    return module


def tokens(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N, L, C, generator=generator, dtype=torch.float64) * 3 + 1


def pair():
    return filled(MaskedBatchNorm(C).double()), filled(nn.BatchNorm1d(C).double())


# Means and variances are sums of 12 tokens, a root and two products follow: some ten roundings of
# numbers up to 10, two implementations; their gradients are sums of 12 of these.
BOUND = 12 * 10 * 10 * EPS


def test_statistics_are_those_of_the_kept_tokens():
    """Output, gradients and running statistics equal torch's on the compacted tokens."""
    ours, theirs = pair()
    for step in range(2):  # twice: running statistics move on
        x = tokens(step).requires_grad_()
        got, wanted = ours(x, KEEP)[KEEP], theirs(x[KEEP])
        assert (got - wanted).abs().max() <= BOUND
        g = torch.randn(wanted.shape, dtype=torch.float64)
        found = torch.autograd.grad(got, [x, *ours.parameters()], g)
        truth = torch.autograd.grad(wanted, [x, *theirs.parameters()], g)
        for a, b in zip(found, truth, strict=True):
            assert (a - b).abs().max() <= BOUND
    for name, buffer in theirs.named_buffers():
        assert (ours.get_buffer(name) - buffer).abs().max() <= BOUND, name
    x = tokens(5)
    evaluated = ours.eval()(x, KEEP)
    assert (evaluated[KEEP] - theirs.eval()(x[KEEP])).abs().max() <= BOUND
    assert torch.equal(evaluated, ours(x))  # in evaluation padding changes nothing


def test_what_padding_contains_never_matters():
    ours, _ = pair()
    x = tokens().requires_grad_()
    spoiled = x.masked_fill(~KEEP[..., None], math.nan)
    out = ours(spoiled, KEEP)
    assert torch.equal(out[KEEP], filled(MaskedBatchNorm(C).double())(x, KEEP)[KEEP])
    out[KEEP].sum().backward()
    grads = (x.grad, ours.weight.grad, ours.bias.grad)
    assert all(grad.isfinite().all() for grad in grads) and not x.grad[~KEEP].any()


def test_a_batch_of_padding_alone_leaves_the_statistics():
    ours, _ = pair()
    ours(tokens(), KEEP)
    before = {name: buffer.clone() for name, buffer in ours.named_buffers()}
    assert ours(tokens(), torch.zeros(N, L, dtype=torch.bool)).isfinite().all()
    assert all(torch.equal(ours.get_buffer(name), b) for name, b in before.items())


def test_layouts_and_half_precision():
    ours, theirs = pair()
    x = tokens()
    assert (ours(x.flatten(0, 1)) - theirs(x.flatten(0, 1))).abs().max() <= BOUND
    turned = ours(x.transpose(0, 1), KEEP.T).transpose(0, 1)
    assert (turned - ours(x, KEEP)).abs().max() <= BOUND
    half = MaskedBatchNorm(C).to(torch.bfloat16)
    out = half(100 + x.to(torch.bfloat16), KEEP)
    assert out.dtype == torch.bfloat16
    # sums in bfloat16 would lose the tokens' spread beside 100; the inputs keep 0.5 of it
    assert abs(out[KEEP].float().std(0, correction=0) - 1).max() < 0.01
    with pytest.raises(sq.ShapeError, match=r"input must be \(..., C=6\), given \(3, 7, 5\)"):
        ours(x[..., 1:])


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("norm", ["rms", "batch"])
@pytest.mark.parametrize("kind", ["Encoder", "Decoder"])
def test_layers_with_other_norms(kind, norm, batch_first, norm_first):
    """A padded row trains like its tokens alone, in torch's layers too."""
    layers = [
        filled(
            getattr(sq, f"Transformer{kind}Layer")(
                C, 2, 5, 0.0, batch_first=batch_first, norm_first=norm_first, mechanism="softmax",
                norm=norm, dtype=torch.float64,
            )
        )
        for _ in range(2)
    ]  # fmt: skip
    names = [name for name, _ in layers[0].named_children() if name.startswith("norm")]
    wanted = {"rms": nn.RMSNorm, "batch": nn.BatchNorm1d}[norm]
    assert len(names) == (2 if kind == "Encoder" else 3)
    assert all(isinstance(layers[0].get_submodule(name), wanted) for name in names)
    x, memory = tokens()[:1], tokens(2)[:1]
    ignored = torch.arange(L)[None] >= 4
    prefix = "src" if kind == "Encoder" else "tgt"
    for padding in (ignored, torch.zeros(1, L).double().masked_fill(ignored, -math.inf)):
        inputs = [x] if kind == "Encoder" else [x, memory]
        inputs = inputs if batch_first else [t.transpose(0, 1) for t in inputs]
        short = [inputs[0][:, :4] if batch_first else inputs[0][:4], *inputs[1:]]
        got = layers[0](*inputs, **{f"{prefix}_key_padding_mask": padding})
        got = got[:, :4] if batch_first else got[:4]
        # attention, FFN and three norms, each within the bound of one norm
        assert (got - layers[1](*short)).abs().max() <= 5 * BOUND
        alone = [t.squeeze(0 if batch_first else 1) for t in inputs]
        single = layers[0].eval()(*alone, **{f"{prefix}_key_padding_mask": padding[0]})
        full = layers[0](*inputs, **{f"{prefix}_key_padding_mask": padding})
        assert (single - full.squeeze(0 if batch_first else 1)).abs().max() <= 5 * BOUND
        layers[0].train()


def test_unknown_norms_suggest_the_nearest():
    with pytest.raises(sq.OptionError, match=r"norm='bacth' is none of layer, batch, rms.*'batch'"):
        sq.TransformerEncoderLayer(C, 2, norm="bacth")
    assert sq.TransformerEncoderLayer(C, 2, norm="batch", bias=False).norm1.bias is None
    with pytest.raises(TypeError):  # torch's other batch norms are not what is computed here
        MaskedBatchNorm(C, affine=False)
