"""Stands in for the app: holds an `EngineClient`, keeps every event, waits for some."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from engine.config import RunConfig
from engine.messages import Event, Finished, Opened, Prompt, Text, TokenRows
from engine.telemetry import TokenRow
from tuiwork.client import EngineClient

PATIENCE_S = 20.0
HELLO = [{"role": "user", "content": "hello there"}]
LONG_PROMPT = "one two three four five six seven eight nine ten " * 60
E = TypeVar("E")


def config(model: Path, **settings: Any) -> RunConfig:
    """One thread, a cache that evicts all the time, and answers of the length asked for."""
    base = {
        "model.path": str(model),
        "model.ctx": 2048,
        "model.threads": 1,
        "stream.cache-mb": 1,
        "stream.force-cache": True,
        "run.ignore-eos": True,
    }
    changes = {key.replace("__", ".").replace("_", "-"): value for key, value in settings.items()}
    return RunConfig().replace(base | changes)


class EngineApp:
    """A client with a memory."""

    def __init__(self) -> None:
        self.events: list[tuple[float, Event]] = []
        self.react: Callable[[Event], None] = lambda _event: None
        """Called with each event in the engine's thread, as soon as it comes."""
        self._news = threading.Condition()
        self.client = EngineClient(self._take)

    def open(self, model: Path, **settings: Any) -> Opened:
        """Open and wait until it is."""
        before = len(self.events)
        self.client.open(config(model, **settings))
        return self.wait_for(Opened, since=before)

    def answer(self, prompt: Prompt = HELLO, n_predict: int = 20) -> Finished:
        """Generate and wait for the end."""
        before = len(self.events)
        self.client.generate(prompt, n_predict)
        return self.wait_for(Finished, since=before)

    def wait_for(self, kind: type[E], since: int = 0) -> E:
        """The first event of a kind, at or behind place `since` of all events."""
        found = self.wait_until(lambda event: isinstance(event, kind), since)
        assert isinstance(found, kind)
        return found

    def wait_until(self, suits: Callable[[Event], bool], since: int = 0) -> Event:
        """The first event that suits, at or behind place `since` of all events."""
        deadline = time.monotonic() + PATIENCE_S
        with self._news:
            while True:
                for _, event in self.events[since:]:
                    if suits(event):
                        return event
                since = len(self.events)
                if not self._news.wait(deadline - time.monotonic()):
                    raise AssertionError(f"no such event; the last were {self.events[-5:]}")

    def of(self, kind: type[E], since: int = 0) -> list[E]:
        """All events of a kind."""
        return [event for _, event in self.events[since:] if isinstance(event, kind)]

    def text(self, since: int = 0) -> str:
        """All streamed text."""
        return "".join(event.text for event in self.of(Text, since))

    def rows(self, since: int = 0) -> list[TokenRow]:
        """All token rows."""
        return [row for event in self.of(TokenRows, since) for row in event.rows]

    def _take(self, event: Event) -> None:
        with self._news:
            self.events.append((time.perf_counter(), event))
            self._news.notify_all()
        self.react(event)


def process_exists(pid: int) -> bool:
    """Whether there is such a process, a zombie not counted."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def until(holds: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    """Wait for something that no event tells."""
    deadline = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
