"""Encoders: every mechanism and token mixer in them, heads by hand, files through Auto classes."""

import pytest
import torch
import transformers
from torch.nn import functional as F

import subquad as sq
from subquad import registry
from subquad.models.encoder import pooled

V, C, L = 31, 12, 23
HEADS = (
    "EncoderForSequenceClassification",
    "EncoderForTokenClassification",
    "EncoderForMaskedLM",
    "EncoderForQuestionAnswering",
)


def config(**options):
    sizes = {"vocab_size": V, "d_model": C, "num_heads": 2, "num_layers": 2, "dim_feedforward": 13}
    return sq.models.EncoderTransformerConfig(
        **{**sizes, "max_position_embeddings": 37, "num_labels": 3, **options}
    )


def model(name="EncoderTransformer", dtype=torch.float64, **options):
    torch.manual_seed(0)
    return getattr(sq.models, name)(config(**options)).to(dtype).eval()


def texts(rows=3, length=L, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, V, (rows, length), generator=generator)


def ragged(sizes, length=L):
    return (torch.arange(length) < torch.tensor(sizes)[:, None]).long()


def given(name, ids):
    """The labels that a model takes."""
    rows = torch.arange(len(ids))
    return {
        "EncoderForSequenceClassification": {"labels": rows % 3},
        "EncoderForTokenClassification": {"labels": ids % 3},
        "EncoderForMaskedLM": {"labels": ids.where(ids % 2 == 0, -100)},
        "EncoderForQuestionAnswering": {"start_positions": rows, "end_positions": rows + 2},
    }[name]


# ---- mechanisms ----------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", registry.MECHANISMS)
def test_every_mechanism_learns_and_pads_as_it_declares(mechanism):
    one = model("EncoderForSequenceClassification", mechanism=mechanism)
    have = registry.describe(mechanism).capabilities
    ids, sizes = texts(), [L, 17, 5]
    with torch.enable_grad():
        one(ids, labels=torch.tensor([0, 1, 2])).loss.backward()
    for name, parameter in one.named_parameters():
        if parameter.requires_grad and parameter.grad is not None:
            assert parameter.grad.isfinite().all(), name
    assert one.transformer.embed.weight.grad.abs().sum() > 0
    if not have.key:
        with pytest.raises(sq.UnsupportedError, match=mechanism):
            one(ids, ragged(sizes))
        return
    keep = ragged(sizes)
    other = ids.where(keep == 1, 7)  # what padding holds never matters
    with torch.no_grad():
        batch, same = one(ids, keep).logits, one(other, keep).logits
        # Each attention keeps padding out up to 1e-10 of its largest output (tests/laws.py); two
        # of them with norms of vectors of size about one in between: 1e-9.
        torch.testing.assert_close(same, batch, rtol=0, atol=1e-9)
        if have.pad_invariant:
            for row, size in enumerate(sizes):
                alone = one(ids[row : row + 1, :size]).logits[0]
                torch.testing.assert_close(batch[row], alone, rtol=0, atol=1e-9)


def test_padding_on_the_left_changes_nothing():
    one = model("EncoderForTokenClassification", mechanism="near_far(window=3)")
    ids, keep = texts(1), ragged([L - 4])
    wanted = one(ids[:, : L - 4]).logits
    got = one(ids.roll(4, 1), keep.flip(1)).logits[:, 4:]
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-9)  # as above


def test_mechanisms_by_layer_patterns_and_residual_attention():
    one = model(mechanism={0: "fnet", "default": "softmax"}, pattern="aaf", residual_attention=True)
    names = [b.attention.mechanism.name for b in one.encoder.blocks if hasattr(b, "attention")]
    assert names == ["fnet", "softmax", "softmax", "softmax"]
    states = one(texts(), output_hidden_states=True).hidden_states
    assert len(states) == 1 + 6
    torch.testing.assert_close(states[-1], one(texts()).last_hidden_state, rtol=0, atol=0)


# ---- heads -----------------------------------------------------------------------------------


def test_pooling_by_hand():
    hidden = torch.randn(3, 4, 5)
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1], [0, 0, 0, 0]])
    mean = torch.stack([hidden[0, :3].mean(0), hidden[1, 2:].mean(0), torch.zeros(5)])
    first = torch.stack([hidden[0, 0], hidden[1, 2], torch.zeros(5)])
    torch.testing.assert_close(pooled(hidden, mask, "mean"), mean)
    assert torch.equal(pooled(hidden, mask, "first"), first)
    assert torch.equal(pooled(hidden, None, "first"), hidden[:, 0])
    spoiled = hidden.masked_fill(mask[..., None] == 0, torch.nan)
    assert torch.equal(pooled(spoiled, mask, "mean"), pooled(hidden, mask, "mean"))


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_a_sequence_is_classified_from_its_pool(pooling):
    one, ids, keep = model(HEADS[0], pooling=pooling), texts(), ragged([L, 17, 5])
    hidden = one.transformer(ids, keep).last_hidden_state
    wanted = one.classifier(pooled(hidden, keep, pooling))
    torch.testing.assert_close(one(ids, keep).logits, wanted)


def test_problem_types_are_transformers():
    ids = texts()
    kinds = {
        "single_label_classification": (torch.tensor([0, 2, 1]), F.cross_entropy),
        "multi_label_classification": (
            torch.tensor([[0, 1, 1], [1, 0, 0], [0, 0, 0]]),
            lambda x, y: F.binary_cross_entropy_with_logits(x, y.double()),
        ),
        "regression": (torch.tensor([[1, 2, 3]] * 3), lambda x, y: (x - y).square().mean()),
    }
    for kind, (labels, loss) in kinds.items():
        out = model(HEADS[0], problem_type=kind)(ids, labels=labels)
        torch.testing.assert_close(out.loss, loss(out.logits, labels))
    one = model(HEADS[0], num_labels=1)
    out = one(ids, labels=torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64))
    error = out.logits[:, 0] - torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    torch.testing.assert_close(out.loss, error.square().mean())


def test_losses_of_tokens_leave_out_what_has_no_label():
    for name in HEADS[1:3]:
        one, ids = model(name, torch.float32), texts()
        labels = given(name, ids)["labels"].clone()
        labels[0] = -100
        out = one(ids, labels=labels)
        logits, wanted = out.logits[1:], labels[1:]
        picked = logits.log_softmax(-1).gather(-1, wanted.clamp_min(0)[..., None])[..., 0]
        torch.testing.assert_close(out.loss, -picked[wanted >= 0].mean())


def test_spans_of_answers_lie_in_the_text():
    one, ids, keep = model(HEADS[3]), texts(), ragged([L, 17, 5])
    start, end = torch.tensor([3, 0, 9]), torch.tensor([5, 16, 9])
    out = one(ids, keep, start_positions=start, end_positions=end)
    for logits in (out.start_logits, out.end_logits):
        assert (logits.softmax(-1)[keep == 0] == 0).all()
    alone = one(ids[1:2, :17], start_positions=start[1:2], end_positions=end[1:2])
    by_hand = [F.cross_entropy(out.start_logits[1:2], start[1:2])]
    by_hand.append(F.cross_entropy(out.end_logits[1:2], end[1:2]))
    torch.testing.assert_close(alone.loss, sum(by_hand) / 2)
    missing = torch.full((1,), 17)  # not in this text
    some = one(
        ids[1:2, :17].repeat(2, 1),
        start_positions=torch.cat([start[1:2], missing]),
        end_positions=torch.cat([end[1:2], missing]),
    )
    torch.testing.assert_close(some.loss, alone.loss)
    with pytest.raises(sq.OptionError, match="both start_positions and end_positions"):
        one(ids, start_positions=start)


def test_segments_have_vectors():
    one, ids = model(segments=2), texts()
    kinds = (torch.arange(L) > 8).long().expand_as(ids)
    assert not torch.equal(one(ids).last_hidden_state, one(ids, None, kinds).last_hidden_state)
    zeros = torch.zeros_like(ids)
    assert torch.equal(one(ids).last_hidden_state, one(ids, None, zeros).last_hidden_state)
    plain = model()
    assert torch.equal(plain(ids).last_hidden_state, plain(ids, None, zeros).last_hidden_state)
    with pytest.raises(sq.OptionError, match="segments=0"):
        plain(ids, None, kinds)
    with pytest.raises(sq.ShapeError, match=r"token_type_ids must be \(B, L\) = \(3, 23\)"):
        one(ids, None, kinds[:, 1:])


def test_wrong_arguments_say_what_is_wrong():
    one, ids = model(), texts()
    with pytest.raises(sq.OptionError, match="either input_ids or inputs_embeds"):
        one()
    with pytest.raises(sq.ShapeError, match=r"attention_mask must be \(B, L\)"):
        one(ids, torch.ones(3, 5))
    with pytest.raises(sq.DtypeError, match="must be integers"):
        one(ids.double())
    with pytest.raises(sq.OptionError, match="`weights`"):
        one(ids, output_attentions=True)
    with pytest.raises(sq.OptionError) as caught:
        config(pooling="max", segments=-1, head_dropout=2.0, num_layers=0)
    for name in ("pooling='max'", "segments=-1", "head_dropout=2.0", "num_layers=0"):
        assert name in str(caught.value)


# ---- as transformers' models -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["EncoderTransformer", *HEADS])
def test_files_load_through_auto_classes(name, tmp_path):
    one = model(name, torch.float32, segments=2, mechanism=["performer", "near_far(window=3)"])
    one.save_pretrained(tmp_path)
    auto = "AutoModel" + name.removeprefix("Encoder").removeprefix("Transformer")
    other = getattr(transformers, auto).from_pretrained(tmp_path).eval()
    assert type(other) is type(one) and other.config.mechanism == one.config.mechanism
    ids, keep = texts(), ragged([L, 17, 5])
    for a, b in zip(one(ids, keep).to_tuple(), other(ids, keep).to_tuple(), strict=True):
        assert torch.equal(a, b)
    first, *_ = other(ids, keep, return_dict=False)
    assert torch.equal(first, one(ids, keep)[0])


def test_pretrained_weights_load_into_every_other_model(tmp_path):
    one = model("EncoderForMaskedLM", torch.float32)
    one.save_pretrained(tmp_path)
    wanted = one.transformer(texts()).last_hidden_state
    plain = transformers.AutoModel.from_pretrained(tmp_path).eval()
    assert torch.equal(plain(texts()).last_hidden_state, wanted)
    for name in HEADS:
        auto = getattr(transformers, "AutoModel" + name.removeprefix("Encoder"))
        other = auto.from_pretrained(tmp_path, num_labels=5).eval()
        assert torch.equal(other.transformer(texts()).last_hidden_state, wanted), name


def test_the_masked_language_models_output_map_is_its_embedding():
    one = model("EncoderForMaskedLM")
    assert one.head.weight is one.transformer.embed.weight
    one.resize_token_embeddings(V + 6)
    assert one.head.weight is one.transformer.embed.weight and one.head.bias.shape == (V + 6,)
    assert one(texts() + 6).logits.shape[-1] == V + 6
    loose = model("EncoderForMaskedLM", tie_embeddings=False)
    assert loose.head.weight is not loose.transformer.embed.weight


@pytest.mark.parametrize("name", HEADS)
def test_checkpointed_gradients_are_the_same(name):
    one, ids = model(name, dropout=0.0, head_dropout=0.0).train(), texts()
    found = []
    for again in (False, True):
        if again:
            one.transformer.encoder.gradient_checkpointing = True
        one.zero_grad()
        one(ids, **given(name, ids)).loss.backward()
        found.append({n: p.grad.clone() for n, p in one.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for key, grad in found[0].items():
        assert torch.equal(grad, found[1][key]), key


@pytest.mark.slow  # torch's tracing
def test_an_encoder_compiles_in_one_piece():
    one = model(HEADS[0], torch.float32)
    fast = torch.compile(one, backend="eager", fullgraph=True)
    ids, keep = texts(), ragged([L, 17, 5])
    torch.testing.assert_close(fast(ids, keep).logits, one(ids, keep).logits)
