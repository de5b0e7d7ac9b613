"""The front end of speech models: log-mel frames become a quarter as many vectors."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad.data.audio import LogMel
from subquad.errors import OptionError, ShapeError, nearest
from subquad.options import integer_problem, number_problem

__all__ = ["SpecAugment", "SpeechFrontEnd"]


class SpecAugment(nn.Module):
    """Noise for training on features: whole bands and whole spans of time become 0.

        bands:  f ~ U[0, band_width],              f₀ ~ U[0, mels − f]:  x[:, f₀ : f₀+f] = 0
        spans:  t ~ U[0, min(span_width, p·T)],    t₀ ~ U[0, T − t]:     x[t₀ : t₀+t, :] = 0

    0 is the mean of normalised features. Each clip of a batch draws its own, from torch's
    global generator as dropout does; in eval mode nothing happens. O(B·T·mels).

    Park et al. 2019, arXiv 1904.08779, section 2, without its time warp, which they find to
    help least. Their policy LB is (1, 27, 1, 100), LD (2, 27, 2, 100), both for 80 bands.

    Args:
        bands: how many, m_F.
        band_width: largest width F, in mel bands.
        spans: how many, m_T.
        span_width: largest length T, in frames.
        span_share: largest share p of a clip that one span may cover.

    Raises:
        OptionError: naming every wrong argument.

    Example:
        >>> augment = SpecAugment(bands=1, band_width=8, spans=1, span_width=20)
        >>> augment(torch.randn(2, 100, 40)).shape
        torch.Size([2, 100, 40])
    """

    def __init__(
        self,
        bands: int = 2,
        band_width: int = 27,
        spans: int = 2,
        span_width: int = 100,
        span_share: float = 1.0,
    ) -> None:
        super().__init__()
        problems = [
            *integer_problem("bands", bands, 0),
            *integer_problem("band_width", band_width, 1),
            *integer_problem("spans", spans, 0),
            *integer_problem("span_width", span_width, 1),
            *number_problem("span_share", span_share, 0.0, 1.0),
        ]
        if problems:
            raise OptionError("SpecAugment: " + "; ".join(problems))
        self.bands, self.band_width = bands, band_width
        self.spans, self.span_width, self.span_share = spans, span_width, span_share

    def extra_repr(self) -> str:
        return (
            f"bands={self.bands}, band_width={self.band_width}, spans={self.spans}, "
            f"span_width={self.span_width}, span_share={self.span_share}"
        )

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """Features (B, T, mels) with parts at 0; `mask` (B, T) says which frames there are."""
        if not self.training:
            return features
        batch, frames, mels = features.shape
        sizes = features.new_full((batch, 1), frames) if mask is None else mask.sum(1, True)
        widest = (self.span_share * sizes).clamp(max=self.span_width)
        limits = features.new_full((batch, 1), min(self.band_width, mels))
        wide = _drawn(limits, features.new_full((batch, 1), mels), mels, self.bands)
        long = _drawn(widest, sizes, frames, self.spans)
        return features.masked_fill(wide[:, None, :] | long[:, :, None], 0.0)


def _drawn(widest: Tensor, sizes: Tensor, length: int, count: int) -> Tensor:
    """Which of `length` places (B, length) lie in one of `count` random intervals of a row.

    Args:
        widest: (B, 1), of an interval.
        sizes: (B, 1), places that the row has.
        length: of the longest row.
        count: intervals of each row.
    """
    shape = (len(sizes), count)
    width = (torch.rand(shape, device=sizes.device) * (widest.floor() + 1)).floor()
    start = (torch.rand(shape, device=sizes.device) * (sizes - width + 1)).floor()
    places = torch.arange(length, device=sizes.device)
    inside = (places >= start[..., None]) & (places < (start + width)[..., None])
    return inside.any(1)


class SpeechFrontEnd(nn.Module):
    """Convolutions of stride 2 over time, each behind a gate: fewer frames, of width C.

        h₀ = features;   [a, b] = conv(h_{i−1}),  h_i = a ∘ σ(b)      i = 1 … log₂ stride

    Kernel 5, 2 layers: the subsampler of fairseq's S2T Transformer and of transformers'
    Speech2Text (Synnaeve et al. 2019, arXiv 1911.08460); Speech-Transformer (Dong et al. 2018)
    has 3×3 kernels over time and frequency in the same place. Where we deviate: frames of
    padding are zeros before every convolution, so that a clip's vectors do not depend on what
    it is batched with; and vectors are not multiplied by √C: features are normalised, so that
    they are as large as the positions that are added.

    Cost O(T·kernel·channels·(mels + d_model/stride)). `log_mel` makes the features of samples;
    its arguments stand in the same mapping, so that a saved config knows all of both.

    Args:
        d_model: C.
        stride: frames that become one; a power of two.
        channels: of the first convolutions' outputs, half of which are gates; even.
        kernel: frames that a convolution sees; odd.
        augment: a mapping with arguments of `SpecAugment`; None: no noise.
        log_mel: arguments of `subquad.data.audio.LogMel`: ``rate``, ``mels``, …

    Raises:
        OptionError: naming everything that is wrong.

    Example:
        >>> front_end = SpeechFrontEnd(64, channels=32, rate=8000, mels=40)
        >>> features = front_end.log_mel(torch.randn(1, 8000))
        >>> vectors, mask = front_end(features)
        >>> features.shape, vectors.shape
        (torch.Size([1, 101, 40]), torch.Size([1, 26, 64]))
    """

    def __init__(
        self,
        d_model: int,
        *,
        stride: int = 4,
        channels: int = 256,
        kernel: int = 5,
        augment: Mapping[str, Any] | None = None,
        **log_mel: Any,
    ) -> None:
        super().__init__()
        problems = [
            *integer_problem("stride", stride, 2),
            *integer_problem("channels", channels, 2),
            *integer_problem("kernel", kernel, 1),
        ]
        if not problems:
            if stride & (stride - 1):
                problems.append(f"stride={stride} must be a power of two")
            if channels % 2:
                problems.append(f"channels={channels} must be even: half of them are gates")
            if not kernel % 2:
                problems.append(f"kernel={kernel} must be odd: it has a frame in its middle")
        if problems:
            raise OptionError("SpeechFrontEnd: " + "; ".join(problems))
        self.stride = stride
        self.log_mel = LogMel(**log_mel)
        self.augment = None if augment is None else SpecAugment(**augment)
        layers = stride.bit_length() - 1
        inner = [self.log_mel.mels, *[channels // 2] * (layers - 1)]
        outer = [*[channels] * (layers - 1), 2 * d_model]
        self.convolutions = nn.ModuleList(
            nn.Conv1d(given, made, kernel, stride=2, padding=kernel // 2)
            for given, made in zip(inner, outer, strict=True)
        )

    def forward(self, features: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Vectors (B, ⌈T/stride⌉, C), and their mask.

        Args:
            features: (B, T, mels).
            mask: (B, T), 1 = a frame, 0 = padding, which is at the right.

        Raises:
            ShapeError: if they do not fit.
        """
        mels = self.log_mel.mels
        if features.dim() != 3 or features.shape[-1] != mels or not features.shape[1]:
            raise ShapeError(
                f"input_features must be (B, T, {mels}) with T ≥ 1, given {tuple(features.shape)}"
            )
        if mask is not None and mask.shape != features.shape[:2]:
            raise ShapeError(
                f"attention_mask must be (B, T) = {tuple(features.shape[:2])}, given "
                f"{tuple(mask.shape)}"
            )
        keep = None if mask is None else mask != 0
        if self.augment is not None:
            features = self.augment(features, keep)
        x = features.mT.to(next(self.convolutions.parameters()).dtype)
        for convolution in self.convolutions:
            if keep is not None:
                x = x.masked_fill(~keep[:, None], 0.0)
                keep = keep[:, ::2]  # the frame in the middle of each kernel
            x = F.glu(convolution(x), dim=1)
        return x.mT, keep


def front_end_problems(given: object, d_model: int) -> Iterator[str]:
    """What is wrong with a mapping of `SpeechFrontEnd`'s arguments."""
    known = {*_arguments(SpeechFrontEnd), *_arguments(LogMel)} - {"d_model"}
    problems = list(_name_problems("front_end", given, sorted(known)))
    if isinstance(given, Mapping) and given.get("augment") is not None:
        augment = given["augment"]
        problems += _name_problems("front_end.augment", augment, _arguments(SpecAugment))
    yield from problems
    if not problems and type(d_model) is int and d_model > 0:
        assert isinstance(given, Mapping), "a problem otherwise"
        try:
            with torch.device("meta"):
                SpeechFrontEnd(d_model, **given)
        except OptionError as error:
            yield f"front_end: {error}"


def _arguments(made: type) -> list[str]:
    parameters = inspect.signature(made).parameters.values()
    return [one.name for one in parameters if one.kind != inspect.Parameter.VAR_KEYWORD]


def _name_problems(name: str, given: object, known: Sequence[str]) -> Iterator[str]:
    if not isinstance(given, Mapping):
        yield f"{name}={given!r} must be a mapping of options: {', '.join(known)}"
        return
    for one in given:
        if one not in known:
            yield f"{name}: unknown option {one!r}{nearest(str(one), known)}"
