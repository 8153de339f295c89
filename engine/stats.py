"""Rates of token runs with intervals, and whether two runs differ.

A run is the times of its tokens in milliseconds. A rate is tokens over total time, never a mean of
rates. Intervals are bootstrap percentiles: the tokens are resampled with replacement, one by one,
or, because neighbouring tokens are alike, in moving blocks. Seeded, so that the same run always
gives the same digits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.errors import InputError

Milliseconds = Sequence[float] | npt.NDArray[np.float64]

RESAMPLES = 4000
CONFIDENCE = 0.95
FEWEST_TOKENS = 16
"""Below this many tokens on a side an interval says more about luck than about the setting."""

_CELLS_AT_ONCE = 2_000_000
"""Random draws held in memory at a time: 16 MB."""


@dataclass(frozen=True)
class Interval:
    """What lies between two bounds."""

    low: float
    high: float

    def contains(self, value: float) -> bool:
        """Whether `value` is not outside."""
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Rate:
    """A run's tokens per second and the interval around them."""

    tok_s: float
    interval: Interval
    n_tokens: int


@dataclass(frozen=True)
class Comparison:
    """Two runs: each one's rate, and how many times faster the second is."""

    before: Rate
    after: Rate
    ratio: float
    interval: Interval

    @property
    def separated(self) -> bool:
        """Whether the interval of the ratio leaves out 1: the difference is not just chance."""
        return not self.interval.contains(1.0)


class Resampled:
    """A run and its rate under each resampling, kept so that many pairs cost no more than runs.

    `block` is how many neighbours are drawn together; 1: independently. Raises InputError for a
    run without tokens or with times that are no times.
    """

    def __init__(
        self,
        token_ms: Milliseconds,
        *,
        block: int = 1,
        resamples: int = RESAMPLES,
        confidence: float = CONFIDENCE,
        seed: int = 1,
    ) -> None:
        self._confidence = confidence
        times = _checked(token_ms)
        # Draws of its own for each side of a ratio: with the same ones two runs of one length
        # would be compared in step.
        self._as_first, self._as_second = (
            _resampled_rates(times, block, resamples, _generator(seed, side)) for side in (0, 1)
        )
        tok_s = _tok_s(len(times), times.sum())
        self.rate = Rate(tok_s, _percentiles(self._as_first, confidence), len(times))
        self._rate_as_second = Rate(tok_s, _percentiles(self._as_second, confidence), len(times))

    def against(self, after: Resampled) -> Comparison:
        """Whether `after` is faster or slower than this run."""
        ratios = after._as_second / self._as_first
        interval = _percentiles(ratios, self._confidence)
        ratio = after.rate.tok_s / self.rate.tok_s
        return Comparison(self.rate, after._rate_as_second, ratio, interval)


def rate(
    token_ms: Milliseconds,
    *,
    block: int = 1,
    resamples: int = RESAMPLES,
    confidence: float = CONFIDENCE,
    seed: int = 1,
) -> Rate:
    """The rate of a run. `block` is how many neighbours are drawn together; 1: independently.

    Raises InputError for a run without tokens or with times that are no times.
    """
    times = _checked(token_ms)
    rates = _resampled_rates(times, block, resamples, _generator(seed, 0))
    return Rate(_tok_s(len(times), times.sum()), _percentiles(rates, confidence), len(times))


def compare(
    before_ms: Milliseconds,
    after_ms: Milliseconds,
    *,
    block: int = 1,
    resamples: int = RESAMPLES,
    confidence: float = CONFIDENCE,
    seed: int = 1,
) -> Comparison:
    """Whether the second run is faster or slower than the first. Raises InputError as `rate`."""
    before, after = (
        Resampled(run, block=block, resamples=resamples, confidence=confidence, seed=seed)
        for run in (before_ms, after_ms)
    )
    return before.against(after)


def block_for(n_tokens: int) -> int:
    """A usual length of blocks for correlated tokens: the cube root of their number."""
    return max(1, round(math.pow(n_tokens, 1 / 3)))


def _checked(token_ms: Milliseconds) -> npt.NDArray[np.float64]:
    times = np.asarray(token_ms, np.float64)
    if times.ndim != 1 or not len(times):
        raise InputError("a rate needs the times of at least one token")
    if not np.all(np.isfinite(times)) or not np.all(times > 0):
        raise InputError("a token's time must be a number above 0")
    return times


def _generator(seed: int, stream: int) -> np.random.Generator:
    return np.random.default_rng((seed, stream))


def _tok_s(n_tokens: int, total_ms: float) -> float:
    return float(1000 * n_tokens / total_ms)


def _percentiles(values: npt.NDArray[np.float64], confidence: float) -> Interval:
    tail = (1 - confidence) / 2
    low, high = np.quantile(values, (tail, 1 - tail))
    return Interval(float(low), float(high))


def _resampled_rates(
    times: npt.NDArray[np.float64], block: int, resamples: int, random: np.random.Generator
) -> npt.NDArray[np.float64]:
    """The rate of each resampled run; every one has as many tokens as the real run."""
    n = len(times)
    block = max(1, min(block, n))
    n_blocks = -(-n // block)
    last = n - block * (n_blocks - 1)
    sums = np.concatenate(([0.0], np.cumsum(times)))
    whole, short = sums[block:] - sums[:-block], sums[last:] - sums[:-last]
    totals = np.empty(resamples)
    at_once = max(1, _CELLS_AT_ONCE // n_blocks)
    for start in range(0, resamples, at_once):
        rows = min(at_once, resamples - start)
        drawn = random.integers(0, len(whole), (rows, n_blocks))
        totals[start : start + rows] = whole[drawn[:, :-1]].sum(axis=1) + short[drawn[:, -1]]
    return 1000 * n / totals
