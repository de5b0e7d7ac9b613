"""Hedgehog: a learned feature map for each head, trained to mimic softmax attention.

    out_i = φ_q(q_i)·Σ_j φ_k(k_j) v_jᵀ / φ_q(q_i)·Σ_j φ_k(k_j)
    φ(x) = [softmax(Wx), softmax(−Wx)]

Softmax over features makes φ spiky where random features are flat, and W learns which
directions matter. Zhang, Bhatia, Kumbong, Ré 2024, The Hedgehog & the Porcupine, arXiv
2402.04347, section 4.2: one layer with an exponential, negated copies (there eq. 6), softmax over
features for stability.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from subquad.attention.base import Absent, Capabilities, Cost, Info
from subquad.attention.kernel.engine import (
    FeatureMaps,
    FunctionFeatures,
    KernelMechanism,
    LinearFeatures,
)
from subquad.attention.masks import Mask
from subquad.errors import OptionError
from subquad.features.draws import draw_projection
from subquad.options import Config, choice_problem, integer_problem

__all__ = ["MAPS", "Hedgehog", "HedgehogConfig"]

MAPS = ("softmax", "exp")
"""φ = [softmax(Wx), softmax(−Wx)], or [exp(Wx + b), exp(−Wx − b)] without that normaliser."""


@dataclass(frozen=True)
class HedgehogConfig(Config):
    """Options of Hedgehog.

    Args:
        features: M, even: W has M/2 rows. None for 2·D, the paper's square W.
        map: a name in `MAPS`. With "exp" a key's size counts: it may get more weight than
            another from all queries alike.
    """

    mechanism: ClassVar[str] = "hedgehog"

    features: int | None = None
    map: str = "softmax"

    def problems(self) -> Iterator[str]:
        if self.features is not None:
            wrong = list(integer_problem("features", self.features, 2))
            yield from wrong
            if not wrong and self.features % 2:
                yield f"features={self.features} must be even: each row of W has its negated copy"
        yield from choice_problem("map", self.map, MAPS)


def _flops(length: int, head_dim: int, value_dim: int, config: HedgehogConfig) -> float:
    # W once for both signs, 2·2·L·(M/2)·D; state and read 2·2·L·M·V.
    features = config.features or 2 * head_dim
    return length * features * (2.0 * head_dim + 4.0 * value_dim)


def _memory(length: int, head_dim: int, value_dim: int, config: HedgehogConfig) -> float:
    return 4.0 * (config.features or 2 * head_dim) * (value_dim + 1 + min(length, 1024))


class Hedgehog(KernelMechanism):
    """Linear attention with a learned spiky feature map; options in `HedgehogConfig`.

        out_i = φ_q(q_i)·Σ_j φ_k(k_j) v_jᵀ / φ_q(q_i)·Σ_j φ_k(k_j)
        φ_q(x) = [softmax(W_q √scale·x), softmax(−W_q √scale·x)],  φ_k likewise with W_k

    W_q and W_k are parameters (Hkv, M/2, D). They start as the identity, so that the mechanism
    can be called untrained; further rows (M > 2·D) start as random rotations of it by the seed.
    Untrained it is a rough kernel, nowhere near softmax: train it with `subquad.recover`, which
    matches each layer's attention output. Its weights are products of normalised features, not
    estimates of exp(scale·q·k): they cannot share a normaliser with exact weights, so near_far
    refuses it as a far field.

    Cost O((L+S)·M·(D+V)) time, O(M·V) state.

    Deviations from the paper: `scale` is split between q and k as in all kernels here; query
    heads that share keys and values share W_q.

    Raises:
        OptionError: wrong options, all problems at once.

    Example:
        >>> import torch, subquad as sq
        >>> mech = sq.build("hedgehog", head_dim=8, num_heads=2)
        >>> q, k, v = (torch.randn(1, 2, 50, 8) for _ in range(3))
        >>> out = mech(q, k, v, causal=True)
        >>> x, y = q / 8**0.25, k / 8**0.25  # W starts as the identity
        >>> phi = lambda x: torch.cat([x.softmax(-1), (-x).softmax(-1)], -1)
        >>> weights = (phi(x) @ phi(y).mT).tril()
        >>> torch.allclose(out, weights @ v / weights.sum(-1, keepdim=True), atol=1e-5)
        True
    """

    name = "hedgehog"
    family = "kernel"
    Config = HedgehogConfig
    config: HedgehogConfig
    weight_q: Tensor
    weight_k: Tensor
    bias_q: Tensor | None
    bias_k: Tensor | None

    info = Info(
        summary="linear attention with learned spiky features, trained to mimic softmax",
        formula="out_i = φ_q(q_i)·Σ_j φ_k(k_j) v_jᵀ / φ_q(q_i)·Σ_j φ_k(k_j),  "
        "φ(x) = [softmax(Wx), softmax(−Wx)]",
        cost=Cost("O(L·M·(D+V))", _flops, _memory),
        paper="Zhang et al. 2024, The Hedgehog & the Porcupine: Expressive Linear Attentions with "
        "Softmax Mimicry, arXiv 2402.04347, section 4.2",
        limit="at any M the attention of its own kernel φ_q·φ_k, exactly; uniform attention as "
        "W → 0",
        options={
            "features": "M, even; none for 2·D",
            "map": "softmax over features, or exp with a learned bias and no normaliser",
        },
        deviations="scale is split between q and k; query heads that share keys share W_q",
        use="a trained softmax model made linear with a few minutes of recovery training "
        "(subquad.recover). Not without training.",
    )

    def __init__(
        self,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **sizes: Any,
    ) -> None:
        super().__init__(device=device, dtype=dtype, **sizes)
        rows = (self.config.features or 2 * self.head_dim) // 2
        dtype = dtype or torch.get_default_dtype()

        def zeros(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(self.num_kv_heads, *shape, device=device, dtype=dtype))

        for side in ("q", "k"):
            self.register_parameter(f"weight_{side}", zeros(rows, self.head_dim))
            bias = zeros(rows) if self.config.map == "exp" else None
            self.register_parameter(f"bias_{side}", bias)
        self.reset_parameters()

    @classmethod
    def capabilities_for(cls, config: HedgehogConfig) -> Capabilities:
        compiled = Absent("softmax over features runs as Python, chunk by chunk")
        return Capabilities(
            prefix=True,
            state="constant",
            partial=True,
            segments=Absent("one state serves one sequence; call once for each segment"),
            window=Absent("features sum over all keys; a window is sparse attention"),
            compile=True if config.map == "exp" else compiled,
            functional=Absent("its feature maps are learned parameters"),
        )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Starts W as the identity, and as its rotations where it has more rows."""
        if self.weight_q.is_meta:
            return
        heads, rows, dim = self.weight_q.shape
        start = torch.eye(dim, dtype=torch.float64)[:rows].expand(heads, -1, -1)
        if rows > dim:
            more = draw_projection(
                rows - dim, dim, heads=heads, draw="orthogonal", norms="sqrt_d",
                seed=self.seed, dtype=torch.float64,
            )  # fmt: skip
            start = torch.cat([start, more / math.sqrt(dim)], 1)
        for side in ("q", "k"):
            getattr(self, f"weight_{side}").copy_(start)
            if (bias := getattr(self, f"bias_{side}")) is not None:
                bias.zero_()

    def _features(
        self, q: Tensor, k: Tensor | None, mask: Mask | None, scale: float
    ) -> FeatureMaps:
        if scale <= 0:
            raise OptionError(f"hedgehog: scale={scale} must be > 0: it is split between q and k")
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        root = math.sqrt(scale)
        wq, wk = root * self.weight_q.to(dtype).mT, root * self.weight_k.to(dtype).mT
        if self.bias_q is None or self.bias_k is None:
            return FunctionFeatures(
                _spiky(wq), _spiky(wk), 2 * wq.shape[-1], log=True, parameters=(wq, wk)
            )
        wq, wk, bq, bk = (
            torch.cat([t, -t], -1) for t in (wq, wk, self.bias_q.to(dtype), self.bias_k.to(dtype))
        )
        none = torch.zeros_like(q[..., 0], dtype=dtype)
        return LinearFeatures(wq, wk, bq, bk, query_log=lambda: none)


def _spiky(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """ln [softmax(xW), softmax(−xW)] for `weight` (Hkv, D, M/2)."""

    def logarithms(x: Tensor) -> Tensor:
        y = x @ weight
        return torch.cat([y.log_softmax(-1), (-y).log_softmax(-1)], -1)

    return logarithms
