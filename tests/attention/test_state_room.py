"""Caches of keys and values that grow in place."""

import copy
import io
import pickle

import pytest
import torch

import subquad as sq
from subquad.attention.exact.engine import SPARE, KeyValueState, _room_of


def tokens(count, *, rows=2, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(rows, heads, count, 4, generator=generator, dtype=torch.float64).to(dtype)
        for heads in (4, 2, 2)
    )


@pytest.fixture
def mech():
    return sq.build("softmax", head_dim=4, num_heads=4, num_kv_heads=2, dtype=torch.float64).eval()


def grown(mech, total, start=40, *, rows=2):
    """All q, k, v, and the state after `start` tokens and one more each time."""
    q, k, v = tokens(total, rows=rows)
    _, state = mech.prefill(q[:, :, :start], k[:, :, :start], v[:, :, :start])
    states = [state]
    for t in range(start, total):
        one = slice(t, t + 1)
        _, state = mech.step(q[:, :, one], k[:, :, one], v[:, :, one], state)
        states.append(state)
    return (q, k, v), states


@torch.no_grad()
def test_most_steps_copy_nothing(mech):
    (_, k, v), states = grown(mech, 100)
    places = {state.k.data_ptr() for state in states}
    # From 41 places on an eighth more each time: 41·(9/8)^n passes 100 after 8 times at most.
    assert len(places) <= 1 + 9
    for length, state in zip(range(40, 101), states, strict=True):  # older ones are as they were
        assert state.k.shape[2] == length and state.nbytes == 2 * 2 * 2 * length * 4 * 8
        assert torch.equal(state.k, k[:, :, :length]) and torch.equal(state.v, v[:, :, :length])


@torch.no_grad()
def test_two_continuations_of_one_state_do_not_meet(mech):
    (_, k, v), states = grown(mech, 60)
    again = states[10]
    found = []
    for seed in (1, 2):
        one = tokens(1, seed=seed)
        out, new = mech.step(*one, again)
        found.append((one, out, new))
    for (own_q, own_k, own_v), out, new in found:
        joined_k, joined_v = (
            torch.cat([old[:, :, :50], own], 2) for old, own in ((k, own_k), (v, own_v))
        )
        assert torch.equal(new.k, joined_k) and torch.equal(new.v, joined_v)
        wanted = mech(own_q, joined_k, joined_v)
        assert (out - wanted).abs().max() <= 1e-12
    assert torch.equal(states[-1].k, k) and torch.equal(states[-1].v, v)


@torch.no_grad()
def test_copies_have_rooms_of_their_own_or_none(mech):
    (_, k, v), states = grown(mech, 60)
    state = states[-1]
    written = io.BytesIO()
    torch.save(state.tensors(), written)
    copies = [
        state.clone(), state.to("cpu"), copy.deepcopy(state), pickle.loads(pickle.dumps(state)),
        state.select([0, 1]), state.detach(), state.repeat(1),
    ]  # fmt: skip
    one = tokens(1, seed=3)
    after = [mech.step(*one, each)[1] for each in (state, *copies)]
    for new in after:
        assert torch.equal(new.k[:, :, :60], k) and torch.equal(new.k[:, :, 60:], one[1])
        assert torch.equal(new.v[:, :, :60], v) and torch.equal(new.v[:, :, 60:], one[2])


@torch.no_grad()
def test_beams_stay_apart(mech):
    (_, k, v), states = grown(mech, 60)
    state, rows = states[-1], torch.tensor([1, 1, 0])
    kept_k, kept_v = k[rows], v[rows]
    for step in range(30):
        own = tokens(1, rows=3, seed=step)
        out, state = mech.step(*own, state.select(rows) if step == 0 else state)
        kept_k, kept_v = torch.cat([kept_k, own[1]], 2), torch.cat([kept_v, own[2]], 2)
        assert torch.equal(state.k, kept_k) and torch.equal(state.v, kept_v)
        assert (out - mech(own[0], kept_k, kept_v)).abs().max() <= 1e-12
        rows = torch.tensor([2, 0, 0])
        state, kept_k, kept_v = state.select(rows), kept_k[rows], kept_v[rows]
    assert torch.equal(states[-1].k, k)


def test_gradients_and_inference_mode_are_told_apart(mech):
    with torch.no_grad():
        (_, k, _), states = grown(mech, 60)
    state = states[-1]
    own = [t.requires_grad_() for t in tokens(1, seed=4)]
    out, new = mech.step(*own, state)
    assert _room_of(new.k) is None  # a graph has saved it
    with torch.no_grad():
        _, later = mech.step(*tokens(1, seed=5), state)  # takes the room behind what is saved
        assert later.k.data_ptr() == state.k.data_ptr()
    out.sum().backward()
    assert own[0].grad is not None
    with torch.inference_mode():
        _, inferred = mech.step(*tokens(1, seed=6), later)
        _, inferred = mech.step(*tokens(1, seed=6), inferred)
    with torch.no_grad():
        _, last = mech.step(*tokens(1, seed=7), inferred)
    assert torch.equal(last.k[:, :, :60], k) and last.k.shape[2] == 64


@torch.no_grad()
def test_few_tokens_and_many_are_joined_as_ever():
    k, v = tokens(SPARE)[1:]
    small = KeyValueState.extend(KeyValueState(k[:, :, :-1], v[:, :, :-1]), k, v, None, grows=True)
    assert _room_of(small.k) is None
    with pytest.raises(sq.ShapeError, match="must continue the state's"):
        KeyValueState.extend(
            KeyValueState(*tokens(64)[1:]), k[:, :1, :1], v[:, :1, :1], None, grows=True
        )
    with pytest.raises(sq.DtypeError, match="state's dtype"):
        one = [t.float()[:, :, :1] for t in (k, v)]
        KeyValueState.extend(KeyValueState(*tokens(64)[1:]), *one, None, grows=True)


@torch.no_grad()
def test_masks_grow_too(mech):
    q, k, v = tokens(60)
    mask = torch.ones(2, 60, dtype=torch.bool)
    mask[1, :7] = False
    _, state = mech.prefill(q[:, :, :40], k[:, :, :40], v[:, :, :40], key_mask=mask[:, :40])
    outs = []
    for t in range(40, 60):
        one = slice(t, t + 1)
        out, state = mech.step(
            q[:, :, one], k[:, :, one], v[:, :, one], state, key_mask=mask[:, one]
        )
        outs.append(out)
    wanted = mech(q, k, v, causal=True, key_mask=mask)[:, :, 40:]
    assert (torch.cat(outs, 2) - wanted).abs().max() <= 1e-12
