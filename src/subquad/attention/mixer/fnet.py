"""FNet: the real part of the Fourier transform over tokens and channels mixes them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from subquad.attention.base import Absent, Capabilities, Cost, Info
from subquad.attention.mixer.base import Mixer, mixer_capabilities
from subquad.options import Config, choice_problem

__all__ = ["FNet", "FNetConfig"]


@dataclass(frozen=True)
class FNetConfig(Config):
    """Options of `FNet`.

    Args:
        norm: "backward" (the plain transform, the paper's) or "ortho" (divided by √(L·C), so
            that the output is as large as x).
        padding: "compact" (a row is transformed over the tokens it has, at their number) or
            "zero" (masked tokens are zeros of a transform over the padded length).
    """

    mechanism: ClassVar[str] = "fnet"

    norm: str = "backward"
    padding: str = "compact"

    def problems(self) -> Iterator[str]:
        yield from choice_problem("norm", self.norm, ("backward", "ortho"))
        yield from choice_problem("padding", self.padding, ("compact", "zero"))


def _flops(length: int, head_dim: int, value_dim: int, config: FNetConfig) -> float:
    # a transform of N complex numbers takes 5·N·log2 N, of N real ones half of it
    return 2.5 * length * head_dim * math.log2(max(length * head_dim, 2))


class FNet(Mixer):
    """Mixes tokens by a fixed Fourier transform, without any parameter.

        out = Re(F_L x F_C),   F_n[i, j] = exp(−2πi·ij/n)
        out[i, c] = Σ_j Σ_d cos(2π(ij/L + cd/C)) x[j, d]

    The map is linear and its own transpose. Twice in a row it gives
    (L·C/2)·(x + x reversed), x reversed being x[−i mod L, −c mod C].

    **Padding.** The frequencies are those of the row's length. With ``padding=compact`` each
    row is transformed over the tokens that its key mask keeps, at their number n, so that
    padding of any kind changes nothing; n may differ from row to row, by Bluestein's
    algorithm: jk = (j² + k² − (k − j)²)/2 turns a transform of any length into a convolution,
    done at length 2L for all rows. With ``padding=zero`` masked tokens are zeros in a
    transform of the padded length, as in a model that was trained at one length.

    There is no causal form: every output reads all tokens.

    Cost O(L·C·(log L + log C)) FLOPs, 8·L·C bytes for a half spectrum and its rotation; with a
    key mask and ``padding=compact`` about five times that. Float32 inside for half precision.
    Outputs are √(L·C) as large as x with ``norm=backward``: float16 may overflow where L·C > 10^7.

    Paper: Lee-Thorp et al. 2021, arXiv 2105.03824, section 3.2.

    Args:
        norm, padding: see `FNetConfig`.

    Raises:
        OptionError: for wrong options, or without a width.

    See `Mixer` for sizes and shapes.

    Example:
        >>> import torch, subquad as sq
        >>> mixer = sq.build("fnet", embed_dim=64)
        >>> x = torch.randn(2, 100, 64)
        >>> bool(torch.allclose(mixer(x), torch.fft.fft2(x).real, atol=1e-3))
        True
    """

    name = "fnet"
    Config = FNetConfig
    config: FNetConfig
    info = Info(
        summary="the real part of a Fourier transform over tokens and channels",
        formula="out = Re(F_L x F_C),  F_n[i, j] = exp(−2πi·ij/n)",
        cost=Cost(
            "O(L·C·log(L·C))",
            _flops,
            # half a spectrum, and the same again while the other half is filled in
            lambda length, head_dim, value_dim, config: 8.0 * length * (head_dim + 2),
        ),
        paper="Lee-Thorp et al. 2021, FNet: Mixing Tokens with Fourier Transforms, "
        "arXiv 2105.03824, section 3.2",
        limit="is the exact transform; approximates nothing",
        options={
            "norm": "backward (the plain transform) or ortho (divided by √(L·C))",
            "padding": "compact (a row is transformed over the tokens it has) or zero (masked "
            "tokens are zeros of a transform over the padded length)",
        },
        scale="none",
        deviations="padding is taken out of the transform; the paper transforms it with the rest",
        use="encoders where speed matters more than the last points of accuracy; nothing in it "
        "is learned, so that the feed-forward layers have to do the work.",
    )

    @classmethod
    def capabilities_for(cls, config: FNetConfig) -> Capabilities:
        every = "every output reads all tokens: a Fourier transform has no causal form"
        own: Absent | bool = True
        if config.padding == "zero":
            own = Absent("the frequencies are those of the padded length; use padding=compact")
        return mixer_capabilities(
            causal=Absent(every), state=Absent(every), pad_invariant=own, compact=own
        )

    def _mix(self, x: Tensor, key: Tensor | None, causal: bool) -> Tensor:
        length, width = x.shape[1:]
        ortho = self.config.norm == "ortho"
        if key is None or self.config.padding == "zero":
            out = _whole(torch.fft.fft(torch.fft.rfft(x), dim=1).real, width)
            return out * (length * width) ** -0.5 if ortho else out
        # Open tokens move to the front, in their order, and back behind the transform.
        count = key.sum(1)
        order = (~key).to(torch.uint8).argsort(dim=1, stable=True)
        front = x.gather(1, order[..., None].expand_as(x))
        out = _whole(_ragged_transform(torch.fft.rfft(front), count), width, count)
        if ortho:
            out = out * (count.clamp_min(1) * width).to(out.dtype).rsqrt()[:, None, None]
        return out.gather(1, order.argsort(dim=1)[..., None].expand_as(out))


def _whole(half: Tensor, width: int, count: Tensor | None = None) -> Tensor:
    """All `width` channels of the transform of real x from the first ⌊width/2⌋ + 1 of them.

    Re X[i, c] = Re X[−i mod n, −c mod C] for real x, n the row's length (default L).
    """
    length = half.shape[1]
    rest = half[..., 1 : (width + 1) // 2].flip(-1)
    if count is None:
        back = rest.flip(1).roll(1, 1)  # row i is row (L − i) mod L
    else:
        place = torch.arange(length, device=half.device)
        index = (count[:, None] - place).clamp_min(0)
        index = torch.where(place == 0, 0, index)
        back = rest.gather(1, index[..., None].expand_as(rest))
    return torch.cat([half, back], -1)


def _ragged_transform(x: Tensor, count: Tensor) -> Tensor:
    """Re of the transform over dimension 1 of the first count_b rows of x (B, L, ·) complex.

    Rows of x behind count_b have to be zero; of the output they mean nothing. Bluestein:
    with b_j = exp(πi·j²/n), X_k = b̄_k Σ_j (x_j b̄_j) b_{k−j}. The squares are reduced mod 2n
    as integers, so that angles are exact at any length.
    """
    length = x.shape[1]
    size = 2 * length
    place = torch.arange(length, device=x.device)
    period = 2 * count.clamp_min(1)[:, None]
    real = x.real.dtype
    angle = (place * place % period).to(torch.float64) / period * (2.0 * math.pi)
    chirp = torch.polar(torch.ones_like(angle), angle).to(x.dtype)[..., None]
    # lags −(L−1) … L−1 around a circle of 2L; b is even
    kernel = torch.cat([chirp, torch.zeros_like(chirp[:, :1]), chirp[:, 1:].flip(1)], 1)
    spectrum = torch.fft.fft(x * chirp.conj(), n=size, dim=1) * torch.fft.fft(kernel, dim=1)
    return (torch.fft.ifft(spectrum, dim=1)[:, :length] * chirp.conj()).real.to(real)
