"""Runs compared: every pair's ratio with its interval, and what there is to doubt. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from engine.comparability import Caveat, caveats, unchecked
from engine.metrics_reader import TokenMetrics
from engine.run_figures import Run
from engine.stats import FEWEST_TOKENS, Interval

_NO_SETTINGS = frozenset(
    {"model", "path", "name", "version", "llama_cpp", "cpu", "token_demand_bytes"}
    | {"layer_demand_bytes", "expert_bytes_total", "dense_bytes"}
)
"""Preamble keys that are no settings; what differs in them is a caveat's matter."""


@dataclass(frozen=True)
class Pair:
    """How many times faster run `b` is than run `a`; runs are counted from 0."""

    a: int
    b: int
    ratio: float
    independent: Interval
    """The ratio's interval, tokens drawn one by one."""
    blocked: Interval
    """The ratio's interval, tokens drawn in moving blocks."""
    decode_only: bool
    """Whether only decode times are compared, because one file lacks what lies between them."""
    enough_tokens: bool
    caveats: tuple[str, ...]
    """Kinds of the caveats that concern these two."""

    @property
    def separated(self) -> bool:
        """Whether the runs differ by more than chance: both intervals leave out 1."""
        leave_out = not (self.independent.contains(1.0) or self.blocked.contains(1.0))
        return self.enough_tokens and leave_out


@dataclass(frozen=True)
class Comparison:
    """All that is said about some runs."""

    runs: tuple[Run, ...]
    pairs: tuple[Pair, ...]
    caveats: tuple[Caveat, ...]
    unchecked: dict[str, tuple[int, ...]]
    """What could not be compared because these runs' files do not tell it."""
    differences: dict[str, tuple[str, ...]]
    """Settings that differ, each with its value in every run."""


def compare_runs(files: Sequence[TokenMetrics], skip: int = 0) -> Comparison:
    """Compare runs without their first `skip` tokens. Raises InputError if a run has no others."""
    runs = tuple(Run(metrics, skip) for metrics in files)
    found = caveats(runs)
    pairs = tuple(
        compare_pair(runs, a, b, found) for a, b in itertools.combinations(range(len(runs)), 2)
    )
    return Comparison(runs, pairs, tuple(found), unchecked(runs), _differences(runs))


def compare_pair(runs: Sequence[Run], a: int, b: int, found: Sequence[Caveat] = ()) -> Pair:
    """How run `b` compares with run `a`; `found` are the caveats among all of them."""
    before, after = runs[a], runs[b]
    decode_only = before.has_loop_times != after.has_loop_times
    single, blocked = (
        before.resampled(blocks=blocks, decode_only=decode_only).against(
            after.resampled(blocks=blocks, decode_only=decode_only)
        )
        for blocks in (False, True)
    )
    return Pair(
        a=a,
        b=b,
        ratio=single.ratio,
        independent=single.interval,
        blocked=blocked.interval,
        decode_only=decode_only,
        enough_tokens=min(len(before), len(after)) >= FEWEST_TOKENS,
        caveats=tuple(caveat.kind for caveat in found if caveat.concerns(a, b)),
    )


def _differences(runs: Sequence[Run]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for key in runs[0].metrics.preamble if runs else ():
        values = tuple(run.metrics.preamble.get(key) for run in runs)
        known = tuple(value for value in values if value is not None)
        if key not in _NO_SETTINGS and len(known) == len(values) and len(set(known)) > 1:
            found[key] = known
    return found
