"""AFT, the Attention Free Transformer: weights per channel from keys and positions alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad.attention.base import (
    Absent,
    Capabilities,
    Cost,
    Info,
    Mechanism,
    State,
    continued,
)
from subquad.attention.exact.engine import clear, sums_dtype
from subquad.attention.masks import Mask
from subquad.errors import OptionError, ShapeError
from subquad.kernels.aft import Rest, channel_average
from subquad.kernels.linear import EMPTY
from subquad.kernels.precision import own_precision
from subquad.options import Config, choice_problem, flag_problem, idle_problem, integer_problem
from subquad.shapes import KeyMask, Keys, Queries

__all__ = ["AFT", "AFTConfig", "AFTState"]

READERS = {"window": ("conv", "local"), "rank": ("local", "full"), "normalise": ("conv",)}
"""The kinds that read an option."""

SPREAD = 0.02
"""Standard deviation of the biases w at the start: near AFT-simple, not the same for all keys."""


@dataclass(frozen=True)
class AFTConfig(Config):
    """Options of `AFT`.

    Args:
        kind: "simple" (w = 0), "conv" (w depends on the distance, within the window), "local"
            (on both positions, within the window) or "full" (on both positions).
        window: of conv and local: keys on each side with a bias, or [left, right]; the paper's
            AFT-local has window s − 1, its AFT-conv a filter of 2·window + 1. Causal calls use
            the left side.
        rank: of local and full: w = u vᵀ with u, v ∈ R^(max_length×rank), the paper's
            parameterisation; None: every entry is a parameter.
        normalise: of conv: w = γ·(w − mean w)/std w + β for each head, γ and β start at 0, the
            paper's parameterisation.
    """

    mechanism: ClassVar[str] = "aft"
    sizes: ClassVar[tuple[str, ...]] = ("window",)

    kind: str = "simple"
    window: int | tuple[int, int] = 31
    rank: int | None = None
    normalise: bool = True

    def __post_init__(self) -> None:
        window: Any = self.window
        if isinstance(window, list):
            object.__setattr__(self, "window", tuple(window))
        super().__post_init__()

    def problems(self) -> Iterator[str]:
        yield from choice_problem("kind", self.kind, ("simple", "conv", "local", "full"))
        window: Any = self.window
        sides = window if isinstance(window, tuple) else (window, window)
        if len(sides) != 2 or not all(type(side) is int and side >= 0 for side in sides):
            yield f"window={window!r} must be an integer ≥ 0, or [left, right]"
        elif self.kind == "conv" and self.normalise and sum(sides) == 0:
            yield "window=0 leaves nothing to normalise; use normalise=false"
        if self.rank is not None:
            yield from integer_problem("rank", self.rank, 1)
        yield from flag_problem("normalise", self.normalise)
        yield from idle_problem(self, "kind", [self.kind], READERS)

    def band(self) -> tuple[int, int] | None:
        """Keys before and after a query's own position that have a bias; None: all have one."""
        if self.kind == "full":
            return None
        if self.kind == "simple":
            return 0, 0
        return self.window if isinstance(self.window, tuple) else (self.window, self.window)


@dataclass(frozen=True, eq=False)
class PastKeys(State):
    """A `Rest` of the kernel as a state: (B, Hkv, 1, D) each, float32 or float64."""

    top: Tensor
    mass: Tensor
    mean: Tensor


@dataclass(frozen=True, eq=False)
class AFTState(State):
    """Sums over past keys, and the latest keys themselves where they have a bias.

    Args:
        past: sums over the keys before the recent ones, a `PastKeys`.
        k: (B, Hkv, W, D) the last W = left side of the window, scaled; `EMPTY` where there is
            none or it is masked. W = 0 for simple; all keys for full.
        v: (B, Hkv, W, D), zero there.
        seen: tokens read so far, masked ones too.
    """

    past: PastKeys
    k: Tensor
    v: Tensor
    seen: int


def _flops(length: int, head_dim: int, value_dim: int, config: AFTConfig) -> float:
    band = config.band()
    if band is None:
        return 4.0 * length * length * value_dim + 2.0 * length * length * (config.rank or 0)
    if config.kind == "simple":
        return 6.0 * length * value_dim
    return 4.0 * length * value_dim * (sum(band) + 128)


def _memory(length: int, head_dim: int, value_dim: int, config: AFTConfig) -> float:
    biases = {"full": length if config.rank else 0, "local": sum(config.band() or (0, 0)) + 1}
    return 4.0 * length * (2 * value_dim + biases.get(config.kind, 0))


class AFT(Mechanism):
    """Attention without products of queries and keys: each channel c averages for itself.

        out_ic = σ(q_ic) · Σ_j exp(scale·k_jc + w_ij) v_jc / Σ_j exp(scale·k_jc + w_ij)

    σ is the sigmoid, scale = 1. The biases w are one set for each key/value head, by kind:

    - simple: w = 0. No parameters, any length, a constant state.
    - conv: w_ij = filter[j − i] for −left ≤ j − i ≤ right, else 0; `weight` (Hkv, left+1+right),
      with `normalise` also `gain` γ and `shift` β (Hkv). Any length, a constant state.
    - local: learned for each pair of positions within the window, else 0; `weight`
      (Hkv, max_length, left+1+right). A constant state.
    - full: learned for all pairs; `weight` (Hkv, max_length, max_length). A growing state.

    With `rank` local and full have w_ij = u_i·c_j, with `rows` u and `columns` c, both (Hkv,
    max_length, rank).
    Outside of the window w is 0, not −∞: every key is read. Where L ≠ S the last query stands
    beside the last key; the longer of the two fills positions 0, 1, …

    V = D: a channel of q gates the same channel of v. There is no attention matrix, and nothing
    is approximated: convert no trained softmax model to it.

    Cost: simple O((L+S)·D); conv and local O(L·(window+128)·D) time, O((L+S)·D) memory, by chunks
    of 128 queries that are computed again in the backward pass; full O(L·S·D) time, and the L×S
    biases of each head. Sums are kept in float32 for half precision and relative to the largest
    key so far, so that neither large keys nor later ones matter.

    Paper: Zhai et al. 2021, arXiv 2105.14103, eq. 2 (full) and section 3 (local, simple, conv).
    The paper has one w for all channels in full and local, one for each head in conv:
    ``num_heads=1`` is the former. w starts with independent N(0, 0.02²) or with u and v such that
    their product has that size.

    Args:
        kind, window, rank, normalise: see `AFTConfig`.

    Raises:
        OptionError: for wrong options, `value_dim` ≠ `head_dim`, or local and full without
            `max_length`.
        ShapeError: for V ≠ D, or more than `max_length` tokens in local and full.

    See `Mechanism` for sizes and shapes.

    Example:
        >>> import torch, subquad as sq
        >>> mech = sq.build("aft(kind=conv, window=3)", head_dim=8, num_heads=2)
        >>> q, k, v = (torch.randn(1, 2, 50, 8) for _ in range(3))
        >>> out, state = mech.prefill(q, k, v)
        >>> torch.allclose(out, mech(q, k, v, causal=True), atol=1e-5), state.k.shape
        (True, torch.Size([1, 2, 3, 8]))
    """

    name = "aft"
    family = "fixed"
    state_type = AFTState
    Config = AFTConfig
    config: AFTConfig
    info = Info(
        scale="1",
        summary="attention free: each channel averages values by exp(key + position bias), gated "
        "by the query",
        formula="out_ic = σ(q_ic) · Σ_j exp(scale·k_jc + w_ij) v_jc / Σ_j exp(scale·k_jc + w_ij)",
        cost=Cost("O(L·(window+1)·D), full O(L·S·D)", _flops, _memory),
        paper="Zhai et al. 2021, An Attention Free Transformer, arXiv 2105.14103, section 3",
        limit="is its own exact form; full with w = 0 is simple, local with window ≥ max_length is "
        "full, and with k = 0 full is softmax(w) v behind the gate: a random synthesizer",
        options={
            "kind": "simple (w = 0), conv (by distance), local (by both positions, within the "
            "window) or full",
            "window": "of conv and local: keys on each side with a bias, or [left, right]",
            "rank": "of local and full: w = u vᵀ of this rank; none: every entry is a parameter",
            "normalise": "of conv: w = γ·(w − mean w)/std w + β, γ and β start at 0",
        },
        deviations="one w for each key/value head; a row without any key gives zeros; left and "
        "right side of a window may differ",
        use="models trained with it from scratch, where the cost of a token has to be constant and "
        "tiny: simple and conv decode with a few numbers a channel. It cannot look up one "
        "token by another.",
    )

    def __init__(
        self,
        *,
        head_dim: int,
        value_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **sizes: Any,
    ) -> None:
        if value_dim not in (None, head_dim):
            raise OptionError(
                f"aft: value_dim={value_dim!r} must be head_dim={head_dim}: a channel of q gates "
                "the same channel of v"
            )
        super().__init__(head_dim=head_dim, value_dim=head_dim, device=device, dtype=dtype, **sizes)
        config, heads = self.config, self.num_kv_heads
        self.band = config.band()
        width = sum(self.band or (0, 0)) + 1
        length = self.max_length or 0
        shapes: dict[str, tuple[int, ...]] = {}
        if config.rank is not None:
            shapes = dict.fromkeys(("rows", "columns"), (heads, length, config.rank))
        elif config.kind in ("local", "full"):
            shapes["weight"] = (heads, length, length if self.band is None else width)
        elif config.kind == "conv":
            shapes["weight"] = (heads, width)
            if config.normalise:
                shapes |= dict.fromkeys(("gain", "shift"), (heads,))
        for name, shape in shapes.items():
            empty = torch.empty(shape, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(empty))
        self.reset_parameters()

    @classmethod
    def capabilities_for(cls, config: AFTConfig) -> Capabilities:
        simple, positions = config.kind == "simple", config.kind in ("local", "full")
        learned = Absent("its biases are learned parameters")
        return Capabilities(
            prefix=Absent("its sums go by positions: a prefix would need sums of its own"),
            segments=Absent("one pair of sums serves one sequence; call once for each segment"),
            window=Absent("keys outside of its own window are read too, with a bias of 0"),
            value_width=Absent("a channel of q gates the same channel of v: V = D"),
            state="growing" if config.kind == "full" else "constant",
            read=True
            if simple
            else Absent("biases go by positions, which queries of another sequence do not have"),
            partial=Absent("each channel has a normaliser of its own, a partial one for all"),
            weights=Absent(
                "each channel has weights of its own, behind a gate: no matrix gives the output"
            ),
            max_length=positions,
            functional=True if simple else learned,
            compact=True
            if simple
            else Absent("biases go by positions: closing a gap moves all that follow"),
        )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws w from the seed, see the class; γ and β of conv are zero."""
        generator = torch.Generator().manual_seed(self.seed)
        for name, parameter in self.named_parameters():
            if parameter.is_meta:
                continue
            if name in ("gain", "shift"):
                parameter.zero_()
                continue
            rank = self.config.rank
            size = SPREAD if rank is None else SPREAD**0.5 * rank**-0.25
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(drawn * size)

    def biases(self, queries: int, keys: int, *, at: int = 0, start: int = 0) -> Tensor | None:
        """w of `queries` rows from position `at` on, for keys from position `start` on.

        Returns:
            (Hkv, L, S) for full; (Hkv, L, left+1+right), column c for the key c − left positions
            later, for local, with one row for all in conv; None for simple.
        """
        config = self.config
        if config.kind == "simple":
            return None
        if config.kind == "conv":
            w: Tensor = self.get_parameter("weight")
            if config.normalise:
                centred = w - w.mean(-1, keepdim=True)
                spread = centred.square().mean(-1, keepdim=True).sqrt()
                gain, shift = (self.get_parameter(name)[:, None] for name in ("gain", "shift"))
                w = gain * centred / spread + shift
            return w[:, None]
        rows = slice(at, at + queries)
        if config.rank is None:
            w = self.get_parameter("weight")[:, rows]
            return w[..., start : start + keys] if self.band is None else w
        u, other = self.get_parameter("rows")[:, rows], self.get_parameter("columns")
        if self.band is None:
            return u @ other[:, start : start + keys].mT
        columns = F.pad(other, (0, 0, *self.band))
        width = sum(self.band) + 1
        shifted = (columns[:, at + c : at + c + queries] for c in range(width))
        return torch.stack([(u * column).sum(-1) for column in shifted], -1)

    def _scale(self, scale: float | None) -> float:
        return 1.0 if scale is None else float(scale)

    def _keys(
        self, k: Tensor, v: Tensor, key: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Scaled keys and values in the sums' dtype: `EMPTY` and 0 where masked."""
        k, v = clear(k, v, Mask(key=key))
        dtype = sums_dtype(k.dtype)
        k, v = k.to(dtype) * scale, v.to(dtype)
        return (k if key is None else k.masked_fill(~key[:, None, :, None], EMPTY)), v

    def _gated(self, q: Tensor, average: Tensor) -> Tensor:
        """σ(q) times the average of its key/value head, (B, Hkv, L or 1, D)."""
        grouped = torch.sigmoid(q.to(average.dtype)).unflatten(1, (average.shape[1], -1))
        return (grouped * average[:, :, None]).flatten(1, 2).to(q.dtype)

    def _need_length(self, length: int) -> None:
        limit = self.max_length if self.capabilities.max_length else None
        if limit is not None and length > limit:
            raise ShapeError(
                f"aft: {length} tokens are more than max_length={limit}, for which "
                f"kind={self.config.kind} has biases; build it with a larger max_length"
            )

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
        return self._gated(q, self._averages(k, v, mask, q.shape[2], scale))

    def _averages(self, k: Tensor, v: Tensor, mask: Mask, queries: int, scale: float) -> Tensor:
        """What the gate is applied to, (B, Hkv, L or 1, D)."""
        keys = k.shape[2]
        k, v = self._keys(k, v, mask.key, scale)
        if self.config.kind == "simple" and not mask.causal:
            return Rest.empty(k).add(k, v).mean
        self._need_length(max(queries, keys))
        # Queries before the first key: the keys begin at a later position than the queries do.
        gap, ahead = abs(keys - queries), max(0, queries - keys)
        if not mask.causal:
            w = self.biases(queries, keys, at=gap - ahead, start=ahead)
            return self._average(k, v, w, queries, None, False)
        w = self.biases(queries - ahead, keys, at=gap, start=ahead)
        average = self._average(k, v, w, queries - ahead, None, True)
        return F.pad(average, (0, 0, ahead, 0)) if ahead else average

    def channel_weights(
        self,
        q: Queries,
        k: Keys,
        *,
        causal: bool = False,
        key_mask: KeyMask | None = None,
        mask: Mask | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """exp(k_jc + w_ij) over its sum, (..., Hkv, L, S, D): what stands in for `weights`.

        Sums over keys are one, or zero for a row without any key; the gate is left out. For
        looking and testing: O(L·S·D) memory, and a call for each key.

        Raises:
            ShapeError, DtypeError, DeviceError, UnsupportedError: as a call.

        Example:
            >>> import torch, subquad as sq
            >>> mech, x = sq.build("aft", head_dim=4, num_heads=2), torch.randn(2, 3, 4)
            >>> weights = mech.channel_weights(x, x, causal=True)
            >>> out = torch.sigmoid(x) * torch.einsum("hijc,hjc->hic", weights, x)
            >>> torch.allclose(out, mech(x, x, x, causal=True), atol=1e-6)
            True
        """
        joined = Mask.of(causal=causal, key_mask=key_mask, mask=mask)
        q, k, v, joined, lead = self._check(q, k, k, joined)
        columns = []
        with own_precision(q):
            for at in range(k.shape[2]):
                one = torch.zeros_like(v)
                one[:, :, at] = 1
                found = self._averages(k, one, joined, q.shape[2], self._scale(scale))
                columns.append(found.expand(-1, -1, q.shape[2], -1))
        weights = torch.stack(columns, 3)
        return weights.reshape(*lead, *weights.shape[1:])

    def _average(
        self,
        k: Tensor,
        v: Tensor,
        w: Tensor | None,
        queries: int,
        past: Rest | None,
        causal: bool,
    ) -> Tensor:
        w = w if w is None else w.to(k.dtype)
        return channel_average(k, v, w, queries, past=past, band=self.band, causal=causal)

    def _prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: AFTState | None,
        key_mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, State]:
        k, v = self._keys(k, v, key_mask, scale)
        queries = q.shape[2]
        window = 0 if self.band is None else self.band[0]
        if state is None:
            past, seen = Rest.empty(k), 0
            recent = [k.new_full((*k.shape[:2], window, k.shape[3]), EMPTY)]
            recent.append(torch.zeros_like(recent[0]))
        else:
            sums = state.past
            past, seen = Rest(sums.top, sums.mass, sums.mean), state.seen
            recent = [state.k, state.v]
        self._need_length(seen + queries)
        k, v = continued("k", recent[0], k), continued("v", recent[1], v)
        w = self.biases(queries, k.shape[2], at=seen)
        out = self._gated(q, self._average(k, v, w, queries, past, True))
        old = 0 if self.band is None else k.shape[2] - window
        past = past.add(k[:, :, :old], v[:, :, :old])
        sums = PastKeys(past.top, past.mass, past.mean)
        k, v = k[:, :, old:].clone(), v[:, :, old:].clone()  # a view would hold all of them
        return out, AFTState(sums, k, v, seen + queries)

    def _check_state(self, state: State | None, q: Tensor) -> None:
        super()._check_state(state, q)
        if isinstance(state, AFTState):
            wanted = state.seen if self.band is None else self.band[0]
            if state.k.shape[2] != wanted:
                raise ShapeError(
                    f"state must hold the last {wanted} of {state.seen} keys for "
                    f"kind={self.config.kind}, given {state.k.shape[2]}: options must agree"
                )

    def _read(self, q: Tensor, state: AFTState, scale: float) -> Tensor:
        return self._gated(q, state.past.mean)
