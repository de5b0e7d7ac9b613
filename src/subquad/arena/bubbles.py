"""The picture of all mechanisms: what they learn against how fast they are, memory as area.

Like figure 3 of Long Range Arena (arXiv 2011.04006), from what `subquad bench tasks` measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from subquad import registry
from subquad.arena.machine import machine_line
from subquad.pages import Theme, new_figure, set_title

__all__ = ["draw", "place_labels"]

AREA = 1.1
"""Square points of a bubble for one megabyte."""
SIZE = 8.5
"""Points of a label's font."""
LEGEND = (30, 100, 300, 1000)
"""Megabytes of the bubbles that explain the areas."""
_MARKS = ("exact", "kernel", "sparse", "summary", "fixed", "mixer", "hybrid")


def draw(result: dict[str, Any], theme: Theme) -> Any:
    """A matplotlib figure of a result of `subquad.arena.tasks.run`.

    Raises:
        ImportError: matplotlib is not installed.
    """
    rows = [row for row in result["rows"] if row.get("sublayer")]
    page, axis = new_figure(11, 7.4, theme)
    colours = dict(zip(_MARKS, (theme.exact, *theme.others), strict=True))
    axis.set_xscale("log")
    families = {}
    bubbles = []
    for row in sorted(rows, key=lambda row: -row["sublayer"]["peak_bytes"]):
        family = registry.get(row["mechanism"]).family
        x, y = row["sublayer"]["times_faster"], row["score"]
        area = AREA * row["sublayer"]["peak_bytes"] / 1e6
        colour = colours[family]
        families[family] = axis.scatter(
            x, y, s=area, linewidths=1.4, edgecolors=colour, zorder=3,
            facecolors=_faded(colour, 0.55 if row["causal"] else 0.0),
        )  # fmt: skip
        bubbles.append((x, y, math.sqrt(area / math.pi), row["mechanism"], colour))
    reach = [x for x, *_ in bubbles] or [1.0]
    axis.set_xlim(min(reach) / 1.5, max(reach) * 1.5)
    axis.set_ylim(-0.06, 1.12)
    tasks, layer = result["settings"]["tasks"], result["settings"]["sublayer"]
    axis.set_xlabel(
        f"times faster than exact softmax (forward of one sublayer, {layer['length']:,} tokens)",
        color=theme.soft,
    )
    axis.set_ylabel(
        f"score on {len(result['rows'][0]['tasks'])} tasks of {2 * tasks['pairs']} tokens "
        "(1: all right, 0: chance)",
        color=theme.soft,
    )
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axis.xaxis.set_minor_formatter(lambda value, _: f"{value:g}×" if _leads(value) else "")
    for row in result["rows"]:
        if row["mechanism"] == "uniform" and row["causal"]:
            axis.axhline(row["score"], color=theme.uniform, linewidth=1.2, linestyle="--")
            axis.annotate(
                "uniform attention", (1, row["score"]), xycoords=("axes fraction", "data"),
                xytext=(-4, 4), textcoords="offset points", ha="right", fontsize=SIZE,
                color=theme.uniform,
            )  # fmt: skip
    set_title(
        axis, theme, "What mechanisms learn, how fast they are, and the memory they take",
        "Area: peak memory of one sublayer's training step. "
        "Hollow: no causal form, tasks bidirectional.",
    )  # fmt: skip
    _legends(axis, theme, families, colours)
    page.supxlabel(machine_line(result["machine"]), fontsize=8, color=theme.soft, x=0.01, ha="left")
    page.draw_without_rendering()
    page.set_layout_engine("none")  # labels are placed in pixels
    _label(axis, bubbles, theme)
    return page


def _leads(value: float) -> bool:
    """Whether the first digit of a tick is 2 or 5."""
    return round(value / 10 ** math.floor(math.log10(value))) in (2, 5)


def _faded(colour: str, opacity: float) -> Any:
    from matplotlib.colors import to_rgba

    return to_rgba(colour, opacity)


def _legends(axis: Any, theme: Theme, families: dict[str, Any], colours: dict[str, str]) -> None:
    names = [name for name in _MARKS if name in families]
    handles = [
        axis.scatter([], [], s=60, color=_faded(colours[name], 0.55), edgecolors=colours[name])
        for name in names
    ]
    style = {
        "frameon": False, "labelcolor": theme.soft, "fontsize": 9, "borderaxespad": 0.0,
        "alignment": "left", "title_fontproperties": {"size": 9, "weight": "bold"},
    }  # fmt: skip
    first = axis.legend(
        handles, names, title="family", loc="upper left", bbox_to_anchor=(1.01, 1.0), **style
    )
    first.get_title().set_color(theme.ink)
    axis.add_artist(first)
    sizes = [
        axis.scatter([], [], s=AREA * size, facecolors="none", edgecolors=theme.soft)
        for size in LEGEND
    ]
    second = axis.legend(
        sizes, [f"{size:,} MB" for size in LEGEND], title="memory", loc="lower left",
        bbox_to_anchor=(1.01, 0.0), labelspacing=2.2, handletextpad=1.6, borderpad=1.2, **style,
    )  # fmt: skip
    second.get_title().set_color(theme.ink)


# ---- labels --------------------------------------------------------------------------------


class Box(NamedTuple):
    """A rectangle in pixels."""

    left: float
    low: float
    right: float
    high: float

    def overlap(self, other: Box) -> float:
        """Area that both cover."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.high, other.high) - max(self.low, other.low)
        return max(0.0, width) * max(0.0, height)

    @property
    def area(self) -> float:
        """Square pixels."""
        return (self.right - self.left) * (self.high - self.low)


def place_labels(
    bubbles: Sequence[tuple[float, float, float]], sizes: Sequence[tuple[float, float]], inside: Box
) -> list[Box]:
    """Where labels stand: near their bubbles, over no label and as few bubbles as can be.

    Greedy, the most crowded bubble first: of seven distances and 24 directions, from the right
    on, the cheapest, where a covered label costs ten times its area, a covered bubble its own,
    and distance little.

    Args:
        bubbles: (x, y, radius) in pixels.
        sizes: (width, height) of each label, in pixels.
        inside: the labels stay in here.

    >>> place_labels([(50, 50, 5)], [(20, 10)], Box(0, 0, 100, 100))[0].left > 55
    True
    """
    squares = [Box(x - r, y - r, x + r, y + r) for x, y, r in bubbles]
    crowd = [sum(math.hypot(x - a, y - b) < 120 for a, b, _ in bubbles) for x, y, _ in bubbles]
    found: dict[int, Box] = {}
    for index in sorted(range(len(bubbles)), key=lambda i: -crowd[i]):
        (x, y, radius), (width, height) = bubbles[index], sizes[index]
        best = (math.inf, inside)
        for step in range(7):
            for turn in range(24):
                angle = math.tau * turn / 24
                far = radius + 4 + 14 * step
                middle = x + math.cos(angle) * (far + width / 2)
                level = y + math.sin(angle) * (far + height / 2)
                box = Box(
                    middle - width / 2, level - height / 2, middle + width / 2, level + height / 2
                )
                outside = box.area - box.overlap(inside)
                cost = (
                    10 * sum(box.overlap(other) for other in found.values())
                    + sum(box.overlap(square) for square in squares)
                    + 20 * outside
                    + 0.03 * box.area * step
                )
                if cost < best[0]:
                    best = (cost, box)
        found[index] = best[1]
    return [found[index] for index in range(len(bubbles))]


def _label(
    axis: Any, bubbles: Sequence[tuple[float, float, float, str, str]], theme: Theme
) -> None:
    """Names beside bubbles, with a line to the bubble where the name is away from it."""
    page = axis.figure
    pixel = page.dpi / 72
    spots = [(*axis.transData.transform((x, y)), radius * pixel) for x, y, radius, *_ in bubbles]
    renderer = page.canvas.get_renderer()
    sizes = []
    for *_, name, _ in bubbles:
        text = axis.text(0, 0, name, fontsize=SIZE)
        extent = text.get_window_extent(renderer)
        text.remove()
        sizes.append((extent.width + 2 * pixel, extent.height + 1 * pixel))
    frame = axis.get_window_extent(renderer)
    inside = Box(frame.x0, frame.y0, frame.x1, frame.y1)
    boxes = place_labels(spots, sizes, inside)
    for (x, y, radius), box, (*_, name, colour) in zip(spots, boxes, bubbles, strict=True):
        middle, level = (box.left + box.right) / 2, (box.low + box.high) / 2
        edge = (min(max(x, box.left), box.right), min(max(y, box.low), box.high))
        away = math.hypot(edge[0] - x, edge[1] - y) - radius
        axis.annotate(
            name, xy=(x, y), xycoords="figure pixels", xytext=(middle, level),
            textcoords="figure pixels", ha="center", va="center", fontsize=SIZE,
            color=theme.ink, zorder=5, annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.8, "shrinkA": 0}
            if away > 6 * pixel
            else None,
        )  # fmt: skip
