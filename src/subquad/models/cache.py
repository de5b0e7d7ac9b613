"""The cache of this package's own models: one state of the whole decoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache, CacheLayerMixin

from subquad.attention.stack import SharedMemory, StackState
from subquad.errors import UnsupportedError

__all__ = ["Rows", "StackCache"]


class _Place(CacheLayerMixin):
    """Where a stack keeps its state, as transformers sees it."""

    is_sliding = False

    # The base class would make empty keys and values.
    def __init__(self) -> None:
        self.state: StackState | None = None
        self.alone = False  # whether nobody else can have the state
        self.rows = 0  # of the state, where it is known
        self.order: list[int] | None = None  # the state's row of each row; None: the same
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
        self.state = self.sources = self.order = None

    def plain(self) -> StackState | None:
        """The state as others know it: its rows in their order, each with its memory."""
        state = self.state
        if state is None:
            return None
        if any(isinstance(one, SharedMemory) for one in state.attentions):
            parted = (
                one.apart() if isinstance(one, SharedMemory) else one for one in state.attentions
            )
            state = dataclasses.replace(state, attentions=tuple(parted))
        if self.order is not None:  # a source's rows are in its own rows' places
            state, self.order = self._selected(state, self.order, self.memories), None
        self.state = state
        return state

    def share(self) -> None:
        """Keeps the memory of a source once, where each has as many rows as the others.

        Not with gradients: those of equal rows are their own.
        """
        if self.state is None or self.sources is None or torch.is_grad_enabled():
            return
        sizes = self.sources.bincount()
        times = int(sizes[0])
        if times == 1 or not bool((sizes == times).all()):
            return
        first = torch.arange(0, len(self.sources), times, device=self.sources.device)
        attentions = list(self.state.attentions)
        for place in self.memories:
            attentions[place] = SharedMemory(attentions[place].select(first), times)
        self.state = dataclasses.replace(self.state, attentions=tuple(attentions))

    @staticmethod
    def _selected(state: StackState, rows: Tensor | list[int], stay: frozenset[int]) -> StackState:
        """Rows of a state, in that order, but for the attentions that stay as they are."""
        attentions = tuple(
            one if place in stay else one.select(rows) for place, one in enumerate(state.attentions)
        )
        position = None if state.position is None else state.position[rows]
        return dataclasses.replace(state, attentions=attentions, position=position)

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
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        if self.state is None or self._moved(indices):
            return
        state = self.plain()
        assert state is not None
        stay = frozenset[int]()
        if self.sources is not None:
            chosen = self.sources[indices]
            # A source's beams share what is kept of it: only their own past moves.
            if torch.equal(chosen, self.sources):
                stay = self.memories
            self.sources = chosen
        self.state, self.rows = self._selected(state, indices, stay), len(indices)

    def _moved(self, indices: Tensor) -> bool:
        """Whether it was enough to copy the rows that are wanted twice onto those that nobody
        wants, and to note which row is where: of a search's beams most go on as they are.
        """
        state, sources = self.state, self.sources
        assert state is not None
        rows = len(indices)
        if not self.alone or self.rows != rows or torch.is_grad_enabled():
            return False
        if sources is not None and not torch.equal(sources[indices], sources):
            return False
        order = range(rows) if self.order is None else self.order
        wanted = [order[row] for row in indices.tolist()]
        groups = [0] * rows if sources is None else sources.tolist()
        self.order, copies = _settled(wanted, groups)
        if copies:
            to, by = torch.tensor(copies, device=indices.device).unbind(1)
            new = [
                one if place in self.memories else one.overwritten(to, by)
                for place, one in enumerate(state.attentions)
            ]
            position = state.position
            if position is not None:
                position = position.index_copy(0, to, position[by])
            self.state = dataclasses.replace(state, attentions=tuple(new), position=position)
        return True

    def batch_repeat_interleave(self, repeats: int) -> None:
        state = self.plain()
        if state is not None:
            self.state, self.rows = state.repeat(repeats), self.rows * repeats
        if self.sources is not None:
            self.sources = self.sources.repeat_interleave(repeats, 0)


Rows = Callable[[Tensor | None], Any]
"""Brings a tensor's rows into the order of a state's; None stays None."""

Move = Callable[[StackState | None, bool, Rows], tuple[Tensor, StackState]]


def _at(rows: list[int]) -> Rows:
    return lambda t: None if t is None else t[torch.tensor(rows, device=t.device)]


def _settled(wanted: list[int], groups: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """A row for each of `wanted`, and which rows are to be copied for that: (to, from).

    Who wants a row first has it as it is; the others have copies, on rows that nobody wants.

    Args:
        wanted: rows that hold what is wanted, each of its own place's group.
        groups: of the rows, and of the places.
    """
    spare: dict[int, list[int]] = {}
    for row in sorted(set(range(len(wanted))) - set(wanted)):
        spare.setdefault(groups[row], []).append(row)
    taken: set[int] = set()
    found, copies = [], []
    for row in wanted:
        place = row
        if row in taken:
            place = spare[groups[row]].pop()
            copies.append((place, row))
        taken.add(row)
        found.append(place)
    return found, copies


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
        return self.place.plain()

    @state.setter
    def state(self, state: StackState | None) -> None:
        self.place.state, self.place.alone, self.place.order = state, False, None

    @property
    def is_empty(self) -> bool:
        """Whether there is no state yet."""
        return self.place.state is None

    def move(self, call: Move, record: list[Tensor] | None = None) -> Tensor:
        """Output of a call that moves the state on.

        Args:
            call: (state, donate, rows) → (output, new state); with `donate` the given state may
                be written over: nobody but the cache has seen it. The state's rows may stand in
                another order than the caller's: `rows` brings a tensor (B, …) into it.
            record: tensors (B, …) that the call appends.
        """
        place, order = self.place, self.place.order
        if order is None:
            out, place.state = call(place.state, place.alone, lambda t: t)
        else:
            known = 0 if record is None else len(record)
            there = _at(sorted(range(len(order)), key=order.__getitem__))
            back = _at(order)
            out, place.state = call(place.state, place.alone, there)
            out = back(out)
            if record is not None:
                record[known:] = map(back, record[known:])
        place.alone, place.rows = True, len(out)
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
        self.place.share()

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
