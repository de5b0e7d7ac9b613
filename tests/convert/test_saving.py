"""Converted models survive the disk bit for bit, and no process loads them as something else."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import json
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import transformers as tf
from torch import nn

import subquad as sq
from subquad.convert import saving

_spec = importlib.util.spec_from_file_location("models", Path(__file__).parent / "models.py")
models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models)
HEADS, WIDTH = models.HEADS, models.WIDTH
hidden, inputs, tiny = models.hidden, models.inputs, models.tiny

tf.utils.logging.disable_progress_bar()

NEAR_FAR = "near_far(window=2, heavy=2)"


def converted(kind="bert", mechanism=NEAR_FAR, seed=3, **options):
    model = tiny(kind)
    sq.convert(model, mechanism, seed=seed, **options)
    return model


def saved(model, folder, **options):
    model.save_pretrained(folder, **options)
    return json.loads((folder / "config.json").read_text())


def loaded(model, folder, **options):
    if type(model) is tf.BertModel:
        options["add_pooling_layer"] = False
    return type(model).from_pretrained(folder, **options)


def same(a, b, kind="bert"):
    """Whether both give the same output to the last bit.

    Copies are compared: tensors read from a file lie at addresses that some matrix products round
    otherwise for.
    """
    x = inputs(kind)
    return torch.equal(hidden(aligned(a), **x), hidden(aligned(b), **x))


def aligned(model):
    """A copy whose tensors lie where the allocator puts them."""
    copied = copy.deepcopy(model)
    for tensor in (*copied.parameters(), *copied.buffers()):
        tensor.data = tensor.data.clone()
    return copied


KINDS = {
    "bert": {},
    "llama": {},  # grouped heads, causal
    "bart": {},  # two stacks and cross-attention, tied embeddings
    "t5": {"where": lambda name, module: "EncDec" in name},
    "whisper": {},
    "dinov2": {},
}


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_is_bit_exact(kind, tmp_path):
    model = tiny(kind)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    exact = hidden(model, **inputs(kind))
    sq.convert(model, NEAR_FAR, seed=3, **KINDS[kind])
    config = saved(model, tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} <= {".json", ".safetensors", ".md"}
    assert set(config["quantization_config"]["layers"]) == {
        name for name, module in model.named_modules() if "subquad" in module._modules
    }
    again = loaded(model, tmp_path)
    assert same(model, again, kind)
    assert not again.training and not hasattr(again.config, "quantization_config")
    state = again.state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    # The loaded model is a converted model like any other.
    again.float()
    saved(again, tmp_path / "second")
    assert same(model, loaded(again, tmp_path / "second"), kind)
    assert sq.revert(again) == sq.revert(model) > 0
    assert torch.equal(hidden(again, **inputs(kind)), exact)
    assert all(torch.equal(v, again.state_dict()[k]) for k, v in before.items())


ORDERS = {
    "subquad first": "import sys, subquad, torch\n"
    "assert 'transformers' not in sys.modules\nimport transformers",
    "transformers first": "import torch, transformers\ntransformers.AutoModel\nimport subquad",
    "without subquad": "import torch, transformers",
}


@pytest.mark.parametrize(
    "order",
    [
        "subquad first",
        pytest.param("transformers first", marks=pytest.mark.slow),
        pytest.param("without subquad", marks=pytest.mark.slow),
    ],
)
def test_a_fresh_process_loads_it_or_says_why_not(order, tmp_path):
    kept = "encoder.layer.1.attention.self"
    model = converted(mechanism="performer(features=32)", keep_exact=[kept])
    for mechanism in mechanisms(model):  # other draws than the seed's: they are in the file
        mechanism.projection.normal_()
    saved(model, tmp_path / "m")
    x = inputs("bert")
    torch.save({"x": x, "out": hidden(model, **x)}, tmp_path / "expected.pt")
    check = f"""
        x = torch.load({str(tmp_path / "expected.pt")!r}, weights_only=True)
        model = transformers.AutoModel.from_pretrained({str(tmp_path / "m")!r})
        with torch.no_grad():
            out = model(**x["x"]).last_hidden_state
        assert torch.equal(out, x["out"]), (out - x["out"]).abs().max()
    """
    command = [sys.executable, "-c", ORDERS[order] + textwrap.dedent(check)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if order == "without subquad":  # an error, not another model, unless it is asked for
        assert done.returncode != 0 and "subquad_sdpa" in done.stderr, done.stderr
        assert "is not supported" in done.stderr
        plain = f"""
            folder = {str(tmp_path / "m")!r}
            transformers.AutoModel.from_pretrained(folder, attn_implementation="sdpa")
        """
        command[-1] = ORDERS[order] + textwrap.dedent(plain)
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0 and "Unknown quantization type, got subquad" in done.stderr
    else:
        assert done.returncode == 0, done.stderr


def test_trained_and_calibrated_tensors_come_from_the_file(tmp_path):
    model = tiny("bert")
    names = [f"encoder.layer.{i}.attention.self" for i in range(3)]
    specs = ("kernel_nystrom(landmarks=learned, features=8)", "linformer(k=5)", NEAR_FAR)
    sq.convert(model, dict(zip(names, specs, strict=True)))
    first = model.encoder.layer[0].attention.self.subquad
    q, k = (torch.randn(1, HEADS, 40, WIDTH // HEADS) for _ in range(2))
    first.calibrate(q, k)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    config = saved(model, tmp_path)
    assert config["quantization_config"]["layers"] == {
        name: str(model.get_submodule(name).subquad.config) for name in names
    }
    again = loaded(model, tmp_path)
    assert same(model, again)
    trained = dict(again.encoder.layer[0].attention.self.subquad.named_parameters())
    assert trained and all(parameter.requires_grad for parameter in trained.values())


def test_the_seed_of_each_layer_is_kept(tmp_path):
    """A mechanism that draws again later, or in each call, goes on as it would have."""
    model = converted(mechanism="performer(features=32)", seed=11)
    saved(model, tmp_path)
    again = loaded(model, tmp_path)
    for one, other in zip(mechanisms(model), mechanisms(again), strict=True):
        assert one.seed == other.seed
        one.reset_parameters()
        other.reset_parameters()
    assert same(model, again)


def mechanisms(model):
    return [m._modules["subquad"] for m in model.modules() if "subquad" in m._modules]


@pytest.mark.parametrize("name", sq.mechanisms(qkv=True))
def test_every_mechanism_survives(name, tmp_path):
    model = converted(mechanism=name)
    saved(model, tmp_path)
    assert same(model, loaded(model, tmp_path))
    # from_pretrained leaves buffers that are not in the file as uninitialised memory
    for mechanism in mechanisms(model):
        named = {key for key, _ in mechanism.named_buffers()}
        assert named <= mechanism.state_dict().keys()


def test_shards_and_another_head(tmp_path):
    torch.manual_seed(0)
    config = tf.BertConfig(vocab_size=53, hidden_size=WIDTH, num_hidden_layers=3,
                           num_attention_heads=HEADS, intermediate_size=40)  # fmt: skip
    model = tf.BertForMaskedLM(config).eval()
    sq.convert(model, "performer(features=16)")
    saved(model, tmp_path / "whole", max_shard_size="20KB")
    assert len(list((tmp_path / "whole").glob("*.safetensors"))) > 1
    assert same(model, loaded(model, tmp_path / "whole"))
    # The base model alone, from the whole; and the whole from the base model.
    base = tf.BertModel.from_pretrained(tmp_path / "whole", add_pooling_layer=False)
    assert same(model.bert, base)
    names = saved(model.bert, tmp_path / "base")["quantization_config"]["layers"]
    assert all(name.startswith("encoder.layer.") for name in names)
    assert same(model.bert, tf.BertForMaskedLM.from_pretrained(tmp_path / "base").bert)


def test_a_class_that_lacks_converted_layers_says_so(tmp_path):
    model = converted("bart")
    saved(model, tmp_path)
    with pytest.warns(UserWarning, match="encoder.layers.0.self_attn.*are not in this BartForCau"):
        decoder = tf.BartForCausalLM.from_pretrained(tmp_path)
    assert len(mechanisms(decoder)) == 4  # two layers, self- and cross-attention


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_precision(dtype, tmp_path):
    """Cast after the conversion, and full precision loaded as half: as the same model in memory."""
    model = converted(mechanism="performer(features=16)")
    saved(model, tmp_path / "single")
    cast = copy.deepcopy(model).to(dtype)
    saved(cast, tmp_path / "cast")
    again = loaded(cast, tmp_path / "cast")
    assert again.dtype == dtype and same(cast, again)
    half = loaded(model, tmp_path / "single", dtype=dtype)
    assert half.dtype == dtype
    weights = tiny("bert").to(dtype)
    sq.convert(weights, "performer(features=16)", seed=3)
    if dtype != torch.float64:  # there a float64 draw is not a float32 draw
        assert same(weights, half)


def test_copies_and_pickles_save_themselves(tmp_path):
    model = converted()
    for index, other in enumerate((copy.deepcopy(model), pickle.loads(pickle.dumps(model)))):
        with torch.no_grad():
            next(other.parameters()).add_(1.0)
        config = saved(other, tmp_path / str(index))
        assert len(config["quantization_config"]["layers"]) == 3
        assert same(other, loaded(other, tmp_path / str(index)))
        assert not same(other, model)


def test_a_reverted_model_saves_as_it_did_before_its_conversion(tmp_path):
    model = tiny("bert")
    plain = saved(model, tmp_path / "before")
    sq.convert(model, NEAR_FAR)
    before = copy.deepcopy(model.config.__dict__)
    saved(model, tmp_path / "converted")
    now = {k: v for k, v in model.config.__dict__.items() if k not in ("dtype", "architectures")}
    assert now == {k: v for k, v in before.items() if k in now}
    sq.revert(model)
    assert saved(model, tmp_path / "after") == plain
    assert not (tmp_path / "after" / "README.md").exists()


def test_the_implementation_is_restored_and_can_be_chosen(tmp_path):
    model = tiny("bert", "eager")
    sq.convert(model, NEAR_FAR, keep_exact=["encoder.layer.0.attention.self"])
    saved(model, tmp_path)
    again = loaded(model, tmp_path)
    assert same(model, again)
    sq.revert(again)
    assert again.config._attn_implementation == "eager"
    chosen = loaded(model, tmp_path, attn_implementation="sdpa")
    sq.revert(chosen)
    assert chosen.config._attn_implementation == "sdpa"


def test_mechanisms_built_at_the_first_call(tmp_path, monkeypatch):
    """Where attributes do not tell the sizes of the heads, the record does."""
    from subquad.convert import swap

    monkeypatch.setattr(swap, "head_sizes", lambda *args: None)
    model = converted(mechanism="performer(features=16)")
    saved(model, tmp_path / "waiting")
    x = hidden(model, **inputs("bert"))
    assert torch.equal(hidden(loaded(model, tmp_path / "waiting"), **inputs("bert")), x)
    for mechanism in mechanisms(model):
        mechanism.projection.normal_()
    saved(model, tmp_path / "built")
    assert same(model, loaded(model, tmp_path / "built"))


# ---- what does not fit ---------------------------------------------------------------------


def change(folder, edit):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    edit(config["quantization_config"])
    path.write_text(json.dumps(config))


def test_a_record_that_does_not_fit_is_an_error(tmp_path):
    model = converted(mechanism="performer(features=16)")
    layer = "encoder.layer.0.attention.self"
    cases = [
        (lambda r: r["layers"].update({layer: "perfomer"}), "did you mean 'performer'"),
        (lambda r: r["layers"].update({"encoder.layer.9": "softmax"}), "are not in this BertModel"),
        (lambda r: r["layers"].update({layer: "softmax"}), "defaults of softmax changed"),
        (
            lambda r: r["options"]["performer(features=16)"][0][""].update(draw="iid"),
            "draw was iid, is orthogonal",
        ),
    ]  # fmt: skip
    for edit, message in cases:
        saved(model, tmp_path)
        change(tmp_path, edit)
        with pytest.raises(sq.OptionError, match=message):
            loaded(model, tmp_path)


def test_a_file_without_the_mechanisms_tensors_is_an_error(tmp_path):
    model = converted(mechanism="performer(features=16)")
    weights = {k: v for k, v in model.state_dict().items() if ".subquad." not in k}
    saved(model, tmp_path, state_dict=weights)
    with pytest.raises(sq.OptionError, match="lacks encoder.layer.0.attention.self.subquad."):
        loaded(model, tmp_path)


def _clip():
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
    text = {**sizes, "intermediate_size": 40, "vocab_size": models.VOCAB, "eos_token_id": 2}
    vision = {**sizes, "intermediate_size": 40, "image_size": 20, "patch_size": 4}
    torch.manual_seed(0)
    return tf.CLIPModel(tf.CLIPConfig(text_config=text, vision_config=vision)).eval()


@pytest.mark.parametrize("kind", ["falcon", "siglip_vision", "clip"])
def test_every_folder_stops_processes_without_subquad(kind, tmp_path):
    """Also where converted layers follow a config inside the model's, or none at all."""
    model = _clip() if kind == "clip" else tiny(kind)
    where = {"siglip_vision": lambda name, m: "head" in name}.get(kind)
    sq.convert(model, "performer(features=16)", where=where)
    assert saved(model, tmp_path)["attn_implementation"] == "subquad_sdpa"
    again = loaded(model, tmp_path)
    assert again.config._attn_implementation == "sdpa" or kind != "siglip_vision"
    x = {**inputs("vit"), **inputs("bert")} if kind == "clip" else inputs(kind)
    assert torch.equal(outputs(model, x), outputs(again, x))


def outputs(model, x):
    with torch.no_grad():
        return model(**x)[0]


def test_a_part_that_was_converted_alone_is_saved_with_the_whole(tmp_path):
    for name, model in (("clip", _clip()), ("bert", tf.BertForMaskedLM(tiny("bert").config))):
        model.eval()
        part = model.vision_model if name == "clip" else model.bert.encoder.layer[1]
        x = {**inputs("vit"), **inputs("bert")} if name == "clip" else inputs("bert")
        sq.convert(part, "performer(features=16)")
        config = saved(model, tmp_path / name)
        assert len(config["quantization_config"]["layers"]) == 1
        again = loaded(model, tmp_path / name)
        assert torch.equal(outputs(model, x), outputs(again, x))
        sq.revert(part)  # of which the whole knows nothing
        assert "quantization_config" not in saved(model, tmp_path / f"{name} reverted")
        assert not (tmp_path / f"{name} reverted" / "README.md").exists()


@pytest.mark.parametrize("kind", ["llama", "vit"])
def test_a_converted_models_config_alone_makes_no_exact_model(kind, tmp_path):
    saved(converted(kind, "performer(features=16)"), tmp_path / "first")
    config = tf.AutoConfig.from_pretrained(tmp_path / "first")
    auto = tf.AutoModelForCausalLM if kind == "llama" else tf.AutoModel
    model = auto.from_config(config).eval()
    with pytest.raises(sq.UnsupportedError, match="config alone.*from_pretrained.*subquad.convert"):
        hidden(model, **inputs(kind))
    # Converted by hand it is a model like any other: it runs, its exact layers too, and saves.
    names = sq.convert(model, "performer(features=16)").converted
    sq.convert(model, "performer(features=16)", keep_exact=names[0].name)
    assert hidden(model, **inputs(kind)).isfinite().all()
    saved(model, tmp_path / "second")
    assert same(model, auto.from_pretrained(tmp_path / "second"), kind)


def test_quantised_weights_are_refused(tmp_path):
    model = converted()
    for held in ({"quant_method": "gguf"}, tf.GgufConfig(gguf_file="weights.gguf")):
        model.config.quantization_config = held
        with pytest.raises(sq.UnsupportedError, match="weights quantised by gguf: "):
            model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_other_modules_go_by_their_state_dict():
    """As the module's documentation says: convert alike, then load."""
    torch.manual_seed(0)

    def fresh():
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 40, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        sq.convert(encoder, "performer(features=16)")
        return encoder

    one, other = fresh(), fresh()
    for name, buffer in one.named_buffers():
        if "projection" in name:
            buffer.normal_()
    x = torch.randn(2, 7, WIDTH)
    with torch.no_grad():
        assert not torch.equal(one(x), other(x))
        other.load_state_dict(one.state_dict())
        assert torch.equal(one(x), other(x))


# ---- the model card ------------------------------------------------------------------------


def test_the_card_has_its_own_section(tmp_path):
    model = converted(keep_exact=["encoder.layer.1.attention.self"])
    (tmp_path / "README.md").write_text("# Mine\n\nWords.\n")
    saved(model, tmp_path)
    first = (tmp_path / "README.md").read_text()
    assert first.startswith("# Mine\n\nWords.\n\n<!-- subquad")
    assert "2 attention layers of this BertModel" in first
    assert f"`encoder.layer.{{0, 2}}.attention.self` | `{NEAR_FAR}`" in first
    assert "The error was not measured" in first

    comparison = sq.compare(model, [inputs("bert")])
    model.__dict__[saving.RECIPE] = {"minutes": 3, "method": "attention transfer"}
    (tmp_path / "README.md").write_text(first + "\nMore of mine.\n")
    saved(model, tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("# Mine\n\nWords.\n") and text.endswith("More of mine.\n")
    assert text.count("<!-- subquad") == 1
    assert f"Measured on {comparison.rows} inputs" in text and "not measured" not in text
    assert "- method: attention transfer" in text
    # What was measured travels with the model, until it is converted anew.
    again = loaded(model, tmp_path)
    assert saving.card(again) == saving.card(model) and "before they last" not in text
    # A measurement of other weights is not passed off as one of these.
    with torch.no_grad():
        next(again.parameters())[0] += 1.0
    assert "**before they last changed**" in saving.card(again)
    sq.convert(again, "performer")
    assert "not measured" in saving.card(again)


def test_the_snippet_of_the_card_runs(tmp_path):
    model = converted()
    code = saving.card(model).partition("```python\n")[2].partition("```")[0]
    saved(model, tmp_path)
    names = {"FOLDER": tmp_path}
    exec(code, names)
    assert same(model, names["model"])


def test_ranges_of_layers_are_short():
    names = [f"h.{i}.attn" for i in (0, 1, 2, 5)] + ["top"]
    assert saving._ranges(names) == ["`h.{0–2, 5}.attn`", "`top`"]
    assert saving._ranges(["h.7.attn"]) == ["`h.7.attn`"]


def test_importing_the_loaders_twice_registers_once():
    auto = sys.modules[saving._LOADERS]
    before = auto.AUTO_QUANTIZER_MAPPING[saving.METHOD]
    saving.announce()
    assert auto.AUTO_QUANTIZER_MAPPING[saving.METHOD] is before


def test_the_finder_only_looks(monkeypatch):
    seen = []
    finder = saving._AfterImport("colorsys", seen.append)
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    assert importlib.util.find_spec("colorsys") is not None and not seen
    module = importlib.import_module("colorsys")
    assert seen == [module]
