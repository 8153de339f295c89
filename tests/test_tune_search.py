"""The search of `tune` by value: simulated machines, no engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import RunConfig
from engine.tune_knobs import (
    FRACTION,
    LANES,
    OVERLAP,
    PREFETCH,
    THREADS,
    Place,
    knobs,
    start_settings,
)
from engine.tune_rounds import ratio_interval, t_quantile
from engine.tune_search import Cell, Knob, Rules, Sample, Search

START = {LANES: 4, OVERLAP: "on", THREADS: 4, FRACTION: 0.0}
Model = Callable[[dict[str, Any]], float]
"""Milliseconds per token under settings."""


def simulate(
    search: Search,
    ms: Model,
    *,
    kl: Model = lambda _settings: 0.0,
    noise: float = 0.02,
    cell_noise: float = 0.0,
    seed: int = 0,
    n: int = 48,
    stop_after: int | None = None,
) -> list[Cell]:
    """Run a search on a made-up machine; return the cells that it asked for."""
    random = np.random.default_rng(seed)
    cells: list[Cell] = []
    steps = search.run()
    cell = next(steps)
    while True:
        cells.append(cell)
        if stop_after is not None and len(cells) > stop_after:
            return cells
        luck = math.exp(cell_noise * random.standard_normal())
        times = ms(cell.settings) * luck * np.exp(noise * random.standard_normal(n))
        costs: Any = kl(cell.settings) * random.gamma(4, 0.25, n) if cell.needs_kl else []
        try:
            cell = steps.send(Sample(list(times), list(costs)))
        except StopIteration:
            return cells


def lanes(*ladders: tuple[int, ...]) -> Knob:
    return Knob(LANES, ladders)


DROPS = Knob(FRACTION, ((0.25, 0.5, 0.75, 1.0),), lossy=True)


def test_a_faster_setting_is_found_and_climbed_to() -> None:
    search = Search(START, [lanes((8, 16), (2,))], Rules())
    simulate(search, lambda s: 100 / min(s[LANES], 8))
    assert search.settings[LANES] == 8
    assert [(t.after, t.accepted) for t in search.trials] == [(8, True), (16, False)]
    assert search.trials[0].verdict == "faster"
    assert search.trials[0].comparison.ratio == pytest.approx(2, rel=0.05)
    # The other ladder is not climbed when the first one gained.
    assert search.whole is not None and search.whole.verdict == "faster"
    assert search.whole.comparison.ratio == pytest.approx(2, rel=0.05)


def test_where_nothing_is_faster_nothing_changes_and_little_is_measured() -> None:
    search = Search(START, [lanes((8, 16), (2, 1))], Rules())
    cells = simulate(search, lambda s: 10 + s[LANES] / 4 if s[LANES] > 4 else 14 - s[LANES] / 2)
    assert search.settings == START
    assert [t.after for t in search.trials] == [8, 2]
    assert search.whole is None
    # Two rounds of each: no round was faster, so neither ladder goes on.
    assert len(cells) == 2 * 2 * 2


def test_cells_are_interleaved_and_the_order_reversed() -> None:
    search = Search(START, [lanes((8,))], Rules())
    cells = simulate(search, lambda s: 100 / s[LANES])
    assert [(c.round, c.settings[LANES]) for c in cells[:6]] == [
        *((0, 4), (0, 8), (1, 8), (1, 4), (2, 4), (2, 8))
    ]


def test_noise_between_cells_is_not_taken_for_speed() -> None:
    """Cells differ by 20 % for no reason; within a cell tokens are alike, as they really are."""
    believed = 0
    for seed in range(60):
        search = Search(START, [lanes((8,))], Rules())
        simulate(search, lambda _s: 10.0, noise=0.01, cell_noise=0.2, seed=seed)
        believed += search.trials[0].accepted
    assert believed <= 6


def test_a_drift_of_the_whole_machine_is_not_taken_for_speed() -> None:
    """Everything slows down while it measures."""
    clock = iter(range(10**6))
    search = Search(START, [lanes((8,))], Rules())
    simulate(search, lambda _s: 10 * 1.03 ** next(clock))
    assert not search.trials[0].accepted


def cost(settings: dict[str, Any]) -> float:
    return float(0.04 * settings[FRACTION] ** 2)


def quicker(settings: dict[str, Any]) -> float:
    return float(10 / (1 + settings[FRACTION]))


def test_drop_fractions_are_raised_until_the_bound_breaks() -> None:
    search = Search(START, [DROPS], Rules(max_kl=0.02))
    simulate(search, quicker, kl=cost)
    # 0.5 costs 0.01; 0.75 costs 0.0225, over the bound, and 1.0 is not tried.
    assert search.settings[FRACTION] == 0.5
    assert [(t.after, t.held, t.accepted) for t in search.trials[:2]] == [
        *((0.25, "held", True), (0.5, "held", True))
    ]
    assert search.trials[-1].after == 0.75 and not search.trials[-1].accepted
    assert search.trials[-1].held in ("broken", "not shown")
    assert len(search.trials) == 3


def test_a_bound_that_is_broken_ends_a_trial_at_once() -> None:
    search = Search(START, [DROPS], Rules(max_kl=1e-4))
    cells = simulate(search, quicker, kl=cost)
    assert search.settings[FRACTION] == 0.0
    assert len(cells) == 2
    assert search.trials[0].held == "broken"
    assert search.trials[0].reason == "breaks the quality bound"


def test_a_fraction_that_gains_too_little_does_not_end_the_ladder() -> None:
    search = Search(START, [DROPS], Rules(max_kl=1.0))
    simulate(search, lambda s: 10 if s[FRACTION] < 0.75 else 5, kl=cost)
    assert [t.accepted for t in search.trials] == [False, False, True, False]
    assert search.settings[FRACTION] == 0.75


def test_a_bound_that_is_not_shown_to_hold_is_not_claimed() -> None:
    """The mean lies just below the bound, its interval around it."""
    search = Search(START, [DROPS], Rules(max_kl=0.00253))
    simulate(search, quicker, kl=lambda s: cost(s) if s[FRACTION] == 0.25 else 9.0)
    assert search.trials[0].held == "not shown"
    assert search.settings[FRACTION] == 0.0
    assert search.trials[0].reason == "not shown to hold the quality bound"


def test_kl_is_asked_for_only_where_something_is_dropped() -> None:
    search = Search(START, [lanes((8,)), DROPS], Rules(max_kl=0.02))
    cells = simulate(search, quicker, kl=cost)
    assert all(cell.needs_kl <= bool(cell.settings[FRACTION]) for cell in cells)
    assert any(cell.needs_kl for cell in cells)


def test_what_must_change_along_is_tried_and_kept_together() -> None:
    """Prefetch that is on would make what is dropped depend on time."""
    start = {**START, PREFETCH: "off"}
    config, place = RunConfig(), replace(PLACE, can_prefetch=True)
    found = [knob for knob in knobs(config, start, place, lossy=True) if knob.key != LANES]

    def pays(settings: dict[str, Any]) -> float:
        return quicker(settings) / (1 if settings[PREFETCH] == "off" else 1.5)

    search = Search(start, found, Rules(max_kl=0.02))
    cells = simulate(search, pays, kl=cost)
    assert (search.settings[PREFETCH], search.settings[FRACTION]) == ("auto", 0.625)
    reads_ahead = [cell.settings for cell in cells if cell.settings[PREFETCH] != "off"]
    assert all((s[PREFETCH] == "auto") == (s[FRACTION] > 0) for s in reads_ahead)

    # Where nothing that drops is kept, prefetch stays as it was found.
    search = Search(start, found, Rules(max_kl=1e-4))
    simulate(search, pays, kl=cost)
    assert (search.settings[PREFETCH], search.settings[FRACTION]) == ("on", 0.0)


def test_prefetch_that_the_caller_set_is_held_while_dropping_is_tried() -> None:
    config = RunConfig().replace({PREFETCH: "on"})
    found = knobs(config, {**START, PREFETCH: "on"}, PLACE, lossy=True)
    search = Search({**START, PREFETCH: "on"}, found, Rules(max_kl=0.02))
    simulate(search, quicker, kl=cost)
    assert (search.settings[PREFETCH], search.settings[FRACTION]) == ("on", 0.625)


def test_what_was_learned_before_a_stop_is_there() -> None:
    search = Search(START, [lanes((8, 16)), DROPS], Rules(max_kl=0.02))
    simulate(search, lambda s: 100 / min(s[LANES], 8), kl=cost, stop_after=8)
    assert search.settings[LANES] == 8
    assert len(search.trials) == 1


@given(st.integers(3, 8), st.integers(0, 5))
@settings(max_examples=12)
def test_it_always_ends_within_what_it_foretold(max_rounds: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    search = Search(
        START, [lanes((8, 16), (2, 1)), DROPS], Rules(max_kl=0.02, max_rounds=max_rounds)
    )
    most = search.most_cells_left
    cells = simulate(search, lambda _s: 10 * math.exp(random.standard_normal()), kl=cost, seed=seed)
    assert len(cells) == search.cells_done <= most
    assert search.most_cells_left == 0


def test_the_quantiles_of_student() -> None:
    known = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 10: 2.228, 30: 2.042}
    for df, value in known.items():
        assert t_quantile(0.95, df) == pytest.approx(value, abs=5e-4)


@given(st.lists(st.floats(0.05, 20), min_size=1, max_size=8))
def test_an_interval_of_rounds_holds_their_mean_and_is_symmetric(ratios: list[float]) -> None:
    found = ratio_interval(ratios, 0.95)
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    assert found.low <= mean * (1 + 1e-9) and found.high >= mean * (1 - 1e-9)
    mirrored = ratio_interval([1 / ratio for ratio in ratios], 0.95)
    if 0 < found.low and found.high < 1e200:
        assert mirrored.low == pytest.approx(1 / found.high, rel=1e-6)


def test_one_round_says_nothing() -> None:
    assert ratio_interval([3.0], 0.95).low == 0
    assert ratio_interval([3.0], 0.95).high == math.inf


PLACE = Place(cores=4, cpus=8, good_lanes=2, overlap="on", can_overlap=True, everything_fits=False)


def tried(config: RunConfig, place: Place = PLACE, *, lossy: bool = True) -> dict[str, Any]:
    start = start_settings(config, place)
    return {knob.key: knob.ladders for knob in knobs(config, start, place, lossy=lossy)}


def test_what_is_tried_follows_from_the_machine() -> None:
    found = tried(RunConfig())
    assert found[LANES] == ((4, 8), (1,))
    assert found[OVERLAP] == (("off",),)
    assert found[THREADS] == ((3, 2), (8,))
    assert found[FRACTION] == ((0.25, 0.5, 0.625, 0.75, 0.875, 1.0),)
    assert list(found) == [LANES, OVERLAP, THREADS, FRACTION]
    assert FRACTION not in tried(RunConfig(), lossy=False)


def test_what_the_caller_set_is_held() -> None:
    given_settings = RunConfig().replace({LANES: 6, THREADS: 2, OVERLAP: "off"})
    assert list(tried(given_settings)) == [FRACTION]
    start = start_settings(given_settings, PLACE)
    assert (start[LANES], start[THREADS], start[OVERLAP]) == (6, 2, "off")


def test_a_cache_that_holds_everything_leaves_only_threads() -> None:
    fits = replace(PLACE, cores=2, cpus=2, good_lanes=None, everything_fits=True)
    assert tried(RunConfig(), fits) == {THREADS: ((1,),)}
    one_core = replace(fits, cores=1, cpus=1)
    assert tried(RunConfig(), one_core) == {}
    assert start_settings(RunConfig(), one_core)[LANES] == 4


def test_overlap_is_tried_against_what_it_is_by_itself() -> None:
    assert tried(RunConfig(), replace(PLACE, overlap="off"))[OVERLAP] == (("on",),)
    assert OVERLAP not in tried(RunConfig(), replace(PLACE, overlap="off", can_overlap=False))
