"""The one option grammar, used by the API, the CLI and configuration files.

::

    spec   :=  name                                 softmax
            |  name "(" [item {"," item}] ")"       performer(features=256, draw=iid)
            |  name ":" item {"," item}             performer:features=256,draw=iid
    item   :=  part | pair                          parts stand before pairs
    part   :=  name ["(" ... ")"] ["*" count]       local(window=8)*2
    pair   :=  name "=" value
    value  :=  integer | float | true | false | none | "text" | 'text' | list | spec
    list   :=  "[" [value {"," value}] "]"

A value that is a bare name stays text (``draw=iid``); one with parentheses is a nested
spec (``far=performer(features=128)``). Positional parts are specs, with a count if need be:
``mixed(local(window=8)*2, performer)``; a mechanism whose `Config` names a `positional`
option takes them. `format_spec` is the inverse of `parse_spec`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, TypeVar

from subquad.errors import OptionError, UnknownNameError, nearest

__all__ = ["Config", "Part", "Spec", "format_spec", "format_value", "parse_spec"]


@dataclasses.dataclass(frozen=True)
class Spec:
    """A mechanism's name with its options, before any of them is validated.

    Args:
        name: of the mechanism.
        options: values by name.
        parts: positional items.
    """

    name: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    parts: tuple[Part, ...] = ()

    def __hash__(self) -> int:
        # options are a dict, which has no hash of its own and no order when compared
        return hash((self.name, frozenset(self.options.items()), self.parts))

    def __str__(self) -> str:
        return format_spec(self)


@dataclasses.dataclass(frozen=True)
class Part:
    """A positional item of a spec.

    Args:
        spec: what it is.
        count: the number behind its star; None without one.
    """

    spec: Spec
    count: int | None = None

    def __str__(self) -> str:
        return format_spec(self.spec) + ("" if self.count is None else f"*{self.count}")


_TOKEN = re.compile(
    r"""\s*(?:
      (?P<number>[+-]?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)(?![\w.]))
    | (?P<name>[A-Za-z_][\w.-]*)
    | (?P<text>"[^"]*"|'[^']*')
    | (?P<mark>[()\[\],=:*])
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
            "expected: name, name(key=value, ...) or name:key=value,...; of several mechanisms "
            "name(part, part*count, ...)"
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

    def items(self, name: str, closing: str | None) -> Spec:
        """The spec of this name with the items that follow, up to `closing` or the end."""
        options: dict[str, Any] = {}
        parts: list[Part] = []
        while self.peek()[1] != (closing or ""):
            position = self.peek()[2]
            word = self.take("name")
            if self.peek()[1] != "=":
                if options:
                    raise self.error(
                        f"expected '=': the positional {word!r} comes after an option", position
                    )
                parts.append(self.part(word))
            else:
                key = word.replace("-", "_")
                if key in options:
                    raise self.error(f"option {key!r} is given twice", position)
                self.take("mark", "=")
                options[key] = self.value()
            if self.peek()[1] == ",":
                self.index += 1
            elif self.peek()[1] != (closing or ""):
                raise self.error("expected ','", self.peek()[2])
        return Spec(name, options, tuple(parts))

    def part(self, name: str) -> Part:
        spec = self.arguments(name) if self.peek()[1] == "(" else Spec(name)
        if self.peek()[1] != "*":
            return Part(spec)
        self.index += 1
        _, text, position = self.peek()
        if not text.isdecimal() or int(text) < 1:
            found = f", found {text!r}" if text else ""
            raise self.error(f"expected a count ≥ 1{found}", position)
        self.index += 1
        return Part(spec, int(text))

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
        spec = self.items(name, ")")
        self.take("mark", ")")
        return spec

    def spec(self) -> Spec:
        name = self.take("name")
        if self.peek()[1] == "(":
            result = self.arguments(name)
        elif self.peek()[1] == ":":
            self.index += 1
            result = self.items(name, None)
        else:
            result = Spec(name)
        if self.peek()[0] != "end":
            raise self.error("expected the end", self.peek()[2])
        return result


def parse_spec(text: str) -> Spec:
    """Reads one spec of the option grammar.

    >>> parse_spec("performer(features=256, draw=iid)")
    Spec(name='performer', options={'features': 256, 'draw': 'iid'}, parts=())
    >>> str(parse_spec("near_far:window=32,far=performer(features=128)"))
    'near_far(window=32, far=performer(features=128))'
    >>> [str(part) for part in parse_spec("mixed(local(window=8)*2, performer)").parts]
    ['local(window=8)*2', 'performer']

    Raises:
        OptionError: if the text does not follow the grammar; shows the position.
    """
    return _Parser(text).spec()


def format_value(value: Any) -> str:
    """Writes one option value in the option grammar."""
    if isinstance(value, Config):
        value = value.spec()
    if isinstance(value, Spec):  # with parentheses: a bare name would be read as text
        return format_spec(value) if value.options or value.parts else f"{value.name}()"
    if isinstance(value, Part):
        return str(value)
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
    items = [str(part) for part in spec.parts]
    items += [f"{key}={format_value(value)}" for key, value in spec.options.items()]
    return f"{spec.name}({', '.join(items)})" if items else spec.name


_C = TypeVar("_C", bound="Config")


@dataclasses.dataclass(frozen=True)
class Config:
    """Base of all option sets: a frozen dataclass that reports every problem at once.

    Subclasses set `mechanism`, declare their options as fields with defaults and yield one
    sentence for each invalid value from `problems`. One that takes a spec's positional parts
    names the option which receives them, a tuple of `Part`, in `positional`. `sizes` names the
    options that trade cost for error, numbers or mechanisms with sizes of their own.
    """

    mechanism: ClassVar[str] = ""
    positional: ClassVar[str | None] = None
    sizes: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        self._raise(list(self.problems()))

    def problems(self) -> Iterator[str]:
        """Yields one sentence for each option whose value cannot be used."""
        yield from ()

    @classmethod
    def _raise(cls, problems: list[str]) -> None:
        if problems:
            raise OptionError(f"{cls.mechanism}: " + "; ".join(problems))

    def for_use(self, use: str) -> Config:
        """The config with options that were left open filled in for a use; itself by default.

        Args:
            use: ``"encoder"`` (bidirectional self-attention), ``"causal"`` (a decoder's
                self-attention) or ``"cross"``.
        """
        return self

    def for_length(self, length: int) -> Config:
        """The config with sizes that a bidirectional call takes by its length written out.

        Args:
            length: open keys of a row.
        """
        return self

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
        options = {name: cls._named(name, value) for name, value in options.items()}
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

    @classmethod
    def from_spec(cls: type[_C], spec: Spec, options: Mapping[str, Any] | None = None) -> _C:
        """Builds the config from a spec, and further options as keywords.

        Raises:
            UnknownNameError: as in `from_options`.
            OptionError: if a value cannot be used or is given twice, or for positional parts
                where there is no option to receive them.
        """
        values, more = dict(spec.options), dict(options or {})
        if spec.parts:
            shown = ", ".join(map(str, spec.parts))
            if cls.positional is None:
                known = ", ".join(cls.option_names()) or "none"
                raise OptionError(
                    f"{cls.mechanism}: takes no positional parts, given {shown}; options are "
                    f"written name=value and are: {known}"
                )
            if cls.positional in values:
                raise OptionError(
                    f"{cls.mechanism}: {cls.positional} is given twice: as positional parts "
                    f"{shown} and by name"
                )
            values[cls.positional] = spec.parts
        twice = sorted(set(values) & set(more))
        if twice:
            raise OptionError(f"options {twice} are given twice: in {str(spec)!r} and as keywords")
        return cls.from_options({**values, **more})

    def spec(self) -> Spec:
        """The spec that gives this config: options that differ from their defaults."""
        changed = self.changed()
        parts = changed.pop(self.positional, ()) if self.positional else ()
        return Spec(self.mechanism, changed, parts)

    @classmethod
    def _named(cls, name: str, value: Any) -> Any:
        # ``gauge=none`` reads as None; where the option is a choice among names, it is one.
        kinds = {field.name: field.type for field in dataclasses.fields(cls)}
        return "none" if value is None and kinds.get(name) == "str" else value

    def changed(self) -> dict[str, Any]:
        """Options that differ from their defaults."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }

    def __str__(self) -> str:
        return format_spec(self.spec())


def choice_problem(name: str, value: object, choices: tuple[str, ...]) -> Iterator[str]:
    """Yields a problem when `value` is none of the named choices."""
    if value not in choices:
        hint = nearest(value, choices) if isinstance(value, str) else ""
        yield f"{name}={value!r} is none of {', '.join(choices)}{hint}"


def flag_problem(name: str, value: object) -> Iterator[str]:
    """Yields a problem when `value` is not a bool."""
    if not isinstance(value, bool):
        yield f"{name}={value!r} must be true or false"


def idle_problem(
    config: Config, name: str, chosen: Iterable[str], readers: Mapping[str, tuple[str, ...]]
) -> Iterator[str]:
    """Yields a problem for each changed option that nothing chosen reads: it would do nothing.

    Args:
        config: whose options are looked at.
        name: of the option that chooses, such as "kind".
        chosen: its values.
        readers: the values of `name` with which an option is read.
    """
    chosen = list(map(str, chosen))
    for option, value in config.changed().items():
        if option in readers and not set(chosen) & set(readers[option]):
            yield (
                f"{option}={format_value(value)} needs {name}={' or '.join(readers[option])}, "
                f"given {', '.join(chosen)}"
            )


def integer_problem(name: str, value: object, minimum: int) -> Iterator[str]:
    """Yields a problem when `value` is no integer ≥ `minimum`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        yield f"{name}={value!r} must be an integer ≥ {minimum}"


def number_problem(
    name: str,
    value: object,
    low: float,
    high: float = float("inf"),
    *,
    open_low: bool = False,
    finite: bool = True,
) -> Iterator[str]:
    """Yields a problem when `value` is no number in [low, high], or (low, high], or infinite."""
    infinite = float("inf")
    wrong = not isinstance(value, int | float) or isinstance(value, bool) or value != value
    endless = finite and not wrong and value in (infinite, -infinite)
    if wrong or endless or value < low or value > high or (open_low and value == low):  # type: ignore[operator]  # `wrong` short-cuts
        bounds = []
        if low != -infinite:
            bounds.append(f"> {low:g}" if open_low else f"≥ {low:g}")
        if high != infinite:
            bounds.append(f"≤ {high:g}")
        within = f" {' and '.join(bounds)}" if bounds else ""
        yield f"{name}={value!r} must be a {'finite ' if endless else ''}number{within}"
