"""Experts that are read because the sessions before used them most: what became of each.

All that fit are planned at once, and read by lanes that have nothing else to do. A planned expert
has its place in the budget and counts as resident, so what the cache holds, and which expert
leaves next, do not depend on how fast the disk is. If a layer routes to it, or it must leave,
before a lane has begun it, it is taken out of the plan: it was not read, and nothing is lost. What
a lane has begun is waited for.

No operation here looks through the plan, which may have thousands of entries.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from engine.experts import ExpertTag
from engine.lane_jobs import Job, Read
from engine.lanes import Lanes
from engine.residency import ExpertCache


class _Entry:
    """One planned expert."""

    __slots__ = ("expert", "failed", "index", "jobs", "n_left")

    def __init__(self, index: int, expert: int, jobs: list[Job]) -> None:
        self.index = index
        self.expert = expert
        self.jobs = jobs
        self.n_left = len(jobs)
        self.failed = False


class Warming:
    """The plan of one cache. Lives on the callback's thread, like the cache."""

    def __init__(self, store: ExpertCache, lanes: Lanes) -> None:
        self._store = store
        self._lanes = lanes
        self._entries: dict[int, _Entry] = {}
        """By key: what is planned and not known to be there."""
        self._report: deque[Job] = deque()
        self._hits_before: dict[int, int] = {}
        """By key: hits of the warmed experts in memory when they came."""
        self._used_and_left = 0
        self.n_warmed = 0
        """Experts that were read."""
        self.read_bytes = 0
        store.planner = self

    @property
    def is_busy(self) -> bool:
        """Whether anything is planned that is not known to be there."""
        return bool(self._entries)

    @property
    def n_used(self) -> int:
        """Warmed experts that were routed to while they were in memory."""
        hits = self._store.n_hits
        here = sum(hits(key) > before for key, before in self._hits_before.items())
        return here + self._used_and_left

    def begin(self, keys: Iterable[int]) -> int:
        """Plan these experts, the first ones first, as far as there is room. Returns how many."""
        store, reads = self._store, list[Read]()
        planned: list[tuple[int, int, int]] = []
        for key in keys:
            index, expert = divmod(key, store.n_expert)
            wanted = store.plan(index, expert)
            if wanted is None:
                break
            if not wanted:  # it has no page of its own: its neighbours bring it in
                store.taken(index, expert)
                continue
            planned.append((index, expert, len(wanted)))
            reads += wanted
        jobs = self._lanes.submit_background(reads, self._report)
        place = 0
        for index, expert, n_jobs in planned:
            entry = _Entry(index, expert, jobs[place : place + n_jobs])
            self._entries[index * store.n_expert + expert] = entry
            place += n_jobs
        return len(planned)

    def routed(self, index: int, experts: Iterable[int]) -> list[Job]:
        """A layer is about to be staged: jobs of its experts that must still be waited for."""
        self.collect()
        entries, offset = self._entries, index * self._store.n_expert
        late: list[Job] = []
        for expert in set(experts):
            entry = entries.get(offset + expert)
            if entry is None:
                continue
            if self._withdraw(entry):
                self._store.unplan(index, expert)
            else:
                # From now on it is the layer's, whose answer fails if these reads do.
                self._arrived(entry)
                late += entry.jobs
        return late

    def hurry(self, index: int, expert: int) -> None:
        """A coming layer will probably route to it: read it before all that is only planned."""
        entry = self._entries.get(index * self._store.n_expert + expert)
        if entry is not None:
            for job in entry.jobs:
                self._lanes.hurry(job)

    def give_up(self, key: int, *, may_wait: bool) -> bool:
        """A planned entry must leave. False: not now, because a lane is reading it."""
        entry = self._entries[key]
        if self._withdraw(entry):
            return True
        if not all(job.done for job in entry.jobs):
            if not may_wait:
                return False
            self._lanes.wait(entry.jobs)
        self.collect()
        return True

    def left(self, key: int) -> None:
        """An entry left the cache."""
        before = self._hits_before.pop(key, None)
        if before is not None:
            self._used_and_left += self._store.n_hits(key) > before

    def collect(self) -> None:
        """Take note of what the lanes have done since."""
        report, n_expert = self._report, self._store.n_expert
        while report:
            job = report.popleft()
            outcome = job.outcome
            if outcome is not None:
                self.read_bytes += outcome.nbytes
            assert isinstance(job.work, Read) and isinstance(job.work.tag, ExpertTag)
            entry = self._entries.get(job.work.tag.index * n_expert + job.work.tag.expert)
            if entry is None or job not in entry.jobs:
                continue  # a layer has it
            entry.n_left -= 1
            entry.failed |= outcome is None or outcome.error is not None
            if not entry.n_left:
                self._ended(entry)

    def stop(self) -> None:
        """Plan nothing any more, and return when nothing is under way."""
        self._withdraw_all()
        for entry in list(self._entries.values()):
            self._lanes.wait(entry.jobs)
        self.collect()
        for key in list(self._hits_before):
            self.left(key)

    def _withdraw_all(self) -> None:
        for entry in list(self._entries.values()):
            if self._withdraw(entry):
                self._store.unplan(entry.index, entry.expert)

    def _withdraw(self, entry: _Entry) -> bool:
        # Lanes begin an entry's reads in their order: if the first is ours, all are.
        if not self._lanes.withdraw(entry.jobs[0]):
            return False
        for job in entry.jobs[1:]:
            self._lanes.withdraw(job)
        del self._entries[entry.index * self._store.n_expert + entry.expert]
        return True

    def _ended(self, entry: _Entry) -> None:
        self._arrived(entry)
        if not entry.failed:
            self._store.arrived([job.work for job in entry.jobs if isinstance(job.work, Read)])
            return
        self._store.forget(entry.index, [entry.expert])
        # A disk that fails is not asked for what nobody needs yet.
        self._withdraw_all()

    def _arrived(self, entry: _Entry) -> None:
        key = entry.index * self._store.n_expert + entry.expert
        del self._entries[key]
        self._store.taken(entry.index, entry.expert)
        if not entry.failed:
            self.n_warmed += 1
            self._hits_before[key] = self._store.n_hits(key)
