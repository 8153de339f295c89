"""Run a command in a memory control group of its own, from a cold page cache. Needs root."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")


def drop_page_cache() -> None:
    """Write back and forget every cached file page."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


@contextmanager
def memory_group(limit_mib: int | None) -> Iterator[Path | None]:
    """A control group that limits memory, page cache included; None: no limit."""
    if limit_mib is None:
        yield None
        return
    v1 = _V1.is_dir()
    group = (_V1 if v1 else _V2) / f"tuiwork-benchmark-{os.getpid()}"
    group.mkdir()
    try:
        name = "memory.limit_in_bytes" if v1 else "memory.max"
        (group / name).write_text(str(limit_mib << 20))
        yield group
    finally:
        for _ in range(50):
            with suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


def start(command: Sequence[str], group: Path | None) -> subprocess.Popen[str]:
    """Start a command in a group, its output piped."""

    def join() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=join
    )


@dataclass(frozen=True)
class Finished:
    """How a limited command ended."""

    out: str | None
    """What it printed; None: it was not done in time and was ended."""
    err: str
    """Its standard error, as far as it came."""
    ended: float
    """When, on the monotonic clock, which is the same for every process of the machine."""


def run_limited(command: Sequence[str], limit_mib: int | None, timeout_s: float) -> Finished:
    """Run from a cold cache. Raises RuntimeError if it fails by itself."""
    drop_page_cache()
    with memory_group(limit_mib) as group:
        process = start(command, group)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            ended = time.monotonic()
            process.kill()
            # What it wrote before is kept and comes with this.
            return Finished(None, process.communicate()[1], ended)
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: exit status {process.returncode}\n{err}")
    return Finished(out, err, time.monotonic())
