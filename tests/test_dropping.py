"""Lossy settings: that they do what they say, and that off is off.

What they answer depends on what the cache held, so no gate can compare bytes while they act; these
gates are for the machinery.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import policy
from engine.observed import Routing
from engine.replay import replay
from engine.replay_cache import simulate, workload
from engine.session import Session
from engine.traces import read_route_trace
from tests import gate
from tests.gate import EVICTING, NO_PREFETCH, RESIDENT
from tests.test_lossless import KINDS, all_kinds

TinyModel = Callable[..., Path]
NEVER = {"routing.drop-cold-experts": 1e-12}
FULL = {"routing.drop-cold-experts": 1.0}
SUBSTITUTE = FULL | {"routing.cold-policy": "substitute"}
PROMPT = gate.PROMPTS[2:]
QUICK_KINDS = all_kinds("tiny-mixed")


@pytest.mark.parametrize("policy_name", ["drop", "substitute"])
@pytest.mark.parametrize("kind", QUICK_KINDS)
def test_a_threshold_below_any_weight_changes_nothing(
    kind: str, policy_name: str, tiny_model: TinyModel
) -> None:
    settings = EVICTING | NEVER | {"routing.cold-policy": policy_name} | NO_PREFETCH
    watched = gate.run(tiny_model(kind), settings, PROMPT, poison=True)
    plain = gate.run(tiny_model(kind), EVICTING | NO_PREFETCH, PROMPT, poison=True)
    gate.assert_same(watched, plain)
    assert watched.counts["examined"] > gate.N_TOKENS
    assert watched.counts["dropped"] == watched.counts["substituted"] == 0
    # Exactly the decode part is looked at, and what is read is the same.
    assert watched.counts["misses"] == plain.counts["misses"]
    if kind == "tiny-mixed":
        guessing = gate.run(tiny_model(kind), settings | {"stream.prefetch": "auto"}, PROMPT)
        gate.assert_same(guessing, plain)
        assert guessing.counts["used_ahead"] > gate.N_TOKENS


@pytest.mark.parametrize("in_prefill", [False, True])
@pytest.mark.parametrize("renorm", [True, False])
@pytest.mark.parametrize("kind", QUICK_KINDS)
def test_full_strength_reads_nothing_unloaded(
    kind: str, renorm: bool, in_prefill: bool, tiny_model: TinyModel
) -> None:
    """Unloaded slices hold NaN patterns; one that is used would reach the logits."""
    settings = FULL | {"routing.drop-renorm": renorm, "routing.drop-in-prefill": in_prefill}
    lossy = gate.run(tiny_model(kind), EVICTING | settings, PROMPT, poison=True)
    assert len(lossy.tokens[0]) == gate.N_TOKENS
    assert np.isfinite(np.stack(lossy.logits[0])).all()
    assert lossy.counts["dropped"] > gate.N_TOKENS
    assert lossy.counts["evictions"] > 0
    plain = gate.run(tiny_model(kind), EVICTING | NO_PREFETCH, PROMPT).counts
    assert lossy.counts["misses"] < plain["misses"]


@pytest.mark.parametrize("kind", KINDS)
def test_substitution_reads_nothing_unloaded(kind: str, tiny_model: TinyModel) -> None:
    budget = {"stream.cache-mb": 2, "stream.force-cache": True}
    lossy = gate.run(tiny_model(kind), budget | SUBSTITUTE, PROMPT, poison=True)
    assert np.isfinite(np.stack(lossy.logits[0])).all()
    assert lossy.counts["substituted"] > 0
    assert lossy.counts["dropped"] == 0


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("frac", [0.01, 0.5, 1.0])
@pytest.mark.parametrize("kind", ["tiny", "tiny-biased", "tiny-fused"])
def test_one_expert_per_token_is_never_dropped(
    kind: str, frac: float, live: bool, tiny_model: TinyModel
) -> None:
    one = {"routing.n-expert-used": 1}
    drop = {"routing.drop-cold-experts": frac}
    with gate.open_session(
        tiny_model(kind), EVICTING | ({} if live else one) | drop, poison=True
    ) as session:
        if live:
            session.set_live(one)
        tokens = session.generate("hello", n_predict=gate.N_TOKENS).tokens
        counts = gate.counts_of(session)
    with gate.open_session(tiny_model(kind), RESIDENT | one) as session:
        assert session.generate("hello", n_predict=gate.N_TOKENS).tokens == tokens
    assert counts["examined"] > gate.N_TOKENS
    assert counts["dropped"] == 0


@pytest.mark.parametrize(
    ("kind", "mass"),
    [
        ("tiny", 1.0),
        ("tiny-mixed", 1.0),
        ("tiny-split", 1.0),
        ("tiny-biased", 1.0),
        ("tiny-hybrid", 1.0),
        ("tiny-sigmoid", 1.8),
        ("tiny-fused", None),
    ],
)
def test_the_learned_weights_are_the_final_ones(
    kind: str, mass: float | None, tiny_model: TinyModel
) -> None:
    """They sum to what each model's routing sums to: 1, its scale, or less without a norm."""
    seen: list[Routing] = []
    with gate.open_session(tiny_model(kind), EVICTING) as session:
        router = session._opened.router
        assert router is not None
        router.observer = seen.append
        session._opened.hook.mark_nodes()
        session.generate("hello world", n_predict=20)
    assert len(seen) > 60
    for routing in seen:
        assert routing.weights is not None
        total = routing.weights.sum(axis=1)
        if mass is None:
            assert ((total > 0) & (total < 1)).all()
        else:
            assert np.allclose(total, mass, atol=1e-5)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "tiny-sigmoid"])
def test_leaving_all_but_the_strongest_out_is_a_top_1_model(
    kind: str, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeroing at a wrong node could not give what the model itself gives with one expert.

    Without tiny-sigmoid: its selection bias may choose another expert than the strongest.
    """

    def all_but_strongest(weights: np.ndarray, _resident: object, _threshold: float) -> np.ndarray:
        mask = np.ones(weights.shape, bool)
        mask[np.arange(len(weights)), weights.argmax(axis=1)] = False
        return mask

    def all_but_strongest_slot(
        _ids: object, weights: list[float], _resident: object, _threshold: float
    ) -> tuple[list[int], float]:
        strongest = weights.index(max(weights))
        return [slot for slot in range(len(weights)) if slot != strongest], 0.0

    monkeypatch.setattr(policy, "weak_slots", all_but_strongest_slot)
    monkeypatch.setattr(policy, "weak_and_cold", all_but_strongest)
    monkeypatch.setattr(policy, "spare_shared_reads", lambda _ids, mask: mask)
    settings = FULL | {
        "routing.drop-in-prefill": True,
        # A model that does not normalise gives its one expert that expert's own probability.
        "routing.drop-renorm": kind != "tiny-fused",
    }
    short = gate.PROMPTS[:1]
    lossy = gate.run(tiny_model(kind), EVICTING | settings, short, n_tokens=8, poison=True)
    one = gate.run(tiny_model(kind), RESIDENT | {"routing.n-expert-used": 1}, short, n_tokens=8)
    assert lossy.counts["dropped"] > 0
    # A weight of 1.0000001 instead of 1 can move a quantized activation by one step, no more.
    differences = np.abs(np.stack(lossy.logits[0]) - np.stack(one.logits[0]))
    assert differences.max() < 0.1 * np.stack(one.logits[0]).std()
    assert lossy.tokens == one.tokens


def test_on_and_off_in_mid_answer_is_lossless_while_it_drops_nothing(
    tiny_model: TinyModel,
) -> None:
    def between(session: Session, n: int) -> None:
        session.set_live(NEVER if n % 9 < 4 else {"routing.drop-cold-experts": 0.0})

    switched = gate.run(tiny_model("tiny"), EVICTING, between=between, poison=True)
    gate.assert_same(switched, gate.run(tiny_model("tiny"), RESIDENT))
    assert 0 < switched.counts["examined"] < switched.counts["routed"]


def test_after_dropping_the_session_is_lossless_again(tiny_model: TinyModel) -> None:
    resident = gate.run(tiny_model("tiny"), RESIDENT)
    with gate.open_session(tiny_model("tiny"), EVICTING, poison=True) as session:
        for prompt, expected in zip(gate.PROMPTS, resident.tokens, strict=True):
            session.set_live(FULL)
            session.generate(prompt, n_predict=40)
            assert gate.counts_of(session)["dropped"] > 0
            session.set_live({"routing.drop-cold-experts": 0.0})
            session.clear()
            assert session.generate(prompt, n_predict=gate.N_TOKENS).tokens == expected
            session.clear()


def test_dropping_is_off_in_prefill_unless_asked(tiny_model: TinyModel) -> None:
    with gate.open_session(tiny_model("tiny"), EVICTING | FULL) as session:
        session.generate(PROMPT[0], n_predict=1)
        assert gate.counts_of(session)["examined"] == 0
        session.clear()
        session.set_live({"routing.drop-in-prefill": True})
        session.generate(PROMPT[0], n_predict=1)
        assert gate.counts_of(session)["dropped"] > 0


def test_mass_is_kept_per_routing(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[float] = []
    original = policy.drop

    def checking(ids: np.ndarray, weights: np.ndarray, dropped: np.ndarray, **rest: bool) -> None:
        before = weights.sum(axis=1)
        strongest = ids[np.arange(len(ids)), weights.argmax(axis=1)]
        original(ids, weights, dropped, **rest)
        checked.extend(np.abs(weights.sum(axis=1) / before - 1))
        assert (weights[dropped] == 0).all()
        rows = dropped.nonzero()[0]
        assert (ids[dropped] == strongest[rows]).all()

    original_of_one = policy.drop_slots

    def checking_one(
        ids: list[int], weights: list[float], slots: list[int], **rest: bool
    ) -> tuple[list[int], list[float]]:
        new_ids, new_weights = original_of_one(ids, weights, slots, **rest)
        strongest = ids[weights.index(max(weights))]
        checked.append(abs(sum(new_weights) / sum(weights) - 1))
        assert all(new_weights[slot] == 0 and new_ids[slot] == strongest for slot in slots)
        return new_ids, new_weights

    monkeypatch.setattr(policy, "drop", checking)
    monkeypatch.setattr(policy, "drop_slots", checking_one)
    for kind in KINDS:
        gate.run(tiny_model(kind), EVICTING | FULL, PROMPT, n_tokens=32)
    assert len(checked) > 200
    assert max(checked) < 1e-6


def test_few_experts_are_warned_of_once(tiny_model: TinyModel) -> None:
    with gate.open_session(tiny_model("tiny"), EVICTING | {"routing.drop-cold-experts": 0.75}) as s:
        warnings = [note for note in s.notes if note.startswith("lossy")]
    assert len(warnings) == 1
    assert "18.8 %" in warnings[0] and "4 experts" in warnings[0]
    with gate.open_session(tiny_model("tiny"), EVICTING) as session:
        assert not any(note.startswith("lossy") for note in session.notes)


@pytest.mark.parametrize("settings", [{}, FULL, SUBSTITUTE], ids=["lossless", "drop", "substitute"])
def test_traces_agree_with_counters(
    settings: dict[str, object], tiny_model: TinyModel, tmp_path: Path
) -> None:
    path = tmp_path / "routes.csv"
    budget = {"stream.cache-mb": 2, "stream.force-cache": True} | NO_PREFETCH
    ran = gate.run(tiny_model("tiny"), budget | settings, route_trace=path)
    trace = read_route_trace(path)
    assert len(trace) == ran.counts["routed"]
    assert trace.dropped is not None and trace.substituted is not None
    assert trace.residency is not None and trace.expert_bytes is not None
    assert int(trace.dropped.sum()) == ran.counts["dropped"]
    assert int((trace.substituted >= 0).sum()) == ran.counts["substituted"]
    assert int((trace.expert_bytes > 0).sum()) == ran.counts["misses"]
    assert (trace.expert_bytes[trace.residency == 1] == 0).all()


def test_tracing_changes_nothing(tiny_model: TinyModel, tmp_path: Path) -> None:
    traced = gate.run(
        tiny_model("tiny-mixed"),
        EVICTING,
        poison=True,
        route_trace=tmp_path / "routes.csv",
        io_trace=tmp_path / "io.csv",
    )
    gate.assert_same(traced, gate.run(tiny_model("tiny-mixed"), RESIDENT))


@pytest.mark.parametrize("cache_mb", [1, 2, 3])
def test_replay_counts_what_the_engine_counted(
    cache_mb: int, tiny_model: TinyModel, tmp_path: Path
) -> None:
    path = tmp_path / "routes.csv"
    with gate.open_session(
        tiny_model("tiny-mixed"),
        {"stream.cache-mb": cache_mb, "stream.force-cache": True} | NO_PREFETCH,
        route_trace=path,
    ) as session:
        for prompt in gate.PROMPTS:
            session.clear()
            session.generate(prompt, n_predict=100)
        hits = sum(row.hits for row in session.metrics.rows)
        misses = sum(row.misses for row in session.metrics.rows)
    replayed = simulate(workload(read_route_trace(path)), "engine", cache_mb)
    assert (replayed.hits, replayed.lookups) == (hits, hits + misses)
    assert misses > 0


@pytest.mark.parametrize("frac", [0.5, 0.75, 1.0])
def test_the_dynamic_replay_is_what_the_engine_does(
    frac: float, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """A recorded run, forced again with dropping: counts equal the replay's, to the last one."""
    path = tmp_path / "routes.csv"
    budget: dict[str, Any] = {"stream.cache-mb": 2, "stream.force-cache": True, "model.batch": 512}
    budget |= NO_PREFETCH
    gate.run(tiny_model("tiny"), budget, PROMPT, n_tokens=100, route_trace=path)
    forced = budget | {"routing.drop-cold-experts": frac}
    with gate.open_session(tiny_model("tiny"), forced, poison=True, force_routes=path) as session:
        session.generate(PROMPT[0], n_predict=100)
        rows = session.metrics.rows
    trace = read_route_trace(path)
    (point,) = [p for p in replay(trace, budgets=[2]).drop_dynamic if p.frac == frac]
    dropped = sum(row.experts_dropped for row in rows)
    assert dropped > 0
    assert 100 * dropped / sum(row.experts_routed for row in rows) == pytest.approx(point.drop_pct)
    entry = trace.model.expert_bytes[0] / 2**20
    assert sum(row.misses for row in rows) * entry / len(rows) == pytest.approx(
        point.read_mib_per_token
    )


@pytest.mark.parametrize("observed", [False, True])
def test_fewer_experts_live_and_dropping_use_nothing_unloaded(
    observed: bool, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Where selection is biased, the first slot need not be the strongest, and may be dropped."""
    trace: dict[str, Any] = {"route_trace": tmp_path / "routes.csv"} if observed else {}

    def fewer(session: Session, n: int) -> None:
        if n == 1:
            session.set_live({"routing.n-expert-used": 2})

    def run(poison: bool) -> gate.Run:
        return gate.run(
            tiny_model("tiny-sigmoid"),
            EVICTING | FULL,
            PROMPT,
            between=fewer,
            poison=poison,
            **trace,
        )

    poisoned, plain = run(True), run(False)
    assert poisoned.counts["dropped"] > gate.N_TOKENS
    logits = np.stack(poisoned.logits[0])
    assert np.isfinite(logits).all() and (logits.std(axis=1) > 0.1).all()
    assert np.array_equal(logits, np.stack(plain.logits[0]))
