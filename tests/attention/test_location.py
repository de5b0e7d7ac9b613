"""Location-aware attention beside additive attention, by hand, and in chunks of queries."""

import pytest
import torch

import references
import subquad as sq
from subquad.attention.exact import engine
from variants import inputs, make

EPS = torch.finfo(torch.float64).eps
SPECS = ["location(filters=3, kernel=5)", "location(filters=3, kernel=5, cumulative=true)"]
# Errors pass from alignment to alignment: each step has some 60 roundings of numbers below 10
# and passes on, by |U F| ≤ 3 and a softmax's slope of ¼, no more than it was given.
CLOSE = 17 * 600 * EPS


@pytest.mark.parametrize("spec", SPECS)
def test_without_filters_it_is_additive_attention(spec):
    """The limit, with the parameters that one seed gives both."""
    mech, plain = make(spec, seed=3), make("additive", seed=3)
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, dict(mech.named_parameters())[name]), name
    q, k, v = inputs(17, 23)
    keep = torch.arange(23) < torch.tensor([[23], [9]])
    wanted = plain(q, k, v, key_mask=keep)
    assert (mech(q, k, v, key_mask=keep) - wanted).abs().max() > 1e-3
    with torch.no_grad():
        mech.location_weight.zero_()
    assert (mech(q, k, v, key_mask=keep) - wanted).abs().max() < CLOSE
    first = make(spec, seed=3)(q, k, v, key_mask=keep)[:, :, 0]
    assert (first - wanted[:, :, 0]).abs().max() < CLOSE, "the first query has nothing before it"


def test_it_goes_on_from_where_it_was():
    """A filter that reads one key to the left moves attention by one key a query."""
    mech = make("location(filters=1, kernel=3, hidden=2)", heads=1, kv=1)
    with torch.no_grad():
        for parameter in mech.parameters():
            parameter.zero_()
        mech.filter_weight[0, 0] = torch.tensor([1.0, 0.0, 0.0])  # α_{t−1, j−1}
        mech.location_weight[0, 0, 0] = mech.score_weight[0, 0] = 1.0
        mech.key_weight[0, 1, 0] = mech.score_weight[0, 1] = 1.0
    q, k, _ = inputs(6, 11, heads=1, kv=1, batch=1)
    k.zero_()
    k[..., 3, 0] = 1.0  # where the first query looks
    found = mech.weights(q, k, scale=40.0)[0, 0].argmax(-1).tolist()
    # later queries prefer the key behind the last one, tanh(1), as much as key 3: it was left
    assert found[0] == 3
    k[..., 3, 0] = 0.3  # enough for the first query, less than tanh(1) for the others
    found = mech.weights(q, k, scale=40.0)[0, 0].argmax(-1).tolist()
    assert found == [3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("spec", SPECS)
def test_chunks_of_queries_are_the_whole(spec, monkeypatch):
    """Output and gradients, with what a backward pass computes again."""
    mech = make(spec)
    found = []
    for size in (engine.CHUNK_BYTES, 1, 3 * 2 * 6 * 23 * 18 * 8):
        monkeypatch.setattr(engine, "CHUNK_BYTES", size)
        leaves = inputs(17, 23, grad=True)
        out = mech(*leaves, causal=True)
        grads = torch.autograd.grad(out.square().sum(), [*leaves, *mech.parameters()])
        found.append([out, *grads])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            # gradients of parameters are sums over 2·6·17·23 pairs
            assert (a - b).abs().max() <= 4692 * EPS * b.abs().max().clamp_min(1)


def test_an_additive_mask_moves_the_alignments():
    mech, bias = make(SPECS[0]), torch.randn(2, 6, 17, 23, dtype=torch.float64)
    bias[0, 0, 3] = -torch.inf  # one row without keys
    bias[:, :, :, 5] = -torch.inf
    q, k, v = inputs(17, 23)
    allowed = bias > -torch.inf
    wanted = references.ref_location(mech, q, k, v, allowed=allowed, bias=bias.clamp_min(-1e3))
    out = mech(q, k, v, mask=sq.Mask(dense=bias))
    assert (out - wanted).abs().max() < CLOSE
    assert not out[0, 0, 3].any()


@pytest.mark.parametrize("spec", SPECS)
def test_reading_and_writing_queries_each_follow_their_own(spec):
    mech = make(spec)
    q, k, v = inputs(19, 19)
    whole, read = mech(q, k, v, causal=True), mech(q[:, :, :5], k, v)
    _, state = mech.prefill(*(x[:, :, :12] for x in (q, k, v)))
    _, looked = mech.step(q[:, :, :3], None, None, state)  # changes nothing for those that write
    for one in (state, looked):
        rest, last = mech.step(*(x[:, :, 12:] for x in (q, k, v)), one)
        assert (rest - whole[:, :, 12:]).abs().max() < CLOSE
    _, full = mech.prefill(q, k, v)
    first, then = mech.step(q[:, :, :2], None, None, full)
    weights = mech.weights(q[:, :, 2:5], state=then)
    behind, _ = mech.step(q[:, :, 2:5], None, None, then.repeat(2).select([0, 2]))
    assert (torch.cat([first, behind], 2) - read).abs().max() < CLOSE
    repeated = v.repeat_interleave(2, 1)
    assert (weights @ repeated - read[:, :, 2:]).abs().max() < CLOSE
    assert last.k.shape[2] == last.written.shape[2] == last.read.shape[2] == 19


def test_a_decoder_follows_its_alignment():
    """In one call, and in steps with rows chosen among them, as beams are."""
    options = {"cross_mechanism": SPECS[0], "dtype": torch.float64}
    stack = sq.TransformerDecoder(12, 3, 2, 16, 0.0, mechanism="softmax", **options).eval()
    generator = torch.Generator().manual_seed(0)
    x, memory = (torch.randn(2, n, 12, generator=generator).double() for n in (7, 11))
    keep = torch.arange(11) < torch.tensor([[11], [8]])
    whole = stack(x, memory, memory_key_mask=keep)
    out, state = stack.prefill(x[:, :2], memory, memory_key_mask=keep)
    parts = [out]
    for t in range(2, 7):
        state = state.repeat(3).select([4, 1])  # rows 1 and 0
        out, state = stack.step(x[[1, 0], t : t + 1], state)
        parts.append(out[[1, 0]])
        state = state.select([1, 0])
    # two layers of norms pass on what differs, rescaled by less than ten each
    assert (torch.cat(parts, 1) - whole).abs().max() < 100 * CLOSE


def test_wrong_options_say_what_is_wrong():
    with pytest.raises(sq.OptionError, match="kernel=4 must be odd.*cumulative=1"):
        sq.build("location", head_dim=4, num_heads=2, kernel=4, cumulative=1)
    with pytest.raises(sq.OptionError, match="hidden=0 must be.*filters=0.*kernel=-1 must be an"):
        sq.build("location", head_dim=4, num_heads=2, hidden=0, filters=0, kernel=-1)
    mech = make(SPECS[0])
    q, k, v = inputs(7, 7)
    with pytest.raises(sq.UnsupportedError, match="alignments pass from query to query"):
        mech(q, k, v, mask=sq.Mask(window=2))
    with pytest.raises(sq.UnsupportedError, match="its scoring network is learned"):
        sq.attention(q, k, v, "location")
    strange = make("additive").prefill(q, k, v)[1]
    with pytest.raises(sq.ShapeError, match="state must be a LocationState, given KeyValueState"):
        mech.step(q, k, v, strange)
