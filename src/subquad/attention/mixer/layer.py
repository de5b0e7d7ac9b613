"""`TokenMixing`: a mixer in the place of a layer's self-attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from subquad import registry
from subquad.attention.mixer.base import Mixer
from subquad.attention.torch_masks import as_mask
from subquad.errors import OptionError, ShapeError, UnsupportedError
from subquad.options import Config, Spec

__all__ = ["TokenMixing"]


class TokenMixing(nn.Module):
    """A token mixer with the call of `torch.nn.MultiheadAttention`, for self-attention only.

        out = mixer(x),  x = query = key = value

    There are no projections beside the mixer's own: FNet and MLP-Mixer have none, gMLP's
    channel projections belong to it. Masks mean what they mean in torch: **True = ignore**.
    Ignored tokens count as absent and give zeros. A mask has to be causal, of whole columns,
    or both; a causal one is refused by mixers without a causal form.

    state_dict: ``mechanism.*``, the mixer's own tensors.

    Cost: the mixer's (`subquad.describe`).

    Args:
        embed_dim: C, width of the tokens.
        mechanism: a mixer's name, a string with options, or a config object.
        num_heads: H of an `attn_mask` (N·H, L, L), which has to be equal over heads.
        max_length: longest sequence, for mixers that need it.
        batch_first: (N, L, C) instead of (L, N, C).
        seed: determines the mixer's initial weights.
        device, dtype: of its tensors.

    Raises:
        OptionError: for a mechanism that reads q, k and v, or wrong sizes or options.

    Example:
        >>> import torch, subquad as sq
        >>> mixing = sq.TokenMixing(32, mechanism="fnet", batch_first=True)
        >>> x = torch.randn(2, 7, 32)
        >>> ignored = torch.arange(7) >= torch.tensor([[7], [5]])
        >>> out, weights = mixing(x, x, x, key_padding_mask=ignored)
        >>> out.shape, weights, bool(out[1, 5:].any())
        (torch.Size([2, 7, 32]), None, False)
    """

    _qkv_same_embed_dim = False  # torch's layers read it before they take a fused path

    def __init__(
        self,
        embed_dim: int,
        *,
        mechanism: str | Spec | Config = "fnet",
        num_heads: int = 1,
        max_length: int | None = None,
        batch_first: bool = False,
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        found, config = registry.resolve(mechanism)
        if found.capabilities_for(config).qkv:
            mixers = ", ".join(registry.mechanisms(qkv=False))
            raise OptionError(
                f"TokenMixing: {found.name} reads q, k and v: use subquad.MultiheadAttention; "
                f"token mixers are {mixers}"
            )
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.batch_first = batch_first
        built = registry.build(
            config, embed_dim=embed_dim, max_length=max_length, seed=seed, device=device,
            dtype=dtype,
        )  # fmt: skip
        assert isinstance(built, Mixer), "it has no q, k, v"
        self.mechanism = built

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, batch_first={self.batch_first}"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Mixed tokens, shaped like `query`, and None.

        Args:
            query: (L, N, C), (N, L, C) with `batch_first`, or (L, C) without a batch.
            key, value: the same tensor.
            key_padding_mask: (N, L) or (L,): bool, True = ignore, or floats 0 and −inf.
            need_weights: refused if True: a mixer has no attention weights.
            attn_mask: (L, L) or (N·H, L, L), likewise; causal or of whole columns.
            average_attn_weights: without meaning here.
            is_causal: `attn_mask` is the causal one; without it, mask causally.

        Raises:
            ShapeError, DtypeError, DeviceError: if an argument does not fit.
            UnsupportedError: for other keys or values, weights, or a mask that the mixer
                does not take.
        """
        name = self.mechanism.name
        if key is not query or value is not query:
            raise UnsupportedError(
                name,
                "attention to other tokens",
                "query, key and value have to be one and the same tensor",
                registry.capable("cross"),
            )
        if need_weights:
            self.mechanism._need("weights", self.mechanism.capabilities.weights)
        if query.is_nested:
            raise UnsupportedError(
                name, "nested tensors", "use padded tensors with key_padding_mask"
            )
        if query.dim() not in (2, 3) or query.shape[-1] != self.embed_dim:
            layout = "(N, L, C)" if self.batch_first else "(L, N, C)"
            raise ShapeError(
                f"query must be {layout} or (L, C), with C={self.embed_dim}, "
                f"given {tuple(query.shape)}"
            )
        x = query if query.dim() == 3 else query.unsqueeze(0)
        batched = query.dim() == 3
        flip = batched and not self.batch_first
        x = x.transpose(0, 1) if flip else x
        masks = (key_padding_mask, attn_mask, is_causal)
        mask = as_mask(self.mechanism, self.num_heads, x, x.shape[1], *masks, batched=batched)
        out = self.mechanism(x, mask=mask)
        if not batched:
            return out.squeeze(0), None
        return out.transpose(0, 1) if flip else out, None
