"""What a sweep runs, and in which order. Pure.

An arm is one combination of settings; a cell is one run: an arm, a prompt, a round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.config import SETTINGS
from engine.machine_state import CoolDown

PLAN_VERSION = 1


@dataclass(frozen=True)
class Arm:
    """One combination of settings."""

    letter: str
    profile: str
    """The profile it starts from; empty: the defaults."""
    varied: dict[str, Any]
    """What the matrix set, by dotted key."""
    settings: dict[str, Any]
    """Every setting of its runs by dotted key."""

    @property
    def name(self) -> str:
        """What tells it from the other arms."""
        words = [self.profile] if self.profile else []
        words += [f"{key.rpartition('.')[2]}={_shown(value)}" for key, value in self.varied.items()]
        return " ".join(words) or "defaults"

    @property
    def profile_document(self) -> dict[str, Any]:
        """Its settings as a profile's tables."""
        document: dict[str, Any] = {}
        for key, value in self.settings.items():
            table, dot, name = key.partition(".")
            if dot:
                document.setdefault(table, {})[name] = value
            else:
                document[key] = value
        return document


@dataclass(frozen=True)
class Cell:
    """One run of a sweep. Rounds and prompts count from 1."""

    round: int
    prompt: int
    arm: Arm

    @property
    def id(self) -> str:
        """Its name, also of its folder."""
        return f"r{self.round}-p{self.prompt}-{self.arm.letter}"


@dataclass(frozen=True)
class Plan:
    """All that a sweep runs. Two plans that are equal may go on in one folder."""

    arms: tuple[Arm, ...]
    prompts: tuple[str, ...]
    """What is asked; empty texts never are."""
    rounds: int = 2
    cool_down: CoolDown = field(default_factory=CoolDown)
    description: str = ""
    models: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Size and time of change, in ns, of every arm's model: a changed one is another sweep."""

    @property
    def cells(self) -> list[Cell]:
        """Every cell in the order in which they run.

        Arms alternate (A B A B), so that what changes slowly meets all of them alike, and every
        second round goes backwards, so that none always comes after the same one.
        """
        order = [(prompt, arm) for prompt in range(1, len(self.prompts) + 1) for arm in self.arms]
        return [
            Cell(number, prompt, arm)
            for number in range(1, self.rounds + 1)
            for prompt, arm in (order if number % 2 else reversed(order))
        ]

    def document(self) -> dict[str, Any]:
        """The plan as plain values."""
        return {"plan_version": PLAN_VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Plan:
        """The plan back from its plain values. Raises ValueError, KeyError or TypeError."""
        if document["plan_version"] != PLAN_VERSION:
            raise ValueError(f"plan version {document['plan_version']!r}")
        arms = tuple(Arm(**arm) for arm in document["arms"])
        unknown = {key for arm in arms for key in arm.settings} - SETTINGS.keys()
        if unknown or not arms or not document["prompts"]:
            raise ValueError(f"unknown settings {sorted(unknown)}, or nothing to run")
        return cls(
            arms=arms,
            prompts=tuple(document["prompts"]),
            rounds=int(document["rounds"]),
            cool_down=CoolDown(**document["cool_down"]),
            description=document["description"],
            models={path: (int(a), int(b)) for path, (a, b) in document["models"].items()},
        )


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)
