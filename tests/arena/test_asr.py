"""The speech study: how the prompts are divided, and what the table shows."""

import gzip
import wave

from subquad.arena import asr
from subquad.arena.zoo import TEXTS, Zoo
from subquad.data import Speech


def prompts(folder, count):
    """A zoo with clips that say their number, every tenth of them a sentence that repeats."""
    sounds = folder / TEXTS["speech"][0]
    sounds.mkdir(parents=True)
    lines = []
    for number in range(count):
        with wave.open(str(sounds / f"{number}.wav"), "wb") as file:
            file.setparams((1, 2, 8000, 0, "NONE", ""))
            file.writeframes(bytes(2 * 800))
        text = "Once again." if number % 10 == 0 else f"Number {number}, please."
        lines.append(f"{number}: {text}\n")
    place = folder / TEXTS["transcripts"][0]
    place.parent.mkdir(parents=True)
    place.write_bytes(gzip.compress("".join(lines).encode()))
    return Zoo(texts=folder)


def test_no_test_text_is_trained_on(tmp_path):
    counts = asr._manifests(prompts(tmp_path / "zoo", 130), tmp_path, quick=False)
    assert counts == {"test": 60, "valid": 40, "train": 30}
    texts = {
        name: [text for _, text in Speech(tmp_path / f"{name}.tsv")]
        for name in ("test", "valid", "train")
    }
    assert {name: len(part) for name, part in texts.items()} == counts
    assert texts["train"].count("once again") == 13  # all of those that are said twice
    apart = [*texts["test"], *texts["valid"]]
    assert len(set(apart)) == 100 and not set(apart) & set(texts["train"])
    assert "number one two please" in [*apart, *texts["train"]]  # digits are written out
    again = tmp_path / "again"
    again.mkdir()
    asr._manifests(Zoo(texts=tmp_path / "zoo"), again, quick=False)
    for name in counts:
        assert (again / f"{name}.tsv").read_text() == (tmp_path / f"{name}.tsv").read_text()
    assert asr._manifests(Zoo(texts=tmp_path / "zoo"), again, quick=True)["train"] == 12


def test_the_table_has_a_dash_for_what_was_not_measured():
    scores = {"wer": 0.5, "cer": 0.25, "cer_other": 0.75}
    row = {
        "mechanism": "performer", "guided": True, "cpu_seconds": None, "best": {"loss": 1.5},
        "curve": [{"step": 200, "loss": 2.0, "diagonality": 0.4}],
        "test": scores, "train": {**scores, "cer": 0.125},
    }  # fmt: skip
    (found,) = asr._table([row])
    assert found["guided"] == "yes" and found["CPU minutes"] is None
    assert found["diagonality, step 200"] == 0.4 and found["diagonality, step 100"] is None
    assert found["test CER"] == 0.25 and found["training clips CER"] == 0.125
