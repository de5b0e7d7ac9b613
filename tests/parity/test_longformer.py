"""Our Longformer preset against transformers' LongformerSelfAttention, with the same weights."""

import functools

import pytest
import torch

import subquad as sq

pytestmark = pytest.mark.peers

pytest.importorskip(
    "transformers",
    reason="transformers is not installed: pip install 'subquad[peers]'",
)
from transformers import LongformerConfig  # noqa: E402  # after importorskip
from transformers.models.longformer import modeling_longformer  # noqa: E402  # likewise

F64 = torch.float64
HEADS, DIM, SIDE, LENGTH = 3, 7, 4, 64

TOLERANCE = 1e-12
"""Relative to the largest value, once its softmax is float64 too (see `layer`): sums over ≤ 64
keys and 21 hidden units of values below 10, in another order: 64·21·1.1e-16·… < 1e-12."""


@pytest.fixture
def layer(monkeypatch):
    """The layer in float64 and its input. It computes softmax in float32 whatever it is given;
    here that request is left out, so that all else is compared to the last digits.
    """
    softmax = torch.nn.functional.softmax

    def kept(*args, dtype=None, **kwargs):
        return softmax(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "softmax", kept)
    return make_layer()


def make_layer():
    torch.manual_seed(0)
    config = LongformerConfig(
        hidden_size=HEADS * DIM, num_attention_heads=HEADS, attention_window=[2 * SIDE],
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    attention = modeling_longformer.LongformerSelfAttention(config, layer_id=0).to(F64)
    return attention, torch.randn(2, LENGTH, HEADS * DIM, dtype=F64, requires_grad=True)


def run(attention, hidden, mask, tokens=()):
    """mask: (B, L) bool; tokens: positions of global tokens."""
    marks = torch.where(mask, 0.0, -10000.0).to(F64)
    marks[:, list(tokens)] = 10000.0
    (out,) = attention(
        hidden,
        attention_mask=marks,
        is_index_masked=marks < 0,
        is_index_global_attn=marks > 0,
        is_global_attn=bool((marks > 0).any()),
    )
    return out.unflatten(-1, (HEADS, DIM)).transpose(1, 2)


def projected(attention, hidden, suffix=""):
    return [
        getattr(attention, name + suffix)(hidden).unflatten(-1, (HEADS, DIM)).transpose(1, 2)
        for name in ("query", "key", "value")
    ]


def build(**options):
    return sq.build(
        "bigbird", head_dim=DIM, num_heads=HEADS, dtype=F64, preset="longformer", window=SIDE,
        **options,
    )  # fmt: skip


def close(found, wanted, tolerance=TOLERANCE):
    error = (found - wanted).abs().max().item()
    assert error <= tolerance * wanted.abs().max().item(), f"{error:.3e}"


def same(found, wanted, leaves):
    """Output and gradients."""
    close(found, wanted)
    generator = torch.Generator().manual_seed(1)
    bar = torch.randn(found.shape, generator=generator, dtype=F64)
    for a, b in zip(
        torch.autograd.grad(found, leaves, bar, allow_unused=True),
        torch.autograd.grad(wanted, leaves, bar, allow_unused=True),
        strict=True,
    ):
        if b is None or b.abs().max() < 1e-9:
            # Unused, or a bias of all keys, which moves no weight: its gradient is rounding.
            assert a is None or a.abs().max() < 1e-9
        else:
            close(a, b, 1e-11)  # through two more sums, over tokens and units


def masks():
    """Padding at the right of the second row, and a few tokens in the middle of the first."""
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[1, 41:] = False
    mask[0, 20:26] = False
    return mask


@pytest.mark.parametrize("padded", [False, True])
def test_the_window(layer, padded):
    attention, hidden = layer
    mask = masks() if padded else torch.ones(2, LENGTH, dtype=torch.bool)
    found = build(global_tokens=[])(*projected(attention, hidden), key_mask=mask)
    wanted = run(attention, hidden, mask)
    rows = mask[:, None, :, None]  # its padded rows are zeros
    same(found * rows, wanted, [hidden, *attention.parameters()])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("tokens", [[0], [0, 17, 39]])
def test_global_tokens_with_tied_projections(layer, tokens, padded):
    attention, hidden = layer
    for name in ("query", "key", "value"):
        setattr(attention, f"{name}_global", getattr(attention, name))
    mask = masks() if padded else torch.ones(2, LENGTH, dtype=torch.bool)
    found = build(global_tokens=tokens)(*projected(attention, hidden), key_mask=mask)
    wanted = run(attention, hidden, mask, tokens)
    same(found * mask[:, None, :, None], wanted, [hidden, *attention.parameters()])


def test_global_tokens_with_projections_of_their_own(layer):
    """Its global queries use other projections of all tokens: a call with these gives their
    rows, the plain one all others (which read global keys by the plain projections).
    """
    attention, hidden = layer
    tokens, mask = [0, 17, 39], masks()
    mech = build(global_tokens=tokens)
    plain = mech(*projected(attention, hidden), key_mask=mask)
    special = mech(*projected(attention, hidden, "_global"), key_mask=mask)
    rows = torch.zeros(LENGTH, 1, dtype=torch.bool)
    rows[tokens] = True
    found = torch.where(rows, special, plain) * mask[:, None, :, None]
    same(found, run(attention, hidden, mask, tokens), [hidden, *attention.parameters()])


@pytest.mark.parametrize("steps", [2, 4])
def test_dilation_is_a_plain_window_in_every_residue_class(layer, steps):
    """Its layer has no dilation: it is applied to every d-th token by itself."""
    attention, hidden = layer
    mask = torch.ones(2, LENGTH // steps, dtype=torch.bool)
    wanted = torch.zeros(2, HEADS, LENGTH, DIM, dtype=F64)
    for first in range(steps):
        wanted[:, :, first::steps] = run(attention, hidden[:, first::steps], mask)
    found = build(dilation=steps, global_tokens=[])(*projected(attention, hidden))
    same(found, wanted, [hidden, *attention.parameters()])


# ---- where it departs ---------------------------------------------------------------------


def test_its_softmax_is_float32():
    """A weight is rounded to 2^-24: a float64 model gets ≈ 1e-8 of error from it, not 1e-16."""
    attention, hidden = make_layer()
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    found = build(global_tokens=[])(*projected(attention, hidden))
    error = (found - run(attention, hidden, mask)).abs().max().item()
    # At most (rounded logits below 10, then weights) 11·2^-24 of the largest value.
    assert 1e-10 < error <= 11 * 2**-24 * projected(attention, hidden)[2].abs().max().item()


def test_a_length_that_the_window_does_not_divide_is_refused_there():
    attention, hidden = make_layer()
    mask = torch.ones(2, LENGTH - 1, dtype=torch.bool)
    with pytest.raises(AssertionError, match="should be multiple"):
        run(attention, hidden[:, 1:], mask)
    out = build(global_tokens=[])(*projected(attention, hidden[:, 1:]))
    assert out.shape == (2, HEADS, LENGTH - 1, DIM) and out.isfinite().all()


def test_junk_at_padding_spreads_there(layer):
    """NaN in a padded token's hidden state reaches the outputs of its neighbours; not ours."""
    attention, hidden = layer
    mask = masks()
    junk = hidden.detach().masked_fill(~mask[..., None], float("nan"))
    assert run(attention, junk, mask)[1, :, :41].isnan().any()
    mech = functools.partial(build(global_tokens=[]), key_mask=mask)
    rows = mask[:, None].expand(-1, HEADS, -1)
    clean = mech(*projected(attention, hidden))[rows]
    assert torch.equal(mech(*projected(attention, junk))[rows], clean)
