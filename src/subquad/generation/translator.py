"""`Translator`: texts in, hypotheses out.

This file uses transformers' classes: import it through `subquad.generation`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from subquad.attention.base import Mechanism
from subquad.data.copying import ExtendedTokenizer, extend_with_source
from subquad.errors import OptionError, UnsupportedError
from subquad.generation.alignment import Alignment, alignment_of, forced, words
from subquad.generation.batches import batches_by_tokens, padded
from subquad.generation.noise import WordDropout
from subquad.options import flag_problem, integer_problem, number_problem
from subquad.positions import Learned

__all__ = ["Hypothesis", "Sampling", "Translator"]

LOGITS_AT_ONCE = 2**26
"""Most logits of a scoring pass: 256 MB in float32."""


@dataclass(frozen=True)
class Sampling:
    """Tokens drawn, not searched: y_t ~ softmax(s/temperature), cut off and normalised again.

    Args:
        temperature: 1 is the model's own distribution.
        top_k: only the k likeliest tokens (Fan et al. 2018, arXiv 1805.04833); 0: all.
        top_p: only the likeliest tokens that together reach p (Holtzman et al. 2020, arXiv
            1904.09751).
        seed: of all draws; with the same texts and options the same output.

    Raises:
        OptionError: naming every wrong argument.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        problems = [
            *number_problem("temperature", self.temperature, 0.0, open_low=True),
            *integer_problem("top_k", self.top_k, 0),
            *number_problem("top_p", self.top_p, 0.0, 1.0, open_low=True),
            *integer_problem("seed", self.seed, 0),
        ]
        if problems:
            raise OptionError("Sampling: " + "; ".join(problems))


@dataclass(frozen=True)
class Hypothesis:
    """One output for one text.

    Args:
        text: the output.
        score: Σ log p(y_t) / |y|^length_penalty, ends of sequence included; of a
            non-autoregressive model the tokens' own probabilities when they were chosen.
        tokens: of the output, without special ones.
        alignment: if asked for.
        notes: what is to be known about it: source or output cut, no text, unknown tokens.
        others: the next best ones, best first.
    """

    text: str
    score: float
    tokens: tuple[str, ...] = ()
    alignment: Alignment | None = None
    notes: tuple[str, ...] = ()
    others: tuple[Hypothesis, ...] = field(default=(), repr=False)

    @property
    def n_best(self) -> tuple[Hypothesis, ...]:
        """This one and the others, best first."""
        return (self, *self.others)


class Translator:
    """Translates texts with any encoder–decoder: `subquad.models`' or transformers' own.

        ŷ = argmax_y  log p(y | x) / |y|^α,   α = length_penalty,   searched with `beams` beams

    Texts are sorted by length, put into batches of about `batch_tokens` tokens, and come back in
    their own order. Outputs do not depend on what a text shares its batch with: each has a
    longest output of its own, a + b·|x| tokens. (Draws of sampling do.) Non-autoregressive models
    take the same arguments: `beams` is then the number of lengths that are tried.

    Scores come from one more pass over the output, which gives the alignment, too. |y|^α is
    transformers' form; Wu et al. 2016, arXiv 1609.08144, equation 14, have ((5 + |y|)/6)^α.

    Nothing is dropped: empty texts give empty hypotheses, long ones are cut where the model has
    a longest sequence, and `notes` says so; `report` counts.

    Args:
        model: with `generate`.
        tokenizer: of the source, with a padding token.
        target_tokenizer: of the target, where it has tokens of its own.
        beams: how many; 1 is greedy search.
        length_penalty: α; 0 prefers short outputs, larger numbers long ones.
        n_best: hypotheses for each text, at most `beams` unless sampled.
        max_length: longest output in tokens: a number, or (a, b) for a + b·|x|.
        max_source_length: tokens behind which a text is cut; default: what the model can read.
        batch_tokens: most source tokens of a batch, padding included.
        sampling: draw in place of searching; `beams` has no meaning then.
        processors: more functions (ids, scores) → scores on each step's logits, such as
            `LogitsNoise`.
        source_noise: a `WordDropout` for the source.
        alignment: whether hypotheses have one.
        layer: of the alignment, see `align`.
        replace_unknown: an unknown token of the output becomes the source token that it looks
            at most (Jean et al. 2015, arXiv 1412.2007, section 5).
        options: more keyword arguments of the model's `generate`.

    Raises:
        OptionError: naming every wrong argument.

    Example:
        >>> import subquad as sq
        >>> from subquad.data.tokens import train_tokenizer
        >>> from subquad.generation import Translator
        >>> tokenizer = train_tokenizer(["red", "blue"], kind="word", min_frequency=1)
        >>> config = sq.models.Seq2SeqTransformerConfig(
        ...     vocab_size=len(tokenizer), d_model=32, encoder_layers=1, decoder_layers=1
        ... )
        >>> model = sq.models.Seq2SeqTransformer(config).eval()  # not trained
        >>> translator = Translator(model, tokenizer, beams=2, max_length=5)
        >>> found = translator.translate(["red blue", ""])
        >>> len(found), found[1].text, found[1].notes
        (2, '', ('empty text',))
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        target_tokenizer: Any = None,
        beams: int = 5,
        length_penalty: float = 1.0,
        n_best: int = 1,
        max_length: int | tuple[float, float] = (10, 1.5),
        max_source_length: int | None = None,
        batch_tokens: int = 4096,
        sampling: Sampling | None = None,
        processors: Sequence[Callable[[Tensor, Tensor], Tensor]] = (),
        source_noise: WordDropout | None = None,
        alignment: bool = False,
        layer: int | None = None,
        replace_unknown: bool = False,
        **options: Any,
    ) -> None:
        problems = [
            *integer_problem("beams", beams, 1),
            *number_problem("length_penalty", length_penalty, float("-inf")),
            *integer_problem("n_best", n_best, 1),
            *_length_problems(max_length),
            *integer_problem("batch_tokens", batch_tokens, 1),
            *flag_problem("alignment", alignment),
            *flag_problem("replace_unknown", replace_unknown),
        ]
        if max_source_length is not None:
            problems += integer_problem("max_source_length", max_source_length, 2)
        if not problems and sampling is None and n_best > beams:
            problems.append(f"n_best={n_best} needs as many beams, given beams={beams}")
        if not hasattr(model, "generate"):
            problems.append(f"model: {type(model).__name__} has no method generate")
        if getattr(tokenizer, "pad_token_id", None) is None:
            problems.append("tokenizer has no padding token")
        if problems:
            raise OptionError("Translator: " + "; ".join(problems))
        self.model, self.tokenizer = model, tokenizer
        self.target_tokenizer = tokenizer if target_tokenizer is None else target_tokenizer
        self.beams, self.length_penalty, self.n_best = beams, length_penalty, n_best
        self.max_length, self.batch_tokens = max_length, batch_tokens
        self.sampling, self.processors = sampling, tuple(processors)
        self.source_noise = source_noise
        self.alignment, self.layer = alignment, layer
        self.replace_unknown = replace_unknown
        self.options = options
        self.autoregressive = bool(getattr(model, "autoregressive", True))
        if not self.autoregressive and (sampling is not None or self.processors):
            raise UnsupportedError(
                type(model).__name__,
                "sampling and processors",
                "it writes all tokens at once; use beams, or an autoregressive model",
            )
        self.copies = getattr(model, "pointer", None) is not None
        if self.copies and (target_tokenizer is not None or model.embed_source is not None):
            raise UnsupportedError(
                type(model).__name__,
                "copying between two vocabularies",
                "a Translator has the source's tokens alone; call `generate` with source_ids",
            )
        self.limit = _longest(model)
        self.max_source_length = self.limit
        if max_source_length is not None:
            self.max_source_length = min(max_source_length, self.limit or max_source_length)

    # ---- texts -------------------------------------------------------------------------------

    def translate(
        self,
        texts: Sequence[str],
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Hypothesis]:
        """A hypothesis for each text, in their order.

        Args:
            texts: one source each.
            progress: called with the numbers of texts done and of all, after each batch.

        Raises:
            OptionError: if `texts` is one string.
        """
        if isinstance(texts, str):
            raise OptionError("translate takes a list of texts, given one string")
        found: dict[int, Hypothesis] = {}
        rows: dict[int, list[int]] = {}
        notes: dict[int, tuple[str, ...]] = {}
        own: dict[int, tuple[str, ...]] = {}
        for number, text in enumerate(texts):
            ids, own[number], notes[number] = self._read(text)
            if not words(ids, self.tokenizer):
                found[number] = Hypothesis("", 0.0, notes=("empty text",))
            rows[number] = self._noisy(ids, number)
        full = [number for number in rows if number not in found]
        for batch in batches_by_tokens([len(rows[number]) for number in full], self.batch_tokens):
            numbers = [full[at] for at in batch]
            inputs = padded(
                [rows[number] for number in numbers],
                self.tokenizer.pad_token_id,
                self.model.device,
            )
            outputs = self.decode(inputs, [own[number] for number in numbers])
            for number, hypothesis in zip(numbers, outputs, strict=True):
                found[number] = _noted(hypothesis, notes[number])
            if progress is not None:
                progress(len(found), len(rows))
        return [found[number] for number in range(len(rows))]

    def _read(self, text: str) -> tuple[list[int], tuple[str, ...], tuple[str, ...]]:
        """A text's tokens, words of its own that can be copied, and what is to be said."""
        notes = []
        own: tuple[str, ...] = ()
        if self.copies:
            pair = extend_with_source(text, self.tokenizer, vocab_size=self.model.config.vocab_size)
            ids, own = pair.input_ids, pair.words
        else:
            ids = list(map(int, self.tokenizer(text, verbose=False)["input_ids"]))
        longest = self.max_source_length
        if longest is not None and len(ids) > longest:
            notes.append(f"source cut: {len(ids)} tokens to {longest}")
            end = [ids[-1]] if ids[-1] in self.tokenizer.all_special_ids else []
            ids = [*ids[: longest - len(end)], *end]
        unknown = self.tokenizer.unk_token_id
        count = 0 if unknown is None else ids.count(unknown)
        if count:
            notes.append(f"unknown tokens in the source: {count}")
        return ids, own, tuple(notes)

    def _noisy(self, ids: list[int], number: int) -> list[int]:
        """The tokens of the text with this number, with noise where there is one."""
        if self.source_noise is None:
            return ids
        signs = set(self.tokenizer.all_special_ids) - {self.tokenizer.unk_token_id}
        return self.source_noise(ids, index=number, keep=signs)

    @staticmethod
    def report(hypotheses: Sequence[Hypothesis]) -> dict[str, list[int]]:
        """Numbers, from 1, of the texts with each kind of note: "source cut", "empty text", ….

        A note's kind is what stands before its colon.
        """
        kinds: dict[str, list[int]] = {}
        for number, hypothesis in enumerate(hypotheses, 1):
            for note in hypothesis.notes:
                kinds.setdefault(note.partition(":")[0], []).append(number)
        return kinds

    # ---- tensors -----------------------------------------------------------------------------

    @torch.no_grad()
    def decode(
        self, inputs: dict[str, Tensor], own: Sequence[tuple[str, ...]] | None = None
    ) -> list[Hypothesis]:
        """A hypothesis for each row of a batch that is ready: of tokens, or of sound.

        Args:
            inputs: what the model's encoder takes: ``input_ids`` (B, S) or ``input_features``
                (B, T, mels), and ``attention_mask``.
            own: words of each source that are copied, see `subquad.data.copying`.
        """
        main = inputs["input_ids"] if "input_ids" in inputs else inputs["input_features"]
        mask = inputs.get("attention_mask")
        sizes = main.new_full((len(main),), main.shape[1]) if mask is None else mask.sum(1)
        limits = [self._output_limit(int(size)) for size in sizes.tolist()]
        training = self.model.training
        self.model.eval()
        try:
            search = self._search if self.autoregressive else self._write
            outputs, scores = search(inputs, limits)
            count = self.n_best
            repeated = {name: given.repeat_interleave(count, 0) for name, given in inputs.items()}
            scores, weights = self._scored(repeated, outputs, limits, scores)
        finally:
            self.model.train(training)
        found = []
        for row in range(len(main)):
            each = [
                self._hypothesis(
                    outputs[at],
                    scores[at],
                    None if weights is None else weights[at],
                    _row(inputs, row),
                    limits[row],
                    () if own is None else own[row],
                )
                for at in range(row * count, (row + 1) * count)
            ]
            each.sort(key=lambda one: -one.score)
            found.append(replace(each[0], others=tuple(each[1:])))
        return found

    def _output_limit(self, source: int) -> int:
        if isinstance(self.max_length, int):
            limit = self.max_length
        else:
            limit = int(self.max_length[0] + self.max_length[1] * source)
        return limit if self.limit is None else min(limit, self.limit - 1)

    def _search(
        self, inputs: dict[str, Tensor], limits: list[int]
    ) -> tuple[list[list[int]], list[float] | None]:
        """Tokens behind the decoder's start, ends included, of n_best outputs for each row."""
        ends = _ends(self.model)
        stop = _Limit(limits, ends)
        given: dict[str, Any] = {
            "max_new_tokens": max(limits) + 1,
            "num_return_sequences": self.n_best,
            "logits_processor": [*self.processors, stop],
            "num_beams": 1 if self.sampling is not None else self.beams,
            "do_sample": self.sampling is not None,
        }
        if given["num_beams"] > 1:
            given["length_penalty"] = self.length_penalty
        devices = [] if self.model.device.type == "cpu" else [self.model.device]
        with torch.random.fork_rng(devices, enabled=self.sampling is not None):
            if self.sampling is not None:
                drawn = self.sampling
                torch.manual_seed(drawn.seed)
                given |= {
                    "temperature": float(drawn.temperature),
                    "top_k": drawn.top_k,
                    "top_p": float(drawn.top_p),
                }
            sequences = self.model.generate(**inputs, **{**given, **self.options})
        return [_until(row[1:], ends) for row in sequences.tolist()], None

    def _write(
        self, inputs: dict[str, Tensor], limits: list[int]
    ) -> tuple[list[list[int]], list[float] | None]:
        """The outputs of a non-autoregressive model, and its scores."""
        out = self.model.generate(
            **inputs,
            num_beams=self.beams,
            num_return_sequences=self.n_best,
            length_penalty=self.length_penalty,
            max_lengths=torch.tensor(limits, device=self.model.device),
            return_dict_in_generate=True,
            **self.options,
        )
        ends = _ends(self.model)
        return (
            [_until(row[1:], ends) for row in out.sequences.tolist()],
            out.sequences_scores.tolist(),
        )

    def _scored(
        self,
        inputs: dict[str, Tensor],
        outputs: list[list[int]],
        limits: list[int],
        scores: list[float] | None,
    ) -> tuple[list[float], list[Tensor] | None]:
        """Scores and weights of the outputs, from one pass over them."""
        looking = self.alignment or self.replace_unknown
        if scores is not None and not looking:
            return scores, None
        longest = max(map(len, outputs))
        vocabulary = int(self.model.get_output_embeddings().weight.shape[0])
        size = max(1, LOGITS_AT_ONCE // (longest * vocabulary))
        sums: list[float] = []
        weights: list[Tensor] = []
        for start in range(0, len(outputs), size):
            part = slice(start, start + size)
            labels = padded(outputs[part], -100, self.model.device)["input_ids"]
            logs, seen = forced(
                self.model,
                {name: given[part] for name, given in inputs.items()},
                labels,
                layer=self.layer,
                want_weights=looking,
            )
            for at in range(len(labels)):
                length = len(outputs[start + at])
                limit = limits[(start + at) // self.n_best]
                forced_end = length > limit  # its end was not the model's choice
                total = float(logs[at, : length - 1 if forced_end else length].sum())
                sums.append(total / length**self.length_penalty)
            weights += [] if seen is None else list(seen)
        return scores or sums, weights or None

    def _hypothesis(
        self,
        output: list[int],
        score: float,
        weights: Tensor | None,
        source: list[int] | None,
        limit: int,
        own: tuple[str, ...] = (),
    ) -> Hypothesis:
        reader, tokenizer = self.tokenizer, self.target_tokenizer
        if own:
            size = self.model.config.vocab_size
            reader = tokenizer = ExtendedTokenizer(tokenizer, own, vocab_size=size)
        ids = [output[place] for place in words(output, tokenizer)]
        tokens: list[str] = tokenizer.convert_ids_to_tokens(ids)
        text = tokenizer.decode(ids, skip_special_tokens=False)
        notes: tuple[str, ...] = ()
        if len(output) > limit or output[-1] not in _ends(self.model):
            notes = (f"output cut at max_length: {min(limit, len(output))} tokens",)
        found = None
        if weights is not None:
            if source is None:
                raise UnsupportedError(
                    type(self.model).__name__, "alignment", "its source has no tokens"
                )
            found = alignment_of(weights, source, output, reader, tokenizer)
            if self.replace_unknown and tokenizer.unk_token_id in ids:
                text = self._replaced(ids, found, source, reader, tokenizer)
        return Hypothesis(text, score, tuple(tokens), found if self.alignment else None, notes)

    @staticmethod
    def _replaced(
        ids: list[int], alignment: Alignment, source: list[int], reader: Any, writer: Any
    ) -> str:
        """The text with source tokens in the place of unknown ones."""
        places = words(source, reader)
        looked = {target: at for at, target in alignment.pairs()}
        pieces: list[str] = []
        run: list[int] = []
        for number, token in enumerate(ids):
            if token != writer.unk_token_id:
                run.append(token)
                continue
            if run:
                pieces.append(writer.decode(run).strip())
            pieces.append(reader.decode([source[places[looked[number]]]]).strip())
            run = []
        if run:
            pieces.append(writer.decode(run).strip())
        return " ".join(piece for piece in pieces if piece)


class _Limit:
    """Lets each text end at its own length: then its end alone is left, at no cost."""

    def __init__(self, limits: list[int], ends: list[int]) -> None:
        self.limits, self.ends = limits, ends
        self.begin: int | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.begin is None:
            self.begin = input_ids.shape[1]
        made = input_ids.shape[1] - self.begin
        if made < min(self.limits):
            return scores
        each = len(scores) // len(self.limits)
        limits = torch.tensor(self.limits, device=scores.device).repeat_interleave(each)
        over = (limits <= made)[:, None]
        only = torch.full_like(scores[:1], float("-inf"))
        only[:, self.ends[0]] = 0.0
        return torch.where(over, only, scores)


def _length_problems(given: Any) -> list[str]:
    if isinstance(given, tuple | list) and len(given) == 2:
        a, b = given
        problems = [
            *number_problem("max_length[0]", a, 0.0),
            *number_problem("max_length[1]", b, 0.0),
        ]
        if not problems and a < 1 and b == 0:
            problems.append(f"max_length={given} leaves no token")
        return problems
    return list(integer_problem("max_length", given, 1))


def _longest(model: Any) -> int | None:
    """Tokens of the longest sequence that a model can read or write; None: any length."""
    from subquad.models.configuration import TransformerConfig

    if isinstance(model.config, TransformerConfig) and not any(
        (isinstance(part, Mechanism) and part.capabilities.max_length) or isinstance(part, Learned)
        for part in model.modules()
    ):
        return None
    longest = getattr(model.config, "max_position_embeddings", None)
    return None if longest is None else int(longest)


def _ends(model: Any) -> list[int]:
    ends = model.generation_config.eos_token_id
    if ends is None:
        ends = model.config.eos_token_id
    if ends is None:
        raise OptionError(f"{type(model).__name__}: its config names no eos_token_id")
    return [ends] if isinstance(ends, int) else list(ends)


def _until(ids: list[int], ends: list[int]) -> list[int]:
    """Tokens up to their first end, which belongs to them."""
    for place, token in enumerate(ids):
        if token in ends:
            return ids[: place + 1]
    return ids


def _row(inputs: dict[str, Tensor], row: int) -> list[int] | None:
    """The source tokens of a row of a batch."""
    if "input_ids" not in inputs:
        return None
    ids, mask = inputs["input_ids"][row], inputs.get("attention_mask")
    return (ids if mask is None else ids[mask[row] != 0]).tolist()


def _noted(hypothesis: Hypothesis, notes: tuple[str, ...]) -> Hypothesis:
    if not notes:
        return hypothesis
    others = tuple(_noted(other, notes) for other in hypothesis.others)
    return replace(hypothesis, notes=(*notes, *hypothesis.notes), others=others)
