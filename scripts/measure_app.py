"""What the app itself costs: time to the first frame, processor time, and from key to screen.

    python scripts/measure_app.py [--size 200x60] [--seconds 10]

Runs the app in a pseudo-terminal without a model (first frame), then with counters of 48×128 that
change at every tick (the rest), and prints one JSON document.
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
import termios
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FIRST_WORDS = b"no model"
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


def spawn(code: str, size: tuple[int, int]) -> tuple[int, int]:
    """Run Python code in a terminal of so many columns and lines; its process id and our end."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.environ |= {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
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


def busy_cpu_share(size: tuple[int, int], seconds: float) -> tuple[float, float]:
    """Processor seconds per second, the script's own share included, and bytes sent per second."""
    pid, terminal = spawn(_BUSY, size)
    try:
        read_until(terminal, b"Qwen3", 20)
        drain(terminal, 2.0)
        before, started = cpu_s(pid), time.perf_counter()
        n_bytes = drain(terminal, seconds)
        elapsed = time.perf_counter() - started
        return (cpu_s(pid) - before) / elapsed, n_bytes / elapsed
    finally:
        stop(pid, terminal)


def script_cpu_share() -> float:
    """The share of `busy_cpu_share` that the pretended engine takes, at ten ticks a second."""
    import subprocess

    command = [sys.executable, "-c", _SCRIPT_ONLY]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return 10 * float(done.stdout)


def key_to_screen_ms(size: tuple[int, int], n_keys: int = 60) -> list[float]:
    """From each key to its letter on the screen while everything moves, sorted."""
    pid, terminal = spawn(_BUSY, size)
    try:
        read_until(terminal, b"Qwen3", 20)
        drain(terminal, 2.0)
        took, written = [], b""
        for number in range(n_keys):
            # The composer's line is sent whole, and no panel shows words like these.
            written = (written + b"qxzjvkwyfu"[number % 10 : number % 10 + 1])[-30:]
            os.write(terminal, written[-1:])
            took.append(1000 * read_until(terminal, written[-8:], 5))
            drain(terminal, 0.037 + 0.011 * (number % 7))
        return sorted(took)
    finally:
        stop(pid, terminal)


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
    options = parser.parse_args()
    columns, _, lines = options.size.partition("x")
    size = (int(columns), int(lines))
    frames = sorted(first_frame_s(size) for _ in range(3))
    whole, bytes_per_s = busy_cpu_share(size, options.seconds)
    script = script_cpu_share()
    keys = key_to_screen_ms(size)
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
