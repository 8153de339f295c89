"""What `tuiwork tune` tries, from what the machine and the model are. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.config import AUTO, SETTINGS, RunConfig
from engine.tune_search import Knob

DROP_FRACTIONS = (0.25, 0.5, 0.625, 0.75, 0.875, 1.0)
MOST_LANES = 64

LANES, THREADS, OVERLAP = "stream.io-threads", "model.threads", "stream.overlap"
PREFETCH = "stream.prefetch"
FRACTION = "routing.drop-cold-experts"


@dataclass(frozen=True)
class Place:
    """Where the search happens."""

    cores: int
    """Physical cores that may be used."""
    cpus: int
    """Logical processors that may be used."""
    good_lanes: int | None
    """Fewest parallel readers that came near the disk's best rate; None: not measured."""
    overlap: str
    """What `overlap = auto` means here: on or off."""
    can_overlap: bool
    """Whether the engine can overlap reads and compute on this model."""
    everything_fits: bool
    """Whether the cache holds all experts, so that hardly anything is read."""
    can_prefetch: bool = False
    """Whether the engine can read the next layer ahead on this model."""


def start_settings(config: RunConfig, place: Place) -> dict[str, object]:
    """Where the search begins. What the caller set stays; the rest is measured or usual."""
    lanes = config.stream.io_threads
    if not is_set(config, LANES) and place.good_lanes is not None:
        lanes = place.good_lanes
    threads = config.model.threads if is_set(config, THREADS) else place.cores
    overlap = config.stream.overlap if is_set(config, OVERLAP) else place.overlap
    # Not `auto`: a cell must do one or the other all the time.
    prefetch = config.stream.prefetch if is_set(config, PREFETCH) else "off"
    return {LANES: lanes, OVERLAP: overlap, PREFETCH: prefetch, THREADS: threads, FRACTION: 0.0}


def is_set(config: RunConfig, key: str) -> bool:
    """Whether a setting is another than the default: then it is held, not searched."""
    part, _, name = key.partition(".")
    value = getattr(getattr(config, part), name.replace("-", "_"))
    return bool(value != SETTINGS[key].default)


def knobs(config: RunConfig, start: dict[str, object], place: Place, *, lossy: bool) -> list[Knob]:
    """What to try: lanes, overlap, prefetch, threads, and last what changes answers."""
    found = []
    if not is_set(config, LANES) and not place.everything_fits:
        found.append(Knob(LANES, lane_ladders(int(str(start[LANES])))))
    if not is_set(config, OVERLAP) and place.can_overlap and not place.everything_fits:
        found.append(Knob(OVERLAP, (("off" if place.overlap == "on" else "on",),)))
    if not is_set(config, PREFETCH) and place.can_prefetch and not place.everything_fits:
        found.append(Knob(PREFETCH, (("on",),)))
    if not is_set(config, THREADS):
        found.append(Knob(THREADS, thread_ladders(int(str(start[THREADS])), place.cpus)))
    if lossy and not place.everything_fits:
        # With `on`, what is dropped would depend on the disk's speed from run to run.
        along = {} if is_set(config, PREFETCH) else {PREFETCH: {"on": AUTO}}
        found.append(Knob(FRACTION, (DROP_FRACTIONS,), lossy=True, along=along))
    return [knob for knob in found if knob.most_trials]


def lane_ladders(start: int) -> tuple[tuple[int, ...], ...]:
    """Twice and four times as many readers; if that gains nothing, half and a quarter."""
    up = tuple(n for n in (2 * start, 4 * start) if n <= MOST_LANES)
    down = tuple(n for n in (start // 2, start // 4) if n >= 1)
    return _filled(up, down)


def thread_ladders(start: int, cpus: int) -> tuple[tuple[int, ...], ...]:
    """One thread less, then half; if that gains nothing, one for every logical processor."""
    down = tuple(dict.fromkeys(n for n in (start - 1, start // 2) if 1 <= n < start))
    up = (cpus,) if cpus > start else ()
    return _filled(down, up)


def _filled(*ladders: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(ladder) for ladder in ladders if ladder)
