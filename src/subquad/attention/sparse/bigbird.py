"""BigBird and Longformer: a window, global tokens and random blocks in one softmax."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.attention.base import Absent, Capabilities, Cost, Info, Mechanism, State
from subquad.attention.exact.engine import (
    KeyValueState,
    clear,
    explicit,
    fused,
    masked,
    over_queries,
    sums_dtype,
    wide,
)
from subquad.attention.masks import Mask
from subquad.attention.partial import Partial, combine
from subquad.attention.sparse.engine import Pattern, attend, computed_keys, partial
from subquad.attention.sparse.local import window_problem, window_sides
from subquad.attention.summary.engine import summary_partial
from subquad.errors import OptionError
from subquad.kernels.block import EMPTY, UNBOUNDED, Layout, block_softmax
from subquad.options import Config, choice_problem, integer_problem

__all__ = ["BigBird", "BigBirdConfig"]

ROWS = 1024
"""Queries that read global tokens at a time: these are few."""

NOWHERE = 2**40
"""A block or rank beyond every sequence: what it is compared with never reaches it."""


@dataclass(frozen=True)
class Plan:
    """What options and preset come to.

    Args:
        block: C, or None: the window counts tokens.
        left, right: reach of the window, in blocks or in tokens times the dilation.
        dilations: of all key/value heads, or of each.
        random: random blocks of a query block.
        blocks, tokens: global ones, from the start or (negative) from the end.
    """

    block: int | None
    left: int
    right: int
    dilations: tuple[int, ...]
    random: int
    blocks: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Queries that read every key."""
        return len(self.blocks) * (self.block or 0) + len(self.tokens)

    @property
    def ends(self) -> bool:
        """Whether what a query reads depends on where its row of keys ends."""
        return bool(self.random) or min((0, *self.blocks, *self.tokens)) < 0


@dataclass(frozen=True)
class BigBirdConfig(Config):
    """Options of `BigBird`. None stands for what the preset says.

    Args:
        preset: "bigbird" counts the window in blocks; "longformer" in tokens, without blocks.
        block: C, tokens of a block (bigbird: 64).
        window: bigbird: blocks around and with the query's own, odd (3), or [left, right] beside
            it. longformer: keys on each side (256), or [left, right].
        dilation: longformer: distance between two keys of the window, for all heads or a list
            with one for each key/value head.
        random: random blocks that each block of queries reads (bigbird: 3).
        global_blocks: blocks that read every key and are read by every query; negative ones
            count from the end (bigbird: [0, -1]).
        global_tokens: tokens that do, likewise (bigbird: none, longformer: [0]).
    """

    mechanism: ClassVar[str] = "bigbird"

    preset: str = "bigbird"
    block: int | None = None
    window: int | tuple[int, int] | None = None
    dilation: int | tuple[int, ...] = 1
    random: int | None = None
    global_blocks: tuple[int, ...] | None = None
    global_tokens: tuple[int, ...] | None = None

    def problems(self) -> Iterator[str]:
        yield from choice_problem("preset", self.preset, ("bigbird", "longformer"))
        if self.block is not None:
            yield from integer_problem("block", self.block, 1)
        if self.random is not None:
            yield from integer_problem("random", self.random, 0)
        if self.window is not None:
            yield from window_problem(self.window)
            odd = not isinstance(self.window, int) or self.window % 2
            if self.preset == "bigbird" and not odd:
                yield f"window={self.window!r} must be an odd number of blocks, or [left, right]"
        listed = isinstance(self.dilation, tuple | list)
        for step in self.dilation if isinstance(self.dilation, tuple | list) else (self.dilation,):
            yield from integer_problem("dilation", step, 1)
        if listed and not self.dilation:
            yield "dilation=[] must be an integer ≥ 1, or one for each key/value head"
        for name in ("global_blocks", "global_tokens"):
            value = getattr(self, name)
            if value is not None and not (
                isinstance(value, tuple | list)
                and all(isinstance(n, int) and not isinstance(n, bool) for n in value)
            ):
                yield f"{name}={value!r} must be a list of integers"
            elif value is not None and len(set(value)) < len(value):
                yield f"{name}={value!r} names one twice"
        if self.preset == "longformer":
            for name in ("block", "random", "global_blocks"):
                value = getattr(self, name)
                if value:
                    yield (
                        f"{name}={value!r} does not go with preset=longformer, whose window "
                        "counts tokens; use preset=bigbird, or name tokens in global_tokens"
                    )
        elif self.dilation != 1:
            yield f"dilation={self.dilation!r} needs a window of tokens: preset=longformer"

    @property
    def plan(self) -> Plan:
        """What options and preset come to."""
        steps = self.dilation if isinstance(self.dilation, tuple | list) else (self.dilation,)
        tokens = self.global_tokens
        if self.preset == "longformer":
            left, right = window_sides(256 if self.window is None else self.window)
            tokens = (0,) if tokens is None else tokens
            return Plan(None, left, right, tuple(steps), 0, (), tuple(tokens))
        window = 3 if self.window is None else self.window
        left, right = window_sides(window // 2 if isinstance(window, int) else window)
        return Plan(
            block=64 if self.block is None else self.block,
            left=left,
            right=right,
            dilations=(1,),
            random=3 if self.random is None else self.random,
            blocks=(0, -1) if self.global_blocks is None else tuple(self.global_blocks),
            tokens=() if tokens is None else tuple(tokens),
        )


def _flops(length: int, head_dim: int, value_dim: int, config: BigBirdConfig) -> float:
    plan = config.plan
    read = computed_keys(plan.left, plan.right, plan.block, plan.random + len(plan.blocks))
    return 2.0 * length * (read + len(plan.tokens) + plan.rows) * (head_dim + value_dim)


def _memory(length: int, head_dim: int, value_dim: int, config: BigBirdConfig) -> float:
    plan = config.plan
    floats = 1.0  # the log-sum-exp
    if plan.rows:
        floats += value_dim  # the output with the rows of global queries put in
    if plan.tokens:
        floats += 3 * value_dim  # two parts and their sum
    if plan.dilations != (1,):
        floats += 2 * (head_dim + value_dim)  # tokens in another order
    slots = (plan.random + len(plan.blocks)) / (plan.block or 1)
    return length * (4.0 * floats + 8.0 * slots)


class BigBird(Mechanism):
    """Softmax over a window, global tokens and random blocks, each key once.

        out_i = Σ_{j ∈ N(i)} exp(scale·q_i·k_j) v_j / Σ_{j ∈ N(i)} exp(scale·q_i·k_j)
        N(i) = window(i) ∪ global ∪ random(block of i);  N(i) = all keys where i is global

    BigBird cuts positions into blocks of C at multiples of C. A query reads the `window` blocks
    around its own, the global blocks and `random` further blocks, drawn for its block and
    key/value head without repetition from all that are neither in the window nor global. With
    fewer blocks than that, all are read: exact softmax, by the same computation.

    Longformer (``preset=longformer``) has a window in tokens, exact to the token, dilated by
    `dilation` (one for each key/value head if you like), and global tokens. It has projections
    of its own for global attention: these lie outside of q, k and v.

    Global tokens and blocks may be counted from the end (negative). The end, and the number of
    blocks to draw from, is a row's own: the last key that its mask opens, so that padding on
    the right changes nothing.

    Causal (neither paper has it): the window has a left side only, random blocks come from the
    past and are drawn for a block whatever the length, global queries read all of their past,
    and what is counted from the end is not global. Whole = prefill + steps; the state keeps
    all keys and values, because a later block may draw any of them.

    Positions are aligned to the end where L ≠ S. No length has to be a multiple of anything,
    and there is no length at which another computation takes over.

    Cost: 2·L·R·(D+V) FLOPs with R = C·(window + random + global blocks) keys a query, or
    left + right + 64 + global tokens, and 2·g·S·(D+V) for g global queries; O(L·V) memory
    beyond inputs and output, forward and backward.

    Papers: Zaheer et al. 2020, arXiv 2007.14062, §2 (window, global and random blocks; its
    internal transformer construction, ITC, is the default; `global_tokens` are read and read
    everything as the tokens that ETC adds, but are tokens of the sequence); Beltagy et al.
    2020, arXiv 2004.05150, §3.1.

    Args:
        preset, block, window, dilation, random, global_blocks, global_tokens: see
            `BigBirdConfig`.

    Raises:
        OptionError: wrong options, all problems at once; a list of dilations whose length is
            not the number of key/value heads.

    See `Mechanism` for sizes, shapes and what else is raised.

    Example:
        >>> import torch, subquad as sq
        >>> q, k, v = (torch.randn(1, 8, 1000, 64) for _ in range(3))
        >>> mech = sq.build("bigbird(block=32)", head_dim=64, num_heads=8)
        >>> mech(q, k, v).shape
        torch.Size([1, 8, 1000, 64])
        >>> mech.random_blocks(torch.tensor([9]), torch.tensor([32]))[0, 0, 0]
        tensor([11, 27, 28])
        >>> mech = sq.build("bigbird(preset=longformer, window=2)", head_dim=64, num_heads=8)
        >>> mech.weights(q[:, :, :7], k[:, :, :7])[0, 0].count_nonzero(-1)
        tensor([7, 4, 5, 6, 6, 5, 4])
    """

    name = "bigbird"
    family = "sparse"
    state_type = KeyValueState
    Config = BigBirdConfig
    config: BigBirdConfig
    random_seed: Tensor
    info = Info(
        summary="softmax over a window, global tokens and random blocks; preset for Longformer",
        formula="out_i = Σ_{j ∈ N(i)} exp(scale·q_i·k_j) v_j / Σ_{j ∈ N(i)} exp(scale·q_i·k_j),  "
        "N(i) = window ∪ global ∪ random blocks; all keys where i is global",
        cost=Cost("O(L·C·(window + random + global)·(D+V))", _flops, _memory),
        paper="Zaheer et al. 2020, arXiv 2007.14062, §2; Beltagy et al. 2020, arXiv 2004.05150, "
        "§3.1",
        limit="window, random and global blocks cover all blocks: softmax",
        options={
            "preset": "bigbird (windows in blocks) or longformer (windows in tokens)",
            "block": "C, tokens of a block; 64",
            "window": "blocks with the query's own, odd, or [left, right]; 3. longformer: tokens "
            "on each side, or [left, right]; 256",
            "dilation": "longformer: distance between keys of the window, for all heads or each",
            "random": "random blocks of each query block; 3. longformer: none",
            "global_blocks": "blocks that read and are read by all, negative from the end; [0, -1]",
            "global_tokens": "tokens that read and are read by all; longformer: [0]",
        },
        deviations="papers and packages need lengths that the block divides and turn to full "
        "attention for short ones; the causal form is ours; Longformer's separate projections "
        "for global attention are not part of q, k, v: global tokens use the same",
        sample="bigbird(block=4, random=1)",
        use="long documents: near text, a few global tokens, and random links that shorten the "
        "way between any two tokens. preset=longformer for models trained with that.",
    )

    def __init__(
        self,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **sizes: Any,
    ) -> None:
        super().__init__(device=device, dtype=dtype, **sizes)
        self.plan = self.config.plan
        steps = self.plan.dilations
        if len(steps) not in (1, self.num_kv_heads) or (
            not isinstance(self.config.dilation, int) and len(steps) != self.num_kv_heads
        ):
            raise OptionError(
                f"bigbird: dilation={list(steps)} must be an integer, or one for each of "
                f"num_kv_heads={self.num_kv_heads} key/value heads"
            )
        self.register_buffer("random_seed", torch.zeros((), dtype=torch.int64, device=device))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Takes the random blocks from `seed` again."""
        self.random_seed.fill_(self.seed % 2**63)

    @classmethod
    def capabilities_for(cls, config: BigBirdConfig) -> Capabilities:
        plan = config.plan
        moving = Absent(
            "random blocks, and what is global from the end, depend on where the keys end"
        )
        reach = "the window"
        reach += " and random blocks" if plan.random else ""
        reach += "; a global token reaches, and reads, everything"
        return Capabilities(
            prefix=Absent("keys of a prefix would be read from beyond window and blocks"),
            segments=Absent("global tokens and blocks are those of one sequence in a row"),
            window=Absent("the window is an option; global and random blocks lie beyond it"),
            state="growing",
            partial=moving if plan.ends else True,
            approximates="softmax",
            compact=Absent("masked tokens keep their place in window and blocks"),
            read=Absent("the place of a query among the keys decides what it reads"),
            reach=reach,
        )

    # ---- which keys are read -------------------------------------------------------------

    def random_blocks(self, own: Tensor, count: Tensor, *, causal: bool = False) -> Tensor:
        """The random key blocks of query blocks.

        Drawn uniformly without repetition from the blocks that are neither in the window nor
        global; causal from those before the window alone. A function of the seed, key/value
        head, block and number of blocks (causal: not of that), by a counter-based hash: the
        same on every device. May be replaced on an instance, to bring other random blocks.

        Args:
            own: (n,) positions of query blocks, in blocks; may go beyond the last one.
            count: (P,) blocks in each row of keys.
            causal: whether only past blocks are drawn.

        Returns:
            (P, Hkv, n, random) blocks, −1 where there are no more.
        """
        plan, device = self.plan, own.device
        shape = (len(count), self.num_kv_heads, own.shape[0])
        limit = own - plan.left if causal else count[:, None]
        limit = limit.clamp_min(0).expand(len(count), own.shape[0])[:, None, :]  # (P, 1, n)
        taken = self._global_blocks(count, causal)[:, None].expand(-1, own.shape[0], -1)
        if not causal:
            near = torch.arange(-plan.left, plan.right + 1, device=device)
            near = (own[:, None] + near).expand(len(count), -1, -1)
            taken = torch.cat([taken, near.masked_fill(near < 0, NOWHERE)], -1)
        taken = _distinct(taken)[:, None]  # (P, 1, n, ·)
        taken = taken.masked_fill(taken >= limit[..., None], NOWHERE)
        free = limit - (taken < NOWHERE).sum(-1)
        heads = torch.arange(self.num_kv_heads, device=device)[:, None]
        stream = _mix(_mix(_mix(self.random_seed) ^ heads) ^ own)  # (Hkv, n)
        ranks: list[Tensor] = []
        for draw in range(plan.random):
            left = (free - draw).expand(shape)
            rank = (_mix(stream ^ draw) & (2**63 - 1)) % left.clamp_min(1)
            if ranks:  # the rank among those that are not drawn yet
                rank = _skip(rank, torch.stack(ranks, -1).sort(-1).values)
            ranks.append(rank.masked_fill(left <= 0, NOWHERE))
        if not ranks:
            return own.new_empty(*shape, 0)
        rank = torch.stack(ranks, -1)
        found = rank.clone()
        for block in taken.unbind(-1):
            found = found + (found >= block[..., None])
        return found.masked_fill(rank == NOWHERE, -1)

    def _global_blocks(self, count: Tensor, causal: bool, limit: int = NOWHERE) -> Tensor:
        """(P, g) global blocks < limit of rows of `count` (P,) blocks, see `_places`."""
        given = [n for n in self.plan.blocks if n >= 0 or not causal]
        return _places(given, count, limit)

    def pattern(
        self, queries: int, keys: int, *, causal: bool = False, key_mask: Tensor | None = None
    ) -> Pattern:
        """Window, global blocks as keys, and random blocks; global tokens and queries aside.

        Args:
            queries, keys: L and S.
            causal: see `Mask`.
            key_mask: (B, S): rows of the table are then those of (batch row, head) pairs.
        """
        plan = self.plan
        right = 0 if causal else plan.right
        if plan.block is None:
            return Pattern(plan.left, right, plan.dilations[0])
        own, count = self._blocks(queries, keys, causal, key_mask)
        slots = len(plan.blocks) + plan.random
        total = -(-keys // plan.block)
        # Blocks outside the window, at most; a query before the first key has none within.
        fullest = total if queries > keys else total - 1 - min(plan.left, right)
        if torch.compiler.is_compiling():  # one graph for all lengths
            fullest = slots
        if slots == 0 or fullest <= 0:
            return Pattern(plan.left, right, block=plan.block)
        blocks = self._global_blocks(count, causal, total)[:, None, None, :]  # (P, 1, 1, g)
        near = (blocks >= own[:, None] - plan.left) & (blocks <= own[:, None] + right)
        blocks = blocks.masked_fill(near | (blocks == NOWHERE), -1)  # (P, 1, n, g)
        if causal:
            blocks = blocks.masked_fill(blocks > own[:, None], -1)
        drawn = self.random_blocks(own, count, causal=causal)
        table = torch.cat([blocks.expand(-1, self.num_kv_heads, -1, -1), drawn], -1).flatten(0, 1)
        if fullest < slots:
            table = table.sort(-1, descending=True).values[..., :fullest]
        return Pattern(plan.left, right, block=plan.block, table=table)

    def _blocks(
        self, queries: int, keys: int, causal: bool, key_mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Positions of the query blocks (n,) and blocks in each row of keys (1 or B,)."""
        block = self.plan.block
        assert block is not None
        device = self.random_seed.device
        first, last = (keys - queries) // block, (keys - 1) // block
        # One more than there are: a graph for one block would not serve for others.
        own = torch.arange(first, last + 2, device=device)
        return own, (self._ends(keys, causal, key_mask) + block - 1) // block

    def _ends(self, keys: int, causal: bool, key_mask: Tensor | None) -> Tensor:
        """(1 or B,) keys of each row: up to the last open one; causal: all."""
        if causal or key_mask is None or not self.plan.ends:
            return torch.full((1,), keys, device=self.random_seed.device)
        places = torch.arange(1, keys + 1, device=key_mask.device)
        return (key_mask * places).amax(-1).clamp_min(1)

    def _token_places(self, keys: int, causal: bool, key_mask: Tensor | None) -> Tensor | None:
        """(1 or B, g) positions of global tokens, sorted, `NOWHERE` where none; None: none."""
        given = [n for n in self.plan.tokens if n >= 0 or not causal]
        return _places(given, self._ends(keys, causal, key_mask), keys) if given else None

    def _row_places(self, keys: int, causal: bool, key_mask: Tensor | None) -> Tensor | None:
        """(1 or B, g) positions of global queries, sorted, `NOWHERE` where none; None: none.

        Causal without those whose past the window covers anyway.
        """
        plan = self.plan
        given = [n for n in plan.tokens if n >= 0 or not causal]
        blocks = [n for n in plan.blocks if n >= 0 or not causal]
        if causal:
            near = max(plan.dilations) == 1
            reach = (plan.left if near else 0) if plan.block is None else plan.left
            given = [n for n in given if n // (plan.block or 1) > reach]
            blocks = [n for n in blocks if n > plan.left]
        if not given and not blocks:
            return None
        ends = self._ends(keys, causal, key_mask)
        places = _places(given, ends, keys)
        if blocks and plan.block is not None:
            counts = (ends + plan.block - 1) // plan.block
            starts = _places(blocks, counts, NOWHERE)
            inner = torch.arange(plan.block, device=ends.device)
            tokens = (starts * plan.block)[..., None] + inner
            tokens = tokens.masked_fill(starts[..., None] == NOWHERE, NOWHERE)
            places = _distinct(torch.cat([places, tokens.flatten(1)], 1))
        return places.masked_fill(places >= keys, NOWHERE)

    def reached(self, t: int, length: int) -> Iterable[int]:
        plan = self.plan
        device = self.random_seed.device
        later = torch.arange(t + 1, length, device=device)
        read = torch.full_like(later, t in plan.tokens, dtype=torch.bool)
        rows = self._row_places(length, True, None)
        if rows is not None:
            read = read | torch.isin(later, rows)
        if plan.block is None:
            for step in set(plan.dilations):
                read = read | (((later - t) % step == 0) & (later - t <= plan.left * step))
        else:
            own, other = later // plan.block, t // plan.block
            read = read | (own - other <= plan.left)
            table = self.pattern(length, length, causal=True).table
            if table is not None:
                read = read | (table == other).any(-1).any(0)[own]
        found: list[int] = later[read].tolist()
        return found

    # ---- attention -----------------------------------------------------------------------

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
        tokens = self._token_places(k.shape[2], mask.causal, mask.key)
        if tokens is None:
            out = self._heads(q, k, v, mask, scale)
        else:
            out = self._sums(q, k, v, mask, scale, tokens).output().to(v.dtype)
        places = self._row_places(k.shape[2], mask.causal, mask.key)
        if places is None:
            return out
        rows = _Rows(places, mask)
        k, v = clear(k, v, mask)
        run = functools.partial(fused, scale=scale)
        asked = rows.queries(q, k)
        batch, heads = asked.shape[:2] if wide(q, v) else (max(len(places), rows.batch), 1)
        size = batch * heads * k.shape[2] * q.element_size()
        (found,) = over_queries(functools.partial(masked, run), asked, k, v, rows, size)
        return rows.put(out, found.to(out.dtype), k.shape[2])

    def _partial(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Partial:
        tokens = self._token_places(k.shape[2], mask.causal, mask.key)
        sums = self._sums(q, k, v, mask, scale, tokens)
        places = self._row_places(k.shape[2], mask.causal, mask.key)
        if places is None:
            return sums
        rows = _Rows(places, mask)
        k, v = clear(k, v, mask)
        dtype = sums_dtype(q.dtype)
        function = functools.partial(explicit, scale=scale, dtype=dtype)
        size = 8 * q.shape[0] * q.shape[1] * k.shape[2] * dtype.itemsize
        found = over_queries(function, rows.queries(q, k), k, v, rows, size)
        keys = k.shape[2]
        return Partial(
            rows.put(sums.num, found[0], keys),
            rows.put(sums.den[..., None], found[1][..., None], keys)[..., 0],
            rows.put(sums.log_scale[..., None], found[2][..., None], keys)[..., 0],
        )

    def _sums(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, tokens: Tensor | None
    ) -> Partial:
        """Window, blocks and global tokens as keys, of all queries."""
        k, v = clear(k, v, mask)
        if tokens is None:
            return self._head_sums(q, k, v, mask, scale, mask.key)
        keys, offset = k.shape[2], k.shape[2] - q.shape[2]
        present = tokens < NOWHERE
        at = tokens.clamp_max(keys - 1).expand(len(k), -1)
        present = present.expand(len(k), -1)
        counts = torch.zeros(len(k), keys, dtype=torch.int32, device=k.device)
        own = counts.scatter_add(1, at, present.int()) == 0
        if mask.key is not None:
            present = present & mask.key.gather(1, at)
            own = own & mask.key
        part = self._head_sums(q, k, v, Mask(causal=mask.causal, key=own), scale, mask.key)
        index = at[:, None, :, None]
        marks, values = (t.gather(2, index.expand(-1, t.shape[1], -1, t.shape[3])) for t in (k, v))
        if mask.causal:
            far = summary_partial(
                q, marks, values, scale, present=present[:, None], ends=at, positions=(offset, 1)
            )
        else:
            dtype = sums_dtype(q.dtype)
            layout = Layout(
                block=ROWS, left=UNBOUNDED, right=UNBOUNDED, aligned=False, span=True,
                causal=False, offset=0,
            )  # fmt: skip
            out, lse = block_softmax(
                q.to(dtype), marks.to(dtype).masked_fill(~present[:, None, :, None], 0),
                values.to(dtype).masked_fill(~present[:, None, :, None], 0), layout, scale=scale,
                key=present, need_lse=True,
            )  # fmt: skip
            assert lse is not None
            far = Partial(out, (lse.detach() != EMPTY).to(lse.dtype), lse)
        return combine([part, far])

    def _heads(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
        """Window and blocks; heads of one dilation at a time."""
        if len(set(self.plan.dilations)) == 1:
            shape = (q.shape[2], k.shape[2])
            pattern = self.pattern(*shape, causal=mask.causal, key_mask=mask.key)
            return attend(q, k, v, mask, pattern, scale)
        found = [
            attend(*heads, mask, Pattern(self.plan.left, self.plan.right, step), scale)
            for step, heads in self._dilated(q, k, v)
        ]
        return torch.cat(found, 1)[:, self._order(q)]

    def _head_sums(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, key_mask: Tensor | None
    ) -> Partial:
        """The same as sums, of cleared k and v; `mask.key` may be narrower than the `key_mask`."""
        if len(set(self.plan.dilations)) == 1:
            shape = (q.shape[2], k.shape[2])
            pattern = self.pattern(*shape, causal=mask.causal, key_mask=key_mask)
            return partial(q, k, v, mask, pattern, scale, cleared=True)
        left, right = self.plan.left, self.plan.right
        found = [
            partial(*heads, mask, Pattern(left, right, step), scale, cleared=True)
            for step, heads in self._dilated(q, k, v)
        ]
        order = self._order(q)
        return Partial(
            torch.cat([part.num for part in found], 1)[:, order],
            torch.cat([part.den for part in found], 1)[:, order],
            torch.cat([part.log_scale for part in found], 1)[:, order],
        )

    def _dilated(
        self, q: Tensor, k: Tensor, v: Tensor
    ) -> Iterator[tuple[int, tuple[Tensor, Tensor, Tensor]]]:
        """(dilation, q, k, v of the heads that have it)."""
        grouped = q.unflatten(1, (self.num_kv_heads, -1))
        for step in sorted(set(self.plan.dilations)):
            own = [h for h, other in enumerate(self.plan.dilations) if other == step]
            yield step, (grouped[:, own].flatten(1, 2), k[:, own], v[:, own])

    def _order(self, q: Tensor) -> Tensor:
        """Where each query head is after `_dilated`."""
        steps = torch.tensor(self.plan.dilations, device=q.device)
        steps = steps.repeat_interleave(self.num_heads // self.num_kv_heads)
        return steps.argsort(stable=True).argsort()

    def _prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: KeyValueState | None,
        key_mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, State]:
        new = KeyValueState.extend(state, k, v, key_mask)
        return self._attend(q, new.k, new.v, Mask(causal=True, key=new.key), scale), new


# ---- global queries -----------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Rows:
    """Queries that read every key (causal: every past key), for `over_queries`.

    Args:
        places: (1 or B, g) their positions among the keys, `NOWHERE` where there is none.
        mask: of the call.
    """

    places: Tensor
    mask: Mask

    causal: ClassVar[bool] = False
    window: ClassVar[None] = None
    dense: ClassVar[None] = None

    @property
    def batch(self) -> int:
        return 1 if self.mask.key is None else len(self.mask.key)

    def index(self, queries: int, keys: int) -> Tensor:
        """(1 or B, g) the rows among the queries; L where the call does not hold it."""
        index = self.places - (keys - queries)
        return index.masked_fill((index < 0) | (index >= queries), queries)

    def queries(self, q: Tensor, k: Tensor) -> Tensor:
        """(B, H, g, D)."""
        at = self.index(q.shape[2], k.shape[2]).clamp_max(q.shape[2] - 1)[:, None, :, None]
        return q.gather(2, at.expand(*q.shape[:2], -1, q.shape[3]))

    def put(self, out: Tensor, rows: Tensor, keys: int) -> Tensor:
        """`out` (B, H, L, ·) with the rows in their places."""
        queries = out.shape[2]
        at = self.index(queries, keys)[:, None, :, None]
        # One more row takes what has no place.
        return F.pad(out, (0, 0, 0, 1)).scatter(2, at.expand_as(rows), rows)[:, :, :queries]

    def span(self, start: int, stop: int, queries: int, keys: int) -> tuple[int, int]:
        return 0, keys

    def rows(
        self,
        start: int,
        stop: int,
        queries: int,
        keys: int,
        *,
        span: tuple[int, int] | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        first, last = (0, keys) if span is None else span
        places = self.places[:, start:stop, None]
        if self.mask.causal:
            allowed = torch.arange(first, last, device=device) <= places
        else:
            allowed = places.new_ones(1, stop - start, last - first, dtype=torch.bool)
        if self.mask.key is not None:
            allowed = allowed & self.mask.key[:, None, first:last]
        return allowed


# ---- draws --------------------------------------------------------------------------------


def _places(given: list[int], counts: Tensor, limit: int) -> Tensor:
    """(P, g) places < limit, counted from the start or the end of rows of `counts` (P,).

    `NOWHERE` where there is none; see `_distinct`.
    """
    counts = counts[:, None]
    places = torch.tensor(given, device=counts.device, dtype=torch.int64).expand(len(counts), -1)
    places = torch.where(places < 0, places + counts, places)
    return _distinct(places.masked_fill((places < 0) | (places >= limit), NOWHERE))


def _distinct(places: Tensor) -> Tensor:
    """Sorted along the last dimension, repetitions replaced by `NOWHERE`."""
    if places.shape[-1] < 2:
        return places
    places = places.sort(-1).values
    again = F.pad(places[..., 1:] == places[..., :-1], (1, 0))
    return places.masked_fill(again, NOWHERE).sort(-1).values


def _skip(rank: Tensor, taken: Tensor) -> Tensor:
    """The rank-th (from 0) non-negative integer that is not in `taken` (…, n), sorted."""
    for other in taken.unbind(-1):
        rank = rank + (rank >= other)
    return rank


def _mix(x: Tensor) -> Tensor:
    """splitmix64 (Steele, Lea & Flood 2014): a bijection of int64 that scatters all bits."""
    x = x - 7046029254386353131
    x = (x ^ ((x >> 30) & (2**34 - 1))) * -4658895280553007687
    x = (x ^ ((x >> 27) & (2**37 - 1))) * -7723592293110705685
    return x ^ ((x >> 31) & (2**33 - 1))
