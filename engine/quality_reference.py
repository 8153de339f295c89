"""The lossless run's logits, kept on disk while other settings are compared with them.

Rows of float32 in a file without a name, which vanishes with the process however that ends. It is
written and read by position, not mapped: on a full disk a write fails with an error, where touching
a mapped page would kill the process.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.closing import Closing
from engine.errors import InputError, ReadError

Logits = npt.NDArray[np.float32]

ROOM_LEFT_BYTES = 64 << 20
"""Of the disk, left to everybody else."""


class LogitsFile(Closing):
    """`n_rows` rows of `n_vocab` float32 logits in a nameless file under `folder`."""

    def __init__(self, n_rows: int, n_vocab: int, folder: Path) -> None:
        """Reserve the space. Raises InputError where there is no room, or no folder to write in."""
        self.n_vocab = n_vocab
        self.n_bytes = n_rows * n_vocab * 4
        try:
            folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(folder).free
            if free < self.n_bytes + ROOM_LEFT_BYTES:
                raise InputError(_no_room(folder, self.n_bytes, free))
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  closed by close()
        except OSError as error:
            raise InputError(
                f"{folder}: the lossless run's logits cannot be kept there: {error.strerror}; "
                "give another folder (--scratch)"
            ) from None
        try:
            os.posix_fallocate(self._file.fileno(), 0, max(1, self.n_bytes))
        except OSError as error:
            self._file.close()
            raise InputError(
                f"{folder}: {self.n_bytes / 2**20:.0f} MiB for the lossless run's logits cannot be "
                f"reserved: {error.strerror}; measure fewer tokens (--tokens) or give another "
                "folder (--scratch)"
            ) from None

    def write(self, row: int, logits: Logits) -> None:
        """Keep one row. Raises ReadError if the disk fails."""
        raw = np.ascontiguousarray(logits, np.float32).tobytes()
        try:
            done = os.pwrite(self._file.fileno(), raw, row * len(raw))
        except OSError as error:
            raise ReadError(f"keeping the lossless run's logits failed: {error.strerror}") from None
        if done != len(raw):
            raise ReadError("keeping the lossless run's logits failed: the disk is full")

    def read(self, row: int) -> Logits:
        """A row that was written. Raises ReadError if the disk fails."""
        size = self.n_vocab * 4
        try:
            raw = os.pread(self._file.fileno(), size, row * size)
        except OSError as error:
            raise ReadError(f"reading the lossless run's logits failed: {error.strerror}") from None
        if len(raw) != size:
            raise ReadError("reading the lossless run's logits failed: the file ended early")
        return np.frombuffer(raw, np.float32)

    def close(self) -> None:
        """Give the space back."""
        self._file.close()


def _no_room(folder: Path, needed: int, free: int) -> str:
    return (
        f"{folder}: the lossless run's logits need {needed / 2**20:.0f} MiB and {free / 2**20:.0f} "
        "MiB are free; measure fewer tokens (--tokens) or give another folder (--scratch)"
    )
