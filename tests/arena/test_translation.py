import json

import pytest

from subquad.arena import documents, translation
from subquad.errors import OptionError
from subquad.training.recipe import Recipe

pytest.importorskip("sacrebleu")


def _corpus(folder):
    folder.mkdir()
    for name, count in (("train", 40), ("val", 8), ("test_2016_flickr", 6)):
        for side, words in (("en", "one two three four"), ("de", "eins zwei drei vier")):
            rows = words.split()
            lines = (" ".join(rows[i % 4 :] + rows[: i % 3]) for i in range(count))
            (folder / f"{name}.{side}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.mark.parametrize("entry", translation.ENTRIES, ids=lambda entry: entry.name)
def test_every_entry_is_a_recipe(entry):
    settings = dict(entry.settings)
    recipe = settings.pop("task", translation.RECIPE)
    loaded = Recipe.load(recipe, {"data.train": "train.tsv", **settings})
    sizes = ("d_model", "encoder_layers", "decoder_layers", "dim_feedforward", "dropout")
    base = Recipe.load(translation.RECIPE)
    assert [loaded.model[name] for name in sizes] == [base.model[name] for name in sizes]


@pytest.mark.slow
def test_a_small_run_trains_measures_and_goes_on(tmp_path):
    data, out = _corpus(tmp_path / "tiny"), tmp_path / "out"
    lines = []
    options = {"quick": True, "json": True, "echo": lines.append}
    translation.run(out, data, tmp_path / "runs", only=["softmax"], **options)
    result = translation.run(out, data, tmp_path / "runs", only=["nat"], **options)
    assert [row["name"] for row in result["rows"]] == ["softmax", "nat"]
    assert json.loads((out / "translation.json").read_text(encoding="utf-8")) == result
    page = (out / "translation.md").read_text(encoding="utf-8")
    assert "| softmax |" in page and "tok:13a" in page
    again = translation.run(out, data, tmp_path / "runs", only=["softmax"], **options)
    assert any("complete" in line for line in lines)  # not trained again
    assert again["rows"][0]["beam"]["bleu"] == result["rows"][0]["beam"]["bleu"]


def test_wrong_arguments(tmp_path):
    with pytest.raises(OptionError, match="there are softmax, performer"):
        translation.run(tmp_path, tmp_path, tmp_path, only=["soft"])
    with pytest.raises(OptionError, match=r"no such files: .*train\.en"):
        translation.run(tmp_path, tmp_path, tmp_path)
    with pytest.raises(OptionError, match="two suffixes"):
        translation.run(tmp_path, tmp_path, tmp_path, pair="english")


@pytest.mark.slow
def test_what_does_not_fit_is_said(monkeypatch):
    # 4 heads of 4,096 x 4,096 weights in float32 are 0.27 GB; twelve attentions keep more than one
    # matrix each for their backward passes: more than 3 GB, and the limit is 4 GB
    found = documents.cost({"mechanism": "softmax", "attention_dropout": 0.1}, 4096, rounds=1)
    assert found == {"seconds": None, "bytes": None}


@pytest.mark.slow
def test_cost_of_a_step_and_its_page():
    found = documents.cost(documents.COSTS["performer"], 256, rounds=1)
    assert found["seconds"] > 0 and 0 < found["bytes"] < documents.LIMIT
    rows = [
        {"name": "performer", "length": 256, **found},
        {"name": "exact, fused", "length": 256, "seconds": None, "bytes": None},
    ]
    result = {
        "machine": {"cpu": "a", "threads": 1, "cores": 2, "torch": "2", "date": "today"},
        "limit": documents.LIMIT,
        "costs": rows,
        "translations": [],
    }
    assert "more than 4 GB" in documents.table(result)
    assert documents.picture(result).axes


@pytest.mark.slow
def test_documents_go_on_from_verses(tmp_path, monkeypatch):
    import subquad.data

    whole = subquad.data.preset("bible-es-en")
    few = {
        split: whole.read(split)[:count]
        for split, count in (("train", 60), ("valid", 12), ("test", 12))
    }

    class Few:
        read = staticmethod(few.get)

    monkeypatch.setattr(subquad.data, "preset", lambda name: Few)
    monkeypatch.setattr(documents, "TOKENS", 64)
    small = {
        "model.d_model": 16, "model.num_heads": 2, "model.dim_feedforward": 16,
        "model.encoder_layers": 1, "model.decoder_layers": 1, "training.epochs": 1,
        "decoding.beams": 2, "decoding.max_length": 8, "training.precision": "float32",
    }  # fmt: skip
    result = documents.run(
        tmp_path,
        True,
        True,
        print,
        runs=tmp_path / "runs",
        only=["verses", "near_far"],
        settings=small,
    )
    assert [row["name"] for row in result["translations"]] == ["verses", "near_far"]
    assert "go on from it" in documents.table(result)
    recipe = (tmp_path / "runs" / "near_far" / "recipe.yaml").read_text(encoding="utf-8")
    assert str(tmp_path / "runs" / "verses" / "best") in recipe
