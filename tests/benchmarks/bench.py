"""What the benchmarks at real size share: cells, their figures, and the disk's rate by fio."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.model_file import ModelFile
from tests.benchmarks.limits import drop_page_cache, run_limited

MIB = 1 << 20
WARM_UP = 10
"""Tokens at the start of an answer that are not compared: the cache fills."""
MEASURED = slice(WARM_UP, None)
"""The rows of a cell that are compared."""
SERIAL_READS = ["stream.overlap=off", "stream.prefetch=off"]
"""Settings under which reads are timed by themselves: nothing is computed meanwhile."""

Cell = dict[str, Any]
"""What one run printed (`tests/benchmarks/cell.py`)."""


@dataclass(frozen=True)
class Attempt:
    """A run that may not have been done in time."""

    cell: Cell | None
    """None: it was ended before it was done."""
    token_s: list[float]
    """When each token came, in seconds from the start, of an unfinished run too."""
    lasted_s: float
    """From the same start to the run's end."""


@dataclass
class Bench:
    """What every section needs."""

    model: Path
    trace: str
    tokens: int
    rounds: int

    def attempt(
        self,
        settings: Sequence[str],
        limit_mib: int | None = None,
        timeout_s: float = 300,
        *,
        answered_before: bool = False,
    ) -> Attempt:
        """Run one cell as a process of its own, from a cold page cache.

        With `answered_before` the same answer comes once unmeasured first, so that every page is
        in place. Raises RuntimeError if it fails by itself.
        """
        command = [sys.executable, "-m", "tests.benchmarks.cell", str(self.model), self.trace]
        command += [str(self.tokens), *settings, *["--answered-before"] * answered_before]
        finished = run_limited(command, limit_mib, timeout_s)
        times = progress_times(finished.err)
        begun = times[0] if times else finished.ended
        return Attempt(
            None if finished.out is None else json.loads(finished.out),
            [moment - begun for moment in times[1:]],
            finished.ended - begun,
        )

    def cell(
        self, settings: Sequence[str], limit_mib: int | None = None, timeout_s: float = 300
    ) -> Cell | None:
        """Run one cell; None if it was not done in time."""
        return self.attempt(settings, limit_mib, timeout_s).cell


PROGRESS = "tuiwork-cell-at "
"""What begins a line on a cell's standard error that says when it began, then when tokens came."""


def progress_times(err: str) -> list[float]:
    """The moments that a cell reported, on the monotonic clock."""
    lines = (line for line in err.splitlines(keepends=True) if line.startswith(PROGRESS))
    # A run that was ended may leave half a line.
    return [float(line[len(PROGRESS) :]) for line in lines if line.endswith("\n")]


def token_ms(cell: Cell, part: slice = MEASURED) -> np.ndarray:
    """Milliseconds of each token, everything between tokens included."""
    figures = np.array([cell["wall_ms"][part], cell["overhead_ms"][part]])
    spent: np.ndarray = figures.sum(axis=0)
    return spent


def rate(cell: Cell, skip: int = WARM_UP) -> float:
    """Tokens per second after the first `skip`, everything between tokens included."""
    spent = token_ms(cell, slice(skip, None))
    return float(1000 * len(spent) / spent.sum())


def hit_pct(cell: Cell, part: slice = MEASURED) -> float:
    """Hits among the experts that were looked up, in percent."""
    hits, misses = sum(cell["hits"][part]), sum(cell["misses"][part])
    return float(100 * hits / max(1, hits + misses))


def read_mib(cell: Cell, part: slice = MEASURED) -> float:
    """MiB read per token."""
    return float(np.mean(cell["read_bytes"][part])) / MIB


def read_rate(cell: Cell, part: slice = MEASURED) -> float:
    """MiB/s while the callback waited for reads. Of serial paths only: others read meanwhile."""
    read = sum(cell["read_bytes"][part]) / MIB
    return float(read / max(sum(cell["io_ms"][part]) / 1000, 1e-9))


def read_block_bytes(model: Path) -> int:
    """The size of one read: a slice of the model's first bank, in whole blocks of the disk."""
    tensors = ModelFile.open(model).tensors.values()
    bank = next(tensor for tensor in tensors if len(tensor.shape) == 3)
    return bank.nbytes // bank.shape[2] // 4096 * 4096


def fio_mib_s(model: Path, block: int, depth: int, seconds: int = 6) -> float:
    """MiB/s of `depth` readers of `block` bytes each from all over the file, past the cache."""
    drop_page_cache()
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                *("fio", "--name=reads", f"--filename={model}", "--readonly", "--direct=1"),
                *("--rw=randread", f"--bs={block}", f"--numjobs={depth}", "--ioengine=psync"),
                *("--group_reporting", f"--runtime={seconds}", "--time_based"),
                "--output-format=json",
            ],
            capture_output=True,
            check=True,
            cwd=folder,
        )
    return float(json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"]) / MIB
