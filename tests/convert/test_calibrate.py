"""Calibration: statistics, the ladder of sizes, the choice by heads, budgets, the report."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import subquad as sq
from subquad.convert import swap
from subquad.convert.calibrate import Attended, Sample, choose, exact_runs, hull, ladder
from subquad.registry import resolve

_spec = importlib.util.spec_from_file_location(
    "convert_models", Path(__file__).with_name("models.py")
)
assert _spec is not None and _spec.loader is not None
models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models)
VOCAB, hidden, inputs, tiny = models.VOCAB, models.hidden, models.inputs, models.tiny

NO_CACHE: dict[str, dict[str, bool]] = {"bert": {}, "llama": {"use_cache": False}}
DERF = "performer(features=16, estimator=derf, gauge=balance, statistics=calibrated)"


def tokens(rows: int, length: int, seed: int = 0, padded: bool = True) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, VOCAB, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, -7:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: t for name, t in model.state_dict().items() if ".subquad." in name}


# ---- statistics ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_statistics_are_those_of_the_exact_models_open_tokens(kind: str) -> None:
    """Fewer tokens than a sample holds: all of them count, the padded ones do not."""
    model, batch = tiny(kind), tokens(3, 19)
    seen: dict[str, Attended] = {}
    names = [name for name, _ in swap._attention_modules(model)]
    with exact_runs(model, names) as run:
        run(batch, seen.__setitem__)
    report = sq.convert(model, DERF, calibrate=[batch])
    layers = dict(swap.converted_layers(model))
    keep = batch["attention_mask"].bool()
    for name in names:
        mech: Any = layers[name].subquad
        call = seen[name]
        assert mech.tokens.tolist() == [50 * mech.num_heads // mech.num_kv_heads, 50]
        for head in range(mech.num_kv_heads):
            rows = call.k[:, head][keep].double()
            # float32 sums of 50 numbers: rounding 50·6e-8, on values of size 1
            assert torch.allclose(mech.mean_k[head].double(), rows.mean(0), atol=1e-5)
            assert torch.allclose(
                mech.cov_k[head].double(), rows.T.cov(correction=0), rtol=1e-4, atol=1e-5
            )
    assert report.calibration is not None and report.calibration.tokens == 50


def test_what_stands_at_padding_does_not_matter() -> None:
    model, batch = tiny("bert"), tokens(3, 19)
    sq.convert(model, DERF, calibrate=[batch])
    first = buffers(model)
    batch["input_ids"][0, -7:] = 6
    sq.convert(model, DERF, calibrate=[batch])
    for name, tensor in buffers(model).items():
        # exact attention's rounding may differ, the tokens' number may not
        assert torch.allclose(tensor.double(), first[name].double(), rtol=1e-4, atol=1e-5), name


def test_the_same_seed_and_texts_give_the_same_model() -> None:
    spec = "kernel_nystrom(features=8, landmarks=learned)"
    found = []
    for seed in (0, 0, 1):
        model = tiny("bert")
        report = sq.convert(
            model, spec, calibrate=[tokens(3, 19), tokens(2, 23, 1)], seed=seed, target_error=0.2
        )
        found.append((report.to_dict(), buffers(model)))
    assert json.dumps(found[0][0]) == json.dumps(found[1][0])
    assert all(torch.equal(t, found[1][1][name]) for name, t in found[0][1].items())
    assert not all(
        t.shape == found[2][1].get(name, t[:0]).shape and torch.equal(t, found[2][1][name])
        for name, t in found[0][1].items()
    )


@pytest.mark.parametrize(
    "spec",
    [
        DERF,
        "performer(features=16, gauge=centre, statistics=calibrated)",
        "performer(features=16, estimator=oprf, statistics=calibrated)",
        "kernel_nystrom(features=8, landmarks=calibrated)",
        "gaussian(features=8, anchors=sample)",
        "near_far(window=4, heavy=0, sinks=2, far=kernel_nystrom(features=8, landmarks=learned))",
        "mixed(local(window=4), gaussian(features=8, anchors=kmeans))",
    ],
)
def test_mechanisms_that_know_their_data_become_causal(spec: str) -> None:
    """Law 6: without calibration they refuse, with it they stream like any other."""
    model, batch = tiny("llama"), inputs("llama", "left")
    sq.convert(model, spec)
    with pytest.raises(sq.CalibrationError, match="calibrate"):
        model(**batch, use_cache=False)
    report = sq.convert(model, spec, calibrate=[batch])
    assert (
        report.replaced
        and [row.mechanism for row in report.converted]
        == [str(resolve(spec)[1].for_use("causal"))] * 3
    )
    out = hidden(model, **batch, use_cache=False)
    assert out.isfinite().all()
    assert report.calibration is not None and report.calibration.target_error is None
    longer = {key: torch.cat([t, t[:, -3:]], 1) for key, t in batch.items()}
    # what comes later changes nothing before: float32 sums in other chunks
    assert torch.allclose(hidden(model, **longer, use_cache=False)[:, :13], out, atol=1e-4)


def test_a_scale_that_anchors_depend_on_reaches_them() -> None:
    """Anchors lie among √scale·q: the model's scale is D^-½, the mechanism's default is 1."""
    model, batch = tiny("bert"), tokens(3, 19)
    sq.convert(model, "gaussian(features=8, anchors=sample)", calibrate=[batch])
    seen: dict[str, Attended] = {}
    mech: Any = next(layer for _, layer in swap.converted_layers(model)).subquad
    anchors = mech.anchors.clone()
    with exact_runs(model, ["encoder.layer.0.attention.self"]) as run:
        run(batch, seen.__setitem__)
    (call,) = seen.values()
    assert call.scale == pytest.approx(6**-0.5)
    rows = torch.cat([call.q, call.k], 2).transpose(0, 1).flatten(1, 2) * 6**-0.25
    for head, own in enumerate(anchors):
        gaps = torch.cdist(own.double(), rows[head].double()).min(1).values
        assert gaps.max() < 1e-4  # each anchor is a token, to float32's rounding


def test_a_sample_is_uniform_bounded_and_in_order() -> None:
    """Of n = 2000 tokens 500 stay: each with p = ¼, so the number among the first half has
    variance ≤ 500/4 (drawing without replacement varies less); 5 deviations are 56.
    """
    sample = Sample(500, seed=3)
    for start in range(0, 2000, 400):
        x = torch.arange(start, start + 400).double().reshape(2, 1, 200, 1)
        sample.add(x, torch.ones(2, 200, dtype=torch.bool))
    held = sample.tokens()[0, 0, :, 0]
    assert sample.seen == 2000 and len(held) == 500 == len(held.unique())
    assert torch.equal(held, held.sort().values)
    assert abs(int((held < 1000).sum()) - 250) < 56
    few = Sample(500, seed=3)
    few.add(torch.arange(8.0).reshape(1, 1, 8, 1), torch.arange(8)[None] % 2 == 0)
    assert few.tokens().flatten().tolist() == [0.0, 2.0, 4.0, 6.0]


def test_layers_built_at_their_first_call_are_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = tiny("bert"), tokens(3, 19)
    sq.convert(model, DERF, calibrate=[batch])
    wanted = hidden(model, **batch)
    monkeypatch.setattr(swap, "head_sizes", lambda layer: None)
    report = sq.convert(model, DERF, calibrate=[batch])
    assert report.converted[0].heads is None
    assert torch.equal(hidden(model, **batch), wanted)


# ---- choosing -----------------------------------------------------------------------------


def test_a_ladder_scales_sizes_and_those_of_parts() -> None:
    def rungs(spec: str, **options: Any) -> list[str]:
        return [str(one) for one in ladder(resolve(spec)[1], **options)]

    assert rungs("performer(features=16, draw=iid)") == [
        f"performer(features={m}, draw=iid)" for m in (4, 8, 16, 32, 64)
    ]
    assert rungs("local(window=[6, 0])", factors=(0.5, 1, 2)) == [
        "local(window=[4, 0])", "local(window=[6, 0])", "local(window=[12, 0])"
    ]  # fmt: skip
    near = rungs("near_far(window=8, heavy=4, far=performer(features=32))", factors=(0.5, 2))
    assert near == [
        "near_far(window=4, heavy=2, far=performer(features=16))",
        "near_far(window=16, heavy=8, far=performer(features=64))",
    ]
    assert rungs("softmax") == ["softmax"]
    # sizes that depend on the length are written out, but for the mechanism as it is
    open_, wide = rungs("near_far", factors=(1, 2), length=512)
    sizes = sq.NearFarConfig().of_length(512)
    assert open_ == "near_far" and f"window={2 * sizes.window}" in wide
    assert f"clusters={2 * sizes.clusters}" in wide and f"heavy={2 * sizes.heavy}" in wide


def _total(points: Any, kind: str) -> float:
    return sum(getattr(point, kind) for point in points)


@pytest.mark.parametrize("seed", range(5))
def test_the_choice_is_within_one_step_of_the_best(seed: int) -> None:
    """Against all 4^5 combinations. Marginal analysis is optimal with fractional settings; a
    whole choice differs from it by less than one step of one head.
    """
    generator = torch.Generator().manual_seed(seed)
    costs = [1.0, 2.0, 4.0, 8.0]
    errors = torch.rand(5, 4, generator=generator, dtype=torch.float64).sort(1, True).values
    errors = errors * torch.rand(5, 1, generator=generator, dtype=torch.float64)
    hulls = [hull(costs, row) for row in errors.tolist()]
    every = [
        (sum(costs[i] for i in pick), sum(float(errors[h, i]) for h, i in enumerate(pick)))
        for pick in itertools.product(range(4), repeat=5)
    ]
    target = 0.5 * float(errors[:, 0].sum() + errors[:, -1].sum())
    found = choose(hulls, target=target)
    assert _total(found, "error") <= target
    best = min(cost for cost, error in every if error <= target)
    assert best <= _total(found, "cost") < best + 7.0  # the largest step, from 1 to 8
    budget = 21.0
    found = choose(hulls, budget=budget)
    assert _total(found, "cost") <= budget
    least = min(error for cost, error in every if cost <= budget)
    step = max(a.error - b.error for own in hulls for a, b in itertools.pairwise(own))
    assert least - 1e-12 <= _total(found, "error") < least + step


def test_a_hull_leaves_out_what_is_no_bargain() -> None:
    found = hull([1.0, 2.0, 3.0, 4.0, 2.0], [1.0, 0.9, 0.2, 0.3, 0.95])
    assert [(p.index, p.cost, p.error) for p in found] == [(0, 1.0, 1.0), (2, 3.0, 0.2)]
    assert choose([found], target=0.1) == [found[-1]]  # out of reach: the best there is


@pytest.mark.parametrize(("kind", "target"), [("bert", 0.1), ("llama", 0.2)])
def test_expected_errors_are_those_that_compare_measures(kind: str, target: float) -> None:
    """On the calibration's own batch, for a mechanism without draws, in mixed layers too."""
    model, batch = tiny(kind), tokens(4, 40)
    report = sq.convert(model, "local(window=8)", calibrate=[batch], target_error=target)
    found = report.calibration
    assert found is not None
    assert any(row.mechanism.startswith("mixed(") for row in report.converted)
    for layer, wanted in zip(
        found.layers, sq.compare(model, batch, repeats=1, ablate=False).layers, strict=True
    ):
        # squares of float32 outputs: relative rounding 1e-7·√(their number), over an error of .1
        assert layer.error == pytest.approx(wanted.error, rel=1e-3)
        assert layer.uniform_error == pytest.approx(wanted.uniform_error, rel=1e-3)
        assert layer.error <= target and layer.met
        if kind == "bert":
            assert layer.heads == pytest.approx(wanted.heads, rel=1e-3)


def test_new_text_errs_as_expected() -> None:
    """Rows are alike: both means over 16 rows lie within 5 standard errors of each other."""
    model = tiny("bert")
    report = sq.convert(
        model, "local(window=8)", calibrate=[tokens(16, 40, 1, padded=False)], target_error=0.15
    )
    assert report.calibration is not None
    measured = sq.compare(model, tokens(16, 40, 2, padded=False), repeats=1, ablate=False)
    for layer, found in zip(report.calibration.layers, measured.layers, strict=True):
        assert 0.0 < layer.error <= 0.15
        assert abs(found.error - layer.error) < 5.0 * found.spread * math.sqrt(2 / 16)


def test_a_smaller_target_costs_more_and_a_larger_budget_errs_less() -> None:
    model, batch = tiny("bert"), tokens(4, 40)
    costs = []
    for target in (0.3, 0.2, 0.1):
        found = sq.convert(model, "local(window=8)", calibrate=[batch], target_error=target)
        assert found.calibration is not None and not found.calibration.missed
        costs.append(found.calibration.cost)
    assert costs == sorted(costs) and costs[0] < costs[-1]
    errors = []
    for share in (1.8, 2.1, 2.4):
        report = sq.convert(model, "local(window=8)", calibrate=[batch], budget=f"flops:{share}")
        assert report.calibration is not None and report.calibration.cost <= share
        errors.append(sum(layer.error**2 for layer in report.calibration.layers))
    assert errors == sorted(errors, reverse=True) and errors[0] > errors[-1]


def test_what_was_chosen_is_a_mapping_that_convert_takes() -> None:
    model, batch = tiny("llama"), tokens(4, 40)
    report = sq.convert(model, "local(window=8)", calibrate=[batch], target_error=0.2)
    chosen = {row.name: row.mechanism for row in report.converted}
    assert any("kv_heads=[[" in spec for spec in chosen.values())
    wanted = hidden(model, **batch, use_cache=False)
    sq.revert(model)
    again = sq.convert(model, chosen)
    assert {row.name: row.mechanism for row in again.converted} == chosen
    assert torch.equal(hidden(model, **batch, use_cache=False), wanted)


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_a_calibrated_model_is_saved_and_loaded_bit_for_bit(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModel

    model, batch = tiny(kind), tokens(4, 40)
    model = getattr(model, "model", model)
    report = sq.convert(model, DERF, calibrate=[batch], target_error=0.2)
    assert report.calibration is not None
    model.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path).eval()
    wanted = hidden(model, **batch, **NO_CACHE[kind])
    assert torch.equal(hidden(again, **batch, **NO_CACHE[kind]), wanted)


def test_a_budget_of_bytes_holds_the_state() -> None:
    model, batch = tiny("llama"), tokens(4, 60, padded=False)
    report = sq.convert(model, DERF, calibrate=[batch], budget=sq.Budget(bytes=0.2, length=100))
    held = cache = 0
    for _, layer in swap.converted_layers(model):
        mech: Any = layer.subquad
        q, k, v = (torch.randn(1, heads, 9, 6) for heads in (4, 2, 2))
        held += mech.prefill(q, k, v)[1].nbytes
        cache += 4 * 100 * 2 * (6 + 6)
    assert report.calibration is not None
    assert held <= 0.2 * cache
    assert report.calibration.cost == pytest.approx(held / cache, rel=1e-9)
    assert "bytes of state" in str(report)


def test_torchs_own_layers_are_calibrated_too() -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(24, 4, 48, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.3)
    x = torch.randn(3, 40, 24)
    report = sq.convert(model, "local(window=8)", calibrate=[x], target_error=0.3)
    assert report.calibration is not None and not report.calibration.missed
    measured = sq.compare(model, x, repeats=1, ablate=False).layers
    for layer_, found in zip(report.calibration.layers, measured, strict=True):
        assert layer_.error == pytest.approx(found.error, rel=1e-3) and layer_.error <= 0.3


# ---- what it says, and what it refuses ------------------------------------------------------


def test_the_report_prints_and_is_json() -> None:
    model, batch = tiny("bert"), tokens(4, 40)
    report = sq.convert(model, "local(window=8)", calibrate=[batch], target_error=0.15)
    shown = str(report)
    assert shown.startswith("local(window=8): 3 of 3 attention layers converted\n")
    assert "calibrated on 153 tokens, target error 0.15: expected error 0.1" in shown
    assert "encoder.layer.2.attention.self  error 0." in shown and "(uniform 0." in shown
    assert json.loads(json.dumps(report.to_dict()))["calibration"]["length"] == 40
    poor = sq.convert(model, "performer(features=4)", calibrate=[batch], target_error=0.001)
    assert poor.calibration is not None and len(poor.calibration.missed) == 3
    assert "target missed in 3 layers" in str(poor)


def test_a_mechanism_that_takes_nothing_from_data_is_measured() -> None:
    model, batch = tiny("bert"), tokens(4, 40)
    report = sq.convert(model, "softmax", calibrate=[batch], where=lambda name, _: ".1." in name)
    assert report.calibration is not None
    (layer,) = report.calibration.layers
    assert layer.error < 1e-5 and layer.cost == 1.0 and len(report.kept) == 2


def test_texts_need_a_tokenizer_and_batches_are_read_once() -> None:
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *map(str, range(2, VOCAB))])}
    plain = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]", model_max_length=40
    )
    model = tiny("bert")
    texts = [" ".join(str(5 + (3 * i + j) % 40) for i in range(9 + j)) for j in range(5)]
    report = sq.convert(model, DERF, calibrate=iter(texts), tokenizer=tokenizer)
    assert report.calibration is not None
    assert report.calibration.tokens == sum(9 + j for j in range(5))
    with pytest.raises(sq.OptionError, match="texts need tokenizer="):
        sq.convert(model, DERF, calibrate=texts)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target_error": 0.1}, "need calibrate="),
        ({"budget": "flops:1"}, "need calibrate="),
        ({"calibrate": [], "target_error": 0.0}, "target_error=0.0 must be a number > 0"),
        ({"calibrate": [], "target_error": 0.1, "budget": "flops:1"}, "not both"),
        ({"calibrate": [], "budget": "time:1"}, "must be 'flops:SHARE' or 'bytes:SHARE'"),
        ({"calibrate": [], "budget": 0.3}, "must be a Budget or text"),
        ({"calibrate": [], "budget": "flops:0"}, "a positive share of exact attention, given 0"),
        ({"calibrate": []}, "empty"),
        ({"calibrate": [3]}, "a batch must be a mapping"),
    ],
)
def test_wrong_arguments_say_what_is_expected(options: dict[str, Any], words: str) -> None:
    with pytest.raises(sq.OptionError, match=words):
        sq.convert(tiny("bert"), "performer", **options)


def test_a_calibration_that_fails_leaves_the_model_exact() -> None:
    model, batch = tiny("bert"), tokens(3, 19)
    before = hidden(model, **batch)
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("softmax", {"target_error": 0.1}, "softmax has no sizes to choose from"),
        ("performer", {"budget": "flops:0.001"}, "is below the cheapest settings"),
        ("gaussian(features=999, anchors=sample)", {}, "999 anchors cannot be taken from"),
    ]
    for spec, options, words in cases:
        with pytest.raises(sq.OptionError, match=words):
            sq.convert(model, spec, calibrate=[batch], **options)
        assert not swap.converted_layers(model)
        assert torch.equal(hidden(model, **batch), before)
    with pytest.raises(sq.UnsupportedError, match="a budget of bytes for encoder.layer.0"):
        sq.convert(model, "performer(gauge=centre)", calibrate=[batch], budget="bytes:0.5")


def test_inputs_without_a_token_are_refused() -> None:
    model = tiny("bert")
    closed = {"input_ids": torch.ones(2, 9).long(), "attention_mask": torch.zeros(2, 9).long()}
    for spec in ("performer(gauge=centre, statistics=calibrated)", "near_far"):
        with pytest.raises(sq.OptionError, match="no token that encoder.layer.0.* all are masked"):
            sq.convert(model, spec, calibrate=closed)

    class Nothing:
        pad_token_id, model_max_length = 0, 512

        def __call__(self, texts: list[str], **_: Any) -> dict[str, torch.Tensor]:
            return {"input_ids": torch.zeros(len(texts), 0)}  # as tokenizers give it, no integers

    with pytest.raises(sq.OptionError, match="texts need a token each, given ''"):
        sq.convert(model, "near_far", calibrate=[""], tokenizer=Nothing())


def test_a_budget_names_one_kind() -> None:
    assert str(sq.Budget.of("bytes=0.5")) == "bytes:0.5" and sq.Budget.of("flops: 2").share == 2.0
    for wrong in ({}, {"flops": 1.0, "bytes": 1.0}):
        with pytest.raises(sq.OptionError, match="either flops or bytes"):
            sq.Budget(**wrong)
    with pytest.raises(sq.OptionError, match="length=0 must be"):
        sq.Budget(flops=1.0, length=0)
