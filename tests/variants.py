"""Option sets under which each mechanism is put through the laws; plus how to make inputs."""

import torch

import subquad as sq
from subquad import registry

VARIANTS = {
    "performer": [
        "performer(features=24)",
        "performer(features=14, estimator=hyperbolic, draw=simplex)",
        "performer(features=22, estimator=trig, norms=quantile)",
        "performer(features=13, estimator=oprf)",
        "performer(features=13, estimator=derf, gauge=balance)",
        "performer(features=23, estimator=relu, norms=sqrt_d, draw=iid)",
        "performer(features=13, gauge=centre, statistics=calibrated)",
        "performer(features=14, estimator=trig, gauge=balance, statistics=calibrated)",
        "performer(features=13, estimator=derf, gauge=balance, statistics=calibrated)",
    ],
    "local": [
        "local(window=5)",
        "local(window=[7, 2], dilation=3)",
        "local(window=[0, 3])",
        "local(window=67)",
    ],
    "gaussian": [
        "gaussian(features=11)",
        "gaussian(features=7, learned=true, sigma=1.7)",
        "gaussian(features=5, anchors=kmeans)",
    ],
}
"""Mechanisms without an entry are tested with their default options."""


def all_variants():
    """Every registered mechanism's option strings."""
    return [spec for name in registry.MECHANISMS for spec in VARIANTS.get(name, [name])]


def capabilities(spec):
    """Capabilities of a variant."""
    found, config = registry.resolve(spec)
    return found.capabilities_for(config)


def with_capability(*names):
    """Variants that declare all of these capabilities."""
    return [
        spec for spec in all_variants() if all(getattr(capabilities(spec), name) for name in names)
    ]


def make(spec, *, heads=6, kv=3, dim=5, dtype=torch.float64, seed=0, **sizes):
    """A built mechanism, calibrated where its options need it."""
    if not capabilities(spec).gqa:
        kv = heads
    mech = sq.build(
        spec, head_dim=dim, num_heads=heads, num_kv_heads=kv, seed=seed, dtype=dtype,
        max_length=1024, **sizes,
    ).eval()  # fmt: skip
    needs_data = {"statistics": "calibrated", "anchors": "kmeans"}
    if any(getattr(mech.config, key, None) == value for key, value in needs_data.items()):
        q, k, _ = inputs(31, 31, heads=heads, kv=kv, dim=dim, dtype=dtype, seed=101)
        mech.calibrate(q, k)
    return mech


def inputs(
    queries, keys, *, batch=2, heads=6, kv=3, dim=5, value=7, dtype=torch.float64, seed=1,
    size=1.0, grad=False, spec=None,
):  # fmt: skip
    """q (B, H, L, D), k (B, Hkv, S, D), v (B, Hkv, S, V) from N(0, size²)."""
    if spec is not None and not capabilities(spec).gqa:
        kv = heads
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads, queries, dim), (kv, keys, dim), (kv, keys, value))
    return tuple(
        (size * torch.randn(batch, *shape, generator=generator, dtype=torch.float64))
        .to(dtype)
        .requires_grad_(grad)
        for shape in shapes
    )
