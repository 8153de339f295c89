"""Where the token goes: each token as a stacked bar of what its milliseconds were spent on."""

from __future__ import annotations

import textwrap

import numpy as np
import numpy.typing as npt

from tuiwork.meters.glyphs import nice_top, significant
from tuiwork.meters.tokens import PARTS, parts_ms, shares, stacked
from tuiwork.panels.palette import part_role
from tuiwork.panels.panel import Line, Panel, between, fitting
from tuiwork.tuning.changes import effect_text

_AXIS_WIDTH = 6
_LABELS = {
    "compute": "compute",
    "reads": "waiting for reads",
    "cache": "cache upkeep",
    "overhead": "loop overhead",
}


class TokenTimePanel(Panel):
    """One column for each token, the newest at the right, marks where settings changed."""

    TITLE = "Where the token goes"
    TAB = "Time"
    HELP = (
        "One column is one token, its height its milliseconds: computing, waiting for reads, "
        "cache upkeep, and the loop around them. A mark shows where a setting changed. "
        "`without reads` is how fast the model would be if every expert were resident."
    )

    def lines(self, width: int, height: int) -> list[Line]:
        """Speeds, bars, marks, legend; the latest change at the bottom if there is room."""
        tokens = self.meters.tokens
        if tokens.last is None:
            return [[("One column for each token, once the model answers.", "dim")]]
        columns = max(1, width - _AXIS_WIDTH)
        rows = tokens.latest(columns)
        change = self._change_lines(width) if height >= 12 else []
        legend = [self._legend(width)] if height >= 5 else []
        chart_height = max(1, height - 2 - len(legend) - len(change))
        top_ms = nice_top(max(sum(parts_ms(row)) for row in rows))
        filled = stacked(rows, chart_height * self._per_line, top_ms)
        chart = [
            self._axis(y, chart_height, top_ms) + self._bars(filled, y, columns)
            for y in range(chart_height)
        ]
        return [self._speeds(width), *chart, self._marks(columns, len(rows)), *legend, *change]

    @property
    def _per_line(self) -> int:
        return 2 if self.palette.halves else 1

    def _speeds(self, width: int) -> Line:
        speeds, glyphs = self.meters.tokens.speeds(), self.palette.glyphs
        unread = "without reads" if width >= 48 else "no reads"
        parts: list[Line] = [
            [(significant(speeds.now, glyphs), "strong"), (" tok/s", "")],
            [("mean ", "dim"), (significant(speeds.turn, glyphs), "strong")],
            [(f"{unread} ", "dim"), (significant(speeds.without_reads, glyphs), "strong")],
        ]
        return fitting(parts, width, "  ")

    def _axis(self, y: int, height: int, top_ms: float) -> Line:
        if y == 0:
            return [(f"{_milliseconds(top_ms):>{_AXIS_WIDTH - 1}} ", "dim")]
        if 2 * y == height >= 4:
            return [(f"{_milliseconds(top_ms / 2):>{_AXIS_WIDTH - 1}} ", "dim")]
        return [(" " * _AXIS_WIDTH, "")]

    def _bars(self, filled: npt.NDArray[np.int8], y: int, columns: int) -> Line:
        per_line = self._per_line
        upper, lower = filled[y * per_line], filled[y * per_line + per_line - 1]
        line: Line = [(" " * (columns - len(upper)), "")]
        for top, bottom in zip(upper.tolist(), lower.tolist(), strict=True):
            line.append(self._place(top, bottom))
        return _merged(line)

    def _place(self, top: int, bottom: int) -> tuple[str, str]:
        if bottom < 0 and top < 0:
            return " ", ""
        if top == bottom:
            return self.palette.part_glyph(bottom), part_role(bottom)
        if top < 0:
            return "▄", part_role(bottom)
        return "▀", f"{part_role(top)}/{part_role(bottom)}"

    def _marks(self, columns: int, n_shown: int) -> Line:
        tokens = self.meters.tokens
        first = tokens.n_rows - n_shown
        places = [" "] * columns
        for change in self.meters.changes.changes:
            place = columns - n_shown + change.at_row - first
            if columns - n_shown <= place < columns:
                places[place] = self.palette.glyphs.mark
            elif place == columns:
                # In force from the next token on: it has no column yet.
                places[-1] = self.palette.glyphs.mark
        blank: Line = [(" " * _AXIS_WIDTH, "")]
        return _merged([*blank, *((sign, "" if sign == " " else "cursor") for sign in places)])

    def _legend(self, width: int) -> Line:
        rows = self.meters.tokens.latest(64)
        parts: list[Line] = []
        for part, share in enumerate(shares(rows).tolist()):
            percent = "" if share != share else f" {100 * share:.0f} %"
            name = _LABELS[PARTS[part]] if width >= 100 else PARTS[part]
            parts.append(
                [
                    (self.palette.part_glyph(part), part_role(part)),
                    (f" {name}", "dim"),
                    (percent, "strong"),
                ]
            )
        line = fitting(parts, width, "  ")
        return between(line, [("last 64 tokens", "dim")], width)

    def _change_lines(self, width: int) -> list[Line]:
        log, glyphs = self.meters.changes, self.palette.glyphs
        change = log.last
        if change is None:
            return []
        effect = log.effect(len(log.changes) - 1, self.meters.tokens)
        title = f"{glyphs.mark} {change.title(glyphs)}: "
        role = "lossy" if change.lossy else "accent"
        text = effect_text(change, effect, glyphs)
        if len(title) + len(text) <= width:
            return [[(title, role), (text, "")]]
        wrapped = textwrap.wrap(text, max(10, width - 2))
        return [[(title, role)], *([("  " + part, "")] for part in wrapped)]


def _milliseconds(value: float) -> str:
    if value >= 10_000:
        return f"{value / 1000:.0f}s"
    if value >= 1000:
        return f"{value / 1000:.1f}s"
    return f"{value:.0f}ms" if value >= 10 or value == int(value) else f"{value:.1f}ms"


def _merged(line: Line) -> Line:
    merged: Line = []
    for text, role in line:
        if merged and merged[-1][1] == role:
            merged[-1] = (merged[-1][0] + text, role)
        else:
            merged.append((text, role))
    return merged
