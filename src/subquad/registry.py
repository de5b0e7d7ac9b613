"""The table of mechanisms: one line each, imported when first used.

Everything else (laws, docs, CLI, benchmarks, arena) reads this table.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from subquad.errors import OptionError, UnknownNameError, nearest
from subquad.options import Config, Spec, format_value, parse_spec

if TYPE_CHECKING:
    from subquad.attention.base import Capabilities, Info, Mechanism

__all__ = [
    "MECHANISMS",
    "Description",
    "build",
    "capable",
    "describe",
    "get",
    "mechanisms",
    "resolve",
]

MECHANISMS: dict[str, str] = {
    "softmax": "subquad.attention.exact.softmax:Softmax",
    "additive": "subquad.attention.exact.additive:Additive",
    "location": "subquad.attention.exact.location:Location",
    "performer": "subquad.attention.kernel.performer:Performer",
    "kernel_nystrom": "subquad.attention.kernel.nystrom:KernelNystrom",
    "linear": "subquad.attention.kernel.linear:Linear",
    "efficient": "subquad.attention.kernel.efficient:Efficient",
    "rfa": "subquad.attention.kernel.rfa:RFA",
    "gaussian": "subquad.attention.kernel.gaussian:Gaussian",
    "hedgehog": "subquad.attention.kernel.hedgehog:Hedgehog",
    "local": "subquad.attention.sparse.local:Local",
    "strided": "subquad.attention.sparse.strided:Strided",
    "global": "subquad.attention.sparse.global_:Global",
    "bigbird": "subquad.attention.sparse.bigbird:BigBird",
    "routing": "subquad.attention.sparse.routing:Routing",
    "sinkhorn": "subquad.attention.sparse.sinkhorn:Sinkhorn",
    "reformer": "subquad.attention.sparse.reformer:Reformer",
    "linformer": "subquad.attention.summary.linformer:Linformer",
    "compressed": "subquad.attention.summary.compressed:Compressed",
    "nystrom": "subquad.attention.summary.nystrom:Nystrom",
    "sampled": "subquad.attention.summary.sampled:Sampled",
    "clustered": "subquad.attention.summary.clustered:Clustered",
    "key_clusters": "subquad.attention.summary.key_clusters:KeyClusters",
    "fnet": "subquad.attention.mixer.fnet:FNet",
    "gmlp": "subquad.attention.mixer.gmlp:GMLP",
    "mlp_mixer": "subquad.attention.mixer.mlp_mixer:MLPMixer",
    "synthesizer": "subquad.attention.fixed.synthesizer:Synthesizer",
    "aft": "subquad.attention.fixed.aft:AFT",
    "mixed": "subquad.attention.hybrid.mixed:Mixed",
    "near_far": "subquad.attention.hybrid.near_far:NearFar",
    "conv": "subquad.attention.hybrid.conv:Conv",
    "auto": "subquad.attention.hybrid.auto:Auto",
}
"""name → module:class."""


def get(name: str) -> type[Mechanism]:
    """The class of a mechanism.

    Raises:
        UnknownNameError: if there is none of that name; suggests the nearest.
    """
    try:
        module, _, attribute = MECHANISMS[name].partition(":")
    except KeyError:
        raise UnknownNameError(
            f"unknown mechanism {name!r}{nearest(name, MECHANISMS)}; "
            f"registered: {', '.join(MECHANISMS)}"
        ) from None
    found: type[Mechanism] = getattr(importlib.import_module(module), attribute)
    return found


def resolve(
    mechanism: str | Spec | Config, options: Mapping[str, Any] | None = None
) -> tuple[type[Mechanism], Config]:
    """Reads any way of naming a mechanism: a name, a spec string, a `Spec` or a config.

    Raises:
        UnknownNameError: unknown mechanism or option.
        OptionError: wrong option values, or options beside a config object.
    """
    options = dict(options or {})
    if isinstance(mechanism, Config):
        if options:
            raise OptionError(
                f"options {sorted(options)} given beside a config object; use dataclasses.replace"
            )
        return get(mechanism.mechanism), mechanism
    if isinstance(mechanism, str):
        mechanism = parse_spec(mechanism)
    if not isinstance(mechanism, Spec):
        raise OptionError(
            "a mechanism is a name, a string such as 'performer(features=256)' or a config "
            f"object, given {type(mechanism).__name__}"
        )
    found = get(mechanism.name)
    return found, found.Config.from_spec(mechanism, options)


def build(
    mechanism: str | Spec | Config,
    *,
    head_dim: int | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    value_dim: int | None = None,
    embed_dim: int | None = None,
    max_length: int | None = None,
    seed: int = 0,
    device: Any = None,
    dtype: Any = None,
    **options: Any,
) -> Mechanism:
    """Builds a mechanism as a module; sizes as in `Mechanism`.

    `head_dim` and `num_heads` are needed by all but token mixers, whose size is `embed_dim`.

    Example:
        >>> import torch, subquad as sq
        >>> mech = sq.build("performer(features=64)", head_dim=16, num_heads=4, num_kv_heads=2)
        >>> q, kv = torch.randn(2, 4, 100, 16), torch.randn(2, 2, 100, 16)
        >>> mech(q, kv, kv, causal=True).shape
        torch.Size([2, 4, 100, 16])

    Raises:
        UnknownNameError: unknown mechanism or option; the nearest name is suggested.
        OptionError: wrong sizes or option values.
    """
    found, config = resolve(mechanism, options)
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    heads: dict[str, Any] = {"head_dim": head_dim, "num_heads": num_heads}
    missing = [name for name, size in heads.items() if size is None]
    if missing and found.capabilities_for(config).qkv:
        verb = "is" if len(missing) == 1 else "are"
        raise OptionError(f"{found.name}: {' and '.join(missing)} {verb} needed")
    return found(
        **heads,
        num_kv_heads=num_kv_heads,
        value_dim=value_dim,
        embed_dim=embed_dim,
        max_length=max_length,
        seed=seed,
        device=device,
        dtype=dtype,
        **values,
    )


_FILTERS = {
    "causal": "causal",
    "cross": "cross",
    "key_mask": "key",
    "gqa": "gqa",
    "state": "state",
    "weights": "weights",
    "compile": "compile",
    "approximates": "approximates",
    "qkv": "qkv",
}


def mechanisms(
    *,
    causal: bool | None = None,
    cross: bool | None = None,
    key_mask: bool | None = None,
    gqa: bool | None = None,
    state: bool | str | None = None,
    weights: bool | None = None,
    compile: bool | None = None,
    approximates: str | bool | None = None,
    qkv: bool | None = None,
) -> list[str]:
    """Names of the mechanisms that have, or lack, the given capabilities.

    True and False ask for presence and absence; ``state="constant"`` and
    ``approximates="softmax"`` ask for a value; None does not ask. Defaults of the options
    decide, see `describe` for those that change with options.

    >>> import subquad as sq
    >>> "performer" in sq.mechanisms(approximates="softmax", state="constant")
    True
    """
    wanted = {
        "causal": causal,
        "cross": cross,
        "key_mask": key_mask,
        "gqa": gqa,
        "state": state,
        "weights": weights,
        "compile": compile,
        "approximates": approximates,
        "qkv": qkv,
    }
    asked = {_FILTERS[name]: value for name, value in wanted.items() if value is not None}
    names = []
    for name in MECHANISMS:
        found = get(name)
        have = found.capabilities_for(found.Config())
        if all(
            bool(getattr(have, field)) is value
            if isinstance(value, bool)
            else getattr(have, field) == value
            for field, value in asked.items()
        ):
            names.append(name)
    return names


def capable(capability: str, *, besides: str = "") -> tuple[str, ...]:
    """Names of the mechanisms that declare a capability, without `besides`."""
    return tuple(
        name
        for name in MECHANISMS
        if name != besides
        and getattr(get(name).capabilities_for(get(name).Config()), capability, False)
    )


@dataclass(frozen=True)
class Description:
    """What is known of a mechanism; `print` it, or read its fields."""

    name: str
    family: str
    info: Info
    capabilities: Capabilities
    config: Config

    @property
    def cost(self) -> Any:
        """Order of the cost, and FLOPs and bytes as functions of the length: a `Cost`."""
        return self.info.cost

    def flops(self, length: int, head_dim: int = 64, value_dim: int = 64) -> float:
        """FLOPs of one forward call for one row and head at this length."""
        return self.info.cost.flops(length, head_dim, value_dim, self.config)

    def memory(self, length: int, head_dim: int = 64, value_dim: int = 64) -> float:
        """Bytes of one forward call beyond inputs and output, one row and head, float32."""
        return self.info.cost.memory(length, head_dim, value_dim, self.config)

    def options(self) -> list[tuple[str, Any, str]]:
        """(name, default, meaning) of every option."""
        return [
            (field.name, getattr(self.config, field.name), self.info.options.get(field.name, ""))
            for field in dataclasses.fields(self.config)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "name": self.name,
            "family": self.family,
            "summary": self.info.summary,
            "formula": self.info.formula,
            "cost": self.info.cost.formula,
            "scale": self.info.scale,
            "limit": self.info.limit,
            "paper": self.info.paper,
            "deviations": self.info.deviations,
            "use": self.info.use,
            "options": [
                {"name": name, "default": format_value(default), "meaning": meaning}
                for name, default, meaning in self.options()
            ],
            "capabilities": [
                {"name": name, "value": value, "reason": reason}
                for name, value, reason in self.capabilities.rows()
            ],
        }

    def __str__(self) -> str:
        lines = [
            f"{self.name} ({self.family}): {self.info.summary}",
            f"  formula  {self.info.formula}",
            f"  cost     {self.info.cost.formula}",
            f"  scale    {self.info.scale} by default",
            f"  exact    {self.info.limit}",
            f"  paper    {self.info.paper}",
        ]
        if self.info.use:
            lines.append(f"  use      {self.info.use}")
        if self.info.deviations:
            lines.append(f"  departs  {self.info.deviations}")
        if self.options():
            lines.append("  options")
        lines += [
            f"    {name}={format_value(default)}: {meaning}"
            for name, default, meaning in self.options()
        ]
        lines.append("  capabilities")
        lines += [
            f"    {name}: {value}" + (f" ({reason})" if reason else "")
            for name, value, reason in self.capabilities.rows()
        ]
        return "\n".join(lines)


def describe(mechanism: str | Spec | Config) -> Description:
    """Family, formula, cost, capabilities with reasons, options, exact limit and paper.

    Example:
        >>> import subquad as sq
        >>> sq.describe("performer").cost.formula
        'O(L·M·(D+V))'
        >>> bool(sq.describe("performer(gauge=centre)").capabilities.causal)
        False
    """
    found, config = resolve(mechanism)
    return Description(found.name, found.family, found.info, found.capabilities_for(config), config)
