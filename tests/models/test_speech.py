"""The speech front end: parity with transformers', padding, noise, and inside a whole model."""

import pytest
import torch
import transformers
from torch import nn
from transformers.models.speech_to_text import modeling_speech_to_text as theirs

from subquad.errors import OptionError, ShapeError
from subquad.models import Seq2SeqTransformer, Seq2SeqTransformerConfig
from subquad.models.speech import SpecAugment, SpeechFrontEnd, front_end_problems


def front_end(**options):
    torch.manual_seed(0)
    given = {"channels": 22, "rate": 8000, "mels": 13, **options}
    return SpeechFrontEnd(14, **given).double()


def ragged(batch=3, frames=29, mels=13):
    features = torch.randn(batch, frames, mels, dtype=torch.float64)
    sizes = torch.tensor([frames, 17, 1])
    return features, torch.arange(frames) < sizes[:, None], sizes


# ---- convolutions ----------------------------------------------------------------------------


def test_vectors_equal_those_of_transformers():
    config = transformers.Speech2TextConfig(
        d_model=14, input_feat_per_channel=13, conv_channels=22, conv_kernel_sizes=[5, 5]
    )
    other = theirs.Conv1dSubsampler(config).double()
    own = front_end()
    for mine, copied in zip(own.convolutions, other.conv_layers, strict=True):
        mine.load_state_dict(copied.state_dict())
    features = torch.randn(2, 31, 13, dtype=torch.float64)
    found, mask = own(features)
    assert mask is None and found.shape == (2, 8, 14)
    torch.testing.assert_close(found, other(features))


@pytest.mark.parametrize("stride", [2, 4, 8])
@pytest.mark.parametrize("kernel", [3, 5])
def test_a_padded_clip_gives_the_vectors_it_gives_alone(stride, kernel):
    own = front_end(stride=stride, kernel=kernel)
    features, mask, sizes = ragged()
    features[~mask] = torch.nan  # what padding holds never matters
    found, kept = own(features, mask.long())
    assert found.shape == (3, -(-29 // stride), 14)
    for row, size in enumerate(sizes.tolist()):
        alone, _ = own(features[row : row + 1, :size])
        assert kept[row].sum() == alone.shape[1] == -(-size // stride)
        torch.testing.assert_close(found[row, kept[row]], alone[0])


def test_padding_has_no_gradient():
    own = front_end()
    features, mask, _ = ragged()
    features.requires_grad_()
    found, kept = own(features, mask)
    found[kept].square().sum().backward()
    assert (features.grad[~mask] == 0).all() and (features.grad[mask] != 0).any(-1).all()


def test_what_does_not_fit_is_refused():
    own = front_end()
    with pytest.raises(ShapeError, match=r"input_features must be \(B, T, 13\).*given \(2, 13\)"):
        own(torch.randn(2, 13))
    with pytest.raises(ShapeError, match=r"attention_mask must be \(B, T\) = \(2, 5\)"):
        own(torch.randn(2, 5, 13), torch.ones(2, 4))


# ---- noise -----------------------------------------------------------------------------------


def test_noise_takes_bands_and_spans_within_its_limits():
    augment = SpecAugment(bands=1, band_width=4, spans=1, span_width=6, span_share=0.5)
    torch.manual_seed(0)
    features = torch.ones(400, 20, 11)
    sizes = torch.arange(400) % 20 + 1
    mask = torch.arange(20) < sizes[:, None]
    gone = augment(features, mask) == 0
    bands, spans = gone.all(1), gone.all(2)
    assert torch.equal(gone, bands[:, None] | spans[:, :, None])  # and nothing else
    assert set(bands.sum(1).tolist()) == {0, 1, 2, 3, 4}  # every width up to the limit
    limit = (sizes / 2).floor().clamp(max=6)
    assert (spans.sum(1) <= limit).all() and (spans.sum(1) == limit).any()
    assert not (spans & ~mask).any()  # padding is not where they are wasted
    for found in (bands, spans):  # connected: at most one beginning
        begins = found[:, 1:] & ~found[:, :-1]
        assert (begins.sum(1) + found[:, 0] <= 1).all()


def test_noise_is_of_training_only_and_seeded():
    augment = SpecAugment()
    features = torch.randn(2, 150, 80)
    torch.manual_seed(1)
    first = augment(features)
    torch.manual_seed(1)
    assert torch.equal(augment(features), first) and not torch.equal(first, features)
    assert torch.equal(augment.eval()(features), features)
    assert torch.equal(SpecAugment(bands=0, spans=0)(features), features)


# ---- options ---------------------------------------------------------------------------------


def test_wrong_options_are_named():
    cases = {
        "stride=3 must be a power of two; channels=5 must be even": {"stride": 3, "channels": 5},
        "kernel=4 must be odd": {"kernel": 4},
        "LogMel: rate=0": {"rate": 0},
        "SpecAugment: bands=-1": {"augment": {"bands": -1}},
        "unknown option 'mel' (did you mean 'mels'?)": {"mel": 80},
        "front_end.augment: unknown option 'band' (did you mean 'bands'?)": {
            "augment": {"band": 1}
        },
        "front_end.augment=True must be a mapping": {"augment": True},
    }
    for text, options in cases.items():
        assert text in "; ".join(front_end_problems(options, 14))
    assert "must be a mapping" in "".join(front_end_problems(80, 14))
    assert not list(front_end_problems({"mels": 40, "augment": {"bands": 1}, "stride": 2}, 14))
    with pytest.raises(OptionError, match="SpeechFrontEnd: stride=1 must be an integer ≥ 2"):
        SpeechFrontEnd(8, stride=1)


def test_a_model_begun_on_the_meta_device_has_its_features():
    with torch.device("meta"):
        own = SpeechFrontEnd(8, rate=8000, mels=20)
    samples = torch.randn(900)
    expected = SpeechFrontEnd(8, rate=8000, mels=20).log_mel(samples)
    assert torch.equal(own.log_mel(samples), expected)
    assert not list(own.buffers()) and isinstance(own.convolutions[0], nn.Conv1d)


# ---- inside a model --------------------------------------------------------------------------


def speech_model(mechanism="softmax", **options):
    config = Seq2SeqTransformerConfig(
        vocab_size=17, d_model=16, num_heads=2, dim_feedforward=24, encoder_layers=2,
        decoder_layers=2, dropout=0.0, mechanism=mechanism,
        front_end={"rate": 8000, "mels": 13, "channels": 12}, **options,
    )  # fmt: skip
    return Seq2SeqTransformer(config).eval()


@pytest.mark.parametrize("mechanism", ["softmax", "performer"])
def test_a_model_reads_sound_row_by_row_whatever_the_padding(mechanism):
    model = speech_model(mechanism).double()
    features, mask, sizes = ragged()
    labels = torch.randint(5, 17, (3, 6))
    out = model(input_features=features, attention_mask=mask, labels=labels, output_attentions=True)
    assert out.logits.shape == (3, 6, 17) and out.cross_attentions[0].shape == (3, 2, 6, 8)
    for row, size in enumerate(sizes.tolist()):
        alone = model(input_features=features[row : row + 1, :size], labels=labels[row : row + 1])
        torch.testing.assert_close(out.logits[row], alone.logits[0])
    out.loss.backward()
    assert all(one.grad is not None for one in model.front_end.parameters())


@pytest.mark.parametrize("beams", [1, 3])
def test_generate_takes_features_and_equals_the_uncached_tokens(beams):
    model = speech_model("performer")
    features, mask, _ = ragged()
    options = {"max_new_tokens": 7, "num_beams": beams, "do_sample": False}
    given = {"input_features": features.float(), "attention_mask": mask.long()}
    cached = model.generate(**given, **options)
    assert cached.shape[0] == 3
    assert torch.equal(cached, model.generate(**given, **options, use_cache=False))


def test_a_saved_model_has_its_front_end(tmp_path):
    model = speech_model()
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert again.main_input_name == "input_features"
    samples = torch.randn(1, 2000)
    features = model.front_end.log_mel(samples)
    assert torch.equal(again.front_end.log_mel(samples), features)
    labels = torch.randint(5, 17, (1, 4))
    for one in (model, again):
        assert one.front_end.log_mel.mels == 13
    expected = model(input_features=features, labels=labels).logits
    assert torch.equal(again(input_features=features, labels=labels).logits, expected)


def test_a_config_names_what_is_wrong_with_its_front_end():
    with pytest.raises(OptionError, match="front_end: unknown option 'mell'.*'mels'"):
        Seq2SeqTransformerConfig(front_end={"mell": 80})
    with pytest.raises(OptionError, match="front_end: SpeechFrontEnd: stride=3"):
        Seq2SeqTransformerConfig(front_end={"stride": 3})
    with pytest.raises(OptionError, match="without a front end"):
        config = Seq2SeqTransformerConfig(vocab_size=9, d_model=8, num_heads=2)
        Seq2SeqTransformer(config)(input_features=torch.randn(1, 9, 80), labels=torch.ones(1, 2))
