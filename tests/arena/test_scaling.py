import json

import pytest

import subquad as sq
from subquad.arena import scaling
from subquad.options import parse_spec


@pytest.mark.slow
@pytest.mark.parametrize("name", scaling.candidates())
def test_time_and_memory_grow_as_declared(name):
    """The floors of the design, at 16,384 and 65,536 tokens, 8 heads of 64.

    A process shares its machine: a run is repeated when it exceeds the bound, and the least
    growth counts, since other load can only add time.
    """
    for _ in range(3):
        row = scaling.measure(name)
        assert row["peak_bytes"] <= scaling.MOST_BYTES, row
        if row["ratio"] <= scaling.MOST_GROWTH:
            return
    pytest.fail(f"grew {row['growth']:.2f} times, declared {row['declared']:.2f} times: {row}")


def test_every_mechanism_that_claims_less_than_exact_attention_is_measured():
    names = {parse_spec(spec).name for spec in scaling.candidates()}
    assert "performer" in names and "local" in names
    assert set(sq.mechanisms()) - names == {"softmax", "additive", "location", "synthesizer"}


@pytest.mark.parametrize("name", scaling.INSTEAD)
def test_what_stands_in_is_less_than_quadratic(name):
    growth = [
        about.flops(65536) / about.flops(16384)
        for about in map(sq.describe, (name, scaling.INSTEAD[name]))
    ]
    # ×16 for a square; L·log L grows ×4·16/14 = 4.6
    assert growth[0] > 12 and growth[1] < 4.6


def test_full_attention_would_be_seen():
    """Growth and declared growth come from the run and from `describe`."""
    row = scaling.measure("softmax", lengths=(256, 1024), seconds=0.0)
    assert row["declared"] == pytest.approx(16.0)
    assert row["ratio"] == pytest.approx(row["growth"] / 16.0)
    # The score matrix would be 8·1024²·4 B = 34 MB; python and torch alone exceed 100 MB.
    assert 1e8 < row["peak_bytes"] < 2e9


def test_report(tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "candidates", lambda: ["local(window=8)"])
    seen = []
    result = scaling.run(tmp_path, True, False, seen.append)
    assert json.loads((tmp_path / "scaling.json").read_text())["rows"] == result["rows"]
    page = (tmp_path / "scaling.md").read_text()
    assert "| local(window=8) |" in page and "2,048" in page
    assert any("local(window=8)" in line for line in seen)


def test_a_failing_mechanism_says_why():
    with pytest.raises(RuntimeError, match="unknown mechanism"):
        scaling.measure("lokal")
