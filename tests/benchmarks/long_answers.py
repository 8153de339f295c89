"""What a long context and a long answer cost: sections of `bounds` that take their own time."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from tests.benchmarks.bench import Bench, hit_pct, read_mib, token_ms
from tests.benchmarks.bounds_cells import MAPPED, PATHS, say
from tests.benchmarks.bounds_report import table
from tests.benchmarks.limits import run_limited

CONTEXTS = (1, 500, 1000, 2000, 4000)
"""Prompt tokens in front of the answer."""
CONTEXT_TOKENS = 24
SETTLING = 8
"""Tokens at the start of an answer that are left out: the prompt took the cache."""
CACHE_MIB = 5800
GROWTH_CACHE_MIB = 3800
GROWTH_TOKENS = 2000
CHECKPOINTS = (100, 500, 1000, 2000)
ALLOWED_GROWTH_MIB = 16
"""From the first checkpoint to the last: a row of figures is kept for every token."""
TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class ContextCost:
    """The mean token at one context length, beside the resident model's at the same."""

    n_context: int
    wall_ms: float
    wait_ms: float
    bookkeeping_ms: float
    rest_ms: float
    read_mib: float
    hit_pct: float
    resident_ms: float

    @property
    def rest_ratio(self) -> float:
        """The rest against the resident model's token: attention is in both."""
        return self.rest_ms / self.resident_ms


def context_costs(bench: Bench) -> dict[str, Any]:
    """Print the cost of a token by context length, and return the figures of all rounds."""
    rounds = []
    for number in range(bench.rounds):
        say(f"round {number + 1}: resident")
        resident = _context_cell(bench, PATHS[MAPPED], answered_before=True)
        say(f"round {number + 1}: streamed")
        ours = _context_cell(bench, [f"stream.cache-mb={CACHE_MIB}"])
        pairs = zip(ours["answers"], resident["answers"], strict=True)
        rounds.append([_context_cost(mine, theirs) for mine, theirs in pairs])
    print(
        f"cost per token by context, cache {CACHE_MIB} MiB, best lossless, {CONTEXT_TOKENS} tokens "
        f"behind each prompt, the first {SETTLING} left out; resident: the model wholly in memory "
        "at the same context"
    )
    names = ("context", "ms/token", "= wait", "+ bookk.", "+ rest", "MiB/token", "hits %")
    rows = [[*names, "resident ms", "rest / resident", "rounds"]]
    rows += [_context_row([done[place] for done in rounds]) for place in range(len(CONTEXTS))]
    for line in table(rows):
        print(line)
    return {"context": [[vars(cost) for cost in done] for done in rounds]}


def _context_cell(
    bench: Bench, settings: Sequence[str], *, answered_before: bool = False
) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.benchmarks.context_cell", str(bench.model), bench.trace]
    command += [str(CONTEXT_TOKENS), ",".join(map(str, CONTEXTS)), *settings]
    finished = run_limited([*command, *["--answered-before"] * answered_before], None, TIMEOUT_S)
    if finished.out is None:
        raise RuntimeError(f"the answers at long context were not done after {TIMEOUT_S:.0f} s")
    return dict(json.loads(finished.out))


def _context_cost(ours: dict[str, Any], resident: dict[str, Any]) -> ContextCost:
    part = slice(SETTLING, None)
    wall = float(token_ms(ours, part).mean())
    wait = float(np.mean(ours["stall_ms"][part]))
    bookkeeping = float(np.mean(ours["mgmt_ms"][part]))
    return ContextCost(
        # In the middle of what is measured.
        n_context=ours["n_prompt"] + (SETTLING + len(ours["wall_ms"])) // 2,
        wall_ms=wall,
        wait_ms=wait,
        bookkeeping_ms=bookkeeping,
        rest_ms=wall - wait - bookkeeping,
        read_mib=read_mib(ours, part),
        hit_pct=hit_pct(ours, part),
        resident_ms=float(token_ms(resident, part).mean()),
    )


def _context_row(rounds: Sequence[ContextCost]) -> list[str]:
    names = ("wall_ms", "wait_ms", "bookkeeping_ms", "rest_ms", "read_mib", "hit_pct")
    figures = [median(getattr(one, name) for one in rounds) for name in (*names, "resident_ms")]
    ratios = [one.rest_ratio for one in rounds]
    return [
        str(rounds[0].n_context),
        *(f"{figure:.1f}" for figure in figures),
        f"{median(ratios):.2f}",
        ", ".join(f"{ratio:.2f}" for ratio in ratios),
    ]


def memory_growth(bench: Bench) -> dict[str, Any]:
    """Print anonymous memory through one long answer, and return it by token."""
    say(f"one answer of {GROWTH_TOKENS} tokens")
    long = replace(bench, tokens=GROWTH_TOKENS + 1)
    cell = long.cell([f"stream.cache-mb={GROWTH_CACHE_MIB}"], timeout_s=TIMEOUT_S)
    if cell is None:
        raise RuntimeError(f"the long answer was not done after {TIMEOUT_S:.0f} s")
    anon, evicted = cell["anon_mib"], np.cumsum(cell["evictions"])
    print(f"anonymous memory in one answer of {len(anon)} tokens, cache {GROWTH_CACHE_MIB} MiB")
    rows = [["token", "MiB", "since the first", "evictions so far", "tok/s since the one before"]]
    before = 0
    for token in CHECKPOINTS:
        speed = 1000 / token_ms(cell, slice(before, token)).mean()
        memory = anon[token - 1]
        growth = f"{memory - anon[CHECKPOINTS[0] - 1]:+.1f}"
        rows.append([str(token), f"{memory:.1f}", growth, str(evicted[token - 1]), f"{speed:.2f}"])
        before = token
    for line in table(rows):
        print(line)
    print(_growth_verdict(anon, bool(evicted[CHECKPOINTS[0] - 1])))
    return {"growth": {"anon_mib": anon, "evictions": cell["evictions"]}}


def _growth_verdict(anon: Sequence[float], cache_was_full: bool) -> str:
    growth = anon[CHECKPOINTS[-1] - 1] - anon[CHECKPOINTS[0] - 1]
    if not cache_was_full:
        return (
            f"UNMEASURED: the cache was not full at token {CHECKPOINTS[0]}, so that it may still "
            "have been filling"
        )
    if growth > ALLOWED_GROWTH_MIB:
        return f"GROWS by {growth:.1f} MiB; {ALLOWED_GROWTH_MIB} would be allowed"
    return f"does not grow ({growth:+.1f} MiB, {ALLOWED_GROWTH_MIB} allowed)"
