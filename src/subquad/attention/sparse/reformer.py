"""Reformer: softmax attention among tokens that a random hash puts into one bucket."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from subquad.attention.base import Absent, Capabilities, Cost, Info, Mechanism, State
from subquad.attention.exact.engine import clear, sums_dtype
from subquad.attention.masks import Mask
from subquad.attention.partial import Partial, combine
from subquad.attention.sparse.buckets import BucketState, chunk_read, cut, cut_sorted, refuse_vmap
from subquad.features.draws import draw_projection
from subquad.kernels.block import EMPTY
from subquad.kernels.grouped import CLOSED, grouped_softmax, joint_softmax, of_tokens
from subquad.options import Config, choice_problem, flag_problem, integer_problem

__all__ = ["Reformer", "ReformerConfig", "ReformerState"]

NORM_EPSILON = 1e-6
"""Added to the mean square of a query before its root is taken, as in trax and transformers."""

HASH_BYTES = 16 * 2**20
"""Bytes of one chunk of rotated vectors."""

LARGEST = 128
"""A longer list of buckets is hashed as the product of two."""

APART = 2**32
"""Distance of two buckets' numbers of chunks in a stream, which has no longest length."""


@dataclass(frozen=True)
class ReformerConfig(Config):
    """Options of `Reformer`.

    Args:
        rounds: R, hashes; a token reads what any of them finds.
        buckets: number of buckets of a hash: 1 or an even integer, or a list of even integers
            whose product it is (each has rotations of its own); None takes 2·max_length/chunk
            rounded down to a power of two, the paper's choice for n = max_length.
        chunk: C, tokens of a chunk.
        before, after: neighbouring chunks that a token reads beside its own; a causal call reads
            none after.
        shared: keys are the queries, normalised (the paper); k is then not read. False: keys are
            keys, hashed by the same rotations.
        chunks: "bucket" (each bucket is cut into chunks: causal) or "sorted" (the paper: the
            sorted sequence is cut, across buckets: bidirectional).
        own: whether a token reads itself: "last" (if it reads nothing else, the paper), "always",
            or "auto": last for shared keys, always for others.
        duplicates: what a key that several rounds find counts: "once" (the paper) or "each"
            (as often as it is found, as transformers does).
    """

    mechanism: ClassVar[str] = "reformer"
    sizes: ClassVar[tuple[str, ...]] = ("chunk",)

    rounds: int = 2
    buckets: int | tuple[int, ...] | None = 64
    chunk: int = 64
    before: int = 1
    after: int = 0
    shared: bool = True
    chunks: str = "bucket"
    own: str = "auto"
    duplicates: str = "once"

    def problems(self) -> Iterator[str]:
        for name, least in (("rounds", 1), ("chunk", 1), ("before", 0), ("after", 0)):
            yield from integer_problem(name, getattr(self, name), least)
        if self.buckets is not None and self.buckets != 1:
            several = self.buckets if isinstance(self.buckets, tuple | list) else (self.buckets,)
            even = (isinstance(n, int) and not isinstance(n, bool) for n in several)
            if not several or not all(even) or any(n < 2 or n % 2 for n in several):
                yield (
                    f"buckets={self.buckets!r} must be 1, an even integer ≥ 2, a list of even "
                    "integers, or none"
                )
        yield from flag_problem("shared", self.shared)
        yield from choice_problem("chunks", self.chunks, ("bucket", "sorted"))
        yield from choice_problem("own", self.own, ("auto", "last", "always"))
        yield from choice_problem("duplicates", self.duplicates, ("once", "each"))
        if self.chunks == "sorted" and self.shared is False:
            yield "chunks=sorted needs shared=true: queries and keys are one sorted sequence"
        if self.own == "last" and self.shared is False:
            yield "own=last needs shared=true: only there a query's own key is always its best"

    def factors(self, max_length: int | None) -> tuple[int, ...]:
        """Sizes of the hashes whose product is the number of buckets; none for one bucket."""
        if isinstance(self.buckets, int):
            return () if self.buckets == 1 else (self.buckets,)
        if self.buckets is not None:
            return tuple(self.buckets)
        assert max_length is not None, "checked when the mechanism is built"
        bits = max(1, (2 * max_length // self.chunk).bit_length() - 1)
        if 2**bits <= LARGEST:
            return (2**bits,)
        return 2 ** (bits // 2), 2 ** (bits - bits // 2)

    @property
    def last(self) -> bool:
        """Whether a token reads itself only if it reads nothing else."""
        return self.own == "last" or (self.own == "auto" and self.shared)


def _read(config: ReformerConfig) -> int:
    """Keys computed for a query."""
    return config.rounds * config.chunk * (config.before + 1 + config.after)


def _flops(length: int, head_dim: int, value_dim: int, config: ReformerConfig) -> float:
    rotated = config.rounds * sum(config.factors(length)) / 2
    groups = length
    if config.chunks == "bucket":  # the last chunk of each bucket is half full
        groups += min(length, math.prod(config.factors(length))) * config.chunk // 2
    return 2.0 * length * head_dim * rotated + 2.0 * groups * _read(config) * (head_dim + value_dim)


def _memory(length: int, head_dim: int, value_dim: int, config: ReformerConfig) -> float:
    # one round's results in groups and by token, keys, and 64-bit positions of what groups read
    keys = config.before + 1 + config.after
    return length * (4.0 * (2 * value_dim + head_dim) + 8.0 * config.rounds * (keys + 4))


@dataclass(frozen=True, eq=False)
class ReformerState(State):
    """The last (before + 1)·C keys and values of every bucket, for each round.

    Bytes: R·H·N·(before + 1)·C·(D + V) numbers a batch row, N buckets; with duplicates=once R
    integers more a key.

    Args:
        rounds: one `BucketState` each; tags are the numbers of a key's chunks in all rounds.
    """

    rounds: tuple[BucketState, ...]


@dataclass(frozen=True, eq=False)
class _Lists:
    """Who reads what: R rounds of groups, and the chunk numbers behind them.

    Args:
        queries: (R, B, H, G, C) positions, −1 = none.
        keys: (R, B, H, G, ·) positions.
        bucket_q, bucket_k: (R, B, H or Hkv, ·) buckets, −1 = none.
        index_q, index_k: the same, the chunk within the bucket: the one that a query reads,
            the one in which a key is.
    """

    queries: Tensor
    keys: Tensor
    bucket_q: Tensor
    bucket_k: Tensor
    index_q: Tensor
    index_k: Tensor


class Reformer(Mechanism):
    """Softmax attention among tokens of one bucket of a random hash, in chunks.

        out_i = Σ_{j ∈ N(i)} exp(scale·q_i·k_j) v_j / Σ_{j ∈ N(i)} exp(scale·q_i·k_j)
        k_j = q_j / √(mean q_j² + 1e-6)                     (shared; else the keys given)
        h_r(x) = argmax [x R_r, −x R_r],   R_r ~ N(0, 1) of D × buckets/2,   r = 1 … R

    N(i) is the union over rounds of the keys in i's chunk of the bucket h_r(q_i) and in `before`
    chunks before it. A bucket's tokens, in order of position, are cut into chunks of C by their
    rank: what precedes a token alone decides what it reads, so that causal calls never look
    ahead and a stream keeps the last (before + 1)·C keys of each bucket, whatever has been read.
    Shared keys of equal size make q_i's own key its best one: a token therefore reads itself only
    if it reads nothing else.

    With shared=false queries and keys are hashed by the same rotations: query i reads the chunk
    of the last key of its bucket at positions up to i + S − L. Softmax of a trained model is
    approximated as well as near pairs collide.

    Similar vectors share a bucket: of b buckets, two unit vectors at distance d differ in their
    hash with log probability −d²/(4 − d²)·ln b + O(ln ln b).

    Masked tokens are in no bucket; with shared keys such a token reads nothing either, its row
    is zero. Hashes carry no gradient: that of everything else is exact.

    Cost: R·(D·buckets + 2·(before + 1)·C·(D+V)) FLOPs a token, a sort, and chunks that buckets
    leave unfilled (C/2 a bucket and round); duplicates=once compares chunks of R(R−1)/2 pairs of
    rounds. Memory O(L): one round's results beside inputs and output. State: R·H·buckets·
    (before + 1)·C·(D+V) numbers: as many as a cache of R·buckets·(before + 1)·C tokens.

    Paper: Kitaev, Kaiser, Levskaya 2020, arXiv 2001.04451, §2 and eq. 2–6; the hash: Andoni et
    al. 2015, arXiv 1509.02897.

    Args:
        rounds, buckets, chunk, before, after, shared, chunks, own, duplicates: see
            `ReformerConfig`.

    See `Mechanism` for sizes, shapes and what is raised.

    Raises:
        OptionError: buckets=none without `max_length`.

    Example:
        >>> import torch, subquad as sq
        >>> q, v = (torch.randn(1, 8, 1000, 64) for _ in range(2))
        >>> mech = sq.build("reformer(rounds=2, buckets=16)", head_dim=64, num_heads=8)
        >>> mech(q, q, v, causal=True).shape
        torch.Size([1, 8, 1000, 64])
        >>> mech.hash(q).shape  # (R, B, H, L)
        torch.Size([2, 1, 8, 1000])
    """

    name = "reformer"
    family = "sparse"
    state_type = ReformerState
    Config = ReformerConfig
    config: ReformerConfig
    rotations: Tensor
    info = Info(
        summary="softmax attention among tokens that a random hash puts into one bucket",
        formula="out_i = Σ_{j ∈ N(i)} exp(scale·q_i·k_j) v_j / Σ_{j ∈ N(i)} exp(scale·q_i·k_j),  "
        "N(i) = keys near i in its bucket h(q_i) = argmax [q_i R, −q_i R],  k_j = √D·q_j/|q_j|",
        cost=Cost("O(L·rounds·(D·buckets + chunk·(D+V)))", _flops, _memory),
        paper="Kitaev, Kaiser, Levskaya 2020, arXiv 2001.04451, eq. 2–6",
        limit="buckets=1, chunk ≥ L and own=always: softmax, of shared q and k with shared=true",
        options={
            "rounds": "R, number of hashes",
            "buckets": "buckets of a hash: 1, an even number, a list of factors, or none: "
            "2·max_length/chunk",
            "chunk": "C, tokens of a chunk",
            "before": "chunks read before a token's own",
            "after": "chunks read after a token's own, bidirectional calls only",
            "shared": "whether keys are the normalised queries; k is then not read",
            "chunks": "bucket (each bucket is cut, causal) or sorted (the sorted sequence is cut)",
            "own": "whether a token reads itself: last (if nothing else), always, auto",
            "duplicates": "a key found by several rounds counts once, or each time",
        },
        sample="reformer(rounds=2, buckets=4, chunk=6)",
        use="training from scratch on very long sequences where a token needs few, similar tokens "
        "wherever they are (shared=true); finding near keys of a trained model by content "
        "(shared=false). Needs several rounds to find most of them.",
        deviations="chunks are cut within a bucket by rank (chunks=bucket), which is strictly "
        "causal; the paper cuts the sorted sequence (chunks=sorted), where later tokens move the "
        "cuts. The first chunk reads no last one, as the packages' circular neighbours do. Keys "
        "have length √D as in the authors' code, for logits of the usual size.",
    )

    def __init__(
        self,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **sizes: Any,
    ) -> None:
        super().__init__(device=device, dtype=dtype, **sizes)
        self.factors = self.config.factors(self.max_length)
        self.buckets = math.prod(self.factors)
        shape = (self.num_kv_heads, self.config.rounds, sum(self.factors) // 2, self.head_dim)
        self.register_buffer("rotations", torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    @classmethod
    def capabilities_for(cls, config: ReformerConfig) -> Capabilities:
        sorted_ = config.chunks == "sorted"
        leaks = Absent(
            "the sorted sequence is cut where later tokens push the cuts; use chunks=bucket"
        )
        return Capabilities(
            causal=leaks if sorted_ else True,
            prefix=Absent("chunks are read by rank in a bucket; a prefix would be read by place"),
            segments=Absent("chunks of the sorted sequence hold several segments")
            if sorted_
            else True,
            window=Absent("keys are found by content; for a window see near_far"),
            cross=Absent("keys are the queries, normalised") if config.shared else True,
            state=leaks if sorted_ else "constant",
            read=Absent("a query reads the chunk at its own place in a bucket"),
            partial=True,
            merges=Absent("each call ranks its own open keys"),
            approximates=None if config.shared or config.duplicates == "each" else "softmax",
            compile=Absent("the number of chunks depends on the data"),
            max_length=config.buckets is None,
            functional=Absent("buckets=none needs max_length") if config.buckets is None else True,
            reach="tokens of its buckets: the last chunks of them, to which attention comes back",
        )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the rotations from N(0, 1) by the seed."""
        heads, rounds, width, dim = self.rotations.shape
        if self.rotations.is_meta or not width:
            return
        drawn = draw_projection(
            rounds * width, dim, heads=heads, draw="iid", seed=self.seed, dtype=torch.float64
        )
        self.rotations.copy_(drawn.view(self.rotations.shape))

    def reached(self, t: int, length: int) -> Iterable[int]:
        return ()  # which tokens share a bucket is up to their content

    # ---- who reads whom ------------------------------------------------------------------

    @torch.no_grad()
    def hash(self, x: Tensor) -> Tensor:
        """The bucket of each vector (R, B, H, L), of x (B, H, L, D), H a multiple of Hkv."""
        refuse_vmap(self.name)
        batch, heads, length = x.shape[:3]
        rounds = self.config.rounds
        found = torch.zeros(rounds, batch, heads, length, dtype=torch.int64, device=x.device)
        dtype = sums_dtype(x.dtype)
        rotations = self.rotations.to(dtype).repeat_interleave(heads // self.num_kv_heads, 0)
        stride, at = 1, 0
        for size in self.factors:
            some = rotations[:, :, at : at + size // 2].flatten(1, 2)  # (H, R·size/2, D)
            row = batch * heads * some.shape[1] * dtype.itemsize
            parts = []
            for part in x.split(max(1, HASH_BYTES // row), 2):
                rotated = (some @ part.to(dtype).mT).unflatten(2, (rounds, -1))
                parts.append(_side(rotated))  # (B, H, R, l)
            found += stride * torch.cat(parts, -1).permute(2, 0, 1, 3)
            stride, at = stride * size, at + size // 2
        return found

    def lists(self, q: Tensor, k: Tensor, mask: Mask, seen: Tensor | None = None) -> _Lists:
        """Groups of queries and the keys they read.

        Args:
            q: (B, H, L, D).
            k: (B, Hkv, S, D); not read with shared keys.
            mask: causal, key and segments parts.
            seen: (R, B, H or Hkv, N) keys of each bucket that a state has read.
        """
        config, count = self.config, self.buckets
        reads = self.hash(q)
        keys = reads if config.shared else self.hash(k)
        if mask.segments is not None:
            assert isinstance(mask.segments, tuple), "masks are flattened by now"
            numbers, inverse = torch.cat(mask.segments, -1).unique(return_inverse=True)
            own, other = inverse.split([q.shape[2], k.shape[2]], -1)
            reads = reads + own[:, None] * count
            keys = keys + other[:, None] * count
            count = count * len(numbers)
        if mask.key is not None:
            keys = keys.masked_fill(~mask.key[:, None], -1)
        rounds, batch = keys.shape[:2]
        flat = keys.flatten(0, 1)
        past = None if seen is None else seen.flatten(0, 1)
        if config.chunks == "sorted":
            chunks, bucket = cut_sorted(flat, count, config.chunk), flat.clamp_max(0)
        else:
            chunks, bucket = cut(flat, count, config.chunk, past), flat
        after = 0 if mask.causal else config.after
        chunks = chunks.trimmed()
        listed = chunks.around(config.before, after)
        at = bucket.clamp_min(0)
        index_k = chunks.number - chunks.first.gather(-1, at)
        if past is not None:
            index_k = index_k + (past // config.chunk).gather(-1, at)
        if config.shared:
            queries, asks, index_q = chunks.table, bucket, index_k
        else:
            asks = reads.flatten(0, 1)
            number, index_q = chunk_read(bucket, count, config.chunk, chunks, asks, past)
            mine = cut(number, chunks.table.shape[2], config.chunk)
            queries, owner = mine.table, mine.owner
            listed = listed.repeat_interleave(asks.shape[1] // bucket.shape[1], 1)
            at = owner.clamp_min(0)[..., None].expand(*owner.shape, listed.shape[-1])
            listed = listed.gather(2, at).masked_fill((owner < 0)[..., None], -1)
        return _Lists(
            *(t.unflatten(0, (rounds, batch)) for t in (queries, listed, asks, bucket)),
            *(t.unflatten(0, (rounds, batch)) for t in (index_q, index_k)),
        )

    def _keys(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The keys that are read, and values with as many heads."""
        if not self.config.shared:
            return k, v
        size = torch.linalg.vecdot(q, q)[..., None] / q.shape[-1]
        per = q.shape[1] // v.shape[1]
        k = q * torch.rsqrt(size + NORM_EPSILON)
        return k, v if per == 1 else v.repeat_interleave(per, 1)

    # ---- attention -----------------------------------------------------------------------

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
        return self._sums(q, k, v, mask, scale)[0].to(q.dtype)

    def _partial(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Partial:
        out, lse = self._sums(q, k, v, mask, scale)
        return Partial(out, (lse.detach() != EMPTY).to(lse.dtype), lse)

    def _sums(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float
    ) -> tuple[Tensor, Tensor]:
        """out (B, H, L, V) and lse (B, H, L) in the dtype of sums."""
        dtype = sums_dtype(q.dtype)
        q, k, v = q.to(dtype), *clear(k.to(dtype), v.to(dtype), mask)
        lists = self.lists(q, k, mask)
        if self.config.shared and mask.key is not None:
            q, v = clear(q, v, mask)  # a masked query is a masked key
        k, v = self._keys(q, k, v)
        out, lse = self._joint(q, k, v, lists, mask.causal, scale, self._numbers(lists))
        return self._alone(q, k, v, out, lse, mask.key, scale)

    def _joint(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lists: _Lists,
        causal: bool,
        scale: float,
        numbers: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Softmax over what all rounds list."""
        config = self.config
        earlier = [*zip(*numbers, strict=True)] if config.duplicates == "once" else []
        closed = [
            _Pairs(
                lists.queries.shape[3], q.shape[1], config.last, causal, earlier[:number],
                config.before, 0 if causal else config.after, k.shape[2] - q.shape[2],
            )
            for number in range(config.rounds)
        ]  # fmt: skip
        return joint_softmax(q, k, v, lists.queries, lists.keys, scale=scale, closed=closed)

    def _numbers(self, lists: _Lists, apart: int | None = None) -> tuple[Tensor, Tensor]:
        """Chunk numbers (R, B, H, L) and (R, B, Hk, S): near ones are of one bucket, near in it.

        Whole numbers as floats: in float32 as long as that holds them.
        """
        if apart is None:
            chunks = -(-lists.index_k.shape[-1] // self.config.chunk)
            apart = chunks + self.config.before + self.config.after + 1
        own = lists.bucket_q * apart + lists.index_q
        other = lists.bucket_k * apart + lists.index_k
        short = apart < APART and int(torch.maximum(own.max(), other.max())) < 2**24
        dtype = torch.float32 if short else torch.float64
        return own.to(dtype), other.to(dtype)

    def _alone(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        key: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """A token that reads nothing reads itself."""
        if not self.config.last:
            return out, lse
        alone = lse.detach() == EMPTY
        if key is not None:
            alone = alone & key[:, None]
        at = alone.flatten().nonzero().squeeze(-1)
        if not len(at):
            return out, lse
        own_q, own_k, own_v = (t.flatten(0, 2).index_select(0, at) for t in (q, k, v))
        own = scale * (own_q * own_k).sum(-1)
        shape = out.shape
        out = out.flatten(0, 2).index_copy(0, at, own_v).view(shape)
        return out, lse.flatten().index_copy(0, at, own).view(shape[:-1])

    # ---- decoding ------------------------------------------------------------------------

    def _prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: ReformerState | None,
        key_mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, State]:
        given, config, mask = q.dtype, self.config, Mask(causal=True, key=key_mask)
        dtype = sums_dtype(given)
        q, k, v = q.to(dtype), *clear(k.to(dtype), v.to(dtype), mask)
        seen = None if state is None else torch.stack([past.seen for past in state.rounds])
        lists = self.lists(q, k, mask, seen)
        if config.shared:
            q, v = clear(q, v, mask)
        k, v = self._keys(q, k, v)
        numbers = self._numbers(lists, APART)
        if state is None:
            width = (config.before + 1) * config.chunk
            tags = config.rounds if config.duplicates == "once" else 0
            empty = BucketState.empty(
                k.to(given), v.to(given), k.shape[1], self.buckets, width, tags
            )
            past = (empty,) * config.rounds
        else:
            past = state.rounds
        tags_k = numbers[1].long().permute(1, 2, 3, 0) if config.duplicates == "once" else None
        new = ReformerState(
            tuple(
                one.write(k.to(given), v.to(given), bucket, tags_k)
                for one, bucket in zip(past, lists.bucket_k, strict=True)
            )
        )
        out, lse = self._joint(q, k, v, lists, True, scale, numbers)
        if state is not None:
            parts = [_sums(out, lse)]
            for number, one in enumerate(past):
                parts.append(self._past(q, one, lists, numbers[0], number, scale))
            merged = combine(parts)
            empty_ = merged.den == 0
            out = merged.output()
            lse = torch.where(empty_, EMPTY, merged.log_scale)
        return self._alone(q, k, v, out, lse, key_mask, scale)[0].to(given), new

    def _past(
        self,
        q: Tensor,
        past: BucketState,
        lists: _Lists,
        numbers: Tensor,
        number: int,
        scale: float,
    ) -> Partial:
        """What the queries read of a state, in round `number`."""
        config = self.config
        reads, index = lists.bucket_q[number], lists.index_q[number]
        heads, count, width = past.k.shape[1:4]
        per = q.shape[1] // heads
        seen = past.seen.repeat_interleave(per, 1).gather(-1, reads.clamp_min(0))
        beyond = (index - config.before) * config.chunk >= seen
        groups = cut(reads.masked_fill(beyond, -1), count, min(config.chunk, q.shape[2]))
        slots = past.slots().flatten(2)
        at = groups.owner.clamp_min(0)[..., None] * width + torch.arange(width, device=q.device)
        ranks = slots.repeat_interleave(per, 1).gather(-1, at.flatten(2)).view(at.shape)
        keys = at.masked_fill((ranks < 0) | (groups.owner < 0)[..., None], -1)
        tags = past.tags.flatten(2, 3)[..., :number].unbind(-1)
        earlier = [(numbers[r], tag.to(numbers.dtype)) for r, tag in enumerate(tags)]
        bias = _Old(keys.shape[2], q.shape[1], earlier, config.before, index, slots // config.chunk)
        found, lse = grouped_softmax(
            q, past.k.flatten(2, 3), past.v.flatten(2, 3), groups.table, keys, scale=scale,
            bias=bias,
        )  # fmt: skip
        out, there = of_tokens(found, groups.table, q.shape[2])
        lse = of_tokens(lse[..., None], groups.table, q.shape[2])[0].squeeze(-1)
        return _sums(out.masked_fill(~there[..., None], 0.0), lse.masked_fill(~there, EMPTY))


def _sums(out: Tensor, lse: Tensor) -> Partial:
    return Partial(out, (lse.detach() != EMPTY).to(lse.dtype), lse)


def _side(x: Tensor) -> Tensor:
    """argmax [x, −x] over dimension −2: (…, M, l) → (…, l)."""
    place = x.abs().max(-2).indices
    negative = x.gather(-2, place[..., None, :]).squeeze(-2) < 0
    return place + negative * x.shape[-2]


@dataclass(frozen=True, eq=False)
class _Pairs:
    """Pairs of a round that are closed: later keys, the own one, those of an earlier round.

    Args:
        each, heads: groups of a head, heads of the queries.
        last: whether the own key is left out.
        causal: whether later keys are.
        earlier: chunk numbers of queries (B, H, L) and of keys (B, Hk, S) in earlier rounds.
        before, after: chunks of a round that are read.
        offset: S − L.
    """

    each: int
    heads: int
    last: bool
    causal: bool
    earlier: Sequence[tuple[Tensor, Tensor]]
    before: int
    after: int
    offset: int

    def __call__(
        self, groups: Tensor, queries: Tensor, keys: Tensor, dtype: torch.dtype
    ) -> Tensor | None:
        closed: Tensor | None = None
        if self.causal or self.last:
            places = (queries + self.offset).to(dtype)[..., None]
            away = keys.to(dtype)[:, None] - places  # exact below 2²⁴ tokens
            if not self.causal:
                closed = away.abs_().neg_().add_(1.0).clamp_min_(0.0)
            else:
                closed = (away.add_(1.0) if self.last else away).clamp_min_(0.0)
        return _found(self, groups, queries, keys, dtype, closed)


@dataclass(frozen=True, eq=False)
class _Old:
    """Pairs of queries and keys of a state that are closed.

    Args:
        each, heads, earlier, before: as in `_Pairs`.
        index: (B, H, L) chunk of its bucket that a query reads.
        held: (B, Hk, N·W) chunk of its bucket in which a key is.
    """

    each: int
    heads: int
    earlier: Sequence[tuple[Tensor, Tensor]]
    before: int
    index: Tensor
    held: Tensor
    after: int = 0

    def __call__(self, groups: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        own, other = _of_pairs(self, groups, queries, keys, (self.index, self.held))
        closed = (own - self.before - other).clamp_min_(0).to(torch.float64)
        found = _found(self, groups, queries, keys, torch.float64, closed)
        assert found is not None
        return found.sign_().mul_(CLOSED)


def _of_pairs(
    pairs: _Pairs | _Old,
    groups: Tensor,
    queries: Tensor,
    keys: Tensor,
    numbers: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Numbers of the queries (g, C, 1) and of the keys (g, 1, R) that groups list."""
    own, other = numbers
    row = groups // pairs.each
    kv_row = row // (pairs.heads // other.shape[1])
    own = own.flatten()[row[:, None] * own.shape[-1] + queries.clamp_min(0)]
    other = other.flatten()[kv_row[:, None] * other.shape[-1] + keys.clamp_min(0)]
    return own[..., None], other[:, None]


def _found(
    pairs: _Pairs | _Old,
    groups: Tensor,
    queries: Tensor,
    keys: Tensor,
    dtype: torch.dtype,
    closed: Tensor | None,
) -> Tensor | None:
    """`closed`, and ½ or more for pairs that an earlier round has found."""
    middle, reach = (pairs.before - pairs.after) / 2, (pairs.before + pairs.after) / 2
    for numbers in pairs.earlier:
        own, other = _of_pairs(pairs, groups, queries, keys, numbers)
        away = (own - middle) - other
        near = away.abs_().neg_().add_(reach + 0.5).clamp_min_(0.0).to(dtype)
        closed = near if closed is None else closed.add_(near)
    return closed
