"""Positions beside their formulas, at any offset, and what rotations keep."""

import math

import pytest
import torch

import subquad as sq
from subquad.positions import Learned, Rotary, Sinusoidal, position_ids

EPS = torch.finfo(torch.float64).eps
FREQUENCIES = [2 ** (1 / n) for n in (10, 9, 8)]  # 1.07, 1.08, 1.09


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def wave(position, channel, frequencies):
    """One number of the table, in Python's floats."""
    pair, cosine = divmod(channel, 2)
    if pair >= len(frequencies):
        return 0.0
    angle = frequencies[pair] * position
    return math.cos(angle) if cosine else math.sin(angle)


SINES = [(width, given) for width in (1, 7, 8) for given in (None, "base")]


@pytest.mark.parametrize(("width", "given"), [*SINES, (7, "frequencies"), (8, "frequencies")])
def test_sinusoidal_is_its_formula(width, given):
    options = {"base": {"base": 50.0}, "frequencies": {"frequencies": FREQUENCIES}}
    table = Sinusoidal(width, **options.get(given, {}))
    base = 50.0 if given == "base" else 10000.0
    powers = [base ** (-2 * i / width) for i in range((width + 1) // 2)]
    ids = torch.tensor([[0, 1, 2], [5, 1000, 123456]])
    got = table(ids, torch.float64)
    frequencies = FREQUENCIES if given == "frequencies" else powers
    wanted = [
        [[wave(p, c, frequencies) for c in range(width)] for p in row] for row in ids.tolist()
    ]
    # The same float64 operations: ω·p is rounded to half an ulp, twice if powers differ in
    # their last bit, of at most 1.1·123456 radians.
    assert (got - torch.tensor(wanted, dtype=torch.float64)).abs().max() <= 2 * 1.1 * 123456 * EPS
    assert table(ids).dtype == torch.float32
    assert not list(table.parameters()) and not table.state_dict()


def test_a_shift_of_sines_is_a_rotation():
    table = Sinusoidal(6)
    at = table(torch.arange(20), torch.float64).unflatten(-1, (3, 2))
    turn = torch.tensor(table.frequencies, dtype=torch.float64) * 5
    s, c = at[:-5].unbind(-1)
    later = torch.stack([s * turn.cos() + c * turn.sin(), c * turn.cos() - s * turn.sin()], -1)
    assert (later - at[5:]).abs().max() <= 20 * EPS  # angles below 20 radians


def naive_rotary(x, ids, frequencies, interleaved):
    """Pairs as complex numbers, times e^{iωp}."""
    out, half = x.clone(), x.shape[-1] // 2
    for f, frequency in enumerate(frequencies):
        a, b = (2 * f, 2 * f + 1) if interleaved else (f, half + f)
        turned = torch.complex(x[..., a], x[..., b]) * torch.exp(1j * frequency * ids.double())
        out[..., a], out[..., b] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("frequencies", [None, [0.5, 2.0]])
@pytest.mark.parametrize("interleaved", [True, False])
def test_rotary_is_a_complex_product(interleaved, frequencies):
    rotary = Rotary(6, base=30.0, frequencies=frequencies, interleaved=interleaved)
    x = torch.randn(2, 3, 5, 6, generator=generator(), dtype=torch.float64)
    wanted = frequencies or [30.0 ** (-2 * i / 6) for i in range(3)]
    for ids in (torch.arange(5), torch.tensor([[0, 1, 2, 3, 4], [0, 0, 0, 1, 2]])[:, None]):
        got = rotary(x, ids)
        # angles up to 8 radians, each product of numbers up to 4 rounded three times
        assert (got - naive_rotary(x, ids, wanted, interleaved)).abs().max() <= 8 * 4 * 3 * EPS
        norms = x.norm(dim=-1)
        assert (got.norm(dim=-1) - norms).abs().max() <= 8 * EPS * norms.max()
    if frequencies:  # channels behind the last pair stay
        rest = [4, 5] if interleaved else [2, 5]
        assert torch.equal(got[..., rest], x[..., rest])


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotated_products_depend_on_the_distance(interleaved):
    rotary = Rotary(8, interleaved=interleaved)
    q, k = torch.randn(2, 1, 8, generator=generator(), dtype=torch.float64)

    def product(p, s):
        return (rotary(q, torch.tensor([p])) * rotary(k, torch.tensor([s]))).sum().item()

    # ω·p of 10⁶ radians is off by 10⁶·eps/2; the norms of q and k multiply it
    bound = 2 * 10**6 * EPS * (q.norm() * k.norm()).item()
    assert abs(product(7, 3) - product(10**6 + 4, 10**6)) <= bound
    assert abs(product(7, 3) - product(3, 7)) > 1e-3
    assert abs(product(7, 3) - product(8, 3)) > 1e-3


def test_rotary_in_single_precision_knows_far_positions():
    """Angles are float64: in float32 those of 10⁶ tokens would be off by 0.03 radians."""
    rotary = Rotary(4)
    x = torch.randn(1, 4, generator=generator())
    ids = torch.tensor([10**6 + 1])
    wanted = rotary(x.double(), ids)
    assert (rotary(x, ids) - wanted).abs().max() <= 3 * 4 * torch.finfo(torch.float32).eps


def test_learned_is_a_table():
    torch.manual_seed(0)
    table = Learned(40, 300)
    assert torch.equal(
        table(torch.tensor([[3, 1], [0, 39]])), table.weight[torch.tensor([[3, 1], [0, 39]])]
    )
    # 12,000 draws of N(0, 0.02²): the deviation's own is 0.02/√(2·12000) = 0.00013
    assert abs(table.weight.std().item() - 0.02) < 5 * 0.00013
    table(torch.tensor([2, 2, 5])).sum().backward()
    used = table.weight.grad.abs().sum(-1).nonzero().flatten()
    assert used.tolist() == [2, 5] and (table.weight.grad[2] == 2).all()
    assert table(torch.arange(3), torch.float64).dtype == torch.float64


def test_position_ids_count_what_is_kept():
    keep = torch.tensor([[False, True, False, True, True], [True, True, True, False, False]])
    assert position_ids(keep).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 0, 0]]
    with pytest.raises(sq.DtypeError, match="key_mask must be bool"):
        position_ids(keep.long())


def test_wrong_arguments_say_what_is_wrong():
    for make, match in {
        (lambda: Sinusoidal(0)): "Sinusoidal: width=0 must be an integer ≥ 1",
        (lambda: Sinusoidal(8, base=1.0)): "base=1.0 must be a number > 1",
        (lambda: Sinusoidal(4, frequencies=FREQUENCIES)): "3 of them need 6 channels.* there are 4",
        (lambda: Sinusoidal(4, frequencies=[])): r"frequencies=\[\] must be a list of numbers",
        (lambda: Sinusoidal(4, frequencies=["a"])): r"frequencies\[0\]='a' must be a number",
        (lambda: Rotary(5)): "head_dim=5 must be even: channels are turned in pairs",
        (lambda: Rotary(4, interleaved=1)): "interleaved=1 must be true or false",
        (lambda: Learned(0, 3)): "Learned: max_length=0 must be an integer ≥ 1",
    }.items():
        with pytest.raises(sq.OptionError, match=match):
            make()
    for module in (Sinusoidal(4), Rotary(4), Learned(3, 4)):
        arguments = [torch.zeros(2, 4)] if isinstance(module, Rotary) else []
        with pytest.raises(sq.DtypeError, match="position ids must be integers"):
            module(*arguments, torch.tensor([0.0, 1.0]))
    with pytest.raises(sq.ShapeError, match="end at max_length=3, given 4 tokens"):
        Learned(3, 4)(torch.tensor([3]))
    with pytest.raises(sq.ShapeError, match="position ids must be ≥ 0, given -1"):
        Learned(3, 4)(torch.tensor([-1]))
