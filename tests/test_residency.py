"""The expert cache by value: who is resident, who goes first, what memory is given back."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.ahead import ReadAhead
from engine.counters import ABSENT, RESIDENT, GuessCounters
from engine.experts import Bank, ExpertLayer, ExpertTag, slice_pages
from engine.lane_jobs import Move, Read
from engine.lanes import Lanes
from engine.mapping import PAGE, ShardMapping, move_pages, page_ceil
from engine.no_cache import NoCache
from engine.residency import ExpertCache
from engine.sizing import mappings_needed
from tests.naive_retention import NaiveCache

N_EXPERT = 6
SLICES = (5000, 9000)
"""Not multiples of a page, so that neighbours share pages."""


def layers_of(n_layers: int) -> tuple[list[ExpertLayer], int]:
    """Layers of two banks each, one behind the other from an odd offset; and their end."""
    layers, offset = [], 777
    for number in range(n_layers):
        banks = []
        for role, size in zip(("gate", "down"), SLICES, strict=True):
            size += 100 * number
            banks.append(Bank(f"blk.{number}.{role}", 0, offset, size, N_EXPERT))
            offset += size * N_EXPERT + 33
        layers.append(ExpertLayer(number, tuple(banks)))
    return layers, offset


@contextmanager
def arena_of(n_layers: int) -> Iterator[tuple[list[ExpertLayer], ShardMapping]]:
    """Layers, and own memory where their banks lie."""
    layers, end = layers_of(n_layers)
    # Not closed: views of it may outlive a failed assertion. It goes with its last reference.
    memory = mmap.mmap(-1, page_ceil(end), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    yield layers, ShardMapping.at(Path("arena"), address, 0, page_ceil(end), end)


@pytest.fixture
def arena() -> Iterator[tuple[list[ExpertLayer], ShardMapping]]:
    with arena_of(3) as found:
        yield found


Calls = list[tuple[int, list[int]]]
calls = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.integers(0, N_EXPERT - 1), min_size=1, max_size=9)),
    min_size=1,
    max_size=60,
)


@given(calls=calls, budget=st.integers(1, 300_000))
def test_it_keeps_what_the_policy_keeps(calls: Calls, budget: int) -> None:
    with arena_of(3) as (layers, shard):
        cache = ExpertCache(layers, [shard], budget)
        sizes = [layer.entry_bytes for layer in layers]
        naive = NaiveCache(len(layers), N_EXPERT, lambda key: sizes[key[0]], budget)
        for index, experts in calls:
            reads = cache.stage(index, experts)
            cache.arrived(reads)
            expected = naive.load(index, experts)
            missed = [read.tag.expert for read in reads if isinstance(read.tag, ExpertTag)]
            assert list(dict.fromkeys(missed)) == expected
            present = {(i, e) for i in range(3) for e in range(N_EXPERT) if cache.is_resident(i, e)}
            assert present == naive.resident
            assert cache.resident_bytes == sum(layers[i].entry_bytes for i, _ in present)
            states = cache.counters.state
            assert {(int(i), int(e)) for i, e in np.argwhere(states == RESIDENT)} == present
        looked_up = sum(len(set(experts)) for _, experts in calls)
        assert cache.hits + cache.misses == looked_up


def test_nothing_staged_is_no_call(arena: tuple[list[ExpertLayer], ShardMapping]) -> None:
    """A prompt's batch may leave the last layer without a position."""
    layers, shard = arena
    cache = ExpertCache(layers, [shard], layers[0].entry_bytes)
    cache.stage(0, [0, 1])
    assert cache.stage(1, []) == []
    assert cache.is_resident(0, 0) and cache.is_resident(0, 1)


def test_an_expert_without_pages_of_its_own() -> None:
    """Its slices lie where the bank's end shares a page with another tensor: nothing to read."""
    last = N_EXPERT - 1
    large = Bank("blk.0.up", 0, 0, 3 * PAGE, N_EXPERT)
    small = Bank("blk.1.up", 0, N_EXPERT * 3 * PAGE, 2000, N_EXPERT)
    assert small.inside_last < small.offset + last * 2000
    layers = [ExpertLayer(0, (large,)), ExpertLayer(1, (small,))]
    end = small.offset + N_EXPERT * 2000
    memory = mmap.mmap(-1, page_ceil(end), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    shard = ShardMapping.at(Path("arena"), address, 0, page_ceil(end), end)
    cache = ExpertCache(layers, [shard], layers[0].entry_bytes)
    cache.stage(0, [0])
    assert cache.stage(1, [last]) == []
    # What left for it must not wait for reads that never come: by then it may be back.
    assert cache.evictions == 1 and cache.take_releases() == []
    cache.forget(1, [last])
    lanes = Lanes([], 1)
    ahead = ReadAhead(cache, lanes, GuessCounters(2), lambda _outcomes: None)
    ahead.begin(1, [last], 4)
    assert cache.is_resident(1, last)
    ahead.settle()
    lanes.close()
    cache.set_budget(1)
    assert not cache.is_resident(1, last)


def test_edges_stay_again_when_the_budget_has_grown_again() -> None:
    with arena_of(1) as (layers, shard):
        cache = ExpertCache(layers, [shard], 1 << 30, moves_pages=True)
        assert cache._keeps_edges
        for budget, keeps in ((1, False), (1 << 30, True)):
            cache.set_budget(budget)
            assert cache._keeps_edges == keeps


@pytest.mark.parametrize("moves_pages", [True, False])
@given(calls=calls, budget=st.integers(1, 200_000))
def test_resident_bytes_are_never_given_back(moves_pages: bool, calls: Calls, budget: int) -> None:
    """Exactly the pages of resident slices are in memory, whichever neighbours come and go."""
    with arena_of(2) as (layers, shard):
        cache = ExpertCache(layers, [shard], budget, moves_pages=moves_pages)
        for index, experts in calls:
            reads = cache.stage(index % 2, experts)
            for release in cache.take_releases():
                shard.release(release.first, release.last)
            for read in reads:
                if read.move is not None:
                    carry_out(read.move, shard)
                for page in range(read.first, read.last, PAGE):
                    shard.view[page] = 1
            needed = {
                page
                for i, layer in enumerate(layers)
                for expert in range(N_EXPERT)
                if cache.is_resident(i, expert)
                for bank in layer.banks
                for page in range(*slice_pages(bank, expert), PAGE)
            }
            held = {page for page in range(0, len(shard.view), PAGE) if shard.view[page]}
            assert held == needed


def carry_out(move: Move, shard: ShardMapping) -> None:
    """Move pages as a lane does; what they held must not be anybody's, before or after."""
    release = move.release
    assert release.first <= release.core_first
    assert release.core_first + release.core_bytes <= release.last
    assert move_pages(shard.base + release.core_first, shard.base + move.target, release.core_bytes)
    shard.release(release.first, release.last)
    shard.view[move.target : move.target + release.core_bytes] = bytes(release.core_bytes)


def test_evicted_memory_is_taken_over_before_more_is_asked_for(
    arena: tuple[list[ExpertLayer], ShardMapping],
) -> None:
    layers, shard = arena
    cache = ExpertCache(layers, [shard], 2 * layers[2].entry_bytes, moves_pages=True)
    assert all(read.move is None for read in cache.stage(0, [0, 2]))
    reads = cache.stage(1, [3])
    assert cache.evictions == 1
    # Of 5000 bytes no page is sure to be a slice's own.
    assert [read.move is not None for read in reads] == [False, True]
    assert cache.moved == 1
    move = reads[1].move
    assert move is not None
    assert reads[1].first <= move.target
    assert move.target + move.release.core_bytes <= reads[1].last


def test_slices_of_other_sizes_do_not_take_each_others_memory() -> None:
    sizes = (8 * PAGE, 12 * PAGE)
    layers = [
        ExpertLayer(number, (Bank(f"b{number}", 0, number * 64 * PAGE, size, 4),))
        for number, size in enumerate(sizes)
    ]
    memory = mmap.mmap(-1, 128 * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    shard = ShardMapping.at(Path("arena"), address, 0, 128 * PAGE, 128 * PAGE)
    cache = ExpertCache(layers, [shard], 20 * PAGE, moves_pages=True)
    cache.stage(0, [0, 1])
    assert [read.move for read in cache.stage(1, [0])] == [None]
    assert len(cache.take_releases()) == 1
    (read,) = cache.stage(1, [1])
    assert read.move is not None
    assert read.move.release.core_bytes == read.last - read.first == 12 * PAGE


def n_mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def test_moving_for_ever_does_not_cut_the_address_space_into_ever_more_mappings() -> None:
    """The system bounds them, and refuses everything once they are used up."""
    n_expert, size = 24, 5 * PAGE + 700
    layers = [
        ExpertLayer(
            number, (Bank(f"b{number}", 0, 777 + number * size * (n_expert + 1), size, n_expert),)
        )
        for number in range(2)
    ]
    end = 777 + 2 * size * (n_expert + 1)
    memory = mmap.mmap(-1, page_ceil(end), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    shard = ShardMapping.at(Path("arena"), address, 0, page_ceil(end), end)
    cache = ExpertCache(layers, [shard], 9 * size, moves_pages=True)
    random = np.random.default_rng(3)
    before = n_mappings()
    for _ in range(2000):
        for read in cache.stage(int(random.integers(2)), random.choice(n_expert, 3).tolist()):
            if read.move is not None:
                carry_out(read.move, shard)
        cache.take_releases()
    assert cache.moved > 2000
    allowed = mappings_needed(layers) - mappings_needed([])
    assert n_mappings() - before <= allowed


def test_a_shrunk_budget_holds_at_once(
    arena: tuple[list[ExpertLayer], ShardMapping],
) -> None:
    layers, shard = arena
    cache = ExpertCache(layers, [shard], 10**6)
    cache.stage(0, [0, 1, 2])
    cache.stage(1, [3, 4])
    cache.set_budget(2 * layers[1].entry_bytes)
    assert cache.resident_bytes <= cache.budget_bytes
    assert cache.evictions == 3
    # All were used once in this pass, and layer 0 comes before layer 1 again; 0 was used first.
    assert [cache.is_resident(0, e) for e in (1, 2)] == [True, True]
    assert cache.take_releases() == []
    cache.set_budget(0)
    assert cache.resident_bytes == 0


def test_failed_reads_leave_no_trace(arena: tuple[list[ExpertLayer], ShardMapping]) -> None:
    layers, shard = arena
    cache = ExpertCache(layers, [shard], 10**6)
    cache.stage(0, [1])
    before = cache.resident_bytes
    reads: list[Read] = cache.stage(0, [1, 2, 3])
    cache.forget(0, {read.tag.expert for read in reads})  # type: ignore[attr-defined]
    assert cache.resident_bytes == before
    assert (cache.counters.state[0, 2:4] == ABSENT).all()
    assert [read.tag for read in cache.stage(0, [2])]


def test_without_a_cache_layers_share_memory(
    arena: tuple[list[ExpertLayer], ShardMapping],
) -> None:
    layers, shard = arena
    store = NoCache(layers, [shard])
    try:
        first, second = layers[0].banks[0], layers[1].banks[0]
        shard.view[first.inside_first] = 7
        assert shard.view[second.inside_first] == 7
        assert len(store.stage(0, [4, 4, 1])) == 2 * len(layers[0].banks)
        assert store.misses == 2
        assert not store.is_resident(0, 4)
    finally:
        store.close()
