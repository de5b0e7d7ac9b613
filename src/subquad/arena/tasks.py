"""`subquad bench tasks`: what a small network learns with each mechanism, and what it cannot.

Five generated tasks, each asking for one ability. A sequence is `pairs` tokens of data and as
many questions; a token is a key and a value, either may be blank; an answer is one of
`values` values, so chance is 1/values in all of them.

    near     the value two tokens before                       local and exact to the token
    count    the most frequent value of the data               a sum over everything
    copy     the value `pairs` tokens before                   far, by position
    fetch    the value at the position that the question names far, by the query's content
    recall   the value beside the key that the question names  far, by matching query and key

Every mechanism gets the same network (two encoder layers, sinusoidal positions), the same
batches, the same number of steps, and about the same number of keys or features for each
query (`SIZES`). It runs causally where it has a causal form, else bidirectionally: the
questions stand behind the data, so the tasks are the same. An answer is never in the input.

Measured beside this, for the picture of all mechanisms: time and memory of one attention
sublayer at 4,096 tokens, see `subquad.arena.sublayer`.

**Verdicts** come from the accuracy alone. *learns*: at least 0.9. *partly*: at least 0.3; a
guesser that knows how often each value occurs, but cannot select, answers with the most
frequent one and is right with probability E max_v n_v / 32 = 0.220 for n multinomial, 32 draws
from 8 values; its standard deviation over sequences is 0.037, that of a mean over 256
sequences 0.003. *no*: below. The reasons beside them (`REASONS`) are what the structure
lets one expect; they are shown where a mechanism does not learn, and decide nothing.
"""

from __future__ import annotations

import dataclasses
import json as json_module
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad import registry
from subquad.arena.machine import machine, machine_line
from subquad.arena.sublayer import Sublayer
from subquad.arena.uniform import Uniform
from subquad.attention.layers import TransformerEncoderLayer
from subquad.errors import OptionError, UnknownNameError, nearest

__all__ = [
    "LEARNS",
    "PARTLY",
    "REASONS",
    "SIZES",
    "TASKS",
    "Batch",
    "Network",
    "Outcome",
    "Setting",
    "candidates",
    "reason",
    "run",
    "table",
    "train",
    "verdict",
]

LEARNS, PARTLY = 0.9, 0.3
"""Least accuracy of the verdicts *learns* and *partly*; derived in the module's docstring."""
UNIFORM = "uniform"
"""The baseline's name; it is not registered."""
UNASKED = -100
"""Label of a token that no question stands at; cross-entropy's default `ignore_index`."""


@dataclass(frozen=True)
class Setting:
    """One network, one schedule for every mechanism and task.

    Args:
        pairs: tokens of data, and questions; the sequence is twice as long.
        values: answers.
        keys: alphabet of keys; recall draws `pairs` different ones for each sequence.
        width, heads, layers: of the network; FFN is twice as wide.
        batch, steps, rate: of Adam, whose rate rises for 30 steps and falls linearly to a
            tenth.
        every: steps between two looks at the validation rows.
        patience: looks without 0.02 more accuracy after which training ends. Exact
            attention's longest wait, before it finds the questions' positions, is two looks.
        solved: accuracy on the validation rows at which training ends.
        rows: sequences for validation, and for the test.
        seeds: of initial weights and batches.
    """

    pairs: int = 32
    values: int = 8
    keys: int = 64
    width: int = 32
    heads: int = 2
    layers: int = 2
    batch: int = 32
    steps: int = 500
    rate: float = 6e-3
    every: int = 50
    patience: int = 5
    solved: float = 0.985
    rows: int = 256
    seeds: tuple[int, ...] = (0, 1)

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return 2 * self.pairs

    @property
    def chance(self) -> float:
        """Accuracy of a guess."""
        return 1 / self.values

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON gives them back."""
        return {**dataclasses.asdict(self), "seeds": list(self.seeds)}


# ---- tasks ---------------------------------------------------------------------------------


class Batch(NamedTuple):
    """Keys, values and labels, each (N, L); the last key and value are the blank ones."""

    keys: Tensor
    values: Tensor
    labels: Tensor


def _batch(
    setting: Setting,
    values: Tensor,
    answers: Tensor,
    *,
    keys: Tensor | None = None,
    questions: Tensor | None = None,
) -> Batch:
    """Data in the first half, the keys asked for in the second, answers at its end."""
    rows, half = values.shape
    shape = (rows, setting.length)
    found = Batch(
        torch.full(shape, setting.keys),
        torch.full(shape, setting.values),
        torch.full(shape, UNASKED),
    )
    found.values[:, :half] = values
    for part, tokens in ((keys, slice(half)), (questions, slice(half, None))):
        if part is not None:
            found.keys[:, tokens] = part
    found.labels[:, -answers.shape[1] :] = answers
    return found


def _draw(setting: Setting, rows: int, generator: torch.Generator) -> Tensor:
    return torch.randint(setting.values, (rows, setting.pairs), generator=generator)


def near(setting: Setting, rows: int, generator: torch.Generator) -> Batch:
    """The value two tokens before: all tokens are data, those of the second half are asked."""
    values = torch.randint(setting.values, (rows, setting.length), generator=generator)
    labels = torch.full_like(values, UNASKED)
    labels[:, setting.pairs :] = values[:, setting.pairs - 2 : -2]
    return Batch(torch.full_like(values, setting.keys), values, labels)


def count(setting: Setting, rows: int, generator: torch.Generator) -> Batch:
    """The most frequent value: a quarter of the data and one more, the others share the rest.

    Asked in the last quarter alone, which stacked windows do not connect with the data.
    """
    half = setting.pairs
    most = torch.randint(setting.values, (rows, 1), generator=generator)
    order = torch.rand(rows, half, generator=generator).argsort(-1)
    others = most + 1 + order % (setting.values - 1)
    values = torch.where(order <= half // 4, most, others % setting.values)
    return _batch(setting, values, most.expand(-1, half // 2))


def copy(setting: Setting, rows: int, generator: torch.Generator) -> Batch:
    """All values of the data, in order: each question's answer is `pairs` tokens before it."""
    values = _draw(setting, rows, generator)
    return _batch(setting, values, values)


def fetch(setting: Setting, rows: int, generator: torch.Generator) -> Batch:
    """The value at the position that the question's key numbers."""
    values = _draw(setting, rows, generator)
    places = torch.randint(setting.pairs, values.shape, generator=generator)
    return _batch(setting, values, values.gather(1, places), questions=places)


def recall(setting: Setting, rows: int, generator: torch.Generator) -> Batch:
    """The value that stood with the question's key; keys differ, each is asked once."""
    values = _draw(setting, rows, generator)
    keys = torch.rand(rows, setting.keys, generator=generator).argsort(-1)[:, : setting.pairs]
    order = torch.rand(values.shape, generator=generator).argsort(-1)
    return _batch(
        setting, values, values.gather(1, order), keys=keys, questions=keys.gather(1, order)
    )


TASKS: dict[str, Callable[[Setting, int, torch.Generator], Batch]] = {
    "near": near,
    "count": count,
    "copy": copy,
    "fetch": fetch,
    "recall": recall,
}

# ---- what takes part -----------------------------------------------------------------------

_SPREAD = ", ".join(map(str, range(3, 64, 4)))

SIZES: dict[str, tuple[str, ...]] = {
    "performer": ("performer(features=32)",),
    "kernel_nystrom": ("kernel_nystrom(features=32)",),
    "rfa": ("rfa(features=32)",),
    "gaussian": ("gaussian(features=32, learned=true)",),
    "hedgehog": ("hedgehog(features=32)",),
    "local": ("local(window=8)",),
    "strided": ("strided(stride=8)",),
    "global": (f"global(tokens=[{_SPREAD}])",),
    "bigbird": ("bigbird(block=4, window=3, random=1)",),
    "routing": ("routing(clusters=4, window=8)",),
    "sinkhorn": ("sinkhorn(block=8)",),
    "reformer": ("reformer(rounds=2, buckets=8, chunk=4)",),
    "linformer": ("linformer(k=16)",),
    "compressed": ("compressed(stride=4)",),
    "nystrom": ("nystrom(landmarks=16)",),
    "sampled": ("sampled(heavy=8, samples=8, landmarks=16)",),
    "clustered": ("clustered(clusters=16, topk=8)",),
    "key_clusters": ("key_clusters(clusters=16, refine=2, members=2, landmarks=16)",),
    "mlp_mixer": ("mlp_mixer(hidden=64)",),
    "synthesizer": ("synthesizer", "synthesizer(kinds=random)"),
    "aft": ("aft", "aft(kind=full)"),
    "mixed": ("mixed(local(window=8), performer(features=32))",),
    "near_far": ("near_far(window=8, heavy=8)",),
    "auto": ("auto(crossover=256)",),
}
"""Options at 64 tokens and heads of 16, where the defaults are meant for thousands of tokens.

The budget of a query is about a quarter of the sequence where a mechanism reads keys or
summaries of keys, 16 of 64: a window of 8 on both sides; a stride of 8 and 8 tokens of a
column; one global token in four; two blocks or chunks of 8, or of 4 in two rounds; 16
landmarks, clusters or rows; 8 and 8 where there are two parts; auto is exact at this length.
It is 32 features where a mechanism sums them: a state of 32 × 16 numbers is half of the values
that exact attention keeps. Names without a line have no size, or that of a head or of the
sequence. A mechanism whose kinds differ in what they can do has several specs; the first one is
the picture's."""


def candidates() -> dict[str, tuple[str, ...]]:
    """Name → specs: the baseline, and every registered mechanism."""
    return {UNIFORM: (UNIFORM,)} | {name: SIZES.get(name, (name,)) for name in registry.MECHANISMS}


def _because(why: str, *tasks: str) -> dict[str, str]:
    return dict.fromkeys(tasks, why)


_BLUNT = _because(
    "a fixed number of positive features: weights too blunt to single out one token of many",
    "fetch",
)
_HOPS = _because(
    "most tokens are two hops away, and the one between does not know the query",
    "fetch", "recall",
)  # fmt: skip
_ROUTED = _because(
    "a query reads what is routed to its own group: it finds its like, or what training has "
    "put there",
    "copy",
    "fetch",
)
_POSITIONS = _because(
    "weights over positions are fixed once trained: the content of a token chooses nothing",
    "fetch", "recall",
)  # fmt: skip

REASONS: dict[str, dict[str, str]] = {
    UNIFORM: _because(
        "all tokens weigh the same: nothing is selected", "near", "copy", "fetch", "recall"
    ),
    "performer": _BLUNT,
    "linear": _BLUNT,
    "efficient": _BLUNT,
    "rfa": _BLUNT,
    "gaussian": _BLUNT,
    "hedgehog": _BLUNT,
    "kernel_nystrom": _BLUNT,
    "local": _because(
        "two layers of windows end before the data", "count", "copy", "fetch", "recall"
    ),
    "strided": _HOPS,
    "bigbird": _HOPS,
    "global": _because("a token reads itself and global tokens alone", "near")
    | _because("what it reads passes through a few global tokens", "copy", "fetch", "recall"),
    "routing": _ROUTED,
    "reformer": _ROUTED | _because("a group holds its like: no query sees them all", "count"),
    "sinkhorn": _because("one sorted block serves all queries of a block", "fetch"),
    "linformer": _because("rows are mixed before the content is seen", "recall"),
    "nystrom": _because(
        "all weights pass through means of landmarks", "near", "copy", "fetch", "recall"
    ),
    "sampled": _because(
        "one sample of keys serves all queries", "near", "copy", "fetch", "recall"
    ),
    "fnet": _because("the transform over positions is fixed: no distance can be learned", "near")
    | _POSITIONS,
    "gmlp": _POSITIONS,
    "mlp_mixer": _POSITIONS,
    "synthesizer": _because("weights read the query alone: keys are not compared", "recall"),
    "synthesizer(kinds=random)": _POSITIONS,
    "aft": _because(
        "weights are the key's alone, the query only gates", "copy", "fetch", "recall"
    ),
    "aft(kind=full)": _because(
        "weights are of positions and keys, the query only gates", "fetch", "recall"
    ),
    "mixed": _BLUNT,
    "near_far": _because(
        "causal, a far token is kept only while attention comes back to it",
        "count", "copy", "fetch", "recall",
    ),
}  # fmt: skip
"""Spec or name → task → why it is not to be expected; see the module."""


def reason(spec: str, task: str) -> str:
    """What the structure of a mechanism says about a task that it does not learn, or ""."""
    own = REASONS.get(spec)
    if own is None:
        own = REASONS.get(spec.partition("(")[0], {})
    return own.get(task, "")


# ---- the network and its training ----------------------------------------------------------


class Network(nn.Module):
    """Sum of key, value and sinusoidal position embeddings, encoder layers, one linear layer.

    Args:
        spec: a mechanism, or "uniform".
        setting: sizes.
        causal: whether tokens see the past alone.
    """

    def __init__(self, spec: str, setting: Setting, causal: bool) -> None:
        super().__init__()
        width = setting.width
        self.causal = causal
        self.key = nn.Embedding(setting.keys + 1, width)
        self.value = nn.Embedding(setting.values + 1, width)
        angles = torch.arange(setting.length)[:, None] * 10_000 ** (
            -torch.arange(0, width, 2) / width
        )
        self.register_buffer("position", torch.cat([angles.sin(), angles.cos()], -1))
        self.layers = nn.ModuleList(
            TransformerEncoderLayer(
                width, setting.heads, 2 * width, 0.0, batch_first=True, norm_first=True,
                mechanism="softmax" if spec == UNIFORM else spec,
                max_length=setting.length, seed=index,
            )
            for index in range(setting.layers)
        )  # fmt: skip
        if spec == UNIFORM:
            for layer in self.layers:
                attention: Any = layer.self_attn
                attention.mechanism = Uniform(
                    head_dim=width // setting.heads, num_heads=setting.heads
                )
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, setting.values)

    def forward(self, keys: Tensor, values: Tensor) -> Tensor:
        """Logits (N, L, values)."""
        x = self.key(keys) + self.value(values) + self.position
        for layer in self.layers:
            x = layer(x, is_causal=self.causal)
        return self.out(self.norm(x))


class Outcome(NamedTuple):
    """Accuracy on the test rows, steps taken, and the validation accuracy at every look."""

    accuracy: float
    steps: int
    looks: list[float]


def train(spec: str, task: str, setting: Setting, seed: int, causal: bool) -> Outcome:
    """Trains a network on a task and tests it; the seed determines the result.

    Args:
        spec: a mechanism, or "uniform".
        task: of `TASKS`.
        setting: sizes and schedule.
        seed: of weights, draws and batches. Validation and test rows are the same for all.
        causal: whether tokens see the past alone.
    """
    make = TASKS[task]
    validation, test = (
        make(setting, setting.rows, torch.Generator().manual_seed(one)) for one in (1, 2)
    )
    batches = torch.Generator().manual_seed(1000 + seed)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        network = Network(spec, setting, causal)
        optimiser = torch.optim.Adam(network.parameters(), lr=setting.rate, betas=(0.9, 0.98))
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimiser, lambda i: min((i + 1) / 30, 1.0) * (1 - 0.9 * i / setting.steps)
        )
        looks: list[float] = []
        step = 0
        while step < setting.steps and not _over(looks, setting):
            for _ in range(min(setting.every, setting.steps - step)):
                batch = make(setting, setting.batch, batches)
                loss = _loss(network, batch)
                optimiser.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(network.parameters(), 1.0)
                optimiser.step()
                schedule.step()
                step += 1
            looks.append(_accuracy(network, validation))
        return Outcome(_accuracy(network, test), step, looks)


def _loss(network: Network, batch: Batch) -> Tensor:
    logits = network(batch.keys, batch.values)
    return F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=UNASKED)


def _over(looks: Sequence[float], setting: Setting) -> bool:
    if looks and looks[-1] >= setting.solved:
        return True
    before, lately = looks[: -setting.patience], looks[-setting.patience :]
    return bool(before) and max(lately) < max(before) + 0.02


@torch.no_grad()
def _accuracy(network: Network, batch: Batch) -> float:
    network.eval()
    found = network(batch.keys, batch.values).argmax(-1)
    network.train()
    asked = batch.labels != UNASKED
    return float((found == batch.labels)[asked].double().mean())


def verdict(accuracy: float) -> str:
    """One of "learns", "partly" and "no", see the module."""
    return "learns" if accuracy >= LEARNS else "partly" if accuracy >= PARTLY else "no"


# ---- a run ---------------------------------------------------------------------------------


def _study(
    spec: str, setting: Setting, causal: bool, echo: Callable[[str], None]
) -> dict[str, Any]:
    """One row: every task with one spec."""
    start = time.process_time()
    tasks: dict[str, dict[str, Any]] = {}
    for task in TASKS:
        outcomes = [train(spec, task, setting, seed, causal) for seed in setting.seeds]
        accuracy = statistics.median(one.accuracy for one in outcomes)
        tasks[task] = {
            "accuracy": accuracy,
            "verdict": verdict(accuracy),
            "seeds": [one.accuracy for one in outcomes],
            "steps": [one.steps for one in outcomes],
        }
    above = (max(0.0, tasks[t]["accuracy"] - setting.chance) for t in TASKS)
    row = {
        "mechanism": spec.partition("(")[0],
        "spec": spec,
        "causal": causal,
        "score": statistics.mean(above) / (1 - setting.chance),
        "tasks": tasks,
        "seconds": time.process_time() - start,
    }
    cells = "  ".join(f"{task} {found['accuracy']:.2f}" for task, found in tasks.items())
    echo(f"{_label(row):40} {cells}  {row['seconds']:.0f} s")
    return row


def _forms(name: str, spec: str) -> tuple[bool, ...]:
    """Causal or not; the truth and the baseline are shown in both forms."""
    if name in (UNIFORM, "softmax"):
        return (True, False)
    found, config = registry.resolve(spec)
    return (bool(found.capabilities_for(config).causal),)


def run(
    out: Path,
    quick: bool,
    json: bool,
    echo: Callable[[str], None],
    *,
    only: Iterable[str] = (),
    resume: bool = False,
) -> dict[str, Any]:
    """Trains, times, and writes ``tasks.json``, ``.md``, ``.png`` and ``-dark.png`` to `out`.

    The JSON is written after every mechanism, so that an interrupted run loses one.

    Args:
        out: folder, made if missing.
        quick: 8 pairs, 100 steps, one seed, and times at 1,024 tokens: too short to conclude
            from.
        json: the caller shows the result as JSON: echo progress, but no table.
        echo: takes progress and the table, line by line.
        only: names of mechanisms, or "uniform", to measure again; all others keep the rows
            that they have in ``tasks.json``.
        resume: keep every row that ``tasks.json`` has, and measure what is missing.

    Returns:
        Everything that was measured, JSON-able.

    Raises:
        UnknownNameError: a name in `only` is not a candidate's.
        OptionError: `only` or `resume` with a ``tasks.json`` of other settings.
    """
    everyone, only = candidates(), list(only)
    for name in only:
        if name not in everyone:
            raise UnknownNameError(
                f"unknown mechanism {name!r}{nearest(name, everyone)}; there are "
                f"{', '.join(everyone)}"
            )
    setting = Setting(pairs=8, keys=16, steps=100, seeds=(0,), rows=64) if quick else Setting()
    sublayer = Sublayer(length=1024, budget=1.0) if quick else Sublayer()
    settings = {"tasks": setting.to_dict(), "sublayer": dataclasses.asdict(sublayer)}
    kept = _kept(out / "tasks.json", settings) if only or resume else {}
    out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name, specs in everyone.items():
            old = kept.get(name, [])
            current = {row["spec"] for row in old} == set(specs)
            if (only and name not in only) or (resume and name not in only and current):
                continue
            kept[name] = [
                _study(spec, setting, causal, echo)
                for spec in specs
                for causal in _forms(name, spec)
            ]
            if name != UNIFORM:
                kept[name][0]["sublayer"] = sublayer.measure(name)
            result = {
                "benchmark": "tasks",
                "quick": quick,
                "machine": machine(threads=1),
                "settings": settings,
                "rows": [row for one in everyone for row in kept.get(one, [])],
            }
            _write(out, "tasks.json", json_module.dumps(result, indent=1) + "\n")
            _write(out, "tasks.md", table(result))
    finally:
        torch.set_num_threads(threads)
    if not result:  # nothing was missing
        result = json_module.loads((out / "tasks.json").read_text(encoding="utf-8"))
    _draw_all(result, out, echo)
    if not json:
        echo(table(result))
    return result


def _kept(path: Path, settings: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The rows of an earlier run, by mechanism."""
    if not path.is_file():
        return {}
    earlier = json_module.loads(path.read_text(encoding="utf-8"))
    if earlier["settings"] != settings:
        raise OptionError(
            f"{path} was measured with other settings, whose rows cannot stand beside these: "
            "measure all mechanisms, or choose another folder with --out"
        )
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in earlier["rows"]:
        rows.setdefault(row["mechanism"], []).append(row)
    return rows


def _write(out: Path, name: str, text: str) -> None:
    (out / name).write_text(text, encoding="utf-8")


def _draw_all(result: dict[str, Any], out: Path, echo: Callable[[str], None]) -> None:
    from subquad.arena.bubbles import draw
    from subquad.pages import DARK, LIGHT, png

    for name, theme in (("tasks.png", LIGHT), ("tasks-dark.png", DARK)):
        try:
            (out / name).write_bytes(png(draw(result, theme)))
        except ImportError as error:
            echo(f"no {name}: {error}")


# ---- table ---------------------------------------------------------------------------------


def _label(row: dict[str, Any]) -> str:
    """The spec, shortened where a list makes it long."""
    spec = str(row["spec"])
    head, bracket, rest = spec.partition("[")
    if bracket and len(rest) > 24:
        spec = f"{head}[{rest[:6]}…{rest[rest.rindex(',') + 1 :]}"
    return spec if row["causal"] else f"{spec}, bidirectional"


def table(result: dict[str, Any]) -> str:
    """The result as a Markdown page."""
    s, layer = result["settings"]["tasks"], result["settings"]["sublayer"]
    rows = result["rows"]
    marks = {"learns": "**{:.2f}**", "partly": "{:.2f}", "no": "({:.2f})"}
    lines = [
        "# What each mechanism learns",
        "",
        *(["**A quick run: too short to conclude from.**", ""] if result["quick"] else []),
        f"Accuracy of a network with {s['layers']} layers, width {s['width']} and {s['heads']} "
        f"heads after at most {s['steps']} steps of {s['batch']} sequences of {2 * s['pairs']} "
        f"tokens: {s['pairs']} tokens of data, {s['pairs']} questions; median of seeds "
        f"{', '.join(map(str, s['seeds']))}; chance {1 / s['values']:g}. **Bold**: learns, at "
        f"least {LEARNS:g}. In parentheses: does not, below {PARTLY:g}, what a guesser reaches "
        "that cannot select. Between: partly. Causal where a mechanism has a causal form, else "
        "bidirectional.",
        "",
        "*near*: the value two tokens before. *count*: the most frequent value. *copy*: the value "
        f"{s['pairs']} tokens before. *fetch*: the value at the position that the question "
        "names. *recall*: the value that stood beside the key that the question names. *Score*: "
        "mean over the tasks of the accuracy above chance, 1 where all answers are right.",
        "",
        f"*Faster* and *peak*: one attention sublayer with the default options, "
        f"{layer['length']:,} tokens, C = {layer['heads'] * layer['head_dim']}, "
        f"{layer['heads']} heads, float32, bidirectional, projections of q, k, v and the "
        "output included where there are any: "
        "forward against exact softmax, interleaved, and memory of a training step beyond its "
        "input, each mechanism in a process of its own.",
        "",
        "| mechanism | " + " | ".join(TASKS) + " | score | faster | tokens/s | peak MB |",
        "|---|" + "---:|" * (len(TASKS) + 4),
    ]
    for row in rows:
        cells = [marks[t["verdict"]].format(t["accuracy"]) for t in row["tasks"].values()]
        lines.append(
            f"| {_label(row)} | {' | '.join(cells)} | {row['score']:.2f} | {_speed(row)} |"
        )
    lines += [
        "",
        "## What they do not learn, and why",
        "",
        "Reasons are what the structure lets one expect, the accuracies are measured. Where there "
        "is none, the structure forbids nothing that we know of: more steps or another "
        "optimiser may do. Learned although a reason speaks against it: "
        f"{', '.join(_surprises(rows)) or 'nothing'}.",
        "",
        "| mechanism | task | accuracy | seeds | why |",
        "|---|---|---:|---|---|",
        *_failures(rows),
        "",
        f"{machine_line(result['machine'])}; training took "
        f"{sum(row['seconds'] for row in rows) / 60:.0f} minutes. Again: `subquad bench tasks`; "
        "one mechanism: `subquad bench tasks --only NAME`.",
        "",
    ]
    return "\n".join(lines)


def _speed(row: dict[str, Any]) -> str:
    found = row.get("sublayer")
    if found is None:
        return "– | – | –"
    return (
        f"{found['times_faster']:.2f}× | {found['tokens_per_second']:,.0f} "
        f"| {found['peak_bytes'] / 1e6:,.0f}"
    )


def _failures(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        for task, found in row["tasks"].items():
            if found["verdict"] == "learns":
                continue
            seeds = ", ".join(f"{value:.2f}" for value in found["seeds"])
            why = reason(row["spec"], task) or "–"
            yield f"| {_label(row)} | {task} | {found['accuracy']:.2f} | {seeds} | {why} |"


def _surprises(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        for task, found in row["tasks"].items():
            if found["verdict"] == "learns" and reason(row["spec"], task):
                yield f"{task} by {_label(row)}"
