"""Causal attention over a fixed number of held keys: which are held, what a state costs, rows."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import subquad as sq
from references import held_keys
from subquad.attention.hybrid.stream import BLOCK, DECAY, Hold, stream

H, HKV, D, V = 6, 3, 5, 7
F64 = torch.float64
SPEC = "near_far(window=13, heavy=11, sinks=2, far=none)"
HOLD = Hold(window=13, heavy=11, sinks=2)
FAR = "near_far(window=13, heavy=11, sinks=2, far=performer(features=13))"


def build(spec=SPEC, dtype=F64, **sizes):
    sizes = {"head_dim": D, "num_heads": H, "num_kv_heads": HKV, **sizes}
    return sq.build(spec, dtype=dtype, **sizes).eval()


def inputs(tokens=71, batch=2, dtype=F64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, H, tokens, D), (batch, HKV, tokens, D), (batch, HKV, tokens, V))
    return [torch.randn(shape, generator=generator, dtype=F64).to(dtype) for shape in shapes]


def steps(mech, tensors, sizes, key=None, state=None):
    """Outputs of consecutive calls over pieces of these sizes, and the state."""
    outs, at = [], 0
    for size in sizes:
        now = slice(at, at + size)
        mask = None if key is None else key[:, now]
        out, state = mech.prefill(*(t[:, :, now] for t in tensors), state=state, key_mask=mask)
        outs.append(out)
        at += size
    return torch.cat(outs, 2), state


def same(found, wanted):
    # Sums of ≤ 26 float64 weights, logits of size ≤ 10 amplify rounding by as much: ≤ 1e-13.
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


# ---- which keys are held -------------------------------------------------------------------


def test_exact_until_the_places_are_filled():
    q, k, v = inputs(HOLD.size)
    same(build()(q, k, v, causal=True), sq.attention(q, k, v, "softmax", causal=True))
    q, k, v = inputs(HOLD.size + 1)
    exact = sq.attention(q, k, v, "softmax", causal=True)
    found = build()(q, k, v, causal=True)
    same(found[:, :, :-1], exact[:, :, :-1])
    assert not torch.allclose(found[:, :, -1], exact[:, :, -1], rtol=1e-3)


def test_weights_are_those_of_softmax_over_the_held_keys():
    q, k, _ = inputs()
    weights = build().weights(q, k, causal=True)
    opened = torch.ones(2, 71, dtype=torch.bool)
    held = held_keys(build().config, q, k, opened=opened, scale=D**-0.5)
    logits = D**-0.5 * q @ k.repeat_interleave(H // HKV, 1).mT
    same(weights, logits.masked_fill(~held, -torch.inf).softmax(-1))
    # The definition's bounds: never more than N, the first tokens and the last W − c + 1 always.
    assert held.sum(-1).max() == HOLD.size
    gap = torch.arange(71)[:, None] - torch.arange(71)
    assert held[..., (gap >= 0) & (gap <= HOLD.recent)].all()
    assert held[..., (gap >= 0) & (torch.arange(71) < HOLD.sinks)].all()
    assert not held[..., gap < 0].any()


def test_a_key_that_attention_comes_back_to_stays():
    q, k, _ = inputs(400, batch=1)
    direction = torch.nn.functional.normalize(torch.ones(D, dtype=F64), dim=0)
    q = q - (q @ direction)[..., None] * direction
    k = k - (k @ direction)[..., None] * direction
    k[:, :, 30] = 20.0 * direction
    q[:, :, 36::40] += 2.0 * direction  # every fortieth query asks for it
    held = build().weights(q, k, causal=True)[..., 30] > 0
    assert held[..., 30:].all()
    # Nobody asks for it: it is the first to go once the window's oldest block is judged.
    held = build().weights(q - 2.0 * direction, k, causal=True)[..., 30] > 0
    assert not held[..., 30 + HOLD.window + HOLD.block :].any()


def test_mass_is_attention_received_with_its_half_life():
    # One query head, window 4 (blocks of one), one heavy key, no sinks: N = 5.
    hold = Hold(window=4, heavy=1, sinks=0)
    assert hold.block == 1
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 1, 6, 3, generator=generator, dtype=F64) for _ in range(3))
    _, state = stream(q, k, v, None, None, hold, 1.0)
    weights = (q @ k.mT).masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -torch.inf)
    first = weights[0, 0, :5].softmax(-1).sum(0)[:5]  # mass after five tokens: one is let go
    lost = int(first[:2].argmin())
    held = [j for j in range(5) if j != lost]
    last = (q[0, 0, 5] @ k[0, 0, [*held, 5]].T).softmax(-1)
    mass = first[held] * DECAY + last[:4]
    lost = int(mass[:2].argmin())
    mass = torch.cat([mass, last[4:]])[[n for n in range(5) if n != lost]] * DECAY
    same(state.mass[0, 0, :4], mass)
    assert state.held.tolist() == [4] and state.mass[0, 0, 4] == 0


def test_room_is_made_for_a_block_at_a_time():
    assert Hold(64, 62, 4).block == BLOCK == 8
    assert [Hold(window, 5, 0).block for window in (1, 3, 4, 13, 32, 999)] == [1, 1, 1, 3, 8, 8]
    for tokens in (1, 25, 26, 27, 71):
        _, state = build().prefill(*inputs(tokens))
        wanted = tokens if tokens < 26 else 26 - 3 + (tokens - 26) % 3
        assert state.held.tolist() == [wanted, wanted]


# ---- constant memory -----------------------------------------------------------------------


@pytest.mark.parametrize("spec", [SPEC, FAR])
def test_state_bytes(spec):
    mech = build(spec)
    sizes = {steps(mech, inputs(n), [n])[1].nbytes for n in (1, 26, 200)}
    assert len(sizes) == 1
    if spec == SPEC:  # keys and values, a mass each, and the count of a row
        assert sizes == {2 * HKV * 26 * (D + V + 1) * 8 + 2 * 8}


def test_the_default_fits_132_tokens_of_keys_and_values():
    mech = sq.build("near_far", head_dim=64, num_heads=9, num_kv_heads=3)
    q, k, v = (torch.zeros(1, heads, 300, 64) for heads in (9, 3, 3))
    state = mech.prefill(q, k, v)[1]
    assert 130 < state.nbytes / (k[:, :, :1].nbytes + v[:, :, :1].nbytes) <= 132


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_half_the_bytes_and_sums_in_float32(dtype):
    mech = build(dtype=torch.float32)
    tensors = inputs(dtype=dtype)
    out, state = steps(mech, tensors, [40, 1, 30])
    assert out.dtype == state.kv.dtype == dtype
    assert state.mass.dtype == torch.float32
    # Held keys are the same numbers, and so is what is done with them but for the output's
    # rounding, half an ulp of a convex sum of values of size ≤ 4.
    wanted = steps(mech, [t.float() for t in tensors], [40, 1, 30])[0]
    bound = 4 * torch.finfo(dtype).eps / 2
    assert (out.float() - wanted).abs().max() <= bound


def test_a_step_is_few_operations():
    class Count(TorchDispatchMode):
        """Operations that compute or copy; views are free."""

        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name = function._schema.name.removeprefix("aten::")
            views = ("view", "_unsafe_view", "alias", "slice", "transpose", "expand", "detach")
            if name not in views:
                self.names.append(name)
            return function(*args, **(kwargs or {}))

    mech = build(dtype=torch.float32)
    q, k, v = inputs(60, dtype=torch.float32)
    state = steps(mech, (q, k, v), [59])[1]
    with torch.no_grad(), Count() as count:
        mech.step(q[:, :, 59:], k[:, :, 59:], v[:, :, 59:], state)
    # Two products, a softmax, the scale, one copy of the held keys with the new one (which are
    # joined first), a mass (copied, summed, added), two numbers. Thirty layers pay for each.
    assert len(count.names) <= 13, count.names


# ---- rows ----------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [SPEC, FAR])
def test_padding_anywhere_equals_the_compacted_row(spec):
    mech = build(spec)
    tensors = inputs()
    key = torch.rand(2, 71, generator=torch.Generator().manual_seed(4)) > 0.3
    key[0, :29] = False
    whole = mech(*tensors, causal=True, key_mask=key)
    pieces, _ = steps(mech, tensors, [30, 1, 40], key)
    same(pieces, whole)
    for row in range(2):
        alone = mech(*(t[row : row + 1, :, key[row]] for t in tensors), causal=True)
        same(whole[row : row + 1, :, key[row]], alone)
    assert not whole[0, :, :29].any()


@pytest.mark.parametrize("spec", [SPEC, FAR])
def test_left_padded_prompts_generate_as_alone(spec):
    mech = build(spec)
    tensors = inputs(71)
    prompts = torch.arange(40) >= torch.tensor([[17], [0]])
    _, state = mech.prefill(*(t[:, :, :40] for t in tensors), key_mask=prompts)
    state = state.select([1, 0, 1])  # a beam
    order = torch.tensor([1, 0, 1])
    more, _ = steps(mech, [t[order][:, :, 40:] for t in tensors], [1] * 31, state=state)
    for row, source in enumerate(order.tolist()):
        start = 17 * (source == 0)
        alone = mech(*(t[source : source + 1, :, start:] for t in tensors), causal=True)
        same(more[row : row + 1], alone[:, :, 40 - start :])


def test_a_masked_token_reads_and_leaves_no_trace():
    mech = build()
    q, k, v = inputs(40)
    _, state = mech.prefill(q[:, :, :39], k[:, :, :39], v[:, :, :39])
    last = [t[:, :, 39:] for t in (q, k, v)]
    closed = torch.zeros(2, 1, dtype=torch.bool)
    out, after = mech.step(*last, state, key_mask=closed)
    assert torch.equal(after.kv[:, :, : after.held[0]], state.kv[:, :, : after.held[0]])
    assert torch.equal(after.mass, state.mass) and torch.equal(after.held, state.held)
    held = state.kv[:, :, : state.even]
    wanted = sq.attention(last[0], held[..., :D], held[..., D:], "softmax")
    same(out, wanted)


def test_queries_for_the_last_tokens_only():
    # Tokens without queries add no mass; with none at all the oldest are let go.
    mech = build()
    q, k, v = inputs(60)
    found = mech(q[:, :, 59:], k, v, causal=True)
    recent = [*range(HOLD.sinks), *range(60 - (26 - 3 + (60 - 26) % 3) + HOLD.sinks, 60)]
    wanted = sq.attention(q[:, :, 59:], k[:, :, recent], v[:, :, recent], "softmax")
    same(found, wanted)
    longer = mech(q, k[:, :, :20], v[:, :, :20], causal=True)  # queries before the first key
    assert not longer[:, :, :40].any()
    same(longer[:, :, 40:], mech(q[:, :, 40:], k[:, :, :20], v[:, :, :20], causal=True))


# ---- parts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [SPEC, FAR])
def test_parts_are_disjoint_and_merge(spec):
    mech = build(spec)
    q, k, v = inputs()
    key = torch.rand(2, 71, generator=torch.Generator().manual_seed(5)) > 0.2
    parts = mech.partials(q, k, v, causal=True, key_mask=key)
    assert set(parts) == ({"near", "heavy"} if spec == SPEC else {"near", "heavy", "far"})
    same(sq.merge(parts.values()), mech(q, k, v, causal=True, key_mask=key))
    shares = mech.shares(q, k, causal=True, key_mask=key)
    same(sum(shares.values()), torch.ones(H, dtype=F64))
    near = mech.weights(q, k, causal=True)
    gap = torch.arange(71)[:, None] - torch.arange(71)
    recent = ((gap >= 0) & (gap <= HOLD.recent)).to(F64)
    same(mech.shares(q, k, causal=True)["near"], (near * recent).sum(-1).mean((0, 2)))


def test_a_far_field_reads_what_is_let_go():
    q, k, _ = inputs()
    seen = build(FAR).weights(q, k, causal=True)
    past = torch.ones(71, 71, dtype=torch.bool).tril()
    assert (seen[..., past] > 0).all()
    held = build().weights(q, k, causal=True) > 0
    logits = D**-0.5 * q @ k.repeat_interleave(H // HKV, 1).mT
    rest = seen.log() - logits  # minus the log of the row's normaliser at exact keys
    own = rest.diagonal(dim1=-2, dim2=-1)[..., None]
    close = (rest - own).abs() < 1e-9
    assert close[held].all() and not close[~held & past].any()


# ---- what is refused -----------------------------------------------------------------------


def test_states_of_other_sizes_are_refused():
    mech = build()
    q, k, v = inputs(30)
    state = mech.prefill(q, k, v)[1]
    with pytest.raises(sq.ShapeError, match="Hkv=3 heads of D \\+ V = 12"):
        mech.step(q, k, v[..., :3], state)
    with pytest.raises(sq.DtypeError, match=r"state's dtype torch\.float64, given torch\.float32"):
        build(dtype=torch.float32).step(q.float(), k.float(), v.float(), state)
    other = build("near_far(window=13, heavy=3, sinks=2, far=none)").prefill(q, k, v)[1]
    with pytest.raises(sq.ShapeError, match="18 places, not the 26"):
        mech.step(q, k, v, other)


def test_heavy_keys_need_a_window():
    with pytest.raises(sq.UnsupportedError, match="window ≥ 1"):
        build("near_far(window=0, heavy=3, far=none)")(*inputs(), causal=True)
    with pytest.raises(sq.UnsupportedError, match="its state grows"):
        build("near_far(window=5, heavy=3, far=softmax)")(*inputs(), causal=True)
