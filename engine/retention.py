"""Which expert leaves the cache next: the retention policy, by value. Pure numpy.

A pass is one walk over the model's routed layers: a decoded token, or a batch of a prompt. A call
for a layer that does not lie behind the previous call's begins a new pass. An expert that a call
uses counts one use, however many tokens of a batch route to it.

    worth = sum over tau of weight(tau) / tau * sum over uses of exp(-age / tau)
    score = worth * (1 - 0.3 * ahead / layers)

`age` is counted in passes, and `ahead` is how many layers come before the expert's own when the
layers are walked on from the present one: 0 for the next layer, layers - 1 for the present one.
What an expert was used is remembered when it leaves, so one that keeps coming back is kept at last.
The lowest score leaves first, among equals the one used longest ago, but never what the present
call uses.

Finding the lowest score takes longer than all else that a call does, so several are found at once:
where a call must evict, the `BATCH` lowest scores (and what equals the highest of them) are put in
order, without what the call uses. Calls follow that order, leaving out what was used since, until
it is used up or the pass ends.

The constants are fitted to the one recorded run there is: Qwen3-30B-A3B, top-6, 128 decoded tokens
(docs/cache.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

TAUS = (2.0, 16.0, 128.0)
"""Passes in which a use's worth falls to 1/e."""

WEIGHTS = (1.0, 2.0, 4.0)
"""Of the frequencies over each of `TAUS`."""

NEARNESS = 0.3
"""How much less an expert of the present layer is worth than one of the next layer."""

BATCH = 16
"""Entries in an order of eviction: the fewer, the more often one must be made."""

_DECAY = np.array([math.exp(-1.0 / tau) for tau in TAUS])[:, None]
_CREDIT = (np.array(WEIGHTS) / np.array(TAUS))[:, None]


def decay_and_credit() -> tuple[np.ndarray, np.ndarray]:
    """By tau: what a pass leaves of a part of the worth, and what a use adds to it."""
    return _DECAY.ravel().copy(), _CREDIT.ravel().copy()


class Retention:
    """Knows what is resident and what it is worth. A key is `layer * n_expert + expert`."""

    def __init__(self, n_layer: int, n_expert: int) -> None:
        n = n_layer * n_expert
        # One memory, two faces: bytes are quick one by one, the array is quick as a whole.
        self.resident = bytearray(n)
        """1 for each key that is in the cache. Whoever brings an entry in or drops it says so."""
        self.held: set[int] = set()
        """Keys that may not leave: what is read for a layer that comes."""
        self._mask = np.frombuffer(self.resident, np.bool_)
        self._parts = np.zeros((len(TAUS), n))
        """The worth of each key, by tau."""
        self._worth = np.zeros(n)
        self._last = np.zeros(n, np.int64)
        """When each was used last, counted in uses."""
        ahead = np.arange(2 * n_layer) % n_layer
        self._nearness = np.repeat(1.0 - NEARNESS * ahead / n_layer, n_expert)
        self._n_layer, self._n_expert = n_layer, n_expert
        self._layer = -1
        self._n_uses = 0
        self._present: Sequence[int] = ()
        self._unapplied: list[int] = []
        """Uses since the order was made, or the pass began, which `_worth` does not know yet. Each
        key once, as a pass meets a layer once."""
        self._order: list[int] = []
        """Who leaves next; the last one first."""

    def seed(self, rates: np.ndarray) -> None:
        """Take each key for one that was used in this share of passes for a long time.

        What used it so far counts on top. Nothing has been used yet, or a pass has ended.
        """
        # The sum over all uses at that rate of exp(-age / tau) / tau tends to the rate itself.
        self._parts += np.array(WEIGHTS)[:, None] * rates.reshape(-1)
        self._sum_parts()
        self._order.clear()

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """Parts of the worth by tau, worth, nearness, last use: for who keeps them up instead."""
        return self._parts, self._worth, self._nearness, self._last

    @property
    def position(self) -> tuple[int, int]:
        """The layer of the last call, and how many uses there were: all are in `arrays`."""
        self._apply_uses()
        return self._layer, self._n_uses

    def go_on(self, layer: int, n_uses: int) -> None:
        """Go on with `arrays` as somebody else has left them, at that position."""
        self._layer, self._n_uses = layer, n_uses
        self._unapplied.clear()
        self.held.clear()
        self.nothing_in_use()

    def use(self, layer: int, keys: Sequence[int]) -> None:
        """A call uses these keys of one layer, each once, in order of their last use in it."""
        if layer <= self._layer:
            self._begin_pass()
        self._layer = layer
        self._present = keys
        self._unapplied += keys

    def nothing_in_use(self) -> None:
        """Between two passes any entry may leave."""
        self._present = ()
        self._order.clear()

    def evict(self) -> int | None:
        """Give the next key up; None if nothing is left but what the present call uses."""
        resident, used_since, held = self.resident, self._unapplied, self.held
        while True:
            order = self._order
            while order:
                key = order.pop()
                if resident[key] and key not in used_since and key not in held:
                    resident[key] = 0
                    return key
            self._make_order()
            if not self._order:
                return None

    def _begin_pass(self) -> None:
        self._apply_uses()
        self._parts *= _DECAY
        self._sum_parts()
        self._order.clear()

    def _sum_parts(self) -> None:
        first, second, third = self._parts
        # In place: compiled code may know the address.
        np.add(first, second, out=self._worth)
        self._worth += third

    def _apply_uses(self) -> None:
        keys = np.array(self._unapplied, np.intp)
        parts = self._parts[:, keys] + _CREDIT
        self._parts[:, keys] = parts
        self._worth[keys] = parts[0] + parts[1] + parts[2]
        self._last[keys] = np.arange(self._n_uses, self._n_uses + len(keys))
        self._n_uses += len(keys)
        self._unapplied.clear()

    def _make_order(self) -> None:
        self._apply_uses()
        may_leave = self._mask.copy()
        may_leave[list(self._present)] = False
        may_leave[list(self.held)] = False
        keys = may_leave.nonzero()[0]
        next_layer = (self._n_layer - 1 - self._layer) * self._n_expert
        scores = self._worth[keys] * self._nearness[keys + next_layer]
        if len(keys) > BATCH:
            lowest = scores <= np.partition(scores, BATCH - 1)[BATCH - 1]
            keys, scores = keys[lowest], scores[lowest]
        self._order = keys[np.lexsort((self._last[keys], scores))[::-1]].tolist()
