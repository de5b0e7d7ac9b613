"""Linear attention: any non-negative feature map in place of the exponential of softmax.

    out_i = φ_q(q_i)·Σ_j φ_k(k_j) v_jᵀ / φ_q(q_i)·Σ_j φ_k(k_j)

The sum over keys is one matrix, whatever the length: a recurrent network's state under a
causal mask. Katharopoulos et al. 2020, arXiv 2006.16236: eq. 4–6 (bidirectional), 8–12
(causal), 7 (φ(x) = elu(x) + 1, the default here).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad.attention.base import Absent, Capabilities, Cost, Info, Support
from subquad.attention.kernel.engine import (
    FeatureMaps,
    FunctionFeatures,
    KernelMechanism,
    LinearFeatures,
)
from subquad.attention.masks import Mask
from subquad.errors import OptionError
from subquad.kernels.linear import RELU_EPSILON
from subquad.options import Config, choice_problem, integer_problem

__all__ = ["MAPS", "Linear", "LinearConfig"]

FeatureFunction = Callable[[Tensor], Tensor]

FUSED = ("elu", "relu", "softplus", "sigmoid", "exp")
"""Maps that the engine evaluates itself, forward and backward."""

MAPS = (*FUSED, "square")
"""Named maps, elementwise; any function to non-negative numbers is a map too."""


def _elu(x: Tensor) -> Tensor:
    return torch.exp(x.clamp_max(0.0)) + x.clamp_min(0.0)  # F.elu(x) + 1 would cancel


def _relu(x: Tensor) -> Tensor:
    return torch.relu(x) + RELU_EPSILON


def _softplus(x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))


FUNCTIONS: dict[str, FeatureFunction] = {
    "elu": _elu,
    "relu": _relu,
    "softplus": _softplus,
    "sigmoid": torch.sigmoid,
    "square": torch.square,
}


def _log_elu(x: Tensor) -> Tensor:
    return torch.log1p(x.clamp_min(0.0)) + x.clamp_max(0.0)


def _log_softplus(x: Tensor) -> Tensor:
    # Below −30 softplus(x) = eˣ to the last digit; there x takes the place of its logarithm.
    return torch.where(x < -30.0, x, torch.log(_softplus(x.clamp_min(-30.0))))


def _log_square(x: Tensor) -> Tensor:
    # φ′ = 2x is 0 at 0, where the logarithm's own derivative is infinite.
    zero = x == 0
    return torch.where(zero, -torch.inf, 2.0 * torch.log(x.abs().masked_fill(zero, 1.0)))


def _same(x: Tensor) -> Tensor:
    return x


LOGARITHMS: dict[str, FeatureFunction] = {
    "elu": _log_elu,
    "relu": lambda x: torch.log(_relu(x)),
    "softplus": _log_softplus,
    "sigmoid": F.logsigmoid,
    "square": _log_square,
    "exp": _same,
}
"""ln φ of the named maps, for pairs with "exp": logarithms do not overflow."""


@dataclass(frozen=True)
class LinearConfig(Config):
    """Options of linear attention.

    Args:
        map: φ_q, and φ_k too unless `key_map` is given: a name in `MAPS`, or a function or
            module f ≥ 0 of chunks (B, Hkv, n, D) → (B, Hkv, n, M).
        key_map: φ_k where it differs from φ_q; None for the same.
        features: M of functions and modules; None where it is D.
    """

    mechanism: ClassVar[str] = "linear"

    map: str | FeatureFunction = "elu"
    key_map: str | FeatureFunction | None = None
    features: int | None = None

    def problems(self) -> Iterator[str]:
        maps: dict[str, object] = {"map": self.map}
        if self.key_map is not None:
            maps["key_map"] = self.key_map
        for name, given in maps.items():
            if isinstance(given, str):
                yield from choice_problem(name, given, MAPS)
            elif not callable(given):
                yield f"{name}={given!r} is none of {', '.join(MAPS)}, nor a function"
        named = [name for name, given in maps.items() if isinstance(given, str)]
        if self.features is not None:
            yield from integer_problem("features", self.features, 1)
            if named:
                yield (
                    f"features={self.features!r} is an option of functions: "
                    f"{' and '.join(f'{name}={maps[name]}' for name in named)} has M = D features"
                )
        if "exp" in maps.values() and len(named) < len(maps):
            yield "exp goes with named maps alone: a function's logarithm is not known"

    @property
    def fused(self) -> bool:
        """Whether the engine has both maps built in."""
        return self.map in FUSED and self.key_map in (None, self.map)

    def modules(self) -> list[nn.Module]:
        """Maps that are modules."""
        return [given for given in (self.map, self.key_map) if isinstance(given, nn.Module)]


def _flops(length: int, head_dim: int, value_dim: int, config: LinearConfig) -> float:
    features = config.features or head_dim
    # State and read 2·2·L·M·V; a fused map is a matrix product with √scale·I, 2·2·L·D·D.
    return 4.0 * length * features * (value_dim + (head_dim if config.fused else 0))


def _memory(length: int, head_dim: int, value_dim: int, config: LinearConfig) -> float:
    return 4.0 * (config.features or head_dim) * (value_dim + 1 + min(length, 1024))


class Linear(KernelMechanism):
    """Linear attention with feature maps of your choice; options in `LinearConfig`.

        out_i = φ_q(√scale·q_i)·Σ_j φ_k(√scale·k_j) v_jᵀ / φ_q(√scale·q_i)·Σ_j φ_k(√scale·k_j)

    The paper has no temperature: `scale` is 1 by default, and multiplies q and k by its root.
    Named maps, elementwise: elu is elu(x) + 1; relu is max(x, 0) + 1e-3, without which a token
    could have no feature at all; exp never overflows, since a running maximum is divided out
    for each feature; square is x², for which `scale` cancels. Functions may be learned modules
    and need not be elementwise; they are evaluated again in the backward pass.

    Cost O((L+S)·M·V) time, O(M·V) state, with M = D for named maps.

    Deviation from the paper: no epsilon in the normaliser; a query whose features are all zero
    (in float32: elu where every entry is below −103) gives zeros.

    Raises:
        OptionError: wrong options, all problems at once; a function that gives negative
            features.
        ShapeError: a function that gives other than M features.

    Example:
        >>> import torch, subquad as sq
        >>> q, k, v = (torch.randn(1, 2, 50, 8) for _ in range(3))
        >>> out = sq.attention(q, k, v, "linear", causal=True)
        >>> phi_q, phi_k = (torch.nn.functional.elu(x) + 1 for x in (q, k))
        >>> weights = (phi_q @ phi_k.mT).tril()
        >>> torch.allclose(out, weights @ v / weights.sum(-1, keepdim=True), atol=1e-5)
        True
    """

    name = "linear"
    family = "kernel"
    Config = LinearConfig
    config: LinearConfig

    info = Info(
        summary="kernel attention with an elementwise feature map, elu(x) + 1 by default",
        formula="out_i = φ_q(q_i)·Σ_j φ_k(k_j) v_jᵀ / φ_q(q_i)·Σ_j φ_k(k_j),  "
        "φ(x) = elu(√scale·x) + 1",
        cost=Cost("O(L·M·V)", _flops, _memory),
        paper="Katharopoulos et al. 2020, Transformers are RNNs, arXiv 2006.16236, eq. 4–12",
        limit="the attention of its own kernel φ_q·φ_k, exactly; approximates nothing. With one "
        "feature, or equal keys: uniform attention",
        options={
            "map": f"φ of q, and of k too: {', '.join(MAPS)}, or a function or module f ≥ 0",
            "key_map": "φ of k where it differs; none for the same",
            "features": "M of functions and modules; none where it is D",
        },
        scale="1",
        deviations="no epsilon in the normaliser: a query without any feature gives zeros",
        use="models trained from scratch with it: the cheapest causal attention with a state. It "
        "does not stand in for softmax in a trained model.",
    )

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        given = {"query_module": self.config.map, "key_module": self.config.key_map}
        for name, function in given.items():
            if isinstance(function, nn.Module):
                setattr(self, name, function)

    @classmethod
    def capabilities_for(cls, config: LinearConfig) -> Capabilities:
        learned = any(p.requires_grad for module in config.modules() for p in module.parameters())
        compiled: Support = True
        if not config.fused:
            compiled = Absent("this pair of maps runs as Python, chunk by chunk")
        return Capabilities(
            prefix=True,
            state="constant",
            partial=True,
            segments=Absent("one state serves one sequence; call once for each segment"),
            window=Absent("features sum over all keys; a window is sparse attention"),
            compile=compiled,
            functional=Absent("the feature maps have learned parameters") if learned else True,
        )

    def _scale(self, scale: float | None) -> float:
        return 1.0 if scale is None else float(scale)

    def _fixed(self) -> bool:
        return self.config.fused

    def _features(
        self, q: Tensor, k: Tensor | None, mask: Mask | None, scale: float
    ) -> FeatureMaps:
        if scale <= 0:
            raise OptionError(f"linear: scale={scale} must be > 0: it is split between q and k")
        config, root = self.config, math.sqrt(scale)
        if config.fused:
            dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
            weight = root * torch.eye(self.head_dim, dtype=dtype, device=q.device)
            weight = weight.expand(self.num_kv_heads, -1, -1)
            return LinearFeatures(weight, weight, activation=str(config.map))
        second = config.map if config.key_map is None else config.key_map
        log = "exp" in (config.map, second)
        modules = config.modules()
        parameters = tuple({id(p): p for m in modules for p in m.parameters()}.values())
        return FunctionFeatures(
            _side(config.map, log, root), _side(second, log, root),
            config.features or self.head_dim, log=log, parameters=parameters,
        )  # fmt: skip


def _side(given: str | FeatureFunction, log: bool, root: float) -> FeatureFunction:
    """φ(√scale·x), or ln φ, of one side."""
    if isinstance(given, str):
        named = (LOGARITHMS if log else FUNCTIONS)[given]
        return lambda x: named(root * x)
    first = next(given.parameters(), None) if isinstance(given, nn.Module) else None

    def features(x: Tensor) -> Tensor:
        own = x.dtype if first is None else first.dtype  # a module in half precision
        return given((root * x).to(own)).to(x.dtype)

    return features
