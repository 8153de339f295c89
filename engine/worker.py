"""The engine's process: takes commands from one pipe, runs a session, reports into another.

Two threads beside those of llama.cpp: the main one owns the session and does everything in order;
the other waits for commands, so that a stop reaches a running answer and the end of the app ends
this process whatever it is doing. A third, in `engine.outbox`, sends events.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import resource
import signal
import sys
import threading
import traceback
from collections import deque
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

from engine.config import AUTO, get
from engine.errors import InputError, ReadError, TuiworkError
from engine.live import Arena
from engine.messages import (
    Cancel,
    Clear,
    Cleared,
    Close,
    Command,
    CountTokens,
    Failed,
    Finished,
    Generate,
    LiveChanged,
    LiveRefused,
    Open,
    Opened,
    OpenFailed,
    OpenProgress,
    PromptProgress,
    Resized,
    SetLive,
    Tokens,
    TraceRefused,
    TraceRoutes,
    Tracing,
)
from engine.outbox import Outbox
from engine.results import Answer

if TYPE_CHECKING:
    from engine.session import Session

_PR_SET_PDEATHSIG = 1
_OOM_SCORE = "500"
_FLUSH_PATIENCE_S = 1.0
_IDLE_LOOK_S = 1.0
"""How often an idle engine looks whether the system needs memory of its automatic cache."""

_BetweenTokens: TypeAlias = "SetLive | CountTokens | TraceRoutes"
_InOrder: TypeAlias = "Open | Generate | Clear | Close"


def main(commands_fd: int, events_fd: int, memory_fd: int, parent_pid: int) -> None:
    """Serve the app with process id `parent_pid` until it says Close or is gone."""
    _die_with(parent_pid)
    _be_the_first_to_go()
    _leave_no_core()
    faulthandler.enable(all_threads=False)
    # The app handles Ctrl-C; a stop comes as a command.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    arena = Arena(memory_fd)
    os.close(memory_fd)
    worker = Worker(Connection(commands_fd), Outbox(Connection(events_fd)), arena)
    threading.Thread(target=worker.listen, name="tuiwork-commands", daemon=True).start()
    worker.run()
    sys.stderr.flush()
    # Not a return: what native libraries do at exit has crashed before, and nothing is left to do.
    os._exit(0)


def _die_with(parent_pid: int) -> None:
    """Be killed when the thread that started us ends, even if the pipe's end goes unnoticed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            os._exit(0)


def _be_the_first_to_go() -> None:
    """Out of memory, the system shall take this process and not the app or the terminal."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)


def _leave_no_core() -> None:
    """A crash must not write gigabytes before the app hears of it.

    One byte, not zero: that is what the kernel takes as "none" for a piped core, too.
    """
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    limit = 1 if most == resource.RLIM_INFINITY else min(1, most)
    resource.setrlimit(resource.RLIMIT_CORE, (limit, most))


class OpeningStopped(TuiworkError):
    """The opening was cancelled."""


class Worker:
    """Carries out commands on one session."""

    def __init__(self, commands: Connection, outbox: Outbox, arena: Arena) -> None:
        self._commands = commands
        self._outbox = outbox
        self._arena = arena
        self._session: Session | None = None
        self._rows_thrown_away = 0
        # Cancel means everything asked for before it, so what is asked for has a number.
        self._n_asked = 0
        self._cancelled_up_to = 0
        self._in_order: SimpleQueue[tuple[int, _InOrder] | None] = SimpleQueue()
        self._between_tokens: deque[_BetweenTokens] = deque()

    # The thread that waits for commands.

    def listen(self) -> None:
        """Take commands until the app closes the pipe, which ends the process."""
        while True:
            try:
                command: Command = self._commands.recv()
            except (EOFError, OSError):
                os._exit(0)
            self._receive(command)

    def _receive(self, command: Command) -> None:
        if isinstance(command, (SetLive, CountTokens, TraceRoutes)):
            self._between_tokens.append(command)
            self._in_order.put(None)
        elif isinstance(command, Cancel):
            self._cancel_all()
        else:
            if isinstance(command, Close):
                self._cancel_all()
            self._n_asked += 1
            self._in_order.put((self._n_asked, command))

    def _cancel_all(self) -> None:
        self._cancelled_up_to = self._n_asked
        session = self._session
        if session is not None:
            session.cancel()

    # The session's thread.

    def run(self) -> None:
        """Carry out commands until Close."""
        while True:
            item = self._next()
            self._serve_between_tokens()
            if item is None:
                continue
            number, command = item
            if isinstance(command, Open):
                self._open(number, command)
            elif isinstance(command, Generate):
                self._generate(number, command)
            elif isinstance(command, Clear):
                self._clear()
            else:
                self._close_session()
                self._outbox.close(_FLUSH_PATIENCE_S)
                return

    def _next(self) -> tuple[int, _InOrder] | None:
        """What is to be done next; the session looks after itself meanwhile."""
        while True:
            session = self._session
            looks = session is not None and session.wants_looks
            try:
                return self._in_order.get(timeout=_IDLE_LOOK_S if looks else None)
            except Empty:
                if session is not None:
                    session.look()

    def _is_cancelled(self, number: int) -> bool:
        return number <= self._cancelled_up_to

    def _open(self, number: int, command: Open) -> None:
        def progress(stage: str, fraction: float) -> None:
            if self._is_cancelled(number):
                raise OpeningStopped("opening the model was stopped")
            self._outbox.progress(OpenProgress(stage, fraction, command.request))

        self._close_session()
        try:
            progress("starting the engine", 0.0)
            # Imported here: it loads llama.cpp, and by now somebody hears if it cannot be.
            from engine.session import Session

            self._session = Session.open(
                command.config, progress=progress, allocate=self._arena.allocate
            )
        except Exception as error:
            self._outbox.put(OpenFailed(_words(error), type(error).__name__, command.request))
            return
        session = self._session
        session.auto.watchers.append(self._tell_size)
        self._outbox.put(
            Opened(
                info=session.model_info,
                resolved=session.resolved,
                notes=tuple(session.notes),
                layers=session.layers,
                load_s=session.metrics.load_s,
                kv_bytes=session.kv_bytes,
                counters=self._arena.table,
                request=command.request,
            )
        )

    def _generate(self, number: int, command: Generate) -> None:
        session, request = self._session, command.request
        if session is None:
            self._outbox.put(
                Failed(request, "no model is open", "InputError", False, context_used=0)
            )
            return
        if self._is_cancelled(number):
            nothing = Answer("", "", [], 0, 0, 0, None, None, "cancelled")
            self._outbox.put(Finished(request, nothing, len(session.kept_tokens)))
            return
        rows = session.metrics.rows
        self._outbox.begin_answer(request, rows)
        try:
            answer = self._answer(session, number, command)
        except Exception as error:
            self._outbox.end_answer()
            usable = isinstance(error, (InputError, ReadError))
            used = len(session.kept_tokens)
            self._outbox.put(Failed(request, _words(error), type(error).__name__, usable, used))
        else:
            self._outbox.end_answer()
            self._outbox.put(Finished(request, answer, len(session.kept_tokens)))
        # The app has them; here they would fill memory that the cache could use.
        self._rows_thrown_away += len(rows)
        rows.clear()

    def _answer(self, session: Session, number: int, command: Generate) -> Answer:
        def between_tokens() -> None:
            # A Cancel that came while the session was not running yet was lost on it.
            if self._is_cancelled(number):
                session.cancel()
            self._serve_between_tokens()

        def on_token(_token: int) -> None:
            between_tokens()
            self._outbox.notice_rows()

        def progress(stage: str, fraction: float) -> None:
            between_tokens()
            self._outbox.progress(PromptProgress(command.request, stage, fraction))

        return session.generate(
            command.prompt,
            n_predict=command.n_predict,
            fit_answer=True,
            on_text=self._outbox.text,
            on_token=on_token,
            progress=progress,
        )

    def _serve_between_tokens(self) -> None:
        while self._between_tokens:
            command = self._between_tokens.popleft()
            if isinstance(command, SetLive):
                self._set_live(command)
            elif isinstance(command, TraceRoutes):
                self._trace_routes(command)
            else:
                self._count_tokens(command)

    def _set_live(self, command: SetLive) -> None:
        request, changes, session = command.request, command.changes, self._session
        if session is None:
            self._outbox.put(LiveRefused(request, changes, "no model is open"))
            return
        resolved, asked, notes = session.resolved, session.config, list(session.notes)
        try:
            session.set_live(changes)
        except Exception as error:
            self._outbox.put(LiveRefused(request, changes, _words(error)))
            return
        if asked.stream.cache_mb == AUTO:
            resolved = resolved.replace({"stream.cache-mb": AUTO})  # so that undo makes it so again
        before = {key: get(resolved, key) for key in changes}
        rows = self._rows_thrown_away + len(session.metrics.rows)
        self._outbox.put(LiveChanged(request, changes, before, session.resolved, rows))
        if session.notes != notes:
            self._tell_size()

    def _tell_size(self) -> None:
        session = self._session
        if session is not None:
            self._outbox.put(Resized(session.resolved, tuple(session.notes)))

    def _trace_routes(self, command: TraceRoutes) -> None:
        request, path = command.request, command.path
        if self._session is None:
            self._outbox.put(TraceRefused(request, path, "no model is open"))
            return
        try:
            self._session.trace_routes(None if path is None else Path(path).expanduser())
        except Exception as error:
            self._outbox.put(TraceRefused(request, path, _words(error)))
        else:
            self._outbox.put(Tracing(request, path))

    def _count_tokens(self, command: CountTokens) -> None:
        session, request = self._session, command.request
        try:
            if session is None:
                raise InputError("no model is open")
            count = len(session.tokenize(command.prompt))
        except Exception as error:
            used = len(session.kept_tokens) if session is not None else 0
            name = type(error).__name__
            self._outbox.put(Failed(request, _words(error), name, session is not None, used))
            return
        self._outbox.put(Tokens(request, count, session.model_info.ctx))

    def _clear(self) -> None:
        if self._session is not None:
            self._session.clear()
        self._outbox.put(Cleared())

    def _close_session(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None
        self._rows_thrown_away = 0
        self._arena.reset()


def _words(error: Exception) -> str:
    """What went wrong, for people; a fault of ours leaves its trace on stderr."""
    if isinstance(error, TuiworkError):
        return str(error)
    traceback.print_exception(error)
    return f"a fault in the engine: {type(error).__name__}: {error}"
