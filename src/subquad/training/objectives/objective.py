"""`Objective`: the loss of a batch, by plain arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.attention.base import Mechanism
from subquad.attention.base import penalties as penalties_of
from subquad.errors import OptionError
from subquad.options import Config, choice_problem, number_problem
from subquad.training.objectives.cross_entropy import cross_entropy
from subquad.training.objectives.feeding import Own, fed, stepwise_cross_entropy
from subquad.training.objectives.guidance import GuidedAttention
from subquad.training.objectives.noise import Noise
from subquad.training.objectives.reading import Reading, kind_of, uniform
from subquad.training.objectives.scheduled import Scheduled, averaged, passed, places_kept
from subquad.training.objectives.sequence import (
    Reward,
    SequenceTraining,
    sentence_reward,
    sequence_loss,
)

__all__ = ["Losses", "Objective"]

FEEDINGS = ("teacher", "free", "scheduled")
FREE_LOSSES = ("summed", "stepwise")
FREE_TOKENS = ("argmax", "sample")


@dataclass(frozen=True)
class Losses:
    """What a batch has cost.

    Args:
        total: a scalar with its graph.
        terms: what it is the sum of, by name, without a graph.
        notes: other numbers for a log.
    """

    total: Tensor
    terms: Mapping[str, Tensor]
    notes: Mapping[str, Tensor | float] = field(default_factory=dict)

    @property
    def parts(self) -> dict[str, float]:
        """Terms and notes as numbers; on an accelerator this waits for it."""
        return {name: float(value) for name, value in {**self.terms, **self.notes}.items()}


class Objective:
    """What training minimises, of a batch: cross entropy and what else is asked for.

        loss = (1 − λ)·(cross entropy + guided attention) + λ·sequence loss + penalties

    **Feeding.** The decoder reads the truth ("teacher"), its own tokens ("free": it predicts
    token t from what it has written itself before), or the truth with a probability that falls
    while it trains ("scheduled", see `Scheduled`). Own tokens are chosen without gradient, by the
    decoder without dropout, from the source as the loss reads it. The loss is that of one pass
    over them ("summed"), or of each token with what the decoder remembers held fixed ("stepwise",
    see `stepwise_cross_entropy`). Labels are always the truth's.

    Works with `Seq2SeqTransformer` (with copies, or of speech), `CausalTransformer`,
    `NonAutoregressiveTransformer`, whose own loss it then asks for, and encoders with a head,
    all with any mechanism. What does not fit together is refused by the constructor, and what
    does not fit a model by `check`, or by the first call.

    Cost: teacher forcing is one pass; each pass of "parallel" or "two_pass" adds one of the
    decoder without gradient; "free", "original" and "stepwise" take a step for each token;
    see `sequence_loss` for the rest.

    Papers: see the parts.

    Args:
        label_smoothing: ε, see `cross_entropy`.
        feeding: "teacher", "free" or "scheduled".
        free_loss: "summed" or "stepwise", where the decoder writes token by token.
        free_token: its own token with "free": "argmax" or "sample".
        scheduled: a mapping with arguments of `Scheduled`.
        noise: a mapping with arguments of `Noise`, on what is read.
        guided: a mapping with arguments of `GuidedAttention`.
        sequence: a mapping with arguments of `SequenceTraining`.
        penalties: factor of `subquad.penalties`, what mechanisms ask for.

    Raises:
        OptionError: naming everything that is wrong.

    Example:
        >>> import torch, subquad as sq
        >>> from subquad.training.objectives import Objective
        >>> model = sq.models.Seq2SeqTransformer(
        ...     sq.models.Seq2SeqTransformerConfig(
        ...         vocab_size=50, d_model=32, encoder_layers=1, decoder_layers=1
        ...     )
        ... )
        >>> objective = Objective(
        ...     feeding="scheduled",
        ...     scheduled={"variant": "parallel", "decay": "inverse_sigmoid"},
        ...     guided={"loss": "diagonal", "until": 0.5},
        ... )
        >>> source, target = torch.randint(5, 50, (2, 4, 7))
        >>> losses = objective(model, {"input_ids": source, "labels": target}, progress=0.3)
        >>> losses.total.backward()
        >>> sorted(losses.parts)
        ['cross_entropy', 'guided', 'truth']
    """

    tokenizer: Any = None
    """Makes texts of tokens for rewards of texts; whoever trains sets it."""

    reward: Reward | None = None
    """Of outputs and references, in place of the one that `sequence` names."""

    def __init__(
        self,
        label_smoothing: float = 0.1,
        *,
        feeding: str = "teacher",
        free_loss: str = "summed",
        free_token: str = "argmax",
        scheduled: Mapping[str, Any] | None = None,
        noise: Mapping[str, Any] | None = None,
        guided: Mapping[str, Any] | None = None,
        sequence: Mapping[str, Any] | None = None,
        penalties: float = 1.0,
    ) -> None:
        self.label_smoothing, self.penalties = label_smoothing, penalties
        self.feeding, self.free_loss, self.free_token = feeding, free_loss, free_token
        problems = [
            *number_problem("label_smoothing", label_smoothing, 0.0, 1.0),
            *choice_problem("feeding", feeding, FEEDINGS),
            *choice_problem("free_loss", free_loss, FREE_LOSSES),
            *choice_problem("free_token", free_token, FREE_TOKENS),
            *number_problem("penalties", penalties, 0.0),
        ]
        if feeding == "scheduled" and scheduled is None:
            scheduled = {}
        self.scheduled = _options(Scheduled, scheduled, problems)
        self.noise = _options(Noise, noise, problems)
        self.guided = _options(GuidedAttention, guided, problems)
        self.sequence = _options(SequenceTraining, sequence, problems)
        problems += self._combinations(scheduled is not None)
        if problems:
            raise OptionError("Objective: " + "; ".join(problems))

    def _combinations(self, scheduled: bool) -> Iterator[str]:
        """What does not fit together."""
        if scheduled and self.feeding in ("teacher", "free"):
            yield (
                f"scheduled changes nothing with feeding={self.feeding}: it needs feeding=scheduled"
            )
        if self.free_token != "argmax" and self.feeding != "free":
            yield (
                f"free_token={self.free_token} needs feeding=free, given {self.feeding} "
                "(scheduled has its own token)"
            )
        if self.free_loss == "stepwise":
            if self.feeding == "teacher":
                yield (
                    "free_loss=stepwise needs feeding=free or scheduled: with the truth all "
                    "tokens are predicted in one pass"
                )
            elif self.scheduled is not None and self.scheduled.variant != "original":
                yield (
                    "free_loss=stepwise needs scheduled.variant=original: "
                    f"{self.scheduled.variant} is there to predict all tokens in one pass"
                )
            if self.guided is not None:
                yield (
                    "guided needs free_loss=summed: step by step there is no whole alignment to "
                    "be guided"
                )
        if self.sequence is not None and self.sequence.weight == 1 and self.sequence.after == 0:
            idle = {
                "feeding": self.feeding != "teacher",
                "guided": self.guided is not None,
                "noise": self.noise is not None,
            }
            for name in (name for name, given in idle.items() if given):
                yield (
                    f"{name} changes nothing with sequence.weight=1: it acts on cross entropy, "
                    "which has no weight then"
                )

    # ---- models --------------------------------------------------------------------------

    def check(self, model: Any) -> None:
        """Whether a model can be trained so.

        Raises:
            OptionError: naming everything that does not fit.
        """
        problems = list(self._misfits(model, kind_of(model)))
        if problems:
            raise OptionError(f"Objective: {type(model).__name__}: " + "; ".join(problems))

    def _misfits(self, model: Any, kind: str) -> Iterator[str]:
        noise = self.noise
        if kind in ("parallel", "other"):
            why = {
                "parallel": "its decoder writes all tokens at once and is fed with none of them",
                "other": "it has no decoder",
            }[kind]
            given = {
                "feeding": self.feeding != "teacher",
                "guided": self.guided is not None,
                "sequence": self.sequence is not None,
                "noise on the target": noise is not None and noise.of_target,
            }
            yield from (f"{name} does not apply: {why}" for name, used in given.items() if used)
        if kind == "other" and noise is not None and noise.of_source:
            yield "noise does not apply: it is for what an encoder and a decoder read"
        if kind == "causal":
            if self.guided is not None:
                yield "guided does not apply: it has no cross-attention"
            if noise is not None and noise.of_source:
                yield "noise on the source does not apply: it has none"
        sound = getattr(model, "front_end", None) is not None
        if sound and noise is not None and noise.of_source:
            yield "noise on the source is for tokens; that of sound is front_end.augment"
        if kind in ("seq2seq", "causal"):
            if self.free_loss == "stepwise":
                from subquad.models.base import can_stream

                if not can_stream(model.decoder):
                    yield (
                        "free_loss=stepwise needs a state of each of the decoder's mechanisms; "
                        "see subquad.mechanisms(state=True)"
                    )
            copies = getattr(model, "pointer", None) is not None
            if copies and self.scheduled is not None and self.scheduled.averages:
                yield (
                    f"scheduled.token={self.scheduled.token} does not go with copy=True: words "
                    "that are copied have no embedding to be averaged"
                )
            if copies and self.sequence is not None and self.sequence.text:
                yield (
                    "sequence.text=True does not go with copy=True: the tokenizer cannot write "
                    "words that are copied; rewards of tokens can count them"
                )

    # ---- a batch -------------------------------------------------------------------------

    def __call__(
        self,
        model: Any,
        batch: Mapping[str, Tensor],
        progress: float,
        generator: torch.Generator | None = None,
    ) -> Losses:
        """The losses of a batch.

        Args:
            model: that is trained; its own mode says whether there is dropout and noise.
            batch: by the names of the model's `forward`, with labels, −100 = nothing.
            progress: share of training that is done, 0 to 1.
            generator: of all draws of the objective; default: torch's own.

        Raises:
            OptionError: the model does not fit, or the batch has no labels.
        """
        self.check(model)
        kind = kind_of(model)
        terms: dict[str, Tensor] = {}
        notes: dict[str, Tensor | float] = {}
        share = 0.0
        if self.sequence is not None and progress >= self.sequence.after:
            share = self.sequence.weight
            loss, notes["reward"] = sequence_loss(
                model, batch, self.sequence, self._reward(), generator
            )
            terms[self.sequence.loss] = share * loss
        if self.noise is not None and kind in ("seq2seq", "parallel") and share < 1:
            batch = self.noise.on_source(model, batch, generator)
        if kind == "other":
            terms["cross_entropy"] = _own_loss(model, batch, self.label_smoothing)
        elif kind == "parallel":
            terms |= model.loss(dict(batch), generator, self.label_smoothing)
        elif share < 1:
            found, truth = self._fed(model, batch, progress, generator)
            terms |= {name: (1 - share) * loss for name, loss in found.items()}
            if truth is not None:
                notes["truth"] = truth
        elif self.penalties and _asks(model):
            Reading.of(model, batch).see()  # in training mode, what penalties are of
        if self.penalties and _asks(model):
            terms["penalties"] = self.penalties * penalties_of(model)
        total = torch.stack([term.to(next(iter(terms.values()))) for term in terms.values()]).sum()
        return Losses(total, {name: term.detach() for name, term in terms.items()}, notes)

    def _fed(
        self,
        model: Any,
        batch: Mapping[str, Tensor],
        progress: float,
        generator: torch.Generator | None,
    ) -> tuple[dict[str, Tensor], float | None]:
        """Cross entropy and guided attention, and the probability of the truth."""
        reading = Reading.of(model, batch)
        if self.noise is not None:
            reading = self.noise.on_target(reading, generator)
        if self.feeding == "teacher":
            return self._passed(reading, progress), None
        plan, truth = self.scheduled, None
        own, variant = Own(self.free_token), "original"
        if plan is not None:
            own, variant, truth = plan.own, plan.variant, plan.truth_probability(progress)
        kept = places_kept(reading, truth or 0.0, generator)
        draws = uniform(kept, generator)
        if self.free_loss == "stepwise":
            smoothing = self.label_smoothing
            return {
                "cross_entropy": stepwise_cross_entropy(reading, kept, own, draws, smoothing)
            }, truth
        if plan is not None and plan.averages:
            vectors = averaged(reading, kept, plan, generator)
            return self._passed(reading, progress, vectors), truth
        if plan is None or variant == "original":
            inputs = fed(reading, kept, own, draws)
        else:
            inputs = passed(reading, kept, own, draws, plan.rounds)
        return self._passed(reading.reads(inputs), progress), truth

    def _passed(
        self, reading: Reading, progress: float, vectors: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The losses of one pass over what is read, or over vectors in its place."""
        guide = 0.0 if self.guided is None else self.guided.weight_at(progress)
        seen = reading.see(vectors, reading.mask, align=guide > 0)
        terms = {"cross_entropy": cross_entropy(reading, seen, self.label_smoothing)}
        if self.guided is not None and guide > 0:
            terms["guided"] = guide * self.guided(reading, seen)
        return terms

    def _reward(self) -> Reward:
        if self.reward is None:
            assert self.sequence is not None, "asked for a reward"
            if self.sequence.text and self.tokenizer is None:
                raise OptionError("sequence.text=True needs objective.tokenizer to be set")
            self.reward = sentence_reward(
                self.sequence.reward, self.tokenizer if self.sequence.text else None
            )
        return self.reward


_C = TypeVar("_C", bound=Config)


def _options(kind: type[_C], given: Any, problems: list[str]) -> _C | None:
    """Options of a part of the objective, or what is wrong with them."""
    if given is None:
        return None
    name = kind.mechanism
    if not isinstance(given, Mapping):
        problems.append(f"{name}={given!r} must be a mapping of options")
        return None
    lists = {key: tuple(one) if isinstance(one, list) else one for key, one in given.items()}
    try:
        return kind.from_options(lists)
    except OptionError as error:
        *found, last = str(error).removeprefix(f"{name}: ").split("; ")
        known = f", {last}" if last.startswith("options are") else ""
        for text in found if known else [*found, last]:
            unknown = text.startswith("unknown option")
            problems.append(f"{name}: {text}{known}" if unknown else f"{name}.{text}")
    return None


def _asks(model: Any) -> bool:
    """Whether a mechanism of the model brings a penalty."""
    return any(
        isinstance(part, Mechanism) and type(part).penalty is not Mechanism.penalty
        for part in model.modules()
    )


def _own_loss(model: Any, batch: Mapping[str, Tensor], label_smoothing: float) -> Tensor:
    """The loss of an encoder with a head: of classes with label smoothing, else its own.

    Raises:
        OptionError: for label smoothing where labels are no classes.
    """
    labels = batch.get("labels")
    kind = getattr(model.config, "problem_type", None)
    classes = labels is not None and not labels.is_floating_point()
    if classes and kind in (None, "single_label_classification"):
        logits = model(**{name: one for name, one in batch.items() if name != "labels"}).logits
        assert labels is not None, "there are classes"
        if logits.dim() == labels.dim() + 1 and logits.shape[-1] > 1:
            logits = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
            total = F.cross_entropy(
                logits, labels.flatten(), label_smoothing=label_smoothing, reduction="sum"
            )
            return total / (labels != -100).sum().clamp_min(1)
    if label_smoothing:
        raise OptionError(
            f"label_smoothing={label_smoothing} needs labels that are classes, of which "
            f"{type(model).__name__} with this batch has none: set it to 0"
        )
    loss: Tensor | None = model(**batch).loss
    if loss is None:
        raise OptionError(f"the batch has no labels, it has {', '.join(batch)}")
    return loss
