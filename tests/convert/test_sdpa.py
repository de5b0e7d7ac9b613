from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention as imported_by_name

import subquad as sq

# float32, sums over at most 17 keys with values of a few units: some ten roundings.
CLOSE = {"rtol": 1e-5, "atol": 5e-6}
# Leading dimensions and heads, as the function takes them.
LEADS = [(), (3,), (2, 3), (2, 5, 3)]


def tensors(lead: tuple[int, ...], queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(len(lead))
    shapes = ((queries, 4), (keys, 4), (keys, 6))
    q, k, v = (torch.randn(*lead, *shape, generator=made) for shape in shapes)
    return q, k, v


def swapped(mechanism: str, *args: Any, **kwargs: Any) -> Tensor:
    with sq.swap_sdpa(mechanism) as calls:
        out = F.scaled_dot_product_attention(*args, **kwargs)
    assert calls.calls == 1
    return out


@pytest.mark.parametrize("lead", LEADS, ids=str)
@pytest.mark.parametrize(
    ("queries", "keys", "options"),
    [
        (7, 11, {}),
        (11, 11, {"is_causal": True}),
        (7, 11, {"is_causal": True}),  # aligned to the first key: keys 7 and on are never read
        (17, 11, {"is_causal": True}),  # queries 11 and on read all
        (7, 11, {"scale": 0.3}),
        (7, 11, {"attn_mask": torch.arange(11) % 3 > 0}),
        (7, 11, {"attn_mask": torch.arange(77).view(7, 11) % 5 > 0}),
        (7, 11, {"attn_mask": torch.linspace(-2, 1, 77).view(7, 11)}),
    ],
    ids=str,
)
def test_softmax_means_what_torch_means(
    queries: int, keys: int, options: dict[str, Any], lead: tuple[int, ...]
) -> None:
    args = tensors(lead, queries, keys)
    if isinstance(mask := options.get("attn_mask"), Tensor) and mask.dim() == 1:
        options = {"attn_mask": mask.expand(queries, keys)}
    exact = F.scaled_dot_product_attention(*args, **options)
    out = swapped("softmax", *args, **options)
    assert out.shape == exact.shape
    torch.testing.assert_close(out, exact, **CLOSE)


@pytest.mark.parametrize("lead", LEADS[1:], ids=str)
def test_masks_may_have_the_weights_dimensions(lead: tuple[int, ...]) -> None:
    args = tensors(lead, 7, 11)
    mask = torch.randn(*lead, 7, 11, generator=torch.Generator().manual_seed(0))
    exact = F.scaled_dot_product_attention(*args, attn_mask=mask)
    torch.testing.assert_close(swapped("softmax", *args, attn_mask=mask), exact, **CLOSE)


def test_grouped_and_broadcast_heads() -> None:
    q, (k, v) = torch.randn(2, 6, 7, 4), torch.randn(2, 2, 2, 7, 4)
    exact = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(swapped("softmax", q, k, v, enable_gqa=True), exact, **CLOSE)
    with pytest.raises(sq.ShapeError, match="key must have query's 6 heads.*enable_gqa"):
        swapped("softmax", q, k, v)
    one = F.scaled_dot_product_attention(q, k[:, :1], v[:, :1])
    torch.testing.assert_close(swapped("softmax", q, k[:, :1], v[:, :1]), one, **CLOSE)


@pytest.mark.parametrize("kind", ["causal", "keys"])
def test_masks_that_are_plain_reach_linear_mechanisms(kind: str) -> None:
    """The same call, once with a tensor that is read and once said outright: equal bits."""
    q, k, v = tensors((2, 3), 11, 11)
    if kind == "causal":
        mask, said = torch.ones(11, 11).tril().bool(), {"causal": True}
    else:
        mask = (torch.arange(11) < torch.tensor([8, 11])[:, None])[:, None, None]
        said = {"key_mask": mask[:, 0, 0]}
    expected = sq.attention(q, k, v, "performer", **said)
    for given in (mask, torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))):
        assert torch.equal(swapped("performer", q, k, v, attn_mask=given), expected)
    odd = torch.ones(11, 11).bool()
    odd[4, 5] = False
    with pytest.raises(sq.UnsupportedError, match="'performer' does not support dense.*softmax"):
        swapped("performer", q, k, v, attn_mask=odd)


class Caller(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return imported_by_name(x, x, x)


def test_all_callers_are_reached_and_only_within() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 9, 24)
    layer = nn.TransformerEncoderLayer(24, 4, 40, batch_first=True).eval()
    attn = nn.MultiheadAttention(24, 4, batch_first=True).eval()
    callers = [
        Caller(),
        layer,  # whose fast path would go around the function
        lambda x: attn(x, x, x, need_weights=False)[0],
    ]
    for caller in callers:
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                exact = caller(x)
                with sq.swap_sdpa("softmax") as calls:
                    torch.testing.assert_close(caller(x), exact, **CLOSE)
                with sq.swap_sdpa("performer(features=8)", seed=3):
                    assert (caller(x) - exact).abs().max() > 1e-3
                assert calls.calls == 1
                assert torch.equal(caller(x), exact)


def test_errors_inside_restore_too() -> None:
    x = torch.randn(1, 2, 5, 4)
    exact = F.scaled_dot_product_attention(x, x, x)
    with pytest.raises(RuntimeError, match="mine"), sq.swap_sdpa("performer"):
        raise RuntimeError("mine")
    assert torch.equal(F.scaled_dot_product_attention(x, x, x), exact)


def test_other_threads_keep_their_own() -> None:
    x = torch.randn(1, 2, 5, 4)
    exact = F.scaled_dot_product_attention(x, x, x)
    results: list[Tensor] = []
    with sq.swap_sdpa("performer(features=8)") as calls:
        thread = threading.Thread(
            target=lambda: results.append(F.scaled_dot_product_attention(x, x, x))
        )
        thread.start()
        thread.join()
        assert not torch.equal(F.scaled_dot_product_attention(x, x, x), exact)
    assert torch.equal(results[0], exact)
    assert calls.calls == 1


def test_gradients_go_through() -> None:
    args = [t.requires_grad_() for t in tensors((2, 3), 7, 7)]
    F.scaled_dot_product_attention(*args, is_causal=True).square().sum().backward()
    exact = [t.grad.clone() for t in args]
    for t in args:
        t.grad = None
    swapped("softmax", *args, is_causal=True).square().sum().backward()
    for t, grad in zip(args, exact, strict=True):
        # float32, two orders of the same sums: some tens of roundings of 6e-8, forward and back
        torch.testing.assert_close(t.grad, grad, rtol=1e-4, atol=2e-5)


def test_the_inner_of_two_is_the_one_that_runs() -> None:
    """Exact mechanisms call the function themselves: that is not the outer one's business."""
    q, k, v = tensors((2, 3), 7, 11)
    exact = F.scaled_dot_product_attention(q, k, v)
    with sq.swap_sdpa("performer") as outer:
        torch.testing.assert_close(swapped("softmax", q, k, v), exact, **CLOSE)
        assert outer.calls == 0
        with pytest.raises(sq.ShapeError):
            swapped("softmax", q, k[0, 0], v)
        assert not torch.equal(F.scaled_dot_product_attention(q, k, v), exact)
    assert outer.calls == 1


def test_what_is_said() -> None:
    x = torch.randn(1, 2, 5, 4)
    with pytest.warns(UserWarning, match="dropout 0.5 is not applied by 'performer'"):
        swapped("performer", x, x, x, dropout_p=0.5)
    with pytest.warns(UserWarning, match="nothing called"), sq.swap_sdpa("performer"):
        pass
    with pytest.raises(sq.OptionError, match="attn_mask or is_causal"):
        swapped("softmax", x, x, x, attn_mask=torch.ones(5, 5).bool(), is_causal=True)
    with pytest.raises(sq.ShapeError, match=r"attn_mask must broadcast.*\(5, 4\)"):
        swapped("softmax", x, x, x, attn_mask=torch.ones(5, 4).bool())
    with pytest.raises(sq.ShapeError, match="one number of dimensions"):
        swapped("softmax", x, x[0], x[0])
    with pytest.raises(sq.ShapeError, match="leading dimensions that broadcast"):
        swapped("softmax", x.expand(2, -1, -1, -1), x.expand(3, -1, -1, -1), x)
    attn = nn.MultiheadAttention(8, 2, batch_first=True)
    y = torch.randn(1, 5, 8)
    with (
        pytest.raises(sq.UnsupportedError, match="need_weights=True.*subquad.convert"),
        sq.swap_sdpa("softmax"),
    ):
        attn(y, y, y)
    with pytest.raises(sq.UnknownNameError, match="performer"), sq.swap_sdpa("perfomer"):
        pass
    with pytest.raises(sq.UnsupportedError, match="functional form"):
        swapped("linformer(k=8)", x, x, x)
