"""A vocabulary for synthetic models: any text round-trips, and what they say reads like words.

A byte-level BPE as GPT-2's: 256 byte tokens, then syllables, then words made of them, each with
the merge that builds it, then the special tokens. Every token's length is the same for every
seed, so a header's size does not depend on it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.synth_tensors import N_SPECIAL_TOKENS

TEXT, CONTROL, USER_DEFINED = 1, 3, 4
"""llama.cpp's token types."""

SPECIAL_TOKENS = {
    "<think>": USER_DEFINED,
    "</think>": USER_DEFINED,
    "<|endoftext|>": CONTROL,
    "<|im_start|>": CONTROL,
    "<|im_end|>": CONTROL,
}
assert len(SPECIAL_TOKENS) == N_SPECIAL_TOKENS

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML."""

_CONSONANTS, _VOWELS = "bdfghjklmnprstvwz", "aeiou"
_SYLLABLES = [consonant + vowel for consonant in _CONSONANTS for vowel in _VOWELS]
_SPACE = "Ġ"


@dataclass(frozen=True)
class Vocabulary:
    """Tokens as GGUF stores them, their types, and the merges that build them."""

    tokens: list[str]
    types: list[int]
    merges: list[str]

    def id_of(self, token: str) -> int:
        """The id of a special token."""
        n_text = len(self.tokens) - N_SPECIAL_TOKENS
        return n_text + self.tokens[n_text:].index(token)


def make_vocabulary(n_vocab: int, seed: int) -> Vocabulary:
    """A vocabulary of exactly `n_vocab` tokens; the seed chooses which words are in it."""
    tokens = _byte_tokens()
    merges: list[str] = []
    n_text = n_vocab - N_SPECIAL_TOKENS
    rng = np.random.default_rng([seed, n_vocab])
    firsts, seconds = list(_CONSONANTS), list(_VOWELS)
    while len(tokens) < n_text:
        n_before = len(tokens)
        # A word can only be merged from a word that is in the vocabulary, so each length takes
        # all the words it can get from the one before.
        pairs = rng.permutation(len(firsts) * len(seconds))[: n_text - n_before]
        for pair in pairs.tolist():
            first, second = firsts[pair // len(seconds)], seconds[pair % len(seconds)]
            merges.append(f"{first} {second}")
            tokens.append(first + second)
        # Syllables first, then the same after a space, then words one syllable longer each time.
        firsts = tokens[n_before:] if seconds is _SYLLABLES else [_SPACE]
        seconds = _SYLLABLES
    types = [TEXT] * n_text + list(SPECIAL_TOKENS.values())
    return Vocabulary(tokens + list(SPECIAL_TOKENS), types, merges)


def _byte_tokens() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, in the order of the bytes."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    stand_in = iter(range(256, 512))
    return [chr(byte if byte in printable else next(stand_in)) for byte in range(256)]
