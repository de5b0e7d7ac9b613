"""`MultiheadAttention` beside torch's, argument by argument, with the exact mechanism."""

import copy
import itertools
import math
import pickle

import pytest
import torch
from torch import nn

import subquad as sq

N, H, C, L, S, KDIM, VDIM = 2, 6, 30, 7, 11, 17, 19

# Sums of C (projections), D = 5 (logits), S (outputs) and N·L or N·S (gradients of weights)
# terms follow each other; no magnitude on the way exceeds 10: (2·C + D + S + N·S)·10·eps, and
# the loss is a sum over N·L·C terms of size ≤ 3 that scales the gradients by √(N·L·C) ≈ 20.
FORWARD = (2 * C + 5 + S + N * S) * 10
BACKWARD = FORWARD * 20

BOOLEAN, FLOAT = "bool", "float"


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def pair(dtype=torch.float64, mechanism="softmax", **arguments):
    """torch's module and ours, with the same weights."""
    theirs = nn.MultiheadAttention(C, H, dtype=dtype, **arguments)
    ours = sq.MultiheadAttention(C, H, dtype=dtype, mechanism=mechanism, **arguments)
    with torch.no_grad():  # biases of zero could be forgotten unnoticed
        for parameter in theirs.parameters():
            parameter.uniform_(-0.5, 0.5, generator=generator(1))
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs, ours


def inputs(layout, kdim=C, vdim=C, dtype=torch.float64, self_attention=False):
    drawn = []
    for seed, (length, width) in enumerate(((L, C), (S, kdim), (S, vdim))):
        shape = {
            "batch_first": (N, length, width),
            "batch_second": (length, N, width),
            "unbatched": (length, width),
        }[layout]
        x = torch.randn(shape, generator=generator(seed), dtype=torch.float64)
        drawn.append(x.to(dtype).requires_grad_())
    return [drawn[0]] * 3 if self_attention else drawn


def coin(*shape, seed=0):
    """True = ignore; the first key is always left, so that torch gives no NaN."""
    ignored = torch.rand(shape, generator=generator(seed)) > 0.6
    ignored[..., 0] = False
    return ignored


def added(ignored, seed, dtype):
    values = torch.randn(ignored.shape, generator=generator(seed), dtype=torch.float64)
    return values.masked_fill(ignored, -math.inf).to(dtype)


def padding_masks(layout, keys, dtype):
    ignored = coin(*(() if layout == "unbatched" else (N,)), keys, seed=1)
    minus = torch.zeros(ignored.shape, dtype=dtype).masked_fill(ignored, -math.inf)
    return {None: None, BOOLEAN: ignored, "0/-inf": minus, FLOAT: added(ignored, 2, dtype)}


def attention_masks(layout, queries, keys, dtype):
    rows = H if layout == "unbatched" else N * H
    flat, deep = coin(queries, keys, seed=3), coin(rows, queries, keys, seed=4)
    return {
        None: None,
        "2-D bool": flat,
        "2-D float": added(flat, 5, dtype),
        "3-D bool": deep,
        "3-D float": added(deep, 6, dtype),
    }


def close(got, wanted, bound, what):
    assert got.shape == wanted.shape and got.dtype == wanted.dtype, what
    error = (got - wanted).abs().max().item()
    eps = torch.finfo(got.dtype).eps
    assert error <= bound * eps, f"{what}: {error / eps:.0f} eps > {bound} eps"


def compare(theirs, ours, tensors, **arguments):
    for need_weights, average in ((False, True), (True, True), (True, False)):
        extra = {"need_weights": need_weights, "average_attn_weights": average}
        wanted, wanted_weights = theirs(*tensors, **arguments, **extra)
        got, weights = ours(*tensors, **arguments, **extra)
        close(got, wanted, FORWARD, "output")
        if need_weights:
            close(weights, wanted_weights, FORWARD, "weights")
        else:
            assert weights is None
            out = got
    different = list({id(x): x for x in tensors}.values())
    direction = torch.randn(got.shape, generator=generator(7), dtype=torch.float64).to(got.dtype)
    gradients = []
    for module, result in ((theirs, wanted), (ours, out)):
        named = dict(module.named_parameters())
        all_ = torch.autograd.grad(result, [*different, *named.values()], direction)
        gradients.append(dict(zip([*range(len(different)), *named], all_, strict=True)))
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        close(gradients[1][name], gradient, BACKWARD, f"gradient of {name}")


# torch warns, and we do not, when one mask is bool and the other float
both_kinds = pytest.mark.filterwarnings(
    "ignore:Support for mismatched key_padding_mask and attn_mask"
)


@both_kinds
@pytest.mark.parametrize("layout", ["batch_first", "batch_second", "unbatched"])
@pytest.mark.parametrize("zero", [False, True], ids=["", "add_zero_attn"])
@pytest.mark.parametrize("bias_kv", [False, True], ids=["", "add_bias_kv"])
@pytest.mark.parametrize("widths", [{}, {"kdim": KDIM, "vdim": VDIM}, {"vdim": VDIM}], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_every_combination_of_arguments(bias, widths, bias_kv, zero, layout):
    theirs, ours = pair(
        bias=bias,
        add_bias_kv=bias_kv,
        add_zero_attn=zero,
        batch_first=layout == "batch_first",
        **widths,
    )
    tensors = inputs(layout, **widths)
    paddings = padding_masks(layout, S, torch.float64)
    attentions = attention_masks(layout, L, S, torch.float64)
    for padding, mask in itertools.product(paddings.values(), attentions.values()):
        compare(theirs, ours, tensors, key_padding_mask=padding, attn_mask=mask)


@both_kinds
@pytest.mark.parametrize("layout", ["batch_first", "batch_second", "unbatched"])
@pytest.mark.parametrize("more", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_self_attention_and_the_causal_hint(layout, more, dtype):
    theirs, ours = pair(dtype, batch_first=layout == "batch_first", **more)
    tensors = inputs(layout, dtype=dtype, self_attention=True)
    square = nn.Transformer.generate_square_subsequent_mask(L, dtype=dtype)
    for padding in padding_masks(layout, L, dtype).values():
        compare(theirs, ours, tensors, key_padding_mask=padding)
        compare(theirs, ours, tensors, key_padding_mask=padding, attn_mask=square)
        compare(theirs, ours, tensors, key_padding_mask=padding, attn_mask=square == -math.inf)
        if not more:
            # with the hint and appended keys, torch's fused call cuts those off again
            compare(
                theirs, ours, tensors, key_padding_mask=padding, attn_mask=square, is_causal=True
            )


@pytest.mark.parametrize("more", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str)
def test_the_causal_hint_alone_is_the_triangle(more):
    _, ours = pair(**more)
    x = inputs("batch_second", self_attention=True)[0]
    square = nn.Transformer.generate_square_subsequent_mask(L, dtype=x.dtype)
    wanted, weights = ours(x, x, x, attn_mask=square, need_weights=True)
    got, same = ours(x, x, x, is_causal=True, need_weights=True)
    close(got, wanted, FORWARD, "output")
    close(same, weights, FORWARD, "weights")


@pytest.mark.parametrize(("queries", "keys"), [(L, S), (S, L)])
def test_the_causal_hint_with_other_lengths(queries, keys):
    # a mask that is given decides (torch's hint is its triangle, aligned to the start) …
    theirs, ours = pair()
    q, k = torch.randn(queries, N, C).double(), torch.randn(keys, N, C).double()
    start = ~torch.ones(queries, keys, dtype=torch.bool).tril()
    wanted = theirs(q, k, k, attn_mask=start, is_causal=True, need_weights=False)[0]
    close(ours(q, k, k, attn_mask=start, is_causal=True)[0], wanted, FORWARD, "start")
    # … and the hint alone is aligned to the end; with appended keys for the rows before it
    _, ours = pair(add_bias_kv=True)
    end = ~torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    wanted = ours(q, k, k, attn_mask=end)[0]
    close(ours(q, k, k, is_causal=True)[0], wanted, FORWARD, "end")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_float32_cross_attention(dtype):
    theirs, ours = pair(dtype, kdim=KDIM, vdim=VDIM, add_bias_kv=True)
    tensors = inputs("batch_second", KDIM, VDIM, dtype)
    for mask in attention_masks("batch_second", L, S, dtype).values():
        compare(theirs, ours, tensors, attn_mask=mask)


def test_an_additive_mask_learns():
    theirs, ours = pair()
    tensors = inputs("batch_second")
    mask = torch.randn(N * H, L, S, dtype=torch.float64, requires_grad=True)
    gradients = [
        torch.autograd.grad(module(*tensors, attn_mask=mask)[0].square().sum(), mask)[0]
        for module in (theirs, ours)
    ]
    close(gradients[1], gradients[0], BACKWARD, "gradient of attn_mask")


@pytest.mark.parametrize("need_weights", [False, True])
def test_dropout_draws_what_torch_draws(need_weights):
    theirs, ours = pair(dropout=0.4)
    tensors = inputs("batch_second")
    outs = []
    for module in (theirs, ours):
        torch.manual_seed(11)
        outs.append(module(*tensors, need_weights=need_weights))
    close(outs[1][0], outs[0][0], FORWARD, "output")
    if need_weights:
        close(outs[1][1], outs[0][1], FORWARD, "weights")
        assert (outs[1][1] == 0).any() or (outs[1][1].sum(-1) - 1).abs().max() > 0.01
    compare(theirs.eval(), ours.eval(), tensors)


def test_one_seed_gives_torchs_initial_values():
    for arguments in ({}, {"kdim": KDIM, "add_bias_kv": True}, {"bias": False}):
        torch.manual_seed(5)
        theirs = nn.MultiheadAttention(C, H, **arguments)
        torch.manual_seed(5)
        ours = sq.MultiheadAttention(C, H, mechanism="softmax", **arguments)
        assert list(theirs.state_dict()) == list(ours.state_dict())
        for name, tensor in theirs.state_dict().items():
            assert torch.equal(tensor, ours.state_dict()[name]), name


def test_weights_are_not_computed_unless_asked_for():
    _, ours = pair()
    assert ours(*inputs("batch_second"))[1] is None


def test_fully_masked_rows_give_zeros():
    theirs, ours = pair()
    tensors = inputs("batch_second")
    ignored = torch.zeros(N, S, dtype=torch.bool)
    ignored[1] = True
    out, weights = ours(*tensors, key_padding_mask=ignored, need_weights=True)
    assert torch.equal(out[:, 1], ours.out_proj.bias.expand(L, C))
    assert (weights[1] == 0).all()
    close(out[:, 0], theirs(*tensors, key_padding_mask=ignored)[0][:, 0], FORWARD, "other row")
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), tensors))


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30])
def test_what_ignored_keys_contain_never_matters(garbage, need_weights):
    _, ours = pair(dropout=0.4, kdim=KDIM, vdim=VDIM, add_zero_attn=True)
    ignored = coin(N, S)
    results = []
    for content in (0.0, garbage):
        q, k, v = (x.detach() for x in inputs("batch_second", KDIM, VDIM))
        k, v = (x.masked_fill(ignored.T[..., None], content) for x in (k, v))
        torch.manual_seed(3)
        out, _ = ours(q, k, v, key_padding_mask=ignored, need_weights=need_weights)
        results.append([out, *torch.autograd.grad(out.square().sum(), list(ours.parameters()))])
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty) and clean.isfinite().all()


@pytest.mark.parametrize("need_weights", [False, True])
def test_padding_leaves_the_other_rows_of_self_attention_alone(need_weights):
    _, ours = pair(dropout=0.4)
    x = inputs("batch_second", self_attention=True)[0].detach()
    padding = torch.arange(L) >= torch.tensor([[L], [4]])
    dirty = x.masked_fill(padding.T[..., None], math.nan)
    clean, got = (
        masked(ours, content, key_padding_mask=padding, need_weights=need_weights)
        for content in (x, dirty)
        if torch.manual_seed(3)
    )
    assert torch.equal(got[:4], clean[:4]) and torch.equal(got[:, 0], clean[:, 0])


# ---- mechanisms without explicit masks --------------------------------------------------

PERFORMER = "performer(features=16)"


def masked(ours, x, **arguments):
    return ours(x, x, x, **arguments)[0]


@pytest.mark.parametrize("floats", [False, True])
@pytest.mark.parametrize("deep", [False, True])
def test_masks_that_can_be_said_otherwise_are_recognised(floats, deep):
    ours = sq.MultiheadAttention(C, H, mechanism=PERFORMER)
    x = torch.randn(L, N, C)
    padding = coin(N, L)
    triangle = torch.ones(L, L, dtype=torch.bool).triu(1)
    columns = coin(L, seed=9)

    def form(ignored):
        ignored = ignored.expand(N, L, L)
        ignored = ignored.repeat_interleave(H, 0) if deep else ignored[0]
        zeros = torch.zeros(ignored.shape)
        return zeros.masked_fill(ignored, -math.inf) if floats else ignored

    cases = [
        (torch.zeros(L, L, dtype=torch.bool), {}),
        (triangle, {"is_causal": True}),
        (columns.expand(L, L), {"key_padding_mask": columns.expand(N, L)}),
        (triangle | columns, {"is_causal": True, "key_padding_mask": columns.expand(N, L)}),
    ]
    if deep:
        rows = padding[:, None, :]
        cases.append((rows, {"key_padding_mask": padding}))
        cases.append((rows | triangle, {"is_causal": True, "key_padding_mask": padding}))
    plain = masked(ours, x)
    for mask, meaning in cases:
        got, wanted = masked(ours, x, attn_mask=form(mask)), masked(ours, x, **meaning)
        assert torch.equal(got, wanted)
        assert torch.equal(wanted, plain) == (not meaning)
    both = masked(ours, x, attn_mask=form(columns.expand(L, L)), key_padding_mask=padding)
    assert torch.equal(both, masked(ours, x, key_padding_mask=padding | columns))


def test_masks_that_cannot_raise_and_name_who_can():
    ours = sq.MultiheadAttention(C, H, mechanism=PERFORMER)
    x = torch.randn(L, N, C)
    holes = coin(L, L, seed=3)
    heads = coin(N * H, 1, L, seed=4).expand(N * H, L, L)
    for mask, words in (
        (holes, "neither causal .* nor whole columns.*These do: softmax"),
        (heads, "differs between heads.*These do: softmax"),
        (torch.randn(L, L), "attn_mask of floats other than 0 and -inf.*These do: softmax"),
    ):
        with pytest.raises(sq.UnsupportedError, match=words):
            ours(x, x, x, attn_mask=mask)
    with pytest.raises(sq.UnsupportedError, match="key_padding_mask of floats .*softmax"):
        ours(x, x, x, key_padding_mask=torch.randn(N, L))
    minus = torch.zeros(N, L).masked_fill(coin(N, L), -math.inf)
    wanted = masked(ours, x, key_padding_mask=minus == -math.inf)
    assert torch.equal(masked(ours, x, key_padding_mask=minus), wanted)


def test_dropout_is_exact_or_refused():
    with pytest.raises(sq.UnsupportedError, match="'performer' does not support dropout=0.1.*soft"):
        sq.MultiheadAttention(C, H, dropout=0.1)
    assert sq.MultiheadAttention(C, H).mechanism.name == "performer"
    with pytest.raises(sq.OptionError, match="dropout is given twice"):
        sq.MultiheadAttention(C, H, dropout=0.1, mechanism="softmax(dropout=0.2)")
    same = sq.MultiheadAttention(C, H, dropout=0.1, mechanism="softmax(dropout=0.1)")
    assert same.mechanism.config == sq.SoftmaxConfig(dropout=0.1)
    with pytest.raises(sq.OptionError, match="dropout=1.5 must be a number"):
        sq.MultiheadAttention(C, H, dropout=1.5, mechanism="softmax")


@pytest.mark.parametrize("causal", [False, True])
def test_appended_keys_work_for_any_mechanism(causal):
    ours = sq.MultiheadAttention(C, H, mechanism=PERFORMER, add_bias_kv=True, add_zero_attn=True)
    x = torch.randn(L, N, C)
    out, weights = ours(x, x, x, is_causal=causal, need_weights=True)
    assert weights.shape == (N, L, L + 2) and (weights[..., -2:] > 0).all()
    if causal:
        assert (weights[..., :-2].triu(1) == 0).all()
        changed = x.clone()
        changed[-1] += 1.0
        # a later key may move a common scale that cancels, hence roundings of FORWARD's size
        close(masked(ours, changed, is_causal=True)[:-1], out[:-1], FORWARD, "the past")


# ---- grouped queries --------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str)
def test_grouped_queries_equal_repeated_heads(more):
    groups, width = 2, C // H
    ours = sq.MultiheadAttention(
        C, H, num_kv_heads=H // groups, mechanism="softmax", dtype=torch.float64, **more
    )
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.uniform_(-0.5, 0.5, generator=generator(1))
    names = ["q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias"]
    names += ["bias_k", "bias_v"] if more else []
    assert set(ours.state_dict()) == {*names, "out_proj.weight", "out_proj.bias"}

    def repeated(x, dim):
        return x.unflatten(dim, (-1, width)).repeat_interleave(groups, dim).flatten(dim, dim + 1)

    theirs = nn.MultiheadAttention(C, H, dtype=torch.float64, **more)
    state = ours.state_dict()
    q, k, v = (state[name] for name in names[:3])
    b_q, b_k, b_v = state["in_proj_bias"].split([C, C // groups, C // groups])
    state["in_proj_weight"] = torch.cat([q, repeated(k, 0), repeated(v, 0)])
    state["in_proj_bias"] = torch.cat([b_q, repeated(b_k, 0), repeated(b_v, 0)])
    for name in names[4:]:
        state[name] = repeated(state[name], 2)
    theirs.load_state_dict({name: state[name] for name in theirs.state_dict()})
    tensors = inputs("batch_second")
    padding = coin(N, S)
    for got, wanted in zip(
        ours(*tensors, key_padding_mask=padding, need_weights=True),
        theirs(*tensors, key_padding_mask=padding),
        strict=True,
    ):
        close(got, wanted, FORWARD, "grouped")


# ---- state_dict -------------------------------------------------------------------------


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("mechanism", [PERFORMER, "additive(hidden=3)"])
def test_torchs_weights_load_strictly_and_leave_the_mechanism(mechanism, assign):
    theirs = nn.Sequential(nn.MultiheadAttention(C, H))  # with a prefix
    ours = nn.Sequential(sq.MultiheadAttention(C, H, mechanism=mechanism, seed=3))
    before = {k: v.clone() for k, v in ours.state_dict().items() if "mechanism" in k}
    assert before
    given = theirs.state_dict()
    ours.load_state_dict(given, strict=True, assign=assign)
    assert not any("mechanism" in name for name in given)  # the caller's dict is left alone
    for name, tensor in {**before, **given}.items():
        assert torch.equal(ours.state_dict()[name], tensor), name


@pytest.mark.parametrize("assign", [False, True])
def test_a_round_trip_restores_the_mechanism(assign):
    saved = sq.MultiheadAttention(C, H, mechanism=PERFORMER, seed=3)
    other = sq.MultiheadAttention(C, H, mechanism=PERFORMER, seed=4)
    x = torch.randn(L, N, C)
    assert not torch.equal(masked(saved, x), masked(other, x))
    other.load_state_dict(saved.state_dict(), strict=True, assign=assign)
    assert torch.equal(masked(saved, x), masked(other, x))


def test_strict_still_means_strict():
    saved = sq.MultiheadAttention(C, H, mechanism="additive(hidden=3)").state_dict()
    ours = sq.MultiheadAttention(C, H, mechanism="additive(hidden=3)")
    del saved["mechanism.bias"]  # some, but not all, of the mechanism's tensors
    with pytest.raises(RuntimeError, match=r"Missing key.*mechanism\.bias"):
        ours.load_state_dict(saved)
    with pytest.raises(RuntimeError, match=r"Missing key.*out_proj\.weight"):
        ours.load_state_dict({})


@pytest.mark.parametrize("mechanism", [PERFORMER, "additive(hidden=3)"])
def test_meta_device_then_load(mechanism):
    wanted = sq.MultiheadAttention(C, H, mechanism=mechanism, seed=3)
    state = {k: v for k, v in wanted.state_dict().items() if "mechanism" not in k}
    with torch.device("meta"):
        ours = sq.MultiheadAttention(C, H, mechanism=mechanism, seed=3)
    ours.load_state_dict(state, strict=True, assign=True)
    x = torch.randn(L, N, C)
    assert torch.equal(masked(ours, x), masked(wanted, x))


def test_copies_and_pickles():
    ours = sq.MultiheadAttention(C, H, mechanism=PERFORMER)
    x = torch.randn(L, N, C)
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(masked(twin, x), masked(ours, x))


# ---- inside torch's own layers ----------------------------------------------------------


def encoder_layer(**arguments):
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(C, H, 13, batch_first=True, dropout=0.0, **arguments).eval()


def by_hand(layer, x, **arguments):
    """Post-norm encoder layer, written out."""
    x = layer.norm1(x + layer.self_attn(x, x, x, **arguments)[0])
    return layer.norm2(x + layer.linear2(torch.relu(layer.linear1(x))))


def test_torchs_layer_does_not_bypass_the_mechanism():
    layer = encoder_layer()
    x, padding = torch.randn(N, L, C), torch.arange(L) >= torch.tensor([[L], [3]])
    with torch.no_grad():
        exact = layer(x, src_key_padding_mask=padding)
        layer.self_attn = sq.MultiheadAttention(C, H, batch_first=True, mechanism=PERFORMER).eval()
        got = layer(x, src_key_padding_mask=padding)
        wanted = by_hand(layer, x, key_padding_mask=padding)
    assert torch.equal(got, wanted)
    assert not torch.allclose(got, exact, atol=1e-3)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True, but self.use_nested_tensor")
@pytest.mark.parametrize("swap", ["before", "after"])
def test_torchs_encoder_does_not_bypass_the_mechanism(swap):
    # An encoder built around torch's own attention passes nested tensors for padding.
    layer = encoder_layer()
    ours = sq.MultiheadAttention(C, H, batch_first=True, mechanism=PERFORMER).eval()
    if swap == "before":
        layer.self_attn = ours
    encoder = nn.TransformerEncoder(layer, 2).eval()
    for module in encoder.layers:
        module.self_attn = copy.deepcopy(ours)
    assert encoder.use_nested_tensor == (swap == "after")
    x, padding = torch.randn(N, L, C), torch.arange(L) >= torch.tensor([[L], [3]])
    with torch.no_grad():
        got = encoder(x, src_key_padding_mask=padding)
        wanted = x
        for module in encoder.layers:
            wanted = by_hand(module, wanted, key_padding_mask=padding)
    # the same operations on tensors of other layouts: two layers of sums of C + 13 terms ≤ 10
    bound = 2 * (C + 13) * 10 * torch.finfo(torch.float32).eps
    assert (got - wanted)[~padding].abs().max() <= bound
    assert (got[padding] == 0).all() or swap == "before"


def test_torchs_transformer_takes_it():
    torch.manual_seed(0)
    model = nn.Transformer(C, H, 1, 1, 13, dropout=0.0, batch_first=True).double().eval()
    src, tgt = torch.randn(N, S, C).double(), torch.randn(N, L, C).double()
    causal = model.generate_square_subsequent_mask(L, dtype=torch.float64)
    arguments = {"tgt_mask": causal, "src_key_padding_mask": coin(N, S)}
    wanted = model(src, tgt, **arguments)
    for layer in (*model.encoder.layers, *model.decoder.layers):
        for name in ("self_attn", "multihead_attn"):
            if hasattr(layer, name):
                ours = sq.MultiheadAttention(
                    C, H, batch_first=True, mechanism="softmax", dtype=torch.float64
                )
                ours.load_state_dict(getattr(layer, name).state_dict())
                setattr(layer, name, ours.eval())
    close(model(src, tgt, **arguments), wanted, 3 * FORWARD, "three attentions after each other")


# ---- errors -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_heads": 7}, "num_heads=7 must divide embed_dim=30"),
        ({"num_heads": 0}, "num_heads=0 must be an integer ≥ 1"),
        ({"embed_dim": 2.0, "kdim": -1}, "embed_dim=2.0 must .*; kdim=-1 must be an integer"),
        ({"num_kv_heads": 4}, "num_kv_heads=4 must divide num_heads=6"),
        ({"mechanism": "sofmax"}, "unknown mechanism 'sofmax' .did you mean 'softmax'"),
    ],
)
def test_wrong_construction_is_named(arguments, words):
    with pytest.raises(sq.OptionError, match=words):
        sq.MultiheadAttention(**{"embed_dim": C, "num_heads": H, **arguments})


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"query": (L, N, 29)}, sq.ShapeError, r"query must be .* width 30, given \(7, 2, 29\)"),
        ({"key": (S, C)}, sq.ShapeError, r"key must be .*given \(11, 30\)"),
        ({"value": (S, 3, C)}, sq.ShapeError, r"value must .* query's N = 2, given \(11, 3, 30\)"),
        ({"value": (L, N, C)}, sq.ShapeError, r"key and value must have one length"),
        ({"query": (L, N, C, 1)}, sq.ShapeError, r"query must be \(length, N, width\)"),
        ({"key_padding_mask": (S, N)}, sq.ShapeError, r"\(N, S\) = \(2, 11\), given \(11, 2\)"),
        ({"attn_mask": (S, L)}, sq.ShapeError, r"\(L, S\) = \(7, 11\) or .* = \(12, 7, 11\)"),
        ({"attn_mask": (N, L, S)}, sq.ShapeError, r"given \(2, 7, 11\)"),
    ],
)
def test_wrong_shapes_are_named(changes, error, words):
    shapes = {"query": (L, N, C), "key": (S, N, C), "value": (S, N, C), **changes}
    ours = sq.MultiheadAttention(C, H, mechanism="softmax")
    with pytest.raises(error, match=words):
        ours(**{name: torch.ones(shape) for name, shape in shapes.items()})


def test_wrong_dtypes_and_devices_are_named():
    ours = sq.MultiheadAttention(C, H, mechanism="softmax")
    q, kv = torch.ones(L, N, C), torch.ones(S, N, C)
    with pytest.raises(sq.DtypeError, match="key must have the module's torch.float32, given .*64"):
        ours(q, kv.double(), kv)
    with pytest.raises(sq.DeviceError, match="value is on meta, the module is on cpu"):
        ours(q, kv, kv.to("meta"))
    with pytest.raises(
        sq.DtypeError, match=r"attn_mask must be bool .True = ignore.* given .*int64"
    ):
        ours(q, kv, kv, attn_mask=torch.ones(L, S, dtype=torch.long))
    with pytest.raises(sq.DeviceError, match="key_padding_mask is on meta"):
        ours(q, kv, kv, key_padding_mask=torch.ones(N, S, dtype=torch.bool, device="meta"))


def test_autocast():
    ours = sq.MultiheadAttention(C, H, mechanism="softmax")
    x = torch.randn(L, N, C)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = masked(ours, x)
    assert got.dtype == torch.bfloat16
    # every operand and result is rounded to bfloat16: four products in a row, magnitudes ≤ 4
    assert (got - masked(ours, x)).abs().max() <= 4 * 4 * torch.finfo(torch.bfloat16).eps
