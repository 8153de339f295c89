"""A streamed answer apart into reasoning and text, while it streams.

Agrees with `engine.chat.split_reasoning` on every finished text, whatever the chunks were; that
function loads llama.cpp, which the app's process never does.
"""

from __future__ import annotations

import re
from enum import Enum, auto

TAGS = ("think", "thinking", "reasoning", "seed:think")
_OPENING = re.compile(rf"\s*<(?P<tag>{'|'.join(map(re.escape, TAGS))})>")
_OPENINGS = tuple(f"<{tag}>" for tag in TAGS)


class _At(Enum):
    START = auto()
    REASONING = auto()
    GAP = auto()  # between the end of the reasoning and the first character of the answer
    ANSWER = auto()


class ReasoningSplitter:
    """Feed pieces of an answer; get back what each adds to the reasoning and to the text."""

    def __init__(self) -> None:
        self._at = _At.START
        self._held = ""
        self._closing = ""
        self._reasoned = False

    @property
    def in_reasoning(self) -> bool:
        """Whether the model is thinking aloud right now."""
        return self._at is _At.REASONING

    def feed(self, piece: str) -> tuple[str, str]:
        """What `piece` adds, as (reasoning, answer). Undecided characters are held back."""
        self._held += piece
        reasoning = ""
        if self._at is _At.START:
            self._leave_start()
        if self._at is _At.REASONING:
            reasoning = self._take_reasoning()
        if self._at is _At.GAP:
            self._held = self._held.lstrip("\n")
            if self._held:
                self._at = _At.ANSWER
        if self._at is _At.ANSWER:
            answer, self._held = self._held, ""
            return reasoning, answer
        return reasoning, ""

    def finish(self) -> tuple[str, str]:
        """What was still held back when the answer ended."""
        held, self._held = self._held, ""
        if self._at is _At.REASONING:
            return self._trimmed(held).rstrip(), ""
        return "", held

    def _leave_start(self) -> None:
        match = _OPENING.match(self._held)
        if match:
            self._at = _At.REASONING
            self._closing = f"</{match['tag']}>"
            self._held = self._held[match.end() :]
        elif not _may_open(self._held):
            self._at = _At.ANSWER

    def _take_reasoning(self) -> str:
        inside, closing, after = self._held.partition(self._closing)
        if closing:
            self._at = _At.GAP
            self._held = after
            return self._trimmed(inside).rstrip()
        inside = self._trimmed(inside)
        # The end may be the closing tag's beginning, or space that a closing tag makes void.
        kept = len(inside) - _overlap(inside, self._closing)
        kept = len(inside[:kept].rstrip())
        self._held = inside[kept:]
        self._reasoned = self._reasoned or kept > 0
        return inside[:kept]

    def _trimmed(self, inside: str) -> str:
        return inside if self._reasoned else inside.lstrip()


def _may_open(text: str) -> bool:
    text = text.lstrip()
    return any(opening.startswith(text) for opening in _OPENINGS)


def _overlap(text: str, tag: str) -> int:
    """How many characters at the end of `text` begin `tag`."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0


def split(text: str) -> tuple[str, str]:
    """A whole answer as (reasoning, answer)."""
    splitter = ReasoningSplitter()
    parts = (splitter.feed(text), splitter.finish())
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)
