"""Writes the pages that follow from the registry and from benchmarks/results.

`main` is called by conf.py before every build; nothing that it writes is committed.
"""

import csv
import shutil
from pathlib import Path

import subquad as sq
from subquad.options import format_value
from subquad.registry import MECHANISMS, get

KINDS = {
    "causal": "decode",
    "cross": "cross",
    "state": "state",
    "key": "padding",
    "gqa": "GQA",
    "partial": "merges",
    "prefix": "prefix",
    "segments": "segments",
    "window": "window",
}


def main(docs):
    write_all({docs / "mechanisms" / name: text for name, text in mechanism_pages(docs).items()})
    write_all({docs / "_generated" / "results.md": results(docs)})
    write_all({docs / "_generated" / "coverage.md": coverage()})


def write_all(pages):
    """Writes what changed: an untouched page is not built again."""
    for path, text in pages.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def cell(text):
    """Text that may stand in a table's cell."""
    return str(text).replace("|", "\\|").replace("\n", " ")


def size(count):
    """Bytes for people."""
    units = ["B", "KiB", "MiB", "GiB"]
    while count >= 1024 and len(units) > 1:
        count, units = count / 1024, units[1:]
    return f"{count:.3g}\N{NO-BREAK SPACE}{units[0]}"


def code(text):
    return f"`{cell(text)}`" if str(text) else ""


# ---- one page a mechanism ----------------------------------------------------------------


def mechanism_pages(docs):
    pages = {"index.md": overview()}
    for name in MECHANISMS:
        pages[f"{name}.md"] = page(docs, name)
    return pages


def overview():
    names = sq.mechanisms()
    head = ["mechanism", "family", "cost", "memory", *KINDS.values(), "approximates"]
    lines = [
        "# Mechanisms",
        "",
        "Every mechanism of the registry, with its default options. A dash stands for what a "
        "mechanism refuses; its page says why. `sq.mechanisms(...)` filters by the same columns.",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
    ]
    for name in names:
        info = sq.describe(name)
        have = info.capabilities
        row = [
            f"[{name}]({name}.md)",
            info.family,
            cell(info.cost.formula),
            size(info.memory(65536)),
        ]
        for kind in KINDS:
            value = getattr(have, kind)
            row.append(("yes" if value is True else str(value)) if value else "–")
        row.append(have.approximates or "–")
        lines.append("| " + " | ".join(row) + " |")
    lines += [
        "",
        "What the columns mean: *cost* is the order of one forward call for one head; *memory* "
        "is what the call takes beyond inputs and output at 65,536 tokens, for one head with "
        "D = V = 64 in float32, by the mechanism's own count (measured: "
        "{doc}`../results`); *decode*, the future can be masked out, as a language model or a "
        "decoder needs it (`causal=True`); *padding* is a key mask; *cross*, queries and keys of "
        "different lengths; *merges*, partial sums over disjoint keys add (`sq.merge`); *state*, "
        "memory of `prefill` and `step`. Several options change a row: "
        '`sq.describe("performer(gauge=centre)")`.',
        "",
        "```{toctree}",
        ":hidden:",
        "",
        *names,
        "```",
        "",
    ]
    return "\n".join(lines)


def page(docs, name):
    info, found = sq.describe(name), get(name)
    about = info.info
    lines = [f"# {name}", "", f"{about.summary[0].upper()}{about.summary[1:]}.", ""]
    lines += ["```text", about.formula, "```", ""]
    facts = {
        "Family": info.family,
        "Cost": f"{about.cost.formula}; at 4,096 tokens, "
        + ("D = V = 64, one head: " if info.capabilities.qkv else "C = 64: ")
        + f"{info.flops(4096) / 1e9:.3g} GFLOP, and {size(info.memory(4096))} beyond inputs and "
        "output",
        "When to use it": about.use,
        "Exact": about.limit,
        "Paper": about.paper,
        "Departs from it": about.deviations,
    }
    for term, text in facts.items():
        if text:
            lines += [f"**{term}.** {cell(text)}", ""]
    if (docs / "_static" / "generated" / f"weights-{name}.png").exists():
        by_channel = "The mean over channels of each channel's weights (`mech.channel_weights`)"
        drawn = (
            "The attention matrix that the mechanism implies (`mech.weights`) on one sample "
            "sequence, untrained, beside softmax on the same queries and keys; below, causal."
            if sq.describe(about.sample or name).capabilities.weights
            else f"{by_channel} on one sample sequence, untrained, beside softmax; below, causal."
            if info.capabilities.qkv
            else "How much each token of the output moves with each token of one sample sequence "
            "(`mixer.influence`), untrained, beside softmax's weights; where there are two "
            "rows, causal below."
        )
        lines += [
            f"```{{figure}} ../_static/generated/weights-{name}.png",
            f":alt: Who reads whom in {name}, beside softmax",
            "",
            f"{drawn} Grey cells are not read at all. Drawn by `subquad picture "
            f'"{about.sample or name}"`.',
            "```",
            "",
        ]
    lines += ["## Options", ""]
    if info.options():
        lines += ["| option | default | meaning |", "|---|---|---|"]
        lines += [
            f"| {code(option)} | {code(format_value(default))} | {cell(meaning)} |"
            for option, default, meaning in info.options()
        ]
    else:
        lines.append("None.")
    lines += ["", "## Capabilities", "", "With default options.", ""]
    lines += ["| capability | value | why not |", "|---|---|---|"]
    lines += [
        f"| {code(row)} | {cell(value)} | {cell(reason)} |"
        for row, value, reason in info.capabilities.rows()
    ]
    module = found.__module__
    lines += [
        "",
        "## Reference",
        "",
        "```{eval-rst}",
        f".. automodule:: {module}",
        "   :no-members:",
        "",
        f".. autoclass:: {module}.{found.__name__}",
        "   :exclude-members: Config, info, name, family, capabilities_for",
        "",
        f".. autoclass:: {module}.{found.Config.__name__}",
        "   :exclude-members: mechanism, " + ", ".join(found.Config.option_names()),
        "```",
        "",
    ]
    return "\n".join(lines)


# ---- models that can be converted --------------------------------------------------------


def coverage():
    """The table of architectures that the installed transformers has."""
    import transformers

    from subquad.convert.coverage import coverage as architectures

    found = architectures()
    ways = [one.reached for one in found]
    lines = [
        f"transformers {transformers.__version__}: {len(found)} architectures with attention, "
        + ", ".join(f"{ways.count(way)} {way}" for way in dict.fromkeys(ways))
        + ".",
        "",
        "| model | reached | what it has | attention classes | not reached |",
        "|" + "---|" * 5,
    ]
    for one in found:
        classes = ", ".join(map(code, one.classes))
        missed = "; ".join(filter(None, (", ".join(map(code, one.missed)), cell(one.reason))))
        cells = [one.name, one.reached, ", ".join(one.features), classes, missed]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


# ---- benchmarks --------------------------------------------------------------------------


def results(docs):
    """Reports and pictures below benchmarks/results, one section a folder (a machine)."""
    root = docs.parent / "benchmarks" / "results"
    folders = sorted(path for path in root.glob("*") if path.is_dir()) if root.exists() else []
    lines = []
    for folder in folders:
        found = list(section(docs, folder))
        if found:
            lines += [f"## `{folder.name}`", "", *found]
    if not lines:
        lines = ["No results were present when these pages were built.", ""]
    return "\n".join(lines)


def section(docs, folder):
    """Every report, one level of headings down, with the picture of its name below its title."""
    place = f"_static/generated/results/{folder.name}"
    out = docs / place
    left = {picture.stem: picture for picture in pictures(folder)}
    for picture in left.values():
        out.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(picture, out / picture.name)
    reports = [path for path in sorted(folder.glob("*.md")) if path.name != "README.md"]
    for report in reports:
        own, dark = left.pop(report.stem, None), left.pop(f"{report.stem}-dark", None)
        for line in report.read_text(encoding="utf-8").splitlines():
            for picture in pictures(folder):
                line = line.replace(f"]({picture.name})", f"]({place}/{picture.name})")
            yield "##" + line if line.startswith("#") else line
            if line.startswith("# ") and own is not None:
                yield from image(f"{place}/{own.name}", line[2:], dark and f"{place}/{dark.name}")
                own = None
        yield ""
    for picture in left.values():
        yield from (f"![{picture.stem.replace('_', ' ')}]({place}/{picture.name})", "")
    if not reports:
        for table in sorted(folder.glob("*.csv")):
            yield from csv_table(table)


def image(path, alt, dark=None):
    """A picture; where it was drawn for dark screens too, the page's theme chooses."""
    if dark is None:
        yield from ("", f"![{alt}]({path})", "")
        return
    for one, kind in ((path, "only-light"), (dark, "only-dark")):
        yield from ("", f"```{{image}} {one}", f":alt: {alt}", f":class: {kind}", "```", "")


def pictures(folder):
    return sorted(path for path in folder.iterdir() if path.suffix in (".png", ".svg"))


def csv_table(path, rows=60):
    with path.open(encoding="utf-8", newline="") as file:
        table = list(csv.reader(file))
    if not table:
        return
    yield f"`{path.name}`"
    yield ""
    yield "| " + " | ".join(map(cell, table[0])) + " |"
    yield "|" + "---|" * len(table[0])
    for row in table[1 : rows + 1]:
        yield "| " + " | ".join(map(cell, row)) + " |"
    yield ""
    if len(table) > rows + 1:
        yield f"{len(table) - 1 - rows} more rows are in the file."
        yield ""


if __name__ == "__main__":
    main(Path(__file__).resolve().parent)
