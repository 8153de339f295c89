"""The status line: what matters at every moment, whatever else is on the screen."""

from __future__ import annotations

from engine.config import SETTINGS, RunConfig, get
from tuiwork.meters.glyphs import figure, significant
from tuiwork.meters.meters import Doing
from tuiwork.panels.panel import Line, Panel, between, fitting, line_width
from tuiwork.text import MIB, one_line
from tuiwork.tuning.changes import short_name, value_text

_LONGEST_NAME = 28


class StatusLine(Panel, can_focus=False):
    """Model, speed, hits, reads, context, and LOSSY with what makes it so."""

    DEFAULT_CSS = """
    StatusLine {
        border: none; height: 1; padding: 0 1; background: $panel;
    }
    """

    def lines(self, width: int, height: int) -> list[Line]:
        """One line: who at the left, how fast at the right, both shortened to fit."""
        right = self._figures()
        left = self._who(width)
        while right and line_width(left) + line_width(_gapped(right)) + 2 > width:
            right.pop(0)
        return [between(fitting([left], width), _gapped(right), width)]

    def _who(self, width: int) -> Line:
        meters = self.meters
        line: Line = [("tuiwork ", "accent")]
        if meters.opened is None:
            return line + self._without_model()
        # The demo model has the program's name before its own.
        name = one_line(meters.opened.info.name).removeprefix("tuiwork ")
        if len(name) > _LONGEST_NAME and width < 140:
            name = name[: _LONGEST_NAME - 1] + "…"
        line.append((name, "strong"))
        lossy = lossy_settings(meters.config) if meters.config is not None else []
        if lossy:
            shown = ", ".join(lossy) if width >= 100 else lossy[0]
            line.append((f"  LOSSY {shown}", "lossy"))
        else:
            line.append(("  lossless", "good"))
        return line

    def _without_model(self) -> Line:
        meters = self.meters
        if meters.doing is Doing.OPENING:
            return [(f"{one_line(meters.stage)} {100 * meters.fraction:.0f} %", "strong")]
        if meters.doing is Doing.DEAD:
            return [("the engine died: F4 opens it again", "bad")]
        return [(meters.doing.value, "dim")]

    def _figures(self) -> list[Line]:
        """Least important first: that one goes first when there is no room."""
        meters, glyphs = self.meters, self.palette.glyphs
        if meters.opened is None:
            return []
        parts: list[Line] = []
        if meters.doing is Doing.PROMPT:
            parts.append([(f"prompt {100 * meters.fraction:.0f} %", "strong")])
        ctx = meters.opened.info.ctx
        parts.append([("ctx ", "dim"), (f"{meters.context_used}/{ctx}", "")])
        if meters.streams and meters.totals is not None:
            rates = meters.lanes.rates
            now = rates.total_bytes_per_s / MIB if rates is not None else None
            parts.append([(figure(now, ".0f", glyphs), "strong"), (" MiB/s", "dim")])
            hits = 100 * meters.totals.hit_share
            parts.append([("hits ", "dim"), (f"{figure(hits, '.1f', glyphs)} %", "strong")])
        speed = meters.tokens.speeds().now
        parts.append([(significant(speed, glyphs), "strong"), (" tok/s", "dim")])
        return parts


def lossy_settings(config: RunConfig) -> list[str]:
    """What in force changes the answer: `drop 0.75`."""
    found = []
    for key, spec in SETTINGS.items():
        value = get(config, key)
        if spec.lossy_at(value):
            name = short_name(key)
            if key == "routing.drop-cold-experts" and config.routing.cold_policy != "drop":
                name = config.routing.cold_policy
            found.append(f"{name} {value_text(key, value)}")
    return found


def _gapped(parts: list[Line]) -> Line:
    line: Line = []
    for part in parts:
        line += [("   ", ""), *part] if line else part
    return line
