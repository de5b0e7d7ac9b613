"""Nyströmformer attention: segments, the inverse, limits, what is refused."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import subquad as sq
from subquad.attention.summary.nystrom import iterative_inverse, segment_means, segments

F64 = torch.float64


def draw(*shape, seed=0, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    return size * torch.randn(*shape, generator=generator, dtype=F64)


def build(heads=4, dim=5, **options):
    return sq.build("nystrom", head_dim=dim, num_heads=heads, dtype=F64, **options)


def close(found, wanted, tolerance):
    error = (found - wanted).abs().max().item()
    assert error <= tolerance * wanted.abs().max().item(), f"{error:.3e}"


# ---- segments -----------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "count"), [(23, 7), (21, 7), (5, 7), (1, 3), (17, 1)])
def test_segments_are_contiguous_and_of_nearly_equal_size(length, count):
    index, sizes = segments(None, length, count, torch.device("cpu"))
    used = min(count, length)
    assert index.shape == (1, length) and sizes.shape == (1, count)
    assert (index.diff() >= 0).all() and index.max() == used - 1
    assert sizes.sum() == length
    assert set(sizes[0, :used].tolist()) <= {length // used, -(-length // used)}
    assert not sizes[0, used:].any()
    assert sizes[0].tolist() == [int((index[0] == s).sum()) for s in range(count)]


def test_each_row_cuts_its_own_open_tokens():
    key = torch.tensor([[1, 1, 0, 1, 0, 1, 1], [0, 0, 0, 0, 1, 0, 0], [0] * 7], dtype=torch.bool)
    index, sizes = segments(key, 7, 2, torch.device("cpu"))
    assert index.tolist() == [[0, 0, 2, 0, 2, 1, 1], [2, 2, 2, 2, 0, 2, 2], [2] * 7]
    assert sizes.tolist() == [[3, 2], [1, 0], [0, 0]]
    x = draw(3, 2, 7, 5)
    wanted = torch.stack([x[0, :, [0, 1, 3]].mean(1), x[0, :, [5, 6]].mean(1)], 1)
    found = segment_means(x.masked_fill(~key[:, None, :, None], torch.nan), index, sizes)
    close(found[0], wanted, 1e-15)  # one division and three sums
    assert torch.equal(found[1, :, 0], x[1, :, 4])
    assert not found[1, :, 1].any() and not found[2].any()


def test_segments_are_the_reshape_where_it_divides():
    x = draw(2, 3, 35, 5)
    found = segment_means(x, *segments(None, 35, 7, torch.device("cpu")))
    close(found, x.unflatten(2, (7, 5)).mean(3), 1e-15)


# ---- the inverse --------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(7, 7), (7, 4), (4, 7)])
def test_iterative_inverse_converges_to_the_pseudo_inverse(shape):
    matrix = torch.softmax(3.0 * draw(2, 3, *shape), -1)
    values = torch.linalg.svdvals(matrix)
    level = matrix.abs()
    norms = level.sum(-2).amax(-1) * level.sum(-1).amax(-1)
    # An eigenvalue λ of A Z₀ grows by 13/4 a step while it is small, then 1 − λ is cubed.
    least = (values[..., -1].square() / norms).min().item()
    steps = int(torch.tensor(1 / least).log() / torch.tensor(13 / 4).log()) + 6
    found = iterative_inverse(matrix, steps)
    wanted = torch.linalg.pinv(matrix)
    # Rounding of A Z is amplified by the condition once on each side.
    condition = (values[..., 0] / values[..., -1]).max().item()
    close(found, wanted, 100 * 2.2e-16 * condition**2)
    few = iterative_inverse(matrix, 2)
    assert (few - wanted).norm() > 0.1 * wanted.norm()  # the test can fail


def test_one_step_contracts_as_its_polynomial():
    """1 − λ → (1 − λ)³ (1 − λ/4), on every eigenvalue λ of A Z."""
    values = torch.tensor([1.0, 0.7, 0.31], dtype=F64)
    found = iterative_inverse(torch.diag(values), 1).diagonal() * values
    start = values**2 / values.max() ** 2  # both norms of a diagonal matrix are its largest entry
    close(1 - found, (1 - start) ** 3 * (1 - start / 4), 1e-14)


def test_zero_matrices_and_zero_rows_stay_zero():
    assert not iterative_inverse(torch.zeros(2, 3, 3)).any()
    block = torch.softmax(3.0 * draw(4, 3), -1)
    wide = torch.zeros(6, 5, dtype=F64)
    wide[:4, :3] = block
    found = iterative_inverse(wide)
    close(found[:3, :4], iterative_inverse(block), 1e-13)
    assert not found[3:].any() and not found[:, 4:].any()


def test_a_row_does_not_depend_on_its_batch():
    """Norms of each matrix: with one maximum over the batch, other rows change the result."""
    mech = build(landmarks=7)
    q, k, v = draw(2, 4, 35, 5), draw(2, 4, 35, 5, seed=1), draw(2, 4, 35, 3, seed=2)
    q[1] *= 9.0
    both = mech(q, k, v)
    close(both[:1], mech(q[:1], k[:1], v[:1]), 1e-12)


# ---- limits -------------------------------------------------------------------------------

# A A⁺ A = A up to singular values under 71·2^-52, and rounding of as many sums: 1e-13; with
# a margin for the outer factors, which are computed apart from the middle one.
LIMIT = 1e-11


@pytest.mark.parametrize("queries", [43, 71, 11])
def test_as_many_landmarks_as_tokens_is_softmax(queries):
    mech = sq.build("nystrom(landmarks=71, inverse=exact)", head_dim=5, num_heads=6, num_kv_heads=3)
    q, k, v = draw(2, 6, queries, 5), draw(2, 3, 71, 5, seed=1), draw(2, 3, 71, 7, seed=2)
    mask = torch.rand(2, 71, generator=torch.Generator().manual_seed(3)) > 0.4
    for key in (None, mask):
        wanted = sq.attention(q, k, v, "softmax", key_mask=key)
        found = mech(q, k, v, key_mask=key)
        if key is not None and queries == 71:  # queries that are landmarks: the open ones
            rows = mask[:, None, :, None]
            found, wanted = found.masked_fill(~rows, 0.0), wanted.masked_fill(~rows, 0.0)
        close(found, wanted, LIMIT)


def test_more_landmarks_than_tokens_change_nothing():
    q, k, v = (draw(1, 4, 13, 5, seed=s) for s in range(3))
    close(build(landmarks=64)(q, k, v), build(landmarks=13)(q, k, v), 1e-12)


def test_one_landmark_reads_every_key_with_the_mean_query():
    """Z = 1/1: every query gets the attention of the mean query."""
    q, k, v = (draw(2, 4, 19, 5, seed=s) for s in range(3))
    wanted = sq.attention(q.mean(2, keepdim=True), k, v, "softmax")
    for inverse in ("exact", "iterative"):
        close(build(landmarks=1, inverse=inverse)(q, k, v), wanted.expand(-1, -1, 19, -1), 1e-13)


def slow_walk(step):
    """q, k that drift along the sequence by about `step` a token, v of noise; 4 heads, D = 5."""
    generator = torch.Generator().manual_seed(4)
    steps = torch.randn(2, 1, 4, 256, 5, generator=generator, dtype=F64)
    q, k = step * steps.cumsum(3)
    v = torch.randn(1, 4, 256, 5, generator=generator, dtype=F64)
    exact = sq.attention(q, k, v, "softmax")
    uniform = (v.mean(2, keepdim=True) - exact).norm()

    def error(**options):
        return ((build(**options)(q, k, v) - exact).norm() / uniform).item()

    return error


@pytest.mark.parametrize("options", [{"inverse": "exact"}, {"iterations": 10}, {"iterations": 6}])
def test_more_landmarks_are_better_where_neighbours_are_alike(options):
    """What segment means assume. The error, relative to that of uniform attention, falls with
    the landmarks; six steps leave a floor along small singular values.
    """
    error = slow_walk(0.1)
    few, some, many = (error(landmarks=m, **options) for m in (8, 32, 128))
    assert few > some > many
    assert many < 0.1


def test_few_steps_regularise_what_the_exact_inverse_amplifies():
    """A middle matrix of small singular values multiplies the landmarks' interpolation error:
    with the exact inverse attention is then far worse than uniform, with six steps it is not.
    """
    error = slow_walk(0.35)
    assert error(landmarks=32, inverse="exact") > 100
    assert error(landmarks=32) < 0.5


# ---- masks, lengths -----------------------------------------------------------------------


def test_queries_at_masked_positions_are_no_landmarks():
    mech = build(landmarks=5)
    q, k, v = (draw(2, 4, 23, 5, seed=s) for s in range(3))
    mask = torch.arange(23) < torch.tensor([17, 23])[:, None]
    junk = q.masked_fill(~mask[:, None, :, None], 1e3)
    close(mech(junk, k, v, key_mask=mask)[0, :, :17], mech(q, k, v, key_mask=mask)[0, :, :17], 0.0)


def test_all_queries_are_landmarks_where_lengths_differ():
    mech = build(landmarks=5)
    q, k, v = (draw(2, 4, n, 5, seed=s) for s, n in enumerate((23, 29, 29)))
    mask = torch.arange(29) < 17
    wanted = mech(q, k[:, :, :17], v[:, :, :17])
    close(mech(q, k, v, key_mask=mask), wanted, 1e-12)
    changed = q.clone()
    changed[:, :, 22] += 1.0
    moved = mech(changed, k, v, key_mask=mask) - wanted
    assert moved[:, :, 0].abs().max() > 1e-6


def test_rows_with_fewer_keys_than_landmarks():
    mech = build(landmarks=11, inverse="exact")
    q, k, v = (draw(2, 4, 17, 5, seed=s) for s in range(3))
    mask = torch.arange(17) < torch.tensor([3, 17])[:, None]
    out = mech(q, k, v, key_mask=mask)
    wanted = sq.attention(q[:1, :, :3], k[:1, :, :3], v[:1, :, :3], "softmax")
    close(out[:1, :, :3], wanted, LIMIT)


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


def test_no_tensor_of_queries_by_keys_or_by_landmarks():
    """Forward and backward, masked: nothing is larger than the inputs, L·D, where D < m < L."""
    length, dim, landmarks = 4096, 5, 16
    mech = sq.build("nystrom", head_dim=dim, num_heads=1, landmarks=landmarks)
    q, k, v = (torch.randn(1, 1, length, dim, requires_grad=True) for _ in range(3))
    mask = torch.rand(1, length) > 0.3
    with Largest() as largest:
        mech(q, k, v, key_mask=mask).sum().backward()
    assert largest.size <= length * dim


# ---- the convolution ----------------------------------------------------------------------


def test_convolution_is_added_to_the_attention():
    q, k, v = (draw(2, 4, 23, 5, seed=s) for s in range(3))
    mech = build(landmarks=7, conv_kernel=3)
    plain = build(landmarks=7)(q, k, v)
    with torch.no_grad():
        mech.conv_weight.zero_()
        close(mech(q, k, v), plain, 0.0)
        mech.conv_weight[:, 0] = 1.0  # the first tap reads the token before
    shifted = torch.cat([torch.zeros_like(v[:, :, :1]), v[:, :, :-1]], 2)
    close(mech(q, k, v) - plain, shifted, 1e-14)


def test_convolution_is_drawn_by_the_seed_and_trains():
    first, again, other = (build(conv_kernel=33, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.conv_weight, again.conv_weight)
    assert not torch.equal(first.conv_weight, other.conv_weight)
    assert first.conv_weight.abs().max() <= 33**-0.5
    q = draw(1, 4, 50, 5)
    first(q, q, q).square().sum().backward()
    assert first.conv_weight.grad.abs().min() > 0


# ---- what is refused ----------------------------------------------------------------------


def test_wrong_options_are_reported_together():
    with pytest.raises(sq.OptionError) as caught:
        sq.NystromConfig(landmarks=0, inverse="exactly", iterations=0, conv_kernel=4)
    for part in (
        "landmarks=0 must be an integer ≥ 1",
        "inverse='exactly' is none of iterative, exact (did you mean 'exact'?)",
        "iterations=0 must be an integer ≥ 1",
        "conv_kernel=4 must be odd",
    ):
        assert part in str(caught.value)


def test_refusals_say_why():
    q = draw(1, 4, 9, 5)
    with pytest.raises(sq.UnsupportedError, match="would leak the future"):
        build()(q, q, q, causal=True)
    with pytest.raises(sq.UnsupportedError, match="needs L = S"):
        build(conv_kernel=3)(q[:, :, :3], q, q)
    with pytest.raises(sq.UnsupportedError, match="learned parameters"):
        sq.attention(q, q, q, "nystrom(conv_kernel=3)")
