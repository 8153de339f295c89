"""The store of a cache that is off: every routing is read again."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from engine.counters import ABSENT, READING, ExpertCounters
from engine.expert_store import ExpertStore
from engine.experts import ExpertLayer
from engine.lane_jobs import Read
from engine.mapping import ShardMapping


class NoCache(ExpertStore):
    """The cache is off: every routing is read again, into memory that all layers share.

    The banks of every layer lie on the same pages of one scratch file, so memory is one layer's
    and no page is ever freed and faulted in again. What a layer read is gone when the next reads.
    """

    def __init__(
        self,
        layers: Sequence[ExpertLayer],
        mappings: Sequence[ShardMapping],
        *,
        counters: ExpertCounters | None = None,
        poison: bool = False,
    ) -> None:
        super().__init__(layers, mappings, counters=counters, poison=poison)
        self._scratch_fd = os.memfd_create("tuiwork-experts")
        sizes = [self._place(layer) for layer in self.layers]
        os.ftruncate(self._scratch_fd, max(sizes))

    @property
    def budget_bytes(self) -> int:
        return 0

    @property
    def resident_bytes(self) -> int:
        return os.fstat(self._scratch_fd).st_blocks * 512

    def is_resident(self, index: int, expert: int) -> bool:
        return False

    def stage(self, index: int, experts: Sequence[int]) -> list[Read]:
        wanted = list(dict.fromkeys(experts))
        if self.poison:
            self._poison_slices(index, range(self.layers[index].n_expert))
        reads: list[Read] = []
        self.counters.state[...] = ABSENT
        for expert in wanted:
            self.counters.misses[index, expert] += 1
            self.counters.last_used[index, expert] = self.clock
            self.counters.state[index, expert] = READING
            reads.extend(self._reads_of(index, expert))
        self.misses += len(wanted)
        return reads

    def forget(self, index: int, experts: Iterable[int]) -> None:
        pass

    def close(self) -> None:
        os.close(self._scratch_fd)

    def _place(self, layer: ExpertLayer) -> int:
        position = 0
        for bank in layer.banks:
            first, last = bank.inside_first, bank.inside_last
            self.mappings[bank.shard].share(first, last, self._scratch_fd, position)
            position += last - first
        return position
