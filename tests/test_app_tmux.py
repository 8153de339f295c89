"""The command in a real terminal, end to end: start, chat, tune, save a profile, quit.

Its own tmux server, home and state folders, so that nobody's session or conversations are touched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import TinyModel

PATIENCE_S = 30.0

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")


class Terminal:
    """A tmux session of 120 by 40."""

    def __init__(self, home: Path) -> None:
        self._socket = home / "tmux"
        self._home = home

    def start(self, *command: str) -> None:
        """Run a command in it; the terminal stays when the command ends."""
        names = ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME")
        folders = {name: str(self._home / name.lower()) for name in names}
        environment = os.environ | folders | {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
        environment.pop("TMUX", None)
        words = ["new-session", "-d", "-x", "120", "-y", "40", *command]
        self._tmux("-f", "/dev/null", *words, ";", "set", "remain-on-exit", "on",
                   environment=environment)  # fmt: skip

    def type(self, *keys: str) -> None:
        """Press keys by tmux's names."""
        self._tmux("send-keys", *keys)

    def screen(self) -> str:
        """What stands there."""
        return self._tmux("capture-pane", "-p")

    def pid(self) -> int:
        """The command's process id."""
        return int(self._tmux("display-message", "-p", "#{pane_pid}"))

    def ended(self) -> bool:
        """Whether the command is over."""
        return self._tmux("display-message", "-p", "#{pane_dead}").strip() == "1"

    def wait_for(self, there: str | Callable[[], bool]) -> str:
        """The screen once it shows some words, or once something is so."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            text = self.screen()
            if there() if callable(there) else there in text:
                return text
            time.sleep(0.1)
        raise AssertionError(f"{there!r} never came:\n{self.screen()}")

    def close(self) -> None:
        """End the server and all in it."""
        subprocess.run(["tmux", "-S", str(self._socket), "kill-server"], capture_output=True)

    def _tmux(self, *words: str, environment: dict[str, str] | None = None) -> str:
        done = subprocess.run(
            ["tmux", "-S", str(self._socket), *words],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
            env=environment,
        )
        return done.stdout


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path)
    yield terminal
    terminal.close()


def children(pid: int) -> set[int]:
    """Processes below `pid`, at any depth."""
    found: set[int] = set()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            found |= {child} | children(child)
    return found


def test_start_chat_tune_save_and_quit(
    terminal: Terminal, tiny_model: TinyModel, tmp_path: Path
) -> None:
    model = tiny_model("tiny")
    settings = (
        "stream.cache-mb=1", "stream.force-cache=true", "model.threads=1", "run.n-predict=120",
    )  # fmt: skip
    sets = [word for setting in settings for word in ("--set", setting)]
    terminal.start(sys.executable, "-m", "tuiwork", str(model), *sets)
    assert "LOSSY" in terminal.wait_for("Welcome to tuiwork")
    terminal.type("Enter")
    terminal.wait_for("LOSSY drop 0.75")
    terminal.wait_for("experts in memory")
    terminal.type("-l", "hello there")
    terminal.type("Enter")
    terminal.wait_for("120 tokens")
    terminal.type("F5")
    terminal.wait_for("LOSSY drop 0.70")
    terminal.type("-l", "and again")
    terminal.type("Enter")
    terminal.wait_for("separated")
    terminal.wait_for("drop 0.75 → 0.70")
    terminal.type("M-p")
    terminal.wait_for("compares with")
    terminal.type("s")
    terminal.wait_for("profile's name")
    terminal.type("Enter")
    terminal.wait_for("Saved as")
    saved = tmp_path / "xdg_config_home" / "tuiwork" / "profiles" / "mine.toml"
    assert "drop-cold-experts = 0.7" in saved.read_text()
    terminal.type("Escape")
    engines = children(terminal.pid())
    assert engines
    terminal.type("C-q")
    terminal.wait_for(terminal.ended)
    terminal.wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in engines))


def test_without_a_screen_it_is_the_plain_chat(tiny_model: TinyModel, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tuiwork", str(tiny_model("tiny")), "-n", "8", "--ctx", "512",
               "--set", "stream.cache-mb=1", "--set", "stream.force-cache=true"]  # fmt: skip
    done = subprocess.run(
        command, input="hi", capture_output=True, text=True, timeout=60, check=True
    )
    assert "8 tokens" in done.stderr
    assert "\x1b" not in done.stdout


def test_a_message_typed_at_once_is_answered(terminal: Terminal, tiny_model: TinyModel) -> None:
    sets = ("stream.cache-mb=1", "stream.force-cache=true", "model.threads=1", "run.n-predict=9")
    words = [word for setting in sets for word in ("--set", setting)]
    terminal.start(sys.executable, "-m", "tuiwork", str(tiny_model("tiny")), *words)
    terminal.wait_for("Welcome to tuiwork")
    terminal.type("Enter")
    terminal.wait_for("Write a message")
    terminal.wait_for(lambda: "Welcome" not in terminal.screen())
    terminal.type("-l", "hello there", ";", "send-keys", "Enter")
    terminal.wait_for("9 tokens")
    assert "hello there" in terminal.screen()
