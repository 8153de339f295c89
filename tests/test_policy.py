"""Lossy decisions by value."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from engine import policy

SHAPES = st.tuples(st.integers(1, 5), st.integers(1, 8))


@st.composite
def routings(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids without repetition per row, positive weights, who is resident."""
    tokens, slots = draw(SHAPES)
    ids = np.stack(
        [np.array(draw(st.permutations(range(12)))[:slots], np.int32) for _ in range(tokens)]
    )
    weights = draw(
        hnp.arrays(np.float32, (tokens, slots), elements=st.floats(2**-10, 1.0, width=32))
    )
    resident = draw(hnp.arrays(bool, (tokens, slots)))
    return ids, weights, resident


@given(routings(), st.floats(0, 1))
def test_only_cold_weak_experts_may_go_and_never_the_strongest(
    routing: tuple[np.ndarray, np.ndarray, np.ndarray], frac: float
) -> None:
    _, weights, resident = routing
    threshold = policy.ColdRule(frac).threshold(weights.shape[1])
    mask = policy.weak_and_cold(weights, resident, threshold)
    share = weights / weights.sum(axis=1, keepdims=True)
    assert not (mask & resident).any()
    assert (share[mask] < threshold).all()
    rows = np.arange(len(weights))
    assert not mask[rows, weights.argmax(axis=1)].any()
    assert not policy.weak_and_cold(weights, resident, 0.0).any()
    if weights.shape[1] == 1:
        assert not mask.any()


@given(routings(), st.booleans())
def test_dropping_keeps_mass_and_touches_nothing_unloaded(
    routing: tuple[np.ndarray, np.ndarray, np.ndarray], renormalise: bool
) -> None:
    ids, weights, resident = routing
    dropped = policy.weak_and_cold(weights, resident, 1.0)
    asked, before = ids.copy(), weights.copy()
    policy.drop(ids, weights, dropped, renormalise=renormalise)
    assert (weights[dropped] == 0).all()
    assert (ids[~dropped] == asked[~dropped]).all()
    rows = np.arange(len(ids))
    strongest = asked[rows, before.argmax(axis=1)]
    assert (ids[dropped] == strongest[dropped.nonzero()[0]]).all()
    if renormalise:
        np.testing.assert_allclose(weights.sum(axis=1), before.sum(axis=1), rtol=1e-5)
    else:
        assert (weights[~dropped] == before[~dropped]).all()


@given(routings())
def test_an_expert_that_is_read_for_another_token_is_not_dropped(
    routing: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> None:
    ids, weights, resident = routing
    candidates = policy.weak_and_cold(weights, resident, 1.0)
    mask = policy.spare_shared_reads(ids, candidates)
    assert not (mask & ~candidates).any()
    assert not set(ids[mask]) & set(ids[~mask])


@given(routings(), st.randoms())
def test_substitutes_are_resident_new_and_the_best_there_are(
    routing: tuple[np.ndarray, np.ndarray, np.ndarray], random: object
) -> None:
    ids, weights, cold = routing
    rest = [np.setdiff1d(np.arange(12, dtype=np.int32), row) for row in ids]
    ranking = np.stack([np.concatenate(pair) for pair in zip(ids, rest, strict=True)])
    resident = np.zeros(12, bool)
    resident[::2] = True
    replaced = policy.weak_and_cold(weights, ~cold, 1.0)
    chosen = policy.substitutes(ids, ranking, replaced, resident)
    assert (chosen[~replaced] == -1).all()
    for row, used in enumerate(chosen):
        taken = used[used >= 0]
        assert resident[taken].all()
        assert not set(taken) & set(ids[row])
        assert len(set(taken)) == len(taken)
        available = [expert for expert in rest[row] if resident[expert]]
        assert list(taken) == available[: len(taken)]
        assert len(taken) == min(int(replaced[row].sum()), len(available))


def test_a_routing_without_weight_has_no_shares() -> None:
    assert (policy.shares(np.zeros((2, 3), np.float32)) == 0).all()


EVERYTHING = st.one_of(
    # As routers make them: positive, alike, and often equal.
    st.floats(0, 1, width=32),
    st.sampled_from([0.0, 0.125, 0.25, 1 / 3, 0.5]),
    # And as they should not: tiny, huge, negative, infinite or no number at all.
    st.floats(width=32, allow_subnormal=True),
)


@st.composite
def single_routings(
    draw: st.DrawFn, elements: st.SearchStrategy[float]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """One token: ids that may repeat, weights, who is resident; and a threshold."""
    slots = draw(st.one_of(st.integers(1, 20), st.just(150)))
    ids = draw(hnp.arrays(np.int32, (1, slots), elements=st.integers(0, 2 * slots)))
    weights = draw(hnp.arrays(np.float32, (1, slots), elements=elements))
    resident = draw(hnp.arrays(bool, (1, slots), elements=st.booleans()))
    # A threshold that is a share to the last bit is where a rounding would show.
    shares = [share for share in policy.shares(weights)[0].tolist() if math.isfinite(share)]
    fracs = st.floats(0, 1).map(lambda frac: policy.ColdRule(frac).threshold(slots))
    thresholds = st.one_of(fracs, st.floats(0, 1), st.sampled_from(shares)) if shares else fracs
    return ids, weights, resident, draw(thresholds)


def check_one(
    ids: np.ndarray, weights: np.ndarray, resident: np.ndarray, threshold: float
) -> tuple[bool, bool]:
    """Compare both kinds of functions; whether the one for a token answered, and dropped."""
    candidates = policy.weak_and_cold(weights, resident, threshold)
    dropped = policy.spare_shared_reads(ids, candidates)
    lost = policy.shares(weights)[dropped].sum()
    found = policy.weak_slots(ids[0].tolist(), weights[0].tolist(), resident[0].tolist(), threshold)
    if found is None:
        total = float(weights.sum(axis=1)[0])
        assert not 0 < total < math.inf
        return False, False
    slots, mass = found
    assert slots == dropped[0].nonzero()[0].tolist()
    assert np.float64(mass).tobytes() == np.float64(lost).tobytes()
    if not slots:
        return True, False
    for renormalise in (False, True):
        new_ids, new_weights = policy.drop_slots(
            ids[0].tolist(), weights[0].tolist(), slots, renormalise=renormalise
        )
        batch_ids, batch_weights = ids.copy(), weights.copy()
        policy.drop(batch_ids, batch_weights, dropped, renormalise=renormalise)
        assert new_ids == batch_ids[0].tolist()
        # Every value is a float32 already, and of the same bits.
        assert np.array(new_weights).tobytes() == batch_weights[0].astype(np.float64).tobytes()
    return True, True


@given(single_routings(EVERYTHING))
@settings(max_examples=500)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_one_token_is_decided_as_a_batch_of_one_to_the_last_bit(
    routing: tuple[np.ndarray, np.ndarray, np.ndarray, float],
) -> None:
    check_one(*routing)


@given(single_routings(st.floats(0, 1, width=32)))
@settings(max_examples=200)
def test_ordinary_weights_of_one_token_never_need_the_batch_functions(
    routing: tuple[np.ndarray, np.ndarray, np.ndarray, float],
) -> None:
    answered, _ = check_one(*routing)
    assert answered or not routing[1].any()


def test_one_token_is_decided_as_a_batch_of_one_over_many_routings() -> None:
    random = np.random.default_rng(1)
    n_dropped = 0
    for n in range(3000):
        slots = int(random.choice([1, 2, 4, 6, 7, 8, 9, 10, 16, 32, 130]))
        weights = random.dirichlet(np.full(slots, 0.5), 1).astype(np.float32)
        ids = random.choice(2 * slots, (1, slots), replace=n % 4 == 0).astype(np.int32)
        resident = random.random((1, slots)) < 0.5
        threshold = policy.ColdRule((0.5, 0.75, 1.0)[n % 3]).threshold(slots)
        _, dropped = check_one(ids, weights, resident, threshold)
        n_dropped += dropped
    assert n_dropped > 1000
