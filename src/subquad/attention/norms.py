"""Normalisation of a Transformer's blocks: layer, rms, or batch norm that leaves padding out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad.attention.base import computed_again
from subquad.errors import ShapeError
from subquad.options import choice_problem

__all__ = ["NORMS", "MaskedBatchNorm", "build_norm", "norm_problem", "normalise"]

NORMS = ("layer", "batch", "rms")
"""Names of the norms."""


class MaskedBatchNorm(nn.BatchNorm1d):
    """Batch norm of (..., C) whose statistics are those of the tokens that are no padding.

        y_c = (x_c − mean_c) / √(var_c + eps) · weight_c + bias_c

    While training, mean and variance of channel c are taken over all kept tokens of all rows,
    and enter the running ones (the variance with n/(n − 1)); in evaluation the running ones
    are used. Parameters and buffers are those of `torch.nn.BatchNorm1d`. While training an
    output depends on every token of the batch, later ones too: a causal model sees its future
    through the statistics, until it is evaluated.

    Cost: O(C) a token.

    Args:
        width: C, channels.
        eps: added to variances.
        momentum: share of a batch in the running statistics.
        bias: whether there is one.
        device, dtype: of parameters and buffers.

    Paper: Ioffe, Szegedy 2015, arXiv 1502.03167, algorithm 1; in Transformers: Shen et al.
    2020, arXiv 2003.07845, section 3.

    Example:
        >>> import torch
        >>> from subquad.attention.norms import MaskedBatchNorm
        >>> x, keep = torch.randn(2, 5, 8), torch.ones(2, 5, dtype=torch.bool)
        >>> keep[1, 3:] = False
        >>> bool(MaskedBatchNorm(8)(x, keep)[keep].mean(0).abs().max() < 1e-6)
        True
    """

    momentum: float

    def __init__(
        self,
        width: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(width, eps, momentum, device=device, dtype=dtype)
        if not bias:
            self.register_parameter("bias", None)

    def forward(self, input: Tensor, keep: Tensor | None = None) -> Tensor:
        """The normalised tokens, shaped like `input`.

        Args:
            input: (..., C).
            keep: bool, broadcastable to `input` without C, False = padding. None: all count.
                While training, padded tokens come out as the bias, whatever they were.

        Raises:
            ShapeError: if the last dimension is not C.
        """
        x = input
        if x.shape[-1] != self.num_features:
            raise ShapeError(f"input must be (..., C={self.num_features}), given {tuple(x.shape)}")
        if not self.training or keep is None:
            return self._of_all(x.reshape(-1, self.num_features)).reshape(x.shape)
        kept = keep.expand(x.shape[:-1])[..., None]
        over = tuple(range(x.dim() - 1))
        # sums in float32 at least: a half has no room for a batch of tokens
        wide = x.masked_fill(~kept, 0).to(torch.promote_types(x.dtype, torch.float32))
        count = kept.sum().to(wide.dtype)
        some = count.clamp_min(1)  # a batch of padding alone has no statistics
        mean = wide.sum(over) / some
        centred = (wide - mean).masked_fill(~kept, 0)
        var = centred.square().sum(over) / some
        if not computed_again():
            with torch.no_grad():
                self._track(mean, var * some / (some - 1).clamp_min(1), count > 0)
        out = centred * torch.rsqrt(var + self.eps) * self.weight
        return (out if self.bias is None else out + self.bias).to(x.dtype)

    def _of_all(self, rows: Tensor) -> Tensor:
        if not (self.training and computed_again()):
            out: Tensor = super().forward(rows)
            return out
        assert self.running_mean is not None and self.running_var is not None
        running = self.running_mean.clone(), self.running_var.clone()
        return F.batch_norm(rows, *running, self.weight, self.bias, True, self.momentum, self.eps)

    def _track(self, mean: Tensor, var: Tensor, any_token: Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None
        share = self.momentum * any_token.to(self.running_mean.dtype)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(var.to(self.running_var.dtype), share)
        self.num_batches_tracked.add_(any_token.to(torch.long))


def norm_problem(kind: object) -> list[str]:
    """What is wrong with the name of a norm."""
    return list(choice_problem("norm", kind, NORMS))


def build_norm(kind: str, width: int, eps: float, bias: bool = True, **factory: Any) -> nn.Module:
    """The norm of that name over C = `width` channels; rms has no bias in any case."""
    if kind == "layer":
        return nn.LayerNorm(width, eps, bias=bias, **factory)
    if kind == "rms":
        return nn.RMSNorm(width, eps, **factory)
    return MaskedBatchNorm(width, eps, bias=bias, **factory)


def normalise(norm: nn.Module, x: Tensor, keep: Tensor | None) -> Tensor:
    """The norm of x (..., C); `keep` is for norms whose statistics range over tokens."""
    out: Tensor = norm(x, keep) if isinstance(norm, MaskedBatchNorm) else norm(x)
    return out
