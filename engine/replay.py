"""Replaying a route trace: everything that can be learned from it, in one place.

Caches in `engine.replay_cache`, lossy settings in `engine.replay_lossy` (miss by miss) and
`engine.replay_dynamic` (simulated), guesses and popularity in `engine.replay_predict`. Pure: no
model, no llama.cpp. A figure that the trace cannot tell is None, and a note says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.errors import InputError
from engine.replay_cache import (
    MIB,
    POLICIES,
    RANDOM_SEED,
    CurvePoint,
    default_budgets,
    simulate,
    workload,
)
from engine.replay_dynamic import (
    DropDynamicPoint,
    DynamicReplay,
    SubstitutePoint,
    TopKDynamicPoint,
)
from engine.replay_lossy import (
    DecodeRows,
    DropPoint,
    TopKPoint,
    drop_curve,
    percent,
    topk_curve,
    weights_missing,
)
from engine.replay_predict import Accuracy, LayerPopularity, accuracies, popularity
from engine.traces import HIT, NOT_SUBSTITUTED, PREFETCHED, RouteTrace, TraceModel


@dataclass(frozen=True)
class TraceSummary:
    """What a trace holds. The recorded figures are over its decode rows."""

    model: TraceModel
    rows: int
    turns: int
    prefill_tokens: int
    decode_tokens: int
    distinct_experts: int
    """Experts used at least once, of all layers, prefill included."""
    hit_pct: float | None
    """Recorded hits in percent of what was looked up: of neither dropped nor substituted."""
    drop_pct: float | None
    """Recorded drops in percent of routed."""
    substitute_pct: float | None
    read_mib: float | None
    """MiB that the decoded tokens read."""


@dataclass(frozen=True)
class Replay:
    """A replayed trace."""

    trace: TraceSummary
    cache_curve: list[CurvePoint]
    drop_curve: list[DropPoint]
    topk_curve: list[TopKPoint]
    drop_dynamic: list[DropDynamicPoint]
    substitute_curve: list[SubstitutePoint]
    topk_dynamic: list[TopKDynamicPoint]
    predictors: list[Accuracy]
    popularity: list[LayerPopularity]
    notes: list[str]
    """What cannot be told, and what to keep in mind about this trace."""


def replay(trace: RouteTrace, budgets: Sequence[int] | None = None) -> Replay:
    """Replay a trace at these budgets in MiB; None: at `default_budgets`.

    The simulations of lossy settings run at every given budget, but at every second default one:
    they take most of the time. Raises InputError for a budget below 1.
    """
    curve_budgets = _checked(budgets) if budgets else default_budgets(trace)
    lossy_budgets = curve_budgets if budgets or len(curve_budgets) < 3 else curve_budgets[1::2]
    work = workload(trace)
    rows = DecodeRows(trace)
    dynamic = DynamicReplay(trace, rows, work)
    return Replay(
        trace=_summary(trace, len(work.sizes)),
        cache_curve=[
            simulate(work, policy, budget) for budget in curve_budgets for policy in POLICIES
        ],
        drop_curve=drop_curve(rows),
        topk_curve=topk_curve(rows),
        drop_dynamic=[point for budget in lossy_budgets for point in dynamic.drop(budget)],
        substitute_curve=[
            point for budget in lossy_budgets for point in dynamic.substitute(budget)
        ],
        topk_dynamic=[point for budget in lossy_budgets for point in dynamic.fewer_experts(budget)],
        predictors=accuracies(trace),
        popularity=popularity(trace),
        notes=_notes(trace),
    )


def _checked(budgets: Sequence[int]) -> list[int]:
    bad = [budget for budget in budgets if budget < 1]
    if bad:
        raise InputError(f"a budget of {bad[0]} MiB cannot be replayed; allowed is 1 or more")
    return sorted(set(budgets))


def _summary(trace: RouteTrace, distinct: int) -> TraceSummary:
    decode = trace.decode
    return TraceSummary(
        model=trace.model,
        rows=len(trace),
        turns=len(np.unique(trace.turn)),
        prefill_tokens=_tokens(trace, ~decode),
        decode_tokens=_tokens(trace, decode),
        distinct_experts=distinct,
        hit_pct=_hit_pct(trace),
        drop_pct=_decode_pct(trace, None if trace.dropped is None else trace.dropped == 1),
        substitute_pct=_decode_pct(
            trace, None if trace.substituted is None else trace.substituted != NOT_SUBSTITUTED
        ),
        read_mib=(
            None if trace.expert_bytes is None else float(trace.expert_bytes[decode].sum()) / MIB
        ),
    )


def _tokens(trace: RouteTrace, rows: np.ndarray) -> int:
    pairs = np.stack([trace.turn[rows], trace.step[rows]])
    return int(np.unique(pairs, axis=1).shape[1])


def _hit_pct(trace: RouteTrace) -> float | None:
    if trace.residency is None:
        return None
    looked_up = trace.decode.copy()
    if trace.dropped is not None:
        looked_up &= trace.dropped == 0
    if trace.substituted is not None:
        looked_up &= trace.substituted == NOT_SUBSTITUTED
    hits = looked_up & np.isin(trace.residency, (HIT, PREFETCHED))
    return percent(hits.sum(), looked_up.sum())


def _decode_pct(trace: RouteTrace, rows: np.ndarray | None) -> float | None:
    if rows is None:
        return None
    return percent((rows & trace.decode).sum(), trace.decode.sum())


def _notes(trace: RouteTrace) -> list[str]:
    notes = [f"The random policy's dice start from seed {RANDOM_SEED}."]
    if not trace.decode.any():
        notes.append("The trace has no decoded tokens, so there is nothing to count hits over.")
        return notes
    if trace.residency is None:
        notes.append(
            "Unavailable: saved reads of the static curves, as the trace has no column 'residency'."
        )
    weights = weights_missing(trace)
    if weights:
        notes.append(f"Unavailable: masses, dropping and substitution, as {weights}.")
    if trace.dropped is not None and (trace.dropped == 1).any():
        notes.append(
            "Recorded with dropping on: the residency is that of a cache without the dropped "
            "experts. The simulations use every expert that the router chose."
        )
    if trace.substituted is not None and (trace.substituted != NOT_SUBSTITUTED).any():
        notes.append(
            "Recorded with substitution on: the simulations use the experts that the router chose."
        )
    return notes
