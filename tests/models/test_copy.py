"""The pointer-generator: its formula by hand, its extremes, extended words, generation, its use."""

import copy
import random

import pytest
import torch
import transformers
from torch.nn import functional as F

import subquad as sq
from subquad.data.batches import pad_batch, pad_rows
from subquad.data.copying import decode_extended, extend_with_source
from subquad.data.encoded import EncodedPairs
from subquad.data.tokens import train_tokenizer
from subquad.errors import OptionError, ShapeError
from subquad.generation import Translator
from subquad.models.copy import PointerGenerator, token_losses
from subquad.training.objectives import Objective

B, L, S, C, V = 3, 5, 7, 11, 13
EPS = torch.finfo(torch.float64).eps


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def parts(seed=0):
    """A pointer and all that it is given; sources repeat words, lack words, and are padded."""
    torch.manual_seed(seed)
    pointer = PointerGenerator(C)
    logits, state, inputs, memory = (
        torch.randn(B, length, width) for length, width in ((L, V), (L, C), (L, C), (S, C))
    )
    source = torch.tensor(
        [[4, 13, 4, 14, 13, 2, 0], [5, 6, 7, 8, 9, 10, 2], [13, 13, 12, 2, 0, 0, 0]]
    )
    mask = torch.arange(S) < torch.tensor([[6], [7], [4]])
    return pointer, logits, state, inputs, memory, source, mask


def naive(pointer, logits, state, inputs, memory, source, mask):
    """Equations 8 and 9 of the paper, word by word, in float64."""
    pointer = copy.deepcopy(pointer).double()
    logits, state, inputs, memory = (x.double() for x in (logits, state, inputs, memory))
    width = max(V, int(source.max()) + 1)
    out = torch.zeros(B, L, width, dtype=torch.float64)
    for row in range(B):
        for t in range(L):
            scores = memory[row] @ pointer.query(state[row, t]) / C**0.5
            weights = scores.masked_fill(~mask[row], -torch.inf).softmax(0)
            context = weights @ memory[row]
            gate = pointer.gate(torch.cat([context, state[row, t], inputs[row, t]])).sigmoid()
            out[row, t, :V] = gate * logits[row, t].softmax(0)
            for j in range(S):
                out[row, t, source[row, j]] += ((1 - gate) * weights[j]).squeeze()
    return out


# ---- the formula -----------------------------------------------------------------------------


def test_equals_the_papers_equations():
    given = parts()
    found, wanted = given[0](*given[1:]), naive(*given)
    assert found.shape == (B, L, V + 2) and found.dtype == torch.float32
    # float32: sums of C·S products and an exp; 1e-5 is 84 eps of probabilities ≤ 1.
    torch.testing.assert_close(found.exp().double(), wanted, atol=1e-5, rtol=1e-5)
    # Row 1 has no words of its own, row 2 one of the two.
    there = torch.zeros(B, V + 2, dtype=torch.bool).scatter(1, given[5], True)
    there[:, :V] = True
    assert torch.equal(found > -torch.inf, there[:, None].expand_as(found))


def test_gradients_equal_those_of_the_equations():
    pointer, logits, state, inputs, memory, source, mask = parts()
    leaves = [x.requires_grad_() for x in (logits, state, inputs, memory)]
    labels = torch.tensor([[4, 13, 14, 2, 0], [5, 12, 3, 2, 1], [13, 12, 2, 11, 4]])
    names = [*leaves, *pointer.parameters()]
    found = pointer(logits, state, inputs, memory, source, mask)
    picked = -found.gather(-1, labels[..., None]).sum()
    twin = copy.deepcopy(pointer)
    again = [x.detach().clone().requires_grad_() for x in leaves]
    wanted = -naive_sum(twin, *again, source, mask, labels)
    truth = torch.autograd.grad(wanted, [*again, *twin.parameters()])
    for got, right in zip(torch.autograd.grad(picked, names), truth, strict=True):
        torch.testing.assert_close(got, right, atol=2e-5, rtol=2e-5)


def naive_sum(pointer, logits, state, inputs, memory, source, mask, labels):
    """Σ log P(label), as probabilities, without a detour over logarithms."""
    scores = (pointer.query(state) @ memory.mT) / C**0.5
    weights = scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1)
    gate = pointer.gate(torch.cat([weights @ memory, state, inputs], -1)).sigmoid()
    onehot = F.one_hot(source, V + 2).float()
    vocabulary = F.pad(logits.softmax(-1), (0, 2))
    total = gate * vocabulary + (1 - gate) * weights @ onehot
    return total.gather(-1, labels[..., None]).log().sum()


@pytest.mark.parametrize("bias", [-1e4, -60.0, 60.0, 1e4])
def test_a_sure_gate_keeps_everything_finite(bias):
    """p or 1 − p is 0 in float32: words of the other part keep a logarithm and a gradient."""
    pointer, logits, state, inputs, memory, source, mask = parts()
    with torch.no_grad():
        pointer.gate.bias.fill_(bias)
    found = pointer(logits, state.requires_grad_(), inputs, memory, source, mask)
    labels = torch.tensor([[4, 13, 14, 2, 11]] * 3)
    labels[1:] = torch.tensor([12, 12, 5, 2, 2])
    losses = -found.gather(-1, labels[..., None])
    assert losses.isfinite().all() and losses.max() > min(abs(bias), 50)
    losses.sum().backward()
    for parameter in pointer.parameters():
        assert parameter.grad.isfinite().all()
    assert pointer.gate.bias.grad.abs() > 1  # it is told to let go
    assert state.grad.isfinite().all()


def test_what_padding_holds_never_matters():
    pointer, logits, state, inputs, memory, source, mask = parts()
    wanted = pointer(logits, state, inputs, memory, source, mask)
    spoilt = memory.masked_fill(~mask[..., None], torch.nan).requires_grad_()
    found = pointer(logits, state, inputs, spoilt, source, mask)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    found[found > -torch.inf].sum().backward()
    assert spoilt.grad.isfinite().all() and not spoilt.grad[~mask].any()


def test_a_row_without_tokens_generates():
    pointer, logits, state, inputs, memory, source, mask = parts()
    mask[0] = False
    found = pointer(logits, state, inputs, memory, source, mask)
    assert not found.isnan().any()
    assert pointer.weights(state, memory, mask)[0].eq(0).all()


def test_wrong_shapes_are_named():
    pointer, logits, state, inputs, memory, source, mask = parts()
    with pytest.raises(ShapeError, match=r"source must be \(B, S\) = \(3, 7\), given \(3, 6\)"):
        pointer(logits, state, inputs, memory, source[:, :6], mask)
    with pytest.raises(ShapeError, match="mask must be"):
        pointer(logits, state, inputs, memory, source, mask[:2])
    with pytest.raises(OptionError, match="d_model=0 must be"):
        PointerGenerator(0)


# ---- the loss --------------------------------------------------------------------------------


def test_smoothing_spreads_over_the_words_that_there_are():
    given = parts()
    logits = given[0](*given[1:])
    labels = torch.tensor([[4, 13, 14, 2, -100], [5, 12, 3, 2, -100], [13, 12, 2, -100, -100]])
    found = token_losses(logits, labels, 0.3)
    for row in range(B):
        for t in range(L):
            if labels[row, t] < 0:
                assert found[row, t] == 0
                continue
            there = logits[row, t] > -torch.inf
            target = 0.3 * there / there.sum()
            target[labels[row, t]] += 0.7
            terms = (target * logits[row, t])[there]
            torch.testing.assert_close(found[row, t], -terms.sum(), atol=1e-5, rtol=1e-5)
    wanted = F.cross_entropy(given[1].flatten(0, 1), labels.clamp(max=12).flatten(),
                             label_smoothing=0.3, reduction="none")  # fmt: skip
    plain = token_losses(given[1], labels.clamp(max=12), 0.3)
    torch.testing.assert_close(plain.flatten(), wanted)
    with pytest.raises(ShapeError, match="labels must be"):
        token_losses(logits, labels[:, 1:])


def test_smoothing_has_finite_gradients():
    given = parts()
    logits = given[0](*given[1:])
    token_losses(logits, torch.full((B, L), 2), 0.1).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in given[0].parameters())


# ---- in a model ------------------------------------------------------------------------------


def model(**options):
    options = {"mechanism": "performer(features=16)", "dropout": 0.0, **options}
    config = sq.models.Seq2SeqTransformerConfig(
        vocab_size=V, d_model=24, num_heads=2, dim_feedforward=29, encoder_layers=1,
        decoder_layers=2, copy=True, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    made = sq.models.Seq2SeqTransformer(config).eval()
    with torch.no_grad():
        made.pointer.gate.bias.fill_(-3.0)  # so that words of the source are written
        made.pointer.query.weight.mul_(4)
    return made


def test_loss_smoothing_and_gradients_of_a_model():
    made = model()
    *_, source, mask = parts()
    labels = torch.tensor([[4, 13, 14, 2], [5, 12, 2, -100], [13, 12, 2, -100]])
    out = made(source, mask.long(), labels=labels)
    assert out.logits.shape == (B, 4, V + 2)
    encoded = made.encode(source, mask.long())
    inputs = made.prepare_decoder_input_ids_from_labels(labels)
    assert inputs.tolist()[0] == [1, 4, 13, 14]  # words are read back as they were written
    losses = made.token_losses(made.hidden(encoded, inputs), labels, encoded, inputs)
    torch.testing.assert_close(losses.sum() / (labels >= 0).sum(), out.loss)
    out.loss.backward()
    assert all(p.grad.isfinite().all() for p in made.parameters())
    assert made.pointer.query.weight.grad.any()


def test_the_objective_trains_it_with_smoothing():
    made = model()
    *_, source, mask = parts()
    labels = torch.tensor([[4, 13, 14, 2], [5, 12, 2, -100], [13, 12, 2, -100]])
    batch = {"input_ids": source, "attention_mask": mask.long(), "labels": labels}
    found = Objective(label_smoothing=0.2)(made, batch, 0.0)
    wanted = token_losses(made(**batch).logits, labels, 0.2).sum() / (labels >= 0).sum()
    torch.testing.assert_close(found.total, wanted)
    assert found.total.isfinite()


def test_words_of_the_source_are_read_as_unknown():
    made = model()
    ids = torch.tensor([[4, 15, 3]])
    vectors = made.embedded(ids, made.embed)
    assert torch.equal(vectors[0, 1], vectors[0, 2])


@pytest.mark.parametrize("mechanism", ["softmax", "performer(features=16)", "linear"])
@pytest.mark.parametrize(
    "how",
    [{}, {"num_beams": 3, "num_return_sequences": 2}, {"do_sample": True, "top_k": 5}],
    ids=["greedy", "beam", "sampling"],
)
def test_generation_with_and_without_a_cache(mechanism, how):
    made = model(mechanism=mechanism)
    *_, source, mask = parts()
    found = []
    for cached in (True, False):
        torch.manual_seed(1)
        found.append(
            made.generate(
                source, attention_mask=mask.long(), use_cache=cached, max_new_tokens=6,
                min_new_tokens=6, **how,
            )
        )  # fmt: skip
    assert torch.equal(*found)
    extended = found[0][found[0] >= V]
    assert len(extended)  # words of the source are written
    rows = found[0].view(B, -1)
    assert not (rows[1] >= V).any()  # but by a source that has none
    assert (rows[2] != V + 1).all()


def test_a_source_vocabulary_of_its_own_needs_source_ids():
    made = model(source_vocab_size=31)
    *_, source, mask = parts()
    ids = torch.randint(5, 31, source.shape, generator=generator())
    labels = source[:, :4]
    with pytest.raises(OptionError, match="copy=True needs source_ids"):
        made(ids, labels=labels)
    with pytest.raises(ShapeError, match="source_ids must be"):
        made(ids, labels=labels, source_ids=source[:, 1:])
    assert made(ids, labels=labels, source_ids=source).logits.shape[-1] == V + 2
    beams = made.generate(
        ids, attention_mask=mask.long(), source_ids=source, num_beams=2, max_new_tokens=3
    )
    assert beams.shape[0] == B


def test_what_does_not_go_together_is_refused():
    plain = copy.deepcopy(model().config).to_dict() | {"copy": False}
    plain = sq.models.Seq2SeqTransformer(sq.models.Seq2SeqTransformerConfig(**plain))
    ids = torch.ones(1, 3, dtype=torch.long)
    with pytest.raises(OptionError, match="source_ids are given to a model without copy"):
        plain(ids, labels=ids, source_ids=ids)
    with pytest.raises(OptionError, match="unk_token_id=99 must be < vocab_size=13"):
        model(unk_token_id=99)
    made = model()
    encoded = made.encode(ids)
    encoded.source_ids = None
    with pytest.raises(OptionError, match="with source_ids"):
        made(encoder_outputs=encoded, labels=ids)


def test_save_and_load(tmp_path):
    made = model()
    made.save_pretrained(tmp_path)
    again = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    *_, source, mask = parts()
    given = {"input_ids": source, "attention_mask": mask.long(), "labels": source}
    assert torch.equal(again(**given).logits, made(**given).logits)


# ---- texts -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def words():
    return train_tokenizer(["the cat saw the dog .", "a dog saw a cat ."] * 3, kind="word")


def test_texts_and_back(words):
    source = "the Axolotl saw Bob, the Axolotl ."
    pair = extend_with_source(source, words, "Bob saw the Axolotl and Carl .")
    size = len(words)
    assert pair.words == ("Axolotl", "Bob", ",")
    unknown = words.unk_token_id
    assert pair.labels[0] == size + 1 and pair.labels[3] == size
    assert pair.labels[4] == pair.labels[5] == unknown  # "and", "Carl": in neither
    assert pair.labels[-1] == pair.input_ids[-1] == words.eos_token_id
    plain = words(source)["input_ids"]
    same = [unknown if token >= size else token for token in pair.input_ids]
    assert same == plain
    assert (
        decode_extended(pair.input_ids, words, pair.words) == "the Axolotl saw Bob , the Axolotl ."
    )
    assert decode_extended(pair.labels, words, pair.words) == "Bob saw the Axolotl <unk> <unk> ."
    with pytest.raises(OptionError, match=f"token {size + 3} is none of"):
        decode_extended([size + 3], words, pair.words)


def test_limits_padding_of_the_vocabulary_and_case(words):
    pair = extend_with_source(
        "Ann saw Ann", words, "a Ann", vocab_size=64, max_source=3, max_target=2
    )
    assert pair.input_ids[0] == 64 and len(pair.input_ids) == 3 and pair.words == ("Ann",)
    assert len(pair.labels) == 2
    lower = train_tokenizer(["the cat"] * 2, kind="word", lowercase=True)
    pair = extend_with_source("The ANN the Ann", lower, "ann")
    assert pair.words == ("ANN",) and pair.labels[0] == len(lower)
    assert decode_extended(pair.labels, lower, pair.words) == "ANN"


def test_tokenizers_without_unknown_words_stay_as_they_are():
    bpe = train_tokenizer(["the cat saw the dog"] * 3, vocab_size=270)
    pair = extend_with_source("Axolotl, the", bpe, "the Axolotl")
    assert pair.words == () and pair.input_ids == bpe("Axolotl, the")["input_ids"]
    assert decode_extended(pair.labels, bpe, ()) == "the Axolotl"


def test_encoded_pairs_number_the_words_of_their_sources(words, tmp_path):
    texts = [("Ann saw the cat .", "the cat saw Ann ."), ("the dog .", "Bob saw the dog .")]
    texts.append(("a Carl and a Dora saw a cat .", "Dora Dora Carl"))
    limits = {"max_source": 6, "max_target": 4}
    plain = EncodedPairs(texts, words, folder=tmp_path, **limits)
    for found in (
        EncodedPairs(texts, words, copy=True, **limits),
        EncodedPairs(texts, words, copy=True, folder=tmp_path, **limits),
    ):
        for place, (source, target) in enumerate(texts):
            pair = extend_with_source(source, words, target, **limits)
            assert found[place]["input_ids"].tolist() == pair.input_ids
            assert found[place]["labels"].tolist() == pair.labels
            assert torch.equal(found.lengths, plain.lengths)
    assert max(plain[2]["labels"]) < len(words) <= max(found[2]["labels"])
    with pytest.raises(OptionError, match="copy=True needs one tokenizer"):
        EncodedPairs(texts, words, target_tokenizer=words, copy=True)


def test_slow_tokenizers_are_refused():
    with pytest.raises(OptionError, match="must be a fast one"):
        extend_with_source("a", object())


# ---- what it is for --------------------------------------------------------------------------

THINGS = ["book", "letter", "coin", "lamp", "ring"]
FORMS = [
    ("{a} gave {b} the {thing} .", "the {thing} was given to {b} by {a} ."),
    ("{a} took the {thing} from {b} .", "the {thing} of {b} was taken by {a} ."),
]


def names(count, draw):
    found = set()
    while len(found) < count:
        found.add("".join(draw.choice("bdfgklmnprstvz") + draw.choice("aeiou") for _ in range(3)))
    return draw.sample(sorted(found), count)


def sentences(count, people, draw):
    for _ in range(count):
        a, b = draw.sample(people, 2)
        source, target = draw.choice(FORMS)
        told = {"a": a, "b": b, "thing": draw.choice(THINGS)}
        yield source.format(**told), target.format(**told)


def trained(rows, vocab_size, copies, steps=120):
    torch.manual_seed(0)
    made = sq.models.Seq2SeqTransformer(
        sq.models.Seq2SeqTransformerConfig(
            vocab_size=vocab_size, d_model=32, dim_feedforward=64, encoder_layers=1,
            decoder_layers=1, dropout=0.0, mechanism="softmax", copy=copies,
        )
    )  # fmt: skip
    draw = random.Random(1)
    optimiser = torch.optim.Adam(made.parameters(), lr=5e-3)
    for _ in range(steps):
        optimiser.zero_grad()
        made(**pad_batch(draw.sample(rows, 16))).loss.backward()
        optimiser.step()
    return made.eval()


def test_names_that_were_never_seen_are_copied():
    """Two names in each sentence, which the target has in the other order."""
    draw = random.Random(0)
    people = names(400, draw)
    train = list(sentences(600, people[100:], draw))
    unseen = list(sentences(60, people[:100], draw))
    words = train_tokenizer(
        (text for pair in train for text in pair), kind="word", min_frequency=20
    )
    assert not set(people) & {word.strip("▁") for word in words.get_vocab()}
    unknown, size = words.unk_token_id, len(words)
    pairs = [extend_with_source(source, words, target) for source, target in train]
    rows = [{"input_ids": pair.input_ids, "labels": pair.labels} for pair in pairs]
    plain = [
        {name: [unknown if token >= size else token for token in ids] for name, ids in row.items()}
        for row in rows
    ]
    tests = [extend_with_source(source, words) for source, _ in unseen]
    batch = pad_rows([{"input_ids": pair.input_ids} for pair in tests])
    given = {"attention_mask": batch["attention_mask"], "max_new_tokens": 12}
    copying = trained(rows, size, True)
    out = copying.generate(batch["input_ids"], **given).tolist()
    found = [decode_extended(ids, words, pair.words) for ids, pair in zip(out, tests, strict=True)]
    copied = sum(one == target for one, (_, target) in zip(found, unseen, strict=True))
    translator = Translator(copying, words, beams=1, alignment=True)
    texts = translator.translate([source for source, _ in unseen])
    assert [one.text for one in texts] == found
    giver = tests[0].words[0]
    assert giver in " ".join(texts[0].tokens) and giver in " ".join(texts[0].alignment.source)
    # The plain model has learnt the rest: with the right names in order it would be as good.
    known = batch["input_ids"].masked_fill(batch["input_ids"] >= size, unknown)
    out = trained(plain, size, False).generate(known, **given).tolist()
    alone, guessed, told = 0, 0, 0
    for ids, pair, (_, target) in zip(out, tests, unseen, strict=True):
        text = decode_extended(ids, words, pair.words)
        alone += text == target
        guess = draw.sample(pair.words, 2)  # as good as it gets without looking
        guessed += fill(text, guess) == target
        told += target in (fill(text, pair.words), fill(text, pair.words[::-1]))
    assert alone == 0 and told >= 57
    assert copied >= 57
    # Half of the guesses are right: 60 draws have a deviation of 3.9.
    assert guessed <= 30 + 4 * 3.9


def fill(text, people):
    """The text with names in the place of its unknown words."""
    for person in people:
        text = text.replace("<unk>", person, 1)
    return text


def test_short_integers_are_copied_too():
    source, logits = torch.tensor([[5, 9, 2], [9, 9, 2]]), torch.randn(2, 4, 8)
    pointer, state = PointerGenerator(6), torch.randn(2, 4, 6)
    given = logits, state, state, torch.randn(2, 3, 6)
    wanted = pointer(*given, source)
    found = pointer(*given, source.to(torch.int32))
    assert torch.equal(found, wanted)
    labels = torch.tensor([[5, 9, 2, -100], [9, 1, 2, 0]])
    torch.testing.assert_close(
        token_losses(found, labels.to(torch.int32)), token_losses(wanted, labels), atol=0, rtol=0
    )
