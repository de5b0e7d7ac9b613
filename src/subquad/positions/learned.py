"""Learned positions: a table with a row for each position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from subquad.errors import OptionError, ShapeError
from subquad.options import integer_problem
from subquad.positions.sinusoidal import check_ids

__all__ = ["Learned"]


class Learned(nn.Module):
    """A learned vector for each position below `max_length`.

        PE(p) = weight[p]

    Initial values are drawn from N(0, 0.02²), as in BERT and GPT-2, by torch's generator.

    Cost: O(C) a token, max_length·C parameters.

    Paper: Gehring et al. 2017, arXiv 1705.03122, section 3.1.

    Args:
        max_length: number of positions.
        width: C, channels.
        device, dtype: of the parameter.

    Raises:
        OptionError: for sizes below 1.

    Example:
        >>> import torch
        >>> from subquad.positions import Learned
        >>> Learned(512, 16)(torch.arange(10)).shape
        torch.Size([10, 16])
    """

    def __init__(
        self,
        max_length: int,
        width: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        problems = [
            *integer_problem("max_length", max_length, 1),
            *integer_problem("width", width, 1),
        ]
        if problems:
            raise OptionError("Learned: " + "; ".join(problems))
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(max_length, width, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the table anew from torch's generator."""
        nn.init.normal_(self.weight, std=0.02)

    def check_length(self, stop: int) -> None:
        """Refuses positions up to `stop` (exclusive) that the table does not have.

        Raises:
            ShapeError: if `stop` is above `max_length`.
        """
        if stop > len(self.weight):
            raise ShapeError(
                f"learned positions end at max_length={len(self.weight)}, given {stop} tokens"
            )

    def forward(self, ids: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The vectors (..., C) of positions `ids` (...), integers below `max_length`.

        Raises:
            DtypeError: if `ids` are no integers.
            ShapeError: if one is out of the table; only where reading it costs nothing, on
                the CPU and outside of a compiler.
        """
        check_ids(ids)
        if ids.device.type == "cpu" and ids.numel() and not torch.compiler.is_compiling():
            if int(ids.min()) < 0:
                raise ShapeError(f"position ids must be ≥ 0, given {int(ids.min())}")
            self.check_length(int(ids.max()) + 1)
        out = self.weight[ids]
        return out if dtype is None else out.to(dtype)

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, {self.weight.shape[1]}"
