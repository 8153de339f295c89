"""Experts that are read before they are routed to, in lanes that would be idle.

While a layer computes, the experts that the next layer will probably route to are read. What
layers really route to is always read first, and no more is begun while too much of what was begun
before is not there: then the disk has no room to spare.

An entry that was begun counts as resident, and cannot leave the cache before its layer was routed
and it is there. The memory that its reads take over belongs to nobody until a lane has moved it:
what lies there, or shares a page with it, must not be read again before (`in_the_way`).

Where experts may be left out, an answer depends on what is in memory, and that should not depend on
how fast a disk was. So `steady` takes no account of what has been read by now: all that is named is
begun, and what was named wrongly may leave a fixed number of layers later, read by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from engine.counters import GuessCounters
from engine.expert_store import ExpertStore
from engine.guessing import Guess
from engine.lane_jobs import Job, ReadOutcome
from engine.lanes import Lanes

KEPT_LAYERS = 2
"""Layers for which a wrongly named expert stays, if it is steady. By then it mostly is there."""


class _Entry:
    """One expert whose reads were begun."""

    __slots__ = ("expert", "index", "jobs")

    def __init__(self, index: int, expert: int, jobs: list[Job]) -> None:
        self.index = index
        self.expert = expert
        self.jobs = jobs


class ReadAhead:
    """What is read ahead, and what became of it. Lives on the callback's thread."""

    def __init__(
        self,
        store: ExpertStore,
        lanes: Lanes,
        counters: GuessCounters,
        on_done: Callable[[Sequence[ReadOutcome]], None],
    ) -> None:
        """`on_done` is told once of every read that came in time."""
        self.store = store
        self._lanes = lanes
        self.counters = counters
        self._on_done = on_done
        self.hurry: Callable[[int, int], None] | None = None
        """Called for an expert that is named and counts as resident, but may not be there yet."""
        self.steady = False
        """Whether what is in the cache must not depend on time."""
        self._guessing: Job | None = None
        self._under_way: list[_Entry] = []
        self._unrouted: dict[int, set[int]] = {}
        """By layer: experts that were begun and not routed to since."""
        self._named: dict[int, list[int]] = {}
        self._leaving: list[tuple[set[int], list[Job]]] = []
        """Keys of entries that left, and the jobs that take their memory away."""
        self._kept: deque[tuple[int, set[int]]] = deque()
        """Wrongly named experts that may not leave yet, by layer, for the last few that were
        routed."""

    @property
    def is_busy(self) -> bool:
        """Whether there is anything that a routing must look at."""
        return bool(self._under_way or self._unrouted or self._named or self._leaving or self._kept)

    def begin_guess(self, guess: Guess) -> None:
        """Begin to read what `guess` names; a lane finds that out if it takes long.

        Then the store is that lane's until `join`.
        """
        if guess.is_quick or self.steady:
            self.begin(guess.index, guess.name(), guess.most_under_way)
            return
        self._guessing = self._lanes.run(
            lambda: self.begin(guess.index, guess.name(), guess.most_under_way)
        )

    def join(self) -> None:
        """From here on the store is the caller's again."""
        job, self._guessing = self._guessing, None
        if job is not None:
            if not job.done:
                self._lanes.cancel(job)
            if job.failure is not None:
                raise job.failure

    def begin(self, index: int, experts: Sequence[int], most: int) -> None:
        """Read those of `experts` that are absent for layer `index`, the first ones first.

        Not beyond `most` experts under way, unless it is steady.
        """
        self._named[index] = list(experts)
        store = self.store
        for expert in experts:
            if len(self._under_way) >= most and not self.steady:
                return
            if store.is_resident(index, expert):
                if self.hurry is not None:
                    self.hurry(index, expert)
                continue
            if self._leaving and (in_the_way := self.in_the_way(index, [expert])):
                if not self.steady:
                    return
                self._lanes.wait(in_the_way)
            reads = store.stage_ahead(index, expert)
            jobs = self._lanes.submit(reads or [], store.take_releases(), spare=True)
            self.leaves(store.take_left(), jobs)
            if reads is None:
                return
            self._under_way.append(_Entry(index, expert, jobs))
            self._unrouted.setdefault(index, set()).add(expert)
            self.counters.read[index] += 1

    def let_overdue_go(self) -> None:
        """Before a layer is staged: what was kept long enough may leave, once it is there."""
        if len(self._kept) < KEPT_LAYERS:
            return
        index, experts = self._kept.popleft()
        for entry in self._under_way:
            if entry.index == index and entry.expert in experts:
                self._lanes.wait(entry.jobs)
        self.store.let_go(index, experts)

    def routed(self, index: int, experts: Iterable[int]) -> list[Job]:
        """A layer was routed and staged: jobs of its experts that must still be waited for.

        Call `collect` before the layer is staged: a failed expert must not be taken for resident.
        """
        routed = set(experts)
        counters = self.counters
        named = self._named.pop(index, None)
        if named is not None:
            counters.named[index] += len(named)
            counters.routed[index] += len(routed)
            counters.right[index] += len(routed.intersection(named))
        begun = self._unrouted.pop(index, set())
        counters.used[index] += len(begun & routed)
        # A wrong guess for one token may be right, and still under way, for the next.
        here = {entry.expert: entry for entry in self._under_way if entry.index == index}
        late = [entry for expert, entry in here.items() if expert in routed]
        for entry in late:
            counters.late[index] += entry.expert in begun
            self._under_way.remove(entry)
        kept = here.keys() - routed
        if self.steady:
            kept = begun - routed
            self._kept.append((index, kept))
        self.store.let_go(index, (begun | routed) - kept)
        return [job for entry in late for job in entry.jobs]

    def unrouted(self, index: int) -> set[int]:
        """The layer's experts that were begun and not routed to since."""
        return self._unrouted.get(index, set())

    def leaves(self, keys: set[int], jobs: list[Job]) -> None:
        """These jobs take the memory of entries away that left the cache."""
        if keys:
            self._leaving.append((keys, jobs))

    def in_the_way(self, index: int, experts: Iterable[int]) -> list[Job]:
        """Jobs that must be done before these experts may be read."""
        self._leaving = [pair for pair in self._leaving if not all(job.done for job in pair[1])]
        if not self._leaving:
            return []
        offset = index * self.store.n_expert
        near = {offset + expert + step for expert in experts for step in (-1, 0, 1)}
        return [job for keys, jobs in self._leaving if not near.isdisjoint(keys) for job in jobs]

    def collect(self) -> None:
        """Take note of what the lanes have done since."""
        # Hot path: plain loops.
        for entry in tuple(self._under_way):
            for job in entry.jobs:
                if not job.done:
                    break
            else:
                self._under_way.remove(entry)
                self._arrived(entry)

    def settle(self) -> None:
        """Wait until nothing is under way; what is there may leave like any other entry."""
        self.join()
        for entry in self._under_way:
            self._lanes.wait(entry.jobs)
            self._arrived(entry)
        self._under_way = []
        for _, jobs in self._leaving:
            self._lanes.wait(jobs)
        self._leaving = []
        for index, experts in (*self._unrouted.items(), *self._kept):
            self.store.let_go(index, experts)
        self._unrouted.clear()
        self._named.clear()
        self._kept.clear()

    def _arrived(self, entry: _Entry) -> None:
        store, index = self.store, entry.index
        outcomes = [job.outcome for job in entry.jobs if job.outcome is not None]
        failed = any(job.failure for job in entry.jobs) or any(o.error for o in outcomes)
        if failed:
            self.unrouted(index).discard(entry.expert)
        is_kept = any(index == layer and entry.expert in kept for layer, kept in self._kept)
        if failed or not (is_kept or entry.expert in self.unrouted(index)):
            store.let_go(index, [entry.expert])
        if failed:
            store.forget(index, [entry.expert])
            return
        store.arrived([outcome.read for outcome in outcomes])
        self._on_done(outcomes)
