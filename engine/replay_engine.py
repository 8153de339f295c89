"""The engine's own cache, replayed: the same retention policy, called as the engine calls it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.retention import Retention


class EngineCache:
    """Evicts what `engine.retention` gives up."""

    def __init__(self, sizes: Mapping[int, int], n_expert: int, n_layer: int, budget: int) -> None:
        """`sizes` in bytes by key, of every key that will be used; `budget` in bytes."""
        self.held = 0
        self._sizes = sizes
        self._budget = budget
        self._n_expert = n_expert
        # A trace counts a model's blocks, the policy the routed layers among them.
        layers = sorted({key // n_expert for key in sizes})
        self._routed = {layer: index for index, layer in enumerate(layers)}
        self._blocks = layers
        self._retention = Retention(max(n_layer, len(layers)), n_expert)

    def __contains__(self, key: int) -> bool:
        block, expert = divmod(key, self._n_expert)
        index = self._routed.get(block)
        return index is not None and bool(self._retention.resident[index * self._n_expert + expert])

    def load(self, keys: Sequence[int]) -> None:
        if not keys:
            return
        block = keys[0] // self._n_expert
        index = self._routed[block]
        shift = (index - block) * self._n_expert
        routed = [key + shift for key in keys]
        resident = self._retention.resident
        for key, place in zip(keys, routed, strict=True):
            if not resident[place]:
                resident[place] = 1
                self.held += self._sizes[key]
        self._retention.use(index, routed)
        while self.held > self._budget:
            evicted = self._retention.evict()
            if evicted is None:
                break
            index, expert = divmod(evicted, self._n_expert)
            self.held -= self._sizes[self._blocks[index] * self._n_expert + expert]
