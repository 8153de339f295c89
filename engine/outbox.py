"""Events on their way from the engine to the app, gathered so that a token costs nothing.

The session's thread only appends to lists. A thread of its own sends what has gathered, some
thirty times a second at most, and is the only one that waits when the app does not read.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection

from engine.messages import Event, OpenProgress, PromptProgress, Text, TokenRows
from engine.telemetry import TokenRow

INTERVAL_S = 1 / 30


class Outbox:
    """Collects events of one process and sends them in order, as lists."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._pieces: list[str] = []
        self._request = 0
        self._rows: Sequence[TokenRow] = ()
        self._rows_sent = 0
        self._something = threading.Event()
        self._hurry = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tuiwork-outbox", daemon=True)
        self._thread.start()

    def put(self, event: Event) -> None:
        """Send an event soon, behind everything said so far."""
        with self._lock:
            self._settle()
            self._events.append(event)
        self._hurry.set()
        self._something.set()

    def progress(self, event: OpenProgress | PromptProgress) -> None:
        """Send progress, unless more progress of the same stage overtakes it."""
        with self._lock:
            self._settle()
            last = self._events[-1] if self._events else None
            if isinstance(last, (OpenProgress, PromptProgress)) and last.stage == event.stage:
                self._events.pop()
            self._events.append(event)
        self._something.set()

    def begin_answer(self, request: int, rows: Sequence[TokenRow]) -> None:
        """From now on, text is that of `request` and what is appended to `rows` is sent."""
        with self._lock:
            self._settle()
            self._request, self._rows, self._rows_sent = request, rows, len(rows)

    def text(self, piece: str) -> None:
        """Send a piece of the answer."""
        with self._lock:
            self._pieces.append(piece)
        self._something.set()

    def notice_rows(self) -> None:
        """There may be new rows."""
        self._something.set()

    def end_answer(self) -> None:
        """Nothing more of this answer comes; its rows may be thrown away."""
        with self._lock:
            self._settle()
            self._rows, self._rows_sent = (), 0

    def close(self, patience_s: float) -> None:
        """Send what is left, if the app takes it within `patience_s`."""
        with self._lock:
            self._closed = True
        self._hurry.set()
        self._something.set()
        self._thread.join(patience_s)

    def _settle(self) -> None:
        """Make events of gathered text and rows. The lock is held."""
        if self._pieces:
            self._events.append(Text(self._request, "".join(self._pieces)))
            self._pieces = []
        if len(self._rows) > self._rows_sent:
            rows = tuple(self._rows[self._rows_sent :])
            self._rows_sent += len(rows)
            self._events.append(TokenRows(self._request, rows))

    def _run(self) -> None:
        while True:
            self._something.wait()
            self._something.clear()
            self._hurry.clear()
            with self._lock:
                self._settle()
                events, self._events = self._events, []
                last = self._closed
            if events:
                try:
                    self._connection.send(events)
                except OSError:
                    # The app is gone; the thread that waits for commands ends the process.
                    return
            if last:
                return
            self._hurry.wait(INTERVAL_S)
