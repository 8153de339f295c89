"""Lines of the heatmap: runs of equal cells, each made once, as segments and as sent text.

A line changes several times a second and has a hundred runs. Textual would style, filter and
render every one of them anew; here a line is put together from runs that are known.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.color import ColorSystem
from rich.console import Console
from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter
from textual.strip import Strip

_SYSTEMS = {
    "standard": ColorSystem.STANDARD,
    "256": ColorSystem.EIGHT_BIT,
    "truecolor": ColorSystem.TRUECOLOR,
    "windows": ColorSystem.WINDOWS,
}
_RESET = "\x1b[0m"


class Run:
    """Cells of one kind beside each other."""

    def __init__(self, segment: Segment, console: Console) -> None:
        self.segment = segment
        self.sent = _sent(segment, console)
        """What the terminal is sent: its colours hold until the next run's."""


class MapLine(Strip):
    """A whole line; cut to pieces, as under a dialog, it is a strip like any other."""

    __slots__ = ("_sent",)

    def __init__(self, left: Strip, runs: list[Run], right: Strip, cell_length: int) -> None:
        super().__init__([*left, *(run.segment for run in runs), *right], cell_length)
        self._sent = (left, "".join([run.sent for run in runs]), right)

    def render(self, console: Console) -> str:
        """The line as the terminal is sent it."""
        left, runs, right = self._sent
        return f"{left.render(console)}{runs}{_RESET}{right.render(console)}"


def plain_line(
    left: Strip, runs: list[Run], right: Strip, filters: Iterable[LineFilter], background: Color
) -> Strip:
    """The line as Textual makes one: for colours that its filters must see."""
    middle = Strip([run.segment for run in runs])
    for line_filter in filters:
        middle = middle.apply_filter(line_filter, background)
    return Strip.join([left, middle, right])


def _sent(segment: Segment, console: Console) -> str:
    text, style, _ = segment
    system = _SYSTEMS.get(console.color_system or "", ColorSystem.TRUECOLOR)
    if style is None:
        return text
    if style.bold or style.dim or style.reverse:
        return Strip.render_style(style, text, system)
    return f"\x1b[{Strip.render_ansi(style, system)}m{text}"
