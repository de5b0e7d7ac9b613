"""Cases of the linear engine's Triton kernels, run by `test_triton.py`.

On a GPU they run compiled, elsewhere as Python under ``TRITON_INTERPRET=1``, which has to be set
before triton is imported: hence the process of their own. Every output buffer starts as NaN.

The reference evaluates the defining sums in float64, in logarithms, with autograd's gradients:

    K_ij = Σ_m exp(u_q,im + u_k,jm + bias_j − quad·|k_j|²),   out_i = Σ_j K_ij v_j / Σ_j K_ij

Tolerances are relative to the largest entry. An exponent of size U is a sum of D products, then
scaled and shifted: its error is (D + 4)·U·ε, and a weight's relative error the same. A sum of n
such weights adds √n·ε, roundings having random signs. An output is a ratio of two sums, a
gradient a product of two such numbers: a factor of 4 covers either twice over.
"""

import math
import os

import pytest
import torch
import triton

from subquad.kernels import linear
from subquad.kernels import triton as backend
from subquad.kernels.linear import LinearMap, Problem
from subquad.kernels.triton import tuning

pytestmark = pytest.mark.filterwarnings("ignore:.*deterministic")  # torch's own, on a GPU

GPU = torch.cuda.is_available() and not backend.interpreted()
DEVICE = "cuda" if GPU else "cpu"
F64 = torch.float64
EPSILON = 2.0**-21 if GPU else 2.0**-24
"""Of float32; three TF32 products for one leave out that of the low parts, 2^-22 on each side."""

if GPU:  # tuning would compile every candidate for every size below
    from subquad.kernels.triton import backward_kernels, forward_kernels

    TUNED = {
        kernel: list(kernel.configs)
        for module in (forward_kernels, backward_kernels)
        for kernel in vars(module).values()
        if hasattr(kernel, "configs")
    }
    for kernel in TUNED:
        kernel.configs = kernel.configs[-1:]
else:
    assert os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(autouse=True)
def poison():
    """torch.empty gives NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # what fills them hangs on this
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def close(found, wanted, tolerance, name):
    if wanted is None:
        assert found is None
        return
    found, wanted = found.detach().double().cpu(), wanted.detach().double().cpu()
    assert found.shape == wanted.shape, f"{name}: {tuple(found.shape)} is not {tuple(wanted.shape)}"
    assert torch.isfinite(found).all(), f"{name} is not finite"
    error = (found - wanted).abs().max().item() if found.numel() else 0.0
    size = wanted.abs().max().item() if found.numel() else 0.0
    assert error <= tolerance * size, f"{name} differs by {error:.3e} of {size:.3e}"


def randn(*shape, seed, size=1.0):
    """float64 numbers that are float32 numbers."""
    generator = torch.Generator().manual_seed(seed)
    return (size * torch.randn(shape, generator=generator)).double()


def tensors(L, S, *, B=2, KV=3, G=2, D=7, M=13, V=11, rows=False, full=False, size=0.5):
    """float64 leaves of one call; `full`: every option there is; `rows`: maps of each batch row."""
    lead, n = ((B,) if rows else ()), B * KV
    t = {
        "q": randn(B, KV * G, L, D, seed=1, size=size), "k": randn(B, KV, S, D, seed=2, size=size),
        "v": randn(B, KV, S, V, seed=3), "wq": randn(KV, D, M, seed=4, size=0.5),
        "wk": randn(*lead, KV, D, M, seed=5, size=0.5), "bq": None, "bk": None,
        "key_bias": None, "s": None, "z": None, "c": None,
    }  # fmt: skip
    if full:
        t |= {
            "bq": randn(KV, M, seed=6, size=0.5), "bk": randn(*lead, KV, M, seed=7, size=0.5),
            "key_bias": randn(B, KV, S, seed=8), "s": randn(n, M, V, seed=9),
            "z": randn(n, M, 1, seed=10).abs(), "c": randn(n, 1, M, seed=11),
        }  # fmt: skip
    return t


LEAVES = ("q", "k", "v", "key_bias", "s", "z")


def reference(t, absorb, quad, mask):
    """out, normaliser, S, z at their true scales; log2 of the normaliser."""
    B, KV, S = t["k"].shape[:3]
    H, L = t["q"].shape[1:3]
    G = H // KV

    def heads(x, rank):  # of a key/value head, repeated for its queries
        return x.repeat_interleave(G, x.dim() - rank)

    def logs(x, w, b, repeat):
        w = heads(w, 3) if repeat else w
        u = x @ w
        return u if b is None else u + (heads(b, 2) if repeat else b).unsqueeze(-2)

    u_q, u_k = logs(t["q"], t["wq"], t["bq"], True), logs(t["k"], t["wk"], t["bk"], False)
    weight = -quad * t["k"].square().sum(-1)
    if t["key_bias"] is not None:
        weight = weight + t["key_bias"]
    u_k = u_k + weight[..., None]
    j = torch.arange(S)
    seen = ((j <= torch.arange(L)[:, None] + S - L) | (j < absorb)).expand(B, H, L, S)
    seen = seen if mask is None else seen & mask[:, None, None]
    logits = (u_q[:, :, :, None] + heads(u_k, 3)[:, :, None]).logsumexp(-1)
    logits = logits.masked_fill(~seen, -math.inf)
    s = z = c = None
    if t["s"] is not None:
        s, z, c = (t[n].unflatten(0, (B, KV)) for n in ("s", "z", "c"))
        past = u_q + heads(c, 3) * math.log(2)
    else:
        past = torch.full_like(u_q, -math.inf)
    top = torch.maximum(logits.amax(-1), past.amax(-1)).detach()[..., None]
    empty = top == -math.inf
    top = top.masked_fill(empty, 0.0)
    weights, past = (logits - top).exp(), (past - top).exp()
    num, den = weights @ heads(t["v"], 3), weights.sum(-1, keepdim=True)
    fk = u_k.exp() if mask is None else u_k.exp().masked_fill(~mask[:, None, :, None], 0.0)
    new_s, new_z = fk.mT @ t["v"], fk.sum(2)[..., None]
    if s is not None:
        num, den = num + past @ heads(s, 3), den + past @ heads(z, 3)
        factor = 2.0**c.mT
        new_s, new_z = new_s + s * factor, new_z + z * factor
    out = num / torch.where(den == 0, 1.0, den)
    return out, (den * top.exp())[..., 0], new_s.flatten(0, 1), new_z.flatten(0, 1)


def problem(t, absorb, quad, mask, dtype=torch.float32, borrow=False):
    """The call in float32, inputs in `dtype`; what is masked is NaN."""

    def to(name, kind=torch.float32):
        return None if t[name] is None else t[name].detach().to(kind).to(DEVICE)

    q, k, v = (to(n, dtype) for n in "qkv")
    if mask is not None:
        mask = mask.to(DEVICE)
        closed = ~mask[:, None, :, None]
        k, v = k.masked_fill(closed, math.nan), v.masked_fill(closed, math.nan)
    batch = q.shape[0]
    maps = (LinearMap(to(f"w{side}"), to(f"b{side}"), "exp", batch, torch.float32) for side in "qk")
    state = None
    if t["s"] is not None:
        mass = torch.ones(batch * v.shape[1], 1, 1, device=DEVICE)
        state = (to("s"), to("z"), to("c"), mass)
    bias = to("key_bias")
    if bias is not None and mask is not None:
        bias = bias.masked_fill(~mask[:, None], math.nan)
    assert backend.refusal(DEVICE, dtype, dtype, "exp") is None
    return Problem(q, k, v, *maps, bias, mask, state, quad, 0.0, absorb, borrow)


def check(
    t, absorb, quad=0.0, mask=None, *, keep=None, tolerance=None, dtype=torch.float32, sums=True
):
    """Forward, state and all gradients of a random functional against the reference."""
    p = problem(t, absorb, quad, mask, dtype)
    keep = keep or linear.causal_chunk(p.features)
    n, d = max(p.queries, p.keys) + p.features, p.q.shape[-1]
    tolerance = tolerance or 4 * ((d + 4) * EXPONENT + math.sqrt(n)) * EPSILON
    result = backend.forward(p, keep)
    closed = None if mask is None else ~mask
    leaves = {n: t[n].clone().requires_grad_() for n in LEAVES if t[n] is not None}
    wanted = reference({**t, **leaves}, absorb, quad, mask)
    factor = torch.exp2(result.state[2].double()).mT
    level = torch.exp2(result.scale.double())
    assert result.out.dtype == dtype and result.den.dtype == torch.float32
    found = (
        result.out, result.den.double() * level, result.state[0].double() * factor,
        result.state[1].double() * factor,
    )  # fmt: skip
    use = 4 if sums else 1  # the true scales of rows to repair overflow
    bars = [randn(*x.shape, seed=40 + i) / x.abs().max().item() for i, x in enumerate(wanted[:use])]
    bars[0] = bars[0].to(dtype).double()
    for name, a, b in zip(("out", "den", "S", "z"), found[:use], wanted, strict=False):
        close(a, b, tolerance, name)
    truth = torch.autograd.grad(
        sum((x * w).sum() for x, w in zip(wanted, bars, strict=False)), list(leaves.values())
    )
    on = [b.to(DEVICE) for b in bars] + [None] * (4 - use)
    if sums:
        on = [on[0], on[1] * level, on[2] * factor, on[3] * factor]
    given = [on[0].to(dtype), *(None if b is None else b.float() for b in on[1:])]
    g = backend.backward(p, result, *given, t["key_bias"] is not None, keep)
    for name, wanted_bar in zip(leaves, truth, strict=True):
        close(getattr(g, name), wanted_bar, tolerance, f"gradient of {name}")
        if closed is not None and name in ("k", "v", "key_bias"):
            gone = getattr(g, name).cpu().transpose(1, 2)[closed]
            assert not gone.any(), f"gradient of {name} at masked keys"
    return p, result


EXPONENT = 12.0
"""log2 of the largest K_ij above, roughly: |u| ≤ 6 nats on either side."""

KINDS = {  # L, S, absorb
    "bidirectional": (13, 71, 71),
    "causal": (67, 67, 0),  # two chunks of 64
    "causal to the end": (17, 73, 56),  # few tokens after many: one launch, then chunks backward
    "more queries": (73, 67, 0),  # the first 6 read the state alone
    "prefix": (71, 73, 5),
    "one": (1, 1, 0),
    "one query": (1, 37, 37),
}


@pytest.mark.parametrize("kind", KINDS)
def test_everything_at_once(kind):
    """Maps for each batch row, biases, key_bias, quad, NaN at masked keys, incoming state."""
    L, S, absorb = KINDS[kind]
    t = tensors(L, S, B=2, KV=1 if absorb < S else 3, G=2, rows=True, full=True)
    mask = torch.rand(2, S, generator=torch.Generator().manual_seed(3)) > 0.3
    mask[0, : S // 2] = False  # rows that only the state answers
    check(t, absorb, 0.3, mask)


@pytest.mark.parametrize("kind", ["bidirectional", "causal", "more queries", "one"])
def test_bare(kind):
    """Shared maps without bias, mask, weight, state or groups: the other branch of each."""
    L, S, absorb = KINDS[kind]
    check(tensors(L, S, B=1, KV=2, G=1), absorb)


def test_more_than_one_tile_in_every_direction():
    """37 features are two tiles, 71 values two tiles of a scan and five of a step."""
    for L, S, absorb in ((5, 97, 97), (3, 3, 0), (35, 35, 0)):
        t = tensors(L, S, B=1, KV=1, G=1, D=19, M=37, V=71, full=True, size=0.3)
        check(t, absorb, 0.1)


def test_states_kept_apart():
    """`keep` of two chunks: the states between are made again by each segment."""
    t = tensors(197, 197, B=1, KV=2, G=1, full=True)
    check(t, 0, 0.2, keep=128)


def test_rows_without_keys_are_zero_and_pass_nothing():
    mask = torch.arange(71).expand(2, 71) >= torch.tensor([29, 71])[:, None]
    t = tensors(71, 71, KV=1)
    for absorb in (0, 71):
        _, result = check(t, absorb, 0.3, mask)
        assert not result.out[1].any() and not result.den[1].any() and not result.flags.any()
        if not absorb:
            assert not result.out[0, :, :29].any()


def test_strides_do_not_matter():
    t = tensors(19, 19, B=2, KV=2, G=1)
    p = problem(t, 0, 0.3, None)
    wanted = backend.forward(p, 64)
    p.q, p.k, p.v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (p.q, p.k, p.v))
    bar = randn(*p.q.shape[:3], 11, seed=3).float().to(DEVICE)
    g = backend.backward(p, wanted, bar, None, None, None, False, 64)
    turned = backend.forward(p, 64)
    assert torch.equal(turned.out, wanted.out) and turned.out.is_contiguous()
    p.q, p.k, p.v = (x.mT.contiguous().mT for x in (p.q, p.k, p.v))  # columns first
    assert torch.equal(backend.forward(p, 64).out, wanted.out)
    back = backend.backward(p, turned, bar.mT.contiguous().mT, None, None, None, False, 64)
    for name in "qkv":
        assert torch.equal(getattr(g, name), getattr(back, name)), name
    spread = problem(dict(t, v=t["v"][..., :1].expand(t["v"].shape)), 0, 0.3, None)
    spread.v = spread.v[:, :1, :, :1].expand(spread.v.shape)  # stride 0
    solid = backend.forward(spread, 64).out
    spread.v = spread.v.contiguous()
    assert torch.equal(backend.forward(spread, 64).out, solid)


def test_whole_is_prefill_and_steps():
    """A call, or chunks, then few tokens, then single ones, through the state; inputs unharmed."""
    t = tensors(83, 83, B=1, KV=2, G=2)
    p = problem(t, 0, 0.1, None)
    whole = backend.forward(p, 0)
    state, parts, at = None, [], 0
    for size in (67, 7, 1, 1, 7):
        part = problem(t, 0, 0.1, None, borrow=True)
        part = Problem(
            *(x[:, :, at : at + size] for x in (p.q, p.k, p.v)), part.query_map, part.key_map,
            None, None, state, 0.1, 0.0, 0, True,
        )  # fmt: skip
        before = None if state is None else [x.clone() for x in state]
        result = backend.forward(part, 0)
        if state is not None:
            assert all(torch.equal(a, b) for a, b in zip(state, before, strict=True))
        state, at = result.state, at + size
        parts.append(result.out)
    # Both are the same sums in another order: twice the tolerance of one.
    tolerance = 2 * 4 * (11 * EXPONENT + 10) * EPSILON
    close(torch.cat(parts, 2), whole.out, tolerance, "out")
    for name, a, b in zip("Szc", state, whole.state, strict=False):
        close(a, b, tolerance, name)


def test_nothing_is_kept_where_nothing_is_asked_for():
    t = tensors(67, 67, B=1, KV=1, G=1)
    for absorb in (0, 67):
        result = backend.forward(problem(t, absorb, 0.0, None), 0)
        assert result.flags.shape[-1] == 0 and all(len(h) == 0 for h in result.history)


@pytest.mark.parametrize("absorb", [37, 0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, absorb):
    """The same numbers in float64. Operands are rounded by u: 2^-9 in bfloat16; float16 inputs
    are TF32 operands, 2^-11. A weight has two factors φ, the sums they meet a third; a gradient
    meets g, S̄ and the result's own rounding: 6 relative errors of u, in a ratio or difference
    twice. Sums and states stay in float32.
    """
    t = tensors(37, 37, B=1, KV=2, G=2)
    t |= {n: t[n].to(dtype).double() for n in "qkv"}
    unit = 2.0**-9 if dtype == torch.bfloat16 else 2.0**-11
    _, result = check(t, absorb, 0.3, tolerance=12 * unit, dtype=dtype)
    assert all(x.dtype == torch.float32 for x in (result.den, result.scale, *result.state))


def test_exponents_are_not_in_half_precision():
    """One key 40 nats above another: a W rounded to bfloat16 alone would err by 40·2^-9 = 8%.

    Two values, 0 and 1; with a query that weighs both alike out = 1/2 whatever u's size.
    """
    w = torch.tensor([[[1.2345678]]], dtype=F64)
    k = torch.tensor([32.0, 31.875], dtype=F64).view(1, 1, 2, 1)
    t = {"q": torch.ones(1, 1, 1, 1, dtype=F64), "k": k, "v": torch.eye(2, dtype=F64)[None, None]}
    t |= {"wq": w, "wk": w} | dict.fromkeys(("bq", "bk", "key_bias", "s", "z", "c"))
    p = problem(t, 2, 0.0, None, torch.bfloat16)
    out = backend.forward(p, 0).out[0, 0, 0].double()
    first = 1 / (1 + math.exp(-1.2345678 * 0.125))
    # φ_k of the second key and each output are rounded to bfloat16: 2^-9 each, S once more.
    assert abs(out[0].item() - first) <= 3 * 2.0**-9


@pytest.mark.parametrize("masked", [False, True])
def test_rows_before_a_huge_later_key(masked):
    """Keys 5 and 7 lie 120 and 240 nats above all before them, along one log-feature, and below
    along others: rows before them underflow. Values and every gradient as if without chunks.

    Exponents reach (240 + 6)·log2(e) < 400.
    """
    L, KV, M, D = 11, 1, 5, 7
    t = tensors(L, L, B=2, KV=KV, G=2, M=M, D=D, full=masked)
    t["wk"] = t["wq"] = randn(KV, D, M, seed=1, size=0.4)
    t["wk"][:, 0] = torch.tensor([1.0, 0.6, 0.2, -0.3, -0.8])
    t["k"][:, :, 5:7, 0] += 120.0
    t["k"][:, :, 7:, 0] += 240.0
    t = {n: None if x is None else x.float().double() for n, x in t.items()}
    mask = None
    if masked:
        mask = torch.arange(L).expand(2, L) != 3
        mask[0, :2] = False  # with a state: rows that only it answers
    tolerance = 4 * (D + 4) * 400 * EPSILON
    p, result = check(t, 0, 0.0, mask, tolerance=tolerance, sums=False)
    flags = linear.forward(p, 64).flags
    assert torch.equal(result.flags, flags)
    # Without a state rows 0 to 6 lie 120 nats = 173 in base 2 below their chunk: under 2^-64.
    # One that is small along the climbing feature may escape; rows from 7 on see the largest.
    assert flags[..., :7].double().mean() > 0.8 and not flags[..., 7:].any()


def test_repair_after_a_prefix_and_in_a_second_block():
    """Rows 32 to 66 lie before a key that is 150 nats above; 4 keys were absorbed before."""
    t = tensors(67, 71, B=1, KV=1, G=2)
    t["wk"] = t["wq"] = randn(1, 7, 13, seed=1, size=0.4)
    t["wk"][:, 0] = torch.linspace(1.0, -0.8, 13)
    t["k"][:, :, 32:, 0] += 150.0
    _, result = check(t, 4, 0.0, tolerance=4 * 11 * 250 * EPSILON, sums=False)
    assert 0 < result.flags.sum() < 28 * 2 + 1  # rows of keys 4 to 31, two heads


def test_agrees_with_torch_operations():
    """Shapes, dtypes and contents of everything that is kept, at the same chunk."""
    t = tensors(67, 73, B=2, KV=1, G=2, full=True)
    p = problem(t, 6, 0.3, None)
    a, b = backend.forward(p, 64), linear.forward(p, 64)
    pairs = zip(
        (a.out, a.den, a.scale, *a.state, *a.history),
        (b.out, b.den, b.scale, *b.state, *b.history), strict=True,
    )  # fmt: skip
    for i, (x, y) in enumerate(pairs):
        assert x.dtype == y.dtype and x.is_contiguous()
        close(x, y, 2 * 4 * (11 * EXPONENT + 9) * EPSILON, f"field {i}")
    assert torch.equal(a.flags, b.flags)


@pytest.mark.parametrize("sizes", [{"D": 131}, {"V": 131}])
def test_sizes_that_do_not_fit_are_left_to_torch_operations(sizes, monkeypatch):
    t = tensors(11, 11, B=1, KV=1, G=1, size=0.1, **sizes)
    wanted = linear.forward(problem(t, 0, 0.0, None), 64).out
    monkeypatch.setattr("subquad.kernels.triton.engine.forward", None)
    monkeypatch.setattr("subquad.kernels.triton.engine.backward", None)
    _, result = check(t, 0, tolerance=4 * (135 * EXPONENT + 5) * 2.0**-24)
    assert torch.equal(result.out, wanted)


def test_learned_maps():
    """Their gradients come from torch operations, on the kernels' own forward pass."""
    t = tensors(67, 67, B=2, KV=1, G=2)
    p, result = check(t, 0)
    bar = randn(*result.out.shape, seed=3).float().to(DEVICE)
    found = []
    for run, r in ((backend, result), (linear, linear.forward(p, 64))):
        p.query_map.track(True, False)
        p.key_map.track(True, False)
        g = run.backward(p, r, bar, None, None, None, False, 64)
        found.append([g.q, g.k, g.v, p.query_map.collect()[0], p.key_map.collect()[0]])
    for name, a, b in zip(("q", "k", "v", "wq", "wk"), *found, strict=True):
        close(a, b, 2 * 4 * (11 * EXPONENT + 9) * EPSILON, f"gradient of {name}")


def test_candidates_divide_a_causal_chunk():
    """A block over two chunks would read one chunk's state for both, unseen by any error."""
    for name, sizes in tuning.CANDIDATES.items():
        configs = [triton.Config({"BLOCK_M": m, "BLOCK_N": n}) for m, n, *_ in sizes]
        for M, chunk in ((13, 64), (64, 64), (128, 128)):
            assert linear.causal_chunk(M) == chunk
            kept = tuning._prune(configs, {}, M=M, CHUNK=chunk)
            assert kept and all(chunk % c.kwargs["BLOCK_N"] == 0 for c in kept), name
        assert set(sizes[-1][:2]) == {32}


# ---- wider ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("M", [3, 16, 65, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_sizes(kind, M):
    L, S, absorb = KINDS[kind]
    t = tensors(L, S, B=1, KV=1, G=3, D=17, M=M, V=29, full=True, size=0.3)
    check(t, absorb, 0.2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_of_everything(kind, dtype):
    """As above; with a state the sums have no rounding of their own, so the bound holds."""
    L, S, absorb = KINDS[kind]
    t = tensors(L, S, B=1, KV=1, G=2, full=True)
    t |= {n: t[n].to(dtype).double() for n in "qkv"}
    mask = torch.rand(1, S, generator=torch.Generator().manual_seed(3)) > 0.3
    unit = 2.0**-9 if dtype == torch.bfloat16 else 2.0**-11
    check(t, absorb, 0.3, mask, tolerance=12 * unit, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("length", [128, 131, 257])
def test_long(length):
    for absorb in (0, 3, length):
        check(tensors(length, length, B=1, KV=2, G=1, full=True), absorb, 0.2)


@pytest.mark.slow
@pytest.mark.skipif(not GPU, reason="needs a GPU: interpreted kernels have one candidate")
@pytest.mark.parametrize("index", range(6))
def test_every_candidate(index):
    """Block sizes, warps and stages change the order of sums alone."""
    for kernel, configs in TUNED.items():
        kernel.configs = configs[min(index, len(configs) - 1) :][:1]
    try:
        for absorb in (0, 5, 197):
            t = tensors(197, 197, B=1, KV=2, D=64, M=128, V=64, full=True, size=0.1)
            check(t, absorb, 0.1)
    finally:
        for kernel, configs in TUNED.items():
            kernel.configs = configs[-1:]


@pytest.mark.slow
@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_offsets_beyond_32_bits(causal, dtype):
    """More than 2^31 numbers in q: the last rows against the same rows of a short call."""
    D, L = 128, 2**24 + 77
    size = torch.tensor([], dtype=dtype).element_size() * L * D
    if torch.cuda.mem_get_info()[0] < 8 * size:
        pytest.skip(f"needs {8 * size / 2**30:.0f} GiB")
    w = torch.randn(1, D, 16, device=DEVICE) * D**-0.5
    x = torch.randn(1, 1, L, D, device=DEVICE, dtype=dtype)

    def maps():
        return (LinearMap(w, None, "exp", 1, torch.float32) for _ in range(2))

    absorb = 0 if causal else L
    whole = backend.forward(Problem(x, x, x, *maps(), None, None, None, 0.5, 0.0, absorb), 0)
    tail = x[:, :, -77:]
    # A causal query near the end and a bidirectional one read all but 77 of 2^24 keys alike.
    part = backend.forward(
        Problem(tail, tail, tail, *maps(), None, None, whole.state, 0.5, 0.0, 0), 0
    )
    close(part.out, whole.out[:, :, -77:], 77 * 2.0**-24 * 4 + 16 * 2.0**-9, "out")
