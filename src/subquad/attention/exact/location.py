"""Location-aware attention: additive scores that also read where the query before has looked."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from subquad.attention.base import Absent, Capabilities, Cost, Info, Mechanism, State, Support
from subquad.attention.exact import engine
from subquad.attention.exact.engine import KeyValueState, clear, dense_as, sums_dtype
from subquad.attention.masks import Mask
from subquad.kernels.transforms import recomputes
from subquad.options import Config, flag_problem, integer_problem

__all__ = ["Location", "LocationConfig", "LocationState"]


@dataclasses.dataclass(frozen=True)
class LocationConfig(Config):
    """Options of `Location`.

    Args:
        hidden: units of the scoring network, default the head's width D.
        filters: k, filters over the alignment before.
        kernel: r, keys that a filter spans; odd.
        cumulative: filters read the sum of all alignments before, not the last one alone.
    """

    mechanism: ClassVar[str] = "location"

    hidden: int | None = None
    filters: int = 10
    kernel: int = 31
    cumulative: bool = False

    def problems(self) -> Iterator[str]:
        if self.hidden is not None:
            yield from integer_problem("hidden", self.hidden, 1)
        yield from integer_problem("filters", self.filters, 1)
        odd = [*integer_problem("kernel", self.kernel, 1)]
        yield from odd
        if not odd and self.kernel % 2 == 0:
            yield f"kernel={self.kernel} must be odd: as many keys on either side of one"
        yield from flag_problem("cumulative", self.cumulative)


@dataclasses.dataclass(frozen=True, eq=False)
class LocationState(KeyValueState):
    """Keys and values, and where queries have looked; 8·S bytes a row and head more.

    Queries that bring keys and queries that only read follow each other in two rows of their
    own, each of which starts without an alignment.

    Args:
        written: (B, H, S) of the last query that brought keys: its alignment, or with
            `cumulative` the sum of all.
        read: (B, H, S) of the last query that only read, likewise.
    """

    written: Tensor = dataclasses.field(kw_only=True)
    read: Tensor = dataclasses.field(kw_only=True)


class Location(Mechanism):
    """Location-aware (Chorowski) attention.

        s_tj  = scale · wᵀ tanh(W_q q_t + W_k k_j + U f_tj + b)             scale = 1
        f_t   = F ∗ α_{t−1},   α_t = softmax_j(s_tj),   α_0 = 0
        out_t = Σ_j α_tj v_j

    Each score reads how much the query before attended to the keys around j, through `filters`
    filters F of `kernel` taps: attention learns to go on from where it was, and not to come
    back. With `cumulative` the filters read Σ_{s<t} α_s, what has been covered so far. Beyond
    both ends of the keys alignments are zero.

    Queries follow each other in the order of the call: an answer depends on the queries before,
    never on later ones, so that a causal decoder may use it. The recursion is exact and takes a
    step for each query; all else is computed for all queries at once. A state carries the last
    alignment.

    The parameters are those of `additive`, and `filter_weight` F (Hkv, filters, kernel) and
    `location_weight` U (Hkv, hidden, filters). Each key/value head has its own; the query heads
    of its group share them, each with its own alignment.

    Cost: L·S·(2·filters·(kernel + hidden) + 3·hidden + 2·V) FLOPs, L·S·hidden evaluations of
    tanh, and L steps one after the other: not sub-quadratic, and slower than `additive`. Memory
    is bounded by chunks of queries, 64 MiB or one query, which the backward pass computes again
    from one alignment a chunk. Sums are kept in float32 for half precision.

    Papers: Chorowski et al. 2015, arXiv 1506.07503, eq. 8 and 9; cumulative: Shen et al. 2017,
    arXiv 1712.05884, section 2.3. Deviations: several heads; α_0 = 0; cumulative filters read
    the sum alone.

    Args:
        hidden: units of the scoring network, default D.
        filters, kernel: of the convolution.
        cumulative: filters read the sum of all alignments before.

    See `Mechanism` for sizes, shapes and what is raised.

    Example:
        >>> import torch, subquad as sq
        >>> mech = sq.build("location(filters=4, kernel=7)", head_dim=16, num_heads=2)
        >>> q, k, v = torch.randn(1, 2, 5, 16), torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 3)
        >>> out = mech(q, k, v)
        >>> _, state = mech.prefill(q[:, :, :1], k, v)
        >>> first, state = mech.step(q[:, :, :2], None, None, state)
        >>> rest, state = mech.step(q[:, :, 2:], None, None, state)
        >>> bool(torch.allclose(torch.cat([first, rest], 2), out, atol=1e-5))
        True
    """

    name = "location"
    family = "exact"
    Config = LocationConfig
    config: LocationConfig
    state_type = LocationState
    info = Info(
        summary="additive attention that knows where the query before has looked",
        formula="s_tj = scale·wᵀ tanh(W_q q_t + W_k k_j + U f_tj + b),  f_t = F ∗ α_{t−1},  "
        "α_t = softmax_j(s_tj),  out_t = Σ_j α_tj v_j",
        scale="1",
        cost=Cost(
            formula="O(L·S·(hidden·filters + filters·kernel + V)), L steps in a row",
            flops=lambda length, head_dim, value_dim, config: (
                float(length * length)
                * (
                    2 * config.filters * (config.kernel + _hidden(config, head_dim))
                    + 3 * _hidden(config, head_dim)
                    + 2 * value_dim
                )
            ),
            # both projections, and what one query needs at least
            memory=lambda length, head_dim, value_dim, config: (
                4.0 * length * (3 * _hidden(config, head_dim) + config.kernel)
            ),
        ),
        paper="Chorowski et al. 2015, arXiv 1506.07503, eq. 8 and 9; cumulative: Shen et al. 2017, "
        "arXiv 1712.05884, section 2.3",
        limit="additive with the same W_q, W_k, b and w where U = 0",
        options={
            "hidden": "units of the scoring network, default the head's width D",
            "filters": "filters over the alignment before",
            "kernel": "keys that a filter spans, odd",
            "cumulative": "filters read the sum of all alignments before",
        },
        deviations="several heads, each with its own alignment; no alignment before the first "
        "query; cumulative filters read the sum alone, the paper's both",
        sample="location(kernel=7)",
        use="cross-attention of speech recognition and synthesis, where it has to move along the "
        "source. It is quadratic, and goes query by query.",
    )

    def __init__(self, *, device: Any = None, dtype: Any = None, **arguments: Any) -> None:
        super().__init__(device=device, dtype=dtype, **arguments)
        config, heads, width = self.config, self.num_kv_heads, self.head_dim
        hidden = _hidden(config, width)
        factory = {"device": device, "dtype": dtype}
        self.query_weight = nn.Parameter(torch.empty(heads, hidden, width, **factory))
        self.key_weight = nn.Parameter(torch.empty(heads, hidden, width, **factory))
        self.bias = nn.Parameter(torch.empty(heads, hidden, **factory))
        self.score_weight = nn.Parameter(torch.empty(heads, hidden, **factory))
        self.filter_weight = nn.Parameter(
            torch.empty(heads, config.filters, config.kernel, **factory)
        )
        self.location_weight = nn.Parameter(torch.empty(heads, hidden, config.filters, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the parameters from the seed: the same ones on every device, in every dtype.

        Uniform within ±fan_in^-½; b is zero. Those of `additive` are its own for one seed.
        """
        generator = torch.Generator().manual_seed(self.seed)
        drawn = (
            self.query_weight,
            self.key_weight,
            self.score_weight,
            self.filter_weight,
            self.location_weight,
        )
        with torch.no_grad():
            for parameter in drawn:
                bound = 1.0 / math.sqrt(parameter.shape[-1])
                draw = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_((2.0 * draw - 1.0) * bound)
            self.bias.zero_()

    @classmethod
    def capabilities_for(cls, config: LocationConfig) -> Capabilities:
        follow = "alignments pass from query to query"
        return Capabilities(
            prefix=True,
            dense=True,
            segments=Absent(f"{follow}, from one segment into the next"),
            window=Absent(f"{follow}, and with them what is outside of the next one's window"),
            state="growing",
            partial=Absent("an alignment is normalised over all keys before the next query"),
            compact=Absent("filters count masked keys as places, and every query is followed"),
            compile=Absent("a loop over queries, as long as the call"),
            functional=Absent("its scoring network is learned"),
        )

    def _scale(self, scale: float | None) -> float:
        return 1.0 if scale is None else float(scale)

    def _aligned(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        mask: Mask,
        scale: float,
        before: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Answers (B, H, L, V), and what the query behind the last one is to read.

        Args:
            q, scale: as in `_attend`.
            k: zero where masked.
            v: likewise; None for the alignments (B, H, L, S) in place of answers.
            mask: flattened.
            before: (B, H, S), what the first query reads; None at the start.
        """
        dtype = sums_dtype(q.dtype)
        mask = dense_as(mask, dtype)
        batch, heads, queries, _ = q.shape
        kv_heads, keys = k.shape[1:3]
        w_q, w_k, b, w, filters, u = (
            parameter.to(dtype)
            for parameter in (
                self.query_weight,
                self.key_weight,
                self.bias,
                self.score_weight,
                self.filter_weight,
                self.location_weight,
            )
        )
        grouped = q.to(dtype).reshape(batch, kv_heads, -1, q.shape[-1])
        from_q = grouped @ w_q.transpose(-1, -2) + b[:, None, :]
        from_q = from_q.reshape(batch, kv_heads, heads // kv_heads, queries, -1)
        from_k = (k.to(dtype) @ w_k.transpose(-1, -2))[:, :, None]
        if before is None:
            before = from_k.new_zeros(batch, heads, keys)
        shared = (v, from_k, filters.transpose(-1, -2), u.transpose(-1, -2), (w * scale)[..., None])
        per_key = self.config.kernel + self.config.filters + 2 * from_q.shape[-1]
        rows = max(1, engine.CHUNK_BYTES // (batch * heads * keys * per_key * dtype.itemsize))
        run = functools.partial(self._follow, mask, (queries, keys))
        again = rows < queries and recomputes()
        found = []
        for start, piece in zip(range(0, queries, rows), from_q.split(rows, 3), strict=True):
            call = (start, before, piece, *shared)
            if again:
                out, before = checkpoint(run, *call, use_reentrant=False, preserve_rng_state=False)
            else:
                out, before = run(*call)
            found.append(out)
        return torch.cat(found, 2).to(q.dtype), before

    def _follow(
        self,
        mask: Mask,
        sizes: tuple[int, int],
        start: int,
        before: Tensor,
        from_q: Tensor,
        v: Tensor | None,
        from_k: Tensor,
        filters: Tensor,
        u: Tensor,
        w: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """`_aligned` for the queries from `start` on, in the dtype of sums."""
        stop = start + from_q.shape[3]
        allowed = engine.explicit_rows(mask, start, stop, *sizes, device=from_q.device)
        added = None
        if mask.dense is not None and mask.dense.dtype != torch.bool:
            added = mask.dense[:, :, start:stop]
        side = self.config.kernel // 2
        found = []
        for t, query in enumerate(from_q.unbind(3)):
            around = F.pad(before, (side, side)).unfold(-1, self.config.kernel, 1)
            around = around.reshape(*from_k.shape[:2], -1, self.config.kernel)  # (B, Hkv, G·S, r)
            seen = (around @ filters @ u).reshape(*query.shape[:3], -1, u.shape[-1])
            units = torch.tanh(query[..., None, :] + from_k + seen)  # (B, Hkv, G, S, hidden)
            logits = (units.flatten(2, 3) @ w).reshape(*before.shape[:2], 1, -1)
            if added is not None:
                logits = logits + added[:, :, t : t + 1]
            weights, _ = engine.softmax_weights(logits, allowed[:, :, t : t + 1])
            found.append(weights)
            last = weights.squeeze(2)
            before = before + last if self.config.cumulative else last
        weights = torch.cat(found, 2)
        if v is None:
            return weights, before
        grouped = weights.reshape(len(v), v.shape[1], -1, v.shape[2])
        return (grouped @ v.to(weights.dtype)).reshape(*weights.shape[:3], -1), before

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
        k, v = clear(k, v, dense_as(mask, sums_dtype(q.dtype)))
        return self._aligned(q, k, v, mask, scale)[0]

    def _implied(self, q: Tensor, k: Tensor, mask: Mask, scale: float) -> Tensor:
        k, _ = clear(k, k, dense_as(mask, sums_dtype(q.dtype)))
        return self._aligned(q, k, None, mask, scale)[0]

    def _prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: LocationState | None,
        key_mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, State]:
        held = KeyValueState.extend(state, k, v, key_mask)
        if state is None:
            nothing = q.new_zeros(*q.shape[:2], k.shape[2], dtype=sums_dtype(q.dtype))
            written = read = nothing
        else:
            written, read = (F.pad(x, (0, k.shape[2])) for x in (state.written, state.read))
        mask = Mask(causal=True, key=held.key)
        out, written = self._aligned(q, held.k, held.v, mask, scale, written)
        return out, LocationState(held.k, held.v, held.key, written=written, read=read)

    @classmethod
    def state_weights_for(cls, config: LocationConfig) -> Support:
        return True

    def _read_implied(self, q: Tensor, state: LocationState, scale: float) -> Tensor:
        return self._aligned(q, state.k, None, Mask(key=state.key), scale, state.read)[0]

    def _reading(self, q: Tensor, state: LocationState, scale: float) -> tuple[Tensor, State]:
        mask = Mask(key=state.key)
        out, read = self._aligned(q, state.k, state.v, mask, scale, state.read)
        return out, dataclasses.replace(state, read=read)


def _hidden(config: LocationConfig, head_dim: int) -> int:
    return head_dim if config.hidden is None else config.hidden
