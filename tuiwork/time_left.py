"""How long a measurement still takes, from how far it is."""

from __future__ import annotations

import time
from collections.abc import Callable

_FIRST_GUESS_AFTER = 0.01
"""Less than this much done says little about the rest."""


class TimeLeft:
    """Adds the time left to a progress bar's stage: `bar = TimeLeft(bar)`.

    Assumes that the rest goes as fast as what was done; says nothing until something was, and
    begins anew when the fraction falls back (another stage).
    """

    def __init__(
        self,
        show: Callable[[str, float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._show, self._clock = show, clock
        self._began: tuple[float, float] | None = None
        self._last = 0.0

    def __call__(self, stage: str, fraction: float) -> None:
        """Show that `stage` is this far."""
        now = self._clock()
        if self._began is None or fraction < self._last:
            self._began = now, fraction
        self._last = fraction
        began, first = self._began
        done = fraction - first
        if done >= _FIRST_GUESS_AFTER and fraction < 1:
            left = (now - began) / done * (1 - fraction)
            stage = f"{stage}, {spoken(left)} left"
        self._show(stage, fraction)


def spoken(seconds: float) -> str:
    """A duration as a person says it, rounded: `40 s`, `7 min`, `2 h 10 min`."""
    if seconds < 60:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest} min" if rest else f"{hours} h"
