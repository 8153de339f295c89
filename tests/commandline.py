"""Driving the command line in tests: in this process where that is enough, else in its own."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tuiwork.cli import run_command

Tiny = Callable[..., Path]
SMALL = ("--set", "cache-mb=2", "--set", "force-cache=true", "--ctx", "512")
"""Settings that make a tiny model hit, miss and evict."""


class Outcome(NamedTuple):
    """What a command line left behind."""

    status: int
    out: str
    err: str


Cli = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the developer's own profiles and cached models out of the test."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run a command line in this process."""

    def call(*arguments: str | Path) -> Outcome:
        capsys.readouterr()
        status = run_command([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return Outcome(status, captured.out, captured.err)

    return call


def deny(monkeypatch: pytest.MonkeyPatch, denied: Path) -> None:
    """Make one file unreadable, for root too, whom the file's mode would not stop."""
    opened = Path.open

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if path == denied:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)


def command(*arguments: str | Path) -> list[str]:
    """The program and its arguments, for a process of its own."""
    return [sys.executable, "-m", "tuiwork", *map(str, arguments)]


def program(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command line in a process of its own."""
    return subprocess.run(command(*arguments), text=True, timeout=120, check=False, **options)
