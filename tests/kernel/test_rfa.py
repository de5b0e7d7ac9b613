"""Random feature attention: the kernel estimate, the gate's recurrence, the floor, limits."""

import math

import pytest
import torch

import subquad as sq
from references import ref_rfa
from subquad.attention.kernel import rfa

F64 = torch.float64
D, H, KV, V = 5, 6, 3, 7
EXACT = 1e-10  # as in laws.py: sums, and a floor of 1/clip = 10


def randn(*shape, seed=0, dtype=F64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=F64).to(dtype)


def build(heads=H, kv=KV, dim=D, dtype=F64, seed=0, **options):
    return sq.build(
        "rfa", head_dim=dim, num_heads=heads, num_kv_heads=kv, dtype=dtype, seed=seed, **options
    )


def inputs(L=19, S=23, seed=1, dtype=F64):
    shapes = (2, H, L, D), (2, KV, S, D), (2, KV, S, V)
    return [randn(*shape, seed=seed + n, dtype=dtype) for n, shape in enumerate(shapes)]


def close(found, wanted, tolerance=EXACT):
    error = (found.detach().double() - wanted.detach().double()).abs().max().item()
    assert error <= tolerance * wanted.detach().abs().max().item(), error


def ref(mech, q, k, v, scale=1.0, causal=False):
    mask = sq.Mask(causal=causal).to_dense(q.shape[2], k.shape[2])[None, None]
    return ref_rfa(mech, q, k, v, allowed=mask, scale=scale)


def unit(x):
    return x / x.norm(dim=-1, keepdim=True)


# ---- the estimator ------------------------------------------------------------------------

DRAWN = 4001


def estimates(features, x, y, scale, **options):
    """Estimates of exp(scale·cos(x, y)) by DRAWN heads, each with a draw of its own."""
    mech = build(DRAWN, DRAWN, features=features, **options)
    q, k = (t.expand(1, DRAWN, 1, D) for t in (x, y))
    part = mech.partial(q, k, torch.ones_like(k), scale=scale)
    return (part.den * part.log_scale.exp()).flatten()


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("features", [2, 8, 30])
def test_the_kernel_is_unbiased_with_the_stated_variance(features, scale):
    """Mean within 5 standard errors, of the stated variance e^{2·scale}(1 − e^{−r²})²/M.

    The sample variance of n numbers within ±2 of their mean, of variance σ², has a relative
    standard error of at most √(E c⁴/(n σ⁴)) ≤ √(4/(n σ²)): a single cosine is such a number;
    means of more are closer to normal, where it is √(2/n).
    """
    x, y = randn(D, seed=3), randn(D, seed=4)
    cosine = (unit(x) * unit(y)).sum().item()
    square = 2 * scale * (1 - cosine)
    wanted = math.exp(scale * cosine)
    variance = math.exp(2 * scale) * (1 - math.exp(-square)) ** 2 / features
    found = estimates(features, 7.0 * x, 0.1 * y, scale)
    assert abs(found.mean().item() - wanted) <= 5 * math.sqrt(variance / DRAWN)
    single = (1 - math.exp(-square)) ** 2 / 2
    assert abs(found.var().item() / variance - 1) <= 5 * math.sqrt(4 / (DRAWN * single))


@pytest.mark.parametrize("draw", ["orthogonal", "simplex"])
def test_other_draws_are_unbiased(draw):
    """Five standard errors, of at most the largest variance of a number within ±e^scale."""
    x, y = randn(D, seed=3), randn(D, seed=4)
    found = estimates(2 * D, x, y, 1.0, draw=draw)
    assert abs(found.mean().item() - math.exp((unit(x) * unit(y)).sum())) <= 5 * math.sqrt(
        math.exp(2) / DRAWN
    )


def test_many_features_give_softmax_of_cosines():
    """Each kernel is off by less than t = 5/√M (variance ≤ 1/M, at 5 standard deviations: fails
    once in 10^6 for each of 13·17 pairs), and kernels are ≥ e^-2, so that an output is off by
    less than 2·t·max|v|/(e^-2 − t): 0.084·max|v| at M = 10^6.
    """
    features = 2**20
    mech = build(1, 1, features=features)
    q, k, v = randn(1, 1, 13, D, seed=1), randn(1, 1, 17, D, seed=2), randn(1, 1, 17, V, seed=3)
    wanted = (unit(q) @ unit(k).mT).softmax(-1) @ v
    t = 5 / math.sqrt(features)
    error = (mech(q, k, v) - wanted).abs().max()
    assert error <= 2 * t * v.abs().max() / (math.exp(-2) - t)
    mean = v.mean(2, keepdim=True)
    assert error < 0.1 * (wanted - mean).abs().max()


def test_lengths_do_not_matter_and_zeros_stay_zero():
    q, k, v = inputs()
    mech = build(features=38)
    lengths = [randn(2, h, n, 1, seed=s).exp() for h, n, s in ((H, 19, 5), (KV, 23, 6))]
    close(mech(lengths[0] * q, lengths[1] * k, v), mech(q, k, v))
    zeros = [torch.zeros_like(x).requires_grad_() for x in (q, k)]
    out = mech(*zeros, v)  # φ(0) = [1, …, 0, …]: all keys alike
    close(out, v.mean(2, keepdim=True).repeat_interleave(2, 1).expand_as(out))
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sin().sum(), zeros))


@pytest.mark.parametrize("causal", [False, True])
def test_the_floor_binds_and_has_its_gradient(causal):
    """At clip = 0.12 and scale 3 some rows are at the floor, others not; nothing explodes."""
    mech = build(features=26, clip=0.12)
    leaves = [x.requires_grad_() for x in inputs()]
    free = build(features=26, clip=1e-9)(*leaves, causal=causal, scale=3.0)
    out, wanted = mech(*leaves, causal=causal, scale=3.0), ref(mech, *leaves, 3.0, causal)
    share = ((out - free).abs().amax(-1) > 1e-9).double().mean()
    assert 0.1 < share < 0.9
    close(out, wanted)
    # |num| ≤ Σ|K||v| ≤ mass·max|v| and the normaliser ≥ 0.12·mass.
    assert out.abs().max() <= leaves[2].abs().max() / 0.12
    bar = randn(*wanted.shape, seed=9)
    grads = (torch.autograd.grad(x, leaves, bar) for x in (out, wanted))
    for a, b in zip(*grads, strict=True):
        close(a, b)


# ---- the gate -----------------------------------------------------------------------------


def recurrence(mech, q, k, v):
    """The paper's: S ← g S + (1 − g) φ(k) vᵀ, z ← g z + (1 − g) φ(k), one head a time."""
    rows, kv = torch.zeros(*q.shape[:3], v.shape[-1], dtype=F64), k.shape[1]
    for b in range(len(q)):
        for h in range(q.shape[1]):
            own = h // (q.shape[1] // kv)
            omega = mech.projection[own].double()
            s = torch.zeros(2 * len(omega), v.shape[-1], dtype=F64)
            z = torch.zeros(2 * len(omega), dtype=F64)

            def phi(x, omega=omega):
                angle = omega @ unit(x)
                return torch.cat([angle.sin(), angle.cos()]) / math.sqrt(len(omega))

            for t in range(q.shape[2]):
                x = mech.gate_weight[own].double() @ k[b, own, t] + mech.gate_bias[own].double()
                gate = torch.sigmoid(x)
                f = phi(k[b, own, t])
                s = gate * s + (1 - gate) * f[:, None] * v[b, own, t]
                z = gate * z + (1 - gate) * f
                rows[b, h, t] = phi(q[b, h, t]) @ s / (phi(q[b, h, t]) @ z)
    return rows


@pytest.mark.parametrize("segment", [4, 512])
@pytest.mark.parametrize("bias", [-3.0, 0.0, 4.0])
def test_the_papers_recurrence(bias, segment, monkeypatch):
    """No row is at the floor: with M = 1024 kernels are ≥ e^-2 − 4/√M = 0.01 (variance ≤ 1/M),
    and normalisers as many times the weights.
    """
    monkeypatch.setattr(rfa, "SEGMENT", segment)
    mech = build(features=1024, gate=True, gate_bias=bias, clip=1e-3)
    q, k, v = inputs(23, 23)
    with torch.no_grad():
        wanted = recurrence(mech, q, k, v)
    close(mech(q, k, v, causal=True), wanted)


def test_segments_states_and_steps_agree():
    """1100 tokens are three segments; a state continues at any place. Gates differ from 0.02 to
    1: whole products of them underflow even in float64.
    """
    mech = build(features=38, gate=True, gate_bias=0.0)
    q, k, v = inputs(1100, 1100)
    k = 2.0 * k
    mask = torch.rand(2, 1100, generator=torch.Generator().manual_seed(0)) > 0.2
    whole = mech(q, k, v, causal=True, key_mask=mask)
    state, parts = None, []
    for a, b in ((0, 700), (700, 701), (701, 1100)):
        args = (x[:, :, a:b] for x in (q, k, v))
        out, state = mech.prefill(*args, state=state, key_mask=mask[:, a:b])
        parts.append(out)
    close(torch.cat(parts, 2), whole)
    read, _ = mech.step(q[:, :, :9], None, None, state)
    close(read, mech(q[:, :, :9], k, v, key_mask=mask))
    close(mech(q[:, :, -9:], k, v, key_mask=mask, causal=True), whole[:, :, -9:])


@pytest.mark.parametrize("bias", [-2.0, 0.0, 3.0])
@pytest.mark.parametrize("causal", [False, True])
def test_float32_over_many_segments(causal, bias):
    """The bound at `SEGMENT`, 3e-5, and the kernel's own rounding: logits of 1e-7 · |ω·x| ≤ 6
    over normalisers ≥ clip = 0.1: 1e-5.
    """
    mech = build(features=62, gate=True, gate_bias=bias)
    q, k, v = inputs(2111, 2111, dtype=torch.float32)
    exact = mech(q.double(), k.double(), v.double(), causal=causal)
    close(build(features=62, gate=True, gate_bias=bias, dtype=torch.float32)
          (q, k, v, causal=causal), exact, 4e-5)  # fmt: skip


def test_limits_of_the_gate():
    """Open forever: no gate. g = 1 − ε for all keys: their weights agree to 23·ε, ε = e^-30.
    Closed: the own token alone, up to 23·e^-30 over its kernel, which is ≥ e^-2 − 4/√M = 0.07,
    above the floor.
    """
    q, k, v = inputs(23, 23)
    plain = build(features=4096, clip=0.05)
    for bias in (30.0, -30.0):
        mech = build(features=4096, clip=0.05, gate=True, gate_bias=bias)
        mech.load_state_dict(plain.state_dict(), strict=False)
        with torch.no_grad():
            mech.gate_weight.zero_()
        out = mech(q, k, v, causal=True)
        if bias > 0:
            close(out, plain(q, k, v, causal=True), 1e-10)
            close(mech(q, k, v), plain(q, k, v), 1e-10)
        else:
            close(out, v.repeat_interleave(2, 1), 1e-10)


def test_bidirectional_queries_read_the_last_state():
    """Documented: without a causal mask the last keys weigh most, for every query."""
    mech = build(features=62, gate=True, gate_bias=0.0)
    q, k, v = inputs(23, 23)
    _, state = mech.prefill(q, k, v)
    close(mech(q, k, v), mech.step(q, None, None, state)[0])
    weights = mech.weights(q, k).abs().mean((0, 1, 2))
    assert weights[-5:].min() > 10 * weights[:5].max()


@pytest.mark.parametrize("segment", [3, 512])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_at_the_floor_are_those_of_the_formula(causal, segment, monkeypatch):
    """With clip = 1 every row is at the floor (φ·φ ≤ 1), whose weights depend on the gates."""
    monkeypatch.setattr(rfa, "SEGMENT", segment)
    mech = build(2, 1, dim=3, features=6, gate=True, gate_bias=0.5, clip=1.0)
    q, k = randn(1, 2, 7, 3, seed=1).requires_grad_(), randn(1, 1, 11, 3, seed=2).requires_grad_()
    v = randn(1, 1, 11, 2, seed=3).requires_grad_()
    mask = torch.arange(11)[None] % 4 != 1
    parameters = dict(mech.named_parameters())

    def call(q, k, v, *values):
        own = dict(zip(parameters, values, strict=True))
        options = {"causal": causal, "key_mask": mask}
        return torch.func.functional_call(mech, own, (q, k, v), options)

    torch.autograd.gradcheck(call, (q, k, v, *parameters.values()))


def test_gradients_do_not_look_ahead_at_the_floor():
    mech = build(features=6, gate=True, clip=1.0)
    q, k, v = (x.requires_grad_() for x in inputs(23, 23))
    out = mech(q, k, v, causal=True)
    grads = torch.autograd.grad(out[:, :, 11].sum(), (k, v))
    for grad in grads:
        assert grad[:, :, :12].any()
        assert grad[:, :, 12:].abs().max() <= 1e-14 * grad.abs().max()


def test_gradients_pass_through_a_state():
    """Rows at the floor aside: a state carries its total weight without a gradient."""
    mech = build(features=126, gate=True, gate_bias=1.0, clip=1e-6)
    q, k, v = (x.requires_grad_() for x in inputs(23, 23))
    whole = mech(q, k, v, causal=True)
    first, state = mech.prefill(q[:, :, :9], k[:, :, :9], v[:, :, :9])
    rest, _ = mech.step(q[:, :, 9:], k[:, :, 9:], v[:, :, 9:], state)
    bar, leaves = randn(*whole.shape, seed=9), (q, k, v, *mech.parameters())
    found = torch.autograd.grad(torch.cat([first, rest], 2), leaves, bar)
    for a, b in zip(found, torch.autograd.grad(whole, leaves, bar), strict=True):
        close(a, b)


# ---- parameters and options ---------------------------------------------------------------


def test_learned_deviations_pass_gradcheck():
    mech = build(2, 1, dim=3, features=6, learned=True, clip=1e-3)
    q, k = randn(1, 2, 3, 3, seed=1), randn(1, 1, 5, 3, seed=2)
    v = randn(1, 1, 5, 2, seed=3)

    def call(deviation):
        return torch.func.functional_call(mech, {"deviation": deviation}, (q, k, v))

    torch.autograd.gradcheck(call, mech.deviation)
    plain = build(2, 1, dim=3, features=6, clip=1e-3)
    close(mech(q, k, v), plain(q, k, v), 0.0)


def test_parameters_follow_the_seed():
    first, again, other = (build(gate=True, learned=True, seed=s) for s in (3, 3, 4))
    for name, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
    assert not torch.equal(first.projection, other.projection)
    assert not torch.equal(first.gate_weight, other.gate_weight)
    assert (first.gate_bias == 4.0).all() and (first.deviation == 1.0).all()
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.add_(1.0)
    first.reset_parameters()
    for name, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
    names = {name for name, _ in first.named_parameters()}
    assert names == {"deviation", "gate_weight", "gate_bias"}
    assert not list(build().parameters())


def test_refusals():
    q, k, v = inputs()
    with pytest.raises(sq.UnsupportedError, match="depends on the gates of later keys"):
        build(gate=True).partial(q, k, v)
    with pytest.raises(sq.UnsupportedError, match="learned parameters of its gate"):
        sq.attention(q, k, v, "rfa(gate=true)")
    with pytest.raises(sq.UnsupportedError, match="learned parameters of its gate and ω"):
        sq.attention(q, k, v, "rfa(gate=true, learned=true)")
    with pytest.raises(sq.OptionError, match=r"rfa: scale=-1.0 must be > 0"):
        build()(q, k, v, scale=-1.0)
    with pytest.raises(sq.ShapeError, match="prefill needs L ≤ S"):
        build(gate=True).prefill(q, k[:, :, :3], v[:, :, :3])
    _, state = build(gate=True, features=6).prefill(q, k, v)
    with pytest.raises(sq.ShapeError, match=r"sums with \(Hkv, M\) = \(3, 8\)"):
        build(gate=True, features=8).step(q[:, :, :3], k[:, :, :3], v[:, :, :3], state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": 7}, "features=7 must be even"),
        ({"features": 0}, "features=0 must be an integer ≥ 2"),
        ({"gate": 1}, "gate=1 must be true or false"),
        ({"gate": True, "gate_bias": "x"}, "gate_bias='x' must be a number"),
        ({"gate_bias": 1.0}, "gate_bias is an option of gate=true"),
        ({"learned": "yes"}, "learned='yes' must be true or false"),
        ({"draw": "orthogonl"}, "did you mean 'orthogonal'"),
        ({"clip": 0.0}, "clip=0.0 must be a number > 0"),
        ({"features": 3, "clip": 2.0}, "features=3.*clip=2.0"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(sq.OptionError, match=message):
        build(**options)
