"""A long prompt at real size, against what the disk and the processor need for it.

`python -m tests.benchmarks.prompt MODEL [--tokens 512] [--rounds 3]`

The bound is the longer of two times: reading the union of what the prompt routes to once, at fio's
rate in the same round, and computing it with the model wholly in memory. Prompts are random words,
so their tokens route as the synthetic router has it. Each cell is a process of its own from a cold
page cache; the resident one answers twice, and the second time counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks.bench import MIB, SERIAL_READS, fio_mib_s, read_block_bytes
from tests.benchmarks.bounds_report import table
from tests.benchmarks.cell import opened
from tests.benchmarks.context_cell import random_prompts
from tests.benchmarks.limits import run_limited

PATHS = {
    "serial": SERIAL_READS,
    "overlap": ["stream.prefetch=off"],
    "prefetch": [],
}
"""`prefetch` is the default: it reads the next layer's experts while one is computed."""
TIMEOUT_S = 600.0


def cell(model: str, n_prompt: int, settings: list[str]) -> None:
    """Prefill one prompt twice in this process; print how long it took and what it read."""
    with opened(model, "-", settings) as session:
        (prompt,) = random_prompts(session, [n_prompt])
        for _ in range(2):
            session.clear()
            session.generate(prompt, n_predict=1)
        turns = session.metrics.turns
        print(
            json.dumps(
                {
                    "n_prompt": turns[0].n_prompt,
                    "prefill_s": [turn.prefill_s for turn in turns],
                    "read_mib": [turn.prefill_read_bytes / MIB for turn in turns],
                }
            )
        )


def measured(model: Path, n_prompt: int, settings: list[str]) -> dict[str, Any]:
    """A cell in a process of its own. Raises RuntimeError if it was not done in time."""
    command = [sys.executable, "-m", "tests.benchmarks.prompt", str(model), *settings]
    finished = run_limited([*command, "--cell", "--tokens", str(n_prompt)], None, TIMEOUT_S)
    if finished.out is None:
        raise RuntimeError(f"a prompt of {n_prompt} tokens was not done after {TIMEOUT_S:.0f} s")
    return dict(json.loads(finished.out))


def compare(model: Path, n_prompt: int, rounds: int, cache_mib: int) -> None:
    """Print each path's time to prefill, and its ratio to the bound."""
    rows: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in PATHS}
    for number in range(rounds):
        disk = fio_mib_s(model, read_block_bytes(model), 4)
        resident = measured(model, n_prompt, ["stream.enabled=false"])
        compute_s = resident["prefill_s"][1]
        for name in list(PATHS)[:: 1 if number % 2 == 0 else -1]:
            ours = measured(model, n_prompt, [f"stream.cache-mb={cache_mib}", *PATHS[name]])
            rows[name].append(
                (ours["prefill_s"][0], ours["read_mib"][0], ours["read_mib"][0] / disk, compute_s)
            )
        print(f"round {number + 1} of {rounds} done", file=sys.stderr)
    print(
        f"{resident['n_prompt']} prompt tokens, cache {cache_mib} MiB; bound: the longer of "
        "reading once at fio's rate and computing with the model in memory"
    )
    lines = [["path", "prefill s", "MiB read", "disk s", "compute s", "x bound", "rounds"]]
    for name, cells in rows.items():
        ratios = [took / max(disk_s, compute_s) for took, _, disk_s, compute_s in cells]
        middle = [median(column) for column in zip(*cells, strict=True)]
        lines.append(
            [
                name,
                *(f"{middle[place]:.{digits}f}" for place, digits in enumerate((1, 0, 1, 1))),
                f"{median(ratios):.2f}",
                ", ".join(f"{ratio:.2f}" for ratio in ratios),
            ]
        )
    for line in table(lines):
        print(line)


def main() -> None:
    """Run the comparison, or one cell of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("settings", nargs="*", help="of a cell: key=value")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache-mb", type=int, default=5800)
    parser.add_argument("--cell", action="store_true", help="one cell, in this process")
    arguments = parser.parse_args()
    if arguments.cell:
        cell(str(arguments.model), arguments.tokens, arguments.settings)
    else:
        compare(arguments.model, arguments.tokens, arguments.rounds, arguments.cache_mb)


if __name__ == "__main__":
    main()
