"""The loop: transformers' Trainer around any objective, for a number of steps or of minutes.

Checkpoints hold what training changes: the trained parameters, the optimiser, the random state
and the curve. A run that is continued from one equals, on a CPU, the run that was not stopped.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from subquad.training.texts import Example

__all__ = ["Objective", "Point", "Settings", "fit", "need_trainer"]

MARKS = 10
"""Times that a run is measured and saved, in equal distances; fewer where minutes are short."""

WARM_UP = 0.05
"""Share of the run in which the learning rate rises; from there it falls to 0 along a cosine."""

Point = dict[str, Any]
"""One point of a curve: ``step``, ``seconds``, ``loss`` and the held-out metrics."""


class Objective(Protocol):
    """What is minimised."""

    def step(self, inputs: dict[str, Tensor], share: float = 1.0) -> Tensor:
        """Adds `share` times the gradients of a batch's loss; returns the loss."""


@dataclass(frozen=True)
class Settings:
    """How long and how fast.

    Args:
        steps: optimiser steps; None for as many as `minutes` hold.
        minutes: of wall-clock time at most; None without limit.
        batch: examples a step, in `accumulate` parts of equal size.
        seed: order of the examples, and all else that is random.
        marks: times that it is measured.
    """

    steps: int | None
    minutes: float | None
    batch: int
    accumulate: int
    seed: int
    marks: int = MARKS


@dataclass
class _Clock:
    """Progress from 0 to 1, by steps where their number is known, else by time."""

    settings: Settings
    before: float = 0.0
    start: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        return self.before + time.perf_counter() - self.start

    def progress(self, steps: int) -> float:
        if self.settings.steps is not None:
            return steps / self.settings.steps
        assert self.settings.minutes is not None
        return min(1.0, self.seconds / (60.0 * self.settings.minutes))

    def rate(self, steps: int) -> float:
        """Factor of the learning rate."""
        done = self.progress(steps)
        if self.settings.steps is not None:
            done = (steps + 0.5) / self.settings.steps  # the first step moves, so does the last
        if done < WARM_UP:
            return max(done, 0.01) / WARM_UP
        return 0.5 * (1.0 + math.cos(math.pi * min(1.0, (done - WARM_UP) / (1.0 - WARM_UP))))

    def over(self, steps: int) -> bool:
        """Whether another step like those so far would pass the time limit."""
        if self.settings.minutes is None:
            return False
        mean = self.seconds / max(1, steps)
        return self.seconds + mean > 60.0 * self.settings.minutes


def need_trainer() -> None:
    """Imports what training needs.

    Raises:
        ImportError: naming the extra that brings it.
    """
    try:
        import accelerate  # noqa: F401  # only to see whether they are there
        import transformers  # noqa: F401
    except ImportError as error:
        raise ImportError("training needs pip install 'subquad[train]'") from error


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that is complete: its state is written last."""
    found = []
    for path in folder.glob("checkpoint-*"):
        try:
            state = json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
            found.append((int(state["global_step"]), path))
        except (OSError, ValueError, KeyError):
            continue
    return max(found)[1] if found else None


def arguments(
    folder: Path,
    device: torch.device,
    *,
    steps: int | None,
    seed: int,
    accumulate: int,
    **more: Any,
) -> Any:
    """transformers' TrainingArguments for a loop that logs, measures and saves when it says so.

    Args:
        folder: for checkpoints, of which the newest two are kept.
        device: one, whatever else the machine has.
        steps: optimiser steps; None without end.
        seed: of Python's, numpy's and torch's random states.
        accumulate: batches of a step.
        more: other arguments.
    """
    from transformers import TrainingArguments

    found = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps or 10**9,
        gradient_accumulation_steps=accumulate,
        seed=seed,
        data_seed=seed,
        use_cpu=device.type == "cpu",
        save_strategy="no",
        eval_strategy="no",
        logging_strategy="no",
        save_total_limit=2,
        report_to="none",
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        **more,
    )
    if found.n_gpu > 1:
        found._n_gpu = 1  # or else the Trainer would spread the batch over all
    return found


def silence(trainer: Any) -> None:
    """Takes out what writes to the terminal."""
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars and remarks, which saving a model brings."""
    from transformers.utils import logging

    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


def fit(
    model: nn.Module,
    objective: Objective,
    trained: Mapping[str, nn.Parameter],
    groups: Sequence[dict[str, Any]],
    examples: Sequence[Example],
    stack: Callable[[Sequence[Example]], Example],
    measure: Callable[[], dict[str, float]],
    settings: Settings,
    folder: Path,
    *,
    resume: bool,
    keep: bool,
    progress: Callable[[str], None] | None,
) -> list[Point]:
    """Trains `trained` in place and returns the curve.

    Args:
        model: whose device is used; runs in eval mode, without dropout.
        objective: gives the gradients.
        trained: parameters by the names under which checkpoints keep them.
        groups: the optimiser's, with learning rates.
        examples, stack: the data, and how it becomes a batch.
        measure: held-out metrics of the model as it is now.
        folder: for checkpoints.
        resume: continue from the newest checkpoint in `folder`, if there is one.
        keep: write checkpoints at each mark.
        progress: is told a line at each mark.
    """
    from safetensors.torch import load_file, save_file
    from transformers import Trainer, TrainerCallback

    clock = _Clock(settings)

    class Marks(TrainerCallback):
        """Measures at equal distances, stops in time."""

        passed = 0

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            curve = [row for row in state.log_history if "seconds" in row]
            if curve:
                clock.before, clock.start = curve[-1]["seconds"], time.perf_counter()
            self.passed = math.floor(settings.marks * clock.progress(state.global_step) + 1e-9)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            done = clock.progress(state.global_step)
            control.should_training_stop |= clock.over(state.global_step) or done >= 1.0
            mark = math.floor(settings.marks * done + 1e-9)
            if mark > self.passed or control.should_training_stop:
                self.passed = mark
                control.should_evaluate = True
                control.should_save = keep

    class Recovery(Trainer):
        losses: list[Tensor]

        def training_step(
            self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
        ) -> Tensor:
            share = 1.0 / self.current_gradient_accumulation_steps
            loss = objective.step(self._prepare_inputs(inputs), share)
            self.losses.append(loss)
            return share * loss

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            assert self.optimizer is not None
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, clock.rate)
            return self.lr_scheduler

        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            loss = torch.stack(self.losses).mean().item()
            self.losses = []
            point = {"loss": loss, **measure(), "seconds": round(clock.seconds, 3)}
            self.state.log_history.append({"step": self.state.global_step, **point})
            if progress is not None:
                progress(line(self.state.global_step, settings.steps, point))
            self.control = self.callback_handler.on_evaluate(
                self.args, self.state, self.control, point
            )
            return point

        def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
            assert output_dir is not None
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            save_file(tensors(trained), Path(output_dir) / "trained.safetensors")

        def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
            load(trained, load_file(Path(resume_from_checkpoint) / "trained.safetensors"))

    device = next(model.parameters()).device
    with own_random_state():
        trainer = Recovery(
            model=model,
            args=arguments(
                folder,
                device,
                steps=settings.steps,
                seed=settings.seed,
                accumulate=settings.accumulate,
                per_device_train_batch_size=settings.batch // settings.accumulate,
            ),
            train_dataset=_Rows(examples),
            data_collator=stack,
            optimizers=(torch.optim.AdamW(groups, weight_decay=0.0), None),
            callbacks=[Marks()],
        )
        trainer.losses = []
        silence(trainer)
        checkpoint = last_checkpoint(folder) if resume else None
        model.eval()
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    return [row for row in trainer.state.log_history if "seconds" in row]


def tensors(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Their values, for safetensors."""
    return {name: p.detach().contiguous() for name, p in parameters.items()}


@torch.no_grad()
def load(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
    """Puts values into parameters of the same names."""
    for name, parameter in parameters.items():
        parameter.copy_(values[name])


def line(step: int, steps: int | None, point: Point) -> str:
    """A point for people."""
    metrics = "  ".join(
        f"{name} {value:.5g}" for name, value in point.items() if name not in ("seconds", "step")
    )
    of = f"/{steps}" if steps else ""
    return f"step {step}{of}  {point['seconds']:.0f} s  {metrics}"


class _Rows(torch.utils.data.Dataset[Example]):
    def __init__(self, examples: Sequence[Example]) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        return self.examples[index]


@contextlib.contextmanager
def own_random_state() -> Iterator[None]:
    """Puts the random states of Python, numpy and torch back afterwards: the Trainer seeds them."""
    from numpy import random as arrays  # its global state is what the Trainer seeds

    python, legacy = random.getstate(), arrays.get_state()  # noqa: NPY002  # to be put back
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            arrays.set_state(legacy)  # noqa: NPY002  # likewise
