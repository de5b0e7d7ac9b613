"""Modules that call ``scaled_dot_product_attention`` themselves: Falcon, timm's ViT."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from subquad.attention.base import Absent
from subquad.attention.masks import Mask
from subquad.convert import routing
from subquad.convert.adapters.base import Adapter
from subquad.convert.sdpa import Redirect
from subquad.errors import UnsupportedError
from subquad.options import Config
from subquad.registry import capable, resolve

__all__ = ["Falcon", "SDPACaller"]


class SDPACaller(Adapter):
    """Runs the module's own forward; its call of the fused attention goes to the mechanism.

    Masks are the model's own, L×S where it makes them so, and are read by their values.
    """

    interface = False

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """The module's own result, by the mechanism.

        Raises:
            UnsupportedError: if the call did not come to the fused function.
        """

        def attend(
            q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, dropout: float
        ) -> Tensor:
            return routing.attend(module, q, k, v, mask, scaling=scale, dropout=dropout)

        redirect = Redirect(attend)
        with redirect:
            out = type(module).forward(module, *args, **kwargs)
        if not redirect.calls:
            raise UnsupportedError(
                type(module).__name__,
                "conversion of this call",
                "it did not use scaled_dot_product_attention: switch the module's fused "
                "attention on (timm: fused_attn=True), and do not ask for attention weights",
            )
        return out


class Falcon(SDPACaller):
    """One fused projection; key/value heads per the architecture; ALiBi inside the mask."""

    def sizes(self, module: Any) -> tuple[int, int, int]:
        """New-style decoders repeat their key/value heads before the call."""
        repeated = module.new_decoder_architecture
        kv_heads = module.num_heads if repeated else module.num_kv_heads
        return module.head_dim, module.num_heads, kv_heads

    def check(self, name: str, module: Any, config: Config) -> None:
        """Only the fused path can be reached; ALiBi needs explicit masks."""
        now = str(module.config._attn_implementation)
        if now != "sdpa":
            raise UnsupportedError(
                type(module).__name__,
                f"conversion with attn_implementation={now!r}",
                "load the model with attn_implementation='sdpa'",
            )
        found, own = resolve(config)
        dense = found.capabilities_for(own).dense
        if module.config.alibi and isinstance(dense, Absent):
            raise UnsupportedError(
                found.name,
                f"the ALiBi bias of {name}",
                "it is a function of positions; leave such layers out with where= or keep_exact=",
                capable("dense"),
            )
