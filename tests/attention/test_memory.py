"""Mixtures of encoder layers, by hand and as a decoder's memories."""

import pytest
import torch

import subquad as sq
from subquad.attention.memory import LayerMix

EPS = torch.finfo(torch.float64).eps


def layers(count=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 11, 6, generator=generator, dtype=torch.float64) for _ in range(count)]


def test_each_read_has_its_own_softmax_over_layers():
    mix = LayerMix(3, 2, dtype=torch.float64)
    with torch.no_grad():
        mix.weight.copy_(torch.tensor([[0.3, -1.0, 2.0], [0.0, 5.0, 0.1]]))
    hidden = [layer.requires_grad_() for layer in layers()]
    found = mix(hidden)
    assert len(found) == 2
    # a softmax of three and a sum of three terms below 4 in size: 4 operations each
    for read, memory in zip(mix.weight.double(), found, strict=True):
        share = read.exp() / read.exp().sum()
        wanted = sum(s * layer for s, layer in zip(share, hidden, strict=True))
        assert (memory - wanted).abs().max() < 4 * 8 * EPS
    (gradient,) = torch.autograd.grad(sum(memory.square().sum() for memory in found), mix.weight)
    assert gradient.abs().min() > 0
    # a constant added to a row changes nothing: its gradients sum to zero, but for the rounding
    # of sums over 132 entries in each of them
    assert gradient.sum(-1).abs().max() < 3 * 132 * EPS * gradient.abs().max()


def test_it_starts_as_the_mean_and_a_large_weight_chooses():
    mix, hidden = LayerMix(3, 2, dtype=torch.float64), layers()
    mean = torch.stack(hidden).mean(0)
    # sums of three terms below 4, in another order
    assert all((memory - mean).abs().max() < 4 * 4 * EPS for memory in mix(hidden))
    with torch.no_grad():
        mix.weight[1, 2] = 1e4
    assert torch.equal(mix(hidden)[1], hidden[2])


def test_a_decoder_reads_its_mixtures():
    encoder = sq.TransformerEncoder(6, 2, 3, 8, 0.0, mechanism="softmax", dtype=torch.float64)
    decoder = sq.TransformerDecoder(6, 2, 2, 8, 0.0, mechanism="softmax", dtype=torch.float64)
    mix, x = LayerMix(3, 2, dtype=torch.float64), layers(1, seed=4)[0]
    hidden = encoder.hidden_states(x)[1:-1:2]
    with torch.no_grad():
        mix.weight[:, 2] = 1e4  # the last layer alone: the conventional memory
    assert torch.equal(decoder(x, mix(hidden)), decoder(x, encoder(x)))
    with torch.no_grad():
        mix.weight.zero_()
    decoder(x, mix(hidden)).sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in [mix.weight, *encoder.parameters()])


def test_wrong_layers_say_what_is_wrong():
    with pytest.raises(sq.OptionError, match=r"num_layers=0 must .*; num_reads=1.5 must"):
        LayerMix(0, 1.5)
    mix = LayerMix(3, 2)
    with pytest.raises(sq.ShapeError, match=r"must be 3 tensors of one shape .*, given 2"):
        mix(layers(2))
    wrong = layers()
    with pytest.raises(sq.ShapeError, match=r"given 3: \(2, 11, 6\), \(2, 10, 6\)"):
        mix([*wrong[:2], wrong[2][:, 1:]])
    with pytest.raises(sq.ShapeError, match="given 0"):
        mix([])
