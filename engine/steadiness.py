"""Whether a run is one piece: a slow start to cut off, and drift. Pure; times in milliseconds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.stats import CONFIDENCE, FEWEST_TOKENS, Resampled, block_for

FloatArray = npt.NDArray[np.float64]

SLOW_START = 1.1
"""How many times slower than any later stretch of its length a warm-up is.

With 1.0 one in eight steady runs would be said to have one.
"""

WORTH_CUTTING = 0.02
"""A slow start that moves the rate by a smaller share is left alone."""

QUARTERS = 4
DRIFT = 0.1
"""A rate that changes by a smaller share from quarter to quarter is steady."""

_PLACES_TRIED = 100


def warm_up(token_ms: FloatArray) -> int:
    """How many of the first tokens are a warm-up: 0, or up to a quarter of all.

    Looked for is where the means before and behind differ most, weighed by their tokens (a least
    squares change point), among the places where the part before moves the rate and is clearly
    slower than every later stretch of its length.
    """
    n = len(token_ms)
    sums = np.concatenate(([0.0], np.cumsum(token_ms)))
    sizes = np.arange(1, n // 4 + 1)
    before, behind = sums[sizes] / sizes, (sums[n] - sums[sizes]) / (n - sizes)
    clear = sums[n] / n >= (1 + WORTH_CUTTING) * behind
    gains = (before - behind) ** 2 * sizes * (n - sizes)
    best_first = np.argsort(-gains[clear], kind="stable")[:_PLACES_TRIED]
    for cut in sizes[clear][best_first]:
        later = (sums[2 * cut :] - sums[cut:-cut]) / cut
        if before[cut - 1] >= SLOW_START * later.max():
            return int(cut)
    return 0


@dataclass(frozen=True)
class Drift:
    """The two quarters of a run, counted from 0, whose rates differ most."""

    slowest: int
    slowest_tok_s: float
    fastest: int
    fastest_tok_s: float


def drift(token_ms: FloatArray) -> Drift | None:
    """How a run's rate changes from quarter to quarter; None if it may be chance, or little.

    Any two quarters are compared by moving blocks, with intervals so much wider (Bonferroni) that
    all of them together hold as often as one.
    """
    if len(token_ms) < QUARTERS * FEWEST_TOKENS:
        return None
    parts = np.array_split(token_ms, QUARTERS)
    rates = [1000 / float(part.mean()) for part in parts]
    slowest, fastest = int(np.argmin(rates)), int(np.argmax(rates))
    if rates[fastest] / rates[slowest] < 1 + DRIFT:
        return None
    confidence = 1 - (1 - CONFIDENCE) / math.comb(QUARTERS, 2)
    slow, fast = (
        Resampled(parts[n], block=2 * block_for(len(parts[n])), confidence=confidence)
        for n in (slowest, fastest)
    )
    if not slow.against(fast).separated:
        return None
    return Drift(slowest, rates[slowest], fastest, rates[fastest])
