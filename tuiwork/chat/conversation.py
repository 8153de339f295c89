"""A conversation: what was said by whom, what of it the model is told, and how it changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from tuiwork.chat import reasoning

Role = Literal["user", "assistant"]
INTERRUPTED = "interrupted"
"""Stop reason of an answer whose end was never heard of: the app or the engine died."""

_TITLE_LENGTH = 60


@dataclass(frozen=True)
class Turn:
    """One side's words."""

    role: Role
    text: str
    """As it came: an answer still has its reasoning marks."""
    stop_reason: str = ""
    """Of an answer: why it ended, as engine.results.Answer says it."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Of an answer: n_generated, tok_s."""

    @property
    def said(self) -> str:
        """The words without the reasoning."""
        return self.text if self.role == "user" else reasoning.split(self.text)[1]


class Journal(Protocol):
    """Where a conversation is kept while it happens. Every call is one fact, in order."""

    def said(self, turn: Turn) -> None:
        """A finished turn; an answer takes the place of its pieces."""

    def piece(self, text: str) -> None:
        """A part of an answer that is still coming."""

    def reopened(self) -> None:
        """The last answer goes on: pieces from here on add to it."""

    def cut(self, keep: int) -> None:
        """All turns after the first `keep` are no longer part of it."""

    def forgot(self, first: int) -> None:
        """The model is no longer told the turns before `first`."""

    def titled(self, title: str) -> None:
        """It has a new name."""

    def system_changed(self, text: str) -> None:
        """It has a new system prompt."""


class NoJournal:
    """Keeps nothing (`--no-history`)."""

    def said(self, turn: Turn) -> None:
        """Nothing is kept."""

    def piece(self, text: str) -> None:
        """Nothing is kept."""

    def reopened(self) -> None:
        """Nothing is kept."""

    def cut(self, keep: int) -> None:
        """Nothing is kept."""

    def forgot(self, first: int) -> None:
        """Nothing is kept."""

    def titled(self, title: str) -> None:
        """Nothing is kept."""

    def system_changed(self, text: str) -> None:
        """Nothing is kept."""


class Conversation:
    """The turns, in order, and what the model is told of them."""

    def __init__(self, journal: Journal | None = None, *, system: str = "") -> None:
        self.turns: list[Turn] = []
        self.system = system
        self.first_sent = 0
        """Turns before this one stay on the screen, but the model is no longer told them."""
        self.journal: Journal = journal or NoJournal()
        self._title = ""

    @property
    def title(self) -> str:
        """The given name, else the first words of the first message."""
        if self._title:
            return self._title
        first = next((turn.text for turn in self.turns if turn.role == "user"), "")
        words = " ".join(first.split())
        return words if len(words) <= _TITLE_LENGTH else words[: _TITLE_LENGTH - 1] + "…"

    def rename(self, title: str) -> None:
        """Give it a name; empty: back to its first words."""
        self._title = title
        self.journal.titled(title)

    def set_system(self, text: str) -> None:
        """Change the system prompt from the next answer on."""
        if text != self.system:
            self.system = text
            self.journal.system_changed(text)

    def messages(self) -> list[dict[str, str]]:
        """What the model is told. A last turn that is an answer is one to go on with.

        Earlier answers go without their reasoning, as the models' own templates do it.
        """
        told = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns[self.first_sent :]:
            told.append({"role": turn.role, "content": turn.said})
        if self.turns and self.turns[-1].role == "assistant":
            told[-1]["content"] = self.turns[-1].text
        return told

    def say(self, text: str) -> None:
        """The user's next message."""
        self._add(Turn("user", text))

    def answered(self, turn: Turn) -> None:
        """The model's answer, whole or stopped; after `reopen`, the whole of both parts."""
        if self.turns and self.turns[-1].role == "assistant":
            self.turns.pop()
        self._add(turn)

    def reopen(self) -> str:
        """Go on with the last answer; returns its text."""
        self.journal.reopened()
        return self.turns[-1].text

    def cut(self, keep: int) -> None:
        """Take back every turn after the first `keep`."""
        if keep < len(self.turns):
            del self.turns[keep:]
            self.first_sent = min(self.first_sent, keep)
            self.journal.cut(keep)

    def forget_oldest(self) -> bool:
        """Stop telling the model the oldest exchange; false if only the newest is left."""
        later = [
            number
            for number, turn in enumerate(self.turns)
            if turn.role == "user" and number > self.first_sent
        ]
        if not later:
            return False
        self.first_sent = later[0]
        self.journal.forgot(self.first_sent)
        return True

    def _add(self, turn: Turn) -> None:
        self.turns.append(turn)
        self.journal.said(turn)
