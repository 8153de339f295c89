"""The engine at real size: against memory-mapped llama.cpp, against fio, against the floor.

See README.md in this folder. Every comparison runs its two sides in turn (A B A B), each cell in a
process of its own from a cold page cache, and prints ratios; absolute figures are this machine's.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from engine.model_file import ModelFile
from tests.benchmarks.bench import (
    SERIAL_READS,
    WARM_UP,
    Bench,
    fio_mib_s,
    hit_pct,
    rate,
    read_block_bytes,
    read_rate,
)

HEADROOM_MIB = 2200
"""What a limit must leave beside the cache: dense weights, KV, compute buffers, the interpreter."""


def against_mapped(bench: Bench, limit_mib: int, timeout_s: float) -> None:
    """Streamed against memory-mapped llama.cpp under a memory limit."""
    cache = limit_mib - HEADROOM_MIB
    mapped: list[float] = []
    whole: list[float] = []
    bound: list[float] = []
    streamed: list[dict[str, Any]] = []
    for _ in range(bench.rounds):
        plain = bench.cell(["stream.enabled=false"], limit_mib, timeout_s)
        if plain is None:
            # Not done with all tokens: it is slower than this.
            bound.append(bench.tokens / timeout_s)
        else:
            mapped.append(rate(plain))
            whole.append(rate(plain, 0))
        ours = bench.cell([f"stream.cache-mb={cache}"], limit_mib, timeout_s)
        assert ours is not None
        streamed.append(ours)
    ours_rate = median(rate(cell) for cell in streamed)
    if mapped:
        theirs = median(mapped + bound)
        print(
            f"limit {limit_mib} MiB: mapped {theirs:.2f} tok/s, streamed (cache {cache}) "
            f"{ours_rate:.2f} tok/s: {ours_rate / theirs:.1f} times after {WARM_UP} tokens; "
            f"{_whole_ratio(streamed, whole):.1f} times over the whole answer"
        )
    else:
        print(
            f"limit {limit_mib} MiB: mapped not done after {timeout_s:.0f} s "
            f"(< {bound[0]:.2f} tok/s, load and prompt included), streamed (cache {cache}) "
            f"{ours_rate:.2f} tok/s: more than {ours_rate / bound[0]:.1f} times"
        )
    for cell in streamed:
        allowed = cell["budget_mib"] + cell["dense_mib"] + _kv_mib(bench) + 400
        print(
            f"  memory: peak {cell['peak_anon_mib']:.0f} MiB anonymous, "
            f"budget + dense + KV + 400 = {allowed:.0f}; open {cell['open_s']:.1f} s, "
            f"hits {hit_pct(cell):.1f} %"
        )


def _whole_ratio(streamed: Sequence[dict[str, Any]], mapped: Sequence[float]) -> float:
    return median(rate(cell, 0) for cell in streamed) / median(mapped)


def against_fio(bench: Bench, lanes: int) -> None:
    """Our read rate with a small cache against fio's, same block size, same depth, in turn."""
    if shutil.which("fio") is None:
        print("reads: fio is not installed, nothing to compare with")
        return
    block = read_block_bytes(bench.model)
    ratios, ours_all, theirs_all = [], [], []
    for _ in range(max(3, bench.rounds)):
        theirs = fio_mib_s(bench.model, block, lanes)
        cell = bench.cell(["stream.cache-mb=2000", f"stream.io-threads={lanes}", *SERIAL_READS])
        assert cell is not None
        ours = read_rate(cell)
        ratios.append(ours / theirs)
        ours_all.append(ours)
        theirs_all.append(theirs)
    print(
        f"reads: {lanes} lanes, {block} bytes a read: ours {median(ours_all):.0f} MiB/s, fio "
        f"{median(theirs_all):.0f} MiB/s: {100 * median(ratios):.0f} % "
        f"({', '.join(f'{100 * ratio:.0f}' for ratio in ratios)})"
    )


def against_floor(bench: Bench, cache_mib: int) -> None:
    """A warm cache against the resident model: the rest of a token, and what the seam costs."""
    rests, shares, floors = [], [], []
    for _ in range(max(3, bench.rounds)):
        resident = bench.attempt(["stream.enabled=false"], answered_before=True).cell
        ours = bench.cell([f"stream.cache-mb={cache_mib}", *SERIAL_READS])
        assert resident is not None and ours is not None
        tail = slice(len(ours["wall_ms"]) // 2, None)
        wall, io, mgmt = (np.array(ours[key])[tail] for key in ("wall_ms", "stall_ms", "mgmt_ms"))
        floor = float(np.median(np.array(resident["wall_ms"])[tail]))
        rests.append(float(np.median(wall - io - mgmt)) / floor)
        shares.append(float(np.median(mgmt) / np.median(wall)))
        floors.append(floor)
        hits = hit_pct(ours, tail)
    print(
        f"floor: resident {median(floors):.1f} ms/token; streamed at {hits:.1f} % hits: the rest "
        f"is {100 * median(rests):.1f} % of it ({', '.join(f'{100 * r:.1f}' for r in rests)}), "
        f"bookkeeping {100 * median(shares):.2f} % of the token"
    )


def opening(bench: Bench) -> None:
    """Open to first token of a short prompt, against the time the disk needs for the bytes."""
    for _ in range(bench.rounds):
        rate_mib_s = fio_mib_s(bench.model, 1 << 20, 4)
        cell = bench.cell(["stream.cache-mb=5800"])
        assert cell is not None
        read_mib = cell["dense_mib"] + cell["prefill_read_MiB"]
        needed = read_mib / rate_mib_s
        print(
            f"opening: {cell['first_token_s']:.1f} s to the first token, {read_mib:.0f} MiB need "
            f"{needed:.1f} s at fio's {rate_mib_s:.0f} MiB/s: {cell['first_token_s'] - needed:.1f} "
            f"s more (open {cell['open_s']:.1f} s)"
        )


def _kv_mib(bench: Bench) -> float:
    file = ModelFile.open(bench.model)
    heads = int(file.arch_value("attention.head_count_kv"))
    width = int(file.arch_value("attention.key_length", 128))
    layers = int(file.arch_value("block_count"))
    return float(2 * 2 * layers * heads * width * 4096 / (1 << 20))


def main() -> None:
    """Run the sections that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a GGUF of qwen3-30b-a3b's shape")
    parser.add_argument("trace", help="a route trace of that shape, or - for random routing")
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--limits", type=int, nargs="*", default=[8000, 12000])
    parser.add_argument("--timeout", type=float, default=150)
    parser.add_argument("--only", choices=["mapped", "fio", "floor", "opening"])
    arguments = parser.parse_args()
    bench = Bench(arguments.model, arguments.trace, arguments.tokens, arguments.rounds)
    if arguments.only in (None, "fio"):
        against_fio(bench, 4)
    if arguments.only in (None, "floor"):
        against_floor(bench, 20000)
    if arguments.only in (None, "opening"):
        opening(bench)
    if arguments.only in (None, "mapped"):
        for limit in arguments.limits:
            against_mapped(bench, limit, arguments.timeout)


if __name__ == "__main__":
    main()
