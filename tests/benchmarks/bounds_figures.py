"""What `bounds` makes of its cells: figures per token, the bounds on them, and ratios. Pure.

A bound is what a token takes at least if reading and computing overlap wholly: the longer of the
time that the disk needs for its bytes and the time that computing it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from tests.benchmarks.bench import (
    MEASURED,
    WARM_UP,
    Attempt,
    Cell,
    hit_pct,
    read_mib,
    read_rate,
    token_ms,
)
from tests.benchmarks.bounds_cells import (
    LOSSLESS,
    MAPPED,
    OURS,
    SERIAL,
    LimitRound,
    Round,
    has_rate,
    interval_ms,
)


@dataclass(frozen=True)
class TokenFigures:
    """The mean token of a cell behind the warm-up. `wall_ms` is the sum of the three after it."""

    tok_s: float
    wall_ms: float
    wait_ms: float
    """The callback waited for reads."""
    bookkeeping_ms: float
    rest_ms: float
    """Computing, and what lies between tokens."""
    read_mib: float
    hit_pct: float
    dropped_pct: float
    """Of the routed experts."""


def token_figures(cell: Cell, part: slice = MEASURED) -> TokenFigures:
    """The mean token of a streamed cell."""
    wall = float(token_ms(cell, part).mean())
    wait = float(np.mean(cell["stall_ms"][part]))
    bookkeeping = float(np.mean(cell["mgmt_ms"][part]))
    routed = sum(cell["routed"][part])
    return TokenFigures(
        tok_s=1000 / wall,
        wall_ms=wall,
        wait_ms=wait,
        bookkeeping_ms=bookkeeping,
        rest_ms=wall - wait - bookkeeping,
        read_mib=read_mib(cell, part),
        hit_pct=hit_pct(cell, part),
        dropped_pct=100 * sum(cell["dropped"][part]) / max(1, routed),
    )


def bound_ms(read_mib_per_token: float, mib_s: float, resident_ms: float) -> float:
    """What a token takes at least."""
    return max(1000 * read_mib_per_token / mib_s, resident_ms)


@dataclass(frozen=True)
class MappedFigures:
    """What memory-mapped llama.cpp got done, or at least what it did not."""

    tok_s: float | None
    """Behind the warm-up; None: too few tokens came."""
    tokens: int
    lasted_s: float
    done: bool


def mapped_figures(attempt: Attempt) -> MappedFigures:
    """Its rate, where enough tokens came."""
    rate = 1000 / float(interval_ms(attempt)[MEASURED].mean()) if has_rate(attempt) else None
    return MappedFigures(rate, len(attempt.token_s), attempt.lasted_s, attempt.cell is not None)


def against_mapped(mapped: Attempt, ours: Attempt) -> float | None:
    """How many times as fast over the tokens that both have; None: too few came."""
    if not has_rate(mapped):
        return None
    both = slice(WARM_UP, min(len(mapped.token_s), len(ours.token_s)) - 1)
    return float(interval_ms(mapped)[both].mean() / interval_ms(ours)[both].mean())


@dataclass(frozen=True)
class AtLeast:
    """A bound on a ratio that could not be measured."""

    times: float
    over: str
    """What is compared, in words."""


def at_least_against_mapped(mapped: Attempt, ours: Attempt) -> AtLeast:
    """More than how many times as fast, from what memory-mapped llama.cpp did not do in its time.

    Like is compared with like: its n-th token never came, and when did ours?
    """
    came = len(mapped.token_s)
    if came == 0:
        return AtLeast(mapped.lasted_s / ours.token_s[0], "from the start to the first token")
    came = min(came, len(ours.token_s) - 1)
    theirs_s = mapped.lasted_s - mapped.token_s[0]
    ours_s = ours.token_s[came] - ours.token_s[0]
    which = "the token after the first" if came == 1 else f"the {came} tokens after the first"
    return AtLeast(theirs_s / ours_s, f"over {which}")


@dataclass(frozen=True)
class PathRound:
    """One path in one round under one limit."""

    tokens: TokenFigures
    bound_ms: float
    """At fio's rate."""
    own_bound_ms: float | None
    """At the best rate of our own reads in the round; None where fio's was higher."""
    times_mapped: float | None
    times_serial: float | None

    @property
    def bound_pct(self) -> float:
        """How much of the rate that the bound allows was reached."""
        return 100 * self.bound_ms / self.tokens.wall_ms

    @property
    def own_bound_pct(self) -> float | None:
        """The same of the bound at our own read rate."""
        if self.own_bound_ms is None:
            return None
        return 100 * self.own_bound_ms / self.tokens.wall_ms


def own_read_mib_s(done: Round) -> float:
    """The best rate at which a serial cell of the round read; 0: none read anything.

    Only of serial cells: where reads go on while a layer computes, the time that is waited is not
    the time that they take.
    """
    cells = [part.cells[SERIAL].cell for part in done.limits if SERIAL in part.cells]
    return max((read_rate(cell) for cell in cells if cell and read_mib(cell) > 0), default=0.0)


def least_resident_ms(rounds: Sequence[Round]) -> float:
    """The shortest that computing took: a disturbed round must not make the bounds too easy."""
    return min(done.resident.token_ms for done in rounds)


def path_round(done: Round, part: LimitRound, path: str, resident_ms: float) -> PathRound | None:
    """Figures of one of our paths; None where it has none."""
    attempt = part.cells.get(path)
    if attempt is None or attempt.cell is None:
        return None
    figures = token_figures(attempt.cell)
    own = own_read_mib_s(done)
    serial, mapped = part.cells.get(SERIAL), part.cells.get(MAPPED)
    return PathRound(
        figures,
        bound_ms(figures.read_mib, part.fio_mib_s, resident_ms),
        bound_ms(figures.read_mib, own, resident_ms) if own > part.fio_mib_s else None,
        against_mapped(mapped, attempt) if mapped is not None else None,
        figures.tok_s / token_figures(serial.cell).tok_s if serial and serial.cell else None,
    )


def middle(values: Sequence[float | None]) -> float | None:
    """The median of what was measured."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


class LimitSummary:
    """All rounds under one limit."""

    def __init__(self, limit_mib: int, rounds: Sequence[Round]) -> None:
        self.limit_mib = limit_mib
        self.rounds = rounds
        self.parts = [
            next(part for part in done.limits if part.limit_mib == limit_mib) for done in rounds
        ]
        self.cache_mib = self.parts[0].cache_mib
        self.fio_mib_s = median(part.fio_mib_s for part in self.parts)
        self.paths = {path: self._path(path) for path in OURS}
        self.mapped = [
            mapped_figures(part.cells[MAPPED]) for part in self.parts if MAPPED in part.cells
        ]
        self.failures = [
            f"{path}: {why}" for part in self.parts for path, why in part.failures.items()
        ]

    def _path(self, path: str) -> list[PathRound]:
        resident_ms = least_resident_ms(self.rounds)
        found = [
            path_round(done, part, path, resident_ms)
            for done, part in zip(self.rounds, self.parts, strict=True)
        ]
        return [one for one in found if one is not None]

    @property
    def mapped_tok_s(self) -> float | None:
        """Memory-mapped llama.cpp's rate, if it has one."""
        return middle([one.tok_s for one in self.mapped])

    def at_least(self, path: str) -> AtLeast | None:
        """The bound on a path's ratio to memory-mapped llama.cpp, where that has no rate."""
        first = self.parts[0].cells
        ours = first.get(path)
        if MAPPED not in first or has_rate(first[MAPPED]) or ours is None or not ours.token_s:
            return None
        return at_least_against_mapped(first[MAPPED], ours)

    def same_as_serial(self) -> bool:
        """Whether the best lossless path resolved to the serial path's settings."""
        cells = [self.parts[0].cells.get(path) for path in (SERIAL, LOSSLESS)]
        settings = [one.cell["resolved"] if one and one.cell else None for one in cells]
        return settings[0] is not None and settings[0] == settings[1]

    def document(self) -> dict[str, Any]:
        """Everything, for `--json`."""
        return {
            "limit_mib": self.limit_mib,
            "cache_mib": self.cache_mib,
            "fio_mib_s": [part.fio_mib_s for part in self.parts],
            "mapped": [asdict(one) for one in self.mapped],
            "failures": self.failures,
            "best_lossless_is_serial": self.same_as_serial(),
            "paths": {path: self._path_document(path) for path in OURS},
        }

    def _path_document(self, path: str) -> dict[str, Any]:
        at_least = self.at_least(path)

        def pick(figure: Callable[[PathRound], float | None]) -> float | None:
            return middle([figure(one) for one in self.paths[path]])

        return {
            "rounds": [
                {
                    **asdict(one),
                    "bound_pct": one.bound_pct,
                    "own_bound_pct": one.own_bound_pct,
                }
                for one in self.paths[path]
            ],
            "median": {
                "tok_s": pick(lambda one: one.tokens.tok_s),
                "bound_pct": pick(lambda one: one.bound_pct),
                "own_bound_pct": pick(lambda one: one.own_bound_pct),
                "times_mapped": pick(lambda one: one.times_mapped),
                "times_serial": pick(lambda one: one.times_serial),
            },
            "times_mapped_more_than": asdict(at_least) if at_least else None,
        }
