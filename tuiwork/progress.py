"""A progress bar on stderr, for a person who waits; nothing where nobody looks."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from engine.closing import Closing
from tuiwork.text import one_line

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_REDRAW_S = 0.1
_SHOW_AFTER_S = 0.3
"""What is done sooner needs no bar."""


class ProgressBar(Closing):
    """One bar that shows the stage at work: `with ProgressBar() as bar: work(progress=bar)`.

    Called with a stage's name and its fraction from 0 to 1, at any rate and from one thread.
    """

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()
        self._started = time.monotonic()
        self._last_drawn = 0.0
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __call__(self, stage: str, fraction: float) -> None:
        """Show that `stage` is this far."""
        now = time.monotonic()
        done = fraction >= 1
        if not self._shown or now - self._started < _SHOW_AFTER_S:
            return
        if now - self._last_drawn < _REDRAW_S and not done:
            return
        self._last_drawn = now
        if self._bar is None:
            self._open(stage)
        assert self._bar is not None and self._task is not None
        self._bar.update(self._task, description=one_line(stage), completed=min(1.0, fraction))
        self._bar.refresh()

    def close(self) -> None:
        """Take the bar off the screen, so that text can follow. It opens again when called."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self._started = time.monotonic()

    def _open(self, stage: str) -> None:
        # Imported here: it costs more than the rest of the start.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        # A refresh thread of its own would compete with the callback for Python's lock.
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            console=Console(stderr=True),
            transient=True,
            auto_refresh=False,
        )
        self._task = self._bar.add_task(one_line(stage), total=1.0)
        self._bar.start()
