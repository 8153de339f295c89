"""The engine's process dies, or the app does: what is told, and that nothing is left."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.live import new_memory
from engine.messages import (
    EngineDied,
    Event,
    Finished,
    LiveRefused,
    Opened,
    OpenProgress,
    PromptProgress,
    Text,
)
from tests.engine_app import (
    HELLO,
    LONG_PROMPT,
    EngineApp,
    config,
    process_exists,
    until,
)
from tuiwork.client import EngineNotRunning

TinyModel = Callable[..., Path]
STAGES = ["opening", "reading the prompt", "answering", "idle"]


@pytest.fixture
def app() -> Iterator[EngineApp]:
    app = EngineApp()
    yield app
    app.client.close()


def pid_of(app: EngineApp) -> int:
    pid = app.client.pid
    assert pid is not None
    return pid


def die_at(app: EngineApp, model: Path, stage: str, death: signal.Signals) -> None:
    """Bring the engine to a stage and send it a signal there."""

    def strike(kind: type) -> Callable[[Event], None]:
        def react(event: Event) -> None:
            if isinstance(event, kind):
                app.react = lambda _event: None
                os.kill(pid_of(app), death)

        return react

    if stage == "opening":
        app.react = strike(OpenProgress)
        app.client.open(config(model))
        return
    app.open(model, model__batch=1)
    if stage == "idle":
        os.kill(pid_of(app), death)
    else:
        app.react = strike(PromptProgress if stage == "reading the prompt" else Text)
        app.client.generate(LONG_PROMPT if stage == "reading the prompt" else HELLO, 1500)


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
@pytest.mark.parametrize("stage", STAGES)
def test_a_death_is_told_and_the_engine_starts_again(
    app: EngineApp, tiny_model: TinyModel, stage: str, death: signal.Signals
) -> None:
    die_at(app, tiny_model(), stage, death)
    died = app.wait_for(EngineDied)
    assert app.events[-1][1] == died
    assert (died.signal, died.exit_code, died.during) == (death.name, None, stage)
    assert death.name in died.message and stage in died.message
    if death is signal.SIGKILL:
        assert "memory" in died.message
    else:
        assert any(line.startswith("Fatal Python error") for line in died.stderr)
    assert not app.client.running and app.client.pid is None and app.client.opened is None
    with pytest.raises(EngineNotRunning):
        app.client.generate(HELLO)
    assert app.client.stage == "idle"
    before = len(app.events)
    app.client.restart()
    app.wait_for(Opened, since=before)
    assert app.answer(n_predict=5).answer.n_generated == 5


def test_the_conversation_goes_on_after_a_death(app: EngineApp, tiny_model: TinyModel) -> None:
    app.open(tiny_model())
    first = app.answer(n_predict=8).answer
    said = [*HELLO, {"role": "assistant", "content": first.text}, {"role": "user", "content": "so"}]
    expected = app.answer(said, n_predict=8).answer.tokens
    os.kill(pid_of(app), signal.SIGSEGV)
    app.wait_for(EngineDied)
    before = len(app.events)
    app.client.restart()
    app.wait_for(Opened, since=before)
    assert app.answer(said, n_predict=8).answer.tokens == expected


def test_a_model_can_be_opened_at_the_news_of_a_death(
    app: EngineApp, tiny_model: TinyModel
) -> None:
    app.open(tiny_model())
    news = threading.Event()
    heard: list[bool] = []

    def react(event: Event) -> None:
        if isinstance(event, EngineDied):
            heard.append(app.client.running)
            news.set()

    app.react = react
    os.kill(pid_of(app), signal.SIGKILL)
    assert news.wait(10) and heard == [False]
    app.open(tiny_model())


def test_restart_also_replaces_an_engine_that_hangs(app: EngineApp, tiny_model: TinyModel) -> None:
    app.open(tiny_model())
    hung, before = pid_of(app), len(app.events)
    os.kill(hung, signal.SIGSTOP)
    app.client.restart()
    app.wait_for(Opened, since=before)
    assert pid_of(app) != hung and not process_exists(hung)
    assert not app.of(EngineDied)
    assert app.answer(n_predict=5).answer.n_generated == 5


def test_nothing_waits_for_an_engine_that_hangs(app: EngineApp, tiny_model: TinyModel) -> None:
    app.open(tiny_model())
    pid = pid_of(app)
    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    for _ in range(200):
        app.client.set_live({"run.system": "x" * 10_000})
    app.client.generate("x" * 1_000_000)
    app.client.cancel()
    assert time.monotonic() - started < 0.5
    app.client.close()
    assert time.monotonic() - started < 4
    assert not process_exists(pid)
    assert not app.of(EngineDied)


def test_what_was_asked_of_a_hung_engine_is_done_when_it_goes_on(
    app: EngineApp, tiny_model: TinyModel
) -> None:
    app.open(tiny_model())
    os.kill(pid_of(app), signal.SIGSTOP)
    for _ in range(50):
        app.client.set_live({"nonsense": "x" * 10_000})
    os.kill(pid_of(app), signal.SIGCONT)
    app.answer(n_predict=5)
    assert len(app.of(LiveRefused)) == 50


def test_close_ends_a_running_answer(app: EngineApp, tiny_model: TinyModel) -> None:
    app.open(tiny_model())
    app.client.generate(HELLO, 1500)
    app.wait_for(Text)
    pid, started = pid_of(app), time.monotonic()
    app.client.close()
    assert time.monotonic() - started < 1.5
    assert not process_exists(pid)
    assert not app.of(EngineDied)


def test_nothing_is_left_behind(tiny_model: TinyModel) -> None:
    def holdings() -> tuple[int, int]:
        # What other tests left to the collector is not ours.
        gc.collect()
        mapped = Path("/proc/self/maps").read_text().count("tuiwork-counters")
        return mapped, len(list(Path("/proc/self/fd").iterdir()))

    app = EngineApp()
    app.open(tiny_model())
    app.client.close()
    before, n_threads = holdings(), threading.active_count()
    for end in ("close", "kill", "kill"):
        app.open(tiny_model())
        pid = pid_of(app)
        if end == "close":
            app.client.close()
        else:
            n_events = len(app.events)
            os.kill(pid, signal.SIGKILL)
            app.wait_for(EngineDied, since=n_events)
        assert not process_exists(pid)
        app.client.close()
    until(lambda: threading.active_count() <= n_threads)
    assert holdings() == before
    assert before[0] == 0


def test_the_engine_is_apart_from_the_terminal(app: EngineApp, tiny_model: TinyModel) -> None:
    app.open(tiny_model())
    pid = pid_of(app)
    assert os.getsid(pid) == pid
    files = [str(Path(f"/proc/{pid}/fd/{fd}").readlink()) for fd in (0, 1, 2)]
    assert files[0] == "/dev/null"
    assert files[1] == files[2] and files[1].startswith("pipe:")
    os.kill(pid, signal.SIGINT)
    assert app.answer(n_predict=5).answer.n_generated == 5
    assert int(Path(f"/proc/{pid}/oom_score_adj").read_text()) >= 500


APP_THAT_IS_KILLED = """
    import sys, threading, time
    from pathlib import Path
    from tests.engine_app import HELLO, LONG_PROMPT, EngineApp, config
    from engine.messages import Text, PromptProgress
    app = EngineApp()
    if sys.argv[2] == "opening":
        app.client.open(config(Path(sys.argv[1])))
    else:
        app.open(Path(sys.argv[1]), model__batch=1)
    if sys.argv[2] == "answering":
        app.client.generate(HELLO, 1900)
        app.wait_for(Text)
    while app.client.pid is None:
        time.sleep(0.001)
    print(app.client.pid, flush=True)
    if sys.argv[3] == "end":
        sys.exit()
    if sys.argv[3] == "raise":
        raise SystemError
    time.sleep(60)
"""


@pytest.mark.parametrize("stage", ["opening", "answering", "idle"])
@pytest.mark.parametrize("end", ["kill", "end", "raise"])
def test_the_engine_does_not_outlive_the_app(tiny_model: TinyModel, stage: str, end: str) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(APP_THAT_IS_KILLED), tiny_model(), stage, end],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert child.stdout is not None
    pid = int(child.stdout.readline())
    if end == "kill":
        child.kill()
    child.wait(10)
    until(lambda: not process_exists(pid), patience_s=3)
    child.stdout.close()


def test_the_engine_ends_when_its_pipe_does(tiny_model: TinyModel) -> None:
    """Without the kernel's help, too: here the process that started it lives on."""
    reader, writer = os.pipe()
    events_reader, events_writer = os.pipe()
    fds: tuple[int, ...] = (reader, events_writer, new_memory())
    code = f"from engine.worker import main; main({', '.join(map(str, fds))}, {os.getpid()})"
    engine = subprocess.Popen([sys.executable, "-c", code], pass_fds=fds)
    for fd in fds:
        os.close(fd)
    with pytest.raises(subprocess.TimeoutExpired):
        engine.wait(0.5)
    os.close(writer)
    assert engine.wait(5) == 0
    os.close(events_reader)


def test_an_engine_that_cannot_start_is_a_death(
    app: EngineApp, tiny_model: TinyModel, monkeypatch: Any
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    app.client.open(config(tiny_model()))
    died = app.wait_for(EngineDied)
    assert died.during == "starting" and "/nowhere/python" in died.stderr[-1]
    monkeypatch.undo()
    app.open(tiny_model())


def test_what_breaks_at_start_is_shown(
    app: EngineApp, tiny_model: TinyModel, monkeypatch: Any
) -> None:
    monkeypatch.setattr(sys, "path", [])
    app.client.open(config(tiny_model()))
    died = app.wait_for(EngineDied)
    assert (died.exit_code, died.signal, died.during) == (1, None, "starting")
    assert "ModuleNotFoundError" in died.stderr[-1]
    assert "exit status 1" in died.message


def test_answers_after_many_reopenings_share_one_process(
    app: EngineApp, tiny_model: TinyModel
) -> None:
    pids = set()
    for _ in range(4):
        app.open(tiny_model())
        pids.add(pid_of(app))
        app.answer(n_predict=3)
    assert len(pids) == 1
    assert len(app.of(Finished)) == 4


def test_an_engine_given_up_before_its_start_never_starts(
    app: EngineApp, tiny_model: TinyModel
) -> None:
    app.open(tiny_model())
    os.kill(pid_of(app), signal.SIGSTOP)
    for _ in range(5):
        app.client.restart()
    before = len(app.events)
    app.wait_for(Opened)
    app.client.close()
    until(lambda: not [t for t in threading.enumerate() if t.name.startswith("tuiwork-engine")])
    assert not app.of(EngineDied, since=before)
