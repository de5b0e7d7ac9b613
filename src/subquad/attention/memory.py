"""What cross-attentions read: mixtures of an encoder's layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from subquad.errors import OptionError, ShapeError
from subquad.options import integer_problem

__all__ = ["LayerMix"]


class LayerMix(nn.Module):
    """Learned mixtures of all encoder layers, one for each cross-attention.

        memory_c = Σ_l softmax(w_c)_l · h_l

    The parameter `weight` (num_reads, num_layers) holds w. It starts at zero: every mixture is
    the mean of the layers. Each layer then has a path to the loss past all layers behind it,
    which is what the paper is after: encoders that train at twice or three times the depth.

    Cost: 2·num_reads·num_layers·C FLOPs a token, beside those of the model.

    Paper: Bapna et al. 2018, arXiv 1808.07561, section 3 ("transparent attention"). Deviations:
    the layers are those that are given, there with the embedding as one more; no dropout on
    the weights; they start equal.

    Args:
        num_layers: layers that are mixed.
        num_reads: mixtures, one for each cross-attention.
        device, dtype: of the parameter.

    Raises:
        OptionError: if a number is no integer ≥ 1.

    Example:
        >>> import torch, subquad as sq
        >>> from subquad.attention.memory import LayerMix
        >>> encoder = sq.TransformerEncoder(32, 4, 3, norm_first=True)
        >>> decoder = sq.TransformerDecoder(32, 4, 2)
        >>> mix = LayerMix(num_layers=3, num_reads=2)
        >>> hidden = encoder.hidden_states(torch.randn(2, 9, 32))
        >>> layers = [*hidden[1:-2:2], hidden[-1]]  # behind each "af"; the last with its norm
        >>> decoder(torch.randn(2, 5, 32), mix(layers)).shape
        torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        num_layers: int,
        num_reads: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        problems = [
            *integer_problem("num_layers", num_layers, 1),
            *integer_problem("num_reads", num_reads, 1),
        ]
        if problems:
            raise OptionError("LayerMix: " + "; ".join(problems))
        self.weight = nn.Parameter(torch.empty(num_reads, num_layers, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Makes every mixture the mean."""
        nn.init.zeros_(self.weight)

    def extra_repr(self) -> str:
        reads, layers = self.weight.shape
        return f"num_layers={layers}, num_reads={reads}"

    def forward(self, layers: Sequence[Tensor]) -> list[Tensor]:
        """The memory (B, S, C) of each cross-attention.

        Args:
            layers: num_layers tensors (B, S, C).

        Raises:
            ShapeError: if their number or shapes differ from that.
        """
        shapes = [tuple(layer.shape) for layer in layers]
        if len(shapes) != self.weight.shape[1] or len(set(shapes)) > 1 or len(shapes[0]) != 3:
            raise ShapeError(
                f"layers must be {self.weight.shape[1]} tensors of one shape (B, S, C), "
                f"given {len(shapes)}: {', '.join(map(str, dict.fromkeys(shapes)))}"
            )
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        weight = self.weight.to(wide).softmax(-1).to(layers[0].dtype)
        return list(torch.einsum("rl,lbsc->rbsc", weight, torch.stack(list(layers))).unbind())
