"""The summary engine against the formula, written out."""

import math

import pytest
import torch

from subquad.attention.exact import engine as exact
from subquad.attention.partial import EMPTY_LOG_SCALE, merge
from subquad.attention.summary.engine import summary_attention, summary_partial
from subquad.errors import ShapeError

B, H, HKV, L, K, D, V = 2, 6, 3, 37, 11, 5, 7

# A logit sums D + 1 products, an output K weights, a gradient L·(H/Hkv) of them, each of relative
# error eps and size ≤ 4·4·D: (D + K + 2·L)·80·eps = 7200·eps; taken as 10^4·eps of the largest.
BOUND = 1e4 * torch.finfo(torch.float64).eps


def draw(*shape, seed, grad=True):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(grad)


def tensors(count=K):
    return (
        draw(B, H, L, D, seed=0),
        draw(B, HKV, count, D, seed=1),
        draw(B, HKV, count, V, seed=2),
    )


def close(found, wanted, bound=BOUND):
    assert found.shape == wanted.shape
    error = (found - wanted).abs().max().item()
    assert error <= bound * max(1.0, wanted.abs().max().item()), f"{error:.2e}"


def naive(q, k, v, scale, log_weight=None, allowed=None):
    """num, den of the formula, one query head at a time."""
    k, v = (t.repeat_interleave(H // HKV, 1) for t in (k, v))
    weights = torch.exp(scale * q @ k.mT)
    if log_weight is not None:
        if log_weight.shape[1] == HKV:
            log_weight = log_weight.repeat_interleave(H // HKV, 1)
        weights = weights * torch.exp(log_weight)[:, :, None]
    if allowed is not None:
        weights = weights * allowed
    return weights @ v, weights.sum(-1)


def ratio(num, den):
    return num / torch.where(den == 0, 1.0, den)[..., None]


def grads(out, leaves, seed=9):
    cotangent = draw(*out.shape, seed=seed, grad=False)
    return torch.autograd.grad(out, leaves, cotangent, retain_graph=True)


@pytest.mark.parametrize("budget", [64 * 2**20, 1])
@pytest.mark.parametrize("shape", [(B, HKV), (B, H), (1, 1), (B, 1), (1, HKV), (1, H)], ids=str)
def test_log_weights_forward_and_gradients(shape, budget, monkeypatch):
    monkeypatch.setattr(exact, "CHUNK_BYTES", budget)
    leaves = (*tensors(), draw(*shape, K, seed=3))
    scale = -0.7
    log_weight = leaves[3].masked_fill(torch.arange(K) % 4 == 1, -math.inf)
    num, den = naive(*leaves[:3], scale, log_weight)
    wanted = ratio(num, den)
    out = summary_attention(*leaves[:3], scale, log_weight=log_weight)
    part = summary_partial(*leaves[:3], scale, log_weight=log_weight)
    close(out, wanted)
    close(part.output(), wanted)
    close(part.lse, den.log())
    for found in (out, part.output()):
        for a, b in zip(grads(found, leaves), grads(wanted, leaves), strict=True):
            close(a, b)
    # gradients reach what scales the sums too
    for a, b in zip(
        torch.autograd.grad(part.lse.sum(), [leaves[i] for i in (0, 1, 3)], retain_graph=True),
        torch.autograd.grad(den.log().sum(), [leaves[i] for i in (0, 1, 3)]),
        strict=True,
    ):
        close(a, b)


@pytest.mark.parametrize("budget", [64 * 2**20, 1000])
@pytest.mark.parametrize("extra", ["none", "present", "present heads", "log_weight"])
@pytest.mark.parametrize("form", ["pair", "tensor", "batch"])
def test_causal_by_blocks(form, extra, budget, monkeypatch):
    """Summary m ends at 4 + 3·m; queries stand at 2, 4, 6, …: the first reads none."""
    monkeypatch.setattr(exact, "CHUNK_BYTES", budget)
    leaves = tensors()
    ends = 4 + 3 * torch.arange(K)
    at = 2 + 2 * torch.arange(L)
    allowed = (ends <= at[:, None])[None, None]
    given = {"pair": (4, 3), "tensor": ends, "batch": ends.repeat(B, 1)}[form]
    options = {"ends": given, "positions": (2, 2)}
    log_weight = None
    if extra.startswith("present"):
        shape = (B, H if "heads" in extra else 1, K)
        present = torch.rand(shape, generator=torch.Generator().manual_seed(4)) > 0.4
        options["present"] = present
        allowed = allowed & present[:, :, None]
    if extra == "log_weight":
        leaves = (*leaves, draw(B, HKV, K, seed=3))
        log_weight = options["log_weight"] = leaves[3]
    num, den = naive(*leaves[:3], 0.6, log_weight, allowed)
    wanted = ratio(num, den)
    assert not wanted[:, :, 0].any()
    out = summary_attention(*leaves[:3], 0.6, **options)
    part = summary_partial(*leaves[:3], 0.6, **options)
    for found in (out, part.output()):
        close(found, wanted)
        for a, b in zip(grads(found, leaves), grads(wanted, leaves), strict=True):
            close(a, b)
    assert (part.den[:, :, 0] == 0).all() and (part.log_scale[:, :, 0] == EMPTY_LOG_SCALE).all()


@pytest.mark.parametrize("junk", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("by", ["log_weight", "present"])
def test_absent_summaries_never_matter(by, junk):
    there = torch.arange(K) % 3 != 0
    results = []
    for fill in (0.0, junk):
        q, k, v = (t.detach() for t in tensors())
        leaves = [q, *(t.masked_fill(~there[:, None], fill) for t in (k, v))]
        leaves = [t.requires_grad_() for t in leaves]
        options = {"present": there.expand(1, 1, K)}
        if by == "log_weight":
            options = {"log_weight": torch.zeros(1, 1, K).masked_fill(~there, -math.inf).double()}
        out = summary_attention(*leaves, 1.0, **options)
        part = summary_partial(*leaves, 1.0, **options)
        results.append([out, *grads(out, leaves), *grads(part.output(), leaves)])
    for clean, dirty in zip(*results, strict=True):
        assert clean.isfinite().all() and torch.equal(clean, dirty)


@pytest.mark.parametrize("by", ["log_weight", "present"])
def test_rows_without_any_summary_are_zero(by):
    there = torch.ones(B, 1, K, dtype=torch.bool)
    there[1] = False
    leaves = [*tensors()]
    options = {"present": there}
    if by == "log_weight":
        leaves.append(draw(B, 1, K, seed=5))
        options = {"log_weight": leaves[3].masked_fill(~there, -math.inf)}
    out = summary_attention(*leaves[:3], 1.0, **options)
    part = summary_partial(*leaves[:3], 1.0, **options)
    assert (part.den[1] == 0).all()
    for found in (out, part.output()):
        assert not found[1].any() and found[0].any()
        for grad in torch.autograd.grad(found.sum(), leaves, retain_graph=True):
            assert grad.isfinite().all() and not grad[1].any()


def test_parts_merge():
    """Two halves of the summaries, and keys beside summaries, are one softmax."""
    q, k, v = tensors()
    weight = draw(B, HKV, K, seed=3)
    cuts = slice(0, 4), slice(4, K)
    parts = [
        summary_partial(q, k[:, :, c], v[:, :, c], 0.6, log_weight=weight[..., c]) for c in cuts
    ]
    close(merge(parts), summary_attention(q, k, v, 0.6, log_weight=weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_log_weights(dtype):
    """ℓ = 10 would be rounded by 10·2^-8 = 4% in bfloat16; computed in float32, what is left is
    the rounding of the output, eps/2, and float32's own 10^4·2^-24 = 6e-4 at worst.
    """
    q, k, v = (t.detach().to(dtype) for t in tensors())
    weight = 10.0 + draw(B, HKV, K, seed=3, grad=False).float()
    out = summary_attention(q, k, v, 0.6, log_weight=weight)
    assert out.dtype == dtype
    wanted = ratio(*naive(q.double(), k.double(), v.double(), 0.6, weight.double()))
    close(out.double(), wanted, torch.finfo(dtype).eps / 2 + 6e-4)


def test_wide_values_are_the_weights():
    q, k, _ = tensors()
    k = draw(B, HKV, 23, D, seed=1)
    eye = torch.eye(23, dtype=torch.float64).expand(B, HKV, 23, 23)
    weight = draw(1, 1, 23, seed=3)
    out = summary_attention(q, k, eye, 0.6, log_weight=weight)
    close(out, ratio(*naive(q, k, eye, 0.6, weight)))
    close(out.sum(-1), torch.ones(B, H, L, dtype=torch.float64))


def test_errors():
    q, k, v = tensors()
    with pytest.raises(ShapeError, match=r"log_weight must be \(B=2 or 1, Hkv=3 or H=6 or 1, K=11"):
        summary_attention(q, k, v, 1.0, log_weight=torch.zeros(B, 2, K))
    with pytest.raises(ShapeError, match="present must be"):
        summary_partial(q, k, v, 1.0, present=torch.ones(B, K, dtype=torch.bool))
    with pytest.raises(ShapeError, match=r"ends must be integers \(K=11\)"):
        summary_attention(q, k, v, 1.0, ends=torch.arange(3))
    with pytest.raises(ShapeError, match="must be positive"):
        summary_attention(q, k, v, 1.0, ends=(0, 0))
