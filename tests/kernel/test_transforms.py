"""Calls inside of `torch.func`, forward differentiation, and gradients of gradients."""

import importlib

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, vmap

import subquad as sq
from subquad.kernels.transforms import again, mapped, refuse_graph, transformed
from subquad.models.entropy import token_cross_entropy


def randn(*shape, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def test_what_is_said_of_a_transform():
    seen = []

    def look(x):
        seen.append((transformed(), mapped()))
        return x.sum()

    x = torch.ones(2, 3)
    look(x)
    grad(look)(x)
    vmap(look)(x)
    vmap(grad(look))(x)
    torch.func.jvp(look, (x,), (x,))
    assert seen == [(False, False), (True, False), (True, True), (True, True), (True, False)]


def test_again_gives_each_place_its_own_gradient():
    x = torch.tensor([2.0], requires_grad=True)
    weight = torch.tensor([3.0], requires_grad=True)
    unused = torch.tensor([1.0], requires_grad=True)

    def function(a, b, mask):
        return (a * a * b * weight,)

    bar = torch.ones(1)
    found = again(function, (x, x, None), (True, True, False), (bar,), (weight, unused))
    assert [t if t is None else t.item() for t in found] == [24.0, 12.0, None, 8.0, None]
    (second,) = torch.autograd.grad(found[0], x)  # d(2abw)/dx with a = b = x
    assert second.item() == 24.0
    assert again(function, (x, x, None), (True, True, False), (None,)) == (None,) * 3


MECHANISMS = [
    "performer(features=16)",
    "near_far",
    "near_far(window=5, heavy=4, sinks=2, far=performer(features=13))",
    "near_far(window=13, heavy=11, far=none)",
    "key_clusters(clusters=5, refine=5, members=7)",
    "kernel_nystrom(features=16)",
    "mixed(near_far, linear)",
]
WHOLE = ("key_clusters(clusters=5, refine=5, members=7)", "kernel_nystrom(features=16)")


@pytest.mark.parametrize(
    ("mechanism", "causal"),
    [(one, False) for one in MECHANISMS] + [(one, True) for one in MECHANISMS if one not in WHOLE],
)
@pytest.mark.parametrize("padded", [False, True])
def test_second_derivatives_behind_kernels(mechanism, causal, padded):
    """Of float32 calls that C++ answers: those of torch's operations.

    Both are sums of the same 80 terms, each rounded to 2^-24, whose logits of size 10 multiply
    rounding by as much, once a derivative: 80 × 6e-8 × 10 × 10 = 5e-4 at worst.
    """
    mech = sq.build(mechanism, head_dim=8, num_heads=2).eval()
    given = [randn(2, 2, 80, 8, seed=n).requires_grad_() for n in range(3)]
    bar, *along = (randn(2, 2, 80, 8, seed=n) for n in range(3, 7))
    mask = randn(2, 80, seed=9) > -1.0
    mask[:, 0] = True

    def both():
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            out = mech(*given, causal=causal, key_mask=mask if padded else None)
        first = torch.autograd.grad(out, given, bar, create_graph=True)
        total = sum((one * t).sum() for one, t in zip(first, along, strict=True))
        return [*first, *torch.autograd.grad(total, given)]

    found = both()
    with sq.kernels.use("torch"):
        wanted = both()
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).abs().max() <= 5e-4 * other.abs().max()


@pytest.mark.parametrize("mechanism", ["performer(features=16)", "near_far", "local(window=4)"])
def test_gradients_of_single_examples(mechanism):
    """vmap of grad over a module's parameters: the gradients of one example after the other."""
    layer = sq.MultiheadAttention(16, 2, batch_first=True, mechanism=mechanism).eval()
    parameters = {name: p.detach() for name, p in layer.named_parameters()}
    x = randn(3, 24, 16, seed=1)

    def loss(parameters, x):
        out, _ = functional_call(layer, parameters, (x[None],) * 3, {"need_weights": False})
        return out.square().mean()

    found = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    for row, own in enumerate(x):
        out, _ = layer(own[None], own[None], own[None], need_weights=False)
        wanted = torch.autograd.grad(out.square().mean(), list(layer.parameters()))
        for (name, rows), other in zip(found.items(), wanted, strict=True):
            # Sums of up to 24 · 16 products in another order, rounded to 2^-24 each: 2e-5.
            error = (rows[row] - other).abs().max()
            assert error <= 1e-4 * other.abs().max().clamp_min(1e-3), name


def test_models_in_an_ensemble():
    layers = [
        sq.MultiheadAttention(16, 2, batch_first=True, mechanism="linear").eval() for _ in range(3)
    ]
    parameters, buffers = torch.func.stack_module_state(layers)
    x = randn(2, 24, 16, seed=1)

    def run(parameters, buffers):
        return functional_call(layers[0], (parameters, buffers), (x, x, x))[0]

    found = vmap(run)(parameters, buffers)
    for one, layer in zip(found, layers, strict=True):
        wanted = layer(x, x, x, need_weights=False)[0]
        assert (one - wanted).abs().max() <= 1e-5 * wanted.abs().max()  # sums in another order


@pytest.mark.parametrize("causal", [False, True])
def test_jacobians(causal):
    mech = sq.build("performer(features=8)", head_dim=3, num_heads=1, dtype=torch.float64)
    q, k, v = (randn(1, 1, 5, 3, seed=n, dtype=torch.float64) for n in range(3))

    def call(q):
        return mech(q, k, v, causal=causal)

    wanted = torch.autograd.functional.jacobian(call, q)
    assert (jacrev(call)(q) - wanted).abs().max() <= 1e-12
    assert (jacfwd(call)(q) - wanted).abs().max() <= 1e-12
    twice = hessian(lambda q: call(q).square().sum())(q)
    wanted = torch.autograd.functional.hessian(lambda q: call(q).square().sum(), q)
    assert (twice - wanted).abs().max() <= 1e-10 * wanted.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_in_a_transform(dtype):
    mech = sq.build("performer(features=16)", head_dim=8, num_heads=2)
    q, k, v = (randn(1, 2, 40, 8, seed=n, dtype=dtype) for n in range(3))

    def total(q):
        return mech(q, k, v, causal=True).float().square().sum()

    found = grad(total)(q)
    (wanted,) = torch.autograd.grad(total(q.requires_grad_()), q)
    assert found.dtype == dtype
    # Outputs are rounded to the dtype, and their squares' gradients are sums of 40 of them.
    eps = torch.finfo(dtype).eps
    assert (found - wanted).abs().max() <= 40 * eps * wanted.abs().max()


def test_states_in_forward_mode():
    """A stream of three pieces has the derivative of the whole."""
    mech = sq.build("performer(features=8)", head_dim=4, num_heads=2, dtype=torch.float64)
    given = [randn(1, 2, 30, 4, seed=n, dtype=torch.float64) for n in range(3)]
    along = [randn(1, 2, 30, 4, seed=n, dtype=torch.float64) for n in range(3, 6)]

    def whole(*given):
        return mech(*given, causal=True)

    def pieces(*given):
        state, outs = None, []
        for parts in zip(*(t.split([17, 12, 1], 2) for t in given), strict=True):
            out, state = mech.prefill(*parts, state=state)
            outs.append(out)
        return torch.cat(outs, 2)

    wanted = torch.func.jvp(whole, tuple(given), tuple(along))
    found = torch.func.jvp(pieces, tuple(given), tuple(along))
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).abs().max() <= 1e-10 * other.abs().max()


def test_a_gradient_without_gradient_says_so():
    logits = randn(4, 7, seed=0).requires_grad_()
    labels = torch.tensor([1, 2, 3, -100])
    loss = token_cross_entropy(logits, labels, 0.1).sum()
    with pytest.raises(RuntimeError, match="token_cross_entropy has no gradient"):
        torch.autograd.grad(loss, logits, create_graph=True)
    (found,) = torch.autograd.grad(token_cross_entropy(logits, labels, 0.1).sum(), logits)

    def total(logits):
        return token_cross_entropy(logits, labels, 0.1).sum()

    assert (grad(total)(logits) - found).abs().max() <= 1e-6
    assert hessian(total)(logits).shape == (4, 7, 4, 7)
    with torch.no_grad():
        refuse_graph("nothing", "nobody asks")


class Penalised(nn.Module):
    """A critic whose gradient's size is part of its loss (WGAN-GP)."""

    def __init__(self, mechanism):
        super().__init__()
        self.attention = sq.MultiheadAttention(8, 2, batch_first=True, mechanism=mechanism)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.attention(x, x, x, need_weights=False)[0]).mean()


def test_a_gradient_penalty_trains():
    torch.manual_seed(0)
    model = Penalised("performer(features=16)")
    x = randn(2, 40, 8, seed=1)
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    sizes = []
    for _ in range(30):
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(x), x, create_graph=True)
        loss = (slope.flatten(1).norm(dim=1) - 0.05).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        sizes.append(loss.item())
    assert sizes[-1] < 0.1 * sizes[0]


@pytest.mark.parametrize("mechanism", ["additive", "location", "global(tokens=2)", "compressed"])
def test_transforms_of_long_calls(mechanism, monkeypatch):
    """Chunks that autograd computes again by checkpoints, which transforms do not have."""
    options = {"max_length": 64} if mechanism == "compressed" else {}
    mech = sq.build(mechanism, head_dim=4, num_heads=2, dtype=torch.float64, **options)
    for module in ("exact.engine", "sparse.global_", "summary.compressed"):
        module = importlib.import_module(f"subquad.attention.{module}")
        monkeypatch.setattr(module, "CHUNK_BYTES", 1 << 12)
    q, k, v = (randn(1, 2, 64, 4, seed=n, dtype=torch.float64) for n in range(3))

    def total(q):
        return mech(q, k, v, causal=True).square().sum()

    (wanted,) = torch.autograd.grad(total(q.requires_grad_()), q)
    found = grad(total)(q)
    assert (found - wanted).abs().max() <= 1e-12 * wanted.abs().max().clamp_min(1.0)
