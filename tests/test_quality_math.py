"""Divergence between next-token distributions: hand-computed values, and what must always hold."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from engine.errors import TuiworkError
from engine.quality_math import kl_divergence, log_probabilities, score

vectors = hnp.arrays(np.float32, 8, elements=st.floats(-80, 80, width=32))


def logits(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_a_hand_computed_divergence() -> None:
    """p = (1/2, 1/4, 1/4), q = (1/4, 1/4, 1/2): 1/2 ln 2 - 1/4 ln 2 = ln(2) / 4."""
    p = log_probabilities(logits(math.log(2), 0, 0))
    q = log_probabilities(logits(0, 0, math.log(2)))
    assert kl_divergence(p, q) == pytest.approx(math.log(2) / 4, rel=1e-7)
    assert kl_divergence(q, p) == pytest.approx(math.log(2) / 4, rel=1e-7)


def test_a_hand_computed_score() -> None:
    found = score(logits(math.log(3), 0), logits(0, math.log(3)), 1)
    # Both give 3/4 to one of two tokens, but not to the same one: KL = 1/2 ln 3.
    assert found.kl == pytest.approx(math.log(3) / 2, rel=1e-7)
    assert found.nll == pytest.approx(-math.log(0.75), rel=1e-7)
    assert not found.same_top
    assert score(logits(5, 1), logits(9, 0), 0).same_top


@given(vectors)
def test_a_distribution_is_exactly_itself(values: np.ndarray) -> None:
    assert score(values, values.copy(), 3).kl == 0.0


@given(vectors, vectors)
def test_divergence_is_never_negative(first: np.ndarray, second: np.ndarray) -> None:
    assert kl_divergence(log_probabilities(first), log_probabilities(second)) >= 0.0


@given(vectors)
def test_probabilities_sum_to_one(values: np.ndarray) -> None:
    assert np.exp(log_probabilities(values)).sum() == pytest.approx(1.0, abs=1e-12)


def test_large_logits_neither_overflow_nor_vanish() -> None:
    far = log_probabilities(logits(30000, 29999, -30000))
    assert np.allclose(far[:2], log_probabilities(logits(1, 0)))
    assert np.isfinite(far).all()


def test_an_impossible_token_takes_part_only_where_it_is_possible() -> None:
    p = log_probabilities(logits(0, 0, -np.inf))
    assert kl_divergence(p, log_probabilities(logits(0, 0, 0))) == pytest.approx(math.log(1.5))
    assert kl_divergence(p, p) == 0.0
    assert kl_divergence(log_probabilities(logits(0, 0, 0)), p) == math.inf


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_refused(broken: float) -> None:
    with pytest.raises(TuiworkError, match="no numbers"):
        score(logits(0, 0), logits(0, broken), 0)
    with pytest.raises(TuiworkError, match="no numbers"):
        log_probabilities(logits(-math.inf, -math.inf))
