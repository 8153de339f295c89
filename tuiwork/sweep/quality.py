"""Quality beside speed: which measured quality belongs to which arm, and who is worth having.

Reads what `tuiwork quality --json` writes: `settings: [{name, settings, kl_mean, …}]`, where
`settings` are the routing settings that differ from the lossless run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from engine.errors import InputError
from engine.quality_sets import FRACTION, LOSSLESS_ROUTING, variant
from tuiwork.sweep.results import ArmResult

KL, MASS = "KL divergence from the lossless run, nats", "routing weight dropped or replaced, %"


@dataclass(frozen=True)
class Measured:
    """Mean KL divergence of one setting from the lossless run, in nats per token."""

    name: str
    kl_mean: float
    kl_low: float | None
    kl_high: float | None


@dataclass(frozen=True)
class QualityFile:
    """What a quality document says."""

    path: Path
    model: str
    """The file's name of the model it is about; empty: not told."""
    by_settings: Mapping[str, Measured]
    """By the normalised routing settings."""
    cache_mb: str = ""
    """The cache it was measured with, in MiB; empty: not told."""

    def of(self, arm: ArmResult) -> Measured | None:
        """What was measured of an arm's settings with its model."""
        model = PurePath(str(arm.arm.settings["model.path"])).name
        if self.model and self.model != model:
            return None
        routing = {key: arm.arm.settings[key] for key in LOSSLESS_ROUTING}
        return self.by_settings.get(_key(routing))


@dataclass(frozen=True)
class Point:
    """An arm's speed and what it costs."""

    arm: ArmResult
    cost: float
    cost_low: float | None
    cost_high: float | None
    on_front: bool
    """Whether no other arm is both faster and cheaper."""


@dataclass(frozen=True)
class Front:
    """Speed against quality."""

    measure: str
    points: tuple[Point, ...]
    unknown: tuple[str, ...]
    """Letters of arms whose cost is not known."""
    note: str = ""
    """What makes the costs those of other runs, or empty."""


def read_quality(path: Path) -> QualityFile:
    """The quality figures in a file. Raises InputError."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        settings = [_entry(entry) for entry in _entries(document)]
        model = document.get("model")
        name = model.get("path") or model.get("name") if isinstance(model, dict) else model
        cache = document.get("config", {}).get("stream", {}).get("cache-mb", "")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"--quality {path}: cannot be read: {reason}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"--quality {path}: is not what `tuiwork quality --json` writes: {error}"
        ) from None
    return QualityFile(path, PurePath(str(name or "")).name, dict(settings), str(cache))


def front(arms: Sequence[ArmResult], quality: QualityFile | None) -> Front:
    """Which arms are worth having: by divergence where measured, else by the weight left out."""
    costs = {arm.arm.letter: _cost(arm, quality) for arm in arms}
    known = [(arm, cost) for arm in arms if (cost := costs[arm.arm.letter]) is not None]
    points = tuple(
        Point(
            arm,
            *cost,
            on_front=not any(
                _dominates((other, other_cost[0]), (arm, cost[0])) for other, other_cost in known
            ),
        )
        for arm, cost in known
    )
    unknown = tuple(letter for letter, cost in costs.items() if cost is None)
    if quality is None:
        return Front(MASS, points, unknown)
    return Front(KL, points, unknown, _cache_note([arm for arm, _ in known], quality))


def _cache_note(arms: Sequence[ArmResult], quality: QualityFile) -> str:
    """What is dropped depends on what the cache holds, so the cost does on its size."""
    other = [
        arm.arm.letter
        for arm in arms
        if arm.arm.settings[FRACTION] and quality.cache_mb and _caches(arm) != {quality.cache_mb}
    ]
    if not other:
        return ""
    return (
        f"Measured with a cache of {quality.cache_mb} MiB, and what is dropped depends on that; "
        f"run with another: {', '.join(other)}"
    )


def _caches(arm: ArmResult) -> set[str]:
    resolved = [cell.finished.record.get("resolved") or {} for cell in arm.cells]
    return {str(config.get("stream", {}).get("cache-mb")) for config in resolved}


def _dominates(one: tuple[ArmResult, float], other: tuple[ArmResult, float]) -> bool:
    """Whether one arm is at least as fast and as cheap as the other, and better in one."""
    (arm, cost), (other_arm, other_cost) = one, other
    speed, other_speed = arm.pooled.rate.tok_s, other_arm.pooled.rate.tok_s
    as_good = speed >= other_speed and cost <= other_cost
    return as_good and (speed > other_speed or cost < other_cost)


def _cost(
    arm: ArmResult, quality: QualityFile | None
) -> tuple[float, float | None, float | None] | None:
    routing = {key: arm.arm.settings[key] for key in LOSSLESS_ROUTING}
    if not variant(routing).settings:
        return 0.0, None, None  # lossless: equal to the lossless run by definition
    if quality is not None:
        found = quality.of(arm)
        return None if found is None else (found.kl_mean, found.kl_low, found.kl_high)
    if arm.arm.settings["routing.n-expert-used"]:
        return None  # what fewer experts leave out is not counted as discarded
    lost = arm.pooled.mass_lost_pct
    return None if lost is None else (lost, None, None)


def _entries(document: Any) -> list[Any]:
    entries = list(document["settings"])
    reference = document.get("reference")
    return [*([reference] if reference else []), *entries]


def _entry(entry: Mapping[str, Any]) -> tuple[str, Measured]:
    settings = entry.get("settings", {})
    if not isinstance(settings, dict) or not settings.keys() <= LOSSLESS_ROUTING.keys():
        raise ValueError("a setting's `settings` are not routing settings by dotted key")
    mean = float(entry["kl_mean"])
    if not 0 <= mean < float("inf"):
        raise ValueError(f"kl_mean is {mean}")
    low, high = entry.get("kl_lo"), entry.get("kl_hi")
    return _key(settings), Measured(str(entry.get("name", "")), mean, low, high)


def _key(routing: Mapping[str, Any]) -> str:
    return json.dumps(variant(routing).settings, sort_keys=True)
