"""LSH and chunked local attention next to transformers and reformer-pytorch.

Both packages sort the whole sequence by hash, cut the sorted line of all rounds into chunks and
let the first chunk look back to the last one. Rounds are then one line of chunks, which is what
`line` lists for our grouped engine; hashes, keys, the merge of rounds and gradients are ours.
"""

import pytest
import torch

import subquad as sq
from laws import close
from subquad.attention.sparse import reformer
from subquad.attention.sparse.reformer import _Pairs
from subquad.kernels.grouped import joint_softmax

pytestmark = pytest.mark.peers

ROUND = 1e-9
"""The packages give a token's own key the logit −1e5 (−5e4): float64 leaves 1e5·2.2e-16 = 2e-11 in
the log-sum-exp of a token that reads itself alone. A margin of fifty, for gradients too."""

F64 = torch.float64


def line(mech, x, chunk, before, after, identity=False):
    """Queries (R, B, H, G, C) and keys of chunks on one circular line of all rounds."""
    rounds, batch, heads, length = (1, *x.shape[:3]) if identity else mech.hash(x).shape
    if identity:
        table = torch.arange(length).expand(1, batch, heads, length)
    else:
        code = mech.hash(x) * length + torch.arange(length)
        table = code.argsort(-1)
    whole = table.permute(1, 2, 0, 3).reshape(batch, heads, -1, chunk)
    near = [whole.roll(-step, 2) for step in range(-before, after + 1)]
    each = length // chunk
    return tuple(
        t.view(batch, heads, rounds, each, -1).permute(2, 0, 1, 3, 4).contiguous()
        for t in (whole, torch.cat(near, -1))
    )


def ours(mech, q, v, queries, keys, scale, causal):
    """What the mechanism does with given groups: keys, closed pairs, merge, lonely tokens."""
    k, v = mech._keys(q, q, v)
    closed = _Pairs(queries.shape[3], q.shape[1], True, causal, [], 0, 0, 0)
    out, lse = joint_softmax(q, k, v, queries, keys, scale=scale, closed=[closed] * len(queries))
    return mech._alone(q, k, v, out, lse, None, scale)[0]


def reformer_layer(kind, causal, **options):
    modeling = pytest.importorskip("transformers.models.reformer.modeling_reformer")
    transformers = pytest.importorskip("transformers")
    config = transformers.ReformerConfig(
        hidden_size=24, num_attention_heads=3, attention_head_size=8, is_decoder=causal,
        lsh_attn_chunk_length=8, local_attn_chunk_length=8, num_buckets=6, hash_seed=5,
        lsh_attention_probs_dropout_prob=0.0, local_attention_probs_dropout_prob=0.0,
        max_position_embeddings=64, axial_pos_embds=False, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    layer = getattr(modeling, kind)(config, layer_idx=0).eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer.double()


def heads(x):
    return x.unflatten(-1, (3, 8)).transpose(1, 2)


def compare(found, wanted, leaves):
    close(found, wanted, ROUND)
    generator = torch.Generator().manual_seed(7)
    cotangent = torch.randn(wanted.shape, generator=generator, dtype=F64)
    pairs = zip(
        torch.autograd.grad(found, leaves, cotangent),
        torch.autograd.grad(wanted, leaves, cotangent),
        strict=True,
    )
    for a, b in pairs:
        close(a, b, ROUND)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rounds", "buckets"), [(1, 6), (3, 6), (2, [2, 4])])
@pytest.mark.parametrize(("before", "after"), [(1, 0), (1, 1)])
def test_transformers_lsh(causal, rounds, buckets, before, after):
    layer = reformer_layer(
        "LSHSelfAttention", causal, num_hashes=rounds,
        lsh_num_chunks_before=before, lsh_num_chunks_after=after,
    )  # fmt: skip
    layer.num_buckets = buckets
    mech = sq.build(
        "reformer", head_dim=8, num_heads=3, rounds=rounds, buckets=buckets, chunk=8,
        chunks="sorted", before=before, after=after, duplicates="each", dtype=F64,
    )  # fmt: skip
    torch.manual_seed(5)  # hash_seed
    size = sum(mech.factors) // 2
    drawn = torch.randn(
        3, 8, rounds, size, dtype=F64
    )  # (H, D, rounds, buckets/2), drawn at each call
    mech.rotations.copy_(drawn.permute(0, 2, 3, 1))
    x = torch.randn(
        2, 48, 24, generator=torch.Generator().manual_seed(1), dtype=F64
    ).requires_grad_()
    theirs = layer(x)
    assert torch.equal(
        theirs.buckets.view(2, 3, rounds, 48),
        (mech.hash(heads(layer.query_key(x))).permute(1, 2, 0, 3))
        + torch.arange(rounds)[:, None] * mech.buckets,
    )
    q, v = heads(layer.query_key(x)), heads(layer.value(x))
    out = ours(mech, q, v, *line(mech, q, 8, before, after), 8**-0.5, causal)
    leaves = [x, layer.query_key.weight, layer.value.weight]
    compare(out.transpose(1, 2).flatten(2), theirs.hidden_states, leaves)


def test_transformers_lsh_away_from_the_circle():
    """With one round, all but the first chunk have the package's neighbours in our own call."""
    layer = reformer_layer("LSHSelfAttention", False, num_hashes=1)
    mech = sq.build(
        "reformer(rounds=1, buckets=6, chunk=8, chunks=sorted)",
        head_dim=8,
        num_heads=3,
        dtype=F64,
    )
    torch.manual_seed(5)
    mech.rotations.copy_(torch.randn(3, 8, 1, 3, dtype=F64).permute(0, 2, 3, 1))
    x = torch.randn(2, 48, 24, generator=torch.Generator().manual_seed(1), dtype=F64)
    q, v = heads(layer.query_key(x)), heads(layer.value(x))
    code = mech.hash(q)[0] * 48 + torch.arange(48)
    later = code.argsort(-1).argsort(-1) >= 8  # all but the first chunk of the sorted line
    wanted = heads(layer(x).hidden_states)
    close(mech(q, q, v)[later], wanted[later], ROUND)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("before", "after"), [(1, 0), (1, 1)])
def test_transformers_local(causal, before, after):
    """Chunked local attention is a window of whole blocks, circular at both ends."""
    layer = reformer_layer(
        "LocalSelfAttention", causal,
        local_num_chunks_before=before, local_num_chunks_after=after,
    )  # fmt: skip
    x = torch.randn(
        2, 48, 24, generator=torch.Generator().manual_seed(1), dtype=F64
    ).requires_grad_()
    theirs = layer(x).hidden_states
    q, k, v = (heads(getattr(layer, name)(x)) for name in ("query", "key", "value"))
    queries, keys = line(None, q, 8, before, after, identity=True)
    out, _ = joint_softmax(q, k, v, queries, keys, scale=8**-0.5, causal=causal)
    leaves = [x, layer.query.weight, layer.key.weight, layer.value.weight]
    compare(out.transpose(1, 2).flatten(2), theirs, leaves)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rounds", [1, 3])
def test_reformer_pytorch(causal, rounds, monkeypatch):
    package = pytest.importorskip(
        "reformer_pytorch",
        reason="reformer-pytorch is not installed: pip install 'subquad[peers]'",
        exc_type=ImportError,
    )
    monkeypatch.setattr(reformer, "NORM_EPSILON", 0.0)  # as there
    layer = package.LSHAttention(bucket_size=8, n_hashes=rounds, causal=causal).eval()
    mech = sq.build(
        "reformer", head_dim=8, num_heads=1, rounds=rounds, buckets=6, chunk=8, chunks="sorted",
        duplicates="each", dtype=F64,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    shape = {"generator": generator, "dtype": F64, "requires_grad": True}
    q, v = (torch.randn(2, 48, 8, **shape) for _ in range(2))
    torch.manual_seed(9)
    theirs, _, buckets = layer(q, v)
    torch.manual_seed(9)
    mech.rotations.copy_(torch.randn(1, 8, rounds, 3, dtype=F64).permute(0, 2, 3, 1))
    hashed = mech.hash(q[:, None])[:, :, 0].transpose(0, 1) + 6 * torch.arange(rounds)[:, None]
    assert torch.equal(buckets, hashed.flatten(1))
    # Its keys have length 1, ours √D.
    groups = line(mech, q[:, None], 8, 1, 0)
    out = ours(mech, q[:, None], v[:, None], *groups, 1 / 8, causal)[:, 0]
    compare(out, theirs, [q, v])
