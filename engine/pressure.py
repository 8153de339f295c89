"""How large an automatic cache may be while the memory around it changes. Pure.

The cache gives memory back at once when the system has less than its floor, because the alternative
is that the system takes it (dense weights pushed out, swap, a kill). It grows again slowly and only
after a while of ease: every grown MiB costs reads before it saves any, and a program that needed
memory a moment ago may need it again.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import AUTO
from engine.telemetry import MIB

SMALLEST_FLOOR_BYTES, LARGEST_FLOOR_BYTES = 512 * MIB, 1536 * MIB
SMALLEST_SLACK_BYTES = 64 * MIB
LARGEST_SLACK_BYTES = 256 * MIB
EASE_S = 5.0
"""So long the system must have had room before the cache grows."""
STEP_S = 2.0
"""From one step of growing to the next."""
STEP_BYTES = 256 * MIB
"""Most that one step grows: together 128 MiB/s, a fraction of what a disk fills."""


def floor_bytes(floor_mb: int | str, total_bytes: int) -> int:
    """What `stream.cache-floor-mb` means where the machine, or its memory limit, has `total_bytes`.

    A floor is room for what others take before the cache notices: the smallest covers a gigabyte
    per second. In a small limit a large one costs more than it is worth: at 4 000 MiB, 1 536 for
    the system left two thirds of the speed.
    """
    if floor_mb == AUTO:
        return max(SMALLEST_FLOOR_BYTES, min(LARGEST_FLOOR_BYTES, total_bytes // 16))
    return int(floor_mb) * MIB


@dataclass(frozen=True)
class Bounds:
    """What an automatic cache keeps to, in bytes."""

    floor: int
    """Left to the system."""
    demand: int
    """One token's experts: a smaller cache never hits."""
    most: int
    """All experts, or the ceiling that was asked for."""

    @property
    def slack(self) -> int:
        """How far the system may be from its floor before anything changes: free memory is never
        still, and a cache that followed it would read again what it had just given up."""
        return max(SMALLEST_SLACK_BYTES, min(LARGEST_SLACK_BYTES, self.floor // 16))

    def fitting(self, resident: int, available: int) -> int:
        """The largest budget that, once filled, leaves the floor.

        `resident` is what the cache has taken already; what its budget promises beyond that is
        still part of `available`.
        """
        return max(self.demand, min(self.most, resident + available - self.floor))


class Pressure:
    """Decides the next budget from one look at the memory to the next."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._easy_since: float | None = None
        self._grown_at = float("-inf")

    def next_budget(self, budget: int, resident: int, available: int, now_s: float) -> int:
        """The budget from now on, in bytes; mostly the one there is.

        `available` is what a new allocation may take now, `now_s` any clock that does not go back.
        """
        bounds = self.bounds
        fitting = bounds.fitting(resident, available)
        lacking = budget + bounds.floor - resident - available
        if lacking > 0:
            self._easy_since = None
            return fitting if lacking >= bounds.slack else budget
        # Against the last part of the way, too: a step of a few pages is not worth a change.
        if fitting - budget < bounds.slack and fitting < bounds.most:
            self._easy_since = None
            return budget
        if self._easy_since is None:
            self._easy_since = now_s
        if now_s - self._easy_since < EASE_S or now_s - self._grown_at < STEP_S:
            return budget
        if fitting > budget:
            self._grown_at = now_s
        return min(fitting, budget + STEP_BYTES)
