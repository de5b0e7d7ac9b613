"""Sampled attention: the heavy keys exactly, a weighted sample of the others.

    out_i = Σ_{j ∈ heavy ∪ sample} exp(scale·q_i·k_j + ℓ_j) v_j / Σ_{…} exp(scale·q_i·k_j + ℓ_j)

with ℓ = 0 for heavy keys and ℓ = −log(n·p_j) for each of n keys drawn from the proposal p: by
importance sampling, both sums are unbiased estimates of the sums over all keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.attention.base import Absent, Capabilities, Cost, Info, Mechanism
from subquad.attention.exact.engine import clear, sums_dtype
from subquad.attention.masks import Mask
from subquad.attention.partial import Partial
from subquad.attention.summary.engine import summary_attention, summary_partial
from subquad.attention.summary.mass import column_mass, open_tokens, take
from subquad.options import Config, choice_problem, integer_problem, number_problem

__all__ = ["Sampled", "SampledConfig", "Selection"]

DRAWS = ("stratified", "iid")
BITS = 31
"""Random bits of one uniform number."""


@dataclass(frozen=True, eq=False)
class Selection:
    """The keys that a call reads.

    Args:
        index: (B, Hkv, K) int64, positions of keys; a key may be drawn more than once.
        log_weight: (B, Hkv, K) ℓ, 0 for heavy keys, −log(n·p_j) for drawn ones, −∞ for none.
    """

    index: Tensor
    log_weight: Tensor


@dataclass(frozen=True)
class SampledConfig(Config):
    """Options of `Sampled`.

    Args:
        heavy: keys of largest mass that are always read, the first and last among them.
        samples: n, keys drawn from the others.
        first, last: open keys at the start and the end of a row that count as heavy
            whatever their mass (CLS, SEP, attention sinks).
        landmarks: queries of each head from which the mass is estimated.
        uniform: share of the uniform distribution in the proposal, 1 for uniform sampling.
        draw: "stratified" (one key from each of n equal shares of the proposal) or "iid".
    """

    mechanism: ClassVar[str] = "sampled"
    sizes: ClassVar[tuple[str, ...]] = ("heavy", "samples")

    heavy: int = 64
    samples: int = 192
    first: int = 1
    last: int = 1
    landmarks: int = 64
    uniform: float = 0.25
    draw: str = "stratified"

    def problems(self) -> Iterator[str]:
        wrong: list[str] = []
        for name in ("heavy", "samples", "first", "last"):
            wrong.extend(integer_problem(name, getattr(self, name), 0))
        yield from wrong
        yield from integer_problem("landmarks", self.landmarks, 1)
        yield from number_problem("uniform", self.uniform, 0.0, 1.0, open_low=True)
        yield from choice_problem("draw", self.draw, DRAWS)
        if wrong:
            return
        if self.heavy + self.samples == 0:
            yield "heavy=0 and samples=0 leave no key to read"
        if self.first + self.last > self.heavy:
            yield (
                f"first={self.first} and last={self.last} are among the heavy keys and need "
                f"heavy ≥ {self.first + self.last}, given heavy={self.heavy}"
            )


def _flops(length: int, head_dim: int, value_dim: int, config: SampledConfig) -> float:
    read = 2.0 * length * (config.heavy + config.samples) * (head_dim + value_dim)
    return read + 2.0 * length * config.landmarks * head_dim


def _memory(length: int, head_dim: int, value_dim: int, config: SampledConfig) -> float:
    # Queries with their column of log-weights, the mass and the proposal in float64, landmark
    # logits and weights; the keys that are read.
    keys = config.heavy + config.samples
    return 4.0 * (length * (head_dim + 8) + keys * (head_dim + value_dim + 2)) + min(
        8.0 * length * config.landmarks, 64.0 * 2**20
    )


class Sampled(Mechanism):
    """Attention over heavy keys and an importance sample of the others; options: `SampledConfig`.

        out_i = (Σ_{j∈E} e^{s_ij} v_j + Σ_t e^{s_i,j_t} v_{j_t} / (n·p_{j_t})) / (the same, v = 1)

    s_ij = scale·q_i·k_j, E the heavy keys, j_1 … j_n drawn from the remaining open keys R with

        p_j = (1 − u)·mass_j / Σ_R mass + u/|R|,     u = `uniform`.

    The mass of a key is what exact softmax of `landmarks` queries, one from each of as many
    strata of the row's open queries, gives it, summed over the query heads of a group: O(S).
    Heavy keys are those of the largest mass, with the first and last open keys always among
    them. Weights 1/(n·p_j) are at most |R|/(n·u).

    The numerator Σ e^s v and the normaliser Σ e^s are unbiased: with the draw "iid" their
    variance is that of importance sampling, (Σ_R f_j²/p_j − (Σ_R f_j)²)/n; "stratified" draws
    key t by the inverse of the cumulative proposal at (t + U_t)/n, unbiased too and of no
    larger variance. The output, their ratio, is biased, by O(1/n).

    Selection, proposal and draw pass no gradient. With these held fixed gradients are exact,
    and those of the two sums are unbiased estimates of the exact sums' gradients.

    A row's uniform numbers depend on seed and key/value head alone, and are used by rank in the
    cumulative proposal: a row gives the same result alone, in a batch, and with padding.
    Rows share these numbers, with proposals of their own.

    Cost O(L·(heavy + samples)·(D+V) + S·landmarks·D) time, O(L + S) memory.

    Papers: importance-sampled attention with heavy entries kept exact as in Han et al. 2023,
    HyperAttention, arXiv 2310.05869 (there heavy entries are found by hashing, and differ among
    queries); heavy keys by column mass as in Zhang et al. 2023, H2O, arXiv 2306.14048.

    Raises:
        OptionError: wrong options; all problems at once.
        UnsupportedError: a causal mask.

    Example:
        >>> import torch, subquad as sq
        >>> q, k, v = (torch.randn(1, 4, 300, 16, dtype=torch.float64) for _ in range(3))
        >>> mech = sq.build("sampled(heavy=32, samples=64)", head_dim=16, num_heads=4)
        >>> mech(q, k, v).shape
        torch.Size([1, 4, 300, 16])
        >>> exact = sq.attention(q, k, v, "softmax")
        >>> torch.allclose(sq.attention(q, k, v, "sampled(heavy=300)"), exact)
        True
    """

    name = "sampled"
    family = "summary"
    Config = SampledConfig
    config: SampledConfig
    draws: Tensor
    offsets: Tensor
    info = Info(
        summary="heavy keys exactly, and a weighted random sample of the others",
        formula="out_i = Σ_{j ∈ heavy ∪ sample} exp(scale·q_i·k_j + ℓ_j) v_j / "
        "Σ_{j ∈ heavy ∪ sample} exp(scale·q_i·k_j + ℓ_j),  ℓ = 0 for heavy keys, −log(n·p_j) for "
        "n keys drawn with probabilities p_j = (1 − u)·mass_j/Σ mass + u/|R|",
        cost=Cost("O(L·(h + n)·(D+V) + L·T·D)", _flops, _memory),
        paper="importance sampling as in Han et al. 2023, HyperAttention, arXiv 2310.05869; "
        "heavy keys by column mass as in Zhang et al. 2023, H2O, arXiv 2306.14048",
        limit="softmax with heavy ≥ S; normaliser and numerator are unbiased, their ratio is not",
        options={
            "heavy": "h, keys of largest mass that are always read",
            "samples": "n, keys drawn from the others",
            "first": "keys at the start of a row that are always heavy",
            "last": "keys at the end of a row that are always heavy",
            "landmarks": "T, queries of each head from which the mass is estimated",
            "uniform": "u, share of the uniform distribution in the proposal",
            "draw": "stratified (one key from each of n equal shares of the proposal) or iid",
        },
        deviations="HyperAttention finds heavy entries for each query by hashing; here heavy keys "
        "are those of largest column mass, the same for all queries, and the proposal follows it",
        sample="sampled(heavy=6, samples=10)",
        use="trained encoders at low cost when few keys carry most of the mass; the error falls "
        "with the number of samples.",
    )

    def __init__(
        self,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **sizes: Any,
    ) -> None:
        super().__init__(device=device, dtype=dtype, **sizes)
        # Integers, so that no cast to another dtype changes a draw.
        for name, count in (("draws", self.config.samples), ("offsets", self.config.landmarks)):
            empty = torch.zeros(self.num_kv_heads, count, dtype=torch.int64, device=device)
            self.register_buffer(name, empty)
        self.reset_parameters()

    @classmethod
    def capabilities_for(cls, config: SampledConfig) -> Capabilities:
        future = "keys are chosen by what all queries of the call read: it would leak the future"
        return Capabilities(
            causal=Absent(future),
            prefix=Absent(future),
            segments=Absent("one selection serves one sequence; call once for each segment"),
            window=Absent("keys are drawn from the whole sequence; a window is sparse attention"),
            state=Absent(future),
            partial=True,
            merges=Absent("each call draws a selection of its own keys"),
            exact_gradient=Absent(
                "the selected keys and their weights are held fixed: gradients are those of the "
                "sums over the selection"
            ),
            approximates="softmax",
        )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the uniform numbers by the seed, each key/value head from a stream of its own."""
        if self.draws.is_meta:
            return
        seeds = torch.Generator().manual_seed(self.seed % 2**63)
        for head in range(self.num_kv_heads):
            own = int(torch.randint(2**63 - 1, (), generator=seeds))
            generator = torch.Generator().manual_seed(own)
            for buffer in (self.draws, self.offsets):
                count = (buffer.shape[1],)
                buffer[head].copy_(torch.randint(2**BITS, count, generator=generator))

    @torch.no_grad()
    def proposal(
        self, q: Tensor, k: Tensor, mask: Mask, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Heavy keys and the distribution from which the others are drawn.

        Args:
            q: (B, H, L, D).
            k: (B, Hkv, S, D).
            mask: its key part (B, S).
            scale: factor of the logits.

        Returns:
            index (B, Hkv, heavy), present (B, Hkv, heavy) bool, False where a row has fewer
            open keys, and p (B, Hkv, S) float64, zero at masked and heavy keys.
        """
        (batch, kv, keys), config = k.shape[:3], self.config
        key = open_tokens(mask.key, batch, keys, k.device)
        k = k.masked_fill(~key[:, None, :, None], 0.0)
        offset = _uniform(self.offsets)
        mass = column_mass(q, k, Mask(key=mask.key), scale, config.landmarks, offset)
        rank, total = key.long().cumsum(-1) - 1, key.sum(-1, keepdim=True)
        ends = (rank < config.first) | (rank >= total - config.last)
        order = mass.masked_fill(ends[:, None], float("inf")).masked_fill(~key[:, None], -1.0)
        # Absent keys behind the last: there are always enough for the largest `heavy` ones.
        best, index = F.pad(order, (0, config.heavy), value=-1.0).topk(config.heavy, -1)
        taken = torch.zeros(batch, kv, keys + config.heavy, dtype=torch.bool, device=k.device)
        rest = key[:, None] & ~taken.scatter(-1, index, True)[..., :keys]
        share = mass.double().masked_fill(~rest, 0.0)
        whole, count = share.sum(-1, keepdim=True), rest.sum(-1, keepdim=True)
        even = rest.double() / count.clamp_min(1)
        mixed = (1.0 - config.uniform) * share / torch.where(whole == 0, 1.0, whole)
        mixed = torch.where(whole == 0, even, mixed + config.uniform * even)
        return index.clamp_max(keys - 1), best >= 0, mixed

    @torch.no_grad()
    def select(self, q: Tensor, k: Tensor, mask: Mask, scale: float) -> Selection:
        """The keys that a call reads, with their log-weights; arguments as in `proposal`."""
        keys, samples = k.shape[2], self.config.samples
        heavy, present, p = self.proposal(q, k, mask, scale)
        zero = torch.zeros(present.shape, dtype=sums_dtype(q.dtype), device=k.device)
        exact = zero.masked_fill(~present, float("-inf"))
        if not samples:
            return Selection(heavy, exact)
        at = _uniform(self.draws)
        if self.config.draw == "stratified":
            at = (torch.arange(samples, device=k.device) + at) / samples
        cumulative = p.cumsum(-1)
        at = at * cumulative[..., -1:]
        # The first key beyond: it has p > 0. In a row without any, p = 0 and ℓ = −∞.
        drawn = torch.searchsorted(cumulative, at, right=True).clamp_max(keys - 1)
        chance = p.gather(-1, drawn) * samples
        weight = -chance.log().masked_fill(chance == 0, float("inf"))
        return Selection(torch.cat([heavy, drawn], -1), torch.cat([exact, weight.to(zero)], -1))

    def _selected(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Summary keys, values, log-weights and which are present, for the engine."""
        k, v = clear(k, v, mask)
        if not torch.compiler.is_compiling() and self.config.heavy >= k.shape[2]:
            return k, v, None, None if mask.key is None else mask.key[:, None]
        chosen = self.select(q.detach(), k.detach(), mask, scale)
        return take(k, chosen.index), take(v, chosen.index), chosen.log_weight, None

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
        k, v, log_weight, present = self._selected(q, k, v, mask, scale)
        return summary_attention(q, k, v, scale, log_weight=log_weight, present=present)

    def _partial(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Partial:
        k, v, log_weight, present = self._selected(q, k, v, mask, scale)
        return summary_partial(q, k, v, scale, log_weight=log_weight, present=present)


def _uniform(draws: Tensor) -> Tensor:
    """Integers of `BITS` bits as float64 in (0, 1)."""
    return (draws.double() + 0.5) / 2.0**BITS
