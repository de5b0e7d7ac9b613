"""`suggest`: what is measured, what is left out, and what is recommended."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import subquad as sq
from subquad.convert import swap
from subquad.convert.suggest import _Clock

_spec = importlib.util.spec_from_file_location(
    "convert_models", Path(__file__).with_name("models.py")
)
assert _spec is not None and _spec.loader is not None
models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models)
VOCAB, hidden, tiny = models.VOCAB, models.hidden, models.tiny


def tokens(rows: int = 2, length: int = 40) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, VOCAB, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, -7:] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """A clock without noise: exact attention takes L²/1000 s, the others a multiple of L."""
    pace = {"local": 1.0, "performer": 0.5, "softmax": 9.0}

    def race(
        self: _Clock, mechanisms: Sequence[Any], length: int, repeats: int
    ) -> tuple[float, list[float]]:
        for one in mechanisms:  # the calls themselves are real
            out = self.call(one, length)()
            assert out.shape == (1, 4, length, 6) and out.isfinite().all()
        return length**2 / 1000, [pace[one.name] * length for one in mechanisms]

    monkeypatch.setattr(_Clock, "race", race)
    return pace


# ---- what is measured ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_errors_are_those_that_compare_measures(kind: str) -> None:
    model, batch = tiny(kind), tokens()
    before = hidden(model, **batch, **({} if kind == "bert" else {"use_cache": False}))
    found = sq.suggest(model, batch, mechanisms=["local(window=4)"], repeats=1)
    after = hidden(model, **batch, **({} if kind == "bert" else {"use_cache": False}))
    assert torch.equal(after, before) and not swap.converted_layers(model)
    assert sorted(one.mechanism for one in found.candidates) == [
        "local(window=2)", "local(window=4)", "local(window=8)"
    ]  # fmt: skip
    for one in found.candidates:
        sq.convert(model, one.mechanism)
        layers = sq.compare(model, batch, repeats=1, ablate=False).layers
        errors = [layer.error for layer in layers]
        # squares of float32 outputs, see test_calibrate
        assert one.error == pytest.approx(sum(errors) / 3, rel=1e-3)
        assert one.worst == pytest.approx(max(errors), rel=1e-3)
    uniform = [layer.uniform_error for layer in layers]
    assert found.uniform_error == pytest.approx(sum(uniform) / 3, rel=1e-3)
    assert found.length == found.tokens == 40 and found.layers == 3


def test_times_are_those_of_calls_at_the_length() -> None:
    """Exact attention of 64 times the pairs takes longer: 10 GFLOP against 0.02."""
    model, batch = tiny("bert"), tokens()
    short, long = (
        sq.suggest(model, batch, length=length, mechanisms=["local(window=4)"], repeats=1)
        for length in (128, 1024)
    )
    assert long.seconds_exact > short.seconds_exact > 0.0
    for one in long.candidates:
        assert one.speedup == pytest.approx(long.seconds_exact / one.seconds)


def test_causal_layers_are_offered_what_they_can_take() -> None:
    found = sq.suggest(
        tiny("llama"),
        tokens(),
        mechanisms=[
            "kernel_nystrom(features=8)",
            "kernel_nystrom(features=8,landmarks=calibrated)",
        ],
        repeats=1,
    )
    assert {one.mechanism.partition("landmarks=")[2] for one in found.candidates} == {"calibrated)"}
    assert all(one.calibrated for one in found.candidates)
    assert list(found.left_out) == ["kernel_nystrom(features=8)"]
    assert "would leak the future" in found.left_out["kernel_nystrom(features=8)"]


def test_the_default_mechanism_is_tried_in_causal_layers() -> None:
    """At the sizes of its causal side: scaled bidirectional ones name a far field that is none."""
    found = sq.suggest(tiny("llama"), tokens(), mechanisms=["near_far"], repeats=1)
    assert not found.left_out
    assert {one.mechanism for one in found.candidates} == {
        "near_far",
        "near_far(window=32, heavy=32, sinks=4, far=none)",
        "near_far(window=128, heavy=124, sinks=4, far=none)",
    }


def test_default_candidates_exist_and_are_measured() -> None:
    found = sq.suggest(tiny("bert"), tokens(1, 24), repeats=1, error=0.5)
    names = {one.mechanism.partition("(")[0] for one in found.candidates}
    assert {"near_far", "key_clusters", "sampled", "kernel_nystrom", "performer", "local"} == names
    assert not found.left_out
    fits = [one.error <= 0.5 for one in found.candidates]
    assert fits == sorted(fits, reverse=True)


# ---- what is recommended ------------------------------------------------------------------


def test_the_fastest_within_the_error_is_recommended(clock: dict[str, float]) -> None:
    """local takes 1·L against L²/1000: equal at 1000 tokens, twice as fast at 2000."""
    model, batch = tiny("bert"), tokens()
    candidates = ["local(window=16)", "performer(features=8)"]
    found = sq.suggest(model, batch, length=2000, error=0.2, mechanisms=candidates)
    assert found.recommended == found.candidates[0].mechanism
    best = found.candidates[0]
    assert best.mechanism.startswith("local") and best.error <= 0.2 and best.judged
    assert best.speedup == pytest.approx(2.0)
    assert found.crossover == 1000
    assert found.reason.startswith(f"Use {best.mechanism}: error 0.")
    assert "2.00 × exact attention's speed at 2000 tokens" in found.reason
    assert "(exact attention is faster below ~1000)" in found.reason


def test_exact_attention_is_kept_where_it_is_faster(clock: dict[str, float]) -> None:
    clock["local"] = 3.0  # equal at 3000 tokens
    found = sq.suggest(
        tiny("bert"), tokens(), length=500, error=0.2, mechanisms=["local(window=16)"]
    )
    assert found.recommended is None
    # between 2000 and 4000 on a line of the logarithms, where both times are powers
    assert found.crossover == 3000
    assert found.reason.startswith("Keep exact attention: it is faster below ~3000 tokens")
    clock["local"] = 1e6
    found = sq.suggest(
        tiny("bert"), tokens(), length=500, error=0.2, mechanisms=["local(window=16)"]
    )
    assert found.crossover is None and "faster below ~65536 tokens" in found.reason


def test_exact_attention_is_kept_where_nothing_is_close(clock: dict[str, float]) -> None:
    found = sq.suggest(
        tiny("bert"), tokens(), length=2000, error=0.001, mechanisms=["performer(features=8)"]
    )
    assert found.recommended is None and found.crossover is None
    assert "no candidate has an error of at most 0.001; the closest is" in found.reason


def test_what_is_no_better_than_uniform_attention_is_not_recommended(
    clock: dict[str, float],
) -> None:
    found = sq.suggest(
        tiny("bert"), tokens(), length=2000, error=9.0, mechanisms=["performer(features=8)"]
    )
    worse = [one for one in found.candidates if one.error >= found.uniform_error]
    assert worse and all(one.mechanism != found.recommended for one in worse)


def test_inputs_within_a_window_do_not_judge_it(clock: dict[str, float]) -> None:
    """A window of 64 reads all of 40 tokens: what it leaves out of 2000 has not been seen."""
    batch = tokens()
    options: dict[str, Any] = {"error": 0.3, "mechanisms": ["local(window=64)"]}
    found = sq.suggest(tiny("bert"), batch, length=2000, **options)
    assert not any(one.judged for one in found.candidates if one.mechanism != "local(window=32)")
    assert found.recommended in (None, "local(window=32)")
    assert "Errors at 2000 tokens are larger" in str(found)
    same = sq.suggest(tiny("bert"), batch, **options)
    assert all(one.judged for one in same.candidates) and "are larger" not in str(same)


def test_it_prints_and_is_json(clock: dict[str, float]) -> None:
    found = sq.suggest(tiny("bert"), tokens(), length=2000, mechanisms=["performer(features=8)"])
    shown = str(found)
    assert shown.splitlines()[0].startswith("3 attention layers, one call at 2000 tokens on cpu")
    for row in ("exact attention", "performer(features=16)", "uniform attention"):
        assert f"\n  {row}" in shown
    read = json.loads(json.dumps(found.to_dict()))
    assert len(read["candidates"]) == 3 and read["crossover"] is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"error": 0.0}, "error=0.0 must be a number > 0"),
        ({"length": 0}, "length=0 must be an integer ≥ 1"),
        ({"repeats": 1.5}, "repeats=1.5 must be an integer ≥ 1"),
        ({"mechanisms": ["performr"]}, "did you mean 'performer'"),
        ({"mechanisms": []}, "no candidate that every layer can take"),
    ],
)
def test_wrong_arguments_say_what_is_expected(options: dict[str, Any], words: str) -> None:
    model = tiny("bert")
    with pytest.raises(sq.OptionError, match=words):
        sq.suggest(model, tokens(), **options)
    assert not swap.converted_layers(model)


def test_layers_no_candidate_can_take_are_named() -> None:
    with pytest.raises(sq.OptionError, match="kernel_nystrom: .* would leak the future"):
        sq.suggest(tiny("llama"), tokens(), mechanisms=["kernel_nystrom"])
