"""Undo and redo of settings, as a stack of what was set and what it replaced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_KEPT = 200


@dataclass(frozen=True)
class Step:
    """Settings that were changed together."""

    before: dict[str, Any]
    after: dict[str, Any]


class UndoStack:
    """Steps that can be taken back, and steps that were."""

    def __init__(self) -> None:
        self._done: list[Step] = []
        self._undone: list[Step] = []

    def push(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """A new change; what was undone before can no longer be redone."""
        self._done.append(Step(dict(before), dict(after)))
        del self._done[:-_KEPT]
        self._undone.clear()

    def undo(self) -> dict[str, Any] | None:
        """The settings that take back the latest step; None if there is none."""
        if not self._done:
            return None
        step = self._done.pop()
        self._undone.append(step)
        return dict(step.before)

    def redo(self) -> dict[str, Any] | None:
        """The settings that repeat the step last taken back; None if there is none."""
        if not self._undone:
            return None
        step = self._undone.pop()
        self._done.append(step)
        return dict(step.after)

    @property
    def can_undo(self) -> bool:
        """Whether there is something to take back."""
        return bool(self._done)

    @property
    def can_redo(self) -> bool:
        """Whether something taken back can be repeated."""
        return bool(self._undone)

    def forget(self) -> None:
        """Begin anew, as for another model."""
        self._done.clear()
        self._undone.clear()
