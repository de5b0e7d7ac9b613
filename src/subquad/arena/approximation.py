r"""`subquad bench approximation`: how well random features approximate softmax attention.

The Performer paper's figure of errors against M (arXiv 2009.14794, figure 2), for every
estimator, draw, norm law and gauge, on three inputs (D = 16, L = 4096 unless said otherwise):

    ball     x, y uniform in the unit ball, x = scale^½·q, y = scale^½·k: |x|, |y| ≤ 1
    normal   q, k ~ N(0, I), where plain features have infinite expected variance, see below
    minilm   q, k, v of a sentence encoder's layers on English text (L = 512, D = 32)

Three errors, relative in Frobenius norm: of the output, of the attention matrix (rows sum to
one) and of the kernel matrix exp(x·y) that the features estimate. The line to beat is uniform
attention: the mean of the values, which looks at neither q nor k.

**What is infinite.** For one pair, z = x + y and M independent positive features,

    Var κ̂ / κ² = (exp(|z|²) − 1) / M,    κ = exp(x·y)                      (Lemma 2)

which is finite. Over inputs q, k ~ N(0, I) and scale D^-½, z ~ N(0, 2s·I) with s = D^-½, and

    E exp(|z|²) = (1 − 4s)^(−D/2)  if 4s < 1, that is D > 16;  infinite for D ≤ 16.

D = 16 is the border, and infinite. The mean squared error in absolute terms is worse:
E κ² exp(|z|²) = E exp(|x|² + |y|² + 4x·y) has a quadratic form with largest eigenvalue 3 and is
finite only if 6s < 1, that is D > 36. Trigonometric features: Var κ̂ ≤ exp(|x|² + |y|²)/M, whose
mean (1 − 2s)^(−D) is finite for D > 4; relative to κ², E exp(|x − y|²) is infinite for D ≤ 16
again. A proposal ω ~ N(0, τI) instead of N(0, I) has the relative second moment

    E κ̂²/κ² = (τ/2a)^(D/2) · exp(|z|²(1/a − 1)),    a = 1 − 1/2τ

with 1/a − 1 = 1/(2τ − 1): its mean is finite iff τ > 2s + ½, at D = 16 for every τ > 1. This is
what oprf and derf do. The *output* of positive features is a weighted mean of values and so
has finite variance always; infinite variance of its weights shows there as an error near
or above that of uniform attention which falls slowly with M: a few weights dominate each sum.
"""

from __future__ import annotations

import itertools
import json as json_module
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from subquad import registry
from subquad.arena.figures import COLOURS, figure, label_ends
from subquad.arena.machine import machine, machine_line
from subquad.attention.kernel.engine import LinearFeatures
from subquad.attention.kernel.performer import Performer
from subquad.errors import OptionError
from subquad.features.draws import DRAWS, chi_quantile
from subquad.kernels.linear import ACTIVATIONS

__all__ = [
    "SETTINGS",
    "Errors",
    "Inputs",
    "Setting",
    "ball",
    "expected_bias",
    "implied",
    "minilm",
    "normal",
    "relative_second_moment",
    "run",
    "study",
]


@dataclass(frozen=True)
class Setting:
    """Options of the Performer other than M, and a name for people."""

    label: str
    options: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, label: str, **options: Any) -> Setting:
        """A setting from keywords."""
        return cls(label, tuple(options.items()))

    @property
    def softmax(self) -> bool:
        """Whether the features estimate exp(x·y)."""
        return dict(self.options).get("estimator") != "relu"


_ESTIMATORS: dict[str, dict[str, Any]] = {
    "positive": {},
    "hyperbolic": {"estimator": "hyperbolic"},
    "trig": {"estimator": "trig"},
    "oprf": {"estimator": "oprf"},
    "derf": {"estimator": "derf"},
    "derf spread 2": {"estimator": "derf", "spread": 2.0},
    "relu": {"estimator": "relu"},
}


def _settings() -> Iterator[Setting]:
    for name, options in _ESTIMATORS.items():
        for draw in DRAWS:
            yield Setting.of(f"{name}, {draw}", draw=draw, **options)
    for norms in ("sqrt_d", "quantile"):
        yield Setting.of(f"positive, norms {norms}", norms=norms)
    for gauge in ("centre_keys", "centre", "balance"):
        yield Setting.of(f"positive, {gauge}", gauge=gauge)
    for name in ("oprf", "derf", "derf spread 2"):
        yield Setting.of(f"{name}, balance", gauge="balance", **_ESTIMATORS[name])
    for clip in (0.001, 0.01):
        yield Setting.of(f"trig, clip {clip:g}", estimator="trig", clip=clip)


SETTINGS = tuple(_settings())
"""Every estimator × draw; norm laws, gauges and clips with orthogonal draws. Trig's clip is
0.1 where none is named."""


# ---- inputs --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """q, k, v (B, H, L, D) of one seed; each (batch row, head) is measured by itself."""

    q: Tensor
    k: Tensor
    v: Tensor


def ball(length: int, dim: int, seed: int) -> Inputs:
    """Points uniform in the unit ball after scaling: q = D^¼·x with |x| ≤ 1; v ~ N(0, I)."""
    generator = torch.Generator().manual_seed(seed)

    def points() -> Tensor:
        x = torch.randn(1, 1, length, dim, generator=generator)
        radius = torch.rand(1, 1, length, 1, generator=generator) ** (1.0 / dim)
        return x / x.norm(dim=-1, keepdim=True) * radius * dim**0.25

    q, k = points(), points()
    return Inputs(q, k, torch.randn(1, 1, length, dim, generator=generator))


def normal(length: int, dim: int, seed: int) -> Inputs:
    """q, k, v ~ N(0, I)."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 1, 1, length, dim, generator=generator)
    return Inputs(q, k, v)


def minilm(length: int, seeds: Sequence[int], layers: Sequence[int]) -> list[Inputs]:
    """q, k, v of all-MiniLM-L6-v2's layers, a passage of the packaged text for each seed.

    Raises:
        ImportError: transformers or the model's package is not installed.
    """
    from subquad.arena.encoders import load_encoder, packaged_text

    encoder = load_encoder("minilm")
    first, *ids, last = encoder.tokenizer(packaged_text(), verbose=False)["input_ids"]
    room = length - 2  # [CLS] … [SEP]
    places = len(ids) // room
    found = []
    for seed in seeds:
        start = seed * 7919 % places * room
        row = torch.tensor([[first, *ids[start : start + room], last]])
        found.append(_captured(encoder.model, row, layers))
    return found


def _captured(model: Any, ids: Tensor, layers: Sequence[int]) -> Inputs:
    heads = model.config.num_attention_heads
    parts: dict[str, list[Tensor]] = {"query": [], "key": [], "value": []}
    hooks = []
    for layer in layers:
        attention = model.encoder.layer[layer].attention.self
        for name, store in parts.items():

            def keep(module: Any, args: Any, out: Tensor, store: list[Tensor] = store) -> None:
                store.append(out.unflatten(-1, (heads, -1)).transpose(1, 2))

            hooks.append(getattr(attention, name).register_forward_hook(keep))
    try:
        with torch.no_grad():
            model(input_ids=ids)
    finally:
        for hook in hooks:
            hook.remove()
    q, k, v = (torch.cat(tensors) for tensors in parts.values())
    return Inputs(q, k, v)


# ---- errors --------------------------------------------------------------------------------


def implied(
    mechanism: Performer, q: Tensor, k: Tensor, rows: Tensor | slice
) -> tuple[Tensor, Tensor]:
    """(estimate of exp(x·y), attention matrix) of some rows, (B, H, R, S) in float64.

    By materialised features; the matrix equals `Mechanism.weights`.
    """
    maps = mechanism._features(q, k, None, q.shape[-1] ** -0.5)
    if not isinstance(maps, LinearFeatures):
        raise OptionError("implied needs a named estimator")

    def side(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        u = x.double() @ weight.double()
        return u if bias is None else u + bias.double()[..., None, :]

    u_q, u_k = side(q[:, :, rows], maps.wq, maps.bq), side(k, maps.wk, maps.bk)
    log_key = -maps.quad * k.double().square().sum(-1)
    if maps.key_bias is not None:
        log_key = log_key + maps.key_bias.double()
    log_row = log_key.new_zeros(())
    if maps.query_log is not None:
        log_row = maps.query_log().double()[:, :, rows, None]
    if maps.activation == "exp":
        phi_q, phi_k = u_q.exp(), (u_k + log_key[..., None]).exp()
        product = phi_q @ phi_k.transpose(-1, -2)
        return product * log_row.exp(), product / product.sum(-1, keepdim=True)
    activation = ACTIVATIONS[maps.activation]
    phi = []
    for u in (u_q, u_k):
        value = u.new_empty(*u.shape[:-1], u.shape[-1] * activation.expand)
        activation.value(u, value)
        phi.append(value)
    weight = log_key.exp()
    product = phi[0] @ phi[1].transpose(-1, -2) * weight[..., None, :]
    least = maps.clip * weight.sum(-1)[..., None, None]
    den = torch.maximum(product.sum(-1, keepdim=True), least)
    return product * log_row.exp(), product / den


@dataclass(frozen=True)
class Errors:
    """Relative errors of one setting, M and seed, means over heads; None where undefined.

    Args:
        output, attention, kernel: ‖estimate − truth‖ / ‖truth‖.
        bias: mean of (κ̂ − κ)/κ over pairs, signed.
    """

    output: float
    attention: float
    kernel: float | None = None
    bias: float | None = None


@dataclass(frozen=True)
class _Truth:
    """What does not depend on the setting."""

    inputs: Inputs
    rows: Tensor
    out: Tensor
    kernel: Tensor
    attention: Tensor

    @classmethod
    def of(cls, inputs: Inputs, rows: int) -> _Truth:
        q, k, v = inputs.q.double(), inputs.k.double(), inputs.v.double()
        chosen = torch.linspace(0, q.shape[2] - 1, min(rows, q.shape[2])).long()
        logits = q[:, :, chosen] @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        out = functional.scaled_dot_product_attention(q, k, v)
        return cls(inputs, chosen, out, logits.exp(), logits.softmax(-1))

    def uniform(self) -> Errors:
        flat = torch.full_like(self.attention, 1.0 / self.attention.shape[-1])
        mean = self.inputs.v.double().mean(2, keepdim=True).expand_as(self.out)
        return Errors(_mean_error(mean, self.out), _mean_error(flat, self.attention))

    @torch.no_grad()
    def errors(self, setting: Setting, features: int, seed: int) -> Errors:
        q, k, v = self.inputs.q, self.inputs.k, self.inputs.v
        mechanism = registry.build(
            "performer",
            head_dim=q.shape[-1],
            num_heads=q.shape[1],
            seed=seed,
            features=features,
            **dict(setting.options),
        ).eval()
        assert isinstance(mechanism, Performer)
        output = _mean_error(mechanism(q, k, v), self.out)
        kernel, attention = implied(mechanism, q, k, self.rows)
        if not setting.softmax:
            return Errors(output, _mean_error(attention, self.attention))
        return Errors(
            output,
            _mean_error(attention, self.attention),
            _mean_error(kernel, self.kernel),
            float((kernel / self.kernel - 1.0).mean()),
        )


def _mean_error(estimate: Tensor, truth: Tensor) -> float:
    difference = (estimate.double() - truth).flatten(2).norm(dim=-1)
    return float((difference / truth.flatten(2).norm(dim=-1)).mean())


def relative_second_moment(dim: int, variance: float = 1.0) -> float:
    """E κ̂²/κ² of one positive feature over q, k ~ N(0, I); ω ~ N(0, variance·I); may be inf.

    >>> relative_second_moment(16)
    inf
    >>> round(relative_second_moment(17, 1.0))
    9163170543771
    """
    s = dim**-0.5
    if variance <= 0.5 or 4.0 * s >= 2.0 * variance - 1.0:
        return math.inf
    a = 1.0 - 0.5 / variance
    growth = 1.0 / (2.0 * variance - 1.0)
    return (variance / (2.0 * a)) ** (dim / 2) * (1.0 - 4.0 * s * growth) ** (-dim / 2)


def expected_bias(q: Tensor, k: Tensor, lengths: Tensor) -> float:
    """Mean relative error of a kernel whose ω have uniform directions and these lengths.

    E κ̂/κ − 1 = exp(−|z|²/2)·mean_i Λ_D(R_i|z|) − 1, z = x + y, Λ_D as in
    `subquad.features.draws`; averaged over all pairs of q (R, D) and k (S, D).
    """
    dim = q.shape[-1]
    x, y = (t.double() * dim**-0.25 for t in (q, k))
    norm = (x.square().sum(-1)[:, None] + y.square().sum(-1) + 2.0 * x @ y.T).clamp_min(0).sqrt()
    grid = torch.linspace(0.0, float(norm.max()) + 1e-9, 400, dtype=torch.float64)
    quarter = (lengths.double()[:, None] * grid).square() / 4.0
    term, total = torch.ones_like(quarter), torch.ones_like(quarter)
    for n in range(1, 400):
        term = term * quarter / (n * (dim / 2 + n - 1))
        total = total + term
        if bool((term <= 1e-17 * total).all()):
            break
    value = (-0.5 * grid.square()).exp() * total.mean(0) - 1.0
    place = (norm / grid[1]).clamp_max(len(grid) - 1.001)
    low = place.long()
    share = place - low
    return float((value[low] * (1.0 - share) + value[low + 1] * share).mean())


# ---- the study -----------------------------------------------------------------------------


def _quartiles(values: Sequence[float]) -> dict[str, float]:
    t = torch.tensor(values, dtype=torch.float64)
    q1, median, q3 = torch.quantile(t, torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64))
    return {"median": float(median), "q1": float(q1), "q3": float(q3)}


def study(
    name: str,
    inputs: Sequence[Inputs],
    settings: Sequence[Setting],
    features: Sequence[int],
    seeds: Sequence[int],
    *,
    rows: int = 256,
    workers: int = 1,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Errors of every setting × M × seed on one kind of input, JSON-able.

    Args:
        name: of the input.
        inputs: one for each seed; the seed also determines the draw.
        settings, features, seeds: what is crossed.
        rows: queries whose kernel and attention rows are compared; outputs of all are.
        workers: Python threads that share the seeds.
        say: progress.
    """
    truths = [_Truth.of(one, rows) for one in inputs]
    uniform = [truth.uniform() for truth in truths]
    cells = list(itertools.product(settings, features))
    jobs = [(*cell, *one) for cell in cells for one in zip(truths, seeds, strict=True)]
    found = []
    with ThreadPoolExecutor(workers) as pool:
        everything = pool.map(lambda job: job[2].errors(job[0], job[1], job[3]), jobs)
        for setting, m in cells:
            if m == features[0]:
                say(f"{name}: {setting.label}")
            errors = list(itertools.islice(everything, len(truths)))
            row: dict[str, Any] = {
                "setting": setting.label,
                "options": dict(setting.options),
                "features": m,
            }
            for part in ("output", "attention", "kernel"):
                values = [getattr(e, part) for e in errors]
                if None not in values:
                    row[part] = {**_quartiles(values), "seeds": [float(f"{x:.4g}") for x in values]}
            biases = [e.bias for e in errors if e.bias is not None]
            if biases:
                row["bias"] = {
                    "mean": statistics.fmean(biases),
                    "standard_error": (
                        statistics.stdev(biases) / len(biases) ** 0.5 if len(biases) > 1 else None
                    ),
                }
            found.append(row)
    q = inputs[0].q
    return {
        "input": name,
        "shape": list(q.shape),
        "rows": len(truths[0].rows),
        "seeds": list(seeds),
        "features": list(features),
        "uniform": {
            "output": _quartiles([e.output for e in uniform]),
            "attention": _quartiles([e.attention for e in uniform]),
        },
        "settings": found,
    }


def _bias_table(inputs: Inputs, result: dict[str, Any], rows: int) -> list[dict[str, Any]]:
    """Measured and expected mean relative error of the kernel, by norm law."""
    q, k = inputs.q[0, 0], inputs.k[0, 0]
    chosen = torch.linspace(0, len(q) - 1, min(rows, len(q))).long()
    dim = q.shape[-1]
    labels = {
        "chi": "positive, orthogonal",
        "sqrt_d": "positive, norms sqrt_d",
        "quantile": "positive, norms quantile",
    }
    table = []
    for norms, label in labels.items():
        for row in result["settings"]:
            if row["setting"] != label:
                continue
            m = row["features"]
            expected = 0.0
            if norms == "sqrt_d":
                expected = expected_bias(q[chosen], k, torch.tensor([dim**0.5]))
            elif norms == "quantile":
                rank = torch.arange(1, m + 1, dtype=torch.float64) / (m + 1)
                expected = expected_bias(q[chosen], k, chi_quantile(rank, dim))
            case = {"input": result["input"], "norms": norms, "features": m}
            table.append({**case, **row["bias"], "expected": expected})
    return table


_FULL: dict[str, Any] = {
    "length": 4096, "dim": 16, "rows": 192, "seeds": range(9),
    "features": (16, 32, 64, 128, 256, 512, 1024),
    "model_length": 512, "layers": (0, 2, 5), "model_rows": 64, "model_seeds": range(7),
}  # fmt: skip
_QUICK: dict[str, Any] = {
    "length": 1024, "dim": 16, "rows": 64, "seeds": range(5), "features": (16, 64, 256),
    "model_length": 512, "layers": (0, 5), "model_rows": 32, "model_seeds": range(5),
}  # fmt: skip


def run(out: Path, quick: bool, json: bool, echo: Callable[[str], None]) -> dict[str, Any]:
    """Runs the study; writes ``approximation.json``, ``.md`` and ``.png`` to `out`.

    Args:
        out: folder, made if missing.
        quick: shorter inputs, fewer M and seeds, in half a minute.
        json: the caller shows the result as JSON: echo progress, but no tables.
        echo: takes progress and tables, line by line.

    Returns:
        Everything that was measured, JSON-able.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # many small operations: the workers share the cores instead
    try:
        result = _measure(quick, min(4, os.cpu_count() or 1), echo)
    finally:
        torch.set_num_threads(threads)
    text = table(result)
    document = json_module.dumps(result, indent=1, allow_nan=False)
    (out / "approximation.json").write_text(document + "\n", encoding="utf-8")
    (out / "approximation.md").write_text(text, encoding="utf-8")
    try:
        draw(result, out / "approximation.png")
    except ImportError as error:
        echo(f"no approximation.png: {error}; pip install 'subquad[arena]'")
    if not json:
        echo(text)
    return result


def _measure(quick: bool, workers: int, say: Callable[[str], None]) -> dict[str, Any]:
    started = time.perf_counter()
    sizes = _QUICK if quick else _FULL
    features, rows = sizes["features"], sizes["rows"]
    left_out, panels, biases = [], [], []
    for name, make in (("ball", ball), ("normal", normal)):
        seeds = list(sizes["seeds"])
        inputs = [make(sizes["length"], sizes["dim"], seed) for seed in seeds]
        panels.append(
            study(name, inputs, SETTINGS, features, seeds, rows=rows, workers=workers, say=say)
        )
        biases += _bias_table(inputs[0], panels[-1], rows)
    try:
        seeds = list(sizes["model_seeds"])
        inputs = minilm(sizes["model_length"], seeds, sizes["layers"])
        rows = sizes["model_rows"]
        found = study(
            "minilm", inputs, SETTINGS, features, seeds, rows=rows, workers=workers, say=say
        )
        panels.append({**found, "layers": list(sizes["layers"])})
    except ImportError as error:
        left_out.append(f"minilm: {error}")
    return {
        "benchmark": "approximation",
        "machine": machine(threads=workers),
        "quick": quick,
        "statement": statement(sizes["dim"]),
        "panels": panels,
        "bias": biases,
        "left_out": left_out,
        "seconds": time.perf_counter() - started,
    }


def statement(dim: int) -> str:
    """What is finite and what is not on N(0, I) inputs of this width."""
    s = dim**-0.5
    level = 2.0 * s  # E z² along a direction
    best = (3.0 + 2.0 * level + ((2.0 * level + 1.0) ** 2 + 8.0 * level) ** 0.5) / 4.0
    plain, wide = relative_second_moment(dim), relative_second_moment(dim, best)
    size = "infinite" if math.isinf(plain) else f"{plain:.3g}"
    absolute = "infinite (finite only for D > 36)" if dim <= 36 else "finite"
    return (
        f"On q, k ~ N(0, I) with D = {dim} and scale D^-½: for any one pair the variance of the "
        f"positive estimate is finite, κ²(exp(|x+y|²) − 1)/M. Its mean over pairs relative to κ², "
        f"E exp(|x+y|²) = (1 − 4/√D)^(−D/2), is {size} (finite only for D > 16: D = 16 is the "
        f"border), and in absolute terms it is {absolute}. With ω ~ N(0, τI), τ = {best:.2f} "
        f"(oprf), it is {wide:.3g}. Outputs of positive features are weighted means of the values "
        "and have finite variance in any case."
    )


# ---- table and picture ---------------------------------------------------------------------

TITLES = {
    "ball": "|x|, |y| ≤ 1",
    "normal": "q, k ~ N(0, I)",
    "minilm": "MiniLM layers",
}


def _number(value: float) -> str:
    if value >= 100:
        return f"{value:.0f}" if value < 1e5 else f"{value:.0e}"
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _find(panel: dict[str, Any], label: str, m: int) -> dict[str, Any]:
    return next(row for row in panel["settings"] if (row["setting"], row["features"]) == (label, m))


def _findings(panel: dict[str, Any]) -> list[str]:
    """The best settings and who beats uniform attention, from the medians."""
    lines = []
    for m in panel["features"]:
        rows = [row for row in panel["settings"] if row["features"] == m]
        # clips of one draw are often equal: one of them is enough here
        rows = [row for row in rows if "clip" not in row["options"]]
        rows.sort(key=lambda row: row["output"]["median"])
        best = ", ".join(f"{r['setting']} {_number(r['output']['median'])}" for r in rows[:3])
        level = panel["uniform"]["output"]["median"]
        below = sum(row["output"]["median"] < level for row in rows)
        lines.append(f"- M = {m}: {below} of {len(rows)} beat uniform attention; best: {best}.")
    return lines


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        "# How well random features approximate softmax attention",
        "",
        f"{machine_line(result['machine'])}. Relative Frobenius errors, median over seeds "
        "(quartiles); each seed has its own inputs and its own draw. Trig's clip is 0.1 where "
        "none is named; draws are orthogonal, norms chi and gauges none where none is named; "
        "moments are those of the call.",
        "",
        result["statement"],
    ]
    for panel in result["panels"]:
        features = panel["features"]
        _, heads, length, dim = panel["shape"]
        level = panel["uniform"]
        per = f", layers {panel['layers']} × {heads} heads" if "layers" in panel else ""
        lines += [
            "",
            f"## {TITLES[panel['input']]}",
            "",
            f"L={length}, D={dim}{per}; seeds {panel['seeds'][0]}–{panel['seeds'][-1]}. "
            f"Uniform attention: output {_number(level['output']['median'])} "
            f"({_number(level['output']['q1'])}–{_number(level['output']['q3'])}), "
            f"attention matrix {_number(level['attention']['median'])}. **Bold** beats it.",
            "",
            *_findings(panel),
            "",
            "Output error:",
            "",
            "| setting | " + " | ".join(f"M={m}" for m in features) + " |",
            "|---|" + "---:|" * len(features),
        ]
        labels = list(dict.fromkeys(row["setting"] for row in panel["settings"]))
        for label in labels:
            cells = []
            for m in features:
                error = _find(panel, label, m)["output"]
                text = _number(error["median"])
                if error["median"] < level["output"]["median"]:
                    text = f"**{text}**"
                cells.append(f"{text} ({_number(error['q1'])}–{_number(error['q3'])})")
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
        shown = [m for m in features if m in (16, 256)] or list(features[:1])
        lines += [
            "",
            "Attention and kernel matrix:",
            "",
            "| setting | " + " | ".join(f"attention M={m} | kernel M={m}" for m in shown) + " |",
            "|---|" + "---:|---:|" * len(shown),
        ]
        for label in labels:
            cells = []
            for m in shown:
                row = _find(panel, label, m)
                cells.append(_number(row["attention"]["median"]))
                cells.append(_number(row["kernel"]["median"]) if "kernel" in row else "–")
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "## Bias of the norm laws",
        "",
        "Mean of (κ̂ − κ)/κ over pairs: measured (± standard error over seeds) and expected. "
        "On N(0, I) inputs the mean over a finite sample of pairs scatters widely, also where "
        "it is unbiased: its variance over pairs is infinite.",
        "",
        "| input | norms | M | measured | expected |",
        "|---|---|---:|---:|---:|",
    ]
    for row in result["bias"]:
        error = row["standard_error"]
        spread = "" if error is None else f" ± {error:.3f}"
        lines.append(
            f"| {TITLES[row['input']].replace('|', chr(92) + '|')} | {row['norms']} "
            f"| {row['features']} | {row['mean']:+.3f}{spread} | {row['expected']:+.3f} |"
        )
    if result["left_out"]:
        lines += ["", "## Left out", "", *[f"- {line}" for line in result["left_out"]]]
    lines += ["", f"The run took {result['seconds']:.0f} s."]
    return "\n".join(lines) + "\n"


_PANELS: tuple[tuple[str, str, tuple[tuple[str, str, str, str], ...]], ...] = (
    (
        "draws",
        "attention",
        (
            ("positive, iid", "iid", "vermilion", "-"),
            ("positive, orthogonal", "orthogonal", "blue", "-"),
            ("positive, simplex", "simplex", "green", "--"),
            ("trig, iid", "trig, iid", "orange", ":"),
            ("trig, orthogonal", "trig, orth.", "purple", "-."),
        ),
    ),
    (
        "estimators",
        "output",
        (
            ("positive, orthogonal", "positive", "blue", "-"),
            ("hyperbolic, orthogonal", "hyperbolic", "sky", "--"),
            ("trig, orthogonal", "trig", "purple", "-."),
            ("oprf, orthogonal", "oprf", "orange", "-"),
            ("derf, orthogonal", "derf", "green", "-"),
            ("derf spread 2, orthogonal", "derf, spread 2", "vermilion", "--"),
        ),
    ),
    (
        "gauges and norms",
        "output",
        (
            ("positive, orthogonal", "positive, plain", "blue", "-"),
            ("positive, centre_keys", "keys centred", "sky", "--"),
            ("positive, centre", "both centred", "orange", "--"),
            ("positive, balance", "balanced", "green", "-"),
            ("derf, balance", "derf, balanced", "vermilion", "-"),
            ("positive, norms sqrt_d", "norms √D", "purple", ":"),
            ("positive, norms quantile", "norms quantile", "grey", "-."),
        ),
    ),
)
"""Rows of the picture: what varies, which error, and the lines (setting, name, colour, dash)."""


def _limits(curves: Sequence[Sequence[float]], level: float) -> tuple[float, float]:
    """Limits of y: whatever runs at over three times the rest leaves the panel at the top."""
    tops = sorted(max(curve) for curve in curves)
    top = max(tops[0], level)
    for value in tops:
        if value > 3.0 * top:
            break
        top = max(top, value)
    return min(level, *(min(curve) for curve in curves)) / 1.15, top * 1.15


_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_BETWEEN = (0.03, 0.07, 0.15, 0.3, 0.4, 0.7, 1.5, 3, 4, 7)
"""Ticks of every panel, and those of one with a narrow range besides."""


def draw(result: dict[str, Any], path: Path) -> None:
    """Error against M: a column an input, a row a question; bands are quartiles over seeds.

    Raises:
        ImportError: matplotlib is not installed.
    """
    panels = result["panels"]
    page, axes = figure(3.7 * len(panels), 11.0, len(_PANELS), len(panels), sharex=True)
    pending = []
    for i, (title, part, lines) in enumerate(_PANELS):
        for j, panel in enumerate(panels):
            axis, ends = axes[i][j], []
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            features = panel["features"]
            curves = []
            for setting, name, colour, dash in lines:
                errors = [_find(panel, setting, m)[part] for m in features]
                y = [e["median"] for e in errors]
                axis.plot(features, y, dash, color=COLOURS[colour], linewidth=1.9)
                band = [e["q1"] for e in errors], [e["q3"] for e in errors]
                axis.fill_between(features, *band, color=COLOURS[colour], alpha=0.13, linewidth=0)
                ends.append((features[-1], y[-1], name, COLOURS[colour]))
                curves.append(y)
            level = panel["uniform"][part]["median"]
            axis.axhline(level, color="black", linewidth=1.3, dashes=(5, 2))
            ends.append((features[-1], level, "uniform", "black"))
            bottom, top = _limits(curves, level)
            axis.set_ylim(bottom, top)
            axis.set_xlim(features[0] * 0.9, features[-1] * 1.05)
            shown = [m for m in features if m in (16, 64, 256, 1024)]
            axis.set_xticks(shown, [str(m) for m in shown])
            wide = top / bottom > 6
            marks = sorted(_TICKS if wide else _TICKS + _BETWEEN)
            marks = [t for t in marks if bottom <= t <= top]
            axis.set_yticks(marks, [f"{t:g}" for t in marks])
            axis.minorticks_off()
            if i == 0:
                dim, length = panel["shape"][3], panel["shape"][2]
                axis.set_title(
                    f"{TITLES[panel['input']]}\nL={length}, D={dim}", fontsize=10.5, loc="left"
                )
            if j == 0:
                what = "attention matrix" if part == "attention" else part
                axis.set_ylabel(f"{title}\nrelative error of the {what}", fontsize=10)
            if i == len(_PANELS) - 1:
                axis.set_xlabel("M, features")
            pending.append((axis, ends))
    page.suptitle(
        "Random features against softmax: medians over seeds, bands are quartiles",
        fontsize=12,
        x=0.01,
        ha="left",
    )
    counts = ", ".join(f"{p['input']} {p['seeds'][0]}–{p['seeds'][-1]}" for p in panels)
    page.supxlabel(
        f"{machine_line(result['machine'])}; seeds: {counts}",
        fontsize=8, color=COLOURS["grey"], x=0.01, ha="left",
    )  # fmt: skip
    page.get_layout_engine().set(wspace=0.34, rect=(0, 0, 0.91, 1))
    page.draw_without_rendering()
    page.set_layout_engine("none")
    for axis, ends in pending:
        top = axis.get_ylim()[1]
        label_ends(
            axis,
            [
                (x, y, text, colour) if y <= top else (x, top, f"{text} ↑ {y:.2g}", colour)
                for x, y, text, colour in ends
            ],
        )
    page.savefig(path)
