import pytest
import torch

from subquad.arena import loop

pytest.importorskip("sacrebleu")


def test_the_plain_model_sees_no_later_token_and_no_padding():
    torch.manual_seed(0)
    sizes = {
        "d_model": 16, "num_heads": 2, "encoder_layers": 1, "decoder_layers": 1,
        "dim_feedforward": 32, "dropout": 0.0,
    }  # fmt: skip
    model = loop.PlainTransformer(23, sizes)  # training mode: torch's fast path is another code
    source, target = torch.randint(1, 23, (2, 7)), torch.randint(1, 23, (2, 5))
    logits = model(source, target)
    other = target.clone()
    other[:, 3:] = 1
    torch.testing.assert_close(model(source, other)[:, :3], logits[:, :3])
    padded = torch.nn.functional.pad(source, (0, 3))
    torch.testing.assert_close(model(padded, target), logits)


@pytest.mark.slow
def test_a_quick_run(tmp_path):
    result = loop.run(tmp_path, True, True, lambda text: None)
    assert result["steps"] == 2
    assert result["ratio"] > 0
    assert "by hand" in (tmp_path / "loop.md").read_text(encoding="utf-8")
