"""`torch.nn.MultiheadAttention` in place, inside any model."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from subquad.attention.masks import Mask
from subquad.attention.multihead import MultiheadAttention
from subquad.convert import routing
from subquad.convert.adapters.base import Adapter

__all__ = ["ConvertedMultiheadAttention", "Multihead"]


class ConvertedMultiheadAttention(MultiheadAttention):
    """A `torch.nn.MultiheadAttention` whose class was exchanged: same object, same parameters.

    Calls mean what they mean for `subquad.MultiheadAttention`; on the exact path it is torch's
    module again, fast paths included. Never constructed.
    """

    _slot = routing.SLOT

    @property
    def mechanism(self) -> Any:  # type: ignore[override]  # a submodule of another name here
        """The mechanism in this layer's slot."""
        return self._modules[routing.SLOT]

    @property
    def num_kv_heads(self) -> int:  # type: ignore[override]  # torch's module has no such size
        """As many as query heads."""
        return self.num_heads

    @property
    def _qkv_same_embed_dim(self) -> bool:
        # Read by torch's layers before they bypass this module's forward: open to the exact
        # path only. The module's own value stays where it was.
        return routing.is_exact(self) and bool(self.__dict__["_qkv_same_embed_dim"])

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """As `subquad.MultiheadAttention.forward`, or torch's on the exact path."""
        if routing.is_exact(self):
            return nn.MultiheadAttention.forward(self, *args, **kwargs)
        return super().forward(*args, **kwargs)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return routing.attend(self, q, k, v, mask, dropout=dropout)

    def _drawn(self, state_dict: Any, prefix: str) -> dict[str, Tensor]:
        return {}  # on the meta device: strict loading names what is missing


class Multihead(Adapter):
    """Exchanges the class; torch's layers decide by the class and its attributes what they call."""

    interface = False

    def install(self, module: nn.Module) -> None:
        """Makes it a `ConvertedMultiheadAttention`."""
        module.__class__ = ConvertedMultiheadAttention

    def remove(self, module: nn.Module) -> None:
        """Makes it torch's again."""
        module.__class__ = nn.MultiheadAttention

    def use(self, name: str, module: Any, parent: nn.Module | None) -> str | None:
        """By torch's layers, and by the widths of keys and values."""
        last = name.rpartition(".")[2]
        if isinstance(parent, nn.TransformerDecoderLayer):
            return "cross" if last == "multihead_attn" else "causal"
        return None if module.kdim == module.vdim == module.embed_dim else "cross"
