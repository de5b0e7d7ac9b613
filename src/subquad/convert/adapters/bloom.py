"""BLOOM: ALiBi, a bias of the key's position, as one more dimension of each head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.convert import routing
from subquad.convert.adapters.base import Adapter, dropout_of

__all__ = ["Bloom"]


class Bloom(Adapter):
    """One fused projection; the logits have a term slope_h · position_j.

    BLOOM's form of ALiBi is a function of the key alone, so it is exactly the product of one
    more pair of coordinates:

        scale·(q, 1)·(k, slope·j / scale) = scale·q·k + slope·j

    Any mechanism for exp(scale·q·k) takes it then, with heads of D + 1 dimensions. Those keys
    are long: random features estimate them badly; exact near fields do not mind.

    Paper: Press et al. 2021, arXiv 2108.12409, section 3.
    """

    def forward(
        self,
        module: Any,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Tensor,
        attention_mask: Tensor | None,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """The residual stream with this layer's output added, and no weights."""
        q, k, v = module._reshape(module.query_key_value(hidden_states))
        if layer_past is not None:
            k, v = layer_past.update(k, v, module.layer_idx)
        scale = float(module.inv_norm_factor)
        # A cache of states gives the new keys alone: theirs are the last positions.
        position = alibi.view(len(q), module.num_heads, -1, 1)[:, :, -k.shape[2] :] / scale
        out = routing.attend(
            module,
            torch.cat([q, q.new_ones(*q.shape[:-1], 1)], -1),
            torch.cat([k, position.to(k.dtype)], -1),
            v,
            attention_mask,
            scaling=scale,
            dropout=dropout_of(module, "attention_dropout"),
            is_causal=True,
        )
        out = module.dense(out.transpose(1, 2).flatten(2))
        return residual + F.dropout(out, module.hidden_dropout, module.training), None

    def sizes(self, module: Any) -> tuple[int, int, int]:
        """One dimension more, for the position."""
        return module.head_dim + 1, module.num_heads, module.num_heads

    def use(self, name: str, module: Any, parent: Any) -> str:
        """Always a decoder's."""
        return "causal"
