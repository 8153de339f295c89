"""How long the rest of a sweep takes: the cells of an arm take about as long as its others did."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import fmean

from tuiwork.sweep.plan import Cell


class Forecast:
    """The time left. `at_once` cells run side by side; cool-downs count like the cell."""

    def __init__(
        self,
        left: Sequence[Cell],
        finished: Sequence[tuple[Cell, float]] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._left = {cell.id: cell for cell in left}
        self._seconds: dict[str, list[float]] = {}
        for cell, seconds in finished:
            self._seconds.setdefault(cell.arm.letter, []).append(seconds)
        self._clock = clock
        self._since = clock()
        self.at_once = 1

    def finish(self, cell: Cell, seconds: float) -> None:
        """A cell has ended well, in so many seconds."""
        self._since = self._clock()
        self._seconds.setdefault(cell.arm.letter, []).append(seconds)
        self.drop(cell)

    def drop(self, cell: Cell) -> None:
        """A cell is not run any more."""
        self._left.pop(cell.id, None)

    def left_s(self) -> float | None:
        """Seconds until the last cell's end; None before any cell has ended."""
        known = {letter: fmean(seconds) for letter, seconds in self._seconds.items()}
        if not known:
            return None
        usual = fmean(known.values())
        total = sum(known.get(cell.arm.letter, usual) for cell in self._left.values())
        gone = (self._clock() - self._since) if self._left else 0.0
        return max(0.0, total / self.at_once - gone)
