"""Buckets and their chunks against plain loops."""

import pytest
import torch

import subquad as sq
from subquad.attention.sparse.buckets import BucketState, bucket_groups, cut, of_tokens, ranks


def draw(batch=2, heads=3, length=53, count=5, seed=0, none=True):
    """Buckets of uneven size, −1 among them; bucket 3 is empty."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(-1 if none else 0, count, (batch, heads, length), generator=generator)
    found = torch.where(torch.rand(found.shape, generator=generator) < 0.3, 1, found)
    return found.masked_fill(found == 3, 0)


def rows(t):
    return [t[b, h] for b in range(t.shape[0]) for h in range(t.shape[1])]


def read_by(queries, keys, length):
    """{query: sorted keys it reads} of one row; each query is in at most one group."""
    found = {}
    for some, read in zip(queries.tolist(), keys.tolist(), strict=True):
        for i in some:
            assert i not in found, "a query in two groups"
            if i >= 0:
                assert i < length
                found[i] = sorted(j for j in read if j >= 0)
    return found


def plain(bucket, reads, size, before, after, seen=None):
    """The same by a loop over queries."""
    bucket, reads = bucket.tolist(), reads.tolist()
    offset = len(bucket) - len(reads)
    earlier = dict.fromkeys(range(max(*bucket, *reads) + 1), 0)
    if seen is not None:
        earlier = dict(enumerate(seen.tolist()))
    wanted = {}
    for i, b in enumerate(reads):
        members = [j for j, other in enumerate(bucket) if other == b]
        if b < 0 or not members:
            continue
        last = sum(j <= i + offset for j in members) - 1 + earlier[b]
        if seen is None:
            last = max(last, 0)
        elif last < earlier[b] // size * size:  # nothing of this call: only what came before
            continue
        mine = last // size
        wanted[i] = [
            j
            for n, j in enumerate(members)
            if mine - before <= (n + earlier[b]) // size <= mine + after
        ]
    return wanted


@pytest.mark.parametrize("size", [1, 3, 7, 64])
@pytest.mark.parametrize(("before", "after"), [(1, 0), (0, 0), (2, 1), (0, 2)])
def test_groups_are_chunks_and_their_neighbours(size, before, after):
    bucket = draw()
    queries, keys = bucket_groups(bucket, 5, size, before=before, after=after)
    longest = max(int((row == b).sum()) for row in rows(bucket) for b in range(5))
    width = min(size, longest)  # no chunk has more: short sequences are not read as long ones
    assert queries.shape[-1] == width and keys.shape[-1] == width * (before + 1 + after)
    fullest = max(sum(-(-int((row == b).sum()) // size) for b in range(5)) for row in rows(bucket))
    assert queries.shape[2] == keys.shape[2] == fullest
    for row, some, read in zip(rows(bucket), rows(queries), rows(keys), strict=True):
        assert read_by(some, read, 53) == plain(row, row, size, before, after)


@pytest.mark.parametrize("queries", [53, 17, 71, 1])
@pytest.mark.parametrize(("before", "after"), [(1, 0), (2, 1)])
def test_queries_with_buckets_of_their_own(queries, before, after):
    bucket, reads = draw(), draw(heads=6, length=queries, seed=1)
    found_q, found_k = bucket_groups(bucket, 5, 4, before=before, after=after, reads=reads)
    shared = rows(bucket.repeat_interleave(2, 1))
    groups = zip(shared, rows(reads), rows(found_q), rows(found_k), strict=True)
    for row, own, some, read in groups:
        assert read_by(some, read, queries) == plain(row, own, 4, before, after)


def test_reading_the_own_bucket_is_the_default():
    bucket = draw()
    for a, b in zip(
        rows(torch.cat(bucket_groups(bucket, 5, 4), -1)),
        rows(torch.cat(bucket_groups(bucket, 5, 4, reads=bucket), -1)),
        strict=True,
    ):
        assert read_by(a[:, :4], a[:, 4:], 53) == read_by(b[:, :4], b[:, 4:], 53)


@pytest.mark.parametrize("size", [1, 4])
def test_groups_go_on_with_what_was_seen(size):
    bucket, reads = draw(), draw(heads=6, seed=1)
    seen = torch.randint(0, 11, (2, 3, 5), generator=torch.Generator().manual_seed(2))
    own = bucket_groups(bucket, 5, size, seen=seen)
    for row, past, some, read in zip(*map(rows, (bucket, seen, *own)), strict=True):
        assert read_by(some, read, 53) == plain(row, row, size, 1, 0, past)
    found = bucket_groups(bucket, 5, size, reads=reads, seen=seen)
    repeated = (t.repeat_interleave(2, 1) for t in (bucket, seen))
    for row, past, mine, some, read in zip(*map(rows, (*repeated, reads, *found)), strict=True):
        assert read_by(some, read, 53) == plain(row, mine, size, 1, 0, past)


def test_many_buckets_are_sorted_the_same_way():
    """More than 2¹⁵ numbers of buckets and rows leave the radix sort."""
    bucket = draw()
    wide = bucket_groups(bucket, 40_000, 4)
    for a, b in zip(bucket_groups(bucket, 5, 4), wide, strict=True):
        assert torch.equal(a, b)


def test_no_token_in_any_bucket():
    queries, keys = bucket_groups(torch.full((1, 2, 7), -1), 3, 4)
    assert queries.shape == (1, 2, 1, 1) and bool((queries < 0).all() and (keys < 0).all())


def test_ranks():
    bucket, reads = draw(), draw(length=71, seed=1)
    own, up_to = ranks(bucket, 5), ranks(bucket, 5, reads)
    for row, mine, found, there in zip(*map(rows, (bucket, reads, own, up_to)), strict=True):
        for i, b in enumerate(row.tolist()):
            assert found[i] == (int((row[:i] == b).sum()) if b >= 0 else 0)
        for i, b in enumerate(mine.tolist()):
            at = i + 53 - 71
            assert there[i] == (int((row[: max(0, at + 1)] == b).sum()) if b >= 0 else 0)


def test_chunk_numbers_say_where_a_token_is():
    bucket = draw()
    chunks = cut(bucket, 5, 4)
    for table, owner, number, row in zip(
        *map(rows, (chunks.table, chunks.owner, chunks.number, bucket)), strict=True
    ):
        for i, b in enumerate(row.tolist()):
            if b < 0:
                assert number[i] == -1
            else:
                assert i in table[number[i]].tolist() and owner[number[i]] == b


def test_trimmed_chunks_lose_nothing():
    chunks = cut(draw(), 5, 64)
    short = chunks.trimmed()
    fullest = max(int((row == b).sum()) for row in rows(draw()) for b in range(5))
    assert short.table.shape[-1] == fullest
    assert torch.equal(short.table, chunks.table[..., :fullest])
    assert not (chunks.table[..., fullest:] >= 0).any()


def test_results_come_back_to_their_tokens():
    bucket = draw()
    queries, _ = bucket_groups(bucket, 5, 4)
    x = torch.stack([queries.double(), -queries.double()], -1).requires_grad_()
    found, there = of_tokens(x, queries, 53)
    assert torch.equal(there, bucket >= 0)
    position = torch.arange(53).double().expand(2, 3, 53)
    wanted = torch.stack([position, -position], -1)
    assert torch.equal(found[there], wanted[there])
    (grad,) = torch.autograd.grad((found * there[..., None]).sum(), x)
    assert torch.equal(grad[..., 0], (queries >= 0).double())


# ---- state ---------------------------------------------------------------------------------


def tokens(length=53, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, length, 5, generator=generator), torch.randn(
        2, 1, length, 7, generator=generator
    )


@pytest.mark.parametrize("pieces", [[53], [1] * 53, [40, 0, 13], [2, 51]])
@pytest.mark.parametrize("width", [1, 6, 64])
def test_state_holds_the_last_keys_of_every_bucket(pieces, width):
    (k, v), bucket = tokens(), draw(heads=6)
    tag = torch.arange(53)[:, None].expand(2, 6, 53, 1)
    state = BucketState.empty(k, v, 6, 5, width, tags=1)
    sizes, at = {state.nbytes}, 0
    for n in pieces:
        window = slice(at, at + n)
        held = state.clone()
        new = state.write(k[:, :, window], v[:, :, window], bucket[..., window], tag[:, :, window])
        for name, tensor in held.tensors().items():
            assert torch.equal(tensor, state.tensors()[name])
        state, at = new, at + n
        sizes.add(state.nbytes)
    assert len(sizes) == 1
    slots = state.slots()
    for b in range(2):
        for h in range(6):
            for bucket_number in range(5):
                members = (bucket[b, h] == bucket_number).nonzero().flatten().tolist()
                assert state.seen[b, h, bucket_number] == len(members)
                kept = {r: j for r, j in enumerate(members) if r >= len(members) - width}
                found = slots[b, h, bucket_number].tolist()
                assert sorted(r for r in found if r >= 0) == sorted(kept)
                for slot, rank in enumerate(found):
                    if rank >= 0:
                        j = kept[rank]
                        place = (b, h, bucket_number, slot)
                        assert rank % width == slot and state.tags[place] == j
                        assert torch.equal(state.k[place], k[b, h // 2, j])
                        assert torch.equal(state.v[place], v[b, 0, j])


def test_state_passes_gradients_to_what_it_holds():
    (k, v), bucket = tokens(), draw(heads=6)
    k.requires_grad_()
    state = BucketState.empty(k.detach(), v, 6, 5, 6).write(k, v, bucket)
    (grad,) = torch.autograd.grad(state.k.sum(), k)
    held = (state.slots() >= 0).sum()
    assert grad.sum() == held * 5


def test_state_refuses_what_does_not_fit():
    (k, v), bucket = tokens(), draw(heads=6)
    state = BucketState.empty(k, v, 6, 5, 6)
    with pytest.raises(sq.ShapeError, match="k must continue the state's"):
        state.write(k[..., :3], v, bucket)
    with pytest.raises(sq.ShapeError, match="v must continue the state's"):
        state.write(k, v.expand(-1, 4, -1, -1), bucket)
    with pytest.raises(sq.DtypeError, match="k must have the state's dtype"):
        state.write(k.double(), v, bucket)


def test_state_rows_can_be_chosen():
    (k, v), bucket = tokens(), draw(heads=6)
    state = BucketState.empty(k, v, 6, 5, 6).write(k, v, bucket)
    swapped = state.select([1, 0])
    assert torch.equal(swapped.k[0], state.k[1])
    assert torch.equal(state.repeat(2).seen[1], state.seen[0])
