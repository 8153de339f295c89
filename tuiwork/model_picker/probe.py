"""The short-lived process that reads headers, as the picker sees it."""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import engine

PATIENCE_S = 30.0
"""For one file: a header on a sleeping disk or a network share takes its time."""

_STEP_S = 0.1
"""How soon cancelling is noticed."""

COMMAND = [sys.executable, "-m", "engine.model_probe"]
_PACKAGES = Path(engine.__file__).parent.parent


@dataclass(frozen=True)
class Facts:
    """What a file says of itself, or why it cannot be used. Sizes in bytes."""

    path: Path
    name: str = ""
    arch: str = ""
    size_bytes: int = 0
    n_files: int = 1
    n_layer: int = 0
    n_expert: int = 0
    n_expert_used: int = 0
    token_demand_bytes: int = 0
    problem: str = ""

    @property
    def reason(self) -> str:
        """Why it cannot be chosen; empty if it can."""
        if self.problem:
            return self.problem
        return "" if self.n_expert else "not a Mixture of Experts: there are no experts to stream"


def probe(paths: list[Path], cancelled: Callable[[], bool] = lambda: False) -> Iterator[Facts]:
    """The facts of each file, in order. A file that kills the reader is told so, the rest go on."""
    left = list(paths)
    while left and not cancelled():
        for facts in _one_process(list(left), cancelled):
            left.pop(0)
            yield facts


def _one_process(paths: list[Path], cancelled: Callable[[], bool]) -> Iterator[Facts]:
    """Answers until all are known or the process ended; its end is the last one's answer."""
    process = subprocess.Popen(
        COMMAND,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd=_PACKAGES,  # python -m looks in the current folder first, which may be anybody's
    )
    assert process.stdin is not None
    try:
        for path in paths:
            try:
                process.stdin.write(json.dumps(str(path.absolute())).encode() + b"\n")
                process.stdin.flush()
            except BrokenPipeError:
                pass  # it ended; the answer says so
            line = _answer(process, cancelled)
            if line is None:
                return
            if not line:
                yield Facts(path, problem=_death(process))
                return
            yield _facts(path, line)
    finally:
        process.kill()
        process.communicate()


def _answer(process: subprocess.Popen[bytes], cancelled: Callable[[], bool]) -> bytes | None:
    """The next line; empty if the process ended or says nothing; None if no longer wanted."""
    assert process.stdout is not None
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if cancelled():
            return None
        if select.select([process.stdout], [], [], _STEP_S)[0]:
            return process.stdout.readline()
    return b""


def _death(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(_STEP_S)
    except subprocess.TimeoutExpired:
        return f"reading its header takes longer than {PATIENCE_S:.0f} s"
    name = signal.Signals(-code).name if code < 0 else f"exit status {code}"
    return f"its header crashed the reader ({name}): the file is damaged or not what it says"


def _facts(path: Path, line: bytes) -> Facts:
    try:
        told = json.loads(line)
        if "error" in told:
            return Facts(path, problem=str(told["error"]))
        return Facts(
            path,
            str(told["name"]),
            str(told["arch"]),
            int(told["bytes"]),
            int(told["n_files"]),
            int(told["n_layer"]),
            int(told["n_expert"]),
            int(told["n_expert_used"]),
            int(told["token_demand_bytes"]),
        )
    except (ValueError, KeyError, TypeError):
        return Facts(path, problem="its header could not be understood")
