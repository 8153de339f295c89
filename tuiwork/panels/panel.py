"""A panel: some lines that it makes anew at every tick, of which only the changed are drawn.

A panel's text comes from models and files, so it is never read as markup: a line is a list of
(text, role) pairs, the role naming a style of the palette.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, TypeAlias

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from tuiwork.kept import KeptLines
from tuiwork.meters.meters import Meters
from tuiwork.panels.palette import Palette

Span: TypeAlias = "tuple[str, str]"
Line: TypeAlias = "list[Span]"


class Panel(KeptLines, Widget, can_focus=True):
    """One live view of the engine."""

    DEFAULT_CSS = """
    Panel {
        border: round $foreground 25%;
        border-title-color: $foreground 70%;
        border-subtitle-color: $foreground 55%;
        padding: 0 1;
        height: 1fr;
        width: 1fr;
        &:focus {
            border: round $accent;
            border-title-color: $accent;
        }
    }
    """
    ALLOW_SELECT = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "app.leave_panel", "Back", id="panel.back", show=False),
    ]

    TITLE: ClassVar[str] = ""
    TAB: ClassVar[str] = ""
    """The title where there is no room for it."""
    EVERY: ClassVar[int] = 5
    """It is made anew at every so-manieth tick: digits that change faster cannot be read, and
    each panel drawn makes the terminal's whole share of the screen dearer."""
    HELP: ClassVar[str] = ""
    """What the panel shows, for the help screen."""

    def __init__(self, meters: Meters, palette: Palette, *, id: str) -> None:
        super().__init__(id=id)
        self.meters = meters
        self.palette = palette
        self._strips: list[Strip] = []
        self._shown: list[Line] = []
        self.border_title = self.title()

    def title(self) -> str:
        """The words in the border; no markup."""
        return self.TITLE

    def lines(self, width: int, height: int) -> list[Line]:
        """What to show in so many columns and lines."""
        raise NotImplementedError

    def use_palette(self, palette: Palette) -> None:
        """Draw with other colours from now on."""
        self.palette = palette
        self._shown = []
        self.update_lines()

    def on_tick(self, tick: int) -> None:
        """Make the lines anew if it is this panel's turn."""
        if tick % self.EVERY == 0 and self.is_on_screen:
            self.update_lines()

    def update_lines(self) -> None:
        """Make the lines anew and draw those that changed."""
        width, height = self.content_size
        if not (width and height and self.is_mounted):
            return
        lines = self.lines(width, height)[:height]
        lines += [[] for _ in range(height - len(lines))]
        whole = len(lines) != len(self._shown)
        if whole:
            self._strips = [self._strip(line, width) for line in lines]
            self.refresh()
        else:
            self._draw_changed(lines, width)
        self._shown = lines

    def render_line(self, y: int) -> Strip:
        """The line as last made."""
        if y < len(self._strips):
            return self._strips[y].apply_style(self.visual_style.rich_style)
        return Strip.blank(self.size.width, self.visual_style.rich_style)

    def on_resize(self, _event: events.Resize) -> None:
        """Another size is another set of lines."""
        self._shown = []
        self.update_lines()

    def refresh_line(self, y: int) -> None:
        """Draw one line of the content anew.

        With its borders: a line that is drawn whole needs no cropping, which costs more.
        """
        left = self.gutter.left
        self.refresh(Region(-left, y, self.outer_size.width, 1))

    def _draw_changed(self, lines: Sequence[Line], width: int) -> None:
        for y, line in enumerate(lines):
            if line != self._shown[y]:
                self._strips[y] = self._strip(line, width)
                self.refresh_line(y)

    def _strip(self, line: Line, width: int) -> Strip:
        segments = [Segment(text, self.palette.style(role)) for text, role in line if text]
        return Strip(segments).adjust_cell_length(width, Style())


def line_width(line: Line) -> int:
    """Columns that a line takes."""
    return sum(cell_len(text) for text, _ in line)


def between(left: Line, right: Line, width: int) -> Line:
    """`left`, and `right` at the other end of the line; `right` goes where both do not fit."""
    room = width - line_width(left) - line_width(right)
    return [*left, (" " * room, ""), *right] if room >= 1 else left


def joined(parts: Sequence[Line], gap: str = "  ") -> Line:
    """Parts one after another."""
    line: Line = []
    for part in parts:
        if line and part:
            line.append((gap, ""))
        line += part
    return line


def fitting(parts: Sequence[Line], width: int, gap: str = "  ") -> Line:
    """As many parts, in their order, as fit into `width`."""
    return joined(parts[: _n_fitting(parts, width, gap)], gap)


def wrapped(parts: Sequence[Line], width: int, gap: str = "  ") -> list[Line]:
    """All parts, on as many lines as they take; one that is too wide has a line to itself."""
    lines: list[Line] = []
    while parts:
        n = max(1, _n_fitting(parts, width, gap))
        lines.append(joined(parts[:n], gap))
        parts = parts[n:]
    return lines


def _n_fitting(parts: Sequence[Line], width: int, gap: str) -> int:
    used = -len(gap)
    for n, part in enumerate(parts):
        used += len(gap) + line_width(part)
        if used > width:
            return n
    return len(parts)
