"""Every example in a docstring of the package runs and prints what it says."""

import doctest
import importlib
import pkgutil
import re

import pytest

import subquad

# pytest's own option of this name belongs to its private checker; the meaning is the same:
# numbers agree to the digits that are written.
NUMBER = doctest.register_optionflag("NUMBER")
NUMBERS = re.compile(r"[+-]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?")


class Checker(doctest.OutputChecker):
    def check_output(self, want, got, optionflags):
        if super().check_output(want, got, optionflags):
            return True
        return bool(optionflags & NUMBER) and same_numbers(want, got, optionflags, super())


def same_numbers(want, got, flags, exact):
    wanted, given = NUMBERS.findall(want), NUMBERS.findall(got)
    if len(wanted) != len(given):
        return False
    if not exact.check_output(NUMBERS.sub("0", want), NUMBERS.sub("0", got), flags):
        return False
    return all(
        abs(float(a) - float(b)) <= 0.5 * last_digit(a) * (1 + 1e-9)
        for a, b in zip(wanted, given, strict=True)
    )


def last_digit(number):
    """The value of one unit in the last written place: 1e-05 for 0.94176, 1 for 3."""
    mantissa, _, exponent = number.lower().partition("e")
    return 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))


MODULES = [
    module.name
    for module in pkgutil.walk_packages(subquad.__path__, "subquad.")
    if not module.name.endswith("__main__")
]


@pytest.mark.parametrize("name", ["subquad", *MODULES])
def test_examples_run(name):
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(Checker(), optionflags=doctest.ELLIPSIS, verbose=False)
    report = []
    for test in doctest.DocTestFinder(exclude_empty=True).find(module, name):
        if test.examples:
            runner.run(test, out=report.append)
    assert not runner.failures, "".join(report)


@pytest.mark.parametrize(
    ("want", "got", "same"),
    [
        ("[0.94176, 3]", "[0.941764533, 3]", True),
        ("[0.94176, 3]", "[0.94177, 3]", False),
        ("0.115", "0.11533", True),
        ("1e-3", "0.0014", True),
        ("1e-3", "0.0016", False),
        ("a 1.0", "b 1.0", False),
    ],
)
def test_numbers_agree_to_the_digits_that_are_written(want, got, same):
    assert Checker().check_output(want + "\n", got + "\n", NUMBER) is same
    assert not (Checker().check_output(want + "\n", got + "\n", 0) and want != got)
