"""A/B: one prompt under two sets of settings, one after the other, answers and figures compared.

Pure: a trial is told the engine's events and says what to ask next; who asks is the screen's
business. The second side finds the expert cache as the first left it, so a result that matters is
worth a second trial in the other order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.config import RunConfig
from engine.errors import InputError
from engine.messages import (
    EngineDied,
    Event,
    Failed,
    Finished,
    LiveChanged,
    LiveRefused,
    Prompt,
    Text,
    TokenRows,
)
from engine.stats import FEWEST_TOKENS, Comparison, compare
from engine.telemetry import TokenRow
from tuiwork.meters.glyphs import UNICODE, Glyphs, significant
from tuiwork.meters.tokens import token_ms
from tuiwork.tuning.changes import short_name
from tuiwork.tuning.knobs import split_live
from tuiwork.tuning.profiles import to_apply


class Engine(Protocol):
    """The part of `tuiwork.client.EngineClient` that a trial needs."""

    def set_live(self, changes: dict[str, Any]) -> int: ...
    def generate(self, prompt: Prompt, n_predict: int | None = None) -> int: ...
    def cancel(self) -> None: ...
    def clear(self) -> None: ...


@dataclass
class Side:
    """One set of settings and what it gave."""

    name: str
    settings: RunConfig
    left_out: list[str] = field(default_factory=list)
    """Settings of it that cannot change without opening the model again."""
    text: str = ""
    rows: list[TokenRow] = field(default_factory=list)
    stop_reason: str = ""

    def figures(self, glyphs: Glyphs = UNICODE) -> str:
        """`96 tokens, 4.02 tok/s, 120 MiB read per token, left out 8.9 %`."""
        n = len(self.rows)
        if not n:
            return "no tokens yet"
        speed = 1000 * n / sum(map(token_ms, self.rows))
        read = sum(row.read_bytes for row in self.rows) / n / 2**20
        routed = sum(row.experts_routed for row in self.rows)
        gone = sum(row.experts_dropped + row.experts_substituted for row in self.rows)
        share = f", left out {100 * gone / routed:.1f} %" if routed and gone else ""
        return (
            f"{n} tokens, {significant(speed, glyphs)} tok/s, {significant(read, glyphs)} MiB "
            f"read per token{share}"
        )


class Trial:
    """Runs `sides` in their order, then puts back what was in force."""

    def __init__(
        self,
        engine: Engine,
        in_force: RunConfig,
        sides: tuple[Side, Side],
        prompt: Prompt,
        n_predict: int | None = None,
    ) -> None:
        self.sides = sides
        self.running = False
        self.trouble = ""
        self._engine = engine
        self._before = in_force
        self._now = in_force
        self._prompt = prompt
        self._n_predict = n_predict
        self._at = 0
        self._waiting_for = 0
        """The number of the request whose end comes next."""

    def start(self) -> None:
        """Begin with the first side. Raises TuiworkError if the engine does not run."""
        self.running = True
        self._set_up()

    def stop(self) -> None:
        """End early; what was in force is put back."""
        if self.running:
            self._engine.cancel()
            self._finish()

    def take(self, event: Event) -> bool:
        """Take in an event; returns whether it was about this trial."""
        if isinstance(event, EngineDied):
            self.running, self.trouble = False, event.message
            return False
        request = getattr(event, "request", None)
        if not self.running or request != self._waiting_for:
            return False
        side = self.sides[self._at]
        if isinstance(event, LiveChanged):
            self._ask()
        elif isinstance(event, LiveRefused):
            self.trouble = event.message
            self._finish()
        elif isinstance(event, Text):
            side.text += event.text
        elif isinstance(event, TokenRows):
            side.rows += event.rows
        elif isinstance(event, Finished):
            side.stop_reason = event.answer.stop_reason
            self._next()
        elif isinstance(event, Failed):
            self.trouble = event.message
            self._finish()
        return True

    def comparison(self) -> Comparison | None:
        """The second side against the first; None while a side has too few tokens."""
        times = [[token_ms(row) for row in side.rows] for side in self.sides]
        if min(map(len, times)) < FEWEST_TOKENS:
            return None
        try:
            return compare(times[0], times[1])
        except InputError:
            return None

    def verdict(self, glyphs: Glyphs = UNICODE) -> str:
        """The comparison in words, and whether the answers are the same."""
        found = self.comparison()
        if found is None:
            return f"{FEWEST_TOKENS} tokens on each side are needed to compare"
        low, high = found.interval.low, found.interval.high
        word = "separated" if found.separated else "not separated"
        answers = (
            "the same answer" if self.sides[0].text == self.sides[1].text else ("different answers")
        )
        return (
            f"{significant(found.before.tok_s, glyphs)} {glyphs.arrow} "
            f"{significant(found.after.tok_s, glyphs)} tok/s, {word} "
            f"({found.ratio:.2f} times, {low:.2f} to {high:.2f}); {answers}"
        )

    def _set_up(self) -> None:
        side = self.sides[self._at]
        wanted = to_apply(self._now, side.settings)
        live, waiting = split_live(wanted)
        side.left_out = [short_name(key) for key in waiting]
        self._now = self._now.replace(live)
        # What this side knows must not come from the other side's context.
        self._engine.clear()
        if live:
            self._waiting_for = self._engine.set_live(live)
        else:
            self._ask()

    def _ask(self) -> None:
        self._waiting_for = self._engine.generate(self._prompt, self._n_predict)

    def _next(self) -> None:
        if self._at + 1 < len(self.sides):
            self._at += 1
            self._set_up()
        else:
            self._finish()

    def _finish(self) -> None:
        self.running = False
        live, _ = split_live(to_apply(self._now, self._before))
        if live:
            self._engine.set_live(live)
