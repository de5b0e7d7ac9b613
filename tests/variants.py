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
        "performer(features=13, estimator=derf, gauge=balance, statistics=calibrated, "
        "learned=true)",
        "performer(features=14, estimator=trig, learned=true)",
        "performer(features=12, estimator=hyperbolic, learned=true)",
    ],
    "local": [
        "local(window=5)",
        "local(window=[7, 2], dilation=3)",
        "local(window=[0, 3])",
        "local(window=67)",
    ],
    "strided": [
        "strided(stride=7)",
        "strided(stride=11, reach=none)",
        "strided(stride=5, reach=3)",
        "strided(pattern=every, stride=3, reach=4)",
        "strided(pattern=every, stride=5, reach=none)",
        "strided(pattern=fixed, stride=11, columns=3)",
        "strided(pattern=fixed, stride=7, columns=2, reach=none)",
        "strided(pattern=fixed, stride=5, columns=5, reach=2)",
    ],
    "global": [
        "global(tokens=2)",
        "global(tokens=[0, 5, 41])",
        "global(tokens=[3, -2])",
        "global(tokens=3, own=false)",
        "global(tokens=[], extra=3)",
        "global(tokens=[1, 11], extra=2, own=false)",
    ],
    "mixed": [
        "mixed(local(window=5), performer(features=13))",
        "mixed(softmax*2, gaussian(features=7, learned=true)*2, performer(features=11)*2)",
        "mixed(additive(hidden=3)*4, softmax)",
        "mixed(softmax, performer(features=13, gauge=centre))",
        "mixed(local(window=5), performer(features=13), kv_heads=[[0, 2], [1]])",
    ],
    "bigbird": [
        "bigbird(block=5)",
        "bigbird(block=4, window=[2, 0], random=2, global_blocks=[1, -2], global_tokens=[37, -3])",
        "bigbird(block=7, window=1, random=0, global_blocks=[4])",
        "bigbird(preset=longformer, window=4, global_tokens=[0, 29, 11])",
        "bigbird(preset=longformer, window=[3, 1], dilation=[2, 1, 3], global_tokens=[])",
        "bigbird(preset=longformer, window=3, dilation=2, global_tokens=[-1, 5])",
        "bigbird",
    ],
    "near_far": [
        "near_far(window=5, sinks=0, far=performer(features=13))",
        "near_far(window=0, sinks=3, far=performer(features=13))",
        "near_far(window=7, sinks=2, far=performer(features=13, estimator=derf, gauge=balance, "
        "statistics=calibrated))",
        "near_far(window=3, heavy=5, far=performer(features=13, estimator=derf, gauge=balance))",
        "near_far(window=4, sinks=2, far=performer(features=13, estimator=oprf, gauge=centre, "
        "statistics=calibrated))",
        "near_far(window=5, heavy=4, far=kernel_nystrom(features=12, clip=0.1))",
        "near_far(window=4, sinks=2, "
        "far=kernel_nystrom(features=13, landmarks=calibrated, clip=0.1))",
        "near_far(window=6, heavy=3, far=softmax)",
        "near_far",
        "near_far(window=0, heavy=3, preset=fast)",
        "near_far(window=4, heavy=5, sinks=2, far=key_clusters(clusters=9, refine=2, members=2))",
        "near_far(window=13, heavy=11, sinks=2, far=none)",
        "near_far(window=17, heavy=7, sinks=1, far=performer(features=13))",
        "near_far(window=13, heavy=8, sinks=0, "
        "far=kernel_nystrom(features=13, landmarks=calibrated, clip=0.1))",
    ],
    "gaussian": [
        "gaussian(features=11)",
        "gaussian(features=7, learned=true, sigma=1.7)",
        "gaussian(features=5, anchors=kmeans)",
    ],
    "hedgehog": [
        "hedgehog",
        "hedgehog(features=26, map=exp)",
        "hedgehog(features=6)",
    ],
    "linear": [
        "linear",
        "linear(map=exp)",
        "linear(map=softplus)",
        "linear(map=relu, key_map=sigmoid)",
        "linear(map=square, key_map=exp)",
    ],
    "efficient": ["efficient"],
    "rfa": [
        "rfa(features=38)",
        "rfa(features=46, draw=orthogonal, learned=true)",
        "rfa(features=38, gate=true)",
        "rfa(features=26, gate=true, gate_bias=2.0, clip=0.5)",
    ],
    "kernel_nystrom": [
        "kernel_nystrom(features=24)",
        'kernel_nystrom(features=13, gauge="none", ridge=0.1, clip=0.2)',
        "kernel_nystrom(features=13, landmarks=calibrated, clip=0.1)",
        "kernel_nystrom(features=8, landmarks=calibrated, gauge=centre, clip=0.1)",
        "kernel_nystrom(features=9, landmarks=learned, clip=0.1)",
    ],
    "nystrom": [
        "nystrom(landmarks=7)",
        "nystrom(landmarks=11, iterations=9, conv_kernel=5)",
        "nystrom(landmarks=5, inverse=exact)",
    ],
    "compressed": [
        "compressed(conv=shared)",
        "compressed(conv=shared, stride=4, kernel=7)",
        "compressed(conv=shared, stride=5, kernel=6, current=false)",
        "compressed(conv=shared, stride=1)",
    ],
    "linformer": [
        "linformer(k=11)",
        "linformer(k=13, sharing=none)",
        "linformer(k=7, sharing=kv)",
        "linformer(k=67, projection=mean)",
        "linformer(k=53, projection=conv, sharing=none)",
    ],
    "sampled": [
        "sampled(heavy=7, samples=11, landmarks=5)",
        "sampled(heavy=3, samples=13, landmarks=64, draw=iid, first=0, last=2)",
        "sampled(heavy=0, samples=5, first=0, last=0, uniform=1.0, draw=iid)",
        "sampled(heavy=9, samples=0, uniform=0.01)",
        "sampled",
    ],
    "clustered": [
        "clustered(clusters=11, topk=3)",
        "clustered(clusters=7, topk=0, bits=5, centre=true, iterations=2)",
        "clustered(clusters=5, distance=euclidean, topk=67)",
        "clustered(clusters=13, cluster=keys)",
        "clustered(clusters=11, cluster=keys, weights=mass, distance=hamming, bits=17)",
        "clustered(clusters=60)",
    ],
    "key_clusters": [
        "key_clusters(clusters=11, refine=3, members=2, landmarks=5)",
        "key_clusters(clusters=7, refine=0, iterations=1, sample=2)",
        "key_clusters(clusters=5, refine=5, members=67)",
        "key_clusters(clusters=13, refine=11, members=1)",
        "key_clusters",
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
    if mech.calibrates_for(mech.config):
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
