"""Routing attention: online k-means decides which tokens read each other.

    out_i = Σ_j m_ij exp(s_ij) v_j / Σ_j m_ij exp(s_ij),   s_ij = scale·LN(q_i)·LN(k_j)

Every key/value head has centroids μ_1 … μ_C on the unit sphere. Queries and keys are compared
with them, and m_ij counts the clusters in which query i reads key j. Two kinds of membership:

*balanced*, the paper's: a centroid takes the w queries and the w keys that are nearest to it. All
groups are of one size, and tokens may be in several or in none. Which tokens a centroid takes
depends on all tokens, later ones too: it leaks the future.

*nearest*: a token is in the cluster of its nearest centroid, and reads that cluster's keys near
its own position (`subquad.attention.sparse.buckets`). This depends on the past alone.

The centroids follow the data while the module is in training, by an exponential moving average.
Roy, Saffar, Vaswani, Grangier 2020, arXiv 2003.05997, section 4.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from subquad.attention.base import (
    Absent,
    Capabilities,
    Cost,
    Info,
    Mechanism,
    State,
    Support,
    looking,
)
from subquad.attention.exact.engine import clear, sums_dtype
from subquad.attention.masks import Mask
from subquad.attention.sparse.buckets import BucketState, bucket_groups, cut, refuse_vmap
from subquad.attention.summary.kmeans import nearest, sums
from subquad.attention.summary.mass import open_queries, open_tokens, take
from subquad.errors import CalibrationError, OptionError, ShapeError, UnsupportedError
from subquad.features.draws import draw_projection
from subquad.features.landmarks import kmeans_anchors
from subquad.features.sphere import unit
from subquad.kernels.block import EMPTY
from subquad.kernels.grouped import grouped_softmax, of_tokens
from subquad.options import Config, choice_problem, flag_problem, integer_problem, number_problem

__all__ = ["Routing", "RoutingConfig"]

OWN_LOGIT = -5e4
"""Added to the logit of a token with itself, so that it reads all others first; the value of
routing-transformer. Larger than any logit, and where a token reads nothing else it cancels."""


@dataclass(frozen=True)
class RoutingConfig(Config):
    """Options of `Routing`.

    Args:
        clusters: C, centroids of each key/value head.
        window: w, tokens of a group: members of a cluster if balanced, else a chunk of its tokens.
        membership: "balanced", "nearest", or "auto": balanced unless the call is causal.
        neighbours: chunks of its cluster that a token reads before its own, and after it in
            bidirectional calls, where membership is nearest.
        shared: keys are the queries; k is not looked at.
        own: whether a token reads itself: "read", "last" (only where it has nothing else to
            read), or "auto": last if shared.
        norm: vectors are made of length √D: "layer" (their mean subtracted first, as the paper
            does) or "rms".
        normalise: which of them enter the logits so: "both" (the paper), "keys" or "none"
            (softmax attention among the chosen keys). Clusters are always those of directions.
        merge: outputs of the clusters of a token: "lse" (each counts with its normaliser) or
            "mean", where membership is balanced.
        rest: tokens in no cluster, where membership is balanced: "nearest" (they read the
            members of the nearest cluster) or "zeros".
        decay: of the moving average in training; 1 holds the centroids fixed.
        start: centroids are directions drawn from the seed ("draw") or come from data ("data"),
            by `calibrate` or from the first training call, all of its tokens: that one call's
            choices know of later ones.
        commitment: factor of the loss that `Routing.penalty` returns.
    """

    mechanism: ClassVar[str] = "routing"
    sizes: ClassVar[tuple[str, ...]] = ("clusters", "window")

    clusters: int = 32
    window: int = 128
    membership: str = "auto"
    neighbours: int = 1
    shared: bool = False
    own: str = "auto"
    norm: str = "layer"
    normalise: str = "both"
    merge: str = "lse"
    rest: str = "nearest"
    decay: float = 0.999
    start: str = "draw"
    commitment: float = 0.0

    def problems(self) -> Iterator[str]:
        yield from integer_problem("clusters", self.clusters, 1)
        yield from integer_problem("window", self.window, 1)
        yield from choice_problem("membership", self.membership, ("auto", "balanced", "nearest"))
        yield from integer_problem("neighbours", self.neighbours, 0)
        yield from flag_problem("shared", self.shared)
        yield from choice_problem("own", self.own, ("auto", "read", "last"))
        yield from choice_problem("norm", self.norm, ("layer", "rms"))
        yield from choice_problem("normalise", self.normalise, ("both", "keys", "none"))
        yield from choice_problem("merge", self.merge, ("lse", "mean"))
        yield from choice_problem("rest", self.rest, ("nearest", "zeros"))
        yield from number_problem("decay", self.decay, 0.0, 1.0)
        yield from choice_problem("start", self.start, ("draw", "data"))
        yield from number_problem("commitment", self.commitment, 0.0)
        elsewhere = {"balanced": ("neighbours",), "nearest": ("merge", "rest")}
        for kind, names in elsewhere.items():
            for name in names if self.membership == kind else ():
                value = getattr(self, name)
                if value != getattr(type(self), name):
                    yield f"{name}={value} has no meaning with membership={kind}"

    def balanced(self, causal: bool) -> bool:
        """Whether a call takes the w nearest tokens of each centroid."""
        return self.membership == "balanced" or (self.membership == "auto" and not causal)

    @property
    def own_last(self) -> bool:
        """Whether a token reads itself only where it has nothing else to read."""
        return self.own == "last" or (self.own == "auto" and self.shared)

    @property
    def held(self) -> int:
        """Keys of each cluster that a stream has to keep."""
        return self.window * (self.neighbours + 1)


def _flops(length: int, head_dim: int, value_dim: int, config: RoutingConfig) -> float:
    compare = 2.0 * length * config.clusters * head_dim * (1 if config.shared else 2)
    if not config.balanced(causal=False):
        read = float(min(length, config.window * (1 + 2 * config.neighbours)) * length)
    else:
        taken = min(config.window, length)
        groups = 1 if taken == length else config.clusters
        outside = max(0, length - groups * taken) if config.rest == "nearest" else 0
        read = float((groups * taken + outside) * taken)
    return compare + 2.0 * read * (head_dim + value_dim)


def _memory(length: int, head_dim: int, value_dim: int, config: RoutingConfig) -> float:
    # Normalised q and k and their means, similarities to the centroids, outputs of the groups
    # before and after they are merged; lists of positions, of 8 bytes each.
    taken = config.clusters * min(config.window, length) if config.balanced(False) else 0
    rows = length * (4 * head_dim + 2 * config.clusters + value_dim)
    return 4.0 * (rows + 2 * (taken + length) * (value_dim + 4))


class _Call:
    """A training call whose backward pass may still come, alive as long as its graph is."""

    def __init__(self) -> None:
        self.done = False

    def finish(self, _: Tensor) -> None:
        """The hook of the output's gradient."""
        self.done = True


def _awaited(reference: weakref.ref[_Call]) -> bool:
    call = reference()
    return call is not None and not call.done


class Routing(Mechanism):
    """Routing attention by online k-means; options in `RoutingConfig`.

        out_i = Σ_j m_ij exp(s_ij) v_j / Σ_j m_ij exp(s_ij)

    with s_ij = scale·LN(q_i)·LN(k_j), LN a layer normalisation without weights: vectors of
    length √D. Directions x = LN(q)/√D and y = LN(k)/√D are compared with the unit centroids μ_c
    of their key/value head. m_ij is the number of clusters c in which i reads j:

    ``membership=balanced``: i is one of the w open queries, j one of the w open keys, with the
    largest x_i·μ_c and y_j·μ_c. A query that no cluster took reads the keys of the cluster of
    largest x_i·μ_c (``rest=nearest``), or nothing (``rest=zeros``, as published code has it). With
    ``merge=mean``, out_i is the mean of softmax attention in its clusters instead. Published code
    and the paper use this for causal attention as well; there the choice of members looks at
    later tokens, and it is refused here.

    ``membership=nearest``: every query and key is in the one cluster of largest x·μ_c. Keys of a
    cluster, in order of position, are cut into chunks of w. A query reads the chunk of the last
    key of its cluster up to its own position, and `neighbours` chunks before it: between
    neighbours·w + 1 and (neighbours + 1)·w keys in a causal call, if there are as many. A
    bidirectional call reads as many chunks after it too. A query whose cluster has no key yet
    gives zeros. Decoding keeps the last (neighbours + 1)·w keys and values of every cluster.

    ``shared=true`` has the paper's causal form with one vector for query and key: k's content is
    not looked at. A token then reads itself only where there is nothing else (``own=last``).

    Masked keys, and the queries at their positions where L = S, are counted in no cluster, no
    rank and no average: padding changes nothing wherever it stands.

    In training mode each call counts once, with all its open tokens: the next training call
    starts by moving every centroid that got tokens,

        μ_c ← unit(decay·μ_c + (1 − decay)·unit(Σ_{i ∈ c} x_i + Σ_{j ∈ c} y_j)),

    c the nearest centroid of a token; `update` does it at once. Calls whose backward pass is
    still to come are waited for, so that what activation checkpointing computes again is what
    was computed before, and computing again does not count. (With checkpoint(use_reentrant=True),
    which computes without a graph, that needs backward passes that follow their call.)
    Centroids and pending sums are buffers, never in half precision; DistributedDataParallel sends
    those of its first process to all. Evaluation, `prefill`, `step` and `weights` change nothing.

    Choices are held fixed in the backward pass; away from ties the gradients are exact.

    Cost O(L·C·D + L·w·(D+V)) time; O(L·(C + D + V)) memory, forward and backward.

    Deviations from the paper: a causal call has the strictly causal membership; centroids are
    put back on the sphere after each update, and move towards the mean direction instead of the
    sum of their tokens (as in published code); a token in several clusters has one normaliser
    over all it reads; tokens in no cluster read the nearest one.

    Paper: Roy, Saffar, Vaswani, Grangier 2020, Efficient Content-Based Sparse Attention with
    Routing Transformers, arXiv 2003.05997, section 4 and algorithm 1.

    Raises:
        OptionError: wrong options, all problems at once; norm=layer with D = 1.
        CalibrationError: start=data in evaluation before `calibrate` or a training call.

    Example:
        The paper mixes local heads with routing heads:

        >>> import torch, subquad as sq
        >>> q, k, v = (torch.randn(1, 4, 1000, 16) for _ in range(3))
        >>> spec = "mixed(local(window=64)*2, routing(clusters=8, window=64)*2)"
        >>> mech = sq.build(spec, head_dim=16, num_heads=4).eval()
        >>> whole = mech(q, k, v, causal=True)
        >>> out, state = mech.prefill(*(t[:, :, :900] for t in (q, k, v)))
        >>> rest, state = mech.step(*(t[:, :, 900:] for t in (q, k, v)), state)
        >>> torch.allclose(torch.cat([out, rest], 2), whole, atol=1e-5)
        True
    """

    name = "routing"
    family = "sparse"
    state_type = BucketState
    Config = RoutingConfig
    config: RoutingConfig
    centroids: Tensor
    pending: Tensor
    placed: Tensor
    info = Info(
        summary="softmax attention among tokens of a cluster, by online k-means",
        formula="out_i = Σ_j m_ij exp(s_ij) v_j / Σ_j m_ij exp(s_ij),  "
        "s_ij = scale·LN(q_i)·LN(k_j), m_ij the number of clusters in which i reads j",
        cost=Cost("O(L·C·D + L·w·(D+V))", _flops, _memory),
        paper="Roy et al. 2020, Efficient Content-Based Sparse Attention with Routing "
        "Transformers, arXiv 2003.05997, section 4",
        limit="softmax of normalised q and k, of q and k themselves with normalise=none: balanced "
        "with window ≥ L and S, nearest with one cluster besides",
        options={
            "clusters": "C, centroids of each key/value head",
            "window": "w, members of a cluster (balanced) or tokens of a chunk (nearest)",
            "membership": "balanced (w nearest tokens of each centroid), nearest (each token in "
            "its nearest cluster), auto: balanced unless causal",
            "neighbours": "nearest: chunks read before the own one, and after it if bidirectional",
            "shared": "keys are the queries; k is not looked at",
            "own": "a token reads itself: read, last (where it has nothing else), auto: last if "
            "shared",
            "norm": "how vectors get the length √D: layer or rms",
            "normalise": "what enters the logits normalised: both, keys, none",
            "merge": "balanced: clusters of a token by lse (one normaliser) or mean",
            "rest": "balanced: tokens in no cluster read the nearest one, or give zeros",
            "decay": "of the centroids' moving average in training; 1 holds them fixed",
            "start": "centroids drawn by the seed (draw), or by calibrate() or the first training "
            "call (data)",
            "commitment": "factor of the loss that pulls tokens to their centroids, see penalty()",
        },
        deviations="causal calls have a strictly causal membership (the paper's looks at later "
        "tokens); centroids stay on the sphere and follow mean directions; clusters of a token "
        "share one normaliser; tokens in no cluster read the nearest one",
        sample="routing(clusters=4, window=12)",
        use="long sequences whose content decides what belongs together, trained with it, in half "
        "of the heads beside local ones. In a trained model normalise=none, start=data.",
    )

    def __init__(
        self,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **sizes: Any,
    ) -> None:
        super().__init__(device=device, dtype=dtype, **sizes)
        if self.config.norm == "layer" and self.head_dim == 1:
            raise OptionError("routing: norm=layer leaves nothing of head_dim=1; use norm=rms")
        kind = sums_dtype(dtype or torch.get_default_dtype())
        shape = (self.num_kv_heads, self.config.clusters, self.head_dim)
        self.register_buffer("centroids", torch.zeros(shape, device=device, dtype=kind))
        self.register_buffer("pending", torch.zeros(shape, device=device, dtype=kind))
        self.register_buffer("placed", torch.zeros((), device=device, dtype=torch.bool))
        self._calls: list[weakref.ref[_Call]] = []
        self._loss: Tensor | None = None
        self.reset_parameters()

    @classmethod
    def capabilities_for(cls, config: RoutingConfig) -> Capabilities:
        causal: Support = True
        state: Any = "constant"
        cross: Support = True
        gqa: Support = True
        functional: Support = True
        if config.membership == "balanced":
            causal = state = Absent(
                "a centroid chooses among all tokens of the call, which leaks the future; use "
                "membership=nearest"
            )
        if config.shared:
            cross = Absent("shared=true: keys are the queries")
            gqa = Absent("shared=true: every query head brings its own keys")
        if config.start == "data":
            functional = Absent("its centroids come from data: build it and call calibrate()")
        return Capabilities(
            causal=causal,
            prefix=Absent("a call is routed causally or not, all of it"),
            segments=Absent("one set of clusters serves one sequence; call once for each segment"),
            window=Absent("content, not distance, says what is read; mix it with local heads"),
            cross=cross,
            gqa=gqa,
            state=state,
            read=Absent("the state holds the last keys of each cluster alone"),
            partial=Absent("which keys a query reads depends on the call's other keys"),
            merges=Absent("each call groups its own open tokens"),
            approximates="softmax" if config.normalise == "none" and not config.shared else None,
            compile=Absent("the number of groups depends on the data"),
            functional=functional,
            reach="the last tokens of the own cluster; attention comes back to a token by content",
        )

    def reached(self, t: int, length: int) -> Iterable[int]:
        return ()

    # ---- centroids -----------------------------------------------------------------------

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws centroids, uniform on the sphere, from the seed; forgets all statistics."""
        if self.centroids.is_meta:
            return
        heads, count, dim = self.centroids.shape
        drawn = draw_projection(
            count, dim, heads=heads, draw="iid", seed=self.seed, dtype=torch.float64
        )
        self.centroids.copy_(self._direction(drawn))
        self.pending.zero_()
        self.placed.fill_(self.config.start == "draw")
        self._calls = []
        self._loss = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Routing:
        """Half precision would swallow the steps of a moving average: dtypes of ≥ 32 bits only."""
        kept = self.centroids, self.pending
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's
        if self.centroids.dtype != sums_dtype(self.centroids.dtype):
            device = self.centroids.device
            self.centroids, self.pending = (t.to(device, sums_dtype(t.dtype)) for t in kept)
        return self

    def __getstate__(self) -> dict[str, Any]:
        # A copy has no part in the graphs of the original.
        return {**self.__dict__, "_loss": None, "_calls": []}

    @classmethod
    def calibrates_for(cls, config: RoutingConfig) -> bool:
        return config.start == "data"

    @torch.no_grad()
    def calibrate(
        self,
        q: Tensor,
        k: Tensor,
        *,
        key_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> None:
        """Places the centroids by k-means of queries (..., H, L, D) and keys (..., Hkv, S, D).

        Each key/value head has its own. Masked keys do not count, nor the queries at their
        positions where L = S. `scale` plays no part.

        Raises:
            OptionError: if start is not data; if a head has fewer open tokens than clusters.
        """
        if self.config.start != "data":
            raise OptionError("routing: calibrate needs start=data")
        mask = Mask.of(key_mask=key_mask)
        q, k, _, mask, _ = self._check(q, k, k.new_zeros(*k.shape[:-1], self.value_dim or 1), mask)
        self._place(self._tokens(*self._directions(q, k, mask), mask))

    @torch.no_grad()
    def _place(self, tokens: list[tuple[Tensor, Tensor]]) -> None:
        """k-means++ and Lloyd's iterations of all open directions."""
        for head in range(self.num_kv_heads):
            rows = torch.cat([x[:, head][opened] for x, opened in tokens])
            if len(rows) < self.config.clusters:
                raise OptionError(
                    f"routing: start=data needs at least clusters={self.config.clusters} open "
                    f"tokens, given {len(rows)}"
                )
            source = torch.Generator().manual_seed(self.seed % 2**63 + head)
            found = kmeans_anchors(rows, self.config.clusters, generator=source)
            self.centroids[head].copy_(unit(found))
        self.placed.fill_(True)

    def _tokens(self, x: Tensor, y: Tensor, mask: Mask) -> list[tuple[Tensor, Tensor]]:
        """Directions (B, Hkv, n, D) that share centroids, and whether they count (B, n)."""
        per = self.num_heads // self.num_kv_heads
        counted = open_queries(mask, x, y.shape[2]).repeat(1, per)
        tokens = [(x.reshape(len(x), self.num_kv_heads, -1, x.shape[-1]), counted)]
        if not self.config.shared:
            tokens.append((y, open_tokens(mask.key, len(y), y.shape[2], y.device)))
        return tokens

    @torch.no_grad()
    def update(self) -> None:
        """Moves the centroids by what training calls have gathered since the last time.

        One that got no token keeps its place, nor does it follow sums that are not finite: a step
        that overflowed is skipped by its optimizer too.
        """
        moved = self.config.decay * self.centroids + (1 - self.config.decay) * unit(self.pending)
        got = (self.pending.any(-1) & self.pending.isfinite().all(-1))[..., None]
        self.centroids.copy_(torch.where(got, unit(moved), self.centroids))
        self.pending.zero_()

    def weights(self, *args: Any, **options: Any) -> Tensor:
        """As `Mechanism.weights`; looking does not count as a training call."""
        with looking(self):
            return super().weights(*args, **options)

    def penalty(self) -> Tensor:
        """commitment·mean |x_i − μ_c(i)|²/D over the open tokens of the last training call.

        The loss of routing-transformer: it pulls queries and keys towards their centroids, which
        are held fixed in it. Zero without `commitment` or before a training call. A training call
        within checkpoint(use_reentrant=True) is refused, for its loss would have no gradient.
        """
        return self.centroids.new_zeros(()) if self._loss is None else self._loss

    def _count(self, tokens: list[tuple[Tensor, Tensor]], first: bool) -> None:
        """A training call: its sums by cluster, the `first` time it is computed, and its loss."""
        far, total = self.centroids.new_zeros(()), self.centroids.new_zeros(())
        for x, opened in tokens:
            closed = ~opened[:, None, :, None]
            cluster = self._nearest(x.detach())
            if first:
                found = sums(x.detach().masked_fill(closed, 0.0), cluster, self.config.clusters)
                self.pending += found.sum(0)
            if self.config.commitment:
                near = take(self.centroids.to(x.dtype).expand(len(x), -1, -1, -1), cluster)
                far = far + (x - near).masked_fill(closed, 0.0).square().sum()
                total = total + opened.sum() * x.shape[1] * self.head_dim
        if self.config.commitment:  # a checkpoint saves as many tensors when it computes again
            loss = self.config.commitment * far / total.clamp_min(1.0)
            if first:
                self._loss = loss
            elif loss.requires_grad and not self.penalty().requires_grad:
                raise UnsupportedError(
                    self.name, "commitment within checkpoint(use_reentrant=True)",
                    "it computes first without a graph, which would leave the loss without a "
                    "gradient; pass use_reentrant=False",
                )  # fmt: skip

    # ---- clusters ------------------------------------------------------------------------

    def _direction(self, x: Tensor) -> Tensor:
        """x/|x| in float32 or float64, its mean subtracted first with norm=layer."""
        x = x.to(sums_dtype(x.dtype))
        return unit(x - x.mean(-1, keepdim=True) if self.config.norm == "layer" else x)

    def _directions(self, q: Tensor, k: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        """Those of queries, and of keys, zero where masked."""
        refuse_vmap(self.name)
        return self._direction(q), self._direction(clear(k, k[..., :0], mask)[0])

    def _nearest(self, x: Tensor) -> Tensor:
        """The nearest centroid (B, h, N) of directions x (B, h, N, D), h = Hkv or H."""
        grouped = x.reshape(len(x), self.num_kv_heads, -1, x.shape[-1])
        centroids = self.centroids.to(x.dtype).expand(len(x), -1, -1, -1)
        return nearest(grouped, centroids).view(x.shape[:3])

    def assign(self, q: Tensor, k: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        """The cluster of each query (B, H, L) and of each key (B, Hkv, S), −1 where masked.

        Args:
            q: (B, H, L, D).
            k: (B, Hkv, S, D); q itself with shared=true.
            mask: its key part (B, S).
        """
        with torch.no_grad():
            return self._assigned(*self._directions(q, k, mask), mask)

    def _assigned(self, x: Tensor, y: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        of_q = self._nearest(x)
        of_k = of_q if self.config.shared else self._nearest(y)
        if mask.key is not None:
            of_k = of_k.masked_fill(~mask.key[:, None], -1)
        return of_q, of_k

    def members(self, q: Tensor, k: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        """Queries (B, H, C, w) and keys (B, Hkv, C, w) of each cluster, −1 = none.

        Where w is all tokens one cluster stands for all of them. Arguments as in `assign`.
        """
        with torch.no_grad():
            return self._taken(*self._directions(q, k, mask), mask)

    def _taken(self, x: Tensor, y: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        most = max(x.shape[2], y.shape[2])
        of_q = self._top(x, open_queries(mask, x, y.shape[2]), most)
        if self.config.shared:
            return of_q, of_q
        return of_q, self._top(y, open_tokens(mask.key, len(y), y.shape[2], y.device), most)

    def _top(self, x: Tensor, opened: Tensor, most: int) -> Tensor:
        """Open tokens of directions x (B, h, N, D) with the largest x·μ_c."""
        window = self.config.window
        centroids = self.centroids.to(x.dtype)
        if window >= most:  # every cluster takes all
            centroids = centroids[:, :1]
        centroids = centroids.repeat_interleave(x.shape[1] // self.num_kv_heads, 0)
        score = (centroids @ x.mT).masked_fill_(~opened[:, None, None], float("-inf"))
        best, index = score.topk(min(window, x.shape[2]), -1, sorted=False)
        return index.masked_fill(best == float("-inf"), -1)

    # ---- attention -----------------------------------------------------------------------

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
        # What a checkpoint computes again runs within a backward pass: with the same centroids.
        counts = self.training and torch._C._current_graph_task_id() < 0
        if counts:
            self._calls = [call for call in self._calls if _awaited(call)]
            if not self._calls:
                self.update()
        k, v = self._own_keys(q, k, v, mask)
        x, y = self._directions(q, k, mask)
        if counts and not bool(self.placed):
            self._place(self._tokens(x, y, mask))
        self._ready()
        balanced = self.config.balanced(mask.causal)
        with torch.no_grad():
            if balanced:
                queries, keys = self._groups(x, y, mask)
            else:
                queries, keys = self._chunks(*self._assigned(x, y, mask), mask)
        found, lse = self._read_groups(q, k, v, x, y, queries, keys, mask.causal, scale)
        if balanced:
            out = _merged(found, lse, queries, q.shape[2], self.config.merge == "mean")
        else:
            out = _placed(found, queries, q.shape[2])
        if self.training:
            self._count(self._tokens(x, y, mask), counts)
        if counts and out.requires_grad:
            call = _Call()
            out.register_hook(call.finish)  # the graph keeps the call alive
            self._calls.append(weakref.ref(call))
        return out.to(q.dtype)

    def _ready(self) -> None:
        if not bool(self.placed):
            raise CalibrationError(
                "routing: start=data needs calibrate(q, k), or a first call in training mode"
            )

    def _own_keys(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        """Keys and values, zero where masked. Keys that are the queries give k zero gradients."""
        if self.config.shared:
            k = torch.where(torch.ones((), dtype=torch.bool, device=q.device), q, k)
        return clear(k, v, mask)

    def _groups(self, x: Tensor, y: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        """Members of each cluster; then tokens in none, with the keys of their nearest."""
        queries, keys = self._taken(x, y, mask)
        keys = keys.repeat_interleave(x.shape[1] // keys.shape[1], 1)
        inside = torch.zeros(*x.shape[:2], x.shape[2] + 1, dtype=torch.bool, device=x.device)
        inside = inside.scatter_(-1, queries.flatten(2) + 1, True)[..., 1:]
        if self.config.rest == "zeros" or bool(inside.all()):
            return queries, keys
        count, size = queries.shape[2:]
        away = self._nearest(x).clamp_max(count - 1).masked_fill(inside, -1)
        chunks = cut(away, count, size)
        read = chunks.of_owner(keys)
        return torch.cat([queries, chunks.table], 2), torch.cat([keys, read], 2)

    def _chunks(
        self, reads: Tensor, bucket: Tensor, mask: Mask, seen: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Queries by the chunk of their cluster, and the keys of the chunks around it."""
        near = self.config.neighbours
        # Where every token has its own cluster, queries need no search among the keys.
        own = self.config.shared and mask.key is None and seen is None
        return bucket_groups(
            bucket, self.config.clusters, self.config.window, before=near,
            after=0 if mask.causal else near, reads=None if own else reads, seen=seen,
        )  # fmt: skip

    def _read_groups(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, y: Tensor, queries: Tensor,
        keys: Tensor, causal: bool, scale: float, own: bool = True,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """`grouped_softmax` with the logits of these options; x and y stand for vectors of √D.

        `own` says whether positions of queries and keys are aligned to the end, so that a token's
        own key is known.
        """
        if self.config.normalise == "both":
            q, k, scale = x, y, scale * self.head_dim
        elif self.config.normalise == "keys":
            q, k, scale = q.to(y.dtype), y, scale * self.head_dim**0.5
        offset = k.shape[2] - q.shape[2]

        def last(groups: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
            return OWN_LOGIT * (keys[:, None] == (queries + offset)[..., None])

        bias = last if own and self.config.own_last else None
        return grouped_softmax(q, k, v, queries, keys, scale=scale, causal=causal, bias=bias)

    # ---- streaming -----------------------------------------------------------------------

    def _prefill(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any, key_mask: Tensor | None, scale: float
    ) -> tuple[Tensor, State]:
        self._ready()
        length, keys_length = q.shape[2], k.shape[2]
        if length > keys_length:
            raise ShapeError(
                f"prefill needs a key for every query, given {length} queries and {keys_length} "
                "keys"
            )
        mask = Mask(causal=True, key=key_mask)
        k, v = self._own_keys(q, k, v, mask)
        x, y = self._directions(q, k, mask)
        with torch.no_grad():
            reads, bucket = self._assigned(x, y, mask)
        if state is None:
            count, width = self.config.clusters, self.config.held
            old = BucketState.empty(k, v, self.num_kv_heads, count, width)
            queries, keys = self._chunks(reads, bucket, mask)
            new = old.write(k, v, bucket)
        else:
            old, new = state, state.write(k, v, bucket)
            if length == keys_length == 1:
                return self._one(q, x, new, reads, bucket, scale), new
            queries, keys = self._chunks_after(old, reads, bucket, mask)
            k, v = (torch.cat([held.flatten(2, 3), t], 2) for held, t in ((old.k, k), (old.v, v)))
            y = self._direction(k)
        found, _ = self._read_groups(q, k, v, x, y, queries, keys, True, scale)
        return _placed(found, queries, length).to(q.dtype), new

    def _chunks_after(
        self, state: BucketState, reads: Tensor, bucket: Tensor, mask: Mask
    ) -> tuple[Tensor, Tensor]:
        """`_chunks` with the keys of a state before the new ones."""
        heads, count, width = state.k.shape[1:4]
        slot = torch.arange(width, device=bucket.device)
        held = state.slots() >= 0
        cluster = torch.arange(count, device=bucket.device)[:, None].expand(count, width)
        # In order of rank: the slot after the newest key's holds the oldest one.
        at = (state.seen[..., None] + slot) % width
        before = cluster.masked_fill(~held.gather(-1, at), -1).flatten(2)
        forgotten = (state.seen - width).clamp_min(0)
        queries, keys = self._chunks(reads, torch.cat([before, bucket], -1), mask, forgotten)
        places = (at + cluster * width).flatten(2).repeat_interleave(keys.shape[1] // heads, 1)
        known = keys.flatten(2)
        old = (known >= 0) & (known < count * width)
        moved = places.gather(-1, known.clamp(0, count * width - 1))
        return queries, torch.where(old, moved, known).view(keys.shape)

    def _one(
        self, q: Tensor, x: Tensor, state: BucketState, reads: Tensor, bucket: Tensor, scale: float
    ) -> Tensor:
        """One token: it reads its cluster in the state that holds it, sorting nothing."""
        heads, width = q.shape[1], state.k.shape[3]
        per = heads // self.num_kv_heads
        at = reads[..., None].expand(-1, -1, -1, width)  # (B, H, 1, W)
        rank = state.slots().repeat_interleave(per, 1).gather(2, at)
        last = rank.amax(-1, keepdim=True)
        size = self.config.window
        oldest = (last // size - self.config.neighbours) * size
        read = (rank >= 0) & (rank >= oldest)
        if self.config.own_last:
            own = (rank == last) & (bucket.repeat_interleave(per, 1) == reads)[..., None]
            read = read & ~(own & (last > oldest.clamp_min(0)))
        place = (reads[..., None] * width + torch.arange(width, device=q.device)).flatten(2)
        k, v = (take(t.flatten(2, 3), place) for t in (state.k, state.v))
        keys = torch.arange(width, device=q.device).masked_fill(~read, -1)
        queries = torch.zeros_like(reads)[..., None]
        y = self._direction(k)
        found, _ = self._read_groups(q, k, v, x, y, queries, keys, False, scale, own=False)
        return found[:, :, 0].to(q.dtype)


def _placed(found: Tensor, queries: Tensor, length: int) -> Tensor:
    """Rows (B, H, G, C, V) of the groups at their tokens (B, H, L, V), zeros elsewhere."""
    out, inside = of_tokens(found, queries, length)
    return out if bool(inside.all()) else out.masked_fill(~inside[..., None], 0.0)


def _merged(found: Tensor, lse: Tensor, queries: Tensor, length: int, mean: bool) -> Tensor:
    """(B, H, L, V): outputs of tokens in several groups weighted by e^lse, or equally.

    Args:
        found: (B, H, G, C, V).
        lse: (B, H, G, C).
        queries: (B, H, G, C) positions, −1 = none.
    """
    batch, heads = queries.shape[:2]
    rows = torch.arange(batch * heads, device=queries.device).view(batch, heads, 1)
    at = (queries.flatten(2) + 1 + rows * (length + 1)).flatten()  # −1: a row that is dropped
    total = batch * heads * (length + 1)
    lse = lse.flatten()
    if mean:
        weight = torch.ones_like(lse)
    else:
        top = torch.full((total,), EMPTY, dtype=lse.dtype, device=lse.device)
        top = top.scatter_reduce(0, at, lse.detach(), "amax")
        weight = torch.exp(lse - top[at])
    den = lse.new_zeros(total).index_add(0, at, weight)
    num = found.new_zeros(total, found.shape[-1])
    num = num.index_add(0, at, found.flatten(0, 3) * weight[:, None])
    out = num / den.masked_fill(den == 0, 1.0)[:, None]
    return out.view(batch, heads, length + 1, -1)[:, :, 1:]
