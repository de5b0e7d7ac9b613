"""`TokenMixing`, and mixers inside torch's layers."""

import copy
import pickle

import pytest
import torch
from torch import nn

import subquad as sq
from variants import tokens

N, L, C = 2, 7, 12
MIXERS = ["fnet", "gmlp", "gmlp(weights=toeplitz)", "mlp_mixer(hidden=5)", "mlp_mixer(hidden=none)"]
CAUSAL = [name for name in MIXERS if sq.describe(name).capabilities.causal]


def mixing(mechanism, **options):
    return sq.TokenMixing(C, mechanism=mechanism, max_length=19, dtype=torch.float64, **options)


def same(found, wanted):
    """The same operations on the same numbers, in another layout: a few roundings."""
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= 1e-13 * wanted.abs().max()


def ignored():
    return torch.arange(L) >= torch.tensor([[L], [4]])


@pytest.mark.parametrize("mechanism", MIXERS)
def test_layouts(mechanism):
    x = tokens(L, width=C)
    first, second = mixing(mechanism, batch_first=True), mixing(mechanism)
    wanted = first.mechanism(x)
    out, weights = first(x, x, x)
    assert weights is None
    same(out, wanted)
    y = x.transpose(0, 1)
    same(second(y, y, y)[0], wanted.transpose(0, 1))
    alone = x[0]
    same(second(alone, alone, alone)[0], wanted[0])
    assert set(first.state_dict()) == {f"mechanism.{n}" for n in first.mechanism.state_dict()}


@pytest.mark.parametrize("mechanism", MIXERS)
@pytest.mark.parametrize("floats", [False, True])
def test_padding(mechanism, floats):
    module, x = mixing(mechanism, batch_first=True), tokens(L, width=C)
    mask = ignored()
    given = torch.zeros(N, L).masked_fill(mask, float("-inf")) if floats else mask
    wanted = module.mechanism(x, key_mask=~mask)
    same(module(x, x, x, key_padding_mask=given)[0], wanted)
    alone = x[1]
    same(module(alone, alone, alone, key_padding_mask=given[1])[0], wanted[1])
    columns = mask[1].expand(L, L)  # whole columns, the same for both rows
    same(module(x, x, x, attn_mask=columns)[0][1], wanted[1])


@pytest.mark.parametrize("mechanism", CAUSAL)
def test_causal_masks(mechanism):
    module, x = mixing(mechanism, batch_first=True, num_heads=3), tokens(L, width=C)
    triangle = torch.ones(L, L, dtype=torch.bool).triu(1)
    wanted = module.mechanism(x, causal=True)
    floats = torch.zeros(L, L).masked_fill(triangle, float("-inf"))
    for masks in (
        {"is_causal": True},
        {"attn_mask": triangle},
        {"attn_mask": floats},
        {"attn_mask": floats, "is_causal": True},
        {"attn_mask": triangle.expand(N * 3, L, L)},
    ):
        same(module(x, x, x, **masks)[0], wanted)
    both = module(x, x, x, key_padding_mask=ignored(), attn_mask=triangle)[0]
    same(both, module.mechanism(x, causal=True, key_mask=~ignored()))


def test_refusals():
    module, x = mixing("fnet", batch_first=True), tokens(L, width=C)
    with pytest.raises(sq.UnsupportedError, match="no causal form") as caught:
        module(x, x, x, is_causal=True)
    assert "gmlp" in caught.value.alternatives
    with pytest.raises(sq.UnsupportedError, match="query, key and value have to be one"):
        module(x, x.clone(), x)
    with pytest.raises(sq.UnsupportedError, match="it has no attention weights"):
        module(x, x, x, need_weights=True)
    with pytest.raises(sq.UnsupportedError, match="neither causal .* nor whole columns"):
        module(x, x, x, attn_mask=torch.eye(L, dtype=torch.bool))
    with pytest.raises(sq.UnsupportedError, match="floats other than 0 and -inf"):
        module(x, x, x, key_padding_mask=torch.ones(N, L))
    with pytest.raises(sq.UnsupportedError, match="use padded tensors"):
        nested = torch.nested.nested_tensor([x[0], x[1, :4]], layout=torch.jagged)
        module(nested, nested, nested)
    with pytest.raises(sq.ShapeError, match=r"query must be \(N, L, C\) or \(L, C\), with C=12"):
        module(*[x[..., :5]] * 3)
    with pytest.raises(sq.ShapeError, match="key_padding_mask must be"):
        module(x, x, x, key_padding_mask=torch.zeros(N, 3, dtype=torch.bool))
    with pytest.raises(sq.ShapeError, match="longer than max_length=19"):
        long = tokens(20, width=C)
        mixing("gmlp", batch_first=True)(long, long, long)
    with pytest.raises(sq.OptionError, match=r"performer reads q, k and v.*fnet, gmlp, mlp_mixer"):
        sq.TokenMixing(C, mechanism="performer")
    with pytest.raises(sq.OptionError, match="max_length is needed"):
        sq.TokenMixing(C, mechanism="gmlp")
    with pytest.raises(sq.UnsupportedError, match=r"use subquad\.TokenMixing or an encoder layer"):
        sq.MultiheadAttention(C, 3, mechanism="fnet")
    with pytest.raises(sq.OptionError, match="performer: head_dim and num_heads are needed"):
        sq.build("performer", embed_dim=C)
    with pytest.raises(sq.OptionError, match="softmax: num_heads is needed"):
        sq.build("softmax", head_dim=C)


def test_neither_heads_nor_far_fields_nor_conversions():
    with pytest.raises(sq.OptionError, match="mixes tokens"):
        sq.build("mixed(fnet, softmax)", head_dim=4, num_heads=2)
    with pytest.raises(sq.OptionError, match="cannot be the far field"):
        sq.build("near_far(far=gmlp())", head_dim=4, num_heads=2, max_length=9)
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16,
    )  # fmt: skip
    with pytest.raises(sq.UnsupportedError, match="mixes tokens without q, k and v") as caught:
        sq.convert(transformers.BertModel(config), "fnet")
    assert "near_far" in caught.value.alternatives


# ---- inside encoder and decoder layers -------------------------------------------------------


@pytest.mark.parametrize("mechanism", MIXERS)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_encoder_layer(mechanism, norm_first, batch_first):
    """The layer is what its formula says, around the mixer; under torch's encoder too."""
    layer = sq.TransformerEncoderLayer(
        C, 3, 17, 0.0, batch_first=batch_first, norm_first=norm_first, dtype=torch.float64,
        mechanism=mechanism, max_length=19, seed=5,
    ).eval()  # fmt: skip
    built = sq.build(mechanism, embed_dim=C, max_length=19, seed=5, dtype=torch.float64)
    for name, tensor in built.state_dict().items():
        assert torch.equal(layer.self_attn.mechanism.state_dict()[name], tensor)
    x, mask = tokens(L, width=C), ignored()

    def feed_forward(y):
        return layer.linear2(torch.relu(layer.linear1(y)))

    if norm_first:
        y = x + built(layer.norm1(x), key_mask=~mask)
        wanted = y + feed_forward(layer.norm2(y))
    else:
        y = layer.norm1(x + built(x, key_mask=~mask))
        wanted = layer.norm2(y + feed_forward(y))
    given = x if batch_first else x.transpose(0, 1)
    out = layer(given, src_key_padding_mask=mask)
    same(out if batch_first else out.transpose(0, 1), wanted)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):  # our own bytes
        assert torch.equal(other(given, src_key_padding_mask=mask), out)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    with torch.no_grad():
        twice = layer(out, src_key_padding_mask=mask)
        same(encoder(given, src_key_padding_mask=mask), twice)
    out.sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.parametrize("mechanism", CAUSAL)
def test_decoder_layer(mechanism):
    layer = sq.TransformerDecoderLayer(
        C, 3, 17, 0.0, batch_first=True, dtype=torch.float64, mechanism=mechanism,
        cross_mechanism="softmax", max_length=19,
    ).eval()  # fmt: skip
    x, memory = tokens(L, width=C), tokens(5, width=C, seed=2)
    out = layer(x, memory, tgt_is_causal=True)
    changed = x.clone()
    changed[:, 4:] += 1.0
    same(layer(changed, memory, tgt_is_causal=True)[:, :4], out[:, :4])
    assert (layer(changed, memory)[:, :4] - layer(x, memory)[:, :4]).abs().max() > 1e-9
    with pytest.raises(sq.OptionError, match="cannot be a cross-attention"):
        sq.TransformerDecoderLayer(C, 3, mechanism=mechanism, max_length=19)


def test_layers_refuse_what_a_mixer_cannot():
    with pytest.raises(sq.UnsupportedError, match="attention_dropout|dropout"):
        sq.TransformerEncoderLayer(C, 3, mechanism="fnet", attention_dropout=0.1)
    with pytest.raises(sq.OptionError, match="nhead=5 must divide d_model=12"):
        sq.TransformerEncoderLayer(C, 5, mechanism="fnet")
    layer = sq.TransformerEncoderLayer(C, 3, mechanism="fnet", batch_first=True)
    with pytest.raises(sq.UnsupportedError, match="no causal form"):
        layer(tokens(L, width=C).float(), is_causal=True)
