"""GPT-J and CodeGen: one method between rotary embedding and output projection."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from subquad.convert import routing
from subquad.convert.adapters.base import Adapter, dropout_of

__all__ = ["GPTJ"]


class GPTJ(Adapter):
    """``_attn(query, key, value, attention_mask)`` of heads with rotary positions, causal."""

    method = "_attn"

    def forward(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """(B, H, L, D), and no weights."""
        query, key = query.to(value.dtype), key.to(value.dtype)
        out = routing.attend(
            module,
            query,
            key,
            value,
            attention_mask,
            scaling=1.0 / float(module.scale_attn),
            dropout=dropout_of(module, "attn_dropout"),
            is_causal=True,
        )
        return out, None

    def use(self, name: str, module: Any, parent: Any) -> str:
        """Always a decoder's."""
        return "causal"
