"""What the live counters say between two samples: amounts per second, latencies, lanes at work."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.counters import StoreCounters
from tuiwork.meters.ring import Ring

Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

HISTORY = 600
"""A minute at ten samples per second: as much as the widest screen shows."""

_SMOOTHING_S = 1.0
"""Rates are over this time: one tick often holds no read or a whole layer's."""


class Counters(Protocol):
    """Live counter arrays by name (engine/counters.py), written by another process."""

    def __getitem__(self, name: str) -> Counts:
        """The array, always the same one."""
        ...

    def __contains__(self, name: str) -> bool:
        """Whether there is such an array: a model that does not stream has only totals."""
        ...


@dataclass(frozen=True)
class AheadTotals:
    """Experts that were read before they were routed to (engine.counters.GuessCounters)."""

    read: int
    used: int
    late: int

    @classmethod
    def of(cls, counters: Counters) -> AheadTotals | None:
        """What they say now; None where nothing was read ahead."""
        if "guess_read" not in counters or not counters["guess_read"].any():
            return None
        read, used, late = (int(counters[f"guess_{n}"].sum()) for n in ("read", "used", "late"))
        return cls(read, used, late)


@dataclass(frozen=True)
class Totals:
    """The cache as a whole at one moment (engine.counters.StoreCounters)."""

    clock: int
    hits: int
    misses: int
    evictions: int
    resident_bytes: int
    budget_bytes: int
    io_ns: int
    stall_ns: int
    mgmt_ns: int
    reads: int
    read_bytes: int

    @classmethod
    def of(cls, counters: Counters) -> Totals:
        """What the totals say now."""
        values = dict(zip(StoreCounters.NAMES, counters["totals"].tolist(), strict=True))
        return cls(**{name: values[name] for name in cls.__dataclass_fields__})

    @property
    def hit_share(self) -> float:
        """Hits among lookups so far; NaN before the first."""
        looked_up = self.hits + self.misses
        return self.hits / looked_up if looked_up else float("nan")


@dataclass(frozen=True)
class LaneSample:
    """The lanes' counters at one moment."""

    at_s: float
    bytes: Counts
    reads: Counts
    busy_ns: Counts
    latency_counts: Counts

    @classmethod
    def of(cls, counters: Counters, at_s: float) -> LaneSample:
        """Copies of the counters, so that later samples can be compared with them."""
        return cls(
            at_s,
            counters["lane_bytes"].copy(),
            counters["lane_reads"].copy(),
            counters["lane_busy_ns"].copy(),
            counters["lane_latency_counts"].copy(),
        )


@dataclass(frozen=True)
class LaneRates:
    """What each lane did per second; arrays by lane."""

    bytes_per_s: Floats
    reads_per_s: Floats
    in_flight: Floats
    """Reads that each lane had under way, on average: 1 is always busy."""

    @property
    def total_bytes_per_s(self) -> float:
        """All lanes together."""
        return float(self.bytes_per_s.sum())


def rates_between(before: LaneSample, after: LaneSample) -> LaneRates | None:
    """What happened between two samples; None if no time passed or the engine restarted."""
    seconds = after.at_s - before.at_s
    if seconds <= 0 or (after.reads < before.reads).any():
        return None
    return LaneRates(
        (after.bytes - before.bytes) / seconds,
        (after.reads - before.reads) / seconds,
        (after.busy_ns - before.busy_ns) / (seconds * 1e9),
    )


def latency_ms(counts: Counts, quantile: float) -> float:
    """A quantile of latencies counted by powers of two of a microsecond; NaN without any.

    Bucket b holds what took from 2^(b-1) to 2^b µs; inside a bucket latencies are taken to be
    spread evenly on a logarithmic scale.
    """
    total = int(counts.sum())
    if total == 0:
        return float("nan")
    wanted = quantile * total
    below = np.concatenate(([0], np.cumsum(counts)))
    bucket = int(np.searchsorted(below[1:], wanted, side="left"))
    bucket = min(bucket, len(counts) - 1)
    share = (wanted - below[bucket]) / max(int(counts[bucket]), 1)
    return float(2.0 ** (bucket - 1 + share) / 1000)


@dataclass
class LaneMeter:
    """The lanes over time: rates smoothed over a second, and their history."""

    rates: LaneRates | None = None
    best_bytes_per_s: float = float("nan")
    """The most that all lanes together gave over a second."""
    total_history: Ring = field(default_factory=lambda: Ring(HISTORY))
    """MiB per second of each tick."""
    lane_history: list[Ring] = field(default_factory=list)
    _samples: list[LaneSample] = field(default_factory=list)

    @property
    def latest(self) -> LaneSample | None:
        """The newest sample."""
        return self._samples[-1] if self._samples else None

    @property
    def n_lanes(self) -> int:
        """Lanes that ever read, counted up to the highest."""
        latest = self.latest
        if latest is None:
            return 0
        used = np.flatnonzero(latest.reads)
        return int(used[-1]) + 1 if len(used) else 0

    def push(self, sample: LaneSample) -> None:
        """Take in one tick's counters."""
        previous = self.latest
        tick = rates_between(previous, sample) if previous is not None else None
        if previous is not None and tick is None:
            if sample.at_s > previous.at_s:
                self.forget()
                self._samples = [sample]
            return
        self._samples.append(sample)
        while len(self._samples) > 2 and self._samples[1].at_s <= sample.at_s - _SMOOTHING_S:
            del self._samples[0]
        if tick is not None:
            self._note(tick)

    def forget(self) -> None:
        """Begin anew, as for another model."""
        self.rates = None
        self.best_bytes_per_s = float("nan")
        self.total_history.clear()
        self.lane_history = []
        self._samples = []

    def latency_counts(self) -> Counts | None:
        """Latencies so far, by lane and bucket."""
        return self.latest.latency_counts if self.latest is not None else None

    def _note(self, tick: LaneRates) -> None:
        self.rates = rates_between(self._samples[0], self._samples[-1])
        self.total_history.push(tick.total_bytes_per_s)
        while len(self.lane_history) < self.n_lanes:
            self.lane_history.append(Ring(HISTORY))
        for lane, history in enumerate(self.lane_history):
            history.push(float(tick.bytes_per_s[lane]))
        whole_second = self._samples[-1].at_s - self._samples[0].at_s >= 0.9 * _SMOOTHING_S
        if self.rates is not None and whole_second:
            now = self.rates.total_bytes_per_s
            self.best_bytes_per_s = float(np.fmax(self.best_bytes_per_s, now))
