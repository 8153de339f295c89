"""The shared counters and the outbox by themselves, and what a token pays for them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import fields
from multiprocessing.connection import Connection
from threading import Thread

import numpy as np
import pytest

from engine.counters import ExpertCounters, LaneCounters, StoreCounters
from engine.live import CAPACITY_BYTES, Arena, LiveView, new_memory
from engine.messages import Cleared, Event, OpenProgress, PromptProgress, Text, TokenRows
from engine.outbox import INTERVAL_S, Outbox
from engine.telemetry import TokenRow

MOST_US_PER_TOKEN = 100
"""A third of what would cost 3 % of a token at 100 tokens per second."""


@pytest.fixture
def memory() -> Iterator[int]:
    fd = new_memory()
    yield fd
    os.close(fd)


def test_what_the_engine_counts_the_app_sees(memory: int) -> None:
    arena = Arena(memory)
    experts = ExpertCounters(3, 5, arena.allocate)
    lanes = LaneCounters(arena.allocate)
    totals = StoreCounters(arena.allocate)
    view = LiveView(memory, arena.table)
    experts.hits[2, 4] = 7
    lanes.latency_counts[63, 31] = 8
    totals.publish(read_bytes=2**62)
    assert view["hits"][2, 4] == 7 and view["hits"].sum() == 7
    assert view["lane_latency_counts"][63, 31] == 8
    assert view["totals"][-1] == 2**62
    kept = view.snapshot()
    experts.hits[2, 4] = 9
    assert kept["hits"][2, 4] == 7 and view["hits"][2, 4] == 9
    assert set(view.names()) == set(kept) == set(arena.table)
    assert "hits" in view and "nothing" not in view


def test_arrays_do_not_touch_each_other(memory: int) -> None:
    arena = Arena(memory)
    shapes = {"a": (3,), "b": (1, 1), "c": (0,), "d": (17, 2)}
    arrays = {name: arena.allocate(name, shape) for name, shape in shapes.items()}
    for number, array in enumerate(arrays.values()):
        array[...] = number + 1
    view = LiveView(memory, arena.table)
    for number, (name, shape) in enumerate(shapes.items()):
        assert view[name].shape == shape
        assert (view[name] == number + 1).all()


def test_the_largest_models_counters_fit_many_times(memory: int) -> None:
    arena = Arena(memory)
    ExpertCounters(128, 1024, arena.allocate)
    LaneCounters(arena.allocate)
    used = max(offset + 8 * int(np.prod(shape)) for offset, shape in arena.table.values())
    assert used < CAPACITY_BYTES / 8


def test_a_name_is_given_once_and_memory_ends(memory: int) -> None:
    arena = Arena(memory)
    arena.allocate("a", (2,))
    with pytest.raises(ValueError, match="called a already"):
        arena.allocate("a", (2,))
    with pytest.raises(MemoryError, match="do not fit"):
        arena.allocate("b", (CAPACITY_BYTES // 8,))


def test_a_reset_arena_is_zero(memory: int) -> None:
    arena = Arena(memory)
    arena.allocate("a", (100,))[...] = 5
    old = LiveView(memory, arena.table)
    arena.reset()
    assert arena.table == {}
    assert arena.allocate("b", (100,)).sum() == 0
    # A view that somebody still holds shows nonsense at worst.
    assert old["a"].sum() == 0


class Inbox:
    """Receives what an outbox sends."""

    def __init__(self) -> None:
        reader, writer = os.pipe()
        self.outbox = Outbox(Connection(writer, readable=False))
        self.batches: list[list[Event]] = []
        self._connection = Connection(reader, writable=False)
        self._thread = Thread(target=self._receive, daemon=True)
        self._thread.start()

    def finish(self) -> list[Event]:
        """Close the outbox; return all that came."""
        self.outbox.close(5)
        self.outbox._connection.close()
        self._thread.join(5)
        return [event for batch in self.batches for event in batch]

    def _receive(self) -> None:
        while True:
            try:
                self.batches.append(self._connection.recv())
            except EOFError:
                return


def row(step: int) -> TokenRow:
    values = {f.name: 0.0 for f in fields(TokenRow)}
    return TokenRow(**(values | {"step": step}))  # type: ignore[arg-type]


def test_events_arrive_whole_and_in_order() -> None:
    inbox = Inbox()
    outbox = inbox.outbox
    rows: list[TokenRow] = [row(0)]
    for fraction in (0.1, 0.5, 1.0):
        outbox.progress(PromptProgress(1, "reading the prompt", fraction))
    outbox.begin_answer(1, rows)
    for step in range(1, 1001):
        outbox.text(f"{step} ")
        rows.append(row(step))
        outbox.notice_rows()
        if step == 500:
            outbox.put(Cleared())
    outbox.end_answer()
    rows.clear()
    events = inbox.finish()
    texts = [event.text for event in events if isinstance(event, Text)]
    assert "".join(texts) == "".join(f"{step} " for step in range(1, 1001))
    steps = [r.step for event in events if isinstance(event, TokenRows) for r in event.rows]
    assert steps == list(range(1, 1001))
    middle = events.index(Cleared())
    before = "".join(event.text for event in events[:middle] if isinstance(event, Text))
    assert before.endswith(" 500 ")
    progress = [event for event in events if isinstance(event, PromptProgress)]
    assert progress[-1].fraction == 1.0


def test_progress_is_overtaken_but_no_stage_is_lost() -> None:
    inbox = Inbox()
    for stage in ("loading", "reading"):
        for percent in range(101):
            inbox.outbox.progress(OpenProgress(stage, percent / 100))
    events = [event for event in inbox.finish() if isinstance(event, OpenProgress)]
    assert len(events) < 20
    assert OpenProgress("loading", 1.0) in events and events[-1] == OpenProgress("reading", 1.0)


def test_what_cannot_be_sent_does_not_hold_the_session_up() -> None:
    reader, writer = os.pipe()
    outbox = Outbox(Connection(writer, readable=False))
    started = time.perf_counter()
    for _ in range(1000):
        outbox.put(Text(1, "x" * 1000))
    assert time.perf_counter() - started < 0.5
    os.close(reader)
    outbox.close(5)


def test_a_token_pays_little() -> None:
    inbox = Inbox()
    outbox, rows = inbox.outbox, [row(0)]
    outbox.begin_answer(1, rows)
    n_tokens, spent = 400, 0.0
    new = row(1)
    for _ in range(n_tokens):
        started = time.perf_counter()
        outbox.text(" word")
        rows.append(new)
        outbox.notice_rows()
        spent += time.perf_counter() - started
        time.sleep(INTERVAL_S / 16)
    inbox.finish()
    assert spent / n_tokens * 1e6 < MOST_US_PER_TOKEN
    assert len(inbox.batches) < n_tokens / 4
    print(f"{spent / n_tokens * 1e6:.1f} µs per token, {len(inbox.batches)} messages")
