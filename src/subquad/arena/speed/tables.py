"""The result as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from subquad.arena.machine import machine_line
from subquad.arena.speed.cases import KINDS, Case
from subquad.arena.speed.checks import BOUND
from subquad.arena.speed.contenders import SDPA
from subquad.arena.speed.floors import CHUNK, MEASURES
from subquad.arena.speed.peers import PERFORMER

__all__ = ["table"]

INTRODUCTIONS = {
    "floors": (
        "Floors",
        "What the project promises. Each comparison interleaved in a process of its own.",
    ),
    "reach": (
        "Reach",
        "What the project reaches for, `performer` with M={features} where nothing else is said. "
        "Shares of the GEMM peak count 8·D·M FLOPs per token and head in a forward call, under "
        f"a causal mask 2·C·(M+V) more for the products within chunks of C={CHUNK} tokens "
        "(the detail tells the share without them), and three times that in a training step; a "
        "1024³ product runs right before each call. A crossover is bracketed and halved until "
        "its ends are within 4%. The decode step is `mechanism.step` with one token; its rival is "
        "SDPA over a cache that is written in place. Threads are compared by the least wall-clock "
        "times: what else the machine does adds to them. A target that is missed is measured twice "
        "more at the end; the middle one counts, and all three are told.",
    ),
    "mechanisms": ("Every mechanism", ""),
}


def table(result: Mapping[str, Any]) -> str:
    """The parts that `result` has, each with the machine and the setting it was measured in."""
    lines = ["# Speed and memory of attention", ""]
    for part, (title, text) in INTRODUCTIONS.items():
        if part not in result:
            continue
        found = result[part]
        lines += [f"## {title}", "", *_setting(found)]
        if text:
            lines += [text.format(**found["settings"]), ""]
        lines += _mechanisms(found) if part == "mechanisms" else _promises(found["rows"])
        lines += _checks(found["checks"])
        if part == "mechanisms":
            lines += ["### Left out", "", *[f"- {line}" for line in found["left_out"]], ""]
        lines += [
            f"This part took {found['seconds']:.0f} s, {found['cpu_seconds']:.0f} s of CPU time.",
            "",
        ]
    return "\n".join(lines)


def _setting(found: Mapping[str, Any]) -> list[str]:
    s = found["settings"]
    clock = "CUDA events" if s["device"] == "cuda" else "CPU time"
    quick = " (quick run: few rounds)" if found.get("quick") else ""
    return [
        f"{machine_line(found['machine'])}. B=1, H={s['heads']}, D={s['head_dim']}, "
        f"M={s['features']}, {s['dtype']}; {clock}, medians of interleaved calls, ratios round by "
        f"round; GEMM peak {found['gemm_gflops']:.0f} GFLOP/s, copy {found['copy_gbs']:.1f} GB/s"
        f"{quick}.",
        "",
        *[f"Backend of the {engine} engine: {choice}.  " for engine, choice in
          found["backends"].items()],
        "",
    ]  # fmt: skip


def cell(value: float | None, form: str = "{:.1f}×") -> str:
    """A number, or a dash."""
    return "–" if value is None else form.format(value)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def _promises(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    lines = ["| | measured | ok | backend | detail |", "|---|---:|---|---|---|"]
    for row in rows:
        form = MEASURES[row["measure"]].cell
        ok = {True: "yes", False: "**no**", None: "not measured"}[row["ok"]]
        shown = _escaped(cell(row["measured"], form))
        lines.append(
            f"| {_escaped(row['floor'])} | {shown} | {ok} | {row['backend']} "
            f"| {_escaped(row['detail'])} |"
        )
    return [*lines, ""]


def _text(row: Mapping[str, Any]) -> str:
    return Case(row["name"], row["mode"], row["causal"]).text


def _checks(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    lines = [
        "### Correctness, checked before timing",
        "",
        "| | | against | tokens | output error | gradient error | bound | ok |",
        "|---|---|---|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        ok = "yes" if row["ok"] else f"**failed correctness** {row['problem']}".strip()
        threads = f"{row['threads']} threads" if row["threads"] > 1 else ""
        setting = [_text(row), row["dtype"], row["backend"], threads]
        lines.append(
            f"| {row['name']} | {', '.join(filter(None, setting))} | {row['against']} "
            f"| {row['length']} | {cell(row['forward'], '{:.1e}')} "
            f"| {cell(row['gradient'] or None, '{:.1e}')} | {row['bound']:.1g} | {ok} |"
        )
    return [
        *lines,
        "",
        f"Errors are relative; the bound of float32, {BOUND:g}, is derived in "
        "`subquad.arena.speed`. A decode step is checked behind a prefill, without gradients.",
        "",
    ]


def _mechanisms(found: Mapping[str, Any]) -> list[str]:
    lines = []
    for mode, causal in KINDS:
        rows = [r for r in found["times"] if (r["mode"], r["causal"]) == (mode, causal)]
        if not rows:
            continue
        lines += [
            f"### {_text(rows[0]).capitalize()}",
            "",
            f"| tokens | | ms | faster than {SDPA} | faster than {PERFORMER} | of GEMM peak "
            "| of copy bandwidth |",
            "|---:|---|---:|---:|---:|---:|---:|",
        ]
        for row in rows:
            ms = row["ms"]
            lines.append(
                f"| {row['length']} | {row['name']} | {f'{ms:.1f}' if ms >= 1 else f'{ms:.3f}'} "
                f"| {cell(row['times_faster_than_sdpa'], '{:.2f}×')} "
                f"| {cell(row['times_faster_than_peer'], '{:.2f}×')} "
                f"| {cell(row.get('gemm_share'), '{:.0%}')} "
                f"| {cell(row.get('copy_share'), '{:.1%}')} |"
            )
        lines.append("")
    lines += [f"### Faster than {SDPA} from", "", "| | | tokens |", "|---|---|---:|"]
    for row in found["crossover"]:
        at = row["note"] if row["length"] is None else f"{row['length']:.0f} {row['note']}".strip()
        lines.append(f"| {row['name']} | {_text(row)} | {at} |")
    lines += [
        "",
        "### Memory of a training step beyond q, k, v and the output's gradient",
        "",
        "Output and three gradients alone are 4 × \\|q\\|.",
        "",
        "| | mask | tokens | × \\|q\\| |",
        "|---|---|---:|---:|",
    ]
    for row in found["memory"]:
        mask = _text(row).removesuffix(row["mode"]).strip()
        lines.append(f"| {row['name']} | {mask} | {row['length']} | {row['units']:.2f} |")
    return [*lines, ""]
