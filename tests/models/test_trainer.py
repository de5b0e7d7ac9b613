"""Losses under transformers' `Trainer`, where gradients of several batches are added up."""

import pytest
import torch
import transformers

import subquad as sq
from subquad.data.batches import pad_rows

V, L = 30, 6
SIZES = {"vocab_size": V, "d_model": 16, "num_heads": 2, "dim_feedforward": 16, "dropout": 0.0}
PAIR = {"encoder_layers": 1, "decoder_layers": 1}
ALONE = {"num_layers": 1, "head_dropout": 0.0}
MODELS = {
    "CausalTransformer": ("CausalTransformerConfig", {"num_layers": 1}),
    "Seq2SeqTransformer": ("Seq2SeqTransformerConfig", PAIR),
    "NonAutoregressiveTransformer": (
        "NonAutoregressiveTransformerConfig",
        {**PAIR, "masking": "full"},
    ),
    "EncoderForMaskedLM": ("EncoderTransformerConfig", ALONE),
    "EncoderForTokenClassification": ("EncoderTransformerConfig", {**ALONE, "num_labels": V}),
    "EncoderForSequenceClassification": ("EncoderTransformerConfig", {**ALONE, "num_labels": 3}),
    "EncoderForQuestionAnswering": ("EncoderTransformerConfig", ALONE),
}


def rows_of(name):
    """Four rows; where labels are of tokens, each row has another number of them."""
    ids = torch.randint(5, V, (4, L), generator=torch.Generator().manual_seed(1))
    if name == "EncoderForSequenceClassification":
        return [{"input_ids": one, "labels": torch.tensor(at % 3)} for at, one in enumerate(ids)]
    if name == "EncoderForQuestionAnswering":
        place = torch.arange(4)
        return [
            {"input_ids": one, "start_positions": at, "end_positions": at + 1}
            for at, one in zip(place, ids, strict=True)
        ]
    if name == "NonAutoregressiveTransformer":  # its loss is a mean for each batch
        return [{"input_ids": one, "labels": one} for one in ids]
    behind = torch.arange(L)
    return [
        {"input_ids": one, "labels": one.masked_fill(behind > at + 1, -100)}
        for at, one in enumerate(ids)
    ]


def trained(name, folder, accumulate):
    """(the loss that is told, how far one step of SGD at a rate of 1 moves each parameter)."""
    config, options = MODELS[name]
    torch.manual_seed(0)
    config = getattr(sq.models, config)(mechanism="softmax", **SIZES, **options)
    made = getattr(sq.models, name)(config)
    before = [one.detach().clone() for one in made.parameters()]
    arguments = transformers.TrainingArguments(
        folder, max_steps=1, per_device_train_batch_size=4 // accumulate, report_to="none",
        gradient_accumulation_steps=accumulate, use_cpu=True, optim="sgd", learning_rate=1.0,
        lr_scheduler_type="constant", max_grad_norm=0.0, logging_steps=1, save_strategy="no",
        disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = transformers.Trainer(
        made, arguments, train_dataset=rows_of(name), data_collator=pad_rows
    )
    trainer.train()
    moved = [old - new.detach() for old, new in zip(before, made.parameters(), strict=True)]
    return trainer.state.log_history[0]["loss"], moved


@pytest.mark.parametrize("name", MODELS)
def test_accumulated_gradients_are_those_of_one_batch(name, tmp_path):
    loss, whole = trained(name, tmp_path / "whole", 1)
    again, parts = trained(name, tmp_path / "parts", 4)
    # Sums in another order, float32: some 100 roundings of 2⁻²⁴ of the largest term.
    assert again == pytest.approx(loss, rel=100 * 2**-24)
    largest = max(float(one.abs().max()) for one in whole)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(other, one, rtol=0.0, atol=100 * 2**-24 * max(1.0, largest))


@pytest.mark.parametrize("name", ["CausalTransformer", "EncoderForTokenClassification"])
def test_a_batch_without_a_label_has_the_loss_zero(name):
    config, options = MODELS[name]
    made = getattr(sq.models, name)(getattr(sq.models, config)(**SIZES, **options))
    text = torch.full((2, 1), 7)  # a language model predicts nothing of one token
    loss = made(text, labels=text if name == "CausalTransformer" else text - 107).loss
    loss.backward()
    assert loss == 0.0
    assert all(p.grad is None or bool((p.grad == 0).all()) for p in made.parameters())


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("CausalTransformer", "position_ids"),
        ("Seq2SeqTransformer", "output_hidden_states"),
        ("NonAutoregressiveTransformer", "past_key_values"),
    ],
)
def test_no_argument_is_passed_over_in_silence(name, wrong):
    config, options = MODELS[name]
    made = getattr(sq.models, name)(getattr(sq.models, config)(**SIZES, **options))
    text = torch.full((2, 3), 7)
    with pytest.raises(sq.OptionError, match=f"{name} has no argument {wrong}"):
        made(text, labels=text, **{wrong: text})
    made(text, labels=text, **{wrong: None})  # nothing is asked for
