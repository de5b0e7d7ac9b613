"""Gaussian landmark features: each token is described by its similarity to M anchors.

    φ_i(x) = exp(−|x − a_i|² / 2σ²),   out = φ(q)·Σ_j φ(k_j) v_jᵀ / φ(q)·Σ_j φ(k_j)

Anchors a_i are given, sampled from data or its k-means centres, and may be learned. This is
kernel attention with its own positive kernel; it does not approximate softmax. It is the
mechanism that popular accounts describe as "the Performer with a Gaussian kernel".
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from subquad.attention.base import Absent, Capabilities, Cost, Info
from subquad.attention.kernel.engine import FeatureMaps, KernelMechanism, LinearFeatures
from subquad.attention.masks import Mask
from subquad.errors import CalibrationError, OptionError, ShapeError
from subquad.features.draws import draw_projection
from subquad.features.landmarks import kmeans_anchors, sample_anchors
from subquad.options import Config, choice_problem, flag_problem, integer_problem, number_problem

__all__ = ["Gaussian", "GaussianConfig"]


@dataclass(frozen=True)
class GaussianConfig(Config):
    """Options of Gaussian landmark attention.

    Args:
        features: M, number of anchors.
        sigma: σ, width of the Gaussian, in units of the vectors.
        anchors: where they come from: "normal" (drawn from N(0, I)), "sample" or "kmeans"
            (taken from data by `Gaussian.calibrate`).
        learned: anchors are parameters and receive gradients.
    """

    mechanism: ClassVar[str] = "gaussian"
    sizes: ClassVar[tuple[str, ...]] = ("features",)

    features: int = 64
    sigma: float = 1.0
    anchors: str = "normal"
    learned: bool = False

    def problems(self) -> Iterator[str]:
        yield from integer_problem("features", self.features, 1)
        yield from number_problem("sigma", self.sigma, 0.0, open_low=True, finite=False)
        yield from choice_problem("anchors", self.anchors, ("normal", "sample", "kmeans"))
        yield from flag_problem("learned", self.learned)


def _flops(length: int, head_dim: int, value_dim: int, config: GaussianConfig) -> float:
    return 4.0 * length * config.features * (head_dim + value_dim)


def _memory(length: int, head_dim: int, value_dim: int, config: GaussianConfig) -> float:
    return 4.0 * config.features * (value_dim + 1 + min(length, 1024))


class Gaussian(KernelMechanism):
    """Attention by Gaussian landmark features; options in `GaussianConfig`.

    `scale` multiplies q and k by its root before the distance; its default is 1, so that σ
    and the anchors are in units of q and k themselves.

    Cost O((L+S)·M·(D+V)) time, O(M·V) state.

    Raises:
        OptionError: wrong options; all problems at once.
        CalibrationError: anchors from data before `calibrate`.

    Example:
        The source text's second worked example, with its slip corrected (it prints 0.11505
        for the third feature):

        >>> import torch, subquad as sq
        >>> mech = sq.build("gaussian", head_dim=3, num_heads=1, features=3, sigma=0.5)
        >>> mech.set_anchors(torch.tensor([[0, 0.1, 0.2], [0.4, 0.5, 0.6], [0.7, 0.8, 0.9]]))
        >>> x = torch.tensor([[[[0.1, 0.2, 0.3]]]])
        >>> mech.features(x).squeeze().tolist()  # doctest: +NUMBER
        [0.94176, 0.58275, 0.11533]
    """

    name = "gaussian"
    family = "kernel"
    Config = GaussianConfig
    config: GaussianConfig
    anchors: Tensor
    placed: Tensor

    info = Info(
        summary="kernel attention with Gaussian similarities to landmark anchors",
        formula="out_i = φ(q_i)·Σ_j φ(k_j) v_jᵀ / φ(q_i)·Σ_j φ(k_j),  "
        "φ_m(x) = exp(−|x − a_m|²/2σ²)",
        cost=Cost("O(L·M·(D+V))", _flops, _memory),
        paper="landmark (radial basis) features as in Broomhead & Lowe 1988; used as linear "
        "attention in the manner of Katharopoulos et al. 2020, arXiv 2006.16236",
        limit="at any M the attention of its own kernel φ_q·φ_k, exactly; uniform attention "
        "as σ → ∞",
        options={
            "features": "M, number of anchors",
            "sigma": "σ, width of the Gaussian",
            "anchors": "normal, or from data by calibrate(): sample, kmeans",
            "learned": "anchors are parameters",
        },
        scale="1",
        sample="gaussian(features=32, sigma=2.0)",
        use="similarity to prototypes: sensors, cells, spectra, where anchors have a meaning. Not "
        "a substitute for softmax.",
    )

    def __init__(
        self,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **sizes: Any,
    ) -> None:
        super().__init__(device=device, dtype=dtype, **sizes)
        shape = (self.num_kv_heads, self.config.features, self.head_dim)
        anchors = torch.zeros(shape, device=device, dtype=dtype or torch.get_default_dtype())
        if self.config.learned:
            self.anchors = nn.Parameter(anchors)
        else:
            self.register_buffer("anchors", anchors)
        self.register_buffer("placed", torch.zeros((), dtype=torch.bool, device=device))
        self._placed = False
        self.reset_parameters()

    @classmethod
    def capabilities_for(cls, config: GaussianConfig) -> Capabilities:
        learned = Absent("its anchors are learned parameters")
        from_data = Absent("its anchors come from data: build it and call calibrate()")
        return Capabilities(
            prefix=True,
            state="constant",
            partial=True,
            segments=Absent("one state serves one sequence; call once for each segment"),
            window=Absent("features sum over all keys; a window is sparse attention"),
            functional=learned
            if config.learned
            else from_data
            if config.anchors != "normal"
            else True,
        )

    def _scale(self, scale: float | None) -> float:
        return 1.0 if scale is None else float(scale)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws anchors from N(0, I) by the seed, where they do not come from data."""
        if self.anchors.is_meta:
            return
        self._set_placed(self.config.anchors == "normal")
        if self.config.anchors == "normal":
            heads, m, dim = self.anchors.shape
            drawn = draw_projection(
                m, dim, heads=heads, draw="iid", seed=self.seed, dtype=torch.float64
            )
            self.anchors.copy_(drawn)
        else:
            self.anchors.zero_()

    def _set_placed(self, placed: bool) -> None:
        self.placed.fill_(placed)
        self._placed = placed

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._placed = not self.placed.is_meta and bool(self.placed)

    @torch.no_grad()
    def set_anchors(self, anchors: Tensor) -> None:
        """Sets anchors (M, D) for all heads, or (Hkv, M, D).

        Raises:
            ShapeError: if the shape is neither.
        """
        wanted, found = tuple(self.anchors.shape), tuple(anchors.shape)
        if found not in (wanted, wanted[1:]):
            raise ShapeError(
                f"anchors must be (Hkv, M, D) = {wanted} or (M, D) = {wanted[1:]}, given {found}"
            )
        self.anchors.copy_(anchors.expand(wanted))
        self._set_placed(True)

    @classmethod
    def calibrates_for(cls, config: GaussianConfig) -> bool:
        return config.anchors != "normal"

    @torch.no_grad()
    def calibrate(
        self,
        q: Tensor,
        k: Tensor,
        *,
        key_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> None:
        """Takes the anchors from queries and keys: a sample of them or k-means centres.

        Each head has its own; masked keys, and the queries at their positions where L = S,
        are left out. `scale` is that of the calls to come: anchors lie among √scale·q, √scale·k.

        Raises:
            OptionError: if the options take no anchors from data.
        """
        if self.config.anchors == "normal":
            raise OptionError("gaussian: calibrate needs anchors=sample or anchors=kmeans")
        mask = Mask.of(key_mask=key_mask)
        q, k, _, mask, _ = self._check(q, k, k.new_zeros(*k.shape[:-1], self.value_dim or 1), mask)
        grouped = q.unflatten(1, (self.num_kv_heads, -1))
        for head in range(self.num_kv_heads):
            queries, keys = grouped[:, head], k[:, head]
            if mask.key is not None:
                keys = keys[mask.key]
                if q.shape[2] == k.shape[2]:
                    queries = queries[mask.key[:, None].expand(queries.shape[:-1])]
            rows = torch.cat([queries.reshape(-1, self.head_dim), keys.reshape(-1, self.head_dim)])
            rows = rows * math.sqrt(self._scale(scale))
            generator = torch.Generator().manual_seed(self.seed + head)
            m = self.config.features
            if self.config.anchors == "sample":
                anchors = sample_anchors(rows, m, generator)
            else:
                anchors = kmeans_anchors(rows, m, generator=generator)
            self.anchors[head].copy_(anchors)
        self._set_placed(True)

    def features(self, x: Tensor) -> Tensor:
        """φ(x) (..., Hkv, n, M) of x (..., Hkv, n, D), for looking."""
        distance = (x[..., :, None, :] - self.anchors[:, None]).square().sum(-1)
        return torch.exp(-distance / (2.0 * self.config.sigma**2))

    def _features(
        self, q: Tensor, k: Tensor | None, mask: Mask | None, scale: float
    ) -> FeatureMaps:
        if scale <= 0:
            raise OptionError(f"gaussian: scale={scale} must be > 0")
        # A Python flag first, so that compiled graphs need not read the buffer.
        self._placed = self._placed or bool(self.placed)
        if not self._placed:
            raise CalibrationError(
                f"gaussian: anchors={self.config.anchors} needs calibrate(q, k) or set_anchors "
                "before the first call"
            )
        # ln φ(x) = x·a/σ² − |a|²/2σ² − |x|²/2σ²; the last cancels for queries.
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        precision, root = self.config.sigma**-2, math.sqrt(scale)
        anchors = self.anchors.to(dtype)
        weight = anchors.transpose(-1, -2) * (precision * root)
        bias = -0.5 * precision * anchors.square().sum(-1)

        def query_log() -> Tensor:
            return -0.5 * precision * scale * q.to(dtype).square().sum(-1)

        return LinearFeatures(
            weight, weight, bias, bias, quad=0.5 * precision * scale, query_log=query_log
        )
