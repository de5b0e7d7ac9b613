"""What objectives are for: exposure bias and BLEU, where the right answer is known."""

import json
import math

import pytest
import torch

from subquad.arena import objectives as study
from subquad.arena.objectives import Ambiguity, Tracking

# Shares lie in [0, 1], so that the variance of a row's is at most 1/4: 5 standard errors of the
# difference of two means over 500 rows each are at most this.
FAR = 5 * math.sqrt(2 * 0.25 / 500)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_states_stay_and_show_at_their_rates():
    task = Tracking(length=100)
    ids = task.batch(seeded(), rows=200)["input_ids"]
    shown, hidden = ids[:, ::2] - 3, ids[:, 1::2] - 3 - task.states
    for found, share, count in (
        ((hidden[:, 1:] == hidden[:, :-1]), task.stay, 200 * 99),
        ((shown == hidden), task.clear, 200 * 100),
    ):
        # 5σ of a binomial share
        assert abs(found.double().mean() - share) < 5 * math.sqrt(share * (1 - share) / count)
    assert hidden.min() == shown.min() == 0 and hidden.max() == shown.max() == task.states - 1


def test_the_filter_is_the_forward_algorithm():
    task = Tracking(states=3, length=4)
    batch = task.batch(seeded(), rows=300)
    shown, hidden = batch["input_ids"][:, ::2] - 3, batch["input_ids"][:, 1::2] - 6
    paths = torch.cartesian_prod(*[torch.arange(3)] * 4)

    def chance(path, seen):
        found = 1 / 3
        for place in range(len(seen)):
            if place:
                same = path[place] == path[place - 1]
                found *= task.stay if same else (1 - task.stay) / 2
            found *= task.clear if path[place] == seen[place] else (1 - task.clear) / 2
        return found

    right = []
    for seen, states in zip(shown.tolist()[:40], hidden.tolist()[:40], strict=True):
        for place in range(4):  # all paths so far, summed by their last state
            sums = [0.0] * 3
            for path in {tuple(one[: place + 1]) for one in paths.tolist()}:
                sums[path[-1]] += chance(path, seen[: place + 1])
            right.append(sums.index(max(sums)) == states[place])
    few = {name: one[:40] for name, one in batch.items()}
    assert task.bounds(few)[1].mean().item() == pytest.approx(sum(right) / len(right))


def test_translations_are_in_one_of_three_ways():
    task = Ambiguity()
    batch = task.batch(seeded(), rows=1000)
    counts = {6: 0, 7: 0, 8: 0}
    for source, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        words = source[: source.index(2)]
        particle, *target = labels[: labels.index(2)]
        partners = [word + task.words for word in words]
        assert sorted(target) == sorted(partners)
        assert particle == 6 or target == partners
        counts[particle] += 1
    for count, share in zip(counts.values(), (0.4, 0.3, 0.3), strict=True):
        assert abs(count / 1000 - share) < 5 * math.sqrt(share * (1 - share) / 1000)


def test_a_study_writes_its_tables(tmp_path, monkeypatch):
    monkeypatch.setattr(
        study, "FED", {"teacher forcing": {}, "free running": study.FED["free running"]}
    )
    monkeypatch.setattr(study, "SCORED", {"minimum risk": study.SCORED["minimum risk"]})
    track, translate = study.track, study.translate
    monkeypatch.setattr(
        study, "track", lambda name, seed, steps: track(name, seed, steps=1, rows=5)
    )
    monkeypatch.setattr(
        study, "translate", lambda seed, steps, more: translate(seed, steps=1, more=1, rows=5)
    )
    seen = []
    result = study.run(tmp_path, True, False, seen.append)
    assert json.loads((tmp_path / "objectives.json").read_text())["bleu"] == result["bleu"]
    page = (tmp_path / "objectives.md").read_text()
    for row in result["tracking"] + result["bleu"]:
        assert f"| {row['name']} |" in page
    assert len(seen) == 5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["parallel, 2 passes", "original"])
def test_scheduled_sampling_gains_where_teacher_forcing_fails(name):
    teacher, scheduled = study.track("teacher forcing", 0), study.track(name, 0)
    # With the truth before it the one predicts better; with its own tokens it is the repeater.
    assert teacher["forced"] > scheduled["forced"]
    assert abs(teacher["free"] - teacher["repeater"]) < FAR
    assert scheduled["free"] - teacher["free"] > FAR
    # Nothing that reads the past alone is better than the filter.
    assert max(teacher["free"], scheduled["free"]) < scheduled["filter"] + FAR


@pytest.mark.slow
def test_training_on_bleu_raises_it_on_new_sources():
    rows = {row["name"]: row for row in study.translate(0)}
    for name in ("self-critical", "minimum risk"):
        # Of the same 300 sources: the mean gain, and 5 of its standard errors.
        assert rows[name]["gain"] > 5 * rows[name]["error"]
        margin = 5 * math.hypot(rows[name]["error"], rows["cross entropy"]["error"])
        assert rows[name]["gain"] - rows["cross entropy"]["gain"] > margin
        assert rows[name]["bleu"] > rows["before"]["bleu"]
