"""Where the one question to the engine stands, and how that is put in words."""

from __future__ import annotations

import time
from enum import Enum, auto

from tuiwork.chat.when import per_second


class State(Enum):
    """From asking to the end of the answer."""

    IDLE = auto()
    READING = auto()  # the engine reads the prompt
    ANSWERING = auto()
    STOPPING = auto()  # stopped by the reader; the engine has not confirmed it yet


class Exchange:
    """One question at a time; the clock counts from the first token."""

    def __init__(self) -> None:
        self.state = State.IDLE
        self.continues = False
        """Whether it goes on with an earlier answer."""
        self._stage, self._fraction = "", 0.0
        self._n_tokens = 0
        self._first_at = 0.0

    @property
    def busy(self) -> bool:
        """Whether the engine still owes an end."""
        return self.state is not State.IDLE

    def ask(self, *, continues: bool = False) -> None:
        """A question was asked."""
        self.state = State.READING
        self.continues = continues
        self._stage, self._fraction = "reading the prompt", 0.0
        self._n_tokens, self._first_at = 0, 0.0

    def progress(self, stage: str, fraction: float) -> None:
        """The engine tells how far it is with the prompt."""
        if self.state is State.READING:
            self._stage, self._fraction = stage, fraction

    def text_came(self) -> None:
        """The answer began or goes on."""
        if self.state is State.READING:
            self.state = State.ANSWERING
            self._first_at = time.monotonic()

    def tokens_came(self, count: int) -> None:
        """So many tokens were generated since the last call."""
        self._n_tokens += count

    def stop(self) -> bool:
        """The reader wants it to end; whether there was something to stop."""
        if self.state in (State.READING, State.ANSWERING):
            self.state = State.STOPPING
            return True
        return False

    def end(self) -> None:
        """It ended, one way or another."""
        self.state = State.IDLE

    def status(self) -> str:
        """What is going on, for the composer's border; empty when nothing is."""
        if self.state is State.READING:
            share = f" {self._fraction * 100:.0f} %" if self._fraction > 0 else ""
            return f"{self._stage}{share} · Esc stops"
        if self.state is State.ANSWERING:
            parts = ["answering"]
            elapsed = time.monotonic() - self._first_at
            if self._n_tokens:
                parts.append(f"{self._n_tokens} tokens")
            if self._n_tokens > 1 and elapsed > 0:
                parts.append(per_second((self._n_tokens - 1) / elapsed))
            return " · ".join([*parts, "Esc stops"])
        return "stopping…" if self.state is State.STOPPING else ""
