"""Finding the layers that copy: the test's strings, a model that copies in one layer, errors."""

import pytest
import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import subquad as sq
from subquad.convert import CopyTest, Recall, recall_layers

SMALL = {"window": 8, "heavy": 4, "sinks": 1}
TEST = CopyTest(length=8, gap=40, rows=2)


def llama(layers=3):
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        )
    ).eval()  # fmt: skip


def test_strings_stand_twice_with_a_gap_between():
    test = CopyTest(length=5, gap=7, rows=3, seed=2)
    ids = test.ids(llama())
    assert ids.shape == (3, 17) and ids.max() < 64
    assert torch.equal(ids[:, :5], ids[:, 12:])
    assert torch.equal(ids, test.ids(llama()))
    assert not torch.equal(ids, CopyTest(length=5, gap=7, rows=3, seed=3).ids(llama()))
    drawn = CopyTest(length=5, gap=7, rows=3, tokens=range(10, 13)).ids(llama())
    assert set(drawn.flatten().tolist()) == {10, 11, 12}
    prose = CopyTest(length=5, gap=7, rows=3, seed=2, start=63, between=range(20, 30)).ids(llama())
    assert prose[:, 6:13].tolist() == 3 * [list(range(20, 27))]
    assert prose[:, 0].tolist() == 3 * [63]
    assert torch.equal(prose[:, 1:6], ids[:, :5]) and torch.equal(prose[:, 13:], ids[:, :5])


def test_loss_and_accuracy_are_of_the_second_copy():
    model = llama()
    ids = TEST.ids(model)
    logits = model(input_ids=ids).logits[:, -8:-1]
    logp = logits.log_softmax(-1).gather(-1, ids[:, -7:, None])
    loss, accuracy = TEST.run(model)
    assert loss == pytest.approx(-logp.mean().item(), rel=1e-5)  # float32, in another order
    assert accuracy == (logits.argmax(-1) == ids[:, -7:]).float().mean().item()
    model.train()
    TEST.run(model)
    assert model.training and all(module.training for module in model.modules())


def alone(model, *names):
    """Copy loss and accuracy with these layers converted."""
    sq.convert(model, "near_far", where=lambda name, _: name in names, **SMALL)
    outcome = TEST.run(model)
    sq.revert(model)
    return outcome


def test_layers_are_ranked_by_the_loss_of_their_conversion():
    model = llama(5)
    before = list(model.state_dict())
    names = [f"model.layers.{index}.self_attn" for index in range(5)]
    found = recall_layers(model, 2, test=TEST, **SMALL)
    losses = {name: alone(model, name)[0] for name in names}
    assert found.losses == losses
    ranked = sorted(names, key=lambda name: -losses[name])
    assert found.layers == tuple(ranked[:2])
    assert len(set(losses.values())) == 5  # each conversion is felt
    assert found.exact == TEST.run(model)
    assert found.converted == alone(model, *names)
    assert found.kept == alone(model, *ranked[2:])
    assert list(model.state_dict()) == before
    assert not model.model.layers[0].self_attn._modules.get("subquad")
    text = str(found)
    assert all(f"{losses[name]:7.3f}  {name}" in text for name in found.layers)


def test_swaps_only_help():
    for seed in range(3):
        test = CopyTest(length=8, gap=40, rows=2, seed=seed)
        model = llama(5)
        plain = recall_layers(model, 2, test=test, **SMALL)
        tried = recall_layers(model, 2, test=test, swaps=3, **SMALL)
        assert tried.kept[0] <= plain.kept[0]
        assert tried.layers[0] == plain.layers[0]
        best = min(
            alone_without(model, test, (plain.layers[0], other))
            for other in plain.losses
            if other != plain.layers[0]
        )
        assert tried.kept[0] == best


def alone_without(model, test, kept):
    sq.convert(model, "near_far", keep_exact=kept, **SMALL)
    loss = test.run(model)[0]
    sq.revert(model)
    return loss


def test_convert_finds_the_layers_itself():
    model = llama(4)
    found = recall_layers(model, 1, **SMALL)
    ids = CopyTest(rows=1).ids(model)[:, :128]
    report = sq.convert(model, "near_far", keep_exact=1, **SMALL)
    assert report.kept == found.layers
    assert found.note in report.notes
    assert not any("word for word" in note for note in report.notes)
    with torch.no_grad():
        out = model(input_ids=ids).logits
        again = sq.convert(model, "near_far", keep_exact=1, **SMALL)
        assert again.replaced and again.kept == report.kept
        assert torch.equal(model(input_ids=ids).logits, out)


def test_a_strict_conversion_says_what_it_cannot_do():
    report = sq.convert(llama(), "near_far", **SMALL)
    assert any("word for word" in note and "keep_exact=4" in note for note in report.notes)
    some = sq.convert(llama(), "near_far", keep_exact="model.layers.1.self_attn", **SMALL)
    assert not any("word for word" in note for note in some.notes)
    encoder = BertModel(BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2))
    assert not any("word for word" in note for note in sq.convert(encoder).notes)


def test_wrong_arguments():
    model = llama()
    for count in (0, 3, True, 1.5):
        with pytest.raises(sq.OptionError, match="count must be from 1 to 2"):
            recall_layers(model, count, **SMALL)
    with pytest.raises(sq.OptionError, match="name them in keep_exact"):
        sq.convert(model, {"model.layers.0.self_attn": "near_far"}, keep_exact=1)
    with pytest.raises(sq.OptionError, match=r"length=1 .*gap=-1"):
        CopyTest(length=1, gap=-1)
    with pytest.raises(sq.OptionError, match="between must be gap=300 ids, given 3"):
        CopyTest(between=range(3))
    with pytest.raises(sq.OptionError, match="did you mean 'window'"):
        recall_layers(model, 1, windw=3, test=TEST)
    assert isinstance(recall_layers(model, 1, test=TEST, **SMALL), Recall)  # nothing left behind
    sq.convert(model, "near_far", **SMALL)
    with pytest.raises(sq.OptionError, match=r"call subquad\.revert first"):
        recall_layers(model, 1, **SMALL)
    encoder = BertModel(BertConfig(hidden_size=32, num_hidden_layers=3, num_attention_heads=2))
    with pytest.raises(sq.OptionError, match="causal attention or more; BertModel has 0"):
        recall_layers(encoder, 1)
