"""`Mask` against a loop over queries and keys, and what it refuses."""

import itertools

import pytest
import torch

import subquad as sq

B, H, L, S = 2, 3, 7, 11
LENGTHS = [(7, 11), (11, 7), (7, 7), (1, 1), (1, 5), (5, 1)]


def random(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def naive(
    b, h, i, j, queries, keys, *, causal, key, prefix, segments, window, dense
):  # one entry, from the table in the module's docstring
    place = i + keys - queries
    if causal:
        first = 0 if prefix is None else int(prefix) if isinstance(prefix, int) else int(prefix[b])
        if j > place and not j < first:
            return False
    if key is not None and not key[b, j]:
        return False
    if segments is not None and segments[0][b, i] != segments[1][b, j]:
        return False
    if window is not None:
        left, right = (window, window) if isinstance(window, int) else window
        if causal:
            right = 0
        if not -right <= place - j <= left:
            return False
    if dense is not None:
        entry = dense[b, h, i, j]
        if not (entry if dense.dtype == torch.bool else entry > -torch.inf):
            return False
    return True


def options(queries, keys):
    boolean = random(B, H, queries, keys, seed=3) > 0.3
    return {
        "causal": [False, True],
        "key": [None, random(B, keys, seed=1) > 0.3],
        "prefix": [None, 2, torch.tensor([0, 3])],
        "segments": [
            None,
            ((random(B, queries, seed=4) * 2).long(), (random(B, keys, seed=5) * 2).long()),
        ],
        "window": [None, 2, (3, 1), (0, 0)],
        "dense": [None, boolean, torch.zeros(boolean.shape).masked_fill(~boolean, -torch.inf)],
    }


@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
def test_every_combination_equals_a_loop(queries, keys):
    choices = options(queries, keys)
    for values in itertools.product(*choices.values()):
        parts = dict(zip(choices, values, strict=True))
        if parts["prefix"] is not None and not parts["causal"]:
            continue
        mask = sq.Mask(**parts)
        got = mask.to_dense(queries, keys)
        while got.dim() < 4:  # (L, S), (B, L, S) or (B, H, L, S)
            got = got.unsqueeze(-3) if got.dim() == 3 else got.unsqueeze(0)
        got = got.expand(B, H, queries, keys)
        # every head is only looked at where heads differ
        heads = range(H) if parts["dense"] is not None and queries * keys < 40 else [H - 1]
        for h in heads:
            wanted = [
                [
                    [naive(b, h, i, j, queries, keys, **parts) for j in range(keys)]
                    for i in range(queries)
                ]
                for b in range(B)
            ]
            assert got[:, h].tolist() == wanted, (mask.kinds(), h)


@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
def test_rows_and_span_are_a_cut_of_the_whole(queries, keys):
    choices = options(queries, keys)
    for values in itertools.product(*choices.values()):
        parts = dict(zip(choices, values, strict=True))
        if parts["prefix"] is not None and not parts["causal"]:
            continue
        mask = sq.Mask(**parts)
        whole = mask.to_dense(queries, keys)
        start, stop = queries // 3, queries // 3 + max(1, queries // 2)
        first, last = mask.span(start, stop, queries, keys)
        rows = mask.rows(start, stop, queries, keys, span=(first, last))
        assert torch.equal(rows, whole[..., start:stop, first:last])
        outside = whole[..., start:stop, :].clone()
        outside[..., first:last] = False
        assert not outside.any()


def test_the_span_is_as_small_as_positions_allow():
    assert sq.Mask().span(2, 4, 10, 12) == (0, 12)
    assert sq.Mask(causal=True).span(2, 4, 10, 12) == (0, 6)
    assert sq.Mask(causal=True, prefix=9).span(2, 4, 10, 12) == (0, 9)
    assert sq.Mask(window=(2, 1)).span(2, 4, 10, 12) == (2, 7)
    assert sq.Mask(causal=True).span(0, 3, 10, 5) == (0, 0)


def test_causal_is_aligned_to_the_end():
    assert sq.Mask(causal=True).to_dense(1, 5).all()  # a cached decoding step reads all keys
    assert sq.Mask(causal=True).to_dense(3, 2).tolist() == [
        [False, False],
        [True, False],
        [True, True],
    ]


def test_kinds_lists_the_parts_in_use():
    assert sq.Mask().kinds() == ()
    mask = sq.Mask(causal=True, key=torch.ones(3, dtype=torch.bool), prefix=0, window=1)
    assert mask.kinds() == ("causal", "key", "prefix", "window")


def test_of_joins_shortcuts_with_a_mask():
    key = torch.ones(2, 3, dtype=torch.bool)
    joined = sq.Mask.of(causal=True, key_mask=key, mask=sq.Mask(window=2))
    assert joined.causal and joined.key is key and joined.window == 2
    assert sq.Mask.of(causal=False, mask=sq.Mask(causal=True)).causal
    with pytest.raises(sq.OptionError, match="key_mask is given twice"):
        sq.Mask.of(key_mask=key, mask=sq.Mask(key=key))
    with pytest.raises(sq.OptionError, match=r"given Tensor.*subquad\.Mask\(dense=tensor\)"):
        sq.Mask.of(mask=key)


def test_flatten_merges_leading_dimensions():
    lead = (2, 3)
    key = random(3, S) > 0.5  # broadcasts over the first
    prefix = torch.arange(6).reshape(2, 3)
    places = torch.arange(L).expand(2, 3, L)
    dense = random(2, 1, 5, L, S) > 0.5
    mask = sq.Mask(causal=True, key=key, prefix=prefix, segments=(places, key.long()), dense=dense)
    flat = mask.flatten(lead, L, S, torch.device("cpu"))
    assert torch.equal(flat.key, key.repeat(2, 1))
    assert torch.equal(flat.prefix, torch.arange(6))
    assert [tuple(part.shape) for part in flat.segments] == [(6, L), (6, S)]
    assert torch.equal(flat.dense, dense.expand(2, 3, 5, L, S).reshape(6, 5, L, S))
    assert sq.Mask(dense=dense[0, 0, 0]).flatten(lead, L, S, torch.device("cpu")).dense.shape == (
        1,
        1,
        L,
        S,
    )


def test_flatten_takes_a_tensor_prefix_alone():
    mask = sq.Mask(causal=True, prefix=torch.tensor([1, 4]))
    assert mask.flatten((2,), L, S, torch.device("cpu")).prefix.tolist() == [1, 4]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"key": torch.ones(3, S, dtype=torch.bool)}, r"key_mask must broadcast to \(2, 11\)"),
        ({"key": torch.ones(2, L, dtype=torch.bool)}, r"given \(2, 7\)"),
        ({"causal": True, "prefix": torch.zeros(3, dtype=torch.long)}, r"prefix must .* \(2\)"),
        ({"segments": torch.zeros(2, L, dtype=torch.long)}, r"segments must .* \(2, 11\)"),
        ({"dense": torch.ones(S, L, dtype=torch.bool)}, r"L, S = 7, 11, given \(11, 7\)"),
        ({"dense": torch.ones(5, 3, L, S)}, r"must broadcast to \(2, H, 7, 11\)"),
    ],
)
def test_flatten_names_what_does_not_fit(parts, message):
    with pytest.raises(sq.ShapeError, match=message):
        sq.Mask(**parts).flatten((2,), L, S, torch.device("cpu"))


def test_flatten_names_the_devices():
    mask = sq.Mask(key=torch.ones(S, dtype=torch.bool, device="meta"))
    with pytest.raises(sq.DeviceError, match="key_mask is on meta, the queries are on cpu"):
        mask.flatten((), L, S, torch.device("cpu"))
    mask = sq.Mask(dense=torch.ones(L, S, device="meta"))
    with pytest.raises(sq.DeviceError, match="mask is on meta"):
        mask.flatten((), L, S, torch.device("cpu"))


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ({"causal": 1}, sq.OptionError, "causal=1 must be True or False"),
        ({"prefix": 3}, sq.OptionError, "prefix needs causal=True"),
        ({"causal": True, "prefix": -1}, sq.OptionError, "prefix=-1 must be ≥ 0"),
        ({"window": -1}, sq.OptionError, "window=-1 must be ≥ 0"),
        ({"window": (2, -3)}, sq.OptionError, r"window=\(2, -3\)"),
        ({"key": torch.ones(3)}, sq.DtypeError, "key_mask must be torch.bool"),
        ({"key": torch.ones(3, dtype=torch.long)}, sq.DtypeError, r"use mask.bool\(\)"),
        ({"causal": True, "prefix": torch.ones(2)}, sq.DtypeError, "prefix must be integers"),
        ({"segments": torch.ones(3)}, sq.DtypeError, "segments must be integers"),
        ({"dense": torch.ones(3, 3, dtype=torch.long)}, sq.DtypeError, "bool or floating point"),
    ],
)
def test_wrong_parts_are_named(parts, error, message):
    with pytest.raises(error, match=message):
        sq.Mask(**parts)
