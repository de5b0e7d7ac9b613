"""Which layers of a language model carry recall: the ones worth keeping exact.

A constant state forgets. What a model loses most is copying from beyond the state word for
word, and few layers do that. They show when a model reads a random string, then other random
tokens, then the string again, while one layer at a time is converted: where the loss on the
second copy rises, the layer was looking back.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad.attention.base import looking
from subquad.convert import swap
from subquad.errors import OptionError
from subquad.options import Config, Spec, integer_problem

__all__ = ["CopyTest", "Recall", "recall_layers"]


@dataclass(frozen=True)
class CopyTest:
    """Random strings that a model reads twice, with other random tokens between.

    Args:
        length: n, tokens of the string.
        gap: random tokens between the end of the first and the start of the second copy.
        rows: how many strings.
        seed: determines them.
        tokens: ids to draw from; None: all that the model has an embedding for.
        start: an id that stands first, such as the model's begin-of-text; None: nothing does.
        between: gap or more ids that stand in the gap instead of random ones, such as prose.
    """

    length: int = 40
    gap: int = 300
    rows: int = 4
    seed: int = 0
    tokens: Sequence[int] | None = None
    start: int | None = None
    between: Sequence[int] | None = None

    def __post_init__(self) -> None:
        problems = [
            *integer_problem("length", self.length, 2),
            *integer_problem("gap", self.gap, 0),
            *integer_problem("rows", self.rows, 1),
        ]
        if self.tokens is not None and len(self.tokens) < 2:
            problems.append(f"tokens must be 2 ids or more, given {len(self.tokens)}")
        if self.between is not None and len(self.between) < self.gap:
            problems.append(f"between must be gap={self.gap} ids, given {len(self.between)}")
        if problems:
            raise OptionError("; ".join(problems))

    def ids(self, model: nn.Module) -> Tensor:
        """(rows, 2n + gap) token ids, or one more with `start`, on the model's device.

        Raises:
            OptionError: if the model has no token embedding to take the ids from.
        """
        if self.tokens is not None:
            pool = torch.as_tensor(list(self.tokens))
        else:
            embedding: Any = getattr(model, "get_input_embeddings", lambda: None)()
            if not isinstance(getattr(embedding, "num_embeddings", None), int):
                raise OptionError(
                    f"{type(model).__name__} has no token embedding to draw ids from; pass tokens="
                )
            pool = torch.arange(embedding.num_embeddings)
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.randint(len(pool), (self.rows, self.length + self.gap), generator=generator)
        ids = pool[drawn]
        if self.between is not None:
            ids[:, self.length :] = torch.as_tensor(self.between)[: self.gap]
        ids = torch.cat([ids, ids[:, : self.length]], 1)
        if self.start is not None:
            ids = F.pad(ids, (1, 0), value=self.start)
        return ids.to(next((p.device for p in model.parameters()), torch.device("cpu")))

    @torch.no_grad()
    def run(self, model: nn.Module) -> tuple[float, float]:
        """Mean loss (nats a token) and accuracy on the second copy, its first token left out.

        Raises:
            OptionError: if the model gives no logits for each token.
        """
        ids = self.ids(model)
        wanted = ids[:, 1 - self.length :]
        options: dict[str, Any] = {}
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            options["logits_to_keep"] = self.length
        with looking(model):
            logits = getattr(model(input_ids=ids, use_cache=False, **options), "logits", None)
        if logits is None or logits.dim() != 3:
            raise OptionError(
                f"{type(model).__name__} gives no logits for each token: recall is measured on "
                "language models"
            )
        logits = logits[:, -self.length : -1].float()
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten()).item()
        return loss, (logits.argmax(-1) == wanted).float().mean().item()


@dataclass(frozen=True)
class Recall:
    """What `recall_layers` found; `print` it.

    Args:
        layers: names of the layers to keep exact, the most important first.
        losses: copy loss, in nats a token, with that layer alone converted.
        exact, converted, kept: (loss, accuracy) of the exact model, with all layers converted,
            and with all but `layers` converted.
    """

    layers: tuple[str, ...]
    losses: dict[str, float]
    exact: tuple[float, float]
    converted: tuple[float, float]
    kept: tuple[float, float]

    @property
    def note(self) -> str:
        """One sentence for a report."""
        return (
            f"exact for recall: {', '.join(self.layers)}; copying random tokens has loss "
            f"{self.kept[0]:.2f} nats with them, {self.converted[0]:.2f} without, "
            f"{self.exact[0]:.2f} in the exact model"
        )

    def __str__(self) -> str:
        lines = ["copy test: loss in nats a token, accuracy"]
        rows = {"exact": self.exact, "all converted": self.converted, "these kept": self.kept}
        lines += [f"  {name:<14} {loss:7.3f}  {right:.3f}" for name, (loss, right) in rows.items()]
        lines.append("converted alone, the loss becomes")
        lines += [f"  {self.losses[name]:7.3f}  {name}" for name in self.layers]
        return "\n".join(lines)


def recall_layers(
    model: nn.Module,
    count: int = 4,
    mechanism: str | Spec | Config | Mapping[str, str | Spec | Config] = "near_far",
    *,
    where: Callable[[str, nn.Module], bool] | None = None,
    test: CopyTest | None = None,
    swaps: int = 0,
    seed: int | Mapping[str, int] = 0,
    **options: Any,
) -> Recall:
    """Finds the attention layers of a causal language model that copying needs most.

    Converts one layer at a time and measures the loss on the second copy of random strings
    (`CopyTest`: no text and no tokenizer is needed); the layers whose conversion costs most are
    taken. With `swaps`, the next ones then try, one after the other, to take the place of the
    least of those while all others are converted, and stay where the loss falls.

    Cost: one forward pass of rows·(2n + gap) tokens for each attention layer, each swap and
    three more. The model is exact again afterwards, also if something fails.

    Args:
        model: a model with logits for each token, not converted.
        count: how many layers.
        mechanism: what the layers are converted to, as in `subquad.convert`.
        where: which layers are converted, as in `subquad.convert`.
        test: strings; the default copies 4 × 40 tokens over a gap of 300, which no state of
            the default size spans.
        swaps: how many further layers are tried.
        seed: of the mechanism's random draws.
        options: options of the mechanism.

    Raises:
        OptionError: `count` is below 1 or leaves no layer to convert, the model is converted
            already or is no language model, or a wrong option.
        UnsupportedError: as `subquad.convert`.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from subquad.convert import CopyTest, recall_layers
        >>> config = LlamaConfig(
        ...     vocab_size=64,
        ...     hidden_size=32,
        ...     intermediate_size=64,
        ...     num_hidden_layers=3,
        ...     num_attention_heads=2,
        ... )
        >>> model = LlamaForCausalLM(config).eval()
        >>> found = recall_layers(model, 1, window=8, heavy=4, test=CopyTest(8, 40, rows=1))
        >>> found.layers[0] in found.losses and len(found.losses) == 3
        True
    """
    if isinstance(mechanism, Mapping):
        raise OptionError("layers of recall are found for one mechanism; name them in keep_exact=")
    names = [
        name
        for name, layer in swap._attention_modules(model)
        if (where is None or where(name, layer)) and swap.use_of(name, layer, model) == "causal"
    ]
    if len(names) < 2:
        raise OptionError(
            f"recall is found among two layers of causal attention or more; {type(model).__name__} "
            f"has {len(names)}"
        )
    if not isinstance(count, int) or isinstance(count, bool) or not 0 < count < len(names):
        raise OptionError(
            f"count must be from 1 to {len(names) - 1}, for {len(names)} layers of causal "
            f"attention, given {count!r}"
        )
    if problems := list(integer_problem("swaps", swaps, 0)):
        raise OptionError("; ".join(problems))
    if swap.converted_layers(model):
        raise OptionError("the model is converted already; call subquad.revert first")
    test = test or CopyTest()

    def outcome(converted: Sequence[str]) -> tuple[float, float]:
        try:
            if converted:
                swap.convert(
                    model, mechanism, where=lambda name, _: name in converted, seed=seed, **options
                )
            return test.run(model)
        finally:
            swap.revert(model)

    def without(kept: Sequence[str]) -> tuple[float, float]:
        return outcome([name for name in names if name not in kept])

    exact = outcome(())
    losses = {name: outcome((name,))[0] for name in names}
    ranked = sorted(names, key=lambda name: -losses[name])
    chosen, kept = ranked[:count], without(ranked[:count])
    for candidate in ranked[count : count + swaps]:
        tried = [*chosen[:-1], candidate]
        if (found := without(tried)) < kept:
            chosen, kept = tried, found
    return Recall(tuple(chosen), losses, exact, outcome(names), kept)
