"""Sequence-level training: a score of whole outputs, such as BLEU, in place of their likelihood."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.attention.base import looking
from subquad.options import Config, choice_problem, flag_problem, integer_problem, number_problem
from subquad.training.objectives.cross_entropy import losses
from subquad.training.objectives.feeding import Own, fed
from subquad.training.objectives.reading import Reading, end_tokens, uniform

__all__ = ["Reward", "SequenceTraining", "sentence_reward", "sequence_loss"]

LOSSES = ("self_critical", "minimum_risk")
REWARDS = ("bleu", "chrf")
BASELINES = ("greedy", "mean")

Reward = Callable[[Sequence[Sequence[int]], Sequence[Sequence[int]]], Sequence[float]]
"""Outputs and their references, tokens without start and end → rewards from 0 to 1."""


@dataclass(frozen=True)
class SequenceTraining(Config):
    """Options of sequence-level training; see `sequence_loss`.

    Args:
        loss: "self_critical" or "minimum_risk".
        weight: λ of (1 − λ)·cross entropy + λ·this loss.
        samples: outputs that are drawn for each source.
        reward: "bleu" or "chrf" of a sentence, by sacrebleu.
        text: of texts, for which the objective needs a tokenizer; else of token ids, as words.
        baseline: of "self_critical": the reward of the "greedy" output, or the "mean" of the
            other samples' rewards.
        sharpness: α of "minimum_risk".
        gold: the reference is one of the candidates of "minimum_risk".
        temperature, top_k: with which outputs are drawn.
        max_length: tokens of an output at most; default: half more than the batch's longest
            reference.
        after: share of training before, with cross entropy alone.
    """

    mechanism = "sequence"

    loss: str = "self_critical"
    weight: float = 1.0
    samples: int = 4
    reward: str = "bleu"
    text: bool = False
    baseline: str = "greedy"
    sharpness: float = 0.005
    gold: bool = True
    temperature: float = 1.0
    top_k: int | None = None
    max_length: int | None = None
    after: float = 0.0

    def problems(self) -> Iterator[str]:
        yield from choice_problem("loss", self.loss, LOSSES)
        yield from number_problem("weight", self.weight, 0.0, 1.0, open_low=True)
        yield from integer_problem("samples", self.samples, 1)
        yield from choice_problem("reward", self.reward, REWARDS)
        yield from flag_problem("text", self.text)
        yield from choice_problem("baseline", self.baseline, BASELINES)
        yield from number_problem("sharpness", self.sharpness, 0.0, open_low=True)
        yield from flag_problem("gold", self.gold)
        yield from number_problem("temperature", self.temperature, 0.0, open_low=True)
        yield from number_problem("after", self.after, 0.0, 1.0)
        if self.top_k is not None:
            yield from integer_problem("top_k", self.top_k, 1)
        if self.max_length is not None:
            yield from integer_problem("max_length", self.max_length, 1)
        if self.reward == "chrf" and not self.text:
            yield "reward=chrf needs text=True: token ids have no characters"
        if type(self.samples) is int:
            if self.loss == "self_critical" and self.baseline == "mean" and self.samples < 2:
                yield "baseline=mean needs samples ≥ 2: it is the mean of the others"
            if self.loss == "minimum_risk" and self.samples + bool(self.gold) < 2:
                yield "loss=minimum_risk needs two candidates: samples ≥ 2, or gold=True"


def sequence_loss(
    model: Any,
    batch: Mapping[str, Tensor],
    options: SequenceTraining,
    reward: Reward,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """The loss of whole outputs, and the mean reward of those that were drawn.

        self_critical   −E_s[(r(y_s) − b)·log p(y_s|x)],       b = r(greedy output)
        minimum_risk    E_x Σ_{y∈S} Q(y)·(1 − r(y)),   Q(y) = p(y|x)^α / Σ_{y'∈S} p(y'|x)^α

    Outputs y_s are drawn from the model; S are the different ones among them and the
    reference. "self_critical" raises the likelihood of outputs that are better than what the
    model would say now, and lowers that of worse ones: its gradient is an unbiased estimate of
    that of the expected reward (REINFORCE), where `temperature` and `top_k` leave the model's
    distribution as it is. "minimum_risk" needs no baseline: it moves
    probability among the candidates.

    Outputs are drawn and their likelihood is taken without dropout, so that the gradient is of
    the distribution that was drawn from. L steps without a graph, from a state where there is
    one, then one pass over the outputs. O(samples) times a training step.

    Papers: Rennie et al. 2016, arXiv 1612.00563, equations 6 to 9; baseline "mean": Kool et al.
    2019 (Buy 4 REINFORCE samples, get a baseline for free); Shen et al. 2015, arXiv 1512.02433,
    equations 11 to 13. Deviation: "self_critical" is divided by the mean number of tokens of an
    output, a constant of the batch, so that it is as large as cross entropy, which is a mean
    over tokens.

    Args:
        model: a `Seq2SeqTransformer`, or a `CausalTransformer` that goes on from what stands
            before the first label.
        batch: by the names of the model's `forward`.
        options: of the losses.
        reward: of outputs and references.
        generator: of the samples.

    Returns:
        a scalar with its graph, and one without.
    """
    with looking(model):
        reading = Reading.of(model, batch)
        count = options.samples
        greedy = options.loss == "self_critical" and options.baseline == "greedy"
        inputs, labels = _drawn(reading, options, count + greedy, generator)
        outputs = _tokens(model, labels.flatten(0, 1))
        truths = [one for one in _tokens(model, reading.labels) for _ in range(count + greedy)]
        rewards = torch.tensor(list(reward(outputs, truths)), dtype=torch.float32)
        rewards = rewards.to(labels.device).view(len(labels), -1)
        drawn = rewards[:, :count]
        if options.loss == "self_critical":
            chances = _log_likelihoods(reading, inputs[:, :count], labels[:, :count])
            baseline = rewards[:, count:] if greedy else (drawn.sum(1, True) - drawn) / (count - 1)
            length = (labels[:, :count] != -100).sum().clamp_min(1) / drawn.numel()
            return -((drawn - baseline) * chances).mean() / length, drawn.mean()
        if options.gold:
            inputs, labels = _with_truth(reading, inputs, labels)
            whole = truths[:: count + greedy]
            own = torch.tensor(list(reward(whole, whole)), dtype=torch.float32)
            rewards = torch.cat([own.to(rewards)[:, None], rewards], 1)
        chances = _log_likelihoods(reading, inputs, labels)
        same = (labels[:, :, None] == labels[:, None]).all(-1).tril(-1).any(-1)
        shares = (options.sharpness * chances).masked_fill(same, float("-inf")).softmax(1)
        return (shares * (1 - rewards)).sum(1).mean(), drawn.mean()


def _drawn(
    reading: Reading, options: SequenceTraining, count: int, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """What was read and written in `count` outputs of each row, (B, count, T) each.

    The last output is the likeliest one where `count` is larger than the samples' number.
    """
    model, known = reading.model, reading.labels != -100
    start = known.long().argmax(1)  # the place that the first token is predicted at
    longest = options.max_length or math.ceil(1.5 * int(known.sum(1).max()))
    width = int(start.max()) + 1 + longest
    most = max(model.config.max_position_embeddings, reading.inputs.shape[1])
    width = min(width, most + 1)  # the last token is not read
    inputs = F.pad(reading.inputs, (0, width - reading.inputs.shape[1]))[:, :width]
    places = torch.arange(width, device=inputs.device)
    kept = places <= start[:, None]
    mask = reading.mask
    if mask is not None:
        mask = F.pad(mask, (0, width - mask.shape[1]))[:, :width].masked_fill(~kept, 1)
    many = replace(
        reading,
        inputs=inputs.repeat_interleave(count, 0),
        mask=None if mask is None else mask.repeat_interleave(count, 0),
        encoded=_repeated(reading.encoded, count),
    )
    own = Own("sample", options.temperature, options.top_k)
    best = torch.arange(len(many.inputs), device=inputs.device) % count >= options.samples

    def choice(logits: Tensor, draws: Tensor) -> Tensor:
        return torch.where(best, logits.argmax(-1), own(logits, draws))

    draws = uniform(many.inputs, generator)
    written = fed(many, kept.repeat_interleave(count, 0), choice, draws, until_end=True)
    written = written.view(len(inputs), count, width)
    read, labels = written[..., :-1], written[..., 1:]
    since = places[:-1] - start[:, None]
    own_places = ((since >= 0) & (since < longest))[:, None]
    ends = reading.ends(labels) & own_places
    before = ends.cumsum(-1) - ends.long()  # ends before this place
    return read, labels.masked_fill(~own_places | (before > 0), -100)


def _with_truth(reading: Reading, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs (B, n, T) with the reference before them, (B, n + 1, T')."""
    width = max(inputs.shape[-1], reading.inputs.shape[1])
    pairs = ((reading.inputs, inputs, 0), (reading.labels, labels, -100))
    first, second = (
        torch.cat(
            [
                F.pad(truth[:, None], (0, width - truth.shape[-1]), value=fill),
                F.pad(own, (0, width - own.shape[-1]), value=fill),
            ],
            1,
        )
        for truth, own, fill in pairs
    )
    return first, second


def _log_likelihoods(reading: Reading, inputs: Tensor, labels: Tensor) -> Tensor:
    """log p of outputs: Σ_t log p(label_t | inputs_≤t), (B, n)."""
    rows, count, width = labels.shape
    mask = reading.mask
    if mask is not None:  # places of prompts' padding stay closed, all others are open
        mask = F.pad(mask, (0, max(0, width - mask.shape[1])), value=1)[:, :width]
        mask = mask.repeat_interleave(count, 0) | (labels.flatten(0, 1) != -100)
    every = replace(
        reading,
        inputs=inputs.flatten(0, 1),
        labels=labels.flatten(0, 1),
        mask=mask,
        encoded=_repeated(reading.encoded, count),
    )
    found = -losses(every, every.see(), every.labels)
    row = (every.labels != -100).nonzero()[:, 0]
    return found.new_zeros(rows * count).index_add(0, row, found).view(rows, count)


def _repeated(encoded: Any, count: int) -> Any:
    """Each row of what was read of the source, `count` times."""
    if encoded is None:
        return None
    return type(encoded)(**{n: t.repeat_interleave(count, 0) for n, t in encoded.items()})


def _tokens(model: Any, labels: Tensor) -> list[list[int]]:
    """Each row's labels, without an end."""
    left_out = {-100, *end_tokens(model)}
    return [[one for one in row if one not in left_out] for row in labels.tolist()]


def sentence_reward(kind: str, tokenizer: Any = None) -> Reward:
    """A score of sentences from 0 to 1, by sacrebleu.

    Args:
        kind: "bleu", with the orders that a short sentence has (`effective_order`) and
            sacrebleu's smoothing; or "chrf".
        tokenizer: makes texts of tokens; without one, tokens are compared as words.

    Raises:
        ImportError: sacrebleu is missing (extra ``train``).
    """
    try:
        import sacrebleu
    except ImportError as error:
        raise ImportError("sequence training needs pip install 'subquad[train]'") from error
    metric: Any = sacrebleu.CHRF()
    if kind == "bleu":
        metric = sacrebleu.BLEU(effective_order=True, tokenize=None if tokenizer else "none")

    def texts(rows: Sequence[Sequence[int]]) -> list[str]:
        if tokenizer is None:
            return [" ".join(map(str, row)) for row in rows]
        found: list[str] = tokenizer.batch_decode(rows, skip_special_tokens=True)
        return found

    def reward(outputs: Sequence[Sequence[int]], truths: Sequence[Sequence[int]]) -> list[float]:
        pairs = zip(texts(outputs), texts(truths), strict=True)
        return [metric.sentence_score(output, [truth]).score / 100 for output, truth in pairs]

    return reward
