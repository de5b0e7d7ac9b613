"""Sub-quadratic attention for PyTorch: swap it in, measure what it costs, train it, stream it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from subquad.attention.base import Mechanism, State, penalties
from subquad.attention.functional import attention
from subquad.attention.layers import TransformerDecoderLayer, TransformerEncoderLayer
from subquad.attention.masks import Mask
from subquad.attention.multihead import MultiheadAttention
from subquad.attention.partial import Partial, merge
from subquad.attention.stack import StackState, TransformerDecoder, TransformerEncoder
from subquad.attention.tuning import tune
from subquad.convert import Budget, compare, convert, revert, suggest, swap_sdpa
from subquad.errors import (
    CalibrationError,
    DeviceError,
    DtypeError,
    OptionError,
    ShapeError,
    SubquadError,
    UnknownNameError,
    UnsupportedError,
)
from subquad.registry import build, describe, mechanisms
from subquad.training import recover

if TYPE_CHECKING:
    from subquad import features, kernels, models, positions
    from subquad.attention.exact.additive import AdditiveConfig
    from subquad.attention.exact.location import LocationConfig
    from subquad.attention.exact.softmax import SoftmaxConfig
    from subquad.attention.hybrid.auto import AutoConfig, decisions
    from subquad.attention.hybrid.conv import ConvConfig
    from subquad.attention.hybrid.mixed import MixedConfig
    from subquad.attention.hybrid.near_far import NearFarConfig
    from subquad.attention.kernel.efficient import EfficientConfig
    from subquad.attention.kernel.gaussian import GaussianConfig
    from subquad.attention.kernel.hedgehog import HedgehogConfig
    from subquad.attention.kernel.linear import LinearConfig
    from subquad.attention.kernel.nystrom import KernelNystromConfig
    from subquad.attention.kernel.performer import PerformerConfig
    from subquad.attention.kernel.rfa import RFAConfig
    from subquad.attention.mixer.fnet import FNetConfig
    from subquad.attention.mixer.gmlp import GMLPConfig
    from subquad.attention.mixer.layer import TokenMixing
    from subquad.attention.mixer.mlp_mixer import MLPMixerConfig
    from subquad.attention.sparse.bigbird import BigBirdConfig
    from subquad.attention.sparse.global_ import GlobalConfig
    from subquad.attention.sparse.local import LocalConfig
    from subquad.attention.sparse.routing import RoutingConfig
    from subquad.attention.sparse.sinkhorn import SinkhornConfig
    from subquad.attention.sparse.strided import StridedConfig
    from subquad.attention.summary.clustered import ClusteredConfig
    from subquad.attention.summary.compressed import CompressedConfig
    from subquad.attention.summary.key_clusters import KeyClustersConfig
    from subquad.attention.summary.layer import LinformerEncoderLayer
    from subquad.attention.summary.linformer import LinformerConfig
    from subquad.attention.summary.nystrom import NystromConfig
    from subquad.attention.summary.sampled import SampledConfig

__version__ = "0.1.0"

__all__ = [
    "AdditiveConfig",
    "AutoConfig",
    "BigBirdConfig",
    "Budget",
    "CalibrationError",
    "ClusteredConfig",
    "CompressedConfig",
    "ConvConfig",
    "DeviceError",
    "DtypeError",
    "EfficientConfig",
    "FNetConfig",
    "GMLPConfig",
    "GaussianConfig",
    "GlobalConfig",
    "HedgehogConfig",
    "KernelNystromConfig",
    "KeyClustersConfig",
    "LinearConfig",
    "LinformerConfig",
    "LinformerEncoderLayer",
    "LocalConfig",
    "LocationConfig",
    "MLPMixerConfig",
    "Mask",
    "Mechanism",
    "MixedConfig",
    "MultiheadAttention",
    "NearFarConfig",
    "NystromConfig",
    "OptionError",
    "Partial",
    "PerformerConfig",
    "RFAConfig",
    "RoutingConfig",
    "SampledConfig",
    "ShapeError",
    "SinkhornConfig",
    "SoftmaxConfig",
    "StackState",
    "State",
    "StridedConfig",
    "SubquadError",
    "TokenMixing",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "UnknownNameError",
    "UnsupportedError",
    "__version__",
    "attention",
    "build",
    "compare",
    "convert",
    "decisions",
    "describe",
    "features",
    "kernels",
    "mechanisms",
    "merge",
    "models",
    "penalties",
    "positions",
    "recover",
    "revert",
    "suggest",
    "swap_sdpa",
    "tune",
]

_LAZY = {
    "FNetConfig": "subquad.attention.mixer.fnet",
    "GMLPConfig": "subquad.attention.mixer.gmlp",
    "MLPMixerConfig": "subquad.attention.mixer.mlp_mixer",
    "TokenMixing": "subquad.attention.mixer.layer",
    "AdditiveConfig": "subquad.attention.exact.additive",
    "EfficientConfig": "subquad.attention.kernel.efficient",
    "GaussianConfig": "subquad.attention.kernel.gaussian",
    "HedgehogConfig": "subquad.attention.kernel.hedgehog",
    "LinearConfig": "subquad.attention.kernel.linear",
    "RFAConfig": "subquad.attention.kernel.rfa",
    "BigBirdConfig": "subquad.attention.sparse.bigbird",
    "GlobalConfig": "subquad.attention.sparse.global_",
    "LocalConfig": "subquad.attention.sparse.local",
    "LocationConfig": "subquad.attention.exact.location",
    "RoutingConfig": "subquad.attention.sparse.routing",
    "SinkhornConfig": "subquad.attention.sparse.sinkhorn",
    "StridedConfig": "subquad.attention.sparse.strided",
    "KernelNystromConfig": "subquad.attention.kernel.nystrom",
    "NearFarConfig": "subquad.attention.hybrid.near_far",
    "NystromConfig": "subquad.attention.summary.nystrom",
    "AutoConfig": "subquad.attention.hybrid.auto",
    "decisions": "subquad.attention.hybrid.auto",
    "ConvConfig": "subquad.attention.hybrid.conv",
    "MixedConfig": "subquad.attention.hybrid.mixed",
    "ClusteredConfig": "subquad.attention.summary.clustered",
    "KeyClustersConfig": "subquad.attention.summary.key_clusters",
    "CompressedConfig": "subquad.attention.summary.compressed",
    "LinformerConfig": "subquad.attention.summary.linformer",
    "LinformerEncoderLayer": "subquad.attention.summary.layer",
    "PerformerConfig": "subquad.attention.kernel.performer",
    "SampledConfig": "subquad.attention.summary.sampled",
    "SoftmaxConfig": "subquad.attention.exact.softmax",
}
_MODULES = ("features", "kernels", "models", "positions")


def __getattr__(name: str) -> Any:
    # Mechanisms and their configs load when first used: the registry stays lazy.
    if name in _MODULES:
        value: Any = importlib.import_module(f"subquad.{name}")
    elif name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
    else:
        raise AttributeError(f"module 'subquad' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
