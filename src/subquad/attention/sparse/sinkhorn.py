"""Sparse Sinkhorn attention: a block of queries reads its own keys and blocks sorted to it.

    out_i = softmax(scale·q_i·[K_u, p_1 K_s(1), …, p_n K_s(n)]) [V_u, p_1 V_s(1), …, p_n V_s(n)]

u is the block of i, s(1) … s(n) the blocks of largest weight p in row u of a matrix P that is
computed from summaries of the blocks and balanced towards a permutation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad.attention.base import Absent, Capabilities, Cost, Info, Mechanism, State, Support
from subquad.attention.exact.engine import KeyValueState, clear, sums_dtype
from subquad.attention.masks import Mask
from subquad.attention.partial import Partial, merge
from subquad.attention.sparse.engine import Pattern, partial
from subquad.attention.summary.mass import open_queries, open_tokens, take
from subquad.errors import ShapeError
from subquad.kernels.block import EMPTY, SCORE_BYTES
from subquad.kernels.grouped import grouped_softmax
from subquad.kernels.transforms import again, differentiated, transformed
from subquad.options import (
    Config,
    choice_problem,
    flag_problem,
    integer_problem,
    number_problem,
)

__all__ = ["Sinkhorn", "SinkhornConfig", "SinkhornState", "balance", "choose"]

CLOSED = -1e30
"""Logit of a pair of blocks that cannot be sorted: finite, so that differences are never NaN."""
SORT_COST = 40.0
"""What a pair of blocks costs in an iteration, in FLOPs of reading that take as long."""


@dataclass(frozen=True)
class SinkhornConfig(Config):
    """Options of `Sinkhorn`.

    Args:
        block: C, tokens of a block.
        top: n, blocks sorted to each block of queries; None: one, the mixture of all blocks by
            the soft permutation.
        sort: the sorting network: "attention" (of mean queries to mean keys, no parameters),
            "bilinear" (the same with a learned D×D matrix for each head) or "linear" (a learned
            map from the mean query to a logit for every block position; needs `max_length`).
        iterations: times that rows and columns are normalised in turn; 0: rows alone.
        temperature: τ, divisor of the sorting logits.
        gumbel: add Gumbel noise to the sorting logits while training.
        hard: sorted blocks enter unweighted, the own block is not sorted in, and weights get
            their gradient straight through.
        sortcut: one row for the whole sequence: all queries read the same n sorted blocks.
    """

    mechanism: ClassVar[str] = "sinkhorn"
    sizes: ClassVar[tuple[str, ...]] = ("block",)

    block: int = 64
    top: int | None = 1
    sort: str = "attention"
    iterations: int = 8
    temperature: float = 0.75
    gumbel: bool = True
    hard: bool = False
    sortcut: bool = False

    def problems(self) -> Iterator[str]:
        yield from integer_problem("block", self.block, 1)
        if self.top is not None:
            yield from integer_problem("top", self.top, 1)
        yield from choice_problem("sort", self.sort, ("attention", "bilinear", "linear"))
        yield from integer_problem("iterations", self.iterations, 0)
        yield from number_problem("temperature", self.temperature, 0.0, open_low=True)
        for name in ("gumbel", "hard", "sortcut"):
            yield from flag_problem(name, getattr(self, name))
        for name in ("hard", "sortcut"):
            if getattr(self, name) is True and self.top is None:
                yield f"{name}=true needs a number of sorted blocks: top=none mixes all of them"
        if self.sortcut is True and self.iterations != type(self).iterations:
            yield f"iterations={self.iterations} has no meaning with sortcut=true: one row, alone"
        if self.hard is True and self.sortcut is True:
            yield "hard=true and sortcut=true exclude each other: blocks would be read twice"


def _flops(length: int, head_dim: int, value_dim: int, config: SinkhornConfig) -> float:
    blocks = -(-length // config.block)
    read = 2.0 * length * config.block * (1 + (config.top or 1)) * (head_dim + value_dim)
    if config.sortcut:
        return read + 2.0 * blocks * head_dim
    mixed = 0.0 if config.top else 2.0 * length * blocks * (head_dim + value_dim)
    turns = config.iterations + (config.top or 1)
    return read + mixed + blocks**2 * (2.0 * head_dim + SORT_COST * turns)


def _memory(length: int, head_dim: int, value_dim: int, config: SinkhornConfig) -> float:
    # Sorted keys and values before and after weighting, two outputs, the sorting matrices.
    copies = 2 * config.top if config.top and not config.sortcut else 1
    blocks = -(-length // config.block)
    rows = length * (copies * (head_dim + value_dim) + 3.0 * value_dim)
    return 4.0 * (rows + (0 if config.sortcut else (3.0 + (config.top or 1)) * blocks**2))


@dataclass(frozen=True, eq=False)
class SinkhornState(State):
    """Past keys and values, summaries of complete blocks, and what the current block was sorted.

    Args:
        past: all keys and values; grows.
        summaries: (B, Hkv, M, D) mean keys of the complete blocks before the current one; grows.
        present: (B, M) bool, blocks that have an open key.
        queries: (B, H, D) sum of the open queries behind the current block's first token.
        count: (B,) how many these are.
        k, v: (B, H, n·C, ·) sorted keys and values of the current block.
        key: (B, H, n·C) bool, which of them are read.
    """

    past: KeyValueState
    summaries: Tensor
    present: Tensor
    queries: Tensor
    count: Tensor
    k: Tensor
    v: Tensor
    key: Tensor


class Sinkhorn(Mechanism):
    """Attention to the own block and to blocks that a sorting network brings to it.

    Tokens are cut into blocks of C by position. Summaries q̄_u, k̄_w are means of a block's
    queries and keys that are not masked. With ε Gumbel noise (training only),

        R_uw = scale·q̄_u·k̄_w,   P = S((R + ε)/τ),   S = (columns ∘ rows normalised)^iterations ∘ exp

    in log space. Row u of P tells which blocks are sorted to u. ``top=none`` is the paper's soft
    permutation: one sorted block Σ_w P_uw K_w, Σ_w P_uw V_w. With n = `top` these are the n
    blocks of largest P_uw, each multiplied by its share p of what is left of the row,
    p_m = P_us(m) / (Σ_w P_uw − P_us(1) − … − P_us(m−1)), keys and values alike, so that the cost
    of reading stays linear in L. The n choices are held fixed, the weights p are not: gradients
    are the output's own, and train the projections through the sorting network. Queries read
    their own block and the sorted ones under one normaliser.

    ``hard=true`` reads the sorted blocks as they are, the own one not twice: softmax attention
    over n + 1 whole blocks, the factor 1 + p − stop(p) passing gradients on.

    **Causal.** A block reads sorted blocks before it only, all of them complete. Its row is
    known when it starts: q̄_u is the mean of the last C queries up to its first token, and rows
    are normalised alone. Balancing has no causal form worth its name: column sums would look at
    later blocks, and a doubly stochastic matrix below the diagonal is the shift to the previous
    block, whatever its logits. A block whose queries are all masked is sorted nothing; nor is
    one whose first query is not given (L < S). States keep all keys, and their summaries; a
    step reads (n + 1)·C keys, and S/C summaries where a block starts.

    ``sortcut=true`` (SortCut): one row for the sequence, from its mean query; all queries
    read the own block and the same n sorted ones.

    Masked tokens keep their place, leave the summaries and are never read; blocks without an
    open key are never sorted in. In a mixture a masked token counts as zero. Where L ≠ S
    positions are aligned to the end, and rows are normalised alone: a permutation needs as many
    blocks of queries as of keys. No length has to be a multiple of C.

    Cost O(L·n·C·(D+V)) for reading and O((L/C)²·(D + iterations + n)) for sorting; a mixture
    adds O(L²/C·(D+V)). Memory O(L·n·(D+V) + n·(L/C)²), with gradients too.

    Untrained it approximates nothing: means of blocks differ little, so that all p are small and
    what is sorted in is faint (``hard=true``: arbitrary).

    Paper: Tay et al. 2020, Sparse Sinkhorn Attention, arXiv 2002.11296, section 3.
    ``sort=linear`` is its sorting network with one layer for each head, ``sort=attention`` the
    one of sinkhorn-transformer.

    Args:
        block, top, sort, iterations, temperature, gumbel, hard, sortcut: see `SinkhornConfig`.

    Raises:
        OptionError: wrong options; ``sort=linear`` without `max_length`.
        ShapeError: for more keys than `max_length` with ``sort=linear``.
        UnsupportedError: a causal mask or a state with ``sortcut=true``.

    Example:
        >>> import torch, subquad as sq
        >>> q, k, v = (torch.randn(1, 4, 320, 16) for _ in range(3))
        >>> sq.attention(q, k, v, "sinkhorn(block=32, top=2)", causal=True).shape
        torch.Size([1, 4, 320, 16])
        >>> mech = sq.build("sinkhorn(block=32, hard=true)", head_dim=16, num_heads=4).eval()
        >>> mech.weights(q, k)[0, 0].count_nonzero(-1)[:3]  # the own block and another
        tensor([64, 64, 64])
    """

    name = "sinkhorn"
    family = "sparse"
    state_type = SinkhornState
    Config = SinkhornConfig
    config: SinkhornConfig
    sort_weight: nn.Parameter | None
    info = Info(
        summary="softmax over the own block and blocks sorted to it by a balanced matrix",
        formula="out_i = softmax(scale·q_i·[K_u, p_1 K_s(1), …]) [V_u, p_1 V_s(1), …],  s the top "
        "n of row u of P = S((R + ε)/τ),  R_uw = scale·q̄_u·k̄_w,  S = rows and columns "
        "normalised in turn",
        cost=Cost("O(L·n·C·(D+V) + (L/C)²·(D+iterations+n))", _flops, _memory),
        paper="Tay et al. 2020, Sparse Sinkhorn Attention, arXiv 2002.11296, section 3",
        limit="block ≥ L, or hard=true with top ≥ L/C − 1: softmax",
        options={
            "block": "C, tokens of a block",
            "top": "n, blocks sorted to each block of queries; none: one mixture of all blocks",
            "sort": "sorting network: attention (of mean queries to mean keys), bilinear (the same "
            "with a learned matrix) or linear (learned, from the mean query to each position)",
            "iterations": "times that rows and columns are normalised in turn; 0: rows alone",
            "temperature": "τ, divisor of the sorting logits",
            "gumbel": "add Gumbel noise to the sorting logits while training",
            "hard": "read sorted blocks unweighted, gradients of weights straight through",
            "sortcut": "all queries read the same n sorted blocks (bidirectional)",
        },
        deviations="the n sorted blocks keep apart from each other, each with its share of the row "
        "(the paper mixes all, top=none); causal rows are normalised alone and look at the last C "
        "queries, since balancing below the diagonal leaves the previous block as the only choice; "
        "rows alone where L ≠ S too; sortcut keeps the own block; summaries are means, not sums",
        sample="sinkhorn(block=8, hard=true)",
        use="where what is needed sits in few, far blocks that their mean tells apart: documents "
        "with headings, sorted or aligned sequences. Trained from scratch.",
    )

    def __init__(
        self,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **sizes: Any,
    ) -> None:
        super().__init__(device=device, dtype=dtype, **sizes)
        shapes = {"bilinear": self.head_dim}
        if self.config.sort == "linear":
            assert self.max_length is not None, "checked by the base class"
            shapes["linear"] = -(-self.max_length // self.config.block)
        rows = shapes.get(self.config.sort)
        weight = None
        if rows is not None:
            shape = (self.num_heads, rows, self.head_dim)
            weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.register_parameter("sort_weight", weight)
        self.reset_parameters()

    @classmethod
    def capabilities_for(cls, config: SinkhornConfig) -> Capabilities:
        cut = Absent("sortcut chooses blocks by all queries and keys: it leaks the future")
        causal: Support = cut if config.sortcut else True
        learned = config.sort != "attention"
        return Capabilities(
            causal=causal,
            prefix=Absent("blocks of a prefix would be summarised apart from the others"),
            segments=Absent("summaries mix the tokens of a block; call once for each segment"),
            window=Absent("sorted blocks come from anywhere"),
            state=cut if config.sortcut else "growing",
            read=Absent("the own block of a query moves with it"),
            partial=Absent("which blocks are read depends on all keys of the call"),
            merges=Absent("which blocks are read depends on all keys of the call"),
            approximates="softmax" if config.hard else None,
            compile=Absent("sorted blocks are read chunk by chunk, in a Python loop"),
            deterministic=Absent("Gumbel noise is drawn anew at every call while training")
            if config.gumbel
            else True,
            max_length=config.sort == "linear",
            functional=Absent("its sorting network has learned parameters") if learned else True,
            compact=Absent("blocks are cut by position: masked tokens keep their place"),
            exact_gradient=Absent("weights of sorted blocks get theirs straight through")
            if config.hard
            else True,
            reach="the own block, and earlier blocks where attention comes back to them"
            if config.hard
            else "all past tokens",
        )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The bilinear map starts as the identity, the linear one from N(0, 1/D) by the seed."""
        weight = self.sort_weight
        if weight is None or weight.is_meta:
            return
        if self.config.sort == "bilinear":
            weight.copy_(torch.eye(self.head_dim).expand_as(weight))
        else:
            generator = torch.Generator().manual_seed(self.seed)
            weight.copy_(torch.randn(weight.shape, generator=generator) * self.head_dim**-0.5)

    def reached(self, t: int, length: int) -> Iterable[int]:
        if not self.config.hard:
            return range(t + 1, length)
        return range(t + 1, min(length, (t // self.config.block + 1) * self.config.block))

    # ---- the sorting network -------------------------------------------------------------

    def sort_logits(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        """R (B, H, N, M) from summaries q (B, H, N, D) and k (B, Hkv, M, D)."""
        weight = None if self.sort_weight is None else self.sort_weight.to(q.dtype)
        if weight is not None and self.config.sort == "linear":
            return q @ weight[:, : k.shape[2]].mT
        if weight is not None:
            q = q @ weight
        grouped = q.unflatten(1, (k.shape[1], -1)) * scale
        return (grouped @ k.mT[:, :, None]).flatten(1, 2)

    def _sort(
        self,
        q: Tensor,
        k_means: Tensor,
        opened: Tensor,
        k: Tensor,
        v: Tensor,
        key: Tensor,
        scale: float,
        iterations: int,
    ) -> _Sorted:
        """What the sorting network brings to each block of queries.

        Args:
            q, k_means: summaries (B, H, N, D) and (B, Hkv, M, D).
            opened: (B, 1, N, M) bool, which blocks may be sorted where.
            k, v: (B, Hkv, M, C, ·).
            key: (B, M, C) bool.
            scale: factor of the logits.
            iterations: as in `balance`.
        """
        batch, heads, rows = q.shape[:3]
        count, size = k.shape[2:4]
        top = self.config.top
        if not count:
            return _Sorted.none(q, v, rows, (top or 1) * size)
        logits = self.sort_logits(q, k_means, scale)
        if self.training and self.config.gumbel:
            logits = logits - torch.empty_like(logits).exponential_().log()
        log_p = balance(logits / self.config.temperature, opened, iterations)
        if top is None:
            p = log_p.exp().unflatten(1, (k.shape[1], -1)).flatten(2, 3)  # (B, Hkv, G·N, M)
            k, v = ((p @ t.flatten(3)).view(batch, heads, rows, size, t.shape[-1]) for t in (k, v))
            found = opened.float() @ key[:, None].float() > 0
            return _Sorted(k, v, found.expand(batch, heads, rows, size))
        index, weight, live = choose(log_p, opened, top)
        if self.config.hard:
            weight = weight - weight.detach() + 1
        flat, weight = index.flatten(2), weight.flatten(2)[..., None]
        shape = batch, heads, rows, top * size
        k, v = ((take(t.flatten(3), flat) * weight).view(*shape, t.shape[-1]) for t in (k, v))
        at = torch.arange(batch, device=key.device)[:, None, None]
        found = key[at, flat].view(batch, heads, rows, top, size) & live[..., None]
        return _Sorted(k, v, found.flatten(3))

    # ---- attention -----------------------------------------------------------------------

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
        self._check_length(k.shape[2])
        opened = open_queries(mask, q, k.shape[2])
        k, v = clear(k, v, mask)
        if mask.causal:
            return self._causal(q, KeyValueState(k, v, mask.key), opened, None, scale)[0]
        given, dtype, block = q.dtype, sums_dtype(q.dtype), self.config.block
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        offset = k.shape[2] - q.shape[2]
        front, cut = offset % block, self.config.sortcut
        key = open_tokens(mask.key, len(k), k.shape[2], k.device)
        means, present = block_means(k, key, block)
        # With sortcut all queries are one block.
        rows = block_means(q, opened, q.shape[2]) if cut else block_means(q, opened, block, front)
        pairs = rows[1][:, None, :, None] & present[:, None, None]
        if self.config.hard:
            own = torch.arange(pairs.shape[2], device=k.device) + offset // block
            pairs = pairs & (own[:, None] != torch.arange(pairs.shape[3], device=k.device))
        # Balancing one row against many columns would make all of its entries equal.
        iterations = 0 if cut or offset else self.config.iterations
        far = self._sort(
            rows[0], means, pairs, blocks(k, block), blocks(v, block), token_blocks(key, block),
            scale, iterations,
        )  # fmt: skip
        near = partial(q, k, v, Mask(key=mask.key), Pattern(0, 0, block=block), scale, cleared=True)
        return merge([near, far.read(q, block, front, scale)]).to(given)

    def _prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: SinkhornState | None,
        key_mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, State]:
        past = KeyValueState.extend(None if state is None else state.past, k, v, key_mask)
        self._check_length(past.k.shape[2])
        opened = open_queries(Mask(key=key_mask), q, k.shape[2])
        return self._causal(q, past, opened, state, scale)

    def _causal(
        self,
        q: Tensor,
        past: KeyValueState,
        opened: Tensor,
        state: SinkhornState | None,
        scale: float,
    ) -> tuple[Tensor, SinkhornState]:
        """The causal form over all keys of `past`; the queries are aligned to their end.

        Args:
            past: keys of `state`, if any, and of the queries.
            opened: (B, L) bool, queries that count in summaries.
            state: before these queries.
        """
        given, dtype, block = q.dtype, sums_dtype(q.dtype), self.config.block
        q, keys = q.to(dtype), past.k.shape[2]
        offset = keys - q.shape[2]
        front = offset % block
        # Blocks of the first and of the last query, and the first that starts at a query.
        first, last, fresh = offset // block, (keys - 1) // block, -(-offset // block)
        rows = last + 1 - fresh

        # Window u holds the queries from the second one of block u − 1 to the first of block u.
        sums, counts = block_sums(q, opened, block, (front - 1) % block)
        if state is not None:
            sums = torch.cat([sums[:, :, :1] + state.queries[:, :, None], sums[:, :, 1:]], 2)
            counts = torch.cat([counts[:, :1] + state.count[:, None], counts[:, 1:]], 1)
        sums, counts = F.pad(sums, (0, 0, 0, 1)), F.pad(counts, (0, 1))

        means, present = self._summaries(past, last, state, dtype)
        parts = []
        if first < fresh:  # a block that began before these queries
            held = None if state is None else _Sorted(state.k, state.v, state.key).map(_as_row)
            slots = (self.config.top or 1) * block
            parts.append(held or _Sorted.none(q, past.v, 1, slots))
        if rows:
            number = torch.arange(last + 1, device=q.device)
            earlier = number[:last] < torch.arange(fresh, last + 1, device=q.device)[:, None]
            whole = slice(0, last * block)
            k, v = (blocks(t[:, :, whole].to(dtype), block) for t in (past.k, past.v))
            key = open_tokens(past.key, len(q), keys, q.device)[:, whole]
            pairs = (counts[:, :rows] > 0)[:, None, :, None] & present[:, None, None] & earlier
            windows = _mean(sums[:, :, :rows], counts[:, :rows])
            cut = token_blocks(key, block)
            parts.append(self._sort(windows, means, pairs, k, v, cut, scale, 0))
        far = _Sorted.cat(parts)
        tail = slice(max(first, 0) * block, keys)
        k, v = past.k[:, :, tail].to(dtype), past.v[:, :, tail].to(dtype)
        mask = Mask(causal=True, key=None if past.key is None else past.key[:, tail])
        near = partial(q, k, v, mask, Pattern(0, 0, block=block), scale, cleared=True)
        out = merge([near, far.read(q, block, front, scale)]).to(given)
        current = far.map(lambda t: t[:, :, -1].clone())
        new = SinkhornState(
            past, means, present, sums[:, :, rows].clone(), counts[:, rows].clone(),
            current.k, current.v, current.key,
        )  # fmt: skip
        return out, new

    def _summaries(
        self, past: KeyValueState, count: int, state: SinkhornState | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Mean keys (B, Hkv, M, D) of the first M = `count` blocks, and (B, M) which have one."""
        block = self.config.block
        known = 0 if state is None else state.summaries.shape[2]
        if state is not None and known == count:
            return state.summaries, state.present
        new = slice(known * block, count * block)
        k = past.k[:, :, new].to(dtype)
        key = None if past.key is None else past.key[:, new]
        means, present = block_means(k, open_tokens(key, len(k), k.shape[2], k.device), block)
        if state is None:
            return means, present
        return torch.cat([state.summaries, means], 2), torch.cat([state.present, present], 1)

    def _check_length(self, keys: int) -> None:
        if self.config.sort == "linear" and self.max_length is not None and keys > self.max_length:
            raise ShapeError(
                f"sinkhorn: k has length S={keys}, longer than max_length={self.max_length}, which "
                "sort=linear has positions for; build it with a larger one, or sort=attention"
            )


@dataclass(frozen=True, eq=False)
class _Sorted:
    """Sorted keys and values (B, H, N, R, ·) of N blocks of queries, and which of them are read.

    N = 1 may serve all blocks of queries.
    """

    k: Tensor
    v: Tensor
    key: Tensor

    @classmethod
    def none(cls, q: Tensor, v: Tensor, rows: int, slots: int) -> _Sorted:
        """Nothing is sorted to `rows` blocks; q (B, H, ·, D) and v (…, V) tell the widths."""
        shape = *q.shape[:2], rows, slots
        k = q.new_zeros(*shape, q.shape[-1])
        return cls(k, q.new_zeros(*shape, v.shape[-1]), k.new_zeros(shape, dtype=torch.bool))

    @classmethod
    def cat(cls, parts: list[_Sorted]) -> _Sorted:
        """One behind the other."""
        if len(parts) == 1:
            return parts[0]
        k, v, key = zip(*((part.k, part.v, part.key) for part in parts), strict=True)
        return cls(torch.cat(k, 2), torch.cat(v, 2), torch.cat(key, 2))

    def map(self, function: Callable[[Tensor], Tensor]) -> _Sorted:
        """`function` of each tensor."""
        return _Sorted(function(self.k), function(self.v), function(self.key))

    def read(self, q: Tensor, block: int, front: int, scale: float) -> Partial:
        """Attention of q (B, H, L, D), whose first block lacks its first `front` queries."""
        length, rows, slots = q.shape[2], *self.k.shape[2:4]
        count = -(-(front + length) // block)
        place = torch.arange(count * block, device=q.device) - front
        place = place.masked_fill(place >= length, -1).clamp_min(-1).view(count, block)
        listed = torch.arange(rows * slots, device=q.device).view(rows, slots).expand(count, slots)
        shape = q.shape[0] * q.shape[1], 1
        k, v = (t.flatten(2, 3).flatten(0, 1)[:, None] for t in (self.k, self.v))
        out, lse = grouped_softmax(
            q.flatten(0, 1)[:, None], k, v, place.expand(*shape, count, block),
            listed.expand(*shape, count, slots), scale=scale, key=self.key.flatten(2).flatten(0, 1),
        )  # fmt: skip
        here = slice(front, front + length)
        out = out.view(*q.shape[:2], count * block, -1)[:, :, here]
        lse = lse.view(*q.shape[:2], count * block)[:, :, here]
        return Partial(out, (lse.detach() != EMPTY).to(lse.dtype), lse)


class _Balance(torch.autograd.Function):
    """`balance` by potentials: log P = R − f − g, f_u = lse_w(R − g), g_w = lse_u(R − f) in turn.

    What is kept for the backward pass are the potentials of all iterations; the matrices are
    computed again from them, O(N·M) memory whatever the number of iterations. A few heads are
    balanced at a time, whose matrices stay in the cache.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, opened: Tensor, iterations: int) -> Tensor:
        x = torch.where(opened, logits, CLOSED).flatten(0, 1)
        heads = (*logits.shape[:2], -1, -1)
        row, column = (t.expand(heads).flatten(0, 1) for t in _lost(opened))
        step, turns = _heads_at_once(x), 2 * iterations or 1
        parts = zip(x.split(step), row.split(step), column.split(step), strict=True)
        found = [_potentials(*part, turns) for part in parts]
        potentials = [torch.cat(part) for part in zip(*found, strict=True)]
        ctx.save_for_backward(logits, opened, *potentials)
        ctx.iterations = iterations
        x = x - potentials[-1]
        x = x.sub_(potentials[-2]) if iterations else x
        return torch.where(opened, x.view(logits.shape), CLOSED)

    @staticmethod
    def backward(ctx: Any, bar: Tensor) -> tuple[Tensor | None, ...]:
        logits, opened, *potentials = ctx.saved_tensors
        if differentiated():

            def run(logits: Tensor) -> tuple[Tensor]:
                return (_balance(logits, opened, ctx.iterations),)

            return *again(run, (logits,), ctx.needs_input_grad[:1], (bar,)), None, None
        x = torch.where(opened, logits, CLOSED).flatten(0, 1)
        x_bar = bar.masked_fill(~opened, 0.0).contiguous()  # changed through views
        step = _heads_at_once(x)
        parts = zip(*(t.split(step) for t in (x_bar.flatten(0, 1), x, *potentials)), strict=True)
        for part in parts:
            _balance_backward(*part)
        return x_bar, None, None


def _lost(opened: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns without an open pair."""
    return ~opened.any(-1, keepdim=True), ~opened.any(-2, keepdim=True)


def _balance(logits: Tensor, opened: Tensor, iterations: int) -> Tensor:
    """`balance` by differentiable operations alone: O(N·M) memory an iteration."""
    x, lost = torch.where(opened, logits, CLOSED), _lost(opened)
    for turn in range(2 * iterations or 1):
        sums = x.logsumexp((-1, -2)[turn % 2], keepdim=True)
        x = x - sums.masked_fill(lost[turn % 2], 0.0)
    return torch.where(opened, x, CLOSED)


def _heads_at_once(x: Tensor) -> int:
    return max(1, SCORE_BYTES // (x[0].numel() * x.element_size()))


def _potentials(x: Tensor, no_row: Tensor, no_column: Tensor, turns: int) -> list[Tensor]:
    """f and g in turn; zero where a row or column is closed."""
    found: list[Tensor] = []
    for turn in range(turns):
        dim, lost = ((-1, no_row), (-2, no_column))[turn % 2]
        left = x - found[-1] if found else x
        found.append(left.logsumexp(dim, keepdim=True).masked_fill_(lost, 0.0))
    return found


def _balance_backward(x_bar: Tensor, x: Tensor, *potentials: Tensor) -> None:
    """Turns the gradient of x − f − g with respect to x, given f and g, into that of all of it."""
    sides = -x_bar.sum(-1, keepdim=True), -x_bar.sum(-2, keepdim=True)
    bar = sides[(len(potentials) - 1) % 2]  # of the last potential
    direct = sides[len(potentials) % 2]  # of the last but one
    # Each potential is a log-sum-exp given the one before it: its weights are a softmax.
    for turn in reversed(range(len(potentials))):
        weight = x - potentials[turn]
        if turn:
            weight.sub_(potentials[turn - 1])
        weight.exp_().mul_(bar)
        x_bar.add_(weight)
        bar = direct - weight.sum(-2 if turn % 2 == 0 else -1, keepdim=True)
        direct = torch.zeros_like(sides[turn % 2])


def balance(logits: Tensor, opened: Tensor, iterations: int) -> Tensor:
    """log of the matrix exp(logits) whose rows and columns are normalised in turn.

    Rows first, then columns, `iterations` times; rows alone for 0. Differentiable in `logits`,
    O(N·M) an iteration.

    Args:
        logits: (B, H, N, M).
        opened: (B or 1, 1 or H, N, M) bool; other pairs count as zero.
        iterations: see above.

    Returns:
        (B, H, N, M), −1e30 where `opened` is False.
    """
    if transformed():
        return _balance(logits, opened, iterations)
    found: Tensor = _Balance.apply(logits, opened, iterations)  # type: ignore[no-untyped-call]  # torch's
    return found


def choose(log_p: Tensor, opened: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` largest entries of each row, and their shares of what is left of the row.

    Args:
        log_p: (B, H, N, M) as `balance` gives it.
        opened: as there.
        count: n, which may exceed M.

    Returns:
        index, weight and live (B, H, N, n): columns (held fixed), shares in (0, 1], and False
        where no open column was left. Cost O(n·N·M).
    """
    opened = opened.expand(log_p.shape)
    found = []
    for _ in range(count):
        share = log_p.masked_fill(~opened, CLOSED).softmax(-1)
        best = share.detach().argmax(-1, keepdim=True)
        found.append((best, share.gather(-1, best), opened.gather(-1, best)))
        opened = opened.scatter(-1, best, False)
    index, weight, live = (torch.cat(part, -1) for part in zip(*found, strict=True))
    return index, weight, live


def blocks(x: Tensor, block: int, front: int = 0) -> Tensor:
    """(B, h, n, ·) cut into blocks (B, h, N, C, ·), zeros for the `front` places before x."""
    back = -(front + x.shape[2]) % block
    padded = F.pad(x, (0, 0, front, back)) if front or back else x  # no padding would copy too
    return padded.unflatten(2, (-1, block))


def token_blocks(opened: Tensor, block: int, front: int = 0) -> Tensor:
    """(B, n) bool cut into blocks (B, N, C), False at places beyond the tokens."""
    return blocks(opened[:, None, :, None], block, front)[:, 0, ..., 0]


def block_sums(x: Tensor, opened: Tensor, block: int, front: int = 0) -> tuple[Tensor, Tensor]:
    """Sums (B, h, N, D) of the open tokens of each block, and how many (B, N) there are."""
    x = x.masked_fill(~opened[:, None, :, None], 0.0)
    return blocks(x, block, front).sum(3), token_blocks(opened, block, front).sum(-1)


def block_means(x: Tensor, opened: Tensor, block: int, front: int = 0) -> tuple[Tensor, Tensor]:
    """Means (B, h, N, D) of the open tokens of each block, and (B, N) which have any."""
    sums, counts = block_sums(x, opened, block, front)
    return _mean(sums, counts), counts > 0


def _mean(sums: Tensor, counts: Tensor) -> Tensor:
    return sums / counts.clamp_min(1)[:, None, :, None]


def _as_row(t: Tensor) -> Tensor:
    return t[:, :, None]
