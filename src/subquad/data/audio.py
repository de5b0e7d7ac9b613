"""Speech: WAV files, resampling, log-mel features."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import sys
import wave
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from subquad.data.pairs import BadRecord, Records
from subquad.errors import DtypeError, OptionError, ShapeError
from subquad.options import choice_problem, integer_problem, number_problem

__all__ = ["LogMel", "Speech", "mel_filters", "read_wav", "resample", "wav_length"]

# ---- files -----------------------------------------------------------------------------------


def read_wav(path: str | Path, rate: int | None = None) -> tuple[Tensor, int]:
    """Samples (N,) float32 in [-1, 1) of a WAV file, and their rate in Hz.

    PCM of 8 bits (unsigned), 16, 24 or 32 (signed); several channels are averaged. Reads the
    whole file, O(N).

    Args:
        path: of the file.
        rate: to which the samples are brought by `resample`; None: the file's own.

    Raises:
        OptionError: the file is missing, no WAV file of PCM samples, empty, or cut off; or
            `rate` is below 1.

    Example:
        >>> import tempfile, wave
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with wave.open(f"{folder}/a.wav", "wb") as file:
        ...         file.setparams((1, 2, 8000, 0, "NONE", ""))
        ...         file.writeframes(bytes([0, 64, 0, 128]))  # 0x4000, then 0x8000
        ...     read_wav(f"{folder}/a.wav")
        (tensor([ 0.5000, -1.0000]), 8000)
    """
    try:
        with _opened(path) as (file, count):
            width, channels, given = file.getsampwidth(), file.getnchannels(), file.getframerate()
            data = bytearray(file.readframes(count))
    except BadRecord as bad:
        raise OptionError(f"{path}: {bad}") from None
    samples = _decoded(data, width).view(count, channels).mean(1).float()
    return (samples, given) if rate is None else (resample(samples, given, rate), rate)


def wav_length(path: str | Path) -> tuple[int, int]:
    """(number of samples, their rate in Hz) of a WAV file, from its header; O(1).

    Raises:
        OptionError: as `read_wav`.
    """
    try:
        with _opened(path) as (file, count):
            return count, file.getframerate()
    except BadRecord as bad:
        raise OptionError(f"{path}: {bad}") from None


@contextlib.contextmanager
def _opened(path: str | Path) -> Iterator[tuple[wave.Wave_read, int]]:
    """A WAV file that can be read, and the number of its samples, from its header and its end.

    Raises:
        BadRecord: it cannot be read.
    """
    try:
        with wave.open(str(path), "rb") as file:
            count, width = file.getnframes(), file.getsampwidth()
            if width not in _FULL_SCALE:
                raise BadRecord(f"{8 * width} bits a sample, expected 8, 16, 24 or 32")
            if not count:
                raise BadRecord("a WAV file without samples")
            file.setpos(count - 1)
            if len(file.readframes(1)) != width * file.getnchannels():
                raise BadRecord("a WAV file that ends before its header says")
            file.rewind()
            yield file, count
    except FileNotFoundError:
        raise BadRecord("no such WAV file") from None
    except (OSError, EOFError, wave.Error) as error:
        reason = str(error) or "it ends inside its header"
        raise BadRecord(f"no WAV file of PCM samples: {reason}") from None


_FULL_SCALE = {1: 2.0**7, 2: 2.0**15, 3: 2.0**23, 4: 2.0**31}
"""What ±1 is, by bytes a sample."""


def _decoded(data: bytearray, width: int) -> Tensor:
    """Float64 samples in [-1, 1) of little-endian PCM."""
    if width == 1:
        values = torch.frombuffer(data, dtype=torch.uint8).double() - 128.0
    elif width == 3:
        low, mid, high = torch.frombuffer(data, dtype=torch.uint8).view(-1, 3).long().unbind(1)
        values = (low + (mid << 8) + (high << 16)).double()
        values = torch.where(high < 128, values, values - 2.0**24)  # two's complement
    else:
        if sys.byteorder == "big":
            swapped = torch.frombuffer(data, dtype=torch.uint8).view(-1, width).flip(1)
            data = bytearray(swapped.flatten().tolist())
        kind = torch.int16 if width == 2 else torch.int32
        values = torch.frombuffer(data, dtype=kind).double()
    return values / _FULL_SCALE[width]


def resample(samples: Tensor, rate: int, wanted: int) -> Tensor:
    """Samples (..., N) taken at `rate` Hz as (..., ⌈N·wanted/rate⌉) at `wanted` Hz.

    Cuts, or pads, the spectrum at the lower of both Nyquist frequencies: the ideal low pass,
    exact for what lies below it. Zeros behind the clip keep its end from wrapping around to
    its beginning at full strength. Computed in float64; O(N log N).

    Raises:
        OptionError: a rate below 1.
        DtypeError: `samples` are no floating-point numbers.

    Example:
        >>> wave = torch.sin(torch.arange(8000) / 8000 * 2 * torch.pi * 440)
        >>> resample(wave, 8000, 16000).shape
        torch.Size([16000])
    """
    problems = [*integer_problem("rate", rate, 1), *integer_problem("wanted", wanted, 1)]
    if problems:
        raise OptionError("; ".join(problems))
    _check_samples(samples)
    if rate == wanted:
        return samples
    common = math.gcd(rate, wanted)
    up, down = wanted // common, rate // common
    count = samples.shape[-1]
    periods = -(-count // down) + 64
    # A transform of a length with a large prime factor would be slow: this has none above 15.
    smooth = 1 << max(0, periods.bit_length() - 4)
    periods = -(-periods // smooth) * smooth
    padded = nn.functional.pad(samples.double(), (0, periods * down - count))
    spectrum = torch.fft.rfft(padded)[..., : periods * min(up, down) // 2 + 1].clone()
    if periods * min(up, down) % 2 == 0:
        # The bin at the Nyquist frequency stands for both its signs in the shorter signal,
        # and for one of them in the longer.
        spectrum[..., -1] *= 0.5 if up > down else 2.0
    size = periods * up
    found = torch.fft.irfft(spectrum, n=size) * (up / down)
    return found[..., : -(-count * wanted // rate)].to(samples.dtype)


def _check_samples(samples: Tensor) -> None:
    if not samples.is_floating_point():
        raise DtypeError(f"samples must be floating-point numbers, given {samples.dtype}")
    if samples.dim() < 1 or not samples.shape[-1]:
        raise ShapeError(f"samples must be (..., N) with N ≥ 1, given {tuple(samples.shape)}")


# ---- manifests -------------------------------------------------------------------------------


class Speech(Records[tuple[Path, str]]):
    r"""Spoken texts: (WAV file, what is said in it), listed in a manifest.

    A manifest is a UTF-8 file with ``path TAB transcript`` a line; paths are relative to the
    manifest's folder. Opening it reads the header of every clip, O(clips); samples are read by
    `read_wav` when they are needed.

    Args:
        path: of the manifest.
        on_bad: "skip" leaves out, and reports, lines without a readable clip or a transcript;
            "raise" reads to the end, then raises with the report.

    Attributes:
        problems: what was left out and why, by line numbers.
        seconds: length of each clip.
        fingerprint: hash of the manifest and of the lengths and rates of its clips.

    Raises:
        OptionError: as in `Records`.

    Example:
        >>> import tempfile, wave
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with wave.open(f"{folder}/a.wav", "wb") as file:
        ...         file.setparams((1, 2, 8000, 0, "NONE", ""))
        ...         file.writeframes(bytes(1600))
        ...     manifest = Path(folder, "all.tsv")
        ...     _ = manifest.write_text("a.wav\tpress one\nb.wav\tpress two\n", "utf-8")
        ...     speech = Speech(manifest)
        ...     path, text = speech[0]
        >>> path.name, text, speech.seconds
        ('a.wav', 'press one', [0.1])
        >>> print(speech.problems)
        1 left out: no such WAV file (line 2)
    """

    skip_blank = True

    def __init__(self, path: str | Path, *, on_bad: str = "skip") -> None:
        super().__init__(path, on_bad=on_bad)
        sizes = [wav_length(clip) for clip, _ in self]
        self.seconds = [count / rate for count, rate in sizes]
        told = repr((self.fingerprint, sizes)).encode()
        self.fingerprint = hashlib.blake2b(told, digest_size=16).hexdigest()

    def parse(self, *texts: str) -> tuple[Path, str]:
        name, *rest = texts[0].split("\t")
        if len(rest) != 1:
            raise BadRecord(f"{1 + len(rest)} columns, expected 2")
        text = rest[0].strip()
        if not text:
            raise BadRecord("empty transcript")
        path = self.files[0].path.parent / name.strip()
        with _opened(path):
            return path, text


# ---- features --------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
@torch.inference_mode(False)  # whoever asks first: others may want gradients
def mel_filters(
    rate: int, bins: int, mels: int, scale: str = "htk", low: float = 0.0, high: float | None = None
) -> Tensor:
    """Triangles (bins, mels) float64 whose corners are equally far apart on the mel scale.

        htk     mel(f) = 2595·log10(1 + f/700)                       (HTK Book; peaks are 1)
        slaney  mel(f) = 3f/200 below 1 kHz, 15 + 27·ln(f/1000)/ln 6.4 above
                                       (Auditory Toolbox 1998; areas are 1: peak 2/width in Hz)

    Args:
        rate: of the samples, in Hz.
        bins: frequencies from 0 to rate/2, ends included.
        mels: number of triangles.
        scale: "htk" or "slaney".
        low, high: outermost corners in Hz; None: rate/2.

    Returns:
        A shared tensor: not to be changed in place.
    """
    high = rate / 2 if high is None else high
    real: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}  # models begin on "meta"
    ends = _to_mel(torch.tensor([low, high], **real), scale)
    steps = torch.linspace(0, 1, mels + 2, **real)
    corners = _to_hertz(ends[0] + (ends[1] - ends[0]) * steps, scale)
    frequencies = torch.linspace(0, rate / 2, bins, **real)[:, None]
    left, peak, right = corners[:-2], corners[1:-1], corners[2:]
    rising, falling = (frequencies - left) / (peak - left), (right - frequencies) / (right - peak)
    triangles = torch.minimum(rising, falling).clamp(min=0)
    return triangles if scale == "htk" else triangles * (2 / (right - left))


_BREAK, _LOG_STEP = 15.0, math.log(6.4) / 27
"""Slaney's scale: its mel at 1 kHz, and ln of the factor of a mel above."""


def _to_mel(hertz: Tensor, scale: str) -> Tensor:
    if scale == "htk":
        return 2595 * torch.log10(1 + hertz / 700)
    above = _BREAK + (hertz.clamp(min=1000) / 1000).log() / _LOG_STEP
    return torch.where(hertz < 1000, hertz * 3 / 200, above)


def _to_hertz(mel: Tensor, scale: str) -> Tensor:
    if scale == "htk":
        return 700 * (10 ** (mel / 2595) - 1)
    return torch.where(mel < _BREAK, mel * 200 / 3, 1000 * ((mel - _BREAK) * _LOG_STEP).exp())


class LogMel(nn.Module):
    """Log-mel features: the logarithm of a spectrogram's power in bands as wide as we hear them.

        X[t, f] = Σ_n w[n] x[t·hop + n − ⌈window/2⌉] exp(−2πi·f·n/fft)   w periodic Hann
        y[t, m] = ln max(Σ_f |X[t, f]|² T[f, m], floor)                  T of `mel_filters`
        features = (y − mean) / std

    Frame t is centred on sample t·hop; the clip is surrounded by zeros, so that one padded
    with zeros has the same frames, and then some of silence. Cost O(N/hop · (fft·log fft +
    fft·mels)). There is nothing to learn and no buffer: the module is its arguments.

    Args:
        rate: of the samples in Hz; the caller brings others to it, see `resample`.
        mels: bands.
        window_ms, hop_ms: length of a window, and from one to the next, in milliseconds.
        fft: points of the transform; None: the least power of two that holds a window and
            has a frequency inside every band.
        scale, low, high: of the bands, see `mel_filters`.
        floor: least power, so that silence has a logarithm.
        normalise: "utterance": mean 0 and variance 1 of each band over the clip (cepstral
            mean and variance normalisation); "global": by `mean` and `std`; "none".
        mean, std: one number, or one for each band; see `measured`.

    Raises:
        OptionError: all wrong arguments at once.

    Example:
        >>> features = LogMel(8000, 40)
        >>> features(torch.randn(8000)).shape  # one second, a frame every 10 ms
        torch.Size([101, 40])
        >>> features.frames(8000)
        101
    """

    def __init__(
        self,
        rate: int = 16_000,
        mels: int = 80,
        *,
        window_ms: float = 25.0,
        hop_ms: float = 10.0,
        fft: int | None = None,
        scale: str = "htk",
        low: float = 0.0,
        high: float | None = None,
        floor: float = 1e-10,
        normalise: str = "utterance",
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        problems = [
            *integer_problem("rate", rate, 1),
            *integer_problem("mels", mels, 1),
            *number_problem("window_ms", window_ms, 0.0),
            *number_problem("hop_ms", hop_ms, 0.0),
            *choice_problem("scale", scale, ("htk", "slaney")),
            *number_problem("floor", floor, 0.0),
            *choice_problem("normalise", normalise, ("utterance", "global", "none")),
        ]
        if not problems:
            problems += _range_problems(rate, mels, window_ms, hop_ms, fft, scale, low, high, floor)
            problems += _statistics_problems(mels, normalise, mean, std)
        if problems:
            raise OptionError("LogMel: " + "; ".join(problems))
        self.rate, self.mels, self.scale, self.floor = rate, mels, scale, floor
        self.low, self.high = float(low), rate / 2 if high is None else float(high)
        self.window, self.hop = round(rate * window_ms / 1000), round(rate * hop_ms / 1000)
        self.fft = fft or _fft_size(rate, self.window, mels, scale, self.low, self.high)
        self.normalise = normalise
        self.mean, self.std = mean, std

    def extra_repr(self) -> str:
        return (
            f"rate={self.rate}, mels={self.mels}, window={self.window}, hop={self.hop}, "
            f"fft={self.fft}, scale={self.scale!r}, normalise={self.normalise!r}"
        )

    def frames(self, samples: int) -> int:
        """Number of frames of a clip of so many samples."""
        return 1 + samples // self.hop

    def frames_of(self, path: str | Path) -> int:
        """Number of frames of a WAV file, from its header; errors as in `wav_length`."""
        count, rate = wav_length(path)
        return self.frames(-(-count * self.rate // rate))

    def read(self, path: str | Path) -> Tensor:
        """Features (T, mels) of a WAV file, resampled to `rate`; errors as in `read_wav`."""
        features: Tensor = self(read_wav(path, self.rate)[0])
        return features

    def power(self, samples: Tensor) -> Tensor:
        """Power |X|² (..., T, fft/2 + 1) of samples (..., N)."""
        flat = samples.reshape(-1, samples.shape[-1])
        window = torch.hann_window(self.window, dtype=samples.dtype, device=samples.device)
        spectrum = torch.stft(
            flat, self.fft, self.hop, self.window, window,
            center=True, pad_mode="constant", return_complex=True,
        )  # fmt: skip
        power = spectrum.real.square() + spectrum.imag.square()
        return power.mT.reshape(*samples.shape[:-1], power.shape[-1], power.shape[-2])

    def forward(self, samples: Tensor) -> Tensor:
        """Features (..., T, mels) of clips (..., N) of one length, T = 1 + N // hop.

        Clips of several lengths are given one by one: normalised over the clip, the silence
        that pads one would count.

        Raises:
            DtypeError: samples are no floating-point numbers.
            ShapeError: there are none.
        """
        _check_samples(samples)
        with torch.autocast(samples.device.type, enabled=False):
            wide = samples if samples.dtype == torch.float64 else samples.float()
            filters = mel_filters(
                self.rate, self.fft // 2 + 1, self.mels, self.scale, self.low, self.high
            )
            bands = self.power(wide) @ filters.to(wide)
            found = self.normalised(bands.clamp(min=self.floor).log())
        return found.to(samples.dtype)

    def normalised(self, features: Tensor) -> Tensor:
        """Features (..., T, mels), normalised as the arguments say."""
        if self.normalise == "none":
            return features
        if self.normalise == "utterance":
            std, mean = torch.std_mean(features, -2, correction=0, keepdim=True)
            return (features - mean) / std.clamp(min=1e-5)  # of a band without any change
        mean, std = (torch.as_tensor(value).to(features) for value in (self.mean, self.std))
        return (features - mean) / std

    def measured(self, clips: Sequence[Tensor]) -> dict[str, list[float]]:
        """``mean`` and ``std`` of each band over all frames of clips (N,), for "global".

        >>> clips = [torch.randn(800), torch.randn(400)]
        >>> known = LogMel(8000, 40, normalise="none").measured(clips)
        >>> features = LogMel(8000, 40, normalise="global", **known)

        Raises:
            OptionError: these features are normalised already, or there is no clip.
        """
        if self.normalise != "none" or not clips:
            raise OptionError(
                'statistics are measured by LogMel(normalise="none") on one clip or more, given '
                f"normalise={self.normalise!r} and {len(clips)} clips"
            )
        std, mean = torch.std_mean(torch.cat([self(clip) for clip in clips]), 0, correction=0)
        return {"mean": mean.tolist(), "std": std.clamp(min=1e-5).tolist()}


def _fft_size(rate: int, window: int, mels: int, scale: str, low: float, high: float) -> int:
    size = 1 << (window - 1).bit_length()
    while not bool(mel_filters(rate, size // 2 + 1, mels, scale, low, high).any(0).all()):
        size *= 2
    return size


def _range_problems(
    rate: int,
    mels: int,
    window_ms: float,
    hop_ms: float,
    fft: int | None,
    scale: str,
    low: float,
    high: float | None,
    floor: float,
) -> list[str]:
    top = rate / 2 if high is None else high
    window, hop = round(rate * window_ms / 1000), round(rate * hop_ms / 1000)
    problems = [
        f"{name}={given!r} is less than a sample at {rate} Hz"
        for name, given, samples in (("window_ms", window_ms, window), ("hop_ms", hop_ms, hop))
        if samples < 1
    ]
    if not 0 <= low < top <= rate / 2:
        problems.append(
            f"low={low!r} and high={high!r} must have 0 ≤ low < high ≤ rate/2 = {rate / 2:g} Hz"
        )
    if floor <= 0:
        problems.append(f"floor={floor!r} must be above 0: ln 0 has no value")
    if problems or fft is None:
        return problems
    problems += integer_problem("fft", fft, window)
    if not problems and fft % 2:
        problems.append(f"fft={fft} must be even")
    if not problems:
        empty = (~mel_filters(rate, fft // 2 + 1, mels, scale, low, top).any(0)).sum()
        if empty:
            problems.append(f"fft={fft} has no frequency inside {empty} of {mels} bands")
    return problems


def _statistics_problems(mels: int, normalise: str, mean: object, std: object) -> list[str]:
    both = {"mean": mean, "std": std}
    if normalise != "global":
        given = [name for name, value in both.items() if value is not None]
        return [f'{name} is only for normalise="global"' for name in given]
    problems = []
    for name, value in both.items():
        numbers: list[Any] = list(value) if isinstance(value, list | tuple) else [value]
        fits = all(isinstance(one, int | float) and math.isfinite(one) for one in numbers)
        if len(numbers) not in (1, mels) or not fits:
            problems.append(f'normalise="global" needs {name}, one number or {mels}')
        elif name == "std" and min(numbers) <= 0:
            problems.append("std must be above 0")
    return problems
