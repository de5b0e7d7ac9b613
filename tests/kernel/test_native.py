"""The C++ backend against the torch backend and naive sums, and the choice between them."""

import functools
import itertools
import math
import os
import shutil
import stat
import subprocess
import sys
import threading

import pytest
import torch

import subquad as sq
from subquad.errors import SubquadError, UnknownNameError, UnsupportedError
from subquad.kernels import dispatch
from subquad.kernels.native import engine, library
from subquad.kernels.ops import linear_attention

COMPILER = library.compiler()
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

EPS = torch.finfo(torch.float32).eps
SIZES = [
    # B, Kv, G, L, S, D, V, M: no width a multiple of a vector, or all of them
    (2, 3, 1, 131, 131, 7, 11, 13),
    (1, 2, 3, 67, 67, 19, 5, 37),
    (2, 1, 2, 1, 1, 3, 2, 5),
    (1, 2, 1, 257, 257, 64, 32, 48),
    (1, 1, 2, 5, 301, 16, 16, 16),
]
NAMES = ("out", "den", "scale", "S", "z", "c", "mass")


def randn(*shape, seed, size=1.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return (size * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)


def call(sizes, *, dtype=torch.float32, bias=False, own=False, masked=False):
    """Tensors of a call: q, k, v, W and b of each side, key bias and mask."""
    b, kv, g, queries, keys, d, value, m = sizes
    rows = (b, kv) if own else (kv,)
    return {
        "q": randn(b, kv * g, queries, d, seed=1, dtype=dtype),
        "k": randn(b, kv, keys, d, seed=2, dtype=dtype),
        "v": randn(b, kv, keys, value, seed=3, dtype=dtype),
        "wq": randn(*rows, d, m, seed=4, size=d**-0.5),
        "bq": randn(*rows, m, seed=5) if bias else None,
        "wk": randn(*rows, d, m, seed=6, size=d**-0.5),
        "bk": randn(*rows, m, seed=7) if bias else None,
        "key_bias": randn(b, kv, keys, seed=8) if bias else None,
        "key_mask": torch.rand(b, keys, generator=torch.Generator().manual_seed(9)) > 0.3
        if masked
        else None,
    }


def run(backend, given, **options):
    """Outputs and all gradients of a scalar of out, den and the new sums."""
    leaves = {
        n: t.clone().requires_grad_()
        for n, t in given.items()
        if t is not None and t.is_floating_point()
    }
    with sq.kernels.use(backend):
        out, den, scale, state = linear_attention(**{**given, **leaves}, **options)
        with torch.no_grad():
            again = linear_attention(**given, **options)[0]
    assert torch.equal(out.detach(), again)  # with and without what backward needs
    parts = (out.float(), den, state[0], state[1])
    total = sum((t * randn(*t.shape, seed=20 + i)).sum() for i, t in enumerate(parts))
    found = torch.autograd.grad(total, list(leaves.values()))
    return dict(zip(NAMES, (out, den, scale, *state), strict=True)), dict(
        zip(leaves, found, strict=True)
    )


def agree(found, wanted, bound):
    """Maximum error relative to the largest element."""
    assert found.keys() == wanted.keys()
    for name, truth in wanted.items():
        got = found[name].detach().double()
        truth = truth.detach().double()
        assert got.shape == truth.shape and bool(got.isfinite().all()), name
        error = (got - truth).abs().max().item() if got.numel() else 0.0
        assert error <= bound * max(1e-30, truth.abs().max().item()), f"{name}: {error:.2e}"


# Both backends compute in float32. A feature's exponent is a dot product of D <= 64 terms with
# |x||w| <= 24 in base 2: each backend's error of it is below sqrt(64)·24·eps = 2.3e-5 in the mean
# square sense and 1.8e-4 at worst; sums of positive terms keep relative errors, differences of
# gradients at most double them.
BOUND = 4e-4


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("absorb", ["all", "none", "some"])
@pytest.mark.parametrize("activation", ["exp", "relu", "elu"])
def test_equals_the_torch_backend(sizes, absorb, activation):
    queries, keys = sizes[3:5]
    first = {"all": keys, "none": keys - queries, "some": keys - queries + queries // 2}[absorb]
    for bias, own, masked in itertools.product((False, True), repeat=3):
        given = call(sizes, bias=bias, own=own, masked=masked)
        options = {"activation": activation, "absorb": first, "quad": 0.2 * (activation == "exp")}
        if activation != "exp":
            given["key_bias"] = None
        for one, other in zip(
            run("native", given, **options), run("torch", given, **options), strict=True
        ):
            agree(one, other, BOUND)


@pytest.mark.parametrize("causal", [False, True])
def test_is_as_exact_as_float32_is(causal):
    """Error of both backends against float64, small sizes of arguments: the same to a factor."""
    given = call((1, 2, 1, 211, 211, 16, 16, 32))
    keys = given["k"].shape[2]
    options = {"absorb": 0 if causal else keys, "quad": 0.1}
    wide = {n: None if t is None else t.double() for n, t in given.items()}
    truth = linear_attention(**wide, **options)[0]
    errors = {}
    for backend in ("native", "torch"):
        with sq.kernels.use(backend):
            out = linear_attention(**given, **options)[0]
        errors[backend] = ((out - truth).norm() / truth.norm()).item()
    # sqrt(16)·|x||w|·log2(e)·eps/2 is about 1e-6 of each exponent; four standard deviations
    assert max(errors.values()) <= 4e-6 and errors["native"] <= 3 * errors["torch"], errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("absorb", [0, 131])
def test_half_precision_is_read_and_written_once(dtype, absorb):
    """Results are those of the same numbers in float32, rounded: sums never leave float32."""
    given = call(SIZES[0], dtype=dtype)
    wide = {n: t.float() if n in "qkv" else t for n, t in given.items()}
    (half, bars), (whole, wide_bars) = (
        run("native", one, absorb=absorb, quad=0.2) for one in (given, wide)
    )
    for name in ("den", "scale", "S", "z", "c"):
        assert torch.equal(half[name], whole[name]), name
    assert torch.equal(half["out"], whole["out"].to(dtype))
    # The backward pass reads the rounded out: delta moves by |g||out|·eps of the dtype.
    for name, bar in bars.items():
        truth = wide_bars[name]
        error = (bar.float() - truth).abs().max() / truth.abs().max()
        assert error <= 16 * torch.finfo(dtype).eps, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounds_to_nearest_even_and_keeps_what_is_not_a_number(dtype):
    """Two keys of equal weight give the midpoint of their values: of neighbours, that is a tie."""
    eps = torch.finfo(dtype).eps
    first = torch.tensor([1.0, 1.0 + eps, 2.0 - eps, -1.0, math.inf, math.nan, 0.0])
    second = torch.tensor([1.0 + eps, 1.0 + 2 * eps, 2.0, -1.0 - eps, 1.0, 1.0, -0.0])
    v = torch.stack([first, second])[None, None].to(dtype)
    zero, w = torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 1)
    with sq.kernels.use("native"):
        out = linear_attention(zero, zero, v, w, None, w, None, absorb=2)[0][0, 0, 0]
    wanted = ((first + second) / 2).to(dtype)
    assert torch.equal(out.isnan(), wanted.isnan())
    assert torch.equal(out.nan_to_num(), wanted.nan_to_num())


def test_strides_of_any_kind():
    given = call((2, 3, 1, 37, 37, 16, 16, 8))
    moved = dict(given)
    for name in "qkv":
        moved[name] = given[name].transpose(1, 2).contiguous().transpose(1, 2)
    moved["v"] = given["v"].mT.contiguous().mT
    every_second = torch.stack([given["q"], given["q"]], 2).flatten(1, 2)[:, ::2]
    assert torch.equal(every_second, given["q"])
    moved["q"] = every_second
    for absorb in (0, 37):
        for one, other in zip(
            run("native", given, absorb=absorb), run("native", moved, absorb=absorb), strict=True
        ):
            for name, truth in other.items():
                assert torch.equal(one[name], truth), name


def test_a_mask_closes_whatever_stands_there():
    given = call((2, 2, 1, 150, 150, 16, 16, 16), masked=True)
    poisoned = {n: None if t is None else t.clone() for n, t in given.items()}
    closed = ~given["key_mask"][:, None, :, None]
    for name, value in (("k", math.nan), ("v", math.inf)):
        poisoned[name] = given[name].masked_fill(closed, value)
    for absorb in (0, 150):
        clean, bars = run("native", given, absorb=absorb, quad=0.1)
        dirty, dirty_bars = run("native", poisoned, absorb=absorb, quad=0.1)
        for name in clean:
            assert torch.equal(clean[name], dirty[name]), name
        for name in bars:
            assert torch.equal(bars[name], dirty_bars[name]), name
    nothing = {**given, "key_mask": torch.zeros_like(given["key_mask"])}
    for absorb in (0, 150):
        out, bars = run("native", nothing, absorb=absorb)
        assert not out["out"].any() and not bars["k"].any() and not bars["v"].any()


@pytest.mark.parametrize("activation", ["exp", "relu"])
def test_a_state_goes_on(activation):
    """A call in two is the call in one; the state given is left as it was."""
    given = call((2, 2, 2, 143, 143, 16, 16, 24))
    names, cut = ("q", "k", "v"), 60

    def part(i, j, absorb, state=None):
        own = {n: given[n][:, :, i:j] if n in names else given[n] for n in given}
        with sq.kernels.use("native"), torch.no_grad():
            return linear_attention(**own, absorb=absorb, state=state, activation=activation)

    whole = part(0, 143, 0)
    first = part(0, cut, 0)
    kept = [t.clone() for t in first[3]]
    second = part(cut, 143, 0, first[3])
    for name, t, before in zip("szcm", first[3], kept, strict=True):
        assert torch.equal(t, before), name
    agree(
        {"out": torch.cat([first[0], second[0]], 2), "s": second[3][0], "z": second[3][1]},
        {"out": whole[0], "s": whole[3][0], "z": whole[3][1]},
        BOUND,
    )
    read = part(143, 143, 0, second[3])
    assert read[0].shape[2] == 0
    assert all(torch.equal(a, b) for a, b in zip(read[3], second[3], strict=True))


def test_rows_that_underflow_are_redone():
    """A key far above those before it, which torch's engine computes in log space."""
    given = call((1, 2, 1, 97, 97, 8, 8, 8))
    given["key_bias"] = torch.zeros(1, 2, 97).index_fill(2, torch.tensor([80]), 300.0)
    for one, other in zip(
        run("native", given, absorb=0), run("torch", given, absorb=0), strict=True
    ):
        agree(one, other, BOUND)


def test_what_is_not_a_number_stays_behind_its_key():
    given = call((1, 2, 1, 97, 97, 8, 8, 8))
    given["k"][:, :, 3] = math.nan
    with sq.kernels.use("native"):
        out = linear_attention(**given, absorb=0)[0]
    assert out[:, :, :3].isfinite().all() and out[:, :, 3:].isnan().all()


@pytest.mark.parametrize("rows", [1, 3])
def test_threads_divide_rows_and_lengths(rows):
    """Few rows are cut into parts, whose states are added: equal to one thread to rounding."""
    given = call((1, rows, 1, 2500, 2500, 16, 16, 16))
    before = torch.get_num_threads()
    found = {}
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found[threads] = [run("native", given, absorb=a) for a in (0, 1250, 2500)]
    finally:
        torch.set_num_threads(before)
    for threads in (2, 5):
        for one, other in zip(found[threads], found[1], strict=True):
            agree(one[0], other[0], BOUND)
            agree(one[1], other[1], BOUND)


def test_calls_from_many_threads_at_once():
    given = call((1, 2, 1, 300, 300, 16, 16, 16))
    with sq.kernels.use("native"):
        alone = linear_attention(**given, absorb=0)[0]
    wrong = []

    def work():
        with sq.kernels.use("native"):
            for _ in range(20):
                if not torch.equal(linear_attention(**given, absorb=0)[0], alone):
                    wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong


@pytest.mark.parametrize("absorb", [0, 60, 131])
def test_operator_is_sound(absorb):
    given = call(SIZES[0], bias=True, masked=True)
    given["q"].requires_grad_()
    args = [*list(given.values()), *[None] * 4]
    torch.library.opcheck(
        torch.ops.subquad.linear_attention.default,
        (*args, "exp", 0.2, 0.0, absorb, engine.KEEP, "native"),
    )


# ---- the choice ------------------------------------------------------------------------------


def test_explains_what_runs_and_why_not():
    q = torch.zeros(1, 2, 8, 4)
    choice = sq.kernels.explain(q, q, q)
    assert choice.backend == "native" and "triton" in choice.refused
    reasons = {
        "float64": sq.kernels.explain(q.double(), q.double(), q.double()),
        "sigmoid": sq.kernels.explain(q, q, q, activation="sigmoid"),
        "signed": sq.kernels.explain(q, q, q, activation="relu", clip=0.1),
        "weights": sq.kernels.explain(q, q, q, activation="elu", weighted=True),
    }
    for word, found in reasons.items():
        assert found.backend == "torch" and word in found.refused["native"], word
    assert "not native: it computes in float32" in str(reasons["float64"])


def test_a_backend_can_be_forced():
    q = torch.randn(1, 2, 9, 4)
    with sq.kernels.use("torch"):
        assert sq.kernels.explain(q, q, q).backend == "torch"
        with sq.kernels.use("native"):
            assert sq.kernels.explain(q, q, q).backend == "native"
        assert sq.kernels.explain(q, q, q).backend == "torch"
    assert sq.kernels.explain(q, q, q).backend == "native"
    with (
        sq.kernels.use("native"),
        pytest.raises(UnsupportedError, match="native.*float64"),
    ):
        sq.attention(q.double(), q.double(), q.double(), "performer")
    with sq.kernels.use("triton"), pytest.raises(UnsupportedError, match="NVIDIA"):
        sq.attention(q, q, q, "performer")
    with pytest.raises(UnknownNameError, match="did you mean 'native'"), sq.kernels.use("nativ"):
        pass


def test_the_performer_runs_on_it(monkeypatch):
    calls = []
    forward = engine.forward
    monkeypatch.setattr(engine, "forward", lambda p, keep: calls.append(keep) or forward(p, keep))
    q = torch.randn(1, 2, 9, 4)
    sq.attention(q, q, q, "performer")
    sq.attention(q.requires_grad_(), q, q, "performer", causal=True).sum().backward()
    assert calls == [0, engine.KEEP]


def test_tensors_without_numbers_are_torchs():
    from torch._subclasses.fake_tensor import FakeTensorMode

    q = torch.randn(3, 2, 9, 4)
    mech = sq.build("performer", head_dim=4, num_heads=2)
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(q)
        assert mech(fake, fake, fake).shape == q.shape


# ---- building --------------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """An empty cache, and whatever was found out forgotten before and after."""
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path))
    dispatch.forget()
    yield tmp_path
    monkeypatch.undo()
    dispatch.forget()


def backend():
    q = torch.zeros(1, 1, 3, 2)
    return sq.kernels.explain(q, q, q)


def test_without_a_compiler_torch_runs(fresh, monkeypatch):
    monkeypatch.setenv("PATH", str(fresh))
    monkeypatch.delenv("CXX", raising=False)
    found = backend()
    assert found.backend == "torch" and "no C++ compiler" in found.refused["native"]
    q = torch.randn(1, 2, 9, 4)
    assert sq.attention(q, q, q, "performer").isfinite().all()
    with pytest.raises(SubquadError, match="no C\\+\\+ compiler"):
        library.build()


def test_turned_off(fresh, monkeypatch):
    monkeypatch.setenv("SUBQUAD_NATIVE", "0")
    assert "SUBQUAD_NATIVE" in backend().refused["native"]
    assert not list(fresh.iterdir())


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_compiler_that_fails_is_told(fresh, monkeypatch):
    broken = script(
        fresh / "broken", 'test "$1" = --version && exit 0; echo out of luck >&2; exit 1'
    )
    monkeypatch.setenv("CXX", broken)
    found = backend()
    assert found.backend == "torch" and "out of luck" in found.refused["native"]


def test_a_library_that_is_none_is_told(fresh, monkeypatch):
    text = 'test "$1" = --version && exit 0; while [ "$1" != -o ]; do shift; done; echo x > "$2"'
    monkeypatch.setenv("CXX", script(fresh / "liar", text))
    assert "does not load" in backend().refused["native"]


def test_a_folder_that_cannot_be_written_is_told(fresh, monkeypatch):
    (fresh / "file").write_text("")
    monkeypatch.setenv("SUBQUAD_CACHE", str(fresh / "file"))
    assert "SUBQUAD_CACHE names another folder" in backend().refused["native"]


def test_builds_once_and_says_so_once(fresh, capfd):
    assert backend().backend == "native"
    assert capfd.readouterr().err.count("compiling") == 1
    (made,) = (fresh / "native").iterdir()
    before = made.stat().st_mtime_ns
    dispatch.forget()
    assert backend().backend == "native"
    assert capfd.readouterr().err == "" and made.stat().st_mtime_ns == before
    again = library.build()
    assert again.path == made and not again.fresh
    assert os.path.basename(again.compiler) and "-O3" in again.flags


@pytest.mark.slow
def test_narrower_vectors_give_the_same(tmp_path):
    """The sources for AVX2 and for 128 bits, where this processor runs them."""
    if not library.capability().startswith("AVX"):
        pytest.skip("needs a processor with AVX2")
    given = call((1, 2, 2, 83, 83, 19, 21, 37), bias=True, masked=True)
    wanted = [run("torch", given, absorb=a, quad=0.1) for a in (0, 83)]
    for flags in (library.X86["AVX2"], ("-msse4.1",)):
        path = tmp_path / f"{flags[0]}.so"
        sources = [os.path.join(os.path.dirname(library.__file__), s) for s in library.SOURCES]
        command = [COMPILER, *library.COMMON, "-O1", *flags, "-o", str(path), *sources]
        subprocess.run(command, check=True)
        code = (
            "import ctypes, sys, torch\n"
            "from subquad.kernels.native import library\n"
            f"library._loaded = lambda: (ctypes.CDLL({str(path)!r}), '')\n"
            "import test_native as t\n"
            "given = t.call((1, 2, 2, 83, 83, 19, 21, 37), bias=True, masked=True)\n"
            "found = [t.run('native', given, absorb=a, quad=0.1) for a in (0, 83)]\n"
            "torch.save(found, sys.argv[1])\n"
            "import test_native_clusters as c\n"
            "for sizes in c.SIZES:\n"
            "    c.agree(c.case(sizes, width=5))\n"
        )
        saved = tmp_path / "found.pt"
        here = os.path.dirname(__file__)
        subprocess.run([sys.executable, "-c", code, str(saved)], check=True, cwd=here)
        for one, other in zip(torch.load(saved), wanted, strict=True):
            agree(one[0], other[0], BOUND)
            agree(one[1], other[1], BOUND)


def test_the_struct_is_the_one_that_c_has():
    assert library.library().subquad_call_size() == engine.ctypes.sizeof(engine._Call)
    assert shutil.which(COMPILER)


# ---- steps -----------------------------------------------------------------------------------


def decode(mech, tokens, *, count=None, between=None):
    """Outputs of steps of `count` tokens behind a prefill of 5, and the last state."""
    q, k, v = tokens
    with torch.no_grad():
        out, state = mech.prefill(q[:, :, :5], k[:, :, :5], v[:, :, :5])
        parts, at = [out], 5
        while at < q.shape[2]:
            if between is not None:
                between(at)
            part = slice(at, at + (count or 1))
            out, state = mech.step(q[:, :, part], k[:, :, part], v[:, :, part], state)
            parts.append(out)
            at += count or 1
    return torch.cat(parts, 2), state


def tokens(heads=4, kv=2, length=29, dtype=torch.float32):
    return [
        randn(2, h, length, 16, seed=30 + i, dtype=dtype) for i, h in enumerate((heads, kv, kv))
    ]


@pytest.fixture
def prepared(monkeypatch):
    """What the prepared steps gave that ran."""
    from subquad.kernels.native.step import Step

    calls = []

    def spy(run, *args):
        calls.append(run(*args))
        return calls[-1]

    for name in ("__call__", "look"):
        run = functools.partial(spy, getattr(Step, name))
        monkeypatch.setattr(Step, name, functools.partialmethod(run))
    return calls


@pytest.mark.parametrize("name", ["performer", "performer(estimator=relu)", "linear"])
@pytest.mark.parametrize("count", [1, 3])
def test_prepared_steps_are_the_steps(prepared, name, count):
    mech = sq.build(name, head_dim=16, num_heads=4, num_kv_heads=2)
    given = tokens()
    with sq.kernels.use("torch"):
        wanted, last = decode(mech, given, count=count)
    assert not prepared
    found, state = decode(mech, given, count=count)
    assert len(prepared) == 24 // count - 1  # all but the first, which prepares
    agree({"out": found, "s": state.s}, {"out": wanted, "s": last.s}, BOUND)
    assert state.length == 29


def test_a_prepared_step_is_forgotten_when_something_changes(prepared):
    mech = sq.build("performer(features=16)", head_dim=16, num_heads=4, num_kv_heads=2)
    given = tokens()
    decode(mech, given)
    ran = len(prepared)
    other = sq.build("performer(features=16)", head_dim=16, num_heads=4, num_kv_heads=2, seed=7)

    def changed(at):
        if at == 17:
            mech.projection.copy_(other.projection)

    first = mech.projection.clone()
    found, _ = decode(mech, given, between=changed)
    mech.projection.copy_(first)
    with sq.kernels.use("torch"):
        wanted, _ = decode(mech, given, between=changed)
    agree({"out": found}, {"out": wanted}, BOUND)
    assert len(prepared) - ran == 23  # all but the one behind the change
    mech.projection = mech.projection.clone()
    before = len(prepared)
    decode(mech, given)
    assert len(prepared) == before + 23
    # another dtype or batch is the whole path's
    half = [t.to(torch.bfloat16) for t in given]
    assert decode(mech, half)[0].dtype == torch.bfloat16
    assert decode(mech, [t[:1] for t in given])[0].shape[0] == 1


def test_a_prepared_step_takes_no_call_that_is_another(prepared):
    mech = sq.build("performer(features=16)", head_dim=16, num_heads=4, num_kv_heads=2)
    given = tokens()
    _, state = decode(mech, given)
    q, k, v = (t[:, :, :1] for t in given)
    ran = len(prepared)
    with torch.no_grad():
        out = mech.step(q, k, v, state)[0]
        assert len(prepared) == ran + 1
        ran += 1
        scaled = mech.step(q, k, v, state, scale=0.1)[0]
        assert not torch.equal(scaled, out)
        with pytest.raises(sq.errors.ShapeError):
            mech.step(q[:1], k[:1], v[:1], state)
        with pytest.raises(sq.errors.ShapeError):
            mech.step(q, k[..., :3], v, state)
        for few in (q[0, 0, 0], q[0, 0]):
            with pytest.raises(sq.errors.ShapeError):
                mech.step(few, few, few, state)
            with pytest.raises(sq.errors.ShapeError):
                mech.step(few, None, None, state)
        with torch.autocast("cpu"):
            mech.step(q, k, v, state)
        mech.step(q, k, v, type(state)(*(t.double() for t in sums(state))))
    q.requires_grad_()
    mech.step(q, k, v, state)[0].sum().backward()
    assert q.grad is not None and len(prepared) == ran


def sums(state):
    return state.s, state.z, state.c, state.mass


@pytest.mark.parametrize("name", ["performer(features=16)", "linear", "performer(features=19)"])
@pytest.mark.parametrize("width", [16, 11])  # values: whole vectors and not
@pytest.mark.parametrize("count", [1, 3])
def test_a_state_is_read_by_prepared_steps(prepared, name, width, count):
    mech = sq.build(name, head_dim=16, value_dim=width, num_heads=4, num_kv_heads=2)
    q, k, v = tokens()
    v = v[..., :width]
    with torch.no_grad():
        _, state = mech.prefill(q, k, v)
        kept = [t.clone() for t in sums(state)]
        parts = [q[:, :, i : i + count] for i in range(0, 12, count)]
        found = [mech.step(part, None, None, state) for part in parts]
        assert len(prepared) == len(parts) - 1  # all but the first, which prepares
        with sq.kernels.use("torch"):
            wanted = [mech.step(part, None, None, state)[0] for part in parts]
    assert all(same is state for _, same in found)
    assert all(map(torch.equal, sums(state), kept))
    agree({"out": torch.cat([out for out, _ in found], 2)}, {"out": torch.cat(wanted, 2)}, BOUND)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_prepared_steps_leave_masked_keys_out(prepared, dtype):
    mech = sq.build("performer(features=16)", head_dim=16, num_heads=4, num_kv_heads=2)
    given = tokens(dtype=dtype)
    mask = torch.rand(2, 29, generator=torch.Generator().manual_seed(5)) > 0.4

    def masked():
        parts, state = [], None
        for i in range(29):
            q, k, v = (t[:, :, i : i + 1] for t in given)
            with torch.no_grad():
                out, state = mech.prefill(q, k, v, state=state, key_mask=mask[:, i : i + 1])
            parts.append(out)
        return torch.cat(parts, 2).float()

    found = masked()
    assert len(prepared) == 27  # the first has no state, the second prepares
    whole = mech(*given, causal=True, key_mask=mask).float()
    # Outputs are rounded to their type: half a unit in the last place on either side.
    bound = BOUND + torch.finfo(dtype).eps if dtype != torch.float32 else BOUND
    agree({"out": found}, {"out": whole}, bound)


@pytest.mark.parametrize("name", ["performer(features=16)", "linear"])
def test_only_a_donated_state_is_written_over(prepared, name):
    mech = sq.build(name, head_dim=16, num_heads=4, num_kv_heads=2)
    given = tokens()
    with torch.no_grad():
        _, state = mech.prefill(*given)
        q, k, v = (t[:, :, :1] for t in given)
        _, state = mech.step(q, k, v, state)
        kept = [t.clone() for t in sums(state)]
        wanted = mech.step(q, k, v, state)
        assert all(map(torch.equal, sums(state), kept))
        found = mech.step(q, k, v, state, donate=True)
    assert len(prepared) == 2
    assert torch.equal(found[0], wanted[0])
    assert all(map(torch.equal, sums(found[1]), sums(wanted[1])))
    assert found[1].length == wanted[1].length == 31
    assert found[1].s.data_ptr() == state.s.data_ptr() != wanted[1].s.data_ptr()


def test_a_donated_state_of_a_graph_stays_for_its_gradients(prepared):
    mech = sq.build("performer(features=16)", head_dim=16, num_heads=4, num_kv_heads=2)
    q, k, v = tokens()
    one = [t[:, :, :1] for t in (q, k, v)]
    with torch.no_grad():
        decode(mech, (q, k, v))
    k.requires_grad_()
    gradients = []
    for steps in (0, 1):
        out, state = mech.prefill(q, k, v)
        if steps:
            with torch.no_grad():
                mech.step(*(t.detach() for t in one), state, donate=True)
            assert prepared
        loss = out.sum() + state.s.square().sum()
        gradients.append(torch.autograd.grad(loss, k)[0])
    assert torch.equal(*gradients)


def test_a_donated_state_outlives_a_row_that_underflows(prepared):
    # A level that no key of the state has: the new key is nothing beside it.
    mech = sq.build("performer(features=16)", head_dim=16, num_heads=2)
    q, k, v = (t[:, :2] for t in tokens(2, 2, 7))
    with torch.no_grad():
        _, state = mech.prefill(q, k, v)
        state.c[1, 1] += 200.0
        state.s[1, 1] = state.z[1, 1] = 0.0
        one = [t[:, :, :1] for t in (q, k, v)]
        with sq.kernels.use("torch"):
            wanted, last = mech.step(*one, state)
        mech.step(*one, state)
        found, new = mech.step(*one, state, donate=True)
    assert [out for out, _ in prepared] == [None]
    agree({"out": found}, {"out": wanted}, BOUND)
    agree(dict(enumerate(sums(new))), dict(enumerate(sums(last))), BOUND)


def test_a_mechanism_that_decodes_can_be_copied_and_saved():
    import copy
    import pickle

    mech = sq.build("performer(features=16)", head_dim=16, num_heads=4, num_kv_heads=2)
    found, _ = decode(mech, tokens())
    for other in (copy.deepcopy(mech), pickle.loads(pickle.dumps(mech))):
        assert torch.equal(decode(other, tokens())[0], found)


@pytest.mark.parametrize("spec", ["performer", "near_far", "near_far(far=performer)"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_default_device_is_not_asked(spec, causal):
    """New tensors belong to the device of those that are given, and C++ writes into them."""
    mech = sq.build(spec, head_dim=16, num_heads=2)
    q = torch.randn(1, 2, 150, 16).requires_grad_()

    def run():
        out = mech(q, q, q, causal=causal)
        return out, torch.autograd.grad(out.sum(), q)[0]

    wanted = run()
    with torch.device("meta"):
        found = run()
    assert all(map(torch.equal, found, wanted))


def test_classes_that_wrap_tensors_run_by_torch():
    from torch.testing._internal.two_tensor import TwoTensor

    a, b = torch.randn(1, 2, 40, 8), torch.randn(1, 2, 40, 8)
    mech = sq.build("performer", head_dim=8, num_heads=2)
    pair = TwoTensor(a, b)
    with torch.no_grad():
        found = mech(pair, pair, pair)
        for one, alone in ((found.a, a), (found.b, b)):
            # Sums of 40 positive terms of two backends: 40 roundings.
            assert (one - mech(alone, alone, alone)).abs().max() <= 40 * 4 * 1.2e-7
