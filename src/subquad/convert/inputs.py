"""Inputs of a model: batches, positions that count, other lengths; calls that leave no trace."""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from subquad.attention.multihead import MultiheadAttention
from subquad.errors import OptionError

__all__ = ["Call", "at_length", "batches", "evaluating", "longest", "position_mask"]

Batch = Any
"""One call's inputs: a mapping (keyword arguments), a tensor, or a tuple (arguments)."""


def batches(inputs: Any, tokenizer: Any = None, size: int = 8) -> Iterator[Batch]:
    """One batch after the other: of a single batch, an iterable of them, or of texts.

    Args:
        inputs: a batch, an iterable of batches, a text or an iterable of texts.
        tokenizer: of transformers, for texts.
        size: texts in a batch; one where the tokenizer has no padding token.

    Raises:
        OptionError: no batch; texts without a tokenizer or a token; something that is no batch.
    """
    if isinstance(inputs, str | Tensor | Mapping | tuple):
        inputs = [inputs]
    elif not isinstance(inputs, Iterable):
        raise OptionError(
            "inputs must be a mapping, a tensor, a tuple, or an iterable of these or of texts, "
            f"given {type(inputs).__name__}"
        )
    stream = iter(inputs)
    first = next(stream, None)
    if first is None:
        raise OptionError("inputs are empty: give at least one batch or text")
    stream = chain([first], stream)
    if isinstance(first, str):
        yield from _tokenised(stream, tokenizer, size)
        return
    for batch in stream:
        if not isinstance(batch, Tensor | Mapping | tuple):
            raise OptionError(
                "a batch must be a mapping (keyword arguments), a tensor or a tuple "
                f"(arguments), given {type(batch).__name__}"
            )
        yield batch


def _tokenised(texts: Iterator[Any], tokenizer: Any, size: int) -> Iterator[Batch]:
    if tokenizer is None:
        raise OptionError("texts need tokenizer=, the model's own")
    if tokenizer.pad_token_id is None:
        size = 1
    longest = min(int(tokenizer.model_max_length), 2**20)
    group: list[str] = []
    for text in chain(texts, [None]):
        if text is not None:
            group.append(text)
        if group and (text is None or len(group) == size):
            batch = dict(
                tokenizer(
                    group,
                    padding=len(group) > 1,
                    truncation=True,
                    max_length=longest,
                    return_tensors="pt",
                )
            )
            if not batch["input_ids"].numel():
                raise OptionError(f"texts need a token each, given {group[0]!r}")
            yield batch
            group = []


# ---- positions ---------------------------------------------------------------------------


def position_mask(inputs: Batch, rows: int, length: int, *, decoder: bool) -> Tensor | None:
    """(B, L) bool, the positions that count: from the mask that has this shape; None: all.

    Args:
        inputs: one batch.
        rows, length: B and L of what is to be masked.
        decoder: these are the positions of an encoder–decoder's decoder.
    """
    if not isinstance(inputs, Mapping):
        return None

    def named(name: str) -> Tensor | None:
        value = inputs.get(name)
        fits = isinstance(value, Tensor) and tuple(value.shape) == (rows, length)
        return value if fits else None

    if decoder:
        mask, closed = named("decoder_attention_mask"), named("tgt_key_padding_mask")
        labels = named("labels")
        if mask is not None:
            return mask.bool()
        if closed is not None:
            return ~closed.bool()
        if any(inputs.get(name) is not None for name in ("decoder_input_ids", "tgt")):
            return None
        if labels is not None:  # the model shifts them to make its decoder's input
            return labels != -100
    mask = named("attention_mask")
    if mask is not None:
        return mask.bool()
    for name in ("src_key_padding_mask", "key_padding_mask"):  # torch's: True = ignore
        closed = named(name)
        if closed is not None and closed.dtype == torch.bool:
            return ~closed
    return None


def encoder_decoder(model: Any) -> bool:
    """Whether the model has an encoder and a decoder."""
    return isinstance(model, nn.Module) and any(
        isinstance(module, nn.Transformer)
        or bool(getattr(getattr(module, "config", None), "is_encoder_decoder", False))
        for module in model.modules()
    )


def sequence_first(model: Any) -> bool:
    """Whether a torch model's positions come before its rows, (L, B, C)."""
    return (
        isinstance(model, nn.Module)
        and not any(hasattr(module, "config_class") for module in model.modules())
        and any(
            getattr(module, "batch_first", None) is False
            for module in model.modules()
            if isinstance(module, nn.MultiheadAttention | MultiheadAttention)
        )
    )


# ---- other lengths -----------------------------------------------------------------------


def at_length(inputs: Batch, length: int, *, pair: bool = False, repeat: bool = True) -> Batch:
    """One row of `length` tokens: the first row's, without padding, repeated or cut.

    Args:
        inputs: a mapping with token ids, or a (B, L) tensor of token ids.
        length: tokens.
        pair: for an encoder and a decoder; both get this length.
        repeat: False: cut only, a shorter row stays as it is.

    Raises:
        OptionError: inputs that are no tokens, whose length the model fixes.
    """
    if isinstance(inputs, Tensor) and inputs.dim() == 2 and not inputs.is_floating_point():
        return _tiled(inputs[:1], length, repeat)
    if not isinstance(inputs, Mapping) or not isinstance(inputs.get("input_ids"), Tensor):
        kind = ", ".join(inputs) if isinstance(inputs, Mapping) else type(inputs).__name__
        raise OptionError(
            f"inputs of another length can be made of token ids only, given {kind}; "
            "pass inputs_at=, a function from a length to inputs"
        )
    ids = inputs["input_ids"][:1]
    mask = inputs.get("attention_mask")
    keep = torch.ones_like(ids, dtype=torch.bool)
    if isinstance(mask, Tensor) and tuple(mask.shape) == tuple(inputs["input_ids"].shape):
        keep = mask[:1].bool()
    new: dict[str, Any] = {"input_ids": _tiled(ids[:, keep[0]], length, repeat)}
    new["attention_mask"] = torch.ones_like(new["input_ids"])
    types = inputs.get("token_type_ids")
    if isinstance(types, Tensor):
        new["token_type_ids"] = _tiled(types[:1, keep[0]], length, repeat)
    if pair:
        target = inputs.get("decoder_input_ids", inputs.get("labels"))
        target = ids if not isinstance(target, Tensor) else target[:1].clamp(min=0)
        new["decoder_input_ids"] = _tiled(target, length, repeat)
    return new


def _tiled(tokens: Tensor, length: int, repeat: bool) -> Tensor:
    return tokens.repeat(1, -(-length // tokens.shape[1]) if repeat else 1)[:, :length]


def longest(model: nn.Module) -> int | None:
    """Tokens that the smallest table of positions holds; None if the model has none."""
    sizes = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and re.search(r"position|wpe", name.rpartition(".")[2]):
            # Tables with a padding row count positions from the row after it.
            first = 0 if module.padding_idx is None else module.padding_idx + 1
            sizes.append(module.num_embeddings - first)
    return min(sizes, default=None)


# ---- calls -------------------------------------------------------------------------------


class Call:
    """Calls a model with one batch, in the same way each time, and leaves the batch alone.

    Caches given with the batch are copied for each call, the model makes none of its own,
    and transformers models are asked for named outputs with hidden states.
    """

    def __init__(self, model: Callable[..., Any], inputs: Batch) -> None:
        self.model = model
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        if isinstance(inputs, Mapping):
            self.kwargs = dict(inputs)
        else:
            self.args = inputs if isinstance(inputs, tuple) else (inputs,)
        if not hasattr(model, "config") or not isinstance(model, nn.Module):
            return
        takes = inspect.signature(model.forward).parameters
        anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in takes.values())
        if "return_dict" in takes or anything:
            self.kwargs["return_dict"] = True
        if "use_cache" in takes and "past_key_values" not in self.kwargs:
            self.kwargs.setdefault("use_cache", False)
        # Heads give logits only; the body below them gives last_hidden_state by itself.
        if getattr(model, "base_model", model) is not model:
            self.kwargs.setdefault("output_hidden_states", True)

    def __call__(self) -> Any:
        kwargs = self.kwargs
        if kwargs.get("past_key_values") is not None:
            kwargs = {**kwargs, "past_key_values": copy.deepcopy(kwargs["past_key_values"])}
        return self.model(*self.args, **kwargs)


@contextlib.contextmanager
def evaluating(*models: Any) -> Iterator[None]:
    """Within: eval mode, no gradients; afterwards modes and random generators are as before.

    Modules that came into being meanwhile (mechanisms built at their first call) get the mode
    that their place had.
    """
    modules = [model for model in models if isinstance(model, nn.Module)]
    before = [{name: m.training for name, m in model.named_modules()} for model in modules]
    devices = {p.device for model in modules for p in model.parameters() if p.is_cuda}
    with torch.random.fork_rng(list(devices)), torch.no_grad():
        for model in modules:
            model.eval()
        try:
            yield
        finally:
            for model, modes in zip(modules, before, strict=True):
                for name, module in model.named_modules():
                    while name not in modes:
                        name = name.rpartition(".")[0]
                    module.training = modes[name]
