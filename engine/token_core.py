"""A decoded token's experts, loaded by compiled code: the same decisions as `loading.ExpertLoader`.

What lasts between tokens lies in the cache's own arrays, so either can go on where the other
stopped, once nothing is under way (`take_over`, `hand_back`).
"""

from __future__ import annotations

import ctypes
import math
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from engine import native_library as native
from engine import retention
from engine.counters import GuessCounters, RoutingCounters, StepCounters
from engine.errors import GraphChanged, ReadError, TuiworkError
from engine.experts import ExpertTag
from engine.guessing import GUESSED_SHARE, MOST_UNDER_WAY, Guesser
from engine.lanes import Lanes, read_failure
from engine.mapping import PAGE
from engine.native_library import library
from engine.residency import ExpertCache
from engine.router_matrix import RouterMatrix
from engine.vector_product import compute_address

_COMPILED_PAGE = 4096
_ACTIVATIONS = {"": 0, "SOFT_MAX": 1, "UNARY": 2}


@dataclass(frozen=True)
class TokenSettings:
    """What one decode may do."""

    overlap: bool
    prefetch: bool
    steady: bool
    """Whether what is in the cache must not depend on time."""
    top_k: int
    least_share: float
    """What an expert must weigh of a token to be read ahead."""


def can_guess(guesser: Guesser | None) -> bool:
    """Whether all that this guesser can guess is guessed at once, and so by compiled code."""
    return guesser is None or all(
        router.is_quick and len(router.plan.path) <= native.MOST_STEPS
        for router in guesser.routers
        if router is not None
    )


class TokenCore:
    """Loads a token's experts. All calls come from the callback's thread."""

    most_delay_us = 0
    """How long a read may be held up at random, in microseconds (for tests)."""
    refuses_moves = False
    """Whether to act as if the system let no memory be moved (for tests)."""

    def __init__(
        self,
        store: ExpertCache,
        lanes: Lanes,
        guesses: GuessCounters,
        routing: RoutingCounters,
        guesser: Guesser | None,
    ) -> None:
        """`is_possible` must hold. Raises TuiworkError where the system refuses lanes or memory."""
        self.store, self.lanes, self.guesser = store, lanes, guesser
        self.n_lanes = lanes.count
        self._lent = store.lend()
        arrays = (
            *(self._lent.resident, *self._lent.retention),
            *(store.counters.state, store.counters.hits, store.counters.misses),
            store.counters.last_used,
            *(guesses.named, guesses.routed, guesses.right),
            *(guesses.read, guesses.used, guesses.late),
            *(routing.routings, routing.routed),
            *(lanes.counters.bytes, lanes.counters.reads),
            *(lanes.counters.busy_ns, lanes.counters.latency_counts),
        )
        decay, credit = retention.decay_and_credit()
        self.pointer: int = library.core_new(
            len(store.layers),
            store.n_expert,
            max(len(layer.banks) for layer in store.layers),
            len(store.mappings),
            ctypes.byref(native.Arrays(*(array.ctypes.data for array in arrays))),
            decay.ctypes.data,
            credit.ctypes.data,
            compute_address(),
        )
        if not self.pointer:
            raise TuiworkError("the system refused memory for the cache's bookkeeping")
        self._end = weakref.finalize(self, _end, self.pointer)
        # At exit somebody may still use it; threads and memory then end with the process.
        self._end.atexit = False
        # What the core has addresses of must live as long as it does.
        self._borrowed = (arrays, decay, credit, list(self._describe()))
        self._settings = library.core_settings(self.pointer).contents
        self._counts = library.core_counts(self.pointer).contents
        self._told = dict.fromkeys(native.Counts.NAMES, 0)
        self._n_gone = 0
        self._start_lanes()

    @staticmethod
    def is_possible(store: object, guesser: Guesser | None) -> bool:
        """Whether compiled code can do this at all."""
        return (
            library is not None
            and isinstance(store, ExpertCache)
            and PAGE == _COMPILED_PAGE
            and can_guess(guesser)
        )

    def is_for(self, store: object, lanes: Lanes, guesser: Guesser | None) -> bool:
        """Whether this is still the one to use."""
        return (
            store is self.store
            and guesser is self.guesser
            and lanes is self.lanes
            and lanes.count == self.n_lanes
        )

    def close(self) -> None:
        """Stop its lanes; nothing may be under way."""
        self._end()

    def take_over(self) -> None:
        """From here on the cache's entries are ours. Nothing may be under way."""
        lent = self._lent = self.store.lend()
        library.core_take_over(self.pointer, lent.resident_bytes, lent.layer, lent.n_uses)

    def hand_back(self, step: StepCounters) -> None:
        """Return when nothing is under way; the cache's entries are its own again."""
        library.core_settle(self.pointer)
        self.tell(step)
        layer = library.core_present_layer(self.pointer)
        self.store.take_back(layer, library.core_n_uses(self.pointer))

    def prepare(self, wanted: TokenSettings) -> None:
        """Before each decode."""
        settings, store = self._settings, self.store
        settings.clock, settings.budget_bytes = store.clock, store.budget_bytes
        settings.overlap, settings.prefetch = wanted.overlap, wanted.prefetch
        settings.steady, settings.top_k = wanted.steady, wanted.top_k
        settings.n_sure = math.ceil(GUESSED_SHARE * wanted.top_k)
        settings.least_share = wanted.least_share
        settings.most_under_way = MOST_UNDER_WAY
        settings.keeps_edges, settings.moves_pages = self._lent.keeps_edges, self._lent.moves_pages
        settings.poison = store.poison
        settings.most_delay_us = self.most_delay_us
        settings.refuses_moves = self.refuses_moves

    def load(
        self, index: int, experts: Sequence[int], router_input: int, forced: Sequence[int] | None
    ) -> None:
        """Bring a routing's experts in, and begin to read what the next layer is guessed to need.

        `router_input`: the address of what the layer's router saw; 0 guesses nothing. Raises
        ReadError, GraphChanged.
        """
        chosen = (ctypes.c_int32 * len(experts))(*experts)
        named = None if forced is None else (ctypes.c_int32 * len(forced))(*forced)
        n_forced = -1 if forced is None else len(forced)
        count = len(experts)
        if library.core_load(
            self.pointer, index, chosen, count, router_input or None, named, n_forced
        ):
            self.fail()

    def asked(self, index: int, bank: int) -> bool:
        """As `ExpertLoader.experts_asked`."""
        apart = library.core_asked(self.pointer, index, bank)
        if apart < 0:
            self.fail()
        return bool(apart)

    @property
    def is_flying(self) -> bool:
        """Whether a layer's own reads are under way."""
        return bool(library.core_is_flying(self.pointer))

    def abandon(self) -> None:
        """Nothing of a layer's own reads is under way any more; what was not used is absent."""
        library.core_abandon(self.pointer)

    def tell(self, step: StepCounters) -> int:
        """After a decode: what it did. Returns how many banks were computed apart."""
        now = {name: getattr(self._counts, name) for name in native.Counts.NAMES}
        new = {name: now[name] - self._told[name] for name in now}
        self._told = now
        for name in ("reads", "read_bytes", "io_ns", "stall_ns", "mgmt_ns", "routed"):
            setattr(step, name, getattr(step, name) + new[name])
        self.store.note(
            library.core_resident_bytes(self.pointer),
            **{name: new[name] for name in ("hits", "misses", "evictions", "moved")},
            left=self._left(),
        )
        return int(new["apart"])

    def fail(self) -> None:
        """Raise why a layer could not be loaded."""
        answer = (ctypes.c_int64 * 5)()
        if not library.core_failure(self.pointer, answer):
            raise GraphChanged("experts are used in another order than learned")
        key, bank, first, last, code = answer
        index, expert = divmod(key, self.store.n_expert)
        layer = self.store.layers[index]
        where = layer.banks[bank]
        tag = ExpertTag(index, layer.number, expert, where.name)
        error = OSError(code, os.strerror(code))
        path = self.store.mappings[where.shard].path
        raise ReadError(read_failure(path, str(tag), first, last, error)) from error

    def _left(self) -> list[int]:
        """Which entries left since the last time, if that interests anybody."""
        n_gone = library.core_gone(self.pointer, None, 0)
        new, self._n_gone = n_gone - self._n_gone, n_gone
        if not new or self.store.planner is None:
            return []
        keys = (ctypes.c_int32 * min(new, len(self._lent.resident)))()
        library.core_gone(self.pointer, keys, len(keys))
        return list(keys)

    def _describe(self) -> Iterator[object]:
        """Tell where everything is; yields what must be kept."""
        places = zip(self.store.mappings, self.lanes.own_fds, strict=True)
        for place, (mapping, fd) in enumerate(places):
            library.core_set_shard(self.pointer, place, mapping.base, mapping.size, fd)
        for index, layer in enumerate(self.store.layers):
            for bank in layer.banks:
                library.core_add_bank(
                    *(self.pointer, index, layer.entry_bytes, layer.n_expert, bank.shard),
                    *(bank.offset, bank.slice_bytes, bank.core_bytes),
                    *(bank.inside_first, bank.inside_last),
                )
        routers = self.guesser.routers if self.guesser else []
        for index, (router, following) in enumerate(pairwise(routers)):
            if router is not None and following is not None:
                yield self._describe_router(index, router, following)

    def _describe_router(self, index: int, router: RouterMatrix, following: RouterMatrix) -> object:
        """Layer `index` guesses with its own input and the router of the one after it."""
        product = following.product
        described = native.Router(
            *(product.graph, product.plan_address, product.vector_slot, product.result_address),
            *(_address(following.bias), _address(following.selection_bias)),
            *following.matrix.shape,
            _ACTIVATIONS[following.plan.activation],
        )
        library.core_set_router(self.pointer, index + 1, ctypes.byref(described))
        steps = (ctypes.c_int32 * native.MOST_STEPS)(*router.plan.path)
        library.core_set_steps(self.pointer, index, steps, len(router.plan.path))
        return following

    def _start_lanes(self) -> None:
        for _ in range(self.n_lanes - 1):
            code = library.core_start_lane(self.pointer)
            if code:
                self.close()
                raise TuiworkError(f"the system refused a thread ({os.strerror(code)})")


def _address(array: np.ndarray | None) -> int | None:
    return None if array is None else array.ctypes.data


def _end(pointer: int) -> None:
    library.core_stop_lanes(pointer)
    library.core_free(pointer)
