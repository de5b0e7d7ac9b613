"""Texts with labels, words with tags, questions with answers; and tokens behind masks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from subquad.data.batches import pad_rows
from subquad.data.pairs import BadRecord, Records, json_object, json_text
from subquad.errors import OptionError
from subquad.options import integer_problem, number_problem

__all__ = ["Labelled", "MaskTokens", "Question", "Questions", "Tagged"]

JSON_LINES = (".jsonl", ".ndjson")


class Labelled(Records[tuple[str, str]]):
    r"""(text, label) of each line: ``text<TAB>label``, or a JSON object in a ``.jsonl`` file.

    Args:
        path: a file; costs and errors are those of `Records`.
        text, label: keys of the JSON objects; labels may be whole numbers there.
        on_bad: "skip" or "raise", see `Records`.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "a.tsv")
        ...     _ = path.write_text("I like it\tgood\nno label\nnot me\tbad\n", encoding="utf-8")
        ...     rows = Labelled.open(path)
        ...     rows[:]
        [('I like it', 'good'), ('not me', 'bad')]
        >>> print(rows.problems)
        1 left out: 1 columns, expected 2 (line 2)
    """

    def __init__(self, path: str | os.PathLike[str], *, text: str, label: str, on_bad: str) -> None:
        self._keys = (text, label)
        self._json = Path(path).suffix.lower() in JSON_LINES
        super().__init__(path, on_bad=on_bad)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        text: str = "text",
        label: str = "label",
        on_bad: str = "skip",
    ) -> Labelled:
        """The file's records; for the arguments see the class, for errors `Records`."""
        return cls(path, text=text, label=label, on_bad=on_bad)

    def options(self) -> Mapping[str, Any]:
        return {"keys": self._keys} if self._json else {}

    def parse(self, *texts: str) -> tuple[str, str]:
        if self._json:
            row, (text_key, label_key) = json_object(texts[0]), self._keys
            label = row.get(label_key)
            if type(label) is not int:
                label = json_text(row, label_key)
            cells = [json_text(row, text_key), str(label)]
        else:
            cells = texts[0].split("\t")
        if len(cells) != 2:
            raise BadRecord(f"{len(cells)} columns, expected 2")
        text, label = cells[0], cells[1].strip()
        if not text.strip():
            raise BadRecord("empty text")
        if not label:
            raise BadRecord("empty label")
        return text, label


class Tagged(Records[tuple[list[str], list[str]]]):
    r"""(words, tags) of each sentence of a CoNLL file: a line for each word, empty ones between.

    Columns stand apart by tabs, or by spaces in lines without a tab. Lines that begin with
    ``-DOCSTART-`` separate documents and are no sentences; those that begin with # and have no
    tab, among lines with tabs, are comments, as in CoNLL-U.

    Args:
        path: a file; costs and errors are those of `Records`. What is wrong in a sentence is told
            with the line at which it starts.
        word, tag: numbers of columns, 1 is the first, −1 the last. CoNLL-U has its words in 2,
            their parts of speech in 4.
        on_bad: "skip" or "raise", see `Records`.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "a.conll")
        ...     _ = path.write_text("Ada B-PER\ncounts O\n\nRome B-LOC\n", encoding="utf-8")
        ...     Tagged.open(path)[:]
        [(['Ada', 'counts'], ['B-PER', 'O']), (['Rome'], ['B-LOC'])]
    """

    blocks = True

    def __init__(self, path: str | os.PathLike[str], *, word: int, tag: int, on_bad: str) -> None:
        problems = [
            f"{name}={column!r} must be a column: 1 is the first, -1 the last"
            for name, column in (("word", word), ("tag", tag))
            if type(column) is not int or not column
        ]
        if problems:
            raise OptionError("; ".join(problems))
        self._columns = (word, tag)
        super().__init__(path, on_bad=on_bad)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        word: int = 1,
        tag: int = -1,
        on_bad: str = "skip",
    ) -> Tagged:
        """The file's sentences; for the arguments see the class, for errors `Records`."""
        return cls(path, word=word, tag=tag, on_bad=on_bad)

    def options(self) -> Mapping[str, Any]:
        return {"columns": self._columns}

    def parse(self, *texts: str) -> tuple[list[str], list[str]]:
        lines = texts[0].split("\n")
        if "\t" in texts[0]:
            lines = [line for line in lines if "\t" in line or not line.startswith("#")]
        rows = [line.split("\t") if "\t" in line else line.split() for line in lines]
        least = max(abs(column) for column in self._columns)
        if min(map(len, rows)) < least:
            raise BadRecord(f"a line with fewer than {least} columns")
        if len({len(row) for row in rows}) > 1:
            raise BadRecord("lines with different numbers of columns")
        words, tags = (
            [row[column - (column > 0)].strip() for row in rows] for column in self._columns
        )
        if not all(words) or not all(tags):
            raise BadRecord("an empty word or tag")
        return words, tags

    def _blocks(self, rows: Iterator[Any]) -> Iterator[Any]:
        for block in super()._blocks(rows):
            if not (block[2][0] or b"").startswith(b"-DOCSTART-"):
                yield block


@dataclass(frozen=True)
class Question:
    """A question about a text.

    Args:
        question: what is asked.
        context: the text.
        answers: right answers, each of which stands in the text; the first one at `start`.
        start: in characters.
    """

    question: str
    context: str
    answers: tuple[str, ...]
    start: int


class Questions(Records[Question]):
    r"""`Question`s, one JSON object a line.

    An object has ``context``, ``question``, ``answer`` and ``start``, the character of the context
    at which the answer begins; or, as SQuAD's rows have it, ``answers`` with the lists ``text``
    and ``answer_start``. An answer that does not stand there, and a question without one, are
    problems.

    Args:
        path: a file; costs and errors are those of `Records`.
        on_bad: "skip" or "raise", see `Records`.

    Example:
        >>> import tempfile
        >>> line = '{"context": "Ada counts.", "question": "Who?", "answer": "Ada", "start": 0}'
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "a.jsonl")
        ...     _ = path.write_text(line, encoding="utf-8")
        ...     Questions.open(path)[0]
        Question(question='Who?', context='Ada counts.', answers=('Ada',), start=0)
    """

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, on_bad: str = "skip") -> Questions:
        """The file's questions; for errors see `Records`."""
        return cls(path, on_bad=on_bad)

    def parse(self, *texts: str) -> Question:
        row = json_object(texts[0])
        context, question = json_text(row, "context"), json_text(row, "question")
        if not question.strip():
            raise BadRecord("empty question")
        if "answers" in row:
            found = row["answers"] if isinstance(row["answers"], dict) else {}
            answers, starts = found.get("text"), found.get("answer_start")
        else:
            answers, starts = [row.get("answer")], [row.get("start")]
        if not (isinstance(answers, list) and isinstance(starts, list)) or (
            len(answers) != len(starts)
        ):
            raise BadRecord("'answers' has no lists text and answer_start of one length")
        if not answers:
            raise BadRecord("no answer")
        for answer, start in zip(answers, starts, strict=True):
            if not isinstance(answer, str) or type(start) is not int or not answer.strip():
                raise BadRecord("an answer is no text with a start")
            if start < 0 or context[start : start + len(answer)] != answer:
                raise BadRecord("an answer is not where its start says")
        return Question(question, context, tuple(answers), starts[0])


class MaskTokens:
    """Rows of tokens → a batch for a masked language model.

    Each token but special ones is asked for with probability `share`; of those 80% become the
    mask, 10% another token, any of the vocabulary, and 10% stay as they are. Labels are the
    tokens asked for, −100 elsewhere. Every call draws anew, from an own generator that begins with
    `seed` (masks that change by epoch: Liu et al. 2019, arXiv 1907.11692, section 4.1). A batch
    in which chance asks for none has one token asked for, so that it has a loss. O(tokens).

    Papers: Devlin et al. 2019, arXiv 1810.04805, section 3.1 (deviation: special tokens are
    never put in a token's place).

    Args:
        tokenizer: a transformers tokenizer with a mask token.
        share: 0 < share ≤ 1.
        seed: of all draws.

    Attributes:
        generator: that draws; save its state to go on as if there had been no stop.

    Raises:
        OptionError: a share out of range, a tokenizer without a mask.

    Example:
        >>> from subquad.data.tokens import train_tokenizer
        >>> tokenizer = train_tokenizer(["a b c d e f g h"] * 5, kind="word", vocab_size=20)
        >>> batch = MaskTokens(tokenizer, seed=1)(tokenizer(["a b c d e f", "g h"])["input_ids"])
        >>> sorted(batch)
        ['attention_mask', 'input_ids', 'labels']
        >>> asked = batch["labels"] != -100
        >>> bool((batch["labels"][asked] >= 5).all())
        True
    """

    MASKED, CHANGED = 0.8, 0.1

    def __init__(self, tokenizer: Any, *, share: float = 0.15, seed: int = 0) -> None:
        problems = [
            *number_problem("share", share, 0.0, 1.0, open_low=True),
            *integer_problem("seed", seed, 0),
        ]
        if tokenizer.mask_token_id is None:
            problems.append("tokenizer has no mask token")
        if problems:
            raise OptionError("MaskTokens: " + "; ".join(problems))
        self.share = share
        self.mask, self.pad = tokenizer.mask_token_id, tokenizer.pad_token_id or 0
        self.special = torch.tensor(sorted(tokenizer.all_special_ids))
        every = torch.arange(len(tokenizer))
        self.ordinary = every[~torch.isin(every, self.special)]
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, rows: Sequence[Sequence[int] | Tensor]) -> dict[str, Tensor]:
        """``input_ids``, ``attention_mask`` and ``labels``, (B, L) each."""
        batch = pad_rows([{"input_ids": row} for row in rows], pad=self.pad)
        batch["input_ids"], batch["labels"] = self.masked(batch["input_ids"])
        return batch

    def masked(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(what the model reads, labels) of tokens (B, L)."""
        free = ~torch.isin(ids, self.special)
        asked = (self._draw(ids.shape) < self.share) & free
        if not asked.any() and free.any():
            places = free.flatten().nonzero()[:, 0]
            chosen = torch.randint(len(places), (1,), generator=self.generator)
            asked.view(-1)[places[chosen]] = True
        fate = self._draw(ids.shape)
        index = torch.randint(len(self.ordinary), ids.shape, generator=self.generator)
        changed = ids.where(fate >= self.MASKED + self.CHANGED, self.ordinary[index])
        read = changed.where(fate >= self.MASKED, torch.full_like(ids, self.mask))
        return read.where(asked, ids), ids.where(asked, torch.full_like(ids, -100))

    def _draw(self, shape: torch.Size) -> Tensor:
        return torch.rand(shape, generator=self.generator)
