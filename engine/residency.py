"""The expert cache: which experts are in memory, what they cost, and who goes first.

An entry is one (layer, expert): its slice in every bank of the layer. One global budget in bytes
holds over all entries, each counted at its own size; `engine.retention` says which one goes first.
Its pages are moved under the entry that needed the room, or given back to the system where that
does not go, so the budget bounds memory for real.

The callback's thread owns this module's objects; nothing here takes a lock.

Pages: a slice's first and last page may also hold a neighbour's bytes. Reads fetch whole pages,
and the neighbour's bytes in them are the file's true bytes. Where those edges of all slices weigh
little beside the budget, they stay in memory once they were there: giving a page back and taking it
anew costs more than it holds, for the thread that does it and for those that compute. Elsewhere
eviction gives a shared page back when the neighbour is not resident either. Slices smaller than a
page share it with more than their neighbours: what was read of such a bank stays. Pages that a bank
shares with other tensors at its two ends belong to no entry and always stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from engine.counters import ABSENT, READING, ExpertCounters
from engine.expert_store import ExpertStore
from engine.experts import ExpertLayer, ExpertTag
from engine.lane_jobs import Move, Read, Release
from engine.mapping import PAGE, ShardMapping, page_ceil, page_floor
from engine.retention import Retention

_EDGES_OF_BUDGET = 16
"""The edges of all slices stay in memory where they weigh at most this part of the budget."""


class Lent(NamedTuple):
    """The state of a cache in which nothing is under way."""

    resident: np.ndarray
    """A byte per key: 1 for what is in memory."""
    retention: tuple[np.ndarray, ...]
    """What each key is worth (`Retention.arrays`)."""
    resident_bytes: int
    layer: int
    n_uses: int
    keeps_edges: bool
    moves_pages: bool


class Planner(Protocol):
    """Who planned entries that are not there yet (`engine.warming`)."""

    def give_up(self, key: int, *, may_wait: bool) -> bool:
        """A planned entry must leave. False: not now, because it is being read."""

    def left(self, key: int) -> None:
        """An entry left the cache."""


class ExpertCache(ExpertStore):
    """Experts stay in memory within a budget; what is worth least goes first."""

    def __init__(
        self,
        layers: Sequence[ExpertLayer],
        mappings: Sequence[ShardMapping],
        budget_bytes: int,
        *,
        counters: ExpertCounters | None = None,
        poison: bool = False,
        moves_pages: bool = False,
    ) -> None:
        """`moves_pages`: let a read take over the memory of what was evicted for it."""
        super().__init__(layers, mappings, counters=counters, poison=poison)
        self._budget = budget_bytes
        self._resident = 0
        self._moves_pages = moves_pages
        self._edge_bytes = sum(bank.edge_bytes for layer in self.layers for bank in layer.banks)
        self._keeps_edges = self._may_keep_edges()
        self._known_cores: dict[int, tuple[Release, ...]] = {}
        self._gone: list[tuple[int, int]] = []
        self.planner: Planner | None = None
        self._planned: set[int] = set()
        """Keys that have their place in the budget, and that nobody has asked for yet."""
        self._planned_bytes = 0
        self._retention = Retention(len(self.layers), self.n_expert)
        self._hits = self.counters.hits.reshape(-1).data
        self._misses = self.counters.misses.reshape(-1).data
        self._last_used = self.counters.last_used.reshape(-1).data
        self._banks = [{bank.name: bank for bank in layer.banks} for layer in self.layers]
        self._entry_bytes = [layer.entry_bytes for layer in self.layers]
        for index, layer in enumerate(self.layers):
            for bank in layer.banks:
                mapping = self.mappings[bank.shard]
                mapping.claim(bank.inside_first, bank.inside_last)
                mapping.use_small_pages(bank.inside_first, bank.inside_last)
            if poison:
                self._poison_slices(index, range(layer.n_expert))

    @property
    def budget_bytes(self) -> int:
        return self._budget

    @property
    def resident_bytes(self) -> int:
        return self._resident - self._planned_bytes

    def set_budget(self, budget_bytes: int) -> None:
        """Change the budget between tokens; what no longer fits goes at once."""
        self._budget = budget_bytes
        self._retention.nothing_in_use()
        kept, self._keeps_edges = self._keeps_edges, self._may_keep_edges()
        if kept and not self._keeps_edges:
            self._release_edges()
        self._make_room()
        self._release_now()

    def is_resident(self, index: int, expert: int) -> bool:
        return self._retention.resident[index * self.n_expert + expert] == 1

    def stage(self, index: int, experts: Sequence[int]) -> list[Read]:
        # Hot path: some 400 look-ups per token. Plain bytes and ints; numpy would cost more per
        # call than the few experts of a routing take.
        if self._gone:
            self._poison_gone()
        resident, offset = self._retention.resident, index * self.n_expert
        hits, last_used, clock = self._hits, self._last_used, self.clock
        missing: list[int] = []
        wanted = dict.fromkeys(experts)
        for expert in wanted:
            key = offset + expert
            if resident[key]:
                hits[key] += 1
            else:
                resident[key] = 1
                missing.append(expert)
                self._misses[key] += 1
            last_used[key] = clock
        self.hits += len(wanted) - len(missing)
        self.misses += len(missing)
        self._resident += self._entry_bytes[index] * len(missing)
        if wanted:
            by_last_use = wanted if len(wanted) == len(experts) else _by_last_use(experts)
            self._retention.use(index, [offset + expert for expert in by_last_use])
            if self._resident > self._budget:
                self._make_room()
        reads: list[Read] = []
        for expert in missing:
            self._state[offset + expert] = READING
            reads.extend(self._reads_of(index, expert))
        if self._releases:
            if reads:
                return self._into_freed_memory(index, reads)
            self._release_now()
        return reads

    def stage_ahead(self, index: int, expert: int) -> list[Read] | None:
        retention, key = self._retention, index * self.n_expert + expert
        # Before anything leaves for it: a neighbour must leave it the page that they share.
        retention.resident[key] = 1
        retention.held.add(key)
        if not self._make_room(self._entry_bytes[index]):
            retention.resident[key] = 0
            retention.held.discard(key)
            return None
        self._resident += self._entry_bytes[index]
        self._state[key] = READING
        reads = [read._replace(ahead=True) for read in self._reads_of(index, expert)]
        return self._into_freed_memory(index, reads) if self._releases else reads

    def seed(self, rates: np.ndarray) -> None:
        """Take each (layer, expert) for one that was used in this share of passes."""
        self._retention.seed(rates)

    def lend(self) -> Lent:
        """What `token_core` goes on from, while it stands in for us. Nothing may be under way."""
        return Lent(
            np.frombuffer(self._retention.resident, np.uint8),
            self._retention.arrays,
            self._resident,
            *self._retention.position,
            self._keeps_edges,
            self._moves_pages,
        )

    def note(
        self,
        resident_bytes: int,
        *,
        hits: int,
        misses: int,
        evictions: int,
        moved: int,
        left: Iterable[int],
    ) -> None:
        """What happened meanwhile to what we have lent. `left`: who left."""
        self._resident = resident_bytes
        self.hits += hits
        self.misses += misses
        self.evictions += evictions
        self.moved += moved
        for key in left:
            assert self.planner is not None
            self.planner.left(key)

    def take_back(self, layer: int, n_uses: int) -> None:
        """We go on from here ourselves; the last call was for this layer."""
        self._retention.go_on(layer, n_uses)

    def n_hits(self, key: int) -> int:
        """How often an entry was there when it was routed to."""
        return self._hits[key]

    def plan(self, index: int, expert: int) -> list[Read] | None:
        """Give an absent expert its place, before anybody asks for it; return its reads.

        None where it is there already or there is no room: nothing leaves for it. It counts as
        resident from now on; `taken` says that it was read, or `unplan` that it will not be.
        """
        key, n_bytes = index * self.n_expert + expert, self._entry_bytes[index]
        if self._retention.resident[key] or self._resident + n_bytes > self._budget:
            return None
        self._retention.resident[key] = 1
        self._planned.add(key)
        self._resident += n_bytes
        self._planned_bytes += n_bytes
        return [read._replace(warm=True) for read in self._reads_of(index, expert)]

    def taken(self, index: int, expert: int) -> None:
        """A planned expert is an entry like any other from now on."""
        key = index * self.n_expert + expert
        self._planned.discard(key)
        self._planned_bytes -= self._entry_bytes[index]
        self._state[key] = READING
        self._retention.held.discard(key)

    def unplan(self, index: int, expert: int) -> None:
        """A planned expert that nobody has begun to read is absent again."""
        self.taken(index, expert)
        key = index * self.n_expert + expert
        self._resident -= self._entry_bytes[index]
        self._retention.resident[key] = 0
        self._state[key] = ABSENT

    def let_go(self, index: int, experts: Iterable[int]) -> None:
        offset = index * self.n_expert
        self._retention.held.difference_update([offset + expert for expert in experts])

    def forget(self, index: int, experts: Iterable[int]) -> None:
        for expert in experts:
            if self.is_resident(index, expert):
                self._retention.resident[index * self.n_expert + expert] = 0
                self._drop(index, expert)
        self._release_now()

    def _may_keep_edges(self) -> bool:
        return self._moves_pages and self._edge_bytes * _EDGES_OF_BUDGET <= self._budget

    def _release_edges(self) -> None:
        """Give the edges of all absent slices back, once."""
        for index, layer in enumerate(self.layers):
            for expert in range(layer.n_expert):
                if not self.is_resident(index, expert):
                    self._give_up_memory(index, expert)
        self._release_now()

    def _make_room(self, n_bytes: int = 0) -> bool:
        """Evict until `n_bytes` more fit; whether they do, beside what may not leave."""
        while self._resident + n_bytes > self._budget:
            key = self._retention.evict()
            if key is None:
                return False
            if key in self._planned and not self._give_up(key, may_wait=not n_bytes):
                continue
            self._drop(*divmod(key, self.n_expert))
            self.evictions += 1
            self._left.add(key)
        return True

    def _give_up(self, key: int, *, may_wait: bool) -> bool:
        """Whether a planned entry that is to leave may do so now."""
        assert self.planner is not None
        resident = self._retention.resident
        resident[key] = 1
        if not self.planner.give_up(key, may_wait=may_wait):
            # Its lane will be done soon; until then another one must leave.
            self._retention.held.add(key)
            return False
        # If its reads failed it has left by itself.
        leaves = resident[key] == 1
        resident[key] = 0
        return leaves

    def _drop(self, index: int, expert: int) -> None:
        """Give up the memory of an entry that no longer counts as resident."""
        self._resident -= self._entry_bytes[index]
        key = index * self.n_expert + expert
        unread = key in self._planned
        if unread:
            self.taken(index, expert)
        if self.planner is not None:
            self.planner.left(key)
        self._state[key] = ABSENT
        self._give_up_memory(index, expert, unread=unread)
        if self.poison:
            self._gone.append((index, expert))

    def _give_up_memory(self, index: int, expert: int, *, unread: bool = False) -> None:
        if self._keeps_edges:
            # Hot path: the same pages whoever else is resident.
            cores = self._cores_of(index, expert)
            self._releases += map(_without_core, cores) if unread else cores
            return
        resident, key = self._retention.resident, index * self.n_expert + expert
        before = resident[key - 1] if expert else 0
        after = resident[key + 1] if expert + 1 < self.n_expert else 0
        for bank in self.layers[index].banks:
            if bank.slice_bytes < PAGE:
                continue
            start = bank.offset + expert * bank.slice_bytes
            end = start + bank.slice_bytes
            first = max(page_ceil(start) if before else page_floor(start), bank.inside_first)
            last = min(page_floor(end) if after else page_ceil(end), bank.inside_last)
            if first < last:
                core = bank.core_first(expert), bank.core_bytes
                release = Release(bank.shard, first, last, *core)
                self._releases.append(_without_core(release) if unread else release)

    def _cores_of(self, index: int, expert: int) -> tuple[Release, ...]:
        """An entry's slices without their edges. Kept once made, like its reads."""
        key = index * self.n_expert + expert
        known = self._known_cores.get(key)
        if known is None:
            known = self._known_cores[key] = tuple(
                Release(bank.shard, first, first + bank.core_bytes, first, bank.core_bytes)
                for bank in self.layers[index].banks
                if bank.core_bytes
                for first in [bank.core_first(expert)]
            )
        return known

    def _into_freed_memory(self, index: int, reads: list[Read]) -> list[Read]:
        """Pair reads with slices of the same size that were evicted for them."""
        if not self._moves_pages:
            return reads
        banks, releases = self._banks[index], self._releases
        paired: list[Read] = []
        for read in reads:
            assert isinstance(read.tag, ExpertTag)
            bank = banks[read.tag.projection]
            # Entries mostly have slices of one size, so the last one suits.
            place = len(releases) - 1
            while place >= 0 and releases[place].core_bytes != bank.core_bytes:
                place -= 1
            if place >= 0 and bank.core_bytes:
                move = Move(releases.pop(place), bank.core_first(read.tag.expert))
                read = Read(read.shard, read.first, read.last, read.tag, move, read.ahead)
                self.moved += 1
            paired.append(read)
        return paired

    def _release_now(self) -> None:
        for release in self.take_releases():
            self.mappings[release.shard].release(release.first, release.last)
        self._poison_gone()

    def _poison_gone(self) -> None:
        """Slices that were given up hold poison (for tests).

        Only the store's owner may do this: what is absent now may be on its way at once.
        """
        for index, expert in self._gone:
            if not self.is_resident(index, expert):
                self._poison_slices(index, [expert])
        self._gone = []


def _without_core(release: Release) -> Release:
    """What was never read has no memory that a read could take over."""
    return release._replace(core_first=0, core_bytes=0)


def _by_last_use(experts: Sequence[int]) -> list[int]:
    """Each expert once, in order of its last place."""
    return list(dict.fromkeys(reversed(experts)))[::-1]
