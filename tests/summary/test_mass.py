"""Column mass from stratified landmark queries: ranks, positions, and the naive definition."""

import pytest
import torch

from subquad.attention.masks import Mask
from subquad.attention.summary import mass
from subquad.attention.summary.mass import column_mass, of_rank, strata, take

F64 = torch.float64


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def opened(*rows):
    return torch.tensor([[c == "x" for c in row] for row in rows])


def test_strata_take_one_rank_from_each_share_of_the_open_tokens():
    rows = opened("x-xx-xxx-x", "----------", "--x-------", "xxxxxxxxxx")
    # 7 open tokens in 3 strata: ⌊(t + ½)·7/3⌋ = 1, 3, 5; one in 3: thrice rank 0.
    assert strata(rows, 3)[:, 0].tolist() == [[1, 3, 5], [-1] * 3, [0] * 3, [1, 5, 8]]
    # ⌊(t + u)·10/3⌋ with u = 0, 0.2, 0.999
    offset = torch.tensor([[0.0, 0.2, 0.999]], dtype=F64)
    assert strata(rows, 3, offset)[3, 0].tolist() == [0, 4, 9]
    assert strata(rows, 3, offset)[1, 0].tolist() == [-1] * 3
    position = of_rank(rows, torch.tensor([[0, 1, 6], [-1] * 3, [0] * 3, [9, 0, 5]]))
    assert position.tolist() == [[0, 2, 9], [0] * 3, [2] * 3, [9, 0, 5]]


@pytest.mark.parametrize("count", [3, 11, 29])
def test_every_rank_is_taken_equally_often_where_strata_divide(count):
    """With as many strata as tokens, each token is taken once, whatever the offset."""
    every = torch.ones(1, count, dtype=torch.bool)
    offset = torch.rand(5, count, generator=torch.Generator().manual_seed(1), dtype=F64)
    assert torch.equal(strata(every, count, offset), torch.arange(count).expand(1, 5, count))
    assert torch.equal(strata(every, count), torch.arange(count).expand(1, 1, count))


def test_take_serves_groups_of_heads():
    x, index = randn(2, 3, 7, 5), torch.randint(7, (2, 6, 4))
    found = take(x, index)
    for b, h, n in torch.cartesian_prod(torch.arange(2), torch.arange(6), torch.arange(4)):
        assert torch.equal(found[b, h, n], x[b, h // 2, index[b, h, n]])


@pytest.mark.parametrize("size", [None, 1])
@pytest.mark.parametrize("queries", [23, 17])
def test_mass_is_the_mean_attention_of_the_landmarks(queries, size, monkeypatch):
    """Also one landmark at a time: chunks change nothing."""
    if size:
        monkeypatch.setattr(mass, "CHUNK_BYTES", size)
    q, k = randn(2, 6, queries, 5, seed=1), randn(2, 3, 23, 5, seed=2)
    key = torch.rand(2, 23, generator=torch.Generator().manual_seed(3)) > 0.4
    offset = torch.rand(3, 4, generator=torch.Generator().manual_seed(4), dtype=F64)
    found = column_mass(q, k, Mask(key=key), 0.7, 4, offset)
    for b in range(2):
        # Where L = S, masked queries are padding.
        rows = key[b].nonzero().flatten() if queries == 23 else torch.arange(queries)
        for head in range(3):
            wanted = torch.zeros(23, dtype=F64)
            for t in range(4):
                i = rows[int((t + offset[head, t]) * len(rows) / 4)]
                for h in (2 * head, 2 * head + 1):
                    logits = (0.7 * k[b, head] @ q[b, h, i]).masked_fill(~key[b], -torch.inf)
                    wanted += logits.softmax(0) / 8
            # sums of ≤ 23·8 float64 terms: below 1e-13
            torch.testing.assert_close(found[b, head], wanted, rtol=1e-12, atol=1e-14)
    assert not found.masked_select(~key[:, None]).any()


def test_mass_of_a_row_without_keys_is_zero():
    q, k = randn(1, 2, 5, 3), randn(1, 2, 5, 3, seed=1)
    assert not column_mass(q, k, Mask(key=torch.zeros(1, 5).bool()), 1.0, 4).any()


def test_the_window_is_no_wider_than_the_sequence(monkeypatch):
    """Its cost neither: a wider window closes the same keys, all of those in reach."""
    sizes = []
    gather = torch.Tensor.gather

    def seen(self, dim, index):
        sizes.append(index.shape[-1])
        return gather(self, dim, index)

    monkeypatch.setattr(torch.Tensor, "gather", seen)
    for queries, keys in ((19, 19), (31, 7), (7, 31)):
        q, k = randn(1, 2, queries, 3), randn(1, 2, keys, 3, seed=1)
        far = max(queries, keys) - 1  # no query is farther from a key
        for window in (10**6, torch.tensor([10**6])):
            assert not column_mass(q, k, Mask(), 1.0, 4, window=window).any()
        assert not column_mass(q, k, Mask(), 1.0, 4, window=far).any()
        assert max(sizes) <= 2 * far + 1
        sizes.clear()
