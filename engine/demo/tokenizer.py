"""The demo model's vocabulary: byte-level BPE, split into words as Qwen2 does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END, TURN, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END, TURN, TURN_END)
# What llama.cpp does for the pre-tokenizer it calls qwen2; digits stand alone.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train(texts: Iterable[str], n_vocab: int) -> Any:
    """A tokenizer of exactly `n_vocab` tokens, the special ones last."""
    tokenizer = _empty()
    trainer = trainers.BpeTrainer(
        vocab_size=n_vocab - len(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def load(path: Path) -> Any:
    """The tokenizer that `train` made and something saved."""
    return Tokenizer.from_file(str(path))


def encode_all(tokenizer: Any, texts: list[str], batch: int = 4096) -> Iterator[list[int]]:
    """The ids of each text."""
    for start in range(0, len(texts), batch):
        for encoding in tokenizer.encode_batch(texts[start : start + batch]):
            yield encoding.ids


def _empty() -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
