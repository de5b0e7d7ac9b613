"""What all models share: initial values, embeddings, the cache of `generate`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers import initialization as init
from transformers.utils.generic import can_return_tuple

from subquad.attention.base import Mechanism
from subquad.attention.stack import SelfAttentionBlock, TransformerDecoder, TransformerEncoder
from subquad.errors import DtypeError, OptionError, ShapeError
from subquad.models.cache import Rows, StackCache
from subquad.models.configuration import TransformerConfig
from subquad.models.entropy import token_cross_entropy
from subquad.positions import position_ids

__all__ = [
    "StreamingModel",
    "TransformerPreTrainedModel",
    "can_stream",
    "keep_mask",
    "mean_cross_entropy",
    "moved",
    "padding",
    "refuse",
    "returns_tuples",
    "shifted",
    "streamed_positions",
]

Forward = TypeVar("Forward", bound=Callable[..., Any])


def returns_tuples(forward: Forward) -> Forward:
    """The method with an argument `return_dict`, False for a tuple; default as in the config."""
    return cast(Forward, can_return_tuple(forward))  # whose types say nothing


class TransformerPreTrainedModel(PreTrainedModel):
    """The base class of this package's models.

    Initial values are those of Vaswani et al.'s code: uniform after Glorot for linear maps, zero
    for their biases, N(0, 1/C) for embeddings, so that ·√C makes them unit; mechanisms draw
    theirs from their own seeds.
    """

    config_class: type[TransformerConfig] = TransformerConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = False  # else `Trainer` leaves the loss to be divided by the model
    _skip_keys_device_placement = ("past_key_values",)  # type: ignore[assignment]  # not changed
    _input_embed_layer = "embed"
    embed: nn.Embedding  # of models that read tokens themselves
    head: nn.Linear  # of models that write tokens

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.input_scale = math.sqrt(config.d_model) if config.scale_embeddings else 1.0

    def post_init(self) -> None:
        for module in self.modules():
            # What a mechanism has drawn stays; on the meta device it has drawn nothing.
            if isinstance(module, Mechanism) and not _on_meta(module):
                for part in module.modules():
                    part._is_hf_initialized = True  # type: ignore[assignment]  # transformers' own mark
        super().post_init()  # type: ignore[no-untyped-call]  # transformers'

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            init.normal_(module.weight, mean=0.0, std=self.config.d_model**-0.5)
            index = module.padding_idx
            if index is not None and not getattr(module.weight, "_is_hf_initialized", False):
                init.zeros_(module.weight[index])
        elif isinstance(module, Mechanism):
            _draw(module)
        elif isinstance(module, nn.MultiheadAttention):
            module._reset_parameters()
        elif isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d):
            init.xavier_uniform_(module.weight)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif any(True for _ in module.parameters(recurse=False)) or any(
            True for _ in module.buffers(recurse=False)
        ):
            reset = getattr(module, "reset_parameters", None)
            if reset is not None and not _loaded(module):
                reset()

    def map_to_tokens(self, table: str = "embed.weight", *, bias: bool = False) -> nn.Linear:
        """A new map to the vocabulary; its weight is that of `table` where the config ties them."""
        if self.config.tie_embeddings:
            self._tied_weights_keys = {"head.weight": table}
        return nn.Linear(self.config.d_model, self.config.vocab_size, bias=bias)

    def get_output_embeddings(self) -> nn.Module | None:
        """The map to the vocabulary; None for a model without one."""
        return getattr(self, "head", None)

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Puts another map in the place."""
        if self.get_output_embeddings() is None:
            raise NotImplementedError(f"{type(self).__name__} has no map to the vocabulary")
        self.head = new_embeddings  # type: ignore[assignment]  # a linear map

    def vectors(self, ids: Tensor | None, vectors: Tensor | None, prefix: str = "") -> Tensor:
        """What a stack reads (B, L, C): the embeddings of tokens, or vectors in their place.

        Raises:
            OptionError: unless exactly one of both is given; their names begin with `prefix`.
        """
        if (ids is None) == (vectors is None):
            raise OptionError(f"give either {prefix}input_ids or {prefix}inputs_embeds")
        if ids is not None:
            return self.embedded(ids, self.embed)
        assert vectors is not None
        return vectors

    def embedded(self, ids: Tensor, table: nn.Embedding) -> Tensor:
        """The vectors (B, L, C) of tokens (B, L)."""
        if ids.dim() != 2:
            raise ShapeError(f"token ids must be (B, L), given {tuple(ids.shape)}")
        if ids.is_floating_point() or ids.dtype == torch.bool:
            raise DtypeError(f"token ids must be integers, given {ids.dtype}")
        vectors: Tensor = table(ids)
        return vectors * self.input_scale


class StreamingModel(TransformerPreTrainedModel):
    """A model whose `generate` works from a `StackCache`."""

    decoder: Any  # a stack: which one, the model says

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[Any, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> bool:
        """A `StackCache` in the place of transformers' caches, or none where there is no state."""
        if not can_stream(self.decoder):
            generation_config.use_cache = False
            model_kwargs.pop("past_key_values", None)
        elif generation_config.use_cache is not False:
            model_kwargs.setdefault("past_key_values", StackCache())
        return False  # transformers' own returns nothing either; nobody reads it

    def cache_of(self, given: StackCache | None, begin: bool) -> StackCache | None:
        """The cache of a call: `given`, or a new one; None where the decoder has no state.

        Without a state the whole prefix is given at each step, and computed anew.
        """
        cache = StackCache() if given is None and begin else given
        return cache if cache is not None and can_stream(self.decoder) else None


def can_stream(stack: TransformerEncoder | TransformerDecoder) -> bool:
    """Whether all of a stack's self-attentions have a state."""
    return all(
        bool(block.attention.mechanism.capabilities.state)
        for block in stack.blocks
        if isinstance(block, SelfAttentionBlock) and block.letter == "a"
    )


def keep_mask(name: str, mask: Tensor | None, tokens: Tensor) -> Tensor | None:
    """transformers' mask, 1 = attend, as bool (B, L).

    Raises:
        ShapeError: if it does not fit the tokens (B, L, …).
    """
    if mask is None:
        return None
    if mask.shape != tokens.shape[:2]:
        raise ShapeError(
            f"{name} must be (B, L) = {tuple(tokens.shape[:2])}, given {tuple(mask.shape)}"
        )
    keep = mask != 0
    if keep.device.type != "cpu" or torch.compiler.is_compiling():
        return keep  # to look would wait for the device, or break the graph
    return None if bool(keep.all()) else keep  # most mechanisms are faster without a mask


def padding(
    name: str,
    mask: Tensor | None,
    tokens: Tensor,
    stack: TransformerEncoder | TransformerDecoder,
    cache: StackCache | None = None,
) -> dict[str, Any]:
    """What a stack is told of padding: its `key_mask` and `position_ids`.

    Args:
        name: of the argument, for errors.
        mask: transformers', 1 = attend: (B, L), or with a cache (B, past + L).
        tokens: (B, L, …).
        stack: that reads them.
        cache: of the tokens before.

    Raises:
        ShapeError: if the mask has another shape: what it says of padding would be lost.
    """
    if cache is None:
        keep = keep_mask(name, mask, tokens)
        if keep is None:  # without padding positions count from 0 by themselves
            return {"key_mask": None, "position_ids": None}
    else:
        past, length = cache.get_seq_length(), tokens.shape[1]
        if mask is not None and (mask.dim() != 2 or mask.shape[1] != past + length):
            raise ShapeError(
                f"{name} must be (B, past + L) = (B, {past} + {length}), given {tuple(mask.shape)}"
            )
        keep = keep_mask(name, None if mask is None else mask[:, past:], tokens)
    ids = streamed_positions(mask, tokens.shape[1], stack)
    return {"key_mask": keep, "position_ids": ids}


def moved(
    cache: StackCache,
    stack: TransformerEncoder | TransformerDecoder,
    x: Tensor,
    padded: dict[str, Any],
    record: list[Tensor] | None = None,
) -> Tensor:
    """A stack's output for new tokens behind those of a cache, which moves on.

    Args:
        cache: of the tokens before.
        stack: whose cache it is.
        x: (B, T, C).
        padded: by `padding`.
        record: receives the weights of cross-attentions; None: not asked for.
    """
    asked: dict[str, Any] = {} if record is None else {"record": record}

    def call(state: Any, donate: bool, rows: Rows) -> Any:
        told = {name: rows(given) for name, given in padded.items()}
        return stack.prefill(rows(x), state=state, donate=donate, **told, **asked)

    return cache.move(call, record)


def streamed_positions(
    mask: Tensor | None, length: int, stack: TransformerEncoder | TransformerDecoder
) -> Tensor | None:
    """Positions (B, L) of the last `length` tokens of a padded text; None: counted on.

    Args:
        mask: of all tokens so far, (B, past + L), 1 = attend.
        length: L.
        stack: that is given them.
    """
    if mask is None or stack.positions is None:
        return None
    return position_ids(mask != 0)[:, -length:]


def shifted(labels: Tensor, start: int, padding: int) -> Tensor:
    """What a decoder reads to predict `labels` (B, L): one token later, behind `start`."""
    ids = labels.new_full(labels.shape, start)
    ids[:, 1:] = labels[:, :-1]
    return ids.masked_fill(ids == -100, padding)


def mean_cross_entropy(logits: Tensor, labels: Tensor, items: Tensor | int | None = None) -> Tensor:
    """Σ −log p(label) / items, a scalar, of labels (…) that are not −100; 0 without a label.

    Args:
        logits: (…, V).
        labels: (…) integers.
        items: labels of all batches whose gradients are added up; default: of this one.
    """
    flat = labels.flatten().long()
    total = token_cross_entropy(logits.flatten(0, -2), flat).sum()
    count = (flat != -100).sum().clamp_min(1) if items is None else items
    return total / (count.to(total.device) if isinstance(count, Tensor) else count)


def refuse(model: nn.Module, given: Mapping[str, Any]) -> None:
    """Nothing that a caller asks for is passed over in silence; None and False ask for nothing.

    Raises:
        OptionError: naming arguments that the model's forward does not have.
    """
    wrong = sorted(name for name, one in given.items() if one is not None and one is not False)
    if wrong:
        raise OptionError(f"{type(model).__name__} has no argument {', '.join(wrong)}")


def _on_meta(module: nn.Module) -> bool:
    return any(t.is_meta for t in (*module.parameters(), *module.buffers()))


def _loaded(module: nn.Module) -> bool:
    """Whether everything in it came from a checkpoint."""
    held = [*module.parameters(), *(b for b in module.buffers() if b is not None)]
    return all(getattr(t, "_is_hf_initialized", False) for t in held)


def _draw(mechanism: Mechanism) -> None:
    """Initial values of a mechanism; tensors that came from a checkpoint stay."""
    held = {**dict(mechanism.named_parameters()), **dict(mechanism.named_buffers())}
    loaded = {
        name: tensor.clone()
        for name, tensor in held.items()
        if getattr(tensor, "_is_hf_initialized", False)
    }
    if len(loaded) == len(held):
        return
    mechanism.reset_parameters()
    now = {**dict(mechanism.named_parameters()), **dict(mechanism.named_buffers())}
    for name, tensor in loaded.items():
        now[name].copy_(tensor)
