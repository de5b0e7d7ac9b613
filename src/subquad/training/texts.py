"""Texts as examples of tokens, and examples as batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from subquad.errors import OptionError

__all__ = ["Example", "collator", "examples_of", "passages", "split"]

Example = dict[str, Tensor]
"""One row of a batch: ``input_ids`` (L,), ``attention_mask`` (L,), or whatever a model takes."""

_LEAST = 4
"""Tokens below which a passage has nothing to attend to."""

_FILL = {"attention_mask": 0, "decoder_attention_mask": 0, "token_type_ids": 0, "labels": -100}


def passages(texts: Iterable[str], tokenizer: Any, length: int) -> list[Example]:
    """Texts cut into passages of at most `length` tokens, special tokens included.

    Long texts give several passages. Where a tokenizer cannot cut (``is_fast`` is False) the
    beginning of each text is taken. Passages of fewer than 4 tokens are left out.
    """
    options = {"truncation": True, "max_length": length, "add_special_tokens": True}
    if getattr(tokenizer, "is_fast", False):
        options["return_overflowing_tokens"] = True
    found: list[Example] = []
    for text in texts:
        rows = tokenizer(text, **options)["input_ids"]
        if rows and not isinstance(rows[0], list):
            rows = [rows]
        for row in rows:
            if len(row) >= _LEAST:
                ids = torch.tensor(row)
                found.append({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    return found


def examples_of(data: Any, tokenizer: Any, length: int, argument: str = "data") -> list[Example]:
    """Texts, or mappings of one example each, as examples.

    Raises:
        OptionError: texts without a tokenizer, nothing at all, or elements of another kind.
    """
    items = _items(data, argument)
    if not items:
        raise OptionError(f"{argument} is empty")
    kinds = {str if isinstance(item, str) else type(item) for item in items}
    if kinds == {str}:
        if tokenizer is None:
            raise OptionError(f"{argument} holds texts: give the model's tokenizer= too")
        found = passages(items, tokenizer, length)
        if not found:
            raise OptionError(f"{argument} has no passage of {_LEAST} tokens or more")
        return found
    if not all(isinstance(item, Mapping) for item in items):
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise OptionError(
            f"{argument} must hold texts (str) or mappings of tensors, one example each, "
            f"given {names}"
        )
    known = sorted(items[0])
    for item in items:
        if sorted(item) != known:
            raise OptionError(
                f"{argument}: every example must have the same names, given {', '.join(known)} "
                f"and {', '.join(sorted(item))}"
            )
    return [
        {name: _tensor(name, value, argument) for name, value in item.items()} for item in items
    ]


def _tensor(name: str, value: Any, argument: str) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise OptionError(
            f"{argument}: {name!r} must be a tensor or numbers, given {type(value).__name__}; "
            "leave out what the model does not take"
        ) from None


def _items(data: Any, argument: str) -> list[Any]:
    if isinstance(data, str):
        return [data]
    sequence = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if not sequence or isinstance(data, Mapping):
        raise OptionError(
            f"{argument} must be texts or a sequence of examples, given {type(data).__name__}"
        )
    return [data[index] for index in range(len(data))]


def split(data: Any, share: float, most: int, seed: int) -> tuple[list[Any], list[Any]]:
    """(for training, held out): whole elements, chosen by the seed.

    Raises:
        OptionError: fewer than two elements.
    """
    items = _items(data, "data")
    if len(items) < 2:
        raise OptionError(
            f"data has {len(items)} element, none is left to hold out: give held_out= or more texts"
        )
    count = min(most, max(1, round(share * len(items))))
    order = torch.randperm(len(items), generator=torch.Generator().manual_seed(seed)).tolist()
    chosen = set(order[:count])
    kept = [item for index, item in enumerate(items) if index not in chosen]
    return kept, [items[index] for index in sorted(chosen)]


def collator(model: nn.Module, tokenizer: Any) -> Callable[[Sequence[Example]], Example]:
    """A function that stacks examples, ragged ones padded at the right."""
    pad = getattr(tokenizer, "pad_token_id", None)
    if pad is None:
        pad = getattr(getattr(model, "config", None), "pad_token_id", None)
    fill = {"input_ids": int(pad or 0), **_FILL}

    def stack(examples: Sequence[Example]) -> Example:
        batch = {}
        for name in examples[0]:
            rows = [example[name] for example in examples]
            if any(row.shape != rows[0].shape for row in rows):
                rows = list(nn.utils.rnn.pad_sequence(rows, True, padding_value=fill.get(name, 0)))
            batch[name] = torch.stack(rows)
        if "input_ids" in batch and "attention_mask" not in batch:
            sizes = torch.tensor([len(example["input_ids"]) for example in examples])
            places = torch.arange(batch["input_ids"].shape[1])
            batch["attention_mask"] = (places < sizes[:, None]).long()
        return batch

    return stack
