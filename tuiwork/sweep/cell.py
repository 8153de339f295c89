"""One cell: cool-down, the machine's state, and one `tuiwork run` as a clean process.

Knows no sweep folder, so that it runs here or on another machine alike: settings go in as text,
files come out as bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import InputError
from engine.machine_state import CoolDown, MachineState, wait_until_cool
from engine.metrics_reader import read_metrics
from tuiwork.sweep.store import ANSWER, RECORD, RESOLVED, TOKENS

_START = """\
import sys
sys.path[:] = {path!r}
from tuiwork.sweep.child import main
main({parent})
"""

_POLL_S = 0.2
_PATIENCE_S = 20.0
"""How long an interrupted run may take to end: it stops within a token, or a step of opening."""

_KEPT_WORDS = 600


@dataclass(frozen=True)
class Order:
    """What to run."""

    id: str
    profile: str
    """The profile's text, with every setting in it."""
    prompt: str
    cool_down: CoolDown
    at_once: int = 1
    """Cells that run side by side, for the record."""


@dataclass(frozen=True)
class Outcome:
    """What came of it: files, or why there are none."""

    id: str
    files: dict[str, bytes]
    failure: str = ""
    seconds: float = 0.0
    """How long it took, cool-down included."""
    tok_s: float | None = None
    """Generated tokens per second, as the run tells them."""
    stopped: bool = False
    record_failed: bool = False
    """Whether what failed is the writing of the figures, as it would for every other cell."""


class Stop:
    """Asks a cell to end: first kindly, then not."""

    def __init__(self) -> None:
        self.presses = 0
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pressed(self) -> bool:
        """Whether to end."""
        return self.presses > 0

    def press(self) -> None:
        """End; the second time, at once."""
        self.presses += 1
        self._pass_on()

    @contextlib.contextmanager
    def passed_to(self, child: subprocess.Popen[bytes]) -> Any:
        """Let `press` reach this process."""
        self._child = child
        try:
            if self.pressed:
                self._pass_on()
            yield
        finally:
            self._child = None

    def _pass_on(self) -> None:
        if self._child is not None and self._child.returncode is None:
            self._child.send_signal(signal.SIGINT if self.presses == 1 else signal.SIGKILL)


def execute(
    order: Order,
    folder: Path,
    *,
    stop: Stop | None = None,
    keep_fds: Sequence[int] = (),
    waiting: Callable[[str], None] = lambda _words: None,
) -> Outcome:
    """Run a cell, its files in the empty `folder`. Raises OSError if that cannot take them.

    `keep_fds` stay open in the run. `waiting` is told, again and again, what is waited for.
    """
    stop = stop or Stop()
    waited = wait_until_cool(order.cool_down, stopped=lambda: stop.pressed, waiting=waiting)
    if stop.pressed:
        return Outcome(order.id, {}, stopped=True)
    entry = MachineState.now()
    started, clock = time.time(), time.perf_counter()
    profile, tokens = folder / "profile.toml", folder / TOKENS
    profile.write_text(order.profile, encoding="utf-8")
    status, out, err = _run(profile, order.prompt, tokens, stop, keep_fds, waiting)
    seconds = time.perf_counter() - clock
    if stop.pressed:
        return Outcome(order.id, {}, stopped=True)
    if status != 0:
        words = _last_words(err)
        # Every other cell would fail for this, too.
        return Outcome(
            order.id,
            {},
            _ending(status, words),
            record_failed="writing the metrics failed" in words,
        )
    record: dict[str, Any] = {
        "cell": order.id,
        "started": started,
        "seconds": seconds,
        "host": platform.node(),
        "at_once": order.at_once,
        "entry": dataclasses.asdict(entry),
        "cool_down": dataclasses.asdict(waited) if order.cool_down.conditions else None,
    }
    return _collected(order, out, tokens, record)


def _run(
    profile: Path,
    prompt: str,
    tokens: Path,
    stop: Stop,
    keep_fds: Sequence[int],
    waiting: Callable[[str], None],
) -> tuple[int, bytes, bytes]:
    """The exit status and output of one `tuiwork run`."""
    code = _START.format(path=sys.path, parent=os.getpid())
    arguments = ["run", "-p", "-", "--profile", str(profile), "--csv", str(tokens), "--json"]
    with (
        subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=keep_fds,
            # The terminal's Ctrl-C reaches the sweep alone, which passes it on.
            start_new_session=True,
        ) as child,
        stop.passed_to(child),
    ):
        until = float("inf")
        data: bytes | None = prompt.encode()
        while True:
            try:
                out, err = child.communicate(data, timeout=_POLL_S)
                return child.returncode, out, err
            except subprocess.TimeoutExpired:
                data = None
            waiting("")
            if stop.pressed and until == float("inf"):
                until = time.monotonic() + _PATIENCE_S
            if time.monotonic() > until:
                child.kill()


def _collected(order: Order, out: bytes, tokens: Path, record: dict[str, Any]) -> Outcome:
    """The files of a run that ended well; a failure if they do not say what they should."""
    import tomlkit

    try:
        read_metrics(tokens)
        answer = json.loads(out)
        resolved = tomlkit.dumps(answer["config"])
        record["resolved"] = answer["config"]
        record["stop_reason"] = answer["stop_reason"]
    except (InputError, ValueError, KeyError, TypeError) as error:
        return Outcome(order.id, {}, f"the run's figures cannot be used: {error}")
    return Outcome(
        order.id,
        {
            TOKENS: tokens.read_bytes(),
            ANSWER: out,
            RESOLVED: resolved.encode(),
            RECORD: (json.dumps(record, indent=1) + "\n").encode(),
        },
        seconds=total_seconds(record),
        tok_s=answer.get("tok_s"),
    )


def total_seconds(record: dict[str, Any]) -> float:
    """How long a recorded cell took, cool-down included."""
    waited = record.get("cool_down") or {}
    return float(record.get("seconds", 0.0)) + float(waited.get("seconds", 0.0))


def _last_words(err: bytes) -> str:
    lines = [line.strip() for line in err.decode("utf-8", "replace").splitlines() if line.strip()]
    own = [line for line in lines if line.startswith("tuiwork: ")]
    return (own or lines or ["it said nothing"])[-1].removeprefix("tuiwork: ")[-_KEPT_WORDS:]


def _ending(status: int, words: str) -> str:
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        hint = " (out of memory, most likely)" if -status == signal.SIGKILL else ""
        return f"the run was killed by {name}{hint}: {words}"
    return f"the run ended with status {status}: {words}"
