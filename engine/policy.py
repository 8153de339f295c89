"""Which routed experts to keep: the lossy decisions, by value.

Pure numpy. Arrays are tokens by slots; a routing's share is its weight over the routing's total.
A resident expert costs no read, so leaving it out would buy nothing: only experts that are not in
memory ("cold") and that the router gave little ("weak") are ever left out or replaced.
"""

from __future__ import annotations

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
