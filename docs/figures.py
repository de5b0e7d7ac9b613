"""The pictures of these pages, drawn with the package's own code: about half a minute.

`main` is called by conf.py before a build. A picture is drawn again when this file or the
package's code is newer than it. By hand: ``python docs/figures.py [FOLDER]``.
"""

import math
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # after the choice of backend
import torch

import subquad as sq
from subquad.arena import pictures
from subquad.features import chi_quantile, draw_projection, spectral
from subquad.registry import MECHANISMS

BLUE, ORANGE, GREEN, RED, GREY = "#2563a8", "#c2611f", "#3b7d4f", "#a8324a", "#777777"
STYLE = {
    "figure.dpi": 120,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "savefig.bbox": "tight",
    "savefig.facecolor": "white",
}


def main(folder):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    package = Path(sq.__file__).parent
    newest = max(path.stat().st_mtime for path in [Path(__file__), *package.rglob("*.py")])
    for name, draw in FIGURES.items():
        path = folder / f"{name}.png"
        if path.exists() and path.stat().st_mtime > newest:
            continue
        torch.manual_seed(0)
        with plt.rc_context(STYLE):
            figure = draw()
            if figure is not None:
                figure.savefig(path)
                plt.close("all")


# ---- theory ------------------------------------------------------------------------------


def pairs(angle, length, dim=16):
    """x and y of one length at an angle, in float64."""
    x, y = torch.zeros(2, dim, dtype=torch.float64)
    x[0] = length
    y[0], y[1] = length * math.cos(angle), length * math.sin(angle)
    return x, y


def estimates(estimator, x, y, omega):
    """exp(x·y) estimated from ω (draws, M, D): positive, or trig from M/2 of its rows."""
    if estimator == "trig":
        half = omega[:, : omega.shape[1] // 2]
        return torch.exp((x @ x + y @ y) / 2) * torch.cos(half @ (x - y)).mean(1)
    if estimator == "hyperbolic":
        half = omega[:, : omega.shape[1] // 2]
        return torch.exp(-(x @ x + y @ y) / 2) * torch.cosh(half @ (x + y)).mean(1)
    return torch.exp(omega @ (x + y) - (x @ x + y @ y) / 2).mean(1)


def variance():
    """Relative variance of three estimators against the angle between x and y."""
    features, length = 64, 1.0
    angles = torch.linspace(0, math.pi, 100)
    omega = draw_projection(features, 16, heads=20000, draw="iid", dtype=torch.float64)
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    theory = {
        "trig": lambda z, d: math.exp(d) * (1 - math.exp(-d)) ** 2,
        "positive": lambda z, d: math.expm1(z),
        "hyperbolic": lambda z, d: math.expm1(z) * (1 - math.exp(-z)),
    }
    for (name, formula), colour in zip(theory.items(), (ORANGE, BLUE, GREEN), strict=True):
        curve = []
        for angle in angles.tolist():
            x, y = pairs(angle, length)
            curve.append(
                formula(float((x + y).square().sum()), float((x - y).square().sum())) / features
            )
        axes.plot(angles / math.pi, curve, color=colour, label=name)
        for angle in torch.linspace(0.02, 0.98, 13).tolist():
            x, y = pairs(angle * math.pi, length)
            ratio = estimates(name, x, y, omega) / torch.exp(x @ y)
            axes.plot(angle, (ratio - 1).square().mean(), "o", color=colour, markersize=3.5)
    axes.set(
        xlabel="angle between x and y, in units of π", ylabel="relative variance",
        yscale="log", ylim=(1e-5, 3),
        title=f"|x| = |y| = 1, D = 16, M = {features}: formulas (lines), 20,000 draws (dots)",
    )  # fmt: skip
    axes.legend(loc="lower center")
    return figure


def coupling():
    """What orthogonality and the simplex take off the variance, as a function of |z|."""
    dim, draws = 16, 40000
    lengths = torch.linspace(0.2, 2.0, 10).tolist()
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    direction = torch.zeros(dim, dtype=torch.float64)
    direction[0] = 1.0
    for draw, colour in (("iid", GREY), ("orthogonal", BLUE), ("simplex", GREEN)):
        omega = draw_projection(dim, dim, heads=draws, draw=draw, dtype=torch.float64, seed=1)
        along = omega @ direction
        curve = []
        for length in lengths:
            value = torch.exp(along * length - length**2 / 2).mean(1)
            curve.append(float(value.var()) / (math.expm1(length**2) / dim))
        axes.plot(lengths, curve, "o-", color=colour, markersize=3.5, label=draw)
    fine = torch.linspace(0.0, 2.0, 100)
    bound = [bound_ratio(z, dim) for z in fine.tolist()]
    axes.plot(fine, bound, "--", color=BLUE, linewidth=1, label="bound of the theorem")
    axes.set(
        xlabel="|z| = |x + y|", ylabel="variance / variance of iid", ylim=(0, 1.15),
        title=f"D = M = {dim}, {draws:,} draws",
    )  # fmt: skip
    axes.legend(loc="lower left")
    return figure


def bound_ratio(z, dim):
    """1 − (1 − 1/M)·2/(D+2)·(1 − e^{−z²/2})² / ((e^{z²} − 1)/M) with M = D."""
    if z == 0:
        return 1.0
    gain = (1 - 1 / dim) * 2 / (dim + 2) * (1 - math.exp(-(z**2) / 2)) ** 2
    return 1 - gain / (math.expm1(z**2) / dim)


def sphere_mean(t, dim, terms=400):
    """log Λ_D(t) = log E exp(t u·e) for u uniform on the sphere, by its series."""
    n = torch.arange(terms, dtype=torch.float64)
    half = torch.tensor(dim / 2, dtype=torch.float64)
    logs = n * math.log(max(t, 1e-300) ** 2 / 4) - torch.lgamma(n + 1)
    logs = logs - torch.lgamma(n + half) + torch.lgamma(half)
    return float(torch.logsumexp(logs, 0))


def norm_laws():
    """The kernel's factor under the three laws of lengths."""
    dim, features = 64, 256
    zs = torch.linspace(0.05, 6, 60).tolist()
    rank = torch.arange(1, features + 1, dtype=torch.float64) / (features + 1)
    lengths = chi_quantile(rank, dim).tolist()
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    sqrt_d = [math.exp(sphere_mean(math.sqrt(dim) * z, dim) - z**2 / 2) for z in zs]
    axes.plot(zs, [1.0] * len(zs), color=BLUE, label="chi: unbiased")
    quantile = []
    for z in zs:
        logs = torch.tensor([sphere_mean(r * z, dim) for r in lengths[::8]])
        quantile.append(math.exp(float(torch.logsumexp(logs, 0)) - math.log(len(logs)) - z**2 / 2))
    axes.plot(zs, quantile, color=GREEN, label="quantile, M = 256 (every 8th length)")
    axes.plot(zs, sqrt_d, color=ORANGE, label="√D")
    axes.set(
        xlabel="|z| = |x + y|", ylabel="E estimate / exp(x·y)", ylim=(0, 1.08),
        title=f"bias of fixed lengths, D = {dim}",
    )  # fmt: skip
    axes.legend(loc="lower left")
    return figure


def quantiles():
    """Random and stratified lengths."""
    dim, features = 16, 64
    rank = torch.arange(1, features + 1, dtype=torch.float64) / (features + 1)
    fixed = chi_quantile(rank, dim)
    random = draw_projection(features, dim, draw="iid", seed=3, dtype=torch.float64)[0].norm(dim=-1)
    figure, axes = plt.subplots(figsize=(6.4, 2.4))
    axes.eventplot(
        [fixed, random], colors=[GREEN, GREY], lineoffsets=[1, 2], linelengths=0.7, linewidths=1
    )
    axes.axvline(math.sqrt(dim), color=ORANGE, linewidth=1.5)
    axes.annotate("√D", (math.sqrt(dim), 2.55), color=ORANGE, ha="center", annotation_clip=False)
    axes.set(yticks=[1, 2], yticklabels=["quantile", "chi"], xlabel="|ω|", ylim=(0.5, 2.5))
    axes.set_title(f"64 lengths, D = {dim}", loc="left")
    return figure


def proposal():
    """Relative second moment against the proposal's variance, and the optimum."""
    scales = torch.linspace(0.6, 14, 400, dtype=torch.float64)
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    for level, colour in ((0.5, BLUE), (2.0, GREEN), (6.0, ORANGE)):
        curve = (
            scales.log()
            - 0.5 * (2 * scales - 1).log()
            + 2 * level * scales / (2 * scales - 1)
            - level
        )
        best = (3 + 2 * level + math.sqrt((2 * level + 1) ** 2 + 8 * level)) / 4
        at = (
            math.log(best)
            - 0.5 * math.log(2 * best - 1)
            + 2 * level * best / (2 * best - 1)
            - level
        )
        axes.plot(scales, curve, color=colour, label=f"λ = {level:g}")
        axes.plot(best, at, "o", color=colour)
        axes.plot(1.0, level, "|", color=colour, markersize=12, markeredgewidth=2)
    axes.set(
        xlabel="variance s of the proposal N(0, s)", ylabel="mean log relative second moment",
        title="one direction: s = 1 is FAVOR+ (bars), dots are the optimum",
        xlim=(0.5, 14), ylim=(0, 7),
    )  # fmt: skip
    axes.legend()
    return figure


def error_of_attention():
    """Relative error of the output against M, on short and on long queries and keys."""
    dim, length = 16, 1024
    figure, both = plt.subplots(1, 2, figsize=(8, 3.6), sharey=True)
    counts = (16, 32, 64, 128, 256, 512)
    lines = (
        ("positive", "iid", GREY, ":"),
        ("positive", "orthogonal", BLUE, "-"),
        ("trig", "orthogonal", ORANGE, "-"),
    )
    for axes, short in zip(both, (True, False), strict=True):
        q, k, v = torch.randn(3, 1, 1, length, dim)
        if short:
            q, k = (torch.nn.functional.normalize(t, dim=-1) * dim**0.25 for t in (q, k))
        exact = sq.attention(q, k, v)
        for estimator, draw, colour, style in lines:
            options = {"estimator": estimator, "draw": draw}
            curve = [mean_error(q, k, v, exact, features=m, **options) for m in counts]
            label = f"{estimator}, {draw}"
            axes.plot(counts, curve, style, color=colour, marker="o", markersize=3, label=label)
        level = float((v.mean(2, keepdim=True) - exact).norm() / exact.norm())
        axes.axhline(level, color=RED, linewidth=1.2, label="uniform attention")
        axes.set(xscale="log", yscale="log", xlabel="features M", xticks=counts)
        axes.set_title("|x| = |y| = 1" if short else "q, k ~ N(0, I)")
        axes.set_xticklabels(counts)
        axes.minorticks_off()
    both[0].set_ylabel("relative error of the output")
    both[0].legend(fontsize=8)
    figure.tight_layout()
    return figure


def mean_error(q, k, v, exact, seeds=8, **options):
    """Geometric mean over seeds of the relative error."""
    errors = []
    for seed in range(seeds):
        out = sq.attention(q, k, v, "performer", seed=seed, **options)
        errors.append(float((out - exact).norm() / exact.norm()))
    return math.exp(sum(map(math.log, errors)) / seeds)


def gauge():
    """Centring and balancing: the same softmax from shorter vectors."""
    generator = torch.Generator().manual_seed(4)
    shear = torch.tensor([[1.5, 0.4], [0.0, 0.3]], dtype=torch.float64)
    q = torch.randn(200, 2, generator=generator, dtype=torch.float64) @ shear + torch.tensor(
        [2.0, 0.5]
    )
    k = torch.randn(
        200, 2, generator=generator, dtype=torch.float64
    ) @ shear.inverse().T * 0.45 + torch.tensor([0.3, -1.8])
    from subquad.features.gauges import make_gauge, moments

    stats = moments(q[None, None], k[None, None])
    figure, axes = plt.subplots(1, 3, figsize=(8.4, 3), sharex=True, sharey=True)
    for axis, kind in zip(axes, ("none", "centre", "balance"), strict=True):
        found = make_gauge(kind, stats, 1.0)
        x = found.queries(q[None, None], 1.0).flatten(0, 2)
        y = found.keys(k[None, None], 1.0)[0].flatten(0, 2)
        axis.plot(*x.T, ".", color=BLUE, markersize=3, label="x (queries)")
        axis.plot(*y.T, ".", color=ORANGE, markersize=3, label="y (keys)")
        mean = float(x.square().sum(-1).mean() + y.square().sum(-1).mean())
        axis.set(title=f"{kind}: E|x|² + E|y|² = {mean:.1f}", aspect="equal")
    axes[0].legend(fontsize=8, loc="lower left")
    figure.tight_layout()
    return figure


def spectral_recipe():
    """The general recipe on a similarity that has no features of its own."""

    def similarity(x, y):
        return 1 / (1 + (x - y).square())

    found = spectral(similarity, 0.05, 0.05, dim=1, features=4096, extent=10.0, grid=512)
    grid = torch.linspace(-3, 3, 200)[:, None]
    figure, axes = plt.subplots(figsize=(6.4, 3))
    for at, colour in ((0.0, BLUE), (1.5, ORANGE)):
        q = torch.tensor([[at]])
        axes.plot(grid, similarity(q, grid), color=GREY, linewidth=3, alpha=0.5)
        axes.plot(grid, found.kernel(q, grid)[0], color=colour, linewidth=1.2, label=f"q = {at:g}")
    axes.set(
        xlabel="k",
        ylabel="sim(q, k) = 1/(1 + (q − k)²)",
        title="M = 4096 features (lines) of a similarity (grey)",
    )
    axes.legend()
    return figure


# ---- mechanisms --------------------------------------------------------------------------


def weights_of(name):
    def draw():
        spec = sq.describe(name).info.sample or name
        return pictures.draw(spec)

    return draw


FIGURES = {
    "variance": variance,
    "coupling": coupling,
    "norm-laws": norm_laws,
    "quantiles": quantiles,
    "proposal": proposal,
    "error": error_of_attention,
    "gauge": gauge,
    "spectral": spectral_recipe,
    **{f"weights-{name}": weights_of(name) for name in MECHANISMS},
}

if __name__ == "__main__":
    default = Path(__file__).resolve().parent / "_static" / "generated"
    main(sys.argv[1] if len(sys.argv) > 1 else default)
