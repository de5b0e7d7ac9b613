"""Our BigBird against transformers' block-sparse attention: the same weights, its random blocks.

Its layer is called as its model calls it, in float64 and training mode (there is no dropout in
it): output and gradients of the hidden states and of all projections. Further tests pin down
where it departs from the paper, so that nobody takes it for the truth.
"""

import math

import pytest
import torch

import subquad as sq

pytestmark = pytest.mark.peers

pytest.importorskip(
    "transformers",
    reason="transformers is not installed: pip install 'subquad[peers]'",
)
from transformers import BigBirdConfig, BigBirdModel  # noqa: E402  # after importorskip
from transformers.models.big_bird.modeling_big_bird import (  # noqa: E402  # after importorskip
    BigBirdBlockSparseAttention,
)

F64 = torch.float64
HEADS, DIM, BLOCK, RANDOM, SEED = 3, 7, 4, 2, 11

TOLERANCE = 1e-12
"""Relative to the largest value: sums over ≤ 100 keys and ≤ 21 hidden units of values below 10,
two softmaxes that differ in the order of their sums: 100·21·1.1e-16·… < 1e-12."""


def layer(length, block=BLOCK):
    torch.manual_seed(0)
    config = BigBirdConfig(
        hidden_size=HEADS * DIM, num_attention_heads=HEADS, block_size=block,
        num_random_blocks=RANDOM, max_position_embeddings=1024, use_bias=True,
    )  # fmt: skip
    attention = BigBirdBlockSparseAttention(config, seed=SEED).to(F64).train()
    hidden = torch.randn(2, length, HEADS * DIM, dtype=F64, requires_grad=True)
    return attention, hidden


def run(attention, hidden, mask, monkeypatch):
    """Its context, its weights (B, H, L, L) and the random blocks (H, blocks − 2, r) it drew."""
    drawn = []
    gather = BigBirdBlockSparseAttention.torch_gather_b2

    def spy(params, indices):
        drawn.append(indices[0])
        return gather(params, indices)

    monkeypatch.setattr(BigBirdBlockSparseAttention, "torch_gather_b2", staticmethod(spy))
    masks = BigBirdModel.create_masks_for_block_sparse_attn(mask.to(F64), attention.block_size)
    blocked, band, rows, columns = masks
    out, weights = attention(hidden, band, rows, columns, blocked, blocked)
    return out.unflatten(-1, (HEADS, DIM)).transpose(1, 2), weights, drawn[0]


def ours(attention, hidden, mask, drawn):
    spec = f"bigbird(block={attention.block_size}, random={RANDOM})"
    mech = sq.build(spec, head_dim=DIM, num_heads=HEADS, dtype=F64)

    def brought(own, count, causal=False):
        """Theirs start with block 1; the first and the last read everything anyway."""
        blocks = torch.full((len(count), HEADS, len(own), RANDOM), -1)
        inner = (own >= 1) & (own <= drawn.shape[1])
        blocks[:, :, inner] = drawn[:, own[inner] - 1]
        return blocks

    mech.random_blocks = brought
    q, k, v = (
        project(hidden).unflatten(-1, (HEADS, DIM)).transpose(1, 2)
        for project in (attention.query, attention.key, attention.value)
    )
    return mech(q, k, v, key_mask=mask), mech.weights(q, k, key_mask=mask)


def repeats(drawn):
    """Query blocks whose random blocks are in their own window, global, or repeated, by head."""
    last = drawn.shape[1] + 1
    found = set()
    for head in range(len(drawn)):
        for index, row in enumerate(drawn[head].tolist()):
            own = index + 1
            if len({*row} - {own - 1, own, own + 1, 0, last}) < len(row):
                found.add((head, own))
    return found


def close(found, wanted, tolerance=TOLERANCE):
    error = (found - wanted).abs().max().item()
    assert error <= tolerance * wanted.abs().max().item(), f"{error:.3e}"


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("length", "block"), [(60, 4), (100, 4), (1024, 64)])
def test_same_weights_same_blocks_same_output_and_gradients(length, block, padded, monkeypatch):
    """Query blocks in which it counts a key twice are left out: they are known, see below.

    Its last block is that of the padded length, ours a row's own: padding stays within it here.
    """
    attention, hidden = layer(length, block)
    mask = torch.ones(2, length, dtype=torch.bool)
    if padded:
        mask[0, 1 - block :] = False
        mask[0, 5:18] = False  # and in the middle
    theirs, their_weights, drawn = run(attention, hidden, mask, monkeypatch)
    found, weights = ours(attention, hidden, mask, drawn)
    sound = mask[:, None].expand(-1, HEADS, -1).clone()  # its rows at padding are zeros
    twice = repeats(drawn)
    for head, own in twice:
        sound[:, head, own * block : (own + 1) * block] = False
    assert (not twice) == (length != 1024) and sound[1].double().mean() > 0.8
    close(found[sound], theirs[sound])
    close(weights[sound], their_weights[sound])
    generator = torch.Generator().manual_seed(1)
    bar = torch.randn(found.shape, generator=generator, dtype=F64) * sound[..., None]
    leaves = [hidden, *attention.parameters()]
    for a, b in zip(
        torch.autograd.grad(found, leaves, bar),
        torch.autograd.grad(theirs, leaves, bar),
        strict=True,
    ):
        if b.shape == (HEADS * DIM,) and b.abs().max() < 1e-9:
            # A bias of all keys moves no weight: its gradient is rounding.
            assert a.abs().max() < 1e-9
        else:
            close(a, b, 1e-11)  # through two more sums, over tokens and units


# ---- where it departs ---------------------------------------------------------------------


def test_in_evaluation_it_reads_no_random_block_but_the_first_again(monkeypatch):
    """Outside of training every random block is block 0, which is global: its keys count
    1 + r times in the normaliser, and no query reads anything at random.
    """
    attention, hidden = layer(60)
    mask = torch.ones(2, 60, dtype=torch.bool)
    theirs, _, drawn = run(attention.eval(), hidden, mask, monkeypatch)
    assert not drawn.any()
    none = torch.full_like(drawn, -1)
    found, _ = ours(attention, hidden, mask, none)
    inner = slice(BLOCK, -BLOCK)
    assert (found - theirs)[:, :, inner].abs().max() > 0.1 * found.abs().max()
    close(found[:, :, :BLOCK], theirs[:, :, :BLOCK])
    # The weights of block 0, three times, give its output exactly.
    q, k, v = (
        project(hidden).unflatten(-1, (HEADS, DIM)).transpose(1, 2)
        for project in (attention.query, attention.key, attention.value)
    )
    logits = q @ k.mT / math.sqrt(DIM)
    blocks = torch.arange(60) // BLOCK
    read = (blocks[:, None] - blocks).abs() <= 1
    read |= (blocks == 0) | (blocks == 14) | ((blocks == 0) | (blocks == 14))[:, None]
    counts = read.double()
    counts[BLOCK:-BLOCK, :BLOCK] = 1 + RANDOM
    weights = logits.exp() * counts
    close(theirs, weights @ v / weights.sum(-1, keepdim=True))


def test_its_draw_overlaps_the_window_at_the_end(monkeypatch):
    """At the lengths of the paper (1024, 3072, 4096) the last two inner query blocks draw from
    their own window as well ("Missing -3: should have been sliced till last-3", says its
    source): such keys count twice in one softmax. Each key once gives another output.
    """
    attention, hidden = layer(1024, 64)
    mask = torch.ones(2, 1024, dtype=torch.bool)
    theirs, _, drawn = run(attention, hidden, mask, monkeypatch)
    twice = repeats(drawn)
    assert twice and {own for _, own in twice} <= {13, 14}  # of 16 blocks
    own = torch.arange(1, 15)[:, None]
    again = ((drawn - own).abs() <= 1) | (drawn == 0) | (drawn == 15)
    found, _ = ours(attention, hidden, mask, drawn.masked_fill(again, -1))
    for head, own in twice:
        rows = slice(64 * own, 64 * (own + 1))
        assert (found - theirs)[:, head, rows].abs().max() > 0.01 * theirs.abs().max()


def test_lengths_that_the_block_does_not_divide_are_refused_there(monkeypatch):
    attention, hidden = layer(62)
    with pytest.raises(ValueError, match="multiple of block size"):
        attention(hidden)
    mech = sq.build("bigbird(block=4)", head_dim=DIM, num_heads=HEADS, dtype=F64)
    q = torch.randn(1, HEADS, 62, DIM, dtype=F64)
    assert mech(q, q, q).isfinite().all()


@pytest.mark.filterwarnings("ignore")  # of the model's configuration, which is not the subject
def test_its_model_turns_to_full_attention_and_stays_there():
    """A short input switches the model to full attention for good; ours has one mode."""
    torch.manual_seed(0)
    config = BigBirdConfig(
        vocab_size=17, hidden_size=HEADS * DIM, num_attention_heads=HEADS, block_size=BLOCK,
        num_random_blocks=RANDOM, num_hidden_layers=1, intermediate_size=13,
        max_position_embeddings=256,
    )  # fmt: skip
    model = BigBirdModel(config, add_pooling_layer=False).double().eval()
    assert model.attention_type == "block_sparse"
    tokens = torch.arange(200)[None] % 17
    before = model(tokens).last_hidden_state
    model(tokens[:, :20])
    after = model(tokens).last_hidden_state
    assert model.attention_type == "original_full"
    assert (after - before).abs().max() > 1e-6
    mech = sq.build("bigbird(block=4)", head_dim=DIM, num_heads=HEADS, dtype=F64)
    q = torch.randn(1, HEADS, 200, DIM, dtype=F64)
    whole = mech(q, q, q)
    mech(q[:, :, :20], q[:, :, :20], q[:, :, :20])
    assert torch.equal(mech(q, q, q), whole)
