"""Where we stand: every path in one interleaved run, beside what disk and processor allow.

    python -m tests.benchmarks.bounds MODEL TRACE [--quick] [--json FILE]
    python -m tests.benchmarks.bounds MODEL TRACE --only context|growth

Memory-mapped llama.cpp, our serial path, our best lossless and our best lossy path under memory
limits, each cell a process of its own from a cold page cache, beside fio and the resident model.
See README.md in this folder.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.bench import WARM_UP, Bench
from tests.benchmarks.bounds_cells import FEWEST_FOR_RATE, PATHS, Plan, measure
from tests.benchmarks.bounds_figures import LimitSummary
from tests.benchmarks.bounds_report import report
from tests.benchmarks.long_answers import context_costs, memory_growth

FULL = Plan((6000, 8000, 12000), rounds=3, mapped_timeout_s=60, fio_s=4, budget_s=870)
QUICK = Plan((8000,), rounds=1, mapped_timeout_s=30, fio_s=3, budget_s=120)
FULL_TOKENS, QUICK_TOKENS = 60, 40


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.tokens is not None and options.tokens < FEWEST_FOR_RATE:
        parser.error(f"--tokens: at least {FEWEST_FOR_RATE}, of which {WARM_UP} are not compared")
    if shutil.which("fio") is None:
        print("fio is not installed: without it there is no bound to compare with")
        return 1
    began = time.monotonic()
    tokens = options.tokens or (QUICK_TOKENS if options.quick else FULL_TOKENS)
    bench = Bench(options.model, options.trace, tokens, options.rounds or 1)
    if options.only == "context":
        document = context_costs(bench)
    elif options.only == "growth":
        document = memory_growth(bench)
    else:
        document = everything(bench, _plan(options), began)
    took_s = time.monotonic() - began
    if options.only:
        print(f"{took_s / 60:.1f} minutes in all")
    if options.json is not None:
        options.json.write_text(json.dumps({"took_s": took_s, **document}, indent=1))
    return 0


def everything(bench: Bench, plan: Plan, began: float) -> dict[str, Any]:
    """Run all paths under all limits, print the tables, and return all figures."""
    rounds = measure(bench, plan)
    for line in report(bench, plan, rounds, time.monotonic() - began):
        print(line)
    return {
        "tokens": bench.tokens,
        "paths": PATHS,
        "rounds": len(rounds),
        "resident_ms": [done.resident.token_ms for done in rounds],
        "limits": [LimitSummary(limit, rounds).document() for limit in plan.limits_mib],
    }


def _plan(options: argparse.Namespace) -> Plan:
    usual = QUICK if options.quick else FULL
    return Plan(
        options.limits or usual.limits_mib,
        options.rounds or usual.rounds,
        options.mapped_timeout or usual.mapped_timeout_s,
        usual.fio_s,
        60 * options.minutes if options.minutes else usual.budget_s,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a GGUF of qwen3-30b-a3b's shape")
    parser.add_argument("trace", help="a route trace of that shape, or - for random tokens")
    parser.add_argument("--quick", action="store_true", help="one limit, one round: 2 minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, too")
    parser.add_argument("--only", choices=["context", "growth"], help="a section of its own")
    parser.add_argument("--limits", type=int, nargs="+", metavar="MIB")
    parser.add_argument("--rounds", type=int, help="at most so many")
    parser.add_argument("--tokens", type=int, help="of each answer")
    parser.add_argument("--minutes", type=float, help="no round begins that would end later")
    parser.add_argument(
        "--mapped-timeout", type=float, metavar="SECONDS", help="for memory-mapped llama.cpp"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
