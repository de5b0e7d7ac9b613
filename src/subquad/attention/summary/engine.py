"""The summary engine: softmax over a few summary keys, each with a log-weight.

    out_i = Σ_m exp(scale·q_i·k̃_m + ℓ_m) ṽ_m / Σ_m exp(scale·q_i·k̃_m + ℓ_m)

A summary mechanism says how S keys become K summaries (k̃, ṽ) and what each weighs: ℓ_m = log
of the number of keys that summary m stands for, 0 where the paper has none, −∞ for a summary
that is absent. The engine does the rest: `summary_attention` gives the output, fused, and
`summary_partial` gives sums that merge with those over other keys. Gradients reach q, k̃, ṽ
and ℓ; what an absent summary contains never matters; a row without any summary gives zeros.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.attention.exact.engine import (
    as_partial,
    explicit,
    fused,
    masked,
    over_queries,
    sums_dtype,
    wide,
)
from subquad.attention.partial import Partial
from subquad.errors import ShapeError

__all__ = ["Ends", "summary_attention", "summary_partial"]

ABSENT = -1e30
"""Log-weight of an absent summary: finite, and no logit lifts it into reach."""

Ends = Tensor | tuple[int, int]
"""Position of the last key that each summary stands for: (K,) or (B, K) integers, or
(first, step) where summary m ends at first + m·step."""


def summary_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    log_weight: Tensor | None = None,
    present: Tensor | None = None,
    ends: Ends | None = None,
    positions: tuple[int, int] = (0, 1),
    dropout: float = 0.0,
) -> Tensor:
    """Softmax attention over summaries, (B, H, L, V), in q's dtype.

    Runs on torch's fused kernel: a log-weight is one more column of the summary keys, against
    a column of ones in q, so that it needs no L×K bias and receives gradients. With `ends` a
    bool mask is built for one chunk of queries at a time.

    Cost 2·L·K·(D+V) FLOPs; memory beyond inputs and output O(K) and copies of q, with `ends`
    O(chunk·K), 64 MiB.

    Args:
        q: (B, H, L, D).
        k: (B, Hkv, K, D) summary keys k̃, in q's dtype or a wider one (then computed in it).
        v: (B, Hkv, K, V) summary values ṽ.
        scale: factor of the products q·k̃; not of ℓ.
        log_weight: ℓ (B or 1, Hkv or H or 1, K), or None for zeros; −inf: absent. Half
            precision is computed in float32 then.
        present: (B or 1, Hkv or H or 1, K) bool, False where a summary is absent, or None.
        ends: causal by blocks: query i reads summary m where end_m ≤ position of query i.
        positions: (first, step): query i stands at first + i·step; used with `ends`.
        dropout: probability with which a weight is dropped, the rest scaled up.

    Raises:
        ShapeError: if a log-weight, `present` or `ends` does not fit k.

    Example:
        Two summaries, of three keys and of one: weights ¾ and ¼ where logits are equal.

        >>> import torch
        >>> from subquad.attention.summary.engine import summary_attention
        >>> q, k, v = torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 2, 4), torch.eye(2)[None, None]
        >>> log_weight = torch.tensor([3.0, 1.0]).log()[None, None]
        >>> summary_attention(q, k, v, 1.0, log_weight=log_weight)
        tensor([[[[0.7500, 0.2500]]]])
    """
    given = q.dtype
    dtype = torch.promote_types(given, torch.promote_types(k.dtype, v.dtype))
    if log_weight is not None:
        dtype = torch.promote_types(dtype, sums_dtype(dtype))
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    k, v, log_weight, opened = _prepare(q, k, v, log_weight, present)
    if log_weight is not None:
        q, k, scale = _column(q, k, log_weight, scale)
        opened = None  # an absent one weighs exp(ABSENT) beside the row's largest: nothing
    run = functools.partial(fused, scale=scale, dropout=dropout)
    too_wide = wide(q, v)
    if ends is None and not too_wide:
        if opened is not None:  # a row without any reads all of them: these are zeros
            opened = (opened | ~opened.any(-1, keepdim=True))[:, :, None]
        return run(q, k, v, opened).to(given)
    reach = _Reach.of(q, k, opened, ends, positions)
    batch, heads = q.shape[:2] if too_wide else reach.rows_apart()
    size = batch * heads * k.shape[2] * q.element_size()
    function = functools.partial(masked, run)
    (out,) = over_queries(function, q, k, v, reach, size, random=dropout > 0)
    return out.to(given)


def summary_partial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    log_weight: Tensor | None = None,
    present: Tensor | None = None,
    ends: Ends | None = None,
    positions: tuple[int, int] = (0, 1),
) -> Partial:
    """The sums over summaries that merge with sums over other keys; see `summary_attention`.

    Weights are formed a chunk of queries at a time, 64 MiB, and again in the backward pass.
    num, den and log_scale are float32, or float64 where an input is. den is 1 and log_scale
    the log-sum-exp; 0 and `subquad.attention.partial.EMPTY_LOG_SCALE` in a row without summaries.

    Raises:
        ShapeError: if a log-weight, `present` or `ends` does not fit k.
    """
    dtype = sums_dtype(torch.promote_types(q.dtype, torch.promote_types(k.dtype, v.dtype)))
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    k, v, log_weight, opened = _prepare(q, k, v, log_weight, present)
    if log_weight is not None:
        q, k, scale = _column(q, k, log_weight, scale)
    reach = _Reach.of(q, k, opened, ends, positions)
    size = 8 * q.shape[0] * q.shape[1] * k.shape[2] * dtype.itemsize
    function = functools.partial(explicit, scale=scale, dtype=dtype)
    return as_partial(over_queries(function, q, k, v, reach, size))


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, log_weight: Tensor | None, present: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """k and v cleared where a summary is absent, ℓ of k's heads, and an openness of q's."""
    (batch, heads), (kv, count) = q.shape[:2], k.shape[1:3]
    for name, tensor in (("log_weight", log_weight), ("present", present)):
        if tensor is not None and (
            tensor.dim() != 3
            or tensor.shape[0] not in (1, batch)
            or tensor.shape[1] not in (1, kv, heads)
            or tensor.shape[2] != count
        ):
            raise ShapeError(
                f"{name} must be (B={batch} or 1, Hkv={kv} or H={heads} or 1, K={count}), "
                f"given {tuple(tensor.shape)}"
            )
    if any(t is not None and t.shape[1] not in (1, kv) for t in (log_weight, present)):
        # What differs among the query heads of a group: summaries are few, they are repeated.
        k, v = _heads(k, heads), _heads(v, heads)
        log_weight, present = (
            None if t is None else _heads(t, heads) for t in (log_weight, present)
        )
    if log_weight is not None:
        there = log_weight.detach() > float("-inf")
        present = there if present is None else there & present
    if present is None:
        return k, v, None, None
    closed = ~present[..., None]
    k, v = k.masked_fill(closed, 0), v.masked_fill(closed, 0)
    if log_weight is not None:
        log_weight = log_weight.to(k.dtype).masked_fill(~present, ABSENT).expand(k.shape[:3])
    return k, v, log_weight, _heads(present, heads)


def _heads(tensor: Tensor, heads: int) -> Tensor:
    """The tensor with dimension 1 repeated for each query head, unless it is 1 or H."""
    given = tensor.shape[1]
    return tensor if given in (1, heads) else tensor.repeat_interleave(heads // given, 1)


def _column(q: Tensor, k: Tensor, log_weight: Tensor, scale: float) -> tuple[Tensor, Tensor, float]:
    """q and k whose products are scale·q·k + ℓ, and the scale that is left."""
    return F.pad(q * scale, (0, 1), value=1.0), torch.cat([k, log_weight[..., None]], -1), 1.0


@dataclass(frozen=True, eq=False)
class _Reach:
    """Which summaries queries read, for `over_queries`: present ones that end by the query."""

    opened: Tensor | None
    ends: Ends | None
    positions: tuple[int, int]

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        opened: Tensor | None,
        ends: Ends | None,
        positions: tuple[int, int],
    ) -> _Reach:
        if isinstance(ends, Tensor):
            shapes = ((k.shape[2],), (q.shape[0], k.shape[2]), (1, k.shape[2]))
            if tuple(ends.shape) not in shapes or ends.is_floating_point():
                raise ShapeError(
                    f"ends must be integers (K={k.shape[2]}) or (B={q.shape[0]}, K={k.shape[2]}), "
                    f"given {ends.dtype} {tuple(ends.shape)}"
                )
        elif ends is not None and (ends[1] < 1 or positions[1] < 1):
            raise ShapeError(f"the steps of ends={ends} and positions={positions} must be positive")
        return cls(opened, ends, positions)

    @property
    def causal(self) -> bool:
        return self.ends is not None

    @property
    def window(self) -> None:
        return None

    @property
    def dense(self) -> None:
        return None

    def rows_apart(self) -> tuple[int, int]:
        """(batch rows, heads) that the mask has to spell out."""
        batch, heads = (1, 1) if self.opened is None else tuple(self.opened.shape[:2])
        if isinstance(self.ends, Tensor) and self.ends.dim() == 2:
            batch = max(batch, self.ends.shape[0])
        return batch, heads

    def span(self, start: int, stop: int, queries: int, keys: int) -> tuple[int, int]:
        if not isinstance(self.ends, tuple):
            return 0, keys
        at = self.positions[0] + (stop - 1) * self.positions[1]
        last = (at - self.ends[0]) // self.ends[1] + 1  # floor: negative where none has ended
        return 0, max(0, min(keys, last))

    def rows(
        self,
        start: int,
        stop: int,
        queries: int,
        keys: int,
        *,
        span: tuple[int, int] | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        first, last = (0, keys) if span is None else span
        allowed = torch.ones(stop - start, last - first, dtype=torch.bool, device=device)
        if self.ends is not None:
            at = self.positions[0] + self.positions[1] * torch.arange(start, stop, device=device)
            if isinstance(self.ends, Tensor):
                ends = self.ends[..., first:last]
            else:
                ends = self.ends[0] + self.ends[1] * torch.arange(first, last, device=device)
            allowed = ends[..., None, :] <= at[:, None]
        if self.opened is not None:
            allowed = allowed if allowed.dim() < 3 else allowed[:, None]
            allowed = allowed & self.opened[:, :, None, first:last]
        return allowed
