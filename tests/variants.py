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
    "location": [
        "location(filters=3, kernel=5)",
        "location(filters=2, kernel=7, hidden=4, cumulative=true)",
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
    "sinkhorn": [
        "sinkhorn(block=7, top=3, iterations=2, temperature=0.3)",
        "sinkhorn(block=5, top=2, iterations=0, sort=bilinear)",
        "sinkhorn(block=11, top=none, sort=linear)",
        "sinkhorn(block=8, top=2, hard=true)",
        "sinkhorn(block=13, top=3, sortcut=true)",
        "sinkhorn",
    ],
    "routing": [
        "routing(clusters=5, window=7)",
        "routing(clusters=3, window=5, shared=true)",
        "routing(clusters=7, window=3, membership=nearest, normalise=none, own=last)",
        "routing(clusters=5, window=2, membership=nearest, neighbours=2, norm=rms, "
        "normalise=keys, start=data)",
        "routing(clusters=4, window=11, membership=balanced, merge=mean, own=last)",
        "routing(clusters=3, window=13, membership=balanced, rest=zeros, normalise=none)",
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
    "conv": [
        "conv(kernels=[4, 3], conv=shared, combine=sum, noise=0.3, inner=local(window=4))",
        "conv(kernels=[2, 5], conv=shared, combine=sum, noise=0.3, residual=true, sharing=qk, "
        "padding=causal, inner=performer(features=13))",
        "conv(kernels=[3], conv=shared, combine=sum, noise=0.3, inputs=kv, padding=causal)",
        "conv(kernels=[1, 1], conv=shared, combine=sum, noise=0.3, sharing=qkv)",
        "conv(kernels=[3, 2], conv=shared, combine=sum, noise=0.3, columns=67, rows=61)",
    ],
    "auto": [
        "auto(linear=performer(features=13), crossover=40)",
        "auto(linear=local(window=5), crossover=100)",
        "auto(linear=near_far(window=5, sinks=0, far=performer(features=13)), crossover=20)",
        "auto(linear=performer(features=13), crossover=0)",
        "auto(linear=performer(features=13, gauge=centre, statistics=calibrated), crossover=60, "
        "length=50)",
        "auto(linear=mixed(local(window=5), performer(features=13)), crossover=60, length=60)",
        "auto(linear=performer(features=13), length=300)",
        "auto",
    ],
    "reformer": [
        "reformer(rounds=2, buckets=4, chunk=5)",
        "reformer(rounds=3, buckets=[2, 4], chunk=3, shared=false)",
        "reformer(rounds=1, buckets=6, chunk=4, before=2, after=1, own=always)",
        "reformer(rounds=2, buckets=2, chunk=7, before=0, duplicates=each, shared=false)",
        "reformer(rounds=2, buckets=6, chunk=11, chunks=sorted, after=1)",
        "reformer(rounds=2, buckets=none, chunk=64, duplicates=each)",
        "reformer",
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
    "fnet": [
        "fnet",
        "fnet(norm=ortho)",
        "fnet(padding=zero)",
    ],
    "gmlp": [
        "gmlp",
        "gmlp(hidden=38, weights=toeplitz)",
        "gmlp(weights=toeplitz, heads=11)",
        "gmlp(hidden=12, heads=3, attention=5)",
    ],
    "mlp_mixer": [
        "mlp_mixer(hidden=17)",
        "mlp_mixer(hidden=none)",
    ],
    "synthesizer": [
        "synthesizer",
        "synthesizer(kinds=random)",
        "synthesizer(kinds=[dot, factorised_dense], hidden=7, factors=[31, 37])",
        "synthesizer(kinds=[factorised_random, dense, random], rank=3, trainable=false)",
    ],
    "aft": [
        "aft",
        "aft(kind=conv, window=[7, 2], normalise=false)",
        "aft(kind=local, window=5)",
        "aft(kind=local, window=[3, 0], rank=3)",
        "aft(kind=full)",
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
    """Option strings of every registered mechanism that reads q, k and v."""
    return _variants(qkv=True)


def mixer_variants(*names):
    """Option strings of every registered token mixer that declares these capabilities."""
    return [
        spec
        for spec in _variants(qkv=False)
        if all(getattr(capabilities(spec), name) for name in names)
    ]


def _variants(qkv):
    return [spec for name in sq.mechanisms(qkv=qkv) for spec in VARIANTS.get(name, [name])]


def capabilities(spec):
    """Capabilities of a variant."""
    found, config = registry.resolve(spec)
    return found.capabilities_for(config)


def answers_alone(spec):
    """Whether no query of a variant's call changes an earlier one's answer."""
    found, config = registry.resolve(spec)
    return found.answers_alone_for(config)


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


def make_mixer(spec, *, width=11, most=83, dtype=torch.float64, seed=0, **sizes):
    """A built token mixer in eval mode, with no parameter at a value that hides it."""
    mixer = sq.build(
        spec, embed_dim=width, max_length=most, seed=seed, dtype=dtype, **sizes
    ).eval()  # fmt: skip
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in mixer.parameters():  # zero, one and nearly zero at first
            if not parameter.is_meta:
                draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(0.2 * draw)
    return mixer


def tokens(length, *, batch=2, width=11, dtype=torch.float64, seed=1, size=1.0, grad=False):
    """x (B, L, C) from N(0, size²)."""
    generator = torch.Generator().manual_seed(seed)
    x = size * torch.randn(batch, length, width, generator=generator, dtype=torch.float64)
    return x.to(dtype).requires_grad_(grad)


def inputs(
    queries, keys, *, batch=2, heads=6, kv=3, dim=5, value=7, dtype=torch.float64, seed=1,
    size=1.0, grad=False, spec=None,
):  # fmt: skip
    """q (B, H, L, D), k (B, Hkv, S, D), v (B, Hkv, S, V) from N(0, size²)."""
    if spec is not None:
        kv = kv if capabilities(spec).gqa else heads
        value = value if capabilities(spec).value_width else dim
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads, queries, dim), (kv, keys, dim), (kv, keys, value))
    return tuple(
        (size * torch.randn(batch, *shape, generator=generator, dtype=torch.float64))
        .to(dtype)
        .requires_grad_(grad)
        for shape in shapes
    )
