"""Whether a ratio holds from round to round. Pure.

Tokens of one cell share its luck (another process woke up, the disk was busy), which resampling
tokens cannot see. So the rounds are the units here: the mean of their log ratios, with Student's t
interval for as few as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from engine.stats import Interval


def ratio_interval(ratios: Sequence[float], confidence: float) -> Interval:
    """The interval of the geometric mean of ratios, each of one round; all above 0.

    exp(mean ± t s / sqrt(n)) over their logarithms. Of one round nothing is known: 0 to infinity.
    """
    n = len(ratios)
    if n < 2:
        return Interval(0.0, math.inf)
    logs = np.log(np.asarray(ratios, np.float64))
    half = t_quantile(confidence, n - 1) * float(logs.std(ddof=1)) / math.sqrt(n)
    mean = float(logs.mean())
    return Interval(math.exp(mean - half), math.exp(min(mean + half, 700.0)))


def t_quantile(confidence: float, df: int) -> float:
    """What |T| stays below with this probability; T has Student's t distribution with `df`.

    By bisection on its distribution function.
    """
    low, high = 0.0, 1.0
    while _within(high, df) < confidence:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        if _within(middle, df) < confidence:
            low = middle
        else:
            high = middle
    return high


def _within(t: float, df: int) -> float:
    """P(|T| <= t), the closed form for whole degrees of freedom (Abramowitz, Stegun 26.7.3-4)."""
    theta = math.atan(t / math.sqrt(df))
    cos, sin = math.cos(theta), math.sin(theta)
    if df == 1:
        return 2 * theta / math.pi
    term = total = cos if df % 2 else 1.0
    for k in range(3 if df % 2 else 2, df - 1, 2):
        term *= cos * cos * (k - 1) / k
        total += term
    return 2 / math.pi * (theta + sin * total) if df % 2 else sin * total
