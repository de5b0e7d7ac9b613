"""torch's attention masks (True = ignore) read as a `Mask` (True = attend)."""

from __future__ import annotations

import torch
from torch import Tensor

from subquad import registry
from subquad.attention.base import Absent, Mechanism
from subquad.attention.masks import Mask
from subquad.errors import DeviceError, DtypeError, ShapeError, UnsupportedError

__all__ = ["as_mask"]


def as_mask(
    mechanism: Mechanism,
    heads: int,
    q: Tensor,
    keys: int,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
    *,
    batched: bool,
) -> Mask:
    """The masks of `torch.nn.MultiheadAttention` as what `mechanism` takes.

    A mechanism without explicit masks is given what a `Mask` can say: nothing masked, the
    causal triangle (aligned to the end where L ≠ S), masked columns, both.

    Args:
        mechanism: who has to take the mask.
        heads: H, of a mask for each head.
        q: (N, L, C), for sizes and device.
        keys: S.
        key_padding_mask: (N, S), or (S,) if not `batched`: bool or floats that are added.
        attn_mask: (L, S) or (N·H, L, S), likewise.
        is_causal: `attn_mask` is the causal one; without it, mask causally.
        batched: whether the call's inputs had a batch dimension.

    Raises:
        ShapeError, DtypeError, DeviceError: if a mask does not fit.
        UnsupportedError: if a mask says what the mechanism cannot do.
    """
    batch, queries = q.shape[:2]
    key, key_bias = _padding(mechanism, q, keys, key_padding_mask, batched)
    # With L = S the hint says all there is to say; otherwise torch's triangle need not
    # be aligned to the end, so that what was given decides.
    if is_causal and (attn_mask is None or queries == keys):
        if key_bias is None:
            return Mask(causal=True, key=key)
        return Mask(causal=True, key=key, dense=key_bias.expand(-1, -1, queries, -1))
    if attn_mask is None:
        dense = None if key_bias is None else key_bias.expand(-1, -1, queries, -1)
        return Mask(key=key, dense=dense)
    _check_mask("attn_mask", attn_mask, q)
    shapes = ((queries, keys), (batch * heads, queries, keys))
    if tuple(attn_mask.shape) not in shapes:
        raise ShapeError(
            f"attn_mask must be (L, S) = {shapes[0]} or (N·H, L, S) = {shapes[1]}, "
            f"given {tuple(attn_mask.shape)}"
        )
    if attn_mask.dim() == 3:
        attn_mask = attn_mask.unflatten(0, (batch, heads))
    if mechanism.capabilities.dense:
        dense = ~attn_mask if attn_mask.dtype == torch.bool else attn_mask
        if key_bias is not None:
            if dense.dtype == torch.bool:
                zeros = torch.zeros_like(dense, dtype=key_bias.dtype)
                dense = zeros.masked_fill(~dense, float("-inf"))
            dense = dense + key_bias
        return Mask(key=key, dense=dense)
    return _recognised(mechanism, attn_mask, key)


def _padding(
    mechanism: Mechanism, q: Tensor, keys: int, mask: Tensor | None, batched: bool
) -> tuple[Tensor | None, Tensor | None]:
    """key_padding_mask as a key mask (N, S), True = attend, or as a bias (N, 1, 1, S)."""
    if mask is None:
        return None, None
    _check_mask("key_padding_mask", mask, q)
    wanted = (q.shape[0], keys) if batched else (keys,)
    if tuple(mask.shape) != wanted:
        letters = "(N, S)" if batched else "(S,)"
        raise ShapeError(
            f"key_padding_mask must be {letters} = {wanted}, given {tuple(mask.shape)}"
        )
    mask = mask if batched else mask.unsqueeze(0)
    ignored = _ignored(mask)
    if ignored is not None:
        return ~ignored, None
    if not mechanism.capabilities.dense:
        raise _refusal(mechanism, "a key_padding_mask of floats other than 0 and -inf")
    return None, mask[:, None, None, :]


def _recognised(mechanism: Mechanism, attn_mask: Tensor, key: Tensor | None) -> Mask:
    """An explicit mask (L, S) or (N, H, L, S) as causal triangle and masked columns."""
    ignored = _ignored(attn_mask)
    if ignored is None:
        raise _refusal(mechanism, "an attn_mask of floats other than 0 and -inf")
    allowed = ~ignored
    if allowed.dim() == 4:
        if not torch.equal(allowed, allowed[:, :1].expand_as(allowed)):
            raise _refusal(mechanism, "an attn_mask that differs between heads")
        allowed = allowed[:, 0]
    queries, keys = allowed.shape[-2:]
    columns = allowed.any(-2)  # (S,) or (N, S)
    wanted = columns[..., None, :]
    triangle = Mask(causal=True).to_dense(queries, keys, device=allowed.device)
    if torch.equal(allowed, wanted.expand_as(allowed)):
        causal = False
    elif torch.equal(allowed, wanted & triangle):
        causal = True
    else:
        raise _refusal(
            mechanism,
            "this attn_mask, which is neither causal (aligned to the end) nor whole columns",
        )
    if not columns.all():
        key = columns if key is None else columns & key
    return Mask(causal=causal, key=key)


def _refusal(mechanism: Mechanism, request: str) -> UnsupportedError:
    name, support = mechanism.name, mechanism.capabilities.dense
    reason = support.reason if isinstance(support, Absent) else ""
    return UnsupportedError(name, request, reason, registry.capable("dense", besides=name))


def _check_mask(name: str, mask: Tensor, q: Tensor) -> None:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise DtypeError(
            f"{name} must be bool (True = ignore) or floats that are added to the logits, "
            f"given {mask.dtype}"
        )
    if mask.device != q.device:
        raise DeviceError(f"{name} is on {mask.device}, the queries are on {q.device}")


def _ignored(mask: Tensor) -> Tensor | None:
    """The mask as bool, True = ignore; None if it holds floats other than 0 and −inf."""
    if mask.dtype == torch.bool:
        return mask
    ignored = mask == float("-inf")
    if mask.requires_grad or not bool(((mask == 0) | ignored).all()):
        return None
    return ignored
