"""Rates with intervals: the field's published digits, and what must hold of any run."""

from __future__ import annotations

import csv
import itertools
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InputError
from engine.stats import block_for, compare, rate

METRICS = Path(__file__).resolve().parents[2] / "shared" / "data" / "metrics"
PUBLISHED = {"off": "2.549", "050": "2.564", "075": "3.938", "100": "4.702"}
"""Tokens per second by dropped fraction (../shared/formats.md)."""

times = st.lists(st.floats(1.0, 1e5), min_size=1, max_size=60)


def wall_ms(name: str) -> list[float]:
    path = METRICS / f"qwen3.6-35b-drop-{name}.csv"
    if not path.exists():
        pytest.skip("the shared example runs are not here")
    lines = (line for line in path.read_text().splitlines() if not line.startswith("#"))
    return [float(row["wall_ms"]) for row in csv.DictReader(lines)]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_rates_come_out_to_the_digit(name: str) -> None:
    found = rate(wall_ms(name))
    assert f"{found.tok_s:.3f}" == PUBLISHED[name]
    assert found.interval.contains(found.tok_s)


@pytest.mark.parametrize("correlated", [False, True], ids=["independent", "moving-block"])
@pytest.mark.parametrize("pair", itertools.combinations(PUBLISHED, 2), ids="-".join)
def test_every_published_pair_but_one_is_separated(pair: tuple[str, str], correlated: bool) -> None:
    before, after = wall_ms(pair[0]), wall_ms(pair[1])
    block = block_for(len(before)) if correlated else 1
    assert compare(before, after, block=block).separated == (pair != ("off", "050"))


@given(times, st.integers(1, 80))
@settings(max_examples=40)
def test_resampling_stays_within_the_fastest_and_the_slowest_token(
    run: list[float], block: int
) -> None:
    found = rate(run, block=block, resamples=50)
    slack = 1e-9
    assert found.interval.low >= 1000 / max(run) * (1 - slack)
    assert found.interval.high <= 1000 / min(run) * (1 + slack)
    assert found.tok_s == pytest.approx(1000 * len(run) / sum(run))


@given(times, st.floats(0.1, 10))
@settings(max_examples=40)
def test_a_run_scaled_by_a_factor_has_the_rate_scaled(run: list[float], factor: float) -> None:
    found = compare(run, [value * factor for value in run], resamples=50)
    assert found.ratio == pytest.approx(1 / factor)


def test_steady_runs_are_told_apart_and_equal_ones_are_not() -> None:
    assert compare([100.0] * 20, [80.0] * 20).separated
    assert not compare([100.0] * 20, [100.0] * 20).separated


def test_the_same_seed_gives_the_same_digits() -> None:
    run = np.random.default_rng(3).gamma(4, 50, 200)
    assert rate(run, seed=7) == rate(run, seed=7)
    assert rate(run, seed=7).interval != rate(run, seed=8).interval


@pytest.mark.parametrize("run", [[], [0.0], [-1.0], [float("nan")], [float("inf")]])
def test_times_that_are_none_are_refused(run: list[float]) -> None:
    with pytest.raises(InputError):
        rate(run)


def test_long_runs_take_no_time_that_a_person_feels() -> None:
    run = np.random.default_rng(1).gamma(4, 50, 20_000)
    started = time.perf_counter()
    rate(run, resamples=1000)
    assert time.perf_counter() - started < 2.0
