import json
import sys
import types

import pytest
import torch
from typer.testing import CliRunner

import subquad as sq
from subquad.arena import conversion
from subquad.arena.conversion.stages import stages
from subquad.arena.zoo import Zoo
from subquad.cli.app import app


@pytest.fixture
def studies(monkeypatch):
    """Two small studies that note what they were given."""
    given = []
    for variable in ("SUBQUAD_MODELS", "SUBQUAD_TEXTS"):
        monkeypatch.delenv(variable, raising=False)

    def measure(zoo, *, quick, echo):
        given.append((zoo, quick, torch.get_num_threads()))
        echo("half way")
        return {
            "settings": {"tokens": 512, "error": 0.123456},
            "rows": [{"model": "a|b", "cosine": 0.98765432, "seed": None}, {"of": "another table"}],
            "notes": ["One sentence."],
        }

    for name in ("one", "two"):
        module = types.SimpleNamespace(measure=measure, table=lambda result: result["rows"])
        monkeypatch.setitem(sys.modules, f"subquad.arena.conversion.{name}", module)
    entries = {name: conversion.Study(f"Study {name}", name) for name in ("one", "two")}
    monkeypatch.setattr(conversion, "STUDIES", entries)
    return given


def run(*arguments):
    return CliRunner().invoke(app, ["bench", "conversion", *map(str, arguments)])


def test_results_and_page(studies, tmp_path):
    done = run("two", "--out", tmp_path, "--models", tmp_path, "--quick")
    assert done.exit_code == 0, done.output
    assert "half way" in done.output and "0.9877" in done.output
    result = json.loads((tmp_path / "conversion-two.json").read_text())
    assert result["command"] == "subquad bench conversion two --quick"
    assert result["rows"][0]["cosine"] == 0.98765432 and result["machine"]["threads"] == 1
    assert studies == [(Zoo(models=tmp_path), True, 1)]

    page = (tmp_path / "conversion.md").read_text()
    assert "## Study two" in page and "Study one" not in page
    assert "tokens 512; error 0.1235." in page
    assert "| model | cosine | seed |\n|---|---|---|\n| a\\|b | 0.9877 | – |\n\n| of |" in page
    assert "quick run" in page and "One sentence." in page and "1 of" in page

    # Another study joins the page; the first one's result stays.
    done = run("one", "--out", tmp_path, "--json")
    assert list(json.loads(done.stdout)) == ["one"]
    page = (tmp_path / "conversion.md").read_text()
    assert page.index("## Study one") < page.index("## Study two")


def test_without_names_every_study_runs(studies, tmp_path):
    before = torch.get_num_threads()
    found = conversion.run(
        tmp_path, zoo=Zoo(), quick=False, json=True, threads=2, echo=lambda text: None
    )
    assert list(found) == ["one", "two"] and [threads for *_, threads in studies] == [2, 2]
    assert torch.get_num_threads() == before


def test_errors_come_before_any_work(studies, tmp_path):
    done = run("one", "tow", "--out", tmp_path)
    assert done.exit_code == 2 and not studies
    assert "no conversion study 'tow' (did you mean 'two'?)" in done.output
    done = run("one", "--models", tmp_path / "nowhere")
    assert done.exit_code == 2 and "--models or SUBQUAD_MODELS must be a folder" in done.output


def test_a_study_that_is_listed_has_a_module_that_measures_and_tabulates():
    for name in conversion.STUDIES:
        module = conversion.study(name)
        assert callable(module.measure) and callable(module.table), name
    with pytest.raises(sq.UnknownNameError, match="did you mean 'minilm'"):
        conversion.study("minlm")


def test_stages_leave_the_model_as_it_was():
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(vocab_size=20, hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
                        intermediate_size=16)  # fmt: skip
    model = BertModel(config).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ids = torch.arange(20)[None]

    def score(scored):
        with torch.no_grad():
            return {"sum": float(scored(ids).last_hidden_state[..., 0].double().sum())}

    trained = []

    def recover(scored, examples):
        trained.append((scored is model, list(examples)))
        with torch.no_grad():
            next(scored.parameters()).mul_(2.0)

    rows = stages(
        model,
        score,
        {"first": lambda name, module: ".0." in name, "all": None},
        mechanism="performer(features=8)",
        seeds=(0, 1),
        examples=["an example"],
        recover=recover,
        echo=lambda text: None,
    )
    names = [(row["model"], row["seed"], row["layers"]) for row in rows]
    assert names == [
        ("original", None, 0),
        ("first", 0, 1),
        ("first", 1, 1),
        ("all", 0, 3),
        ("all", 1, 3),
        ("first, recovered", 0, 1),
    ]
    assert len({row["sum"] for row in rows}) == len(rows)  # each is another model
    assert trained == [(False, ["an example"])]
    assert score(model) == {"sum": rows[0]["sum"]}
    state = model.state_dict()
    assert state.keys() == before.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in before.items())
