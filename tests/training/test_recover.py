"""Recovery training: what is trained, what is not, how it is measured, and that runs continue."""

from __future__ import annotations

import json
import random
import re
import time

import numpy
import pytest
import torch
import transformers as tf

import subquad as sq
from subquad.errors import OptionError
from subquad.training import distill, student, texts
from subquad.training.transfer import Transfer, mechanism_parameters

VOCAB, WIDTH = 53, 24


def encoder(mechanism="hedgehog", seed=0, cls=tf.BertModel, **options):
    """A tiny BERT whose attention is far from uniform, so that its approximation matters."""
    torch.manual_seed(seed)
    config = tf.BertConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=3,
        intermediate_size=40, initializer_range=0.4, max_position_embeddings=64, **options,
    )  # fmt: skip
    model = cls(config).eval()
    if mechanism:
        sq.convert(model, mechanism)
    return model


def decoder(mechanism="performer(features=16)"):
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=40, initializer_range=0.3,
    )  # fmt: skip
    model = tf.LlamaForCausalLM(config).eval()
    sq.convert(model, mechanism)
    return model


def rows(count=24, seed=5, least=23, most=37):
    """Ragged examples: padding is part of every batch."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(least, most, (count,), generator=generator).tolist()
    return [{"input_ids": torch.randint(VOCAB, (size,), generator=generator)} for size in sizes]


def values(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def changed(model, before):
    after = model.state_dict()
    assert after.keys() == before.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


# ---- what training does ------------------------------------------------------------------


def test_transfer_brings_held_out_layers_below_uniform_attention():
    model = encoder("hedgehog(map=exp)")
    inputs = texts.collator(model, None)(rows(16, seed=77))
    before = sq.compare(model, inputs, repeats=1)
    report = sq.recover(model, rows(48), method="transfer", steps=60, rate=3e-2)
    after = sq.compare(model, inputs, repeats=1)
    # The loss is the mean squared error of layers; on new texts it has to fall by as much as
    # the untrained map is ahead of uniform attention (φ = constant) at least: learning counts
    # for more than having a feature map at all.
    assert after.error / before.error < before.error / before.uniform_error < 1.0
    assert after.cosine > before.cosine
    assert report.curve[-1]["loss"] < 0.6 * report.curve[1]["loss"]


@pytest.mark.parametrize("method", ["full", "lora"])
def test_distillation_halves_the_held_out_distance(method):
    model = encoder("performer(features=16)")
    control = encoder("performer(features=16)")
    rate = {"full": 2e-3, "lora": 1e-2}[method]
    report = sq.recover(model, rows(48), method=method, steps=50, batch=4, rate=rate, seed=1)
    inputs = texts.collator(model, None)(rows(16, seed=78))
    exact = encoder(None)
    gap, untrained = (
        1.0 - sq.compare(exact, one, inputs, repeats=1).cosine for one in (model, control)
    )
    # 1 − cos is half the squared distance of unit vectors: half of it is a factor √2 of length.
    assert gap < 0.5 * untrained
    assert report.after["cosine"] > report.before["cosine"]
    assert report.curve[0] == {"stage": method, "step": 0, "seconds": 0.0, **report.before}
    assert report.curve[-1]["cosine"] == pytest.approx(report.after["cosine"], abs=1e-5)


def test_decoders_learn_the_exact_models_distribution():
    model, control, exact = decoder(), decoder(), decoder()
    sq.revert(exact)
    report = sq.recover(model, rows(32), method="full", steps=50, batch=4, rate=3e-3)
    assert set(report.before) == {"agreement", "perplexity_ratio"}
    assert report.loss == "logits"
    assert report.after["agreement"] > report.before["agreement"]
    inputs = texts.collator(model, None)(rows(16, seed=79))
    with torch.no_grad():
        wanted, found, untrained = (
            distill.call(one, inputs).logits for one in (exact, model, control)
        )
    kept = inputs["attention_mask"].bool()
    gap, before = (float(distill.divergence(z, wanted, kept)) for z in (found, untrained))
    # 400 random tokens are learned by heart before they generalise: a quarter less on new ones.
    assert gap < 0.75 * before


def test_an_exact_student_has_nothing_to_recover():
    for model, one in ((encoder("softmax"), "cosine"), (decoder("softmax"), "perplexity_ratio")):
        report = sq.recover(model, rows(8), method="full", steps=1, rate=1e-12)
        # Two float32 computations of one thing: 2^-24 times some ten operations in a row.
        assert report.before[one] == pytest.approx(1.0, abs=1e-5)
        assert report.curve[-1]["loss"] < 1e-5


def test_labels_and_images_and_classes():
    model = encoder("performer(features=16)", cls=tf.BertForSequenceClassification)
    data = [{**row, "labels": torch.tensor(index % 2)} for index, row in enumerate(rows(12))]
    report = sq.recover(model, data, method="full", loss="task", steps=30, rate=3e-3)
    assert set(report.before) == {"agreement", "kl"}
    assert report.curve[-1]["loss"] < report.curve[1]["loss"]
    config = tf.ViTConfig(
        hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=2, intermediate_size=40,
        image_size=20, patch_size=4, initializer_range=0.4,
    )  # fmt: skip
    torch.manual_seed(0)
    vision = tf.ViTModel(config).eval()
    sq.convert(vision, "hedgehog")
    images = [{"pixel_values": torch.randn(3, 20, 20)} for _ in range(10)]
    report = sq.recover(vision, images, method="transfer", steps=10)
    assert report.after["cosine"] > report.before["cosine"]


def of_kind(kind, seed=0):
    """A model without BERT's or Llama's habits, and examples for it."""
    generator = torch.Generator().manual_seed(seed)

    def ids(size):
        return torch.randint(3, VOCAB, (size,), generator=generator)

    torch.manual_seed(seed)
    if kind == "gpt2":  # Conv1D instead of Linear, tied head
        config = tf.GPT2Config(
            vocab_size=VOCAB, n_embd=WIDTH, n_layer=1, n_head=3, initializer_range=0.3
        )
        return tf.GPT2LMHeadModel(config), [{"input_ids": ids(30)} for _ in range(12)]
    if kind == "bart":  # two stacks, cross-attention
        config = tf.BartConfig(
            vocab_size=VOCAB, d_model=WIDTH, encoder_layers=1, decoder_layers=1, init_std=0.3,
            encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=40,
            decoder_ffn_dim=40, pad_token_id=1, decoder_start_token_id=2,
        )  # fmt: skip
        data = [{"input_ids": ids(30), "decoder_input_ids": ids(17)} for _ in range(12)]
        return tf.BartForConditionalGeneration(config), data
    layer = torch.nn.TransformerEncoderLayer(WIDTH, 3, 40, batch_first=True)  # no transformers
    data = [{"src": torch.randn(20, WIDTH, generator=generator)} for _ in range(12)]
    return torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), data


@pytest.mark.parametrize("kind, method", [("gpt2", "lora"), ("bart", "full"), ("torch", "lora")])
def test_other_kinds_of_models(kind, method):
    model, data = of_kind(kind)
    sq.convert(model.eval(), "performer(features=8)")
    kinds = [type(module) for module in model.modules()]
    report = sq.recover(model, data, method=method, steps=30, batch=4, rate=3e-3)
    assert report.curve[-1]["loss"] < report.curve[1]["loss"]
    assert [type(module) for module in model.modules()] == kinds


def test_gradients_of_transfer_are_those_of_the_loss():
    # One layer's loss by central differences in float64 along a random direction.
    model = encoder("hedgehog").double()
    parameters = mechanism_parameters(model)
    model.requires_grad_(False)
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    inputs = texts.collator(model, None)(rows(3))
    objective = Transfer(model)
    objective.step(inputs)
    generator = torch.Generator().manual_seed(3)
    directions = {
        name: torch.randn(p.shape, generator=generator, dtype=p.dtype)
        for name, p in parameters.items()
    }
    slope = sum(float((p.grad * directions[name]).sum()) for name, p in parameters.items())

    def loss(step):
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter += step * directions[name]
        value = float(objective.step(inputs))
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter -= step * directions[name]
        return value

    size = 1e-3
    numeric = (loss(size) - loss(-size)) / (2 * size)
    # Error of the difference: size²/6 · third derivative, and float32 sums of the loss, 1e-7/size.
    assert slope == pytest.approx(numeric, rel=1e-2, abs=1e-4)


# ---- what training leaves alone ----------------------------------------------------------


def test_transfer_changes_the_mechanisms_alone():
    model = encoder()
    before = values(model)
    sq.recover(model, rows(), method="transfer", steps=5)
    assert changed(model, before) == set(mechanism_parameters(model))


def test_full_leaves_embeddings_and_what_where_leaves_out():
    model = encoder("performer(features=16)")
    before = values(model)
    sq.recover(model, rows(), method="full", steps=5, where=lambda name, p: ".layer.1." in name)
    moved = changed(model, before)
    assert moved and all(".layer.1." in name for name in moved)
    sq.recover(model, rows(), method="full", steps=5)
    moved = changed(model, before)
    assert any(".layer.0." in name for name in moved)
    assert not any("embeddings.word" in name or "position" in name for name in moved)


def test_low_rank_updates_leave_the_weights_until_they_are_merged():
    model = encoder("performer(features=16)")
    before, kinds = values(model), [type(module) for module in model.modules()]
    name = "encoder.layer.1.output.dense"
    seen, ranks = [], []

    def look(line):
        layer = model.get_submodule(name)
        seen.append(layer.base_layer.weight.detach().clone())
        update = layer.get_delta_weight("default")
        ranks.append(int(torch.linalg.matrix_rank(update, rtol=1e-4)))

    sq.recover(model, rows(), method="lora", rank=3, steps=20, rate=1e-2, progress=look)
    assert len(seen) == 10
    assert all(torch.equal(one, before[f"{name}.weight"]) for one in seen)
    assert ranks[-1] == 3
    assert [type(module) for module in model.modules()] == kinds
    delta = model.state_dict()[f"{name}.weight"] - before[f"{name}.weight"]
    assert int(torch.linalg.matrix_rank(delta, rtol=1e-4)) == 3
    moved = changed(model, before)
    assert moved and all(key.endswith(".weight") for key in moved)
    assert not any("LayerNorm" in key or "embeddings" in key for key in moved)


def test_an_interruption_takes_low_rank_updates_out_again():
    model = encoder("performer(features=16)")
    before = values(model)

    def stop(line):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sq.recover(model, rows(), method="lora", steps=20, progress=stop)
    assert not changed(model, before)


def test_flags_gradients_and_random_states_are_put_back():
    model = encoder().train()
    model.embeddings.requires_grad_(False)
    model.encoder.layer[0].eval()
    flags = [p.requires_grad for p in model.parameters()]
    modes = [module.training for module in model.modules()]
    states = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002  # the state that the Trainer seeds
    sq.recover(model, rows(), method="auto", steps=4)
    assert [p.requires_grad for p in model.parameters()] == flags
    assert [module.training for module in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())
    assert random.getstate() == states[0]
    assert numpy.random.get_state()[1].tolist() == states[1]  # noqa: NPY002  # likewise
    assert torch.equal(torch.get_rng_state(), states[2])


def test_a_stage_that_does_harm_is_undone():
    for method in ("full", "lora"):
        model = encoder("hedgehog")
        before = values(model)
        report = sq.recover(model, rows(), method=method, steps=3, rate=1.0)
        assert not changed(model, before)
        assert report.after == report.before
        assert f"{method} was undone" in str(report) and "give a lower rate=" in report.notes[0]


def test_a_stage_that_ends_in_nan_is_undone():
    """Weights of 1e30 overflow: the run goes on to its end, and the weights come back."""
    for method in ("full", "lora"):
        model = encoder("near_far(window=2, heavy=3, far=key_clusters(clusters=4, members=2))")
        before = values(model)
        report = sq.recover(model, rows(), method=method, steps=3, batch=4, rate=1e30)
        assert not changed(model, before)
        assert f"{method} was undone: it ended with cosine nan" in report.notes[0]


def test_revert_after_transfer_is_the_exact_model_bit_for_bit():
    model, exact = encoder(), encoder(None)
    sq.recover(model, rows(), method="transfer", steps=5)
    assert sq.revert(model) == 2
    inputs = texts.collator(model, None)(rows(4))
    with torch.no_grad():
        assert torch.equal(model(**inputs).last_hidden_state, exact(**inputs).last_hidden_state)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_default_rate_does_no_harm_to_a_nearly_exact_model(method):
    # A hybrid that is nearly exact: a rate made for large errors would lose more than there is.
    model = encoder("near_far(window=9, heavy=6)")
    report = sq.recover(model, rows(32), method=method, steps=12, batch=4)
    assert report.before["cosine"] > 0.99
    assert not report.notes and report.after["cosine"] >= report.before["cosine"]


def test_the_default_rate_of_a_model_that_agrees_but_for_rounding(monkeypatch):
    # A divergence of nothing is computed as p·(log p − log q), which rounds to either side of 0.
    monkeypatch.setattr(distill.Distillation, "__call__", lambda *_: torch.tensor(-1e-9))
    objective = distill.Distillation(encoder("softmax"), object(), "logits")
    assert student._rate("full", objective, {}) > 0


# ---- how runs go -------------------------------------------------------------------------


def without_time(report):
    return [{k: v for k, v in point.items() if k != "seconds"} for point in report.curve]


@pytest.mark.parametrize(
    "method, stop",
    [
        ("transfer", 4),
        pytest.param("full", 7, marks=pytest.mark.slow),
        ("lora", 3),
        pytest.param("auto", 6, marks=pytest.mark.slow),
        ("auto", 14),
    ],
)
def test_a_continued_run_is_the_run_that_was_not_stopped(tmp_path, method, stop):
    options = {"method": method, "steps": 20, "batch": 2, "seed": 3}
    whole = encoder()
    report = sq.recover(whole, rows(), **options)
    calls = []

    def kill(line):
        calls.append(line)
        if len(calls) == stop:
            raise KeyboardInterrupt

    cut = encoder()
    with pytest.raises(KeyboardInterrupt):
        sq.recover(cut, rows(), **options, out=tmp_path, progress=kill)
    again = encoder()
    resumed = sq.recover(again, rows(), **options, resume_from=tmp_path)
    assert resumed.resumed and not report.resumed
    assert not changed(again, values(whole))
    assert without_time(resumed) == without_time(report)
    # A completed run is read, not trained again.
    third = encoder()
    start = time.perf_counter()
    done = sq.recover(third, rows(), **options, resume_from=tmp_path)
    assert not changed(third, values(whole))
    assert done.curve == resumed.curve and time.perf_counter() - start < 5.0


def test_a_torn_checkpoint_is_passed_over(tmp_path):
    options = {"method": "transfer", "steps": 10, "seed": 3}
    whole = encoder()
    sq.recover(whole, rows(), **options)
    cut, calls = encoder(), []

    def kill(line):
        calls.append(line)
        if len(calls) == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sq.recover(cut, rows(), **options, out=tmp_path, progress=kill)
    (newest,) = tmp_path.glob("1-transfer/checkpoint-5")
    state = newest / "trainer_state.json"
    state.write_text(state.read_text(encoding="utf-8")[:100], encoding="utf-8")
    again = encoder()
    sq.recover(again, rows(), **options, resume_from=tmp_path)
    assert not changed(again, values(whole))


def test_the_same_seed_gives_the_same_weights_and_another_others():
    found = []
    for seed in (1, 1, 2):
        model = encoder()
        sq.recover(model, rows(), method="transfer", steps=6, batch=4, seed=seed)
        found.append(values(model))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert not all(torch.equal(found[0][name], found[2][name]) for name in found[0])


def test_accumulation_gives_the_gradient_of_the_whole_batch():
    found = []
    for accumulate in (1, 4):
        model = encoder("performer(features=16)").double()
        data = rows(8, least=31, most=32)  # equal lengths: every part weighs the same
        sq.recover(
            model, data, method="full", loss="hidden", steps=1, batch=8, accumulate=accumulate,
            rate=1e-3, held_out=data[:2],
        )  # fmt: skip
        found.append(values(model))
    # A ratio of sums is not the mean of its parts' ratios, so the two differ where the parts'
    # norms do; Adam's first step is ±rate for each weight, alike wherever the signs agree.
    same = [
        float((found[0][name] - found[1][name]).abs().lt(1e-5).double().mean())
        for name in found[0]
        if "query.weight" in name
    ]
    assert min(same) > 0.9


def test_minutes_are_a_limit():
    model = encoder()
    start = time.perf_counter()
    report = sq.recover(model, rows(), method="transfer", minutes=0.03)
    took = time.perf_counter() - start
    # No step starts that would end too late if it took the mean time; the last measurement comes
    # on top. A machine busy with other work can make any one step late: twice the limit. The first
    # step has no mean to go by: alone it may take as long as it takes.
    assert report.steps >= 1 and (report.steps == 1 or report.seconds < 2 * 0.03 * 60)
    # Besides training: imports of the Trainer on first use and two held-out measurements.
    assert took < report.seconds + 20.0
    assert 2 <= len(report.curve) <= 13  # the start, 10 marks, the end; a step can pass several
    seconds = [point["seconds"] for point in report.curve]
    assert seconds == sorted(seconds)


def test_the_report_prints_serialises_and_draws(tmp_path):
    report = sq.recover(encoder(), rows(), method="auto", steps=12)
    text = str(report)
    assert "recovered by transfer + full in 12 steps" in text
    assert re.search(r"cosine +0\.\d{5} → 0\.\d{5}", text) and "transfer  step 5" in text
    assert json.loads(json.dumps(report.to_dict()))["after"] == report.after
    report.picture(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes()[1:4] == b"PNG"
    assert report.trained < report.parameters


# ---- data --------------------------------------------------------------------------------


def test_long_texts_become_passages_and_batches_are_padded():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: index for index, word in enumerate(["[PAD]", "[UNK]", *"abcdefgh"])}
    raw = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]")
    found = texts.passages(["a b c d e f g h a b c", "a b", "a b c d"], tokenizer, 7)
    assert [len(one["input_ids"]) for one in found] == [7, 4, 4]
    assert found[1]["input_ids"].tolist() == [words[w] for w in "habc"]
    batch = texts.collator(encoder(None), tokenizer)(found)
    assert batch["input_ids"].shape == (3, 7)
    assert batch["attention_mask"].sum(1).tolist() == [7, 4, 4]
    report = sq.recover(encoder(), ["a b c d e f"] * 9, tokenizer, method="transfer", steps=2)
    assert (report.examples, report.held_out) == (8, 1)


def test_padding_never_enters_a_loss():
    model = encoder()
    one = rows(1, least=23, most=24)
    alone = texts.collator(model, None)(one)
    padded = texts.collator(model, None)([*one, *rows(1, seed=9, least=36, most=37)])
    padded = {name: value[:1] for name, value in padded.items()}
    objective = Transfer(model)
    # The same sums over the same tokens, in another order: float32's 2^-24 times their number.
    assert float(objective.step(alone)) == pytest.approx(float(objective.step(padded)), rel=1e-4)
    found = [distill.call(model, inputs) for inputs in (alone, padded)]
    wanted = [distill.Outputs(tuple(h + 0.1 for h in one.hidden)) for one in found]
    first, second = (
        float(distill.hidden_error(one, other, inputs).detach())
        for one, other, inputs in zip(found, wanted, (alone, padded), strict=True)
    )
    assert first == pytest.approx(second, rel=1e-4)


# ---- errors ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        ({"method": "lorra"}, "method='lorra' is none of .*did you mean 'lora'"),
        ({"loss": "mse"}, "loss='mse' is none of"),
        ({"minutes": None}, "give steps= or minutes="),
        ({"minutes": -1}, "minutes=-1 must be a number > 0"),
        ({"minutes": "3"}, "minutes='3' must be a number > 0"),
        ({"minutes": float("inf")}, "minutes=inf must be a finite number > 0"),
        ({"steps": 0}, "steps=0 must be an integer ≥ 1"),
        ({"length": 0}, "length=0 must be an integer ≥ 1"),
        ({"rate": 0.0}, "rate=0.0 must be a number > 0"),
        ({"batch": 6, "accumulate": 4}, "accumulate=4 must divide batch=6"),
        ({"method": "transfer"}, "none of this model's has any"),
        ({"method": "full", "loss": "logits", "steps": 1}, "needs a model with logits"),
        ({"method": "full", "loss": "task", "steps": 1}, "needs examples with labels"),
        ({"method": "full", "where": lambda name, p: False}, "leaves no weight to train"),
        ({"resume_from": "nowhere"}, "holds no recovery run"),
    ],
)
def test_wrong_options(options, words):
    with pytest.raises(OptionError, match=words):
        sq.recover(encoder("performer(features=16)"), rows(), **options)


@pytest.mark.parametrize(
    "data, words",
    [
        ([], "none is left to hold out"),
        (["one text", "another"], "give the model's tokenizer="),
        ([1, 2, 3], "must hold texts .* given int"),
        (17, "must be texts or a sequence"),
        ({"input_ids": torch.ones(4, 9).long()}, "must be texts or a sequence .* given dict"),
        ([{"input_ids": [1, 2], "text": "a"}] * 4, "'text' must be a tensor or numbers, given str"),
        ([{"input_ids": [1, 2]}, {"ids": [1]}] * 9, "same names, given input_ids and ids"),
    ],
)
def test_wrong_data(data, words):
    with pytest.raises(OptionError, match=words):
        sq.recover(encoder(), data, steps=1)


def test_a_model_must_be_converted_and_a_folder_its_own(tmp_path):
    with pytest.raises(OptionError, match="not converted"):
        sq.recover(encoder(None), rows())
    sq.recover(encoder(), rows(), method="transfer", steps=1, out=tmp_path)
    with pytest.raises(OptionError, match="holds a recovery run already"):
        sq.recover(encoder(), rows(), method="transfer", steps=1, out=tmp_path)
    with pytest.raises(OptionError, match="holds another run: steps: 1 there, 2 now"):
        sq.recover(encoder(), rows(), method="transfer", steps=2, resume_from=tmp_path)
    with pytest.raises(OptionError, match="examples"):
        sq.recover(encoder(), rows(seed=9), method="transfer", steps=1, resume_from=tmp_path)


def test_a_run_is_continued_only_as_it_was_begun(tmp_path):
    """Other held-out examples, other weights or another choice of them are another run."""

    def names(part):
        return lambda name, parameter: part in name

    data, options = rows(8), {"method": "full", "steps": 1, "held_out": rows(3, seed=2)}
    sq.recover(encoder(), data, **options, where=names("query"), out=tmp_path)
    begun = {**options, "where": names("query"), "resume_from": tmp_path}
    for change, model, what in (
        ({"held_out": rows(3, seed=4)}, encoder(), "held_out"),
        ({"where": names("key")}, encoder(), "where"),
        ({"where": None}, encoder(), "where"),
        ({}, encoder(seed=1), "weights"),
    ):
        with pytest.raises(OptionError, match=f"holds another run: {what}: "):
            sq.recover(model, data, **{**begun, **change})
    assert sq.recover(encoder(), data, **begun).resumed


def test_held_out_examples_of_one_token_predict_nothing():
    one = [{"input_ids": torch.tensor([3])}]
    with pytest.raises(OptionError, match="held-out examples need 2 tokens or more"):
        sq.recover(decoder(), rows(4), steps=1, held_out=one)
