"""WAV files, resampling and log-mel features against what they are defined by."""

import math
import struct
import wave

import pytest
import torch

from subquad.data.audio import LogMel, Speech, mel_filters, read_wav, resample
from subquad.errors import DtypeError, OptionError, ShapeError


def write(path, frames, width, *, channels=1, rate=8000):
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(frames)
    return path


# ---- files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_every_width_of_pcm_is_read(tmp_path, width):
    top = 2 ** (8 * width - 1)
    values = [0, 1, -1, top - 1, -top, top // 3]
    if width == 1:
        data = bytes(value + 128 for value in values)
    else:
        data = b"".join(value.to_bytes(width, "little", signed=True) for value in values)
    samples, rate = read_wav(write(tmp_path / "a.wav", data, width, rate=11025))
    assert rate == 11025
    # Integers of 32 bits are rounded to float32's 24.
    expected = (torch.tensor(values, dtype=torch.float64) / top).float()
    assert torch.equal(samples, expected)


def test_channels_are_averaged(tmp_path):
    data = struct.pack("<6h", 100, 300, -50, 50, 2, 4)
    samples, _ = read_wav(write(tmp_path / "a.wav", data, 2, channels=2))
    assert torch.equal(samples, torch.tensor([200.0, 0.0, 3.0]) / 2**15)


def test_what_is_no_wav_file_is_refused_with_the_reason(tmp_path):
    whole = write(tmp_path / "a.wav", bytes(2000), 2).read_bytes()
    cases = {
        "missing": (None, "no such WAV file"),
        "text": (b"press one", "RIFF"),
        "cut": (whole[:-600], "a WAV file that ends before its header says"),
        "head": (whole[:20], "ends inside its header"),
        "empty": (write(tmp_path / "b.wav", b"", 2).read_bytes(), "a WAV file without samples"),
        # 5 bytes a sample
        "wide": (whole[:32] + b"\x05\x00\x28" + whole[35:], "40 bits a sample, expected 8, 16"),
        # format 3: floating-point samples
        "float": (whole[:20] + b"\x03" + whole[21:], "unknown format: 3"),
    }
    for name, (data, reason) in cases.items():
        path = tmp_path / f"{name}.wav"
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(OptionError, match=reason) as caught:
            read_wav(path)
        assert str(path) in str(caught.value)


# ---- manifests -------------------------------------------------------------------------------


def manifest(folder, lines):
    for name, count in (("one", 800), ("two", 1600)):
        write(folder / f"{name}.wav", struct.pack(f"<{count}h", *range(count)), 2)
    (folder / "torn.wav").write_bytes((folder / "one.wav").read_bytes()[:-10])
    (folder / "all.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / "all.tsv"


def test_a_manifest_gives_clips_and_transcripts_and_reports_the_rest(tmp_path):
    lines = ["one.wav\tpress one", "", "absent.wav\tpress", "torn.wav\tx", "two.wav"]
    lines += ["two.wav\t ", "two.wav\ta\tb", "two.wav\tsay \xe9", "absent.wav\tagain"]
    speech = Speech(manifest(tmp_path, lines))
    assert speech[:] == [(tmp_path / "one.wav", "press one"), (tmp_path / "two.wav", "say \xe9")]
    assert speech.seconds == [0.1, 0.2] and speech.line_number(1) == 8
    assert torch.equal(read_wav(speech[1][0])[0] * 2**15, torch.arange(1600.0))
    assert str(speech.problems).splitlines() == [
        "2 left out: no such WAV file (lines 3, 9)",
        "1 left out: a WAV file that ends before its header says (line 4)",
        "1 left out: 1 columns, expected 2 (line 5)",
        "1 left out: empty transcript (line 6)",
        "1 left out: 3 columns, expected 2 (line 7)",
    ]


def test_clips_come_at_the_rate_that_is_asked_for(tmp_path):
    path, _ = Speech(manifest(tmp_path, ["one.wav\tpress one"]))[0]
    found, rate = read_wav(path, 16000)
    assert rate == 16000 and torch.equal(found, resample(read_wav(path)[0], 8000, 16000))
    with pytest.raises(OptionError, match="wanted=0 must be an integer ≥ 1"):
        read_wav(path, 0)


def test_a_manifest_knows_when_its_clips_have_changed(tmp_path):
    path = manifest(tmp_path, ["one.wav\tpress one", "two.wav\tpress two"])
    first = Speech(path).fingerprint
    assert Speech(path).fingerprint == first
    write(tmp_path / "two.wav", bytes(3000), 2)
    assert Speech(path).fingerprint != first


def test_manifests_that_cannot_be_used_are_refused(tmp_path):
    with pytest.raises(OptionError, match="is no file"):
        Speech(tmp_path / "none.tsv")
    path = manifest(tmp_path, ["one.wav\tpress one", "absent.wav\tpress two"])
    with pytest.raises(OptionError, match="1 left out: no such WAV file .line 2."):
        Speech(path, on_bad="raise")


# ---- resampling ------------------------------------------------------------------------------


def pulse(rate, hertz, count=None):
    """A tone under a Gaussian of 4 ms around the middle of a quarter second.

    Its spectrum falls as exp(−½(2π·0.004·Δf)²): below 1e-12 at 300 Hz from the tone, and the
    pulse itself below 1e-100 at the clip's ends.
    """
    time = torch.arange(count or math.ceil(rate / 4), dtype=torch.float64) / rate - 0.125
    return torch.exp(-0.5 * (time / 0.004) ** 2) * torch.cos(2 * math.pi * hertz * time + 0.3)


@pytest.mark.parametrize(
    ("rate", "wanted"),
    [(8000, 16000), (16000, 8000), (8000, 11025), (44100, 16000), (22050, 8000), (8000, 7919)],
)
def test_a_pulse_in_the_band_is_found_at_the_new_times(rate, wanted):
    given = pulse(rate, 1500.0)
    found = resample(given, rate, wanted)
    assert found.shape == (math.ceil(len(given) * wanted / rate),)
    # Band-limited to 1e-12 of its height: only rounding is left.
    torch.testing.assert_close(found, pulse(wanted, 1500.0, len(found)), rtol=0, atol=1e-10)


def test_what_is_above_the_new_nyquist_frequency_is_gone():
    assert resample(pulse(16000, 6000.0), 16000, 8000).abs().max() < 1e-10
    torch.testing.assert_close(pulse(8000, 1.0), resample(pulse(8000, 1.0), 8000, 8000))


@pytest.mark.parametrize(("rate", "wanted"), [(8000, 12000), (12000, 8000), (7, 5), (5, 7)])
def test_resampling_equals_scipy_on_the_padded_clip(rate, wanted):
    signal = pytest.importorskip("scipy.signal")
    samples = torch.randn(2, 997, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = resample(samples, rate, wanted)
    # White noise fills the bin at the Nyquist frequency too. Periods of the common rate and 64
    # more, rounded up to a multiple of 2^k with at most four leading bits.
    common = math.gcd(rate, wanted)
    up, down = wanted // common, rate // common
    periods = math.ceil(997 / down) + 64
    step = 2 ** max(0, periods.bit_length() - 4)
    periods = math.ceil(periods / step) * step
    padded = torch.nn.functional.pad(samples, (0, periods * down - 997))
    expected = torch.from_numpy(signal.resample(padded.numpy(), periods * up, axis=-1))
    torch.testing.assert_close(found, expected[:, : found.shape[-1]], rtol=0, atol=1e-12)


def test_wrong_rates_and_samples_are_refused():
    with pytest.raises(OptionError, match="rate=0 must be an integer ≥ 1; wanted=8000.0"):
        resample(torch.zeros(4), 0, 8000.0)
    with pytest.raises(DtypeError, match="floating-point numbers, given torch.int16"):
        resample(torch.zeros(4, dtype=torch.int16), 8000, 16000)
    with pytest.raises(ShapeError, match=r"N ≥ 1, given \(2, 0\)"):
        LogMel()(torch.zeros(2, 0))


# ---- features --------------------------------------------------------------------------------

FORMS = [(16000, 80, "htk"), (8000, 40, "slaney"), (8000, 80, "htk"), (24000, 23, "slaney")]


@pytest.mark.parametrize(("rate", "mels", "scale"), FORMS)
def test_bands_equal_those_of_transformers(rate, mels, scale):
    audio = pytest.importorskip("transformers.audio_utils")
    expected = audio.mel_filter_bank(
        513, mels, 30.0, rate / 2 - 100, rate, "slaney" if scale == "slaney" else None, scale
    )
    found = mel_filters(rate, 513, mels, scale, 30.0, rate / 2 - 100)
    # Both in float64, where the worst step divides by a difference of frequencies: 20 of 1e4.
    torch.testing.assert_close(found, torch.from_numpy(expected), rtol=0, atol=1e-11)


@pytest.mark.parametrize(("rate", "mels", "scale"), FORMS)
def test_features_equal_those_of_transformers(rate, mels, scale):
    audio = pytest.importorskip("transformers.audio_utils")
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(4321, generator=generator)
    features = LogMel(rate, mels, scale=scale, normalise="none")
    expected = audio.spectrogram(
        samples.numpy(),
        audio.window_function(features.window, "hann"),
        features.window, features.hop, features.fft,
        power=2.0, pad_mode="constant", log_mel="log",
        mel_filters=mel_filters(rate, features.fft // 2 + 1, mels, scale).numpy(),
        dtype="float64",
    ).T  # fmt: skip
    # Theirs holds its spectrum in complex64. A bin's amplitude has an error of about
    # log2(fft)·eps ≈ 1e-6 of the frame's mean, and of white noise no band has under 1e-2 of
    # that amplitude: a relative error of 1e-4, twice that in the power's logarithm.
    for dtype in (torch.float32, torch.float64):
        found = features(samples.to(dtype))
        assert found.dtype == dtype and found.shape == (features.frames(4321), mels)
        torch.testing.assert_close(
            found.double(), torch.from_numpy(expected.copy()), rtol=0, atol=2e-4
        )


def test_a_tone_is_found_in_its_band():
    time = torch.arange(8000) / 8000
    features = LogMel(8000, 40, normalise="none")
    triangles = mel_filters(8000, features.fft // 2 + 1, 40)
    for hertz in (500.0, 1250.0, 3000.0):  # multiples of 8000/fft
        band = triangles[round(hertz * features.fft / 8000)].argmax()
        found = features(torch.sin(2 * math.pi * hertz * time))[5:-5].argmax(-1)
        assert (found == band).all()


def test_utterances_are_normalised_and_silence_stays_finite():
    clips = torch.randn(2, 3000, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [[1e-3], [0.5]]
    )
    features = LogMel(8000, 40)
    found = features(clips)
    std, mean = torch.std_mean(found, -2, correction=0)
    # Rounding of float32 sums over 38 frames of logarithms near −20.
    torch.testing.assert_close(mean, torch.zeros_like(mean), rtol=0, atol=1e-4)
    torch.testing.assert_close(std, torch.ones_like(std), rtol=0, atol=1e-4)
    # Loudness is a constant in the logarithm, and the floor (1e-10) is far below.
    torch.testing.assert_close(features(clips[1] / 8), found[1], rtol=0, atol=1e-3)
    assert torch.equal(features(torch.zeros(1000)), torch.zeros(13, 40))


def test_zeros_behind_a_clip_change_no_frame_of_it():
    features = LogMel(8000, 40, normalise="none")
    clip = torch.randn(1037, generator=torch.Generator().manual_seed(0))
    padded = features(torch.nn.functional.pad(clip, (0, 900)))
    assert torch.equal(padded[: features.frames(1037)], features(clip))


def test_global_statistics_are_those_of_all_frames():
    generator = torch.Generator().manual_seed(0)
    clips = [torch.randn(size, generator=generator) for size in (900, 2100)]
    raw = LogMel(8000, 20, normalise="none")
    known = raw.measured(clips)
    normalised = LogMel(8000, 20, normalise="global", **known)
    std, mean = torch.std_mean(torch.cat([normalised(c) for c in clips]), 0, correction=0)
    # Float32 rounding of logarithms below 10 over some 40 frames: 10·√40·6e-8 ≈ 4e-6.
    torch.testing.assert_close(mean, torch.zeros(20), rtol=0, atol=1e-5)
    torch.testing.assert_close(std, torch.ones(20), rtol=0, atol=1e-5)
    single = LogMel(8000, 20, normalise="global", mean=-4.0, std=2.0)
    torch.testing.assert_close(single(clips[0]), (raw(clips[0]) + 4) / 2)
    with pytest.raises(OptionError, match="given normalise='utterance' and 2 clips"):
        LogMel(8000, 20).measured(clips)


def test_autocast_leaves_features_alone():
    clip = torch.randn(2000, generator=torch.Generator().manual_seed(0))
    features = LogMel(8000, 40)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(features(clip), features(clip.clone()))
        inside = features(clip)
    assert torch.equal(inside, features(clip))


def test_the_transform_is_long_enough_for_every_band():
    assert LogMel(16000, 80).fft == 512  # the least power of two that holds 400 samples
    assert LogMel(8000, 40).fft == 256
    # The lowest two of 120 bands are 22 Hz wide; the frequencies of 256 points are 31 Hz apart.
    assert LogMel(8000, 120).fft == 512
    with pytest.raises(OptionError, match="fft=256 has no frequency inside"):
        LogMel(8000, 120, fft=256)


def test_all_wrong_arguments_are_reported_at_once():
    with pytest.raises(OptionError) as caught:
        LogMel(0, 0, scale="bark", normalise="clip", floor=-1.0)
    for text in ("rate=0", "mels=0", "scale='bark'", "normalise='clip'", "floor=-1.0"):
        assert text in str(caught.value)
    for options, reason in (
        ({"low": 5000.0}, "0 ≤ low < high ≤ rate/2 = 4000 Hz"),
        ({"hop_ms": 0.01}, "hop_ms=0.01 is less than a sample at 8000 Hz"),
        ({"fft": 128}, "fft=128 must be an integer ≥ 200"),
        ({"floor": 0.0}, "floor=0.0 must be above 0"),
        ({"normalise": "global"}, "needs mean, one number or 80.*needs std, one number or 80"),
        ({"normalise": "global", "mean": 0.0, "std": [0.0] * 80}, "std must be above 0"),
        ({"mean": 0.0}, 'mean is only for normalise="global"'),
    ):
        with pytest.raises(OptionError, match=reason):
            LogMel(8000, 80, **options)
