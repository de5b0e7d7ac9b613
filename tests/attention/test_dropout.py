import math

import pytest
import torch

from subquad.attention.dropout import Dropout


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [0.1, 0.25, 0.5, 0.9])
def test_rate_and_scale(p, dtype):
    torch.manual_seed(0)
    x = torch.ones(401, 503, dtype=dtype)  # no multiple of 4 entries
    out = Dropout(p)(x)
    kept = out != 0
    # binomial: five standard deviations of the share, and p's rounding to 2^-16
    bound = 5 * math.sqrt(p * (1 - p) / x.numel()) + 2**-17
    assert abs(float(kept.double().mean()) - (1 - p)) < bound
    scale = 2**16 / (2**16 - round(p * 2**16))
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], scale))
    assert out.dtype == dtype


def test_entries_are_independent():
    # neighbours share a 64-bit draw: no two of its four parts may know of each other
    torch.manual_seed(1)
    kept = (Dropout(0.5)(torch.ones(2**18)) != 0).double() - 0.5
    for shift in range(1, 9):
        correlation = float((kept[shift:] * kept[:-shift]).mean()) / 0.25
        assert abs(correlation) < 5 / math.sqrt(2**18)  # standard deviation of a mean of signs


def test_gradient_goes_through_what_is_kept():
    torch.manual_seed(2)
    x = torch.randn(37, 11, dtype=torch.float64, requires_grad=True)
    out = Dropout(0.3)(x)
    out.sum().backward()
    torch.testing.assert_close(x.grad, (out / x).detach())


def test_seed_decides():
    layer, x = Dropout(0.3), torch.ones(1000)
    torch.manual_seed(3)
    first = layer(x)
    torch.manual_seed(3)
    assert torch.equal(layer(x), first)
    assert not torch.equal(layer(x), first)


def test_nothing_is_drawn_in_evaluation_or_at_zero():
    x = torch.ones(8)
    state = torch.get_rng_state()
    assert torch.equal(Dropout(0.3).eval()(x), x)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(Dropout(0.0)(x), x)
    assert not Dropout(1.0)(x).any()
    assert Dropout(0.3)(x[:0]).shape == (0,)


def test_in_a_graph_it_is_torchs():
    layer = Dropout(0.5)
    run = torch.compile(layer, backend="eager", fullgraph=True)
    assert set(run(torch.ones(1000)).unique().tolist()) == {0.0, 2.0}
