"""The tokens so far: where each one's time went, and how fast they come."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from engine.telemetry import TokenRow

Floats = npt.NDArray[np.float64]

PARTS = ("compute", "reads", "cache", "overhead")
"""What a token's time is made of, from the bottom of its bar to the top."""

KEPT = 8192
_NOW_TOKENS, _NOW_MS = 32, 2000.0
"""`now` is over the latest two seconds, and over 32 tokens where they come faster than that."""


def parts_ms(row: TokenRow) -> tuple[float, float, float, float]:
    """A token's milliseconds by `PARTS`; what was not measured counts as none."""
    return (
        max(row.compute_ms, 0.0),
        max(row.stall_ms, 0.0),
        max(row.mgmt_ms, 0.0),
        max(row.loop_overhead_ms, 0.0),
    )


def token_ms(row: TokenRow) -> float:
    """A token's whole time, from the end of the one before."""
    return row.wall_ms + max(row.loop_overhead_ms, 0.0)


@dataclass(frozen=True)
class Speeds:
    """Tokens per second; NaN where there is nothing to tell."""

    now: float
    turn: float
    without_reads: float
    """If every expert were resident: the rate of compute and overhead alone."""


class TokenHistory:
    """The latest rows, counted from the opening of the model."""

    def __init__(self) -> None:
        self._rows: deque[TokenRow] = deque(maxlen=KEPT)
        self.n_rows = 0
        """Rows since the model was opened, those no longer kept included."""
        self._speeds: tuple[int, Speeds] | None = None

    def extend(self, rows: Iterable[TokenRow]) -> None:
        """Add newly measured tokens."""
        for row in rows:
            self._rows.append(row)
            self.n_rows += 1

    def forget(self) -> None:
        """Begin anew, as for another model."""
        self._rows.clear()
        self.n_rows = 0
        self._speeds = None

    def latest(self, n: int) -> list[TokenRow]:
        """The newest `n` rows, oldest first."""
        skipped = max(0, len(self._rows) - n)
        return list(islice(self._rows, skipped, None))

    def between(self, start: int, end: int | None = None, *, most: int) -> list[TokenRow]:
        """Rows numbered `start` up to `end`, as far as they are kept; the latest `most` of them."""
        first = self.n_rows - len(self._rows)
        end = self.n_rows if end is None else end
        start = max(start, first, end - most)
        return list(islice(self._rows, start - first, max(end - first, 0)))

    @property
    def last(self) -> TokenRow | None:
        """The newest row."""
        return self._rows[-1] if self._rows else None

    def speeds(self) -> Speeds:
        """How fast tokens come now, over this turn, and would come without reads."""
        if self._speeds is None or self._speeds[0] != self.n_rows:
            self._speeds = self.n_rows, self._speeds_now()
        return self._speeds[1]

    def _speeds_now(self) -> Speeds:
        last = self.last
        if last is None:
            return Speeds(float("nan"), float("nan"), float("nan"))
        turn = [row for row in self.latest(1024) if row.turn == last.turn]
        floor = [row.compute_ms + max(row.loop_overhead_ms, 0.0) for row in turn]
        median = float(np.median(floor))
        return Speeds(
            _tok_s(_recent(turn)), _tok_s(turn), 1000 / median if median > 0 else float("nan")
        )


def _recent(rows: Sequence[TokenRow]) -> Sequence[TokenRow]:
    elapsed = 0.0
    for count, row in enumerate(reversed(rows), start=1):
        elapsed += token_ms(row)
        if elapsed >= _NOW_MS or count == _NOW_TOKENS:
            return rows[-count:]
    return rows


def _tok_s(rows: Sequence[TokenRow]) -> float:
    total = sum(map(token_ms, rows))
    return 1000 * len(rows) / total if total > 0 else float("nan")


def stacked(rows: Sequence[TokenRow], height: int, top_ms: float) -> npt.NDArray[np.int8]:
    """Which part fills each place: `height` by tokens, top line first; -1 is nothing, else PARTS.

    Boundaries between parts are rounded, not the parts, so that a bar's height is its whole time.
    """
    if not rows:
        return np.full((height, 0), -1, np.int8)
    parts = np.array([parts_ms(row) for row in rows])
    ends = np.cumsum(parts, axis=1) / top_ms * height
    bounds = np.minimum(np.rint(ends), height).astype(int)
    # A token always shows, however short it was: by its biggest part.
    for token in np.flatnonzero(bounds[:, -1] == 0):
        bounds[token, parts[token].argmax() :] = 1
    levels = np.arange(height)[::-1, None]
    filled = np.full((height, len(rows)), -1, np.int8)
    for part in reversed(range(len(PARTS))):
        filled[levels < bounds[None, :, part]] = part
    return filled


def shares(rows: Sequence[TokenRow]) -> Floats:
    """Each part's share of the time of `rows`; NaN without rows."""
    if not rows:
        return np.full(len(PARTS), np.nan)
    totals = np.array([parts_ms(row) for row in rows]).sum(axis=0)
    whole = totals.sum()
    return np.asarray(totals / whole if whole > 0 else np.full(len(PARTS), np.nan))
