"""Noise at decoding: its distribution, its seed."""

import math

import pytest
import torch

from subquad.errors import OptionError

pytest.importorskip("transformers")

from subquad.generation import LogitsNoise, TemperatureAnneal, WordDropout

IDS = torch.ones(4, 3, dtype=torch.long)


def test_gumbel_noise_and_the_largest_score_draw_from_softmax():
    logits = torch.tensor([1.0, 0.0, -1.0, 0.5])
    for temperature in (1.0, 0.5):
        draws = 20_000
        noise = LogitsNoise(temperature, kind="gumbel", seed=3)
        picked = noise(torch.ones(1, 1), logits.expand(draws, -1)).argmax(1)
        share = picked.bincount(minlength=4) / draws
        wanted = (logits / temperature).softmax(0)
        # a share's standard deviation is √(p(1−p)/n) ≤ 0.0036; 5 of them: one in 10⁶ fails
        assert float((share - wanted).abs().max()) < 5 * 0.5 / math.sqrt(draws)


def test_gaussian_noise_has_its_scale():
    drawn = LogitsNoise(2.0, seed=1)(torch.ones(1, 1), torch.zeros(100, 1000))
    # relative standard deviation of an estimated one: 1/√(2n) = 0.0022; 5 of them
    assert abs(float(drawn.std()) / 2.0 - 1) < 0.011
    # of the mean: 2/√n = 0.0063; 5 of them
    assert abs(float(drawn.mean())) < 0.032


def test_a_draw_belongs_to_seed_and_step():
    scores = torch.zeros(4, 9)
    noise = LogitsNoise(seed=5)
    assert torch.equal(noise(IDS, scores), noise(IDS, scores))
    assert torch.equal(noise(IDS, scores), LogitsNoise(seed=5)(IDS, scores))
    assert not torch.equal(noise(IDS, scores), LogitsNoise(seed=6)(IDS, scores))
    assert not torch.equal(noise(IDS, scores), noise(IDS[:, :2], scores))
    closed = scores.index_fill(1, torch.tensor([2]), float("-inf"))
    assert bool((noise(IDS, closed)[:, 2] == float("-inf")).all())


def test_the_temperature_falls():
    anneal = TemperatureAnneal(start=2.0, end=0.5, steps=3, begin=2)
    wanted = [2.0, 1.5, 1.0, 0.5, 0.5]
    for token, temperature in enumerate(wanted):
        assert anneal.temperature(token) == pytest.approx(temperature)
        ids = torch.ones(1, 2 + token)
        assert float(anneal(ids, torch.ones(1, 2))[0, 0]) == pytest.approx(1 / temperature)


def test_words_are_dropped_at_their_rate():
    ids = [*range(10, 1010), 2]
    left = WordDropout(0.3, seed=1)(ids, keep={2})
    assert left[-1] == 2
    assert left == [token for token in ids if token in set(left)], "the order stays"
    # binomial: standard deviation √(1000·0.3·0.7) = 14.5; 5 of them
    assert abs(len(left) - 1 - 700) < 73
    masked = WordDropout(0.3, replacement=4, seed=1)(ids, keep={2})
    assert len(masked) == len(ids)
    assert [token for token in masked if token != 4] == left
    assert WordDropout(1.0)([7, 8, 2], keep={2})[-1] == 2
    assert len(WordDropout(1.0)([7, 8, 2], keep={2})) == 2, "one word stays"
    assert WordDropout(0.5, seed=1)(ids, index=1) != WordDropout(0.5, seed=1)(ids, index=2)


def test_wrong_arguments():
    with pytest.raises(OptionError, match="scale=-1.*kind='laplace'"):
        LogitsNoise(-1, kind="laplace")
    with pytest.raises(OptionError, match="start=0.*steps=0"):
        TemperatureAnneal(start=0, steps=0)
    with pytest.raises(OptionError, match="probability=2"):
        WordDropout(2)
