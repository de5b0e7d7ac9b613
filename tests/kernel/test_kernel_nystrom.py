"""Kernel Nyström features: the limit, the limiter of negative weights, calibration."""

import copy
import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import subquad as sq
from subquad.attention.kernel import engine
from subquad.attention.kernel.engine import SignedFeatures
from subquad.attention.kernel.nystrom import tokens_at

F64 = torch.float64


def draw(*shape, seed=0, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    return size * torch.randn(*shape, generator=generator, dtype=F64)


def qkv(length=31, heads=2, dim=5, size=1.0, seed=0):
    return tuple(
        draw(2, heads, length, dim, seed=3 * seed + i, size=s)
        for i, s in enumerate((size, size, 1))
    )


def build(heads=2, dim=5, **options):
    return sq.build("kernel_nystrom", head_dim=dim, num_heads=heads, dtype=F64, **options)


def close(found, wanted, tolerance):
    error = (found - wanted).abs().max().item()
    assert error <= tolerance * wanted.abs().max().item(), f"{error:.3e}"


def uniform_error(found, q, k, v):
    """Error of an output relative to that of uniform attention."""
    exact = sq.attention(q, k, v, "softmax")
    return ((found - exact).norm() / (v.mean(2, keepdim=True) - exact).norm()).item()


# ---- the limit ----------------------------------------------------------------------------


@pytest.mark.parametrize("gauge", ["none", "centre_keys", "centre", "balance"])
def test_every_token_a_landmark_is_softmax(gauge):
    """With x and y among Z, g(x, Z)(K + ε)^-1 g(Z, y) is K − ε I + ε² (K + ε)^-1 at (x, y): off
    the diagonal the error is at most ε²/λ, λ the least eigenvalue of K. It falls like ε².
    """
    q, k, v = qkv(31, dim=11)
    errors = []
    for ridge in (1e-2, 1e-3, 1e-4):
        mech = build(dim=11, features=62, ridge=ridge, gauge=gauge)
        errors.append(uniform_error(mech(q, k, v), q, k, v))
    assert errors[0] < 0.02
    for wide, narrow in itertools.pairwise(errors):
        assert 50 < wide / narrow < 200  # ε falls tenfold: 100, for ε well below λ


def test_places_take_every_token_once_and_grouped_heads_share_them():
    mech = sq.build("kernel_nystrom(features=46)", head_dim=1, num_heads=4, num_kv_heads=2)
    x = torch.arange(23.0).view(1, 1, 23, 1).expand(1, 2, 23, 1)
    for places in (mech.places_q, mech.places_k):
        assert torch.equal(tokens_at(x, places, None), x)
    key = torch.rand(3, 60, generator=torch.Generator().manual_seed(0)) > 0.4
    many = torch.arange(60.0).view(1, 1, 60, 1).expand(3, 2, 60, 1)
    found = tokens_at(many, mech.places_k, key)
    for row in range(3):
        assert set(found[row].flatten().tolist()) <= set(key[row].nonzero().flatten().tolist())
        alone = tokens_at(many[row : row + 1, :, key[row]], mech.places_k, None)
        assert torch.equal(found[row], alone[0])
    assert not tokens_at(many, mech.places_k, torch.zeros_like(key)).any()


def test_beats_random_features_where_tokens_have_structure():
    """Queries and keys in clusters of a few directions, logits of std 3: at M = 64 the error is
    a fraction of that of uniform attention, and of FAVOR+ with as many features.
    """
    generator = torch.Generator().manual_seed(1)
    centres = torch.randn(12, 16, generator=generator, dtype=F64) * 2.2
    places = torch.randint(12, (2, 4, 256), generator=generator)
    q, k = centres[places][:, None] + 0.3 * draw(2, 1, 4, 256, 16, seed=2)
    v = draw(1, 4, 256, 16, seed=3)
    errors = {
        name: uniform_error(sq.attention(q, k, v, f"{name}(features=64)"), q, k, v)
        for name in ("kernel_nystrom", "performer")
    }
    assert errors["kernel_nystrom"] < 0.3
    assert errors["performer"] > 2 * errors["kernel_nystrom"]


# ---- negative weights ---------------------------------------------------------------------


def hard_case():
    """Few landmarks for far-apart tokens: many rows have a normaliser near or below zero."""
    q, k, v = qkv(97, dim=11, size=3.0)
    options = {"features": 14, "landmarks": "calibrated"}
    marks = qkv(97, dim=11, size=1.0, seed=5)
    mech, free = build(dim=11, clip=0.1, **options), build(dim=11, clip=1e-9, **options)
    for one in (mech, free):
        one.calibrate(*marks[:2])
    return mech, free, (q, k, v)


@pytest.mark.parametrize("causal", [False, True])
def test_limiter_keeps_the_normaliser_and_bounds_the_output(causal):
    """out = (o₊ − r·o₋)/(1 − r), r ≤ 1 − τ, o₊ and o₋ means of values: |out| ≤ (2 − τ)/τ·max|v|.
    Rows whose unlimited normaliser keeps the share τ are untouched; others would be unbounded.
    """
    mech, free, (q, k, v) = hard_case()
    out = mech(q, k, v, causal=causal)
    assert out.abs().max() <= (2 - 0.1) / 0.1 * v.abs().max() * (1 + 1e-9)
    wild = free(q, k, v, causal=causal)
    assert wild.abs().max() > 10 * (2 - 0.1) / 0.1 * v.abs().max()
    sums = mech.partial(q, k, v, causal=causal)
    limited = mech.limited_partial(q, k, v, causal=causal)
    assert (sums.den < 0).any() and (limited.den > 0).all()
    both = torch.exp(sums.log_scale - limited.log_scale) * sums.den
    healthy = both > 0.999 * limited.den  # equal: the limiter only ever raises a normaliser
    assert 0.1 < healthy.double().mean() < 0.95
    close(out[healthy], sums.output()[healthy], 1e-9)
    assert (out - sums.output())[~healthy].abs().max() > 1.0


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that an operation makes."""

    def __init__(self):
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for t in found if isinstance(found, tuple | list) else (found,):
            if isinstance(t, torch.Tensor):
                self.size = max(self.size, t.numel())
        return found


@pytest.mark.parametrize("causal", [False, True])
def test_limiter_needs_no_tensor_of_queries_by_keys(causal):
    """Forward and backward: the largest tensor is q, k or v with both signs side by side (twice
    L·D), or the maps of a chunk; four times the length takes at most four times as much.
    """
    sizes = []
    mech = sq.build("kernel_nystrom(features=14, landmarks=calibrated)", head_dim=5, num_heads=1)
    mech.calibrate(torch.randn(1, 1, 97, 5), torch.randn(1, 1, 97, 5))
    for length in (2048, 8192):
        q, k, v = (torch.randn(1, 1, length, 5, requires_grad=True) for _ in range(3))
        mask = torch.rand(1, length) > 0.3
        with Largest() as largest:
            mech(q, k, v, key_mask=mask, causal=causal).sum().backward()
        sizes.append(largest.size)
        assert largest.size < length**2 / 50
    assert sizes[1] <= 4 * sizes[0]


def test_causal_limiter_looks_at_the_keys_so_far():
    mech, _, (q, k, v) = hard_case()
    causal = mech(q, k, v, causal=True)
    for n in (1, 7, 64, 65, 97):
        row = mech(q[:, :, n - 1 : n], k[:, :, :n], v[:, :, :n])
        close(causal[:, :, n - 1 : n], row, 1e-9)  # 1e-16 amplified by 1/clip² and cond K


def test_limiter_is_the_stated_one():
    """s = min(1, (1 − τ) α₊N/α₋N), by hand for two features and three keys."""
    alpha = torch.tensor([[3.0, -1.0], [1.0, -1.0], [2.0, 1.0]], dtype=F64)
    phi = torch.tensor([[1.0, 2.0], [0.5, 1.0], [1.0, 1.0]], dtype=F64)
    v = torch.tensor([[1.0], [2.0], [4.0]], dtype=F64)
    maps = SignedFeatures(lambda x: x @ torch.eye(2, dtype=F64), lambda x: x, 2, clip=0.25)
    out, den, log_scale, _ = engine._call(
        maps, alpha[None, None], phi.log()[None, None], v[None, None], 3, None, None
    )
    state, total = phi.T @ v, phi.sum(0)
    for i in range(3):
        above, below = alpha[i].clamp_min(0), (-alpha[i]).clamp_min(0)
        s = min(1.0, 0.75 * float(above @ total) / max(float(below @ total), 1e-300))
        weights = above - s * below
        close(out[0, 0, i], weights @ state / (weights @ total), 1e-13)
        found = den[0, 0, i] * 2.0 ** log_scale[0, 0, i]
        close(found, weights @ total, 1e-13)
    assert 0.75 * 2.5 / 4.0 < 1  # the second row is limited


def test_gradients_of_limited_rows_are_those_of_the_formula():
    """Numerical differentiation agrees also where the limit holds and r is constant."""
    _, _, (q, k, v) = hard_case()
    q, k, v = (t[:1, :1, :5].clone().requires_grad_() for t in (q, k, v))
    one = sq.build(
        "kernel_nystrom(features=14, landmarks=calibrated, clip=0.3)",
        head_dim=11, num_heads=1, dtype=F64,
    )  # fmt: skip
    one.calibrate(*(t[:, :1] for t in qkv(97, dim=11, seed=5)[:2]))
    sums, limited = (call(q, k, v, causal=True) for call in (one.partial, one.limited_partial))
    raised = torch.exp(sums.log_scale - limited.log_scale) * sums.den < 0.99 * limited.den
    assert raised.any() and not raised.all()
    assert torch.autograd.gradcheck(lambda q, k, v: one(q, k, v, causal=True), (q, k, v))


def test_far_field_of_an_exact_part():
    """Exact sums over half of the keys merge with limited ones over the other half: a sum whose
    far part is off by a share errs by less than the far part does alone.
    """
    q, k, v = qkv(64)
    exact, far = sq.build("softmax", head_dim=5, num_heads=2), build(features=48)
    parts = [
        exact.partial(q, k[:, :, :32], v[:, :, :32]),
        far.limited_partial(q, k[:, :, 32:], v[:, :, 32:]),
    ]
    merged, wanted = sq.merge(parts), exact(q, k, v)
    rest = k[:, :, 32:], v[:, :, 32:]
    alone, truth = far(q, *rest), exact(q, *rest)
    assert (merged - wanted).norm() < 0.7 * (alone - truth).norm()
    close(parts[1].output(), alone, 1e-13)


# ---- calibration --------------------------------------------------------------------------


def calibrated(**options):
    return build(landmarks="calibrated", features=14, **options)


def test_calibration_leaves_out_masked_tokens():
    q, k, v = qkv(31)
    mask = torch.rand(2, 31, generator=torch.Generator().manual_seed(0)) > 0.4
    first, second = calibrated(), calibrated()
    junk = [t.masked_fill(~mask[:, None, :, None], torch.nan) for t in (q, k)]
    first.calibrate(*junk, key_mask=mask)
    second.calibrate(q, k, key_mask=mask)
    close(first(q, k, v, causal=True), second(q, k, v, causal=True), 0.0)
    opened = k.transpose(0, 1)[0][mask]
    for mark in first.marks_k[0]:
        assert (opened == mark).all(-1).any()


def test_calibration_takes_all_batches_alike():
    """Two batches of equal size: each landmark is of the second with probability ½. Of 2·512,
    the share lies within five standard deviations of a half, 5·(4·1024)^-½ = 0.08.
    """
    mech = sq.build("kernel_nystrom(features=1024, landmarks=calibrated)", head_dim=3, num_heads=1)
    batches = [torch.full((1, 1, 700, 3), float(i)) for i in (1, 2)]
    for batch in batches:
        mech.calibrate(batch, batch)
    marks = torch.cat([mech.marks_q, mech.marks_k], 1)[..., 0]
    assert set(marks.flatten().tolist()) == {1.0, 2.0}
    assert abs((marks == 2.0).double().mean().item() - 0.5) < 0.08
    assert mech.tokens.tolist() == [1400, 1400]
    assert mech.mean_k[0, 0].item() == pytest.approx(1.5)
    mech.calibrate(batches[0], batches[0], key_mask=torch.zeros(1, 700, dtype=torch.bool))
    assert torch.equal(torch.cat([mech.marks_q, mech.marks_k], 1)[..., 0], marks)


def test_what_is_kept_between_calls_follows_the_buffers():
    q, k, v = qkv(31)
    mech, other = calibrated(), calibrated(seed=4)
    mech.calibrate(q, k)
    other.calibrate(3.0 * q, k)
    first = mech(q, k, v)
    twin = copy.deepcopy(mech)
    twin.load_state_dict(other.state_dict())
    close(twin(q, k, v), other(q, k, v), 0.0)
    close(mech(q, k, v), first, 0.0)
    assert (twin(q, k, v) - first).abs().max() > 1e-3
    assert mech(q, k, v, scale=1.0).sub(first).abs().max() > 1e-3
    close(mech(q, k, v), first, 0.0)
    mech.calibrate(5.0 * q, k)
    assert mech(q, k, v).sub(first).abs().max() > 1e-3


def test_inference_mode_first_then_training():
    q, k, v = qkv(31)
    mech = calibrated()
    mech.calibrate(q, k)
    with torch.inference_mode():
        first = mech(q, k, v)
    leaf = q.clone().requires_grad_()
    out = mech(leaf, k, v)
    close(out, first.clone(), 0.0)
    out.sum().backward()
    assert leaf.grad.abs().max() > 0


# ---- learned landmarks --------------------------------------------------------------------


def test_learned_landmarks_begin_as_calibrated_ones_and_move():
    q, k, v = qkv(31)
    fixed, learned = calibrated(), build(landmarks="learned", features=14)
    with pytest.raises(sq.CalibrationError, match="landmarks=learned needs calibrate"):
        learned(q, k, v)
    for mech in (fixed, learned):
        mech.calibrate(q, k)
    assert [name for name, _ in learned.named_parameters()] == ["marks_q", "marks_k"]
    close(learned(q, k, v), fixed(q, k, v), 0.0)
    exact = sq.attention(q, k, v, "softmax")
    optimiser, losses = torch.optim.Adam(learned.parameters(), lr=0.03), []
    for _ in range(20):
        optimiser.zero_grad()
        loss = (learned(q, k, v) - exact).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]  # a descent, through the inverse and the limiter
    with torch.no_grad():  # what is kept between calls follows the parameters
        close(learned(q, k, v), learned(q, k, v, causal=False), 0.0)
        found = (learned(q, k, v) - exact).square().mean().item()
    assert found < losses[0]
    fixed.load_state_dict(learned.state_dict())
    close(fixed(q, k, v), learned(q, k, v).detach(), 0.0)


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_reach_learned_landmarks_through_the_limiter(causal):
    """Numerical differentiation agrees, with rows that are limited and rows that are not."""
    _, _, (q, k, v) = hard_case()
    q, k, v = (t[:1, :1, :5] for t in (q, k, v))
    one = sq.build(
        "kernel_nystrom(features=6, landmarks=learned, clip=0.3)",
        head_dim=11, num_heads=1, dtype=F64,
    )  # fmt: skip
    one.calibrate(*(t[:, :1] for t in qkv(97, dim=11, seed=5)[:2]))
    sums, limited = (call(q, k, v, causal=causal) for call in (one.partial, one.limited_partial))
    raised = torch.exp(sums.log_scale - limited.log_scale) * sums.den < 0.99 * limited.den
    assert raised.any() and not raised.all()

    def call(marks_q, marks_k):
        own = {"marks_q": marks_q, "marks_k": marks_k}
        return torch.func.functional_call(one, own, (q, k, v), {"causal": causal})

    assert torch.autograd.gradcheck(call, (one.marks_q, one.marks_k))


# ---- what is refused ----------------------------------------------------------------------


def test_refusals_say_why():
    q, k, v = qkv(7)
    with pytest.raises(sq.CalibrationError, match="needs calibrate"):
        calibrated()(q, k, v)
    with pytest.raises(sq.OptionError, match="calibrate needs landmarks=calibrated or learned"):
        build().calibrate(q, k)
    with pytest.raises(sq.UnsupportedError, match="would leak the future"):
        build()(q, k, v, causal=True)
    with pytest.raises(sq.OptionError, match="scale=0.0 must be > 0"):
        build()(q, k, v, scale=0.0)


def test_wrong_options_are_reported_together():
    with pytest.raises(sq.OptionError) as caught:
        sq.KernelNystromConfig(features=1, landmarks="all", gauge="mean", ridge=0.0, clip=1.0)
    for part in (
        "features=1 must be an integer ≥ 2",
        "landmarks='all' is none of call, calibrated",
        "gauge='mean' is none of",
        "ridge=0.0 must be a number > 0",
        "clip=1.0 must be < 1",
    ):
        assert part in str(caught.value)
