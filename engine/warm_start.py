"""A warm start: the experts that the sessions before used most are read while nothing else is.

Knows what was used from a file in the user's cache folder (`engine.popularity`), plans the experts
as far as the cache has room (`engine.warming` and the lanes do the rest), and writes down what this
session used. Trouble with the file is a note, never a failure: it only costs the head start.
"""

from __future__ import annotations

from pathlib import Path
from time import monotonic

import numpy as np

from engine import popularity
from engine.config import RunConfig
from engine.open_model import OpenModel
from engine.popularity import Popularity
from engine.residency import ExpertCache

SAVE_EVERY_S = 60.0
"""Between answers, so that a crash loses little: at most once in so much time."""


class WarmStart:
    """One session's part in it. All calls are made between decodes."""

    def __init__(self, opened: OpenModel, config: RunConfig, notes: list[str]) -> None:
        """Begin to read, if the settings ask for it and anything is known of this model."""
        self._opened = opened
        self._notes = notes
        self._path: Path | None = None
        self._saved_at = monotonic()
        self._clock = 0
        if not (config.stream.warm_start and opened.streams):
            return
        assert opened.expert_counters is not None
        self._counted = _used(opened)
        try:
            file = opened.file
            name = popularity.identity(file.paths, file.sizes, file.data_offsets)
            path = popularity.folder() / (name + popularity.SUFFIX)
            known = popularity.read(path, *self._counted.shape)
        except OSError as error:
            self._note(f"what was used before is not known: {error}")
            return
        self._path = path
        if known is not None:
            self._begin(known)

    @property
    def is_busy(self) -> bool:
        """Whether experts are still to be read."""
        loader = self._opened.router.loader if self._opened.router is not None else None
        return loader is not None and loader.warming is not None and loader.warming.is_busy

    def turn_ended(self) -> None:
        """An answer is there: keep what was used so far, if that was not done just now."""
        if self._path is not None and monotonic() - self._saved_at >= SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        """Keep what was used since it was last kept."""
        path = self._path
        if path is None:
            return
        self._saved_at = monotonic()
        counted, clock = _used(self._opened), self._opened.store.clock
        # Another budget may have brought another store, whose clock began anew.
        passes = clock - self._clock if clock >= self._clock else clock
        uses = counted - self._counted
        if not passes or not uses.any():
            return
        self._counted, self._clock = counted, clock
        try:
            # Read again: another session of this model may have written meanwhile.
            known = popularity.read(path, *counted.shape) or Popularity.none(*counted.shape)
            popularity.write(path, known.later(uses, passes))
        except OSError as error:
            self._path = None
            self._note(f"what this session used cannot be kept: {error}")

    def _begin(self, known: Popularity) -> None:
        store, router = self._opened.store, self._opened.router
        assert router is not None
        # Without a second lane nothing is read meanwhile, and without a cache nothing stays.
        if isinstance(store, ExpertCache) and router.loader.lanes.count > 1:
            rates = known.rates
            store.seed(rates)
            router.loader.warm(store, hottest(rates))

    def _note(self, what: str) -> None:
        self._notes.append(f"no warm start: {what}")


def hottest(rates: np.ndarray) -> list[int]:
    """Keys of all experts that were used at all, the most used first."""
    flat = rates.reshape(-1)
    order = np.argsort(-flat, kind="stable")
    found: list[int] = order[: np.count_nonzero(flat)].tolist()
    return found


def _used(opened: OpenModel) -> np.ndarray:
    counters = opened.expert_counters
    assert counters is not None
    used: np.ndarray = counters.hits + counters.misses
    return used
