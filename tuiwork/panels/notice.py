"""What a person must know now, where they look: opening, trouble, and what a change did."""

from __future__ import annotations

import textwrap

from textual.widget import Widget

from engine.messages import EngineDied, Event, Opened, OpenFailed, OpenProgress
from tuiwork.meters.glyphs import bar
from tuiwork.meters.meters import Doing, Meters
from tuiwork.panels.palette import Palette
from tuiwork.panels.panel import Line, Panel
from tuiwork.text import one_line, sanitize
from tuiwork.tuning.changes import effect_text

_SHOWN_STDERR = 5
_NEWS_FOR_TOKENS = 256
"""So long is what a change did news; the tuning form tells it ever after."""


class Notice(Panel, can_focus=False):
    """A few lines above the chat; not there when there is nothing to say."""

    DEFAULT_CSS = """
    Notice {
        border: none; border-left: thick $warning; padding: 0 1; height: auto; display: none;
        &.-shown { display: block; }
    }
    """
    EVERY = 2

    def __init__(self, meters: Meters, palette: Palette, *, id: str) -> None:
        super().__init__(meters, palette, id=id)
        self._stderr: tuple[str, ...] = ()
        self._hint = ""

    def take(self, event: Event) -> None:
        """Take in what the engine said about opening and dying."""
        if isinstance(event, EngineDied):
            self._stderr = event.stderr
            self._hint = "The conversation is kept. F4 opens the model again."
        elif isinstance(event, OpenFailed):
            self._stderr = ()
            self._hint = "Ctrl+O opens another model; F4 tries this one again."
        elif isinstance(event, (Opened, OpenProgress)):
            self._stderr, self._hint = (), ""

    def on_tick(self, tick: int) -> None:
        """Appear or go, as tall as the words need."""
        if tick % self.EVERY:
            return
        parent = self.parent
        room = parent.size.width if isinstance(parent, Widget) else 0
        words = self._words(max(20, room - self.gutter.width))
        self.set_class(bool(words), "-shown")
        if words:
            self.styles.height = len(words)
            self.update_lines()

    def lines(self, width: int, height: int) -> list[Line]:
        """Progress, or the trouble and the way out, or the latest change."""
        return self._words(width)

    def _words(self, width: int) -> list[Line]:
        meters = self.meters
        if meters.doing is Doing.OPENING:
            text = f"{one_line(meters.stage)} {100 * meters.fraction:.0f} %  (Esc stops)"
            done = bar(meters.fraction, max(1, width), self.palette.glyphs)
            return [[(text, "")], [(done, "accent/trough")]]
        if meters.trouble:
            return self._trouble(width)
        return self._news(width)

    def _trouble(self, width: int) -> list[Line]:
        text = sanitize(self.meters.trouble)
        lines: list[Line] = [[(line, "bad")] for line in textwrap.wrap(text, width)]
        lines += [[(one_line(line), "dim")] for line in self._stderr[-_SHOWN_STDERR:]]
        return lines + [[(line, "strong")] for line in textwrap.wrap(self._hint, width)]

    def _news(self, width: int) -> list[Line]:
        """What the latest change did."""
        log, tokens, glyphs = self.meters.changes, self.meters.tokens, self.palette.glyphs
        change = log.last
        if change is None or tokens.n_rows - change.at_row > _NEWS_FOR_TOKENS:
            return []
        effect = log.effect(len(log.changes) - 1, tokens)
        title: Line = [
            (f"{glyphs.mark} {change.title(glyphs)}", "lossy" if change.lossy else "accent")
        ]
        text = textwrap.wrap(effect_text(change, effect, glyphs), width)
        return [title, *([(line, "")] for line in text)]
