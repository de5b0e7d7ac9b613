"""Pictures and the page of the demonstration."""

from __future__ import annotations

import html
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from subquad.pages import (
    DARK,
    LIGHT,
    Theme,
    document,
    length_ticks,
    new_figure,
    picture,
    png,
    seconds_text,
    set_title,
    short_seconds,
    tiles,
)

__all__ = ["write_page"]


# Shown in the table only: the original, the same by another road, and the line to beat.
_CONTROLS = ("exact", "softmax", "uniform")


def write_page(out: Path, result: dict[str, Any]) -> list[Path]:
    """Writes demo.html with its pictures inside, and the light pictures as PNGs beside it."""
    written = []
    pictures: dict[str, tuple[bytes, bytes]] = {}
    for name, draw in (
        ("speed", _speed),
        ("memory", _memory),
        ("fidelity", _fidelity),
        ("layers", _layers),
    ):
        pictures[name] = (_png(draw, result, LIGHT), _png(draw, result, DARK))
        written.append(_write(out / f"{name}.png", pictures[name][0]))
    written.append(_write(out / "demo.png", _main_picture(result, LIGHT)))
    written.append(_write(out / "demo-dark.png", _main_picture(result, DARK)))
    written.append(_write(out / "demo.html", _page(result, pictures).encode()))
    return written


def _write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


# ---- pictures ----------------------------------------------------------------------------


def _png(draw: Any, result: dict[str, Any], theme: Theme) -> bytes:
    tall = draw in (_fidelity, _layers)
    figure, axis = new_figure(4.8, _height(result) if tall else 3.8, theme)
    draw(axis, result, theme)
    return png(figure)


def _height(result: dict[str, Any]) -> float:
    """Inches in which every row of the fidelity picture has room for its name."""
    return max(3.8, 1.4 + 0.36 * len(result["rows"]))


def _main_picture(result: dict[str, Any], theme: Theme) -> bytes:
    figure, (left, right) = new_figure(
        11.4, _height(result), theme, columns=2, width_ratios=(1.0, 1.12)
    )
    _speed(left, result, theme)
    _fidelity(right, result, theme)
    return png(figure)


def _points(values: dict[Any, float]) -> tuple[list[int], list[float]]:
    pairs = sorted((int(length), value) for length, value in values.items())
    return [x for x, _ in pairs], [y for _, y in pairs]


def _speed(axis: Any, result: dict[str, Any], theme: Theme) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    from subquad.arena.demo import ALONE

    seconds = result["attention"]["seconds"]
    lead, *others = ALONE
    x, y = _points(seconds[lead])
    ex, ey = _points(seconds["sdpa"])
    axis.set_yscale("log")
    length_ticks(axis, x)
    axis.plot(ex, ey, color=theme.exact, linewidth=2.2, marker="o", markersize=4.5)
    lowest = min(y[0], ey[0])
    for place, name in enumerate(others, 1):
        ox, oy = _points(seconds[name])
        lowest = min(lowest, *oy)
        colour = theme.others[place]
        axis.plot(ox, oy, color=colour, linewidth=2.0, marker="o", markersize=4.0)
        _label(axis, name, (ox[-2], oy[-2]), (6, -6), "left", "top", colour)
    axis.plot(x, y, color=theme.mine, linewidth=2.6, marker="o", markersize=4.5)
    _label(axis, "exact (SDPA)", (ex[-1], ey[-1]), (-9, 2), "right", "bottom", theme.exact)
    _label(axis, lead, (x[-2], y[-2]), (-2, 6), "right", "bottom", theme.mine)
    last = max(set(ex) & set(x))  # either may have been left out where it takes too long
    mine, exact = (dict(zip(*side, strict=True))[last] for side in ((x, y), (ex, ey)))
    axis.plot(
        [last, last], [mine, exact], color=theme.soft, linewidth=1, linestyle=(0, (2, 3)), zorder=1
    )
    axis.annotate(
        f"{exact / mine:.0f} × faster",
        (last, exact**0.75 * mine**0.25),
        xytext=(7, 0),
        textcoords="offset points",
        ha="left",
        va="center",
        color=theme.ink,
        fontsize=10.5,
    )
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short_seconds(value)))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.set_ylim(lowest * 0.45, max(y[-1], ey[-1]) * 2.2)
    axis.set_xlabel("tokens", color=theme.soft, fontsize=10)
    set_title(
        axis,
        theme,
        "Time of one attention call",
        f"{result['attention_setting']} of the CPU",
    )


def _label(
    axis: Any,
    text: str,
    at: tuple[float, float],
    offset: tuple[float, float],
    across: str,
    up: str,
    colour: str,
) -> None:
    axis.annotate(
        text,
        at,
        xytext=offset,
        textcoords="offset points",
        ha=across,
        va=up,
        color=colour,
        fontsize=10.5,
        fontweight="bold",
    )


def _memory(axis: Any, result: dict[str, Any], theme: Theme) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    from subquad.arena.demo import ALONE

    memory = result["attention"]["memory"]
    lead, *others = ALONE
    shown = [
        ("explicit", "weights written out", theme.explicit, -1, (-10, 2), "right", "bottom"),
        ("sdpa", "exact (SDPA)", theme.exact, -1, (2, -8), "right", "top"),
        (lead, lead, theme.mine, -1, (2, 9), "right", "bottom"),
        *(
            (name, name, theme.others[place], 1, (6, -8), "left", "top")
            for place, name in enumerate(others, 1)
        ),
    ]
    lengths = [int(n) for n in result["attention"]["seconds"][lead]]
    length_ticks(axis, lengths)
    axis.set_yscale("log")
    for name, text, colour, at, offset, across, up in shown:
        x, y = _points({n: max(v, 0.5) for n, v in memory[name].items()})
        if x:
            axis.plot(x, y, color=colour, linewidth=2.2, marker="o", markersize=4.5)
            at = min(at, len(x) - 1)
            _label(axis, text, (x[at], y[at]), offset, across, up, colour)
    if not any(memory.values()):
        axis.text(
            0.5,
            0.5,
            "not measured on this system",
            transform=axis.transAxes,
            ha="center",
            color=theme.soft,
        )
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} MiB"))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.margins(y=0.18)
    axis.set_xlabel("tokens", color=theme.soft, fontsize=10)
    set_title(axis, theme, "Peak memory of that call", "beyond its inputs, output included")


def _fidelity(axis: Any, result: dict[str, Any], theme: Theme) -> None:
    rows = [row for row in result["rows"] if row["mechanism"] not in _CONTROLS]
    uniform = next(row for row in result["rows"] if row["mechanism"] == "uniform")
    rows = sorted(rows, key=lambda row: row["cosine"])
    low = min(0.0, *(row["cosine_p5"] for row in rows), uniform["cosine"])
    line = uniform["cosine"]
    axis.axvline(line, color=theme.uniform, linewidth=1.6, linestyle=(0, (4, 3)))
    axis.text(
        line - 0.015,
        -0.62,
        f"uniform attention {line:.3f}",
        color=theme.uniform,
        fontsize=9.5,
        ha="right",
        va="bottom",
        fontweight="bold",
    )
    for place, row in enumerate(rows):
        colour = theme.mine if row["cosine"] > line else theme.soft
        axis.plot(
            [row["cosine_p5"], row["cosine"]],
            [place, place],
            color=colour,
            linewidth=3,
            alpha=0.45,
            solid_capstyle="round",
        )
        axis.plot([row["cosine"]], [place], marker="o", markersize=8, color=colour)
        axis.annotate(
            f"{row['cosine']:.3f}",
            (row["cosine"], place),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            color=theme.ink,
            fontsize=10,
        )
        axis.text(
            low,
            place + 0.17,
            _spaced(row["label"]),
            color=theme.ink,
            fontsize=10,
            va="bottom",
            bbox={"facecolor": theme.paper, "edgecolor": "none", "pad": 1.0},
        )
    axis.set_yticks([])
    axis.spines["left"].set_visible(False)
    axis.set_ylim(-0.7, len(rows) - 0.25)
    axis.set_xlim(low - 0.02, 1.1)
    axis.set_xticks([tick / 5 for tick in range(6) if tick / 5 >= low - 0.03])
    axis.grid(False, axis="y")
    axis.set_xlabel("cosine to the original embedding", color=theme.soft, fontsize=10)
    below = f"{result['model']}, {result['passages']} passages; bar: down to the 5th percentile"
    set_title(axis, theme, "What the swap costs, untrained", below)


def _spaced(label: str) -> str:
    return label.replace("(", " (", 1) if "=" in label else label


def _layers(axis: Any, result: dict[str, Any], theme: Theme) -> None:
    rows = [row for row in result["rows"] if row["mechanism"] not in _CONTROLS]
    depth = len(rows[0]["layers"]) if rows else 0
    x = list(range(depth))
    uniform = [layer["uniform_error"] for layer in rows[0]["layers"]] if rows else []
    ends: list[tuple[float, str, str]] = []
    axis.plot(x, uniform, color=theme.uniform, linewidth=1.8, linestyle=(0, (4, 3)))
    ends.append((uniform[-1] if uniform else 0.0, "uniform", theme.uniform))
    top = max(uniform, default=1.0)
    for row, colour in zip(rows, theme.others * 3, strict=False):
        y = [min(layer["error"], 1.75 * top) for layer in row["layers"]]
        axis.plot(x, y, color=colour, linewidth=2.0, marker="o", markersize=4)
        ends.append((y[-1], _brief(row["label"]), colour))
    axis.set_ylim(0, None)
    low, high = axis.get_ylim()
    gap = (high - low) * 0.062 * 3.8 / axis.figure.get_figheight()
    place = float("-inf")
    for value, label, colour in sorted(ends):
        place = max(value, place + gap)
        axis.annotate(
            label,
            (depth - 1, value),
            xytext=(depth - 1 + 0.18, place),
            textcoords="data",
            va="center",
            color=colour,
            fontsize=9.5,
            fontweight="bold",
            annotation_clip=False,
        )
    axis.set_xlim(-0.2, (depth - 1) + max(depth, 2) * 0.36)
    axis.set_xticks(x)
    axis.set_xlabel("layer", color=theme.soft, fontsize=10)
    set_title(
        axis,
        theme,
        "Error of each layer's attention output",
        "relative to exact attention, on the same q, k and v",
    )


def _brief(label: str) -> str:
    name, mark, options = label.partition("(")
    if name != "performer":
        return name
    return (
        options.rstrip(")")
        .replace("estimator=", "")
        .replace("gauge=", "")
        .replace("features=", "M = ")
        if mark
        else name
    )


# ---- page --------------------------------------------------------------------------------


def _tiles(result: dict[str, Any]) -> Iterator[tuple[str, str]]:
    from subquad.arena.demo import ALONE

    seconds, lead = result["attention"]["seconds"], next(iter(ALONE))
    length = max(seconds["sdpa"].keys() & seconds[lead].keys(), key=int)
    gain = seconds["sdpa"][length] / seconds[lead][length]
    yield f"{gain:.0f} ×", f"faster than exact attention over {int(length):,} tokens: {lead}"
    longest = max((n for n in seconds[lead]), key=int)
    yield (
        seconds_text(seconds[lead][longest]),
        f"for {int(longest):,} tokens, {result['attention_setting']}",
    )
    rows = [r for r in result["rows"] if r["mechanism"] not in _CONTROLS]
    best = max(rows, key=lambda row: row["cosine"])
    yield (
        f"{best['cosine']:.3f}",
        f"cosine to the original embedding, untrained: {_spaced(best['label'])}",
    )
    uniform = next(row for row in result["rows"] if row["mechanism"] == "uniform")
    yield f"{uniform['cosine']:.3f}", "cosine of uniform attention, the line to beat"


def _page(result: dict[str, Any], pictures: dict[str, tuple[bytes, bytes]]) -> str:
    from subquad.arena.demo import (
        ALONE,
        HEADERS,
        LABELS,
        attention_cells,
        attention_headers,
        table_cells,
    )

    body = "".join(
        f'<tr class="{html.escape(row["mechanism"].partition("(")[0])}">'
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for row, cells in zip(result["rows"], table_cells(result), strict=True)
    )
    body += "".join(
        f"<tr><td>{html.escape(skip['mechanism'])}</td>"
        f'<td colspan="{len(HEADERS) - 1}" class="soft" style="text-align:left">left out: '
        f"{html.escape(skip['reason'])}</td></tr>"
        for skip in result["skipped"]
    )
    heads, columns = (
        "".join(f"<th>{html.escape(header)}</th>" for header in headers)
        for headers in (HEADERS, attention_headers())
    )
    alone = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"
        for cells in attention_cells(result["attention"])
    )
    named = "".join(
        f'<p class="soft">{html.escape(row["label"])} is '
        f"<code>{html.escape(row['mechanism'])}</code>.</p>"
        for row in result["rows"]
        if row["mechanism"] in LABELS
    )
    specs = ", ".join(f"{label}: {spec}" for label, spec in ALONE.items())
    left_out = "".join(
        f"<li>Left out: {html.escape(line)}. Nothing is extrapolated.</li>"
        for line in result["attention"]["left_out"]
    )
    charts = (
        picture(pictures["speed"], "Time of one attention call against length: exact and linear")
        + picture(pictures["memory"], "Peak memory of one attention call against length")
        + picture(pictures["fidelity"], "Cosine to the original embedding for each mechanism")
        + picture(pictures["layers"], "Relative error of each layer's attention output")
    )
    return document(
        "subquad: a real model's attention, swapped",
        f"""<h1>A real model’s attention, swapped</h1>
<p>The sentence encoder {html.escape(result["model"])} was trained with softmax attention, whose
cost grows with the square of the length. Here its attention is replaced by mechanisms whose cost
grows linearly, in one line, with no training. What that costs, and what it saves:</p>
{tiles(_tiles(result))}
<div class="pictures">{charts}</div>
<h2>The swapped model</h2>
<div class="box" tabindex="0" role="region" aria-label="Table of mechanisms"><table>
<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>
<p class="soft">{result["passages"]} of {result["passages_available"]} passages of the packaged text
(on average {result["mean_tokens"]:.0f} tokens).</p>
{named}
<ul class="soft">
<li><b>cosine</b>: of the sentence embedding to the original’s, mean and 5th percentile over
passages.</li>
<li><b>same neighbour</b>: passages whose nearest other passage is still the same one.</li>
<li><b>attention error</b>: ‖o − o*‖ / ‖o*‖ of a layer’s attention output on the exact model’s q, k
and v, mean over layers. Uniform attention, which looks at neither q nor k, is the line to
beat.</li>
<li><b>ms / passage</b>: forward call of the whole model over {result["tokens"]} tokens, one thread,
median of interleaved calls; most of it is not attention at this length.</li>
<li><b>peak MiB</b>: of a forward call over {result["batch"]} × {result["tokens"]} tokens in a child
process, less what it held before: libraries, weights and inputs do not count.</li>
</ul>
<h2>Attention alone</h2>
<div class="box" tabindex="0" role="region" aria-label="Table of attention calls"><table>
<thead><tr>{columns}</tr></thead><tbody>{alone}</tbody></table></div>
<ul class="soft">
<li>{html.escape(result["attention_setting"])}; medians of interleaved calls;
{html.escape(specs)}.</li>
<li>“Weights written out” is what eager attention does: the L×S matrix in memory.</li>
{left_out}
<li>{html.escape(result["processor"])}, PyTorch {html.escape(result["torch"])};
{result["seconds"]:.0f} s in all.</li>
</ul>""",
    )
