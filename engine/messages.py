"""What the app and the engine's process say to each other: the whole protocol.

Commands go to the engine, events come back, both pickled over one pair of pipes. Commands are
carried out in order, except that `Cancel` acts at once, and that `SetLive` and `CountTokens` slip
in between two tokens of a running answer. A request's number comes back in every event about it.
Nothing here loads llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from engine.config import RunConfig
from engine.results import Answer, LayerShape, ModelInfo
from engine.telemetry import TokenRow

Prompt: TypeAlias = "str | Sequence[Mapping[str, str]]"
"""A raw text to go on from, or messages (`role`, `content`) to answer."""

CounterTable: TypeAlias = "dict[str, tuple[int, tuple[int, ...]]]"
"""Where each live counter array (engine/counters.py) lies: name to (byte offset, shape)."""


# Commands: app to engine.


@dataclass(frozen=True)
class Open:
    """Open this model; one that is open is closed first. Answered by Opened or OpenFailed."""

    config: RunConfig
    request: int = 0


@dataclass(frozen=True)
class Generate:
    """Answer. PromptProgress, Text and TokenRows follow, then Finished or Failed."""

    request: int
    prompt: Prompt
    n_predict: int | None = None
    """Most tokens; None: `run.n-predict`. Shrinks to the room that the context has left."""


@dataclass(frozen=True)
class Cancel:
    """Stop every request asked for so far (and an opening at its next step).

    A cancelled answer still ends with Finished, its stop_reason `cancelled`; a cancelled opening
    ends with OpenFailed.
    """


@dataclass(frozen=True)
class SetLive:
    """Change settings by dotted key at the next token. Answered by LiveChanged or LiveRefused.

    What is refused as a whole changes nothing. run.* matters from the next answer on.
    """

    request: int
    changes: dict[str, Any]


@dataclass(frozen=True)
class CountTokens:
    """How much context a prompt would take. Answered by Tokens."""

    request: int
    prompt: Prompt


@dataclass(frozen=True)
class TraceRoutes:
    """Write every routing from the next token on to a new file (route_trace v1); None: stop.

    Answered by Tracing or TraceRefused.
    """

    request: int
    path: str | None


@dataclass(frozen=True)
class Clear:
    """Forget the conversation; the expert cache stays warm. Answered by Cleared."""


@dataclass(frozen=True)
class Close:
    """Stop what runs, free the model, end the process."""


Command: TypeAlias = (
    "Open | Generate | Cancel | SetLive | CountTokens | TraceRoutes | Clear | Close"
)


# Events: engine to app.


@dataclass(frozen=True)
class OpenProgress:
    """A person waits for a model: what is being done, and how much of it is (0 to 1)."""

    stage: str
    fraction: float
    request: int = 0


@dataclass(frozen=True)
class Opened:
    """The model is ready."""

    info: ModelInfo
    resolved: RunConfig
    """As really in use: cache size, lanes and O_DIRECT as they came out."""
    notes: tuple[str, ...]
    """What fell back and why, for people."""
    layers: tuple[LayerShape, ...]
    """In the order of the rows of the live counters; empty where nothing is streamed."""
    load_s: float
    kv_bytes: int | None
    """Memory of the context's keys and values; None: unknown."""
    counters: CounterTable
    request: int = 0


@dataclass(frozen=True)
class OpenFailed:
    """No model is open now; the process can open another."""

    message: str
    error: str
    """The class in engine/errors.py, OpeningStopped after Cancel, or another exception's name."""
    request: int = 0


@dataclass(frozen=True)
class PromptProgress:
    """How much of the prompt is read (0 to 1)."""

    request: int
    stage: str
    fraction: float


@dataclass(frozen=True)
class Text:
    """The next piece of an answer, reasoning marks included; several tokens in one."""

    request: int
    text: str


@dataclass(frozen=True)
class TokenRows:
    """Tokens measured since the last such event."""

    request: int
    rows: tuple[TokenRow, ...]


@dataclass(frozen=True)
class Finished:
    """An answer ended, by itself or cancelled; all of its text and rows have been sent."""

    request: int
    answer: Answer
    context_used: int
    """Tokens that the context holds now."""


@dataclass(frozen=True)
class Failed:
    """A request could not be carried out."""

    request: int
    message: str
    error: str
    """The class in engine/errors.py (ContextFull, ReadError, …), or another exception's name."""
    session_usable: bool
    context_used: int


@dataclass(frozen=True)
class LiveChanged:
    """Settings are in force from the next token on."""

    request: int
    changes: dict[str, Any]
    before: dict[str, Any]
    """The same keys' values until now: what undo sets."""
    resolved: RunConfig
    after_rows: int
    """Token rows measured since the model was opened, all before this change."""


@dataclass(frozen=True)
class Resized:
    """The automatic cache has another size, because the memory around it changed; or what was said
    of that is over."""

    resolved: RunConfig
    notes: tuple[str, ...]
    """What a person should know of the open model now; takes the place of Opened.notes."""


@dataclass(frozen=True)
class LiveRefused:
    """Settings stayed as they are, and why."""

    request: int
    changes: dict[str, Any]
    message: str


@dataclass(frozen=True)
class Tracing:
    """Routings are written to this file from now on; None: no longer."""

    request: int
    path: str | None


@dataclass(frozen=True)
class TraceRefused:
    """Tracing stayed as it was, and why."""

    request: int
    path: str | None
    message: str


@dataclass(frozen=True)
class Tokens:
    """The answer to CountTokens."""

    request: int
    count: int
    """Tokens of the whole prompt as the model gets it, template included."""
    ctx: int


@dataclass(frozen=True)
class Cleared:
    """The context is empty."""


@dataclass(frozen=True)
class EngineDied:
    """The process ended without being asked to. Made by the client, always its last event."""

    exit_code: int | None
    """None if a signal ended it."""
    signal: str | None
    """SIGKILL, SIGSEGV, …"""
    stderr: tuple[str, ...] = field(default=())
    """The last lines that it or native code wrote, control characters made visible."""
    during: str = "idle"
    """starting, opening, reading the prompt, answering or idle"""

    @property
    def message(self) -> str:
        """What happened, in a sentence."""
        if self.signal == "SIGKILL":
            cause = "was killed (SIGKILL), most likely by the system for lack of memory"
        elif self.signal is not None:
            cause = f"crashed ({self.signal})"
        else:
            cause = f"ended by itself (exit status {self.exit_code})"
        return f"The engine {cause} while {self.during}."


Event: TypeAlias = (
    "OpenProgress | Opened | OpenFailed | PromptProgress | Text | TokenRows | Finished | Failed"
    " | LiveChanged | LiveRefused | Resized | Tracing | TraceRefused | Tokens | Cleared"
    " | EngineDied"
)
