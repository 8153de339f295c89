"""What the settings' figures say together: at equal reads saved, what costs less?

Each family of settings (drop, substitute, fewer experts) is a curve of KL divergence against reads
saved, from the lossless run at the origin. Pure. All of it is resampled over the same blocks of
tokens, reads and KL in step, so that intervals of differences are paired.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.quality_figures import SettingRun
from engine.quality_sets import COMBINED, DROP, DROP_RAW, LOSSLESS
from engine.quality_stats import Estimate, MovingBlocks, percentile_bounds

Floats = npt.NDArray[np.float64]

LEVELS = tuple(round(0.1 * step, 1) for step in range(1, 10))
"""Shares of the reads saved at which families are compared."""
_ENOUGH = 0.95
"""Share of the resamples that must reach a level for its interval to be given."""


@dataclass(frozen=True)
class CurvePoint:
    """One setting on its family's curve."""

    name: str
    strength: float
    reads_saved: float
    kl: float
    step_kl_per_pct: float | None
    """KL that each further percent of reads saved costs, since the point before (nats)."""


@dataclass(frozen=True)
class Curve:
    """A family's points by reads saved, without the origin."""

    family: str
    points: list[CurvePoint]


@dataclass(frozen=True)
class FamilyAt:
    """What a family costs at a level of reads saved, between its nearest settings."""

    family: str
    kl: Estimate


@dataclass(frozen=True)
class Level:
    """The families that reach a level of reads saved, the cheapest first."""

    reads_saved: float
    families: list[FamilyAt]
    separated: bool | None
    """Whether the cheapest is cheaper than the second by more than chance; None: unmeasured."""


@dataclass(frozen=True)
class RenormPair:
    """One drop fraction with and without renormalising."""

    fraction: float
    kl_with: float
    kl_without: float
    difference: Estimate
    """KL without minus KL with: above 0, renormalising helps."""
    reads_saved_with: float
    reads_saved_without: float

    @property
    def separated(self) -> bool | None:
        """Whether the difference is more than chance; None: unmeasured."""
        bounds = self.difference.interval
        return None if bounds is None else not bounds.contains(0.0)


@dataclass(frozen=True)
class Turn:
    """Where a family's curve turns: from cheap reads to dear ones."""

    family: str
    name: str
    strength: float
    agreement: float
    """Share of the resamples whose curve turns at the same setting."""


@dataclass(frozen=True)
class Verdicts:
    """The questions, answered as far as the measurements go."""

    curves: list[Curve]
    levels: list[Level]
    renormalising: list[RenormPair]
    turns: list[Turn]


class _Resampled:
    """A setting's reads saved and KL: as measured first, then of each resample."""

    def __init__(self, run: SettingRun, lossless: SettingRun, blocks: MovingBlocks) -> None:
        self.run = run
        kl, read, base = run.series["kl"], run.series["read_bytes"], lossless.series["read_bytes"]
        self.kl = np.concatenate(([kl.mean()], blocks.means(kl)))
        below = np.concatenate(([base.mean()], blocks.means(base)))
        above = np.concatenate(([read.mean()], blocks.means(read)))
        self.saved = 1 - np.divide(above, below, out=np.full_like(above, np.nan), where=below > 0)

    @property
    def known(self) -> bool:
        """Whether it can be a point of a curve."""
        return bool(np.isfinite(self.kl[0]) and np.isfinite(self.saved[0]))


def verdicts(runs: Sequence[SettingRun], lossless: SettingRun) -> Verdicts:
    """Curves, families at equal reads, renormalising and turns, from runs over the same tokens."""
    if not runs:
        return Verdicts([], [], [], [])
    blocks = MovingBlocks(lossless.n_tokens)
    families: dict[str, list[_Resampled]] = {}
    for run in runs:
        family = run.variant.family
        point = _Resampled(run, lossless, blocks)
        if family not in (LOSSLESS, COMBINED) and point.known:
            families.setdefault(family, []).append(point)
    for points in families.values():
        points.sort(key=lambda point: point.saved[0])
    return Verdicts(
        [Curve(family, _curve(points)) for family, points in families.items()],
        _levels(families, blocks),
        _renormalising(families, blocks),
        [turn for family, points in families.items() if (turn := _turn(family, points))],
    )


def _curve(points: Sequence[_Resampled]) -> list[CurvePoint]:
    found, saved_before, kl_before = [], 0.0, 0.0
    for point in points:
        saved, kl = float(point.saved[0]), float(point.kl[0])
        gained = 100 * (saved - saved_before)
        slope = (kl - kl_before) / gained if gained > 0 else None
        variant = point.run.variant
        found.append(CurvePoint(variant.name, variant.strength, saved, kl, slope))
        saved_before, kl_before = saved, kl
    return found


def _levels(families: dict[str, list[_Resampled]], blocks: MovingBlocks) -> list[Level]:
    at = {family: _interpolated(points) for family, points in families.items()}
    levels = []
    for column, level in enumerate(LEVELS):
        reached = {family: kl[:, column] for family, kl in at.items() if np.isfinite(kl[0, column])}
        if not reached:
            continue
        order = sorted(reached, key=lambda family: reached[family][0])
        separated = None
        if len(order) > 1:
            gap = _estimate(reached[order[1]] - reached[order[0]], blocks)
            separated = None if gap.interval is None else not gap.interval.contains(0.0)
        costs = [FamilyAt(family, _estimate(reached[family], blocks)) for family in order]
        levels.append(Level(level, costs, separated))
    return levels


def _interpolated(points: Sequence[_Resampled]) -> Floats:
    """KL at each of LEVELS, shape (1 + resamples, levels); NaN beyond the furthest point."""
    saved = np.stack([point.saved for point in points], axis=1)
    kl = np.stack([point.kl for point in points], axis=1)
    found = np.full((len(saved), len(LEVELS)), np.nan)
    for row in range(len(saved)):
        order = np.argsort(saved[row])
        x = np.concatenate(([0.0], saved[row][order]))
        y = np.concatenate(([0.0], kl[row][order]))
        # A setting that saves nothing is no point beyond the origin.
        kept = np.concatenate(([True], x[1:] > 0))
        found[row] = np.interp(LEVELS, x[kept], y[kept], right=np.nan)
    return found


def _renormalising(families: dict[str, list[_Resampled]], blocks: MovingBlocks) -> list[RenormPair]:
    raw = {point.run.variant.strength: point for point in families.get(DROP_RAW, [])}
    pairs = []
    for point in families.get(DROP, []):
        other = raw.get(point.run.variant.strength)
        if other is None:
            continue
        pairs.append(
            RenormPair(
                point.run.variant.strength,
                float(point.kl[0]),
                float(other.kl[0]),
                _estimate(other.kl - point.kl, blocks),
                float(point.saved[0]),
                float(other.saved[0]),
            )
        )
    return sorted(pairs, key=lambda pair: pair.fraction)


def _turn(family: str, points: Sequence[_Resampled]) -> Turn | None:
    """The knee of a curve (Satopää et al. 2011): the point furthest below the chord.

    The chord runs from the origin to the strongest setting. None with fewer than three points, or
    where no point lies below the chord: then the curve does not turn from cheap to dear.
    """
    if len(points) < 3:
        return None
    saved = np.stack([point.saved for point in points], axis=1)
    kl = np.stack([point.kl for point in points], axis=1)
    if saved[0, -1] <= 0 or kl[0].max() <= 0:
        return None
    # A resample in which the strongest setting saves or costs nothing has no chord, and no turn.
    has_chord = (saved[:, -1] > 0) & (kl[:, -1] > 0)
    below = np.zeros_like(saved)
    below[has_chord] = saved[has_chord] / saved[has_chord, -1:] - kl[has_chord] / kl[has_chord, -1:]
    place = int(below[0].argmax())
    if below[0, place] <= 0:
        return None
    agreement = float((has_chord[1:] & (below[1:].argmax(axis=1) == place)).mean())
    variant = points[place].run.variant
    return Turn(family, variant.name, variant.strength, agreement)


def _estimate(values: Floats, blocks: MovingBlocks) -> Estimate:
    """The measured value and the interval of its resamples, where enough of them have one."""
    resampled = values[1:][np.isfinite(values[1:])]
    if not blocks.reliable or len(resampled) < _ENOUGH * (len(values) - 1):
        return Estimate(float(values[0]))
    return Estimate(float(values[0]), *percentile_bounds(resampled))
