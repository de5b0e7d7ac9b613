"""Linear attention: the paper's formula, named maps, functions and modules, extreme inputs."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import subquad as sq
from references import ref_linear
from subquad.attention.kernel.linear import FUNCTIONS, LOGARITHMS, MAPS

F64 = torch.float64
D, H, KV, V = 5, 6, 3, 7
EXACT = 1e-11  # sums of ≤ 23·11 float64 terms, exponents ≤ 100: below 1e-12


def randn(*shape, seed=0, dtype=F64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=F64).to(dtype)


def build(heads=H, kv=KV, dim=D, dtype=F64, **options):
    return sq.build(
        "linear", head_dim=dim, num_heads=heads, num_kv_heads=kv, dtype=dtype, **options
    )


def inputs(L=19, S=23, seed=1, dtype=F64):
    shapes = (2, H, L, D), (2, KV, S, D), (2, KV, S, V)
    return [randn(*shape, seed=seed + n, dtype=dtype) for n, shape in enumerate(shapes)]


def close(found, wanted, tolerance=EXACT):
    error = (found.detach().double() - wanted.detach().double()).abs().max().item()
    assert error <= tolerance * wanted.detach().abs().max().item(), error


def ref(mech, q, k, v, scale=1.0, causal=False):
    mask = sq.Mask(causal=causal).to_dense(q.shape[2], k.shape[2])[None, None]
    return ref_linear(mech, q, k, v, allowed=mask, scale=scale)


class Hedge(nn.Module):
    """A learned map with another number of features: softmax of ±Wx."""

    def __init__(self, seed, dim=D, out=4, dtype=F64):
        super().__init__()
        self.weight = nn.Parameter(randn(dim, out, seed=seed, dtype=dtype))

    def forward(self, x):
        y = x @ self.weight
        return torch.cat([y, -y], -1).softmax(-1)


# ---- named maps ---------------------------------------------------------------------------


def test_the_papers_formula():
    """Katharopoulos et al., eq. 4 with eq. 7, written out for one head."""
    q, k, v = (randn(1, 1, 13, D, seed=n) for n in range(3))
    mech = build(1, 1)
    phi_q, phi_k = F.elu(q) + 1, F.elu(k) + 1
    for causal in (False, True):
        weights = (phi_q @ phi_k.mT).tril(0 if causal else 12)
        close(mech(q, k, v, causal=causal), weights @ v / weights.sum(-1, keepdim=True))
    # eq. 9–12: the recurrence of the causal form.
    s, z = torch.zeros(D, D, dtype=F64), torch.zeros(D, dtype=F64)
    rows = []
    for t in range(13):
        s = s + phi_k[0, 0, t, :, None] * v[0, 0, t]
        z = z + phi_k[0, 0, t]
        rows.append(phi_q[0, 0, t] @ s / (phi_q[0, 0, t] @ z))
    close(mech(q, k, v, causal=True)[0, 0], torch.stack(rows))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("key_map", [None, *MAPS])
@pytest.mark.parametrize("map", MAPS)
def test_every_pair_of_named_maps(map, key_map, causal):
    mech = build(map=map, key_map=key_map)
    leaves = [x.requires_grad_() for x in inputs()]
    out, wanted = mech(*leaves, causal=causal), ref(mech, *leaves, causal=causal)
    close(out, wanted)
    bar = randn(*wanted.shape, seed=9)
    grads = (torch.autograd.grad(x, leaves, bar) for x in (out, wanted))
    for a, b in zip(*grads, strict=True):
        close(a, b)


@pytest.mark.parametrize("name", MAPS[:-2])
def test_a_name_is_its_function(name):
    q, k, v = inputs()
    close(build(map=name)(q, k, v), build(map=FUNCTIONS[name])(q, k, v))


@pytest.mark.parametrize("name", [name for name in MAPS if name != "exp"])
def test_logarithms(name):
    """ln φ, and its derivative times φ, are those of φ. Below −30 softplus is eˣ(1 − eˣ/2 + …):
    its logarithm is x to 4.7e-14. Derivatives are compared relatively up to x = 3; above, torch
    takes sigmoid′ = σ(1 − σ), whose second factor is off by 2^-52 absolutely.
    """
    x = torch.tensor([-80.0, -31.0, -29.0, -3.0, -0.1, 0.0, 0.1, 3.0, 29.0, 31.0], dtype=F64)
    x.requires_grad_()
    phi, log = FUNCTIONS[name](x), LOGARITHMS[name](x)
    torch.testing.assert_close(log.exp(), phi, rtol=1e-13, atol=0)
    slope = torch.autograd.grad(phi.sum(), x)[0]
    log_slope = torch.autograd.grad(log[phi > 0].sum(), x)[0]
    for part, absolute in ((x <= 3, 0.0), (x > 3, 2.0**-52)):
        found, wanted = (log_slope * phi)[part], slope[part]
        torch.testing.assert_close(found, wanted, rtol=1e-13, atol=absolute)


@pytest.mark.parametrize("scale", [0.37, 4.0])
@pytest.mark.parametrize("map", ["elu", "square"])
def test_scale_multiplies_both_sides_by_its_root(map, scale):
    mech = build(map=map)
    q, k, v = inputs()
    close(mech(q, k, v, scale=scale), mech(math.sqrt(scale) * q, math.sqrt(scale) * k, v))
    close(mech(q, k, v), mech(q, k, v, scale=1.0), 0.0)
    change = (mech(q, k, v, scale=scale) - mech(q, k, v)).abs().max()
    assert change > 1e-3 if map == "elu" else change < 1e-13  # x² is homogeneous: scale cancels


def test_equal_keys_give_uniform_attention():
    q, k, v = inputs()
    out = build()(q, k[:, :, :1].expand_as(k), v)
    close(out, v.mean(2, keepdim=True).repeat_interleave(2, 1).expand_as(out))


def test_extreme_inputs():
    """exp neither overflows nor vanishes; a query whose elu features all underflow gives zeros."""
    q, k, v = inputs(dtype=torch.float32)
    q, k = 300 * q, 300 * k
    for options in ({"map": "exp"}, {"map": "exp", "key_map": "square"}):
        for causal in (False, True):
            out = build(**options, dtype=torch.float32)(q, k, v, causal=causal)
            # Exponents up to 300·4·2, off by 2^-24 each and by two roundings: 3e-4.
            logs = [LOGARITHMS[options.get(n, "exp")](x.double()) for n, x in
                    (("map", q.unflatten(1, (KV, 2)).flatten(2, 3)), ("key_map", k))]  # fmt: skip
            pairs = (logs[0][..., :, None, :] + logs[1][..., None, :, :]).logsumexp(-1)
            mask = sq.Mask(causal=causal).to_dense(19, 23).repeat(2, 1)
            wanted = pairs.masked_fill(~mask, -torch.inf).softmax(-1) @ v.double()
            close(out, wanted.reshape(out.shape), 3e-4)
    q = torch.full_like(q, -200.0)
    assert not build(dtype=torch.float32)(q, k, v).any()


# ---- functions and modules ----------------------------------------------------------------


def test_functions_for_each_side():
    mech = build(map=lambda x: torch.cat([x.exp(), (-x).exp()], -1), key_map=Hedge(4, out=D),
                 features=2 * D)  # fmt: skip
    q, k, v = inputs()
    for causal in (False, True):
        close(mech(q, k, v, causal=causal), ref(mech, q, k, v, causal=causal))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_reach_the_modules(shared, causal):
    mech = build(map=Hedge(3), key_map=None if shared else Hedge(4), features=8)
    names = [name for name, _ in mech.named_parameters()]
    assert names == ["query_module.weight", "key_module.weight"][: 1 if shared else 2]
    q, k, v = inputs()
    out, wanted = mech(q, k, v, causal=causal), ref(mech, q, k, v, causal=causal)
    parameters = list(mech.parameters())
    bar = randn(*wanted.shape, seed=9)
    found, truth = (torch.autograd.grad(x, parameters, bar) for x in (out, wanted))
    for a, b in zip(found, truth, strict=True):
        close(a, b)


def test_modules_make_it_learned_and_are_saved():
    q, k, v = inputs()
    mech = build(map=Hedge(3), features=8)
    with pytest.raises(sq.UnsupportedError, match="feature maps have learned parameters"):
        sq.attention(q, k, v, sq.LinearConfig(map=Hedge(3), features=8))
    twin = build(map=Hedge(5), features=8)
    twin.load_state_dict(mech.state_dict())
    close(twin(q, k, v), mech(q, k, v), 0.0)
    half = build(map=Hedge(3, dtype=torch.bfloat16), features=8, dtype=torch.bfloat16)
    out = half(*(x.bfloat16() for x in (q, k, v)))
    # Features in bfloat16 are off by 3 · 2^-9 relative, twice, and the output by 2^-9.
    close(out, mech(*(x.bfloat16().double() for x in (q, k, v))), 7 * 2**-9)


def test_state_of_functions():
    mech = build(map=Hedge(3), features=8)
    q, k, v = inputs(23, 23)
    whole = mech(q, k, v, causal=True)
    out, state = mech.prefill(q[:, :, :9], k[:, :, :9], v[:, :, :9])
    rest, state = mech.step(q[:, :, 9:], k[:, :, 9:], v[:, :, 9:], state)
    close(torch.cat([out, rest], 2), whole)
    assert state.s.shape == (2, KV, 8, V)
    other, _ = mech.prefill(q, k, v)
    close(other, whole)
    with pytest.raises(sq.ShapeError, match=r"sums with \(Hkv, M\) = \(3, 5\)"):
        build().step(q, k, v, state)


def test_gradients_pass_through_a_state():
    mech = build()
    q, k, v = (x.requires_grad_() for x in inputs(23, 23))
    whole = mech(q, k, v, causal=True)
    first, state = mech.prefill(q[:, :, :9], k[:, :, :9], v[:, :, :9])
    rest, _ = mech.step(q[:, :, 9:], k[:, :, 9:], v[:, :, 9:], state)
    bar = randn(*whole.shape, seed=9)
    found = torch.autograd.grad(torch.cat([first, rest], 2), (q, k, v), bar)
    for a, b in zip(found, torch.autograd.grad(whole, (q, k, v), bar), strict=True):
        close(a, b)


def test_wrong_functions():
    q, k, v = inputs()
    with pytest.raises(sq.OptionError, match="negative features"):
        build(map=torch.tanh)(q, k, v)
    with pytest.raises(sq.ShapeError, match=r"it gave \(2, 3, \d+, 8\)"):
        build(map=Hedge(3))(q, k, v)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"map": "elo"}, "map='elo' is none of elu.*did you mean 'elu'"),
        ({"key_map": 3}, "key_map=3 is none of .* nor a function"),
        ({"features": 4}, "features=4 is an option of functions: map=elu has M = D features"),
        ({"map": torch.exp, "features": 0}, "features=0 must be"),
        ({"map": torch.exp, "key_map": "exp"}, "exp goes with named maps alone"),
        ({"map": "x", "key_map": "y"}, "map='x'.*key_map='y'"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(sq.OptionError, match=message):
        build(**options)


def test_wrong_scale():
    with pytest.raises(sq.OptionError, match=r"linear: scale=0.0 must be > 0"):
        build()(*inputs(), scale=0.0)


def test_what_compiles_is_declared():
    assert sq.describe("linear(map=sigmoid)").capabilities.compile is True
    for spec in ("linear(map=square)", "linear(map=elu, key_map=relu)"):
        assert not sq.describe(spec).capabilities.compile
