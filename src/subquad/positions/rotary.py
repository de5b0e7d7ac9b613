"""Rotary positions: q and k are turned, so that their product sees the distance alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from subquad.errors import OptionError
from subquad.options import flag_problem, integer_problem
from subquad.positions.sinusoidal import angles, frequencies_of, frequency_problems

__all__ = ["Rotary"]


class Rotary(nn.Module):
    """Rotary position embedding.

        (x_2i, x_2i+1) at position p  →  (x_2i cos ω_i p − x_2i+1 sin ω_i p,
                                          x_2i sin ω_i p + x_2i+1 cos ω_i p)    ω_i = base^(−2i/D)

    With q and k turned, q_p·k_s is a function of q, k and p − s, and norms stay. It acts
    before the mechanism, so that it works with all that read q and k: those that compute or
    estimate exp(q·k) then see relative positions (an estimate in expectation); features that
    are no function of q·k, such as those of `linear`, see positions that are not exactly
    relative (the paper, equation 19, turns φ(q) and φ(k) there instead, in the numerator
    alone, where a weight may then be negative).

    Cost: O(D) a token and head. There are no parameters, and no longest position.

    Paper: Su et al. 2021, arXiv 2104.09864, equations 14, 15 and 34.

    Args:
        head_dim: D, even.
        base: 10000 in the paper; > 1.
        frequencies: at most D/2, in radians a token, in place of powers of the base; channels
            behind the last pair are not turned.
        interleaved: pairs are neighbours (the paper, GPT-J); False: channel i goes with
            i + D/2 (GPT-NeoX, Llama).

    Raises:
        OptionError: for an odd width, a wrong base or frequency.

    Example:
        >>> import torch
        >>> from subquad.positions import Rotary
        >>> rotary, q, k = Rotary(8), torch.randn(1, 8), torch.randn(1, 8)
        >>> at = lambda x, p: rotary(x, torch.tensor([p]))
        >>> bool(torch.allclose(at(q, 5) @ at(k, 2).T, at(q, 103) @ at(k, 100).T, atol=1e-5))
        True
    """

    def __init__(
        self,
        head_dim: int,
        base: float = 10000.0,
        frequencies: Sequence[float] | None = None,
        *,
        interleaved: bool = True,
    ) -> None:
        super().__init__()
        problems = [
            *integer_problem("head_dim", head_dim, 2),
            *flag_problem("interleaved", interleaved),
        ]
        if not problems and head_dim % 2:
            problems.append(f"head_dim={head_dim} must be even: channels are turned in pairs")
        if not problems:
            problems += frequency_problems(head_dim // 2, base, frequencies)
        if problems:
            raise OptionError("Rotary: " + "; ".join(problems))
        self.head_dim = head_dim
        self.interleaved = interleaved
        self.frequencies = frequencies_of(head_dim // 2, head_dim, base, frequencies)

    def tables(self, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin (..., L, F) of positions `ids` (..., L), for calls of `turn`."""
        angle = angles(ids, self.frequencies)
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def turn(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """x (..., L, D), turned by `tables`, which broadcast to it but for the last dimension."""
        cos, sin = tables
        turned = 2 * cos.shape[-1]
        if self.interleaved:
            head, tail = x[..., :turned], x[..., turned:]
            a, b = head[..., ::2], head[..., 1::2]
            pairs = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
            return torch.cat([pairs, tail], -1) if tail.shape[-1] else pairs
        half, pairs_n = self.head_dim // 2, turned // 2
        a, rest_a, b, rest_b = x.split([pairs_n, half - pairs_n] * 2, -1)
        return torch.cat([a * cos - b * sin, rest_a, a * sin + b * cos, rest_b], -1)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """x (..., L, D) with the token at each place turned to its position.

        Args:
            x: queries or keys.
            ids: integers, (L,) or broadcastable to x without D: (B, 1, L) for heads.

        Raises:
            DtypeError: if `ids` are no integers.
        """
        return self.turn(x, self.tables(ids, x.dtype))

    def extra_repr(self) -> str:
        return f"{self.head_dim}, interleaved={self.interleaved}"
