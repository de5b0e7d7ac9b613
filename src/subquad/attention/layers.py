"""Encoder and decoder layers: torch's own with any mechanism inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad import registry
from subquad.attention.base import Absent, Mechanism
from subquad.attention.mixer.layer import TokenMixing
from subquad.attention.multihead import MultiheadAttention, with_draws
from subquad.attention.norms import build_norm, norm_problem, normalise
from subquad.errors import OptionError, UnsupportedError
from subquad.options import Config, Spec

__all__ = ["TransformerDecoderLayer", "TransformerEncoderLayer"]

SEEDS_APART = 10_007
"""Between the seeds of two attentions: mechanisms count up from theirs, by part or by head."""


class TransformerEncoderLayer(nn.TransformerEncoderLayer):
    """Drop-in for `torch.nn.TransformerEncoderLayer` that runs any registered mechanism.

        x ← norm1(x + dropout(SelfAttention(x)))        x ← x + dropout(SelfAttention(norm1(x)))
        x ← norm2(x + dropout(FFN(x)))                  x ← x + dropout(FFN(norm2(x)))
        norm_first=False                                norm_first=True

    with FFN(x) = W_2 dropout(activation(W_1 x)). Signature, parameter names, initial values
    (for one global seed) and masks (**True = ignore**) are torch's; the attention is
    `MultiheadAttention`, see there for the masks that a mechanism takes. What differs:

    - torch's fused fast path in evaluation, which reads the weights and computes softmax
      itself, is never taken: every call goes through the mechanism. `nn.TransformerEncoder`
      therefore says on construction that it will not use nested tensors; pass it
      ``enable_nested_tensor=False``.
    - `dropout` acts after the attention, inside and after FFN as in torch; on attention
      weights only where the mechanism forms them, see `attention_dropout`.
    - ``is_causal=True`` without `src_mask` is accepted: causal.
    - A token mixer (``mechanism="fnet"``) is a `TokenMixing` in the attention's place: there are
      no projections of q, k, v and the output, and torch's weights for them do not load.

    state_dict: torch's keys, so that torch's weights load with ``strict=True``, and
    ``self_attn.mechanism.*`` for the mechanism's own tensors. `nn.TransformerEncoder` clones
    its layer: draws and initial values of all clones are equal, as its documentation says.

    Cost: O(L·C·(C + dim_feedforward)), and the mechanism's (`subquad.describe`).

    Papers: Vaswani et al. 2017, arXiv 1706.03762, section 3.1; ``norm_first``: Xiong et al.
    2020, arXiv 2002.04745, figure 1.

    Args:
        d_model: C, width of the model.
        nhead: H, heads; divides C.
        dim_feedforward: width inside FFN.
        dropout: probability of dropping an entry while training.
        activation: "relu", "gelu" or a function.
        layer_norm_eps: of the norms.
        batch_first: (N, L, C) instead of (L, N, C).
        norm_first: norms before the blocks instead of behind their sums.
        bias: whether linear layers and norms have biases.
        device, dtype: of parameters and buffers.
        mechanism: a name, a string with options, or a config object.
        attention_dropout: probability of dropping an attention weight. None: the mechanism's
            own `dropout` option if set, else `dropout` where the mechanism has that option,
            else 0. A number > 0 is refused by mechanisms that form no weights.
        max_length: longest sequence, for mechanisms that need it.
        seed: determines the mechanism's random draws.
        norm: "layer" as in torch, "rms", or "batch", whose statistics leave out tokens that
            `src_key_padding_mask` ignores, see `subquad.attention.norms`.
        attention_noise: see `MultiheadAttention`.

    Raises:
        OptionError: for wrong sizes, an unknown mechanism or wrong options.
        UnsupportedError: for ``attention_dropout > 0`` or ``attention_noise > 0`` where the
            mechanism cannot apply it.

    Example:
        >>> import torch, subquad as sq
        >>> layer = sq.TransformerEncoderLayer(32, 4, batch_first=True, mechanism="performer")
        >>> layer.load_state_dict(torch.nn.TransformerEncoderLayer(32, 4).state_dict())
        <All keys matched successfully>
        >>> encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        >>> encoder(torch.randn(2, 100, 32)).shape
        torch.Size([2, 100, 32])
    """

    self_attn: MultiheadAttention | TokenMixing  # type: ignore[assignment]  # a mixer is none

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        mechanism: str | Spec | Config = "performer",
        attention_dropout: float | None = None,
        max_length: int | None = None,
        seed: int = 0,
        norm: str = "layer",
        attention_noise: float = 0.0,
    ) -> None:
        attention = _empty_attention(
            d_model, nhead, dropout, bias, batch_first, dtype,
            mechanism, attention_dropout, max_length, seed, attention_noise,
        )  # fmt: skip
        super().__init__(
            d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps,
            batch_first, norm_first, bias, device, dtype,
        )  # fmt: skip
        self.self_attn = _filled(attention, self.self_attn)
        _set_norms(self, norm, d_model, layer_norm_eps, bias, device, dtype)

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """The layer's output, shaped like `src`.

        Args:
            src: (L, N, C), (N, L, C) with `batch_first`, or (L, C) without a batch.
            src_mask: (L, L) or (N·H, L, L): bool, True = ignore, or floats that are added.
            src_key_padding_mask: (N, L) or (L,), likewise.
            is_causal: `src_mask` is the causal one; without it, mask causally.

        Raises:
            ShapeError, DtypeError, DeviceError: if an argument does not fit.
            UnsupportedError: if the mechanism cannot do what a mask asks for.
        """
        masks = (src_mask, src_key_padding_mask, is_causal)
        x, keep = src, _kept(self, src_key_padding_mask)
        if self.norm_first:
            x = x + self._sa_block(normalise(self.norm1, x, keep), *masks)
            return x + self._ff_block(normalise(self.norm2, x, keep))
        x = normalise(self.norm1, x + self._sa_block(x, *masks), keep)
        return normalise(self.norm2, x + self._ff_block(x), keep)


class TransformerDecoderLayer(nn.TransformerDecoderLayer):
    """Drop-in for `torch.nn.TransformerDecoderLayer` that runs any registered mechanisms.

        x ← norm1(x + dropout(SelfAttention(x)))
        x ← norm2(x + dropout(CrossAttention(x, memory)))
        x ← norm3(x + dropout(FFN(x)))

    or with ``norm_first`` each norm before its block, inside the residual. Everything said of
    `TransformerEncoderLayer` holds here, for both attentions. As in torch nothing is causal by
    itself: give ``tgt_is_causal=True``, which suffices, or the triangle as `tgt_mask`; the
    mechanism of the self-attention has to take causal masks then, that of the cross-attention
    queries and keys of different lengths. One whose answer to a query depends on the other
    queries of the call (`nystrom`, `clustered`, `sampled`, …) would tell a causal decoder of
    later tokens: with `tgt_is_causal`, which `torch.nn.TransformerDecoder` finds out by itself,
    it is refused.

    state_dict: torch's keys, and ``self_attn.mechanism.*``, ``multihead_attn.mechanism.*``.

    Cost: O(L·C·(C + dim_feedforward) + S·C²), and the mechanisms'.

    Paper: Vaswani et al. 2017, arXiv 1706.03762, section 3.1.

    Args:
        d_model: C, width of the model; this and all up to `dtype` as in
            `TransformerEncoderLayer`.
        mechanism: of the self-attention.
        cross_mechanism: of the attention to `memory`; default `mechanism`. Options left open are
            filled in for cross-attention (`Config.for_use`).
        attention_dropout: as in `TransformerEncoderLayer`, for each of both attentions.
        max_length: longest sequence of either kind, for mechanisms that need it.
        seed: determines random draws; the cross-attention's are from seed + 10,007.
        norm: as in `TransformerEncoderLayer`; "batch" leaves out ignored tokens of `tgt`.
        attention_noise: of both attentions, see `MultiheadAttention`.

    Raises:
        OptionError: for wrong sizes, an unknown mechanism or wrong options.
        UnsupportedError: for ``attention_dropout > 0`` or ``attention_noise > 0`` where a
            mechanism cannot apply it.

    Example:
        >>> import torch, subquad as sq
        >>> layer = sq.TransformerDecoderLayer(32, 4, cross_mechanism="softmax")
        >>> tgt, memory = torch.randn(7, 2, 32), torch.randn(11, 2, 32)
        >>> layer(tgt, memory, tgt_is_causal=True).shape
        torch.Size([7, 2, 32])
    """

    self_attn: MultiheadAttention | TokenMixing  # type: ignore[assignment]  # a mixer is none
    multihead_attn: MultiheadAttention

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        mechanism: str | Spec | Config = "performer",
        cross_mechanism: str | Spec | Config | None = None,
        attention_dropout: float | None = None,
        max_length: int | None = None,
        seed: int = 0,
        norm: str = "layer",
        attention_noise: float = 0.0,
    ) -> None:
        cross_mechanism = mechanism if cross_mechanism is None else cross_mechanism
        cross_mechanism = registry.resolve(cross_mechanism)[1].for_use("cross")
        if not registry.describe(cross_mechanism).capabilities.qkv:
            raise OptionError(
                f"TransformerDecoderLayer: {cross_mechanism} mixes the tokens of one sequence and "
                "cannot be a cross-attention: give cross_mechanism=, such as 'softmax'"
            )
        attention, cross = (
            _empty_attention(
                d_model, nhead, dropout, bias, batch_first, dtype,
                one, attention_dropout, max_length, own, attention_noise,
            )
            for one, own in ((mechanism, seed), (cross_mechanism, seed + SEEDS_APART))
        )  # fmt: skip
        super().__init__(
            d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps,
            batch_first, norm_first, bias, device, dtype,
        )  # fmt: skip
        self.self_attn = _filled(attention, self.self_attn)
        filled = _filled(cross, self.multihead_attn)
        assert isinstance(filled, MultiheadAttention), "a mixer is refused above"
        self.multihead_attn = filled
        _set_norms(self, norm, d_model, layer_norm_eps, bias, device, dtype)

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """The layer's output, shaped like `tgt`.

        Args:
            tgt: (L, N, C), (N, L, C) with `batch_first`, or (L, C) without a batch.
            memory: the encoder's output, likewise with S tokens.
            tgt_mask: (L, L) or (N·H, L, L): bool, True = ignore, or floats that are added.
            memory_mask: (L, S) or (N·H, L, S), likewise.
            tgt_key_padding_mask: (N, L) or (L,), likewise.
            memory_key_padding_mask: (N, S) or (S,), likewise.
            tgt_is_causal: `tgt_mask` is the causal one; without it, mask causally.
            memory_is_causal: likewise of `memory_mask`.

        Raises:
            ShapeError, DtypeError, DeviceError: if an argument does not fit.
            UnsupportedError: if a mechanism cannot do what a mask asks for, or lets a causal
                decoder see later tokens.
        """
        if tgt_is_causal:
            need_answers_alone(self.multihead_attn.mechanism)
        own = (tgt_mask, tgt_key_padding_mask, tgt_is_causal)
        other = (memory, memory_mask, memory_key_padding_mask, memory_is_causal)
        x, keep = tgt, _kept(self, tgt_key_padding_mask)
        if self.norm_first:
            x = x + self._sa_block(normalise(self.norm1, x, keep), *own)
            x = x + self._mha_block(normalise(self.norm2, x, keep), *other)
            return x + self._ff_block(normalise(self.norm3, x, keep))
        x = normalise(self.norm1, x + self._sa_block(x, *own), keep)
        x = normalise(self.norm2, x + self._mha_block(x, *other), keep)
        return normalise(self.norm3, x + self._ff_block(x), keep)


def _empty_attention(
    d_model: int,
    nhead: int,
    dropout: float,
    bias: bool,
    batch_first: bool,
    dtype: torch.dtype | None,
    mechanism: str | Spec | Config,
    attention_dropout: float | None,
    max_length: int | None,
    seed: int,
    noise: float,
) -> MultiheadAttention | TokenMixing:
    """The attention on the meta device: no memory, and no number from the global generator."""
    found, config = registry.resolve(mechanism)
    if not found.capabilities_for(config).qkv:
        if d_model % nhead:  # torch's constructor wants it, though a mixer has no heads
            raise OptionError(f"nhead={nhead} must divide d_model={d_model}")
        with_draws(config, dropout=attention_dropout or 0.0, weight_noise=noise)
        return TokenMixing(
            d_model, mechanism=config, num_heads=nhead, max_length=max_length,
            batch_first=batch_first, seed=seed, device="meta", dtype=dtype,
        )  # fmt: skip
    arguments: dict[str, Any] = {"mechanism": config, "seed": seed, "max_length": max_length}
    arguments["attention_noise"] = noise
    attention_dropout = dropout_of_weights(config, attention_dropout, dropout)
    return MultiheadAttention(
        d_model, nhead, attention_dropout, bias,
        batch_first=batch_first, device="meta", dtype=dtype, **arguments,
    )  # fmt: skip


def _filled(
    attention: MultiheadAttention | TokenMixing, theirs: Any
) -> MultiheadAttention | TokenMixing:
    """The attention with the tensors of torch's; the mechanism's are drawn from its seed."""
    if isinstance(attention, TokenMixing):
        attention.to_empty(device=theirs.out_proj.weight.device)
        attention.mechanism.reset_parameters()
    else:
        attention.load_state_dict(theirs.state_dict(), assign=True)
    return attention


def need_answers_alone(mechanism: Mechanism) -> None:
    """Refuses a cross-attention that would let a causal decoder see later tokens.

    Raises:
        UnsupportedError: with the reason, and who can.
    """
    support = mechanism.answers_alone
    if not isinstance(support, Absent):
        return
    able = [
        name
        for name in registry.mechanisms(cross=True)
        if (found := registry.get(name)).answers_alone_for(found.Config())
    ]
    raise UnsupportedError(
        mechanism.name,
        "the cross-attention of a causal decoder",
        "its answer to a query depends on the other queries of the call, later ones too, or on "
        f"their number ({support.reason})",
        able,
    )


def dropout_of_weights(config: Config, wanted: float | None, dropout: float) -> float:
    """`wanted`, or by default the mechanism's own `dropout`, else `dropout` where it has one."""
    if wanted is not None:
        return wanted
    own: float | None = getattr(config, "dropout", None)
    return 0.0 if own is None else own or dropout


def _set_norms(
    layer: nn.Module, norm: str, width: int, eps: float, bias: bool, device: Any, dtype: Any
) -> None:
    """Puts the named norm where torch's constructor has put layer norms."""
    problems = norm_problem(norm)
    if problems:
        raise OptionError(f"{type(layer).__name__}: " + "; ".join(problems))
    if norm != "layer":
        for name in [name for name, _ in layer.named_children() if name.startswith("norm")]:
            setattr(layer, name, build_norm(norm, width, eps, bias, device=device, dtype=dtype))


def _kept(layer: Any, padding: Tensor | None) -> Tensor | None:
    """torch's key_padding_mask as True = keep, laid out like the layer's tokens."""
    if padding is None:
        return None
    keep = ~padding if padding.dtype == torch.bool else padding != float("-inf")
    return keep if layer.self_attn.batch_first or keep.dim() == 1 else keep.T
