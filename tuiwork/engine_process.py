"""One engine process, from its start to its end, and the threads that look after it.

It is started as a fresh interpreter and not forked, so nothing of the app is in it; in a session
of its own, so the terminal's Ctrl-C does not reach it; and with its output in a pipe, so nothing
that native code prints lands on the screen.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue

from engine.live import new_memory
from engine.messages import Close, Command, EngineDied, Event
from tuiwork.text import sanitize

_KEPT_OUTPUT_BYTES = 16 << 10
_KEPT_OUTPUT_LINES = 40
_KEPT_STACK_LINES = 12
_CRASH = "Fatal Python error"
_GRACE_S = (1.5, 0.5, 1.0)
"""How long `stop` waits after Close, after SIGTERM and after SIGKILL."""

_EXIT_PATIENCE_S = 2.0
_PREDECESSOR_PATIENCE_S = 10.0

_START = """\
import sys
sys.path[:] = {path!r}
from engine.worker import main
main({commands}, {events}, {memory}, {parent})
"""


class EngineProcess:
    """Every event goes to `on_event`, in a thread that lives as long as the process does.

    Unless `stop` or `kill` was called, the last event is EngineDied. Nothing here waits but `stop`.
    """

    def __init__(
        self,
        on_event: Callable[[EngineProcess, Event], None],
        predecessor: EngineProcess | None = None,
    ) -> None:
        self._on_event = on_event
        self._predecessor = predecessor
        self.memory_fd = new_memory()
        self._process: subprocess.Popen[bytes] | None = None
        self._commands: SimpleQueue[Command | None] = SimpleQueue()
        self._output_fd = -1
        self._output = b""
        self._stopping = False
        self._ended = False
        command_reader, command_writer = os.pipe()
        event_reader, event_writer = os.pipe()
        self._command_pipe = Connection(command_writer, readable=False)
        self._event_pipe = Connection(event_reader, writable=False)
        self._engine_fds: tuple[int, ...] = (command_reader, event_writer, self.memory_fd)
        # This very thread starts the process, because Linux kills it when the thread ends.
        self._thread = threading.Thread(target=self._look_after, name="tuiwork-engine", daemon=True)

    def start(self) -> None:
        """Start the process, once its predecessor has given its memory back."""
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """The process's id while it runs."""
        process = self._process
        return process.pid if process is not None and not self._ended else None

    @property
    def alive(self) -> bool:
        """Whether it may still take commands."""
        return not (self._ended or self._stopping)

    def send(self, command: Command) -> None:
        """Send a command; if the engine does not read, it waits in a queue and the caller not."""
        self._commands.put(command)

    def stop(self) -> None:
        """End the process: asked first, then made to. Returns within some three seconds."""
        self._stopping = True
        self.send(Close())
        for step, patience in zip((None, "terminate", "kill"), _GRACE_S, strict=True):
            process = self._process
            if step is not None and process is not None:
                getattr(process, step)()
            self._thread.join(patience)
            if not self._thread.is_alive():
                return

    def kill(self) -> None:
        """End the process at once; what it still says is not passed on."""
        self._stopping = True
        self.send(Close())
        if self._process is not None:
            self._process.kill()

    def _look_after(self) -> None:
        failure = ""
        exit_code = None
        try:
            if self._predecessor is not None:
                self._predecessor._thread.join(_PREDECESSOR_PATIENCE_S)
                self._predecessor = None
            if not self._stopping:
                self._start()
                self._relay()
        except OSError as error:
            failure = f"cannot start {sys.executable}: {error}"
        finally:
            # On any way out of here, also if `on_event` raised, nothing stays behind.
            exit_code = self._reap()
            # Before EngineDied is heard: whoever then opens a model needs another process.
            self._ended = True
        if not self._stopping:
            self._on_event(self, self._death(exit_code, failure))

    def _start(self) -> None:
        commands, events, memory = self._engine_fds
        output_reader, output_writer = os.pipe()
        self._output_fd = output_reader
        os.set_blocking(output_reader, False)
        code = _START.format(
            path=sys.path, commands=commands, events=events, memory=memory, parent=os.getpid()
        )
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=output_writer,
                stderr=output_writer,
                pass_fds=(commands, events, memory),
                start_new_session=True,
                # ggml would start a debugger in a process of many gigabytes to print its stack.
                env=os.environ | {"GGML_NO_BACKTRACE": "1"},
            )
        finally:
            os.close(output_writer)
            self._close_engine_fds()
        threading.Thread(target=self._write, name="tuiwork-engine-writer", daemon=True).start()

    def _write(self) -> None:
        for command in iter(self._commands.get, None):
            try:
                self._command_pipe.send(command)
            except OSError:
                break
        self._command_pipe.close()

    def _relay(self) -> None:
        """Pass on events and keep the end of the output, until the engine's pipe closes."""
        sources: list[Connection | int] = [self._event_pipe, self._output_fd]
        while True:
            ready = wait(sources)
            if self._output_fd in ready and self._read_output():
                sources.remove(self._output_fd)
            if self._event_pipe not in ready:
                continue
            try:
                events: list[Event] = self._event_pipe.recv()
            except (EOFError, ConnectionError):
                return
            for event in events:
                self._on_event(self, event)

    def _read_output(self) -> bool:
        """Keep the end of what was written; return whether the pipe is closed."""
        try:
            while piece := os.read(self._output_fd, _KEPT_OUTPUT_BYTES):
                self._output = (self._output + piece)[-_KEPT_OUTPUT_BYTES:]
        except BlockingIOError:
            return False
        return True

    def _reap(self) -> int | None:
        """Make sure that the process is gone; return its exit status."""
        # Ends the writer, which closes the pipe, which ends an engine that still runs.
        self._commands.put(None)
        exit_code = None
        if self._process is not None:
            try:
                exit_code = self._process.wait(_EXIT_PATIENCE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                exit_code = self._process.wait()
            self._read_output()
        self._close_engine_fds()
        if self._output_fd >= 0:
            os.close(self._output_fd)
        self._event_pipe.close()
        os.close(self.memory_fd)
        return exit_code

    def _close_engine_fds(self) -> None:
        """Close the engine's ends of the pipes, so that its end can be noticed."""
        for fd in self._engine_fds[:2]:
            os.close(fd)
        self._engine_fds = ()

    def _death(self, exit_code: int | None, failure: str) -> EngineDied:
        lines = _last_words(sanitize(self._output.decode(errors="replace")).splitlines())
        if failure:
            lines.append(failure)
        name = None
        if exit_code is not None and exit_code < 0:
            name = _signal_name(-exit_code)
        return EngineDied(exit_code if name is None else None, name, tuple(lines))


def _last_words(lines: list[str]) -> list[str]:
    """The last lines of an output; a long stack must not push out what was said before it."""
    crash = next((i for i, line in enumerate(lines) if line.startswith(_CRASH)), len(lines))
    return lines[: crash + _KEPT_STACK_LINES][-_KEPT_OUTPUT_LINES:]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
