"""Errors that say what was wrong, what was expected and what would work.

Every error derives from `SubquadError` and from the built-in that fits, so that both
``except sq.SubquadError`` and ``except ValueError`` catch it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

__all__ = [
    "CalibrationError",
    "DeviceError",
    "DtypeError",
    "OptionError",
    "ShapeError",
    "SubquadError",
    "UnknownNameError",
    "UnsupportedError",
    "nearest",
]


class SubquadError(Exception):
    """Base of all errors raised by this package."""


class OptionError(SubquadError, ValueError):
    """An option has a wrong name, type or value; all problems are listed at once."""


class UnknownNameError(OptionError, LookupError):
    """A mechanism, option or choice does not exist; the nearest existing name is suggested."""


class ShapeError(SubquadError, ValueError):
    """A tensor's shape does not fit; names the argument, the expected and the given shape."""


class DtypeError(SubquadError, TypeError):
    """A tensor's dtype does not fit; names the argument, what is accepted and what was given."""


class DeviceError(SubquadError, ValueError):
    """Tensors, or a tensor and a module, live on different devices."""


class CalibrationError(SubquadError, RuntimeError):
    """A mechanism with calibrated statistics was called before `calibrate`."""


class UnsupportedError(SubquadError, NotImplementedError):
    """A mechanism cannot do what was asked; names the mechanism, the request and who can.

    Attributes:
        mechanism: name of the mechanism that was asked; of the class of a model or module that
            cannot be converted.
        request: what was asked of it.
        alternatives: names of registered mechanisms that can do it.
    """

    def __init__(
        self, mechanism: str, request: str, reason: str = "", alternatives: Sequence[str] = ()
    ) -> None:
        self.mechanism = mechanism
        self.request = request
        self.alternatives = tuple(alternatives)
        text = f"{mechanism!r} does not support {request}"
        if reason:
            text += f": {reason}"
        if self.alternatives:
            text += f". These do: {', '.join(self.alternatives)}"
        super().__init__(text)


def nearest(name: str, choices: Iterable[str]) -> str:
    """Returns ``" (did you mean 'x'?)"`` for the closest choice, or an empty string.

    >>> nearest("perfomer", ["performer", "softmax"])
    " (did you mean 'performer'?)"
    """
    close = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
