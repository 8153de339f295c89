"""How fast this disk gives a model's experts to N parallel readers.

Measures with blocks as large as one expert's slice, spread over the whole file, past the page
cache where the filesystem allows it. Bounded in bytes and in time, because a phone's flash and a
workstation's NVMe differ by a factor of thirty.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ReadError

PAGE = mmap.PAGESIZE
LANE_COUNTS = (1, 2, 4, 8)
MOST_BYTES = 512 * 2**20
MOST_SECONDS = 2.0
_NEAR_BEST = 0.95

_O_DIRECT = getattr(os, "O_DIRECT", 0)


@dataclass(frozen=True)
class LaneRate:
    """What `lanes` parallel readers got."""

    lanes: int
    bytes_read: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        """The rate over all lanes together."""
        return self.bytes_read / self.seconds if self.seconds > 0 else 0.0


def measure(
    path: Path,
    block_bytes: int,
    *,
    o_direct: bool,
    lane_counts: Sequence[int] = LANE_COUNTS,
    progress: Callable[[str, float], None] | None = None,
) -> list[LaneRate]:
    """Read blocks of about `block_bytes` from `path` with each number of lanes in turn.

    Raises ReadError if the file cannot be read.
    """
    rates = []
    try:
        size = path.stat().st_size
        block = max(PAGE, min(-(-block_bytes // PAGE) * PAGE, size // PAGE * PAGE))
        for done, lanes in enumerate(lane_counts):
            if progress:
                progress("measuring the disk", done / len(lane_counts))
            rates.append(_measure_one(path, block, size, lanes, o_direct))
    except OSError as error:
        raise ReadError(f"{path}: cannot be read: {error.strerror}") from None
    return rates


def fewest_good_lanes(rates: Sequence[LaneRate]) -> int:
    """The smallest number of lanes that comes within 5 % of the best rate."""
    best = max(rate.bytes_per_s for rate in rates)
    return min(rate.lanes for rate in rates if rate.bytes_per_s >= _NEAR_BEST * best)


def _measure_one(path: Path, block: int, size: int, lanes: int, o_direct: bool) -> LaneRate:
    offsets = _spread_offsets(block, size, start=lanes)
    deadline = time.perf_counter() + MOST_SECONDS
    totals = [0] * lanes
    failures: list[OSError] = []

    def work(lane: int) -> None:
        try:
            totals[lane] = _read_blocks(path, block, offsets, deadline, o_direct)
        except OSError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(lane,), daemon=True) for lane in range(lanes)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return LaneRate(lanes, sum(totals), time.perf_counter() - started)


def _spread_offsets(block: int, size: int, start: int) -> Iterator[int]:
    """Offsets all over the file, other ones for each `start`; a list, so threads may share it."""
    slots = max(1, size // block)
    count = max(1, MOST_BYTES // block)
    # A stride without common factors with most counts visits the file far from where it was.
    stride = max(1, int(slots * 0.618)) | 1
    return iter([(start * 7 + number * stride) % slots * block for number in range(count)])


def _read_blocks(
    path: Path, block: int, offsets: Iterator[int], deadline: float, o_direct: bool
) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (_O_DIRECT if o_direct else 0))
    total = 0
    try:
        with mmap.mmap(-1, block) as memory:
            for offset in offsets:
                if not o_direct:
                    # Else the page cache is measured, not the disk.
                    os.posix_fadvise(fd, offset, block, os.POSIX_FADV_DONTNEED)
                total += os.preadv(fd, (memory,), offset)
                if time.perf_counter() >= deadline:
                    break
    finally:
        os.close(fd)
    return total
