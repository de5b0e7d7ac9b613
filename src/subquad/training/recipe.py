"""Recipes: one YAML file that says what is trained, on what, and how.

A recipe has a section for each part of a run. What a file leaves out has the default that is
written here; what it says wrongly is reported with everything else that is wrong in it, before
anything runs. The sections ``model`` and ``objective`` hold the arguments of the task's model
configuration and of its objective, by their own names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.resources
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from subquad.errors import OptionError, nearest
from subquad.options import choice_problem, integer_problem, number_problem

__all__ = [
    "Data",
    "Decoding",
    "Evaluation",
    "Logging",
    "Optimiser",
    "Recipe",
    "TokenizerOptions",
    "Training",
    "read_setting",
    "shipped_recipes",
]

SCHEDULES = ("inverse_sqrt", "cosine", "linear", "constant")
LONG = ("drop", "truncate", "raise")
PRECISIONS = ("float32", "bfloat16")
BAD_LINES = ("skip", "raise")
AVERAGES = ("last", "best")


def key(default: Any, text: str, **checks: Any) -> Any:
    """A key of a recipe: its default, what it means, and limits on its value.

    Args:
        default: of the key.
        text: one sentence.
        checks: ``low``, ``high``, ``open_low`` of a number, ``choices`` of a text; ``free=True``
            where a run may be continued with another value.
    """
    return field(default=default, metadata={"help": text, **checks})


@dataclass(frozen=True)
class Data:
    """Where the examples come from."""

    train: Any = key(None, "a file (.tsv, .jsonl, .txt), or [source file, target file]")
    valid: Any = key(None, "likewise; null holds out a part of `train`")
    preset: str | None = key(None, "a corpus inside the package, in place of `train` and `valid`")
    held_out: int = key(1000, "examples held out where `valid` is null; at most a tenth", low=1)
    source: str | int = key("source", "its JSON key, its column's number (from 1) or name")
    target: str | int = key("target", "likewise; .tsv without either: columns 1 and 2")
    header: bool = key(False, "the first line of a .tsv names its columns")
    on_bad: str = key("skip", "bad lines: skip and report them, or raise", choices=BAD_LINES)
    max_length: int = key(256, "most tokens of a text", low=2)
    max_target: int | None = key(None, "most tokens of a target; null: max_length", low=2)
    on_long: str = key("drop", "longer texts in training: drop, truncate, raise", choices=LONG)


@dataclass(frozen=True)
class TokenizerOptions:
    """How texts become tokens."""

    path: str | None = key(None, "a folder with a tokenizer to use; null trains one")
    kind: str = key("bpe", "bpe, unigram, word or char", choices=("bpe", "unigram", "word", "char"))
    vocab_size: int = key(8000, "tokens at most, special ones included", low=6)
    lowercase: bool = key(False, "texts are lower-cased first")


@dataclass(frozen=True)
class Optimiser:
    """AdamW, and its learning rate over time."""

    rate: float = key(1e-3, "learning rate at its peak", low=0.0, open_low=True)
    schedule: str = key(
        "inverse_sqrt", f"after the warm-up: {', '.join(SCHEDULES)}", choices=SCHEDULES
    )
    warm_up: int = key(2000, "steps in which the rate rises from 0", low=0)
    betas: tuple[float, float] = key((0.9, 0.98), "decay of Adam's two averages", low=0.0, high=1.0)
    eps: float = key(1e-9, "of Adam", low=0.0, open_low=True)
    weight_decay: float = key(0.0, "decoupled, as in AdamW; not of biases and norms", low=0.0)
    clip: float | None = key(
        1.0, "largest norm of all gradients; null: no limit", low=0.0, open_low=True
    )


@dataclass(frozen=True)
class Training:
    """How long, how much at once, and in which numbers."""

    steps: int | None = key(None, "optimiser steps at most", low=1)
    epochs: int | None = key(30, "passes over the data at most", low=1)
    minutes: float | None = key(
        None, "of wall-clock time at most", low=0.0, open_low=True, free=True
    )
    tokens: int = key(4096, "tokens of a batch, padding included, of its larger side", low=8)
    checkpoint_minutes: float = key(
        10.0, "between checkpoints at most; each evaluation makes one", low=0.0, free=True
    )
    accumulate: int = key(1, "batches whose gradients make a step", low=1)
    precision: str = key(
        "float32", "or bfloat16: of the arithmetic; weights stay float32", choices=PRECISIONS
    )
    seed: int = key(0, "of everything that is random", low=0)
    start: str | None = key(None, "a folder with a model to start from, whatever its attention")
    threads: int | None = key(None, "of the CPU; null: torch's choice", low=1)
    device: str = key("auto", "cpu, cuda, mps; auto: an accelerator where there is one")


@dataclass(frozen=True)
class Evaluation:
    """What is measured on the validation examples, and what follows from it."""

    every: int | None = key(None, "steps between evaluations and checkpoints; null: epochs", low=1)
    best: str = key("loss", "the metric by which the best checkpoint is chosen")
    patience: int | None = key(None, "evaluations without a better one that end the run", low=1)
    average: int = key(1, "checkpoints whose mean is tried at the end; 1: none", low=1)
    average_of: str = key("last", "the last of them, or the best", choices=AVERAGES)
    decode: int = key(500, "validation examples that are decoded for BLEU; 0: none", low=0)
    beams: int = key(1, "with which they are decoded", low=1)


@dataclass(frozen=True)
class Decoding:
    """Defaults of decoding with the trained model."""

    beams: int = key(5, "beam width; 1: greedy", low=1)
    length_penalty: float = key(1.0, "scores are divided by length to this power")
    max_length: int | tuple[float, float] = key(
        (10.0, 1.5), "most tokens of an output: a number, or [a, b]: a + b · the source's", low=1
    )
    batch_tokens: int = key(4096, "tokens that are decoded at once", low=1)


@dataclass(frozen=True)
class Logging:
    """What is written along the way; log.jsonl always is."""

    every: int = key(50, "steps between lines", low=1, free=True)
    tensorboard: bool = key(False, "event files too (extra: tensorboard)", free=True)


SECTIONS: dict[str, type] = {
    "data": Data,
    "tokenizer": TokenizerOptions,
    "optimiser": Optimiser,
    "training": Training,
    "evaluation": Evaluation,
    "decoding": Decoding,
    "logging": Logging,
}
"""Sections whose keys are written here; `model` and `objective` have those of the task."""


@dataclass(frozen=True)
class Recipe:
    """A whole run, checked.

    Args:
        task: "translation", "lm", ...: see `subquad.training.tasks`.
        model: arguments of the task's model configuration.
        objective: arguments of the task's objective.
        data, tokenizer, optimiser, training, evaluation, decoding, logging: the other sections.

    Example:
        >>> recipe = Recipe.load({"task": "lm", "optimiser": {"rate": 3e-4}})
        >>> recipe.optimiser.rate, recipe.optimiser.warm_up
        (0.0003, 2000)
        >>> Recipe.load({"task": "lm", "optimiser": {"rat": 1, "clip": -1}})
        Traceback (most recent call last):
        subquad.errors.OptionError: recipe: 2 problems
          - optimiser.rat: unknown key (did you mean 'rate'?)
          - optimiser.clip=-1 must be a number > 0
    """

    task: str
    model: Mapping[str, Any] = field(default_factory=dict)
    objective: Mapping[str, Any] = field(default_factory=dict)
    data: Data = field(default_factory=Data)
    tokenizer: TokenizerOptions = field(default_factory=TokenizerOptions)
    optimiser: Optimiser = field(default_factory=Optimiser)
    training: Training = field(default_factory=Training)
    evaluation: Evaluation = field(default_factory=Evaluation)
    decoding: Decoding = field(default_factory=Decoding)
    logging: Logging = field(default_factory=Logging)

    @classmethod
    def load(
        cls,
        source: str | Path | Mapping[str, Any],
        overrides: Mapping[str, Any] | None = None,
    ) -> Recipe:
        """Reads and checks a recipe.

        Args:
            source: a YAML file, the name of a recipe inside the package, or nested mappings.
            overrides: values by dotted keys, such as ``{"optimiser.rate": 1e-3}``.

        Raises:
            OptionError: no such recipe, no YAML; or naming everything that is wrong with it.
            ImportError: a package of the extra ``train`` is missing.
        """
        name, tree = _tree(source)
        problems: list[str] = []
        for dotted, value in (overrides or {}).items():
            problems += _put(tree, dotted, value)
        values, found = _sections(tree)
        problems += found
        task = tree.get("task")
        problems += _task_problems(task, values)
        if not problems:
            from subquad.training.tasks import task_of

            kind = task_of(str(task))
            for section in ("model", "objective"):
                defaults = getattr(kind, f"{section}_options")()
                values[section] = {**defaults, **values.get(section, {})}
            recipe = cls(str(task), **values)
            problems += kind.problems(recipe)
        if problems:
            count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
            raise OptionError(f"{name}: {count}" + "".join(f"\n  - {one}" for one in problems))
        return recipe

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, for YAML and JSON."""
        plain: dict[str, Any] = _plain(dataclasses.asdict(self))
        return plain

    def to_yaml(self) -> str:
        """The recipe with every key, as `load` reads it."""
        return str(_yaml().safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True))

    def differences(self, other: Recipe) -> list[str]:
        """Keys whose values differ, those left out with which a run may be continued anyway."""
        mine, theirs = dict(_flat(self.to_dict())), dict(_flat(other.to_dict()))
        return [
            f"{name}: {mine.get(name)!r} there, {theirs.get(name)!r} now"
            for name in dict.fromkeys([*mine, *theirs])
            if mine.get(name) != theirs.get(name) and not _free(name)
        ]


# ---- reading -----------------------------------------------------------------------------


def _yaml() -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ImportError("recipes need pip install 'subquad[train]'") from error
    return yaml


def shipped_recipes() -> list[str]:
    """Names of the recipes inside the package."""
    folder = importlib.resources.files("subquad") / "recipes"
    return sorted(one.name[:-5] for one in folder.iterdir() if one.name.endswith(".yaml"))


def _shipped(name: str) -> str:
    place = importlib.resources.files("subquad") / "recipes" / f"{name}.yaml"
    return place.read_text(encoding="utf-8")


def _tree(source: str | Path | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """(name for messages, nested dicts that may be changed)."""
    if isinstance(source, Mapping):
        return "recipe", _copy(source)
    path, name = Path(source), str(source)
    if name in shipped_recipes() and not path.is_file():
        text = _shipped(name)
    elif path.is_file():
        text = path.read_text(encoding="utf-8")
    else:
        known = shipped_recipes()
        raise OptionError(
            f"recipe {name!r}: no such file, and none of the recipes of the package: "
            f"{', '.join(known)}{nearest(name, known)}"
        )
    return name, parse(text, name)


def parse(text: str, name: str) -> dict[str, Any]:
    """YAML whose top is a mapping; a key that is given twice is an error.

    Raises:
        OptionError: with the line and column.
    """
    yaml = _yaml()

    class Loader(yaml.SafeLoader):  # type: ignore[misc,name-defined]  # untyped
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen = set()
            for one, _ in node.value:
                if not isinstance(one, yaml.ScalarNode):
                    continue  # which no key of ours is
                if one.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {one.value!r} is given twice", one.start_mark
                    )
                seen.add(one.value)
            return super().construct_mapping(node, deep)

    try:
        tree = yaml.load(text, Loader)  # a safe loader, see above
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise OptionError(f"{name}{where}: {error.problem}") from None
    except yaml.YAMLError as error:
        raise OptionError(f"{name}: {error}") from None
    if not isinstance(tree, dict):
        raise OptionError(f"{name}: expected keys and values, found {type(tree).__name__}")
    return tree


def read_setting(text: str) -> tuple[str, Any]:
    """``"optimiser.rate=1e-3"`` as a dotted key and a value, which is read as YAML.

    >>> read_setting("model.mechanism=near_far(window=32)")
    ('model.mechanism', 'near_far(window=32)')

    Raises:
        OptionError: without an equals sign, or where the value is no YAML.
    """
    dotted, sign, value = text.partition("=")
    if not sign or not dotted.strip():
        raise OptionError(f"--set {text!r}: expected key=value, such as optimiser.rate=1e-3")
    yaml = _yaml()
    try:
        return dotted.strip(), yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise OptionError(f"--set {text!r}: the value is no YAML: {error}") from None


def _put(tree: dict[str, Any], dotted: str, value: Any) -> Iterator[str]:
    *above, last = dotted.split(".")
    place: Any = tree
    for name in above:
        if place.get(name) is None:
            place[name] = {}
        place = place[name]
        if not isinstance(place, dict):
            yield f"{dotted}: {name} is no section with keys"
            return
    place[last] = value


def _sections(tree: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Checked sections, and what is wrong with them."""
    values: dict[str, Any] = {}
    problems: list[str] = []
    names = [one.name for one in dataclasses.fields(Recipe)]
    for name, given in tree.items():
        if name not in names:
            problems.append(f"{name}: unknown key{nearest(str(name), names)}")
        elif name != "task" and given is not None and not isinstance(given, Mapping):
            problems.append(f"{name}={given!r} must be a section of keys and values")
        elif name in SECTIONS:
            values[name], found = _section(SECTIONS[name], name, given or {})
            problems += found
        elif name != "task":
            values[name] = dict(given or {})
    return values, problems


def _section(kind: type, name: str, given: Mapping[str, Any]) -> tuple[Any, list[str]]:
    hints = typing.get_type_hints(kind)
    known = {one.name: one for one in dataclasses.fields(kind)}
    values, problems = {}, []
    for one, value in given.items():
        dotted = f"{name}.{one}"
        if one not in known:
            problems.append(f"{dotted}: unknown key{nearest(str(one), known)}")
            continue
        values[one], found = _value(hints[one], known[one].metadata, dotted, value)
        problems += found
    return (kind(**values) if not problems else None), problems


def _value(hint: Any, checks: Mapping[str, Any], name: str, value: Any) -> tuple[Any, list[str]]:
    """The value as its type, and what is wrong with it."""
    if hint is Any:
        return value, []
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in kinds:
        return None, []
    if isinstance(value, str) and float in kinds:
        with contextlib.suppress(ValueError):
            value = float(value)  # YAML 1.1 takes 1e-3, without a point, for a text
    limits = {one: checks[one] for one in ("low", "high", "open_low") if one in checks}
    problems: list[str] = []
    several = next((kind for kind in kinds if typing.get_origin(kind) is tuple), None)
    if several is not None and (isinstance(value, list | tuple) or int not in kinds):
        size = len(typing.get_args(several))
        if not isinstance(value, list | tuple) or len(value) != size:
            return value, [f"{name}={value!r} must be {size} numbers in brackets"]
        if int in kinds:
            limits = {"low": 0.0}  # the limit is that of the one number
        for index, one in enumerate(value):
            problems += number_problem(f"{name}[{index}]", one, **limits)
        return tuple(value), problems
    if bool in kinds:
        if not isinstance(value, bool):
            problems.append(f"{name}={value!r} must be true or false")
    elif str in kinds:
        if "choices" in checks:
            problems += choice_problem(name, value, checks["choices"])
        elif not isinstance(value, kinds) or isinstance(value, bool):
            problems.append(f"{name}={value!r} must be a text" + " or a number" * (int in kinds))
    elif float in kinds:
        problems += number_problem(name, value, **{"low": float("-inf"), **limits})
        value = float(value) if not problems else value
    else:
        problems += integer_problem(name, value, checks["low"])
    return value, problems


def _task_problems(task: Any, values: Mapping[str, Any]) -> Iterator[str]:
    """What the task has to say about its name, its model, its objective and their sections."""
    from subquad.data.tokens import LEAST
    from subquad.training.tasks import TASKS, task_of

    if task is None:
        yield f"task: say what is trained, one of {', '.join(TASKS)}"
        return
    if task not in TASKS:
        yield f"task={task!r} is none of {', '.join(TASKS)}{nearest(str(task), TASKS)}"
        return
    kind = task_of(str(task))
    for section, options, check in (
        ("model", kind.model_options(), kind.model_problems),
        ("objective", kind.objective_options(), kind.objective_problems),
    ):
        given = values.get(section, {})
        unknown = [one for one in given if one not in options]
        yield from (
            f"{section}.{one}: unknown key for {task}{nearest(str(one), options)}"
            for one in unknown
        )
        yield from check({one: v for one, v in given.items() if one not in unknown})
    evaluation = values.get("evaluation") or Evaluation()
    yield from choice_problem("evaluation.best", evaluation.best, tuple(kind.metrics))
    training = values.get("training") or Training()
    if training.steps is None and training.epochs is None and training.minutes is None:
        yield "training: give steps, epochs or minutes: none of them says how long to train"
    data = values.get("data") or Data()
    for name, given in (("train", data.train), ("valid", data.valid)):
        files = given if isinstance(given, list | tuple) else [given]
        if given is not None and not all(isinstance(one, str | Path) for one in files):
            yield f"data.{name}={given!r} must be a file, or [source file, target file]"
    tokenizer = values.get("tokenizer") or TokenizerOptions()
    if tokenizer.path is None and tokenizer.vocab_size < LEAST[tokenizer.kind]:
        size, least = tokenizer.vocab_size, LEAST[tokenizer.kind]
        yield f"tokenizer.vocab_size={size} must be ≥ {least} with kind={tokenizer.kind}"


# ---- plain values ------------------------------------------------------------------------


def _copy(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _copy(value) if isinstance(value, Mapping) else value for name, value in tree.items()
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, Path) else value


def _flat(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and name in (*SECTIONS, "model", "objective"):
            yield from ((f"{name}.{one}", inner) for one, inner in value.items())
        else:
            yield name, value


def _free(dotted: str) -> bool:
    section, _, name = dotted.partition(".")
    if section == "decoding":
        return True
    fields = dataclasses.fields(SECTIONS[section]) if section in SECTIONS else ()
    return any(one.metadata.get("free", False) for one in fields if one.name == name)
