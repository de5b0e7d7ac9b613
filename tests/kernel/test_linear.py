"""The linear engine against a naive float64 evaluation of its defining sums.

    K_ij = φ_q(q_i)·φ_k(k_j)·exp(bias_j − quad·|k_j|²),   out_i = Σ_j K_ij v_j / Σ_j K_ij

Below nothing is stabilised or chunked in the reference; inputs are sized so that it need not
be, save for the repair tests, where it works on logarithms.
"""

import math

import pytest
import torch
from torch import Tensor, nn

import subquad as sq
from subquad.attention.kernel.engine import FunctionFeatures, KernelMechanism
from subquad.kernels import linear as engine
from subquad.kernels.linear import EMPTY, TINY, Problem, Workspace
from subquad.kernels.ops import linear_attention, linear_attention_functions

F64 = torch.float64
B, KV, G, D, V = 2, 3, 5, 7, 11  # B·Kv = 6 rows; H = 15
H = KV * G
CLIP = 0.05

KEEP = 64
"""Tokens from one kept causal state to the next, for maps of up to 64 features."""

EXACT = 1e-9
"""Relative tolerance in float64. A result is a sum of at most 1031 keys × 134 features: its
relative rounding is below 1.4e5 × 1.1e-16 = 1.5e-11 even if every error had one sign. A
clipped normaliser amplifies by 1/CLIP = 20: 3e-10."""


def close(found, wanted, tolerance=EXACT, name=""):
    found, wanted = found.detach().double(), wanted.detach().double()
    assert found.shape == wanted.shape, f"{name}: {tuple(found.shape)} is not {tuple(wanted.shape)}"
    assert torch.isfinite(found).all(), f"{name} is not finite"
    error, size = (found - wanted).abs().max().item(), wanted.abs().max().item()
    assert error <= tolerance * size, f"{name} differs by {error:.3e} of {size:.3e}"


def randn(*shape, seed, size=1.0, dtype=F64):
    generator = torch.Generator().manual_seed(seed)
    return (size * torch.randn(shape, generator=generator, dtype=F64)).to(dtype)


def features(x, w, b, activation):
    """φ (B, n-heads, n, M) of x, heads of w and b repeated by the caller."""
    u = x @ w
    if b is not None:
        u = u + b.unsqueeze(-2)
    if activation == "exp":
        return u.exp()
    if activation == "relu":
        return u.relu() + 1e-3
    if activation == "elu":
        return torch.where(u > 0, u + 1, u.clamp_max(0).exp())
    if activation == "softplus":
        return torch.log(1.0 + u.exp())
    if activation == "sigmoid":
        return 1.0 / (1.0 + torch.exp(-u))
    return torch.cat([u.cos(), u.sin()], -1) * u.shape[-1] ** -0.5


def per_query_head(t, rank):
    """Repeats the key/value heads of t for the queries of their group."""
    return None if t is None else t.repeat_interleave(G, t.dim() - rank)


def allowed_keys(L, S, absorb, key_mask):
    """(B, 1, L, S): key j < absorb for all queries, else causal aligned to the end."""
    i, j = torch.arange(L)[:, None] + S - L, torch.arange(S)
    allowed = ((j <= i) | (j < absorb)).expand(B, 1, L, S)
    return allowed if key_mask is None else allowed & key_mask[:, None, None]


def naive(t, activation, absorb, quad, clip, key_mask):
    """out, true normaliser and true new sums S, z from the definition."""
    rank = 3  # (Kv, D, R): heads are dimension −3
    fq = features(t["q"], per_query_head(t["wq"], rank), per_query_head(t["bq"], 2), activation)
    fk = features(t["k"], t["wk"], t["bk"], activation)
    log_weight = -quad * t["k"].square().sum(-1)
    if t["key_bias"] is not None:
        log_weight = log_weight + t["key_bias"]
    weight = log_weight.exp()
    if key_mask is not None:
        weight = torch.where(key_mask[:, None], weight, 0.0)
    fk = fk * weight[..., None]
    L, S = t["q"].shape[2], t["k"].shape[2]
    allowed = allowed_keys(L, S, absorb, key_mask).double()
    kernel = (fq @ per_query_head(fk, 3).mT) * allowed
    num, den = kernel @ per_query_head(t["v"], 3), kernel.sum(-1)
    mass = (per_query_head(weight, 2)[:, :, None] * allowed).sum(-1)
    s, z = fk.mT @ t["v"], fk.sum(2)[..., None]
    if t["s"] is not None:
        factor = 2.0 ** t["c"].mT  # (N, M or 1, 1)
        s0, z0 = (x * factor for x in (t["s"], t["z"]))
        s, z = s + s0.unflatten(0, (B, KV)), z + z0.unflatten(0, (B, KV))
        num = num + fq @ per_query_head(s0.unflatten(0, (B, KV)), 3)
        den = den + (fq @ per_query_head(z0.unflatten(0, (B, KV)), 3))[..., 0]
        old = t["mass"] * 2.0 ** t["c"].amax(-1, keepdim=True)  # used by plain maps alone
        mass = mass + per_query_head(old.view(B, KV, 1), 2)
    if clip:
        least = clip * mass.detach()
        den = torch.where(den < least, least, den)
    out = num / torch.where(den == 0, 1.0, den)[..., None]
    return out, den, s.flatten(0, 1), z.flatten(0, 1)


def tensors(L, S, activation, R, *, rows, bias, state, seed=0):
    """Leaves of one call. With `rows` each batch row has maps of its own."""
    lead = (B,) if rows else ()
    M = R * (2 if activation == "trig" else 1)
    turn = 1.0 if activation == "trig" else 0.5  # wide angles, so that normalisers come near 0
    t = {
        "q": randn(B, H, L, D, seed=seed + 1, size=0.5),
        "k": randn(B, KV, S, D, seed=seed + 2, size=0.5),
        "v": randn(B, KV, S, V, seed=seed + 3),
        "wq": randn(*lead, KV, D, R, seed=seed + 4, size=turn),
        "wk": randn(*lead, KV, D, R, seed=seed + 5, size=turn),
        "bq": randn(*lead, KV, R, seed=seed + 6, size=0.5) if bias else None,
        "bk": randn(*lead, KV, R, seed=seed + 7, size=0.5) if bias else None,
        "key_bias": randn(B, KV, S, seed=seed + 8) if bias else None,
        "s": None, "z": None, "c": None, "mass": None,
    }  # fmt: skip
    if state:
        width = M if activation == "exp" else 1
        t["s"] = randn(B * KV, M, V, seed=seed + 9)
        t["z"] = randn(B * KV, M, 1, seed=seed + 10)
        if activation != "trig":  # the one map whose sums may be negative
            t["z"].abs_()
        # Plain maps without log-weights keep c = 0, always.
        t["c"] = randn(B * KV, 1, width, seed=seed + 11) * (bias or activation == "exp")
        t["mass"] = randn(B * KV, 1, 1, seed=seed + 12).abs()
    return {n: x if x is None else x.requires_grad_(n not in ("c", "mass")) for n, x in t.items()}


def run(t, activation, absorb, quad, clip, key_mask):
    state = None if t["s"] is None else tuple(t[n] for n in ("s", "z", "c", "mass"))
    out, den, scale, (s, z, c, _) = linear_attention(
        t["q"], t["k"], t["v"], t["wq"], t["bq"], t["wk"], t["bk"], activation=activation,
        quad=quad, clip=clip, absorb=absorb, key_bias=t["key_bias"], key_mask=key_mask, state=state,
    )  # fmt: skip
    factor = 2.0**c.mT
    return out, den * 2.0**scale, s * factor, z * factor


def compare(t, found, wanted):
    """Outputs and the gradients of a random functional of all of them."""
    names = ("out", "den", "S", "z")
    for name, a, b in zip(names, found, wanted, strict=True):
        close(a, b, name=name)
    leaves = {n: x for n, x in t.items() if x is not None and x.requires_grad}
    weights = [randn(*x.shape, seed=40 + n) / x.detach().abs().max() for n, x in enumerate(wanted)]

    def grads(results):
        total = sum((x * w).sum() for x, w in zip(results, weights, strict=True))
        return torch.autograd.grad(total, list(leaves.values()))

    for name, a, b in zip(leaves, grads(found), grads(wanted), strict=True):
        close(a, b, name=f"gradient of {name}")


ACTIVATIONS = ("exp", "relu", "elu", "softplus", "sigmoid", "trig")
KINDS = {  # L, S, absorb
    "bidirectional": (13, 71, 71),
    "causal": (137, 137, 0),  # three chunks of 64, the last of 9
    "causal to the end": (67, 139, 72),
    "more queries": (139, 67, 0),  # the first 72 read nothing
    "prefix": (131, 137, 19),
    "single": (1, 1, 0),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_everything_at_once(activation, kind):
    """Maps for each batch row, biases, key_bias, quad, mask, incoming state, all gradients."""
    L, S, absorb = KINDS[kind]
    t = tensors(L, S, activation, 13, rows=True, bias=True, state=True)
    mask = torch.rand(B, S, generator=torch.Generator().manual_seed(3)) > 0.3
    mask[0, : S // 2] = False  # rows that only the state answers
    args = (activation, absorb, 0.3, CLIP if activation == "trig" else 0.0, mask)
    compare(t, run(t, *args), naive(t, *args))


@pytest.mark.parametrize("kind", ["bidirectional", "causal", "more queries", "prefix"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_bare(activation, kind):
    """Shared maps without bias, mask, weight or state: the other branch of each of these."""
    L, S, absorb = KINDS[kind]
    t = tensors(L, S, activation, 13, rows=False, bias=False, state=False)
    args = (activation, absorb, 0.0, CLIP if activation == "trig" else 0.0, None)
    compare(t, run(t, *args), naive(t, *args))


@pytest.mark.parametrize("activation", ["exp", "trig"])
def test_many_features_and_long_absorption(activation):
    """Causal chunks of 128 (M > 64), and more keys than one bidirectional chunk (682 here)."""
    t = tensors(3, 1031, activation, 67, rows=False, bias=True, state=False)
    args = (activation, 1031, -0.2, CLIP if activation == "trig" else 0.0, None)
    compare(t, run(t, *args), naive(t, *args))
    t = tensors(157, 157, activation, 67, rows=False, bias=False, state=True)
    args = (activation, 0, 0.0, CLIP if activation == "trig" else 0.0, None)
    compare(t, run(t, *args), naive(t, *args))
    t = tensors(151, 5, activation, 3, rows=False, bias=False, state=False)  # > 136 queries a chunk
    args = (activation, 5, 0.0, CLIP if activation == "trig" else 0.0, None)
    compare(t, run(t, *args), naive(t, *args))


def test_clip_binds_in_the_cases_above():
    """Otherwise nothing there would have tested it; and rows above the clip exist as well."""
    t = tensors(137, 137, "trig", 13, rows=True, bias=True, state=True)
    clipped = naive(t, "trig", 0, 0.3, CLIP, None)[1]
    free = naive(t, "trig", 0, 0.3, 0.0, None)[1]
    share = (clipped != free).double().mean().item()
    assert 0.01 < share < 0.99


def test_rows_without_keys_are_zero_and_pass_nothing():
    for activation in ACTIVATIONS:
        t = tensors(71, 71, activation, 13, rows=False, bias=True, state=False)
        mask = torch.arange(71).expand(B, 71) >= 29
        clip = CLIP if activation == "trig" else 0.0
        for absorb in (0, 29, 71):
            out, den, _, _ = run(t, activation, absorb, 0.3, clip, mask)
            blind = 0 if absorb == 71 else 29
            assert not out[:, :, :blind].any() and not den[:, :, :blind].any()
            assert out[:, :, blind:].abs().amax(-1).min() > 0
            grads = torch.autograd.grad(out.sum() + den.sum(), [t["k"], t["v"], t["key_bias"]])
            for grad in grads:
                assert not grad[:, :, :29].any()
        nothing = torch.zeros_like(mask)
        out, den, s, z = run(t, activation, 0, 0.3, clip, nothing)
        assert not any(x.any() for x in (out, den, s, z))
        for grad in torch.autograd.grad(out.sum() + s.sum(), [t["q"], t["k"], t["v"]]):
            assert not grad.any()


def test_strides_do_not_matter():
    t = tensors(71, 71, "exp", 13, rows=False, bias=True, state=False)
    args = ("exp", 0, 0.3, 0.0, None)
    wanted = run(t, *args)
    turned = dict(t)
    for name in ("q", "k", "v"):
        turned[name] = t[name].transpose(1, 2).contiguous().transpose(1, 2)
    turned["key_bias"] = t["key_bias"].mT.contiguous().mT
    turned["wq"] = t["wq"].mT.contiguous().mT
    assert not turned["q"].is_contiguous() and not turned["wq"].is_contiguous()
    compare(t, run(turned, *args), wanted)
    spread = dict(t, v=t["v"][:, :1, :, :1].expand(B, KV, 71, V))  # stride 0
    solid = dict(t, v=spread["v"].contiguous())
    compare(dict(t, wk=t["wk"]), run(spread, *args), run(solid, *args))


@pytest.mark.parametrize("absorb", [71, 0])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_half_precision_inputs_are_summed_in_float32(activation, absorb):
    """The same bfloat16 numbers in float64: what differs is float32 arithmetic inside, of
    relative size ≤ (71 keys + 13 features + D) × 2^-24 = 5.4e-6 (with the clip, 20 times that
    = 1.1e-4), and the rounding of the output to bfloat16, of 8 bits: 2^-8 at most.
    """
    t = tensors(71, 71, activation, 13, rows=False, bias=True, state=False)
    half = {n: None if x is None else x.detach().bfloat16() for n, x in t.items()}
    same = {n: None if x is None else x.double() for n, x in half.items()}
    clip = CLIP if activation == "trig" else 0.0
    out, den, s, z = run(half, activation, absorb, 0.3, clip, None)
    wanted = naive(same, activation, absorb, 0.3, clip, None)
    assert out.dtype == torch.bfloat16
    assert den.dtype == s.dtype == z.dtype == torch.float32
    close(out, wanted[0], 2**-8 + 1.1e-4)
    for a, b in zip((den, s, z), wanted[1:], strict=True):
        close(a, b, 1.1e-4)


def test_gradients_of_a_bias_for_each_row_beside_a_shared_weight():
    t = tensors(13, 17, "exp", 5, rows=False, bias=True, state=False)
    t["bq"] = randn(B, KV, 5, seed=50).requires_grad_()
    t["bk"] = randn(B, KV, 5, seed=51).requires_grad_()
    args = ("exp", 17, 0.0, 0.0, None)
    compare(t, run(t, *args), naive(t, *args))


# ---- rows that underflow ------------------------------------------------------------------


def log_naive(q, k, v, w, mask, s=None, z=None, c=None):
    """Causal exponential maps by logsumexp over features and pairs, in float64; GQA."""
    u_q = q @ per_query_head(w, 3)
    u_k = per_query_head(k @ w, 3)
    L, S = q.shape[2], k.shape[2]
    allowed = torch.arange(L)[:, None] + S - L >= torch.arange(S)
    if mask is not None:
        allowed = allowed & mask[:, None, None]
    logits = (u_q[:, :, :, None] + u_k[:, :, None]).logsumexp(-1)
    logits = logits.masked_fill(~allowed, -torch.inf)
    values = per_query_head(v, 3)
    if s is not None:  # the state enters as one more pair for each feature
        s, z = (per_query_head(x.unflatten(0, (B, KV)), 3) for x in (s, z))
        past = u_q + per_query_head(c.unflatten(0, (B, KV)), 3) * math.log(2)
    else:
        past = torch.full_like(u_q, -torch.inf)
    top = torch.maximum(logits.amax(-1), past.amax(-1))[..., None]
    top = top.masked_fill(top == -torch.inf, 0.0).detach()
    weights, past = (logits - top).exp(), (past - top).exp()
    num, den = weights @ values, weights.sum(-1, keepdim=True)
    if s is not None:
        num, den = num + past @ s, den + past @ z
    return num / torch.where(den == 0, 1.0, den)


def slope_keys(S, nats, w, seed, sign=1.0):
    """Keys with one log-feature that climbs by `nats` a token, while others climb slower or fall.

    Feature m of head h gets j·step·w[h, 0, m], where w[h, 0, :] has both signs: along `sign`
    the largest climbs fastest.
    """
    k = randn(B, KV, S, D, seed=seed, size=0.3)
    k[..., 0] += sign * torch.arange(S, dtype=F64) * nats / (sign * w[:, 0]).amax(-1)[:, None]
    return k


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("state", [False, True])
def test_repair(sign, masked, state):
    """float32 with log-features that move by 2 nats a token: 128 inside a chunk of 64, far
    over the 87 that float32 holds; output and gradients against float64 logarithms.

    Tolerance: log-features reach U = 2·131·1.25 + 20 < 350 nats (a falling one is 1.25 times
    as steep as the climbing one for sign −1). Each is a sum of D products, then
    scaled, shifted and subtracted twice: its absolute error is ≤ (D + 4)·2^-24·U·log2(e)·ln 2
    = 2.3e-4, and a weight's relative error the same. An output is a ratio: twice that. Gradients
    are differences v_j − out of O(1) terms times one more such weight: four times that.
    """
    L = 131
    w = randn(KV, D, 5, seed=1, size=0.4)
    w[:, 0] = torch.tensor([1.0, 0.6, 0.2, -0.3, -0.8], dtype=F64)
    k = slope_keys(L, 2.0, w, seed=2, sign=sign)
    q = randn(B, H, L, D, seed=3)
    v = randn(B, KV, L, V, seed=4)
    leaves = [x.float().requires_grad_() for x in (q, k, v, w)]
    mask = None
    if masked:
        mask = torch.rand(B, L, generator=torch.Generator().manual_seed(5)) > 0.3
        mask[0, :37] = False  # rows without keys in a chunk that needs repair
    extra, flat = (), None
    if state:
        s = randn(B * KV, 5, V, seed=6).float().requires_grad_()
        z = (randn(B * KV, 5, 1, seed=7).abs() + 0.1).float().requires_grad_()
        c = randn(B * KV, 1, 5, seed=8).float()
        extra, flat = (s, z), (s, z, c, torch.zeros(B * KV, 1, 1))
    wide = [x.detach().double().requires_grad_() for x in (*leaves, *extra)]
    out = linear_attention(
        *leaves[:3], leaves[3], None, leaves[3], None, absorb=0, key_mask=mask, state=flat
    )[0]
    wanted = log_naive(*wide[:4], mask, *wide[4:], *((c.double(),) if state else ()))
    rounding = (D + 4) * 2.0**-24 * 350
    close(out, wanted, 2 * rounding, "out")
    if masked and not state:
        assert not out[0, :, :37].any()
    cotangent = randn(*wanted.shape, seed=9)
    found = torch.autograd.grad(out, [*leaves, *extra], cotangent.float())
    truth = torch.autograd.grad(wanted, wide, cotangent)
    for name, a, b in zip("qkvwsz", found, truth, strict=False):
        close(a, b, 4 * rounding, f"gradient of {name}")


def test_repair_is_needed_above():
    """Without it those inputs underflow: the test above tests the repair."""
    w = randn(KV, D, 5, seed=1, size=0.4)
    w[:, 0] = torch.tensor([1.0, 0.6, 0.2, -0.3, -0.8], dtype=F64)
    for sign in (1.0, -1.0):
        k, q = slope_keys(131, 2.0, w, seed=2, sign=sign), randn(B, H, 131, D, seed=3)
        u_q, u_k = (q @ per_query_head(w, 3))[:, :, :64], per_query_head(k @ w, 3)[:, :, :64]
        seen, whole = u_k.cummax(2).values, u_k.amax(2, keepdim=True)
        short = (u_q + whole).amax(-1) - (u_q + seen).amax(-1)
        assert (short > 87).double().mean() > 0.2  # at least every fifth row of the first chunk


class Raw:
    """u = x itself, already in base 2: exact exponents."""

    log = True
    features = 1

    def __init__(self) -> None:
        self.gradients: list[Tensor | None] = []

    def apply(self, x, work, name, offset=None):
        return x.clone() if offset is None else x + offset

    def pullback(self, x, value, cotangent, out=None):
        return cotangent if out is None else out.copy_(cotangent)


@pytest.mark.parametrize(
    ("level", "flagged"),
    [(-60.0, False), (-64.0, False), (-64.00001, True), (-65.0, True), (-126.0, True),
     (-149.0, True), (-200.0, True), (-1e4, True)],
)  # fmt: skip
def test_rows_at_the_threshold(level, flagged):
    """Row 0 reads one key, 2^level below the chunk's last key: out_0 = v_0 whatever the level,
    normaliser 2^level, and exactly the rows below TINY = 2^-64 are redone. All exact in
    float32: one key, one feature, powers of two.
    """
    assert TINY == 2.0**-64
    L = 5
    u = torch.tensor([level, level, level, level, 0.0])
    k = u.view(1, 1, L, 1)
    q, v = torch.zeros(1, 1, L, 1), randn(1, 1, L, 3, seed=0, dtype=torch.float32)
    p = Problem(q, k, v, Raw(), Raw(), None, None, None, 0.0, 0.0, 0)
    result = engine.forward(p, KEEP)
    # Row i's normaliser is (i + 1)·2^level, so that rows 0–3 do not all cross together.
    below = torch.tensor([(i + 1) * 2.0**level < TINY for i in range(4)] + [False])
    assert torch.equal(result.flags[0, 0], below)
    assert bool(below[0]) is flagged
    torch.testing.assert_close(result.out[0, 0, 0], v[0, 0, 0], rtol=0, atol=0)
    # Means of up to four numbers: three additions and a division, ≤ 4 ulp/2 = 2^-22.
    means = v[0, 0, :4].cumsum(0) / torch.arange(1, 5)[:, None]
    torch.testing.assert_close(result.out[0, 0, :4], means, rtol=2**-22, atol=2**-22)
    levels = result.den[0, 0, :4].double().log2() + result.scale[0, 0, :4].double()
    wanted = level + torch.arange(1.0, 5.0, dtype=F64).log2()
    # The level −64.00001 is itself rounded to float32: 2^-24 of its size.
    torch.testing.assert_close(levels, wanted, rtol=2**-23, atol=1e-6)
    out_bar = torch.randn(v.shape, generator=torch.Generator().manual_seed(1))
    g = engine.backward(p, result, out_bar, None, None, None, False, KEEP)
    i = torch.arange(L)
    logits = u.double().clone().requires_grad_()
    weights = logits.expand(L, L).masked_fill(i[:, None] < i, -torch.inf).softmax(-1)
    values = v[0, 0].double().requires_grad_()
    (weights @ values * out_bar[0, 0].double()).sum().backward()
    # Sums of ≤ 5·3 products of O(1): 15·2^-24 < 1e-6, times sizes ≤ 4.
    torch.testing.assert_close(g.k[0, 0, :, 0].double(), logits.grad, rtol=0, atol=4e-6)
    torch.testing.assert_close(g.v[0, 0].double(), values.grad, rtol=0, atol=4e-6)


def test_a_state_without_keys_is_not_mistaken_for_one_with_tiny_keys():
    """c = EMPTY everywhere is "nothing seen": zeros, while c = −10^4 is a key like any other."""
    v = torch.ones(1, 1, 1, 3)
    mask = torch.zeros(1, 1, dtype=torch.bool)
    for level, wanted in ((EMPTY, 0.0), (-1e4, 7.0)):
        z = torch.full((1, 1, 1), float(level > EMPTY))
        c = torch.full((1, 1, 1), level)
        state = (z * 7.0 * torch.ones(1, 1, 3), z, c, torch.zeros(1, 1, 1))
        q = torch.zeros(1, 1, 1, 1)
        p = Problem(q, q.clone(), v, Raw(), Raw(), None, mask, state, 0.0, 0.0, 0)
        assert (engine.forward(p, 0).out == wanted).all()


def test_padding_on_the_left_is_not_redone():
    """Rows without keys have a normaliser of zero, not a tiny one: they cost no repair."""
    x = randn(1, 1, 137, 1, seed=0, dtype=torch.float32)
    mask = torch.arange(137)[None] >= 71
    p = Problem(x, x, x, Raw(), Raw(), None, mask, None, 0.0, 0.0, 0)
    result = engine.forward(p, KEEP)
    assert not result.flags.any() and not result.out[:, :, :71].any()


def test_closed_keys_get_no_gradient_where_a_map_has_none():
    """Closed keys stand as 0 in the chunk; √|x| has no derivative there, which must not show."""
    q, k, v = (randn(1, 1, 5, 3, seed=n).requires_grad_() for n in range(3))
    mask = torch.arange(5)[None] > 1
    for absorb in (5, 0):
        out = linear_attention_functions(
            q, k, v, torch.abs, lambda x: x.abs().sqrt(), log=False, features=3, absorb=absorb,
            key_mask=mask,
        )[0]  # fmt: skip
        (grad,) = torch.autograd.grad(out.square().sum(), k)
        assert grad.isfinite().all() and not grad[:, :, :2].any() and grad[:, :, 2:].any()


# ---- memory -------------------------------------------------------------------------------


def saved_bytes(call):
    """Bytes of all distinct tensors that autograd saves during `call`."""
    seen = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        seen[storage.data_ptr(), tensor.numel()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        keep = call()
    assert any(x.requires_grad for x in keep if isinstance(x, Tensor))
    return sum(seen.values())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["exp", "relu", "elu", "trig", "function", "log function"])
def test_saved_memory(kind, causal):
    """What a token adds to what is saved, in float32, B = 1 and one head:

    q, k: 2·D;  v, out: 2·V;  den, scale: 2;  flags: 1 byte;  key_bias: 1; key mask: 1 byte;
    causal: a state M·(V + 1) + M each C = 128 tokens (M > 64).
    An O(L·M) tensor would add 4·M bytes more a token, an O(L·L) one 4·L: both are far above.
    """
    M, d, width, step = 514, 3, 5, 128
    R = M // 2 if kind == "trig" else M
    w = randn(1, d, R, seed=0, dtype=torch.float32)

    def call(length):
        q = randn(1, 1, length, d, seed=1, dtype=torch.float32).requires_grad_()
        k = randn(1, 1, length, d, seed=2, dtype=torch.float32).requires_grad_()
        v = randn(1, 1, length, width, seed=3, dtype=torch.float32).requires_grad_()
        mask = torch.arange(length)[None] > 3
        bias = randn(1, 1, length, seed=4, dtype=torch.float32).requires_grad_()
        options = {"absorb": 0 if causal else length, "key_mask": mask, "key_bias": bias}
        if "function" in kind:
            log = kind == "log function"

            def function(x):
                return x @ w if log else (x @ w).exp()

            return linear_attention_functions(
                q, k, v, function, function, log=log, features=M, **options
            )[:2]
        return linear_attention(q, k, v, w, None, w, None, activation=kind, quad=0.1, **options)[:2]

    short, long = 256, 1280  # multiples of C, so that the number of states is exact
    grown = saved_bytes(lambda: call(long)) - saved_bytes(lambda: call(short))
    token = 4 * (2 * d + 2 * width + 2 + 1) + 1 + 1
    chunks = 4 * M * (width + 2) / step if causal else 0
    bound = (token + chunks) * (long - short)
    assert token + chunks < 4 * M / 5  # the bound excludes anything of size L·M
    assert grown <= bound, f"{grown / (long - short):.1f} bytes a token, allowed {token + chunks}"
    assert grown >= 4 * (2 * d + 2 * width) * (long - short)  # the measurement sees the inputs


def test_saved_memory_of_the_mechanisms():
    """The same through `Performer`: nothing outside the engine saves O(L·M) either. Data-aware
    maps with a balance also save y, λ and |y|² behind key_bias: 2·D + 2·D + 4 numbers more.
    """
    M, d, width = 514, 3, 5
    for spec in (
        f"performer(features={M})", f"performer(features={M}, estimator=hyperbolic)",
        f"performer(features={M}, estimator=trig)", f"performer(features={M}, estimator=relu)",
        f"performer(features={M}, estimator=derf, gauge=balance)",
        f"performer(features={M}, estimator=trig, gauge=centre)",
        f"gaussian(features={M})",
    ):  # fmt: skip
        mech = sq.build(spec, head_dim=d, num_heads=1)

        def call(length, mech=mech):
            sizes = (d, d, width)
            leaves = [
                randn(1, 1, length, size, seed=n, dtype=torch.float32).requires_grad_()
                for n, size in enumerate(sizes)
            ]
            return (mech(*leaves),)

        grown = saved_bytes(lambda: call(1291)) - saved_bytes(lambda: call(269))
        token = 4 * (2 * d + 2 * width + 3 + 4 * d + 4) + 2
        assert token < 4 * M / 5
        assert grown <= token * (1291 - 269), spec


@pytest.mark.parametrize("functions", [False, True])
def test_nothing_is_kept_where_no_gradient_is_wanted(functions, monkeypatch):
    """Under no_grad and inference_mode the chunk states are not stored, even for inputs that
    require gradients; with gradients they are.
    """
    from subquad.kernels import ops

    saves = []

    def spy(problem, keep):
        saves.append(bool(keep))
        return forward(problem, keep)

    forward = engine.forward
    monkeypatch.setattr(ops if functions else engine, "forward", spy)
    q = randn(1, 2, 5, 3, seed=0).requires_grad_()
    estimator = torch.relu if functions else "positive"
    mech = sq.build(sq.PerformerConfig(features=4, estimator=estimator), head_dim=3, num_heads=2)
    wanted = mech(q, q, q, causal=True)
    assert saves == [True]
    with torch.no_grad():
        assert torch.equal(mech(q, q, q, causal=True), wanted)
    with torch.inference_mode():
        assert torch.equal(mech(q, q, q, causal=True), wanted)
    plain = q.detach()
    assert torch.equal(mech(plain, plain, plain, causal=True), wanted)
    assert saves == [True, False, False, False]


# ---- operators ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("activation", "full", "absorb"), [("exp", True, 54), ("trig", True, 71), ("exp", False, 71)]
)
def test_operator_is_sound(activation, full, absorb):
    """torch.library.opcheck: schema (no mutation, no aliasing), autograd registration, fake
    kernel's shapes and dtypes, and tracing with dynamic shapes.
    """
    t = tensors(17, 71, activation, 5, rows=full, bias=full, state=full)
    mask = torch.arange(71).expand(B, 71) > 3 if full else None
    args = [t[n] for n in ("q", "k", "v", "wq", "bq", "wk", "bk", "key_bias")]
    args += [mask, *(t[n] for n in ("s", "z", "c", "mass"))]
    clip = CLIP if activation == "trig" else 0.0
    torch.library.opcheck(
        torch.ops.subquad.linear_attention.default,
        (*args, activation, 0.2 if full else 0.0, clip, absorb, KEEP, "torch"),
    )


def test_compiled_with_gradients_once_for_all_lengths():
    """Forward and backward graphs; one for the first length and one for all others."""
    from torch._dynamo.testing import CompileCounterWithBackend

    mech = sq.build("performer(features=13)", head_dim=D, num_heads=6, num_kv_heads=3)
    for causal in (False, True):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(
            lambda q, k, v, causal=causal: mech(q, k, v, causal=causal),
            backend=counter, fullgraph=True,
        )  # fmt: skip
        for length in (29, 43, 67, 301, 331):
            sizes = (6, D), (3, D), (3, V)
            leaves = [
                randn(2, h, length, d, seed=n, dtype=torch.float32).requires_grad_()
                for n, (h, d) in enumerate(sizes)
            ]
            out, wanted = compiled(*leaves), mech(*leaves, causal=causal)
            # The same operations in float32; a fused multiply-add may round once less.
            close(out, wanted, 1e-6)
            cotangent = randn(*out.shape, seed=9, dtype=torch.float32)
            for a, b in zip(
                torch.autograd.grad(out, leaves, cotangent),
                torch.autograd.grad(wanted, leaves, cotangent),
                strict=True,
            ):
                close(a, b, 1e-6)
        # One graph for the first length and one for all others; a causal call with one
        # saved state has its own, because torch specialises sizes of 1.
        assert counter.frame_count == (3 if causal else 2)
    torch._dynamo.reset()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("estimator", ["positive", "trig", torch.relu])
def test_second_derivatives_in_float32(estimator, causal):
    """A gradient's gradient, of one tensor that is q, k and v, over several chunks: as in float64.

    The sums of the 300 tokens are rounded to 2^-24 each, 300 × 6e-8 = 2e-5, and twice
    differentiated logarithms of size 10 multiply that by up to 100.
    """
    config = sq.PerformerConfig(features=16, estimator=estimator)
    found = []
    for dtype in (torch.float64, torch.float32):
        q = randn(1, 2, 300, 3, seed=0).to(dtype).requires_grad_()
        mech = sq.build(config, head_dim=3, num_heads=2, dtype=dtype)
        out = mech(q, q, q, causal=causal)
        (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        found += torch.autograd.grad(first.square().sum(), q)
    assert (found[1] - found[0]).abs().max() <= 2e-3 * found[0].abs().max()


def test_second_derivatives_of_rows_that_underflow():
    """The normaliser of a repaired row is measured from its own scale, not from its chunk's."""
    q = torch.zeros(1, 1, 4, 2, dtype=torch.float64)
    k = torch.zeros_like(q)
    q[..., 0], k[..., 0] = 30.0, torch.tensor([-8.0, -4.0, 0.0, 8.0])
    v = randn(1, 1, 4, 2, seed=3).double()
    mech = sq.build("performer(features=8)", head_dim=2, num_heads=1, dtype=torch.float64)

    def total(q, k, v):
        return mech(q, k, v, causal=True).square().sum()

    inputs = [t.requires_grad_() for t in (q, k, v)]
    first = torch.autograd.grad(total(*inputs), inputs, create_graph=True)
    plain = torch.autograd.grad(total(*inputs), inputs)
    for one, other in zip(first, plain, strict=True):
        assert (one - other).abs().max() <= 1e-10 * other.abs().max().clamp_min(1e-3)


def test_gradients_without_saving_are_refused():
    t = tensors(5, 5, "exp", 3, rows=False, bias=False, state=False)
    args = [t[n] for n in ("q", "k", "v", "wq")] + [None, t["wk"]] + [None] * 7
    with pytest.raises(RuntimeError, match="with keep=0"):
        torch.ops.subquad.linear_attention(*args, "exp", 0.0, 0.0, 5, 0, "torch")


@pytest.mark.parametrize(
    "estimator",
    ["positive", nn.Softplus()],
)
def test_backward_inside_autocast(estimator):
    """`loss.backward()` inside the autocast block gives the same gradients as outside."""
    mech = sq.build(sq.PerformerConfig(features=4, estimator=estimator), head_dim=3, num_heads=1)
    results = []
    for inside in (False, True):
        q = randn(1, 1, 71, 3, seed=0, dtype=torch.float32).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = mech(q, q, q, causal=True).float().square().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        results.append(q.grad)
    assert torch.equal(*results)


def test_empty_batch():
    q = torch.zeros(0, 2, 5, 3)
    assert sq.attention(q, q, q, "performer").shape == (0, 2, 5, 3)


# ---- feature maps that are functions ------------------------------------------------------


def naive_functions(q, k, v, query, key, log, absorb, key_bias, key_mask):
    """Functions take (B, Kv, n, D): queries of a group are rows of one call."""
    L, S = q.shape[2], k.shape[2]
    fq = query(q.unflatten(1, (KV, G)).flatten(2, 3)).unflatten(2, (G, L)).flatten(1, 2)
    fk = key(k)
    if log:
        fq, fk = fq.exp(), fk.exp()
    kernel = fq @ per_query_head(fk * key_bias.exp()[..., None], 3).mT
    kernel = kernel * allowed_keys(L, S, absorb, key_mask).double()
    den = kernel.sum(-1, keepdim=True)
    return kernel @ per_query_head(v, 3) / torch.where(den == 0, 1.0, den)


class Net(nn.Module):
    """A learned feature map with an unused and a frozen parameter."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.w = nn.Parameter(torch.randn(D, 13, generator=generator, dtype=F64) * 0.5)
        self.b = nn.Parameter(torch.randn(13, generator=generator, dtype=F64))
        self.frozen = nn.Parameter(torch.ones(13, dtype=F64), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3, dtype=F64))

    def forward(self, x):
        return nn.functional.softplus(x @ self.w + self.b) * self.frozen


@pytest.mark.parametrize("kind", ["bidirectional", "causal", "more queries", "prefix"])
@pytest.mark.parametrize("log", [False, True])
def test_functions(kind, log):
    """Outputs and gradients, those of the functions' own parameters included."""
    L, S, absorb = KINDS[kind]
    t = tensors(L, S, "exp", 13, rows=False, bias=True, state=False)
    net = Net()
    mask = torch.rand(B, S, generator=torch.Generator().manual_seed(3)) > 0.3

    def query(x):
        return net(x).log() if log else net(x)

    def key(x):  # another map for the keys, sharing the parameters
        return net(-x).log() if log else net(-x)

    leaves = {n: t[n] for n in ("q", "k", "v", "key_bias")} | {"w": net.w, "b": net.b}
    found = linear_attention_functions(
        t["q"], t["k"], t["v"], query, key, log=log, features=13,
        parameters=tuple(net.parameters()), absorb=absorb, key_bias=t["key_bias"], key_mask=mask,
    )[0]  # fmt: skip
    wanted = naive_functions(t["q"], t["k"], t["v"], query, key, log, absorb, t["key_bias"], mask)
    close(found, wanted)
    cotangent = randn(*wanted.shape, seed=9)
    grads = [torch.autograd.grad(x, list(leaves.values()), cotangent) for x in (found, wanted)]
    for name, a, b in zip(leaves, *grads, strict=True):
        close(a, b, name=f"gradient of {name}")
    again = linear_attention_functions(
        t["q"], t["k"], t["v"], query, key, log=log, features=13,
        parameters=tuple(net.parameters()), absorb=absorb,
    )[0]  # fmt: skip
    (none,) = torch.autograd.grad(again.sum(), [net.unused], allow_unused=True)
    assert none is None or not none.any()


def test_functions_continue_a_state_with_gradients():
    t = tensors(13, 17, "exp", 13, rows=False, bias=True, state=False)
    w = t["wk"].detach()[0]

    def call(k, v, bias, absorb, state=None):
        return linear_attention_functions(
            t["q"], k, v, lambda x: x @ w, lambda x: x @ w, log=True, features=13, absorb=absorb,
            key_bias=bias, state=state,
        )  # fmt: skip

    whole = call(t["k"], t["v"], t["key_bias"], 17)[0]
    k, v, bias = t["k"], t["v"], t["key_bias"]
    state = call(k[:, :, :6], v[:, :, :6], bias[:, :, :6], 6)[3]
    parts = call(k[:, :, 6:], v[:, :, 6:], bias[:, :, 6:], 11, state)[0]
    close(parts, whole)
    leaves = [t[n] for n in ("q", "k", "v", "key_bias")]
    cotangent = randn(*whole.shape, seed=9)
    for a, b in zip(
        torch.autograd.grad(parts, leaves, cotangent),
        torch.autograd.grad(whole, leaves, cotangent),
        strict=True,
    ):
        close(a, b)


def test_repair_of_a_log_function():
    """The same rows as a matrix map gives, in float32, where keys climb by 2 nats a token."""
    w = torch.tensor([[1.0, -0.5]])
    k = (2.0 * torch.arange(131.0)).view(1, 1, 131, 1)
    q, v = torch.zeros(1, 1, 131, 1), randn(1, 1, 131, 3, seed=0, dtype=torch.float32)
    fused = linear_attention(q, k, v, w[None], None, w[None], None, absorb=0)[0]
    free = linear_attention_functions(
        q, k, v, lambda x: x @ w, lambda x: x @ w, log=True, features=2, absorb=0
    )[0]
    j = torch.arange(131.0, dtype=F64)
    logits = torch.logaddexp(2 * j, -j).expand(131, 131)
    wanted = logits.masked_fill(j[:, None] < j, -torch.inf).softmax(-1) @ v[0, 0].double()
    # Exponents ≤ 262 nats, two roundings each: 2·262·2^-24 = 3.2e-5, twice in a ratio.
    close(fused[0, 0], wanted, 6.4e-5)
    close(free[0, 0], wanted, 6.4e-5)


def test_a_flat_function_passes_no_gradient():
    """A step function is a valid feature map; its derivative is zero, not an error."""
    q = randn(1, 1, 5, 3, seed=0).requires_grad_()
    v = randn(1, 1, 5, 2, seed=1).requires_grad_()
    config = sq.PerformerConfig(features=4, estimator=lambda u: (u > 0).to(u.dtype) + 0.1)
    sq.attention(q, q, v, config).sum().backward()
    assert not q.grad.any() and v.grad.any()


def test_features_that_are_all_zero_give_zeros():
    """ln φ = −∞ everywhere is a query that no key matches: zeros, as for plain maps."""
    q = torch.tensor([[-1.0], [1.0]]).view(1, 1, 2, 1)

    def log_relu(x):
        return x.relu().log()

    for absorb in (2, 0):
        out = linear_attention_functions(
            q, q.abs(), q.abs(), log_relu, log_relu, log=True, features=1, absorb=absorb
        )[0]
        assert out.flatten().tolist() == [0.0, 1.0]


class Chosen(KernelMechanism):
    """A mechanism around given feature maps, for errors."""

    name = "performer"
    Config = sq.PerformerConfig

    @classmethod
    def capabilities_for(cls, config):
        from subquad.attention.base import Capabilities

        return Capabilities(prefix=True, state="constant", partial=True)

    def _features(self, q, k, mask, scale):
        return self.maps


@pytest.mark.parametrize("causal", [False, True])
def test_function_errors(causal):
    mech = Chosen(head_dim=3, num_heads=2)
    q = randn(1, 2, 5, 3, seed=0)
    mech.maps = FunctionFeatures(lambda x: x, lambda x: x.abs(), 3)
    with pytest.raises(sq.OptionError, match="negative features"):
        mech(q, q, q, causal=causal)
    mech.maps = FunctionFeatures(lambda x: x.abs(), lambda x: x, 3)
    with pytest.raises(sq.OptionError, match="negative features"):
        mech(q, q, q, causal=causal)
    for maps in (
        FunctionFeatures(lambda x: x.abs()[..., :2], lambda x: x.abs(), 3),
        FunctionFeatures(lambda x: x.abs(), lambda x: x.abs()[..., :2], 3),
    ):
        mech.maps = maps
        text = r"must map \(1, 2, 5, 3\) to \(1, 2, 5, 3\), it gave \(1, 2, 5, 2\)"
        with pytest.raises(sq.ShapeError, match=text):
            mech(q, q, q, causal=causal)
    # Logarithms may be negative, and so may features whose normaliser is clipped.
    mech.maps = FunctionFeatures(lambda x: x, lambda x: x, 3, log=True)
    assert mech(q, q, q, causal=causal).isfinite().all()
    mech.maps = FunctionFeatures(lambda x: x.cos() / 2, lambda x: x.cos() / 2, 3, clip=0.1)
    assert mech(q, q, q, causal=causal).isfinite().all()


# ---- lengths ------------------------------------------------------------------------------


def test_ragged_prefix_equals_row_by_row():
    mech = sq.build("performer(features=13)", head_dim=D, num_heads=6, num_kv_heads=3, dtype=F64)
    q, k, v = (randn(3, h, 71, d, seed=n) for n, (h, d) in enumerate(((6, D), (3, D), (3, V))))
    mask = torch.rand(3, 71, generator=torch.Generator().manual_seed(3)) > 0.3
    lengths = torch.tensor([0, 19, 71])
    out = mech(q, k, v, mask=sq.Mask(causal=True, prefix=lengths, key=mask))
    for row, n in enumerate(lengths.tolist()):
        one = (slice(row, row + 1),)
        alone = mech(q[one], k[one], v[one], mask=sq.Mask(causal=True, prefix=n, key=mask[one]))
        close(out[one], alone)
    part = mech.partial(q, k, v, mask=sq.Mask(causal=True, prefix=lengths, key=mask))
    close(part.output(), out)


def test_workspace_is_reused():
    work = Workspace(torch.zeros(1), torch.float32)
    first = work.get("x", 3, 5)
    assert work.get("x", 2, 2).data_ptr() == first.data_ptr()
    assert work.get("x", 7, 5).shape == (7, 5)


@pytest.mark.parametrize("causal", [False, True])
def test_shapes_alone(causal):
    """On the meta device, where sizes of models are tried out."""
    mech = sq.build("performer", head_dim=8, num_heads=4, num_kv_heads=2, device="meta")
    q, k = torch.empty(3, 4, 90, 8, device="meta"), torch.empty(3, 2, 90, 8, device="meta")
    for given in (q, q.requires_grad_()):
        out = mech(given, k, k, causal=causal)
        assert out.is_meta and out.shape == q.shape
