"""MPNet: BERT's attention with a relative position bias, one for all layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from subquad.convert import routing
from subquad.convert.adapters.base import Adapter, dropout_of

__all__ = ["MPNet"]


class MPNet(Adapter):
    """Self-attention with an output projection of its own.

    The position bias is an L×S term of the logits: mechanisms without explicit masks refuse
    it, unless it is zero, see `subquad.convert`.
    """

    def forward(
        self,
        module: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, ...]:
        """The projected output, and None for weights that were asked for."""
        q, k, v = (
            project(hidden_states).unflatten(-1, (-1, module.attention_head_size)).transpose(1, 2)
            for project in (module.q, module.k, module.v)
        )
        out = routing.attend(
            module,
            q,
            k,
            v,
            attention_mask,
            dropout=dropout_of(module),
            is_causal=False,
            position_bias=position_bias,
        )
        return (module.o(out.transpose(1, 2).flatten(2)),)
