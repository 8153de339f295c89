"""Where experts are: what the callback asks of a store, and the store that streams nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from engine.counters import ABSENT, RESIDENT, ExpertCounters
from engine.experts import ExpertLayer, ExpertTag, slice_pages
from engine.lane_jobs import Read, Release
from engine.mapping import ShardMapping

POISON_BYTE = 0xFF
"""Every quantization reads a block of these as NaN or as a value that ruins the logits."""


class ExpertStore(ABC):
    """What the callback asks for experts: shared by the cache and the cache that is off."""

    def __init__(
        self,
        layers: Sequence[ExpertLayer],
        mappings: Sequence[ShardMapping],
        *,
        counters: ExpertCounters | None = None,
        poison: bool = False,
    ) -> None:
        self.layers = list(layers)
        self.mappings = list(mappings)
        self.poison = poison
        self.n_expert = max(layer.n_expert for layer in layers)
        self.counters = counters or ExpertCounters(len(self.layers), self.n_expert)
        self.counters.state[...] = ABSENT
        # The same memory by key: numbers one by one go several times faster than through an array.
        self._state = self.counters.state.reshape(-1).data
        self.clock = 0
        """Tokens so far; the engine advances it."""
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        self.moved = 0
        """Reads that went into the memory of an evicted entry."""
        self._releases: list[Release] = []
        self._left: set[int] = set()
        self._known_reads: dict[int, tuple[Read, ...]] = {}

    @property
    @abstractmethod
    def budget_bytes(self) -> int:
        """What the entries may weigh together."""

    @property
    @abstractmethod
    def resident_bytes(self) -> int:
        """What the entries in memory weigh together."""

    @abstractmethod
    def stage(self, index: int, experts: Sequence[int]) -> list[Read]:
        """Make room for a routing's experts and return the reads that must happen now.

        `index` counts routed layers; `experts` come in order of use and may repeat.
        """

    def arrived(self, reads: Iterable[Read]) -> None:
        """Reads that were asked for are in place. The store may be a lane's meanwhile."""
        for read in reads:
            if isinstance(read.tag, ExpertTag):
                self._state[read.tag.index * self.n_expert + read.tag.expert] = RESIDENT

    def stage_ahead(self, index: int, expert: int) -> list[Read] | None:
        """Make room for an absent expert that a coming layer will probably route to.

        Returns its reads, or None where what is in use leaves no room. It may not leave before
        `let_go`.
        """
        return None

    def let_go(self, index: int, experts: Iterable[int]) -> None:  # noqa: B027  Most hold nothing.
        """What was staged ahead may leave again."""

    def take_left(self) -> set[int]:
        """Keys (index * n_expert + expert) of the entries that left since last asked."""
        left, self._left = self._left, set()
        return left

    def take_releases(self) -> list[Release]:
        """Pages of evicted entries that are still to be given back, once."""
        releases, self._releases = self._releases, []
        return releases

    @abstractmethod
    def is_resident(self, index: int, expert: int) -> bool:
        """Whether using the expert would cost no read."""

    @abstractmethod
    def forget(self, index: int, experts: Iterable[int]) -> None:
        """Count experts as absent whose reads failed."""

    def close(self) -> None:  # noqa: B027  Most stores have nothing to give up.
        """Give up what is not memory under the model's addresses."""

    def _reads_of(self, index: int, expert: int) -> tuple[Read, ...]:
        """An entry's reads. Kept once made: an expert that is missed is missed again and again."""
        key = index * self.n_expert + expert
        known = self._known_reads.get(key)
        if known is not None:
            return known
        layer = self.layers[index]
        reads = []
        for bank in layer.banks:
            first, last = slice_pages(bank, expert)
            if first < last:
                tag = ExpertTag(index, layer.number, expert, bank.name)
                reads.append(Read(bank.shard, first, last, tag))
        return self._known_reads.setdefault(key, tuple(reads))

    def _poison_slices(self, index: int, experts: Iterable[int]) -> None:
        for expert in experts:
            for bank in self.layers[index].banks:
                first = max(bank.offset + expert * bank.slice_bytes, bank.inside_first)
                last = min(bank.offset + (expert + 1) * bank.slice_bytes, bank.inside_last)
                if first < last:
                    self.mappings[bank.shard].fill(first, last, POISON_BYTE)


class MappedExperts(ExpertStore):
    """Nothing is streamed: llama.cpp's own mapping holds the experts, and the kernel decides.

    Lets a plain run be observed, or fed recorded routings, through the same router.
    """

    @property
    def budget_bytes(self) -> int:
        return 0

    @property
    def resident_bytes(self) -> int:
        return 0

    def stage(self, index: int, experts: Sequence[int]) -> list[Read]:
        return []

    def is_resident(self, index: int, expert: int) -> bool:
        return True

    def forget(self, index: int, experts: Iterable[int]) -> None:
        pass
