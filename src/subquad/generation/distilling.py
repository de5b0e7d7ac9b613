"""Sequence-level distillation: a teacher's outputs as targets for another model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from subquad.errors import OptionError
from subquad.generation.translator import Translator
from subquad.options import integer_problem

__all__ = ["Distilled", "distil"]


@dataclass(frozen=True)
class Distilled:
    """What `distil` has written.

    Args:
        path: of the file.
        lines: in it.
        resumed: of these, lines that were there before the call.
        notes: numbers of lines, from 1, with each kind of note, of this call's.
    """

    path: Path
    lines: int
    resumed: int
    notes: dict[str, list[int]] = field(default_factory=dict)


def distil(
    teacher: Any,
    tokenizer: Any,
    sources: Iterable[str],
    out_path: str | os.PathLike[str],
    *,
    save_every: int = 1000,
    progress: Callable[[int], None] | None = None,
    **options: Any,
) -> Distilled:
    """Writes ``source TAB teacher's output``, one line for each source, in their order.

    A student trained on ŷ = argmax p_teacher(y | x) has one target for each source where the
    references have many: what non-autoregressive models need, whose tokens cannot agree on one of
    several translations. Kim and Rush 2016, arXiv 1606.07947, section 3.2; for non-autoregressive
    models Gu et al. 2017, arXiv 1711.02281, section 4.1; why it helps: Zhou et al. 2020, arXiv
    1911.02727.

    A call that was stopped is repeated with the same arguments: it reads what is there, drops
    a line that was broken off, and goes on behind it. White space within texts becomes one space.

    Args:
        teacher, tokenizer: as of `Translator`.
        sources: texts, also from a file that is larger than memory.
        out_path: the file; `subquad.data` and ``subquad train translation`` read it.
        save_every: lines after which they are on the disk.
        progress: called with the number of lines written so far.
        options: of `Translator`; by default 5 beams.

    Raises:
        OptionError: for a wrong argument, or if the file holds other sources.
    """
    problems = list(integer_problem("save_every", save_every, 1))
    if isinstance(sources, str):
        problems.append("sources must be texts, given one string")
    if problems:
        raise OptionError("distil: " + "; ".join(problems))
    translator = Translator(teacher, tokenizer, **options)
    path = Path(out_path)
    texts = (" ".join(text.split()) for text in sources)
    before = lines = _resumed(path, texts)
    notes: dict[str, list[int]] = {}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        while block := list(islice(texts, save_every)):
            found = translator.translate(block)
            for source, hypothesis in zip(block, found, strict=True):
                file.write(f"{source}\t{' '.join(hypothesis.text.split())}\n")
            file.flush()
            os.fsync(file.fileno())
            for kind, numbers in translator.report(found).items():
                notes.setdefault(kind, []).extend(lines + number for number in numbers)
            lines += len(block)
            if progress is not None:
                progress(lines)
    return Distilled(path, lines, before, notes)


def _resumed(path: Path, texts: Iterator[str]) -> int:
    """Whole lines that are there; takes their sources from `texts` and cuts off half a line."""
    if not path.exists():
        return 0
    count = size = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            source = next(texts, None)
            if line.decode("utf-8").partition("\t")[0] != source:
                raise OptionError(
                    f"distil: line {count + 1} of {path} has another source than the one given, "
                    f"{source!r}: it is of another run; remove it or name another file"
                )
            count, size = count + 1, size + len(line)
    os.truncate(path, size)
    return count
