"""Clustered attention: one attention for each cluster of queries, or one key for each of keys.

Queries (Vyas et al. 2020): a cluster's members share the attention of their centroid,

    A^c = softmax(scale·q^c kᵀ),   out_i = A^c_{c(i)} v,

improved by exact logits for the k keys that the centroid attends to most. Keys: a cluster is one
summary key that counts as often as it has members.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.attention.base import Absent, Capabilities, Cost, Info, Mechanism, Support
from subquad.attention.exact.engine import (
    CHUNK_BYTES,
    as_partial,
    clear,
    explicit,
    fused,
    masked,
    over_queries,
    sums_dtype,
    wide,
)
from subquad.attention.masks import Mask
from subquad.attention.partial import Partial
from subquad.attention.summary.engine import summary_attention, summary_partial
from subquad.attention.summary.kmeans import lloyd, nearest, sums
from subquad.attention.summary.mass import (
    column_mass,
    of_rank,
    open_queries,
    open_tokens,
    strata,
    take,
)
from subquad.features.draws import draw_projection
from subquad.options import Config, choice_problem, flag_problem, integer_problem

__all__ = ["Clustered", "ClusteredConfig"]

TOPK = 32
LANDMARKS = 64
"""Queries of each head from which the mass of keys is estimated."""


@dataclass(frozen=True)
class ClusteredConfig(Config):
    """Options of `Clustered`.

    Args:
        cluster: what is clustered: "queries" (the paper) or "keys".
        clusters: C; a row with no more open tokens has each as a cluster of its own.
        distance: "hamming" (of sign bits, the paper), "euclidean", or "auto": hamming for
            queries, euclidean for keys.
        bits: sign bits of the hash, for the Hamming distance.
        centre: hash differences from the row's mean instead of the vectors themselves.
        iterations: Lloyd iterations.
        topk: k, keys of each cluster of queries with exact logits, 0 for none; default 32.
        weights: how the members of a cluster of keys are averaged: "count" (equally) or
            "mass" (by the attention that they receive from a few queries).
    """

    mechanism: ClassVar[str] = "clustered"
    sizes: ClassVar[tuple[str, ...]] = ("clusters", "topk")

    cluster: str = "queries"
    clusters: int = 100
    distance: str = "auto"
    bits: int = 63
    centre: bool = False
    iterations: int = 10
    topk: int | None = None
    weights: str = "count"

    def problems(self) -> Iterator[str]:
        yield from choice_problem("cluster", self.cluster, ("queries", "keys"))
        yield from integer_problem("clusters", self.clusters, 1)
        yield from choice_problem("distance", self.distance, ("auto", "hamming", "euclidean"))
        yield from integer_problem("bits", self.bits, 1)
        yield from flag_problem("centre", self.centre)
        yield from integer_problem("iterations", self.iterations, 0)
        yield from choice_problem("weights", self.weights, ("count", "mass"))
        if self.topk is not None:
            wrong = list(integer_problem("topk", self.topk, 0))
            yield from wrong
            if not wrong and self.topk and self.cluster == "keys":
                yield f"topk={self.topk} needs cluster=queries: it refines a centroid's attention"
        if self.weights == "mass" and self.cluster == "queries":
            yield "weights=mass needs cluster=keys"

    @property
    def hamming(self) -> bool:
        """Whether tokens are told apart by sign bits."""
        return self.distance == "hamming" or (self.distance == "auto" and self.cluster == "queries")

    @property
    def exact_keys(self) -> int:
        """k, keys of each cluster of queries with exact logits."""
        if self.cluster == "keys":
            return 0
        return TOPK if self.topk is None else self.topk


def _flops(length: int, head_dim: int, value_dim: int, config: ClusteredConfig) -> float:
    width = config.bits if config.hamming else head_dim
    hash_cost = 2.0 * length * head_dim * config.bits if config.hamming else 0.0
    lloyd = 2.0 * length * config.clusters * width * (config.iterations + 1)
    if config.cluster == "keys":
        mass = 2.0 * length * LANDMARKS * head_dim if config.weights == "mass" else 0.0
        return hash_cost + lloyd + mass + 2.0 * length * config.clusters * (head_dim + value_dim)
    centroids = 2.0 * length * config.clusters * (head_dim + value_dim)
    if not config.exact_keys:
        return hash_cost + lloyd + centroids
    search = 2.0 * length * config.clusters * head_dim
    return (
        hash_cost + lloyd + centroids + search
        # blocks of one cluster: L tokens and up to L/2 places of padding
        + 3.0 * length * config.exact_keys * (head_dim + value_dim)
    )  # fmt: skip


def _memory(length: int, head_dim: int, value_dim: int, config: ClusteredConfig) -> float:
    # Points, a copy of them without closed ones, and distances to all centres, 16 MiB at a time.
    count, width = config.clusters, config.bits if config.hamming else head_dim
    assign = 8.0 * length * width + min(8.0 * length * count, 2.0 * CHUNK_BYTES / 4)
    if not config.exact_keys:
        return assign + 4.0 * count * (head_dim + value_dim + 1)
    # Then: queries in blocks, their weights and outputs; keys widened; the top keys and values of
    # each cluster, and of each block.
    size = _block_size(length, count)
    near = (length / size + 2 * count) * config.exact_keys * (head_dim + value_dim)
    rows = 1.5 * length * (head_dim + value_dim + 2 * config.exact_keys)
    rows += length * (head_dim + 2 * value_dim)
    return max(assign, 4.0 * (rows + near))


class Clustered(Mechanism):
    """Attention of clusters of queries, or to clusters of keys; options in `ClusteredConfig`.

    ``cluster=queries`` (Vyas et al. 2020). With q^c the mean of a cluster's queries and
    A^c = softmax(scale·q^c kᵀ), every member has the output A^c v (``topk=0``). The improved
    form takes the k keys T of the largest A^c_j in each cluster j, and redistributes their mass
    m_j = Σ_{l∈T} A^c_jl by exact logits, i a member of j:

        A_il = m_j exp(scale·q_i·k_l) / Σ_{r∈T} exp(scale·q_i·k_r)   for l ∈ T,   A^c_jl otherwise

    ``cluster=keys``. A cluster of keys is one summary: with weights w that sum to one in it,

        out_i = Σ_c exp(scale·q_i·k̃_c + ℓ_c) ṽ_c / Σ_c exp(scale·q_i·k̃_c + ℓ_c)
        k̃_c = Σ w_j k_j,   ṽ_c = Σ w_j v_j,   ℓ_c = −Σ w_j log w_j

    By Jensen's inequality exp(q·k̃_c + ℓ_c) ≤ Σ_j exp(q·k_j), with equality where w_j ∝
    exp(q·k_j). ``weights=count`` has w = 1/n_c, hence ℓ_c = log n_c; ``weights=mass`` takes w
    in proportion to the exact attention that keys get from 64 stratified landmark queries of
    each head, so that the bound is tight for the average query.

    Clusters come from Lloyd's k-means: `iterations` times assign and update, then assign. In
    the Hamming distance tokens are the signs of `bits` random projections, centroids the
    majority of their members' signs, and distances are exact integers; ties go to the cluster
    of smaller index. First centroids are the tokens of rank ⌊(c + ½)·n/C⌋ among the row's n
    open tokens. Where n ≤ C every open token is a cluster of its own, and attention is exact.
    A cluster that loses all members keeps its place and has no weight.

    Masked keys, and the queries at their positions where L = S, leave the clustering (these
    queries still get the attention of the nearest cluster): padding changes nothing, wherever
    it stands. Clusters are those of each query head, of each key/value head for keys; hashes
    are those of the key/value head. Assignments are held fixed; away from ties the gradients,
    which pass through the means, are exact, but for weights=mass, which are held fixed too.

    Cost O((L + S)·C·D·iterations + L·k·(D+V)) time, O((L + S)·(D+V)) memory: the C×S centroid
    attention is never kept, and queries are sorted by cluster in blocks that share their k keys.

    Paper: Vyas et al. 2020, Fast Transformers with Clustered Attention, arXiv 2007.04825,
    section 3; C = 100, k = 32, 63 bits and 10 iterations are their settings. Clusters of keys
    are not in the paper.

    Raises:
        OptionError: wrong options; all problems at once.
        UnsupportedError: a causal mask.

    Example:
        >>> import torch, subquad as sq
        >>> q, k, v = (torch.randn(1, 4, 300, 16, dtype=torch.float64) for _ in range(3))
        >>> exact = sq.attention(q, k, v, "softmax")
        >>> sq.attention(q, k, v, "clustered(clusters=20, topk=8)").shape
        torch.Size([1, 4, 300, 16])
        >>> torch.allclose(sq.attention(q, k, v, "clustered(clusters=300)"), exact)
        True
        >>> torch.allclose(sq.attention(q, k, v, "clustered(clusters=300, cluster=keys)"), exact)
        True
    """

    name = "clustered"
    family = "summary"
    Config = ClusteredConfig
    config: ClusteredConfig
    planes: Tensor
    info = Info(
        summary="attention of the centroids of clusters of queries, or to those of keys",
        formula="queries: out_i = Σ_l A_il v_l, A_il = m_c·softmax_{l∈T_c}(scale·q_i·k_l) for the "
        "top keys T_c of the cluster c of i, m_c their mass, and A^c_cl = softmax_l(scale·q^c·k_l) "
        "otherwise;  keys: out_i = Σ_c exp(scale·q_i·k̃_c + ℓ_c) ṽ_c / Σ_c exp(scale·q_i·k̃_c + ℓ_c)",
        cost=Cost("O(L·C·D·iterations + L·k·(D+V))", _flops, _memory),
        paper="Vyas et al. 2020, Fast Transformers with Clustered Attention, arXiv 2007.04825, "
        "section 3 (clusters of queries)",
        limit="softmax with clusters ≥ L or topk ≥ S, for clusters of keys with clusters ≥ S",
        options={
            "cluster": "what is clustered: queries (the paper) or keys",
            "clusters": "C, number of clusters",
            "distance": "hamming (of sign bits, the paper), euclidean, or auto: hamming for "
            "queries, euclidean for keys",
            "bits": "sign bits of the hash, for the Hamming distance",
            "centre": "hash differences from the row's mean",
            "iterations": "Lloyd iterations",
            "topk": "k, keys of each cluster of queries with exact logits; 0 for none, default 32",
            "weights": "how members of a cluster of keys are averaged: count (equally) or mass "
            "(by the attention they get from a few queries)",
        },
        deviations="hyperplanes pass through the origin (the authors' code offers an offset); "
        "first centroids are spread over the sequence; clusters of keys are not in the paper",
        sample="clustered(clusters=8, topk=8)",
        use="trained encoders whose queries fall into groups; the nearest to softmax among the "
        "mechanisms without a window, and the slowest.",
    )

    def __init__(
        self,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **sizes: Any,
    ) -> None:
        super().__init__(device=device, dtype=dtype, **sizes)
        if self.config.hamming:
            shape = (self.num_kv_heads, self.config.bits, self.head_dim)
            planes = torch.zeros(shape, device=device, dtype=dtype or torch.get_default_dtype())
            self.register_buffer("planes", planes)
        self.reset_parameters()

    @classmethod
    def capabilities_for(cls, config: ClusteredConfig) -> Capabilities:
        future = f"clusters are those of all {config.cluster} of the call: they leak the future"
        partial: Support = True
        gradient: Support = True
        if config.exact_keys:
            partial = Absent(
                "the mass of a centroid's top keys is redistributed among them: weights are no "
                "ratio of sums over keys"
            )
        if config.weights == "mass":
            gradient = Absent("the mass by which keys are averaged is held fixed")
        return Capabilities(
            causal=Absent(future),
            prefix=Absent(future),
            segments=Absent("one set of clusters serves one sequence; call once for each segment"),
            window=Absent("centroids read or stand for all keys; a window is sparse attention"),
            state=Absent(future),
            partial=partial,
            merges=Absent("each call has clusters of its own open tokens"),
            exact_gradient=gradient,
            compile=Absent("tokens are assigned to clusters chunk by chunk, in a Python loop"),
            approximates="softmax",
        )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the hyperplanes of the hash from N(0, I) by the seed."""
        if not self.config.hamming or self.planes.is_meta:
            return
        heads, bits, dim = self.planes.shape
        self.planes.copy_(
            draw_projection(bits, dim, heads=heads, draw="iid", seed=self.seed, dtype=torch.float64)
        )

    # ---- clusters ------------------------------------------------------------------------

    @torch.no_grad()
    def assign(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        """The cluster of each query (B, H, L), or of each key (B, Hkv, S).

        Args:
            q: (B, H, L, D).
            k: (B, Hkv, S, D).
            mask: its key part (B, S).
        """
        if self.config.cluster == "keys":
            x, opened = k, open_tokens(mask.key, len(k), k.shape[2], k.device)
        else:
            x, opened = q, open_queries(mask, q, k.shape[2])
        clusters, length = self.config.clusters, x.shape[2]
        if clusters >= length:
            return torch.arange(length, device=x.device).expand(x.shape[:3])
        points = self._points(x, opened)
        first = of_rank(opened, strata(opened, clusters)).expand(-1, x.shape[1], -1)
        weight = opened[:, None].to(points.dtype).expand(points.shape[:3])
        filled = points.masked_fill(~opened[:, None, :, None], 0.0)
        centres = lloyd(
            filled, weight, take(points, first), self.config.iterations, signs=self.config.hamming
        )
        found = nearest(points, centres)
        if mask.key is None:
            return found
        # Rows with few open tokens: each is a cluster. Closed tokens go where an open one is.
        total = opened.sum(-1)[:, None, None]
        alone, rank = total <= clusters, opened.long().cumsum(-1) - 1
        found = torch.where(alone, rank[:, None], found)
        own = torch.minimum(torch.arange(clusters, device=x.device), total - 1)
        own = of_rank(opened, own).expand(-1, x.shape[1], -1)
        centres = torch.where(alone[..., None], take(points, own), centres)
        inside = opened[:, None].long().expand(found.shape)
        members = inside.new_zeros(centres.shape[:3]).scatter_add(-1, found.clamp_min(0), inside)
        return torch.where(opened[:, None], found, nearest(points, centres, members > 0))

    def _points(self, x: Tensor, opened: Tensor) -> Tensor:
        """What is clustered: vectors, or the signs ±1 of their projections."""
        x = x.to(sums_dtype(x.dtype))
        if self.config.centre or not self.config.hamming:
            # Distances do not change; their rounding does where the mean is large.
            closed = ~opened[:, None, :, None]
            total = opened.sum(-1).clamp_min(1).to(x.dtype)[:, None, None, None]
            x = x - x.masked_fill(closed, 0.0).sum(2, keepdim=True) / total
        if not self.config.hamming:
            return x
        planes = self.planes.to(x.dtype).transpose(-1, -2)  # (Hkv, D, bits)
        planes = planes.repeat_interleave(x.shape[1] // len(planes), 0)
        return ((x @ planes) >= 0).float() * 2.0 - 1.0

    @torch.no_grad()
    def shares(self, q: Tensor, k: Tensor, mask: Mask, scale: float, cluster: Tensor) -> Tensor:
        """w (B, Hkv, S): each key's share of its cluster; zero for masked keys.

        Args:
            q, k, mask: as in `assign`.
            scale: factor of the logits.
            cluster: (B, Hkv, S), as `assign` gives it.
        """
        batch, kv, keys = k.shape[:3]
        key = open_tokens(mask.key, batch, keys, k.device)
        dtype = sums_dtype(k.dtype)
        weight = key[:, None].to(dtype).expand(batch, kv, keys)
        if self.config.weights == "mass":
            cleared = k.masked_fill(~key[:, None, :, None], 0.0)
            mass = column_mass(q, cleared, Mask(key=mask.key), scale, LANDMARKS)
            # A cluster whose mass vanishes is averaged equally.
            tiny = torch.finfo(dtype).tiny ** 0.5
            weight = (mass + tiny) * weight
        count = min(self.config.clusters, keys)
        total = weight.new_zeros(batch, kv, count).scatter_add(-1, cluster, weight)
        own = total.gather(-1, cluster)
        return weight / torch.where(own == 0, torch.ones_like(own), own)

    # ---- attention -----------------------------------------------------------------------

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
        given = q.dtype
        dtype = sums_dtype(given)
        q, k, v = q.to(dtype), *clear(k.to(dtype), v.to(dtype), mask)
        if self.config.cluster == "keys":
            k, v, log_weight = self._summaries(q, k, v, mask, scale)
            return summary_attention(q, k, v, scale, log_weight=log_weight).to(given)
        cluster, centroids = self._centroids(q, k, mask)
        if self.config.exact_keys:
            out = _improved(q, k, v, mask.key, scale, cluster, centroids, self.config.exact_keys)
        else:
            out = take(_read(centroids, k, v, mask.key, scale), cluster)
        return out.to(given)

    def _partial(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Partial:
        dtype = sums_dtype(q.dtype)
        q, k, v = q.to(dtype), *clear(k.to(dtype), v.to(dtype), mask)
        if self.config.cluster == "keys":
            k, v, log_weight = self._summaries(q, k, v, mask, scale)
            return summary_partial(q, k, v, scale, log_weight=log_weight)
        cluster, centroids = self._centroids(q, k, mask)
        size = 8 * q.shape[0] * q.shape[1] * k.shape[2] * dtype.itemsize
        run = functools.partial(explicit, scale=scale, dtype=dtype)
        part = as_partial(over_queries(run, centroids, k, v, Mask(key=mask.key), size))
        log_scale, den = (t.gather(-1, cluster) for t in (part.log_scale, part.den))
        return Partial(take(part.num, cluster), den, log_scale)

    def _centroids(self, q: Tensor, k: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        """The cluster of each query (B, H, L), and the mean of each cluster (B, H, C, D)."""
        cluster = self.assign(q.detach(), k.detach(), mask)
        count = min(self.config.clusters, q.shape[2])
        if count == q.shape[2]:  # each query is a cluster of its own
            return cluster, q
        opened = open_queries(mask, q, k.shape[2])
        weight = opened[:, None].to(q.dtype).expand(cluster.shape)
        total = weight.new_zeros(*cluster.shape[:2], count).scatter_add(-1, cluster, weight)
        q = q.masked_fill(~opened[:, None, :, None], 0.0)  # NaN, Inf of padding
        return cluster, sums(q, cluster, count) / total.clamp_min(1)[..., None]

    def _summaries(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Summary keys, values (B, Hkv, C, ·) and their log-weights (B, Hkv, C)."""
        fixed = q.detach(), k.detach()
        cluster = self.assign(*fixed, mask)
        share = self.shares(*fixed, mask, scale, cluster)
        count = min(self.config.clusters, k.shape[2])
        k, v = (sums(share[..., None] * t, cluster, count) for t in (k, v))
        held = share > 0
        entropy = -share * torch.where(held, share, torch.ones_like(share)).log()
        zeros = share.new_zeros(*share.shape[:2], count)
        members = zeros.scatter_add(-1, cluster, held.to(share.dtype))
        log_weight = zeros.scatter_add(-1, cluster, entropy)
        return k, v, log_weight.masked_fill(members == 0, float("-inf"))


def _read(q: Tensor, k: Tensor, v: Tensor, key: Tensor | None, scale: float) -> Tensor:
    """Softmax attention of a few queries (B, H, C, D), (B, H, C, V); zeros without keys.

    k and v are cleared: a row without any open key reads all of them.
    """
    if not wide(q, v):
        opened = None if key is None else (key | ~key.any(-1, keepdim=True))[:, None, None]
        return fused(q, k, v, opened, scale=scale)
    run = functools.partial(masked, functools.partial(fused, scale=scale))
    size = q.shape[0] * q.shape[1] * k.shape[2] * q.element_size()
    return over_queries(run, q, k, v, Mask(key=key), size)[0]


# ---- improved clustered attention ---------------------------------------------------------


def _improved(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key: Tensor | None,
    scale: float,
    cluster: Tensor,
    centroids: Tensor,
    topk: int,
) -> Tensor:
    """Centroid attention with the mass of its top keys redistributed by exact logits."""
    best, index = _top_keys(centroids.detach(), k.detach(), key, scale, min(topk, k.shape[2]))
    present = best > float("-inf")  # (B, H, C, k)
    top = best[..., :1].masked_fill(~present[..., :1], 0.0)
    out, lse = _read_with_lse(centroids, k, v, key, scale, top)
    batch, heads, count, chosen = index.shape
    near_k, near_v = (
        take(t, index.flatten(2)).view(batch, heads, count, chosen, -1) for t in (k, v)
    )
    logits = scale * (near_k @ centroids[..., None])[..., 0]
    weights = torch.exp(logits - lse[..., None]).masked_fill(~present, 0.0)  # A^c on T
    rest = out - (weights[..., None, :] @ near_v)[..., 0, :]
    mass = weights.sum(-1, keepdim=True)

    slot, block, size = _blocks(cluster, count)
    total = block.shape[-1]
    rows = _place(q, slot, total * size).view(batch * heads * total, size, -1)
    own_k, own_v = (
        take(t.flatten(3), block).view(batch * heads * total, chosen, -1) for t in (near_k, near_v)
    )
    scores = scale * rows @ own_k.transpose(-1, -2)
    if key is not None:  # finite: a block without any key gives equal weights, times no mass
        there = take(present, block).view(batch * heads * total, 1, chosen)
        scores = scores.masked_fill(~there, torch.finfo(scores.dtype).min)
    near = (scores.softmax(-1) @ own_v).view(batch, heads, total * size, -1)
    return take(rest, cluster) + take(mass, cluster) * take(near, slot)


def _top_keys(
    q: Tensor, k: Tensor, key: Tensor | None, scale: float, count: int
) -> tuple[Tensor, Tensor]:
    """Largest logits of each row and their keys, (B, H, C, count), in decreasing order."""
    batch, heads, rows = q.shape[:3]
    kv, keys = k.shape[1:3]
    groups = heads // kv
    columns = k.transpose(-1, -2)[:, :, None]
    grouped = (q * scale).view(batch, kv, groups, rows, -1)
    closed = None if key is None else ~key[:, None, None, None]
    size = max(1, CHUNK_BYTES // (batch * heads * keys * q.element_size()))
    found = []
    for part in grouped.split(size, 3):
        logits = part @ columns
        if closed is not None:
            logits = logits.masked_fill(closed, float("-inf"))
        found.append(logits.topk(count, -1))
    best, index = (torch.cat([t[n] for t in found], 3).flatten(1, 2) for n in (0, 1))
    return best, index


def _read_with_lse(
    q: Tensor, k: Tensor, v: Tensor, key: Tensor | None, scale: float, top: Tensor
) -> tuple[Tensor, Tensor]:
    """`_read`, and the log-sum-exp of each row's logits (B, H, C), with gradients.

    One more key with the row's largest logit `top` (B, H, C, 1), held fixed, takes the weight
    p = e^top / (e^top + e^lse), found in a value column of its own: with n keys p lies in
    [1/(n+1), ½], so that lse = top + log((1 − p)/p) and 1 − p lose no digits.
    """
    q = torch.cat([q * scale, top], -1)
    k, v = F.pad(k, (0, 1, 0, 1)), F.pad(v, (0, 1, 0, 1))
    corner = torch.zeros_like(k[:, :, -1:]), torch.zeros_like(v[:, :, -1:])
    corner[0][..., -1], corner[1][..., -1] = 1.0, 1.0
    k, v = torch.cat([k[:, :, :-1], corner[0]], 2), torch.cat([v[:, :, :-1], corner[1]], 2)
    opened = None if key is None else F.pad(key, (0, 1), value=True)
    found = _read(q, k, v, opened, 1.0)
    out, share = found[..., :-1], found[..., -1]
    if key is not None:  # a row without any key: share = 1
        empty = ~key.any(-1)[:, None, None]
        out = out.masked_fill(empty[..., None], 0.0)
        share = share.masked_fill(empty, 0.5)
    rest = 1.0 - share
    return out / rest[..., None], top[..., 0] + torch.log(rest / share)


def _block_size(length: int, count: int) -> int:
    """Tokens of a block: half a cluster's share, so that padding adds at most L/2 places."""
    return min(128, max(1, length // (2 * count)))


def _blocks(cluster: Tensor, count: int) -> tuple[Tensor, Tensor, int]:
    """Places tokens in blocks of equal size that belong to one cluster each.

    Args:
        cluster: (B, H, L), below `count`.

    Returns:
        slot (B, H, L), each token's place among block·size ones; the cluster of each block
        (B, H, blocks); and the size of a block. Blocks that no cluster needs hold no token.
    """
    length = cluster.shape[-1]
    size = _block_size(length, count)
    total = -(-length // size) + count  # Σ_c ⌈n_c/size⌉ is below this
    ordered, order = cluster.sort(dim=-1, stable=True)
    members = torch.zeros(*cluster.shape[:-1], count, dtype=torch.int64, device=cluster.device)
    members = members.scatter_add(-1, cluster, torch.ones_like(cluster))
    blocks = (members + size - 1) // size
    ends = blocks.cumsum(-1)
    gap = (ends - blocks) * size - (members.cumsum(-1) - members)  # of a cluster's first place
    place = torch.arange(length, device=cluster.device) + gap.gather(-1, ordered)
    slot = torch.zeros_like(cluster).scatter(-1, order, place)
    numbers = torch.arange(total, device=cluster.device).expand(*cluster.shape[:-1], total)
    block = torch.searchsorted(ends, numbers.contiguous(), right=True)
    return slot, block.clamp_max(count - 1), size


def _place(x: Tensor, slot: Tensor, total: int) -> Tensor:
    """Rows of x (B, H, L, D) at their slots among `total`, zeros elsewhere."""
    batch, heads, _, dim = x.shape
    first = torch.arange(batch * heads, device=x.device).view(batch, heads, 1) * total
    rows = x.new_zeros(batch * heads * total, dim)
    return rows.index_copy(0, (first + slot).flatten(), x.flatten(0, 2)).view(
        batch, heads, total, dim
    )
