"""Stacks of residual blocks: encoders and decoders written as a pattern of letters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from subquad import registry
from subquad.attention.base import Absent, State, Support, looking
from subquad.attention.dropout import Dropout
from subquad.attention.exact.engine import KeyValueState
from subquad.attention.feedforward import KINDS, FeedForward
from subquad.attention.layers import SEEDS_APART, dropout_of_weights, need_answers_alone
from subquad.attention.masks import Mask
from subquad.attention.mixer.layer import TokenMixing
from subquad.attention.multihead import MultiheadAttention, with_draws
from subquad.attention.norms import build_norm, norm_problem, normalise
from subquad.errors import (
    DeviceError,
    DtypeError,
    OptionError,
    ShapeError,
    UnknownNameError,
    UnsupportedError,
    nearest,
)
from subquad.kernels.precision import autocast_dtype
from subquad.options import (
    Config,
    Spec,
    choice_problem,
    flag_problem,
    integer_problem,
    number_problem,
    parse_spec,
)
from subquad.positions import Learned, Rotary, Sinusoidal

__all__ = ["StackState", "TransformerDecoder", "TransformerEncoder"]

LETTERS = {
    "a": "self-attention or token mixing",
    "c": "cross-attention",
    "f": "feed-forward",
}
POSITIONS = {
    "sinusoidal": ("base", "frequencies"),
    "learned": (),
    "rotary": ("base", "frequencies", "interleaved"),
}
"""Names of positions, with their options."""

Positions = Sinusoidal | Learned | Rotary
OneMechanism = str | Spec | Config
Mechanisms = OneMechanism | Sequence[OneMechanism] | Mapping[int | str, OneMechanism]
"""One mechanism for all attentions, one for each, or by number with a "default"."""

Memory = Tensor | Sequence[Tensor]


@dataclass(frozen=True, eq=False)
class StackState(State):
    """What a stack remembers of past tokens.

    Args:
        attentions: the state of each attention, in the order of the pattern. That of a
            cross-attention holds the memory: its mechanism's state where that can be read
            without new keys, else keys and values.
        length: tokens read, padding included.
        position: (B,) of each row's next token, where positions were given; else `length` is.
    """

    attentions: tuple[State, ...]
    length: int = 0
    position: Tensor | None = None


@dataclass(frozen=True, eq=False)
class KeptKeys(State):
    """A mechanism's state without keys beside the memory's keys, from which weights are computed.

    Args:
        state: what the mechanism reads.
        k: (B, Hkv, S, D).
        key: (B, S) bool, True = attend, or None where every key is read.
    """

    state: State
    k: Tensor
    key: Tensor | None = None


@dataclass(frozen=True, eq=False)
class SharedMemory(State):
    """A memory that rows next to each other read, as a search's beams do, kept once for them all.

    Inside of a cache alone: its rows are fewer than the batch's.

    Args:
        state: with a row for each group of rows.
        times: rows of a group.
    """

    state: State
    times: int

    def apart(self) -> State:
        """With a row for each."""
        return self.state.repeat(self.times)

    def joined(self, q: Tensor) -> Tensor:
        """Queries (B, H, T, D) as (B/times, H, times·T, D)."""
        rows, heads, tokens, width = q.shape
        groups = q.view(rows // self.times, self.times, heads, tokens, width)
        return groups.transpose(1, 2).flatten(2, 3)

    def parted(self, out: Tensor) -> Tensor:
        """The other way, for outputs and weights."""
        return out.unflatten(2, (self.times, -1)).transpose(1, 2).flatten(0, 1)


# ---- attention -------------------------------------------------------------------------------


class SummedAttention(MultiheadAttention):
    """`MultiheadAttention`, batch first, whose scores are its own and those of some before it.

        s_l = Σ_{m=l−previous}^{l} q_m·k_m / √D = [q_l … q_l−previous]·[k_l … k_l−previous] / √D

    A sum of dot products is the dot product of concatenated vectors, so that no L×S scores
    are passed on, and any mechanism that reads q·k runs as it is, with (previous + 1)·D wide
    heads.
    """

    def __init__(self, d_model: int, nhead: int, *, previous: int = 0, **options: Any) -> None:
        self.previous = previous  # a plain number: the constructor already asks for it
        super().__init__(d_model, nhead, batch_first=True, **options)

    def _head_widths(self) -> dict[str, int | None]:
        if not self.previous:
            return super()._head_widths()
        return {"head_dim": (self.previous + 1) * self.head_dim, "value_dim": self.head_dim}

    @property
    def scale(self) -> float | None:
        """Factor of the summed scores: one head's, however many are summed."""
        return self.head_dim**-0.5 if self.previous else None

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Heads q (B, H, L, D), k and v (B, Hkv, S, D)."""
        same = query is key and key is value
        return self._heads(*self._project(query, key, value, same))

    def project_query(self, query: Tensor) -> Tensor:
        """Heads q (B, H, L, D) alone."""
        return self._heads(F.linear(query, *next(self._projections())))[0]

    def hold(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, keep_keys: bool = False
    ) -> State:
        """A memory's keys and values as what later steps read.

        With `keep_keys` it is of a kind that `held_weights` can read, too.

        Raises:
            UnsupportedError: for `keep_keys` where weights depend on what the state alone knows.
        """
        if not self._reads:
            return KeyValueState.extend(None, k, v, key_mask)
        one, mech = q[:, :, :1], self.mechanism  # a query is part of a call; nobody asks for it
        state = mech.prefill(one, k, v, key_mask=key_mask, scale=self.scale)[1]
        readable = mech.state_weights_for(mech.config)
        if readable or not keep_keys:
            return state
        if isinstance(readable, Absent) and mech.follows_for(mech.config):
            raise UnsupportedError(mech.name, "record in prefill and step", readable.reason)
        return KeptKeys(state, k, key_mask)

    @property
    def _reads(self) -> bool:
        """Whether a memory is held as the mechanism's own state."""
        have = self.mechanism.capabilities
        return bool(have.state and have.read)

    def look_up(self, q: Tensor, held: State) -> tuple[Tensor, State]:
        """Cross-attention to what `hold` has made, and what the next call looks up."""
        if isinstance(held, SharedMemory):
            out, new = self.look_up(held.joined(q), held.state)
            return held.parted(out), replace(held, state=new)
        if not self._reads:
            assert isinstance(held, KeyValueState), "made by `hold`"
            return self.mechanism(q, held.k, held.v, key_mask=held.key, scale=self.scale), held
        if isinstance(held, KeptKeys):
            out, new = self.mechanism.step(q, None, None, held.state, scale=self.scale)
            return out, replace(held, state=new)
        return self.mechanism.step(q, None, None, held, scale=self.scale)

    def weights(self, q: Tensor, k: Tensor, mask: Mask | None) -> Tensor:
        """The implied weights (B, H, L, S), without dropout and noise, differentiable."""
        with self._looking():
            return self.mechanism.weights(q, k, mask=mask, scale=self.scale)

    def held_weights(self, q: Tensor, held: State) -> Tensor:
        """`weights` of what `look_up` does.

        Raises:
            OptionError: if keys are needed and not kept.
        """
        if isinstance(held, SharedMemory):
            return held.parted(self.held_weights(held.joined(q), held.state))
        with self._looking():
            if self._reads and self.mechanism.state_weights_for(self.mechanism.config):
                return self.mechanism.weights(q, state=held, scale=self.scale)
            if isinstance(held, KeptKeys | KeyValueState):
                return self.mechanism.weights(q, held.k, key_mask=held.key, scale=self.scale)
        raise OptionError(
            f"record: the state of {self.mechanism.name} has forgotten the memory's keys, from "
            "which weights are computed; give a list as `record` to the first prefill, too"
        )

    def _looking(self) -> AbstractContextManager[object]:
        return looking(self.mechanism) if self.mechanism.training else nullcontext()


def sums_scores(mechanism: OneMechanism) -> Support:
    """Whether a mechanism's weights are those of scores scale·q·k, or estimate them.

    Those of a summary are, too: its keys are sums of keys.
    """
    found, config = registry.resolve(mechanism)
    parts: Any = getattr(config, "parts", ())
    if found.name == "mixed":
        supports = [sums_scores(part.spec) for part in parts]
        return next((one for one in supports if isinstance(one, Absent)), True)
    softmax = {found.name, found.capabilities_for(config).approximates}
    if "softmax" in softmax or found.family == "summary":
        return True
    return Absent(f"the weights of {found.name} are no function of scale·q·k, which adds up")


# ---- blocks ----------------------------------------------------------------------------------


@dataclass
class _Call:
    """What the blocks of one call share, and what they leave for the blocks behind them.

    Each has places of its own, so that a block may be computed twice (checkpoints do).
    """

    mask: Mask
    ids: Tensor | None = None  # positions (L,) or (B, L), unless counted from the first token
    shift: Tensor | None = None  # positions to be added to queries and keys
    turn: Callable[[Tensor], Tensor] | None = None  # rotation of self-attention's q and k
    memories: Sequence[Tensor] | None = None
    memory_mask: Mask | None = None
    memory_shift: Tensor | None = None
    streaming: bool = False
    states: Sequence[State] | None = None  # of the tokens before
    donate: bool = False  # whether these may be written over
    new_states: dict[int, State] = field(default_factory=dict)
    queries: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    keys: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    recording: bool = False  # whether cross-attentions leave their weights
    weights: dict[int, Tensor] = field(default_factory=dict)


def _shifted(x: Tensor, shift: Tensor | None) -> Tensor:
    return x if shift is None else x + shift


class _Residual(nn.Module):
    """norm(x + dropout(inner(x))), or x + dropout(inner(norm(x)))."""

    def __init__(self, norm: nn.Module, dropout: float, norm_first: bool) -> None:
        super().__init__()
        self.norm = norm
        self.dropout = Dropout(dropout)
        self.norm_first = norm_first

    def forward(self, x: Tensor, call: _Call) -> Tensor:
        keep = call.mask.key
        if self.norm_first:
            out: Tensor = x + self.dropout(self.inner(normalise(self.norm, x, keep), call))
            return out
        return normalise(self.norm, x + self.dropout(self.inner(x, call)), keep)

    def inner(self, x: Tensor, call: _Call) -> Tensor:
        """What the block adds to x (B, L, C); each kind of block has its own."""
        raise NotImplementedError


class FeedForwardBlock(_Residual):
    """A residual block around a `FeedForward`."""

    def __init__(self, feed_forward: nn.Module, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.feed_forward = feed_forward

    def inner(self, x: Tensor, call: _Call) -> Tensor:
        out: Tensor = self.feed_forward(x)
        return out


class SelfAttentionBlock(_Residual):
    """A residual block around self-attention or a token mixer.

    Args:
        attention: the attention, or token mixing.
        place: its number among all attentions of the stack.
        rank: its number among those of its kind that have scores.
        kept: whether later ones add its scores to theirs.
        arguments: of the residual block.
    """

    letter: ClassVar[str] = "a"

    def __init__(
        self,
        attention: SummedAttention | TokenMixing,
        place: int,
        rank: int,
        kept: bool,
        *arguments: Any,
    ) -> None:
        super().__init__(*arguments)
        self.attention = attention
        self.place, self.rank, self.kept = place, rank, kept

    def inner(self, x: Tensor, call: _Call) -> Tensor:
        attn = self.attention
        if isinstance(attn, TokenMixing):
            if not call.streaming:
                mixed: Tensor = attn.mechanism(x, mask=call.mask)
                return mixed
            mixed, call.new_states[self.place] = attn.mechanism.prefill(
                x, state=self._state(call), key_mask=call.mask.key, donate=call.donate
            )
            return mixed
        query = _shifted(x, call.shift)
        q, k, v = attn.project(query, query, x)
        if call.turn is not None:
            q, k = call.turn(q), call.turn(k)
        q, k = self._summed(q, call.queries), self._summed(k, call.keys)
        if call.streaming:
            out, call.new_states[self.place] = attn.mechanism.prefill(
                q, k, v, state=self._state(call), key_mask=call.mask.key, scale=attn.scale,
                donate=call.donate,
            )  # fmt: skip
        else:
            out = attn.mechanism(q, k, v, mask=call.mask, scale=attn.scale)
        return attn._out(out, x.dtype)

    def _state(self, call: _Call) -> State | None:
        return None if call.states is None else call.states[self.place]

    def _summed(self, own: Tensor, each: dict[tuple[str, int], Tensor]) -> Tensor:
        """Queries, or keys, followed by those of the attentions before, the nearest first."""
        if self.kept:
            each[self.letter, self.rank] = own
        assert isinstance(self.attention, SummedAttention), "mixers have no scores"
        if not self.attention.previous:
            return own
        before = range(self.rank - 1, self.rank - 1 - self.attention.previous, -1)
        return torch.cat([own, *(each[self.letter, rank] for rank in before)], -1)


class CrossAttentionBlock(SelfAttentionBlock):
    """A residual block around attention to a memory."""

    letter: ClassVar[str] = "c"

    def inner(self, x: Tensor, call: _Call) -> Tensor:
        attn = self.attention
        assert not isinstance(attn, TokenMixing), "refused by the stack"
        query = _shifted(x, call.shift)
        if call.memories is None:  # its keys are in the state
            held = self._state(call)
            assert held is not None, "there is a memory, or a state"
            q = self._summed(attn.project_query(query), call.queries)
            out, call.new_states[self.place] = attn.look_up(q, held)
            if call.recording:
                call.weights[self.rank] = attn.held_weights(q, held)
            return attn._out(out, x.dtype)
        memory = call.memories[self.rank]
        if call.mask.causal:
            need_answers_alone(attn.mechanism)
        q, k, v = attn.project(query, _shifted(memory, call.memory_shift), memory)
        q, k = self._summed(q, call.queries), self._summed(k, call.keys)
        if call.streaming:
            mask = call.memory_mask
            held = attn.hold(q, k, v, None if mask is None else mask.key, call.recording)
            out, call.new_states[self.place] = attn.look_up(q, held)
        else:
            out = attn.mechanism(q, k, v, mask=call.memory_mask, scale=attn.scale)
        if call.recording:  # behind the call: what a training call draws anew has been drawn
            call.weights[self.rank] = attn.weights(q, k, call.memory_mask)
        return attn._out(out, x.dtype)


# ---- stacks ----------------------------------------------------------------------------------


class _Stack(nn.Module):
    """What encoders and decoders share: blocks by letters, positions, norms, streaming."""

    letters: ClassVar[str]
    usual: ClassVar[str]
    torch_names: ClassVar[dict[str, tuple[str, str]]]

    def __init__(
        self,
        d_model: int,
        nhead: int,
        num_layers: int | None,
        pattern: str | None,
        mechanisms: dict[str, Mechanisms],
        *,
        dim_feedforward: int,
        dropout: float,
        activation: str | Callable[[Tensor], Tensor],
        feed_forward: str,
        norm: str,
        norm_first: bool,
        final_norm: bool | None,
        norm_eps: float,
        bias: bool,
        num_kv_heads: int | None,
        residual_attention: bool | int,
        positions: str | Spec | Positions | None,
        positions_at: str,
        attention_dropout: float | None,
        attention_noise: float,
        max_length: int | None,
        memory_dim: int | None,
        seed: int,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        problems = [
            *integer_problem("d_model", d_model, 1),
            *integer_problem("nhead", nhead, 1),
            *([] if num_layers is None else integer_problem("num_layers", num_layers, 1)),
            *([] if memory_dim is None else integer_problem("memory_dim", memory_dim, 1)),
            *number_problem("dropout", dropout, 0.0, 1.0),
            *choice_problem("feed_forward", feed_forward, KINDS),
            *norm_problem(norm),
            *number_problem("norm_eps", norm_eps, 0.0),
            *flag_problem("norm_first", norm_first),
            *([] if final_norm is None else flag_problem("final_norm", final_norm)),
            *choice_problem("positions_at", positions_at, ("input", "attention")),
            *([] if type(seed) is int else [f"seed={seed!r} must be an integer"]),
        ]
        if not problems and d_model % nhead:
            problems.append(f"nhead={nhead} must divide d_model={d_model}")
        if not isinstance(residual_attention, bool):
            problems += integer_problem("residual_attention", residual_attention, 0)
        if pattern is None:
            pattern, layers = self.usual, num_layers or 6
        else:
            layers = num_layers or 1
            problems += _pattern_problems(pattern, self.letters, type(self).__name__)
        if problems:
            raise OptionError(f"{type(self).__name__}: " + "; ".join(problems))
        self.pattern = "".join(pattern.split()) * layers
        self.d_model = d_model
        self.norm_first = norm_first
        self.positions_at = positions_at
        self.gradient_checkpointing = False
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        summed = len(self.pattern) if residual_attention is True else int(residual_attention)
        each = {
            letter: iter(_each(given, self.pattern.count(letter), letter))
            for letter, given in mechanisms.items()
        }
        seen = dict.fromkeys(mechanisms, 0)  # attentions with scores, of each kind
        blocks: list[_Residual] = []
        for letter in self.pattern:
            shell = (build_norm(norm, d_model, norm_eps, bias, **factory), dropout, norm_first)
            if letter == "f":
                network = FeedForward(
                    d_model, dim_feedforward, activation, dropout, bias,
                    kind=feed_forward, **factory,
                )  # fmt: skip
                blocks.append(FeedForwardBlock(network, *shell))
                continue
            config = registry.resolve(next(each[letter]))[1]
            config = config.for_use("cross") if letter == "c" else config
            weights_dropout = dropout_of_weights(config, attention_dropout, dropout)
            place = sum(map(_attends, blocks))
            where = (place, seen[letter], bool(summed))
            shared: dict[str, Any] = {
                "max_length": max_length,
                "seed": seed + SEEDS_APART * place,
            }
            if not registry.describe(config).capabilities.qkv:
                if letter == "c":
                    raise OptionError(
                        f"{type(self).__name__}: {config} mixes the tokens of one sequence and "
                        "cannot be a cross-attention"
                    )
                with_draws(config, dropout=attention_dropout or 0.0, weight_noise=attention_noise)
                mixing = TokenMixing(
                    d_model, mechanism=config, batch_first=True, **shared, **factory
                )
                blocks.append(SelfAttentionBlock(mixing, *where, *shell))
                continue
            previous = min(summed, seen[letter])
            support = sums_scores(config) if summed else True
            if isinstance(support, Absent):
                raise UnsupportedError(config.mechanism, "residual_attention", support.reason)
            seen[letter] += 1
            width = memory_dim if letter == "c" else None
            attention = SummedAttention(
                d_model, nhead, dropout=weights_dropout, bias=bias, kdim=width, vdim=width,
                num_kv_heads=num_kv_heads, mechanism=config, attention_noise=attention_noise,
                previous=previous, **shared, **factory,
            )  # fmt: skip
            kind = CrossAttentionBlock if letter == "c" else SelfAttentionBlock
            blocks.append(kind(attention, *where, *shell))
        self.blocks = nn.ModuleList(blocks)
        self.norm = (
            build_norm(norm, d_model, norm_eps, bias, **factory)
            if (norm_first if final_norm is None else final_norm)
            else None
        )
        self.positions = _positions(positions, d_model, nhead, max_length, factory)
        self.input_dropout = Dropout(dropout)

    def extra_repr(self) -> str:
        return f"{self.d_model}, pattern={self.pattern!r}"

    def load_torch(self, state_dict: Mapping[str, Tensor], prefix: str = "") -> None:
        """Takes the weights of torch's stack of the same depth and widths.

        Every name is found again, or the call raises; a mechanism's own tensors stay.

        Args:
            state_dict: of `torch.nn.TransformerEncoder` or `torch.nn.TransformerDecoder`.
            prefix: of its names that are meant, "encoder." or "decoder." in the state dict of
                a `torch.nn.Transformer`; other names are left alone.

        Raises:
            OptionError: if the pattern is not torch's.
            RuntimeError: if names are missing or left over, or sizes differ.
        """
        size = len(self.usual)
        layers, rest = divmod(len(self.pattern), size)
        if rest or self.pattern != self.usual * layers:
            raise OptionError(
                f"torch's layers are {self.usual!r} again and again, the pattern is "
                f"{self.pattern!r}"
            )
        renamed = {}
        for name, tensor in state_dict.items():
            if not name.startswith(prefix):
                continue
            name = name.removeprefix(prefix)
            parts = name.split(".")
            if parts[0] == "layers" and len(parts) > 3 and parts[2] in self.torch_names:
                letter, own = self.torch_names[parts[2]]
                block = int(parts[1]) * size + self.usual.index(letter)
                name = ".".join(["blocks", str(block), own, *parts[3:]])
            renamed[name] = tensor
        self.load_state_dict(renamed)

    # ---- a call --------------------------------------------------------------------------

    def _start(
        self, x: Tensor, mask: Mask, ids: Tensor | None, state: StackState | None = None
    ) -> tuple[Tensor, _Call]:
        """The tokens, positions added, and the call that the blocks are given."""
        self._check("x", x, self.d_model)
        _check_key("key_mask", mask, x)
        if self.positions is None:
            if ids is not None:
                raise OptionError("position_ids are given to a stack without positions")
            return x, _Call(mask)
        if ids is None and state is not None and state.position is not None:
            ids = state.position[:, None] + torch.arange(x.shape[1], device=x.device)
        call = _Call(mask, ids)
        ids = self._ids(x, ids, 0 if state is None else state.length)
        if isinstance(self.positions, Rotary):
            rotary = self.positions
            tables = rotary.tables(ids if ids.dim() == 1 else ids[:, None], x.dtype)
            call.turn = lambda heads: rotary.turn(heads, tables)
            return x, call
        shift = self.positions(ids, x.dtype)
        if self.positions_at == "attention":
            call.shift = shift
            return x, call
        return self.input_dropout(x + shift), call

    def _ids(self, x: Tensor, ids: Tensor | None, start: int) -> Tensor:
        length = x.shape[1]
        if ids is None:
            if isinstance(self.positions, Learned):
                self.positions.check_length(start + length)
            return torch.arange(start, start + length, device=x.device)
        if tuple(ids.shape) not in ((length,), tuple(x.shape[:2])):
            raise ShapeError(
                f"position_ids must be (L,) = ({length},) or (B, L) = {tuple(x.shape[:2])}, "
                f"given {tuple(ids.shape)}"
            )
        return ids

    def _run(self, x: Tensor, call: _Call, seen: list[Tensor] | None = None) -> Tensor:
        """The tokens behind the last block and the final norm; into `seen` those behind each."""
        again = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        for block in self.blocks:
            x = checkpoint(block, x, call, use_reentrant=False) if again else block(x, call)
            if seen is not None:
                seen.append(x)
        return x if self.norm is None else normalise(self.norm, x, call.mask.key)

    def _stream(
        self, x: Tensor, call: _Call, state: StackState | None
    ) -> tuple[Tensor, StackState]:
        attentions = sum(map(_attends, self.blocks))
        if state is not None and len(state.attentions) != attentions:
            raise ShapeError(
                f"state holds {len(state.attentions)} attentions, the stack has {attentions}"
            )
        call.streaming = True
        call.states = None if state is None else state.attentions
        length, position = (0, None) if state is None else (state.length, state.position)
        if call.ids is not None:
            ids = call.ids if call.mask.key is None else call.ids.masked_fill(~call.mask.key, -1)
            after = ids.expand(x.shape[:2]).amax(1) + 1
            position = after if position is None else torch.maximum(position, after)
        out = self._run(x, call)
        new = tuple(call.new_states[place] for place in range(attentions))
        return out, StackState(new, length + x.shape[1], position)

    def _check(self, name: str, x: Tensor, width: int) -> None:
        if x.dim() != 3 or x.shape[-1] != width:
            raise ShapeError(f"{name} must be (B, L, C={width}), given {tuple(x.shape)}")
        own = next((p for p in self.parameters() if p.dim() > 1), x)  # norms may be kept wider
        if x.device != own.device:
            raise DeviceError(f"{name} is on {x.device}, the stack is on {own.device}")
        if x.dtype != own.dtype and autocast_dtype(x) is None:
            raise DtypeError(f"{name} must have the stack's {own.dtype}, given {x.dtype}")


def _attends(block: nn.Module) -> bool:
    return isinstance(block, SelfAttentionBlock)


def _check_key(name: str, mask: Mask, x: Tensor) -> None:
    """Refuses a key mask that does not broadcast to the tokens x (B, L, ·)."""
    shape = () if mask.key is None else mask.key.shape
    pairs = zip(shape[::-1], (x.shape[1], x.shape[0]), strict=False)
    if len(shape) > 2 or any(size not in (1, full) for size, full in pairs):
        raise ShapeError(
            f"{name} must broadcast to (B, L) = {tuple(x.shape[:2])}, given {tuple(shape)}"
        )


class TransformerEncoder(_Stack):
    """Self-attention and feed-forward blocks in any order, with any mechanism in each.

        post-norm (default)   x ← norm(x + dropout(block(x)))
        pre-norm              x ← x + dropout(block(norm(x))),   one more norm at the end

    A pattern says which blocks: "a" self-attention or token mixing, "f" feed-forward. "af"
    six times is the Transformer's encoder, "aaf af" attends three times. Tokens are (B, L, C);
    masks mean what they mean in `subquad.attention`: True = attend (torch's layers have True =
    ignore). With softmax, the usual pattern and torch's weights (`load_torch`) it is torch's
    encoder; called with ``causal=True`` it is the body of a language model, and `prefill` and
    `step` stream it, in constant memory where its mechanisms have a constant state.

    **Residual attention.** With `residual_attention` the scores of an attention are added to
    those of the attentions before it, s_l = q_l·k_l/√D + s_l−1, as in RealFormer. The sum of
    dot products is computed as one of concatenated vectors, with no L×L matrix, in any
    mechanism whose weights are a function of scale·q·k. The l-th attention's queries and keys
    are then l·D wide: the cost of what the mechanism does with them grows l-fold. A number n
    adds those of the n attentions before and no earlier ones.

    **Positions.** `positions` names or holds sines, a learned table or rotations. Vectors are
    added to the input (and dropped from, as the paper has it), or with ``positions_at=
    "attention"`` to the inputs of the query and key projections of every attention, values
    without. Rotations act on q and k of every self-attention. Token mixers know the order, or
    do without.

    With the attribute `gradient_checkpointing` set to True, a training call keeps what each block
    is given and computes the block again in the backward pass, with the same draws: less memory
    for a third more time.

    Cost: O(L·C·(C + dim_feedforward)) for each "af", and the mechanism's.

    Papers: Vaswani et al. 2017, arXiv 1706.03762, section 3.1; pre-norm: Xiong et al. 2020,
    arXiv 2002.04745, figure 1; residual attention: He et al. 2020, arXiv 2012.11747, section
    3.2 (deviation: summed as above); order of blocks: Press et al. 2019, arXiv 1911.03864.

    Args:
        d_model: C, width of the model.
        nhead: H, heads; divides C; D = C / H.
        num_layers: how often the pattern is repeated; default 6 of "af", 1 of a given pattern.
        dim_feedforward: width inside FFN.
        dropout: probability of dropping an entry while training.
        activation: see `subquad.attention.feedforward.FeedForward`.
        pattern: letters of the blocks; spaces mean nothing.
        mechanism: of all "a", or a list with one for each, or a mapping from their numbers
            (−1 is the last) to mechanisms, with the others' under "default". Heads differ with
            ``mixed(…)``.
        feed_forward: the maps of FFN: "linear" layers, or "conv", convolutions of size 1.
        norm: "layer", "rms", or "batch", which leaves padding out of its statistics.
        norm_first: pre-norm.
        final_norm: a norm at the end; default: with pre-norm. torch.nn.Transformer has one.
        norm_eps: of the norms.
        bias: whether linear layers and norms have biases.
        num_kv_heads: see `MultiheadAttention`.
        residual_attention: True, or the number of attentions before whose scores are added.
        positions: "sinusoidal", "learned", "rotary", with options as in
            ``"rotary(base=500000)"``, or a module of `subquad.positions`.
        positions_at: "input" or "attention".
        attention_dropout, attention_noise: see `TransformerEncoderLayer`.
        max_length: longest sequence, for mechanisms that need it and learned positions.
        seed: determines random draws; attention i's are from seed + 10,007·i, for mechanisms
            count up from theirs, by part or by head.
        device, dtype: of parameters and buffers.

    Raises:
        OptionError: for wrong sizes, letters, mechanisms or options.
        UnsupportedError: for dropout, noise or residual attention that a mechanism cannot do.

    Example:
        >>> import torch, subquad as sq
        >>> encoder = sq.TransformerEncoder(
        ...     32,
        ...     4,
        ...     pattern="aaf af",
        ...     mechanism={"default": "performer", -1: "softmax"},
        ...     positions="rotary",
        ...     residual_attention=1,
        ... )
        >>> x, keep = torch.randn(2, 100, 32), torch.ones(2, 100, dtype=torch.bool)
        >>> encoder(x, key_mask=keep).shape
        torch.Size([2, 100, 32])
        >>> encoder = encoder.eval()
        >>> out, state = encoder.prefill(x[:, :99])
        >>> last, state = encoder.step(x[:, 99:], state)
        >>> bool(torch.allclose(last, encoder(x, causal=True)[:, 99:], atol=1e-4))
        True
    """

    letters = "af"
    usual = "af"
    torch_names: ClassVar[dict[str, tuple[str, str]]] = {
        "self_attn": ("a", "attention"),
        "norm1": ("a", "norm"),
        "linear1": ("f", "feed_forward.linear1"),
        "linear2": ("f", "feed_forward.linear2"),
        "norm2": ("f", "norm"),
    }

    def __init__(
        self,
        d_model: int,
        nhead: int,
        num_layers: int | None = None,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = "relu",
        *,
        pattern: str | None = None,
        mechanism: Mechanisms = "performer",
        feed_forward: str = "linear",
        norm: str = "layer",
        norm_first: bool = False,
        final_norm: bool | None = None,
        norm_eps: float = 1e-5,
        bias: bool = True,
        num_kv_heads: int | None = None,
        residual_attention: bool | int = False,
        positions: str | Spec | Positions | None = None,
        positions_at: str = "input",
        attention_dropout: float | None = None,
        attention_noise: float = 0.0,
        max_length: int | None = None,
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            d_model, nhead, num_layers, pattern, {"a": mechanism},
            dim_feedforward=dim_feedforward, dropout=dropout, activation=activation,
            feed_forward=feed_forward, norm=norm, norm_first=norm_first, final_norm=final_norm,
            norm_eps=norm_eps, bias=bias,
            num_kv_heads=num_kv_heads, residual_attention=residual_attention,
            positions=positions, positions_at=positions_at, attention_dropout=attention_dropout,
            attention_noise=attention_noise, max_length=max_length, memory_dim=None, seed=seed,
            device=device, dtype=dtype,
        )  # fmt: skip

    def forward(
        self,
        x: Tensor,
        *,
        causal: bool = False,
        key_mask: Tensor | None = None,
        mask: Mask | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """The tokens behind the last block, shaped like `x`.

        Args:
            x: (B, L, C).
            causal: no token reads a later one.
            key_mask: (B, L) bool, True = attend.
            mask: a `Mask`, for all else that the mechanisms take.
            position_ids: (L,) or (B, L) integers; default 0, 1, …, also for padding, see
                `subquad.positions.position_ids`.

        Raises:
            ShapeError, DtypeError, DeviceError: if an argument does not fit.
            UnsupportedError: if a mechanism cannot do what a mask asks for.
        """
        joined = Mask.of(causal=causal, key_mask=key_mask, mask=mask)
        return self._run(*self._start(x, joined, position_ids))

    def hidden_states(
        self,
        x: Tensor,
        *,
        causal: bool = False,
        key_mask: Tensor | None = None,
        mask: Mask | None = None,
        position_ids: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """The tokens behind each block, and as the last one what `forward` gives; see there.

        A decoder takes a list of these as its memories.
        """
        joined = Mask.of(causal=causal, key_mask=key_mask, mask=mask)
        seen: list[Tensor] = []
        last = self._run(*self._start(x, joined, position_ids), seen)
        return (*seen, last)

    def prefill(
        self,
        x: Tensor,
        *,
        state: StackState | None = None,
        key_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        donate: bool = False,
    ) -> tuple[Tensor, StackState]:
        """A causal call that continues `state`, and the new state.

        Args:
            x: (B, T, C), T ≥ 1 new tokens.
            state: of the tokens before; None at the start.
            key_mask: (B, T) bool, True = attend.
            position_ids: (T,) or (B, T); default: counted on from the tokens before, in each
                row from the largest one given for a token that is kept.
            donate: `state` will not be used again and may be written over.

        Raises:
            UnsupportedError: if a mechanism has no state.
        """
        x, call = self._start(x, Mask.of(causal=True, key_mask=key_mask), position_ids, state)
        call.donate = donate
        return self._stream(x, call, state)

    def step(
        self,
        x: Tensor,
        state: StackState,
        *,
        key_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        donate: bool = False,
    ) -> tuple[Tensor, StackState]:
        """`prefill` that needs a state."""
        return self.prefill(
            x, state=state, key_mask=key_mask, position_ids=position_ids, donate=donate
        )


class TransformerDecoder(_Stack):
    """Self-attention, cross-attention and feed-forward blocks in any order.

    A `TransformerEncoder` with a third letter: "c", attention to a memory. "acf" six times is
    the Transformer's decoder. Everything said there holds for both attentions, but: it is
    causal unless told otherwise; rotations act on self-attention alone, for a memory's
    positions are no distance from its own; vectors at the attention are added to the
    memory's keys too. Residual scores are summed among the attentions of one kind.

    The memory is one tensor for all cross-attentions, or a list with one for each: the encoder
    layer of the same depth, or any others. `prefill` reads it, `step` does not need it again:
    the state holds its keys, in constant size where the mechanism can (linear ones do), else
    as keys and values. Causal calls need a cross-attention whose answer to a query is the same
    whatever other queries there are: mechanisms that cluster, sample or select by all queries
    of a call would see later tokens, and a window has no place in another sequence. They are
    refused, and taken with ``causal=False``.

    Args:
        d_model: C; this and all not named here as in `TransformerEncoder`.
        cross_mechanism: of all "c", or a list or mapping; default `mechanism`, if that is one.
        memory_dim: width of the memory, default C.

    Raises:
        OptionError: for wrong sizes, letters, mechanisms or options.
        UnsupportedError: for dropout, noise or residual attention that a mechanism cannot do.

    Example:
        >>> import torch, subquad as sq
        >>> decoder = sq.TransformerDecoder(32, 4, 2, positions="sinusoidal").eval()
        >>> x, memory = torch.randn(2, 9, 32), torch.randn(2, 50, 32)
        >>> out, state = decoder.prefill(x[:, :5], memory)
        >>> rest, state = decoder.step(x[:, 5:], state)
        >>> bool(torch.allclose(torch.cat([out, rest], 1), decoder(x, memory), atol=1e-4))
        True
    """

    letters = "acf"
    usual = "acf"
    torch_names: ClassVar[dict[str, tuple[str, str]]] = {
        "self_attn": ("a", "attention"),
        "norm1": ("a", "norm"),
        "multihead_attn": ("c", "attention"),
        "norm2": ("c", "norm"),
        "linear1": ("f", "feed_forward.linear1"),
        "linear2": ("f", "feed_forward.linear2"),
        "norm3": ("f", "norm"),
    }

    def __init__(
        self,
        d_model: int,
        nhead: int,
        num_layers: int | None = None,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = "relu",
        *,
        pattern: str | None = None,
        mechanism: Mechanisms = "performer",
        cross_mechanism: Mechanisms | None = None,
        memory_dim: int | None = None,
        feed_forward: str = "linear",
        norm: str = "layer",
        norm_first: bool = False,
        final_norm: bool | None = None,
        norm_eps: float = 1e-5,
        bias: bool = True,
        num_kv_heads: int | None = None,
        residual_attention: bool | int = False,
        positions: str | Spec | Positions | None = None,
        positions_at: str = "input",
        attention_dropout: float | None = None,
        attention_noise: float = 0.0,
        max_length: int | None = None,
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if cross_mechanism is None:
            if not isinstance(mechanism, str | Spec | Config):
                raise OptionError(
                    "TransformerDecoder: cross_mechanism is needed where `mechanism` names one "
                    "for each self-attention"
                )
            cross_mechanism = mechanism
        super().__init__(
            d_model, nhead, num_layers, pattern, {"a": mechanism, "c": cross_mechanism},
            dim_feedforward=dim_feedforward, dropout=dropout, activation=activation,
            feed_forward=feed_forward, norm=norm, norm_first=norm_first, final_norm=final_norm,
            norm_eps=norm_eps, bias=bias,
            num_kv_heads=num_kv_heads, residual_attention=residual_attention,
            positions=positions, positions_at=positions_at, attention_dropout=attention_dropout,
            attention_noise=attention_noise, max_length=max_length, memory_dim=memory_dim,
            seed=seed, device=device, dtype=dtype,
        )  # fmt: skip
        self.memory_dim = d_model if memory_dim is None else memory_dim
        if self.memory_dim != d_model and positions_at == "attention" and positions is not None:
            raise OptionError(
                f"TransformerDecoder: memory_dim={memory_dim} must be d_model={d_model} where "
                "positions are added to the memory's keys"
            )

    def forward(
        self,
        x: Tensor,
        memory: Memory,
        *,
        causal: bool = True,
        key_mask: Tensor | None = None,
        mask: Mask | None = None,
        memory_key_mask: Tensor | None = None,
        memory_mask: Mask | None = None,
        position_ids: Tensor | None = None,
        memory_position_ids: Tensor | None = None,
        record: list[Tensor] | None = None,
    ) -> Tensor:
        """The tokens behind the last block, shaped like `x`.

        Args:
            x: (B, L, C).
            memory: (B, S, memory_dim), or a list with one for each cross-attention.
            causal: no token reads a later one; False for non-autoregressive decoders.
            key_mask: (B, L) bool, True = attend.
            mask: a `Mask` of the self-attention, for all else that its mechanisms take.
            memory_key_mask: (B, S) bool, True = attend.
            memory_mask: a `Mask` of the cross-attention.
            position_ids: (L,) or (B, L) integers, default 0, 1, ….
            memory_position_ids: (S,) or (B, S), for positions that are added to the keys.
            record: a list to which the weights (B, H, L, S) of each cross-attention are
                appended, in the order of the pattern: `Mechanism.weights`, without dropout and
                noise. Masked keys have the weight 0. Gradients reach the queries and keys.
                Takes O(L·S) memory, and more time than the call itself where the mechanism is
                sub-quadratic.

        Raises:
            ShapeError, DtypeError, DeviceError: if an argument does not fit.
            UnsupportedError: if a mechanism cannot do what a mask asks for, lets a causal
                decoder see later tokens, or has no weights to be recorded.
        """
        x, call = self._opened(
            x, memory, causal, key_mask, mask, memory_key_mask, memory_mask, position_ids,
            memory_position_ids, record,
        )  # fmt: skip
        out = self._run(x, call)
        _recorded(call, record)
        return out

    def hidden_states(
        self,
        x: Tensor,
        memory: Memory,
        *,
        causal: bool = True,
        key_mask: Tensor | None = None,
        mask: Mask | None = None,
        memory_key_mask: Tensor | None = None,
        memory_mask: Mask | None = None,
        position_ids: Tensor | None = None,
        memory_position_ids: Tensor | None = None,
        record: list[Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        """The tokens behind each block, and as the last one what `forward` gives; see there."""
        x, call = self._opened(
            x, memory, causal, key_mask, mask, memory_key_mask, memory_mask, position_ids,
            memory_position_ids, record,
        )  # fmt: skip
        seen: list[Tensor] = []
        last = self._run(x, call, seen)
        _recorded(call, record)
        return (*seen, last)

    def _opened(
        self,
        x: Tensor,
        memory: Memory,
        causal: bool,
        key_mask: Tensor | None,
        mask: Mask | None,
        memory_key_mask: Tensor | None,
        memory_mask: Mask | None,
        position_ids: Tensor | None,
        memory_position_ids: Tensor | None,
        record: list[Tensor] | None,
    ) -> tuple[Tensor, _Call]:
        """The tokens and the call that the blocks are given; arguments as in `forward`."""
        joined = Mask.of(causal=causal, key_mask=key_mask, mask=mask)
        x, call = self._start(x, joined, position_ids)
        call.recording = _records(record)
        other = Mask.of(key_mask=memory_key_mask, mask=memory_mask)
        self._remember(call, memory, other, memory_position_ids, len(x))
        return x, call

    def prefill(
        self,
        x: Tensor,
        memory: Memory | None = None,
        *,
        state: StackState | None = None,
        key_mask: Tensor | None = None,
        memory_key_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        memory_position_ids: Tensor | None = None,
        record: list[Tensor] | None = None,
        donate: bool = False,
    ) -> tuple[Tensor, StackState]:
        """A causal call that continues `state`, and the new state.

        Args:
            x: (B, T, C), T ≥ 1 new tokens.
            memory: at the start; with a state it is in there.
            state: of the tokens before and the memory; None at the start.
            key_mask: (B, T) bool, True = attend.
            memory_key_mask, memory_position_ids: as in `forward`, with a memory.
            position_ids: as in `TransformerEncoder.prefill`.
            record: as in `forward`. Steps can record if the first call did: states of constant
                size then keep the memory's keys beside them.
            donate: `state` will not be used again and may be written over.

        Raises:
            OptionError: if memory and state are both given, or none of them; if a state has
                not kept the keys that `record` needs.
            UnsupportedError: if a mechanism of the self-attention has no state, or one of the
                cross-attention no weights to be recorded.
        """
        if (memory is None) == (state is None):
            raise OptionError("prefill takes a memory at the start, and a state to go on")
        if memory is None and not (memory_key_mask is None and memory_position_ids is None):
            raise OptionError("masks and positions of the memory are given without a memory")
        x, call = self._start(x, Mask.of(causal=True, key_mask=key_mask), position_ids, state)
        call.recording, call.donate = _records(record), donate
        if memory is not None:
            other = Mask.of(key_mask=memory_key_mask)
            self._remember(call, memory, other, memory_position_ids, len(x))
        out, new = self._stream(x, call, state)
        _recorded(call, record)
        return out, new

    def step(
        self,
        x: Tensor,
        state: StackState,
        *,
        key_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        record: list[Tensor] | None = None,
        donate: bool = False,
    ) -> tuple[Tensor, StackState]:
        """`prefill` that needs a state."""
        return self.prefill(
            x, state=state, key_mask=key_mask, position_ids=position_ids, record=record,
            donate=donate,
        )  # fmt: skip

    def _remember(
        self, call: _Call, memory: Memory, mask: Mask, ids: Tensor | None, rows: int
    ) -> None:
        """Puts the memories into the call, with zeros at masked tokens."""
        count = self.pattern.count("c")
        each = [memory] * count if isinstance(memory, Tensor) else list(memory)
        if len(each) != count:
            raise ShapeError(
                f"memory must be a tensor or a list with one for each of {count} "
                f"cross-attentions, given {len(each)}"
            )
        for index, one in enumerate(each):
            name = "memory" if isinstance(memory, Tensor) else f"memory[{index}]"
            self._check(name, one, self.memory_dim)
            if len(one) != rows or one.shape != each[0].shape:
                raise ShapeError(
                    f"{name} must be (B={rows}, S, C={self.memory_dim}), with one S for all, "
                    f"given {tuple(one.shape)}"
                )
            _check_key("memory_key_mask", mask, one)
        if mask.key is not None and each:
            # 0·NaN = NaN: zero gradients alone would not keep it out of the projections'
            closed = ~mask.key.expand(each[0].shape[:2])[..., None]
            each = [one.masked_fill(closed, 0) for one in each]
        if call.shift is not None and each:
            assert isinstance(self.positions, Sinusoidal | Learned)
            call.memory_shift = self.positions(self._ids(each[0], ids, 0), each[0].dtype)
        elif ids is not None:
            raise OptionError(
                "memory_position_ids are given to a stack that adds no positions to keys"
            )
        call.memories, call.memory_mask = each, mask


def _records(record: object) -> bool:
    if record is not None and not isinstance(record, list):
        raise OptionError(f"record must be a list to append to, given {type(record).__name__}")
    return record is not None


def _recorded(call: _Call, record: list[Tensor] | None) -> None:
    """Appends what the cross-attentions have left, in their order."""
    if record is not None:
        record.extend(call.weights[rank] for rank in sorted(call.weights))


# ---- arguments -------------------------------------------------------------------------------


def _pattern_problems(pattern: object, letters: str, kind: str) -> list[str]:
    if not isinstance(pattern, str) or not pattern.strip():
        return [f"pattern={pattern!r} must be letters, as in {' '.join(letters)!r}"]
    known = ", ".join(f"{letter} ({LETTERS[letter]})" for letter in letters)
    return [
        f"pattern={pattern!r}: {letter!r} at place {place} is none of {known}"
        + (f"; {LETTERS[letter]} needs a TransformerDecoder" if letter in LETTERS else "")
        for place, letter in enumerate(pattern, 1)
        if letter not in letters and not letter.isspace()
    ]


def _each(given: Mechanisms, count: int, letter: str) -> list[OneMechanism]:
    """The mechanism of each of `count` attentions."""
    name = "mechanism" if letter == "a" else "cross_mechanism"
    if isinstance(given, Mapping):
        each: list[OneMechanism | None] = [given.get("default")] * count
        named: dict[int, int | str] = {}
        for key, one in given.items():
            if key == "default":
                continue
            try:
                place = range(count)[int(key) if isinstance(key, str) else key]
            except (ValueError, IndexError, TypeError):
                raise OptionError(
                    f'{name}: {key!r} must be "default" or a number from {-count} to '
                    f"{count - 1}: the pattern has {letter!r} {count} times"
                ) from None
            if place in named:
                raise OptionError(f"{name}: {key!r} and {named[place]!r} are one attention")
            named[place], each[place] = key, one
        found = [one for one in each if one is not None]
        if len(found) < count:
            open_ = [index for index, one in enumerate(each) if one is None]
            raise OptionError(f'{name}: attentions {open_} have none; give them, or a "default"')
        return found
    if isinstance(given, list | tuple):
        if len(given) != count:
            raise OptionError(
                f"{name} has {len(given)} entries, the pattern has {letter!r} {count} times"
            )
        return list(given)
    return [given] * count  # type: ignore[list-item]  # no list, no mapping: one mechanism


def _positions(
    given: str | Spec | Positions | None,
    d_model: int,
    nhead: int,
    max_length: int | None,
    factory: dict[str, Any],
) -> Positions | None:
    """The module of positions that is meant."""
    if isinstance(given, Rotary) and given.head_dim != d_model // nhead:
        raise OptionError(
            f"positions turn heads of {given.head_dim} channels, the stack's have "
            f"{d_model // nhead}"
        )
    width = given.width if isinstance(given, Sinusoidal) else d_model
    width = given.weight.shape[1] if isinstance(given, Learned) else width
    if width != d_model:
        raise OptionError(f"positions have {width} channels, d_model is {d_model}")
    if given is None or isinstance(given, Sinusoidal | Learned | Rotary):
        return given
    spec = parse_spec(given) if isinstance(given, str) else given
    if not isinstance(spec, Spec) or spec.name not in POSITIONS:
        shown = spec.name if isinstance(spec, Spec) else repr(given)
        raise UnknownNameError(
            f"positions={shown!r} is none of {', '.join(POSITIONS)}{nearest(shown, POSITIONS)}"
        )
    options: dict[str, Any] = dict(spec.options)
    known = POSITIONS[spec.name]
    for name in options:
        if name not in known:
            raise UnknownNameError(
                f"positions={spec.name}: unknown option {name!r}{nearest(name, known)}; options "
                f"are: {', '.join(known) or 'none'}"
            )
    if spec.name == "sinusoidal":
        return Sinusoidal(d_model, **options)
    if spec.name == "rotary":
        return Rotary(d_model // nhead, **options)
    if max_length is None:
        raise OptionError("positions=learned needs max_length: a row of its table for each token")
    return Learned(max_length, d_model, **factory)
