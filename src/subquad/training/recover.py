"""`recover`: a few minutes of training that give a converted model its output back."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from subquad.convert import routing
from subquad.convert.paths import exactly
from subquad.convert.saving import RECIPE
from subquad.convert.swap import converted_layers
from subquad.errors import OptionError, nearest
from subquad.options import integer_problem, number_problem
from subquad.training.distill import (
    LOSSES,
    HeldOut,
    call,
)
from subquad.training.student import Student, student
from subquad.training.texts import Example, collator, examples_of, split
from subquad.training.trainer import (
    MARKS,
    Point,
    Settings,
    fit,
    line,
    load,
    need_trainer,
    tensors,
)
from subquad.training.transfer import mechanism_parameters

__all__ = ["METHODS", "RecoveryReport", "recover"]

METHODS = ("auto", "transfer", "lora", "full")

_TRANSFER_SHARE = 0.4
"""Share of the steps or minutes that "auto" gives to attention transfer, where there is any."""

_LARGE = 60_000_000
"""Parameters above which "auto" trains low-rank updates: Adam holds two copies of all others."""

_HELD_OUT_SHARE, _HELD_OUT_MOST = 0.1, 32


@dataclass(frozen=True)
class RecoveryReport:
    """What `recover` did; `print` it, or read its fields.

    Args:
        mechanism: of the converted layers, in the option grammar.
        method: stages joined by " + ", such as "transfer + full".
        loss: of the last stage.
        before, after: held-out metrics of the converted model, see `HeldOut.measure`; before
            training and after it. The exact model has cosine, agreement and ratio 1.
        curve: a point for each mark of each stage: ``stage``, ``step``, ``seconds``, ``loss`` and
            the held-out metrics; the first has step 0.
        steps: optimiser steps.
        seconds: wall-clock time of all stages, the time before a resumption included.
        examples, held_out: numbers of examples.
        trained, parameters: numbers of parameters that were trained, and of all in the model.
        seed: of the run. The same seed and number of steps give the same weights on a CPU; a
            limit in minutes gives as many steps as the machine makes.
        resumed: it continued from a checkpoint.
        notes: what to know, one sentence each.
    """

    mechanism: str
    method: str
    loss: str
    before: dict[str, float]
    after: dict[str, float]
    curve: tuple[Point, ...]
    steps: int
    seconds: float
    examples: int
    held_out: int
    trained: int
    parameters: int
    seed: int
    resumed: bool = False
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**dataclasses.asdict(self), "curve": [dict(point) for point in self.curve]}

    def __str__(self) -> str:
        share = 100.0 * self.trained / self.parameters
        lines = [
            f"{self.mechanism}: recovered by {self.method} in {self.steps} steps, "
            f"{self.seconds / 60:.1f} minutes"
            + (" (continued from a checkpoint)" if self.resumed else ""),
            f"  trained {self.trained:,} of {self.parameters:,} parameters ({share:.3g}%) on "
            f"{self.examples} examples, seed {self.seed}",
        ]
        lines += [
            f"  {name:<17} {value:.5f} → {self.after[name]:.5f}   ({self.held_out} held-out)"
            for name, value in self.before.items()
        ]
        lines += [f"  note: {note}" for note in self.notes]
        lines.append("  curve:")
        lines += [f"    {point['stage']:<9} {line(point['step'], None, shown(point))}"
                  for point in self.curve]  # fmt: skip
        return "\n".join(lines)

    def picture(self, path: str | Path) -> None:
        """Draws the held-out metrics against the time spent, one panel each, as PNG.

        Raises:
            ImportError: matplotlib is not installed, naming the extra that brings it.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("pictures need pip install 'subquad[arena]'") from error
        figure = Figure(figsize=(4.2 * len(self.before), 3.2), layout="constrained")
        for index, name in enumerate(self.before):
            axes = figure.add_subplot(1, len(self.before), index + 1)
            for stage in dict.fromkeys(point["stage"] for point in self.curve):
                rows = [point for point in self.curve if point["stage"] == stage]
                axes.plot([p["seconds"] / 60 for p in rows], [p[name] for p in rows], "o-",
                          markersize=3, label=stage)  # fmt: skip
            axes.axhline(self.before[name], color="0.6", linewidth=1, linestyle=":")
            axes.set(title=name.replace("_", " "), xlabel="minutes")
        figure.axes[0].legend(frameon=False)
        figure.savefig(path, dpi=130)


def shown(point: Point) -> Point:
    """A point without its stage."""
    return {name: value for name, value in point.items() if name != "stage"}


def recover(
    model: nn.Module,
    data: Any,
    tokenizer: Any = None,
    *,
    method: str = "auto",
    minutes: float | None = 10.0,
    steps: int | None = None,
    held_out: Any = None,
    length: int = 512,
    batch: int = 8,
    accumulate: int = 1,
    rate: float | None = None,
    rank: int = 16,
    loss: str = "auto",
    where: Callable[[str, nn.Parameter], bool] | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    resume_from: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> RecoveryReport:
    """Trains a converted model, in place, to say again what it said with exact attention.

    The teacher is the model itself with its original weights and exact attention, so that any
    text will do: no labels are needed.

    ===========  ========================================  =====================================
    method       what is trained                           loss
    ===========  ========================================  =====================================
    transfer     the mechanisms' own parameters, such as   each layer's attention output against
                 Hedgehog's feature maps                   its exact one: Σ‖o − o*‖²/Σ‖o*‖²
    lora         low-rank updates W + (α/r)·BA of all      the outputs': hidden states, relative
                 linear layers (peft), and the             squared error, mean over layers;
                 mechanisms' own parameters                logits, Kullback–Leibler divergence
    full         all weights but embeddings, and the       the same; the teacher is a copy
                 mechanisms' own parameters
    auto         transfer, where mechanisms have           as above
                 parameters, for 40% of the time; then
                 full, or lora above 60M parameters
    ===========  ========================================  =====================================

    Dropout is off and Adam has no weight decay: the target is the model itself. The learning
    rate rises for 5% of the run and falls to 0 along a cosine. At ten marks, or fewer where that
    would take more than a fifth of the minutes, the model is measured on held-out examples.
    Low-rank updates are added to the weights at the end, so that the model has its old structure
    and no extra cost. A stage that ends with less cosine or agreement than it began with is
    undone. `subquad.revert` puts exact attention back, with the weights as they are then.

    Cost of a step: transfer, an exact forward pass and the mechanisms' forward and backward;
    else forward and backward of the model and an exact forward pass of the teacher.

    Args:
        model: converted by `subquad.convert`.
        data: texts, with `tokenizer`; or examples, mappings of tensors without a batch
            dimension, such as ``{"pixel_values": image}``.
        tokenizer: of the model, for texts.
        method: see above.
        minutes: limit on wall-clock time for all stages, the measuring in between included.
        steps: number of optimiser steps, at least one for each stage; None for as many as
            `minutes` hold. With both, the learning rate follows the steps and minutes cut off.
        held_out: data of the same kind for the metrics; None sets aside a tenth of the elements
            of `data`, chosen by the seed, and measures at most 32 passages of them.
        length: longest passage of a text, in tokens.
        batch: examples a step.
        accumulate: parts in which a batch is computed, to save memory.
        rate: learning rate. None for 5e-2 (transfer), min(1e-3, 1e-3·√loss) (lora) and
            min(1e-4, 2e-4·√loss) (full), with the untrained model's loss on held-out examples:
            Adam's steps do not shrink with the error, so the rate has to. In lora and full the
            mechanisms' own parameters are trained at ten times that rate.
        rank: r of the low-rank updates; their α is 2r.
        loss: "hidden", "logits" (the default where the model has any), or "task": the model's
            own loss from examples with labels.
        where: ``where(name, parameter)`` picks among the weights that `method` would train;
            the others stay as they are, bit for bit.
        seed: of all that is random.
        out: folder for checkpoints; None keeps none.
        resume_from: a folder that was `out`: continues there after the newest complete
            checkpoint, from the model as it was before training. With steps, the result on a CPU
            is that of the run that was never stopped, bit for bit.
        progress: is told a line at each measurement.

    Returns:
        The report, with the metrics before and after and the curve.

    Raises:
        OptionError: the model is not converted, wrong options, nothing to train; or a folder
            that holds another run.
        ImportError: a package of the extra ``train`` is missing.

    Example:
        >>> import torch, subquad as sq
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(
        ...     hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
        ... )
        >>> model = BertModel(config).eval()
        >>> _ = sq.convert(model, "hedgehog")
        >>> data = [{"input_ids": torch.randint(99, (40,))} for _ in range(8)]
        >>> report = sq.recover(model, data, method="transfer", steps=20)
        >>> report.curve[-1]["loss"] < report.curve[1]["loss"]
        True
    """
    _check(model, method, minutes, steps, length, batch, accumulate, rank, loss, rate)
    need_trainer()
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    length = min(length, longest) if isinstance(longest, int) and longest > 0 else length
    own_tests = held_out is None
    if own_tests:
        data, held_out = split(data, _HELD_OUT_SHARE, _HELD_OUT_MOST, seed)
    examples = examples_of(data, tokenizer, length)
    tests = examples_of(held_out, tokenizer, length, "held_out")
    if own_tests:  # long texts give many passages, and each mark measures all
        tests = tests[:: -(-len(tests) // _HELD_OUT_MOST)]
    folder, resume = _folder(out, resume_from)
    stack = collator(model, tokenizer)
    device = next(model.parameters()).device

    def prepared(rows: list[Example]) -> Example:
        return {name: value.to(device) for name, value in stack(rows).items()}

    with contextlib.ExitStack() as scope:
        scope.enter_context(_as_it_was(model))
        if folder is None:
            folder = Path(scope.enter_context(tempfile.TemporaryDirectory()))
        target = HeldOut(
            model, [prepared(tests[i : i + batch]) for i in range(0, len(tests), batch)]
        )
        before = target.measure(model)  # also builds mechanisms that wait for their first call
        marks = MARKS
        if steps is None and minutes is not None:  # measuring may take a fifth of the time
            start = time.perf_counter()
            target.measure(model)
            marks = int(min(MARKS, max(2, 12.0 * minutes / (time.perf_counter() - start))))
        stages = _stages(model, method)
        sample = prepared(tests[:batch])
        loss = _loss(model, loss, prepared(tests[:1]))
        resumed = False
        if out or resume_from:
            recipe = {
                "stages": stages, "steps": steps, "minutes": minutes, "length": length,
                "batch": batch, "accumulate": accumulate, "rate": rate, "rank": rank, "loss": loss,
                "seed": seed, "examples": _digest(examples), "held_out": _digest(tests),
                "mechanism": _mechanism(model), "where": _chosen(model, where),
                "weights": _digest([{n: t for n, t in model.state_dict().items()
                                     if isinstance(t, torch.Tensor)}]),
            }  # fmt: skip
            resumed = _begin(folder, recipe, resume)
        curve: list[Point] = [{"stage": stages[0], "step": 0, "seconds": 0.0, **before}]
        count, now, notes = 0, before, []
        for index, stage in enumerate(stages):
            share = _share(stage, stages)
            settings = Settings(
                None if steps is None else max(1, round(share * steps)),
                None if minutes is None else share * minutes,
                batch, accumulate, seed, marks,
            )  # fmt: skip
            own = folder / f"{index + 1}-{stage}"
            with student(model, stage, rate, rank, where, loss, seed, sample) as learner:
                count = max(count, sum(p.numel() for p in learner.trained.values()))
                start_values = {n: t.clone() for n, t in tensors(learner.trained).items()}
                points = _run(
                    learner, examples, stack, lambda: target.measure(model), settings, own,
                    resume=resumed, keep=bool(out or resume_from), progress=progress,
                )  # fmt: skip
                found = {name: points[-1][name] for name in before}
                metric = next(iter(before))
                if found[metric] >= now[metric]:
                    now = found
                else:  # worse, or not a number
                    load(learner.trained, start_values)
                    notes.append(
                        f"{stage} was undone: it ended with {metric} {found[metric]:.5f}, from "
                        f"{now[metric]:.5f}; give a lower rate="
                    )
            offset = curve[-1]
            for point in points:
                point["seconds"] += offset["seconds"]
                point["step"] += offset["step"]
                curve.append({"stage": stage, **point})
        after = target.measure(model)
    report = RecoveryReport(
        mechanism=_mechanism(model),
        method=" + ".join(stages),
        loss=loss if stages[-1] != "transfer" else "attention output",
        before=before,
        after=after,
        curve=tuple(curve),
        steps=curve[-1]["step"],
        seconds=curve[-1]["seconds"],
        examples=len(examples),
        held_out=len(tests),
        trained=count,
        parameters=sum(p.numel() for p in model.parameters()),
        seed=seed,
        resumed=resumed,
        notes=tuple(notes),
    )
    model.__dict__[RECIPE] = _recipe(report)  # for the model card
    return report


def _recipe(report: RecoveryReport) -> dict[str, Any]:
    """A report as lines of a model card."""
    return {
        "recovered by": f"{report.method}, {report.steps} steps, {report.seconds / 60:.1f} minutes",
        "trained": f"{report.trained:,} of {report.parameters:,} parameters on {report.examples} "
        f"examples, seed {report.seed}",
        **{
            f"{name} on {report.held_out} held-out examples": f"{before:.5f} → "
            f"{report.after[name]:.5f}"
            for name, before in report.before.items()
        },
    }


def _check(
    model: nn.Module,
    method: str,
    minutes: float | None,
    steps: int | None,
    length: int,
    batch: int,
    accumulate: int,
    rank: int,
    loss: str,
    rate: float | None,
) -> None:
    problems = []
    for name, value, allowed in (("method", method, METHODS), ("loss", loss, LOSSES)):
        if value not in allowed:
            hint = nearest(str(value), allowed)
            problems.append(f"{name}={value!r} is none of {', '.join(allowed)}{hint}")
    if steps is None and minutes is None:
        problems.append("give steps= or minutes=: neither says how long to train")
    for name, number in (("minutes", minutes), ("rate", rate)):
        if number is not None:  # endless minutes are fine where steps end the run
            finite = name != "minutes" or steps is None
            problems += number_problem(name, number, 0.0, open_low=True, finite=finite)
    for name, whole in (("steps", steps), ("length", length), ("batch", batch),
                        ("accumulate", accumulate), ("rank", rank)):  # fmt: skip
        if whole is not None:
            problems += integer_problem(name, whole, 1)
    if not problems and batch % accumulate:
        problems.append(f"accumulate={accumulate} must divide batch={batch}")
    if not isinstance(model, nn.Module) or not converted_layers(model):
        problems.append("the model is not converted: call subquad.convert(model, ...) first")
    if problems:
        raise OptionError("recover: " + "; ".join(problems))


def _stages(model: nn.Module, method: str) -> list[str]:
    if method != "auto":
        return [method]
    total = sum(p.numel() for p in model.parameters())
    last = "lora" if total > _LARGE else "full"
    return ["transfer", last] if mechanism_parameters(model) else [last]


def _share(stage: str, stages: list[str]) -> float:
    """Of the steps or minutes."""
    if len(stages) == 1:
        return 1.0
    return _TRANSFER_SHARE if stage == "transfer" else 1.0 - _TRANSFER_SHARE


def _loss(model: nn.Module, loss: str, one: Example) -> str:
    if loss != "auto":
        return loss
    with torch.no_grad(), exactly(model):
        return "hidden" if call(model, one).logits is None else "logits"


def _mechanism(model: nn.Module) -> str:
    specs = [str(getattr(layer._modules[routing.SLOT], "config", "?"))
             for _, layer in converted_layers(model)]  # fmt: skip
    return " | ".join(dict.fromkeys(specs))


@contextlib.contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Puts back which parameters need gradients and which modules are in training mode."""
    gradients = {name: p.requires_grad for name, p in model.named_parameters()}
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(gradients.get(name, True))
            parameter.grad = None
        for module in training:
            module.training = True


# ---- folders -----------------------------------------------------------------------------


def _folder(out: str | Path | None, resume_from: str | Path | None) -> tuple[Path | None, bool]:
    if resume_from is not None:
        folder = Path(resume_from)
        if not (folder / "recovery.json").is_file():
            raise OptionError(f"resume_from={str(folder)!r} holds no recovery run")
        if out is not None and Path(out).resolve() != folder.resolve():
            raise OptionError("out and resume_from are two folders: a run goes on where it is")
        return folder, True
    return (None if out is None else Path(out)), False


def _begin(folder: Path, recipe: dict[str, Any], resume: bool) -> bool:
    """Writes the run's recipe, or compares it with that of the run to be continued."""
    path = folder / "recovery.json"
    if resume:
        held = json.loads(path.read_text(encoding="utf-8"))
        differ = [
            f"{name}: {held.get(name)!r} there, {value!r} now"
            for name, value in recipe.items()
            if held.get(name) != value
        ]
        if differ:
            raise OptionError(f"{folder} holds another run: " + "; ".join(differ))
        return True
    if path.exists():
        raise OptionError(
            f"{folder} holds a recovery run already: continue it with resume_from=, or give "
            "another folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(recipe, indent=1), encoding="utf-8")
    return False


def _digest(rows: list[Example]) -> str:
    """A fingerprint of tensors, so that no run is continued from other weights or on other data."""
    found = hashlib.sha256()
    for row in rows:
        for name, value in sorted(row.items()):
            found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            flat = value.detach().cpu().contiguous().flatten()
            found.update(flat.view(torch.uint8).numpy().data)
    return found.hexdigest()[:16]


def _chosen(model: nn.Module, where: Callable[[str, nn.Parameter], bool] | None) -> str | None:
    """A fingerprint of the parameters that `where` picks."""
    if where is None:
        return None
    names = [name for name, parameter in model.named_parameters() if where(name, parameter)]
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]


def _run(
    learner: Student,
    examples: list[Example],
    stack: Any,
    measure: Callable[[], dict[str, float]],
    settings: Settings,
    folder: Path,
    *,
    resume: bool,
    keep: bool,
    progress: Callable[[str], None] | None,
) -> list[Point]:
    """One stage, or what it left if it was completed before."""
    from safetensors.torch import load_file, save_file

    done = folder / "curve.json"
    if resume and done.is_file():
        load(learner.trained, load_file(folder / "trained.safetensors"))
        points: list[Point] = json.loads(done.read_text(encoding="utf-8"))
        return points
    points = fit(
        learner.model, learner.objective, learner.trained, learner.groups, examples, stack,
        measure, settings, folder, resume=resume, keep=keep, progress=progress,
    )  # fmt: skip
    if keep:
        save_file(tensors(learner.trained), folder / "trained.safetensors")
        done.write_text(json.dumps(points), encoding="utf-8")  # last: it says all is there
    return points
