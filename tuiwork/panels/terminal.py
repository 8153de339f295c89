"""What this terminal can show: how many colours, which characters."""

from __future__ import annotations

import sys
from typing import Any

from textual.app import App

from tuiwork.meters.glyphs import ASCII, Glyphs
from tuiwork.panels.palette import Depth, Palette, glyphs_for


def palette_of(app: App[Any], glyphs: Glyphs | None = None, depth: Depth | None = None) -> Palette:
    """The palette for an app under its theme, on its terminal or on one that is pretended."""
    if glyphs is None:
        glyphs = glyphs_for(getattr(sys.__stdout__, "encoding", None))
    return Palette(depth or _depth(app), app.current_theme.dark, glyphs)


def is_ascii(palette: Palette) -> bool:
    """Whether borders must be drawn with letters, too."""
    return palette.glyphs is ASCII


def _depth(app: App[Any]) -> Depth:
    if app.no_color:
        return Depth.NONE
    system = app.console.color_system
    if system in ("standard", "windows"):
        return Depth.SIXTEEN
    return Depth.FULL
