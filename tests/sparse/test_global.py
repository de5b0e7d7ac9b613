"""Global attention beyond the laws: who reads whom, marked tokens, extra tokens, errors."""

import pytest
import torch

import subquad as sq
from laws import close, reference
from subquad.attention.sparse import global_ as module
from variants import inputs, make


def read(spec, length, row, **call):
    """Keys that a query reads, from the implied weights."""
    mech = sq.build(spec, head_dim=5, num_heads=2, dtype=torch.float64)
    q, k, _ = inputs(length, length, batch=1, heads=2, kv=2)
    return mech.weights(q, k, rows=[row], **call)[0, 0, 0].nonzero().flatten().tolist()


def test_who_reads_whom():
    spec = "global(tokens=[2, -1])"
    assert read(spec, 7, 4) == [2, 4, 6]
    assert read(spec, 7, 2) == read(spec, 7, 6) == list(range(7))
    assert read(spec, 7, 4, causal=True) == [2, 4]
    assert read(spec, 7, 2, causal=True) == [0, 1, 2]
    assert read("global(tokens=[2, 5], own=false)", 7, 4) == [2, 5]
    assert read("global(tokens=3)", 7, 5) == [0, 1, 2, 5]
    assert read("global(tokens=[2, 90])", 7, 5) == [2, 5]


def test_one_global_token_alone_gives_everyone_its_value():
    mech = make("global(tokens=[3], own=false)")
    q, k, v = inputs(23, 23)
    out = mech(q, k, v)
    others = [i for i in range(23) if i != 3]
    close(out[:, :, others], v[:, :, 3:4].repeat_interleave(2, 1).expand(-1, -1, 22, -1))
    assert not mech(q, k, v, causal=True)[:, :, :3].any()


def test_two_positions_that_coincide_count_once():
    q, k, v = inputs(5, 5)
    close(make("global(tokens=[1, -4])")(q, k, v), make("global(tokens=[1])")(q, k, v))
    one = [t[:, :, :1] for t in (q, k, v)]
    close(make("global(tokens=[0, -1])")(*one), one[2].repeat_interleave(2, 1))


@pytest.mark.parametrize("causal", [False, True])
def test_all_tokens_global_is_softmax(causal):
    q, k, v = inputs(71, 71)
    found = make("global(tokens=71)")(q, k, v, causal=causal)
    close(found, make("softmax")(q, k, v, causal=causal))


@pytest.mark.parametrize("step", [1, 3000, 10**5])
def test_chunks_of_queries_do_not_matter(monkeypatch, step):
    mech = make("global(tokens=[1, 11], extra=2)")
    mask = sq.Mask(key=torch.arange(71) % 5 > 0)
    q, k, v = inputs(71, 71, grad=True)
    whole = mech(q, k, v, mask=mask)
    wanted = torch.autograd.grad(whole.square().sum(), (q, k, v, mech.extra_query))
    monkeypatch.setattr(module, "CHUNK_BYTES", step)
    out = mech(q, k, v, mask=mask)
    close(out, whole)
    found = torch.autograd.grad(out.square().sum(), (q, k, v, mech.extra_query))
    for a, b in zip(found, wanted, strict=True):
        close(a, b)


# ---- marked tokens ------------------------------------------------------------------------

MARKS = torch.zeros(2, 71, dtype=torch.bool)
MARKS[0, [3, 17, 40, 70]] = True
MARKS[1, 5] = True


@pytest.mark.parametrize("own", ["true", "false"])
@pytest.mark.parametrize(
    "mask",
    [
        sq.Mask(),
        sq.Mask(causal=True, key=torch.arange(71) % 4 > 0),
        sq.Mask(segments=torch.arange(71) // 30),
        sq.Mask(causal=True, prefix=9, window=20),
    ],
    ids=lambda mask: "+".join(mask.kinds()) or "none",
)
@pytest.mark.parametrize("queries", [71, 17])
def test_marked_tokens(queries, mask, own):
    """A different number of global tokens in each row, against the reference."""
    if mask.segments is not None:
        mask = sq.Mask(segments=(mask.segments[-queries:], mask.segments))
    mech = make(f"global(tokens=marked, own={own})")
    q, k, v = inputs(queries, 71, grad=True)
    with mech.marked(MARKS):
        out = mech(q, k, v, mask=mask)
        wanted = reference(mech, q, k, v, mask)
    close(out, wanted)
    for a, b in zip(
        torch.autograd.grad(out.square().sum(), (q, k, v)),
        torch.autograd.grad(wanted.square().sum(), (q, k, v)),
        strict=True,
    ):
        close(a, b)


def test_marks_move_with_the_tokens():
    """Left and middle padding equal the compacted row: positions play no part."""
    mech = make("global(tokens=marked)")
    q, k, v = inputs(71, 71)
    key = torch.arange(71) % 3 > 0
    with mech.marked(MARKS):
        out = mech(q, k, v, key_mask=key)
    with mech.marked(MARKS[:, key]):
        alone = mech(*(t[:, :, key] for t in (q, k, v)))
    close(out[:, :, key], alone)


def test_one_mask_serves_all_rows_and_none_may_be_marked():
    mech = make("global(tokens=marked)")
    fixed = make("global(tokens=[3, 8])")
    q, k, v = inputs(23, 23)
    marks = torch.zeros(23, dtype=torch.bool)
    with mech.marked(marks):  # nothing but the own key
        close(mech(q, k, v), v.repeat_interleave(2, 1))
    marks[[3, 8]] = True
    with mech.marked(marks):
        close(mech(q, k, v), fixed(q, k, v))
        with mech.marked(torch.ones(23, dtype=torch.bool)):
            close(mech(q, k, v), make("softmax")(q, k, v))
        close(mech(q, k, v), fixed(q, k, v))


def test_marks_are_needed_and_checked():
    mech = make("global(tokens=marked)")
    q, k, v = inputs(7, 7)
    with pytest.raises(sq.OptionError, match=r"with mech\.marked\(mask\)"):
        mech(q, k, v)
    wrong = torch.ones(5, dtype=torch.bool)
    with pytest.raises(sq.ShapeError, match=r"marked tokens must be \(S=7,\)"), mech.marked(wrong):
        mech(q, k, v)
    with pytest.raises(sq.DtypeError, match="True = global"), mech.marked(torch.ones(7)):
        pass
    with (
        pytest.raises(sq.OptionError, match="needs tokens=marked"),
        make("global").marked(torch.ones(7, dtype=torch.bool)),
    ):
        pass
    with pytest.raises(sq.UnsupportedError, match="marks belong to one call"):
        mech.prefill(q, k, v)


# ---- extra tokens -------------------------------------------------------------------------


def test_information_passes_through_an_extra_token_in_one_layer():
    """Every value reaches every output; without extra tokens it reaches its own alone."""
    q, k, _ = inputs(23, 23)
    assert (make("global(tokens=[], extra=1)").weights(q, k) > 0).all()
    assert (make("global(tokens=[0])").weights(q, k)[:, :, 1:] > 0).sum(-1).eq(2).all()


def test_extra_tokens_are_drawn_and_trained():
    a, b, c = (make("global(extra=3)", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(a.extra_query, b.extra_query)
    assert not torch.equal(a.extra_query, c.extra_query)
    assert a.extra_query.shape == (3, 3, 5)
    a(*inputs(23, 23)).square().sum().backward()
    assert (a.extra_query.grad.abs().amax(-1) > 0).all()
    # 45 draws of N(0, 1): the mean of squares is 1 ± 4 standard errors of (2/45)^½.
    assert abs(a.extra_query.square().mean() - 1) < 4 * (2 / 45) ** 0.5


def test_extra_tokens_sum_the_whole_sequence():
    mech = make("global(extra=1)")
    q, k, v = inputs(7, 7)
    with pytest.raises(sq.UnsupportedError, match="later tokens included"):
        mech(q, k, v, causal=True)
    with pytest.raises(sq.UnsupportedError, match="learned queries"):
        sq.attention(q, k, v, "global(extra=1)")


# ---- decoding -----------------------------------------------------------------------------


def test_the_state_holds_keys_up_to_the_last_global_one():
    mech = make("global(tokens=[0, 5])")
    q, k, v = inputs(71, 71)
    whole = mech(q, k, v, causal=True)
    state = None
    for t in range(71):
        out, state = mech.step(*(x[:, :, t : t + 1] for x in (q, k, v)), state)
        close(out, whole[:, :, t : t + 1])
        assert state.k.shape[2] == 6 and state.seen == t + 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": "mark"}, "tokens='mark' must be positions [0, 5, -1], a number or marked"),
        ({"tokens": (1.5,)}, "tokens=(1.5,) must be positions"),
        ({"tokens": -2}, "tokens=-2 must be ≥ 0"),
        ({"tokens": (3, 3)}, "names a position twice"),
        ({"tokens": 0}, "there must be a global token"),
        ({"tokens": ()}, "there must be a global token"),
        ({"own": 1}, "own=1 must be true or false"),
        ({"extra": -1}, "extra=-1 must be an integer ≥ 0"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(sq.OptionError) as caught:
        sq.build("global", head_dim=5, num_heads=2, **options)
    assert message in str(caught.value)
