"""Run a command in a memory control group of its own, from a cold page cache. Needs root."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
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


def run_limited(
    command: Sequence[str], limit_mib: int | None, timeout_s: float
) -> tuple[str | None, str]:
    """Run from a cold cache; (stdout, stderr), stdout None if it was not done in time."""
    drop_page_cache()
    with memory_group(limit_mib) as group:

        def join() -> None:
            if group is not None:
                (group / "cgroup.procs").write_text(str(os.getpid()))

        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=join
        )
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return None, f"not done after {timeout_s:.0f} s"
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{err}")
    return out, err
