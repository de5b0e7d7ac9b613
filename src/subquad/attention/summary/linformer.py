"""Linformer: keys and values are projected along the sequence, from n rows to k."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from subquad.attention.base import (
    Absent,
    Capabilities,
    Cost,
    Info,
    Mechanism,
    Support,
)
from subquad.attention.exact.engine import clear, sums_dtype
from subquad.attention.masks import Mask
from subquad.attention.summary.engine import summary_attention
from subquad.errors import OptionError, ShapeError
from subquad.kernels.precision import own_precision
from subquad.options import Config, choice_problem, integer_problem, number_problem
from subquad.shapes import KeyMask, Keys, Queries, Values

__all__ = ["Linformer", "LinformerConfig", "share_layers"]


@dataclass(frozen=True)
class LinformerConfig(Config):
    """Options of `Linformer`.

    Args:
        k: number of summaries to which `max_length` keys are projected.
        sharing: which projections are one and the same, in the paper's terms: None or "none" (each
            key/value head has its E and F), "headwise" (one E, one F for all heads), "kv"
            (one E = F) or "layerwise" (as "kv", and one for all layers: see `share_layers`).
        projection: "learned" (any matrix E), "mean" (of windows of w = ⌈max_length/k⌉ keys, no
            parameters) or "conv" (a learned kernel of width and stride w).
        dropout: probability with which an attention weight is dropped while training.
    """

    mechanism: ClassVar[str] = "linformer"
    sizes: ClassVar[tuple[str, ...]] = ("k",)

    k: int = 256
    sharing: str | None = "headwise"
    projection: str = "learned"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.sharing == "none":  # as text; unquoted, the option grammar reads none as None
            object.__setattr__(self, "sharing", None)
        super().__post_init__()

    def problems(self) -> Iterator[str]:
        yield from integer_problem("k", self.k, 1)
        if self.sharing is not None:
            choices = ("none", "headwise", "kv", "layerwise")
            yield from choice_problem("sharing", self.sharing, choices)
        yield from choice_problem("projection", self.projection, ("learned", "mean", "conv"))
        yield from number_problem("dropout", self.dropout, 0.0, 1.0)


def _flops(length: int, head_dim: int, value_dim: int, config: LinformerConfig) -> float:
    projection = config.k if config.projection == "learned" else 1
    return 2.0 * length * (config.k + projection) * (head_dim + value_dim)


def _memory(length: int, head_dim: int, value_dim: int, config: LinformerConfig) -> float:
    return 4.0 * (config.k * (head_dim + value_dim) + length)


class Linformer(Mechanism):
    """Softmax attention over k learned mixtures of the keys.

        K̃ = E K,  Ṽ = F V,  E, F ∈ R^(k×n)          out_i = Σ_m softmax_m(scale·q_i·k̃_m) ṽ_m

    n = `max_length`. A sequence of S < n keys uses the first S columns of E and F. Masked keys
    count as zeros, so that right-padding changes nothing; a key's column goes by its position,
    so that left-padding does. There is no causal form: every summary mixes keys of all positions.

    With ``projection=mean`` summary m is the mean of the keys m·w … (m+1)·w − 1 that are not
    masked, w = ⌈n/k⌉; with ``conv`` their sum weighted by a kernel of length w, one for each
    head or as `sharing` says, which starts as 1/w. Shorter sequences have ⌈S/w⌉ summaries. A
    window without any key is left out.

    Cost 4·L·k·(D+V) FLOPs where L = S, half of it for projecting; k·(D+V) numbers of memory.
    E and F have 2·k·n parameters (headwise; Hkv times as many without sharing, half with "kv").

    Paper: Wang et al. 2020, arXiv 2006.04768, eq. 7; sharing and other projections: section 4.
    E and F start with independent entries N(0, 1/k), as in the paper's proofs. Untrained they
    approximate nothing: means of windows come closer.

    Args:
        k, sharing, projection, dropout: see `LinformerConfig`.

    Raises:
        OptionError: without `max_length`, or for wrong options.
        ShapeError: for more keys than `max_length`.

    See `Mechanism` for sizes and shapes.

    Example:
        >>> import torch, subquad as sq
        >>> mech = sq.build("linformer", head_dim=16, num_heads=4, max_length=1000, k=32)
        >>> x = torch.randn(2, 4, 500, 16)
        >>> mech(x, x, x).shape, mech.summary_weights(x, x).shape
        (torch.Size([2, 4, 500, 16]), torch.Size([2, 4, 500, 32]))
    """

    name = "linformer"
    family = "summary"
    Config = LinformerConfig
    config: LinformerConfig
    key_projection: nn.Parameter | None
    value_projection: nn.Parameter | None
    info = Info(
        summary="softmax over k learned projections of keys and values along the sequence",
        formula="out_i = Σ_m softmax_m(scale·q_i·(E K)_m) (F V)_m,  E, F ∈ R^(k×n)",
        cost=Cost("O(L·k·(D+V))", _flops, _memory),
        paper="Wang et al. 2020, Linformer: Self-Attention with Linear Complexity, "
        "arXiv 2006.04768, eq. 7",
        limit="softmax attention where k = max_length and E = F = identity; "
        "projection=mean with k = max_length is that",
        options={
            "k": "number of summaries to which max_length keys are projected",
            "sharing": "none, headwise (E, F for all heads), kv (E = F), layerwise (all layers)",
            "projection": "learned, mean (of windows) or conv (learned kernel as wide as its "
            "stride)",
            "dropout": "probability with which an attention weight is dropped while training",
        },
        deviations="mean takes no masked keys into account; a row without any key gives zeros",
        sample="linformer(k=12, projection=mean)",
        use="encoders with a fixed greatest length, trained from scratch: few parameters, very "
        "regular memory.",
    )

    def __init__(
        self,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **sizes: Any,
    ) -> None:
        super().__init__(device=device, dtype=dtype, **sizes)
        assert self.max_length is not None, "checked by the base class"
        config = self.config
        self.window = -(-self.max_length // config.k)
        heads = self.num_kv_heads if config.sharing is None else 1
        shapes: dict[str, tuple[int, ...]] = {
            "learned": (heads, config.k, self.max_length),
            "conv": (heads, self.window),
        }
        shape = shapes.get(config.projection)
        for name in ("key_projection", "value_projection"):
            shared = name == "value_projection" and config.sharing in ("kv", "layerwise")
            parameter = None
            if shape is not None and not shared:
                parameter = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            self.register_parameter(name, parameter)
        self.reset_parameters()

    @classmethod
    def capabilities_for(cls, config: LinformerConfig) -> Capabilities:
        mixes = "every summary mixes keys of all positions, later ones too"
        drops = Absent("dropout draws anew at every call while training")
        learned = config.projection != "mean"
        return Capabilities(
            causal=Absent(mixes),
            prefix=Absent(mixes),
            segments=Absent("every summary mixes keys of all segments"),
            window=Absent("a summary has no position that a window could hold"),
            state=Absent("a new key changes every summary"),
            partial=Absent("a summary mixes keys, so that sums over parts of the keys do not add"),
            max_length=True,
            functional=Absent(
                "its projections are learned parameters"
                if learned
                else "it needs max_length, which fixes its windows"
            ),
            compact=Absent(
                "a key is projected by its position: closing a gap moves all that follow"
            ),
            deterministic=drops if config.dropout else True,
        )

    @classmethod
    def answers_alone_for(cls, config: LinformerConfig) -> Support:
        return True  # summaries are of keys alone, though there is no state of them

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws E and F from N(0, 1/k) by the seed; kernels become means of their window."""
        generator = torch.Generator().manual_seed(self.seed)
        for parameter in (self.key_projection, self.value_projection):
            if parameter is None or parameter.is_meta:
                continue
            if self.config.projection == "conv":
                parameter.fill_(1.0 / self.window)
            else:
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(drawn * self.config.k**-0.5)

    def share(self, other: Linformer) -> None:
        """Takes over `other`'s projections: from now on both have the same parameters.

        Raises:
            OptionError: if `other` has projections of other shapes, or other options.
        """
        for name in ("sharing", "projection", "k"):
            mine, theirs = getattr(self.config, name), getattr(other.config, name)
            if mine != theirs:
                raise OptionError(f"linformer: cannot share: {name} is {mine} here, {theirs} there")
        if self.max_length != other.max_length:
            raise OptionError(
                f"linformer: cannot share: max_length is {self.max_length} here, "
                f"{other.max_length} there"
            )
        if self.config.sharing is None and self.num_kv_heads != other.num_kv_heads:
            raise OptionError(
                f"linformer: cannot share with sharing=none: num_kv_heads is {self.num_kv_heads} "
                f"here, {other.num_kv_heads} there"
            )
        self.key_projection = other.key_projection
        self.value_projection = other.value_projection

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
        keys, values, present = self._summaries(k, v, mask)
        dropout = self.config.dropout if self.training else 0.0
        keys, values = keys.to(q.dtype), values.to(q.dtype)
        return summary_attention(q, keys, values, scale, present=present, dropout=dropout)

    def summary_weights(
        self,
        q: Queries,
        k: Keys,
        *,
        key_mask: KeyMask | None = None,
        mask: Mask | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """What each query gives to each summary: (..., H, L, K), rows sum to one.

        The paper's P̄ (eq. 7), in float32 or float64. `weights` spreads it over the keys, times F.
        A row without any key has weights of zero. Nothing is dropped.

        Raises:
            ShapeError, DtypeError, DeviceError, UnsupportedError: as a call.
        """
        v = k.new_zeros(*k.shape[:-1], self.value_dim or 1)
        return self.summary_weights_and_values(q, k, v, key_mask=key_mask, mask=mask, scale=scale)[
            0
        ]

    def summary_weights_and_values(
        self,
        q: Queries,
        k: Keys,
        v: Values,
        *,
        key_mask: KeyMask | None = None,
        mask: Mask | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`summary_weights` and the summary values (..., H, K, V) in q's dtype.

        Their product is the output, with O(L·K) memory where a call is fused.
        """
        joined = Mask.of(key_mask=key_mask, mask=mask)
        q, k, v, joined, lead = self._check(q, k, v, joined)
        with own_precision(q):
            keys, values, present = self._summaries(k, v, joined)
            weights = self._weights(q, keys, present, joined, self._scale(scale))
        values = values.to(q.dtype).repeat_interleave(self.num_heads // self.num_kv_heads, 1)
        return weights.reshape(*lead, *weights.shape[1:]), values.reshape(*lead, *values.shape[1:])

    def _weights(
        self, q: Tensor, keys: Tensor, present: Tensor | None, mask: Mask, scale: float
    ) -> Tensor:
        """Softmax weights (B, H, L, K) over summary keys in the sums' dtype."""
        grouped = q.to(keys.dtype).unflatten(1, (keys.shape[1], -1)) * scale
        logits = (grouped @ keys.mT[:, :, None]).flatten(1, 2)
        if present is not None:
            closed = ~(present | ~present.any(-1, keepdim=True))
            logits = logits.masked_fill(closed[:, :, None], float("-inf"))
        weights = torch.softmax(logits, -1)
        if mask.key is not None:
            weights = weights * mask.key.any(-1)[:, None, None, None]
        return weights

    def _summaries(self, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor, Tensor | None]:
        """k̃ (B, Hkv, K, D) and ṽ (B, Hkv, K, V) in the sums' dtype, (B, 1, K) which are there."""
        assert self.max_length is not None, "checked by the base class"
        length = k.shape[2]
        if length > self.max_length:
            raise ShapeError(
                f"linformer: k has length S={length}, longer than max_length={self.max_length}; "
                "build it with a larger max_length"
            )
        k, v = clear(k, v, mask)
        present = None
        counts: Tensor | None = None
        if self.config.projection != "learned":
            key, spare = mask.key, torch.compiler.is_compiling()
            if key is None and (spare or self.config.projection == "mean"):
                key = torch.ones(1, length, dtype=torch.bool, device=k.device)
            if key is not None:
                counts = self._windows(key[:, None, :, None]).sum(-2)  # (B or 1, 1, K, 1)
                present = counts[..., 0] > 0 if spare or mask.key is not None else None
        second = self.key_projection if self.value_projection is None else self.value_projection
        return (
            self._projected(k, self.key_projection, counts),
            self._projected(v, second, counts),
            present,
        )

    def _windows(self, x: Tensor) -> Tensor:
        """(B, H, S, ·) cut into windows (B, H, K, w, ·), zeros behind the end."""
        length = x.shape[2]
        count = (length + self.window - 1) // self.window
        if torch.compiler.is_compiling():  # graphs treat a size of 1 apart: add an absent window
            count += 1
        x = nn.functional.pad(x, (0, 0, 0, count * self.window - length))
        return x.unfold(2, self.window, self.window).transpose(-1, -2)

    def _projected(self, x: Tensor, weight: Tensor | None, counts: Tensor | None) -> Tensor:
        dtype = sums_dtype(
            x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
        )
        x = x.to(dtype)
        if weight is None:
            assert counts is not None, "means need their windows' counts"
            return self._windows(x).sum(-2) / counts.clamp_min(1)
        weight = weight.to(dtype)
        if self.config.projection == "conv":
            return (self._windows(x) * weight[:, None, :, None]).sum(-2)
        weight = weight[..., : x.shape[2]]
        if weight.shape[0] == 1:  # one product for all heads and rows
            return torch.einsum("kn,bhnd->bhkd", weight[0], x)
        return torch.einsum("hkn,bhnd->bhkd", weight, x)


def share_layers(model: nn.Module) -> int:
    """Layerwise sharing: gives all `Linformer` in `model` with ``sharing=layerwise`` one E.

    Returns:
        How many now share it.

    Raises:
        OptionError: if their sizes differ.

    Example:
        >>> import torch, subquad as sq
        >>> from subquad.attention.summary.linformer import share_layers
        >>> layers = torch.nn.ModuleList(
        ...     sq.MultiheadAttention(
        ...         32, 4, mechanism="linformer(k=8, sharing=layerwise)", max_length=64
        ...     )
        ...     for _ in range(3)
        ... )
        >>> share_layers(layers)
        3
        >>> layers[0].mechanism.key_projection is layers[2].mechanism.key_projection
        True
    """
    found = [
        module
        for module in model.modules()
        if isinstance(module, Linformer) and module.config.sharing == "layerwise"
    ]
    for module in found[1:]:
        module.share(found[0])
    return len(found)
