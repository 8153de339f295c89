"""An automatic cache keeps to the memory around it, between tokens and between answers.

Asks the machine at most four times a second (0.4 ms each time) and lets `engine.pressure` decide. A
decode that runs is never touched: nothing here is called from it.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from engine import live_settings, machine
from engine.config import AUTO, RunConfig
from engine.open_model import OpenModel
from engine.pressure import Pressure, floor_bytes
from engine.sizing import auto_bounds
from engine.telemetry import MIB

INTERVAL_S = 0.25
_WORTH_SAYING = 7 / 8
"""Below this share of the largest size that there was, a person is told: it costs speed."""


class AutoCache:
    """Holds the size of one model's cache, if that is automatic."""

    def __init__(
        self, opened: OpenModel, config: RunConfig, notes: list[str], *, poison: bool = False
    ) -> None:
        """One line of `notes` says what became of the size, for as long as there is such a line."""
        self._opened = opened
        self._notes = notes
        self._poison = poison
        self._note = ""
        self._asked_at = float("-inf")
        self._total = machine.memory().total_bytes
        self.floor_bytes = floor_bytes(config.stream.cache_floor_mb, self._total)
        """What an automatic cache leaves to the system."""
        self.watchers: list[Callable[[], None]] = []
        """Called after each change of the size, on the session's thread."""
        self.follow(config)

    @property
    def holds(self) -> bool:
        """Whether the size is automatic; a number that somebody set is never changed."""
        return self._pressure is not None

    def follow(self, config: RunConfig) -> None:
        """From now on keep to what `config` says, which is in force already."""
        self._config = config
        self._pressure: Pressure | None = None
        if self._opened.streams and config.stream.cache_mb == AUTO:
            opened = self._opened
            self._pressure = Pressure(auto_bounds(config, opened.layers, opened.top_k, self._total))
            self._largest = self._smallest = opened.store.budget_bytes
        else:
            self._put_note("")

    def hold(self) -> None:
        """Change the size if the memory around it asks for that. Call between decodes only."""
        if self._pressure is None:
            return
        now = monotonic()
        if now - self._asked_at < INTERVAL_S:
            return
        self._asked_at = now
        assert self._opened.router is not None
        self._opened.router.loader.collect()
        store = self._opened.store
        before, available = store.budget_bytes, machine.memory().available_bytes
        budget = self._pressure.next_budget(before, store.resident_bytes, available, now)
        if budget == before:
            return
        live_settings.resize(self._opened, self._config, budget, poison=self._poison)
        self._say(budget, available)
        for watcher in self.watchers:
            watcher()

    def _say(self, budget: int, available: int) -> None:
        self._largest = max(self._largest, budget)
        self._smallest = min(self._smallest, budget)
        note = self._note
        if budget < _WORTH_SAYING * self._largest:
            if budget == self._smallest:
                note = (
                    f"the automatic cache shrank from {self._largest // MIB} to {budget // MIB} "
                    f"MiB: the system had {available // MIB} MiB left, and "
                    f"{self.floor_bytes // MIB} are kept for it (stream.cache-floor-mb); the cache "
                    "grows again when there is room"
                )
        elif note:
            note = (
                f"the automatic cache was down to {self._smallest // MIB} MiB for a while, because "
                f"the system was short of memory; it has grown again, to {budget // MIB} MiB"
            )
            self._smallest = budget
        self._put_note(note)

    def _put_note(self, note: str) -> None:
        if note != self._note:
            others = [line for line in self._notes if line != self._note]
            self._notes[:] = [*others, note] if note else others
            self._note = note
