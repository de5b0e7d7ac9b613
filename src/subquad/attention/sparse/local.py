"""Local attention: every query reads the keys in a window around it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from subquad.attention.base import Absent, Capabilities, Cost, Info, Mechanism, State
from subquad.attention.masks import Mask
from subquad.attention.partial import Partial
from subquad.attention.sparse.engine import Pattern, RingState, attend, computed_keys, partial
from subquad.options import Config, integer_problem

__all__ = ["Local", "LocalConfig", "window_sides"]


def window_sides(window: int | tuple[int, int]) -> tuple[int, int]:
    """(left, right) of a window option."""
    if isinstance(window, int):
        return window, window
    left, right = window
    return left, right


def window_problem(window: object) -> Iterator[str]:
    """Yields a problem when a window option is neither a count nor a pair of counts."""
    sides = window if isinstance(window, tuple | list) else (window,)
    counts = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in sides)
    if not counts or (isinstance(window, tuple | list) and len(window) != 2):
        yield f"window={window!r} must be an integer ≥ 0, or a pair [left, right] of them"


@dataclass(frozen=True)
class LocalConfig(Config):
    """Options of `Local`.

    Args:
        window: keys on each side beside the query's own position, an int or [left, right];
            a causal call has no right side.
        dilation: d, distance between two keys of the window.
    """

    mechanism: ClassVar[str] = "local"
    sizes: ClassVar[tuple[str, ...]] = ("window",)

    window: int | tuple[int, int] = 128
    dilation: int = 1

    def problems(self) -> Iterator[str]:
        yield from window_problem(self.window)
        yield from integer_problem("dilation", self.dilation, 1)


def _flops(length: int, head_dim: int, value_dim: int, config: LocalConfig) -> float:
    return 2.0 * length * computed_keys(*window_sides(config.window)) * (head_dim + value_dim)


def _memory(length: int, head_dim: int, value_dim: int, config: LocalConfig) -> float:
    # the log-sum-exp; dilation copies inputs and output in another order
    return 4.0 * length * (1 if config.dilation == 1 else 2 * (head_dim + value_dim))


class Local(Mechanism):
    """Softmax attention over a window of keys around each query.

        out_i = Σ_{j ∈ N(i)} exp(scale·q_i·k_j) v_j / Σ_{j ∈ N(i)} exp(scale·q_i·k_j)
        N(i) = {p_i + d·n : −left ≤ n ≤ right},   p_i = i + S − L

    Positions are aligned to the end where L ≠ S, as everywhere. Masked keys keep their place
    in the window; a query whose window holds no open key gives zeros. No length has to be a
    multiple of anything. Decoding keeps the last left·d keys and values, whatever the length.

    Cost: 2·L·(left + right + 64)·(D+V) FLOPs: queries are computed in blocks of 64 (128 for
    windows beyond 512 keys); O(L) memory beyond inputs and output, forward and backward.

    Papers: Liu et al. 2018, arXiv 1801.10198 (local attention); Beltagy et al. 2020,
    arXiv 2004.05150, §3.1 (sliding and dilated windows).

    Args:
        window: keys on each side, or [left, right].
        dilation: d.

    See `Mechanism` for sizes, shapes and what is raised.

    Example:
        >>> import torch, subquad as sq
        >>> q, k, v = (torch.randn(1, 8, 1000, 64) for _ in range(3))
        >>> mech = sq.build("local(window=2)", head_dim=64, num_heads=8)
        >>> mech(q, k, v).shape
        torch.Size([1, 8, 1000, 64])
        >>> mech.weights(q[:, :, :6], k[:, :, :6])[0, 0].count_nonzero(-1)
        tensor([3, 4, 5, 5, 4, 3])
    """

    name = "local"
    family = "sparse"
    state_type = RingState
    Config = LocalConfig
    config: LocalConfig
    info = Info(
        summary="softmax attention over a window of keys around each query",
        formula="out_i = Σ_{j ∈ N(i)} exp(scale·q_i·k_j) v_j / Σ_{j ∈ N(i)} exp(scale·q_i·k_j),  "
        "N(i) = {p_i + d·n : −left ≤ n ≤ right}",
        cost=Cost("O(L·w·(D+V))", _flops, _memory),
        paper="Liu et al. 2018, arXiv 1801.10198; Beltagy et al. 2020, arXiv 2004.05150, §3.1",
        limit="window ≥ L − 1 and dilation 1: softmax",
        options={
            "window": "keys on each side of the query's position, or [left, right]",
            "dilation": "d, distance between two keys of the window",
        },
        sample="local(window=5)",
        use="text, DNA or audio where what matters is near; as the exact near field of a hybrid. "
        "The fastest mechanism that is exact where it looks.",
        deviations="windows are exact to the token; papers and packages read whole blocks",
    )

    @classmethod
    def capabilities_for(cls, config: LocalConfig) -> Capabilities:
        return Capabilities(
            prefix=Absent("a prefix would be read from beyond the window"),
            segments=True,
            window=True,
            state="constant",
            partial=True,
            approximates="softmax",
            compact=Absent("masked tokens keep their place in the window"),
            read=Absent("the window of a query moves with it, the state holds the last one's"),
            reach="the last left·dilation tokens",
        )

    @property
    def pattern(self) -> Pattern:
        """Which keys are read."""
        left, right = window_sides(self.config.window)
        return Pattern(left, right, self.config.dilation)

    def reached(self, t: int, length: int) -> Iterable[int]:
        steps = self.config.dilation
        left, _ = window_sides(self.config.window)
        return range(t + steps, min(length, t + left * steps + 1), steps)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
        return attend(q, k, v, mask, self.pattern, scale)

    def _partial(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Partial:
        return partial(q, k, v, mask, self.pattern, scale)

    def _prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: Any,
        key_mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, State]:
        left, _ = window_sides(self.config.window)
        size = left * self.config.dilation
        both, new = RingState.extend(state, k, v, key_mask, size)
        mask = Mask(causal=True, key=both.key)
        return attend(q, both.k, both.v, mask, self.pattern, scale), new
