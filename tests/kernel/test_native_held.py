"""Held keys by the C++ library against the torch operations, which define them."""

import ctypes
import statistics
import time
import warnings

import pytest
import torch
from torch.nn import functional as F

import subquad as sq
from subquad.attention.hybrid.stream import SEVERAL, HeldKeys, Hold, stream
from subquad.errors import DtypeError, ShapeError
from subquad.kernels.native import held, library

pytestmark = pytest.mark.skipif(library.compiler() is None, reason="needs a C++ compiler")

# Logits are sums of D <= 70 products with |q·k| <= 4·scale = 4/sqrt(D) in the mean square, 30 at
# worst: their error in float32 is below 30·eps·sqrt(70) = 3e-5, that of a weight relative to it the
# same, and outputs are means of values of at most 5 under such weights.
BOUND = 5 * 3e-5

HOLDS = [Hold(8, 5, 2), Hold(1, 3, 0), Hold(64, 62, 4), Hold(33, 20, 1)]
SIZES = [
    # B, Kv, G, L, S, D, V
    (2, 3, 1, 131, 131, 7, 11),
    (1, 2, 3, 300, 300, 16, 32),
    (2, 1, 2, 19, 19, 1, 1),
    (1, 2, 1, 40, 301, 64, 64),
    (2, 2, 2, 3, 70, 70, 5),
]


def randn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def case(sizes, dtype=torch.float32):
    b, kv, g, queries, keys, d, v = sizes
    shapes = (b, kv * g, queries, d), (b, kv, keys, d), (b, kv, keys, v)
    return [randn(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes)]


def mask(b, keys, share=0.7):
    opened = torch.rand(b, keys, generator=torch.Generator().manual_seed(9)) < share
    opened[:, :2] = False
    return opened


@pytest.fixture
def ran(monkeypatch):
    """How often the library was asked."""
    calls, attend = [], held.attend
    monkeypatch.setattr(held, "attend", lambda *given: calls.append(1) or attend(*given))
    return calls


def both(given, opened, state, hold, **options):
    """What the library gives and, in float64, the torch operations; each sums and state."""
    found = stream(*given, opened, state, hold, given[0].shape[-1] ** -0.5, **options)
    wide = [t.double() for t in given]
    if state is not None:
        state = HeldKeys(state.kv.double(), state.mass.double(), state.held, state.far, state.even)
    with sq.kernels.use("torch"):
        wanted = stream(*wide, opened, state, hold, given[0].shape[-1] ** -0.5, **options)
    return found, wanted


def agree(found, wanted, bound=BOUND):
    for name, part in wanted[0].items():
        got = found[0][name]
        there = part.den > 0
        assert torch.equal(got.den > 0, there)
        error = (got.output().double() - part.output()).abs().amax().item()
        assert error <= bound, f"{name}: {error:.2e}"
        # A sum of positive weights has the relative error of one, its logarithm as an absolute one.
        whole = (got.log_scale.double() + got.den.double().log())[there]
        assert torch.allclose(whole, (part.log_scale + part.den.log())[there], rtol=0, atol=bound)
    one, other = found[1], wanted[1]
    assert torch.equal(one.held, other.held) and one.even == other.even
    for row, count in enumerate(one.held.tolist()):
        assert torch.equal(one.kv[row, :, :count].double(), other.kv[row, :, :count])
        # A mass is a sum of positive weights, each with the relative error of one; `atol` is for
        # masses of weights that float32 has as zeros.
        assert torch.allclose(
            one.mass[row, :, :count].double(), other.mass[row, :, :count], rtol=bound, atol=bound
        )


@pytest.mark.parametrize("hold", HOLDS, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_equals_the_torch_operations(ran, sizes, hold, masked):
    given, opened = case(sizes), mask(sizes[0], sizes[4]) if masked else None
    first, wanted = both(given, opened, None, hold)
    agree(first, wanted)
    # Goes on from a state, of which rows hold different numbers of keys.
    more = [t.flip(2) for t in given]
    agree(*both(more, opened, first[1], hold))
    assert len(ran) == 2 * (sizes[4] >= SEVERAL)


@pytest.mark.parametrize("hold", HOLDS, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_equal_the_torch_operations(ran, sizes, hold, masked):
    given, opened = case(sizes), mask(sizes[0], sizes[4]) if masked else None
    with torch.no_grad():
        state = stream(*[t.flip(2) for t in given], opened, None, hold, 0.3)[1]
    weights = randn(*given[0].shape[:3], given[2].shape[3] + 1, seed=7)

    def gradients(dtype):
        leaves = [t.to(dtype).requires_grad_() for t in (*given, state.kv)]
        before = HeldKeys(leaves[3], state.mass.to(dtype), state.held, None, state.even)
        parts, after = stream(*leaves[:3], opened, before, hold, 0.3)
        part = parts["held"]
        both = torch.cat([part.num, part.log_scale[..., None].clamp_min(-1e3)], -1)
        there = torch.arange(hold.size) < after.held[:, None]  # behind them nothing matters
        loss = (both * weights.to(dtype)).sum() + after.kv[
            there[:, None].expand(after.mass.shape)
        ].square().sum()
        return torch.autograd.grad(loss, leaves)

    asked = len(ran)
    found = gradients(torch.float32)
    assert len(ran) == asked + (sizes[4] >= SEVERAL)
    with sq.kernels.use("torch"):
        wanted = gradients(torch.float64)
    for name, one, other in zip(("q", "k", "v", "state"), found, wanted, strict=True):
        if name == "state":
            there = torch.arange(hold.size) < state.held[:, None]
            one, other = (t * there[:, None, :, None] for t in (one, other))
        # A key's gradient adds up that of all queries: relative to the largest.
        error = (one.double() - other).abs().amax() / other.abs().amax().clamp_min(1.0)
        assert error <= BOUND, f"{name}: {error:.2e}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_read_as_it_is(ran, dtype):
    given = case(SIZES[1], dtype)
    (parts, state), (wanted, _) = both(given, None, None, HOLDS[0])
    assert ran and state.kv.dtype == dtype and parts["held"].num.dtype == torch.float32
    agree((parts, state), (wanted, both(given, None, None, HOLDS[0])[1][1]))


@pytest.mark.parametrize("spec", ["near_far", "near_far(window=8, heavy=5, sinks=2)"])
def test_steps_continue_a_prefill(ran, spec):
    mech = sq.build(spec, head_dim=16, num_heads=4, num_kv_heads=2)
    q, k, v = (
        randn(2, 4, 200, 16, seed=1),
        randn(2, 2, 200, 16, seed=2),
        randn(2, 2, 200, 16, seed=3),
    )
    whole = mech(q, k, v, causal=True)
    out, state = mech.prefill(q[:, :, :150], k[:, :, :150], v[:, :, :150])
    outs = [out]
    for t in range(150, 200):
        one = slice(t, t + 1)
        out, state = mech.step(q[:, :, one], k[:, :, one], v[:, :, one], state)
        outs.append(out)
    assert (torch.cat(outs, 2) - whole).abs().max() <= BOUND
    assert ran


def test_a_far_field_reads_what_is_let_go(ran):
    spec = "near_far(window=8, heavy=5, sinks=2, far=performer(features=16))"
    mech = sq.build(spec, head_dim=16, num_heads=4)
    q, k, v = (randn(2, 4, 150, 16, seed=i).requires_grad_() for i in range(3))
    results = {}
    for backend in ("native", "torch"):
        with sq.kernels.use("torch") if backend == "torch" else torch.enable_grad():
            out = mech(q, k, v, causal=True)
            results[backend] = [out, *torch.autograd.grad(out.square().sum(), (q, k, v))]
    assert len(ran) == 1
    for one, other in zip(*results.values(), strict=True):
        assert (one - other).abs().max() <= 10 * BOUND * other.abs().max()


def test_what_masked_tokens_contain_does_not_matter():
    given, opened = case(SIZES[0]), mask(2, 131)
    spoilt = [t.clone() for t in given]
    for t in spoilt[1:]:
        t.masked_fill_(~opened[:, None, :, None], float("nan"))
    one, _ = stream(*given, opened, None, HOLDS[0], 0.3)
    other, _ = stream(*spoilt, opened, None, HOLDS[0], 0.3)
    assert torch.equal(one["held"].num, other["held"].num)


def test_a_key_let_go_leaves_nothing_behind():
    """Not even where it is not a number: its place is another's later."""
    hold = Hold(8, 2, 0)
    q, k, v = case((1, 1, 1, 60, 60, 4, 4))
    k[:, :, 3], v[:, :, 3] = -30.0 * q.mean(2), float("inf")
    parts, state = stream(q, k, v, None, None, hold, 1.0)
    late = parts["held"].num[:, :, 30:]
    assert bool(late.isfinite().all()) and bool(state.kv.isfinite().all())


@pytest.mark.parametrize("threads", [2, 5])
def test_threads_change_nothing(threads):
    given = case((3, 3, 2, 90, 90, 16, 16))
    alone = stream(*given, None, None, HOLDS[0], 0.3)
    before = torch.get_num_threads()
    worth, held.WORTH = held.WORTH, 1
    try:
        torch.set_num_threads(threads)
        found = stream(*given, None, None, HOLDS[0], 0.3)
    finally:
        torch.set_num_threads(before)
        held.WORTH = worth
    assert torch.equal(found[0]["held"].num, alone[0]["held"].num)
    assert torch.equal(found[1].mass, alone[1].mass)


def test_other_calls_run_by_torch(ran):
    given = case(SIZES[1])
    with sq.kernels.use("torch"):
        stream(*given, None, None, HOLDS[0], 0.3)
    stream(*[t.double() for t in given], None, None, HOLDS[0], 0.3)
    stream(*given, None, None, HOLDS[0], 0.3, apart=True)
    assert not ran


def test_the_structs_are_those_that_c_has():
    assert library.library().subquad_held_call_size() == ctypes.sizeof(held._HeldCall)
    assert library.library().subquad_held_step_size() == ctypes.sizeof(held._HeldStep)


@pytest.mark.parametrize("kind", ["queries", "keys", "values"])
@pytest.mark.parametrize("masked", [False, True])
def test_nan_is_not_hidden(kind, masked):
    given = case((2, 2, 2, 90, 90, 16, 16))
    at = ("queries", "keys", "values").index(kind)
    given[at][0, 1, 40, 3] = float("nan")
    opened = torch.ones(2, 90, dtype=torch.bool)
    opened[:, 5] = not masked
    leaves = [t.requires_grad_() for t in given]
    out = stream(*leaves, opened, None, HOLDS[0], 0.25)[0]["held"].output()
    spoilt = out.isnan().any(-1)
    head = slice(1, 2) if kind == "queries" else slice(2, 4)  # keys serve a group of two
    assert bool(spoilt[0, head, 40].all())
    others = torch.ones(2, 4, dtype=torch.bool)
    others[0, head] = False
    assert not spoilt[others].any()
    grads = torch.autograd.grad(out.sum(), leaves)
    assert bool(grads[at][0, 1].isnan().any()) or kind == "values"
    for grad in grads:
        assert bool(grad[1].isfinite().all())


def test_infinity_let_go_spoils_no_gradient():
    q, k, v = (t.requires_grad_() for t in case((1, 1, 1, 90, 90, 4, 4)))
    with torch.no_grad():  # nobody looks at the third key: it goes as soon as it may
        q[..., 0], k[..., 0], k[:, :, 3, 0], v[:, :, 3] = 4.0, 0.0, -5.0, float("inf")
    out = stream(q, k, v, None, None, Hold(8, 2, 0), 1.0)[0]["held"].num
    assert bool(out[:, :, 3].isinf().all()) and bool(out[:, :, 30:].isfinite().all())
    for grad in torch.autograd.grad(out[:, :, 60:].sum(), (q, k, v)):
        assert bool(grad[:, :, 60:].isfinite().all())


def test_inputs_in_any_layout():
    given = case((2, 2, 2, 50, 50, 16, 16))
    other = [t.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0) for t in given]
    assert other[0].stride(3) != 1
    first, state = stream(*given, None, None, HOLDS[0], 0.25)
    second, _ = stream(*other, None, None, HOLDS[0], 0.25)
    assert torch.equal(first["held"].num, second["held"].num)
    turned = HeldKeys(
        *(t.transpose(0, 1).contiguous().transpose(0, 1) for t in (state.kv, state.mass)),
        state.held, None, state.even,
    )  # fmt: skip
    (one, a), (two, b) = (stream(*given, None, s, HOLDS[0], 0.25) for s in (state, turned))
    assert torch.equal(one["held"].num, two["held"].num) and torch.equal(a.mass, b.mass)


def test_gradient_of_normalisers_alone():
    given = case((1, 2, 1, 70, 70, 8, 8))
    found = {}
    for backend, numbers in (("native", given), ("torch", [t.double() for t in given])):
        leaves = [t.clone().requires_grad_() for t in numbers]
        with sq.kernels.use(backend):
            part = stream(*leaves, None, None, HOLDS[0], 0.25)[0]["held"]
        found[backend] = torch.autograd.grad(part.log_scale.square().sum(), leaves[:2])
    for one, other in zip(*found.values(), strict=True):
        assert (one - other).abs().max() <= BOUND * other.abs().max()


def test_gradients_by_several_threads(monkeypatch):
    given = case((3, 3, 2, 90, 90, 16, 16))

    def gradients():
        leaves = [t.clone().requires_grad_() for t in given]
        out = stream(*leaves, None, None, HOLDS[0], 0.25)[0]["held"].num
        return torch.autograd.grad(out.square().sum(), leaves)

    alone, before = gradients(), torch.get_num_threads()
    monkeypatch.setattr(held, "WORTH", 1)
    try:
        torch.set_num_threads(3)
        found = gradients()
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, found, alone))


def test_a_state_of_inference_mode_goes_on_with_gradients():
    given = case((1, 2, 1, 50, 50, 8, 8))
    with torch.inference_mode():
        state = stream(*given, None, None, HOLDS[0], 0.25)[1]
    leaves = [t.requires_grad_() for t in given]
    out = stream(*leaves, None, state, HOLDS[0], 0.25)[0]["held"].num
    assert all(bool(g.any()) for g in torch.autograd.grad(out.sum(), leaves))


def test_the_default_device_is_not_asked():
    given = case((1, 2, 1, 150, 150, 8, 8))
    wanted = stream(*given, None, None, HOLDS[0], 0.25)[0]["held"].num
    with torch.device("meta"):
        found = stream(*given, None, None, HOLDS[0], 0.25)[0]["held"].num
    assert torch.equal(found, wanted)


def test_rows_of_other_batches_are_refused():
    given = case((2, 2, 1, 50, 50, 8, 8))
    state = stream(*[t[:1] for t in given], None, None, HOLDS[0], 0.25)[1]
    with pytest.raises(ShapeError, match="B=1 rows"):
        stream(*given, None, state, HOLDS[0], 0.25)
    with pytest.raises(ShapeError, match=r"opened must be \(B=2, S=50\), given \(1, 50\)"):
        stream(*given, torch.ones(1, 50, dtype=torch.bool), None, HOLDS[0], 0.25)


@pytest.mark.parametrize("far", ["auto", "performer(features=16)"])
def test_time_grows_with_the_length_alone(far):
    mech = sq.build(f"near_far(far={far}, heavy=60)", head_dim=32, num_heads=4)

    def seconds(tokens):
        q = randn(1, 4, tokens, 32, seed=1).requires_grad_()
        times = []
        for _ in range(7):
            began = time.process_time()
            mech(q, q, q, causal=True).sum().backward()
            times.append(time.process_time() - began)
        return statistics.median(times)

    seconds(256)
    # Four times the tokens at four times the cost; quadratic cost would be sixteen times.
    assert seconds(8192) <= 8 * seconds(2048)


def test_exact_attention_while_places_are_free():
    q, k, v = case((2, 2, 2, 60, 60, 16, 16))
    parts, _ = stream(q, k, v, None, None, Hold(64, 62, 4), 0.25)
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.25, enable_gqa=True)
    assert (parts["held"].num - wanted).abs().max() <= BOUND


# ---- steps -------------------------------------------------------------------------------------


@pytest.fixture
def steps(monkeypatch):
    """How often a prepared step ran."""
    calls, run = [], held.Step.__call__
    monkeypatch.setattr(held.Step, "__call__", lambda *given: calls.append(1) or run(*given))
    return calls


def decoded(mech, given, opened=None, state=None, count=1, donate=False, dtype=torch.float32):
    """Outputs and state of tokens that come `count` at a time."""
    outs = []
    with torch.no_grad():
        for at in range(0, given[0].shape[2], count):
            part = [t[:, :, at : at + count].to(dtype) for t in given]
            key = None if opened is None else opened[:, at : at + count]
            out, state = mech.step(*part, state, key_mask=key, donate=donate)
            outs.append(out)
    return torch.cat(outs, 2), state


def mechanism(hold, heads=4, kv=2, d=16, v=None):
    spec = f"near_far(window={hold.window}, heavy={hold.heavy}, sinks={hold.sinks})"
    return sq.build(spec, head_dim=d, num_heads=heads, num_kv_heads=kv, value_dim=v)


def close(found, wanted):
    (out, state), (other, last) = found, wanted
    assert (out.double() - other).abs().max() <= BOUND
    agree(({}, state), ({}, last))


@pytest.mark.parametrize("hold", HOLDS, ids=str)
@pytest.mark.parametrize("sizes", [(2, 2, 2, 16, 16), (1, 3, 1, 7, 11), (3, 1, 4, 1, 1)], ids=str)
@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("donate", [False, True])
def test_prepared_steps_are_the_steps(steps, sizes, hold, count, masked, donate):
    b, kv, g, d, v = sizes
    mech = mechanism(hold, kv * g, kv, d, v)
    tokens = 24 * count
    given = case((b, kv, g, tokens, tokens, d, v))
    opened = mask(b, tokens) if masked else None
    with sq.kernels.use("torch"):
        wanted = decoded(mech, given, opened, count=count, dtype=torch.float64)
    assert not steps
    close(decoded(mech, given, opened, count=count, donate=donate), wanted)
    assert len(steps) == 24 - 2  # the first has no state, the second prepares


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(2, 2, 2, 16, 16), (1, 3, 1, 7, 11)], ids=str)
@pytest.mark.parametrize("count", [1, 3])
def test_prepared_steps_of_half_precision(steps, dtype, sizes, count):
    b, kv, g, d, v = sizes
    mech, tokens = mechanism(HOLDS[0], kv * g, kv, d, v), 40 * count
    given = case((b, kv, g, tokens, tokens, d, v), dtype)
    opened = mask(b, tokens)
    with sq.kernels.use("torch"):
        wanted, last = decoded(mech, given, opened, count=count, dtype=torch.float64)
    found, state = decoded(mech, given, opened, count=count, donate=True, dtype=dtype)
    assert len(steps) == 40 - 2 and found.dtype == state.kv.dtype == dtype
    # Sums are in float32; the output is rounded, by half a unit in the last place.
    bound = BOUND + 0.5 * torch.finfo(dtype).eps * wanted.abs()
    assert bool(((found.double() - wanted).abs() <= bound).all())
    agree(({}, state), ({}, last))


def test_steps_go_on_from_any_state_and_any_call_from_theirs(steps):
    mech, given = mechanism(HOLDS[0]), case((2, 2, 2, 90, 90, 16, 16))
    with torch.no_grad():
        wanted = mech(*given, causal=True)
        parts = [[t[:, :, a:b] for t in given] for a, b in ((0, 40), (40, 60), (60, 90))]
        out, state = mech.prefill(*parts[0])
        outs = [out]
        for part in (parts[1], parts[2]):
            out, state = decoded(mech, part, state=state)
            outs.append(out)
        assert (torch.cat(outs, 2) - wanted).abs().max() <= BOUND
        assert len(steps) == 50 - 1
        more = mech.prefill(*parts[1], state=state)[0]
        whole = mech(*(torch.cat([t, t[:, :, 40:60]], 2) for t in given), causal=True)
        assert (more - whole[:, :, 90:]).abs().max() <= BOUND


def test_only_a_donated_state_is_written_over(steps):
    mech, given = mechanism(HOLDS[0]), case((2, 2, 2, 30, 30, 16, 16))
    _, state = decoded(mech, given)
    one = [t[:, :, :1] for t in given]
    kept = [t.clone() for t in (state.kv, state.mass, state.held)]
    with torch.no_grad():
        out, new = mech.step(*one, state)
        assert all(map(torch.equal, (state.kv, state.mass, state.held), kept))
        found, last = mech.step(*one, state, donate=True)
    assert torch.equal(out, found) and new.even == last.even
    assert torch.equal(new.mass, last.mass) and torch.equal(new.held, last.held)
    assert last.kv.data_ptr() == state.kv.data_ptr() != new.kv.data_ptr()
    # Part of a graph, it stays for the gradients.
    mech.prefill(*one, state=new)
    leaf = given[1].clone().requires_grad_()
    _, state = mech.prefill(given[0], leaf, given[2])
    loss = state.kv.square().sum()
    with torch.no_grad():
        decoded(mech, one, state=state, donate=True)
        decoded(mech, one, state=state, donate=True)
    assert bool(torch.autograd.grad(loss, leaf)[0].any())


def test_a_prepared_step_takes_no_call_that_is_another(steps):
    mech, given = mechanism(HOLDS[0]), case((2, 2, 2, 30, 30, 16, 16))
    _, state = decoded(mech, given)
    q, k, v = one = [t[:, :, :1] for t in given]
    ran = len(steps)
    with torch.no_grad():
        out = mech.step(*one, state)[0]
        assert len(steps) == ran + 1
        assert not torch.equal(mech.step(*one, state, scale=0.1)[0], out)
        for bad in (
            (q[:1], k[:1], v[:1], state),
            (q, k[..., :3], v, state),
            (q[0], k[0], v[0], state),
            (*one, HeldKeys(state.kv[:, :, 1:], state.mass, state.held)),
        ):
            with pytest.raises(ShapeError):
                mech.step(*bad)
        broadcast = torch.ones(1, 1, dtype=torch.bool)
        assert (mech.step(*one, state, key_mask=broadcast)[0] - out).abs().max() <= BOUND
        with torch.autocast("cpu"), pytest.raises(DtypeError, match="state's dtype"):
            mech.step(*one, state)
        with sq.kernels.use("torch"):
            mech.step(*one, state)
        wide = HeldKeys(state.kv.double(), state.mass.double(), state.held, None, state.even)
        assert mech.step(*(t.double() for t in one), wide)[0].dtype == torch.float64
    q.requires_grad_()
    mech.step(*one, state)[0].sum().backward()
    assert q.grad is not None and len(steps) == ran + 1


def test_steps_in_any_layout(steps):
    mech, given = mechanism(HOLDS[0]), case((2, 2, 2, 30, 30, 16, 16))
    wanted, last = decoded(mech, given)
    heads_last = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in given]
    found, state = decoded(mech, heads_last)
    assert torch.equal(found, wanted) and torch.equal(state.mass, last.mass)
    ran = len(steps)
    apart = [t.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0) for t in given]
    found, _ = decoded(mech, apart)
    assert (found - wanted).abs().max() <= BOUND and len(steps) == ran
    turned = HeldKeys(
        *(t.transpose(0, 1).contiguous().transpose(0, 1) for t in (last.kv, last.mass)),
        last.held, None, last.even,
    )  # fmt: skip
    one = [t[:, :, :1] for t in given]
    decoded(mech, one, state=last)
    a, b = (decoded(mech, one, state=state)[0] for state in (last, turned))
    assert (a - b).abs().max() <= BOUND


def test_a_step_reads_no_empty_place_and_hides_no_nan(steps):
    mech, given = mechanism(HOLDS[2]), case((2, 2, 2, 30, 30, 16, 16))
    _, state = decoded(mech, given)
    one = [t[:, :, :1] for t in given]
    spoilt = HeldKeys(state.kv.clone(), state.mass.clone(), state.held, None, state.even)
    spoilt.kv[:, :, state.even :] = float("nan")
    assert torch.equal(decoded(mech, one, state=state)[0], decoded(mech, one, state=spoilt)[0])
    one[1][1, 0] = float("nan")
    ran = len(steps)
    out, _ = decoded(mech, one, state=state)
    assert len(steps) == ran + 1
    assert bool(out[1, :2].isnan().all()) and bool(out[0].isfinite().all())
    assert bool(out[1, 2:].isfinite().all())


@pytest.mark.parametrize("threads", [2, 5])
def test_threads_change_no_step(steps, monkeypatch, threads):
    mech, given = mechanism(HOLDS[0], 6, 3), case((3, 3, 2, 40, 40, 16, 16))
    wanted, last = decoded(mech, given)
    before = torch.get_num_threads()
    monkeypatch.setattr(held, "WORTH", 1)
    try:
        torch.set_num_threads(threads)
        other = mechanism(HOLDS[0], 6, 3)
        found, state = decoded(other, given)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found, wanted) and torch.equal(state.mass, last.mass)


# ---- what must not be taken for a step like the last one -----------------------------------------

DECODERS = ["near_far(window=8, heavy=5, sinks=2)", "performer(features=16)"]


def warm(spec, tokens=30):
    """A mechanism that has prepared its steps, its state, and the next step's tensors."""
    mech = sq.build(spec, head_dim=16, num_heads=4, num_kv_heads=2).eval()
    given = case((2, 2, 2, tokens, tokens, 16, 16))
    _, state = decoded(mech, given)
    return mech, state, [t[:, :, :1].clone() for t in given]


@pytest.mark.parametrize("spec", DECODERS)
@pytest.mark.parametrize("fake", ["keys", "all", "state", "mode"])
def test_fake_tensors_have_no_memory_to_be_read(spec, fake):
    from torch._subclasses.fake_tensor import FakeTensorMode

    mech, state, (q, k, v) = warm(spec)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.no_grad():
        if fake == "mode":
            with mode:
                out = mech.step(q, k, v, state)[0]
        elif fake == "state":
            out = mech.step(q, k, v, state.map(mode.from_tensor))[0]
        else:
            made = [mode.from_tensor(t) for t in (q, k, v)]
            out = mech.step(q if fake == "keys" else made[0], *made[1:], state)[0]
    assert out.shape == q.shape


@pytest.mark.parametrize("spec", DECODERS)
@pytest.mark.parametrize("how", ["jit", "make_fx"])
def test_a_trace_has_the_operations_of_a_step(spec, how):
    from torch.fx.experimental.proxy_tensor import make_fx

    mech, state, given = warm(spec)

    def step(q, k, v):
        return mech.step(q, k, v, state)[0]

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tracing warns of branches that depend on values
        if how == "jit":
            traced = torch.jit.trace(step, given, check_trace=False)
        else:
            traced = make_fx(step)(*given)
        other = [t + 1.0 for t in given]
        assert (traced(*other) - step(*other)).abs().max() <= BOUND


def test_a_step_carries_tangents_forward():
    from torch.autograd import forward_ad

    mech, state, (q, k, v) = warm(DECODERS[0])
    with torch.no_grad(), forward_ad.dual_level():
        out = mech.step(forward_ad.make_dual(q, torch.ones_like(q)), k, v, state)[0]
        found = forward_ad.unpack_dual(out).tangent
        small = 1e-3
        with sq.kernels.use("torch"):
            high, low = (
                mech.step(*(t.double() for t in (q + sign * small, k, v)), widened(state))[0]
                for sign in (1, -1)
            )
    # The second-order error of the difference is below small²·|q·k|³ = 1e-6·3³.
    assert (found - (high - low) / (2 * small)).abs().max() <= 5 * 3e-5 + 3e-5


def widened(state):
    return HeldKeys(state.kv.double(), state.mass.double(), state.held, None, state.even)


@pytest.mark.parametrize("spec", ["near_far(window=32, heavy=5, sinks=2)", DECODERS[1]])
@pytest.mark.parametrize("which", ["the state it made", "the state it read"])
def test_a_graph_notices_that_a_state_was_written_over(spec, which):
    """As in truncated back-propagation through time."""
    mech, state, one = warm(spec)
    decoded(mech, one, state=state)
    made = which == "the state it made"
    q, k, v = (t.repeat(1, 1, 12 if made else 20, 1).requires_grad_() for t in one)
    out, new = mech.prefill(q, k, v, state=None if made else state)
    last = new.map(torch.detach) if made else state
    for _ in range(12):
        last = decoded(mech, one, state=last, donate=True)[1]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), q)


@pytest.mark.parametrize("held", [-1, 15, 10**8])
def test_a_state_that_holds_impossibly_many_keys_is_refused(held):
    mech, state, one = warm(DECODERS[0])
    bad = HeldKeys(state.kv, state.mass, torch.tensor([3, held]), None, None)
    for count in (1, SEVERAL):
        with torch.no_grad(), pytest.raises(ShapeError, match=r"held must be 0 to 14, given \[3, "):
            mech.step(*(t.repeat(1, 1, count, 1) for t in one), bad)


def test_a_far_field_takes_part_whatever_state_comes():
    _, state, one = warm(DECODERS[0])
    both = sq.build(
        "near_far(window=8, heavy=5, sinks=2, far=performer(features=16))",
        head_dim=16, num_heads=4, num_kv_heads=2,
    )  # fmt: skip
    many = [t.repeat(1, 1, 25, 1) for t in one]
    opened = torch.ones(2, 25, dtype=torch.bool)
    opened[0, ::5] = False
    found, last = decoded(both, many, opened, state=state)
    with sq.kernels.use("torch"):
        wanted, _ = decoded(both, many, opened, state=state)
    assert (found - wanted).abs().max() <= BOUND and last.far is not None


@pytest.mark.parametrize("spec", DECODERS)
def test_a_scale_that_is_a_tensor_may_change(spec):
    mech, state, one = warm(spec)
    scale = torch.tensor(0.3)
    with torch.no_grad():
        for _ in range(2):
            mech.step(*one, state, scale=scale)
        scale.fill_(0.25)  # the factor that the bound is derived for
        found = mech.step(*one, state, scale=scale)[0]
        assert (found - mech.step(*one, state, scale=0.25)[0]).abs().max() <= BOUND


@pytest.mark.parametrize("spec", DECODERS)
def test_lazy_negation_is_seen(spec):
    mech, state, one = warm(spec)
    lazy = [torch._neg_view(t) for t in one]
    many = [torch._neg_view(t.repeat(1, 1, 20, 1)) for t in one]
    with torch.no_grad():
        for given in (lazy, many):
            found = mech.step(*given, state)[0]
            wanted = mech.step(*(t.resolve_neg() for t in given), state)[0]
            assert (found - wanted).abs().max() <= BOUND


def test_a_copy_of_a_state_is_one():
    mech, state, one = warm(DECODERS[0])
    other = state.to("cpu")
    wanted = mech.step(*one, state)[0]
    decoded(mech, [t.repeat(1, 1, 9, 1) for t in one], state=state, donate=True)
    assert torch.equal(mech.step(*one, other)[0], wanted)


def test_steps_of_several_shapes_take_turns(steps):
    mech, state, one = warm(DECODERS[0])
    two = [t.repeat(1, 1, 2, 1) for t in one]
    row = [t[:1] for t in one]
    first = state.select([0])
    ran = len(steps)
    for given, before in 5 * [(one, state), (two, state), (row, first)]:
        decoded(mech, given, state=before, count=given[0].shape[2])
    assert len(steps) == ran + (5 - 1) * 3  # the first one of each layout prepares


def test_logits_of_any_size():
    mech, state, (q, k, v) = warm(DECODERS[0])
    q, k = torch.full_like(q, 1e15), torch.full_like(k, -1e15)
    far = HeldKeys(torch.cat([k.expand(2, 2, 15, 16), v.expand(2, 2, 15, 16)], -1),
                   state.mass, torch.full((2,), 9), None, 9)  # fmt: skip
    with torch.no_grad():
        for count in (1, SEVERAL):
            out = mech.step(*(t.repeat(1, 1, count, 1) for t in (q, k, v)), far)[0]
            wanted = v.repeat_interleave(2, 1).expand_as(out)
            assert (out - wanted).abs().max() <= BOUND


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_what_was_let_go_spoils_no_masked_step(backend):
    mech = mechanism(Hold(8, 2, 0), 2, 2)
    q, k, v = case((2, 2, 1, 60, 60, 16, 16))
    q[..., 0], k[..., 0], k[:, :, 3, 0], v[:, :, 3] = 4.0, 0.0, -50.0, float("inf")
    opened = torch.ones(2, 60, dtype=torch.bool)
    opened[0, 40:] = False
    with sq.kernels.use("torch") if backend == "torch" else torch.no_grad():
        out, state = decoded(mech, (q, k, v), opened)
    assert bool(out[:, :, 30:].isfinite().all()) and bool(state.kv.isfinite().all())
