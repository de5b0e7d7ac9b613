"""`additive` against its naive reference, parameters and memory included."""

import math

import pytest
import torch

import subquad as sq
from references import ref_additive
from subquad.attention.exact import engine

B, H, HKV, L, S, D, V, HIDDEN = 2, 6, 3, 7, 11, 5, 13, 17

# A score sums HIDDEN products of a tanh of 2·D + 1 terms, an output S terms, a gradient of a
# parameter B·G·L·S of them: (2·D + HIDDEN + S + B·G·L·S)·eps·max|v|, max|v| = 4, and a random
# direction of V terms of size ≤ 3 for gradients: (27 + 11 + 308)·4·eps, ×3·√V for gradients.
BOUND = (2 * D + HIDDEN + S + B * 2 * L * S) * 4
GRADIENT = BOUND * 3 * math.sqrt(V)


def draw(queries=L, keys=S, dtype=torch.float64, grad=False):
    generator = torch.Generator().manual_seed(0)
    shapes = (B, H, queries, D), (B, HKV, keys, D), (B, HKV, keys, V)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [t.to(dtype).requires_grad_(grad) for t in tensors]


def coin(*shape, seed=1):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.4


def build(dtype=torch.float64, hidden=HIDDEN, **arguments):
    mech = sq.build(
        "additive",
        head_dim=D,
        num_heads=H,
        num_kv_heads=HKV,
        hidden=hidden,
        dtype=dtype,
        **arguments,
    )
    with torch.no_grad():  # a bias of zero could be forgotten unnoticed
        mech.bias.uniform_(-1, 1, generator=torch.Generator().manual_seed(5))
    return mech


def close(got, wanted, bound=BOUND, what=""):
    eps = torch.finfo(got.dtype).eps
    error = (got.double() - wanted.double()).abs().max().item()
    assert error <= bound * eps, f"{what}: {error / eps:.0f} eps > {bound:.0f} eps"


def masks(queries, keys):
    key = coin(B, keys)
    key[1] = False
    dense = coin(B, H, queries, keys, seed=2)
    bias = torch.randn(queries, keys, generator=torch.Generator().manual_seed(3)).double()
    bias = bias.masked_fill(~coin(queries, keys, seed=4), -math.inf)
    segments = (coin(B, queries, seed=5).long(), coin(B, keys, seed=6).long())
    return {
        "none": sq.Mask(),
        "causal": sq.Mask(causal=True),
        "causal key": sq.Mask(causal=True, key=key),
        "prefix": sq.Mask(causal=True, prefix=torch.tensor([0, 3])),
        "segments": sq.Mask(segments=segments),
        "window": sq.Mask(window=(2, 1)),
        "dense": sq.Mask(dense=dense),
        "bias": sq.Mask(dense=bias, key=coin(B, keys, seed=7)),
    }


def reference(mech, q, k, v, mask, scale=1.0):
    allowed = mask.to_dense(q.shape[2], k.shape[2])
    allowed = allowed.unsqueeze(-3) if allowed.dim() == 3 else allowed
    allowed = allowed if allowed.dim() == 4 else allowed[None, None]
    floats = mask.dense is not None and mask.dense.is_floating_point()
    bias = mask.dense.masked_fill(mask.dense == -math.inf, 0.0) if floats else None
    return ref_additive(mech, q, k, v, allowed=allowed, scale=scale, bias=bias)


@pytest.mark.parametrize("budget", [64 * 2**20, 3 * B * H * S * HIDDEN * 8, 1])
@pytest.mark.parametrize("name", tuple(masks(1, 1)))
@pytest.mark.parametrize("lengths", [(7, 11), (11, 7), (1, 1), (1, 11)], ids=str)
def test_equals_the_reference_with_all_gradients(lengths, name, budget, monkeypatch):
    monkeypatch.setattr(engine, "CHUNK_BYTES", budget)
    mech, tensors, mask = build(), draw(*lengths, grad=True), masks(*lengths)[name]
    out, wanted = mech(*tensors, mask=mask), reference(mech, *tensors, mask)
    close(out, wanted, what="output")
    inputs = {**dict(zip("qkv", tensors, strict=True)), **dict(mech.named_parameters())}
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).double()
    got = torch.autograd.grad(out, list(inputs.values()), direction)
    expected = torch.autograd.grad(wanted, list(inputs.values()), direction)
    for what, a, b in zip(inputs, got, expected, strict=True):
        close(a, b, bound=GRADIENT, what=what)


def test_gradcheck():
    mech = sq.build("additive", head_dim=2, num_heads=2, num_kv_heads=1, dtype=torch.float64)
    shapes = (1, 2, 3, 2), (1, 1, 3, 2), (1, 1, 3, 2)
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(lambda *t: mech(*t, causal=True), tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_lower_precision(dtype):
    mech, tensors = build(dtype), draw(dtype=dtype)
    out = mech(*tensors, causal=True)
    assert out.dtype == dtype
    # half precision: sums are float32, only the output is rounded (eps/2·max|v|)
    bound = BOUND if dtype == torch.float32 else 0.5 * 4 + 1
    close(out, reference(mech, *tensors, sq.Mask(causal=True)), bound=bound)


def test_scale_multiplies_scores_and_is_one_by_default():
    mech, tensors = build(), draw()
    close(mech(*tensors), reference(mech, *tensors, sq.Mask(), scale=1.0))
    close(mech(*tensors, scale=-2.5), reference(mech, *tensors, sq.Mask(), scale=-2.5))
    assert not torch.allclose(mech(*tensors), mech(*tensors, scale=D**-0.5))


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("causal", [False, True])
def test_what_masked_keys_contain_never_matters(garbage, causal):
    mech, key = build(), coin(B, S)
    closed = ~key[:, None, :, None]
    results = []
    for content in (0.0, garbage):
        q, k, v = draw()
        tensors = [q, k.masked_fill(closed, content), v.masked_fill(closed, content)]
        tensors = [t.requires_grad_() for t in tensors]
        out = mech(*tensors, causal=causal, key_mask=key)
        inputs = [*tensors, *mech.parameters()]
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty) and clean.isfinite().all()


def test_rows_without_keys_give_exact_zeros():
    mech, tensors, key = build(), draw(grad=True), coin(B, S)
    key[1] = False
    out = mech(*tensors, key_mask=key)
    assert (out[1] == 0).all() and (out[0] != 0).any()
    gradients = torch.autograd.grad(out[1].sum(), [*tensors, *mech.parameters()])
    assert all((gradient == 0).all() for gradient in gradients)


def test_no_tensor_of_queries_by_keys_by_hidden(monkeypatch):
    queries = keys = 151
    monkeypatch.setattr(engine, "CHUNK_BYTES", 2 * B * H * keys * HIDDEN * 4)  # two queries
    largest, kept = 0, {}

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.untyped_storage().nbytes())
            return out

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    tensors = draw(queries, keys, dtype=torch.float32, grad=True)
    with Watch():
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = build(torch.float32)(*tensors)
        out.sum().backward()
    # one chunk of units, forward and backward; the scores of a chunk are smaller
    assert largest <= 2 * B * H * keys * HIDDEN * 4
    # kept for the backward pass: inputs, projections and output, (4·HIDDEN + V) wide at most;
    # scores would take B·H·L·S·4 bytes = 1.1 MB, units 17 times that
    assert sum(kept.values()) <= B * H * keys * (4 * HIDDEN + V) * 4


@pytest.mark.parametrize("splits", [(7,), (3, 4), (1, 1, 5)])
def test_prefill_and_steps_equal_one_call(splits):
    mech, (q, k, v) = build(), draw(7, 7)
    key = coin(B, 7)
    state, outs = None, []
    for n, piece in enumerate(zip(*(t.split(splits, 2) for t in (q, k, v)), strict=True)):
        out, state = mech.step(*piece, state, key_mask=key.split(splits, 1)[n])
        outs.append(out)
    close(torch.cat(outs, 2), mech(q, k, v, causal=True, key_mask=key))
    out, _ = mech.step(q, None, None, state)
    close(out, mech(q, k, v, key_mask=key))


def test_partials_merge():
    mech, (q, k, v) = build(), draw()
    parts = [
        mech.partial(q, k[:, :, part], v[:, :, part])
        for part in (slice(4), slice(4, 5), slice(5, S))
    ]
    close(sq.merge(parts), mech(q, k, v))


def test_the_seed_alone_decides_the_draw():
    same, other = build(), build(seed=1)
    assert torch.equal(same.query_weight, build().query_weight)
    assert not torch.equal(same.query_weight, other.query_weight)
    # whatever the dtype, up to its rounding
    assert torch.equal(same.key_weight.float(), build(torch.float32).key_weight)
    assert same.query_weight.abs().max() <= D**-0.5 < 1.1 * same.query_weight.abs().max()
    assert same.score_weight.abs().max() <= HIDDEN**-0.5
    # no head repeats another's draw, and the global generator is left alone
    assert not torch.equal(same.key_weight[0], same.key_weight[1])
    before = torch.get_rng_state()
    build()
    assert torch.equal(before, torch.get_rng_state())


def test_meta_device_then_reset():
    mech = sq.build("additive", head_dim=D, num_heads=H, device="meta", seed=3)
    assert all(p.is_meta for p in mech.parameters())
    mech = mech.to_empty(device="cpu")
    mech.reset_parameters()
    for a, b in zip(
        mech.parameters(),
        sq.build("additive", head_dim=D, num_heads=H, seed=3).parameters(),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_hidden_defaults_to_the_head_width():
    mech = sq.build("additive", head_dim=D, num_heads=H, num_kv_heads=HKV)
    assert mech.query_weight.shape == (HKV, D, D) and mech.score_weight.shape == (HKV, D)
    for hidden in (0, 2.0, True):
        with pytest.raises(sq.OptionError, match="hidden=.* must be an integer ≥ 1"):
            sq.AdditiveConfig(hidden=hidden)


def test_it_has_no_functional_form():
    with pytest.raises(sq.UnsupportedError, match="scoring network is learned; use subquad.build"):
        sq.attention(*draw(), "additive")
