"""What exact mechanisms share: the cache of keys and values, and a loop over queries.

Exact attention compares every query with every key. What must not follow is a tensor of
that size: `over_queries` hands a mechanism one chunk of queries at a time, with the keys
that the chunk can reach and its rows of the mask, and computes the chunk again in the
backward pass instead of keeping it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from subquad.attention.base import State, continued, continues
from subquad.attention.masks import Mask
from subquad.attention.partial import EMPTY_LOG_SCALE, Partial
from subquad.kernels.memory import has_data, large_pages
from subquad.kernels.transforms import forward_mode, recomputes

__all__ = [
    "CHUNK_BYTES",
    "KeyValueState",
    "Reach",
    "clear",
    "explicit",
    "explicit_rows",
    "fused",
    "masked",
    "matrix",
    "over_queries",
    "perturbed",
    "softmax_sums",
    "softmax_weights",
    "sums_dtype",
    "wide",
]

CHUNK_BYTES = 64 * 2**20
"""Bytes that one chunk's mask or scores may take."""

CHUNK_ROWS = 256
"""Queries of a chunk where a mask keeps keys out of its reach: less of them is computed."""


SPARE = 8
"""A cache that grows by few tokens gets room for an eighth more."""


class _Room:
    """Memory of a cache behind its last token: who comes first takes it.

    One tensor alone ends where the room begins, so that what is written there is seen by no
    other: older states stay as they are.
    """

    def __init__(self, whole: Tensor, length: int) -> None:
        self.whole, self.length = whole, length
        self.lock = threading.Lock()

    @classmethod
    def tensor(cls, like: Tensor, rows: int, length: int) -> Tensor:
        """(rows, H, length, ·) to be filled, with room behind."""
        size = length + length // SPARE + 1
        whole = like.new_empty(rows, like.shape[1], size, like.shape[3])
        large_pages(whole)
        return cls(whole, length)._end()

    def _end(self) -> Tensor:
        end = self.whole[:, :, : self.length]
        _rooms[end] = self
        return end

    def take(self, old: Tensor, new: Tensor) -> Tensor | None:
        """`old` and `new` in one, or None: `old` is not the last, or there is no room."""
        start, stop = old.shape[2], old.shape[2] + new.shape[2]
        with self.lock:
            if self.length != start or stop > self.whole.shape[2]:
                return None
            self.length = stop
        # `.data`: what a graph has saved of the tokens before does not change.
        self.whole.data[:, :, start:stop] = new
        return self._end()


_rooms: Any = WeakIdKeyDictionary()
"""The room behind each tensor that has one."""


def _room_of(t: Tensor) -> _Room | None:
    """The room behind a tensor, if a call may write there."""
    room: _Room | None = _rooms.get(t)
    if room is None or _watched(t) or t.is_inference() != torch.is_inference_mode_enabled():
        return None
    return room


def _watched(t: Tensor) -> bool:
    """Whether somebody looks at what happens to a tensor: then it is joined as ever."""
    return torch.is_grad_enabled() or torch.compiler.is_compiling() or not has_data(t)


def _grown(name: str, old: Tensor, new: Tensor) -> Tensor:
    """As `continued`; without gradients a few tokens are written behind many, not all copied."""
    if _watched(old) or new.shape[2] * SPARE > old.shape[2]:
        return continued(name, old, new)
    continues(name, old, new)
    room = _room_of(old)
    if room is not None and len(old) == len(new) and old.device == new.device:
        found = room.take(old, new)
        if found is not None:
            return found
    length = old.shape[2] + new.shape[2]
    found = _Room.tensor(old, len(old), length)
    return torch.cat([old, new], 2, out=found)


@dataclass(frozen=True, eq=False)
class KeyValueState(State):
    """All past keys and values: 4·S·(D+V) bytes a row and key/value head in float32.

    A state that grows token by token without gradients has room for an eighth more behind it,
    which the next one takes; older states see the same memory, up to their own end.

    Args:
        k: (B, Hkv, S, D), zero where `key` is False.
        v: (B, Hkv, S, V), zero where `key` is False.
        key: (B, S) bool, True = attend, or None where every key is read.
    """

    k: Tensor
    v: Tensor
    key: Tensor | None = None

    @classmethod
    def extend(
        cls,
        state: KeyValueState | None,
        k: Tensor,
        v: Tensor,
        key: Tensor | None,
        *,
        grows: bool = False,
    ) -> KeyValueState:
        """The state followed by new keys and values; without a state nothing is copied.

        Args:
            state: what came before, or None.
            k, v: new keys (B, Hkv, S, D) and values (B, Hkv, S, V).
            key: (B, S) bool, True = attend, or None.
            grows: whether many more will follow, and none will be dropped.

        Raises:
            ShapeError: if `state` is of other heads or widths.
            DtypeError: if the state's dtype differs from that of the new keys.
        """
        k, v = clear(k, v, Mask(key=key))
        if state is None:
            return cls(k, v, key)
        join = _grown if grows else continued
        joined = join("k", state.k, k), join("v", state.v, v)
        if state.key is not None or key is not None:
            before = state.k.new_ones(len(k), state.k.shape[2], dtype=torch.bool)
            after = k.new_ones(len(k), k.shape[2], dtype=torch.bool)
            key = torch.cat(
                [before if state.key is None else state.key, after if key is None else key], 1
            )
        return cls(*joined, key)

    def select(self, rows: Tensor | Sequence[int]) -> KeyValueState:
        """Keeps batch rows `rows`, in that order (beam reordering)."""

        def chosen(t: Tensor) -> Tensor:
            at = torch.as_tensor(rows, device=t.device)
            if _room_of(t) is None:
                return t.index_select(0, at)
            return torch.index_select(t, 0, at, out=_Room.tensor(t, len(at), t.shape[2]))

        return self.map(chosen)

    def overwritten(self, rows: Tensor, by: Tensor) -> KeyValueState:
        """See `State.overwritten`: in place where the memory was made here, to grow in."""

        def over(t: Tensor) -> Tensor:
            at, other = rows.to(t.device), t.index_select(0, by.to(t.device))
            return (
                t.index_copy(0, at, other) if _room_of(t) is None else t.index_copy_(0, at, other)
            )

        return self.map(over)


def clear(k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """k and v with zeros at keys that no query may read, so that what stood there never matters.

    A weight of zero does not stop NaN or Inf: 0·NaN = NaN, forward and backward. Looks at
    the key mask and at columns of an explicit mask.
    """
    key = mask.key
    if mask.dense is not None:
        opened = mask.dense if mask.dense.dtype == torch.bool else mask.dense > float("-inf")
        columns = opened.flatten(1, 2).any(1)
        key = columns if key is None else key & columns
    if key is None:
        return k, v
    closed = ~key[:, None, :, None]
    return k.masked_fill(closed, 0), v.masked_fill(closed, 0)


def mask_rows(mask: Mask, batch: int) -> tuple[int, int]:
    """(batch rows, heads) that an explicit form of `mask` has to spell out."""
    varies = mask.key is not None or mask.segments is not None or isinstance(mask.prefix, Tensor)
    if mask.dense is None:
        return batch if varies else 1, 1
    return batch if varies else mask.dense.shape[0], mask.dense.shape[1]


Chunk = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, ...]]
"""(q rows, k span, v span, allowed, bias or None) → tensors whose dimension 2 is the query."""


class Reach(Protocol):
    """What `over_queries` asks of a mask: a `Mask`, or a rule of one's own."""

    @property
    def causal(self) -> bool: ...
    @property
    def window(self) -> object: ...
    @property
    def dense(self) -> Tensor | None: ...
    def span(self, start: int, stop: int, queries: int, keys: int) -> tuple[int, int]: ...
    def rows(
        self,
        start: int,
        stop: int,
        queries: int,
        keys: int,
        *,
        span: tuple[int, int] | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor: ...


def over_queries(
    function: Chunk,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Reach,
    bytes_per_query: int,
    *,
    random: bool = False,
) -> tuple[Tensor, ...]:
    """Concatenates `function` over chunks of queries, each at most `CHUNK_BYTES`.

    Where all chunks together are larger, each is computed again in the backward pass.

    Args:
        function: gets q (B, H, l, D), the keys and values that these queries can reach
            (B, Hkv, s, ·), allowed (B or 1, H or 1, l, s) and, for a floating-point dense
            mask, the bias of the logits, of the same shape.
        q: (B, H, L, D).
        k: (B, Hkv, S, D).
        v: (B, Hkv, S, V).
        mask: flattened, see `Mask.flatten`; or another `Reach`.
        bytes_per_query: what one query costs within `function`, all rows and heads.
        random: whether `function` draws random numbers (dropout, noise).
    """
    queries, keys = q.shape[2], k.shape[2]
    rows = max(1, CHUNK_BYTES // bytes_per_query)
    again = rows < queries and recomputes()
    if (mask.causal or mask.window is not None) and not torch.compiler.is_compiling():
        rows = min(rows, CHUNK_ROWS)
    added = None if mask.dense is None or mask.dense.dtype == torch.bool else mask.dense
    edges, pieces, biases = [(0, queries)], [q], [added]  # one chunk has to compile for any length
    if rows < queries:
        # Split, not sliced: the gradient of a slice is as long as q, for every chunk.
        pieces = list(q.split(rows, 2))
        biases = [None] * len(pieces) if added is None else list(added.split(rows, 2))
        edges = [(start, min(queries, start + rows)) for start in range(0, queries, rows)]
    parts = []
    # Longest spans first: what they free is large enough for all that follow.
    for (start, stop), piece, bias in reversed(list(zip(edges, pieces, biases, strict=True))):
        first, last = mask.span(start, stop, queries, keys)
        if first == last:  # no key in reach: one closed key keeps the shapes regular
            last = first + 1
        run = functools.partial(_chunk, function, mask, (start, stop, queries, keys), (first, last))
        tensors = piece, k[:, :, first:last], v[:, :, first:last], bias
        if again:
            parts.append(checkpoint(run, *tensors, use_reentrant=False, preserve_rng_state=random))
        else:
            parts.append(run(*tensors))
    if len(parts) == 1:
        return parts[0]
    return tuple(torch.cat(tensors[::-1], 2) for tensors in zip(*parts, strict=True))


def _chunk(
    function: Chunk,
    mask: Reach,
    rows: tuple[int, int, int, int],
    span: tuple[int, int],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, ...]:
    allowed = explicit_rows(mask, *rows, span=span, device=q.device)
    return function(q, k, v, allowed, bias if bias is None else bias[..., slice(*span)])


def explicit_rows(
    mask: Reach,
    start: int,
    stop: int,
    queries: int,
    keys: int,
    *,
    span: tuple[int, int] | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """`Mask.rows` of a flattened mask as (B or 1, H or 1, rows, keys of the span)."""
    allowed = mask.rows(start, stop, queries, keys, span=span, device=device)
    if allowed.dim() < 4:  # (L, S) or (B, L, S)
        allowed = allowed.unsqueeze(-3)
    return allowed if allowed.dim() == 4 else allowed.unsqueeze(0)


def perturbed(weights: Tensor, dropout: float, noise: float) -> Tensor:
    """Attention weights as they are applied while training; their expectation is `weights`.

    Each is multiplied by 1 + noise·u, u uniform in [−1, 1], and dropped with probability
    `dropout`, the remaining ones scaled by 1/(1 − dropout). Draws from torch's generator.
    """
    if noise:
        weights = weights * (1 - noise + 2 * noise * torch.rand_like(weights))
    return torch.dropout(weights, dropout, train=True) if dropout else weights


def softmax_sums(
    logits: Tensor,
    v: Tensor,
    allowed: Tensor,
    bias: Tensor | None,
    dropout: float = 0.0,
    noise: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Σ_j p_ij v_j, Σ_j p_ij and the log of what both were divided by, from explicit logits.

    Args:
        logits: (B, H, l, s), float32 or float64.
        v: (B, Hkv, s, V).
        allowed: (B or 1, H or 1, l, s) bool.
        bias: added to the logits, or None.
        dropout, noise: see `perturbed`.

    Returns:
        num (B, H, l, V), den (B, H, l) and log_scale (B, H, l) of a `Partial`: den is 1 and
        log_scale the log-sum-exp; 0 and `EMPTY_LOG_SCALE` where no key is allowed.
    """
    if bias is not None:
        logits = logits + bias
    weights, log_scale = softmax_weights(logits, allowed)
    weights = perturbed(weights, dropout, noise)
    grouped = weights.reshape(len(weights), v.shape[1], -1, weights.shape[-1])
    num = (grouped @ v.to(weights.dtype)).reshape(*weights.shape[:-1], v.shape[-1])
    den = allowed.any(-1).to(log_scale.dtype).expand_as(log_scale)
    return num, den, log_scale


def softmax_weights(logits: Tensor, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Softmax over allowed keys, and the log-sum-exp of their logits (without the last dimension).

    Zeros and `EMPTY_LOG_SCALE` where no key is allowed; None allows all.
    """
    if allowed is None:
        lse = torch.logsumexp(logits, -1, keepdim=True)
        return torch.exp(logits - lse), lse.squeeze(-1)
    empty = ~allowed.any(-1, keepdim=True)
    logits = logits.masked_fill(~allowed, float("-inf")).masked_fill(empty, 0.0)
    lse = torch.logsumexp(logits, -1, keepdim=True)
    weights = torch.exp(logits - lse).masked_fill(empty, 0.0)
    return weights, lse.masked_fill(empty, EMPTY_LOG_SCALE).squeeze(-1)


def wide(q: Tensor, v: Tensor) -> bool:
    """Whether values are so wide that `fused` materialises weights, to be cut into chunks."""
    # Widening q and k to V would cost more than it saves: the weights are materialised
    # (a chunk at a time), as in `Mechanism.weights`, where V = S.
    return v.shape[-1] > 4 * q.shape[-1]


def fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    dropout: float = 0.0,
    causal: bool = False,
) -> Tensor:
    """torch's fused softmax attention for V ≠ D and grouped queries too.

    Args:
        q: (B, H, L, D).
        k: (B, Hkv, S, D).
        v: (B, Hkv, S, V).
        mask: bool (True = attend) or floats, broadcastable to (B, H, L, S), or None.
        scale: factor of the logits.
        dropout: probability with which a weight is dropped.
        causal: torch's causal mask, aligned to the start.
    """
    value_dim, head_dim = v.shape[-1], q.shape[-1]
    if value_dim != head_dim and not wide(q, v):
        # The fused kernels take one width; columns of zeros change neither logits nor output.
        width = max(value_dim, head_dim)
        q, k, v = (F.pad(t, (0, width - t.shape[-1])) for t in (q, k, v))
    # The fused kernels have no forward derivative.
    with sdpa_kernel(SDPBackend.MATH) if forward_mode() else nullcontext():
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=causal,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    return out[..., :value_dim]


def masked(
    run: functools.partial[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, ...]:
    """A `Chunk` of `over_queries` for `fused`, given as `run`: rows without keys are zeros."""
    # Whether a kernel gives NaN for a row without keys depends on the backend: such a row
    # reads all keys, and is then replaced.
    empty = ~allowed.any(-1, keepdim=True)
    if bias is None:
        mask = allowed | empty
    else:
        mask = bias.masked_fill(~allowed, float("-inf")).masked_fill(empty, 0.0)
    return (run(q, k, v, mask).masked_fill(empty, 0.0),)


def explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor,
    bias: Tensor | None,
    *,
    scale: float,
    dtype: torch.dtype,
    dropout: float = 0.0,
    noise: float = 0.0,
) -> tuple[Tensor, ...]:
    """A `Chunk` of `over_queries` that gives `softmax_sums` of dot products in `dtype`."""
    return softmax_sums(_logits(q, k, scale, dtype), v, allowed, bias, dropout, noise)


def _logits(q: Tensor, k: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """scale·q·k (B, H, L, S) of q (B, H, L, D) and k (B, Hkv, S, D)."""
    grouped = q.to(dtype).reshape(len(q), k.shape[1], -1, q.shape[-1]) * scale
    return (grouped @ k.to(dtype).transpose(-1, -2)).reshape(*q.shape[:-1], k.shape[2])


def matrix(
    q: Tensor, k: Tensor, mask: Mask, scale: float, dropout: float = 0.0, noise: float = 0.0
) -> Tensor:
    """Softmax weights (B, H, L, S) in L·S·D operations: a product with v = I takes L·S²."""
    dtype = sums_dtype(q.dtype)
    mask = dense_as(mask, dtype)
    k, _ = clear(k, k, mask)
    logits = _logits(q, k, scale, dtype)
    if mask.dense is not None and mask.dense.dtype != torch.bool:
        logits = logits + mask.dense
    allowed, (queries, keys) = None, logits.shape[2:]
    if mask.kinds():
        allowed = explicit_rows(mask, 0, queries, queries, keys, device=q.device)
    return perturbed(softmax_weights(logits, allowed)[0], dropout, noise).to(q.dtype)


def as_partial(sums: tuple[Tensor, ...]) -> Partial:
    """A `Partial` of what `over_queries` made of `softmax_sums`."""
    num, den, log_scale = sums
    return Partial(num, den, log_scale)


def sums_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for half precision, the dtype itself otherwise."""
    return dtype if dtype == torch.float64 else torch.float32


def dense_as(mask: Mask, dtype: torch.dtype) -> Mask:
    """The mask with an additive part in `dtype`: what overflows there counts as closed."""
    if mask.dense is None or mask.dense.dtype in (torch.bool, dtype):
        return mask
    return replace(mask, dense=mask.dense.to(dtype))
