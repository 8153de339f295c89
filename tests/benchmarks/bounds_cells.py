"""The cells of `bounds`: which paths, under which limits, measured in interleaved rounds."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from engine.config import RunConfig
from tests.benchmarks.bench import (
    SERIAL_READS,
    WARM_UP,
    Attempt,
    Bench,
    fio_mib_s,
    read_block_bytes,
    token_ms,
)

LANES = RunConfig().stream.io_threads
MAPPED, SERIAL, LOSSLESS, LOSSY = "memory-mapped", "serial", "best lossless", "best lossy"
FEWEST_FOR_RATE = WARM_UP + 9
"""From fewer tokens no rate is given: 8 intervals behind the warm-up."""
CELL_TIMEOUT_S = 300.0
RESIDENT_TOKENS = 32
HEADROOM_MIB = 1800
"""What a limit must leave beside the cache: `auto` leaves as much under 8 000 MiB."""

PATHS = {
    MAPPED: ["stream.enabled=false"],
    SERIAL: SERIAL_READS,
    # What `tuiwork tune` would try and a short run cannot find out by itself.
    LOSSLESS: ["stream.prefetch=on", "stream.io-threads=3"],
    LOSSY: ["routing.drop-cold-experts=0.75"],
}
"""The settings of each path, beside the cache's size; the last two are the defaults otherwise."""
OURS = (SERIAL, LOSSLESS, LOSSY)


@dataclass(frozen=True)
class Plan:
    """What is measured, and how long it may take."""

    limits_mib: Sequence[int]
    rounds: int
    mapped_timeout_s: float
    fio_s: int
    budget_s: float
    """No round begins that would end after this."""


@dataclass
class LimitRound:
    """One round under one limit."""

    limit_mib: int
    fio_mib_s: float
    cells: dict[str, Attempt] = field(default_factory=dict)
    """By path. Memory-mapped llama.cpp is absent where it got nowhere in an earlier round."""
    failures: dict[str, str] = field(default_factory=dict)
    """Why a path's cell failed by itself, by path."""

    @property
    def cache_mib(self) -> int:
        """The cache that the limit leaves room for."""
        return self.limit_mib - HEADROOM_MIB


@dataclass(frozen=True)
class Resident:
    """The model wholly in memory."""

    token_ms: float
    """The median token."""
    major_faults: int
    """While the tokens were measured; more than a few, and it was not wholly in memory."""


@dataclass
class Round:
    """Everything once."""

    resident: Resident
    limits: list[LimitRound] = field(default_factory=list)
    took_s: float = 0.0
    not_repeated_s: float = 0.0
    """Of it, cells that are not tried again."""


def measure(bench: Bench, plan: Plan) -> list[Round]:
    """Measure rounds until there are enough or the time is over. At least one."""
    began = time.monotonic()
    block = read_block_bytes(bench.model)
    hopeless: set[int] = set()
    rounds: list[Round] = []
    while len(rounds) < plan.rounds:
        if rounds:
            needed = rounds[-1].took_s - rounds[-1].not_repeated_s
            if time.monotonic() - began + needed > plan.budget_s:
                break
        rounds.append(_round(bench, plan, block, hopeless, len(rounds) + 1))
    return rounds


def _round(bench: Bench, plan: Plan, block: int, hopeless: set[int], number: int) -> Round:
    """Every cell once; every second round in the opposite order."""
    began = time.monotonic()
    order = 1 if number % 2 else -1
    say(f"round {number}: resident")
    done = Round(resident(bench))
    for limit in list(plan.limits_mib)[::order]:
        say(f"round {number}: {limit} MiB: fio")
        part = LimitRound(limit, fio_mib_s(bench.model, block, LANES, plan.fio_s))
        for path in list(PATHS)[::order]:
            if path == MAPPED and limit in hopeless:
                continue
            say(f"round {number}: {limit} MiB: {path}")
            before = time.monotonic()
            _run(bench, plan, part, path)
            if path == MAPPED and not has_rate(part.cells.get(MAPPED)):
                hopeless.add(limit)
                done.not_repeated_s += time.monotonic() - before
        done.limits.append(part)
    done.limits.sort(key=lambda part: part.limit_mib)
    done.took_s = time.monotonic() - began
    return done


def _run(bench: Bench, plan: Plan, part: LimitRound, path: str) -> None:
    settings, timeout_s = PATHS[path], plan.mapped_timeout_s
    if path != MAPPED:
        settings, timeout_s = [f"stream.cache-mb={part.cache_mib}", *settings], CELL_TIMEOUT_S
    try:
        part.cells[path] = bench.attempt(settings, part.limit_mib, timeout_s)
    except RuntimeError as error:
        # One path that fails, of too little memory for instance, leaves the others' figures.
        part.failures[path] = str(error).strip().splitlines()[-1]


def resident(bench: Bench) -> Resident:
    """What computing a token takes with the whole model in memory and every page in place."""
    short = replace(bench, tokens=min(bench.tokens, RESIDENT_TOKENS))
    cell = short.attempt(PATHS[MAPPED], timeout_s=CELL_TIMEOUT_S, answered_before=True).cell
    if cell is None:
        raise RuntimeError(f"the resident model was not done after {CELL_TIMEOUT_S:.0f} s")
    faults = sum(cell["majflt"][WARM_UP:])
    # Computing takes every token alike: the median leaves out what disturbed some of them.
    return Resident(float(np.median(token_ms(cell))), int(faults))


def has_rate(attempt: Attempt | None) -> bool:
    """Whether so many tokens came that a rate can be given."""
    return attempt is not None and len(attempt.token_s) >= FEWEST_FOR_RATE


def say(text: str) -> None:
    """Tell who waits, beside the results."""
    print(text, file=sys.stderr, flush=True)


def interval_ms(attempt: Attempt) -> np.ndarray:
    """Milliseconds from token to token, of an unfinished run too."""
    return 1000 * np.diff(np.array(attempt.token_s))
