"""`token_cross_entropy` against torch's own, in parts and whole."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from subquad.models import entropy
from subquad.models.entropy import token_cross_entropy

WORDS = 37


def batch(dtype: torch.dtype, rows: int = 23) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    logits = (4 * torch.randn(rows, WORDS)).to(dtype).requires_grad_()
    labels = torch.randint(0, WORDS, (rows,))
    labels[::5] = -100
    return logits, labels


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("chunk", [1, 5 * WORDS, 1 << 19])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equals_torch_with_its_gradient(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, chunk: int, smoothing: float
) -> None:
    """To rounding.

    Loss: Σ of 37 terms below 30 each, and a logarithm: 64 roundings of 30 in its own dtype, float32
    for bfloat16. Gradient: p has at most 40 roundings (the sum, exp, the division), p − q is below
    1 and the outer gradient at most 3, so 3·40/2 eps of that dtype; and it is rounded twice to the
    dtype of the logits, 3·2/2 eps of that.
    """
    monkeypatch.setattr(entropy, "CHUNK", chunk)
    logits, labels = batch(dtype)
    wide = logits.to(torch.promote_types(dtype, torch.float32))
    expected = F.cross_entropy(wide, labels, label_smoothing=smoothing, reduction="none")
    found = token_cross_entropy(logits, labels, smoothing)
    assert found.dtype == expected.dtype
    eps = torch.finfo(expected.dtype).eps
    torch.testing.assert_close(found, expected, rtol=0, atol=64 * 30 * eps)
    outer = torch.linspace(-3, 3, len(labels), dtype=expected.dtype)
    (own,) = torch.autograd.grad(found, logits, outer)
    (right,) = torch.autograd.grad(expected, logits, outer)
    torch.testing.assert_close(own, right, rtol=0, atol=60 * eps + 3 * torch.finfo(dtype).eps)
    assert not found[::5].any() and not own[::5].any()


def test_poisoned_rows_without_a_label_do_not_count() -> None:
    logits, labels = batch(torch.float32)
    with torch.no_grad():
        logits[0] = float("nan")
    total = token_cross_entropy(logits, labels, 0.1).sum()
    total.backward()
    assert logits.grad is not None
    assert total.isfinite() and logits.grad[1:].isfinite().all() and not logits.grad[0].any()


def test_gradcheck() -> None:
    logits, labels = batch(torch.float64, 6)
    assert torch.autograd.gradcheck(lambda x: token_cross_entropy(x, labels, 0.1), [logits])


@pytest.mark.parametrize("label", [-1, WORDS])
def test_labels_outside_of_the_vocabulary(label: int) -> None:
    logits, labels = batch(torch.float32)
    labels[3] = label
    with pytest.raises(IndexError, match=f"{label}.*37 words"):
        token_cross_entropy(logits, labels)


def test_no_rows_and_no_gradient() -> None:
    assert token_cross_entropy(torch.zeros(0, 5), torch.zeros(0, dtype=torch.long)).shape == (0,)
    with torch.no_grad():
        assert token_cross_entropy(torch.zeros(2, 5), torch.tensor([1, -100])).tolist() == (
            pytest.approx([1.6094379, 0.0])
        )


def test_compiled_is_the_same() -> None:
    logits, labels = batch(torch.float32)
    compiled = torch.compile(token_cross_entropy, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(
        compiled(logits, labels, 0.1), token_cross_entropy(logits, labels, 0.1)
    )
