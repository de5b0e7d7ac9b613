"""Sinusoidal positions, and the frequencies and angles that rotary positions share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from subquad.errors import DtypeError, OptionError
from subquad.options import integer_problem, number_problem

__all__ = ["Sinusoidal", "angles", "frequencies_of", "position_ids"]


def frequencies_of(
    pairs: int, width: int, base: float, frequencies: Sequence[float] | None
) -> tuple[float, ...]:
    """ω_i in radians a token: base^(−2i/width) for i < pairs, or the given ones."""
    if frequencies is None:
        return tuple(base ** (-2 * i / width) for i in range(pairs))
    return tuple(map(float, frequencies))


def frequency_problems(pairs: int, base: object, frequencies: object) -> list[str]:
    """What is wrong with a base, or with at most `pairs` frequencies in its place."""
    problems = list(number_problem("base", base, 1.0, open_low=True))
    if frequencies is None:
        return problems
    if isinstance(frequencies, str) or not isinstance(frequencies, Sequence) or not frequencies:
        return [*problems, f"frequencies={frequencies!r} must be a list of numbers"]
    for index, value in enumerate(frequencies):
        problems += number_problem(f"frequencies[{index}]", value, float("-inf"))
    if len(frequencies) > pairs:
        problems.append(
            f"frequencies: {len(frequencies)} of them need {2 * len(frequencies)} channels, "
            f"a sine and a cosine each; there are {2 * pairs}"
        )
    return problems


def angles(ids: Tensor, frequencies: Sequence[float]) -> Tensor:
    """ω_f · position, (..., F), float64 (float32 where the device has no other).

    In float32 the angle of position 10⁶ at ω = 1 would be off by 0.03 radians.

    Raises:
        DtypeError: if `ids` are no integers.
    """
    check_ids(ids)
    dtype = torch.float32 if ids.device.type == "mps" else torch.float64
    return ids[..., None].to(dtype) * torch.tensor(frequencies, dtype=dtype, device=ids.device)


def check_ids(ids: Tensor) -> None:
    """Refuses position ids that are no integers."""
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise DtypeError(f"position ids must be integers, given {ids.dtype}")


def position_ids(key_mask: Tensor) -> Tensor:
    """Positions (..., L) of a padded batch: kept tokens count from 0, padding gets 0.

    Args:
        key_mask: (..., L) bool, True = attend.

    Example:
        >>> import torch
        >>> from subquad.positions import position_ids
        >>> position_ids(torch.tensor([[False, False, True, True], [True, True, True, True]]))
        tensor([[0, 0, 0, 1],
                [0, 1, 2, 3]])
    """
    if key_mask.dtype != torch.bool:
        raise DtypeError(f"key_mask must be bool (True = attend), given {key_mask.dtype}")
    return (key_mask.long().cumsum(-1) - 1).masked_fill(~key_mask, 0)


class Sinusoidal(nn.Module):
    """Sines and cosines of the position.

        PE(p, 2i) = sin(ω_i·p)        PE(p, 2i+1) = cos(ω_i·p)        ω_i = base^(−2i/C)

    A shift by δ tokens is a rotation of each pair, the same for every p. With `frequencies`
    the ω_i are those given, in radians a token, such as 2^(1/10), 2^(1/9), …, 2; channels
    behind the last pair are zero. There are no parameters, and no longest position.

    Cost: O(C) a token.

    Paper: Vaswani et al. 2017, arXiv 1706.03762, section 3.5.

    Args:
        width: C, channels; with an odd C the last one is a sine.
        base: 10000 in the paper; > 1.
        frequencies: at most C/2 of them, in place of powers of the base.

    Raises:
        OptionError: for a wrong width, base or frequency.

    Example:
        >>> import torch
        >>> from subquad.positions import Sinusoidal
        >>> Sinusoidal(4)(torch.arange(2))
        tensor([[0.0000, 1.0000, 0.0000, 1.0000],
                [0.8415, 0.5403, 0.0100, 0.9999]])
        >>> Sinusoidal(6, frequencies=[2 ** (1 / n) for n in (3, 2, 1)])(torch.tensor([[7]])).shape
        torch.Size([1, 1, 6])
    """

    def __init__(
        self, width: int, base: float = 10000.0, frequencies: Sequence[float] | None = None
    ) -> None:
        super().__init__()
        problems = list(integer_problem("width", width, 1))
        if not problems:
            problems += frequency_problems(width // 2, base, frequencies)
        if problems:
            raise OptionError("Sinusoidal: " + "; ".join(problems))
        self.width = width
        self.frequencies = frequencies_of((width + 1) // 2, width, base, frequencies)

    def forward(self, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The vectors (..., C) of positions `ids` (...), integers, in `dtype`.

        Raises:
            DtypeError: if `ids` are no integers.
        """
        angle = angles(ids, self.frequencies)
        pairs = torch.stack([angle.sin(), angle.cos()], -1).flatten(-2).to(dtype)
        missing = self.width - pairs.shape[-1]
        return torch.nn.functional.pad(pairs, (0, missing))  # a negative pad cuts the odd column

    def extra_repr(self) -> str:
        return f"{self.width}, {len(self.frequencies)} frequencies"
