"""Live counters: numbers that the engine writes and anybody may sample.

Arrays of int64, allocated by name, so that they can lie in memory shared with another process. The
engine writes without locks (one writer per cell); a reader that samples in between sees one cell
late, never a torn one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]
Allocate = Callable[[str, tuple[int, ...]], Counts]

ABSENT, RESIDENT, READING = 0, 1, 2
"""Values of `ExpertCounters.state`."""

MAX_LANES = 64
LATENCY_BUCKETS = 32
"""Read latencies are counted by powers of two of a microsecond."""


def private(_name: str, shape: tuple[int, ...]) -> Counts:
    """Allocate counters that nobody else samples."""
    return np.zeros(shape, np.int64)


class ExpertCounters:
    """What happened to each (routed layer, expert)."""

    def __init__(self, n_layer: int, n_expert: int, allocate: Allocate = private) -> None:
        shape = (n_layer, n_expert)
        self.state = allocate("state", shape)
        self.hits = allocate("hits", shape)
        self.misses = allocate("misses", shape)
        self.last_used = allocate("last_used", shape)
        """The decode, counted from 1, that last routed to the expert; 0: none yet."""
        self.last_discarded = allocate("last_discarded", shape)
        """The decode that last dropped or replaced it; 0: none yet."""


class RoutingCounters:
    """What became of routed experts, per routed layer."""

    def __init__(self, n_layer: int, allocate: Allocate = private) -> None:
        self.routed = allocate("routed", (n_layer,))
        self.examined = allocate("examined", (n_layer,))
        """Routed experts that the lossy rule looked at."""
        self.dropped = allocate("dropped", (n_layer,))
        self.substituted = allocate("substituted", (n_layer,))
        self.mass_discarded_ppb = allocate("mass_discarded_ppb", (n_layer,))
        """Router's share of what was dropped or replaced, in billionths of one routing."""
        self.routings = allocate("routings", (n_layer,))
        """Tokens routed, each of mass 1."""


class GuessCounters:
    """Experts that were read before they were routed to, per routed layer."""

    def __init__(self, n_layer: int, allocate: Allocate = private) -> None:
        self.named = allocate("guess_named", (n_layer,))
        """Experts that were guessed, in memory or not."""
        self.routed = allocate("guess_routed", (n_layer,))
        """Routed experts of the routings that were guessed."""
        self.right = allocate("guess_right", (n_layer,))
        """Of these, those that had been guessed."""
        self.read = allocate("guess_read", (n_layer,))
        """Experts that were read because of a guess."""
        self.used = allocate("guess_used", (n_layer,))
        """Of these, those that the layer then routed to."""
        self.late = allocate("guess_late", (n_layer,))
        """Of these, those that were not there in time."""


class LaneCounters:
    """What each I/O lane did; lane 0 is the callback's thread."""

    def __init__(self, allocate: Allocate = private) -> None:
        self.bytes = allocate("lane_bytes", (MAX_LANES,))
        self.reads = allocate("lane_reads", (MAX_LANES,))
        self.busy_ns = allocate("lane_busy_ns", (MAX_LANES,))
        self.latency_counts = allocate("lane_latency_counts", (MAX_LANES, LATENCY_BUCKETS))


class StoreCounters:
    """The cache as a whole, and the work of the callback's thread."""

    NAMES = (
        "clock",
        "hits",
        "misses",
        "evictions",
        "resident_bytes",
        "budget_bytes",
        "io_ns",
        "stall_ns",
        "mgmt_ns",
        "reads",
        "read_bytes",
    )

    def __init__(self, allocate: Allocate = private) -> None:
        self.totals = allocate("totals", (len(self.NAMES),))

    def publish(self, **values: int) -> None:
        """Write some of the totals."""
        for name, value in values.items():
            self.totals[self.NAMES.index(name)] = value


@dataclass
class StepCounters:
    """What one decode did on the callback's thread."""

    io_ns: int = 0
    """Time that lanes were busy."""
    stall_ns: int = 0
    """Time that the token waited for reads."""
    mgmt_ns: int = 0
    reads: int = 0
    read_bytes: int = 0
    routed: int = 0
    dropped: int = 0
    substituted: int = 0
    mass_discarded: float = 0.0
