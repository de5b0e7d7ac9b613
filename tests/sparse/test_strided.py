"""Strided attention beyond the laws: what the patterns are, exact limits, decoding, errors."""

import pytest
import torch

import subquad as sq
from laws import close
from subquad.attention.sparse.strided import Strided
from variants import inputs, make


def read(spec, length, row, **call):
    """Keys that a query reads, from the implied weights."""
    mech = sq.build(spec, head_dim=5, num_heads=2, dtype=torch.float64)
    q, k, _ = inputs(length, length, batch=1, heads=2, kv=2)
    return mech.weights(q, k, rows=[row], **call)[0, 0, 0].nonzero().flatten().tolist()


def test_every_leaves_gaps_of_two_and_of_one():
    assert read("strided(pattern=every, stride=3)", 10, 4) == [1, 4, 7]
    assert read("strided(pattern=every, stride=2)", 10, 4) == [0, 2, 4, 6, 8]
    assert read("strided(pattern=every, stride=2, reach=1)", 10, 4) == [2, 4, 6]


def test_sparse_is_the_union_of_the_papers_two_sets():
    """Child et al. 2019, §4.2: {t, …, i} with t = max(0, i − l), and (i − j) mod l = 0."""
    stride = 5
    for i in range(29):
        near = set(range(max(0, i - stride), i + 1))
        every = {j for j in range(i + 1) if (i - j) % stride == 0}
        found = read(f"strided(stride={stride}, reach=none)", 29, i, causal=True)
        assert found == sorted(near | every)


def test_fixed_is_the_union_of_the_papers_two_sets():
    """Child et al. 2019, §4.2: ⌊j/l⌋ = ⌊i/l⌋, and j mod l ∈ {l − c, …, l − 1}; j ≤ i."""
    stride, columns = 6, 2
    for i in range(29):
        own = {j for j in range(i + 1) if j // stride == i // stride}
        some = {j for j in range(i + 1) if j % stride in range(stride - columns, stride)}
        spec = f"strided(pattern=fixed, stride={stride}, columns={columns}, reach=none)"
        assert read(spec, 29, i, causal=True) == sorted(own | some)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "spec",
    [
        "strided(stride=71)",
        "strided(stride=1, reach=none)",
        "strided(pattern=every, stride=1, reach=none)",
        "strided(pattern=fixed, stride=71)",
        "strided(pattern=fixed, stride=5, columns=5, reach=none)",
    ],
)
def test_limits_are_softmax(spec, causal):
    q, k, v = inputs(71, 71)
    close(make(spec)(q, k, v, causal=causal), make("softmax")(q, k, v, causal=causal))


def test_every_with_a_bounded_reach_is_dilated_local_attention():
    q, k, v = inputs(71, 71)
    found = make("strided(pattern=every, stride=3, reach=4)")(q, k, v)
    assert torch.equal(found, make("local(window=4, dilation=3)")(q, k, v))


@pytest.mark.parametrize("pattern", ["sparse", "fixed"])
def test_two_layers_connect_any_two_tokens(pattern):
    """The paper's reason for both patterns: a path of length two from every earlier token."""
    mech = make(f"strided(pattern={pattern}, stride=6, columns={8 if pattern == 'sparse' else 1})")
    for t in range(31):
        first = {t, *mech.reached(t, 31)}
        both = set().union(*({s, *mech.reached(s, 31)} for s in first))
        # fixed: the token itself is handed on by the last column of its block.
        start = t if pattern == "sparse" else (t // 6 + 1) * 6
        assert both >= set(range(start, 31))


@pytest.mark.parametrize(
    "spec",
    [
        "strided(stride=7, reach=none)",
        "strided(stride=7, reach=2)",
        "strided(pattern=every, stride=3, reach=0)",
        "strided(pattern=every, stride=3, reach=none)",
        "strided(pattern=fixed, stride=7, columns=2, reach=3)",
    ],
)
def test_a_step_reads_the_patterns_keys_alone(spec, monkeypatch):
    """One token after another, none of it by the engine that walks through all keys."""
    mech = make(spec)
    q, k, v = inputs(71, 71)
    whole = mech(q, k, v, causal=True)
    _, state = mech.prefill(*(t[:, :, :50] for t in (q, k, v)))

    def refuse(*args):
        raise AssertionError("a step ran the whole pattern")

    monkeypatch.setattr(Strided, "_attend", refuse)
    for t in range(50, 71):
        out, state = mech.step(*(x[:, :, t : t + 1] for x in (q, k, v)), state)
        close(out, whole[:, :, t : t + 1])


def test_a_step_is_differentiable():
    mech = make("strided(stride=5, reach=none)")
    q, k, v = inputs(37, 37, grad=True)
    _, state = mech.prefill(*(t[:, :, :36] for t in (q, k, v)))
    out, _ = mech.step(*(t[:, :, 36:] for t in (q, k, v)), state)
    wanted = mech(q, k, v, causal=True)[:, :, 36:]
    for a, b in zip(
        torch.autograd.grad(out.square().sum(), (q, k, v)),
        torch.autograd.grad(wanted.square().sum(), (q, k, v)),
        strict=True,
    ):
        close(a, b)


@pytest.mark.parametrize(
    ("spec", "most"),
    [
        ("strided(stride=7, reach=2)", 14),
        ("strided(stride=7, reach=0)", 6),
        ("strided(pattern=every, stride=3, reach=4)", 12),
        ("strided(pattern=fixed, stride=7, columns=2, reach=2)", 2 * 7 + 6),
    ],
)
def test_what_is_out_of_reach_is_forgotten(spec, most):
    mech = make(spec)
    q, k, v = inputs(71, 71)
    state, sizes = None, []
    for t in range(71):
        _, state = mech.step(*(x[:, :, t : t + 1] for x in (q, k, v)), state)
        sizes.append(state.k.shape[2])
    assert max(sizes) == most
    assert state.nbytes == 2 * 3 * state.k.shape[2] * (5 + 7) * 8


def test_a_state_with_all_keys_is_read():
    mech = make("strided(stride=5, reach=none)")
    q, k, v = inputs(3, 37)
    _, state = mech.prefill(inputs(37, 37)[0], k, v)
    out, after = mech.step(q, None, None, state)
    close(out, mech(q, k, v))
    assert after is state


def test_declared_cost_is_linear_beyond_the_reach():
    about = sq.describe("strided")
    assert about.flops(2**24) / about.flops(2**23) == pytest.approx(2.0, abs=0.01)
    square = sq.describe("strided(reach=none)")
    assert square.flops(2**24) / square.flops(2**23) == pytest.approx(4.0, abs=0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": "fix"}, "pattern='fix' is none of sparse, every, fixed"),
        ({"stride": 0}, "stride=0 must be an integer ≥ 1"),
        ({"reach": -1}, "reach=-1 must be an integer ≥ 0"),
        ({"pattern": "fixed", "columns": 0}, "columns=0 must be an integer ≥ 1"),
        (
            {"pattern": "fixed", "columns": 9, "stride": 8},
            "columns=9 must be ≤ stride=8, the size of a block",
        ),
        ({"columns": 3}, "columns=3 is of pattern=fixed alone, given sparse"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(sq.OptionError) as caught:
        sq.build("strided", head_dim=5, num_heads=2, **options)
    assert message in str(caught.value)


def test_fixed_takes_no_window():
    q, k, v = inputs(7, 7)
    with pytest.raises(sq.UnsupportedError, match="counts whole blocks"):
        make("strided(pattern=fixed)")(q, k, v, mask=sq.Mask(window=3))


@pytest.mark.parametrize("spec", ["strided", "near_far(far=none)", "near_far(far=performer)"])
def test_a_query_that_is_not_a_number_has_no_output_of_zeros(spec):
    """Sums over no key give zeros; sums that are NaN stay NaN."""
    q, k, v = (torch.randn(1, 1, 20, 4) for _ in range(3))
    q[0, 0, 7] = torch.nan
    assert sq.attention(q, k, v, spec)[0, 0, 7].isnan().all()
