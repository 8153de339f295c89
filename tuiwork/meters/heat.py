"""The residency heatmap by value: which code each cell of a grid of layers by experts shows.

A cell is one expert where the screen is wide enough, else a bin of neighbours: as bright as its
experts on average, and marked if any of them is being read or was just left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.counters import ABSENT, READING
from tuiwork.meters.counters import Counts

Codes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]

LEVELS = 12
"""Steps of the ramp: 1 faint, LEVELS strongest. 0 is nothing there."""
NOTHING, READ_NOW, DISCARDED = 0, LEVELS + 1, LEVELS + 2
N_CODES = LEVELS + 3

_FORGOTTEN_AFTER = 256
"""Tokens after which an unused expert is as faint as a resident one gets."""
_WIDEST_CELL, _HIGHEST_CELL = 4, 2


class Mode(Enum):
    """What the brightness of a cell tells."""

    RECENCY = "how recently used"
    FREQUENCY = "how often used"
    POPULARITY = "popularity"

    @property
    def shows_residency(self) -> bool:
        """Whether absent experts stay dark."""
        return self is not Mode.POPULARITY

    def next(self) -> Mode:
        """The mode after this one, in a circle."""
        modes = list(Mode)
        return modes[(modes.index(self) + 1) % len(modes)]


@dataclass(frozen=True)
class Grid:
    """How layers and experts lie on the screen."""

    n_layer: int
    n_expert: int
    layers_per_row: int
    experts_per_cell: int
    cell_width: int
    """Columns of one cell; more than 1 only where there is room to spare."""
    cell_height: int
    """Lines of one row; more than 1 only where there is room to spare."""
    halves: bool
    """Whether each line of the screen holds two rows, one in each half of its characters."""

    @classmethod
    def fit(cls, n_layer: int, n_expert: int, width: int, height: int, *, halves: bool) -> Grid:
        """The finest grid of `width` columns and `height` lines; `halves` if they can be had."""
        width, height = max(1, width), max(1, height)
        needs_halves = halves and n_layer > height
        rows = 2 * height if needs_halves else height
        return cls(
            n_layer,
            n_expert,
            _divided(n_layer, rows),
            _divided(n_expert, width),
            max(1, min(_WIDEST_CELL, width // max(n_expert, 1))),
            1 if needs_halves else max(1, min(_HIGHEST_CELL, height // max(n_layer, 1))),
            needs_halves,
        )

    @property
    def n_rows(self) -> int:
        """Rows of cells."""
        return _divided(self.n_layer, self.layers_per_row)

    @property
    def n_lines(self) -> int:
        """Lines of the screen."""
        return _divided(self.n_rows, 2) if self.halves else self.n_rows * self.cell_height

    @property
    def n_columns(self) -> int:
        """Cells of one row."""
        return _divided(self.n_expert, self.experts_per_cell)

    @property
    def width(self) -> int:
        """Columns of the screen."""
        return self.n_columns * self.cell_width

    def cell(self, layer: int, expert: int) -> tuple[int, int]:
        """The row and column of cells in which an expert lies."""
        return layer // self.layers_per_row, expert // self.experts_per_cell

    def at(self, x: int, y: int) -> tuple[int, int] | None:
        """The first (layer, expert) of the cell at a place of the screen; upper half first."""
        row = y * 2 if self.halves else y // self.cell_height
        column = x // self.cell_width
        layer, expert = row * self.layers_per_row, column * self.experts_per_cell
        inside = 0 <= x and 0 <= y and layer < self.n_layer and expert < self.n_expert
        return (layer, expert) if inside else None

    def layers_of_line(self, line: int) -> tuple[int, int]:
        """The first and the last layer on a line of the screen."""
        per_line = self.layers_per_row * (2 if self.halves else 1)
        first = line // self.cell_height * per_line
        return first, min(first + per_line, self.n_layer) - 1


def _divided(n: int, by: int) -> int:
    return max(1, -(-n // by))


def strengths(
    mode: Mode,
    state: Counts,
    hits: Counts,
    misses: Counts,
    last_used: Counts,
    clock: int,
) -> Floats:
    """How bright each (layer, expert) is, from 0 for nothing to 1."""
    if mode is Mode.RECENCY:
        # The clock is published after a token, `last_used` while it is computed.
        age = np.maximum(clock - last_used, 0)
        bright = 1 - np.log2(1 + age) / np.log2(1 + _FORGOTTEN_AFTER)
        bright = np.clip(bright, 1 / LEVELS, 1)
    else:
        uses = (hits + misses).astype(np.float64)
        most = uses.max(initial=0)
        bright = np.log1p(uses) / np.log1p(most) if most else np.zeros_like(uses)
        if mode is Mode.POPULARITY:
            return bright
        bright = np.maximum(bright, 1 / LEVELS)
    return np.where(state == ABSENT, 0.0, bright)


def codes(
    grid: Grid,
    bright: Floats,
    state: Counts,
    last_discarded: Counts,
    clock: int,
) -> Codes:
    """What each cell of `grid` shows: rows of cells by columns of cells."""
    mean = _binned(grid, bright, np.add) / _binned(grid, np.ones_like(bright), np.add)
    shown: Codes = np.ceil(mean * LEVELS - 1e-9).astype(np.uint8)
    # "Just" is the token at work or the last finished one: which of them, the clock cannot tell.
    discarded = (last_discarded > 0) & (last_discarded >= clock)
    shown[_binned(grid, discarded, np.logical_or)] = DISCARDED
    shown[_binned(grid, state == READING, np.logical_or)] = READ_NOW
    return shown


def _binned(grid: Grid, values: npt.NDArray[Any], join: np.ufunc) -> npt.NDArray[Any]:
    if grid.experts_per_cell > 1:
        values = join.reduceat(values, np.arange(0, grid.n_expert, grid.experts_per_cell), axis=1)
    if grid.layers_per_row > 1:
        values = join.reduceat(values, np.arange(0, grid.n_layer, grid.layers_per_row), axis=0)
    return values


def pairs(grid: Grid, shown: Codes, base: int) -> npt.NDArray[np.uint16]:
    """Upper and lower code of each place, as `upper * base + lower`: lines by columns.

    Without halves a line has one row, and both codes are its.
    """
    factor = np.uint16(base)
    if not grid.halves:
        both = shown.astype(np.uint16) * (factor + np.uint16(1))
        return np.repeat(both, grid.cell_height, axis=0)
    padded = np.zeros((2 * grid.n_lines, grid.n_columns), np.uint16)
    padded[: len(shown)] = shown
    return np.asarray(padded[0::2] * factor + padded[1::2])


@dataclass(frozen=True)
class ExpertDetail:
    """What is known about one expert."""

    layer: int
    """The block's number in the model."""
    expert: int
    state: int
    hits: int
    misses: int
    entry_bytes: int
    tokens_ago: int | None
    """Since it was last routed to; None: never."""
    routing_share: float
    """Of its layer's routings so far; NaN before the first."""
    just_discarded: bool
