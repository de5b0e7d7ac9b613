"""Where two costs cross, told by a clock without noise."""

import math

import pytest
import torch

from subquad.kernels.timing import Race, crossing, device_name, in_turn, timed

BOUNDS = {"shortest": 16, "longest": 65536, "patience": math.inf}


def racing(exact, other):
    """A race by two formulas, and the lengths it was run at."""
    lengths = []

    def race(length):
        lengths.append(length)
        return exact(length), other(length)

    return race, lengths


def cross(exact, other, start, **bounds):
    race, lengths = racing(exact, other)
    first = Race(start, exact(start), other(start))
    return crossing(race, first, **{**BOUNDS, **bounds}), lengths


@pytest.mark.parametrize("start", [16, 100, 777, 1000, 65536])
@pytest.mark.parametrize("precision", [1.2, 2.0])
def test_a_power_is_found_exactly(start, precision):
    """L² against 777·L: the logarithm of the speedup is straight, so interpolation is exact."""
    found, lengths = cross(lambda n: n**2, lambda n: 777.0 * n, start, precision=precision)
    assert found.length == 777 and not found.extrapolated
    assert [race.length for race in found.races] == [start, *lengths]
    # ≤ log2(65536/16) = 12 steps of two, then two halvings of a factor of two: 2^¼ < 1.2
    assert len(lengths) <= 12 + (2 if precision < 2 else 0)


def test_other_curves_are_bracketed():
    """The bracket ends within the precision: so does the error of what lies between."""

    def speedup(n):
        return (1e-4 + 1e-9 * n**2) / (1e-3 + 1e-7 * n)

    found, lengths = cross(speedup, lambda n: 1.0, 256, precision=1.1)
    assert speedup(found.length / 1.1) < 1 < speedup(found.length * 1.1)
    assert len(set(lengths)) == len(lengths)


def test_the_ends():
    assert cross(lambda n: 2.0, lambda n: 1.0, 256)[0].length == 16  # faster everywhere
    never, lengths = cross(lambda n: 1.0, lambda n: 2.0, 256)
    assert never.length is None and not never.extrapolated and lengths[-1] == 65536
    assert cross(lambda n: n**2, lambda n: 777.0 * n, 256, longest=600)[0].length is None


def test_long_calls_are_extrapolated():
    """At 512 tokens an exact call takes 0.26 s: one of 1024 would take more than 1 s."""
    found, lengths = cross(lambda n: 1e-6 * n**2, lambda n: 3e-3 * n, 256, patience=1.0)
    assert (found.length, found.extrapolated, lengths) == (3000, True, [512])
    beyond, _ = cross(lambda n: 1e-6 * n**2, lambda n: 0.1 * n, 256, patience=1.0)
    assert beyond.length is None and beyond.extrapolated


def test_calls_are_timed_in_turn():
    """By a clock that only calls move on: a takes 1, 2, 3 s, b always 5 s."""
    now, order = [0.0], []

    def call(name, seconds):
        def run():
            order.append(name)
            now[0] += seconds.pop(0) if isinstance(seconds, list) else seconds

        return run

    cpu = torch.device("cpu")
    runs = [call("a", [1.0, 2.0, 3.0]), call("b", 5.0)]
    assert in_turn(runs, cpu, rounds=3, clock=lambda: now[0]) == [2.0, 5.0]
    assert order == list("ababab")
    run = call("c", 0.5)
    assert timed(run, cpu, lambda: now[0]) == 0.5
    order.clear()
    in_turn([run], cpu, rounds=2, least=2.0, most=9, clock=lambda: now[0])
    assert order == ["c"] * 4
    order.clear()
    in_turn([run], cpu, rounds=2, least=2.0, most=3, clock=lambda: now[0])
    assert order == ["c"] * 3


def test_devices_have_names():
    assert device_name(torch.device("cpu")) and device_name(torch.device("meta")) == "meta"
