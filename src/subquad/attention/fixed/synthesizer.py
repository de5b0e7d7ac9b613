"""Synthesizer: attention logits from the query alone, or from positions alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from subquad.attention.base import Absent, Capabilities, Cost, Info, Mechanism, State, own_device
from subquad.attention.exact.engine import (
    KeyValueState,
    as_partial,
    clear,
    dense_as,
    over_queries,
    softmax_sums,
    sums_dtype,
)
from subquad.attention.exact.softmax import Softmax
from subquad.attention.masks import Mask
from subquad.attention.partial import Partial
from subquad.errors import OptionError, ShapeError
from subquad.options import (
    Config,
    choice_problem,
    flag_problem,
    idle_problem,
    integer_problem,
    number_problem,
)

__all__ = ["Synthesizer", "SynthesizerConfig"]

PRODUCTS = ("dense", "factorised_random", "dot")
"""Kinds whose logits are products of a row and a column, whose mixtures are too: what runs on the
fused kernel, as a dot product of concatenated vectors."""
KINDS = (*PRODUCTS, "factorised_dense", "random")
READERS = {
    "hidden": ("dense", "factorised_dense"),
    "factors": ("factorised_dense",),
    "rank": ("factorised_random",),
    "trainable": ("random", "factorised_random"),
}
"""The kinds that read an option."""


@dataclass(frozen=True)
class SynthesizerConfig(Config):
    """Options of `Synthesizer`.

    Args:
        kinds: what the logits are made of, one kind or a list: "dense", "factorised_dense",
            "random", "factorised_random", "dot" (the dot product). Several are mixed with
            learned weights α that sum to one.
        hidden: units of the network of dense and factorised_dense, default the head's width D.
        factors: (a, b) of factorised_dense, a·b ≥ max_length; default the least square.
        rank: columns of the two factors of factorised_random; 8 in the paper.
        trainable: whether the logits of random and factorised_random are learned, or stay as
            they were drawn.
        dropout: probability with which an attention weight is dropped while training.
        weight_noise: amplitude of uniform noise on the weights while training.
    """

    mechanism: ClassVar[str] = "synthesizer"

    kinds: tuple[str, ...] = ("dense",)
    hidden: int | None = None
    factors: tuple[int, int] | None = None
    rank: int = 8
    trainable: bool = True
    dropout: float = 0.0
    weight_noise: float = 0.0

    def __post_init__(self) -> None:
        kinds: Any = self.kinds
        factors: Any = self.factors
        if not isinstance(kinds, tuple):
            kinds = tuple(kinds) if isinstance(kinds, list) else (kinds,)
            object.__setattr__(self, "kinds", kinds)
        if isinstance(factors, list):
            object.__setattr__(self, "factors", tuple(factors))
        super().__post_init__()

    def problems(self) -> Iterator[str]:
        for kind in self.kinds:
            yield from choice_problem("kinds", kind, KINDS)
        if not self.kinds or len(set(map(str, self.kinds))) < len(self.kinds):
            yield f"kinds={list(self.kinds)} must name at least one kind, each once"
        if self.hidden is not None:
            yield from integer_problem("hidden", self.hidden, 1)
        factors: Any = self.factors
        if factors is not None and not (
            isinstance(factors, tuple)
            and len(factors) == 2
            and all(type(size) is int and size > 0 for size in factors)
        ):
            yield f"factors={factors!r} must be two integers ≥ 1, [a, b]"
        yield from integer_problem("rank", self.rank, 1)
        yield from flag_problem("trainable", self.trainable)
        yield from number_problem("dropout", self.dropout, 0.0, 1.0)
        yield from number_problem("weight_noise", self.weight_noise, 0.0, 1.0)
        yield from idle_problem(self, "kinds", self.kinds, READERS)

    def factors_for(self, length: int) -> tuple[int, int]:
        """(a, b) of factorised_dense for sequences of at most `length` tokens."""
        if self.factors is not None:
            return self.factors
        side = math.isqrt(length - 1) + 1
        return side, -(-length // side)


def _per_pair(head_dim: int, config: SynthesizerConfig) -> float:
    """Multiply-adds for one query and one key, of the logits."""
    hidden = head_dim if config.hidden is None else config.hidden
    costs = {
        "dense": hidden + 1,
        "factorised_dense": 1,
        "random": 1,
        "factorised_random": config.rank,
        "dot": head_dim,
    }
    return float(sum(costs[kind] for kind in config.kinds))


def _flops(length: int, head_dim: int, value_dim: int, config: SynthesizerConfig) -> float:
    return 2.0 * length * length * (_per_pair(head_dim, config) + value_dim)


def _memory(length: int, head_dim: int, value_dim: int, config: SynthesizerConfig) -> float:
    features = 8.0 * length * _per_pair(head_dim, config)
    return features + (4.0 * length * length if "random" in config.kinds else 0.0)


class Synthesizer(Mechanism):
    """Softmax attention whose logits come from the query alone, or from positions alone.

        out_i = Σ_j softmax_j(Σ_n α_n s_n,ij) v_j,   α = softmax(mixture)

    - dense: s_ij = (W2 relu(W1 q_i + b1) + b2)_j, a network with max_length outputs. Parameters
      `hidden_weight` W1 (Hkv, hidden, D), `column_weight` W2 (Hkv, max_length, hidden), biases.
    - factorised_dense: s_ij = A_i[⌊j/b⌋]·B_i[j mod b], two such networks with a and b outputs,
      a·b ≥ max_length. They share the hidden layer.
    - random: s_ij = R_ij, `random_logits` (Hkv, max_length, max_length).
    - factorised_random: R = R1 R2ᵀ, `random_rows` and `random_columns` (Hkv, max_length, rank).
    - dot: s_ij = scale·q_i·k_j, scale = D^-½. Only this kind reads k, and only it is scaled.

    `mixture` (Hkv, number of kinds) is learned and starts at zero: equal parts. Each key/value
    head has its own parameters, which the query heads of its group share.

    The logits go by positions: a key has the column of its position j. Where L ≠ S, random
    kinds let both sequences end at one place: the last query has the row of the last key, and the
    longer sequence starts at row or column 0. Dense kinds have columns only, so that queries of
    another sequence (cross-attention) mean what they say; of random kinds it cannot be said.

    Cost: O(L·S·(hidden+V)), not sub-quadratic: what is saved is the product with k. Logits of
    dense, factorised_random, dot and their mixtures are dot products of concatenated vectors, for
    the fused kernel; others come in chunks of queries that are computed again in the backward
    pass. No L×S matrix is kept, but for that of random, which is a parameter. Logits and sums are
    float32 for half precision.

    Paper: Tay et al. 2020, arXiv 2005.00743, section 3. Its networks read the layer's
    input, ours the head's query. Networks start uniform within ±fan_in^-½, random logits with
    variance 1.

    Args:
        kinds, hidden, factors, rank, trainable, dropout, weight_noise: see `SynthesizerConfig`.

    Raises:
        OptionError: without `max_length` (but for ``kinds=dot``), or for wrong options.
        ShapeError: for more than `max_length` keys, or queries of random kinds.

    See `Mechanism` for sizes and shapes.

    Example:
        >>> import torch, subquad as sq
        >>> mech = sq.build(
        ...     "synthesizer(kinds=[factorised_random, dot])",
        ...     head_dim=8,
        ...     num_heads=2,
        ...     max_length=64,
        ... )
        >>> q, k, v = (torch.randn(1, 2, 50, 8) for _ in range(3))
        >>> mech(q, k, v, causal=True).shape, mech.mixing_weights()
        (torch.Size([1, 2, 50, 8]), tensor([[0.5000, 0.5000],
                [0.5000, 0.5000]], grad_fn=<SoftmaxBackward0>))
    """

    name = "synthesizer"
    family = "fixed"
    state_type = KeyValueState
    Config = SynthesizerConfig
    config: SynthesizerConfig
    info = Info(
        scale="D^-½, of the dot product alone,",
        summary="attention logits from a network of the query, or learned for pairs of positions",
        formula="out_i = Σ_j softmax_j(Σ_n α_n s_n,ij) v_j,  s = W2 relu(W1 q_i), R, R1 R2ᵀ, "
        "scale·q_i·k_j",
        cost=Cost("O(L·S·(hidden+V)): not sub-quadratic", _flops, _memory),
        paper="Tay et al. 2020, Synthesizer: Rethinking Self-Attention in Transformer Models, "
        "arXiv 2005.00743, section 3",
        limit="is its own exact form; kinds=dot is softmax attention, random with R = 0 uniform",
        options={
            "kinds": "dense, factorised_dense, random, factorised_random, dot: one, or a list that "
            "is mixed with learned weights",
            "hidden": "units of the network of dense kinds, default the head's width D",
            "factors": "[a, b] of factorised_dense, a·b ≥ max_length; none: the least square",
            "rank": "of the two factors of factorised_random",
            "trainable": "whether random logits are learned or stay as drawn",
            "dropout": "probability with which a weight is dropped while training",
            "weight_noise": "amplitude of uniform noise that multiplies weights while training",
        },
        deviations="networks read the head's query, not the layer's input; both factors of "
        "factorised_dense share the hidden layer and meet each pair once; one set of parameters a "
        "key/value head; a row without any key gives zeros",
        use="to learn how much of attention a task needs: models of short, fixed length trained "
        "from scratch, alone or mixed with the dot product. It is quadratic, and without dot it "
        "cannot look up a token by its content.",
    )

    def __init__(
        self,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **sizes: Any,
    ) -> None:
        super().__init__(device=device, dtype=dtype, **sizes)
        config, heads, length = self.config, self.num_kv_heads, self.max_length or 1
        hidden = self.head_dim if config.hidden is None else config.hidden
        self.factors = config.factors_for(length)
        if "factorised_dense" in config.kinds and math.prod(self.factors) < length:
            raise OptionError(
                f"synthesizer: factors={list(self.factors)} give {math.prod(self.factors)} "
                f"columns, max_length={length} needs as many"
            )
        first, second = self.factors
        shapes: dict[str, dict[str, tuple[int, ...]]] = {
            "dense": {
                "hidden_weight": (hidden, self.head_dim),
                "hidden_bias": (hidden,),
                "column_weight": (length, hidden),
                "column_bias": (length,),
            },
            "factorised_dense": {
                "factor_hidden_weight": (hidden, self.head_dim),
                "factor_hidden_bias": (hidden,),
                "first_weight": (first, hidden),
                "first_bias": (first,),
                "second_weight": (second, hidden),
                "second_bias": (second,),
            },
            "random": {"random_logits": (length, length)},
            "factorised_random": {
                "random_rows": (length, config.rank),
                "random_columns": (length, config.rank),
            },
            "dot": {},
        }
        for kind in config.kinds:
            for name, shape in shapes[kind].items():
                empty = torch.empty(heads, *shape, device=device, dtype=dtype)
                if name.startswith("random") and not config.trainable:
                    self.register_buffer(name, empty)
                else:
                    self.register_parameter(name, nn.Parameter(empty))
        if len(config.kinds) > 1:
            empty = torch.empty(heads, len(config.kinds), device=device, dtype=dtype)
            self.register_parameter("mixture", nn.Parameter(empty))
        self.exact: Softmax | None = None
        if set(config.kinds) <= set(PRODUCTS):
            self.exact = Softmax(
                head_dim=self.head_dim,
                num_heads=self.num_heads,
                num_kv_heads=heads,
                dropout=config.dropout,
                weight_noise=config.weight_noise,
            )
        self.reset_parameters()

    @classmethod
    def capabilities_for(cls, config: SynthesizerConfig) -> Capabilities:
        placed = any("random" in kind for kind in config.kinds)
        exact = config.kinds == ("dot",)
        draws = Absent("dropout and noise draw anew at every call while training")
        return Capabilities(
            prefix=True,
            segments=True,
            window=True,
            dense=True,
            state="growing",
            read=Absent("random logits go by the query's position in the keys' sequence")
            if placed
            else True,
            partial=True,
            compile=True
            if set(config.kinds) <= set(PRODUCTS)
            else Absent("the number of query chunks depends on the length"),
            max_length=not exact,
            functional=True if exact else Absent("its logits are learned for max_length columns"),
            compact=True
            if exact
            else Absent("a key has its position's column: closing a gap moves all that follow"),
            deterministic=draws if config.dropout or config.weight_noise else True,
        )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws parameters and fixed random logits from the seed, see the class."""
        generator = torch.Generator().manual_seed(self.seed)
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            if tensor.is_meta:
                continue
            if name == "mixture" or name.endswith("bias"):
                tensor.zero_()
            elif name.startswith("random"):
                size = 1.0 if name == "random_logits" else self.config.rank**-0.25
                drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
                tensor.copy_(drawn * size)
            else:
                drawn = torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
                tensor.copy_((2.0 * drawn - 1.0) * tensor.shape[-1] ** -0.5)

    def mixing_weights(self) -> Tensor:
        """α (Hkv, number of kinds), in the order of `kinds`; rows sum to one."""
        if len(self.config.kinds) == 1:
            device = own_device(self)
            return torch.ones(self.num_kv_heads, 1, device=device)
        return torch.softmax(self.get_parameter("mixture"), -1)

    # ---- logits ----------------------------------------------------------------------------

    def _tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """A parameter or buffer in the sums' dtype."""
        found: Tensor = getattr(self, name)
        return found.to(dtype)

    def _layer(self, x: Tensor, name: str) -> Tensor:
        """W x + b with each head's parameters, for x (B, Hkv, G, L, ·)."""
        weight, bias = (self._tensor(f"{name}_{part}", x.dtype) for part in ("weight", "bias"))
        return x @ weight[:, None].mT + bias[:, None, None]

    def _pairs(self, kind: str, q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor] | None:
        """Rows (B or 1, Hkv, G or 1, L, F) and columns (B or 1, Hkv, S, F) whose products are the
        logits of a kind; None for kinds that are no such product.
        """
        queries, keys = q.shape[3], k.shape[2]
        if kind == "dot":
            return q * scale, k
        if kind == "dense":
            units = torch.relu(self._layer(q, "hidden"))
            weight = self._tensor("column_weight", q.dtype)[:, :keys]
            bias = self._tensor("column_bias", q.dtype)[:, :keys]
            rows = torch.cat([units, torch.ones_like(units[..., :1])], -1)
            return rows, torch.cat([weight, bias[..., None]], -1)[None]
        if kind == "factorised_random":
            at, start = _places(queries, keys)
            rows = self._tensor("random_rows", q.dtype)[:, at : at + queries]
            return rows[None, :, None], self._tensor("random_columns", q.dtype)[
                None, :, start : start + keys
            ]
        return None

    def _features(
        self, q: Tensor, k: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """All kinds beside each other: rows (B, H, L, F), columns (B, Hkv, S, F) whose products
        are logits, and each kind's α. With factorised_dense rows end in both factors, columns in
        the key's position.
        """
        dtype, keys = sums_dtype(q.dtype), k.shape[2]
        self._need_length(q.shape[2], keys)
        grouped = q.to(dtype).unflatten(1, (self.num_kv_heads, -1))
        k = k.to(dtype)
        rows, columns = [grouped[..., :0]], [k[..., :0]]
        alpha = self.mixing_weights().to(device=q.device, dtype=dtype)
        shares = dict(zip(self.config.kinds, alpha[:, :, None, None, None].unbind(1), strict=True))
        for kind, share in shares.items():
            pair = self._pairs(kind, grouped, k, scale)
            if pair is not None:
                rows.append((pair[0] * share).expand(*grouped.shape[:4], -1))
                columns.append(pair[1].expand(len(k), -1, -1, -1))
        if "factorised_dense" in shares:
            units = torch.relu(self._layer(grouped, "factor_hidden"))
            first = self._layer(units, "first") * shares["factorised_dense"]
            rows += [first, self._layer(units, "second")]
            position = torch.arange(keys, device=k.device, dtype=dtype)
            columns.append(position[:, None].expand(*k.shape[:3], 1))
        return torch.cat(rows, -1).flatten(1, 2), torch.cat(columns, -1), shares

    def _sums(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float
    ) -> tuple[Tensor, ...]:
        """`softmax_sums` over keys and values that are zero where masked."""
        rows, columns, shares = self._features(q, k, scale)
        dtype, keys, config = rows.dtype, k.shape[2], self.config
        mask = dense_as(mask, dtype)
        if "random" in shares:
            mask = self._with_random(mask, q.shape[2], keys, shares["random"], dtype)
        draws = (config.dropout, config.weight_noise) if self.training else (0.0, 0.0)
        factors = self.factors if "factorised_dense" in shares else (0, 0)
        function = functools.partial(_scored, factors, draws)
        size = 8 * q.shape[0] * q.shape[1] * keys * dtype.itemsize
        return over_queries(function, rows, columns, v, mask, size, random=any(draws))

    def _output(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
        """Attention over keys and values that are zero where masked."""
        if self.exact is None:
            return self._sums(q, k, v, mask, scale)[0].to(q.dtype)
        rows, columns, _ = self._features(q, k, scale)
        return self.exact._attend(rows, columns, v.to(rows.dtype), mask, 1.0).to(q.dtype)

    def _with_random(
        self, mask: Mask, queries: int, keys: int, share: Tensor, dtype: torch.dtype
    ) -> Mask:
        """The mask with α·R as its additive part, −inf where its explicit part is closed."""
        at, start = _places(queries, keys)
        logits = self._tensor("random_logits", dtype)[:, at : at + queries, start : start + keys]
        logits = (logits * share[:, 0, 0, 0, None, None]).repeat_interleave(
            self.num_heads // self.num_kv_heads, 0
        )[None]
        if mask.dense is None:
            return replace(mask, dense=logits)
        if mask.dense.dtype == torch.bool:
            return replace(mask, dense=logits.masked_fill(~mask.dense, float("-inf")))
        return replace(mask, dense=logits + mask.dense)

    def _need_length(self, queries: int, keys: int) -> None:
        needed = keys if self.capabilities.read else max(queries, keys)
        limit = self.max_length if self.capabilities.max_length else None
        if limit is not None and needed > limit:
            raise ShapeError(
                f"synthesizer: {needed} tokens are more than max_length={limit}, for which it has "
                "logits; build it with a larger max_length"
            )

    # ---- calls -----------------------------------------------------------------------------

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
        k, v = clear(k, v, mask)
        return self._output(q, k, v, mask, scale)

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
        k = k if "dot" in self.config.kinds else k[..., :0]  # no other kind reads keys
        new = KeyValueState.extend(state, k, v, key_mask)
        return self._output(q, new.k, new.v, Mask(causal=True, key=new.key), scale), new

    def _read(self, q: Tensor, state: KeyValueState, scale: float) -> Tensor:
        return self._output(q, state.k, state.v, Mask(key=state.key), scale)


def _places(queries: int, keys: int) -> tuple[int, int]:
    """Positions of the first query and of the first key where both sequences end together."""
    return max(0, keys - queries), max(0, queries - keys)


def _scored(
    factors: tuple[int, int],
    draws: tuple[float, float],
    rows: Tensor,
    columns: Tensor,
    v: Tensor,
    allowed: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, ...]:
    """A `Chunk`: products of rows and columns, and of both factors at the key's position."""
    first, second = rows[..., rows.shape[-1] - sum(factors) :].split(factors, -1)
    rows = rows[..., : rows.shape[-1] - sum(factors)]
    grouped = rows.unflatten(1, (columns.shape[1], -1))
    logits = (grouped @ columns[:, :, None, :, : rows.shape[-1]].mT).flatten(1, 2)
    if sum(factors):
        position = columns[0, 0, :, -1].long()
        logits = logits + first[..., position // factors[1]] * second[..., position % factors[1]]
    return softmax_sums(logits, v, allowed, bias, *draws)
