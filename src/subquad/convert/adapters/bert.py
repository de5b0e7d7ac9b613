"""RoFormer, RemBERT, TAPAS and others: BERT's attention, written out by each."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from subquad.convert import routing
from subquad.convert.adapters.base import Adapter, dropout_of

__all__ = ["BertLike", "BertTuple"]


class BertLike(Adapter):
    """``query``, ``key``, ``value`` projections; self- or cross-attention; caches; RoFormer's
    rotary positions.
    """

    def forward(
        self,
        module: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        output_attentions: bool = False,
        *,
        sinusoidal_pos: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """The heads side by side, (B, L, C), and None for the weights.

        Beyond the mask, models pass all by name; VisualBERT one more.
        """
        cross = encoder_hidden_states is not None
        q = self._heads(module, module.query, hidden_states)
        cache, filled = self._cache(module, past_key_values, cross)
        if cross and filled:
            layer = cache.layers[module.layer_idx]
            k, v = layer.keys, layer.values
        else:
            states = hidden_states if encoder_hidden_states is None else encoder_hidden_states
            k, v = (self._heads(module, project, states) for project in (module.key, module.value))
            if not cross and sinusoidal_pos is not None:
                rotate = module.apply_rotary_position_embeddings
                if module.rotary_value:
                    q, k, v = rotate(sinusoidal_pos, q, k, v)
                else:
                    q, k = rotate(sinusoidal_pos, q, k)
            if cache is not None:
                k, v = cache.update(k, v, module.layer_idx)
                if cross and hasattr(past_key_values, "is_updated"):
                    past_key_values.is_updated[module.layer_idx] = True
        out = routing.attend(
            module,
            q,
            k,
            v,
            attention_mask,
            dropout=dropout_of(module),
            is_causal=bool(getattr(module, "is_decoder", False)) and not cross,
        )
        return out.transpose(1, 2).flatten(2), None

    @staticmethod
    def _heads(module: Any, project: Any, states: Tensor) -> Tensor:
        return project(states).unflatten(-1, (-1, module.attention_head_size)).transpose(1, 2)

    @staticmethod
    def _cache(module: Any, past: Any, cross: bool) -> tuple[Any, bool]:
        """The cache of this kind of attention, and whether cross-attention has filled it."""
        if not hasattr(past, "is_updated"):  # not an encoder–decoder's pair of caches
            return past, False
        filled = bool(past.is_updated.get(module.layer_idx))
        return (past.cross_attention_cache if cross else past.self_attention_cache), filled

    def use(self, name: str, module: Any, parent: Any) -> str | None:
        """Decoders say so; cross-attention is told by its name."""
        return "causal" if getattr(module, "is_decoder", False) and "cross" not in name else None


class BertTuple(BertLike):
    """Those that return weights only where asked for, and a decoder's cache behind them."""

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """As `BertLike.forward`, in that form."""
        out, weights = super().forward(module, *args, **kwargs)
        asked = kwargs.get("output_attentions", args[2] if len(args) > 2 else False)
        past = (kwargs.get("past_key_values"),) if getattr(module, "is_decoder", False) else ()
        return (out, *([weights] if asked else []), *past)
