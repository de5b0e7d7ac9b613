"""`train`: a recipe, a folder, and transformers' Trainer in between.

A run's folder holds::

    .subquad         says that the folder is a run's: no other one is ever overwritten
    .lock            held while a process trains in it
    recipe.yaml      everything the run depends on, with every key
    tokenizer/       trained once
    data/            the examples as tokens, read from the disk
    log.jsonl        a line each few steps, one for each evaluation
    checkpoints/     the newest two, and weights to be averaged
    best/            model, tokenizer and recipe of the best evaluation: ready to be loaded
    report.json      written last

Whatever stops a run, the same call goes on from the newest complete checkpoint: weights, the
optimiser, all random states, the place in the data and the log are as they were then. On a CPU in
float32, with the same number of threads, every later number equals that of the run that was never
stopped, bit for bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from subquad.attention.base import Mechanism
from subquad.data.batches import TokenBatches
from subquad.errors import OptionError, SubquadError
from subquad.training.objectives import Objective
from subquad.training.recipe import Optimiser, Recipe
from subquad.training.tasks import task_of
from subquad.training.tasks.base import Batch, Prepared, Say
from subquad.training.trainer import (
    arguments,
    last_checkpoint,
    need_trainer,
    own_random_state,
    quiet,
    silence,
)

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["Point", "RunReport", "train"]

MARK, LOCK = ".subquad", ".lock"

Point = dict[str, Any]
"""A line of the log: ``step``, ``epoch``, ``seconds``, and what was measured."""


@dataclass(frozen=True)
class RunReport:
    """What a run did; `print` it, or read its fields.

    Args:
        task: that was trained.
        folder: of the run; ``best`` in it is what to use.
        parameters: of the model.
        steps: optimiser steps.
        epochs: passes over the data.
        seconds: wall-clock time of training and evaluations, the time before a resumption
            included.
        cpu_seconds: time of the processor in them, all threads: what is the same on a machine that
            does other work beside it.
        tokens_per_second: labels that were trained on, in training time alone.
        best: step and metrics of the best checkpoint; its step is None where it is an average.
        last: metrics of the last evaluation.
        stopped: why training ended: "steps", "epochs", "minutes" or "patience".
        resumed: it continued from a checkpoint.
        notes: what to know, one sentence each.
    """

    task: str
    folder: str
    parameters: int
    steps: int
    epochs: float
    seconds: float
    tokens_per_second: float
    best: Point
    last: Point
    stopped: str
    resumed: bool = False
    notes: tuple[str, ...] = ()
    cpu_seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        which = "average" if self.best["step"] is None else f"step {self.best['step']}"
        lines = [
            f"{self.task}: {self.steps} steps, {self.epochs:.2f} epochs, "
            f"{self.seconds / 60:.1f} minutes, {self.tokens_per_second:.0f} tokens/s; ended by "
            + self.stopped
            + (" (continued from a checkpoint)" if self.resumed else ""),
            f"  {self.parameters:,} parameters",
            f"  best ({which}): " + metrics_line(self.best),
        ]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join([*lines, f"  model: {Path(self.folder) / 'best'}"])


def metrics_line(point: Point) -> str:
    """Metrics for people."""
    own = ("step", "epoch", "seconds", "rate", "progress", "kind", "of")
    terms = [(name, value) for name, value in point.items() if name not in own]
    told = (point.get("loss"), *((0.0,) if point.get("kind") == "train" else ()))
    shown = [(n, v) for n, v in terms if n == "loss" or v not in told]
    return "  ".join(f"{name} {value:.5g}" for name, value in shown)


def line(point: Point) -> str:
    """A line of the log for people, with the time that is left."""
    name = f"step {point['step']}" if point["kind"] != "average" else f"mean of {point['of']}"
    shown = f"{point['kind']} " * (point["kind"] == "valid")
    text = f"{name}  epoch {point['epoch']:.2f}  {shown}{metrics_line(point)}"
    left = point["seconds"] * (1.0 / point["progress"] - 1.0) if point.get("progress") else None
    return text + ("" if left is None else f"  {_clock(left)} left")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    fresh: bool = False,
    progress: Callable[[Point], None] | None = None,
    say: Say | None = None,
) -> RunReport:
    """Trains what a recipe says, or goes on with it.

    Args:
        recipe: see `Recipe.load`.
        out: the run's folder. One that holds the same run is continued from its newest complete
            checkpoint; one that is complete is reported, not trained again.
        fresh: delete the run that the folder holds first.
        progress: is given each point of the log; `line` makes a line of it.
        say: is told what happens before training, and where it ends.

    Returns:
        The report, which is in ``out/report.json`` too.

    Raises:
        OptionError: the folder holds another run, naming the keys that differ, or is being trained
            in; or data that cannot be used.
        SubquadError: the loss is not finite any more.
        ImportError: a package of the extra ``train`` is missing.
    """
    need_trainer()
    folder, say = Path(out), say or (lambda text: None)
    _check(folder, fresh)
    with _alone(folder):
        return _train(recipe, folder, fresh, progress, say)


def _train(
    recipe: Recipe,
    folder: Path,
    fresh: bool,
    progress: Callable[[Point], None] | None,
    say: Say,
) -> RunReport:
    resumed = _begin(folder, recipe, fresh)
    done = folder / "report.json"
    if done.is_file():
        report = RunReport(**{**_read(done), "notes": tuple(_read(done)["notes"])})
        more = report.seconds < 60.0 * (recipe.training.minutes or math.inf)
        if report.stopped != "minutes" or not more:
            say(f"{folder} is complete; --fresh trains it again")
            return report
        done.unlink()
    if recipe.training.threads is not None:
        torch.set_num_threads(recipe.training.threads)
    task = task_of(recipe.task)
    with own_random_state(), quiet():
        torch.manual_seed(recipe.training.seed)
        prepared = task.prepare(recipe, folder, say)
        if isinstance(prepared.objective, Objective):
            prepared.objective.tokenizer = prepared.tokenizer
            prepared.objective.check(prepared.model)
        _same_data(folder, prepared.fingerprint)
        loop = _Loop(recipe, prepared, dict(task.metrics), folder, progress, say)
        loop.expect(loop.longest())
        checkpoint = last_checkpoint(folder / "checkpoints")
        if checkpoint is not None:
            say(f"continuing from step {int(checkpoint.name.rpartition('-')[2])}")
        loop.run(checkpoint)
        report = loop.report(task.name, resumed and checkpoint is not None)
    _write(done, report.to_dict())
    return report


# ---- the folder --------------------------------------------------------------------------


def _check(folder: Path, fresh: bool) -> None:
    """Refuses what is neither a run's folder nor an empty one."""
    if folder.exists() and not folder.is_dir():
        raise OptionError(f"out={str(folder)!r} is a file; give a folder")
    found = folder.is_dir() and any(one.name != LOCK for one in folder.iterdir())
    if found and not (folder / MARK).is_file() and (fresh or not _holds_run(folder)):
        raise OptionError(f"out={str(folder)!r} is not empty, and holds no run")


def _holds_run(folder: Path) -> bool:
    return (folder / "recipe.yaml").is_file() and (folder / "data.json").is_file()


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keeps others out: two runs in a folder would write over each other's checkpoints.

    By a lock of the system's, which a process that dies, however it does, leaves open. Where a
    system or a file system has none, nobody is kept out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a") as file:
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OptionError(
                f"{folder} is being trained in: wait for the end, stop it, or give another folder"
            ) from None
        except OSError:
            pass
        yield


def _begin(folder: Path, recipe: Recipe, fresh: bool) -> bool:
    """Writes the recipe, or compares it with that of the run to be continued."""
    path, mark = folder / "recipe.yaml", folder / MARK
    if _holds_run(folder) and not fresh:
        differ = Recipe.load(path).differences(recipe)
        if differ:
            raise OptionError(
                f"{folder} holds another run, whose recipe differs; continue that one, give "
                "another folder, or --fresh:" + "".join(f"\n  - {one}" for one in differ)
            )
        best = folder / "best"
        if not best.exists() and best.with_name("best.old").exists():  # stopped in between
            os.replace(best.with_name("best.old"), best)
        replace(path, recipe.to_yaml())  # where it differs, it may
        mark.touch()
        return True
    mark.touch()
    (folder / "data.json").unlink(missing_ok=True)  # first: what is left is no run to go on with
    for one in folder.iterdir():
        if one.is_dir() and not one.is_symlink():
            shutil.rmtree(one)
        elif one.name not in (MARK, LOCK):  # which stay: this may be stopped
            one.unlink()
    replace(path, recipe.to_yaml())
    return False


def _same_data(folder: Path, fingerprint: Mapping[str, Any]) -> None:
    path, now = folder / "data.json", json.loads(json.dumps(fingerprint))
    if path.is_file():
        held = _read(path)
        differ = [name for name in {**held, **now} if held.get(name) != now.get(name)]
        if differ:
            raise OptionError(
                f"{folder} holds a run on other data ({', '.join(differ)} changed): give another "
                "folder, or --fresh"
            )
    else:
        _write(path, now)


def replace(path: Path, text: str) -> None:
    """Writes a file at once: whoever reads it sees the old text or the new."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def _write(path: Path, value: Any) -> None:
    replace(path, json.dumps(value, indent=1, ensure_ascii=False))


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to be filled, which then takes the place of `path`."""
    part, old = path.with_name(path.name + ".part"), path.with_name(path.name + ".old")
    for left in (part, old):
        shutil.rmtree(left, ignore_errors=True)
    part.mkdir(parents=True)
    yield part
    if path.exists():
        os.replace(path, old)
    os.replace(part, path)
    shutil.rmtree(old, ignore_errors=True)


# ---- the data ----------------------------------------------------------------------------


class Stream:
    """Batches of all epochs, one after another, from any place on.

    Args:
        batches: a `TokenBatches`: the batches of an epoch, as lists of indices.
        batch: indices → a batch.
    """

    def __init__(self, batches: TokenBatches, batch: Callable[[Sequence[int]], Batch]) -> None:
        self.batches, self.batch = batches, batch
        self.epoch = self.index = 0

    @property
    def epochs(self) -> float:
        """Passes over the data so far."""
        return self.epoch + (self.index / len(self.batches) if self.index else 0.0)

    def __iter__(self) -> Iterator[Batch]:
        while True:
            self.batches.start_at(self.epoch, self.index)
            count = len(self.batches)
            for rows in self.batches:
                self.index += 1
                if self.index == count:
                    self.epoch, self.index = self.epoch + 1, 0
                yield self.batch(rows)

    def state(self) -> dict[str, int]:
        """The place, for `go_to`."""
        return {"epoch": self.epoch, "index": self.index}

    def go_to(self, state: Mapping[str, int]) -> None:
        """The place that `state` told."""
        self.epoch, self.index = state["epoch"], state["index"]
        self.batches.start_at(self.epoch, self.index)


# ---- the loop ----------------------------------------------------------------------------


def rate_factor(optimiser: Optimiser, step: int, progress: float) -> float:
    """Factor of the learning rate for a step.

        warm-up        (step + 1) / warm_up
        inverse_sqrt   √(warm_up / (step + 1))           Vaswani et al. 2017, eq. 3
        cosine         ½ (1 + cos πp)                    p: from 0 behind the warm-up to 1
        linear         1 − p

    Args:
        optimiser: of the recipe.
        step: optimiser steps done.
        progress: of the run, 0 to 1.
    """
    warm_up = max(1, optimiser.warm_up)
    if step + 1 < warm_up:
        return (step + 1) / warm_up
    if optimiser.schedule == "inverse_sqrt":
        return math.sqrt(warm_up / (step + 1))
    if optimiser.schedule == "constant":
        return 1.0
    start = progress * warm_up / (step + 1)  # progress at the end of the warm-up
    share = 0.0 if start >= 1.0 else min(1.0, max(0.0, (progress - start) / (1.0 - start)))
    return 0.5 * (1.0 + math.cos(math.pi * share)) if optimiser.schedule == "cosine" else 1 - share


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The optimiser's: matrices decay, vectors (biases, norms) do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


@dataclass
class _Held:
    """What a checkpoint keeps beside weights, optimiser and random states."""

    seconds: float = 0.0
    cpu: float = 0.0  # seconds of the processor
    training: float = 0.0  # seconds, evaluations and checkpoints left out
    tokens: int = 0
    epochs: int = 0  # whole ones
    waited: int = 0  # evaluations since the best
    best: Point | None = None
    last: Point = field(default_factory=dict)
    averaged: list[Point] = field(default_factory=list)
    stopped: str = ""
    sums: dict[str, float] = field(default_factory=dict)
    sizes: int = 0  # of the log's next line
    logged: float = 0.0  # training seconds at the last line
    stream: dict[str, int] = field(default_factory=dict)
    counters: list[int] = field(default_factory=list)  # of mechanisms, in the model's order


class _Loop:
    """One run: what happens at a step, at a line of the log, at an evaluation, at a checkpoint."""

    def __init__(
        self,
        recipe: Recipe,
        prepared: Prepared,
        metrics: Mapping[str, str],
        folder: Path,
        progress: Callable[[Point], None] | None,
        say: Say,
    ) -> None:
        self.recipe, self.prepared, self.metrics = recipe, prepared, metrics
        self.folder, self.checkpoints = folder, folder / "checkpoints"
        self.progress_to, self.say = progress, say
        self.expected, self.short = math.inf, ""  # steps of the run, and what is said of few
        self.device = device_of(recipe.training.device)
        self.model = prepared.model.to(self.device)
        self.generator = torch.Generator(self.device).manual_seed(recipe.training.seed)
        self.stream = Stream(
            TokenBatches(
                prepared.lengths, tokens=recipe.training.tokens, seed=recipe.training.seed
            ),
            prepared.batch,
        )
        self.held = _Held()
        self.sums: dict[str, Any] = {}  # of losses × sizes, for the log's next line
        self.start = self.saved = time.perf_counter()
        self.cpu_start = time.process_time()
        self.writer: Any = None

    # ---- progress ------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        return self.held.seconds + time.perf_counter() - self.start

    @property
    def cpu_seconds(self) -> float:
        return self.held.cpu + time.process_time() - self.cpu_start

    def share(self, step: int, *, clock: bool) -> float:
        """Progress of the run, 0 to 1; with the clock only where nothing else ends it."""
        limits = self.recipe.training
        found = []
        if limits.steps is not None:
            found.append(step / limits.steps)
        if limits.epochs is not None:
            found.append(self.stream.epochs / limits.epochs)
        if limits.minutes is not None and (clock or not found):
            found.append(self.seconds / (60.0 * limits.minutes))
        return min(1.0, max(found))

    def ended(self, step: int) -> str:
        """Which limit has been reached, if any."""
        limits = self.recipe.training
        if limits.steps is not None and step >= limits.steps:
            return "steps"
        if limits.epochs is not None and self.stream.epochs >= limits.epochs:
            return "epochs"
        if limits.minutes is not None and self.seconds >= 60.0 * limits.minutes:
            return "minutes"
        return ""

    def longest(self) -> float:
        """Most steps of the run, by its limits of steps and epochs."""
        limits = self.recipe.training
        most = math.inf if limits.steps is None else limits.steps
        if limits.epochs is not None:
            batches = limits.epochs * len(self.stream.batches)
            most = min(most, math.ceil(batches / limits.accumulate))
        return most

    def expect(self, steps: float) -> None:
        """Says so where a run of so many steps ends within its warm-up; again for far fewer."""
        warm_up = self.recipe.optimiser.warm_up
        if steps >= min(warm_up, 0.7 * self.expected):
            return
        self.expected = steps
        self.short = (
            f"training ends after about {steps:.0f} steps, within optimiser.warm_up={warm_up}: "
            f"the rate rises to {steps / warm_up:.0%} of its peak alone. Train longer, or lower "
            f"the warm-up, such as --set optimiser.warm_up={max(1, round(steps / 4))}"
        )
        self.say(f"note: {self.short}")

    # ---- a step --------------------------------------------------------------------------

    def precision(self) -> Any:
        if self.recipe.training.precision == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def step(self, batch: Batch, size: int, share: float, step: int) -> Tensor:
        """Adds a batch's gradients to the parameters; returns its part of the step's loss."""
        with self.precision():
            losses = self.prepared.objective(
                self.model, batch, self.share(step, clock=False), self.generator
            )
        loss: Tensor = share * losses.total
        loss.backward()
        held = self.held
        told = {"loss": losses.total.detach(), **losses.terms, **losses.notes}
        for name, value in told.items():
            exact = value.double() if isinstance(value, Tensor) else value  # on its device
            self.sums[name] = self.sums.get(name, 0.0) + exact * size
        held.sizes += size
        held.tokens += size
        return loss.detach()

    def check(self, step: int) -> None:
        """Raises where the loss is not finite any more: before a log's line, or a checkpoint."""
        loss = float(self.sums.get("loss", 0.0))
        if not math.isfinite(loss):
            raise SubquadError(
                f"the loss is {loss} at step {step}: training has diverged. Lower "
                "optimiser.rate, lengthen optimiser.warm_up, or clip gradients (optimiser.clip). "
                f"What was best before is in {self.folder / 'best'}"
            )

    def log(self, step: int, rate: float, norm: Any) -> None:
        """A line of the log for the steps since the last one."""
        held = self.held
        self.check(step)
        means = {name: float(value) / max(1, held.sizes) for name, value in self.sums.items()}
        spent = held.training - held.logged
        share = self.share(step, clock=True)
        point = {
            "kind": "train",
            "step": step,
            "epoch": self.stream.epochs,
            **means,
            "rate": rate,
            **({} if norm is None else {"gradient_norm": float(norm)}),
            "tokens_per_second": round(held.sizes / spent, 1) if spent > 0 else 0.0,
            "seconds": round(self.seconds, 3),
            "progress": share,
        }
        if self.recipe.training.minutes is not None:  # only now it is known how many steps fit
            self.expect(step / share)
        self.sums = {}
        held.sizes, held.logged = 0, held.training
        self.tell(point)

    def tell(self, point: Point) -> None:
        """Writes a point to the log, and to whoever listens."""
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(point, ensure_ascii=False) + "\n")
        if self.recipe.logging.tensorboard:
            self._tensorboard(point)
        if self.progress_to is not None:
            self.progress_to(point)

    def _tensorboard(self, point: Point) -> None:
        if self.writer is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ImportError(
                    "logging.tensorboard needs pip install 'subquad[tensorboard]'"
                ) from error
            self.writer = SummaryWriter(self.folder / "tensorboard", purge_step=point["step"])
        for name, value in point.items():
            if isinstance(value, float):
                self.writer.add_scalar(f"{point['kind']}/{name}", value, point["step"])
        self.writer.flush()

    # ---- an evaluation -------------------------------------------------------------------

    def measure(self) -> dict[str, float]:
        """Metrics of the model as it is; nothing random of the training is used up."""
        training = self.model.training
        self.model.eval()
        with own_random_state(), torch.no_grad(), self.precision():
            found = {name: float(v) for name, v in self.prepared.evaluate(self.model).items()}
        self.model.train(training)
        return found

    def better(self, point: Point, than: Point | None) -> bool:
        """Whether it is by the metric that counts; the loss decides where that is the same."""
        name = self.recipe.evaluation.best
        if than is None or than[name] != than[name]:  # nothing yet, or not a number
            return True
        sign = 1.0 if self.metrics[name] == "max" else -1.0
        gain = sign * (point[name] - than[name])
        return bool(gain > 0.0 or (gain == 0.0 and point["loss"] < than["loss"]))

    def evaluate(self, step: int) -> None:
        """Measures, keeps the model if it is the best, and counts how long none was better."""
        held, options = self.held, self.recipe.evaluation
        point: Point = {"kind": "valid", "step": step, "epoch": self.stream.epochs}
        point |= self.measure() | {"seconds": round(self.seconds, 3)}
        if options.best not in point:
            raise OptionError(
                f"evaluation.best={options.best!r} was not measured, only "
                f"{', '.join(name for name in self.metrics if name in point)}"
            )
        held.last = point
        if self.better(point, held.best):
            held.best, held.waited = point, 0
            self.keep(point)
        else:
            held.waited += 1
            if options.patience is not None and held.waited >= options.patience:
                held.stopped = held.stopped or "patience"
        if options.average > 1:
            self._remember(point)
        self.tell(point)

    def keep(self, point: Point) -> None:
        """The model as it is becomes the best."""
        with new_folder(self.folder / "best") as part:
            self.model.save_pretrained(part)
            self.prepared.tokenizer.save_pretrained(part)
            (part / "recipe.yaml").write_text(self.recipe.to_yaml(), encoding="utf-8")
            (part / "metrics.json").write_text(json.dumps(point), encoding="utf-8")

    # ---- averages ------------------------------------------------------------------------

    def _weights(self, point: Point) -> Path:
        return self.checkpoints / f"weights-{point['step']}.safetensors"

    def _remember(self, point: Point) -> None:
        from safetensors.torch import save_model

        held, options = self.held, self.recipe.evaluation
        self.checkpoints.mkdir(exist_ok=True)
        path = self._weights(point)
        save_model(self.model, str(path.with_suffix(".part")))
        os.replace(path.with_suffix(".part"), path)
        held.averaged.append(point)
        if options.average_of == "last":
            held.averaged = held.averaged[-options.average :]
        else:
            sign = -1.0 if self.metrics[options.best] == "max" else 1.0
            held.averaged.sort(key=lambda one: (sign * one[options.best], -one["step"]))
            held.averaged = held.averaged[: options.average]

    def _forget(self) -> None:
        """Weights that no complete checkpoint counts on any more are deleted."""
        wanted = {self._weights(point) for point in self.held.averaged}
        for path in self.checkpoints.glob("weights-*"):
            if path not in wanted:
                path.unlink()

    def average(self) -> None:
        """The mean of the remembered weights becomes the best model, if it is better."""
        from safetensors.torch import load_file, load_model, save_file

        points = self.held.averaged
        if len(points) < 2:
            return
        total: dict[str, Tensor] = {}
        for point in points:
            for name, value in load_file(self._weights(point)).items():
                if name not in total or not value.is_floating_point():  # of counters, the last
                    total[name] = value.double() if value.is_floating_point() else value
                else:
                    total[name] += value.double()
        own = self.model.state_dict()
        mean = {
            name: (value / len(points)).to(own[name].dtype) if value.is_floating_point() else value
            for name, value in total.items()
        }
        path = self.checkpoints / "mean.safetensors"
        save_file(mean, path)
        load_model(self.model, path)
        path.unlink()
        found: Point = {"kind": "average", "step": None, "epoch": self.stream.epochs}
        found |= self.measure() | {"seconds": round(self.seconds, 3), "of": len(points)}
        if self.better(found, self.held.best):
            self.keep(found)
        self.tell(found)

    # ---- the run -------------------------------------------------------------------------

    def run(self, checkpoint: Path | None) -> None:
        """Trains until a limit is reached, from a checkpoint or from the beginning."""
        if checkpoint is None:
            self._rewind(0)
        else:
            held = _read(checkpoint / "run.json")
            self.held = _Held(**held)
            self.stream.go_to(self.held.stream)
            if self.held.stopped == "minutes" and self.share(0, clock=True) < 1.0:
                self.held.stopped = ""  # there are more of them now
            self._rewind(int(checkpoint.name.rpartition("-")[2]))
        if checkpoint is None or not self.held.stopped:
            self._train(checkpoint)
        else:
            self._load(checkpoint)
        self.average()
        if self.writer is not None:
            self.writer.close()

    def _rewind(self, step: int) -> None:
        """Takes lines behind a step out of the log: they will be written again."""
        path, kept = self.folder / "log.jsonl", []
        for text in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
            try:
                point = json.loads(text)
            except ValueError:  # the last one, cut off
                continue
            if point["step"] is not None and point["step"] <= step:
                kept.append(text + "\n")
        replace(path, "".join(kept))

    def _save(self, folder: Path) -> None:
        from safetensors.torch import save_file, save_model

        self.held.stream = self.stream.state()
        sums = {name: float(value) for name, value in self.sums.items()}
        counters = [getattr(part, name) for part, name in self._counters()]
        held = dataclasses.replace(
            self.held, seconds=self.seconds, cpu=self.cpu_seconds, sums=sums, counters=counters
        )
        folder.mkdir(parents=True, exist_ok=True)
        save_model(self.model, str(folder / "model.safetensors"))
        save_file({"generator": self.generator.get_state()}, folder / "generator.safetensors")
        _write(folder / "run.json", dataclasses.asdict(held))

    def _load(self, folder: Path) -> None:
        from safetensors.torch import load_file, load_model

        load_model(self.model, folder / "model.safetensors", device=str(self.device))
        for (part, name), value in zip(self._counters(), self.held.counters, strict=True):
            setattr(part, name, value)
        self.generator.set_state(load_file(folder / "generator.safetensors")["generator"])
        self.sums = {
            name: torch.tensor(value, dtype=torch.float64, device=self.device)
            for name, value in self.held.sums.items()
        }

    def _counters(self) -> list[tuple[Mechanism, str]]:
        """Numbers that mechanisms count in training, which are in no state dict."""
        mechanisms = [part for part in self.model.modules() if isinstance(part, Mechanism)]
        return [(part, name) for part in mechanisms for name in part.counters]

    def _train(self, checkpoint: Path | None) -> None:
        from transformers import Trainer, TrainerCallback

        loop, recipe, held = self, self.recipe, self.held
        options, every = recipe.training, recipe.evaluation.every

        class Marks(TrainerCallback):
            def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                loop.start = loop.saved = time.perf_counter()
                loop.cpu_start = time.process_time()

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                step = state.global_step
                held.training += time.perf_counter() - trainer.began
                held.stopped = loop.ended(step)
                if step % recipe.logging.every == 0 or held.stopped:
                    loop.log(step, trainer.rate, trainer.norm)
                whole = int(loop.stream.epochs)
                due = whole > held.epochs if every is None else step % every == 0
                held.epochs = whole
                control.should_evaluate = bool(due or held.stopped)
                late = time.perf_counter() - loop.saved > 60.0 * options.checkpoint_minutes
                control.should_save = control.should_evaluate or late
                if control.should_save:
                    loop.check(step)
                control.should_training_stop |= bool(held.stopped)

            def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                loop.saved = time.perf_counter()
                loop._forget()

        class Run(Trainer):
            rate: float
            norm: Any = None
            sizes: list[int]
            total: int
            began: float

            def get_train_dataloader(self) -> Any:
                return loop.stream

            def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
                self.began = time.perf_counter()
                batches = [next(epoch_iterator) for _ in range(num_batches)]
                self.sizes = [loop.prepared.size(batch) for batch in batches]
                self.total = sum(self.sizes)
                return batches, None

            def training_step(
                self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
            ) -> Tensor:
                model.train()
                self.rate = self.optimizer.param_groups[0]["lr"]  # type: ignore[union-attr]  # made
                size = self.sizes.pop(0)
                share = size / max(1, self.total)
                return loop.step(self._prepare_inputs(inputs), size, share, self.state.global_step)

            def _clip_grad_norm(self, model: Any) -> Any:
                self.norm = super()._clip_grad_norm(model)  # type: ignore[no-untyped-call]
                return self.norm

            def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
                return grad_norm  # without clipping it is not needed

            def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
                assert self.optimizer is not None

                def factor(step: int) -> float:
                    return rate_factor(recipe.optimiser, step, loop.share(step, clock=False))

                self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)
                return self.lr_scheduler

            def floating_point_ops(self, inputs: Any) -> int:
                return 0  # counted at every step, for nobody

            def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
                loop.evaluate(self.state.global_step)
                self.control = self.callback_handler.on_evaluate(
                    self.args, self.state, self.control, {}
                )
                self.control.should_training_stop |= bool(held.stopped)
                return {}

            def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
                assert output_dir is not None
                loop._save(Path(output_dir))

            def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
                loop._load(Path(resume_from_checkpoint))

        groups = parameter_groups(self.model, recipe.optimiser.weight_decay)
        trainer = Run(
            model=self.model,
            args=arguments(
                self.checkpoints,
                self.device,
                steps=options.steps,
                seed=options.seed,
                accumulate=options.accumulate,
                max_grad_norm=recipe.optimiser.clip or 0.0,
                logging_nan_inf_filter=False,  # it would wait for the device at each step
                ignore_data_skip=True,  # the stream goes to its place by itself
            ),
            train_dataset=_Unused(),
            optimizers=(
                torch.optim.AdamW(
                    groups,
                    lr=recipe.optimiser.rate,
                    betas=recipe.optimiser.betas,
                    eps=recipe.optimiser.eps,
                    fused=self.device.type in ("cpu", "cuda"),
                ),
                None,
            ),
            callbacks=[Marks()],
        )
        silence(trainer)
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))

    def report(self, task: str, resumed: bool) -> RunReport:
        """What the run did."""
        held = self.held
        state = _read(last_checkpoint(self.checkpoints) / "trainer_state.json")  # type: ignore[operator]  # the run has ended with one
        return RunReport(
            task=task,
            folder=str(self.folder),
            parameters=sum(p.numel() for p in self.model.parameters()),
            steps=int(state["global_step"]),
            epochs=self.stream.epochs,
            seconds=round(self.seconds, 3),
            cpu_seconds=round(self.cpu_seconds, 3),
            tokens_per_second=round(held.tokens / max(held.training, 1e-9), 1),
            best=_read(self.folder / "best" / "metrics.json"),
            last=held.last,
            stopped=held.stopped,
            resumed=resumed,
            notes=tuple(filter(None, (*self.prepared.notes, self.short))),
        )


class _Unused(torch.utils.data.Dataset[Batch]):
    """The Trainer asks for a data set; batches come from the stream."""


def device_of(name: str, option: str = "training.device") -> torch.device:
    """The device that an option names; "auto": an accelerator where there is one.

    Raises:
        OptionError: it is not there.
    """
    if name == "auto":
        found = torch.accelerator.current_accelerator(check_available=True)
        return torch.device("cpu") if found is None else found
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise OptionError(f"{option}={name!r} is not there: {error}") from None
    return device
