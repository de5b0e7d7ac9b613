"""Buckets: tokens of one bucket in order of position, cut into chunks by their rank in it.

Hashing and clustering give every token a bucket. A token's rank r is the number of earlier
tokens of its bucket; chunk r // C of the bucket holds C tokens, and a token reads the keys of
its own chunk and of neighbouring chunks of the same bucket. A rank depends on the past alone,
so that this is strictly causal once later keys are closed, and a stream needs the last
(before + 1)·C keys of each bucket only: `BucketState`.

`bucket_groups` lists queries and keys chunk by chunk for `subquad.kernels.grouped`, and
`of_tokens` brings the results back to the tokens.

Cost: a stable sort of the tokens, O(n) with few buckets (radix sort), and gathers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.attention.base import State
from subquad.errors import DtypeError, ShapeError, UnsupportedError
from subquad.kernels.grouped import of_tokens
from subquad.kernels.transforms import mapped

__all__ = [
    "BucketState",
    "Chunks",
    "bucket_groups",
    "chunk_read",
    "cut",
    "cut_sorted",
    "of_tokens",
    "ranks",
    "refuse_vmap",
]


def refuse_vmap(mechanism: str) -> None:
    """Raises UnsupportedError where `torch.vmap` hides the tokens from a mechanism."""
    if mapped():
        raise UnsupportedError(
            mechanism,
            "torch.vmap",
            "which tokens share a group, and of what size, depends on them; give rows as a batch",
        )


def _order(bucket: Tensor, count: int) -> Tensor:
    """Positions (B, H, L) in order of bucket, then of position; tokens in none come last."""
    batch, heads, length = bucket.shape
    rows = torch.arange(batch * heads, device=bucket.device)[:, None]
    flat = bucket.flatten(0, 1)
    flat = torch.where(flat < 0, count, flat) + rows * (count + 1)
    if batch * heads * (count + 1) <= torch.iinfo(torch.int16).max:
        flat = flat.short()  # sorted by radix
    order = flat.flatten().sort(stable=True).indices
    return (order.view(batch * heads, length) - rows * length).view(bucket.shape)


def _counts(bucket: Tensor, count: int) -> Tensor:
    """Tokens of each bucket (B, H, count)."""
    held = bucket >= 0
    total = bucket.new_zeros(*bucket.shape[:2], count, dtype=torch.int64)
    return total.scatter_add(-1, bucket.clamp_min(0).long(), held.long())


def ranks(bucket: Tensor, count: int, reads: Tensor | None = None) -> Tensor:
    """How many tokens of the same bucket come before each token; cost O(n).

    Args:
        bucket: (B, H, S) in 0 … count − 1, −1 = in none.
        count: number of buckets.
        reads: (B, H, L) buckets that other tokens read, aligned to the end: the one at i is
            at position i + S − L. Then (B, H, L) is returned: how many tokens of the bucket
            come up to that position, itself included.

    Returns:
        (B, H, S) or (B, H, L); 0 for tokens in no bucket.
    """
    if reads is None:
        order, total = _order(bucket, count), _counts(bucket, count)
        start = total.cumsum(-1) - total
        first = start.gather(-1, bucket.clamp_min(0).long())
        place = torch.arange(bucket.shape[-1], device=bucket.device).expand_as(order)
        rank = torch.empty_like(order).scatter_(-1, order, place) - first
        return rank.masked_fill(bucket < 0, 0)
    keys, queries = bucket.shape[-1], reads.shape[-1]
    device = bucket.device
    at = torch.arange(queries, device=device) + (keys - queries)
    # Keys and readers in one line: a reader stands behind the key of its position.
    line = torch.cat([2 * torch.arange(keys, device=device), 2 * at + 1]).argsort()
    events = torch.cat([bucket, reads], -1)[..., line]
    order = _order(events, count)
    is_key = ((line < keys) & (events >= 0)).long()
    before = is_key.gather(-1, order).cumsum(-1)
    found = torch.empty_like(order).scatter_(-1, line[order], before)[..., keys:]
    total = _counts(bucket, count)
    start = total.cumsum(-1) - total
    found = found - start.gather(-1, reads.clamp_min(0).long())
    return found.masked_fill(reads < 0, 0)


@dataclass(frozen=True, eq=False)
class Chunks:
    """Tokens in chunks of C that belong to one bucket each, as many as the fullest row needs.

    Args:
        table: (B, H, G, C) positions, −1 = none.
        owner: (B, H, G) bucket of each chunk, −1 = the chunk holds no token.
        first: (B, H, count) number of each bucket's first chunk.
        number: (B, H, L) chunk of each token, −1 for tokens in no bucket.
    """

    table: Tensor
    owner: Tensor
    first: Tensor
    number: Tensor

    def trimmed(self) -> Chunks:
        """Without the last places of all chunks if none of them is in use (short sequences)."""
        used = (self.table >= 0).flatten(0, 2).any(0).nonzero()
        width = int(used[-1]) + 1 if len(used) else 1
        return replace(self, table=self.table[..., :width])

    def of_owner(self, rows: Tensor) -> Tensor:
        """(B, H, G, ·): for each chunk the row of rows (B, H, count, ·) that its bucket has."""
        at = self.owner.clamp_min(0)[..., None].expand(-1, -1, -1, rows.shape[-1])
        return rows.gather(2, at).masked_fill((self.owner < 0)[..., None], -1)

    def around(self, before: int, after: int) -> Tensor:
        """(B, H, G, C·(before + 1 + after)): each chunk's own tokens and its neighbours'."""
        pad = max(before, after)
        table = F.pad(self.table, (0, 0, pad, pad), value=-1)
        owner = F.pad(self.owner, (pad, pad), value=-1)
        groups = self.table.shape[2]
        parts = []
        for step in range(pad - before, pad + after + 1):
            stranger = owner[..., step : step + groups] != self.owner
            near = table[:, :, step : step + groups]
            parts.append(near.masked_fill(stranger[..., None], -1))
        return torch.cat(parts, -1)


def cut(bucket: Tensor, count: int, size: int, seen: Tensor | None = None) -> Chunks:
    """Cuts buckets into chunks of `size` tokens by rank.

    Args:
        bucket: (B, H, L) in 0 … count − 1, −1 = in none.
        count: number of buckets.
        size: C, tokens of a chunk.
        seen: (B, H, count) tokens of each bucket that came before these: the first chunk of
            a bucket then goes on with the chunk that was begun, holes standing for its tokens.
    """
    batch, heads, length = bucket.shape
    order, total = _order(bucket, count), _counts(bucket, count)
    begun = torch.zeros_like(total) if seen is None else seen % size
    chunks = torch.where(total > 0, (total + begun + size - 1) // size, 0)
    ends = chunks.cumsum(-1)
    first = ends - chunks
    groups = max(1, int(ends[..., -1].max()))
    # The place of a token: its own in the sorted line, and what chunks leave free before it.
    gap = first * size + begun - (total.cumsum(-1) - total)
    sorted_bucket = bucket.gather(-1, order).long()
    place = torch.arange(length, device=bucket.device) + gap.gather(-1, sorted_bucket.clamp_min(0))
    place = torch.where(sorted_bucket < 0, groups * size, place)
    table = torch.full((batch, heads, groups * size + 1), -1, device=bucket.device)
    table.scatter_(-1, place, order)
    table = table[..., :-1].reshape(batch, heads, groups, size)
    numbers = torch.arange(groups, device=bucket.device).expand(batch, heads, groups).contiguous()
    owner = torch.searchsorted(ends, numbers, right=True)
    owner = owner.masked_fill(owner >= count, -1)
    number = torch.empty_like(order).scatter_(-1, order, place // size)
    return Chunks(table, owner, first, number.masked_fill(bucket < 0, -1))


def cut_sorted(bucket: Tensor, count: int, size: int) -> Chunks:
    """Cuts all tokens in order of bucket and position into chunks, across buckets.

    Where a cut falls depends on every token, also on later ones: for bidirectional attention.
    The chunks count as chunks of one bucket; tokens in none are left out.
    """
    batch, heads, length = bucket.shape
    order = _order(bucket, count)
    held = (bucket >= 0).sum(-1, keepdim=True)
    groups = -(-length // size)
    place = torch.arange(groups * size, device=bucket.device)
    table = F.pad(order, (0, groups * size - length)).masked_fill(place >= held, -1)
    owner = torch.where(place[::size] < held, 0, -1)
    places = place[:length].expand_as(order) // size
    number = torch.empty_like(order).scatter_(-1, order, places).masked_fill(bucket < 0, -1)
    table = table.view(batch, heads, groups, size)
    return Chunks(table, owner, order.new_zeros(batch, heads, 1), number)


def bucket_groups(
    bucket: Tensor,
    count: int,
    size: int,
    *,
    before: int = 1,
    after: int = 0,
    reads: Tensor | None = None,
    seen: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Groups of queries and the keys they read, for `subquad.kernels.grouped.grouped_softmax`.

    Args:
        bucket: (B, H, S) of the keys, in 0 … count − 1, −1 = in none.
        count: number of buckets.
        size: C, tokens of a chunk.
        before, after: neighbouring chunks of the bucket that are read beside the own one.
        reads: (B, n·H, L) the bucket that each query reads, −1 = none, where queries have
            buckets of their own: query i stands at position p = i + S − L, and its chunk is that
            of the bucket's last key up to p, or the bucket's first chunk if there is none.
            Default: every token is a query and reads its own bucket.
        seen: (B, H, count) keys of each bucket that came before these and are read elsewhere
            (`BucketState`): they count in the ranks. For causal attention.

    Returns:
        queries (B, H or n·H, G, C′) and keys (B, H or n·H, G, C″·(before + 1 + after)),
        positions with −1 = none; C′ and C″ are C, or less where no chunk is full. A query is in
        one group or, where it has nothing to read, in none; with `reads`, queries of one chunk
        may fill several groups.

    Example:
        >>> bucket = torch.tensor([[[0, 1, 0, 0, 1, -1, 0]]])
        >>> queries, keys = bucket_groups(bucket, 2, 2)
        >>> queries[0, 0].tolist()
        [[0, 2], [3, 6], [1, 4]]
        >>> keys[0, 0].tolist()
        [[-1, -1, 0, 2], [0, 2, 3, 6], [-1, -1, 1, 4]]
    """
    chunks = cut(bucket, count, size, seen).trimmed()
    keys = chunks.around(before, after)
    if reads is None:
        return chunks.table, keys
    number, _ = chunk_read(bucket, count, size, chunks, reads, seen)
    mine = cut(number, chunks.table.shape[2], size).trimmed()
    keys = keys.repeat_interleave(reads.shape[1] // bucket.shape[1], 1)
    return mine.table, mine.of_owner(keys)


def chunk_read(
    bucket: Tensor, count: int, size: int, chunks: Chunks, reads: Tensor, seen: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The chunk that each query reads: its number, −1 = none, and its index in the bucket.

    Arguments as in `bucket_groups`, and what `cut` made of the keys; (B, n·H, L) each. The index
    counts the chunks of what came before too.
    """
    per = reads.shape[1] // bucket.shape[1]
    bucket, first, owner = (
        t.repeat_interleave(per, 1) for t in (bucket, chunks.first, chunks.owner)
    )
    at = reads.clamp_min(0).long()
    last = ranks(bucket, count, reads) - 1
    if seen is None:
        step = index = torch.div(last, size, rounding_mode="floor").clamp_min(0)
    else:
        past = seen.repeat_interleave(per, 1).gather(-1, at)
        step = torch.div(last + past % size, size, rounding_mode="floor")
        index = step + past // size
    number = first.gather(-1, at) + step.clamp_min(0)
    filled = owner.gather(-1, number.clamp_max(owner.shape[-1] - 1)) == reads
    return number.masked_fill(~filled | (step < 0) | (reads < 0), -1), index


@dataclass(frozen=True, eq=False)
class BucketState(State):
    """The last W keys and values of every bucket: constant size, whatever has been read.

    The key of rank r in its bucket lies in slot r mod W, so that W = (before + 1)·C holds all
    that a later token's chunk reads.

    Bytes: H·N·W·(D + V) numbers a batch row, N the number of buckets.

    Args:
        k: (B, H, N, W, D).
        v: (B, H, N, W, V).
        seen: (B, H, N) how many keys each bucket has got.
        tags: (B, H, N, W, T) integers kept beside each key, T ≥ 0.
    """

    k: Tensor
    v: Tensor
    seen: Tensor
    tags: Tensor

    @classmethod
    def empty(
        cls, k: Tensor, v: Tensor, heads: int, count: int, width: int, tags: int = 0
    ) -> BucketState:
        """A state that has read nothing, for keys and values like k and v."""
        shape = (len(k), heads, count, width)
        return cls(
            k.new_zeros(*shape, k.shape[-1]),
            v.new_zeros(*shape, v.shape[-1]),
            k.new_zeros(shape[:3], dtype=torch.int64),
            k.new_zeros(*shape, tags, dtype=torch.int64),
        )

    def write(
        self, k: Tensor, v: Tensor, bucket: Tensor, tags: Tensor | None = None
    ) -> BucketState:
        """The state after new tokens, in order; O(T) beside one copy of the state.

        Args:
            k: (B, Hk, T, D), Hk dividing the state's H: head h of the state takes k's head
                h // (H / Hk).
            v: (B, Hv, T, V), likewise.
            bucket: (B, H, T), −1 = not written.
            tags: (B, H, T, number of tags), where the state has tags.

        Raises:
            ShapeError: if k, v or bucket do not fit the state.
            DtypeError: if k's or v's dtype differs from the state's.
        """
        heads, count, width = self.k.shape[1:4]
        for name, new, old in (("k", k, self.k), ("v", v, self.v)):
            if heads % new.shape[1] or new.shape[-1] != old.shape[-1] or len(new) != len(old):
                raise ShapeError(
                    f"{name} must continue the state's (B={len(old)}, Hkv dividing {heads}, T, "
                    f"{old.shape[-1]}), given {tuple(new.shape)}"
                )
            if new.dtype != old.dtype:
                raise DtypeError(
                    f"{name} must have the state's dtype {old.dtype}, given {new.dtype}"
                )
        rank = ranks(bucket, count) + self.seen.gather(-1, bucket.clamp_min(0).long())
        seen = self.seen + _counts(bucket, count)
        last = rank >= seen.gather(-1, bucket.clamp_min(0).long()) - width
        kept = (last & (bucket >= 0)).flatten().nonzero().squeeze(-1)  # (n,) tokens, flat
        length = bucket.shape[-1]
        row, token = kept // length, kept % length
        at = (row * count + bucket.flatten()[kept]) * width + rank.flatten()[kept] % width

        def put(old: Tensor, new: Tensor) -> Tensor:
            per = heads // new.shape[1]  # rows of `new` count batch rows and its own heads
            found = new[row // heads, row % heads // per, token]
            return old.flatten(0, 3).index_copy(0, at, found).view(old.shape)

        kept_tags = self.tags if tags is None else put(self.tags, tags)
        return BucketState(put(self.k, k), put(self.v, v), seen, kept_tags)

    def slots(self) -> Tensor:
        """(B, H, N, W): the rank of the key in each slot, −1 where there is none."""
        width = self.k.shape[3]
        slot = torch.arange(width, device=self.k.device)
        last = self.seen[..., None] - 1
        rank = last - (last - slot) % width  # the largest r ≤ last with r mod W = slot
        return rank.masked_fill(rank < 0, -1)
