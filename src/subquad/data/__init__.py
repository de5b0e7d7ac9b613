"""Texts as training data: files read by line, tokenizers, batches of tokens, corpora."""

from __future__ import annotations

from subquad.data.audio import LogMel, Speech, read_wav, resample
from subquad.data.batches import TokenBatches, pad_batch, pad_rows
from subquad.data.corpora import Preset, Verse, joined, preset, presets
from subquad.data.encoded import EncodedLines, EncodedPairs
from subquad.data.packing import PackedLines, packed
from subquad.data.pairs import BadRecord, Lines, Pairs, Problems, Records
from subquad.data.tokens import both_sides, train_tokenizer

__all__ = [
    "BadRecord",
    "EncodedLines",
    "EncodedPairs",
    "Lines",
    "LogMel",
    "PackedLines",
    "Pairs",
    "Preset",
    "Problems",
    "Records",
    "Speech",
    "TokenBatches",
    "Verse",
    "both_sides",
    "joined",
    "packed",
    "pad_batch",
    "pad_rows",
    "preset",
    "presets",
    "read_wav",
    "resample",
    "train_tokenizer",
]
