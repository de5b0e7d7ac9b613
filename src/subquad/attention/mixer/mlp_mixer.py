"""MLP-Mixer's token mixing: a two-layer network over positions, the same for every channel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad.attention.base import Absent, Capabilities, Cost, Info, State
from subquad.attention.mixer.base import Mixer, followed, mixer_capabilities
from subquad.options import Config, integer_problem

__all__ = ["MLPMixer", "MLPMixerConfig", "TokenState"]


@dataclass(frozen=True)
class MLPMixerConfig(Config):
    """Options of `MLPMixer`.

    Args:
        hidden: K, units of the network over positions; None for `max_length`, one a position,
            which has a causal form.
    """

    mechanism: ClassVar[str] = "mlp_mixer"
    sizes: ClassVar[tuple[str, ...]] = ("hidden",)

    hidden: int | None = 256

    def problems(self) -> Iterator[str]:
        if self.hidden is not None:
            yield from integer_problem("hidden", self.hidden, 1)


def _flops(length: int, head_dim: int, value_dim: int, config: MLPMixerConfig) -> float:
    return 4.0 * length * (config.hidden or length) * head_dim


def _memory(length: int, head_dim: int, value_dim: int, config: MLPMixerConfig) -> float:
    return (8.0 * (config.hidden or length) + 4.0 * length) * head_dim


@dataclass(frozen=True, eq=False)
class TokenState(State):
    """All past tokens and units: 8·S·C bytes a row in float32.

    Args:
        tokens: (B, S, C), zero at masked tokens.
        units: (B, S, C), what the hidden unit of each position gave.
    """

    tokens: Tensor
    units: Tensor


class MLPMixer(Mixer):
    """A two-layer network over positions, applied to every channel alike.

        out = W2 gelu(W1 x + b1 1ᵀ) + b2 1ᵀ           W1 (K, n), W2 (n, K), b1 (K), b2 (n)

    n = `max_length`, K = `hidden`. A sequence of L < n tokens uses W1[:, :L], W2[:L] and
    b2[:L]. Channels do not meet here: that is the work of the layer's feed-forward network,
    the paper's channel-mixing block.

    **Causal**: only with ``hidden=none``, one unit a position (K = n), where both matrices are
    masked to their lower triangles: unit m then reads tokens up to m and is read by tokens
    from m on. With any other K no unit has a position. The state holds all past tokens and
    units: it grows.

    **Padding**: masked tokens are zeros, so that right-padding changes nothing; weights go by
    position, so that left-padding does.

    Cost 4·L·K·C FLOPs, linear in L for a fixed K, with 2·n·K parameters; quadratic with
    ``hidden=none``.

    Paper: Tolstikhin et al. 2021, arXiv 2105.01601, eq. 1 (the first line).

    Args:
        hidden: see `MLPMixerConfig`.

    Raises:
        OptionError: without `max_length`, or for wrong options.
        ShapeError: for more tokens than `max_length`.

    See `Mixer` for sizes and shapes.

    Example:
        >>> import torch, subquad as sq
        >>> mixer = sq.build("mlp_mixer(hidden=64)", embed_dim=32, max_length=512)
        >>> mixer(torch.randn(2, 100, 32)).shape
        torch.Size([2, 100, 32])
    """

    name = "mlp_mixer"
    Config = MLPMixerConfig
    config: MLPMixerConfig
    max_length: int
    state_type = TokenState
    info = Info(
        summary="a two-layer network over positions, the same for every channel",
        formula="out = W2 gelu(W1 x + b1) + b2,  W1 (K, n), W2 (n, K)",
        cost=Cost("O(L·K·C)", _flops, _memory),
        paper="Tolstikhin et al. 2021, MLP-Mixer: An all-MLP Architecture for Vision, "
        "arXiv 2105.01601, eq. 1",
        limit="is the exact network; approximates nothing",
        options={
            "hidden": "K, units of the network over positions; none: one a position, causal then",
        },
        scale="none",
        deviations="sequences shorter than max_length use a part of the weights; the paper's have "
        "one length",
        use="encoders of one fixed length, such as patches of images; the position of a token "
        "decides what reads it, its content never.",
    )

    def __init__(
        self,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **sizes: Any,
    ) -> None:
        super().__init__(device=device, dtype=dtype, **sizes)
        most = self.max_length
        units = most if self.config.hidden is None else self.config.hidden

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.in_weight, self.in_bias = parameter(units, most), parameter(units)
        self.out_weight, self.out_bias = parameter(most, units), parameter(most)
        self.reset_parameters()

    @classmethod
    def capabilities_for(cls, config: MLPMixerConfig) -> Capabilities:
        places = "a token is weighed by its position: closing a gap moves all that follow"
        mixes = Absent("a hidden unit reads and is read by all positions; use hidden=none")
        square = config.hidden is None
        return mixer_capabilities(
            causal=True if square else mixes,
            state="growing" if square else mixes,
            max_length=True,
            compact=Absent(places),
        )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws both matrices from the seed, uniform within ±fan_in^-½; biases are zero."""
        generator = torch.Generator().manual_seed(self.seed)
        for name, parameter in self.named_parameters():
            if parameter.is_meta:
                continue
            if name.endswith("bias"):
                parameter.zero_()
                continue
            draw = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_((2.0 * draw - 1.0) * parameter.shape[-1] ** -0.5)

    def _mix(self, x: Tensor, key: Tensor | None, causal: bool) -> Tensor:
        if causal:
            return self._continue(x, None, key)[0]
        length = x.shape[1]
        w1, b1, w2, b2 = self._weights(x.dtype)
        return w2[:length] @ F.gelu(w1[:, :length] @ x + b1) + b2[:length]

    def _continue(
        self, x: Tensor, state: TokenState | None, key: Tensor | None
    ) -> tuple[Tensor, State]:
        w1, b1, w2, b2 = self._weights(x.dtype)
        tokens = x if state is None else followed(state.tokens, x)
        stop = tokens.shape[1]
        start = stop - x.shape[1]
        units = F.gelu(w1[start:stop, :stop].tril(start) @ tokens + b1[start:stop])
        if state is not None:
            units = followed(state.units, units)
        out = w2[start:stop, :stop].tril(start) @ units + b2[start:stop]
        return out, TokenState(tokens, units)

    def _weights(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """W1, b1 as a column, W2, b2 as a column."""
        w1, b1, w2, b2 = (
            parameter.to(dtype)
            for parameter in (self.in_weight, self.in_bias, self.out_weight, self.out_bias)
        )
        return w1, b1[:, None], w2, b2[:, None]
