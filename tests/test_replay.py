"""The replay: the field's published figures, and what must hold of any trace."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InputError
from engine.replay import replay
from engine.replay_cache import (
    POLICIES,
    default_budgets,
    simulate,
    workload,
)
from engine.replay_dynamic import DynamicReplay
from engine.replay_lossy import DecodeRows, drop_curve, topk_curve
from engine.replay_predict import accuracies, popularity
from engine.traces import RouteTrace, TraceModel, read_route_trace
from tests.route_samples import (
    EXCERPT,
    SHARED,
    Sample,
    decode_rows,
    needs_shared,
    sampled,
    samples,
    trace_of,
)

PUBLISHED_POLICIES = ("belady", "lru", "lfu", "layer-lru", "layer-lfu")

PUBLISHED_HITS = {
    750: (55.4, 0.0, 34.1, 38.3, 38.3),
    1000: (62.7, 37.7, 40.2, 42.3, 45.1),
    2000: (79.4, 56.5, 58.6, 59.4, 63.3),
    4000: (92.7, 80.3, 80.8, 79.7, 81.7),
    6000: (96.6, 92.1, 92.0, 90.3, 91.0),
}
"""Percent by budget in MiB (../shared/formats.md)."""

PUBLISHED_DROPS = {0.5: ("5.8", "0.49"), 0.75: ("36.8", "4.44"), 1.0: ("66.1", "9.46")}
PUBLISHED_TOP_K = {5: ("23.2", "10.60"), 3: ("58.8", "36.78")}


@pytest.fixture(scope="module")
def shared() -> RouteTrace:
    return read_route_trace(SHARED)


@pytest.fixture(scope="module")
def excerpt() -> RouteTrace:
    return read_route_trace(EXCERPT)


@needs_shared
@pytest.mark.parametrize("budget", PUBLISHED_HITS)
def test_the_published_cache_curve(shared: RouteTrace, budget: int) -> None:
    work = workload(shared)
    found = [simulate(work, policy, budget).hit_pct for policy in PUBLISHED_POLICIES]
    assert [f"{pct:.1f}" for pct in found] == [f"{pct:.1f}" for pct in PUBLISHED_HITS[budget]]


@needs_shared
def test_the_published_drop_and_top_k_curves(shared: RouteTrace) -> None:
    rows = DecodeRows(shared)
    drops = {p.frac: (p.io_saved_pct, p.mass_lost_pct) for p in drop_curve(rows)}
    for frac, (saved, lost) in PUBLISHED_DROPS.items():
        assert (f"{drops[frac][0]:.1f}", f"{drops[frac][1]:.2f}") == (saved, lost)
    kept = {p.k: (p.io_saved_pct, p.mass_lost_pct) for p in topk_curve(rows)}
    for k, (saved, lost) in PUBLISHED_TOP_K.items():
        assert (f"{kept[k][0]:.1f}", f"{kept[k][1]:.2f}") == (saved, lost)


@needs_shared
def test_the_recording_is_an_lru_of_4000_mib(shared: RouteTrace) -> None:
    """The recorded residency is another engine's measurement: our simulation must hit the same."""
    assert shared.residency is not None
    recorded = shared.residency[shared.decode] == 0
    rows = DecodeRows(shared)
    simulated = DynamicReplay(shared, rows, workload(shared), "lru")._all_loaded(4000)
    np.testing.assert_array_equal(simulated, recorded)


@needs_shared
def test_eleven_budgets_take_less_than_ten_seconds(shared: RouteTrace) -> None:
    started = time.process_time()
    work = workload(shared)
    budgets = default_budgets(shared)
    for policy, budget in itertools.product(("lru", "lfu", "layer-lru", "layer-lfu"), budgets):
        simulate(work, policy, budget)
    assert time.process_time() - started < 10


@needs_shared
def test_default_budgets_are_the_published_ones(shared: RouteTrace) -> None:
    assert default_budgets(shared) == [
        *(750, 1000, 1500, 2000, 3000, 4000, 5000, 6000, 8000, 10000, 12000)
    ]


def test_default_budgets_of_few_experts_end_at_all_of_them() -> None:
    layers = ("# layer=0 expert_bytes=10485760", "# layer=1 expert_bytes=10485760")
    budgets = default_budgets(trace_of(decode_rows([[0, 1]]), layers=layers))
    assert budgets == [40, 46, 53, 61, 70, 80, 92, 106, 121, 139, 160]


@given(st.integers(1, 1 << 50), st.integers(1, 300), st.data())
def test_default_budgets_suit_any_model(size: int, n_expert: int, data: st.DataObject) -> None:
    used = data.draw(st.integers(1, n_expert))
    shape = f"# n_layer=1 n_expert={n_expert} n_expert_used={used}"
    trace = trace_of(
        ["0,1,0,0,0,0,1,0,0,0"], shape=shape, layers=(f"# layer=0 expert_bytes={size}",)
    )
    budgets = default_budgets(trace)
    assert 1 <= len(budgets) <= 11
    assert budgets == sorted(set(budgets)) and budgets[0] >= 1


def test_a_trace_without_decoded_tokens_has_no_hit_rate() -> None:
    result = replay(trace_of(["0,0,0,0,0,5,.5,0,0,0"]))
    assert {point.hit_pct for point in result.cache_curve} == {None}
    assert result.trace.hit_pct is None
    assert {point.io_saved_pct for point in result.drop_curve} == {None}
    assert any("no decoded tokens" in note for note in result.notes)


def test_budgets_must_be_positive(excerpt: RouteTrace) -> None:
    with pytest.raises(InputError, match="a budget of 0 MiB"):
        replay(excerpt, [100, 0])


# --- lossy settings


def test_dropping_counts_cold_weak_experts_but_never_the_strongest() -> None:
    # Weights of 3 sum to 2.0: a uniform share is 0.667, whatever the preamble's top-k.
    trace = trace_of(
        [
            *("0,1,0,0,0,0,0.9,0,1048576,0", "0,1,0,0,1,1,0.66,0,1048576,0"),
            *("0,1,0,0,2,2,0.44,1,0,0", "0,1,1,0,0,3,0.6,0,1048576,0"),
            *("0,1,1,0,1,4,0.7,0,1048576,0", "0,1,1,0,2,5,0.7,1,0,0"),
        ]
    )
    rows = DecodeRows(trace)
    half, full = drop_curve(rows, [0.5, 1.0])
    assert (half.io_saved_pct, half.mass_lost_pct) == (0.0, 0.0)
    assert full.io_saved_pct == 50.0
    assert full.mass_lost_pct == pytest.approx(100 * (0.66 + 0.6) / 4.0)
    weak = rows.weak(9.0)
    assert weak is not None
    assert weak.tolist() == [False, True, True, True, False, True]


def test_equal_weights_are_not_below_their_share() -> None:
    rows = DecodeRows(trace_of(decode_rows([[0, 1]], weights=("0.5", "0.5"))))
    weak = rows.weak(1.0)
    assert weak is not None and not weak.any()


def test_what_is_dropped_stays_cold() -> None:
    """Expert 1 is routed weakly three times: read once without dropping, dropped thrice with."""
    trace = trace_of(decode_rows([[0, 1], [0, 1], [0, 1]], weights=("0.9", "0.1")))
    rows = DecodeRows(trace)
    (point,) = DynamicReplay(trace, rows, workload(trace)).drop(100, [1.0])
    assert point.static_io_saved_pct == 50.0
    assert point.static_mass_lost_pct == pytest.approx(100 * 0.1 / 3)
    assert point.io_saved_pct == 50.0
    assert point.mass_lost_pct == pytest.approx(10.0)
    assert point.drop_pct == 50.0
    assert point.read_mib_per_token == pytest.approx(1 / 3)


def test_substitution_needs_a_resident_expert_that_is_not_routed() -> None:
    trace = trace_of(decode_rows([[0, 1], [2, 3], [2, 1]], weights=("0.9", "0.1")))
    rows = DecodeRows(trace)
    (point,) = DynamicReplay(trace, rows, workload(trace)).substitute(100, [1.0])
    # Nothing is resident for expert 1; 0 or 1 steps in for expert 3; 1 is resident at last.
    assert point.substitute_pct == pytest.approx(100 / 6)
    assert point.refused_pct == 50.0
    assert point.io_saved_pct == 25.0
    assert point.replaced_mass_pct == pytest.approx(100 * 0.1 / 3)


@pytest.mark.parametrize("policy", ["engine", "lru"])
@given(samples(), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_dropping_nothing_is_the_plain_cache(
    policy: str, run: tuple[TraceModel, list[Sample]], budget: int
) -> None:
    trace = sampled(run)
    work, rows = workload(trace), DecodeRows(trace)
    dynamic = DynamicReplay(trace, rows, work, policy)
    misses = dynamic._all_loaded(budget)
    point = simulate(work, policy, budget)
    assert int((~misses).sum()) == point.hits
    assert int(rows.bytes[misses].sum()) == point.read_bytes
    if rows.weight is not None and len(rows.weight):
        (drop,) = dynamic.drop(budget, [0.0])
        assert drop.io_saved_pct in (0.0, None)
        assert drop.drop_pct == drop.mass_lost_pct == 0.0


@given(samples(), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_any_trace_can_be_replayed(run: tuple[TraceModel, list[Sample]], budget: int) -> None:
    result = replay(sampled(run), [budget])
    for point in [*result.drop_curve, *result.topk_curve, *result.drop_dynamic]:
        assert point.mass_lost_pct is None or -1e-9 <= point.mass_lost_pct <= 100 + 1e-9
    for judged in result.predictors:
        assert judged.hit_pct is None or 0 <= judged.hit_pct <= 100


def test_unknown_is_none_and_a_note_says_why() -> None:
    rows = ["0,1,0,0,0,0", "0,1,0,0,1,1"]
    result = replay(trace_of(rows, header="turn,phase,step,layer,slot,expert"), [10])
    trace = result.trace
    assert (trace.hit_pct, trace.drop_pct, trace.substitute_pct, trace.read_mib) == (None,) * 4
    assert {(p.io_saved_pct, p.mass_lost_pct) for p in result.topk_curve} == {(None, None)}
    assert {(p.io_saved_pct, p.drop_pct) for p in result.drop_dynamic} == {(None, None)}
    assert {p.io_saved_pct for p in result.substitute_curve} == {None}
    assert [p.io_saved_pct for p in result.topk_dynamic] == [50.0]
    assert [p.hit_pct for p in result.cache_curve] == [0.0] * len(POLICIES)
    assert any("no column 'weight'" in note for note in result.notes)
    assert any("no column 'residency'" in note for note in result.notes)


def test_a_weight_that_is_not_shown_is_named_with_its_line() -> None:
    result = replay(trace_of(decode_rows([[0, 1], [2, 3]], weights=("0.7", "nan"))), [10])
    assert {p.mass_lost_pct for p in result.drop_curve + result.topk_curve} == {None}
    assert {p.io_saved_pct for p in result.drop_curve} == {None}
    assert {p.io_saved_pct for p in result.topk_curve} == {50.0}
    assert any("2 decoded rows" in note and "line 7" in note for note in result.notes)


def test_recorded_drops_are_no_lookups() -> None:
    rows = [
        *("0,1,0,0,0,0,0.8,1,0,0", "0,1,0,0,1,1,0.2,0,0,1"),
        *("0,1,1,0,0,0,0.8,1,0,0", "0,1,1,0,1,2,0.2,0,1048576,0"),
    ]
    result = replay(trace_of(rows), [10])
    assert result.trace.hit_pct == pytest.approx(100 * 2 / 3)
    assert result.trace.drop_pct == 25.0
    assert result.trace.read_mib == 1.0
    assert any("Recorded with dropping on" in note for note in result.notes)


# --- guesses and popularity


def test_predictors_on_a_run_that_can_be_counted_by_hand() -> None:
    rows = [
        *("0,0,0,0,0,4,.5,0,0,0", "0,0,0,0,1,5,.5,0,0,0"),
        *decode_rows([[9, 9], [4, 1], [1, 4], [1, 2]])[2:],
    ]
    trace = trace_of(rows)
    previous, so_far, overall = accuracies(trace)
    # Before step 1 came 4, 5; before step 2: 4, 1; before step 3: 1, 4.
    assert previous.hit_pct == pytest.approx(100 * (1 + 2 + 1) / 6)
    # 4, 5; then 4 (twice) and 1 before 5; then 4 (thrice) and 1.
    assert so_far.hit_pct == pytest.approx(100 * (1 + 2 + 1) / 6)
    # 1 three times, 4 twice, 2 once.
    assert overall.hit_pct == pytest.approx(100 * (2 + 2 + 1) / 6)
    assert overall.layers == {0: overall.hit_pct}


def test_the_first_token_of_a_turn_has_no_previous_one() -> None:
    rows = decode_rows([[0, 1]]) + [
        row.replace("0,1,0", "1,1,0", 1) for row in decode_rows([[0, 1]])
    ]
    previous, so_far, _ = accuracies(trace_of(rows))
    assert previous.hit_pct is None
    assert so_far.hit_pct == 100.0


def test_popularity_counts_decoded_slots() -> None:
    (layer,) = popularity(trace_of(decode_rows([[0, 1], [0, 2], [0, 1]])))
    assert layer.counts == [3, 2, 1, 0, 0, 0, 0, 0]
    assert (layer.routed, layer.distinct, layer.experts_for_half) == (6, 3, 1)
    assert layer.top(2) == [(0, 50.0), (1, pytest.approx(100 / 3))]


def test_the_excerpt_replays_as_before(excerpt: RouteTrace) -> None:
    """Figures of this program, kept so that a change of meaning does not go unnoticed."""
    result = replay(excerpt, [100])
    assert [f"{point.hit_pct:.2f}" for point in result.cache_curve] == [
        *("49.61", "23.57", "34.90", "29.95", "33.33", "19.66", "31.64")
    ]
    static = result.drop_curve[2]
    assert static.frac == 0.75
    assert static.io_saved_pct == pytest.approx(33.226, abs=1e-3)
    assert static.mass_lost_pct == pytest.approx(5.763, abs=1e-3)
    dynamic = result.drop_dynamic[2]
    assert (dynamic.budget_mib, dynamic.frac) == (100, 0.75)
    assert dynamic.io_saved_pct == pytest.approx(29.909, abs=1e-3)
    assert dynamic.mass_lost_pct == pytest.approx(11.685, abs=1e-3)
