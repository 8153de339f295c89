"""Intervals for means and quantiles of a text's tokens, by the moving-block bootstrap.

Neighbouring tokens are alike, so whole blocks of neighbours are drawn with replacement (Künsch
1989), about the cube root of the tokens long. The draws depend only on the number of tokens and
the seed: two settings measured over one text are resampled in step, so that their difference is a
paired one, and the same figures always come out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.stats import CONFIDENCE, FEWEST_TOKENS, Interval, block_for

Floats = npt.NDArray[np.float64]

RESAMPLES = 2000
QUANTILE_RESAMPLES = 500
"""A quantile sorts every resample; so many are enough for its interval's two digits."""
FEWEST_FOR_P99 = 100
"""With fewer tokens the 99th percentile is the largest one by another name."""

_CELLS_AT_ONCE = 2_000_000
"""Values held in memory at a time: 16 MB."""


@dataclass(frozen=True)
class Estimate:
    """A figure and the interval around it; None is unmeasured."""

    value: float | None
    low: float | None = None
    high: float | None = None

    @property
    def interval(self) -> Interval | None:
        """The interval, where there is one."""
        if self.low is None or self.high is None:
            return None
        return Interval(self.low, self.high)


class MovingBlocks:
    """One set of resamples of `n` tokens, to be applied to any of their figures."""

    def __init__(self, n: int, *, resamples: int = RESAMPLES, seed: int = 1) -> None:
        self.n = n
        self.block = min(block_for(n), n)
        self.reliable = n >= FEWEST_TOKENS
        """Whether there are enough tokens for an interval to mean anything."""
        n_blocks = -(-n // self.block)
        self._last = n - self.block * (n_blocks - 1)
        random = np.random.default_rng((seed, n))
        self._starts = random.integers(0, n - self.block + 1, (resamples, n_blocks), dtype=np.int32)

    def means(self, values: Floats) -> Floats:
        """The mean of each resample, shape (resamples,). `values`: (n,), finite."""
        sums = np.concatenate(([0.0], np.cumsum(values, dtype=np.float64)))
        whole = sums[self.block :] - sums[: -self.block]
        short = sums[self._last :] - sums[: -self._last]
        starts = self._starts
        totals = np.empty(len(starts))
        at_once = max(1, _CELLS_AT_ONCE // starts.shape[1])
        for first in range(0, len(starts), at_once):
            rows = starts[first : first + at_once]
            totals[first : first + at_once] = whole[rows[:, :-1]].sum(axis=1) + short[rows[:, -1]]
        result: Floats = totals / self.n
        return result

    def quantiles(self, values: Floats, q: float) -> Floats:
        """The `q` quantile of each of the first resamples, shape (QUANTILE_RESAMPLES or fewer,)."""
        starts = self._starts[:QUANTILE_RESAMPLES]
        found = np.empty(len(starts))
        steps = np.arange(self.block)
        at_once = max(1, _CELLS_AT_ONCE // self.n)
        for first in range(0, len(starts), at_once):
            places = starts[first : first + at_once, :, None] + steps
            drawn = values[places.reshape(len(places), -1)[:, : self.n]]
            found[first : first + at_once] = np.quantile(drawn, q, axis=1)
        return found

    def mean(self, values: Floats) -> Estimate:
        """The mean with its interval; without one where tokens are few or values infinite."""
        return self.estimate(float(values.mean()), values, self.means)

    def p99(self, values: Floats) -> Estimate:
        """The 99th percentile with its interval; unmeasured with fewer than 100 tokens."""
        if self.n < FEWEST_FOR_P99:
            return Estimate(None)
        return self.estimate(
            float(np.quantile(values, 0.99)), values, lambda drawn: self.quantiles(drawn, 0.99)
        )

    def estimate(self, value: float, values: Floats, resample: object) -> Estimate:
        """`value` with the interval of what `resample(values)` makes of each resample."""
        assert callable(resample)
        if not np.isfinite(values).all():
            return Estimate(value if np.isfinite(value) else None)
        return self.bounded(value, resample(values))

    def ratio(self, values: Floats, over: Floats) -> Estimate:
        """The ratio of two sums over the same tokens, resampled in step."""
        total = float(over.sum())
        if total <= 0:
            return Estimate(None)
        below = self.means(over)
        value = float(values.sum()) / total
        if not (below > 0).all():
            return Estimate(value)
        return self.bounded(value, self.means(values) / below)

    def bounded(self, value: float, resampled: Floats) -> Estimate:
        """`value` with the percentile interval of resampled values."""
        if not self.reliable:
            return Estimate(value)
        low, high = percentile_bounds(resampled)
        return Estimate(value, low, high)


def percentile_bounds(resampled: Floats) -> tuple[float, float]:
    """The bounds that hold the middle `CONFIDENCE` of resampled values."""
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(resampled, (tail, 1 - tail))
    return float(low), float(high)
