"""What a process and the machine use now, from the kernel. Bytes; None is unknown, never zero."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import psutil

_MAJOR_FAULTS, _USER_TICKS, _SYSTEM_TICKS = 9, 11, 12
"""Places in /proc/<pid>/stat, counted behind the command's closing bracket."""


@dataclass(frozen=True)
class ProcessUse:
    """One process. `anon` counts shared memory too: nothing else has it open."""

    pid: int
    rss: int | None = None
    anon: int | None = None
    file: int | None = None
    swap: int | None = None
    cpu_percent: float | None = None
    """Of one core, since the sample before; None in the first."""
    major_faults: int | None = None


@dataclass(frozen=True)
class MachineUse:
    """The app, the engine (None while it does not run), and what the system has."""

    app: ProcessUse
    engine: ProcessUse | None
    memory_total: int | None
    memory_available: int | None
    swap_used: int | None
    swap_total: int | None


class ProcessMeter:
    """Samples one process; remembers what it takes to tell the processor's share."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._before: tuple[float, float] | None = None

    def sample(self) -> ProcessUse:
        """What the process uses now."""
        folder = Path("/proc") / str(self.pid)
        sizes = _status_bytes(folder / "status")
        stat = _stat_fields(folder / "stat")
        if not sizes:
            return _portable(self.pid)
        anon, shared = sizes.get("RssAnon"), sizes.get("RssShmem", 0)
        return ProcessUse(
            self.pid,
            rss=sizes.get("VmRSS"),
            anon=anon + shared if anon is not None else None,
            file=sizes.get("RssFile"),
            swap=sizes.get("VmSwap"),
            cpu_percent=self._cpu_percent(stat),
            major_faults=stat[_MAJOR_FAULTS] if stat else None,
        )

    def _cpu_percent(self, stat: list[int]) -> float | None:
        if not stat:
            return None
        spent = (stat[_USER_TICKS] + stat[_SYSTEM_TICKS]) / os.sysconf("SC_CLK_TCK")
        now = monotonic()
        before, self._before = self._before, (now, spent)
        if before is None or now <= before[0]:
            return None
        return 100 * (spent - before[1]) / (now - before[0])


class MachineMeter:
    """Samples this process, the engine's, and the machine."""

    def __init__(self) -> None:
        self._app = ProcessMeter(os.getpid())
        self._engine: ProcessMeter | None = None

    def sample(self, engine_pid: int | None) -> MachineUse:
        """What is used now."""
        if engine_pid is None:
            self._engine = None
        elif self._engine is None or self._engine.pid != engine_pid:
            self._engine = ProcessMeter(engine_pid)
        memory, swap = psutil.virtual_memory(), psutil.swap_memory()
        return MachineUse(
            self._app.sample(),
            self._engine.sample() if self._engine is not None else None,
            int(memory.total),
            int(memory.available),
            int(swap.used),
            int(swap.total),
        )


def _status_bytes(path: Path) -> dict[str, int]:
    sizes = {}
    for line in _text(path).splitlines():
        name, _, rest = line.partition(":")
        if rest.endswith(" kB"):
            sizes[name] = int(rest[:-3]) * 1024
    return sizes


def _stat_fields(path: Path) -> list[int]:
    # The command's name comes second, in brackets, and may hold spaces and brackets itself.
    after_name = _text(path).rpartition(")")[2].split()
    return [int(field) if field.lstrip("-").isdigit() else 0 for field in after_name]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _portable(pid: int) -> ProcessUse:
    """What can be told without /proc."""
    try:
        return ProcessUse(pid, rss=int(psutil.Process(pid).memory_info().rss))
    except psutil.Error:
        return ProcessUse(pid)
