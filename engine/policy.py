"""Which routed experts to keep: the lossy decisions, by value.

Pure numpy. Arrays are tokens by slots; a routing's share is its weight over the routing's total.
A resident expert costs no read, so leaving it out would buy nothing: only experts that are not in
memory ("cold") and that the router gave little ("weak") are ever left out or replaced.

Decoding asks for one token at a time, once per layer, and a handful of numbers costs an array more
than it costs a list. `weak_slots` and `drop_slots` are the array functions for one token, to the
last bit: numbers come as lists of float32 values, and what the arrays would round is rounded.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]

TOP_K_THAT_WARNS = 4
"""With so few experts the uniform share is large, and a weak expert is not so weak."""


@dataclass(frozen=True)
class ColdRule:
    """What may be left out: cold experts below `frac` of the uniform share."""

    frac: float
    substitute: bool = False
    renormalise: bool = True
    in_prefill: bool = False

    def threshold(self, top_k: int) -> float:
        """The share below which a cold expert is weak: `frac / top_k`."""
        return self.frac / top_k


def shares(weights: Floats) -> Floats:
    """Each slot's part of its routing's total weight; a routing without weight has none."""
    total = weights.sum(axis=1, keepdims=True)
    parts: Floats = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    return parts


def weak_and_cold(weights: Floats, resident: Mask, threshold: float) -> Mask:
    """Slots that may go: below the threshold, absent, and not the routing's strongest."""
    weak = (shares(weights) < threshold) & ~resident
    strongest = weights.argmax(axis=1)
    weak[np.arange(len(weights)), strongest] = False
    return weak


def spare_shared_reads(ids: Ids, candidates: Mask) -> Mask:
    """Candidates whose expert no other token of the batch keeps: only these save a read."""
    kept = ids[~candidates]
    return candidates & ~np.isin(ids, kept)


def drop(ids: Ids, weights: Floats, dropped: Mask, *, renormalise: bool) -> None:
    """Leave slots out, in place: weight exactly zero, id that of the routing's strongest.

    The strongest is resident or being read, so no unloaded memory is touched. With `renormalise`
    the survivors keep the routing's total weight.
    """
    if not dropped.any():
        return
    before = weights.sum(axis=1, keepdims=True)
    rows = np.arange(len(ids))
    strongest = ids[rows, weights.argmax(axis=1)][:, None]
    weights[dropped] = 0.0
    ids[...] = np.where(dropped, strongest, ids)
    if renormalise:
        after = weights.sum(axis=1, keepdims=True)
        weights *= np.divide(before, after, out=np.ones_like(after), where=after != 0)


def weak_slots(
    ids: Sequence[int], weights: Sequence[float], resident: Sequence[bool], threshold: float
) -> tuple[list[int], float] | None:
    """One token's slots that may go, and what share of its routing they have together.

    What `weak_and_cold` and `spare_shared_reads` say together, where the routing's total is an
    ordinary positive number. None where it is not: ask those.
    """
    if all(resident):
        return [], 0.0
    total = _total(weights)
    if not 0.0 < total < math.inf:
        return None
    (limit,) = _float32([threshold])
    parts = _float32([weight / total for weight in weights])
    strongest = weights.index(max(weights))
    weak = [
        slot
        for slot, part in enumerate(parts)
        if part < limit and not resident[slot] and slot != strongest
    ]
    if weak and len(set(ids)) < len(ids):
        kept = {expert for slot, expert in enumerate(ids) if slot not in weak}
        weak = [slot for slot in weak if ids[slot] not in kept]
    return weak, _total([parts[slot] for slot in weak]) if weak else 0.0


def drop_slots(
    ids: Sequence[int], weights: Sequence[float], slots: Sequence[int], *, renormalise: bool
) -> tuple[list[int], list[float]]:
    """`drop` for one token: the ids and weights without these slots, of which there are some."""
    strongest = ids[weights.index(max(weights))]
    new_ids, new_weights = list(ids), list(weights)
    for slot in slots:
        new_ids[slot], new_weights[slot] = strongest, 0.0
    if renormalise:
        after = _total(new_weights)
        if after != 0:
            (factor,) = _float32([_total(weights) / after])
            new_weights = _float32([weight * factor for weight in new_weights])
    return new_ids, new_weights


def _total(values: Sequence[float]) -> float:
    """The float32 sum, in numpy's order: eight at a time by pairs, and the rest one by one."""
    if len(values) >= 16:
        return float(np.add.reduce(np.array(values, np.float32)))
    total = array("f", (0.0,))
    if len(values) >= 8:
        a, b, c, d, e, f, g, h = values[:8]
        ab, cd, ef, gh = _float32((a + b, c + d, e + f, g + h))
        abcd, efgh = _float32((ab + cd, ef + gh))
        total[0] += abcd + efgh
        values = values[8:]
    for value in values:
        total[0] += value
    return total[0]


def _float32(values: Iterable[float]) -> list[float]:
    """Each rounded to the nearest float32.

    Of one addition, multiplication or division of float32 values this makes what float32
    arithmetic makes: a double is more than twice as long, so rounding twice does no harm.
    """
    return array("f", values).tolist()


def substitutes(ids: Ids, ranking: Ids, replaced: Mask, resident: Mask) -> Ids:
    """For each slot to replace, the router's next-best resident expert; elsewhere -1.

    `ranking` is all experts by order of choice, `resident` says of each expert (by its id) whether
    it is in memory. No expert is used twice in a routing. -1 where no resident expert is left:
    that slot keeps its own.
    """
    top_k = ids.shape[1]
    chosen = np.full_like(ids, -1)
    for row in np.flatnonzero(replaced.any(axis=1)):
        candidates = ranking[row, top_k:]
        available = iter(candidates[resident[candidates]].tolist())
        for slot in np.flatnonzero(replaced[row]):
            chosen[row, slot] = next(available, -1)
    return chosen
