"""Whisper tiny.en on telephone prompts: word error rate, before and after.

The encoder reads 1,500 frames, whatever the length of the clip; its self-attention and the
decoder's cross-attention are what grows with sound. Clips are transcribed greedily.
"Agreement" is the share of tokens of the original's transcript that a model ranks first after
the same tokens before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from subquad.arena import corpora
from subquad.arena.conversion.stages import MINUTES, Recover, sq_recover, stages
from subquad.arena.zoo import Zoo, load_whisper
from subquad.data.edits import edit_distance

__all__ = ["measure", "table", "word_errors"]

CLIPS, RECOVERY = 100, 60
SEEDS = (0, 1, 2)
LONGEST = 80


def measure(
    zoo: Zoo,
    *,
    quick: bool,
    echo: Callable[[str], None],
    recover: Recover | None = sq_recover,
) -> dict[str, Any]:
    """Word error rate and agreement of the original, the converted and the recovered model."""
    found = load_whisper(zoo)
    model, tokenizer = found.model, found.tokenizer
    _prepare(model, tokenizer)
    # Every second clip is for recovery: neighbours in the list say similar things.
    spoken = corpora.speech(zoo, words=6)
    count = 6 if quick else CLIPS
    step = len(spoken) / (CLIPS + RECOVERY)
    picked = [spoken[int(i * step)] for i in range(CLIPS + RECOVERY)]
    tested = [clip for i, clip in enumerate(picked) if i % 8 < 5][:count]
    others = [clip for i, clip in enumerate(picked) if i % 8 >= 5]
    features = _features(tested)
    targets: list[list[Tensor]] = []

    def score(scored: nn.Module) -> dict[str, Any]:
        frames = _encode(scored, features)
        if not targets:
            targets.append(_transcribe(scored, frames))
        right = _agreement(scored, frames, targets[0])
        # Cross-attention to all frames is computed anew in each step, too slow to transcribe.
        whole = "subquad" in scored.get_submodule("model.decoder.layers.0.encoder_attn")._modules
        rate = None
        if not whole:
            # Greedy decoding says the same where every token of it comes first.
            said = list(targets[0])
            changed = [i for i, row in enumerate(right) if not bool(row.all())]
            if changed:
                new = _transcribe(scored, frames[changed])
                for i, row in zip(changed, new, strict=True):
                    said[i] = row
            texts = [tokenizer.decode(row.tolist()) for row in said]
            pairs = [word_errors(clip.text, text) for clip, text in zip(tested, texts, strict=True)]
            rate = sum(errors for errors, _ in pairs) / sum(words for _, words in pairs)
        return {
            "word error rate": rate,
            "agreement": float(torch.cat(right).double().mean()),
            "same transcript": sum(bool(row.all()) for row in right) / len(right),
        }

    rows = stages(
        model,
        score,
        {
            "near_far in the encoder": lambda name, module: ".encoder." in name,
            "near_far in all layers": None,
        },
        seeds=SEEDS[:1] if quick else SEEDS,
        examples=_examples(others, tokenizer),
        recover=None if quick else recover,
        echo=echo,
    )
    words = sum(len(normalised(clip.text)) for clip in tested)
    return {
        "settings": {
            "clips": f"{len(tested)} of one speaker, {words} words",
            "tokens": "1500 frames, of which the clips fill 250 on average; at most 80 of text",
            "recovery": f"{MINUTES:g} minutes on {len(others)} other clips",
        },
        "rows": rows,
    }


def table(result: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each model and seed."""
    rows: list[dict[str, Any]] = result["rows"]
    return rows


# ---- transcribing --------------------------------------------------------------------------


def _prepare(model: Any, tokenizer: Any) -> None:
    """What Whisper's own `generate` has to know of an English model."""
    config = model.generation_config
    config.is_multilingual = False
    config.no_timestamps_token_id = tokenizer.token_to_id("<|notimestamps|>")
    config.suppress_tokens = config.begin_suppress_tokens = None
    config.max_length = model.config.max_target_positions


def _features(clips: Sequence[corpora.Clip]) -> Tensor:
    """Log-mel spectrograms (N, 80, 3000) of 30 s each."""
    from transformers import WhisperFeatureExtractor

    extract: Any = WhisperFeatureExtractor(feature_size=80)
    samples = [clip.samples.numpy() for clip in clips]
    return extract(samples, sampling_rate=16_000, return_tensors="pt").input_features


def _encode(model: Any, features: Tensor, size: int = 4) -> Tensor:
    """The encoder's output (N, 1500, C)."""
    encoder = model.get_encoder()
    with torch.no_grad():
        return torch.cat([encoder(part).last_hidden_state for part in features.split(size)])


def _transcribe(model: Any, frames: Tensor, size: int = 10) -> list[Tensor]:
    """Token ids of each clip, without the prompt's, up to the end."""
    from transformers.modeling_outputs import BaseModelOutput

    end, found = model.config.eos_token_id, []
    for part in frames.split(size):
        with torch.no_grad():
            ids = model.generate(
                encoder_outputs=BaseModelOutput(last_hidden_state=part),
                attention_mask=part.new_ones(part.shape[:2]),
                max_new_tokens=LONGEST,
                do_sample=False,
            )
        found += [row[row != end] for row in ids]
    return found


def _agreement(model: Any, frames: Tensor, targets: Sequence[Tensor]) -> list[Tensor]:
    """Which of each target's tokens, the end included, come first after those before."""
    config, right = model.config, []
    prompt = torch.tensor(
        [config.decoder_start_token_id, model.generation_config.no_timestamps_token_id]
    )
    for one, target in zip(frames, targets, strict=True):
        wanted = torch.cat([target, torch.tensor([config.eos_token_id])])
        given = torch.cat([prompt, target])
        with torch.no_grad():
            logits = model(encoder_outputs=(one[None],), decoder_input_ids=given[None]).logits[0]
        right.append(logits[1:].argmax(-1) == wanted)
    return right


def _examples(clips: Sequence[corpora.Clip], tokenizer: Any) -> list[dict[str, Tensor]]:
    start = [tokenizer.token_to_id(f"<|{word}|>") for word in ("startoftranscript", "notimestamps")]
    return [
        {
            "input_features": features,
            "decoder_input_ids": torch.tensor(start + tokenizer.encode(f" {clip.text}").ids),
        }
        for clip, features in zip(clips, _features(clips), strict=True)
    ]


# ---- word errors ---------------------------------------------------------------------------

_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def normalised(text: str) -> list[str]:
    """Words in lower case without punctuation; digits are written out one by one."""
    text = re.sub(r"\d", lambda digit: f" {_DIGITS[int(digit[0])]} ", text.lower())
    return re.sub(r"[^a-z' ]", " ", text).replace("'", "").split()


def word_errors(wanted: str, given: str) -> tuple[int, int]:
    """(substitutions + insertions + deletions, words wanted), by Levenshtein's distance.

    >>> word_errors("Press 1, please.", "press one")
    (1, 3)
    """
    a, b = normalised(wanted), normalised(given)
    return edit_distance(a, b), len(a)
