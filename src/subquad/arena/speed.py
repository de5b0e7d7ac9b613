"""`subquad bench speed`: time and memory of attention, next to SDPA and performer-pytorch.

Every registered mechanism that runs without data is timed, on one thread, in one process,
turn by turn with its rivals. Times are CPU times of the process, all its threads together: on
an idle machine what the clock shows, on a busy one without the waiting. No time is shown
before the same call was checked, in the same run, against a naive computation in float64.

    forward         one call under `torch.no_grad`
    training step   forward and backward, gradients to q, k and v
    memory          of a training step in a process of its own: peak resident set less that
                    at the start, q, k, v and the output's gradient being there already

Shares of the GEMM peak count useful arithmetic: the mechanism's declared FLOPs of a
bidirectional forward call, three times that in a training step (the features once more, two
products for each one forward; 3.5 times for softmax), half of it under a causal mask where
the cost is quadratic.

**Bound of the check.** ε = 2^-24 is float32's rounding. A feature or weight is exp of a
D-term dot product; its error in the exponent is about √D·ε·|x||ω|, √64·6e-8·2.8·8·1.44 ≈ 1.6e-5
at D = 64 with N(0, 1) inputs, a relative error of exp. Positive sums keep it, and the two
sides have independent errors, so outputs are within 1e-4, four standard deviations. Gradients
subtract the row mean from each value's contribution: the difference is as large as its terms
where values are N(0, 1), so the same bound is asked of them. Errors are ‖a − b‖ / ‖b‖.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import io
import itertools
import json as json_module
import math
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from subquad import registry
from subquad.arena.figures import COLOURS, figure, label_ends
from subquad.arena.machine import machine, machine_line, peak_of
from subquad.attention.base import Absent, Mechanism
from subquad.errors import CalibrationError, UnsupportedError

__all__ = [
    "FLOORS",
    "Check",
    "Contender",
    "Floor",
    "Sizes",
    "check",
    "contenders",
    "machine",
    "measure",
    "measure_times",
    "peak_memory",
    "run",
]

BOUND = 1e-4
"""Largest relative error of outputs and gradients; derived in the module's docstring."""
SDPA, PEER, LOCAL_PEER = "SDPA", "performer-pytorch", "local-attention"
PEERS = (PEER, LOCAL_PEER)
WINDOW = 256
"""Keys on each side that local-attention and its counterpart read."""

Call = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
Key = tuple[str, bool, bool, int]
"""(contender, causal, training, length)."""


@dataclass(frozen=True)
class Sizes:
    """One head layout for every contender: B=1, H heads, D = V, M features, float32."""

    heads: int = 8
    head_dim: int = 64
    features: int = 128

    def inputs(self, length: int, seed: int = 0) -> list[Tensor]:
        """q, k, v and the output's gradient, (1, H, L, D) of N(0, 1)."""
        generator = torch.Generator().manual_seed(seed)
        shape = (1, self.heads, length, self.head_dim)
        return [torch.randn(shape, generator=generator) for _ in range(4)]


@dataclass(frozen=True)
class Contender:
    """One implementation that is timed.

    Args:
        name: for people; a registered name is that mechanism's.
        call: (q, k, v, causal) → output.
        naive: the same in float64 by a materialised matrix.
        against: what `naive` is, for people.
        flops: of one forward call over a length, all heads; None if nobody counted.
        causal: why there is no causal form, or None.
        limit: seconds; a call that would take longer is left out.
        longest: greatest length under a (causal, training) where memory sets one, with why.
        check_length: tokens of the correctness check.
        memory_limit: seconds a training step may take to have its memory measured.
    """

    name: str
    call: Call
    naive: Call
    against: str
    flops: Callable[[int], float] | None = None
    causal: str | None = None
    limit: float = 2.0
    longest: dict[tuple[bool, bool], tuple[int, str]] = field(default_factory=dict)
    check_length: int = 601
    memory_limit: float = 15.0

    @property
    def quadratic(self) -> bool:
        """Whether the cost more than doubles (nearly quadruples) with the length."""
        return self.flops is not None and self.flops(2048) > 3 * self.flops(1024)


# ---- naive computations in float64 ---------------------------------------------------------


def _mix(weights: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Normalised positive weights (..., L, S) times values."""
    weights = weights.tril() if causal else weights
    return weights / weights.sum(-1, keepdim=True) @ v


def _naive_softmax(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    logits = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return _mix((logits - logits.amax(-1, keepdim=True).detach()).exp(), v, causal)


def _naive_features(log_q: Tensor, log_k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """φ materialised from its logarithms; maxima of a row of q and of all k cancel."""
    phi_q = (log_q - log_q.amax(-1, keepdim=True).detach()).exp()
    phi_k = (log_k - log_k.amax((-1, -2), keepdim=True).detach()).exp()
    return _mix(phi_q @ phi_k.transpose(-1, -2), v, causal)


def _naive_performer(mechanism: Any) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        omega = mechanism.projection.double().transpose(-1, -2)
        x, y = (t * q.shape[-1] ** -0.25 for t in (q, k))
        log_q, log_k = (t @ omega - 0.5 * t.square().sum(-1, keepdim=True) for t in (x, y))
        return _naive_features(log_q, log_k, v, causal)

    return call


def _naive_gaussian(mechanism: Any) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        anchors = mechanism.anchors.double()[:, None]
        precision = 0.5 * mechanism.config.sigma**-2
        log_q, log_k = (-(t.unsqueeze(-2) - anchors).square().sum(-1) * precision for t in (q, k))
        return _naive_features(log_q, log_k, v, causal)

    return call


def _naive_additive(mechanism: Any) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        w_q, w_k, bias, w = (
            parameter.detach().double()
            for parameter in (
                mechanism.query_weight,
                mechanism.key_weight,
                mechanism.bias,
                mechanism.score_weight,
            )
        )
        left = q @ w_q.transpose(-1, -2) + bias[:, None]
        right = k @ w_k.transpose(-1, -2)
        units = (left[..., :, None, :] + right[..., None, :, :]).tanh()
        return _mix((units @ w[:, None, :, None])[..., 0].exp(), v, causal)

    return call


def _own_float64(mechanism: Mechanism) -> Call:
    wide = copy.deepcopy(mechanism).double()

    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return wide(q, k, v, causal=causal)

    return call


def _windowed(window: int | tuple[int, int], dilation: int = 1) -> Call:
    left, right = (window, window) if isinstance(window, int) else window

    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
        near = (j >= i - left * dilation) & (j <= i + (0 if causal else right) * dilation)
        near = near & ((i - j) % dilation == 0)
        logits = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        return torch.softmax(logits.masked_fill(~near, -math.inf), -1) @ v

    return call


NAIVE: dict[str, tuple[Callable[[Any], Call], str, int]] = {
    "softmax": (lambda _: _naive_softmax, "naive softmax, float64", 601),
    "additive": (_naive_additive, "naive additive scores, float64", 83),
    "performer": (_naive_performer, "materialised φ with the same ω, float64", 601),
    "gaussian": (_naive_gaussian, "materialised φ, float64", 211),
    "local": (
        lambda mechanism: _windowed(mechanism.config.window, mechanism.config.dilation),
        "naive windowed softmax, float64",
        601,
    ),
}
"""Naive computation of a registered mechanism, what it is, and the length it is made at.
A mechanism without a line here is checked against its own float64 run, and the table says so;
its formula is checked by the laws in the tests."""


# ---- who takes part ------------------------------------------------------------------------


def contenders(
    sizes: Sizes,
    names: Iterable[str] | None = None,
    *,
    peer: bool = True,
    max_length: int = 2**16,
) -> tuple[list[Contender], list[str]]:
    """Rivals and every registered mechanism that runs without data; and who is left out, why.

    Args:
        sizes: the head layout.
        names: registered names or specs; by default all names, and what the floors name.
        peer: whether other libraries take part, where they are installed.
        max_length: for mechanisms that need to know it.
    """
    found = [
        Contender(
            SDPA,
            lambda q, k, v, causal: functional.scaled_dot_product_attention(
                q, k, v, is_causal=causal
            ),
            _naive_softmax,
            "naive softmax, float64",
            flops=lambda n: 4.0 * sizes.heads * n * n * sizes.head_dim,
            limit=4.0,
        )
    ]
    left_out: list[str] = []
    for other in (_peer(sizes), _local_peer(sizes)) if peer else ():
        if isinstance(other, str):
            left_out.append(other)
        else:
            found.append(other)
    everyone = dict.fromkeys([*registry.MECHANISMS, *(floor.ours for floor in FLOORS)])
    for name in everyone if names is None else names:
        try:
            found.append(_registered(name, sizes, max_length))
        except (UnsupportedError, CalibrationError) as error:
            left_out.append(f"{name}: {error}")
    return found, left_out


def _registered(name: str, sizes: Sizes, max_length: int) -> Contender:
    about = registry.describe(name)
    if not about.capabilities.qkv:
        raise UnsupportedError(name, "q, k and v: it mixes tokens")
    free = isinstance(getattr(about.config, "features", None), int) and name == about.name
    options = {"features": sizes.features} if free else {}
    mechanism = registry.build(
        name,
        head_dim=sizes.head_dim,
        num_heads=sizes.heads,
        value_dim=sizes.head_dim,
        embed_dim=sizes.heads * sizes.head_dim,
        max_length=max_length,
        **options,
    )
    have = mechanism.capabilities
    with torch.no_grad():  # what needs data first says so here
        q, k, v, _ = sizes.inputs(64)
        mechanism(q, k, v)
    build, against, check_length = NAIVE.get(
        about.name, (_own_float64, "its own float64 run; formula checked by the tests", 601)
    )
    cost = registry.describe(mechanism.config)

    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return mechanism(q, k, v, causal=causal)

    return Contender(
        name,
        call,
        build(mechanism),
        against,
        flops=lambda n: sizes.heads * cost.flops(n, sizes.head_dim, sizes.head_dim),
        causal=have.causal.reason if isinstance(have.causal, Absent) else None,
        check_length=check_length,
    )


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def _peer(sizes: Sizes) -> Contender | str:
    """performer-pytorch's FastAttention, or why it is not here."""
    try:
        with _silence():  # it prints on import and construction
            package: Any = importlib.import_module("performer_pytorch.performer_pytorch")
            torch.manual_seed(0)
            plain = package.FastAttention(sizes.head_dim, sizes.features, causal=False)
            causal_one = package.FastAttention(sizes.head_dim, sizes.features, causal=True)
    except ImportError as error:
        return f"{PEER}: not installed ({error}); pip install 'subquad[peers]'"
    causal_one.load_state_dict(plain.state_dict())
    # its CUDA kernel, where somebody has it, does not run on a CPU
    causal_one.causal_linear_fn = package.causal_linear_attention_noncuda
    omega = plain.projection_matrix

    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return (causal_one if causal else plain)(q, k, v)

    def naive(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        """Its own kernel: 1e-4 is added to every feature, 1e-6 to causal normalisers."""
        phi = []
        for x, axes in ((q, (-1,)), (k, (-1, -2))):
            x = x * q.shape[-1] ** -0.25
            u = x @ omega.double().T
            top = u.amax(axes, keepdim=True).detach()
            phi.append((u - top - 0.5 * x.square().sum(-1, keepdim=True)).exp() + 1e-4)
        phi_q, phi_k = (x * omega.shape[0] ** -0.5 for x in phi)
        weights = phi_q @ phi_k.transpose(-1, -2)
        if not causal:
            return _mix(weights, v, False)
        weights = weights.tril()
        return weights @ v / (weights.sum(-1, keepdim=True) + 1e-6 * phi_q.sum(-1, keepdim=True))

    products = "its causal form keeps k vᵀ of every token"
    flops = 8.0 * sizes.heads * sizes.features * sizes.head_dim
    return Contender(
        PEER,
        call,
        naive,
        "materialised φ with its ω and its epsilons, float64",
        flops=lambda n: flops * n,
        limit=4.0,
        longest={(True, False): (8192, products), (True, True): (2048, products)},
    )


def _local_peer(sizes: Sizes) -> Contender | str:
    """local-attention's LocalAttention, exact to the token, or why it is not here."""
    try:
        with _silence():
            package: Any = importlib.import_module("local_attention")
    except ImportError as error:
        return f"{LOCAL_PEER}: not installed ({error}); pip install 'subquad[peers]'"
    both = {
        causal: package.LocalAttention(
            dim=sizes.head_dim, window_size=WINDOW, causal=causal, look_backward=1,
            look_forward=0 if causal else 1, exact_windowsize=True, autopad=True,
            use_rotary_pos_emb=False,
        ).eval()
        for causal in (False, True)
    }  # fmt: skip

    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return both[causal](q, k, v)

    return Contender(
        LOCAL_PEER,
        call,
        _windowed(WINDOW),
        "naive windowed softmax, float64",
        flops=lambda n: 4.0 * sizes.heads * n * 3 * WINDOW * sizes.head_dim,
        limit=4.0,
        check_length=3 * WINDOW,  # at other lengths its bidirectional form reads its padding
    )


# ---- correctness, before anything else -----------------------------------------------------


@dataclass(frozen=True)
class Check:
    """Errors of a contender against its naive computation; no time is shown unless `ok`."""

    name: str
    causal: bool
    against: str
    length: int
    forward: float
    gradient: float
    bound: float = BOUND
    problem: str = ""

    @property
    def ok(self) -> bool:
        """Whether both errors are within the bound (NaN is not)."""
        return not self.problem and self.forward <= self.bound and self.gradient <= self.bound

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, which has no NaN."""
        errors = {
            part: value if math.isfinite(value) else None
            for part, value in (("forward", self.forward), ("gradient", self.gradient))
        }
        return {**dataclasses.asdict(self), **errors, "ok": self.ok}


def _relative(a: Tensor, b: Tensor) -> float:
    size = b.norm()
    return float((a.double() - b).norm() / (size if size > 0 else 1.0))


def _gradients(out: Tensor, leaves: Sequence[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    """With respect to q, k and v; zero where a mechanism does not read one of them."""
    return torch.autograd.grad(out, leaves, grad, allow_unused=True, materialize_grads=True)


def check(contender: Contender, sizes: Sizes, causal: bool) -> Check:
    """Compares output and gradients with the naive computation."""
    inputs = sizes.inputs(contender.check_length, seed=1)
    results = []
    try:
        for call, dtype in ((contender.call, torch.float32), (contender.naive, torch.float64)):
            q, k, v, grad = (t.to(dtype) for t in inputs)
            leaves = [t.requires_grad_() for t in (q, k, v)]
            out = call(q, k, v, causal)
            results.append([out.detach(), *_gradients(out, leaves, grad)])
    except RuntimeError as error:  # a mechanism that raises here has failed its check
        return Check(
            contender.name, causal, contender.against, contender.check_length,
            math.nan, math.nan, problem=str(error),
        )  # fmt: skip
    errors = [_relative(a, b) for a, b in zip(*results, strict=True)]
    return Check(
        contender.name,
        causal,
        contender.against,
        contender.check_length,
        errors[0],
        max(errors[1:]) if all(map(math.isfinite, errors)) else math.nan,
    )


# ---- time ----------------------------------------------------------------------------------


def _leaves(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same values as fresh leaves that want gradients."""
    return (
        q.detach().requires_grad_(),
        k.detach().requires_grad_(),
        v.detach().requires_grad_(),
    )


def _function(contender: Contender, inputs: list[Tensor], causal: bool, training: bool) -> Any:
    q, k, v, grad = inputs

    def forward() -> None:
        with torch.no_grad():
            contender.call(q, k, v, causal)

    def step() -> None:
        leaves = _leaves(q, k, v)
        _gradients(contender.call(*leaves, causal), leaves, grad)

    return step if training else forward


def _interleave(
    functions: dict[Key, Callable[[], None]], rounds: int, budget: float, least: int = 3
) -> dict[Key, list[float]]:
    """CPU seconds of each call, taken in turns; at least `least` rounds, then until `budget`."""
    times: dict[Key, list[float]] = {key: [] for key in functions}
    began = time.perf_counter()
    for turn in range(rounds):
        if turn >= least and time.perf_counter() - began > budget:
            break
        for key, function in functions.items():
            start = time.process_time()
            function()
            times[key].append(time.process_time() - start)
    return times


def _ratio(theirs: Sequence[float] | None, ours: Sequence[float] | None) -> float | None:
    """Median over rounds of theirs / ours: the two calls of a round follow each other."""
    if not theirs or not ours:
        return None
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


def gemm_peak(seconds: float = 0.5) -> float:
    """The best FLOP/s of a 1024³ float32 matrix product, the machine's practical peak."""
    a, b = torch.randn(2, 1024, 1024)
    best, began = math.inf, time.perf_counter()
    out = a @ b
    while time.perf_counter() - began < seconds:
        start = time.process_time()
        torch.mm(a, b, out=out)
        best = min(best, time.process_time() - start)
    return 2 * 1024**3 / best


def measure_times(
    found: Sequence[Contender],
    sizes: Sizes,
    lengths: Sequence[int],
    checks: Sequence[Check],
    *,
    wanted: Callable[[Key], bool] = lambda key: True,
    rounds: int = 7,
    budget: float = 8.0,
    least: int = 3,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[dict[Key, list[float]], list[str]]:
    """Interleaved times of every contender whose check was ok, and what was left out, why.

    Args:
        found: contenders.
        sizes: the head layout.
        lengths: ascending.
        checks: of the same contenders; one that failed, or is missing, is not timed.
        wanted: chooses among (contender, causal, training, length).
        rounds, budget, least: turns of a cell: at most `rounds`, and no further one after
            `budget` seconds, but at least `least`.
        say: progress.
    """
    passed = {(c.name, c.causal) for c in checks if c.ok}
    failed = [(c.name, c.causal) for c in checks if not c.ok]
    left_out = [f"{name}, {_mask(causal)}: failed correctness" for name, causal in failed]
    times: dict[Key, list[float]] = {}
    gone: set[tuple[str, bool, bool]] = set()
    for length in lengths:
        inputs = sizes.inputs(length)
        for causal in (False, True):
            for training in (False, True):
                cell: dict[Key, Callable[[], None]] = {}
                for contender in found:
                    kind = (contender.name, causal, training)
                    key = (*kind, length)
                    if kind in gone or kind[:2] not in passed or not wanted(key):
                        continue
                    reason = _too_long(contender, causal, training, length, times)
                    if reason:
                        gone.add(kind)
                        left_out.append(
                            f"{contender.name}, {_mask(causal)} {_step(training)}, "
                            f"from {length} tokens: {reason}"
                        )
                        continue
                    cell[key] = _function(contender, inputs, causal, training)
                if not cell:
                    continue
                say(f"{length} tokens, {_mask(causal)}, {_step(training)}")
                small = sizes.inputs(128)
                for key in cell:  # first calls set things up
                    contender = next(c for c in found if c.name == key[0])
                    _function(contender, small, causal, training)()
                times |= _interleave(cell, rounds, budget, least)
    return times, left_out


def _too_long(
    contender: Contender, causal: bool, training: bool, length: int, times: dict[Key, list[float]]
) -> str:
    longest = contender.longest.get((causal, training))
    if longest and length > longest[0]:
        return longest[1]
    kind = (contender.name, causal, training)
    before = [key for key in times if key[:3] == kind]
    if before:
        last = max(before, key=lambda key: key[3])
        growth = (length / last[3]) ** (2 if contender.quadratic else 1)
        expected = statistics.median(times[last]) * growth
    else:
        # a training step costs 3 to 4 forward calls
        forward = times.get((contender.name, causal, False, length))
        expected = 3.5 * statistics.median(forward) if training and forward else 0.0
    if expected > contender.limit:
        return f"a call would take about {expected:.1f} s (limit {contender.limit:g} s)"
    return ""


# ---- memory --------------------------------------------------------------------------------


def peak_memory(name: str, causal: bool, length: int, sizes: Sizes) -> float:
    """Peak memory of one training step beyond its inputs, in units of |q|, in a child process.

    Raises:
        RuntimeError: if the child fails, with what it wrote.
    """
    return float(_in_child(sizes, kind="memory", name=name, causal=causal, length=length))


def fresh_times(ours: str, floor: Floor, sizes: Sizes, rounds: int) -> list[list[float]]:
    """CPU seconds of our and the rival's call, interleaved in one process of their own.

    Large temporaries cost page faults or do not, depending on what the allocator has kept
    from earlier calls of the process; a process of its own makes that state the same each
    time: a new user's.

    Raises:
        RuntimeError: if the child fails, with what it wrote.
    """
    found: list[list[float]] = _in_child(
        sizes, kind="times", name=ours, rival=floor.rival, causal=floor.causal,
        training=floor.training, length=floor.length, rounds=rounds,
    )  # fmt: skip
    return found


def _in_child(sizes: Sizes, **job: Any) -> Any:
    job["sizes"] = dataclasses.asdict(sizes)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-W", "ignore", "-m", "subquad.arena.speed"]
    done = subprocess.run(
        command, input=json_module.dumps(job), capture_output=True, text=True, env=environment
    )
    if done.returncode:
        raise RuntimeError(f"measuring failed in the child process:\n{done.stderr}")
    return json_module.loads(done.stdout)["found"]


def _child() -> None:
    job = json_module.loads(sys.stdin.read())
    torch.set_num_threads(1)
    sizes = Sizes(**job["sizes"])
    wanted = [job["name"]] + ([job["rival"]] if job["kind"] == "times" else [])
    names = [name for name in wanted if name not in (SDPA, *PEERS)]
    everyone, _ = contenders(sizes, names, peer=any(name in PEERS for name in wanted))
    found = [next(c for c in everyone if c.name == name) for name in wanted]
    answer = (
        _times_here(found, sizes, job)
        if job["kind"] == "times"
        else _memory_here(found[0], sizes, job)
    )
    sys.stdout.write(json_module.dumps({"found": answer}))


def _times_here(found: list[Contender], sizes: Sizes, job: dict[str, Any]) -> list[list[float]]:
    causal, training, length = job["causal"], job["training"], job["length"]
    for contender in found:
        _function(contender, sizes.inputs(128), causal, training)()
    inputs = sizes.inputs(length)
    cell = {
        (c.name, causal, training, length): _function(c, inputs, causal, training) for c in found
    }
    _interleave(cell, 1, 0.0)  # first calls map memory
    return list(_interleave(cell, job["rounds"], 60.0).values())


def _memory_here(contender: Contender, sizes: Sizes, job: dict[str, Any]) -> float:
    causal = job["causal"]
    _function(contender, sizes.inputs(1024), causal, True)()
    q, k, v, grad = sizes.inputs(job["length"])

    def step() -> tuple[Tensor, ...]:
        leaves = _leaves(q, k, v)
        out = contender.call(*leaves, causal)
        return out, *_gradients(out, leaves, grad)

    return peak_of(step) / (q.numel() * q.element_size())


# ---- floors --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Floor:
    """A promise about `ours`: a least speed-up over `rival`, or a greatest memory."""

    causal: bool
    training: bool
    length: int
    value: float
    rival: str | None
    ours: str = "performer"

    @property
    def text(self) -> str:
        """The promise in words."""
        name = "" if self.ours == "performer" else f"{self.ours} "
        where = f"{name}{_mask(self.causal)} {_step(self.training)}, {self.length // 1024}k"
        if self.rival is None:
            return f"{where}: at most {self.value:g} × |q| beyond inputs"
        return f"{where}: at least {self.value:g}× faster than {self.rival}"


FLOORS = (
    Floor(False, False, 4096, 10.0, SDPA),
    Floor(False, False, 4096, 2.0, PEER),
    Floor(False, False, 16384, 3.5, PEER),
    Floor(False, True, 16384, 3.5, PEER),
    Floor(True, False, 4096, 3.5, SDPA),
    Floor(True, False, 2048, 15.0, PEER),  # its causal form without a CUDA kernel
    Floor(False, True, 65536, 4.5, None),
    Floor(True, True, 65536, 5.5, None),
    Floor(True, False, 8192, 3.0, LOCAL_PEER, f"local(window={WINDOW})"),
    Floor(True, False, 8192, 5.0, SDPA, f"local(window={WINDOW})"),
    Floor(True, False, 16384, 3.0, SDPA, "reformer"),
    Floor(True, False, 16384, 3.0, SDPA, "routing"),
)
"""What the project promises on one thread; of `performer` with M=128."""


def _floors(
    fresh: Callable[[Floor], list[list[float]] | None], memory: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """What was measured of each promise; `fresh` times ours and the rival's, or cannot."""
    rows = []
    for floor in FLOORS:
        measured: float | None = None
        if floor.rival is None:
            for row in memory:
                if (row["name"], row["causal"], row["length"]) == (
                    floor.ours, floor.causal, floor.length,
                ):  # fmt: skip
                    measured = row["units"]
            ok = None if measured is None else measured <= floor.value
        else:
            pair = fresh(floor)
            measured = None if pair is None else _ratio(pair[1], pair[0])
            ok = None if measured is None else measured >= floor.value
        rows.append({"floor": floor.text, "wanted": floor.value, "measured": measured, "ok": ok})
    return rows


# ---- a run ---------------------------------------------------------------------------------


def run(out: Path, quick: bool, json: bool, echo: Callable[[str], None]) -> dict[str, Any]:
    """Runs the benchmark and writes ``speed.json``, ``speed.md`` and ``speed.png`` to `out`.

    Args:
        out: folder, made if missing.
        quick: only the cells that decide a floor and a few short lengths, in half a minute.
        json: the caller shows the result as JSON: echo progress, but no tables.
        echo: takes progress and tables, line by line.

    Returns:
        Everything that was measured, JSON-able.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        result = measure(Sizes(), say=echo, **_plan(quick))
    finally:
        torch.set_num_threads(threads)
    result["quick"] = quick
    text = table(result)
    (out / "speed.json").write_text(json_module.dumps(result, indent=1) + "\n", encoding="utf-8")
    (out / "speed.md").write_text(text, encoding="utf-8")
    try:
        draw(result, out / "speed.png")
    except ImportError as error:
        echo(f"no speed.png: {error}; pip install 'subquad[arena]'")
    if not json:
        echo(text)
    return result


def _plan(quick: bool) -> dict[str, Any]:
    """Arguments of `measure` beyond the sizes."""
    if not quick:
        return {"lengths": tuple(2**n for n in range(8, 16)), "timing": {"rounds": 9}}

    def wanted(key: Key) -> bool:
        return key[3] == 512 and key[0] not in ("additive", "location", *PEERS)

    return {
        "lengths": (512, 16384),
        "timing": {"rounds": 3, "least": 2, "budget": 1.0, "wanted": wanted},
        "memory_of": ("performer",),
        "floor_rounds": 3,
        "left_out": ("quick run: everything but the floors and 512 tokens",),
    }


def measure(
    sizes: Sizes,
    lengths: Sequence[int],
    *,
    names: Iterable[str] | None = None,
    timing: dict[str, Any] | None = None,
    memory_length: int = 2**16,
    memory_of: Sequence[str] | None = None,
    floor_rounds: int = 9,
    left_out: Sequence[str] = (),
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Checks, times and memory of all contenders, JSON-able.

    Args:
        sizes: the head layout.
        lengths: ascending.
        names: registered mechanisms; all by default.
        timing: further arguments of `measure_times`.
        memory_length: tokens of the training step whose memory is measured.
        memory_of: contenders whose memory is measured; all by default.
        floor_rounds: turns of each floor's comparison.
        left_out: lines for the list of what was left out.
        say: progress.
    """
    started, worked = time.perf_counter(), time.process_time()
    found, skipped = contenders(sizes, names)
    notes = [*left_out, *skipped]
    peak = gemm_peak()
    checks = []
    for contender in found:
        for causal in (False, True):
            if causal and contender.causal:
                notes.append(f"{contender.name}, causal: {contender.causal}")
                continue
            say(f"checking {contender.name}, {_mask(causal)}")
            checks.append(check(contender, sizes, causal))
    times, skipped = measure_times(found, sizes, lengths, checks, say=say, **(timing or {}))
    notes += skipped
    memory = []
    for contender in found:
        if memory_of is not None and contender.name not in memory_of:
            continue
        for causal in (False, True):
            if not any(c.ok for c in checks if (c.name, c.causal) == (contender.name, causal)):
                continue
            kind = f"memory of {contender.name}, {_mask(causal)}, {memory_length} tokens"
            reason = _too_heavy(contender, causal, memory_length, times)
            if reason:
                notes.append(f"{kind}: {reason}")
                continue
            say(kind)
            units = peak_memory(contender.name, causal, memory_length, sizes)
            where = {"name": contender.name, "causal": causal, "length": memory_length}
            memory.append({**where, "units": units})
    present = {(c.name, c.causal) for c in checks if c.ok}

    def fresh(floor: Floor) -> list[list[float]] | None:
        both = {(floor.ours, floor.causal), (floor.rival, floor.causal)}
        if not both <= present or max(lengths) < floor.length:
            return None
        say(f"floor: {floor.text}")
        return fresh_times(floor.ours, floor, sizes, floor_rounds)

    peak = max(peak, gemm_peak())
    return {
        "benchmark": "speed",
        "machine": machine(threads=1),
        "settings": {"batch": 1, **dataclasses.asdict(sizes), "dtype": "float32", "seed": 0},
        "gemm_gflops": peak / 1e9,
        "floors": _floors(fresh, memory),
        "checks": [c.to_dict() for c in checks],
        "times": _rows(times, found, peak),
        "crossover": _crossovers(times),
        "memory": memory,
        "left_out": notes,
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - worked,
    }


def _too_heavy(
    contender: Contender, causal: bool, length: int, times: dict[Key, list[float]]
) -> str:
    longest = contender.longest.get((causal, True))
    if longest and length > longest[0]:
        return longest[1]
    kind = (contender.name, causal, True)
    last = max((key for key in times if key[:3] == kind), key=lambda key: key[3], default=None)
    if last is None:
        return ""
    growth = (length / last[3]) ** (2 if contender.quadratic else 1)
    expected = statistics.median(times[last]) * growth
    return f"a step would take about {expected:.0f} s" if expected > contender.memory_limit else ""


def _rows(
    times: dict[Key, list[float]], found: Sequence[Contender], peak: float
) -> list[dict[str, Any]]:
    flops = {c.name: c.flops for c in found}
    quadratic = {c.name: c.quadratic for c in found}
    rows = []
    for (name, causal, training, length), seconds in times.items():
        median = statistics.median(seconds)
        row: dict[str, Any] = {
            "name": name, "causal": causal, "training": training, "length": length,
            "ms": median * 1e3, "ms_min": min(seconds) * 1e3, "ms_max": max(seconds) * 1e3,
            "rounds": len(seconds),
        }  # fmt: skip
        for rival, label in ((SDPA, "times_faster_than_sdpa"), (PEER, "times_faster_than_peer")):
            row[label] = _ratio(times.get((rival, causal, training, length)), seconds)
        count = flops[name]
        if count is not None:
            work = count(length) * (0.5 if causal and quadratic[name] else 1.0)
            factor = 3.5 if name in (SDPA, "softmax") else 3.0
            row["gemm_share"] = work * (factor if training else 1.0) / (median * peak)
        rows.append(row)
    return rows


def _crossovers(times: dict[Key, list[float]]) -> list[dict[str, Any]]:
    """Length from which a contender stays faster than SDPA, interpolated in log-log."""
    rows = []
    kinds = dict.fromkeys(key[:3] for key in times if key[0] not in (SDPA, "softmax"))
    for name, causal, training in kinds:
        gaps = []
        for length in sorted({key[3] for key in times}):
            ours = times.get((name, causal, training, length))
            theirs = times.get((SDPA, causal, training, length))
            if ours and theirs:
                ratio = _ratio(ours, theirs)
                assert ratio is not None
                gaps.append((math.log(length), math.log(ratio)))
        at: float | None = None
        note = "not reached"
        if gaps and gaps[-1][1] < 0:
            at, note = math.exp(gaps[0][0]), "at the shortest length already"
            for (x0, y0), (x1, y1) in itertools.pairwise(gaps):
                if y0 >= 0 > y1:
                    at, note = math.exp(x0 + (x1 - x0) * y0 / (y0 - y1)), ""
        rows.append(
            {"name": name, "causal": causal, "training": training, "length": at, "note": note}
        )
    return rows


# ---- table and picture ---------------------------------------------------------------------


def _mask(causal: bool) -> str:
    return "causal" if causal else "bidirectional"


def _step(training: bool) -> str:
    return "training step" if training else "forward"


def _cell(value: float | None, form: str = "{:.1f}×") -> str:
    return "–" if value is None else form.format(value)


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    s = result["settings"]
    lines = [
        "# Speed and memory of attention",
        "",
        f"{machine_line(result['machine'])}. B=1, H={s['heads']}, D={s['head_dim']}, "
        f"M={s['features']}, {s['dtype']}; CPU time, "
        f"medians of interleaved calls, ratios round by round; "
        f"GEMM peak {result['gemm_gflops']:.0f} GFLOP/s"
        + (" (quick run: few rounds)." if result.get("quick") else "."),
        "",
        "## Floors",
        "",
        "Each comparison interleaved in a process of its own.",
        "",
        "| floor | measured | ok |",
        "|---|---:|---|",
    ]
    for row in result["floors"]:
        form = "{:.2f} × \\|q\\|" if "at most" in row["floor"] else "{:.2f}×"
        ok = {True: "yes", False: "**no**", None: "not measured"}[row["ok"]]
        text = row["floor"].replace("|", "\\|")
        lines.append(f"| {text} | {_cell(row['measured'], form)} | {ok} |")
    lines += [
        "",
        "## Correctness, checked before timing",
        "",
        "| | mask | against | tokens | output error | gradient error | ok |",
        "|---|---|---|---:|---:|---:|---|",
    ]
    for row in result["checks"]:
        ok = "yes" if row["ok"] else f"**failed correctness** {row['problem']}".strip()
        lines.append(
            f"| {row['name']} | {_mask(row['causal'])} | {row['against']} | {row['length']} "
            f"| {_cell(row['forward'], '{:.1e}')} | {_cell(row['gradient'], '{:.1e}')} | {ok} |"
        )
    lines += ["", f"Bound {BOUND:g}, relative, derived in `subquad.arena.speed`.", ""]
    for training in (False, True):
        for causal in (False, True):
            kind = (training, causal)
            rows = [r for r in result["times"] if (r["training"], r["causal"]) == kind]
            if not rows:
                continue
            lines += [
                f"## {_step(training).capitalize()}, {_mask(causal)}",
                "",
                f"| tokens | | ms | faster than SDPA | faster than {PEER} | of GEMM peak |",
                "|---:|---|---:|---:|---:|---:|",
            ]
            for row in rows:
                share = _cell(row.get("gemm_share"), "{:.0%}")
                lines.append(
                    f"| {row['length']} | {row['name']} | {row['ms']:.1f} "
                    f"| {_cell(row['times_faster_than_sdpa'], '{:.2f}×')} "
                    f"| {_cell(row['times_faster_than_peer'], '{:.2f}×')} | {share} |"
                )
            lines.append("")
    lines += [
        "## Faster than SDPA from",
        "",
        "| | mask | step | tokens |",
        "|---|---|---|---:|",
    ]
    for row in result["crossover"]:
        at = row["note"] if row["length"] is None else f"{row['length']:.0f} {row['note']}".strip()
        step = _step(row["training"])
        lines.append(f"| {row['name']} | {_mask(row['causal'])} | {step} | {at} |")
    lines += [
        "",
        "## Memory of a training step beyond q, k, v and the output's gradient",
        "",
        "Output and three gradients alone are 4 × \\|q\\|.",
        "",
        "| | mask | tokens | × \\|q\\| |",
        "|---|---|---:|---:|",
    ]
    for row in result["memory"]:
        lines.append(
            f"| {row['name']} | {_mask(row['causal'])} | {row['length']} | {row['units']:.2f} |"
        )
    lines += ["", "## Left out", "", *[f"- {line}" for line in result["left_out"]], ""]
    lines.append(
        f"The run took {result['seconds']:.0f} s, {result['cpu_seconds']:.0f} s of CPU time "
        "without the child processes."
    )
    return "\n".join(lines) + "\n"


def _styles(names: Sequence[str]) -> dict[str, tuple[str, str, float]]:
    """(colour, line style, width) of each contender."""
    styles = {
        SDPA: (COLOURS["black"], "-", 1.8),
        PEER: (COLOURS["vermilion"], "-", 1.8),
        "performer": (COLOURS["blue"], "-", 2.8),
        "softmax": (COLOURS["grey"], "--", 1.4),
    }
    rest = [n for n in names if n not in styles]
    spare = ("green", "orange", "purple", "sky")
    dashes = ("-", "--", ":", "-.")
    for i, name in enumerate(rest):
        styles[name] = (COLOURS[spare[i % 4]], dashes[i // 4 % 4], 1.6)
    return styles


def draw(result: dict[str, Any], path: Path) -> None:
    """Time against length, log-log: forward and training step, bidirectional and causal.

    Raises:
        ImportError: matplotlib is not installed.
    """
    names = list(dict.fromkeys(row["name"] for row in result["times"]))
    height = max(8.0, 2 * (1.2 + 0.25 * len(names)))  # room for every name at its line's end
    page, axes = figure(11, height, 2, 2, sharex=True, sharey="row")
    styles = _styles(names)
    longest = max((row["length"] for row in result["times"]), default=2)
    shortest = min((row["length"] for row in result["times"]), default=1)
    pending = []
    for i, training in enumerate((False, True)):
        for j, causal in enumerate((False, True)):
            axis = axes[i][j]
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            ends = []
            for name in names:
                points = sorted(
                    (row["length"], row["ms"])
                    for row in result["times"]
                    if (row["name"], row["training"], row["causal"]) == (name, training, causal)
                )
                if not points:
                    continue
                colour, dash, width = styles[name]
                x, y = zip(*points, strict=True)
                axis.plot(x, y, dash, color=colour, linewidth=width, marker="o", markersize=3)
                ends.append((x[-1], y[-1], name, colour))
            axis.set_title(f"{_step(training)}, {_mask(causal)}", fontsize=10.5, loc="left")
            pending.append((axis, ends))
    ticks = sorted({row["length"] for row in result["times"]})
    for axis in axes.flat:
        axis.set_xlim(shortest * 0.85, longest * 1.1)
        axis.set_xticks(ticks, [_thousands(t) for t in ticks])
        axis.minorticks_off()
        axis.yaxis.set_major_formatter(_milliseconds)
    for axis in axes[1]:
        axis.set_xlabel("tokens")
    s = result["settings"]
    page.suptitle(
        f"Time of one attention call: B=1, H={s['heads']}, D={s['head_dim']}, "
        f"M={s['features']}, float32, one thread",
        fontsize=12,
        x=0.01,
        ha="left",
    )
    foot = machine_line(result["machine"])
    page.supxlabel(foot, fontsize=8, color=COLOURS["grey"], x=0.01, ha="left")
    # room for the names to the right of each panel
    page.get_layout_engine().set(wspace=0.22)
    page.get_layout_engine().set(rect=(0, 0, 0.89, 1))
    page.draw_without_rendering()
    page.set_layout_engine("none")
    for axis, ends in pending:
        label_ends(axis, ends)
    page.savefig(path)


def _thousands(length: int) -> str:
    return f"{length // 1024}k" if length >= 1024 else str(length)


def _milliseconds(value: float, _: int) -> str:
    return f"{value / 1e3:g} s" if value >= 1e3 else f"{value:g} ms"


if __name__ == "__main__":
    _child()
