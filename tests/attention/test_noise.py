"""Uniform noise on attention weights: what is drawn, how much, and when."""

import math

import pytest
import torch

import subquad as sq
from subquad.attention.exact import engine

B, H, HKV, L, S, D, V = 2, 4, 2, 5, 7, 3, 2
EPS = torch.finfo(torch.float64).eps


def draw(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, H, L, D), (B, HKV, S, D), (B, HKV, S, V))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def build(name, noise, **options):
    spec = f"{name}(weight_noise={noise}{options.pop('more', '')})"
    sizes = {"head_dim": D, "num_heads": H, "num_kv_heads": HKV, "dtype": torch.float64}
    return sq.build(spec, **sizes, **options)


@pytest.mark.parametrize("name", ["softmax", "additive"])
def test_weights_are_multiplied_by_uniform_factors(name):
    """w·(1 + a·u): within ±a, of mean 1 and variance a²/3, another for each weight."""
    amount = 0.3
    mech, plain = build(name, amount), build(name, 0.0)
    q, k, _ = draw()
    torch.manual_seed(1)
    draws = 400
    factors = torch.stack([mech.weights(q, k) / plain.weights(q, k) for _ in range(draws)])
    assert ((factors - 1).abs() <= amount + 1e-9).all()
    count = factors.numel()
    # five standard errors: of the mean a/√3/√n; of the variance √(4/45)·a²/√n, as u⁴ has mean 1/5
    assert abs(factors.mean().item() - 1) <= 5 * amount / math.sqrt(3 * count)
    spread = factors.var().item() - amount**2 / 3
    assert abs(spread) <= 5 * amount**2 * math.sqrt(4 / 45 / count)
    # of each weight by itself the mean is 1 too: the largest of 280 is within 5 errors
    means = factors.mean(0)
    assert ((means - 1).abs() <= 5 * amount / math.sqrt(3 * draws)).all()
    assert factors[0].flatten().unique().numel() == factors[0].numel()


@pytest.mark.parametrize("name", ["softmax", "additive"])
def test_it_acts_in_training_and_follows_torchs_generator(name):
    mech, (q, k, v) = build(name, 0.5), draw()
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        runs.append(mech(q, k, v, causal=True))
    assert torch.equal(*runs) and not torch.equal(mech(q, k, v, causal=True), runs[0])
    exact = build(name, 0.0)(q, k, v, causal=True)
    # the fused kernel sums in another order: at most 7 weights and values below 4
    assert (mech.eval()(q, k, v, causal=True) - exact).abs().max() <= 40 * EPS
    assert not mech.capabilities.deterministic and build(name, 0.0).capabilities.deterministic
    # a padded key has weight zero, whatever it is multiplied by
    keep = torch.arange(S) < S - 2
    mech.train()
    torch.manual_seed(4)
    v[:, :, -2:] = math.nan
    assert mech(q, k, v, key_mask=keep).isfinite().all()


@pytest.mark.parametrize("more", ["", ", dropout=0.4"])
@pytest.mark.parametrize("name", ["softmax", "additive"])
def test_chunks_that_are_computed_again_draw_the_same(name, more, monkeypatch):
    """The output is linear in v: out·g = v·∂(out·g)/∂v, if both passes used one set of weights."""
    monkeypatch.setattr(engine, "CHUNK_BYTES", 1)
    mech, (q, k, v) = build(name, 0.7, more=more), draw()
    q, v = q.requires_grad_(), v.requires_grad_()
    g = torch.randn(B, H, L, V, dtype=torch.float64)
    total = (mech(q, k, v, causal=True) * g).sum()
    (grad,) = torch.autograd.grad(total, v)
    # 280 products of numbers below 10
    assert abs((grad * v).sum().item() - total.item()) <= 280 * 10 * EPS


def test_in_multihead_attention_and_layers():
    x = torch.randn(2, 6, 12, dtype=torch.float64)
    attn = sq.MultiheadAttention(
        12, 3, batch_first=True, mechanism="softmax", attention_noise=0.4, dtype=torch.float64
    )
    assert attn.mechanism.config == sq.SoftmaxConfig(weight_noise=0.4)
    torch.manual_seed(0)
    out, weights = attn(x, x, x, need_weights=True, average_attn_weights=False)
    value = attn._heads(attn._project(x, x, x, True)[2])[0]
    applied = attn.out_proj((weights @ value).transpose(1, 2).flatten(2))
    assert (applied - out).abs().max() <= 50 * EPS  # the matrix returned is the one applied
    assert (weights.sum(-1) - 1).abs().max() > 1e-3
    for layer, arguments in (
        (sq.TransformerEncoderLayer, [x]),
        (sq.TransformerDecoderLayer, [x, x]),
    ):
        noisy = layer(
            12, 3, 8, 0.0, batch_first=True, mechanism="softmax", attention_noise=0.4,
            dtype=torch.float64,
        )  # fmt: skip
        assert not torch.equal(noisy(*arguments), noisy(*arguments))
        noisy.eval()
        assert torch.equal(noisy(*arguments), noisy(*arguments))
    stack = sq.TransformerEncoder(
        12, 3, 2, 8, 0.0, mechanism="additive", attention_noise=0.4, dtype=torch.float64
    )
    assert not torch.equal(stack(x), stack(x))


def test_it_is_refused_with_a_reason():
    with pytest.raises(
        sq.UnsupportedError,
        match="'performer' does not support attention_noise=0.1: it forms no attention weights "
        "that could have noise on them; set attention_noise=0. These do: softmax, additive",
    ):
        sq.MultiheadAttention(12, 3, attention_noise=0.1)
    with pytest.raises(sq.OptionError, match="weight_noise is given twice: attention_noise=0.1"):
        sq.MultiheadAttention(12, 3, mechanism="softmax(weight_noise=0.2)", attention_noise=0.1)
    with pytest.raises(sq.OptionError, match="attention_noise=1.5 must be a number"):
        sq.MultiheadAttention(12, 3, mechanism="softmax", attention_noise=1.5)
    with pytest.raises(sq.OptionError, match="weight_noise=-1 must be a number"):
        sq.build("softmax(weight_noise=-1)", head_dim=4, num_heads=1)
    with pytest.raises(sq.UnsupportedError, match="'performer' does not support attention_noise"):
        sq.TransformerEncoderLayer(12, 3, attention_noise=0.1)
