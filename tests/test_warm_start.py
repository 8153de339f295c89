"""A warm start: what is remembered, what is read because of it, and that no answer changes."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import popularity, warm_start
from engine.background import Background
from engine.counters import RESIDENT
from engine.demo import DEMO_MODEL
from engine.errors import ReadError
from engine.loading import ExpertLoader
from engine.model_file import ModelFile
from engine.popularity import HALF_LIFE, Popularity
from engine.retention import Retention
from engine.session import Session
from engine.traces import MISS, read_route_trace
from engine.warm_start import hottest
from tests import gate
from tests.test_lossless import KINDS, resident, slow, slow_disk

__all__ = ["resident", "slow_disk"]

TinyModel = Callable[..., Path]
WARM = {"stream.warm-start": True, "stream.cache-mb": 2, "stream.force-cache": True}
ROOMY = WARM | {"stream.cache-mb": 100}
PROMPT = gate.PROMPTS[:1]


def teach(model: Path, settings: dict[str, Any] | None = None) -> None:
    """Have a session before, so that there is something to remember."""
    gate.run(model, settings or ROOMY, PROMPT, n_tokens=40)


def wait_until_warm(session: Session) -> None:
    for _ in range(2000):
        session.look()
        if not session._warm.is_busy:
            return
        time.sleep(0.005)
    raise AssertionError("the warm start does not end")


@pytest.fixture
def head_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers begin when a few experts were warmed, however busy this machine is."""
    warm = ExpertLoader.warm

    def and_wait(self: ExpertLoader, *arguments: Any) -> None:
        warm(self, *arguments)
        while self.warming is not None and self.warming.is_busy and self.warming.n_warmed < 3:
            time.sleep(0.001)
            self.collect()

    monkeypatch.setattr(ExpertLoader, "warm", and_wait)


def assert_books_balance(session: Session) -> None:
    """The cache weighs what the entries weigh that are there, and keeps to its budget."""
    opened = session._opened
    assert opened.router is not None
    opened.router.loader.settle()
    there = opened.store.counters.state == RESIDENT
    weights = [layer.entry_bytes for layer in opened.layers]
    assert opened.store.resident_bytes == int(there.sum(axis=1) @ weights)
    assert opened.store.resident_bytes <= opened.store.budget_bytes
    opened.router.loader.resume()


class Gate:
    """A disk whose lanes wait while it is shut. The session's own thread always passes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.fails = threading.Event(), False
        self.open.set()
        read = os.preadv

        def gated(*arguments: Any) -> int:
            if threading.current_thread().name.startswith("tuiwork-lane"):
                self.open.wait(10)
            if self.fails:
                raise OSError(errno.EIO, "the disk is gone")
            return read(*arguments)

        monkeypatch.setattr(os, "preadv", gated)


def saved() -> list[Path]:
    return sorted(popularity.folder().glob("*"))


@pytest.mark.parametrize(
    ("cache_mb", "kind"),
    [
        (1, "tiny-mixed"),
        *slow((1, kind) for kind in KINDS if kind != "tiny-mixed"),
        *slow((2, kind) for kind in KINDS),
    ],
)
def test_output_is_lossless_while_it_warms(
    kind: str,
    cache_mb: int,
    tiny_model: TinyModel,
    resident: Callable[..., gate.Run],
    slow_disk: None,
    head_start: None,
) -> None:
    model, settings = tiny_model(kind), WARM | {"stream.cache-mb": cache_mb}
    teach(model)
    warmed = gate.run(model, settings | {"stream.prefetch": "on"}, poison=True)
    gate.assert_same(warmed, resident(kind))
    assert warmed.counts["warmed"] >= max(1, warmed.counts["warmed_used"])
    assert warmed.counts["evictions"] > gate.N_TOKENS


@pytest.mark.parametrize("lanes", [1, 2, 8])
def test_output_is_lossless_with_other_lanes(
    lanes: int, tiny_model: TinyModel, slow_disk: None
) -> None:
    model = tiny_model("tiny-mixed")
    teach(model)
    warmed = gate.run(model, WARM | {"stream.io-threads": lanes}, PROMPT, poison=True)
    gate.assert_same(warmed, gate.run(model, gate.RESIDENT, PROMPT))
    assert (warmed.counts["warmed"] > 0) == (lanes > 1)


def test_output_is_lossless_through_live_changes(tiny_model: TinyModel, slow_disk: None) -> None:
    changes: list[dict[str, Any]] = [
        {"stream.cache-mb": 1},
        {"sampling.temp": 0.0},
        {"stream.io-threads": 1},
        {"stream.cache-mb": 3},
        {"stream.io-threads": 5},
        {"stream.prefetch": "on"},
        {"stream.cache-mb": 0},
        {"stream.cache-mb": 2},
    ]
    model = tiny_model("tiny")
    teach(model)
    for first in (0, 3, 6):

        def change(session: Session, n: int, first: int = first) -> None:
            if n % 2 == 0:
                session.set_live(changes[(n // 2 + first) % len(changes)])
            store = session._opened.store
            if store.budget_bytes:
                assert store.resident_bytes <= store.budget_bytes

        warmed = gate.run(model, WARM, PROMPT, poison=True, between=change)
        gate.assert_same(warmed, gate.run(model, gate.RESIDENT, PROMPT))


@pytest.mark.parametrize("kind", ["tiny", "tiny-mixed"])
def test_the_cache_weighs_what_is_in_it(kind: str, tiny_model: TinyModel, slow_disk: None) -> None:
    """Entries that leave, are routed to and are guessed while lanes read them, at a tiny budget."""
    model, settings = tiny_model(kind), WARM | {"stream.cache-mb": 1, "stream.prefetch": "on"}
    teach(model)
    for n in range(8):
        with gate.open_session(model, settings, poison=True) as session:
            session.generate(gate.PROMPTS[n % 2], n_predict=n + 1)
            assert_books_balance(session)
            session.generate(gate.PROMPTS[0], n_predict=2)
            assert_books_balance(session)


def test_a_plan_that_nobody_begins_costs_nothing(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shut lanes: what is routed is taken out of the plan and read as if there were none."""
    model = tiny_model("tiny")
    teach(model)
    plain = gate.run(model, WARM | {"stream.warm-start": False} | gate.NO_PREFETCH, PROMPT)
    monkeypatch.setattr(Background, "next", lambda self, lane: None)
    with gate.open_session(model, WARM | gate.NO_PREFETCH, poison=True) as session:
        assert session._opened.store.resident_bytes == 0
        tokens = session.generate(PROMPT[0], n_predict=gate.N_TOKENS).tokens
        counts = session.counts()
        assert counts is not None and counts.warmed == counts.warmed_bytes == 0
        assert counts.resident_bytes <= session._opened.store.budget_bytes
        assert counts.hits + counts.misses == plain.counts["hits"] + plain.counts["misses"]
    assert tokens == plain.tokens[0]


def test_idle_time_fills_the_cache_and_only_what_is_free(tiny_model: TinyModel) -> None:
    model = tiny_model("tiny")
    teach(model)
    with gate.open_session(model, WARM | gate.NO_PREFETCH, poison=True) as session:
        assert session.wants_looks
        wait_until_warm(session)
        assert not session.wants_looks
        counts, store = session.counts(), session._opened.store
        assert counts is not None
        assert 0.9 * store.budget_bytes < counts.resident_bytes <= store.budget_bytes
        assert counts.warmed_bytes >= counts.resident_bytes
        assert counts.reads == counts.bytes == counts.misses == counts.evictions == 0
        assert counts.warmed > 0 == counts.warmed_used
        state = session._opened.store.counters.state
        assert int((state == 1).sum()) == counts.warmed
        session.generate(PROMPT[0], n_predict=5)
        rows = session.metrics.rows
        used = session.counts()
        assert used is not None and 0 < used.warmed_used <= used.warmed == counts.warmed
        read = sum(row.read_bytes for row in rows) + session.metrics.turns[0].prefill_read_bytes
        assert used.bytes == read  # what was warmed is charged to no token


def test_the_hottest_are_there_and_stay(tiny_model: TinyModel) -> None:
    model = tiny_model("tiny")
    teach(model)
    known = popularity.read(saved()[0], *_shape(model))
    assert known is not None
    with gate.open_session(model, WARM | gate.NO_PREFETCH) as session:
        wait_until_warm(session)
        store = session._opened.store
        warmed = {
            key for key in hottest(known.rates) if store.is_resident(*divmod(key, store.n_expert))
        }
        assert warmed == set(hottest(known.rates)[: len(warmed)])
        top = hottest(known.rates)[: len(warmed) // 4]
        session.generate("x", n_predict=1)
        kept = sum(store.is_resident(*divmod(key, store.n_expert)) for key in top)
        assert kept > 0.9 * len(top)


def _shape(model: Path) -> tuple[int, int]:
    experts = ModelFile.open(model).experts
    return experts.n_layer, experts.n_expert


def test_a_first_prompt_hits_more(tiny_model: TinyModel) -> None:
    teach(DEMO_MODEL, WARM | {"stream.cache-mb": 10})
    misses = []
    for warm in (False, True):
        settings = WARM | {"stream.cache-mb": 10, "stream.warm-start": warm} | gate.NO_PREFETCH
        with gate.open_session(DEMO_MODEL, settings) as session:
            wait_until_warm(session)
            session.generate(PROMPT[0], n_predict=20)
            counts = session.counts()
            assert counts is not None
            misses.append(counts.misses)
    assert misses[1] < 0.8 * misses[0]


def test_what_is_dropped_does_not_depend_on_time(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planned experts count as resident for the lossy rule, read or not."""
    model = tiny_model("tiny")
    teach(model)
    content = saved()[0].read_bytes()
    lossy = WARM | {"routing.drop-cold-experts": 0.75}
    seen = []
    for idle in (True, False, None):
        saved()[0].write_bytes(content)
        with monkeypatch.context() as patch:
            if idle is None:
                patch.setattr(Background, "next", lambda self, lane: None)
            with gate.open_session(model, lossy, poison=True) as session:
                if idle:
                    wait_until_warm(session)
                answer = session.generate(PROMPT[0], n_predict=60)
                counts = session.counts()
                assert counts is not None
                seen.append((answer.tokens, counts.dropped, counts.hits + counts.misses))
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][1] > 0


def test_traces_tell_the_truth_while_it_warms(
    tiny_model: TinyModel, tmp_path: Path, slow_disk: None
) -> None:
    model, routes, reads = tiny_model("tiny"), tmp_path / "routes.csv", tmp_path / "io.csv"
    teach(model)
    ran = gate.run(model, WARM, PROMPT, route_trace=routes, io_trace=reads, poison=True)
    gate.assert_same(ran, gate.run(model, gate.RESIDENT, PROMPT))
    trace = read_route_trace(routes)
    assert trace.residency is not None and trace.expert_bytes is not None
    assert (trace.expert_bytes[trace.residency != MISS] == 0).all()
    assert int((trace.expert_bytes > 0).sum()) == ran.counts["misses"]
    rows = [line for line in reads.read_text().splitlines() if line[0].isdigit()]
    assert len(rows) == ran.counts["reads"]


def test_closing_does_not_wait_for_the_plan(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("tiny")
    teach(model)
    disk, reads = Gate(monkeypatch), itertools.count()
    session = gate.open_session(model, ROOMY | {"stream.dense-weights": "mmap"})
    wait_until_warm(session)
    session.close()
    read = os.preadv

    def slow(*arguments: Any) -> int:
        next(reads)
        time.sleep(0.05)
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", slow)
    began = time.perf_counter()
    session = gate.open_session(model, ROOMY | {"stream.dense-weights": "mmap"})
    time.sleep(0.1)
    session.set_live({"stream.cache-mb": 99})
    session.close()
    assert time.perf_counter() - began < 5
    assert 0 < next(reads) < 60
    assert disk.open.is_set()


def test_a_disk_that_fails_meanwhile_is_no_concern_of_an_answer(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("tiny")
    teach(model)
    expected = gate.run(model, gate.RESIDENT, PROMPT).tokens[0]
    disk = Gate(monkeypatch)
    for when in ("opened", "midway", "late"):
        with gate.open_session(model, WARM, poison=True) as session:
            if when == "midway":
                time.sleep(0.01)
            if when == "late":
                wait_until_warm(session)
            disk.fails = True
            time.sleep(0.05)
            with pytest.raises(ReadError, match="the disk is gone"):
                session.generate(PROMPT[0], n_predict=gate.N_TOKENS)
            session.look()
            disk.fails = False
            session.clear()
            assert session.generate(PROMPT[0], n_predict=gate.N_TOKENS).tokens == expected
            assert_books_balance(session)


def test_a_cancelled_answer_leaves_a_warm_start_that_goes_on(
    tiny_model: TinyModel, slow_disk: None
) -> None:
    model = tiny_model("tiny")
    teach(model)
    expected = gate.run(model, gate.RESIDENT, PROMPT).tokens[0]
    with gate.open_session(model, WARM, poison=True) as session:
        answer = session.generate(PROMPT[0], n_predict=60, on_token=lambda _: session.cancel())
        assert answer.stop_reason == "cancelled"
        assert_books_balance(session)
        wait_until_warm(session)
        session.clear()
        assert session.generate(PROMPT[0], n_predict=gate.N_TOKENS).tokens == expected


NOISE = np.random.default_rng(3).bytes(5000)


@pytest.mark.parametrize(
    "content", [b"", b"tuiwork-popularity 1\n", NOISE], ids=["empty", "header", "noise"]
)
def test_a_damaged_file_is_as_good_as_none(content: bytes, tiny_model: TinyModel) -> None:
    model = tiny_model("tiny")
    teach(model)
    saved()[0].write_bytes(content)
    run = gate.run(model, WARM, PROMPT, n_tokens=8)
    assert run.counts["warmed"] == 0 and not any("warm" in note for note in run.notes)
    assert gate.run(model, WARM, PROMPT, n_tokens=8).counts["warmed"] > 0


def test_a_folder_that_cannot_be_used_is_told_once(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with gate.open_session(tiny_model("tiny"), WARM) as session:
        for _ in range(2):
            session.generate(PROMPT[0], n_predict=4)
            session._warm.save()
        notes = session.notes
    assert len([note for note in notes if "no warm start" in note]) == 1


def test_nothing_is_kept_where_it_is_off(tiny_model: TinyModel) -> None:
    teach(tiny_model("tiny"), {"stream.cache-mb": 100, "stream.force-cache": True})
    assert saved() == []


def test_a_crash_loses_little(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_start, "SAVE_EVERY_S", 0.0)
    with gate.open_session(tiny_model("tiny"), WARM) as session:
        session.generate(PROMPT[0], n_predict=4)
        (file,) = saved()
        first = file.read_bytes()
        session.clear()
        session.generate(PROMPT[0], n_predict=4)
        assert file.read_bytes() != first


def test_a_renamed_model_keeps_it_and_a_changed_one_does_not(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    model = tiny_model("tiny")
    teach(model)
    copied = Path(shutil.copy(model, tmp_path / "other name.gguf"))
    assert gate.run(copied, WARM, PROMPT, n_tokens=8).counts["warmed"] > 0
    data = bytearray(copied.read_bytes())
    start = ModelFile.open(copied).data_offsets[0]
    data[start : start + 64] = bytes(64)
    copied.write_bytes(data)
    assert gate.run(copied, WARM, PROMPT, n_tokens=8).counts["warmed"] == 0
    other = tiny_model("tiny", seed=2)
    assert gate.run(other, WARM, PROMPT, n_tokens=8).counts["warmed"] == 0
    assert len(saved()) == 3


def test_only_so_many_files_are_kept(tmp_path: Path) -> None:
    known = Popularity(np.ones((2, 3), np.float32), 4.0)
    for number in range(popularity.MOST_FILES + 5):
        path = tmp_path / f"{number:03d}{popularity.SUFFIX}"
        popularity.write(path, known)
        os.utime(path, (number, number))
    left = sorted(tmp_path.iterdir())
    assert len(left) == popularity.MOST_FILES
    assert left[0].name.startswith("005")


def test_each_background_job_is_had_by_one() -> None:
    """Lanes that take turns, and somebody who takes jobs back meanwhile."""
    queue: Background[int] = Background(4)
    queue.add(range(4000))
    had: list[list[int]] = [[] for _ in range(5)]

    def lane(number: int) -> None:
        while (job := queue.next(number)) is not None:
            had[number].append(job)
            queue.done(number)

    threads = [threading.Thread(target=lane, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    had[4] = [job for job in range(3999, -1, -7) if queue.take_back(job)]
    for thread in threads:
        thread.join()
    assert sorted(itertools.chain(*had)) == list(range(4000))
    assert not queue.take_back(0) and not queue


def test_no_background_job_is_begun_in_a_pause_or_while_something_is_waited_for() -> None:
    queue: Background[int] = Background(2)
    queue.add([1, 2, 3])
    assert queue.next(0) == 1
    queue.done(0)
    queue.pause()
    assert queue.next(1) is None
    queue.resume()
    queue.yields = True
    assert queue.next(1) is None
    queue.yields = False
    assert queue.take_back(2)
    assert queue.next(1) == 3


shapes = st.tuples(st.integers(1, 6), st.integers(1, 6))


@given(shapes, st.floats(0, 1e9, width=32), st.integers(0, 2**32))
def test_what_is_written_is_read(shape: tuple[int, int], passes: float, seed: int) -> None:
    uses = np.random.default_rng(seed).exponential(10, shape).astype(np.float32)
    back = Popularity.from_bytes(Popularity(uses, passes).to_bytes(), *shape)
    assert back is not None and np.array_equal(back.uses, uses) and back.passes == passes
    assert ((back.rates >= 0) & (back.rates <= 1)).all()
    assert (
        Popularity.from_bytes(Popularity(uses, passes).to_bytes(), shape[0] + 1, shape[1]) is None
    )


@given(st.data())
def test_damage_is_seen_and_never_raises(data: st.DataObject) -> None:
    whole = Popularity(np.arange(12, dtype=np.float32).reshape(3, 4), 20.0).to_bytes()
    changed = bytearray(whole)
    place = data.draw(st.integers(0, len(whole) - 1))
    changed[place] ^= data.draw(st.integers(1, 255))
    found = Popularity.from_bytes(bytes(changed), 3, 4)
    assert found is None or np.array_equal(found.uses, np.arange(12).reshape(3, 4))
    assert Popularity.from_bytes(whole[:place], 3, 4) is None
    assert Popularity.from_bytes(data.draw(st.binary(max_size=200)), 3, 4) is None


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_numbers_that_cannot_be_are_refused(bad: float) -> None:
    uses = np.ones((2, 2), np.float32)
    assert Popularity.from_bytes(Popularity(uses, bad).to_bytes(), 2, 2) is None
    uses[1, 1] = bad
    assert Popularity.from_bytes(Popularity(uses, 5.0).to_bytes(), 2, 2) is None


def test_it_follows_the_user() -> None:
    """What was used in one session counts half after HALF_LIFE passes of others."""
    before = Popularity.none(1, 2).later(np.array([[100.0, 0.0]]), 200)
    after = before.later(np.array([[0.0, 1000.0]]), HALF_LIFE)
    assert after.uses.tolist() == [[50.0, 1000.0]]
    assert after.rates[0, 0] < after.rates[0, 1] <= 1


def test_a_seed_is_the_worth_of_that_rate() -> None:
    """As if each key had been used so often for a long time."""
    seeded, lived = Retention(2, 2), Retention(2, 2)
    seeded.seed(np.array([[1.0, 0.0], [0.0, 1.0]]))
    for _ in range(3000):
        lived.use(0, [0])
        lived.use(1, [3])
    lived._begin_pass()
    assert seeded._worth.tolist() == pytest.approx(lived._worth.tolist(), rel=0.3)
