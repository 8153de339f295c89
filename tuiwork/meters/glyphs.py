"""Bars, small charts and ramps as text, with and without Unicode."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

UNMEASURED = "–"


@dataclass(frozen=True)
class Glyphs:
    """The characters that a terminal can show."""

    levels: str
    """From nothing to full, for columns that grow upward."""
    eighths: str
    """Parts of a cell filled from the left; empty where the terminal has none."""
    full: str
    shades: str
    """From absent to strongest, told apart without colour."""
    upper_half: str
    reading: str
    discarded: str
    mark: str
    cursor: str
    unmeasured: str
    dot: str
    arrow: str
    fills: str
    """One texture per part of a stacked bar, for terminals without colour."""
    left: str
    right: str


UNICODE = Glyphs(
    levels=" ▁▂▃▄▅▆▇█",
    eighths=" ▏▎▍▌▋▊▉",
    full="█",
    shades=" ·░▒▓█",
    upper_half="▀",
    reading="◆",
    discarded="×",
    mark="▼",
    cursor="▸",
    unmeasured=UNMEASURED,
    dot="·",
    arrow="→",
    fills="█▓▒░",
    left="‹",
    right="›",
)
ASCII = Glyphs(
    levels=" ._-=+*#%",
    eighths="",
    full="#",
    shades=" .:-=+*#",
    upper_half="",
    reading="o",
    discarded="x",
    mark="v",
    cursor=">",
    unmeasured="-",
    dot="|",
    arrow="->",
    fills="#=:.",
    left="<",
    right=">",
)


def bar(share: float, width: int, glyphs: Glyphs = UNICODE) -> str:
    """A horizontal bar of `width` cells, filled by `share` (0 to 1); NaN leaves it empty."""
    if not share > 0 or width <= 0:
        return " " * max(0, width)
    cells = min(share, 1.0) * width
    whole = int(cells)
    text = glyphs.full * whole
    if glyphs.eighths and whole < width:
        text += glyphs.eighths[int((cells - whole) * len(glyphs.eighths))]
    return text.ljust(width)[:width]


def spark(values: Iterable[float], width: int, top: float, glyphs: Glyphs = UNICODE) -> str:
    """The latest `width` values as columns of one line, `top` being full height.

    What was not measured (NaN) stays blank, and so does zero; anything above it shows.
    """
    latest = list(values)[-width:] if width > 0 else []
    steps = len(glyphs.levels) - 1
    text = "".join(_column(value, top, steps, glyphs.levels) for value in latest)
    return text.rjust(max(width, 0))


def chart(
    values: Sequence[float], width: int, height: int, top: float, glyphs: Glyphs = UNICODE
) -> list[str]:
    """The latest `width` values as columns of `height` lines, top line first."""
    lines = []
    for line in range(height):
        floor = top * (height - 1 - line) / height
        # Above its own slice a column is full, below it blank.
        lines.append(spark([value - floor for value in values], width, top / height, glyphs))
    return lines


def _column(value: float, top: float, steps: int, levels: str) -> str:
    if not value > 0 or not top > 0:
        return levels[0]
    return levels[min(steps, max(1, math.ceil(value / top * steps - 1e-9)))]


def nice_top(value: float) -> float:
    """The next of 1, 1.5, 2, 3, 5 and 7 times a power of ten: an axis that rarely jumps."""
    if not value > 0 or math.isinf(value):
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    for step in (1.0, 1.5, 2.0, 3.0, 5.0, 7.0):
        if value <= step * power * (1 + 1e-9):
            return step * power
    return 10.0 * power


def figure(value: float | None, form: str = ".2f", glyphs: Glyphs = UNICODE) -> str:
    """A number, or the sign for unmeasured where it is None, NaN or negative."""
    if value is None or value != value or value < 0:
        return glyphs.unmeasured
    return f"{value:{form}}"


def significant(value: float | None, glyphs: Glyphs = UNICODE) -> str:
    """A number with three significant digits, never in exponent form: `0.42`, `8.31`, `412`."""
    if value is None or value != value or value < 0:
        return glyphs.unmeasured
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def thousands(count: int) -> str:
    """A count with thin groups: `12 480`."""
    return f"{count:,}".replace(",", " ")
