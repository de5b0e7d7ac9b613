"""The recovery study: its metrics, and that it puts the model back between runs."""

from __future__ import annotations

import torch
import transformers as tf

from subquad.arena.conversion import recovery, recovery_lm
from subquad.arena.encoders import Encoder


def unit(*rows):
    return torch.nn.functional.normalize(torch.tensor(rows, dtype=torch.float64), dim=-1)


def test_neighbours_are_counted_by_the_exact_models_choice():
    exact = unit([1, 0], [0.9, 0.1], [0, 1], [0.1, 0.9])
    assert recovery.neighbours_kept(exact, exact) == 1.0
    # The first row moves to the second pair: its nearest is now 3, and 1's nearest is 3 as well.
    moved = unit([0, 1.1], [0.9, 0.1], [0, 1], [0.1, 0.9])
    nearest = (moved @ moved.T).fill_diagonal_(-1).argmax(-1).tolist()
    wanted = (exact @ exact.T).fill_diagonal_(-1).argmax(-1).tolist()
    share = sum(a == b for a, b in zip(nearest, wanted, strict=True)) / 4
    assert recovery.neighbours_kept(moved, exact) == share < 1.0
    assert torch.allclose(recovery.cosines(exact, exact), torch.ones(4, dtype=torch.float64))
    lost = [i for i in range(4) if nearest[i] != wanted[i]]
    similar = (exact @ exact.T).tolist()
    margins = [similar[i][wanted[i]] - similar[i][nearest[i]] for i in lost]
    assert recovery.lost_margins(moved, exact) == margins and min(margins) > 0
    assert recovery.lost_margins(exact, exact) == []


def test_the_study_runs_and_leaves_the_model_as_it_was(monkeypatch):
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = "abcdefghijklmnopqrstuvwxyz"
    words = {word: index for index, word in enumerate(["[PAD]", "[UNK]", *letters])}
    raw = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]")
    torch.manual_seed(0)
    config = tf.BertConfig(
        vocab_size=len(words), hidden_size=24, num_hidden_layers=1, num_attention_heads=3,
        intermediate_size=40, initializer_range=0.4, max_position_embeddings=64,
    )  # fmt: skip
    model = tf.BertModel(config).eval()
    generator = torch.Generator().manual_seed(1)

    def texts(count):
        picks = torch.randint(26, (count, 40), generator=generator).tolist()
        return [" ".join(letters[i] for i in row) for row in picks]

    monkeypatch.setattr(
        recovery, "load_minilm", lambda zoo: Encoder("tiny", None, model, tokenizer)
    )
    monkeypatch.setattr(recovery, "LENGTH", 32)
    monkeypatch.setattr(
        recovery, "texts", lambda zoo, quick: (texts(12), {"brown": texts(9), "help": texts(5)})
    )
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    recipes = [
        recovery.Recipe("map", "hedgehog", "auto", 1e-2, minutes=0.02, seeds=(0, 1)),
        recovery.Recipe("random", "performer(features=16)", "full", 1e-3, minutes=0.02),
    ]
    said = []
    result = recovery.measure(None, quick=False, echo=said.append, recipes=recipes)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.state_dict().keys() == before.keys()
    assert [(run["mechanism"], run["seed"]) for run in result["runs"]] == [
        ("hedgehog", 0), ("hedgehog", 1), ("performer(features=16)", 0),
    ]  # fmt: skip
    first, second = recovery.table(result)
    assert first["trained"] == "transfer + full" and " ± " in first["brown, after"]
    assert second["help, before"] == f"{result['runs'][2]['before']['help']['cosine']:.5f}"
    assert said


def test_training_rows_hold_each_string_twice():
    documents = [list(range(100_000, 100_000 + size)) for size in (700, 320, 159)]
    rows = recovery_lm.rows_with_copies(documents, 160, vocabulary=1000, seed=3)
    assert len(rows) == 4 + 2  # whole rows of a document; the last one has none
    for row in rows:
        ids = row["input_ids"]
        assert ids.shape == (160,)
        places = (ids < 1000).nonzero().flatten()
        half = len(places) // 2
        assert 24 <= half < 49
        assert torch.equal(ids[places[:half]], ids[places[half:]])
        assert places[half] - places[half - 1] > 160 // 10  # the gap
    again = recovery_lm.rows_with_copies(documents, 160, vocabulary=1000, seed=3)
    assert all(
        torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(rows, again, strict=True)
    )
