"""The engine, as the app sees it: commands that return at once, events that come back.

The process behind it may die and be started again; what the app holds (the conversation) is never
in it. Nothing here loads llama.cpp.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from engine.config import RunConfig
from engine.errors import TuiworkError
from engine.messages import (
    Cancel,
    Clear,
    Command,
    CountTokens,
    EngineDied,
    Event,
    Failed,
    Finished,
    Generate,
    Open,
    Opened,
    OpenFailed,
    OpenProgress,
    Prompt,
    PromptProgress,
    SetLive,
    Text,
    TokenRows,
    TraceRoutes,
)

if TYPE_CHECKING:
    from engine.live import LiveView
    from tuiwork.engine_process import EngineProcess
    from tuiwork.usage import MachineMeter, MachineUse

_STAGES: dict[type, str] = {
    OpenProgress: "opening",
    Opened: "idle",
    OpenFailed: "idle",
    PromptProgress: "reading the prompt",
    Text: "answering",
    TokenRows: "answering",
}


class EngineNotRunning(TuiworkError):
    """A command for an engine that was never started, was closed, or died."""

    def __init__(self) -> None:
        super().__init__("the engine is not running; open a model to start it")


class EngineClient:
    """Commands to the engine. Use it from one thread; none of its methods waits but `close`.

    `on_event` is called in a thread of the engine's: it must hand the event on and return, and
    must not call `close` or `restart`. EngineDied ends every request that was not answered; after
    it, `open` or `restart` starts a new process.
    """

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self._on_event = on_event
        self._process: EngineProcess | None = None
        self._meter: MachineMeter | None = None
        self._requests = itertools.count(1)
        self._last_answer = 0
        self._last_open = 0
        self._stage = "idle"
        self.config: RunConfig | None = None
        """What was asked for last; `restart` opens it again."""
        self.opened: Opened | None = None
        """The open model; None while there is none."""
        self.live: LiveView | None = None
        """The counters of the open model; those of a dead engine stay as it left them."""

    @property
    def running(self) -> bool:
        """Whether there is a process that takes commands."""
        return self._process is not None and self._process.alive

    @property
    def pid(self) -> int | None:
        """The engine's process id."""
        return self._process.pid if self._process is not None else None

    @property
    def stage(self) -> str:
        """What the engine does: starting, opening, reading the prompt, answering or idle."""
        return self._stage

    def open(self, config: RunConfig) -> None:
        """Open a model in place of the one that is open, in a new process if none runs.

        What the engine was asked before is given up, and nothing more is heard of it.
        """
        self.config = config
        self.opened = self.live = None
        self._last_open = next(self._requests)
        if self.running:
            self._stage = "opening"
        else:
            self._start()
        # A process that cannot even start may be dead by now; EngineDied tells of it.
        with suppress(EngineNotRunning):
            self._send(Cancel())
            self._send(Open(config, self._last_open))

    def restart(self) -> None:
        """Open what was open, in a new process; one that still runs is killed first.

        Raises EngineNotRunning if nothing was ever opened.
        """
        if self.config is None:
            raise EngineNotRunning
        if self._process is not None:
            self._process.kill()
        self.open(self.config)

    def generate(self, prompt: Prompt, n_predict: int | None = None) -> int:
        """Answer; returns the request's number. Raises EngineNotRunning."""
        if not self.running:
            raise EngineNotRunning
        request = next(self._requests)
        self._last_answer = request
        if self._stage == "idle":
            self._stage = "reading the prompt"
        self._send(Generate(request, prompt, n_predict))
        return request

    def cancel(self) -> None:
        """Stop the running answer within a token, or an opening at its next step."""
        if self.running:
            self._send(Cancel())

    def set_live(self, changes: dict[str, Any]) -> int:
        """Change settings by dotted key; returns the request's number. Raises EngineNotRunning."""
        request = next(self._requests)
        self._send(SetLive(request, changes))
        return request

    def count_tokens(self, prompt: Prompt) -> int:
        """Ask for Tokens; returns the request's number. Raises EngineNotRunning."""
        request = next(self._requests)
        self._send(CountTokens(request, prompt))
        return request

    def trace_routes(self, path: str | None) -> int:
        """Ask for a route trace from the next token on; None: stop. Raises EngineNotRunning."""
        request = next(self._requests)
        self._send(TraceRoutes(request, path))
        return request

    def clear(self) -> None:
        """Forget the conversation in the engine. Raises EngineNotRunning."""
        self._send(Clear())

    def close(self) -> None:
        """End the process, however it is; waits some three seconds at most."""
        process, self._process = self._process, None
        self.opened = self.live = None
        self._stage = "idle"
        if process is not None:
            process.stop()

    def machine_sample(self) -> MachineUse:
        """What the app, the engine and the machine use now. Takes about a millisecond."""
        if self._meter is None:
            from tuiwork.usage import MachineMeter

            self._meter = MachineMeter()
        return self._meter.sample(self.pid)

    def _start(self) -> None:
        # Imported here: the app's first frame needs neither numpy nor sockets.
        from tuiwork.engine_process import EngineProcess

        self._stage = "starting"
        self._process = EngineProcess(self._take, self._process)
        self._process.start()

    def _send(self, command: Command) -> None:
        if self._process is None or not self._process.alive:
            raise EngineNotRunning
        self._process.send(command)

    # Called in the engine's thread.

    def _take(self, process: EngineProcess, event: Event) -> None:
        if process is not self._process:
            return  # the last words of a process that was given up
        if getattr(event, "request", self._last_open) < self._last_open:
            return  # about the model before, whose counters are gone
        if isinstance(event, EngineDied):
            event = dataclasses.replace(event, during=self._stage)
            self.opened = None
            self._stage = "idle"
        elif isinstance(event, Opened):
            from engine.live import LiveView

            self.live = LiveView(process.memory_fd, event.counters)
            self.opened = event
        elif isinstance(event, (Finished, Failed)) and event.request == self._last_answer:
            self._stage = "idle"
        self._stage = _STAGES.get(type(event), self._stage)
        self._on_event(event)
