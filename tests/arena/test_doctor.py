"""What `subquad doctor` finds out, and that it finds what is wrong."""

import dataclasses
import importlib.metadata
import math

import pytest
import torch

from subquad import registry
from subquad.arena import doctor
from subquad.errors import OptionError, UnknownNameError
from subquad.kernels import explain, forget
from subquad.kernels.native import engine

CPU = torch.device("cpu")


def errors(spec):
    return {one.way: one for one in doctor.check(spec, CPU)}


@pytest.mark.parametrize("name", registry.MECHANISMS)
def test_each_mechanism_is_right_here_in_all_its_ways(name):
    spec = doctor.INSTEAD.get(name, name)
    found = errors(spec)
    have = registry.describe(spec).capabilities
    ways = ["forward", "gradient"]
    ways += ["causal", "causal gradient"] * bool(have.causal)
    ways += ["steps"] * bool(have.state and have.qkv)
    assert list(found) == ways
    assert all(one.passed and not one.problem for one in found.values()), found
    assert max(one.error for one in found.values()) > 0  # float32 was compared, not float64


def test_a_kernel_that_is_wrong_by_a_thousandth_is_found(monkeypatch):
    q = torch.empty(1, 1, 1, 4)
    if explain(q, q, q).backend != "native":
        pytest.skip("needs a C++ compiler: the truth runs by torch operations")
    right = engine.forward

    def wrong(p, keep):
        result = right(p, keep)
        return dataclasses.replace(result, out=result.out * 1.001)

    monkeypatch.setattr(engine, "forward", wrong)
    found = errors("performer")
    assert not found["forward"].passed and not found["causal"].passed
    assert found["forward"].error == pytest.approx(1e-3, rel=0.1)
    assert errors("local")["forward"].passed  # which does not go through it


def test_what_a_driver_throws_is_a_finding(monkeypatch):
    def broken(mechanism, device, dtype, causal):
        raise RuntimeError("no kernel image is available for execution on the device")

    monkeypatch.setattr(doctor, "_call", broken)
    found = errors("linear")
    assert list(found) == ["forward", "causal", "steps"]
    assert found["forward"].problem == (
        "RuntimeError: no kernel image is available for execution on the device"
    )
    assert not found["causal"].passed and found["steps"].passed


def test_differences_are_relative_and_never_hide_what_is_not_finite():
    one = torch.tensor([1.0, 2.0, 4.0])
    assert doctor._difference([one], [one.double()]) == 0.0
    assert doctor._difference([one], [one.double() + 0.4]) == pytest.approx(0.4 / 4.4)
    assert doctor._difference([one, one / 0], [one.double(), one.double()]) == math.inf
    assert doctor._difference([one * math.nan], [one.double()]) == math.inf
    with pytest.raises(ValueError):
        doctor._difference([one], [one.double()] * 2)


def test_all_parts_in_one_document():
    heard = []
    found = doctor.examine(CPU, ["auto", "fnet"], heard.append)
    assert heard == ["auto(crossover=0)", "fnet"]
    assert list(found) == ["machine", "settings", "extras", "backends", "checks"]
    assert {row["mechanism"] for row in found["checks"]} == set(heard)
    assert all(row["passed"] for row in found["checks"])
    assert doctor.examine(CPU, [])["checks"] == []


@pytest.mark.parametrize("name", ["perfomer", "performer(feature=3)"])
def test_unknown_names_are_refused_before_anything_is_computed(name):
    heard = []
    with pytest.raises((UnknownNameError, OptionError), match="did you mean"):
        doctor.examine(CPU, ["softmax", name], heard.append)
    assert heard == []


def test_extras_tell_missing_packages_and_wrong_versions(monkeypatch):
    real = importlib.metadata.version

    def version(name):
        if name == "rich":
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.1" if name == "typer" else real(name)

    monkeypatch.setattr(doctor.metadata, "version", version)
    found = doctor.extras()
    assert found["cli"]["missing"] == ["rich>=13"]
    assert found["cli"]["unfit"] == {"typer": "0.1 is not >=0.15"}
    assert found["demo"]["missing"] == ["rich>=13"]  # by the extra that it includes
    assert "subquad" not in found["train"]["installed"] and not found["train"]["missing"]


def test_backends_say_why_one_is_not_used(monkeypatch):
    monkeypatch.setenv("SUBQUAD_NATIVE", "0")
    forget()
    try:
        rows = {row["call"]: row for row in doctor.backends(CPU)}
        assert rows["performer, float32"]["backend"] == "torch"
        assert rows["performer, float32"]["refused"]["native"] == "SUBQUAD_NATIVE turns it off"
        assert doctor.settings()["environment"]["SUBQUAD_NATIVE"] == "0"
    finally:
        monkeypatch.undo()
        forget()
