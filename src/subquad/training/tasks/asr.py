"""Speech recognition: WAV files and transcripts, a model with a front end, error rates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from subquad.data.audio import LogMel, Speech
from subquad.data.batches import TokenBatches, pad_batch
from subquad.data.edits import error_rate
from subquad.data.pairs import Problems
from subquad.errors import OptionError
from subquad.training.objectives.guided import diagonality
from subquad.training.recipe import Recipe
from subquad.training.tasks.base import Batch, Prepared, Say, Task
from subquad.training.tasks.heads import corpora
from subquad.training.tasks.parts import build_model, notes_of, tokenizer_of
from subquad.training.tasks.translation import decoding_options

__all__ = ["TASK"]


def prepare(recipe: Recipe, folder: Path, say: Say) -> Prepared:
    """Reads the manifests, trains a tokenizer on the transcripts, and builds the model."""
    from subquad.models import Seq2SeqTransformer

    train, valid, notes = corpora(recipe, lambda path: Speech(path, on_bad=recipe.data.on_bad))
    tokenizer = tokenizer_of(recipe, folder, lambda: (text for _, text in train), say)
    model = build_model(TASK, Seq2SeqTransformer, recipe, tokenizer)
    clips = Clips(train, model, tokenizer, recipe, drop=True)
    tests = Clips(valid, model, tokenizer, recipe, drop=False)
    notes += notes_of("training clips", clips.problems)
    minutes = sum(clips.seconds) / 60
    say(
        f"{len(clips)} training clips of {minutes:.1f} minutes, {len(tests)} validation clips, "
        f"{len(tokenizer)} tokens"
    )
    return Prepared(
        model=model,
        tokenizer=tokenizer,
        lengths=clips.lengths,
        batch=clips.batch,
        objective=TASK.build_objective(recipe),
        evaluate=Validation(recipe, tokenizer, tests),
        fingerprint={"train": train.fingerprint, "valid": valid.fingerprint},
        notes=notes,
    )


class Clips:
    """Clips as features, read from their files batch by batch, with their transcripts' tokens.

    Args:
        records: a `Speech`, or a part of one.
        model: whose front end says what features are.
        tokenizer: of the transcripts.
        recipe: its section `data`: `max_length` counts what the encoder sees of a clip,
            behind the front end; `max_target` tokens.
        drop: leave out what is longer, and count it in `problems`; False: keep it whole.

    Raises:
        OptionError: nothing is left, or something is too long and ``on_long`` is "raise".
    """

    def __init__(
        self, records: Any, model: Any, tokenizer: Any, recipe: Recipe, *, drop: bool
    ) -> None:
        self.log_mel: LogMel = model.front_end.log_mel
        self.tokenizer = tokenizer
        self.problems = Problems()
        self.paths: list[Path] = []
        self.texts: list[str] = []
        self.targets: list[list[int]] = []
        self.seconds: list[float] = []
        lengths = []
        data = recipe.data
        limits = (data.max_length, data.max_target or data.max_length)
        for index, ((path, text), seconds) in enumerate(
            zip(records, _seconds(records), strict=True)
        ):
            target = tokenizer(text)["input_ids"]
            frames = self.log_mel.frames(round(seconds * self.log_mel.rate))
            heard = -(-frames // model.front_end.stride)
            kinds = [
                f"longer than {limit} {name}"
                for name, size, limit in zip(
                    ("positions", "tokens"), (heard, len(target)), limits, strict=True
                )
                if size > limit
            ]
            if drop and kinds:
                self.problems.add(kinds[0], records.line_number(index))
                continue
            self.paths.append(path)
            self.texts.append(text)
            self.targets.append(target)
            self.seconds.append(seconds)
            lengths.append((heard, len(target)))
        if not lengths or (self.problems and data.on_long == "raise"):
            raise OptionError(f"data: {len(lengths)} clips can be used\n{self.problems}")
        self.lengths = torch.tensor(lengths)

    def __len__(self) -> int:
        return len(self.paths)

    def batch(self, indices: Sequence[int]) -> Batch:
        """These clips, padded."""
        rows = []
        for index in indices:
            features = self.log_mel.read(self.paths[index])
            rows.append({
                "input_features": features,
                "attention_mask": torch.ones(len(features), dtype=torch.long),
                "labels": self.targets[index],
            })  # fmt: skip
        return pad_batch(rows, pad=self.tokenizer.pad_token_id, bos=self.tokenizer.bos_token_id)


def _seconds(records: Any) -> Iterator[float]:
    """Lengths of the clips of a `Speech`, or of a part of one."""
    if isinstance(records, Speech):
        yield from records.seconds
    else:
        yield from (records.records.seconds[index] for index in records.chosen)


@dataclass(frozen=True)
class Validation:
    """What a model makes of clips that it was not trained on.

    Args:
        recipe: its sections `evaluation` and `decoding`.
        tokenizer: of the model.
        clips: the validation clips.
    """

    recipe: Recipe
    tokenizer: Any
    clips: Clips

    def __call__(self, model: Any) -> dict[str, float]:
        """Metrics by name.

        ``loss``, nats a token; ``diagonality`` of the cross-attentions with the truth, where
        they have weights; ``wer`` and ``cer``, errors per word and per character, where
        `evaluation.decode` counts clips to be transcribed.
        """
        found = self.forced(model)
        if count := min(self.recipe.evaluation.decode, len(self.clips)):
            found |= self.free(model, count)
        return found

    def forced(self, model: Any) -> dict[str, float]:
        """Loss and diagonality, reading the truth."""
        looked = _has_weights(model)
        loss = straight = 0.0
        tokens = 0
        for rows in TokenBatches(
            self.clips.lengths, tokens=self.recipe.training.tokens, shuffle=False
        ):
            batch = {name: one.to(model.device) for name, one in self.clips.batch(rows).items()}
            labels = batch.pop("labels")
            encoded = model.encode(
                input_features=batch["input_features"], attention_mask=batch["attention_mask"]
            )
            out = model(
                encoder_outputs=encoded,
                decoder_input_ids=batch["decoder_input_ids"],
                output_attentions=looked,
            )
            logits = out.logits.float().flatten(0, 1)
            loss += float(F.cross_entropy(logits, labels.flatten(), reduction="sum"))
            tokens += int((labels != -100).sum())
            for weights in out.cross_attentions or ():
                shares = diagonality(weights, labels != -100, encoded.mask)
                straight += float(shares.mean(1).sum()) / len(out.cross_attentions)
        found = {"loss": loss / tokens}
        return found | ({"diagonality": straight / len(self.clips)} if looked else {})

    def free(self, model: Any, count: int) -> dict[str, float]:
        """Error rates of the first `count` clips' transcripts."""
        from subquad.generation import Translator, transcribe

        options = {**decoding_options(self.recipe), "beams": self.recipe.evaluation.beams}
        translator = Translator(model, self.tokenizer, **options)
        found = [one.text for one in transcribe(translator, self.clips.paths[:count])]
        wanted = self.clips.texts[:count]
        if self.recipe.tokenizer.lowercase:
            wanted = [text.lower() for text in wanted]
        return {
            "wer": error_rate([text.split() for text in wanted], [text.split() for text in found]),
            "cer": error_rate(wanted, found),
        }


def _has_weights(model: Any) -> bool:
    """Whether all cross-attentions can say what they look at."""
    blocks = [block for block in model.decoder.blocks if getattr(block, "letter", "") == "c"]
    return all(bool(block.attention.mechanism.capabilities.weights) for block in blocks)


def problems(recipe: Recipe) -> Iterable[str]:
    """What is wrong with a recipe for speech recognition."""
    if recipe.model["front_end"] is None:
        yield "model.front_end: asr reads sound: give its options, such as {rate: 16000, mels: 80}"
    if recipe.data.preset is not None:
        yield f"data.preset={recipe.data.preset!r}: presets are pairs of texts, for translation"
    if recipe.data.on_long == "truncate":
        yield "data.on_long=truncate: a clip cut off no longer says its transcript; drop or raise"
    if recipe.evaluation.best in ("wer", "cer") and not recipe.evaluation.decode:
        yield f"evaluation.best={recipe.evaluation.best!r} needs evaluation.decode > 0"


TASK = Task(
    name="asr",
    recipe="asr",
    config="subquad.models.configuration:Seq2SeqTransformerConfig",
    objective="subquad.training.objectives:Objective",
    metrics={"loss": "min", "wer": "min", "cer": "min", "diagonality": "max"},
    prepare=prepare,
    problems=problems,
)
