"""`LinformerEncoderLayer`: a Transformer encoder layer whose self-attention is Linformer's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad.attention.feedforward import ACTIVATIONS, activation_problem
from subquad.attention.multihead import MultiheadAttention
from subquad.attention.summary.linformer import Linformer, LinformerConfig
from subquad.errors import OptionError, ShapeError
from subquad.options import flag_problem, integer_problem

__all__ = ["LinformerEncoderLayer"]


class LinformerEncoderLayer(nn.Module):
    """Self-attention over k projected keys and a feed-forward network, each with a residual.

        post-norm (default)         x ← norm1(x + A(x)),   x ← norm2(x + FF(x))
        pre-norm                    x ← x + A(norm1(x)),   x ← x + FF(norm2(x))

    A is multi-head Linformer attention, FF(x) = W₂ act(W₁ x + b₁) + b₂. Inputs are (B, L, C),
    batch first. Parameter names are those of `torch.nn.TransformerEncoderLayer`, whose state
    dict loads (E and F, which it lacks, keep their values).

    Cost O(L·(k·C + C² + C·dim_feedforward)) FLOPs. The returned weights are B·H·L·k numbers
    before they are averaged; with ``need_weights=False`` they are never formed.

    Paper: Wang et al. 2020, arXiv 2006.04768, eq. 7; Vaswani et al. 2017, arXiv 1706.03762.

    Args:
        d_model: C, width of the model.
        nhead: H, number of heads; divides C.
        dim_feedforward: width inside FF.
        dropout: probability, on attention weights, inside FF and on both residual branches.
        activation: "relu", "gelu", "silu" or a function.
        normalize_before: pre-norm instead of post-norm.
        k: number of summaries; see `LinformerConfig`.
        max_length: longest sequence.
        sharing, projection: see `LinformerConfig`.
        seed: determines E and F.
        device, dtype: of the parameters.

    Raises:
        OptionError: for wrong sizes or options.

    Example:
        >>> import torch, subquad as sq
        >>> layer = sq.LinformerEncoderLayer(d_model=32, nhead=4, k=16, max_length=100)
        >>> output, attn = layer(torch.rand(2, 100, 32))
        >>> output.shape, attn.shape
        (torch.Size([2, 100, 32]), torch.Size([2, 100, 16]))
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = "relu",
        normalize_before: bool = False,
        *,
        k: int = 256,
        max_length: int = 1024,
        sharing: str | None = "headwise",
        projection: str = "learned",
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        problems = [
            *integer_problem("dim_feedforward", dim_feedforward, 1),
            *flag_problem("normalize_before", normalize_before),
            *activation_problem(activation, tuple(ACTIVATIONS)),
        ]
        if problems:
            raise OptionError("LinformerEncoderLayer: " + "; ".join(problems))
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.self_attn = MultiheadAttention(
            d_model,
            nhead,
            dropout=dropout,
            batch_first=True,
            mechanism=LinformerConfig(k=k, sharing=sharing, projection=projection),
            max_length=max_length,
            seed=seed,
            **factory,
        )
        self.linear1 = nn.Linear(d_model, dim_feedforward, **factory)
        self.dropout = nn.Dropout(dropout)
        self.linear2 = nn.Linear(dim_feedforward, d_model, **factory)
        self.norm1 = nn.LayerNorm(d_model, **factory)
        self.norm2 = nn.LayerNorm(d_model, **factory)
        self.dropout1 = nn.Dropout(dropout)
        self.dropout2 = nn.Dropout(dropout)
        self.activation = ACTIVATIONS[activation] if isinstance(activation, str) else activation
        self.normalize_before = normalize_before

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        *,
        need_weights: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """The layer's output and what each token gives to each summary.

        Args:
            src: (B, L, C), L ≤ `max_length`.
            src_mask: (L, L) or (B·H, L, L), torch's convention: True = ignore, or floats that
                are added. Only whole columns can be ignored: summaries mix all positions.
            src_key_padding_mask: (B, L) bool, True = ignore.
            need_weights: return the weights; without them attention is fused.

        Returns:
            (B, L, C), and the weights (B, L, K) averaged over heads, as applied (while training
            with dropped entries), or None. K is `k`; with windows, the number of windows.

        Raises:
            ShapeError: for a tensor that does not fit, or longer than `max_length`.
            UnsupportedError: for a `src_mask` that is causal or otherwise not of whole columns.
        """
        if src.dim() != 3 or src.shape[-1] != self.self_attn.embed_dim:
            raise ShapeError(
                f"src must be (B, L, C={self.self_attn.embed_dim}), given {tuple(src.shape)}"
            )
        masks = (src_mask, src_key_padding_mask)
        if self.normalize_before:
            attended, weights = self._attend(self.norm1(src), *masks, need_weights)
            x = src + self.dropout1(attended)
            return x + self.dropout2(self._feed_forward(self.norm2(x))), weights
        attended, weights = self._attend(src, *masks, need_weights)
        x = self.norm1(src + self.dropout1(attended))
        return self.norm2(x + self.dropout2(self._feed_forward(x))), weights

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self.linear2(self.dropout(self.activation(self.linear1(x))))

    def _attend(
        self,
        x: Tensor,
        attn_mask: Tensor | None,
        padding: Tensor | None,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        attn = self.self_attn
        if not need_weights:
            return attn(x, x, x, key_padding_mask=padding, attn_mask=attn_mask)
        mech = attn.mechanism
        assert isinstance(mech, Linformer), "built above"
        mask = attn._mask(x, x.shape[1], padding, attn_mask, False, True)
        q, k, v = attn._heads(*attn._project(x, x, x, True))
        weights, values = mech.summary_weights_and_values(q, k, v, mask=mask)
        weights = F.dropout(weights, attn.dropout, self.training)
        heads = weights.to(q.dtype) @ values
        return attn._out(heads, q.dtype), weights.mean(1)
