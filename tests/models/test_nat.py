"""Decoders that write all tokens at once: lengths, masks, losses, refinement, learning."""

import pytest
import torch
from torch.nn import functional as F

import subquad as sq
from generation.helpers import loud, small, word_tokenizer
from subquad.errors import OptionError, ShapeError, UnsupportedError

pytest.importorskip("transformers")

from subquad.generation import Translator, mask_predict
from subquad.models.nat import random_subset

KIND = "NonAutoregressiveTransformer"


def nat(**options):
    return small(KIND, **options)


def batch():
    generator = torch.Generator().manual_seed(2)
    source = torch.randint(5, 40, (3, 8), generator=generator)
    mask = torch.ones_like(source)
    mask[1, 6:] = 0
    labels = torch.randint(5, 40, (3, 6), generator=generator)
    for row, length in enumerate((6, 4, 1)):
        labels[row, length - 1] = 2
        labels[row, length:] = -100
    return {"input_ids": source * mask, "attention_mask": mask, "labels": labels}


# ---- masks and losses --------------------------------------------------------------------------


def test_the_number_of_masked_tokens_is_uniform():
    places = torch.zeros(20_000, 7, dtype=torch.bool)
    places[:, [0, 2, 3, 6]] = True
    hidden = random_subset(places, torch.Generator().manual_seed(1))
    assert not bool((hidden & ~places).any())
    counts = hidden.sum(1).bincount(minlength=5) / len(places)
    # shares of 1/4 have standard deviation √(0.1875/20000) = 0.0031; 5 of them
    wanted = torch.tensor([0.0, 0.25, 0.25, 0.25, 0.25])
    assert float((counts - wanted).abs().max()) < 0.0154
    each = hidden.float().mean(0)[[0, 2, 3, 6]]
    # each place is hidden with E[n]/4 = 0.625: standard deviation 0.0034; 5 of them
    assert float((each - 0.625).abs().max()) < 0.0172


@pytest.mark.parametrize("masking", ["uniform", "full"])
def test_the_loss_is_that_of_masked_tokens_and_of_the_length(masking):
    model, given = nat(masking=masking, max_length_offset=5).double(), batch()
    parts = model.loss(given, torch.Generator().manual_seed(4), label_smoothing=0.1)
    labels = given["labels"]
    keep = (labels != -100) & (labels != 2)
    hidden = keep
    if masking == "uniform":
        hidden = random_subset(keep, torch.Generator().manual_seed(4))
        assert not torch.equal(hidden, keep)
    ids = labels.masked_fill(~keep, 0).masked_fill(hidden, 4)
    out = model(
        given["input_ids"], given["attention_mask"], decoder_input_ids=ids,
        decoder_attention_mask=keep.long(),
    )  # fmt: skip
    # a mean of sums of at most 64 positive terms each, in float64: 1e-12 is 4,500 roundings
    wanted = F.cross_entropy(out.logits[hidden], labels[hidden], label_smoothing=0.1)
    torch.testing.assert_close(parts["cross_entropy"], wanted, rtol=1e-12, atol=0)
    encoded = model.encode(given["input_ids"], given["attention_mask"])
    mask = given["attention_mask"][..., None]
    mean = (encoded.last_hidden_state * mask).sum(1) / mask.sum(1)
    offsets = (torch.tensor([5, 3, 0]) - torch.tensor([8, 6, 8])).clamp(-5, 5) + 5
    length = 0.1 * F.cross_entropy(model.length_head(mean).float(), offsets)
    torch.testing.assert_close(parts["length"], length, rtol=1e-6, atol=0)


def test_a_fixed_length_is_filled_with_ends():
    model, given = nat(length_prediction="fixed", fixed_length=9, masking="full").double(), batch()
    parts = model.loss(given)
    targets = F.pad(given["labels"], (0, 3), value=-100)
    own = targets != -100
    targets = targets.masked_fill(~own, 2)
    masked = torch.full_like(targets, 4)
    logits = model(given["input_ids"], given["attention_mask"], decoder_input_ids=masked).logits
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    assert list(parts) == ["cross_entropy"]
    torch.testing.assert_close(parts["cross_entropy"], total / own.sum(), rtol=1e-12, atol=0)
    short = nat(length_prediction="fixed", fixed_length=5)
    with pytest.raises(ShapeError, match="target of 6 tokens, fixed_length is 5"):
        short.loss(given)


def test_padding_changes_no_loss():
    model, given = nat(mechanism="performer").double(), batch()
    wide = {
        "input_ids": F.pad(given["input_ids"], (0, 3), value=7),
        "attention_mask": F.pad(given["attention_mask"], (0, 3)),
        "labels": F.pad(given["labels"], (0, 2), value=-100),
    }
    model.config.masking = "full"
    for name, part in model.loss(given).items():
        torch.testing.assert_close(part, model.loss(wide)[name], rtol=1e-6, atol=1e-7)


def test_labels_alone_train_it():
    model, given = nat(), batch()
    torch.manual_seed(0)
    loss = model(**given).loss
    torch.manual_seed(0)
    assert torch.equal(loss, sum(model.loss(given).values()))
    loss.backward()
    without = [name for name, p in model.named_parameters() if p.grad is None]
    assert not without


# ---- decoding ----------------------------------------------------------------------------------


def test_refinement_follows_the_paper():
    """Against a plain loop for one row and one length."""
    model = loud(nat()).double()
    source = torch.randint(5, 40, (1, 8), generator=torch.Generator().manual_seed(1))
    size = int(model.lengths(model.encode(source))[0, 0])
    banned = [0, 1, 2, 4]
    ids, logs = torch.full((1, size), 4), torch.zeros(size, dtype=torch.double)
    rounds = 4
    with torch.no_grad():
        for done in range(rounds):
            again = list(range(size))
            if done:
                again = sorted(range(size), key=lambda t: float(logs[t]))
                again = again[: size * (rounds - done) // rounds]
            ids[0, again] = 4
            out = model(source, decoder_input_ids=ids).logits[0].float()
            out[:, banned] = float("-inf")
            best, tokens = out.log_softmax(-1).max(-1)
            ids[0, again], logs[again] = tokens[again], best[again].double()
    found = mask_predict(model, source, iterations=rounds, length_beam=1)
    assert found.sequences.tolist() == [[1, *ids[0].tolist(), 2]]
    # ≤ 72 float32 logarithms < 4: their mean to 1e-6
    torch.testing.assert_close(
        found.sequences_scores.double(), logs.mean()[None], rtol=0, atol=1e-6
    )


def test_lengths_are_the_likeliest_ones():
    model = loud(nat(max_length_offset=3)).double()
    source = torch.randint(5, 40, (2, 2), generator=torch.Generator().manual_seed(1))
    encoded = model.encode(source)
    logits = model._length_logits(encoded)
    found = model.lengths(encoded, 5)
    for row in range(2):
        order = [at - 3 + 2 for at in logits[row].argsort(descending=True).tolist()]
        assert found[row].tolist() == [length for length in order if length >= 1][:5]
    with pytest.raises(OptionError, match="8 lengths asked for, the classifier knows 7"):
        model.lengths(encoded, 8)
    limited = mask_predict(model, source, iterations=1, max_lengths=torch.tensor([1, 2]))
    assert (limited.sequences > 4).sum(1).tolist()[0] == 1


def test_outputs_hold_no_special_tokens_and_do_not_depend_on_the_batch():
    model, given = loud(nat(mechanism="performer")).double(), batch()
    inputs = {name: given[name] for name in ("input_ids", "attention_mask")}
    together = mask_predict(model, inputs, iterations=3, length_beam=3, n_best=2)
    for row in together.sequences.tolist():
        body = row[1 : row.index(2)]
        assert all(token == 3 or token > 4 for token in body)
        assert set(row[row.index(2) + 1 :]) <= {0}
    for at in range(3):
        size = int(inputs["attention_mask"][at].sum())
        alone = mask_predict(
            model, inputs["input_ids"][at : at + 1, :size], iterations=3, length_beam=3, n_best=2
        )
        for one, row in zip(alone.sequences.tolist(), together.sequences[2 * at :], strict=False):
            assert [t for t in one if t] == [t for t in row.tolist() if t]


def test_a_fixed_length_is_cut_at_its_first_end():
    model = loud(nat(length_prediction="fixed", fixed_length=12))
    out = mask_predict(model, batch()["input_ids"], iterations=3, length_beam=1)
    for row in out.sequences.tolist():
        assert row.count(2) <= 1
        if 2 in row:
            assert set(row[row.index(2) + 1 :]) <= {0}
    with pytest.raises(OptionError, match="n_best=2 .*fixed length gives one output"):
        mask_predict(model, batch()["input_ids"], n_best=2)


def test_a_fixed_length_keeps_to_the_longest_output():
    made = loud(nat(length_prediction="fixed", fixed_length=6))
    source = torch.tensor([[5, 6, 7, 2], [9, 8, 7, 2]])
    most = torch.tensor([2, 9])
    free = mask_predict(made, source, iterations=3).sequences
    assert 2 not in free[:, 1:4], "no end is found early"
    short = mask_predict(made, source, iterations=3, max_lengths=most).sequences
    assert short[0, 3] == 2 and 2 not in short[0, 1:3], "two tokens, then an end"
    assert torch.equal(short[0, 4:], torch.zeros_like(short[0, 4:]))
    assert torch.equal(short[1], free[1])
    translator = Translator(made, word_tokenizer([f"w{n}" for n in range(35)]), beams=1)
    for limit in (2, 9):
        translator.max_length = limit
        (found,) = translator.translate(["w1 w2"])
        assert len(found.tokens) == min(limit, 6)
        assert found.notes == (f"output cut at max_length: {min(limit, 6)} tokens",)


@pytest.mark.parametrize("mechanism", sq.mechanisms())
def test_every_mechanism_works_in_the_decoder(mechanism):
    """Also those that cannot be causal; token mixers in the place of self-attention."""
    describe = sq.describe(mechanism).capabilities
    cross = mechanism if describe.qkv and describe.cross and describe.full_length else "softmax"
    given = batch()
    options = {"mechanism": mechanism, "cross_mechanism": cross, "decoder_mechanism": mechanism}
    model = nat(max_position_embeddings=64, max_length_offset=4, **options)
    sum(model.train().loss(given, torch.Generator().manual_seed(1)).values()).backward()
    assert torch.isfinite(model.embed.weight.grad).all()
    out = model.eval().generate(given["input_ids"], attention_mask=given["attention_mask"])
    assert out.shape[0] == 3


def test_wrong_arguments():
    config = sq.models.NonAutoregressiveTransformerConfig
    with pytest.raises(OptionError, match="length_prediction='x'.*masking='y'.*mask_token_id=9"):
        config(vocab_size=8, length_prediction="x", masking="y", mask_token_id=9)
    with pytest.raises(OptionError, match="copy=True"):
        config(copy=True)
    model = nat()
    with pytest.raises(UnsupportedError, match="do_sample"):
        model.generate(batch()["input_ids"], do_sample=True)
    with pytest.raises(OptionError, match="iterations=0.*length_beam=0"):
        mask_predict(model, batch()["input_ids"], iterations=0, length_beam=0)


def test_saved_and_loaded(tmp_path):
    import transformers as tf

    model = loud(nat())
    model.save_pretrained(tmp_path)
    again = tf.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert type(again) is type(model)
    ids = batch()["input_ids"]
    assert torch.equal(again.generate(ids), model.generate(ids))


# ---- it learns ---------------------------------------------------------------------------------

WORDS, FORMS = 6, torch.tensor([0, 1, 1, 0, 1, 0])
"""Each word has two forms; a target takes, for all of its words, those of one hidden style."""


def styled(count, generator):
    """Sources, and targets in a style that the source does not tell."""
    length = torch.randint(4, 7, (count, 1), generator=generator)
    words = torch.randint(0, WORDS, (count, 7), generator=generator)
    style = torch.randint(0, 2, (count, 1), generator=generator)
    at = torch.arange(7)
    source = (5 + 2 * words).masked_fill(at == length, 2).masked_fill(at > length, 0)
    target = (5 + 2 * words + (style ^ FORMS[words])).masked_fill(at == length, 2)
    return {
        "input_ids": source,
        "attention_mask": (source != 0).long(),
        "labels": target.masked_fill(at > length, -100),
    }


@pytest.fixture(scope="module")
def learned():
    model = nat(
        vocabulary=5 + 2 * WORDS, dim_feedforward=64, length_prediction="fixed", fixed_length=7
    ).train()
    generator = torch.Generator().manual_seed(1)
    optimiser = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(350):
        loss = sum(model.loss(styled(32, generator), generator).values())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.eval()


def agreement(model, iterations):
    """Shares of outputs with the right words, and of those in one style throughout."""
    given = styled(300, torch.Generator().manual_seed(9))
    out = model.generate(
        given["input_ids"], attention_mask=given["attention_mask"], iterations=iterations,
        num_beams=1,
    )  # fmt: skip
    right = whole = 0
    for row, source in zip(out.tolist(), given["input_ids"].tolist(), strict=True):
        tokens = [token - 5 for token in row if token > 4]
        words = [(token - 5) // 2 for token in source if token > 4]
        good = [token // 2 for token in tokens] == words
        right += good
        whole += good and len({token % 2 ^ int(FORMS[token // 2]) for token in tokens}) == 1
    return right / 300, whole / 300


def test_passes_make_tokens_agree(learned):
    """One pass chooses each token by itself; later ones see what the others have chosen.

    Tokens that choose alone agree in a style with 2·2^−T, T ≥ 4: at most one output in 8.
    """
    words, styles = zip(*(agreement(learned, passes) for passes in (1, 2, 7)), strict=True)
    assert min(words) > 0.8, words
    assert styles[0] < 0.4, "no more than chance and some luck with ties"
    assert styles[0] < styles[1] < styles[2], styles
    assert styles[2] > 0.8, styles


def test_a_translator_treats_it_like_any_other(learned):
    names = [f"{word}{form}" for word in "abcdef" for form in "xy"]
    translator = Translator(learned, word_tokenizer(names), beams=1, iterations=7, alignment=True)
    source = "ax cx bx ex dx"
    (found,) = translator.translate([source])
    assert [word[0] for word in found.text.split()] == ["a", "c", "b", "e", "d"]
    assert found.score < 0
    assert [target for _, target in found.alignment.pairs()] == [0, 1, 2, 3, 4]
    assert found.alignment.weights.shape == (5, 5)
