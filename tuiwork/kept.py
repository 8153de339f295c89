"""Widgets whose drawn lines are kept for as long as nothing about them changes.

Textual draws a partial update over the rectangle around everything that changed, and asks every
widget in it for all of its lines. With a status line above and a panel below that is the whole
screen ten times a second, and handing out unchanged lines was half of what the app took of a core.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from textual.geometry import Region
from textual.strip import Strip

if TYPE_CHECKING:
    from textual.widget import Widget as _Beside
else:
    # Textual reads a widget's style sheets along its first base that is a widget.
    _Beside = object


class KeptLines(_Beside):
    """Put it before the widget's class. A widget that draws itself anew says so as ever."""

    _kept: list[Strip] | None = None
    _kept_for: tuple[Any, ...] = ()

    def _set_dirty(self, *regions: Region) -> None:
        # Private to Textual, but the one place that everything passes which changes what is drawn:
        # `refresh`, styles, sizes. `tests/test_app_meters.py` notices if that ever changes.
        self._kept = None
        super()._set_dirty(*regions)

    def render_lines(self, crop: Region) -> list[Strip]:
        """The lines as drawn last, if they still are what would be drawn."""
        drawn_for = (crop, self.size, *self.get_line_filters())
        if self._kept is None or self._kept_for != drawn_for:
            self._kept, self._kept_for = self.draw_lines(crop), drawn_for
        return self._kept

    def draw_lines(self, crop: Region) -> list[Strip]:
        """Draw the lines of `crop`."""
        return super().render_lines(crop)
