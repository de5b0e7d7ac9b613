"""Clusters of keys with counts, refined for each query: softmax over means, members and window.

    out_i = Σ_j w_ij v_j / Σ_j w_ij,   w_ij = exp(s_ij) for some keys j of each query i,
                                       w_ij = φ_{i,a_j} t_j for the others, a_j the cluster of j

Clusters are those of k-means in the metric of the queries, so that keys share a cluster when
queries weigh them alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.attention.base import Absent, Capabilities, Cost, Info, Mechanism, Support
from subquad.attention.exact.engine import clear, sums_dtype
from subquad.attention.masks import Mask
from subquad.attention.partial import EMPTY_LOG_SCALE, Partial
from subquad.attention.summary.kmeans import lloyd, nearest, sums
from subquad.attention.summary.mass import column_mass, open_queries, open_tokens, take
from subquad.attention.summary.refined import ABSENT, Tables, Window, read
from subquad.options import Config, integer_problem

__all__ = ["Beside", "KeyClusters", "KeyClustersConfig", "Selection"]

JITTER = 1e-4
"""Added to the queries' covariance before its Cholesky factor, relative to the mean diagonal."""

FLOOR = 1e-2
"""Weight of a key without any mass in the clustering; the mean key weighs 1 + FLOOR."""

GOLDEN = 0.6180339887498949
"""Multiples of it modulo 1 are spread evenly."""

BITS = 31

HEADS_BYTES = 8 * 2**20
"""Bytes of the keys of the heads that are read at once: what is made of them stays in cache."""


@dataclass(frozen=True, eq=False)
class Selection:
    """What a call chooses from its keys and holds fixed; N = B·Hkv heads as (B, Hkv).

    Args:
        cluster: (B, Hkv, S) int64, a of each key; 0 for keys in none.
        held: (B, Hkv, S) bool, keys that are in a cluster.
        base: (B, Hkv, M) β, the largest tilt in each cluster.
        mean: (B, Hkv, D) μ, mean of scale·q.
        metric: (B, Hkv, D, D) L, with LLᵀ the covariance of scale·q.
        whiten: (B, Hkv, D, D) its inverse, transposed.
        members: (B, Hkv, M, e) int64, positions of the keys of largest mass in each cluster, −1
            where there are fewer.
    """

    cluster: Tensor
    held: Tensor
    base: Tensor
    mean: Tensor
    metric: Tensor
    whiten: Tensor
    members: Tensor


@dataclass(frozen=True, eq=False)
class Beside:
    """What a call reads exactly beside the clusters.

    Args:
        window: keys on each side of a query's position, −1 for none: read exactly, or left to
            another part of a merge.
        exact: whether the window's keys are read, or only left out of the clusters.
        widths: (B,) the same for each row, at most `window`; None: `window` in all.
        closed: (B, 1 or Hkv, S) bool, keys that are neither in the window nor in a cluster.
        listed: (B, Hkv, g) positions of keys that all queries read, or None.
        there: (B, Hkv, g) bool, which of them exist.
        mass: (B, Hkv, S) attention from landmark queries, or None to compute it.
        clusters, members: less than the config's; or None.
        row_clusters, row_members: (B,) the same for each row, at most these; or None.
    """

    window: int = -1
    exact: bool = False
    widths: Tensor | None = None
    closed: Tensor | None = None
    listed: Tensor | None = None
    there: Tensor | None = None
    mass: Tensor | None = None
    clusters: int | None = None
    members: int | None = None
    row_clusters: Tensor | None = None
    row_members: Tensor | None = None

    def heads(self, part: slice) -> Beside:
        """Of some key/value heads only."""

        def cut(t: Tensor | None) -> Tensor | None:
            return t if t is None or t.shape[1] == 1 else t[:, part]

        return replace(
            self, closed=cut(self.closed), listed=cut(self.listed), there=cut(self.there),
            mass=cut(self.mass),
        )  # fmt: skip


@dataclass(frozen=True)
class KeyClustersConfig(Config):
    """Options of `KeyClusters`.

    Args:
        clusters: M, for each key/value head; a row with no more open keys has each as its own.
        refine: clusters of each query whose members are read exactly; 0 for none.
        members: e, keys of each refined cluster that are read exactly, those of most attention.
        landmarks: queries of each head from which the attention of keys is estimated.
        iterations: Lloyd iterations.
        sample: Lloyd's iterations run on sample·M keys where there are more.
    """

    mechanism: ClassVar[str] = "key_clusters"
    sizes: ClassVar[tuple[str, ...]] = ("clusters", "refine", "members")

    clusters: int = 128
    refine: int = 4
    members: int = 4
    landmarks: int = 64
    iterations: int = 2
    sample: int = 8

    def problems(self) -> Iterator[str]:
        for name in ("clusters", "landmarks", "sample"):
            yield from integer_problem(name, getattr(self, name), 1)
        for name in ("refine", "iterations"):
            yield from integer_problem(name, getattr(self, name), 0)
        yield from integer_problem("members", self.members, 1)

    @property
    def refined(self) -> int:
        """Keys that a query reads exactly."""
        return min(self.refine, self.clusters) * self.members


def _flops(length: int, head_dim: int, value_dim: int, config: KeyClustersConfig) -> float:
    choose = 2.0 * (config.landmarks + config.clusters + 2 * head_dim) * head_dim
    read = 2.0 * config.clusters * (2 * head_dim + value_dim)
    refined = 2.0 * config.refined * (head_dim + value_dim)
    lloyd_steps = 2.0 * config.iterations * config.clusters * head_dim
    return length * (choose + read + refined) + lloyd_steps * min(
        length, config.sample * config.clusters
    )


def _memory(length: int, head_dim: int, value_dim: int, config: KeyClustersConfig) -> float:
    # Keys and queries in the metric, sums of keys and values, the output with its normaliser.
    return 4.0 * length * (5 * head_dim + 3 * value_dim + 16)


class KeyClusters(Mechanism):
    """Attention to clusters of keys, refined by exact members; options: `KeyClustersConfig`.

        out_i = Σ_j w_ij v_j / Σ_j w_ij,   w_ij = e^{s_ij} for the refined keys of query i,
                                           w_ij = φ_{i,a_j} t_j otherwise,   s_ij = scale·q_i·k_j

    A cluster m stands for its keys by their mean and spread. With μ the mean of scale·q,

        t_j = exp(μ·k_j − β_m),   T_m = Σ_m t_j,   k̄_m = Σ_m t_j k_j / T_m,
        φ_im = exp(scale·q_i·k̄_m + β_m − μ·k̄_m)·(1 + min(h_im, 4)),   h_im = ½ Σ_d x_id² var_md

    the tilt t makes φ_im t_j exact for the mean query whatever the cluster; for others φ_im T_m
    without h is a lower bound of Σ_m e^{s_ij} by Jensen's inequality, and h its second-order term,
    from variances within the cluster in the coordinates x = L^-1(scale·q − μ), LLᵀ = Cov(scale·q).
    All weights are positive.

    Each query reads exactly `members` keys of the `refine` clusters with the largest φ_im: the
    keys of most attention in them, where their estimates φ_im t_j are taken out again.

    Clusters come from k-means of Lᵀk, where distances are differences of logits averaged over
    queries. Keys count by the attention that they get from `landmarks` queries, one from each of
    as many equal stretches; first centres and the sample on which Lloyd's iterations run are
    drawn in proportion to it (without replacement, Gumbel's trick with numbers that are spread
    evenly over the open keys by rank). Queries of a group share the clusters of their key/value
    head, and pool their moments.

    Masked keys, and queries at their positions where L = S, have no part in any of this: padding
    changes nothing wherever it stands. The selection, which keys share a cluster, μ, L, and which
    members are refined, passes no gradient; with it held fixed gradients are exact.

    Cost O(L·M·(2D + V) + L·refine·members·(D + V)) time, O(L·(D + V)) memory, in training too:
    weights exist for a few hundred queries at a time and are computed again in the backward pass.

    Papers: clusters with counts as in `clustered`; members by exact logits as the top keys of
    Vyas et al. 2020, arXiv 2007.04825, section 3.3, here of clusters of keys. Tilt, spread and
    metric are ours.

    Raises:
        OptionError: wrong options; all problems at once.
        UnsupportedError: a causal mask.

    Example:
        >>> import torch, subquad as sq
        >>> q, k, v = (torch.randn(1, 4, 300, 16, dtype=torch.float64) for _ in range(3))
        >>> exact = sq.attention(q, k, v, "softmax")
        >>> sq.attention(q, k, v, "key_clusters(clusters=20)").shape
        torch.Size([1, 4, 300, 16])
        >>> torch.allclose(sq.attention(q, k, v, "key_clusters(clusters=300)"), exact)
        True
    """

    name = "key_clusters"
    family = "summary"
    Config = KeyClustersConfig
    config: KeyClustersConfig
    offsets: Tensor
    info = Info(
        summary="clusters of keys with counts, and exact members of those that matter to a query",
        formula="out_i = Σ_j w_ij v_j / Σ_j w_ij,  w_ij = exp(s_ij) for the refined members of "
        "query i, otherwise φ_{i,a_j} t_j,  φ_im = exp(scale·q_i·k̄_m + β_m − μ·k̄_m)·(1 + h_im),  "
        "t_j = exp(μ·k_j − β_{a_j}),  k̄_m: t-weighted mean of cluster m,  h: its spread",
        cost=Cost("O(L·M·(2D+V) + L·r·e·(D+V))", _flops, _memory),
        paper="ours; refinement by exact logits as in Vyas et al. 2020, arXiv 2007.04825, "
        "section 3.3 (there of the top keys of clusters of queries)",
        limit="softmax with clusters ≥ S, or with refine ≥ clusters and members ≥ S",
        options={
            "clusters": "M, clusters of keys",
            "refine": "r, clusters of each query whose members are read exactly; 0 for none",
            "members": "e, keys of a refined cluster that are read exactly",
            "landmarks": "queries of each head from which the attention of keys is estimated",
            "iterations": "Lloyd iterations",
            "sample": "Lloyd's iterations run on sample·M keys where there are more",
        },
        deviations="Vyas et al. cluster queries; clusters of keys, the tilt, the spread and the "
        "metric are not in the paper",
        sample="key_clusters(clusters=8, refine=2, members=2)",
        use="the far field of a trained encoder: near_far has it by default.",
    )

    def __init__(
        self,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **sizes: Any,
    ) -> None:
        super().__init__(device=device, dtype=dtype, **sizes)
        # Integers, so that no cast to another dtype changes them.
        empty = torch.zeros(self.num_kv_heads, dtype=torch.int64, device=device)
        self.register_buffer("offsets", empty)
        self.reset_parameters()

    @classmethod
    def capabilities_for(cls, config: KeyClustersConfig) -> Capabilities:
        future = "a cluster's mean looks at all keys: it would leak the future"
        return Capabilities(
            causal=Absent(future),
            prefix=Absent(future),
            segments=Absent("one set of clusters serves one sequence; call once for each segment"),
            window=Absent("clusters stand for keys everywhere; a window is sparse attention"),
            state=Absent(future),
            partial=True,
            merges=Absent("each call has clusters of its own open keys"),
            exact_gradient=Absent(
                "clusters, tilt, metric and refined members are held fixed: gradients are those "
                "of the sums over the selection"
            ),
            compile=Absent("queries are read chunk by chunk, in a Python loop"),
            approximates="softmax",
        )

    @classmethod
    def outside_for(cls, config: Any) -> Support:
        """Leaves windows out by itself."""
        return True

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws where each head's evenly spread numbers start, by the seed."""
        if self.offsets.is_meta:
            return
        generator = torch.Generator().manual_seed(self.seed % 2**63)
        self.offsets.copy_(torch.randint(2**BITS, self.offsets.shape, generator=generator))

    # ---- what is held fixed --------------------------------------------------------------

    @torch.no_grad()
    def mass(
        self, q: Tensor, k: Tensor, mask: Mask, scale: float, window: int | Tensor = -1
    ) -> Tensor:
        """Attention that keys get from landmark queries, (B, Hkv, S); see `column_mass`."""
        return column_mass(q, k, mask, scale, self.config.landmarks, window=window)

    @torch.no_grad()
    def select(
        self,
        q: Tensor,
        k: Tensor,
        mask: Mask,
        scale: float,
        beside: Beside | None = None,
        part: slice = slice(None),
    ) -> Selection:
        """Clusters and members of a call.

        Args:
            q: (B, H, L, D).
            k: (B, Hkv, S, D), zero at masked keys.
            mask: its key part (B, S).
            scale: factor of the logits.
            beside: what other parts read.
            part: which of the mechanism's key/value heads these are.
        """
        beside = beside or Beside()
        q, k = (t.detach().to(sums_dtype(t.dtype)) for t in (q, k))
        (batch, kv, keys), config = k.shape[:3], self.config
        opened = open_tokens(mask.key, batch, keys, k.device)
        held = opened[:, None].expand(batch, kv, keys)
        if beside.closed is not None:
            held = held & ~beside.closed
        mass = beside.mass
        if mass is None:
            window = beside.window if beside.widths is None else beside.widths
            mass = self.mass(q, k, Mask(key=mask.key), scale, window)
        mean, metric, whiten = _metric(q, k, mask, scale)
        points = k @ metric
        centre = _weighted_mean(points, held)
        points = points.sub_(centre)
        count = min(config.clusters, keys, beside.clusters or keys)
        cluster = self._cluster(points, mass, held, opened, count, beside.row_clusters, part)
        tilt = (k @ mean[..., None])[..., 0]
        base = tilt.new_full((batch, kv, count), float("-inf"))
        base = base.scatter_reduce(-1, cluster, tilt.masked_fill(~held, float("-inf")), "amax")
        each = config.members if beside.members is None else min(config.members, beside.members)
        members = cluster.new_empty(batch, kv, count, 0)
        if config.refine and each:
            members = _members(cluster, held, mass, count, min(each, keys))
        if beside.row_members is not None:
            rank = torch.arange(members.shape[-1], device=k.device)
            members = members.masked_fill(rank >= beside.row_members[:, None, None, None], -1)
        base = base.masked_fill(base == float("-inf"), 0.0)
        return Selection(cluster, held, base, mean, metric, whiten, members)

    def _cluster(
        self,
        points: Tensor,
        mass: Tensor,
        held: Tensor,
        opened: Tensor,
        count: int,
        limit: Tensor | None,
        part: slice,
    ) -> Tensor:
        """The cluster of each key (B, Hkv, S), 0 where it is in none."""
        config, keys = self.config, points.shape[2]
        total = held.sum(-1)  # (B, Hkv)
        most = torch.full_like(total, count)
        if limit is not None:
            most = torch.minimum(most, limit[:, None])
        share = mass.masked_fill(~held, 0.0)
        average = share.sum(-1, keepdim=True) / total[..., None].clamp_min(1)
        weight = share / torch.where(average > 0, average, torch.ones_like(average)) + FLOOR
        rank = opened.long().cumsum(-1)
        start = (self.offsets[part].double() + 0.5) / 2.0**BITS
        even = ((rank[:, None] * GOLDEN + start[:, None]) % 1.0).to(weight.dtype)
        even = even.clamp(1e-6, 1.0 - 1e-6)
        score = weight.log() - (-even.log()).log()
        size = min(keys, config.sample * count)
        order = score.masked_fill(~held, float("-inf")).topk(size, -1).indices
        place = torch.arange(size, device=points.device)
        drawn = place < torch.minimum(total, config.sample * most)[..., None]
        sampled = (total > config.sample * most)[..., None]  # drawn by weight: all weigh the same
        sample_weight = weight.gather(-1, order).masked_fill(sampled, 1.0) * drawn
        sample = take(points, order)
        slot = torch.arange(count, device=points.device)
        usable = slot < torch.minimum(total, most).clamp_min(1)[..., None]
        centres = lloyd(
            sample, sample_weight, sample[:, :, :count], config.iterations, usable=usable
        )
        found = nearest(points, centres, usable)
        # As many clusters as keys: each is its own.
        alone = (total <= most)[..., None]
        own = torch.zeros_like(found).scatter(-1, order[..., :count], slot.expand(*usable.shape))
        return torch.where(alone, own, found).masked_fill(~held, 0)

    # ---- attention -----------------------------------------------------------------------

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
        return self.joined(q, k, v, mask, scale, Beside()).output().to(q.dtype)

    def _partial(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Partial:
        return self.joined(q, k, v, mask, scale, Beside())

    def _outside(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        scale: Any,
        window: int,
        closed: Tensor | None = None,
    ) -> list[Partial]:
        return self.outside(q, k, v, mask, scale, Beside(window=window, closed=closed))

    def outside(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, beside: Beside
    ) -> list[Partial]:
        """Sums over the clusters without what other parts read, never negative."""
        part = self.joined(q, k, v, mask, scale, beside)
        # What is left after subtraction may be rounding alone.
        empty = part.den <= 0
        return [
            Partial(
                part.num.masked_fill(empty[..., None], 0.0),
                part.den.masked_fill(empty, 0.0),
                part.log_scale.masked_fill(empty, EMPTY_LOG_SCALE),
            )
        ]

    def joined(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, beside: Beside
    ) -> Partial:
        """Sums over clusters, and over the window and listed keys where `beside` has them."""
        kv, groups = k.shape[1], q.shape[1] // k.shape[1]
        step = max(1, HEADS_BYTES // (k[:, 0].numel() * k.element_size()))
        parts = []
        for part in (slice(head, min(kv, head + step)) for head in range(0, kv, step)):
            served = slice(part.start * groups, part.stop * groups)
            some = (q[:, served], k[:, part], v[:, part])
            parts.append(self._joined(*some, mask, scale, beside.heads(part), part))
        if len(parts) == 1:
            return parts[0]
        num, den, log_scale = (
            torch.cat([getattr(part, name) for part in parts], 1)
            for name in ("num", "den", "log_scale")
        )
        return Partial(num, den, log_scale)

    def _joined(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        scale: float,
        beside: Beside,
        part: slice,
    ) -> Partial:
        """`joined` of some key/value heads."""
        dtype = sums_dtype(q.dtype)
        q, k, v = q.to(dtype), *clear(k.to(dtype), v.to(dtype), mask)
        chosen = self.select(q, k, mask, scale, beside, part)
        batch, kv, keys = k.shape[:3]
        heads, count = batch * kv, chosen.base.shape[-1]

        held = chosen.held.to(dtype)
        cluster = chosen.cluster
        tilt = (k @ chosen.mean[..., None])[..., 0]
        tilt = (tilt - chosen.base.gather(-1, cluster)).masked_fill(~chosen.held, 0.0)
        weight = torch.exp(tilt.clamp_min(-60.0)) * held
        total = weight.new_zeros(batch, kv, count).scatter_add(-1, cluster, weight)[..., None]
        present = total > 0
        whole = torch.where(present, total, torch.ones_like(total))
        means = sums(k, cluster, count, weight) / whole
        apart = (k - take(means, cluster)) @ chosen.metric
        squares = apart.square() if apart.requires_grad else apart.square_()
        spread = sums(squares, cluster, count, weight) / whole
        values = torch.cat([sums(v, cluster, count, weight), total], -1)
        bias = chosen.base[..., None] - means @ chosen.mean[..., None]
        columns = torch.cat([means, bias.masked_fill(~present, ABSENT)], -1)
        shift = chosen.whiten.transpose(-1, -2) @ -chosen.mean[..., None]
        whiten = torch.cat([chosen.whiten, shift.transpose(-1, -2)], -2)

        opened = open_tokens(mask.key, batch, keys, k.device)[:, None].expand(batch, kv, keys)
        if beside.closed is not None:
            opened = opened & ~beside.closed
        if beside.listed is not None:
            assert beside.there is not None
            listed = F.pad(take(k, beside.listed), (0, 1))
            there = beside.there[..., None].to(dtype)
            listed_v = torch.cat([take(v, beside.listed) * there, there], -1)
            listed[..., -1] = listed[..., -1].masked_fill(~beside.there, ABSENT)
            columns, values = torch.cat([columns, listed], 2), torch.cat([values, listed_v], 2)
        members = member_values = place = None
        if self.config.refine and chosen.members.shape[-1]:
            place = chosen.members.flatten(0, 1)
            rows = _member_rows(k, v, weight, chosen.members)
            members, member_values = (t.flatten(0, 1) for t in rows)
        tables = Tables(
            columns.flatten(0, 1), values.flatten(0, 1), spread.flatten(0, 1),
            whiten.flatten(0, 1), members, member_values, place, min(self.config.refine, count),
        )  # fmt: skip
        window = None
        if beside.window >= 0:
            width = min(beside.window, max(keys, q.shape[2]))
            window = Window(k, v, opened, weight, cluster, width, beside.widths, beside.exact)
        assert heads == len(tables.keys)
        return read(q, tables, window, scale, keys - q.shape[2])


def _member_rows(k: Tensor, v: Tensor, weight: Tensor, members: Tensor) -> tuple[Tensor, Tensor]:
    """[k | bias | t] and [v | 1] (B, Hkv, M, e, ·) of each member; absent ones weigh nothing."""
    at, missing = members.clamp_min(0).flatten(2), (members < 0).flatten(2)[..., None]
    keys, values, tilt = (take(t, at).masked_fill(missing, 0.0) for t in (k, v, weight[..., None]))
    there = (~missing).to(keys.dtype)
    rows = torch.cat([keys, ABSENT * missing.to(keys.dtype), tilt], -1)
    summed = torch.cat([values, there], -1)
    return rows.view(*members.shape, -1), summed.view(*members.shape, -1)


def _weighted_mean(x: Tensor, opened: Tensor) -> Tensor:
    """Mean over the open rows of x (B, h, N, D), (B, h, 1, D)."""
    weight = opened[:, :, None].to(x.dtype)
    return (weight @ x) / weight.sum(-1, keepdim=True).clamp_min(1.0)


def _metric(q: Tensor, k: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Mean μ (B, Hkv, D) of scale·q, L with LLᵀ their covariance, and L^-ᵀ (B, Hkv, D, D)."""
    kv, keys = k.shape[1:3]
    x = q.unflatten(1, (kv, -1)).flatten(2, 3)
    opened = open_queries(mask, q, keys)[:, None].repeat(1, kv, q.shape[1] // kv)
    if mask.key is not None:
        x = x.masked_fill(~opened[..., None], 0.0)
    mean = _weighted_mean(x, opened)
    apart = x - mean
    if mask.key is not None:
        apart = apart.mul_(opened[..., None])
    total = opened.sum(-1).clamp_min(1).double()[..., None, None]
    cov = (apart.transpose(-1, -2) @ apart).double() * (scale**2 / total)
    level = cov.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    # Queries that are all the same leave any metric free.
    level = torch.where(level > 0, JITTER * level, torch.ones_like(level))
    eye = torch.eye(cov.shape[-1], dtype=cov.dtype, device=cov.device)
    factor, failed = torch.linalg.cholesky_ex(cov + level * eye)
    # Queries that are not finite make outputs that are not, as in exact attention, and no error.
    factor = factor.masked_fill((failed > 0)[..., None, None], float("nan"))
    inverse = torch.linalg.solve_triangular(factor, eye.expand_as(factor), upper=False)
    return scale * mean[:, :, 0], factor.to(x.dtype), inverse.transpose(-1, -2).to(x.dtype)


def _members(cluster: Tensor, held: Tensor, mass: Tensor, count: int, each: int) -> Tensor:
    """Positions (B, Hkv, count, each) of the keys of largest mass in each cluster, or −1."""
    cluster = cluster.masked_fill(~held, count)
    most = mass.amax(-1, keepdim=True).double()
    share = mass.double() / torch.where(most > 0, most, torch.ones_like(most))
    order = (cluster - 0.999 * share).argsort(dim=-1, stable=True)
    size = torch.zeros(*cluster.shape[:2], count + 1, dtype=torch.int64, device=cluster.device)
    size = size.scatter_add(-1, cluster, torch.ones_like(cluster))[..., :count]
    first = size.cumsum(-1) - size
    rank = torch.arange(each, device=cluster.device)
    at = (first[..., None] + rank).clamp_max(cluster.shape[-1] - 1)
    found = order.gather(-1, at.flatten(2)).view(at.shape)
    return found.masked_fill(rank >= size[..., None], -1)
