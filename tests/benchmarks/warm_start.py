"""The first answer after opening, with and without a warm start, with and without idle time before.

`python -m tests.benchmarks.warm_start MODEL TRACE`. What earlier sessions are said to have used is
the second half of the trace's decoded tokens; the answer that is measured routes as its prompt and
its first half do. Each cell is a process of its own from a cold page cache; see README.md here.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from engine import popularity
from engine.model_file import ModelFile
from engine.popularity import Popularity
from engine.traces import DECODE, read_route_trace
from tests.benchmarks.bench import MIB, hit_pct, rate
from tests.benchmarks.cell import opened, prompt_of, row_figures
from tests.benchmarks.limits import run_limited

TIMEOUT_S = 120.0


def cell(model: str, trace: str, idle_s: float, tokens: int, settings: Sequence[str]) -> None:
    """Open, wait, answer; print one JSON line."""
    started = time.perf_counter()
    first: list[float] = []
    with opened(model, trace, settings) as session:
        open_s = time.perf_counter() - started
        prompt = prompt_of(session)
        time.sleep(idle_s)
        session.look()
        before = session.counts()
        asked = time.perf_counter()
        session.generate(
            prompt,
            n_predict=tokens + 1,
            on_token=lambda _: first.append(time.perf_counter() - asked),
        )
        after = session.counts()
        assert before is not None and after is not None
        figures = row_figures(session.metrics.rows)
        print(
            json.dumps(
                {
                    **figures,
                    "open_s": open_s,
                    "first_token_s": first[0],
                    "prefill_mib": session.metrics.turns[0].prefill_read_bytes / MIB,
                    "before_mib": before.warmed_bytes / MIB,
                    "warmed_mib": after.warmed_bytes / MIB,
                    "warmed": after.warmed,
                    "used": after.warmed_used,
                }
            )
        )


def remember(model: str, trace: str) -> None:
    """Write what an earlier session used, as the second half of a trace has it."""
    file, routes = ModelFile.open(model), read_route_trace(Path(trace))
    decoded = routes.phase == DECODE
    later = decoded & (routes.step >= (routes.step[decoded].max() + 1) // 2)
    uses = np.zeros((file.experts.n_layer, file.experts.n_expert), np.float32)
    for layer, experts in zip(routes.layer[later], routes.expert[later], strict=True):
        uses[layer, experts] += 1
    passes = len(np.unique(routes.step[later]))
    name = popularity.identity(file.paths, file.sizes, file.data_offsets)
    path = popularity.folder() / (name + popularity.SUFFIX)
    popularity.write(path, Popularity(uses, float(passes)))


def main() -> None:
    """Run the benchmark, or one cell of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("trace")
    parser.add_argument("--cache", type=int, default=4000, metavar="MIB")
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--idle", default="0,3", metavar="S,…")
    parser.add_argument(
        "--unlike", action="store_true", help="answer with random routes: what is known is wrong"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--cell", type=float, metavar="IDLE_S", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell is not None:
        cell(args.model, args.trace, args.cell, args.tokens, args.set)
        return
    with tempfile.TemporaryDirectory() as home:
        os.environ["XDG_CACHE_HOME"] = home
        remember(args.model, args.trace)
        files = {path: path.read_bytes() for path in popularity.folder().iterdir()}
        found: dict[tuple[float, str], list[dict[str, Any]]] = {}
        for number in range(args.rounds):
            for idle in map(float, args.idle.split(",")):
                for warm in ("false", "true") if number % 2 == 0 else ("true", "false"):
                    command = [sys.executable, "-m", "tests.benchmarks.warm_start"]
                    routes = "-" if args.unlike else args.trace
                    command += [args.model, routes, "--cell", str(idle)]
                    command += ["--tokens", str(args.tokens)]
                    settings = [f"stream.cache-mb={args.cache}", f"stream.warm-start={warm}"]
                    command += [f"--set={setting}" for setting in [*settings, *args.set]]
                    out = run_limited(command, None, TIMEOUT_S).out
                    if out is not None:
                        found.setdefault((idle, warm), []).append(json.loads(out))
                    for path, content in files.items():  # every cell knows the same
                        path.write_bytes(content)
        report(found)


def report(found: dict[tuple[float, str], list[dict[str, Any]]]) -> None:
    """A table of medians, and the single first tokens and rates below it."""
    print(
        "| idle s | warm start | open s | first token s | tok/s | hits % | prompt read MiB |",
        end="",
    )
    print(" warmed MiB before, after | warmed, used |\n" + "| --- " * 9 + "|")
    for (idle, warm), cells in sorted(found.items()):
        figures = [
            f"{idle:g}",
            "on" if warm == "true" else "off",
            f"{median(c['open_s'] for c in cells):.2f}",
            f"{median(c['first_token_s'] for c in cells):.2f}",
            f"{median(rate(c, 0) for c in cells):.2f}",
            f"{median(hit_pct(c, slice(None)) for c in cells):.1f}",
            f"{median(c['prefill_mib'] for c in cells):.0f}",
            f"{median(c['before_mib'] for c in cells):.0f}, "
            f"{median(c['warmed_mib'] for c in cells):.0f}",
            f"{median(c['warmed'] for c in cells):.0f}, {median(c['used'] for c in cells):.0f}",
        ]
        print("| " + " | ".join(figures) + " |")
    for (idle, warm), cells in sorted(found.items()):
        singles = ", ".join(f"{c['first_token_s']:.2f} s {rate(c, 0):.2f}" for c in cells)
        print(f"idle {idle:g}, {warm}: {singles}")


if __name__ == "__main__":
    main()
