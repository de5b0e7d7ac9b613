"""The one option grammar, used by the API, the CLI and configuration files.

::

    spec   :=  name                                 softmax
            |  name "(" [pair {"," pair}] ")"       performer(features=256, draw=iid)
            |  name ":" pair {"," pair}             performer:features=256,draw=iid
    pair   :=  name "=" value
    value  :=  integer | float | true | false | none | "text" | 'text' | list | spec
    list   :=  "[" [value {"," value}] "]"

A value that is a bare name stays text (``draw=iid``); one with parentheses is a nested
spec (``far=performer(features=128)``). `format_spec` is the inverse of `parse_spec`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, TypeVar

from subquad.errors import OptionError, UnknownNameError, nearest

__all__ = ["Config", "Spec", "format_spec", "format_value", "parse_spec"]


@dataclasses.dataclass(frozen=True)
class Spec:
    """A mechanism's name with its options, before any of them is validated."""

    name: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return format_spec(self)


_TOKEN = re.compile(
    r"""\s*(?:
      (?P<number>[+-]?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)(?![\w.]))
    | (?P<name>[A-Za-z_][\w.-]*)
    | (?P<text>"[^"]*"|'[^']*')
    | (?P<mark>[()\[\],=:])
    )""",
    re.VERBOSE,
)
_WORDS = {"true": True, "false": False, "none": None}


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[tuple[str, str, int]] = []
        position = 0
        stripped = text.rstrip()
        while position < len(stripped):
            match = _TOKEN.match(text, position)
            if match is None:
                raise self.error("unexpected character", position)
            kind = str(match.lastgroup)
            self.tokens.append((kind, match.group(kind), match.start(kind)))
            position = match.end()
        self.index = 0

    def error(self, problem: str, position: int) -> OptionError:
        return OptionError(
            f"cannot read options: {problem} at position {position}\n"
            f"    {self.text}\n    {' ' * position}^\n"
            "expected: name, name(key=value, ...) or name:key=value,..."
        )

    def peek(self) -> tuple[str, str, int]:
        if self.index < len(self.tokens):
            return self.tokens[self.index]
        return "end", "", len(self.text)

    def take(self, kind: str, value: str | None = None) -> str:
        found, text, position = self.peek()
        if found != kind or (value is not None and text != value):
            wanted = repr(value) if value else f"a {kind}"
            raise self.error(
                f"expected {wanted}, found {text!r}" if text else f"expected {wanted}", position
            )
        self.index += 1
        return text

    def pairs(self, closing: str | None) -> dict[str, Any]:
        options: dict[str, Any] = {}
        while self.peek()[1] != (closing or ""):
            position = self.peek()[2]
            key = self.take("name").replace("-", "_")
            if key in options:
                raise self.error(f"option {key!r} is given twice", position)
            self.take("mark", "=")
            options[key] = self.value()
            if self.peek()[1] == ",":
                self.index += 1
            elif self.peek()[1] != (closing or ""):
                raise self.error("expected ','", self.peek()[2])
        return options

    def value(self) -> Any:
        kind, text, position = self.peek()
        if kind == "number":
            self.index += 1
            return float(text) if re.search(r"[.eE]", text) else int(text)
        if kind == "text":
            self.index += 1
            return text[1:-1]
        if text == "[":
            self.index += 1
            items = []
            while self.peek()[1] != "]":
                items.append(self.value())
                if self.peek()[1] != "]":
                    self.take("mark", ",")
            self.index += 1
            return tuple(items)
        if kind != "name":
            raise self.error("expected a value", position)
        self.index += 1
        if self.peek()[1] == "(":
            return self.arguments(text)
        return _WORDS.get(text.lower(), text)

    def arguments(self, name: str) -> Spec:
        self.take("mark", "(")
        options = self.pairs(")")
        self.take("mark", ")")
        return Spec(name, options)

    def spec(self) -> Spec:
        name = self.take("name")
        if self.peek()[1] == "(":
            result = self.arguments(name)
        elif self.peek()[1] == ":":
            self.index += 1
            result = Spec(name, self.pairs(None))
        else:
            result = Spec(name)
        if self.peek()[0] != "end":
            raise self.error("expected the end", self.peek()[2])
        return result


def parse_spec(text: str) -> Spec:
    """Reads one spec of the option grammar.

    >>> parse_spec("performer(features=256, draw=iid)")
    Spec(name='performer', options={'features': 256, 'draw': 'iid'})
    >>> str(parse_spec("near_far:window=32,far=performer(features=128)"))
    'near_far(window=32, far=performer(features=128))'

    Raises:
        OptionError: if the text does not follow the grammar; shows the position.
    """
    return _Parser(text).spec()


def format_value(value: Any) -> str:
    """Writes one option value in the option grammar."""
    if isinstance(value, Config):
        value = Spec(value.mechanism, value.changed())
    if isinstance(value, Spec):  # with parentheses: a bare name would be read as text
        return format_spec(value) if value.options else f"{value.name}()"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return "[" + ", ".join(format_value(item) for item in value) + "]"
    if isinstance(value, str):
        bare = re.fullmatch(r"[A-Za-z_][\w.-]*", value) and value.lower() not in _WORDS
        if bare:
            return value
        if '"' in value and "'" in value:
            raise OptionError(f"text with both kinds of quotes cannot be written: {value!r}")
        return f"'{value}'" if '"' in value else f'"{value}"'
    return str(value)


def format_spec(spec: Spec) -> str:
    """Writes a spec in the option grammar; a name without options is written bare."""
    if not spec.options:
        return spec.name
    pairs = ", ".join(f"{key}={format_value(value)}" for key, value in spec.options.items())
    return f"{spec.name}({pairs})"


_C = TypeVar("_C", bound="Config")


@dataclasses.dataclass(frozen=True)
class Config:
    """Base of all option sets: a frozen dataclass that reports every problem at once.

    Subclasses set `mechanism`, declare their options as fields with defaults and yield one
    sentence for each invalid value from `problems`.
    """

    mechanism: ClassVar[str] = ""

    def __post_init__(self) -> None:
        self._raise(list(self.problems()))

    def problems(self) -> Iterator[str]:
        """Yields one sentence for each option whose value cannot be used."""
        yield from ()

    @classmethod
    def _raise(cls, problems: list[str]) -> None:
        if problems:
            raise OptionError(f"{cls.mechanism}: " + "; ".join(problems))

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """Names of all options, in the order of their declaration."""
        return tuple(field.name for field in dataclasses.fields(cls))

    @classmethod
    def from_options(cls: type[_C], options: Mapping[str, Any]) -> _C:
        """Builds the config; unknown names and wrong values are reported together.

        Raises:
            UnknownNameError: if an option does not exist (the nearest one is suggested).
            OptionError: if a value cannot be used.
        """
        known = cls.option_names()
        unknown = [name for name in options if name not in known]
        if not unknown:
            return cls(**options)
        problems = [f"unknown option {name!r}{nearest(name, known)}" for name in unknown]
        try:
            cls(**{name: value for name, value in options.items() if name in known})
        except OptionError as error:
            problems.append(str(error).removeprefix(f"{cls.mechanism}: "))
        problems.append(f"options are: {', '.join(known) or 'none'}")
        raise UnknownNameError(f"{cls.mechanism}: " + "; ".join(problems))

    def changed(self) -> dict[str, Any]:
        """Options that differ from their defaults."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }

    def __str__(self) -> str:
        return format_spec(Spec(self.mechanism, self.changed()))


def choice_problem(name: str, value: object, choices: tuple[str, ...]) -> Iterator[str]:
    """Yields a problem when `value` is none of the named choices."""
    if value not in choices:
        hint = nearest(value, choices) if isinstance(value, str) else ""
        yield f"{name}={value!r} is none of {', '.join(choices)}{hint}"


def flag_problem(name: str, value: object) -> Iterator[str]:
    """Yields a problem when `value` is not a bool."""
    if not isinstance(value, bool):
        yield f"{name}={value!r} must be true or false"


def integer_problem(name: str, value: object, minimum: int) -> Iterator[str]:
    """Yields a problem when `value` is no integer ≥ `minimum`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        yield f"{name}={value!r} must be an integer ≥ {minimum}"


def number_problem(
    name: str, value: object, low: float, high: float = float("inf"), *, open_low: bool = False
) -> Iterator[str]:
    """Yields a problem when `value` is no number in [low, high], or (low, high]."""
    wrong = not isinstance(value, int | float) or isinstance(value, bool) or value != value
    if wrong or value < low or value > high or (open_low and value == low):  # type: ignore[operator]  # `wrong` short-cuts
        bound = f"> {low:g}" if open_low else f"≥ {low:g}"
        yield f"{name}={value!r} must be a number {bound}" + (
            f" and ≤ {high:g}" if high != float("inf") else ""
        )
