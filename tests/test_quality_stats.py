"""Intervals by moving blocks: what must hold of any series."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from engine.quality_stats import Estimate, MovingBlocks

series = st.integers(16, 80).flatmap(
    lambda n: hnp.arrays(np.float64, n, elements=st.floats(0, 1e3))
)


@given(series)
@settings(max_examples=40)
def test_intervals_lie_within_the_values(values: np.ndarray) -> None:
    found = MovingBlocks(len(values), resamples=50).mean(values)
    assert found.value is not None and found.low is not None and found.high is not None
    slack = 1e-9 * (1 + values.max())
    assert values.min() - slack <= found.low <= found.high <= values.max() + slack
    assert found.value == pytest.approx(values.mean())


def test_zeros_are_exactly_zero() -> None:
    blocks, zeros = MovingBlocks(200), np.zeros(200)
    assert blocks.mean(zeros) == blocks.p99(zeros) == Estimate(0.0, 0.0, 0.0)


def test_the_same_tokens_always_give_the_same_digits() -> None:
    values = np.random.default_rng(0).exponential(size=300)
    assert MovingBlocks(300).mean(values) == MovingBlocks(300).mean(values)


def test_two_series_are_resampled_in_step() -> None:
    """The difference of a series and itself shifted by 1 is 1 in every resample."""
    values = np.random.default_rng(0).exponential(size=300)
    one, other = MovingBlocks(300).means(values), MovingBlocks(300).means(values + 1)
    assert np.allclose(other - one, 1.0)


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    random, held = np.random.default_rng(3), 0
    for _ in range(200):
        noise = random.standard_normal(404)
        correlated = np.convolve(noise, np.ones(5) / 5, "valid")
        found = MovingBlocks(400, resamples=300).mean(correlated)
        assert found.interval is not None
        held += found.interval.contains(0.0)
    assert 0.85 <= held / 200 <= 1.0


def test_a_resampled_quantile_is_that_of_the_resample() -> None:
    values = np.arange(120.0)
    blocks = MovingBlocks(120, resamples=20)
    quantiles, means = blocks.quantiles(values, 0.5), blocks.means(values)
    # Of a straight line the median of each drawn resample is near its mean.
    assert np.abs(quantiles - means).max() < 25
    assert np.corrcoef(quantiles, means)[0, 1] > 0.8


def test_few_tokens_have_no_interval_and_no_99th_percentile() -> None:
    found = MovingBlocks(15).mean(np.arange(15.0))
    assert found == Estimate(7.0)
    assert MovingBlocks(99).p99(np.arange(99.0)) == Estimate(None)
    assert MovingBlocks(100).p99(np.arange(100.0)).value == pytest.approx(98.01)


def test_a_ratio_to_nothing_is_unmeasured() -> None:
    blocks = MovingBlocks(32)
    assert blocks.ratio(np.ones(32), np.zeros(32)) == Estimate(None)
    # One token that counts: many resamples miss it, so there is a value but no interval.
    single = np.zeros(32)
    single[7] = 4
    assert blocks.ratio(np.ones(32), single) == Estimate(8.0)


def test_an_infinite_value_has_no_interval() -> None:
    values = np.ones(32)
    values[3] = np.inf
    assert MovingBlocks(32).mean(values) == Estimate(None)
