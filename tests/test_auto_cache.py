"""An automatic cache in a running engine: it gives memory back, takes it again, and says so."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter

import pytest

from engine import auto_cache, machine, pressure
from engine.messages import LiveChanged, Opened, Resized
from engine.session import Session
from engine.telemetry import MIB, ProcessUse
from tests import gate
from tests.engine_app import EngineApp, until

TinyModel = Callable[..., Path]
HELLO = [{"role": "user", "content": "hello there"}]
LARGE = "tiny,n-expert=64,expert-ff=768,n-embd=768,n-layer=4"
"""Experts of some 300 MiB, so that what the machine is seen to do matters."""
AUTO = {"stream.cache-mb": "auto", "stream.cache-floor-mb": 1000}


class Around:
    """What the machine says of its memory: `free` MiB beside what the cache holds."""

    def __init__(self, free_mib: int) -> None:
        self.free_mib = free_mib
        self.session: Session | None = None
        self.asked = 0

    def __call__(self) -> machine.Memory:
        self.asked += 1
        held = self.session._opened.store.resident_bytes if self.session is not None else 0
        return machine.Memory(64000 * MIB, max(0, self.free_mib * MIB - held), None)


@pytest.fixture
def around(monkeypatch: pytest.MonkeyPatch) -> Around:
    """A machine whose free memory the test sets, looked at before every token."""
    around = Around(1200)
    monkeypatch.setattr(machine, "memory", around)
    monkeypatch.setattr(auto_cache, "INTERVAL_S", 0.0)
    return around


@pytest.fixture
def session(tiny_model: TinyModel, around: Around) -> Iterator[Session]:
    with gate.open_session(tiny_model(LARGE), AUTO | {"model.ctx": 512}) as opened:
        around.session = opened
        yield opened


def budget_mib(session: Session) -> int:
    return session._opened.store.budget_bytes // MIB


def test_the_size_follows_the_memory_and_memory_follows_the_size(
    session: Session, around: Around, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert budget_mib(session) == 200
    session.generate("many words of all kinds " * 10, n_predict=60)
    full = ProcessUse.now().rss_anon_mib
    held = session._opened.store.resident_bytes // MIB
    assert held > 120
    around.free_mib = 1080
    session.generate(HELLO, n_predict=2)
    assert budget_mib(session) == 80
    assert full - ProcessUse.now().rss_anon_mib == pytest.approx(held - 80, abs=16)
    rows = session.metrics.rows
    assert rows[-1].cache_budget_mib == 80 and session.resolved.stream.cache_mb == 80
    (note,) = [note for note in session.notes if "automatic cache" in note]
    assert "shrank from 200 to 80 MiB" in note and "1000 are kept" in note
    around.free_mib = 1250
    monkeypatch.setattr(pressure, "EASE_S", 0.0)
    session.generate(HELLO, n_predict=3)
    assert budget_mib(session) == 250
    (note,) = [note for note in session.notes if "automatic cache" in note]
    assert "down to 80 MiB for a while" in note and "to 250 MiB" in note


def test_nothing_is_changed_or_said_where_there_is_no_pressure(
    session: Session, around: Around
) -> None:
    around.free_mib = 1170
    session.generate(HELLO, n_predict=30)
    assert budget_mib(session) == 200
    assert not any("automatic cache" in note for note in session.notes)
    assert around.asked > 30


def test_a_number_that_somebody_sets_stays_until_auto_is_set(
    session: Session, around: Around
) -> None:
    session.set_live({"stream.cache-mb": 150, "stream.force-cache": True})
    around.free_mib = 1050
    asked = around.asked
    session.generate(HELLO, n_predict=10)
    assert budget_mib(session) == 150 and around.asked == asked
    session.set_live({"stream.cache-mb": "auto"})
    assert budget_mib(session) == 50
    around.free_mib = 1200
    session.set_live({"stream.cache-mb": "auto"})
    assert budget_mib(session) == 200
    around.free_mib = 900
    session.generate(HELLO, n_predict=10)
    demand = session.model_info.token_demand_bytes
    assert session._opened.store.budget_bytes == demand
    session.set_live({"stream.cache-mb": 0})
    assert not any("automatic cache" in note for note in session.notes)
    session.set_live({"stream.cache-mb": "auto", "stream.io-threads": 2})
    assert session.generate(HELLO, n_predict=5).n_generated == 5


def test_memory_is_looked_at_four_times_a_second_at_most(
    session: Session, around: Around, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto_cache, "INTERVAL_S", 0.25)
    asked, started = around.asked, perf_counter()
    session.generate(HELLO, n_predict=60)
    assert around.asked - asked <= (perf_counter() - started) / 0.25 + 1


def test_output_is_the_resident_models_whatever_the_memory_does(
    tiny_model: TinyModel, around: Around, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pressure, "SMALLEST_SLACK_BYTES", 0)
    monkeypatch.setattr(pressure, "EASE_S", 0.0)
    monkeypatch.setattr(pressure, "STEP_S", 0.0)
    around.free_mib = 2
    seen: set[int] = set()

    def between(session: Session, n: int) -> None:
        around.session = session
        around.free_mib = (2, 1, 3, 0, 2)[n // 7 % 5]
        seen.add(session._opened.store.budget_bytes)

    settings = {"stream.cache-mb": "auto", "stream.cache-floor-mb": 0}
    streamed = gate.run(tiny_model("tiny"), settings, between=between, poison=True)
    gate.assert_same(streamed, gate.run(tiny_model("tiny"), gate.RESIDENT))
    assert len(seen) >= 3
    assert streamed.counts["evictions"] > gate.N_TOKENS


def test_an_idle_engine_gives_memory_back_and_the_app_hears_of_it(tiny_model: TinyModel) -> None:
    """In a process of its own, against real memory that this one takes."""
    app = EngineApp()
    taken: list[mmap.mmap] = []
    try:
        floor = machine.memory().available_bytes // MIB - 400
        settings = {"stream__cache_mb": "auto", "stream__cache_floor_mb": floor}
        opened = app.open(tiny_model(LARGE), **settings)
        assert isinstance(opened, Opened)
        size = int(opened.resolved.stream.cache_mb)
        app.answer(n_predict=5)

        def shrunk() -> bool:
            found = app.of(Resized)
            if found and int(found[-1].resolved.stream.cache_mb) < size - 32:
                return True
            if len(taken) < 24:
                taken.append(mmap.mmap(-1, 64 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
                taken[-1].write(bytes(64 * MIB))
            return False

        until(shrunk)
        assert app.answer(n_predict=5).answer.n_generated == 5
        # What undo sets after somebody set a number: automatic again.
        app.client.set_live({"stream.cache-mb": 1500})
        changed = app.wait_for(LiveChanged)
        assert changed.before == {"stream.cache-mb": "auto"}
        app.client.set_live(changed.before)
        app.wait_until(lambda event: isinstance(event, LiveChanged) and event is not changed)
    finally:
        for memory in taken:
            memory.close()
        app.client.close()
