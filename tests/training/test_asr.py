"""Speech recognition from files: tones that are letters are learned, and all else is reported."""

import json
import math
import struct
import wave

import pytest
import torch

from subquad.errors import OptionError
from subquad.generation import Translator, transcribe
from subquad.training.recipe import Recipe
from subquad.training.run import train
from subquad.training.tasks import task_of
from subquad.training.tasks.asr import TASK, Clips

RATE = 8000
TONES = dict(zip("abcd", (500, 900, 1600, 2800), strict=True))


def spoken(text, generator):
    """Samples of a text: each letter a tone of 60 to 120 ms in noise, with silence between."""
    pieces = []
    for letter in text:
        count = int(RATE * (0.06 + 0.06 * float(torch.rand((), generator=generator))))
        time = torch.arange(count) / RATE
        pieces += [torch.sin(2 * math.pi * TONES[letter] * time), torch.zeros(RATE // 25)]
    samples = torch.cat(pieces)
    return 0.5 * samples + 0.02 * torch.randn(len(samples), generator=generator)


def manifest(folder, count, seed=0):
    """Clips of 2 to 5 letters, and the file that lists them."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    lines = []
    for number in range(count):
        size = int(torch.randint(2, 6, (), generator=generator))
        text = "".join("abcd"[i] for i in torch.randint(4, (size,), generator=generator).tolist())
        samples = (spoken(text, generator).clamp(-1, 1) * 32767).round().int().tolist()
        with wave.open(str(folder / f"{number}.wav"), "wb") as file:
            file.setparams((1, 2, RATE, 0, "NONE", ""))
            file.writeframes(struct.pack(f"<{len(samples)}h", *samples))
        lines.append(f"{number}.wav\t{text}\n")
    (folder / "all.tsv").write_text("".join(lines), encoding="utf-8")
    return folder / "all.tsv"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tones")
    return manifest(folder / "train", 200), manifest(folder / "valid", 24, seed=1)


def recipe(files, **overrides):
    given = {
        "task": "asr",
        "model": {
            "d_model": 32, "num_heads": 2, "dim_feedforward": 64, "encoder_layers": 1,
            "decoder_layers": 1, "dropout": 0.0, "norm_first": True, "mechanism": "softmax",
            "front_end": {"rate": RATE, "mels": 24, "channels": 32},
        },
        "objective": {
            "label_smoothing": 0.0, "guided": {"weight": 20.0, "until": 0.5}, "penalties": 0.0
        },
        "data": {"train": str(files[0]), "valid": str(files[1])},
        "tokenizer": {"kind": "char"},
        "optimiser": {"rate": 6e-3, "schedule": "cosine", "warm_up": 20, "betas": [0.9, 0.98]},
        "training": {"tokens": 400, "steps": 240, "epochs": None, "threads": 1},
        "evaluation": {"every": 120, "decode": 24},
        "decoding": {"beams": 1, "max_length": [6, 0.1]},
    }  # fmt: skip
    return Recipe.load(given, overrides)


# ---- learning --------------------------------------------------------------------------------


def test_letters_are_learned_from_tones(files, tmp_path):
    report = train(recipe(files), tmp_path / "run")
    # Chance is an error rate near 1, and a diagonality of 2·0.1 − 0.1² for uniform attention.
    assert report.last["cer"] < 0.1 and report.last["wer"] < 0.3, report.last
    assert report.last["diagonality"] > 0.6


# ---- batches ---------------------------------------------------------------------------------


def prepared(files, tmp_path, **overrides):
    said = []
    found = TASK.prepare(recipe(files, **overrides), tmp_path / "run", said.append)
    return found, said


def test_batches_hold_features_masks_and_shifted_letters(files, tmp_path):
    found, said = prepared(files, tmp_path)
    assert said[-1].startswith("200 training clips of") and "24 validation clips" in said[-1]
    batch = found.batch([3, 7])
    log_mel = found.model.front_end.log_mel
    lines = files[0].read_text().splitlines()
    for row, index in enumerate((3, 7)):
        name, text = lines[index].split("\t")
        features = log_mel.read(files[0].parent / name)
        size = len(features)
        assert torch.equal(batch["input_features"][row, :size], features)
        assert batch["attention_mask"][row].tolist() == [1] * size + [0] * (
            batch["attention_mask"].shape[1] - size
        )
        labels = batch["labels"][row]
        wanted = found.tokenizer(text)["input_ids"]
        assert labels[labels != -100].tolist() == wanted
        assert batch["decoder_input_ids"][row, : len(wanted)].tolist() == [1, *wanted[:-1]]
        heard = found.model.encode(input_features=features[None]).last_hidden_state.shape[1]
        assert found.lengths[index].tolist() == [heard, len(wanted)]


def test_what_is_left_out_is_said(files, tmp_path):
    broken = tmp_path / "broken.tsv"
    folder = files[0].parent
    lines = [line.split("\t") for line in files[0].read_text().splitlines()[:40]]
    text = "".join(f"{folder / name}\t{text}\n" for name, text in lines)
    broken.write_text(text + "absent.wav\tab\n", encoding="utf-8")
    found, _ = prepared((broken, files[1]), tmp_path, **{"data.max_length": 16})
    assert any("1 left out: no such WAV file (line 41)" in note for note in found.notes)
    assert any("longer than 16 positions" in note for note in found.notes)
    assert 0 < len(found.lengths) < 40 and int(found.lengths.max()) <= 16
    with pytest.raises(OptionError, match="longer than 16 positions"):
        prepared(files, tmp_path / "b", **{"data.max_length": 16, "data.on_long": "raise"})
    with pytest.raises(OptionError, match="0 clips can be used"):
        prepared(files, tmp_path / "c", **{"data.max_target": 2})


def test_recipes_that_make_no_sense_are_refused(files):
    with pytest.raises(OptionError) as caught:
        recipe(
            files,
            **{
                "model.front_end": None,
                "data.preset": "bible-es-en",
                "data.on_long": "truncate",
                "evaluation.best": "wer",
                "evaluation.decode": 0,
            },
        )
    for name in ("model.front_end", "data.preset", "data.on_long", "evaluation.best"):
        assert name in str(caught.value)
    with pytest.raises(OptionError, match="unknown option 'mell'"):
        recipe(files, **{"model.front_end": {"mell": 3}})


def test_the_shipped_recipe_is_whole():
    found = Recipe.load("asr")
    assert task_of("asr") is TASK and found.model["front_end"]["rate"] == 8000


# ---- transcripts -----------------------------------------------------------------------------


def test_clips_are_transcribed_in_their_order_whatever_their_batch(files, tmp_path):
    found, _ = prepared(files, tmp_path)
    model = found.model.eval()
    torch.manual_seed(0)
    for parameter in model.parameters():  # an untrained one would say the same of every clip
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    paths = [files[1].parent / f"{number}.wav" for number in range(7)]
    options = {"beams": 1, "max_length": (4, 0.1)}
    told = []
    together = transcribe(
        Translator(model, found.tokenizer, batch_tokens=200, **options),
        paths,
        progress=lambda done, count: told.append((done, count)),
    )
    assert told[-1] == (7, 7) and len(told) > 1
    alone = Translator(model, found.tokenizer, **options)
    samples = [model.front_end.log_mel.read(path) for path in paths]
    assert len({len(one) for one in samples}) > 2
    for path, hypothesis in zip(paths, together, strict=True):
        (other,) = transcribe(alone, [path])
        assert hypothesis.text == other.text
        # one pass in float32 over each, padded or not
        assert math.isclose(hypothesis.score, other.score, rel_tol=1e-4, abs_tol=1e-4)


def test_a_model_without_a_front_end_is_refused(files, tmp_path):
    found, _ = prepared(files, tmp_path)
    found.model.front_end = None
    with pytest.raises(OptionError, match="has no front end for sound"):
        transcribe(Translator(found.model, found.tokenizer), [torch.randn(800)])


def test_lengths_that_are_for_training_do_not_shorten_the_validation(files, tmp_path):
    found, _ = prepared(files, tmp_path)
    from subquad.data.audio import Speech

    cut = recipe(files, **{"data.max_length": 16})
    assert len(Clips(Speech(files[1]), found.model, found.tokenizer, cut, drop=False)) == 24


def test_the_command_line_transcribes_a_manifest_and_a_file(files, tmp_path):
    from typer.testing import CliRunner

    from subquad.cli.app import app

    found, _ = prepared(files, tmp_path)
    folder = tmp_path / "model"
    found.model.save_pretrained(folder)
    found.tokenizer.save_pretrained(folder)
    short = files[1].with_name("short.tsv")
    short.write_text("".join(files[1].read_text().splitlines(True)[:3]), encoding="utf-8")
    options = ["--beams", "1", "--json"]
    given = CliRunner().invoke(app, ["translate", str(folder), str(short), *options])
    assert given.exit_code == 0, given.output
    rows = json.loads(given.stdout)
    assert [row["source"] for row in rows] == ["0.wav", "1.wav", "2.wav"]
    one = CliRunner().invoke(
        app, ["translate", str(folder), str(short.with_name("1.wav")), *options]
    )
    assert (
        json.loads(one.stdout)[0]["translations"][0]["tokens"]
        == (rows[1]["translations"][0]["tokens"])
    )
