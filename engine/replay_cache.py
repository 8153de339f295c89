"""Replaying a route trace against caches: what each policy would have hit at each budget.

The unit is one load call (`RouteTrace.call`). Every expert of a call is looked up once; misses
become resident; eviction runs after the call and never takes what the call itself touched, so a
cache may hold more than its budget while one call needs more. A budget is in bytes and an entry
costs its layer's expert_bytes. Prefill warms the caches, and hits are counted in decode only.

Where the format's description leaves a choice, these are the ones that reproduce the field's
published curve to the printed digit at every budget:
- Recency inside a call goes by an expert's last routing, token then slot.
- LFU counts calls, not routings (a prefill call counts once), never forgets a count, not even on
  eviction, and among equal counts evicts the least recently used.
- A per-layer policy gives each of the n MoE layers 1/n of the budget in bytes, for itself alone.
  A layer whose call needs more than its share still keeps it until its next call. So below the
  token demand the per-layer policies hold more than the budget (on the reference trace at 750 MiB
  they hold 784.7; `CurvePoint.held_bytes` tells), and at any budget the first decoded token still
  finds its whole prompt's experts.
- Bélády evicts what is used again latest, and what is never used again first of all.

The policy "engine" is this engine's own, by the very code that its cache runs.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.replay_engine import EngineCache
from engine.trace_table import IntArray
from engine.traces import RouteTrace

MIB = 1 << 20

RANDOM_SEED = 1
"""The random policy draws from this seed, so that a replay can be repeated."""


@dataclass(frozen=True)
class Call:
    """One load call: which experts it needs."""

    decode: bool
    keys: tuple[int, ...]
    """`layer * n_expert + expert`, each once, in order of last use."""
    ends_token: bool
    """Whether this is the last layer of a decoded token."""


@dataclass(frozen=True)
class Workload:
    """A trace as the caches see it."""

    calls: tuple[Call, ...]
    n_expert: int
    n_layer: int
    """MoE layers, by the preamble."""
    sizes: Mapping[int, int]
    """Bytes of an expert, by key; of every key in `calls`."""


class CachePolicy(Protocol):
    """A cache that is replayed."""

    @property
    def held(self) -> int:
        """Bytes of all that is resident."""

    def __contains__(self, key: int) -> bool:
        """Whether an expert is resident. Changes nothing."""

    def load(self, keys: Sequence[int]) -> None:
        """Use these experts of one layer, each once, in this order: all become resident, then the
        cache evicts down to its budget, but none of these."""


PolicyFactory = Callable[[Workload, int], CachePolicy]
"""Makes an empty cache for a workload and a budget in bytes."""


@dataclass(frozen=True)
class CurvePoint:
    """How a policy fared at a budget, over the decode calls."""

    policy: str
    budget_mib: int
    lookups: int
    hits: int
    read_bytes: int
    held_bytes: int
    """The most that was resident after a decoded token's last layer."""

    @property
    def hit_pct(self) -> float | None:
        """Hits in percent of lookups; None if the trace decodes nothing."""
        return 100 * self.hits / self.lookups if self.lookups else None


def row_keys(trace: RouteTrace) -> IntArray:
    """The key of each row's expert, as in `Call.keys`."""
    keys: IntArray = trace.layer * trace.model.n_expert + trace.expert
    return keys


def call_starts(trace: RouteTrace) -> list[int]:
    """The first row of each load call, and the number of rows at the end."""
    starts = np.flatnonzero(np.diff(trace.call, prepend=-1))
    return [*starts.tolist(), len(trace)]


def workload(trace: RouteTrace, top_k: int | None = None) -> Workload:
    """The load calls of a trace, of all its routings or of their `top_k` strongest experts."""
    keys = row_keys(trace).tolist()
    slots = trace.slot.tolist()
    starts = call_starts(trace)
    decode = trace.decode.tolist()
    token_ends = (np.diff(trace.step, append=-1) != 0) | (np.diff(trace.turn, append=-1) != 0)
    ends = (trace.decode & token_ends).tolist()
    calls = []
    for first, end in itertools.pairwise(starts):
        used = keys[first:end]
        if top_k is not None:
            used = [key for key, slot in zip(used, slots[first:end], strict=True) if slot < top_k]
        latest_first = dict.fromkeys(reversed(used))
        calls.append(Call(decode[first], tuple(reversed(latest_first)), ends[end - 1]))
    n_expert = trace.model.n_expert
    return Workload(
        calls=tuple(calls),
        n_expert=n_expert,
        n_layer=len(trace.model.expert_bytes),
        sizes={key: trace.model.expert_bytes[key // n_expert] for key in set(keys)},
    )


class Lru:
    """Evicts the least recently used expert, of any layer."""

    def __init__(self, work: Workload, budget: int) -> None:
        self.held = 0
        self._sizes = work.sizes
        self._budget = budget
        self._order: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, key: int) -> bool:
        return key in self._order

    def load(self, keys: Sequence[int]) -> None:
        order = self._order
        for key in keys:
            if key in order:
                order.move_to_end(key)
            else:
                order[key] = None
                self.held += self._sizes[key]
        # What the call touched is the newest, so it is safe while that many entries remain.
        while self.held > self._budget and len(order) > len(keys):
            evicted, _ = order.popitem(last=False)
            self.held -= self._sizes[evicted]


class Lfu:
    """Evicts the expert used in the fewest calls so far, the least recent one among equals."""

    def __init__(self, work: Workload, budget: int) -> None:
        self.held = 0
        self._sizes = work.sizes
        self._budget = budget
        self._clock = 0
        self._use: dict[int, tuple[int, int]] = {}
        """Calls and time of last use, of every expert ever seen."""
        self._resident: set[int] = set()
        self._heap: list[tuple[tuple[int, int], int]] = []
        """One entry per resident expert, with the use it had at some time: never too high."""

    def __contains__(self, key: int) -> bool:
        return key in self._resident

    def load(self, keys: Sequence[int]) -> None:
        before = self._clock
        for key in keys:
            self._clock += 1
            count, _ = self._use.get(key, (0, 0))
            self._use[key] = (count + 1, self._clock)
            if key not in self._resident:
                self._resident.add(key)
                self.held += self._sizes[key]
                heapq.heappush(self._heap, (self._use[key], key))
        if self.held > self._budget:
            self._evict(before)

    def _evict(self, before: int) -> None:
        """Evict what was last used at `before` or earlier until the rest fits."""
        touched: list[tuple[tuple[int, int], int]] = []
        while self.held > self._budget and self._heap:
            use, key = heapq.heappop(self._heap)
            now = self._use[key]
            if now[1] > before:
                touched.append((now, key))
            elif now != use:
                # Refreshed only when it surfaces: hits, the common case, cost no heap operation.
                heapq.heappush(self._heap, (now, key))
            else:
                self._resident.remove(key)
                self.held -= self._sizes[key]
        for entry in touched:
            heapq.heappush(self._heap, entry)


class Belady:
    """Evicts what is used again latest: the best that any policy could do with equal entries.

    Knows the future, so it must be given the workload's calls, all of them, in their order.
    """

    def __init__(self, work: Workload, budget: int) -> None:
        self.held = 0
        self._sizes = work.sizes
        self._budget = budget
        self._call = 0
        self._upcoming = _next_uses(work.calls)
        self._next: dict[int, float] = {}
        """When each resident expert is used next."""
        self._heap: list[tuple[float, int]] = []
        """Latest first. An entry is void unless it agrees with `_next`."""

    def __contains__(self, key: int) -> bool:
        return key in self._next

    def load(self, keys: Sequence[int]) -> None:
        for key, again in zip(keys, self._upcoming[self._call], strict=True):
            if key not in self._next:
                self.held += self._sizes[key]
            self._next[key] = again
            heapq.heappush(self._heap, (-again, key))
        self._call += 1
        if self.held > self._budget:
            self._evict(set(keys))

    def _evict(self, touched: set[int]) -> None:
        kept = []
        while self.held > self._budget and self._heap:
            entry = heapq.heappop(self._heap)
            again, key = -entry[0], entry[1]
            if self._next.get(key) != again:
                continue
            if key in touched:
                kept.append(entry)
            else:
                del self._next[key]
                self.held -= self._sizes[key]
        for entry in kept:
            heapq.heappush(self._heap, entry)


class RandomEviction:
    """Evicts any expert, by dice from RANDOM_SEED."""

    def __init__(self, work: Workload, budget: int) -> None:
        self.held = 0
        self._sizes = work.sizes
        self._budget = budget
        self._dice = random.Random(RANDOM_SEED)
        self._keys: list[int] = []
        self._resident: set[int] = set()

    def __contains__(self, key: int) -> bool:
        return key in self._resident

    def load(self, keys: Sequence[int]) -> None:
        for key in keys:
            if key not in self._resident:
                self._resident.add(key)
                self._keys.append(key)
                self.held += self._sizes[key]
        if self.held > self._budget:
            self._evict(set(keys))

    def _evict(self, touched: set[int]) -> None:
        while self.held > self._budget and len(self._keys) > len(touched):
            place = int(self._dice.random() * len(self._keys))
            key = self._keys[place]
            if key in touched:
                continue
            self._keys[place] = self._keys[-1]
            self._keys.pop()
            self._resident.remove(key)
            self.held -= self._sizes[key]


class PerLayer:
    """A cache of its own for each MoE layer, each with an equal share of the budget."""

    def __init__(self, make: PolicyFactory, work: Workload, budget: int) -> None:
        self.held = 0
        self._n_expert = work.n_expert
        # Sizes are whole bytes, so cutting the share's fraction off changes no decision.
        share = budget // work.n_layer
        layers = {key // work.n_expert for key in work.sizes}
        self._layers = {layer: make(work, share) for layer in layers}

    def __contains__(self, key: int) -> bool:
        return key in self._layers[key // self._n_expert]

    def load(self, keys: Sequence[int]) -> None:
        cache = self._layers[keys[0] // self._n_expert]
        self.held -= cache.held
        cache.load(keys)
        self.held += cache.held


POLICIES: dict[str, PolicyFactory] = {
    "belady": Belady,
    "lru": Lru,
    "lfu": Lfu,
    "layer-lru": lambda work, budget: PerLayer(Lru, work, budget),
    "layer-lfu": lambda work, budget: PerLayer(Lfu, work, budget),
    "random": RandomEviction,
    "engine": lambda work, budget: EngineCache(work.sizes, work.n_expert, work.n_layer, budget),
}
"""Every policy by its name; a new one is added here."""


def simulate(
    work: Workload, policy: str, budget_mib: int, *, make: PolicyFactory | None = None
) -> CurvePoint:
    """Replay a workload against a policy of POLICIES, or against the one that `make` makes."""
    cache = (make or POLICIES[policy])(work, budget_mib * MIB)
    lookups = hits = read = held = 0
    for call in work.calls:
        if call.decode:
            missing = [key for key in call.keys if key not in cache]
            lookups += len(call.keys)
            hits += len(call.keys) - len(missing)
            read += sum([work.sizes[key] for key in missing])
        cache.load(call.keys)
        if call.ends_token:
            held = max(held, cache.held)
    return CurvePoint(policy, budget_mib, lookups, hits, read, held)


def default_budgets(trace: RouteTrace) -> list[int]:
    """Up to eleven budgets in MiB, from just below the token demand to nearly everything.

    Where all experts are at least sixteen times the token demand, the steps are those that the
    field publishes for its 785 MiB model: 750, 1000, 1500, 2000 … 12000. Else they are even
    ratios up to all experts.
    """
    demand = trace.model.token_demand / MIB
    everything = max(1, math.ceil(trace.model.all_experts / MIB))
    first = _round_below(demand)
    steps = [4, 16 / 3, 8, 32 / 3, 16, 64 / 3, 80 / 3, 32, 128 / 3, 160 / 3, 64]
    budgets = [first * step / 4 for step in steps]
    if budgets[-1] > everything:
        ratio = max(1.0, everything / first) ** (1 / 10)
        budgets = [first * ratio**n for n in range(10)] + [everything]
    return sorted({min(everything, max(1, round(budget))) for budget in budgets})


def _round_below(value: float) -> float:
    """The largest round number up to `value`: 1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6 or 7.5 tens."""
    scale: float = 10.0 ** math.floor(math.log10(value))
    fitting = [n for n in (0.75, 1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 7.5) if n * scale <= value]
    return scale * fitting[-1]


def _next_uses(calls: Sequence[Call]) -> list[list[float]]:
    """For each expert of each call, the number of the call that uses it next, or infinity."""
    coming: dict[int, float] = {}
    uses: list[list[float]] = []
    for number in range(len(calls) - 1, -1, -1):
        keys = calls[number].keys
        uses.append([coming.get(key, math.inf) for key in keys])
        coming.update(dict.fromkeys(keys, number))
    uses.reverse()
    return uses
