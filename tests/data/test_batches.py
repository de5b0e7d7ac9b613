"""Batches of tokens: each index once, no batch too large, the same again from any point."""

import itertools

import pytest
import torch
from torch.utils.data import DataLoader

from subquad.data.batches import TokenBatches, pad_batch, pad_rows
from subquad.errors import OptionError, ShapeError


def lengths(count=1009):
    draws = torch.Generator().manual_seed(0)
    return torch.randint(1, 60, (count, 2), generator=draws)


@pytest.mark.parametrize("pool", [7, 100, 5000])
@pytest.mark.parametrize("shuffle", [True, False])
def test_each_index_once_and_no_batch_too_large(pool, shuffle):
    table = lengths()
    batches = TokenBatches(table, tokens=301, pool=pool, shuffle=shuffle)
    for _ in range(2):
        found = list(batches)
        assert len(found) == len(batches)
        assert sorted(i for rows in found for i in rows) == list(range(len(table)))
        assert all(len(rows) * int(table[rows].max()) <= 301 for rows in found)


def test_batches_are_full_and_lengths_alike():
    table = lengths()
    batches = TokenBatches(table, tokens=301, pool=5000)
    # No batch takes one more: sorted, the next example is as long as the longest at least.
    ordered = sorted(batches, key=lambda rows: (int(table[rows].max()), -len(rows)))
    for rows, after in itertools.pairwise(ordered):
        longest = min(int(table[row].max()) for row in after)
        assert (len(rows) + 1) * max(longest, int(table[rows].max())) > 301
    # A batch whose lengths run from a to b has at most 301 / b rows, hence at most
    # 301 (b - a) / b padding; over sorted batches this sums to at most 301 (1/1 + … + 1/59).
    harmonic = sum(1 / n for n in range(1, 60))
    total = int(table.amax(1).sum())
    assert 0 < batches.padding <= 301 * harmonic / total
    assert batches.padding < TokenBatches(table, tokens=301, pool=40).padding


def test_an_example_longer_than_the_limit_is_alone():
    batches = TokenBatches([3, 50, 4, 60], tokens=12)
    assert batches.oversized == 2
    assert sorted(map(sorted, batches)) == [[0, 2], [1], [3]]


def test_sentences_limit_batches():
    batches = TokenBatches(lengths(101), tokens=None, sentences=10)
    assert sorted(map(len, batches)) == [1] + [10] * 10
    both = TokenBatches(lengths(101), tokens=100, sentences=3)
    assert max(map(len, both)) == 3


def test_order_is_of_seed_and_epoch():
    def order(seed, epoch):
        batches = TokenBatches(lengths(), tokens=300, seed=seed, pool=128)
        batches.set_epoch(epoch)
        return list(batches)

    assert order(3, 2) == order(3, 2)
    assert len({str(order(*key)) for key in ((3, 2), (3, 3), (4, 2), (2, 3))}) == 4


def test_goes_on_at_any_batch():
    whole = list(TokenBatches(lengths(), tokens=300, seed=5, pool=128))
    for start in (0, 1, 17, len(whole)):
        batches = TokenBatches(lengths(), tokens=300, seed=5, pool=128)
        batches.start_at(0, start)
        batches.set_epoch(0)  # what a training loop calls before each epoch
        assert list(batches) == whole[start:]
        assert list(batches) == whole, "the next pass is a whole one"
    batches = TokenBatches(lengths(), tokens=300, seed=5, pool=128)
    stream = iter(batches)
    taken = [next(stream) for _ in range(9)]
    saved = batches.state_dict()
    again = TokenBatches(lengths(), tokens=300, seed=5, pool=128)
    again.load_state_dict(saved)
    assert taken + list(again) == whole
    with pytest.raises(OptionError, match=f"epoch 0 has {len(whole)} batches"):
        again.start_at(0, len(whole) + 1)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"tokens": 0}, "tokens=0"),
        ({"tokens": None}, "give tokens= or sentences="),
        ({"pool": 0, "seed": -1}, "pool=0 must be an integer ≥ 1; seed=-1"),
        ({"shuffle": 1}, "shuffle=1"),
    ],
)
def test_wrong_options(options, told):
    with pytest.raises(OptionError, match=told):
        TokenBatches([1, 2], **options)


@pytest.mark.parametrize("wrong", [[], [0, 1], [1.5], torch.ones(2, 2, 2).long()])
def test_wrong_lengths(wrong):
    with pytest.raises(ShapeError, match="lengths must"):
        TokenBatches(wrong)


# ---- padding -------------------------------------------------------------------------------------


def test_pad_batch_shifts_targets():
    rows = [
        {"input_ids": torch.tensor([9, 8, 2]), "labels": torch.tensor([5, 2])},
        {"input_ids": torch.tensor([7, 2]), "labels": torch.tensor([6, 7, 8, 2])},
    ]
    batch = pad_batch(rows, pad=0, bos=1, decoder_mask=True)
    assert {name: value.tolist() for name, value in batch.items()} == {
        "input_ids": [[9, 8, 2], [7, 2, 0]],
        "attention_mask": [[1, 1, 1], [1, 1, 0]],
        "labels": [[5, 2, -100, -100], [6, 7, 8, 2]],
        "decoder_input_ids": [[1, 5, 0, 0], [1, 6, 7, 8]],
        "decoder_attention_mask": [[1, 1, 0, 0], [1, 1, 1, 1]],
    }


def test_pad_rows_rounds_lengths_and_stacks_features():
    rows = [
        {"features": torch.ones(2, 3), "labels": [4], "weight": 0.5},
        {"features": torch.ones(5, 3), "labels": [4, 5], "weight": 1.5},
    ]
    batch = pad_rows(rows, multiple=4)
    assert batch["features"].shape == (2, 8, 3) and int(batch["features"].sum()) == 21
    assert batch["labels"].tolist() == [[4, -100, -100, -100], [4, 5, -100, -100]]
    assert batch["weight"].tolist() == [0.5, 1.5] and "attention_mask" not in batch


def test_wrong_rows():
    with pytest.raises(ShapeError, match="rows is empty"):
        pad_rows([])
    with pytest.raises(ShapeError, match="same names"):
        pad_rows([{"input_ids": [1]}, {"labels": [1]}])
    with pytest.raises(ShapeError, match="labels of shape"):
        pad_batch([{"input_ids": [1]}])


def test_loader_takes_both():
    rows = [{"input_ids": [5] * n, "labels": [6] * n} for n in range(1, 30)]
    loader = DataLoader(
        rows, batch_sampler=TokenBatches([*range(1, 30)], tokens=64), collate_fn=pad_batch
    )
    seen = sum(int(batch["attention_mask"].sum()) for batch in loader)
    assert seen == sum(range(1, 30))
