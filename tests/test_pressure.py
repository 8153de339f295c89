"""What an automatic cache does under pressure, by value and as rules over any course of memory."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.pressure import EASE_S, STEP_BYTES, STEP_S, Bounds, Pressure, floor_bytes
from engine.telemetry import MIB

BOUNDS = Bounds(floor=1536 * MIB, demand=1000 * MIB, most=16000 * MIB)
LOOK_S = 0.25


@dataclass
class Machine:
    """Memory with one cache in it: what the cache has not taken yet is still available."""

    free: int
    """Available if the cache were empty."""
    pressure: Pressure
    budget: int
    resident: int = 0
    now_s: float = 0.0

    @property
    def available(self) -> int:
        return max(0, self.free - self.resident)

    def look(self) -> int:
        """One look at the memory, and what the cache does with the answer; returns the change."""
        before = self.budget
        self.budget = self.pressure.next_budget(before, self.resident, self.available, self.now_s)
        self.resident = min(self.resident, self.budget)
        self.now_s += LOOK_S
        return self.budget - before

    def looks(self, seconds: float) -> list[int]:
        return [self.look() for _ in range(round(seconds / LOOK_S))]


def machine(free_mib: int, budget_mib: int, resident_mib: int) -> Machine:
    return Machine(free_mib * MIB, Pressure(BOUNDS), budget_mib * MIB, resident_mib * MIB)


@pytest.mark.parametrize("resident_mib", [0, 4000, 8464])
def test_memory_that_is_promised_and_not_taken_is_no_pressure(resident_mib: int) -> None:
    """As the opening chose it: full or empty, the budget leaves the floor."""
    here = machine(10000, 8464, resident_mib)
    assert not any(here.looks(60))


@pytest.mark.parametrize("resident_mib", [0, 4000, 8464])
def test_it_shrinks_at_once_by_what_the_system_lacks(resident_mib: int) -> None:
    here = machine(10000, 8464, resident_mib)
    here.looks(1)
    here.free -= 1200 * MIB
    assert here.look() == -1200 * MIB
    assert here.budget + BOUNDS.floor == here.free
    assert not any(here.looks(60))


def test_it_never_goes_below_a_tokens_demand() -> None:
    here = machine(10000, 8464, 8464)
    here.free = 0
    # What is missing beyond nothing left cannot be seen: each look gives back one floor.
    here.looks(2)
    assert here.budget == BOUNDS.demand
    assert not any(here.looks(10))


def test_a_small_cache_gives_back_what_little_it_has() -> None:
    """The system's lack decides, not how much the cache can do about it."""
    here = Machine(200 * MIB, Pressure(Bounds(100 * MIB, 30 * MIB, 100 * MIB)), 90 * MIB, 90 * MIB)
    here.look()
    here.free = 0
    here.look()
    assert here.budget == 30 * MIB


def test_little_changes_change_nothing() -> None:
    here = machine(10000, 8464, 8464)
    for wobble in (-90, 90, -60, 40, -90, 0) * 20:
        here.free = (10000 + wobble) * MIB
        assert here.look() == 0


def test_it_grows_slowly_after_a_while_of_ease_and_stops_before_the_floor() -> None:
    here = machine(6000, 4464, 4464)
    here.looks(1)
    here.free += 2000 * MIB
    assert not any(here.looks(EASE_S - LOOK_S))
    grown = here.looks(60)
    assert max(grown) <= STEP_BYTES
    assert here.budget + BOUNDS.floor <= here.free
    assert here.budget > (6464 - 100) * MIB
    first, second = [place for place, change in enumerate(grown) if change][:2]
    assert (second - first) * LOOK_S >= STEP_S


def test_pressure_in_between_starts_the_waiting_again() -> None:
    here = machine(6000, 4464, 4464)
    here.free += 2000 * MIB
    here.looks(EASE_S - 1)
    here.free -= 2000 * MIB
    here.look()
    here.free += 2000 * MIB
    assert not any(here.looks(EASE_S - 1))


def test_it_grows_up_to_all_experts_and_no_further() -> None:
    here = machine(40000, 15900, 0)
    here.looks(60)
    assert here.budget == BOUNDS.most


@given(
    st.lists(
        st.tuples(st.integers(0, 24000), st.integers(0, 400), st.floats(0.25, 8)), max_size=60
    ),
    st.integers(0, 4000),
    st.integers(1, 3000),
    st.integers(0, 20000),
)
def test_rules(course: list[tuple[int, int, float]], floor: int, demand: int, more: int) -> None:
    """Whatever memory does: bounds hold, growing is slow and leaves the floor."""
    bounds = Bounds(floor * MIB, demand * MIB, (demand + more) * MIB)
    here = Machine(0, Pressure(bounds), bounds.demand)
    steps: list[float] = []
    for free_mib, filled_mib, passed_s in course:
        here.free = free_mib * MIB
        here.resident = min(here.budget, here.resident + filled_mib * MIB)
        here.now_s += passed_s
        at, fitting = here.now_s, bounds.fitting(here.resident, here.available)
        change = here.look()
        assert bounds.demand <= here.budget <= max(bounds.most, bounds.demand)
        if change > 0:
            assert change <= STEP_BYTES and here.budget <= fitting
            assert not steps or at - steps[-1] >= STEP_S
            steps.append(at)
        elif change < 0:
            assert here.budget == fitting
        # After a look the system lacks no more than the slack, unless that cost a token's demand.
        assert here.budget - bounds.slack <= fitting


def test_the_floor_suits_the_memory_unless_somebody_says_so() -> None:
    assert floor_bytes("auto", 64000 * MIB) == 1536 * MIB
    assert floor_bytes("auto", 16000 * MIB) == 1000 * MIB
    assert floor_bytes("auto", 4000 * MIB) == 512 * MIB
    assert floor_bytes(1536, 4000 * MIB) == 1536 * MIB
    assert floor_bytes(0, 4000 * MIB) == 0
