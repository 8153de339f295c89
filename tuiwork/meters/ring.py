"""The latest values of a series, in a fixed amount of memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Ring:
    """The latest `capacity` numbers; unmeasured ones are NaN."""

    def __init__(self, capacity: int) -> None:
        # Twice the capacity, so that the latest values always lie in one piece.
        self._values = np.full(2 * capacity, np.nan)
        self._capacity = capacity
        self._end = 0

    def __len__(self) -> int:
        return min(self._end, self._capacity)

    def push(self, value: float) -> None:
        """Add the newest value; the oldest goes when the ring is full."""
        if self._end == len(self._values):
            self._values[: self._capacity] = self._values[-self._capacity :]
            self._end = self._capacity
        self._values[self._end] = value
        self._end += 1

    def latest(self, n: int | None = None) -> Floats:
        """The newest `n` values, oldest first; fewer if there are fewer."""
        n = len(self) if n is None else min(n, len(self))
        return self._values[self._end - n : self._end]

    def clear(self) -> None:
        """Forget all values."""
        self._end = 0
