"""Causal attention over a fixed number of held keys: a window, first tokens and heavy hitters.

A key/value head holds at most N = sinks + heavy + window keys, in the order of their tokens.
A token's key is appended, then its queries read all held keys exactly:

    p_ij = e^{s_ij} / Σ_{j' held} e^{s_ij'} ,     mass_j += Σ_{queries of the group} p_ij

When N keys are held, after that token's queries, room is made for a block of c tokens: beside
the first tokens (`sinks`) and the last window − c ones, which stay, the c keys of least mass are
let go, and every mass is multiplied by a decay. So a query reads the first tokens, its own last
window − c + 1 tokens or more, and those older ones that attention came back to most of late.

A token that is masked adds nothing; its queries read what is held.

Memory is constant in the length, time O(L·N·(D+V)). Many tokens at once are processed a block
at a time, with the result that they would have one by one: the queries up to the next moment
of letting go see the same held keys, causally.

Papers: heavy hitters, Zhang et al. 2023 (H2O), arXiv 2306.14048, algorithm 1; first tokens, Xiao
et al. 2023 (StreamingLLM), arXiv 2309.17453. H2O adds attention up for ever and lets one key go
at a time: sums that decay keep what is of use now, and blocks are faster. Both were chosen on
SmolLM2-135M (ratio of perplexities at N = 130, six texts): no decay 1.126, half-life 200 tokens
1.096, 100 1.085, blocks of 16 of these; 50 with blocks of 8 1.073, of 4 1.070. On 24 texts of
three other corpora the chosen one gives 1.123, a window of as many keys 1.188.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.attention.base import State
from subquad.attention.exact.engine import clear, softmax_weights, sums_dtype
from subquad.attention.masks import Mask
from subquad.attention.partial import EMPTY_LOG_SCALE, Partial
from subquad.errors import DtypeError, ShapeError
from subquad.kernels.memory import has_data
from subquad.kernels.native import held as native

__all__ = ["HeldKeys", "Hold", "stream"]

BLOCK = 8
"""Tokens for which room is made at a time: more is faster, and lets more stand empty."""

SEVERAL = 16
"""Tokens from which a call is worth what it takes to lay out the held keys for the library."""

DECAY = 0.5 ** (1 / 50)
"""What a mass keeps with each token that passes, a half of it after 50: attention of long ago
says little about where it will go next."""


@dataclass(frozen=True)
class Hold:
    """How many keys are held, and which ones.

    Args:
        window: W ≥ 1, the last tokens; those of the oldest block among them are judged.
        heavy: older keys of largest mass.
        sinks: first tokens, never let go.
    """

    window: int
    heavy: int
    sinks: int

    @property
    def size(self) -> int:
        """N, how many keys are held at most."""
        return self.sinks + self.heavy + self.window

    @property
    def recent(self) -> int:
        """W − c, how many tokens before its own a query surely reads."""
        return self.window - self.block

    @property
    def block(self) -> int:
        """c, how many keys are let go at a time."""
        return max(1, min(BLOCK, self.window // 4))


@dataclass(frozen=True, eq=False)
class HeldKeys(State):
    """What is held after some tokens; its size does not depend on how many.

    Args:
        kv: (B, Hkv, N, D + V) keys and values side by side, in the order of their tokens.
        mass: (B, Hkv, N) float32 (float64 for such inputs), attention received, decayed; zero
            where no key is held.
        held: (B,) how many of the N places are filled, from the front; zeros stand behind.
        far: what the far field keeps of those let go; None without one.
        even: `held` where it is the same in all rows, None where rows may differ.
    """

    owns: ClassVar[bool] = True

    kv: Tensor
    mass: Tensor
    held: Tensor
    far: State | None = None
    even: int | None = 0

    @classmethod
    def empty(cls, k: Tensor, v: Tensor, hold: Hold, far: Far | None) -> HeldKeys:
        """The state before any token of k (B, Hkv, ·, D) and v (B, Hkv, ·, V)."""
        shape = (*k.shape[:2], hold.size)
        nothing = torch.zeros(len(k), 1, dtype=torch.bool, device=k.device)
        return cls(
            k.new_zeros(*shape, k.shape[-1] + v.shape[-1]),
            k.new_zeros(shape, dtype=sums_dtype(k.dtype)),
            torch.zeros(len(k), dtype=torch.long, device=k.device),
            None if far is None else far.absorb(None, k[:, :, :1], v[:, :, :1], nothing),
        )

    def check(self, k: Tensor, v: Tensor, hold: Hold) -> None:
        """Raises ShapeError or DtypeError where k and v do not continue this state."""
        if self.kv.shape[2] != hold.size:
            raise ShapeError(
                f"the state has {self.kv.shape[2]} places, not the {hold.size} of sinks, heavy "
                "and window: it comes from other options"
            )
        batch, heads, _, width = self.kv.shape
        if (batch, heads, width) != (*k.shape[:2], k.shape[3] + v.shape[3]):
            raise ShapeError(
                f"k and v must continue the state's B={batch} rows and Hkv={heads} heads of "
                f"D + V = {width}, given {tuple(k.shape)} and {tuple(v.shape)}"
            )
        if self.kv.dtype != k.dtype:
            raise DtypeError(f"k must have the state's dtype {self.kv.dtype}, given {k.dtype}")
        # Elsewhere looking would wait for the device, and its indexing looks itself.
        if self.held.is_cpu and has_data(self.held) and len(self.held):
            least, most = self.held.aminmax()
            if least < 0 or most >= hold.size:
                raise ShapeError(
                    f"the state's held must be 0 to {hold.size - 1}, given {self.held.tolist()}"
                )


class Far(Protocol):
    """What reads the keys that are let go, in the units of exact sums."""

    def absorb(self, state: State | None, k: Tensor, v: Tensor, opened: Tensor | None) -> State:
        """The state after k (B, Hkv, n, D) and v too; opened (B, n) bool, None: all."""
        ...

    def read(self, state: State, q: Tensor) -> Partial:
        """Sums of queries q (B, H, n, D) over all that the state has absorbed."""
        ...

    def run(
        self, state: State | None, q: Tensor, k: Tensor, v: Tensor, opened: Tensor
    ) -> tuple[Partial, State]:
        """Both, token by token: queries read what came up to them; opened (B, n) bool."""
        ...


def stream(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    opened: Tensor | None,
    state: HeldKeys | None,
    hold: Hold,
    scale: float,
    far: Far | None = None,
    *,
    apart: bool = False,
    sums: bool = True,
) -> tuple[dict[str, Partial], HeldKeys]:
    """Causal attention of new tokens, as if they came one by one; see the module.

    Differentiable in q, k and v; which keys are held is fixed in the backward pass. Takes
    S/c steps of O(c·N·(D+V)) for S new tokens, N + S of them in the first.

    Args:
        q: (B, H, L, D), the queries of the last L ≤ S tokens; the others add no mass.
        k: (B, Hkv, S, D).
        v: (B, Hkv, S, V).
        opened: (B, S) bool, True = a token that counts; None: all do.
        state: what earlier tokens left, or None.
        hold: how many keys are held.
        scale: factor of the logits.
        far: what reads the keys that are let go; None: nothing does.
        apart: whether the held keys are told apart.
        sums: whether normalisers are needed, to merge parts. Without them ``den`` is 1 and
            ``log_scale`` means nothing, unless some row holds no key yet.

    Returns:
        Sums over disjoint sets of keys, (B, H, L, ·): "held" for the held keys, or apart "near"
        for the last window − c + 1 tokens and "heavy" for the others; "far" for all others if
        there is a far field. And the state.

    Raises:
        ShapeError, DtypeError: if `state` is of other sizes or of another dtype.
    """
    if state is None:
        state = HeldKeys.empty(k, v, hold, far)
    else:
        state.check(k, v, hold)
    if opened is not None and opened.shape != (len(k), k.shape[2]):
        raise ShapeError(
            f"opened must be (B={len(k)}, S={k.shape[2]}), given {tuple(opened.shape)}"
        )
    if opened is not None and bool(opened.all()):
        opened = None
    k, v = clear(k, v, Mask(key=opened))
    x = q.to(sums_dtype(q.dtype)).unflatten(1, (k.shape[1], -1))
    even = state.even if opened is None else None
    sums = sums or apart or far is not None or even is None  # uneven rows may hold no key yet
    run = _Run(hold, far, scale, k.shape[2] - q.shape[2], k.shape[3], apart, sums)
    several = k.shape[2] >= SEVERAL and not apart and (far is None or even is not None)
    if several and native.takes(q, k, v, state.kv):
        parts, state = run.by_library(x, k, v, opened, state, even)
    elif even is not None:
        parts, state = run.even(x, torch.cat([k, v], -1), state, even)
    else:
        if opened is None:
            opened = torch.ones(len(k), k.shape[2], dtype=torch.bool, device=k.device)
        parts, state = run.ragged(x, torch.cat([k, v], -1), opened, state)
    merged = {name: Partial(*(t.flatten(1, 2) for t in found)) for name, found in parts.items()}
    return merged, state


_Sums = tuple[Tensor, Tensor, Tensor]
"""Numerator (B, Hkv, G, n, V), normaliser and log scale (B, Hkv, G, n)."""


@dataclass(frozen=True)
class _Run:
    """One call of `stream`, whose first `early` tokens have no queries; D is `head_dim`."""

    hold: Hold
    far: Far | None
    scale: float
    early: int
    head_dim: int
    apart: bool
    sums: bool

    def even(
        self, x: Tensor, new: Tensor, state: HeldKeys, held: int
    ) -> tuple[dict[str, _Sums], HeldKeys]:
        """All tokens count, and rows hold as many: what is held is a prefix of the places."""
        size = self.hold.size
        kv, mass, filled = state.kv, state.mass.clone(), state.held - held
        counts = self.counts(new.shape[2], held)
        early = self.unasked(counts)
        # Split, not sliced: the gradient of a slice is as long as all tokens, for every block.
        asked = iter(_split(x, counts[early:], 3))
        pieces: list[dict[str, _Sums]] = []
        gone: list[Tensor | None] = []
        for step, (count, added) in enumerate(zip(counts, _split(new, counts, 2), strict=True)):
            last = held + count
            kv = torch.cat([kv[:, :, :held], added, kv[:, :, last:]], 2)
            if step >= early:
                own = None  # one token reads all that is held
                if count > 1 or self.apart:
                    own = torch.arange(held, last, device=x.device)[None]
                sums, weights = self.read(next(asked), kv[:, :, :last], None, own)
                mass[:, :, :last].add_(weights.sum((2, 3)))
                pieces.append(sums)
            held, away = last, None
            if held == size:
                kv, mass, away = self.let_go(kv, mass)
                held -= self.hold.block
            gone.append(away)
        found, behind = _joined(pieces), state.far
        if self.far is not None:
            found["far"], behind = self.behind(x, counts, gone, behind)
        return found, HeldKeys(kv, mass, filled + held, behind, held)

    def by_library(
        self, x: Tensor, k: Tensor, v: Tensor, opened: Tensor | None, state: HeldKeys,
        even: int | None,
    ) -> tuple[dict[str, _Sums], HeldKeys]:  # fmt: skip
        """By the C++ library."""
        hold, groups = self.hold, x.shape[1:3]
        plain = functools.partial(self.plain, even)
        num, log_scale, mass, filled, places, gone = native.attend(
            x.flatten(1, 2), k, v, opened, state.kv, state.mass, state.held, hold,
            DECAY**hold.block, self.scale, plain,
        )  # fmt: skip
        den = log_scale.new_ones(()).expand_as(log_scale)
        if even is None:
            there = ~(log_scale <= 0.5 * EMPTY_LOG_SCALE)  # NaN is a key's
            den, log_scale = there.to(den.dtype), log_scale.masked_fill(~there, EMPTY_LOG_SCALE)
        num, den, log_scale = (t.unflatten(1, groups) for t in (num, den, log_scale))
        found = {"held": (num, den, log_scale)}

        def of(origins: Tensor) -> Tensor:
            token = (origins - hold.size).clamp_min(0)
            came = torch.cat([_pick(k, token), _pick(v, token)], -1)
            old = _pick(state.kv, origins.clamp_max(hold.size - 1))
            return torch.where((origins < hold.size)[..., None], old, came)

        behind = state.far
        if self.far is not None and even is not None:
            counts, times = self.counts(k.shape[2], even), gone.shape[2]
            # Gathered at once: the gradient of each gather is as long as all tokens.
            each = iter(_split(of(gone.flatten(2)), [hold.block] * times, 2) if times else ())
            away: list[Tensor | None] = []
            for count in counts:
                even += count
                away.append(None)
                if even == hold.size:
                    even -= hold.block
                    away[-1] = next(each)
            found["far"], behind = self.behind(x, counts, away, behind)
        free = torch.arange(hold.size, device=filled.device) >= filled[:, None]
        kv = of(places).masked_fill(free[:, None, :, None], 0.0)
        return found, HeldKeys(kv, mass, filled, behind, None if even is None else int(filled[0]))

    def plain(
        self, even: int | None, opened: Tensor | None, mass: Tensor, held: Tensor, q: Tensor,
        k: Tensor, v: Tensor, kv: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Outputs (B, H, L, V) of the held keys and their log-sum-exp, by torch operations."""
        run = replace(self, far=None, apart=False, sums=True)
        state = HeldKeys(kv, mass, held, None, even)
        x, new = q.unflatten(1, (k.shape[1], -1)), torch.cat([k, v], -1)
        if even is not None:
            parts, _ = run.even(x, new, state, even)
        else:
            if opened is None:
                opened = torch.ones(len(k), k.shape[2], dtype=torch.bool, device=k.device)
            parts, _ = run.ragged(x, new, opened, state)
        num, den, log_scale = (t.flatten(1, 2) for t in parts["held"])
        none = den == 0
        whole = den.masked_fill(none, 1.0)
        lse = (log_scale + whole.log()).masked_fill(none, EMPTY_LOG_SCALE)
        return num / whole[..., None], lse

    def behind(
        self,
        x: Tensor,
        counts: list[int],
        gone: Sequence[Tensor | None],
        state: State | None,
    ) -> tuple[_Sums, State | None]:
        """What the far field adds, in one call: each block's queries, then the keys let go.

        Queries bring masked keys and keys queries of zero: twice as many tokens as the queries,
        but far fewer calls than two for every block.
        """
        assert self.far is not None
        early = self.unasked(counts)
        batch, kv_heads, groups, _, head_dim = x.shape
        width = next((t.shape[3] for t in gone if t is not None), 0)
        rows: list[Tensor] = []
        keys: list[Tensor] = []
        opened: list[bool] = []
        at: list[int] = []
        length = 0
        parts = iter(_split(x.flatten(1, 2), counts[early:], 2))
        for step, away in enumerate(gone):
            if step >= early:
                rows.append(next(parts))
                count = rows[-1].shape[2]
                keys.append(x.new_zeros(batch, kv_heads, count, width))
                opened += [False] * count
                at += range(length, length + count)
                length += count
            if away is not None:
                count = away.shape[2]
                rows.append(x.new_zeros(batch, kv_heads * groups, count, head_dim))
                keys.append(away.to(x.dtype))
                opened += [True] * count
                length += count
        if not width:
            assert state is not None
            part = self.far.read(state, rows[0] if len(rows) == 1 else torch.cat(rows, 2))
        else:
            key = torch.tensor(opened, device=x.device).expand(batch, -1)
            part, state = self.far.run(
                state, torch.cat(rows, 2), *self.halves(torch.cat(keys, 2)), key
            )
            place = torch.tensor(at, device=x.device)
            part = Partial(*(t.index_select(2, place) for t in (part.num, part.den,
                                                                part.log_scale)))  # fmt: skip
        num, den, scale = (
            t.unflatten(1, (kv_heads, groups)) for t in (part.num, part.den, part.log_scale)
        )
        return (num, den, scale), state

    def counts(self, tokens: int, held: int) -> list[int]:
        """Tokens that are taken at a time: until there are `size`, and none with queries and
        without.
        """
        found, at = [], 0
        while at < tokens:
            count = min(self.hold.size - held, (self.early if at < self.early else tokens) - at)
            found.append(count)
            at, held = at + count, held + count
            if held == self.hold.size:
                held -= self.hold.block
        return found

    def unasked(self, counts: list[int]) -> int:
        """How many of the first `counts` have no queries."""
        early = 0
        while early < len(counts) and sum(counts[:early]) < self.early:
            early += 1
        return early

    def ragged(
        self, x: Tensor, new: Tensor, opened: Tensor, state: HeldKeys
    ) -> tuple[dict[str, _Sums], HeldKeys]:
        """Each row takes the tokens that it has room for, and goes on from there."""
        tokens, size = new.shape[2], self.hold.size
        if tokens == 1:
            return self.advance(x, new, opened, opened, state)
        cursor = torch.zeros_like(state.held)
        pieces, widths = [], 0
        source = opened.new_zeros(len(opened), tokens + 1, dtype=torch.long)
        while (left := tokens - int(cursor.min())) > 0:
            span = torch.arange(min(size, left), device=x.device)
            at = cursor[:, None] + span
            there, at = at < tokens, at.clamp_max(tokens - 1)
            counts = opened.gather(1, at) & there
            # Up to the token that fills the row: later ones see what is left then.
            taken = there & (counts.cumsum(1) - counts.long() < size - state.held[:, None])
            widest = int(taken.sum(1).max())
            at, taken, counts = (t[:, :widest] for t in (at, taken, counts & taken))
            ask = at - self.early
            asking = _take(x, ask.clamp_min(0))
            sums, state = self.advance(asking, _take(new, at), counts, counts & (ask >= 0), state)
            pieces.append(sums)
            places = (span[:widest] + widths).expand_as(at)
            source = source.scatter(1, torch.where(taken, at, tokens), places)
            widths += widest
            cursor = cursor + taken.sum(1)
        source = source[:, self.early : tokens]
        found: dict[str, _Sums] = {}
        for name, (num, den, log_scale) in _joined(pieces).items():
            den, log_scale = (_take(t[..., None], source)[..., 0] for t in (den, log_scale))
            found[name] = _take(num, source), den, log_scale
        return found, state

    def advance(
        self, x: Tensor, new: Tensor, counts: Tensor, heard: Tensor, state: HeldKeys
    ) -> tuple[dict[str, _Sums], HeldKeys]:
        """Rows take those of the tokens (B, n) that count, as many as each has room for.

        The queries of tokens that are `heard` (B, n) add to the mass.
        """
        size, held = self.hold.size, state.held[:, None] + counts.cumsum(1)
        kv = _put(state.kv, torch.where(counts, held - 1, size), new)
        sums, weights = self.read(x, kv, state.far, held - 1)
        mass = state.mass + (weights * heard[:, None, None, :, None]).sum((2, 3))
        held, behind = held[:, -1], state.far
        full = held == size
        if bool(full.any()):
            less_kv, less_mass, gone = self.let_go(kv, mass)
            held = held - self.hold.block * full
            kv = torch.where(full[:, None, None, None], less_kv, kv)
            mass = torch.where(full[:, None, None], less_mass, mass)
            if self.far is not None:
                rows = full[:, None].expand(-1, self.hold.block)
                behind = self.far.absorb(behind, *self.halves(gone), rows)
        return sums, HeldKeys(kv, mass, held, behind, None)

    def read(
        self, x: Tensor, kv: Tensor, behind: State | None, own: Tensor | None
    ) -> tuple[dict[str, _Sums], Tensor]:
        """Sums of queries x (B, Hkv, G, n, D), each over the places up to its own (B or 1, n).

        Without `own` over all places of kv, without `behind` over these alone. Returns the
        weights (B, Hkv, G, n, places) too, cut off from the graph.
        """
        keys, values = self.halves(kv.to(x.dtype))
        groups = x.shape[2:4]
        logits = ((x * self.scale).flatten(2, 3) @ keys.mT).unflatten(2, groups)
        gap, allowed = None, None
        if own is not None:
            gap = own[..., None] - torch.arange(kv.shape[2], device=x.device)
            allowed = (gap >= 0)[:, None, None]
        if not self.sums:
            if allowed is not None:
                logits = logits.masked_fill(~allowed, float("-inf"))
            weights = logits.softmax(-1)
            one = weights.new_ones(()).expand(weights.shape[:-1])
            num = (weights.flatten(2, 3) @ values).unflatten(2, groups)
            return {"held": (num, one, one)}, weights.detach()
        weights, log_scale = softmax_weights(logits, allowed)
        found = {"held": weights}
        if self.apart:
            assert gap is not None
            older = (gap > self.hold.recent)[:, None, None]
            found = {
                "near": weights.masked_fill(older, 0.0),
                "heavy": weights.masked_fill(~older, 0.0),
            }
        sums: dict[str, _Sums] = {}
        for name, part in found.items():
            num = (part.flatten(2, 3) @ values).unflatten(2, groups)
            sums[name] = num, part.sum(-1), log_scale
        if self.far is not None and behind is not None:
            far = self.far.read(behind, x.flatten(1, 2))
            num, den, scale = (
                t.unflatten(1, x.shape[1:3]) for t in (far.num, far.den, far.log_scale)
            )
            sums["far"] = num, den, scale
        return sums, weights.detach()

    def let_go(self, kv: Tensor, mass: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """N keys and masses without the c least ones, and these keys and values."""
        first, block = self.hold.sinks, self.hold.block
        last = first + self.hold.heavy + block
        order = mass[..., first:last].argsort(dim=-1, stable=True) + first  # the oldest of equals
        gone, kept = order[..., :block], order[..., block:].sort(-1).values
        away = _pick(kv, gone)
        free = torch.zeros_like(away)  # what is not finite would spoil weighted sums
        kv = torch.cat([kv[:, :, :first], _pick(kv, kept), kv[:, :, last:], free], 2)
        mass = torch.cat([mass[..., :first], mass.gather(2, kept), mass[..., last:]], 2)
        return kv, F.pad(mass * DECAY**block, (0, block)), away

    def halves(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values."""
        return kv[..., : self.head_dim], kv[..., self.head_dim :]


def _joined(pieces: list[dict[str, _Sums]]) -> dict[str, _Sums]:
    """One after the other."""
    if len(pieces) == 1:
        return pieces[0]
    found: dict[str, _Sums] = {}
    for name in pieces[0]:
        num, den, log_scale = zip(*(piece[name] for piece in pieces), strict=True)
        found[name] = torch.cat(num, 3), torch.cat(den, 3), torch.cat(log_scale, 3)
    return found


def _split(t: Tensor, sizes: list[int], dim: int) -> Sequence[Tensor]:
    """The parts of t, itself where there is one: a step is few operations."""
    return [t] if len(sizes) == 1 else t.split(sizes, dim)


def _take(t: Tensor, at: Tensor) -> Tensor:
    """Tokens (dimension −2) of t (B, ..., n, ·) at (B, m), row by row."""
    index = at.reshape(len(at), *(1,) * (t.dim() - 3), -1, 1)
    return t.gather(-2, index.expand(*t.shape[:-2], -1, t.shape[-1]))


def _pick(kv: Tensor, at: Tensor) -> Tensor:
    """Places of kv (B, Hkv, N, ·) at (B, Hkv, m), head by head."""
    return kv.gather(2, at[..., None].expand(-1, -1, -1, kv.shape[-1]))


def _put(kv: Tensor, place: Tensor, rows: Tensor) -> Tensor:
    """kv (B, Hkv, N, ·) with rows (B, Hkv, m, ·) at places (B, m); at N: nowhere."""
    index = place[:, None, :, None].expand_as(rows)
    return F.pad(kv, (0, 0, 0, 1)).scatter(2, index, rows)[:, :, :-1]
