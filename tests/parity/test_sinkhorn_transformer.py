"""Our Sinkhorn attention against sinkhorn-transformer 0.11.4: outputs and gradients.

Its attention has no weights of its own but for the causal form's null keys: both get the same
q, k, v. Where it departs from the formulas, a test pins it down: it reads keys in place of the
sorted values; it squeezes logits through log(relu(R) + 1e-6); its causal form has learned null
blocks, cumulative means, and turns the second half of the heads by a block less one token. The
last three are met on our internal path: the same sorting, choice and reading, other summaries.
"""

import pytest
import torch
from torch.nn import functional as F

import subquad as sq
from subquad.attention.masks import Mask
from subquad.attention.partial import merge
from subquad.attention.sparse.engine import Pattern, partial
from subquad.attention.sparse.sinkhorn import Sinkhorn, balance, blocks

pytestmark = pytest.mark.peers

peer = pytest.importorskip(
    "sinkhorn_transformer.sinkhorn_transformer",
    reason="sinkhorn-transformer is not installed: pip install 'subquad[peers]'",
    exc_type=ImportError,
)

F64 = torch.float64
H, D, C = 3, 5, 4
EQUAL = 1e-12
"""The same sums of fewer than 10^3 terms in another order: 10^3 roundings of 1.1e-16."""


def inputs(count, length=28, heads=H, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(2, heads, length, D, generator=generator, dtype=F64).requires_grad_()
        for _ in range(count)
    ]


def same(found, wanted, leaves):
    """Outputs, and gradients of all leaves."""
    cotangent = torch.randn(found.shape, generator=torch.Generator().manual_seed(9), dtype=F64)
    assert (found - wanted).abs().max() <= EQUAL * wanted.abs().max()
    own = torch.autograd.grad(found, leaves, cotangent)
    truth = torch.autograd.grad(wanted, leaves, cotangent)
    for a, b in zip(own, truth, strict=True):
        assert b.abs().max() > 0
        assert (a - b).abs().max() <= EQUAL * b.abs().max()


def modules(top=1, **options):
    theirs = peer.SinkhornAttention(C, H * D, D, H, 28, n_top_buckets=top, **options).double()
    ours = sq.build(
        "sinkhorn", head_dim=D, num_heads=H, block=C, top=top, iterations=0, temperature=1.0,
        gumbel=False, dtype=F64,
    )  # fmt: skip
    return theirs, ours


@pytest.mark.parametrize("top", [1, 2, 3])
def test_top_blocks_by_rows(top):
    """Its default: rows normalised alone. One tensor is k and v, for the reason below."""
    theirs, ours = modules(top)
    q, k = inputs(2)
    same(ours(q, k, k), theirs(q, k, k), (q, k))


def test_sorted_values_are_keys_there():
    """Values of other blocks never reach its output: `b_v_r = b_k_r.reshape(...)`."""
    theirs, ours = modules()
    q, k, v = inputs(3)
    moved = v.detach().clone()
    moved[:, :, C:] += 1.0
    first = slice(0, C)
    assert torch.equal(theirs(q, k, v)[:, :, first], theirs(q, k, moved)[:, :, first])
    assert (ours(q, k, v)[:, :, first] - ours(q, k, moved)[:, :, first]).abs().max() > 1e-3


@pytest.mark.parametrize("top", [1, 2, 3])
def test_sortcut(top):
    theirs, _ = modules(n_sortcut=top)
    ours = sq.build(
        "sinkhorn(sortcut=true, temperature=1.0, gumbel=false)", head_dim=D, num_heads=H,
        block=C, top=top, dtype=F64,
    )  # fmt: skip
    q, k, v = inputs(3)
    same(ours(q, k, v), theirs(q, k, v), (q, k, v))


class SqueezedLogits(Sinkhorn):
    """Its logits, which no option of ours has: negative ones are all −13.8."""

    def sort_logits(self, q, k, scale):
        return torch.log(F.relu(super().sort_logits(q, k, scale)) + 1e-6)


@pytest.mark.parametrize(("iterations", "temperature"), [(1, 0.75), (7, 0.75), (5, 1.3)])
def test_soft_permutation(monkeypatch, iterations, temperature):
    """The paper's mixture, noise off on both sides."""
    monkeypatch.setattr(peer, "sample_gumbel", lambda shape, device, dtype: torch.zeros(shape))
    options = {"sinkhorn_iter": iterations, "temperature": temperature}
    theirs, _ = modules(non_permutative=False, **options)
    ours = SqueezedLogits(
        head_dim=D, num_heads=H, block=C, top=None, iterations=iterations,
        temperature=temperature, dtype=F64,
    ).eval()  # fmt: skip
    q, k = inputs(2)
    same(ours(q, k, k), theirs(q, k, k), (q, k))


def test_balanced_matrix():
    logits = torch.randn(2, 7, 7, generator=torch.Generator().manual_seed(3), dtype=F64)
    logits.requires_grad_()
    opened = torch.ones(1, 1, 7, 7, dtype=torch.bool)
    for iterations in (1, 2, 8):
        wanted = peer.sinkhorn_sorting_operator(logits, iterations)
        same(balance(logits[None], opened, iterations).exp()[0], wanted, (logits,))


def causal(ours, q, k, v, nulls, top):
    """Our sorting and reading with its summaries: cumulative means, and n null blocks in front."""
    batch, length = len(q), q.shape[2]
    mean_q, mean_k = (t.cumsum(2) / torch.arange(1, length + 1, dtype=F64)[:, None] for t in (q, k))
    count = length // C
    windows, means = mean_q[:, :, ::C], blocks(mean_k, C).sum(3)
    means = F.pad(means, (0, 0, top, 0))
    filled = [
        torch.cat([n[None, :, None].expand(batch, -1, top, C, -1), blocks(t, C)], 2)
        for n, t in zip(nulls, (k, v), strict=True)
    ]
    pairs = torch.arange(count + top) - top < torch.arange(count)[:, None]
    key = torch.ones(batch, count + top, C, dtype=torch.bool)
    scale = D**-0.5
    far = ours._sort(windows, means, pairs[None, None], *filled, key, scale, 0)
    near = partial(q, k, v, Mask(causal=True), Pattern(0, 0, block=C), scale)
    return merge([near, far.read(q, C, 0, scale)])


@pytest.mark.parametrize(("top", "temperature"), [(1, 1.0), (2, 0.75)])
def test_causal_form_through_the_internal_path(top, temperature):
    """Heads of the first half; null keys and values get their gradients too."""
    heads = 2 * H
    torch.manual_seed(0)
    theirs = peer.SinkhornCausalAttention(
        C, heads * D, D, heads, 28, n_top_buckets=top, temperature=temperature
    ).double()
    ours = sq.build(
        "sinkhorn", head_dim=D, num_heads=H, block=C, top=top, temperature=temperature,
        gumbel=False, dtype=F64,
    )  # fmt: skip
    q, k, v = inputs(3, heads=heads)
    nulls = [theirs.null_keys, theirs.null_values]
    first = [t[:, :H] for t in (q, k, v)]
    found = causal(ours, *first, [n[:H] for n in nulls], top)
    same(found, theirs(q, k, v)[:, :H], (q, k, v, *nulls))


def test_its_causal_form_does_not_leak_either():
    """Rotated heads included: it fills its last block with what comes before."""
    torch.manual_seed(0)
    theirs = peer.SinkhornCausalAttention(C, 4 * D, D, 4, 28, n_top_buckets=2).double()
    q, k, v = (t.detach() for t in inputs(3, heads=4))
    base = theirs(q, k, v)
    for t in (3, 4, 13, 27):
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[:, :, t] += 1.0
        assert torch.equal(theirs(*changed)[:, :, :t], base[:, :, :t])
