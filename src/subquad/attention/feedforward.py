"""The feed-forward block of a Transformer: two linear maps with an activation or a gate between."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad.attention.dropout import Dropout
from subquad.errors import OptionError, nearest
from subquad.options import choice_problem, integer_problem

__all__ = ["ACTIVATIONS", "GATES", "KINDS", "FeedForward", "activation_problem"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
}
"""Functions by name."""

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "glu": torch.sigmoid,
    "reglu": F.relu,
    "geglu": F.gelu,
    "swiglu": F.silu,
}
"""What a gated variant applies to its gate."""

KINDS = ("linear", "conv")
"""What the maps of a `FeedForward` are."""


def activation_problem(activation: object, names: tuple[str, ...]) -> list[str]:
    """What is wrong with an activation that may be a function or one of `names`."""
    if callable(activation) or activation in names:
        return []
    hint = nearest(activation, names) if isinstance(activation, str) else ""
    return [f"activation={activation!r} is none of {', '.join(names)}{hint}, nor a function"]


class FeedForward(nn.Module):
    """The position-wise feed-forward network.

        FF(x) = W₂ dropout(act(W₁ x + b₁)) + b₂                relu, gelu, silu, a function
        FF(x) = W₂ dropout(gate(W x + b) ⊙ (V x + c)) + b₂     glu, reglu, geglu, swiglu

    with gate = sigmoid, relu, gelu, silu. The gated variants hold W above V in `linear1`, with
    2·hidden rows: for as many parameters as without a gate choose two thirds of `hidden`.

    The maps are linear layers, or with ``kind="conv"`` convolutions of kernel size 1, the other
    way in which Vaswani et al. describe them: the same numbers, from weights (hidden, C, 1). A
    state dict of either kind loads into the other.

    Cost: 4·C·hidden FLOPs a token, gated 6·C·hidden.

    Papers: Vaswani et al. 2017, arXiv 1706.03762, section 3.3, eq. 2; Hendrycks, Gimpel 2016,
    arXiv 1606.08415 (gelu, exact); Shazeer 2020, arXiv 2002.05202, eq. 5 and 6 (gated).

    Args:
        width: C.
        hidden: units between the maps.
        activation: a name or a function.
        dropout: probability of dropping a unit while training.
        bias: whether the maps have biases.
        kind: "linear" or "conv".
        device, dtype: of the parameters.

    Raises:
        OptionError: for wrong sizes, an unknown activation or kind.

    Example:
        >>> import torch
        >>> from subquad.attention.feedforward import FeedForward
        >>> FeedForward(32, 64, "swiglu")(torch.randn(2, 10, 32)).shape
        torch.Size([2, 10, 32])
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        activation: str | Callable[[Tensor], Tensor] = "relu",
        dropout: float = 0.0,
        bias: bool = True,
        *,
        kind: str = "linear",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        problems = [
            *integer_problem("width", width, 1),
            *integer_problem("dim_feedforward", hidden, 1),
            *activation_problem(activation, (*ACTIVATIONS, *GATES)),
            *choice_problem("feed_forward", kind, KINDS),
        ]
        if problems:
            raise OptionError("FeedForward: " + "; ".join(problems))
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.gated = isinstance(activation, str) and activation in GATES
        named = {**ACTIVATIONS, **GATES}
        self.activation = named[activation] if isinstance(activation, str) else activation
        self.kind = kind
        self.linear1 = self._map(width, (1 + self.gated) * hidden, bias, factory)
        self.dropout = Dropout(dropout)
        self.linear2 = self._map(hidden, width, bias, factory)

    def _map(self, inside: int, outside: int, bias: bool, factory: dict[str, Any]) -> nn.Module:
        if self.kind == "conv":
            return nn.Conv1d(inside, outside, 1, bias=bias, **factory)
        return nn.Linear(inside, outside, bias=bias, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """FF(x), shaped like x (..., C)."""
        if self.kind == "linear":
            return self._network(x, -1)
        tokens = x.reshape(-1, *x.shape[-2:]) if x.dim() > 1 else x[None, None]
        return self._network(tokens.transpose(1, 2), 1).transpose(1, 2).reshape(x.shape)

    def _network(self, x: Tensor, channels: int) -> Tensor:
        """FF of tokens whose channels are in this dimension."""
        units = self.linear1(x)
        if self.gated:
            gate, value = units.chunk(2, channels)
            units = self.activation(gate) * value
        else:
            units = self.activation(units)
        out: Tensor = self.linear2(self.dropout(units))
        return out

    def _load_from_state_dict(
        self, state_dict: MutableMapping[str, Any], prefix: str, *arguments: Any
    ) -> None:
        for name in (f"{prefix}linear1.weight", f"{prefix}linear2.weight"):
            weight = state_dict.get(name)
            if weight is None:
                continue
            if self.kind == "conv" and weight.dim() == 2:
                state_dict[name] = weight.unsqueeze(-1)
            elif self.kind == "linear" and weight.dim() == 3 and weight.shape[-1] == 1:
                state_dict[name] = weight.squeeze(-1)
        super()._load_from_state_dict(state_dict, prefix, *arguments)
