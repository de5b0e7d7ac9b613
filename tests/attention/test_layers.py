"""Encoder and decoder layers beside torch's, and that no fast path bypasses the mechanism."""

import copy
import inspect
import itertools
import math
import pickle

import pytest
import torch
from torch import nn

import subquad as sq

N, H, C, L, S, F = 2, 6, 30, 7, 11, 13

# Both layers run the same operations on the same numbers; only the attention takes its sums over
# C, D and S in an order of its own. A rounding is uniform within eps/2, 0.29 eps; a sum of C = 30
# terms collects √30 of them, 1.6 eps; logits or weights, output and projection follow each other,
# √3: 2.7 eps; two implementations, √2: 3.9 eps; the largest of 420 entries is three standard
# deviations off: 12 eps of the largest entry, 1.4e-6 in float32 and 2.6e-15 in float64.
FORWARD = 12
# On the way back about ten stages (FFN 2, norms 3, projections 2, values, weights, logits) each
# add such an error and multiply by values that carry one: 12·√10·2.
BACKWARD = 76
PERFORMER = "performer(features=16)"
LAYERS = {
    "encoder": (nn.TransformerEncoderLayer, sq.TransformerEncoderLayer),
    "decoder": (nn.TransformerDecoderLayer, sq.TransformerDecoderLayer),
}
DTYPES = [torch.float32, torch.float64]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def pair(kind, dtype=torch.float64, mechanism="softmax", **arguments):
    """torch's layer and ours, with the same weights, none of them zero or one."""
    options = {"dropout": 0.0, "dtype": dtype, **arguments}
    theirs = LAYERS[kind][0](C, H, F, **options)
    ours = LAYERS[kind][1](C, H, F, mechanism=mechanism, **options)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.uniform_(-0.5, 0.5, generator=generator(1))
            if parameter.dim() == 1:
                parameter.add_(0.7)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs, ours


def tokens(length, batch_first=True, dtype=torch.float64, seed=0):
    x = torch.randn(N, length, C, generator=generator(seed), dtype=torch.float64).to(dtype)
    return (x if batch_first else x.transpose(0, 1)).clone().requires_grad_()


def padding(length, dtype=None):
    """True = ignore, or the same as floats; the first key is left."""
    ignored = torch.arange(length) >= torch.tensor([[length], [length - 3]])
    return ignored if dtype is None else added(ignored, dtype)


def added(ignored, dtype):
    return torch.zeros(ignored.shape, dtype=dtype).masked_fill(ignored, -math.inf)


def triangle(length):
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def coin(queries, keys, seed=3):
    ignored = torch.rand(queries, keys, generator=generator(seed)) > 0.6
    ignored[:, 0] = False
    return ignored


def calls(kind, dtype):
    """Arguments of calls that torch's layer takes too, by what they do."""
    square = added(triangle(L), dtype)
    if kind == "encoder":
        return {
            "plain": {},
            "padding": {"src_key_padding_mask": padding(L)},
            "padding, floats": {"src_key_padding_mask": padding(L, dtype)},
            "causal": {"src_mask": square, "is_causal": True},
            "causal, bool": {"src_mask": triangle(L)},
            "causal, padding": {
                "src_mask": square,
                "src_key_padding_mask": padding(L, dtype),
                "is_causal": True,
            },
            "any mask": {"src_mask": coin(L, L)},
            "each head": {"src_mask": torch.stack([coin(L, L, seed) for seed in range(N * H)])},
        }
    return {
        "plain": {},
        "causal": {"tgt_mask": square, "tgt_is_causal": True},
        "all": {
            "tgt_mask": triangle(L),
            "memory_mask": coin(L, S),
            "tgt_key_padding_mask": padding(L),
            "memory_key_padding_mask": padding(S),
        },
        "floats": {
            "tgt_mask": square,
            "tgt_key_padding_mask": padding(L, dtype),
            "memory_key_padding_mask": padding(S, dtype),
            "tgt_is_causal": True,
        },
    }


def inputs(kind, batch_first=True, dtype=torch.float64):
    own = tokens(L, batch_first, dtype)
    return [own] if kind == "encoder" else [own, tokens(S, batch_first, dtype, seed=1)]


def close(got, wanted, bound, what):
    assert got.shape == wanted.shape and got.dtype == wanted.dtype, what
    error = (got - wanted).abs().max().item() / wanted.abs().max().clamp_min(1e-3).item()
    eps = torch.finfo(got.dtype).eps
    assert error <= bound * eps, f"{what}: {error / eps:.1f} eps > {bound} eps"


def compare(theirs, ours, tensors, what, **arguments):
    wanted, got = theirs(*tensors, **arguments), ours(*tensors, **arguments)
    close(got, wanted, FORWARD, f"{what}: output")
    direction = torch.randn(got.shape, generator=generator(7), dtype=torch.float64).to(got.dtype)
    names = dict(theirs.named_parameters())
    own = dict(ours.named_parameters())
    assert list(own) == list(names)
    truth = torch.autograd.grad(wanted, [*tensors, *names.values()], direction)
    found = torch.autograd.grad(got, [*tensors, *own.values()], direction)
    for name, a, b in zip([*range(len(tensors)), *names], found, truth, strict=True):
        close(a, b, BACKWARD, f"{what}: gradient of {name}")


# ---- like torch's --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LAYERS)
def test_the_signatures_begin_with_torchs(kind):
    theirs, ours = (inspect.signature(one).parameters for one in LAYERS[kind])
    for (name, wanted), (own, found) in zip(theirs.items(), ours.items(), strict=False):
        assert (own, found.default, found.kind) == (name, wanted.default, wanted.kind)
    more = list(ours)[len(theirs) :]
    assert all(ours[name].kind is inspect.Parameter.KEYWORD_ONLY for name in more)
    calls_ = [inspect.signature(one.forward).parameters for one in LAYERS[kind]]
    assert [(p.name, p.default) for p in calls_[0].values()] == [
        (p.name, p.default) for p in calls_[1].values()
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_softmax_is_torchs_layer(kind, batch_first, norm_first, dtype):
    theirs, ours = pair(kind, dtype, batch_first=batch_first, norm_first=norm_first)
    tensors = inputs(kind, batch_first, dtype)
    for what, arguments in calls(kind, dtype).items():
        compare(theirs, ours, tensors, what, **arguments)
    if batch_first:
        alone = [x[0].detach().requires_grad_() for x in tensors]
        compare(theirs, ours, alone, "no batch")


@pytest.mark.parametrize("arguments", [{"bias": False}, {"activation": "gelu"}, {"eps": 0.3}])
@pytest.mark.parametrize("kind", LAYERS)
def test_other_arguments(kind, arguments):
    arguments = {"layer_norm_eps" if k == "eps" else k: v for k, v in arguments.items()}
    theirs, ours = pair(kind, batch_first=True, **arguments)
    compare(theirs, ours, inputs(kind), str(arguments))
    default = pair(kind, batch_first=True)[1]
    assert not torch.allclose(default(*inputs(kind)), ours(*inputs(kind)), atol=1e-3)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_dropout_in_training_is_torchs(kind, norm_first, monkeypatch):
    # Which entries `nn.Dropout` draws depends on the order of a tensor in memory, which is the
    # attention's own affair; with drops fixed by place and call, everything else has to agree:
    # which tensors are dropped from, how likely, and the draws among attention weights.
    drops = []

    def by_place(x, p=0.5, training=True, inplace=False):
        if not training:
            return x
        drops.append((tuple(x.shape), p))
        kept = torch.rand(x.shape, generator=generator(len(drops))) >= p
        return x * kept / (1 - p)

    theirs, ours = pair(kind, dropout=0.3, norm_first=norm_first)
    attentions = [m for m in ours.modules() if isinstance(m, sq.MultiheadAttention)]
    assert [m.mechanism.config.dropout for m in attentions] == [0.3] * len(attentions)
    monkeypatch.setattr(torch.nn.functional, "dropout", by_place)
    outs, found = [], []
    for layer in (theirs, ours):
        drops.clear()
        torch.manual_seed(11)
        outs.append(layer(*inputs(kind, False)))
        found.append(list(drops))
    assert found[0] == found[1] and len(found[0]) == (3 if kind == "encoder" else 4)
    close(outs[1], outs[0], FORWARD, "training")
    assert not torch.allclose(ours(*inputs(kind, False)), outs[1], atol=1e-3)
    compare(theirs.eval(), ours.eval(), inputs(kind, False), "evaluation")


@pytest.mark.parametrize("kind", LAYERS)
def test_one_seed_gives_torchs_initial_values(kind):
    after = []
    for layer, more in zip(LAYERS[kind], ({}, {"mechanism": PERFORMER}), strict=True):
        torch.manual_seed(5)
        after.append((layer(C, H, F, **more).state_dict(), torch.rand(3)))
    assert torch.equal(after[0][1], after[1][1])  # as many numbers were drawn
    own = {name: t for name, t in after[1][0].items() if ".mechanism." not in name}
    assert list(own) == list(after[0][0])
    assert all(torch.equal(own[name], tensor) for name, tensor in after[0][0].items())
    assert len(own) < len(after[1][0])


# ---- inside torch's stacks -----------------------------------------------------------------


def by_hand(layer, x, **arguments):
    x = layer.norm1(x + layer.self_attn(x, x, x, **arguments)[0])
    return layer.norm2(x + layer.linear2(torch.relu(layer.linear1(x))))


@pytest.mark.parametrize("mode", ["train", "eval", "inference"])
def test_no_fast_path_bypasses_the_mechanism(mode):
    theirs, ours = pair("encoder", torch.float32, PERFORMER, batch_first=True)
    ours.train(mode == "train"), theirs.train(mode == "train")
    x, ignored = tokens(L, dtype=torch.float32), padding(L)
    with torch.inference_mode(mode == "inference"):
        got = ours(x, src_key_padding_mask=ignored)
        assert torch.equal(got, by_hand(ours, x, key_padding_mask=ignored))
        exact = theirs(x, src_key_padding_mask=ignored)[~ignored]
    assert (got[~ignored] - exact).abs().max() > 1e-3  # the mechanism is an approximation


@pytest.mark.parametrize("mechanism", ["softmax", PERFORMER])
@pytest.mark.parametrize("batch_first", [False, True])
def test_inside_torchs_encoder(batch_first, mechanism):
    theirs, ours = pair("encoder", mechanism=mechanism, batch_first=batch_first)
    stacks = [
        nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(C).double(), enable_nested_tensor=False)
        for layer in (theirs, ours)
    ]
    assert all(isinstance(one, sq.TransformerEncoderLayer) for one in stacks[1].layers)
    x = tokens(L, batch_first).detach()
    square = added(triangle(L), torch.float64)
    masks = (
        {"src_key_padding_mask": padding(L)},
        {"mask": square, "is_causal": True},
        {"mask": square, "src_key_padding_mask": padding(L, torch.float64)},
    )
    for training, arguments in itertools.product((True, False), masks):
        with torch.set_grad_enabled(training):  # without, torch's own takes its fast path
            wanted, got = (stack.train(training)(x, **arguments) for stack in stacks)
        # behind the last token the fast path writes what it likes
        kept = ~padding(L) if "src_key_padding_mask" in arguments else ~padding(L) | True
        kept = kept if batch_first else kept.T
        if mechanism == "softmax":
            close(got[kept], wanted[kept], 2 * FORWARD, "two layers")
        else:
            assert got.isfinite().all() and not torch.allclose(got[kept], wanted[kept], atol=1e-3)


def test_torchs_encoder_says_that_it_leaves_nested_tensors_alone():
    layer = sq.TransformerEncoderLayer(C, H, F, batch_first=True)
    with pytest.warns(UserWarning, match="use_nested_tensor is False because"):
        stack = nn.TransformerEncoder(layer, 1)
    assert stack.use_nested_tensor is False


@pytest.mark.parametrize("batch_first", [False, True])
def test_inside_torchs_transformer(batch_first):
    shared = {"batch_first": batch_first, "norm_first": True}
    layers = [pair(kind, **shared) for kind in LAYERS]
    stacks = [
        (
            nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False),
            nn.TransformerDecoder(decoder, 2),
        )
        for encoder, decoder in zip(*layers, strict=True)
    ]
    src, tgt = tokens(S, batch_first).detach(), tokens(L, batch_first, seed=2).detach()
    arguments = {
        "tgt_mask": added(triangle(L), torch.float64),
        "src_key_padding_mask": padding(S),
        "memory_key_padding_mask": padding(S),
        "tgt_is_causal": True,
    }
    models = [
        nn.Transformer(C, H, custom_encoder=one, custom_decoder=two, batch_first=batch_first)
        for one, two in stacks
    ]
    models[1].load_state_dict(models[0].state_dict())  # `nn.Transformer` draws all weights anew
    outs = [model.eval()(src, tgt, **arguments) for model in models]
    # two encoder layers feed each of two decoder layers, pre-norm: errors add along the sum
    close(outs[1], outs[0], 4 * FORWARD, "four layers")


@pytest.mark.parametrize("kind", LAYERS)
def test_compiles_whole(kind):
    layer = LAYERS[kind][1](C, H, F, batch_first=True, dropout=0.0, mechanism=PERFORMER).eval()
    name = "src" if kind == "encoder" else "tgt"
    masks = {f"{name}_key_padding_mask": padding(L)}
    masks["is_causal" if kind == "encoder" else "tgt_is_causal"] = True
    run = torch.compile(layer, backend="eager", fullgraph=True)
    tensors = inputs(kind, dtype=torch.float32)
    close(run(*tensors, **masks), layer(*tensors, **masks), FORWARD, "compiled")
    torch._dynamo.reset()


# ---- what mechanisms change ----------------------------------------------------------------


def test_the_causal_hint_alone_is_enough():
    for mechanism in ("softmax", PERFORMER):
        x = tokens(L)
        layer = pair("encoder", mechanism=mechanism, batch_first=True)[1]
        wanted = layer(x, src_mask=triangle(L))
        close(layer(x, is_causal=True), wanted, FORWARD, "encoder")
        assert not torch.allclose(layer(x), wanted, atol=1e-3)
        layer = pair("decoder", mechanism=mechanism, batch_first=True)[1]
        wanted = layer(x, tokens(S), tgt_mask=triangle(L))
        close(layer(x, tokens(S), tgt_is_causal=True), wanted, FORWARD, "decoder")
        assert not torch.allclose(layer(x, tokens(S)), wanted, atol=1e-3)


def test_no_cross_attention_shows_a_causal_decoder_its_future():
    """`tgt_is_causal` tells, which torch's decoder finds out by itself."""
    layer = sq.TransformerDecoderLayer(
        C, H, F, 0.0, batch_first=True, mechanism="softmax", cross_mechanism="clustered"
    )
    tgt, memory = torch.randn(N, L, C), torch.randn(N, S, C)
    stack = nn.TransformerDecoder(layer, 2)
    assert layer(tgt, memory).isfinite().all() and stack(tgt, memory).isfinite().all()
    for call in (
        lambda: layer(tgt, memory, tgt_is_causal=True),
        lambda: stack(tgt, memory, tgt_mask=added(triangle(L), torch.float32)),
    ):
        with pytest.raises(sq.UnsupportedError, match="'clustered'.*later ones too") as caught:
            call()
        assert "linformer" in caught.value.alternatives


def test_masks_that_a_mechanism_cannot_take_raise():
    layer = sq.TransformerEncoderLayer(C, H, F, mechanism=PERFORMER)
    with pytest.raises(sq.UnsupportedError, match="neither causal .* These do: softmax"):
        layer(torch.randn(L, N, C), src_mask=coin(L, L))
    layer = sq.TransformerDecoderLayer(
        C, H, F, mechanism="performer(gauge=centre)", cross_mechanism="softmax"
    )
    tgt, memory = torch.randn(L, N, C), torch.randn(S, N, C)
    with pytest.raises(sq.UnsupportedError, match="does not support causal: statistics of"):
        layer(tgt, memory, tgt_is_causal=True)
    assert layer(tgt, memory).shape == (L, N, C)


def test_both_attentions_have_their_own_mechanism_and_draws():
    layer = sq.TransformerDecoderLayer(C, H, F, mechanism=PERFORMER, seed=3)
    one, other = layer.self_attn.mechanism, layer.multihead_attn.mechanism
    assert one.seed == 3 and other.seed != 3
    assert not torch.equal(one.projection, other.projection)
    layer = sq.TransformerDecoderLayer(
        C, H, F, mechanism=sq.PerformerConfig(features=16), cross_mechanism="additive", max_length=9
    )
    names = (layer.self_attn.mechanism.name, layer.multihead_attn.mechanism.name)
    assert names == ("performer", "additive")
    assert layer.multihead_attn.mechanism.max_length == 9


@pytest.mark.parametrize(
    ("mechanism", "given", "wanted"),
    [
        ("softmax", None, 0.3),
        ("softmax", 0.2, 0.2),
        ("softmax", 0.0, 0.0),
        ("softmax(dropout=0.4)", None, 0.4),
        ("softmax(dropout=0.4)", 0.4, 0.4),
        (PERFORMER, None, 0.0),
        (PERFORMER, 0.0, 0.0),
        ("mixed(softmax(dropout=0.4), performer)", None, 0.0),
    ],
)
@pytest.mark.parametrize("kind", LAYERS)
def test_dropout_of_attention_weights(kind, mechanism, given, wanted):
    layer = LAYERS[kind][1](C, H, F, dropout=0.3, mechanism=mechanism, attention_dropout=given)
    for module in layer.modules():
        if isinstance(module, nn.Dropout):
            assert module.p == 0.3
        elif isinstance(module, sq.MultiheadAttention):
            assert module.dropout == wanted
            assert getattr(module.mechanism.config, "dropout", 0.0) == wanted


def test_dropout_of_weights_that_do_not_exist_is_refused():
    for layer in (sq.TransformerEncoderLayer, sq.TransformerDecoderLayer):
        with pytest.raises(sq.UnsupportedError, match=r"does not support dropout=0.1.*softmax"):
            layer(C, H, F, mechanism=PERFORMER, attention_dropout=0.1)
    with pytest.raises(sq.UnsupportedError, match="'performer' does not support dropout=0.1"):
        sq.TransformerDecoderLayer(
            C, H, F, mechanism="softmax", cross_mechanism=PERFORMER, attention_dropout=0.1
        )
    with pytest.raises(sq.OptionError, match="dropout is given twice"):
        sq.TransformerEncoderLayer(C, H, F, mechanism="softmax(dropout=0.2)", attention_dropout=0.1)


def test_residual_dropout_is_applied_whatever_the_mechanism():
    layer = sq.TransformerEncoderLayer(C, H, F, dropout=0.5, mechanism=PERFORMER)
    x = tokens(L, False, torch.float32)
    assert not torch.equal(layer(x), layer(x))
    block = layer._sa_block(x, None, None)
    # N·L·C = 420 coins of probability ½: five standard deviations are 5·√420/2 ≈ 51
    assert abs((block == 0).sum() - 210) <= 51
    layer.eval()
    assert torch.equal(layer(x), layer(x))


# ---- saving, copying, moving ---------------------------------------------------------------


@pytest.mark.parametrize("mechanism", ["softmax", PERFORMER, "additive(hidden=3)"])
@pytest.mark.parametrize("kind", LAYERS)
def test_saving_copying_and_meta(kind, mechanism):
    make = LAYERS[kind][1]
    layer = make(C, H, F, mechanism=mechanism, seed=3).eval()
    tensors = inputs(kind, False, torch.float32)
    wanted = layer(*tensors)
    other = make(C, H, F, mechanism=mechanism, seed=4).eval()
    other.load_state_dict(layer.state_dict(), strict=True)
    with torch.device("meta"):
        late = make(C, H, F, mechanism=mechanism, seed=3).eval()
    assert all(tensor.is_meta for tensor in late.state_dict().values())
    plain = {name: t for name, t in layer.state_dict().items() if ".mechanism." not in name}
    twins = [other, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    if mechanism == PERFORMER:  # drawn from the seed; learned weights are in no one else's file
        late.load_state_dict(plain, strict=True, assign=True)
        twins.append(late)
    for twin in twins:
        assert torch.equal(twin(*tensors), wanted)
    learned = sum(p.requires_grad for p in layer.parameters())
    assert learned == sum(1 for _ in layer.parameters())
    assert layer.double()(*(x.double() for x in tensors)).dtype == torch.float64


def test_wrong_construction_is_named():
    with pytest.raises(sq.OptionError, match="num_heads=7 must divide embed_dim=30"):
        sq.TransformerEncoderLayer(C, 7, F)
    with pytest.raises(sq.UnknownNameError, match="did you mean 'softmax'"):
        sq.TransformerDecoderLayer(C, H, F, cross_mechanism="sofmax")
