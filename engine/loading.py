"""Brings a layer's experts into memory: stage, read, wait, and read ahead.

Reads overlap with compute in two ways. A projection of the present layer is waited for only where
the graph asks about the node that uses it, so that the next one is read while this one is computed
(`flight.py`). And while the present layer is computed, idle lanes read what the next layer will
probably route to (`ahead.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from time import perf_counter_ns

from engine.ahead import ReadAhead
from engine.counters import GuessCounters, StepCounters
from engine.errors import GraphChanged
from engine.expert_store import ExpertStore
from engine.flight import Flight, by_bank, expert_of
from engine.graph import GraphPlan
from engine.guessing import Guess
from engine.lane_jobs import Job, Read, ReadOutcome
from engine.lanes import Lanes
from engine.residency import ExpertCache
from engine.token_core import TokenCore
from engine.warming import Warming


class ExpertLoader:
    """Owns what is under way between disk and store. Lives on the callback's thread."""

    def __init__(
        self, plan: GraphPlan, store: ExpertStore, lanes: Lanes, guesses: GuessCounters
    ) -> None:
        self.plan = plan
        self.lanes = lanes
        self.step = StepCounters()
        self._between_steps = StepCounters()
        self.overlap = False
        """Whether projections are waited for one by one."""
        self.n_apart = 0
        """How often a projection was computed while a later one was still being read."""
        self.flight: Flight | None = None
        """The present layer's reads, where some may not be done."""
        self.ahead = ReadAhead(store, lanes, guesses, self._count_reads)
        self.core: TokenCore | None = None
        """Loads in our place, while it is there (`compiled.py`)."""
        self.warming: Warming | None = None
        """What a warm start has planned for the present store."""
        self.on_reads: Callable[[Sequence[ReadOutcome]], None] | None = None

    @property
    def store(self) -> ExpertStore:
        """Where the experts are."""
        return self.ahead.store

    def use_store(self, store: ExpertStore) -> None:
        """From now on the experts are in another store; nothing may be under way."""
        self.ahead.store = store

    def begin_step(self) -> None:
        """Before each decode: count from nothing but what came since the last one."""
        self.step, self._between_steps = self._between_steps, StepCounters()

    def warm(self, store: ExpertCache, keys: Iterable[int]) -> None:
        """Let the lanes read these experts of our store whenever they have nothing else to do."""
        self.warming = Warming(store, self.lanes)
        self.ahead.hurry = self.warming.hurry
        self.warming.begin(keys)

    def stop_warming(self) -> None:
        """Nothing more is read that nobody asked for; what was is known to be there."""
        if self.warming is not None:
            self.warming.stop()

    def take_store_back(self) -> None:
        """Between two visits a lane may have the store; from here on it has not."""
        self.ahead.join()

    def hand_over(self, core: TokenCore) -> None:
        """Let `core` load from here on."""
        self.settle()
        core.take_over()
        self.core = core
        self.resume()

    def take_over(self) -> None:
        """Load ourselves from here on."""
        core, self.core = self.core, None
        if core is not None:
            core.hand_back(self._between_steps)

    @property
    def is_flying(self) -> bool:
        """Whether a layer's own reads are under way."""
        return self.core.is_flying if self.core is not None else self.flight is not None

    def load(
        self, index: int, experts: Sequence[int], guess: Guess | None, started: int
    ) -> list[Read]:
        """Bring a routing's experts in, and begin to read what `guess` names.

        With overlap they are there when `experts_asked` said so, else on return. The store must be
        ours (`take_store_back`). Returns the reads that became necessary. `started`: when the
        present visit began.
        """
        if self.flight is not None:
            raise GraphChanged("a layer was routed before the experts of the last one were used")
        ahead, warming = self.ahead, self.warming
        if ahead.is_busy:
            if ahead.steady:
                before = perf_counter_ns()
                ahead.let_overdue_go()
                waited = perf_counter_ns() - before
                self.step.stall_ns += waited
                started += waited
            # Before the store is asked what is there: what failed is not.
            ahead.collect()
        late = warming.routed(index, experts) if warming and warming.is_busy else []
        reads = self.store.stage(index, experts)
        if ahead.is_busy:
            late += ahead.routed(index, experts)
        if reads or late:
            try:
                self.flight = self._take_off(index, reads, late)
            except BaseException:
                # What was staged and will not be read must not pass for resident.
                self.lanes.wait(late)
                self.store.forget(index, experts)
                raise
        if guess is not None:
            ahead.begin_guess(guess)
        self.step.mgmt_ns += perf_counter_ns() - started
        if self.flight is not None and not self.overlap:
            self._wait_for(self.flight, 0)
        return reads

    def _take_off(self, index: int, reads: list[Read], late: list[Job]) -> Flight:
        """Submit a routing's reads, so that they come in the order in which they are needed."""
        self.lanes.wait(self.ahead.in_the_way(index, {expert_of(read) for read in reads}))
        banks = ["all at once"]
        if self.overlap:
            banks = self.plan.layers[index].banks
            reads = by_bank(reads, banks)
        jobs = self.lanes.submit(reads, self.store.take_releases())
        self.ahead.leaves(self.store.take_left(), jobs)
        return Flight(index, self.lanes, banks, late + jobs)

    def experts_asked(self, index: int, bank: int) -> bool:
        """Before a bank's experts are computed: wait for them.

        Returns whether to compute them apart from what follows, because that must still be waited
        for. Raises GraphChanged if this cannot be the node that was learned.
        """
        if self.core is not None:
            return self.core.asked(index, bank)
        flight = self.flight
        if flight is None:
            return False
        if index != flight.index or bank > flight.arrived:
            raise GraphChanged("experts are used in another order than learned")
        if bank == flight.arrived:
            self._wait_for(flight, bank)
        apart = self.flight is not None and not flight.is_done
        self.n_apart += apart
        return apart

    def end_decode(self) -> None:
        """After a decode, however it ended: no layer's own reads are under way any more."""
        if self.core is not None:
            self.core.abandon()
            self.n_apart += self.core.tell(self.step)
            return
        self.ahead.join()
        flight, self.flight = self.flight, None
        if flight is not None:
            self.store.forget(flight.index, flight.abandon())
        self.collect()

    def collect(self) -> None:
        """Between decodes: take note of what a warm start has read since."""
        if self.warming is not None and self.warming.is_busy:
            self.warming.collect()

    def settle(self) -> None:
        """Wait until nothing at all is under way; what changes between tokens needs that.

        A warm start does not go on before `resume`.
        """
        self.take_over()
        self.end_decode()
        # The last step was told already.
        told, self.step = self.step, self._between_steps
        try:
            self.ahead.settle()
        finally:
            self.step = told
        self.lanes.pause_background()
        self.collect()

    def resume(self) -> None:
        """What changes between tokens has changed."""
        self.lanes.resume_background()

    def _wait_for(self, flight: Flight, bank: int) -> None:
        before = perf_counter_ns()
        try:
            outcomes = flight.wait(bank)
        except BaseException:
            self.end_decode()
            raise
        finally:
            self.step.stall_ns += perf_counter_ns() - before
        if flight.arrived == flight.n_banks:
            self.flight = None
            self.store.arrived(flight.reads)
        self._count_reads(outcomes)

    def _count_reads(self, outcomes: Sequence[ReadOutcome]) -> None:
        if self.warming is not None:  # no token asked for what a warm start reads
            outcomes = [outcome for outcome in outcomes if not outcome.read.warm]
        step = self.step
        step.reads += len(outcomes)
        for outcome in outcomes:
            step.read_bytes += outcome.nbytes
            step.io_ns += outcome.latency_ns
        if self.on_reads is not None:
            self.on_reads(outcomes)
