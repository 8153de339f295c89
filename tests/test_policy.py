"""Lossy decisions by value."""

from __future__ import annotations

import numpy as np
from hypothesis import given
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
