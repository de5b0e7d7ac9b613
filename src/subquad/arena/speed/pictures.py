"""Time against length, log-log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from subquad.arena.figures import COLOURS, figure, label_ends
from subquad.arena.machine import machine_line
from subquad.arena.speed.cases import DECODE, FORWARD, PREFILL, TRAINING, Case, thousands
from subquad.arena.speed.contenders import SDPA
from subquad.arena.speed.peers import PERFORMER

__all__ = ["draw"]

PANELS = (
    ((FORWARD, False), (FORWARD, True), (PREFILL, True)),
    ((TRAINING, False), (TRAINING, True), (DECODE, True)),
)


def _styles(names: Sequence[str]) -> dict[str, tuple[str, str, float]]:
    """(colour, line style, width) of each contender."""
    styles = {
        SDPA: (COLOURS["black"], "-", 1.8),
        PERFORMER: (COLOURS["vermilion"], "-", 1.8),
        "performer": (COLOURS["blue"], "-", 2.8),
        "softmax": (COLOURS["grey"], "--", 1.4),
    }
    rest = [n for n in names if n not in styles]
    spare = ("green", "orange", "purple", "sky")
    dashes = ("-", "--", ":", "-.")
    for i, name in enumerate(rest):
        styles[name] = (COLOURS[spare[i % 4]], dashes[i // 4 % 4], 1.6)
    return styles


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Forward, training step, prefill and decode step of every mechanism that was timed.

    Args:
        result: of `measure`, with the part "mechanisms".
        path: of the picture.

    Raises:
        ImportError: matplotlib is not installed.
    """
    found = result["mechanisms"]
    times: list[dict[str, Any]] = found["times"]
    names = list(dict.fromkeys(row["name"] for row in times))
    height = max(8.0, 2 * (1.2 + 0.25 * len(names)))  # room for every name at its line's end
    page, axes = figure(17, height, 2, 3, sharex=True)
    for row in axes:
        row[1].sharey(row[0])
    styles = _styles(names)
    ticks = sorted({row["length"] for row in times}) or [1, 2]
    pending = []
    for kinds, row in zip(PANELS, axes, strict=True):
        for (mode, causal), axis in zip(kinds, row, strict=True):
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            ends = []
            for name in names:
                points = sorted(
                    (one["length"], one["ms"])
                    for one in times
                    if (one["name"], one["mode"], one["causal"]) == (name, mode, causal)
                )
                if not points:
                    continue
                colour, dash, width = styles[name]
                x, y = zip(*points, strict=True)
                axis.plot(x, y, dash, color=colour, linewidth=width, marker="o", markersize=3)
                ends.append((x[-1], y[-1], name, colour))
            title = Case("", mode, causal).text
            axis.set_title(title, fontsize=10.5, loc="left")
            pending.append((axis, ends))
    for axis in axes.flat:
        axis.set_xlim(ticks[0] * 0.85, ticks[-1] * 1.1)
        axis.set_xticks(ticks, [thousands(t) for t in ticks])
        axis.minorticks_off()
        axis.yaxis.set_major_formatter(_duration)
    for axis in axes[1]:
        axis.set_xlabel("tokens")
    s = found["settings"]
    where = "one thread" if s["device"] == "cpu" else "GPU"
    page.suptitle(
        f"Time of one attention call: B=1, H={s['heads']}, D={s['head_dim']}, "
        f"M={s['features']}, {s['dtype']}, {where}",
        fontsize=12,
        x=0.01,
        ha="left",
    )
    foot = machine_line(found["machine"])
    page.supxlabel(foot, fontsize=8, color=COLOURS["grey"], x=0.01, ha="left")
    # room for the names to the right of each panel
    page.get_layout_engine().set(wspace=0.22)
    page.get_layout_engine().set(rect=(0, 0, 0.92, 1))
    page.draw_without_rendering()
    page.set_layout_engine("none")
    for axis, ends in pending:
        label_ends(axis, ends)
    page.savefig(path)


def _duration(ms: float, _: int) -> str:
    if ms >= 1e3:
        return f"{ms / 1e3:g} s"
    return f"{ms:g} ms" if ms >= 0.1 else f"{ms * 1e3:g} µs"
