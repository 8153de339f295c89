"""Dropping cold experts at real size: what the replay predicted, and what was measured.

The recorded routings and weights are forced, so the router's choices are the trace's, and what is
dropped depends only on the rule and on what the cache holds. See README.md in this folder.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.model_file import ModelFile
from engine.replay import replay
from engine.traces import read_route_trace
from tests.benchmarks.bench import Bench, rate

FRACTIONS = (0.0, 0.5, 0.75, 1.0)


def main() -> None:
    """Print one line per budget and fraction."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--budgets", type=int, nargs="*", default=[2000, 4000])
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    trace = read_route_trace(arguments.trace)
    n_tokens = len(np.unique(trace.step[trace.decode])) + 1
    bench = Bench(arguments.model, str(arguments.trace), n_tokens, arguments.rounds)
    # The trace's model had another mix of quantizations: predict for this model's entry sizes.
    sizes = ModelFile.open(arguments.model).experts.entry_bytes
    resized = replace(trace, model=replace(trace.model, expert_bytes=sizes))
    predicted = replay(resized, budgets=arguments.budgets)
    print("budget  frac  dropped % (replay)  mass % (replay)  MiB/token (replay)  tok/s  ratio")
    for budget in arguments.budgets:
        measured: dict[float, list[dict[str, Any]]] = {frac: [] for frac in FRACTIONS}
        for _ in range(arguments.rounds):
            for frac in FRACTIONS:
                settings = [
                    f"stream.cache-mb={budget}",
                    f"routing.drop-cold-experts={frac}",
                    # The replay knows of no guesses.
                    "stream.prefetch=off",
                ]
                cell = bench.cell(settings)
                assert cell is not None
                measured[frac].append(cell)
        lossless = float(np.median([rate(cell) for cell in measured[0.0]]))
        for frac in FRACTIONS:
            cell = measured[frac][0]
            speed = float(np.median([rate(c) for c in measured[frac]]))
            routed = sum(cell["routed"])
            n_routings = routed / trace.model.n_expert_used
            point = next(
                (p for p in predicted.drop_dynamic if p.frac == frac and p.budget_mib == budget),
                None,
            )
            told = (
                (point.drop_pct, point.mass_lost_pct, point.read_mib_per_token)
                if point is not None
                else (None, None, None)
            )
            mass = 100 * sum(cell["mass_discarded"]) / n_routings
            read_mib = sum(cell["read_bytes"]) / 2**20 / len(cell["wall_ms"])
            print(
                f"{budget:6} {frac:5.2f}  {100 * sum(cell['dropped']) / routed:9.2f} "
                f"({_shown(told[0])})  {mass:7.2f} ({_shown(told[1])})  {read_mib:8.1f} "
                f"({_shown(told[2])})  {speed:5.2f}  {speed / lossless:5.2f}"
            )


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    main()
