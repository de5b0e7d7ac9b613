"""The cache of this package's own models: one state of the whole decoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache, CacheLayerMixin

from subquad.attention.stack import StackState
from subquad.errors import UnsupportedError

__all__ = ["StackCache"]


class _Place(CacheLayerMixin):
    """Where a stack keeps its state, as transformers sees it."""

    is_sliding = False

    # The base class would make empty keys and values.
    def __init__(self) -> None:
        self.state: StackState | None = None
        self.alone = False  # whether nobody else can have the state
        self.sources: Tensor | None = None
        self.memories: frozenset[int] = frozenset()
        self.keys = self.values = None
        self.record_past = False

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]  # an attribute in the base class
        return self.state is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the state starts with the first call."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """A stack moves its state on by itself."""
        raise UnsupportedError("StackCache", "keys and values", "it holds a state of a stack")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, self.get_seq_length()

    def get_seq_length(self) -> int:
        return 0 if self.state is None else self.state.length

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.state = self.sources = None

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise UnsupportedError(
                "StackCache",
                "taking tokens back",
                "a state is a sum over tokens; assisted decoding and prompt lookup need that: use "
                "greedy search, beams or sampling",
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is None:
            return
        if self.sources is None:
            self.state = self.state.select(indices)
            return
        chosen = self.sources[indices]
        # A source's beams share what is kept of it: only their own past moves.
        stay = self.memories if torch.equal(chosen, self.sources) else frozenset[int]()
        state, self.sources = self.state, chosen
        self.state = dataclasses.replace(
            state,
            attentions=tuple(
                one if place in stay else one.select(indices)
                for place, one in enumerate(state.attentions)
            ),
            position=None if state.position is None else state.position[indices],
        )

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.state = self.state.repeat(repeats)
        if self.sources is not None:
            self.sources = self.sources.repeat_interleave(repeats, 0)


class StackCache(Cache):
    """`past_key_values` of this package's models: the state of their decoder.

    `generate` makes one by itself. Where all mechanisms have a constant state its size does not
    grow with the text; those that keep keys and values keep them here. Beams and
    ``num_return_sequences`` work; tokens cannot be taken back.

    Args:
        state: of a stack, `subquad.StackState`; None at the start.

    Example:
        >>> import torch, subquad as sq
        >>> model = sq.models.CausalTransformer(
        ...     sq.models.CausalTransformerConfig(vocab_size=20, d_model=32, num_layers=2)
        ... ).eval()
        >>> cache = sq.models.StackCache()
        >>> sizes = []
        >>> for length in (10, 500):
        ...     with torch.no_grad():
        ...         out = model(torch.ones(1, length, dtype=torch.long), use_cache=True)
        ...     sizes.append(out.past_key_values.nbytes)
        >>> sizes[0] == sizes[1]
        True
    """

    def __init__(self, state: StackState | None = None) -> None:
        self.place = _Place()
        super().__init__(layers=[self.place])
        self.state = state

    @property
    def state(self) -> StackState | None:
        """Of the stack; it stays as it is when the cache moves on."""
        self.place.alone = False
        return self.place.state

    @state.setter
    def state(self, state: StackState | None) -> None:
        self.place.state, self.place.alone = state, False

    @property
    def is_empty(self) -> bool:
        """Whether there is no state yet."""
        return self.place.state is None

    def move(self, call: Callable[[StackState | None, bool], tuple[Tensor, StackState]]) -> Tensor:
        """Output of a call that moves the state on.

        Args:
            call: (state, donate) → (output, new state); with `donate` the given state may be
                written over: nobody but the cache has seen it.
        """
        out, self.place.state = call(self.place.state, self.place.alone)
        self.place.alone = True
        return out

    def know_sources(self, encoded: Sequence[Tensor | None], memories: Iterable[int]) -> None:
        """Notes which rows have the same source, whose state then need not move with beams.

        Args:
            encoded: what the decoder reads of them, each (B, …).
            memories: numbers of the attentions that read it and note nothing of their queries.
        """
        told = [one for one in encoded if one is not None]
        same = torch.stack([(one[1:] == one[:-1]).flatten(1).all(1) for one in told]).all(0)
        self.place.sources = F.pad((~same).long().cumsum(0), (1, 0))
        self.place.memories = frozenset(memories)

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return 0 if self.place.state is None else self.place.state.nbytes

    @property
    def is_compileable(self) -> bool:
        """No: a call makes a new state."""
        return False

    @property
    def is_croppable(self) -> bool:
        """No: tokens cannot be taken back."""
        return False

    def to(self, device: torch.device | str) -> StackCache:
        """A copy on `device`."""
        state = self.state  # shared with the copy where nothing has to move
        new = StackCache(None if state is None else state.to(device))
        if self.place.sources is not None:
            new.place.sources = self.place.sources.to(device)
            new.place.memories = self.place.memories
        return new
