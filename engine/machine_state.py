"""How the machine is at a moment, for runs that shall be comparable. Unmeasured is None."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields

import psutil

from engine.errors import InputError
from engine.machine import memory

MIB = 1 << 20

_CPU_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu-thermal", "soc_thermal")
"""psutil's names for processors' sensors; without one of them the hottest of all counts."""

_POLL_S = 1.0


@dataclass(frozen=True)
class MachineState:
    """The machine's state at a moment."""

    available_mib: float | None
    """Memory that may still be allocated, limits of containers respected."""
    cpu_mhz: float | None
    temperature_c: float | None
    """The hottest of the processor's sensors."""
    load: float | None
    """Processes that ran or waited, averaged over the last minute."""

    @classmethod
    def now(cls) -> MachineState:
        """Ask the system."""
        return cls(_available_mib(), _cpu_mhz(), _temperature_c(), _load())


@dataclass(frozen=True)
class CoolDown:
    """What to wait for before a run; None: not that. All of it at once."""

    max_temperature_c: float | None = None
    max_load: float | None = None
    min_available_mib: float | None = None
    give_up_s: float = 300.0
    """Wait at most so long, then go on all the same."""

    @property
    def conditions(self) -> tuple[str, ...]:
        """The names of the conditions that are set."""
        names = (f.name for f in fields(self) if f.name != "give_up_s")
        return tuple(name for name in names if getattr(self, name) is not None)

    def unmet(self, state: MachineState) -> list[str]:
        """The conditions that do not hold, in words; an unmeasured figure fulfils none."""
        found = []
        for value, limit, most, what, unit in (
            (state.temperature_c, self.max_temperature_c, True, "temperature", " °C"),
            (state.load, self.max_load, True, "load", ""),
            (state.available_mib, self.min_available_mib, False, "available memory", " MiB"),
        ):
            if limit is None:
                continue
            if value is None:
                found.append(f"{what} is not measured here")
            elif (value > limit) if most else (value < limit):
                sign = ">" if most else "<"
                found.append(f"{what} {value:.4g}{unit} {sign} {limit:g}{unit}")
        return found

    def require_measured(self, state: MachineState | None = None) -> None:
        """Raise InputError for a condition that can never hold here."""
        unmet = self.unmet(state or MachineState.now()) if self.conditions else []
        hopeless = [words for words in unmet if "not measured" in words]
        if hopeless:
            raise InputError(f"cool-down: {hopeless[0]}, so it cannot be waited for; leave it out")


@dataclass(frozen=True)
class Waited:
    """How a cool-down went."""

    seconds: float
    gave_up: bool
    unmet: tuple[str, ...]
    """What still did not hold at its end."""


def wait_until_cool(
    cool_down: CoolDown,
    *,
    stopped: Callable[[], bool] = lambda: False,
    waiting: Callable[[str], None] = lambda _words: None,
    now: Callable[[], MachineState] = MachineState.now,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Waited:
    """Wait until every condition holds, `stopped` says so, or the patience is over.

    `waiting` is told, again and again, what is waited for.
    """
    started = clock()
    while True:
        unmet = tuple(cool_down.unmet(now()))
        seconds = clock() - started
        # What is not measured will not become so.
        hopeless = any("not measured" in words for words in unmet)
        if not unmet or stopped():
            return Waited(seconds, False, unmet)
        if hopeless or seconds >= cool_down.give_up_s:
            return Waited(seconds, True, unmet)
        waiting("; ".join(unmet))
        sleep(min(_POLL_S, max(0.0, cool_down.give_up_s - seconds)))


def _available_mib() -> float | None:
    try:
        return memory().available_bytes / MIB
    except (OSError, ValueError, psutil.Error):
        return None


def _cpu_mhz() -> float | None:
    try:
        frequency = psutil.cpu_freq()
    except (OSError, AttributeError, NotImplementedError, ValueError, RuntimeError):
        return None
    current = float(frequency.current) if frequency is not None else 0.0
    return current if current > 0 else None


def _temperature_c() -> float | None:
    try:
        sensors = psutil.sensors_temperatures()
    except (OSError, AttributeError, NotImplementedError, ValueError, RuntimeError):
        return None
    chosen = [name for name in sensors if name in _CPU_SENSORS] or list(sensors)
    readings = [float(sensor.current) for name in chosen for sensor in sensors[name]]
    return max(readings, default=None)


def _load() -> float | None:
    try:
        return float(psutil.getloadavg()[0])
    except (OSError, AttributeError):
        return None
