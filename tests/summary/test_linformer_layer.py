"""`LinformerEncoderLayer`: torch's encoder layer in the limit, masks, the source text's example."""

import pytest
import torch
from torch import nn

import subquad as sq

B, L, C, H, HIDDEN = 3, 23, 20, 4, 37

# Sums of ≤ 37 terms through two norms and a softmax, float64: 1.1e-16 × 10^4, see laws.EXACT.
BOUND = 1e-10


def close(found, wanted, bound=BOUND):
    assert found.shape == wanted.shape
    error = (found - wanted).abs().max().item()
    assert error <= bound * max(1.0, wanted.abs().max().item()), f"{error:.2e}"


def build(**options):
    options = {"dropout": 0.0, "k": 7, "max_length": L, "dtype": torch.float64, **options}
    torch.manual_seed(0)
    return sq.LinformerEncoderLayer(C, H, HIDDEN, **options)


def draw(length=L):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(B, length, C, generator=generator, dtype=torch.float64)


def padding():
    return torch.arange(L) >= torch.tensor([L, 17, 11])[:, None]


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu", torch.tanh])
@pytest.mark.parametrize("normalize_before", [False, True])
def test_the_identity_is_torchs_layer(normalize_before, activation, need_weights):
    """k = L and E = F = I: output and gradients of `nn.TransformerEncoderLayer`, whose weights
    load. The source text's second residual skips the first norm; here it does not.
    """
    peer = nn.TransformerEncoderLayer(
        C, H, HIDDEN, dropout=0.0, activation=activation, norm_first=normalize_before,
        batch_first=True, dtype=torch.float64,
    )  # fmt: skip
    layer = build(k=L, activation=activation, normalize_before=normalize_before)
    layer.load_state_dict(peer.state_dict())
    with torch.no_grad():
        for parameter in layer.self_attn.mechanism.parameters():
            parameter.copy_(torch.eye(L, dtype=torch.float64)[None])
    x = draw().requires_grad_()
    found, weights = layer(x, need_weights=need_weights)
    wanted = peer(x)
    close(found, wanted)
    assert (weights is not None) == need_weights
    if need_weights:
        normed = peer.norm1(x) if normalize_before else x
        close(weights, peer.self_attn(normed, normed, normed, need_weights=True)[1])
    own = dict(layer.named_parameters())
    names = [name for name, _ in peer.named_parameters()]
    for a, b in zip(
        torch.autograd.grad(found.square().sum(), [x, *(own[name] for name in names)]),
        torch.autograd.grad(wanted.square().sum(), [x, *peer.parameters()]),
        strict=True,
    ):
        close(a, b)


@pytest.mark.parametrize("options", [{}, {"sharing": "kv"}, {"projection": "mean"}], ids=str)
def test_weights_are_over_summaries(options):
    layer = build(**options)
    x = draw()
    out, attn = layer(x, src_key_padding_mask=padding())
    windows = 6 if options.get("projection") == "mean" else 7  # windows of ⌈23/7⌉ = 4 keys
    assert out.shape == (B, L, C) and attn.shape == (B, L, windows)
    close(attn.sum(-1), torch.ones(B, L, dtype=torch.float64))
    fused, none = layer(x, src_key_padding_mask=padding(), need_weights=False)
    assert none is None
    close(fused, out)


def test_padding_changes_nothing_and_what_it_holds_stays_out():
    layer, x, mask = build(), draw(), padding()
    out, attn = layer(x, src_key_padding_mask=mask)
    dirty, _ = layer(x.masked_fill(mask[..., None], float("nan")), src_key_padding_mask=mask)
    for row, n in enumerate((L, 17, 11)):
        alone, weights = layer(x[row : row + 1, :n])
        close(out[row : row + 1, :n], alone)
        close(attn[row : row + 1, :n], weights)
        assert torch.equal(dirty[row, :n], out[row, :n])


def test_masks_of_whole_columns_are_honoured_and_others_raise():
    layer, x = build(), draw()
    free = torch.zeros(L, L, dtype=torch.bool)
    close(layer(x, free)[0], layer(x)[0])
    columns = free.clone()
    columns[:, 5] = True
    padded = torch.zeros(B, L, dtype=torch.bool)
    padded[:, 5] = True
    close(layer(x, columns)[0], layer(x, src_key_padding_mask=padded)[0])
    causal = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
    for need_weights in (False, True):
        with pytest.raises(sq.UnsupportedError, match="causal.*every summary mixes keys"):
            layer(x, causal, need_weights=need_weights)
        odd = free.clone()
        odd[2, 3] = True
        with pytest.raises(sq.UnsupportedError, match="neither causal .* nor whole columns"):
            layer(x, odd, need_weights=need_weights)


def test_dropout_acts_while_training_only():
    layer, x = build(dropout=0.4), draw()
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[0])
    layer.train()
    torch.manual_seed(0)
    first, attn = layer(x)
    assert not torch.equal(first, layer(x)[0])
    assert (attn.sum(-1) - 1).abs().max() > 0.01  # the weights as applied


def test_errors():
    with pytest.raises(sq.OptionError, match=r"activation='rely'.*did you mean 'relu'"):
        build(activation="rely")
    with pytest.raises(sq.OptionError) as caught:
        build(activation=None, normalize_before="no")
    for part in (
        "activation=None is none of relu, gelu, silu, nor a function",
        "normalize_before='no'",
    ):
        assert part in str(caught.value)
    for size in (0, -3, 2.5):
        with pytest.raises(sq.OptionError, match=f"dim_feedforward={size} must be an integer ≥ 1"):
            sq.LinformerEncoderLayer(C, H, size, max_length=L)
    layer = build()
    with pytest.raises(sq.ShapeError, match=r"src must be \(B, L, C=20\), given \(3, 23, 7\)"):
        layer(draw()[..., :7])
    with pytest.raises(sq.ShapeError, match="length S=24, longer than max_length=23"):
        layer(draw(24))
    with pytest.raises(sq.ShapeError, match="key_padding_mask must be"):
        layer(draw(), src_key_padding_mask=padding()[:, :5])
    with pytest.raises(sq.OptionError, match="k=0"):
        build(k=0)


# ---- the source text's usage example, corrected ------------------------------------------


def usage_example(batch, length, width, heads, steps, **options):
    """Its cross-entropy took the real-valued inputs as targets; here tokens have class labels."""
    torch.manual_seed(0)
    model = sq.LinformerEncoderLayer(d_model=width, nhead=heads, max_length=length, **options)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, weight_decay=0.001)
    inputs = torch.rand((batch, length, width))
    targets = torch.randint(width, (batch, length))
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        outputs, attn = model(inputs)
        loss = criterion(outputs.view(-1, outputs.size(-1)), targets.view(-1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, inputs, outputs, attn, losses


def test_usage_example():
    model, inputs, outputs, attn, losses = usage_example(
        4, 64, 32, 8, steps=40, dim_feedforward=64, k=16, dropout=0.0
    )
    assert outputs.shape == (4, 64, 32) and attn.shape == (4, 64, 16)
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())
    assert losses[-1] < 0.97 * losses[0]  # 40 steps fit some of 256 random labels
    with pytest.raises(ValueError, match="batch_size"):  # as printed, it cannot run
        nn.CrossEntropyLoss()(outputs.view(-1, outputs.size(-1)), inputs.view(-1))


@pytest.mark.slow
def test_usage_example_at_its_own_size():
    _, _, outputs, attn, losses = usage_example(16, 1024, 512, 8, steps=1)
    assert outputs.shape == (16, 1024, 512) and attn.shape == (16, 1024, 256)
    assert torch.isfinite(outputs).all() and losses[0] > 0
