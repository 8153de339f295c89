"""Colours of data, which mean the same under every theme, and what stands in for them.

The ramp is viridis: its lightness alone tells its order, so it survives every kind of colour
blindness and a screen in grey. Categories are Okabe and Ito's. With 16 colours the ramp has fewer
steps; without colour, glyphs carry what colours would.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from rich.style import Style

from tuiwork.meters.glyphs import ASCII, UNICODE, Glyphs
from tuiwork.meters.heat import DISCARDED, LEVELS, N_CODES, NOTHING, READ_NOW
from tuiwork.meters.tokens import PARTS

CODE = "code:"
"""Begins the role of a heatmap code, as in a legend."""


class Depth(Enum):
    """How many colours the terminal has."""

    NONE = 0
    SIXTEEN = 16
    FULL = 256


_VIRIDIS = (
    "#462f7c", "#3f4788", "#365c8d", "#2e6e8e", "#277f8e", "#21918c",
    "#1fa187", "#2db27d", "#4ac16d", "#73d056", "#addc30", "#fde725",
)  # fmt: skip
"""From a fifth of the way on: its darkest end could not be told from an absent expert."""

_RAMP_16 = (
    "blue", "blue", "blue", "bright_blue", "bright_blue", "cyan",
    "cyan", "bright_cyan", "green", "bright_green", "yellow", "bright_yellow",
)  # fmt: skip

_DARK = {
    "absent": "#24262b",
    "trough": "#33363d",
    "reading": "#ffffff",
    "cursor": "#ff5fd2",
    "lossy": "#ff7a45",
    "compute": "#56b4e9",
    "reads": "#e69f00",
    "cache": "#cc79a7",
    "overhead": "#8f98a3",
    "good": "#3ecf9a",
    "warn": "#f0c000",
    "bad": "#ff6b6b",
    "accent": "#56b4e9",
    "dim": "#858d98",
}
_LIGHT = {
    "absent": "#dfe1e5",
    "trough": "#c9ccd2",
    "reading": "#000000",
    "cursor": "#c2008f",
    "lossy": "#c23b00",
    "compute": "#0072b2",
    "reads": "#b06f00",
    "cache": "#a8477f",
    "overhead": "#6b7280",
    "good": "#00795a",
    "warn": "#8a6a00",
    "bad": "#b3261e",
    "accent": "#005f99",
    "dim": "#666d78",
}
_ANSI = {
    "absent": "black",
    "trough": "bright_black",
    "reading": "bright_white",
    "cursor": "bright_magenta",
    "lossy": "bright_red",
    "compute": "bright_blue",
    "reads": "yellow",
    "cache": "magenta",
    "overhead": "white",
    "good": "green",
    "warn": "bright_yellow",
    "bad": "bright_red",
    "accent": "bright_cyan",
    "dim": "default",
}
_WITHOUT_COLOUR = {
    "lossy": Style(bold=True),
    "good": Style(),
    "warn": Style(bold=True),
    "bad": Style(bold=True),
    "cursor": Style(reverse=True),
    "accent": Style(bold=True),
    "dim": Style(dim=True),
}


@dataclass(frozen=True)
class Palette:
    """The styles of one terminal under one kind of theme."""

    depth: Depth
    dark: bool
    glyphs: Glyphs

    @property
    def halves(self) -> bool:
        """Whether two rows fit into one line: that takes two colours in one character."""
        return self.depth is not Depth.NONE and bool(self.glyphs.upper_half)

    def style(self, role: str) -> Style:
        """The style of a role: a name of `_DARK`, `strong`, or empty for plain text.

        `upper/lower` colours a character's foreground and its background.
        """
        return _style(self, role)

    def part_glyph(self, part: int) -> str:
        """The character that fills a part of a stacked bar."""
        if self.depth is Depth.NONE or not self.glyphs.upper_half:
            return self.glyphs.fills[part]
        return self.glyphs.full

    def cell_colour(self, code: int) -> str | None:
        """The colour of a heatmap code; None for a terminal without colour."""
        if self.depth is Depth.NONE:
            return None
        colours = self._colours()
        if code == NOTHING:
            return colours["absent"]
        if code == READ_NOW:
            return colours["reading"]
        if code == DISCARDED:
            return colours["lossy"]
        if code == N_CODES:
            return colours["cursor"]
        ramp = _RAMP_16 if self.depth is Depth.SIXTEEN else _VIRIDIS
        return ramp[code - 1]

    def cell_glyph(self, code: int) -> str:
        """The character of a heatmap code where a line holds one row."""
        if code == READ_NOW:
            return self.glyphs.reading
        if code == DISCARDED:
            return self.glyphs.discarded
        if code == NOTHING:
            return self.glyphs.dot if self.depth is not Depth.NONE else self.glyphs.shades[0]
        if self.depth is Depth.FULL:
            return self.glyphs.full
        shades = self.glyphs.shades[1:]
        return shades[(code - 1) * len(shades) // LEVELS]

    def _colours(self) -> dict[str, str]:
        if self.depth is Depth.SIXTEEN:
            return _ANSI
        return _DARK if self.dark else _LIGHT


@lru_cache(1024)
def _style(palette: Palette, role: str) -> Style:
    if role == "":
        return Style()
    if role == "strong":
        return Style(bold=True)
    if role == "tab":
        return Style(bold=True, reverse=True)
    if "/" in role:
        upper, _, lower = role.partition("/")
        return _style(palette, upper) + _background(palette, lower)
    if role.startswith(CODE):
        return Style(color=palette.cell_colour(int(role.removeprefix(CODE))))
    if palette.depth is Depth.NONE:
        return _WITHOUT_COLOUR.get(role, Style())
    colour = palette._colours()[role]
    if role == "dim" and palette.depth is Depth.SIXTEEN:
        return Style(dim=True)
    return Style(color=colour, bold=role in ("lossy", "cursor", "bad"))


def _background(palette: Palette, role: str) -> Style:
    colour = _style(palette, role).color
    # An unfilled part of a bar must show where the bar ends, with or without colour.
    return Style(bgcolor=colour) if colour is not None else Style(underline=role == "trough")


@lru_cache(4096)
def pair_style(palette: Palette, upper: int, lower: int) -> Style:
    """The style of a character whose halves show two heatmap codes."""
    if not palette.halves:
        bold = palette.depth is Depth.NONE and upper in (READ_NOW, DISCARDED)
        return Style(color=palette.cell_colour(upper), bold=bold or None)
    return Style(color=palette.cell_colour(upper), bgcolor=palette.cell_colour(lower))


def part_role(part: int) -> str:
    """The role of a part of a token's time."""
    return PARTS[part]


def glyphs_for(encoding: str | None) -> Glyphs:
    """Unicode glyphs where the terminal's encoding has them, else ASCII."""
    try:
        UNICODE.upper_half.encode(encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return ASCII
    return UNICODE
