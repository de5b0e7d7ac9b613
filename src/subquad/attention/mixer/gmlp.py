"""gMLP: channels are gated by a learned linear map over positions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad.attention.base import Absent, Capabilities, Cost, Info, State
from subquad.attention.exact.engine import KeyValueState
from subquad.attention.exact.softmax import Softmax
from subquad.attention.masks import Mask
from subquad.attention.mixer.base import Mixer, followed, mixer_capabilities
from subquad.errors import OptionError, ShapeError
from subquad.options import Config, choice_problem, integer_problem

__all__ = ["GMLP", "GMLPConfig", "GateState"]

DENSE_ROWS = 64
"""Up to so many new tokens, rows of a Toeplitz matrix are written out instead of convolved."""


@dataclass(frozen=True)
class GMLPConfig(Config):
    """Options of `GMLP`.

    Args:
        hidden: E, width between the two channel projections, even; default 2·C.
        weights: "full" (any matrix over positions) or "toeplitz" (it depends on i − j alone).
        heads: groups of channels with spatial weights of their own; divides E/2.
        attention: width of one head of softmax attention that is added to the gate (aMLP), or
            None for none.
    """

    mechanism: ClassVar[str] = "gmlp"

    hidden: int | None = None
    weights: str = "full"
    heads: int = 1
    attention: int | None = None

    def problems(self) -> Iterator[str]:
        if self.hidden is not None:
            wrong = list(integer_problem("hidden", self.hidden, 2))
            if not wrong and self.hidden % 2:
                wrong = [f"hidden={self.hidden} must be even: half of it gates the other half"]
            yield from wrong
        yield from choice_problem("weights", self.weights, ("full", "toeplitz"))
        yield from integer_problem("heads", self.heads, 1)
        if self.attention is not None:
            yield from integer_problem("attention", self.attention, 1)


def _hidden(config: GMLPConfig, width: int) -> int:
    return 2 * width if config.hidden is None else config.hidden


def _flops(length: int, head_dim: int, value_dim: int, config: GMLPConfig) -> float:
    hidden = _hidden(config, head_dim)
    gate = hidden // 2
    channels = 2.0 * length * head_dim * (hidden + gate)
    if config.weights == "full":
        spatial = 2.0 * length * length * gate
    else:  # real transforms of 2L numbers, there and back
        spatial = 2 * 2.5 * 2 * length * math.log2(2 * length) * gate
    if config.attention is not None:
        width = config.attention
        spatial += 4.0 * length * length * width + 2.0 * length * width * (3 * head_dim + gate)
    return channels + spatial


def _memory(length: int, head_dim: int, value_dim: int, config: GMLPConfig) -> float:
    # Z, the normalised gates, their sums and those with the bias; spectra of 2L places
    numbers = 2.5 if config.weights == "full" else 4.5
    return 4.0 * numbers * length * _hidden(config, head_dim)


@dataclass(frozen=True, eq=False)
class GateState(State):
    """What a causal gate reads: 2·S·E bytes a row in float32, and the attention's cache.

    Args:
        gates: (B, S, E/2) normalised gates, zero at masked tokens.
        attention: keys and values of the tiny attention, or None.
    """

    gates: Tensor
    attention: KeyValueState | None = None


class GMLP(Mixer):
    """Channel projections around a spatial gating unit.

        Z = gelu(x U + b_U),  [Z1, Z2] = Z            U (C, E), halves of width E/2
        s(Z) = Z1 ⊙ (W LayerNorm(Z2) + b 1ᵀ)          W (n, n), b (n): weights over positions
        out = s(Z) V + b_V                            V (E/2, C)

    n = `max_length`. A sequence of L < n tokens uses W[:L, :L] and b[:L]. W starts near zero
    and b at one, so that the unit begins as a feed-forward layer. ``weights=toeplitz`` ties
    W[i, j] = w[i − j]: 2n − 1 numbers in place of n², applied by Fourier transform.
    ``heads=h`` has an own W and b for each of h groups of channels. ``attention=d`` adds
    softmax attention with one head of width d, read from x, to W·LayerNorm(Z2) + b (aMLP);
    its cost is quadratic.

    **Causal**: W is masked to its lower triangle, and so is the attention. The state holds
    the normalised gates of all past tokens: it grows. Toeplitz products round as Fourier
    transforms do: a later token may move the last digit of an earlier one.

    **Padding**: a masked token's gate is zero, so that right-padding changes nothing; W goes
    by position, so that left-padding does.

    **In an encoder layer** this whole unit stands where self-attention stands, behind the
    same norm and inside the same residual, and the layer's feed-forward network follows. The
    paper has no feed-forward network beside it: its block is this unit alone with E = 6·C or so.

    Cost O(L·C·E + L²·E) FLOPs, n² parameters a head: quadratic. With toeplitz weights
    O(L·C·E + L·log L·E), 2n − 1 parameters.

    Paper: Liu et al. 2021, arXiv 2105.08050, eq. 1 and section 2.1; Toeplitz weights and aMLP:
    section 4.

    Args:
        hidden, weights, heads, attention: see `GMLPConfig`.

    Raises:
        OptionError: without `max_length`, or for wrong options.
        ShapeError: for more tokens than `max_length`.

    See `Mixer` for sizes and shapes.

    Example:
        >>> import torch, subquad as sq
        >>> mixer = sq.build("gmlp(weights=toeplitz)", embed_dim=32, max_length=512)
        >>> x = torch.randn(2, 100, 32)
        >>> out, state = mixer.prefill(x[:, :99])
        >>> last, state = mixer.step(x[:, 99:], state=state)
        >>> bool(torch.allclose(last, mixer(x, causal=True)[:, 99:], atol=1e-5))
        True
    """

    name = "gmlp"
    Config = GMLPConfig
    config: GMLPConfig
    max_length: int
    state_type = GateState
    info = Info(
        summary="channels gated by a learned linear map over positions",
        formula="Z = gelu(x U), [Z1, Z2] = Z; out = (Z1 ⊙ (W LayerNorm(Z2) + b)) V, W (n, n)",
        cost=Cost("O(L·C·E + L²·E); toeplitz: O(L·C·E + L·log L·E)", _flops, _memory),
        paper="Liu et al. 2021, Pay Attention to MLPs, arXiv 2105.08050, eq. 1 and section 2.1",
        limit="is the exact unit; with W = 0 and b = 1 a feed-forward network, token by token",
        options={
            "hidden": "E, width between the channel projections, even; default 2·C",
            "weights": "full (any matrix over positions) or toeplitz (it depends on i − j)",
            "heads": "groups of channels with spatial weights of their own",
            "attention": "width of a head of softmax attention added to the gate (aMLP), or none",
        },
        scale="none",
        deviations="stands in place of self-attention with a feed-forward network behind it; the "
        "paper's block is the unit alone",
        sample="gmlp",
        use="encoders and decoders with a fixed greatest length whose positions mean something; "
        "toeplitz weights for long sequences, full ones are quadratic.",
    )

    def __init__(
        self,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **sizes: Any,
    ) -> None:
        super().__init__(device=device, dtype=dtype, **sizes)
        config, width, most = self.config, self.embed_dim, self.max_length
        hidden = _hidden(config, width)
        gate = hidden // 2
        if gate % config.heads:
            raise OptionError(f"gmlp: heads={config.heads} must divide hidden/2 = {gate}")

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.in_weight, self.in_bias = parameter(hidden, width), parameter(hidden)
        self.norm_weight, self.norm_bias = parameter(gate), parameter(gate)
        toeplitz = config.weights == "toeplitz"
        spatial = (2 * most - 1,) if toeplitz else (most, most)
        self.spatial_weight = parameter(config.heads, *spatial)
        self.spatial_bias = parameter(config.heads, most)
        self.out_weight, self.out_bias = parameter(width, gate), parameter(width)
        self.attention: Softmax | None = None
        if config.attention is not None:
            self.attention = Softmax(head_dim=config.attention, num_heads=1)
            self.attention_in = parameter(3 * config.attention, width)
            self.attention_out = parameter(gate, config.attention)
            self.attention_bias = parameter(gate)
        self.reset_parameters()

    @classmethod
    def capabilities_for(cls, config: GMLPConfig) -> Capabilities:
        places = "a token is weighed by its position: closing a gap moves all that follow"
        return mixer_capabilities(state="growing", max_length=True, compact=Absent(places))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws from the seed: W uniform within ±10^-3/n, b one; projections within ±fan_in^-½."""
        generator = torch.Generator().manual_seed(self.seed)
        bounds = {"spatial_weight": 1e-3 / self.max_length}
        for name, parameter in self.named_parameters():
            if parameter.is_meta:
                continue
            if name in ("spatial_bias", "norm_weight"):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                bound = bounds.get(name, parameter.shape[-1] ** -0.5)
                draw = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_((2.0 * draw - 1.0) * bound)

    def _mix(self, x: Tensor, key: Tensor | None, causal: bool) -> Tensor:
        carried, gates = self._gates(x, key)
        extra = None
        if self.attention is not None:
            q, k, v = self._attention_inputs(x)
            extra = self.attention(q, k, v, mask=Mask(causal=causal, key=key))
        return self._gated(carried, self._spatial(gates, x.shape[1], causal), extra)

    def _continue(
        self, x: Tensor, state: GateState | None, key: Tensor | None
    ) -> tuple[Tensor, State]:
        carried, gates = self._gates(x, key)
        extra, cache = None, None
        if state is not None:
            gates = followed(state.gates, gates)
            cache = state.attention
        if self.attention is not None:
            q, k, v = self._attention_inputs(x)
            extra, new = self.attention.prefill(q, k, v, state=cache, key_mask=key)
            assert isinstance(new, KeyValueState), "that is softmax's state"
            cache = new
        out = self._gated(carried, self._spatial(gates, x.shape[1], True), extra)
        return out, GateState(gates, cache)

    def _check_state(self, state: State | None, x: Tensor) -> None:
        super()._check_state(state, x)
        if isinstance(state, GateState) and (state.attention is None) != (self.attention is None):
            have, lack = ("the state", "gmlp") if self.attention is None else ("gmlp", "the state")
            raise ShapeError(f"{have} has an attention (aMLP), {lack} has none: options must agree")

    def _gates(self, x: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor]:
        """Z1 and the normalised Z2, zero at masked tokens."""
        in_weight, in_bias = self.in_weight.to(x.dtype), self.in_bias.to(x.dtype)
        carried, gates = F.gelu(F.linear(x, in_weight, in_bias)).chunk(2, -1)
        scale, shift = self.norm_weight.to(x.dtype), self.norm_bias.to(x.dtype)
        gates = F.layer_norm(gates, gates.shape[-1:], scale, shift)
        return carried, gates if key is None else gates.masked_fill(~key[..., None], 0)

    def _spatial(self, gates: Tensor, rows: int, causal: bool) -> Tensor:
        """The last `rows` rows of W·gates + b, (B, rows, E/2) for gates (B, S, E/2)."""
        length, start = gates.shape[1], gates.shape[1] - rows
        grouped = gates.unflatten(-1, (self.config.heads, -1)).transpose(1, 2)  # (B, h, S, ·)
        weight = self.spatial_weight.to(gates.dtype)
        if self.config.weights == "full":
            weight = weight[:, start:length, :length]
            mixed = (weight.tril(start) if causal else weight) @ grouped
        elif start and rows <= DENSE_ROWS:
            place = torch.arange(length, device=gates.device)
            lag = place[start:, None] - place
            weight = weight[:, lag + self.max_length - 1]
            mixed = (weight.tril(start) if causal else weight) @ grouped
        else:
            mixed = self._convolved(grouped, weight, causal)[:, :, start:]
        mixed = mixed + self.spatial_bias.to(gates.dtype)[:, start:length, None]
        return mixed.transpose(1, 2).flatten(2)

    def _convolved(self, gates: Tensor, weight: Tensor, causal: bool) -> Tensor:
        """Toeplitz weights (h, 2n − 1) times gates (B, h, S, ·) on a circle of 2S places."""
        length, zero = gates.shape[2], self.max_length - 1  # where lag 0 stands
        past, future = weight[:, zero : zero + length], weight[:, zero - length + 1 : zero + 1]
        if causal:
            future = torch.zeros_like(future)
        # lags 0 … S−1, one place that no pair of tokens reads, −(S−1) … −1
        circle = torch.cat([past, future.roll(1, 1)], 1)
        size = 2 * length
        product = torch.fft.rfft(gates, n=size, dim=2) * torch.fft.rfft(circle)[..., None]
        return torch.fft.irfft(product, n=size, dim=2)[:, :, :length]

    def _gated(self, carried: Tensor, gate: Tensor, extra: Tensor | None) -> Tensor:
        if extra is not None:  # (B, 1, L, d)
            weight = self.attention_out.to(gate.dtype)
            gate = gate + F.linear(extra[:, 0], weight, self.attention_bias.to(gate.dtype))
        out_weight, out_bias = self.out_weight.to(gate.dtype), self.out_bias.to(gate.dtype)
        return F.linear(carried * gate, out_weight, out_bias)

    def _attention_inputs(self, x: Tensor) -> tuple[Tensor, ...]:
        return F.linear(x, self.attention_in.to(x.dtype))[:, None].chunk(3, -1)
