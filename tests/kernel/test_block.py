"""The block engine against every key pair spelled out, in float64; its operators and memory."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import subquad as sq
from subquad.attention.sparse.engine import Pattern, attend, partial
from subquad.kernels import block as engine
from subquad.kernels.block import EMPTY, UNBOUNDED, Layout, block_softmax

F64 = torch.float64

TOLERANCE = 1e-12
"""Of float64 results, relative to their largest value, or to 1 (the size of the terms that cancel
in a gradient). Sums run over fewer than 200 keys of
width ≤ 7 and logits stay below 10 in size, so that a weight carries ≤ 10·1.1e-16 of error and a
sum ≤ 200·10·1.1e-16 = 2.2e-13; a gradient passes two such sums."""


def random(*shape, seed=0, dtype=F64, grad=False):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=F64).to(dtype).requires_grad_(grad)


def tensors(queries, keys, *, batch=2, heads=6, kv=3, dim=5, value=7, **how):
    return (
        random(batch, heads, queries, dim, seed=1, **how),
        random(batch, kv, keys, dim, seed=2, **how),
        random(batch, kv, keys, value, seed=3, **how),
    )


def layout(**changes):
    plain = {
        "block": 8, "left": 3, "right": 2, "aligned": False, "span": True, "causal": False,
        "offset": 0, "dilation": 1,
    }  # fmt: skip
    return Layout(**{**plain, **changes})


def spelled(lay, batch, kv, queries, keys, table=None, key=None, segments=None):
    """bool (B, Hkv, L, S): whether query i reads key j, pair by pair, from the definition."""
    read = torch.zeros(batch, kv, queries, keys, dtype=torch.bool)
    first_block = lay.offset // lay.block
    for b, h, i, j in itertools.product(*map(range, (batch, kv, queries, keys))):
        p = i + lay.offset
        near = False
        if lay.span and lay.aligned:
            away = j // lay.block - p // lay.block
            near = -lay.left <= away <= lay.right and abs(away) >= lay.skip
            near = near and j % lay.block >= lay.block - (lay.width or lay.block)
        elif lay.span:
            steps = [n for n in range(-lay.left, lay.right + 1) if abs(n) >= lay.skip]
            near = any(j == p + lay.dilation * n for n in steps)
        if table is not None:
            near = near or j // lay.block in table[h % len(table), p // lay.block - first_block]
        near = near and not (lay.causal and j > p)
        near = near and (key is None or bool(key[b, j]))
        same = segments is None or bool(segments[0][b, i] == segments[1][b, j])
        read[b, h, i, j] = near and same
    return read


def naive(q, k, v, read, scale):
    """out and lse, `EMPTY` where nothing is read."""
    groups = q.shape[1] // k.shape[1]
    q, k, v, read = q.double(), *(t.repeat_interleave(groups, 1) for t in (k, v, read))
    logits = scale * q @ k.double().mT
    empty = ~read.any(-1, keepdim=True)
    logits = logits.masked_fill(~read, -math.inf).masked_fill(empty, 0.0)
    weights = torch.softmax(logits, -1).masked_fill(empty, 0.0)
    lse = torch.logsumexp(logits, -1).masked_fill(empty[..., 0], EMPTY)
    return weights @ v.double(), lse


def close(found, wanted, tolerance=TOLERANCE):
    assert found.shape == wanted.shape
    error = (found.double() - wanted).abs().max().item()
    assert error <= tolerance * max(wanted.abs().max().item(), 1.0), f"{error:.3e}"


def check(lay, queries, keys, *, table=None, key=None, segments=None, kv=3, value=7):
    """Output, log-sum-exp and gradients of both."""
    q, k, v = tensors(queries, keys, kv=kv, value=value, grad=True)
    read = spelled(lay, 2, kv, queries, keys, table, key, segments)
    found = block_softmax(
        q, k, v, lay, scale=0.7, table=table, key=key, segments=segments, need_lse=True
    )
    wanted = naive(q, k, v, read, 0.7)
    for a, b in zip(found, wanted, strict=True):
        close(a, b)
    out_bar = random(*wanted[0].shape, seed=4)
    lse_bar = random(*wanted[1].shape, seed=5).masked_fill(wanted[1].detach() == EMPTY, 0.0)
    for cotangents in ((out_bar, lse_bar), (out_bar, None), (None, lse_bar)):
        pairs = [
            [(t, bar) for t, bar in zip(pair, cotangents, strict=True) if bar is not None]
            for pair in (found, wanted)
        ]
        grads = [
            torch.autograd.grad(
                [t for t, _ in pair], (q, k, v), [bar for _, bar in pair],
                retain_graph=True, materialize_grads=True,
            )
            for pair in pairs
        ]  # fmt: skip
        for a, b in zip(*grads, strict=True):
            close(a, b)
    alone, none = block_softmax(q, k, v, lay, scale=0.7, table=table, key=key, segments=segments)
    assert none is None and torch.equal(alone, found[0])


def drawn_table(rows, lay, queries, keys, slots, seed=9):
    """Random key blocks of each query block outside its span, no repetition, some −1."""
    generator = torch.Generator().manual_seed(seed)
    first, last = lay.offset // lay.block, (lay.offset + queries - 1) // lay.block
    count = -(-keys // lay.block)
    table = torch.full((rows, last - first + 1, slots), -1)
    for row in range(rows):
        for own in range(first, last + 1):
            free = [
                b for b in range(count) if not (lay.span and own - lay.left <= b <= own + lay.right)
            ]
            order = torch.randperm(len(free), generator=generator)[: slots - own % 2]
            for slot, index in enumerate(order.tolist()):
                table[row, own - first, slot] = free[index]
    return table


SIZES = [(71, 71), (17, 71), (71, 17), (1, 23), (23, 1), (1, 1), (64, 64)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), SIZES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"left": 0, "right": 0},
        {"left": 11, "right": 0, "block": 5},
        {"left": 100, "right": 100},
        {"left": 2, "right": 3, "dilation": 3},
        {"left": 1, "right": 0, "dilation": 80},
        {"aligned": True, "left": 1, "right": 1},
        {"aligned": True, "left": 0, "right": 2, "block": 7},
        {"aligned": True, "left": 0, "right": 0, "block": 128},
        {"left": 9, "right": 5, "skip": 3},
        {"left": 9, "right": 1, "skip": 2, "dilation": 2},
        {"left": 70, "right": 70, "skip": 1, "block": 5},
        {"aligned": True, "left": 5, "right": 2, "skip": 1},
        {"aligned": True, "left": 5, "right": 2, "skip": 2, "width": 3, "block": 5},
    ],
)
def test_spans(options, queries, keys, causal):
    """Windows in tokens and in blocks, end-aligned at any lengths: offsets of both signs."""
    check(layout(**options, causal=causal, offset=keys - queries), queries, keys)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [*SIZES, (71, 3)])
@pytest.mark.parametrize(
    "options",
    [
        {"left": 11, "right": 9, "skip": 1},
        {"left": 30, "right": 30, "skip": 13},
        {"left": 3, "right": 3, "skip": 4},
        {"left": UNBOUNDED, "right": UNBOUNDED, "skip": 1, "dilation": 5},
        {"left": 2, "right": 1, "skip": 1, "aligned": True},
        {"left": 3, "right": 3, "skip": 2, "aligned": True},
    ],
)
def test_gaps(options, queries, keys, causal):
    """Spans without the keys that lie nearest."""
    check(bounded(layout(**options, causal=causal, offset=keys - queries)), queries, keys)


def bounded(lay):
    """`spelled` counts the steps one by one."""
    return replace(lay, left=min(lay.left, 80), right=min(lay.right, 80))


def test_unbounded_reach():
    q, k, v = tensors(71, 71)
    lay = layout(left=UNBOUNDED, right=UNBOUNDED, skip=1, dilation=5)
    for causal in (False, True):
        wide, near = replace(lay, causal=causal), replace(bounded(lay), causal=causal)
        found, wanted = (block_softmax(q, k, v, one, scale=0.7)[0] for one in (wide, near))
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [*SIZES, (3, 5), (13, 70)])
@pytest.mark.parametrize(("width", "left"), [(3, 1), (3, 9), (1, 2), (8, 9)])
def test_columns(width, left, queries, keys, causal):
    """The last keys of every block of 8 but one's own; of 5 keys there are none."""
    offset = keys - queries
    lay = layout(
        aligned=True, left=left, right=left, skip=1, width=width, causal=causal, offset=offset
    )
    check(lay, queries, keys)
    key = random(2, keys, seed=6) > 0.3
    segments = tuple(torch.arange(n).expand(2, -1) * 3 // n for n in (queries, keys))
    check(lay, queries, keys, key=key, segments=segments)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("span", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("queries", "keys"), SIZES)
def test_tables(queries, keys, rows, span, causal):
    """Gathered blocks, one table for all heads or one a key/value head, beside a span or alone."""
    lay = layout(
        aligned=True, left=1, right=0, span=span, causal=causal, offset=keys - queries, block=8
    )
    check(lay, queries, keys, table=drawn_table(rows, lay, queries, keys, 3))


def test_a_table_may_differ_by_batch_row():
    """(B·Hkv) rows of a table are those of (batch, head) pairs."""
    lay = layout(aligned=True, left=0, right=0)
    q, k, v = tensors(43, 43)
    tables = [drawn_table(3, lay, 43, 43, 2, seed=seed) for seed in (1, 2)]
    both, _ = block_softmax(q, k, v, lay, scale=0.7, table=torch.cat(tables))
    for row, table in enumerate(tables):
        alone, _ = block_softmax(
            *(t[row : row + 1] for t in (q, k, v)), lay, scale=0.7, table=table
        )
        close(both[row : row + 1], alone)


@pytest.mark.parametrize("span", [False, True])
def test_a_table_without_columns_reads_nothing(span):
    lay = layout(aligned=True, left=1, right=0, span=span)
    check(lay, 23, 23, table=torch.zeros(1, 3, 0, dtype=torch.int64), key=random(2, 23) > 0.3)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("options", [{}, {"dilation": 3}, {"aligned": True}, {"table": 2}], ids=str)
def test_heads_may_be_strided(options, batch):
    """(B, L, H, D) seen as (B, H, L, D), as projections leave it; 48 tokens are whole blocks."""
    options = dict(options)
    slots = options.pop("table", 0)
    if slots:
        options |= {"aligned": True, "left": 0, "right": 0}
    lay = layout(**options)
    table = drawn_table(3, lay, 48, 48, slots) if slots else None
    plain = tensors(48, 48, batch=batch, grad=True)
    strided = [
        t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in plain
    ]
    assert not any(t.is_contiguous() for t in strided)
    found, wanted = (
        torch.autograd.grad(block_softmax(*x, lay, scale=0.7, table=table)[0].square().sum(), x)
        for x in (strided, plain)
    )
    for a, b in zip(found, wanted, strict=True):
        close(a, b)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"dilation": 3}, {"aligned": True, "left": 1, "right": 1}, {"table": 2}],
    ids=str,
)
@pytest.mark.parametrize("parts", ["key", "segments", "both"])
@pytest.mark.parametrize(("queries", "keys"), [(53, 53), (19, 53), (53, 19)])
def test_key_masks_and_segments(queries, keys, parts, options, causal):
    options = dict(options)
    slots = options.pop("table", 0)
    if slots:
        options |= {"aligned": True, "left": 0, "right": 0}
    lay = layout(**options, causal=causal, offset=keys - queries)
    table = drawn_table(3, lay, queries, keys, slots) if slots else None
    key = random(2, keys, seed=6) > 0.3
    key[0, : keys // 2] = False  # whole windows are empty
    at = torch.arange(queries), torch.arange(keys)
    segments = tuple(
        torch.stack([t * 3 // len(t), t % 2]).contiguous() for t in at
    )  # packed sequences, and interleaved ones
    check(
        lay, queries, keys, table=table, key=None if parts == "segments" else key,
        segments=None if parts == "key" else segments,
    )  # fmt: skip


@pytest.mark.parametrize(("kv", "value"), [(6, 1), (1, 5), (2, 11)])
def test_heads_and_widths(kv, value):
    check(layout(), 37, 37, kv=kv, value=value)
    lay = layout(aligned=True, left=0, right=0)
    check(lay, 37, 37, kv=kv, value=value, table=drawn_table(kv, lay, 37, 37, 2))


@pytest.mark.parametrize("bytes_", [1, 3000, 20000])
def test_the_size_of_a_chunk_of_scores_does_not_matter(monkeypatch, bytes_):
    """Rows are computed one by one, a few, or all together."""
    monkeypatch.setattr(engine, "SCORE_BYTES", bytes_)
    lay = layout(aligned=True, left=1, right=1, causal=True)
    key = random(2, 41, seed=6) > 0.3
    check(lay, 41, 41, table=drawn_table(3, lay, 41, 41, 2), key=key)
    check(layout(), 41, 41, key=key)


@pytest.mark.parametrize("options", [{}, {"dilation": 2}, {"aligned": True, "table": True}])
def test_gradcheck(options):
    """Numerical differentiation of out and lse."""
    options = dict(options)
    with_table = options.pop("table", False)
    lay = layout(block=3, left=1, right=0, **options)
    q, k, v = tensors(7, 7, batch=1, heads=2, kv=1, dim=3, value=2, grad=True)
    table = drawn_table(1, lay, 7, 7, 1) if with_table else None

    def run(q, k, v):
        return block_softmax(q, k, v, lay, scale=0.6, table=table, need_lse=True)

    assert torch.autograd.gradcheck(run, (q, k, v))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("with_table", [False, True])
def test_lower_precision(dtype, with_table):
    """Sums are float32: what is left is the rounding of results, half an ulp, and in gradients
    that of the output saved for Σ ō∘o: another eps/2 of |ō·o|, which enters with weights ≤ 1.
    float32: ≤ 71 roundings of 6e-8 in a sum, and logits < 10 amplify tenfold: 71·10·6e-8 = 4e-5.
    """
    lay = layout(aligned=True, left=1, right=1) if with_table else layout()
    table = drawn_table(3, lay, 71, 71, 2) if with_table else None
    q, k, v = (t.to(dtype).requires_grad_() for t in tensors(71, 71))
    out, lse = block_softmax(q, k, v, lay, scale=0.5, table=table, need_lse=True)
    assert out.dtype == dtype and lse.dtype == torch.float32
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    read = spelled(lay, 2, 3, 71, 71, table)
    wanted = naive(*leaves, read, 0.5)
    eps = max(torch.finfo(dtype).eps, 4e-5)
    close(out, wanted[0], eps)
    close(lse, wanted[1], 4e-5)
    bar = random(*out.shape, seed=8).to(dtype)
    for a, b in zip(
        torch.autograd.grad(out, (q, k, v), bar),
        torch.autograd.grad(wanted[0], leaves, bar.double()),
        strict=True,
    ):
        assert a.dtype == dtype
        close(a, b, 4 * eps)  # √V·(the two roundings) = 2.6·eps of a q̄ or k̄


def test_huge_logits_stay_finite():
    q, k, v = (t.float().requires_grad_() for t in tensors(37, 37))
    out, lse = block_softmax(1e4 * q, k, v, layout(), scale=1.0, need_lse=True)
    assert out.isfinite().all() and lse.isfinite().all()
    for grad in torch.autograd.grad(out.sum() + lse.sum(), (q, k, v)):
        assert grad.isfinite().all()


# ---- operators ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"dilation": 3, "skip": 1}, {"aligned": True}, {"need_lse": False}],
)
def test_operators_are_registered_properly(options):
    """Schema, gradient registration, shapes under fake tensors and dynamic compilation."""
    options = dict(options)
    need_lse = options.pop("need_lse", True)
    lay = layout(**options, causal=True)
    q, k, v = tensors(23, 23, grad=need_lse)
    table = drawn_table(3, lay, 23, 23, 1) if lay.aligned else None
    key = torch.arange(23).expand(2, -1) < torch.tensor([[23], [17]])
    arguments = (
        q, k, v, table, key, None, None, lay.block, lay.left, lay.right, lay.aligned, lay.span,
        lay.causal, lay.offset, lay.dilation, lay.skip, lay.width, 0.7, need_lse,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.subquad.block_softmax.default, arguments)
    if need_lse:
        out, lse = (t.detach() for t in torch.ops.subquad.block_softmax(*arguments))
        backward = tuple(t.detach() if t is not None and i < 3 else t
                         for i, t in enumerate(arguments[:-1]))  # fmt: skip
        for bars in ((torch.ones_like(out), None), (None, torch.ones_like(lse))):
            torch.library.opcheck(
                torch.ops.subquad.block_softmax_backward.default, (*backward, out, lse, *bars)
            )


def test_gradients_need_the_log_sum_exp():
    q, k, v = tensors(5, 5, grad=True)
    lay = layout()
    with pytest.raises(RuntimeError, match="need_lse=True"):
        torch.ops.subquad.block_softmax(
            q, k, v, None, None, None, None, lay.block, lay.left, lay.right, False, True, False,
            0, 1, 0, None, 1.0, False,
        )  # fmt: skip


# ---- memory -------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes, in elements, views aside."""

    def __init__(self):
        super().__init__()
        self.elements, self.by = 0, None

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for t in found if isinstance(found, tuple | list) else (found,):
            if isinstance(t, torch.Tensor):
                size = t.untyped_storage().nbytes() // t.element_size()
                if size > self.elements:
                    self.elements, self.by = size, function
        return found


class Made(TorchDispatchMode):
    """Adds up the elements of all tensors that operations make, not those they change or view."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        old = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        if isinstance(found, torch.Tensor) and found.untyped_storage().data_ptr() not in old:
            self.elements += found.numel()
        return found


def test_strided_heads_are_not_copied_for_every_block():
    """What is made grows with the length, not with its square: a table gathers from one copy.

    Four times the tokens are four times the blocks, each with tensors of the same sizes, and four
    times the elements of q, k, v and their gradients: 4 times, exactly. With one copy of all keys
    for each block as well, 6.8 times.
    """
    made = []
    for length in (512, 2048):
        lay = layout(block=32, left=0, right=0, aligned=True)
        q, k, v = (
            random(1, length, 2, 4, seed=n, dtype=torch.float32).transpose(1, 2) for n in range(3)
        )
        table = drawn_table(2, lay, length, length, 1)
        arguments = (
            q, k, v, table, None, None, None, lay.block, lay.left, lay.right, lay.aligned,
            lay.span, lay.causal, lay.offset, lay.dilation, lay.skip, lay.width, 0.3,
        )  # fmt: skip
        with Made() as seen:
            out, lse = engine._block_softmax._init_fn(*arguments, True)
            engine._block_softmax_backward._init_fn(*arguments, out, lse, out, None)
        made.append(seen.elements)
    assert made[1] <= 4 * made[0], made


def test_one_query_copies_its_keys_alone():
    """A step of decoding: 2047 keys are no whole blocks of 32, and need not be.

    A span of 31 + 32 keys (sliced, but joined with those gathered for the values) and 2·32
    gathered ones, of width 4 for k and for v; scores, masks and indices of as many keys take a
    few times 128 more: far from the 2·2047·4 elements of one copy of k.
    """
    lay = layout(block=32, left=1, right=0, aligned=True, causal=True, offset=2046)
    q, k, v = tensors(1, 2047, batch=1, heads=2, kv=2, dim=4, value=4, dtype=torch.float32)
    table = torch.tensor([[[3, 17]], [[8, 60]]])
    with Made() as seen:
        engine._block_softmax._init_fn(
            q, k, v, table, None, None, None, lay.block, lay.left, lay.right, lay.aligned,
            lay.span, lay.causal, lay.offset, lay.dilation, lay.skip, lay.width, 0.3, False,
        )  # fmt: skip
    assert seen.elements < k.numel(), seen.elements


@pytest.mark.parametrize("kind", ["tokens", "dilated", "unbounded", "blocks", "table"])
def test_no_tensor_is_larger_than_the_inputs_or_a_chunk(kind):
    """8192 queries and keys: L·S would be 67M elements, q has 131k."""
    length, batch, heads, dim = 8192, 1, 2, 8
    lay = {
        "tokens": layout(block=64, left=100, right=31),
        "dilated": layout(block=64, left=50, right=50, dilation=7),
        "unbounded": layout(block=64, left=UNBOUNDED, right=UNBOUNDED, dilation=32, skip=1),
        "blocks": layout(block=64, left=1, right=1, aligned=True),
        "table": layout(block=64, left=1, right=1, aligned=True, causal=True),
    }[kind]
    table = drawn_table(heads, lay, length, length, 3) if kind == "table" else None
    key = torch.arange(length)[None] % 5 > 0
    q, k, v = tensors(length, length, batch=batch, heads=heads, kv=heads, dim=dim, value=dim,
                      dtype=torch.float32)  # fmt: skip
    arguments = (
        q, k, v, table, key, None, None, lay.block, lay.left, lay.right, lay.aligned, lay.span,
        lay.causal, lay.offset, lay.dilation, lay.skip, lay.width, 0.3,
    )  # fmt: skip
    limit = max(q.numel() + 64 * 2 * heads * dim, engine.SCORE_BYTES // 4)
    with Largest() as seen:
        out, lse = engine._block_softmax._init_fn(*arguments, True)
        engine._block_softmax_backward._init_fn(*arguments, out, lse, out, lse)
    assert 0 < seen.elements <= limit, f"{seen.by} made {seen.elements} elements"


# ---- patterns -----------------------------------------------------------------------------

PATTERNS = [
    Pattern(5, 2),
    Pattern(0, 0),
    Pattern(2, 3, dilation=4),
    Pattern(1, 1, block=8),
    Pattern(2, 0, block=5),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(41, 41), (13, 41), (41, 13), (1, 41)])
def test_a_pattern_says_what_is_read(queries, keys, pattern, causal):
    """Weights are positive exactly where `Pattern.allowed` and the mask say."""
    _reads_what_it_says(pattern, queries, keys, causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(41, 41), (13, 41), (41, 13), (1, 41)])
def test_a_pattern_with_a_table_says_what_is_read(queries, keys, window, causal):
    lay = layout(aligned=True, left=1, right=1, span=window, offset=keys - queries)
    table = drawn_table(3, lay, queries, keys, 2)
    side = 1 if window else None
    _reads_what_it_says(Pattern(side, side, block=8, table=table), queries, keys, causal)


def _reads_what_it_says(pattern, queries, keys, causal):
    mask = sq.Mask(causal=causal)
    q, k, _ = tensors(queries, keys)
    eye = torch.eye(keys, dtype=F64).expand(2, 3, keys, keys)
    weights = attend(q, k, eye, mask, pattern, 0.7)
    told = pattern.allowed(queries, keys) & mask.to_dense(queries, keys)
    told = told.expand(3, -1, -1).repeat_interleave(2, 0)
    assert torch.equal(weights > 0, told.expand_as(weights))
    sums = partial(q, k, eye, mask, pattern, 0.7)
    close(sums.output(), weights)
    close(weights.sum(-1), sums.den)
    assert torch.equal(sums.den > 0, told.any(-1).expand_as(sums.den))


def test_a_window_mask_narrows_a_window():
    q, k, v = tensors(41, 41)
    near = sq.Mask(window=(6, 1))
    for pattern in (Pattern(5, 2), Pattern(3, 3, dilation=2)):
        read = pattern.allowed(41, 41) & near.to_dense(41, 41)
        wanted, _ = naive(q, k, v, read.expand(2, 3, -1, -1), 0.7)
        close(attend(q, k, v, near, pattern, 0.7), wanted)
