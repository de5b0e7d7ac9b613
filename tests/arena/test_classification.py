"""The study of long documents runs from texts to tables."""

import json

from subquad.arena import classification


def test_a_quick_run_writes_its_results(monkeypatch, tmp_path):
    texts = {f"c{'adjk'[i % 4]}{i:02}": f"{'adjk'[i % 4]} word{i % 7} " * 40 for i in range(124)}
    monkeypatch.setattr(classification.corpora, "brown", lambda zoo: texts)
    rows = [{"mechanism": name, "tokens": 32} for name in ("performer", "none")]
    monkeypatch.setattr(classification, "ROWS", rows)
    monkeypatch.setattr(classification.Zoo, "default", lambda texts: None)
    shown = []
    result = classification.run(tmp_path, quick=True, json=False, echo=shown.append)
    assert json.loads((tmp_path / "classification.json").read_text(encoding="utf-8")) == result
    page = (tmp_path / "classification.md").read_text(encoding="utf-8")
    assert "A quick run" in page and shown[-1] == page
    performer, none = result["rows"]
    assert performer["parameters"] > none["parameters"]  # the latter has no attention
    for row in result["rows"]:
        assert row["steps"] == 4 and 0 <= row["test"]["accuracy"] <= 1
    assert "12 of the Brown corpus to train on, 12 others to test" in page
