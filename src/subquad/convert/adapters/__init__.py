"""Adapters: how attention modules that do not route through transformers are converted.

`ADAPTERS` is the table, one line a class. An adapter is one small class: it knows how its
module makes q, k, v and a mask, hands them to `subquad.convert.routing.attend`, and puts the
output back. A module of your own that calls ``scaled_dot_product_attention`` needs a line only::

    ADAPTERS["my.package.Attention"] = "subquad.convert.adapters.sdpa:SDPACaller"
"""

from __future__ import annotations

import functools
import importlib

from torch import nn

from subquad.convert.adapters.base import Adapter

__all__ = ["ADAPTERS", "REFUSED", "Adapter", "find", "refusal"]

_HERE, _MODELS = "subquad.convert.adapters", "transformers.models"

ADAPTERS: dict[str, str] = {
    "torch.nn.modules.activation.MultiheadAttention": f"{_HERE}.multihead:Multihead",
    f"{_MODELS}.bloom.modeling_bloom.BloomAttention": f"{_HERE}.bloom:Bloom",
    f"{_MODELS}.codegen.modeling_codegen.CodeGenAttention": f"{_HERE}.gptj:GPTJ",
    f"{_MODELS}.falcon.modeling_falcon.FalconAttention": f"{_HERE}.sdpa:Falcon",
    f"{_MODELS}.flava.modeling_flava.FlavaSelfAttention": f"{_HERE}.bert:BertTuple",
    f"{_MODELS}.gptj.modeling_gptj.GPTJAttention": f"{_HERE}.gptj:GPTJ",
    f"{_MODELS}.megatron_bert.modeling_megatron_bert.MegatronBertSelfAttention": (
        f"{_HERE}.bert:BertLike"
    ),
    f"{_MODELS}.mpnet.modeling_mpnet.MPNetSelfAttention": f"{_HERE}.mpnet:MPNet",
    f"{_MODELS}.rembert.modeling_rembert.RemBertSelfAttention": f"{_HERE}.bert:BertLike",
    f"{_MODELS}.roformer.modeling_roformer.RoFormerSelfAttention": f"{_HERE}.bert:BertLike",
    f"{_MODELS}.tapas.modeling_tapas.TapasSelfAttention": f"{_HERE}.bert:BertTuple",
    f"{_MODELS}.visual_bert.modeling_visual_bert.VisualBertSelfAttention": (
        f"{_HERE}.bert:BertTuple"
    ),
    "timm.layers.attention.Attention": f"{_HERE}.sdpa:SDPACaller",
    "timm.models.vision_transformer.Attention": f"{_HERE}.sdpa:SDPACaller",
}
"""Full name of the attention class → module:class of its adapter."""

_POSITIONS = "its logits have terms of position that are no function of one query and one key"
REFUSED: dict[str, str] = {
    f"{_MODELS}.deberta.modeling_deberta.DisentangledSelfAttention": (
        f"{_POSITIONS} (content to position, position to content)"
    ),
    f"{_MODELS}.deberta_v2.modeling_deberta_v2.DisentangledSelfAttention": (
        f"{_POSITIONS} (content to position, position to content)"
    ),
    f"{_MODELS}.mpt.modeling_mpt.MptAttention": f"{_POSITIONS} (ALiBi)",
}
"""Full name of an attention class → why it has no adapter."""


def _name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


@functools.cache
def _adapter(target: str) -> Adapter:
    module, _, attribute = target.partition(":")
    found: Adapter = getattr(importlib.import_module(module), attribute)()
    return found


def find(module: nn.Module) -> Adapter | None:
    """The adapter of a module's very class; a subclass may attend in another way.

    An adapted module keeps its adapter, whatever class it has by then.
    """
    info = module.__dict__.get("_subquad")
    adapter: Adapter | None = getattr(info, "adapter", None)
    if adapter is not None:
        return adapter
    target = ADAPTERS.get(_name(module))
    return None if target is None else _adapter(target)


def refusal(model: nn.Module) -> str:
    """Why some attention inside a model has no adapter; empty where nothing is known."""
    for module in model.modules():
        if reason := REFUSED.get(_name(module)):
            return reason
    return ""
