"""What the lossy settings would save and cost with their effect on the cache, by simulation.

An expert that was left out is not there for the next token either: it stays cold, is left out
again, and leaves room for others. So these figures differ from the static ones of
`engine.replay_lossy`, whose terms (weak, saved I/O, lost mass) they share. The cache is the
engine's own: one budget for all layers, and the policy of `engine.retention`.

The router's choices are taken as recorded. What a real run routes after a dropped expert differs,
and no trace can tell how. Prefill is never dropped, but warms the cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from engine.replay_cache import (
    MIB,
    POLICIES,
    CachePolicy,
    Workload,
    call_starts,
    simulate,
    workload,
)
from engine.replay_lossy import FRACTIONS, BoolArray, DecodeRows, Saving, fewer, percent
from engine.traces import RouteTrace


@dataclass(frozen=True)
class DropDynamicPoint(Saving):
    """Dropping at a fraction while the engine's cache of a budget is simulated."""

    frac: float
    budget_mib: int
    drop_pct: float | None
    """Dropped in percent of routed."""
    read_mib_per_token: float | None
    static_io_saved_pct: float | None
    """The static figure, with the misses of this budget's undropped simulation."""
    static_mass_lost_pct: float | None


@dataclass(frozen=True)
class TopKDynamicPoint(Saving):
    """Fewer experts per token, in prefill too, with the engine's cache of a budget simulated.

    The prompt then warms the cache less, so a budget with room for nearly everything saves little
    in decode: what the prompt no longer read, a decoded token reads first.
    """

    k: int
    budget_mib: int
    read_mib_per_token: float | None


@dataclass(frozen=True)
class SubstitutePoint:
    """Replacing a cold weak expert by a resident one, with the engine's cache simulated.

    A trace does not know the weights of experts that were not routed, so which one would step in
    and what it would weigh is unknown. Assumed: any resident expert of the layer that the routing
    did not choose can step in, once per routing, and that counts as no use of it. Where there are
    too few, the candidates ranked first are replaced and the others read. Weights of the replaced
    tell how much of the routing another expert computed, not what was lost.
    """

    frac: float
    budget_mib: int
    io_saved_pct: float | None
    replaced_mass_pct: float | None
    substitute_pct: float | None
    """Replaced in percent of routed."""
    refused_pct: float | None
    """Candidates in percent for which no resident expert was left."""


class DynamicReplay:
    """Simulates caches in which the lossy settings decide what is loaded."""

    def __init__(
        self, trace: RouteTrace, rows: DecodeRows, work: Workload, policy: str = "engine"
    ) -> None:
        """`policy` of the caches, of POLICIES; Bélády's does not know what is left out."""
        self._policy = policy
        self._rows = rows
        self._work = work
        self._fewer = {k: workload(trace, top_k=k) for k in fewer(rows)}
        self._undropped: dict[int, BoolArray] = {}
        self._keys = rows.key.tolist()
        self._spans = list(itertools.pairwise(_decode_starts(trace)))
        self._layer_keys = [
            range(layer * work.n_expert, (layer + 1) * work.n_expert)
            for layer in range(trace.model.n_layer)
        ]

    def drop(
        self, budget_mib: int, fractions: Sequence[float] = FRACTIONS
    ) -> list[DropDynamicPoint]:
        """Dropping at each fraction, beside the static figures at the same budget."""
        undropped = self._all_loaded(budget_mib)
        full = self._rows.bytes[undropped].sum()
        points = []
        for frac in fractions:
            weak = self._rows.weak(frac)
            if weak is None:
                points.append(DropDynamicPoint(None, None, frac, budget_mib, *[None] * 4))
                continue
            static = self._rows.saving(weak & undropped, undropped)
            miss = self._misses(budget_mib, weak)
            read = self._rows.bytes[miss & ~weak].sum()
            dropped = miss & weak
            points.append(
                DropDynamicPoint(
                    io_saved_pct=percent(full - read, full),
                    mass_lost_pct=self._rows.mass(dropped),
                    frac=frac,
                    budget_mib=budget_mib,
                    drop_pct=percent(dropped.sum(), len(dropped)),
                    read_mib_per_token=self._mib_per_token(read),
                    static_io_saved_pct=static.io_saved_pct,
                    static_mass_lost_pct=static.mass_lost_pct,
                )
            )
        return points

    def substitute(
        self, budget_mib: int, fractions: Sequence[float] = FRACTIONS
    ) -> list[SubstitutePoint]:
        """Substitution at each fraction; see SubstitutePoint for what is assumed."""
        full = self._rows.bytes[self._all_loaded(budget_mib)].sum()
        points = []
        for frac in fractions:
            weak = self._rows.weak(frac)
            if weak is None:
                points.append(SubstitutePoint(frac, budget_mib, *[None] * 4))
                continue
            miss, replaced = self._substituted(budget_mib, weak)
            read = self._rows.bytes[miss & ~replaced].sum()
            candidates = (miss & weak).sum()
            points.append(
                SubstitutePoint(
                    frac=frac,
                    budget_mib=budget_mib,
                    io_saved_pct=percent(full - read, full),
                    replaced_mass_pct=self._rows.mass(replaced),
                    substitute_pct=percent(replaced.sum(), len(replaced)),
                    refused_pct=percent(candidates - replaced.sum(), candidates),
                )
            )
        return points

    def fewer_experts(self, budget_mib: int) -> list[TopKDynamicPoint]:
        """Each smaller top-k, against the trace's own at the same budget."""
        full = self._rows.bytes[self._all_loaded(budget_mib)].sum()
        points = []
        for k, work in self._fewer.items():
            read = simulate(work, self._policy, budget_mib).read_bytes
            points.append(
                TopKDynamicPoint(
                    io_saved_pct=percent(full - read, full),
                    mass_lost_pct=self._rows.mass(self._rows.slot >= k),
                    k=k,
                    budget_mib=budget_mib,
                    read_mib_per_token=self._mib_per_token(read),
                )
            )
        return points

    def _all_loaded(self, budget_mib: int) -> BoolArray:
        """Which decode rows are cold when looked up, with every miss loaded."""
        if budget_mib not in self._undropped:
            nothing = np.zeros(len(self._keys), dtype=np.bool_)
            self._undropped[budget_mib] = self._misses(budget_mib, nothing)
        return self._undropped[budget_mib]

    def _misses(self, budget_mib: int, weak: BoolArray) -> BoolArray:
        """Which decode rows are cold when looked up; cold `weak` ones are never loaded."""
        cache = POLICIES[self._policy](self._work, budget_mib * MIB)
        weak_rows = weak.tolist()
        miss: list[bool] = []
        for first, end in self._warmed(cache):
            keys = self._keys[first:end]
            cold = [key not in cache for key in keys]
            miss += cold
            weak_here = weak_rows[first:end]
            used = zip(keys, cold, weak_here, strict=True)
            cache.load(_distinct([key for key, gone, faint in used if not (gone and faint)]))
        return np.array(miss, dtype=np.bool_)

    def _substituted(self, budget_mib: int, weak: BoolArray) -> tuple[BoolArray, BoolArray]:
        """Which decode rows are cold when looked up, and which of these are replaced."""
        cache = POLICIES[self._policy](self._work, budget_mib * MIB)
        weak_rows = weak.tolist()
        miss = np.zeros(len(self._keys), dtype=np.bool_)
        replaced = np.zeros(len(self._keys), dtype=np.bool_)
        for first, end in self._warmed(cache):
            keys = self._keys[first:end]
            cold = [row for row in range(first, end) if self._keys[row] not in cache]
            miss[cold] = True
            candidates = [row for row in cold if weak_rows[row]]
            if candidates:
                layer_keys = self._layer_keys[keys[0] // self._work.n_expert]
                at_hand = sum([key in cache for key in layer_keys]) - (len(keys) - len(cold))
                replaced[candidates[: max(0, at_hand)]] = True
                gone = replaced[first:end].tolist()
                keys = [key for key, out in zip(keys, gone, strict=True) if not out]
            cache.load(_distinct(keys))
        return miss, replaced

    def _warmed(self, cache: CachePolicy) -> Iterator[tuple[int, int]]:
        """Runs prefill through the cache, and gives the decode calls' rows as their turn comes."""
        spans = iter(self._spans)
        for call in self._work.calls:
            if call.decode:
                yield next(spans)
            else:
                cache.load(call.keys)

    def _mib_per_token(self, read_bytes: int) -> float | None:
        return float(read_bytes) / MIB / self._rows.tokens if self._rows.tokens else None


def _distinct(keys: list[int]) -> list[int]:
    """Each key once, in order of its last place."""
    if len(set(keys)) == len(keys):
        return keys
    return list(dict.fromkeys(reversed(keys)))[::-1]


def _decode_starts(trace: RouteTrace) -> list[int]:
    """Where each decode call begins, counted in decode rows, and where the last one ends."""
    starts = call_starts(trace)
    decode = trace.decode
    before = np.concatenate([[0], np.cumsum(decode)])
    return [int(before[row]) for row in starts[:-1] if decode[row]] + [int(before[-1])]
