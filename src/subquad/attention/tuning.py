"""From which length on a mechanism is faster than exact attention: measured once, and kept.

`crossover` answers for a `Shape`, what a crossover depends on: the mechanism with its options,
the device and its threads, the dtype, the sizes of heads, the class of the batch, the direction,
and whether a backward pass comes along. It looks in this process, then in the folder
``$SUBQUAD_CACHE/tuning`` (``$XDG_CACHE_HOME/subquad/tuning``, ``~/.cache/subquad/tuning``), then
measures both ways in turn and keeps the result, one small JSON file a shape: so two processes
never write the same file at once, and of two that measured the same shape the first one counts.
A file is of one device model, version of torch and of this package, and backend of the kernels.

Nothing is measured while a graph is traced or captured, on tensors without data, within a
backward pass, or, unless `tune` is called, with ``SUBQUAD_TUNE=off``; where nothing was kept
either, the declared FLOPs decide then. What was measured or could not be is logged once, as a
warning of the logger ``subquad.attention.tuning``.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from subquad import registry
from subquad.attention.base import FLOATS, Mechanism, Support, computed_again
from subquad.attention.masks import Mask
from subquad.errors import OptionError
from subquad.kernels import explain
from subquad.kernels.native.library import cache_folder
from subquad.kernels.timing import Crossing, Race, crossing, device_name, in_turn
from subquad.options import Config, Spec, integer_problem

__all__ = ["Crossover", "Shape", "Tuning", "crossover", "folder", "tune"]

_log = logging.getLogger(__name__)

SHORTEST, LONGEST = 16, 65536
"""Tokens between which the crossover is looked for: below, exact attention costs nothing."""

BATCHES = (1, 4, 16)
"""Batches that are told apart; others count as the next smaller one."""

PATIENCE = 0.5
"""Seconds of one exact call, forward or with its backward pass, beyond which times are
extrapolated: a crossover takes about eight races of some three rounds."""

ROUNDS, MOST_ROUNDS, ROUND_SECONDS = 3, 25, 0.03
"""Calls of each way in a race: at least three, more of short ones until 0.03 s have passed."""

CLEAR = 1.5
"""How many times as fast a way is where one long call of each decides a race."""

PRECISION = 1.2
"""The bracket around the crossing, largest over smallest length. Where both ways are about
equally fast it matters little which one runs."""

MOST_BYTES = 2**28
"""Of q in one measured call."""


@dataclass(frozen=True)
class Shape:
    """Calls that share a crossover.

    Args:
        mechanism: the one that is not exact, in the option grammar.
        device, dtype: of q, k and v.
        heads, kv_heads, head_dim, value_dim: H, Hkv, D, V.
        batch: one of `BATCHES`, see `batch_class`.
        causal: direction.
        training: whether a backward pass counts, too.
        threads: of torch on a CPU, else 0.
    """

    mechanism: str
    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    batch: int = 1
    causal: bool = False
    training: bool = False
    threads: int = 0

    @property
    def place(self) -> str:
        """The device, the dtype and the sizes."""
        heads = f"{self.heads}" + f" on {self.kv_heads}" * (self.kv_heads != self.heads)
        width = f"{self.head_dim}" + f" and {self.value_dim}" * (self.value_dim != self.head_dim)
        words = [
            str(self.dtype).removeprefix("torch."),
            f"{heads} heads × {width}",
            f"{self.batch} row{'s' * (self.batch > 1)}",
        ]
        threads = f", {self.threads} thread{'s' * (self.threads > 1)}" if self.threads else ""
        return f"{device_name(self.device)}{threads}; {', '.join(words)}"

    def __str__(self) -> str:
        direction = "causal" if self.causal else "bidirectional"
        return f"{self.place}, {direction}, {'training step' if self.training else 'forward'}"


@dataclass(frozen=True)
class Crossover:
    """The length from which a mechanism is faster than exact attention, and how it is known.

    Args:
        length: tokens of queries and of keys; None: exact attention is the faster one up to
            65,536 tokens.
        source: ``"given"``, ``"measured"``, ``"kept"`` (read from the cache), or ``"declared"``
            (by FLOPs).
        reason: why it was not measured.
        shape: what it was measured for.
        races: (length, exact seconds, the mechanism's seconds) of what was measured.
        extrapolated: whether it lies beyond what was measured.
        seconds: that measuring took.
    """

    length: int | None
    source: str
    reason: str = ""
    shape: Shape | None = None
    races: tuple[Race, ...] = ()
    extrapolated: bool = False
    seconds: float = 0.0

    @property
    def words(self) -> str:
        """How it is known."""
        if self.source == "given":
            return "given"
        if self.source == "declared":
            return f"by declared FLOPs: {self.reason}"
        return f"measured on {self.shape}" + ", extrapolated" * self.extrapolated

    def linear(self, queries: int, keys: int) -> bool:
        """Whether the mechanism is to run: 2·L·S / (L + S) ≥ the crossover."""
        return self.length is not None and 2 * queries * keys >= self.length * (queries + keys)


GIVEN: dict[int, Crossover] = {}
_known: dict[Shape, Crossover] = {}
_lock = threading.Lock()
_Found = TypeVar("_Found")


def given(length: int) -> Crossover:
    """A crossover that an option states."""
    return GIVEN.setdefault(length, Crossover(length, "given"))


def forget() -> None:
    """Forgets what this process knows; files stay."""
    with _lock:
        _known.clear()


def batch_class(batch: int, heads: int, most: int) -> int:
    """The largest of `BATCHES` that is not above the batch and that a device needs to be busy.

    Args:
        batch: B, may be symbolic: it is compared only.
        heads: H.
        most: B·H from which on time is proportional to it; see `at_once`.
    """
    found = BATCHES[0]
    for size in BATCHES[1:]:
        if found * heads < most and batch >= size:
            found = size
    return found


TRACED = "a graph is being traced"


def threads_of(device: torch.device) -> int:
    """Threads of torch on a CPU, else 0."""
    return torch.get_num_threads() if device.type == "cpu" else 0


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator, unused-ignore]
def at_once(device: torch.device) -> int:
    """Of rows × heads, how many a device computes at once: a thread each; on others all tried."""
    return threads_of(device) or 2**20


# ---- looking up ----------------------------------------------------------------------------


def crossover(shape: Shape, refusal: str = "") -> Crossover:
    """The crossover of a shape; see the module.

    Args:
        shape: what it depends on.
        refusal: why nothing can be measured now, or empty.
    """
    found = _known.get(shape)
    if found is None:
        with _lock:
            found = _known.get(shape) or _find(shape, refusal)
            if shape.device.type != "meta":
                _known[shape] = found
    return found


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator, unused-ignore]
def traced(
    mechanism: str, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int,
    head_dim: int, value_dim: int, batch: int, causal: bool, training: bool,
) -> int | None:  # fmt: skip
    """`crossover(...).length` of a `Shape` with these fields, a constant of the traced graph."""
    shape = Shape(
        mechanism, device, dtype, heads, kv_heads, head_dim, value_dim, batch, causal, training,
        threads_of(device),
    )  # fmt: skip
    return crossover(shape, TRACED).length


def refusal(q: Tensor) -> str:
    """Why nothing can be measured at this call, or empty."""
    if torch.compiler.is_compiling():
        return TRACED
    if q.is_meta or isinstance(q, torch._subclasses.FakeTensor):
        return "the tensors have no data"
    if computed_again():
        return "a backward pass is under way"
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    return ""


def _find(shape: Shape, refusal: str) -> Crossover:
    if shape.device.type == "meta":
        return _declared(shape, refusal)
    refusal = refusal or _off()
    found = _apart(lambda: _kept(shape))
    if found is None and not refusal:
        found = _apart(lambda: _measured(shape))
        if found.source != "declared":
            _log.warning(
                "auto: %s is faster than exact attention %s (%s, once, in %.1f s; kept in %s)",
                shape.mechanism, _since(found.length), found.words, found.seconds, folder(),
            )  # fmt: skip
    return _declared(shape, refusal) if found is None else found


def _off() -> str:
    """Why measuring is switched off, or empty."""
    value = os.environ.get("SUBQUAD_TUNE", "on").strip().lower()
    if value not in ("on", "off"):
        raise OptionError(f"SUBQUAD_TUNE={value!r} must be on or off")
    return "SUBQUAD_TUNE=off" if value == "off" else ""


def _apart(function: Callable[[], _Found]) -> _Found:
    """Calls in a thread of its own: modes, hooks and autocast of the caller do not reach it."""
    found: list[_Found] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.append(function())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="subquad-tuning")
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return found[0]


def _declared(shape: Shape, reason: str) -> Crossover:
    found = Crossover(declared(shape), "declared", reason, shape)
    if shape.device.type != "meta":
        _log.warning(
            "auto: %s counts as faster than exact attention %s by declared FLOPs, not measured: "
            "%s (%s)", shape.mechanism, _since(found.length), reason, shape,
        )  # fmt: skip
    return found


def _since(length: int | None) -> str:
    return f"at no length up to {LONGEST}" if length is None else f"from {length} tokens on"


def declared(shape: Shape) -> int | None:
    """The least length at which the declared FLOPs are no more than exact attention's.

    A causal mask halves exact attention's. None if there is none up to 65,536 tokens.
    """
    exact, other = (registry.describe(one) for one in ("softmax", shape.mechanism))
    widths, share = (shape.head_dim, shape.value_dim), 0.5 if shape.causal else 1.0

    def wins(length: int) -> bool:
        return other.flops(length, *widths) <= share * exact.flops(length, *widths)

    high = SHORTEST
    while not wins(high):
        high *= 2
        if high > LONGEST:
            return None
    low = high // 2
    while high - low > 1 and high > SHORTEST:
        middle = (low + high) // 2
        low, high = (low, middle) if wins(middle) else (middle, high)
    return high


# ---- files ---------------------------------------------------------------------------------


def folder() -> Path:
    """Where crossovers are kept; it may not exist."""
    return cache_folder() / "tuning"


def _identity(shape: Shape) -> dict[str, Any]:
    """What a file is for, in plain values."""
    try:
        version = metadata.version("subquad")
    except metadata.PackageNotFoundError:
        version = "unknown"
    q = torch.zeros(1, shape.heads, 1, shape.head_dim, dtype=shape.dtype, device=shape.device)
    k, v = (
        torch.zeros(1, shape.kv_heads, 1, width, dtype=shape.dtype, device=shape.device)
        for width in (shape.head_dim, shape.value_dim)
    )
    return {
        **asdict(shape),
        "device": device_name(shape.device),
        "dtype": str(shape.dtype).removeprefix("torch."),
        "backend": explain(q, k, v).backend,
        "torch": torch.__version__,
        "subquad": version,
    }


def _path(identity: dict[str, Any]) -> Path:
    text = json.dumps(identity, sort_keys=True)
    return folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:20]}.json"


def _kept(shape: Shape) -> Crossover | None:
    """What an earlier process measured; None without a file that can be read."""
    identity = _identity(shape)
    path = _path(identity)
    try:
        return _read(path, identity, shape)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, LookupError) as problem:
        _log.warning("auto: %s cannot be used and is measured anew: %s", path, problem)
        with contextlib.suppress(OSError):
            path.unlink()
        return None


def _read(path: Path, identity: dict[str, Any], shape: Shape) -> Crossover:
    held = json.loads(path.read_text(encoding="utf-8"))
    if held["shape"] != identity:
        raise ValueError("it is of another shape")
    length = held["crossover"]
    if length is not None and (type(length) is not int or length < SHORTEST):
        raise ValueError(f"crossover {length!r} is no integer ≥ {SHORTEST}")
    races = tuple(Race(int(n), float(a), float(b)) for n, a, b in held["races"])
    return Crossover(
        length, "kept", "", shape, races, bool(held["extrapolated"]), float(held["seconds"])
    )


def _keep(found: Crossover, again: bool) -> Crossover:
    """Writes the file, whole or not at all; what another process has written meanwhile counts."""
    assert found.shape is not None
    identity = _identity(found.shape)
    path = _path(identity)
    content = {
        "shape": identity,
        "crossover": found.length,
        "races": [list(race) for race in found.races],
        "extrapolated": found.extrapolated,
        "seconds": round(found.seconds, 3),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=1)
            if again:
                os.replace(name, path)
            else:
                os.link(name, path)  # fails where there is one, on systems that have it
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
    except FileExistsError:
        return _kept(found.shape) or found
    except OSError as problem:
        _log.warning("auto: %s holds for this process only: %s", path.parent, problem)
    return found


# ---- measuring -----------------------------------------------------------------------------


def _measured(shape: Shape, again: bool = False) -> Crossover:
    _identity(shape)  # compiles and loads kernels that were not there yet
    start = time.perf_counter()
    try:
        found = measure(shape)
    except torch.OutOfMemoryError as problem:
        return _declared(shape, f"measuring ran out of memory: {problem}")
    seconds = time.perf_counter() - start
    return _keep(
        Crossover(found.length, "measured", "", shape, found.races, found.extrapolated, seconds),
        again,
    )


def measure(shape: Shape) -> Crossing:
    """Races both ways from where the declared FLOPs cross; see `subquad.kernels.timing`.

    Times are medians of calls in turn on normally distributed q, k and v without padding: CUDA
    events on a GPU, the thread's own CPU time where torch has one thread, else time on the wall.
    """
    exact, other = (_build(one, shape) for one in ("softmax", shape.mechanism))
    clock = time.thread_time if shape.threads == 1 else time.perf_counter
    row = shape.batch * shape.heads * shape.head_dim * shape.dtype.itemsize
    longest = max(2 * SHORTEST, min(LONGEST, MOST_BYTES // row))

    def race(length: int) -> tuple[float, float]:
        runs = [_call(one, shape, length) for one in (exact, other)]
        for run in runs:
            run()  # what a first call prepares
        turn = functools.partial(in_turn, runs, shape.device, clock=clock)
        first, second = turn(rounds=1)
        clear = max(first, second) > CLEAR * min(first, second)
        if not clear or first + second < ROUND_SECONDS:
            first, second = turn(rounds=ROUNDS, most=MOST_ROUNDS, least=ROUND_SECONDS)
        return first, second

    start = max(SHORTEST, min(declared(shape) or longest, 1024, longest))
    with torch.cuda.device(shape.device) if shape.device.type == "cuda" else nullcontext():
        return crossing(
            race,
            Race(start, *race(start)),
            shortest=SHORTEST,
            longest=longest,
            patience=PATIENCE,
            precision=PRECISION,
        )


def _build(mechanism: str, shape: Shape) -> Mechanism:
    mech = registry.build(
        mechanism,
        head_dim=shape.head_dim,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        value_dim=shape.value_dim,
        embed_dim=shape.heads * shape.head_dim,
        max_length=LONGEST,
        device=shape.device,
        # Projections in half precision would only lose digits: sums are float32 anyway.
        dtype=shape.dtype if shape.dtype in (torch.float32, torch.float64) else torch.float32,
    ).train(shape.training)
    if mech.calibrates_for(mech.config):
        q, k, _ = _inputs(shape, 64)
        calibrated: Any = mech
        calibrated.calibrate(q, k)
    return mech


def _inputs(shape: Shape, length: int) -> list[Tensor]:
    """q, k and v of a call."""
    generator = torch.Generator().manual_seed(0)
    sizes = (
        (shape.heads, shape.head_dim),
        (shape.kv_heads, shape.head_dim),
        (shape.kv_heads, shape.value_dim),
    )
    return [
        torch.randn(shape.batch, heads, length, width, generator=generator)
        .to(shape.device, shape.dtype)
        .requires_grad_(shape.training)
        for heads, width in sizes
    ]


def _call(mech: Mechanism, shape: Shape, length: int) -> Callable[[], object]:
    q, k, v = _inputs(shape, length)
    mask = Mask(causal=shape.causal)
    if not shape.training:

        def forward() -> Tensor:
            with torch.no_grad():
                return mech(q, k, v, mask=mask)

        return forward
    cotangent = torch.ones(
        shape.batch, shape.heads, length, shape.value_dim, dtype=q.dtype, device=q.device
    )

    def step() -> object:
        with torch.enable_grad():
            return torch.autograd.grad(mech(q, k, v, mask=mask), (q, k, v), cotangent)

    return step


# ---- ahead of time -------------------------------------------------------------------------


@dataclass(frozen=True)
class Tuning:
    """What `tune` found; `print` it, or read its fields.

    Args:
        crossovers: one for each shape.
        folder: where they are kept.
    """

    crossovers: tuple[Crossover, ...]
    folder: Path

    @property
    def place(self) -> str:
        """Device, dtypes and sizes."""
        found = [one.shape.place for one in self.crossovers if one.shape is not None]
        return "; ".join(dict.fromkeys(found))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        rows = []
        for one in self.crossovers:
            assert one.shape is not None
            shape = asdict(one.shape)
            shape |= {
                "device": device_name(one.shape.device),
                "dtype": str(one.shape.dtype).removeprefix("torch."),
            }
            rows.append(
                {
                    **shape,
                    "crossover": one.length,
                    "declared": declared(one.shape),
                    "source": one.source,
                    "extrapolated": one.extrapolated,
                    "seconds": one.seconds,
                    "races": [race._asdict() for race in one.races],
                }
            )
        return {"folder": str(self.folder), "crossovers": rows}

    def __str__(self) -> str:
        lines = []
        for one in self.crossovers:
            assert one.shape is not None
            how = f"{one.source}, {one.seconds:.1f} s" + ", extrapolated" * one.extrapolated
            lines.append(
                f"{one.shape.mechanism}: {_since(one.length)} ({how}; FLOPs say "
                f"{declared(one.shape) or 'never'}) on {one.shape}"
            )
        return "\n".join(lines)


def tune(
    mechanism: str | Spec | Config | nn.Module = "auto",
    *,
    head_dim: int | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    value_dim: int | None = None,
    batch: int = 1,
    causal: bool | None = False,
    training: bool | None = False,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    again: bool = False,
    say: Callable[[str], None] | None = None,
) -> Tuning:
    """Measures from which length on a mechanism is faster than exact attention, on this device.

    What was measured before is read from the cache, see the module; ``mechanism="auto"`` finds
    it there. Each shape takes a few seconds, once; also with ``SUBQUAD_TUNE=off``.

    Args:
        mechanism: an ``auto``, or what is to run above the crossover: a name, spec or config; or
            a module, whose ``auto`` mechanisms are tuned with their own sizes and device.
        head_dim, num_heads, num_kv_heads, value_dim: D, H, Hkv and V; default 64, 8, H and D.
        batch: B; classes are 1, 4 and 16, as far as a device needs that many to be busy.
        causal, training: direction, and whether a backward pass counts; None: both.
        dtype: of q, k and v; default float32, or that of the module's parameters.
        device: default the CPU, or that of the module's parameters.
        again: measure what is known, too.
        say: told each shape before it is looked at.

    Raises:
        OptionError: wrong arguments, sizes beside a module, or no ``auto`` in it.
        UnknownNameError: unknown mechanism or option.

    Example:
        >>> import subquad as sq
        >>> found = sq.tune("performer(features=16)", head_dim=8, num_heads=2)
        >>> found.crossovers[0].length >= 16, found.crossovers[0].shape.causal
        (True, False)
    """
    from subquad.attention.hybrid.auto import Auto, AutoConfig  # late: it imports this module

    problems = list(integer_problem("batch", batch, 1))
    asked: dict[str, Any] = {"causal": causal, "training": training}
    for name, value in asked.items():
        if value is not None and not isinstance(value, bool):
            problems.append(f"{name}={value!r} must be True, False or None for both")
    if dtype not in (None, *FLOATS):
        problems.append(f"dtype={dtype!r} must be one of {', '.join(map(str, FLOATS))}")
    sizes: dict[str, Any] = {
        "head_dim": head_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads,
        "value_dim": value_dim, "device": device,
    }  # fmt: skip
    given = [name for name, size in sizes.items() if size is not None]
    if given and isinstance(mechanism, nn.Module):
        problems.append(f"{', '.join(given)} given beside a module, which has its own")
    if problems:
        raise OptionError("tune: " + "; ".join(problems))
    if isinstance(mechanism, nn.Module):
        autos = [one for one in mechanism.modules() if isinstance(one, Auto)]
        if not autos:
            raise OptionError(
                f"tune: {type(mechanism).__name__} contains no mechanism 'auto'; "
                "convert(model, 'auto') puts it there"
            )
        tensor = next(mechanism.parameters(), torch.zeros(()))
        where, kind = tensor.device, tensor.dtype if dtype is None else dtype
    else:
        found, config = registry.resolve(mechanism)
        config = config if found is Auto else AutoConfig(linear=config)
        where, kind = torch.empty(0, device=device).device, dtype or torch.float32
        sizes |= {"head_dim": head_dim or 64, "num_heads": num_heads or 8}
        autos = [cast("Auto", registry.build(config, **sizes))]
    shapes: list[Shape] = []
    for one in autos:
        both: Support = one.capabilities.causal
        ways = [False, True] if causal is None and both else [bool(causal)]
        steps = [False, True] if training is None else [training]
        shapes += [one.shape(where, kind, None, batch, way, step) for way in ways for step in steps]
    crossovers = []
    for shape in dict.fromkeys(shapes):
        if say is not None:
            say(f"{shape.mechanism}: {shape}")
        crossovers.append(_tuned(shape, again))
    return Tuning(tuple(crossovers), folder())


def _tuned(shape: Shape, again: bool) -> Crossover:
    with _lock:
        found = None if again else _apart(lambda: _kept(shape))
        if found is None:
            found = _apart(lambda: _measured(shape, again))
        _known[shape] = found
    return found
