"""Memory-compressed attention: a strided convolution shortens keys and values."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from subquad.attention.base import (
    Absent,
    Capabilities,
    Cost,
    Info,
    Mechanism,
    State,
    continued,
)
from subquad.attention.exact.engine import CHUNK_BYTES, clear, fused, masked, sums_dtype, wide
from subquad.attention.masks import Mask
from subquad.attention.summary.engine import summary_attention
from subquad.kernels.transforms import recomputes
from subquad.options import Config, choice_problem, flag_problem, integer_problem

__all__ = ["Compressed", "CompressedConfig", "CompressedState"]

CHUNK_ROWS = 512
"""Queries of a causal chunk: its mask and its copy of the keys in reach stay small."""


@dataclass(frozen=True)
class CompressedConfig(Config):
    """Options of `Compressed`.

    Args:
        stride: s, keys between the ends of two summaries: S keys become ⌈S/s⌉.
        kernel: keys that one summary reads, at least s; default s.
        conv: "full" (each tap is a D×D matrix, as in the paper), "depthwise" (a factor for each
            channel) or "shared" (one factor for all channels of a head).
        current: causal queries also read, exactly, the tokens of the block not yet complete.
        query_stride: keeps every query_stride-th query only, so that the output is shorter.
    """

    mechanism: ClassVar[str] = "compressed"

    stride: int = 3
    kernel: int | None = None
    conv: str = "full"
    current: bool = True
    query_stride: int = 1

    def problems(self) -> Iterator[str]:
        stride = list(integer_problem("stride", self.stride, 1))
        yield from stride
        if self.kernel is not None:
            kernel = list(integer_problem("kernel", self.kernel, 1))
            yield from kernel
            if not stride and not kernel and self.kernel < self.stride:
                yield (
                    f"kernel={self.kernel} must be ≥ stride={self.stride}: "
                    "keys between two windows would never be read"
                )
        yield from choice_problem("conv", self.conv, ("full", "depthwise", "shared"))
        yield from flag_problem("current", self.current)
        yield from integer_problem("query_stride", self.query_stride, 1)

    @property
    def width(self) -> int:
        """Taps of the kernel."""
        return self.stride if self.kernel is None else self.kernel


@dataclass(frozen=True, eq=False)
class CompressedState(State):
    """Summaries of all complete blocks, and the tokens that later ones still need.

    Args:
        k: (B, Hkv, K, D) summary keys, K = ⌊length/s⌋, in float32 or float64.
        v: (B, Hkv, K, V) summary values.
        present: (B, K) bool, False where no key of a window is open; None: all are.
        k_tail: (B, Hkv, T, D) the last keys, zero where masked, T < kernel + stride.
        v_tail: (B, Hkv, T, V) the last values.
        key: (B, T) bool, True = attend; None: all.
        length: tokens seen, masked ones included.
    """

    k: Tensor
    v: Tensor
    present: Tensor | None
    k_tail: Tensor
    v_tail: Tensor
    key: Tensor | None
    length: int


def _flops(length: int, head_dim: int, value_dim: int, config: CompressedConfig) -> float:
    rows, summaries = length / config.query_stride, length / config.stride
    taps = summaries * config.width
    per_tap = {"full": head_dim**2 + value_dim**2}.get(config.conv, head_dim + value_dim)
    return 2.0 * rows * summaries * (head_dim + value_dim) + 2.0 * taps * per_tap


def _memory(length: int, head_dim: int, value_dim: int, config: CompressedConfig) -> float:
    summaries = length / config.stride
    return 4.0 * (summaries * (head_dim + value_dim) + min(length, CHUNK_ROWS) * summaries)


class Compressed(Mechanism):
    """Softmax attention over keys and values that a strided convolution has shortened.

        k̃_m = Σ_t W_t k_{(m+1)s − w + t},  ṽ_m = Σ_t U_t v_{(m+1)s − w + t},  t = 0 … w − 1
        out_i = Σ_m softmax_m(scale·q_i·k̃_m) ṽ_m

    s is the stride, w ≥ s the kernel. Summary m ends with its block of s tokens, at (m+1)s − 1;
    positions before the first and behind the last token count as zeros, as do masked keys; a
    summary whose window holds no key is left out.

    Causal by blocks: query i reads the summaries of complete blocks, those that end at or
    before i, and with ``current=true`` the tokens of the block that i has not completed, each
    exactly, in the same softmax: every token up to i is read once or, with w > s, more often.
    With ``current=false`` a query before the end of the first block reads nothing and gives
    zeros. Not causal, all ⌈S/s⌉ summaries are read and no token by itself.

    Cost 2·L·(S/s)·(D+V) FLOPs, half of it causal: **quadratic**, by a factor of s less than
    softmax. Memory O(S/s·(D+V)) and masks of 64 MiB at most. The state grows by (D+V)/s
    numbers a token and key/value head.

    The weights start as means, W_t = U_t = I/w, so that it can be used untrained.

    Paper: Liu et al. 2018, arXiv 1801.10198, section 4.2.3 (kernel and stride of 3).
    Deviations: convolutions are those of each key/value head, without bias (one on keys would
    cancel in the softmax); causal rows and `current` as above.

    Args:
        stride, kernel, conv, current, query_stride: see `CompressedConfig`.

    Raises:
        OptionError: for wrong options.

    See `Mechanism` for sizes, shapes and what else is raised. With `query_stride` r the output
    has ⌈L/r⌉ rows, those of the queries 0, r, 2r, ….

    Example:
        >>> import torch, subquad as sq
        >>> mech = sq.build("compressed", head_dim=16, num_heads=4, stride=4)
        >>> x = torch.randn(2, 4, 50, 16)
        >>> mech(x, x, x, causal=True).shape
        torch.Size([2, 4, 50, 16])
        >>> mech = sq.build("compressed", head_dim=16, num_heads=4, query_stride=4)
        >>> mech(x, x, x).shape
        torch.Size([2, 4, 13, 16])
    """

    name = "compressed"
    family = "summary"
    state_type = CompressedState
    Config = CompressedConfig
    config: CompressedConfig
    key_weight: nn.Parameter
    value_weight: nn.Parameter
    info = Info(
        summary="softmax over keys and values shortened by a strided convolution",
        formula="out_i = Σ_m softmax_m(scale·q_i·k̃_m) ṽ_m,  k̃ = conv(k), ṽ = conv(v) of stride s",
        cost=Cost("O(L²/s·(D+V))", _flops, _memory),
        paper="Liu et al. 2018, Generating Wikipedia by Summarizing Long Sequences, "
        "arXiv 1801.10198, section 4.2.3",
        limit="softmax attention at stride=1 with the weights that it starts from",
        options={
            "stride": "s, keys between the ends of two summaries",
            "kernel": "keys that one summary reads, at least s; default s",
            "conv": "full (a matrix for each tap), depthwise or shared (a number for each tap)",
            "current": "causal queries read the tokens of their unfinished block exactly",
            "query_stride": "keeps every query_stride-th query only",
        },
        deviations="no bias; causal queries read complete blocks only, and with current=true the "
        "tokens since; a row without any key gives zeros",
        sample="compressed(stride=3, conv=shared)",
        use="moderately long sequences, where a factor of `stride` is enough and order within a "
        "stride does not matter; it stays quadratic.",
    )

    def __init__(
        self,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **sizes: Any,
    ) -> None:
        super().__init__(device=device, dtype=dtype, **sizes)
        conv = self.config.conv
        if conv != "shared" and self.value_dim is None:
            self.value_dim = self.head_dim
        for name, width in (("key_weight", self.head_dim), ("value_weight", self.value_dim)):
            channels = {"full": (width, width), "depthwise": (width,), "shared": ()}[conv]
            shape = (self.num_kv_heads, self.config.width, *channels)
            self.register_parameter(
                name,
                nn.Parameter(torch.empty(shape, device=device, dtype=dtype)),  # type: ignore[arg-type]  # set above
            )
        self.reset_parameters()

    @classmethod
    def capabilities_for(cls, config: CompressedConfig) -> Capabilities:
        blocks = Absent("a summary mixes the keys of its window: it cannot be read in part")
        fewer = Absent("query_stride > 1 keeps only some queries: the output has ⌈L/stride⌉ rows")
        whole = config.query_stride == 1
        return Capabilities(
            prefix=blocks,
            segments=blocks,
            window=blocks,
            state="growing" if whole else fewer,
            partial=Absent("windows lie at positions: parts of the keys would be cut elsewhere"),
            weights=True
            if config.conv == "shared"
            else Absent("channels of the values are filtered apart: no one matrix holds for all"),
            compile=Absent("causal chunks are counted in Python, and recompile for each length"),
            functional=Absent("its convolutions are learned parameters"),
            compact=Absent("blocks go by position: closing a gap moves all that follow"),
            full_length=True if whole else fewer,
            reach="all past tokens"
            if config.current
            else "queries at or behind the end of the token's block",
        )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Sets every tap to 1/w, or the identity over w: each summary is its window's mean."""
        for weight in (self.key_weight, self.value_weight):
            if weight.is_meta:
                continue
            tap = 1.0 / self.config.width
            if self.config.conv == "full":
                eye = torch.eye(weight.shape[-1], device=weight.device, dtype=weight.dtype)
                weight.copy_((tap * eye).expand_as(weight))
            else:
                weight.fill_(tap)

    def reached(self, t: int, length: int) -> Iterable[int]:
        """Later queries that read t: all, or with ``current=false`` from its block's end on."""
        if self.config.current:
            return range(t + 1, length)
        end = (t // self.config.stride + 1) * self.config.stride - 1
        return range(max(t + 1, end), length)

    # ---- calls ---------------------------------------------------------------------------

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
        k, v = clear(k, v, mask)
        queries, keys, stride = q.shape[2], k.shape[2], self.config.stride
        q = q[:, :, :: self.config.query_stride]
        count = keys // stride if mask.causal else -(-keys // stride)
        summaries = self._summaries(k, v, mask.key, 0, 0, count)
        if mask.causal:
            raw = (k, v, mask.key, 0)
            return self._causal(q, keys - queries, *summaries, raw, scale)
        return self._all(q, *summaries, scale)

    def _prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: CompressedState | None,
        key_mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, State]:
        k, v = clear(k, v, Mask(key=key_mask))
        stride, seen, base = self.config.stride, 0, 0
        key, more = key_mask, k.shape[2]
        summaries: tuple[Tensor, Tensor, Tensor | None] | None = None
        if state is not None:
            seen, base = state.length, state.length - state.k_tail.shape[2]
            key = _join(state.key, key_mask, len(k), state.k_tail.shape[2], more, k.device)
            k, v = continued("k", state.k_tail, k), continued("v", state.v_tail, v)
            present = state.present
            if key is not None and present is None:  # all was open before the first key mask
                present = torch.ones(len(k), state.k.shape[2], dtype=torch.bool, device=k.device)
            summaries = state.k, state.v, present
        length = seen + more
        done, count = seen // stride, length // stride
        if summaries is None or count > done:
            new = self._summaries(k, v, key, base, done, count)
            summaries = new if summaries is None else _extend(summaries, new)
        out = self._causal(q, length - q.shape[2], *summaries, (k, v, key, base), scale)
        first = max(0, count * stride - (self.config.width - stride)) - base
        # Copies: a slice would keep all tokens of the call in memory.
        tail = k[:, :, first:].clone(), v[:, :, first:].clone()
        kept = CompressedState(
            *summaries, *tail, None if key is None else key[:, first:].clone(), length
        )
        return out, kept

    def _read(self, q: Tensor, state: CompressedState, scale: float) -> Tensor:
        stride, length = self.config.stride, state.length
        summaries = state.k, state.v, state.present
        if length % stride:
            base = length - state.k_tail.shape[2]
            done = length // stride
            last = self._summaries(state.k_tail, state.v_tail, state.key, base, done, done + 1)
            summaries = _extend(summaries, last)
        return self._all(q, *summaries, scale)

    # ---- summaries -----------------------------------------------------------------------

    def _summaries(
        self, k: Tensor, v: Tensor, key: Tensor | None, base: int, first: int, last: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """k̃, ṽ of blocks [first, last) and which are present; k, v start at position `base`."""
        present = None
        if key is not None:
            taps = self._taps(key[:, None, :, None], base, first, last)
            present = functools.reduce(torch.logical_or, taps)[:, 0, :, 0]
        return (
            self._convolved(self._taps(k, base, first, last), self.key_weight),
            self._convolved(self._taps(v, base, first, last), self.value_weight),
            present,
        )

    def _taps(self, x: Tensor, base: int, first: int, last: int) -> list[Tensor]:
        """For each tap t the tokens (B, ·, last − first, ·) under it; zeros outside of x."""
        stride, width = self.config.stride, self.config.width
        start = (first + 1) * stride - width - base
        stop = last * stride - base
        x = F.pad(
            x[:, :, max(start, 0) : max(stop, 0)],
            (0, 0, max(-start, 0), max(stop - x.shape[2], 0)),
        )
        span = max(last - first - 1, 0) * stride + 1
        return [x[:, :, t : t + span : stride][:, :, : last - first] for t in range(width)]

    def _convolved(self, taps: list[Tensor], weight: Tensor) -> Tensor:
        dtype = sums_dtype(torch.promote_types(taps[0].dtype, weight.dtype))
        weight = weight.to(dtype)
        total: Tensor | None = None
        for t, tap in enumerate(taps):
            tap, factor = tap.to(dtype), weight[:, t]
            if self.config.conv == "full":
                part = tap @ factor.mT
            elif self.config.conv == "depthwise":
                part = tap * factor[:, None]
            else:
                part = tap * factor[:, None, None]
            total = part if total is None else total + part
        assert total is not None, "a kernel has taps"
        return total

    def _all(self, q: Tensor, k: Tensor, v: Tensor, present: Tensor | None, scale: float) -> Tensor:
        opened = None if present is None else present[:, None]
        return summary_attention(q, k.to(q.dtype), v.to(q.dtype), scale, present=opened)

    def _causal(
        self,
        q: Tensor,
        position: int,
        k: Tensor,
        v: Tensor,
        present: Tensor | None,
        raw: tuple[Tensor, Tensor, Tensor | None, int],
        scale: float,
    ) -> Tensor:
        """Queries from `position` on over complete blocks and, as asked, the tokens since."""
        step = self.config.query_stride
        early = min(q.shape[2], max(0, -(position // step)))  # these precede every key
        if early:
            zeros = q.new_zeros(*q.shape[:2], early, v.shape[-1])
            if early == q.shape[2]:
                return zeros + q[:, :, :0].sum()  # zero, with a graph
            rest = self._causal(q[:, :, early:], position + early * step, k, v, present, raw, scale)
            return torch.cat([zeros, rest], 2)
        k, v = k.to(q.dtype), v.to(q.dtype)
        key = raw[2]
        rows_apart, too_wide = (len(q) if key is not None else 1), wide(q, v)
        heads = q.shape[1] if too_wide else 1
        width = max(1, k.shape[2] + self.config.stride) * q.element_size()
        apart = (len(q) if too_wide else rows_apart) * heads
        rows = max(1, min(CHUNK_ROWS, CHUNK_BYTES // (apart * width)))
        edges = [(start, min(q.shape[2], start + rows)) for start in range(0, q.shape[2], rows)]
        # Each chunk copies the keys in its reach: too much to keep, where it is more than this.
        kept = len(edges) * width * (apart * rows + k.shape[0] * k.shape[1] * 2 * q.shape[-1])
        again = recomputes() and kept > 2 * CHUNK_BYTES
        parts = []
        for start, stop in reversed(edges):  # longest first: what they free serves the others
            run = functools.partial(
                self._chunk, position=position + start * step, present=present, scale=scale,
                raw=raw,
            )  # fmt: skip
            chunk = q[:, :, start:stop]
            parts.append(
                checkpoint(run, chunk, k, v, use_reentrant=False, preserve_rng_state=False)
                if again
                else run(chunk, k, v)
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts[::-1], 2)

    def _chunk(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        position: int,
        present: Tensor | None,
        raw: tuple[Tensor, Tensor, Tensor | None, int],
        scale: float,
    ) -> Tensor:
        stride, step = self.config.stride, self.config.query_stride
        tokens_k, tokens_v, key, base = raw
        last = position + (q.shape[2] - 1) * step
        blocks = (last + 1) // stride
        # From the start of the first query's unfinished block; one token at least, for shapes.
        first, stop = (position + 1) // stride * stride, last + 1
        if not self.config.current or first >= stop:
            first, stop = last, last + (blocks == 0)
        at = position + step * torch.arange(q.shape[2], device=q.device)[:, None]
        complete = (at + 1) // stride
        token = torch.arange(first, stop, device=q.device)
        allowed = torch.arange(blocks, device=q.device) < complete
        recent = (token >= complete * stride) & (token <= at)
        if not self.config.current:
            recent = torch.zeros_like(recent)
        if key is not None:
            assert present is not None, "windows of masked keys know which are open"
            allowed = allowed & present[:, None, :blocks]
            recent = recent & key[:, None, first - base : stop - base]
        allowed = torch.cat([allowed, recent], -1)
        window = slice(first - base, stop - base)
        keys = torch.cat([k[:, :, :blocks], tokens_k[:, :, window]], 2)
        values = torch.cat([v[:, :, :blocks], tokens_v[:, :, window]], 2)
        allowed = allowed[:, None] if allowed.dim() == 3 else allowed[None, None]
        run = functools.partial(fused, scale=scale)
        return masked(run, q, keys, values, allowed, None)[0]


def _join(
    old: Tensor | None, new: Tensor | None, batch: int, before: int, after: int,
    device: torch.device,
) -> Tensor | None:  # fmt: skip
    """Two bool masks (B, ·) one behind the other, None standing for all True."""
    if old is None and new is None:
        return None
    if old is None:
        old = torch.ones(batch, before, dtype=torch.bool, device=device)
    if new is None:
        new = torch.ones(batch, after, dtype=torch.bool, device=device)
    return torch.cat([old, new], 1)


def _extend(
    old: tuple[Tensor, Tensor, Tensor | None], new: tuple[Tensor, Tensor, Tensor | None]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Summaries followed by new ones."""
    k, v = torch.cat([old[0], new[0]], 2), torch.cat([old[1], new[1]], 2)
    counts = old[0].shape[2], new[0].shape[2]
    return k, v, _join(old[2], new[2], len(k), *counts, k.device)
