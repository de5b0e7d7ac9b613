"""Additive attention: scores of a small network instead of a dot product."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from subquad.attention.base import Absent, Capabilities, Cost, Info, Mechanism, State, Support
from subquad.attention.exact.engine import (
    KeyValueState,
    as_partial,
    clear,
    dense_as,
    over_queries,
    softmax_sums,
    sums_dtype,
)
from subquad.attention.masks import Mask
from subquad.attention.partial import Partial
from subquad.options import Config, integer_problem, number_problem

__all__ = ["Additive", "AdditiveConfig"]


@dataclasses.dataclass(frozen=True)
class AdditiveConfig(Config):
    """Options of `Additive`.

    Args:
        hidden: units of the scoring network, default the head's width D.
        dropout: probability with which an attention weight is dropped while training.
        weight_noise: amplitude of uniform noise on the weights while training.
    """

    mechanism: ClassVar[str] = "additive"

    hidden: int | None = None
    dropout: float = 0.0
    weight_noise: float = 0.0

    def problems(self) -> Iterator[str]:
        yield from number_problem("dropout", self.dropout, 0.0, 1.0)
        yield from number_problem("weight_noise", self.weight_noise, 0.0, 1.0)
        if self.hidden is not None:
            yield from integer_problem("hidden", self.hidden, 1)


class Additive(Mechanism):
    """Additive (Bahdanau) attention.

        s_ij  = scale · wᵀ tanh(W_q q_i + W_k k_j + b)                     scale = 1
        out_i = Σ_j exp(s_ij) v_j / Σ_j exp(s_ij)

    The parameters are learned: `query_weight` W_q and `key_weight` W_k (Hkv, hidden, D),
    `bias` b and `score_weight` w (Hkv, hidden). Each key/value head has its own, which the
    query heads of its group share. A constant added to s cancels, so there is no output
    bias, and the dot product's D^-½ has no place here: `scale` is 1 unless given.

    Cost: 3·L·S·hidden + 2·L·S·V FLOPs and L·S·hidden evaluations of tanh: not
    sub-quadratic, and slower than `softmax`. Memory is bounded by chunks of queries, 64 MiB
    or one query, forward and backward (chunks are computed again): O(S·hidden), never
    L×S×hidden. Sums are kept in float32 for half precision.

    Paper: Bahdanau, Cho, Bengio 2014, arXiv 1409.0473, section 3.1 and appendix A.1.2.

    Args:
        hidden: units of the scoring network, default D.
        dropout, weight_noise: of the weights, while training, as in `Softmax`.

    See `Mechanism` for sizes, shapes and what is raised.

    Example:
        >>> import torch, subquad as sq
        >>> mech = sq.build("additive", head_dim=16, num_heads=4, hidden=8)
        >>> q, k, v = torch.randn(1, 4, 3, 16), torch.randn(1, 4, 5, 16), torch.randn(1, 4, 5, 2)
        >>> mech(q, k, v).shape
        torch.Size([1, 4, 3, 2])
    """

    name = "additive"
    family = "exact"
    state_type = KeyValueState
    Config = AdditiveConfig
    config: AdditiveConfig
    info = Info(
        scale="1",
        summary="additive (Bahdanau) scores: a small network in place of the dot product",
        formula="out_i = Σ_j softmax_j(scale · wᵀ tanh(W_q q_i + W_k k_j + b)) v_j",
        cost=Cost(
            formula="O(L·S·(hidden+V)): not sub-quadratic",
            flops=lambda length, head_dim, value_dim, config: (
                length * length * (3.0 * _hidden(config, head_dim) + 2.0 * value_dim)
                + 4.0 * length * head_dim * _hidden(config, head_dim)
            ),
            # both projections, and what one query needs at least
            memory=lambda length, head_dim, value_dim, config: (
                3 * 4.0 * length * _hidden(config, head_dim)
            ),
        ),
        paper="Bahdanau, Cho, Bengio 2014, arXiv 1409.0473, section 3.1, appendix A.1.2",
        limit="is its own exact attention; approximates nothing",
        options={
            "hidden": "units of the scoring network, default the head's width D",
            "dropout": "probability with which a weight is dropped while training",
            "weight_noise": "amplitude of uniform noise that multiplies weights while training",
        },
        deviations="one scoring network a key/value head; the paper has one head",
        use="models that were trained with it (Bahdanau-style decoders), and queries and keys "
        "that no dot product compares well. It is quadratic.",
    )

    def __init__(self, *, device: Any = None, dtype: Any = None, **arguments: Any) -> None:
        super().__init__(device=device, dtype=dtype, **arguments)
        hidden = _hidden(self.config, self.head_dim)
        heads, width = self.num_kv_heads, self.head_dim
        factory = {"device": device, "dtype": dtype}
        self.query_weight = nn.Parameter(torch.empty(heads, hidden, width, **factory))
        self.key_weight = nn.Parameter(torch.empty(heads, hidden, width, **factory))
        self.bias = nn.Parameter(torch.empty(heads, hidden, **factory))
        self.score_weight = nn.Parameter(torch.empty(heads, hidden, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the parameters from the seed: the same ones on every device, in every dtype.

        Uniform within ±fan_in^-½ (D for W_q and W_k, hidden for w); b is zero.
        """
        generator = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for parameter in (self.query_weight, self.key_weight, self.score_weight):
                bound = 1.0 / math.sqrt(parameter.shape[-1])
                draw = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_((2.0 * draw - 1.0) * bound)
            self.bias.zero_()

    @classmethod
    def capabilities_for(cls, config: AdditiveConfig) -> Capabilities:
        draws = Absent("dropout and noise draw anew at every call while training")
        return Capabilities(
            prefix=True,
            segments=True,
            window=True,
            dense=True,
            state="growing",
            partial=True,
            deterministic=draws if config.dropout or config.weight_noise else True,
            compile=Absent("the number of query chunks depends on the length"),
            functional=Absent("its scoring network is learned"),
        )

    def _scale(self, scale: float | None) -> float:
        return 1.0 if scale is None else float(scale)

    def _sums(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float
    ) -> tuple[Tensor, ...]:
        """`softmax_sums` over keys and values that are zero where masked."""
        dtype = sums_dtype(q.dtype)
        mask = dense_as(mask, dtype)
        batch, heads, queries, _ = q.shape
        w_q, w_k, b, w = (
            parameter.to(dtype)
            for parameter in (self.query_weight, self.key_weight, self.bias, self.score_weight)
        )
        grouped = q.to(dtype).reshape(batch, k.shape[1], -1, q.shape[-1])
        from_q = grouped @ w_q.transpose(-1, -2) + b[:, None, :]
        from_q = from_q.reshape(batch, heads, queries, -1)
        from_k = k.to(dtype) @ w_k.transpose(-1, -2)
        size = batch * heads * k.shape[2] * from_q.shape[-1] * dtype.itemsize
        draws = (self.config.dropout, self.config.weight_noise) if self.training else (0.0, 0.0)
        function = functools.partial(_scored, w * scale, draws)
        return over_queries(function, from_q, from_k, v, mask, size, random=any(draws))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
        k, v = clear(k, v, mask)
        return self._sums(q, k, v, mask, scale)[0].to(q.dtype)

    def _partial(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Partial:
        k, v = clear(k, v, mask)
        return as_partial(self._sums(q, k, v, mask, scale))

    def _prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: KeyValueState | None,
        key_mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, State]:
        new = KeyValueState.extend(state, k, v, key_mask)
        sums = self._sums(q, new.k, new.v, Mask(causal=True, key=new.key), scale)
        return sums[0].to(q.dtype), new

    @classmethod
    def state_weights_for(cls, config: AdditiveConfig) -> Support:
        return True

    def _read_implied(self, q: Tensor, state: KeyValueState, scale: float) -> Tensor:
        return self._implied(q, state.k, Mask(key=state.key), scale)

    def _read(self, q: Tensor, state: KeyValueState, scale: float) -> Tensor:
        return self._sums(q, state.k, state.v, Mask(key=state.key), scale)[0].to(q.dtype)


def _hidden(config: AdditiveConfig, head_dim: int) -> int:
    return head_dim if config.hidden is None else config.hidden


def _scored(
    w: Tensor,
    draws: tuple[float, float],
    from_q: Tensor,
    from_k: Tensor,
    v: Tensor,
    allowed: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, ...]:
    batch, heads, rows, hidden = from_q.shape
    keys = from_k.shape[2]
    grouped = from_q.reshape(batch, from_k.shape[1], -1, 1, hidden)
    units = (grouped + from_k[:, :, None]).tanh_()  # (B, Hkv, G·l, s, hidden)
    logits = (units.flatten(2, 3) @ w[:, :, None]).reshape(batch, heads, rows, keys)
    return softmax_sums(logits, v, allowed, bias, *draws)
