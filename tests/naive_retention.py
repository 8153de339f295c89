"""What engine/retention.py says at its head, word for word, with no thought of speed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from engine.retention import BATCH, NEARNESS, TAUS, WEIGHTS

Key = tuple[int, int]
"""(routed layer, expert)."""


class NaiveCache:
    """A cache of a budget that follows the documented rule."""

    def __init__(
        self, n_layer: int, n_expert: int, size: Callable[[Key], int], budget: int
    ) -> None:
        self.n_layer, self.size, self.budget = n_layer, size, budget
        self.keys = [(layer, expert) for layer in range(n_layer) for expert in range(n_expert)]
        self.resident: set[Key] = set()
        self.worth = {key: [0.0 for _ in TAUS] for key in self.keys}
        self.last_use = dict.fromkeys(self.keys, -1)
        self.uses = 0
        self.layer = -1
        self.order: list[Key] = []
        self.used_since: set[Key] = set()

    @property
    def held(self) -> int:
        return sum(map(self.size, self.resident))

    def load(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Use experts of a layer, which may repeat; those that were missing, as first met."""
        if not experts:
            return []
        missed = [e for e in dict.fromkeys(experts) if (layer, e) not in self.resident]
        if layer <= self.layer:
            for worth in self.worth.values():
                worth[:] = [w * math.exp(-1 / tau) for w, tau in zip(worth, TAUS, strict=True)]
            self.order = []
        self.layer = layer
        touched = {(layer, expert) for expert in experts}
        for expert in experts:
            self.last_use[layer, expert] = self.uses
            self.uses += 1
        for key in touched:
            credit = [weight / tau for weight, tau in zip(WEIGHTS, TAUS, strict=True)]
            self.worth[key] = [w + c for w, c in zip(self.worth[key], credit, strict=True)]
        self.resident |= touched
        self.used_since |= touched
        while self.held > self.budget:
            if not self.order:
                self.make_order(touched)
                if not self.order:
                    break
            leaving = self.order.pop(0)
            if leaving not in self.used_since:
                self.resident.remove(leaving)
        return missed

    def make_order(self, touched: set[Key]) -> None:
        ranked = sorted(self.resident - touched, key=lambda k: (self.score(k), self.last_use[k]))
        n = BATCH
        while n < len(ranked) and self.score(ranked[n]) == self.score(ranked[BATCH - 1]):
            n += 1
        self.order = ranked[:n]
        self.used_since = set(touched)

    def score(self, key: Key) -> float:
        ahead = (key[0] - self.layer - 1) % self.n_layer
        first, second, third = self.worth[key]
        return (first + second + third) * (1 - NEARNESS * ahead / self.n_layer)
