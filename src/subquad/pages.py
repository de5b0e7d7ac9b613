"""HTML pages that stand alone: two themes, pictures inside, readable on a phone.

Figures are drawn twice, for light and for dark screens, in one style; a page carries them and
its style sheet in one file.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "DARK",
    "LIGHT",
    "STYLE",
    "Theme",
    "document",
    "length_ticks",
    "need_matplotlib",
    "new_figure",
    "picture",
    "png",
    "seconds_text",
    "set_title",
    "short_seconds",
    "table",
    "tiles",
    "twice",
]


@dataclass(frozen=True)
class Theme:
    """Colours of a page and its figures, as #rrggbb."""

    ink: str
    soft: str
    grid: str
    paper: str
    exact: str
    mine: str
    uniform: str
    explicit: str
    others: tuple[str, ...]


# Okabe and Ito's palette: told apart by people with any common colour vision.
LIGHT = Theme(
    ink="#1a1d21",
    soft="#5c6470",
    grid="#e3e6ea",
    paper="#ffffff",
    exact="#5c6470",
    mine="#0072b2",
    uniform="#d55e00",
    explicit="#cc79a7",
    others=("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#8a6d3b"),
)
DARK = Theme(
    ink="#e8eaed",
    soft="#a2a9b4",
    grid="#2c3138",
    paper="#16191d",
    exact="#a2a9b4",
    mine="#56b4e9",
    uniform="#ff8c42",
    explicit="#e2a0c6",
    others=("#56b4e9", "#f0b93a", "#3cc9a0", "#e2a0c6", "#8fb8ff", "#c7a877"),
)


def need_matplotlib() -> None:
    """Says early what figures need.

    Raises:
        ImportError: matplotlib is not installed, naming the extra that brings it.
    """
    try:
        import matplotlib  # noqa: F401  # only to see whether it is there
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'subquad[arena]'") from error


def new_figure(
    width: float, height: float, theme: Theme, columns: int = 1, rows: int = 1, **grid: Any
) -> tuple[Any, Any]:
    """A matplotlib figure that needs no display; one axis, or an array of several.

    Raises:
        ImportError: matplotlib is not installed.
    """
    need_matplotlib()
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context({"font.size": 11, "axes.titlesize": 12.5, "axes.titleweight": "bold"}):
        figure = Figure(
            figsize=(width, height), dpi=200, facecolor=theme.paper, layout="constrained"
        )
        FigureCanvasAgg(figure)
        axes = figure.subplots(rows, columns, gridspec_kw=grid or None)
    for axis in axes.flat if rows * columns > 1 else [axes]:
        axis.set_facecolor(theme.paper)
        for side, spine in axis.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(theme.grid)
        axis.tick_params(colors=theme.soft, which="both", length=0, labelsize=10)
        axis.grid(True, color=theme.grid, linewidth=0.8)
        axis.set_axisbelow(True)
    return figure, axes


def png(figure: Any) -> bytes:
    """The figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", facecolor=figure.get_facecolor())
    return buffer.getvalue()


def set_title(axis: Any, theme: Theme, title: str, below: str = "") -> None:
    """A bold title at the left, with a line of small print below."""
    axis.set_title(
        title,
        loc="left",
        color=theme.ink,
        pad=24 if below else 10,
        fontsize=12.5,
        fontweight="bold",
    )
    if below:  # in points: the same distance for figures of any height
        axis.annotate(
            below,
            (0, 1),
            xytext=(0, 7),
            xycoords="axes fraction",
            textcoords="offset points",
            color=theme.soft,
            fontsize=9.5,
            va="bottom",
        )


def length_ticks(axis: Any, lengths: list[int]) -> None:
    """Lengths on a logarithmic axis, 2048 as 2k."""
    from matplotlib.ticker import NullLocator

    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths)
    axis.set_xticklabels([f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
    axis.xaxis.set_minor_locator(NullLocator())


def seconds_text(value: float) -> str:
    """2.3 s or 140 ms."""
    return f"{value:.1f} s" if value >= 1 else f"{value * 1e3:.0f} ms"


def short_seconds(value: float) -> str:
    """For ticks: 10 ms, 1 s."""
    return f"{value:g} s" if value >= 1 else f"{value * 1e3:g} ms"


# ---- page --------------------------------------------------------------------------------

STYLE = """
:root { color-scheme: light dark; --ink:#1a1d21; --soft:#5c6470; --line:#e3e6ea; --paper:#fff;
  --card:#f6f7f9; --mine:#0072b2; --uniform:#b34a00; }
@media (prefers-color-scheme: dark) { :root { --ink:#e8eaed; --soft:#a2a9b4; --line:#2c3138;
  --paper:#16191d; --card:#1d2126; --mine:#56b4e9; --uniform:#ff8c42; } }
* { box-sizing: border-box; }
body { margin:0; background:var(--paper); color:var(--ink);
  font:16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width:1120px; margin:0 auto; padding:32px 20px 56px; }
h1 { font-size:clamp(1.5rem, 4.5vw, 2.2rem); line-height:1.2; margin:0 0 .5rem; text-wrap:balance; }
h2 { font-size:1.15rem; margin:2.4rem 0 .7rem; overflow-wrap:anywhere; }
h3 { font-size:1rem; margin:1.8rem 0 .6rem; }
p { max-width:72ch; margin:.5rem 0; }
.soft { color:var(--soft); }
.tiles { display:grid; grid-template-columns:repeat(auto-fit, minmax(150px, 1fr)); gap:12px;
  margin:24px 0 20px; }
.tile { background:var(--card); border-radius:12px; padding:14px 16px; }
.tile b { display:block; font-size:1.6rem; line-height:1.2; color:var(--mine);
  font-variant-numeric:tabular-nums; }
.tile span { font-size:.86rem; color:var(--soft); overflow-wrap:anywhere; }
.pictures { display:grid; gap:20px;
  grid-template-columns:repeat(auto-fit, minmax(min(100%, 480px), 1fr)); }
figure { margin:0; border:1px solid var(--line); border-radius:12px; padding:12px; }
figure img { display:block; width:100%; height:auto; }
.box { overflow-x:auto; border:1px solid var(--line); border-radius:12px; }
table { border-collapse:separate; border-spacing:0; width:100%; font-size:.9rem;
  font-variant-numeric:tabular-nums; }
th, td { padding:9px 12px; text-align:right; white-space:nowrap; border-top:1px solid var(--line); }
thead th { border-top:0; color:var(--soft); font-weight:600; font-size:.82rem;
  background:var(--card); }
th:first-child, td:first-child { text-align:left; position:sticky; left:0;
  background:var(--paper); }
thead th:first-child { background:var(--card); }
@media (max-width:640px) { td:first-child { white-space:normal; min-width:9.8rem;
  overflow-wrap:anywhere; }
  figure { padding:6px; } }
tr.exact td { font-weight:600; } tr.uniform td { color:var(--uniform); }
ul { padding-left:1.2rem; max-width:76ch; } li { margin:.3rem 0; }
code { font:0.9em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
"""


def picture(pair: tuple[bytes, bytes], alt: str) -> str:
    """A figure with both themes' PNGs inside; the reader's screen chooses."""
    light, dark = (base64.b64encode(content).decode() for content in pair)
    return (
        "<figure><picture>"
        f'<source media="(prefers-color-scheme: dark)" srcset="data:image/png;base64,{dark}">'
        f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{light}">'
        "</picture></figure>"
    )


def twice(draw: Callable[[Theme], Any], alt: str) -> str:
    """`picture` of a figure drawn for both themes."""
    return picture((png(draw(LIGHT)), png(draw(DARK))), alt)


def tiles(pairs: Iterable[tuple[str, str]]) -> str:
    """Large numbers with a line of small print each."""
    inside = "".join(
        f'<div class="tile"><b>{html.escape(value)}</b><span>{html.escape(words)}</span></div>'
        for value, words in pairs
    )
    return f'<div class="tiles">{inside}</div>'


def table(label: str, headers: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    """A table that scrolls in its box where the screen is narrow; rows are (class, cells)."""
    heads = "".join(f"<th>{html.escape(header)}</th>" for header in headers)
    body = "".join(
        f'<tr class="{kind}">'
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for kind, cells in rows
    )
    return (
        f'<div class="box" tabindex="0" role="region" aria-label="{html.escape(label)}"><table>'
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def document(title: str, body: str) -> str:
    """A whole page."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""
