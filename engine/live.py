"""Live counters in memory that the engine's process and the app's share.

The memory is a file without a name, handed over as a descriptor: nothing has to be unlinked, and
it is gone with the last process that holds it, however that process ends. The engine allocates
its counters here (`Arena.allocate` is an `engine.counters.Allocate`) and sends the table of what
lies where; the app looks without asking, at its own rate.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from math import prod

import numpy as np

from engine.counters import Counts
from engine.messages import CounterTable

CAPACITY_BYTES = 64 << 20
"""Some thirty times the counters of 94 layers of 512 experts. Untouched pages cost nothing."""

_ALIGNMENT = 64


def new_memory() -> int:
    """A descriptor of nameless shared memory, all zero; the caller closes it."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("tuiwork-counters")
    else:
        # Unlinked from the start, so it vanishes like a memfd.
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, CAPACITY_BYTES)
    return fd


class Arena:
    """The engine's side: hands out arrays one behind the other."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, CAPACITY_BYTES)
        self._used = 0
        self.table: CounterTable = {}

    def allocate(self, name: str, shape: tuple[int, ...]) -> Counts:
        """Zeroed counters that the app can see. Raises ValueError for a name that is taken."""
        if name in self.table:
            raise ValueError(f"there are counters called {name} already")
        n_bytes = prod(shape) * 8
        if self._used + n_bytes > CAPACITY_BYTES:
            raise MemoryError(f"counters {name} of {n_bytes} bytes do not fit the shared memory")
        self.table[name] = (self._used, shape)
        counts = _array(self._map, self._used, shape)
        self._used += -(-n_bytes // _ALIGNMENT) * _ALIGNMENT
        return counts

    def reset(self) -> None:
        """Forget and zero everything, for the next model; nobody may still write."""
        self._map[: self._used] = bytes(self._used)
        self._used = 0
        self.table = {}


class LiveView:
    """The app's side: the counters of one opened model by name, read-only.

    Arrays change while they are looked at; each cell is right or a moment old. After the engine
    is gone they stay as it left them.
    """

    def __init__(self, fd: int, table: CounterTable) -> None:
        memory = mmap.mmap(fd, CAPACITY_BYTES, access=mmap.ACCESS_READ)
        self._arrays = {
            name: _array(memory, offset, shape) for name, (offset, shape) in table.items()
        }

    def __getitem__(self, name: str) -> Counts:
        """The live array itself, not a copy."""
        return self._arrays[name]

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def names(self) -> list[str]:
        """What there is; empty for a model that does not stream, except for the totals."""
        return list(self._arrays)

    def snapshot(self) -> dict[str, Counts]:
        """Copies of everything, to look at more than once or to keep."""
        return {name: array.copy() for name, array in self._arrays.items()}


def _array(memory: mmap.mmap, offset: int, shape: tuple[int, ...]) -> Counts:
    flat = np.frombuffer(memory, np.int64, prod(shape), offset)
    return flat.reshape(shape)
