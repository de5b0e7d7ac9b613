"""Exact attention for short calls, a mechanism of linear cost for long ones."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from subquad import registry
from subquad.attention import tuning
from subquad.attention.base import (
    Absent,
    Capabilities,
    Cost,
    Info,
    Mechanism,
    State,
    Support,
    looking,
)
from subquad.attention.masks import Mask
from subquad.attention.partial import Partial
from subquad.attention.tuning import Crossover, Shape
from subquad.errors import OptionError
from subquad.options import Config, Spec, integer_problem

__all__ = ["Auto", "AutoConfig", "AutoState", "Decision", "decisions"]

EXACT, LINEAR = "softmax", Spec("near_far")
"""The sides; the second one by default."""

BY_LENGTH = "the length of a call, padding included, decides which side runs"


@dataclass(frozen=True)
class AutoConfig(Config):
    """Options of `Auto`.

    Args:
        linear: what runs from the crossover on: a name, a spec such as
            ``performer(features=128)``, or a config object. It has to approximate softmax, or
            the two sides would be different functions.
        crossover: tokens from which it runs; None: measured on the device, once, see
            `subquad.attention.tuning`. 0: always.
        length: tokens that one decision is made for, which then holds for all calls, so that
            whole calls, chunks and steps agree: a decoder's. None: each call's own length
            decides.
    """

    mechanism: ClassVar[str] = "auto"
    sizes: ClassVar[tuple[str, ...]] = ("linear",)

    linear: str | Spec | Config = LINEAR
    crossover: int | None = None
    length: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        # One form for all ways to write it: specs compare, hash and print.
        object.__setattr__(self, "linear", self.resolved()[1].spec())

    def problems(self) -> Iterator[str]:
        if self.crossover is not None:
            yield from integer_problem("crossover", self.crossover, 0)
        if self.length is not None:
            yield from integer_problem("length", self.length, 1)
        try:
            found, config = self.resolved()
        except OptionError as problem:
            yield f"linear: {problem}"
            return
        have = found.capabilities_for(config)
        if found.name in (self.mechanism, EXACT):
            yield f"linear={found.name} leaves no choice: name what runs where exact is slower"
        elif have.approximates != "softmax":
            yield (
                f"linear={found.name} does not approximate softmax: calls on both sides of the "
                "crossover would be different functions"
            )
        elif isinstance(have.full_length, Absent):
            yield f"linear={found.name}: {have.full_length.reason}"

    def resolved(self) -> tuple[type[Mechanism], Config]:
        """Class and config of what runs from the crossover on."""
        return registry.resolve(self.linear)

    def always(self) -> bool | None:
        """True: `linear` runs at every call; False: never; None: that is not known from here."""
        if self.crossover is None or (self.crossover and self.length is None):
            return None
        return self.crossover <= (self.length or 0)

    def for_use(self, use: str) -> AutoConfig:
        return replace(self, linear=self.resolved()[1].for_use(use))

    def for_length(self, length: int) -> AutoConfig:
        return replace(self, linear=self.resolved()[1].for_length(length))


def _side(length: int, sizes: tuple[int, int], config: AutoConfig) -> registry.Description:
    """The side that a forward call would run, by declared FLOPs where none is given."""
    exact, linear = registry.describe(EXACT), registry.describe(config.resolved()[1])
    length = config.length or length
    if config.crossover is not None:
        return linear if length >= config.crossover else exact
    return min((exact, linear), key=lambda one: one.flops(length, *sizes))


def _flops(length: int, head_dim: int, value_dim: int, config: AutoConfig) -> float:
    sizes = head_dim, value_dim
    return _side(length, sizes, config).flops(length, *sizes)


def _memory(length: int, head_dim: int, value_dim: int, config: AutoConfig) -> float:
    sizes = head_dim, value_dim
    return _side(length, sizes, config).memory(length, *sizes)


@dataclass(frozen=True)
class Decision:
    """Which side runs a call, and why; `print` it, or read its fields.

    Args:
        mechanism: what runs, in the option grammar.
        queries, keys: L and S that were compared with the crossover.
        crossover: see `Crossover`.
        linear: whether it is the linear side.
    """

    mechanism: str
    queries: int
    keys: int
    crossover: Crossover
    linear: bool

    def __str__(self) -> str:
        if self.queries == self.keys:
            what = f"{self.queries} tokens are"
        else:
            mean = 2 * self.queries * self.keys / (self.queries + self.keys)
            what = f"{self.queries} queries of {self.keys} keys count as {mean:.0f} tokens,"
        found = self.crossover
        if found.length is None:
            why = "exact attention is faster at every length"
        else:
            why = f"{what} {'not ' * self.linear}below the crossover {found.length}"
        return f"{self.mechanism}: {why} ({found.words})"


@dataclass(frozen=True, eq=False)
class AutoState(State):
    """The state of the side that runs.

    Args:
        linear: whether it is the linear one.
        side: its state.
    """

    linear: bool
    side: State


class Auto(Mechanism):
    """Softmax attention below a length, a mechanism of linear cost from it on.

        A(q, k, v) = softmax(q, k, v)   if 2·L·S / (L + S) < crossover,   else linear(q, k, v)

    The crossover is measured where a shape is first called, or ahead by `subquad.tune` and
    ``subquad tune``: both ways in turn on this device, for this dtype, size of heads, batch class
    and direction, in a few seconds; then it is kept, and the same call runs the same side ever
    after. In training mode training steps are raced, in evaluation mode forward calls: whether
    gradients are asked for in a call changes nothing. A call takes exactly the operations of its
    side alone. `explain` says which side a length takes and why, `last` which the last call took.

    Exact attention costs L·S, the other L + S, so that their ratio goes by L·S / (L + S): one
    query of many keys is exact. Masked keys count: lengths are those of the tensors. Both sides
    have to take a mask.

    Under ``torch.compile`` the crossover is a constant of the graph, which has one guard for it:
    each side is compiled once. An exported program holds both sides. Nothing is measured there:
    call once before, or `tune`; else declared FLOPs decide, and it is logged.

    There is no state to stream with unless `length` is given, since a call would change sides
    as it grows.

    Cost: that of the side that runs, and a look-up of some 30 µs a call on one CPU.

    Paper: none; the crossover of linear attention is discussed in Choromanski et al. 2021, arXiv
    2009.14794, §4.1.

    Args:
        linear, crossover, length: see `AutoConfig`.

    See `Mechanism` for sizes, shapes and what is raised.

    Example:
        >>> import torch, subquad as sq
        >>> spec = "auto(linear=performer(features=64), crossover=200)"
        >>> mech = sq.build(spec, head_dim=16, num_heads=4)
        >>> print(mech.explain(100))
        softmax: 100 tokens are below the crossover 200 (given)
        >>> print(mech.explain(100, 5000))
        softmax: 100 queries of 5000 keys count as 196 tokens, below the crossover 200 (given)
        >>> q, k, v = (torch.randn(1, 4, 300, 16) for _ in range(3))
        >>> mech(q, k, v).shape, mech.last.mechanism
        (torch.Size([1, 4, 300, 16]), 'performer(features=64)')
    """

    name = "auto"
    family = "hybrid"
    state_type = AutoState
    Config = AutoConfig
    config: AutoConfig
    info = Info(
        summary="exact attention for short calls, a mechanism of linear cost for long ones",
        formula="softmax(q, k, v)  if 2·L·S/(L + S) < crossover,  else linear(q, k, v)",
        cost=Cost("the lesser of softmax's and `linear`'s", _flops, _memory),
        paper="none of its own; crossovers of linear attention: Choromanski et al. 2021, "
        "Rethinking Attention with Performers, arXiv 2009.14794, §4.1",
        limit="exact below the crossover, and where `linear` is",
        options={
            "linear": "what runs from the crossover on; it approximates softmax",
            "crossover": "tokens from which it runs; none: measured on the device, once",
            "length": "tokens that one decision for all calls is made for, as a decoder with a "
            "state needs it; none: each call's own",
        },
        scale="each side's own",
        sample="auto(linear=performer(features=64), crossover=0)",
        use="inputs of any length, where exact attention should stay exact as long as it is the "
        "faster one; `subquad tune` measures ahead.",
    )

    def __init__(self, *, device: Any = None, dtype: Any = None, **arguments: Any) -> None:
        super().__init__(device=device, dtype=dtype, **arguments)
        build = functools.partial(
            registry.build,
            head_dim=self.head_dim,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            value_dim=self.value_dim,
            embed_dim=self.embed_dim,
            max_length=self.max_length,
            seed=self.seed,
            device=device,
            dtype=dtype,
        )
        self.exact, self.linear = build(EXACT), build(self.config.linear)
        self.last: Decision | None = None
        self._spec = str(self.config.linear)

    @classmethod
    def capabilities_for(cls, config: AutoConfig) -> Capabilities:
        found, own = config.resolved()
        have = found.capabilities_for(own)
        always = config.always()
        if always is False:
            exact: Capabilities = registry.describe(EXACT).capabilities
            return replace(exact, max_length=have.max_length, gqa=_of(found, have.gqa))
        changes: dict[str, Any] = {
            field.name: _of(found, getattr(have, field.name))
            for field in dataclasses.fields(Capabilities)
        }
        if always:
            return Capabilities(**changes)
        if config.length is None:
            changes |= dict.fromkeys(("pad_invariant", "compact", "merges"), Absent(BY_LENGTH))
            changes["state"] = Absent(
                "calls of growing length would change sides: give length=, for which one is chosen"
            )
        elif have.state:
            changes["state"] = "growing"  # exact attention's is
        if have.reach != "all past tokens":
            changes["reach"] = f"all past tokens below the crossover; from it on {have.reach}"
        return Capabilities(**changes)

    @classmethod
    def outside_for(cls, config: AutoConfig) -> Support:
        return Absent("its sides do not share a far field: name one of them")

    @classmethod
    def answers_alone_for(cls, config: AutoConfig) -> Support:
        if config.always() is None and config.length is None:
            return Absent("the number of queries of a call decides, too, which side answers them")
        return cls._of_sides(config, "answers_alone_for")

    @classmethod
    def state_weights_for(cls, config: AutoConfig) -> Support:
        return cls._of_sides(config, "state_weights_for")

    @classmethod
    def _of_sides(cls, config: AutoConfig, question: str) -> Support:
        """The answer of the side that runs; if that is not known, of the linear one."""
        side = registry.resolve(EXACT) if config.always() is False else config.resolved()
        answer: Support = _of(side[0], getattr(side[0], question)(side[1]))
        return answer

    @classmethod
    def follows_for(cls, config: AutoConfig) -> bool:
        found, own = config.resolved()
        return config.always() is not False and found.follows_for(own)

    @classmethod
    def least_heads(cls, config: AutoConfig) -> int:
        found, own = config.resolved()
        return found.least_heads(own)

    @classmethod
    def calibrates_for(cls, config: AutoConfig) -> bool:
        found, own = config.resolved()
        return found.calibrates_for(own)

    @torch.no_grad()
    def calibrate(self, q: Tensor, k: Tensor, **arguments: Any) -> None:
        """Calibrates the linear side, see its `calibrate`.

        Raises:
            OptionError: if it takes no statistics from data.
        """
        if not self.calibrates_for(self.config):
            raise OptionError(f"auto: {self._spec} takes nothing from data")
        linear: Any = self.linear
        linear.calibrate(q, k, **arguments)

    def reset_parameters(self) -> None:
        """Draws both sides' parameters and random buffers again."""
        self.exact.reset_parameters()
        self.linear.reset_parameters()

    def reached(self, t: int, length: int) -> Iterable[int]:
        return self._part(self.explain(length, causal=True).linear).reached(t, length)

    def weights(self, *args: Any, **options: Any) -> Tensor:
        """As `Mechanism.weights`; looking does not count as a training call."""
        with looking(self):
            return super().weights(*args, **options)

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", last={self.last.mechanism}" if self.last else "")

    # ---- which side --------------------------------------------------------------------------

    def explain(
        self,
        length: int,
        keys: int | None = None,
        *,
        batch: int = 1,
        causal: bool = False,
        training: bool | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Decision:
        """Which side a call would run, and why; measures first, where the call would.

        Args:
            length: L, queries.
            keys: S, default L.
            batch: B.
            causal: direction.
            training: mode; default the present one.
            dtype, device: of q, k and v; default those of buffers, else float32 on the CPU.

        Raises:
            OptionError: wrong sizes.
        """
        keys = length if keys is None else keys
        sizes = {"length": length, "keys": keys, "batch": batch}
        problems = [text for name, size in sizes.items() for text in integer_problem(name, size, 1)]
        if problems:
            raise OptionError("auto: " + "; ".join(problems))
        own = next(iter((*self.parameters(), *self.buffers())), torch.zeros(()))
        where = own.device if device is None else torch.device(device)
        found = self._crossover(
            where,
            own.dtype if dtype is None else dtype,
            self.value_dim or self.head_dim,
            batch,
            causal,
            self.training if training is None else training,
            "the device has no data" if where.type == "meta" else "",
        )
        return self._decision(found, length, keys)

    def shape(
        self,
        device: torch.device,
        dtype: torch.dtype,
        value_dim: int | None = None,
        batch: int = 1,
        causal: bool = False,
        training: bool = False,
    ) -> Shape:
        """What a call's crossover depends on.

        With `length` one decision serves all calls: that of a forward call of one row, causal if
        the mechanism can be.
        """
        if self.config.length is not None:
            batch, causal, training = 1, bool(self.capabilities.causal), False
        return Shape(
            self._spec,
            device,
            dtype,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            value_dim or self.value_dim or self.head_dim,
            tuning.batch_class(batch, self.num_heads, tuning.at_once(device)),
            causal,
            training,
            tuning.threads_of(device),
        )

    def _crossover(
        self,
        device: torch.device,
        dtype: torch.dtype,
        value_dim: int,
        batch: int,
        causal: bool,
        training: bool,
        refusal: str,
    ) -> Crossover:
        if self.config.crossover is not None:
            return tuning.given(self.config.crossover)
        return tuning.crossover(
            self.shape(device, dtype, value_dim, batch, causal, training), refusal
        )

    def _decision(self, found: Crossover, queries: int, keys: int) -> Decision:
        if self.config.length is not None:
            queries = keys = self.config.length
        linear = found.linear(queries, keys)
        return Decision(self._spec if linear else EXACT, queries, keys, found, linear)

    def _chosen(self, q: Tensor, k: Tensor, value_dim: int, mask: Mask) -> Any:
        """Whether the linear side runs: a bool, or while lengths are symbolic a comparison."""
        if not torch.compiler.is_compiling():
            found = self._crossover(
                q.device, q.dtype, value_dim, len(q), mask.causal, self.training, tuning.refusal(q)
            )
            self.last = self._decision(found, q.shape[2], k.shape[2])
            return self.last.linear
        always, crossover = self.config.always(), self.config.crossover
        if always is not None:
            return always
        if crossover is None:
            one = self.config.length is not None
            most = tuning.at_once(q.device)
            crossover = tuning.traced(
                self._spec,
                q.device,
                q.dtype,
                self.num_heads,
                self.num_kv_heads,
                self.head_dim,
                value_dim,
                1 if one else tuning.batch_class(q.shape[0], self.num_heads, most),
                bool(self.capabilities.causal) if one else mask.causal,
                self.training and not one,
            )
            if crossover is None:
                return False
        if self.config.length is not None:
            return self.config.length >= crossover
        queries, keys = q.shape[2], k.shape[2]
        return 2 * queries * keys >= crossover * (queries + keys)

    def _taken(self, q: Tensor, k: Tensor, value_dim: int, mask: Mask) -> tuple[bool, Mechanism]:
        """Whether the linear side runs, and the side."""
        if self._chosen(q, k, value_dim, mask):  # where lengths are symbolic, the branch is a guard
            return True, self.linear
        return False, self.exact

    def _part(self, linear: bool) -> Mechanism:
        return self.linear if linear else self.exact

    # ---- its calls ---------------------------------------------------------------------------

    def _scale(self, scale: float | None) -> Any:
        """One scale a side, exact attention's first: the given one, or each side's default."""
        return tuple(self._part(linear)._scale(scale) for linear in (False, True))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: Any) -> Tensor:
        by_length = self.config.length is None and self.config.always() is None
        if by_length and torch.compiler.is_exporting():
            return self._either(q, k, v, mask, scale)
        linear, side = self._taken(q, k, v.shape[-1], mask)
        return side._attend(q, k, v, mask, scale[linear])

    def _either(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: Any) -> Tensor:
        """Both sides in one graph, of which the lengths choose when it runs."""
        linear = self._chosen(q, k, v.shape[-1], mask)
        if isinstance(linear, bool) and not torch.compiler.is_dynamo_compiling():
            return self._part(linear)._attend(q, k, v, mask, scale[linear])

        def side(linear: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self._part(linear)._attend(q, k, v, mask, scale[linear]).contiguous()

        return torch.cond(
            linear, lambda *qkv: side(True, *qkv), lambda *qkv: side(False, *qkv), (q, k, v)
        )

    def _partial(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: Any) -> Partial:
        linear, side = self._taken(q, k, v.shape[-1], mask)
        return side._partial(q, k, v, mask, scale[linear])

    def _parts(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: Any
    ) -> dict[str, list[Partial]]:
        linear, side = self._taken(q, k, v.shape[-1], mask)
        return side._parts(q, k, v, mask, scale[linear])

    def _implied(self, q: Tensor, k: Tensor, mask: Mask, scale: Any) -> Tensor:
        linear, side = self._taken(q, k, self.value_dim or self.head_dim, mask)
        return side._implied(q, k, mask, scale[linear])

    def _prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: AutoState | None,
        key_mask: Tensor | None,
        scale: Any,
    ) -> tuple[Tensor, State]:
        if state is None:  # with `length`, or where one side always runs: whatever the call
            linear, side = self._taken(q, k, v.shape[-1], Mask(causal=True))
        else:
            linear, side = state.linear, self._part(state.linear)
        before = None if state is None else state.side
        out, new = side._prefill(q, k, v, before, key_mask, scale[linear])
        return out, AutoState(linear, new)

    def _reading(self, q: Tensor, state: AutoState, scale: Any) -> tuple[Tensor, State]:
        part = self._part(state.linear)
        out, new = part._reading(q, state.side, scale[state.linear])
        return out, AutoState(state.linear, new)

    def _read_implied(self, q: Tensor, state: AutoState, scale: Any) -> Tensor:
        return self._part(state.linear)._read_implied(q, state.side, scale[state.linear])

    def _check_state(self, state: State | None, q: Tensor) -> None:
        super()._check_state(state, q)
        if isinstance(state, AutoState):
            self._part(state.linear)._check_state(state.side, q)


def _of(found: type[Mechanism], support: Any) -> Any:
    """A capability of the linear side, or its reason with its name."""
    return Absent(f"{found.name}: {support.reason}") if isinstance(support, Absent) else support


def decisions(model: nn.Module) -> dict[str, Decision]:
    """Which side every ``auto`` of a model took in its last call, by the module's name.

    Calls inside of compiled graphs leave no trace; a mechanism that was not called is left out.

    Example:
        >>> import torch, subquad as sq
        >>> layer = sq.TransformerEncoderLayer(32, 4, mechanism="auto(crossover=100)")
        >>> out = layer.eval()(torch.randn(7, 1, 32))
        >>> for name, decision in sq.decisions(layer).items():
        ...     print(name, decision)
        self_attn.mechanism softmax: 7 tokens are below the crossover 100 (given)
    """
    if not isinstance(model, nn.Module):
        raise OptionError(f"model must be a torch.nn.Module, given {type(model).__name__}")
    return {
        name: part.last
        for name, part in model.named_modules()
        if isinstance(part, Auto) and part.last is not None
    }
