"""`softmax` against its naive reference: every mask, shape, dtype and path."""

import math

import pytest
import torch
import torch._dynamo.testing
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import subquad as sq
from references import ref_softmax
from subquad.attention.exact import engine
from subquad.attention.partial import EMPTY_LOG_SCALE

B, H, HKV, D = 2, 6, 3, 5
LENGTHS = [(7, 11), (11, 7), (7, 7), (1, 1), (1, 11), (11, 1)]

# A logit is a sum of D products, an output a sum of S terms, a gradient of k one of L·G. Each
# sum of n terms errs by ≤ n·eps of their magnitudes, and an error e in a logit by e in its
# weight: (D + S + L·G)·eps·max|logit|·max|v| = (5 + 11 + 22)·eps·10·4 = 1520·eps for normal
# draws of these sizes.
BOUND = 1520


def draw(lengths, value_dim=13, dtype=torch.float64, seed=0, grad=False):
    queries, keys = lengths
    generator = torch.Generator().manual_seed(seed)
    shapes = (B, H, queries, D), (B, HKV, keys, D), (B, HKV, keys, value_dim)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [t.to(dtype).requires_grad_(grad) for t in tensors]


def coin(*shape, seed=1):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.4


def masks(queries, keys):
    """name → Mask; together every kind, alone and joined, and rows without any key."""
    key = coin(B, keys)
    key[1] = False  # a batch row without any key
    dense = coin(B, H, queries, keys, seed=2)
    dense[0, 1, queries // 2] = False
    bias = torch.randn(B, 1, queries, keys, generator=torch.Generator().manual_seed(3)).double()
    bias = bias.masked_fill(~coin(B, 1, queries, keys, seed=4), -math.inf)
    segments = (coin(B, queries, seed=5).long(), 2 - coin(B, keys, seed=6).long())
    prefix = torch.tensor([0, 3])
    return {
        "none": sq.Mask(),
        "causal": sq.Mask(causal=True),
        "key": sq.Mask(key=key),
        "causal key": sq.Mask(causal=True, key=key),
        "left padding": sq.Mask(causal=True, key=torch.arange(keys) >= keys // 2),
        "prefix": sq.Mask(causal=True, prefix=4),
        "prefix rows": sq.Mask(causal=True, prefix=prefix),
        "segments": sq.Mask(segments=segments),
        "window": sq.Mask(window=2),
        "causal window": sq.Mask(causal=True, window=(3, 1)),
        "far window": sq.Mask(window=(0, 1), key=key),
        "dense": sq.Mask(dense=dense),
        "dense rows": sq.Mask(dense=coin(queries, keys, seed=7)),
        "bias": sq.Mask(dense=bias),
        "all": sq.Mask(
            causal=True, key=key, prefix=prefix, segments=segments, window=5, dense=dense
        ),
        "all bias": sq.Mask(causal=True, key=coin(keys), segments=segments, dense=bias),
    }


NAMES = tuple(masks(1, 1))


def allowed_by(mask, queries, keys):
    allowed = mask.to_dense(queries, keys)
    if allowed.dim() == 3:
        return allowed.unsqueeze(1)
    return allowed if allowed.dim() == 4 else allowed[None, None]


def reference(q, k, v, mask, scale=D**-0.5):
    allowed = allowed_by(mask, q.shape[2], k.shape[2])
    floats = mask.dense is not None and mask.dense.is_floating_point()
    bias = mask.dense.masked_fill(mask.dense == -math.inf, 0.0) if floats else None
    return ref_softmax(None, q, k, v, allowed=allowed, scale=scale, bias=bias)


def build(**options):
    return sq.build("softmax", head_dim=D, num_heads=H, num_kv_heads=HKV, **options)


def close(got, wanted, bound=BOUND, what=""):
    eps = torch.finfo(got.dtype).eps
    error = (got.double() - wanted.double()).abs().max().item()
    assert error <= bound * eps, f"{what}: {error / eps:.0f} eps > {bound} eps"


def compare(mech, tensors, mask, **arguments):
    q, k, v = tensors
    out = mech(q, k, v, mask=mask, **arguments)
    wanted = reference(q, k, v, mask, **arguments)
    close(out, wanted, what="output")
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out.dtype)
    got = torch.autograd.grad(out, tensors, direction)
    expected = torch.autograd.grad(wanted, tensors, direction.double())
    for name, a, b in zip("qkv", got, expected, strict=True):
        # the random direction adds V terms to each sum of the backward pass
        close(a, b, bound=2 * BOUND, what=f"gradient of {name}")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_equals_the_reference_with_gradients(lengths, name):
    mask = masks(*lengths)[name]
    for value_dim in (3, 5, 13, 23):  # narrower, equal, wider, and too wide to be padded
        compare(build(), draw(lengths, value_dim, grad=True), mask)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lengths", [(7, 11), (11, 7)], ids=str)
def test_chunks_of_queries_change_nothing(lengths, name, monkeypatch):
    monkeypatch.setattr(engine, "CHUNK_BYTES", 3 * B * H * lengths[1] * 8)
    for value_dim in (13, 23):
        compare(build(), draw(lengths, value_dim, grad=True), masks(*lengths)[name])
    monkeypatch.setattr(engine, "CHUNK_BYTES", 1)  # one query a chunk
    compare(build(), draw(lengths, grad=True), masks(*lengths)[name])


@pytest.mark.parametrize("name", ["none", "causal", "causal key", "all"])
def test_float32(name):
    # the same count of roundings, each of float32's eps
    compare(build(), draw((11, 7), dtype=torch.float32, grad=True), masks(11, 7)[name])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["none", "causal", "key", "causal key", "dense", "bias", "all"])
def test_half_precision(name, dtype):
    q, k, v = draw((11, 7), dtype=dtype)
    mask = masks(11, 7)[name]
    if name == "bias":  # the same rounded bias on both sides
        mask = sq.Mask(dense=mask.dense.to(dtype).double())
    out = build()(q, k, v, mask=mask)
    assert out.dtype == dtype
    # sums are float32; what is rounded to half is each weight (≤ eps/2 of Σ w|v|), the output
    # (eps/2) and, on the unfused path, the logit (eps/2·10) and q·√scale, k·√scale (2·eps/2·10)
    close(out, reference(q, k, v, mask), bound=4 * (0.5 + 0.5 + 3 * 5))


def test_half_precision_stays_finite_with_large_logits():
    # |logit| up to 1e4·… ; one key dominates each row, so that the output is its value
    q, k = 60 * torch.eye(D).half().expand(B, H, D, D), 300 * torch.eye(D).half()
    k, v = k.expand(B, HKV, D, D), torch.randn(B, HKV, D, D).half()
    mask = torch.ones(B, D, dtype=torch.bool)
    mask[:, -1] = False
    for causal in (False, True):
        out = build()(q, k, v, causal=causal, key_mask=mask, scale=0.5)
        assert torch.equal(out[:, ::2, :-1], v[:, :, :-1])  # rows of logits 9000, 0, …
        assert out.isfinite().all()


@pytest.mark.parametrize("scale", [0.0, -0.7, 1e-4, 3.0])
def test_any_scale(scale):
    # a column in q and k stands for the key mask: large beside any logit, whatever the scale
    key = torch.arange(7) != 2
    for mask in (sq.Mask(causal=True, key=key), sq.Mask(causal=True), sq.Mask(key=key), sq.Mask()):
        for lengths in ((7, 7), (11, 7)):
            compare(build(), draw(lengths, grad=True), mask, scale=scale)


@pytest.mark.parametrize("name", ["none", "causal", "window"])
def test_a_negative_scale_with_large_logits(name):
    # logits 300 times as large, and so is their error; exp overflows unless the row's maximum
    # is that of the scaled logits
    q, k, v = draw((7, 7))
    mask = masks(7, 7)[name]
    out = build()(300 * q, k, v, mask=mask, scale=-0.7)
    close(out, reference(300 * q, k, v, mask, scale=-0.7), bound=300 * BOUND)


def test_leading_dimensions_and_non_contiguous_inputs():
    q, k, v = draw((7, 11))
    key = coin(B, 11)
    wanted = build()(q, k, v, key_mask=key)
    strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    assert torch.equal(build()(*strided, key_mask=key), wanted)
    assert torch.equal(build()(q[0], k[0], v[0], key_mask=key[0]), wanted[0])
    folded = [t.reshape(1, B, 1, *t.shape[1:]) for t in (q, k, v)]
    out = build()(*folded, key_mask=key.reshape(1, B, 1, 11))
    assert torch.equal(out, wanted.reshape(1, B, 1, *wanted.shape[1:]))


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("name", ["key", "causal key", "window key", "dense", "bias"])
@pytest.mark.parametrize("lengths", [(7, 7), (1, 7), (7, 11)], ids=str)
def test_what_masked_keys_contain_never_matters(lengths, name, garbage):
    queries, keys = lengths
    key = coin(B, keys)
    key[:, -1] = True  # so that there is something to compare
    columns = key[:, None, None, :].expand(B, 1, queries, keys)
    mask = {
        "key": sq.Mask(key=key),
        "causal key": sq.Mask(causal=True, key=key),
        "window key": sq.Mask(window=3, key=key),
        "dense": sq.Mask(dense=columns),
        "bias": sq.Mask(dense=torch.zeros(columns.shape).double().masked_fill(~columns, -math.inf)),
    }[name]
    results = []
    for content in (0.0, garbage):
        q, k, v = draw(lengths)
        closed = ~key[:, None, :, None]
        tensors = [q, k.masked_fill(closed, content), v.masked_fill(closed, content)]
        tensors = [t.requires_grad_() for t in tensors]
        out = build()(*tensors, mask=mask)
        results.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
        for gradient in results[-1][2:]:
            assert (gradient.masked_select(closed.expand_as(gradient)) == 0).all()
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)


@pytest.mark.parametrize("name", ["key", "causal key", "segments", "dense", "all"])
def test_rows_without_keys_give_exact_zeros(name):
    for lengths in ((7, 7), (11, 7)):
        mask = masks(*lengths)[name]
        empty = ~allowed_by(mask, *lengths).any(-1).expand(B, H, -1)
        assert empty.any() and not empty.all()
        q, k, v = draw(lengths, grad=True)
        out = build()(q, k, v, mask=mask)
        assert (out[empty] == 0).all()
        gradients = torch.autograd.grad(out[empty].sum(), (q, k, v))
        assert all((gradient == 0).all() for gradient in gradients)


def test_causal_reads_the_past_and_nothing_else():
    q, k, v = draw((7, 7))
    changed = [t.clone() for t in (k, v)]
    for t in changed:
        t[:, :, 4] += 1.0
    before, after = build()(q, k, v, causal=True), build()(q, *changed, causal=True)
    assert torch.equal(before[:, :, :4], after[:, :, :4])
    assert ((before - after)[:, :, 4:].abs().amax(-1) > 1e-6).all()


def test_the_fused_kernel_serves_masks_widths_and_groups():
    # restricted to the fused kernel, scaled_dot_product_attention raises where it does not fit
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        for value_dim in (3, 13):
            for name in ("none", "causal", "key", "causal key", "segments", "dense", "bias"):
                q, k, v = draw((7, 7), value_dim)
                assert build()(q, k, v, mask=masks(7, 7)[name]).isfinite().all()


def saved_bytes(function):
    """Bytes of all distinct storages that autograd keeps for the backward pass."""
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return sum(storages.values())


@pytest.mark.parametrize("name", ["causal key", "prefix", "segments", "window", "all"])
def test_no_mask_of_full_size_is_kept(name, monkeypatch):
    lengths = (499, 499)
    q, k, v = draw(lengths, 5, dtype=torch.float32, grad=True)
    mask = masks(*lengths)[name]
    if mask.dense is not None:
        mask = sq.Mask(causal=True, key=mask.key, prefix=mask.prefix, segments=mask.segments)
    monkeypatch.setattr(engine, "CHUNK_BYTES", 2**16)
    largest = 0
    rows = sq.Mask.rows

    def recorded(self, *arguments, **options):
        nonlocal largest
        out = rows(self, *arguments, **options)
        largest = max(largest, out.numel() * q.element_size())
        return out

    monkeypatch.setattr(sq.Mask, "rows", recorded)
    kept = saved_bytes(lambda: build()(q, k, v, mask=mask))
    assert largest <= 2**16
    # q, out and the log-sum-exp, k and v repeated for groups at most, all widened to 6 or 8
    assert kept <= 4 * B * H * 499 * (4 * 8 + 1)


def test_dropout_is_that_of_scaled_dot_product_attention():
    q, k, v = draw((7, 11), 5)
    mech = build(dropout=0.4)
    key = coin(B, 11)
    torch.manual_seed(7)
    out = mech(q, k, v, key_mask=key)
    torch.manual_seed(7)
    wanted = F.scaled_dot_product_attention(
        q, k, v, attn_mask=key[:, None, None, :], dropout_p=0.4, enable_gqa=True
    )
    close(out, wanted)
    assert not torch.allclose(out, build()(q, k, v, key_mask=key))
    assert torch.equal(mech.eval()(q, k, v, key_mask=key), build()(q, k, v, key_mask=key))
    assert build().capabilities.deterministic and not mech.capabilities.deterministic


def test_dropout_with_chunks_has_the_gradient_of_what_was_drawn(monkeypatch):
    monkeypatch.setattr(engine, "CHUNK_BYTES", 1)
    q, k, v = draw((7, 11), grad=True)
    out = build(dropout=0.4)(q, k, v, mask=sq.Mask(window=4))
    # the output is linear in v, so that Σ v·dv = Σ out·out if both passes drew the same
    (dv,) = torch.autograd.grad(out, v, out.detach())
    assert torch.allclose((v * dv).sum(), out.square().sum(), rtol=1e-12)


@pytest.mark.parametrize("dropout", [-0.1, 1.5, "half", True])
def test_dropout_must_be_a_probability(dropout):
    with pytest.raises(sq.OptionError, match="dropout=.* must be a number ≥ 0 and ≤ 1"):
        sq.SoftmaxConfig(dropout=dropout)


@pytest.mark.parametrize("splits", [(7,), (3, 4), (1, 1, 5), (1,) * 7])
@pytest.mark.parametrize("masked", [False, True])
def test_prefill_and_steps_equal_one_call(splits, masked):
    q, k, v = draw((7, 7))
    key = coin(B, 7) if masked else None
    wanted = build()(q, k, v, causal=True, key_mask=key)
    pieces = zip(*(t.split(splits, 2) for t in (q, k, v)), strict=True)
    state, outs, sizes = None, [], []
    for n, (q_t, k_t, v_t) in enumerate(pieces):
        piece = None if key is None else key.split(splits, 1)[n]
        out, state = build().step(q_t, k_t, v_t, state, key_mask=piece)
        outs.append(out)
        sizes.append(state.nbytes)
    close(torch.cat(outs, 2), wanted)
    assert sizes == sorted(sizes)
    assert sizes[-1] == 8 * B * HKV * 7 * (D + 13) + (B * 7 if masked else 0)


@pytest.mark.parametrize("masked_first", [False, True])
def test_a_mask_may_come_with_one_piece_only(masked_first):
    q, k, v = draw((7, 7))
    key = coin(B, 7)
    key[:, 3:] |= masked_first
    key[:, :3] |= not masked_first
    first, rest = ([t[:, :, part] for t in (q, k, v)] for part in (slice(3), slice(3, 7)))
    _, state = build().prefill(*first, key_mask=key[:, :3] if masked_first else None)
    out, _ = build().step(*rest, state, key_mask=None if masked_first else key[:, 3:])
    close(out, build()(q, k, v, causal=True, key_mask=key)[:, :, 3:])


def test_states_are_values_and_the_first_copies_nothing():
    q, k, v = draw((7, 7))
    _, state = build().prefill(q, k, v)
    assert state.k.data_ptr() == k.data_ptr() and state.v.data_ptr() == v.data_ptr()
    token = [t[:, :, :1] for t in (q, k, v)]
    first, longer = build().step(*token, state)
    again, _ = build().step(*token, state)
    assert torch.equal(first, again)
    assert state.k.shape[2] == 7 and longer.k.shape[2] == 8


def test_a_state_serves_cross_attention():
    q, k, v = draw((7, 11))
    key = coin(B, 11)
    filler = torch.zeros(B, H, 11, D).double()
    _, state = build().prefill(filler, k, v, key_mask=key)
    out, same = build().step(q, None, None, state)
    close(out, build()(q, k, v, key_mask=key))
    assert same is state


def test_garbage_in_masked_keys_stays_out_of_the_state():
    q, k, v = draw((7, 7))
    key = coin(B, 7)
    closed = ~key[:, None, :, None]
    dirty = [t.masked_fill(closed, math.nan) for t in (k, v)]
    out, state = build().prefill(q, *dirty, key_mask=key)
    assert all(t.isfinite().all() for t in (out, state.k, state.v))
    assert torch.equal(out, build()(q, k, v, causal=True, key_mask=key))


def test_a_state_that_does_not_fit_is_refused():
    q, k, v = draw((7, 7))
    _, state = build().prefill(q, k, v)
    with pytest.raises(sq.ShapeError, match=r"v must continue .* Hkv=3, S, 13.*given \(2, 3, 7, 5"):
        build().step(q, k, v[..., :5], state)
    with pytest.raises(sq.DtypeError, match=r"k must have the state's dtype torch.float64"):
        build().step(q.float(), k.float(), v.float(), state)
    with pytest.raises(sq.ShapeError, match="holds 2 batch rows, q has 1; use state.select"):
        build().step(q[:1], k[:1], v[:1], state)
    with pytest.raises(sq.ShapeError, match="state must be a KeyValueState, given State"):
        build().step(q, k, v, sq.State())


def test_partial_gives_the_normaliser():
    q, k, v = draw((7, 11), grad=True)
    mask = masks(7, 11)["all bias"]
    part = build().partial(q, k, v, mask=mask)
    close(part.output(), reference(q, k, v, mask))
    allowed = allowed_by(mask, 7, 11).expand(B, H, 7, 11)
    logits = D**-0.5 * q @ k.repeat_interleave(H // HKV, 1).transpose(-1, -2) + mask.dense
    wanted = logits.masked_fill(~allowed, -math.inf).logsumexp(-1)
    some = allowed.any(-1)
    close(part.lse[some], wanted[some])
    assert (part.den[~some] == 0).all() and (part.log_scale[~some] == EMPTY_LOG_SCALE).all()
    assert (part.num[~some] == 0).all()
    got = torch.autograd.grad(part.log_scale[some].square().sum(), (q, k))
    expected = torch.autograd.grad(wanted[some].square().sum(), (q, k))
    for a, b in zip(got, expected, strict=True):
        close(a, b, bound=10 * BOUND)  # the squares' slope is 2·|lse| ≤ 10


def test_partial_of_half_precision_is_float32():
    q, k, v = draw((7, 11), dtype=torch.float16)
    part = build().partial(q, k, v)
    assert part.num.dtype == part.den.dtype == part.log_scale.dtype == torch.float32
    close(part.output(), reference(q, k, v, sq.Mask()))  # no rounding to half anywhere


def test_weights_are_the_attention_matrix():
    q, k, v = draw((7, 11))
    mask = masks(7, 11)["all"]
    weights = build().weights(q, k, mask=mask)
    close(weights @ v.repeat_interleave(H // HKV, 1), reference(q, k, v, mask))
    assert torch.equal(build().weights(q, k, mask=mask, rows=[5, 0]), weights[:, :, [5, 0]])


def test_a_bias_learns():
    q, k, v = draw((7, 11))
    bias = torch.randn(H, 7, 11, dtype=torch.float64, requires_grad=True)
    out = build()(q, k, v, mask=sq.Mask(dense=bias))
    allowed = torch.ones(1, 1, 7, 11, dtype=torch.bool)
    wanted = ref_softmax(None, q, k, v, allowed=allowed, scale=D**-0.5, bias=bias)
    close(
        *(torch.autograd.grad(o.square().sum(), bias)[0] for o in (out, wanted)), bound=10 * BOUND
    )


def test_a_dense_mask_of_other_heads_is_refused():
    q, k, v = draw((7, 11))
    with pytest.raises(sq.ShapeError, match="dense mask must have H=6 heads or 1, given 3"):
        build()(q, k, v, mask=sq.Mask(dense=torch.ones(B, HKV, 7, 11, dtype=torch.bool)))


def test_compiles_whole_and_once_for_all_lengths():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(build(), backend=counter, fullgraph=True, dynamic=True)
    for length in (7, 11, 13, 29):
        q, k, v = draw((length, length), dtype=torch.float32)
        key = coin(B, length)
        close(
            compiled(q, k, v, causal=True, key_mask=key),
            build()(q, k, v, causal=True, key_mask=key),
            bound=BOUND * 29 / 11,
        )
    assert counter.frame_count == 1
    torch._dynamo.reset()
