"""`CausalTransformer`: torch's stack, padded texts, states, generation, what transformers does."""

import re
from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

import subquad as sq
from subquad.attention.base import Absent
from subquad.errors import ShapeError, UnsupportedError

B, L, C, H, V, HIDDEN = 3, 11, 21, 3, 17, 13
EPS = torch.finfo(torch.float64).eps


def model(mechanism="performer(features=16)", **options):
    options = {"num_layers": 2, "d_model": 24, "num_heads": 4, "dropout": 0.0, **options}
    config = sq.models.CausalTransformerConfig(
        vocab_size=V, dim_feedforward=HIDDEN, mechanism=mechanism, **options
    )
    torch.manual_seed(0)
    made = sq.models.CausalTransformer(config).eval()
    with torch.no_grad():  # tied weights of 1/√C alone hardly tell tokens apart
        made.embed.weight.mul_(3)
    return made


def texts(seed=0, rows=B):
    return torch.randint(5, V, (rows, L), generator=torch.Generator().manual_seed(seed))


def padded(side):
    """Rows of 11, 8 and 3 tokens, and their mask."""
    ids, sizes = texts(), torch.tensor([L, 8, 3])
    places = torch.arange(L)
    kept = places < sizes[:, None] if side == "right" else places >= L - sizes[:, None]
    return ids.masked_fill(~kept, 0), kept


# ---- numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_first", [False, True])
def test_equals_torchs_encoder_with_a_causal_mask(norm_first):
    made = model("softmax", d_model=C, num_heads=H, norm_first=norm_first, final_norm=True)
    made = made.double()
    layer = nn.TransformerEncoderLayer(
        C, H, HIDDEN, 0.0, batch_first=True, norm_first=norm_first, dtype=torch.float64
    )
    stack = nn.TransformerEncoder(layer, 2, nn.LayerNorm(C, dtype=torch.float64), False)
    made.decoder.load_torch(stack.state_dict())
    ids, kept = padded("right")
    table = made.embed.weight.detach().clone().requires_grad_()
    x = F.embedding(ids, table) * C**0.5 + made.decoder.positions(torch.arange(L), torch.float64)
    mask = torch.ones(L, L, dtype=torch.bool).triu(1)
    wanted = stack(x, mask=mask, src_key_padding_mask=~kept) @ table.mT
    found = made(ids, kept.long()).logits
    # Two layers of 12 eps each, see tests/attention/test_stack.py, and a map by the table.
    assert (found - wanted)[kept].abs().max() <= 3 * 12 * EPS * wanted.abs().max()
    labels = ids.masked_fill(~kept, -100)
    loss = made(ids, kept.long(), labels=labels).loss
    right = F.cross_entropy(wanted[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(loss, right, atol=0, rtol=1e-12)  # means of like sums, in float64
    right.backward()
    made.zero_grad()
    F.cross_entropy(found[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).backward()
    pairs = [(made.embed.weight.grad[1:], table.grad[1:])]  # the padding's vector has no gradient
    for name, parameter in stack.named_parameters():
        if name == "layers.0.linear1.weight":
            pairs.append((made.decoder.blocks[1].feed_forward.linear1.weight.grad, parameter.grad))
        if name == "layers.0.self_attn.in_proj_weight":
            pairs.append((made.decoder.blocks[0].attention.in_proj_weight.grad, parameter.grad))
    assert len(pairs) == 3
    for got, truth in pairs:  # 76 eps a layer, as there
        assert (got - truth).abs().max() <= 3 * 76 * EPS * truth.abs().max()


@pytest.mark.parametrize("mechanism", ["softmax", "performer(features=16)", "linear"])
@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_text_gives_what_it_gives_alone(mechanism, positions, side):
    made = model(mechanism, positions=positions)
    ids, kept = padded(side)
    with torch.no_grad():
        found = made(ids, kept.long()).logits
        for row in range(B):
            alone = made(ids[row, kept[row]][None]).logits[0]
            # float32, other sums: 2e-5 of logits around 10
            torch.testing.assert_close(found[row, kept[row]], alone, atol=2e-4, rtol=1e-4)


def test_no_token_reads_a_later_one():
    made = model()
    first, second = texts(0), texts(0)
    second[:, 6:] = texts(1)[:, 6:]
    with torch.no_grad():
        torch.testing.assert_close(made(first).logits[:, :6], made(second).logits[:, :6])


# ---- generation ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mechanism", ["softmax", "performer(features=16)", "linear", "near_far(window=3, heavy=2)"]
)
@pytest.mark.parametrize(
    "how",
    [{}, {"num_beams": 3, "num_return_sequences": 2}, {"do_sample": True}],
    ids=["greedy", "beam", "sampling"],
)
def test_generation_with_and_without_a_cache(mechanism, how):
    made = model(mechanism)
    ids, kept = padded("left")
    found = []
    for cached in (True, False):
        torch.manual_seed(3)
        found.append(
            made.generate(
                ids, attention_mask=kept.long(), max_new_tokens=7, use_cache=cached, **how
            )
        )
    assert torch.equal(*found)


def test_rows_generate_alone_what_they_generate_in_a_batch():
    made = model()
    ids, kept = padded("left")
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    together = made.generate(ids, attention_mask=kept.long(), **options)
    for row in range(B):
        alone = made.generate(ids[row, kept[row]][None], **options)
        assert torch.equal(together[row, -5:], alone[0, -5:])


def test_a_mechanism_without_a_state_computes_the_prefix_again():
    made = model()
    wanted = made.generate(texts(), max_new_tokens=3, min_new_tokens=3)
    for block in made.decoder.blocks[::2]:
        have = block.attention.mechanism.capabilities
        block.attention.mechanism.capabilities = replace(have, state=Absent("there is none"))
    out = made(texts(), use_cache=True)
    assert out.past_key_values is None
    assert torch.equal(made.generate(texts(), max_new_tokens=3, min_new_tokens=3), wanted)


def test_the_cache_moves_on_by_hand():
    made = model()
    ids = texts()
    with torch.no_grad():
        whole = made(ids).logits
        start = made(ids[:, :4], use_cache=True)
        rest = made(ids[:, 4:], past_key_values=start.past_key_values)
    torch.testing.assert_close(
        torch.cat([start.logits, rest.logits], 1), whole, atol=1e-4, rtol=1e-4
    )
    assert rest.past_key_values.get_seq_length() == L


@pytest.mark.parametrize("past", [0, 4])
def test_a_mask_of_other_tokens_than_all_so_far_is_refused(past):
    made, ids = model(), texts()
    cache = made(ids[:, :past], use_cache=True).past_key_values if past else None
    wanted = f"(B, {past} + {L - past})" if past else f"({B}, {L})"
    with pytest.raises(ShapeError, match=rf"attention_mask must be .* = {re.escape(wanted)}"):
        mask = torch.ones(B, L - past + (not past), dtype=torch.long)
        made(ids[:, past:], attention_mask=mask, past_key_values=cache)


def test_assisted_decoding_says_what_to_do_instead():
    made = model()
    with pytest.raises(UnsupportedError, match="greedy search, beams or sampling"):
        made.generate(texts()[:1], max_new_tokens=9, prompt_lookup_num_tokens=2)


# ---- what transformers does ------------------------------------------------------------------


def test_save_and_load_by_the_auto_class(tmp_path):
    made = model("performer(features=8)", tie_embeddings=False)
    made.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is type(made)
    for name, tensor in made.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert again.head.weight is not again.embed.weight


def test_embeddings_are_resized():
    made = model()
    made.resize_token_embeddings(V + 4, mean_resizing=False)
    assert made.head.weight is made.embed.weight and made.config.vocab_size == V + 4
    assert made(texts()).logits.shape == (B, L, V + 4)
