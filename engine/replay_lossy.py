"""What the lossy settings would save and cost on a traced run, miss by miss.

Owns the decode rows as arrays and the static figures, which take the misses as they were recorded
and leave each one out by itself; `engine.replay_dynamic` simulates what leaving it out does to the
cache. Prefill does not take part.

Saved I/O is in percent of the bytes of all misses, lost mass in percent of the weights of all
routings, both without renormalising. A cold expert is weak, and so a candidate, if the routing
gave it less than `frac` of a uniform share: of the routing's own total weight divided by its
top-k. The routing's strongest expert never is one. Where weights sum to 1, as in the field's
published figures, this is `frac / n_expert_used`; these are reproduced to the printed digit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.replay_cache import row_keys
from engine.trace_table import IntArray
from engine.traces import MISS, RouteTrace

BoolArray = npt.NDArray[np.bool_]

FRACTIONS = (0.25, 0.5, 0.75, 1.0)
"""Fractions of a uniform share at which the curves are given."""


@dataclass(frozen=True)
class Saving:
    """What a lossy setting saves of the reads and costs of the routing; None: cannot be told."""

    io_saved_pct: float | None
    mass_lost_pct: float | None


@dataclass(frozen=True)
class DropPoint(Saving):
    """Dropping at a fraction, static."""

    frac: float


@dataclass(frozen=True)
class TopKPoint(Saving):
    """Fewer experts per token, static: the `k` strongest of each routing."""

    k: int


def weights_missing(trace: RouteTrace) -> str | None:
    """Why the trace cannot tell what a routing's experts weigh; None if it can."""
    if trace.weight is None:
        return "the trace has no column 'weight'"
    unknown = np.flatnonzero(np.isnan(trace.weight) & trace.decode)
    if len(unknown) == 0:
        return None
    return (
        f"{len(unknown)} decoded rows do not show their weight (nan), "
        f"the first in line {trace.line(int(unknown[0]))}"
    )


class DecodeRows:
    """The decode rows of a trace as arrays, grouped into routings."""

    def __init__(self, trace: RouteTrace) -> None:
        rows = trace.decode
        layers = trace.layer[rows]
        self.key = row_keys(trace)[rows]
        self.slot = trace.slot[rows]
        self.bytes = _layer_bytes(trace)[layers]
        self.weight = trace.weight[rows] if trace.weight is not None else None
        if weights_missing(trace):
            self.weight = None
        self.miss = trace.residency[rows] == MISS if trace.residency is not None else None
        self.tokens = len(np.unique(np.stack([trace.turn[rows], trace.step[rows]]), axis=1).T)
        self._routing = np.cumsum(self.slot == 0) - 1

    def weak(self, frac: float) -> BoolArray | None:
        """Rows that dropping at `frac` leaves out when they are cold; None: weights unknown."""
        if self.weight is None:
            return None
        total = np.bincount(self._routing, self.weight)
        top_k = np.bincount(self._routing)
        share = total / np.maximum(top_k, 1)
        weak: BoolArray = self.weight < frac * share[self._routing]
        weak[self._strongest()] = False
        return weak

    def _strongest(self) -> IntArray:
        """The row of each routing's largest weight, the lowest slot among equals."""
        assert self.weight is not None
        order = np.lexsort((self.slot, -self.weight, self._routing))
        return order[self.slot == 0] if len(order) else order

    def saving(self, left_out: BoolArray | None, miss: BoolArray | None) -> Saving:
        """What leaving out these rows saves of the bytes of `miss`, and costs."""
        if left_out is None:
            return Saving(None, None)
        saved = None
        if miss is not None:
            saved = percent(self.bytes[left_out & miss].sum(), self.bytes[miss].sum())
        return Saving(saved, self.mass(left_out))

    def mass(self, rows: BoolArray) -> float | None:
        """The weight of these rows in percent of all."""
        if self.weight is None:
            return None
        return percent(self.weight[rows].sum(), self.weight.sum())


def drop_curve(rows: DecodeRows, fractions: Sequence[float] = FRACTIONS) -> list[DropPoint]:
    """Static dropping, with the recorded residency."""
    points = []
    for frac in fractions:
        weak = rows.weak(frac)
        cold = None if weak is None or rows.miss is None else weak & rows.miss
        saving = rows.saving(cold, rows.miss)
        points.append(DropPoint(saving.io_saved_pct, saving.mass_lost_pct, frac))
    return points


def topk_curve(rows: DecodeRows) -> list[TopKPoint]:
    """Static fewer experts, with the recorded residency: hits are given up as well as misses."""
    points = []
    for k in fewer(rows):
        saving = rows.saving(rows.slot >= k, rows.miss)
        points.append(TopKPoint(saving.io_saved_pct, saving.mass_lost_pct, k))
    return points


def fewer(rows: DecodeRows) -> list[int]:
    """The numbers of experts per token below the trace's own, the largest first."""
    top_k = int(rows.slot.max()) + 1 if len(rows.slot) else 1
    return list(range(top_k - 1, 0, -1))


def percent(part: float, whole: float) -> float | None:
    """`part` in percent of `whole`; None where there is nothing to divide by."""
    return 100 * float(part) / float(whole) if whole else None


def _layer_bytes(trace: RouteTrace) -> IntArray:
    sizes = np.zeros(trace.model.n_layer, dtype=np.int64)
    for layer, size in trace.model.expert_bytes.items():
        sizes[layer] = size
    return sizes
