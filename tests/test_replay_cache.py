"""The replayed caches: against a plain re-telling of their description, and in general."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.replay_cache import MIB, POLICIES, Call, Workload, simulate, workload
from tests.route_samples import trace_of, workloads


class PlainCache:
    """The description of a replay, taken word for word, with no thought of speed."""

    def __init__(self, work: Workload, budget: int, policy: str) -> None:
        self.work, self.budget, self.policy = work, budget, policy
        self.resident: set[int] = set()
        self.history: list[tuple[int, ...]] = []

    def __contains__(self, key: int) -> bool:
        return key in self.resident

    @property
    def held(self) -> int:
        return sum(self.work.sizes[key] for key in self.resident)

    def load(self, keys: Iterable[int]) -> None:
        self.history.append(tuple(keys))
        self.resident |= set(keys)
        while self.held > self.budget and self.resident - set(keys):
            self.resident.remove(min(self.resident - set(keys), key=self._worth))

    def _worth(self, key: int) -> tuple[float, ...]:
        used = [n for n, call in enumerate(self.history) if key in call]
        last = (float(used[-1]), float(self.history[used[-1]].index(key)))
        if self.policy == "lru":
            return last
        if self.policy == "lfu":
            return (float(len(used)), *last)
        coming = [call.keys for call in self.work.calls[len(self.history) :]]
        uses = [n for n, call in enumerate(coming) if key in call]
        # The evicted one among equals does not matter, but the test needs the same one.
        return (-float(uses[0]) if uses else float("-inf"), float(key))


@given(
    st.sampled_from(["lru", "lfu", "belady"]),
    workloads(equal_sizes=False),
    st.integers(1, 20),
)
@settings(max_examples=150, deadline=None)
def test_policies_do_what_their_description_says(policy: str, work: Workload, budget: int) -> None:
    plain = simulate(work, policy, budget, make=lambda w, b: PlainCache(w, b, policy))
    assert simulate(work, policy, budget) == plain


@given(workloads(), st.integers(1, 20))
@settings(max_examples=150, deadline=None)
def test_nothing_beats_belady_among_equal_entries(work: Workload, budget: int) -> None:
    best = simulate(work, "belady", budget).hits
    for policy in ("lru", "lfu", "random", "engine"):
        assert simulate(work, policy, budget).hits <= best
    # A per-layer cache may hold more than its share, and then more than Bélády may.
    if budget // work.n_layer >= max(len(call.keys) for call in work.calls):
        for policy in ("layer-lru", "layer-lfu"):
            assert simulate(work, policy, budget).hits <= best


@given(workloads(), st.sampled_from(["lru", "layer-lru"]))
@settings(max_examples=60, deadline=None)
def test_a_larger_lru_never_hits_less(work: Workload, policy: str) -> None:
    hits = [simulate(work, policy, budget).hits for budget in range(1, 20)]
    assert hits == sorted(hits)


@given(workloads(equal_sizes=False), st.sampled_from(sorted(POLICIES)))
@settings(max_examples=60, deadline=None)
def test_with_room_for_all_only_first_uses_miss(work: Workload, policy: str) -> None:
    seen: set[int] = set()
    first_uses = 0
    for call in work.calls:
        first_uses += len(set(call.keys) - seen) if call.decode else 0
        seen |= set(call.keys)
    point = simulate(work, policy, 3 * work.n_layer * len(work.sizes))
    assert point.lookups - point.hits == first_uses


@given(workloads(equal_sizes=False), st.sampled_from(sorted(POLICIES)), st.integers(1, 20))
@settings(max_examples=100, deadline=None)
def test_a_cache_keeps_its_budget_and_what_the_call_needs(
    work: Workload, policy: str, budget: int
) -> None:
    cache = POLICIES[policy](work, budget * MIB)
    resident: set[int] = set()
    for call in work.calls:
        cache.load(call.keys)
        resident = {key for key in work.sizes if key in cache}
        assert resident >= set(call.keys)
        assert cache.held == sum(work.sizes[key] for key in resident)
        if "layer" not in policy:
            assert cache.held <= max(budget * MIB, sum(work.sizes[key] for key in call.keys))


def test_held_bytes_show_a_share_that_is_too_small() -> None:
    calls = tuple(Call(True, (layer * 6, layer * 6 + 1), layer == 1) for layer in (0, 1, 0, 1))
    work = Workload(calls, 6, 2, dict.fromkeys((0, 1, 6, 7), MIB))
    assert simulate(work, "layer-lru", 2).held_bytes == 4 * MIB
    assert simulate(work, "lru", 2).held_bytes == 2 * MIB


def test_prefill_is_one_call_in_order_of_last_use() -> None:
    rows = [
        *("0,0,0,0,0,5,.5,0,0,0", "0,0,0,0,1,6,.5,0,0,0"),
        *("0,0,1,0,0,7,.5,0,0,0", "0,0,1,0,1,5,.5,1,0,0"),
        *("0,1,2,0,0,1,.5,0,0,0", "0,1,2,0,1,2,.5,0,0,0"),
    ]
    assert workload(trace_of(rows)).calls == (
        Call(False, (6, 7, 5), False),
        Call(True, (1, 2), True),
    )
