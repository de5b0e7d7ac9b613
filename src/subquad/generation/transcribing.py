"""Sound in, texts out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from subquad.data.audio import LogMel
from subquad.data.batches import pad_rows
from subquad.errors import OptionError
from subquad.generation.batches import batches_by_tokens

if TYPE_CHECKING:
    from subquad.generation.translator import Hypothesis, Translator

__all__ = ["transcribe"]


def transcribe(
    translator: Translator,
    clips: Sequence[Tensor | str | Path],
    progress: Callable[[int, int], None] | None = None,
) -> list[Hypothesis]:
    """What is said in each clip, in their order.

    Clips are sorted by length and put into batches of `translator.batch_tokens` frames. The
    translator's `max_length` counts frames as source tokens: with (10, 0.3) a clip gives 30
    tokens a second at most, where a frame is 10 ms, and 10 more.

    Args:
        translator: with the model and its tokenizer, and how they search.
        clips: samples (N,) at the front end's rate, or WAV files.
        progress: called with the numbers of clips done and of all, after each batch.

    Raises:
        OptionError: the model reads no sound, or a file cannot be read.

    Example:
        >>> import torch, subquad as sq
        >>> from subquad.data.tokens import train_tokenizer
        >>> from subquad.generation import Translator, transcribe
        >>> tokenizer = train_tokenizer(["press one"], kind="char")
        >>> config = sq.models.Seq2SeqTransformerConfig(
        ...     vocab_size=len(tokenizer),
        ...     d_model=16,
        ...     num_heads=2,
        ...     front_end={"rate": 8000, "mels": 20},
        ... )
        >>> model = sq.models.Seq2SeqTransformer(config)  # not trained
        >>> translator = Translator(model, tokenizer, beams=1, max_length=(1, 0.05))
        >>> len(transcribe(translator, [torch.randn(8000), torch.randn(4000)]))
        2
    """
    model = translator.model
    if getattr(model, "front_end", None) is None:
        raise OptionError(f"{type(model).__name__} reads tokens: it has no front end for sound")
    log_mel: LogMel = model.front_end.log_mel
    sizes = [
        log_mel.frames(len(clip)) if isinstance(clip, Tensor) else log_mel.frames_of(clip)
        for clip in clips
    ]
    found: dict[int, Hypothesis] = {}
    for numbers in batches_by_tokens(sizes, translator.batch_tokens):
        rows = []
        for number in numbers:
            clip = clips[number]
            features = log_mel(clip) if isinstance(clip, Tensor) else log_mel.read(clip)
            mask = torch.ones(len(features), dtype=torch.long)
            rows.append({"input_features": features, "attention_mask": mask})
        batch = {name: given.to(model.device) for name, given in pad_rows(rows).items()}
        found |= dict(zip(numbers, translator.decode(batch), strict=True))
        if progress is not None:
            progress(len(found), len(clips))
    return [found[number] for number in range(len(clips))]
