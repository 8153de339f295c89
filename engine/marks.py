"""The learned nodes of a graph that the callback must see, and what each is to its layer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Role(IntEnum):
    """What a learned node is to its layer, in the order in which they are computed."""

    PROBABILITIES = 0
    RANKING = 1
    ROUTING = 2
    RAW_WEIGHTS = 3
    FINAL_WEIGHTS = 4
    EXPERTS = 5


@dataclass(frozen=True)
class Mark:
    """A learned node: what it is, and to which routed layer."""

    role: Role
    index: int
    visit: bool = True
    """Whether the graph stops there."""
    stages: bool = False
    """Whether the layer's experts are staged there, so that they may be used behind it."""
    bank: int = 0
    """Which of the layer's banks a node of experts multiplies by."""
