"""Recipes: every key documented, every mistake told at once, nothing read otherwise than meant."""

from __future__ import annotations

import dataclasses
import re

import pytest

yaml = pytest.importorskip("yaml")

from subquad.errors import OptionError  # noqa: E402
from subquad.training import recipe as module  # noqa: E402
from subquad.training.recipe import Recipe, read_setting, shipped_recipes  # noqa: E402
from subquad.training.tasks import TASKS, task_of  # noqa: E402


def annotated_text():
    return module._shipped("annotated")


def test_the_annotated_recipe_has_every_key_with_its_default():
    tree = yaml.safe_load(annotated_text())
    kind = task_of(tree["task"])
    schema = {
        name: [f.name for f in dataclasses.fields(one)] for name, one in module.SECTIONS.items()
    }
    schema |= {"model": list(kind.model_options()), "objective": list(kind.objective_options())}
    assert {name: list(keys) for name, keys in tree.items() if name != "task"} == schema
    assert Recipe.load("annotated") == Recipe.load({"task": tree["task"]})


@pytest.mark.parametrize("name", TASKS)
def test_the_annotated_recipe_names_the_keys_of_every_task(name):
    text = annotated_text()
    for key, default in task_of(name).model_options().items():
        found = re.search(rf"^ +(?:#   )?{key}: (\S+)", text, re.MULTILINE)
        assert found, f"{name} has model.{key}"
        assert yaml.safe_load(found[1]) == default, key
    assert re.search(rf"^# what is trained:.*\b{name}\b", text, re.MULTILINE)


def test_every_key_has_its_meaning_beside_it():
    lines = annotated_text().splitlines()
    for number, line in enumerate(lines):
        if re.match(r"  \w+:", line):
            assert "# " in line or lines[number - 1].startswith("  # "), line
    for one in module.SECTIONS.values():
        for field in dataclasses.fields(one):
            assert field.metadata["help"] in annotated_text(), field.name


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_load_and_come_back(name, tmp_path):
    recipe = Recipe.load(name)
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe.to_yaml(), encoding="utf-8")
    assert Recipe.load(path) == recipe
    assert not Recipe.load(path).differences(recipe)


@pytest.mark.parametrize("name", TASKS)
def test_every_task_has_its_recipe(name):
    assert Recipe.load(task_of(name).recipe).task == name


def test_all_mistakes_are_told_at_once_by_their_keys():
    with pytest.raises(OptionError) as caught:
        Recipe.load({
            "task": "translation",
            "optimizer": {},
            "model": {"num_head": 3, "d_model": 0, "mechanism": "perfomer"},
            "objective": {"label_smoothing": 2.0, "smoothing": 1},
            "data": {"on_bad": "error", "max_length": 1.5},
            "optimiser": {"rat": 1, "betas": [0.9], "rate": -1, "clip": "a"},
            "training": {"steps": True, "precision": "float16", "seed": None},
            "evaluation": {"best": "blue"},
            "logging": [],
        })  # fmt: skip
    lines = str(caught.value).splitlines()
    assert lines[0] == "recipe: 17 problems"
    for wanted in (
        "optimizer: unknown key (did you mean 'optimiser'?)",
        "model.num_head: unknown key for translation (did you mean 'num_heads'?)",
        "model.d_model=0 must be an integer ≥ 1",
        "model.mechanism: unknown mechanism 'perfomer' (did you mean 'performer'?)",
        "objective.label_smoothing=2.0 must be a number ≥ 0 and ≤ 1",
        "objective.smoothing: unknown key for translation (did you mean 'label_smoothing'?)",
        "data.on_bad='error' is none of skip, raise",
        "data.max_length=1.5 must be an integer ≥ 2",
        "optimiser.rat: unknown key (did you mean 'rate'?)",
        "optimiser.betas=[0.9] must be 2 numbers in brackets",
        "optimiser.rate=-1 must be a number > 0",
        "optimiser.clip='a' must be a number > 0",
        "training.steps=True must be an integer ≥ 1",
        "training.precision='float16' is none of float32, bfloat16",
        "training.seed=None must be an integer ≥ 0",
        "evaluation.best='blue' is none of loss, bleu (did you mean 'bleu'?)",
        "logging=[] must be a section of keys and values",
    ):
        assert any(line.startswith(f"  - {wanted}") for line in lines), wanted


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({}, "task: say what is trained, one of translation"),
        ({"task": "translate"}, "task='translate' is none of .* (did you mean 'translation'?)"),
        ({"task": "lm", "training": {"epochs": None}}, "give steps, epochs or minutes"),
        (
            {"task": "translation", "evaluation": {"best": "bleu", "decode": 0}},
            "evaluation.best='bleu' needs evaluation.decode > 0",
        ),
        (
            {"task": "translation", "data": {"preset": "bible-en-es"}},
            "data.preset='bible-en-es' is none of bible-es-en",
        ),
        (
            {"task": "translation", "data": {"preset": "bible-es-en", "train": "a.tsv"}},
            "data.preset stands in the place of data.train",
        ),
    ],
)
def test_what_does_not_go_together(tree, message):
    with pytest.raises(OptionError) as caught:
        Recipe.load(tree)
    assert re.search(
        message.replace("(", r"\(").replace("?", r"\?").replace(")", r"\)"), str(caught.value)
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task: lm\nmodel:\n  a: 8\n  a: 9\n", "line 4, column 3: key 'a' is given twice"),
        ("task: lm\nmodel: [\n", "line 3, column 1: "),
        ("- lm\n", "expected keys and values, found list"),
        ("", "expected keys and values, found NoneType"),
    ],
)
def test_files_that_are_no_recipe(text, message, tmp_path):
    path = tmp_path / "wrong.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(OptionError) as caught:
        Recipe.load(path)
    assert str(path) in str(caught.value) and message in str(caught.value)


def test_a_recipe_that_is_not_there():
    with pytest.raises(OptionError, match="none of the recipes.*did you mean 'translation-tiny'"):
        Recipe.load("translation-tini")


def test_overrides_are_yaml_by_dotted_keys():
    settings = dict(map(read_setting, [
        "optimiser.rate=1e-3", "optimiser.betas=[0.8, 0.9]", "training.epochs=null",
        "training.minutes=2", "model.mechanism=near_far(window=8, sinks=2, far=performer)",
        "model.front_end.mels=40",
    ]))  # fmt: skip
    recipe = Recipe.load("translation-tiny", settings)
    assert recipe.optimiser.rate == 1e-3, "YAML 1.1 reads 1e-3 as a text"
    assert recipe.optimiser.betas == (0.8, 0.9)
    assert recipe.training.epochs is None and recipe.training.minutes == 2.0
    assert recipe.model["mechanism"] == "near_far(window=8, sinks=2, far=performer)"
    assert recipe.model["front_end"] == {"mels": 40}
    for text in ("optimiser.rate", "=3", "a=[1"):
        with pytest.raises(OptionError, match="--set"):
            read_setting(text)
    with pytest.raises(OptionError, match="task.name: task is no section with keys"):
        Recipe.load("translation-tiny", {"task.name": 1})


def test_differences_leave_out_what_may_change():
    one = Recipe.load("translation-tiny")
    other = Recipe.load(
        "translation-tiny",
        {"training.minutes": 3, "logging.every": 7, "decoding.beams": 2, "model.dropout": 0.5},
    )
    assert one.differences(other) == ["model.dropout: 0.3 there, 0.5 now"]
