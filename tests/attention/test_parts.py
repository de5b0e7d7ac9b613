"""`Mechanism.partials`: named sums that are the whole output together."""

import pytest
import torch

import subquad as sq

SPECS = (
    "near_far",
    "near_far(preset=fast)",
    "near_far(window=4, heavy=3, sinks=2, far=performer(features=16))",
    "near_far(window=4, heavy=0, sinks=0, far=softmax)",
    "mixed(near_far(window=4, heavy=0, far=performer)*2, local(window=3)*4)",
    "mixed(performer, near_far(window=2, far=performer), kv_heads=[[0, 2], [1]])",
)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", SPECS)
def test_parts_merge_to_the_output(spec, causal):
    torch.manual_seed(0)
    q = torch.randn(2, 6, 67, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, 3, 67, 8, dtype=torch.float64)
    key = torch.arange(67) < torch.tensor([[67], [53]])
    mech = sq.build(spec, head_dim=8, num_heads=6, num_kv_heads=3, dtype=torch.float64)
    parts = mech.partials(q, k, v, causal=causal, key_mask=key)
    assert len(parts) >= 2
    assert mech.training  # runs as in evaluation, and leaves the mode alone
    whole = mech.eval()(q, k, v, causal=causal, key_mask=key)
    # float64: a few hundred roundings of sums in another order
    torch.testing.assert_close(sq.merge(parts.values()), whole, rtol=1e-11, atol=1e-12)


def test_leading_dimensions_and_half_precision():
    mech = sq.build("near_far(window=2, heavy=0, far=performer)", head_dim=8, num_heads=2)
    q, k, v = torch.randn(3, 2, 3, 2, 21, 8)
    parts = mech.partials(q, k, v)
    assert {part.num.shape for part in parts.values()} == {(2, 3, 2, 21, 8)}
    half = mech.partials(q.half(), k.half(), v.half())
    assert {part.den.dtype for part in half.values()} == {torch.float32}


def test_what_is_one_piece_has_no_parts():
    q, k, v = torch.randn(3, 1, 4, 9, 8)
    for spec in ("softmax", "performer", "mixed(local, performer)"):
        assert sq.build(spec, head_dim=8, num_heads=4).partials(q, k, v) == {}
    with pytest.raises(sq.ShapeError, match="k must be"):
        sq.build("near_far", head_dim=8, num_heads=4).partials(q, k[..., :4], v)
