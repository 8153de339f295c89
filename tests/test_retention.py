"""The retention policy by value: its documented rule, what it never does, what it is for."""

from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import retention
from engine.replay_cache import Call, Workload, simulate, workload
from engine.replay_engine import EngineCache
from engine.retention import Retention
from engine.traces import read_route_trace
from tests import naive_retention
from tests.naive_retention import NaiveCache
from tests.route_samples import SHARED, needs_shared, workloads

N_LAYER, N_EXPERT = 12, 9

passes = st.lists(
    st.lists(
        st.tuples(st.integers(0, N_LAYER - 1), st.sets(st.integers(0, N_EXPERT - 1), min_size=1)),
        max_size=N_LAYER,
    ).map(sorted),
    min_size=1,
    max_size=12,
)


@given(passes, st.integers(1, 90), st.integers(1, 3), st.sampled_from([1, 2, 5, 64]))
@settings(max_examples=200, deadline=None)
def test_it_is_the_documented_rule(
    passes: list[list[tuple[int, set[int]]]], budget: int, widest: int, batch: int
) -> None:
    """Entries of one to three units, whole passes and parts of some, orders that run out."""

    def size(key: tuple[int, int]) -> int:
        return 1 + key[0] % widest

    sizes = {
        layer * N_EXPERT + expert: size((layer, expert))
        for layer in range(N_LAYER)
        for expert in range(N_EXPERT)
    }
    with (
        mock.patch.object(retention, "BATCH", batch),
        mock.patch.object(naive_retention, "BATCH", batch),
    ):
        cache = EngineCache(sizes, N_EXPERT, N_LAYER, budget)
        naive = NaiveCache(N_LAYER, N_EXPERT, size, budget)
        for one in passes:
            for layer, experts in one:
                used = sorted(experts, key=lambda expert: expert * 5 % N_EXPERT)
                cache.load([layer * N_EXPERT + expert for expert in used])
                naive.load(layer, used)
                assert {k for k in sizes if k in cache} == {
                    layer * N_EXPERT + expert for layer, expert in naive.resident
                }
                assert cache.held == naive.held
                assert naive.resident >= {(layer, expert) for expert in experts}


def used_once_each(layers: int) -> Retention:
    """A pass in which layer n uses its experts 0 and 1."""
    policy = Retention(layers, 4)
    for layer in range(layers):
        use(policy, layer, 0, 1)
    return policy


def use(policy: Retention, layer: int, *experts: int) -> None:
    keys = [layer * 4 + expert for expert in experts]
    for key in keys:
        policy.resident[key] = 1
    policy.use(layer, keys)


def test_what_the_present_call_uses_never_leaves() -> None:
    policy = used_once_each(3)
    assert [policy.evict() for _ in range(5)] == [4, 5, 0, 1, None]
    assert [key for key in range(12) if policy.resident[key]] == [8, 9]


def test_between_passes_all_can_leave() -> None:
    policy = used_once_each(3)
    policy.nothing_in_use()
    assert [policy.evict() for _ in range(7)] == [8, 9, 4, 5, 0, 1, None]


def test_what_was_used_since_the_order_was_made_stays() -> None:
    policy = Retention(4, 4)
    use(policy, 0, 0, 1)
    use(policy, 1, 3)
    use(policy, 0, 2)
    # The order is made here: 0, 1, then 7 of the next layer, which is used in it.
    assert policy.evict() == 0
    use(policy, 1, 3)
    assert [policy.evict() for _ in range(3)] == [1, 2, None]


def test_a_use_long_ago_brings_an_entry_back_to_stay() -> None:
    """Expert 0 was used ten times, then read again after it had left: once-used ones go first."""
    policy = Retention(1, 4)
    for _ in range(10):
        use(policy, 0, 0)
    use(policy, 0, 1)
    assert policy.evict() == 0
    use(policy, 0, 0)
    use(policy, 0, 2)
    assert policy.evict() == 1


def test_dropped_by_others_is_not_given_up_again() -> None:
    policy = used_once_each(3)
    assert policy.evict() == 4
    policy.resident[5] = 0
    assert policy.evict() == 0


@given(workloads(equal_sizes=False), st.integers(1, 20), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_blocks_without_experts_change_nothing(work: Workload, budget: int, before: int) -> None:
    """A model's first blocks may be dense: a trace counts them, the policy does not."""
    shift = before * work.n_expert
    moved = Workload(
        tuple(Call(c.decode, tuple(k + shift for k in c.keys), c.ends_token) for c in work.calls),
        work.n_expert,
        work.n_layer,
        {key + shift: size for key, size in work.sizes.items()},
    )
    assert simulate(moved, "engine", budget) == simulate(work, "engine", budget)


@needs_shared
@pytest.mark.parametrize(
    ("budget", "hits"),
    [(750, "36.4"), (1000, "43.1"), (2000, "63.5"), (4000, "83.3"), (6000, "92.4")],
)
def test_it_hits_more_than_lru_on_the_recorded_run(budget: int, hits: str) -> None:
    work = workload(read_route_trace(SHARED))
    found = simulate(work, "engine", budget)
    assert f"{found.hit_pct:.1f}" == hits
    assert found.hits > simulate(work, "lru", budget).hits
