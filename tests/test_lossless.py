"""The gates: streamed output equals resident output, token for token and bit for bit.

Every gate also proves that what it gates happened: misses, evictions and reads are counted. Slices
that are not loaded hold NaN patterns (`poison`), so that using one cannot go unseen.
"""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import machine, residency, router_matrix, streaming
from engine.lane_jobs import Job
from engine.lanes import Lanes
from engine.session import Session
from engine.token_core import TokenCore
from tests import gate
from tests.gate import EVICTING, RESIDENT, Run

KINDS = (
    "tiny",
    "tiny-fused",
    "tiny-biased",
    "tiny-mixed",
    "tiny-split",
    "tiny-sigmoid",
    "tiny-hybrid",
)
TinyModel = Callable[..., Path]


def slow(cases: Iterable[Any]) -> list[Any]:
    """Cases that only `make test-slow` runs: each takes seconds, and there is a quick one."""
    marked = pytest.mark.slow
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marked)
        for case in cases
    ]


@pytest.fixture(scope="session")
def resident(tiny_model: TinyModel) -> Callable[..., Run]:
    """The reference run of a kind, made once."""

    @functools.cache
    def reference(kind: str, chat: bool = False, top_k: int = 0) -> Run:
        settings = RESIDENT | ({"routing.n-expert-used": top_k} if top_k else {})
        return gate.run(tiny_model(kind), settings, chat=chat)

    return reference


def all_kinds(quick: str) -> list[Any]:
    """Every kind of model, of which `make test` runs one."""
    return [quick, *slow(kind for kind in KINDS if kind != quick)]


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third read takes as long as several layers: what is not waited for comes too late."""
    read, place = os.preadv, itertools.count()

    def slowly(*arguments: Any) -> int:
        if next(place) % 3 == 0:
            time.sleep(0.0015)
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", slowly)
    monkeypatch.setattr(TokenCore, "most_delay_us", 1500)


@pytest.mark.parametrize("kind", KINDS)
def test_cache_off(kind: str, tiny_model: TinyModel, resident: Callable[..., Run]) -> None:
    streamed = gate.run(tiny_model(kind), {"stream.cache-mb": 0}, poison=True)
    gate.assert_same(streamed, resident(kind))
    assert streamed.counts["hits"] == 0
    assert streamed.counts["misses"] > 3 * gate.N_TOKENS
    assert streamed.counts["reads"] > streamed.counts["misses"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_that_evicts_all_the_time(
    kind: str, tiny_model: TinyModel, resident: Callable[..., Run]
) -> None:
    streamed = gate.run(tiny_model(kind), EVICTING, poison=True)
    gate.assert_same(streamed, resident(kind))
    assert streamed.counts["evictions"] > gate.N_TOKENS
    assert streamed.counts["reads"] > streamed.counts["misses"] > gate.N_TOKENS
    assert streamed.counts["moved"] > gate.N_TOKENS


def test_slices_smaller_than_a_page(tiny_model: TinyModel) -> None:
    """Three of them may share one, so that a neighbour's absence does not make it free."""
    q8 = ",".join(f"quant-{part}=Q8_0" for part in ("embd", "output", "attn"))
    q4 = "quant-gate-up=Q4_0,quant-down=Q4_0"
    model = tiny_model(f"tiny,n-embd=64,head-dim=32,expert-ff=64,n-expert=64,n-layer=12,{q8},{q4}")
    streamed = gate.run(model, EVICTING, poison=True)
    gate.assert_same(streamed, gate.run(model, RESIDENT))
    assert streamed.counts["evictions"] > gate.N_TOKENS


READING = {
    "serial": {"stream.overlap": "off", "stream.prefetch": "off"},
    "overlap": {"stream.overlap": "on", "stream.prefetch": "off"},
    "prefetch": {"stream.overlap": "off", "stream.prefetch": "on"},
    "both": {"stream.overlap": "on", "stream.prefetch": "on"},
}


@pytest.mark.parametrize(
    ("kind", "reading", "cache_mb"),
    [
        ("tiny-mixed", "both", 1),
        ("tiny-mixed", "prefetch", 2),
        *slow((kind, "both", 1) for kind in KINDS if kind != "tiny-mixed"),
        *slow(
            ("tiny-mixed", reading, size)
            for reading in READING
            for size in (1, 2)
            if (reading, size) not in (("both", 1), ("prefetch", 2))
        ),
    ],
)
@pytest.mark.parametrize("interpreted", [False, *slow([True])], ids=["compiled", "python"])
def test_reading_while_computing(
    interpreted: bool,
    kind: str,
    reading: str,
    cache_mb: int,
    tiny_model: TinyModel,
    resident: Callable[..., Run],
    slow_disk: None,
) -> None:
    settings = READING[reading] | {"stream.cache-mb": cache_mb, "stream.force-cache": True}
    streamed = gate.run(tiny_model(kind), settings, poison=True, interpreted=interpreted)
    gate.assert_same(streamed, resident(kind))
    counts = streamed.counts
    assert counts["evictions"] > gate.N_TOKENS
    # The first token of an answer is the prompt's.
    n_compiled = 0 if interpreted or gate.INTERPRETED else len(gate.PROMPTS) * (gate.N_TOKENS - 1)
    assert counts["compiled"] == n_compiled
    assert (counts["apart"] > gate.N_TOKENS) == (settings["stream.overlap"] == "on")
    if settings["stream.prefetch"] == "on":
        assert counts["read_ahead"] > counts["used_ahead"] > counts["late"] > 0
    else:
        assert counts["read_ahead"] == 0


@pytest.mark.parametrize("lanes", [8, *slow([1, 2])])
def test_reading_while_computing_with_other_lanes(
    lanes: int, tiny_model: TinyModel, resident: Callable[..., Run], slow_disk: None
) -> None:
    settings = EVICTING | READING["both"] | {"stream.io-threads": lanes}
    streamed = gate.run(tiny_model("tiny-mixed"), settings, poison=True)
    gate.assert_same(streamed, resident("tiny-mixed"))
    # One lane is the callback's own thread, which computes while others would read.
    assert (streamed.counts["read_ahead"] > 0) == (lanes > 1)
    assert ("prefetch is off" in str(streamed.notes)) == (lanes == 1)


@pytest.mark.parametrize("quick_bytes", [0, router_matrix.QUICK_BYTES])
def test_guesses_are_named_at_once_or_by_a_lane(
    quick_bytes: int,
    tiny_model: TinyModel,
    resident: Callable[..., Run],
    slow_disk: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a lane where a router is large."""
    by_lane: list[Callable[[], None]] = []

    def run(lanes: Lanes, task: Callable[[], None]) -> Job:
        by_lane.append(task)
        return run_in_lane(lanes, task)

    run_in_lane = Lanes.run
    monkeypatch.setattr(Lanes, "run", run)
    monkeypatch.setattr(router_matrix, "QUICK_BYTES", quick_bytes)
    streamed = gate.run(tiny_model("tiny-mixed"), EVICTING | READING["both"], poison=True)
    gate.assert_same(streamed, resident("tiny-mixed"))
    assert streamed.counts["read_ahead"] > streamed.counts["used_ahead"] > gate.N_TOKENS
    # A prompt's batches are always a lane's.
    assert (len(by_lane) > len(gate.PROMPTS) * gate.N_TOKENS) == (quick_bytes == 0)
    assert by_lane


def test_reading_changes_between_tokens(
    tiny_model: TinyModel, resident: Callable[..., Run], slow_disk: None
) -> None:
    """Every change of how is read, of lanes and of the budget, with reads under way."""
    changes: list[dict[str, Any]] = [
        *READING.values(),
        {"stream.cache-mb": 2},
        {"stream.io-threads": 1},
        {"stream.io-threads": 5},
        {"stream.cache-mb": 0},
        {"stream.cache-mb": 1},
    ]

    def change(session: Session, n: int) -> None:
        if n % 5 == 0:
            session.set_live(changes[n // 5 % len(changes)])

    streamed = gate.run(tiny_model("tiny"), EVICTING, poison=True, between=change)
    gate.assert_same(streamed, resident("tiny"))
    assert streamed.counts["used_ahead"] > 0 and streamed.counts["apart"] > 0


@pytest.mark.parametrize("kind", all_kinds("tiny-mixed"))
def test_edges_that_stay_and_are_given_back(
    kind: str,
    tiny_model: TinyModel,
    resident: Callable[..., Run],
    slow_disk: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with a large model: pages between slices stay, until the budget is too small for that."""
    kept: list[bool] = []

    def change(session: Session, n: int) -> None:
        cache = session._opened.store
        assert isinstance(cache, residency.ExpertCache)
        router = session._opened.router
        core = router.loader.core if router is not None else None
        if core is not None:
            assert bool(core._settings.keeps_edges) == cache._keeps_edges
        if n == 1:
            limit = 1.5 * 2**20 / cache._edge_bytes
            monkeypatch.setattr(residency, "_EDGES_OF_BUDGET", limit)
        if n % 12 == 0:
            session.set_live({"stream.cache-mb": 1 + n // 12 % 2})
        if n % 24 == 0:
            cache._keeps_edges = cache._may_keep_edges()
        kept.append(cache._keeps_edges)

    settings = {"stream.cache-mb": 2, "stream.force-cache": True, "stream.prefetch": "on"}
    monkeypatch.setattr(residency, "_EDGES_OF_BUDGET", 0)
    streamed = gate.run(tiny_model(kind), settings, poison=True, between=change)
    gate.assert_same(streamed, resident(kind))
    assert True in kept and False in kept
    assert streamed.counts["moved"] > gate.N_TOKENS


@pytest.mark.parametrize("kind", ["tiny", "tiny-mixed"])
def test_a_system_that_does_not_move_memory(
    kind: str,
    tiny_model: TinyModel,
    resident: Callable[..., Run],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streaming, "pages_can_move", lambda: False)
    streamed = gate.run(tiny_model(kind), EVICTING, poison=True)
    gate.assert_same(streamed, resident(kind))
    assert streamed.counts["evictions"] > gate.N_TOKENS
    assert streamed.counts["moved"] == 0
    assert any("cannot move memory" in note for note in streamed.notes)


def test_a_system_with_too_few_mappings_says_what_to_set(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "max_mappings", lambda: 4000)
    streamed = gate.run(tiny_model("tiny"), EVICTING, gate.PROMPTS[:1], n_tokens=8)
    assert streamed.counts["evictions"] > 0 == streamed.counts["moved"]
    assert any("sysctl vm.max_map_count=" in note for note in streamed.notes)


@pytest.mark.parametrize("kind", KINDS)
def test_everything_loaded(kind: str, tiny_model: TinyModel, resident: Callable[..., Run]) -> None:
    streamed = gate.run(tiny_model(kind), {"stream.cache-mb": 2000}, poison=True)
    gate.assert_same(streamed, resident(kind))
    assert streamed.counts["evictions"] == 0
    assert streamed.counts["hits"] > 10 * streamed.counts["misses"] > 0


@pytest.mark.parametrize(
    ("lanes", "o_direct"), [(1, True), (8, False), *slow([(1, False), (4, True), (8, True)])]
)
def test_lanes(
    lanes: int, o_direct: bool, tiny_model: TinyModel, resident: Callable[..., Run]
) -> None:
    settings = EVICTING | {"stream.io-threads": lanes, "stream.o-direct": o_direct}
    streamed = gate.run(tiny_model("tiny-mixed"), settings, poison=True)
    gate.assert_same(streamed, resident("tiny-mixed"))
    assert 1 <= streamed.counts["lanes_used"] <= lanes
    assert lanes == 1 or streamed.counts["lanes_used"] > 1


@pytest.mark.parametrize("policy", ["anon", "warm", "mmap"])
@pytest.mark.parametrize("kind", ["tiny", "tiny-fused", "tiny-biased"])
def test_dense_policies(
    policy: str, kind: str, tiny_model: TinyModel, resident: Callable[..., Run]
) -> None:
    streamed = gate.run(tiny_model(kind), EVICTING | {"stream.dense-weights": policy}, poison=True)
    gate.assert_same(streamed, resident(kind))
    assert streamed.counts["evictions"] > gate.N_TOKENS


@pytest.mark.parametrize("kind", ["tiny", "tiny-hybrid"])
def test_turns_on_a_warm_cache(
    kind: str, tiny_model: TinyModel, resident: Callable[..., Run]
) -> None:
    streamed = gate.run(tiny_model(kind), EVICTING, chat=True, poison=True)
    gate.assert_same(streamed, resident(kind, chat=True))
    assert streamed.counts["evictions"] > gate.N_TOKENS


def test_a_budget_that_shrinks_and_grows_between_tokens(
    tiny_model: TinyModel, resident: Callable[..., Run]
) -> None:
    seen: set[int] = set()

    def between(session: Session, n: int) -> None:
        session.set_live({"stream.cache-mb": (2, 1, 3, 0, 1)[n // 7 % 5]})
        store = session._opened.store
        seen.add(store.budget_bytes)
        assert store.budget_bytes == 0 or store.resident_bytes <= store.budget_bytes

    settings = {"stream.cache-mb": 2, "stream.force-cache": True}
    streamed = gate.run(tiny_model("tiny"), settings, between=between, poison=True)
    gate.assert_same(streamed, resident("tiny"))
    assert len(seen) == 4


def test_lanes_that_change_between_tokens(
    tiny_model: TinyModel, resident: Callable[..., Run]
) -> None:
    def between(session: Session, n: int) -> None:
        session.set_live({"stream.io-threads": 1 + n % 5})

    streamed = gate.run(tiny_model("tiny"), EVICTING, between=between, poison=True)
    gate.assert_same(streamed, resident("tiny"))
    assert streamed.counts["lanes_used"] > 1


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_experts_live_equal_fewer_at_load(
    kind: str, tiny_model: TinyModel, resident: Callable[..., Run]
) -> None:
    first, evicting = gate.PROMPTS[:1], EVICTING | gate.NO_PREFETCH
    with gate.open_session(tiny_model(kind), evicting, poison=True) as session:
        top_k = session.model_info.n_expert_used
        session.set_live({"routing.n-expert-used": 2})
        live = _logits(session, first[0])
        counts = gate.counts_of(session)
    with gate.open_session(tiny_model(kind), RESIDENT | {"routing.n-expert-used": 2}) as session:
        at_load = _logits(session, first[0])
    assert np.array_equal(live, at_load)
    # No read is made for the slots that are left out.
    everything = gate.run(tiny_model(kind), evicting, first, poison=True).counts
    assert counts["routed"] * top_k == everything["routed"] * 2
    assert counts["misses"] < everything["misses"]


def _logits(session: Session, prompt: str) -> np.ndarray:
    kept: list[np.ndarray] = []

    def keep(_token: int) -> None:
        assert session.last_logits is not None
        kept.append(session.last_logits.copy())

    session.generate(prompt, n_predict=gate.N_TOKENS, on_token=keep)
    assert len(kept) == gate.N_TOKENS
    return np.stack(kept)


def test_prefill_reads_each_expert_once_per_batch_and_layer(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    trace = tmp_path / "io.csv"
    gate.run(tiny_model("tiny"), {"stream.cache-mb": 0}, gate.PROMPTS[2:], io_trace=trace)
    header, *rows = [row.split(",") for row in trace.read_text().splitlines() if row[0] != "#"]
    at = {name: header.index(name) for name in header}
    prefill = [row for row in rows if row[at["phase"]] == "0"]
    keys = [
        tuple(row[at[name]] for name in ("turn", "step", "layer", "expert", "projection"))
        for row in prefill
    ]
    assert len({row[at["step"]] for row in prefill}) >= 3  # batches
    assert len(keys) == len(set(keys)) > 100
