"""FlexAttention's lowering of the block engine's layouts, against the block engine.

On a CPU torch runs FlexAttention's definition, uncompiled, with the block mask's own dense
form; the fused kernels need a GPU (marker `gpu`).
"""

import pytest
import torch

from subquad.kernels import explain_block
from subquad.kernels.block import Layout, block_softmax
from subquad.kernels.flex import block_mask, flex_softmax

TOKENS = {"block": 64, "aligned": False, "span": True}
BLOCKS = {"block": 64, "aligned": True, "span": True}
LAYOUTS = {
    "window": (301, 301, {**TOKENS, "left": 37, "right": 11, "causal": False}),
    "causal window": (301, 301, {**TOKENS, "left": 37, "right": 0, "causal": True}),
    "fewer queries": (97, 301, {**TOKENS, "left": 37, "right": 5, "causal": False}),
    "fewer keys": (301, 97, {**TOKENS, "left": 37, "right": 5, "causal": True}),
    "dilation": (301, 301, {**TOKENS, "left": 7, "right": 5, "causal": False, "dilation": 3}),
    "blocks": (301, 301, {**BLOCKS, "left": 1, "right": 1, "causal": False}),
    "causal blocks": (101, 301, {**BLOCKS, "left": 1, "right": 0, "causal": True}),
    "gap": (301, 301, {**TOKENS, "left": 7, "right": 5, "causal": False, "dilation": 3, "skip": 2}),
    "gap of blocks": (301, 301, {**BLOCKS, "left": 2, "right": 1, "causal": False, "skip": 1}),
    "table alone": (301, 301, {**BLOCKS, "span": False, "left": 0, "right": 0, "causal": False}),
}


def problem(name, device="cpu", dim=16):
    queries, keys, options = LAYOUTS[name]
    generator = torch.Generator().manual_seed(3)
    layout = Layout(offset=keys - queries, **options)
    q = torch.randn(2, 4, queries, dim, generator=generator)
    k, v = (torch.randn(2, 2, keys, dim, generator=generator) for _ in range(2))
    key = torch.rand(2, keys, generator=generator) > 0.3
    k, v = (t.masked_fill(~key[:, None, :, None], 0.0) for t in (k, v))
    segments = (torch.arange(queries) * 2 // queries, torch.arange(keys) * 2 // keys)
    segments = tuple(t.expand(2, -1) for t in segments)
    table = None
    if layout.aligned:
        first, blocks = layout.offset // 64, -(-keys // 64)
        own = torch.arange(first, blocks)
        far = torch.stack([(own + 2) % blocks, (own + 3) % blocks])  # one for each kv head
        near = (far - own >= -layout.left) & (far - own <= layout.right) & layout.span
        table = far.masked_fill(near, -1)[..., None]
    more = {"table": table, "key": key, "segments": segments}
    more = {n: t if isinstance(t, tuple) or t is None else t.to(device) for n, t in more.items()}
    more["segments"] = tuple(t.to(device) for t in segments)
    return layout, [t.to(device) for t in (q, k, v)], more


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", LAYOUTS)
def test_both_lowerings_agree(name):
    layout, tensors, more = problem(name)
    out, lse = block_softmax(*tensors, layout, scale=0.25, need_lse=True, **more)
    found, found_lse = flex_softmax(*tensors, layout, scale=0.25, compiled=False, **more)
    # Both are float32 softmax over ≤ 301 keys: sums of positive terms, a few roundings of
    # 6e-8 each; exponents ≤ 10 carry another 10·6e-8. 1e-5 leaves a margin of ten.
    torch.testing.assert_close(found, out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found_lse, lse, atol=1e-5, rtol=1e-5)


def test_blocks_out_of_reach_are_skipped():
    layout = Layout(64, 100, 0, False, True, True, 0)
    mask = block_mask(layout, 1, 4, 2, 2048, 2048)
    # 128 queries reach back 100 keys: at most two blocks of 128 each, one for the first.
    assert mask.kv_num_blocks.flatten().tolist() == [1] + [2] * 15


def test_the_choice_is_explained():
    layout, (q, _, v), _ = problem("window")
    choice = explain_block(q, v, layout)
    assert choice.backend == "torch" and "no backward pass on cpu" in choice.reason


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["window", "causal window", "dilation"])
def test_fused_forward_and_gradients(name):
    layout, tensors, more = problem(name, "cuda", dim=64)
    leaves = [t.requires_grad_() for t in tensors]
    results = []
    for run in (flex_softmax, None):
        if run is None:
            found = torch.ops.subquad.block_softmax(
                *leaves, more["table"], more["key"], *more["segments"], layout.block,
                layout.left, layout.right, layout.aligned, layout.span, layout.causal,
                layout.offset, layout.dilation, 0.125, True,
            )  # fmt: skip
        else:
            found = run(*leaves, layout, scale=0.125, **more)
        total = found[0].square().sum() + found[1].clamp_min(-100).sum()
        results.append([*found, *torch.autograd.grad(total, leaves)])
    for a, b in zip(*results, strict=True):
        # A fused kernel may multiply in TF32, a mantissa of 10 bits: operands are off by 2^-11,
        # products of two by 2^-10, logits of size ≤ 5 by 5e-3, hence weights by 5e-3 relative.
        # A gradient is a product of a weight and such a difference: 1e-2; both sides: 2e-2.
        torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)
