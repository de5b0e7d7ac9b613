"""How far a model's outputs are from another's: the metric that the model's kind calls for.

====================  ==========================================================================
encoder               cosine of the embeddings (final hidden states, averaged over positions),
                      nearest neighbours kept
language model        perplexity of both, KL(exact ‖ converted) of each position's distribution,
                      top-1 agreement
classifier            KL and label agreement, for each row or position
====================  ==========================================================================

Only unmasked positions count.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from subquad.convert.inputs import encoder_decoder, position_mask, sequence_first
from subquad.errors import OptionError, ShapeError

__all__ = ["OutputComparison", "Outputs"]

LANGUAGE_MODELS = ("causal LM", "masked LM", "seq2seq LM")

_CHUNK_NUMBERS = 2**22
"""Logits compared at a time: 32 MiB in float64."""


@dataclass(frozen=True)
class OutputComparison:
    """The outputs of two models, the second (converted) against the first (exact).

    Args:
        kind: ``"encoder"``, ``"causal LM"``, ``"masked LM"``, ``"seq2seq LM"`` or
            ``"classifier"``: what decides which metrics there are.
        rows, positions: what was compared; positions are unmasked ones.
        cosines: for each row, the cosine between both final hidden states, each averaged over
            unmasked positions.
        relative_error: ‖b − a‖ / ‖a‖ of the final hidden states, unmasked positions.
        max_abs: largest absolute difference of the same.
        neighbours: share of rows whose nearest other row, by cosine, stays the same; None for
            fewer than three rows.
        kl, kl_p95: KL(a ‖ b) of the predicted distributions in nats, mean and 95th percentile
            over positions (rows for classifiers); None without logits.
        agreement: share of positions at which both predict the same token or label.
        perplexity_exact, perplexity: exp of the mean loss in nats; None without targets.
        ratio_spread: standard deviation over rows of the ratio of the rows' perplexities.
    """

    kind: str
    rows: int
    positions: int
    cosines: tuple[float, ...]
    relative_error: float
    max_abs: float
    neighbours: float | None = None
    kl: float | None = None
    kl_p95: float | None = None
    agreement: float | None = None
    perplexity_exact: float | None = None
    perplexity: float | None = None
    ratio_spread: float | None = None

    @property
    def cosine(self) -> float:
        """Mean of `cosines`."""
        return statistics.fmean(self.cosines)

    @property
    def cosine_p5(self) -> float:
        """5th percentile of `cosines`."""
        return float(torch.tensor(self.cosines, dtype=torch.float64).quantile(0.05))

    @property
    def perplexity_ratio(self) -> float | None:
        """`perplexity` / `perplexity_exact`."""
        if self.perplexity is None or self.perplexity_exact is None:
            return None
        return self.perplexity / self.perplexity_exact

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            **asdict(self),
            "cosines": list(self.cosines),
            "cosine": self.cosine,
            "cosine_p5": self.cosine_p5,
            "perplexity_ratio": self.perplexity_ratio,
        }

    def lines(self, uniform: OutputComparison | None = None) -> Iterator[tuple[str, str, str]]:
        """(metric, value in words, uniform attention's value), the kind's own metric first."""
        other = uniform or self
        some = [f"{self.cosine:.4f}"]
        if self.rows > 1:
            some.append(f"(5th percentile {self.cosine_p5:.4f}, lowest {min(self.cosines):.4f})")
        name = "cosine of the averaged final hidden states"
        cosine = (name, " ".join(some), f"{other.cosine:.4f}")
        if self.kind == "encoder":
            yield cosine
        ratio = self.perplexity_ratio
        if ratio is not None:
            spread = f" ± {self.ratio_spread:.3f} over rows" if self.ratio_spread else ""
            yield (
                "perplexity",
                f"{self.perplexity_exact:.3f} → {self.perplexity:.3f}, ratio {ratio:.4f}{spread}",
                f"{other.perplexity:.3f}, ratio {other.perplexity_ratio or math.nan:.4f}",
            )
        if self.kl is not None:
            yield (
                "KL of the predicted distributions, nats",
                f"{self.kl:.3g} (95th percentile {self.kl_p95:.3g})",
                f"{other.kl:.3g}",
            )
        if self.agreement is not None:
            what = "label" if self.kind == "classifier" else "top-1"
            yield f"{what} agreement", _percent(self.agreement), _percent(other.agreement)
        if self.neighbours is not None and self.kind == "encoder":
            rows = f"{_percent(self.neighbours)} of {self.rows} rows"
            yield "nearest neighbour kept", rows, _percent(other.neighbours)
        if self.kind != "encoder":
            yield cosine
        yield (
            "difference of the final hidden states",
            f"{self.relative_error:.3g} relative, {self.max_abs:.3g} at most",
            f"{other.relative_error:.3g} relative",
        )


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}%"


class Outputs:
    """Collects two models' outputs, batch by batch; `length` is the longest one's."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.pair, self.turned = encoder_decoder(model), sequence_first(model)
        self.kind = "encoder"
        self.positions = self.length = 0
        self.pooled: tuple[list[Tensor], list[Tensor]] = ([], [])
        self.max_abs = 0.0
        self.squares = [0.0, 0.0]
        self.kl: list[Tensor] = []
        self.agreed: list[Tensor] = []
        self.losses: list[tuple[float, float, int]] = []

    def add(self, inputs: Any, a: Any, b: Any) -> None:
        """Compares both outputs of one batch.

        Raises:
            ShapeError: they differ in shape.
            OptionError: they are no tensors.
        """
        self._hidden(inputs, _hidden(a), _hidden(b))
        first, second = (_logits(output, inputs) for output in (a, b))
        if first is not None and second is not None:
            self._logits(inputs, first, second)

    def _mask(self, inputs: Any, rows: int, length: int) -> Tensor:
        mask = position_mask(inputs, rows, length, decoder=self.pair)
        return torch.ones(rows, length, dtype=torch.bool) if mask is None else mask

    def _hidden(self, inputs: Any, a: Tensor, b: Tensor) -> None:
        if a.shape != b.shape:
            raise ShapeError(f"outputs differ in shape: {tuple(a.shape)} and {tuple(b.shape)}")
        if self.turned and a.dim() == 3:
            a, b = a.transpose(0, 1), b.transpose(0, 1)
        a, b = (_three(t.double()) for t in (a, b))
        keep = self._mask(inputs, a.shape[0], a.shape[1]).to(a.device)
        a, b = (t.masked_fill(~keep[..., None], 0.0) for t in (a, b))
        count = keep.sum(1, keepdim=True).clamp(min=1)
        for side, t in zip(self.pooled, (a, b), strict=True):
            side.append((t.sum(1) / count).cpu())
        self.positions += int(keep.sum())
        self.length = max(self.length, a.shape[1])
        self.max_abs = max(self.max_abs, float((b - a).abs().max()))
        for place, t in enumerate((b - a, a)):
            self.squares[place] += float(t.square().sum())

    def _logits(self, inputs: Any, a: Tensor, b: Tensor) -> None:
        self.kind = _kind(self.model, a)
        if a.dim() == 2:
            a, b = a[:, None], b[:, None]
        rows, length, _ = a.shape
        keep = self._mask(inputs, rows, length).to(a.device)
        targets = _targets(self.kind, inputs, keep)
        step = max(1, _CHUNK_NUMBERS // a.shape[-1])
        for row in range(rows):
            lost, count = [0.0, 0.0], 0
            for at in keep[row].nonzero()[:, 0].split(step):
                p, q = (t[row, at].double().log_softmax(-1) for t in (a, b))
                # Labels that both rule out (−∞) add nothing; p·(log p − log q) would be NaN.
                gap = torch.where(p == q, 0.0, p - q)
                self.kl.append((p.exp() * gap).sum(-1).clamp(min=0).cpu())
                self.agreed.append((p.argmax(-1) == q.argmax(-1)).cpu())
                if targets is not None:
                    target = targets[row, at]
                    told = (target != -100).nonzero()[:, 0]
                    count += len(told)
                    for side, logs in enumerate((p, q)):
                        lost[side] -= float(logs[told, target[told]].sum())
            if count:
                self.losses.append((lost[0], lost[1], count))

    def result(self) -> OutputComparison:
        """All batches together."""
        a, b = (torch.cat(side) for side in self.pooled)
        widths = {t.shape[-1] for t in (a, b)}
        assert len(widths) == 1
        cosines = nn.functional.cosine_similarity(a, b, dim=-1)
        same = (a == b).all(-1)  # also where both are zero
        error, total = self.squares
        relative = math.sqrt(error / total) if total else (0.0 if error == 0.0 else math.inf)
        found: dict[str, Any] = {}
        if len(a) >= 3:
            found["neighbours"] = float((_nearest(a) == _nearest(b)).double().mean())
        if self.kl:
            kl, agreed = torch.cat(self.kl), torch.cat(self.agreed)
            found["kl"], found["kl_p95"] = float(kl.mean()), _quantile(kl, 0.95)
            found["agreement"] = float(agreed.double().mean())
        if self.losses:
            exact, other, count = (sum(x) for x in zip(*self.losses, strict=True))
            ratios = [math.exp((y - x) / n) for x, y, n in self.losses]
            found["perplexity_exact"] = math.exp(exact / count)
            found["perplexity"] = math.exp(other / count)
            found["ratio_spread"] = statistics.stdev(ratios) if len(ratios) > 1 else None
        return OutputComparison(
            kind=self.kind,
            rows=len(a),
            positions=self.positions,
            cosines=tuple(float(x) for x in cosines.masked_fill(same, 1.0)),
            relative_error=relative,
            max_abs=self.max_abs,
            **found,
        )


def _three(t: Tensor) -> Tensor:
    return t.reshape(t.shape[0], -1, t.shape[-1]) if t.dim() > 1 else t[:, None, None]


def _quantile(values: Tensor, q: float) -> float:
    # torch.quantile refuses more than 2^24 values
    order = values.sort().values
    return float(order[min(len(order) - 1, math.ceil(q * len(order)) - 1)])


def _nearest(embedded: Tensor) -> Tensor:
    unit = nn.functional.normalize(embedded, dim=-1)
    return (unit @ unit.T).fill_diagonal_(float("-inf")).argmax(-1)


# ---- outputs -----------------------------------------------------------------------------


def _hidden(output: Any) -> Tensor:
    names = ("last_hidden_state", "decoder_hidden_states", "hidden_states", "logits")
    for name in (*names, "start_logits", "text_embeds", "image_embeds"):
        value = getattr(output, name, None)
        if isinstance(value, tuple) and value:
            value = value[-1]
        if isinstance(value, Tensor):
            return value
    if isinstance(output, tuple | list):  # a loss may come first
        found = [value for value in output if isinstance(value, Tensor) and value.dim()]
        output = found[0] if found else output
    if not isinstance(output, Tensor):
        raise OptionError(
            "the model must return a tensor, a tuple with one, or a transformers "
            f"output with hidden states or logits, given {type(output).__name__}"
        )
    return output


def _logits(output: Any, inputs: Any) -> Tensor | None:
    """(B, labels) or (B, L, labels); the span of an answer is two labels, its start and end."""
    logits = getattr(output, "logits", None)
    start, end = getattr(output, "start_logits", None), getattr(output, "end_logits", None)
    if isinstance(start, Tensor) and isinstance(end, Tensor):
        keep = position_mask(inputs, *start.shape, decoder=False)
        logits = torch.stack([start, end], 1)
        if keep is not None:
            closed = ~keep.to(logits.device)[:, None]
            logits = logits.masked_fill(closed, torch.finfo(logits.dtype).min)
    if isinstance(logits, Tensor) and logits.dim() in (2, 3):
        return logits if logits.shape[-1] > 1 else None  # one number: a regression
    return None


def _outermost(model: Any) -> Any:
    """The first transformers model within, from the outside; None without one."""
    if not isinstance(model, nn.Module):
        return None
    return next((m for m in model.modules() if hasattr(m, "config_class")), None)


def _kind(model: Any, logits: Tensor) -> str:
    owner = _outermost(model)
    config = getattr(owner, "config", None)
    text = getattr(config, "get_text_config", lambda: config)()
    sizes = {getattr(one, "vocab_size", None) for one in (config, text)}
    if logits.dim() != 3 or logits.shape[-1] not in sizes:
        return "classifier"
    if encoder_decoder(owner):
        return "seq2seq LM"
    name = type(owner).__name__
    if "MaskedLM" in name or not _is_causal(owner):
        return "masked LM"
    return "causal LM"


def _is_causal(model: nn.Module) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    said = [m.is_causal for m in model.modules() if isinstance(getattr(m, "is_causal", 0), bool)]
    # BERT's kind comes in both directions; GPT-J's modules do not say.
    return any(said) if said else type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def _targets(kind: str, inputs: Any, keep: Tensor) -> Tensor | None:
    """(B, L) tokens that each position is to predict, −100 for none; None: not known."""
    if kind not in LANGUAGE_MODELS:
        return None
    values: Mapping[str, Any] = inputs if isinstance(inputs, Mapping) else {}
    if isinstance(inputs, Tensor):
        values = {"input_ids": inputs}
    elif isinstance(inputs, tuple) and inputs:
        values = {"input_ids": inputs[0]}

    def named(name: str) -> Tensor | None:
        value = values.get(name)
        if not isinstance(value, Tensor) or value.shape != keep.shape:
            return None
        return value.to(keep.device)

    labels = named("labels")
    if labels is not None and kind != "causal LM":
        return labels
    if labels is None and kind == "masked LM":
        return None
    own = named("input_ids" if kind == "causal LM" else "decoder_input_ids")
    ids = own if labels is None else labels
    if ids is None:
        return None
    nothing = ids.new_full((len(ids), 1), -100)
    following = torch.cat([ids[:, 1:], nothing], 1)
    if labels is not None:
        return following
    real = torch.cat([keep[:, 1:], torch.zeros_like(keep[:, :1])], 1)
    return following.masked_fill(~real, -100)
