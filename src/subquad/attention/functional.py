"""`attention`: any mechanism without learned parameters as a function of q, k and v."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from subquad import registry
from subquad.attention.base import Absent, Mechanism
from subquad.attention.masks import Mask
from subquad.errors import ShapeError, UnsupportedError
from subquad.options import Config, Spec
from subquad.shapes import KeyMask, Keys, Output, Queries, Values

__all__ = ["attention"]


def attention(
    q: Queries,
    k: Keys,
    v: Values,
    mechanism: str | Spec | Config = "softmax",
    *,
    causal: bool = False,
    key_mask: KeyMask | None = None,
    mask: Mask | None = None,
    scale: float | None = None,
    seed: int = 0,
    **options: Any,
) -> Output:
    """Attention by any mechanism without learned parameters, (..., H, L, V).

    Shaped like `torch.nn.functional.scaled_dot_product_attention`, with two differences:
    `causal` is aligned to the end where L ≠ S, and a row without any key gives zeros.

    Args:
        q: (..., H, L, D) queries.
        k: (..., Hkv, S, D) keys; Hkv divides H (grouped queries).
        v: (..., Hkv, S, V) values.
        mechanism: a name, a string with options or a config object.
        causal: no query reads a later key.
        key_mask: (..., S) bool over the leading dimensions, True = attend.
        mask: a `Mask`, for prefix, segment, window and explicit masks.
        scale: factor of the logits, default D^-½.
        seed: determines random draws; the draw is made once and kept.
        options: options of the mechanism, as in `subquad.build`.

    Raises:
        UnknownNameError, OptionError: unknown mechanism or wrong options.
        ShapeError, DtypeError, DeviceError: arguments that do not fit.
        UnsupportedError: what the mechanism does not declare; mechanisms with learned
            parameters (use `subquad.build`).

    Example:
        >>> import torch, subquad as sq
        >>> q, k, v = (torch.randn(1, 8, 1000, 64) for _ in range(3))
        >>> sq.attention(q, k, v, "performer(features=128)", causal=True).shape
        torch.Size([1, 8, 1000, 64])
    """
    for name, tensor in (("q", q), ("k", k)):
        if tensor.dim() < 3:
            raise ShapeError(f"{name} must be (..., H, length, D), given {tuple(tensor.shape)}")
    found, config = registry.resolve(mechanism, options)
    functional = found.capabilities_for(config).functional
    if isinstance(functional, Absent):
        raise UnsupportedError(
            found.name,
            "the functional form",
            f"{functional.reason}; use subquad.build",
            registry.capable("functional", besides=found.name),
        )
    module = _module(config, q.shape[-1], q.shape[-3], k.shape[-3], seed, q.device, _dtype(q.dtype))
    return module(q, k, v, causal=causal, key_mask=key_mask, mask=mask, scale=scale)


def _dtype(dtype: torch.dtype) -> torch.dtype:
    # Projections in half precision would only lose digits: sums are float32 anyway.
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


@lru_cache(maxsize=64)
def _module(
    config: Config,
    head_dim: int,
    heads: int,
    kv_heads: int,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Mechanism:
    return registry.build(
        config,
        head_dim=head_dim,
        num_heads=heads,
        num_kv_heads=kv_heads,
        seed=seed,
        device=device,
        dtype=dtype,
    ).eval()
