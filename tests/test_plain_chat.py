"""The chat in the plain terminal, driven through a terminal; and without one."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Tiny = Callable[..., Path]
CTRL_C, CTRL_D = "\x03", "\x04"


class Terminal:
    """A tuiwork process on a terminal of its own."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tuiwork", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(slave)
        self.screen = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, pattern: str, seconds: float = 60) -> None:
        """Read until the screen shows `pattern` in what came since the last wait."""
        seen, deadline = "", time.monotonic() + seconds
        while not re.search(pattern, seen):
            assert time.monotonic() < deadline, f"no {pattern!r} in {seen!r}"
            seen += self._read(0.2)
        self.screen += seen

    def shows(self, text: str, seconds: float) -> bool:
        """Read until `text` is on the screen; whether it came in time."""
        deadline = time.monotonic() + seconds
        while text not in self.screen and time.monotonic() < deadline:
            self.screen += self._read(0.05)
        return text in self.screen

    def wait_for_end(self) -> int:
        deadline = time.monotonic() + 60
        while self.process.poll() is None and time.monotonic() < deadline:
            self.screen += self._read(0.1)
        return self.process.wait(timeout=1)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)

    def _read(self, seconds: float) -> str:
        if not select.select([self._master], [], [], seconds)[0]:
            return ""
        try:
            return os.read(self._master, 1 << 16).decode(errors="replace")
        except OSError:  # the other end is gone
            return ""


def _take_terminal() -> None:
    # The terminal must be the session's own, or Ctrl-C would reach nobody.
    os.close(os.open(os.ttyname(0), os.O_RDWR))
    # What a shell runs in the background is deaf to Ctrl-C, and so is all that it starts.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {
        **os.environ,
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "TERM": "dumb",
    }


@pytest.fixture
def chat(tiny_model: Tiny, environment: dict[str, str]) -> Iterator[Terminal]:
    terminal = Terminal(
        [str(tiny_model()), "--ctx", "4096", "--set", "ignore-eos=true", "-n", "24"], environment
    )
    terminal.wait_for("> $")
    yield terminal
    terminal.close()


def test_a_conversation(chat: Terminal) -> None:
    chat.type("hello\n")
    chat.wait_for(r"24 tokens.*tok/s.*\n> $")
    chat.type("and on\n")
    chat.wait_for(r"reused.*\n> $")
    chat.type("/new\n")
    chat.wait_for(r"new conversation.*\n> $")
    chat.type("/what\n")
    chat.wait_for(r"no command /what[\s\S]*/quit[\s\S]*> $")
    chat.type("/quit\n")
    assert chat.wait_for_end() == 0
    assert "Traceback" not in chat.screen


def test_ctrl_d_leaves(chat: Terminal) -> None:
    chat.type(CTRL_D)
    assert chat.wait_for_end() == 0


def test_ctrl_c_at_the_prompt_stays(chat: Terminal) -> None:
    # Readline can miss a signal in the moment before it waits; nobody presses a key that fast.
    for _ in range(20):
        chat.type(CTRL_C)
        if chat.shows("Ctrl-D leaves", seconds=1):
            break
    chat.type("/quit\n")
    assert chat.wait_for_end() == 0
    assert "Ctrl-D leaves" in chat.screen


def test_ctrl_c_stops_the_answer_and_not_the_chat(
    tiny_model: Tiny, environment: dict[str, str]
) -> None:
    endless = ["--ctx", "8192", "--set", "ignore-eos=true", "-n", "8000"]
    terminal = Terminal([str(tiny_model()), *endless], environment)
    try:
        terminal.wait_for("> $")
        terminal.type("hello\n")
        terminal.wait_for(r"\w+ \w+ \w+ \w+ \w+")
        terminal.type(CTRL_C)
        terminal.wait_for(r"tokens.*stopped.*\n> $")
        terminal.type("/quit\n")
        assert terminal.wait_for_end() == 0
        assert "Traceback" not in terminal.screen
    finally:
        terminal.close()


def test_a_full_context_ends_the_answer_and_not_the_chat(
    tiny_model: Tiny, environment: dict[str, str]
) -> None:
    terminal = Terminal([str(tiny_model()), "--ctx", "256"], environment)
    try:
        terminal.wait_for("> $")
        terminal.type("word " * 400 + "\n")
        terminal.wait_for(r"context holds[\s\S]*> $")
        terminal.type("/quit\n")
        assert terminal.wait_for_end() == 0
    finally:
        terminal.close()


class TestWithoutTerminal:
    """One prompt is answered, the figures are printed, the status is 0."""

    def run(self, environment: dict[str, str], **options: object) -> tuple[str, str]:
        done = subprocess.run(
            [sys.executable, "-m", "tuiwork"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env=environment,
            **options,  # type: ignore[call-overload]
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
        assert "tok/s" in done.stderr
        return done.stdout, done.stderr

    def test_nothing_on_standard_input(self, environment: dict[str, str]) -> None:
        _, notes = self.run(environment, stdin=subprocess.DEVNULL)
        assert "capital of France" in notes

    def test_a_piped_prompt(self, environment: dict[str, str]) -> None:
        _, notes = self.run(environment, input="why is the sky blue")
        assert "sky blue" in notes

    def test_a_pipe_that_nobody_writes_to(self, environment: dict[str, str]) -> None:
        reader, writer = os.pipe()
        try:
            _, notes = self.run(environment, stdin=reader)
            assert "capital of France" in notes
        finally:
            os.close(reader)
            os.close(writer)
