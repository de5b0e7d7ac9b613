"""Objectives: each against its formula, and combinations against what they are made of."""

import copy
import itertools
import math

import pytest
import torch
from torch.nn import functional as F

import subquad as sq
from subquad.errors import OptionError
from subquad.training.objectives import Objective
from subquad.training.objectives.cross_entropy import cross_entropy
from subquad.training.objectives.feeding import Own, fed, stepwise_cross_entropy
from subquad.training.objectives.guided import diagonal_loss, monotonic_loss
from subquad.training.objectives.noise import Noise
from subquad.training.objectives.reading import Reading, uniform
from subquad.training.objectives.scheduled import Scheduled, averaged, passed, places_kept
from subquad.training.objectives.sequence import sentence_reward

V = 23
# float64: gradients are sums of at most about 10⁴ terms of size ≤ 1, and of both ways to add
# them up: 2·10⁴·1.1e-16, with a margin of fifty for the chain of layers.
EXACT = {"rtol": 1e-10, "atol": 1e-10}


def translator(mechanism="softmax", **options):
    torch.manual_seed(0)
    given = {
        "vocab_size": V,
        "d_model": 12,
        "num_heads": 2,
        "dim_feedforward": 17,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "max_position_embeddings": 32,
        "dropout": 0.0,
    }
    config = sq.models.Seq2SeqTransformerConfig(**{**given, **options}, mechanism=mechanism)
    return sq.models.Seq2SeqTransformer(config).double()


def language_model(mechanism="softmax", **options):
    torch.manual_seed(0)
    given = {
        "vocab_size": V,
        "d_model": 12,
        "num_heads": 2,
        "dim_feedforward": 17,
        "num_layers": 2,
        "max_position_embeddings": 32,
        "dropout": 0.0,
    }
    config = sq.models.CausalTransformerConfig(**{**given, **options}, mechanism=mechanism)
    return sq.models.CausalTransformer(config).double()


def pairs(seed=0):
    """Three sources and targets, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(5, V, (3, 11), generator=generator)
    labels = torch.randint(5, V, (3, 7), generator=generator)
    source[1, 6:], labels[1, 5:], labels[2, 3:] = 0, -100, -100
    return {"input_ids": source, "attention_mask": (source != 0).long(), "labels": labels}


def texts(seed=0):
    """Three texts; of the second one a prompt is given, the third is padded on the right."""
    ids = torch.randint(5, V, (3, 8), generator=torch.Generator().manual_seed(seed))
    ids[2, 5:] = 0
    labels = ids.masked_fill(ids == 0, -100)
    labels[1, :3] = -100
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


CASES = {"translation": (translator, pairs), "text": (language_model, texts)}
each_case = pytest.mark.parametrize("case", CASES)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }


def assert_same(found, expected, **tolerance):
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, msg=name, **(tolerance or EXACT))


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


# ---- cross entropy ---------------------------------------------------------------------------


def smoothed(logits, labels, epsilon):
    """The formula, label by label."""
    total, count = 0.0, 0
    for scores, label in zip(logits.flatten(0, 1), labels.flatten().tolist(), strict=True):
        if label != -100:
            logs = scores.log_softmax(-1)
            wanted = torch.full_like(logs, epsilon / len(logs))
            wanted[label] += 1 - epsilon
            total, count = total - (wanted * logs).sum(), count + 1
    return total / count


@each_case
@pytest.mark.parametrize("epsilon", [0.0, 0.1])
def test_cross_entropy_is_that_of_all_logits(case, epsilon):
    build, make = CASES[case]
    model, batch = build(), make()
    found = Objective(epsilon)(model, batch, 0.0)
    if case == "text":
        given = {k: v[:, :-1] for k, v in batch.items() if k != "labels"}
        expected = smoothed(model(**given).logits, batch["labels"][:, 1:], epsilon)
    else:
        expected = smoothed(model(**batch).logits, batch["labels"], epsilon)
    torch.testing.assert_close(found.total, expected, **EXACT)
    assert_same(gradients(model, found.total), gradients(model, expected))
    assert found.parts == {"cross_entropy": found.total.item()}


def test_vectors_without_a_label_are_not_mapped_to_the_vocabulary():
    model, batch, seen = translator(), pairs(), []
    model.head.register_forward_pre_hook(lambda module, given: seen.append(given[0].shape))
    Objective()(model, batch, 0.0)
    assert seen == [(7 + 5 + 3, 12)]


@each_case
def test_a_batch_without_any_label_costs_nothing(case):
    build, make = CASES[case]
    model, batch = build(), make()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    for options in ({}, {"feeding": "free"}, {"feeding": "free", "free_loss": "stepwise"}):
        loss = Objective(**options)(model, batch, 0.0).total
        assert loss.item() == 0
        assert all(not one.any() for one in gradients(model, loss).values())


def test_words_that_are_copied_have_the_pointer_generators_loss():
    model, batch = translator(copy=True), pairs()
    batch["input_ids"][0, 2] = batch["labels"][0, 1] = V + 1  # a word that the vocabulary lacks
    batch["input_ids"][0, 4] = V
    found = Objective(0.1)(model, batch, 0.0).total
    encoded = model.encode(batch["input_ids"], batch["attention_mask"])
    read = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    hidden = model.hidden(encoded, read)
    losses = model.token_losses(hidden, batch["labels"], encoded, read, label_smoothing=0.1)
    # The pointer computes in float32: 10 logarithms of about 4 each with rounding 6e-8.
    torch.testing.assert_close(found, (losses.sum() / 15).to(found), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("copies", [False, True])
def test_bfloat16_arithmetic_gives_finite_gradients(copies):
    model, batch = translator(copy=copies).float(), pairs()
    for options in ({}, {"feeding": "free", "free_loss": "stepwise"}, {"sequence": {}}):
        with torch.autocast("cpu", torch.bfloat16):
            loss = Objective(**options)(model, batch, 0.5, seeded()).total
        assert loss.dtype == torch.float32
        assert all(one.isfinite().all() for one in gradients(model, loss).values())


# ---- own tokens ------------------------------------------------------------------------------


def test_draws_pick_tokens_by_their_probability():
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, float("-inf"), 1.1])
    count = 10_000
    draws = (torch.arange(count) + 0.5) / count  # one in each of as many equal intervals
    for own in (Own(), Own(temperature=0.5), Own(top_k=2)):
        found = own(logits.expand(count, -1), draws).bincount(minlength=6) / count
        scores = logits / own.temperature
        if own.top_k:
            scores[logits < logits.topk(2).values[-1]] = float("-inf")
        # An interval of u contains the border of at most one token on each side.
        torch.testing.assert_close(found, scores.softmax(0), rtol=0, atol=2 / count)
    most = torch.tensor([1 - 2**-24, 0.0])  # the ends of float32's [0, 1)
    impossible = torch.tensor([float("-inf"), 0.1, 0.7, float("-inf")])
    assert Own()(impossible.expand(2, -1), most).tolist() == [2, 1]
    assert Own("argmax")(logits[None], torch.zeros(1)).item() == 2


@pytest.mark.parametrize("mechanism", ["softmax", "performer", "linear", "aft", "synthesizer"])
def test_a_decoder_that_feeds_itself_writes_what_generate_does(mechanism):
    model, batch = translator(mechanism, cross_mechanism="softmax").eval(), pairs()
    source = {k: batch[k] for k in ("input_ids", "attention_mask")}
    out = model.generate(**source, max_new_tokens=7, min_new_tokens=7, do_sample=False)
    reading = Reading.of(model, {**batch, "labels": torch.full((3, 8), 5)})
    never = torch.zeros(V, dtype=torch.double)
    never[2] = float("-inf")  # generate writes no end before min_new_tokens

    def greedy(logits, draws):
        return (logits + never).argmax(-1)

    found = fed(reading, ~reading.free, greedy, torch.zeros(3, 8))
    assert torch.equal(found, out)


def test_what_a_decoder_feeds_itself_has_no_dropout_and_changes_no_mode():
    model = translator(dropout=0.5)
    model.encoder.eval()
    reading = Reading.of(model, pairs())
    draws = uniform(reading.inputs, seeded())
    found = [fed(reading, ~reading.free, Own(), draws) for _ in range(2)]
    assert torch.equal(*found)
    assert model.training and model.decoder.training and not model.encoder.training


@each_case
def test_only_tokens_that_were_to_be_predicted_are_replaced(case):
    build, make = CASES[case]
    reading = Reading.of(build().eval(), make())
    wrong = 22

    def choice(logits, draws):
        return torch.full_like(draws, wrong, dtype=torch.long)

    kept, draws = places_kept(reading, 0.0, seeded()), torch.zeros(reading.inputs.shape)
    found = fed(reading, kept, choice, draws)
    labels = reading.labels
    for row, place in itertools.product(range(3), range(found.shape[1])):
        free = place > 0 and labels[row, place - 1] != -100
        assert found[row, place] == (wrong if free else reading.inputs[row, place])


# ---- free running ----------------------------------------------------------------------------


@each_case
def test_free_running_is_cross_entropy_behind_own_tokens(case):
    build, make = CASES[case]
    model, batch = build(), make()
    found = Objective(0.1, feeding="free")(model, batch, 0.0).total
    reading = Reading.of(model, batch)
    own = fed(reading, ~reading.free, Own("argmax"), torch.zeros(reading.inputs.shape))
    assert not torch.equal(own, reading.inputs)
    read = reading.reads(own)
    expected = cross_entropy(read, read.see(), 0.1)
    torch.testing.assert_close(found, expected, **EXACT)
    stepped = Objective(0.1, feeding="free", free_loss="stepwise")(model, batch, 0.0).total
    torch.testing.assert_close(stepped, expected, **EXACT)


@pytest.mark.parametrize("options", [{}, {"copy": True}, {"memory": "same_depth"}])
@pytest.mark.parametrize("mechanism", ["softmax", "linear"])
def test_stepwise_gradients_are_whole_where_no_token_reads_another(mechanism, options):
    # Cross-attention and feed-forward alone: what is remembered of earlier tokens is nothing.
    model, batch = translator(mechanism, decoder_pattern="cf", **options), pairs()
    losses = [
        Objective(0.1, feeding="free", free_loss=kind)(model, batch, 0.0).total
        for kind in ("summed", "stepwise")
    ]
    # copy=True computes in float32: sums of about 10⁴ gradients, rounding 6e-8 each.
    near = {"rtol": 1e-3, "atol": 1e-5} if options.get("copy") else EXACT
    torch.testing.assert_close(*losses, **near)
    factor = 3.0  # what stands above the loss counts
    expected, found = (gradients(model, factor * loss) for loss in losses)
    assert_same(found, expected, **near)
    assert any(bool(one.any()) for name, one in found.items() if name.startswith("encoder"))


@pytest.mark.parametrize("mechanism", ["softmax", "linear"])
def test_stepwise_gradients_hold_what_is_remembered_fixed(mechanism):
    model, batch = language_model(mechanism), texts()
    batch = {k: v[:1] for k, v in batch.items()}
    found = gradients(
        model, Objective(0.0, feeding="free", free_loss="stepwise")(model, batch, 0.0).total
    )
    # Each token by a copy of the model that has read the tokens before: they get no gradient.
    reading = Reading.of(model, batch)
    inputs = fed(reading, ~reading.free, Own("argmax"), torch.zeros(reading.inputs.shape))
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for place in range(inputs.shape[1]):
        cache = sq.models.StackCache()
        if place:
            with torch.no_grad():
                copy.deepcopy(model).hidden(inputs[:, :place], past_key_values=cache)
        hidden = model.hidden(inputs[:, place : place + 1], past_key_values=cache)
        loss = F.cross_entropy(model.head(hidden[:, 0]), reading.labels[:, place])
        for name, one in gradients(model, loss / inputs.shape[1]).items():
            expected[name] += one
    assert_same(found, expected)
    whole = gradients(model, Objective(0.0, feeding="free")(model, batch, 0.0).total)
    assert max((whole[name] - one).abs().max() for name, one in found.items()) > 1e-3


class Held:
    """Bytes that autograd keeps for backward passes, now and at most."""

    def __init__(self):
        self.now = self.most = 0

    def pack(self, tensor):
        return _Kept(self, tensor)


class _Kept:
    def __init__(self, held, tensor):
        self.held, self.tensor = held, tensor
        held.now += tensor.nbytes
        held.most = max(held.most, held.now)

    def __del__(self):
        self.held.now -= self.tensor.nbytes


def kept_for_backward(kind, length):
    model = language_model("linear", max_position_embeddings=128)
    ids = torch.randint(5, V, (2, length), generator=seeded())
    held = Held()
    with torch.autograd.graph.saved_tensors_hooks(held.pack, lambda kept: kept.tensor):
        Objective(feeding="free", free_loss=kind)(model, {"input_ids": ids, "labels": ids}, 0.0)
    return held.most


def test_stepwise_keeps_no_more_for_longer_texts():
    # The first token's graph is kept to the end and one token's beside it, at any length.
    assert kept_for_backward("stepwise", 24) == kept_for_backward("stepwise", 4)
    # Summed, it is the weights, which are kept once, and as much again for each token.
    assert kept_for_backward("summed", 24) > 3 * kept_for_backward("summed", 4)


def test_stepwise_without_gradients_is_a_number():
    model, batch = translator(), pairs()
    with torch.no_grad():
        found = Objective(feeding="free", free_loss="stepwise")(model, batch, 0.0).total
    expected = Objective(feeding="free")(model, batch, 0.0).total
    assert not found.requires_grad
    torch.testing.assert_close(found, expected.detach(), **EXACT)


def test_stepwise_leaves_frozen_parameters_alone():
    model, batch = translator(), pairs()
    model.decoder.requires_grad_(False)
    Objective(feeding="free", free_loss="stepwise")(model, batch, 0.0).total.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == name.startswith("decoder"), name


# ---- scheduled sampling ----------------------------------------------------------------------


def test_decays_are_those_of_the_paper():
    count = 1000  # batches of a run; i of the paper is p·count
    for step in range(0, count + 1, 100):
        p = step / count
        slope = 2e-3
        linear = Scheduled(decay="linear", start=0.9, end=0.1, k=slope * count)
        assert linear.truth_probability(p) == pytest.approx(max(0.1, 0.9 - slope * step))
        base = 0.995
        exponential = Scheduled(decay="exponential", k=base**count)
        assert exponential.truth_probability(p) == pytest.approx(base**step)
    k = 50.0
    run = 2 * k * math.log(k)
    sigmoid = Scheduled(decay="inverse_sigmoid", k=k)
    for step in range(0, int(run), 30):
        paper = k / (k + math.exp(step / k))
        assert sigmoid.truth_probability(step / run) == pytest.approx(paper)
    assert sigmoid.truth_probability(0.5) == pytest.approx(0.5)


def test_decays_begin_after_and_end_where_they_are_told():
    for decay in ("linear", "exponential", "inverse_sigmoid"):
        schedule = Scheduled(decay=decay, start=0.8, end=0.25, after=0.4)
        curve = [schedule.truth_probability(p / 100) for p in range(101)]
        assert curve[39] == 1.0 and 0.7 < curve[40] <= 0.8
        assert curve[40:] == sorted(curve[40:], reverse=True)
        assert curve[100] == 0.25
    assert Scheduled().truth_probability(0.3) == pytest.approx(0.7)
    assert Scheduled(after=1.0).truth_probability(1.0) == 1.0


def test_the_truth_is_read_with_its_probability():
    model = translator()
    labels = torch.full((100, 101), 7)
    batch = {"input_ids": torch.full((100, 2), 7), "labels": labels}
    kept = places_kept(Reading.of(model, batch), 0.3, seeded())
    assert kept[:, 0].all()
    share = kept[:, 1:].double().mean().item()
    assert abs(share - 0.3) < 5 * math.sqrt(0.3 * 0.7 / 10_000)  # 5σ of a binomial share


def test_parallel_passes_settle_one_token_each():
    model, batch = translator("linear"), pairs()
    reading = Reading.of(model, batch)
    kept = places_kept(reading, 0.3, seeded(1))
    draws = uniform(reading.inputs, seeded(2))
    one_by_one = fed(reading, kept, Own(), draws)
    assert not torch.equal(one_by_one, reading.inputs)
    free = (~kept).long().cumsum(1)  # the number of a place among its row's free ones
    for count in range(1, 7):
        found = passed(reading, kept, Own(), draws, count)
        settled = free <= count
        assert torch.equal(found[settled], one_by_one[settled])
        assert torch.equal(found[kept], reading.inputs[kept])
    assert torch.equal(found, one_by_one)


def test_two_passes_are_the_first_of_the_parallel_ones():
    model, batch = translator(), pairs()
    losses = [
        Objective(feeding="scheduled", scheduled=options)(model, batch, 0.6, seeded()).total
        for options in ({"variant": "two_pass"}, {"variant": "parallel", "passes": 1})
    ]
    assert torch.equal(*losses)


def test_all_variants_with_the_truth_alone_are_teacher_forcing():
    model, batch = translator(), pairs()
    expected = Objective()(model, batch, 0.0).total
    for variant in ("original", "two_pass", "parallel"):
        objective = Objective(feeding="scheduled", scheduled={"variant": variant, "after": 0.5})
        found = objective(model, batch, 0.4, seeded())
        assert found.parts["truth"] == 1.0
        torch.testing.assert_close(found.total, expected, **EXACT)


@pytest.mark.parametrize("token", ["mix", "gumbel"])
def test_means_of_embeddings_are_read_in_the_place_of_tokens(token):
    model, batch = translator(), pairs()
    reading = Reading.of(model, batch)
    kept = places_kept(reading, 0.3, seeded(1))
    options = Scheduled(variant="two_pass", token=token, temperature=0.7)
    found = averaged(reading, kept, options, seeded(2))
    logits = model(**batch).logits
    noise = torch.zeros(int((~kept).sum()), V)
    if token == "gumbel":
        noise = -(-torch.rand(noise.shape, generator=seeded(2)).log()).log()
    order = 0
    for row, place in itertools.product(range(3), range(7)):
        expected = model.embed.weight[reading.inputs[row, place]]
        if not kept[row, place]:
            scores = logits[row, place - 1] + noise[order]
            expected = (scores / 0.7).softmax(-1) @ model.embed.weight
            order += 1
        # Chances are taken in float32: V of them, each within 6e-8 of its value.
        torch.testing.assert_close(
            found[row, place], expected * math.sqrt(12), rtol=1e-5, atol=1e-5
        )
    sure = averaged(reading, kept, Scheduled(variant="two_pass", token="mix", top_k=1), None)
    argmax = passed(reading, kept, Own("argmax"), torch.zeros(kept.shape), 1)
    torch.testing.assert_close(sure, reading.vectors(argmax), **EXACT)


def test_a_gradient_reaches_the_first_pass_if_it_shall():
    model, batch = translator(), pairs()
    found = {}
    for through in (False, True):
        options = {"variant": "two_pass", "token": "mix", "first_pass_gradient": through}
        objective = Objective(feeding="scheduled", scheduled=options)
        loss = objective(model, batch, 1.0, seeded()).total
        found[through] = loss.item(), gradients(model, loss)
    assert found[True][0] == pytest.approx(found[False][0], abs=1e-6)
    differ = [(found[True][1][n] - one).abs().max() for n, one in found[False][1].items()]
    assert max(differ) > 1e-4
    weight, epsilon = model.head.weight, 1e-5  # the whole derivative, by differences
    direction = torch.randn(weight.shape, generator=seeded(3), dtype=torch.double)
    slope = (found[True][1]["embed.weight"] * direction).sum()
    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            weight += sign * epsilon * direction
            ends.append(objective(model, batch, 1.0, seeded()).total)
            weight -= sign * epsilon * direction
    # The chances' float32, 6e-8 of about 3, divided by 2e-5: 1e-2 at most, and ε² beside it.
    assert abs((ends[0] - ends[1]) / (2 * epsilon) - slope) < 2e-2 * max(1, abs(slope))


# ---- noise -----------------------------------------------------------------------------------


def test_tokens_are_dropped_and_replaced_at_their_rates():
    model = translator()
    ids = torch.full((100, 102), 9)
    ids[:, 0], ids[:, -1] = 1, 2
    noise = Noise(source_drop=0.2, source_replace=0.3)
    found = noise.on_source(model, {"input_ids": ids}, seeded())["input_ids"]
    assert torch.equal(found[:, [0, -1]], ids[:, [0, -1]])  # start and end
    inner = found[:, 1:-1]
    shares = inner.flatten().bincount(minlength=V).double() / inner.numel()
    each = 0.3 / (V - 3)  # any ordinary token, the same and the one of drops too
    expected = torch.full((V,), each, dtype=torch.double)
    expected[:3] = 0  # padding, start, end
    expected[3] += 0.2
    expected[9] += 0.5
    sigma = (expected * (1 - expected) / inner.numel()).sqrt()
    assert ((shares - expected).abs() <= 5 * sigma).all()


def test_noise_on_the_target_is_read_and_not_asked_for():
    model, batch = translator(), pairs()
    reading = Reading.of(model, batch)
    noisy = Noise(target_drop=0.5, target_replace=0.5).on_target(reading, seeded())
    changed = noisy.inputs != reading.inputs
    assert not (changed & ~reading.free).any()
    assert changed.sum() > reading.free.sum() / 2  # a replaced one is itself 1 in 20 times
    assert torch.equal(noisy.labels, reading.labels)


def test_noise_on_vectors_has_its_size():
    model, batch = translator(), pairs()
    objective = Noise(source_vectors=0.5, target_vectors=0.25)
    clean = model.embedded(batch["input_ids"], model.embed)
    source = objective.on_source(model, batch, seeded())
    assert "input_ids" not in source
    reading = objective.on_target(Reading.of(model, batch), seeded())
    target = reading.see().vectors - reading.vectors(reading.inputs)
    for found, sigma in (((source["inputs_embeds"] - clean), 0.5), (target, 0.25)):
        count = found.numel()
        # The variance of n normal draws has the standard deviation σ²·√(2/n).
        assert abs(found.var().item() - sigma**2) < 5 * sigma**2 * math.sqrt(2 / count)


def test_noise_is_for_training():
    model, batch = translator().eval(), pairs()
    noise = {"source_drop": 0.5, "target_replace": 0.5, "source_vectors": 1, "target_vectors": 1}
    found = Objective(noise=noise)(model, batch, 0.0, seeded())
    assert torch.equal(found.total, Objective()(model, batch, 0.0).total)


def test_noise_leaves_what_is_copied_as_it_is():
    model, batch = translator(copy=True), pairs()
    for noise in (Noise(source_replace=1.0), Noise(source_vectors=1.0)):
        encoded = Reading.of(model, noise.on_source(model, batch, seeded())).encoded
        assert torch.equal(encoded.source_ids, batch["input_ids"])


# ---- guided attention ------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", ["softmax", "linear"])
def test_guided_attention_is_that_of_the_models_alignments(mechanism):
    model, batch = translator(mechanism), pairs()
    out = model(**batch, output_attentions=True).cross_attentions
    masks = batch["labels"] != -100, batch["attention_mask"] != 0
    cases = [
        ({"loss": "diagonal", "width": 0.3}, [diagonal_loss(a, *masks, width=0.3) for a in out]),
        ({"loss": "monotonic", "layers": [-1]}, [monotonic_loss(out[1], *masks)]),
        ({"heads": [1], "layers": [0]}, [diagonal_loss(out[0][:, 1:], *masks)]),
    ]
    for options, expected in cases:
        objective = Objective(guided={"weight": 2.0, "until": 0.5, **options})
        found = objective(model, batch, 0.2)  # 2·(1 − 0.2/0.5)
        wanted = 1.2 * torch.stack(expected).mean()
        assert found.parts["guided"] == pytest.approx(wanted.item(), rel=1e-9)
        plain = Objective()(model, batch, 0.2).total
        torch.testing.assert_close(found.total, plain + wanted, **EXACT)
        assert gradients(model, found.total)["decoder.blocks.1.attention.in_proj_weight"].any()
        late = objective(model, batch, 0.5)
        assert sorted(late.parts) == ["cross_entropy"]


def test_a_layer_that_is_not_there_cannot_be_guided():
    objective = Objective(guided={"layers": [0, 2]})
    with pytest.raises(OptionError, match=r"guided.layers=\[0, 2\]: the model has 2, no \[2\]"):
        objective(translator(), pairs(), 0.0)


# ---- sequence-level training -----------------------------------------------------------------


def rewarded(outputs, truths):
    """Any numbers that depend on the whole output."""
    return [((sum(row) * 7 + len(row) * 3 + sum(truth)) % 11) / 10 for row, truth in zip(
        outputs, truths, strict=True)]  # fmt: skip


class Recorder:
    """A reward that keeps what it was asked about."""

    def __init__(self):
        self.calls = []

    def __call__(self, outputs, truths):
        self.calls.append((outputs, truths))
        return rewarded(outputs, truths)


def log_likelihood(model, batch, row, tokens, ended):
    """log p of one output, in a batch of its own."""
    size = int(batch["attention_mask"][row].sum())
    source = batch["input_ids"][row : row + 1, :size]
    labels = torch.tensor([[*tokens, *([2] if ended else [])]])
    logs = model(source, labels=labels).logits.log_softmax(-1)
    return logs.gather(-1, labels[..., None]).sum()


@pytest.mark.parametrize("baseline", ["greedy", "mean"])
def test_self_critical_loss_is_the_formulas(baseline):
    model, batch, reward = translator(dropout=0.3), pairs(), Recorder()
    options = {"samples": 3, "baseline": baseline, "max_length": 5, "temperature": 2.0}
    objective = Objective(sequence=options)
    objective.reward = reward
    found = objective(model, batch, 0.0, seeded())
    model.eval()
    (outputs, truths), groups = reward.calls[0], 3 + (baseline == "greedy")
    assert len(outputs) == 3 * groups
    assert truths[::groups] == [[t for t in row if t != -100] for row in batch["labels"].tolist()]
    scores = torch.tensor(rewarded(outputs, truths), dtype=torch.double).view(3, groups)
    terms, lengths = [], []
    for row, sample in itertools.product(range(3), range(3)):
        tokens = outputs[row * groups + sample]
        ended = len(tokens) < 5
        lengths.append(len(tokens) + ended)
        others = [s for s in range(3) if s != sample]
        base = scores[row, 3] if baseline == "greedy" else scores[row, others].mean()
        chance = log_likelihood(model, batch, row, tokens, ended)
        terms.append(-(scores[row, sample] - base) * chance)
    expected = torch.stack(terms).mean() / (sum(lengths) / len(lengths))
    # Rewards are float32: each of size ≤ 1 is within 6e-8.
    torch.testing.assert_close(found.total, expected.detach(), rtol=1e-5, atol=1e-5)
    model.train()
    assert found.parts["reward"] == pytest.approx(scores[:, :3].mean().item(), abs=1e-6)
    if baseline == "greedy":
        source = {k: batch[k] for k in ("input_ids", "attention_mask")}
        greedy = model.eval().generate(**source, max_new_tokens=5, do_sample=False)[:, 1:]
        for row in range(3):
            wanted = [t for t in greedy[row].tolist() if t not in (0, 2)]
            assert outputs[row * groups + 3] == wanted


@pytest.mark.parametrize("gold", [True, False])
def test_minimum_risk_is_the_formulas(gold):
    model, batch, reward = translator(), pairs(), Recorder()
    with torch.no_grad():
        model.head.weight *= 20  # few likely outputs, so that some are drawn twice
    alpha = 0.05
    options = {
        "loss": "minimum_risk", "samples": 6, "max_length": 2, "sharpness": alpha, "gold": gold,
    }  # fmt: skip
    objective = Objective(sequence=options)
    objective.reward = reward
    found = objective(model, batch, 0.0, seeded())
    outputs, truths = reward.calls[0]
    risks, repeated = [], 0
    for row in range(3):
        # An output that ends at once is told from one that does not by its length alone.
        drawn = [(tuple(one), len(one) < 2) for one in outputs[6 * row : 6 * row + 6]]
        truth = tuple(truths[6 * row])
        candidates = dict.fromkeys(([(truth, False)] if gold else []) + drawn)
        repeated += 6 + gold - len(candidates)
        logs = torch.stack([log_likelihood(model, batch, row, *one) for one in candidates])
        costs = [1 - rewarded([one], [truth])[0] for one, _ in candidates]
        shares = (alpha * logs).softmax(0)
        risks.append((shares * torch.tensor(costs, dtype=torch.double)).sum())
    assert repeated
    torch.testing.assert_close(
        found.total, torch.stack(risks).mean(), rtol=1e-5, atol=1e-5  # rewards are float32
    )  # fmt: skip


def test_the_self_critical_gradient_is_that_of_the_expected_reward():
    model = translator(encoder_layers=1, decoder_layers=1)
    model.config.eos_token_id = None  # all outputs have two tokens, so that V² are all there are
    with torch.no_grad():
        model.head.weight *= 3
    source = torch.tensor([[5, 9, 7]])
    labels = torch.tensor([[6, 8]])
    every = torch.cartesian_prod(torch.arange(V), torch.arange(V))
    logs = model(source.expand(V * V, -1), labels=every).logits.log_softmax(-1)
    chances = logs.gather(-1, every[..., None]).sum((1, 2)).exp()
    rewards = torch.tensor(rewarded(every.tolist(), [[6, 8]] * V * V), dtype=torch.double)
    exact = gradients(model, -(chances * rewards).sum())
    direction = {n: torch.randn(g.shape, generator=seeded(1)) for n, g in exact.items()}

    def along(found):
        return sum((one * direction[name]).sum().item() for name, one in found.items())

    objective = Objective(sequence={"samples": 64, "max_length": 2})
    objective.reward = rewarded
    batch, draws, slopes = {"input_ids": source, "labels": labels}, seeded(2), []
    for _ in range(24):
        loss = 2 * objective(model, batch, 0.0, draws).total  # it is divided by two tokens
        slopes.append(along(gradients(model, loss)))
    slopes = torch.tensor(slopes)
    error = slopes.std() / math.sqrt(len(slopes))
    assert abs(slopes.mean() - along(exact)) < 4 * error
    assert abs(along(exact)) > 8 * error  # else any small number would pass


def test_language_models_go_on_from_their_prompts():
    model, batch, reward = language_model(), texts(), Recorder()
    left = {"input_ids": torch.tensor([[0, 0, 5, 6, 7, 8], [9, 5, 6, 7, 8, 9]])}
    left["attention_mask"] = (left["input_ids"] != 0).long()
    left["labels"] = left["input_ids"].clone()
    left["labels"][0, :4] = left["labels"][1, :3] = -100
    objective = Objective(sequence={"samples": 2, "max_length": 4, "weight": 0.5})
    objective.reward = reward
    for given in (left, batch):
        gradients(model, objective(model, given, 0.0, seeded()).total)
    outputs, truths = reward.calls[0]
    assert truths[0] == [7, 8] and truths[3] == [7, 8, 9]
    assert max(map(len, outputs)) == 4  # from wherever a prompt ends
    model.eval()
    for row, prompt in enumerate(([5, 6], [9, 5, 6])):
        best = model.generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False)
        wanted = [t for t in best[0, len(prompt) :].tolist() if t not in (0, 2)]
        assert outputs[3 * row + 2][: len(wanted)] == wanted[: len(outputs[3 * row + 2])]


def test_rewards_are_those_of_sacrebleu():
    sacrebleu = pytest.importorskip("sacrebleu")
    outputs, truths = [[5, 6, 7, 8], [5], [], [9, 9]], [[5, 6, 7, 9], [5], [5], [9, 9, 7]]
    found = sentence_reward("bleu")(outputs, truths)
    for value, output, truth in zip(found, outputs, truths, strict=True):
        texts = (" ".join(map(str, one)) for one in (output, truth))
        hypothesis, reference = texts
        expected = sacrebleu.sentence_bleu(
            hypothesis, [reference], tokenize="none", use_effective_order=True
        )
        assert value == pytest.approx(expected.score / 100)
    assert found[1] == pytest.approx(1.0) and found[2] == 0.0


class Words:
    """A tokenizer as far as rewards ask for one."""

    def batch_decode(self, rows, skip_special_tokens):
        return ["".join(chr(92 + one) for one in row if one > 4) for row in rows]


def test_rewards_of_texts_need_a_tokenizer():
    sacrebleu = pytest.importorskip("sacrebleu")
    model, batch = translator(), pairs()
    objective = Objective(sequence={"reward": "chrf", "text": True, "samples": 1})
    with pytest.raises(OptionError, match="objective.tokenizer"):
        objective(model, batch, 0.0)
    objective.tokenizer = Words()
    assert objective(model, batch, 0.0, seeded()).total.isfinite()
    found = objective.reward([[5, 6, 7]], [[5, 6, 8]])
    assert found == [pytest.approx(sacrebleu.sentence_chrf("abc", ["abd"]).score / 100)]


def test_sequence_training_is_mixed_by_its_weight():
    model, batch = translator(), pairs()
    plain = Objective()(model, batch, 0.0).total
    alone = Objective(sequence={"max_length": 4})(model, batch, 0.5, seeded())
    mixed = Objective(sequence={"max_length": 4, "weight": 0.25, "after": 0.5})
    torch.testing.assert_close(
        mixed(model, batch, 0.5, seeded()).total, 0.75 * plain + 0.25 * alone.total, **EXACT
    )
    assert "cross_entropy" not in alone.terms
    torch.testing.assert_close(mixed(model, batch, 0.4, seeded()).total, plain, **EXACT)


# ---- everything together ---------------------------------------------------------------------

EVERYTHING = [
    {},
    {"feeding": "free", "free_token": "sample"},
    {"feeding": "free", "free_loss": "stepwise", "free_token": "sample"},
    {"feeding": "scheduled"},
    {"feeding": "scheduled", "scheduled": {"variant": "two_pass", "token": "gumbel"}},
    {"feeding": "scheduled", "scheduled": {"variant": "original"}, "free_loss": "stepwise"},
    {"noise": {"target_replace": 0.3, "target_vectors": 0.5}},
    {"sequence": {"loss": "minimum_risk", "weight": 0.5, "max_length": 4}},
    {"feeding": "scheduled", "sequence": {"weight": 0.5, "max_length": 4}},
]


@each_case
@pytest.mark.parametrize("options", EVERYTHING, ids=lambda o: "-".join(o) or "teacher")
def test_draws_are_the_generators(case, options):
    build, make = CASES[case]
    model, batch, objective = build("performer"), make(), Objective(**options)
    first, again, other = (objective(model, batch, 0.6, seeded(seed)).total for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert torch.equal(first, other) == (not options)
    assert any(bool(one.any()) for one in gradients(model, first).values())


@pytest.mark.parametrize("mechanism", ["softmax", "near_far", "aft", "synthesizer"])
def test_every_feeding_works_with_every_kind_of_state(mechanism):
    model, batch = translator(mechanism, cross_mechanism="softmax"), pairs()
    for options in EVERYTHING:
        loss = Objective(**options)(model, batch, 0.6, seeded()).total
        assert all(one.isfinite().all() for one in gradients(model, loss).values())


def test_penalties_of_mechanisms_are_added():
    model, batch = translator("conv(conv=shared, noise=0)"), pairs()
    for parameter in model.encoder.parameters():
        parameter.data *= 1.5
    asked = sq.penalties(model)
    assert asked > 0
    plain = Objective(penalties=0.0)(model, batch, 0.0)
    found = Objective(penalties=0.5)(model, batch, 0.0)
    torch.testing.assert_close(found.total, plain.total + 0.5 * asked.double(), **EXACT)
    assert sorted(found.parts) == ["cross_entropy", "penalties"]


@pytest.mark.parametrize(
    ("options", "progress"),
    [
        ({"sequence": {"weight": 1.0, "samples": 2, "after": 0.5}}, (0.0, 1.0, 1.0)),
        ({"sequence": {"weight": 1.0, "samples": 2}}, (0.0, 0.0)),
        ({"feeding": "free", "free_loss": "stepwise"}, (0.0, 0.0)),
    ],
)
def test_penalties_of_a_training_call_are_those_of_this_batch(options, progress):
    """Routing's stands in the graph of the encoder, which these objectives use without it."""
    routing = "routing(clusters=2, window=4, commitment=0.5)"
    model = translator(routing, decoder_mechanism="softmax", cross_mechanism="softmax")
    for share in progress:  # no graph of an earlier batch is used again
        one, other, third = (copy.deepcopy(model) for _ in range(3))
        Objective(**options)(model, pairs(), share, seeded()).total.backward()
    asked = gradients(one, Objective(**options)(one, pairs(), share, seeded()).total)
    without = Objective(**options, penalties=0.0)
    plain = gradients(other, without(other, pairs(), share, seeded()).total)
    third(**pairs())
    wanted = gradients(third, sq.penalties(third))
    assert any(bool(one.any()) for one in wanted.values())
    assert_same({name: asked[name] - plain[name] for name in wanted}, wanted)


def test_a_decoder_that_writes_all_at_once_has_its_own_loss():
    config = sq.models.NonAutoregressiveTransformerConfig(
        vocab_size=V, d_model=12, num_heads=2, encoder_layers=1, decoder_layers=1
    )
    model, batch = sq.models.NonAutoregressiveTransformer(config).eval(), pairs()
    found = Objective(0.1)(model, batch, 0.0, seeded())
    expected = model.loss(batch, seeded(), 0.1)
    assert found.parts == {name: one.item() for name, one in expected.items()}
    assert found.total.item() == pytest.approx(sum(found.parts.values()))


def test_encoders_have_the_loss_of_their_head():
    config = sq.models.EncoderTransformerConfig(
        vocab_size=V, d_model=12, num_heads=2, num_layers=1, num_labels=3, segments=2
    )
    ids = pairs()["input_ids"]
    classify = sq.models.EncoderForSequenceClassification(config).eval()
    batch = {"input_ids": ids, "labels": torch.tensor([0, 2, 1])}
    found = Objective(0.0)(classify, batch, 0.0).total
    torch.testing.assert_close(found, classify(**batch).loss)
    logits = classify(ids).logits[None]
    smooth = Objective(0.1)(classify, batch, 0.0).total
    torch.testing.assert_close(smooth, smoothed(logits, batch["labels"][None], 0.1))
    tag = sq.models.EncoderForTokenClassification(config).eval()
    labels = torch.randint(3, ids.shape).masked_fill(ids == 0, -100)
    batch = {"input_ids": ids, "labels": labels}
    torch.testing.assert_close(Objective(0.0)(tag, batch, 0.0).total, tag(**batch).loss)
    torch.testing.assert_close(
        Objective(0.1)(tag, batch, 0.0).total, smoothed(tag(ids).logits, labels, 0.1)
    )
    answer = sq.models.EncoderForQuestionAnswering(config).eval()
    places = {"start_positions": torch.tensor([1, 2, 3]), "end_positions": torch.tensor([2, 4, 3])}
    batch = {"input_ids": ids, **places}
    assert torch.equal(Objective(0.0)(answer, batch, 0.0).total, answer(**batch).loss)
    with pytest.raises(OptionError, match="label_smoothing=0.1 needs labels that are classes"):
        Objective(0.1)(answer, batch, 0.0)


# ---- what is refused -------------------------------------------------------------------------

REFUSED = [
    ({"label_smoothing": 2}, "label_smoothing=2 must be a number ≥ 0 and ≤ 1"),
    ({"feeding": "teached"}, "feeding='teached' is none of teacher, free, scheduled"),
    ({"free_loss": "stepwise"}, "free_loss=stepwise needs feeding=free or scheduled"),
    ({"free_token": "sample"}, "free_token=sample needs feeding=free"),
    ({"scheduled": {}}, "scheduled changes nothing with feeding=teacher"),
    (
        {"feeding": "scheduled", "free_loss": "stepwise"},
        "free_loss=stepwise needs scheduled.variant=original",
    ),
    (
        {"feeding": "scheduled", "scheduled": {"varient": "original"}},
        "scheduled: unknown option 'varient' .did you mean 'variant'?.",
    ),
    (
        {"feeding": "scheduled", "scheduled": {"token": "mix"}},
        "scheduled.token=mix needs variant=two_pass",
    ),
    (
        {
            "feeding": "scheduled",
            "scheduled": {"variant": "two_pass", "first_pass_gradient": True},
        },
        "scheduled.first_pass_gradient=True needs token=mix or gumbel",
    ),
    (
        {"feeding": "scheduled", "scheduled": {"variant": "original", "passes": 3}},
        "scheduled.passes=3 needs variant=parallel",
    ),
    (
        {"feeding": "scheduled", "scheduled": {"token": "argmax", "top_k": 3}},
        "scheduled.top_k=3 changes nothing with token=argmax",
    ),
    (
        {"feeding": "scheduled", "scheduled": {"decay": "exponential", "k": 2}},
        "scheduled.k=2 must be a number > 0 and ≤ 1",
    ),
    (
        {"feeding": "scheduled", "scheduled": {"start": 0.2, "end": 0.6}},
        "scheduled.end=0.6 must be ≤ start=0.2",
    ),
    ({"noise": {"source_drop": 0.6, "source_replace": 0.6}}, "must be ≤ 1: they exclude"),
    ({"noise": 0.1}, "noise=0.1 must be a mapping of options"),
    ({"guided": {"layers": 1}}, "guided.layers=1 must be a list of numbers"),
    ({"guided": {"loss": "monotonic", "width": 0.5}}, "guided.width=0.5 needs loss=diagonal"),
    (
        {"guided": {}, "feeding": "free", "free_loss": "stepwise"},
        "guided needs free_loss=summed",
    ),
    ({"sequence": {"reward": "chrf"}}, "sequence.reward=chrf needs text=True"),
    ({"sequence": {"baseline": "mean", "samples": 1}}, "sequence.baseline=mean needs samples ≥ 2"),
    (
        {"sequence": {"loss": "minimum_risk", "samples": 1, "gold": False}},
        "needs two candidates",
    ),
    ({"sequence": {}, "feeding": "free"}, "feeding changes nothing with sequence.weight=1"),
    ({"sequence": {}, "guided": {}}, "guided changes nothing with sequence.weight=1"),
]


@pytest.mark.parametrize(("options", "reason"), REFUSED, ids=lambda one: str(one)[:40])
def test_what_makes_no_sense_is_refused(options, reason):
    with pytest.raises(OptionError, match=reason):
        Objective(**options)


def test_everything_that_is_wrong_is_reported_at_once():
    with pytest.raises(OptionError) as caught:
        Objective(2, feeding="x", noise={"drop": 1}, sequence={"weight": 0, "samples": 0})
    text = str(caught.value)
    wanted = ("label_smoothing=2", "feeding='x'", "noise: unknown", "sequence.weight=0",
              "sequence.samples=0")  # fmt: skip
    assert all(one in text for one in wanted), text


def fits(model, **options):
    Objective(**options).check(model)


def test_what_does_not_fit_a_model_is_refused_before_it_trains():
    with pytest.raises(OptionError, match="guided does not apply: it has no cross-attention"):
        fits(language_model(), guided={})
    with pytest.raises(OptionError, match="noise on the source does not apply"):
        fits(language_model(), noise={"source_drop": 0.1})
    copying = translator(copy=True)
    with pytest.raises(OptionError, match="scheduled.token=mix does not go with copy=True"):
        fits(copying, feeding="scheduled", scheduled={"variant": "two_pass", "token": "mix"})
    with pytest.raises(OptionError, match="sequence.text=True does not go with copy=True"):
        fits(copying, sequence={"text": True})
    config = sq.models.NonAutoregressiveTransformerConfig(
        vocab_size=V, d_model=12, num_heads=2, encoder_layers=1, decoder_layers=1
    )
    parallel = sq.models.NonAutoregressiveTransformer(config)
    encoder = sq.models.EncoderForTokenClassification(
        sq.models.EncoderTransformerConfig(vocab_size=V, d_model=12, num_heads=2, num_layers=1)
    )
    for model, why in ((parallel, "writes all tokens at once"), (encoder, "has no decoder")):
        with pytest.raises(OptionError) as caught:
            fits(model, feeding="free", guided={}, noise={"target_drop": 0.1})
        text = str(caught.value)
        assert all(one in text for one in ("feeding", "guided", "noise", why)), text
    with pytest.raises(OptionError, match="the batch has no labels, it has input_ids"):
        Objective()(translator(), {"input_ids": pairs()["input_ids"]}, 0.0)


def test_a_decoder_without_a_state_reads_its_whole_prefix_anew(monkeypatch):
    # No mechanism of the package is causal and has no state; one from elsewhere may be.
    build, make = CASES["text"]
    model, batch = build(), make()
    expected = Objective(feeding="free")(model, batch, 0.0).total
    monkeypatch.setattr("subquad.models.base.can_stream", lambda stack: False)
    found = Objective(feeding="free")(model, batch, 0.0).total
    torch.testing.assert_close(found, expected, **EXACT)
    with pytest.raises(OptionError, match="free_loss=stepwise needs a state"):
        fits(model, feeding="free", free_loss="stepwise")


def test_stepwise_cross_entropy_can_be_fed_with_the_truth():
    model, batch = translator(), pairs()
    reading = Reading.of(model, batch)
    kept = torch.ones_like(reading.inputs, dtype=torch.bool)
    found = stepwise_cross_entropy(reading, kept, Own(), torch.zeros(kept.shape), 0.1)
    torch.testing.assert_close(found, Objective(0.1)(model, batch, 0.0).total, **EXACT)
