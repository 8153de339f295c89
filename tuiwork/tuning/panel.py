"""The tuning form: every knob on one line, and what each change bought."""

from __future__ import annotations

import textwrap
from typing import Any, ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message

from engine.config import RunConfig, get
from tuiwork.meters.glyphs import bar
from tuiwork.meters.meters import Meters
from tuiwork.panels.palette import Palette
from tuiwork.panels.panel import Line, Panel, fitting, line_width
from tuiwork.text import one_line
from tuiwork.tuning.changes import effect_text, interval_text, value_text
from tuiwork.tuning.knobs import KNOBS, Knob

_LABEL_WIDTH = 22
_VALUE_WIDTH = 13


class TuningPanel(Panel):
    """Knobs above, changes and their effects below."""

    TITLE = "Tuning"
    TAB = "Tune"
    HELP = (
        "Up and down choose a knob, left and right turn it, Enter types a value. A change is in "
        "force from the next token on and leaves a mark; after 16 tokens on each side its effect "
        "is told, with whether the difference is more than chance. Knobs that say `reopens` "
        "wait until the model is opened again: F4."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "choose(-1)", "Knob up", show=False, id="tune.up"),
        Binding("down,j", "choose(1)", "Knob down", show=False, id="tune.down"),
        Binding("left,h", "turn(-1)", "Less", id="tune.less", key_display="←"),
        Binding("right,l", "turn(1)", "More", id="tune.more", key_display="→"),
        Binding("enter", "type", "Type a value", id="tune.type"),
    ]

    class Turned(Message):
        """A knob was turned, by `direction` steps."""

        def __init__(self, knob: Knob, direction: int) -> None:
            super().__init__()
            self.knob = knob
            self.direction = direction

    class Typing(Message):
        """A value shall be typed."""

        def __init__(self, knob: Knob) -> None:
            super().__init__()
            self.knob = knob

    def __init__(self, meters: Meters, palette: Palette, *, id: str) -> None:
        self.selected = 0
        self.waiting: dict[str, Any] = {}
        """Settings that are in force once the model is opened again."""
        self._first = 0
        super().__init__(meters, palette, id=id)

    @property
    def knob(self) -> Knob:
        """The chosen knob."""
        return KNOBS[self.selected]

    def action_choose(self, direction: int) -> None:
        """Go to another knob."""
        self.selected = (self.selected + direction) % len(KNOBS)
        self.update_lines()

    def action_turn(self, direction: int) -> None:
        """Turn the chosen knob by a step."""
        self.post_message(self.Turned(self.knob, direction))

    def action_type(self) -> None:
        """Type the chosen knob's value."""
        self.post_message(self.Typing(self.knob))

    def on_click(self, event: events.Click) -> None:
        """Choose the clicked knob; its left and right mark turn it."""
        offset = event.get_content_offset(self)
        if offset is None or not 0 <= offset.y < self._n_knob_lines(self.content_size.height):
            return
        self.selected = min(self._first + offset.y, len(KNOBS) - 1)
        value_starts = 2 + _LABEL_WIDTH
        if value_starts <= offset.x < value_starts + 2:
            self.action_turn(-1)
        elif offset.x >= value_starts + _VALUE_WIDTH + 2:
            self.action_turn(1)
        self.update_lines()

    def lines(self, width: int, height: int) -> list[Line]:
        """As many knobs as fit, the chosen one among them; then the latest changes."""
        config = self.meters.config
        if config is None:
            return [[("Knobs appear here once a model is open.", "dim")]]
        n_knobs = self._n_knob_lines(height)
        self._first = min(
            max(self._first, self.selected - n_knobs + 1), self.selected, len(KNOBS) - n_knobs
        )
        shown = range(self._first, self._first + n_knobs)
        lines = [self._knob_line(place, config, width) for place in shown]
        return lines + self._waiting_line() + self._change_lines(width, height - n_knobs)

    def _n_knob_lines(self, height: int) -> int:
        # The latest change is what one looks at after turning: two lines are always its.
        return max(1, min(len(KNOBS), height - 3))

    def _knob_line(self, place: int, config: RunConfig, width: int) -> Line:
        knob, glyphs = KNOBS[place], self.palette.glyphs
        here = place == self.selected
        value = self.waiting.get(knob.key, get(config, knob.key))
        text = value_text(knob.key, value)
        role = "lossy" if knob.lossy and knob.key != "routing.cold-policy" and value else "strong"
        line: Line = [
            (f"{glyphs.cursor} " if here else "  ", "cursor"),
            (f"{knob.label:<{_LABEL_WIDTH}}", "" if here else "dim"),
            (f"{glyphs.left} " if here else "  ", "accent"),
            (f"{one_line(text):<{_VALUE_WIDTH - 2}}", role),
            (f"{glyphs.right} " if here else "  ", "accent"),
        ]
        room = width - line_width(line)
        notes: list[Line] = []
        if knob.lossy:
            notes.append([("lossy", "lossy")])
        if knob.reopens:
            waits = knob.key in self.waiting
            notes.append(
                [("waits for reopening" if waits else "reopens", "warn" if waits else "dim")]
            )
        if knob.key == "routing.drop-cold-experts" and room >= 24:
            notes.insert(0, [(bar(float(value), 10, glyphs), "lossy/trough")])
        return line + fitting(notes, room, " ")

    def _waiting_line(self) -> list[Line]:
        if not self.waiting:
            return []
        n = len(self.waiting)
        noun = "setting waits" if n == 1 else "settings wait"
        return [[(f"{n} {noun} until the model is opened again: F4", "warn")]]

    def _change_lines(self, width: int, room: int) -> list[Line]:
        log, glyphs = self.meters.changes, self.palette.glyphs
        if not log.changes:
            return [[("No change yet. Each leaves a mark, and its effect is told here.", "dim")]]
        lines: list[Line] = []
        for index in reversed(range(len(log.changes))):
            change = log.changes[index]
            effect = log.effect(index, self.meters.tokens)
            title = f"{glyphs.mark} {change.title(glyphs)}"
            role = "lossy" if change.lossy else "accent"
            head: Line = [(title, role)]
            text = effect_text(change, effect, glyphs)
            interval = interval_text(effect, glyphs)
            if interval and line_width(head) + len(interval) + 2 <= width:
                head += [("  ", ""), (interval, "strong")]
            lines += [head, *([("  " + part, "")] for part in textwrap.wrap(text, width - 2))]
            if len(lines) >= room:
                break
        return lines
