"""The option grammar and config objects."""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import subquad as sq
from subquad.options import (
    Config,
    Part,
    Spec,
    choice_problem,
    format_spec,
    integer_problem,
    number_problem,
    parse_spec,
)

# ---- grammar ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("softmax", "softmax", {}),
        ("softmax()", "softmax", {}),
        (
            "  performer ( features = 256 , draw = iid , ) ",
            "performer",
            {"features": 256, "draw": "iid"},
        ),
        ("performer:features=256,draw=iid", "performer", {"features": 256, "draw": "iid"}),
        ("p(a=1,b=-2,c=+3)", "p", {"a": 1, "b": -2, "c": 3}),
        ("p(a=1.0,b=-.5,c=1e-3,d=2.)", "p", {"a": 1.0, "b": -0.5, "c": 1e-3, "d": 2.0}),
        ("p(a=true,b=False,c=none,d=None)", "p", {"a": True, "b": False, "c": None, "d": None}),
        ('p(a="true",b=\'two words\',c="")', "p", {"a": "true", "b": "two words", "c": ""}),
        (
            "p(a=[],b=[1, 2.5, iid],c=[[1],[]])",
            "p",
            {"a": (), "b": (1, 2.5, "iid"), "c": ((1,), ())},
        ),
        ("p(heavy-keys=3)", "p", {"heavy_keys": 3}),
        (
            "near_far(window=32, far=performer(features=128))",
            "near_far",
            {"window": 32, "far": Spec("performer", {"features": 128})},
        ),
        (
            "near_far:far=performer(),near=softmax",
            "near_far",
            {"far": Spec("performer"), "near": "softmax"},
        ),
    ],
)
def test_what_a_spec_means(text, name, options):
    spec = parse_spec(text)
    assert spec == Spec(name, options)
    for key, value in options.items():
        assert type(spec.options[key]) is type(value)  # 1 is neither 1.0 nor True


@pytest.mark.parametrize(
    ("text", "parts", "options"),
    [
        ("mixed(local)", (Part(Spec("local")),), {}),
        ("mixed(local())", (Part(Spec("local")),), {}),
        ("mixed(a*2,b)", (Part(Spec("a"), 2), Part(Spec("b"))), {}),
        ("mixed : a * 2 , b(x=1) *3", (Part(Spec("a"), 2), Part(Spec("b", {"x": 1}), 3)), {}),
        ("mixed(a, x-y=[b, c()])", (Part(Spec("a")),), {"x_y": ("b", Spec("c"))}),
        (
            "mixed(mixed(a*2, b)*3, c)",
            (Part(Spec("mixed", {}, (Part(Spec("a"), 2), Part(Spec("b")))), 3), Part(Spec("c"))),
            {},
        ),
        (
            "far(far=mixed(a*2, x=1), all=[m(a), 3])",
            (),
            {
                "far": Spec("mixed", {"x": 1}, (Part(Spec("a"), 2),)),
                "all": (Spec("m", {}, (Part(Spec("a")),)), 3),
            },
        ),
    ],
)
def test_positional_parts(text, parts, options):
    spec = parse_spec(text)
    assert spec.parts == parts and spec.options == options
    assert same(parse_spec(str(spec)), spec)


names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,7}", fullmatch=True)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
texts = texts.filter(lambda text: not ('"' in text and "'" in text))  # cannot be written
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**12), 10**12),
    st.floats(allow_nan=False, allow_infinity=False),
    names,
    texts,
)


def parts_of(inner):
    return st.lists(st.builds(Part, inner, st.none() | st.integers(1, 99)), max_size=2).map(tuple)


flat = st.builds(Spec, names, st.dictionaries(names, scalars, max_size=2))
parts = parts_of(flat | st.builds(Spec, names, st.just({}), parts_of(flat)))


def specs(values):
    return st.builds(Spec, names, st.dictionaries(names, values, max_size=4), parts)


values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3).map(tuple), specs(inner)),
    max_leaves=6,
)


def same(a, b):
    if isinstance(a, Spec) and isinstance(b, Spec):
        keys = list(a.options) == list(b.options)
        return (
            a.name == b.name
            and keys
            and all(same(a.options[k], b.options[k]) for k in a.options)
            and same(a.parts, b.parts)
        )
    if isinstance(a, Part) and isinstance(b, Part):
        return same(a.spec, b.spec) and same(a.count, b.count)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and a == b


@settings(max_examples=400, deadline=None)
@given(specs(values))
@example(Spec("p", {"a": "true"}))
@example(Spec("p", {"a": "None"}))
@example(Spec("p", {"a": "1e5"}))
@example(Spec("p", {"a": 1e22}))
@example(Spec("p", {"a": 5e-324}))
@example(Spec("p", {"a": Spec("softmax")}))
@example(Spec("p", {"a": (Spec("softmax"), "softmax")}))
@example(Spec("p", {"a": "it's, (a=b) [x]*2"}))
@example(Spec("p", {"a": Spec("m", {}, (Part(Spec("a"), 2), Part(Spec("b"))))}))
@example(Spec("p", {"a": (Spec("m", {"x": ()}, (Part(Spec("true"), 2),)), 1)}))
@example(Spec("p", {"a": 'say "x"'}))
def test_writing_and_reading_give_the_same_spec(spec):
    assert same(parse_spec(format_spec(spec)), spec)


def test_text_that_cannot_be_written_is_refused():
    with pytest.raises(sq.OptionError, match="both kinds of quotes"):
        format_spec(Spec("p", {"a": 'it\'s "x"'}))


@pytest.mark.parametrize(
    ("text", "problem", "position"),
    [
        ("", "expected a name", 0),
        ("(a=1)", r"expected a name, found '\('", 0),
        ("p(a=1", "expected", 5),
        ("p(a=1))", r"expected the end, found '\)'|expected the end", 6),
        ("p(a=1, b)", "expected '=': the positional 'b' comes after an option", 7),
        ("p(a*)", "expected a count ≥ 1, found '\\)'", 4),
        ("p(a*0)", "expected a count ≥ 1, found '0'", 4),
        ("p(a*-2)", "expected a count ≥ 1, found '-2'", 4),
        ("p(a*2.0)", "expected a count ≥ 1, found '2.0'", 4),
        ("p(a*b)", "expected a count ≥ 1, found 'b'", 4),
        ("p(a*2*2)", "expected ','", 5),
        ("p(a(x=1)b)", "expected ','", 8),
        ("p(m(a*), b)", "expected a count", 6),
        ("p(a=b*2)", "expected ','", 5),
        ("p(*2)", "expected a name, found '\\*'", 2),
        ("p*2", "expected the end", 1),
        ("p(a=)", "expected a value", 4),
        ("p(a=1 b=2)", "expected ','", 6),
        ("p(a=1, a=2)", "option 'a' is given twice", 7),
        ("p(a=1; b=2)", "unexpected character", 5),
        ('p(a="open)', "unexpected character", 4),
        ("p(1=2)", "expected a name, found '1'", 2),
        ("p(a=[1 2])", "expected ','", 7),
        ("p(a=[1,", "expected", 7),
        ("p:a*", "expected a count ≥ 1", 4),
        ("p:a:b", "expected ','", 3),
        ("p:a=1,b=2)", "expected", 9),
        ("p q", "expected the end", 2),
        ("p(a=12ab)", "unexpected character", 4),
    ],
)
def test_errors_show_where(text, problem, position):
    with pytest.raises(sq.OptionError, match=problem) as caught:
        parse_spec(text)
    first, shown, pointer, hint = str(caught.value).split("\n")
    assert first.endswith(f"at position {position}")
    assert shown == f"    {text}" and pointer.index("^") == 4 + position
    assert hint.startswith("expected: name, name(key=value, ...)")


@settings(max_examples=400, deadline=None)
@given(st.text(st.sampled_from("pa_1.-=,:*()[]\"' \n"), max_size=14))
def test_any_text_is_read_or_refused_with_an_option_error(text):
    try:
        spec = parse_spec(text)
    except sq.OptionError:
        return
    assert same(parse_spec(format_spec(spec)), spec)


# ---- configs ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class SampleConfig(Config):
    mechanism: ClassVar[str] = "sample"

    features: int = 128
    draw: str = "iid"
    width: float = 1.0
    far: object = None

    def problems(self) -> Iterator[str]:
        yield from integer_problem("features", self.features, 1)
        yield from choice_problem("draw", self.draw, ("iid", "orthogonal"))
        yield from number_problem("width", self.width, 0.0, 2.0, open_low=True)


def test_a_config_writes_what_differs_and_reads_it_back():
    assert str(SampleConfig()) == "sample"
    config = SampleConfig(features=64, width=0.5, far=sq.SoftmaxConfig(dropout=0.1))
    assert config.changed() == {"features": 64, "width": 0.5, "far": sq.SoftmaxConfig(dropout=0.1)}
    assert str(config) == "sample(features=64, width=0.5, far=softmax(dropout=0.1))"
    spec = parse_spec(str(config))
    assert spec.options["far"] == Spec("softmax", {"dropout": 0.1})
    plain = SampleConfig(features=64, draw="orthogonal")
    assert SampleConfig.from_options(parse_spec(str(plain)).options) == plain


@dataclasses.dataclass(frozen=True)
class ManyConfig(SampleConfig):
    mechanism: ClassVar[str] = "many"
    positional: ClassVar[str | None] = "parts"

    parts: tuple[Part, ...] = ()


def test_a_config_receives_positional_parts_in_the_option_that_it_names():
    spec = parse_spec("many(a*2, b(x=[1, 2]), features=3)")
    config = ManyConfig.from_spec(spec)
    assert config.parts == spec.parts and config.features == 3
    assert str(config) == str(spec)
    assert config.spec() == spec and hash(config) == hash(ManyConfig.from_spec(spec))
    nested = SampleConfig(far=config)
    assert str(nested) == "sample(far=many(a*2, b(x=[1, 2]), features=3))"
    assert parse_spec(str(nested)).options["far"] == spec
    assert str(ManyConfig()) == "many"
    with pytest.raises(sq.OptionError, match="many: parts is given twice: as positional parts a"):
        ManyConfig.from_spec(parse_spec("many(a, parts=[])"))
    with pytest.raises(sq.OptionError) as caught:
        SampleConfig.from_spec(parse_spec("sample(iid, b*2)"))
    assert str(caught.value) == (
        "sample: takes no positional parts, given iid, b*2; options are written name=value and "
        "are: features, draw, width, far"
    )


def test_a_config_is_frozen_and_compares_by_value():
    config = SampleConfig(features=64)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.features = 3
    assert config == SampleConfig(features=64) != SampleConfig()
    assert hash(config) == hash(SampleConfig(features=64))


def test_all_wrong_values_are_reported_at_once():
    with pytest.raises(sq.OptionError) as caught:
        SampleConfig(features=0, draw="orthogonl", width=3)
    assert str(caught.value) == (
        "sample: features=0 must be an integer ≥ 1; "
        "draw='orthogonl' is none of iid, orthogonal (did you mean 'orthogonal'?); "
        "width=3 must be a number > 0 and ≤ 2"
    )


def test_unknown_options_are_reported_with_wrong_values_and_the_nearest_name():
    with pytest.raises(sq.UnknownNameError) as caught:
        SampleConfig.from_options({"featurs": 3, "zzz": 1, "width": -1.0})
    assert str(caught.value) == (
        "sample: unknown option 'featurs' (did you mean 'features'?); unknown option 'zzz'; "
        "width=-1.0 must be a number > 0 and ≤ 2; options are: features, draw, width, far"
    )


@pytest.mark.parametrize("value", [True, 1.0, "3", None, 0])
def test_an_integer_is_an_integer(value):
    assert list(integer_problem("n", value, 1)) == [f"n={value!r} must be an integer ≥ 1"]
    assert list(integer_problem("n", 1, 1)) == []


@pytest.mark.parametrize("value", [True, "1", None, float("nan"), -1, 2.5])
def test_a_number_is_a_number_in_range(value):
    assert list(number_problem("x", value, 0, 2)) == [f"x={value!r} must be a number ≥ 0 and ≤ 2"]
    assert list(number_problem("x", 0, 0)) == list(number_problem("x", 2, 0, 2)) == []
    assert list(number_problem("x", 0, 0, open_low=True)) == ["x=0 must be a number > 0"]
    infinite = float("inf")
    assert list(number_problem("x", infinite, 0)) == ["x=inf must be a finite number ≥ 0"]
    assert list(number_problem("x", "y", -infinite)) == ["x='y' must be a number"]
    assert list(number_problem("x", -infinite, -infinite)) == ["x=-inf must be a finite number"]


def test_every_registered_config_survives_a_round_trip():
    for name in sq.mechanisms():
        config = sq.describe(name).config
        assert str(config) == name
        assert sq.describe(str(config)).config == config


def test_none_is_a_name_where_an_option_chooses_among_names():
    assert sq.registry.resolve("performer(gauge=none)")[1] == sq.PerformerConfig(gauge="none")
    assert sq.registry.resolve("performer(redraw=none)")[1].redraw is None
