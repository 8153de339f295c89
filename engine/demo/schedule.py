"""How far training is, by steps or by time, and how fast it learns there."""

from __future__ import annotations

import math
import statistics
from collections import deque

_WARM_UP = 60
_LAST = 0.01


class Schedule:
    """Progress from 0 to 1 that ends when the time is up, however the machine is shared.

    Each step takes the share of what is left that it took of the time left. A step that took much
    longer than the others, because the process was stopped, counts as a few of them; and of the
    time to a fixed end only that part counts during which the process will run, if it is stopped
    as often as it was.
    """

    def __init__(self, progress: float, steps: int | None, minutes: float | None) -> None:
        """`steps` and `minutes` are those still to come; None is no limit."""
        self.progress = progress
        self._steps, self._seconds = steps, None if minutes is None else 60 * minutes
        self._recent: deque[float] = deque(maxlen=21)
        self._worked = self._passed = 60.0

    def advance(self, seconds: float, until: float | None = None) -> None:
        """A step is done that took so long; `until` is seconds to a fixed end."""
        self._recent.append(seconds)
        self._passed += seconds
        seconds = min(seconds, 3 * statistics.median(self._recent))
        self._worked += seconds
        shares = [0.0]
        if self._steps is not None:
            shares.append(1 / max(1, self._steps))
            self._steps -= 1
        if until is not None:
            until *= self._worked / self._passed
        lefts = [left for left in (self._seconds, until) if left is not None]
        if lefts:
            shares.append(min(1.0, seconds / max(min(lefts), 1e-3)))
        if self._seconds is not None:
            self._seconds -= seconds
        self.progress += (1 - self.progress) * max(shares)

    @property
    def done(self) -> bool:
        """Whether nothing is left."""
        return self.progress >= 0.9995

    def factor(self, step: int) -> float:
        """The share of the full learning rate: warmup, then a cosine down to almost nothing."""
        cosine = _LAST + (1 - _LAST) * 0.5 * (1 + math.cos(math.pi * min(1.0, self.progress)))
        return min(1.0, (step + 1) / _WARM_UP) * cosine
