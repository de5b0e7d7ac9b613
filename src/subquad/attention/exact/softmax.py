"""Softmax attention: the exact, quadratic attention that the others approximate."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.attention.base import Absent, Capabilities, Cost, Info, Mechanism, State, Support
from subquad.attention.exact.engine import (
    KeyValueState,
    as_partial,
    clear,
    dense_as,
    explicit,
    fused,
    mask_rows,
    masked,
    matrix,
    over_queries,
    sums_dtype,
    wide,
)
from subquad.attention.masks import Mask
from subquad.attention.partial import Partial
from subquad.options import Config, number_problem

__all__ = ["Softmax", "SoftmaxConfig"]


@dataclasses.dataclass(frozen=True)
class SoftmaxConfig(Config):
    """Options of `Softmax`.

    Args:
        dropout: probability with which an attention weight is dropped while training.
        weight_noise: amplitude of uniform noise on the weights while training.
    """

    mechanism: ClassVar[str] = "softmax"

    dropout: float = 0.0
    weight_noise: float = 0.0

    def problems(self) -> Iterator[str]:
        yield from number_problem("dropout", self.dropout, 0.0, 1.0)
        yield from number_problem("weight_noise", self.weight_noise, 0.0, 1.0)


class Softmax(Mechanism):
    """Softmax attention, fused.

        out_i = Σ_j exp(scale·q_i·k_j) v_j / Σ_j exp(scale·q_i·k_j)        scale = D^-½

    Runs on `torch.nn.functional.scaled_dot_product_attention`, with what that function
    leaves open settled here:

    - A causal mask is aligned to the end where L ≠ S (there: to the start).
    - A row without any key gives zeros, and gradients of zero.
    - What masked keys and values contain never matters: they are replaced by zeros.
    - V ≠ D runs on the fused kernel too: the narrower one gets columns of zeros.
    - Causal with a key mask stays fused without an L×S mask: one more column, large and
      negative in k where a key is masked and constant in q, moves those logits out of reach.
    - All other masks are built for a chunk of queries at a time, 64 MiB at most, and only for
      keys within reach (a causal mask costs half, a window L·(window + chunk)). While
      gradients are wanted, chunks are computed again in the backward pass.

    Cost: 2·L·S·(D+V) FLOPs and O(L+S) memory beyond inputs and output. Dropout on CPU, as
    in torch, materialises the weights; noise does everywhere, a chunk of queries at a time.

    Paper: Vaswani et al. 2017, arXiv 1706.03762, eq. 1.

    Args:
        dropout: probability with which a weight is dropped while training, the remaining
            ones scaled by 1/(1 − dropout); exactly as in torch.
        weight_noise: while training each weight is multiplied by 1 + weight_noise·u, u uniform
            in [−1, 1]: the expected output is the output without.

    See `Mechanism` for sizes, shapes and what is raised.

    Example:
        >>> import torch, subquad as sq
        >>> mech = sq.build("softmax", head_dim=16, num_heads=4, num_kv_heads=2)
        >>> q, k, v = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 8)
        >>> mech(q, k, v, causal=True).shape
        torch.Size([1, 4, 3, 8])
        >>> mech.weights(q, k, causal=True)[0, 0].count_nonzero(-1)  # aligned to the end
        tensor([3, 4, 5])
    """

    name = "softmax"
    family = "exact"
    state_type = KeyValueState
    Config = SoftmaxConfig
    config: SoftmaxConfig
    info = Info(
        summary="exact softmax attention, fused",
        formula="out_i = Σ_j exp(scale·q_i·k_j) v_j / Σ_j exp(scale·q_i·k_j)",
        cost=Cost(
            formula="O(L·S·(D+V))",
            flops=lambda length, head_dim, value_dim, config: (
                2.0 * length * length * (head_dim + value_dim)
            ),
            # the fused kernel keeps one log-sum-exp a query
            memory=lambda length, head_dim, value_dim, config: 4.0 * length,
        ),
        paper="Vaswani et al. 2017, Attention Is All You Need, arXiv 1706.03762, eq. 1",
        limit="is the exact attention",
        options={
            "dropout": "probability with which a weight is dropped while training",
            "weight_noise": "amplitude of uniform noise that multiplies weights while training",
        },
        deviations="a row without any key gives zeros where the formula is 0/0",
        use="up to about a thousand tokens, and wherever exactness decides; every other mechanism "
        "is measured against it.",
    )

    @classmethod
    def capabilities_for(cls, config: SoftmaxConfig) -> Capabilities:
        draws = Absent("dropout and noise draw anew at every call while training")
        return Capabilities(
            prefix=True,
            segments=True,
            window=True,
            dense=True,
            state="growing",
            partial=True,
            deterministic=draws if config.dropout or config.weight_noise else True,
        )

    @classmethod
    def outside_for(cls, config: SoftmaxConfig) -> Support:
        return True

    @property
    def dropout(self) -> float:
        """The probability in force: zero in evaluation mode."""
        return self.config.dropout if self.training else 0.0

    @property
    def noise(self) -> float:
        """The amplitude in force: zero in evaluation mode."""
        return self.config.weight_noise if self.training else 0.0

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
        mask = dense_as(mask, q.dtype)
        k, v = clear(k, v, mask)
        return self._cleared(q, k, v, mask, scale)

    def _cleared(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
        """Attention over keys and values that are zero where masked."""
        if self.noise:  # no fused kernel multiplies the weights
            return self._sums(q, k, v, mask, scale)[0].to(q.dtype)
        queries, keys = q.shape[2], k.shape[2]
        if scale < 0:  # the fused causal kernel masks first: −∞ would turn to +∞
            q, scale = -q, -scale
        if mask.causal and queries == 1 and mask.window is None:
            mask = replace(mask, causal=False, prefix=None)  # the last query reads every key
        kinds = set(mask.kinds())
        run = functools.partial(fused, scale=scale, dropout=self.dropout)
        too_wide = wide(q, v)
        if kinds <= {"key"} and not too_wide:
            # Rows without any key may read all of them: these are zeros.
            opened = None
            if mask.key is not None:
                opened = (mask.key | ~mask.key.any(-1, keepdim=True))[:, None, None, :]
            return run(q, k, v, opened)
        # Too small a scale would not move the masked keys' logits far enough.
        if kinds <= {"causal", "key"} and queries >= keys and not too_wide and scale > 2.0**-10:
            ahead = queries - keys  # these queries precede every key
            q = q[:, :, ahead:]
            if mask.key is not None:
                q, k = _columns(q, k, mask.key)
            out = run(q, k, v, None, causal=True)
            return F.pad(out, (0, 0, ahead, 0)) if ahead else out
        batch, heads = q.shape[:2] if too_wide else mask_rows(mask, len(q))
        size = batch * heads * keys * q.element_size()
        (out,) = over_queries(
            functools.partial(masked, run), q, k, v, mask, size, random=self.dropout > 0
        )
        return out

    def _partial(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Partial:
        mask = dense_as(mask, sums_dtype(q.dtype))
        k, v = clear(k, v, mask)
        return as_partial(self._sums(q, k, v, mask, scale))

    def _sums(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float
    ) -> tuple[Tensor, ...]:
        """`softmax_sums` over keys and values that are zero where masked."""
        dtype, dropout, noise = sums_dtype(q.dtype), self.dropout, self.noise
        size = 8 * q.shape[0] * q.shape[1] * k.shape[2] * dtype.itemsize
        function = functools.partial(
            explicit, scale=scale, dtype=dtype, dropout=dropout, noise=noise
        )
        return over_queries(function, q, k, v, mask, size, random=bool(dropout or noise))

    def _prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: KeyValueState | None,
        key_mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, State]:
        new = KeyValueState.extend(state, k, v, key_mask, grows=True)
        return self._cleared(q, new.k, new.v, Mask(causal=True, key=new.key), scale), new

    def _implied(self, q: Tensor, k: Tensor, mask: Mask, scale: float) -> Tensor:
        return matrix(q, k, mask, scale, self.dropout, self.noise)

    @classmethod
    def state_weights_for(cls, config: SoftmaxConfig) -> Support:
        return True

    def _read_implied(self, q: Tensor, state: KeyValueState, scale: float) -> Tensor:
        return self._implied(q, state.k, Mask(key=state.key), scale)

    def _read(self, q: Tensor, state: KeyValueState, scale: float) -> Tensor:
        return self._cleared(q, state.k, state.v, Mask(key=state.key), scale)


def _columns(q: Tensor, k: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """q and k with a column whose product is 0 for open keys and −huge for masked ones.

    exp(−huge − row max) is 0 in every dtype, so this equals a mask. In a row without any
    open key the masked ones get all the weight: their values are zeros.
    """
    huge = 2.0 ** (15 if q.dtype == torch.float16 else 40)  # exact in its dtype, and its square
    column = torch.zeros_like(key, dtype=k.dtype).masked_fill(~key, -huge)
    column = column[:, None, :, None].expand(-1, k.shape[1], -1, -1)
    return F.pad(q, (0, 1), value=huge), torch.cat([k, column], -1)
