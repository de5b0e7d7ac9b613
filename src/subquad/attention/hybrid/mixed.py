"""Mixed attention: a mechanism of its own for each group of heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from subquad import registry
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
from subquad.attention.partial import EMPTY_LOG_SCALE, Partial, combine
from subquad.errors import OptionError, ShapeError, UnknownNameError
from subquad.options import Config, Part, Spec, format_value, parse_spec

__all__ = ["Mixed", "MixedConfig", "MixedState"]


@dataclass(frozen=True)
class MixedConfig(Config):
    """Options of `Mixed`.

    Args:
        parts: mechanisms in the order of their heads, each a name, a spec string such as
            ``"local(window=8)*2"``, a `Spec`, a config object, a `Part`, or a pair of one of
            these and a number of heads. Those without a number share the heads that are left.
        kv_heads: for each part the indices of its key/value heads, each with all its query
            heads: ``[[0, 2], [1]]``. None: consecutive heads in the order of the parts.
    """

    mechanism: ClassVar[str] = "mixed"
    positional: ClassVar[str | None] = "parts"

    parts: tuple[Part, ...] = (Part(Spec("local")), Part(Spec("performer")))
    kv_heads: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        given: Any = self.parts
        if not isinstance(given, list | tuple):
            given = (given,)
        parts, problems, error = [], [], OptionError
        for index, item in enumerate(given):
            try:
                parts.append(_part(item))
            except OptionError as problem:
                problems.append(f"part {index + 1}: {problem}")
                error = UnknownNameError if isinstance(problem, UnknownNameError) else error
        if not given:
            problems.append("parts must name at least one mechanism, as in mixed(local, performer)")
        if self.kv_heads is not None:
            wrong = _assignment_problem(self.kv_heads, len(given))
            if wrong:
                problems.append(wrong)
            else:
                object.__setattr__(self, "kv_heads", tuple(map(tuple, self.kv_heads)))
        if problems:
            raise error(f"{self.mechanism}: " + "; ".join(problems))
        object.__setattr__(self, "parts", tuple(parts))

    def resolved(self) -> list[tuple[type[Mechanism], Config]]:
        """Class and config of each part."""
        return [registry.resolve(part.spec) for part in self.parts]

    def heads(self, num_heads: int, num_kv_heads: int) -> list[int]:
        """Query heads of each part.

        Parts without a count share what the others leave as evenly as whole key/value heads
        allow, the first ones taking one more.

        Raises:
            OptionError: if the counts do not sum to `num_heads`, a part would have no head, or
                a part's boundary would cut a group of query heads.
        """
        counts = [part.count for part in self.parts]
        group = num_heads // num_kv_heads
        if self.kv_heads is not None:
            return self._assigned(num_kv_heads, group)
        fixed = sum(count or 0 for count in counts)
        open_ = counts.count(None)
        shown = ", ".join(map(str, self.parts))
        if fixed > num_heads or (not open_ and fixed != num_heads):
            raise OptionError(
                f"mixed: the parts {shown} have {fixed} heads, num_heads is {num_heads}"
            )
        uneven = [str(part) for part in self.parts if (part.count or 0) % group]
        if uneven:
            raise OptionError(
                f"mixed: {', '.join(uneven)}: the number of heads must be a multiple of {group}: "
                f"{num_heads} query heads share {num_kv_heads} key/value heads, and a part has "
                "key/value heads of its own"
            )
        left = (num_heads - fixed) // group
        if left < open_:
            raise OptionError(
                f"mixed: {left} key/value heads are left for {open_} parts without a count in "
                f"{shown}, given num_heads={num_heads} and num_kv_heads={num_kv_heads}"
            )
        shares = iter([(left // open_ + (i < left % open_)) * group for i in range(open_)])
        return [next(shares) if count is None else count for count in counts]

    def _assigned(self, num_kv_heads: int, group: int) -> list[int]:
        assert self.kv_heads is not None
        taken = sum(map(len, self.kv_heads))
        if taken != num_kv_heads:
            raise OptionError(
                f"mixed: kv_heads={format_value(self.kv_heads)} assigns {taken} key/value heads, "
                f"num_kv_heads is {num_kv_heads}"
            )
        counts = [len(heads) * group for heads in self.kv_heads]
        for part, count in zip(self.parts, counts, strict=True):
            if part.count not in (None, count):
                raise OptionError(
                    f"mixed: {part} has {count} query heads by "
                    f"kv_heads={format_value(self.kv_heads)}; leave its count out"
                )
        return counts

    def shares(self) -> list[float]:
        """Each part's share of the heads; a part without a count weighs what others do on average.

        Exact once every part has a count, as in the `config` of a built mechanism, or heads.
        """
        if self.kv_heads is not None:
            total = sum(map(len, self.kv_heads))
            return [len(heads) / total for heads in self.kv_heads]
        known = [part.count for part in self.parts if part.count is not None]
        usual = sum(known) / len(known) if known else 1.0
        weights = [usual if part.count is None else float(part.count) for part in self.parts]
        return [weight / sum(weights) for weight in weights]


def _assignment_problem(given: Any, parts: int) -> str:
    """What is wrong with the heads of `parts` parts; nothing if each head has one part."""
    shaped = isinstance(given, list | tuple) and all(
        isinstance(heads, list | tuple) and heads and all(type(head) is int for head in heads)
        for heads in given
    )
    if not shaped:
        return f"kv_heads={given!r} must be a list of indices for each part, as in [[0, 2], [1]]"
    if len(given) != parts:
        return f"kv_heads={format_value(given)} has {len(given)} lists for {parts} parts"
    every = sorted(head for heads in given for head in heads)
    if every != list(range(len(every))):
        return (
            f"kv_heads={format_value(given)} must name each of the heads 0 to {len(every) - 1} once"
        )
    return ""


def _part(item: Any) -> Part:
    """One part with its spec in the shortest form that means the same, mechanism checked."""
    count = None
    if isinstance(item, list | tuple) and len(item) == 2:
        item, count = item
    if isinstance(item, str):
        # a spec with an optional count, as it would stand between the parentheses
        read = parse_spec(f"mixed({item})")
        if len(read.parts) != 1 or read.options:
            raise OptionError(f"{item!r} must be one mechanism, with an optional *count")
        item = read.parts[0]
    if isinstance(item, Part):
        if item.count is not None and count is not None:
            raise OptionError(f"the number of heads is given twice: {item} and {count!r}")
        item, count = item.spec, item.count if count is None else count
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
        raise OptionError(f"the number of heads must be an integer ≥ 1, given {count!r}")
    found, config = registry.resolve(item)
    have = found.capabilities_for(config)
    if not have.qkv:
        raise OptionError(f"{found.name} mixes tokens and reads no q, k, v: it has no heads")
    if isinstance(have.full_length, Absent):
        raise OptionError(f"{found.name}: {have.full_length.reason}: its heads would not line up")
    return Part(config.spec(), count)


def _flops(length: int, head_dim: int, value_dim: int, config: MixedConfig) -> float:
    return sum(
        share * found.info.cost.flops(length, head_dim, value_dim, own)
        for share, (found, own) in zip(config.shares(), config.resolved(), strict=True)
    )


def _memory(length: int, head_dim: int, value_dim: int, config: MixedConfig) -> float:
    return sum(
        share * found.info.cost.memory(length, head_dim, value_dim, own)
        for share, (found, own) in zip(config.shares(), config.resolved(), strict=True)
    )


@dataclass(frozen=True, eq=False)
class MixedState(State):
    """The parts' states, in the order of their heads."""

    parts: tuple[State, ...]


_Heads = slice | list[int]


@dataclass(frozen=True)
class _Share:
    """A part with its query heads and its key/value heads."""

    mech: Mechanism
    heads: _Heads
    kv_heads: _Heads


class Mixed(Mechanism):
    """Different mechanisms in different heads of one layer.

        out_h = A_p(h)(q_h, k_h, v_h),   p(h) the part that holds head h

    Each part is a whole mechanism over its own query and key/value heads, parameters, draws
    (from seed + the part's index) and state; outputs return to the places of their heads. What
    the mix can do is what every part can do; what it cannot names the part. An explicit `scale`
    goes to every part, without one each has its own default.

    Cost: the parts' costs, each for its number of heads; parts run after each other.

    Papers: Child et al. 2019, arXiv 1904.10509, §5.1 (different patterns in different heads);
    Beltagy et al. 2020, arXiv 2004.05150, §3.1 (dilation in some heads only).

    Args:
        parts: see `MixedConfig`; written ``mixed(local(window=64)*4, performer*4)``. Counts
            sum to num_heads; parts without one share the rest. With grouped queries each part
            has whole groups.
        kv_heads: which key/value heads each part has, where they are not consecutive:
            ``mixed(local, performer, kv_heads=[[0, 3], [1, 2]])``.

    See `Mechanism` for sizes, shapes and what is raised.

    Raises:
        OptionError: if counts do not fit num_heads and num_kv_heads; both are named.

    Example:
        >>> import torch, subquad as sq
        >>> mech = sq.build("mixed(local(window=2)*2, performer*4)", head_dim=16, num_heads=6)
        >>> q, k, v = (torch.randn(1, 6, 100, 16) for _ in range(3))
        >>> mech.weights(q, k, rows=[50])[0, :, 0].count_nonzero(-1)
        tensor([  5,   5, 100, 100, 100, 100])
        >>> spec = "mixed(local(window=2), performer, kv_heads=[[0, 5], [1, 2, 3, 4]])"
        >>> mech = sq.build(spec, head_dim=16, num_heads=6)
        >>> mech.weights(q, k, rows=[50])[0, :, 0].count_nonzero(-1)
        tensor([  5, 100, 100, 100, 100,   5])
        >>> sq.describe("mixed(softmax, performer)").capabilities.window.reason
        'performer: features sum over all keys; a window is sparse attention'
    """

    name = "mixed"
    family = "hybrid"
    state_type = MixedState
    Config = MixedConfig
    config: MixedConfig
    info = Info(
        summary="different mechanisms in different heads",
        formula="out_h = A_p(h)(q_h, k_h, v_h),  p(h) the part that holds head h",
        cost=Cost("the parts' mean, weighted by heads", _flops, _memory),
        paper="Child et al. 2019, Generating Long Sequences with Sparse Transformers, arXiv "
        "1904.10509, §5.1; Beltagy et al. 2020, arXiv 2004.05150, §3.1",
        limit="a head is exact where its part is; a single part is that mechanism",
        options={
            "parts": "mechanisms in the order of their heads, each with an optional *count; those "
            "without share the heads left",
            "kv_heads": "key/value heads of each part, [[0, 2], [1]]; none: consecutive ones",
        },
        scale="each part's own",
        sample="mixed(local(window=4), performer(features=64))",
        deviations="any mechanisms mix; the papers mix patterns of sparse attention",
        use="models whose heads differ: some look near, some far. A few exact or local heads "
        "beside linear ones cost little.",
    )

    def __init__(self, *, device: Any = None, dtype: Any = None, **arguments: Any) -> None:
        super().__init__(device=device, dtype=dtype, **arguments)
        counts = self.config.heads(self.num_heads, self.num_kv_heads)
        given = self.config.parts
        self.config = replace(
            self.config,
            parts=tuple(Part(part.spec, n) for part, n in zip(given, counts, strict=True)),
        )
        group = self.num_heads // self.num_kv_heads
        self.parts = nn.ModuleList(
            registry.build(
                part.spec,
                head_dim=self.head_dim,
                num_heads=heads,
                num_kv_heads=heads // group,
                value_dim=self.value_dim,
                embed_dim=self.embed_dim,
                max_length=self.max_length,
                seed=self.seed + index,
                device=device,
                dtype=dtype,
            )
            for index, (part, heads) in enumerate(zip(given, counts, strict=True))
        )

    @classmethod
    def capabilities_for(cls, config: MixedConfig) -> Capabilities:
        have = [(found, found.capabilities_for(own)) for found, own in config.resolved()]
        names = [found.name for found, _ in have]
        joined: dict[str, Any] = {}
        for field in dataclasses.fields(Capabilities):
            values = [getattr(one, field.name) for _, one in have]
            joined[field.name] = _all(names, values)
        joined["max_length"] = any(one.max_length for _, one in have)
        # exact softmax beside an approximation of it: the mix approximates softmax
        aims = {"softmax" if found.name == "softmax" else one.approximates for found, one in have}
        joined["approximates"] = aims.pop() if len(aims) == 1 else None
        if set(names) == {"softmax"}:
            joined["approximates"] = None  # it is the exact one
        reach = {one.reach for _, one in have}
        joined["reach"] = (
            reach.pop()
            if len(reach) == 1
            else "; ".join(f"{found.name}: {one.reach}" for found, one in have)
        )
        return Capabilities(**joined)

    @classmethod
    def outside_for(cls, config: MixedConfig) -> Support:
        for found, own in config.resolved():
            support = found.outside_for(own)
            if isinstance(support, Absent):
                return Absent(f"{found.name}: {support.reason}")
        return True

    @classmethod
    def outside_merges_for(cls, config: MixedConfig) -> Support:
        return cls._of_all(config, "outside_merges_for")

    @classmethod
    def answers_alone_for(cls, config: MixedConfig) -> Support:
        return cls._of_all(config, "answers_alone_for")

    @classmethod
    def state_weights_for(cls, config: MixedConfig) -> Support:
        return cls._of_all(config, "state_weights_for")

    @classmethod
    def follows_for(cls, config: MixedConfig) -> bool:
        return any(found.follows_for(own) for found, own in config.resolved())

    @classmethod
    def _of_all(cls, config: MixedConfig, question: str) -> Support:
        parts = config.resolved()
        answers = [getattr(found, question)(own) for found, own in parts]
        support: Support = _all([found.name for found, _ in parts], answers)
        return support

    @classmethod
    def least_heads(cls, config: MixedConfig) -> int:
        """A head for each part, or as many as it is written to have, or needs itself."""
        parts = zip(config.parts, config.resolved(), strict=True)
        return sum(part.count or found.least_heads(own) for part, (found, own) in parts)

    def reset_parameters(self) -> None:
        """Draws every part's parameters and random buffers again."""
        for part in self._mechanisms():
            part.reset_parameters()

    def reached(self, t: int, length: int) -> Iterable[int]:
        return sorted({later for part in self._mechanisms() for later in part.reached(t, length)})

    @classmethod
    def calibrates_for(cls, config: MixedConfig) -> bool:
        return any(found.calibrates_for(own) for found, own in config.resolved())

    @torch.no_grad()
    def calibrate(self, q: Tensor, k: Tensor, **arguments: Any) -> None:
        """Calibrates the parts that take statistics from data, each on its own heads.

        Takes queries (..., H, L, D), keys (..., Hkv, S, D), and what those parts' own
        `calibrate` takes, such as `key_mask`.

        Raises:
            OptionError: if no part takes statistics from data.
        """
        self._check(q, k, k.new_zeros(*k.shape[:-1], self.value_dim or 1), Mask())
        if not self.calibrates_for(self.config):
            shown = ", ".join(map(str, self.config.parts))
            raise OptionError(f"mixed: no part can be calibrated: {shown} take nothing from data")
        for part in self._shares():
            mech: Any = part.mech
            if mech.calibrates_for(mech.config):
                mech.calibrate(q[..., part.heads, :, :], k[..., part.kv_heads, :, :], **arguments)

    def weights(self, *args: Any, **options: Any) -> Tensor:
        """As `Mechanism.weights`; looking does not count as a training call."""
        with looking(self):
            return super().weights(*args, **options)

    def extra_repr(self) -> str:
        kv = "" if self.num_kv_heads == self.num_heads else f", num_kv_heads={self.num_kv_heads}"
        parts, assigned = format_value(self.config.parts), self.config.kv_heads
        own = "" if assigned is None else f", kv_heads={format_value(assigned)}"
        return f"head_dim={self.head_dim}, num_heads={self.num_heads}{kv}, parts={parts}{own}"

    # ---- the parts' calls ----------------------------------------------------------------

    def _mechanisms(self) -> Iterator[Mechanism]:
        for part in self.parts:
            assert isinstance(part, Mechanism)
            yield part

    def _shares(self) -> Iterator[_Share]:
        head = kv_head = 0
        for index, part in enumerate(self._mechanisms()):
            if self.config.kv_heads is None:
                last, kv_last = head + part.num_heads, kv_head + part.num_kv_heads
                yield _Share(part, slice(head, last), slice(kv_head, kv_last))
                head, kv_head = last, kv_last
            else:
                own = list(self.config.kv_heads[index])
                yield _Share(part, self._queries_of(own), own)

    def _queries_of(self, kv_heads: Sequence[int]) -> list[int]:
        group = self.num_heads // self.num_kv_heads
        return [kv * group + i for kv in kv_heads for i in range(group)]

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The parts' heads, dimension 1, at their places."""
        joined = torch.cat(list(parts), 1)
        if self.config.kv_heads is None:
            return joined
        order = self._queries_of([head for heads in self.config.kv_heads for head in heads])
        place = sorted(range(len(order)), key=order.__getitem__)
        return joined[:, place]

    def _sums(self, parts: Sequence[Partial]) -> Partial:
        return Partial(
            self._joined([one.num for one in parts]),
            self._joined([one.den for one in parts]),
            self._joined([one.log_scale for one in parts]),
        )

    def _scale(self, scale: float | None) -> Any:
        """One scale a part: the given one, or each part's default."""
        return tuple(part._scale(scale) for part in self._mechanisms())

    def _each(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: Sequence[Any]
    ) -> Iterator[tuple[Mechanism, Tensor, Tensor, Tensor, Mask, Any]]:
        """Every part with its heads of a checked call, its mask and its scale."""
        for part, own in zip(self._shares(), scale, strict=True):
            yield (
                part.mech,
                q[:, part.heads],
                k[:, part.kv_heads],
                v[:, part.kv_heads],
                _heads_of(mask, part.heads),
                own,
            )

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: Any) -> Tensor:
        each = self._each(q, k, v, mask, scale)
        return self._joined([part._attend(*call) for part, *call in each])

    def _partial(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: Any) -> Partial:
        found = [part._partial(*call) for part, *call in self._each(q, k, v, mask, scale)]
        return self._sums(found)

    def _parts(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: Any
    ) -> dict[str, list[Partial]]:
        """The parts of hybrids among the heads; all other heads are one part under their name."""
        calls = list(self._each(q, k, v, mask, scale))
        found = [mech._parts(*call) for mech, *call in calls]
        if not any(found):
            return {}
        for own, (mech, *call) in zip(found, calls, strict=True):
            if not own:
                own[mech.name] = [_whole(mech._attend(*call))]
        shares = [{name: combine(sums) for name, sums in own.items() if sums} for own in found]
        names = dict.fromkeys(name for own in shares for name in own)
        none = [_nothing(next(iter(own.values()))) for own in shares]
        return {
            name: [self._sums([own.get(name, no) for own, no in zip(shares, none, strict=True)])]
            for name in names
        }

    def _outside(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        scale: Any,
        window: int,
        closed: Tensor | None = None,
    ) -> list[Partial]:
        # Each part in its own way: some limit their sums, or look at all open keys.
        found = []
        for part, own in zip(self._shares(), scale, strict=True):
            apart = closed
            if closed is not None and closed.shape[1] > 1:
                apart = closed[:, part.kv_heads]
            kv = k[:, part.kv_heads], v[:, part.kv_heads]
            found.append(part.mech._outside(q[:, part.heads], *kv, mask, own, window, apart))
        if not all(found):  # no key is outside: for none of them
            return []
        return [self._sums([combine(sums) for sums in found])]

    def _prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: MixedState | None,
        key_mask: Tensor | None,
        scale: Any,
    ) -> tuple[Tensor, State]:
        states: Sequence[State | None] = [None] * len(self.parts) if state is None else state.parts
        calls = zip(states, self._each(q, k, v, Mask(), scale), strict=True)
        found = [
            part._prefill(own_q, own_k, own_v, before, key_mask, own)
            for before, (part, own_q, own_k, own_v, _, own) in calls
        ]
        out = self._joined([out for out, _ in found])
        return out, MixedState(tuple(new for _, new in found))

    def _read_implied(self, q: Tensor, state: MixedState, scale: Any) -> Tensor:
        each = zip(self._shares(), state.parts, scale, strict=True)
        return self._joined(
            [part.mech._read_implied(q[:, part.heads], before, own) for part, before, own in each]
        )

    def _reading(self, q: Tensor, state: MixedState, scale: Any) -> tuple[Tensor, State]:
        each = zip(self._shares(), state.parts, scale, strict=True)
        found = [part.mech._reading(q[:, part.heads], before, own) for part, before, own in each]
        return self._joined([out for out, _ in found]), MixedState(tuple(new for _, new in found))

    def _check_state(self, state: State | None, q: Tensor) -> None:
        super()._check_state(state, q)
        if not isinstance(state, MixedState):
            return
        if len(state.parts) != len(self.parts):
            raise ShapeError(
                f"state must be that of {len(self.parts)} parts, given {len(state.parts)}"
            )
        for part, before in zip(self._shares(), state.parts, strict=True):
            part.mech._check_state(before, q[:, part.heads])


def _whole(out: Tensor) -> Partial:
    """An output as sums: of weights that are 1 together."""
    out = out if out.dtype == torch.float64 else out.float()
    zero = torch.zeros_like(out[..., 0])
    return Partial(out, zero + 1.0, zero)


def _nothing(part: Partial) -> Partial:
    """Sums over no key, of a part's shape."""
    zero = torch.zeros_like(part.den)
    return Partial(torch.zeros_like(part.num), zero, zero + EMPTY_LOG_SCALE)


def _all(names: Sequence[str], values: Sequence[Any]) -> Any:
    """A capability of the mix: what all parts have, or who lacks it and why."""
    absent = [
        f"{name}: {value.reason}"
        for name, value in zip(names, values, strict=True)
        if isinstance(value, Absent)
    ]
    if absent:
        return Absent("; ".join(dict.fromkeys(absent)))
    return "growing" if "growing" in values else values[0]


def _heads_of(mask: Mask, heads: _Heads) -> Mask:
    """The mask of some heads: only an explicit one differs between heads."""
    if mask.dense is None or mask.dense.shape[1] == 1:
        return mask
    return replace(mask, dense=mask.dense[:, heads])
