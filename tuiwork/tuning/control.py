"""Turning knobs: what was asked for and not yet confirmed, undo and redo, what waits to reopen.

Knows the engine only as something that takes settings; what a person should hear goes out through
`say`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from engine.config import RunConfig, get
from engine.errors import TuiworkError
from engine.messages import EngineDied, Event, LiveChanged, LiveRefused, Opened
from tuiwork.meters.meters import Meters
from tuiwork.tuning.changes import short_name
from tuiwork.tuning.knobs import Knob, split_live
from tuiwork.tuning.undo import UndoStack


class TakesSettings(Protocol):
    """The part of `tuiwork.client.EngineClient` that tuning needs."""

    def set_live(self, changes: dict[str, Any]) -> int:
        """Ask for settings; the number comes back in the answer."""
        ...


Say = Callable[[str, bool], None]
"""A message for the person, and whether it is a refusal."""


class Tuner:
    """Settings of the open model, as a person changes them."""

    def __init__(self, engine: TakesSettings, meters: Meters, say: Say) -> None:
        self._engine = engine
        self._meters = meters
        self._say = say
        self._undo = UndoStack()
        self._asked: dict[int, tuple[str, dict[str, Any]]] = {}
        self.waiting: dict[str, Any] = {}
        """Settings that are in force once the model is opened again."""

    def wanted(self) -> RunConfig | None:
        """The settings in force, with what was asked for and not yet confirmed."""
        config = self._meters.config
        for _, changes in self._asked.values():
            config = config.replace(changes) if config is not None else None
        return config

    def turn(self, knob: Knob, direction: int) -> None:
        """Turn a knob by a step."""
        config, opened = self.wanted(), self._meters.opened
        if config is None or opened is None:
            self._say("Open a model first: there is nothing to tune yet.", True)
            return
        if knob.reopens:
            config = config.replace(self.waiting)
        value = knob.turned(config, direction, opened.info.n_expert_used)
        if value == get(config, knob.key):
            self._say(f"{short_name(knob.key)} is at its end.", True)
            return
        self.set({knob.key: value})

    def set(self, changes: Mapping[str, Any]) -> None:
        """Change settings: at the next token where that can be, else when the model reopens."""
        live, waiting = split_live(changes)
        for key, value in waiting.items():
            self._wait(key, value)
        if live:
            self._send("set", live)

    def undo(self) -> None:
        """Take the latest change back."""
        changes = self._undo.undo()
        if changes is None:
            self._say("Nothing to undo.", True)
        else:
            self._send("undo", changes)

    def redo(self) -> None:
        """Repeat the change that was taken back."""
        changes = self._undo.redo()
        if changes is None:
            self._say("Nothing to redo.", True)
        else:
            self._send("redo", changes)

    def take(self, event: Event) -> None:
        """Take in what the engine said about settings."""
        if isinstance(event, LiveChanged):
            kind, _ = self._asked.pop(event.request, ("", {}))
            if kind == "set" and event.before != event.changes:
                self._undo.push(event.before, event.changes)
        elif isinstance(event, LiveRefused):
            kind, _ = self._asked.pop(event.request, ("", {}))
            self._take_back(kind)
            self._say(event.message, True)
        elif isinstance(event, Opened):
            self._asked.clear()
            self._undo.forget()
            self.waiting = {}
        elif isinstance(event, EngineDied):
            self._asked.clear()

    def config_to_reopen(self, asked_for: RunConfig) -> RunConfig:
        """What to open again: as first asked for, with every change since, and all that waits."""
        changes: dict[str, Any] = {}
        for change in self._meters.changes.changes:
            changes |= change.after
        return asked_for.replace(changes | self.waiting)

    def _wait(self, key: str, value: Any) -> None:
        config = self._meters.config
        if config is not None and get(config, key) == value:
            self.waiting.pop(key, None)
        else:
            self.waiting[key] = value

    def _send(self, kind: str, changes: dict[str, Any]) -> None:
        try:
            self._asked[self._engine.set_live(changes)] = (kind, changes)
        except TuiworkError as error:
            self._take_back(kind)
            self._say(str(error), True)

    def _take_back(self, kind: str) -> None:
        if kind == "undo":
            self._undo.redo()
        elif kind == "redo":
            self._undo.undo()
