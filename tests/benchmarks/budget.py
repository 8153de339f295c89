"""Cache budgets inside a memory limit: which is fastest, and whether `auto` finds and holds it.

`sweep`: tokens per second for each budget inside one limit, and where `auto` landed. `pressure`:
another process takes memory inside the limit during an answer and gives it back; the budget over
time. See README.md in this folder. Each cell is a process of its own from a cold page cache.
"""

from __future__ import annotations

import argparse
import json
import mmap
import sys
import time
from collections.abc import Sequence
from itertools import accumulate
from statistics import median
from typing import Any

from tests.benchmarks.bench import rate
from tests.benchmarks.limits import drop_page_cache, memory_group, run_limited, start

TIMEOUT_S = 90.0
TAKEN_WITHIN_S = 2.0
"""So fast the other process takes its memory."""
Cell = dict[str, Any]


def sweep(command: Sequence[str], limit_mib: int, budgets: Sequence[int], rounds: int) -> None:
    """Run every budget and `auto`, in turn, and say how near `auto` is to the best."""
    sizes = [*map(str, budgets), "auto"]
    found: dict[str, list[Cell]] = {size: [] for size in sizes}
    for _ in range(rounds):
        for size in sizes:
            cell = _limited([*command, f"stream.cache-mb={size}"], limit_mib)
            if cell is not None:
                found[size].append(cell)
    print(f"limit {limit_mib} MiB, {rounds} rounds")
    print("| budget MiB | tok/s | hits | peak own memory MiB |\n| --- | --- | --- | --- |")
    for size, cells in found.items():
        print(_row(size, cells, rounds))
    rates = {size: median(map(rate, cells)) for size, cells in found.items() if cells}
    best = max((size for size in rates if size != "auto"), key=lambda size: rates[size])
    landed = median(cell["budget_mib"] for cell in found["auto"])
    print(
        f"auto took {landed:.0f} MiB: {rates['auto'] / rates[best]:.2f} of the best "
        f"({best} MiB, {rates[best]:.2f} tok/s)"
    )


def _limited(command: Sequence[str], limit_mib: int) -> Cell | None:
    """One cell; None if it was killed or not done in time."""
    try:
        out = run_limited(command, limit_mib, TIMEOUT_S).out
    except RuntimeError:
        return None
    return None if out is None else dict(json.loads(out))


def _row(size: str, cells: Sequence[Cell], rounds: int) -> str:
    if not cells:
        return f"| {size} | killed, or not done after {TIMEOUT_S:.0f} s | | |"
    speed, peak = median(map(rate, cells)), median(cell["peak_anon_mib"] for cell in cells)
    hits = median(cell["cache_hit_pct"] for cell in cells)
    lost = f" ({rounds - len(cells)} of {rounds} killed)" if len(cells) < rounds else ""
    name = size if size != "auto" else f"auto: {median(cell['budget_mib'] for cell in cells):.0f}"
    each = ", ".join(f"{rate(cell):.2f}" for cell in cells)
    return f"| {name} | {speed:.2f} ({each}){lost} | {hits:.1f} % | {peak:.0f} |"


def pressure(command: Sequence[str], limit_mib: int, taken_mib: int, hold_s: float) -> None:
    """Let another process take memory inside the limit during an answer, and give it back."""
    drop_page_cache()
    with memory_group(limit_mib) as group:
        cell = start([*command, "stream.cache-mb=auto"], group)
        began = time.perf_counter()
        time.sleep(15)
        other = [sys.executable, "-m", "tests.benchmarks.budget", "--hog"]
        hog = start([*other, str(taken_mib), str(hold_s)], group)
        taking = time.perf_counter() - began
        hog.communicate()
        given_back = time.perf_counter() - began
        out, err = cell.communicate(timeout=300)
    if cell.returncode or hog.returncode:
        print(f"KILLED: engine {cell.returncode}, the other {hog.returncode}\n{err}")
        return
    _over_time(json.loads(out), taking, given_back, taken_mib)


def _over_time(cell: Cell, taking: float, given_back: float, taken_mib: int) -> None:
    spent = [wall + rest for wall, rest in zip(cell["wall_ms"], cell["overhead_ms"], strict=True)]
    ends = [cell["first_token_s"] + ms / 1000 for ms in accumulate(spent)]
    budgets = cell["budgets_mib"]
    print(
        f"{taken_mib} MiB taken from {taking:.1f} s on, given back at {given_back:.1f} s; no kill"
    )
    print("| s | budget MiB | tok/s |\n| --- | --- | --- |")
    step = 2.0
    for number in range(int(ends[-1] / step) + 1):
        inside = [i for i, end in enumerate(ends) if number * step <= end < (number + 1) * step]
        if inside:
            speed = 1000 * len(inside) / sum(spent[i] for i in inside)
            print(f"| {number * step:.0f} | {budgets[inside[-1]]:.0f} | {speed:.2f} |")
    print("\n".join(note for note in cell["notes"] if "cache" in note))


def hog(taken_mib: int, hold_s: float) -> None:
    """Take memory within some two seconds, hold it, give it back."""
    began, piece = time.perf_counter(), bytes([1]) * (1 << 20)
    with mmap.mmap(-1, taken_mib << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        for number in range(taken_mib):
            memory.write(piece)
            early = TAKEN_WITHIN_S * number / taken_mib - (time.perf_counter() - began)
            time.sleep(max(0.0, early))
        time.sleep(hold_s)


def main() -> None:
    """Run the benchmark."""
    if sys.argv[1:2] == ["--hog"]:
        hog(int(sys.argv[2]), float(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("trace")
    parser.add_argument("--only", choices=("sweep", "pressure"))
    parser.add_argument("--limit", type=int, default=8000, metavar="MIB")
    parser.add_argument("--budgets", default="3000,4000,5000,5500,6000,6400", metavar="MIB,…")
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--take", type=int, default=2500, metavar="MIB")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    cell = [sys.executable, "-m", "tests.benchmarks.cell", args.model, args.trace]
    if args.only != "pressure":
        budgets = [int(size) for size in args.budgets.split(",")]
        sweep([*cell, str(args.tokens), *args.set], args.limit, budgets, args.rounds)
    if args.only != "sweep":
        pressure([*cell, "320", *args.set], args.limit, args.take, 8)


if __name__ == "__main__":
    main()
