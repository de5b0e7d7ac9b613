"""What every mechanism is: `Mechanism`, its `Capabilities` and its `State`.

A mechanism is one file: a `Config` with its options, a `Mechanism` subclass with an `Info`
and the method `_attend`, and one line in `subquad.registry`. This base checks arguments
once for all, merges leading dimensions into B and refuses what is not declared.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from subquad.attention.masks import Mask
from subquad.attention.outside import by_calls
from subquad.attention.partial import Partial, combine
from subquad.errors import (
    DeviceError,
    DtypeError,
    OptionError,
    ShapeError,
    UnsupportedError,
)
from subquad.kernels.precision import autocast_dtype, own_precision
from subquad.options import Config, format_value
from subquad.shapes import KeyMask, Keys, Output, Queries, Values, Weights

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "Absent",
    "Capabilities",
    "Cost",
    "Info",
    "Mechanism",
    "State",
    "Support",
    "computed_again",
    "continued",
    "own_device",
    "penalties",
]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Absent:
    """A capability that is not there, with the reason; false in a condition."""

    reason: str

    def __bool__(self) -> bool:
        return False


Support = Literal[True] | Absent
"""True, or `Absent` with a reason."""


@dataclass(frozen=True)
class Capabilities:
    """What a mechanism can do with given options. Every absence carries its reason.

    Args:
        causal, key, prefix, segments, window, dense: kinds of `Mask` that are taken.
        cross: queries and keys of different lengths.
        gqa: fewer key/value heads than query heads.
        state: ``"constant"`` or ``"growing"`` memory in `prefill`/`step`, or `Absent`.
        read: `step` without new keys reads the state (cross-attention).
        partial: `Mechanism.partial` gives sums that merge with those of other keys.
        merges: partial sums of disjoint keys merge to those of one call over all of them; absent
            where each call chooses for itself.
        weights: `Mechanism.weights` gives the implied attention matrix.
        approximates: what the mechanism approximates (``"softmax"``), or None.
        trainable: gradients reach q, k and v.
        compile: ``torch.compile(fullgraph=True)`` without recompiling per length.
        deterministic: the same input gives the same output (once the seed is chosen).
        max_length: `build` needs ``max_length``.
        qkv: reads q, k, v (False for token mixers).
        functional: has no learned parameters, so that `subquad.attention` takes it.
        pad_invariant: right-padding equals the unpadded call, row by row.
        compact: a row with masked keys anywhere equals the row without those tokens.
        exact_gradient: gradients are the output's own; absent where a selection or statistics
            of the call are held fixed.
        full_length: the output has a row for each query.
        value_width: values may be of another width than queries and keys, V ≠ D.
        reach: which past tokens can influence a token under a causal mask, in words; in
            numbers see `Mechanism.reached`.
    """

    causal: Support = True
    key: Support = True
    prefix: Support = Absent("not implemented by this mechanism")
    segments: Support = Absent("not implemented by this mechanism")
    window: Support = Absent("not implemented by this mechanism")
    dense: Support = Absent("an explicit L×S mask needs exact attention")
    cross: Support = True
    gqa: Support = True
    state: Literal["constant", "growing"] | Absent = Absent("no state is defined")
    read: Support = True
    partial: Support = Absent("sums over keys are not separable")
    merges: Support = True
    weights: Support = True
    approximates: str | None = None
    trainable: Support = True
    compile: Support = True
    deterministic: Support = True
    max_length: bool = False
    qkv: bool = True
    functional: Support = True
    pad_invariant: Support = True
    compact: Support = True
    exact_gradient: Support = True
    full_length: Support = True
    value_width: Support = True
    reach: str = "all past tokens"

    def rows(self) -> list[tuple[str, str, str]]:
        """(name, value, reason) of every capability, for tables."""
        rows = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Absent):
                rows.append((field.name, "no", value.reason))
            elif isinstance(value, bool):
                rows.append((field.name, "yes" if value else "no", ""))
            else:
                rows.append((field.name, str(value), ""))
        return rows


@dataclass(frozen=True)
class Cost:
    """Leading-order cost of one forward call for one batch row and one head.

    Args:
        formula: the order, for people: ``"O(L·M·(D+V))"``.
        flops: multiply-adds count two; (length, head_dim, value_dim, config) → FLOPs. Token
            mixers take the width C of the whole model for `head_dim`.
        memory: bytes beyond inputs and output in float32; same arguments.
    """

    formula: str
    flops: Callable[[int, int, int, Any], float]
    memory: Callable[[int, int, int, Any], float]


@dataclass(frozen=True)
class Info:
    """What `subquad.describe` prints about a mechanism.

    Args:
        summary: one line.
        formula: the defining formula.
        cost: see `Cost`.
        paper: citation with arXiv number and equation.
        limit: the setting at which the mechanism is exact, and against what.
        options: one line for each option.
        scale: default factor of the logits, or of the product of q and k.
        deviations: where the implementation departs from the paper.
        sample: option string whose attention can be seen on 48 tokens, for pictures;
            default the bare name.
        use: when to choose it, in one or two sentences.
    """

    summary: str
    formula: str
    cost: Cost
    paper: str
    limit: str
    options: dict[str, str] = dataclasses.field(default_factory=dict)
    scale: str = "D^-½"
    deviations: str = ""
    sample: str = ""
    use: str = ""


@dataclass(frozen=True, eq=False)
class State:
    """What a mechanism remembers of past keys. Every tensor's first dimension is the batch.

    Subclasses are frozen dataclasses whose fields are tensors, numbers, None, other states or
    tuples of these. States are values: `step` returns a new one and leaves the old one usable
    (snapshots are free).
    """

    owns: ClassVar[bool] = False
    """Whether its floating-point tensors are nobody else's, so that `overwritten` may write into
    them."""

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, ``parts.0.k`` where states are nested."""
        found: dict[str, Tensor] = {}
        for field in dataclasses.fields(self):
            found.update(_tensors(field.name, getattr(self, field.name)))
        return found

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """A state with `function` applied to every tensor."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return dataclasses.replace(
            self, **{name: _map(value, function) for name, value in values.items()}
        )

    @property
    def nbytes(self) -> int:
        """Bytes held by all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())

    def select(self, rows: Tensor | Sequence[int]) -> Self:
        """Keeps batch rows `rows`, in that order (beam reordering)."""
        return self.map(lambda t: t.index_select(0, torch.as_tensor(rows, device=t.device)))

    def repeat(self, n: int) -> Self:
        """Repeats every batch row n times, neighbours first (beam expansion)."""
        return self.map(lambda t: t.repeat_interleave(n, 0))

    def overwritten(self, rows: Tensor, by: Tensor) -> Self:
        """Rows `rows` become copies of rows `by`; this state itself is used up.

        Without gradients, states that own their memory (`owns`) are written over in place, and
        only these rows are moved.

        Args:
            rows: (n,) numbers of batch rows, none of them twice and none of them in `by`.
            by: (n,) numbers of batch rows.
        """
        fields = dataclasses.fields(self)
        new = {f.name: _overwritten(getattr(self, f.name), rows, by, self.owns) for f in fields}
        return dataclasses.replace(self, **new)

    def clone(self) -> Self:
        """A deep copy."""
        return self.map(torch.clone)

    def detach(self) -> Self:
        """A state cut off from the autograd graph."""
        return self.map(torch.Tensor.detach)

    def to(self, device: torch.device | str) -> Self:
        """A copy on `device`."""
        return self.map(lambda t: t.to(device, copy=True))


def _tensors(name: str, value: Any) -> dict[str, Tensor]:
    if isinstance(value, Tensor):
        return {name: value}
    parts: dict[str, Any] = {}
    if isinstance(value, State):
        parts = value.tensors()
    elif isinstance(value, tuple):
        parts = {str(index): part for index, part in enumerate(value)}
    found: dict[str, Tensor] = {}
    for key, part in parts.items():
        found.update(_tensors(f"{name}.{key}", part))
    return found


def _map(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, State):
        return value.map(function)
    if isinstance(value, tuple):
        return tuple(_map(part, function) for part in value)
    return value


def _overwritten(value: Any, rows: Tensor, by: Tensor, owned: bool) -> Any:
    if isinstance(value, State):
        return value.overwritten(rows, by)
    if isinstance(value, tuple):
        return tuple(_overwritten(part, rows, by, owned) for part in value)
    if not isinstance(value, Tensor):
        return value
    rows, by = rows.to(value.device), by.to(value.device)
    if owned and writable(value):
        return value.index_copy_(0, rows, value.index_select(0, by))
    return value.index_copy(0, rows, value.index_select(0, by))


def writable(t: Tensor) -> bool:
    """Whether rows of a state's own tensor can be written over: nobody looks, none is repeated."""
    repeated = any(step == 0 and size > 1 for step, size in zip(t.stride(), t.shape, strict=True))
    watched = torch.is_grad_enabled() or t.requires_grad or torch.compiler.is_compiling()
    if watched or repeated:
        return False
    return t.is_floating_point() and t.is_inference() == torch.is_inference_mode_enabled()


def continued(name: str, old: Tensor, new: Tensor) -> Tensor:
    """What a state holds of past tokens, (B, H, S, ·), followed by a call's new ones.

    Args:
        name: of the argument that `new` is, for messages.
        old: from the state.
        new: of the call.

    Raises:
        ShapeError: if heads or widths differ.
        DtypeError: if the dtypes differ.
    """
    continues(name, old, new)
    return torch.cat([old, new], 2)


def continues(name: str, old: Tensor, new: Tensor) -> None:
    """Raises what `continued` does."""
    if old.shape[1] != new.shape[1] or old.shape[3] != new.shape[3]:
        heads = f"{'H' if name == 'q' else 'Hkv'}={old.shape[1]}"
        raise ShapeError(
            f"{name} must continue the state's (B, {heads}, S, {old.shape[3]}), "
            f"given {tuple(new.shape)}"
        )
    if old.dtype != new.dtype:
        raise DtypeError(f"{name} must have the state's dtype {old.dtype}, given {new.dtype}")


class Mechanism(nn.Module, ABC):
    """An attention mechanism for heads of a given size.

    Args:
        head_dim: D, width of query and key heads.
        num_heads: H, query heads.
        num_kv_heads: Hkv, key/value heads; divides H. Default H.
        value_dim: V, width of value heads. Default: whatever a call brings.
        embed_dim: C, width of the model, for mechanisms that need it.
        max_length: longest sequence, for mechanisms that need it.
        seed: determines every random draw.
        device, dtype: of parameters and buffers.
        options: the mechanism's own options, see its ``Config``.

    Raises:
        OptionError: for a wrong size or option; all problems at once.
    """

    name: ClassVar[str]
    family: ClassVar[str]
    Config: ClassVar[type[Config]]
    info: ClassVar[Info]
    counters: ClassVar[tuple[str, ...]] = ()
    """Plain numbers that training changes, for checkpoints to keep beside the state dict."""
    state_type: type[State] = State

    def __init__(
        self,
        *,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        value_dim: int | None = None,
        embed_dim: int | None = None,
        max_length: int | None = None,
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.config = self.Config.from_options(options)
        self.head_dim = head_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.value_dim = value_dim
        self.embed_dim = embed_dim
        self.max_length = max_length
        self.seed = seed
        self._check_sizes()
        self.seed %= 2**64  # what a generator takes
        self.capabilities = self.capabilities_for(self.config)
        self.answers_alone = self.answers_alone_for(self.config)
        if self.capabilities.max_length and max_length is None:
            raise OptionError(f"{self.name}: max_length is needed: it fixes learned sizes")

    # ---- what a mechanism supplies -------------------------------------------------------

    @classmethod
    @abstractmethod
    def capabilities_for(cls, config: Any) -> Capabilities:
        """What the mechanism can do with these options."""

    @abstractmethod
    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
        """Attention of checked tensors q (B, H, L, D), k (B, Hkv, S, D), v (B, Hkv, S, V)."""

    def _partial(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Partial:
        raise UnsupportedError(self.name, "partial")

    def _prefill(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any, key_mask: Tensor | None, scale: float
    ) -> tuple[Tensor, State]:
        raise UnsupportedError(self.name, "prefill")

    def _read(self, q: Tensor, state: Any, scale: float) -> Tensor:
        raise UnsupportedError(self.name, "step without new keys")

    def _reading(self, q: Tensor, state: Any, scale: float) -> tuple[Tensor, State]:
        """`_read`, and the state for the next queries, where these change what those are told."""
        return self._read(q, state, scale), state

    def _implied(self, q: Tensor, k: Tensor, mask: Mask, scale: float) -> Tensor:
        """The matrix (B, H, L, S) of `weights`, for checked tensors as in `_attend`."""
        identity = torch.eye(k.shape[2], dtype=k.dtype, device=k.device)
        return self._attend(q, k, identity.expand(*k.shape[:2], -1, -1), mask, scale)

    def _read_implied(self, q: Tensor, state: Any, scale: float) -> Tensor:
        """The matrix (B, H, L, S) that `_read` applies, where `state_weights_for` is True."""
        support = self.state_weights_for(self.config)
        reason = support.reason if isinstance(support, Absent) else ""
        raise UnsupportedError(self.name, "the weights of a state", reason)

    @classmethod
    def state_weights_for(cls, config: Any) -> Support:
        """Whether `weights` can be told of a state."""
        return Absent("its state holds no keys: give them as k")

    @classmethod
    def follows_for(cls, config: Any) -> bool:
        """Whether a query that reads a state changes what later ones are told."""
        return cls._reading is not Mechanism._reading

    @classmethod
    def outside_for(cls, config: Any) -> Support:
        """Whether `_outside` works with these options: the mechanism can be a far field.

        Its sums have to be those of exp(scale·q·k), for others are in other units than exact
        sums, and its normalisers must never be negative.
        """
        have = cls.capabilities_for(config)
        if have.approximates != "softmax":
            return Absent("its weights do not estimate exp(scale·q·k), the units of exact ones")
        if isinstance(have.full_length, Absent):
            return Absent(have.full_length.reason)
        needs = {"partial": have.partial, "causal": have.causal, "compact": have.compact}
        for need, support in needs.items():
            if isinstance(support, Absent) and cls._outside is Mechanism._outside:
                return Absent(f"sums outside of a window need {need!r}: {support.reason}")
        return True

    @classmethod
    def answers_alone_for(cls, config: Any) -> Support:
        """Whether no query of a call without causal mask changes an earlier one's answer.

        It is so where a state can be read without new keys.
        """
        have = cls.capabilities_for(config)
        lacking = have.read if isinstance(have.read, Absent) else have.state
        return lacking if isinstance(lacking, Absent) else True

    @classmethod
    def outside_merges_for(cls, config: Any) -> Support:
        """Whether sums of `_outside` over disjoint keys merge to those of one call."""
        return cls.capabilities_for(config).merges

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
        """Sums over the keys j with |i + S − L − j| > `window`, disjoint parts to be merged.

        Args:
            q, k, v, scale: as in `_attend`, float32 or float64.
            mask: causal and key parts; data-dependent choices look at all open keys.
            window: keys left out on each side of a query's position, which is left out too;
                −1 leaves nothing out.
            closed: (B, 1 or Hkv, S) bool, True = keys that another part reads.
        """
        return by_calls(self._partial, q, k, v, mask, scale, window, closed)

    def _parts(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: Any
    ) -> dict[str, list[Partial]]:
        """Sums over named, disjoint sets of keys that merge to `_attend`; arguments as there.

        An empty dict: the mechanism is one piece, nothing of it can be left out.
        """
        return {}

    def _prefill_partial(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any, key_mask: Tensor | None, scale: Any
    ) -> tuple[Partial, State]:
        """`_prefill` with the sums instead of their ratio, to be merged with exact ones."""
        raise UnsupportedError(self.name, "prefill")

    # ---- what a user calls ---------------------------------------------------------------

    def forward(
        self,
        q: Queries,
        k: Keys,
        v: Values,
        *,
        causal: bool = False,
        key_mask: KeyMask | None = None,
        mask: Mask | None = None,
        scale: float | None = None,
    ) -> Output:
        """Attention output (..., H, L, V).

        Args:
            q: (..., H, L, D).
            k: (..., Hkv, S, D).
            v: (..., Hkv, S, V).
            causal: no query reads a later key; aligned to the end where L ≠ S.
            key_mask: (..., S) bool, True = attend. What masked keys contain never matters;
                a row without any key to attend gives zeros.
            mask: a `Mask`, for prefix, segment, window and explicit masks.
            scale: factor of the logits, default D^-½.

        Raises:
            ShapeError, DtypeError, DeviceError: if an argument does not fit.
            UnsupportedError: for a request that the mechanism does not declare.
        """
        joined = Mask.of(causal=causal, key_mask=key_mask, mask=mask)
        q, k, v, joined, lead = self._check(q, k, v, joined)
        return self._checked(q, k, v, joined, scale, lead)

    def _checked(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        scale: float | None,
        lead: tuple[int, ...],
    ) -> Tensor:
        if q.shape[0] == 0:  # an empty batch
            nothing = q.sum() + k.sum() + v.sum()  # 0, and a graph to go back through
            return nothing.expand(*lead, *q.shape[1:3], v.shape[-1])
        with own_precision(q):
            out = self._attend(q, k, v, mask, self._scale(scale))
        return out if len(lead) == 1 else out.reshape(*lead, *out.shape[1:])

    def partial(
        self,
        q: Queries,
        k: Keys,
        v: Values,
        *,
        causal: bool = False,
        key_mask: KeyMask | None = None,
        mask: Mask | None = None,
        scale: float | None = None,
    ) -> Partial:
        """Sums over these keys that merge exactly with sums over others, see `Partial`."""
        self._need("partial", self.capabilities.partial)
        joined = Mask.of(causal=causal, key_mask=key_mask, mask=mask)
        q, k, v, joined, lead = self._check(q, k, v, joined)
        if q.shape[0] == 0:  # an empty batch
            dtype = torch.promote_types(q.dtype, torch.float32)
            sums = q.new_zeros(*lead, *q.shape[1:3], dtype=dtype)
            return Partial(sums.new_zeros(*sums.shape, v.shape[-1]), sums, sums)
        with own_precision(q):
            part = self._partial(q, k, v, joined, self._scale(scale))
        return Partial(*(t.reshape(*lead, *t.shape[1:]) for t in _sums(part)))

    def partials(
        self,
        q: Queries,
        k: Keys,
        v: Values,
        *,
        causal: bool = False,
        key_mask: KeyMask | None = None,
        mask: Mask | None = None,
        scale: float | None = None,
    ) -> dict[str, Partial]:
        """The sums of a hybrid's parts by name, such as near, heavy and far; empty if it has none.

        They merge to the output of a call with these arguments, and without one of them to
        what that part's absence would give: an ablation. Runs as in evaluation.

        Example:
            >>> import torch, subquad as sq
            >>> q, k, v = (torch.randn(1, 2, 99, 8) for _ in range(3))
            >>> mech = sq.build("near_far(window=8)", head_dim=8, num_heads=2)
            >>> parts = mech.partials(q, k, v)
            >>> bool((sq.merge(parts.values()) - mech(q, k, v)).abs().max() < 1e-5)
            True
            >>> without_far = sq.merge(part for name, part in parts.items() if name != "far")
        """
        joined = Mask.of(causal=causal, key_mask=key_mask, mask=mask)
        q, k, v, joined, lead = self._check(q, k, v, joined)
        with looking(self), own_precision(q):
            groups = self._parts(q, k, v, joined, self._scale(scale))
        merged = {name: combine(group) for name, group in groups.items() if group}
        return {
            name: Partial(*(t.reshape(*lead, *t.shape[1:]) for t in _sums(part)))
            for name, part in merged.items()
        }

    def prefill(
        self,
        q: Queries,
        k: Keys,
        v: Values,
        *,
        state: State | None = None,
        key_mask: KeyMask | None = None,
        scale: float | None = None,
        donate: bool = False,
    ) -> tuple[Output, State]:
        """Causal attention that continues `state` and returns the new state.

        Equals one causal call over everything the state has seen followed by these tokens.
        `key_mask` is (..., S) for the S new keys. With `donate` the given state will not be used
        again, nor what shares its memory, so that a mechanism may write the new one there; a
        graph that kept it refuses to go back. Else it stays as it is.
        """
        self._need("prefill", self.capabilities.state)
        joined = Mask.of(causal=True, key_mask=key_mask)
        q, k, v, joined, lead = self._check(q, k, v, joined)
        self._check_state(state, q)
        empty, key = q.shape[0] == 0, joined.key
        if empty:  # what a row of zeros gives, without that row
            q, k, v = _one_row(q), _one_row(k), _one_row(v)
            state, key = None if state is None else state.map(_one_row), None
        with own_precision(q):
            out, new = self._prefill(q, k, v, state, key, self._scale(scale))
        if empty:
            out, new = _no_row(out), new.map(_no_row)
        return out.reshape(*lead, *out.shape[1:]), new

    def step(
        self,
        q: Queries,
        k: Keys | None,
        v: Values | None,
        state: State | None,
        *,
        key_mask: KeyMask | None = None,
        scale: float | None = None,
        donate: bool = False,
    ) -> tuple[Output, State]:
        """T ≥ 1 new tokens, q (..., H, T, D); ``k=v=None`` reads the state without writing.

        The form without keys is cross-attention: fill the state once with the encoder's
        keys (`prefill` or a causal call's keys), then step the decoder's queries. Go on with
        the returned state: some mechanisms note in it where a query has looked. `donate`: see
        `prefill`.
        """
        if (k is None) != (v is None):
            raise ShapeError("k and v must both be given, or both be None (cross-attention)")
        if k is not None and v is not None:
            return self.prefill(q, k, v, state=state, key_mask=key_mask, scale=scale, donate=donate)
        self._need("step", self.capabilities.state)
        self._need("step without new keys", self.capabilities.read)
        if state is None:
            raise ShapeError("step without k and v needs a state to read")
        if key_mask is not None:
            raise ShapeError("step without k and v takes no key_mask: there are no new keys")
        flat, lead = self._check_read(q, state)
        empty, held = flat.shape[0] == 0, state
        if empty:
            flat, held = _one_row(flat), state.map(_one_row)
        with own_precision(q):
            out, new = self._reading(flat, held, self._scale(scale))
        if empty:
            out, new = _no_row(out), new.map(_no_row)
        return out.reshape(*lead, *out.shape[1:]), new

    def weights(
        self,
        q: Queries,
        k: Keys | None = None,
        *,
        state: State | None = None,
        rows: Sequence[int] | Tensor | None = None,
        causal: bool = False,
        key_mask: KeyMask | None = None,
        mask: Mask | None = None,
        scale: float | None = None,
    ) -> Weights:
        """The implied attention matrix (..., H, L, S); gradients reach q and k.

        The output is linear in v, so the matrix is the output for v = I, O(L·S) memory. Masked
        keys have the weight 0; a row sums to 1, or to 0 where it has no key, unless values are
        projected (`linformer`) or its normaliser is clipped. `rows` keeps some queries only.

        With a `state` that holds its keys in the place of `k` and masks: the matrix that
        ``step(q, None, None, state)`` applies.
        """
        self._need("weights", self.capabilities.weights)
        joined = Mask.of(causal=causal, key_mask=key_mask, mask=mask)
        if (k is None) == (state is None):
            raise ShapeError("weights takes keys k, or a state that holds them")
        if k is None:
            if joined.kinds():
                raise ShapeError("weights of a state takes no mask: there are no new keys")
            flat, lead = self._check_read(q, state)
            if flat.shape[0] == 0:
                raise ShapeError(f"q must have at least one row, given {tuple(q.shape)}")
            with own_precision(q):
                out = self._read_implied(flat, state, self._scale(scale))
            out = out.reshape(*lead, *out.shape[1:])
            return out if rows is None else out[..., torch.as_tensor(rows, device=out.device), :]
        v = k.new_zeros(*k.shape[:-1], self.value_dim or 1)
        q, k, v, joined, lead = self._check(q, k, v, joined)
        if q.shape[0] == 0:  # an empty batch
            nothing = q.sum() + k.sum()
            out = nothing.expand(*lead, *q.shape[1:3], k.shape[2])
        else:
            with own_precision(q):
                out = self._implied(q, k, joined, self._scale(scale))
            out = out.reshape(*lead, *out.shape[1:])
        return out if rows is None else out[..., torch.as_tensor(rows, device=out.device), :]

    @classmethod
    def calibrates_for(cls, config: Any) -> bool:
        """Whether these options take statistics from data, by ``calibrate(q, k)``."""
        return False

    @classmethod
    def least_heads(cls, config: Any) -> int:
        """The fewest heads with which these options can be built."""
        return 1

    def reached(self, t: int, length: int) -> Iterable[int]:
        """Later tokens, of `length`, that k_t and v_t alone influence under a causal mask."""
        return range(t + 1, length)

    def reset_parameters(self) -> None:
        """Draws parameters and random buffers again from the seed (after meta-device init)."""

    def penalty(self) -> Tensor:
        """What the mechanism asks to be added to a training loss: a scalar, zero by default.

        Of this mechanism alone, without those inside of it: `penalties` adds all of a model's,
        each once. Differentiable; not weighted.
        """
        return torch.zeros((), device=own_device(self))

    def extra_repr(self) -> str:
        kv = "" if self.num_kv_heads == self.num_heads else f", num_kv_heads={self.num_kv_heads}"
        changed = self.config.changed().items()
        options = "".join(f", {key}={format_value(value)}" for key, value in changed)
        return f"head_dim={self.head_dim}, num_heads={self.num_heads}{kv}{options}"

    # ---- checks --------------------------------------------------------------------------

    def _scale(self, scale: float | None) -> float:
        return self.head_dim**-0.5 if scale is None else float(scale)

    def _check_sizes(self) -> None:
        problems = []
        sizes = {
            "head_dim": self.head_dim,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "value_dim": self.value_dim,
            "embed_dim": self.embed_dim,
            "max_length": self.max_length,
        }
        for name, size in sizes.items():
            if size is not None and (
                not isinstance(size, int) or isinstance(size, bool) or size < 1
            ):
                problems.append(f"{name}={size!r} must be an integer ≥ 1")
        if not problems and self.num_heads % self.num_kv_heads:
            problems.append(
                f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}"
            )
        if not problems and self.num_heads != self.num_kv_heads:
            support = self.capabilities_for(self.config).gqa
            if isinstance(support, Absent):
                problems.append(f"num_kv_heads must equal num_heads: {support.reason}")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            problems.append(f"seed={self.seed!r} must be an integer")
        if problems:
            raise OptionError(f"{self.name}: " + "; ".join(problems))

    def _need(self, request: str, support: Support | str) -> None:
        if isinstance(support, Absent):
            from subquad import registry  # late: the registry imports mechanisms lazily

            capability = {
                "prefill": "state",
                "step": "state",
                "step without new keys": "read",
            }.get(request, request)
            raise UnsupportedError(
                self.name, request, support.reason, registry.capable(capability, besides=self.name)
            )

    def _check_queries(self, q: Tensor) -> None:
        if q.dim() < 3 or q.shape[-3] != self.num_heads or q.shape[-1] != self.head_dim:
            raise ShapeError(
                f"q must be (..., H={self.num_heads}, L, D={self.head_dim}), given {tuple(q.shape)}"
            )
        if q.dtype not in FLOATS:
            raise DtypeError(f"q must be one of {_names(FLOATS)}, given {q.dtype}")
        if q.shape[-2] == 0:
            raise ShapeError(f"q must have at least one query, given {tuple(q.shape)}")
        own = own_device(self)
        if own is not None and own != q.device:
            raise DeviceError(
                f"q is on {q.device}, {self.name} is on {own}; move one with .to(...)"
            )

    def _check(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask
    ) -> tuple[Tensor, Tensor, Tensor, Mask, tuple[int, ...]]:
        dtype = autocast_dtype(q)
        if dtype is not None:
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        self._check_queries(q)
        lead = tuple(q.shape[:-3])
        pairs = (("k", k, self.head_dim, "D"), ("v", v, self.value_dim, "V"))
        for name, tensor, width, letter in pairs:
            if (
                tensor.dim() != q.dim()
                or tuple(tensor.shape[:-3]) != lead
                or tensor.shape[-3] != self.num_kv_heads
                or (width is not None and tensor.shape[-1] != width)
            ):
                wanted = [*map(str, lead), f"Hkv={self.num_kv_heads}", "S", letter]
                wanted[-1] += f"={width}" if width else ""
                given = tuple(tensor.shape)
                raise ShapeError(f"{name} must be ({', '.join(wanted)}), given {given}")
            if tensor.dtype != q.dtype:
                raise DtypeError(f"{name} must have q's dtype {q.dtype}, given {tensor.dtype}")
            if tensor.device != q.device:
                raise DeviceError(f"{name} is on {tensor.device}, q is on {q.device}")
        if k.shape[-2] != v.shape[-2] or k.shape[-2] == 0:
            raise ShapeError(
                f"k and v must have one length S ≥ 1, given {k.shape[-2]} and {v.shape[-2]}"
            )
        for kind in mask.kinds():
            self._need(kind, getattr(self.capabilities, kind))
        queries, keys = q.shape[-2], k.shape[-2]
        if queries != keys:
            self._need("cross", self.capabilities.cross)
        mask = mask.flatten(lead, queries, keys, q.device)
        if mask.dense is not None and mask.dense.shape[1] not in (1, self.num_heads):
            raise ShapeError(
                f"dense mask must have H={self.num_heads} heads or 1, given {mask.dense.shape[1]}"
            )
        if len(lead) != 1:
            q, k, v = (t.reshape(math.prod(lead), *t.shape[-3:]) for t in (q, k, v))
        return q, k, v, mask, lead

    def _check_read(self, q: Tensor, state: State | None) -> tuple[Tensor, tuple[int, ...]]:
        """Queries (B, H, L, D) that fit the state to be read, and their leading dimensions."""
        dtype = autocast_dtype(q)
        if dtype is not None:
            q = q.to(dtype)
        self._check_queries(q)
        flat = q.reshape(-1, *q.shape[-3:])
        self._check_state(state, flat)
        return flat, tuple(q.shape[:-3])

    def _check_state(self, state: State | None, q: Tensor) -> None:
        if state is None:
            return
        if not isinstance(state, self.state_type):
            wanted = self.state_type.__name__
            raise ShapeError(f"state must be a {wanted}, given {type(state).__name__}")
        for name, tensor in state.tensors().items():
            if tensor.shape[0] != q.shape[0]:
                raise ShapeError(
                    f"the state's {name} holds {tensor.shape[0]} batch rows, q has {q.shape[0]}; "
                    "use state.select(rows) or state.repeat(n)"
                )
            if tensor.device != q.device:
                raise DeviceError(f"the state is on {tensor.device}, q is on {q.device}")


def own_device(module: nn.Module) -> torch.device | None:
    """That of a module's parameters and buffers; None where it has none."""
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for tensor in tensors.values():
                if tensor is not None:
                    return tensor.device
    return None


def penalties(module: nn.Module) -> Tensor:
    """The sum of `Mechanism.penalty` over all mechanisms of a model: a term of its loss.

    Mechanisms within mechanisms count, and one that several layers share counts once. A scalar
    on the device of the first one's; zero where no mechanism asks for anything.

    Args:
        module: a model, a layer, or a mechanism.

    Raises:
        OptionError: if `module` is no `torch.nn.Module`.

    Example:
        >>> import torch, subquad as sq
        >>> mech = sq.build("conv(kernels=[3], conv=shared, noise=0)", head_dim=8, num_heads=2)
        >>> sq.penalties(mech).item()  # as identities, kernels have norm τ
        0.0
        >>> for parameter in mech.kernels.parameters():
        ...     parameter.data *= 1.5
        >>> sq.penalties(torch.nn.Sequential(mech, mech)).item()  # q, k, v of 2 heads, ½ each
        3.0
    """
    if not isinstance(module, nn.Module):
        raise OptionError(f"module must be a torch.nn.Module, given {type(module).__name__}")
    found = [part.penalty() for part in module.modules() if isinstance(part, Mechanism)]
    if not found:
        return torch.zeros(())
    return torch.stack(
        [one.to(found[0].device, torch.promote_types(one.dtype, torch.float32)) for one in found]
    ).sum()


def computed_again() -> bool:
    """Whether a checkpoint computes this again, within a backward pass: it has counted then."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() >= 0


@contextmanager
def looking(mechanism: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while, of all parts: nothing is counted, redrawn or dropped."""
    modes = [(module, module.training) for module in mechanism.modules()]
    mechanism.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _sums(part: Partial) -> tuple[Tensor, Tensor, Tensor]:
    return part.num, part.den, part.log_scale


def _one_row(t: Tensor) -> Tensor:
    """A row of zeros in place of an empty batch."""
    return t.new_zeros(1, *t.shape[1:])


def _no_row(t: Tensor) -> Tensor:
    return t[:0]


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
