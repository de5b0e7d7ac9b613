"""The grouped engine against a plain loop over groups."""

from __future__ import annotations

import pytest
import torch

from subquad.kernels import grouped
from subquad.kernels.block import EMPTY


def problem(batch=2, heads=6, kv=3, length=23, keys=29, groups=3, members=7, read=11, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(batch, h, n, d, generator=generator, dtype=torch.float64).requires_grad_()
        for h, n, d in ((heads, length, 5), (kv, keys, 5), (kv, keys, 3))
    )
    shape = (batch, heads, groups)
    listed_q = torch.randint(-1, length, (*shape, members), generator=generator)
    listed_k = torch.stack(
        [
            torch.randperm(keys + 3, generator=generator)[:read]
            for _ in range(batch * heads * groups)
        ]
    ).view(*shape, read)
    listed_k = listed_k.masked_fill(listed_k >= keys, -1)
    key = torch.rand(batch, keys, generator=generator) > 0.3
    return q, k, v, listed_q, listed_k, key


def plain(q, k, v, queries, keys, *, scale, key=None, causal=False, bias=None):
    batch, heads, groups, members = queries.shape
    per = heads // k.shape[1]
    offset = k.shape[2] - q.shape[2]
    out, lse = [], []
    for number, (b, h, g) in enumerate(
        (b, h, g) for b in range(batch) for h in range(heads) for g in range(groups)
    ):
        for i in queries[b, h, g]:
            at = keys[b, h, g]
            extra = torch.zeros(len(at)).double()
            if bias is not None:
                extra = bias(torch.tensor([number]), i.view(1, 1), at[None])[0, 0]
            logits = scale * k[b, h // per, at] @ q[b, h, i] + extra
            opened = (at >= 0) & (extra > -torch.inf)
            if key is not None:
                opened = opened & key[b, at]
            if causal:
                opened = opened & (at <= i + offset)
            if i < 0 or not opened.any():
                out.append(0.0 * v[b, 0, 0])
                lse.append(0.0 * q[b, h, 0].sum() + EMPTY)
                continue
            logits = logits[opened]
            out.append(torch.softmax(logits, -1) @ v[b, h // per, at[opened]])
            lse.append(torch.logsumexp(logits, -1))
    shape = (batch, heads, groups, members)
    return torch.stack(out).view(*shape, -1), torch.stack(lse).view(shape)


def parity_of_positions(groups, queries, keys):
    """A bias that differs between groups, queries and keys."""
    return 0.1 * ((groups[:, None, None] + queries[..., None] * keys[:, None]) % 7).double()


def odd_pairs(groups, queries, keys, dtype=torch.float64):
    """Some pairs closed by one unit or by half of one."""
    odd = (groups[:, None, None] + queries[..., None] * keys[:, None]) % 5
    return 0.5 * odd.clamp_max(2).to(dtype)


def odd_bias(groups, queries, keys):
    """The same as a bias."""
    return torch.where(odd_pairs(groups, queries, keys) > 0, -torch.inf, 0.0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("bias", [None, parity_of_positions, odd_bias])
@pytest.mark.parametrize("chunk", [1, 2**21])
def test_forward_and_gradients(causal, masked, bias, chunk, monkeypatch):
    monkeypatch.setattr(grouped, "SCORE_BYTES", chunk)  # one group at a time, or all
    q, k, v, queries, keys, key = problem()
    arguments = {"scale": 0.7, "key": key if masked else None, "causal": causal, "bias": bias}
    found = grouped.grouped_softmax(q, k, v, queries, keys, **arguments)
    wanted = plain(q, k, v, queries, keys, **arguments)
    # Sums of ≤ 11 terms of size ~1 in float64: 11·eps ≈ 2e-15; a margin of 500.
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    generator = torch.Generator().manual_seed(5)
    bars = [torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in found]
    bars[1] = bars[1].masked_fill(wanted[1] == EMPTY, 0.0)
    ours = torch.autograd.grad(found, (q, k, v), bars)
    theirs = torch.autograd.grad(wanted, (q, k, v), bars)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_half_precision_is_summed_in_float32():
    q, k, v, queries, keys, _ = problem()
    half = [t.detach().to(torch.bfloat16) for t in (q, k, v)]
    out, lse = grouped.grouped_softmax(*half, queries, keys, scale=0.7)
    assert out.dtype == lse.dtype == torch.float32
    exact, _ = grouped.grouped_softmax(*(t.double() for t in half), queries, keys, scale=0.7)
    # The same numbers in float32: ≤ 11 terms and an exponential, 20·eps.
    torch.testing.assert_close(out.double(), exact, rtol=20 * 1.2e-7, atol=20 * 1.2e-7)


def once_each():
    """Inputs, groups that list a query once at most, with holes, one of them without keys."""
    q, k, v, *_ = problem(1, 2, 1, 5, 6, read=4)
    key = torch.arange(6)[None] != 2
    queries = torch.tensor([[[3, 0, -1], [1, 4, 2]], [[4, 2, 1], [0, -1, -1]]])[None]
    keys = torch.tensor([[[0, 5, -1], [-1, -1, -1]], [[1, 2, 3], [4, 5, 0]]])[None]
    return q, k, v, queries, keys, key


def test_gradients_have_gradients():
    *leaves, queries, keys, key = once_each()

    def both(q, k, v):
        once = grouped.grouped_softmax(q, k, v, queries, keys, scale=0.7, key=key)
        rounds = grouped.joint_softmax(
            q, k, v, torch.stack([queries] * 2), torch.stack([keys, keys.flip(2)]), scale=0.7
        )
        return tuple(
            part
            for out, lse in (once, rounds)
            for part in (out, lse.masked_fill(lse.detach() == EMPTY, 0.0))
        )

    torch.autograd.gradgradcheck(both, leaves)


def test_backward_within_autocast():
    q, k, v, queries, keys, key = once_each()
    q, k, v = (t.detach().float().requires_grad_() for t in (q, k, v))
    out, lse = grouped.grouped_softmax(q, k, v, queries, keys, scale=0.7, key=key)
    joint, _ = grouped.joint_softmax(q, k, v, queries[None], keys[None], scale=0.7)
    loss = out.square().sum() + lse[lse != EMPTY].sum() + joint.square().sum()
    wanted = torch.autograd.grad(loss, (q, k, v), retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch.autograd.grad(loss, (q, k, v))
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("bias", "closed"), [(None, None), (odd_bias, odd_pairs)])
def test_several_rounds_are_one_softmax(causal, bias, closed):
    """A key counts as often as it is listed; each query once in a round, or not at all."""
    q, k, v, _, _, key = problem(length=23)
    generator = torch.Generator().manual_seed(9)
    listed = [torch.randperm(25, generator=generator) for _ in range(2 * 6 * 3)]
    queries = torch.stack(listed).view(3, 2, 6, 5, 5)
    queries = queries.masked_fill(queries >= 23, -1)
    queries = torch.where(queries == 11, -1, queries)  # in no round at all
    keys = torch.randint(-1, 29, (3, 2, 6, 5, 7), generator=generator)
    options = {"scale": 0.7, "key": key, "causal": causal}
    rounds = [plain(q, k, v, queries[r], keys[r], **options, bias=bias) for r in range(3)]
    top = q.new_full((2, 6, 23), EMPTY)
    num, den = v.new_zeros(2, 6, 23, 3), v.new_zeros(2, 6, 23)
    for r, (out, lse) in enumerate(rounds):
        for b, h, g, c in queries[r].ge(0).nonzero().tolist():
            i, weight = queries[r, b, h, g, c], torch.exp(lse[b, h, g, c])
            at = (torch.tensor(b), torch.tensor(h), i)
            num = num.index_put(at, weight * out[b, h, g, c], accumulate=True)
            den = den.index_put(at, weight, accumulate=True)
    there = den > 0
    wanted = num / torch.where(there, den, 1.0)[..., None]
    wanted_lse = torch.where(there, torch.where(there, den, 1.0).log(), top)
    found = grouped.joint_softmax(q, k, v, queries, keys, **options, closed=[closed] * 3)
    assert not there[:, :, 11].any()
    # Sums of ≤ 21 terms of size ~1 in float64: 21·eps ≈ 5e-15; a margin of 200.
    for a, b in zip(found, (wanted, wanted_lse), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    bars = [torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in found]
    bars[1] = bars[1].masked_fill(~there, 0.0)
    ours = torch.autograd.grad(found, (q, k, v), bars)
    theirs = torch.autograd.grad((wanted, wanted_lse), (q, k, v), bars)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
