"""The page of a comparison: verdict, heat map, parts, pictures, costs; one file."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from subquad import pages
from subquad.convert.cost import LengthCost
from subquad.convert.probe import AttentionPicture, LayerComparison
from subquad.errors import OptionError
from subquad.pages import Theme

if TYPE_CHECKING:
    from subquad.convert.compare import Comparison

__all__ = ["draw_heads", "save_html"]


def save_html(
    comparisons: Sequence[Comparison], path: str | Path, *, name: str = "", text: str = ""
) -> Path:
    """Writes one page about one or several mechanisms in the same model.

    Args:
        comparisons: of one model each, a section for each.
        path: of the file; folders are made.
        name: the model's name for people; default its class.
        text: what was read, in words.

    Raises:
        OptionError: there is no comparison.
        ImportError: matplotlib is not installed.
    """
    if not comparisons:
        raise OptionError("save_html needs at least one comparison")
    name = name or comparisons[0].model
    body = "".join(
        [
            _opening(comparisons, name, text),
            _table_of_mechanisms(comparisons) if len(comparisons) > 1 else "",
            *map(_section, comparisons),
            _FOOT,
        ]
    )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(pages.document(f"subquad: {name} compared", body), encoding="utf-8")
    return path


# ---- words -------------------------------------------------------------------------------

_FOOT = """<h2>How to read this</h2>
<ul class="soft">
<li><b>Error of a layer or head</b>: ‖o − o*‖ / ‖o*‖ of its attention output, o* exact, both on the
exact run’s q, k and v, so that errors of earlier layers do not mix in; norms over all rows and
unmasked positions.</li>
<li><b>Uniform attention</b> averages all values that a query may read and looks at neither q nor k.
It is the line to beat: a head above it would do better by not attending at all.</li>
<li><b>Leaving a part out</b>: the other parts are normalised among themselves. A part whose absence
changes nothing does nothing, whatever it costs; its share of the normaliser says how much weight
it carries.</li>
<li><b>Times</b> are medians of interleaved forward calls of the whole model, <b>memory</b> is what
a call adds at its peak.</li>
</ul>"""


def _say(text: str) -> str:
    return html.escape(text)


def _opening(comparisons: Sequence[Comparison], name: str, text: str) -> str:
    one = comparisons[0]
    read = text or f"{one.rows} rows of up to {one.length} positions"
    what = (
        f"{_say(name)}: what other attention costs"
        if one.mechanism
        else f"{_say(name)}: two models compared"
    )
    return (
        f"<h1>{what}</h1><p>Trained with exact attention, run with another in its place: the same "
        f"weights, the same text ({_say(read)}). Everything is measured against the exact model, "
        "and beside it stands <b>uniform attention, the line to beat</b>: it looks at neither "
        "query nor key.</p>"
        if one.mechanism
        else f"<h1>{what}</h1><p>{_say(read)}.</p>"
    )


def _main(one: Comparison) -> tuple[str, str, str, str]:
    """(value, words, the same of uniform attention, column) of the kind's own metric."""
    output, other = one.output, one.uniform_output or one.output
    if output.perplexity_ratio is not None:
        words = f"perplexity, times the exact model’s {output.perplexity_exact:.2f}"
        values = [f"{x.perplexity_ratio or math.nan:.3f} ×" for x in (output, other)]
        return values[0], words, values[1], "perplexity ratio"
    if output.agreement is not None:
        kind = "label" if output.kind == "classifier" else "top-1"
        values = [f"{100 * (x.agreement or 0.0):.1f}%" for x in (output, other)]
        return values[0], f"{kind} agreement with the exact model", values[1], f"{kind} agreement"
    words = f"cosine to the exact embedding, 5th percentile {output.cosine_p5:.4f}"
    return f"{output.cosine:.4f}", words, f"{other.cosine:.4f}", "cosine"


def _tiles(one: Comparison) -> Iterator[tuple[str, str]]:
    value, words, uniform, _ = _main(one)
    yield value, words
    if one.uniform_output is not None:
        yield uniform, "the same for uniform attention, the line to beat"
    if one.layers:
        yield (
            f"{one.error:.3f}",
            f"mean error of a layer’s attention output; uniform attention {one.uniform_error:.3f}",
        )
        heads = sum(len(layer.heads) for layer in one.layers)
        yield (
            f"{len(one.worse_heads)} of {heads}",
            "heads further from exact than uniform attention",
        )
    costs = [cost for cost in one.costs if cost.speedup is not None]
    if costs:
        yield f"{costs[-1].speedup:.2f} ×", f"as fast as exact over {costs[-1].length:,} tokens"
    memory = [cost for cost in one.costs if cost.mib_exact and cost.mib]
    if memory and memory[-1].mib and memory[-1].mib_exact:
        yield (
            f"{memory[-1].mib / memory[-1].mib_exact:.2f} ×",
            f"exact attention’s peak memory over {memory[-1].length:,} tokens",
        )


def _table_of_mechanisms(comparisons: Sequence[Comparison]) -> str:
    column = _main(comparisons[0])[3]
    rows = [
        (
            "",
            [
                one.mechanism or "b",
                _main(one)[0],
                f"{one.error:.3f}",
                str(len(one.worse_heads)),
                f"{one.seconds / one.seconds_exact:.2f} ×",
            ],
        )
        for one in comparisons
    ]
    first = comparisons[0]
    uniform = ["uniform attention", _main(first)[2], f"{first.uniform_error:.3f}", "–", "–"]
    headers = ["mechanism", column, "layers’ error", "heads above uniform", "time"]
    return pages.table("Table of mechanisms", headers, [*rows, ("uniform", uniform)])


def _section(one: Comparison) -> str:
    title = f"<h2><code>{_say(one.mechanism)}</code></h2>" if one.mechanism else ""
    parts = [title, pages.tiles(_tiles(one))]
    figures = []
    if one.layers:
        figures = [
            pages.twice(lambda theme: _layers(one.layers, theme), "Error of each layer and head"),
            pages.twice(lambda theme: draw_heads(one.layers, theme), "Heat map of heads’ errors"),
        ]
    if one.parts:
        figures.append(pages.twice(lambda t: _ablation(one.layers, t), "Error without each part"))
        figures.append(pages.twice(lambda t: _shares(one.layers, t), "Each part’s share"))
    if sum(cost.seconds is not None for cost in one.costs) > 1:
        figures.append(pages.twice(lambda t: _time(one.costs, t), "Time against length"))
        if any(cost.mib for cost in one.costs):
            figures.append(pages.twice(lambda t: _memory(one.costs, t), "Memory against length"))
    parts.append(f'<div class="pictures">{"".join(figures)}</div>')
    if one.parts:
        parts.append("<h3>What each part does</h3><ul>")
        parts += [f"<li>{_say(str(part))}.</li>" for part in one.parts]
        parts.append("</ul>")
    parts.append("<h3>End to end</h3>" + _outputs_table(one))
    if one.pictures:
        parts.append(
            "<h3>Exact and implied attention</h3><p>Rows are queries, columns are keys, darker is "
            "more weight (its square root); grey cells are not read.</p>"
            '<div class="pictures">'
        )
        parts += [pages.twice(partial(_attention, shown), _label(shown)) for shown in one.pictures]
        parts.append("</div>")
    if one.layers:
        parts.append("<h3>Layers</h3>" + _layers_table(one))
    if one.costs:
        parts.append("<h3>Time and memory of one row</h3>" + _costs_table(one.costs))
    if one.notes:
        notes = "".join(f"<li>{_say(note)}.</li>" for note in one.notes)
        parts.append(f'<ul class="soft">{notes}</ul>')
    return "".join(parts)


def _outputs_table(one: Comparison) -> str:
    lines = one.output.lines(one.uniform_output)
    uniform = one.uniform_output is not None
    headers = ["metric", one.mechanism or "b", *(["uniform attention"] if uniform else [])]
    rows = [("", [name, value, *([other] if uniform else [])]) for name, value, other in lines]
    times = f"{one.seconds_exact:.4f} → {one.seconds:.4f}"
    rows.append(("", ["seconds of a forward call", times, *(["–"] if uniform else [])]))
    return pages.table("End to end", headers, rows)


def _layers_table(one: Comparison) -> str:
    names = list(dict.fromkeys(part.name for layer in one.layers for part in layer.parts))
    headers = ["layer", "error", "± over rows", "uniform", "worst head"]
    headers += [f"without {name}" for name in names]
    rows = []
    for layer in one.layers:
        worst = max(range(len(layer.heads)), key=layer.heads.__getitem__)
        left_out = {part.name: f"{part.error_without:.3f}" for part in layer.parts}
        cells = [
            layer.name,
            f"{layer.error:.3f}",
            f"{layer.spread:.3f}",
            f"{layer.uniform_error:.3f}",
            f"{layer.heads[worst]:.3f} (head {worst})",
        ]
        kind = "uniform" if layer.error > layer.uniform_error else ""
        rows.append((kind, [*cells, *(left_out.get(name, "–") for name in names)]))
    return pages.table("Errors of layers", headers, rows)


def _costs_table(costs: Sequence[LengthCost]) -> str:
    def text(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    headers = [
        "tokens",
        "exact s",
        "converted s",
        "times as fast",
        "exact MiB",
        "converted MiB",
        "",
    ]
    rows = [
        (
            "",
            [
                f"{cost.length:,}",
                text(cost.seconds_exact, ".3g"),
                text(cost.seconds, ".3g"),
                text(cost.speedup, ".2f"),
                text(cost.mib_exact, ".1f"),
                text(cost.mib, ".1f"),
                cost.note,
            ],
        )
        for cost in costs
    ]
    return pages.table("Costs by length", headers, rows)


# ---- figures -----------------------------------------------------------------------------


def _capped(layers: Sequence[LayerComparison]) -> float:
    """Where error axes end: beyond twice uniform attention's, more is just wrong."""
    errors = [e for layer in layers for e in (layer.error, *layer.heads) if math.isfinite(e)]
    uniform = [e for layer in layers for e in (layer.uniform_error, *layer.uniform_heads)]
    limit = 2.0 * max((e for e in uniform if math.isfinite(e)), default=1.0)
    return max(1e-6, min(max(errors, default=1.0), limit))


def _layers(layers: Sequence[LayerComparison], theme: Theme) -> Any:
    page, axis = pages.new_figure(4.8, 3.8, theme)
    x = list(range(len(layers)))
    uniform = [layer.uniform_error for layer in layers]
    top = max(_capped(layers), *(u for u in uniform if math.isfinite(u)), 0.0)
    for place, layer in enumerate(layers):
        heads = [min(error, top) for error in layer.heads]
        axis.plot([place] * len(heads), heads, "o", color=theme.mine, markersize=3.5, alpha=0.35)
    error = [min(layer.error, top) for layer in layers]
    line = {"color": theme.uniform, "linewidth": 1.8, "linestyle": (0, (4, 3))}
    axis.plot(x, uniform, label="uniform attention, the line to beat", **line)
    axis.plot(x, error, color=theme.mine, linewidth=2.4, marker="o", markersize=5, label="layer")
    axis.set_ylim(0, 1.22 * top)
    _legend(axis, theme, 2)
    axis.set_xticks(_ticks(len(layers)))
    axis.set_xlabel("layer", color=theme.soft, fontsize=10)
    below = "relative to exact attention; small dots: heads"
    pages.set_title(axis, theme, "Error of the attention output", below)
    return page


def _ticks(count: int) -> list[int]:
    step = max(1, math.ceil(count / 12))
    return list(range(0, count, step))


def draw_heads(layers: Sequence[LayerComparison], theme: Theme = pages.LIGHT) -> Any:
    """A matplotlib heat map layer × head of errors; heads above uniform attention are framed.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import numpy as np
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm
    from matplotlib.patches import Rectangle

    width = max(len(layer.heads) for layer in layers)
    grid = np.full((len(layers), width), np.nan)
    for row, layer in enumerate(layers):
        grid[row, : len(layer.heads)] = layer.heads
    # Colours end at the line to beat, so that pages compare; the root tells small errors apart.
    top = max((u for x in layers for u in x.uniform_heads if math.isfinite(u)), default=1.0) or 1.0
    row_height = 0.27 if len(layers) <= 12 else 0.17
    page, axis = pages.new_figure(4.8, max(3.2, 1.3 + row_height * len(layers)), theme)
    colours = LinearSegmentedColormap.from_list("error", [theme.paper, theme.mine])
    scale = PowerNorm(0.5, vmin=0, vmax=top, clip=True)
    axis.imshow(grid, cmap=colours, norm=scale, aspect="auto")
    size = 8.0 if width <= 12 and len(layers) <= 12 else 6.5
    for row, layer in enumerate(layers):
        for head, (error, uniform) in enumerate(zip(layer.heads, layer.uniform_heads, strict=True)):
            if width <= 16:
                ink = theme.paper if error > 0.36 * top else theme.ink
                axis.text(head, row, _brief(error), ha="center", va="center", fontsize=size,
                          color=ink)  # fmt: skip
            if error > uniform:
                axis.add_patch(Rectangle((head - 0.46, row - 0.44), 0.92, 0.88, fill=False,
                               edgecolor=theme.uniform, linewidth=1.6))  # fmt: skip
    axis.grid(False)
    axis.set_xticks(_ticks(width))
    axis.set_yticks(_ticks(len(layers)))
    axis.set_xlabel("head", color=theme.soft, fontsize=10)
    axis.set_ylabel("layer", color=theme.soft, fontsize=10)
    pages.set_title(
        axis, theme, "Error of each head", "framed: further from exact than uniform attention"
    )
    return page


def _brief(error: float) -> str:
    if not math.isfinite(error):
        return "∞"
    return f"{error:.2f}".removeprefix("0") if error < 9.995 else f"{error:.0f}"


def _names(layers: Sequence[LayerComparison]) -> list[str]:
    return list(dict.fromkeys(part.name for layer in layers for part in layer.parts))


def _shares(layers: Sequence[LayerComparison], theme: Theme) -> Any:
    page, axis = pages.new_figure(4.8, 3.8, theme)
    low = [0.0] * len(layers)
    names = _names(layers)
    for name, colour in zip(names, theme.others * 3, strict=False):
        found = [{part.name: part.share for part in layer.parts} for layer in layers]
        share = [100 * one.get(name, 0.0) for one in found]
        axis.bar(range(len(layers)), share, bottom=low, color=colour, width=0.78, label=name)
        low = [a + b for a, b in zip(low, share, strict=True)]
    axis.set_ylim(0, 118)
    axis.set_yticks([0, 25, 50, 75, 100])
    axis.set_yticklabels([f"{tick}%" for tick in (0, 25, 50, 75, 100)])
    axis.set_xticks(_ticks(len(layers)))
    axis.set_xlabel("layer", color=theme.soft, fontsize=10)
    _legend(axis, theme, len(names))
    pages.set_title(axis, theme, "Share of the normaliser", "mean over queries and heads")
    return page


def _legend(axis: Any, theme: Theme, columns: int) -> None:
    legend = axis.legend(loc="upper center", ncols=min(columns, 4), frameon=False, fontsize=9.5)
    for text in legend.get_texts():
        text.set_color(theme.ink)


def _ablation(layers: Sequence[LayerComparison], theme: Theme) -> Any:
    page, axis = pages.new_figure(4.8, 3.8, theme)
    x = list(range(len(layers)))
    names = _names(layers)
    limit = 1.25 * max([1.0, *(layer.uniform_error for layer in layers)])
    highest = 0.0
    for name, colour in zip(names, theme.others * 3, strict=False):
        found = [{part.name: part.error_without for part in layer.parts} for layer in layers]
        y = [min(one.get(name, math.nan), limit) for one in found]
        highest = max(highest, *(value for value in y if math.isfinite(value)), 0.0)
        axis.plot(
            x, y, color=colour, linewidth=2, marker="o", markersize=4, label=f"without {name}"
        )
    y = [min(layer.error, limit) for layer in layers]
    axis.plot(x, y, color=theme.ink, linewidth=2.4, linestyle=(0, (1, 1)), label="with all parts")
    axis.set_ylim(0, 1.38 * max(highest, *y))
    axis.set_xticks(_ticks(len(layers)))
    axis.set_xlabel("layer", color=theme.soft, fontsize=10)
    _legend(axis, theme, 2)
    below = "where lines meet, the part does nothing"
    pages.set_title(axis, theme, "Error without each part", below)
    return page


def _lines(
    axis: Any, theme: Theme, exact: list[tuple[int, float]], mine: list[tuple[int, float]]
) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_yscale("log")
    pages.length_ticks(axis, sorted({length for length, _ in (*exact, *mine)}))
    for points, label, colour in ((exact, "exact", theme.exact), (mine, "converted", theme.mine)):
        axis.plot(*zip(*points, strict=True), color=colour, linewidth=2.3, marker="o",
                  markersize=4.5, label=label) if points else None  # fmt: skip
    _legend(axis, theme, 2)
    low, high = axis.get_ylim()
    axis.set_ylim(low, high * (high / low) ** 0.15)
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("tokens", color=theme.soft, fontsize=10)


def _time(costs: Sequence[LengthCost], theme: Theme) -> Any:
    from matplotlib.ticker import FuncFormatter

    page, axis = pages.new_figure(4.8, 3.8, theme)
    exact = [(c.length, c.seconds_exact) for c in costs if c.seconds_exact is not None]
    _lines(axis, theme, exact, [(c.length, c.seconds) for c in costs if c.seconds is not None])
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: pages.short_seconds(value)))
    pages.set_title(axis, theme, "Time of a forward call", "one row, the whole model")
    return page


def _memory(costs: Sequence[LengthCost], theme: Theme) -> Any:
    from matplotlib.ticker import FuncFormatter

    page, axis = pages.new_figure(4.8, 3.8, theme)
    exact = [(c.length, c.mib_exact) for c in costs if c.mib_exact]
    _lines(axis, theme, exact, [(c.length, c.mib) for c in costs if c.mib])
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} MiB"))
    pages.set_title(axis, theme, "Peak memory of a forward call", "beyond weights and inputs")
    return page


def _label(one: AttentionPicture) -> str:
    return f"{one.layer}, head {one.head}, error {one.error:.3f}"


def _attention(one: AttentionPicture, theme: Theme) -> Any:
    import numpy as np
    from matplotlib.colors import LinearSegmentedColormap

    page, axes = pages.new_figure(5.6, 3.3, theme, columns=2)
    steps = [theme.paper, theme.mine, theme.ink]
    colours = LinearSegmentedColormap.from_list("weight", steps).with_extremes(bad=theme.grid)
    for axis, title, weights in zip(
        axes, ("exact", "implied"), (one.exact, one.implied), strict=True
    ):
        shown = np.sqrt(np.maximum(weights.numpy(), 0.0))
        shown = np.where(weights.numpy() == 0.0, np.nan, shown)
        axis.imshow(shown, cmap=colours, vmin=0, vmax=0.7, aspect="auto", interpolation="nearest")
        axis.grid(False)
        axis.set_xticks([])
        axis.set_yticks([])
        axis.set_title(title, color=theme.soft, fontsize=10, loc="left")
    page.suptitle(_label(one), color=theme.ink, fontsize=10, fontweight="bold", x=0.02, ha="left")
    return page
