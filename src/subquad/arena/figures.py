"""Figures in one style: colours that colour-blind readers can tell apart, labels at line ends."""

from __future__ import annotations

from typing import Any

__all__ = ["COLOURS", "figure", "label_ends"]


COLOURS = {
    "black": "#000000",
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "green": "#009E73",
    "blue": "#0072B2",
    "vermilion": "#D55E00",
    "purple": "#CC79A7",
    "grey": "#777777",
}
"""Okabe and Ito's palette: told apart with any common colour blindness."""


def figure(width: float, height: float, rows: int, columns: int, **options: Any) -> tuple[Any, Any]:
    """A matplotlib figure that needs no display, and its axes as a 2-D array.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    page = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(page)
    axes = page.subplots(rows, columns, squeeze=False, **options)
    for axis in axes.flat:
        axis.grid(True, which="major", color="#dddddd", linewidth=0.7)
        axis.set_axisbelow(True)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    return page, axes


def label_ends(axis: Any, ends: list[tuple[float, float, str, str]], size: float = 8.5) -> None:
    """Names lines at their right ends, (x, y, text, colour), moved apart so as not to overlap.

    Call it when the limits of the axis are final.
    """
    page = axis.figure
    page.draw_without_rendering()
    height, width = size * 1.25 * page.dpi / 72, size * 9 * page.dpi / 72
    starts = [axis.transData.transform((x, y)) for x, y, _, _ in ends]
    spots = [float(start[1]) for start in starts]
    order = sorted(range(len(ends)), key=spots.__getitem__)
    for _ in range(300):  # labels that cover each other push each other away
        moved = False
        for place, low in enumerate(order):
            for high in order[place + 1 :]:
                overlap = height - (spots[high] - spots[low])
                if overlap > 0.1 and abs(starts[high][0] - starts[low][0]) < width:
                    spots[low] -= overlap / 2
                    spots[high] += overlap / 2
                    moved = True
        if not moved:
            break
    for (_, _, text, colour), (x, y), spot in zip(ends, starts, spots, strict=True):
        axis.annotate(
            text,
            xy=(x, y),
            xycoords="figure pixels",
            xytext=(x + 0.06 * page.dpi, spot),
            textcoords="figure pixels",
            color=colour,
            fontsize=size,
            va="center",
            annotation_clip=False,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.6},
        )
