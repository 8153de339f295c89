"""What the app itself costs: time to the first frame, processor time, and from key to screen.

    python scripts/measure_app.py [--size 200x60] [--seconds 10] [--model MODEL --set key=value…]

Runs the app in a pseudo-terminal without a model (first frame), then with counters of 48×128 that
change at every tick (the rest), and prints one JSON document. With a model, the rest is measured
while that one answers; the processor's share is the app's alone, not the engine's.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import select
import signal
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FIRST_WORDS = b"no model"
Running = AbstractContextManager[tuple[int, int]]
_EMPTY = "from tuiwork.app import make_app; make_app(None).run()"
_BUSY = """
import sys
from engine.config import RunConfig
from tests.frozen_engine import FrozenEngine
from tuiwork.app import TuiworkApp

class Busy(TuiworkApp):
    def _frame(self):
        if self.meters.counters is not None:
            self.engine.step(drop=0.5)
            if self.meters.totals.clock % 2:
                self.engine.tokens(1, drop=0.5)
        super()._frame()

Busy(RunConfig(), client=FrozenEngine).run()
"""
_REAL = """
import sys
from tuiwork.cli import main
from tuiwork.screens.flows import remember_welcome
remember_welcome()
main({arguments!r})
"""
_PROMPT = b"tell me a long story about the sea"
_SCRIPT_ONLY = """
import time
from engine.config import RunConfig
from tests.frozen_engine import FrozenEngine
engine = FrozenEngine(lambda event: None)
engine.open(RunConfig())
started = time.process_time()
for tick in range(100):
    engine.step(drop=0.5)
    if tick % 2:
        engine.tokens(1, drop=0.5)
print((time.process_time() - started) / 100)
"""


def spawn(code: str, size: tuple[int, int], home: str = "") -> tuple[int, int]:
    """Run Python code in a terminal of so many columns and lines; its process id and our end.

    With a `home` the app keeps its state and settings there, not in the person's own folders.
    """
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.environ |= {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
        if home:
            os.environ |= {"XDG_STATE_HOME": home, "XDG_CONFIG_HOME": home}
        os.execv(sys.executable, [sys.executable, "-c", code])
    columns, lines = size
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    return pid, terminal


def read_until(terminal: int, words: bytes, seconds: float) -> float:
    """Seconds until the terminal was sent `words`; raises TimeoutError."""
    started, seen = time.perf_counter(), b""
    while time.perf_counter() - started < seconds:
        if select.select([terminal], [], [], 0.01)[0]:
            seen = (seen + os.read(terminal, 1 << 16))[-(1 << 17) :]
            if words in seen:
                return time.perf_counter() - started
    raise TimeoutError(f"nothing like {words!r} in {seconds} s")


def stop(pid: int, terminal: int) -> None:
    """End the app that `spawn` started."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(terminal)


def first_frame_s(size: tuple[int, int]) -> float:
    """From starting Python to the status line on the screen, no model."""
    pid, terminal = spawn(_EMPTY, size)
    try:
        return read_until(terminal, FIRST_WORDS, 20)
    finally:
        stop(pid, terminal)


@contextmanager
def pretended(size: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """The app with an engine that a script plays."""
    pid, terminal = spawn(_BUSY, size)
    try:
        read_until(terminal, b"Qwen3", 20)
        drain(terminal, 2.0)
        yield pid, terminal
    finally:
        stop(pid, terminal)


@contextmanager
def answering(arguments: list[str], size: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """The app in the middle of a real model's answer."""
    with tempfile.TemporaryDirectory() as home:
        pid, terminal = spawn(_REAL.format(arguments=arguments), size, home)
        try:
            read_until(terminal, b"keys+values", 60)
            drain(terminal, 1.0)
            os.write(terminal, _PROMPT + b"\r")
            read_until(terminal, b"answering", 120)
            drain(terminal, 2.0)
            yield pid, terminal
        finally:
            stop(pid, terminal)


def cpu_share(app: Running, seconds: float) -> tuple[float, float]:
    """Processor seconds per second, the script's own share included, and bytes sent per second."""
    with app as (pid, terminal):
        before, started = cpu_s(pid), time.perf_counter()
        n_bytes = drain(terminal, seconds)
        elapsed = time.perf_counter() - started
        return (cpu_s(pid) - before) / elapsed, n_bytes / elapsed


def script_cpu_share() -> float:
    """The share of `cpu_share` that the pretended engine takes, at ten ticks a second."""
    import subprocess

    command = [sys.executable, "-c", _SCRIPT_ONLY]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return 10 * float(done.stdout)


def key_to_screen_ms(app: Running, n_keys: int = 60) -> list[float]:
    """From each key to its letter on the screen while everything moves, sorted."""
    with app as (_, terminal):
        took, written = [], b""
        for number in range(n_keys):
            # The composer's line is sent whole, and no panel shows words like these.
            written = (written + b"qxzjvkwyfu"[number % 10 : number % 10 + 1])[-30:]
            os.write(terminal, written[-1:])
            took.append(1000 * read_until(terminal, written[-8:], 5))
            drain(terminal, 0.037 + 0.011 * (number % 7))
        return sorted(took)


def drain(terminal: int, seconds: float) -> int:
    """Take what the app sends, as a terminal does."""
    started, n_bytes = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        if select.select([terminal], [], [], 0.05)[0]:
            n_bytes += len(os.read(terminal, 1 << 16))
    return n_bytes


def cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", default="200x60")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--model", default="", help="a model to answer; default: a script")
    parser.add_argument("--set", action="append", default=[], help="a setting, with --model")
    options = parser.parse_args()
    columns, _, lines = options.size.partition("x")
    size = (int(columns), int(lines))
    frames = sorted(first_frame_s(size) for _ in range(3))
    arguments = [options.model, *(word for value in options.set for word in ("--set", value))]

    def app() -> Running:
        return answering(arguments, size) if options.model else pretended(size)

    whole, bytes_per_s = cpu_share(app(), options.seconds)
    script = 0.0 if options.model else script_cpu_share()
    keys = key_to_screen_ms(app())
    print(
        json.dumps(
            {
                "size": options.size,
                "first_frame_s": round(frames[1], 3),
                "cpu_share_of_a_core": round(whole - script, 4),
                "pretended_engine_share": round(script, 4),
                "bytes_per_s": round(bytes_per_s),
                "key_to_screen_ms_p50": round(keys[len(keys) // 2], 1),
                "key_to_screen_ms_p95": round(keys[int(len(keys) * 0.95)], 1),
            }
        )
    )


if __name__ == "__main__":
    main()
