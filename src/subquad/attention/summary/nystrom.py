"""Nyströmformer: softmax attention through segment-mean landmarks.

    out = softmax(c·q k̃ᵀ) · softmax(c·q̃ k̃ᵀ)⁺ · softmax(c·q̃ kᵀ) v,        c = scale

with m landmarks q̃, k̃: means of the queries and of the keys over m segments of the sequence.
Xiong et al. 2021, arXiv 2102.03902, section 3.2 and Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad.attention.base import Absent, Capabilities, Cost, Info, Mechanism, Support
from subquad.attention.exact.engine import clear, sums_dtype
from subquad.attention.exact.softmax import Softmax
from subquad.attention.masks import Mask
from subquad.options import Config, choice_problem, integer_problem

__all__ = ["Nystrom", "NystromConfig", "iterative_inverse", "segment_means", "segments"]

INVERSES = ("iterative", "exact")


@dataclass(frozen=True)
class NystromConfig(Config):
    """Options of `Nystrom`.

    Args:
        landmarks: m, number of segments; a row with fewer open tokens takes each of them.
        inverse: the pseudo-inverse of the middle matrix: "iterative" (the paper's polynomial)
            or "exact" (by singular values, in float64).
        iterations: steps of the iterative inverse.
        conv_kernel: adds a learned depthwise convolution of the values with this many taps
            (odd; the paper has 33), or none. Needs L = S.
    """

    mechanism: ClassVar[str] = "nystrom"
    sizes: ClassVar[tuple[str, ...]] = ("landmarks",)

    landmarks: int = 64
    inverse: str = "iterative"
    iterations: int = 6
    conv_kernel: int | None = None

    def problems(self) -> Iterator[str]:
        yield from integer_problem("landmarks", self.landmarks, 1)
        yield from choice_problem("inverse", self.inverse, INVERSES)
        yield from integer_problem("iterations", self.iterations, 1)
        if self.conv_kernel is not None:
            wrong = list(integer_problem("conv_kernel", self.conv_kernel, 1))
            yield from wrong
            if not wrong and self.conv_kernel % 2 == 0:
                yield f"conv_kernel={self.conv_kernel} must be odd, so that it has a middle"


def _flops(length: int, head_dim: int, value_dim: int, config: NystromConfig) -> float:
    # Queries on landmarks and landmarks on keys, 2·L·m·(D+V) each; the inverse is four m×m
    # products a step, or about 20·m³ for singular values.
    m = min(config.landmarks, length)
    inverse = 8.0 * config.iterations * m**3 if config.inverse == "iterative" else 20.0 * m**3
    taps = 2.0 * length * value_dim * (config.conv_kernel or 0)
    return 4.0 * length * m * (head_dim + value_dim) + 2.0 * length * head_dim + inverse + taps


def _memory(length: int, head_dim: int, value_dim: int, config: NystromConfig) -> float:
    # Landmarks, their values, a few m×m matrices; one log-sum-exp a query in the fused kernel.
    m = min(config.landmarks, length)
    return 4.0 * (length + 2.0 * m * (head_dim + value_dim) + 6.0 * m**2)


class Nystrom(Mechanism):
    """Softmax attention by the Nyström method; options in `NystromConfig`.

        out_i = softmax(scale·q_i·k̃) · Z · softmax(scale·q̃·kᵀ) v,   Z = A⁺,
        A = softmax(scale·q̃ k̃ᵀ)

    The outer two factors are attention themselves, of m queries over S keys and of L queries
    over m keys with values Z·(…): both run fused, no L×m matrix is kept.

    Landmarks are means over segments: the token of rank r among a row's n open tokens is in
    segment ⌊r·m/n⌋, with m lowered to n where n < m. Segments need not be of one size, a row's
    padding takes no part wherever it stands, and each mean divides by its own count. Query
    landmarks come from q, where L = S without the queries at masked positions (in
    self-attention these are padding); where L ≠ S positions of queries and keys are unrelated
    and every query counts. There are then min(m, L) × min(m, n) landmarks and A is rectangular.

    The iterative inverse is the paper's: Z₀ = Aᵀ/(‖A‖₁ ‖A‖_∞), then

        Z ← ¼ Z (13 I − AZ (15 I − AZ (7 I − AZ)))

    with the norms of each matrix, ‖A‖₁ the largest column sum, ‖A‖_∞ the largest row sum, so
    that a result does not depend on what else is in the batch. It converges for every A, slowly
    along small singular values, and that is a merit: with the default six steps it is a damped
    pseudo-inverse. The exact one multiplies the landmarks' interpolation error by the condition
    of A, and where that is large attention becomes far worse than uniform; it is for the limit,
    where every token is a landmark, and for small well-conditioned A.

    Weights may be negative, and rows sum to one only as far as Z is an inverse. Segment means
    assume that neighbours are alike.

    Cost O((L+S)·m·(D+V) + m³) time, O((L+S) + m·(D+V) + m²) memory beyond inputs and output.

    Deviations from the paper: lengths need not be divisible, keys may be masked, queries and
    keys may differ in length; norms are per matrix (the authors' code and transformers take
    one maximum over batch and heads).

    Raises:
        OptionError: wrong options; all problems at once.
        UnsupportedError: a causal mask.

    Example:
        >>> import torch, subquad as sq
        >>> q, k, v = (torch.randn(2, 4, 50, 8, dtype=torch.float64) for _ in range(3))
        >>> mech = sq.build("nystrom", head_dim=8, num_heads=4, landmarks=16)
        >>> mech(q, k, v).shape
        torch.Size([2, 4, 50, 8])
        >>> exact = sq.attention(q, k, v, "softmax")
        >>> limit = sq.attention(q, k, v, "nystrom(landmarks=50, inverse=exact)")
        >>> torch.allclose(limit, exact)
        True
    """

    name = "nystrom"
    family = "summary"
    Config = NystromConfig
    config: NystromConfig
    info = Info(
        summary="softmax attention through segment-mean landmarks (Nyströmformer)",
        formula="out = softmax(scale·q k̃ᵀ) · softmax(scale·q̃ k̃ᵀ)⁺ · softmax(scale·q̃ kᵀ) v,  "
        "q̃, k̃ means over segments",
        cost=Cost("O((L+S)·m·(D+V) + m³)", _flops, _memory),
        paper="Xiong et al. 2021, Nyströmformer, arXiv 2102.03902, section 3.2 and Algorithm 1",
        limit="softmax with landmarks ≥ L, S and inverse=exact",
        options={
            "landmarks": "m, number of segments; fewer where a row has fewer open tokens",
            "inverse": "iterative (the paper's polynomial, damped) or exact (by singular values; "
            "amplifies errors where the middle matrix is nearly singular)",
            "iterations": "steps of the iterative inverse",
            "conv_kernel": "taps of a learned depthwise convolution of the values that is added, "
            "odd (the paper has 33); none leaves it out",
        },
        deviations="segments of unequal size, masked keys left out of means, L ≠ S; norms of the "
        "inverse's start per matrix instead of one maximum over batch and heads",
        sample="nystrom(landmarks=8)",
        use="encoders trained with it, or converted ones where neither causality nor a state is "
        "needed.",
    )

    def __init__(
        self,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **sizes: Any,
    ) -> None:
        super().__init__(device=device, dtype=dtype, **sizes)
        self._softmax = Softmax(head_dim=self.head_dim, num_heads=self.num_heads)
        if self.config.conv_kernel is not None:
            self.conv_weight = nn.Parameter(
                torch.empty(self.num_heads, self.config.conv_kernel, device=device, dtype=dtype)
            )
        self.reset_parameters()

    @classmethod
    def capabilities_for(cls, config: NystromConfig) -> Capabilities:
        future = "landmarks are means over the whole sequence: they would leak the future"
        cross: Support = True
        compact: Support = True
        functional: Support = True
        if config.conv_kernel is not None:
            cross = Absent("the convolution adds a value at each query: it needs L = S")
            compact = Absent("the convolution counts positions, masked ones included")
            functional = Absent("the convolution has learned parameters; build the module")
        return Capabilities(
            causal=Absent(future),
            prefix=Absent(future),
            segments=Absent("one set of landmarks serves one sequence; call once for each segment"),
            window=Absent("landmarks summarise all keys; a window is sparse attention"),
            state=Absent(future),
            partial=Absent("the middle matrix mixes landmarks of all keys"),
            cross=cross,
            compact=compact,
            functional=functional,
            approximates="softmax",
        )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the convolution from U(−K^-½, K^-½), torch's own rule, by the seed."""
        if self.config.conv_kernel is None or self.conv_weight.is_meta:
            return
        generator = torch.Generator().manual_seed(self.seed)
        bound = 1.0 / math.sqrt(self.config.conv_kernel)
        drawn = torch.rand(self.conv_weight.shape, generator=generator, dtype=torch.float64)
        self.conv_weight.copy_((2.0 * drawn - 1.0) * bound)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
        given = q.dtype
        dtype = sums_dtype(given)  # the inverse amplifies what half precision rounds off
        k, v = clear(k.to(dtype), v.to(dtype), mask)
        q = q.to(dtype)
        queries, keys = q.shape[2], k.shape[2]
        place = segments(mask.key, keys, self._count(keys), k.device)
        place_q = place
        if queries != keys:
            place_q = segments(None, queries, self._count(queries), q.device)
        groups = self.num_heads // self.num_kv_heads
        landmarks = segment_means(k, *place).repeat_interleave(groups, 1)
        landmarks_q = segment_means(q, *place_q)
        opened, opened_q = place[1] > 0, place_q[1] > 0  # (B or 1, m)
        if self.config.inverse == "exact":
            # Singular values below the rounding of the outer factors are no information.
            level = max(landmarks.shape[2], landmarks_q.shape[2]) * torch.finfo(dtype).eps
            middle = _middle(landmarks_q.double(), landmarks.double(), opened_q, opened, scale)
            inverse = torch.linalg.pinv(middle, rtol=level).to(dtype)
        else:
            middle = _middle(landmarks_q, landmarks, opened_q, opened, scale)
            inverse = iterative_inverse(middle, self.config.iterations)
        read = self._softmax._cleared(landmarks_q, k, v, Mask(key=mask.key), scale)
        # Without a key mask there are no more segments than tokens, but in a compiled graph.
        full = mask.key is None and not torch.compiler.is_compiling()
        rows = Mask(key=None if full else opened.expand(len(q), -1))
        out = self._softmax._cleared(q, landmarks, inverse @ read, rows, scale)
        if self.config.conv_kernel is not None:
            out = out + self._convolve(v.repeat_interleave(groups, 1))
        return out.to(given)

    def _count(self, length: int) -> int:
        """Landmarks of a call; a compiled graph keeps m, so that it serves every length."""
        if torch.compiler.is_compiling():
            return self.config.landmarks
        return min(self.config.landmarks, length)

    def _convolve(self, v: Tensor) -> Tensor:
        """Σ_t weight_t v_{i+t−K//2} (B, H, S, V), zeros beyond the ends."""
        weight = self.conv_weight.to(v.dtype)[:, None, :, None]
        taps = weight.shape[2]
        return F.conv2d(v, weight, padding=(taps // 2, 0), groups=v.shape[1])


def segments(
    key: Tensor | None, length: int, count: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cuts the open tokens of each row into at most `count` segments of nearly equal size.

    The token of rank r among n open ones is in segment ⌊r·m/n⌋, m = min(count, n), so that
    every one of the first m segments has ⌊n/m⌋ or ⌈n/m⌉ tokens.

    Args:
        key: (B, length) bool, True = open, or None for all.
        length: tokens of a row.
        count: segments wanted.
        device: of the result.

    Returns:
        The segment of each token (B or 1, length), `count` for masked ones, and the tokens of
        each segment (B or 1, count).
    """
    opened = torch.ones(1, length, dtype=torch.bool, device=device) if key is None else key
    rank = opened.cumsum(-1) - 1
    total = opened.sum(-1, keepdim=True)
    index = rank * total.clamp_max(count) // total.clamp_min(1)
    index = index.masked_fill(~opened, count)
    sizes = index.new_zeros(index.shape[0], count + 1)
    sizes = sizes.scatter_add(1, index, torch.ones_like(index))
    return index, sizes[:, :count]


def segment_means(x: Tensor, index: Tensor, sizes: Tensor) -> Tensor:
    """Means of x (B, H, n, D) over segments, (B, H, count, D); zeros for empty ones.

    Cost O(n·D). `index` and `sizes` are those of `segments`.
    """
    batch, heads, length, dim = x.shape
    count = sizes.shape[1]
    x = x.masked_fill((index == count)[:, None, :, None], 0.0)  # NaN, Inf of masked tokens
    first = torch.arange(batch * heads, device=x.device).view(batch, heads, 1) * (count + 1)
    rows = (first + index[:, None]).reshape(-1)
    sums = x.new_zeros(batch * heads * (count + 1), dim)
    sums = sums.index_add(0, rows, x.reshape(batch * heads * length, dim))
    sums = sums.view(batch, heads, count + 1, dim)[:, :, :count]
    return sums / sizes.clamp_min(1).to(x.dtype)[:, None, :, None]


def iterative_inverse(matrix: Tensor, iterations: int = 6) -> Tensor:
    """The pseudo-inverse (..., n, m) of (..., m, n) by an iteration of order three.

    Z₀ = Aᵀ/(‖A‖₁ ‖A‖_∞), Z ← ¼ Z (13 I − AZ (15 I − AZ (7 I − AZ))): Razavi et al. 2014, as
    used by Xiong et al. 2021, arXiv 2102.03902. With σ the singular values of A, AZ₀ has the
    eigenvalues σ²/(‖A‖₁‖A‖_∞) ∈ [0, 1], and a step maps 1 − λ to (1 − λ)³(1 − λ/4).

    Cost O(iterations·m²·n). A zero matrix gives zeros.
    """
    size = matrix.abs()
    norm = size.sum(-2).amax(-1) * size.sum(-1).amax(-1)
    norm = torch.where(norm == 0, torch.ones_like(norm), norm)[..., None, None]
    z = matrix.transpose(-1, -2) / norm
    eye = torch.eye(matrix.shape[-2], dtype=matrix.dtype, device=matrix.device)
    for _ in range(iterations):
        az = matrix @ z
        z = 0.25 * z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az)))
    return z


def _middle(q: Tensor, k: Tensor, rows: Tensor, columns: Tensor, scale: float) -> Tensor:
    """softmax(scale·q kᵀ) over open columns (B or 1, n), zeros in closed rows (B or 1, m)."""
    empty = ~columns.any(-1)[:, None, None, None]
    closed = ~columns[:, None, None, :] & ~empty  # a row of −∞ alone would be NaN
    logits = scale * q @ k.transpose(-1, -2)
    weights = logits.masked_fill(closed, float("-inf")).softmax(-1)
    return weights.masked_fill(empty | ~rows[:, None, :, None], 0.0)
