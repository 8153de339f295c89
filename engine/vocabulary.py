"""Text to tokens and back, with the model's own vocabulary."""

from __future__ import annotations

import codecs
import ctypes
from collections.abc import Sequence
from typing import Any

from engine.ggml import llama


class Vocabulary:
    """The vocabulary of a loaded model."""

    def __init__(self, model: Any) -> None:
        self._vocab = llama.llama_model_get_vocab(model)
        self.n_tokens = int(llama.llama_vocab_n_tokens(self._vocab))
        self._piece = ctypes.create_string_buffer(256)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of `text`; `parse_special` reads control tokens written out in it."""
        raw = text.encode("utf-8", errors="replace")
        room = len(raw) + 16
        tokens = (ctypes.c_int32 * room)()
        count = llama.llama_tokenize(
            self._vocab, raw, len(raw), tokens, room, add_special, parse_special
        )
        if count < 0:  # the length it would need
            tokens = (ctypes.c_int32 * -count)()
            count = llama.llama_tokenize(
                self._vocab, raw, len(raw), tokens, -count, add_special, parse_special
            )
        return list(tokens[:count])

    def piece(self, token: int) -> bytes:
        """A token's bytes, which may be part of a character; control tokens are written out."""
        length = llama.llama_token_to_piece(
            self._vocab, token, self._piece, len(self._piece), 0, True
        )
        if length < 0:
            self._piece = ctypes.create_string_buffer(-length)
            length = llama.llama_token_to_piece(
                self._vocab, token, self._piece, len(self._piece), 0, True
            )
        return self._piece.raw[:length]

    def ends_generation(self, token: int) -> bool:
        """Whether the model ends its answer with this token."""
        return bool(llama.llama_vocab_is_eog(self._vocab, token))

    def text_of(self, token: int) -> str:
        """A special token's text, for templates; empty for none."""
        return "" if token < 0 else self.piece(token).decode("utf-8", errors="replace")

    @property
    def bos_text(self) -> str:
        """The begin-of-text token's text."""
        return self.text_of(llama.llama_vocab_bos(self._vocab))

    @property
    def eos_text(self) -> str:
        """The end-of-text token's text."""
        return self.text_of(llama.llama_vocab_eos(self._vocab))

    @property
    def adds_bos(self) -> bool:
        """Whether the model wants a begin-of-text token before raw text."""
        return bool(llama.llama_vocab_get_add_bos(self._vocab))


class TextStream:
    """Token bytes to text as it comes: whole characters, held back while a stop text may begin.

    `push` returns the text that is certain now; `stopped` is the stop text that was met.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.stopped: str | None = None

    def push(self, piece: bytes) -> str:
        """Add a token's bytes; return the text that can no longer be part of a stop text."""
        self._held += self._decoder.decode(piece)
        return self._release(final=False)

    def finish(self) -> str:
        """What was held back at the end of the answer."""
        self._held += self._decoder.decode(b"", final=True)
        return self._release(final=True)

    def _release(self, *, final: bool) -> str:
        if self.stopped is not None:
            return ""
        places = [(self._held.find(stop), stop) for stop in self._stops]
        met = min(((at, stop) for at, stop in places if at >= 0), default=None)
        if met is not None:
            self.stopped = met[1]
            text, self._held = self._held[: met[0]], ""
            return text
        keep = 0 if final else self._possible_stop_start()
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def _possible_stop_start(self) -> int:
        """Length of the longest end of the held text that begins some stop text."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest
