"""The engine's process at work: opening, streaming, stopping, live changes, reopening."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from engine.counters import StoreCounters
from engine.messages import (
    Cleared,
    Failed,
    Finished,
    LiveChanged,
    LiveRefused,
    Opened,
    OpenFailed,
    OpenProgress,
    PromptProgress,
    Text,
    TokenRows,
    Tokens,
    TraceRefused,
    Tracing,
)
from engine.session import Session
from tests.engine_app import HELLO, LONG_PROMPT, PATIENCE_S, EngineApp, config, until
from tuiwork.client import EngineNotRunning

TinyModel = Callable[..., Path]


@pytest.fixture
def app() -> Iterator[EngineApp]:
    app = EngineApp()
    yield app
    app.client.close()


def headless(model: Path, n_predict: int, prompt: object = HELLO) -> list[int]:
    """The tokens of the same run in this process."""
    with Session.open(config(model)) as session:
        return session.generate(prompt, n_predict=n_predict).tokens  # type: ignore[arg-type]


def test_an_answer_streams_and_is_the_headless_one(app: EngineApp, tiny_model: TinyModel) -> None:
    opened = app.open(tiny_model())
    assert opened.info.arch and opened.resolved.stream.cache_mb == 1
    assert len(opened.layers) == opened.counters["hits"][1][0]
    assert opened.kv_bytes is not None and opened.kv_bytes > 0
    finished = app.answer(n_predict=60)
    assert finished.answer.tokens == headless(tiny_model(), 60)
    assert finished.answer.stop_reason == "length"
    assert app.text().lstrip("\n") == finished.answer.text
    # The last token is not decoded any more, so it has no row.
    assert [row.step for row in app.rows()] == list(range(1, 60))
    assert [row.token_id for row in app.rows()] == finished.answer.tokens[:-1]
    assert finished.context_used == finished.answer.n_prompt + 59
    # All of an answer comes before its end.
    assert isinstance(app.events[-1][1], Finished)


def test_a_conversation_goes_on_and_can_be_cleared(app: EngineApp, tiny_model: TinyModel) -> None:
    app.open(tiny_model())
    first = app.answer(n_predict=10).answer
    said = [*HELLO, {"role": "assistant", "content": first.text}, {"role": "user", "content": "so"}]
    second = app.answer(said, n_predict=10).answer
    assert second.n_reused >= len(HELLO)
    before = len(app.events)
    # Rows are thrown away in the engine after each answer; the numbers go on all the same.
    app.client.set_live({"run.n-predict": 12})
    assert app.wait_for(LiveChanged, since=before).after_rows == len(app.rows()) == 18
    app.client.clear()
    app.wait_for(Cleared, since=before)
    assert app.answer(n_predict=10).answer.tokens == first.tokens


def test_events_come_evenly_and_not_too_often(app: EngineApp, tiny_model: TinyModel) -> None:
    app.open(tiny_model("tiny"))
    app.answer(n_predict=400)
    for kind in (Text, TokenRows):
        times = [when for when, event in app.events if isinstance(event, kind)]
        seconds = times[-1] - times[0]
        assert len(times) <= seconds * 31 + 3
        assert len(times) >= 5
        gaps = [after - before for before, after in pairwise(times)]
        assert max(gaps) < 0.5


def test_cancel_stops_within_a_token(app: EngineApp, tiny_model: TinyModel) -> None:
    app.open(tiny_model())
    app.client.generate(HELLO, 1500)
    app.wait_for(TokenRows)
    asked = time.perf_counter()
    app.client.cancel()
    answer = app.wait_for(Finished).answer
    assert time.perf_counter() - asked < 0.5
    assert answer.stop_reason == "cancelled"
    assert 0 < answer.n_generated < 1500
    n_kept = min(10, answer.n_generated)
    assert app.answer(n_predict=10).answer.tokens[:n_kept] == answer.tokens[:n_kept]


def test_cancel_while_the_prompt_is_read(app: EngineApp, tiny_model: TinyModel) -> None:
    app.open(tiny_model(), model__batch=1)
    app.client.generate(LONG_PROMPT, 5)
    app.wait_for(PromptProgress)
    app.client.cancel()
    finished = app.wait_for(Finished)
    assert finished.answer.stop_reason == "cancelled"
    assert finished.answer.tokens == []
    assert finished.context_used < finished.answer.n_prompt


def test_cancel_is_for_what_was_asked_before_it(app: EngineApp, tiny_model: TinyModel) -> None:
    app.open(tiny_model())
    first = app.client.generate(HELLO, 1500)
    second = app.client.generate(HELLO, 1500)
    app.client.cancel()
    third = app.client.generate(HELLO, 5)
    app.wait_until(lambda event: isinstance(event, Finished) and event.request == third)
    ends = {event.request: event.answer.stop_reason for event in app.of(Finished)}
    assert ends == {first: "cancelled", second: "cancelled", third: "length"}


def test_settings_change_in_the_middle_of_an_answer(app: EngineApp, tiny_model: TinyModel) -> None:
    app.open(tiny_model())
    app.client.generate(HELLO, 1500)
    app.wait_for(TokenRows)
    wanted = {"stream.cache-mb": 2, "routing.drop-cold-experts": 1.0, "stream.io-threads": 2}
    request = app.client.set_live(wanted)
    changed = app.wait_for(LiveChanged)
    assert (changed.request, changed.changes) == (request, wanted)
    assert changed.before == {
        "stream.cache-mb": 1,
        "routing.drop-cold-experts": 0.0,
        "stream.io-threads": 4,
    }
    assert changed.resolved.stream.io_threads == 2
    app.wait_until(lambda event: isinstance(event, TokenRows), since=len(app.events))
    app.client.cancel()
    app.wait_for(Finished)
    rows = app.rows()
    before, after = rows[: changed.after_rows], rows[changed.after_rows :]
    assert before and {row.cache_budget_mib for row in before} == {1.0}
    assert after and {row.cache_budget_mib for row in after} == {2.0}
    assert sum(row.experts_dropped for row in before) == 0
    assert sum(row.experts_dropped for row in after) > 0


def test_sampling_changes_at_the_next_token(app: EngineApp, tiny_model: TinyModel) -> None:
    app.open(tiny_model())
    app.client.generate(HELLO, 150)
    app.wait_for(TokenRows)
    app.client.set_live({"sampling.temp": 10.0, "sampling.min-p": 0.0, "sampling.top-k": 0})
    changed = app.wait_for(LiveChanged)
    tokens, greedy = app.wait_for(Finished).answer.tokens, headless(tiny_model(), 150)
    # The token in hand was chosen already.
    kept = changed.after_rows + 1
    assert tokens[:kept] == greedy[:kept]
    assert tokens[kept:] != greedy[kept:]


def test_what_is_refused_changes_nothing(app: EngineApp, tiny_model: TinyModel) -> None:
    app.open(tiny_model())
    app.client.generate(HELLO, 100)
    app.wait_for(Text)
    for changes, reason in (
        ({"stream.cache-mb": 2, "stream.o-direct": False}, "opening the model again"),
        ({"stream.turbo": 1}, "no setting called stream.turbo"),
        ({"nonsense": 1}, "no setting called nonsense"),
        ({"stream.cache-mb": "many"}, "not allowed"),
        ({"routing.n-expert-used": 1000}, "n-expert-used"),
    ):
        before = len(app.events)
        request = app.client.set_live(changes)
        refused = app.wait_for(LiveRefused, since=before)
        assert (refused.request, refused.changes) == (request, changes)
        assert reason in refused.message
    assert app.wait_for(Finished).answer.tokens == headless(tiny_model(), 100)
    assert {row.cache_budget_mib for row in app.rows()} == {1.0}


def test_tokens_are_counted_also_while_it_answers(app: EngineApp, tiny_model: TinyModel) -> None:
    app.open(tiny_model())
    app.client.generate(HELLO, 1500)
    app.wait_for(Text)
    request = app.client.count_tokens(HELLO)
    counted = app.wait_for(Tokens)
    assert counted.request == request and counted.ctx == 2048
    assert not app.of(Finished)
    app.client.count_tokens("")
    assert "empty" in app.wait_for(Failed).message
    assert app.client.stage == "answering"
    app.client.cancel()
    assert app.wait_for(Finished).answer.n_prompt == counted.count


def test_a_full_context_is_told_apart(app: EngineApp, tiny_model: TinyModel) -> None:
    app.open(tiny_model(), model__ctx=256)
    app.client.generate(LONG_PROMPT * 3, 5)
    failed = app.wait_for(Failed)
    assert (failed.error, failed.session_usable) == ("ContextFull", True)
    assert app.client.stage == "idle"
    # Room for less than asked shortens the answer instead.
    assert app.answer(n_predict=1000).answer.stop_reason == "context"


def test_a_second_model_takes_the_place_of_the_first(app: EngineApp, tiny_model: TinyModel) -> None:
    first = app.open(tiny_model())
    app.answer()
    pid, before = app.client.pid, len(app.events)
    second = app.open(tiny_model("tiny,n-layer=3,n-expert=8"))
    assert app.client.pid == pid
    stages = [event.stage for event in app.of(OpenProgress, before)]
    assert "loading" in stages and "learning the graph" in stages
    assert len(second.layers) == 3 != len(first.layers)
    assert app.client.live is not None
    assert app.client.live["hits"].shape == (3, 8)
    assert app.client.live["totals"].sum() == 0
    assert app.answer().answer.tokens


def test_nothing_is_heard_of_an_opening_that_another_replaced(
    app: EngineApp, tiny_model: TinyModel
) -> None:
    first, second = tiny_model(), tiny_model("tiny,n-layer=3,n-expert=8")
    app.client.open(config(first))
    app.client.open(config(first, model__ctx=512))
    opened = app.open(second)
    assert opened.info.path == str(second)
    assert [event.info.path for event in app.of(Opened)] == [str(second)]
    assert app.of(OpenFailed) == []
    assert app.client.opened is opened


def test_a_running_answer_does_not_hold_up_another_model(
    app: EngineApp, tiny_model: TinyModel
) -> None:
    app.open(tiny_model("tiny"), model__ctx=2048)
    app.client.generate(HELLO, 1900)
    app.wait_for(TokenRows)
    before = len(app.events)
    app.open(tiny_model("tiny,n-layer=3,n-expert=8"))
    until_opened = [event for _, event in app.events[before:]]
    assert not any(isinstance(event, (Finished, Failed)) for event in until_opened)
    assert app.answer().request > 1


@pytest.mark.parametrize("wrong", ["nowhere.gguf", "text", "setting"])
def test_a_failed_opening_leaves_a_usable_process(
    app: EngineApp, tiny_model: TinyModel, tmp_path: Path, wrong: str
) -> None:
    app.open(tiny_model())
    pid = app.client.pid
    if wrong == "setting":
        app.client.open(config(tiny_model(), routing__n_expert_used=1000))
    else:
        path = tmp_path / wrong
        if wrong == "text":
            path.write_text("not a model")
        app.client.open(config(path))
    failed = app.wait_for(OpenFailed)
    assert failed.message and failed.error in ("ModelError", "InputError")
    assert app.client.opened is None and app.client.live is None
    before = len(app.events)
    app.client.generate(HELLO)
    assert app.wait_for(Failed, since=before).message == "no model is open"
    app.open(tiny_model())
    assert app.client.pid == pid
    assert app.answer().answer.tokens


def test_an_opening_can_be_stopped(app: EngineApp, tiny_model: TinyModel) -> None:
    app.client.open(config(tiny_model()))
    app.client.cancel()
    assert app.wait_for(OpenFailed).error == "OpeningStopped"
    app.open(tiny_model())


def test_live_counters_agree_with_the_figures(app: EngineApp, tiny_model: TinyModel) -> None:
    app.open(tiny_model(), model__batch=1)
    live = app.client.live
    assert live is not None
    # The lanes have read the dense weights already.
    before = live.snapshot()
    app.client.generate(HELLO, 100)
    app.wait_for(TokenRows)
    while_running = live.snapshot()
    figures = app.wait_for(Finished).answer.figures
    assert 0 < while_running["hits"].sum() <= live["hits"].sum()
    prefill_hits = live["hits"].sum() - figures["hits"]
    assert 0 <= prefill_hits < live["hits"].sum()
    assert live["misses"].sum() - figures["misses"] > 0
    totals = live["totals"]
    named = dict(zip(StoreCounters.NAMES, totals.tolist(), strict=True))
    assert (named["hits"], named["misses"]) == (live["hits"].sum(), live["misses"].sum())
    assert named["reads"] == (live["lane_reads"] - before["lane_reads"]).sum()
    assert named["read_bytes"] == (live["lane_bytes"] - before["lane_bytes"]).sum()
    assert named["read_bytes"] == round((figures["read_MiB"] + figures["prefill_read_MiB"]) * 2**20)
    assert live["routed"].sum() == live["hits"].sum() + live["misses"].sum()
    assert (live["state"] == 1).sum() > 0
    with pytest.raises(ValueError, match="read-only"):
        live["hits"][0, 0] = 1


def test_a_busy_app_does_not_slow_the_engine(app: EngineApp, tiny_model: TinyModel) -> None:
    app.open(tiny_model())
    live = app.client.live
    assert live is not None
    go_on = threading.Event()
    app.react = lambda event: None if isinstance(event, PromptProgress) else _wait(go_on)
    app.client.generate(HELLO, 1500)
    app.wait_for(Text)
    start = int(live["totals"][0])
    until(lambda: int(live["totals"][0]) > start + 20)
    go_on.set()
    app.client.cancel()
    answer = app.wait_for(Finished).answer
    assert app.text().lstrip("\n") == answer.text


def _wait(event: threading.Event) -> None:
    event.wait(PATIENCE_S)


def test_without_an_engine_commands_say_so(app: EngineApp) -> None:
    for command in (
        app.client.clear,
        app.client.restart,
        lambda: app.client.generate(HELLO),
        lambda: app.client.set_live({}),
    ):
        with pytest.raises(EngineNotRunning, match="not running"):
            command()
    app.client.cancel()
    app.client.close()


def test_a_machine_sample_tells_both_processes(app: EngineApp, tiny_model: TinyModel) -> None:
    assert app.client.machine_sample().engine is None
    app.open(tiny_model())
    app.client.machine_sample()
    app.answer(n_predict=100)
    sample = app.client.machine_sample()
    assert sample.engine is not None and sample.engine.pid == app.client.pid
    assert sample.engine.cpu_percent is not None and sample.engine.cpu_percent > 0
    assert sample.engine.rss and sample.engine.anon and sample.app.rss
    assert sample.memory_available and sample.memory_total
    assert sample.memory_available < sample.memory_total


def test_the_apps_side_loads_no_native_library() -> None:
    code = (
        "import sys, tuiwork.client, engine.messages; names = set(sys.modules); "
        "assert not names & {'llama_cpp', 'numpy', 'psutil', 'multiprocessing'}, names; "
        "import tuiwork.engine_process, tuiwork.usage, engine.worker; "
        "assert 'llama_cpp' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_routings_are_traced_from_the_next_token_on(
    app: EngineApp, tiny_model: TinyModel, tmp_path: Path
) -> None:
    path = tmp_path / "routes.csv"
    app.open(tiny_model())
    app.client.generate(HELLO, n_predict=200)
    app.wait_for(TokenRows)
    app.client.trace_routes(str(path))
    assert app.wait_for(Tracing).path == str(path)
    app.wait_for(Finished)
    app.client.trace_routes(None)
    app.wait_for(Tracing, since=len(app.events) - 1)
    rows = [line for line in path.read_text().splitlines() if line[0].isdigit()]
    # Five layers of top-4; not the whole answer, and whole tokens only.
    assert 0 < len(rows) < 200 * 20 and len(rows) % 20 == 0
    app.client.trace_routes("/nowhere/routes.csv")
    assert "/nowhere/routes.csv" in app.wait_for(TraceRefused).message
