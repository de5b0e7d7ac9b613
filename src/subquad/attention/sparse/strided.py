"""Strided attention: every s-th key, alone or with the near ones; and columns of blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from subquad.attention.base import Absent, Capabilities, Cost, Info, Mechanism, State, Support
from subquad.attention.exact.engine import (
    KeyValueState,
    as_partial,
    clear,
    softmax_sums,
    sums_dtype,
)
from subquad.attention.masks import Mask
from subquad.attention.partial import Partial, combine
from subquad.attention.sparse.engine import Pattern, attend, computed_keys, partial
from subquad.kernels.block import UNBOUNDED
from subquad.options import Config, choice_problem, integer_problem

__all__ = ["Strided", "StridedConfig"]

PATTERNS = ("sparse", "every", "fixed")


@dataclass(frozen=True)
class StridedConfig(Config):
    """Options of `Strided`.

    Args:
        pattern: ``"sparse"``: the nearest keys and every s-th key; ``"every"``: every s-th
            key alone; ``"fixed"``: the own block of s keys and the last columns of others.
        stride: s, distance between two keys, and the near keys' reach; or the block's size.
        reach: farthest key on each side, in strides: n ≤ reach. None: all, O(L²/s).
        columns: c, keys of every block that all blocks read; for ``"fixed"`` alone.
    """

    mechanism: ClassVar[str] = "strided"

    pattern: str = "sparse"
    stride: int = 128
    reach: int | None = 512
    columns: int = 8

    def problems(self) -> Iterator[str]:
        yield from choice_problem("pattern", self.pattern, PATTERNS)
        problems = list(integer_problem("stride", self.stride, 1))
        if self.reach is not None:
            yield from integer_problem("reach", self.reach, 0)
        problems += integer_problem("columns", self.columns, 1)
        yield from problems
        if not problems and self.pattern == "fixed" and self.columns > self.stride:
            yield f"columns={self.columns} must be ≤ stride={self.stride}, the size of a block"
        if self.pattern != "fixed" and self.columns != 8:
            yield f"columns={self.columns!r} is of pattern=fixed alone, given {self.pattern}"


def _flops(length: int, head_dim: int, value_dim: int, config: StridedConfig) -> float:
    steps = 1.0 * length / config.stride  # as real numbers: a cost has no jumps
    far = 2 * steps if config.reach is None else min(2.0 * config.reach, 2 * steps)
    far -= far * far / (4 * steps)  # a span of `far` strides around a query is cut at the ends
    if config.pattern == "fixed":
        return 2.0 * length * (config.stride + far * config.columns) * (head_dim + value_dim)
    # Residue classes are computed in blocks of queries, with the keys that any of them reads.
    keys = min(far + computed_keys(0, 0), steps)
    if config.pattern == "sparse":
        keys += computed_keys(config.stride - 1, config.stride - 1)
    return 2.0 * length * keys * (head_dim + value_dim)


def _memory(length: int, head_dim: int, value_dim: int, config: StridedConfig) -> float:
    if config.pattern == "every":  # inputs and output in another order, the log-sum-exp
        return 4.0 * length * (2 * (head_dim + value_dim) + 1)
    # two outputs, their log-sum-exps and their sum; inputs in another order
    return 4.0 * length * (2 * head_dim + 5 * value_dim + 3)


class Strided(Mechanism):
    """Softmax attention over keys at regular distances.

        out_i = Σ_{j ∈ N(i)} exp(scale·q_i·k_j) v_j / Σ_{j ∈ N(i)} exp(scale·q_i·k_j)

    with p = i + S − L (positions are aligned to the end where L ≠ S, as everywhere), stride s,
    0 ≤ n ≤ reach, and j on both sides of p unless the call is causal:

        every    N(i) = {j : |p − j| = s·n}
        sparse   N(i) = {j : |p − j| < s} ∪ {j : |p − j| = s·n}
        fixed    N(i) = {j : ⌊j/s⌋ = ⌊p/s⌋} ∪ {j : j mod s ≥ s − c, |⌊j/s⌋ − ⌊p/s⌋| ≤ reach}

    A key in both sets counts once. *every* leaves a gap of s − 1 keys between two it reads: a
    query never reads another residue class modulo s, in however many layers; mix it with
    other patterns. *sparse* and *fixed* are the Sparse Transformer's two patterns: two layers
    connect any two tokens. Causal *fixed* reads whole columns of earlier blocks, and of its
    own block what has been. Blocks are counted from key 0.

    Parts run on the block engine and merge: tokens of a residue class are regrouped to be
    neighbours, and columns are gathered; nothing of size L×S exists.

    Cost: 2·L·R·(D+V) FLOPs with R = 3s + r keys for *sparse*, r for *every* and s + c·r for
    *fixed*, r the strides in reach on both sides, at most L/s. With the default reach of 512
    strides (65,536 tokens to each side) the cost is linear in L beyond that reach; with
    ``reach=none`` it is O(L²/s), or O(L^{3/2}) for a stride that you choose as √L.

    Decoding keeps past keys, at most those in reach; a step compares its query with
    the keys of the pattern alone.

    Paper: Child et al. 2019, arXiv 1904.10509, §4.2: *strided* (here ``sparse``; its window
    of l + 1 keys with key p − l in both sets is the same union) and *fixed*.

    Args:
        pattern: ``"sparse"``, ``"every"`` or ``"fixed"``.
        stride: s (in the paper l).
        reach: in strides, None for all.
        columns: c.

    See `Mechanism` for sizes, shapes and what is raised.

    Example:
        >>> import torch, subquad as sq
        >>> q, k, v = (torch.randn(1, 8, 1000, 64) for _ in range(3))
        >>> sq.build("strided", head_dim=64, num_heads=8)(q, k, v, causal=True).shape
        torch.Size([1, 8, 1000, 64])
        >>> every = sq.build("strided(pattern=every, stride=3)", head_dim=64, num_heads=8)
        >>> every.weights(q[:, :, :8], k[:, :, :8], rows=[5])[0, 0].ne(0).int()
        tensor([[0, 0, 1, 0, 0, 1, 0, 0]], dtype=torch.int32)
        >>> sparse = sq.build("strided(stride=3)", head_dim=64, num_heads=8)
        >>> sparse.weights(q[:, :, :8], k[:, :, :8], rows=[7], causal=True)[0, 0].ne(0).int()
        tensor([[0, 1, 0, 0, 1, 1, 1, 1]], dtype=torch.int32)
    """

    name = "strided"
    family = "sparse"
    state_type = KeyValueState
    Config = StridedConfig
    config: StridedConfig
    info = Info(
        summary="softmax attention over every s-th key, with the near ones or columns of blocks",
        formula="out_i = Σ_{j ∈ N(i)} exp(scale·q_i·k_j) v_j / Σ_{j ∈ N(i)} exp(scale·q_i·k_j),  "
        "sparse: N(i) = {|p_i − j| < s} ∪ {|p_i − j| = s·n};  every: the second set;  "
        "fixed: own block ∪ last c columns of every block",
        cost=Cost("O(L·(s + min(reach, L/s))·(D+V))", _flops, _memory),
        paper="Child et al. 2019, arXiv 1904.10509, §4.2 (sparse: 'strided', fixed: 'fixed')",
        limit="sparse, stride ≥ L, or any pattern but every with stride 1 and reach none: softmax",
        options={
            "pattern": "sparse: near keys and every s-th; every: every s-th; fixed: own block and "
            "columns",
            "stride": "s, distance between keys and reach of the near ones, or size of a block",
            "reach": "farthest key on each side, in strides; none: all",
            "columns": "c, keys of every block that all blocks read (fixed alone)",
        },
        deviations="one softmax over the union of both sets, as the paper's merged head; all heads "
        "read the same columns; a bidirectional form and a bounded reach are added",
        sample="strided(stride=7)",
        use="images as sequences, music, tables: data whose period is the stride.",
    )

    @classmethod
    def capabilities_for(cls, config: StridedConfig) -> Capabilities:
        fixed = config.pattern == "fixed"
        reach = "" if config.reach is None else f", {config.reach} strides back at most"
        return Capabilities(
            prefix=Absent("a prefix would be read from beyond the pattern"),
            segments=True,
            window=Absent("the pattern counts whole blocks") if fixed else True,
            state="growing",
            read=True
            if config.reach is None
            else Absent("keys beyond the reach of the next token are gone; reach=none keeps them"),
            partial=True,
            approximates="softmax",
            compact=Absent("masked tokens keep their place in the pattern"),
            reach={
                "every": "every stride-th past token",
                "sparse": "the last stride tokens and every stride-th before",
                "fixed": "its block so far and the last columns of earlier blocks",
            }[config.pattern]
            + reach,
        )

    @classmethod
    def answers_alone_for(cls, config: StridedConfig) -> Support:
        return Absent("a query's place is counted from the last one of the call")

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        """The disjoint parts that are read."""
        config = self.config
        far = UNBOUNDED if config.reach is None else config.reach
        if config.pattern == "every":
            return (Pattern(far, far, config.stride),)
        if config.pattern == "sparse":
            near = config.stride - 1
            return (Pattern(near, near), Pattern(far, far, config.stride, skip=1))
        return (
            Pattern(0, 0, block=config.stride),
            Pattern(far, far, block=config.stride, skip=1, width=config.columns),
        )

    def reached(self, t: int, length: int) -> Iterable[int]:
        config, s = self.config, self.config.stride
        far = length if config.reach is None else config.reach
        if config.pattern == "fixed":
            own = t // s
            last = own + far if t % s >= s - config.columns else own
            return range(t + 1, min(length, (last + 1) * s))
        every = range(t + s, min(length, t + far * s + 1), s)
        if config.pattern == "every":
            return every
        return sorted({*every, *range(t + 1, min(length, t + s))})

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
        if self.config.pattern == "every":
            return attend(q, k, v, mask, self.patterns[0], scale)
        return self._partial(q, k, v, mask, scale).output().to(q.dtype)

    def _partial(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Partial:
        k, v = clear(k, v, mask)
        parts = [partial(q, k, v, mask, pattern, scale, cleared=True) for pattern in self.patterns]
        return combine(parts)

    def _prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: KeyValueState | None,
        key_mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, State]:
        both = KeyValueState.extend(state, k, v, key_mask)
        queries, keys = q.shape[2], both.k.shape[2]
        index = self._past(keys - 1)
        if queries * len(index) <= keys:  # what is gathered is smaller than the cache
            out = self._few(q, both, scale)
        else:
            out = self._attend(q, both.k, both.v, Mask(causal=True, key=both.key), scale)
        return out, self._kept(both)

    def _read(self, q: Tensor, state: KeyValueState, scale: float) -> Tensor:
        return self._attend(q, state.k, state.v, Mask(key=state.key), scale)

    def _past(self, position: int) -> list[int]:
        """Keys that a causal query at this position reads."""
        config, s = self.config, self.config.stride
        far = position if config.reach is None else config.reach
        if config.pattern == "fixed":
            own = position // s
            blocks = range(max(0, own - far), own)
            columns = [b * s + j for b in blocks for j in range(s - config.columns, s)]
            return [*columns, *range(own * s, position + 1)]
        every = range(position, max(-1, position - far * s - 1), -s)
        if config.pattern == "every":
            return list(every)
        return [*range(max(0, position - s + 1), position + 1), *every[1:]]

    def _few(self, q: Tensor, state: KeyValueState, scale: float) -> Tensor:
        """Causal attention of a few last queries: their keys are gathered."""
        batch, heads, queries, _ = q.shape
        keys, kv = state.k.shape[2], state.k.shape[1]
        rows = [self._past(position) for position in range(keys - queries, keys)]
        width = max(map(len, rows))
        index = torch.tensor([[*row, *[-1] * (width - len(row))] for row in rows], device=q.device)
        allowed = (index >= 0)[None]
        flat = index.clamp_min(0).flatten()
        if state.key is not None:
            allowed = allowed & state.key[:, flat].unflatten(1, index.shape)
        dtype = sums_dtype(q.dtype)
        # Every query is a batch row of its own: (B·T, Hkv, R, ·).
        k, v = (
            t[:, :, flat].to(dtype).unflatten(2, index.shape).transpose(1, 2).flatten(0, 1)
            for t in (state.k, state.v)
        )
        rows_q = q.to(dtype).transpose(1, 2).reshape(batch * queries, kv, heads // kv, -1)
        logits = (scale * rows_q @ k.mT).flatten(1, 2)[:, :, None]
        allowed = allowed.expand(batch, -1, -1).flatten(0, 1)[:, None, None]
        out = as_partial(softmax_sums(logits, v, allowed, None)).output()
        return out[:, :, 0].unflatten(0, (batch, queries)).transpose(1, 2).to(q.dtype)

    def _kept(self, state: KeyValueState) -> KeyValueState:
        """The state without keys that no later token can read."""
        config, keys = self.config, state.k.shape[2]
        if config.reach is None:
            return state
        if config.pattern == "fixed":  # whole blocks are dropped: they are counted from key 0
            drop = (keys // config.stride - config.reach) * config.stride
        else:
            near = config.stride - 1 if config.pattern == "sparse" else 0
            drop = keys - max(near, config.reach * config.stride)
        if drop <= 0:
            return state
        key = None if state.key is None else state.key[:, drop:].clone()
        # Copies: views would keep all keys alive.
        return KeyValueState(state.k[:, :, drop:].clone(), state.v[:, :, drop:].clone(), key)
