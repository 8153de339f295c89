"""One generation while it runs: what was said so far, and who is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.sampling import Sampler
from engine.vocabulary import TextStream


@dataclass
class Turn:
    """One generation while it runs."""

    stream: TextStream
    limit: int
    sampler: Sampler
    on_text: Callable[[str], None] | None
    on_token: Callable[[int], None] | None
    opening: str = ""
    """What stands before the first words: a reasoning mark that the prompt has already."""
    tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    stop_reason: str = "length"
    n_reused: int = 0

    def take(self, token: int, piece: bytes) -> None:
        """A token was chosen; `piece` are its bytes."""
        self.tokens.append(token)
        if self.on_token is not None:
            self.on_token(token)
        self._say(self.stream.push(piece))

    def finish(self) -> None:
        """No token follows: say what was held back."""
        self._say(self.stream.finish())

    def _say(self, text: str) -> None:
        if text:
            text, self.opening = self.opening + text, ""
            self.text.append(text)
            if self.on_text is not None:
                self.on_text(text)
