"""Routings as diagnostics see them, and as they replace them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.flight import expert_of
from engine.lane_jobs import Read


@dataclass(frozen=True)
class Routing:
    """One layer's routing as it was handled, for traces. Arrays are tokens by slots."""

    index: int
    ids: np.ndarray
    """What the router chose."""
    weights: np.ndarray | None
    """The final weights as the router made them."""
    resident: np.ndarray
    """Whether each was in memory before, or on its way."""
    ahead: np.ndarray
    """Whether that is because it was read ahead, and nothing has routed to it since."""
    read: np.ndarray
    """Which slots caused a read."""
    dropped: np.ndarray | None
    substituted: np.ndarray | None
    """The expert that ran instead, -1 for none."""


class Routes(Protocol):
    """Other routings than the router's, for diagnostics. Arrays are tokens by slots."""

    def ids(self, index: int, n_tokens: int) -> np.ndarray:
        """The experts that a routed layer uses instead."""

    def weights(self, index: int, n_tokens: int) -> np.ndarray | None:
        """Their final weights, or None to keep what the model makes of them."""

    def guess(self, index: int, least_share: float) -> Sequence[int]:
        """What a guess of the routing would have named, the likeliest first."""


def as_handled(
    index: int,
    asked: np.ndarray,
    weights: np.ndarray,
    before: tuple[np.ndarray, np.ndarray],
    dropped: np.ndarray | None,
    reads: Sequence[Read],
    substituted: np.ndarray | None,
) -> Routing:
    """One layer's routing; `before`: what was resident, and of it what had been read ahead."""
    unread = {expert_of(read) for read in reads}
    # What a warm start has only planned counts as resident, but had to be read after all.
    resident, ahead = before
    resident = resident & ~np.isin(asked, list(unread))
    read = np.zeros(asked.shape, bool)
    for place, expert in enumerate(asked.ravel().tolist()):
        if expert in unread and not (dropped is not None and dropped.flat[place]):
            read.flat[place] = True
            unread.discard(expert)
    return Routing(index, asked, weights, resident, ahead, read, dropped, substituted)
