"""`MultiheadAttention`: `torch.nn.MultiheadAttention` with any mechanism inside."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# The class torch itself puts there: state_dict keys and quantisation stay the same.
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from subquad import registry
from subquad.attention.masks import Mask
from subquad.attention.torch_masks import as_mask
from subquad.errors import DeviceError, DtypeError, OptionError, ShapeError, UnsupportedError
from subquad.kernels.precision import autocast_dtype
from subquad.options import Config, Spec, number_problem

__all__ = ["MultiheadAttention"]


class MultiheadAttention(nn.MultiheadAttention):
    """Drop-in for `torch.nn.MultiheadAttention` that runs any registered mechanism.

        head_h = Attention(q W_h^Q, k W_h^K, v W_h^V)
        out    = Concat(head_1 … head_H) W^O

    Signature, parameter names, initial values (for one global seed), mask conventions and
    returned values are torch's. Masks mean the opposite of `subquad.Mask`: **True =
    ignore**, or floats that are added to the logits. What differs:

    - `need_weights` defaults to **False**: an L×S matrix is what this package avoids. Asked
      for, it is the mechanism's implied attention matrix.
    - A row without any key to attend gives zeros before the output projection (torch: NaN),
      and what ignored keys contain never matters, to gradients of the weights neither
      (in self-attention, where they are queries too: to the output of the other rows).
    - `dropout` is applied exactly, to attention weights, or refused: mechanisms that never
      form weights raise for ``dropout > 0``, and for ``attention_noise > 0``.
    - `attn_mask`: mechanisms without explicit masks take what a `Mask` can say: nothing
      masked, the causal triangle (aligned to the end where L ≠ S), masked columns, both;
      equal over heads. Anything else raises. Recognising a mask reads its values; under
      ``torch.compile`` give `is_causal` and a bool `key_padding_mask` instead.
    - ``is_causal=True`` without `attn_mask` is accepted: causal, aligned to the end.
    - `add_bias_kv`, `add_zero_attn`: the appended keys stand before the others inside, so
      that a causal mask leaves them visible; in returned weights they are last, as in torch.
    - torch's fused fast paths never bypass the mechanism: `_qkv_same_embed_dim`, which
      `nn.TransformerEncoderLayer` and `nn.TransformerEncoder` read before they take one, is
      False here. An encoder built earlier may still pass a nested tensor: it is padded,
      attended with a key mask, and returned nested.

    state_dict: torch's keys, so that torch's weights load with ``strict=True``, and
    ``mechanism.*`` for the mechanism's own tensors. Where a state dict has none of those
    (torch's has none) the present ones are kept, or drawn from `seed` if this module is on
    the meta device. With ``num_kv_heads < num_heads`` the keys are ``q_proj_weight (C, C)``,
    ``k_proj_weight (Hkv·D, kdim)``, ``v_proj_weight (Hkv·D, vdim)`` and ``in_proj_bias
    (C + 2·Hkv·D)``, ``bias_k``, ``bias_v (1, 1, Hkv·D)``; never a packed ``in_proj_weight``.

    Cost: the projections' O(L·C²), and the mechanism's (`subquad.describe`).

    Paper: Vaswani et al. 2017, arXiv 1706.03762, section 3.2.2; grouped queries: Ainslie et
    al. 2023, arXiv 2305.13245.

    Args:
        embed_dim: C, width of queries and output.
        num_heads: H, divides C; D = C / H.
        dropout: probability with which an attention weight is dropped while training.
        bias: whether the projections have biases.
        add_bias_kv: append one learned key and value.
        add_zero_attn: append one key and value of zeros.
        kdim, vdim: widths of `key` and `value`, default C.
        batch_first: (N, L, C) instead of (L, N, C).
        device, dtype: of parameters and buffers.
        num_kv_heads: Hkv, key/value heads; divides H. Default H.
        mechanism: a name, a string with options, or a config object.
        seed: determines the mechanism's random draws.
        max_length: longest sequence, for mechanisms that need it.
        attention_noise: while training each attention weight is multiplied by
            1 + attention_noise·u, u uniform in [−1, 1].

    Raises:
        OptionError: for wrong sizes, an unknown mechanism or wrong options.
        UnsupportedError: for ``dropout > 0`` or ``attention_noise > 0`` where the mechanism
            cannot apply it.

    Example:
        >>> import torch, subquad as sq
        >>> attn = sq.MultiheadAttention(32, 4, batch_first=True, mechanism="softmax")
        >>> attn.load_state_dict(torch.nn.MultiheadAttention(32, 4).state_dict())
        <All keys matched successfully>
        >>> x = torch.randn(2, 7, 32)
        >>> out, weights = attn(x, x, x, is_causal=True)
        >>> out.shape, weights
        (torch.Size([2, 7, 32]), None)
    """

    _slot = "mechanism"  # name of the submodule

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_kv_heads: int | None = None,
        mechanism: str | Spec | Config = "performer",
        seed: int = 0,
        max_length: int | None = None,
        attention_noise: float = 0.0,
    ) -> None:
        # torch's own constructor would make packed weights of one size and read back
        # `_qkv_same_embed_dim`; the attributes it sets are all set here.
        nn.Module.__init__(self)
        _check_sizes(embed_dim, num_heads, num_kv_heads, kdim, vdim)
        found, config = registry.resolve(mechanism)
        if not found.capabilities_for(config).qkv:
            raise UnsupportedError(
                found.name,
                "the place of attention between projections",
                "it mixes tokens without q, k and v; use subquad.TokenMixing or an encoder layer",
                registry.capable("qkv"),
            )
        self.embed_dim = embed_dim
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim = embed_dim // num_heads
        self.dropout = dropout
        self.batch_first = batch_first
        self.add_zero_attn = add_zero_attn
        self._qkv_same_embed_dim = False  # closes torch's fast paths, see the class docstring
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        kv_dim = self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, int]] = {
            "q_proj_weight": (embed_dim, embed_dim),
            "k_proj_weight": (kv_dim, self.kdim),
            "v_proj_weight": (kv_dim, self.vdim),
        }
        if self.kdim == self.vdim == embed_dim and kv_dim == embed_dim:
            shapes = {"in_proj_weight": (3 * embed_dim, embed_dim)}
        for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_weight"):
            shape = shapes.get(name)
            parameter = None if shape is None else nn.Parameter(torch.empty(shape, **factory))
            self.register_parameter(name, parameter)
        in_bias = nn.Parameter(torch.empty(embed_dim + 2 * kv_dim, **factory)) if bias else None
        self.register_parameter("in_proj_bias", in_bias)
        self.out_proj = NonDynamicallyQuantizableLinear(embed_dim, embed_dim, bias=bias, **factory)
        for name in ("bias_k", "bias_v"):
            extra = nn.Parameter(torch.empty(1, 1, kv_dim, **factory)) if add_bias_kv else None
            self.register_parameter(name, extra)
        self._reset_parameters()
        self._build: dict[str, Any] = {
            "mechanism": with_draws(mechanism, dropout=dropout, weight_noise=attention_noise),
            "num_heads": num_heads,
            "num_kv_heads": self.num_kv_heads,
            **self._head_widths(),
            "embed_dim": embed_dim,
            "max_length": max_length,
            "seed": seed,
        }
        self.mechanism = registry.build(**self._build, **factory)

    def _head_widths(self) -> dict[str, int | None]:
        """Widths of the heads that the mechanism is given."""
        # the implied attention matrix takes values of another width
        return {"head_dim": self.head_dim, "value_dim": None}

    def _reset_parameters(self) -> None:
        for weight in (
            self.in_proj_weight,
            self.q_proj_weight,
            self.k_proj_weight,
            self.v_proj_weight,
        ):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        for extra in (self.bias_k, self.bias_v):
            if extra is not None:
                nn.init.xavier_normal_(extra)

    def extra_repr(self) -> str:
        kv = "" if self.num_kv_heads == self.num_heads else f", num_kv_heads={self.num_kv_heads}"
        return f"{self.embed_dim}, {self.num_heads}{kv}, batch_first={self.batch_first}"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention output and, if asked for, the implied attention matrix.

        Args:
            query: (L, N, C), (N, L, C) with `batch_first`, or (L, C) without a batch.
            key: (S, N, kdim), (N, S, kdim) or (S, kdim).
            value: (S, N, vdim), (N, S, vdim) or (S, vdim).
            key_padding_mask: (N, S) or (S,): bool, True = ignore, or floats that are added
                to the logits (other than 0 and −inf: for mechanisms with explicit masks).
            need_weights: return the attention matrix too. Default False; torch's is True.
            attn_mask: (L, S) or (N·H, L, S): bool, True = ignore, or floats that are added.
            average_attn_weights: average the returned matrix over heads.
            is_causal: `attn_mask` is the causal one; without it, mask causally.

        Returns:
            The output, shaped like `query`, and None or the weights (N, L, S), per head
            (N, H, L, S), without N for inputs without a batch.

        Raises:
            ShapeError, DtypeError, DeviceError: if an argument does not fit.
            UnsupportedError: if the mechanism cannot do what a mask asks for.
        """
        if query.is_nested:
            return self._nested(query, key, value, key_padding_mask, need_weights, attn_mask)
        batched = query.dim() == 3
        self._check_inputs(query, key, value)
        same = query is key and key is value
        query, key, value = (
            (x.transpose(0, 1) if not self.batch_first else x) if batched else x.unsqueeze(0)
            for x in (query, key, value)
        )
        queries, keys = query.shape[1], key.shape[1]
        mask = self._mask(query, keys, key_padding_mask, attn_mask, is_causal, batched)
        if mask.key is not None and not same:
            # 0·NaN = NaN: zero gradients alone would not keep it out of the projections'
            closed = ~mask.key[..., None]
            key, value = key.masked_fill(closed, 0), value.masked_fill(closed, 0)
        q, k, v = self._project(query, key, value, same)
        k, v, mask = self._append(k, v, mask, queries)
        q, k, v = self._heads(q, k, v)
        weights = None
        if need_weights:
            weights = self.mechanism.weights(q, k, mask=mask)
        if weights is not None and self.training and self._draws():
            # the returned matrix is the one that was applied, with its dropped entries
            heads = weights @ self._repeated(v, mask).to(weights.dtype)
        else:
            heads = self._attend(q, k, v, mask)
        out = self._out(heads, q.dtype)
        if weights is not None:
            weights = weights.roll(keys - k.shape[2], -1)  # appended keys last
            weights = weights.mean(1) if average_attn_weights else weights
        if not batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1), weights

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        return self.mechanism(q, k, v, mask=mask)

    def _draws(self) -> bool:
        """Whether weights are dropped, or noise is on them, while training."""
        config = self.mechanism.config
        return any(getattr(config, name, 0.0) for name in DRAWS)

    # ---- projections ---------------------------------------------------------------------

    def _heads(self, *projected: Tensor) -> tuple[Tensor, ...]:
        """(N, length, width) as (N, heads, length, D)."""
        return tuple(t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in projected)

    def _out(self, heads: Tensor, dtype: torch.dtype) -> Tensor:
        """(N, L, C) of the heads' outputs (N, H, L, D)."""
        return self.out_proj(heads.transpose(1, 2).flatten(2).to(dtype))

    def _project(self, query: Tensor, key: Tensor, value: Tensor, same: bool) -> tuple[Tensor, ...]:
        if self.in_proj_weight is not None and same:
            out = F.linear(query, self.in_proj_weight, self.in_proj_bias)
            return out.split(self._projected_widths(), -1)
        inputs = (query, key, value)
        return tuple(
            F.linear(x, *affine) for x, affine in zip(inputs, self._projections(), strict=True)
        )

    def _projections(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Weight and bias of q's, k's and v's projection."""
        three: Any = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        packed, bias, widths = self.in_proj_weight, self.in_proj_bias, self._projected_widths()
        weights = three if packed is None else packed.split(widths)
        biases: Any = (None,) * 3 if bias is None else bias.split(widths)
        return zip(weights, biases, strict=True)

    def _projected_widths(self) -> list[int]:
        return [self.embed_dim, *(2 * [self.num_kv_heads * self.head_dim])]

    def _append(
        self, k: Tensor, v: Tensor, mask: Mask, queries: int
    ) -> tuple[Tensor, Tensor, Mask]:
        """k, v (N, S, ·) and the mask with the learned key and the zero key in front.

        In front, a causal mask aligned to the end still means the same for the others.
        """
        more = int(self.bias_k is not None) + int(self.add_zero_attn)
        if not more:
            return k, v, mask
        batch, keys = k.shape[:2]
        parts_k, parts_v = [], []
        if self.bias_k is not None and self.bias_v is not None:
            parts_k.append(self.bias_k.to(k.dtype).expand(batch, 1, -1))
            parts_v.append(self.bias_v.to(v.dtype).expand(batch, 1, -1))
        if self.add_zero_attn:
            parts_k.append(k.new_zeros(batch, 1, k.shape[-1]))
            parts_v.append(v.new_zeros(batch, 1, v.shape[-1]))
        changes: dict[str, Any] = {}
        if mask.key is not None:
            changes["key"] = F.pad(mask.key, (more, 0), value=True)
        if mask.dense is not None:
            opened = mask.dense.dtype == torch.bool
            changes["dense"] = F.pad(mask.dense, (more, 0), value=1.0 if opened else 0.0)
        if mask.causal and queries > keys:  # the first queries precede even the appended keys
            changes["prefix"] = more
        mask = dataclasses.replace(mask, **changes)
        return torch.cat([*parts_k, k], 1), torch.cat([*parts_v, v], 1), mask

    def _repeated(self, v: Tensor, mask: Mask) -> Tensor:
        """v with zeros at masked keys, one for each query head."""
        if mask.key is not None:
            v = v.masked_fill(~mask.key[:, None, :, None], 0)
        return v.repeat_interleave(self.num_heads // self.num_kv_heads, 1)

    def _mask(
        self,
        q: Tensor,
        keys: int,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
        batched: bool,
    ) -> Mask:
        masks = (key_padding_mask, attn_mask, is_causal)
        return as_mask(self.mechanism, self.num_heads, q, keys, *masks, batched=batched)

    # ---- checks --------------------------------------------------------------------------

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        layout = "(N, length, width)" if self.batch_first else "(length, N, width)"
        rows = 0 if self.batch_first else 1
        own = self.out_proj.weight
        for name, x, width in (
            ("query", query, self.embed_dim),
            ("key", key, self.kdim),
            ("value", value, self.vdim),
        ):
            if x.dim() not in (2, 3) or x.dim() != query.dim() or x.shape[-1] != width:
                raise ShapeError(
                    f"{name} must be {layout}, or (length, width) like all three, with width "
                    f"{width}, given {tuple(x.shape)}"
                )
            if x.dim() == 3 and x.shape[rows] != query.shape[rows]:
                raise ShapeError(
                    f"{name} must be {layout} with query's N = {query.shape[rows]}, "
                    f"given {tuple(x.shape)}"
                )
            if x.device != own.device:
                raise DeviceError(f"{name} is on {x.device}, the module is on {own.device}")
            if x.dtype != own.dtype and autocast_dtype(x) is None:
                raise DtypeError(f"{name} must have the module's {own.dtype}, given {x.dtype}")
        if key.shape[:-1] != value.shape[:-1]:
            raise ShapeError(
                f"key and value must have one length and batch, given {tuple(key.shape)} and "
                f"{tuple(value.shape)}"
            )

    # ---- torch's nested tensors ----------------------------------------------------------

    def _nested(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        need_weights: bool,
        attn_mask: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Self-attention of a nested tensor, as `nn.TransformerEncoder` passes one for padding."""
        masked = key_padding_mask is not None or attn_mask is not None
        if query is not key or key is not value or masked or not self.batch_first or need_weights:
            raise UnsupportedError(
                self.mechanism.name,
                "this use of nested tensors",
                "only self-attention with batch_first, without masks and weights; "
                "use padded tensors with key_padding_mask",
            )
        lengths = [len(row) for row in query.unbind()]
        padded = torch.nested.to_padded_tensor(query, 0.0)
        places = torch.arange(padded.shape[1], device=padded.device)
        ignored = places >= torch.tensor(lengths, device=padded.device)[:, None]
        out, _ = self(padded, padded, padded, key_padding_mask=ignored)
        return torch._nested_tensor_from_mask(out, ~ignored, mask_check=False), None

    # ---- state_dict ----------------------------------------------------------------------

    def _load_from_state_dict(
        self, state_dict: MutableMapping[str, Any], prefix: str, *arguments: Any
    ) -> None:
        own = self.mechanism.state_dict(prefix=f"{prefix}{self._slot}.")
        if own and not any(name in state_dict for name in own):
            if any(tensor.is_meta for tensor in own.values()):
                own = self._drawn(state_dict, prefix)
            state_dict.update(own)
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def _drawn(self, state_dict: Mapping[str, Any], prefix: str) -> dict[str, Tensor]:
        """The mechanism's tensors, drawn from the seed where the loaded weights live."""
        loaded = state_dict.get(prefix + "out_proj.weight", torch.empty(0))
        fresh = registry.build(**self._build, device=loaded.device, dtype=loaded.dtype)
        return fresh.state_dict(prefix=f"{prefix}{self._slot}.")


def _check_sizes(
    embed_dim: int, num_heads: int, num_kv_heads: int | None, kdim: int | None, vdim: int | None
) -> None:
    sizes = {
        "embed_dim": embed_dim,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "kdim": kdim,
        "vdim": vdim,
    }
    problems = [
        f"{name}={size!r} must be an integer ≥ 1"
        for name, size in sizes.items()
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1)
    ]
    if not problems and embed_dim % num_heads:
        problems.append(f"num_heads={num_heads} must divide embed_dim={embed_dim}")
    if not problems and num_kv_heads and num_heads % num_kv_heads:
        problems.append(f"num_kv_heads={num_kv_heads} must divide num_heads={num_heads}")
    if problems:
        raise OptionError("MultiheadAttention: " + "; ".join(problems))


DRAWS = {
    "dropout": ("dropout", "be dropped"),
    "weight_noise": ("attention_noise", "have noise on them"),
}
"""Options of mechanisms that form weights: the argument here, what happens to a weight."""


def with_draws(mechanism: str | Spec | Config, **amounts: float) -> Config:
    """The mechanism's config with these amounts of `DRAWS`, which it must be able to apply.

    Raises:
        OptionError: for an amount out of [0, 1], or one that the config gives differently.
        UnsupportedError: for an amount > 0 where the mechanism forms no weights.
    """
    found, config = registry.resolve(mechanism)
    problems = [
        problem
        for option, amount in amounts.items()
        for problem in number_problem(DRAWS[option][0], amount, 0.0, 1.0)
    ]
    if problems:
        raise OptionError("MultiheadAttention: " + "; ".join(problems))
    changes: dict[str, Any] = {option: amount for option, amount in amounts.items() if amount}
    for option, amount in changes.items():
        name, what = DRAWS[option]
        if option not in config.option_names():
            able = [
                other
                for other in registry.MECHANISMS
                if option in registry.get(other).Config.option_names()
            ]
            raise UnsupportedError(
                found.name,
                f"{name}={amount}",
                f"it forms no attention weights that could {what}; set {name}=0",
                able,
            )
        if getattr(config, option) not in (0.0, amount):
            raise OptionError(
                f"{option} is given twice: {name}={amount} and {config}; leave one of them out"
            )
    return dataclasses.replace(config, **changes)
