"""Exact below the crossover, linear above: which side runs, and how the crossover is known."""

import copy
import json
import logging
import multiprocessing
import pickle
import threading

import pytest
import torch
from torch import nn

import subquad as sq
from subquad.attention import tuning
from subquad.attention.base import Absent
from subquad.attention.hybrid.auto import Auto
from subquad.kernels.timing import Crossing, Race

H, HKV, D, V = 6, 3, 5, 7
LINEAR = "performer(features=13)"


def build(spec, **arguments):
    sizes = {"head_dim": D, "num_heads": H, "num_kv_heads": HKV, "seed": 3}
    return sq.build(spec, **{**sizes, **arguments}).eval()


def inputs(queries, keys=None, batch=2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    keys = queries if keys is None else keys
    shapes = ((batch, H, queries, D), (batch, HKV, keys, D), (batch, HKV, keys, V))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.fixture
def clock(monkeypatch, tmp_path):
    """Measuring without a clock: a crossover that depends on the shape; counts what it is for."""
    measured = []

    def measure(shape):
        measured.append(shape)
        length = 40 + 20 * shape.causal + 100 * shape.training
        return Crossing(length, (Race(64, 2.0, 1.0), Race(32, 1.0, 2.0)))

    monkeypatch.setenv("SUBQUAD_TUNE", "on")
    monkeypatch.setattr(tuning, "measure", measure)
    monkeypatch.setattr(tuning, "folder", lambda: tmp_path)
    tuning.forget()
    yield measured
    tuning.forget()


# ---- which side runs -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("queries", "keys", "linear"),
    [(39, 39, False), (40, 40, True), (41, 41, True), (20, 420, False), (21, 420, True),
     (1, 9999, False), (20, 9999, False), (21, 9999, True), (9999, 21, True)],
)  # fmt: skip
def test_the_crossover_holds_for_both_lengths(queries, keys, linear):
    """2·L·S / (L + S) ≥ 40: of 20 and 420 tokens it is 38.2, of 21 and 420 it is 40.

    Either side is the mechanism alone, to the bit.
    """
    mech = build(f"auto(linear={LINEAR}, crossover=40)")
    mean = 2 * queries * keys / (queries + keys)
    assert linear == (mean >= 40), mean
    q, k, v = inputs(queries, keys, batch=1)
    mask = torch.arange(keys) != keys // 2
    for options in ({}, {"causal": True}, {"key_mask": mask, "scale": 0.3}):
        found = mech(q, k, v, **options)
        wanted = build(LINEAR if linear else "softmax")(q, k, v, **options)
        assert torch.equal(found, wanted)
        assert mech.last.linear is linear and (mech.last.queries, mech.last.keys) == (queries, keys)
    assert mech.explain(queries, keys).linear is linear


def test_gradients_weights_and_partials_are_the_sides():
    mech = build(f"auto(linear={LINEAR}, crossover=40)")
    for length, name in ((30, "softmax"), (50, LINEAR)):
        alone = build(name)
        q, k, v = (t.requires_grad_() for t in inputs(length))
        grads = [
            torch.autograd.grad(one(q, k, v).square().sum(), (q, k, v)) for one in (mech, alone)
        ]
        assert all(map(torch.equal, *grads))
        assert torch.equal(mech.weights(q, k, causal=True), alone.weights(q, k, causal=True))
        parts = [one.partial(q, k, v) for one in (mech, alone)]
        assert torch.equal(parts[0].num, parts[1].num) and torch.equal(parts[0].den, parts[1].den)
    hybrid = build("auto(linear=near_far(window=4), crossover=40)")
    assert hybrid.partials(*inputs(30)) == {}
    assert set(hybrid.partials(*inputs(50))) == set(
        build("near_far(window=4)").partials(*inputs(50))
    )


def test_calibration_is_the_linear_sides():
    spec = "performer(features=13, gauge=centre, statistics=calibrated)"
    mech, alone = build(f"auto(linear={spec}, crossover=40)"), build(spec)
    q, k, v = inputs(50)
    for one in (mech, alone):
        one.calibrate(q, k)
    assert torch.equal(mech(q, k, v), alone(q, k, v))
    with pytest.raises(sq.OptionError, match="near_far.* takes nothing from data"):
        build("auto").calibrate(q, k)


def test_one_length_decides_for_all_calls():
    """With a state, of which whole calls, chunks and steps agree (the laws); bytes say whose."""
    for length, name in ((39, "softmax"), (40, LINEAR)):
        mech, alone = build(f"auto(linear={LINEAR}, crossover=40, length={length})"), build(name)
        for tokens in (3, 70):
            q, k, v = inputs(tokens)
            assert torch.equal(mech(q, k, v), alone(q, k, v))
        out, state = mech.prefill(q, k, v)
        wanted, other = alone.prefill(q, k, v)
        assert torch.equal(out, wanted) and state.nbytes == other.nbytes
        assert state.linear is (name == LINEAR)
        assert torch.equal(mech.step(q, None, None, state)[0], alone.step(q, None, None, other)[0])
        assert mech.capabilities.state == alone.capabilities.state
    with pytest.raises(sq.UnsupportedError, match="would change sides: give length="):
        build(f"auto(linear={LINEAR}, crossover=40)").prefill(q, k, v)


def test_capabilities_are_those_of_both_sides():
    have = sq.describe(f"auto(linear={LINEAR}, crossover=40)").capabilities
    performer = sq.describe(LINEAR).capabilities
    assert have.prefix is True and have.approximates == "softmax" and have.compile is True
    assert have.window == Absent(f"performer: {performer.window.reason}")
    for name in ("pad_invariant", "compact", "merges"):
        assert "padding included" in getattr(have, name).reason
    always = sq.describe(f"auto(linear={LINEAR}, crossover=0)").capabilities
    assert (always.state, always.compact, always.merges) == ("constant", True, True)
    never = sq.describe(f"auto(linear={LINEAR}, crossover=9, length=8)").capabilities
    assert never.dense is True and never.state == "growing"
    assert not sq.describe("auto").capabilities.compile  # near_far's reason
    with pytest.raises(sq.UnsupportedError, match="performer: features sum over all keys"):
        build(f"auto(linear={LINEAR}, crossover=40)")(*inputs(5), mask=sq.Mask(window=2))


def test_costs_are_the_lesser_ones():
    about = sq.describe(f"auto(linear={LINEAR})")
    exact, linear = sq.describe("softmax"), sq.describe(LINEAR)
    for length in (16, 4096):
        assert about.flops(length) == min(exact.flops(length), linear.flops(length))
    given = sq.describe(f"auto(linear={LINEAR}, crossover=5000)")
    assert given.flops(4999) == exact.flops(4999) and given.memory(4999) == exact.memory(4999)
    assert given.flops(5000) == linear.flops(5000)


def test_options_in_all_forms():
    spec = f"auto(linear={LINEAR}, crossover=40)"
    config = sq.AutoConfig(linear=sq.PerformerConfig(features=13), crossover=40)
    assert str(config) == spec and build(spec).config == config == build(config).config
    assert str(sq.AutoConfig()) == "auto" and str(sq.AutoConfig(linear="near_far()")) == "auto"
    cross = sq.AutoConfig().for_use("cross")
    assert str(cross) == "auto(linear=near_far(window=0))"
    assert "linear=performer(features=13), crossover=40" in repr(build(spec))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("auto(crossover=-1)", "crossover=-1 must be an integer ≥ 0"),
        ("auto(crossover=1.5)", "crossover=1.5 must be an integer"),
        ("auto(length=0)", "length=0 must be an integer ≥ 1"),
        ("auto(linear=auto)", "linear=auto leaves no choice"),
        ("auto(linear=softmax)", "linear=softmax leaves no choice"),
        ("auto(linear=gaussian)", "linear=gaussian does not approximate softmax"),
        ("auto(linear=fnet)", "linear=fnet does not approximate softmax"),
        ("auto(linear=performr)", "did you mean 'performer'"),
        ("auto(linear=performer(features=0), length=0)", "features=0 must be an integer ≥ 1"),
        ("auto(crosover=3)", "did you mean 'crossover'"),
        ("near_far(far=auto())", "name one of them"),
    ],
)
def test_wrong_options(spec, words):
    with pytest.raises(sq.OptionError) as caught:
        build(spec)
    assert words in str(caught.value)


def test_explain_says_why_and_refuses_nonsense():
    mech = build(f"auto(linear={LINEAR}, crossover=40)")
    assert str(mech.explain(39)) == "softmax: 39 tokens are below the crossover 40 (given)"
    assert str(mech.explain(21, 9999)) == (
        f"{LINEAR}: 21 queries of 9999 keys count as 42 tokens, not below the crossover 40 (given)"
    )
    with pytest.raises(sq.OptionError, match="length=0 must be .*keys=0 must be .*batch=True"):
        mech.explain(0, 0, batch=True)


# ---- measured once, and kept ---------------------------------------------------------------


def test_a_shape_is_measured_once_and_said_once(clock, caplog, tmp_path):
    mech = build(f"auto(linear={LINEAR})")
    alone = {name: build(name) for name in ("softmax", LINEAR)}
    for length, name in ((39, "softmax"), (40, LINEAR), (39, "softmax")):
        q, k, v = inputs(length)
        assert torch.equal(mech(q, k, v), alone[name](q, k, v))
    again = build(f"auto(linear={LINEAR})", seed=4)  # another layer, the same shape
    again(*inputs(39))
    assert len(clock) == 1 and len(caplog.records) == 1 and len(list(tmp_path.iterdir())) == 1
    assert f"{LINEAR} is faster than exact attention from 40 tokens on" in caplog.text
    assert caplog.records[0].levelno == logging.WARNING  # which shows without any configuration
    (shape,) = clock
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.value_dim) == (H, HKV, D, V)
    assert shape.batch == 1 and not shape.causal and not shape.training and shape.threads == 1
    assert "measured on" in str(mech.last) and "6 on 3 heads × 5 and 7" in str(mech.last)


def test_what_is_kept_is_not_measured_again(clock):
    mech = build(f"auto(linear={LINEAR})")
    first = mech.explain(100)
    tuning.forget()  # as another process
    again = mech.explain(100)
    assert len(clock) == 1 and (first.crossover.source, again.crossover.source) == (
        "measured",
        "kept",
    )
    assert again.crossover.length == first.crossover.length
    assert again.crossover.races == first.crossover.races


def test_classes_of_calls_have_their_own(clock):
    mech = build(f"auto(linear={LINEAR})")
    assert mech.explain(50).linear and not mech.explain(50, causal=True).linear
    assert not mech.explain(100, training=True).linear
    mech.explain(50, dtype=torch.bfloat16)
    mech.explain(50, batch=64)  # one thread is busy with a row's heads
    assert [(s.causal, s.training, s.dtype) for s in clock] == [
        (False, False, torch.float32), (True, False, torch.float32),
        (False, True, torch.float32), (False, False, torch.bfloat16),
    ]  # fmt: skip
    q, k, v = (t.requires_grad_() for t in inputs(50))
    out = mech.train()(q, k, v)  # the mode says what is raced, not whether gradients are asked for
    assert not mech.last.linear and torch.equal(out, mech.exact(q, k, v))
    with torch.no_grad():
        assert torch.equal(mech(q, k, v), out)
    mech.eval()(q, k, v)
    assert mech.last.linear


def test_batches_are_told_apart_as_far_as_a_device_needs_them():
    found = {b: tuning.batch_class(b, 8, 2**20) for b in (1, 3, 4, 15, 16, 999)}
    assert found == {1: 1, 3: 1, 4: 4, 15: 4, 16: 16, 999: 16}
    assert tuning.batch_class(16, 8, 8) == 1 and tuning.batch_class(16, 8, 9) == 4


def test_one_length_takes_one_class(clock):
    mech = build(f"auto(linear={LINEAR}, length=59)")  # below 60, the causal crossover
    for tokens, causal in ((10, False), (100, True), (100, False)):
        mech.train(causal)(*inputs(tokens), causal=causal)
        assert not mech.last.linear
    assert [(s.causal, s.training, s.batch) for s in clock] == [(True, False, 1)]


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", "null", '{"shape": {}}',
        '{"shape": SHAPE, "crossover": "soon", "races": [], "extrapolated": false, "seconds": 1}',
        '{"shape": SHAPE, "crossover": 3, "races": [], "extrapolated": false, "seconds": 1}',
        '{"shape": SHAPE, "crossover": 50, "races": [[1]], "extrapolated": false, "seconds": 1}',
        '{"shape": SHAPE, "crossover": 50}', b"\xff\xfe\x00",
    ],
)  # fmt: skip
def test_a_broken_file_is_reported_and_made_anew(clock, caplog, tmp_path, content):
    mech = build(f"auto(linear={LINEAR})")
    mech.explain(50)
    (path,) = tmp_path.iterdir()
    whole = path.read_text(encoding="utf-8")
    if isinstance(content, str):
        content = content.replace("SHAPE", json.dumps(json.loads(whole)["shape"])).encode()
    path.write_bytes(content)
    tuning.forget()
    caplog.clear()
    assert mech.explain(50).crossover.source == "measured" and len(clock) == 2
    assert f"{path} cannot be used and is measured anew" in caplog.text
    assert path.read_text(encoding="utf-8") == whole and [*tmp_path.iterdir()] == [path]


def test_a_file_of_another_version_or_device_is_not_found(clock, monkeypatch, tmp_path):
    build(f"auto(linear={LINEAR})").explain(50)
    for name, change in (("__version__", "9.9"),):
        monkeypatch.setattr(torch, name, change)
    tuning.forget()
    build(f"auto(linear={LINEAR})").explain(50)
    assert len(clock) == 2 and len(list(tmp_path.iterdir())) == 2


def test_a_folder_that_cannot_be_written_is_reported(clock, caplog, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(tuning, "folder", lambda: tmp_path / "file" / "tuning")
    mech = build(f"auto(linear={LINEAR})")
    assert mech.explain(50).crossover.length == mech.explain(60).crossover.length == 40
    assert len(clock) == 1 and "holds for this process only" in caplog.text


def test_the_first_of_two_that_measured_counts(clock, monkeypatch, tmp_path):
    """Another process has kept 77 while this one measured."""
    other = build(f"auto(linear={LINEAR})").explain(50)
    (path,) = tmp_path.iterdir()
    held = json.loads(path.read_text(encoding="utf-8"))
    path.unlink()
    tuning.forget()

    def measure(shape):
        path.write_text(json.dumps({**held, "crossover": 77}), encoding="utf-8")
        return Crossing(99, ())

    monkeypatch.setattr(tuning, "measure", measure)
    found = build(f"auto(linear={LINEAR})").explain(50).crossover
    assert (other.crossover.length, found.length, found.source) == (40, 77, "kept")
    tuned = sq.tune(LINEAR, head_dim=D, num_heads=H, num_kv_heads=HKV, again=True)
    assert tuned.crossovers[0].length == 99  # who asks for it anew replaces it
    assert json.loads(path.read_text(encoding="utf-8"))["crossover"] == 99


def _keep(folder, value, ready):
    """Keeps 20 shapes' crossovers, all in the order of another process."""
    tuning.folder = lambda: folder
    ready.wait(60)
    for heads in range(1, 21):
        shape = tuning.Shape(LINEAR, torch.device("cpu"), torch.float32, heads, heads, 4, 4)
        tuning._keep(tuning.Crossover(value, "measured", "", shape), again=False)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_two_processes_keep_side_by_side(tmp_path):
    """None is lost and none is torn; a shape has the value of one of the two."""
    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("it takes a system that can fork")
    context = multiprocessing.get_context("fork")
    ready = context.Barrier(2)
    both = [context.Process(target=_keep, args=(tmp_path, n, ready)) for n in (100, 200)]
    for process in both:
        process.start()
    for process in both:
        process.join(120)
        assert process.exitcode == 0
    held = [json.loads(path.read_text(encoding="utf-8")) for path in tmp_path.iterdir()]
    assert sorted(one["shape"]["heads"] for one in held) == list(range(1, 21))
    assert {one["crossover"] for one in held} <= {100, 200}


def test_threads_measure_a_shape_once(clock):
    mech = build(f"auto(linear={LINEAR})")
    threads = [threading.Thread(target=mech.explain, args=(50,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(clock) == 1


# ---- not measured --------------------------------------------------------------------------


def declared(mech, **call):
    found = mech.explain(50, **call).crossover
    assert found.source == "declared"
    return found


def test_without_measuring_flops_decide_and_it_is_said_once(clock, caplog, monkeypatch):
    monkeypatch.setenv("SUBQUAD_TUNE", "off")
    mech = build(f"auto(linear={LINEAR})", value_dim=V)
    found = declared(mech)
    exact, linear = (sq.describe(one) for one in ("softmax", LINEAR))
    assert linear.flops(found.length, D, V) <= exact.flops(found.length, D, V)
    assert linear.flops(found.length - 1, D, V) > exact.flops(found.length - 1, D, V)
    # a causal mask halves exact attention's
    assert 2 * found.length - 1 <= declared(mech, causal=True).length <= 2 * found.length
    mech(*inputs(50))
    assert clock == [] and len(caplog.records) == 2 and "SUBQUAD_TUNE=off" in caplog.text
    monkeypatch.setenv("SUBQUAD_TUNE", "maybe")
    tuning.forget()
    with pytest.raises(sq.OptionError, match="SUBQUAD_TUNE='maybe' must be on or off"):
        mech(*inputs(50))


def test_what_was_kept_holds_where_nothing_is_measured(clock, monkeypatch):
    mech = build(f"auto(linear={LINEAR})", value_dim=V)
    mech.explain(50)
    tuning.forget()
    monkeypatch.setenv("SUBQUAD_TUNE", "off")
    assert mech.explain(50).crossover.source == "kept"


def test_nothing_is_measured_without_data_or_in_a_backward_pass(clock, caplog):
    from torch._subclasses import FakeTensorMode
    from torch.utils.checkpoint import checkpoint

    with torch.device("meta"):
        mech = build(f"auto(linear={LINEAR})")
    assert "no data" in str(mech.explain(50)) and clock == [] and not caplog.records
    mech = build(f"auto(linear={LINEAR})")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        mech(*(mode.from_tensor(t) for t in inputs(20)))
    assert clock == [] and "the tensors have no data" in caplog.text
    tuning.forget()
    q, k, v = (t.requires_grad_() for t in inputs(50))
    for reentrant in (True, False):  # measured in the forward pass, and not a part of its graph
        clock.clear()
        out = checkpoint(mech.train(), q, k, v, use_reentrant=reentrant)
        torch.autograd.grad(out.sum(), q) if not reentrant else out.sum().backward()
        assert len(clock) == reentrant


def test_the_measuring_is_undisturbed_by_the_callers_modes(clock, monkeypatch):
    modes = []

    def measure(shape):
        modes.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"),
                      torch.empty(0).device.type, torch.get_num_threads()))  # fmt: skip
        return Crossing(40, ())

    monkeypatch.setattr(tuning, "measure", measure)
    before, mech, given = torch.get_rng_state(), build(f"auto(linear={LINEAR})"), inputs(50)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        mech(*given)
    assert modes == [(True, False, "cpu", torch.get_num_threads())]
    assert torch.equal(torch.get_rng_state(), before)


def test_a_graph_has_a_guard_a_side_and_finds_what_was_tuned(clock, caplog):
    from torch._dynamo.testing import CompileCounter

    mech = build(f"auto(linear={LINEAR})")
    sq.tune(mech, causal=False)
    (shape,) = clock
    assert shape.value_dim == D  # V was not known: a call's own decides
    for known, crossover in ((False, "declared"), (True, "kept")):
        torch._dynamo.reset()
        tuning.forget()
        if known:
            caplog.clear()
            mech(*inputs(50))
            tuning.forget()
        counter = CompileCounter()
        run = torch.compile(mech, backend=counter, fullgraph=True)
        for length in (20, 47, 61, 35, 22, 131):
            q, k, v = inputs(length)
            found = run(q, k, v)
            alone = mech.linear if length >= _length(mech) else mech.exact
            # The same operations in float32, fused or not: outputs are means of numbers of order
            # 1, and 1e-5 is 170 roundings of 2^-24, those of exponents and of sums over 131 keys.
            torch.testing.assert_close(found, alone(q, k, v), rtol=1e-5, atol=1e-5)
        # a graph for the first length, then one a side for any length
        assert 2 <= counter.frame_count <= 3
        sources = {one.source for one in tuning._known.values() if one.shape.value_dim == V}
        assert sources == {crossover}
    torch._dynamo.reset()


def _length(mech):
    (found,) = (one for one in tuning._known.values() if one.shape.value_dim == V)
    return found.length


def test_an_exported_program_holds_both_sides():
    mech = build(f"auto(linear={LINEAR}, crossover=60)")
    length = torch.export.Dim("length", min=2, max=512)
    shapes = {name: {2: length} for name in ("q", "k", "v")}
    program = torch.export.export(mech, tuple(inputs(37)), dynamic_shapes=shapes).module()
    for tokens, side in ((20, mech.exact), (59, mech.exact), (60, mech.linear), (97, mech.linear)):
        given = inputs(tokens)  # rounded as above
        torch.testing.assert_close(program(*given), side(*given), rtol=1e-5, atol=1e-5)


def test_copies_know_what_ran():
    mech = build(f"auto(linear={LINEAR}, crossover=40)")
    mech(*inputs(50))
    for other in (copy.deepcopy(mech), pickle.loads(pickle.dumps(mech))):
        assert other.last == mech.last and torch.equal(other(*inputs(50)), mech(*inputs(50)))


# ---- a real clock --------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
def test_a_real_measurement(monkeypatch, tmp_path, training):
    """Of what is plainly slower or faster: 8 features of few tokens, none of many."""
    monkeypatch.setattr(tuning, "folder", lambda: tmp_path)
    tuning.forget()
    found = sq.tune("performer(features=8)", head_dim=8, num_heads=1, training=training)
    (one,) = found.crossovers
    assert one.source == "measured" and one.races and one.seconds > 0
    # 2·L²·16 of exact attention's FLOPs at 8192 tokens take some 50 ms a core and more, the
    # performer's 2·L·8·16·2 a few ms.
    assert 16 <= one.length < 8192
    assert all(race.exact > 0 and race.other > 0 for race in one.races)
    assert str(one.length) in str(found) and found.to_dict()["crossovers"][0]["crossover"]
    tuning.forget()


# ---- ahead of time -------------------------------------------------------------------------


def test_tune_knows_specs_and_modules(clock):
    found = sq.tune(LINEAR, head_dim=D, num_heads=H, causal=None, training=None, batch=5)
    assert [one.length for one in found.crossovers] == [40, 140, 60, 160]
    told = []
    again = sq.tune(f"auto(linear={LINEAR}, crossover=3)", head_dim=D, num_heads=H, say=told.append)
    assert again.crossovers[0].length == 40 and len(clock) == 4 and len(told) == 1
    assert sq.tune(LINEAR, head_dim=D, num_heads=H, again=True).crossovers[0].length == 40
    assert len(clock) == 5
    clustered = sq.tune("key_clusters", head_dim=D, num_heads=H, causal=None)
    assert len(clustered.crossovers) == 1  # it cannot be causal
    model = nn.ModuleList(build(f"auto(linear={LINEAR})", value_dim=V) for _ in range(3))
    inside = sq.tune(model, dtype=torch.bfloat16)
    assert [one.shape.dtype for one in inside.crossovers] == [torch.bfloat16]
    json.dumps(inside.to_dict())


def test_wrong_arguments_of_tune(clock):
    cases = {
        "batch=0 must be an integer ≥ 1": {"batch": 0},
        "causal='yes' must be True, False or None": {"causal": "yes"},
        "dtype=torch.int64 must be one of": {"dtype": torch.int64},
        "num_heads=-1 must be an integer ≥ 1": {"num_heads": -1},
        "linear=gaussian does not approximate softmax": {"mechanism": "gaussian"},
        "num_heads, device given beside a module": {
            "mechanism": build("auto"), "num_heads": 4, "device": "cpu",
        },
        "Linear contains no mechanism 'auto'": {"mechanism": nn.Linear(1, 1)},
    }  # fmt: skip
    for words, arguments in cases.items():
        with pytest.raises(sq.OptionError, match=words):
            sq.tune(**arguments)
    with pytest.raises(sq.OptionError, match=r"must be a torch\.nn\.Module, given str"):
        sq.decisions("model")
    assert clock == []


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.delenv("SUBQUAD_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert tuning.folder() == tmp_path / "xdg" / "subquad" / "tuning"
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "own"))
    assert tuning.folder() == tmp_path / "own" / "tuning"


# ---- in models -----------------------------------------------------------------------------


def test_a_converted_encoder_says_which_side_ran(clock):
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=53, hidden_size=24, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=40, max_position_embeddings=128,
    )  # fmt: skip
    model = BertModel(config, add_pooling_layer=False).eval()
    found = {}
    with torch.no_grad():
        for mechanism in ("softmax", "near_far", "auto"):
            report = sq.convert(model, mechanism)
            for length in (30, 50):
                ids = torch.arange(length).remainder(53).expand(2, -1)
                mask = torch.ones_like(ids)
                mask[0, -7:] = 0
                out = model(ids, attention_mask=mask).last_hidden_state
                found[mechanism, length] = out
                if mechanism == "auto":
                    sides = {name: one.mechanism for name, one in sq.decisions(model).items()}
                    assert set(sides.values()) == {"softmax" if length < 40 else "near_far"}
                    assert list(sides) == [f"{row.name}.subquad" for row in report.converted]
    assert "auto: 2 of 2 attention layers converted" in str(report)
    assert torch.equal(found["auto", 30], found["softmax", 30])
    assert torch.equal(found["auto", 50], found["near_far", 50])
    assert not torch.equal(found["auto", 50], found["softmax", 50])
    assert len(clock) == 1  # all layers are of one shape
    tuned = sq.tune(model, causal=None)
    assert [one.shape.causal for one in tuned.crossovers] == [False, True]
    sq.revert(model)


def test_torchs_attention_takes_it(clock):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(24, 4, 40, batch_first=True).eval()
    x = {length: torch.randn(2, length, 24) for length in (30, 50)}
    with torch.no_grad():
        sq.convert(layer, f"auto(linear={LINEAR})")
        mech = layer.self_attn.subquad
        for length, side in ((30, "softmax"), (50, LINEAR)):
            out = layer(x[length])
            # The converted layer builds it at its first call where it cannot tell sizes before.
            mech = next(m for m in layer.modules() if isinstance(m, Auto))
            assert mech.last.mechanism == side
            sq.convert(layer, side)
            assert torch.equal(layer(x[length]), out)
            sq.convert(layer, f"auto(linear={LINEAR})")
    own = sq.MultiheadAttention(24, 4, batch_first=True, mechanism="auto(crossover=40)").eval()
    own(x[30], x[30], x[30])
    assert [one.mechanism for one in sq.decisions(own).values()] == ["softmax"]


def test_a_converted_decoder_generates_exactly_below_the_crossover(clock):
    """Each call decides: a prompt below the crossover, and steps of one token, are exact."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=53, hidden_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=40, max_position_embeddings=128,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    ids = torch.arange(3, 23)[None]
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    exact = model.generate(ids, **options)
    report = sq.convert(model, f"auto(linear={LINEAR})")
    assert {row.cache for row in report.converted} == {"keys and values"}
    assert torch.equal(model.generate(ids, **options), exact)
    report = sq.convert(model, f"auto(linear={LINEAR}, crossover=40, length=128)")
    assert {row.cache for row in report.converted} == {"constant state"}
    streamed = model.generate(ids, **options)
    sq.convert(model, LINEAR)
    assert torch.equal(model.generate(ids, **options), streamed)
